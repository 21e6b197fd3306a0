package grpcretry

import (
	"context"
	"time"
)

// A plan holds one call's state and decides what happens next, for retried and hedged calls
// alike. Its driver sends attempts, reports how they end, and does what the returned step says;
// the plan applies the rules, and makes all deposits, withdrawals and refunds. The interceptors
// drive it directly, other programs through [Plan].
//
// The driver calls
//
//   - send when it sends an attempt;
//   - failed, succeeded or lost, once for each attempt, when the attempt ends;
//   - overdue when an attempt has run for the attempt timeout;
//   - due at dueAt;
//   - connected if the last step waits for a connection, and it is ready before dueAt;
//   - leave when the call ends while no attempt is in flight.
//
// A plan is not safe for concurrent use. The zero plan is unusable before begin.
type plan struct {
	policy   *policy
	budget   Budget
	hedges   Budget // which hedges spend from as well; nil if the method is not hedged
	start    time.Time
	deadline time.Time // the caller's or the service config's; zero without one
	limited  bool      // the deadline is the service config's
	dials    bool      // each attempt looks for a connection by itself, see Retrier.Do
	once     bool      // a service further up retries the work that the call is made for, see layers.go

	unresolved *unresolvedPolicy // set if the policy depends on the service config of a fresh channel

	made     int // attempts sent, including the unsent; also the number of the newest
	unsent   int // attempts that reached no server
	released int // the number of the attempt that the application is committed to; 0 before that
	open     int // attempts in flight
	free     int // the number of the attempt that was not charged; 0 before there is one

	retry int           // retries since the backoff was last restarted
	prev  time.Duration // the backoff's previous wait; 0 after a restart

	next pending  // the attempt that was decided on but not yet sent
	cut  *overdue // the attempt that its timeout ended, until its end is reported; otherwise nil

	replacing bool   // set while a retry is decided on that replaces an overdue attempt
	held      charge // the withdrawal for such a retry, while it is decided on again

	connecting  error         // while the call waits for a connection: the reason to end at dueAt; otherwise nil
	connectTime time.Duration // the total time of such waits

	dueAt time.Time // when to call due; zero for never

	// The rest is for hedged calls.
	delay     time.Duration
	postponed time.Duration // how long the last hedge that could not be sent was postponed
	notBefore time.Time     // the time that the newest pushback named
	pushed    WaitSource    // the source of that time
	charges   []charge      // one per attempt, from the first
	stopped   error         // the reason an earlier attempt's failure ruled out further attempts
	tooLong   bool          // when all attempts were sent, the server asked for a wait over MaxServerDelay
}

// A pending attempt has been decided on, and charged unless it is free.
type pending struct {
	decided bool
	charge  charge
	from    time.Time // when it was decided on
	at      time.Time // when it will be sent
	wait    time.Duration
	source  WaitSource

	retry int           // the plan's retry before this attempt was decided on
	prev  time.Duration // the plan's prev before that
}

// An overdue attempt was judged before its end.
type overdue struct {
	number  int
	verdict verdict
	result  Result // for the budget
}

// A charge is the withdrawal for an attempt.
type charge uint8

const (
	nothing  charge = iota // the first attempt that reaches a server is free
	aRetry                 // a retry from the budget
	andHedge               // a retry, and another from the budget of hedges
)

// A step tells the driver what to do next. Attempts in flight continue unless Cut or End is set.
type step struct {
	verdict // the decision about the attempt that was reported, or about the hedge that was due

	Send    bool // send an attempt now
	Cut     bool // cancel the overdue attempt; its end is then reported as TimedOut
	Connect bool // wait for a connection: call connected when it is ready, or due at dueAt
	End     bool // the call is over, because of Reason; cancel the attempts in flight
}

// begin starts the plan of a call. It changes the zero plan in place, because a plan is too large
// to be copied for each call.
func (p *plan) begin(obeyed *policy, b, hedges Budget, start, deadline time.Time) {
	p.policy, p.budget, p.hedges = obeyed, b, hedges
	p.start, p.deadline = start, deadline
}

// hedgeEvery turns the call into a hedged one, with delay between attempts. The policy's
// [Hedging] must be set. The driver calls it before the first send.
func (p *plan) hedgeEvery(delay time.Duration) {
	if !p.policy.hedges {
		p.policy = p.policy.hedged
	}
	p.delay = delay
}

// begun reports whether begin was called.
func (p *plan) begun() bool { return p.policy != nil }

// hedgeFrom makes the second attempt's delay count from start, unless that attempt has already
// been decided on.
func (p *plan) hedgeFrom(start time.Time) {
	if p.policy.hedges && p.made == 1 && !p.next.decided && p.cut == nil {
		p.dueAt = start.Add(p.delay)
	}
}

// A sending describes an attempt that is sent. It is used because an [Attempt] is large.
type sending struct {
	number int
	hedge  bool
	wait   time.Duration
	source WaitSource
}

// send records that an attempt is sent now.
func (p *plan) send(now time.Time) sending {
	p.made++
	if p.open == 0 {
		p.next.charge = p.retryOnly(p.next.charge)
	}
	if p.next.charge == nothing {
		p.free = p.made
	}
	if p.hedges != nil {
		p.charges = append(p.charges, p.next.charge)
	}
	s := sending{p.made, p.open > 0, p.next.wait, p.next.source}
	p.next = pending{}
	p.open++
	p.dueAt = time.Time{}
	if p.policy.hedges && p.sent() < p.policy.MaxAttempts {
		p.dueAt = p.earliest(now.Add(p.delay))
	}
	return s
}

// attemptTimeout returns how long the newest attempt may run before it is overdue; 0 if it may
// use all the remaining time.
func (p *plan) attemptTimeout() time.Duration {
	last := p.sent() >= p.mostAttempts() && (p.unresolved == nil || p.once)
	if last && !p.deadline.IsZero() {
		return 0
	}
	return p.policy.AttemptTimeout
}

// mostAttempts returns how many attempts may reach a server.
func (p *plan) mostAttempts() int {
	if p.once {
		return 1
	}
	return p.policy.MaxAttempts
}

// sent returns the number of attempts that count towards MaxAttempts.
func (p *plan) sent() int { return p.made - p.unsent }

// succeeded records that an attempt succeeded. The call is over.
func (p *plan) succeeded(o Outcome) {
	p.open--
	o.Result = Succeeded
	p.deposit(o)
	p.leave()
}

// lost records that an attempt was cancelled because the call is over.
func (p *plan) lost(o Outcome) {
	p.open--
	o.Result = Ignored
	p.deposit(o)
}

// revoke refunds the charge for an attempt that was not sent after all.
func (p *plan) revoke(number int) {
	p.open--
	p.refund(p.chargeOf(number))
}

// commit records that the application is bound to an attempt's stream. To a budget that limits
// the retries in flight, it no longer counts as one, because a stream may live for days.
func (p *plan) commit(number int) {
	charge := p.chargeOf(number)
	if charge == nothing {
		return
	}
	p.released = number
	release(p.budget)
	if charge == andHedge {
		release(p.hedges)
	}
}

// leave refunds the charge for an attempt that will not be sent.
func (p *plan) leave() {
	if p.next.decided {
		charge := p.next.charge
		p.next = pending{} // before the budget is called, which may panic
		p.refund(charge)
	}
	p.dueAt, p.connecting = time.Time{}, nil
}

// failed decides what follows an attempt that failed at the time now; u is uniform in [0, 1).
// The first rule that matches decides:
//
//  1. the caller's context has ended, or the ClientConn is closed: stop
//  2. the call is committed: stop
//  3. the server forbade a retry: stop
//  4. the classifier, or else the code set, rules out a retry: stop
//  5. UnsentOnly is on, a server may have run the method, and did not ask for another attempt:
//     stop
//  6. the attempt reached no server: wait for a connection and then for the backoff, at no
//     charge; if ConnectWait is used up, stop
//  7. MaxAttempts attempts were made, or one if a service further up retries: stop
//  8. the wait (pushback, or else RetryInfo, or else the backoff for the code) is longer than
//     MaxServerDelay, or would reach the deadline or MaxElapsed: stop
//  9. the budget refuses: stop
//  10. retry after the wait; the budget has been charged
//
// In a hedged call, a stop by rules 1, 2 or 4 ends the call; rule 5 applies to none. Any other
// stop only rules out further attempts, because attempts in flight may still win. ctx is only
// passed to the Classifier.
func (p *plan) failed(ctx context.Context, f *failure, now time.Time, u float64) step {
	defer p.refundHeld()
	return p.judge(ctx, f, now, u)
}

// refundHeld refunds the charge for a retry that was decided on before its predecessor ended, and
// that nothing has used since.
func (p *plan) refundHeld() {
	if held := p.held; held != nothing {
		p.held = nothing
		p.refund(held)
	}
}

// judge takes an attempt that has ended out of flight, reports it to the budget, and applies
// the rules.
func (p *plan) judge(ctx context.Context, f *failure, now time.Time, u float64) step {
	p.open--
	if p.cut != nil && p.cut.number == f.Attempt.Number {
		if step, ok := p.timedOut(f, now); ok {
			return step
		}
	}
	found := p.findOrDeposit(ctx, f)
	if found.hinted && !found.hint.Stop {
		p.notBefore, p.pushed = now.Add(found.hint.Delay), found.hint.Source
		if !p.dueAt.IsZero() {
			p.dueAt = p.earliest(p.dueAt)
		}
	}
	unsent := f.Unsent && p.connectWait() > 0
	if !unsent {
		p.deposit(f.outcome(p.policy.result(f, found)))
	}
	v := verdict{Reason: p.policy.ruledOut(f, found)}
	switch {
	case v.Reason != nil:
		v.untouched = f.untouched(found) || v.Reason == errMayHaveRun //nolint:errorlint // the rules' own value
		v.fatal = v.untouched || f.CtxErr != nil || f.Committed
	case unsent && p.stopped == nil && p.tooLong:
		v.Reason = ErrPushback
	case unsent && p.stopped == nil:
		return p.reconnect(f, found, now, u)
	default:
		v = p.again(found, now, u)
	}
	if unsent { // and no other attempt replaces it
		p.refund(p.chargeOf(f.Attempt.Number))
	}
	if v.Retry {
		return p.retryStep(v, now)
	}
	return p.stopStep(v)
}

// findOrDeposit examines a failure. If the classifier panics, the attempt is still reported to
// the budget.
func (p *plan) findOrDeposit(ctx context.Context, f *failure) finding {
	if p.policy.Classifier == nil {
		return p.policy.find(ctx, f)
	}
	done := false
	defer func() {
		if !done {
			p.deposit(f.outcome(Ignored))
		}
	}()
	found := p.policy.find(ctx, f)
	done = true
	return found
}

// timedOut returns the step that was decided on when the attempt was overdue; ok is false if
// the attempt ended for another reason after all.
func (p *plan) timedOut(f *failure, now time.Time) (next step, ok bool) {
	cut := p.cut
	p.cut = nil
	pushed := len(f.Attempt.Trailer[pushbackKey]) > 0                                                                                   // the server's failure arrived together with the timeout
	itself := f.TimedOut && !pushed && !f.Unsent && f.CtxErr == nil && !f.Closed && f.Committed == (cut.verdict.Reason == ErrCommitted) //nolint:errorlint // the rules' own value
	switch {
	case itself && !cut.verdict.Retry:
		next = p.stopStep(cut.verdict)
	case itself && p.next.decided:
		v := verdict{Retry: true, Wait: p.next.wait, WaitSource: p.next.source}
		if v.Reason = p.tooLate(now, max(0, p.next.at.Sub(now))); v.Reason != nil { // the driver was slow
			v.Retry = false
			next = p.stopStep(v)
		} else {
			next = p.retryStep(v, now)
		}
	case p.next.decided: // its own failure counts; the charge is held for the retry that may follow
		p.retry, p.prev = p.next.retry, p.next.prev
		p.held, p.next = p.next.charge, pending{}
		return step{}, false
	default:
		return step{}, false
	}
	p.deposit(f.outcome(cut.result))
	return next, true
}

// again applies rules 7 to 10. If they allow a retry, it is charged and becomes the next attempt.
func (p *plan) again(found finding, now time.Time, u float64) verdict {
	switch {
	case p.stopped != nil:
		return verdict{Reason: p.stopped}
	case p.sent() >= p.mostAttempts() && p.once:
		return verdict{Reason: ErrRetriedUpstream}
	case p.sent() >= p.mostAttempts():
		p.tooLong = p.tooLong || p.asksTooMuch(found) // then nothing replaces an attempt that was unsent
		return verdict{Reason: ErrAttemptsExhausted}
	}
	wait, source, reason := p.schedule(found, now, u)
	v := verdict{Wait: wait, WaitSource: source, Reason: reason}
	if reason != nil {
		return v
	}
	if !p.next.decided && !p.admit(now, p.open > 0) {
		v.Reason = ErrBudgetExhausted
		return v
	}
	v.Retry = true
	p.accept(v, now)
	return v
}

// schedule applies rule 8. It returns the wait before the next attempt, the source of the wait,
// and why that attempt would start too late, if it would.
func (p *plan) schedule(found finding, now time.Time, u float64) (time.Duration, WaitSource, error) {
	wait, source := time.Duration(0), WaitBackoff
	switch hint := found.hint; {
	case p.asksTooMuch(found):
		return hint.Delay, hint.Source, ErrPushback
	case found.hinted && hint.Source == WaitRetryInfo:
		// Spread: the server gave every client the same delay.
		wait, source = max(hint.Delay, duration(float64(hint.Delay)*(1+0.2*unit(u)))), WaitRetryInfo
	case found.hinted:
		wait, source = hint.Delay, WaitPushback
	case p.policy.hedges:
		wait, source = p.nonFatal(now)
	default:
		wait = nextBackoff(p.policy.backoff(found.code), p.retry+1, p.prev, u)
	}
	return wait, source, p.tooLate(now, wait)
}

// asksTooMuch reports whether the server asks for a wait that is longer than MaxServerDelay.
func (p *plan) asksTooMuch(found finding) bool {
	return found.hinted && p.policy.MaxServerDelay >= 0 && found.hint.Delay > p.policy.MaxServerDelay
}

// nonFatal returns the wait after a failure in a hedged call. There is none, unless a server's
// pushback is still in force.
func (p *plan) nonFatal(now time.Time) (time.Duration, WaitSource) {
	if left := p.notBefore.Sub(now); left > 0 && !p.notBefore.IsZero() {
		return left, p.pushed
	}
	return 0, waitNonFatal
}

// tooLate reports why no attempt may start after a wait that starts now: its end would reach
// the deadline or MaxElapsed.
func (p *plan) tooLate(now time.Time, wait time.Duration) error {
	switch {
	case !p.deadline.IsZero() && wait >= p.deadline.Sub(now):
		return ErrDeadline
	case p.policy.MaxElapsed > 0 && wait >= p.policy.MaxElapsed-now.Sub(p.start):
		return ErrMaxElapsed
	default:
		return nil
	}
}

// accept schedules the attempt that v allows. A wait that the server asked for restarts the
// backoff (gRFC A6 #pushback).
func (p *plan) accept(v verdict, now time.Time) {
	p.next.decided = true
	p.next.retry, p.next.prev = p.retry, p.prev
	p.next.from, p.next.at = now, now.Add(v.Wait)
	p.next.wait, p.next.source = v.Wait, v.WaitSource
	switch v.WaitSource {
	case WaitBackoff:
		p.retry++
		p.prev = v.Wait
	case WaitPushback, WaitRetryInfo:
		p.retry, p.prev = 0, 0
		p.notBefore, p.pushed = p.next.at, v.WaitSource
	}
}

// retryStep returns the step after a verdict to retry.
func (p *plan) retryStep(v verdict, now time.Time) step {
	if !now.Before(p.next.at) {
		return step{verdict: v, Send: true}
	}
	p.dueAt = p.next.at
	return step{verdict: v}
}

// stopStep returns the step after a verdict to stop.
func (p *plan) stopStep(v verdict) step {
	exhausted := v.refusedByBudget() || v.Reason == ErrAttemptsExhausted //nolint:errorlint // the rules' own value
	if !p.policy.hedges || v.fatal || !exhausted {
		p.leave()
		p.stopped = v.Reason
	}
	// If no attempt is in flight, none is pending either: it would have been sent, or refunded.
	end := v.fatal || p.open == 0 && !p.next.decided
	if end {
		p.dueAt = time.Time{} // of a hedge
	}
	return step{verdict: v, End: end}
}

// reconnect applies rule 6: the call waits for a connection, at most for the rest of ConnectWait
// and not past the deadline or MaxElapsed, and then for its backoff. The attempt that follows
// replaces the unsent one and takes over its charge.
func (p *plan) reconnect(f *failure, found finding, now time.Time, u float64) step {
	taken := p.chargeOf(f.Attempt.Number)
	p.unsent++
	if p.free == f.Attempt.Number {
		p.free = 0
	}
	if p.next.decided || p.open > 0 { // in a hedged call, another attempt is in flight or pending
		p.refund(taken)
		if !p.next.decided {
			p.putOff(now)
		}
		return step{verdict: verdict{Retry: true, Wait: max(0, p.dueAt.Sub(now)), WaitSource: waitHedgeDelay}}
	}
	v := verdict{Wait: p.unsentBackoff(f, taken, u), WaitSource: WaitConnect}
	if p.dials {
		v = p.redial(v, found, now, u)
	}
	if v.Reason == nil {
		v.Reason = p.tooLate(now, v.Wait)
	}
	left := p.connectWait() - p.connectTime
	if left <= 0 || p.dials && v.Wait > left {
		v = verdict{Reason: ErrNotConnected}
	}
	if v.Reason != nil {
		p.refund(taken)
		return p.stopStep(v)
	}
	p.next.charge = taken
	v.Retry = true
	p.accept(v, now)
	if p.dials {
		if v.WaitSource == WaitConnect {
			p.retry, p.prev = p.retry+1, v.Wait // because the next attempt is the next dial
		}
		p.connectTime += v.Wait
		return p.retryStep(v, now)
	}
	until, reason := p.connectUntil(now.Add(left), v.Wait)
	p.connecting = reason
	p.dueAt = until
	return step{verdict: v, Connect: true}
}

// redial returns the wait before a function looks for a connection again: what the failure asks for,
// otherwise the backoff in v. It is not 0, because the function would be called without end.
func (p *plan) redial(v verdict, found finding, now time.Time, u float64) verdict {
	if found.hinted {
		v.Wait, v.WaitSource, v.Reason = p.schedule(found, now, u)
	}
	v.Wait = max(v.Wait, shortestRedial)
	return v
}

const shortestRedial = time.Millisecond

// connectWait returns how long the call may wait for a connection, in total; at most 0 for not at all.
func (p *plan) connectWait() time.Duration {
	if p.dials {
		return p.policy.redialFor
	}
	return p.policy.ConnectWait
}

// unsentBackoff returns the backoff after a wait for a connection. If the Backoff panics, the unsent
// attempt's charge is refunded.
func (p *plan) unsentBackoff(f *failure, taken charge, u float64) time.Duration {
	done := false
	defer func() {
		if !done {
			p.refund(taken)
		}
	}()
	wait := nextBackoff(p.policy.backoff(f.Attempt.Code()), p.retry+1, p.prev, u)
	done = true
	return wait
}

// connectUntil returns when and why the call gives up waiting for a connection: at until, or as
// soon as the backoff after it would reach the deadline or MaxElapsed.
func (p *plan) connectUntil(until time.Time, backoff time.Duration) (time.Time, error) {
	reason := ErrNotConnected
	if last := p.deadline.Add(-backoff); !p.deadline.IsZero() && last.Before(until) {
		until, reason = last, ErrDeadline
	}
	if last := p.start.Add(p.policy.MaxElapsed - backoff); p.policy.MaxElapsed > 0 && last.Before(until) {
		until, reason = last, ErrMaxElapsed
	}
	return until, reason
}

// connected records that the connection for which a step waited is ready. The backoff follows,
// so that the waiting calls do not all retry at the same instant.
func (p *plan) connected(now time.Time) step {
	p.connecting = nil
	p.connectTime += now.Sub(p.next.from)
	backoff := p.next.wait
	if reason := p.tooLate(now, backoff); reason != nil {
		p.leave()
		return step{verdict: verdict{Reason: reason}, End: true}
	}
	p.next.at = p.earliest(now.Add(backoff))
	p.next.wait = p.next.at.Sub(p.next.from)
	return p.retryStep(verdict{Retry: true, Wait: p.next.wait, WaitSource: WaitConnect}, now)
}

// overdue judges an attempt in flight that has run for the attempt timeout; f has no Err yet.
// Cut means that the driver cancels it, because another attempt, already charged, replaces it.
// If none can, the attempt continues to the caller's deadline and is judged by its own result;
// without a deadline it is cut in any case, so that the call cannot hang. If the server forbids
// more attempts before the cut attempt has ended, none follows.
//
// With UnsentOnly nothing replaces an attempt in flight, because its server may be running the
// method: only gRPC's report of its end can show that there is none.
func (p *plan) overdue(ctx context.Context, f *failure, now time.Time, u float64) step {
	f.TimedOut = true
	if f.CtxErr != nil || f.Closed {
		return step{} // it ends by itself
	}
	// Without a connection another attempt would not do better, and a hedged call may already
	// have one pending.
	if f.Unsent || p.next.decided || p.policy.UnsentOnly {
		return step{Cut: p.deadline.IsZero()}
	}
	found := p.policy.find(ctx, f)
	v := verdict{Reason: p.policy.ruledOut(f, found), untouched: f.untouched(found), fatal: f.untouched(found) || f.Committed}
	if v.Reason == nil {
		p.open-- // the attempt that replaces a cut one is a hedge only if others are in flight
		p.replacing = p.free != f.Attempt.Number
		v = p.again(found, now, u)
		p.replacing = false
		p.open++
	}
	if !v.Retry && !p.deadline.IsZero() {
		return step{verdict: v}
	}
	if v.Retry {
		p.dueAt = time.Time{} // until the cut attempt has ended
	}
	p.cut = &overdue{f.Attempt.Number, v, p.policy.result(f, found)}
	return step{verdict: v, Cut: true}
}

// due decides what happens at dueAt.
func (p *plan) due(now time.Time) step {
	switch {
	case p.connecting != nil:
		reason := p.connecting
		p.leave()
		return step{verdict: verdict{Reason: reason}, End: true}
	case p.next.decided:
		return step{verdict: verdict{Retry: true, Wait: p.next.wait, WaitSource: p.next.source}, Send: true}
	default:
		return p.hedge(now)
	}
}

// hedge decides whether a hedge that is due is sent. If it is not, the attempts in flight
// continue.
func (p *plan) hedge(now time.Time) step {
	v := verdict{Wait: p.delay, WaitSource: waitHedgeDelay}
	p.dueAt = time.Time{}
	switch {
	case p.stopped != nil:
		v.Reason = p.stopped
	case p.sent() >= p.policy.MaxAttempts:
		v.Reason = ErrAttemptsExhausted
	default:
		v.Reason = p.tooLate(now, 0)
	}
	if v.Reason == nil && !p.admit(now, p.open > 0) {
		v.Reason = ErrBudgetExhausted
		p.putOff(now)
	}
	if v.Reason != nil {
		return step{verdict: v}
	}
	v.Retry = true
	p.next.decided, p.next.from, p.next.at = true, now, now
	p.next.wait, p.next.source = v.Wait, v.WaitSource
	return step{verdict: v, Send: true}
}

// putOff postpones a hedge that is due but cannot be sent. The time until it is due again doubles
// each time, because thousands of calls may have a hedge that is due. Sending a hedge does not
// reset it.
func (p *plan) putOff(now time.Time) {
	p.postponed = max(2*p.postponed, p.delay, time.Millisecond)
	p.dueAt = p.earliest(now.Add(p.postponed))
}

// earliest returns t, or the time that the newest pushback named if that is later.
func (p *plan) earliest(t time.Time) time.Time {
	if p.notBefore.After(t) {
		return p.notBefore
	}
	return t
}

// admit reports whether the budget allows one more attempt, and charges it. An attempt is free
// if no attempt before it has reached a server.
func (p *plan) admit(now time.Time, hedge bool) bool {
	switch {
	case p.free == 0:
		p.next.charge = nothing
		return true
	case p.held != nothing && (!hedge || p.hedges == nil || p.held == andHedge):
		p.next.charge, p.held = p.held, nothing
		return true
	case !withdrawFrom(p.budget, now, p.replacing):
		return false
	case !hedge || p.hedges == nil:
		p.next.charge = aRetry
		return true
	case !p.withdrawHedge(now):
		return false
	default:
		p.next.charge = andHedge
		return true
	}
}

// withdrawHedge takes a hedge, or gives back the retry that was taken for it, also if the budget of
// hedges panics.
func (p *plan) withdrawHedge(now time.Time) (taken bool) {
	defer func() {
		if !taken {
			p.budget.Refund()
		}
	}()
	return withdrawFrom(p.hedges, now, p.replacing)
}

// refund returns a charge to the budgets.
func (p *plan) refund(c charge) {
	if c == nothing {
		return
	}
	p.budget.Refund()
	if c == andHedge {
		p.hedges.Refund()
	}
}

// retryOnly refunds the hedge in a charge when the attempt is no longer a hedge, and returns the
// rest of the charge.
func (p *plan) retryOnly(c charge) charge {
	if c == andHedge {
		p.hedges.Refund()
		return aRetry
	}
	return c
}

// chargeOf returns the charge for an attempt that was sent.
func (p *plan) chargeOf(number int) charge {
	switch {
	case p.free == number:
		return nothing
	case 0 < number && number <= len(p.charges):
		return p.charges[number-1]
	default:
		return aRetry
	}
}

func (f *failure) outcome(r Result) Outcome {
	return Outcome{Attempt: f.Attempt.Number, Hedge: f.Attempt.Hedge, Result: r, Late: f.Attempt.late}
}

// deposit reports to the budgets how an attempt ended. A budget that was not charged for the
// attempt sees it as a first attempt.
func (p *plan) deposit(o Outcome) {
	charge := p.chargeOf(o.Attempt)
	released := p.released == o.Attempt
	if charge == nothing {
		o.Attempt = 1
	}
	depositIn(p.budget, o, released)
	if p.hedges == nil {
		return
	}
	if charge != andHedge {
		o.Attempt = 1
	}
	depositIn(p.hedges, o, released && charge == andHedge)
}
