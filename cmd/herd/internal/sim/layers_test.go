package sim

import (
	"fmt"
	"testing"

	"github.com/grpcretry/grpcretry"
)

// inARow is a scenario in which A calls B, B calls C, C calls D, each up to three times with waits of
// 10 ms, and in which nothing else takes time. One client calls A at the start; D is down for so long.
func inARow(outage Outage, calls ...Downstream) Scenario {
	s := small()
	s.Servers = nil
	for i, name := range []string{"A", "B", "C"} {
		one := Downstream{}
		if i < len(calls) {
			one = calls[i]
		}
		one.Target = string("BCD"[i])
		s.Servers = append(s.Servers, Server{Name: name, Calls: &one})
	}
	s.Servers = append(s.Servers, Server{Name: "D", Outages: []Outage{outage}})
	s.Groups = []Group{{Clients: 1, Strategy: &Strategy{Policy: grpcretry.Policy{MaxAttempts: 1}}}}
	return s
}

func thrice(stopCallers, oneAttempt bool) Strategy {
	return Strategy{
		Policy:      grpcretry.Policy{MaxAttempts: 3, Backoff: grpcretry.Constant(10 * ms)},
		Budget:      Budget{Kind: UnlimitedBudget},
		StopCallers: stopCallers,
		OneAttempt:  oneAttempt,
	}
}

func TestAttemptsInARow(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		stopCallers, oneAttempt bool
		want                    [3]int // attempts that A, B and C make
	}{
		{false, false, [3]int{3, 9, 27}},
		{true, false, [3]int{1, 1, 3}}, // C gives up, B is told so, A is told so
		{false, true, [3]int{3, 5, 7}}, // A's retries make 1 attempt each all the way, B's first retries make 1 at C
		{true, true, [3]int{1, 1, 3}},
	} {
		t.Run(fmt.Sprint(tt.stopCallers, tt.oneAttempt), func(t *testing.T) {
			r := mustRun(t, inARow(Outage{For: 10 * sec}), thrice(tt.stopCallers, tt.oneAttempt))
			for i, want := range tt.want {
				if got := r.Downstream[i].Attempts; got != want {
					t.Errorf("%s: %d attempts, want %d", r.Downstream[i].Name, got, want)
				}
			}
			if got, want := r.Summary.AmplifiedDown, float64(tt.want[2]); got != want {
				t.Errorf("%v attempts at D per call, want %v", got, want)
			}
		})
	}
}

// A server can take a measure alone, whatever the strategy.
func TestMeasuresOfOneServer(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		name  string
		calls []Downstream
		want  [3]int
	}{
		{"only A stops its callers", []Downstream{{StopCallers: true}}, [3]int{3, 9, 27}}, // its caller makes one attempt anyway
		{"only B stops its callers", []Downstream{{}, {StopCallers: true}}, [3]int{1, 3, 9}},
		{"only C stops its callers", []Downstream{{}, {}, {StopCallers: true}}, [3]int{3, 3, 9}}, // B has none to tell A
		{"only B makes one attempt", []Downstream{{}, {OneAttempt: true}}, [3]int{3, 5, 15}},     // B tells C so, which has no interceptor
		{"only C makes one attempt", []Downstream{{}, {}, {OneAttempt: true}}, [3]int{3, 9, 15}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			r := mustRun(t, inARow(Outage{For: 10 * sec}, tt.calls...), thrice(false, false))
			for i, want := range tt.want {
				if got := r.Downstream[i].Attempts; got != want {
					t.Errorf("%s: %d attempts, want %d", r.Downstream[i].Name, got, want)
				}
			}
		})
	}
}
