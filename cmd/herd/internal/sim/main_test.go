package sim

import (
	"flag"
	"fmt"
	"math"
	"testing"
	"time"

	"google.golang.org/grpc/codes"

	"github.com/grpcretry/grpcretry"
)

// mustRun runs a scenario to its end.
func mustRun(t testing.TB, s Scenario, strategy Strategy) *Result {
	t.Helper()
	r, err := Run(t.Context(), s, strategy, nil)
	if err != nil {
		t.Fatalf("Run(%s, %s): %v", s.Name, strategy.Name, err)
	}
	return r
}

// averaged is the mean of runs with several seeds.
func averaged(t testing.TB, s Scenario, strategy Strategy, seeds int) Summary {
	t.Helper()
	var runs []Summary
	for seed := range seeds {
		s.Seed = uint64(seed)
		runs = append(runs, mustRun(t, s, strategy).Summary)
	}
	return Mean(runs)
}

var thorough = flag.Bool(
	"thorough",
	false,
	"run all simulations in short mode and under the race detector, too, as make simulations-race does",
)

// looksAtFigures skips a test of the figures of many simulations in short mode and under the race
// detector. The detector makes simulations ten times as slow, and has nothing to find in them:
// each runs on one goroutine. Tests of simulations in parallel, and of real calls, do not skip.
func looksAtFigures(t testing.TB) {
	t.Helper()
	if (raceDetector || testing.Short()) && !*thorough {
		t.Skip("many calls are simulated: not in short mode, nor with the race detector, but with -thorough")
	}
}

// near is whether got is within a share of want.
func near(got, want, share float64) bool { return math.Abs(got-want) <= share*math.Abs(want) }

func text(v any) string {
	return fmt.Sprintf("%+v", v)
}

func strategyOf(t testing.TB, s Scenario, name string) Strategy {
	t.Helper()
	for _, one := range s.Strategies {
		if one.Name == name {
			return one
		}
	}
	t.Fatalf("scenario %s has no strategy %q", s.Name, name)
	return Strategy{}
}

func studyOf(t testing.TB, name string) Study {
	t.Helper()
	s, ok := FindStudy(name)
	if !ok {
		t.Fatalf("there is no study %q", name)
	}
	return s
}

// small is a scenario to change one thing of.
func small() Scenario {
	return Scenario{
		Groups:  []Group{{Name: "clients", Clients: 3}},
		Servers: []Server{{Name: "server", RejectCode: codes.Unavailable}},
	}
}

var steady = persistent("steady", grpcretry.Constant(time.Second))
