package grpcretry

import (
	"maps"
	"sync"
	"sync/atomic"
)

// A bounded map keeps what is made once for each key, such as a method or a target. It takes a limited
// number of keys, because others may choose them, and finds what it has without a lock: the map is
// replaced, never changed. The zero value is empty. It is safe for concurrent use.
type bounded[K comparable, V any] struct {
	mu  sync.Mutex // held to replace the map
	all atomic.Pointer[map[K]V]
}

// current returns the map, which must not be changed.
func (b *bounded[K, V]) current() map[K]V {
	if all := b.all.Load(); all != nil {
		return *all
	}
	return nil
}

// add keeps the value for a key if there is none and fewer than most keys are known. It returns what
// is kept, and whether that is new; the zero value if there is no room.
func (b *bounded[K, V]) add(key K, value V, most int) (kept V, isNew bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	all := b.current()
	if kept, known := all[key]; known || len(all) >= most {
		return kept, false
	}
	all = maps.Clone(all)
	if all == nil {
		all = map[K]V{}
	}
	all[key] = value
	b.all.Store(&all)
	return value, true
}

// maxNames is how many names of methods or targets are remembered for one purpose. Only a program that
// calls methods by names that others choose, such as a proxy, or that dials many targets has more.
const maxNames = 1000

// A nameSet is a set of at most maxNames names.
type nameSet struct{ bounded[string, struct{}] }

// isNew adds a name. It reports whether the name was added: the first time, if there is room.
func (s *nameSet) isNew(name string) bool {
	all := s.current()
	if _, known := all[name]; known || len(all) >= maxNames {
		return false
	}
	_, isNew := s.add(name, struct{}{}, maxNames)
	return isNew
}
