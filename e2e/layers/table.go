package main

import (
	"fmt"
	"runtime"
	"strings"
	"time"
	"unicode/utf8"
)

// A row is one setup and its figures.
type row struct {
	setup string
	*summary
}

// describe says what is measured.
func (p *plan) describe() string {
	return fmt.Sprintf(`A client calls A, A calls B, B calls C, C calls D: four processes on loopback. A, B and C make up
to %d attempts each, with random waits that start at %v; the client makes one. It makes %d calls a
second, while D responds for %v, is down for %v, responds for %v, is flaky for %v, responds
for %v, and is killed and, %v later, started again. When it is down, D fails every attempt with UNAVAILABLE. When it is flaky,
it fails the first attempt of one call in ten, and the first two of one call in twenty.

%s
%s
Measured with %s on %s/%s with %d cores.`,
		attempts, baseWait, p.rate, p.healthy, p.down, p.healed, p.flaky, p.settled, p.away,
		rowLegend, columnLegend, runtime.Version(), runtime.GOOS, runtime.GOARCH, runtime.NumCPU())
}

const rowLegend = `  no library               gRPC's own retries, from the retryPolicy of a service config
  budgets                  the library: each process limits its retries to a share of the calls that succeed; no patience
  stop callers             a service that has given up on a call tells its caller not to retry; no budgets, no patience
  one attempt for retries  a service makes one attempt for a request that is itself a retry; no budgets, no patience
  everything               the library with its defaults: budgets, both measures and patience
`

const columnLegend = `  attempts per call        that reach D, for the calls that start and end while it is down, or that start if all wait
  most                     the same for the call with the most attempts
  lost, restart            calls that fail because D is away for a moment, much shorter than their deadline
`

var head = []string{"", "attempts per call", "most", "lost, restart"}

// cells of the row, in the order of head.
func (r *row) cells() []string {
	most := "–"
	if r.down.calls > 0 {
		most = fmt.Sprint(r.down.most)
	}
	return []string{r.setup, fmt.Sprintf("%.2f", r.down.perCall()), most, fmt.Sprint(r.lostRestart)}
}

// formatDuration rounds to milliseconds.
func formatDuration(d time.Duration) string {
	if d >= time.Second {
		return fmt.Sprintf("%.2f s", d.Seconds())
	}
	return fmt.Sprintf("%.0f ms", d.Seconds()*1000)
}

// tableText is the table as a terminal shows it: setups to the left, figures to the right.
func tableText(rows []row) string {
	var out strings.Builder
	for _, cells := range allCells(rows) {
		fmt.Fprintf(&out, "  %-23s", cells[0])
		for i, cell := range cells[1:] {
			fmt.Fprintf(&out, "  %*s", utf8.RuneCountInString(head[i+1]), cell)
		}
		out.WriteString("\n")
	}
	return out.String()
}

// restText says what is nearly always nothing, and would be a column of zeros.
func restText(rows []row) string {
	var lost []string
	slowest := row{summary: &summary{}}
	for _, r := range rows {
		if r.lostFlaky > 0 {
			lost = append(lost, fmt.Sprintf("%d (%s)", r.lostFlaky, r.setup))
		}
		if r.recovery > slowest.recovery {
			slowest = r
		}
	}
	text := "Lost while D was flaky, although it would have responded to one of C's three attempts: no call.\n"
	if len(lost) > 0 {
		text = strings.Replace(text, "no call", strings.Join(lost, ", "), 1)
	}
	if slowest.recovery == 0 {
		return text + "With each setup, the last failure of the outage was before its end.\n"
	}
	return text + fmt.Sprintf("After the end of the outage, calls failed for %s at most (%s).\n",
		formatDuration(slowest.recovery), slowest.setup)
}

// tableMarkdown is the table as a page shows it.
func tableMarkdown(rows []row) string {
	var out strings.Builder
	for i, cells := range allCells(rows) {
		fmt.Fprintf(&out, "| %s |\n", strings.Join(cells, " | "))
		if i == 0 {
			fmt.Fprintf(&out, "|---|%s\n", strings.Repeat("---:|", len(head)-1))
		}
	}
	return out.String()
}

func allCells(rows []row) [][]string {
	all := [][]string{head}
	for _, r := range rows {
		all = append(all, r.cells())
	}
	return all
}
