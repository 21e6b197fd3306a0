package sim

import (
	"context"
	"slices"
	"time"

	"google.golang.org/grpc/codes"

	"github.com/grpcretry/grpcretry"
)

// This file is the hedged calls of clients: attempts in flight at the same time. It does
// what the library's interceptors do, and asks the engine what they ask it.

// hedges is what a process needs to hedge.
type hedges struct {
	engine      *grpcretry.Engine
	delay       grpcretry.HedgeDelay
	maxAttempts int
	straight    bool // calls that are not hedged, as there is no delay, pass straight through
}

// A race is a hedged call, from its first attempt to its end, and on until no timer knows
// it any more.
type race struct {
	call    int32 // -1 when it is over
	pending int32 // events that are to come
	delay   time.Duration
	dueAt   int64             // when the next attempt is; -1 for never
	next    grpcretry.Verdict // the attempt that waits for dueAt, where it is paid for already
	open    []flight          // the attempts in flight
	room    [2]flight
}

// A flight is an attempt in flight, and what came before it.
type flight struct {
	attempt int32
	hedge   bool
	wait    time.Duration
	source  grpcretry.WaitSource
}

// beginRace makes a race of a new call, if its process has a delay to give. Else the call is
// retried as any other.
func (r *run) beginRace(i int32, c *call) {
	delay, ok := c.process.hedges.delay.Delay(c.caller.target.method, r.time())
	if !ok {
		return
	}
	ri, ra := r.races.add()
	ra.call, ra.delay = i, delay
	ra.open = ra.room[:0]
	c.race = ri
	r.arm(ri, ra, delay)
}

// enter takes a new attempt in, and says whether it is a hedge.
func (ra *race) enter(ai int32) bool {
	hedge := len(ra.open) > 0
	ra.open = append(ra.open, flight{ai, hedge, ra.next.Wait, ra.next.WaitSource})
	ra.next = grpcretry.Verdict{}
	return hedge
}

// arm sets when the next attempt is due, in place of what was set before.
func (r *run) arm(ri int32, ra *race, d time.Duration) {
	ra.dueAt = r.now + int64(d)
	if r.put(ra.dueAt, hedgeDue, ri) {
		ra.pending++
	} else {
		ra.dueAt = -1
	}
}

// hedgeDue is when a hedge was to be sent, as things were when that was set.
func (r *run) hedgeDue(ri int32, ra *race) {
	ra.pending--
	if ra.call < 0 {
		r.forget(ri, ra)
		return
	}
	c := r.calls.at(ra.call)
	now := r.time()
	switch d := c.history.Deadline; {
	case ra.dueAt != r.now: // set anew meanwhile
		return
	case !d.IsZero() && !now.Before(d): // the attempts in flight end by themselves
		return
	case ra.next.Retry:
		r.hedge(ri, ra, c)
		return
	}
	v := c.process.hedges.engine.Due(c.process.budget, &c.history, int(c.number), now)
	v.Wait = ra.delay
	switch {
	case v.Retry:
		ra.next = v
		r.hedge(ri, ra, c)
	case v.Reason == grpcretry.ErrBudgetExhausted: //nolint:errorlint // the engine's own value; only this one is not sent
		c.caller.seen.at(r.now).Suppressed++
		r.arm(ri, ra, c.history.PutOff(ra.delay))
	default:
		ra.dueAt = -1
	}
}

// hedge sends the next attempt of a race, whether or not another one is in flight.
func (r *run) hedge(ri int32, ra *race, c *call) {
	if int(c.number)+1 < c.process.hedges.maxAttempts {
		r.arm(ri, ra, ra.delay)
	} else {
		ra.dueAt = -1
	}
	r.send(ra.call, c)
}

// leaveRace is when an attempt of a race has ended for the client: with success if the failure
// has no error, else the engine is asked.
func (r *run) leaveRace(ai int32, a *attempt, c *call) {
	ri, ra, f := c.race, r.races.at(c.race), &r.failure
	at := slices.IndexFunc(ra.open, func(one flight) bool { return one.attempt == ai })
	left := ra.open[at]
	ra.open = slices.Delete(ra.open, at, at+1)
	if f.Attempt.Err == nil {
		if a.number == 1 {
			c.process.hedges.delay.Answered(c.caller.target.method, time.Duration(r.now-a.sent), false, r.time())
		}
		r.endRace(ri, ra, c, ending{number: a.number, hedge: a.hedge})
		return
	}
	c.history.Paid = ra.next.Retry
	v := r.judge(c, c.process.budget, a.number, a.sent, left)
	lost := ending{number: a.number, hedge: a.hedge, err: f.Attempt.Err, reason: v.Reason}
	switch {
	case v.Retry:
		ra.next = v
		if v.Wait > 0 {
			r.arm(ri, ra, v.Wait)
		} else {
			r.hedge(ri, ra, c)
		}
	case v.Fatal:
		r.endRace(ri, ra, c, lost)
	default:
		if c.history.Refused(v) {
			ra.dueAt = -1
			ra.refund(c)
		}
		if len(ra.open) == 0 { // then none waits either
			r.endRace(ri, ra, c, lost)
		}
	}
}

// refund gives back what was paid for an attempt that will not be sent.
func (ra *race) refund(c *call) {
	if ra.next.Retry {
		ra.next = grpcretry.Verdict{}
		c.process.budget.Refund()
	}
}

// endRace ends a race and its call: what is still in flight has lost.
func (r *run) endRace(ri int32, ra *race, c *call, e ending) {
	ra.refund(c)
	i := ra.call
	ra.call, ra.dueAt = -1, -1
	for _, one := range ra.open {
		r.lose(one.attempt, c, e.err == nil)
	}
	ra.open = nil
	if e.err == nil {
		c.process.budget.Deposit(grpcretry.Outcome{Attempt: int(e.number), Result: grpcretry.Succeeded})
	}
	r.forget(ri, ra)
	r.endCall(i, c, e)
}

// lose ends an attempt in flight because another one was decisive: it succeeded, if won.
func (r *run) lose(ai int32, c *call, won bool) {
	a := r.attempts.at(ai)
	a.ended, a.given = true, true
	c.caller.seen.at(r.now).Lost++
	if won && a.number == 1 {
		c.process.hedges.delay.Answered(c.caller.target.method, time.Duration(r.now-a.sent), true, r.time())
	}
	c.process.budget.Deposit(grpcretry.Outcome{Attempt: int(a.number), Result: grpcretry.Ignored})
	if !a.replica.config.IgnoresCancel {
		a.holders++
		r.cancel(ai, a)
	}
	r.release(ai, a)
}

// cancelRace ends a downstream call that is hedged, as its caller has given up.
func (r *run) cancelRace(i int32, c *call) {
	ra := r.races.at(c.race)
	if len(ra.open) > 0 {
		first := ra.open[0].attempt
		r.newFailure(failures[codes.Canceled]).CtxErr = context.Canceled
		r.abandon(first, r.attempts.at(first))
		return
	}
	r.endRace(c.race, ra, c, ending{number: c.number, err: failures[codes.Canceled], reason: context.Canceled})
}

// forget removes a race that is over, once no event is to come.
func (r *run) forget(ri int32, ra *race) {
	if ra.pending == 0 {
		r.races.remove(ri)
	}
}
