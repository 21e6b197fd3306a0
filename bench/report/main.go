// Command report reads what the benchmarks print, of one run or of several, and writes what
// is in it: RESULTS.md, the bar chart beside docs/performance.md, that page's tables, and what was
// measured of the goals of docs/design.md. Times stand on these pages only, so that each is
// stated once.
//
//	report -machine > raw.txt                       # first: what it is measured on
//	go test -run '^$' -bench . . >> raw.txt         # then the runs
//	report -results RESULTS.md -chart ../docs/performance.svg -page ../docs/performance.md -goals ../docs/design.md raw.txt
//	report -functions -results RESULTS.md raw.txt   # replaces only the table of functions
//	report raw.txt                                  # prints the tables, and writes nothing
//	report -against earlier.txt raw.txt             # do two times so many runs tell the same story?
//	report -restart ../docs/restart.md -page ../docs/performance.md # takes over how many calls survive a restart
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
	results := flags.String("results", "", "write the tables to this file instead of printing them")
	chart := flags.String("chart", "", "draw the bar chart into this file")
	page := flags.String("page", "", "put the bill and the tables of features and functions into this page, between its marks")
	goals := flags.String("goals", "", "put what was measured of the goals into this page, between its marks")
	restart := flags.String("restart", "", "read this page on restarts, and put into -page how many calls survive one")
	update := flags.Bool("functions", false, "with -results, replace only the table of functions")
	against := flags.String("against", "", "compare the ratios with those of this earlier file")
	if err := flags.Parse(args); err != nil {
		return err
	}
	if *machine {
		return describeMachine(out)
	}
	if *restart != "" {
		return updateRestart(*page, *restart)
	}
	m, err := readFiles(flags.Args())
	if err != nil {
		return err
	}
	if *against != "" {
		earlier, err := readFiles([]string{*against})
		if err != nil {
			return err
		}
		return sameStory(out, earlier, m)
	}
	if *chart != "" {
		if err := os.WriteFile(*chart, []byte(drawChart(m)), 0o644); err != nil {
			return err
		}
	}
	if *page != "" {
		if err := updatePage(*page, m); err != nil {
			return err
		}
	}
	if *goals != "" {
		if err := pages.ReplaceBetweenMarks(*goals, "goals", targetTable(m)); err != nil {
			return err
		}
	}
	switch {
	case *results == "":
		_, err := io.WriteString(out, tables(m))
		return err
	case *update:
		return pages.ReplaceBetweenMarks(*results, "functions", functionResults(m))
	default:
		return os.WriteFile(*results, []byte(resultsPage(m)), 0o644)
	}
}

// updateRestart copies how many calls survive a restart.
func updateRestart(page, restart string) error {
	text, err := os.ReadFile(restart)
	if err != nil {
		return err
	}
	rows, err := restartRows(string(text))
	if err != nil {
		return err
	}
	return pages.ReplaceBetweenMarks(page, "rescued calls", markdown(rows))
}

// updatePage replaces the tables for which something was measured.
func updatePage(page string, m *measurements) error {
	if m.has("UnaryRPC") {
		if err := pages.ReplaceBetweenMarks(page, "bill", bill(m)); err != nil {
			return err
		}
	}
	if m.has("WaitingCalls") {
		if err := pages.ReplaceBetweenMarks(page, "memory", memoryBill(m)); err != nil {
			return err
		}
	}
	if m.has("Feature") {
		if err := pages.ReplaceBetweenMarks(page, "features", featureTable(m)); err != nil {
			return err
		}
	}
	if m.has("Function") {
		return pages.ReplaceBetweenMarks(page, "functions", functionTable(m))
	}
	return nil
}
