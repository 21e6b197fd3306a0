package grpcretry

import (
	"context"
	"testing"
	"time"
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
	made.begin(obeyed, budget, obeyed.hedgeBudget(), &target{all: newTargets(nil)}, instantOf(start), instantOf(deadline))
	return made
}

// judgedBy returns what the plan says about a failure.
func judgedBy(p *plan, f *failure, now time.Time, u float64) verdict {
	p.policy.examine(context.Background(), f)
	return p.failed(f, p.ledger.at(now), u)
}

// A wait that would end exactly at a limit is drawn from the time left, too.
func TestAWaitUpToTheLimitIsDrawnAgain(t *testing.T) {
	for name, l := range map[string]limits{
		"deadline":   {start: instantOf(noon), deadline: instantOf(noon.Add(10 * second))},
		"MaxElapsed": {start: instantOf(noon), elapsed: 10 * second},
	} {
		for wait, want := range map[time.Duration]time.Duration{10*second - 1: 10*second - 1, 10 * second: 5 * second} {
			if got := l.inTime(wait, instantOf(noon), 0.5); got != want {
				t.Errorf("%s: a wait of %v has become %v, want %v", name, wait, got, want)
			}
		}
	}
}
