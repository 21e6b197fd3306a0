package grpcretry

import (
	"context"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/connectivity"
)

// The service config of a channel may give a method a timeout. gRPC applies it to each call that
// it is handed, which is each attempt. For its own retries it covers all attempts, and so it does
// here: the first attempt has gRPC's, and when something is decided about the call, its end
// becomes the deadline of the call. A call that succeeds on its first attempt needs no more.
//
// Timeouts of xDS routes cannot be seen from an interceptor; they apply to each attempt.

// limit makes the end of the service config's timeout the deadline of the call, unless the caller's
// is earlier. first is the first attempt of the call.
func (p *plan) limit(first *attempt, now time.Time) {
	if p.limited {
		return
	}
	end, ok := first.serviceDeadline(now)
	if ok && (p.deadline.IsZero() || end.Before(p.deadline)) {
		p.deadline, p.limited = end, true
	}
}

// serviceDeadline returns when gRPC ends the first attempt of a call because of the timeout of the
// service config; ok is false without one. On a fresh channel, gRPC waits for the config, and
// starts the timeout after that.
func (a *attempt) serviceDeadline(now time.Time) (end time.Time, ok bool) {
	if a.cc == nil {
		return time.Time{}, false
	}
	timeout := a.cc.GetMethodConfig(a.method).Timeout
	if timeout == nil || *timeout < 0 {
		return time.Time{}, false
	}
	start := a.start
	if asked := a.asked.Load(); asked != 0 {
		start = time.Duration(asked)
	}
	return timeOf(start, now).Add(*timeout), true
}

// gone returns why the call has ended by itself: the caller's context has, or its deadline or that
// of the service config has come. It is nil if it has not.
func (p *plan) gone(ctx context.Context, now time.Time) error {
	if reason := endOf(ctx, now); reason != nil {
		return reason
	}
	if p.limited && !now.Before(p.deadline) {
		return context.DeadlineExceeded
	}
	return nil
}

// withLimit returns a context that ends at limit, zero for never, or when stop is called.
func withLimit(parent context.Context, limit time.Time) (ctx context.Context, stop context.CancelCauseFunc) {
	own, end := context.WithCancelCause(parent)
	if limit.IsZero() {
		return own, end
	}
	limited, free := context.WithDeadline(own, limit)
	return limited, func(cause error) {
		end(cause)
		free()
	}
}

// isFresh reports whether a channel may not have its service config yet. It is asked for each
// call, so for the channel that is known to have it, it takes no lock.
func (c *connections) isFresh(cc *grpc.ClientConn) bool {
	if cc == nil || c.known.Load() == cc {
		return false
	}
	if cc.GetState() != connectivity.Ready {
		return true
	}
	c.known.CompareAndSwap(nil, cc)
	return false
}
