package grpcretry

import (
	"context"
	"errors"
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
	plan.hedgeEvery(second)
	for range sent {
		if plan.made > 0 {
			plan.due(noon, 0.5)
		}
		plan.send(noon)
	}
	return plan
}

// throttled returns a throttle that refuses retries.
func throttled(t *testing.T) Budget {
	t.Helper()
	b, err := NewThrottle(2, 1)
	if err != nil {
		t.Fatal(err)
	}
	b.Deposit(Outcome{Attempt: 1, Result: Failed})
	return b
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
		if step := plan.failed(t.Context(), &tt.failure, now, 0); step.Wait != tt.wait || !step.Retry {
			t.Fatalf("after failure %d: %+v, want a wait of %v", i+1, step, tt.wait)
		}
		if tt.failure.Unsent {
			plan.connected(now, 0)
		}
		now = plan.dueAt
	}
}

// A hedge is paid for by the budget of hedges, any other attempt by the method's, when it is sent. Both
// hear of every attempt, and of a token if it was theirs.
func TestWhoPaysInAHedgedCall(t *testing.T) {
	type accounts struct{ own, hedges counts }
	internal := func(number int) *failure { f := failureOf(number, codes.Unavailable); return &f }
	for _, tt := range []struct {
		name string
		play func(p *plan)
		want accounts
	}{
		{"a hedge wins", func(p *plan) {
			p.due(noon, 0.5)
			p.wins(p.send(noon).number)
			p.loserEnded(Outcome{Attempt: 1})
		}, accounts{counts{told: [5]int{Succeeded: 1, Ignored: 1}, highest: 1}, counts{withdrawn: 1, told: [5]int{Succeeded: 1, Ignored: 1},
			highest: 2}}},
		{"a retry wins", func(p *plan) {
			p.failed(t.Context(), internal(1), noon, 0.5)
			p.due(p.dueAt, 0.5)
			p.wins(p.send(noon).number)
		}, accounts{counts{withdrawn: 1, told: [5]int{Succeeded: 1, Failed: 1}, highest: 2},
			counts{told: [5]int{Succeeded: 1, Failed: 1}, highest: 1}}},
		{"a retry after a hedge", func(p *plan) {
			p.due(noon, 0.5)
			p.send(noon)
			f := internal(1).saying("1000")
			p.failed(t.Context(), &f, noon, 0.5) // attempt 2 is in flight
			p.failed(t.Context(), internal(2).hedge(), noon, 0.5)
			p.due(noon.Add(second), 0.5)
			p.wins(p.send(noon.Add(second)).number)
		}, accounts{counts{withdrawn: 1, told: [5]int{Succeeded: 1, Failed: 2}, highest: 3}, counts{withdrawn: 1, told: [5]int{Succeeded: 1,
			Failed: 2}, highest: 2}}},
		{"the first reaches no server, its hedge wins", func(p *plan) {
			p.due(noon, 0.5)
			second := p.send(noon)
			f := internal(1)
			f.Unsent = true
			p.failed(t.Context(), f, noon, 0.5)
			p.wins(second.number)
		}, accounts{counts{told: [5]int{Succeeded: 1}, highest: 1}, counts{withdrawn: 1, told: [5]int{Succeeded: 1}, highest: 2}}},
		{"a hedge reaches no server", func(p *plan) {
			p.due(noon, 0.5)
			p.send(noon)
			f := internal(2).hedge()
			f.Unsent = true
			p.failed(t.Context(), f, noon, 0.5)
			p.wins(1)
		}, accounts{counts{told: [5]int{Succeeded: 1}, highest: 1}, counts{withdrawn: 1, refunded: 1, told: [5]int{Succeeded: 1}, highest: 1}}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			own, hedges := &tally{}, &tally{}
			plan := hedgedPlan(t, Policy{MaxAttempts: 4, Hedging: &Hedging{Delay: HedgeAfter(second), Budget: hedges}}, own, 1)
			tt.play(plan)
			if got := (accounts{own.counts, hedges.counts}); got != tt.want {
				t.Errorf("accounts are %+v, want %+v", got, tt.want)
			}
		})
	}
}

func (p *plan) wins(number int) { p.succeeded(Outcome{Attempt: number}) }

func (f *failure) hedge() *failure { f.Attempt.Hedge = true; return f }

// A call does not wait for a throttle (A6), also if that has closed during the call's wait.
func TestAThrottleThatClosesDuringAWaitEndsTheCall(t *testing.T) {
	throttle, err := NewThrottle(4, 0.1)
	if err != nil {
		t.Fatal(err)
	}
	plan := planOf(t, Policy{MaxAttempts: 4, Backoff: Constant(second)}, throttle, noon, time.Time{})
	plan.send(noon)
	failed := failureOf(1, codes.Unavailable)
	if step := plan.failed(t.Context(), &failed, noon, 0); !step.Retry {
		t.Fatalf("failed = %+v, want a retry", step)
	}
	for range 3 {
		throttle.Deposit(Outcome{Attempt: 1, Result: Failed})
	}
	if step := plan.due(plan.dueAt, 0); !step.End || !errors.Is(step.Reason, ErrBudgetExhausted) {
		t.Errorf("due = %+v, want the end, because the budget refuses", step)
	}
}

// A wait that a server asked for also holds for hedges.
func TestAHedgeWaitsForThePushbackOfAnotherAttempt(t *testing.T) {
	plan := hedgedPlan(t, Policy{MaxAttempts: 4, Hedging: &Hedging{Delay: HedgeAfter(0), Budget: Unlimited}}, Unlimited, 2)
	f := failureOf(2, codes.Unavailable).saying("30000")
	if step := plan.failed(t.Context(), &f, noon, 0.5); step.Reason != errInFlight || step.End {
		t.Fatalf("Failed = %+v, want it left to the attempt in flight", step)
	}
	if due := plan.dueAt.Sub(noon); due != 30*second {
		t.Errorf("the next hedge is due after %v, want 30s", due)
	}
}

// Whatever other attempts do, none is sent before the time that the newest pushback named.
func TestTheNewestPushbackHoldsForTheCall(t *testing.T) {
	const asked = 1000 * time.Millisecond
	at := noon.Add(40 * time.Millisecond)
	failed := func(p *plan, number int, change func(*failure)) step {
		f := failureOf(number, codes.Unavailable).with(change)
		return p.failed(t.Context(), &f, at, 0.5)
	}
	for _, tt := range []struct {
		name string
		then func(p *plan) step
	}{
		{"another attempt fails", func(p *plan) step { return failed(p, 2, func(*failure) {}) }},
		{"another attempt reached no server", func(p *plan) step {
			failed(p, 3, func(f *failure) { f.Unsent = true })
			failed(p, 2, func(f *failure) { f.Unsent = true })
			return p.connected(at, 0.5)
		}},
		{"a hedge cannot be sent", func(p *plan) step { p.leave(); p.putOff(at); return step{} }},
		{"another attempt is overdue", func(p *plan) step {
			p.leave()
			f := failureOf(2, codes.DeadlineExceeded)
			return p.overdue(t.Context(), &f, at, 0.5)
		}},
		{"nothing", func(*plan) step { return step{} }},
	} {
		t.Run(tt.name, func(t *testing.T) {
			p := hedgedPlan(t, Policy{AttemptTimeout: 40 * time.Millisecond,
				MaxAttempts: 9, Hedging: &Hedging{Delay: HedgeAfter(second), Budget: Unlimited}}, Unlimited, 3)
			p.delay = 40 * time.Millisecond
			pushed := failureOf(1, codes.Unavailable).saying("1000")
			if got := p.failed(t.Context(), &pushed, noon, 0.5); got.Send {
				t.Fatalf("failed = %+v, want the server's wait", got)
			}
			if got := tt.then(p); got.Send || got.End || p.dueAt.Before(noon.Add(asked)) {
				t.Errorf("%+v, due %v after noon; want nothing sent before %v", got, p.dueAt.Sub(noon), asked)
			}
		})
	}
}

// A wait for a connection does not lead past MaxElapsed, although another attempt was pushed back meanwhile.
func TestAPushbackDoesNotLeadPastMaxElapsedAfterAConnection(t *testing.T) {
	p := hedgedPlan(t, Policy{MaxAttempts: 4, MaxElapsed: second, Backoff: Constant(0), Hedging: &Hedging{Delay: HedgeAfter(time.Hour),
		Budget: Unlimited}},
		Unlimited, 2)
	pushed, unsent := failureOf(1, codes.Unavailable).saying("1500"), failureOf(2, codes.Unavailable)
	unsent.Unsent = true
	p.failed(t.Context(), &pushed, noon, 0)
	p.failed(t.Context(), &unsent, noon, 0)
	if got := p.connected(noon, 0); !got.End || got.Reason != ErrMaxElapsed {
		t.Errorf("connected = %+v, due at %v, want the end because of MaxElapsed", got, p.dueAt)
	}
}

// After a failure that is retryable, the attempts in flight decide; a hedged call is stopped as any other.
func TestPlanOfAHedgedCall(t *testing.T) {
	policy := func(hedges Budget) Policy {
		return Policy{MaxAttempts: 3, MaxElapsed: time.Minute, Hedging: &Hedging{
			Delay: HedgeAfter(second), Budget: hedges}, Backoff: Constant(7 * second), Codes: []codes.Code{codes.Internal}}
	}
	internal, unavailable := failureOf(1, codes.Internal), failureOf(1, codes.Unavailable)
	stop := func(reason error, end bool) step { return step{verdict: verdict{Reason: reason}, End: end} }
	for _, tt := range []struct {
		name    string
		sent    int
		stopped error
		failure failure
		want    step
		due     time.Duration // after noon; 0 for never
	}{
		{"retryable", 1, nil, internal, step{verdict: verdict{Retry: true, Wait: 7 * second, WaitSource: WaitBackoff}}, 7 * second},
		{"retryable, others are in flight", 2, nil, internal, stop(errInFlight, false), second},
		{"fatal", 1, nil, unavailable, stop(ErrNotRetryable, true), 0},
		{"fatal, others are in flight", 2, nil, unavailable, stop(ErrNotRetryable, true), 0},
		{"fatal, and the server says stop", 2, nil, failureOf(1, codes.Unavailable).saying("-1"), stop(ErrPushback, true), 0},
		{"the server says stop", 1, nil, failureOf(1, codes.Internal).saying("-1"), stop(ErrPushback, true), 0},
		{"the server says stop, others are in flight", 2, nil, failureOf(1, codes.Internal).saying("-1"), stop(ErrPushback, false), 0},
		{"pushback", 1, nil, failureOf(1, codes.Internal).saying("7"),
			step{verdict: verdict{Retry: true, Wait: 7 * time.Millisecond, WaitSource: WaitPushback}}, 7 * time.Millisecond},
		{"the connection is closed", 2, nil, internal.with(func(f *failure) { f.Closed = true }), stop(errConnClosed, true), 0},
		{"the caller is gone", 2, nil, internal.with(func(f *failure) { f.CtxErr = context.Canceled }), stop(context.Canceled, true), 0},
		{"committed", 2, nil, internal.with(func(f *failure) { f.Committed = true }), stop(ErrCommitted, true), 0},
		{"all are sent", 3, nil, internal, stop(errInFlight, false), 0},
		{"stopped before", 2, ErrPushback, internal, stop(errInFlight, false), second},
		{"stopped before, and the last in flight", 1, ErrPushback, internal, stop(ErrPushback, true), 0},
		{"stopped before, and fatal", 2, ErrPushback, unavailable, stop(ErrNotRetryable, true), 0},
	} {
		t.Run(tt.name, func(t *testing.T) {
			plan := hedgedPlan(t, policy(Unlimited), Unlimited, tt.sent)
			plan.stopped = tt.stopped
			got := plan.failed(t.Context(), &tt.failure, noon, 0.5)
			got.fatal, got.untouched, got.backoff = false, false, 0
			if got != tt.want {
				t.Errorf("Failed = %+v, want %+v", got, tt.want)
			}
			var due time.Duration
			if at := plan.dueAt; !at.IsZero() {
				due = at.Sub(noon)
			}
			if due != tt.due {
				t.Errorf("due %v after, want %v", due, tt.due)
			}
		})
	}
	for _, tt := range []struct {
		name            string
		sent            int
		change          func(*plan)
		budget, hedges  Budget
		want            error
		asksAgain, paid bool
	}{
		{"due", 2, func(*plan) {}, stingy{}, &tally{}, nil, false, true},
		{"all are sent", 3, func(*plan) {}, &tally{}, &tally{}, ErrAttemptsExhausted, false, false},
		{"deadline", 1, func(p *plan) { p.deadline = noon }, &tally{}, &tally{}, ErrDeadline, false, false},
		{"MaxElapsed", 1, func(p *plan) { p.start = noon.Add(-time.Minute) }, &tally{}, &tally{}, ErrMaxElapsed, false, false},
		{"a throttle refuses", 1, func(*plan) {}, throttled(t), &tally{}, ErrBudgetExhausted, true, false},
		{"the budget of hedges refuses", 1, func(*plan) {}, &tally{}, stingy{}, ErrBudgetExhausted, true, false},
	} {
		t.Run("due: "+tt.name, func(t *testing.T) {
			plan := hedgedPlan(t, policy(Unlimited), Unlimited, tt.sent)
			plan.ledger.budget, plan.ledger.hedges = tt.budget, tt.hedges
			tt.change(plan)
			got := plan.due(noon, 0.5)
			want := step{verdict: verdict{Retry: tt.paid, Wait: second, WaitSource: waitHedgeDelay, Reason: tt.want}, Send: tt.paid}
			if got != want {
				t.Errorf("Due = %+v, want %+v", got, want)
			}
			if again := !plan.dueAt.IsZero(); again != tt.asksAgain {
				t.Errorf("due again at %v, want that: %v", plan.dueAt, tt.asksAgain)
			}
			if b, ok := tt.hedges.(*tally); ok && (b.withdrawn == 1) != tt.paid {
				t.Errorf("budget of hedges: %+v, want it to pay: %v", b.counts, tt.paid)
			}
			if b, ok := tt.budget.(*tally); ok && b.withdrawn != 0 {
				t.Errorf("budget: %+v, want it to pay for no hedge", b.counts)
			}
		})
	}
}
