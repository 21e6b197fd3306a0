package main

import (
	"fmt"
	"io"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/grpcretry/grpcretry/cmd/herd/internal/sim"
)

// A report prints results as text.
type report struct {
	w       io.Writer
	verbose bool
	err     error
}

func (r *report) printf(format string, args ...any) {
	if r.err == nil {
		_, r.err = fmt.Fprintf(r.w, format, args...)
	}
}

func (r *report) study(s seen) {
	r.printf("%s\n\n", fill(s.Name+": "+s.Title+".", lineWidth))
	if r.verbose || s.Vary != "" {
		r.printf("%s\n\n", fill(s.See, lineWidth))
	}
	if s.Vary != "" {
		r.sweep(s)
		return
	}
	for _, one := range s.scenarios {
		r.scenario(one, s.runs)
	}
	if !r.verbose {
		r.printf("%s\n", fill("With -v herd prints all figures, and with -png it draws what the server sees in each second.", lineWidth))
	}
}

func (r *report) scenario(s seenScenario, runs int) {
	r.printf("%s\n", fill(s.Name+": "+s.Title, lineWidth))
	if runs > 1 {
		r.printf("Averages over %d seeds.\n", runs)
	}
	if r.verbose {
		r.table(comparison(s))
		r.groups(s)
	} else {
		r.table(summaryTable(s))
	}
	r.printf("\n%s\n\n", fillUnits(meaning(s), lineWidth))
}

const lineWidth = 100 // characters

// summaryTable has the figures that matter most. Attempts are those at the last server.
func summaryTable(s seenScenario) [][]string {
	table := [][]string{{"strategy", "calls that succeed", "attempts per call", "in outages", "p50", "p99", "recovered after"}}
	for _, c := range s.found {
		m, down := c.Mean, "–"
		if m.AmplifiedDown > 0 {
			down = perCall(m.AmplifiedDown)
		}
		table = append(
			table,
			[]string{nameOfStrategy(c), fmt.Sprintf("%s of %s", grouped(m.Succeeded), grouped(m.Calls)), perCall(m.Amplification), down,
				latency(m, m.P50), latency(m, m.P99), settled(m)},
		)
	}
	return table
}

// meaning says which strategy serves the callers best, which one serves as many with the fewest attempts, and
// which ones keep the server down.
func meaning(s seenScenario) string {
	best := s.found[0]
	for _, c := range s.found[1:] {
		a, b := c.Mean, best.Mean
		if a.Succeeded > 1.01*b.Succeeded || a.Succeeded > 0.99*b.Succeeded && a.P99 < b.P99 {
			best = c
		}
	}
	m := best.Mean
	if m.Succeeded == 0 {
		return "It means: no call succeeds, however clients retry."
	}
	text := fmt.Sprintf("It means: %q serves callers best. %s of %s calls succeed, 99%% of these within %s, for %s attempts per call.",
		best.Strategy, grouped(m.Succeeded), grouped(m.Calls), shortTime(m.P99), perCall(m.Amplification))
	gentle := best
	var down []string
	for _, c := range s.found {
		if c.Mean.Succeeded > 0.99*m.Succeeded && c.Mean.Amplification < gentle.Mean.Amplification {
			gentle = c
		}
		if c.Mean.Stable < 0 && c.Mean.Amplification > 1.01 { // otherwise it is not the retries' fault
			down = append(down, strconv.Quote(c.Strategy))
		}
	}
	if gentle.Strategy != best.Strategy {
		text += fmt.Sprintf(" %q serves as many with the fewest: %s attempts per call, and 99%% within %s.",
			gentle.Strategy, perCall(gentle.Mean.Amplification), shortTime(gentle.Mean.P99))
	}
	switch {
	case len(down) == len(s.found):
		text += " The server recovers with none of these strategies before the end."
	case len(down) > 0:
		text += fmt.Sprintf(" The server does not recover with %s.", listed(down))
	}
	return text
}

func nameOfStrategy(c sim.Comparison) string {
	if c.Runs == 0 {
		return c.Strategy + " (stopped)"
	}
	return c.Strategy
}

// comparison returns the table of a scenario's strategies.
func comparison(s seenScenario) [][]string {
	if s.tail {
		return tailTable(s)
	}
	if s.costs {
		return costTable(s)
	}
	table := [][]string{
		{"strategy", "succeeded", "wasted", "attempts/call", "in outages", "p50", "p99", "done", "stable after", "peak after", "over capacity"},
	}
	for _, c := range s.found {
		m := c.Mean
		table = append(
			table,
			[]string{
				nameOfStrategy(c),
				grouped(m.Succeeded),
				grouped(m.Wasted),
				fmt.Sprintf("%.2f", m.Amplification),
				fmt.Sprintf("%.2f", m.AmplifiedDown),
				latency(m, m.P50),
				latency(m, m.P99),
				shortTime(m.Done),
				settled(m),
				grouped(m.PeakAfter) + "/s",
				grouped(m.Over) + "/s",
			},
		)
	}
	return table
}

// tailTable returns the table of how long calls take, and at what cost.
func tailTable(s seenScenario) [][]string {
	table := [][]string{
		{
			"strategy",
			"succeeded",
			"failed",
			"p50",
			"p90",
			"p99",
			"p99.9",
			"longest",
			"more attempts",
			"hedges",
			"won",
			"suppressed",
			"workers busy",
		},
	}
	for _, c := range s.found {
		m := c.Mean
		table = append(
			table,
			[]string{
				nameOfStrategy(c),
				grouped(m.Succeeded),
				grouped(m.Failed),
				latency(m, m.P50),
				latency(m, m.P90),
				latency(m, m.P99),
				latency(m, m.P999),
				latency(m, m.Longest),
				more(m),
				grouped(m.Hedges),
				won(c),
				grouped(m.Suppressed),
				busy(c),
			},
		)
	}
	return table
}

// costTable returns the table of what a failure costs callers and servers.
func costTable(s seenScenario) [][]string {
	table := [][]string{{"strategy", "failed", "to none", "in outages", "open at most", "failed p50", "failed p99", "p99", "stable after"}}
	none, _ := foundWith(s, neverRetries)
	for _, c := range s.found {
		g := c.Result.Groups[0]
		failed := c.Mean.Failed + c.Mean.Open
		table = append(table, []string{c.Strategy, grouped(failed), fmt.Sprintf("%+.0f%%", 100*(failed/max(1, none.Failed+none.Open)-1)),
			fmt.Sprintf("%.2f", c.Mean.AmplifiedDown), grouped(float64(mostOpen(c))), shortTime(g.FailedAfter.P50), shortTime(g.FailedAfter.P99),
			latency(c.Mean, c.Mean.P99), settled(c.Mean)})
	}
	return table
}

// mostOpen returns the largest number of calls of the first group that were in flight at the end of a bucket.
func mostOpen(c sim.Comparison) (open int) {
	for _, b := range c.Result.Groups[0].Series {
		open = max(open, b.Open)
	}
	return open
}

// more returns the number of additional attempts, as a share of the calls.
func more(m sim.Summary) string {
	return fmt.Sprintf("%.1f%%", 100*(m.Attempts/max(1, m.Calls)-1))
}

// won returns the share of the hedges that won their calls, with the first seed.
func won(c sim.Comparison) string {
	hedges, won := 0, 0
	for _, g := range c.Result.Groups {
		hedges += g.Hedges
		won += g.Outcomes["hedge_won"]
	}
	if hedges == 0 {
		return "–"
	}
	return fmt.Sprintf("%.0f%%", 100*float64(won)/float64(hedges))
}

// busy returns the share of the time that the last server's workers were busy, with the first seed.
func busy(c sim.Comparison) string {
	last := c.Result.Servers[len(c.Result.Servers)-1]
	if last.Workers == 0 {
		return "–"
	}
	return fmt.Sprintf("%.1f%%", 100*last.Utilisation)
}

// latency returns a dash if no call succeeded.
func latency(m sim.Summary, d time.Duration) string {
	if m.Succeeded == 0 {
		return "–"
	}
	return shortTime(d)
}

// table prints cells in columns, the first and some others aligned left, and the rest right.
func (r *report) table(cells [][]string, left ...int) {
	var widths []int
	for _, line := range cells {
		for i, cell := range line {
			if i == len(widths) {
				widths = append(widths, 0)
			}
			widths[i] = max(widths[i], len([]rune(cell)))
		}
	}
	for _, line := range cells {
		var b strings.Builder
		for i, cell := range line {
			gap := strings.Repeat(" ", widths[i]-len([]rune(cell)))
			if i == 0 || slices.Contains(left, i) {
				b.WriteString("  " + cell + gap)
			} else {
				b.WriteString("  " + gap + cell)
			}
		}
		r.printf("%s\n", strings.TrimRight(b.String(), " "))
	}
}

// groups prints the results of each group if there are several, and of downstream calls.
func (r *report) groups(s seenScenario) {
	table := groupTable(s)
	if len(table) == 0 {
		return
	}
	r.printf("\n")
	r.table(table)
}

func groupTable(s seenScenario) [][]string {
	if len(s.Groups) < 2 && len(s.found[0].Result.Downstream) == 0 {
		return nil
	}
	table := [][]string{{"strategy", "group", "calls", "succeeded", "attempts", "wasted", "refused", "p50", "p99"}}
	for _, c := range s.found {
		for _, g := range append(slices.Clone(c.Result.Groups), c.Result.Downstream...) {
			table = append(
				table,
				[]string{c.Strategy, g.Name, grouped(float64(g.Calls)), grouped(float64(g.Succeeded)), grouped(float64(g.Attempts)),
					grouped(float64(g.Wasted)), grouped(float64(g.Refused)), shortTime(g.Latency.P50), shortTime(g.Latency.P99)},
			)
		}
	}
	return table
}

// sweep prints the tables of a study that varies something.
func (r *report) sweep(s seen) {
	for _, w := range sweeps(&s) {
		for _, t := range w.tables(all) {
			r.printf("%s\n", fill(t.title, 100))
			r.table(t.cells)
			r.printf("\n")
		}
	}
}

// grouped formats a number for people: 12,345, with decimals only if it is small.
func grouped(v float64) string {
	if math.Abs(v) < 10 && v != math.Trunc(v) {
		return fmt.Sprintf("%.1f", v)
	}
	digits := fmt.Sprintf("%.0f", math.Abs(v))
	for i := len(digits) - 3; i > 0; i -= 3 {
		digits = digits[:i] + "," + digits[i:]
	}
	if v < 0 && digits != "0" {
		return "-" + digits
	}
	return digits
}

// shortTime formats a duration with two decimals, or three digits.
func shortTime(d time.Duration) string {
	unit, name, decimals := time.Second, "s", 2
	switch {
	case d == 0:
		decimals = 0
	case d.Abs() < time.Millisecond:
		unit, name, decimals = time.Microsecond, "µs", 0
	case d.Abs() < time.Second:
		unit, name, decimals = time.Millisecond, "ms", 0
	case d.Abs() >= 100*time.Second:
		decimals = 0
	}
	text := strconv.FormatFloat(float64(d)/float64(unit), 'f', decimals, 64)
	if decimals > 0 {
		text = strings.TrimSuffix(strings.TrimRight(text, "0"), ".")
	}
	return text + " " + name
}
