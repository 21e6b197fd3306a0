package grpcretry

import (
	"context"
	"errors"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
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
		{"there is none in time", 10 * second, Step{End: true, Reason: ErrTargetDown}, 0},
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

// Without tokens a call waits again and again. No such wait is shorter than 20 ms, also just before the
// deadline, or a driver in simulated time would be called forever.
func TestPlanDoesNotWaitEverShorterBeforeTheDeadline(t *testing.T) {
	none, err := NewRatioBudget(RatioBudget{Ratio: 1e-9, Reserve: Nothing})
	if err != nil {
		t.Fatal(err)
	}
	now := noon
	ctx := &simulatedContext{Context: context.Background(), now: &now, deadline: noon.Add(second)}
	plan := newPlan(t, ctx, WithBudget(none), WithBackoff(Constant(100*time.Millisecond)))
	first, _ := plan.Sent(noon)
	step := plan.Ended(failed(first, codes.Unavailable), noon, 0.5)
	now = plan.DueAt()
	for range 50 {
		if step = plan.Due(now); step.End {
			break
		}
		if wait := plan.DueAt().Sub(now); wait < 20*time.Millisecond {
			t.Fatalf("at %v the plan waits again for %v, want at least 20ms", now.Sub(noon), wait)
		}
		now = plan.DueAt()
	}
	if want := (Step{End: true, Reason: ErrDeadline}); step != want {
		t.Errorf("Due = %+v, want %+v", step, want)
	}
}
