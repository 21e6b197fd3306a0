package sim

import (
	"math"
	"slices"
	"testing"
	"time"

	"google.golang.org/grpc/codes"

	"github.com/grpcretry/grpcretry"
)

// queueing is a load of rate calls a second, as at a counter, on workers of ten milliseconds.
func queueing(rate float64, workers int, shape Shape, queue int, calls int) Scenario {
	return Scenario{
		Groups: []Group{{Rate: rate, Stop: time.Duration(float64(calls) / rate * 1e9)}},
		Servers: []Server{{
			Capacity: 100 * float64(workers),
			Latency:  Distribution{Shape: shape, Mean: 10 * ms},
			Queue:    queue,
		}},
	}
}

var noRetries = Strategy{Policy: grpcretry.Policy{MaxAttempts: 1}}

// Waiting times against the formulas of queueing theory, within 3 %.
func TestServersQueueAsTheoryHasIt(t *testing.T) {
	looksAtFigures(t)
	t.Parallel()
	const mu = 100.0 // calls a second of one worker
	const calls = 120_000
	erlangC := func(c int, offered float64) float64 { // the probability to have to wait
		sum, term := 0.0, 1.0
		for k := range c {
			sum += term
			term *= offered / float64(k+1)
		}
		last := term * float64(c) / (float64(c) - offered)
		return last / (sum + last)
	}
	for _, tt := range []struct {
		name     string
		scenario Scenario
		rho      float64
		wait     float64 // mean in the queue, in seconds
	}{
		{"M/M/1 at 50 %", queueing(50, 1, ExponentialShape, -1, calls), 0.5, 0.5 / (mu - 50)},
		{"M/M/1 at 70 %", queueing(70, 1, ExponentialShape, -1, calls), 0.7, 0.7 / (mu - 70)},
		{"M/D/1 at 70 %", queueing(70, 1, ConstantShape, -1, calls), 0.7, 0.7 / (2 * (mu - 70))},
		{"M/M/3 at 60 %", queueing(180, 3, ExponentialShape, -1, calls), 0.6, erlangC(3, 1.8) / (3*mu - 180)},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			r := mustRun(t, tt.scenario, noRetries)
			got := r.Servers[0]
			if !near(got.MeanWait.Seconds(), tt.wait, 0.03) {
				t.Errorf("mean wait %v, want %.5f s within 3 %%", got.MeanWait, tt.wait)
			}
			if !near(got.Utilisation, tt.rho, 0.01) {
				t.Errorf("utilisation %.4f, want %.2f", got.Utilisation, tt.rho)
			}
			// Little's law, from quantities that are counted separately.
			inside := float64(got.Offered) / r.End.Seconds() * r.Groups[0].Latency.Mean.Seconds()
			if !near(got.MeanInside, inside, 0.001) {
				t.Errorf("%.4f attempts inside, want arrivals × time = %.4f", got.MeanInside, inside)
			}
		})
	}

	// M/M/1 with room for 4 in all: the share that is rejected.
	full := queueing(80, 1, ExponentialShape, 3, calls)
	got := mustRun(t, full, noRetries).Servers[0]
	rho := 0.8
	want := (1 - rho) * math.Pow(rho, 4) / (1 - math.Pow(rho, 5))
	if share := float64(got.Rejected) / float64(got.Offered); !near(share, want, 0.03) {
		t.Errorf("M/M/1/4 rejects %.4f, want %.4f", share, want)
	}

	// M/M/1: times in the system are exponential, so the 99th percentile is ln 100 means.
	r := mustRun(t, queueing(50, 1, ExponentialShape, -1, calls), noRetries)
	if p99, want := r.Summary.P99.Seconds(), math.Log(100)/(mu-50); !near(p99, want, 0.03) {
		t.Errorf("M/M/1 p99 %.4f s, want %.4f", p99, want)
	}
}

func TestServerWithoutLimitOnlyTakesItsTime(t *testing.T) {
	s := small()
	s.Network = Distribution{Mean: 5 * ms}
	s.Servers[0].Latency = Distribution{Mean: 30 * ms}
	if got := mustRun(t, s, noRetries).Summary; got.P50 != 40*ms || got.Longest != 40*ms || got.Succeeded != 3 {
		t.Errorf("latency %v to %v, want 40ms for all", got.P50, got.Longest)
	}
}

// A server that counts takes Capacity in each window of its clock, by then in no order.
func TestServerCounts(t *testing.T) {
	s := small()
	s.Groups[0].Clients = 25
	s.Servers[0].Capacity, s.Servers[0].Window = 10, sec
	r := mustRun(t, s, steady)
	var accepted []int
	for _, b := range r.Servers[0].Series {
		accepted = append(accepted, b.Accepted)
	}
	if !slices.Equal(accepted, []int{10, 10, 5}) {
		t.Errorf("accepted %v, want 10, 10, 5", accepted)
	}
}

func TestServerFailsWhatIsInItWhenItBreaks(t *testing.T) {
	s := small()
	s.Groups[0].Clients = 10
	s.Servers[0].Capacity, s.Servers[0].Queue = 1, 5 // one worker of a second
	s.Servers[0].Outages = []Outage{{From: 1500 * ms, For: sec, Code: codes.Internal}}
	r := mustRun(t, s, noRetries)
	got := r.Servers[0]
	// One is done, one being worked on and four waiting; four found no room.
	if got.Served != 1 || got.Down != 5 || got.Rejected != 4 || r.Summary.Failed != 9 {
		t.Errorf("served %d, down %d, rejected %d, failed calls %v; want 1, 5, 4, 9", got.Served, got.Down, got.Rejected, r.Summary.Failed)
	}
	if want := 1500 * ms; r.Groups[0].FailedAfter.Max != want {
		t.Errorf("the last failed after %v, want %v", r.Groups[0].FailedAfter.Max, want)
	}
}

// A silent server is noticed by the attempt timeout, and at last by the deadline.
func TestSilentOutageRunsIntoTimeouts(t *testing.T) {
	s := small()
	s.Groups[0].Clients, s.Groups[0].Deadline = 1, 5*sec
	s.Servers[0].Outages = []Outage{{For: time.Minute, Silent: true}}
	strategy := steady
	strategy.Policy.AttemptTimeout = sec
	r := mustRun(t, s, strategy)
	// 0-1 s, 2-3 s, 4-5 s: the third attempt is cut by the deadline.
	got := r.Groups[0]
	if got.Attempts != 3 || got.Outcomes["deadline_exceeded"] != 1 || got.FailedAfter.Max != 5*sec {
		t.Errorf("%d attempts, outcomes %v, after %v; want 3, deadline_exceeded, 5s", got.Attempts, got.Outcomes, got.FailedAfter.Max)
	}
	strategy.Policy.MaxAttempts = 2 // the last attempt gets all the time that is left
	r = mustRun(t, s, strategy)
	if got := r.Groups[0]; got.Attempts != 2 || got.FailedAfter.Max != 5*sec {
		t.Errorf("%d attempts, after %v; want 2, the second until the deadline", got.Attempts, got.FailedAfter.Max)
	}
}

// Work for a client that has given up: done all the same, or not.
func TestServerHearsOfCancelling(t *testing.T) {
	for _, ignores := range []bool{false, true} {
		s := small()
		s.Groups[0].Clients, s.Groups[0].Deadline = 4, 1500*ms
		s.Servers[0].Capacity, s.Servers[0].Queue = 1, -1
		s.Servers[0].IgnoresCancel = ignores
		r := mustRun(t, s, noRetries)
		got := r.Servers[0]
		wantEnd := 1500 * ms
		if ignores {
			wantEnd = 4 * sec
		}
		if got.Served != 1 || got.Late != 3 || r.End != wantEnd {
			t.Errorf("ignoring %v: served %d, late %d, work until %v; want 1, 3, %v", ignores, got.Served, got.Late, r.End, wantEnd)
		}
	}
}

func TestDownstreamCallsEndWithTheirCaller(t *testing.T) {
	s := small()
	s.Groups[0].Clients, s.Groups[0].Deadline = 1, 2500*ms
	s.Servers = []Server{
		{Name: "front", Calls: &Downstream{Target: "back", Strategy: &steady}},
		{Name: "back", Outages: []Outage{{For: time.Minute}}},
	}
	strategy := noRetries
	r := mustRun(t, s, strategy)
	// The caller's deadline is the downstream call's too: attempts at 0, 1 and 2 s.
	down := r.Downstream[0]
	if down.Attempts != 3 || down.Outcomes["deadline"] != 1 {
		t.Errorf("downstream: %d attempts, %v; want 3, and none that cannot be in time", down.Attempts, down.Outcomes)
	}
	if got := r.Groups[0]; got.Outcomes["not_retryable"]+got.Outcomes["exhausted"] != 1 || got.FailedAfter.Max != 2*sec {
		t.Errorf("the client's call: %v after %v; want a failure after 2s", got.Outcomes, got.FailedAfter.Max)
	}

	// An attempt timeout of the client's cancels what its attempt waits for. The server knows
	// nothing of it, and the last attempt has none.
	s.Groups[0].Deadline = 10 * sec
	s.Groups[0].Strategy = &Strategy{Policy: grpcretry.Policy{
		MaxAttempts: 2, AttemptTimeout: 1500 * ms, Backoff: grpcretry.Constant(0)}}
	r = mustRun(t, s, strategy)
	if down := r.Downstream[0]; down.Calls != 2 || down.Outcomes["cancelled"] != 1 || down.Outcomes["deadline"] != 1 || down.Attempts != 2+9 {
		t.Errorf(
			"downstream: %d calls with %d attempts, %v; want 2 with 2 and 9, the first cancelled after 1.5s",
			down.Calls,
			down.Attempts,
			down.Outcomes,
		)
	}
}

// A caller that gives up during a wait between two attempts of a downstream call takes it
// with it, and the budget gets its retry back.
func TestCancelledWaitIsRefunded(t *testing.T) {
	s := small()
	s.Groups[0] = Group{Clients: 1}
	var budget grpcretry.Budget
	back := steady
	back.Budget = Budget{New: func() (b grpcretry.Budget, err error) {
		budget, err = grpcretry.NewConcurrencyBudget(1)
		return budget, err
	}}
	s.Servers = []Server{
		{Name: "front", Outages: []Outage{{From: 500 * ms, For: sec}}, Calls: &Downstream{Target: "back", Strategy: &back}},
		{Name: "back", Outages: []Outage{{For: time.Minute}}},
	}
	r := mustRun(t, s, noRetries)
	if got := r.Downstream[0]; got.Outcomes["cancelled"] != 1 || got.Attempts != 1 {
		t.Errorf("downstream: %v after %d attempts, want cancelled after 1", got.Outcomes, got.Attempts)
	}
	if got := budget.Balance(epoch); got != 1 {
		t.Errorf("balance %v, want the retry back", got)
	}
}

func TestServersSayWhenToComeBack(t *testing.T) {
	strategy := persistent("", grpcretry.Constant(100*ms))
	run := func(p Pushback) *Result {
		s := small()
		s.Bucket = 100 * ms
		s.Servers[0].Capacity, s.Servers[0].Window = 2, sec
		s.Servers[0].Outages = []Outage{{For: 2 * sec}}
		s.Servers[0].Pushback = p
		return mustRun(t, s, strategy)
	}
	at := func(r *Result) (at []int) {
		for i, b := range r.Servers[0].Series {
			for range b.Offered {
				at = append(at, 100*i)
			}
		}
		return at
	}
	for _, tt := range []struct {
		name string
		p    Pushback
		want []int // when attempts came, in ms
	}{
		{"fixed", Pushback{Kind: FixedPushback, Delay: 700 * ms}, []int{0, 0, 0, 700, 700, 700, 1400, 1400, 1400, 2100, 2100, 2100, 2800, 3500}},
		{"exact", Pushback{Kind: ExactPushback}, []int{0, 0, 0, 2000, 2000, 2000, 3000}},
		{"spread", Pushback{Kind: SpreadPushback}, []int{0, 0, 0, 2000, 2500, 3000}},
		{"spread at a rate", Pushback{Kind: SpreadPushback, Rate: 5}, []int{0, 0, 0, 2000, 2200, 2400, 3000}},
		{"stop", Pushback{Kind: StopPushback}, []int{0, 0, 0}},
	} {
		if got := at(run(tt.p)); !slices.Equal(got, tt.want) {
			t.Errorf("%s: attempts at %v ms, want %v", tt.name, got, tt.want)
		}
	}
	strategy.IgnorePushback = true
	if got := run(Pushback{Kind: SpreadPushback}); got.Summary.Attempts != 3*20+3+10 {
		t.Errorf("who ignores it makes %v attempts, want one every 100 ms", got.Summary.Attempts)
	}
}

// A rejection costs its share of the work, in both ways to work.
func TestRejectionsCost(t *testing.T) {
	s := small()
	s.Duration = 20 * sec
	s.Groups[0] = Group{Rate: 300, Even: true}
	s.Servers[0].RejectCost = 0.25
	for _, window := range []time.Duration{0, sec} {
		s.Servers[0].Capacity, s.Servers[0].Window = 200, window
		s.Servers[0].Queue = 0
		if window == 0 {
			s.Servers[0].Queue = 10
		}
		// x accepted and 300-x rejected at a quarter each make 200.
		want := (200 - 0.25*300) / 0.75
		got := mustRun(t, s, noRetries).Servers[0]
		if perSecond := float64(got.Accepted) / 20; !near(perSecond, want, 0.02) {
			t.Errorf("window %v: accepted %.1f a second, want %.1f", window, perSecond, want)
		}
	}
}

func TestRingKeepsOrder(t *testing.T) {
	var q ring
	next := int32(0)
	for i := range int32(1000) {
		q.push(i)
		if i%3 == 2 {
			if got := q.pop(); got != next {
				t.Fatalf("pop() = %d, want %d", got, next)
			}
			next++
		}
	}
	for q.len() > 0 {
		if got := q.pop(); got != next {
			t.Fatalf("pop() = %d, want %d", got, next)
		}
		next++
	}
}
