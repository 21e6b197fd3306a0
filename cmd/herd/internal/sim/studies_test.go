package sim

import (
	"slices"
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
		if n := len(study.Points()); (n > 0) != (study.Vary != "") || (n > 0) != (len(study.Measures) > 0) || n > 0 && len(study.Scenarios)%n != 0 {
			t.Errorf("study %q varies %q: %d values, %d measures, %d scenarios", study.Name, study.Vary, n, len(study.Measures), len(study.Scenarios))
		}
		drawn := func(s Scenario) bool { return s.Name == study.Draw }
		if (study.Vary != "" || study.Draw != "") && !slices.ContainsFunc(study.Scenarios, drawn) {
			t.Errorf("study %q has no scenario %q to draw", study.Name, study.Draw)
		}
		for _, s := range slices.Concat(study.Scenarios, study.Further) {
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

// scenarioOf finds a scenario of a study.
func scenarioOf(t testing.TB, study Study, name string) Scenario {
	t.Helper()
	i := slices.IndexFunc(study.Scenarios, func(s Scenario) bool { return s.Name == name })
	if i < 0 {
		t.Fatalf("study %s has no scenario %q", study.Name, name)
	}
	return study.Scenarios[i]
}

// goodput is calls that succeeded per second, between two times.
func goodput(r *Result, from, to int) float64 {
	n := 0
	for _, b := range r.Groups[0].Series[from:to] {
		n += b.Succeeded
	}
	return float64(n) / float64(to-from)
}

// The default lets the server recover within 10 s from every fleet. Each alternative that
// allows as much does not.
func TestBudgetLesson(t *testing.T) {
	looksAtFigures(t)
	t.Parallel()
	for _, tt := range []struct {
		scenario, strategy string
		recovers           bool
	}{
		{"budget-10", "default", true},
		{"budget-1000", "default", true},
		{"budget-10000", "default", true},
		{"budget-queue-10", "default", true},
		{"budget-queue-100", "default", true},
		{"budget-queue-1000", "default", true},
		{"budget-queue-10000", "default", true},
		{"budget-queue-1000", "no retries", true},
		{"budget-100", "no budget", false},
		{"budget-1000", "Finagle 20% + 10/s", false},
		{"budget-queue-1000", "Finagle 20% + 10/s", false},
		{"budget-queue-10000", "10% + 0.1/s", false},
		{"budget-queue-10000", "A6 throttle", false},
	} {
		t.Run(tt.scenario+" "+tt.strategy, func(t *testing.T) {
			t.Parallel()
			s := scenarioOf(t, budget(), tt.scenario)
			s.Duration = 35 * sec
			r := mustRun(t, s, strategyOf(t, s, tt.strategy))
			if before := goodput(r, 2, 10); !near(before, 1000, 0.05) {
				t.Fatalf("%.0f calls a second succeed before the dip, want 1000", before)
			}
			after, stable := goodput(r, 30, 35), r.Summary.Stable
			if recovered := stable >= 0 && stable <= 10*sec; recovered != tt.recovers || recovered && after < 970 {
				t.Errorf("stable after %v, then %.0f calls a second succeed; want recovered within 10 s: %v", stable, after, tt.recovers)
			}
		})
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
	looksAtFigures(t)
	t.Parallel()
	for _, tt := range []struct {
		scenario, strategy string
		least, most        float64
	}{
		{"layers-10", "no budget", 26, 27.5},
		{"layers-10", "default", 1.2, 2.2}, // what was saved up, and those who have waited
		{"layers-1000", "default", 2, 4},   // 400 calls a second for 10 s, and a reserve of 3,000 in each layer
		{"layers-10000", "default", 8, 27}, // more reserve than calls
		{"layers-10", "Finagle 20% + 10/s", 2, 4},
		{"layers-100", "Finagle 20% + 10/s", 5, 15},
		{"layers-10", "A6 throttle", 0.99, 1.1},
		{"layers-measures-10", "no budget, stop callers", 2.98, 3},
		{"layers-measures-10000", "no budget, stop callers", 2.98, 3},
		{"layers-measures-10", "no budget, one attempt for retries", 6.9, 7},
		{"layers-measures-10000", "no budget, one attempt for retries", 6.9, 7},
		{"layers-measures-10", "no budget, both", 2.98, 3},
		{"layers-measures-10", "default, both", 1, 1.5},
		{"layers-measures-10000", "default, both", 2, 3.1},
	} {
		t.Run(tt.scenario+" "+tt.strategy, func(t *testing.T) {
			s := scenarioOf(t, layersStudy(), tt.scenario)
			if got := mustRun(t, s, strategyOf(t, s, tt.strategy)).Summary.AmplifiedDown; got < tt.least || got > tt.most {
				t.Errorf("D is asked %.2f times for each call, want %v to %v", got, tt.least, tt.most)
			}
		})
	}
}

// A second attempt when the first is slow cuts the tail for little, as long as slowness is bad
// luck. When everything is slow it needs a budget that is smaller than the spare capacity.
func TestTailLesson(t *testing.T) {
	looksAtFigures(t)
	t.Parallel()
	luck, slow := tails().Scenarios[0], tails().Scenarios[1]
	if calls := luck.Groups[0].Rate * luck.Groups[0].Stop.Seconds(); calls < 100_000 {
		t.Errorf("%v calls, want enough for a p99.9", calls)
	}
	luck.Groups[0].Stop = 40 * sec // enough to see it
	slow.Duration = 36 * sec
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
	for seed := range uint64(3) {
		slow.Seed = seed
		plain, _ := run(slow, "without hedging")
		for name, most := range map[string]time.Duration{"after 50 ms": 300 * ms, "0.95-quantile": 200 * ms} {
			r, _ := run(slow, name)
			m := r.Summary
			if m.P99 > most || m.P999 > plain.Summary.P999*2/3 || m.Failed > plain.Summary.Failed || m.Suppressed == 0 {
				t.Errorf("%s, seed %d: p99 %v, p99.9 %v, %v failed, %v suppressed; want at most %v, two thirds of %v, no more than %v, some",
					name, seed, m.P99, m.P999, m.Failed, m.Suppressed, most, plain.Summary.P999, plain.Summary.Failed)
			}
			var calls, hedges float64
			for _, b := range r.Groups[0].Series[20:30] { // while all is slow
				calls += float64(b.Calls)
				hedges += float64(b.Hedges)
			}
			if allowed := 0.1*(calls+1000) + 4; hedges > allowed { // and what the second before has earned
				t.Errorf("%s, seed %d: %v hedges while all is slow, want at most the budget's %v", name, seed, hedges, allowed)
			}
		}
	}
}

// What the measures between services cost: nothing that retries save, except while D is down for longer than
// the waits of C.
func TestServicesLesson(t *testing.T) {
	looksAtFigures(t)
	t.Parallel()
	for _, tt := range []struct {
		scenario, strategy string
		least, most        float64 // share of the calls that unlimited retries save
	}{
		{"services-blip-100ms", "default, both", 1, 1},
		{"services-replica", "default, both", 1, 1},
		{"services-replicas", "default, both", 1, 1},
		{"services-zone", "default, both", 1, 1},
		{"services-zone", "default, one attempt for retries", 0.7, 0.8}, // no service says that it has given up
	} {
		s := scenarioOf(t, services(), tt.scenario)
		sum := func(name string) Summary { return mustRun(t, s, strategyOf(t, s, name)).Summary }
		got, ok := Rescued(sum(tt.strategy), sum("no retries"), sum("no budget"))
		if !ok || got < tt.least || got > tt.most {
			t.Errorf("%s, %s: %.3f of the calls are saved, want %v to %v", tt.scenario, tt.strategy, got, tt.least, tt.most)
		}
	}
	s := scenarioOf(t, services(), "services-down-10s")
	for _, name := range []string{"default", "default, both"} {
		if got := mustRun(t, s, strategyOf(t, s, name)).Groups[0].FailedAfter.P99; got > s.Groups[0].Deadline {
			t.Errorf("%s: calls fail after %v, want at most their deadline", name, got)
		}
	}
}
