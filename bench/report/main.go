// Command report reads what the benchmarks print, of one run or of several, and writes what
// is in it: RESULTS.md, the bar chart beside docs/performance.md, and that page's table of
// features.
//
//	report -machine > raw.txt                       # first: what it is measured on
//	go test -run '^$' -bench . . >> raw.txt         # then the runs
//	report -results RESULTS.md -chart ../docs/performance.svg -page ../docs/performance.md raw.txt
//	report raw.txt                                  # prints the tables, and writes nothing
//	report -against earlier.txt raw.txt             # do two times so many runs tell the same story?
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
	page := flags.String("page", "", "put the table of features into this page, between its marks")
	against := flags.String("against", "", "compare the ratios with those of this earlier file")
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
		if err := pages.ReplaceBetweenMarks(*page, "features", featureTable(m)); err != nil {
			return err
		}
	}
	if *results == "" {
		_, err := io.WriteString(out, tables(m))
		return err
	}
	return os.WriteFile(*results, []byte(resultsPage(m)), 0o644)
}
