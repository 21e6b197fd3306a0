package grpcretry

import (
	"context"
	"slices"
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
	past past // zero until an attempt has failed
}

// An rpc is the part of a call that does not change any more when attempts are made.
type rpc struct {
	retrier *Retrier
	policy  *policy
	budget  Budget
	ctx     context.Context // the caller's, within the call span if there is one
	cc      *grpc.ClientConn
	method  string
	options callOptions
	stream  bool          // not unary
	start   time.Duration // since the origin
	spans   *callSpans    // nil where nobody records
}

// The past of a call is what is remembered of its attempts that have not succeeded.
type past struct {
	History
	last     Attempt   // the one that ended last, failed or lost: most calls have no other, and no memory for more
	earlier  []Attempt // those that ended before it, in that order; the latest, fewer than maxKept
	failures int
	said     error         // the last failure that was a server's word, not a timeout or the caller
	idle     time.Duration // without an attempt under way, before the attempt under way
}

// none says that no attempt has ended yet.
func (p *past) none() bool { return p.last.Number == 0 }

// all are the attempts, and more that ended, in the order of their numbers.
func (p *past) all(more ...Attempt) []Attempt {
	all := slices.Concat(p.earlier, []Attempt{p.last}, more)
	slices.SortFunc(all, func(a, b Attempt) int { return a.Number - b.Number })
	return all
}

// maxKept bounds the memory of a call with very many attempts.
const maxKept = 1000

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

// begin makes a, which is zero, the first attempt.
func (c *call) begin(a *attempt) {
	c.budget = c.policy.budgetFor(c.target(), c.canonicalTarget)
	c.startSpan()
	c.start = sinceOrigin()
	a.Context, a.number, a.start = c.ctx, 1, c.start
	c.ready(a)
}

// ready makes an attempt fit to be handed to gRPC.
func (c *call) ready(a *attempt) {
	a.cc, a.method, a.PeerAddr = c.cc, c.method, &a.peer
	if c.stream || c.policy.hedges || c.policy.AttemptTimeout > 0 {
		c.bound(a)
	}
	if c.observed() {
		c.observe(Event{Kind: AttemptStart, Attempt: a.begun(time.Now())})
	}
}

// bound gives an attempt an end of its own, where it needs one.
func (c *call) bound(a *attempt) {
	timeout := c.attemptTimeout(int(a.number))
	if timeout == 0 && !c.stream && !c.policy.hedges {
		return
	}
	a.bound(timeout, a.number == 1 && !c.retrier.builtInRetryOff)
	if timeout > 0 && !c.stream && (a.number > 1 || c.configKnown()) {
		a.announce()
	}
}

// attemptTimeout is 0 where the attempt may take all the time that is left.
func (c *call) attemptTimeout(number int) time.Duration {
	if c.policy.AttemptTimeout == 0 || c.leftToGRPC() {
		return 0
	}
	_, limited := c.ctx.Deadline()
	return c.policy.attemptTimeout(number, limited)
}

// next is told how an attempt ended. It returns the next attempt, after the wait
// before it, or nil and what the call returns.
func (c *call) next(a *attempt, err error) (*attempt, error) {
	defer a.release()
	if err == nil {
		c.succeed(a, time.Time{})
		return nil, nil
	}
	v, err := c.decide(a, err)
	if !v.Retry {
		return nil, err
	}
	a.release()
	if reason, gone := c.wait(v.Wait); reason != nil {
		return nil, c.abandon(reason, gone)
	}
	return c.retry(v), nil
}

// decide is the verdict on a failed attempt, and what the call returns if there is to be
// no other.
func (c *call) decide(a *attempt, err error) (Verdict, error) {
	c.collect(a)
	now := time.Now()
	if a.number == 1 && c.leftToGRPC() {
		c.retrier.log.logLeftToGRPC(c)
		return Verdict{}, c.leave(a, err, now)
	}
	f := c.failure(a, err, now)
	c.record(&f, now)
	v := c.policy.judge(c.ctx, c.budget, &c.past.History, &f, now, c.retrier.random())
	c.report(&f, v, now)
	if v.Retry {
		return v, nil
	}
	return v, c.stop(&f, v, err, now)
}

// failure puts together what the engine needs to know.
func (c *call) failure(a *attempt, err error, now time.Time) Failure {
	f := Failure{
		Attempt:   a.ended(err, now),
		CtxErr:    c.ended(now),
		Closed:    c.closed(),
		Committed: a.committed || c.policy.CommitOnHeaders && a.header != nil,
	}
	if f.CtxErr == nil && a.timedOut(err, now) {
		f.TimedOut = true
		f.Attempt.Err = &attemptTimeoutError{c.policy.AttemptTimeout}
	}
	return f
}

// ended is why the caller's context has ended, nil if it has not. At the very moment
// of the deadline a server may tell us before the context does.
func (c *call) ended(now time.Time) error {
	if c.ctx.Err() != nil {
		return context.Cause(c.ctx)
	}
	if d, limited := c.ctx.Deadline(); limited && !now.Before(d) {
		return context.DeadlineExceeded
	}
	return nil
}

func (c *call) closed() bool { return c.cc != nil && c.cc.GetState() == connectivity.Shutdown }

// configKnown says whether leftToGRPC can be trusted already.
func (c *call) configKnown() bool {
	return c.retrier.builtInRetryOff || c.cc == nil || c.cc.GetState() == connectivity.Ready
}

// connecting says whether leftToGRPC cannot be trusted yet, and no attempt be sent anyway.
func (c *call) connecting() bool {
	if c.retrier.builtInRetryOff || c.cc == nil {
		return false
	}
	state := c.cc.GetState()
	return state == connectivity.Connecting || state == connectivity.TransientFailure
}

// leftToGRPC says whether gRPC retries the method itself. On a fresh channel that is
// known only once an attempt has been made.
func (c *call) leftToGRPC() bool { return !c.retrier.builtInRetryOff && retriedByGRPC(c.cc, c.method) }

func retriedByGRPC(cc *grpc.ClientConn, method string) bool {
	return cc != nil && cc.GetMethodConfig(method).RetryPolicy != nil
}

// remember makes the past.
func (c *call) remember(now time.Time) *past {
	if c.past.Start.IsZero() {
		c.past.Start = timeOf(c.start, now)
		c.past.Deadline, _ = c.ctx.Deadline()
	}
	return &c.past
}

// record remembers a failed attempt.
func (c *call) record(f *Failure, now time.Time) {
	p := c.remember(now)
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
	p.earlier = append(p.earlier, a)
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

// wait lets d pass. It ends at once with the caller's context, and with the connection:
// reason is nil if it has passed. gone says that it was the caller's context.
func (c *call) wait(d time.Duration) (reason error, gone bool) {
	if d > 0 {
		timer := time.NewTimer(d)
		defer timer.Stop()
		closed, unwatch := c.retrier.closing.watch(c.cc, d)
		defer unwatch()
		select {
		case <-timer.C:
		case <-closed:
		case <-c.ctx.Done():
		}
	}
	if c.ctx.Err() != nil {
		return context.Cause(c.ctx), true
	}
	if c.closed() {
		return ErrConnClosed, false
	}
	return nil, false
}

// abandon ends a call in the wait before a retry, which is then never sent.
func (c *call) abandon(reason error, gone bool) error {
	c.budget.Refund()
	c.traceStop(reason)
	return c.giveUp(&c.past.last, Verdict{Reason: reason}, gone, time.Now())
}

// retry makes the next attempt: the caller's own metadata, and the mark of a retry.
func (c *call) retry(v Verdict) *attempt {
	c.past.Retried(v)
	c.forget()
	last, now := &c.past.last, sinceOrigin()
	c.past.idle += now - (last.Start.Sub(origin) + last.Duration)
	return c.another(last.Number, v, false, now)
}

// another makes an attempt after made others, as v says, that starts at a time after the origin.
func (c *call) another(made int, v Verdict, hedge bool, at time.Duration) *attempt {
	a := &attempt{
		Context: c.ctx,
		number:  int32(made + 1),
		hedge:   hedge,
		start:   at,
		wait:    v.Wait,
		source:  shortSource(v.WaitSource),
	}
	a.tellPreviousAttempts(made)
	c.ready(a)
	return a
}

// succeed ends a call whose attempt a succeeded, at the time at if that is not now.
func (c *call) succeed(a *attempt, at time.Time) {
	c.budget.Deposit(Outcome{Attempt: int(a.number), Result: Succeeded})
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
	c.budget.Deposit(Outcome{Attempt: int(a.number), Result: Ignored})
	info := a.ended(errHedgeLost, now)
	c.remember(now).keep(info)
	c.traceLost(&info)
	if m := c.retrier.meter; m != nil {
		m.lost(c, a)
	}
	if c.observed() {
		c.observe(Event{Kind: AttemptEnd, Attempt: info})
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
	if f.Committed && c.stream || c.past.failures == 1 && v.untouched || c.policy.MaxAttempts == 1 {
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
	c.budget.Deposit(Outcome{Attempt: int(a.number), Result: Ignored})
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
