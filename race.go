package grpcretry

import (
	"runtime"
	"slices"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// A race is a hedged call from the moment when a hedge is due, or the first attempt has failed.
//
// Each further attempt runs on a goroutine of its own. Everything that happens, such as an
// attempt's end or a time that has come, goes into a queue. The goroutine that adds to it also
// handles it, without a lock, unless another one is doing so already: so one goroutine at a time
// uses the call, its plan, the budget and the observers, as in any other call.
type race struct {
	*hedging
	call *call

	queue    []happening   // guarded by mu
	handling bool          // guarded by mu; a goroutine handles the queue
	ended    bool          // guarded by mu; decided, and every attempt has ended
	wake     chan struct{} // guarded by mu; closed when ended; nil if unused
	exited   bool          // guarded by mu; a callback has ended the goroutine that handled the queue
	stopping bool          // guarded by mu; the caller's goroutine has seen that

	connecting bool          // guarded by mu; the call waits for a connection
	nudge      chan struct{} // guarded by mu; closed when connecting or exited becomes true; nil if unused

	// Used by the goroutine that handles the queue, and by the caller's when the race has ended.
	made    int        // attempts sent
	open    []*attempt // those in flight
	idle    time.Time  // since when none is in flight
	decided bool
	crashed bool      // something on the caller's goroutine has panicked
	winner  *attempt  // nil if none succeeded
	wonAt   time.Time // when the winner succeeded
	replies raceReplies
	waiting bool    // the call counts as waiting
	err     error   // the winner's: nil, or io.EOF for a stream that ended well
	lost    *defeat // without a winner, how the call fails

	openSpace [2]*attempt
}

// A defeat is the failure that a call ends with, unless another attempt wins.
type defeat struct {
	attempt *attempt
	err     error // as gRPC returned it
	failure failure
	verdict verdict
}

// A happening is something that a race must handle. One field is set, besides err; the zero value means
// to check whether an attempt is due, or the caller has gone.
type happening struct {
	ended     *attempt // an attempt that has ended, with err
	err       error
	overdue   *attempt // an attempt that has reached its timeout
	connected bool     // the connection that the call waits for is there
	headed    *attempt // an attempt whose headers the application takes
	panicked  *attempt // the attempt on the caller's goroutine, which panics
}

// post adds to the queue, and handles the queue unless another goroutine does.
func (r *race) post(e happening) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.queue = append(r.queue, e)
	if r.handling {
		return
	}
	r.handling = true
	done := false
	defer func() {
		r.handling = false
		if !done { // the caller's goroutine ends as well; a panic on another ends the program
			r.exited = true
			r.wakeCaller()
		}
	}()
	for len(r.queue) > 0 {
		e := r.queue[0]
		r.queue = slices.Delete(r.queue, 0, 1)
		r.handleUnlocked(e)
	}
	done = true
	if r.decided && len(r.open) == 0 && !r.ended {
		r.ended = true
		r.replies.end()
		if r.wake != nil {
			close(r.wake)
		}
	}
}

// handleUnlocked needs mu, and releases it meanwhile.
func (r *race) handleUnlocked(e happening) {
	r.mu.Unlock()
	defer r.mu.Lock()
	r.handle(e)
	r.countWaiting()
}

// countWaiting counts the call as waiting while no attempt is in flight.
func (r *race) countWaiting() {
	if waits := !r.decided && len(r.open) == 0; waits != r.waiting {
		r.waiting = waits
		r.call.retrier.usage.countWaiting(waits)
	}
}

// await returns when the race has ended. Meanwhile the caller's goroutine waits for everything else
// that may end the call, or let it go on.
func (r *race) await() {
	c := r.call
	closed, unwatch := c.retrier.connections.watch(c.cc, shortWait+1)
	defer unwatch()
	gone := c.ctx.Done()
	for left := false; ; {
		r.crashAfterExit()
		wake, nudge, connecting := r.awaited()
		if wake == nil {
			return
		}
		if connecting && !left {
			if r.awaitConnection(wake, closed) {
				r.contested().post(happening{connected: true})
				continue
			}
		} else {
			select {
			case <-nudge:
				continue
			case <-wake:
				return
			case <-gone:
			case <-closed:
			}
		}
		gone, closed, left = nil, nil, true
		r.look() // attempts end by themselves, but there may be none in flight
	}
}

// crashAfterExit cancels what is still in flight if a callback has ended the goroutine that it ran
// on.
func (r *race) crashAfterExit() {
	r.mu.Lock()
	crashes := r.exited && !r.stopping
	r.stopping = r.stopping || crashes
	r.mu.Unlock()
	if crashes {
		r.post(happening{panicked: r.first})
	}
}

// exit ends the caller's goroutine if a callback has ended another one.
func (r *race) exit() {
	r.mu.Lock()
	exited := r.exited
	r.mu.Unlock()
	if exited {
		runtime.Goexit()
	}
}

// awaited returns the channels that the caller's goroutine waits for; wake is nil if the race has
// ended.
func (r *race) awaited() (wake, nudge <-chan struct{}, connecting bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.ended {
		return nil, nil, false
	}
	if r.wake == nil {
		r.wake = make(chan struct{})
	}
	connecting, r.connecting = r.connecting, false
	if r.nudge == nil {
		r.nudge = make(chan struct{})
	}
	return r.wake, r.nudge, connecting
}

// awaitConnection returns true when there is a connection, and false when none is needed any more.
func (r *race) awaitConnection(wake, closed <-chan struct{}) bool {
	c := r.call
	ready, _, unwatch := c.retrier.connections.await(c.cc)
	defer unwatch()
	select {
	case <-ready:
		return true
	case <-wake:
	case <-c.ctx.Done():
	case <-closed:
	}
	return false
}

// crash ends the race when the caller's goroutine panics, in its attempt or in a callback. From then
// on nothing but the budget receives a report.
func (r *race) crash() {
	r.mu.Lock()
	r.queue = slices.Insert(r.queue, 0, happening{panicked: r.first})
	r.mu.Unlock()
	r.look()
	r.await()
}

func (r *race) handle(e happening) {
	now := time.Now()
	switch {
	case e.panicked != nil:
		r.crashed = true
		r.remove(e.panicked)
		if !e.panicked.reported {
			r.call.deposit(e.panicked, Ignored)
		}
		r.cancelLosers()
		e.panicked.release()
	case e.ended != nil:
		r.remove(e.ended)
		r.replies.ended(e.ended)
		r.attemptEnded(e.ended, e.err, now)
	case r.decided:
	case e.headed != nil:
		r.bind(e.headed, now)
	case e.overdue != nil:
		r.cut(e.overdue, now)
	case r.call.plan().gone(r.call.ctx, now) != nil || isClosed(r.call.cc):
		if len(r.open) == 0 { // attempts in flight end by themselves
			r.callerGone(r.call.plan().gone(r.call.ctx, now))
		}
	case e.connected && r.call.plan().connecting != nil:
		r.connected(now)
	default:
		r.checkDue(now)
	}
}

// checkDue handles the time when the plan has something due.
func (r *race) checkDue(now time.Time) {
	if due := r.call.planned(now).dueAt; due.IsZero() || now.Before(due) {
		r.arm() // the timer was reset meanwhile, or was not the reason for this check
		return
	}
	r.due(now)
}

// cut ends an attempt that has reached its timeout, if the plan wants it cut.
func (r *race) cut(a *attempt, now time.Time) {
	c := r.call
	if !slices.Contains(r.open, a) || c.retrier.leavesToGRPC(c.policy, c.cc, c.method) {
		return
	}
	p := c.planned(now)
	f := a.overdueFailure(now)
	if p.overdue(c.ctx, &f, now, c.retrier.random()).Cut {
		a.tryCut() // if the attempt has just ended, the queue has its end
	}
	r.arm()
}

// bind makes a stream's attempt the winner because of its headers; its first message is yet to
// come.
func (r *race) bind(a *attempt, now time.Time) {
	if slices.Contains(r.open, a) {
		r.winner, r.wonAt = a, now
		r.attempts.bind(a)
		r.cancelLosers()
	}
}

// remove takes an attempt that has ended out of those in flight.
func (r *race) remove(a *attempt) {
	r.open = slices.DeleteFunc(r.open, func(one *attempt) bool { return one == a })
}

// attemptEnded handles the end of an attempt.
func (r *race) attemptEnded(a *attempt, err error, now time.Time) {
	c := r.call
	c.collect(a)
	err = truthOf(err, a, c.stream)
	won := err == nil || c.stream != nil && isEOF(err)
	if a == r.winner {
		if r.err = err; won {
			r.replies.won(a, sizeOf(r.attempts.replyOf(a)))
			a.measure(r.call.learner, false)
		}
		return
	}
	if won && !r.decided {
		r.winner, r.wonAt, r.err = a, now, err
		r.replies.won(a, sizeOf(r.attempts.replyOf(a)))
		a.measure(r.call.learner, false)
		r.cancelLosers()
		return
	}
	defer a.release()
	switch {
	case r.decided:
		r.late(a, won, now)
	case r.made == int(a.number) && c.retriedByGRPC(a):
		r.lost = &defeat{attempt: a, err: err, verdict: verdict{Reason: errLeftToGRPC}}
		r.cancelLosers()
	default:
		r.attemptFailed(a, err, now)
	}
}

// late reports an attempt that ended after the decision.
func (r *race) late(a *attempt, won bool, now time.Time) {
	if won {
		r.attempts.discard(a)
	}
	if r.crashed {
		r.call.deposit(a, Ignored)
		return
	}
	if r.winner != nil {
		a.measure(r.call.learner, true)
	}
	r.call.lost(a, now)
}

// attemptFailed asks the plan what follows an attempt's failure.
func (r *race) attemptFailed(a *attempt, err error, now time.Time) {
	c := r.call
	p := c.plannedAfter(a, now)
	f := c.failure(a, err, now)
	c.history.record(&f)
	a.reported = true
	step := p.failed(c.ctx, &f, now, c.retrier.random())
	c.retrier.report.attemptFailed(&c.facts, &f.Attempt, step.verdict, now)
	r.lost = &defeat{a, err, f, step.verdict}
	if len(r.open) == 0 {
		r.idle = now
		if !step.End {
			c.retrier.report.waitStarted(&c.facts, r.made+1, step.verdict, now)
		}
	}
	r.do(step)
}

// due asks the plan for the step that is due, and takes it.
func (r *race) due(now time.Time) {
	c, p := r.call, r.call.planned(now)
	switch {
	case p.next.decided || p.connecting != nil:
		step := p.due(now)
		if step.End {
			r.abort(step.Reason, nil)
			return
		}
		r.do(step)
	case c.retrier.leavesToGRPC(c.policy, c.cc, c.method):
		p.dueAt = time.Time{}
		r.arm()
	case (r.delay > 0 || !c.retrier.builtInRetryOff) && isUnconnected(c.cc), c.unresolved != nil && awaitsConfig(c.cc):
		// Hedges that come due meanwhile would all be sent together when there is a connection, and
		// perhaps although the channel's config allows none.
		p.putOff(now)
		r.arm()
	case !r.replies.spare():
		c.retrier.report.hedgeNotKept(&c.facts, r.replies.memory.limit)
		p.putOff(now)
		r.arm()
	default:
		step := p.due(now)
		c.retrier.report.hedgeJudged(&c.facts, step.verdict, now)
		r.do(step)
		r.replies.giveSpare()
	}
}

// do takes a step of the plan.
func (r *race) do(step step) {
	switch {
	case step.End:
		r.cancelLosers()
		return
	case step.Send:
		r.send()
	case step.Connect:
		r.connect()
	}
	r.arm()
}

// connect makes the caller's goroutine, which waits for the end of the race, wait for a
// connection as well.
func (r *race) connect() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.connecting = true
	r.wakeCaller()
}

// wakeCaller needs mu. It makes the caller's goroutine look at what has changed.
func (r *race) wakeCaller() {
	if r.nudge != nil {
		close(r.nudge)
		r.nudge = nil
	}
}

// connected asks the plan what follows when there is a connection.
func (r *race) connected(now time.Time) {
	c := r.call
	step := c.plan().connected(now)
	c.retrier.report.connected(&c.facts, step.verdict)
	if step.End {
		r.abort(step.Reason, nil)
		return
	}
	r.do(step)
}

// send starts the next attempt on a goroutine of its own.
func (r *race) send() {
	c, now := r.call, time.Now() // a new clock read, because observers may be slow
	c.retrier.report.waitEnded(&c.facts)
	if len(r.open) == 0 {
		c.history.idle += now.Sub(r.idle)
	}
	a := c.newAttempt(c.plan().send(now), now)
	c.ready(a)
	r.replies.sent()
	r.made++
	r.open = append(r.open, a)
	go r.runOwn(a)
}

// runOwn makes an attempt on a goroutine of its own, which an interceptor below may end with
// runtime.Goexit. A panic ends the program.
func (r *race) runOwn(a *attempt) {
	err := errExited
	defer func() {
		if p := recover(); p != nil {
			panic(p) //nolint:forbidigo // it comes from an interceptor below
		}
		r.post(happening{ended: a, err: err})
	}()
	err = r.attempts.run(a)
}

// errExited is the error of an attempt in which runtime.Goexit was called.
var errExited = status.Error(codes.Internal, "grpcretry: the attempt ended its goroutine")

// arm sets the timer to the time when the plan has something due.
func (r *race) arm() {
	if due := r.call.plan().dueAt; !due.IsZero() && !r.decided {
		resetTimer(r.timer, time.Until(due), r.look)
		return
	}
	r.timer.Stop()
}

// callerGone ends a call that the caller has left while no attempt is in flight; gone is why the
// caller's context has ended, nil if the ClientConn was closed.
func (r *race) callerGone(gone error) {
	reason := gone
	if gone == nil {
		reason = errConnClosed
	}
	r.abort(reason, gone)
}

// abort ends a call while no attempt is in flight.
func (r *race) abort(reason, gone error) {
	r.lost.verdict = verdict{Reason: reason}
	r.lost.failure.CtxErr = gone
	r.call.retrier.report.waitStopped(&r.call.facts, reason)
	r.cancelLosers()
}

// cancelLosers ends the race as soon as the attempts in flight have ended, and cancels all but the
// winner.
func (r *race) cancelLosers() {
	r.decided = true
	r.timer.Stop()
	r.call.plan().leave()
	for _, a := range r.open {
		if a != r.winner || r.crashed {
			a.bounds.cancel(ErrHedgeLost)
		}
	}
}

// fail ends a call that no attempt has won, and returns its error.
func (r *race) fail() error {
	c, now, lost := r.call, time.Now(), r.lost
	if r.made > 1 || c.stream != nil {
		c.options.show(lost.attempt)
	}
	if lost.verdict.Reason == errLeftToGRPC { //nolint:errorlint // set here
		c.retrier.report.leftToGRPC(&c.facts)
		return c.leaveToGRPC(lost.attempt, lost.err, now)
	}
	return c.stop(&lost.failure, lost.verdict, lost.err, now)
}
