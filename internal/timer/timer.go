// Package timer has a timer that is safe in the bubbles of testing/synctest.
package timer

import "time"

// A Timer starts a function at a time that may be changed. The zero value is stopped. It is not safe for
// concurrent use, and Stop does not wait for the function.
//
// In a bubble the runtime would run a timer whose wait is already over on the calling goroutine, with a race
// context that the whole bubble shares; two at the same time crash Go 1.26's race detector. So such a wait has no timer.
type Timer struct {
	timer *time.Timer // nil until the first wait
}

// Set starts f on a goroutine of its own after d, and not at the time that was set before. f must be the same
// function each time.
func (t *Timer) Set(d time.Duration, f func()) {
	switch {
	case d <= 0:
		t.Stop()
		go f()
	case t.timer == nil:
		t.timer = time.AfterFunc(d, f)
	default:
		t.timer.Reset(d)
	}
}

// Stop keeps the function from being started, unless it is started already.
func (t *Timer) Stop() {
	if t.timer != nil {
		t.timer.Stop()
	}
}
