package sim

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"

	"github.com/grpcretry/grpcretry"
)

// spy is a budget that remembers what it was told.
type spy struct {
	refuse            bool
	refuseOnce        int // when it is asked for this time
	heard             []grpcretry.Outcome
	asked             int
	granted, refunded int
}

func (b *spy) Deposit(o grpcretry.Outcome) { b.heard = append(b.heard, o) }
func (b *spy) Refund()                     { b.refunded++ }
func (b *spy) Balance(time.Time) float64   { return 1 }
func (b *spy) Withdraw(time.Time) bool {
	b.asked++
	if b.refuse || b.asked == b.refuseOnce {
		return false
	}
	b.granted++
	return true
}

// hedgedCall is one call to a server, hedged each second. Only b limits its hedges.
func hedgedCall(h Hedging, b grpcretry.Budget) (Scenario, Strategy) {
	h.Budget = Budget{Kind: UnlimitedBudget}
	s := small()
	s.Bucket = 50 * ms
	s.Groups[0].Clients = 1
	return s, Strategy{
		Hedging: &h,
		Budget:  Budget{New: func() (grpcretry.Budget, error) { return b, nil }},
	}
}

// sentAt is when the attempts were sent, to a bucket.
func sentAt(r *Result) (times []time.Duration) {
	for i, b := range r.Groups[0].Series {
		for range b.Attempts {
			times = append(times, time.Duration(i)*r.Bucket)
		}
	}
	return times
}

// The rules of gRFC A6, as the library's own tests have them. Hedges are due each second.
func TestHedgedCalls(t *testing.T) {
	down := func(from, until time.Duration, c codes.Code) Outage {
		return Outage{From: from, For: until - from, Code: c}
	}
	silent := func(from, until time.Duration) Outage { return Outage{From: from, For: until - from, Silent: true} }
	taking := func(d time.Duration) Server { return Server{Latency: Distribution{Mean: d}} }
	// one answers the first attempt after d, and rejects all others.
	one := func(d time.Duration, rejects codes.Code, p Pushback) Server {
		return Server{Capacity: 0.01, Window: 100 * sec, Latency: Distribution{Mean: d}, RejectCode: rejects, Pushback: p}
	}
	stop := Pushback{Kind: StopPushback}
	for _, tt := range []struct {
		name    string
		attempt int // MaxAttempts
		server  Server
		change  func(*Scenario, *Strategy)
		refuse  bool // the budget does
		once    int  // the budget refuses when it is asked for this time

		sent       []time.Duration
		elapsed    time.Duration
		outcome    string
		lost       int
		suppressed int
	}{
		{name: "an answer before the delay", attempt: 3, server: taking(sec / 2), sent: []time.Duration{0}, elapsed: sec / 2, outcome: "first_try"},
		{name: "the hedge wins", attempt: 3, server: Server{Outages: []Outage{silent(0, sec/2)}, Latency: Distribution{Mean: 100 * ms}},
			sent: []time.Duration{0, sec}, elapsed: 1100 * ms, outcome: "hedge_won", lost: 1},
		{name: "the first wins after all", attempt: 3, server: taking(1500 * ms), sent: []time.Duration{0, sec}, elapsed: 1500 * ms, outcome: "first_try", lost: 1},
		{name: "the third wins", attempt: 3, server: Server{Outages: []Outage{silent(0, 1500*ms)}, Latency: Distribution{Mean: 100 * ms}},
			sent: []time.Duration{0, sec, 2 * sec}, elapsed: 2100 * ms, outcome: "hedge_won", lost: 2},
		{name: "no more than MaxAttempts", attempt: 2, server: taking(9 * sec), sent: []time.Duration{0, sec}, elapsed: 9 * sec, outcome: "first_try", lost: 1},
		{name: "the default is one hedge", server: taking(9 * sec), sent: []time.Duration{0, sec}, elapsed: 9 * sec, outcome: "first_try", lost: 1},
		{name: "delay 0 sends all at once", attempt: 3, server: taking(sec), change: func(_ *Scenario, s *Strategy) { s.Hedging.Delay = 0 },
			sent: []time.Duration{0, 0, 0}, elapsed: sec, outcome: "first_try", lost: 2},

		{name: "a fatal status of the first", attempt: 3, server: Server{Outages: []Outage{down(0, sec/2, codes.NotFound)}},
			sent: []time.Duration{0}, outcome: "not_retryable"},
		{name: "a fatal status of a hedge ends the call", attempt: 3, server: one(9*sec, codes.NotFound, Pushback{}),
			sent: []time.Duration{0, sec}, elapsed: sec, outcome: "not_retryable", lost: 1},
		{name: "a fatal status that also forbids more", attempt: 3, server: one(9*sec, codes.NotFound, stop),
			sent: []time.Duration{0, sec}, elapsed: sec, outcome: "pushback", lost: 1},

		{name: "a failure sends the next now, later ones resume at the delay", attempt: 4,
			server: Server{Outages: []Outage{down(0, 200*ms, codes.Unavailable), silent(200*ms, 2*sec)}},
			change: func(s *Scenario, _ *Strategy) { s.Network.Mean = 150 * ms },
			sent:   []time.Duration{0, 300 * ms, 1300 * ms, 2300 * ms}, elapsed: 2600 * ms, outcome: "hedge_won", lost: 2},
		{name: "a hedge fails, the next is sent now", attempt: 3, server: one(4*sec, codes.Unavailable, Pushback{}),
			sent: []time.Duration{0, sec, sec}, elapsed: 4 * sec, outcome: "first_try"},
		{name: "all fail at once", attempt: 3, server: Server{Outages: []Outage{down(0, sec, codes.Unavailable)}},
			sent: []time.Duration{0, 0, 0}, outcome: "exhausted"},
		{name: "own non-fatal codes", attempt: 3, server: Server{Outages: []Outage{down(0, sec, codes.Internal)}},
			change: func(_ *Scenario, s *Strategy) { s.Hedging.NonFatalCodes = []codes.Code{codes.Internal} },
			sent:   []time.Duration{0, 0, 0}, outcome: "exhausted"},
		{name: "no non-fatal codes", attempt: 3, server: Server{Outages: []Outage{down(0, sec, codes.Unavailable)}},
			change: func(_ *Scenario, s *Strategy) { s.Hedging.NonFatalCodes = []codes.Code{} },
			sent:   []time.Duration{0}, outcome: "not_retryable"},

		{name: "a stop from a hedge, the first may still win", attempt: 4, server: one(5*sec, codes.Unavailable, stop),
			sent: []time.Duration{0, sec}, elapsed: 5 * sec, outcome: "first_try"},
		{name: "a stop from the first", attempt: 3, server: Server{Outages: []Outage{down(0, sec, codes.Unavailable)}, Pushback: stop},
			sent: []time.Duration{0}, outcome: "pushback"},
		{name: "a stop that nobody hears", attempt: 3, server: one(5*sec, codes.Unavailable, stop),
			change: func(_ *Scenario, s *Strategy) { s.IgnorePushback = true },
			sent:   []time.Duration{0, sec, sec}, elapsed: 5 * sec, outcome: "first_try"},
		{name: "a wait, which ends after the call", attempt: 9, server: one(4500*ms, codes.Unavailable, Pushback{Kind: FixedPushback, Delay: 3 * sec}),
			sent: []time.Duration{0, sec, 4 * sec}, elapsed: 4500 * ms, outcome: "first_try"},
		{name: "a wait with nothing under way", attempt: 3,
			server: Server{Outages: []Outage{down(0, sec, codes.Unavailable)}, Pushback: Pushback{Kind: FixedPushback, Delay: 3 * sec}},
			sent:   []time.Duration{0, 3 * sec}, elapsed: 3 * sec, outcome: "recovered"},
		{name: "a wait over MaxServerDelay sends no more", attempt: 4, server: one(5*sec, codes.Unavailable, Pushback{Kind: FixedPushback, Delay: 301 * sec}),
			sent: []time.Duration{0, sec}, elapsed: 5 * sec, outcome: "first_try"},

		{name: "two waits: the newer word counts, and is paid for already", attempt: 3,
			server: Server{Capacity: 0.01, Window: 100 * sec, Latency: Distribution{Mean: 9 * sec}, RejectCode: codes.Unavailable,
				Outages: []Outage{down(2*sec, 3*sec, codes.Unavailable)}, Pushback: Pushback{Kind: FixedPushback, Delay: 9 * sec}},
			sent: []time.Duration{0, sec, 11 * sec}, elapsed: 11 * sec, outcome: "exhausted"},
		{name: "after a stop, a failure sends none", attempt: 4, server: one(9*sec, codes.Unavailable, stop),
			change: func(_ *Scenario, s *Strategy) { s.Policy.AttemptTimeout = 1500 * ms },
			sent:   []time.Duration{0, sec}, elapsed: 1500 * ms, outcome: "pushback"},
		{name: "a stop takes back what was to come", attempt: 4,
			server: Server{Capacity: 0.01, Window: 100 * sec, Latency: Distribution{Mean: 9 * sec}, RejectCode: codes.Unavailable,
				Outages: []Outage{down(2*sec, 3*sec, codes.Unavailable)}, Pushback: Pushback{Kind: FixedPushback, Delay: 4 * sec}},
			change: func(s *Scenario, _ *Strategy) { s.Groups[0].Deadline = 5500 * ms }, // the second wait would pass it
			sent:   []time.Duration{0, sec}, elapsed: 2 * sec, outcome: "deadline"},

		{name: "the deadline", attempt: 9, server: Server{Outages: []Outage{silent(0, 9*sec)}},
			change: func(s *Scenario, _ *Strategy) { s.Groups[0].Deadline = 2500 * ms },
			sent:   []time.Duration{0, sec, 2 * sec}, elapsed: 2500 * ms, outcome: "deadline_exceeded", lost: 2},
		{name: "MaxElapsed", attempt: 9, server: taking(9 * sec), change: func(_ *Scenario, s *Strategy) { s.Policy.MaxElapsed = 2 * sec },
			sent: []time.Duration{0, sec}, elapsed: 9 * sec, outcome: "first_try", lost: 1},
		{name: "the attempt timeout of each", attempt: 3, server: Server{Outages: []Outage{silent(0, 1200*ms)}, Latency: Distribution{Mean: 100 * ms}},
			change: func(_ *Scenario, s *Strategy) { s.Policy.AttemptTimeout = 1500 * ms },
			sent:   []time.Duration{0, sec, 1500 * ms}, elapsed: 1600 * ms, outcome: "hedge_won", lost: 1},

		{name: "an empty budget ends nothing, and is asked again", attempt: 3, server: taking(9 * sec), refuse: true,
			sent: []time.Duration{0}, elapsed: 9 * sec, outcome: "first_try", suppressed: 4}, // at 1, 2, 4 and 8 s
		{name: "a budget that refuses after a failure is asked again", attempt: 3, server: one(4*sec, codes.Unavailable, Pushback{}), once: 2,
			sent: []time.Duration{0, sec, 2 * sec}, elapsed: 4 * sec, outcome: "first_try"},
		{name: "an empty budget with nothing under way", attempt: 3, server: Server{Outages: []Outage{down(0, sec, codes.Unavailable)}}, refuse: true,
			sent: []time.Duration{0}, outcome: "budget"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			budget := &spy{refuse: tt.refuse, refuseOnce: tt.once}
			s, strategy := hedgedCall(Hedging{Kind: HedgeAfter, Delay: sec, MaxAttempts: tt.attempt}, budget)
			s.Servers[0] = tt.server
			if tt.change != nil {
				tt.change(&s, &strategy)
			}
			r := mustRun(t, s, strategy)
			if got := sentAt(r); !slices.Equal(got, tt.sent) {
				t.Errorf("attempts were sent at %v, want %v", got, tt.sent)
			}
			g := r.Groups[0]
			if g.Outcomes[tt.outcome] != 1 || r.Summary.Done != tt.elapsed {
				t.Errorf("outcomes %v after %v, want %s after %v", g.Outcomes, r.Summary.Done, tt.outcome, tt.elapsed)
			}
			if g.Lost != tt.lost || g.Suppressed != tt.suppressed || g.Attempts != g.Succeeded+g.Wasted+g.Lost {
				t.Errorf("%d of %d attempts lost, %d wasted; %d suppressed; want %d lost, %d suppressed",
					g.Lost, g.Attempts, g.Wasted, g.Suppressed, tt.lost, tt.suppressed)
			}
			budget.check(t, len(tt.sent))
		})
	}
}

// check: the budget has heard of each attempt once, and got back what was not sent.
func (b *spy) check(t *testing.T, attempts int) {
	t.Helper()
	var heard []int
	for _, o := range b.heard {
		heard = append(heard, o.Attempt)
	}
	slices.Sort(heard)
	for i, number := range heard {
		if number != i+1 {
			t.Fatalf("the budget heard of the attempts %v, want each of %d once", heard, attempts)
		}
	}
	if len(heard) != attempts || b.granted-b.refunded != attempts-1 {
		t.Errorf("the budget heard of %d attempts and paid for %d, want %d and %d", len(heard), b.granted-b.refunded, attempts, attempts-1)
	}
}

// Attempts that lost are neither a success nor a failure.
func TestBudgetHearsOfLosersLast(t *testing.T) {
	budget := &spy{}
	s, strategy := hedgedCall(Hedging{Kind: HedgeAfter, Delay: sec}, budget)
	s.Servers[0].Latency.Mean = 3 * sec
	mustRun(t, s, strategy)
	want := []grpcretry.Outcome{{Attempt: 1, Result: grpcretry.Succeeded}, {Attempt: 2, Hedge: true, Result: grpcretry.Ignored}}
	if !slices.Equal(budget.heard, want) {
		t.Errorf("the budget heard %v, want %v", budget.heard, want)
	}
}

// watched is a delay that remembers what it was asked and told.
type watched struct {
	grpcretry.HedgeDelay
	off  bool
	said []string
}

func (w *watched) Delay(method string, now time.Time) (time.Duration, bool) {
	w.said = append(w.said, fmt.Sprintf("asked at %v", now.Sub(epoch)))
	d, ok := w.HedgeDelay.Delay(method, now)
	return d, ok && !w.off
}

func (w *watched) Answered(method string, took time.Duration, lost bool, now time.Time) {
	w.said = append(w.said, fmt.Sprintf("%s took %v, lost %v, at %v", method, took, lost, now.Sub(epoch)))
}

// The delay hears of first attempts that succeed, or would have, and of nothing else.
func TestDelayIsToldOfFirstAttempts(t *testing.T) {
	for _, tt := range []struct {
		name   string
		server Server
		off    bool
		want   []string
	}{
		{"an answer before the delay", Server{Latency: Distribution{Mean: sec / 2}}, false, []string{"/sim.Server/ took 500ms, lost false, at 500ms"}},
		{"the first wins after all", Server{Latency: Distribution{Mean: 1500 * ms}}, false, []string{"/sim.Server/ took 1.5s, lost false, at 1.5s"}},
		{"a hedge wins", Server{Outages: []Outage{{For: sec / 2, Silent: true}}}, false, []string{"/sim.Server/ took 1s, lost true, at 1s"}},
		{"a failure, then success", Server{Outages: []Outage{{For: sec / 2}}, Pushback: Pushback{Kind: FixedPushback, Delay: sec}}, false, nil},
		{"a fatal failure of the hedge", Server{Capacity: 0.01, Window: 100 * sec, Latency: Distribution{Mean: 9 * sec}, RejectCode: codes.NotFound}, false, nil},
		{"no delay", Server{Latency: Distribution{Mean: 3 * sec}}, true, []string{"/sim.Server/ took 3s, lost false, at 3s"}},
		{"no delay, and a failure", Server{Outages: []Outage{{For: sec / 2}}}, true, nil},
	} {
		t.Run(tt.name, func(t *testing.T) {
			delay := &watched{HedgeDelay: grpcretry.HedgeAfter(sec), off: tt.off}
			s, strategy := hedgedCall(Hedging{New: func() grpcretry.HedgeDelay { return delay }}, &spy{})
			s.Servers[0] = tt.server
			if err := s.check(&strategy); err != nil {
				t.Fatal(err)
			}
			delay.said = nil
			mustRun(t, s, strategy)
			if want := append([]string{"asked at 0s"}, tt.want...); !slices.Equal(delay.said, want) {
				t.Errorf("the delay heard %q, want %q", delay.said, want)
			}
		})
	}
}

// Where there is no delay, calls are retried as others are, with the policy's own attempts.
func TestCallsWithoutADelayAreRetried(t *testing.T) {
	for attempts, want := range map[int]int{1: 0, 3: 3} {
		budget := &spy{}
		s, strategy := hedgedCall(Hedging{Kind: HedgeAtQuantile, Quantile: 0.9}, budget)
		s.Servers[0].Outages = []Outage{{For: time.Hour}}
		strategy.Policy.MaxAttempts = attempts
		strategy.Policy.Backoff = grpcretry.Constant(sec)
		r := mustRun(t, s, strategy)
		if r.Summary.Attempts != float64(attempts) || r.Summary.Hedges != 0 || len(budget.heard) != want {
			t.Errorf("%d attempts: %v made, %v hedges, the budget heard of %d; want as many, none, %d",
				attempts, r.Summary.Attempts, r.Summary.Hedges, len(budget.heard), want)
		}
	}
}

// The classifier sees of a hedge what it would see of a real one.
func TestClassifierSeesHedges(t *testing.T) {
	s, strategy := hedgedCall(Hedging{Kind: HedgeAfter, Delay: sec, MaxAttempts: 3}, &spy{})
	s.Servers[0] = Server{Capacity: 0.01, Window: 100 * sec, Latency: Distribution{Mean: 9 * sec}}
	s.Network.Mean = 100 * ms
	seen := classify(&strategy)
	mustRun(t, s, strategy)
	if len(*seen) != 2 {
		t.Fatalf("the classifier saw %d attempts, want 2", len(*seen))
	}
	a, b := (*seen)[0], (*seen)[1]
	if a.Number != 2 || !a.Hedge || a.Wait != sec || a.WaitSource.String() != "hedge_delay" || a.Start.Sub(epoch) != sec || a.Duration != 200*ms {
		t.Errorf("second attempt %+v", a)
	}
	if b.Number != 3 || !b.Hedge || b.Wait != 0 || b.WaitSource.String() != "non_fatal" || b.Start.Sub(epoch) != 1200*ms {
		t.Errorf("third attempt %+v", b)
	}
}

// Who gives up takes the server's work away, after the way there, unless the server does
// not look.
func TestLosersAreCancelled(t *testing.T) {
	for _, ignores := range []bool{false, true} {
		s, strategy := hedgedCall(Hedging{Kind: HedgeAfter, Delay: sec}, &spy{})
		s.Network.Mean = 100 * ms
		s.Servers[0] = Server{Capacity: 0.5, Replicas: 2, Latency: Distribution{Mean: 2 * sec}, IgnoresCancel: ignores}
		r := mustRun(t, s, strategy)
		// The first answers at 2.2 s; the second is at work from 1.1 s to 2.3 s, or 3.1 s.
		want, late := (2+1.2)/(2*2.3), 2300*ms
		if ignores {
			want, late = (2+2)/(2*3.1), 3100*ms
		}
		if got := r.Servers[0]; !near(got.Utilisation, want, 1e-9) || r.End != late || got.Late != 1 || got.Workers != 2 {
			t.Errorf("ignores %v: %d workers busy %.4f until %v, %d late; want 2, %.4f, %v, 1", ignores, got.Workers, got.Utilisation, r.End, got.Late, want, late)
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
		s, strategy := hedgedCall(Hedging{Kind: HedgeAfter, Delay: sec, MaxAttempts: 3}, budget)
		s.Groups[0].Strategy = &noRetries
		s.Servers = []Server{{Name: "a", Calls: &Downstream{Target: "b", Strategy: &strategy},
			Outages: []Outage{{From: 1500 * ms, For: sec}}}, {Name: "b"}}
		change(&s)
		r := mustRun(t, s, Strategy{})
		g := r.Downstream[0]
		if g.Calls != 1 || g.Outcomes["cancelled"] != 1 || g.FailedAfter.Max != 1500*ms {
			t.Errorf("%s: %d downstream calls, outcomes %v after %v; want one that is cancelled after 1.5s", name, g.Calls, g.Outcomes, g.FailedAfter.Max)
		}
		if g.Wasted != 1 || g.Lost != g.Attempts-1 {
			t.Errorf("%s: of %d attempts %d failed and %d lost, want the first that is noticed, and the others", name, g.Attempts, g.Wasted, g.Lost)
		}
		budget.check(t, g.Attempts)
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
	if again := mustRun(t, s, strategy); text(t, first) != text(t, again) {
		t.Error("the same seed gives another result: what one run has learnt another knows")
	}
	if first.Summary.Hedges == 0 {
		t.Error("no call is hedged")
	}
}

func TestHedgingIsChecked(t *testing.T) {
	for _, tt := range []struct {
		hedging, want string
	}{
		{`{}`, `strategies[0].hedging.kind is "", want one of ["after" "quantile"]`},
		{`{"kind":"soon"}`, `strategies[0].hedging.kind is "soon", want one of`},
		{`{"kind":"after","delay":"-1s"}`, `strategies[0].hedging.delay is -1s, want 0s to 24h0m0s`},
		{`{"kind":"after","quantile":0.9}`, `strategies[0].hedging.quantile is 0.9, want between 0 and 1 where the kind is "quantile", else 0`},
		{`{"kind":"after","atLeast":"1s"}`, `strategies[0].hedging.atLeast is 1s, want 0 unless the kind is "quantile"`},
		{`{"kind":"after","atMost":"1s"}`, `strategies[0].hedging.atMost is 1s, want 0 unless the kind is "quantile"`},
		{`{"kind":"after","maxAttempts":1}`, `strategies[0].hedging.maxAttempts is 1, want 2 to 1000`},
		{`{"kind":"after","maxAttempts":1001}`, `strategies[0].hedging.maxAttempts is 1001, want 2 to 1000`},
		{`{"kind":"after","nonFatalCodes":["OK"]}`, `hedging: grpcretry: WithPolicy: Hedging: NonFatalCodes: `},
		{`{"kind":"quantile"}`, `strategies[0].hedging.quantile is 0, want between 0 and 1`},
		{`{"kind":"quantile","quantile":1}`, `strategies[0].hedging.quantile is 1, want between 0 and 1`},
		{`{"kind":"quantile","quantile":0.9,"delay":"1s"}`, `strategies[0].hedging.delay is 1s, want 0 unless the kind is "after"`},
		{`{"kind":"quantile","quantile":0.9,"atLeast":"2s","atMost":"1s"}`, `strategies[0].hedging.atMost is 1s, want 0 or at least atLeast`},
		{`{"kind":"after","new":1}`, `strategies[0].hedging.new: there is no such field`},
	} {
		_, err := ReadScenarios(strings.NewReader(`{"groups":[{"clients":1}],"servers":[{}],"strategies":[{"hedging":` + tt.hedging + `}]}`))
		if err == nil || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("hedging %s: %v, want an error with %q", tt.hedging, err, tt.want)
		}
	}
	s := small()
	s.Strategies = []Strategy{{Hedging: &Hedging{Kind: HedgeAfter, New: func() grpcretry.HedgeDelay { return nil }}}}
	if err := s.Check(); err == nil || !strings.Contains(err.Error(), `hedging.kind is "after", want "" where New makes the delay`) {
		t.Errorf("New and a kind: %v", err)
	}
	s.Strategies[0].Hedging.Kind = ""
	if err := s.Check(); err == nil || !strings.Contains(err.Error(), `hedging.new is "without a delay"`) {
		t.Errorf("New without a delay: %v", err)
	}
	s.Strategies = []Strategy{{Policy: grpcretry.Policy{Hedging: &grpcretry.Hedging{Delay: grpcretry.HedgeAfter(0)}}}}
	if err := s.Check(); err == nil || !strings.Contains(err.Error(), `policy.hedging is "set", want none: the hedging of a strategy is beside its policy`) {
		t.Errorf("hedging in the policy: %v", err)
	}
}
