package grpcretry

import (
	"context"
	"errors"
	"testing"
	"time"

	"google.golang.org/grpc/codes"

	"github.com/grpcretry/grpcretry/internal/drive"
)

const someMethod = "/shop.v1.Catalog/GetItem"

// newPlan returns the public Plan of a call that starts at noon.
func newPlan(t *testing.T, ctx context.Context, opts ...Option) *drivenPlan {
	t.Helper()
	r, err := New(opts...)
	if err != nil {
		t.Fatal(err)
	}
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
	if want := (drive.Step{End: true, Reason: ErrDeadline}); step != want {
		t.Errorf("Due = %+v, want %+v", step, want)
	}
}
