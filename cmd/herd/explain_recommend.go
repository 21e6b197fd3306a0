package main

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"strings"
	"sync"
	"time"

	"google.golang.org/grpc/codes"

	"github.com/grpcretry/grpcretry"
	"github.com/grpcretry/grpcretry/cmd/herd/internal/sim"
)

// This file searches for a better policy with the simulator, in two rounds: first the attempts and the
// waits (or the delay of hedging), then the budget. A trial is a candidate in three small scenarios:
// short failures, in which retries should save calls; an outage, in which the server should not get
// much more than its load; and an overload, from which it should recover as fast as without retries.

// A trial is a candidate with its results.
type trial struct {
	strategy sim.Strategy
	blips    *sim.Result
	outage   *sim.Result
	overload *sim.Result
	longest  time.Duration // of a call whose attempts all fail; negative: never over
	reached  bool          // the longest call makes all its attempts before the deadline

	saved float64       // the share of the calls that fail without retries
	extra float64       // the load in the first ten seconds of an outage, beyond the normal one, as a share of that
	calm  time.Duration // the p99 of all calls in the scenario with short failures
}

// The lengths of the blips, and when things begin in the trial scenarios.
var (
	blips       = []time.Duration{300 * time.Millisecond, time.Second, 2 * time.Second}
	blipsEvery  = 14 * time.Second
	troubleAt   = 12 * time.Second
	troubleFor  = 10 * time.Second
	afterwards  = 15 * time.Second
	overloadCut = 0.3 // the share of the capacity that an overloaded server has left
)

// trialScenario returns a load of about so many calls per second, on a server with the headroom of the
// question. It counts calls: a queue would depend on the size of the simulated fleet.
func (e *explanation) trialScenario(calls float64, duration time.Duration, outages ...sim.Outage) sim.Scenario {
	rate, processes := e.fleet(calls)
	return sim.Scenario{
		Seed:     e.seed,
		Duration: duration,
		Network:  sim.Distribution{Mean: oneWay},
		Groups:   []sim.Group{{Rate: rate, Even: true, Processes: processes, Deadline: e.deadline}},
		Servers: []sim.Server{{
			Capacity: rate * (1 + e.headroom), Window: 200 * time.Millisecond, RejectCode: codes.Unavailable,
			Latency: e.latency, Outages: outages,
		}},
	}
}

func (e *explanation) blipScenario(calls float64) sim.Scenario {
	var outages []sim.Outage
	for i, length := range blips {
		outages = append(outages, sim.Outage{From: troubleAt + time.Duration(i)*blipsEvery, For: length})
	}
	return e.trialScenario(calls, troubleAt+time.Duration(len(blips))*blipsEvery, outages...)
}

func (e *explanation) downScenario() sim.Scenario {
	return e.trialScenario(e.effort.rate, troubleAt+troubleFor+afterwards, sim.Outage{From: troubleAt, For: troubleFor})
}

// overloadScenario has workers and a queue, and rejections that cost work: that is what keeps a server
// down after an overload.
func (e *explanation) overloadScenario() sim.Scenario {
	s := e.trialScenario(e.effort.rate, troubleAt+troubleFor+2*afterwards, sim.Outage{From: troubleAt, For: troubleFor, Left: overloadCut})
	server := &s.Servers[0]
	server.Window, server.Queue, server.RejectCost = 0, int(server.Capacity/2)+1, 0.3
	return s
}

// A search holds what all trials are compared with.
type search struct {
	*explanation
	none *trial // without retries
}

// try simulates candidates, as many at a time as there are cores.
func (s *search) try(ctx context.Context, all []sim.Strategy) ([]*trial, error) {
	trials := make([]*trial, len(all))
	errs := make([]error, len(all))
	next := make(chan int, len(all))
	for i := range all {
		next <- i
	}
	close(next)
	var workers sync.WaitGroup
	for range min(runtime.GOMAXPROCS(0), len(all)) {
		workers.Go(func() {
			for i := range next {
				trials[i], errs[i] = s.tryOne(ctx, all[i])
			}
		})
	}
	workers.Wait()
	return trials, errors.Join(errs...)
}

func (s *search) tryOne(ctx context.Context, strategy sim.Strategy) (*trial, error) {
	t := &trial{strategy: strategy}
	scaled := s.simulated(strategy)
	for _, one := range []struct {
		scenario sim.Scenario
		result   **sim.Result
	}{{s.blipScenario(s.effort.rate), &t.blips}, {s.downScenario(), &t.outage}, {s.overloadScenario(), &t.overload}} {
		r, err := sim.Run(ctx, one.scenario, scaled, nil)
		if err != nil {
			return nil, err
		}
		*one.result = r
	}
	if err := s.measureLongest(t); err != nil {
		return nil, err
	}
	t.extra = s.loads(t.outage, int(troubleAt/time.Second), int((troubleAt+troubleFor)/time.Second)) - 1
	s.judgeBlips(t)
	return t, nil
}

func (s *search) judgeBlips(t *trial) {
	t.calm = t.blips.Summary.P99
	if s.none != nil {
		t.saved = max(0, 1-t.blips.Summary.Failed/max(1, s.none.blips.Summary.Failed))
	}
}

// refine repeats the blips of the trials that are shown with many more calls, the first being the one
// without retries.
func (s *search) refine(ctx context.Context, shown []*trial) error {
	for _, t := range shown {
		r, err := sim.Run(ctx, s.blipScenario(10*s.effort.rate), s.simulated(t.strategy), nil)
		if err != nil {
			return err
		}
		t.blips = r
		s.judgeBlips(t)
	}
	return nil
}

// measureLongest tells the longest call of a candidate, for each kind of failure with a code.
func (s *search) measureLongest(t *trial) error {
	e := *s.explanation
	e.question = &question{strategy: t.strategy, deadline: s.deadline, effort: s.effort}
	var err error
	if e.policy, err = e.resolved(); err != nil {
		return err
	}
	unlimited := e.unlimited()
	r, err := unlimited.Retrier()
	if err != nil {
		return err
	}
	t.reached = true
	for _, kind := range e.kinds() {
		if kind.silent || kind.unsent {
			continue
		}
		told := tell(r, kind, storyStart, s.deadline, func() float64 { return 0.999999 })
		t.reached = t.reached && (errors.Is(told.why, grpcretry.ErrAttemptsExhausted) || errors.Is(told.why, grpcretry.ErrNotRetryable))
		t.longest = max(t.longest, told.end)
	}
	return nil
}

// loads returns the average load on the server from one second to another, as a share of the normal
// load.
func (e *explanation) loads(r *sim.Result, from, to int) float64 {
	rate, _ := e.fleet(e.effort.rate)
	sum := 0.0
	for i := from; i < to && i < len(r.Servers[0].Series); i++ {
		sum += float64(r.Servers[0].Series[i].Offered)
	}
	return sum / float64(to-from) / rate
}

// safe reports whether a candidate harms neither server nor callers: its extra load in an outage fits
// into the headroom, the server recovers as from an overload without retries, or a second later, and
// no call ends before its attempts are used up.
func (s *search) safe(t *trial) bool {
	return s.recovers(t) && s.fits(t) && s.ends(t)
}

func (s *search) recovers(t *trial) bool {
	recovered, reference := t.overload.Summary.Stable, s.none.overload.Summary.Stable
	return reference < 0 || recovered >= 0 && recovered <= reference+time.Second
}

func (s *search) fits(t *trial) bool { return t.extra <= s.headroom+0.01 }
func (s *search) ends(t *trial) bool { return s.deadline == 0 || t.reached }

// better reports whether a is clearly better than b, both being safe: it saves more calls; for hedged
// calls, the slowest 1% are faster, and as many are saved.
func (s *search) better(a, b *trial) bool {
	if s.strategy.Hedging != nil {
		if a.saved < b.saved-0.02 {
			return false
		}
		return float64(a.calm) < 0.95*float64(b.calm) || a.saved > b.saved+0.02
	}
	return a.saved > b.saved+0.02
}

// best returns the best safe trial, the first one of several that are alike; nil if none is safe.
func (s *search) best(all []*trial) (best *trial) {
	for _, one := range all {
		if s.safe(one) && (best == nil || s.better(one, best)) {
			best = one
		}
	}
	return best
}

// A recommendation is the outcome of the search.
type recommendation struct {
	*search
	current, found *trial
	config         *trial // the nearest policy that a service config can have; nil for none
	tried          int
}

// recommend searches for a better policy.
func (e *explanation) recommend(ctx context.Context) (*recommendation, error) {
	s := &search{explanation: e}
	first, err := s.try(ctx, []sim.Strategy{{Name: "no retries", Policy: grpcretry.Policy{MaxAttempts: 1}}})
	if err != nil {
		return nil, err
	}
	s.none = first[0]
	current, err := s.try(ctx, []sim.Strategy{e.strategy})
	if err != nil {
		return nil, err
	}
	out := &recommendation{search: s, current: current[0], tried: 1}
	best := s.best(current)
	for _, round := range []func(*trial) []sim.Strategy{s.waits, s.budgets} {
		trials, err := s.try(ctx, round(best))
		if err != nil {
			return nil, err
		}
		out.tried += len(trials)
		if found := s.best(trials); found != nil && (best == nil || s.better(found, best)) {
			best = found
		}
	}
	out.found = best
	if best != nil {
		out.config, err = s.asConfig(ctx, best)
	}
	return out, err
}

// carefulBudget is the budget of the first round: the library's, or less if the headroom is smaller.
func (s *search) carefulBudget() sim.Budget {
	if s.headroom >= mostRatio {
		return sim.Budget{}
	}
	return sim.Budget{Kind: sim.RatioBudget, Ratio: roundShare(s.headroom), Reserve: 1, Window: 10 * time.Second}
}

// mostRatio is the largest ratio that is recommended, which is the library's own: all of a large
// headroom would leave none for anything else.
const mostRatio = 0.2

// roundShare rounds down to whole percents.
func roundShare(v float64) float64 { return float64(int(v*100+1e-9)) / 100 }

// waits are the candidates of the first round.
func (s *search) waits(*trial) (all []sim.Strategy) {
	if s.strategy.Hedging != nil {
		return s.delays()
	}
	for _, attempts := range []int{3, 4, 5} {
		for _, base := range []time.Duration{50, 100, 200, 400} {
			for _, multiplier := range []float64{2, 3} {
				c := s.candidate()
				c.Policy.OverloadBackoff = s.overloadBackoff(attempts - 1)
				c.Policy.MaxAttempts = attempts
				c.Policy.Backoff = grpcretry.Exponential{Base: base * time.Millisecond, Max: 5 * time.Second, Multiplier: multiplier}
				c.Budget = s.carefulBudget()
				all = append(all, c)
			}
		}
	}
	return all
}

// candidate returns what all candidates have in common: the codes, and an attempt timeout that fits
// into the deadline.
func (s *search) candidate() sim.Strategy {
	c := sim.Strategy{Name: "recommended"}
	for _, one := range s.codes() {
		if !slices.Contains(hopeless, one) && one != codes.DeadlineExceeded {
			c.Policy.Codes = append(c.Policy.Codes, one)
		}
	}
	if !slices.Contains(c.Policy.Codes, codes.Unavailable) {
		c.Policy.Codes = append(c.Policy.Codes, codes.Unavailable)
	}
	slices.Sort(c.Policy.Codes)
	if t := s.strategy.Policy.AttemptTimeout; t > 0 && (s.deadline == 0 || t < s.deadline) {
		c.Policy.AttemptTimeout = t
	}
	return c
}

// overloadBackoff returns the longest of a few backoffs for RESOURCE_EXHAUSTED with which so many
// retries fit into the deadline.
func (s *search) overloadBackoff(retries int) grpcretry.Backoff {
	for base := time.Second; ; base /= 2 {
		b := grpcretry.Exponential{Base: base, Max: 20 * base, Multiplier: 2}
		total := time.Duration(0)
		for retry := range retries {
			total += b.Delay(retry+1, 0, 1)
		}
		if s.deadline == 0 || total < s.deadline || base < 10*time.Millisecond {
			return b
		}
	}
}

// delays are the candidates of the first round for hedged calls.
func (s *search) delays() (all []sim.Strategy) {
	for _, attempts := range []int{2, 3} {
		for _, q := range []float64{0.95, 0.9, 0.99} {
			c := s.candidate()
			most := time.Second
			if s.deadline > 0 {
				most = min(most, s.deadline/2)
			}
			c.Hedging = &sim.Hedging{Kind: sim.HedgeAtQuantile, Quantile: q, MaxAttempts: attempts, AtLeast: 5 * time.Millisecond, AtMost: most}
			c.Budget = s.carefulBudget()
			all = append(all, c)
		}
	}
	return all
}

// budgets are the candidates of the second round: the best one, with other budgets.
func (s *search) budgets(best *trial) (all []sim.Strategy) {
	base := s.waits(nil)[0]
	if best != nil {
		base = best.strategy
	}
	for _, ratio := range []float64{0.05, 0.1, min(mostRatio, roundShare(s.headroom))} {
		if ratio > s.headroom+1e-9 || ratio == 0 {
			continue
		}
		for _, reserve := range []float64{1, 3, 10} {
			c := base
			c.Name = "recommended"
			c.Budget = sim.Budget{Kind: sim.RatioBudget, Ratio: ratio, Reserve: reserve, Window: 10 * time.Second}
			all = append(all, c)
		}
	}
	return all
}

// asConfig tries what a service config can say of a policy: jitter of ±20%, a throttle instead of the
// budget, and at most five attempts, or fewer, because its waits are longer. It returns nil if none is
// safe.
func (s *search) asConfig(ctx context.Context, best *trial) (*trial, error) {
	var all []sim.Strategy
	for i := range 9 {
		tokens, fewer := []float64{10, 100, 1000}[i%3], i/3
		c := best.strategy
		c.Name = "as config"
		c.Policy.OverloadBackoff, c.Policy.AttemptTimeout, c.Policy.MaxElapsed, c.Policy.Classifier = nil, 0, 0, nil
		c.Policy.Codes = s.candidate().Policy.Codes
		c.Budget = sim.Budget{Kind: sim.ThrottleBudget, MaxTokens: tokens, TokenRatio: max(0.01, min(0.1, roundShare(s.headroom)))}
		if h := c.Hedging; h != nil {
			fixed := sim.Hedging{Kind: sim.HedgeAfter, Delay: s.hedges.Round(time.Millisecond), MaxAttempts: h.MaxAttempts, NonFatalCodes: c.Policy.Codes}
			c.Hedging, c.Policy = &fixed, grpcretry.Policy{}
		} else {
			p, err := (&question{strategy: best.strategy}).resolved()
			if err != nil {
				return nil, err
			}
			b, ok := p.Backoff.(grpcretry.Exponential)
			if !ok {
				b = grpcretry.Exponential{Base: 100 * time.Millisecond, Max: 5 * time.Second, Multiplier: 2}
			}
			b.Jitter = grpcretry.ProportionalJitter
			c.Policy.Backoff, c.Policy.MaxAttempts = b, max(2, min(p.MaxAttempts, 5)-fewer)
		}
		all = append(all, c)
	}
	trials, err := s.try(ctx, all)
	if err != nil {
		return nil, err
	}
	return s.best(trials), nil
}

// recommendation is the section with the recommended policy.
func (e *explanation) recommendation(ctx context.Context) (explainSection, error) {
	s := explainSection{Title: "Recommended"}
	if e.unsentOnly {
		s.Parts = []explainPart{{Text: "Nothing else: a method that must not run twice has no better policy than this one."}}
		return s, nil
	}
	r, err := e.recommend(ctx)
	if err != nil {
		return s, err
	}
	criteria := fmt.Sprintf("of %d policies that were simulated, it saves the most calls in short failures of the server, "+
		"among those whose extra load in an outage fits into the headroom (%s), that let an overloaded server recover as fast as without retries, and whose attempts fit into the deadline.",
		r.tried, percent(e.headroom))
	if e.strategy.Hedging != nil {
		criteria = strings.Replace(criteria, "saves the most calls in short failures of the server", "keeps the slowest responses fastest and saves as many calls in short failures of the server", 1)
	}
	shown := []*trial{r.none, r.current}
	switch {
	case r.found == nil:
		s.Parts = append(s.Parts, explainPart{Text: fmt.Sprintf("None of %d policies is safe in these circumstances: each adds more load in an outage than the headroom of %s, or delays the recovery from an overload. "+
			"Turn retries off, or give the server more capacity.", r.tried, percent(e.headroom))})
	case r.found == r.current:
		s.Parts = append(s.Parts, explainPart{Text: "Keep this policy: " + criteria})
	default:
		s.Parts = append(s.Parts, explainPart{Text: "The recommended policy is below the table: " + criteria + r.unsafeText()})
		shown = append(shown, r.found)
	}
	if r.config != nil && r.found != r.current {
		shown = append(shown, r.config)
	}
	if err := r.refine(ctx, shown); err != nil {
		return s, err
	}
	s.Parts = append(s.Parts, explainPart{Table: e.trialTable(shown)}, explainPart{Text: trialNotes}, explainPart{Chart: e.chart(r)})
	if r.found != nil && r.found != r.current {
		s.Parts = append(s.Parts, e.copyable(r)...)
	}
	return s, nil
}

// unsafeText says why the current policy is not recommended, if that is not a matter of degree.
func (r *recommendation) unsafeText() string {
	var reasons []string
	if !r.fits(r.current) {
		reasons = append(reasons, "adds more load in an outage than the headroom")
	}
	if !r.recovers(r.current) {
		reasons = append(reasons, "delays the recovery from an overload")
	}
	if !r.ends(r.current) {
		reasons = append(reasons, "leaves calls without their last attempts")
	}
	if len(reasons) == 0 {
		return ""
	}
	return " The policy in question " + listed(reasons) + "."
}

const trialNotes = "Blips are outages of 0.3, 1 and 2 s; of the calls that fail in them without retries, so many succeed. " +
	"The extra load is that of the first 10 s of an outage; an overload leaves the server 30% of its capacity for 10 s. " +
	"99% of the calls that only a further attempt saves take less time than their p99."

// trialTable has a column for each trial.
func (e *explanation) trialTable(all []*trial) [][]string {
	table := [][]string{{""}, {"calls saved in blips"}, {"extra load in an outage"},
		{"time to recover after an overload"}, {"p99 of the rescued calls"}, {"longest call that fails"}}
	if e.strategy.Hedging != nil {
		table = append(table, []string{"p99 of all calls"}, []string{"extra load in good times"})
	}
	for _, t := range all {
		cells := []string{t.strategy.Name, percent(t.saved), percent(max(0, t.extra)), settled(t.overload.Summary), rescuedTime(t), "never over"}
		if t.longest >= 0 {
			cells[5] = roundTime(t.longest)
		}
		if e.strategy.Hedging != nil {
			good := e.loads(t.outage, int(troubleAt/time.Second)/2, int(troubleAt/time.Second)) - 1
			cells = append(cells, roundTime(t.calm), percent(max(0, good)))
		}
		for i, cell := range cells {
			table[i] = append(table[i], cell)
		}
	}
	return table
}

func rescuedTime(t *trial) string {
	if q := t.blips.Groups[0].Rescued; q.N > 0 {
		return roundTime(q.P99)
	}
	return "–"
}

// chart compares the load of the current policy with that of the recommended one, or with none.
func (e *explanation) chart(r *recommendation) *loadChart {
	const before = 2
	c := &loadChart{
		Title:  "Attempts per second at a server that is down for 10 s, as a share of the normal load (│: its capacity)",
		From:   -before,
		Outage: int(troubleFor / time.Second), Capacity: 1 + e.headroom,
	}
	other := r.found
	if other == nil || other == r.current {
		other = r.none
	}
	for _, t := range []*trial{r.current, other} {
		c.Names = append(c.Names, t.strategy.Name)
		var loads []float64
		from := int(troubleAt/time.Second) - before
		for i := from; i < int((troubleAt+troubleFor)/time.Second)+5; i++ {
			loads = append(loads, e.loads(t.outage, i, i+1))
		}
		c.Loads = append(c.Loads, loads)
	}
	return c
}
