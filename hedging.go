package grpcretry

import (
	"slices"
	"sync"
	"time"

	"google.golang.org/grpc"
)

// A hedging is the part of a hedged call in which attempts run at the same time: from the
// first one to the decision, and on until the losers have ended.
//
// The first attempt runs on the caller's goroutine, each further one on a goroutine of
// its own. What happens, an attempt that ends or a time that has come, goes into a queue.
// Whoever finds nobody handling the queue handles it, without a lock: so one goroutine at a
// time uses the call, the engine, the budget and the observers, as in any other call.
type hedging struct {
	call     *call
	attempts hedgedAttempts

	mu       sync.Mutex
	busy     bool          // guarded by mu; something has happened
	queue    []happening   // guarded by mu
	handling bool          // guarded by mu; a goroutine is at it
	over     bool          // guarded by mu; decided, and every attempt has ended
	wake     chan struct{} // guarded by mu; closed when over; nil while nobody waits for that

	// Of whoever handles the queue, and of the caller when it is over.
	delay    time.Duration
	timer    *time.Timer   // until the next attempt is due
	dueAt    time.Time     // when that is; zero for never
	next     Verdict       // the attempt that waits for dueAt, where it is paid for already
	later    time.Duration // after which a hedge was put off last; zero if none was
	made     int           // attempts sent
	open     []*attempt    // those that run
	idle     time.Time     // since when none runs
	decided  bool
	quitting bool      // after a panic
	winner   *attempt  // nil if none succeeded
	wonAt    time.Time // when it did; zero if just now
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

// race runs first on this goroutine and others beside it, until one is decisive and all
// have ended.
func (h *hedging) race(c *call, attempts hedgedAttempts, first *attempt, delay time.Duration) {
	h.call, h.attempts, h.delay, h.made = c, attempts, delay, int(first.number)
	over := false
	defer func() {
		if !over {
			h.quit(first)
		}
	}()
	h.mu.Lock() // the timer may be faster than these assignments
	h.open = append(h.openRoom[:0], first)
	h.dueAt = timeOf(first.start, time.Now()).Add(delay)
	h.timer = time.AfterFunc(delay, h.look)
	h.mu.Unlock()
	if err := attempts.run(first); !h.alone(err) {
		h.post(happening{ended: first, err: err})
		h.await()
	} else {
		h.winner, h.err = first, err
		h.answered(first, false)
	}
	over = true
}

// alone says whether the first attempt has succeeded before anything else happened: as
// nearly always. Then nothing else will.
func (h *hedging) alone(err error) bool {
	if err != nil {
		return false
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	return !h.busy && h.timer.Stop()
}

func (h *hedging) look() { h.post(happening{}) }

// post adds what happened to the queue, and handles the queue unless somebody does.
func (h *hedging) post(e happening) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.busy = true
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
func (h *hedging) handleUnlocked(e happening) {
	h.mu.Unlock()
	defer h.mu.Lock()
	h.handle(e)
}

// await returns when it is over.
func (h *hedging) await() {
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
func (h *hedging) quit(first *attempt) {
	h.mu.Lock()
	h.queue = slices.Insert(h.queue, 0, happening{panicked: first})
	h.mu.Unlock()
	h.look()
	h.await()
}

func (h *hedging) handle(e happening) {
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

func (h *hedging) close(a *attempt) {
	h.open = slices.DeleteFunc(h.open, func(one *attempt) bool { return one == a })
}

// ended takes in how an attempt ended.
func (h *hedging) ended(a *attempt, err error, now time.Time) {
	c := h.call
	c.collect(a)
	won := err == nil || c.stream && isEOF(err)
	if won && !h.decided {
		h.winner, h.wonAt, h.err = a, now, err
		h.answered(a, false)
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
func (h *hedging) late(a *attempt, won bool, now time.Time) {
	if won {
		h.attempts.discard(a)
	}
	if h.quitting {
		h.call.budget.Deposit(Outcome{Attempt: int(a.number), Result: Ignored})
		return
	}
	if h.winner != nil {
		h.answered(a, true)
	}
	h.call.lost(a, now)
}

// answered tells the delay about a first attempt.
func (h *hedging) answered(a *attempt, lost bool) {
	delay := h.call.policy.Hedging.Delay
	if _, fixed := delay.(hedgeAfter); fixed || a.number > 1 {
		return // spare the clock
	}
	now := time.Now()
	delay.Answered(h.call.method, now.Sub(origin)-a.start, lost, now)
}

// failed asks the engine what comes of an attempt's failure.
func (h *hedging) failed(a *attempt, err error, now time.Time) {
	c := h.call
	f := c.failure(a, err, now)
	f.Made = h.made
	c.record(&f, now)
	v := c.policy.judge(c.ctx, h.payer(), &c.past.History, &f, now, c.retrier.random())
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
	case v.untouched || f.CtxErr != nil || f.Closed || f.Committed: // fatal
		h.decide()
	default:
		if v.Reason != ErrBudgetExhausted && v.Reason != ErrAttemptsExhausted { //nolint:errorlint // the engine's own words
			h.freeze(v.Reason)
		}
		if len(h.open) == 0 && !h.next.Retry {
			h.decide()
		}
	}
}

// payer is what the next attempt is paid from. Only one can be next: if one waits for its
// time, the new one takes its place, and is paid for.
func (h *hedging) payer() Budget {
	if h.next.Retry {
		return prepaid{h.call.budget}
	}
	return h.call.budget
}

type prepaid struct{ Budget }

func (prepaid) Withdraw(time.Time) bool { return true }

// schedule sends the next attempt when it is to be sent.
func (h *hedging) schedule() {
	if h.next.Wait > 0 {
		h.arm(h.next.Wait)
		return
	}
	h.send()
}

// due sends the attempt whose time has come, if it may be sent.
func (h *hedging) due(now time.Time) {
	c := h.call
	switch {
	case h.next.Retry:
		h.send()
		return
	case c.leftToGRPC():
		h.disarm()
		return
	case c.connecting():
		h.postpone()
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
		h.postpone()
	default:
		h.disarm()
	}
}

// postpone puts off a hedge, for longer each time: there may be thousands of calls with a
// hedge that is due.
func (h *hedging) postpone() {
	h.later = max(2*h.later, h.delay, time.Millisecond)
	h.arm(h.later)
}

// send starts the next attempt on a goroutine of its own.
func (h *hedging) send() {
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
func (h *hedging) arm(d time.Duration) {
	h.dueAt = time.Now().Add(d)
	h.timer.Reset(d)
}

func (h *hedging) disarm() {
	h.dueAt = time.Time{}
	h.timer.Stop()
}

// freeze lets no more attempts be sent, because of reason.
func (h *hedging) freeze(reason error) {
	h.call.remember(time.Now()).Stopped = reason
	h.disarm()
	h.refund()
}

// refund gives back what was paid for an attempt that will not be sent.
func (h *hedging) refund() {
	if h.next.Retry {
		h.next = Verdict{}
		h.call.budget.Refund()
	}
}

// abandon ends a call that the caller left while no attempt was under way.
func (h *hedging) abandon(now time.Time) {
	h.lost.verdict = Verdict{Reason: ErrConnClosed}
	if h.lost.failure.CtxErr = h.call.ended(now); h.lost.failure.CtxErr != nil {
		h.lost.verdict.Reason = h.lost.failure.CtxErr
	}
	h.call.traceStop(h.lost.verdict.Reason)
	h.decide()
}

// decide ends what is still under way.
func (h *hedging) decide() {
	h.decided = true
	h.disarm()
	h.refund()
	for _, a := range h.open {
		a.bounds.cancel(ErrHedgeLost)
	}
}

// conclude ends a call that no attempt has won, and returns its error.
func (h *hedging) conclude() error {
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
	call
	hedging    hedging
	first      attempt
	bounds     bounds // of the first attempt
	req, reply any
	replies    replyType
	invoker    grpc.UnaryInvoker
}

// hedgeUnary makes c a hedged call, of which the next attempt is due after each delay.
func hedgeUnary(c call, req, reply any, invoker grpc.UnaryInvoker, delay time.Duration) error {
	u := &hedgedUnary{call: c, req: req, reply: reply, replies: typeOfReply(reply), invoker: invoker}
	u.policy, u.first.bounds = c.policy.hedged, &u.bounds
	u.begin(&u.first)
	u.hedging.race(&u.call, u, &u.first, delay)
	winner := u.hedging.winner
	if winner == nil {
		return u.hedging.conclude()
	}
	if winner.number > 1 {
		copyReply(reply, winner.bounds.received)
		u.show(winner)
	}
	u.succeed(winner, u.hedging.wonAt)
	winner.release()
	return nil
}

// run makes one attempt. The first receives into the caller's reply and options: nobody
// else touches those until all attempts have ended.
func (u *hedgedUnary) run(a *attempt) error {
	reply := u.reply
	if a.number > 1 {
		reply = u.replies.make()
		a.bounds.received = reply
	}
	return u.invoker(a, u.method, u.req, reply, u.cc, u.attemptOptions(a)...)
}

func (u *hedgedUnary) discard(*attempt) {}
