// Package lazy has a context that is made only if it is needed.
package lazy

import (
	"context"
	"sync"
)

// A Context may be cancelled before its parent is. That takes a child of the parent, which is made when Done is first called: a
// Context that nobody waits for costs nothing. It is safe for concurrent use.
type Context struct {
	context.Context // the parent; set before the first use

	mu    sync.Mutex
	child context.Context // guarded by mu; nil until it is needed
	stop  context.CancelCauseFunc
	cause error // guarded by mu; nil until Cancel
}

// Done implements [context.Context].
func (c *Context) Done() <-chan struct{} { return c.made().Done() }

// Err implements [context.Context].
func (c *Context) Err() error { return c.current().Err() }

// Value implements [context.Context].
func (c *Context) Value(key any) any { return c.current().Value(key) }

// made returns the child.
func (c *Context) made() context.Context {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.child == nil {
		c.child, c.stop = context.WithCancelCause(c.Context)
		if c.cause != nil {
			c.stop(c.cause)
		}
	}
	return c.child
}

// current returns the child or, as long as that would say the same, the parent.
func (c *Context) current() context.Context {
	c.mu.Lock()
	same := c.child == nil && c.cause == nil
	c.mu.Unlock()
	if same {
		return c.Context
	}
	return c.made()
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
