// Command tail shows what hedging does to slow responses, with real servers on loopback. It makes the
// same calls in several ways, and prints how long they took and how many more attempts the servers saw.
//
// In the first table one response in fifty takes twenty times as long as the others, whatever server it
// comes from. The calls are made without hedging, with a fixed delay, and with a delay learnt from the
// responses. Hedges are paid from the default budgets, so the servers see hardly more than a tenth on
// top: with -one-in 5 that is not enough for every slow response.
//
// In the second table one of the servers is always slow. Under round_robin, a hedge meets it again in
// one of three cases; under grpcretry_round_robin it never does. There are no budgets, because the
// default ones do not pay for a hedge of every third call.
package main

import (
	"context"
	"flag"
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"net"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"text/tabwriter"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/resolver"
	"google.golang.org/grpc/resolver/manual"

	"github.com/grpcretry/grpcretry"
	"github.com/grpcretry/grpcretry/balancer"
	echov1 "github.com/grpcretry/grpcretry/proto/echo/v1"
)

// A setting is what is the same for all ways to call.
type setting struct {
	calls    int           // measured, for each way
	workers  int           // that call one after the other
	replicas int           // servers
	usual    time.Duration // that a response takes
	slow     time.Duration // that one in oneIn takes
	oneIn    int
	oneSlow  bool // instead, all responses of one server are slow
}

func main() {
	var s setting
	flag.IntVar(&s.calls, "calls", 5000, "calls to measure, for each way to call")
	flag.IntVar(&s.workers, "workers", 8, "goroutines that call, one call after the other")
	flag.IntVar(&s.replicas, "replicas", 3, "servers")
	flag.DurationVar(&s.usual, "usual", 5*time.Millisecond, "time that a response takes")
	flag.DurationVar(&s.slow, "slow", 100*time.Millisecond, "time that a slow response takes")
	flag.IntVar(&s.oneIn, "one-in", 50, "one response in so many is slow")
	flag.Parse()
	if err := s.check(); err != nil {
		fmt.Fprintln(os.Stderr, "tail:", err)
		os.Exit(2)
	}
	if err := run(context.Background(), s, os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "tail:", err)
		os.Exit(1)
	}
}

func (s setting) check() error {
	for _, field := range []struct {
		name  string
		value int
	}{{"-calls", s.calls}, {"-workers", s.workers}, {"-replicas", s.replicas}, {"-one-in", s.oneIn}} {
		if field.value < 1 {
			return fmt.Errorf("%s is %d, want at least 1", field.name, field.value)
		}
	}
	if s.usual < 0 || s.slow < s.usual {
		return fmt.Errorf("-usual %v and -slow %v, want 0 or more, and the slow not quicker", s.usual, s.slow)
	}
	return nil
}

// A way is how the calls of one line of a table are made.
type way struct {
	name    string
	policy  string // for load balancing
	hedging *grpcretry.Hedging
	learns  bool // the delay, from responses
}

// run prints both tables.
func run(ctx context.Context, s setting, out io.Writer) error {
	const roundRobin = "round_robin"
	after := func(b grpcretry.Budget) *grpcretry.Hedging {
		return &grpcretry.Hedging{Delay: grpcretry.HedgeAfter(2 * s.usual), Budget: b}
	}
	hedged := fmt.Sprintf("hedge after %v", 2*s.usual)
	fmt.Fprintf(out, "%d servers on loopback; one response in %d takes %v, the others %v; %d calls each way, %d at a time\n\n",
		s.replicas, s.oneIn, s.slow, s.usual, s.calls, s.workers)
	err := s.compare(ctx, out, []way{
		{"without hedging", roundRobin, nil, false},
		{hedged, roundRobin, after(nil), false},
		{"hedge at the 0.96-quantile", roundRobin, &grpcretry.Hedging{Delay: grpcretry.HedgeAtQuantile(0.96, 0, 0)}, true},
	})
	if err != nil {
		return err
	}
	s.oneSlow, s.calls = true, max(1, s.calls/5) // each third call takes longer
	fmt.Fprintf(out, "\nThe responses of one server take %v, those of the others %v; %d calls each way\n\n", s.slow, s.usual, s.calls)
	return s.compare(ctx, out, []way{
		{"without hedging, " + roundRobin, roundRobin, nil, false},
		{hedged + ", " + roundRobin, roundRobin, after(grpcretry.Unlimited), false},
		{hedged + ", " + balancer.Name, balancer.Name, after(grpcretry.Unlimited), false},
	})
}

// compare prints one line for each way to call.
func (s setting) compare(ctx context.Context, out io.Writer, ways []way) error {
	table := tabwriter.NewWriter(out, 0, 0, 3, ' ', tabwriter.AlignRight)
	fmt.Fprintln(table, "\tp50\tp99\tp99.9\tp99 of plain\tmore attempts\t")
	var plain time.Duration
	for _, way := range ways {
		r, err := s.measure(ctx, way)
		if err != nil {
			return err
		}
		p99 := r.quantile(0.99)
		if plain == 0 {
			plain = p99
		}
		fmt.Fprintf(table, "%s\t%v\t%v\t%v\t1/%.1f\t%.1f %%\t\n", way.name,
			r.quantile(0.5), p99, r.quantile(0.999), float64(plain)/float64(p99), 100*r.more())
	}
	return table.Flush()
}

// A result is what the calls of one way took, and what the servers saw of them.
type result struct {
	took     []time.Duration // sorted
	attempts int64
}

func (r *result) quantile(q float64) time.Duration {
	return r.took[int(math.Ceil(q*float64(len(r.took))))-1].Round(100 * time.Microsecond)
}

// more is the share of attempts that would not have been without hedging.
func (r *result) more() float64 { return float64(r.attempts)/float64(len(r.took)) - 1 }

// measure makes the calls, after some that are not measured: as many as a delay needs that learns from responses.
func (s setting) measure(ctx context.Context, w way) (*result, error) {
	var attempts atomic.Int64
	cc, stop, err := s.dial(&attempts, w)
	if err != nil {
		return nil, err
	}
	defer stop()
	client := echov1.NewEchoServiceClient(cc)
	for start := time.Now(); ; {
		if _, err := s.call(ctx, client, 200); err != nil {
			return nil, err
		}
		if !w.learns || time.Since(start) > 2*time.Second { // a learnt delay is taken up once a second
			break
		}
	}
	attempts.Store(0)
	took, err := s.call(ctx, client, s.calls)
	if err != nil {
		return nil, err
	}
	slices.Sort(took)
	return &result{took, attempts.Load()}, nil
}

// call makes calls from all workers and returns what each took.
func (s setting) call(ctx context.Context, client echov1.EchoServiceClient, calls int) ([]time.Duration, error) {
	took := make([]time.Duration, calls)
	var next atomic.Int64
	var failed atomic.Pointer[error]
	var workers sync.WaitGroup
	for range s.workers {
		workers.Go(func() {
			for i := next.Add(1) - 1; i < int64(calls); i = next.Add(1) - 1 {
				start := time.Now()
				if _, err := client.Echo(ctx, &echov1.EchoRequest{Message: "hello"}); err != nil {
					failed.Store(&err)
					return
				}
				took[i] = time.Since(start)
			}
		})
	}
	workers.Wait()
	if err := failed.Load(); err != nil {
		return nil, *err
	}
	return took, nil
}

// dial starts the replicas and connects to all of them, in turn.
func (s setting) dial(attempts *atomic.Int64, w way) (cc *grpc.ClientConn, stop func(), err error) {
	var replicas []*grpc.Server
	var addresses []resolver.Address
	stopAll := func() {
		for _, replica := range replicas {
			replica.Stop()
		}
	}
	for n := range s.replicas {
		listener, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			stopAll()
			return nil, nil, err
		}
		replica := grpc.NewServer()
		echov1.RegisterEchoServiceServer(replica, &server{setting: s, slow: s.oneSlow && n == 0, attempts: attempts})
		go func() { _ = replica.Serve(listener) }() // ends with Stop
		replicas = append(replicas, replica)
		addresses = append(addresses, resolver.Address{Addr: listener.Addr().String()})
	}
	known := manual.NewBuilderWithScheme("replicas")
	known.InitialState(resolver.State{Addresses: addresses})
	var opts []grpcretry.Option
	if w.hedging != nil {
		opts = append(opts, grpcretry.WithMethod(echov1.EchoService_Echo_FullMethodName, grpcretry.WithHedging(*w.hedging)))
		if w.hedging.Budget != nil {
			opts = append(opts, grpcretry.WithBudget(w.hedging.Budget))
		}
	}
	cc, err = grpc.NewClient("replicas:///echo", append(grpcretry.DialOptions(opts...),
		grpc.WithResolvers(known), grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithDefaultServiceConfig(`{"loadBalancingConfig": [{"`+w.policy+`": {}}]}`))...)
	if err != nil {
		stopAll()
		return nil, nil, err
	}
	return cc, func() { cc.Close(); stopAll() }, nil
}

// A server is one of the replicas.
type server struct {
	echov1.UnimplementedEchoServiceServer
	setting  setting
	slow     bool
	attempts *atomic.Int64 // of all replicas
}

func (s *server) Echo(ctx context.Context, req *echov1.EchoRequest) (*echov1.EchoResponse, error) {
	s.attempts.Add(1)
	takes := s.setting.usual
	if s.slow || !s.setting.oneSlow && rand.IntN(s.setting.oneIn) == 0 {
		takes = s.setting.slow
	}
	select {
	case <-time.After(takes):
		return &echov1.EchoResponse{Message: req.GetMessage()}, nil
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}
