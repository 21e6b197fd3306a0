// Package listeners has a list of functions that are called for every event, and that may change while they are.
package listeners

import (
	"slices"
	"sync"
	"sync/atomic"
)

// A List has listeners in the order in which they were added. The Go slice in it is replaced, never changed, so
// that events read it without a lock. The zero value is empty. It is safe for concurrent use.
type List[F any] struct {
	mu  sync.Mutex           // held to replace the slice
	all atomic.Pointer[[]*F] // nil if empty
}

// Add adds f until remove is called.
func (l *List[F]) Add(f F) (remove func()) {
	added := &f
	l.replace(func(all []*F) []*F { return append(all, added) })
	return func() {
		l.replace(func(all []*F) []*F {
			return slices.DeleteFunc(all, func(one *F) bool { return one == added })
		})
	}
}

func (l *List[F]) replace(change func([]*F) []*F) {
	l.mu.Lock()
	defer l.mu.Unlock()
	all := change(slices.Clone(l.All()))
	if len(all) == 0 {
		l.all.Store(nil)
		return
	}
	l.all.Store(&all)
}

// All returns the listeners; the slice must not be changed.
func (l *List[F]) All() []*F {
	if all := l.all.Load(); all != nil {
		return *all
	}
	return nil
}

// IsEmpty reports whether there is none.
func (l *List[F]) IsEmpty() bool { return l.all.Load() == nil }
