// Package drive lets the other packages of this repository make calls whose attempts they send
// themselves, in simulated time or by another protocol, under the policies of a grpcretry.Retrier.
package drive

import (
	"context"
	"time"
)

// A Plan holds the state of one such call; A is [grpcretry.Attempt]. Its driver sends attempts, reports
// how they end, and does what the returned [Step] says. The Plan applies the method's policy, by the same
// rules and in the same order as for gRPC calls, and makes all deposits and withdrawals. It serves
// retried and hedged calls alike.
//
// A Plan never waits, reads a clock or draws a random number: the driver supplies times and random
// numbers in [0, 1), which may be simulated. The times are within a century of the real time.
// Observers, spans and metrics see nothing of the call, and the logger only what concerns the target. A
// Plan is not safe for concurrent use.
type Plan[A any] interface {
	// Sent reports that an attempt, be it the first, is sent at the time now. It returns the attempt's
	// Method, Number, Hedge, Start, Wait and WaitSource, and how long the attempt may run before the driver
	// calls Overdue; a timeout of 0 means no limit.
	Sent(now time.Time) (a A, timeout time.Duration)

	// Ended reports, once for each attempt, how it ended at the time now. The driver passes the Attempt
	// that Sent returned, with Duration and, if it failed, Err, which is judged by its status code. It must
	// be ErrAttemptTimeout for an attempt that was cut, and ErrHedgeLost for one that was cancelled because
	// the call is over. The driver may also set Trailer, which can hold a server's pushback; Unsent, if the
	// attempt reached no server; and the other fields, which only a Classifier reads.
	//
	// A success ends the call. It must be reported before the attempts that lose to it.
	Ended(a A, now time.Time, u float64) Step

	// Overdue decides what follows an attempt that is still in flight after its timeout. If another
	// attempt may replace it, that becomes due at DueAt, and the overdue one goes on until then: the Step
	// of Due says to cut it. If none may, it goes on to the call's deadline; without a deadline this Step
	// says to cut it. While another attempt is pending, nothing is decided yet: as soon as that has been sent or
	// given up, DueAt is now, and the Step of Due has the answer.
	Overdue(a A, now time.Time, u float64) Step

	// Due returns the Step at DueAt, as soon as a connection is ready for which a Step said to wait, or as
	// soon as the call's context ends while no attempt is in flight. If neither Send, Cut nor End is set, the
	// driver waits until the new DueAt, which may be the same. The random numbers of repeated waits are
	// derived from the one that Ended received.
	Due(now time.Time) Step

	// DueAt returns when to call Due; the zero time means never. Every other method may change it.
	DueAt() time.Time

	// RequestHeader returns what an RPC sends with an attempt such as the newest one, so that the server's
	// interceptor and PreviousAttempts know about it; nil if that is nothing.
	RequestHeader() map[string]string
}

// A Step tells a [Plan]'s driver what to do next. Attempts in flight continue, unless Cut or End says otherwise.
type Step struct {
	// Send is true if an attempt is to be sent now.
	Send bool
	// Cut is the number of an overdue attempt that the driver must cancel now, because another one
	// replaces it or because the call has no deadline. The driver then calls Ended with ErrAttemptTimeout,
	// and does what that Step says. 0 stands for none.
	Cut int
	// Connect is true if the driver is to wait for a connection: it calls Due as soon as there is one,
	// and at DueAt at the latest.
	Connect bool
	// End is true if the call is over. The driver cancels the attempts in flight and reports each with
	// Ended and ErrHedgeLost.
	End bool
	// Reason is an error as in Error.Reason: why no attempt follows the one that was reported, or
	// why a hedge that was due is not sent. It is nil after a success, and if another attempt
	// follows, immediately or at DueAt.
	Reason error
}

// New returns a Plan for a call that starts at the time start, under the policy of a *grpcretry.Retrier
// for a method of the form "/pkg.Service/Method". The call ends with ctx, at the latest at its deadline,
// and the policy's Classifier is called with ctx. If ctx is that of a server's handler, the Plan follows
// the rules of UnaryServerInterceptor. The target names the backend: it may be any string, and in gRPC's
// canonical form, "dns:///shop:443", it shares the budget of RPCs to that target. The options,
// a []grpcretry.CallOption or nil, are the call's own; New panics if one is invalid.
//
// A method whose calls pass through gets a Plan of one attempt that spends and reports nothing.
func New[A any](ctx context.Context, retrier any, method, target string, start time.Time, opts any) Plan[A] {
	return Make(ctx, retrier, method, target, start, opts).(Plan[A])
}

// Make is New without types. Package grpcretry sets it.
var Make func(ctx context.Context, retrier any, method, target string, start time.Time, opts any) any
