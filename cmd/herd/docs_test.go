package main

import (
	"bytes"
	"image/png"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/grpcretry/grpcretry/sim"
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
	"budget":    {"budget 4, default budget", "budget-queue 4, A6 throttle", "budget-queue no retries"},
	"defaults":  {"defaults-blip-300ms full jitter ×2", "defaults-blip-1s full jitter ×4", "defaults-queue-100 10 % + 0.1/s"},
	"thousands": {"thousands exponential", "thousands full jitter"},
	"layers":    {"layers 3 each, 10 % + 1/s", "layers-stop 3 each, no budget"},
	"classic":   {"classic exponential", "classic full jitter"},
	"pushback":  {"pushback-fixed obeys", "pushback-exact obeys", "pushback-spread obeys"},
	"mixed":     {"mixed exponential"},
	"tail":      {"tail after 50 ms", "tail-slow 0.95-quantile, 10 % + 1/s"},
	"limit":     {"limit default backoff", "limit equal 4s", "limit-pushback default backoff", "limit-network default backoff"},
}

// The figures of the tables are what a run gives now, as far as the sample goes.
func TestDocsFiguresAreOfToday(t *testing.T) {
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
			if study.Vary != "" {
				b.columns = []string{"10", "50"} // longer ones are tested in package sim
			}
			s, err := seenForDocs(t.Context(), study, func(scenario, strategy string) bool {
				if study.Vary != "" {
					return scenario == "aws-10" || scenario == "aws-50"
				}
				return slices.Contains(sampled[study.Name], scenario+" "+strategy)
			})
			if err != nil {
				t.Fatal(err)
			}
			for _, one := range s.scenarios {
				if study.Vary == "" && len(one.found) == 0 && b.study != "defaults" {
					t.Errorf("no row of %s is in the sample", one.Name)
				}
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
		if _, err := png.Decode(bytes.NewReader(b)); err != nil {
			t.Errorf("%s.png: %v", s.Name, err)
		}
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

// What the prose says and no table shows.
func TestDocsProse(t *testing.T) {
	page := strings.Join(strings.Fields(docPage(t)), " ")
	for _, claim := range []struct {
		text string
		true func() bool
	}{
		{"nearly half of its attempts come in the first second", func() bool {
			r := runDoc(t, "limit", 0, "default backoff")
			share := float64(r.Servers[0].Series[0].Offered) / r.Summary.Attempts
			return share > 0.4 && share < 0.5
		}},
		{"Multiplied by 4 instead of 2 the same p99 costs a fifth fewer attempts", func() bool {
			two, four := runDoc(t, "limit", 0, "default backoff").Summary, runDoc(t, "limit", 0, "default ×4").Summary
			return four.Attempts < 0.85*two.Attempts && four.P99 < two.P99*102/100
		}},
		{"`herd -search` tries 1,696", func() bool { return len(candidates()) == 1696 }},
		{"not one retry was refused, and the server never came back", func() bool {
			r := runDoc(t, "defaults", 4, "default budget")
			return r.Summary.Refused == 0 && r.Summary.Stable < 0
		}},
		{"does not get stuck at all, not even without a budget", func() bool {
			study, _ := sim.FindStudy("budget")
			s := study.Scenarios[1]
			s.Servers[0].IgnoresCancel = false
			study.Scenarios = []sim.Scenario{s}
			return runOf(t, s, "4, no budget").Summary.Stable > 0
		}},
		{"the servers need 80 % of what they can still do for the calls alone", func() bool {
			s := docScenario(t, "tail", 1)
			share := s.Groups[0].Rate / (s.Servers[0].Total() * s.Servers[0].Outages[0].Left)
			return share > 0.79 && share < 0.805
		}},
		{"more than the 26 % that the servers have to spare", func() bool {
			s := docScenario(t, "tail", 1)
			spare := s.Servers[0].Total()*s.Servers[0].Outages[0].Left/s.Groups[0].Rate - 1
			return s.Groups[0].Processes == 4 && spare > 0.255 && spare < 0.265
		}},
	} {
		if !contains(page, claim.text) {
			t.Errorf("the page does not say %q any more", claim.text)
		} else if !claim.true() {
			t.Errorf("the page says %q, which is not so", claim.text)
		}
	}
}

func runDoc(t *testing.T, study string, scenario int, strategy string) *sim.Result {
	t.Helper()
	return runOf(t, docScenario(t, study, scenario), strategy)
}

func docScenario(t *testing.T, study string, scenario int) sim.Scenario {
	t.Helper()
	s, ok := sim.FindStudy(study)
	if !ok {
		t.Fatalf("there is no study %q", study)
	}
	return s.Scenarios[scenario]
}

// The figures of the tail study that the page on hedging has are those of the table.
func TestHedgingPageHasTheFiguresOfTheTable(t *testing.T) {
	text, err := os.ReadFile(filepath.Join(docsFolder, "hedging.md"))
	if err != nil {
		t.Fatal(err)
	}
	hedging, page := strings.Join(strings.Fields(string(text)), " "), docPage(t)
	for claim, row := range map[string]string{
		"the p99 falls from 133 to 61 ms and the p99.9 from 542 to 93 ms, for 4.8 % more attempts": "| 0.95-quantile | 11 ms | 61 ms | 93 ms | 0 | 4.8 % |",
		"falls from 133": "| without hedging | 11 ms | 133 ms | 542 ms |",
		"after a fixed 50 ms to 64 and 93 ms, for 4.3 %": "| after 50 ms | 11 ms | 64 ms | 93 ms | 0 | 4.3 % |",
	} {
		if !contains(hedging, claim) || !contains(page, row) {
			t.Errorf("want %q in hedging.md as %q is in herd.md; in them: %v, %v", claim, row, contains(hedging, claim), contains(page, row))
		}
	}
}

func runOf(t *testing.T, s sim.Scenario, strategy string) *sim.Result {
	t.Helper()
	i := slices.IndexFunc(s.Strategies, func(one sim.Strategy) bool { return one.Name == strategy })
	if i < 0 {
		t.Fatalf("%s has no strategy %q", s.Name, strategy)
	}
	r, err := sim.Run(t.Context(), s, s.Strategies[i], nil)
	if err != nil {
		t.Fatal(err)
	}
	return r
}
