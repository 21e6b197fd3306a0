package grpcretry

import (
	"slices"
	"sync"
	"time"

	"google.golang.org/grpc"
)

// A hedging is the part of a hedged call in which attempts may run at the same time: from
// the first one to the decision, and on until the losers have ended. The first attempt
// runs on the caller's goroutine. Mostly it succeeds before another is due, so this is
// kept small; else there is a race.
type hedging struct {
	attempts hedgedAttempts
	first    *attempt
	delay    time.Duration

	mu    sync.Mutex  // held for a moment only, never while something is called that others have made
	timer *time.Timer // guarded by mu until it is set; until the next attempt is due
	race  *race       // guarded by mu; nil as long as nothing has happened
}

// A race is what goes on from when a hedge is due, or the first attempt has failed.
//
// Each further attempt runs on a goroutine of its own. What happens, an attempt that ends
// or a time that has come, goes into a queue. Whoever finds nobody handling the queue
// handles it, without a lock: so one goroutine at a time uses the call, the engine, the
// budget and the observers, as in any other call.
type race struct {
	*hedging
	call *call

	queue    []happening   // guarded by mu
	handling bool          // guarded by mu; a goroutine is at it
	over     bool          // guarded by mu; decided, and every attempt has ended
	wake     chan struct{} // guarded by mu; closed when over; nil while nobody waits for that

	// Of whoever handles the queue, and of the caller when it is over.
	dueAt    time.Time  // when the timer fires; zero for never
	next     Verdict    // the attempt that waits for dueAt, where it is paid for already
	made     int        // attempts sent
	open     []*attempt // those that run
	idle     time.Time  // since when none runs
	decided  bool
	quitting bool      // after a panic
	winner   *attempt  // nil if none succeeded
	wonAt    time.Time // when it did
	err      error     // nil, or io.EOF of a stream that ended well
	lost     *defeat   // else

	openRoom [2]*attempt
}

// A defeat is the failure that a call ends with, unless another attempt wins.
type defeat struct {
	attempt *attempt
	err     error // as it came
	failure Failure
	verdict Verdict // what the engine said of it
}

// hedgedAttempts are what a unary call and a server stream do differently.
type hedgedAttempts interface {
	// share puts the call where all goroutines of a race find it.
	share() *call
	// run makes an attempt, to its end or, of a stream, to its first message.
	run(*attempt) error
	// discard ends what is left of an attempt that succeeded too late.
	discard(*attempt)
}

// A happening is that an attempt has ended; without one, that it is time to look whether
// another is due, or the caller has gone.
type happening struct {
	ended    *attempt
	err      error
	panicked *attempt // instead: the caller's goroutine panics, which runs this one
}

// run runs first on this goroutine and others beside it, until one is decisive and all
// have ended. It returns nil if first succeeded before anything else happened.
func (h *hedging) run(attempts hedgedAttempts, first *attempt, delay time.Duration) *race {
	h.attempts, h.first, h.delay = attempts, first, delay
	over := false
	defer func() {
		if !over {
			h.contested().quit()
		}
	}()
	h.mu.Lock() // the timer may be faster than this assignment
	h.timer = time.AfterFunc(delay, h.look)
	h.mu.Unlock()
	err := attempts.run(first)
	if err == nil && h.uncontested() {
		over = true
		return nil
	}
	r := h.contested()
	r.post(happening{ended: first, err: err})
	r.await()
	over = true
	return r
}

// uncontested says that nothing else has happened. Then nothing else will.
func (h *hedging) uncontested() bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.race == nil && h.timer.Stop()
}

func (h *hedging) look() { h.contested().post(happening{}) }

// contested is the race, which begins now unless it has begun.
func (h *hedging) contested() *race {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.race == nil {
		r := &race{hedging: h, call: h.attempts.share(), made: int(h.first.number)}
		r.open = append(r.openRoom[:0], h.first)
		r.dueAt = timeOf(h.first.start+h.delay, time.Now())
		h.race = r
	}
	return h.race
}

// post adds what happened to the queue, and handles the queue unless somebody does.
func (h *race) post(e happening) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.queue = append(h.queue, e)
	if h.handling {
		return
	}
	h.handling = true
	defer func() { h.handling = false }() // after a panic too
	for len(h.queue) > 0 {
		e := h.queue[0]
		h.queue = slices.Delete(h.queue, 0, 1)
		h.handleUnlocked(e)
	}
	if h.decided && len(h.open) == 0 && !h.over {
		h.over = true
		if h.wake != nil {
			close(h.wake)
		}
	}
}

// handleUnlocked needs mu, and gives it up meanwhile.
func (h *race) handleUnlocked(e happening) {
	h.mu.Unlock()
	defer h.mu.Lock()
	h.handle(e)
}

// await returns when it is over.
func (h *race) await() {
	h.mu.Lock()
	over := h.over
	if !over {
		h.wake = make(chan struct{})
	}
	wake := h.wake
	h.mu.Unlock()
	if over {
		return
	}
	closed, unwatch := h.call.retrier.closing.watch(h.call.cc, shortWait+1)
	defer unwatch()
	select {
	case <-wake:
		return
	case <-h.call.ctx.Done():
	case <-closed:
	}
	h.look() // attempts end by themselves, but there may be none under way
	<-wake
}

// quit ends what is still under way when the caller's goroutine panics: in the attempt
// that it runs, or in what the caller gave us to call. Nobody is told of anything any
// more, but the budget.
func (h *race) quit() {
	h.mu.Lock()
	h.queue = slices.Insert(h.queue, 0, happening{panicked: h.first})
	h.mu.Unlock()
	h.look()
	h.await()
}

func (h *race) handle(e happening) {
	now := time.Now()
	switch {
	case e.panicked != nil:
		h.quitting = true
		h.close(e.panicked)
		h.decide()
		e.panicked.release()
	case e.ended != nil:
		h.close(e.ended)
		h.ended(e.ended, e.err, now)
	case h.decided:
	case h.call.ended(now) != nil || h.call.closed():
		if len(h.open) == 0 { // else they end by themselves
			h.abandon(now)
		}
	case !h.dueAt.IsZero() && !now.Before(h.dueAt): // else the timer was set anew meanwhile
		h.due(now)
	}
}

func (h *race) close(a *attempt) {
	h.open = slices.DeleteFunc(h.open, func(one *attempt) bool { return one == a })
}

// ended takes in how an attempt ended.
func (h *race) ended(a *attempt, err error, now time.Time) {
	c := h.call
	c.collect(a)
	won := err == nil || c.stream && isEOF(err)
	if won && !h.decided {
		h.winner, h.wonAt, h.err = a, now, err
		h.call.answered(a, false)
		h.decide()
		return
	}
	defer a.release()
	switch {
	case h.decided:
		h.late(a, won, now)
	case a.number == 1 && h.made == 1 && c.leftToGRPC():
		h.lost = &defeat{attempt: a, err: err, verdict: Verdict{Reason: ErrLeftToGRPC}}
		h.decide()
	default:
		h.failed(a, err, now)
	}
}

// late tells of an attempt that ended after the decision.
func (h *race) late(a *attempt, won bool, now time.Time) {
	if won {
		h.attempts.discard(a)
	}
	if h.quitting {
		h.call.budget.Deposit(Outcome{Attempt: int(a.number), Result: Ignored})
		return
	}
	if h.winner != nil {
		h.call.answered(a, true)
	}
	h.call.lost(a, now)
}

// failed asks the engine what comes of an attempt's failure.
func (h *race) failed(a *attempt, err error, now time.Time) {
	c := h.call
	f := c.failure(a, err, now)
	f.Made = h.made
	c.record(&f, now)
	c.past.Paid = h.next.Retry
	v := c.policy.judge(c.ctx, c.budget, &c.past.History, &f, now, c.retrier.random())
	if v.Retry {
		h.next = v
	}
	c.report(&f, v, now)
	h.lost = &defeat{a, err, f, v}
	if len(h.open) == 0 {
		h.idle = now
	}
	switch {
	case v.Retry:
		h.schedule()
	case v.Fatal:
		h.decide()
	default:
		if c.past.Refused(v) {
			h.disarm()
			h.refund()
		}
		if len(h.open) == 0 { // then none waits either: it would have been sent, or refunded
			h.decide()
		}
	}
}

// schedule sends the next attempt when it is to be sent.
func (h *race) schedule() {
	if h.next.Wait > 0 {
		h.arm(h.next.Wait)
		return
	}
	h.send()
}

// due sends the attempt whose time has come, if it may be sent.
func (h *race) due(now time.Time) {
	c := h.call
	switch {
	case h.next.Retry:
		h.send()
		return
	case c.leftToGRPC():
		h.disarm()
		return
	case c.connecting():
		h.arm(c.past.PutOff(h.delay))
		return
	}
	v := c.policy.due(c.budget, &c.remember(now).History, h.made, now)
	v.Wait = h.delay
	if v.Retry {
		h.next = v
	}
	c.reportDue(v, now)
	switch {
	case v.Retry:
		h.send()
	case v.Reason == ErrBudgetExhausted: //nolint:errorlint // the engine's own word; only this one is not sent
		h.arm(c.past.PutOff(h.delay))
	default:
		h.disarm()
	}
}

// send starts the next attempt on a goroutine of its own.
func (h *race) send() {
	c, now := h.call, time.Now() // observers may have taken their time
	if len(h.open) == 0 {
		c.remember(now).idle += now.Sub(h.idle)
	}
	a := c.another(h.made, h.next, len(h.open) > 0, now.Sub(origin))
	h.next = Verdict{}
	h.made++
	h.open = append(h.open, a)
	if h.made < c.policy.MaxAttempts {
		h.arm(h.delay)
	} else {
		h.disarm()
	}
	go func() { h.post(happening{ended: a, err: h.attempts.run(a)}) }()
}

// arm sets when the next attempt is due, in place of what was set before.
func (h *race) arm(d time.Duration) {
	h.dueAt = time.Now().Add(d)
	h.timer.Reset(d)
}

func (h *race) disarm() {
	h.dueAt = time.Time{}
	h.timer.Stop()
}

// refund gives back what was paid for an attempt that will not be sent.
func (h *race) refund() {
	if h.next.Retry {
		h.next = Verdict{}
		h.call.budget.Refund()
	}
}

// abandon ends a call that the caller left while no attempt was under way.
func (h *race) abandon(now time.Time) {
	h.lost.verdict = Verdict{Reason: ErrConnClosed}
	if h.lost.failure.CtxErr = h.call.ended(now); h.lost.failure.CtxErr != nil {
		h.lost.verdict.Reason = h.lost.failure.CtxErr
	}
	h.call.traceStop(h.lost.verdict.Reason)
	h.decide()
}

// decide ends what is still under way.
func (h *race) decide() {
	h.decided = true
	h.disarm()
	h.refund()
	for _, a := range h.open {
		a.bounds.cancel(ErrHedgeLost)
	}
}

// conclude ends a call that no attempt has won, and returns its error.
func (h *race) conclude() error {
	c, now, lost := h.call, time.Now(), h.lost
	if h.made > 1 || c.stream {
		c.show(lost.attempt)
	}
	if lost.verdict.Reason == ErrLeftToGRPC { //nolint:errorlint // set here
		c.retrier.log.logLeftToGRPC(c)
		return c.leave(lost.attempt, lost.err, now)
	}
	return c.stop(&lost.failure, lost.verdict, lost.err, now)
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

// hedgeUnary makes c a hedged call, of which the next attempt is due after each delay.
func hedgeUnary(c *call, req, reply any, invoker grpc.UnaryInvoker, delay time.Duration) error {
	u := &hedgedUnary{req: req, reply: reply, replies: typeOfReply(reply), invoker: invoker}
	c.policy, u.first.bounds = c.policy.hedged, &u.bounds
	c.begin(&u.first)
	u.rpc = c.rpc
	defer u.first.release()
	race := u.hedging.run(u, &u.first, delay)
	if race == nil {
		c.answered(&u.first, false)
		c.succeed(&u.first, time.Time{})
		return nil
	}
	if race.winner == nil {
		return race.conclude()
	}
	if race.winner.number > 1 {
		copyReply(reply, race.winner.bounds.received)
		race.call.show(race.winner)
	}
	race.call.succeed(race.winner, race.wonAt)
	race.winner.release()
	return nil
}

func (u *hedgedUnary) share() *call { return &call{rpc: u.rpc} }

// run makes one attempt. The first receives into the caller's reply and options: nobody
// else touches those until all attempts have ended.
func (u *hedgedUnary) run(a *attempt) error {
	reply := u.reply
	if a.number > 1 {
		reply = u.replies.make()
		a.bounds.received = reply
	}
	return u.invoker(a, u.rpc.method, u.req, reply, u.rpc.cc, u.rpc.attemptOptions(a)...)
}

func (u *hedgedUnary) discard(*attempt) {}
