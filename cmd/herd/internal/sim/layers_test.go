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
		Policy:      grpcretry.Policy{MaxAttempts: 3, Backoff: grpcretry.Constant(10 * ms), Patience: noPatience},
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

// The header that a service sends for work that is retried further up reaches the service after the next,
// and a measure that one of them lacks ends there.
func TestWorkForARetryIsKnownFurtherDown(t *testing.T) {
	t.Parallel()
	all := []Downstream{{OneAttempt: true}, {OneAttempt: true}, {OneAttempt: true}}
	broken := []Downstream{{OneAttempt: true}, {}, {OneAttempt: true}}
	for _, tt := range []struct {
		name  string
		calls []Downstream
		want  int // attempts at D
	}{
		{"all know", all, 7},
		{"B does not", broken, 3 * 5}, // for each of A's attempts the 3 + 1 + 1 of C, which takes B's first one for no retry
	} {
		r := mustRun(t, inARow(Outage{For: 10 * sec}, tt.calls...), thrice(false, false))
		if got := r.Downstream[2].Attempts; got != tt.want {
			t.Errorf("%s: %d attempts at D, want %d", tt.name, got, tt.want)
		}
	}
}

// A failed attempt changes nothing if the call succeeds.
func TestOnlyACallThatGaveUpForbidsRetries(t *testing.T) {
	t.Parallel()
	// C's third attempt, after 20 ms, finds D well again.
	r := mustRun(t, inARow(Outage{For: 15 * ms}), thrice(true, true))
	if m := r.Summary; m.Succeeded != 1 || m.AmplifiedDown != 3 {
		t.Errorf("%v calls succeed after %v attempts at D, want 1 after 3", m.Succeeded, m.AmplifiedDown)
	}
	// C's third attempt is the last of all.
	r = mustRun(t, inARow(Outage{For: 25 * ms}), thrice(true, true))
	if m := r.Summary; m.Succeeded != 0 || m.AmplifiedDown != 3 {
		t.Errorf("%v calls succeed after %v attempts at D, want 0 after 3", m.Succeeded, m.AmplifiedDown)
	}
	// Without the measures B retries.
	r = mustRun(t, inARow(Outage{For: 25 * ms}), thrice(false, false))
	if m := r.Summary; m.Succeeded != 1 || m.AmplifiedDown != 4 {
		t.Errorf("without the measures %v calls succeed after %v attempts at D, want 1 after 4", m.Succeeded, m.AmplifiedDown)
	}
}

// The figure counts all attempts for the calls that started in the outage, and no others.
func TestAttemptsForCallsOfTheOutage(t *testing.T) {
	t.Parallel()
	s := inARow(Outage{From: 500 * ms, For: 310 * ms})
	s.Duration = 2 * sec
	s.Groups[0] = Group{Rate: 10, Even: true, Strategy: &Strategy{Policy: grpcretry.Policy{MaxAttempts: 1}}}
	// The calls of 0.5, 0.6 and 0.7 s make three attempts each, that of 0.8 s one in the outage and one
	// after it.
	r := mustRun(t, s, thrice(true, false))
	if got := r.Summary.AmplifiedDown; got != (3*3+2)/4.0 {
		t.Errorf("%v attempts at D per call of the outage, want (3*3 + 2) / 4", got)
	}
	if got := r.Summary.Attempts; got != 19 {
		t.Errorf("%v calls, want 19", got)
	}
}

// What the four processes of make layers are compared with.
func TestProofLesson(t *testing.T) {
	t.Parallel()
	s := proof()
	for name, want := range map[string][2]float64{ // attempts at D per call, at least and at most
		"no library":              {24, 27},   // some calls end after the outage
		"budgets":                 {1.2, 2.2}, // one of them after the outage
		"stop callers":            {3, 3},
		"one attempt for retries": {6.8, 7},
		"everything":              {1, 2.2},
	} {
		m := mustRun(t, s, strategyOf(t, s, name)).Summary
		if m.AmplifiedDown < want[0] || m.AmplifiedDown > want[1] {
			t.Errorf("%s: %.2f attempts at D per call, want %v to %v", name, m.AmplifiedDown, want[0], want[1])
		}
		if m.Succeeded < m.Calls-160 || m.Stable != 0 {
			t.Errorf(
				"%s: %v of %v calls succeed, stable after %v; want those of the good times, and immediately",
				name,
				m.Succeeded,
				m.Calls,
				m.Stable,
			)
		}
	}
}
