package grpcretry

import (
	"context"
	"errors"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
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
			script(fail(codes.ResourceExhausted, "x", retryInfoOf(10*second)), ok()), []Option{withRandom(func() float64 { return 0.5 })},
			[]time.Duration{0, 11 * second}},
		{"what is added to a RetryInfo is drawn from the time left if that is less",
			script(fail(codes.ResourceExhausted, "x", retryInfoOf(10*second)), ok()),
			[]Option{withRandom(func() float64 { return 0.5 }), WithMaxElapsed(11 * second)}, []time.Duration{0, 10*second + second/2}},
		{"pushback wins over RetryInfo", script(fail(codes.Unavailable, "x", retryInfoOf(10*second)).pushback("250"), ok()), nil,
			[]time.Duration{0, 250 * time.Millisecond}},
		{"RetryInfo restarts the backoff", script(unavailable(), fail(codes.Unavailable, "x", retryInfoOf(10*second)),
			unavailable(), ok()), nil,
			[]time.Duration{0, 1 * second, 11 * second, 12 * second}},
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
				cc := server.client(t, append([]Option{steady}, tt.opts...)...)
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

		{name: "no budget", script: always(unavailable()), opts: []Option{WithBudget(stingy{}), WithPatience(0)},
			times: at(0), code: codes.Unavailable, reason: ErrBudgetExhausted},
		{name: "no budget after the wait", script: always(unavailable()), opts: []Option{WithBudget(fickle{}), WithPatience(0)},
			times: at(0), code: codes.Unavailable, reason: ErrBudgetExhausted, elapsed: second},

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

func TestBudgetIsChargedWhenARetryIsSent(t *testing.T) {
	bubble(t, func(t *testing.T) {
		server := serve(t, always(unavailable()))
		budget, err := NewRatioBudget(RatioBudget{Ratio: 0.2, Reserve: 20})
		if err != nil {
			t.Fatal(err)
		}
		client := server.client(t, WithBackoff(Constant(time.Hour)), WithBudget(budget), WithPatience(0), WithMaxAttempts(2))
		const calls = 1000
		var group sync.WaitGroup
		var refused atomic.Int64
		for range calls {
			group.Go(func() {
				if _, err := client.Echo(t.Context(), request()); errors.Is(err, ErrBudgetExhausted) {
					refused.Add(1)
				}
			})
		}
		time.Sleep(time.Hour / 2)
		if got := budget.Balance(time.Now()); got != 20 || len(server.attempts()) != calls {
			t.Errorf("balance is %v after %d attempts, want 20 while all %d calls wait", got, len(server.attempts()), calls)
		}
		group.Wait()
		if got := budget.Balance(time.Now()); got != 0 || refused.Load() != calls-20 || len(server.attempts()) != calls+20 {
			t.Errorf("balance is %v after %d attempts, %d calls were refused a retry; want 0 after %d, and %d", got,
				len(server.attempts()), refused.Load(), calls+20, calls-20)
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
