package grpcretry

import (
	"context"
	"time"
)

// A plan holds one call's state and decides what happens next, for retried and hedged calls
// alike. Its driver sends attempts, reports how they end, and does what the returned verdict says;
// the plan applies the rules, takes a token for each attempt that is sent after the first, and
// reports each end to the budgets and the target. The interceptors drive it directly, other
// packages through [drive.Plan].
//
// The driver calls
//
//   - send when it sends an attempt;
//   - failed, or ended if it did not fail, once for each attempt, when the attempt ends;
//   - overdue when an attempt has run for the attempt timeout, and none is pending;
//   - undecide if no attempt may replace the one in flight any more;
//   - due at dueAt;
//   - connected if the last verdict waits for a connection, and it is ready before dueAt;
//   - leave when the call ends in any other way than by a verdict.
//
// A plan is not safe for concurrent use. A zero plan must be started by begin.
type plan struct {
	policy *policy
	ledger ledger
	config knownConfig

	silent    bool // an attempt got no response, so its server may still be at work
	single    bool // nothing follows an attempt that has reached a server: a service further up retries, see server.go
	tokenless bool // the retry was due, and waits for a token of the budget

	limits
	waiter

	attemptCounts
	replaces int32    // the number of the overdue attempt that is cut when the next one is due; 0 for none
	progress progress // of the backoff
	pending  pending  // the attempt that was decided on but not yet sent

	connecting error   // while the call waits for a connection: the reason to end at dueAt; otherwise nil
	dueAt      instant // when to call due; zero for never
	pushed     pushed  // by the newest pushback
	stopped    error   // the reason an earlier attempt's failure ruled out further attempts

	delay     time.Duration // of hedges; noHedges if none may be sent
	postponed time.Duration // how long the last hedge that could not be sent was postponed
}

// noHedges is the delay of a call that is not hedged.
const noHedges time.Duration = -1

// attemptCounts counts the attempts of a call.
type attemptCounts struct {
	made   int32 // handed to gRPC; also the number of the newest
	unsent int32 // of these, reached no server
	open   int32 // in flight
}

// counted returns the number of attempts that count towards MaxAttempts.
func (c *attemptCounts) counted() int { return int(c.made - c.unsent) }

// A progress is how far a call's backoff has grown.
type progress struct {
	retry int           // retries since the backoff was last restarted
	prev  time.Duration // the previous wait; 0 after a restart
}

// wait returns the next wait of a backoff that has come so far.
func (p progress) wait(b Backoff, u float64) time.Duration {
	return nextBackoff(b, p.retry+1, p.prev, u)
}

// pushed is a time before which a server wants no attempt: any attempt's server may have named it.
type pushed struct {
	until  instant
	source WaitSource
}

// earliest returns t, or the time that the newest pushback named if that is later.
func (p pushed) earliest(t instant) instant {
	if p.until > t {
		return p.until
	}
	return t
}

// limits are the times at which no attempt may start any more.
type limits struct {
	start    instant
	elapsed  time.Duration // MaxElapsed; 0 for none
	deadline instant       // the caller's or the service config's; zero without one
}

// tooLate returns why no attempt may start after a wait that starts now: the wait would last until the deadline or the
// end of MaxElapsed. A further latest time belongs here and in capped.
func (l *limits) tooLate(now instant, wait time.Duration) error {
	switch {
	case l.deadline != 0 && wait >= l.deadline.Sub(now):
		return ErrDeadline
	case l.elapsed > 0 && wait >= l.elapsed-now.Sub(l.start):
		return ErrMaxElapsed
	default:
		return nil
	}
}

// capped returns t or, if that is earlier, the deadline or the end of MaxElapsed, with its reason.
func (l *limits) capped(t instant) (last instant, reason error) {
	if l.deadline != 0 && l.deadline < t {
		t, reason = l.deadline, ErrDeadline
	}
	if last := l.start.Add(l.elapsed); l.elapsed > 0 && last < t {
		t, reason = last, ErrMaxElapsed
	}
	return t, reason
}

// inTime returns a wait, or one drawn from the time left if it would reach a limit.
func (l *limits) inTime(wait time.Duration, now instant, u float64) time.Duration {
	if last, reason := l.capped(now.Add(wait + 1)); reason != nil {
		return part(last.Sub(now), u)
	}
	return wait
}

// asked returns the wait that a server has asked for. That of RetryInfo is the same for every client, so up to 20% are added
// to spread them, or what is left of the time if that is less.
func (l *limits) asked(hint Pushback, now instant, u float64) time.Duration {
	if hint.Source != WaitRetryInfo {
		return hint.Delay
	}
	last, _ := l.capped(now.Add(hint.Delay).Add(hint.Delay / 5))
	return hint.Delay + part(max(0, last.Sub(now.Add(hint.Delay))), u)
}

// unreplaced returns the verdict for an overdue attempt that nothing replaces: it runs to the deadline. Without one, it
// is cut, and its failure is judged like any other, except that the call does not wait for a token.
func (l *limits) unreplaced(number int32) verdict {
	if l.deadline == 0 {
		return verdict{do: action(number)}
	}
	return verdict{}
}

// part returns the share u of d.
func part(d time.Duration, u float64) time.Duration { return duration(float64(d) * unit(u)) }

// A pending attempt has been decided on.
type pending struct {
	at instant // when it will be sent; zero before one was decided on
	waited

	since   instant // the latest part of the wait counts from then, after a wait for a connection
	answers int64   // how often the target had answered by then

	before progress // of the backoff, when this attempt was decided on
}

func (n *pending) isDecided() bool { return n.at != 0 }

// moveTo changes the time at which the attempt will be sent.
func (n *pending) moveTo(at instant) {
	n.wait += at.Sub(n.at)
	n.at = at
}

// begin starts the plan of a call. It changes the zero plan in place, because a plan is too large
// to be copied for each call.
func (p *plan) begin(obeyed *policy, b, hedges Budget, t *target, start, deadline instant) {
	p.ledger.budget, p.ledger.hedges, p.target = b, hedges, t
	p.start, p.deadline, p.delay = start, deadline, noHedges
	p.obey(obeyed)
}

// hedgeFrom makes the second attempt's delay count from start, unless that attempt has already
// been decided on.
func (p *plan) hedgeFrom(start instant) {
	if p.delay != noHedges && p.made == 1 && !p.pending.isDecided() {
		p.dueAt = start.Add(p.delay)
	}
}

// A sending is what send returns about the new attempt.
type sending struct {
	number int32
	silent bool // an earlier attempt has, or had, no response
	waited
}

// A waited is the wait before an attempt.
type waited struct {
	wait    time.Duration // since it was decided on
	source  WaitSource
	repeats uint8 // how often the wait was repeated, because the target was still failing; at most 255
}

// send records that an attempt is sent now. Its token has been taken.
func (p *plan) send(now instant) sending {
	p.made++
	p.ledger.sent(p.made)
	s := sending{p.made, p.silent || p.open > 0, p.pending.waited}
	p.pending, p.tokenless = pending{}, false
	p.waiter.exit()
	if p.made > 1 && !s.source.isHedge() {
		p.target.scouted.Store(int64(now))
	}
	p.open++
	p.dueAt = 0
	if p.delay != noHedges && p.counted() < p.policy.MaxAttempts {
		p.dueAt = p.pushed.earliest(now.Add(p.delay))
	}
	return s
}

// ended records the end of an attempt that succeeded, so that the call is over, or was cancelled because
// the call was over.
func (p *plan) ended(o Outcome, sent instant) {
	p.open--
	p.deposit(o, sent)
	p.leave()
}

// deposit reports to the budgets and the target how an attempt ended.
func (p *plan) deposit(o Outcome, sent instant) {
	if o.Result == Ignored && o.Attempt > 1 { // it will tell nothing, so nobody waits for it
		p.target.scouted.Store(0)
	}
	p.ledger.deposit(o)
	if o.answered() {
		p.target.answer(sent) // the last step, because the logger may panic
	}
}

// leave records that the attempt that was decided on will not be sent. A nil plan has decided nothing.
func (p *plan) leave() {
	if p == nil {
		return
	}
	p.pending, p.replaces = pending{}, 0
	p.dueAt, p.connecting = 0, nil
	p.waiter.exit()
	p.ledger.giveBack(p.made + 1) // the last step, because the budget may panic
}

// undecide takes back what was decided, as if no attempt had been scheduled.
func (p *plan) undecide() {
	if p.pending.isDecided() {
		p.progress = p.pending.before
		p.leave()
	}
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
//  6. the attempt reached no server: wait for a connection and then for the backoff; the attempt is
//     not counted. If the target's patience is over, stop. A refused attempt is not counted either, and
//     the next follows immediately, without rule 9
//  7. MaxAttempts attempts were made, or one if a service further up retries, or the function cannot be called again: stop
//  8. the server asks for a wait that is longer than MaxServerDelay, or the wait (pushback, or else RetryInfo, or else the
//     backoff for the code) would reach the deadline or MaxElapsed: stop
//  9. the budget has no token and the call may not wait for one, the wait would outlast the target's patience, or too many calls
//     wait for the target: stop
//  10. wait. When the wait is over, see retryDue, the retry is paid for and sent, or waits again
//
// In a hedged call, a stop by rules 1, 2 or 4 ends the call. After any other failure, the attempts
// in flight decide, and the rules from 6 on apply to the last of them (MaxServerDelay to each).
func (p *plan) failed(f *failure, now instant, u float64) verdict {
	v := p.afterFailure(f, now, u)
	if p.policy.dryRun {
		p.leave()
		if v.do != doEnd {
			v.Reason, v.do = errWouldRetry, doEnd
		}
	}
	return v
}

func (p *plan) afterFailure(f *failure, now instant, u float64) verdict {
	p.open--
	p.silent = p.silent || f.NoResponse
	took := f.Attempt.Duration
	if f.Attempt.Unsent {
		p.unsent++
	}
	if f.Attempt.Unsent || f.Attempt.late { // a late one's trouble began when it was overdue
		took = 0
	}
	replaced := p.isReplaced(f)
	f.found.retryable = f.found.retryable || replaced // found out when it was overdue
	// Before a token is given back, because that may panic, too.
	o := Outcome{Attempt: f.Attempt.Number, Hedge: f.Attempt.Hedge, Result: p.policy.result(f), late: f.Attempt.late}
	p.deposit(o, now.Add(-f.Attempt.Duration))
	if replaced {
		return p.sendReplacement(now, u)
	}
	if p.replaces == int32(f.Attempt.Number) {
		p.undecide() // the attempt's own failure counts
	}
	hint := f.found.hint
	if f.found.hinted {
		p.pushBack(now.Add(p.asked(hint, now, u)), hint.Source)
	}
	var known trouble
	if f.found.retryable {
		known = p.waiter.fails(now, took)
	}
	var v verdict
	switch reason := p.policy.ruledOut(f); {
	case reason != nil:
		return p.stop(verdict{Reason: reason}, !is(reason, ErrPushback) || !f.found.retryable, now)
	case p.open > 0 && p.policy.asksTooMuch(f):
		v = verdict{Wait: hint.Delay, WaitSource: hint.Source, Reason: ErrPushback}
	case p.open > 0: // the others decide
		if p.dueAt == 0 && !p.pending.isDecided() && p.stopped == nil {
			p.putOff(now) // a hedge may follow again, because an unsent attempt does not count
		}
		return verdict{Reason: errInFlight}
	case p.pending.isDecided() && !p.policy.asksTooMuch(f): // in place of one that was cut, and put off by a pushback
		return p.sendReplacement(now, u)
	case f.Attempt.Unsent && !f.Refused && !f.Last && p.stopped == nil:
		return p.reconnect(f, known, now, u)
	default:
		v = p.again(f, known, now, u)
	}
	if v.retries() {
		return p.retry(v, now, u)
	}
	return p.stop(v, false, now)
}

// pushBack lets no attempt be sent before the time that a server has named.
func (p *plan) pushBack(until instant, source WaitSource) {
	p.pushed = pushed{until, source}
	if p.dueAt != 0 {
		p.dueAt = p.pushed.earliest(p.dueAt)
	}
	if p.pending.isDecided() && until > p.pending.at {
		p.pending.moveTo(until)
		p.pending.source = source
	}
}

// isReplaced reports whether an attempt was cut for the next one, and ended by that. What its failure means was found
// out then. A server's pushback may have crossed the cut, and is obeyed.
func (p *plan) isReplaced(f *failure) bool {
	if p.replaces != int32(f.Attempt.Number) || !f.TimedOut || f.CtxErr != nil || f.Closed {
		return false
	}
	_, pushed := PushbackFrom(f.Attempt.Trailer, nil)
	return !pushed
}

// sendReplacement sends the attempt for which another one was cut. A pushback may have come meanwhile.
func (p *plan) sendReplacement(now instant, u float64) verdict {
	p.replaces = 0
	v := verdict{Wait: p.pending.wait, WaitSource: p.pending.source}
	if v.Reason = p.tooLate(now, max(0, p.pending.at.Sub(now))); v.Reason != nil {
		return p.stop(v, false, now)
	}
	return p.retry(v, now, u)
}

// again applies rules 7 to 9; reconnect and hedge have limits of their own. If the rules allow a retry, it becomes the next attempt.
func (p *plan) again(f *failure, known trouble, now instant, u float64) verdict {
	switch {
	case p.stopped != nil:
		return verdict{Reason: p.stopped}
	case p.counted() > 0 && p.single:
		return verdict{Reason: errCallerRetries}
	case p.counted() >= p.policy.MaxAttempts:
		return verdict{Reason: ErrAttemptsExhausted}
	case f.Last:
		return verdict{Reason: ErrCommitted}
	}
	v, drawn := p.schedule(f, known, now, u)
	if v.Reason == nil && !f.Refused {
		v.Reason = p.refuses(f, v, known, now)
	}
	if v.Reason == nil {
		p.accept(f, v, drawn, known, now)
	}
	return v
}

// schedule applies rule 8. It returns the wait before the next attempt and, if that attempt would
// start too late, the reason for it. drawn is what the backoff drew; the wait may be longer while the target is failing.
func (p *plan) schedule(f *failure, known trouble, now instant, u float64) (v verdict, drawn time.Duration) {
	switch hint := f.found.hint; {
	case p.policy.asksTooMuch(f):
		return verdict{Wait: hint.Delay, WaitSource: hint.Source, Reason: ErrPushback}, 0
	case f.found.hinted:
		v.Wait, v.WaitSource = p.asked(hint, now, u), hint.Source
	case p.pushed.until > now: // the pushback of a hedged call's other attempt
		v.Wait, v.WaitSource = p.pushed.until.Sub(now), p.pushed.source
	case f.Refused: // immediately, as in gRPC
		return verdict{WaitSource: WaitBackoff, Reason: p.tooLate(now, 0)}, 0
	default:
		drawn = p.progress.wait(p.policy.backoff(f.found.code), u)
		v.Wait, v.WaitSource = drawn, WaitBackoff
	}
	if v.Reason = p.tooLate(now, v.Wait); v.Reason == nil && v.WaitSource == WaitBackoff {
		v.Wait = p.spread(drawn, known, &p.limits, now, u)
	}
	return v, drawn
}

// accept schedules the attempt that v allows. A wait that the server asked for restarts the
// backoff (gRFC A6 #pushback).
func (p *plan) accept(f *failure, v verdict, drawn time.Duration, known trouble, now instant) {
	n := &p.pending
	n.at, n.waited = now.Add(v.Wait), waited{v.Wait, v.WaitSource, 0}
	n.since, n.answers, n.before = now, known.answers, p.progress
	switch {
	case v.WaitSource.isServers(): // only a failure in its second half tells that the time was too early
		p.progress, n.since = progress{}, now.Add(v.Wait/2)
	case v.WaitSource == WaitBackoff && !f.Refused: // sending that again is no step of the backoff
		p.progress = progress{p.progress.retry + 1, drawn}
	}
}

// retry returns the verdict v to retry, with what the driver does now. If the retry is due now and must not be sent, the verdict is a
// stop. In a dry run it is never due.
func (p *plan) retry(v verdict, now instant, u float64) verdict {
	if now < p.pending.at || p.policy.dryRun {
		p.dueAt = p.pending.at
		return v
	}
	next := p.retryDue(now, u)
	if next.do == doEnd {
		return next
	}
	v.do = next.do
	return v
}

// stop rules out further attempts. It returns v, with what the driver does now: if it is fatal, it ends a hedged call although other
// attempts are in flight.
func (p *plan) stop(v verdict, fatal bool, now instant) verdict {
	p.leave()
	p.stopped = v.Reason
	if fatal || p.open == 0 {
		v.do = doEnd
	}
	if is(v.Reason, ErrTargetDown) && !p.policy.dryRun {
		p.target.giveUp(now)
	}
	return v
}

// overdue judges an attempt in flight that has run for the attempt timeout; f is the failure that this would
// be. If another attempt may replace it, that becomes due after its wait, and the overdue one goes on until
// then. Otherwise the attempt goes on to the caller's deadline, and is judged by its own result;
// without a deadline it is cut, so that the call cannot hang.
//
// With UnsentOnly nothing replaces an attempt in flight, because its server may be running the
// method: only gRPC's report of its end can show that there is none. ctx is only passed to the Classifier.
func (p *plan) overdue(ctx context.Context, f *failure, now instant, u float64) verdict {
	number := int32(f.Attempt.Number)
	if f.Attempt.Unsent || p.policy.UnsentOnly { // another one would be no better, or must not follow
		return p.unreplaced(number)
	}
	if p.policy.examine(ctx, f); p.policy.ruledOut(f) != nil {
		return p.unreplaced(number)
	}
	p.replaces = number
	v := p.again(f, p.trouble(now), now, u)
	if !v.retries() {
		p.replaces = 0
		return p.unreplaced(number)
	}
	p.waiter.fails(now, 0)
	return p.retry(v, now, u)
}

// due decides what happens at dueAt; u is uniform in [0, 1).
func (p *plan) due(now instant, u float64) verdict {
	switch {
	case p.connecting != nil:
		return p.end(p.connecting, now)
	case p.pending.isDecided():
		return p.retryDue(now, u)
	default:
		return p.hedge(now)
	}
}

// end ends the call in the wait before an attempt. If attempts are in flight, they decide. One that
// was to be replaced goes on, to the deadline if there is one.
func (p *plan) end(reason error, now instant) verdict {
	if p.open > 0 {
		replaces := p.replaces
		p.undecide()
		if p.delay != noHedges {
			p.putOff(now)
		}
		return p.unreplaced(replaces)
	}
	return p.stop(verdict{Reason: reason}, false, now)
}

// hedge decides whether a hedge that is due is sent. If it is not, the attempts in flight
// continue.
func (p *plan) hedge(now instant) verdict {
	v := verdict{Wait: p.delay, WaitSource: waitHedgeDelay}
	p.dueAt = 0
	v.Reason = p.tooLate(now, 0)
	if p.counted() >= p.policy.MaxAttempts {
		v.Reason = ErrAttemptsExhausted
	}
	if v.Reason == nil && !p.ledger.take(hedgesPay, 0) {
		v.Reason = ErrBudgetExhausted
		p.putOff(now)
	}
	if v.Reason != nil {
		return v
	}
	p.pending.at, p.pending.wait, p.pending.source = now, v.Wait, v.WaitSource
	v.do = doSend
	return v
}

// putOff postpones a hedge that is due but cannot be sent. The time until it is due again doubles
// each time, because thousands of calls may have a hedge that is due. Sending a hedge does not
// reset it.
func (p *plan) putOff(now instant) {
	p.postponed = max(2*p.postponed, p.delay, time.Millisecond)
	p.dueAt = p.pushed.earliest(now.Add(p.postponed))
}
