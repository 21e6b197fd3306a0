package grpcretry

import (
	"context"
	"errors"
	"slices"
	"time"
)

// A Plan is the state of one call whose attempts a program makes itself: a simulator, say, or a
// client of another protocol. Its driver sends attempts, reports how they end, and does what the
// returned [Step] says. The Plan applies the policy of the call's method, the same rules in the
// same order as for gRPC calls, and makes all deposits, withdrawals and refunds. It serves
// retried and hedged calls alike. For gRPC calls use the interceptors.
//
// [Retrier.Plan] returns a new Plan. The driver calls
//
//   - [Plan.Sent] for each attempt, the first included, when it sends the attempt;
//   - [Plan.Ended] once for each attempt, when it ends;
//   - [Plan.Overdue] when an attempt has run for the attempt timeout;
//   - [Plan.Due] at [Plan.DueAt], and as soon as the call's context ends while no attempt is in
//     flight.
//
// Nothing here waits, reads a clock or draws a random number: times and random numbers are the
// driver's, and may be simulated. Observers, the logger, spans and metrics see nothing of the
// call.
//
// A Plan is not safe for concurrent use. The zero Plan is unusable.
type Plan struct {
	plan    plan
	ctx     context.Context
	method  string
	learner HedgeDelay // nil if nothing measures the first attempt
	won     bool
	cut     []int // the numbers of attempts that Overdue said to cancel
}

// A Step is what a [Plan] wants its driver to do next. Attempts in flight go on in any case,
// unless End is set.
type Step struct {
	// Send says to send an attempt now.
	Send bool
	// Connect says to wait for a connection: call [Plan.Due] as soon as there is one, and at
	// DueAt at the latest.
	Connect bool
	// End says that the call is over. The driver cancels the attempts in flight, and reports
	// each as Ended with ErrHedgeLost.
	End bool
	// Reason is why the attempt that was reported is not followed by another, or why a hedge
	// that was due is not sent: an error as in [Error.Reason]. It is nil if there is to be
	// another attempt, immediately or at DueAt.
	Reason error
}

// Plan returns the plan of a call of method, "/pkg.Service/Method", which starts at the time
// start. The call ends with ctx and its deadline; the Classifier of the policy is called with
// ctx. target is the backend whose budget the call spends from, if there is one for each: any
// name will do.
//
// A method whose calls pass through has a Plan of one attempt that spends and reports nothing.
func (r *Retrier) Plan(ctx context.Context, method, target string, start time.Time) *Plan {
	p := &Plan{ctx: ctx, method: method}
	obeyed, delay, hedges := p.choose(r.policies.of(method).policy, start)
	named := func() string { return target }
	budget := Unlimited
	if obeyed.MaxAttempts > 1 {
		budget = budgetFor(obeyed.Budget, target, named)
	}
	var hedgeBudget Budget
	if b := obeyed.hedgeBudget(); b != nil {
		hedgeBudget = budgetFor(b, target, named)
	}
	deadline, _ := ctx.Deadline()
	p.plan.begin(obeyed, budget, hedgeBudget, start, deadline)
	if hedges {
		p.plan.hedgeEvery(delay)
	}
	return p
}

// choose returns the policy of the call and, if hedges, the delay of its hedges.
func (p *Plan) choose(resolved *policy, start time.Time) (obeyed *policy, delay time.Duration, hedges bool) {
	if resolved.hedged == nil {
		return resolved, 0, false
	}
	p.learner = resolved.Hedging.Delay
	if delay, hedges = p.learner.Delay(p.method, start); hedges {
		return resolved.hedged, delay, true
	}
	return resolved, 0, false
}

// Sent reports that an attempt is sent now. It returns the attempt's Method, Number, Hedge,
// Start, Wait and WaitSource, and how long the attempt may run before it is [Plan.Overdue]; 0
// means that there is no timeout for it.
func (p *Plan) Sent(now time.Time) (a Attempt, timeout time.Duration) {
	s := p.plan.send(now)
	a = Attempt{Method: p.method, Number: s.number, Hedge: s.hedge, Start: now, Wait: s.wait, WaitSource: s.source}
	if p.plan.policy.MaxAttempts > 1 {
		timeout = p.plan.attemptTimeout()
	}
	return a, timeout
}

// Ended reports how an attempt ended, and returns what follows. a is what Sent returned, with
// Duration and, if it failed, Err. Err is a gRPC status, or what
// [google.golang.org/grpc/status.Code] makes of another error; it is [ErrAttemptTimeout] for an
// attempt that was cancelled because Overdue said so, and [ErrHedgeLost] for one that was
// cancelled because the call is over. Trailer holds a server's pushback, and Unsent says that
// the attempt reached no server; the Classifier may read all of it. u is a random number in
// [0, 1), for the jitter.
//
// A success ends the call; it is reported before the attempts that it makes losers.
func (p *Plan) Ended(a Attempt, now time.Time, u float64) Step {
	switch {
	case a.Err == nil:
		p.won = true
		p.measure(a, now)
		p.plan.succeeded(Outcome{Attempt: a.Number, Hedge: a.Hedge, Late: p.isLate(a)})
		return Step{End: true}
	case errors.Is(a.Err, ErrHedgeLost):
		if p.won {
			p.measure(a, now)
		}
		p.plan.lost(Outcome{Attempt: a.Number, Hedge: a.Hedge})
		return Step{End: true, Reason: ErrHedgeLost}
	}
	f := p.failure(a, now)
	f.TimedOut = errors.Is(a.Err, ErrAttemptTimeout) && slices.Contains(p.cut, a.Number)
	f.Attempt.late = !f.TimedOut && p.isLate(a)
	return p.plan.failed(p.ctx, &f, now, u).public()
}

// Overdue decides about an attempt, still in flight, that has run for the timeout that Sent
// returned. It returns true if the attempt is to be cancelled, because another takes its place
// or because the call has no deadline; the driver then reports it as Ended with
// [ErrAttemptTimeout], and does what follows from that. If it returns false, the attempt goes
// on to the call's deadline.
func (p *Plan) Overdue(a Attempt, now time.Time, u float64) (cut bool) {
	a.Err = ErrAttemptTimeout
	f := p.failure(a, now)
	cut = p.plan.overdue(p.ctx, &f, now, u).Cut
	if cut {
		p.cut = append(p.cut, a.Number)
	}
	return cut
}

// Due returns what is to be done at DueAt, or when there is a connection that a Step has asked
// to wait for. If the call's context has ended, the call is over, and what was withdrawn for an
// attempt that will not be sent is given back.
func (p *Plan) Due(now time.Time) Step {
	if reason := endOf(p.ctx, now); reason != nil {
		p.plan.leave()
		return Step{End: true, Reason: reason}
	}
	if p.plan.connecting != nil && now.Before(p.plan.dueAt) {
		return p.plan.connected(now).public()
	}
	return p.plan.due(now).public()
}

// DueAt returns when to call [Plan.Due], the zero time for never. Every other method may change
// it.
func (p *Plan) DueAt() time.Time { return p.plan.dueAt }

func (p *Plan) failure(a Attempt, now time.Time) failure {
	return failure{Attempt: a, Unsent: a.Unsent, CtxErr: endOf(p.ctx, now)}
}

// isLate reports whether an attempt that was not cut has run for the attempt timeout.
func (p *Plan) isLate(a Attempt) bool {
	timeout := p.plan.policy.AttemptTimeout
	return timeout > 0 && a.Duration >= timeout
}

// measure reports the first attempt to the delay that measures it.
func (p *Plan) measure(a Attempt, now time.Time) {
	if p.learner != nil && a.Number == 1 {
		p.learner.Answered(p.method, a.Duration, a.Err != nil, now)
	}
}

func (s step) public() Step {
	return Step{Send: s.Send, Connect: s.Connect, End: s.End, Reason: s.Reason}
}
