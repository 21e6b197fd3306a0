package sim

import (
	"context"
	"errors"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"

	"github.com/grpcretry/grpcretry"
)

// What can be worked out by hand: attempts at 0, 0.1, 0.3, 0.7, 1.5, 3.1 and 6.3 s find the
// server down; 12.7, 22.7 … find room for 200 each.
func TestClassicWithoutJitterIsExact(t *testing.T) {
	s := classic().Scenarios[0]
	r := mustRun(t, s, strategyOf(t, s, "exponential"))

	var offered []int
	for _, b := range r.Servers[0].Series {
		offered = append(offered, b.Offered)
	}
	want := make([]int, 53)
	want[0], want[1], want[3], want[6] = 4000, 1000, 1000, 1000
	want[12], want[22], want[32], want[42], want[52] = 1000, 800, 600, 400, 200
	if !slices.Equal(offered, want) {
		t.Errorf("offered %v, want %v", offered, want)
	}
	got := r.Summary
	if got.Wasted != 9000 || got.P99 != 52700*ms || got.Over != 800 || got.Done != 52700*ms || got.Stable != 33*sec {
		t.Errorf("wasted %v, p99 %v, over %v, done %v, stable %v; want 9000, 52.7s, 800, 52.7s, 33s",
			got.Wasted, got.P99, got.Over, got.Done, got.Stable)
	}
	if o := r.Groups[0].Outcomes; !reflect.DeepEqual(o, map[string]int{"recovered": 1000}) {
		t.Errorf("outcomes %v, want 1000 recovered", o)
	}
	if got := r.Groups[0].PerCall; got.P50 != 10 || got.Max != 12 {
		t.Errorf("attempts per call %+v, want 10 at the median and 12 at most", got)
	}
}

// What a published simulator found, with real sleeps and one run for each strategy
// (github.com/RafaelPanisset/retry-strategies-simulator, pictures in its results folder).
func TestClassicAgreesWithKnownResults(t *testing.T) {
	looksAtFigures(t)
	t.Parallel()
	s := classic().Scenarios[0]
	for _, tt := range []struct {
		strategy string
		wasted   float64
		p99      time.Duration
		over     float64 // most calls over capacity in a second; -1 where it was not 0
	}{
		{"exponential", 9000, 52747 * ms, 800},
		{"full jitter", 8468, 19065 * ms, 0},
		{"decorrelated", 10695, 20643 * ms, -1}, // 137 in its run, 85 to 158 in ours
	} {
		got := averaged(t, s, strategyOf(t, s, tt.strategy), 6)
		if !near(got.Wasted, tt.wasted, 0.05) || !near(got.P99.Seconds(), tt.p99.Seconds(), 0.05) {
			t.Errorf("%s: wasted %.0f, p99 %v; want %.0f and %v within 5 %%",
				tt.strategy, got.Wasted, got.P99, tt.wasted, tt.p99)
		}
		if tt.over >= 0 && got.Over != tt.over {
			t.Errorf("%s: %.0f over capacity, want %.0f", tt.strategy, got.Over, tt.over)
		}
	}
	// The constant wait of 1 ms took its machine 1.5 ms, so it made 8 million attempts and
	// we make 12. A twentieth of clients and capacity is a twentieth of that.
	s.Groups[0].Clients, s.Servers[0].Capacity = 50, 10
	got := averaged(t, s, strategyOf(t, s, "constant 1ms"), 1)
	if wasted := 20 * got.Wasted; wasted < 8e6 || wasted > 16e6 || got.P99 != 14*sec || got.Stable != 4*sec {
		t.Errorf("constant: wasted %.0f, p99 %v, stable %v; want about 12 million, 14s, 4s", wasted, got.P99, got.Stable)
	}
}

func TestSameSeedSameResult(t *testing.T) {
	looksAtFigures(t)
	for _, name := range []string{"classic", "pushback", "layers", "services"} {
		s := studyOf(t, name).Scenarios[0]
		strategy := s.Strategies[1]
		first := text(mustRun(t, s, strategy))
		if again := text(mustRun(t, s, strategy)); again != first {
			t.Errorf("%s: the same seed gives another result", name)
		}
	}
	s := classic().Scenarios[0]
	strategy := strategyOf(t, s, "full jitter")
	first := mustRun(t, s, strategy)
	s.Seed++
	if other := mustRun(t, s, strategy); other.Summary == first.Summary {
		t.Error("another seed gives the same result")
	}
}

// The short way of an attempt that takes no time is no other way.
func TestShortWayIsTheSame(t *testing.T) {
	s := classic().Scenarios[0]
	s.Groups = append(s.Groups, Group{Name: "more", Clients: 100, Spread: 20 * sec, Deadline: 9 * sec})
	s.Servers[0].Pushback = Pushback{Kind: FixedPushback, Delay: 3 * sec}
	for _, strategy := range s.Strategies[1:] {
		short := mustRun(t, s, strategy)
		r, err := newRun(&s, &strategy)
		if err != nil {
			t.Fatal(err)
		}
		for _, g := range r.groups {
			g.instant = false
		}
		if err := r.simulate(t.Context(), nil); err != nil {
			t.Fatal(err)
		}
		long := r.result(true)
		long.Events = short.Events // of timers that the short way does without
		if text(long) != text(short) {
			t.Errorf("%s: the long way ends elsewhere", strategy.Name)
		}
	}
}

func TestRunStopsWithWhatThereIs(t *testing.T) {
	s := classic().Scenarios[0]
	ctx, cancel := context.WithCancel(t.Context())
	watched := 0
	r, err := Run(ctx, s, strategyOf(t, s, "constant 1ms"), func(p Progress) {
		if watched++; watched == 3 {
			cancel()
		}
		if p.Events == 0 || p.Now > time.Second {
			t.Errorf("progress %+v", p)
		}
	})
	if !errors.Is(err, context.Canceled) || r == nil {
		t.Fatalf("Run = %v, %v; want a result and context.Canceled", r, err)
	}
	if r.Complete || r.Summary.Open != 1000 || r.Summary.Attempts < 100_000 || r.End > time.Second {
		t.Errorf("complete %v, open %v, attempts %v, end %v; want what happened until then",
			r.Complete, r.Summary.Open, r.Summary.Attempts, r.End)
	}
}

// A wait of nothing, with nothing else that takes time, would go on for ever.
func TestRunNoticesThatTimeDoesNotPass(t *testing.T) {
	s := small()
	s.Servers[0].Outages = []Outage{{For: sec}}
	r, err := newRun(&s, &Strategy{})
	if err != nil {
		t.Fatal(err)
	}
	r.events = stuck // as if they had happened
	busy := persistent("busy", grpcretry.Constant(0))
	if err := r.equip(&r.groups[0].caller, &busy, 1); err != nil {
		t.Fatal(err)
	}
	if err := r.simulate(t.Context(), nil); err == nil || !strings.Contains(err.Error(), "without time passing") {
		t.Errorf("simulate = %v, want an error that says so", err)
	}
}

func TestCallsBeginWhenTheyShould(t *testing.T) {
	begun := func(g Group) (at []int) {
		s := small()
		s.Bucket = 100 * ms
		s.Groups = []Group{g}
		for _, b := range mustRun(t, s, Strategy{}).Groups[0].Series {
			at = append(at, b.Calls)
		}
		return at
	}
	if got := begun(Group{Clients: 5, Start: 250 * ms}); !slices.Equal(got, []int{0, 0, 5}) {
		t.Errorf("all at 250 ms: %v", got)
	}
	if got := begun(Group{Rate: 20, Even: true, Start: 100 * ms, Stop: 400 * ms}); !slices.Equal(got, []int{0, 1, 2, 2}) {
		t.Errorf("every 50 ms from 150 ms: %v", got)
	}
	spread := begun(Group{Clients: 10_000, Start: 200 * ms, Spread: sec})
	random := begun(Group{Rate: 10_000, Start: 200 * ms, Stop: 1200 * ms})
	for i := 2; i < 12; i++ {
		if !near(float64(spread[i]), 1000, 0.15) || !near(float64(random[i]), 1000, 0.15) {
			t.Errorf("bucket %d: %d spread, %d at random, want about 1000 of each", i, spread[i], random[i])
		}
	}
}

// Whatever a policy can say, the engine hears.
func TestPolicyAndBudgetAreTheLibrarys(t *testing.T) {
	s := small()
	s.Network = Distribution{Mean: 10 * ms}
	s.Servers[0].Outages = []Outage{{For: 10 * sec, Code: codes.Internal}}
	strategy := Strategy{Policy: grpcretry.Policy{MaxAttempts: 3, Backoff: grpcretry.Constant(time.Second), Patience: noPatience}}
	classified := classify(&strategy)
	s.Groups[0].Clients = 1
	r := mustRun(t, s, strategy)
	seen := *classified
	if len(seen) != 3 {
		t.Fatalf("the classifier saw %d attempts, want 3", len(seen))
	}
	last := seen[2]
	if last.Number != 3 || last.Code() != codes.Internal || last.Duration != 20*ms || last.Wait != time.Second ||
		last.Start.Sub(seen[1].Start) != 1020*ms || last.Method != "/sim.Server/server" {
		t.Errorf("third attempt %+v", last)
	}
	if got := r.Groups[0].Outcomes["exhausted"]; got != 1 {
		t.Errorf("outcomes %v, want one exhausted", r.Groups[0].Outcomes)
	}

	strategy.Budget.New = func() (grpcretry.Budget, error) { return grpcretry.NewConcurrencyBudget(1) }
	s.Groups[0].Clients = 3
	r = mustRun(t, s, strategy)
	if r.Summary.Refused != 2 || r.Groups[0].Outcomes["budget"] != 2 {
		t.Errorf("refused %v, outcomes %v; want 2 by the budget", r.Summary.Refused, r.Groups[0].Outcomes)
	}
}

// classify gives a strategy a classifier that retries everything, and what it has seen.
func classify(s *Strategy) *[]grpcretry.Attempt {
	seen := &[]grpcretry.Attempt{}
	s.Policy.Classifier = func(_ context.Context, a grpcretry.Attempt) grpcretry.Classification {
		*seen = append(*seen, a)
		return grpcretry.Retry
	}
	return seen
}

// Every process has a budget of its own.
func TestProcessesDoNotShareBudgets(t *testing.T) {
	for processes, want := range map[int]float64{1: 8, 2: 6, 5: 0} {
		s := small()
		s.Groups[0] = Group{Clients: 10, Processes: processes}
		s.Network.Mean = 100 * ms // so that retries are in flight
		s.Servers[0].Outages = []Outage{{For: 500 * ms}}
		strategy := steady
		strategy.Budget = Budget{Kind: ConcurrencyBudget, Limit: 2}
		if got := mustRun(t, s, strategy).Summary; got.Refused != want {
			t.Errorf("%d processes: %v refused, want %v", processes, got.Refused, want)
		}
	}
}

// Sum of the parts, over scenarios at random: nothing is lost, and nothing is kept.
func TestNothingIsLost(t *testing.T) {
	t.Parallel()
	for seed := range uint64(200) {
		s := randomScenario(seed)
		r, err := newRun(&s, &s.Strategies[0])
		if err != nil {
			t.Fatal(err)
		}
		if err := r.simulate(t.Context(), nil); err != nil {
			t.Fatal(err)
		}
		out := r.result(true)
		for _, g := range slices.Concat(out.Groups, out.Downstream) {
			outcomes := 0
			for _, n := range g.Outcomes {
				outcomes += n
			}
			switch {
			case g.Calls != g.Succeeded+g.Failed+g.Open || outcomes != g.Succeeded+g.Failed:
				t.Errorf("seed %d: %s: %d calls, but %d succeeded, %d failed, %d open", seed, g.Name, g.Calls, g.Succeeded, g.Failed, g.Open)
			case g.Open != 0:
				t.Errorf("seed %d: %s: %d calls are open, though every one has an end", seed, g.Name, g.Open)
			case g.Attempts != g.Succeeded+g.Wasted+g.Lost || g.Retries != g.Attempts-g.Calls || g.Hedges > g.Retries:
				t.Errorf("seed %d: %s: %d attempts, %d succeeded, %d wasted, %d lost; %d retries, %d hedges",
					seed, g.Name, g.Attempts, g.Succeeded, g.Wasted, g.Lost, g.Retries, g.Hedges)
			case g.Outcomes["hedge_won"] > g.Hedges:
				t.Errorf("seed %d: %s: outcomes %v of %d hedges", seed, g.Name, g.Outcomes, g.Hedges)
			case g.Latency.N != g.Succeeded || g.FailedAfter.N != g.Failed:
				t.Errorf("seed %d: %s: latencies of %d and %d calls", seed, g.Name, g.Latency.N, g.FailedAfter.N)
			}
		}
		for i, one := range out.Servers {
			if one.Offered != one.Accepted+one.Rejected+one.Down-r.servers[i].lost {
				t.Errorf("seed %d: %s: offered %d, accepted %d, rejected %d, down %d of which %d had been accepted",
					seed, one.Name, one.Offered, one.Accepted, one.Rejected, one.Down, r.servers[i].lost)
			}
			s := r.servers[i]
			if s.inside != 0 || s.opened != 0 {
				t.Errorf("seed %d: %s: still %d inside, %d open", seed, one.Name, s.inside, s.opened)
			}
			for k, one := range s.replicas {
				if one.waiting != 0 || one.busy != 0 {
					t.Errorf("seed %d: %s, replica %d: still %d waiting, %d busy", seed, s.Name, k, one.waiting, one.busy)
				}
			}
			if s := out.Scenario; one.Utilisation > 1+1e-9 {
				t.Errorf("seed %d: %s: %s is %v busy", seed, s, one.Name, one.Utilisation)
			}
		}
		if kept := int(r.calls.n) - len(r.calls.free); kept != 0 {
			t.Errorf("seed %d: %d calls are kept", seed, kept)
		}
		kept := int(r.attempts.n) - len(r.attempts.free)
		for _, one := range r.servers {
			for k := range one.replicas {
				kept -= one.replicas[k].queue.len() // of servers that broke, until their next call
			}
		}
		if kept != 0 {
			t.Errorf("seed %d: %d attempts are kept", seed, kept)
		}
		if t.Failed() {
			t.Fatalf("scenario: %s", text(s))
		}
	}
}
