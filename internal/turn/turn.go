// Package turn has a lock that may be held for long.
package turn

import "sync"

// A Lock may be held during callbacks, and is given to those who wait for it in order. It is not a
// [sync.Mutex], because a callback may wait for the virtual time of a testing/synctest bubble, which stands
// still while a goroutine waits for a Mutex. The zero value is free.
type Lock struct {
	mu      sync.Mutex // never held during a wait
	given   sync.Cond
	taken   bool // guarded by mu, like waiting
	waiting int
}

// Take waits until the lock is free, and takes it.
func (l *Lock) Take() {
	l.mu.Lock()
	defer l.mu.Unlock()
	if !l.taken {
		l.taken = true
		return
	}
	if l.given.L == nil {
		l.given.L = &l.mu
	}
	l.waiting++
	l.given.Wait() // no loop: Give hands the lock over, and nobody can take it in between
}

// Give hands the lock to the goroutine that has waited longest, or frees it.
func (l *Lock) Give() {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.waiting == 0 {
		l.taken = false
		return
	}
	l.waiting--
	l.given.Signal()
}
