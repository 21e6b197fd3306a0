package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"net"
	"slices"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/connectivity"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/emptypb"

	"github.com/grpcretry/grpcretry"
	"github.com/grpcretry/grpcretry/cmd/herd/internal/sim"
)

// This file runs a scenario with a real gRPC server and the library's real interceptors, in real
// time, to compare the simulation with it. The server asks the same sim.Gate as the simulated one;
// everything between the caller and the handler is gRPC and the library.

// A network is how the live clients reach their server.
type network interface {
	listen() (net.Listener, error)
	dial(l net.Listener, opts ...grpc.DialOption) (*grpc.ClientConn, error)
}

// loopback is TCP on this machine.
type loopback struct{}

func (loopback) listen() (net.Listener, error) { return net.Listen("tcp", "127.0.0.1:0") }

func (loopback) dial(l net.Listener, opts ...grpc.DialOption) (*grpc.ClientConn, error) {
	return grpc.NewClient("passthrough:///"+l.Addr().String(), opts...)
}

// tooMany attempts a second are more than one process can make on today's machines.
const tooMany = 20_000

// goLive runs the first scenario of a study, all its strategies at the same time, and prints the
// measured figures beside the simulated ones.
func (o *options) goLive(ctx context.Context, study sim.Study, w io.Writer) error {
	s := study.Scenarios[0]
	if err := canLive(s); err != nil {
		return fmt.Errorf("-live: scenario %s: %w", s.Name, err)
	}
	simulated, err := simulatedFor(ctx, &s, w)
	if err != nil {
		return err
	}
	out := &report{w: w}
	out.printf("%s: %s\n%d strategies with real gRPC, all at the same time, for about %s …\n\n",
		s.Name, s.Title, len(s.Strategies), shortTime(longestOf(simulated)))
	measured := make([]liveResult, len(s.Strategies))
	late := watchTimers()
	var all sync.WaitGroup
	errs := make([]error, len(s.Strategies))
	for i, strategy := range s.Strategies {
		all.Go(func() { measured[i], errs[i] = measure(ctx, s, strategy, loopback{}) })
	}
	all.Wait()
	lateness := late()
	if err := errors.Join(errs...); err != nil {
		return err
	}
	if ctx.Err() != nil {
		out.printf("Stopped before the end. The measurements so far:\n")
	}
	out.table(liveTable(measured, simulated))
	apart := apartBy(measured, simulated)
	out.printf("\nThe largest difference is %.1f%%. Timers were up to %s late.\n", 100*apart, shortTime(lateness))
	switch {
	case out.err != nil || ctx.Err() != nil:
		return errors.Join(out.err, ctx.Err())
	case apart > 0.1 && lateness > tooLate:
		return fmt.Errorf("-live: measured and simulated figures differ by more than 10%%, but this machine is too busy to tell: timers were up to %v late", lateness.Round(time.Millisecond))
	case apart > 0.1:
		return fmt.Errorf("-live: measured and simulated figures differ by more than 10%%")
	}
	return nil
}

// tooLate is how late a timer may be on a machine that can measure this: clients that retry in
// lockstep, at 12.7 s, must all arrive before the second is over.
const tooLate = 150 * time.Millisecond

// watchTimers measures how late timers fire, until the returned function is called, which returns
// the worst.
func watchTimers() (worst func() time.Duration) {
	const every = 5 * time.Millisecond
	done := make(chan struct{})
	found := make(chan time.Duration)
	go func() {
		var late time.Duration
		timer := time.NewTimer(every)
		defer timer.Stop()
		for due := time.Now().Add(every); ; due = time.Now().Add(every) {
			timer.Reset(every)
			select {
			case <-timer.C:
				late = max(late, time.Since(due))
			case <-done:
				found <- late
				return
			}
		}
	}()
	return func() time.Duration {
		close(done)
		return <-found
	}
}

// simulatedFor simulates every strategy with 20 seeds, and removes those from the scenario that this
// machine cannot keep up with.
func simulatedFor(ctx context.Context, s *sim.Scenario, w io.Writer) ([]sim.Comparison, error) {
	first, err := sim.Compare(ctx, *s, 1, nil)
	if err != nil {
		return nil, err
	}
	var kept []sim.Strategy
	for i, c := range first {
		if c.Mean.Peak > tooMany && len(first) > 1 {
			fmt.Fprintf(w, "Leaving out %s: it would need %s attempts a second.\n", c.Strategy, grouped(c.Mean.Peak))
			continue
		}
		kept = append(kept, s.Strategies[i])
	}
	s.Strategies = kept
	return sim.Compare(ctx, *s, 20, nil)
}

func longestOf(found []sim.Comparison) (d time.Duration) {
	for _, c := range found {
		d = max(d, c.Mean.Done)
	}
	return d
}

// canLive returns an error for scenarios that real gRPC on loopback cannot reproduce.
func canLive(s sim.Scenario) error {
	switch {
	case len(s.Servers) != 1:
		return fmt.Errorf("servers is %d, want one", len(s.Servers))
	case s.Servers[0].Optimistic:
		return fmt.Errorf("servers[0].optimistic is true, want false")
	case s.Servers[0].Replicas > 1:
		return fmt.Errorf("servers[0].replicas is %d, want one", s.Servers[0].Replicas)
	case s.Network != (sim.Distribution{}):
		return fmt.Errorf("network is %v, want 0s: loopback has a delay of its own", s.Network.Mean)
	case len(s.Strategies) == 0:
		return fmt.Errorf("strategies is 0, want at least one")
	}
	_, err := sim.NewGate(s.Servers[0])
	return err
}

// A liveResult is the measurement of one strategy.
type liveResult struct {
	attempts, succeeded, failed int
	lost                        int // attempts that lost to another attempt of their call
	outcomes                    map[string]int
	latencies                   []time.Duration // of calls that succeeded, sorted
	done                        time.Duration
	offered                     []int // by bucket
}

func (r *liveResult) wasted() int { return r.attempts - r.succeeded - r.lost }

func (r *liveResult) quantile(q float64) time.Duration {
	n := len(r.latencies)
	if n == 0 {
		return 0
	}
	return r.latencies[max(1, int(math.Ceil(q*float64(n)-1e-9)))-1]
}

// measure runs a scenario under one strategy until every call is over.
func measure(ctx context.Context, s sim.Scenario, strategy sim.Strategy, n network) (liveResult, error) {
	server, err := startServer(s, n)
	if err != nil {
		return liveResult{}, err
	}
	defer server.stop()
	clients := &liveClients{result: liveResult{outcomes: map[string]int{}}}
	defer clients.close()
	for _, g := range s.Groups {
		own := strategy
		if g.Strategy != nil {
			own = *g.Strategy
		}
		if err := clients.add(ctx, g, own, server, n); err != nil {
			return liveResult{}, err
		}
	}
	clients.run(ctx, server.begin())
	slices.Sort(clients.result.latencies)
	clients.result.offered = server.series()
	return clients.result, nil
}

// A liveServer is a gRPC server with one method, which does what its gate decides.
type liveServer struct {
	listener net.Listener
	server   *grpc.Server
	config   sim.Server
	bucket   time.Duration
	stopped  chan struct{} // closed by stop

	mu      sync.Mutex // held to ask the gate: it is not safe for concurrent use
	start   time.Time  // guarded by mu
	gate    *sim.Gate  // guarded by mu
	offered []int      // guarded by mu; by bucket
}

const (
	liveMethod = "/herd.Live/Call"
	deafKey    = "herd-deaf" // marks clients that ignore pushback
)

func startServer(s sim.Scenario, n network) (*liveServer, error) {
	gate, err := sim.NewGate(s.Servers[0])
	if err != nil {
		return nil, err
	}
	l, err := n.listen()
	if err != nil {
		return nil, err
	}
	server := &liveServer{listener: l, server: grpc.NewServer(), config: s.Servers[0], bucket: s.Bucket,
		stopped: make(chan struct{}), gate: gate, start: time.Now()}
	if server.bucket == 0 {
		server.bucket = time.Second
	}
	server.server.RegisterService(&grpc.ServiceDesc{
		ServiceName: "herd.Live",
		HandlerType: (*any)(nil),
		Methods: []grpc.MethodDesc{{MethodName: "Call", Handler: func(_ any, ctx context.Context, decode func(any) error, _ grpc.UnaryServerInterceptor) (any, error) {
			if err := decode(&emptypb.Empty{}); err != nil {
				return nil, err
			}
			return &emptypb.Empty{}, server.handle(ctx)
		}}},
	}, struct{}{})
	go func() { _ = server.server.Serve(l) }() // ends with stop
	return server, nil
}

// begin starts the scenario now.
func (s *liveServer) begin() time.Time {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.start = time.Now()
	return s.start
}

func (s *liveServer) ask() sim.Answer {
	s.mu.Lock()
	defer s.mu.Unlock()
	at := time.Since(s.start)
	for len(s.offered) <= int(at/s.bucket) {
		s.offered = append(s.offered, 0)
	}
	s.offered[at/s.bucket]++
	return s.gate.Admit(at)
}

func (s *liveServer) handle(ctx context.Context) error {
	answer := s.ask()
	deaf := len(metadata.ValueFromIncomingContext(ctx, deafKey)) > 0
	switch {
	case answer.Say == sim.SaySilence:
		<-s.stopped // the server is silent even after the deadline
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
	if err := sleep(ctx, s.config.Latency.Mean); err != nil { // other shapes have the same mean
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

func (s *liveServer) series() []int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.offered)
}

func (s *liveServer) stop() {
	close(s.stopped)
	s.server.Stop()
}

// liveClients make the calls, each group's through ClientConns and Retriers of its own.
type liveClients struct {
	conns []*grpc.ClientConn
	calls []liveCall

	mu     sync.Mutex // held to add to the result
	result liveResult // guarded by mu
}

type liveCall struct {
	cc       *grpc.ClientConn
	at       time.Duration
	deadline time.Duration
	deaf     bool
}

// add creates the ClientConns of a group, one for each of its processes, and waits until they are
// connected: a simulated client is connected from the start.
func (c *liveClients) add(ctx context.Context, g sim.Group, strategy sim.Strategy, server *liveServer, n network) error {
	var conns []*grpc.ClientConn
	for range max(1, g.Processes) {
		retrier, err := c.retrier(strategy)
		if err != nil {
			return err
		}
		cc, err := n.dial(server.listener, append(retrier.DialOptions(), grpc.WithChainUnaryInterceptor(c.count),
			grpc.WithTransportCredentials(insecure.NewCredentials()))...)
		if err != nil {
			return err
		}
		conns = append(conns, cc)
		c.conns = append(c.conns, cc)
		cc.Connect()
		for state := cc.GetState(); state != connectivity.Ready; state = cc.GetState() {
			if !cc.WaitForStateChange(ctx, state) {
				return ctx.Err()
			}
		}
	}
	for i, at := range beginnings(g) {
		c.calls = append(c.calls, liveCall{conns[i%len(conns)], at, g.Deadline, strategy.IgnorePushback})
	}
	return nil
}

// beginnings returns the start times of a group's calls. Times that the simulation draws at random
// are spread evenly here, which is the same on average.
func beginnings(g sim.Group) (at []time.Duration) {
	if g.Rate > 0 {
		gap := time.Duration(float64(time.Second) / g.Rate)
		for t := g.Start + gap; t < g.Stop; t += gap {
			at = append(at, t)
		}
		return at
	}
	for i := range g.Clients {
		at = append(at, g.Start+time.Duration(float64(g.Spread)*float64(i)/float64(g.Clients)))
	}
	return at
}

func (c *liveClients) retrier(strategy sim.Strategy) (*grpcretry.Retrier, error) {
	policy, err := strategy.Policy, error(nil)
	if policy.Hedging, err = strategy.Hedging.Make(); err != nil {
		return nil, err
	}
	opts := []grpcretry.Option{grpcretry.WithPolicy(policy), grpcretry.WithObserver(c.observe)}
	budget, err := strategy.Budget.Make()
	if err != nil {
		return nil, err
	}
	if budget != nil {
		opts = append(opts, grpcretry.WithBudget(budget))
	}
	return grpcretry.New(opts...)
}

func (c *liveClients) observe(_ context.Context, e grpcretry.Event) {
	if e.Kind != grpcretry.CallEnd {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.result.outcomes[e.Outcome()]++
	for _, a := range e.Attempts {
		if errors.Is(a.Err, grpcretry.ErrHedgeLost) {
			c.result.lost++
		}
	}
}

// count is chained below the library, so that it sees every attempt.
func (c *liveClients) count(ctx context.Context, method string, req, reply any, cc *grpc.ClientConn, invoker grpc.UnaryInvoker, opts ...grpc.CallOption) error {
	c.mu.Lock()
	c.result.attempts++
	c.mu.Unlock()
	return invoker(ctx, method, req, reply, cc, opts...)
}

// run makes all calls, and waits for them.
func (c *liveClients) run(ctx context.Context, start time.Time) {
	var all sync.WaitGroup
	for _, one := range c.calls {
		all.Go(func() { c.call(ctx, one, start) })
	}
	all.Wait()
	c.result.done = time.Since(start)
}

func (c *liveClients) call(ctx context.Context, one liveCall, start time.Time) {
	if sleep(ctx, time.Until(start.Add(one.at))) != nil {
		return
	}
	if one.deadline > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, one.deadline)
		defer cancel()
	}
	if one.deaf {
		ctx = metadata.AppendToOutgoingContext(ctx, deafKey, "1")
	}
	begun := time.Now()
	err := one.cc.Invoke(ctx, liveMethod, &emptypb.Empty{}, &emptypb.Empty{})
	latency := time.Since(begun)
	c.mu.Lock()
	defer c.mu.Unlock()
	if err != nil {
		c.result.failed++
		return
	}
	c.result.succeeded++
	c.result.latencies = append(c.result.latencies, latency)
}

func (c *liveClients) close() {
	for _, cc := range c.conns {
		_ = cc.Close() // nothing is left to lose
	}
}

// liveFigures are the figures of a measurement that are compared with those of a simulation.
var liveFigures = []struct {
	name      string
	measured  func(*liveResult) float64
	simulated func(sim.Summary) float64
	show      func(float64) string
}{
	{"wasted", func(r *liveResult) float64 { return float64(r.wasted()) }, func(s sim.Summary) float64 { return s.Wasted }, grouped},
	{"p50", func(r *liveResult) float64 { return r.quantile(0.5).Seconds() }, func(s sim.Summary) float64 { return s.P50.Seconds() }, inSeconds},
	{"p99", func(r *liveResult) float64 { return r.quantile(0.99).Seconds() }, func(s sim.Summary) float64 { return s.P99.Seconds() }, inSeconds},
	{"done", func(r *liveResult) float64 { return r.done.Seconds() }, func(s sim.Summary) float64 { return s.Done.Seconds() }, inSeconds},
}

func inSeconds(v float64) string { return shortTime(time.Duration(v * float64(time.Second))) }

func liveTable(measured []liveResult, simulated []sim.Comparison) [][]string {
	head := []string{"strategy", "succeeded"}
	for _, f := range liveFigures {
		head = append(head, f.name+": measured", "simulated", "apart")
	}
	table := [][]string{head}
	for i := range measured {
		line := []string{simulated[i].Strategy, grouped(float64(measured[i].succeeded))}
		for _, f := range liveFigures {
			m, s := f.measured(&measured[i]), f.simulated(simulated[i].Mean)
			line = append(line, f.show(m), f.show(s), fmt.Sprintf("%+.1f%%", 100*difference(m, s)))
		}
		table = append(table, line)
	}
	return table
}

// apartBy returns the largest difference, as a share.
func apartBy(measured []liveResult, simulated []sim.Comparison) (largest float64) {
	for i := range measured {
		for _, f := range liveFigures {
			largest = max(largest, math.Abs(difference(f.measured(&measured[i]), f.simulated(simulated[i].Mean))))
		}
	}
	return largest
}

func difference(measured, simulated float64) float64 {
	if measured == simulated {
		return 0
	}
	return (measured - simulated) / max(simulated, 1e-9)
}
