// Package bounded has maps and sets that keep a limited number of keys, because others may choose them. They find
// what they have without a lock, and are safe for concurrent use.
package bounded

import (
	"maps"
	"sync"
	"sync/atomic"
)

// MaxNames is how many names of methods or targets are remembered for one purpose. Only a program that
// calls methods by names that others choose, such as a proxy, or that dials many targets has more.
const MaxNames = 1000

// A Map keeps what is made once for each key, such as a method or a target. The Go map in it is replaced,
// never changed. The zero value is empty.
type Map[K comparable, V any] struct {
	mu  sync.Mutex // held to replace the map
	all atomic.Pointer[map[K]V]
}

// Current returns the map, which must not be changed.
func (m *Map[K, V]) Current() map[K]V {
	if all := m.all.Load(); all != nil {
		return *all
	}
	return nil
}

// Add keeps the value for a key if there is none and fewer than most keys are known. It returns what
// is kept, and whether that is new; the zero value if there is no room.
func (m *Map[K, V]) Add(key K, value V, most int) (kept V, isNew bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	all := m.Current()
	if kept, known := all[key]; known || len(all) >= most {
		return kept, false
	}
	all = maps.Clone(all)
	if all == nil {
		all = map[K]V{}
	}
	all[key] = value
	m.all.Store(&all)
	return value, true
}

// Get returns the value for a key. If there is none, it is made, and kept if fewer than most keys are known.
func (m *Map[K, V]) Get(key K, most int, fresh func(K) V) V {
	all := m.Current()
	if kept, known := all[key]; known {
		return kept
	}
	made := fresh(key)
	if len(all) < most {
		m.Add(key, made, most)
		if kept, known := m.Current()[key]; known { // made or, if another goroutine was faster, what that has made
			return kept
		}
	}
	return made
}

// Clear forgets all keys.
func (m *Map[K, V]) Clear() { m.all.Store(nil) }

// A Set is a set of keys. The zero value is empty.
type Set[K comparable] struct{ m Map[K, struct{}] }

// All returns the keys, in a map that must not be changed.
func (s *Set[K]) All() map[K]struct{} { return s.m.Current() }

// Add adds a key if fewer than most are known. It reports whether the key was added.
func (s *Set[K]) Add(key K, most int) (isNew bool) {
	all := s.m.Current()
	if _, known := all[key]; known || len(all) >= most {
		return false
	}
	_, isNew = s.m.Add(key, struct{}{}, most)
	return isNew
}
