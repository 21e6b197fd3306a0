package main

import (
	"slices"
	"time"
)

// A summary is what one client's calls came to.
type summary struct {
	calls, succeeded int
	median, longest  time.Duration // of the calls that succeeded; 0 if none did
	attempts         int           // that reached a server
	back             comeback
}

// A comeback is how the waiting calls reach the server that is back: those that started
// before the client was connected to it again.
type comeback struct {
	attempts int
	over     time.Duration // from the first attempt to the last
	peak     int           // the largest number within window
}

// window is short compared with what a server takes to work off a burst.
const window = 10 * time.Millisecond

// summarize is for a trial whose calls have returned and whose servers have ended.
func (t *trial) summarize() *summary {
	var s summary
	var took []time.Duration
	for _, c := range t.calls.made {
		if c.err == nil {
			took = append(took, c.took)
		}
	}
	slices.Sort(took)
	s.calls, s.succeeded = len(t.calls.made), len(took)
	if len(took) > 0 {
		s.median, s.longest = median(took), took[len(took)-1]
	}
	for _, p := range t.all() {
		s.attempts += len(measured(p.arrivals))
	}
	s.back = comebackOf(waiting(measured(t.replacement.arrivals), t.calls.made, t.connections.reconnected()))
	return &s
}

// median of durations in ascending order, of which there is at least one.
func median(sorted []time.Duration) time.Duration {
	return (sorted[(len(sorted)-1)/2] + sorted[len(sorted)/2]) / 2
}

// measured leaves out the calls that only connected the client.
func measured(arrivals []arrival) []arrival {
	return slices.DeleteFunc(slices.Clone(arrivals), func(a arrival) bool { return a.call == 0 })
}

// waiting returns the times, in ascending order, at which those calls arrived that had
// started before the client was connected again.
func waiting(arrivals []arrival, made []*call, reconnected time.Time) []time.Time {
	var at []time.Time
	for _, a := range arrivals {
		if made[a.call-1].start.Before(reconnected) {
			at = append(at, a.at)
		}
	}
	slices.SortFunc(at, time.Time.Compare)
	return at
}

// comebackOf takes times in ascending order.
func comebackOf(at []time.Time) comeback {
	if len(at) == 0 {
		return comeback{}
	}
	c := comeback{attempts: len(at), over: at[len(at)-1].Sub(at[0])}
	first := 0 // of the window that ends with the attempt
	for i := range at {
		for at[i].Sub(at[first]) >= window {
			first++
		}
		c.peak = max(c.peak, i-first+1)
	}
	return c
}
