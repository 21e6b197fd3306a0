package lazy

import (
	"context"
	"errors"
	"sync"
	"testing"
)

var errFirst, errSecond = errors.New("first"), errors.New("second")

func TestContextIsMadeWhenItIsNeeded(t *testing.T) {
	var c Context
	if c.Current(t.Context()) != t.Context() || c.Cause() != nil {
		t.Error("a context that nobody needs is not the parent")
	}
	child := c.Child(t.Context())
	if child == t.Context() || child != c.Child(t.Context()) || c.Current(t.Context()) != child {
		t.Error("want one child")
	}
	c.Cancel(errFirst)
	c.Cancel(errSecond)
	if child.Err() != context.Canceled || context.Cause(child) != errFirst || c.Cause() != errFirst || t.Context().Err() != nil {
		t.Errorf("Err = %v, cause %v and %v, want the first cause", child.Err(), context.Cause(child), c.Cause())
	}
}

func TestCancelBeforeTheContextIsNeeded(t *testing.T) {
	var c Context
	c.Cancel(errFirst)
	c.Cancel(errSecond)
	for _, ctx := range []context.Context{c.Current(t.Context()), c.Child(t.Context())} {
		if ctx.Err() != context.Canceled || context.Cause(ctx) != errFirst {
			t.Errorf("Err = %v, cause %v, want %v", ctx.Err(), context.Cause(ctx), errFirst)
		}
	}
}

func TestTheParentsEndIsTheChilds(t *testing.T) {
	parent, stop := context.WithCancelCause(t.Context())
	var made, unmade Context
	child := made.Child(parent)
	stop(errFirst)
	if child.Err() == nil || context.Cause(child) != errFirst || unmade.Current(parent).Err() == nil || made.Cause() != nil {
		t.Errorf("Err = %v and %v after the parent's end, cause %v", child.Err(), unmade.Current(parent).Err(), made.Cause())
	}
}

func TestCancelAndDoneMayMeet(t *testing.T) {
	for range 1000 {
		var c Context
		var all sync.WaitGroup
		all.Go(func() { c.Cancel(errFirst) })
		all.Go(func() { <-c.Child(t.Context()).Done() })
		all.Wait()
	}
}
