package grpcretry

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"net"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/peer"
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
		if err := f.server.Serve(f.listener); err != nil && !errors.Is(err, grpc.ErrServerStopped) { // by a test that made no call
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
	if len(e.Attempts) != attempts {
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

const second = time.Second

func TestUnaryRetries(t *testing.T) {
	for _, tt := range []struct {
		name   string
		script func(int) answer
		opts   []Option
		want   []time.Duration // when the server sees attempts; the call returns with the last
	}{
		{"success at once", script(ok()), nil, []time.Duration{0}},
		{"backoff grows", script(unavailable(), unavailable(), unavailable(), ok()), nil, []time.Duration{0, 1 * second, 3 * second, 7 * second}},
		{"overload", script(overloaded(), ok()), nil, []time.Duration{0, 1 * second}},
		{"overload has its own backoff, and shares the count", script(unavailable(), overloaded(), unavailable(), ok()),
			[]Option{WithOverloadBackoff(Exponential{Base: 10 * second, Max: time.Hour, Jitter: NoJitter})},
			[]time.Duration{0, 1 * second, 21 * second, 25 * second}},
		{"pushback replaces the backoff", script(unavailable().pushback("7000"), ok()), nil, []time.Duration{0, 7 * second}},
		{"pushback of zero", script(unavailable().pushback("0"), ok()), nil, []time.Duration{0, 0}},
		{"pushback restarts the backoff", script(unavailable(), unavailable().pushback("7000"), unavailable(), ok()), nil,
			[]time.Duration{0, 1 * second, 8 * second, 9 * second}},
		{"RetryInfo is waited for, with a tenth on top for u = 0.5", script(fail(codes.ResourceExhausted, "x", retryInfoOf(10*second)), ok()), nil,
			[]time.Duration{0, 11 * second}},
		{"pushback wins over RetryInfo", script(fail(codes.Unavailable, "x", retryInfoOf(10*second)).pushback("250"), ok()), nil,
			[]time.Duration{0, 250 * time.Millisecond}},
		{"RetryInfo restarts the backoff", script(unavailable(), fail(codes.Unavailable, "x", retryInfoOf(10*second)), unavailable(), ok()), nil,
			[]time.Duration{0, 1 * second, 12 * second, 13 * second}},
		{"headers do not commit", script(unavailable().withHeader("k", "v"), ok()), nil, []time.Duration{0, 1 * second}},
		{"slow answers count into the time", script(unavailable().after(3*second), ok()), nil, []time.Duration{0, 4 * second}},
		{"other codes", script(fail(codes.Internal, "x"), ok()), []Option{WithCodes(codes.Internal)}, []time.Duration{0, 1 * second}},
		{"ten attempts, no hidden cap", script(unavailable(), unavailable(), unavailable(), unavailable(), unavailable(), unavailable(),
			unavailable(), unavailable(), unavailable(), ok()), []Option{WithMaxAttempts(10), WithBackoff(Constant(second)), WithBudget(Unlimited)},
			[]time.Duration{0, 1 * second, 2 * second, 3 * second, 4 * second, 5 * second, 6 * second, 7 * second, 8 * second, 9 * second}},
		{"an attempt timeout is retried", script(hang(), ok()), []Option{WithAttemptTimeout(5 * second)}, []time.Duration{0, 6 * second}},
		{"a wait of zero", script(unavailable(), unavailable(), ok()), []Option{WithBackoff(Constant(0))}, []time.Duration{0, 0, 0}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				server := serve(t, tt.script)
				cc := server.fixed(t, 0.5, append([]Option{steady}, tt.opts...)...)
				reply, err := cc.Echo(t.Context(), request())
				if err != nil || reply.GetMessage() != "hello" {
					t.Fatalf("Echo = %v, %v, want hello", reply, err)
				}
				wantTimes(t, server, tt.want...)
			})
		})
	}
}

func TestUnaryStops(t *testing.T) {
	for _, tt := range []struct {
		name     string
		script   func(int) answer
		opts     []Option
		deadline time.Duration // of the call; 0 for none
		reason   error
		code     codes.Code
		times    []time.Duration // of the attempts
		elapsed  time.Duration
	}{
		{"no attempts left", always(unavailable()), nil, 0, ErrAttemptsExhausted, codes.Unavailable,
			[]time.Duration{0, 1 * second, 3 * second, 7 * second}, 7 * second},
		{"two attempts mean two", always(unavailable()), []Option{WithMaxAttempts(2)}, 0, ErrAttemptsExhausted, codes.Unavailable,
			[]time.Duration{0, 1 * second}, 1 * second},
		{"not retryable after a retry", script(unavailable(), fail(codes.NotFound, "gone")), nil, 0, ErrNotRetryable, codes.NotFound,
			[]time.Duration{0, 1 * second}, 1 * second},
		{"the server forbids it", script(unavailable().pushback("-1")), nil, 0, ErrPushback, codes.Unavailable, []time.Duration{0}, 0},
		{"the server forbids it later", script(unavailable(), unavailable().pushback("-1")), nil, 0, ErrPushback, codes.Unavailable,
			[]time.Duration{0, 1 * second}, 1 * second},
		{"pushback too long", script(unavailable().pushback("300001")), nil, 0, ErrPushback, codes.Unavailable, []time.Duration{0}, 0},
		{"the deadline is too near", always(unavailable()), nil, 3 * second, ErrDeadline, codes.Unavailable,
			[]time.Duration{0, 1 * second}, 1 * second}, // the next would start at 3 s, the deadline
		{"pushback beyond the deadline", script(unavailable().pushback("60000")), nil, 30 * second, ErrDeadline, codes.Unavailable, []time.Duration{0}, 0},
		{"max elapsed", always(unavailable()), []Option{WithMaxElapsed(3 * second)}, 0, ErrMaxElapsed, codes.Unavailable,
			[]time.Duration{0, 1 * second}, 1 * second},
		{"max elapsed does not cut an attempt", script(unavailable(), unavailable().after(time.Hour)), []Option{WithMaxElapsed(3 * second)}, 0,
			ErrMaxElapsed, codes.Unavailable, []time.Duration{0, 1 * second}, time.Hour + second},
		{"no budget", always(unavailable()), []Option{WithBudget(&aBudget{refuse: true})}, 0, ErrBudgetExhausted, codes.Unavailable, []time.Duration{0}, 0},
		{"headers commit by the letter of A6", script(unavailable().withHeader("k", "v")), []Option{WithCommitOnHeaders(true)}, 0,
			ErrCommitted, codes.Unavailable, []time.Duration{0}, 0},
		{"without headers the letter allows it", always(unavailable()), []Option{WithCommitOnHeaders(true), WithMaxAttempts(2)}, 0,
			ErrAttemptsExhausted, codes.Unavailable, []time.Duration{0, 1 * second}, 1 * second},
		{"deadline in an attempt", script(unavailable(), hang()), nil, 10 * second, context.DeadlineExceeded, codes.DeadlineExceeded,
			[]time.Duration{0, 1 * second}, 10 * second},
		{"deadline in the first attempt", script(hang()), nil, 10 * second, context.DeadlineExceeded, codes.DeadlineExceeded, []time.Duration{0}, 10 * second},
		{"deadline in an attempt, whatever the codes", script(hang()), []Option{WithCodes(codes.DeadlineExceeded, codes.Canceled)}, 10 * second,
			context.DeadlineExceeded, codes.DeadlineExceeded, []time.Duration{0}, 10 * second},
		{"the last attempt keeps its timeout without a deadline", always(hang()), []Option{WithAttemptTimeout(2 * second), WithMaxAttempts(2)}, 0,
			ErrAttemptsExhausted, codes.DeadlineExceeded, []time.Duration{0, 3 * second}, 5 * second},
		{"the last attempt gets all the time of a deadline", always(hang()), []Option{WithAttemptTimeout(2 * second), WithMaxAttempts(2)}, time.Minute,
			context.DeadlineExceeded, codes.DeadlineExceeded, []time.Duration{0, 3 * second}, time.Minute},
		{"an attempt timeout beyond the deadline", always(hang()), []Option{WithAttemptTimeout(time.Hour)}, time.Minute,
			context.DeadlineExceeded, codes.DeadlineExceeded, []time.Duration{0}, time.Minute},
		{"a server's word stands through attempt timeouts", script(unavailable(), hang()), []Option{WithAttemptTimeout(2 * second), WithMaxAttempts(2)}, 0,
			ErrAttemptsExhausted, codes.Unavailable, []time.Duration{0, 1 * second}, 3 * second},
	} {
		t.Run(tt.name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				server := serve(t, tt.script)
				client := server.client(t, append([]Option{steady}, tt.opts...)...)
				ctx, start := t.Context(), time.Now()
				if tt.deadline > 0 {
					var cancel context.CancelFunc
					ctx, cancel = context.WithTimeout(ctx, tt.deadline)
					defer cancel()
				}
				_, err := client.Echo(ctx, request())
				if got := time.Since(start); got != tt.elapsed {
					t.Errorf("Echo took %v, want %v", got, tt.elapsed)
				}
				e := wantStop(t, err, tt.code, tt.reason, len(tt.times))
				if e.Elapsed != tt.elapsed {
					t.Errorf("Elapsed is %v, want %v", e.Elapsed, tt.elapsed)
				}
				wantTimes(t, server, tt.times...)
			})
		})
	}
}

// fixed is a client whose random number is always u.
func (f *fixture) fixed(t *testing.T, u float64, opts ...Option) echov1.EchoServiceClient {
	t.Helper()
	r, err := New(opts...)
	if err != nil {
		t.Fatal(err)
	}
	r.random = func() float64 { return u }
	return echov1.NewEchoServiceClient(f.conn(t, r.DialOptions()...))
}

func TestFirstFailureThatIsNotRetryableIsUntouched(t *testing.T) {
	bubble(t, func(t *testing.T) {
		server := serve(t, always(fail(codes.NotFound, "no such thing", retryInfoOf(second))))
		_, err := server.client(t).Echo(t.Context(), request())
		wantUntouched(t, err, codes.NotFound, "no such thing")
		if details := status.Convert(err).Details(); len(details) != 1 {
			t.Errorf("details = %v, want the server's one", details)
		}
		wantTimes(t, server, 0)
	})
}

func TestCodesOfAContextSentByTheServer(t *testing.T) {
	for _, code := range []codes.Code{codes.Canceled, codes.DeadlineExceeded} {
		t.Run(code.String(), func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				server := serve(t, always(fail(code, "the server's own")))
				_, err := server.client(t, WithAttemptTimeout(time.Hour)).Echo(t.Context(), request())
				wantUntouched(t, err, code, "the server's own")

				_, err = server.client(t, steady, WithMaxAttempts(2), WithCodes(code)).Echo(t.Context(), request())
				wantStop(t, err, code, ErrAttemptsExhausted, 2)
			})
		})
	}
}

func TestCancelEndsACallAtOnce(t *testing.T) {
	myCause := errors.New("user closed the tab")
	for _, tt := range []struct {
		name     string
		script   func(int) answer
		attempts int
		last     codes.Code // the server's last word
		refunds  int
	}{
		{"in a wait", script(unavailable()), 1, codes.Unavailable, 1},
		{"in the first attempt", script(hang()), 1, codes.Canceled, 0},
		{"in a later attempt", script(unavailable().pushback("1000"), hang()), 2, codes.Unavailable, 0},
	} {
		t.Run(tt.name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				server := serve(t, tt.script)
				budget := &aBudget{}
				client := server.client(t, WithBackoff(Constant(time.Hour)), WithBudget(budget))
				ctx, cancel := context.WithCancelCause(t.Context())
				start := time.Now()
				time.AfterFunc(2*second, func() { cancel(myCause) })
				_, err := client.Echo(ctx, request())
				if got := time.Since(start); got != 2*second {
					t.Errorf("Echo took %v, want 2s", got)
				}
				e := wantStop(t, err, codes.Canceled, myCause, tt.attempts)
				if e.Reason != myCause || !errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded) {
					t.Errorf("%v: reason %v, want %v and context.Canceled", err, e.Reason, myCause)
				}
				if got := status.Code(e.Last); got != tt.last {
					t.Errorf("Last is %v, want %v", e.Last, tt.last)
				}
				if tt.last == codes.Unavailable && !strings.Contains(err.Error(), "db-down") {
					t.Errorf("%q does not say what the server said", err)
				}
				if budget.refunded != tt.refunds {
					t.Errorf("%d refunds, want %d", budget.refunded, tt.refunds)
				}
				wantTimes(t, server, []time.Duration{0, second}[:tt.attempts]...)
			})
		})
	}
}

func TestNoAttemptReachesTheServerAfterTheContextEnded(t *testing.T) {
	bubble(t, func(t *testing.T) {
		server := serve(t, always(unavailable()))
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		_, err := server.client(t).Echo(ctx, request())
		wantStop(t, err, codes.Canceled, context.Canceled, 1)
		wantTimes(t, server)
	})
}

func TestClosedConnectionEndsACallAtOnce(t *testing.T) {
	t.Run("before the call", func(t *testing.T) {
		bubble(t, func(t *testing.T) {
			server := serve(t, always(ok()))
			// CANCELED, gRPC's code for it, being retryable does not matter.
			cc := server.conn(t, DialOptions(WithCodes(codes.Canceled, codes.Unavailable))...)
			cc.Close()
			start := time.Now()
			_, err := echov1.NewEchoServiceClient(cc).Echo(t.Context(), request())
			if status.Code(err) != codes.Canceled || time.Since(start) != 0 {
				t.Errorf("Echo = %v after %v, want CANCELED at once", err, time.Since(start))
			}
		})
	})
	t.Run("in an attempt", func(t *testing.T) {
		bubble(t, func(t *testing.T) {
			server := serve(t, always(hang()))
			cc := server.conn(t, DialOptions(WithClassifier(func(context.Context, Attempt) Classification { return Retry }))...)
			time.AfterFunc(second, func() { cc.Close() })
			_, err := echov1.NewEchoServiceClient(cc).Echo(t.Context(), request())
			if err == nil || time.Since(server.start) != second {
				t.Errorf("Echo = %v after %v, want an error after 1s", err, time.Since(server.start))
			}
			wantTimes(t, server, 0)
		})
	})
	t.Run("in a wait", func(t *testing.T) {
		bubble(t, func(t *testing.T) {
			server := serve(t, always(unavailable()))
			budget := &aBudget{}
			cc := server.conn(t, DialOptions(steady, WithBudget(budget))...)
			time.AfterFunc(second/2, func() { cc.Close() })
			_, err := echov1.NewEchoServiceClient(cc).Echo(t.Context(), request())
			wantStop(t, err, codes.Unavailable, ErrConnClosed, 1)
			if got := time.Since(server.start); got != second/2 || budget.refunded != 1 {
				t.Errorf("returned after %v with %d refunds, want at once, 500ms, and 1", got, budget.refunded)
			}
			wantTimes(t, server, 0)
		})
	})
}

func TestBudgetIsChargedAtTheDecision(t *testing.T) {
	bubble(t, func(t *testing.T) {
		server := serve(t, always(unavailable()))
		budget, err := NewRatioBudget(RatioBudget{Ratio: 0.2, Reserve: 200})
		if err != nil {
			t.Fatal(err)
		}
		// Every retry waits for an hour: none has been sent when the last call is refused one.
		client := server.client(t, WithBackoff(Constant(time.Hour)), WithBudget(budget))
		const calls = 1000
		var group sync.WaitGroup
		var mu sync.Mutex
		refused := 0
		ctx, cancel := context.WithCancel(t.Context())
		for range calls {
			group.Go(func() {
				_, err := client.Echo(ctx, request())
				mu.Lock()
				defer mu.Unlock()
				if errors.Is(err, ErrBudgetExhausted) {
					refused++
				}
			})
		}
		synctest.Wait()
		mu.Lock()
		waiting := calls - refused
		mu.Unlock()
		if waiting != 200 {
			t.Errorf("%d of %d calls wait for a retry, want 200", waiting, calls)
		}
		cancel()
		group.Wait()
		if got := budget.Balance(time.Now()); got != 200 {
			t.Errorf("balance is %v after all waits were cancelled, want the 200 retries back", got)
		}
		if got := len(server.attempts()); got != calls {
			t.Errorf("server saw %d attempts, want only the %d first ones", got, calls)
		}
	})
}

func TestBudgetHearsEachAttemptOnce(t *testing.T) {
	for _, tt := range []struct {
		name   string
		script func(int) answer
		opts   []Option
		want   []Outcome
	}{
		{"success", script(ok()), nil, []Outcome{{Attempt: 1, Result: Succeeded}}},
		{"retries, then success", script(unavailable(), overloaded(), ok()), nil, []Outcome{{Attempt: 1, Result: Failed}, {Attempt: 2, Result: Failed}, {Attempt: 3, Result: Succeeded}}},
		{"attempts exhausted", always(unavailable()), []Option{WithMaxAttempts(2)}, []Outcome{{Attempt: 1, Result: Failed}, {Attempt: 2, Result: Failed}}},
		{"not retryable", script(unavailable(), fail(codes.NotFound, "x")), nil, []Outcome{{Attempt: 1, Result: Failed}, {Attempt: 2, Result: Answered}}},
		{"a failure that shows nothing", script(unavailable(), fail(codes.Internal, "x")), nil, []Outcome{{Attempt: 1, Result: Failed}, {Attempt: 2, Result: Ignored}}},
		{"told to stop", script(fail(codes.NotFound, "x").pushback("-1")), nil, []Outcome{{Attempt: 1, Result: Failed}}},
		{"attempt timeout", script(hang(), ok()), []Option{WithAttemptTimeout(second)}, []Outcome{{Attempt: 1, Result: Failed}, {Attempt: 2, Result: Succeeded}}},
		{"committed", script(unavailable().withHeader("k", "v")), []Option{WithCommitOnHeaders(true)}, []Outcome{{Attempt: 1, Result: Failed}}},
		{"the caller's deadline", script(hang()), nil, []Outcome{{Attempt: 1, Result: Ignored}}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				server := serve(t, tt.script)
				budget := &aBudget{}
				client := server.client(t, append([]Option{steady, WithBudget(budget)}, tt.opts...)...)
				ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
				defer cancel()
				client.Echo(ctx, request())
				if !slices.Equal(budget.heard, tt.want) {
					t.Errorf("budget heard %v, want %v", budget.heard, tt.want)
				}
			})
		})
	}
}

func TestFirstAttemptNeedsNoBudget(t *testing.T) {
	bubble(t, func(t *testing.T) {
		server := serve(t, always(ok().after(second)))
		budget := &aBudget{refuse: true}
		if _, err := server.client(t, WithBudget(budget)).Echo(t.Context(), request()); err != nil {
			t.Error(err)
		}
		if len(budget.asked) != 0 {
			t.Errorf("budget was asked %d times", len(budget.asked))
		}
	})
}

// The server may take as long as the caller lets it: an attempt timeout may not end the attempt.
func TestTheServerIsToldTheCallersDeadline(t *testing.T) {
	bubble(t, func(t *testing.T) {
		server := serve(t, always(hang()))
		client := server.client(t, WithBackoff(Constant(second)), WithAttemptTimeout(2*second), WithMaxAttempts(3))
		ctx, cancel := context.WithTimeout(t.Context(), 20*second)
		defer cancel()
		client.Echo(ctx, request())
		var timeouts []time.Duration
		for _, one := range server.attempts() {
			timeouts = append(timeouts, one.timeout)
		}
		// Attempts at 0, 3 and 6 s.
		if want := []time.Duration{20 * second, 17 * second, 14 * second}; !slices.Equal(timeouts, want) {
			t.Errorf("the server saw timeouts %v, want %v", timeouts, want)
		}
	})
}

func TestAttemptTimeoutIsSeenInTheError(t *testing.T) {
	bubble(t, func(t *testing.T) {
		server := serve(t, always(hang()))
		_, err := server.client(t, steady, WithAttemptTimeout(2*second), WithMaxAttempts(2)).Echo(t.Context(), request())
		wantStop(t, err, codes.DeadlineExceeded, ErrAttemptsExhausted, 2)
		if !errors.Is(err, ErrAttemptTimeout) || errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("%v: want ErrAttemptTimeout, and not the caller's deadline", err)
		}
	})
}

func TestAttemptContextsEndWithTheirAttempts(t *testing.T) {
	bubble(t, func(t *testing.T) {
		server := serve(t, script(unavailable(), unavailable(), ok()))
		var contexts []context.Context
		below := func(ctx context.Context, method string, req, reply any, cc *grpc.ClientConn, invoker grpc.UnaryInvoker, opts ...grpc.CallOption) error {
			for i, earlier := range contexts {
				if earlier.Err() == nil {
					t.Errorf("the context of attempt %d is alive in attempt %d", i+1, len(contexts)+1)
				}
			}
			contexts = append(contexts, ctx)
			return invoker(ctx, method, req, reply, cc, opts...)
		}
		cc := server.conn(t, append(DialOptions(steady, WithAttemptTimeout(time.Hour)), grpc.WithChainUnaryInterceptor(below))...)
		if _, err := echov1.NewEchoServiceClient(cc).Echo(t.Context(), request()); err != nil {
			t.Fatal(err)
		}
		if len(contexts) != 3 || contexts[2].Err() == nil {
			t.Errorf("the context of the last of %d attempts is alive after the call", len(contexts))
		}
	})
}

func TestServerIsToldOfPreviousAttempts(t *testing.T) {
	bubble(t, func(t *testing.T) {
		server := serve(t, script(unavailable(), unavailable(), ok()))
		// The caller's own value is replaced in retries.
		ctx := metadata.AppendToOutgoingContext(t.Context(), "k", "v", "GRPC-previous-rpc-attempts", "17")
		for _, ctx := range []context.Context{t.Context(), ctx} {
			server.seen = nil
			if _, err := server.client(t, steady).Echo(ctx, request()); err != nil {
				t.Fatal(err)
			}
			for i, one := range server.attempts()[1:] {
				want := []string{strconv.Itoa(i + 1)}
				if got := one.metadata.Get(previousAttemptsKey); !slices.Equal(got, want) || one.previous != i+1 {
					t.Errorf("attempt %d carries %s %v, want %v", i+2, previousAttemptsKey, got, want)
				}
			}
		}
		if got := server.attempts()[2].metadata.Get("k"); !slices.Equal(got, []string{"v"}) {
			t.Errorf("the caller's metadata arrives as %v in attempt 3, want [v]", got)
		}
		server.seen = nil
		server.client(t).Echo(t.Context(), request())
		if got := server.attempts()[0].metadata.Get(previousAttemptsKey); got != nil {
			t.Errorf("a first attempt carries %v", got)
		}
	})
}

func TestWhatIsChainedBelowRunsAfreshForEachAttempt(t *testing.T) {
	bubble(t, func(t *testing.T) {
		server := serve(t, script(unavailable(), unavailable(), ok()))
		token := 0
		below := func(ctx context.Context, method string, req, reply any, cc *grpc.ClientConn, invoker grpc.UnaryInvoker, opts ...grpc.CallOption) error {
			token++
			ctx = metadata.AppendToOutgoingContext(ctx, "authorization", strconv.Itoa(token))
			return invoker(ctx, method, req, reply, cc, opts...)
		}
		cc := server.conn(t, append(DialOptions(steady), grpc.WithChainUnaryInterceptor(below))...)
		if _, err := echov1.NewEchoServiceClient(cc).Echo(t.Context(), request()); err != nil {
			t.Fatal(err)
		}
		for i, one := range server.attempts() {
			if got, want := one.metadata.Get("authorization"), []string{strconv.Itoa(i + 1)}; !slices.Equal(got, want) {
				t.Errorf("attempt %d carries %v, want %v", i+1, got, want)
			}
		}
	})
}

func TestAttemptFromContextBelowTheInterceptor(t *testing.T) {
	bubble(t, func(t *testing.T) {
		server := serve(t, script(unavailable(), unavailable().pushback("7000"), ok()))
		var got []Attempt
		below := func(ctx context.Context, method string, req, reply any, cc *grpc.ClientConn, invoker grpc.UnaryInvoker, opts ...grpc.CallOption) error {
			a, ok := AttemptFromContext(ctx)
			if !ok {
				t.Error("no attempt in the context")
			}
			got = append(got, a)
			return invoker(ctx, method, req, reply, cc, opts...)
		}
		cc := server.conn(t, append(DialOptions(steady, WithAttemptTimeout(time.Hour)), grpc.WithChainUnaryInterceptor(below))...)
		if _, err := echov1.NewEchoServiceClient(cc).Echo(t.Context(), request()); err != nil {
			t.Fatal(err)
		}
		const method = echov1.EchoService_Echo_FullMethodName
		want := []Attempt{
			{Method: method, Number: 1, Start: server.start},
			{Method: method, Number: 2, Start: server.start.Add(second), Wait: second, WaitSource: WaitBackoff},
			{Method: method, Number: 3, Start: server.start.Add(8 * second), Wait: 7 * second, WaitSource: WaitPushback},
		}
		if !reflect.DeepEqual(got, want) {
			t.Errorf("attempts below are\n%+v, want\n%+v", got, want)
		}
		if _, ok := AttemptFromContext(t.Context()); ok {
			t.Error("an attempt outside of a call")
		}
	})
}

func TestNestedInterceptorsDoNotMultiply(t *testing.T) {
	bubble(t, func(t *testing.T) {
		server := serve(t, always(unavailable()))
		cc := server.conn(t, grpc.WithChainUnaryInterceptor(
			UnaryClientInterceptor(WithBackoff(Constant(second)), WithMaxAttempts(3)),
			UnaryClientInterceptor(WithBackoff(Constant(second)), WithMaxAttempts(5))))
		_, err := echov1.NewEchoServiceClient(cc).Echo(t.Context(), request())
		wantStop(t, err, codes.Unavailable, ErrAttemptsExhausted, 3)
		wantTimes(t, server, 0, 1*second, 2*second)
	})
}

func TestACallMadeBelowOnAnotherConnectionIsItsOwn(t *testing.T) {
	bubble(t, func(t *testing.T) {
		tokens := serve(t, script(unavailable(), ok(), unavailable(), ok()))
		server := serve(t, script(unavailable(), ok()))
		r, err := New(WithBackoff(Constant(second)))
		if err != nil {
			t.Fatal(err)
		}
		tokenConn := tokens.conn(t, r.DialOptions()...)
		// The careless way: the context and even the options of the outer call.
		below := func(ctx context.Context, method string, req, reply any, cc *grpc.ClientConn, invoker grpc.UnaryInvoker, opts ...grpc.CallOption) error {
			if _, err := echov1.NewEchoServiceClient(tokenConn).Put(ctx, request(), opts...); err != nil {
				t.Errorf("token: %v", err)
			}
			return invoker(ctx, method, req, reply, cc, opts...)
		}
		cc := server.conn(t, append(r.DialOptions(), grpc.WithChainUnaryInterceptor(below))...)
		if _, err := echov1.NewEchoServiceClient(cc).Echo(t.Context(), request()); err != nil {
			t.Error(err)
		}
		wantTimes(t, tokens, 0, 1*second, 2*second, 3*second)
		wantTimes(t, server, 1*second, 3*second)
	})
}

// The same method of another connection is another call, too.
func TestTheSameMethodBelowOnAnotherConnectionIsItsOwn(t *testing.T) {
	bubble(t, func(t *testing.T) {
		mirror := serve(t, script(unavailable(), ok()))
		server := serve(t, script(ok()))
		mirrorClient := mirror.client(t, steady)
		below := func(ctx context.Context, method string, req, reply any, cc *grpc.ClientConn, invoker grpc.UnaryInvoker, opts ...grpc.CallOption) error {
			if _, err := mirrorClient.Echo(ctx, request(), opts...); err != nil {
				t.Errorf("mirror: %v", err)
			}
			return invoker(ctx, method, req, reply, cc, opts...)
		}
		cc := server.conn(t, append(DialOptions(steady), grpc.WithChainUnaryInterceptor(below))...)
		if _, err := echov1.NewEchoServiceClient(cc).Echo(t.Context(), request()); err != nil {
			t.Error(err)
		}
		wantTimes(t, mirror, 0, second)
		wantTimes(t, server, second)
	})
}

const builtInPolicy = `{"methodConfig": [{
	"name": [{"service": "grpcretry.test.v1.EchoService", "method": "Echo"}],
	"retryPolicy": {"maxAttempts": 3, "initialBackoff": "1s", "maxBackoff": "1s", "backoffMultiplier": 1, "retryableStatusCodes": ["UNAVAILABLE"]}
}]}`

func TestMethodsWithABuiltInPolicyAreLeftToGRPC(t *testing.T) {
	bubble(t, func(t *testing.T) {
		server := serve(t, always(unavailable()))
		logs := &logRecorder{}
		budget := &aBudget{}
		cc := server.conn(t, grpc.WithDefaultServiceConfig(builtInPolicy), grpc.WithChainUnaryInterceptor(
			UnaryClientInterceptor(WithMaxAttempts(5), WithLogger(slog.New(logs)), WithBudget(budget))))
		client := echov1.NewEchoServiceClient(cc)
		for range 3 { // from the first call of a fresh channel on
			before := len(server.attempts())
			_, err := client.Echo(t.Context(), request())
			if got := len(server.attempts()) - before; got != 3 {
				t.Errorf("%d attempts, want the 3 of gRPC's policy", got)
			}
			var e *Error
			if errors.As(err, &e) || status.Code(err) != codes.Unavailable {
				t.Errorf("err = %v, want gRPC's own", err)
			}
		}
		if got := logs.lines(); len(got) != 1 || !strings.Contains(got[0], "retryPolicy") || !strings.Contains(got[0], "/Echo") {
			t.Errorf("logged %q, want one line", got)
		}
		if want := []Outcome{{Attempt: 1, Result: Ignored}, {Attempt: 1, Result: Ignored}, {Attempt: 1, Result: Ignored}}; !slices.Equal(budget.heard, want) || budget.asked != nil {
			t.Errorf("budget heard %v and was asked at %v, want %v and never", budget.heard, budget.asked, want)
		}
		// Another method of the same service is ours.
		before := len(server.attempts())
		client.Put(t.Context(), request())
		if got := len(server.attempts()) - before; got != 5 {
			t.Errorf("%d attempts of a method without a policy, want 5", got)
		}
	})
}

func TestAttemptTimeoutIsNotImposedOnGRPCsOwnRetries(t *testing.T) {
	bubble(t, func(t *testing.T) {
		server := serve(t, always(unavailable().after(10*second)))
		cc := server.conn(t, grpc.WithDefaultServiceConfig(builtInPolicy), grpc.WithChainUnaryInterceptor(
			UnaryClientInterceptor(WithAttemptTimeout(15*second))))
		client := echov1.NewEchoServiceClient(cc)
		client.Put(t.Context(), request()) // the channel has been resolved
		before := len(server.attempts())
		if _, err := client.Echo(t.Context(), request()); status.Code(err) != codes.Unavailable {
			t.Errorf("err = %v, want UNAVAILABLE", err)
		}
		if got := len(server.attempts()) - before; got != 3 {
			t.Errorf("%d attempts, want the 3 of gRPC's policy", got)
		}
	})
}

func TestBuiltInPolicyWhereBuiltInRetriesAreOff(t *testing.T) {
	for _, tt := range []struct {
		name string
		dial []grpc.DialOption
	}{
		{"DialOptions", DialOptions(WithBackoff(Constant(second)), WithMaxAttempts(5), WithBudget(Unlimited))},
		{"WithBuiltInRetryDisabled", []grpc.DialOption{grpc.WithDisableRetry(), grpc.WithChainUnaryInterceptor(
			UnaryClientInterceptor(WithBackoff(Constant(second)), WithMaxAttempts(5), WithBudget(Unlimited), WithBuiltInRetryDisabled()))}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				server := serve(t, always(unavailable()))
				cc := server.conn(t, append(tt.dial, grpc.WithDefaultServiceConfig(builtInPolicy))...)
				_, err := echov1.NewEchoServiceClient(cc).Echo(t.Context(), request())
				wantStop(t, err, codes.Unavailable, ErrAttemptsExhausted, 5)
				if got := len(server.attempts()); got != 5 {
					t.Errorf("%d attempts, want our 5", got)
				}
			})
		})
	}
}

// The first attempt never reaches gRPC, which would end it at the deadline by itself.
func TestAttemptTimeoutWhereBuiltInRetriesAreOff(t *testing.T) {
	bubble(t, func(t *testing.T) {
		server := serve(t, script(ok(), ok()))
		below := func(ctx context.Context, method string, req, reply any, cc *grpc.ClientConn, invoker grpc.UnaryInvoker, opts ...grpc.CallOption) error {
			if a, _ := AttemptFromContext(ctx); a.Number > 1 || method != echoMethod {
				return invoker(ctx, method, req, reply, cc, opts...)
			}
			select {
			case <-ctx.Done():
				return status.FromContextError(ctx.Err()).Err()
			case <-time.After(time.Hour):
				return errors.New("the first attempt has all the time in the world")
			}
		}
		cc := server.conn(t, append(DialOptions(steady, WithAttemptTimeout(5*second)),
			grpc.WithDefaultServiceConfig(builtInPolicy), grpc.WithChainUnaryInterceptor(below))...)
		client := echov1.NewEchoServiceClient(cc)
		if _, err := client.Put(t.Context(), request()); err != nil { // the channel knows its service config
			t.Error(err)
		}
		if _, err := client.Echo(t.Context(), request()); err != nil {
			t.Error(err)
		}
		wantTimes(t, server, 0, 6*second)
	})
}

func TestAnAttemptHasTheCallersDeadline(t *testing.T) {
	for _, callers := range []time.Duration{0, 3 * second, 9 * second} {
		bubble(t, func(t *testing.T) {
			ctx, start := t.Context(), time.Now()
			if callers > 0 {
				var cancel context.CancelFunc
				ctx, cancel = context.WithTimeout(ctx, callers)
				defer cancel()
			}
			invoker := func(ctx context.Context, _ string, _, _ any, _ *grpc.ClientConn, _ ...grpc.CallOption) error {
				if deadline, ok := ctx.Deadline(); ok != (callers > 0) || ok && deadline.Sub(start) != callers {
					t.Errorf("with a deadline in %v the attempt's is in %v, %v", callers, deadline.Sub(start), ok)
				}
				return nil
			}
			if err := UnaryClientInterceptor(WithAttemptTimeout(5*second))(ctx, echoMethod, nil, nil, nil, invoker); err != nil {
				t.Error(err)
			}
		})
	}
}

func TestAClassifierSeesTheHeaders(t *testing.T) {
	bubble(t, func(t *testing.T) {
		server := serve(t, script(unavailable().withHeader("k", "one"), ok()))
		saw := ""
		client := server.client(t, steady, WithClassifier(func(_ context.Context, a Attempt) Classification {
			saw = first(a.Header["k"])
			return Retry
		}))
		if _, err := client.Echo(t.Context(), request()); err != nil || saw != "one" {
			t.Errorf("the classifier saw the header %q, %v, want one", saw, err)
		}
	})
}

func TestDisabledCallsPassStraightThrough(t *testing.T) {
	for _, tt := range []struct {
		name string
		opts []Option
		call []grpc.CallOption
	}{
		{"Disable", []Option{Disable()}, nil},
		{"one attempt", []Option{WithMaxAttempts(1)}, nil},
		{"for this call", nil, []grpc.CallOption{Disable()}},
		{"for this method", []Option{WithMethod("/grpcretry.test.v1.EchoService/Echo", Disable())}, nil},
	} {
		t.Run(tt.name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				server := serve(t, always(unavailable().pushback("-1")))
				budget, events, finished := &aBudget{}, 0, 0
				client := server.client(t, append([]Option{WithBudget(budget),
					WithObserver(func(context.Context, Event) { events++ })}, tt.opts...)...)
				_, err := client.Echo(t.Context(), request(), append(tt.call, grpc.OnFinish(func(error) { finished++ }))...)
				wantUntouched(t, err, codes.Unavailable, "db-down")
				if len(budget.heard) != 0 || events != 0 || finished != 1 {
					t.Errorf("budget heard %v, %d events, OnFinish ran %d times, want none, none, once", budget.heard, events, finished)
				}
				wantTimes(t, server, 0)
			})
		})
	}
}

func TestLargeRequestsAreRetried(t *testing.T) {
	bubble(t, func(t *testing.T) {
		server := serve(t, script(unavailable(), ok()))
		req := &echov1.EchoRequest{Payload: bytes.Repeat([]byte("x"), 3<<20)}
		reply, err := server.client(t, steady).Echo(t.Context(), req)
		if err != nil || len(reply.GetPayload()) != 3<<20 {
			t.Errorf("Echo = %d bytes, %v, want 3 MiB", len(reply.GetPayload()), err)
		}
		wantTimes(t, server, 0, second)
	})
}

// A server may send any trailer; none makes a call wait wrongly or panic.
func TestHostilePushbackStops(t *testing.T) {
	for _, values := range [][]string{
		{"-1"}, {""}, {" 5"}, {"5 "}, {"+5"}, {"05"}, {"1.5"}, {"1e3"}, {"abc"}, {"2147483648"}, {"9223372036855"},
		{strings.Repeat("9", 4000)}, {"5", "5"}, {"5", "-1"}, {"\u0665"}, {"0x10"},
	} {
		bubble(t, func(t *testing.T) {
			server := serve(t, always(unavailable().pushback(values...)))
			_, err := server.client(t, steady, WithMaxServerDelay(-1)).Echo(t.Context(), request())
			wantStop(t, err, codes.Unavailable, ErrPushback, 1)
			if got := time.Since(server.start); got != 0 {
				t.Errorf("%q: waited %v", values, got)
			}
		})
	}
}

func TestManyAttemptsLeaveNothingBehind(t *testing.T) {
	bubble(t, func(t *testing.T) {
		attempts := 0
		invoker := func(context.Context, string, any, any, *grpc.ClientConn, ...grpc.CallOption) error {
			attempts++
			return status.Error(codes.Unavailable, "x")
		}
		err := UnaryClientInterceptor(WithMaxAttempts(100_000), WithBudget(Unlimited), WithAttemptTimeout(time.Hour))(
			t.Context(), "/s/m", nil, nil, nil, invoker)
		e := asError(t, err)
		if attempts != 100_000 || !strings.Contains(err.Error(), "100000 attempts") {
			t.Errorf("%d attempts in %v, want 100000", attempts, err)
		}
		if len(e.Attempts) > maxKept || len(e.Attempts) < maxKept/2 {
			t.Errorf("the error keeps %d attempts, want at most %d, and half of that", len(e.Attempts), maxKept)
		}
		for i, a := range e.Attempts {
			if want := 100_000 - len(e.Attempts) + 1 + i; a.Number != want {
				t.Fatalf("attempt %d of those that the error keeps is number %d, want %d: the last ones", i, a.Number, want)
			}
		}
	})
}

// A smoke test in real time, over loopback TCP.
func TestOverTCP(t *testing.T) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	server := grpc.NewServer()
	service := &scripted{script: script(unavailable(), unavailable().pushback("1"), ok()), start: time.Now()}
	echov1.RegisterEchoServiceServer(server, service)
	go server.Serve(listener)
	defer server.Stop()
	cc, err := grpc.NewClient(listener.Addr().String(), append(DialOptions(WithBackoff(Constant(time.Millisecond))),
		grpc.WithTransportCredentials(insecure.NewCredentials()))...)
	if err != nil {
		t.Fatal(err)
	}
	defer cc.Close()
	var at peer.Peer
	reply, err := echov1.NewEchoServiceClient(cc).Echo(t.Context(), request(), grpc.Peer(&at))
	if err != nil || reply.GetMessage() != "hello" || len(service.attempts()) != 3 || at.Addr.String() != listener.Addr().String() {
		t.Errorf("Echo = %v, %v after %d attempts at %v, want hello after 3", reply, err, len(service.attempts()), at.Addr)
	}
}

// invoke calls an interceptor with an invoker of the test.
func invoke(ctx context.Context, intercept grpc.UnaryClientInterceptor, f func(ctx context.Context, number int) error, opts ...grpc.CallOption) (made int, err error) {
	err = intercept(ctx, "/s/m", nil, nil, nil, func(ctx context.Context, _ string, _, _ any, _ *grpc.ClientConn, _ ...grpc.CallOption) error {
		made++
		return f(ctx, made)
	}, opts...)
	return made, err
}

// Interceptors below may return the error of a context as it is.
func TestBareContextErrors(t *testing.T) {
	t.Run("attempt timeout", func(t *testing.T) {
		bubble(t, func(t *testing.T) {
			made, err := invoke(t.Context(), UnaryClientInterceptor(WithAttemptTimeout(second), steady), func(ctx context.Context, number int) error {
				if number == 1 {
					<-ctx.Done()
				}
				return ctx.Err()
			})
			if made != 2 || err != nil {
				t.Errorf("%d attempts and %v, want 2 and success", made, err)
			}
		})
	})
	t.Run("the caller's deadline", func(t *testing.T) {
		bubble(t, func(t *testing.T) {
			ctx, cancel := context.WithTimeout(t.Context(), 3*second)
			defer cancel()
			_, err := invoke(ctx, UnaryClientInterceptor(steady), func(ctx context.Context, number int) error {
				if number == 1 {
					return errUnavailable
				}
				<-ctx.Done()
				return ctx.Err()
			})
			e := wantStop(t, err, codes.DeadlineExceeded, context.DeadlineExceeded, 2)
			if e.Last != errUnavailable {
				t.Errorf("Last is %v, want what the server said", e.Last)
			}
		})
	})
}

// A caller's cause may be an Error of another call, as with an errgroup.
func TestACauseThatIsAnErrorOfOursIsTheCallers(t *testing.T) {
	for _, reason := range []error{ErrConnClosed, ErrBudgetExhausted} {
		bubble(t, func(t *testing.T) {
			logs := &logRecorder{}
			ctx, cancel := context.WithCancelCause(t.Context())
			time.AfterFunc(second/2, func() { cancel(&Error{Reason: reason}) })
			_, err := invoke(ctx, UnaryClientInterceptor(steady, WithLogger(slog.New(logs))), func(context.Context, int) error { return errUnavailable })
			e := wantStop(t, err, codes.Canceled, context.Canceled, 1)
			if got := ReasonName(e.Reason); got != "cancelled" {
				t.Errorf("the reason is named %s, want cancelled", got)
			}
			wantLines(t, logs, "DEBUG") // the retry that was to come
		})
	}
}

func TestFirstFailureThatIsNotRetryableIsUntouchedWhateverElse(t *testing.T) {
	t.Run("with a server's stop", func(t *testing.T) {
		bubble(t, func(t *testing.T) {
			server := serve(t, script(fail(codes.NotFound, "gone").pushback("-1")))
			recorder := &eventRecorder{start: server.start}
			_, err := server.client(t, WithObserver(recorder.observe)).Echo(t.Context(), request())
			wantUntouched(t, err, codes.NotFound, "gone")
			if got := ReasonName(recorder.last.Reason); got != "pushback" {
				t.Errorf("the event says %s, want pushback", got)
			}
		})
	})
	t.Run("with the end of the caller's context", func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		want := status.Error(codes.NotFound, "gone")
		_, err := invoke(ctx, UnaryClientInterceptor(), func(context.Context, int) error { cancel(); return want })
		if err != want {
			t.Errorf("err = %v, want %v itself", err, want)
		}
	})
}

func TestAttemptTimeoutOnAFreshChannelLeavesGRPCsRetriesAlone(t *testing.T) {
	bubble(t, func(t *testing.T) {
		server := serve(t, always(unavailable().after(10*second)))
		cc := server.conn(t, grpc.WithDefaultServiceConfig(builtInPolicy), grpc.WithChainUnaryInterceptor(
			UnaryClientInterceptor(WithAttemptTimeout(15*second))))
		if _, err := echov1.NewEchoServiceClient(cc).Echo(t.Context(), request()); status.Code(err) != codes.Unavailable {
			t.Errorf("err = %v, want UNAVAILABLE", err)
		}
		if got := len(server.attempts()); got != 3 {
			t.Errorf("%d attempts, want the 3 of gRPC's policy", got)
		}
	})
}

func TestACallOfAnotherMethodBelowIsItsOwn(t *testing.T) {
	bubble(t, func(t *testing.T) {
		server := serve(t, script(unavailable(), ok(), ok()))
		careless := func(ctx context.Context, method string, req, reply any, cc *grpc.ClientConn, invoker grpc.UnaryInvoker, opts ...grpc.CallOption) error {
			if method == echov1.EchoService_Echo_FullMethodName {
				if _, err := echov1.NewEchoServiceClient(cc).Put(ctx, request(), opts...); err != nil {
					t.Errorf("Put: %v", err)
				}
			}
			return invoker(ctx, method, req, reply, cc, opts...)
		}
		cc := server.conn(t, append(DialOptions(steady), grpc.WithChainUnaryInterceptor(careless))...)
		if _, err := echov1.NewEchoServiceClient(cc).Echo(t.Context(), request()); err != nil {
			t.Error(err)
		}
		wantTimes(t, server, 0, second, second)
	})
}

func TestOptionsOfAnAttemptAreNotWrittenOverByTheNext(t *testing.T) {
	var kept [][]grpc.CallOption
	err := UnaryClientInterceptor(WithBackoff(Constant(0)))(t.Context(), "/s/m", nil, nil, nil,
		func(_ context.Context, _ string, _, _ any, _ *grpc.ClientConn, opts ...grpc.CallOption) error {
			kept = append(kept, opts)
			return errUnavailable
		}, grpc.StaticMethod())
	asError(t, err)
	for i, opts := range kept {
		for j, other := range kept[:i] {
			if &opts[0] == &other[0] {
				t.Errorf("attempts %d and %d have one slice of options", j+1, i+1)
			}
		}
	}
}
