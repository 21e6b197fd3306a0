package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	echov1 "github.com/grpcretry/grpcretry/proto/echo/v1"
)

// responseTime is how long a server takes, so that a kill finds calls in flight.
const responseTime = 50 * time.Millisecond

// A server may be told to fail.
type server struct {
	echov1.UnimplementedEchoServiceServer

	mu       sync.Mutex
	failing  bool          // guarded by mu
	rejected map[int64]int // guarded by mu: how often it rejected each call
}

// Echo responds after responseTime or, while the server fails, immediately with UNAVAILABLE.
func (s *server) Echo(ctx context.Context, req *echov1.EchoRequest) (*echov1.EchoResponse, error) {
	if s.reject(req.GetSequence()) {
		return nil, status.Error(codes.Unavailable, "out of order")
	}
	return &echov1.EchoResponse{}, pause(ctx, responseTime)
}

func (s *server) reject(call int64) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.failing {
		s.rejected[call]++
	}
	return s.failing
}

// attemptsPerCall counts the attempts that were rejected, per call of which at least one was.
func (s *server) attemptsPerCall() float64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	attempts := 0
	for _, n := range s.rejected {
		attempts += n
	}
	return float64(attempts) / float64(max(len(s.rejected), 1))
}

// A listening is a server in this process.
type listening struct {
	server
	grpc    *grpc.Server
	address string
}

func listen() (*listening, error) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	l := &listening{server: server{rejected: map[int64]int{}}, grpc: grpc.NewServer(), address: listener.Addr().String()}
	echov1.RegisterEchoServiceServer(l.grpc, l)
	go func() { _ = l.grpc.Serve(listener) }() // until close
	return l, nil
}

func newBrownout(context.Context) (target, error) { return listen() }

func (l *listening) addresses() []string { return []string{l.address} }
func (l *listening) fail()               { l.setFailing(true) }
func (l *listening) close()              { l.grpc.Stop() }

func (l *listening) restore(context.Context) error {
	l.setFailing(false)
	return nil
}

func (l *listening) setFailing(failing bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.failing = failing
}

// nobody is a target at whose address there is no server.
type nobody struct{ address string }

func newNobody(context.Context) (target, error) {
	address, err := freeAddress()
	return nobody{address}, err
}

func (n nobody) addresses() []string         { return []string{n.address} }
func (nobody) fail()                         {}
func (nobody) restore(context.Context) error { return nil }
func (nobody) close()                        {}

// A killed target has a server that is killed, another one that takes its address, and perhaps a
// replica to which nothing happens.
type killed struct {
	first, second *process
	replica       *listening // nil for none
}

func newKilled(ctx context.Context, replica bool) (_ target, err error) {
	address, err := freeAddress()
	if err != nil {
		return nil, err
	}
	k := &killed{}
	defer func() {
		if err != nil {
			k.close()
		}
	}()
	if replica {
		if k.replica, err = listen(); err != nil {
			return nil, err
		}
	}
	if k.first, err = startProcess(address); err != nil {
		return nil, err
	}
	if k.second, err = startProcess(address); err != nil {
		return nil, err
	}
	return k, k.first.listen(ctx)
}

func (k *killed) addresses() []string {
	if k.replica == nil {
		return []string{k.first.address}
	}
	return []string{k.first.address, k.replica.address}
}

func (k *killed) fail() { k.first.kill() }

func (k *killed) restore(ctx context.Context) error { return k.second.listen(ctx) }

func (k *killed) close() {
	for _, p := range []*process{k.first, k.second} {
		if p != nil {
			p.kill()
		}
	}
	if k.replica != nil {
		k.replica.close()
	}
}

// A process is a server in a process of its own: this program, started again with an address in its
// environment. It listens when it reads a line, and writes one when it does. Its standard
// input ends when this program does, however that happens: the process then ends too, on every
// operating system.
type process struct {
	address string
	cmd     *exec.Cmd
	in      io.WriteCloser
	out     *bufio.Reader
}

const addressVariable = "GRPCRETRY_OUTAGES_ADDRESS"

// serve is what the process does.
func serve(address string, in io.Reader, out io.Writer) error {
	commands := bufio.NewReader(in)
	if _, err := commands.ReadString('\n'); err != nil {
		return nil // the program that started this one has ended
	}
	listener, err := net.Listen("tcp", address)
	if err != nil {
		return err
	}
	s := grpc.NewServer()
	echov1.RegisterEchoServiceServer(s, &server{})
	go func() {
		_, _ = io.Copy(io.Discard, commands)
		s.Stop()
	}()
	fmt.Fprintln(out, "listening")
	return s.Serve(listener)
}

// startProcess starts a server that does not listen yet.
func startProcess(address string) (*process, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	p := &process{address: address, cmd: exec.Command(self)}
	p.cmd.Env = append(os.Environ(), addressVariable+"="+address)
	p.cmd.Stderr = os.Stderr
	if p.in, err = p.cmd.StdinPipe(); err != nil {
		return nil, err
	}
	out, err := p.cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	p.out = bufio.NewReader(out)
	if err := p.cmd.Start(); err != nil {
		return nil, err
	}
	return p, nil
}

// listen has the process accept connections from now on.
func (p *process) listen(ctx context.Context) error {
	defer context.AfterFunc(ctx, func() { _ = p.cmd.Process.Kill() })() // ends its output
	if _, err := io.WriteString(p.in, "listen\n"); err != nil {
		return err
	}
	if _, err := p.out.ReadString('\n'); err != nil {
		return fmt.Errorf("the server at %s does not listen: %w", p.address, errors.Join(err, ctx.Err()))
	}
	return nil
}

// kill ends the process the hard way, and returns when it has ended. A second kill does nothing.
func (p *process) kill() {
	_ = p.cmd.Process.Kill() // an error says that it has ended
	_ = p.cmd.Wait()         // "signal: killed"
}

// freeAddress returns a loopback address on which nobody listens. Its port lies below those that
// systems choose for outgoing connections: otherwise a client that reconnects may be given
// the port of a server that is away.
func freeAddress() (string, error) {
	const lowest, highest, tries = 20000, 32000, 1000
	for range tries {
		port := lowest + (firstPort+portsTried.Add(1))%(highest-lowest)
		l, err := net.Listen("tcp", fmt.Sprintf("127.0.0.1:%d", port))
		if err == nil {
			return l.Addr().String(), l.Close()
		}
	}
	return "", fmt.Errorf("no free port from %d to %d in %d tries", lowest, highest, tries)
}

// Outages that are side by side must not choose the same port, nor should two programs.
var (
	firstPort  = rand.Int64N(1 << 20)
	portsTried atomic.Int64
)
