package lazy

import (
	"context"
	"errors"
	"sync"
	"testing"
)

var errFirst, errSecond = errors.New("first"), errors.New("second")

func TestContextIsMadeWhenItIsNeeded(t *testing.T) {
	c := Context{Context: t.Context()}
	if c.Err() != nil || c.Value(0) != nil || c.child != nil || c.Cause() != nil {
		t.Error("a child is made although nobody needs it")
	}
	done := c.Done()
	if done == t.Context().Done() || done != c.Done() || c.current() != c.child || c.Err() != nil {
		t.Error("want one child")
	}
	c.Cancel(errFirst)
	c.Cancel(errSecond)
	<-done
	if c.Err() != context.Canceled || context.Cause(&c) != errFirst || c.Cause() != errFirst || t.Context().Err() != nil {
		t.Errorf("Err = %v, cause %v and %v, want the first cause", c.Err(), context.Cause(&c), c.Cause())
	}
}

func TestCancelBeforeTheContextIsNeeded(t *testing.T) {
	c := Context{Context: t.Context()}
	c.Cancel(errFirst)
	c.Cancel(errSecond)
	if c.Err() != context.Canceled || context.Cause(&c) != errFirst {
		t.Errorf("Err = %v, cause %v, want %v", c.Err(), context.Cause(&c), errFirst)
	}
	<-c.Done()
}

func TestTheParentsEndIsTheChilds(t *testing.T) {
	parent, stop := context.WithCancelCause(t.Context())
	made, unmade := Context{Context: parent}, Context{Context: parent}
	done := made.Done()
	stop(errFirst)
	<-done
	for _, c := range []*Context{&made, &unmade} {
		if c.Err() == nil || context.Cause(c) != errFirst || c.Cause() != nil {
			t.Errorf("Err = %v after the parent's end, cause %v, its own %v", c.Err(), context.Cause(c), c.Cause())
		}
	}
}

// TestChildrenEndWithTheContext is about contexts that other packages make of it.
func TestChildrenEndWithTheContext(t *testing.T) {
	c := Context{Context: t.Context()}
	child, stop := context.WithCancel(&c)
	defer stop()
	c.Cancel(errFirst)
	<-child.Done()
	if context.Cause(child) != errFirst {
		t.Errorf("a child's cause = %v, want %v", context.Cause(child), errFirst)
	}
}

func TestCancelAndDoneMayMeet(t *testing.T) {
	for range 1000 {
		c := Context{Context: t.Context()}
		var all sync.WaitGroup
		all.Go(func() { c.Cancel(errFirst) })
		all.Go(func() { <-c.Done() })
		all.Wait()
	}
}
