package grpcretry

import (
	"cmp"
	"context"
	"slices"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	"github.com/grpcretry/grpcretry/internal/reasons"
)

// This file has the ways in which a call ends.

// succeed ends a call with the attempt that succeeded.
func (c *call) succeed(a *attempt) {
	c.deposit(a, Succeeded)
	if c.stream != nil {
		c.stream.ending(nil)
	}
	c.retrier.report.callSucceeded(&c.facts, c.history(), c.made(), a, c.collect(a))
	if c.limit != nil || c.options.mixed {
		c.finish(nil)
	}
}

// finish frees what the call holds, and runs the caller's OnFinish options.
func (c *call) finish(err error) {
	if c.limit != nil {
		c.free()
	}
	c.options.finish(err)
}

// stop ends a call after a verdict to stop. Three failures are returned as they came: a first
// failure that is not retryable, that of a dry run, and that of a committed stream.
func (c *call) stop(f *failure, v verdict, now time.Time) error {
	if f.Committed || c.history().failures == 1 && (c.plan().policy.dryRun || f.isUntouched(v.Reason)) {
		c.end(&callFailure{last: f.Attempt, err: f.Attempt.Err, verdict: v, when: now})
		return f.Attempt.Err
	}
	return c.giveUp(&f.Attempt, v, f.CtxErr != nil, now)
}

// giveUp ends a call with an [Error]. last is the attempt that failed last; gone means that the
// caller's context has ended.
func (c *call) giveUp(last *Attempt, v verdict, gone bool, now time.Time) error {
	err := &Error{
		Last:     c.history().genuine,
		Reason:   v.Reason,
		Attempts: c.history().all(),
		Elapsed:  instantOf(now).Sub(c.start),

		wait:   v.Wait,
		source: v.WaitSource,
		made:   c.made(),

		tokenless: c.plan().tokenless && (is(v.Reason, ErrTargetDown) || reasons.Of(v.Reason).GivesUpIfReached),
	}
	switch h := c.history(); {
	case err.Last == nil:
		err.Last = last.Err
	case h.from != nil && !gone:
		c.show(h.from)
	}
	if gone {
		err.ctx = context.DeadlineExceeded
		if c.limited().Err() == context.Canceled {
			err.ctx = context.Canceled
		}
	}
	err.final = gaveUp(c.plan(), cmp.Or(err.ctx, v.Reason)) // the program may have given the end of its context a cause
	c.end(&callFailure{last: *last, err: err, gaveUp: err, verdict: v, when: now})
	return err
}

// end is the last step of every call that failed.
func (c *call) end(how *callFailure) {
	if how.gaveUp != nil && how.gaveUp.final || forbidsRetry(how.last.Trailer) {
		c.worksFor.GiveUp()
	}
	if c.stream != nil {
		c.stream.ending(how.err)
		if c.stream.spoilt { // which nobody changes any more; there may have been no attempt to commit the stream to
			c.retrier.report.sentAgain(&c.facts)
		}
	}
	c.retrier.report.callFailed(&c.facts, c.history(), c.made(), how)
	c.finish(how.err)
}

// errPanicked is the error of a call, or an attempt, that ends in a panic.
var errPanicked = status.Error(codes.Internal, "grpcretry: panic while retrying")

// crashed ends a call when one of the application's callbacks panics, or ends its goroutine.
func (c *call) crashed() {
	defer c.endCrashed() // these two also if the callback, which is asked to deposit, panics again
	defer c.plan().leave()
	if c.contest != nil {
		c.contest.abandon()
	}
	if a := c.newest; a != nil {
		defer a.endContext()
		c.contest.settle(a)
		if !a.reported {
			c.deposit(a, Ignored)
		}
	}
}

// endCrashed ends a call after a panic.
func (c *call) endCrashed() {
	defer c.finish(errPanicked) // also if the span panics again
	if c.stream != nil {
		c.stream.ending(errPanicked)
		c.stream.conclude()
	}
	c.retrier.report.callCrashed(&c.facts, c.made())
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
	if reasons.Is(cause) {
		return reasons.Disown(cause)
	}
	return cause
}

// The history of a call holds its attempts that ended without success.
type history struct {
	last     Attempt   // the attempt that ended last; no slice, because most calls have no other
	earlier  []Attempt // the attempts that ended before, in that order; only the latest, fewer than maxKept
	failures int32
	genuine  error    // the last failure that came from a server or gRPC, not from a timeout or the caller
	from     *attempt // that it came from; nil if the call has let it go
}

// maxKept is how many attempts are kept. A server may send megabytes for each of them.
const maxKept = 16

// isEmpty reports whether no attempt has ended yet.
func (h *history) isEmpty() bool { return h.last.Number == 0 }

// all returns these attempts and more, in the order of their numbers; only the latest, at most maxKept.
func (h *history) all(more ...Attempt) []Attempt {
	all := slices.Concat(h.earlier, []Attempt{h.last}, more)
	all = all[max(0, len(all)-maxKept):]
	slices.SortFunc(all, func(a, b Attempt) int { return a.Number - b.Number })
	return all
}

// headerOf returns the header of a failed attempt.
func (h *history) headerOf(number int32) metadata.MD {
	for _, failed := range h.all() {
		if failed.Number == int(number) {
			return failed.Header
		}
	}
	return nil
}

// record adds a failed attempt.
func (h *history) record(a *attempt, f *failure) {
	h.keep(&f.Attempt)
	h.failures++
	if !f.TimedOut && !f.isCallers() {
		h.genuine, h.from = f.Attempt.Err, a
	}
}

// keep adds an attempt that ended without success.
func (h *history) keep(a *Attempt) {
	if len(h.earlier) == maxKept-1 {
		h.earlier = slices.Delete(h.earlier, 0, 1)
	}
	if !h.isEmpty() {
		if h.earlier == nil {
			h.earlier = make([]Attempt, 0, defaultMaxAttempts-1) // once for most calls
		}
		h.earlier = append(h.earlier, h.last)
	}
	h.last = *a
}
