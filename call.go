package grpcretry

import (
	"context"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/grpcretry/grpcretry/internal/layers"
)

// A call is one RPC from its first attempt to its end, as shared by the unary and the stream loop.
// A loop calls begin, runs an attempt, and hands the attempt's error to next, until next returns
// no further attempt.
//
// One goroutine at a time uses a call.
type call struct {
	rpc
	ownPlan plan    // zero until there is something to decide; unused if there is a sharedPlan
	history history // zero until an attempt has failed
}

// An rpc is the part of a call that is known before its first attempt. The goroutines of a hedged
// call share it.
type rpc struct {
	facts
	retrier *Retrier
	options callOptions
	stream  *retryStream // nil for a unary call
	first   *attempt     // the timeout of the service config counts from its start: the first that gRPC had a config for
	newest  *attempt     // the next attempt shares its extras

	hedges  Budget        // the additional budget of hedges; nil if the method is not hedged
	delay   time.Duration // until the next attempt of a hedged call
	learner HedgeDelay    // measures the first attempt; nil if nothing does

	unresolved *unresolvedPolicy // set if the policy depends on the service config of a fresh channel

	discard func()      // runs before the wait for another attempt; nil for none
	isLast  func() bool // reports that no attempt can follow the one in flight; nil if one always can

	sharedPlan *plan          // the plan, if the attempts' timers use it too; otherwise nil
	overdue    func(*attempt) // runs when an attempt has reached its timeout; nil for attempt.judgeOverdue
}

// prepare reads the call's options, resolves its policy and chooses its mode. desc is nil for a
// unary call, reply for a stream. The policy stays nil if an outer interceptor retries the call.
func (c *call) prepare(opts []grpc.CallOption, desc *grpc.StreamDesc, reply any) error {
	overrides := c.options.read(opts, c.cc, c.method)
	c.static = c.options.static
	if c.options.nested {
		return nil // an outer interceptor retries it
	}
	if c.options.leftover {
		c.retrier.warnOfLeftover(c.method)
	}
	c.worksFor = layers.Of(c.ctx)
	policies := c.retrier.settings.current()
	p, err := policies.forCall(c.cc, c.method, overrides)
	if err != nil {
		err = status.Error(codes.Internal, err.Error())
		c.options.finish(err)
		return err
	}
	if c.worksFor.IsRetry() && c.retrier.mayLeaveToGRPC(p, c.cc, c.method) {
		p = p.insteadOfGRPC() // gRPC's retries would be further attempts
	}
	c.policy = p
	c.mode = p.modeOf(desc)
	switch {
	case c.mode != modeHedged:
	case c.worksFor.IsRetry():
		c.mode = p.modeUnhedged() // a hedge would be another attempt
	default:
		c.tryHedging(desc, reply)
	}
	if policies.channels != nil && !p.passesStream(desc) && awaitsConfig(c.cc) {
		c.expectConfig(policies, overrides)
	}
	if c.mode == modePassThrough && c.learner == nil {
		c.retrier.report.callPassed(&c.facts)
	}
	return nil
}

// tryHedging chooses the hedged mode. If hedging is impossible, or there is no delay yet, it
// chooses the mode that the method would have without hedging.
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

// begin starts the call's first attempt; a is a zero attempt, to be filled in.
func (c *call) begin(a *attempt) {
	cc, runsOn, dialed := c.cc, c.runsOn, c.dialed() // so that the call can stay on the stack
	budget := func(b Budget) Budget {
		if runsOn != "" {
			return budgetNamed(b, runsOn)
		}
		return budgetFor(b, dialed, func() string { return canonicalTarget(cc, "") })
	}
	c.budget = budget(c.policy.Budget)
	if b := c.policy.hedgeBudget(); b != nil {
		c.hedges = budget(b)
	}
	c.options.clear() // an earlier call may have filled the same variables
	c.retrier.report.callStarted(&c.facts)
	c.start = sinceOrigin()
	a.Context, a.number, a.start = c.ctx, 1, c.start
	a.fresh = c.retrier.connections.isFresh(c.cc)
	c.first, c.newest = a, a
	if c.policy.AttemptTimeout > 0 {
		c.sharedPlan = &plan{}
		c.planned(time.Now())
	}
	c.ready(a)
}

// planned returns the call's plan. The plan starts when there is something to decide: a call that
// succeeds on its first attempt needs none.
func (c *call) planned(now time.Time) *plan {
	p := c.plan()
	if !p.begun() {
		start := timeOf(c.start, now)
		deadline, _ := c.ctx.Deadline()
		p.begin(c.policy, c.budget, c.hedges, start, deadline)
		p.unresolved, p.dials, p.once = c.unresolved, c.runsOn != "", c.worksFor.IsRetry()
		if c.mode == modeHedged {
			p.hedgeEvery(c.delay)
		}
		p.send(start)
	}
	p.readServiceConfig(c.first, now)
	return p
}

// plan returns the call's plan, which may be zero.
func (c *call) plan() *plan {
	if c.sharedPlan != nil {
		return c.sharedPlan
	}
	return &c.ownPlan
}

// ready completes an attempt before it is handed to gRPC.
func (c *call) ready(a *attempt) {
	a.cc, a.method, a.PeerAddr = c.cc, c.method, &a.peer
	if c.stream != nil || c.mode == modeHedged || c.policy.AttemptTimeout > 0 || c.plan().limited {
		c.setBounds(a)
	}
	if c.retrier.report.observed() {
		c.reportStart(a)
	}
}

// reportStart reports that an attempt starts. If an observer panics, the attempt is revoked, because
// it is not sent.
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

// setBounds gives an attempt bounds of its own, if it needs any.
func (c *call) setBounds(a *attempt) {
	timed := c.policy.AttemptTimeout > 0 && !c.retrier.leavesToGRPC(c.policy, c.cc, c.method)
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
	a.bounds.timeout, a.bounds.isLast = c.policy.AttemptTimeout, c.isLast
	if c.sharedPlan.attemptTimeout() > 0 {
		a.bounds.retrier, a.bounds.plan = c.retrier, c.sharedPlan
		a.expire(c.overdue)
	}
}

// next takes the result of an attempt. It returns the next attempt, after the wait before it, or
// nil and the result of the call.
func (c *call) next(a *attempt, err error) (*attempt, error) {
	if err == nil && a.bounds == nil {
		c.succeed(a, time.Time{})
		return nil, nil
	}
	return c.settled(a, err, time.Time{})
}

// settled is next for an attempt that has failed, or has bounds; now is the attempt's end, zero for
// the current time.
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

// following returns the attempt that follows, after the wait before it, or nil and the result of
// the call.
func (c *call) following(a *attempt, err error, now time.Time) (*attempt, error) {
	if err == nil {
		c.succeed(a, time.Time{})
		return nil, nil
	}
	step, err := c.judge(a, err, now)
	if step.End {
		return nil, err
	}
	a.release()
	if c.discard != nil {
		c.discard()
	}
	if reason, gone := c.wait(step); reason != nil {
		return nil, c.abort(reason, gone)
	}
	c.retrier.report.waitEnded(&c.facts)
	return c.retry(), nil
}

// judge asks the plan about a failed attempt. It returns the plan's step and, if that ends the
// call, the error that the call returns.
func (c *call) judge(a *attempt, err error, now time.Time) (step, error) {
	c.collect(a)
	err = readable(truthOf(err, a, c.stream)) // RecvMsg of a stream below may have returned it
	if now.IsZero() {
		now = time.Now()
	}
	if c.retriedByGRPC(a) {
		c.retrier.report.leftToGRPC(&c.facts)
		return step{End: true}, c.leaveToGRPC(a, err, now)
	}
	p := c.plannedAfter(a, now)
	if c.passesAfterAll(p) {
		return step{End: true}, c.passAfterAll(a, err, now)
	}
	f := c.failure(a, err, now)
	c.history.record(&f)
	a.reported = true
	step := p.failed(c.ctx, &f, now, c.retrier.random())
	c.retrier.report.attemptFailed(&c.facts, &f.Attempt, step.verdict, now)
	if step.End {
		return step, c.stop(&f, step.verdict, err, now)
	}
	c.retrier.report.waitStarted(&c.facts, f.Attempt.Number+1, step.verdict, now)
	return step, nil
}

// truthOf returns what the error of an attempt means. gRPC returns a bare io.EOF for a unary call
// if it could not send the request again in a transparent retry, see stream_empty.go.
func truthOf(err error, a *attempt, stream *retryStream) error {
	if stream == nil && isEOF(err) && a.peer.Addr != nil {
		return errLost
	}
	return err
}

// failure describes a failed attempt to the plan.
func (c *call) failure(a *attempt, err error, now time.Time) failure {
	f := failure{
		Attempt:   a.asEnded(err, now),
		CtxErr:    c.plan().gone(c.ctx, now),
		Closed:    isClosed(c.cc),
		Committed: a.fate == fateCommitted || c.policy.CommitOnHeaders && a.header != nil,
	}
	if f.CtxErr == nil && a.timedOut(err) {
		f.TimedOut = true
		f.Attempt.Err = newAttemptTimeoutError(c.policy.AttemptTimeout, err)
	}
	f.NotRun = a.hasNotRun()
	f.Unsent = a.fate == fateUnsent && (f.NotRun || !c.policy.UnsentOnly)
	f.Attempt.Unsent = f.Unsent
	return f
}

// retriedByGRPC reports whether gRPC has retried the call itself, beneath its first attempt, or
// beneath the first one that reached a server.
func (c *call) retriedByGRPC(a *attempt) bool {
	return int(a.number) == c.plan().unsent+1 && !a.isCut() && c.retrier.leavesToGRPC(c.policy, c.cc, c.method)
}

// leavesToGRPC reports whether gRPC retries the method itself. On a fresh channel that is known
// only once an attempt has been made.
func (r *Retrier) leavesToGRPC(p *policy, cc *grpc.ClientConn, method string) bool {
	return !r.builtInRetryOff && !p.overGRPC && cc != nil && cc.GetMethodConfig(method).RetryPolicy != nil
}

// stopsGRPC reports whether gRPC must be kept from retrying the method itself. The policy is nil for an
// attempt of an outer interceptor.
func (r *Retrier) stopsGRPC(p *policy, cc *grpc.ClientConn, method string) bool {
	return !r.builtInRetryOff && p != nil && p.overGRPC && cc != nil && mayBeRetriedByGRPC(cc, method)
}

// mayLeaveToGRPC reports whether gRPC retries the method itself, or may do so when it has a service config.
func (r *Retrier) mayLeaveToGRPC(p *policy, cc *grpc.ClientConn, method string) bool {
	return !r.builtInRetryOff && !p.overGRPC && cc != nil && mayBeRetriedByGRPC(cc, method)
}

func mayBeRetriedByGRPC(cc *grpc.ClientConn, method string) bool {
	return cc.GetMethodConfig(method).RetryPolicy != nil || awaitsConfig(cc)
}

// noBuiltInRetry keeps gRPC from retrying a call once its first message is sent, because the message
// does not fit into the buffer for its replay. A negative size would cover the moments before that as
// well, but gRPC panics.
func noBuiltInRetry() grpc.CallOption { return noReplay{} }

// noReplay is gRPC's MaxRetryRPCBufferSize(0) in a type of our own, so that it is not taken for the
// caller's if an interceptor below passes the options on to another ClientConn.
type noReplay struct {
	grpc.MaxRetryRPCBufferSizeCallOption
}

// bindToGRPC keeps gRPC from retrying a stream that it has opened, also before the first message:
// Context commits it, unless an interceptor below has replaced that method.
func (r *Retrier) bindToGRPC(p *policy, cc *grpc.ClientConn, method string, stream grpc.ClientStream) {
	if r.stopsGRPC(p, cc, method) {
		stream.Context()
	}
}

// wait returns when the next attempt is to be sent, or when the call is to end because of
// reason. It returns immediately when the ClientConn is closed, or the caller's context ends; gone
// reports the latter.
func (c *call) wait(step step) (reason error, gone bool) {
	p := c.plan()
	for {
		if step.Send {
			return whyUnsendable(c.ctx, c.cc)
		}
		connected := false
		if d := time.Until(p.dueAt); d > 0 {
			connected = c.pause(d, step.Connect)
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

// pause waits for a time; if connects, at most until there is a connection, which it then reports.
func (c *call) pause(d time.Duration, connects bool) (connected bool) {
	waiting := &c.retrier.usage.waiting
	waiting.Add(1)
	defer waiting.Add(-1)
	return c.retrier.connections.pause(c.ctx, c.cc, d, connects)
}

// whyUnsendable returns why no attempt can be sent any more, nil if one can.
func whyUnsendable(ctx context.Context, cc *grpc.ClientConn) (reason error, gone bool) {
	if ctx.Err() != nil {
		return causeOf(ctx), true
	}
	if isClosed(cc) {
		return errConnClosed, false
	}
	return nil, false
}

// retry starts the next attempt.
func (c *call) retry() *attempt {
	c.options.clear()
	last, now := &c.history.last, origin.Add(sinceOrigin()) // in half the time of time.Now
	c.history.idle += now.Sub(origin) - (last.Start.Sub(origin) + last.Duration)
	a := c.newAttempt(c.plan().send(now), now)
	if c.first.fresh && !c.plan().limited { // gRPC had no service config until now
		c.first, a.fresh = a, c.retrier.connections.isFresh(c.cc)
	}
	c.ready(a)
	return a
}

// newAttempt returns an attempt after the first, which the caller then makes ready.
func (c *call) newAttempt(sent sending, now time.Time) *attempt {
	a := &attempt{
		Context: withoutPreviousAttempts(c.ctx),
		number:  int32(sent.number),
		hedge:   sent.hedge,
		start:   now.Sub(origin),
		wait:    sent.wait,
		source:  smallSource(sent.source),
	}
	if c.mode == modeHedged { // the newest one is in flight, and may need extras later
		c.newest.ownExtras()
	}
	a.extras.Store(c.newest.extras.Load())
	c.newest = a
	return a
}

// deposit reports an attempt's result to the budgets. It is for attempts that succeeded, or that the
// plan was not asked about.
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
