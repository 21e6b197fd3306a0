package grpcretry

import "time"

// afterFunc is [time.AfterFunc], except for a wait that is already over: then it starts f and returns
// a stopped timer. In a testing/synctest bubble the runtime would run such a timer on the calling
// goroutine, with a race context that the whole bubble shares; two at the same time crash Go 1.26's
// race detector.
func afterFunc(d time.Duration, f func()) *time.Timer {
	if d > 0 {
		return time.AfterFunc(d, f)
	}
	timer := time.AfterFunc(time.Hour, f)
	timer.Stop()
	go f()
	return timer
}

// resetTimer makes a timer from [afterFunc] start f after d instead.
func resetTimer(timer *time.Timer, d time.Duration, f func()) {
	if d > 0 {
		timer.Reset(d)
		return
	}
	timer.Stop()
	go f()
}
