package grpcretry

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"slices"
	"strings"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	"github.com/grpcretry/grpcretry/internal/errtype"
	"github.com/grpcretry/grpcretry/internal/reasons"
	"github.com/grpcretry/grpcretry/internal/words"
)

// The reasons for which a call is not retried. [errors.Is] finds the one that is the Reason of an
// [Error].
var (
	// ErrAttemptsExhausted: all MaxAttempts attempts were made.
	ErrAttemptsExhausted = reasons.New(reasons.Reason{Word: "exhausted", Text: "no attempts left", GivesUp: true})
	// errCallerRetries: the call was made by a server's handler for a request that a service further up
	// retries, see [UnaryServerInterceptor]. [errors.Is] finds ErrAttemptsExhausted as well.
	errCallerRetries = reasons.New(reasons.Reason{
		Word: "caller_retries", Text: "a service further up retries", Kind: ErrAttemptsExhausted,
	})
	// ErrBudgetExhausted: this client's budget refused the retry, which was not sent.
	ErrBudgetExhausted = reasons.New(reasons.Reason{
		Word: "budget", Text: "client-side retry budget exhausted", GivesUp: true, Logged: true,
	})
	// ErrDeadline: the call's deadline would have passed before the next attempt.
	ErrDeadline = reasons.New(reasons.Reason{Word: "deadline", Text: "deadline too near for another attempt", GivesUpIfReached: true})
	// ErrMaxElapsed: the next attempt would have started after MaxElapsed.
	ErrMaxElapsed = reasons.New(reasons.Reason{
		Word: "max_elapsed", Text: "maximum elapsed time too near for another attempt", GivesUpIfReached: true,
	})
	// ErrPushback: the server forbade another attempt, or asked for a wait longer than
	// MaxServerDelay.
	ErrPushback = reasons.New(reasons.Reason{Word: "pushback", Text: "stopped by server pushback", GivesUp: true})
	// ErrNotRetryable: a retry failed with something that is not retryable or, with
	// [WithUnsentOnly], a server may have run the method.
	ErrNotRetryable = reasons.New(reasons.Reason{Word: "not_retryable", Text: "failure is not retryable", Untouched: true, Quiet: true})
	// ErrMayHaveRun: a server may have run the method, see [WithUnsentOnly]. [errors.Is] finds
	// ErrNotRetryable as well. Unlike that, it is also the Reason after a first attempt, so that the program
	// can find out whether the method has run.
	ErrMayHaveRun = reasons.New(reasons.Reason{
		Word: "may_have_run", Text: "the method may have run, and it must not run twice", Kind: ErrNotRetryable,
	})
	// errWouldRetry: an attempt would have followed, if this were not a dry run, see [WithDryRun]. Only events
	// have it, because the error is returned unchanged.
	errWouldRetry = reasons.New(reasons.Reason{Word: "would_retry", Text: "dry run: another attempt would follow"})
	// ErrCommitted: the application has seen something of the stream, or its messages cannot be replayed,
	// see [WithBufferLimit]; or a request of package httpretry has a body that cannot be sent again. An [Error] has it after a
	// retry of such a request, and if a stream's messages could no longer be replayed when a retry was due; otherwise only events
	// have it, because the error is returned unchanged.
	ErrCommitted = reasons.New(reasons.Reason{Word: "committed", Text: "call is committed", Untouched: true})
	// errConnClosed: the ClientConn was closed between two attempts.
	errConnClosed = reasons.New(reasons.Reason{
		Word: "conn_closed", Text: "client connection is closed", Untouched: true, Quiet: true, ByCaller: true,
	})
	// ErrTargetDown: the target has been failing for so long that no further wait fits into the patience for it, or too
	// many calls wait for it already, see [WithPatience].
	ErrTargetDown = reasons.New(reasons.Reason{Word: "target_down", Text: "target is down", Logged: true})
	// errInFlight is the Reason in the event of a failed attempt of a hedged call while other
	// attempts are in flight, which decide the call.
	errInFlight = reasons.New(reasons.Reason{Word: "in_flight", Text: "other attempts are in flight"})
	// errLeftToGRPC is the Reason in the events of a call that is left to gRPC's own retries, see
	// [WithBuiltInRetryDisabled], although that was not known at its start. The call returns gRPC's own error.
	errLeftToGRPC = reasons.New(reasons.Reason{
		Word: "left_to_grpc", Text: "left to the retryPolicy of the channel's service config", Untouched: true, Quiet: true,
	})
)

// ErrAttemptTimeout is the [context.Cause] of an attempt's context that was cancelled because of
// [WithAttemptTimeout]. [errors.Is] finds it in the Err of such an [Attempt].
var ErrAttemptTimeout = errors.New("grpcretry: attempt timeout")

// ErrHedgeLost is the [context.Cause] of an attempt's context that was cancelled because another
// attempt of its call, hedged by [WithHedging], was decisive. [errors.Is] finds it in the Err of
// such an [Attempt]. An attempt that lost does not count as failed.
var ErrHedgeLost = errors.New("grpcretry: another attempt of the call was decisive")

// An Error reports a call that failed although its failure was retryable. It holds the server's
// last status and the reason for which there was no further attempt. It also reports calls that
// ended because the caller's context did; a timeout in the channel's service config counts as a deadline of that context. A
// function's first error is returned unchanged if it is, or wraps, the cause that the program gave that context
// ([context.WithCancelCause]). If the first attempt fails in any other way, gRPC's error is returned unchanged.
//
// [status.Code] and [status.FromError] return the status of Last, including its details. If the
// caller's context has ended, they return CANCELED or DEADLINE_EXCEEDED, and [errors.Is] finds
// [context.Canceled] or [context.DeadlineExceeded].
type Error struct {
	// Last is the last error that a server, or gRPC itself, returned. The error of an attempt that
	// a timeout or the caller cut short does not replace it.
	Last error
	// Reason is one of the errors above, or the [context.Cause] of the caller's context. If that
	// cause is or holds one of the errors above, because another call gave up, [errors.Is] does not find
	// that in the Error, and Reason has only the text of the cause.
	Reason error
	// Attempts are the call's attempts, in order. All of them failed, except that in a hedged call
	// some may have been cancelled because another was decisive, see ErrHedgeLost. Only the latest
	// 16 are kept; the text states how many were made.
	Attempts []Attempt
	// Elapsed is the time from the start of the call to its end.
	Elapsed time.Duration

	wait      time.Duration // the wait that was rejected
	source    WaitSource    // the source of that wait; waitNone if no wait was computed
	made      int           // the number of attempts made, even if not all are kept
	final     bool          // the call has given up, so that its caller's caller must not start again
	tokenless bool          // the call has waited in vain for a token of the budget
	ctx       error         // context.Canceled or context.DeadlineExceeded if the caller's context ended
}

// Error returns a text with the number of attempts, the reason for stopping, and at most 1 KiB of
// the last error.
func (e *Error) Error() string {
	made := max(e.made, len(e.Attempts))
	noun := "attempts"
	if made == 1 {
		noun = "attempt"
	}
	return fmt.Sprintf("grpcretry: gave up after %d %s in %v: %s: %s",
		made, noun, words.Rounded(e.Elapsed), e.reason(), words.Truncate(fmt.Sprint(e.Last), maxText))
}

// maxText bounds the part of another error's text that our texts repeat, in bytes.
const maxText = 1 << 10

// reason returns the text of the Reason, with the wait that was rejected, if there was one.
func (e *Error) reason() string {
	if e.Reason == nil {
		return "unknown reason"
	}
	reason := words.Truncate(strings.TrimPrefix(e.Reason.Error(), "grpcretry: "), maxText/2)
	switch {
	case e.tokenless:
		reason += " (the client-side retry budget had no token for another attempt)"
	case e.source != waitNone:
		reason += fmt.Sprintf(" (a wait of %v by %v was not started)", words.Rounded(e.wait), e.source)
	}
	return reason
}

// Unwrap lets [errors.Is] and [errors.As] find the last error, the reason, and the end of the
// caller's context. The reasons above are found only if they are this call's Reason. In the cause
// of the caller's context, and in Last, they are another call's, so they are not found.
func (e *Error) Unwrap() []error {
	reason := e.Reason
	if e.ctx != nil {
		reason = reasons.Disown(reason)
	}
	all := []error{reasons.Disown(e.Last), reason, e.ctx}
	return slices.DeleteFunc(all, func(err error) bool { return err == nil })
}

// is reports whether a call ends for the given one of our reasons, and not for a caller's cause that
// wraps it.
func is(reason, ours error) bool { return reasons.Of(reason) == reasons.Of(ours) }

// tellsOfGivingUp reports whether err is, or wraps, the Error of a call that gave up.
func tellsOfGivingUp(err error) bool {
	e, _ := errtype.As[*Error](err)
	return e != nil && (e.final || reasons.Of(e.Reason).GivesUp || forbidsRetry(e.trailer()))
}

// trailer returns the trailer of the call's last attempt, or the one that forbids a retry: of a hedged call it may be an earlier one.
func (e *Error) trailer() (trailer metadata.MD) {
	for i := 0; i < len(e.Attempts) && !forbidsRetry(trailer); i++ {
		trailer = e.Attempts[i].Trailer
	}
	return trailer
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

// An attemptError is the error of an attempt that this library has ended.
type attemptError struct {
	code    codes.Code
	message string
	wraps   []error
}

// newAttemptTimeoutError returns the error of an attempt that exceeded the attempt timeout. err is gRPC's own
// error, such as the reason why there was no connection; it is kept if it says more than that a context has
// ended. [context.Canceled], by which the attempt was ended, is hidden: [errors.Is] would mistake it for the
// caller's.
func newAttemptTimeoutError(timeout time.Duration, err error) *attemptError {
	e := &attemptError{codes.DeadlineExceeded, fmt.Sprintf("attempt timeout of %v", timeout), []error{ErrAttemptTimeout}}
	switch message := status.Convert(err).Message(); message {
	case "", context.Canceled.Error(), context.DeadlineExceeded.Error(), ErrAttemptTimeout.Error():
	default:
		e.message += ": " + words.Truncate(message, maxText)
		if !errors.Is(err, context.Canceled) && !errors.Is(err, context.DeadlineExceeded) {
			e.wraps = append(e.wraps, err)
		}
	}
	return e
}

// errHedgeLost is the error of an attempt that lost to another one.
var errHedgeLost error = &attemptError{codes.Canceled, "another attempt of the call was decisive", []error{ErrHedgeLost}}

func (e *attemptError) Error() string {
	return fmt.Sprintf("rpc error: code = %v desc = %s", e.code, e.message)
}

// Timeout makes the error of an attempt timeout a timeout for [net/url.Error], among others.
func (e *attemptError) Timeout() bool { return e.code == codes.DeadlineExceeded }

func (e *attemptError) Unwrap() []error { return e.wraps }

func (e *attemptError) GRPCStatus() *status.Status { return status.New(e.code, e.message) }

// readable returns err, or another error that says so if its methods panic, as those of a nil pointer in
// an error may. gRPC does not call them; the rules and the telemetry do.
func readable(err error) (safe error) {
	if err == nil || reflect.TypeOf(err) == statusType && !reflect.ValueOf(err).IsNil() {
		return err
	}
	defer func() {
		if recover() != nil {
			safe = fmt.Errorf("grpcretry: an error of type %T, whose methods panic", err)
		}
	}()
	_, _ = status.FromError(err)
	_ = errors.Is(err, context.Canceled)
	_ = isPermanent(err)
	_ = err.Error()
	return err
}

var statusType = reflect.TypeOf(status.Error(codes.Unknown, ""))

// isSame is [errors.Is] for a target that is not ours. An error of a type that can be compared may hold what cannot, and then comparing
// panics.
func isSame(err, target error) (same bool) {
	defer func() { _ = recover() }()
	return errors.Is(err, target)
}
