// Package function lets package httpretry make calls that need more than Retrier.Do offers.
package function

import "context"

// A Call runs a function under the policy for a name, as Retrier.Do does.
type Call struct {
	Name   string // names the policy
	Target string // the backend whose budget is used, and which telemetry shows

	// Run makes one attempt.
	Run func(context.Context) error
	// Discard is called when an attempt has failed and another has been decided on, before the wait
	// for it.
	Discard func()
	// IsLast is called when an attempt has failed or, on another goroutine than Run, has reached its timeout, and
	// reports whether no other attempt can follow it. Then the call ends with that attempt's failure.
	IsLast func() bool
	// UnsentOnly is set if more than one attempt is allowed only under a policy with WithUnsentOnly.
	UnsentOnly bool
}

// Do makes the call with the policies of retrier, a *grpcretry.Retrier. Package grpcretry sets it.
var Do func(ctx context.Context, retrier any, c *Call) error

// MarkUnsent marks the error of an attempt that certainly had no effect anywhere, such as one that could
// not be sent because there was no connection; a nil err stays nil. It does not make an error retryable by
// itself. With WithUnsentOnly, only such errors and those with a RetryInfo are retried. The attempt neither
// counts towards WithMaxAttempts nor costs a token, and while there is patience, the function is called
// again after its backoff, or after the RetryInfo, and after a millisecond at least.
//
// The mark holds for the errors that wrap err. An error that wraps several has it if all of them have it,
// and the *grpcretry.Error of another call has it if all its attempts failed with it.
func MarkUnsent(err error) error {
	if err == nil {
		return nil
	}
	return &UnsentError{err}
}

// An UnsentError is a marked error.
type UnsentError struct{ error }

// Unwrap returns the error.
func (e *UnsentError) Unwrap() error { return e.error }
