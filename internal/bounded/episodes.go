package bounded

import (
	"maps"
	"sync"
	"time"
)

// Episodes are periods of some trouble, by the key of what has it. At most [MaxNames] are known. The zero value, with
// a Quiet time, has none. It is safe for concurrent use.
type Episodes[K comparable] struct {
	Quiet time.Duration // an episode ends after so long without trouble, at the next [Episodes.End]

	mu     sync.Mutex
	latest map[K]time.Time // guarded by mu; the latest trouble
}

// Add records trouble. It reports whether an episode begins, and is known from now on.
func (e *Episodes[K]) Add(key K, now time.Time) (begins bool) {
	e.mu.Lock()
	defer e.mu.Unlock()
	_, known := e.latest[key]
	if !known && len(e.latest) == MaxNames {
		maps.DeleteFunc(e.latest, func(_ K, latest time.Time) bool { return now.Sub(latest) >= e.Quiet })
	}
	if !known && len(e.latest) == MaxNames {
		return false
	}
	if e.latest == nil {
		e.latest = map[K]time.Time{}
	}
	e.latest[key] = now
	return !known
}

// End ends an episode that has been quiet for long enough, and reports whether there was one.
func (e *Episodes[K]) End(key K, now time.Time) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	latest, known := e.latest[key]
	if !known || now.Sub(latest) < e.Quiet {
		return false
	}
	delete(e.latest, key)
	return true
}
