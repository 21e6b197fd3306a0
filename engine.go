package grpcretry

import (
	"context"
	"time"

	"google.golang.org/grpc/codes"
)

// This file is the decision engine: after an attempt has failed it says whether there
// is another, and when. It reads no clock, draws no random number and does no I/O, so
// that a table can test every rule. Everything that retries drives it: no rule of it
// stands anywhere else.

// A history is what the engine knows of a call between two attempts.
type history struct {
	start    time.Time     // when the call began
	deadline time.Time     // the caller's; zero without one
	retry    int           // retries since the backoff was last restarted
	prev     time.Duration // what the backoff gave last; 0 after a restart
}

// A failure is an attempt that failed, and what only its loop can know of it.
type failure struct {
	attempt   Attempt
	timedOut  bool  // our attempt timeout ended it
	committed bool  // the application has seen something of it
	ctxErr    error // context.Cause of the caller's context if that has ended
	closed    bool  // the ClientConn is closed
}

// A verdict is what the engine says of a failure.
type verdict struct {
	again  bool          // retry, after wait; else stop, because of reason
	wait   time.Duration // never negative; of a stop the one that was refused, if it came to that
	source WaitSource    // WaitNone if it did not
	reason error
	result Result // what the budget heard

	untouched bool // of a stop: the failure was never one to retry, whatever else stopped it
}

// judge decides on f, at the time now, with u uniform in [0, 1). The first match ends it:
//
//  1. the caller's context has ended, or the ClientConn is closed: stop
//  2. the call is committed: stop
//  3. the server said not to retry: stop
//  4. the classifier, else the code set, says no: stop
//  5. MaxAttempts were made: stop
//  6. the wait: pushback, else RetryInfo, else the backoff of the code; longer than
//     MaxServerDelay: stop
//  7. the wait would pass the deadline or MaxElapsed: stop
//  8. the budget refuses: stop
//  9. retry after the wait, which the budget has paid for
func (p *policy) judge(ctx context.Context, b Budget, h *history, f *failure, now time.Time, u float64) verdict {
	hint, hinted := PushbackFrom(f.attempt.Trailer, f.attempt.Err)
	retryable := !f.isCallers() && p.retryable(ctx, f)

	v := verdict{result: Ignored, untouched: !retryable && !(f.isCallers() && f.ctxErr != nil)}
	if retryable || hint.Stop {
		v.result = Failed
	}
	b.Deposit(Outcome{Attempt: f.attempt.Number, Result: v.result})

	if v.reason = p.decide(f, hint, retryable); v.reason != nil {
		return v
	}
	if v.wait, v.source, v.reason = p.schedule(h, f, hint, hinted, now, u); v.reason != nil {
		return v
	}
	if !b.Withdraw(now) {
		v.reason = ErrBudgetExhausted
		return v
	}
	v.again = true
	return v
}

// isCallers says whether the failure is the caller's own doing: the CANCELED or
// DEADLINE_EXCEEDED of a context that has ended, or a closed connection.
func (f *failure) isCallers() bool {
	return f.closed || f.ctxErr != nil && isContextEnd(f.attempt.Err)
}

// decide answers whether the failure may be retried at all: nil, or why not.
func (p *policy) decide(f *failure, hint Pushback, retryable bool) error {
	switch {
	case f.ctxErr != nil:
		return f.ctxErr
	case f.closed:
		return ErrConnClosed
	case f.committed:
		return ErrCommitted
	case hint.Stop:
		return ErrPushback
	case !retryable:
		return ErrNotRetryable
	case f.attempt.Number >= p.MaxAttempts:
		return ErrAttemptsExhausted
	default:
		return nil
	}
}

// schedule answers when the next attempt may start, and whether that is in time.
func (p *policy) schedule(h *history, f *failure, hint Pushback, hinted bool, now time.Time, u float64) (time.Duration, WaitSource, error) {
	wait, source := time.Duration(0), WaitBackoff
	switch {
	case hinted && p.MaxServerDelay >= 0 && hint.Delay > p.MaxServerDelay:
		return hint.Delay, hint.Source, ErrPushback
	case hinted && hint.Source == WaitRetryInfo:
		// Spread: the server told every client the same.
		wait, source = max(hint.Delay, duration(float64(hint.Delay)*(1+0.2*unit(u)))), WaitRetryInfo
	case hinted:
		wait, source = hint.Delay, WaitPushback
	default:
		wait = nextBackoff(p.backoff(f.attempt.Code()), h.retry+1, h.prev, u)
	}
	if !h.deadline.IsZero() && wait >= h.deadline.Sub(now) {
		return wait, source, ErrDeadline
	}
	if p.MaxElapsed > 0 && wait >= p.MaxElapsed-now.Sub(h.start) {
		return wait, source, ErrMaxElapsed
	}
	return wait, source, nil
}

// backoff is the one for the code just seen: overload heals more slowly than a blip.
func (p *policy) backoff(c codes.Code) Backoff {
	if c == codes.ResourceExhausted {
		return p.OverloadBackoff
	}
	return p.Backoff
}

// retried takes a verdict to retry into the history. What a server says of the wait
// restarts the backoff (gRFC A6 #pushback).
func (h *history) retried(v verdict) {
	if v.source == WaitBackoff {
		h.retry++
		h.prev = v.wait
	} else {
		h.retry, h.prev = 0, 0
	}
}
