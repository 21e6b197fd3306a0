package grpcretry

import (
	"context"
	"errors"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
)

const someMethod = "/shop.v1.Catalog/GetItem"

// newPlan returns the public Plan of a call that starts at noon.
func newPlan(t *testing.T, ctx context.Context, opts ...Option) *Plan {
	t.Helper()
	r, err := New(opts...)
	if err != nil {
		t.Fatal(err)
	}
	return r.Plan(ctx, someMethod, "catalog", noon)
}

// failed returns an attempt that failed with code after a second.
func failed(a Attempt, code codes.Code) Attempt {
	a.Duration, a.Err = second, fail(code, "x").err
	return a
}

func TestPlanWaitsForAConnection(t *testing.T) {
	backoff := WithBackoff(Constant(second))
	for _, tt := range []struct {
		name      string
		connected time.Duration // after noon, when the driver calls Due
		want      Step
		due       time.Duration // then
	}{
		{"there is one after a while", 3 * second, Step{}, 4 * second},
		{"there is none in time", 10 * second, Step{End: true, Reason: ErrNotConnected}, 0},
	} {
		t.Run(tt.name, func(t *testing.T) {
			plan := newPlan(t, t.Context(), backoff)
			first, _ := plan.Sent(noon)
			first = failed(first, codes.Unavailable)
			first.Unsent = true
			if got, want := plan.Ended(first, noon, 0.5), (Step{Connect: true}); got != want || !plan.DueAt().Equal(noon.Add(10*second)) {
				t.Fatalf("Ended = %+v, due at %v, want %+v, due after 10s", got, plan.DueAt(), want)
			}
			got := plan.Due(noon.Add(tt.connected))
			due := time.Duration(0)
			if at := plan.DueAt(); !at.IsZero() {
				due = at.Sub(noon)
			}
			if got != tt.want || due != tt.due {
				t.Errorf("Due = %+v, then due after %v; want %+v, %v", got, due, tt.want, tt.due)
			}
		})
	}
}

func TestPlanCutsAnOverdueAttempt(t *testing.T) {
	for _, tt := range []struct {
		name   string
		budget Budget
		cut    bool
	}{
		{"another attempt replaces it", &tally{}, true},
		{"the budget refuses, so it goes on", stingy{}, false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			ctx, cancel := context.WithDeadline(t.Context(), noon.AddDate(1000, 0, 0))
			defer cancel()
			plan := newPlan(t, ctx, WithAttemptTimeout(second), WithBackoff(Constant(0)), WithBudget(tt.budget))
			first, timeout := plan.Sent(noon)
			if timeout != second {
				t.Errorf("the first attempt may run for %v, want 1s", timeout)
			}
			if got := plan.Overdue(first, noon.Add(second), 0.5); got != tt.cut {
				t.Fatalf("Overdue = %v, want %v", got, tt.cut)
			}
			if !tt.cut {
				return
			}
			first.Duration, first.Err = second, ErrAttemptTimeout
			if got, want := plan.Ended(first, noon.Add(second), 0.5), (Step{Send: true}); got != want {
				t.Errorf("Ended = %+v, want %+v", got, want)
			}
		})
	}
}

// A hedged call's delay measures first attempts, including those that lost.
func TestPlanHedges(t *testing.T) {
	delay := &scriptedDelay{delay: second}
	plan := newPlan(t, t.Context(), WithHedging(Hedging{Delay: delay, Budget: Unlimited, AllMethodsAreSafe: true}), WithBudget(Unlimited))
	first, _ := plan.Sent(noon)
	if due := plan.DueAt(); !due.Equal(noon.Add(second)) {
		t.Errorf("a hedge is due at %v, want a second after noon", due)
	}
	if got, want := plan.Due(noon.Add(second)), (Step{Send: true}); got != want {
		t.Fatalf("Due = %+v, want %+v", got, want)
	}
	hedge, _ := plan.Sent(noon.Add(second))
	if !hedge.Hedge || hedge.Number != 2 || hedge.WaitSource != waitHedgeDelay {
		t.Errorf("the second attempt is %+v, want a hedge", hedge)
	}
	hedge.Duration = second
	if got, want := plan.Ended(hedge, noon.Add(2*second), 0), (Step{End: true}); got != want {
		t.Errorf("Ended = %+v, want %+v", got, want)
	}
	first.Duration, first.Err = 2*second, ErrHedgeLost
	if got := plan.Ended(first, noon.Add(2*second), 0); !got.End {
		t.Errorf("Ended = %+v for the loser, want the end", got)
	}
	if want := (measurement{2 * second, true}); len(delay.measured) != 1 || delay.measured[0] != want {
		t.Errorf("the delay measured %v, want %v", delay.measured, want)
	}
}

type measurement struct {
	took time.Duration
	lost bool
}

// A scriptedDelay is constant, and keeps the latencies that it was given.
type scriptedDelay struct {
	delay    time.Duration
	measured []measurement
}

func (d *scriptedDelay) Delay(string, time.Time) (time.Duration, bool) { return d.delay, true }

func (d *scriptedDelay) Answered(_ string, took time.Duration, lost bool, _ time.Time) {
	d.measured = append(d.measured, measurement{took, lost})
}

// The call ends with its context, and has its context's deadline.
func TestPlanEndsWithItsContext(t *testing.T) {
	ctx, cancel := context.WithCancelCause(t.Context())
	gone := errors.New("the user has left")
	plan := newPlan(t, ctx)
	first, _ := plan.Sent(noon)
	cancel(gone)
	if got, want := plan.Ended(failed(first, codes.Unavailable), noon, 0.5), (Step{End: true, Reason: gone}); got != want {
		t.Errorf("Ended = %+v, want %+v", got, want)
	}
}

// If the context ends before a retry is sent, the charge for the retry is refunded.
func TestPlanGivesBackARetryThatIsNotSent(t *testing.T) {
	budget := &tally{}
	ctx, cancel := context.WithCancel(t.Context())
	plan := newPlan(t, ctx, WithBudget(budget))
	first, _ := plan.Sent(noon)
	if got := plan.Ended(failed(first, codes.Unavailable), noon, 0.5); got != (Step{}) {
		t.Fatalf("Ended = %+v, want a wait", got)
	}
	cancel()
	if got, want := plan.Due(noon), (Step{End: true, Reason: context.Canceled}); got != want {
		t.Errorf("Due = %+v, want %+v", got, want)
	}
	if want := (counts{withdrawn: 1, refunded: 1, told: [4]int{Failed: 1}, highest: 1}); budget.counts != want || !plan.DueAt().IsZero() {
		t.Errorf("budget is %+v, due at %v; want %+v, never", budget.counts, plan.DueAt(), want)
	}
}

// A method that passes through spends nothing and reports nothing.
func TestPlanOfAMethodThatPassesThrough(t *testing.T) {
	budget := &tally{}
	plan := newPlan(t, t.Context(), WithBudget(budget), WithAttemptTimeout(second), WithMethod("/shop.v1.Catalog/", Disable()))
	first, timeout := plan.Sent(noon)
	if got := plan.Ended(failed(first, codes.Unavailable), noon, 0.5); !got.End || got.Reason == nil || timeout != 0 {
		t.Errorf("Ended = %+v, timeout %v; want the end for a reason, and none", got, timeout)
	}
	if budget.counts != (counts{}) {
		t.Errorf("budget is %+v, want it unused", budget.counts)
	}
}

func TestPlanGivesBackAnUnsentRetryIfTheBackoffPanics(t *testing.T) {
	budget, err := NewConcurrencyBudget(1)
	if err != nil {
		t.Fatal(err)
	}
	r, err := New(WithBudget(budget), WithBackoff(panicAfter(1)))
	if err != nil {
		t.Fatal(err)
	}
	now := time.Now()
	p := r.Plan(t.Context(), echoMethod, "", now)
	a, _ := p.Sent(now)
	a.Err = errUnavailable
	if step := p.Ended(a, now, 0); !step.Send {
		t.Fatalf("after the first failure: %+v, want an attempt now", step)
	}
	a, _ = p.Sent(now)
	a.Err, a.Unsent = errUnavailable, true
	func() {
		defer func() { _ = recover() }()
		p.Ended(a, now, 0)
		t.Error("the backoff has not panicked")
	}()
	if got := budget.Balance(now); got != 1 {
		t.Errorf("%v of 1 retry is left in the budget", got)
	}
}

// An attempt that failed because an attempt of another call, made by it, exceeded its timeout was
// not cut itself.
func TestPlanKnowsWhichAttemptItHasCut(t *testing.T) {
	for _, timeout := range []time.Duration{0, 3 * second} {
		plan := newPlan(t, t.Context(), WithAttemptTimeout(timeout))
		a, _ := plan.Sent(noon)
		a.Duration, a.Err = second, &Error{Last: newAttemptTimeoutError(second, nil), Reason: ErrAttemptsExhausted}
		if got, want := plan.Ended(a, noon.Add(second), 0.5), (Step{End: true, Reason: ErrNotRetryable}); got != want {
			t.Errorf("with a timeout of %v, Ended = %+v, want %+v", timeout, got, want)
		}
	}
}

func TestPlanGivesBackAHedgeIfItsBudgetPanics(t *testing.T) {
	budget := &tally{}
	plan := newPlan(t, t.Context(), WithBudget(budget),
		WithHedging(Hedging{Delay: HedgeAfter(second), Budget: panickingBudget{}, AllMethodsAreSafe: true}))
	plan.Sent(noon)
	func() {
		defer func() { _ = recover() }()
		plan.Due(noon.Add(second))
		t.Error("the budget has not panicked")
	}()
	if want := (counts{withdrawn: 1, refunded: 1}); budget.counts != want {
		t.Errorf("budget is %+v, want %+v", budget.counts, want)
	}
}

// If the budget refuses the attempt after the last one in flight, the call is over, and no hedge is due.
func TestPlanThatHasEndedIsNotDue(t *testing.T) {
	plan := newPlan(t, t.Context(), WithBudget(stingy{}), WithHedging(Hedging{Delay: HedgeAfter(second), AllMethodsAreSafe: true}))
	first, _ := plan.Sent(noon)
	if got, want := plan.Ended(failed(first, codes.Unavailable), noon, 0.5), (Step{End: true, Reason: ErrBudgetExhausted}); got != want {
		t.Errorf("Ended = %+v, want %+v", got, want)
	}
	if due := plan.DueAt(); !due.IsZero() {
		t.Errorf("due %v after noon, want never", due.Sub(noon))
	}
}

// A wait longer than MaxServerDelay rules out further attempts, even if it is asked for when all were
// sent and one of these then turns out not to have reached a server.
func TestPlanObeysTooLongAWaitAlsoAfterTheLastAttempt(t *testing.T) {
	plan := newPlan(t, t.Context(), WithHedging(Hedging{Delay: HedgeAfter(second), Budget: Unlimited, AllMethodsAreSafe: true}))
	first, _ := plan.Sent(noon)
	plan.Due(noon.Add(second))
	hedge, _ := plan.Sent(noon.Add(second))
	first = failed(first, codes.Unavailable)
	first.Trailer = metadata.MD{pushbackKey: {"300001"}}
	if got, want := plan.Ended(first, noon.Add(second), 0.5), (Step{Reason: ErrAttemptsExhausted}); got != want {
		t.Errorf("Ended = %+v, want %+v", got, want)
	}
	hedge = failed(hedge, codes.Unavailable)
	hedge.Unsent = true
	if got, want := plan.Ended(hedge, noon.Add(second), 0.5), (Step{End: true, Reason: ErrPushback}); got != want {
		t.Errorf("Ended = %+v, want %+v", got, want)
	}
}

// If those attempts did reach a server, there are simply none left.
func TestPlanWithTooLongAWaitAfterTheLastAttemptIsExhausted(t *testing.T) {
	plan := newPlan(t, t.Context(), WithHedging(Hedging{Delay: HedgeAfter(second), Budget: Unlimited, AllMethodsAreSafe: true}))
	first, _ := plan.Sent(noon)
	plan.Due(noon.Add(second))
	hedge, _ := plan.Sent(noon.Add(second))
	first = failed(first, codes.Unavailable)
	first.Trailer = metadata.MD{pushbackKey: {"300001"}}
	plan.Ended(first, noon.Add(second), 0.5)
	if got, want := plan.Ended(failed(hedge, codes.Unavailable), noon.Add(second), 0.5), (Step{End: true, Reason: ErrAttemptsExhausted}); got != want {
		t.Errorf("Ended = %+v, want %+v", got, want)
	}
}
