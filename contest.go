package grpcretry

import (
	"runtime"
	"slices"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/grpcretry/grpcretry/internal/replies"
	"github.com/grpcretry/grpcretry/internal/timer"
	"github.com/grpcretry/grpcretry/internal/turn"
)

// A contest is the part of a call that has a timer: for the attempt timeout, for the delay of hedges, or
// for both. Attempts may then be in flight together, and the timer may ask the plan while they are.
//
// The goroutine that learns of an attempt's end, or on which the timer fires, takes the turn, asks the
// plan, does what the plan says, which never blocks, and gives the turn back. So one goroutine at a time
// uses the call, its plan, the budgets and the observers, as in a call without a contest. While no attempt
// is in flight, the call belongs to the caller's goroutine, which waits and sends the next one like in any
// other call.
type contest struct {
	call    *call
	hedger  hedger  // makes hedges; nil while none may be sent
	channel channel // when the call started

	replies replies.Type // makes what hedges receive into; set before the first

	turn     turn.Lock   // taken by the goroutine that uses the fields below, the call and its plan
	timer    timer.Timer // until the next time at which something may be due
	open     []*attempt  // in flight
	from     instant     // the first delay counts from then
	end      ending      // of the race, once it is decided
	crashed  bool        // a callback has panicked
	panicked any         // the value of the panic, until it is repeated

	hedges sync.WaitGroup // the goroutines of hedges
	space  [2]*attempt    // for open
}

// A hedger makes a hedge of a call: an attempt, to its end or, for a stream, to its first message.
type hedger interface{ hedge(*attempt) error }

// An ending is the end of an attempt that decides what follows: the call's success, its failure or, if
// the plan has not been asked yet, perhaps another attempt.
type ending struct {
	attempt *attempt
	err     error   // nil, or io.EOF for a stream that ended well
	defeat  *defeat // what the plan has said already; nil if it is yet to be asked
}

// A defeat is a failure that ends a call although other attempts were in flight.
type defeat struct {
	failure failure
	verdict verdict
}

// join makes the contest a part of c, which must be on the heap already.
func (k *contest) join(c *call) {
	k.call, k.channel, k.open = c, c.channel(), k.space[:0]
	c.contest = k
}

// start adds an attempt, which is about to be handed to gRPC, to those in flight. It does nothing for a call without
// a contest.
func (k *contest) start(a *attempt) {
	if k == nil {
		return
	}
	k.turn.Take()
	defer k.turn.Give()
	k.from = a.start
	k.add(a)
}

// add takes in an attempt that has started, with its timeout. It needs the turn.
func (k *contest) add(a *attempt) {
	a.bounds().expires = never
	if timeout := k.call.policy.AttemptTimeout; timeout > 0 {
		a.bounds().expires = a.start.Add(timeout)
	}
	k.open = append(k.open, a)
	k.arm()
}

// settle takes an attempt out of those in flight: it has ended, or has its first message. From then on the timeout
// does not cut it. A call without a contest has no timeout.
func (k *contest) settle(a *attempt) {
	if k == nil {
		return
	}
	k.turn.Take()
	defer k.turn.Give()
	k.remove(a)
}

// remove is the opposite of add. It needs the turn.
func (k *contest) remove(a *attempt) {
	i := slices.Index(k.open, a)
	if i < 0 {
		return
	}
	k.open = slices.Delete(k.open, i, i+1)
	if instantNow() < a.bounds().expires {
		a.bounds().expires = never
	}
	if len(k.open) == 0 {
		k.timer.Stop()
	}
}

// resume starts the timeout of a stream's attempt, unless it is running. It counts while the application waits for the attempt's
// first message or for its headers: nothing else can tell whether the message is there.
func (k *contest) resume(a *attempt) {
	if k == nil || k.call.policy.AttemptTimeout == 0 {
		return
	}
	k.turn.Take()
	defer k.turn.Give()
	if b := a.bounds(); b.expires == never && slices.Contains(k.open, a) {
		b.expires = instantNow().Add(k.call.policy.AttemptTimeout)
		if b.slowness == slowJudged {
			b.slowness = slowNotYet
		}
		k.arm()
	}
}

// idle stops the timeout of the attempt in use while the application does not wait.
func (s *retryStream) idle() {
	k := s.call.contest
	if k == nil {
		return
	}
	k.turn.Take() // which a goroutine that begins to wait takes, too, to resume the timeout
	defer k.turn.Give()
	s.mu.Lock()
	at, awaited := s.at, s.isAwaited() || s.phase == phaseRacing
	s.mu.Unlock()
	if at != nil && !awaited && slices.Contains(k.open, at.attempt) {
		at.bounds().expires = never
	}
}

// compete begins, or ends, the time in which a stream's attempts may be hedged.
func (k *contest) compete(h hedger) {
	k.turn.Take()
	defer k.turn.Give()
	k.hedger, k.from = h, instantNow()
	if p := k.call.plan(); p != nil {
		p.hedgeFrom(k.from)
	}
	k.arm()
}

// race makes an attempt on this goroutine, and hedges beside it, until none is in flight. It returns the
// end of the one that decides what follows.
func (k *contest) race(a *attempt, run func(*attempt) error) ending {
	err := run(a)
	k.guarded(func() { k.ended(a, err) }, a)
	k.hedges.Wait()
	k.repanic()
	e := k.end
	k.end, k.call.newest = ending{}, e.attempt
	return e
}

// ended needs the turn. It handles the end of an attempt.
func (k *contest) ended(a *attempt, err error) {
	c, now := k.call, time.Now()
	k.remove(a)
	err = a.truthOf(readable(err))
	if err == nil && c.stream != nil && c.stream.desc.ServerStreams && a.isCut() {
		k.drain(a) // its other messages are lost
		err = errCut
	}
	won := err == nil || c.stream != nil && isEOF(err)
	switch {
	case k.end.attempt != nil || k.crashed:
		k.loserEnded(a, err, won, now)
	case won:
		k.end = ending{attempt: a, err: err}
		a.bounds().ended = instantOf(now)
		k.cancelOpen()
		a.measure(c.learner, false)
	case len(k.open) == 0:
		k.end = ending{attempt: a, err: err}
	default:
		k.failed(a, err, now)
	}
}

// loserEnded reports an attempt that ended after the decision.
func (k *contest) loserEnded(a *attempt, err error, won bool, now time.Time) {
	defer a.endContext()
	c := k.call
	if won && c.stream != nil {
		k.drain(a)
	}
	c.deposit(a, Ignored)
	if k.crashed {
		return
	}
	if d := k.end.defeat; d != nil && d.failure.callOver() != nil && !won { // the caller has ended this attempt, too
		var f failure
		c.describe(&f, a, err, stateOf(c.cc), now)
		c.history().keep(&f.Attempt)
		c.retrier.report.attemptFailed(&c.facts, &f.Attempt, verdict{Reason: d.verdict.Reason}, now)
		return
	}
	if k.end.defeat == nil {
		a.measure(c.learner, true)
	}
	var info Attempt
	a.describe(&info, errHedgeLost, a.extras().header, now)
	c.history().keep(&info)
	c.retrier.report.attemptLost(&c.facts, &info)
}

// failed asks the plan about the failure of an attempt while others are in flight.
func (k *contest) failed(a *attempt, err error, now time.Time) {
	var f failure
	state := stateOf(k.call.cc)
	v := k.call.ask(k.call.planned(state, now), &f, a, err, state, now)
	if v.do == doEnd {
		k.end = ending{a, err, &defeat{f, v}}
		k.cancelOpen()
		return
	}
	a.endContext()
	k.do(v.do)
	k.arm()
}

// cancelOpen cancels the attempts in flight: the race is decided, or something has panicked. The timer may still
// fire until the last of them has ended, and then does nothing.
func (k *contest) cancelOpen() {
	for _, a := range k.open {
		a.bounds().own.Cancel(ErrHedgeLost)
	}
}

// tick runs on the timer's goroutine: something may be due.
func (k *contest) tick() { k.guarded(k.check, nil) }

func (k *contest) check() {
	if len(k.open) == 0 || k.end.attempt != nil || k.crashed {
		return
	}
	now := time.Now()
	for _, a := range k.open {
		switch {
		case instantOf(now) < k.overdueAt(a):
		case k.awaitsConnection(a):
			a.bounds().expires = instantOf(now).Add(k.call.policy.AttemptTimeout)
		default:
			a.bounds().slowness = slowJudged
			k.overdue(a, now)
		}
	}
	if instantOf(now) >= k.dueAt() {
		if endOf(k.open[0].bounds().own.Context, now) != nil {
			return // the attempts in flight end by themselves
		}
		k.due(now)
	}
	k.arm()
}

// plan returns the call's plan, which may start now.
func (k *contest) plan(now time.Time) *plan {
	c := k.call
	if k.hedger == nil { // outside of a race, one of a stream's goroutines may be setting the limit of the call
		return c.informedPlan(stateOf(c.cc), now)
	}
	return c.planned(stateOf(c.cc), now)
}

// dueAt returns when the plan has something due. Outside of a race that is only an attempt
// that replaces the one in flight.
func (k *contest) dueAt() instant {
	p := k.call.plan()
	switch {
	case p == nil && k.hedger != nil:
		return k.from.Add(k.call.delay)
	case p == nil, p.dueAt == 0 || k.hedger == nil && p.replaces == 0:
		return never
	default:
		return p.dueAt
	}
}

// arm sets the timer to the next time at which something is due.
func (k *contest) arm() {
	at := k.dueAt()
	for _, a := range k.open {
		at = min(at, k.overdueAt(a))
	}
	if at == never {
		k.timer.Stop()
		return
	}
	k.timer.Set(at.Sub(instantNow()), k.tick)
}

// overdueAt returns when the plan is to be asked about an attempt that is slow: once, or again if nothing replaces it
// after all.
func (k *contest) overdueAt(a *attempt) instant {
	p := k.call.plan()
	waits := p != nil && p.pending.isDecided() // until the pending attempt is sent, or given up
	if waits || a.bounds().slowness == slowJudged && !k.mayHang(a) {
		return never
	}
	return a.bounds().expires
}

// awaitsConnection reports whether an attempt has had no connection, now or when it was last asked, so that its
// server still has the whole timeout to answer. Without a deadline, the attempt could wait for ever.
func (k *contest) awaitsConnection(a *attempt) bool {
	before := a.bounds().slowness
	if _, limited := a.Deadline(); limited && isUnconnected(stateOf(k.call.cc)) {
		a.bounds().slowness = slowUnconnected
		return true
	}
	a.bounds().slowness = slowNotYet
	return before == slowUnconnected
}

// mayHang reports whether an overdue attempt has no deadline, if nothing is pending that could replace it. One that has been
// cancelled, for whatever reason, is about to end.
func (k *contest) mayHang(a *attempt) bool {
	p := k.call.plan()
	return p != nil && p.deadline == 0 && !p.config.isLeftToGRPC(p.counted()) && a.Err() == nil && !isClosed(k.call.cc)
}

// overdue asks the plan about an attempt that has reached its timeout.
func (k *contest) overdue(a *attempt, now time.Time) {
	c := k.call
	p := k.plan(now)
	if p.config.isLeftToGRPC(p.counted()) {
		if !p.config.informed { // that may be outdated
			a.bounds().slowness = slowNotYet
		}
		a.bounds().expires = instantOf(now).Add(c.policy.AttemptTimeout)
		return
	}
	f := c.overdueFailure(a, now)
	k.do(p.overdue(c.ctx, &f, p.ledger.noted(now), c.retrier.random()).do)
}

// due asks the plan what is due, and does it.
func (k *contest) due(now time.Time) {
	c := k.call
	p := k.plan(now)
	switch {
	case p.pending.isDecided():
		k.do(p.due(p.ledger.noted(now), c.retrier.random()).do)
	case p.config.isLeftToGRPC(p.counted()):
		p.dueAt = 0
	case (c.delay > 0 || !c.retrier.builtInRetryOff) && isUnconnected(stateOf(c.cc)), c.unresolved != nil && !p.config.informed:
		// Hedges that come due meanwhile would all be sent together when there is a connection, and
		// perhaps although the channel's config allows none.
		p.putOff(instantOf(now))
	default:
		v := p.due(p.ledger.noted(now), 0) // a hedge needs no random number
		c.retrier.report.hedgeJudged(&c.facts, v, now)
		k.do(v.do)
	}
}

// do does what the plan says while attempts are in flight.
func (k *contest) do(what action) {
	switch {
	case what > 0:
		k.cut(int32(what))
	case what == doSend:
		k.send()
	}
}

// cut ends an overdue attempt, unless the application has become bound to its stream, or none can follow any more.
func (k *contest) cut(number int32) {
	c, p := k.call, k.call.plan()
	replaced := p.pending.isDecided()
	for _, a := range k.open {
		switch {
		case a.number != number:
		case replaced && c.isLast != nil && c.isLast(): // since it was decided
			p.undecide()
		case c.stream == nil:
			a.bounds().own.Cancel(ErrAttemptTimeout)
		case !c.stream.cut(a, replaced):
			p.undecide()
		}
	}
}

// send starts a hedge, or an attempt that replaces one of several, on a goroutine of its own.
func (k *contest) send() {
	a := k.call.another()
	k.add(a)
	k.hedges.Go(func() {
		err := errExited // if an interceptor below calls runtime.Goexit; if it panics, the program ends
		defer func() {
			k.guarded(func() { k.ended(a, err) }, a)
		}()
		err = k.hedger.hedge(a)
	})
}

// errExited is the error of an attempt in which runtime.Goexit was called.
var errExited = status.Error(codes.Internal, "grpcretry: the attempt ended its goroutine")

// guarded takes the turn for f. If a callback panics or ends the goroutine, so does the caller's goroutine, which may
// handle it, see repanic. a is the attempt whose end f deals with, nil for none.
func (k *contest) guarded(f func(), a *attempt) {
	k.turn.Take()
	defer k.turn.Give()
	done := false
	defer func() {
		if done {
			return
		}
		if k.crashed, k.panicked = true, recover(); k.panicked == nil {
			k.panicked = exited{}
		}
		k.cancelOpen()
		if a != nil {
			k.forget(a)
		}
	}()
	f()
	done = true
}

// exited stands for a panic if a callback calls [runtime.Goexit].
type exited struct{}

// repanic repeats, on the caller's goroutine, a callback's panic. A call without a contest has none.
func (k *contest) repanic() {
	if k == nil {
		return
	}
	k.turn.Take()
	p := k.panicked
	k.panicked = nil
	k.turn.Give()
	switch p.(type) {
	case nil:
	case exited:
		runtime.Goexit()
	default:
		panic(p) //nolint:forbidigo // it comes from the application, which may handle it
	}
}

// abandon ends the contest after a panic on the caller's goroutine. From then on nothing but the budgets
// receives a report.
func (k *contest) abandon() {
	k.turn.Take()
	k.crashed = true
	k.timer.Stop() // it would keep the call
	k.cancelOpen()
	k.turn.Give()
	k.hedges.Wait()
	k.turn.Take()
	defer k.turn.Give()
	for _, a := range k.open { // it was on the caller's goroutine
		k.forget(a)
	}
	if k.end.attempt != nil {
		k.forget(k.end.attempt)
	}
}

// forget reports an attempt to the budgets if nothing has reported it yet.
func (k *contest) forget(a *attempt) {
	if !a.reported {
		k.call.deposit(a, Ignored)
	}
	a.endContext()
}

// overdueFailure describes an attempt that has reached its timeout.
func (c *call) overdueFailure(a *attempt, now time.Time) failure {
	info := a.asStarted(now)
	info.Duration = now.Sub(info.Start)
	info.Err, info.Unsent = newAttemptTimeoutError(c.policy.AttemptTimeout, nil), isUnconnected(stateOf(c.cc))
	return failure{
		Attempt:   info,
		CtxErr:    endOf(a.bounds().own.Context, now),
		Closed:    isClosed(c.cc),
		Committed: c.stream.isFinal(),
		TimedOut:  true,
		Last:      c.isLast != nil && c.isLast(),
	}
}

// A contested call is a unary call, or a function, that has a contest. It is one allocation.
type contested struct {
	call    call
	contest contest
	first   boundedAttempt
}

// A contestedUnary is a unary call that has a contest.
type contestedUnary struct {
	contested
	req, reply any
	invoker    grpc.UnaryInvoker
}

// contestUnary makes a unary call that is hedged, or has an attempt timeout.
func contestUnary(c *call, req, reply any, invoker grpc.UnaryInvoker) error {
	u := &contestedUnary{req: req, reply: reply, invoker: invoker}
	u.call = *c
	u.contest.join(&u.call)
	if c.mode == modeHedged {
		u.contest.hedger, u.contest.replies = u, replies.TypeOf(reply)
	}
	return u.call.makeAttempts(ending{}, u.first.in, u.race)
}

// race makes an attempt on the caller's goroutine, which receives into the caller's reply, and others
// beside it.
func (u *contestedUnary) race(a *attempt) ending {
	if a.number > 1 {
		replies.Empty(u.reply)
	}
	e := u.contest.race(a, func(a *attempt) error { return u.invoke(a, u.reply) })
	switch {
	case e.err != nil && a.number > 1:
		replies.Empty(u.reply)
	case e.err == nil && e.attempt != a:
		replies.Copy(u.reply, e.attempt.bounds().received)
	}
	if u.call.ownOutputs(e.attempt) {
		u.call.show(e.attempt)
	}
	return e
}

func (u *contestedUnary) invoke(a *attempt, reply any) error {
	return u.invoker(a, u.call.method, u.req, reply, u.call.cc, u.call.attemptOptions(a)...)
}

// hedge makes an attempt with a reply of its own.
func (u *contestedUnary) hedge(a *attempt) error {
	a.bounds().received = u.contest.replies.New()
	return u.invoke(a, a.bounds().received)
}
