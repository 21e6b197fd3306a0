package main

import (
	"fmt"
	"time"
)

// A summary holds the figures of one trial.
type summary struct {
	down outage

	// Calls that failed although D would have responded to one of the three attempts that C may
	// make, because D was only flaky, or because it was away for much less time than the call had.
	lostFlaky, lostRestart int

	// recovery is the time from the end of the outage until the last call that fails before D turns
	// flaky. From then on all calls succeed.
	recovery time.Duration

	late time.Duration // the longest time by which a call started too late: what the machine adds to all times
}

// An outage is what D received while it was down.
type outage struct {
	calls    int // that started and ended meanwhile
	attempts int // of these calls at D
	most     int // attempts of one of these calls

	// amplification is the number of attempts that D received for each call that started meanwhile, also
	// of those that ended later. The simulator has the same figure.
	amplification float64
}

// perCall returns the attempts that reach D for each call that started and ended meanwhile. If all
// calls waited until D was up again, it is the amplification.
func (o *outage) perCall() float64 {
	if o.calls == 0 {
		return o.amplification
	}
	return ratio(o.attempts, o.calls)
}

func ratio(n, of int) float64 {
	if of == 0 {
		return 0
	}
	return float64(n) / float64(of)
}

// summarize is for a trial whose calls have ended.
func (t *trial) summarize() (*summary, error) {
	s := &summary{down: t.outage()}
	for _, c := range t.calls.made {
		s.late = max(s.late, c.late)
		switch {
		case c.err == nil:
		case c.end.Before(t.wentDown):
			return nil, fmt.Errorf("a call failed before D was down: %w", c.err)
		case c.end.After(t.killed):
			s.lostRestart++
		case c.end.After(t.turnedFlaky):
			s.lostFlaky++
		default:
			s.recovery = max(s.recovery, c.end.Sub(t.cameUp))
		}
	}
	return s, nil
}

func (t *trial) outage() outage {
	var o outage
	during := func(at time.Time) bool { return !at.Before(t.wentDown) && at.Before(t.cameUp) }
	attempts := map[int64]int{}
	started, received := 0, 0
	for _, a := range t.attempts {
		attempts[a.call]++
	}
	for i, c := range t.calls.made {
		if !during(c.start) {
			continue
		}
		n := attempts[int64(i+1)]
		started, received = started+1, received+n
		if during(c.end) {
			o.calls++
			o.attempts += n
			o.most = max(o.most, n)
		}
	}
	o.amplification = ratio(received, started)
	return o
}
