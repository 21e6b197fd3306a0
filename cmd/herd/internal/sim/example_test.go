package sim_test

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/grpcretry/grpcretry"
	"github.com/grpcretry/grpcretry/cmd/herd/internal/sim"
)

// What waits with and without jitter do to a server that was down.
func ExampleRun() {
	scenario := sim.Scenario{
		Groups: []sim.Group{{Name: "clients", Clients: 1000}},
		Servers: []sim.Server{{
			Capacity: 200, Window: time.Second, // 200 calls in each second, and no queue
			Outages: []sim.Outage{{For: 10 * time.Second}},
		}},
	}
	for _, jitter := range []grpcretry.Jitter{grpcretry.NoJitter, grpcretry.FullJitter} {
		result, err := sim.Run(context.Background(), scenario, sim.Strategy{
			Policy: grpcretry.Policy{
				MaxAttempts: 100,
				Backoff:     grpcretry.Exponential{Max: 10 * time.Second, Jitter: jitter},
			},
			Budget: sim.Budget{Kind: sim.UnlimitedBudget},
		}, nil)
		if err != nil {
			fmt.Println(err)
			return
		}
		s := result.Summary
		fmt.Printf("jitter %v: p99 %.0f s, %.0f calls a second over capacity\n", jitter, s.P99.Seconds(), s.Over)
	}
	// Output:
	// jitter none: p99 53 s, 800 calls a second over capacity
	// jitter full: p99 19 s, 0 calls a second over capacity
}

// A scenario from a file, under each of its strategies.
func ExampleCompare() {
	scenarios, err := sim.ReadScenarios(strings.NewReader(`{
		"duration": "40s",
		"groups": [{"rate": 1000, "deadline": "10s"}],
		"servers": [{"capacity": 1200, "queue": 240, "rejectCost": 0.3,
		             "latency": {"shape": "exponential", "mean": "20ms"},
		             "outages": [{"from": "5s", "for": "10s", "left": 0.3}]}],
		"strategies": [
			{"name": "no budget", "policy": {"attemptTimeout": "1s"}, "budget": {"kind": "unlimited"}},
			{"name": "a tenth", "policy": {"attemptTimeout": "1s"}, "budget": {"kind": "ratio", "ratio": 0.1, "minPerSecond": 1}}
		]
	}`))
	if err != nil {
		fmt.Println(err)
		return
	}
	found, err := sim.Compare(context.Background(), scenarios[0], 1, nil)
	if err != nil {
		fmt.Println(err)
		return
	}
	for _, c := range found {
		if c.Mean.Stable < 0 {
			fmt.Printf("%s: the server never comes back\n", c.Strategy)
		} else {
			fmt.Printf("%s: the server recovers\n", c.Strategy)
		}
	}
	// Output:
	// no budget: the server never comes back
	// a tenth: the server recovers
}
