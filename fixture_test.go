package grpcretry

import (
	"context"
	"errors"
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

	"github.com/grpcretry/grpcretry/internal/layers"
	"github.com/grpcretry/grpcretry/internal/wire"
	echov1 "github.com/grpcretry/grpcretry/proto/echo/v1"
)

// What clients and servers say in metadata.
const (
	pushbackKey         = wire.PushbackKey
	noRetry             = wire.NoRetry
	previousAttemptsKey = wire.PreviousAttemptsKey
	callerRetriesKey    = layers.MarkKey
)

// This file has the real gRPC server that the tests talk to, over bufconn and in
// virtual time. The server's script is a list of answers, one for each attempt; time
// passes only while something waits, so tests compare elapsed times for equality.

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

func (a answer) after(d time.Duration) answer { a.delay = d; return a }

func (a answer) withHeader(kv ...string) answer { a.header = metadata.Pairs(kv...); return a }

func (a answer) withTrailer(kv ...string) answer { a.trailer = metadata.Pairs(kv...); return a }

func (a answer) pushback(values ...string) answer {
	a.trailer = metadata.MD{pushbackKey: values}
	return a
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

// says is a success that names itself.
func says(name string) answer { return answer{reply: name} }

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

// seen is one attempt as the server saw it.
type seen struct {
	at       time.Duration // since the server started
	metadata metadata.MD
	previous int // as PreviousAttempts has it
	timeout  time.Duration
	message  string
}

// A fixture is a scripted server and the ways to dial it.
type fixture struct {
	*scripted
	listener *bufconn.Listener
	server   *grpc.Server
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
		// A channel that falls idle sets a timer of no duration, see internal/timer.
		grpc.WithIdleTimeout(0),
	}, opts...)...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { cc.Close() })
	return cc
}

// client dials the server with the interceptors of a Retrier of opts. Without a WithRandom among
// them, the random numbers are 0, so that a call's own trouble makes no wait longer.
func (f *fixture) client(t *testing.T, opts ...Option) echov1.EchoServiceClient {
	t.Helper()
	return echov1.NewEchoServiceClient(f.conn(t, DialOptions(append([]Option{unmoved}, opts...)...)...))
}

var unmoved = withRandom(func() float64 { return 0 })

// fixed is a client whose random number is always u.
func (f *fixture) fixed(t *testing.T, u float64, opts ...Option) echov1.EchoServiceClient {
	t.Helper()
	return f.client(t, append(opts, withRandom(func() float64 { return u }))...)
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
		if err := f.server.Serve(f.listener); err != nil && !errors.Is(err, grpc.ErrServerStopped) { // by a test that made no call
			t.Errorf("Serve: %v", err)
		}
	}()
	t.Cleanup(func() { f.server.Stop(); <-served })
	return f
}

// steady is a backoff without jitter: 1 s, 2 s, 4 s, … for every code.
var steady = WithBackoff(Exponential{Base: time.Second, Max: time.Hour, Jitter: NoJitter})

const second = time.Second

const echoMethod = "/grpcretry.test.v1.EchoService/Echo"

const putMethod = "/grpcretry.test.v1.EchoService/Put"

func request() *echov1.EchoRequest { return &echov1.EchoRequest{Message: "hello"} }

// bubble runs f in virtual time.
func bubble(t *testing.T, f func(t *testing.T)) {
	t.Helper()
	synctest.Test(t, f)
}

// wantTimes compares when the server saw attempts, since it started.
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

// asError is the *Error of a call that must have one.
func asError(t *testing.T, err error) *Error {
	t.Helper()
	var e *Error
	if !errors.As(err, &e) {
		t.Fatalf("err = %v (%T), want an *Error", err, err)
	}
	return e
}

// wantStop is a call that failed with an *Error of that code, reason and number of attempts.
func wantStop(t *testing.T, err error, code codes.Code, reason error, attempts int) *Error {
	t.Helper()
	e := asError(t, err)
	if got := status.Code(err); got != code {
		t.Errorf("status.Code(%v) = %v, want %v", err, got, code)
	}
	if !errors.Is(err, reason) {
		t.Errorf("Reason of %v is %v, want %v", err, e.Reason, reason)
	}
	if len(e.Attempts) != min(attempts, maxKept) || e.made != attempts {
		t.Errorf("%d attempts in %v, want %d", len(e.Attempts), err, attempts)
	}
	return e
}

func wantUntouched(t *testing.T, err error, code codes.Code, message string) {
	t.Helper()
	var e *Error
	if errors.As(err, &e) {
		t.Errorf("err = %#v, want gRPC's own", err)
	}
	if st := status.Convert(err); st.Code() != code || st.Message() != message {
		t.Errorf("err = %v, want %v %q", err, code, message)
	}
}

func wantMessage(t *testing.T, err error, message string) {
	t.Helper()
	if got := status.Convert(err).Message(); got != message {
		t.Errorf("message %q, want %q", got, message)
	}
}

var errUnavailable = status.Error(codes.Unavailable, "db-down")

func first(values []string) string {
	if len(values) == 0 {
		return ""
	}
	return values[0]
}

// invoke calls an interceptor with an invoker of the test.
func invoke(ctx context.Context, intercept grpc.UnaryClientInterceptor, f func(ctx context.Context, number int) error,
	opts ...grpc.CallOption) (made int, err error) {
	err = intercept(ctx, "/s/m", nil, nil, nil, func(ctx context.Context, _ string, _, _ any, _ *grpc.ClientConn,
		_ ...grpc.CallOption) error {
		made++
		return f(ctx, made)
	}, opts...)
	return made, err
}

// succeed and failOnce are invokers that do nothing else, so that the interceptor's own
// cost is seen.
func succeed(context.Context, string, any, any, *grpc.ClientConn, ...grpc.CallOption) error {
	return nil
}

func failOnce(ctx context.Context, _ string, _, _ any, _ *grpc.ClientConn, _ ...grpc.CallOption) error {
	if a, _ := AttemptFromContext(ctx); a.Number == 1 {
		return errUnavailable
	}
	return nil
}

var stubOptions = []grpc.CallOption{grpc.StaticMethod()} // as generated code passes them

func callOnce(tb testing.TB, intercept grpc.UnaryClientInterceptor, invoker grpc.UnaryInvoker) {
	if err := intercept(context.Background(), "/pkg.Service/Method", nil, nil, nil, invoker, stubOptions...); err != nil {
		tb.Fatal(err)
	}
}

// hedged hedges the calls of a test. Unless the test is about the budget of hedges, there is none:
// a new client could not send any.
func hedged(n int, h Hedging) Option {
	if h.Budget == nil {
		h.Budget = Unlimited
	}
	return WithMethod(echoMethod, WithMaxAttempts(n), WithHedging(h))
}

func invokeEcho(ctx context.Context, intercept grpc.UnaryClientInterceptor, run func(ctx context.Context, n int) error) error {
	invoker := func(ctx context.Context, _ string, _, _ any, _ *grpc.ClientConn, _ ...grpc.CallOption) error {
		a, _ := AttemptFromContext(ctx)
		return run(ctx, a.Number)
	}
	return intercept(ctx, echoMethod, request(), &echov1.EchoResponse{}, nil, invoker)
}

// belowUnary puts an interceptor between ours and gRPC: run goes around each attempt of a unary call.
func belowUnary(run func(ctx context.Context, next func(context.Context) error) error) grpc.DialOption {
	return grpc.WithChainUnaryInterceptor(func(ctx context.Context, method string, req, reply any, cc *grpc.ClientConn,
		invoker grpc.UnaryInvoker, opts ...grpc.CallOption) error {
		return run(ctx, func(ctx context.Context) error { return invoker(ctx, method, req, reply, cc, opts...) })
	})
}

// A streamOpener creates the stream of an attempt.
type streamOpener func(context.Context) (grpc.ClientStream, error)

// belowStream does the same for streams: open goes around the creation of each attempt's stream.
func belowStream(open func(ctx context.Context, next streamOpener) (grpc.ClientStream, error)) grpc.DialOption {
	return grpc.WithChainStreamInterceptor(func(ctx context.Context, desc *grpc.StreamDesc, cc *grpc.ClientConn, method string,
		streamer grpc.Streamer, opts ...grpc.CallOption) (grpc.ClientStream, error) {
		return open(ctx, func(ctx context.Context) (grpc.ClientStream, error) { return streamer(ctx, desc, cc, method, opts...) })
	})
}

// below wraps each attempt's stream.
func below(wrap func(grpc.ClientStream) grpc.ClientStream) grpc.DialOption {
	return belowStream(func(ctx context.Context, next streamOpener) (grpc.ClientStream, error) {
		stream, err := next(ctx)
		return wrap(stream), err
	})
}

// newEchoClient dials the server with the interceptors of a Retrier.
func newEchoClient(t *testing.T, server *fixture, r *Retrier) echov1.EchoServiceClient {
	t.Helper()
	return echov1.NewEchoServiceClient(server.conn(t, r.DialOptions()...))
}
