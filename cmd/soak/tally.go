package main

import (
	"maps"
	"sync"
	"sync/atomic"
	"time"

	"github.com/grpcretry/grpcretry"
	"github.com/grpcretry/grpcretry/internal/inside"
	"github.com/grpcretry/grpcretry/internal/reasons"
)

// Counts is what a client has counted. Counts of several clients can be added.
type Counts struct {
	Calls      int64
	Kinds      map[string]map[string]int64 // calls by kind and outcome
	Attempts   int64                       // of calls that did not pass through
	Retries    int64
	Hedges     int64
	Unsent     int64            // attempts
	Passed     int64            // calls that passed through
	Late       int64            // calls that returned more than 100 ms after their deadline
	Messages   int64            // received in streams
	Features   map[string]int64 // calls that met a feature
	Updates    int64
	Conns      int64 // ClientConns replaced
	Heap       uint64
	Goroutines int
}

// A tally counts.
type tally struct {
	updates, conns atomic.Int64

	mu sync.Mutex
	c  Counts // guarded by mu
}

func (t *tally) init() {
	t.c.Kinds, t.c.Features = map[string]map[string]int64{}, map[string]int64{}
}

// features are what a run of some length must meet: otherwise it would prove little. For a call that
// succeeded they are reasons to be glad, see meets.
var features = func() (names []string) {
	for k := range kinds {
		if k.hedged() {
			names = append(names, "won by a hedge: "+k.String())
		} else {
			names = append(names, "recovered: "+k.String())
		}
	}
	for _, source := range []grpcretry.WaitSource{grpcretry.WaitBackoff, grpcretry.WaitPushback, grpcretry.WaitRetryInfo,
		inside.WaitConnect} {
		names = append(names, "recovered after a wait: "+source.String())
	}
	for _, reason := range []error{grpcretry.ErrAttemptsExhausted, grpcretry.ErrBudgetExhausted, grpcretry.ErrPushback,
		grpcretry.ErrCommitted, grpcretry.ErrNotRetryable} {
		names = append(names, "stopped: "+reasons.Of(reason).Word)
	}
	return append(names, "recovered after an attempt timeout")
}()

// meet counts the features that a call has met.
func (t *tally) meet(c *call, err error) {
	for i := range c.moments {
		switch m := &c.moments[i]; {
		case m.kind == grpcretry.CallEnd && m.err == nil && m.number > 1:
			how := "recovered: "
			if m.hedge {
				how = "won by a hedge: "
			}
			t.c.Features[how+c.kind.String()]++
		case m.kind == grpcretry.Decision && m.reason != nil:
			t.c.Features["stopped: "+reasons.Of(m.reason).Word]++
		case m.kind == grpcretry.Decision && err == nil:
			t.c.Features["recovered after a wait: "+m.source.String()]++
		case m.kind == grpcretry.AttemptEnd && m.cut && err == nil:
			t.c.Features["recovered after an attempt timeout"]++
		}
	}
}

// count counts a call that has ended.
func (t *tally) count(c *call, err error, now time.Time) {
	how := "ok"
	if err != nil {
		how = outcome(err)
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	t.c.Calls++
	kind := c.kind.String()
	if t.c.Kinds[kind] == nil {
		t.c.Kinds[kind] = map[string]int64{}
	}
	t.c.Kinds[kind][how]++
	if len(c.moments) == 0 {
		t.c.Passed++
	}
	t.meet(c, err)
	for i := range c.moments {
		switch m := &c.moments[i]; {
		case m.kind == grpcretry.AttemptEnd && m.unsent:
			t.c.Unsent++
		case m.kind != grpcretry.AttemptStart:
			continue
		case m.hedge:
			t.c.Hedges++
		case m.number > 1:
			t.c.Retries++
		}
		if c.moments[i].kind == grpcretry.AttemptStart {
			t.c.Attempts++
		}
	}
	if now.Sub(c.deadline) > 100*time.Millisecond {
		t.c.Late++
	}
	if !c.kind.unary() {
		t.c.Messages += int64(c.responses)
	}
}

// peak notes how much the process holds.
func (t *tally) peak(heap uint64, goroutines int) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.c.Heap, t.c.Goroutines = max(t.c.Heap, heap), max(t.c.Goroutines, goroutines)
}

// counts returns a copy of what has been counted.
func (t *tally) counts() Counts {
	t.mu.Lock()
	defer t.mu.Unlock()
	c := t.c
	c.Updates, c.Conns = t.updates.Load(), t.conns.Load()
	c.Features = maps.Clone(t.c.Features)
	c.Kinds = map[string]map[string]int64{}
	for kind, outcomes := range t.c.Kinds {
		c.Kinds[kind] = maps.Clone(outcomes)
	}
	return c
}

// add adds another client's counts. Of what they hold, the larger counts.
func (c *Counts) add(o Counts) {
	c.Calls += o.Calls
	c.Attempts += o.Attempts
	c.Retries += o.Retries
	c.Hedges += o.Hedges
	c.Unsent += o.Unsent
	c.Passed += o.Passed
	c.Late += o.Late
	c.Messages += o.Messages
	c.Updates += o.Updates
	c.Conns += o.Conns
	c.Heap, c.Goroutines = max(c.Heap, o.Heap), max(c.Goroutines, o.Goroutines)
	if c.Kinds == nil {
		c.Kinds, c.Features = map[string]map[string]int64{}, map[string]int64{}
	}
	for name, n := range o.Features {
		c.Features[name] += n
	}
	for kind, outcomes := range o.Kinds {
		if c.Kinds[kind] == nil {
			c.Kinds[kind] = map[string]int64{}
		}
		for how, n := range outcomes {
			c.Kinds[kind][how] += n
		}
	}
}

// missed returns the features that so many calls must meet, and have not.
func (c *Counts) missed() (names []string) {
	for _, name := range features {
		if c.Features[name] == 0 {
			names = append(names, name)
		}
	}
	return names
}
