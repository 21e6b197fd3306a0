package grpcretry

import (
	"context"
	"net"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/grpc/test/bufconn"
	"google.golang.org/protobuf/protoadapt"
	"google.golang.org/protobuf/types/known/durationpb"

	echov1 "github.com/grpcretry/grpcretry/proto/echo/v1"
)

// This file has the real gRPC server that the tests talk to, over bufconn and in
// virtual time, and the tests of the unary loop. The server's script is a list of
// answers, one for each attempt; time passes only where somebody waits, so tests
// compare elapsed times for equality.

// An answer is what the scripted server does with one attempt.
type answer struct {
	delay   time.Duration // before anything else
	hang    bool          // until the client goes away
	header  metadata.MD   // sent before the status
	trailer metadata.MD
	err     error  // the status, nil for OK
	reply   string // on OK; the request's message if empty
	do      func(ctx context.Context) error
}

func ok() answer { return answer{} }

func fail(code codes.Code, message string, details ...protoadapt.MessageV1) answer {
	st, err := status.New(code, message).WithDetails(details...)
	if len(details) == 0 {
		st, err = status.New(code, message), nil
	}
	if err != nil {
		panic(err)
	}
	return answer{err: st.Err()}
}

func unavailable() answer { return fail(codes.Unavailable, "db-down") }

func overloaded() answer { return fail(codes.ResourceExhausted, "queue full") }

func hang() answer { return answer{hang: true} }

func (a answer) after(d time.Duration) answer { a.delay = d; return a }

func (a answer) withHeader(kv ...string) answer { a.header = metadata.Pairs(kv...); return a }

func (a answer) withTrailer(kv ...string) answer { a.trailer = metadata.Pairs(kv...); return a }

func (a answer) pushback(values ...string) answer {
	a.trailer = metadata.MD{pushbackKey: values}
	return a
}

func retryInfoOf(d time.Duration) *errdetails.RetryInfo {
	return &errdetails.RetryInfo{RetryDelay: durationpb.New(d)}
}

// always is a script that never ends.
func always(a answer) func(int) answer { return func(int) answer { return a } }

// script gives one answer to each attempt, and fails the test if there are more.
func script(answers ...answer) func(int) answer {
	return func(n int) answer {
		if n > len(answers) {
			return fail(codes.DataLoss, "script: one attempt too many")
		}
		return answers[n-1]
	}
}

// A scripted server remembers the attempts that it has seen.
type scripted struct {
	echov1.UnimplementedEchoServiceServer
	script func(number int) answer
	start  time.Time

	mu   sync.Mutex
	seen []seen
}

// seen is one attempt as the server saw it.
type seen struct {
	at       time.Duration // since the server started
	metadata metadata.MD
	previous int // as PreviousAttempts has it
	timeout  time.Duration
	message  string
}

func (s *scripted) Echo(ctx context.Context, req *echov1.EchoRequest) (*echov1.EchoResponse, error) {
	return s.answer(ctx, req)
}

func (s *scripted) Put(ctx context.Context, req *echov1.EchoRequest) (*echov1.EchoResponse, error) {
	return s.answer(ctx, req)
}

func (s *scripted) Append(ctx context.Context, req *echov1.EchoRequest) (*echov1.EchoResponse, error) {
	return s.answer(ctx, req)
}

func (s *scripted) answer(ctx context.Context, req *echov1.EchoRequest) (*echov1.EchoResponse, error) {
	a := s.script(s.note(ctx, req.GetMessage()))
	if a.delay > 0 {
		select {
		case <-time.After(a.delay):
		case <-ctx.Done():
			return nil, status.FromContextError(ctx.Err()).Err()
		}
	}
	if a.hang {
		<-ctx.Done()
		return nil, status.FromContextError(ctx.Err()).Err()
	}
	if a.do != nil {
		if err := a.do(ctx); err != nil {
			return nil, err
		}
	}
	if a.header != nil {
		if err := grpc.SendHeader(ctx, a.header); err != nil {
			return nil, err
		}
	}
	if a.trailer != nil {
		if err := grpc.SetTrailer(ctx, a.trailer); err != nil {
			return nil, err
		}
	}
	if a.err != nil {
		return nil, a.err
	}
	reply := a.reply
	if reply == "" {
		reply = req.GetMessage()
	}
	return &echov1.EchoResponse{Message: reply, Payload: req.GetPayload()}, nil
}

// note remembers an attempt and returns its number.
func (s *scripted) note(ctx context.Context, message string) int {
	md, _ := metadata.FromIncomingContext(ctx)
	one := seen{at: time.Since(s.start), metadata: md, previous: PreviousAttempts(ctx), message: message}
	if deadline, ok := ctx.Deadline(); ok {
		one.timeout = time.Until(deadline)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.seen = append(s.seen, one)
	return len(s.seen)
}

func (s *scripted) attempts() []seen {
	s.mu.Lock()
	defer s.mu.Unlock()
	return append([]seen(nil), s.seen...)
}

// times is when the server saw each attempt.
func (s *scripted) times() []time.Duration {
	var at []time.Duration
	for _, one := range s.attempts() {
		at = append(at, one.at)
	}
	return at
}

// A fixture is a scripted server and the ways to dial it.
type fixture struct {
	*scripted
	listener *bufconn.Listener
	server   *grpc.Server
}

// serve starts a scripted server. Within a bubble, call it within.
func serve(t *testing.T, script func(int) answer, opts ...grpc.ServerOption) *fixture {
	t.Helper()
	f := &fixture{
		scripted: &scripted{script: script, start: time.Now()},
		listener: bufconn.Listen(1 << 20),
		server:   grpc.NewServer(opts...),
	}
	echov1.RegisterEchoServiceServer(f.server, f.scripted)
	served := make(chan struct{})
	go func() {
		defer close(served)
		if err := f.server.Serve(f.listener); err != nil {
			t.Errorf("Serve: %v", err)
		}
	}()
	t.Cleanup(func() { f.server.Stop(); <-served })
	return f
}

// conn dials the server with plain dial options.
func (f *fixture) conn(t *testing.T, opts ...grpc.DialOption) *grpc.ClientConn {
	t.Helper()
	return f.connTo(t, "passthrough:///echo", opts...)
}

func (f *fixture) connTo(t *testing.T, target string, opts ...grpc.DialOption) *grpc.ClientConn {
	t.Helper()
	cc, err := grpc.NewClient(target, append([]grpc.DialOption{
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) {
			return f.listener.DialContext(ctx)
		}),
	}, opts...)...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { cc.Close() })
	return cc
}

// client dials the server with the interceptors of a Retrier of opts.
func (f *fixture) client(t *testing.T, opts ...Option) echov1.EchoServiceClient {
	t.Helper()
	return echov1.NewEchoServiceClient(f.conn(t, DialOptions(opts...)...))
}

// steady is a backoff without jitter: 1 s, 2 s, 4 s, … for every code.
var steady = WithBackoff(Exponential{Base: time.Second, Max: time.Hour, Jitter: NoJitter})

func request() *echov1.EchoRequest { return &echov1.EchoRequest{Message: "hello"} }

// bubble runs f in virtual time.
func bubble(t *testing.T, f func(t *testing.T)) {
	t.Helper()
	synctest.Test(t, f)
}

func TestRetriesUntilSuccess(t *testing.T) {
	bubble(t, func(t *testing.T) {
		server := serve(t, script(unavailable(), unavailable(), ok()))
		reply, err := server.client(t, steady).Echo(t.Context(), request())
		if err != nil || reply.GetMessage() != "hello" {
			t.Fatalf("Echo = %v, %v, want hello", reply, err)
		}
		wantTimes(t, server, 0, 1*time.Second, 3*time.Second)
	})
}

func wantTimes(t *testing.T, server *fixture, want ...time.Duration) {
	t.Helper()
	got := server.times()
	if len(got) != len(want) {
		t.Fatalf("server saw attempts at %v, want %v", got, want)
	}
	for i := range want {
		if got[i] != want[i] {
			t.Fatalf("server saw attempts at %v, want %v", got, want)
		}
	}
}
