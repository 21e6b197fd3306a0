package grpcretry

import (
	"context"
	"errors"
	"slices"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/connectivity"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
)

// A call is one RPC under way, from its first attempt to its end: what the unary and
// the stream loop share. A loop begins it, runs an attempt, and hands the attempt's
// error to next, until next gives no further attempt.
//
// One goroutine at a time uses a call.
type call struct {
	rpc
	own  Plan // zero as long as nothing is to be decided
	past past // zero until an attempt has failed
}

// An rpc is what a call is made of before its first attempt.
type rpc struct {
	retrier *Retrier
	policy  *policy
	budget  Budget
	hedges  Budget          // what hedges spend besides; nil if the method is not hedged
	shared  *Plan           // the plan, if the timers of attempts use it too; else nil, and call.own is
	delay   time.Duration   // of a hedged call
	overdue func(*attempt)  // what runs when an attempt has reached its timeout; nil for attempt.judgeOverdue
	ctx     context.Context // the caller's, within the call span if there is one
	cc      *grpc.ClientConn
	method  string
	options callOptions
	stream  *retryStream  // nil for a unary call
	start   time.Duration // since the origin
	first   *attempt
	spans   *callSpans // nil where nobody records
}

// The past of a call is what is remembered of its attempts that have not succeeded.
type past struct {
	last     Attempt   // the attempt that ended last: most calls have no other, and no memory for more
	earlier  []Attempt // the attempts that ended before it, in that order; the latest, fewer than maxKept
	bytes    int       // what servers have sent in those
	failures int
	said     error         // the last failure that was a server's word, not a timeout or the caller
	idle     time.Duration // without an attempt in flight, before the one in flight now
}

// none says that no attempt has ended yet.
func (p *past) none() bool { return p.last.Number == 0 }

// all are the attempts, and more that ended, in the order of their numbers.
func (p *past) all(more ...Attempt) []Attempt {
	all := slices.Concat(p.earlier, []Attempt{p.last}, more)
	slices.SortFunc(all, func(a, b Attempt) int { return a.Number - b.Number })
	return all
}

// What bounds the memory of a call with very many attempts, or with large failures.
const (
	maxKept        = 1000
	maxKeptBytes   = 16 << 10 // of all attempts but the last, together; of others, only this much:
	maxKeptMessage = 256
)

// prepare readies a call, which is not more than what the application has said of it, to
// be retried. policy is nil of a call that is to pass straight through.
func (c *call) prepare(opts []grpc.CallOption) error {
	overrides := c.options.read(opts, c.cc, c.method)
	if c.options.nested {
		return nil
	}
	p, err := c.retrier.policies.forCall(c.method, overrides)
	if err != nil {
		err = status.Error(codes.Internal, err.Error())
		c.options.finish(err)
		return err
	}
	if p.MaxAttempts > 1 || p.Hedging != nil {
		c.policy = p
	}
	return nil
}

// begin starts the call's first attempt, a, which is zero.
func (c *call) begin(a *attempt) {
	c.budget = budgetFor(c.policy.Budget, c.target(), c.canonicalTarget)
	if b := c.policy.hedgeBudget(); b != nil {
		c.hedges = budgetFor(b, c.target(), c.canonicalTarget)
	}
	if c.options.targets {
		c.forget() // what an earlier call left there says nothing about this one
	}
	c.startSpan()
	c.start = sinceOrigin()
	a.Context, a.number, a.start = c.ctx, 1, c.start
	a.fresh = c.retrier.connections.isFresh(c.cc)
	c.first = a
	if c.policy.AttemptTimeout > 0 {
		c.shared = &Plan{}
		c.planned(time.Now())
	}
	c.ready(a)
}

// planned returns the plan of the call, which is made when something is to be decided: a call
// that succeeds on its first attempt needs none.
func (c *call) planned(now time.Time) *Plan {
	p := c.plan()
	if !p.begun() {
		start := timeOf(c.start, now)
		deadline, _ := c.ctx.Deadline()
		p.begin(c.policy, c.budget, c.hedges, start, deadline)
		if c.policy.hedges {
			p.Hedge(c.delay)
		}
		p.send(start)
	}
	p.limit(c.first, now)
	return p
}

// plan returns the plan of the call, which may be zero.
func (c *call) plan() *Plan {
	if c.shared != nil {
		return c.shared
	}
	return &c.own
}

// ready prepares an attempt to be handed to gRPC.
func (c *call) ready(a *attempt) {
	a.cc, a.method, a.PeerAddr = c.cc, c.method, &a.peer
	if c.stream != nil || c.policy.hedges || c.policy.AttemptTimeout > 0 || c.plan().limited {
		c.bound(a)
	}
	if c.observed() {
		c.observeStart(a)
	}
}

func (c *call) observeStart(a *attempt) {
	done := false
	defer func() {
		if !done { // the attempt is not sent
			a.reported = true
			if p := c.plan(); p.begun() {
				p.revoke(int(a.number))
			}
			c.crashed(a)
		}
	}()
	c.observe(Event{Kind: AttemptStart, Attempt: a.begun(time.Now())})
	done = true
}

// crashed ends the attempts of a call when something that the application has given us panics,
// or ends its goroutine; a is the attempt that was in flight, or has just ended.
func (c *call) crashed(a *attempt) {
	defer a.release()
	if !a.reported {
		c.deposit(a, Ignored)
	}
	c.plan().Leave()
}

// endCrashed ends a call after crashed.
func (c *call) endCrashed() {
	c.endSpan(0, errPanicked, nil)
	c.options.finish(errPanicked)
}

// bound gives an attempt an end of its own, if it needs one.
func (c *call) bound(a *attempt) {
	timed := c.policy.AttemptTimeout > 0 && !c.leftToGRPC()
	limited := a.number > 1 && c.plan().limited
	if !timed && c.stream == nil && !c.policy.hedges && !limited {
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
	if c.shared.AttemptTimeout() > 0 {
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
func (c *call) decide(a *attempt, err error, now time.Time) (Step, error) {
	c.collect(a)
	err = readable(c.truth(a, err)) // RecvMsg of a stream below may have returned it
	if now.IsZero() {
		now = time.Now()
	}
	if c.leaves(a) {
		c.retrier.log.logLeftToGRPC(c)
		return Step{End: true}, c.leave(a, err, now)
	}
	p := c.planned(now)
	f := c.failure(a, err, now)
	c.record(&f)
	a.reported = true
	step := p.Failed(c.ctx, &f, now, c.retrier.random())
	c.report(&f, step.Verdict, now)
	if step.End {
		return step, c.stop(&f, step.Verdict, err, now)
	}
	return step, nil
}

// truth is what the error of an attempt means. gRPC returns a bare io.EOF for a unary call if the
// connection was lost while it retried the call transparently.
func (c *call) truth(a *attempt, err error) error {
	if c.stream == nil && isEOF(err) && len(a.trailer) == 0 && a.peer.Addr != nil {
		return errLost
	}
	return err
}

// failure puts together what the plan needs to know.
func (c *call) failure(a *attempt, err error, now time.Time) Failure {
	f := Failure{
		Attempt:   a.ended(err, now),
		CtxErr:    c.callerGone(now),
		Closed:    c.closed(),
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

// callerGone returns why the call has ended by itself, nil if it has not.
func (c *call) callerGone(now time.Time) error { return c.plan().gone(c.ctx, now) }

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

func (c *call) closed() bool { return isClosed(c.cc) }

func isClosed(cc *grpc.ClientConn) bool {
	return cc != nil && cc.GetState() == connectivity.Shutdown
}

// leaves reports whether gRPC has retried the call that a was the first attempt of, or the
// first that reached a server.
func (c *call) leaves(a *attempt) bool {
	return int(a.number) == c.plan().unsent+1 && !a.isCut() && c.leftToGRPC()
}

// leftToGRPC reports whether gRPC retries the method itself. On a fresh channel that is known
// only once an attempt has been made.
func (c *call) leftToGRPC() bool { return c.retrier.leavesToGRPC(c.cc, c.method) }

func (r *Retrier) leavesToGRPC(cc *grpc.ClientConn, method string) bool {
	return !r.builtInRetryOff && cc != nil && cc.GetMethodConfig(method).RetryPolicy != nil
}

// record remembers a failed attempt.
func (c *call) record(f *Failure) {
	p := &c.past
	p.keep(f.Attempt)
	p.failures++
	if !f.TimedOut && !f.isCallers() {
		p.said = f.Attempt.Err
	}
}

func (p *past) keep(a Attempt) {
	if !p.none() {
		p.keepEarlier(p.last)
	}
	p.last = a
}

func (p *past) keepEarlier(a Attempt) {
	if len(p.earlier) == maxKept-1 {
		p.earlier = slices.Delete(p.earlier, 0, maxKept/2)
	}
	if p.earlier == nil {
		p.earlier = make([]Attempt, 0, defaultMaxAttempts-1) // once for most calls
	}
	if p.bytes += bytesOf(&a); p.bytes > maxKeptBytes {
		a.Header, a.Trailer, a.Err = nil, nil, shortened(a.Err)
	}
	p.earlier = append(p.earlier, a)
}

// bytesOf is about the memory that what a server has sent takes. The details of a status are
// also in the trailer.
func bytesOf(a *Attempt) int {
	bytes := len(status.Convert(a.Err).Message())
	for _, md := range []metadata.MD{a.Header, a.Trailer} {
		for key, values := range md {
			bytes += len(key)
			for _, value := range values {
				bytes += len(value)
			}
		}
	}
	return bytes
}

// shortened returns the error of an attempt with a short message and without details. An error
// that is no status is left as it is.
func shortened(err error) error {
	st, ok := status.FromError(err)
	if !ok || err == errHedgeLost || errors.Is(err, ErrAttemptTimeout) { //nolint:errorlint // its only value
		return err
	}
	return status.Error(st.Code(), shortText(st.Message(), maxKeptMessage))
}

// report tells span, logger and observers how an attempt failed and what comes of it.
func (c *call) report(f *Failure, v Verdict, now time.Time) {
	c.traceFailure(&f.Attempt, v, now)
	c.logDecision(&f.Attempt, v, now)
	if m := c.retrier.meter; m != nil {
		m.failed(c, f, v)
	}
	if c.observed() {
		c.observe(Event{Kind: AttemptEnd, Attempt: f.Attempt})
		c.observe(Event{Kind: Decision, Attempt: f.Attempt,
			Retry: v.Retry, Wait: v.Wait, WaitSource: v.WaitSource, Reason: v.Reason})
	}
}

// wait returns when the next attempt is to be sent, or when the call is to end because of
// reason. It ends immediately with the caller's context, which gone reports, and with the
// ClientConn.
func (c *call) wait(step Step) (reason error, gone bool) {
	p := c.plan()
	for {
		if step.Send {
			return c.gone()
		}
		connected := false
		if d := time.Until(p.DueAt()); d > 0 {
			connected = c.pause(d, step.Connect)
		}
		now := time.Now()
		switch {
		case c.callerGone(now) != nil:
			return c.callerGone(now), true
		case c.closed():
			return ErrConnClosed, false
		case connected:
			step = p.Connected(now)
			c.reportConnected(step.Verdict)
		default:
			step = p.Due(now)
		}
		if step.End {
			return step.Reason, false
		}
	}
}

// gone returns why no attempt can be sent any more: nil if one can.
func (c *call) gone() (reason error, gone bool) {
	if c.ctx.Err() != nil {
		return causeOf(c.ctx), true
	}
	if c.closed() {
		return ErrConnClosed, false
	}
	return nil, false
}

// pause lets d pass. It ends immediately with the caller's context, with the ClientConn and, if
// the call waits for a connection, with that: then connected is true.
func (c *call) pause(d time.Duration, connect bool) (connected bool) {
	timer := time.NewTimer(d)
	defer timer.Stop()
	var ready, closed <-chan struct{}
	var unwatch func()
	if connect {
		ready, closed, unwatch = c.retrier.connections.await(c.cc)
	} else {
		closed, unwatch = c.retrier.connections.watch(c.cc, d)
	}
	defer unwatch()
	select {
	case <-timer.C:
	case <-ready:
		return true
	case <-closed:
	case <-c.ctx.Done():
	}
	return false
}

// abandon ends a call in the wait before a retry, which is then never sent.
func (c *call) abandon(reason error, gone bool) error {
	c.plan().Leave()
	c.traceStop(reason)
	return c.giveUp(&c.past.last, Verdict{Reason: reason}, gone, time.Now())
}

// retry starts the next attempt.
func (c *call) retry() *attempt {
	c.forget()
	last, now := &c.past.last, origin.Add(sinceOrigin()) // in half the time of time.Now
	c.past.idle += now.Sub(origin) - (last.Start.Sub(origin) + last.Duration)
	return c.another(c.plan().send(now), now)
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

// succeed ends a call whose attempt a succeeded, at the time at if that is not now.
func (c *call) succeed(a *attempt, at time.Time) {
	c.deposit(a, Succeeded)
	if c.stream != nil {
		c.stream.ending(nil)
	}
	if a.number > 1 {
		c.collect(a)
	}
	if c.spans != nil || c.observed() {
		now := time.Now()
		if at.IsZero() {
			at = now
		}
		c.collect(a)
		info := a.ended(nil, at)
		c.traceSuccess(&info)
		if c.observed() {
			c.observe(Event{Kind: AttemptEnd, Attempt: info})
			c.observe(Event{Kind: CallEnd, Attempt: info, Elapsed: c.elapsed(now), Attempts: c.attemptsWith(info)})
		}
	}
	if m := c.retrier.meter; m != nil {
		m.succeeded(c, a)
	}
	c.endSpan(int(a.number), nil, nil)
	c.options.finish(nil)
}

// attemptsWith is all the attempts of a call that succeeded, nil if there was only that one.
func (c *call) attemptsWith(succeeded Attempt) []Attempt {
	if c.past.none() {
		return nil
	}
	return c.past.all(succeeded)
}

// made is the number of attempts, one of which has the number given.
func (c *call) made(number int) int {
	number = max(number, c.past.last.Number)
	for i := range c.past.earlier {
		number = max(number, c.past.earlier[i].Number)
	}
	return number
}

// lastEnd is when the last attempt under way ended, decisive or not.
func (c *call) lastEnd(decisive *Attempt) time.Time {
	last := decisive.Start.Add(decisive.Duration)
	if c.policy.hedges {
		for _, a := range c.past.all() {
			if end := a.Start.Add(a.Duration); end.After(last) {
				last = end
			}
		}
	}
	return last
}

// lost tells of an attempt that ended after another was decisive.
func (c *call) lost(a *attempt, now time.Time) {
	c.deposit(a, Ignored)
	info := a.ended(errHedgeLost, now)
	c.past.keep(info)
	c.traceLost(&info)
	if m := c.retrier.meter; m != nil {
		m.lost(c, a)
	}
	if c.observed() {
		c.observe(Event{Kind: AttemptEnd, Attempt: info})
	}
}

// reportConnected tells of a connection that the call has waited for.
func (c *call) reportConnected(v Verdict) {
	if m := c.retrier.meter; m != nil && v.Retry {
		m.connected(c, v)
	}
}

// reportDue tells of a hedge that was due.
func (c *call) reportDue(v Verdict, now time.Time) {
	c.logDue(v, now)
	if m := c.retrier.meter; m != nil {
		m.due(c, v)
	}
}

// stop ends a call after the verdict not to try again. A first failure that was never one
// to retry is returned as it came, and so is the failure of a committed stream, and of a
// call that could have been hedged, but not retried.
func (c *call) stop(f *Failure, v Verdict, err error, now time.Time) error {
	if f.Committed && c.stream != nil || c.past.failures == 1 && v.untouched || c.policy.MaxAttempts == 1 {
		if f.TimedOut {
			err = f.Attempt.Err
		}
		c.end(f.Attempt, err, v.Reason, now)
		return err
	}
	return c.giveUp(&f.Attempt, v, f.CtxErr != nil, now)
}

// leave ends a call that gRPC has retried itself: its error is the call's.
func (c *call) leave(a *attempt, err error, now time.Time) error {
	c.deposit(a, Ignored)
	c.plan().Leave()
	info := a.ended(err, now)
	v := Verdict{Reason: ErrLeftToGRPC}
	c.report(&Failure{Attempt: info}, v, now)
	c.end(info, err, ErrLeftToGRPC, now)
	return err
}

// giveUp ends a call with an Error, last being the attempt that failed last; gone says
// that the caller's context has ended.
func (c *call) giveUp(last *Attempt, v Verdict, gone bool, now time.Time) error {
	err := &Error{
		Last:     c.past.said,
		Reason:   v.Reason,
		Attempts: c.past.all(),
		Elapsed:  c.elapsed(now),

		Wait:       v.Wait,
		WaitSource: v.WaitSource,

		made: c.made(0),
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
	c.logGiveUp(last, err, now)
	c.end(*last, err, v.Reason, now)
	return err
}

// end is the last thing that happens in a call that failed.
func (c *call) end(last Attempt, err, reason error, now time.Time) {
	if c.stream != nil {
		c.stream.ending(err)
	}
	if c.observed() {
		e := Event{Kind: CallEnd, Attempt: last, Err: err, Reason: reason, Elapsed: c.elapsed(now)}
		if made := c.made(last.Number); made > 1 {
			e.Attempts = c.past.all()
		}
		c.observe(e)
	}
	if m := c.retrier.meter; m != nil {
		m.ended(c, &last, reason, now)
	}
	c.endSpan(last.Number, err, reason)
	c.options.finish(err)
}

func (c *call) elapsed(now time.Time) time.Duration { return now.Sub(origin) - c.start }

func (c *call) target() string {
	if c.cc == nil {
		return ""
	}
	return c.cc.Target()
}

func (c *call) canonicalTarget() string {
	if c.cc == nil {
		return ""
	}
	return c.cc.CanonicalTarget()
}
