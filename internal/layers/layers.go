// Package layers passes what a server knows about the request that it handles to the calls made for
// it, and back what those calls have come to.
package layers

import (
	"context"
	"sync/atomic"

	"google.golang.org/grpc"
)

// A Request is a request that a server handles, and the context for its handler.
type Request struct {
	context.Context

	retry     bool // a service further up retries the work; never changed
	transport grpc.ServerTransportStream
	responded atomic.Bool
	gaveUp    atomic.Bool
	forbidden atomic.Bool
}

// inUse is set when the process has handled its first Request, so that programs that are only clients
// do not search for one.
var inUse atomic.Bool

// New returns the Request that is handled in ctx. retry says that a service further up retries the
// work: the request is a retry, or it is made for one.
func New(ctx context.Context, retry bool) *Request {
	if !inUse.Load() {
		inUse.Store(true)
	}
	return &Request{Context: ctx, retry: retry, transport: grpc.ServerTransportStreamFromContext(ctx)}
}

type key struct{}

// Value implements context.Context.
func (r *Request) Value(k any) any {
	if k == (key{}) {
		return r
	}
	return r.Context.Value(k)
}

// String keeps package fmt, which mocks and loggers pass contexts to, from reading fields that may be
// changing.
func (*Request) String() string { return "grpcretry.Request" }

// Of returns the Request that ctx belongs to, nil if there is none. A context that
// context.WithoutCancel has detached still belongs to it.
func Of(ctx context.Context) *Request {
	if !inUse.Load() {
		return nil
	}
	r, _ := ctx.Value(key{}).(*Request)
	return r
}

// Handles reports whether ctx is that of the same request. It is not if a server has got the context
// of its client, as some do that run in one process with it.
func (r *Request) Handles(ctx context.Context) bool {
	return r != nil && r.transport == grpc.ServerTransportStreamFromContext(ctx)
}

// IsRetry reports whether a service further up retries the work. A nil Request is no retry.
func (r *Request) IsRetry() bool { return r != nil && r.retry && !r.responded.Load() }

// Respond records that the handler has returned, or has sent a message: from then on no service further
// up makes up for the failure of a call.
func (r *Request) Respond() {
	if r.retry && !r.responded.Load() {
		r.responded.Store(true)
	}
}

// GiveUp records that a call made for the request has given up. It does nothing to a nil Request.
func (r *Request) GiveUp() {
	if r != nil {
		r.gaveUp.Store(true)
	}
}

// GaveUp reports whether a call made for the request has given up.
func (r *Request) GaveUp() bool { return r != nil && r.gaveUp.Load() }

// Forbids reports whether the response says "do not retry".
func (r *Request) Forbids() bool { return r.forbidden.Load() }

// Forbid records that the response says "do not retry", and reports whether it did not say so before.
func (r *Request) Forbid() bool { return !r.forbidden.Swap(true) }
