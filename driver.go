package grpcretry

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/grpcretry/grpcretry/internal/drive"
	"github.com/grpcretry/grpcretry/internal/layers"
)

// A drivenPlan is the plan of a call whose attempts another package sends. It implements [drive.Plan],
// which describes the methods.
type drivenPlan struct {
	plan    plan
	ctx     context.Context
	method  string
	learner HedgeDelay // nil if nothing measures the first attempt
	won     bool
	u       float64   // the latest random number
	overdue []Attempt // in flight, and to be asked about as soon as no attempt is pending
	cut     []int     // the numbers of attempts that Overdue or Due said to cancel
	silent  bool      // an attempt before the newest has, or had, no response

	worksFor *layers.Request // see UnaryServerInterceptor; nil if there is none
}

func init() {
	drive.Make = func(ctx context.Context, retrier any, method, target string, start time.Time, opts any) any {
		own, _ := opts.([]CallOption)
		return retrier.(*Retrier).drive(ctx, method, target, start, own...)
	}
}

// drive returns the plan of a call that another package drives, see [drive.New].
func (r *Retrier) drive(ctx context.Context, method, target string, start time.Time, opts ...CallOption) *drivenPlan {
	p := &drivenPlan{ctx: ctx, method: method, worksFor: layers.Of(ctx)}
	own, err := ownOptions(opts)
	if err != nil {
		panic(fmt.Errorf("grpcretry: Plan: %w", err)) //nolint:forbidigo // documented; options are part of the program
	}
	policies := r.checked().settings.current()
	obeyed := policies.withOwn(policies.of(method), own)
	budget := Unlimited
	if obeyed.MaxAttempts > 1 {
		budget = budgetNamed(obeyed.Budget, target)
	}
	hedges := budgetNamed(obeyed.hedgeBudget(), target)
	p.plan.begin(obeyed, budget, hedges, r.targets.Named(target), instantOf(start), deadlineOf(ctx, start))
	p.plan.single = p.worksFor.IsRetry()
	delay, learner, hedged := obeyed.hedgingOf(method, p.worksFor, func() time.Time { return start })
	if p.learner = learner; hedged {
		p.plan.delay = delay
	}
	return p
}

// Sent implements [drive.Plan].
func (p *drivenPlan) Sent(now time.Time) (a Attempt, timeout time.Duration) {
	s := p.plan.send(p.plan.ledger.noted(now))
	p.silent = s.silent
	a = Attempt{Method: p.method, Number: int(s.number), Hedge: s.source.isHedge(), Start: now,
		Wait: s.wait, WaitSource: s.source, repeats: s.repeats}
	return a, p.timeout()
}

// timeout returns how long the newest attempt may run before it is overdue; 0 if it may use all the time that is left.
func (p *drivenPlan) timeout() time.Duration {
	last := p.plan.single || p.plan.counted() >= p.plan.policy.MaxAttempts
	if last && p.plan.deadline != 0 || p.plan.policy.dryRun {
		return 0
	}
	return p.plan.policy.AttemptTimeout
}

// Ended implements [drive.Plan].
func (p *drivenPlan) Ended(a Attempt, now time.Time, u float64) drive.Step {
	p.overdue = slices.DeleteFunc(p.overdue, func(other Attempt) bool { return other.Number == a.Number })
	switch {
	case a.Err == nil:
		p.won = true
		p.measure(a, now)
		p.plan.ended(Outcome{Attempt: a.Number, Hedge: a.Hedge, Result: Succeeded, late: p.isLate(a)}, instantOf(a.Start))
		return p.export(verdict{do: doEnd})
	case errors.Is(a.Err, ErrHedgeLost):
		if p.won {
			p.measure(a, now)
		}
		p.plan.ended(Outcome{Attempt: a.Number, Hedge: a.Hedge, Result: Ignored}, instantOf(a.Start))
		return drive.Step{End: true, Reason: ErrHedgeLost}
	}
	p.u = u
	f := p.failure(a, now)
	f.TimedOut = errors.Is(a.Err, ErrAttemptTimeout) && slices.Contains(p.cut, a.Number)
	if f.TimedOut {
		f.Attempt.Err = newAttemptTimeoutError(p.plan.policy.AttemptTimeout, a.Err)
	}
	f.Attempt.late = !f.TimedOut && p.isLate(a)
	f.NoResponse = f.TimedOut
	v := p.failed(&f, now, u)
	if v.do == doEnd && forbidsRetry(a.Trailer) {
		p.worksFor.GiveUp()
	}
	return p.export(v)
}

// failed asks the plan about a failed attempt, unless the call passes through.
func (p *drivenPlan) failed(f *failure, now time.Time, u float64) verdict {
	if p.plan.policy.MaxAttempts == 1 {
		f.found = finding{retryable: true, hint: Pushback{Stop: forbidsRetry(f.Attempt.Trailer)}}
		return verdict{Reason: cmp.Or(p.plan.policy.ruledOut(f), ErrAttemptsExhausted), do: doEnd}
	}
	if !p.plan.isReplaced(f) {
		p.plan.policy.examine(p.ctx, f)
	}
	return p.plan.failed(f, p.plan.ledger.noted(now), u)
}

// RequestHeader implements [drive.Plan].
func (p *drivenPlan) RequestHeader() map[string]string {
	h := layers.Header{Previous: int(p.plan.made) - 1, Limited: p.silent || p.worksFor.IsRetry()}
	if h.Previous < 1 && !h.Limited {
		return nil
	}
	values := map[string]string{}
	for key, value := range h.Metadata() {
		values[key] = value[0]
	}
	return values
}

// Overdue implements [drive.Plan].
func (p *drivenPlan) Overdue(a Attempt, now time.Time, u float64) drive.Step {
	p.overdue, p.u = append(p.overdue, a), u
	if !p.isAskedAbout() {
		return drive.Step{}
	}
	return p.askAbout(len(p.overdue)-1, now)
}

// isAskedAbout reports whether the plan is to be asked about an overdue attempt now.
func (p *drivenPlan) isAskedAbout() bool { return len(p.overdue) > 0 && !p.plan.pending.isDecided() }

// askAbout asks the plan about an overdue attempt: once, or without a deadline again if nothing replaces it after all.
func (p *drivenPlan) askAbout(i int, now time.Time) drive.Step {
	a := p.overdue[i]
	a.Duration = now.Sub(a.Start)
	f := p.failure(a, now)
	f.TimedOut = true
	f.Attempt.Err = newAttemptTimeoutError(p.plan.policy.AttemptTimeout, nil)
	v := p.plan.overdue(p.ctx, &f, p.plan.ledger.noted(now), p.u)
	if p.plan.deadline != 0 || v.do > 0 {
		p.overdue = slices.Delete(p.overdue, i, i+1)
	}
	return p.export(v)
}

// Due implements [drive.Plan].
func (p *drivenPlan) Due(now time.Time) drive.Step {
	if reason := endOf(p.ctx, now); reason != nil {
		p.plan.leave()
		return p.export(verdict{Reason: reason, do: doEnd})
	}
	_, p.u = math.Modf(p.u + math.Phi)
	at := p.plan.ledger.noted(now)
	if p.isAskedAbout() {
		return p.askAbout(0, now)
	}
	if p.plan.connecting != nil && at < p.plan.dueAt {
		return p.export(p.plan.connected(at, p.u))
	}
	return p.export(p.plan.due(at, p.u))
}

// DueAt implements [drive.Plan].
func (p *drivenPlan) DueAt() time.Time {
	if p.isAskedAbout() {
		return p.plan.ledger.now
	}
	if p.plan.dueAt == 0 {
		return time.Time{}
	}
	return p.plan.dueAt.timeFrom(p.plan.ledger.now)
}

func (p *drivenPlan) failure(a Attempt, now time.Time) failure {
	return failure{Attempt: a, NotRun: a.Unsent, CtxErr: endOf(p.ctx, now)}
}

// isLate reports whether an attempt that was not cut has run for the attempt timeout.
func (p *drivenPlan) isLate(a Attempt) bool {
	timeout := p.plan.policy.AttemptTimeout
	return timeout > 0 && a.Duration >= timeout && !p.plan.policy.dryRun
}

// measure reports the first attempt to the delay, if that learns from latencies.
func (p *drivenPlan) measure(a Attempt, now time.Time) {
	if p.learner != nil && a.Number == 1 {
		p.learner.Answered(p.method, a.Duration, a.Err != nil, now)
	}
}

// export returns a verdict as a Step for the driver. If the call has given up, it tells the server whose handler makes
// the call.
func (p *drivenPlan) export(v verdict) drive.Step {
	if v.do == doEnd {
		p.overdue = nil
	}
	if v.do == doEnd && gaveUp(&p.plan, v.Reason) {
		p.worksFor.GiveUp()
	}
	step := drive.Step{Send: v.do == doSend, Cut: int(max(v.do, 0)), Connect: v.do == doConnect, End: v.do == doEnd, Reason: v.Reason}
	if step.Cut != 0 {
		p.cut = append(p.cut, step.Cut)
	}
	return step
}
