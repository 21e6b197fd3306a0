package sim

import "github.com/grpcretry/grpcretry"

// This file is the attempts of a call that lose: those in flight when another one decides it.

// loseAll ends the attempts of a call that are still in flight; won if another one succeeded.
func (r *run) loseAll(c *call, won bool) {
	for _, ai := range c.open {
		r.lose(ai, c, won)
	}
	c.open = nil
}

func (r *run) lose(ai int32, c *call, won bool) {
	a := r.attempts.at(ai)
	a.ended, a.given = true, true
	c.caller.seen.at(r.now).Lost++
	if won {
		c.measured(r, a.flight, true)
	}
	c.plan.Lost(grpcretry.Attempt{Number: int(a.number), Hedge: a.hedge})
	if !a.replica.config.IgnoresCancel {
		a.holders++
		r.cancel(ai, a)
	}
	r.release(ai, a)
}
