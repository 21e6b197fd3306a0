package main

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"strconv"
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

// measureLongest records the longest call of a candidate, for each kind of failure with a code.
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
		told := tell(r, kind, kind.name, storyStart, s.deadline, func() float64 { return 0.999999 })
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
	tried          int
}

// recommend searches for a better policy. It returns nil if there can be none.
func (e *explanation) recommend(ctx context.Context) (*recommendation, error) {
	if e.unsentOnly {
		return nil, nil
	}
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
	return out, s.refine(ctx, out.shown())
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
			c.Policy.MaxAttempts = attempts
			c.Hedging = &sim.Hedging{Kind: sim.HedgeAtQuantile, Quantile: q, AtLeast: 5 * time.Millisecond, AtMost: most}
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

// verdict is the first section: whether to keep the policy, and the recommended one as Go options.
func (e *explanation) verdict(r *recommendation) explainSection {
	s := explainSection{Title: "Verdict"}
	say := func(text string) { s.Parts = append(s.Parts, explainPart{Text: text}) }
	found := e.strategy
	switch {
	case r == nil:
		say("Keep this policy. A method that must not run twice has no better one.")
	case r.found == nil:
		say(
			fmt.Sprintf(
				"Turn retries off, or give the server more capacity. None of %d policies is safe in these circumstances: each adds more load in "+
					"an outage than the headroom of %s, or delays the recovery from an overload.",
				r.tried,
				percent(e.headroom),
			),
		)
		return s
	case r.found == r.current:
		say(fmt.Sprintf("Keep this policy. Of %d policies that were simulated, none that is safe is clearly better.", r.tried))
	default:
		found = r.found.strategy
		tail := ""
		if e.strategy.Hedging != nil {
			tail = fmt.Sprintf("The p99 of all calls is %s instead of %s. ", roundTime(r.found.calm), roundTime(r.current.calm))
		}
		say(fmt.Sprintf("Use the policy below instead. %sThe recommended one saves %s of the calls that fail in short outages, this one %s. %s%s",
			r.unsafeText(), percent(r.found.saved), percent(r.current.saved), tail, r.costText()))
	}
	if n := len(e.warned()); n > 0 {
		say("See " + plural(n, "warning") + " below.")
	}
	switch code, ok := e.goOptions(found); {
	case !ok:
		say("The options are grpcretry.WithServiceConfig with the same file.")
	case code == "":
		say("These are the library's defaults, which need no options.")
	default:
		s.Parts = append(s.Parts, explainPart{Code: code})
	}
	return s
}

// comparison is the section that compares the policy with the recommended one, and with no retries.
func (e *explanation) comparison(r *recommendation) explainSection {
	s := explainSection{Title: "How the policies compare"}
	aim := "saves the most calls in short failures of the server"
	if e.strategy.Hedging != nil {
		aim = "keeps the slowest responses fastest and saves as many calls in short failures of the server"
	}
	s.Parts = []explainPart{
		{Text: fmt.Sprintf("Of %d policies, the recommended one %s, among those whose extra load in an outage fits into the headroom (%s), "+
			"that let an overloaded server recover as fast as without retries, and whose attempts fit into the deadline.", r.tried, aim,
			percent(e.headroom))},
		{Table: e.trialTable(r.shown())},
		{Text: trialNotes},
	}
	return s
}

// shown returns the trials that the page compares.
func (r *recommendation) shown() []*trial {
	shown := []*trial{r.none, r.current}
	if r.found != nil && r.found != r.current {
		shown = append(shown, r.found)
	}
	return shown
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
	return "This one " + listed(reasons) + ". "
}

// costText says in which respects the recommended policy is worse than the current one.
func (r *recommendation) costText() string {
	var costs []string
	add := func(what, found, current string) {
		if found != current { // as printed
			costs = append(costs, fmt.Sprintf("%s is %s instead of %s", what, found, current))
		}
	}
	found, current := r.found, r.current
	if found.extra > current.extra {
		add("the extra load in an outage", percent(max(0, found.extra)), percent(max(0, current.extra)))
	}
	if f, c := found.blips.Groups[0].Rescued, current.blips.Groups[0].Rescued; c.N > 0 && f.P99 > c.P99 {
		add("the p99 of the rescued calls", roundTime(f.P99), roundTime(c.P99))
	}
	if current.longest >= 0 && found.longest > current.longest {
		add("the longest call that fails", roundTime(found.longest), roundTime(current.longest))
	}
	if len(costs) == 0 {
		return ""
	}
	return "The price: " + listed(costs) + "."
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

// goOptions writes a strategy as options; ok is false if it has parts that only a service config has.
func (e *explanation) goOptions(s sim.Strategy) (code string, ok bool) {
	var lines []string
	add := func(format string, args ...any) { lines = append(lines, fmt.Sprintf("grpcretry."+format+",", args...)) }
	p := s.Policy
	if p.MaxAttempts > 0 {
		add("WithMaxAttempts(%d)", p.MaxAttempts)
	}
	if s.Hedging == nil {
		if p.Backoff != nil {
			add("WithBackoff(%s)", goBackoff(p.Backoff))
		}
		if p.OverloadBackoff != nil && (p.Codes == nil || slices.Contains(p.Codes, codes.ResourceExhausted)) {
			add("WithOverloadBackoff(%s)", goBackoff(p.OverloadBackoff))
		}
	}
	if p.Codes != nil && !slices.Equal(p.Codes, []codes.Code{codes.ResourceExhausted, codes.Unavailable}) { // the default
		var names []string
		for _, c := range p.Codes {
			names = append(names, "codes."+c.String())
		}
		add("WithCodes(%s)", strings.Join(names, ", "))
	}
	for _, d := range []struct {
		option string
		time   time.Duration
	}{{"WithAttemptTimeout", p.AttemptTimeout}, {"WithMaxElapsed", p.MaxElapsed}, {"WithPatience", p.Patience}} {
		if d.time != 0 {
			add("%s(%s)", d.option, goTime(max(0, d.time)))
		}
	}
	if p.UnsentOnly {
		add("WithUnsentOnly(true)")
	}
	switch b := s.Budget; b.Kind {
	case sim.DefaultBudget:
	case sim.RatioBudget:
		add(
			"WithRatioBudget(grpcretry.RatioBudget{Ratio: %s, Reserve: %s, Window: %s})",
			orNothing(b.Ratio),
			orNothing(b.Reserve),
			goTime(b.Window),
		)
	case sim.UnlimitedBudget:
		add("WithBudget(grpcretry.Unlimited)")
	default:
		return "", false
	}
	switch h := s.Hedging; {
	case h == nil:
	case h.Kind == sim.HedgeAfter:
		add("WithMethod(%q, grpcretry.WithHedging(grpcretry.Hedging{Delay: grpcretry.HedgeAfter(%s)}))", e.methodName(), goTime(h.Delay))
	default:
		add("WithMethod(%q, grpcretry.WithHedging(grpcretry.Hedging{\n\tDelay: grpcretry.HedgeAtQuantile(%v, %s, %s),\n}))",
			e.methodName(), h.Quantile, goTime(h.AtLeast), goTime(h.AtMost))
	}
	return strings.Join(lines, "\n"), true
}

// goBackoff writes a backoff as a Go expression.
func goBackoff(b grpcretry.Backoff) string {
	switch b := b.(type) {
	case grpcretry.Exponential:
		fields := fmt.Sprintf("Base: %s, Max: %s, Multiplier: %v", goTime(b.Base), goTime(b.Max), b.Multiplier)
		if b.Jitter != grpcretry.FullJitter {
			fields += ", Jitter: grpcretry." + map[grpcretry.Jitter]string{grpcretry.EqualJitter: "EqualJitter",
				grpcretry.ProportionalJitter: "ProportionalJitter", grpcretry.NoJitter: "NoJitter"}[b.Jitter]
		}
		return "grpcretry.Exponential{" + fields + "}"
	case grpcretry.Decorrelated:
		return fmt.Sprintf("grpcretry.Decorrelated{Base: %s, Max: %s}", goTime(b.Base), goTime(b.Max))
	case grpcretry.Constant:
		return fmt.Sprintf("grpcretry.Constant(%s)", goTime(time.Duration(b)))
	default:
		return fmt.Sprint(b)
	}
}

// goTime writes a duration as a Go expression.
func goTime(d time.Duration) string {
	for _, unit := range []struct {
		length time.Duration
		name   string
	}{{time.Second, "time.Second"}, {time.Millisecond, "time.Millisecond"}, {time.Microsecond, "time.Microsecond"}} {
		switch {
		case d == 0:
			return "0"
		case d == unit.length:
			return unit.name
		case d%unit.length == 0:
			return fmt.Sprintf("%d*%s", d/unit.length, unit.name)
		}
	}
	return strconv.FormatInt(int64(d), 10)
}

// methodName is the method or the service that the policy is for, or a placeholder.
func (e *explanation) methodName() string {
	if e.question.method != "" {
		return e.question.method
	}
	if name := strings.TrimPrefix(e.base.Name, "policy "); strings.HasPrefix(name, "/") {
		return name
	}
	return "/pkg.Service/Method"
}

// orNothing writes a setting of a RatioBudget, in which a zero means the default.
func orNothing(x float64) string {
	if x == 0 {
		return "grpcretry.Nothing"
	}
	return fmt.Sprint(x)
}
