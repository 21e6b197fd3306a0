package grpcretry

import (
	"context"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/connectivity"
)

// This file implements the timeout that a channel's service config may set for a method. gRPC applies
// the timeout to each call that it is handed, which is each attempt. For gRPC's own retries it
// covers all attempts, and so it does here: gRPC applies it to the first attempt, and when there is
// something to decide about the call, its end becomes the call's deadline. A call that succeeds on
// its first attempt needs no more.
//
// An interceptor cannot see the timeouts of xDS routes; they apply to each attempt.

// readServiceConfig takes from the channel's service config what applies to the call. first is the
// call's first attempt.
func (p *plan) readServiceConfig(first *attempt, now time.Time) {
	if p.unresolved != nil {
		p.obey(p.unresolved.resolve())
	}
	p.limit(first, now)
}

// limit makes the end of the service config's timeout the call's deadline, unless the caller's is
// earlier.
func (p *plan) limit(first *attempt, now time.Time) {
	if p.limited {
		return
	}
	end, ok := first.serviceDeadline(now)
	if ok && (p.deadline.IsZero() || end.Before(p.deadline)) {
		p.deadline, p.limited = end, true
	}
}

// serviceDeadline returns when gRPC ends a call's first attempt because of the service config's
// timeout; ok is false if there is none. On a fresh channel, gRPC waits for the config, and starts
// the timeout after that.
func (a *attempt) serviceDeadline(now time.Time) (end time.Time, ok bool) {
	if a.cc == nil {
		return time.Time{}, false
	}
	timeout := a.cc.GetMethodConfig(a.method).Timeout
	if timeout == nil || *timeout < 0 {
		return time.Time{}, false
	}
	start := a.start
	if e := a.extras.Load(); e != nil {
		start = max(start, time.Duration(e.asked.Load()))
	}
	return timeOf(start, now).Add(*timeout), true
}

// gone returns why the call has ended by itself, nil if it has not: the caller's context has ended,
// or the caller's or the service config's deadline has passed.
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

// isFresh reports whether a channel may not have its service config yet. It runs for each call, so it
// takes no lock for the first channel that is known to have its config.
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
