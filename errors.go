package grpcretry

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// Why a call was not tried again: the Reason of an [Error], found with [errors.Is].
var (
	// ErrAttemptsExhausted: MaxAttempts were made.
	ErrAttemptsExhausted = errors.New("grpcretry: no attempts left")
	// ErrBudgetExhausted: the budget of this client refused the retry. The server was
	// not asked.
	ErrBudgetExhausted = errors.New("grpcretry: client-side retry budget exhausted")
	// ErrDeadline: the caller's deadline would have passed before the next attempt.
	ErrDeadline = errors.New("grpcretry: deadline too near for another attempt")
	// ErrMaxElapsed: the next attempt would have started after MaxElapsed.
	ErrMaxElapsed = errors.New("grpcretry: maximum elapsed time too near for another attempt")
	// ErrPushback: the server forbade another attempt, or asked for a longer wait than
	// MaxServerDelay.
	ErrPushback = errors.New("grpcretry: stopped by server pushback")
	// ErrNotRetryable: after a retry, the failure was one that is not retried.
	ErrNotRetryable = errors.New("grpcretry: failure is not retryable")
	// ErrCommitted: the response had begun, see WithCommitOnHeaders.
	ErrCommitted = errors.New("grpcretry: call is committed, response headers were received")
	// errConnClosed: the ClientConn was closed between two attempts.
	errConnClosed = errors.New("grpcretry: client connection is closed")
	// ErrNotConnected: the call's attempts reached no server, and no connection was there after
	// ConnectWait.
	ErrNotConnected = errors.New("grpcretry: no connection to a server in time")
	// errLeftToGRPC is the Reason in the events of a call that gRPC retries itself, see
	// WithBuiltInRetryDisabled; its error is gRPC's own.
	errLeftToGRPC = errors.New("grpcretry: left to the retryPolicy of the channel's service config")
)

// ErrAttemptTimeout is the [context.Cause] of an attempt's context that
// WithAttemptTimeout ended, and is found in the Err of such an [Attempt] with
// [errors.Is].
var ErrAttemptTimeout = errors.New("grpcretry: attempt timeout")

// ErrHedgeLost is the [context.Cause] of an attempt's context that was ended because
// another attempt of its call, hedged by [WithHedging], was decisive. It is found in the
// Err of such an [Attempt] with [errors.Is]. To have lost is no failure.
var ErrHedgeLost = errors.New("grpcretry: another attempt of the call was decisive")

// An Error reports a call that failed although its failure was retryable: what the
// server said last, and why there was no further attempt. It also reports calls that
// the caller's context ended. Any other first failure is returned as it came.
//
// [status.Code] and [status.FromError] answer with the status of Last, details
// included. Where the caller's context ended they answer CANCELED or
// DEADLINE_EXCEEDED, and [errors.Is] finds [context.Canceled] or
// [context.DeadlineExceeded].
type Error struct {
	// Last is the last thing a server, or gRPC itself, said of the call; an attempt that
	// was cut short by a timeout or by the caller does not replace it.
	Last error
	// Reason is one of the errors above, or the [context.Cause] of the caller's context. If that
	// holds one of the errors above, because another call gave up, [errors.Is] does not find
	// it in the Error.
	Reason error
	// Attempts are the attempts made, in order, all of them failed; of a hedged call, some
	// may have been cancelled because another was decisive, see ErrHedgeLost. Of a call of
	// more than a thousand, only the latest are kept. The last one has all that its server sent;
	// the others share 16 KiB for that: one that does not fit has neither header nor trailer,
	// and an Err of the same code, with a short message and without details.
	Attempts []Attempt
	// Elapsed is the time from the start of the call to its end.
	Elapsed time.Duration
	wait    time.Duration // the wait that was rejected
	source  WaitSource    // where that came from; WaitNone if no wait was computed
	made    int           // attempts made, also where not all are kept
	ctx     error         // context.Canceled or context.DeadlineExceeded if the caller's context ended
}

// Error names the attempts made, the reason to stop, and the server's last word, of which it
// repeats at most 1 KiB.
func (e *Error) Error() string {
	made := max(e.made, len(e.Attempts))
	noun := "attempts"
	if made == 1 {
		noun = "attempt"
	}
	last := cut(fmt.Sprint(e.Last), maxText)
	return fmt.Sprintf("grpcretry: gave up after %d %s in %v: %s: %s",
		made, noun, rounded(e.Elapsed), e.reason(), last)
}

// maxText is how many bytes of what others have written are repeated in a text.
const maxText = 1 << 10

// rounded cuts what nobody reads.
func rounded(d time.Duration) time.Duration {
	if d > time.Second {
		return d.Round(time.Millisecond)
	}
	return d.Round(time.Microsecond)
}

func (e *Error) reason() string {
	if e.Reason == nil {
		return "unknown reason"
	}
	reason := cut(strings.TrimPrefix(e.Reason.Error(), "grpcretry: "), maxText/2)
	if e.source != WaitNone {
		reason += fmt.Sprintf(" (a wait of %v by %v was not started)", rounded(e.wait), e.source)
	}
	return reason
}

// Unwrap gives [errors.Is] and [errors.As] the server's last word, the reason, and the
// end of the caller's context. The errors above are found only if they are the reason of this
// call: not in the cause of the caller's context, nor in Last, where they are another call's.
func (e *Error) Unwrap() []error {
	all := make([]error, 0, 3)
	if e.Last != nil {
		all = append(all, disowned(e.Last))
	}
	if e.Reason != nil && e.ctx == nil {
		all = append(all, e.Reason)
	}
	if e.Reason != nil && e.ctx != nil {
		all = append(all, disowned(e.Reason))
	}
	if e.ctx != nil {
		all = append(all, e.ctx)
	}
	return all
}

// disowned returns err, without our reasons for errors.Is to find.
func disowned(err error) error {
	for _, r := range reasons {
		if errors.Is(err, r.err) {
			return anothers{err}
		}
	}
	return err
}

// An anothers error holds a reason of ours that is another call's.
type anothers struct{ error }

func (a anothers) Is(target error) bool { return !isReason(target) && errors.Is(a.error, target) }

func (a anothers) As(target any) bool { return errors.As(a.error, target) }

func isReason(err error) bool {
	return slices.ContainsFunc(reasons[:], func(r namedReason) bool { return r.err == err }) //nolint:errorlint // identity is meant
}

// GRPCStatus makes [status.FromError] and [status.Code] work on an Error.
func (e *Error) GRPCStatus() *status.Status {
	switch {
	case errors.Is(e.ctx, context.Canceled):
		return status.New(codes.Canceled, e.Error())
	case e.ctx != nil:
		return status.New(codes.DeadlineExceeded, e.Error())
	case e.Last == nil:
		return status.New(codes.Unknown, e.Error())
	default:
		return status.Convert(e.Last)
	}
}

// attemptTimeoutError is how an attempt ended that ran into our attempt timeout.
type attemptTimeoutError struct {
	timeout time.Duration
	err     error // what gRPC said of that, such as why there was no connection; nil if nothing
}

// newAttemptTimeoutError keeps err if it says more than that a context has ended.
func newAttemptTimeoutError(timeout time.Duration, err error) *attemptTimeoutError {
	e := &attemptTimeoutError{timeout: timeout}
	switch message := status.Convert(err).Message(); message {
	case "", context.Canceled.Error(), context.DeadlineExceeded.Error():
	default:
		e.err = err
	}
	return e
}

func (e *attemptTimeoutError) Error() string {
	return "rpc error: code = DeadlineExceeded desc = " + e.message()
}

func (e *attemptTimeoutError) message() string {
	text := fmt.Sprintf("attempt timeout of %v", e.timeout)
	if e.err != nil {
		text += ": " + cut(status.Convert(e.err).Message(), maxText)
	}
	return text
}

// Unwrap does not lead to context.Canceled, with which we ended the attempt: [errors.Is] would
// take it for the caller's.
func (e *attemptTimeoutError) Unwrap() []error {
	if e.err == nil || errors.Is(e.err, context.Canceled) || errors.Is(e.err, context.DeadlineExceeded) {
		return []error{ErrAttemptTimeout}
	}
	return []error{ErrAttemptTimeout, e.err}
}

func (e *attemptTimeoutError) GRPCStatus() *status.Status {
	return status.New(codes.DeadlineExceeded, e.message())
}

// errHedgeLost is how an attempt ended that lost.
var errHedgeLost error = hedgeLostError{}

type hedgeLostError struct{}

func (hedgeLostError) Error() string {
	return "rpc error: code = Canceled desc = another attempt of the call was decisive"
}

func (hedgeLostError) Unwrap() error { return ErrHedgeLost }

func (hedgeLostError) GRPCStatus() *status.Status {
	return status.New(codes.Canceled, "another attempt of the call was decisive")
}
