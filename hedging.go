package grpcretry

import (
	"sync"
	"time"

	"google.golang.org/grpc"
)

// A hedging is the part of a hedged call in which attempts may run at the same time: from the
// first attempt to the decision, and on until the losers have ended. The first attempt runs on the
// caller's goroutine. In most calls it succeeds before another is due, so a hedging is kept small;
// for all other calls it starts a [race].
type hedging struct {
	attempts hedgedAttempts
	first    *attempt
	delay    time.Duration
	from     time.Duration // since the origin; the start of the first delay

	mu    sync.Mutex  // held for a moment only, never during a callback
	timer *time.Timer // guarded by mu until it is set; until the next attempt is due
	race  *race       // guarded by mu; nil until a hedge is due or an attempt has failed
	over  bool        // guarded by mu; the first attempt succeeded without a race
	early *attempt    // guarded by mu; the first attempt, if its timeout came before run
}

// hedgedAttempts are the operations in which a hedged unary call and a hedged stream differ.
type hedgedAttempts interface {
	// share returns the call, on the heap, where all goroutines of a race may use it.
	share() *call
	// run makes an attempt, to its end or, for a stream, to its first message.
	run(*attempt) error
	// replyOf returns the message that an attempt receives into.
	replyOf(*attempt) any
	// discard ends the rest of an attempt that succeeded too late.
	discard(*attempt)
	// bind makes an attempt whose first message is yet to come the winner of a stream.
	bind(*attempt)
}

// run runs the first attempt on this goroutine and others beside it, until one is decisive and
// all have ended. It returns nil if the first attempt succeeded without a race.
func (h *hedging) run() *race {
	first, over := h.first, false
	defer func() {
		if !over {
			h.contested().crash()
		}
	}()
	h.mu.Lock() // the timer may be faster than this assignment
	h.timer = afterFunc(h.delay, h.look)
	early := h.early
	h.mu.Unlock()
	if early != nil {
		h.overdue(early)
	}
	err := h.attempts.run(first)
	if err == nil && h.uncontested() {
		over = true
		return nil
	}
	r := h.contested()
	r.post(happening{ended: first, err: err})
	r.await()
	r.exit()
	over = true
	return r
}

// uncontested reports whether there is no race. Then there will be none.
func (h *hedging) uncontested() bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.over = h.race == nil && h.timer.Stop()
	return h.over
}

// look makes the race check whether an attempt is due, or the caller has gone.
func (h *hedging) look() { h.contested().post(happening{}) }

// overdue runs on the timer of an attempt timeout.
func (h *hedging) overdue(a *attempt) {
	h.mu.Lock()
	if h.timer == nil { // run has not started; it handles the timeout when it does
		h.early = a
		h.mu.Unlock()
		return
	}
	over := h.over
	if !over {
		h.contestedLocked()
	}
	h.mu.Unlock()
	if !over {
		h.race.post(happening{overdue: a})
	}
}

// contested returns the race, and starts it if necessary.
func (h *hedging) contested() *race {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.contestedLocked()
}

// contestedLocked needs mu.
func (h *hedging) contestedLocked() *race {
	if h.race == nil {
		r := &race{hedging: h, call: h.attempts.share(), made: int(h.first.number)}
		r.open = append(r.openSpace[:0], h.first)
		now := time.Now()
		r.call.planned(now).hedgeFrom(timeOf(h.from, now))
		r.replies.begin(h.first, &r.call.retrier.usage.replay, &r.call.facts)
		h.race = r
	}
	return h.race
}

// A hedgedUnary is a unary call that is hedged.
type hedgedUnary struct {
	hedging
	rpc        rpc
	first      attempt
	bounds     bounds // of the first attempt
	req, reply any
	replies    replyType
	invoker    grpc.UnaryInvoker
}

// hedgeUnary makes a hedged call.
func hedgeUnary(c *call, req, reply any, invoker grpc.UnaryInvoker) error {
	u := &hedgedUnary{req: req, reply: reply, replies: typeOfReply(reply), invoker: invoker}
	u.hedging.attempts, u.hedging.first, u.hedging.delay = u, &u.first, c.delay
	u.first.bounds = &u.bounds
	if c.policy.AttemptTimeout > 0 {
		c.overdue = u.hedging.overdue
	}
	ending, done := c, false
	defer func() {
		if !done {
			ending.endCrashed(errPanicked)
		}
	}()
	c.begin(&u.first)
	u.rpc, u.hedging.from = c.rpc, u.first.start
	defer u.first.release()
	race := u.hedging.run()
	if race != nil {
		ending = race.call
	}
	err := u.end(c, race)
	done = true
	return err
}

// end ends the call, and returns its error. The call is c if there was no race.
func (u *hedgedUnary) end(c *call, r *race) error {
	switch {
	case r == nil:
		u.first.measure(c.learner, false)
		c.succeed(&u.first, time.Time{})
		return nil
	case r.winner == nil:
		return r.fail()
	}
	if r.winner.number > 1 {
		copyReply(u.reply, r.winner.bounds.received)
		r.call.options.show(r.winner)
	}
	r.call.succeed(r.winner, r.wonAt)
	r.winner.release()
	return nil
}

func (u *hedgedUnary) share() *call { return &call{rpc: u.rpc} }

// run makes one attempt. The first receives into the caller's reply and options, which nothing
// else touches until all attempts have ended.
func (u *hedgedUnary) run(a *attempt) error {
	reply := u.reply
	if a.number > 1 {
		reply = u.replies.make()
		a.bounds.received = reply
	}
	err := readable(u.invoker(a, u.rpc.method, u.req, reply, u.rpc.cc, u.rpc.attemptOptions(a)...))
	a.checkUnsent(err)
	a.settle()
	return err
}

func (u *hedgedUnary) replyOf(a *attempt) any {
	if a.number > 1 {
		return a.bounds.received
	}
	return u.reply
}

func (u *hedgedUnary) discard(*attempt) {}

func (u *hedgedUnary) bind(*attempt) {}
