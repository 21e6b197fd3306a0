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
	// IsLast is called, on another goroutine than Run, when an attempt has reached its timeout, and
	// reports whether no other attempt can follow it.
	IsLast func() bool
	// UnsentOnly is set if more than one attempt is allowed only under a policy with WithUnsentOnly.
	UnsentOnly bool
}

// Do makes the call with the policies of retrier, a *grpcretry.Retrier. Package grpcretry sets it.
var Do func(ctx context.Context, retrier any, c *Call) error
