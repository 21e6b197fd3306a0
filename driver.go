package grpcretry

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/grpcretry/grpcretry/internal/layers"
)

// A Plan holds the state of one call whose attempts a program makes itself, such as a simulator
// or a client of another protocol. For gRPC calls use the interceptors instead.
//
// The Plan's driver sends attempts, reports how they end, and does what the returned [Step]
// says. The Plan applies the method's policy, by the same rules and in the same order as for
// gRPC calls, and makes all deposits and withdrawals. It serves retried and hedged calls
// alike.
//
// [Retrier.Plan] returns a new Plan. The driver calls
//
//   - [Plan.Sent] when it sends an attempt, including the first;
//   - [Plan.Ended] once for each attempt, when the attempt ends;
//   - [Plan.Overdue] when an attempt has run for the attempt timeout;
//   - [Plan.Due] at [Plan.DueAt], and as soon as the call's context ends while no attempt is in
//     flight.
//
// A Plan never waits, reads a clock or draws a random number. The driver supplies times and
// random numbers, which may be simulated. Observers, spans and metrics see nothing of the call, and
// the logger only what concerns the target, see [WithPatience].
//
// A Plan is not safe for concurrent use. The zero Plan is unusable.
type Plan struct {
	plan    plan
	ctx     context.Context
	method  string
	learner HedgeDelay // nil if nothing measures the first attempt
	won     bool
	u       float64 // the latest random number
	cut     []int   // the numbers of attempts that Overdue or Due said to cancel
	silent  bool    // an attempt before the newest has, or had, no response

	worksFor *layers.Request // see UnaryServerInterceptor; nil if there is none
}

// A Step tells a [Plan]'s driver what to do next. Attempts in flight continue unless End is set.
type Step struct {
	// Send is true if an attempt is to be sent now.
	Send bool
	// Cut is the number of an overdue attempt that the driver must cancel now, because another one
	// replaces it or because the call has no deadline. The driver then calls [Plan.Ended] with
	// [ErrAttemptTimeout], and does what that Step says. 0 stands for none.
	Cut int
	// Connect is true if the driver is to wait for a connection: it calls [Plan.Due] as soon as
	// there is one, and at DueAt at the latest.
	Connect bool
	// End is true if the call is over. The driver cancels the attempts in flight and reports
	// each with [Plan.Ended] and [ErrHedgeLost].
	End bool
	// Reason is an error as in [Error.Reason]: why no attempt follows the one that was reported, or
	// why a hedge that was due is not sent. It is nil after a success, and if another attempt
	// follows, immediately or at DueAt.
	Reason error
}

// Plan returns a Plan for a call that starts at the time start. The method has the form
// "/pkg.Service/Method". The call ends with ctx, at the latest at its deadline, and the policy's
// Classifier is called with ctx. The target names the backend if there is a budget for each; it
// may be any string, and in gRPC's canonical form, "dns:///shop:443", it shares the budget of RPCs
// to that target. The options are the call's own; Plan panics if one is invalid.
//
// If ctx is that of a server's handler, the Plan follows the rules of [UnaryServerInterceptor].
//
// A method whose calls pass through gets a Plan of one attempt that spends and reports nothing.
func (r *Retrier) Plan(ctx context.Context, method, target string, start time.Time, opts ...CallOption) *Plan {
	p := &Plan{ctx: ctx, method: method, worksFor: layers.Of(ctx)}
	own, err := ownOptions(opts)
	if err != nil {
		panic(fmt.Errorf("grpcretry: Plan: %w", err)) //nolint:forbidigo // documented; options are part of the program
	}
	policies := r.made().settings.current()
	obeyed := policies.withOwn(policies.of(method), own)
	budget := Unlimited
	if obeyed.MaxAttempts > 1 {
		budget = budgetNamed(obeyed.Budget, target)
	}
	var hedgeBudget Budget
	if b := obeyed.hedgeBudget(); b != nil {
		hedgeBudget = budgetNamed(b, target)
	}
	deadline, _ := ctx.Deadline()
	p.plan.begin(obeyed, budget, hedgeBudget, r.targets.named(target), start, deadline)
	p.plan.oneAttempt = p.worksFor.IsRetry()
	delay, learner, hedged := obeyed.hedgingOf(method, p.worksFor, func() time.Time { return start })
	if p.learner = learner; hedged {
		p.plan.hedgeEvery(delay)
	}
	return p
}

// Sent reports that an attempt is sent at the time now. It returns the attempt's Method, Number,
// Hedge, Start, Wait, WaitSource and Repeats, and how long the attempt may run before the driver calls
// [Plan.Overdue]; a timeout of 0 means no limit.
func (p *Plan) Sent(now time.Time) (a Attempt, timeout time.Duration) {
	s := p.plan.send(now)
	p.silent = s.silent
	a = Attempt{Method: p.method, Number: s.number, Hedge: s.hedge, Start: now,
		Wait: s.wait, WaitSource: s.source, Repeats: s.repeats}
	if p.plan.policy.MaxAttempts > 1 {
		timeout = p.plan.attemptTimeout()
	}
	return a, timeout
}

// Ended reports how an attempt ended at the time now, and returns the next Step. The driver
// passes the Attempt that Sent returned, with Duration and, if it failed, Err. Err is judged by
// its status code, see [google.golang.org/grpc/status.Code]. It must be [ErrAttemptTimeout] for
// an attempt that was cancelled because Overdue returned true, and [ErrHedgeLost] for one that
// was cancelled because the call is over. The driver may also set Trailer, which can hold a
// server's pushback; Unsent, if the attempt reached no server; NoResponse, if the server that it
// reached did not respond, as after ErrAttemptTimeout; and the other fields, for the Classifier. u is a
// random number in [0, 1), for the jitter.
//
// A success ends the call. It must be reported before the attempts that lose to it.
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
		p.plan.loserEnded(Outcome{Attempt: a.Number, Hedge: a.Hedge})
		return Step{End: true, Reason: ErrHedgeLost}
	}
	p.u = u
	f := p.failure(a, now)
	f.TimedOut = errors.Is(a.Err, ErrAttemptTimeout) && slices.Contains(p.cut, a.Number)
	f.Attempt.late = !f.TimedOut && p.isLate(a)
	f.Attempt.NoResponse = a.NoResponse || f.TimedOut
	step := p.plan.failed(p.ctx, &f, now, u)
	if step.End && forbidsRetry(a.Trailer) {
		p.worksFor.GiveUp()
	}
	return p.export(step)
}

// RequestHeader returns what an RPC sends with an attempt such as the newest one, so that the server's
// [UnaryServerInterceptor] and [PreviousAttempts] know about it; nil if that is nothing. It is for
// requests in gRPC's own protocol.
func (p *Plan) RequestHeader() map[string]string {
	h := attemptHeader{p.plan.made - 1, p.silent || p.worksFor.IsRetry()}
	if h.previous < 1 && !h.limited {
		return nil
	}
	values := map[string]string{}
	for key, value := range h.metadata() {
		values[key] = value[0]
	}
	return values
}

// Overdue decides what follows an attempt that is still in flight after the timeout that Sent
// returned; u is a random number in [0, 1). If another attempt may replace it, that becomes due at
// DueAt, and the overdue one goes on until then: the Step of [Plan.Due] says to cut it. If none may,
// it goes on to the call's deadline; without a deadline this Step says to cut it.
func (p *Plan) Overdue(a Attempt, now time.Time, u float64) Step {
	a.Err = ErrAttemptTimeout
	f := p.failure(a, now)
	p.u = u
	return p.export(p.plan.overdue(p.ctx, &f, now, u))
}

// Due returns the Step at DueAt, or as soon as a connection is ready for which a Step said to
// wait. If neither Send nor End is set, a wait was repeated, see [WithPatience]: the driver waits
// until the new DueAt. If the call's context has ended, the call is over. The random numbers of
// repeated waits are derived from the one that Ended received.
func (p *Plan) Due(now time.Time) Step {
	if reason := endOf(p.ctx, now); reason != nil {
		p.plan.leave()
		return Step{End: true, Reason: reason}
	}
	_, p.u = math.Modf(p.u + math.Phi)
	if p.plan.connecting != nil && now.Before(p.plan.dueAt) {
		return p.export(p.plan.connected(now, p.u))
	}
	return p.export(p.plan.due(now, p.u))
}

// DueAt returns when to call [Plan.Due]; the zero time means never. Every other method may change
// that time.
func (p *Plan) DueAt() time.Time { return p.plan.dueAt }

func (p *Plan) failure(a Attempt, now time.Time) failure {
	return failure{Attempt: a, Unsent: a.Unsent, NotRun: a.Unsent, CtxErr: endOf(p.ctx, now)}
}

// isLate reports whether an attempt that was not cut has run for the attempt timeout.
func (p *Plan) isLate(a Attempt) bool {
	timeout := p.plan.policy.AttemptTimeout
	return timeout > 0 && a.Duration >= timeout
}

// measure reports the first attempt to the delay, if that learns from latencies.
func (p *Plan) measure(a Attempt, now time.Time) {
	if p.learner != nil && a.Number == 1 {
		p.learner.Answered(p.method, a.Duration, a.Err != nil, now)
	}
}

// export returns a step for the driver. If the call has given up, it tells the server whose handler makes
// the call.
func (p *Plan) export(s step) Step {
	if s.End && gaveUp(s.Reason, p.plan.sent() > 0) && p.plan.policy.MaxAttempts > 1 {
		p.worksFor.GiveUp()
	}
	if s.Cut != 0 {
		p.cut = append(p.cut, s.Cut)
	}
	return Step{Send: s.Send, Cut: s.Cut, Connect: s.Connect, End: s.End, Reason: s.Reason}
}
