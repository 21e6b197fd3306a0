package grpcretry

import (
	"bytes"
	"context"
	"errors"
	"net"
	"slices"
	"strconv"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"

	echov1 "github.com/grpcretry/grpcretry/proto/echo/v1"
)

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
