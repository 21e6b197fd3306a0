package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"os/signal"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	echov1 "github.com/grpcretry/grpcretry/proto/echo/v1"
)

// This file is what a service's process does. The process runs this program, which starts itself again
// with a config in its environment. The two are connected by pipes. On its standard output the process writes a line
// for each event: the address on which it listens, each change of D's state, and each attempt that
// reaches D. A pipe keeps what was written to it, so nothing is lost when the process is killed. From
// its standard input, D reads the state to change to. The standard input ends when the program that
// started the process ends, however that happens; the process then ends too, on every operating system.

const serviceVariable = "GRPCRETRY_LAYERS_SERVICE"

// A serviceConfig says what a service does.
type serviceConfig struct {
	Name    string // A, B, C or D
	Setup   string // of A, B and C
	Next    string // the address of the service to call, empty for D
	Address string // on which to listen, empty for any
	OTLP    string // the address of the receiver of traces, empty for none
}

// serviceProcess is all that a service's process does.
func serviceProcess(config string) error {
	signal.Ignore(os.Interrupt) // Ctrl-C reaches all processes of a terminal; the one that started this one decides
	var c serviceConfig
	if err := json.Unmarshal([]byte(config), &c); err != nil {
		return fmt.Errorf("%s: %w", serviceVariable, err)
	}
	if err := serve(&c, os.Stdin, os.Stdout); err != nil {
		return fmt.Errorf("service %s: %w", c.Name, err)
	}
	return nil
}

// serve runs the service until in ends.
func serve(c *serviceConfig, in io.Reader, out io.Writer) (err error) {
	tracing, err := startTracing(c.OTLP, c.Name)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, tracing.stop()) }()
	listener, err := listen(c.Address)
	if err != nil {
		return err
	}
	if c.Next == "" {
		d := &last{out: out, seen: map[int64]int{}}
		s := grpc.NewServer(tracing.serverOptions()...)
		echov1.RegisterEchoServiceServer(s, d)
		return serveUntil(s, listener, out, func() { d.obey(in) })
	}
	setup, err := setupNamed(c.Setup)
	if err != nil {
		return err
	}
	cc, err := dial(c.Next, append(setup.client(tracing.options()...), tracing.dialOptions()...)...)
	if err != nil {
		return err
	}
	defer cc.Close()
	opts := tracing.serverOptions()
	if setup.server != nil {
		opts = append(opts, setup.server()...)
	}
	s := grpc.NewServer(opts...)
	echov1.RegisterEchoServiceServer(s, &middle{next: echov1.NewEchoServiceClient(cc)})
	return serveUntil(s, listener, out, func() { _, _ = io.Copy(io.Discard, in) })
}

// serveUntil serves until wait returns.
func serveUntil(s *grpc.Server, listener net.Listener, out io.Writer, wait func()) error {
	go func() {
		wait()
		s.Stop()
	}()
	fmt.Fprintln(out, "listening", listener.Addr())
	if err := s.Serve(listener); !errors.Is(err, grpc.ErrServerStopped) { // stopped before it could begin
		return err
	}
	return nil
}

// listen listens on the address or, if it is empty, on a free port of loopback. That port lies below
// those that systems choose for outgoing connections: otherwise a service that reconnects to D while
// D is away may be given D's port.
func listen(address string) (net.Listener, error) {
	if address != "" {
		return net.Listen("tcp", address)
	}
	const lowest, highest, tries = 20000, 32000, 1000
	var err error
	for range tries {
		var l net.Listener
		if l, err = net.Listen("tcp", fmt.Sprintf("127.0.0.1:%d", lowest+rand.IntN(highest-lowest))); err == nil {
			return l, nil
		}
	}
	return nil, fmt.Errorf("no free port from %d to %d in %d tries: %w", lowest, highest, tries, err)
}

// middle is A, B or C: it responds with what the next service responds.
type middle struct {
	echov1.UnimplementedEchoServiceServer
	next echov1.EchoServiceClient
}

// Echo calls the next service. Its error is the response as it is.
func (m *middle) Echo(ctx context.Context, req *echov1.EchoRequest) (*echov1.EchoResponse, error) {
	return m.next.Echo(ctx, req)
}

// A state is what D does with attempts.
type state string

const (
	up    state = "up"    // it responds
	down  state = "down"  // it fails all attempts
	flaky state = "flaky" // it fails as many attempts of each call as failuresOf says
)

// failuresOf returns how many attempts of a call D fails when it is flaky. It is fewer than C may
// make, so retries can rescue every call.
func failuresOf(call int64) int {
	switch {
	case call%20 == 0:
		return 2
	case call%10 == 5:
		return 1
	default:
		return 0
	}
}

// last is D.
type last struct {
	echov1.UnimplementedEchoServiceServer
	out io.Writer // gets one Write for each attempt and for each change of the state

	mu    sync.Mutex
	state state         // guarded by mu; empty means up
	seen  map[int64]int // guarded by mu: the attempts of each call that arrived while D was flaky
}

// obey does what the lines say until they end.
func (d *last) obey(in io.Reader) {
	for lines := bufio.NewScanner(in); lines.Scan(); {
		d.mu.Lock()
		d.state = state(lines.Text())
		fmt.Fprintln(d.out, lines.Text(), time.Now().UnixNano())
		d.mu.Unlock()
	}
}

// Echo writes the attempt down, and responds as the state says.
func (d *last) Echo(_ context.Context, req *echov1.EchoRequest) (*echov1.EchoResponse, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	fmt.Fprintln(d.out, "attempt", time.Now().UnixNano(), req.GetSequence())
	if d.fails(req.GetSequence()) {
		return nil, status.Errorf(codes.Unavailable, "D is %s", d.state)
	}
	return &echov1.EchoResponse{}, nil
}

// fails reports whether an attempt of the call fails. d.mu is held.
func (d *last) fails(call int64) bool {
	switch d.state {
	case down:
		return true
	case flaky:
		d.seen[call]++
		return d.seen[call] <= failuresOf(call)
	default:
		return false
	}
}
