// Package layers passes what a server knows about the request that it handles to the calls made for
// it, and back what those calls have come to.
package layers

import (
	"context"
	"sync/atomic"
)

// A Request is a request that a server handles, and the context for its handler.
type Request struct {
	context.Context

	// Retry says that a service further up retries the work: the request is a retry, or it is made
	// for one. It is never changed.
	Retry bool

	gaveUp atomic.Bool
}

// New returns the Request that is handled in ctx.
func New(ctx context.Context, retry bool) *Request { return &Request{Context: ctx, Retry: retry} }

type key struct{}

// Value implements context.Context.
func (r *Request) Value(k any) any {
	if k == (key{}) {
		return r
	}
	return r.Context.Value(k)
}

// Of returns the Request that ctx belongs to, nil if there is none. A context that
// context.WithoutCancel has detached still belongs to it.
func Of(ctx context.Context) *Request {
	r, _ := ctx.Value(key{}).(*Request)
	return r
}

// IsRetry reports whether a service further up retries the work. A nil Request is no retry.
func (r *Request) IsRetry() bool { return r != nil && r.Retry }

// GiveUp records that a call made for the request has given up. It does nothing to a nil Request.
func (r *Request) GiveUp() {
	if r != nil {
		r.gaveUp.Store(true)
	}
}

// GaveUp reports whether a call made for the request has given up.
func (r *Request) GaveUp() bool { return r != nil && r.gaveUp.Load() }
