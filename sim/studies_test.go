package sim

import (
	"math"
	"testing"
	"time"
)

// What each study is there to show.

func TestStudiesCanBeRead(t *testing.T) {
	seen := map[string]bool{}
	for _, study := range Studies() {
		if study.Name == "" || study.Title == "" || len(study.See) < 100 || len(study.Scenarios) == 0 {
			t.Errorf("study %q: title %q, see %q, %d scenarios", study.Name, study.Title, study.See, len(study.Scenarios))
		}
		for _, s := range study.Scenarios {
			if err := s.Check(); err != nil {
				t.Errorf("%s: %v", s.Name, err)
			}
			if seen[s.Name] || s.Title == "" || len(s.Strategies) == 0 {
				t.Errorf("scenario %q (title %q, %d strategies): want a name of its own, a title and strategies", s.Name, s.Title, len(s.Strategies))
			}
			seen[s.Name] = true
		}
	}
	if _, ok := FindStudy("nonsense"); ok {
		t.Error(`FindStudy("nonsense") found something`)
	}
}

// Exponential backoff without jitter is not better than no backoff for who waits, and
// jitter is better than both for all.
func TestClassicLesson(t *testing.T) {
	t.Parallel()
	s := classic().Scenarios[0]
	got := map[string]Summary{}
	for _, strategy := range s.Strategies[1:] {
		got[strategy.Name] = averaged(t, s, strategy, 3)
	}
	full, equal, plain := got["full jitter"], got["equal jitter"], got["exponential"]
	if full.P99 > plain.P99/2 || full.Over != 0 || full.Stable != 0 || full.Wasted > plain.Wasted {
		t.Errorf("full jitter: p99 %v, %v over capacity, stable after %v, %v wasted; want it to beat no jitter", full.P99, full.Over, full.Stable, full.Wasted)
	}
	if equal.Wasted > full.Wasted || equal.Over < full.Over {
		t.Errorf("equal jitter: %v wasted, %v over capacity; want less and more than full jitter", equal.Wasted, equal.Over)
	}
	if got["decorrelated"].Wasted < full.Wasted {
		t.Errorf("decorrelated wastes %v, want more than full jitter's %v", got["decorrelated"].Wasted, full.Wasted)
	}
}

// The ranking of the architecture blog, and its own simulator's figures for 50, 100 and 190
// clients (30 runs of github.com/aws-samples/aws-arch-backoff-simulator): calls and
// milliseconds.
func TestAWSAgreesWithKnownResults(t *testing.T) {
	t.Parallel()
	known := map[string]map[string][2]float64{
		"aws-50": {"none": {689, 1138}, "exponential": {628, 36451}, "equal jitter": {347, 4261},
			"full jitter": {333, 2853}, "decorrelated": {373, 2250}},
		"aws-100": {"none": {2426, 2032}, "exponential": {1853, 64126}, "equal jitter": {812, 6764},
			"full jitter": {796, 4881}, "decorrelated": {1008, 4785}},
		"aws-190": {"none": {7984, 3534}, "exponential": {5141, 100980}, "equal jitter": {1758, 9346},
			"full jitter": {1770, 7385}, "decorrelated": {2430, 7705}},
	}
	seeds := map[string]int{"aws-50": 30, "aws-100": 10, "aws-190": 3}
	for _, s := range aws().Scenarios {
		if known[s.Name] == nil {
			continue
		}
		got := map[string]Summary{}
		for _, strategy := range s.Strategies {
			m := averaged(t, s, strategy, seeds[s.Name])
			got[strategy.Name] = m
			want := known[s.Name][strategy.Name]
			if !near(m.Attempts, want[0], 0.05) || !near(float64(m.Done.Milliseconds()), want[1], 0.1) {
				t.Errorf("%s, %s: %.0f calls in %v; want %v within 5 %%, in %v ms within 10 %%",
					s.Name, strategy.Name, m.Attempts, m.Done, want[0], want[1])
			}
		}
		full, equal, decorrelated, plain := got["full jitter"], got["equal jitter"], got["decorrelated"], got["exponential"]
		calls := full.Attempts <= 1.02*equal.Attempts && equal.Attempts < decorrelated.Attempts && decorrelated.Attempts < plain.Attempts
		times := full.Done < equal.Done && decorrelated.Done < equal.Done && equal.Done < plain.Done
		if !calls || !times {
			t.Errorf("%s: another ranking than the experiment's: %+v", s.Name, got)
		}
	}
}

// Ten thousand clients who come in step waste their few attempts.
func TestThousandsLesson(t *testing.T) {
	t.Parallel()
	s := thousands().Scenarios[0]
	plain := averaged(t, s, strategyOf(t, s, "exponential"), 1)
	for _, name := range []string{"full jitter", "equal jitter", "decorrelated"} {
		got := averaged(t, s, strategyOf(t, s, name), 1)
		if got.PeakAfter > plain.PeakAfter/4 || got.Succeeded < 5*plain.Succeeded || got.Fairness < plain.Fairness {
			t.Errorf("%s: peak %v, %v succeed, fairness %.2f; without jitter %v, %v, %.2f",
				name, got.PeakAfter, got.Succeeded, got.Fairness, plain.PeakAfter, plain.Succeeded, plain.Fairness)
		}
	}
}

// goodput is calls that succeeded per second, between two times.
func goodput(r *Result, from, to int) float64 {
	n := 0
	for _, b := range r.Groups[0].Series[from:to] {
		n += b.Succeeded
	}
	return float64(n) / float64(to-from)
}

// The dip is over at 20 s. At 40 s either all is well again, or nothing.
func TestBudgetLesson(t *testing.T) {
	t.Parallel()
	costly, long := budget().Scenarios[0], budget().Scenarios[1]
	for _, tt := range []struct {
		scenario Scenario
		strategy string
		recovers bool
	}{
		{costly, "4, no budget", false},
		{costly, "3 as AWS, no budget", true},
		{costly, "4, default budget", true},
		{costly, "4, A6 throttle", true},
		{long, "4, no budget", false},
		{long, "4, 20 % + 10/s", false}, // 1.2 × 1,000 + 10 × 10 is over the capacity
		{long, "4, 10 % + 1/s", true},
		{long, "4, A6 throttle", true},
	} {
		s := tt.scenario
		r := mustRun(t, s, strategyOf(t, s, tt.strategy))
		if before := goodput(r, 2, 10); !near(before, 1000, 0.05) {
			t.Fatalf("%s, %s: %.0f calls a second succeed before the dip, want 1000", s.Name, tt.strategy, before)
		}
		after := goodput(r, 40, 50)
		stable := r.Summary.Stable >= 0
		if tt.recovers != near(after, 1000, 0.05) || tt.recovers != stable || !tt.recovers && after > 500 {
			t.Errorf("%s, %s: %.0f calls a second succeed 20 s after the dip, stable after %v; want recovered: %v",
				s.Name, tt.strategy, after, r.Summary.Stable, tt.recovers)
		}
	}
}

func TestPushbackLesson(t *testing.T) {
	got := map[string]Summary{}
	for _, s := range pushback().Scenarios {
		for _, strategy := range s.Strategies {
			got[s.Name+" "+strategy.Name] = averaged(t, s, strategy, 1)
		}
	}
	spread, exact, deaf := got["pushback-spread obeys"], got["pushback-exact obeys"], got["pushback-spread ignores it"]
	if spread.Wasted != 1000 || spread.Over != 0 || spread.P99 > 15*sec {
		t.Errorf("spread: %v wasted, %v over capacity, p99 %v; want one each, 0, 15 s", spread.Wasted, spread.Over, spread.P99)
	}
	if exact.Wasted != 3000 || exact.Over != 800 {
		t.Errorf("exact: %v wasted, %v over capacity; want 1000+800+600+400+200, 800", exact.Wasted, exact.Over)
	}
	if deaf.Wasted < 8*spread.Wasted || deaf.P99 < spread.P99+3*sec {
		t.Errorf("ignored: %v wasted, p99 %v; want much more than %v, %v", deaf.Wasted, deaf.P99, spread.Wasted, spread.P99)
	}
}

func TestLayersLesson(t *testing.T) {
	t.Parallel()
	today, stop := layers().Scenarios[0], layers().Scenarios[1]
	for _, tt := range []struct {
		scenario    Scenario
		strategy    string
		least, most float64
	}{
		{today, "3 each, no budget", 26, 27.5},
		{today, "3 each, default budget", 1.2, 3}, // (1.2 × calls + 10/s), three times over, and what was saved up
		{today, "3 each, 10 % + 1/s", 1.1, 1.8},
		{today, "3 each, A6 throttle", 0.99, 1.1},
		{stop, "3 each, no budget", 2.9, 3.1},
		{stop, "3 each, default budget", 1.1, 1.7},
	} {
		if got := mustRun(t, tt.scenario, strategyOf(t, tt.scenario, tt.strategy)).Summary.AmplifiedDown; got < tt.least || got > tt.most {
			t.Errorf("%s, %s: D is asked %.2f times for each call, want %v to %v", tt.scenario.Name, tt.strategy, got, tt.least, tt.most)
		}
	}
}

func TestMixedLesson(t *testing.T) {
	s := mixed().Scenarios[0]
	p99 := func(strategy string) (good, others time.Duration) {
		r := mustRun(t, s, strategyOf(t, s, strategy))
		return r.Groups[0].Latency.P99, r.Groups[1].Latency.P99
	}
	if good, others := p99("exponential"); good > others*2/3 {
		t.Errorf("beside clients without jitter: p99 %v against their %v, want much less", good, others)
	}
	if good, others := p99("constant 1s"); good < others {
		t.Errorf("beside clients that ask more often: p99 %v against their %v, want more", good, others)
	}
	if good, others := p99("full jitter"); !near(good.Seconds(), others.Seconds(), 0.05) {
		t.Errorf("among their like: p99 %v and %v, want about the same", good, others)
	}
}

// The aims of the search: see docs/herd.md.
func TestLimitLesson(t *testing.T) {
	t.Parallel()
	possible, _ := LimitOf(limit().Scenarios[0])
	ratio := func(s Scenario, strategy string) (p99, wasted float64) {
		m := averaged(t, s, strategyOf(t, s, strategy), 8)
		return m.P99.Seconds() / possible.P99.Seconds(), m.Wasted
	}
	alone, helped, far := limit().Scenarios[0], limit().Scenarios[1], limit().Scenarios[2]
	if p99, wasted := ratio(helped, "default backoff"); p99 > 1.05 || wasted > 2000 {
		t.Errorf("with spread pushback: p99 %.3f of the limit, %.0f wasted; want 1.05 and 2000 at most", p99, wasted)
	}
	if p99, wasted := ratio(far, "default backoff"); p99 > 1.05 || wasted > 2000 {
		t.Errorf("with spread pushback over a network: p99 %.3f of the limit, %.0f wasted; want 1.05 and 2000 at most", p99, wasted)
	}
	for _, winner := range []string{"equal 4s", "decorrelated 1s..7s", "equal 6s..7s"} {
		if p99, wasted := ratio(alone, winner); p99 > 1.15 || wasted > 6000 {
			t.Errorf("%s: p99 %.3f of the limit, %.0f wasted; want 1.15 and 6000 at most", winner, p99, wasted)
		}
	}
	// One of them is not lucky with this outage only, nor with a server that counts by the
	// second.
	for _, length := range []time.Duration{9 * sec, 11 * sec, 12 * sec} {
		s := alone
		s.Servers = []Server{alone.Servers[0]}
		s.Servers[0].Outages = []Outage{{For: length}}
		s.Servers[0].Window = 100 * ms
		possible, _ := LimitOf(s)
		m := averaged(t, s, strategyOf(t, s, "equal 4s"), 10)
		if p99 := m.P99.Seconds() / possible.P99.Seconds(); p99 > 1.15 || m.Wasted > 6000 {
			t.Errorf("equal 4s, outage of %v: p99 %.3f of the limit, %.0f wasted; want 1.15 and 6000 at most", length, p99, m.Wasted)
		}
	}
}

func TestDefaultsLesson(t *testing.T) {
	t.Parallel()
	for _, s := range defaults().Scenarios {
		switch s.Name {
		case "defaults-blip-300ms", "defaults-blip-1s":
			two := averaged(t, s, strategyOf(t, s, "full jitter ×2"), 3)
			four := averaged(t, s, strategyOf(t, s, "full jitter ×4"), 3)
			if four.Succeeded < two.Succeeded+300 || four.Attempts > two.Attempts {
				t.Errorf("%s: ×4 makes %v attempts and %v calls succeed; want more than %v with no more than %v",
					s.Name, four.Attempts, four.Succeeded, two.Succeeded, two.Attempts)
			}
		case "defaults-fleet-1000":
			floor := strategyOf(t, s, "default budget")
			floor.Budget = Budget{Kind: RatioBudget, Ratio: 0.2, MinPerSecond: 10}
			if r := mustRun(t, s, floor); r.Summary.Stable >= 0 || r.Summary.Refused > 0 {
				t.Errorf("%s: 10 a second for each process: stable after %v, %v refused; want never, and nobody held back", s.Name, r.Summary.Stable, r.Summary.Refused)
			}
			if r := mustRun(t, s, strategyOf(t, s, "A6 throttle")); math.Abs(r.Summary.Stable.Seconds()) > 5 {
				t.Errorf("%s: A6 throttle: stable after %v, want within 5 s", s.Name, r.Summary.Stable)
			}
		}
	}
}

// A second attempt where the first is slow cuts the tail for little, as long as slowness is
// bad luck. Where everything is slow it needs a budget that is smaller than what is to spare.
func TestTailLesson(t *testing.T) {
	t.Parallel()
	luck, slow := tails().Scenarios[0], tails().Scenarios[1]
	if calls := luck.Groups[0].Rate * luck.Groups[0].Stop.Seconds(); calls < 100_000 {
		t.Errorf("%v calls, want enough for a p99.9", calls)
	}
	luck.Groups[0].Stop = 40 * sec // enough to see it
	slow.Duration = 40 * sec
	run := func(s Scenario, strategy string) (*Result, float64) {
		r := mustRun(t, s, strategyOf(t, s, strategy))
		return r, r.Summary.Attempts/r.Summary.Calls - 1
	}
	plain, _ := run(luck, "without hedging")
	if m := plain.Summary; m.P50 < 9*ms || m.P50 > 12*ms || m.P99 < 10*m.P50 || m.P999 < 40*m.P50 {
		t.Errorf("p50 %v, p99 %v, p99.9 %v; want a tail that is heavy", m.P50, m.P99, m.P999)
	}
	for _, name := range []string{"after 50 ms", "0.95-quantile"} {
		r, more := run(luck, name)
		m := r.Summary
		if m.P99 > plain.Summary.P99/2 || m.P999 > plain.Summary.P999/5 || more > 0.05 || more < 0.03 {
			t.Errorf("%s: p99 %v, p99.9 %v for %.1f %% more attempts; want half of %v and a fifth of %v for 3 to 5 %%",
				name, m.P99, m.P999, 100*more, plain.Summary.P99, plain.Summary.P999)
		}
		if !near(m.P50.Seconds(), plain.Summary.P50.Seconds(), 0.01) || m.Failed > 0 || r.Servers[0].Utilisation > plain.Servers[0].Utilisation {
			t.Errorf("%s: p50 %v, %v failed, workers busy %.3f; want %v, none, less than %.3f",
				name, m.P50, m.Failed, r.Servers[0].Utilisation, plain.Summary.P50, plain.Servers[0].Utilisation)
		}
	}
	late, more := run(luck, "0.99-quantile")
	if m := late.Summary; more > 0.01 || m.P99 < plain.Summary.P99*98/100 || m.P999 > plain.Summary.P999/3 {
		t.Errorf("0.99-quantile: p99 %v, p99.9 %v for %.1f %% more attempts; want %v as before, a third of %v, 1 %%", m.P99, m.P999, 100*more, plain.Summary.P99, plain.Summary.P999)
	}

	plain, _ = run(slow, "without hedging")
	for _, name := range []string{"after 50 ms, no budget", "0.95-quantile, no budget"} {
		if r, _ := run(slow, name); r.Summary.Failed < 100*plain.Summary.Failed || r.Summary.P99 < 8*plain.Summary.P99 {
			t.Errorf("%s: %v failed, p99 %v; want far more than %v, %v", name, r.Summary.Failed, r.Summary.P99, plain.Summary.Failed, plain.Summary.P99)
		}
	}
	for _, name := range []string{"after 50 ms", "0.95-quantile"} {
		r, _ := run(slow, name)
		if r.Summary.Failed > plain.Summary.Failed || r.Summary.Suppressed == 0 {
			t.Errorf("%s: %v failed, %v suppressed; want no more than %v failed, and some suppressed", name, r.Summary.Failed, r.Summary.Suppressed, plain.Summary.Failed)
		}
		var calls, hedges float64
		for i, b := range r.Groups[0].Series[10:30] { // a window of the budget, and the slow time
			calls += float64(b.Calls)
			if i >= 10 {
				hedges += float64(b.Hedges)
			}
		}
		if most := 0.2*calls + 4*10*20; hedges > most {
			t.Errorf("%s: %v hedges while all is slow, want at most the budget's %v", name, hedges, most)
		}
	}
	without := averaged(t, slow, strategyOf(t, slow, "without hedging"), 2)
	small := averaged(t, slow, strategyOf(t, slow, "0.95-quantile, 10 % + 1/s"), 2)
	if small.Failed > without.Failed || small.P99 > without.P99*3/2 || small.P999 > without.P999*2/3 {
		t.Errorf("half the budget: %v failed, p99 %v, p99.9 %v; want no more than %v, half as much again as %v, two thirds of %v",
			small.Failed, small.P99, small.P999, without.Failed, without.P99, without.P999)
	}
}
