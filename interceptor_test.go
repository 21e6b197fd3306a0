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
		{"backoff grows", script(unavailable(), unavailable(), unavailable(), ok()), nil,
			[]time.Duration{0, 1 * second, 3 * second, 7 * second}},
		{"overload", script(overloaded(), ok()), nil, []time.Duration{0, 1 * second}},
		{"overload has its own backoff, and shares the count", script(unavailable(), overloaded(), unavailable(), ok()),
			[]Option{WithOverloadBackoff(Exponential{Base: 10 * second, Max: time.Hour, Jitter: NoJitter})},
			[]time.Duration{0, 1 * second, 21 * second, 25 * second}},
		{"pushback replaces the backoff", script(unavailable().pushback("7000"), ok()), nil, []time.Duration{0, 7 * second}},
		{"pushback of zero", script(unavailable().pushback("0"), ok()), nil, []time.Duration{0, 0}},
		{"pushback restarts the backoff", script(unavailable(), unavailable().pushback("7000"), unavailable(), ok()), nil,
			[]time.Duration{0, 1 * second, 8 * second, 9 * second}},
		{"RetryInfo is waited for, with a tenth on top for u = 0.5",
			script(fail(codes.ResourceExhausted, "x", retryInfoOf(10*second)), ok()), nil,
			[]time.Duration{0, 11 * second}},
		{"pushback wins over RetryInfo", script(fail(codes.Unavailable, "x", retryInfoOf(10*second)).pushback("250"), ok()), nil,
			[]time.Duration{0, 250 * time.Millisecond}},
		{"RetryInfo restarts the backoff", script(unavailable(), fail(codes.Unavailable, "x", retryInfoOf(10*second)),
			unavailable(), ok()), nil,
			[]time.Duration{0, 1 * second, 12 * second, 13 * second}},
		{"headers do not commit", script(unavailable().withHeader("k", "v"), ok()), nil, []time.Duration{0, 1 * second}},
		{"slow answers count into the time", script(unavailable().after(3*second), ok()), nil, []time.Duration{0, 4 * second}},
		{"other codes", script(fail(codes.Internal, "x"), ok()), []Option{WithCodes(codes.Internal)}, []time.Duration{0, 1 * second}},
		{"ten attempts, no hidden cap", script(unavailable(), unavailable(), unavailable(), unavailable(), unavailable(), unavailable(),
			unavailable(), unavailable(), unavailable(), ok()),
			[]Option{WithMaxAttempts(10), WithBackoff(Constant(second)), WithBudget(Unlimited)},
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
	// at returns times since the start of the call, at which the server sees attempts.
	at := func(seconds ...time.Duration) (times []time.Duration) {
		for _, s := range seconds {
			times = append(times, s*second)
		}
		return times
	}
	for _, tt := range []struct {
		name     string
		script   func(int) answer
		opts     []Option
		deadline time.Duration // of the call; 0 for none

		times   []time.Duration // when the server sees attempts
		code    codes.Code
		reason  error
		elapsed time.Duration // at the end of the call
	}{
		{name: "no attempts left", script: always(unavailable()),
			times: at(0, 1, 3, 7), code: codes.Unavailable, reason: ErrAttemptsExhausted, elapsed: 7 * second},
		{name: "two attempts mean two", script: always(unavailable()), opts: []Option{WithMaxAttempts(2)},
			times: at(0, 1), code: codes.Unavailable, reason: ErrAttemptsExhausted, elapsed: second},
		{name: "not retryable after a retry", script: script(unavailable(), fail(codes.NotFound, "gone")),
			times: at(0, 1), code: codes.NotFound, reason: ErrNotRetryable, elapsed: second},

		{name: "the server forbids it", script: script(unavailable().pushback("-1")),
			times: at(0), code: codes.Unavailable, reason: ErrPushback},
		{name: "the server forbids it later", script: script(unavailable(), unavailable().pushback("-1")),
			times: at(0, 1), code: codes.Unavailable, reason: ErrPushback, elapsed: second},
		{name: "pushback too long", script: script(unavailable().pushback("300001")),
			times: at(0), code: codes.Unavailable, reason: ErrPushback},

		{name: "the deadline is too near", script: always(unavailable()), deadline: 3 * second, // when the next would start
			times: at(0, 1), code: codes.Unavailable, reason: ErrDeadline, elapsed: second},
		{name: "pushback beyond the deadline", script: script(unavailable().pushback("60000")), deadline: 30 * second,
			times: at(0), code: codes.Unavailable, reason: ErrDeadline},
		{name: "max elapsed", script: always(unavailable()), opts: []Option{WithMaxElapsed(3 * second)},
			times: at(0, 1), code: codes.Unavailable, reason: ErrMaxElapsed, elapsed: second},
		{name: "max elapsed does not cut an attempt", script: script(unavailable(), unavailable().after(time.Hour)),
			opts:  []Option{WithMaxElapsed(3 * second)},
			times: at(0, 1), code: codes.Unavailable, reason: ErrMaxElapsed, elapsed: time.Hour + second},

		{name: "no budget", script: always(unavailable()), opts: []Option{WithBudget(&aBudget{refuse: true})},
			times: at(0), code: codes.Unavailable, reason: ErrBudgetExhausted},
		{name: "headers commit by the letter of A6", script: script(unavailable().withHeader("k", "v")),
			opts:  []Option{WithCommitOnHeaders(true)},
			times: at(0), code: codes.Unavailable, reason: ErrCommitted},
		{name: "without headers the letter allows it", script: always(unavailable()),
			opts:  []Option{WithCommitOnHeaders(true), WithMaxAttempts(2)},
			times: at(0, 1), code: codes.Unavailable, reason: ErrAttemptsExhausted, elapsed: second},

		{name: "deadline in an attempt", script: script(unavailable(), hang()), deadline: 10 * second,
			times: at(0, 1), code: codes.DeadlineExceeded, reason: context.DeadlineExceeded, elapsed: 10 * second},
		{name: "deadline in the first attempt", script: script(hang()), deadline: 10 * second,
			times: at(0), code: codes.DeadlineExceeded, reason: context.DeadlineExceeded, elapsed: 10 * second},
		{name: "deadline in an attempt, whatever the codes", script: script(hang()), deadline: 10 * second,
			opts:  []Option{WithCodes(codes.DeadlineExceeded, codes.Canceled)},
			times: at(0), code: codes.DeadlineExceeded, reason: context.DeadlineExceeded, elapsed: 10 * second},

		{name: "the last attempt keeps its timeout without a deadline", script: always(hang()),
			opts:  []Option{WithAttemptTimeout(2 * second), WithMaxAttempts(2)},
			times: at(0, 3), code: codes.DeadlineExceeded, reason: ErrAttemptsExhausted, elapsed: 5 * second},
		{name: "the last attempt gets all the time of a deadline", script: always(hang()), deadline: time.Minute,
			opts:  []Option{WithAttemptTimeout(2 * second), WithMaxAttempts(2)},
			times: at(0, 3), code: codes.DeadlineExceeded, reason: context.DeadlineExceeded, elapsed: time.Minute},
		{name: "an attempt timeout beyond the deadline", script: always(hang()), deadline: time.Minute,
			opts:  []Option{WithAttemptTimeout(time.Hour)},
			times: at(0), code: codes.DeadlineExceeded, reason: context.DeadlineExceeded, elapsed: time.Minute},
		{name: "a server's status stands through attempt timeouts", script: script(unavailable(), hang()),
			opts:  []Option{WithAttemptTimeout(2 * second), WithMaxAttempts(2)},
			times: at(0, 1), code: codes.Unavailable, reason: ErrAttemptsExhausted, elapsed: 3 * second},
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
		// Every retry waits for an hour, so none has been sent when the budget refuses one to the last call.
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
		{"retries, then success", script(unavailable(), overloaded(), ok()), nil,
			[]Outcome{{Attempt: 1, Result: Failed}, {Attempt: 2, Result: Failed}, {Attempt: 3, Result: Succeeded}}},
		{"attempts exhausted", always(unavailable()), []Option{WithMaxAttempts(2)},
			[]Outcome{{Attempt: 1, Result: Failed}, {Attempt: 2, Result: Failed}}},
		{"not retryable", script(unavailable(), fail(codes.NotFound, "x")), nil,
			[]Outcome{{Attempt: 1, Result: Failed}, {Attempt: 2, Result: Answered}}},
		{"a failure that shows nothing", script(unavailable(), fail(codes.Internal, "x")), nil,
			[]Outcome{{Attempt: 1, Result: Failed}, {Attempt: 2, Result: Ignored}}},
		{"told to stop", script(fail(codes.NotFound, "x").pushback("-1")), nil, []Outcome{{Attempt: 1, Result: Failed}}},
		{"attempt timeout", script(hang(), ok()), []Option{WithAttemptTimeout(second)},
			[]Outcome{{Attempt: 1, Result: Failed}, {Attempt: 2, Result: Succeeded}}},
		{"committed", script(unavailable().withHeader("k", "v")), []Option{WithCommitOnHeaders(true)},
			[]Outcome{{Attempt: 1, Result: Failed}}},
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
		below := belowUnary(func(ctx context.Context, next func(context.Context) error) error {
			token++
			ctx = metadata.AppendToOutgoingContext(ctx, "authorization", strconv.Itoa(token))
			return next(ctx)
		})
		cc := server.conn(t, append(DialOptions(steady), below)...)
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
