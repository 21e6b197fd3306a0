package main

import (
	"context"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"github.com/grpcretry/grpcretry/cmd/herd/internal/sim"
)

// This file writes the pictures and the figures of docs/herd.md. A block of that page names its
// contents:
//
//	<!-- herd STUDY: COLUMN COLUMN … -->   the picture of the study, and a table of its scenarios
//	<!-- /herd -->
//
// Everything between the two is replaced. The columns are names from docColumns; for a study that
// varies something, they are the values that get a line or a column. A block without columns has
// only the picture. A column not=NAME leaves out the rows of a scenario or a strategy, with _ for
// each space in its name.

// writeDocs replaces the blocks of herd.md in a folder, and the pictures in herd/ below it.
func writeDocs(ctx context.Context, folder string, stdout io.Writer) error {
	path := filepath.Join(folder, "herd.md")
	page, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	text := string(page)
	for _, b := range docBlocks(text) {
		study, ok := sim.FindStudy(b.study)
		if !ok {
			return fmt.Errorf("%s: there is no study %q", path, b.study)
		}
		s, err := seenForDocs(ctx, study, nil)
		if err != nil {
			return err
		}
		picture := filepath.Join(folder, "herd", b.study+".png")
		if err := writeFile("-docs", picture, func(w io.Writer) error { return writePNG(w, s) }); err != nil {
			return err
		}
		lines, err := b.lines(s)
		if err != nil {
			return fmt.Errorf("%s: %w", path, err)
		}
		text = strings.Replace(text, b.text, b.head+"\n"+strings.Join(lines, "\n")+"\n"+docEnd, 1)
		fmt.Fprintf(stdout, "%s and %s\n", b.study, picture)
	}
	return os.WriteFile(path, []byte(text), 0o644)
}

// A docBlock is the part of a page between two marks.
type docBlock struct {
	text, head string // all of it, and its first mark
	study      string
	columns    []string
	without    []string // scenarios and strategies
}

const docEnd = "<!-- /herd -->"

var docBlockForm = regexp.MustCompile(`(?s)(<!-- herd ([a-z]+):([^>]*?)-->)\n.*?` + docEnd)

func docBlocks(page string) (blocks []docBlock) {
	for _, m := range docBlockForm.FindAllStringSubmatch(page, -1) {
		b := docBlock{text: m[0], head: m[1], study: m[2]}
		for _, word := range strings.Fields(m[3]) {
			if name, not := strings.CutPrefix(word, "not="); not {
				b.without = append(b.without, strings.ReplaceAll(name, "_", " "))
			} else {
				b.columns = append(b.columns, word)
			}
		}
		blocks = append(blocks, b)
	}
	return blocks
}

// seenForDocs runs a study, with many seeds for strategies whose runs are short. want, unless nil,
// selects scenarios and strategies.
func seenForDocs(ctx context.Context, study sim.Study, want func(scenario, strategy string) bool) (seen, error) {
	out := seen{Study: study, runs: 1}
	for _, s := range study.Scenarios {
		one := seenScenario{Scenario: s, tail: study.Tail, costs: study.Costs}
		for _, strategy := range s.Strategies {
			if want != nil && !want(s.Name, strategy.Name) {
				continue
			}
			s := s
			s.Strategies = []sim.Strategy{strategy}
			found, err := sim.Compare(ctx, s, 1, nil)
			if err != nil {
				return out, err
			}
			runs := docRuns(found[0].Result.Events)
			if study.Tail {
				runs = 3 // one call in a thousand is few calls
			}
			if runs > 1 {
				if found, err = sim.Compare(ctx, s, runs, nil); err != nil {
					return out, err
				}
			}
			one.found = append(one.found, found[0])
		}
		out.scenarios = append(out.scenarios, one)
	}
	return out, nil
}

func docRuns(events int64) int {
	switch {
	case events <= 20_000:
		return 20
	case events <= 60_000:
		return 5
	default:
		return 1
	}
}

// docColumns are the columns that a table of the page can have, by their names in a block.
var docColumns = map[string]struct {
	title string
	cell  func(s seenScenario, c sim.Comparison) string
}{
	"failed": {"calls that fail", func(_ seenScenario, c sim.Comparison) string { return grouped(c.Mean.Failed) }},
	"saved":  {"saved", rescued},
	"down": {"attempts per call of the outage", func(_ seenScenario, c sim.Comparison) string {
		return fmt.Sprintf("%.1f", c.Mean.AmplifiedDown)
	}},
	"p99":  {"p99", func(_ seenScenario, c sim.Comparison) string { return latency(c.Mean, c.Mean.P99) }},
	"p999": {"p99.9", func(_ seenScenario, c sim.Comparison) string { return latency(c.Mean, c.Mean.P999) }},
	"more": {"more attempts", func(_ seenScenario, c sim.Comparison) string { return more(c.Mean) }},
}

// lines returns the text between the marks of a block.
func (b docBlock) lines(s seen) ([]string, error) {
	lines := []string{fmt.Sprintf("![%s](herd/%s.png)", s.Title, b.study)}
	if len(b.columns) == 0 {
		return lines, nil
	}
	if s.Vary != "" {
		return append(lines, b.sweepLines(s)...), nil
	}
	var tables []namedTable
	for _, one := range s.scenarios {
		if len(one.found) == 0 {
			continue
		}
		table := [][]string{{"strategy"}}
		for _, name := range b.columns {
			column, ok := docColumns[name]
			if !ok {
				return nil, fmt.Errorf("study %s: there is no column %q", b.study, name)
			}
			table[0] = append(table[0], column.title)
		}
		for _, c := range one.found {
			line := []string{c.Strategy}
			for _, name := range b.columns {
				line = append(line, docColumns[name].cell(one, c))
			}
			table = append(table, line)
		}
		tables = append(tables, namedTable{one.Name, table})
	}
	return append(lines, b.together(tables, len(s.Scenarios) > 1)...), nil
}

// sweepLines returns the tables of a study that varies something, with the block's values.
func (b docBlock) sweepLines(s seen) (lines []string) {
	keep := func(value string) bool { return slices.Contains(b.columns, strings.ReplaceAll(value, ",", "")) }
	all := sweeps(&s)
	if len(s.Values) > fewValues {
		for _, t := range all[0].tables(keep) {
			lines = append(lines, "", t.title)
			lines = append(lines, b.together([]namedTable{{"", t.cells}}, false)...)
		}
		return lines
	}
	var tables []namedTable
	for _, w := range all {
		tables = append(tables, namedTable{w.name, w.byStrategy(keep)})
	}
	lines = append(lines, "", capital(all[0].titles())+", by the number of "+s.Vary+":")
	return append(lines, b.together(tables, true)...)
}

// A namedTable is a table of a scenario, or of a sweep.
type namedTable struct {
	name  string
	cells [][]string
}

// together joins tables with the same head, with a column for their names.
func (b docBlock) together(tables []namedTable, named bool) []string {
	if len(tables) == 0 {
		return nil
	}
	head, columns := tables[0].cells[0], "|---|"
	if named {
		head, columns = append([]string{"scenario"}, head...), "|---|---|"
	}
	columns += strings.Repeat("---:|", len(tables[0].cells[0])-1)
	lines := []string{"", markdownLine(head), columns}
	for _, t := range tables {
		for _, line := range t.cells[1:] {
			if slices.Contains(b.without, t.name) || slices.Contains(b.without, line[0]) {
				continue
			}
			if named {
				line = append([]string{"`" + t.name + "`"}, line...)
			}
			lines = append(lines, markdownLine(line))
		}
	}
	return lines
}

func markdownLine(cells []string) string { return "| " + strings.Join(cells, " | ") + " |" }
