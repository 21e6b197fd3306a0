package main

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/grpcretry/grpcretry"
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

// sampled are the rows that are made again here, enough to notice that the page is old. The
// lessons of all studies are tested in package sim.
var sampled = map[string][]string{
	"budget":   {"default"},
	"defaults": {"no retries", "no budget", "default", "A6 throttle"},
	"layers":   {"default", "A6 throttle", "default, both"},
	"services": {"no retries", "no budget", "default, both"},
	"classic":  {"exponential", "full jitter"},
	"tail":     {"after 50 ms"},
}

// The figures of the tables are what a run gives now, as far as the sample goes.
func TestDocsFiguresAreOfToday(t *testing.T) {
	looksAtFigures(t)
	page := docPage(t)
	blocks := docBlocks(page)
	if len(blocks) != len(sim.Studies()) {
		t.Errorf("the page has %d blocks, want one for each of %d studies", len(blocks), len(sim.Studies()))
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
	if row := "| constant 1ms | 12,000,000 |"; !contains(page, row) {
		t.Errorf("the page has no row %s", row)
	}
}

func TestDocsHaveTheirPictures(t *testing.T) {
	for _, s := range sim.Studies() {
		b, err := os.ReadFile(filepath.Join(docsFolder, "herd", s.Name+".png"))
		if err != nil {
			t.Error(err)
			continue
		}
		wantReadable(t, s.Name+".png", b)
	}
}

// The example of a scenario file works, and so does every flag that the page names.
func TestDocsExamplesWork(t *testing.T) {
	page := docPage(t)
	_, rest, _ := strings.Cut(page, "```json\n")
	file, _, _ := strings.Cut(rest, "```")
	scenarios, err := sim.ReadScenarios(strings.NewReader(file))
	if err != nil || len(scenarios) != 1 {
		t.Fatalf("the example file: %v", err)
	}
	for line := range strings.Lines(page) {
		args, ok := strings.CutPrefix(strings.TrimSpace(line), "/tmp/herd ")
		if !ok || contains(args, "-policy") {
			continue
		}
		words := strings.Fields(strings.ReplaceAll(strings.ReplaceAll(args, `"full jitter"`, "full"), "-runs 20", "-dump"))
		if _, errs, status := herd(t, append(words, "-dump")...); status != 0 {
			t.Errorf("herd %s: status %d, %s", args, status, errs)
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
		{"nearly half of its attempts come in the first second", func() bool {
			r := runDoc(t, "limit", "limit", "default backoff")
			share := float64(r.Servers[0].Series[0].Offered) / r.Summary.Attempts
			return share > 0.4 && share < 0.5
		}},
		{"Multiplied by 4 instead of 2 the same p99 costs a fifth fewer attempts", func() bool {
			two, four := runDoc(t, "limit", "limit", "default backoff").Summary, runDoc(t, "limit", "limit", "default ×4").Summary
			return four.Attempts < 0.85*two.Attempts && four.P99 < two.P99*102/100
		}},
		{"`herd -search` tries 1,696", func() bool { return len(candidates()) == 1696 }},
		{"unlimited retries save one call in eight", func() bool {
			none, all := runDoc(t, "defaults", "defaults-blip-3s-100", "no retries").Summary, runDoc(t, "defaults", "defaults-blip-3s-100", "no budget").Summary
			share := (all.Succeeded - none.Succeeded) / none.Failed
			return share > 0.115 && share < 0.135
		}},
		{"Without a budget neither server ever recovers", func() bool {
			return runDoc(t, "budget", "budget-10", "no budget").Summary.Stable < 0 && runDoc(t, "budget", "budget-queue-10", "no budget").Summary.Stable < 0
		}},
		{"three from 20 ms on save only a third of the calls even of 100 ms", func() bool {
			s := docScenario(t, "services", "services-blip-100ms")
			none := runOf(t, s, "no retries").Summary.Failed
			three := strategyWith(t, s, "default, both", func(one *sim.Strategy) {
				one.Policy = grpcretry.Policy{MaxAttempts: 3, Backoff: grpcretry.Exponential{Base: 20 * time.Millisecond}}
			})
			r, err := sim.Run(t.Context(), s, three, nil)
			saved := 1 - r.Summary.Failed/none
			return err == nil && saved > 0.28 && saved < 0.4
		}},
		{"without a budget the attempts would more than double", func() bool {
			s := docScenario(t, "services", "services-blip-500ms")
			s.Groups[0].Rate = 60
			s.Servers[3].Outages = []sim.Outage{{From: 2 * time.Second, For: 20 * time.Second, Silent: true}}
			attempts := func(name string) float64 {
				hanging := strategyWith(t, s, name, func(one *sim.Strategy) {
					one.Policy = grpcretry.Policy{MaxAttempts: 3, AttemptTimeout: 500 * time.Millisecond}
					one.Budget.Kind = sim.UnlimitedBudget
				})
				r, err := sim.Run(t.Context(), s, hanging, nil)
				if err != nil {
					t.Fatal(err)
				}
				return r.Summary.AmplifiedDown
			}
			both, alone := attempts("default, both"), attempts("default, stop callers")
			return alone > 2*both && alone < 2.5*both
		}},
		{"the calls alone use 80% of the remaining capacity", func() bool {
			s := docScenario(t, "tail", "tail-slow")
			share := s.Groups[0].Rate / (s.Servers[0].Total() * s.Servers[0].Outages[0].Left)
			return share > 0.79 && share < 0.805
		}},
		{"Saved up for 10 s, the same 10% brought it to 450 ms and more", func() bool {
			s := docScenario(t, "tail", "tail-slow")
			one := s.Strategies[len(s.Strategies)-1]
			h := *one.Hedging
			h.Budget = sim.Budget{Kind: sim.RatioBudget, Ratio: 0.1}
			one.Hedging = &h
			r, err := sim.Run(t.Context(), s, one, nil)
			return err == nil && r.Summary.P99 > 450*time.Millisecond
		}},
		{"With a window of 15 s the default would save them all", func() bool {
			s := docScenario(t, "defaults", "defaults-blip-1s-10")
			all := runOf(t, s, "no budget").Summary.Succeeded
			longer := sim.Budget{Kind: sim.RatioBudget, Ratio: 0.2, Reserve: 3, Window: 15 * time.Second}
			r, err := sim.Run(t.Context(), s, sim.Strategy{Budget: longer}, nil)
			return err == nil && r.Summary.Succeeded == all
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

func docScenario(t *testing.T, study, scenario string) sim.Scenario {
	t.Helper()
	s, ok := sim.FindStudy(study)
	if !ok {
		t.Fatalf("there is no study %q", study)
	}
	i := slices.IndexFunc(s.Scenarios, func(one sim.Scenario) bool { return one.Name == scenario })
	if i < 0 {
		t.Fatalf("%s has no scenario %q", study, scenario)
	}
	return s.Scenarios[i]
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
		"from 133":                  "| `tail` | without hedging | 133 ms | 542 ms |",
		"to 64 and 93 ms, for 4.3%": "| `tail` | after 50 ms | 64 ms | 93 ms | 0 | 4.3% |",
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
