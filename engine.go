package grpcretry

import (
	"context"
	"time"

	"google.golang.org/grpc/codes"
)

// This file holds the rules: after an attempt has failed, or has exceeded its timeout, they
// say whether another one follows, and when. They read no clock, draw no random number and do
// no I/O, so a table can test each of them. A plan applies them to one call; everything that
// retries drives a plan.

// A failure is an attempt that failed, together with what only its driver can know. The rules
// read Number, Hedge, Err and Trailer of the Attempt; a Classifier may read all of it.
type failure struct {
	Attempt   Attempt
	Unsent    bool  // it reached no server, see WithConnectWait; of an overdue attempt: there is no connection
	TimedOut  bool  // the attempt timeout ended it
	Committed bool  // the application has seen something of it
	CtxErr    error // context.Cause of the caller's context, if that has ended
	Closed    bool  // the ClientConn is closed
}

// A verdict is what the rules say about a failure.
type verdict struct {
	Retry      bool          // make another attempt after Wait; otherwise stop, because of Reason
	Wait       time.Duration // never negative; on a stop, the wait that was rejected, 0 if none was computed
	WaitSource WaitSource    // WaitNone if no wait was computed
	Reason     error         // why no attempt follows, as in [Error.Reason]; nil for a retry

	fatal     bool // a stop that ends a hedged call although other attempts are in flight
	untouched bool // not retryable: a first such failure is returned unwrapped
}

// refused reports whether it was the budget that stopped the call.
func (v verdict) refusedByBudget() bool {
	return v.Reason == ErrBudgetExhausted //nolint:errorlint // the rules' own value, which a caller's cause may wrap
}

// A finding is what a failure says by itself, whatever happened in the call before.
type finding struct {
	code      codes.Code
	hint      Pushback
	hinted    bool
	retryable bool
}

func (p *policy) find(ctx context.Context, f *failure) finding {
	hint, hinted := PushbackFrom(f.Attempt.Trailer, f.Attempt.Err)
	code := f.Attempt.Code()
	return finding{
		code:      code,
		hint:      hint,
		hinted:    hinted,
		retryable: !f.isCallers() && p.retryable(ctx, f, code),
	}
}

// isCallers reports whether the failure is the caller's own doing: the CANCELED or
// DEADLINE_EXCEEDED of a context that has ended, or a closed connection.
func (f *failure) isCallers() bool {
	return f.Closed || f.CtxErr != nil && isContextEnd(f.Attempt.Err)
}

// untouched reports whether a first such failure is returned unwrapped: it was never one to
// retry. The end of the caller's context is another matter, a closed connection is not.
func (f *failure) untouched(found finding) bool {
	return !found.retryable && !(f.isCallers() && f.CtxErr != nil)
}

// result is what the budget is told about a failed attempt.
func (p *policy) result(f *failure, found finding) Result {
	switch {
	case found.retryable || found.hint.Stop:
		return Failed
	case !f.isCallers() && answeredCodes.has(found.code) && !p.codes.has(found.code):
		return Answered
	default:
		return Ignored
	}
}

// answered are the codes that show a working server and a request at fault.
var answeredCodes = newCodeSet([]codes.Code{
	codes.InvalidArgument, codes.NotFound, codes.AlreadyExists, codes.PermissionDenied, codes.Unauthenticated,
	codes.FailedPrecondition, codes.OutOfRange, codes.Aborted, codes.Unimplemented,
})

// decide answers whether the failure may be retried at all: nil, or why not. It is rules 1
// to 4 of [plan.failed].
func (f *failure) ruledOut(found finding) error {
	switch {
	case f.CtxErr != nil:
		return f.CtxErr
	case f.Closed:
		return errConnClosed
	case f.Committed:
		return ErrCommitted
	case found.hint.Stop:
		return ErrPushback
	case !found.retryable:
		return ErrNotRetryable
	default:
		return nil
	}
}

// backoff is the one for the code just received: overload heals more slowly than a blip.
func (p *policy) backoff(c codes.Code) Backoff {
	if c == codes.ResourceExhausted {
		return p.OverloadBackoff
	}
	return p.Backoff
}
