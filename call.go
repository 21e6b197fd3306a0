package grpcretry

import (
	"context"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/connectivity"
	"google.golang.org/grpc/status"
)

// A call is one RPC under way, from its first attempt to its end: what the unary and
// the stream loop share. A loop begins it, runs an attempt, and hands the attempt's
// error to next, until next gives no further attempt.
//
// One goroutine at a time uses a call.
type call struct {
	rpc
	own  plan // zero as long as nothing is to be decided
	past past // zero until an attempt has failed
}

// An rpc is what a call is made of before its first attempt.
type rpc struct {
	facts
	retrier *Retrier
	hedges  Budget         // what hedges spend besides; nil if the method is not hedged
	shared  *plan          // the plan, if the timers of attempts use it too; else nil, and call.own is
	delay   time.Duration  // until the next attempt of a hedged call
	learner HedgeDelay     // measures the first attempt; nil if nothing does
	overdue func(*attempt) // what runs when an attempt has reached its timeout; nil for attempt.judgeOverdue
	options callOptions
	stream  *retryStream // nil for a unary call
	first   *attempt     // whose start the timeout of the service config counts from: the first that gRPC had a config for
}

// prepare reads the options of the call, resolves its policy and decides its mode. desc is nil
// for a unary call, reply for a stream.
func (c *call) prepare(opts []grpc.CallOption, desc *grpc.StreamDesc, reply any) error {
	overrides := c.options.read(opts, c.cc, c.method)
	c.static = c.options.static
	if c.options.nested {
		return nil // an outer interceptor retries it
	}
	p, err := c.retrier.policies.forCall(c.method, overrides)
	if err != nil {
		err = status.Error(codes.Internal, err.Error())
		c.options.finish(err)
		return err
	}
	c.policy = p
	c.mode = p.modeOf(desc)
	if c.mode == modeHedged {
		c.tryHedging(desc, reply)
	}
	if c.mode == modePassThrough && c.learner == nil {
		c.retrier.report.callPassed(&c.facts)
	}
	return nil
}

// tryHedging makes the call a hedged one. If that is impossible, or there is no delay yet, the
// call goes as its method would without hedging.
func (c *call) tryHedging(desc *grpc.StreamDesc, reply any) {
	p := c.policy
	c.mode = p.modeUnhedged()
	if obstacle := hedgingObstacle(desc, reply); obstacle != "" {
		c.retrier.report.notHedged(&c.facts, obstacle)
		return
	}
	if _, fixed := p.Hedging.Delay.(hedgeAfter); !fixed {
		c.learner = p.Hedging.Delay
	}
	if delay, ok := p.Hedging.delay(c.method); ok {
		c.mode, c.policy, c.delay = modeHedged, p.hedged, delay
	}
}

// begin starts the call's first attempt, a, which is zero.
func (c *call) begin(a *attempt) {
	cc := c.cc
	dialed, canonical := targetOf(cc), func() string { return canonicalTargetOf(cc) }
	c.budget = budgetFor(c.policy.Budget, dialed, canonical)
	if b := c.policy.hedgeBudget(); b != nil {
		c.hedges = budgetFor(b, dialed, canonical)
	}
	c.options.forget() // what an earlier call left there says nothing about this one
	c.retrier.report.callStarted(&c.facts)
	c.start = sinceOrigin()
	a.Context, a.number, a.start = c.ctx, 1, c.start
	a.fresh = c.retrier.connections.isFresh(c.cc)
	c.first = a
	if c.policy.AttemptTimeout > 0 {
		c.shared = &plan{}
		c.planned(time.Now())
	}
	c.ready(a)
}

// planned returns the plan of the call, which is made when something is to be decided: a call
// that succeeds on its first attempt needs none.
func (c *call) planned(now time.Time) *plan {
	p := c.plan()
	if !p.begun() {
		start := timeOf(c.start, now)
		deadline, _ := c.ctx.Deadline()
		p.begin(c.policy, c.budget, c.hedges, start, deadline)
		if c.mode == modeHedged {
			p.hedgeEvery(c.delay)
		}
		p.send(start)
	}
	p.limit(c.first, now)
	return p
}

// plan returns the plan of the call, which may be zero.
func (c *call) plan() *plan {
	if c.shared != nil {
		return c.shared
	}
	return &c.own
}

// ready prepares an attempt to be handed to gRPC.
func (c *call) ready(a *attempt) {
	a.cc, a.method, a.PeerAddr = c.cc, c.method, &a.peer
	if c.stream != nil || c.mode == modeHedged || c.policy.AttemptTimeout > 0 || c.plan().limited {
		c.bound(a)
	}
	if c.retrier.report.observed() {
		c.reportStart(a)
	}
}

// reportStart revokes the attempt if an observer panics: it is not sent.
func (c *call) reportStart(a *attempt) {
	done := false
	defer func() {
		if !done {
			a.reported = true
			if p := c.plan(); p.begun() {
				p.revoke(int(a.number))
			}
			c.crashed(a)
		}
	}()
	c.retrier.report.attemptStarted(&c.facts, a)
	done = true
}

// crashed ends the attempts of a call when something that the application has given us panics,
// or ends its goroutine; a is the attempt that was in flight, or has just ended.
func (c *call) crashed(a *attempt) {
	defer a.release()
	a.settle() // the timer may be using the plan
	if !a.reported {
		c.deposit(a, Ignored)
	}
	c.plan().leave()
}

// endCrashed ends a call after crashed; err is how it ended for the application, as far as that
// goes.
func (c *call) endCrashed(err error) {
	c.retrier.report.callCrashed(&c.facts, &c.past, err)
	c.options.finish(err)
}

// bound gives an attempt an end of its own, if it needs one.
func (c *call) bound(a *attempt) {
	timed := c.policy.AttemptTimeout > 0 && !c.retrier.leavesToGRPC(c.cc, c.method)
	limited := a.number > 1 && c.plan().limited
	if !timed && c.stream == nil && c.mode != modeHedged && !limited {
		return
	}
	if a.bounds == nil {
		a.bounds = &bounds{}
	}
	if limited {
		a.bounds.limit = c.plan().deadline
	}
	if !timed {
		return
	}
	a.bounds.timeout = c.policy.AttemptTimeout
	if c.shared.attemptTimeout() > 0 {
		a.bounds.retrier, a.bounds.plan = c.retrier, c.shared
		a.expire(c.overdue)
	}
}

// next reports how an attempt ended. It returns the next attempt, after the wait before it, or
// nil and what the call returns.
func (c *call) next(a *attempt, err error) (*attempt, error) {
	if err == nil && a.bounds == nil {
		c.succeed(a, time.Time{})
		return nil, nil
	}
	return c.settled(a, err, time.Time{})
}

// settled is next for an attempt that has failed, or has an end of its own; now is when it ended,
// zero for now.
func (c *call) settled(a *attempt, err error, now time.Time) (*attempt, error) {
	defer a.release()
	done := false
	defer func() {
		if !done { // a classifier or observer panics: no attempt follows
			c.crashed(a)
		}
	}()
	if c.stream == nil {
		if err != nil {
			a.checkUnsent(err)
		}
		a.settle()
		a.repanic(func() { c.deposit(a, Ignored) })
	}
	next, err := c.following(a, err, now)
	done = true
	return next, err
}

// following returns the attempt that follows a, after the wait before it, or nil and what the
// call returns.
func (c *call) following(a *attempt, err error, now time.Time) (*attempt, error) {
	if err == nil {
		c.succeed(a, time.Time{})
		return nil, nil
	}
	step, err := c.decide(a, err, now)
	if step.End {
		return nil, err
	}
	a.release()
	if reason, gone := c.wait(step); reason != nil {
		return nil, c.abandon(reason, gone)
	}
	return c.retry(), nil
}

// decide returns what is to be done after a failed attempt, and what the call returns if that
// is to end.
func (c *call) decide(a *attempt, err error, now time.Time) (step, error) {
	c.collect(a)
	err = readable(truthOf(err, a, c.stream)) // RecvMsg of a stream below may have returned it
	if now.IsZero() {
		now = time.Now()
	}
	if c.leaves(a) {
		c.retrier.report.leftToGRPC(&c.facts)
		return step{End: true}, c.leave(a, err, now)
	}
	p := c.planned(now)
	f := c.failure(a, err, now)
	c.past.record(&f)
	a.reported = true
	step := p.failed(c.ctx, &f, now, c.retrier.random())
	c.retrier.report.attemptFailed(&c.facts, &f.Attempt, step.verdict, now)
	if step.End {
		return step, c.stop(&f, step.verdict, err, now)
	}
	return step, nil
}

// truthOf returns what the error of an attempt means. gRPC returns a bare io.EOF for a unary call
// if the connection was lost while it retried the call transparently.
func truthOf(err error, a *attempt, stream *retryStream) error {
	if stream == nil && isEOF(err) && len(a.trailer) == 0 && a.peer.Addr != nil {
		return errLost
	}
	return err
}

// failure puts together what the plan needs to know.
func (c *call) failure(a *attempt, err error, now time.Time) failure {
	f := failure{
		Attempt:   a.ended(err, now),
		CtxErr:    c.plan().gone(c.ctx, now),
		Closed:    isClosed(c.cc),
		Committed: a.fate == fateCommitted || c.policy.CommitOnHeaders && a.header != nil,
	}
	if f.CtxErr == nil && a.timedOut(err) {
		f.TimedOut = true
		f.Attempt.Err = newAttemptTimeoutError(c.policy.AttemptTimeout, err)
	}
	f.Unsent = a.fate == fateUnsent
	f.Attempt.Unsent = f.Unsent
	return f
}

// endOf returns why a context has ended, nil if it has not. At the very moment of the deadline
// a server may report it before the context does.
func endOf(ctx context.Context, now time.Time) error {
	if ctx.Err() != nil {
		return causeOf(ctx)
	}
	if d, limited := ctx.Deadline(); limited && !now.Before(d) {
		return context.DeadlineExceeded
	}
	return nil
}

// causeOf returns why a context has ended. A reason of ours is another call's.
func causeOf(ctx context.Context) error {
	cause := readable(context.Cause(ctx))
	if isReason(cause) {
		return anothers{cause}
	}
	return cause
}

func isClosed(cc *grpc.ClientConn) bool {
	return cc != nil && cc.GetState() == connectivity.Shutdown
}

// leaves reports whether gRPC has retried the call that a was the first attempt of, or the
// first that reached a server.
func (c *call) leaves(a *attempt) bool {
	return int(a.number) == c.plan().unsent+1 && !a.isCut() && c.retrier.leavesToGRPC(c.cc, c.method)
}

// leavesToGRPC reports whether gRPC retries the method itself. On a fresh channel that is known
// only once an attempt has been made.
func (r *Retrier) leavesToGRPC(cc *grpc.ClientConn, method string) bool {
	return !r.builtInRetryOff && cc != nil && cc.GetMethodConfig(method).RetryPolicy != nil
}

// wait returns when the next attempt is to be sent, or when the call is to end because of
// reason. It ends immediately with the caller's context, which gone reports, and with the
// ClientConn.
func (c *call) wait(step step) (reason error, gone bool) {
	p := c.plan()
	for {
		if step.Send {
			return whyUnsendable(c.ctx, c.cc)
		}
		connected := false
		if d := time.Until(p.dueAt); d > 0 {
			connected = c.retrier.connections.pause(c.ctx, c.cc, d, step.Connect)
		}
		now := time.Now()
		gone := c.plan().gone(c.ctx, now)
		switch {
		case gone != nil:
			return gone, true
		case isClosed(c.cc):
			return errConnClosed, false
		case connected:
			step = p.connected(now)
			c.retrier.report.connected(&c.facts, step.verdict)
		default:
			step = p.due(now)
		}
		if step.End {
			return step.Reason, false
		}
	}
}

// whyUnsendable returns why no attempt can be sent any more: nil if one can.
func whyUnsendable(ctx context.Context, cc *grpc.ClientConn) (reason error, gone bool) {
	if ctx.Err() != nil {
		return causeOf(ctx), true
	}
	if isClosed(cc) {
		return errConnClosed, false
	}
	return nil, false
}

// abandon ends a call in the wait before a retry, which is then never sent.
func (c *call) abandon(reason error, gone bool) error {
	c.plan().leave()
	c.retrier.report.waitStopped(&c.facts, reason)
	return c.giveUp(&c.past.last, verdict{Reason: reason}, gone, time.Now())
}

// retry starts the next attempt.
func (c *call) retry() *attempt {
	c.options.forget()
	last, now := &c.past.last, origin.Add(sinceOrigin()) // in half the time of time.Now
	c.past.idle += now.Sub(origin) - (last.Start.Sub(origin) + last.Duration)
	a := c.another(c.plan().send(now), now)
	if c.first.fresh && !c.plan().limited { // gRPC had no service config until now
		c.first, a.fresh = a, c.retrier.connections.isFresh(c.cc)
	}
	return a
}

// another returns the attempt that the plan has just been told of.
func (c *call) another(sent sending, now time.Time) *attempt {
	a := &attempt{
		Context: withoutPreviousAttempts(c.ctx),
		number:  int32(sent.number),
		hedge:   sent.hedge,
		start:   now.Sub(origin),
		wait:    sent.wait,
		source:  shortSource(sent.source),
	}
	c.ready(a)
	return a
}

// deposit reports to the budgets how an attempt ended that succeeded, or that the rules were
// not asked about.
func (c *call) deposit(a *attempt, r Result) {
	a.reported = true
	switch p := c.plan(); {
	case !p.begun():
		o := Outcome{Attempt: 1, Result: r} // there is no other
		c.budget.Deposit(o)
		if c.hedges != nil {
			c.hedges.Deposit(o)
		}
	case r == Succeeded:
		p.succeeded(Outcome{Attempt: int(a.number), Hedge: a.hedge, Late: a.isLate()})
	default:
		p.lost(Outcome{Attempt: int(a.number), Hedge: a.hedge})
	}
}

// succeed ends a call whose attempt a succeeded, at the time at; zero means now.
func (c *call) succeed(a *attempt, at time.Time) {
	c.deposit(a, Succeeded)
	if c.stream != nil {
		c.stream.ending(nil)
	}
	if c.options.targets {
		c.collect(a)
	}
	c.retrier.report.callSucceeded(&c.facts, &c.past, a, at)
	c.options.finish(nil)
}

// lost takes in an attempt that ended after another was decisive.
func (c *call) lost(a *attempt, now time.Time) {
	c.deposit(a, Ignored)
	info := a.ended(errHedgeLost, now)
	c.past.keep(info)
	c.retrier.report.attemptLost(&c.facts, &info)
}

// stop ends a call after the verdict not to try again. A first failure that was never one
// to retry is returned as it came, and so is the failure of a committed stream, and of a
// call that could have been hedged, but not retried.
func (c *call) stop(f *failure, v verdict, err error, now time.Time) error {
	if f.Committed && c.stream != nil || c.past.failures == 1 && v.untouched || c.policy.MaxAttempts == 1 {
		if f.TimedOut {
			err = f.Attempt.Err
		}
		c.end(&callFailure{last: f.Attempt, err: err, reason: v.Reason, at: now})
		return err
	}
	return c.giveUp(&f.Attempt, v, f.CtxErr != nil, now)
}

// leave ends a call that gRPC has retried itself: its error is the call's.
func (c *call) leave(a *attempt, err error, now time.Time) error {
	c.deposit(a, Ignored)
	c.plan().leave()
	info := a.ended(err, now)
	c.retrier.report.attemptFailed(&c.facts, &info, verdict{Reason: errLeftToGRPC}, now)
	c.end(&callFailure{last: info, err: err, reason: errLeftToGRPC, at: now})
	return err
}

// giveUp ends a call with an Error, last being the attempt that failed last; gone says
// that the caller's context has ended.
func (c *call) giveUp(last *Attempt, v verdict, gone bool, now time.Time) error {
	err := &Error{
		Last:     c.past.said,
		Reason:   v.Reason,
		Attempts: c.past.all(),
		Elapsed:  now.Sub(origin) - c.start,

		wait:   v.Wait,
		source: v.WaitSource,
		made:   c.past.made(0),
	}
	if err.Last == nil {
		err.Last = last.Err
	}
	if gone {
		err.ctx = context.DeadlineExceeded
		if c.ctx.Err() == context.Canceled {
			err.ctx = context.Canceled
		}
	}
	c.end(&callFailure{last: *last, err: err, gaveUp: err, reason: v.Reason, at: now})
	return err
}

// end is the last thing that happens in a call that failed.
func (c *call) end(how *callFailure) {
	if c.stream != nil {
		c.stream.ending(how.err)
	}
	c.retrier.report.callFailed(&c.facts, &c.past, how)
	c.options.finish(how.err)
}
