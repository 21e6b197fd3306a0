package grpcretry

import (
	"context"

	"google.golang.org/grpc/metadata"
)

// This file has the rules about services that call one another. If each of them makes three attempts,
// three layers make 27. Two measures prevent that; both need the server interceptors, which tell the
// calls made by a handler what request they are made for:
//
//   - A service whose call has given up forbids its own caller to retry. See gaveUp for the calls, and
//     UnaryServerInterceptor for the response.
//   - A call made for a request that is a retry, or for one that is made for a retry, makes one
//     attempt: the retries further up cover it. See plan.again for the rule.

// retriedUpstreamKey is the request header of a call that a service further up retries.
const retriedUpstreamKey = "grpcretry-retried-upstream"

// A retriedBy says which service retries the work of a request, as seen by the server that handles it.
type retriedBy string

// The values are those of telemetry.AttrRetriedBy.
const (
	nobody   retriedBy = ""
	caller   retriedBy = "caller"   // the request is a retry
	upstream retriedBy = "upstream" // the request was sent for one that is
)

// retriedByOf returns which service retries the request that is handled in ctx.
func retriedByOf(ctx context.Context) retriedBy {
	switch {
	case PreviousAttempts(ctx) > 0:
		return caller
	case len(metadata.ValueFromIncomingContext(ctx, retriedUpstreamKey)) > 0:
		return upstream
	default:
		return nobody
	}
}

// gaveUp reports whether a call that ended for a reason has used up its attempts, its time or its
// budget, or was told not to go on: then its caller's caller must not start again. reached says that an
// attempt has reached a server. A call that waited for a connection in vain has not given up, whether it
// was ConnectWait or the time that ended the wait: another server may have a connection. Neither has a
// call that the caller ended, or one that leaves the retries to a service further up.
func gaveUp(reason error, reached bool) bool {
	switch reason {
	case ErrAttemptsExhausted, ErrBudgetExhausted, ErrPushback: //nolint:errorlint // the rules' own values
		return true
	case ErrDeadline, ErrMaxElapsed:
		return reached
	default:
		return false
	}
}

// forbidsRetry reports whether a server's trailer says "do not retry".
func forbidsRetry(trailer metadata.MD) bool {
	p, _ := PushbackFrom(trailer, nil)
	return p.Stop
}

// errGaveUp is what errors.Is finds in an Error that reports a call which gave up.
var errGaveUp error = gaveUpError{}

type gaveUpError struct{}

func (gaveUpError) Error() string { return "grpcretry: gave up" }
