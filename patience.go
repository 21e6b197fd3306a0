package grpcretry

import (
	"cmp"
	"time"

	"github.com/grpcretry/grpcretry/internal/window"
)

// This file has the rules about waiting for a target, see [WithPatience]. A retry that comes too early
// saves nothing and costs a token, so calls learn from one another through their [target]: a retry
// that can learn nothing is not sent, and only an absent target is waited for.

// A waiter is a call's place among those that wait for its target.
type waiter struct {
	target       *target
	patience     time.Duration // the policy's; not positive if the call does not wait
	firstFailure instant       // when the call's first attempt failed; zero before that
	waiting      bool          // the target counts the call as waiting
}

// isPatient reports whether the call waits for its target.
func (w *waiter) isPatient() bool { return w.patience > 0 }

// fails records the retryable failure of an attempt that a server had for took, for the call and for its target. It
// returns what is known of the trouble now. If the attempt, a quiet stream for example, has outlasted the call's patience and the default
// one, the call's own trouble begins anew.
func (w *waiter) fails(now instant, took time.Duration) trouble {
	patience := cmp.Or(max(0, w.patience), defaultPatience) // other calls may be patient, and the metrics tell of the target, too
	known := w.target.fail(now, patience)
	if w.firstFailure == 0 || took > max(patience, defaultPatience) {
		w.firstFailure = now
	}
	return known
}

// trouble returns what is known of the target now.
func (w *waiter) trouble(now instant) trouble { return w.target.look(now, w.patience) }

// began returns when the trouble began: at the target's first failure or, if that was earlier, at the call's own.
func (w *waiter) began(known trouble, now instant) instant {
	return min(cmp.Or(w.firstFailure, now), cmp.Or(known.since, now))
}

// patienceEnds returns when the call stops waiting for its target.
func (w *waiter) patienceEnds(known trouble, now instant) instant {
	return w.began(known, now).Add(w.patience)
}

// enter counts the call among those that wait for the target. It returns false if there are too many.
func (w *waiter) enter() bool {
	if !w.waiting && w.isPatient() {
		w.waiting = w.target.enter()
		return w.waiting
	}
	return true
}

// exit undoes enter. It does nothing if the call is not counted.
func (w *waiter) exit() {
	if w.waiting {
		w.waiting = false
		w.target.exit()
	}
}

// refuses applies rule 9. It returns why the wait of v is not started although it fits: there is no token and none is waited for,
// the patience would end before it, or too many calls wait already.
func (p *plan) refuses(f *failure, v verdict, known trouble, now instant) error {
	payer := p.ledger.whoPays(retriesPay)
	b := p.ledger.budgetOf(payer)
	waits := p.isPatient() && !isThrottled(b) // for a token
	if f.TimedOut {
		waits = p.deadline != 0 // an overdue attempt goes on meanwhile; without a deadline, the call could hang
	}
	switch {
	case !waits && !affords(b, p.ledger.now, p.ledger.holdsSlot(p.replaces, payer)):
		return ErrBudgetExhausted
	case p.isPatient() && !v.WaitSource.isServers() && now.Add(v.Wait) > p.patienceEnds(known, now), !p.waiter.enter():
		return ErrTargetDown
	case p.policy.dryRun && !affords(b, p.ledger.now, false): // it does not wait for a token, and takes none
		return ErrBudgetExhausted
	default:
		return nil
	}
}

// spread returns the wait before a retry: the backoff or, if the target has been failing, at least u times as long as that, which spreads
// the retries of those who wait over as much time as the trouble took. A wait that outlasts the patience is not drawn from what is left of
// it: in an overload, calls that end early are what lets the server recover.
func (w *waiter) spread(backoff time.Duration, known trouble, l *limits, now instant, u float64) time.Duration {
	if !w.isPatient() || known.since == 0 {
		return backoff
	}
	return max(backoff, l.inTime(part(now.Sub(known.since), u), now, u))
}

// keeps reports whether a retry must leave its token for later: the target is absent, other calls wait, too, and the budget is a ratio
// budget without a floor. A retry in flight will tell more, so the others wait for it. If there is none, they wait until the trouble has
// lasted seven times as long as at the latest failure (six times longer), so that three tokens last for two seconds. Neither is longer
// than a token's share of half the time that was left at the latest failure, at most the default patience. A call that waits alone waits
// only for a retry in flight. A retry that is not kept counts as in flight from now on, so that of two calls that are due at the same time
// only one goes.
func (w *waiter) keeps(l *ledger, known trouble, limits *limits, now instant) bool {
	scouted := instant(w.target.scouted.Load())
	inFlight := scouted > known.latest // a retry that was sent after the latest failure
	if w.target.waiting.Load() < 2 && !inFlight {
		return false
	}
	tokens, scarce := scarceTokens(l.retryBudget(), l.now)
	if !scarce || tokens < window.Whole {
		return false
	}
	last, _ := limits.capped(w.patienceEnds(known, now))
	keep := part(min(last.Sub(known.latest), defaultPatience), 1/(2*tokens))
	if !inFlight {
		keep = min(keep, max(shortestKeep, 6*known.latest.Sub(known.since)))
	}
	return now < known.latest.Add(keep) || scouted >= now || !w.target.scouted.CompareAndSwap(int64(scouted), int64(now))
}

// answered reports whether the target has answered something since an attempt was decided on, so that it is overloaded, and not absent. In
// the first three seconds of the failures, or of the call's own if those began earlier, answers do not count for a ratio budget without a
// floor: one method may be absent while others work.
func (w *waiter) answered(n *pending, l *ledger, known trouble, now instant) bool {
	if known.answers == n.answers {
		return false
	}
	_, scarce := scarceTokens(l.retryBudget(), l.now)
	return !scarce || now.Sub(min(known.onset, w.firstFailure)) >= w.unsure()
}

// unsure is how long it is not clear what answers mean: an outage of two seconds, and a second to get a token; or a third of the patience.
func (w *waiter) unsure() time.Duration { return min(3*time.Second, w.patience/3) }

// isBack reports whether a target that has answered works again, so that a ratio budget without a floor may have tokens soon: it is not
// failing now, and its latest failure was at least a quarter of the call's own trouble ago, because an overloaded target, which fails now
// and then, would otherwise have a queue of calls that wait for tokens. If nothing has failed for a while, and no retry was sent that may
// give its token back, none will come.
func (w *waiter) isBack(l *ledger, known trouble, now instant) bool {
	news := max(known.latest, instant(w.target.scouted.Load()))
	if known.since != 0 || 4*now.Sub(known.latest) < now.Sub(w.firstFailure) || now.Sub(news) > w.unsure() {
		return false
	}
	tokens, scarce := scarceTokens(l.retryBudget(), l.now)
	return scarce && tokens < window.Whole
}

// isTurn reports whether a server has named the time of an attempt whose wait was not repeated. A RetryInfo is the same for all calls, so
// its time is a call's turn only if more than half of the patience is over.
func (w *waiter) isTurn(n *pending, known trouble, now instant) bool {
	return n.repeats == 0 && (n.source == WaitPushback || n.source == WaitRetryInfo && 2*now.Sub(w.began(known, now)) > w.patience)
}

// retryDue decides whether a retry whose wait is over is sent. The first rule that matches decides:
//
//  1. the target is failing, and nothing was answered during the wait; and another attempt was made and failed, so that the retry
//     would learn nothing, or tokens are kept for later; and it is not this call's turn: wait again
//  2. there is a token: take it and send, or cut the overdue attempt that is replaced
//  3. the budget is not waited for; or the target has answered something during the wait, and is not back: stop
//  4. otherwise: wait again
//
// If other attempts are in flight, they decide instead of a stop. A retry that would start too late by now is given up: the pushback of
// another attempt may have moved it. One that was paid for before is sent without asking the budget again.
func (p *plan) retryDue(now instant, u float64) verdict {
	known := trouble{answers: p.pending.answers} // a retry that is due immediately can know nothing new
	if now > p.pending.since {
		known = p.trouble(now)
	}
	answered := p.answered(&p.pending, &p.ledger, known, now)
	switch late := p.tooLate(now, 0); {
	case late != nil:
		return p.end(late, now)
	case p.ledger.paidForNext != nobodyPays: // it replaces an attempt that was cut, and was pushed back
		return verdict{do: doSend}
	case p.isPatient() && known.since != 0 && !answered && !p.isTurn(&p.pending, known, now) &&
		(known.latest > p.pending.since || p.keeps(&p.ledger, known, &p.limits, now)):
		return p.waitAgain(now, u)
	case p.ledger.take(retriesPay, p.replaces):
		if p.replaces == 0 {
			return verdict{do: doSend}
		}
		p.dueAt = 0 // until that attempt has ended
		return verdict{do: action(p.replaces)}
	case p.open > 0 || !p.isPatient() || isThrottled(p.ledger.retryBudget()), answered && !p.isBack(&p.ledger, known, now):
		return p.end(ErrBudgetExhausted, now)
	default:
		p.tokenless = true
		p.target.scouted.CompareAndSwap(int64(now), 0) // if it was about to be sent
		return p.waitAgain(now, u)
	}
}

// Limits of repeated waits.
const (
	shortestRepeat  = 20 * time.Millisecond
	shortestKeep    = 50 * time.Millisecond // the shortest wait of the default backoff; one with full jitter has none of its own
	longestWhenBack = time.Second           // for a token, when the target is back
)

// waitAgain repeats a call's wait, for u times the length of the trouble. It is no step of the backoff.
func (p *plan) waitAgain(now instant, u float64) verdict {
	known := p.trouble(now)
	length := now.Sub(p.waiter.began(known, now))
	ends := ErrTargetDown
	if known.since == 0 && known.answers != p.pending.answers { // the target is back, and a token may be given back soon
		length, ends = min(length, longestWhenBack), ErrBudgetExhausted
	}
	wait := max(p.inTime(part(length, u), now, u), shortestRepeat)
	if late := p.tooLate(now, wait); late != nil {
		return p.end(late, now)
	}
	if now.Add(wait) > p.patienceEnds(known, now) {
		return p.end(ends, now)
	}
	if known.since != 0 {
		p.target.await()
	}
	// The answers count from the first wait, and the repetitions not past 255.
	p.pending.since, p.pending.repeats = now, max(p.pending.repeats, p.pending.repeats+1)
	p.pending.moveTo(now.Add(wait))
	p.dueAt = p.pending.at
	return verdict{}
}

// reconnect applies rule 6: while there is patience, the call waits for a connection, not past the
// deadline or MaxElapsed, and then for its backoff. A function waits for its backoff, because its next
// attempt is the next dial.
func (p *plan) reconnect(f *failure, known trouble, now instant, u float64) verdict {
	v, drawn := verdict{WaitSource: waitConnect}, time.Duration(0)
	if f.Function {
		v, drawn = p.schedule(f, known, now, u)
		v.Wait = max(v.Wait, shortestRedial)
	} else {
		v.Wait = p.progress.wait(p.policy.backoff(f.found.code), u)
		v.Reason = p.tooLate(now, v.Wait)
	}
	ends := p.patienceEnds(known, now)
	switch {
	case v.Reason != nil:
		return p.stop(v, false, now)
	case now >= ends, f.Function && !v.WaitSource.isServers() && now.Add(v.Wait) > ends, !p.waiter.enter():
		return p.stop(verdict{Reason: ErrTargetDown}, false, now)
	}
	p.accept(f, v, drawn, known, now)
	if !p.policy.dryRun {
		p.target.await()
	}
	if f.Function {
		return p.retry(v, now, u)
	}
	p.dueAt, p.connecting = ends, ErrTargetDown
	if last, reason := p.capped(ends.Add(v.Wait)); reason != nil { // the backoff after it must fit, too
		p.dueAt, p.connecting = last.Add(-v.Wait), reason
	}
	v.do = doConnect
	return v
}

// shortestRedial is the shortest wait before a function is called again, which would otherwise be
// called without end.
const shortestRedial = time.Millisecond

// connected records that the connection for which the call waited is ready. The backoff follows,
// so that the waiting calls do not all retry at the same instant.
func (p *plan) connected(now instant, u float64) verdict {
	p.connecting = nil
	at := p.pushed.earliest(now.Add(p.pending.wait))
	if reason := p.tooLate(now, at.Sub(now)); reason != nil {
		return p.end(reason, now)
	}
	p.pending.since, p.pending.answers = now, p.trouble(now).answers
	p.pending.moveTo(at)
	return p.retry(verdict{Wait: p.pending.wait, WaitSource: waitConnect}, now, u)
}
