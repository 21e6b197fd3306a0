// Package layers carries what a server knows about its request to the calls that its handler makes,
// and their outcome back.
package layers

import (
	"context"
	"sync/atomic"

	"google.golang.org/grpc"
)

// A Request is a request that a server handles, and the context for its handler.
type Request struct {
	context.Context

	retry     bool // calls made for it make one attempt, see Measures.Limit; never changed
	transport grpc.ServerTransportStream
	responded atomic.Bool
	gaveUp    atomic.Bool
	forbidden atomic.Bool
}

// inUse is set when the process has handled its first Request, so that programs that are only clients
// do not search for one.
var inUse atomic.Bool

// New returns the Request that is handled in ctx. retry says that calls made for it make one attempt,
// because a service further up retries the work, see [Measures.Limit].
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

// IsRetry reports whether calls made for the request make one attempt, because a service further up
// retries the work. A nil Request is no retry.
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

// Measures are what a server does against retries that multiply.
type Measures struct {
	StopsCallers bool // the response says "do not retry" if a call of the handler has given up
	OneAttempt   bool // calls make one attempt if Limit says so
}

// Limit reports whether the calls made for a request make one attempt. retry says that the request is a
// retry. If all attempts before got a response, none of them had given up, or the response would have
// said so; unless this server does not say so. Otherwise an attempt before may have given up, or may
// still be at work.
func (m Measures) Limit(retry bool, mark Mark) bool {
	switch {
	case !m.OneAttempt:
		return false
	case mark == Answered:
		return retry && !m.StopsCallers
	default:
		return retry || mark == Limited
	}
}
