package main

import (
	"context"
	"errors"
	"fmt"
	"math"
	"time"

	"github.com/grpcretry/grpcretry"
	"github.com/grpcretry/grpcretry/cmd/herd/internal/sim"
	"github.com/grpcretry/grpcretry/internal/drive"
)

// This file measures what a budget allows: it drives Plans of one process, calls that succeed and
// then calls that fail, until the budget refuses.

// budgetFigures are the retries that the budget of one process allows.
type budgetFigures struct {
	unlimited bool
	fresh     float64 // at the start, before any call was answered
	saved     float64 // after good times, at once
	perSecond float64 // in good times, in the long run

	// The same for hedges.
	hedges          bool
	hedgesUnlimited bool
	hedgesPerSecond float64
}

// mostRetries is the number of retries, at the start, that counts as no limit.
const mostRetries = 20_000

// measureBudget measures the budgets of the policy.
func (e *explanation) measureBudget() error {
	b := &e.budget
	s := e.strategy
	retries := sim.Strategy{
		Policy: grpcretry.Policy{MaxAttempts: 2, Backoff: grpcretry.Constant(0), Codes: e.policy.Codes, Patience: -1},
		Budget: s.Budget,
	}
	var err error
	if b.fresh, b.saved, b.perSecond, err = e.drain(retries); err != nil {
		return err
	}
	b.unlimited = b.fresh >= mostRetries
	if s.Hedging == nil {
		return nil
	}
	hedges := sim.Strategy{
		Policy:  grpcretry.Policy{MaxAttempts: 2, Codes: e.policy.Codes, Patience: -1},
		Budget:  sim.Budget{Kind: sim.UnlimitedBudget},
		Hedging: &sim.Hedging{Kind: sim.HedgeAfter, Delay: time.Microsecond, Budget: s.Hedging.Budget},
	}
	_, saved, perSecond, err := e.drain(hedges)
	b.hedges, b.hedgesPerSecond, b.hedgesUnlimited = true, perSecond, math.IsInf(saved, 1)
	return err
}

// drain returns the retries that a process can make: at the start, after good times, and per second
// while the good times last.
func (e *explanation) drain(s sim.Strategy) (fresh, saved, perSecond float64, err error) {
	d, err := newDrainer(s)
	if err != nil {
		return 0, 0, 0, err
	}
	fresh = d.empty()
	if fresh >= mostRetries {
		return fresh, math.Inf(1), math.Inf(1), nil
	}
	if d, err = newDrainer(s); err != nil { // a process that has just started
		return 0, 0, 0, err
	}
	each := e.each()
	answered := each * e.answered()
	d.calls(answered, max(e.warmUp(), time.Duration(float64(3*time.Second)/each)))
	saved = d.empty()
	for _, step := range []time.Duration{100 * time.Millisecond, time.Second, 5 * time.Second} {
		perSecond = max(perSecond, d.often(answered, step))
	}
	if s.Budget.Kind == sim.ThrottleBudget && answered > 0 {
		if d, err = newDrainer(s); err != nil {
			return 0, 0, 0, err
		}
		d.empty()
		perSecond = max(perSecond, d.spaced(answered, math.Ceil(2/s.Budget.TokenRatio)))
	}
	return fresh, saved, perSecond, nil
}

// spaced returns the retries per second that the budget allows if one call fails after so many that
// succeed. A throttle allows most if they earn the two tokens that the call and its retry cost.
func (d *drainer) spaced(rate, answered float64) float64 {
	const rounds = 200
	sum := 0
	for range rounds {
		d.calls(rate, time.Duration(answered/rate*float64(time.Second))+1)
		sum += len(d.fail().sent) - 1
	}
	return float64(sum) / rounds / (answered + 1) * rate
}

// fail makes a call that fails, now.
func (d *drainer) fail() story {
	return tell(d.retrier, d.kind, "", d.now, d.deadline, func() float64 { return 0 })
}

// often returns the retries per second that the budget allows if calls fail after every step of good
// times. Budgets differ in the step that gets the most out of them: some hold little, and a throttle
// pays for each call that fails.
func (d *drainer) often(each float64, step time.Duration) float64 {
	seconds := min(max(min(20, 20_000/each), 200/each), 1000)
	steps := max(1, int(seconds/step.Seconds()))
	sum := 0.0
	for range steps {
		d.calls(each, step)
		sum += d.empty()
	}
	return sum / (float64(steps) * step.Seconds())
}

// A drainer makes calls with the budgets of one process.
type drainer struct {
	retrier  *grpcretry.Retrier
	kind     failureKind
	deadline time.Duration // of the calls that fail
	now      time.Time
	owed     float64 // calls
	made     float64
}

func newDrainer(s sim.Strategy) (*drainer, error) {
	r, err := s.Retrier()
	if err != nil {
		return nil, err
	}
	p := r.Policy("")
	d := &drainer{retrier: r, kind: failureKind{code: p.Codes[0], instant: true}, now: storyStart}
	if p.Hedging != nil { // calls that wait for a response until just after the first hedge
		d.kind, d.deadline = failureKind{silent: true}, 2*time.Microsecond
	}
	return d, nil
}

// calls makes calls that succeed, evenly spaced.
func (d *drainer) calls(rate float64, length time.Duration) {
	start := d.now
	d.owed += rate * length.Seconds()
	n := int(d.owed)
	d.owed -= float64(n)
	d.made += float64(n)
	for i := range n {
		d.now = start.Add(time.Duration(float64(length) * float64(i+1) / float64(n)))
		p := drive.New[grpcretry.Attempt](context.Background(), d.retrier, "/herd.Explain/Call", "", d.now, nil)
		a, _ := p.Sent(d.now)
		a.Peer = reachedServer{}
		p.Ended(a, d.now, 0)
	}
	d.now = start.Add(length)
}

// empty makes calls that fail, all now, until the budget refuses; it returns the number of retries
// and hedges.
func (d *drainer) empty() float64 {
	retries := 0
	for limit := mostRetries + int(10*d.made); retries < limit; {
		s := d.fail()
		retries += len(s.sent) - 1
		if len(s.sent) == 1 || errors.Is(s.why, grpcretry.ErrBudgetExhausted) {
			break
		}
	}
	return float64(retries)
}

// allowance is the section on the budget.
func (e *explanation) allowance() explainSection {
	s := explainSection{Title: "What the budget allows"}
	b := e.budget
	if e.unsentOnly {
		s.Parts = []explainPart{{Text: "An attempt that reached no server costs nothing, so no budget is asked."}}
		return s
	}
	if b.unlimited {
		text := "There is no limit: every failed attempt may be followed by another one."
		if e.strategy.Budget.Kind == sim.ConcurrencyBudget {
			text = fmt.Sprintf(
				"Each process may have %d retries in flight at the same time, %s in all processes; their number per second is not limited.",
				e.strategy.Budget.Limit,
				grouped(float64(e.strategy.Budget.Limit*e.processes)),
			)
		}
		s.Parts = append(s.Parts, explainPart{Text: text})
	} else {
		s.Parts = append(s.Parts, explainPart{Table: e.budgetTable()}, explainPart{Text: e.budgetText()})
	}
	if b.hedges {
		s.Parts = append(s.Parts, explainPart{Text: e.hedgeText()})
	}
	return s
}

func (e *explanation) budgetTable() [][]string {
	b, n := e.budget, float64(e.processes)
	inAll := "in all"
	if n > 1 {
		inAll += " " + processes(e.processes)
	}
	return [][]string{
		{"retries that may fail", "each process", inAll, "of the load"},
		{"in good times", perSecond(b.perSecond), perSecond(b.perSecond * n), percent(b.perSecond * n / e.rate)},
		{"saved up when an outage begins", grouped(b.saved), grouped(b.saved * n), secondsOfLoad(b.saved * n / e.rate)},
		{"in processes that have just started", grouped(b.fresh), grouped(b.fresh * n), secondsOfLoad(b.fresh * n / e.rate)},
	}
}

func perSecond(v float64) string {
	if v < 1 {
		return fmt.Sprintf("%.2g/s", v)
	}
	return grouped(v) + "/s"
}

// secondsOfLoad returns how long the load takes to make as many calls.
func secondsOfLoad(seconds float64) string {
	return roundTime(time.Duration(seconds*float64(time.Second))) + " of calls"
}

func (e *explanation) budgetText() string {
	share := e.budget.perSecond * float64(e.processes) / e.rate
	fits := "fit into"
	if share > e.headroom+0.005 {
		fits = "exceed"
	}
	return fmt.Sprintf(
		"The retries of good times %s the headroom of %s. In an outage, what was saved up is spent first.",
		fits,
		percent(e.headroom),
	)
}

func (e *explanation) hedgeText() string {
	b := e.budget
	hedges, _ := e.hedgedShare()
	calm := fmt.Sprintf("In good times %s of the calls are hedged, and 1%% of the calls take over %s; without hedging, over %s. ",
		percent(hedges), roundTime(e.calm.Groups[0].Latency.P99), roundTime(e.unhedged.Groups[0].Latency.P99))
	if b.hedgesUnlimited {
		return calm + "Hedges have no budget of their own."
	}
	return calm + fmt.Sprintf("Hedges need a second budget as well, which allows %s in each process, %s in all, or %s of the load.",
		perSecond(b.hedgesPerSecond), perSecond(b.hedgesPerSecond*float64(e.processes)), percent(b.hedgesPerSecond*float64(e.processes)/e.rate))
}
