package grpcretry

import (
	"context"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
)

// The tests here drive plans by hand, without goroutines, servers or time.

// planOf returns the plan of a call that obeys p, spends from budget and starts at start.
func planOf(t *testing.T, p Policy, budget Budget, start, deadline time.Time) *plan {
	t.Helper()
	o := WithPolicy(p).callOption()
	if o.err != nil {
		t.Fatal(o.err)
	}
	obeyed := newPolicy(&o.partial, defaultBudgets())
	made := new(plan)
	made.begin(obeyed, budget, obeyed.hedgeBudget(), &target{all: newTargets(nil)}, start, deadline)
	return made
}

// hedgedPlan returns the plan of a hedged call whose first attempts, sent at noon, are in flight.
func hedgedPlan(t *testing.T, p Policy, budget Budget, sent int) *plan {
	t.Helper()
	plan := planOf(t, p, budget, noon, time.Time{})
	plan.hedging, plan.delay = true, second
	for range sent {
		if plan.made > 0 {
			plan.due(noon, 0.5)
		}
		plan.send(noon)
	}
	return plan
}

// judgedBy returns what the plan says about a failure.
func judgedBy(p *plan, f *failure, now time.Time, u float64) step {
	p.policy.examine(context.Background(), f)
	return p.failed(f, now, u)
}

func TestAHedgeIsPutOffForLongerEachTime(t *testing.T) {
	for _, tt := range []struct{ delay, first time.Duration }{
		{0, time.Millisecond},
		{time.Millisecond - 1, time.Millisecond},
		{time.Second, time.Second},
	} {
		plan := hedgedPlan(t, Policy{Hedging: &Hedging{Delay: HedgeAfter(0), Budget: stingy{}}}, Unlimited, 1)
		plan.delay = tt.delay
		for n, want := range []time.Duration{tt.first, 2 * tt.first, 4 * tt.first} {
			plan.due(noon, 0.5)
			if got := plan.dueAt.Sub(noon); got != want {
				t.Errorf("a hedge of delay %v is put off by %v the %dth time, want %v", tt.delay, got, n+1, want)
			}
		}
	}
}

// The backoff counts the call's retries, and a server's pushback or RetryInfo restarts it.
func TestPlanCountsBackoffsAndRestartsOnHints(t *testing.T) {
	plan := planOf(t, Policy{MaxAttempts: 9, Backoff: Exponential{Base: second, Max: time.Hour, Jitter: NoJitter}, Budget: Unlimited},
		Unlimited, noon, time.Time{})
	now := noon
	for i, tt := range []struct {
		failure failure
		wait    time.Duration
	}{
		{failureOf(1, codes.Unavailable), second},
		{failureOf(2, codes.Unavailable), 2 * second},
		{failureOf(3, codes.Unavailable).saying("7000"), 7 * second},
		{failureOf(4, codes.Unavailable), second},
		{failureOf(5, codes.Unavailable).with(func(f *failure) { f.Unsent = true }), 2 * second}, // does not count
		{failureOf(6, codes.Unavailable), 2 * second},
		{failureOf(7, codes.Unavailable, retryInfoOf(10*second)), 10 * second},
		{failureOf(8, codes.Unavailable), second},
	} {
		plan.send(now)
		if step := judgedBy(plan, &tt.failure, now, 0); step.Wait != tt.wait || !step.Retry {
			t.Fatalf("after failure %d: %+v, want a wait of %v", i+1, step, tt.wait)
		}
		if tt.failure.Unsent {
			plan.connected(now, 0)
		}
		now = plan.dueAt
	}
}
