package sim

import (
	"math"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"

	"github.com/grpcretry/grpcretry"
	"github.com/grpcretry/grpcretry/internal/inside"
)

// The balance against a window that remembers every call, within what the calls of two steps earn.
func TestFinagleBudgetIsASlidingWindow(t *testing.T) {
	random := newRandom(1, forJitter)
	for _, quiet := range []time.Duration{100 * ms, 3 * sec, 40 * sec} { // between two looks, at most
		b := newFinagleBudget(0.2, 2, 10*sec)
		at := epoch
		var calls, retries []time.Time
		for range 2000 {
			at = at.Add(time.Duration(random.Int64N(int64(10 * ms))))
			b.Deposit(grpcretry.Outcome{Attempt: 1, Result: grpcretry.Result(random.IntN(4))}) // every call counts
			b.Deposit(grpcretry.Outcome{Attempt: 2})                                           // retries do not
			calls = append(calls, at)
			if random.IntN(5) > 0 {
				continue
			}
			if b.Withdraw(at) {
				retries = append(retries, at)
			}
			want := 2*10.0 + 0.2*float64(since(calls, at.Add(-10*sec))) - float64(since(retries, at.Add(-10*sec)))
			if got := b.Balance(at); math.Abs(got-max(0, want)) > 0.2*220+1 {
				t.Fatalf("after %v the balance is %v, want about %v", at.Sub(epoch), got, want)
			}
			if random.IntN(50) == 0 {
				at = at.Add(time.Duration(random.Int64N(int64(quiet))))
			}
		}
	}
}

func since(times []time.Time, from time.Time) (n int) {
	for _, at := range times {
		if !at.Before(from) {
			n++
		}
	}
	return n
}

func TestFinagleBudgetRefusesAndTakesBack(t *testing.T) {
	b := newFinagleBudget(0.5, 0.1, 10*sec)
	if !b.Withdraw(epoch) || b.Withdraw(epoch) {
		t.Error("want the one retry of the floor, and no more")
	}
	b.Deposit(grpcretry.Outcome{Attempt: 2, Result: grpcretry.Unsent})
	if got := b.Balance(epoch); got != 1 {
		t.Errorf("balance %v after a refund, want 1", got)
	}
	if !b.Withdraw(epoch) || b.Balance(epoch.Add(11*sec)) != 1 {
		t.Errorf("balance %v a window later, want the floor again", b.Balance(epoch.Add(11*sec)))
	}
}

// An attempt that outlives its timeout is cut if a retry follows, and earns nothing else.
func TestLateAttemptsEarnNothing(t *testing.T) {
	for _, tt := range []struct {
		name     string
		refuse   bool
		attempts int
		want     []grpcretry.Outcome // the last of them late
	}{
		{"a retry follows, and is the last", false, 2,
			[]grpcretry.Outcome{{Attempt: 1, Result: grpcretry.Failed}, {Attempt: 2, Result: grpcretry.Succeeded}}},
		{"the budget is empty", true, 1, []grpcretry.Outcome{{Attempt: 1, Result: grpcretry.Succeeded}}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			budget := &spy{refuse: tt.refuse}
			s := small()
			s.Groups[0] = Group{Clients: 1, Deadline: 10 * sec}
			s.Servers[0].Latency.Mean = 3 * sec
			r := mustRun(t, s, Strategy{
				Policy: grpcretry.Policy{MaxAttempts: 2, AttemptTimeout: sec, Backoff: grpcretry.Constant(0)},
				Budget: Budget{New: func() (grpcretry.Budget, error) { return budget, nil }},
			})
			same := slices.EqualFunc(budget.heard, tt.want, func(got, want grpcretry.Outcome) bool {
				return got.Attempt == want.Attempt && got.Hedge == want.Hedge && got.Result == want.Result &&
					inside.IsLate(got) == (got.Attempt == tt.attempts)
			})
			if r.Summary.Succeeded != 1 || r.Groups[0].Attempts != tt.attempts || !same {
				t.Errorf("%v succeeded after %d attempts, reported %v; want 1 after %d, %v",
					r.Summary.Succeeded, r.Groups[0].Attempts, budget.heard, tt.attempts, tt.want)
			}
		})
	}
}

// An outage of one replica is nothing to the others.
func TestOutageOfOneReplica(t *testing.T) {
	s := small()
	s.Groups[0] = Group{Rate: 30, Even: true, Stop: 10 * sec}
	s.Servers[0] = Server{
		Capacity:   30,
		Replicas:   3,
		Queue:      -1,
		Latency:    Distribution{Mean: 100 * ms},
		RejectCode: codes.Unavailable,
		Outages: []Outage{
			{Replica: 2, From: 2 * sec, For: 3 * sec},
			{Replica: 3, From: 4 * sec, For: 2 * sec, Left: 0.5},
			{From: 8 * sec, For: sec},
		},
	}
	r := mustRun(t, s, noRetries)
	for i, b := range r.Servers[0].Series {
		down, up := 0, 1.0
		switch i {
		case 2, 3:
			down, up = 10, 2.0/3
		case 4:
			down, up = 10, 0.5
		case 5:
			up = 5.0 / 6
		case 8:
			down, up = 30, 0
		}
		// Those at work when the outage begins fail too.
		if b.Down < down || b.Down > down+5 || math.Abs(b.Capacity-90*up) > 1e-6 {
			t.Errorf("second %d: %d failed by an outage, capacity %v; want %d or a few more, %v", i, b.Down, b.Capacity, down, 90*up)
		}
		if got := s.Servers[0].Up(time.Duration(i)*sec, time.Duration(i+1)*sec); math.Abs(got-up) > 1e-9 {
			t.Errorf("second %d: up %v, want %v", i, got, up)
		}
	}
	for _, tt := range []struct {
		outages []Outage
		want    string
	}{
		{[]Outage{{Replica: 4, For: sec}}, `servers[0].outages[0].replica is 4, want 0 (all) to 3`},
		{[]Outage{{Replica: 1, For: 2 * sec}, {From: sec, For: sec}}, `servers[0].outages[1].from is 1s, want 2s to`},
		{[]Outage{{For: 2 * sec}, {Replica: 1, From: sec, For: sec}}, `servers[0].outages[1].from is 1s, want 2s to`},
		{[]Outage{{Replica: 2, For: 2 * sec}, {Replica: 1, From: sec, For: sec}}, ``},
	} {
		s.Servers[0].Outages = tt.outages
		if err := s.Check(); (err == nil) != (tt.want == "") || err != nil && !strings.Contains(err.Error(), tt.want) {
			t.Errorf("outages %+v: %v, want %q", tt.outages, err, tt.want)
		}
	}
}
