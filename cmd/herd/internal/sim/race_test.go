package sim

import (
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/grpcretry/grpcretry"
)

// spy is a budget that remembers what it was told.
type spy struct {
	refuse bool
	heard  []grpcretry.Outcome
}

func (b *spy) Deposit(o grpcretry.Outcome) { b.heard = append(b.heard, o) }
func (b *spy) Balance(time.Time) float64   { return 1 }
func (b *spy) Withdraw(time.Time) bool     { return !b.refuse }

// hedgedCall is one call to a server, hedged each second, that is retried without a wait. The budget is that of
// its hedges.
func hedgedCall(h Hedging, b *spy) (Scenario, Strategy) {
	h.Budget = Budget{New: func() (grpcretry.Budget, error) { return b, nil }}
	s := small()
	s.Bucket = 50 * ms
	s.Groups[0].Clients = 1
	return s, Strategy{
		Hedging: &h,
		Policy:  grpcretry.Policy{Backoff: grpcretry.Constant(0), OverloadBackoff: grpcretry.Constant(0), Patience: noPatience},
		Budget:  Budget{Kind: UnlimitedBudget},
	}
}

// Attempts that lost are neither a success nor a failure.
func TestBudgetHearsOfLosersLast(t *testing.T) {
	budget := &spy{}
	s, strategy := hedgedCall(Hedging{Kind: HedgeAfter, Delay: sec}, budget)
	s.Servers[0].Latency.Mean = 3 * sec
	strategy.Policy.MaxAttempts = 2
	mustRun(t, s, strategy)
	want := []grpcretry.Outcome{{Attempt: 1, Result: grpcretry.Succeeded}, {Attempt: 2, Hedge: true, Result: grpcretry.Ignored}}
	if !slices.Equal(budget.heard, want) {
		t.Errorf("the budget heard %v, want %v", budget.heard, want)
	}
}

// Who gives up takes the server's work away, after the way there, unless the server does
// not look.
func TestLosersAreCancelled(t *testing.T) {
	for _, ignores := range []bool{false, true} {
		s, strategy := hedgedCall(Hedging{Kind: HedgeAfter, Delay: sec}, &spy{})
		s.Network.Mean, strategy.Policy.MaxAttempts = 100*ms, 2
		s.Servers[0] = Server{Capacity: 0.5, Replicas: 2, Latency: Distribution{Mean: 2 * sec}, IgnoresCancel: ignores}
		r := mustRun(t, s, strategy)
		// The first answers at 2.2 s; the second is at work from 1.1 s to 2.3 s, or 3.1 s.
		want, late := (2+1.2)/(2*2.3), 2300*ms
		if ignores {
			want, late = (2+2)/(2*3.1), 3100*ms
		}
		if got := r.Servers[0]; !near(got.Utilisation, want, 1e-9) || r.End != late || got.Late != 1 || got.Workers != 2 {
			t.Errorf(
				"ignores %v: %d workers busy %.4f until %v, %d late; want 2, %.4f, %v, 1",
				ignores,
				got.Workers,
				got.Utilisation,
				r.End,
				got.Late,
				want,
				late,
			)
		}
	}
}

// A handler whose own calls are hedged takes them back when its caller gives up.
func TestHedgedDownstreamCallsAreCancelled(t *testing.T) {
	for name, change := range map[string]func(*Scenario){
		"in flight": func(s *Scenario) { s.Servers[1].Latency.Mean = 9 * sec },
		"in a wait": func(s *Scenario) {
			s.Servers[1].Outages = []Outage{{For: 9 * sec}}
			s.Servers[1].Pushback = Pushback{Kind: FixedPushback, Delay: 8 * sec}
		},
	} {
		budget := &spy{}
		s, strategy := hedgedCall(Hedging{Kind: HedgeAfter, Delay: sec}, budget)
		strategy.Policy.MaxAttempts = 3
		s.Groups[0].Strategy = &noRetries
		s.Servers = []Server{{Name: "a", Calls: &Downstream{Target: "b", Strategy: &strategy},
			Outages: []Outage{{From: 1500 * ms, For: sec}}}, {Name: "b"}}
		change(&s)
		r := mustRun(t, s, Strategy{})
		g := r.Downstream[0]
		if g.Calls != 1 || g.Outcomes["cancelled"] != 1 || g.FailedAfter.Max != 1500*ms {
			t.Errorf(
				"%s: %d downstream calls, outcomes %v after %v; want one that is cancelled after 1.5s",
				name,
				g.Calls,
				g.Outcomes,
				g.FailedAfter.Max,
			)
		}
		if g.Wasted != 1 || g.Lost != g.Attempts-1 {
			t.Errorf("%s: of %d attempts %d failed and %d lost, want the first that is noticed, and the others", name, g.Attempts, g.Wasted, g.Lost)
		}
		if len(budget.heard) != g.Attempts {
			t.Errorf("%s: the budget heard of %d attempts, want %d", name, len(budget.heard), g.Attempts)
		}
	}
}

// Attempts go to the replicas in turn.
func TestReplicasTakeTurns(t *testing.T) {
	s := small()
	s.Groups[0] = Group{Rate: 30, Even: true, Stop: 10 * sec}
	// Nobody may wait, and the worker of each replica is busy for two arrivals of three.
	s.Servers[0] = Server{Capacity: 15, Replicas: 3, Queue: 0, Latency: Distribution{Mean: sec / 15}}
	if got := mustRun(t, s, noRetries); got.Summary.Failed > 0 || got.Servers[0].Workers != 3 {
		t.Errorf("%v calls of 30 a second are rejected by 3 workers of 15, of %d; want none", got.Summary.Failed, got.Servers[0].Workers)
	}
	r, err := newRun(&s, &noRetries)
	if err != nil {
		t.Fatal(err)
	}
	p := &r.groups[0].processes[0]
	first := p.pick(r.servers[0]).index
	for i := 1; i < 7; i++ {
		if got, want := p.pick(r.servers[0]).index, (first+i)%3; got != want {
			t.Fatalf("attempt %d goes to replica %d, want %d after %d", i, got, want, first)
		}
	}
	// A call that prefers them tries all others first, and then takes turns again.
	c := &call{caller: &caller{target: r.servers[0], untried: true}, process: p}
	first = c.pick().index
	p.turn = (first + 2) % 3 // so that first is next
	second := c.pick().index
	third := c.pick().index
	if first+second+third != 3 || first == second {
		t.Errorf("a call goes to the replicas %d, %d and %d, want each once", first, second, third)
	}
	p.turn = first
	if got, want := c.pick().index, (first+1)%3; got != want {
		t.Errorf("then it goes to replica %d, want %d", got, want)
	}
	// Each process begins with any of them.
	s.Groups[0].Processes = 30
	if r, err = newRun(&s, &noRetries); err != nil {
		t.Fatal(err)
	}
	begun := [3]int{}
	for i := range r.groups[0].processes {
		begun[r.groups[0].processes[i].pick(r.servers[0]).index]++
	}
	if slices.Min(begun[:]) == 0 || slices.Max(begun[:]) == 30 {
		t.Errorf("30 processes begin with the replicas %v, want some with each", begun)
	}
	// What a server can do is what its replicas can do together, also in an outage.
	s.Servers[0] = Server{Capacity: 10, Window: sec, Replicas: 3, Outages: []Outage{{From: 5 * sec, For: 2 * sec, Left: 0.5}}}
	got := mustRun(t, s, noRetries).Servers[0].Series
	for i, want := range map[int]ServerBucket{3: {Capacity: 30}, 5: {Capacity: 15}} {
		if got[i].Capacity != want.Capacity || float64(got[i].Accepted) > want.Capacity {
			t.Errorf("in second %d: capacity %v, %d accepted; want %v", i, got[i].Capacity, got[i].Accepted, want.Capacity)
		}
	}
}

// A replica that calls another server is a process of its own, with a budget of its own.
func TestReplicasHaveTheirOwnBudgets(t *testing.T) {
	for seed := range uint64(8) {
		s, strategy := Scenario{Seed: seed}, Strategy{}
		var budgets []*spy
		strategy.Budget.New = func() (grpcretry.Budget, error) {
			budgets = append(budgets, &spy{})
			return budgets[len(budgets)-1], nil
		}
		for range 4 {
			s.Groups = append(s.Groups, Group{Clients: 1, Strategy: &noRetries})
		}
		s.Servers = []Server{{Name: "a", Replicas: 2, Calls: &Downstream{Target: "b", Strategy: &strategy}}, {Name: "b"}}
		r, err := newRun(&s, &Strategy{})
		if err != nil {
			t.Fatal(err)
		}
		want := make([]int, 2)
		for _, g := range r.groups {
			want[(g.processes[0].turn+1)%2]++
		}
		if err := r.simulate(t.Context(), nil); err != nil {
			t.Fatal(err)
		}
		if got := []int{len(budgets[0].heard), len(budgets[1].heard)}; !slices.Equal(got, want) {
			t.Errorf("seed %d: the budgets of the replicas heard of %v attempts, want %v", seed, got, want)
		}
	}
}

// Each process has a delay of its own, and so has each run.
func TestDelaysAreNotShared(t *testing.T) {
	s := small()
	s.Groups[0] = Group{Rate: 100, Stop: 30 * sec, Processes: 2}
	s.Servers[0] = Server{Replicas: 3, Latency: Distribution{Shape: LogNormalShape, Mean: 20 * ms, Spread: 40 * ms}}
	strategy := Strategy{Hedging: &Hedging{Kind: HedgeAtQuantile, Quantile: 0.9}}
	first := mustRun(t, s, strategy)
	if again := mustRun(t, s, strategy); text(first) != text(again) {
		t.Error("the same seed gives another result: what one run has learnt another knows")
	}
	if first.Summary.Hedges == 0 {
		t.Error("no call is hedged")
	}
}

func TestHedgingIsChecked(t *testing.T) {
	for _, tt := range []struct {
		hedging Hedging
		want    string
	}{
		{Hedging{}, `strategies[0].hedging.kind is "", want one of ["after" "quantile"]`},
		{Hedging{Kind: HedgeAfter, Delay: -sec}, `strategies[0].hedging.delay is -1s, want 0s to 24h0m0s`},
		{Hedging{Kind: HedgeAtQuantile}, `strategies[0].hedging.quantile is 0, want between 0 and 1`},
		{Hedging{Kind: HedgeAtQuantile, Quantile: 1}, `strategies[0].hedging.quantile is 1, want between 0 and 1`},
		{Hedging{Kind: HedgeAtQuantile, Quantile: 0.9, AtLeast: 2 * sec, AtMost: sec},
			`strategies[0].hedging.atMost is 1s, want 0 or at least atLeast`},
	} {
		s := small()
		s.Strategies = []Strategy{{Hedging: &tt.hedging}}
		if err := s.Check(); err == nil || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("hedging %+v: %v, want an error with %q", tt.hedging, err, tt.want)
		}
	}
	s := small()
	s.Strategies = []Strategy{{Policy: grpcretry.Policy{MaxAttempts: 1001}, Hedging: &Hedging{Kind: HedgeAfter}}}
	if err := s.Check(); err == nil ||
		!strings.Contains(err.Error(), `strategies[0].policy.maxAttempts is 1001, want at most 1000 with hedging`) {
		t.Errorf("a hedged call with 1001 attempts: %v", err)
	}
	s.Strategies = []Strategy{{Hedging: &Hedging{Kind: HedgeAfter, New: func() grpcretry.HedgeDelay { return nil }}}}
	if err := s.Check(); err == nil || !strings.Contains(err.Error(), `hedging.kind is "after", want "" where New makes the delay`) {
		t.Errorf("New and a kind: %v", err)
	}
	s.Strategies[0].Hedging.Kind = ""
	if err := s.Check(); err == nil || !strings.Contains(err.Error(), `hedging.new is "without a delay"`) {
		t.Errorf("New without a delay: %v", err)
	}
	s.Strategies = []Strategy{{Policy: grpcretry.Policy{Hedging: &grpcretry.Hedging{Delay: grpcretry.HedgeAfter(0)}}}}
	if err := s.Check(); err == nil ||
		!strings.Contains(err.Error(), `policy.hedging is "set", want none: the hedging of a strategy is beside its policy`) {
		t.Errorf("hedging in the policy: %v", err)
	}
}
