// Command report reads what the benchmarks print, of one run or of several, and writes the tables of
// docs/performance.md, its chart, and what was measured of the goals of docs/design.md. Times stand
// there only, so that each is stated once. benchstat prints all figures.
//
//	report -machine > raw.txt                       # first: what it is measured on
//	go test -run '^$' -bench . . >> raw.txt         # then the runs
//	report -chart ../docs/performance.svg -page ../docs/performance.md -goals ../docs/design.md raw.txt
//	report raw.txt                                  # prints the tables, and writes nothing
package main

import (
	"flag"
	"fmt"
	"io"
	"os"

	"github.com/grpcretry/grpcretry/bench/internal/pages"
)

func main() {
	if err := run(os.Args[1:], os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "report:", err)
		os.Exit(1)
	}
}

func run(args []string, out io.Writer) error {
	flags := flag.NewFlagSet("report", flag.ContinueOnError)
	machine := flags.Bool("machine", false, "print what this machine is, and the versions that are compared")
	chart := flags.String("chart", "", "draw the bar chart into this `file`")
	page := flags.String("page", "", "put the tables into this `file`, between its marks, instead of printing them")
	goals := flags.String("goals", "", "put what was measured of the goals into this `file`, between its marks")
	if err := flags.Parse(args); err != nil {
		return err
	}
	if *machine {
		return describeMachine(out)
	}
	m, err := readFiles(flags.Args())
	if err != nil {
		return err
	}
	if *chart != "" {
		if err := os.WriteFile(*chart, []byte(drawChart(m)), 0o644); err != nil {
			return fmt.Errorf("-chart: %w", err)
		}
	}
	if *goals != "" {
		if err := pages.ReplaceBetweenMarks(*goals, "goals", goalTable(m)); err != nil {
			return fmt.Errorf("-goals: %w", err)
		}
	}
	if *page == "" && m.machine["mode"] == "short" {
		fmt.Fprintf(out, "A short run: 1,000 calls in backoff, 100 open streams and 0.3 s of outage, instead of the numbers below.\n\n")
	}
	for _, b := range blocks {
		rows := b.rows(m)
		if len(rows) == 1 {
			continue
		}
		text := m.text(b.mark, rows, b.left)
		if *page == "" {
			fmt.Fprintf(out, "%s\n", text)
		} else if err := pages.ReplaceBetweenMarks(*page, b.mark, text); err != nil {
			return fmt.Errorf("-page: %w", err)
		}
	}
	return nil
}
