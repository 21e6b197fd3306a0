// Command tail shows what hedging does to slow answers, with real servers on loopback: of
// which one answer in fifty takes twenty times as long as the others. It makes the same
// calls without hedging, with a fixed delay, and with a delay learnt from the answers, and
// prints how long they took and how many more attempts the servers saw. Hedges are paid from
// the default budgets, so the servers see hardly more than a tenth on top: with -one-in 5 that
// is not enough for every slow answer.
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
	echov1 "github.com/grpcretry/grpcretry/proto/echo/v1"
)

// A setting is what is the same for all ways to call.
type setting struct {
	calls    int           // measured, for each way
	workers  int           // that call one after the other
	replicas int           // servers
	usual    time.Duration // that an answer takes
	slow     time.Duration // that one in oneIn takes
	oneIn    int
}

func main() {
	var s setting
	flag.IntVar(&s.calls, "calls", 5000, "calls to measure, for each way to call")
	flag.IntVar(&s.workers, "workers", 8, "goroutines that call, one call after the other")
	flag.IntVar(&s.replicas, "replicas", 3, "servers")
	flag.DurationVar(&s.usual, "usual", 5*time.Millisecond, "time that an answer takes")
	flag.DurationVar(&s.slow, "slow", 100*time.Millisecond, "time that a slow answer takes")
	flag.IntVar(&s.oneIn, "one-in", 50, "one answer in so many is slow")
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

// run prints one line for each way to call.
func run(ctx context.Context, s setting, out io.Writer) error {
	fmt.Fprintf(out, "%d servers on loopback; one answer in %d takes %v, the others %v; %d calls each way, %d at a time\n\n",
		s.replicas, s.oneIn, s.slow, s.usual, s.calls, s.workers)
	table := tabwriter.NewWriter(out, 0, 0, 3, ' ', tabwriter.AlignRight)
	fmt.Fprintln(table, "\tp50\tp99\tp99.9\tp99 of plain\tmore attempts\t")
	var plain time.Duration
	for _, way := range []struct {
		name    string
		hedging *grpcretry.Hedging
	}{
		{"without hedging", nil},
		{fmt.Sprintf("hedge after %v", 2*s.usual), &grpcretry.Hedging{Delay: grpcretry.HedgeAfter(2 * s.usual)}},
		{"hedge at the 0.96-quantile", &grpcretry.Hedging{Delay: grpcretry.HedgeAtQuantile(0.96, 0, 0)}},
	} {
		r, err := s.measure(ctx, way.hedging)
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

// measure makes the calls, after as many as a delay needs that learns from answers.
func (s setting) measure(ctx context.Context, hedging *grpcretry.Hedging) (*result, error) {
	server := &server{setting: s}
	cc, stop, err := s.dial(server, hedging)
	if err != nil {
		return nil, err
	}
	defer stop()
	client := echov1.NewEchoServiceClient(cc)
	for start := time.Now(); time.Since(start) < 2*time.Second; { // a learnt delay is taken up once a second
		if _, err := s.call(ctx, client, 200); err != nil {
			return nil, err
		}
	}
	server.attempts.Store(0)
	took, err := s.call(ctx, client, s.calls)
	if err != nil {
		return nil, err
	}
	slices.Sort(took)
	return &result{took, server.attempts.Load()}, nil
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
func (s setting) dial(server *server, hedging *grpcretry.Hedging) (cc *grpc.ClientConn, stop func(), err error) {
	var replicas []*grpc.Server
	var addresses []resolver.Address
	stopAll := func() {
		for _, replica := range replicas {
			replica.Stop()
		}
	}
	for range s.replicas {
		listener, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			stopAll()
			return nil, nil, err
		}
		replica := grpc.NewServer()
		echov1.RegisterEchoServiceServer(replica, server)
		go func() { _ = replica.Serve(listener) }() // ends with Stop
		replicas = append(replicas, replica)
		addresses = append(addresses, resolver.Address{Addr: listener.Addr().String()})
	}
	known := manual.NewBuilderWithScheme("replicas")
	known.InitialState(resolver.State{Addresses: addresses})
	var opts []grpcretry.Option
	if hedging != nil {
		opts = append(opts, grpcretry.WithMethod(echov1.EchoService_Echo_FullMethodName, grpcretry.WithHedging(*hedging)))
	}
	cc, err = grpc.NewClient("replicas:///echo", append(grpcretry.DialOptions(opts...),
		grpc.WithResolvers(known), grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithDefaultServiceConfig(`{"loadBalancingConfig": [{"round_robin": {}}]}`))...)
	if err != nil {
		stopAll()
		return nil, nil, err
	}
	return cc, func() { cc.Close(); stopAll() }, nil
}

// A server answers as the setting says, for all replicas.
type server struct {
	echov1.UnimplementedEchoServiceServer
	setting  setting
	attempts atomic.Int64
}

func (s *server) Echo(ctx context.Context, req *echov1.EchoRequest) (*echov1.EchoResponse, error) {
	s.attempts.Add(1)
	takes := s.setting.usual
	if rand.IntN(s.setting.oneIn) == 0 {
		takes = s.setting.slow
	}
	select {
	case <-time.After(takes):
		return &echov1.EchoResponse{Message: req.GetMessage()}, nil
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}
