package main

import (
	"context"
	"fmt"
	"sync"
	"time"
)

// An outage is what happens to a target while a client calls it steadily.
type outage struct {
	name     string
	target   func(context.Context) (target, error)
	rate     int           // calls per second, 0 for none but the burst
	deadline time.Duration // of each call

	before time.Duration // enough to earn a budget and to measure a hedge's delay
	times  int           // the target fails so often, 0 if it was never there,
	lasts  time.Duration // for so long,
	after  time.Duration // and is well for so long after that
	burst  int           // more calls, which start together as soon as the target fails and, if it is killed, the client has noticed
}

// A target is what a client calls: a server, or two of which one fails.
type target interface {
	addresses() []string
	fail()
	restore(context.Context) error
	close()
}

var outages = []outage{
	blips("fails for 200 ms", 200*time.Millisecond, 1),
	blips("fails for 600 ms, three times", 600*time.Millisecond, 3),
	blips("fails for 1 s", time.Second, 1),
	blips("fails for 2 s", 2*time.Second, 1),
	quiet("fails for 1 s; only ten calls, at once", time.Second, 10),
	restart("killed, back after 100 ms", 100*time.Millisecond),
	restart("killed, back after 1 s", time.Second),
	restart("killed, back after 2.5 s", 2500*time.Millisecond),
	oneOfTwo("one of two killed, back after 1 s", time.Second),
	neverThere,
}

// blips has a live server fail.
func blips(name string, lasts time.Duration, times int) outage {
	return outage{
		name: name, target: newBrownout, rate: rate, deadline: deadline,
		before: before, lasts: lasts, times: times, after: after,
	}
}

// quiet has a live server fail when a client makes its first calls, and all of them.
func quiet(name string, lasts time.Duration, atOnce int) outage {
	o := blips(name, lasts, 1)
	o.rate, o.burst = 0, atOnce
	return o
}

// restart kills the only server and starts it again. Fifty calls that start meanwhile would be a
// burst if they returned at the same instant.
func restart(name string, lasts time.Duration) outage {
	o := oneOfTwo(name, lasts)
	o.target = func(ctx context.Context) (target, error) { return newKilled(ctx, false) }
	o.burst = 50
	return o
}

func oneOfTwo(name string, lasts time.Duration) outage {
	return outage{
		name: name, target: func(ctx context.Context) (target, error) { return newKilled(ctx, true) },
		rate: rate, deadline: deadline, before: before, lasts: lasts, times: 1, after: after,
	}
}

// neverThere has a deadline that is longer than the default patience.
var neverThere = outage{name: "never there", target: newNobody, rate: 20, deadline: 20 * time.Second, before: 12 * time.Second}

const (
	rate     = 100
	deadline = 10 * time.Second
	before   = 2 * time.Second
	after    = 4 * time.Second // gRPC reconnects about 3 s after the return at the latest
)

// sideBySide is how many outages a small machine can have at the same time.
const sideBySide = 5

// run returns the results of each outage, in the order of the clients.
func run(ctx context.Context, outages []outage, clients []client) ([]row, error) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	rows := make([]row, len(outages))
	slots := make(chan struct{}, sideBySide)
	var running sync.WaitGroup
	for i := range outages {
		o := &outages[i]
		rows[i] = row{outage: o, results: make([]*result, len(clients))}
		slots <- struct{}{}
		running.Go(func() {
			defer func() { <-slots }()
			var atWork sync.WaitGroup
			for j := range clients {
				atWork.Go(func() {
					r, err := o.measure(ctx, &clients[j])
					if err != nil {
						cancel(fmt.Errorf("%s: %s: %w", clients[j].name, o.name, err)) // the others are of no use now
					}
					rows[i].results[j] = r
				})
			}
			atWork.Wait()
		})
	}
	running.Wait()
	return rows, context.Cause(ctx)
}

// lateAtMost is how late one call in twenty may start. Up to there, plain gRPC loses as many calls as start in an outage.
const lateAtMost = 2 * responseTime

// tooBusy returns an error if the machine had too little time for the clients and their servers. A server that is to
// respond in 50 ms may then take seconds, and fail at other times than its row says.
func tooBusy(rows []row) error {
	for _, r := range rows {
		for _, one := range r.results {
			if late := one.late(); late > lateAtMost {
				return fmt.Errorf("the machine was too busy, these figures mean nothing: %s: one call in twenty started %v late, want at most %v",
					r.name, late.Round(time.Millisecond), lateAtMost)
			}
		}
	}
	return nil
}

// A row is an outage with the results of the clients.
type row struct {
	*outage
	results []*result
}
