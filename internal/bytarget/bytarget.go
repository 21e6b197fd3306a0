// Package bytarget keeps one thing for each target that a program calls.
package bytarget

import (
	"iter"
	"sync"
	"sync/atomic"
	"time"
)

// A Map keeps one thing for each target: a budget, or what is known about the target. It forgets targets
// that are not used any more, is safe for concurrent use, and finds what it has without a lock.
type Map[T any] struct {
	Fresh  func(canonical string) T // makes what is kept for a target; set before the first use
	Forget func(T) bool             // called by a sweep for what is not used, which is kept if it returns false; nil keeps nothing

	targets sync.Map                      // *entry[T] by the target in canonical form, or a function's
	dialed  sync.Map                      // the same by the target as dialed
	first   atomic.Pointer[dialedName[T]] // one of dialed, because most clients have no other

	mu    sync.Mutex // held to add and to forget targets and names
	swept time.Time  // guarded by mu; zero before the first target
}

type entry[T any] struct {
	of     T
	used   atomic.Bool // since the last sweep
	dialed []string    // guarded by Map.mu; the target's keys in Map.dialed
}

type dialedName[T any] struct {
	name string
	*entry[T]
}

// use marks the entry as used and returns what it holds. It writes only once between two sweeps, so
// that the cores of a busy client share the cache line.
func (e *entry[T]) use() T {
	if !e.used.Load() {
		e.used.Store(true)
	}
	return e.of
}

// SweepEvery is the shortest time between two sweeps, and so the shortest time that an unused
// target is remembered. It is longer than the default Window of a ratio budget, after which a budget without
// calls has little left to lose.
const SweepEvery = time.Minute

// Dialed returns what is kept for a target as dialed. The canonical form costs an allocation, so
// it is built only if the target is new.
func (m *Map[T]) Dialed(dialed string, canonical func() string) T {
	if first := m.first.Load(); first != nil && first.name == dialed {
		return first.use()
	}
	return m.dialedLater(dialed, canonical)
}

// dialedLater is Dialed for a target that is not the first.
func (m *Map[T]) dialedLater(dialed string, canonical func() string) T {
	if e, ok := m.dialed.Load(dialed); ok {
		return e.(*entry[T]).use()
	}
	name := canonical()
	made := m.Fresh(name) // without mu, because it may be the program's function
	m.mu.Lock()
	defer m.mu.Unlock()
	e := m.add(name, made)
	if _, known := m.dialed.LoadOrStore(dialed, e); !known {
		e.dialed = append(e.dialed, dialed)
	}
	m.first.CompareAndSwap(nil, &dialedName[T]{dialed, e})
	return e.of
}

// Named returns what is kept for a target in canonical form, such as a function's:
// "api.example.com" is not the "dns:///api.example.com" that a ClientConn makes of it.
func (m *Map[T]) Named(canonical string) T {
	if e, ok := m.targets.Load(canonical); ok {
		return e.(*entry[T]).use()
	}
	made := m.Fresh(canonical)
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.add(canonical, made).of
}

// add needs mu. It returns the entry of a target, which holds made if it had none.
func (m *Map[T]) add(canonical string, made T) *entry[T] {
	if e, ok := m.targets.Load(canonical); ok {
		e.(*entry[T]).use()
		return e.(*entry[T])
	}
	m.sweep(time.Now())
	e := &entry[T]{of: made}
	e.use() // before anything can sweep it
	m.targets.Store(canonical, e)
	return e
}

// Known returns what is kept for a target in canonical form, if anything is. That is no use of the target.
func (m *Map[T]) Known(canonical string) (of T, ok bool) {
	if e, ok := m.targets.Load(canonical); ok {
		return e.(*entry[T]).of, true
	}
	return of, false
}

// All returns what is kept for every target, in no particular order.
func (m *Map[T]) All() iter.Seq[T] {
	return func(yield func(T) bool) {
		m.targets.Range(func(_, e any) bool { return yield(e.(*entry[T]).of) })
	}
}

// sweep needs mu. It forgets the targets that were not used since the previous sweep, if that was
// long enough ago.
func (m *Map[T]) sweep(now time.Time) {
	if m.swept.IsZero() {
		m.swept = now
	}
	if now.Sub(m.swept) < SweepEvery {
		return
	}
	m.swept = now
	m.targets.Range(func(canonical, known any) bool {
		e := known.(*entry[T])
		if e.used.Swap(false) || m.Forget != nil && !m.Forget(e.of) {
			return true
		}
		m.targets.Delete(canonical)
		for _, dialed := range e.dialed {
			m.dialed.Delete(dialed)
		}
		if first := m.first.Load(); first != nil && first.entry == e {
			m.first.Store(nil)
		}
		return true
	})
}
