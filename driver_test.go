package grpcretry

import (
	"context"
	"errors"
	"slices"
	"testing"
	"time"

	"google.golang.org/grpc/codes"

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
	step(plan.Overdue(hedge, at(15), 0))
	step(plan.Due(at(20)))
	if want := []drive.Step{{Send: true}, {}, {Later: true}, {Cut: 1}, {Send: true}, {}, {Cut: 2}}; !slices.Equal(steps, want) {
		t.Errorf("the plan says %+v, want %+v", steps, want)
	}
}
