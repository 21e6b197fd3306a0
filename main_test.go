package grpcretry

import (
	"flag"
	"fmt"
	"os"
	"testing"

	"github.com/grpcretry/grpcretry/internal/goroutines"
)

// TestMain fails if a test outside a bubble leaves a goroutine behind; a bubble checks that
// itself.
func TestMain(m *testing.M) {
	flag.Parse()
	if err := setDrawCounts(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(2)
	}
	goroutines.Main(m)
}

var thorough = flag.Bool("thorough", false, "draw more in randomized tests, as make random does")

// drawCounts has the number of cases that each randomized test draws. The flags' defaults find
// common faults within seconds. Rare faults take the numbers of -thorough; those of -short suit the
// moment between two edits. A flag on the command line wins.
var drawCounts = []struct {
	flag            string
	thorough, short int
}{
	{"backoff.stride", 1, 401},
	{"budgets.seeds", 100, 1},
	{"configs.draws", 100, 10},
	{"differential.programs", 2000, 50},
	{"faults.streams", 600, 40},
	{"functions.draws", 1000, 20},
	{"hedges.sequences", 500, 50},
	{"panics.points", 12, 1},
	{"programs.count", 20_000, 200},
	{"scopes.draws", 500, 50},
}

// setDrawCounts sets the flags that the command line has not set.
func setDrawCounts() error {
	given := map[string]bool{}
	flag.Visit(func(f *flag.Flag) { given[f.Name] = true })
	for _, c := range drawCounts {
		var n int
		switch {
		case given[c.flag]:
			continue
		case *thorough:
			n = c.thorough
		case testing.Short():
			n = c.short
		default:
			continue
		}
		if err := flag.Set(c.flag, fmt.Sprint(n)); err != nil {
			return fmt.Errorf("-%s: %w", c.flag, err)
		}
	}
	return nil
}
