package main

import (
	"fmt"
	"slices"
	"strings"

	"github.com/grpcretry/grpcretry/cmd/herd/internal/sim"
)

// This file makes the tables of studies that vary something.

// fewValues is the largest number of values that are columns of a table, with a line for each
// strategy. More values are lines, with a column for each strategy.
const fewValues = 6

// A sweep is a row of scenarios, one for each value, that differ in nothing else.
type sweep struct {
	study     *seen
	name      string
	scenarios []seenScenario
}

// sweeps returns the sweeps of a study that have been simulated completely.
func sweeps(s *seen) (all []sweep) {
	points := s.Points()
	n := len(points)
	for row := range slices.Chunk(s.scenarios, n) {
		if len(row) < n {
			break
		}
		name := strings.TrimSuffix(row[0].Name, "-"+points[0])
		all = append(all, sweep{s, name, row})
	}
	return all
}

// A titledTable is a table with its title.
type titledTable struct {
	title string
	cells [][]string
}

// tables returns the tables of all measures; keep selects values by their text.
func (w sweep) tables(keep func(value string) bool) (all []titledTable) {
	measures := w.study.Measures
	if len(w.study.Points()) > fewValues {
		of := ""
		if len(w.scenarios) < len(w.study.scenarios) {
			of = w.name + ": " + w.scenarios[0].Title + ". "
		}
		for _, m := range measures {
			all = append(all, titledTable{of + capital(w.titleOf(m)) + ":", w.byValue(m, keep)})
		}
		return all
	}
	title := fmt.Sprintf("%s: %s. %s, by the number of %s:", w.name, w.scenarios[0].Title, capital(w.titles()), w.study.Vary)
	return append(all, titledTable{title, w.byStrategy(keep)})
}

// inACell returns the measures that share a cell.
func (w sweep) inACell() []sim.Measure {
	if w.study.Measures[0] == sim.MeasureSaved { // which is two figures
		return w.study.Measures[:1]
	}
	return w.study.Measures
}

// titles returns the titles of all measures, in the form of a cell.
func (w sweep) titles() string {
	var titles []string
	for _, m := range w.inACell() {
		titles = append(titles, w.titleOf(m))
	}
	if len(titles) > 1 {
		return titles[0] + " (" + strings.Join(titles[1:], ", ") + ")"
	}
	return titles[0]
}

func (w sweep) titleOf(m sim.Measure) string {
	switch m {
	case sim.MeasureFailed:
		return "calls that fail"
	case sim.MeasureStable:
		return "time until the server has recovered"
	case sim.MeasureDown:
		servers := w.scenarios[0].Servers
		return fmt.Sprintf("attempts at %s per call during the outage", servers[len(servers)-1].Name)
	case sim.MeasureLoad:
		return "highest load after the outage, as a share of the capacity"
	case sim.MeasureSaved:
		return "share of the calls lost without retries that is saved (attempts during the outage per such call)"
	default:
		return "median of what the saved calls take (p99)"
	}
}

// point returns the text of a value.
func (w sweep) point(i int) string {
	if len(w.study.Labels) > 0 {
		return w.study.Labels[i]
	}
	return grouped(w.study.Values[i])
}

// shown reports whether a strategy has a place in a table: not if the others are measured against it.
func (w sweep) shown(c sim.Comparison) bool {
	return w.study.Measures[0] != sim.MeasureSaved || c.Strategy != "no retries"
}

// byValue has a line for each value.
func (w sweep) byValue(m sim.Measure, keep func(string) bool) [][]string {
	table := [][]string{{w.study.Vary}}
	for _, one := range w.scenarios[0].found {
		if w.shown(one) {
			table[0] = append(table[0], one.Strategy)
		}
	}
	for i, one := range w.scenarios {
		line := []string{w.point(i)}
		if !keep(line[0]) {
			continue
		}
		for _, c := range one.found {
			if w.shown(c) {
				line = append(line, measured(m, one, c))
			}
		}
		table = append(table, line)
	}
	return table
}

// byStrategy has a line for each strategy, with all measures in a cell.
func (w sweep) byStrategy(keep func(string) bool) [][]string {
	table := [][]string{{"strategy"}}
	shown := w.shown
	for _, c := range w.scenarios[0].found {
		if shown(c) {
			table = append(table, []string{c.Strategy})
		}
	}
	for i, one := range w.scenarios {
		head := w.point(i)
		if !keep(head) {
			continue
		}
		table[0] = append(table[0], head)
		row := 0
		for _, c := range one.found {
			if !shown(c) {
				continue
			}
			row++
			var cells []string
			for _, m := range w.inACell() {
				cells = append(cells, measured(m, one, c))
			}
			cell := cells[0]
			if len(cells) > 1 {
				cell += " (" + strings.Join(cells[1:], ", ") + ")"
			}
			table[row] = append(table[row], cell)
		}
	}
	return table
}

func all(string) bool { return true }

// measured formats a measure of one strategy.
func measured(m sim.Measure, s seenScenario, c sim.Comparison) string {
	switch m {
	case sim.MeasureFailed:
		return grouped(c.Mean.Failed + c.Mean.Open)
	case sim.MeasureStable:
		return settled(c.Mean)
	case sim.MeasureDown:
		return fmt.Sprintf("%.1f", c.Mean.AmplifiedDown)
	case sim.MeasureLoad:
		return fmt.Sprintf("%.0f%%", 100*c.Mean.PeakAfter/s.Servers[len(s.Servers)-1].Total())
	case sim.MeasureSaved:
		none, _ := foundWith(s, neverRetries)
		return fmt.Sprintf("%s (%.2f)", saved(s, c), c.Mean.Down/max(1, none.Failed))
	default:
		took := c.Result.Groups[0].Rescued
		if took.N == 0 {
			return "–"
		}
		return fmt.Sprintf("%.1f s (%.1f s)", took.P50.Seconds(), took.P99.Seconds())
	}
}

// saved formats [sim.Saved]; a dash if it is unknown.
func saved(s seenScenario, c sim.Comparison) string {
	none, ok := foundWith(s, neverRetries)
	share, some := sim.Saved(c.Mean, none)
	if !ok || !some {
		return "–"
	}
	return fmt.Sprintf("%.0f%%", 100*share)
}

func settled(m sim.Summary) string {
	if m.Stable < 0 {
		return "never"
	}
	return shortTime(m.Stable)
}

// rescued formats [sim.Rescued]; a dash if it is unknown.
func rescued(s seenScenario, c sim.Comparison) string {
	none, ok := foundWith(s, neverRetries)
	most, also := foundWith(s, unlimited)
	if !ok || !also {
		return "–"
	}
	share, ok := sim.Rescued(c.Mean, none, most)
	if !ok {
		return "–"
	}
	return fmt.Sprintf("%.0f%%", 100*share)
}

func neverRetries(s sim.Strategy) bool { return s.Policy.MaxAttempts == 1 }
func unlimited(s sim.Strategy) bool    { return s.Budget.Kind == sim.UnlimitedBudget }

// foundWith returns the result of the first strategy of a kind.
func foundWith(s seenScenario, is func(sim.Strategy) bool) (sim.Summary, bool) {
	i := slices.IndexFunc(s.Strategies, is)
	if i < 0 {
		return sim.Summary{}, false
	}
	k := slices.IndexFunc(s.found, func(c sim.Comparison) bool { return c.Strategy == s.Strategies[i].Name })
	if k < 0 {
		return sim.Summary{}, false
	}
	return s.found[k].Mean, true
}
