package grpcretry

import "time"

// A HedgeDelay says when a hedge is due. Most programs need [HedgeAfter] or [HedgeAtQuantile];
// others may be written, such as a switch around one of those, and must be safe for concurrent
// use. One HedgeDelay may serve any number of methods and Retriers.
type HedgeDelay interface {
	// Delay is asked when a call to method, "/pkg.Service/Method", starts at the time
	// now: after which time, 0 or more, without a success is its next attempt to be
	// sent? The result holds for all attempts of the call. If ok is false, the call is not hedged.
	Delay(method string, now time.Time) (d time.Duration, ok bool)
	// Answered receives how long the first attempt of a call took to succeed, also if the call
	// was not hedged because there was no delay. If lost, the attempt was cancelled after that
	// time, because another had won: it would have taken longer. For a stream it is the
	// time to the first message. It runs at the end of every such call.
	Answered(method string, took time.Duration, lost bool, now time.Time)
}

// delay asks Delay about a call that starts now.
func (h *Hedging) delay(method string) (time.Duration, bool) {
	if d, fixed := h.Delay.(hedgeAfter); fixed {
		return time.Duration(d), true // without a clock read
	}
	return h.Delay.Delay(method, time.Now())
}

// measure reports to learner, unless that is nil, how long a call's first attempt took; lost
// means that another attempt had won.
func (a *attempt) measure(learner HedgeDelay, lost bool) {
	if learner == nil || a.number > 1 {
		return
	}
	now := time.Now()
	learner.Answered(a.method, now.Sub(origin)-a.start, lost, now)
}

// HedgeAfter sends a hedge after each d without a success; with 0 all attempts are sent
// immediately. [New] rejects a negative d.
func HedgeAfter(d time.Duration) HedgeDelay { return hedgeAfter(d) }

type hedgeAfter time.Duration

func (d hedgeAfter) Delay(string, time.Time) (time.Duration, bool)   { return time.Duration(d), true }
func (d hedgeAfter) Answered(string, time.Duration, bool, time.Time) {}

// String describes the delay to readers of a policy.
func (d hedgeAfter) String() string { return "after " + time.Duration(d).String() }

func (d hedgeAfter) check() error { return checkNotNegative(time.Duration(d)) }
