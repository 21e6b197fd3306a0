package main

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/grpcretry/grpcretry/cmd/herd/internal/sim"
)

const docsFolder = "../../docs"

func docPage(t *testing.T) string {
	t.Helper()
	page, err := os.ReadFile(filepath.Join(docsFolder, "herd.md"))
	if err != nil {
		t.Fatal(err)
	}
	return string(page)
}

// sampled are the rows that are made again here, enough to notice that the page is old.
var sampled = map[string][]string{
	"brownouts": {"no retries", "default"},
	"drain":     {"default"},
	"budget":    {"no retries", "default"},
	"layers":    {"default", "no budget, stop callers", "no budget, one attempt for retries", "default, both"},
	"services":  {"no retries", "no budget", "default, both"},
	"tail":      {"after 50 ms", "0.95-quantile"},
}

// The figures of the tables are what a run gives now, as far as the sample goes.
func TestDocsFiguresAreOfToday(t *testing.T) {
	looksAtFigures(t)
	page := docPage(t)
	blocks := docBlocks(page)
	if len(blocks) < 6 {
		t.Errorf("the page has %d blocks, want at least 6", len(blocks))
	}
	for _, b := range blocks {
		t.Run(b.study, func(t *testing.T) {
			t.Parallel()
			study, ok := sim.FindStudy(b.study)
			if !ok {
				t.Fatalf("there is no study %q", b.study)
			}
			s, err := seenForDocs(t.Context(), study, func(_, strategy string) bool {
				return len(b.columns) > 0 && slices.Contains(sampled[study.Name], strategy)
			})
			if err != nil {
				t.Fatal(err)
			}
			if len(b.columns) > 0 && len(s.scenarios[0].found) == 0 {
				t.Errorf("no row of %s is in the sample", study.Name)
			}
			lines, err := b.lines(s)
			if err != nil {
				t.Fatal(err)
			}
			for _, line := range lines {
				if !contains(b.text, line+"\n") {
					t.Errorf("the page does not have this line of the study %s; run make herd-docs:\n%s", b.study, line)
				}
			}
		})
	}
}

func TestDocsHaveTheirPictures(t *testing.T) {
	for _, block := range docBlocks(docPage(t)) {
		b, err := os.ReadFile(filepath.Join(docsFolder, "herd", block.study+".png"))
		if err != nil {
			t.Error(err)
			continue
		}
		wantReadable(t, block.study+".png", b)
	}
}

// The commands of the page are accepted.
func TestDocsExamplesWork(t *testing.T) {
	for line := range strings.Lines(docPage(t)) {
		if args, ok := strings.CutPrefix(strings.TrimSpace(line), "/tmp/herd "); ok && !contains(args, "-policy") {
			studyWith(t, args)
		}
	}
}

// The claims of the prose that no table shows are true.
func TestDocsProse(t *testing.T) {
	looksAtFigures(t)
	page := strings.Join(strings.Fields(docPage(t)), " ")
	for _, claim := range []struct {
		text string
		true func() bool
	}{
		{"Without a budget neither server ever recovers", func() bool {
			return runDoc(t, "budget", "budget-10", "no budget").Summary.Stable < 0 && runDoc(t, "budget", "budget-queue-10",
				"no budget").Summary.Stable < 0
		}},
		{"with `RatioBudget{Ratio: 0.1, Reserve: Nothing}` the server recovers after about 10 s if it has 10% to spare, but with 5% it " +
			"may stay down", func() bool {
			stable := drained(t, "drain-10%-10", "ratio 0.1", nil)
			return stable > 6*time.Second && stable < 14*time.Second && drained(t, "drain-5%-10", "ratio 0.1", nil) < 0
		}},
		{"If a rejection costs 10% of a call, it always recovers", func() bool {
			for _, fleet := range []string{"10", "100", "1000"} {
				if drained(t, "drain-5%-"+fleet, "default", func(s *sim.Scenario) { s.Servers[0].RejectCost = 0.1 }) < 0 {
					return false
				}
			}
			return true
		}},
		{"there is hardly any overload: the server has recovered after 0 and 1 s", func() bool {
			ten, five := drained(t, "drain-10%-turns", "default", nil), drained(t, "drain-5%-turns", "default", nil)
			return ten == 0 && five > 500*time.Millisecond && five < 1500*time.Millisecond
		}},
		{"Turns for its whole capacity take 27 s with 10% to spare, and with 5% they do not help", func() bool {
			whole := func(s *sim.Scenario) { s.Servers[0].Pushback.Rate = 0 }
			ten := drained(t, "drain-10%-turns", "default", whole)
			return ten > 26*time.Second && ten < 28*time.Second && drained(t, "drain-5%-turns", "default", whole) < 0
		}},
	} {
		if !contains(page, claim.text) {
			t.Errorf("the page does not say %q any longer", claim.text)
		} else if !claim.true() {
			t.Errorf("the page says %q, which is not true", claim.text)
		}
	}
}

func runDoc(t *testing.T, study, scenario, strategy string) *sim.Result {
	t.Helper()
	return runOf(t, docScenario(t, study, scenario), strategy)
}

// drained is how long a server of the study drain takes to recover, on average over five seeds; it is
// negative if it does not with one of them.
func drained(t *testing.T, scenario, strategy string, change func(*sim.Scenario)) time.Duration {
	t.Helper()
	s := docScenario(t, "drain", scenario)
	if change != nil {
		change(&s)
	}
	s.Strategies = []sim.Strategy{strategyWith(t, s, strategy, func(*sim.Strategy) {})}
	found, err := sim.Compare(t.Context(), s, 5, nil)
	if err != nil {
		t.Fatal(err)
	}
	return found[0].Mean.Stable
}

func docScenario(t *testing.T, study, scenario string) sim.Scenario {
	t.Helper()
	s, ok := sim.FindStudy(study)
	if !ok {
		t.Fatalf("there is no study %q", study)
	}
	all := slices.Concat(s.Scenarios, s.Further)
	i := slices.IndexFunc(all, func(one sim.Scenario) bool { return one.Name == scenario })
	if i < 0 {
		t.Fatalf("%s has no scenario %q", study, scenario)
	}
	return all[i]
}

// The figures of the tail study that the page on hedging has are those of the table.
func TestHedgingPageHasTheFiguresOfTheTable(t *testing.T) {
	text, err := os.ReadFile(filepath.Join(docsFolder, "hedging.md"))
	if err != nil {
		t.Fatal(err)
	}
	hedging, page := strings.ReplaceAll(strings.Join(strings.Fields(string(text)), " "), " %", "%"), docPage(t)
	for claim, row := range map[string]string{
		"from 133 to 61 ms and the p99.9 from 542 to 93 ms, for 4.8% more attempts": "| `tail` | 0.95-quantile | 61 ms | 93 ms | 0 | 4.8% |",
		"from 133": "| `tail` | without hedging | 133 ms | 542 ms |",
	} {
		if !contains(hedging, claim) || !contains(page, row) {
			t.Errorf("want %q in hedging.md as %q is in herd.md; in them: %v, %v", claim, row, contains(hedging, claim), contains(page, row))
		}
	}
}

// strategyWith is a strategy of a scenario with a change.
func strategyWith(t *testing.T, s sim.Scenario, name string, change func(*sim.Strategy)) sim.Strategy {
	t.Helper()
	i := slices.IndexFunc(s.Strategies, func(one sim.Strategy) bool { return one.Name == name })
	if i < 0 {
		t.Fatalf("%s has no strategy %q", s.Name, name)
	}
	one := s.Strategies[i]
	change(&one)
	return one
}

func runOf(t *testing.T, s sim.Scenario, strategy string) *sim.Result {
	t.Helper()
	r, err := sim.Run(t.Context(), s, strategyWith(t, s, strategy, func(*sim.Strategy) {}), nil)
	if err != nil {
		t.Fatal(err)
	}
	return r
}
