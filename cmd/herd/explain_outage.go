package main

import (
	"context"
	"fmt"
	"math"
	"slices"
	"strings"
	"time"

	"google.golang.org/grpc/codes"

	"github.com/grpcretry/grpcretry"
	"github.com/grpcretry/grpcretry/cmd/herd/internal/sim"
)

// This file simulates good times, and outages: how many attempts per call a server gets, from its
// callers and across layers.

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

// outageFigures are the attempts per call that the last server gets in an outage, if so many layers
// retry.
type outageFigures struct {
	layers    int
	worst     float64 // in the worst second
	first     float64 // in the first ten seconds
	steady    float64 // in the long run
	unlimited float64 // in the long run without budgets

	intercepted float64 // in the first ten seconds, if all servers have the library's interceptors
}

// notSimulated stands for attempts per call that may be too many to simulate.
var notSimulated = math.NaN()

// mostPerCall is the largest number of attempts per call that is simulated.
const mostPerCall = 20_000

// simulateOutages simulates an outage for each number of layers.
func (e *explanation) simulateOutages(ctx context.Context) error {
	for layers := 1; layers <= e.layers; layers++ {
		f, err := e.simulateOutage(ctx, layers)
		if err != nil {
			return err
		}
		e.outages = append(e.outages, f)
	}
	return nil
}

func (e *explanation) simulateOutage(ctx context.Context, layers int) (outageFigures, error) {
	f := outageFigures{layers: layers}
	most := math.Pow(float64(e.policy.MaxAttempts), float64(layers))
	limited := e.strategy.Budget.Kind != sim.UnlimitedBudget
	s := e.outageScenario(layers, max(2, min(50, 2000/most)), 1)
	if limited {
		rate, processes := e.fleet(e.effort.rate)
		s := e.outageScenario(layers, rate, processes)
		r, err := sim.Run(ctx, s, e.simulated(e.strategy), nil)
		if err != nil {
			return f, err
		}
		f.worst, f.first, f.steady = attemptsPerCall(r, s)
		if f.intercepted, err = intercepted(ctx, s, e.simulated(e.strategy)); err != nil {
			return f, err
		}
	} else {
		var err error
		if f.intercepted, err = intercepted(ctx, s, e.unlimited()); err != nil {
			return f, err
		}
	}
	if math.Pow(e.stories[0].many.attempts, float64(layers)) > mostPerCall {
		f.unlimited = notSimulated
		if !limited {
			f.worst, f.first, f.steady = notSimulated, notSimulated, notSimulated
		}
		return f, nil
	}
	r, err := sim.Run(ctx, s, e.unlimited(), nil)
	if err != nil {
		return f, err
	}
	worst, first, steady := attemptsPerCall(r, s)
	f.unlimited = steady
	if !limited {
		f.worst, f.first, f.steady = worst, first, steady
	}
	return f, nil
}

// intercepted returns the attempts per call in the first ten seconds of an outage, if all servers have the
// library's interceptors.
func intercepted(ctx context.Context, s sim.Scenario, strategy sim.Strategy) (first float64, err error) {
	strategy.StopCallers, strategy.OneAttempt = true, true
	r, err := sim.Run(ctx, s, strategy, nil)
	if err != nil {
		return 0, err
	}
	_, first, _ = attemptsPerCall(r, s)
	return first, nil
}

// settled is the time after which an outage is in its long run: what was saved up is spent.
func (q *question) settled() time.Duration {
	return min(max(2*q.deadline, 20*time.Second), time.Minute).Round(time.Second)
}

// outageScenario is a chain of services, each of which calls the next one under the same policy. The
// last one is down after a while, for good.
func (e *explanation) outageScenario(layers int, rate float64, processes int) sim.Scenario {
	from := e.warmUp()
	s := sim.Scenario{
		Seed:     e.seed,
		Duration: from + e.settled() + 10*time.Second,
		Network:  sim.Distribution{Mean: oneWay},
		Groups:   []sim.Group{{Rate: rate, Even: true, Processes: processes, Deadline: e.deadline}},
	}
	for i := range layers {
		server := sim.Server{Name: fmt.Sprint("service ", i+1), Replicas: processes}
		if i < layers-1 {
			server.Calls = &sim.Downstream{Target: fmt.Sprint("service ", i+2)}
		} else {
			server.Replicas = 0
			server.Latency = e.latency
			server.Outages = []sim.Outage{{From: from, For: e.settled() + 10*time.Second, Code: e.outageCode()}}
		}
		s.Servers = append(s.Servers, server)
	}
	return s
}

// attemptsPerCall returns the attempts at the last server for each call of the clients: in the worst
// second of the outage, in its first ten seconds, and in its last ten.
func attemptsPerCall(r *sim.Result, s sim.Scenario) (worst, first, steady float64) {
	last := s.Servers[len(s.Servers)-1]
	offered := r.Servers[len(r.Servers)-1].Series
	from, until := int(last.Outages[0].From/time.Second), int(s.Duration/time.Second)
	perSecond := s.Groups[0].Rate
	sum := func(a, b int) (n float64) {
		for _, one := range offered[a:min(b, len(offered))] {
			n += float64(one.Offered)
		}
		return n
	}
	for i := from; i < until; i++ {
		worst = max(worst, sum(i, i+1)/perSecond)
	}
	return worst, sum(from, from+10) / (10 * perSecond), sum(until-10, until) / (10 * perSecond)
}

// outage is the section on the attempts that a server gets.
func (e *explanation) outage() explainSection {
	s := explainSection{Title: "What a server gets in an outage"}
	limited := e.strategy.Budget.Kind != sim.UnlimitedBudget
	table := [][]string{{"services in a row that retry", "worst second", "first 10 s", "after " + shortTime(e.settled())}}
	if limited {
		table[0] = append(table[0], "with no budget")
	}
	for _, f := range e.outages {
		name := fmt.Sprintf("%d", f.layers)
		if f.layers == 1 {
			name = "1 (only its callers)"
		}
		line := []string{name, perCall(f.worst), perCall(f.first), perCall(f.steady)}
		if limited {
			line = append(line, perCall(f.unlimited))
		}
		table = append(table, line)
	}
	s.Parts = []explainPart{
		{Text: fmt.Sprintf("Attempts that arrive at the failing server for each call that its first clients make; 1 is the normal load. "+
			"The server fails every attempt with %s; the deadline of the first call covers all services in the row.", sim.CodeName(e.outageCode()))},
		{Table: table},
	}
	if f := e.outages[e.layers-1]; f.layers > 1 && e.policy.MaxAttempts > 1 && !e.unsentOnly {
		s.Parts = append(s.Parts, explainPart{Text: fmt.Sprintf("If every service has the library's server interceptors (grpcretry.UnaryServerInterceptor), "+
			"%d services in a row send %s (per call, in the first 10 s).", f.layers, perCall(f.intercepted))})
	}
	if h := e.policy.Hedging; h != nil {
		g := e.calm.Groups[0]
		hedges, _ := e.hedgedShare()
		s.Parts = append(s.Parts, explainPart{Text: fmt.Sprintf("In good times %s of the calls are hedged, and 1%% of the calls take over %s; without hedging, over %s.",
			percent(hedges), roundTime(g.Latency.P99), roundTime(e.unhedged.Groups[0].Latency.P99))})
	}
	return s
}

// perCall formats a number of attempts per call.
func perCall(v float64) string {
	switch {
	case math.IsNaN(v):
		return "not simulated"
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
