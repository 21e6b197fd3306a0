package grpcretry

import (
	"context"
	"errors"
	"slices"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"

	"github.com/grpcretry/grpcretry/internal/drive"
	"github.com/grpcretry/grpcretry/internal/recorded"
)

const someMethod = "/shop.v1.Catalog/GetItem"

// newPlan returns the public Plan of a call that starts at noon.
func newPlan(t *testing.T, ctx context.Context, opts ...Option) *drivenPlan {
	t.Helper()
	r := retrierOf(t, opts...)
	return r.drive(ctx, someMethod, "catalog", noon)
}

// failed returns an attempt that failed with code after a second.
func failed(a Attempt, code codes.Code) Attempt {
	a.Duration, a.Err = second, fail(code, "x").err
	return a
}

// The call ends with its context, and has its context's deadline.
func TestPlanEndsWithItsContext(t *testing.T) {
	ctx, cancel := context.WithCancelCause(t.Context())
	gone := errors.New("the user has left")
	plan := newPlan(t, ctx)
	first, _ := plan.Sent(noon)
	cancel(gone)
	if got, want := plan.Ended(failed(first, codes.Unavailable), noon, 0.5), (drive.Step{End: true, Reason: gone}); got != want {
		t.Errorf("Ended = %+v, want %+v", got, want)
	}
}

// Such a call is counted by its driver, but what the Retrier knows about its target is in the Retrier's metrics.
func TestTargetOfADrivenPlanHasSeries(t *testing.T) {
	meters := &recorded.Meters{}
	plan := newPlan(t, t.Context(), WithMeterProvider(meters))
	first, _ := plan.Sent(noon)
	plan.Ended(failed(first, codes.Unavailable), noon, 0.5)
	for _, m := range collect(t, meters) {
		if m.Name == "grpcretry.target.failing" && len(m.Series) == 1 {
			return
		}
	}
	t.Error("there is no series for the target")
}

// A classifier sees the same failure at an attempt timeout, whoever drives the plan.
func TestAnAttemptTimeoutOfADrivenPlan(t *testing.T) {
	var seen []Attempt
	plan := newPlan(t, t.Context(), WithAttemptTimeout(second), WithClassifier(func(_ context.Context, a Attempt) Classification {
		seen = append(seen, a)
		return Default
	}))
	first, timeout := plan.Sent(noon)
	plan.Overdue(first, noon.Add(timeout), 0)
	if len(seen) != 1 || seen[0].Code() != codes.DeadlineExceeded || !errors.Is(seen[0].Err, ErrAttemptTimeout) {
		t.Errorf("the classifier has seen %v, want one attempt timeout", seen)
	}
}

// Whoever drives the plan, the timeouts of other attempts wait while one is pending, see TestTheTimeoutsOfOthersWaitForAReplacement.
func TestTheTimeoutsOfADrivenPlanWaitForAReplacement(t *testing.T) {
	at := func(tenths int) time.Time { return noon.Add(time.Duration(tenths) * second / 10) }
	plan := newPlan(t, t.Context(), WithBackoff(Constant(second/2)), WithBudget(Unlimited), WithAttemptTimeout(second),
		WithMethod(someMethod, WithHedging(Hedging{Delay: HedgeAfter(second * 3 / 10), Budget: Unlimited})))
	first, _ := plan.Sent(noon)
	var steps []drive.Step
	step := func(s drive.Step) { steps = append(steps, s) }
	step(plan.Due(at(3)))
	hedge, _ := plan.Sent(at(3))
	step(plan.Overdue(first, at(10), 0))
	step(plan.Overdue(hedge, at(13), 0))
	step(plan.Due(at(15)))
	first.Err = ErrAttemptTimeout
	step(plan.Ended(first, at(15), 0))
	plan.Sent(at(15))
	if due := plan.DueAt(); due != at(15) {
		t.Errorf("due at %v, want immediately: the hedge is overdue", due)
	}
	step(plan.Due(at(15)))
	step(plan.Due(at(20)))
	if want := []drive.Step{{Send: true}, {}, {}, {Cut: 1}, {Send: true}, {}, {Cut: 2}}; !slices.Equal(steps, want) {
		t.Errorf("the plan says %+v, want %+v", steps, want)
	}
}

// An overdue attempt is to be replaced, and then nothing may replace it any more: without a deadline it is cut.
func TestAnOverdueAttemptOfADrivenPlanThatNothingReplaces(t *testing.T) {
	at := func(tenths int) time.Time { return noon.Add(time.Duration(tenths) * second / 10) }
	plan := newPlan(t, t.Context(), WithBackoff(Constant(second/2)), WithBudget(Unlimited), WithAttemptTimeout(second),
		WithMethod(someMethod, WithHedging(Hedging{Delay: HedgeAfter(second * 6 / 10), Budget: Unlimited})))
	first, _ := plan.Sent(noon)
	plan.Due(at(6))
	hedge, _ := plan.Sent(at(6))
	plan.Overdue(first, at(10), 0)
	hedge.Err, hedge.Trailer = fail(codes.Unavailable, "x").err, metadata.MD{pushbackKey: {"-1"}}
	plan.Ended(hedge, at(13), 0)
	if due := plan.DueAt(); due != at(13) {
		t.Errorf("due at %v, want immediately", due)
	}
	if step := plan.Due(at(13)); step != (drive.Step{Cut: 1}) {
		t.Errorf("%+v, want attempt 1 to be cut", step)
	}
	first.Err = ErrAttemptTimeout
	if step := plan.Ended(first, at(13), 0); !step.End || step.Reason != ErrPushback || !plan.DueAt().IsZero() {
		t.Errorf("%+v, and due at %v, want the end because of ErrPushback", step, plan.DueAt())
	}
}

// A call that passes through has one attempt, which only the timeout limits if it has no deadline. It tells the target of no failure.
func TestADrivenPlanThatPassesThrough(t *testing.T) {
	for name, tt := range map[string]struct {
		err    error
		unsent bool
	}{
		"a failure": {err: fail(codes.Unavailable, "x").err}, "no connection": {err: fail(codes.Unavailable, "x").err, unsent: true},
		"a timeout": {err: ErrAttemptTimeout},
	} {
		t.Run(name, func(t *testing.T) {
			r := retrierOf(t, WithMaxAttempts(1), WithAttemptTimeout(second))
			plan := r.drive(t.Context(), someMethod, "catalog", noon)
			a, timeout := plan.Sent(noon)
			if timeout != second {
				t.Errorf("a timeout of %v, want 1s", timeout)
			}
			if step := plan.Overdue(a, noon.Add(second), 0); tt.err == ErrAttemptTimeout && step != (drive.Step{Cut: 1}) {
				t.Errorf("%+v for an overdue attempt, want it to be cut", step)
			}
			a.Err, a.Unsent, a.Duration = tt.err, tt.unsent, second
			step := plan.Ended(a, noon.Add(second), 0)
			if step != (drive.Step{End: true, Reason: ErrAttemptsExhausted}) || !plan.DueAt().IsZero() {
				t.Errorf("%+v, and due at %v, want the end", step, plan.DueAt())
			}
			if known := r.targets.states(noon.Add(second)); len(known) != 1 || known[0].Failing != 0 {
				t.Errorf("known of the target: %+v, want nothing", known)
			}
		})
	}
}

// In a dry run no attempt is late, because there is no timeout.
func TestNoAttemptIsLateInADryRunOfADrivenPlan(t *testing.T) {
	budget, err := NewRatioBudget(RatioBudget{Ratio: 1, Reserve: Nothing})
	if err != nil {
		t.Fatal(err)
	}
	plan := newPlan(t, t.Context(), WithDryRun(true), WithAttemptTimeout(second), WithBudget(budget))
	a, _ := plan.Sent(noon)
	a.Duration = 2 * second
	plan.Ended(a, noon.Add(2*second), 0)
	if got := budget.Balance(noon.Add(2 * second)); got != 1 {
		t.Errorf("the budget has %v, want 1, earned by the answer", got)
	}
}

// A pushback puts off a retry for which an overdue attempt was cut, and which is paid for. If the attempts beside it fail meanwhile,
// the retry follows all the same: it is not decided on, or paid for, again.
func TestAReplacementThatIsPutOffIsPaidForOnce(t *testing.T) {
	for name, last := range map[string]codes.Code{"retryable": codes.Unavailable, "final": codes.NotFound} {
		t.Run(name, func(t *testing.T) {
			budget := concurrencyBudgetOf(t, 1)
			plan := newPlan(t, t.Context(), WithPatience(0), WithMethod(someMethod, WithAttemptTimeout(second), WithBackoff(Constant(0)),
				WithMaxAttempts(6), WithBudget(budget), WithHedging(Hedging{Delay: HedgeAfter(tenth), Budget: Unlimited})))
			at := func(d time.Duration) time.Time { return noon.Add(d) }
			first, _ := plan.Sent(noon)
			var hedges []Attempt
			for n := 1; n <= 2; n++ {
				plan.Due(at(time.Duration(n) * tenth))
				hedge, _ := plan.Sent(at(time.Duration(n) * tenth))
				hedges = append(hedges, hedge)
			}
			if step := plan.Overdue(first, at(second), 0.5); step.Cut != 1 {
				t.Fatalf("Overdue = %+v, want the first attempt cut", step)
			}
			pushed := failed(hedges[0], codes.Unavailable)
			pushed.Trailer = metadata.Pairs(pushbackKey, "1500")
			plan.Ended(pushed, at(second), 0.5)
			first.Err, first.Duration = ErrAttemptTimeout, second
			plan.Ended(first, at(second), 0.5)
			step := plan.Ended(failed(hedges[1], last), at(2*second), 0.5)
			if last == codes.NotFound {
				if !step.End {
					t.Errorf("%+v, want the end", step)
				}
				wantBalance(t, budget, at(2*second), 1)
				return
			}
			if due := plan.DueAt().Sub(noon); step != (drive.Step{}) || due != 2500*time.Millisecond {
				t.Errorf("%+v, due at %v, want a retry at 2.5s", step, due)
			}
			if step := plan.Due(at(2500 * time.Millisecond)); !step.Send {
				t.Errorf("%+v, want the retry sent", step)
			}
			retry, _ := plan.Sent(at(2500 * time.Millisecond))
			wantBalance(t, budget, at(2500*time.Millisecond), 0)
			plan.Ended(retry, at(3*second), 0.5)
			wantBalance(t, budget, at(3*second), 1)
		})
	}
}
