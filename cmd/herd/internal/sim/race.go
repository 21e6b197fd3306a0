package sim

import "github.com/grpcretry/grpcretry"

// This file handles the attempts that lose: those in flight when another one decides the call.

// loseAll ends the attempts of a call that are still in flight.
func (r *run) loseAll(c *call) {
	for _, ai := range c.open {
		r.lose(ai, c)
	}
	c.open = nil
}

func (r *run) lose(ai int32, c *call) {
	a := r.attempts.at(ai)
	a.ended, a.given = true, true
	if seen := c.caller.seen.at(r.now); c.deadline > 0 && r.now >= c.deadline { // the deadline has ended it
		seen.Wasted++
	} else {
		seen.Lost++
	}
	lost := r.describe(c, a.flight)
	lost.Err = grpcretry.ErrHedgeLost
	c.plan.Ended(lost, r.time(), 0)
	if !a.replica.config.IgnoresCancel {
		a.holders++
		r.cancel(ai, a)
	}
	r.release(ai, a)
}
