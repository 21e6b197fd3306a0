package main

import (
	"context"
	"net"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/test/bufconn"

	"github.com/grpcretry/grpcretry"
	"github.com/grpcretry/grpcretry/cmd/herd/internal/sim"
)

// memory is a network within a bubble, where time is virtual too.
type memory struct{}

func (memory) listen() (net.Listener, error) { return bufconn.Listen(1 << 20), nil }

func (memory) dial(l net.Listener, opts ...grpc.DialOption) (*grpc.ClientConn, error) {
	dialer := grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) {
		return l.(*bufconn.Listener).DialContext(ctx)
	})
	return grpc.NewClient("passthrough:///memory", append(opts, dialer)...)
}

// A tenth of the classic outage: a hundred clients, a server of twenty calls a second.
func smallOutage() sim.Scenario {
	return sim.Scenario{
		Name:   "small",
		Groups: []sim.Group{{Name: "clients", Clients: 100}},
		Servers: []sim.Server{{
			Capacity: 20, Window: time.Second,
			Outages: []sim.Outage{{For: 10 * time.Second}},
		}},
	}
}

// Without chance the real interceptors, a real gRPC server and the simulation do the same,
// attempt by attempt: in virtual time there is nothing else between them.
func TestSimulationIsWhatTheInterceptorsDo(t *testing.T) {
	forever := 1_000_000
	none := grpcretry.Exponential{Max: 10 * time.Second, Jitter: grpcretry.NoJitter}
	for _, tt := range []struct {
		name     string
		change   func(*sim.Scenario)
		strategy sim.Strategy
	}{
		{"exponential", nil, sim.Strategy{
			Policy: grpcretry.Policy{MaxAttempts: forever, Backoff: none}, Budget: sim.Budget{Kind: sim.UnlimitedBudget}}},
		{"constant", nil, sim.Strategy{
			Policy: grpcretry.Policy{MaxAttempts: forever, Backoff: grpcretry.Constant(700 * time.Millisecond)}, Budget: sim.Budget{Kind: sim.UnlimitedBudget}}},
		{"five attempts", nil, sim.Strategy{
			Policy: grpcretry.Policy{MaxAttempts: 5, Backoff: none}, Budget: sim.Budget{Kind: sim.UnlimitedBudget}}},
		{"default budget", nil, sim.Strategy{Policy: grpcretry.Policy{MaxAttempts: 20, Backoff: none}}},
		{"throttle of each of two processes", func(s *sim.Scenario) {
			// No two attempts at the same moment: of those it would matter which is first.
			s.Groups[0] = sim.Group{Rate: 10, Even: true, Stop: 15 * time.Second, Processes: 2}
		}, sim.Strategy{
			Policy: grpcretry.Policy{MaxAttempts: 3, Backoff: grpcretry.Constant(33 * time.Millisecond)}, Budget: sim.Budget{Kind: sim.ThrottleBudget, MaxTokens: 40, TokenRatio: 0.5}}},
		{"deadline", func(s *sim.Scenario) { s.Groups[0].Deadline = 13 * time.Second }, sim.Strategy{
			Policy: grpcretry.Policy{MaxAttempts: forever, Backoff: none}, Budget: sim.Budget{Kind: sim.UnlimitedBudget}}},
		{"max elapsed", nil, sim.Strategy{
			Policy: grpcretry.Policy{MaxAttempts: forever, Backoff: none, MaxElapsed: 20 * time.Second}, Budget: sim.Budget{Kind: sim.UnlimitedBudget}}},
		{"pushback, exact", func(s *sim.Scenario) { s.Servers[0].Pushback.Kind = sim.ExactPushback }, sim.Strategy{
			Policy: grpcretry.Policy{MaxAttempts: forever, Backoff: none}, Budget: sim.Budget{Kind: sim.UnlimitedBudget}}},
		{"pushback, a turn for each", func(s *sim.Scenario) { s.Servers[0].Pushback.Kind = sim.SpreadPushback }, sim.Strategy{
			Policy: grpcretry.Policy{MaxAttempts: forever, Backoff: none}, Budget: sim.Budget{Kind: sim.UnlimitedBudget}}},
		{"pushback to stop", func(s *sim.Scenario) { s.Servers[0].Pushback.Kind = sim.StopPushback }, sim.Strategy{
			Policy: grpcretry.Policy{MaxAttempts: forever, Backoff: none}, Budget: sim.Budget{Kind: sim.UnlimitedBudget}}},
		{"pushback, ignored", func(s *sim.Scenario) { s.Servers[0].Pushback.Kind = sim.StopPushback }, sim.Strategy{IgnorePushback: true,
			Policy: grpcretry.Policy{MaxAttempts: forever, Backoff: none}, Budget: sim.Budget{Kind: sim.UnlimitedBudget}}},
		{"silence and attempt timeouts", func(s *sim.Scenario) {
			s.Servers[0].Outages[0].Silent = true
			s.Groups[0].Deadline = 12500 * time.Millisecond
		}, sim.Strategy{
			Policy: grpcretry.Policy{MaxAttempts: 9, Backoff: none, AttemptTimeout: 2100 * time.Millisecond}, Budget: sim.Budget{Kind: sim.UnlimitedBudget}}},
		{"calls that come one by one", func(s *sim.Scenario) {
			s.Groups[0] = sim.Group{Rate: 10, Even: true, Stop: 15 * time.Second}
		}, sim.Strategy{Policy: grpcretry.Policy{Backoff: none}}},
		{"work that takes time", func(s *sim.Scenario) { s.Servers[0].Latency.Mean = 300 * time.Millisecond }, sim.Strategy{
			Policy: grpcretry.Policy{MaxAttempts: forever, Backoff: none}, Budget: sim.Budget{Kind: sim.UnlimitedBudget}}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s := smallOutage()
			if tt.change != nil {
				tt.change(&s)
			}
			want, err := sim.Run(t.Context(), s, tt.strategy, nil)
			if err != nil {
				t.Fatal(err)
			}
			synctest.Test(t, func(t *testing.T) {
				got, err := measure(t.Context(), s, tt.strategy, memory{})
				if err != nil {
					t.Fatal(err)
				}
				compareExactly(t, &got, want)
			})
		})
	}
}

// The same of calls that are hedged. Ten begin each second, so that no two attempts are at the
// same moment; what arrived is compared by hundredths of a second.
func TestSimulationHedgesAsTheInterceptorsDo(t *testing.T) {
	ms := time.Millisecond
	silent := func(from, long time.Duration) sim.Outage { return sim.Outage{From: from, For: long, Silent: true} }
	down := func(from, long time.Duration) sim.Outage { return sim.Outage{From: from, For: long} }
	// narrow takes one attempt in 50 ms, which then takes 120 ms, and rejects others.
	narrow := func(p sim.Pushback) sim.Server {
		return sim.Server{Capacity: 20, Window: 50 * ms, RejectCode: codes.Unavailable, Latency: sim.Distribution{Mean: 120 * ms}, Pushback: p}
	}
	unlimited := sim.Budget{Kind: sim.UnlimitedBudget}
	after := &sim.Hedging{Kind: sim.HedgeAfter, Delay: 33 * ms, MaxAttempts: 3, Budget: unlimited}
	for _, tt := range []struct {
		name     string
		server   sim.Server
		change   func(*sim.Scenario)
		strategy sim.Strategy
		outcomes []string // that are to occur, so that it is about what it is to be about
	}{
		{"slow answers", sim.Server{Latency: sim.Distribution{Mean: 21 * ms},
			Outages: []sim.Outage{silent(1090*ms, 20*ms), silent(2090*ms, 50*ms), silent(3090*ms, 200*ms)}}, nil,
			sim.Strategy{Hedging: after, Budget: unlimited}, []string{"first_try", "hedge_won", "deadline_exceeded"}},
		{"all answers slower than the delay", sim.Server{Latency: sim.Distribution{Mean: 120 * ms}}, nil,
			sim.Strategy{Hedging: after, Budget: unlimited}, []string{"first_try"}},
		{"failing answers", sim.Server{Latency: sim.Distribution{Mean: 21 * ms},
			Outages: []sim.Outage{down(1090*ms, 20*ms), silent(2090*ms, 20*ms), down(2120*ms, 20*ms), silent(3090*ms, 50*ms), down(3150*ms, 20*ms)}}, nil,
			sim.Strategy{Hedging: after, Budget: unlimited}, []string{"first_try", "exhausted"}},
		{"hedges that are rejected", narrow(sim.Pushback{}), nil,
			sim.Strategy{Hedging: after, Budget: unlimited}, []string{"first_try"}},
		{"hedges that are rejected for good", func() sim.Server {
			s := narrow(sim.Pushback{})
			s.RejectCode = codes.NotFound
			return s
		}(), nil, sim.Strategy{Hedging: after, Budget: unlimited}, []string{"not_retryable"}},
		{"own non-fatal codes", narrow(sim.Pushback{}), nil,
			sim.Strategy{Hedging: &sim.Hedging{Kind: sim.HedgeAfter, Delay: 33 * ms, NonFatalCodes: []codes.Code{codes.Internal}, Budget: unlimited}, Budget: unlimited}, []string{"not_retryable"}},
		{"pushback, a wait", narrow(sim.Pushback{Kind: sim.FixedPushback, Delay: 41 * ms}), nil,
			sim.Strategy{Hedging: after, Budget: unlimited}, []string{"first_try"}},
		{"pushback, a wait with nothing under way", sim.Server{Outages: []sim.Outage{down(1090*ms, 200*ms)}, Pushback: sim.Pushback{Kind: sim.FixedPushback, Delay: 150 * ms}}, nil,
			sim.Strategy{Hedging: after, Budget: unlimited}, []string{"first_try", "recovered"}},
		{"pushback to stop", narrow(sim.Pushback{Kind: sim.StopPushback}), nil,
			sim.Strategy{Hedging: after, Budget: unlimited}, []string{"first_try"}},
		{"a fatal failure that forbids more", func() sim.Server {
			s := narrow(sim.Pushback{Kind: sim.StopPushback})
			s.RejectCode = codes.NotFound
			return s
		}(), nil, sim.Strategy{Hedging: after, Budget: unlimited}, []string{"pushback"}},
		{"attempt timeouts", sim.Server{Latency: sim.Distribution{Mean: 21 * ms}, Outages: []sim.Outage{silent(1090*ms, 20*ms), silent(2090*ms, 100*ms)}}, nil,
			sim.Strategy{Policy: grpcretry.Policy{AttemptTimeout: 47 * ms}, Hedging: after, Budget: unlimited}, []string{"first_try", "hedge_won"}},
		{"max elapsed", sim.Server{Latency: sim.Distribution{Mean: 120 * ms}}, nil,
			sim.Strategy{Policy: grpcretry.Policy{MaxElapsed: 50 * ms}, Hedging: after, Budget: unlimited}, []string{"first_try"}},
		{"an empty budget", sim.Server{Latency: sim.Distribution{Mean: 121 * ms}}, nil,
			sim.Strategy{Hedging: after, Budget: sim.Budget{Kind: sim.RateBudget, PerSecond: 3, Burst: 2}}, []string{"first_try"}},
		{"an empty budget, and rejections", narrow(sim.Pushback{}), nil,
			sim.Strategy{Hedging: after, Budget: sim.Budget{Kind: sim.ThrottleBudget, MaxTokens: 6, TokenRatio: 0.5}}, []string{"first_try"}},
		{"the default budget of two processes", sim.Server{Latency: sim.Distribution{Mean: 151 * ms}}, func(s *sim.Scenario) {
			s.Groups[0].Processes = 2
		}, sim.Strategy{Hedging: &sim.Hedging{Kind: sim.HedgeAfter, Delay: 13 * ms, MaxAttempts: 9}}, []string{"first_try"}},
		{"at a quantile", sim.Server{Latency: sim.Distribution{Mean: 21 * ms}, Outages: []sim.Outage{silent(2090*ms, 20*ms), silent(7090*ms, 20*ms), silent(9090*ms, 20*ms), silent(9290*ms, 20*ms)}}, func(s *sim.Scenario) {
			s.Groups[0].Stop = 80 * time.Second
		}, sim.Strategy{Hedging: &sim.Hedging{Kind: sim.HedgeAtQuantile, Quantile: 0.8, Budget: unlimited}, Budget: unlimited}, []string{"first_try", "hedge_won", "deadline_exceeded"}},
		{"at a quantile that is not known yet, without retries", sim.Server{Latency: sim.Distribution{Mean: 21 * ms}, Outages: []sim.Outage{down(2090*ms, 20*ms), down(7090*ms, 20*ms), silent(8090*ms, 20*ms)}}, nil,
			sim.Strategy{Policy: grpcretry.Policy{MaxAttempts: 1}, Hedging: &sim.Hedging{Kind: sim.HedgeAtQuantile, Quantile: 0.8, Budget: unlimited},
				Budget: sim.Budget{Kind: sim.ThrottleBudget, MaxTokens: 2, TokenRatio: 0.1}}, nil},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s := sim.Scenario{
				Bucket:  10 * ms,
				Groups:  []sim.Group{{Rate: 10, Even: true, Stop: 10 * time.Second, Deadline: time.Second}},
				Servers: []sim.Server{tt.server},
			}
			if tt.change != nil {
				tt.change(&s)
			}
			want, err := sim.Run(t.Context(), s, tt.strategy, nil)
			if err != nil {
				t.Fatal(err)
			}
			for _, outcome := range tt.outcomes {
				if want.Groups[0].Outcomes[outcome] == 0 {
					t.Errorf("no outcome is %s: %v", outcome, want.Groups[0].Outcomes)
				}
			}
			if want.Summary.Hedges == 0 && want.Groups[0].Outcomes["recovered"] == 0 {
				t.Error("no attempt is a hedge")
			}
			if tt.outcomes == nil {
				want.Groups[0].Outcomes = nil // of calls that pass straight through there are no events
			}
			synctest.Test(t, func(t *testing.T) {
				got, err := measure(t.Context(), s, tt.strategy, memory{})
				if err != nil {
					t.Fatal(err)
				}
				compareExactly(t, &got, want)
				if got.lost != want.Groups[0].Lost {
					t.Errorf("measured %d attempts that lost, simulated %d", got.lost, want.Groups[0].Lost)
				}
			})
		})
	}
}

func compareExactly(t *testing.T, got *liveResult, want *sim.Result) {
	t.Helper()
	m := want.Summary
	if float64(got.attempts) != m.Attempts || float64(got.succeeded) != m.Succeeded || float64(got.failed) != m.Failed {
		t.Errorf("measured %d attempts, %d succeeded, %d failed; simulated %v, %v, %v",
			got.attempts, got.succeeded, got.failed, m.Attempts, m.Succeeded, m.Failed)
	}
	if got.quantile(0.5) != m.P50 || got.quantile(0.99) != m.P99 || got.done != m.Done {
		t.Errorf("measured p50 %v, p99 %v, done %v; simulated %v, %v, %v",
			got.quantile(0.5), got.quantile(0.99), got.done, m.P50, m.P99, m.Done)
	}
	for outcome, n := range want.Groups[0].Outcomes {
		if got.outcomes[outcome] != n {
			t.Errorf("measured outcomes %v, simulated %v", got.outcomes, want.Groups[0].Outcomes)
			break
		}
	}
	var offered []int
	for _, b := range want.Servers[0].Series {
		offered = append(offered, b.Offered)
	}
	if last := len(got.offered); !slices.Equal(got.offered, offered[:min(last, len(offered))]) {
		t.Errorf("measured attempts by second %v, simulated %v", got.offered, offered)
	}
}

// With chance they agree on average.
func TestSimulationAgreesOnAverage(t *testing.T) {
	s := smallOutage()
	s.Groups[0].Clients, s.Servers[0].Capacity = 300, 60
	for _, strategy := range []sim.Strategy{
		{Name: "full jitter", Policy: grpcretry.Policy{MaxAttempts: 1_000_000, Backoff: grpcretry.Exponential{Max: 10 * time.Second}}, Budget: sim.Budget{Kind: sim.UnlimitedBudget}},
		{Name: "decorrelated", Policy: grpcretry.Policy{MaxAttempts: 1_000_000, Backoff: grpcretry.Decorrelated{Max: 10 * time.Second}}, Budget: sim.Budget{Kind: sim.UnlimitedBudget}},
	} {
		s.Strategies = []sim.Strategy{strategy}
		simulated, err := sim.Compare(t.Context(), s, 20, nil)
		if err != nil {
			t.Fatal(err)
		}
		synctest.Test(t, func(t *testing.T) {
			measured, err := measure(t.Context(), s, strategy, memory{})
			if err != nil {
				t.Fatal(err)
			}
			if apart := apartBy([]liveResult{measured}, simulated); apart > 0.1 {
				t.Errorf("%s: %.1f%% apart, want 10%% at most: %v", strategy.Name, 100*apart, liveTable([]liveResult{measured}, simulated))
			}
		})
	}
}

// All calls of a herd start at the same time in one bubble. With timers of zero duration the race
// detector crashed within a second.
func TestSleepsThatAreOverShareABubble(t *testing.T) {
	for range 50 {
		synctest.Test(t, func(t *testing.T) {
			var all sync.WaitGroup
			for range 1000 {
				all.Go(func() { sleep(t.Context(), 0) })
			}
			all.Wait()
		})
	}
}

func TestTimersAreWatched(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		late := watchTimers()
		time.Sleep(time.Second)
		if got := late(); got != 0 {
			t.Errorf("timers were %v late in virtual time, want 0", got)
		}
	})
}

func TestLiveRefusesWhatItCannotDo(t *testing.T) {
	for name, change := range map[string]func(*sim.Scenario){
		"network":             func(s *sim.Scenario) { s.Network.Mean = time.Second },
		"servers is 2":        func(s *sim.Scenario) { s.Servers = append(s.Servers, sim.Server{Name: "b"}) },
		"replicas":            func(s *sim.Scenario) { s.Servers[0].Replicas = 2 },
		"optimistic":          func(s *sim.Scenario) { s.Servers[0] = sim.Server{Optimistic: true} },
		"strategies is 0":     func(s *sim.Scenario) { s.Strategies = nil },
		"server.window is 0s": func(s *sim.Scenario) { s.Servers[0].Window = 0 },
	} {
		s := smallOutage()
		s.Strategies = []sim.Strategy{{Name: "any"}}
		change(&s)
		if err := canLive(s); err == nil || !contains(err.Error(), name) {
			t.Errorf("canLive = %v, want an error with %q", err, name)
		}
	}
}
