package grpcretry

import (
	"context"
	"errors"
	"slices"
	"time"

	"go.opentelemetry.io/otel/trace"
	"google.golang.org/grpc"
	"google.golang.org/grpc/connectivity"
)

// A call is one RPC under way, from its first attempt to its end: what the unary and
// the stream loop share. A loop begins it, runs an attempt, and hands the attempt's
// error to next, until next gives no further attempt.
//
// One goroutine at a time uses a call.
type call struct {
	grpc.EmptyCallOption // a *call among the options of an attempt marks it as ours

	retrier *Retrier
	policy  *policy
	ledger  *ledger
	cc      *grpc.ClientConn
	method  string
	ctx     context.Context // the caller's, within the call span if there is one
	opts    []grpc.CallOption
	options callerOptions
	stream  bool // not unary

	span     trace.Span // to write events to; nil where nobody records
	callSpan trace.Span // our own; nil without WithCallSpan

	history history
	made    int       // attempts ended
	failed  []Attempt // the latest of them, at most maxKept
	said    error     // the last failure that was a server's word, not a timeout or the caller

	buf   [6]grpc.CallOption // the options of an attempt, where they fit
	first attempt            // the first attempt, part of the call to save an allocation
}

// maxKept bounds the memory of a call with very many attempts.
const maxKept = 1000

// begin makes the call and its first attempt.
func (r *Retrier) begin(ctx context.Context, cc *grpc.ClientConn, method string, p *policy,
	opts []grpc.CallOption, o callerOptions, stream bool) (*call, *attempt) {
	c := &call{
		retrier: r,
		policy:  p,
		cc:      cc,
		method:  method,
		ctx:     ctx,
		opts:    opts,
		options: o,
		stream:  stream,
	}
	c.ledger = p.ledgerOf(c.target(), c.canonicalTarget)
	c.startSpan()
	c.history.start = time.Now()
	if deadline, ok := ctx.Deadline(); ok {
		c.history.deadline = deadline
	}
	c.first = attempt{Context: c.ctx, info: Attempt{Method: method, Number: 1, Start: c.history.start}}
	c.start(&c.first)
	return c, &c.first
}

// start readies an attempt to be handed to gRPC.
func (c *call) start(a *attempt) {
	timeout := c.attemptTimeout(a.info.Number)
	switch {
	case c.stream:
		a.limitStart(timeout)
	case timeout > 0:
		a.limit(timeout)
	}
	if c.observed() {
		c.observe(Event{Kind: AttemptStart, Attempt: a.info})
	}
}

// attemptTimeout is 0 where the attempt may take all the time that is left.
func (c *call) attemptTimeout(number int) time.Duration {
	last := number >= c.policy.MaxAttempts
	if c.policy.AttemptTimeout == 0 || last && !c.history.deadline.IsZero() || c.leftToGRPC() {
		return 0
	}
	return c.policy.AttemptTimeout
}

// next is told how an attempt ended. It returns the next attempt, after the wait
// before it, or nil and what the call returns.
func (c *call) next(a *attempt, err error) (*attempt, error) {
	defer a.release()
	c.made++
	c.collect(a)
	if err == nil {
		c.succeed(a)
		return nil, nil
	}
	now := time.Now()
	if c.made == 1 && c.leftToGRPC() {
		c.retrier.log.logLeftToGRPC(c)
		return nil, c.leave(a, err, now)
	}
	f := c.failure(a, err, now)
	v := c.policy.judge(c.ctx, c.ledger, &c.history, &f, now, c.retrier.random())
	c.record(&f)
	c.report(&f, v, now)
	if !v.again {
		return nil, c.stop(&f, v, err, now)
	}
	a.release()
	if reason, ended := c.wait(v.wait); ended {
		c.ledger.Refund()
		return nil, c.giveUp(verdict{reason: reason}, !errors.Is(reason, ErrConnClosed), time.Now())
	}
	return c.retry(v), nil
}

// failure puts together what the engine needs to know.
func (c *call) failure(a *attempt, err error, now time.Time) failure {
	f := failure{
		attempt:   a.ended(err, now),
		ctxErr:    c.ended(now),
		closed:    c.closed(),
		committed: a.committed || c.policy.CommitOnHeaders && a.header != nil,
	}
	if f.ctxErr == nil && a.timedOut(err, now) {
		f.timedOut = true
		f.attempt.Err = &attemptTimeoutError{c.policy.AttemptTimeout}
	}
	return f
}

// ended is why the caller's context has ended, nil if it has not. At the very moment
// of the deadline a server may tell us before the context does.
func (c *call) ended(now time.Time) error {
	if c.ctx.Err() != nil {
		return context.Cause(c.ctx)
	}
	if d := c.history.deadline; !d.IsZero() && !now.Before(d) {
		return context.DeadlineExceeded
	}
	return nil
}

func (c *call) closed() bool { return c.cc != nil && c.cc.GetState() == connectivity.Shutdown }

// leftToGRPC says whether gRPC retries the method itself. On a fresh channel that is
// known only once an attempt has been made.
func (c *call) leftToGRPC() bool {
	return !c.retrier.builtInRetryOff && c.cc != nil && c.cc.GetMethodConfig(c.method).RetryPolicy != nil
}

// record remembers a failed attempt for the Error.
func (c *call) record(f *failure) {
	if len(c.failed) == maxKept {
		c.failed = slices.Delete(c.failed, 0, maxKept/2)
	}
	c.failed = append(c.failed, f.attempt)
	if !f.timedOut && !f.isCallers() {
		c.said = f.attempt.Err
	}
}

// report tells span, logger and observers how an attempt failed and what comes of it.
func (c *call) report(f *failure, v verdict, now time.Time) {
	c.traceFailure(&f.attempt, v, now)
	c.logDecision(&f.attempt, v)
	if c.observed() {
		c.observe(Event{Kind: AttemptEnd, Attempt: f.attempt})
		c.observe(Event{Kind: Decision, Attempt: f.attempt,
			Retry: v.again, Wait: v.wait, WaitSource: v.source, Reason: v.reason})
	}
}

// wait lets d pass. It ends at once with the caller's context; a connection closed
// meanwhile ends the call too.
func (c *call) wait(d time.Duration) (reason error, ended bool) {
	if d > 0 {
		timer := time.NewTimer(d)
		defer timer.Stop()
		select {
		case <-timer.C:
		case <-c.ctx.Done():
		}
	}
	if c.ctx.Err() != nil {
		return context.Cause(c.ctx), true
	}
	if c.closed() {
		return ErrConnClosed, true
	}
	return nil, false
}

// retry makes the next attempt: the caller's own metadata, and the mark of a retry.
func (c *call) retry(v verdict) *attempt {
	c.history.retried(v)
	c.forget()
	a := &attempt{
		Context: withPreviousAttempts(c.ctx, c.made),
		info: Attempt{
			Method:     c.method,
			Number:     c.made + 1,
			Start:      time.Now(),
			Wait:       v.wait,
			WaitSource: v.source,
		},
	}
	c.start(a)
	return a
}

// succeed ends a call whose attempt a succeeded.
func (c *call) succeed(a *attempt) {
	c.ledger.Deposit(Outcome{Attempt: a.info.Number, Result: Succeeded})
	if c.span != nil || c.observed() {
		now := time.Now()
		info := a.ended(nil, now)
		c.traceSuccess(&info)
		if c.observed() {
			c.observe(Event{Kind: AttemptEnd, Attempt: info})
			c.observe(Event{Kind: CallEnd, Attempt: info, Elapsed: now.Sub(c.history.start)})
		}
	}
	c.endSpan(nil, nil)
	finish(c.opts, nil)
}

// stop ends a call after the verdict not to try again. A first failure that is neither
// retryable nor stopped by the server or the caller's context is returned as it came,
// and so is the failure of a committed stream.
func (c *call) stop(f *failure, v verdict, err error, now time.Time) error {
	if f.committed && c.stream || c.made == 1 && v.result == Ignored && f.ctxErr == nil {
		if f.timedOut {
			err = f.attempt.Err
		}
		c.end(f.attempt, err, v.reason, now)
		return err
	}
	return c.giveUp(v, f.ctxErr != nil, now)
}

// leave ends a call that gRPC has retried itself: its error is the call's.
func (c *call) leave(a *attempt, err error, now time.Time) error {
	info := a.ended(err, now)
	v := verdict{reason: ErrLeftToGRPC}
	c.report(&failure{attempt: info}, v, now)
	c.end(info, err, ErrLeftToGRPC, now)
	return err
}

// giveUp ends a call with an Error; gone says that the caller's context has ended.
func (c *call) giveUp(v verdict, gone bool, now time.Time) error {
	err := &Error{
		Last:     c.said,
		Reason:   v.reason,
		Attempts: c.failed,
		Elapsed:  now.Sub(c.history.start),

		Wait:       v.wait,
		WaitSource: v.source,

		made: c.made,
	}
	if c.said == nil {
		err.Last = c.failed[len(c.failed)-1].Err
	}
	if gone {
		err.ctx = context.DeadlineExceeded
		if c.ctx.Err() == context.Canceled {
			err.ctx = context.Canceled
		}
	}
	c.logGiveUp(err, now)
	c.end(c.failed[len(c.failed)-1], err, v.reason, now)
	return err
}

// end is the last thing that happens in a call that failed.
func (c *call) end(last Attempt, err, reason error, now time.Time) {
	if c.observed() {
		c.observe(Event{Kind: CallEnd, Attempt: last, Err: err, Reason: reason, Elapsed: now.Sub(c.history.start)})
	}
	c.endSpan(err, reason)
	finish(c.opts, err)
}

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
