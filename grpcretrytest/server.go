package grpcretrytest

import (
	"context"
	"errors"
	"maps"
	"net"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/grpcretry/grpcretry"
	"github.com/grpcretry/grpcretry/internal/inside"
)

// A Server is a gRPC server with the services of the program under test, which fails as a script says.
// [NewServer] and [Serve] start one; it stops when the test ends. It belongs to that test: what is wrong
// with a script or a timeline is the test's failure. It is safe for concurrent use.
//
// The Calls are those on connections of [Server.Dial] and [Server.DialWith].
type Server struct {
	*Calls
	t        testing.TB
	server   *grpc.Server
	listener *listener
	script   *script
}

// NewServer starts a server with the services that register registers:
//
//	server := grpcretrytest.NewServer(t, func(s grpc.ServiceRegistrar) { shoppb.RegisterShopServer(s, shop) })
//
// In a bubble of [testing/synctest], call it within the bubble. The options are those of
// [grpc.NewServer], and [OverTCP]. The script works as the first interceptor of the chain, so the others do
// not see an attempt that the script fails; one that is set with [grpc.UnaryInterceptor] or
// [grpc.StreamInterceptor] runs before the chain, and sees it, but no panic of
// the handler if the step has AfterSending or AfterReceiving.
func NewServer(t testing.TB, register func(grpc.ServiceRegistrar), opts ...grpc.ServerOption) *Server {
	t.Helper()
	return Serve(t, func(own ...grpc.ServerOption) *grpc.Server {
		s := grpc.NewServer(own...)
		register(s)
		return s
	}, opts...)
}

// Serve does the same with the server that build returns, for programs that have a function to build theirs.
// build must pass the options on to [grpc.NewServer].
func Serve(t testing.TB, build func(...grpc.ServerOption) *grpc.Server, opts ...grpc.ServerOption) *Server {
	t.Helper()
	l, err := newListener(slices.Contains(opts, OverTCP()))
	if err != nil {
		t.Fatalf("grpcretrytest: %v", err)
	}
	settle := 20 * time.Millisecond
	if inBubble() {
		settle = 1 // virtual time passes when everything else is done
	}
	s := &Server{
		Calls:    newCalls(t),
		t:        t,
		listener: l,
		script:   &script{listener: l, settle: settle, on: map[string][]Step{}, in: map[string]*queue{}},
	}
	s.server = build(append(s.script.options(), opts...)...)
	served := make(chan struct{})
	go func() {
		defer close(served)
		if err := s.server.Serve(l); err != nil && !errors.Is(err, grpc.ErrServerStopped) {
			t.Errorf("grpcretrytest: Serve: %v", err)
		}
	}()
	t.Cleanup(func() {
		s.server.Stop()
		s.script.handlers.Wait()
		<-served
	})
	return s
}

// OverTCP makes the server listen on a TCP port of the loopback interface. The default is a connection in
// memory. TCP needs real time: in a bubble of [testing/synctest] it would hang.
func OverTCP() grpc.ServerOption { return overTCP{} }

type overTCP struct{ grpc.EmptyServerOption }

// inBubble reports whether the test runs in virtual time.
func inBubble() (yes bool) {
	defer func() { yes = recover() == nil }()
	synctest.Wait() // panics outside of a bubble
	return
}

// On scripts the attempts of each call: step n is what happens to attempt n, and the handler answers the
// attempts after the last step. The pattern is "/pkg.Service/Method", "/pkg.Service/", or "/" for every
// method; the narrowest counts. The number of an attempt is the one that the client sends, see
// [grpcretry.PreviousAttempts]; to a client that sends none, each attempt is the first.
//
// A pattern without such a method or service ends the test. A second On with the same pattern replaces the
// steps; without steps, the handler answers. Steps that no attempt needs are no failure, because [Calls.Want]
// shows the attempts that were made.
func (s *Server) On(pattern string, steps ...Step) {
	s.t.Helper()
	s.check("On", pattern, steps)
	s.script.mu.Lock()
	defer s.script.mu.Unlock()
	s.script.on[pattern] = slices.Clone(steps)
}

// Next scripts the attempts that arrive next, whatever their calls and numbers: each takes one step. It takes
// precedence over On, for patterns see there. A second Next adds steps.
func (s *Server) Next(pattern string, steps ...Step) {
	s.t.Helper()
	s.check("Next", pattern, steps)
	s.script.mu.Lock()
	defer s.script.mu.Unlock()
	q := s.script.in[pattern]
	if q == nil {
		q = &queue{}
		s.script.in[pattern] = q
	}
	q.steps = append(q.steps, steps...)
}

func (s *Server) check(caller, pattern string, steps []Step) {
	s.t.Helper()
	if err := check(s.server.GetServiceInfo(), pattern, steps); err != nil {
		s.t.Fatalf("grpcretrytest: %s %q: %v", caller, pattern, err)
	}
}

func names(services map[string]grpc.ServiceInfo) string {
	return strings.Join(slices.Sorted(maps.Keys(services)), ", ")
}

func methodNames(service grpc.ServiceInfo) string {
	var all []string
	for _, m := range service.Methods {
		all = append(all, m.Name)
	}
	slices.Sort(all)
	return strings.Join(all, ", ")
}

// Down closes all connections and refuses new ones, like a server that restarts, until [Server.Up]. It
// returns when clients have noticed. A second Down changes nothing.
func (s *Server) Down() {
	s.listener.goDown()
	<-time.After(s.script.settle)
}

// Up accepts connections again. gRPC reconnects when its own backoff is over: 1s, 1.6s, 2.56s, … after
// each failure to connect. That has no jitter on connections of this package, and 20% otherwise;
// [grpc.WithConnectParams] sets another backoff.
func (s *Server) Up() {
	s.t.Helper()
	if err := s.listener.goUp(); err != nil {
		s.t.Fatalf("grpcretrytest: Up: %v", err)
	}
}

// Dial returns a connection to the server whose calls a Retrier of opts makes, and records them. Each wait has
// the middle of its jitter, as with Jitter(0.5), unless opts say otherwise.
func (s *Server) Dial(opts ...grpcretry.Option) *grpc.ClientConn {
	s.t.Helper()
	r, err := grpcretry.New(append([]grpcretry.Option{Jitter(0.5)}, opts...)...)
	if err != nil {
		s.t.Fatalf("grpcretrytest: Dial: %v", err)
	}
	return s.DialWith(r)
}

// DialWith does the same for a Retrier that the program under test has made, so its jitter is the Retrier's.
// Further options are for the connection: a chained interceptor among them runs below the Retrier's.
func (s *Server) DialWith(r *grpcretry.Retrier, opts ...grpc.DialOption) *grpc.ClientConn {
	s.t.Helper()
	s.observe(r)
	return s.Conn(append(append(s.interceptors(), r.DialOptions()...), opts...)...)
}

// Conn returns a connection with the given options only. Nothing of it is recorded, unless [Record] is used.
func (s *Server) Conn(opts ...grpc.DialOption) *grpc.ClientConn {
	s.t.Helper()
	own := append(s.DialOptions(), grpc.WithConnectParams(redials))
	cc, err := grpc.NewClient(s.Target(), append(own, opts...)...)
	if err != nil {
		s.t.Fatalf("grpcretrytest: %v", err)
	}
	s.t.Cleanup(func() { cc.Close() })
	return cc
}

// redials are gRPC's defaults, without jitter.
var redials = func() grpc.ConnectParams {
	p := grpc.ConnectParams{Backoff: backoff.DefaultConfig, MinConnectTimeout: 20 * time.Second}
	p.Backoff.Jitter = 0
	return p
}()

// Target returns the target to dial, for programs that dial themselves. Every server has its own. They need the
// [Server.DialOptions] too; with those, any target will do.
func (s *Server) Target() string { return "passthrough:///" + s.listener.name }

// DialOptions returns the options with which a program connects to the Target: the way to it, and no
// encryption.
func (s *Server) DialOptions() []grpc.DialOption {
	return []grpc.DialOption{
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) { return s.DialContext(ctx) }),
	}
}

// DialContext opens a connection to the server, for dialers of the program's own: for example one that reaches
// several servers by the addresses that a resolver returns for one client. [Record] records the calls of such a client.
func (s *Server) DialContext(ctx context.Context) (net.Conn, error) { return s.listener.dial(ctx) }

// Jitter returns an option that makes every wait the one for the random number u, from 0 to 1: with full jitter
// and u = 0.5, a wait of up to 100ms is 50ms. With 1 it is the longest, to the microsecond. Any other u counts as
// the nearest of these.
func Jitter(u float64) grpcretry.Option {
	return inside.WithRandom(func() float64 { return u }).(grpcretry.Option)
}
