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
  budgets                  the library: each process limits its retries to a share of the calls that succeed
  stop callers             a service that has given up on a call tells its caller not to retry; no budgets
  one attempt for retries  a service makes one attempt for a request that is itself a retry; no budgets
  everything               the library with its defaults: budgets and both measures
`

const columnLegend = `  attempts per call        that reach D, for the calls that start and end while it is down
  most                     the same for the call with the most attempts
  lost, flaky              calls that fail although D would have responded to one of the three attempts of C
  lost, restart            calls that fail because D is away for a moment, much shorter than their deadline
  recovery                 time from the end of the outage until the last failure
`

var head = []string{"", "attempts per call", "most", "lost, flaky", "lost, restart", "recovery"}

// cells of the row, in the order of head.
func (r *row) cells() []string {
	cells := []string{r.setup, "–", "–", fmt.Sprint(r.lostFlaky), fmt.Sprint(r.lostRestart), formatDuration(r.recovery)}
	if r.down.calls > 0 {
		cells[1], cells[2] = fmt.Sprintf("%.2f", r.down.perCall()), fmt.Sprint(r.down.most)
	}
	return cells
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
