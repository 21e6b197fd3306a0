package sim

import (
	"strings"
	"testing"
	"time"
)

// What brownouts must not cost: nearly all calls are saved, and the server hardly notices.
func TestBrownoutsLesson(t *testing.T) {
	looksAtFigures(t)
	t.Parallel()
	for _, tt := range []struct {
		length   time.Duration
		load     string
		saved    float64 // at least
		attempts float64 // at most, in the brownout, per call lost without retries
	}{
		{200 * ms, "1x1", 0.9, 3},
		{sec, "1x1", 0.9, 3},
		{sec, "1x1000", 0.9, 3},
		{2 * sec, "1x1", 0.8, 3},
		{2 * sec, "1x1000", 0.95, 3},
		{5 * sec, "1x1000", 0.6, 3},
		{200 * ms, "10x10", 0.95, 1.6}, // the goal is 1.3 here as well, which waits from 200 ms on reach
		{600 * ms, "10x10", 0.95, 1.5},
		{sec, "10x10", 0.95, 1.3},
		{sec, "10x1000", 0.95, 1.3},
		{2 * sec, "10x100", 0.95, 1.3},
		{200 * ms, "100x1", 0.95, 1.3},
		{sec, "100x1", 0.95, 1.3},
		{2 * sec, "100x10", 0.95, 1.3},
	} {
		s := brownout(tt.length, tt.load)
		none, got := mustRun(t, s, s.Strategies[0]).Summary, mustRun(t, s, strategyOf(t, s, "default")).Summary
		saved, _ := Saved(got, none)
		if attempts := got.Down / none.Failed; saved < tt.saved || attempts > tt.attempts {
			t.Errorf("%s: %.0f%% saved with %.2f attempts per call; want at least %.0f%% with at most %.1f",
				s.Name, 100*saved, attempts, 100*tt.saved, tt.attempts)
		}
	}
}

// A target that is away makes calls wait for ten seconds, and no longer.
func TestRisksLesson(t *testing.T) {
	looksAtFigures(t)
	t.Parallel()
	run := func(name, strategy string) *Result {
		s := scenarioOf(t, risks(), name)
		return mustRun(t, s, strategyOf(t, s, strategy))
	}
	gone := run("risks-gone", "default").Groups[0]
	for second, b := range gone.Series {
		if down := second >= 22 && second < 72; down && (b.Open > 1000 || b.Attempts != b.Calls) || b.Open > 6000 {
			t.Errorf("second %d of an outage that begins in second 12: %d calls open, %d attempts for %d calls", second, b.Open, b.Attempts, b.Calls)
		}
	}
	for _, name := range []string{"risks-errors-90-1", "risks-errors-90-100", "risks-errors-99.5-100"} {
		none, got := run(name, "no retries"), run(name, "default")
		if got.Summary.Failed > none.Summary.Failed || got.Summary.AmplifiedDown > 1.1 {
			t.Errorf(
				"%s: %v calls fail with %.2f attempts each, want at most %v with 1.1",
				name,
				got.Summary.Failed,
				got.Summary.AmplifiedDown,
				none.Summary.Failed,
			)
		}
	}
	// A method that works does not suffer from one that fails.
	method := run("risks-method", "default")
	if working := method.Groups[1]; working.Failed > 0 || working.Latency.P99 > 20*ms {
		t.Errorf("%d calls of the method that works fail, p99 %v; want none, 20ms", working.Failed, working.Latency.P99)
	}
	none, third := run("risks-third-10", "no retries").Summary, run("risks-third-10", "default").Summary
	if third.Failed > 1.1*none.Failed {
		t.Errorf("with a third of the capacity gone %v calls fail, without retries %v; want at most 10%% more", third.Failed, none.Failed)
	}
	none, replica := run("risks-replica", "no retries").Summary, run("risks-replica", "default").Summary
	if saved, _ := Saved(replica, none); saved < 0.95 {
		t.Errorf("with one bad replica of three %.0f%% are saved, want 95%%", 100*saved)
	}
}

// An outage may fail a share of the calls, chosen at random.
func TestOutageThatFailsAShare(t *testing.T) {
	s := small()
	s.Groups[0] = Group{Rate: 1000, Even: true, Stop: 30 * sec}
	s.Servers[0].Outages = []Outage{{From: 10 * sec, For: 10 * sec, Left: 1, Errors: 0.3}}
	r := mustRun(t, s, noRetries)
	for second, b := range r.Groups[0].Series[:30] {
		want := 0.0
		if second >= 10 && second < 20 {
			want = 300
		}
		if !near(float64(b.Failed), want, 0.25) {
			t.Errorf("second %d: %d calls fail, want about %v", second, b.Failed, want)
		}
	}
	if _, err := NewGate(s.Servers[0]); err == nil || !strings.Contains(err.Error(), "errors is 0.3") {
		t.Errorf("NewGate: %v, want an error: a gate has no random numbers", err)
	}
	s.Servers[0].Outages[0].Left = 0
	if err := s.Check(); err == nil || !strings.Contains(err.Error(), "errors is 0.3, want 0 where the server is down") {
		t.Errorf("errors of a server that is down: %v", err)
	}
}

// Groups that share processes share what those know.
func TestGroupsThatShareProcesses(t *testing.T) {
	s := small()
	s.Groups = []Group{{Name: "a", Clients: 1, Processes: 3}, {Name: "b", Clients: 1, With: "a"}}
	r, err := newRun(&s, &noRetries)
	if err != nil {
		t.Fatal(err)
	}
	if a, b := r.groups[0].processes, r.groups[1].processes; len(b) != 3 || a[0].retrier != b[0].retrier {
		t.Errorf("b has %d processes, its own: %v", len(b), a[0].retrier != b[0].retrier)
	}
	for with, want := range map[string]string{
		"c": `groups[1].with is "c", want the name of an earlier group`,
		"b": `groups[1].with is "b", want the name of an earlier group`,
	} {
		s.Groups[1].With = with
		if err := s.Check(); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("with %q: %v, want %q", with, err, want)
		}
	}
	s.Groups[1].With, s.Groups[1].Processes = "a", 2
	if err := s.Check(); err == nil || !strings.Contains(err.Error(), `where the group has processes or a strategy`) {
		t.Errorf("with and processes: %v", err)
	}
}
