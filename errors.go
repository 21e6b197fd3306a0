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

// The reasons for which a call is not retried. [errors.Is] finds the one that is the Reason of an
// [Error].
var (
	// ErrAttemptsExhausted: all MaxAttempts attempts were made.
	ErrAttemptsExhausted = errors.New("grpcretry: no attempts left")
	// ErrRetriedUpstream: the call was made by a server's handler for a request that a service further up
	// retries, see [UnaryServerInterceptor]. [errors.Is] finds ErrAttemptsExhausted as well.
	ErrRetriedUpstream = fmt.Errorf("%w: a service further up retries", ErrAttemptsExhausted)
	// ErrBudgetExhausted: this client's budget refused the retry, which was not sent.
	ErrBudgetExhausted = errors.New("grpcretry: client-side retry budget exhausted")
	// ErrDeadline: the call's deadline would have passed before the next attempt.
	ErrDeadline = errors.New("grpcretry: deadline too near for another attempt")
	// ErrMaxElapsed: the next attempt would have started after MaxElapsed.
	ErrMaxElapsed = errors.New("grpcretry: maximum elapsed time too near for another attempt")
	// ErrPushback: the server forbade another attempt, or asked for a wait longer than
	// MaxServerDelay.
	ErrPushback = errors.New("grpcretry: stopped by server pushback")
	// ErrNotRetryable: a retry failed with something that is not retryable or, with
	// [WithUnsentOnly], a server may have run the method.
	ErrNotRetryable = errors.New("grpcretry: failure is not retryable")
	// errMayHaveRun: the same, because of WithUnsentOnly.
	errMayHaveRun = fmt.Errorf("%w: the method may have run, and it must not run twice", ErrNotRetryable)
	// ErrCommitted: the response had started, see [WithCommitOnHeaders].
	ErrCommitted = errors.New("grpcretry: call is committed, response headers were received")
	// errConnClosed: the ClientConn was closed between two attempts.
	errConnClosed = errors.New("grpcretry: client connection is closed")
	// ErrNotConnected: there was no connection to a server within ConnectWait, see
	// [WithConnectWait].
	ErrNotConnected = errors.New("grpcretry: no connection to a server in time")
	// errLeftToGRPC is the Reason in the events of a call that is left to gRPC's own retries, see
	// [WithBuiltInRetryDisabled]. The call returns gRPC's own error.
	errLeftToGRPC = errors.New("grpcretry: left to the retryPolicy of the channel's service config")
)

// ErrAttemptTimeout is the [context.Cause] of an attempt's context that [WithAttemptTimeout]
// ended. [errors.Is] finds it in the Err of such an [Attempt].
var ErrAttemptTimeout = errors.New("grpcretry: attempt timeout")

// ErrHedgeLost is the [context.Cause] of an attempt's context that was cancelled because another
// attempt of its call, hedged by [WithHedging], was decisive. [errors.Is] finds it in the Err of
// such an [Attempt]. An attempt that lost does not count as failed.
var ErrHedgeLost = errors.New("grpcretry: another attempt of the call was decisive")

// An Error reports a call that failed although its failure was retryable. It holds the server's
// last status and the reason for which there was no further attempt. It also reports calls that
// ended because the caller's context did. If the first attempt fails in any other way, gRPC's
// error is returned unchanged.
//
// [status.Code] and [status.FromError] return the status of Last, including its details. If the
// caller's context has ended, they return CANCELED or DEADLINE_EXCEEDED, and [errors.Is] finds
// [context.Canceled] or [context.DeadlineExceeded].
type Error struct {
	// Last is the last error that a server, or gRPC itself, returned. The error of an attempt that
	// a timeout or the caller cut short does not replace it.
	Last error
	// Reason is one of the errors above, or the [context.Cause] of the caller's context. If that
	// cause holds one of the errors above, because another call gave up, [errors.Is] does not find
	// it in the Error.
	Reason error
	// Attempts are the call's attempts, in order. All of them failed, except that in a hedged call
	// some may have been cancelled because another was decisive, see ErrHedgeLost. Only the latest
	// thousand are kept. The last one has everything that its server sent. The others share 16 KiB
	// for that: an attempt that does not fit has neither header nor trailer, and its Err has the
	// same code, a short message and no details.
	Attempts []Attempt
	// Elapsed is the time from the start of the call to its end.
	Elapsed time.Duration
	wait    time.Duration // the wait that was rejected
	source  WaitSource    // the source of that wait; WaitNone if no wait was computed
	made    int           // the number of attempts made, even if not all are kept
	ctx     error         // context.Canceled or context.DeadlineExceeded if the caller's context ended

	otherPolicy bool // the attempts were distributed by another load-balancing policy than the program asks for
}

// Error returns a text with the number of attempts, the reason for stopping, and at most 1 KiB of
// the last error. If the program asks for the load-balancing policy of package balancer, and the
// channel has another, the text says so.
func (e *Error) Error() string {
	made := max(e.made, len(e.Attempts))
	noun := "attempts"
	if made == 1 {
		noun = "attempt"
	}
	last := cut(fmt.Sprint(e.Last), maxText)
	text := fmt.Sprintf("grpcretry: gave up after %d %s in %v: %s: %s",
		made, noun, rounded(e.Elapsed), e.reason(), last)
	if e.otherPolicy {
		text += "; " + otherPolicyNote
	}
	return text
}

// maxText bounds the part of another error's text that our texts repeat, in bytes.
const maxText = 1 << 10

// rounded drops digits that are of no use to a reader.
func rounded(d time.Duration) time.Duration {
	if d > time.Second {
		return d.Round(time.Millisecond)
	}
	return d.Round(time.Microsecond)
}

// reason returns the text of the Reason, with the wait that was rejected, if there was one.
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

// Unwrap lets [errors.Is] and [errors.As] find the last error, the reason, and the end of the
// caller's context. The reasons above are found only if they are this call's Reason. In the cause
// of the caller's context, and in Last, they are another call's, so they are not found.
func (e *Error) Unwrap() []error {
	all := make([]error, 0, 3)
	if e.Last != nil {
		all = append(all, disowned(e.Last))
	}
	switch {
	case e.Reason != nil && e.ctx != nil:
		all = append(all, disowned(e.Reason))
	case e.Reason != nil:
		all = append(all, e.Reason)
	}
	if e.ctx != nil {
		all = append(all, e.ctx)
	}
	return all
}

// disowned returns err in a form in which errors.Is finds none of our reasons.
func disowned(err error) error {
	for _, r := range reasons {
		if errors.Is(err, r.err) {
			return anothers{err}
		}
	}
	return err
}

// An anothers error holds one of our reasons that is another call's.
type anothers struct{ error }

func (a anothers) Is(target error) bool { return !isReason(target) && errors.Is(a.error, target) }

func (a anothers) As(target any) bool { return errors.As(a.error, target) }

func isReason(err error) bool {
	return slices.ContainsFunc(reasons[:], func(r namedReason) bool { return r.err == err }) //nolint:errorlint // identity is meant
}

// Timeout reports whether the caller's deadline ended the call, or the last error was a timeout. It
// makes the error a timeout for [net/url.Error], among others.
func (e *Error) Timeout() bool {
	if e.ctx != nil {
		return errors.Is(e.ctx, context.DeadlineExceeded)
	}
	last, ok := errors.AsType[interface {
		error
		Timeout() bool
	}](e.Last)
	return ok && last.Timeout()
}

// Is makes [errors.Is] find a call that gave up, for the server interceptors.
func (e *Error) Is(target error) bool {
	if e == nil || target != errGaveUp {
		return false
	}
	attempts := e.Attempts
	return gaveUp(e.Reason, e.hasReachedServer()) || len(attempts) > 0 && forbidsRetry(attempts[len(attempts)-1].Trailer)
}

// hasReachedServer reports whether one of the attempts has reached a server, or may have.
func (e *Error) hasReachedServer() bool {
	return e.made > len(e.Attempts) || slices.ContainsFunc(e.Attempts, func(a Attempt) bool { return !a.Unsent })
}

// GRPCStatus returns the status that [status.FromError] and [status.Code] report.
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

// An attemptTimeoutError is the error of an attempt that exceeded the attempt timeout.
type attemptTimeoutError struct {
	timeout time.Duration
	err     error // gRPC's own error, such as the reason why there was no connection; nil if it says nothing more
}

// newAttemptTimeoutError keeps err if its message says more than that a context has ended.
func newAttemptTimeoutError(timeout time.Duration, err error) *attemptTimeoutError {
	e := &attemptTimeoutError{timeout: timeout}
	switch message := status.Convert(err).Message(); message {
	case "", context.Canceled.Error(), context.DeadlineExceeded.Error(), ErrAttemptTimeout.Error():
	default:
		e.err = err
	}
	return e
}

func (e *attemptTimeoutError) Error() string {
	return "rpc error: code = DeadlineExceeded desc = " + e.message()
}

// Timeout makes the error a timeout for [net/url.Error], among others.
func (e *attemptTimeoutError) Timeout() bool { return true }

func (e *attemptTimeoutError) message() string {
	text := fmt.Sprintf("attempt timeout of %v", e.timeout)
	if e.err != nil {
		text += ": " + cut(status.Convert(e.err).Message(), maxText)
	}
	return text
}

// Unwrap hides context.Canceled, by which this package ended the attempt: [errors.Is] would
// mistake it for the caller's.
func (e *attemptTimeoutError) Unwrap() []error {
	if e.err == nil || errors.Is(e.err, context.Canceled) || errors.Is(e.err, context.DeadlineExceeded) {
		return []error{ErrAttemptTimeout}
	}
	return []error{ErrAttemptTimeout, e.err}
}

func (e *attemptTimeoutError) GRPCStatus() *status.Status {
	return status.New(codes.DeadlineExceeded, e.message())
}

// errHedgeLost is the error of an attempt that lost to another one.
var errHedgeLost error = hedgeLostError{}

type hedgeLostError struct{}

func (hedgeLostError) Error() string {
	return "rpc error: code = Canceled desc = another attempt of the call was decisive"
}

func (hedgeLostError) Unwrap() error { return ErrHedgeLost }

func (hedgeLostError) GRPCStatus() *status.Status {
	return status.New(codes.Canceled, "another attempt of the call was decisive")
}
