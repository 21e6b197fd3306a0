package grpcretry

import (
	"context"
	"time"
)

// This file has the ways in which a call ends.

// succeed ends a call with the attempt that succeeded; a zero time means now.
func (c *call) succeed(a *attempt, when time.Time) {
	c.deposit(a, Succeeded)
	if c.stream != nil {
		c.stream.ending(nil)
	}
	if c.options.outputs {
		c.collect(a)
	}
	c.retrier.report.callSucceeded(&c.facts, &c.history, a, when)
	c.options.finish(nil)
}

// lost reports an attempt that ended after another was decisive.
func (c *call) lost(a *attempt, now time.Time) {
	c.deposit(a, Ignored)
	info := a.asEnded(errHedgeLost, now)
	c.history.keep(info)
	c.retrier.report.attemptLost(&c.facts, &info)
}

// stop ends a call after a verdict to stop. Three failures are returned as they came: a first
// failure that is not retryable, that of a committed stream, and that of a call that could have
// been hedged but not retried.
func (c *call) stop(f *failure, v verdict, err error, now time.Time) error {
	if f.Committed && c.stream != nil || c.history.failures == 1 && v.untouched || c.plan().policy.MaxAttempts == 1 {
		if f.TimedOut {
			err = f.Attempt.Err
		}
		c.end(&callFailure{last: f.Attempt, err: err, reason: v.Reason, when: now})
		return err
	}
	return c.giveUp(&f.Attempt, v, f.CtxErr != nil, now)
}

// leaveToGRPC ends a call that gRPC has retried itself, and returns gRPC's error.
func (c *call) leaveToGRPC(a *attempt, err error, now time.Time) error {
	c.deposit(a, Ignored)
	c.plan().leave()
	info := a.asEnded(err, now)
	c.retrier.report.attemptFailed(&c.facts, &info, verdict{Reason: errLeftToGRPC}, now)
	c.end(&callFailure{last: info, err: err, reason: errLeftToGRPC, when: now})
	return err
}

// abort ends a call in the wait before a retry, which is then never sent.
func (c *call) abort(reason error, gone bool) error {
	c.plan().leave()
	c.retrier.report.waitStopped(&c.facts, reason)
	return c.giveUp(&c.history.last, verdict{Reason: reason}, gone, time.Now())
}

// giveUp ends a call with an [Error]. last is the attempt that failed last; gone means that the
// caller's context has ended.
func (c *call) giveUp(last *Attempt, v verdict, gone bool, now time.Time) error {
	err := &Error{
		Last:     c.history.genuine,
		Reason:   v.Reason,
		Attempts: c.history.all(),
		Elapsed:  now.Sub(origin) - c.start,

		wait:   v.Wait,
		source: v.WaitSource,
		made:   c.history.made(0),

		otherPolicy: c.isDistributedElsewhere(),
	}
	if err.otherPolicy {
		c.retrier.warnOfOtherPolicy(c.target())
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
	c.end(&callFailure{last: *last, err: err, gaveUp: err, reason: v.Reason, when: now})
	return err
}

// end is the last step of every call that failed.
func (c *call) end(how *callFailure) {
	if how.gaveUp != nil && gaveUp(how.reason, how.gaveUp.hasReachedServer()) || forbidsRetry(how.last.Trailer) {
		c.worksFor.GiveUp()
	}
	if c.stream != nil {
		c.stream.ending(how.err)
	}
	c.retrier.report.callFailed(&c.facts, &c.history, how)
	c.options.finish(how.err)
}

// crashed ends a call's attempts when one of the application's callbacks panics, or ends its
// goroutine; a is the attempt that was in flight, or has just ended.
func (c *call) crashed(a *attempt) {
	defer a.release()
	a.settle() // the timer may be using the plan
	if !a.reported {
		c.deposit(a, Ignored)
	}
	c.plan().leave()
}

// endCrashed ends a call after crashed; err is the error to report.
func (c *call) endCrashed(err error) {
	c.retrier.report.callCrashed(&c.facts, &c.history, err)
	c.options.finish(err)
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

// causeOf returns why a context has ended. If that is one of our own reasons, another call has
// ended for it.
func causeOf(ctx context.Context) error {
	cause := readable(context.Cause(ctx))
	if isReason(cause) {
		return anothers{cause}
	}
	return cause
}
