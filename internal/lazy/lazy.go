// Package lazy has a context that is made only if it is needed.
package lazy

import (
	"context"
	"sync"
)

// A Context may be cancelled before its parent is. The context for that is made when it is first asked for its
// Done: one that nobody waits for costs nothing. The parent is always the same. The zero value is not cancelled. It is
// safe for concurrent use.
type Context struct {
	mu    sync.Mutex
	ctx   context.Context // guarded by mu; nil until it is needed
	stop  context.CancelCauseFunc
	cause error // guarded by mu; nil until Cancel
}

// Child returns the context itself, a child of its parent.
func (c *Context) Child(parent context.Context) context.Context {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.ctx == nil {
		c.ctx, c.stop = context.WithCancelCause(parent)
		if c.cause != nil {
			c.stop(c.cause)
		}
	}
	return c.ctx
}

// Current returns a context for values and errors: the child or, as long as that would return the same, the parent.
func (c *Context) Current(parent context.Context) context.Context {
	c.mu.Lock()
	same := c.ctx == nil && c.cause == nil
	c.mu.Unlock()
	if same {
		return parent
	}
	return c.Child(parent)
}

// Cancel cancels the context because of cause, unless it is cancelled already.
func (c *Context) Cancel(cause error) {
	c.mu.Lock()
	if c.cause == nil {
		c.cause = cause
	}
	stop := c.stop
	c.mu.Unlock()
	if stop != nil {
		stop(cause)
	}
}

// Cause returns the cause of the first Cancel, nil before.
func (c *Context) Cause() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.cause
}
