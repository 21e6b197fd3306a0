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
	"sync/atomic"
	"time"

	"google.golang.org/grpc"

	echov1 "github.com/grpcretry/grpcretry/proto/echo/v1"
)

// This file holds both ends of a server process, which is this program, started again with
// an address in its environment. The two talk over pipes. On its standard output the
// process says "ready", "listening", and then one line for each attempt that reaches it; a
// pipe keeps what was written to it, so nothing is lost when the process is killed. Its
// standard input says when to listen, and ends when this program does, however that
// happens: the process then ends too, on every operating system.

const addressVariable = "GRPCRETRY_RESTART_ADDRESS"

// responseTime is how long a server takes, so that a kill finds calls in flight.
const responseTime = 20 * time.Millisecond

// serve is what a server process does.
func serve(address string, in io.Reader, out io.Writer) error {
	fmt.Fprintln(out, "ready")
	commands := bufio.NewReader(in)
	if _, err := commands.ReadString('\n'); err != nil {
		return nil // the program that started this one has ended
	}
	listener, err := net.Listen("tcp", address)
	if err != nil {
		return err
	}
	s := grpc.NewServer()
	echov1.RegisterEchoServiceServer(s, &server{address: address, out: out})
	go func() {
		_, _ = io.Copy(io.Discard, commands)
		s.Stop()
	}()
	fmt.Fprintln(out, "listening")
	return s.Serve(listener)
}

// A server writes down each attempt that reaches it.
type server struct {
	echov1.UnimplementedEchoServiceServer
	address string
	out     io.Writer // gets one Write for each attempt
}

// Echo responds with the address of the server.
func (s *server) Echo(ctx context.Context, req *echov1.EchoRequest) (*echov1.EchoResponse, error) {
	fmt.Fprintln(s.out, time.Now().UnixNano(), req.GetSequence())
	select {
	case <-time.After(responseTime):
		return &echov1.EchoResponse{Message: s.address}, nil
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// An arrival is an attempt that reached a server.
type arrival struct {
	at   time.Time
	call int64 // the call's number, 0 for one that is not measured
}

// A process is a server in a process of its own.
type process struct {
	address  string
	cmd      *exec.Cmd
	commands io.WriteCloser // the standard input of the process
	said     chan string    // "ready" and "listening"; closed at the end of its output

	read     chan struct{} // closed likewise
	arrivals []arrival     // complete once read is closed
	err      error         // likewise: output that makes no sense
}

// startProcess starts a server that is ready to listen, but does not do so yet.
func startProcess(ctx context.Context, address string) (*process, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	p := &process{address: address, cmd: exec.Command(self), said: make(chan string, 2), read: make(chan struct{})}
	p.cmd.Env = append(os.Environ(), addressVariable+"="+address)
	p.cmd.Stderr = os.Stderr
	if p.commands, err = p.cmd.StdinPipe(); err != nil {
		return nil, err
	}
	out, err := p.cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := p.cmd.Start(); err != nil {
		return nil, err
	}
	go p.readAll(out)
	if err := p.await(ctx, "ready"); err != nil {
		p.kill()
		return nil, err
	}
	return p, nil
}

func (p *process) readAll(out io.Reader) {
	defer close(p.read)
	defer close(p.said)
	for lines := bufio.NewScanner(out); lines.Scan(); {
		switch line := lines.Text(); line {
		case "ready", "listening":
			p.said <- line
		default:
			var nanoseconds, call int64
			if _, err := fmt.Sscan(line, &nanoseconds, &call); err != nil {
				p.err = errors.Join(p.err, fmt.Errorf("the server at %s wrote %q: %w", p.address, line, err))
				continue
			}
			p.arrivals = append(p.arrivals, arrival{time.Unix(0, nanoseconds), call})
		}
	}
}

// errNotListening is usually a port that somebody else has taken in the meantime.
var errNotListening = errors.New("the server does not listen")

// listen has the process accept connections from now on.
func (p *process) listen(ctx context.Context) error {
	if _, err := io.WriteString(p.commands, "listen\n"); err != nil {
		return err
	}
	if err := p.await(ctx, "listening"); err != nil {
		return fmt.Errorf("%w: %w", errNotListening, err)
	}
	return nil
}

func (p *process) await(ctx context.Context, word string) error {
	select {
	case said := <-p.said:
		if said != word {
			return fmt.Errorf("the server process for %s said %q, want %q", p.address, said, word)
		}
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// kill ends the process the hard way, and returns when it has ended and everything it wrote
// has been read. A second kill does nothing.
func (p *process) kill() {
	_ = p.cmd.Process.Kill() // an error says that it has ended
	<-p.read
	_ = p.cmd.Wait() // "signal: killed"
	_ = p.commands.Close()
}

// freeAddresses returns loopback addresses on which nobody listens. Their ports lie below
// those that systems choose for outgoing connections: otherwise a client that reconnects
// may be given the port of a server that is away.
func freeAddresses(n int) ([]string, error) {
	const lowest, highest, tries = 20000, 32000, 1000
	var addresses []string
	for range tries {
		if len(addresses) == n {
			return addresses, nil
		}
		port := lowest + (firstPort+portsTried.Add(1))%(highest-lowest)
		l, err := net.Listen("tcp", fmt.Sprintf("127.0.0.1:%d", port))
		if err != nil {
			continue
		}
		addresses = append(addresses, l.Addr().String())
		if err := l.Close(); err != nil {
			return nil, err
		}
	}
	return nil, fmt.Errorf("no %d free ports from %d to %d in %d tries", n, lowest, highest, tries)
}

// Trials that run side by side must not choose the same port, nor should two programs.
var (
	firstPort  = rand.Int64N(1 << 20)
	portsTried atomic.Int64
)
