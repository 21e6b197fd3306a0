package grpcretry

import (
	"context"
	"time"

	"google.golang.org/grpc/codes"

	"github.com/grpcretry/grpcretry/internal/reasons"
)

// This file holds the rules that look at one failure: what it means, and whether it may be
// retried at all. The rules read no clock, draw no random number and do no I/O, so a table can
// test each of them. A plan adds the rules about the rest of the call, and all code that
// retries drives a plan.

// A failure is an attempt that failed, together with facts that only the plan's driver knows.
// The rules read the Attempt's Number, Duration, Hedge, Err, Trailer, Peer, Unsent and late; a Classifier may read all of it.
type failure struct {
	Attempt    Attempt
	NotRun     bool  // it has certainly run on no server, see WithUnsentOnly
	Refused    bool  // a server has refused the first attempt's stream: gRPC would send it again, whatever the policy
	Function   bool  // a function's: its next attempt looks for a connection by itself, see Retrier.Do
	NoResponse bool  // the server that it reached has not responded, and may still be at work
	TimedOut   bool  // the attempt timeout ended it
	Last       bool  // the function cannot be called again, see function.Call
	Committed  bool  // the application is bound to it, see docs/design.md, Commit
	CtxErr     error // context.Cause of the caller's context, if that has ended
	Closed     bool  // the ClientConn is closed

	found finding // what it means, see [policy.examine]; for an attempt that is replaced, only that it is retryable
}

// A verdict is the decision about a failure, or about a hedge that is due, and what the driver does now. Verdicts about anything else
// say only what the driver does and, at the end, why. A verdict is small enough for registers: copies of a larger one made a retry
// 7% slower.
type verdict struct {
	Wait       time.Duration // never negative; on a stop, the wait that was rejected, 0 if none was computed
	Reason     error         // why no attempt follows, as in [Error.Reason]; nil if one does
	WaitSource WaitSource    // waitNone if no wait was computed
	do         action
}

// An action is what a driver does next. Above 0 it is the number of an overdue attempt: cancel that; its end is then reported as
// TimedOut. Other attempts in flight continue, unless the call ends.
type action int32

const (
	doWait    action = -iota // there is nothing to do before dueAt
	doSend                   // send an attempt now
	doConnect                // wait for a connection: call connected when it is ready, or due at dueAt
	doEnd                    // the call is over, because of Reason; cancel the attempts in flight
)

// retries reports whether another attempt follows.
func (v verdict) retries() bool { return v.Reason == nil }

// A finding is what a failure means by itself, whatever happened earlier in the call.
type finding struct {
	code      codes.Code
	hint      Pushback // the server's wish, if hinted
	hinted    bool
	retryable bool
}

// examine finds out what a failure means. It calls the Classifier, if there is one.
func (p *policy) examine(ctx context.Context, f *failure) {
	f.found.code = f.Attempt.Code()
	f.found.hint, f.found.hinted = PushbackFrom(f.Attempt.Trailer, f.Attempt.Err)
	f.found.retryable = !f.isCallers() && p.retryable(ctx, f, f.found.code)
}

// isCallers reports whether the caller caused the failure: its context has ended and the
// failure says so, or is its cause, or the ClientConn was closed.
func (f *failure) isCallers() bool {
	return f.Closed || f.CtxErr != nil && (isContextEnd(f.Attempt.Err) || isSame(reasons.Disown(f.Attempt.Err), f.CtxErr))
}

// callOver returns why the call is over whatever its policy says, by rule 1; nil if it is not.
func (f *failure) callOver() error {
	if f.CtxErr == nil && f.Closed {
		return errConnClosed
	}
	return f.CtxErr
}

// isUntouched reports whether a failure that ends a call for a reason is returned unwrapped if it is the first, because it is
// not retryable. That includes a closed connection and the cause of the caller's context, but not that context's end, which
// an Error reports.
func (f *failure) isUntouched(reason error) bool {
	return reasons.Of(reason).Untouched || !f.found.retryable && !(f.CtxErr != nil && (f.Closed || isContextEnd(f.Attempt.Err)))
}

// result returns the result of a failed attempt as the budget sees it.
func (p *policy) result(f *failure) Result {
	switch code := f.found.code; {
	case f.Attempt.Unsent:
		return Unsent
	case f.found.retryable || f.found.hint.Stop:
		return Failed
	case !f.isCallers() && answeredCodes.has(code) && !p.codes.has(code):
		return Answered
	default:
		return Ignored
	}
}

// answeredCodes are the codes that show a working server and a request at fault.
var answeredCodes = newCodeSet([]codes.Code{
	codes.InvalidArgument, codes.NotFound, codes.AlreadyExists, codes.PermissionDenied, codes.Unauthenticated,
	codes.FailedPrecondition, codes.OutOfRange, codes.Aborted, codes.Unimplemented,
})

// ruledOut returns why the failure may not be retried at all; nil if it may. It applies rules 1
// to 5 of [plan.failed].
func (p *policy) ruledOut(f *failure) error {
	over := f.callOver()
	switch {
	case over != nil:
		return over
	case f.Committed:
		return ErrCommitted
	case f.found.hint.Stop:
		return ErrPushback
	case !f.found.retryable:
		return ErrNotRetryable
	case p.UnsentOnly && !f.NotRun && !f.found.hinted:
		return ErrMayHaveRun
	default:
		return nil
	}
}

// backoff returns the backoff after a status code: overload heals more slowly than a blip.
func (p *policy) backoff(c codes.Code) Backoff {
	if c == codes.ResourceExhausted {
		return p.OverloadBackoff
	}
	return p.Backoff
}

// asksTooMuch reports whether the server asks for a wait that is longer than MaxServerDelay.
func (p *policy) asksTooMuch(f *failure) bool {
	return p.MaxServerDelay >= 0 && f.found.hint.Delay > p.MaxServerDelay
}
