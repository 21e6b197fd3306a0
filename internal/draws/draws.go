// Package draws says how many cases randomized tests draw, each by a flag of its own.
package draws

import (
	"flag"
	"fmt"
	"os"
	"testing"
)

var thorough = flag.Bool("thorough", false, "draw more in randomized tests, as make random does")

// A Count is how many cases a test draws. The default of its flag finds common faults within seconds. Rare faults
// take the number for -thorough; that for -short suits the moment between two edits.
type Count struct {
	Flag            string
	Thorough, Short int
}

// Set sets the flags of counts that the command line has not set. It ends the process if there is no such flag.
func Set(counts []Count) {
	flag.Parse()
	given := map[string]bool{}
	flag.Visit(func(f *flag.Flag) { given[f.Name] = true })
	for _, c := range counts {
		var n int
		switch {
		case given[c.Flag]:
			continue
		case *thorough:
			n = c.Thorough
		case testing.Short():
			n = c.Short
		default:
			continue
		}
		if err := flag.Set(c.Flag, fmt.Sprint(n)); err != nil {
			fmt.Fprintf(os.Stderr, "-%s: %v\n", c.Flag, err)
			os.Exit(2) //nolint:forbidigo // it is the beginning of a TestMain
		}
	}
}
