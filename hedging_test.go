package grpcretry

import (
	"context"
	"errors"
	"slices"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	echov1 "github.com/grpcretry/grpcretry/proto/echo/v1"
)

// An outcome checks what a call returned after so many attempts.
type outcome func(t *testing.T, reply *echov1.EchoResponse, err error, attempts int)

// replied is a success with that reply.
func replied(message string) outcome {
	return func(t *testing.T, reply *echov1.EchoResponse, err error, _ int) {
		t.Helper()
		if err != nil || reply.GetMessage() != message {
			t.Errorf("Echo = %q, %v, want %q", reply.GetMessage(), err, message)
		}
	}
}

// ended is a failure with gRPC's own error.
func ended(code codes.Code) outcome {
	return func(t *testing.T, _ *echov1.EchoResponse, err error, _ int) {
		t.Helper()
		var e *Error
		if status.Code(err) != code || errors.As(err, &e) {
			t.Errorf("Echo = %v (%T), want gRPC's own %v", err, err, code)
		}
	}
}

// stopped is a failure with an *Error.
func stopped(code codes.Code, reason error) outcome {
	return func(t *testing.T, _ *echov1.EchoResponse, err error, attempts int) {
		t.Helper()
		wantStop(t, err, code, reason, attempts)
	}
}

// The five kinds of responses of gRFC A6, in many orders of arrival. Hedges are due each
// second; attempts are numbered as the server sees them.
func TestHedging(t *testing.T) {
	pushedBack := func(ms string) answer { return unavailable().pushback(ms) }
	never := says("never").after(time.Hour)
	for _, tt := range []struct {
		name    string
		attempt int // MaxAttempts
		delay   time.Duration
		script  []answer
		opts    []Option
		timeout time.Duration
		refuse  bool // the budgets do

		times   []time.Duration // when the server sees attempts
		want    outcome
		elapsed time.Duration // at the end of the call
	}{
		// 1. Success.
		{name: "a response before the delay", attempt: 3, delay: second, script: []answer{says("a").after(second / 2)},
			times: []time.Duration{0}, want: replied("a"), elapsed: second / 2},
		{name: "a response at the delay is too late not to hedge", attempt: 2, delay: second,
			script: []answer{says("a").after(second + 1), says("b")},
			times:  []time.Duration{0, second}, want: replied("b"), elapsed: second},
		{name: "the hedge wins", attempt: 3, delay: second, script: []answer{never, says("b").after(second / 10)},
			times: []time.Duration{0, second}, want: replied("b"), elapsed: 11 * second / 10},
		{name: "the first wins after all", attempt: 3, delay: second, script: []answer{says("a").after(3 * second / 2), never},
			times: []time.Duration{0, second}, want: replied("a"), elapsed: 3 * second / 2},
		{name: "the third wins", attempt: 3, delay: second, script: []answer{never, never, says("c").after(second / 10)},
			times: []time.Duration{0, second, 2 * second}, want: replied("c"), elapsed: 21 * second / 10},
		{name: "no more than MaxAttempts", attempt: 2, delay: second, script: []answer{says("a").after(9 * second), never},
			times: []time.Duration{0, second}, want: replied("a"), elapsed: 9 * second},
		{name: "delay 0 sends all at once", attempt: 3, delay: 0, script: []answer{never, never, says("c").after(second)},
			times: []time.Duration{0, 0, 0}, want: replied("c"), elapsed: second},

		// 2. Fatal.
		{name: "a fatal status of the first", attempt: 3, delay: second, script: []answer{fail(codes.NotFound, "x")},
			times: []time.Duration{0}, want: ended(codes.NotFound)},
		{name: "a fatal status of a hedge ends the call", attempt: 3, delay: second,
			script: []answer{never, fail(codes.NotFound, "x").after(second / 10)},
			times:  []time.Duration{0, second}, want: ended(codes.NotFound), elapsed: 11 * second / 10},
		{name: "a fatal status after a retryable one", attempt: 3, delay: second,
			script: []answer{unavailable(), fail(codes.NotFound, "x").after(second / 10)},
			times:  []time.Duration{0, second}, want: stopped(codes.NotFound, ErrNotRetryable), elapsed: 11 * second / 10},
		{name: "a fatal status that also forbids more", attempt: 3, delay: second,
			script: []answer{never, fail(codes.NotFound, "x").pushback("-1")},
			times:  []time.Duration{0, second}, want: ended(codes.NotFound), elapsed: second},

		// 3. Retryable.
		{name: "the backoff after a failure, then the delay again", attempt: 4, delay: second,
			script: []answer{unavailable().after(3 * second / 10), never, never, says("d")},
			times:  []time.Duration{0, 13 * second / 10, 23 * second / 10, 33 * second / 10}, want: replied("d"), elapsed: 33 * second / 10},
		{name: "a hedge fails fast, the first responds later", attempt: 2, delay: second,
			script: []answer{says("a").after(2 * second), unavailable()},
			times:  []time.Duration{0, second}, want: replied("a"), elapsed: 2 * second},
		{name: "a hedge fails, the next is sent after the delay", attempt: 3, delay: second,
			script: []answer{never, unavailable().after(second / 10), says("c").after(second / 10)},
			times:  []time.Duration{0, second, 2 * second}, want: replied("c"), elapsed: 21 * second / 10},
		{name: "the last failure is followed by the backoff", attempt: 3, delay: second,
			script: []answer{unavailable().after(3 * second / 2), unavailable(), says("c")},
			times:  []time.Duration{0, second, 5 * second / 2}, want: replied("c"), elapsed: 5 * second / 2},
		{name: "all fail immediately", attempt: 3, delay: second, script: []answer{unavailable(), unavailable(), unavailable()},
			times: []time.Duration{0, second, 3 * second}, want: stopped(codes.Unavailable, ErrAttemptsExhausted), elapsed: 3 * second},
		{name: "all fail, the first last", attempt: 2, delay: second, script: []answer{overloaded().after(5 * second), unavailable()},
			times: []time.Duration{0, second}, want: stopped(codes.ResourceExhausted, ErrAttemptsExhausted), elapsed: 5 * second},
		{name: "all fail, with delay 0", attempt: 3, delay: 0,
			script: []answer{unavailable().after(second), unavailable().after(second), unavailable().after(second)},
			times:  []time.Duration{0, 0, 0}, want: stopped(codes.Unavailable, ErrAttemptsExhausted), elapsed: second},

		// 4. Pushback: stop.
		{name: "a stop from a hedge, the first may still win", attempt: 3, delay: second,
			script: []answer{says("a").after(5 * second), pushedBack("-1")},
			times:  []time.Duration{0, second}, want: replied("a"), elapsed: 5 * second},
		{name: "a stop from the first", attempt: 3, delay: second, script: []answer{pushedBack("-1")},
			times: []time.Duration{0}, want: stopped(codes.Unavailable, ErrPushback)},
		{name: "after a stop, a failure sends none", attempt: 4, delay: second,
			script: []answer{overloaded().after(5 * second), pushedBack("-1")},
			times:  []time.Duration{0, second}, want: stopped(codes.ResourceExhausted, ErrPushback), elapsed: 5 * second},
		{name: "a stop takes back what was to come", attempt: 4, delay: second,
			script: []answer{pushedBack("-1").after(2 * second), pushedBack("9000")},
			times:  []time.Duration{0, second}, want: stopped(codes.Unavailable, ErrPushback), elapsed: 2 * second},

		// 5. Pushback: wait.
		{name: "a wait, then the delay again", attempt: 4, delay: second, script: []answer{never, pushedBack("3000"), never, says("d")},
			times: []time.Duration{0, second, 4 * second, 5 * second}, want: replied("d"), elapsed: 5 * second},
		{name: "a wait with nothing in flight", attempt: 3, delay: second, script: []answer{pushedBack("3000"), says("b")},
			times: []time.Duration{0, 3 * second}, want: replied("b"), elapsed: 3 * second},
		{name: "a wait shorter than the delay", attempt: 3, delay: 9 * second, script: []answer{pushedBack("1000"), never, says("c")},
			times: []time.Duration{0, second, 10 * second}, want: replied("c"), elapsed: 10 * second},
		{name: "a wait, then a failure without: the wait holds for the call", attempt: 4, delay: second,
			script: []answer{unavailable().after(2 * second), pushedBack("9000"), says("c")},
			times:  []time.Duration{0, second, 10 * second}, want: replied("c"), elapsed: 10 * second},
		{name: "two waits: the newer one counts", attempt: 4, delay: second,
			script: []answer{pushedBack("1500").after(2 * second), pushedBack("9000"), says("c")},
			times:  []time.Duration{0, second, 7 * second / 2}, want: replied("c"), elapsed: 7 * second / 2},
		{name: "the first wins in a wait", attempt: 3, delay: second,
			script: []answer{says("a").after(3 * second), pushedBack("60000")},
			times:  []time.Duration{0, second}, want: replied("a"), elapsed: 3 * second},
		{name: "a wait of the last attempt", attempt: 2, delay: second, script: []answer{pushedBack("0"), pushedBack("1000")},
			times: []time.Duration{0, 0}, want: stopped(codes.Unavailable, ErrAttemptsExhausted)},
		{name: "a wait over MaxServerDelay sends no more", attempt: 3, delay: second,
			script: []answer{says("a").after(5 * second), pushedBack("300001")},
			times:  []time.Duration{0, second}, want: replied("a"), elapsed: 5 * second},
		{name: "a wait past the deadline sends no more", attempt: 3, delay: second, timeout: 6 * second,
			script: []answer{says("a").after(5 * second), pushedBack("5000")},
			times:  []time.Duration{0, second}, want: replied("a"), elapsed: 5 * second},
		{name: "RetryInfo is a wait, spread", attempt: 3, delay: second,
			script: []answer{fail(codes.Unavailable, "x", retryInfoOf(10*second)), says("b")},
			times:  []time.Duration{0, 11 * second}, want: replied("b"), elapsed: 11 * second},

		// Limits.
		{name: "the deadline", attempt: 9, delay: second, timeout: 5 * second / 2, script: []answer{never, never, never},
			times: []time.Duration{0, second, 2 * second}, want: stopped(codes.DeadlineExceeded, context.DeadlineExceeded),
			elapsed: 5 * second / 2},
		{name: "MaxElapsed", attempt: 9, delay: second, opts: []Option{WithMaxElapsed(2 * second)},
			script: []answer{says("a").after(9 * second), never},
			times:  []time.Duration{0, second}, want: replied("a"), elapsed: 9 * second},
		{name: "the attempt timeout of each", attempt: 3, delay: second,
			opts:   []Option{WithAttemptTimeout(3 * second / 2), WithBackoff(Constant(second / 2))},
			script: []answer{hang(), hang(), says("c")},
			times:  []time.Duration{0, second, 2 * second}, want: replied("c"), elapsed: 2 * second},
		{name: "an empty budget ends nothing", attempt: 3, delay: second, refuse: true, script: []answer{says("a").after(9 * second)},
			times: []time.Duration{0}, want: replied("a"), elapsed: 9 * second},
		{name: "an empty budget with nothing in flight", attempt: 3, delay: second, refuse: true, opts: []Option{WithPatience(0)},
			script: []answer{unavailable().after(3 * second)},
			times:  []time.Duration{0}, want: stopped(codes.Unavailable, ErrBudgetExhausted), elapsed: 3 * second},

		// Codes.
		{name: "own codes", attempt: 2, delay: second, script: []answer{fail(codes.Internal, "x"), says("b")},
			opts:  []Option{WithCodes(codes.Internal)},
			times: []time.Duration{0, second}, want: replied("b"), elapsed: second},
		{name: "own codes replace those of the policy", attempt: 2, delay: second, script: []answer{unavailable()},
			opts:  []Option{WithCodes(codes.Internal)},
			times: []time.Duration{0}, want: ended(codes.Unavailable)},
		{name: "no code of the server", attempt: 2, delay: second, script: []answer{unavailable()},
			opts:  []Option{WithCodes(codes.Aborted)},
			times: []time.Duration{0}, want: ended(codes.Unavailable)},
		{name: "a classifier", attempt: 2, delay: second, script: []answer{fail(codes.NotFound, "x"), says("b")},
			opts:  []Option{WithClassifier(func(context.Context, Attempt) Classification { return Retry })},
			times: []time.Duration{0, second}, want: replied("b"), elapsed: second},
	} {
		t.Run(tt.name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				server := serve(t, script(tt.script...))
				budget, hedges := &aBudget{refuse: tt.refuse}, &aBudget{refuse: tt.refuse}
				events := &hedgeEvents{}
				client := server.fixed(t, 0.5, append([]Option{steady, WithBudget(budget), WithObserver(events.observe),
					hedged(tt.attempt, Hedging{Delay: HedgeAfter(tt.delay), Budget: hedges})}, tt.opts...)...)
				ctx := t.Context()
				if tt.timeout > 0 {
					var cancel context.CancelFunc
					ctx, cancel = context.WithTimeout(ctx, tt.timeout)
					defer cancel()
				}
				reply, err := client.Echo(ctx, request())
				if got := time.Since(server.start); got != tt.elapsed {
					t.Errorf("Echo took %v, want %v", got, tt.elapsed)
				}
				wantTimes(t, server, tt.times...)
				tt.want(t, reply, err, len(tt.times))
				events.check(t, err)
				wantAccounts(t, budget, hedges, len(tt.times))
			})
		})
	}
}

// wantAccounts: both budgets have heard of each attempt once, and one of them has paid for each but the first.
func wantAccounts(t *testing.T, own, hedges *aBudget, attempts int) {
	t.Helper()
	paid := []int{1}
	for name, b := range map[string]*aBudget{"budget": own, "budget of hedges": hedges} {
		before := len(paid)
		for _, o := range b.heard {
			if o.Attempt > 1 {
				paid = append(paid, o.Attempt)
			}
		}
		if taken := len(b.asked) - b.refunded; len(b.heard) != attempts || !b.refuse && taken != len(paid)-before {
			t.Errorf("%s has paid for %d attempts, and heard %v, want all of %d", name, taken, b.heard, attempts)
		}
	}
	slices.Sort(paid)
	for i, number := range paid {
		if number != i+1 || len(paid) != attempts {
			t.Errorf("the budgets have paid for the attempts %v, want each of %d once", paid, attempts)
		}
	}
}

// Each attempt starts from the caller's metadata and tells the server how many were sent.
func TestServerIsToldOfHedges(t *testing.T) {
	bubble(t, func(t *testing.T) {
		server := serve(t, always(says("x").after(5*second/2)))
		ctx := metadata.AppendToOutgoingContext(t.Context(), "who", "me")
		server.client(t, hedged(3, Hedging{Delay: HedgeAfter(second)})).Echo(ctx, request())
		for i, a := range server.attempts() {
			if a.previous != i || first(a.metadata["who"]) != "me" {
				t.Errorf("attempt %d says %d attempts before it and has metadata %v", i+1, a.previous, a.metadata)
			}
		}
		if got := len(server.attempts()); got != 3 {
			t.Errorf("%d attempts, want 3", got)
		}
	})
}

// A channel may lose its connection while an attempt goes on there, as when a server shuts
// down in peace: then a hedge is what connects it again.
func TestAHedgeWakesAnIdleChannel(t *testing.T) {
	bubble(t, func(t *testing.T) {
		server := serve(t, always(says("a").after(3*second)))
		events := &hedgeEvents{}
		cc := server.conn(t, grpc.WithChainUnaryInterceptor(UnaryClientInterceptor(
			WithObserver(events.observe), hedged(2, Hedging{Delay: HedgeAfter(second)}))))
		time.AfterFunc(second/2, server.server.GracefulStop)
		reply, err := echov1.NewEchoServiceClient(cc).Echo(t.Context(), request())
		if reply.GetMessage() != "a" || err != nil {
			t.Errorf("Echo = %v, %v, want a", reply, err)
		}
		var sent []time.Duration
		for _, e := range events.events {
			if e.Kind == AttemptStart {
				sent = append(sent, e.Attempt.Start.Sub(server.start))
			}
		}
		if !slices.Equal(sent, []time.Duration{0, second}) {
			t.Errorf("attempts were sent at %v, want a hedge after 1s", sent)
		}
	})
}
