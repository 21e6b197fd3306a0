package grpcretry

import (
	"runtime"
	"slices"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// A hedging is the part of a hedged call in which attempts may run at the same time: from
// the first one to the decision, and on until the losers have ended. The first attempt
// runs on the caller's goroutine. Mostly it succeeds before another is due, so this is
// kept small; else there is a race.
type hedging struct {
	attempts hedgedAttempts
	first    *attempt
	delay    time.Duration
	from     time.Duration // since the origin; what delay is counted from

	mu    sync.Mutex  // held for a moment only, never while something is called that others have made
	timer *time.Timer // guarded by mu until it is set; until the next attempt is due
	race  *race       // guarded by mu; nil as long as nothing has happened
	over  bool        // guarded by mu; the first attempt succeeded before anything else happened
	early *attempt    // guarded by mu; the first attempt, if its timeout came before run
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
	ended    bool          // guarded by mu; decided, and every attempt has ended
	wake     chan struct{} // guarded by mu; closed when over; nil while nobody waits for that
	exited   bool          // guarded by mu; a callback has ended the goroutine that handled the queue
	stopping bool          // guarded by mu; the caller's goroutine has seen that

	connecting bool          // guarded by mu; the call waits for a connection
	nudge      chan struct{} // guarded by mu; closed when connecting becomes true; nil while nobody waits for that

	// Of whoever handles the queue, and of the caller when it is over.
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
	failure failure
	verdict verdict // what the engine said of it
}

// hedgedAttempts are what a unary call and a server stream do differently.
type hedgedAttempts interface {
	// share puts the call where all goroutines of a race find it.
	share() *call
	// run makes an attempt, to its end or, of a stream, to its first message.
	run(*attempt) error
	// discard ends what is left of an attempt that succeeded too late.
	discard(*attempt)
	// bind makes an attempt whose first message is yet to come the winner of a stream.
	bind(*attempt)
}

// A happening is that an attempt has ended; without one, that it is time to look whether
// another is due, or the caller has gone.
type happening struct {
	ended     *attempt
	err       error
	overdue   *attempt // instead: this one has reached its timeout
	connected bool     // instead: there is a connection that the call waits for
	headed    *attempt // instead: the application takes the headers of this one
	panicked  *attempt // instead: the caller's goroutine panics, which runs this one
}

// run runs the first attempt on this goroutine and others beside it, until one is decisive and
// all have ended. It returns nil if the first succeeded before anything else happened.
func (h *hedging) run() *race {
	first, over := h.first, false
	defer func() {
		if !over {
			h.contested().quit()
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

// uncontested says that nothing else has happened. Then nothing else will.
func (h *hedging) uncontested() bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.over = h.race == nil && h.timer.Stop()
	return h.over
}

func (h *hedging) look() { h.contested().post(happening{}) }

// overdue is what the timer of an attempt timeout runs.
func (h *hedging) overdue(a *attempt) {
	h.mu.Lock()
	if h.timer == nil { // run has not begun; it will see to this
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

// contested is the race, which begins now unless it has begun.
func (h *hedging) contested() *race {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.contestedLocked()
}

// contestedLocked needs mu.
func (h *hedging) contestedLocked() *race {
	if h.race == nil {
		r := &race{hedging: h, call: h.attempts.share(), made: int(h.first.number)}
		r.open = append(r.openRoom[:0], h.first)
		now := time.Now()
		r.call.planned(now).hedgeFrom(timeOf(h.from, now))
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
	done := false
	defer func() {
		h.handling = false
		if !done { // the caller's goroutine ends as well; a panic on another ends the program
			h.exited = true
			h.wakeCaller()
		}
	}()
	for len(h.queue) > 0 {
		e := h.queue[0]
		h.queue = slices.Delete(h.queue, 0, 1)
		h.handleUnlocked(e)
	}
	done = true
	if h.decided && len(h.open) == 0 && !h.ended {
		h.ended = true
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

// await returns when it is over. It is the caller's goroutine that waits for everything else
// that may end the call, or let it go on.
func (h *race) await() {
	c := h.call
	closed, unwatch := c.retrier.connections.watch(c.cc, shortWait+1)
	defer unwatch()
	gone := c.ctx.Done()
	for left := false; ; {
		h.quitAfterExit()
		wake, nudge, connecting := h.awaited()
		if wake == nil {
			return
		}
		if connecting && !left {
			if h.awaitConnection(wake, closed) {
				h.contested().post(happening{connected: true})
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
		h.look() // attempts end by themselves, but there may be none in flight
	}
}

// quitAfterExit ends what is still under way when a callback has ended the goroutine that it ran on.
func (h *race) quitAfterExit() {
	h.mu.Lock()
	exited := h.exited && !h.stopping
	h.stopping = h.stopping || exited
	h.mu.Unlock()
	if exited {
		h.post(happening{panicked: h.first})
	}
}

// exit ends the caller's goroutine if a callback has ended another.
func (h *race) exit() {
	h.mu.Lock()
	exited := h.exited
	h.mu.Unlock()
	if exited {
		runtime.Goexit()
	}
}

// awaited returns what the caller's goroutine waits for; wake is nil if it is over.
func (h *race) awaited() (wake, nudge <-chan struct{}, connecting bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.ended {
		return nil, nil, false
	}
	if h.wake == nil {
		h.wake = make(chan struct{})
	}
	connecting, h.connecting = h.connecting, false
	if h.nudge == nil {
		h.nudge = make(chan struct{})
	}
	return h.wake, h.nudge, connecting
}

// awaitConnection returns true when there is a connection, and false when there will be none
// that matters.
func (h *race) awaitConnection(wake, closed <-chan struct{}) bool {
	c := h.call
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
		if !e.panicked.reported {
			h.call.deposit(e.panicked, Ignored)
		}
		h.decide()
		e.panicked.release()
	case e.ended != nil:
		h.close(e.ended)
		h.attemptEnded(e.ended, e.err, now)
	case h.decided:
	case e.headed != nil:
		h.bind(e.headed, now)
	case e.overdue != nil:
		h.cut(e.overdue, now)
	case h.call.plan().gone(h.call.ctx, now) != nil || isClosed(h.call.cc):
		if len(h.open) == 0 { // else they end by themselves
			h.abandon(h.call.plan().gone(h.call.ctx, now))
		}
	case e.connected && h.call.plan().connecting != nil:
		h.connected(now)
	default:
		h.checkDue(now)
	}
}

// checkDue sees to what is due.
func (h *race) checkDue(now time.Time) {
	if due := h.call.planned(now).dueAt; due.IsZero() || now.Before(due) {
		h.arm() // the timer was set anew meanwhile, or never for this
		return
	}
	h.due(now)
}

// cut ends an attempt that has reached its timeout, if another takes its place.
func (h *race) cut(a *attempt, now time.Time) {
	c := h.call
	if !slices.Contains(h.open, a) || c.retrier.leavesToGRPC(c.cc, c.method) {
		return
	}
	p := c.planned(now)
	f := a.overdueFailure(now)
	if p.overdue(c.ctx, &f, now, c.retrier.random()).Cut {
		a.tryCut() // if it has just ended, that is next in the queue
	}
	h.arm()
}

// bind decides for an attempt of a stream because of its headers; its first message is yet to
// come.
func (h *race) bind(a *attempt, now time.Time) {
	if slices.Contains(h.open, a) {
		h.winner, h.wonAt = a, now
		h.attempts.bind(a)
		h.decide()
	}
}

func (h *race) close(a *attempt) {
	h.open = slices.DeleteFunc(h.open, func(one *attempt) bool { return one == a })
}

// attemptEnded takes in how an attempt ended.
func (h *race) attemptEnded(a *attempt, err error, now time.Time) {
	c := h.call
	c.collect(a)
	err = truthOf(err, a, c.stream)
	won := err == nil || c.stream != nil && isEOF(err)
	if a == h.winner {
		if h.err = err; won {
			h.call.answered(a, false)
		}
		return
	}
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
	case h.made == int(a.number) && c.leaves(a):
		h.lost = &defeat{attempt: a, err: err, verdict: verdict{Reason: errLeftToGRPC}}
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
		h.call.deposit(a, Ignored)
		return
	}
	if h.winner != nil {
		h.call.answered(a, true)
	}
	h.call.lost(a, now)
}

// failed asks the plan what comes of an attempt's failure.
func (h *race) failed(a *attempt, err error, now time.Time) {
	c := h.call
	p := c.planned(now)
	f := c.failure(a, err, now)
	c.past.record(&f)
	a.reported = true
	step := p.failed(c.ctx, &f, now, c.retrier.random())
	c.retrier.report.attemptFailed(&c.facts, &f.Attempt, step.verdict, now)
	h.lost = &defeat{a, err, f, step.verdict}
	if len(h.open) == 0 {
		h.idle = now
	}
	h.do(step)
}

// due asks the plan for what is due, and does it.
func (h *race) due(now time.Time) {
	c, p := h.call, h.call.planned(now)
	switch {
	case p.next.decided || p.connecting != nil:
		step := p.due(now)
		if step.End {
			h.giveUp(step.Reason, nil)
			return
		}
		h.do(step)
	case c.retrier.leavesToGRPC(c.cc, c.method):
		p.dueAt = time.Time{}
		h.arm()
	case (h.delay > 0 || !c.retrier.builtInRetryOff) && isUnconnected(c.cc):
		// Those that are due meanwhile would all be sent at once when there is a connection.
		p.putOff(now)
		h.arm()
	default:
		step := p.due(now)
		c.retrier.report.hedgeJudged(&c.facts, step.verdict, now)
		h.do(step)
	}
}

// do does what a step of the plan says.
func (h *race) do(step step) {
	switch {
	case step.End:
		h.decide()
		return
	case step.Send:
		h.send()
	case step.Connect:
		h.connect()
	}
	h.arm()
}

// connect makes the caller's goroutine, which waits for the race to be over, wait for a
// connection as well.
func (h *race) connect() {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.connecting = true
	h.wakeCaller()
}

// wakeCaller needs mu.
func (h *race) wakeCaller() {
	if h.nudge != nil {
		close(h.nudge)
		h.nudge = nil
	}
}

// connected asks the plan what follows when there is a connection.
func (h *race) connected(now time.Time) {
	c := h.call
	step := c.plan().connected(now)
	c.retrier.report.connected(&c.facts, step.verdict)
	if step.End {
		h.giveUp(step.Reason, nil)
		return
	}
	h.do(step)
}

// send starts the next attempt on a goroutine of its own.
func (h *race) send() {
	c, now := h.call, time.Now() // observers may have taken their time
	if len(h.open) == 0 {
		c.past.idle += now.Sub(h.idle)
	}
	a := c.another(c.plan().send(now), now)
	h.made++
	h.open = append(h.open, a)
	go h.runOwn(a)
}

// runOwn makes an attempt on a goroutine of its own, which something below may end. A panic ends
// the program.
func (h *race) runOwn(a *attempt) {
	err := errExited
	defer func() {
		if p := recover(); p != nil {
			panic(p) //nolint:forbidigo // it is the interceptor's below
		}
		h.post(happening{ended: a, err: err})
	}()
	err = h.attempts.run(a)
}

// errExited is how an attempt ends in which runtime.Goexit was called.
var errExited = status.Error(codes.Internal, "grpcretry: the attempt ended its goroutine")

// arm sets the timer to when the plan has something due.
func (h *race) arm() {
	if due := h.call.plan().dueAt; !due.IsZero() && !h.decided {
		resetTimer(h.timer, time.Until(due), h.look)
		return
	}
	h.timer.Stop()
}

// abandon ends a call that the caller left while no attempt was in flight; gone is why the
// caller's context has ended, nil if the ClientConn was closed.
func (h *race) abandon(gone error) {
	reason := gone
	if gone == nil {
		reason = errConnClosed
	}
	h.giveUp(reason, gone)
}

// giveUp ends a call while no attempt is in flight.
func (h *race) giveUp(reason, gone error) {
	h.lost.verdict = verdict{Reason: reason}
	h.lost.failure.CtxErr = gone
	h.call.retrier.report.waitStopped(&h.call.facts, reason)
	h.decide()
}

// decide ends what is still under way.
func (h *race) decide() {
	h.decided = true
	h.timer.Stop()
	h.call.plan().leave()
	for _, a := range h.open {
		if a != h.winner || h.quitting {
			a.bounds.cancel(ErrHedgeLost)
		}
	}
}

// conclude ends a call that no attempt has won, and returns its error.
func (h *race) conclude() error {
	c, now, lost := h.call, time.Now(), h.lost
	if h.made > 1 || c.stream != nil {
		c.options.show(lost.attempt)
	}
	if lost.verdict.Reason == errLeftToGRPC { //nolint:errorlint // set here
		c.retrier.report.leftToGRPC(&c.facts)
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
	err := u.conclude(c, race)
	done = true
	return err
}

// conclude ends the call, c without a race, and returns its error.
func (u *hedgedUnary) conclude(c *call, race *race) error {
	switch {
	case race == nil:
		c.answered(&u.first, false)
		c.succeed(&u.first, time.Time{})
		return nil
	case race.winner == nil:
		return race.conclude()
	}
	if race.winner.number > 1 {
		copyReply(u.reply, race.winner.bounds.received)
		race.call.options.show(race.winner)
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
	err := readable(u.invoker(a, u.rpc.method, u.req, reply, u.rpc.cc, u.rpc.attemptOptions(a)...))
	a.checkUnsent(err)
	a.settle()
	return err
}

func (u *hedgedUnary) discard(*attempt) {}

func (u *hedgedUnary) bind(*attempt) {}
