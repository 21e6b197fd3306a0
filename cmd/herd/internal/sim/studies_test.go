package sim

import (
	"slices"
	"testing"
)

// What each study is there to show.

func TestStudiesCanBeRead(t *testing.T) {
	seen := map[string]bool{}
	for _, study := range Studies() {
		if study.Name == "" || study.Title == "" || len(study.See) < 100 || len(study.Scenarios) == 0 {
			t.Errorf("study %q: title %q, see %q, %d scenarios", study.Name, study.Title, study.See, len(study.Scenarios))
		}
		if n := len(
			study.Points(),
		); (n > 0) != (study.Vary != "") || (n > 0) != (len(study.Measures) > 0) ||
			n > 0 && len(study.Scenarios)%n != 0 {
			t.Errorf(
				"study %q varies %q: %d values, %d measures, %d scenarios",
				study.Name,
				study.Vary,
				n,
				len(study.Measures),
				len(study.Scenarios),
			)
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
		t.Errorf(
			"full jitter: p99 %v, %v over capacity, stable after %v, %v wasted; want it to beat no jitter",
			full.P99,
			full.Over,
			full.Stable,
			full.Wasted,
		)
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
