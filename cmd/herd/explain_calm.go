package main

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"google.golang.org/grpc/codes"

	"github.com/grpcretry/grpcretry"
	"github.com/grpcretry/grpcretry/cmd/herd/internal/sim"
)

// This file simulates good times: how many calls succeed, and how often and when they are hedged.

const (
	// mostProcesses is the largest number of simulated processes.
	mostProcesses = 5000
	// busiest is the largest rate of calls of one simulated process. Budgets in calls or retries per
	// second are reduced in proportion.
	busiest = 1000.0
)

// fleet returns the rate and the number of processes to simulate: enough processes for the given calls
// per second, each with as many calls as one of the real processes. A larger fleet behaves in the same
// way.
func (q *question) fleet(calls float64) (rate float64, processes int) {
	each := min(q.each(), busiest)
	processes = min(mostProcesses, max(1, int(calls/each)))
	return each * float64(processes), processes
}

// each is the number of calls per second of one process.
func (q *question) each() float64 { return q.rate / float64(q.processes) }

// simulated returns a strategy for simulated processes.
func (q *question) simulated(s sim.Strategy) sim.Strategy {
	each := q.each()
	if each <= busiest {
		return s
	}
	reduced := func(b sim.Budget) sim.Budget {
		b.MinPerSecond *= busiest / each
		b.PerSecond *= busiest / each
		if b.Burst > 0 {
			b.Burst = max(1, int(float64(b.Burst)*busiest/each))
		}
		return b
	}
	s.Budget = reduced(s.Budget)
	if s.Hedging != nil {
		h := *s.Hedging
		h.Budget = reduced(h.Budget)
		s.Hedging = &h
	}
	return s
}

// warmUp is the time in which budgets and quantiles learn what good times are like.
func (q *question) warmUp() time.Duration {
	return max(15*time.Second, min(q.strategy.Budget.Window, time.Minute)+2*time.Second)
}

// goodTimes simulates calls without failures, to find out how often calls are hedged, and when.
func (e *explanation) goodTimes(ctx context.Context) error {
	s := e.strategy
	var delays []time.Duration
	if h := s.Hedging; h != nil {
		if h.Kind == sim.HedgeAfter {
			e.hedges = h.Delay
		} else {
			recorded := *h
			recorded.Kind, recorded.Quantile, recorded.AtLeast, recorded.AtMost = "", 0, 0, 0
			recorded.New = func() grpcretry.HedgeDelay {
				return recordedDelay{grpcretry.HedgeAtQuantile(h.Quantile, h.AtLeast, h.AtMost), &delays}
			}
			s.Hedging = &recorded
		}
	}
	var err error
	if e.calm, err = sim.Run(ctx, e.calmScenario(), e.simulated(s), nil); err != nil {
		return err
	}
	if s.Hedging != nil {
		s.Hedging = nil
		if e.unhedged, err = sim.Run(ctx, e.calmScenario(), e.simulated(s), nil); err != nil {
			return err
		}
	}
	if len(delays) > 0 {
		late := delays[len(delays)/2:]
		slices.Sort(late)
		e.hedges = late[len(late)/2]
	}
	return nil
}

// calmScenario has a server without limits.
func (e *explanation) calmScenario() sim.Scenario {
	calls, length := e.effort.rate, 20*time.Second
	if e.strategy.Hedging != nil {
		calls, length = 5*calls, 60*time.Second // the slowest of many calls matter
	}
	rate, processes := e.fleet(calls)
	return sim.Scenario{
		Seed:     e.seed,
		Duration: max(length, min(10*time.Minute, time.Duration(10*e.effort.rate/rate*float64(time.Second)))).Round(time.Second),
		Network:  sim.Distribution{Mean: oneWay},
		Groups:   []sim.Group{{Rate: rate, Processes: processes, Deadline: e.deadline}},
		Servers:  []sim.Server{{Latency: e.latency}},
	}
}

// A recordedDelay remembers the delays that calls got.
type recordedDelay struct {
	grpcretry.HedgeDelay
	delays *[]time.Duration
}

// Delay implements grpcretry.HedgeDelay.
func (r recordedDelay) Delay(method string, now time.Time) (time.Duration, bool) {
	d, ok := r.HedgeDelay.Delay(method, now)
	if ok {
		*r.delays = append(*r.delays, d)
	}
	return d, ok
}

// answered returns the share of the calls that succeed in good times.
func (e *explanation) answered() float64 {
	g := &e.calm.Groups[0]
	return float64(g.Succeeded) / float64(max(1, g.Succeeded+g.Failed))
}

// hedgedShare returns the share of the calls that are hedged in good times, and of those for which a
// hedge is due, once the delay is known.
func (e *explanation) hedgedShare() (sent, due float64) {
	series := e.calm.Groups[0].Series
	calls := 0
	for _, b := range series[len(series)/3:] {
		calls += b.Calls
		sent += float64(b.Hedges)
		due += float64(b.Hedges + b.Suppressed)
	}
	return sent / float64(max(1, calls)), due / float64(max(1, calls))
}

// perCall formats a number of attempts per call.
func perCall(v float64) string {
	switch {
	case v < 1.995:
		return fmt.Sprintf("%.2f", v)
	case v < 10:
		return fmt.Sprintf("%.1f", v)
	default:
		return grouped(v)
	}
}

// codeList writes status codes as on the wire.
func codeList(all []codes.Code) string {
	var names []string
	for _, c := range all {
		names = append(names, sim.CodeName(c))
	}
	slices.Sort(names)
	slices.Reverse(names) // UNAVAILABLE before RESOURCE_EXHAUSTED
	return listed(names)
}

// listed writes a, b and c.
func listed(words []string) string {
	if n := len(words); n > 1 {
		return strings.Join(words[:n-1], ", ") + " and " + words[n-1]
	}
	return strings.Join(words, "")
}
