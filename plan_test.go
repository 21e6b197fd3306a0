package grpcretry

import (
	"context"
	"math"
	"testing"
	"time"

	"google.golang.org/grpc/metadata"
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
	return p.failed(f, p.ledger.noted(now), u)
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

// A server that forbids more attempts is obeyed although the last attempt in flight fails for want of a connection, which
// alone would be waited for.
func TestAFailureToConnectAfterAServerForbadeMoreAttempts(t *testing.T) {
	hedged := Policy{MaxAttempts: 4, Hedging: &Hedging{Delay: HedgeAfter(second), Budget: Unlimited}}
	p := planOf(t, hedged, Unlimited, noon, time.Time{})
	p.delay = second
	now := instantOf(noon)
	p.send(now)
	if v := p.due(now.Add(second), 0); v.do != doSend {
		t.Fatalf("the hedge is not sent: %+v", v)
	}
	p.send(now.Add(second))
	forbidden := failure{Attempt: Attempt{Number: 1, Err: errUnavailable, Trailer: metadata.Pairs(pushbackKey, "-1")}}
	if v := judgedBy(p, &forbidden, noon.Add(2*second), 0); v.do != doWait || v.Reason != ErrPushback {
		t.Errorf("after the first attempt: %+v, want that the second decides", v)
	}
	unsent := failure{Attempt: Attempt{Number: 2, Err: errUnavailable, Unsent: true}}
	if v := judgedBy(p, &unsent, noon.Add(3*second), 0); v.do != doEnd || v.Reason != ErrPushback {
		t.Errorf("after the second: %+v, want the end, because of pushback", v)
	}
}

// What is due after a failure beside other attempts in flight, which decide.
func TestAFailureBesideOthersInFlight(t *testing.T) {
	failed := func(number int, pushback ...string) *failure {
		return &failure{Attempt: Attempt{Number: number, Err: errUnavailable, Trailer: metadata.MD{pushbackKey: pushback}}}
	}
	overdue := failure{Attempt: Attempt{Number: 1, Err: errCut}, TimedOut: true}
	for name, tt := range map[string]struct {
		steps func(t *testing.T, p *plan) verdict // after attempts at 0 s, 1 s and 2 s
		want  verdict
		due   time.Duration // 0 for never
	}{
		"another hedge may follow": {func(_ *testing.T, p *plan) verdict {
			p.dueAt = 0 // what was due is done
			return judgedBy(p, failed(1), noon.Add(3*second), 0)
		}, verdict{Reason: errInFlight}, 4 * second},
		"a server has forbidden more": {func(_ *testing.T, p *plan) verdict {
			judgedBy(p, failed(1, "-1"), noon.Add(3*second), 0)
			return judgedBy(p, failed(2), noon.Add(3*second), 0)
		}, verdict{Reason: errInFlight}, 0},
		"a server asks for too long a wait": {func(_ *testing.T, p *plan) verdict {
			return judgedBy(p, failed(1, "600000"), noon.Add(3*second), 0)
		}, verdict{Wait: 10 * time.Minute, WaitSource: WaitPushback, Reason: ErrPushback}, 0},
		"one is cut for a retry": {func(t *testing.T, p *plan) verdict {
			p.overdue(t.Context(), &overdue, instantOf(noon.Add(5*second)), 0)
			if v := p.due(instantOf(noon.Add(6*second)), 0); v.do != 1 {
				t.Fatalf("when the retry is due: %+v, want that the first is cut", v)
			}
			return judgedBy(p, failed(2), noon.Add(6*second), 0)
		}, verdict{Reason: errInFlight}, 0},
	} {
		t.Run(name, func(t *testing.T) {
			p := planOf(t, Policy{MaxAttempts: 5, AttemptTimeout: 5 * second, Backoff: Constant(second),
				Hedging: &Hedging{Delay: HedgeAfter(second), Budget: Unlimited}}, Unlimited, noon, noon.Add(time.Minute))
			now := instantOf(noon)
			p.delay = second
			p.send(now)
			for i := range 2 {
				at := now.Add(time.Duration(i+1) * second)
				p.due(at, 0)
				p.send(at)
			}
			got := tt.steps(t, p)
			due := time.Duration(0)
			if p.dueAt != 0 {
				due = p.dueAt.Sub(now)
			}
			if got != tt.want || due != tt.due {
				t.Errorf("%+v, and something is due after %v; want %+v and %v", got, due, tt.want, tt.due)
			}
		})
	}
}

// What an attempt's end means that was cut for the next one.
func TestTheEndOfACutAttempt(t *testing.T) {
	for name, tt := range map[string]struct {
		end     Attempt
		want    verdict
		counted int
	}{
		"nothing comes": {Attempt{}, verdict{WaitSource: WaitBackoff, Wait: second, do: doSend}, 1},
		"pushback crosses it": {Attempt{Trailer: metadata.Pairs(pushbackKey, "7000")}, verdict{WaitSource: WaitPushback, Wait: 7 * second},
			1},
		"it has reached no server": {Attempt{Unsent: true}, verdict{WaitSource: WaitBackoff, Wait: second, do: doSend}, 0},
	} {
		t.Run(name, func(t *testing.T) {
			p := planOf(t, Policy{AttemptTimeout: 5 * second, Backoff: Constant(second)}, Unlimited, noon, noon.Add(time.Minute))
			now := instantOf(noon)
			p.send(now)
			overdue := failure{Attempt: Attempt{Number: 1, Err: errCut}, TimedOut: true}
			if v := p.overdue(t.Context(), &overdue, now.Add(5*second), 0); v.do != doWait {
				t.Fatalf("when it is overdue: %+v, want a wait", v)
			}
			if v := p.due(now.Add(6*second), 0); v.do != 1 {
				t.Fatalf("when the next one is due: %+v, want that the first is cut", v)
			}
			ended := failure{Attempt: tt.end, TimedOut: true}
			ended.Attempt.Number, ended.Attempt.Err = 1, errCut
			if v := judgedBy(p, &ended, noon.Add(6*second), 0); v != tt.want || p.counted() != tt.counted {
				t.Errorf("%+v, and %d attempts count; want %+v and %d", v, p.counted(), tt.want, tt.counted)
			}
		})
	}
}

// The longest wait that a server can ask for is not made negative by what is added to it.
func TestTheLongestRetryInfoAfterTheLimit(t *testing.T) {
	l := limits{start: instantOf(noon), elapsed: second}
	longest := Pushback{Delay: math.MaxInt64, Source: WaitRetryInfo}
	if got := l.asked(longest, instantOf(noon.Add(2*second)), 0.9); got != math.MaxInt64 {
		t.Errorf("the wait is %v, want %v", got, time.Duration(math.MaxInt64))
	}
}

// A slot that a replacement has taken over, and given back because it was not sent after all, is not given back again when the
// stream of the attempt that goes on commits, or ends.
func TestASlotThatWasTakenOverIsGivenBackOnce(t *testing.T) {
	slots := concurrencyBudgetOf(t, 2)
	l := ledger{budget: slots}
	l.sent(1)
	if !l.take(retriesPay, 0) {
		t.Fatal("there is no slot")
	}
	l.sent(2)
	if !l.take(retriesPay, 2) {
		t.Fatal("the slot was not taken over")
	}
	wantBalance(t, slots, noon, 1)
	l.giveBack(3)
	l.release(2, false)
	l.deposit(Outcome{Attempt: 2, Result: Succeeded})
	wantBalance(t, slots, noon, 2)
}
