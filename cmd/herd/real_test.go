package main

import (
	"cmp"
	"context"
	"errors"
	"math"
	"net"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/connectivity"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/grpc/test/bufconn"
	"google.golang.org/protobuf/types/known/emptypb"

	"github.com/grpcretry/grpcretry"
	"github.com/grpcretry/grpcretry/cmd/herd/internal/sim"
	"github.com/grpcretry/grpcretry/internal/reasons"
)

// The tests of this file compare simulations with the real interceptors and a real gRPC server, in virtual
// time.

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
			Policy: grpcretry.Policy{MaxAttempts: forever, Backoff: grpcretry.Constant(700 * time.Millisecond)},
			Budget: sim.Budget{Kind: sim.UnlimitedBudget}}},
		{"full jitter", nil, sim.Strategy{
			Policy: grpcretry.Policy{MaxAttempts: forever, Backoff: withoutChance{grpcretry.Exponential{Max: 10 * time.Second}}},
			Budget: sim.Budget{Kind: sim.UnlimitedBudget}}},
		{"decorrelated", nil, sim.Strategy{
			Policy: grpcretry.Policy{MaxAttempts: forever, Backoff: withoutChance{grpcretry.Decorrelated{Max: 10 * time.Second}}},
			Budget: sim.Budget{Kind: sim.UnlimitedBudget}}},
		{"five attempts", nil, sim.Strategy{
			Policy: grpcretry.Policy{MaxAttempts: 5, Backoff: none}, Budget: sim.Budget{Kind: sim.UnlimitedBudget}}},
		{"throttle of each of two processes", func(s *sim.Scenario) {
			// No two attempts at the same moment: of those it would matter which is first.
			s.Groups[0] = sim.Group{Rate: 10, Even: true, Stop: 15 * time.Second, Processes: 2}
		}, sim.Strategy{
			Policy: grpcretry.Policy{MaxAttempts: 3, Backoff: grpcretry.Constant(33 * time.Millisecond)},
			Budget: sim.Budget{Kind: sim.ThrottleBudget, MaxTokens: 40, TokenRatio: 0.5}}},
		{"deadline", func(s *sim.Scenario) { s.Groups[0].Deadline = 13 * time.Second }, sim.Strategy{
			Policy: grpcretry.Policy{MaxAttempts: forever, Backoff: none}, Budget: sim.Budget{Kind: sim.UnlimitedBudget}}},
		{"max elapsed", nil, sim.Strategy{
			Policy: grpcretry.Policy{MaxAttempts: forever, Backoff: none, MaxElapsed: 20 * time.Second},
			Budget: sim.Budget{Kind: sim.UnlimitedBudget}}},
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
			Policy: grpcretry.Policy{MaxAttempts: 9, Backoff: none, AttemptTimeout: 2100 * time.Millisecond},
			Budget: sim.Budget{Kind: sim.UnlimitedBudget}}},
		{"calls that come one by one", func(s *sim.Scenario) {
			s.Groups[0] = sim.Group{Rate: 10, Even: true, Stop: 15 * time.Second}
		}, sim.Strategy{Policy: grpcretry.Policy{Backoff: none}}},
		{"work that takes time", func(s *sim.Scenario) { s.Servers[0].Latency.Mean = 300 * time.Millisecond }, sim.Strategy{
			Policy: grpcretry.Policy{MaxAttempts: forever, Backoff: none}, Budget: sim.Budget{Kind: sim.UnlimitedBudget}}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s := smallOutage()
			tt.strategy.Policy.Patience = noPatience // its waits are random
			if tt.change != nil {
				tt.change(&s)
			}
			want, err := sim.Run(t.Context(), s, tt.strategy, nil)
			if err != nil {
				t.Fatal(err)
			}
			synctest.Test(t, func(t *testing.T) {
				got, err := measure(t.Context(), s, tt.strategy)
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
	after := &sim.Hedging{Kind: sim.HedgeAfter, Delay: 33 * ms, Budget: unlimited}
	immediately := asHedgingPolicy(3, []codes.Code{codes.Unavailable}) // without anything random
	timed, elapsing := immediately, immediately
	timed.AttemptTimeout, elapsing.MaxElapsed = 47*ms, 50*ms
	for _, tt := range []struct {
		name     string
		server   sim.Server
		change   func(*sim.Scenario)
		strategy sim.Strategy
		outcomes []string // that are to occur, so that it is about what it is to be about
	}{
		{"slow answers", sim.Server{Latency: sim.Distribution{Mean: 21 * ms},
			Outages: []sim.Outage{silent(1090*ms, 20*ms), silent(2090*ms, 50*ms), silent(3090*ms, 200*ms)}}, nil,
			sim.Strategy{Policy: immediately, Hedging: after, Budget: unlimited}, []string{"first_try", "hedge_won", "deadline_exceeded"}},
		{"all answers slower than the delay", sim.Server{Latency: sim.Distribution{Mean: 120 * ms}}, nil,
			sim.Strategy{Policy: immediately, Hedging: after, Budget: unlimited}, []string{"first_try"}},
		{"failing answers", sim.Server{Latency: sim.Distribution{Mean: 21 * ms},
			Outages: []sim.Outage{down(1090*ms, 20*ms), silent(2090*ms, 20*ms), down(2120*ms, 20*ms), silent(3090*ms, 50*ms), down(3150*ms,
				20*ms)}}, nil,
			sim.Strategy{Policy: immediately, Hedging: after, Budget: unlimited}, []string{"first_try", "exhausted"}},
		{"hedges that are rejected", narrow(sim.Pushback{}), nil,
			sim.Strategy{Policy: immediately, Hedging: after, Budget: unlimited}, []string{"first_try"}},
		{"hedges that are rejected for good", func() sim.Server {
			s := narrow(sim.Pushback{})
			s.RejectCode = codes.NotFound
			return s
		}(), nil, sim.Strategy{Policy: immediately, Hedging: after, Budget: unlimited}, []string{"not_retryable"}},
		{"own non-fatal codes", narrow(sim.Pushback{}), nil,
			sim.Strategy{Policy: asHedgingPolicy(3, []codes.Code{codes.Internal}), Hedging: &sim.Hedging{Kind: sim.HedgeAfter, Delay: 33 * ms,
				Budget: unlimited}, Budget: unlimited}, []string{"not_retryable"}},
		{"pushback, a wait", narrow(sim.Pushback{Kind: sim.FixedPushback, Delay: 41 * ms}), nil,
			sim.Strategy{Policy: immediately, Hedging: after, Budget: unlimited}, []string{"first_try"}},
		{"pushback, a wait with nothing under way", sim.Server{Outages: []sim.Outage{down(1090*ms, 200*ms)},
			Pushback: sim.Pushback{Kind: sim.FixedPushback, Delay: 150 * ms}}, nil,
			sim.Strategy{Policy: immediately, Hedging: after, Budget: unlimited}, []string{"first_try", "recovered"}},
		{"pushback to stop", narrow(sim.Pushback{Kind: sim.StopPushback}), nil,
			sim.Strategy{Policy: immediately, Hedging: after, Budget: unlimited}, []string{"first_try"}},
		{"a fatal failure that forbids more", func() sim.Server {
			s := narrow(sim.Pushback{Kind: sim.StopPushback})
			s.RejectCode = codes.NotFound
			return s
		}(), nil, sim.Strategy{Policy: immediately, Hedging: after, Budget: unlimited}, []string{"pushback"}},
		{"attempt timeouts", sim.Server{Latency: sim.Distribution{Mean: 21 * ms}, Outages: []sim.Outage{silent(1090*ms, 20*ms),
			silent(2090*ms, 100*ms)}}, nil,
			sim.Strategy{Policy: timed, Hedging: after, Budget: unlimited}, []string{"first_try", "hedge_won"}},
		{"max elapsed", sim.Server{Latency: sim.Distribution{Mean: 120 * ms}}, nil,
			sim.Strategy{Policy: elapsing, Hedging: after, Budget: unlimited}, []string{"first_try"}},
		{"an empty budget", sim.Server{Latency: sim.Distribution{Mean: 121 * ms}}, nil,
			sim.Strategy{Policy: immediately, Hedging: after, Budget: sim.Budget{Kind: sim.RateBudget, PerSecond: 3, Burst: 2}},
			[]string{"first_try"}},
		{"an empty budget, and rejections", narrow(sim.Pushback{}), nil,
			sim.Strategy{Policy: immediately, Hedging: after, Budget: sim.Budget{Kind: sim.ThrottleBudget, MaxTokens: 6, TokenRatio: 0.5}},
			[]string{"first_try"}},
		{"the default budget of two processes", sim.Server{Latency: sim.Distribution{Mean: 151 * ms}}, func(s *sim.Scenario) {
			s.Groups[0].Processes = 2
		}, sim.Strategy{Policy: asHedgingPolicy(9, []codes.Code{codes.Unavailable}), Hedging: &sim.Hedging{Kind: sim.HedgeAfter,
			Delay: 13 * ms}}, []string{"first_try"}},
		{"at a quantile", sim.Server{Latency: sim.Distribution{Mean: 21 * ms}, Outages: []sim.Outage{silent(2090*ms, 20*ms),
			silent(7090*ms, 20*ms), silent(9090*ms, 20*ms), silent(9290*ms, 20*ms)}}, func(s *sim.Scenario) {
			s.Groups[0].Stop = 80 * time.Second
		}, sim.Strategy{Hedging: &sim.Hedging{Kind: sim.HedgeAtQuantile, Quantile: 0.8, Budget: unlimited}, Budget: unlimited},
			[]string{"first_try", "hedge_won", "deadline_exceeded"}},
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
				got, err := measure(t.Context(), s, tt.strategy)
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

// withoutChance is a backoff whose random numbers are always the same.
type withoutChance struct{ grpcretry.Backoff }

func (b withoutChance) Delay(retry int, prev time.Duration, _ float64) time.Duration {
	return b.Backoff.Delay(retry, prev, 0.7)
}

func compareExactly(t *testing.T, got *measurement, want *sim.Result) {
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

// In an outage of two seconds all real calls are saved, with as few attempts as simulated ones. Their waits are
// random, but not their number: a call arrives every 10 ms, so that each wait finds that another attempt has
// failed, until a new call is answered.
func TestSimulationIsAsPatientAsTheInterceptors(t *testing.T) {
	s := sim.Scenario{
		Groups: []sim.Group{{Rate: 100, Even: true, Stop: 6 * time.Second, Deadline: 5 * time.Second}},
		Servers: []sim.Server{{
			Latency: sim.Distribution{Mean: 5 * time.Millisecond},
			Outages: []sim.Outage{{From: time.Second, For: 2 * time.Second}},
		}},
	}
	want, err := sim.Run(t.Context(), s, sim.Strategy{}, nil)
	if err != nil {
		t.Fatal(err)
	}
	synctest.Test(t, func(t *testing.T) {
		got, err := measure(t.Context(), s, sim.Strategy{})
		if err != nil {
			t.Fatal(err)
		}
		if got.failed > 0 || want.Summary.Failed > 0 {
			t.Errorf("%d real and %v simulated calls fail, want none", got.failed, want.Summary.Failed)
		}
		if float64(got.attempts) != want.Summary.Attempts {
			t.Errorf("%d real and %v simulated attempts, want as many", got.attempts, want.Summary.Attempts)
		}
	})
}

// A measurement is what real clients and a real server did.
type measurement struct {
	attempts, succeeded, failed int
	lost                        int // attempts that lost to another attempt of their call
	outcomes                    map[string]int
	latencies                   []time.Duration // of calls that succeeded, sorted
	done                        time.Duration
	offered                     []int // by bucket
}

func (m *measurement) quantile(q float64) time.Duration {
	n := len(m.latencies)
	if n == 0 {
		return 0
	}
	return m.latencies[max(1, int(math.Ceil(q*float64(n)-1e-9)))-1]
}

// A realRun is a gRPC server with one method, which does what its gate decides, and its clients.
type realRun struct {
	listener *bufconn.Listener
	config   sim.Server
	bucket   time.Duration
	start    time.Time
	stopped  chan struct{}

	mu     sync.Mutex // guards what follows
	gate   *sim.Gate
	result measurement
}

const (
	realMethod = "/herd.Real/Call"
	deafKey    = "herd-deaf" // marks clients that ignore pushback
)

// measure runs a scenario with one group and one server until every call is over.
func measure(ctx context.Context, s sim.Scenario, strategy sim.Strategy) (measurement, error) {
	gate, err := sim.NewGate(s.Servers[0])
	if err != nil {
		return measurement{}, err
	}
	r := &realRun{listener: bufconn.Listen(1 << 20), config: s.Servers[0], bucket: cmp.Or(s.Bucket, time.Second), stopped: make(chan struct{}),
		gate: gate, result: measurement{outcomes: map[string]int{}}}
	server := grpc.NewServer(grpc.UnknownServiceHandler(func(_ any, stream grpc.ServerStream) error {
		if err := stream.RecvMsg(&emptypb.Empty{}); err != nil {
			return err
		}
		if err := r.handle(stream.Context()); err != nil {
			return err
		}
		return stream.SendMsg(&emptypb.Empty{})
	}))
	go func() { _ = server.Serve(r.listener) }() // ends with Stop
	defer server.Stop()
	defer close(r.stopped)
	if strategy.IgnorePushback {
		ctx = metadata.AppendToOutgoingContext(ctx, deafKey, "1")
	}
	g := s.Groups[0]
	var conns []*grpc.ClientConn // one for each process
	for range max(1, g.Processes) {
		cc, err := r.connect(ctx, strategy)
		if err != nil {
			return measurement{}, err
		}
		defer cc.Close()
		conns = append(conns, cc)
	}
	r.start = time.Now()
	var all sync.WaitGroup
	for i, at := range beginnings(g) {
		all.Go(func() { r.call(ctx, conns[i%len(conns)], at, g.Deadline) })
	}
	all.Wait()
	r.result.done = time.Since(r.start)
	slices.Sort(r.result.latencies)
	return r.result, nil
}

// beginnings returns the start times of a group's calls.
func beginnings(g sim.Group) []time.Duration {
	if g.Rate == 0 {
		return make([]time.Duration, g.Clients)
	}
	var at []time.Duration
	gap := time.Duration(float64(time.Second) / g.Rate)
	for t := gap; t < g.Stop; t += gap {
		at = append(at, t)
	}
	return at
}

// connect returns the ClientConn of a process, with a Retrier of its own. It waits for the connection: a
// simulated client is connected from the start.
func (r *realRun) connect(ctx context.Context, strategy sim.Strategy) (*grpc.ClientConn, error) {
	policy, err := strategy.Policy, error(nil)
	if policy.Hedging, err = strategy.Hedging.Make(); err != nil {
		return nil, err
	}
	if policy.Budget, err = strategy.Budget.Make(); err != nil {
		return nil, err
	}
	retrier, err := grpcretry.New(grpcretry.WithPolicy(policy), grpcretry.WithObserver(r.observe))
	if err != nil {
		return nil, err
	}
	cc, err := grpc.NewClient("passthrough:///memory", append(retrier.DialOptions(), grpc.WithChainUnaryInterceptor(r.count),
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) { return r.listener.DialContext(ctx) }),
		grpc.WithTransportCredentials(insecure.NewCredentials()))...)
	if err != nil {
		return nil, err
	}
	cc.Connect()
	for state := cc.GetState(); state != connectivity.Ready; state = cc.GetState() {
		if !cc.WaitForStateChange(ctx, state) {
			return nil, ctx.Err()
		}
	}
	return cc, nil
}

func (r *realRun) ask() sim.Answer {
	r.mu.Lock()
	defer r.mu.Unlock()
	at := time.Since(r.start)
	for len(r.result.offered) <= int(at/r.bucket) {
		r.result.offered = append(r.result.offered, 0)
	}
	r.result.offered[at/r.bucket]++
	return r.gate.Admit(at)
}

func (r *realRun) handle(ctx context.Context) error {
	answer := r.ask()
	deaf := len(metadata.ValueFromIncomingContext(ctx, deafKey)) > 0
	switch {
	case answer.Say == sim.SaySilence:
		<-r.stopped // the server is silent even after the deadline
		return status.Error(answer.Code, "the server stops")
	case answer.Say == sim.SayWait && !deaf:
		if err := grpcretry.SetPushback(ctx, answer.Wait); err != nil {
			return err
		}
	case answer.Say == sim.SayNoRetry && !deaf:
		if err := grpcretry.SetNoRetry(ctx); err != nil {
			return err
		}
	}
	if answer.Code != codes.OK {
		return status.Error(answer.Code, "the scenario says so")
	}
	if err := sleep(ctx, r.config.Latency.Mean); err != nil {
		return status.FromContextError(err).Err()
	}
	return nil
}

// sleep lets d pass, and returns early with the error of a context that ends first. It creates no
// timer for a wait that is already over: in a testing/synctest bubble, many of those at the same
// time crash the race detector of Go 1.26.
func sleep(ctx context.Context, d time.Duration) error {
	if d <= 0 {
		return ctx.Err()
	}
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (r *realRun) observe(_ context.Context, e grpcretry.Event) {
	if e.Kind != grpcretry.CallEnd {
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.result.outcomes[reasons.Outcome(e.Err, e.Reason, e.Attempt.Number, e.Attempt.Hedge)]++
	for _, a := range e.Attempts {
		if errors.Is(a.Err, grpcretry.ErrHedgeLost) {
			r.result.lost++
		}
	}
}

// count is chained below the library, so that it sees every attempt.
func (r *realRun) count(
	ctx context.Context,
	method string,
	req, reply any,
	cc *grpc.ClientConn,
	invoker grpc.UnaryInvoker,
	opts ...grpc.CallOption,
) error {
	r.mu.Lock()
	r.result.attempts++
	r.mu.Unlock()
	return invoker(ctx, method, req, reply, cc, opts...)
}

func (r *realRun) call(ctx context.Context, cc *grpc.ClientConn, at, deadline time.Duration) {
	if sleep(ctx, time.Until(r.start.Add(at))) != nil {
		return
	}
	if deadline > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, deadline)
		defer cancel()
	}
	begun := time.Now()
	err := cc.Invoke(ctx, realMethod, &emptypb.Empty{}, &emptypb.Empty{})
	latency := time.Since(begun)
	r.mu.Lock()
	defer r.mu.Unlock()
	if err != nil {
		r.result.failed++
		return
	}
	r.result.succeeded++
	r.result.latencies = append(r.result.latencies, latency)
}
