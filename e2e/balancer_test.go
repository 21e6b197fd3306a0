//go:build e2e

package e2e

import (
	"context"
	"fmt"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/resolver"
	"google.golang.org/grpc/resolver/manual"
	"google.golang.org/grpc/status"

	"github.com/grpcretry/grpcretry"
	"github.com/grpcretry/grpcretry/balancer"
	echov1 "github.com/grpcretry/grpcretry/proto/echo/v1"
)

// With one of three replicas failing every call, a retry under round_robin meets the bad replica again in
// one of three cases. Under grpcretry_round_robin it never does before the others were tried. The
// replicas are real servers on the loopback interface, and 16 goroutines call at the same time.
func TestRetriesMeetOtherReplicas(t *testing.T) {
	const workers, calls = 16, 3000
	for _, policy := range []string{"round_robin", balancer.Name} {
		t.Run(policy, func(t *testing.T) {
			replicas := &replicas{visits: map[string][]int{}}
			client := replicas.dial(t, 3, policy)
			var all sync.WaitGroup
			for worker := range workers {
				all.Go(func() {
					for call := worker; call < calls; call += workers {
						if _, err := client.Echo(t.Context(), &echov1.EchoRequest{Message: fmt.Sprint(call)}); err != nil {
							t.Error(err)
						}
					}
				})
			}
			all.Wait()
			retried, again := replicas.count()
			share := float64(again) / float64(retried)
			t.Logf("%s: %d of %d calls met the bad replica first; %d of their retries met it again (%.1f%%)", policy, retried, calls,
				again, 100*share)
			switch {
			case retried < calls/5:
				t.Errorf("only %d calls met the bad replica, want about a third", retried)
			case policy == balancer.Name && again > 0:
				t.Errorf("%d retries met the bad replica again, want none", again)
			case policy != balancer.Name && (share < 0.2 || share > 0.5):
				t.Errorf("%.1f%% of the retries met the bad replica again, want about a third", 100*share)
			}
		})
	}
}

// replicas are servers of which the first fails every call.
type replicas struct {
	mu     sync.Mutex
	visits map[string][]int // guarded by mu; by message, which replicas got the attempts
}

// dial starts n replicas and connects to all of them.
func (r *replicas) dial(t *testing.T, n int, policy string) echov1.EchoServiceClient {
	t.Helper()
	var addresses []resolver.Address
	for number := range n {
		listener := listen(t)
		server := grpc.NewServer()
		echov1.RegisterEchoServiceServer(server, &replica{replicas: r, number: number})
		go func() { _ = server.Serve(listener) }() // ends with Stop
		t.Cleanup(server.Stop)
		addresses = append(addresses, resolver.Address{Addr: listener.Addr().String()})
	}
	known := manual.NewBuilderWithScheme("replicas")
	known.InitialState(resolver.State{Addresses: addresses})
	dial := append(grpcretry.DialOptions(grpcretry.WithBackoff(grpcretry.Constant(time.Millisecond)), grpcretry.WithMaxAttempts(20),
		grpcretry.WithBudget(grpcretry.Unlimited)), grpc.WithResolvers(known), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if policy == balancer.Name {
		dial = append(dial, balancer.DialOption())
	} else {
		dial = append(dial, grpc.WithDefaultServiceConfig(`{"loadBalancingConfig": [{"`+policy+`": {}}]}`))
	}
	cc, err := grpc.NewClient("replicas:///echo", dial...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { cc.Close() })
	client := echov1.NewEchoServiceClient(cc)
	r.await(t, client, n)
	return client
}

// await makes calls until all replicas are connected.
func (r *replicas) await(t *testing.T, client echov1.EchoServiceClient, n int) {
	t.Helper()
	for connected := map[int]bool{}; len(connected) < n; {
		if _, err := client.Echo(t.Context(), &echov1.EchoRequest{Message: "await"}); err != nil {
			t.Fatal(err)
		}
		r.mu.Lock()
		for _, number := range r.visits["await"] {
			connected[number] = true
		}
		clear(r.visits)
		r.mu.Unlock()
	}
}

// count returns how many calls met the bad replica first, and how many of those met it again immediately,
// although another one had not been tried.
func (r *replicas) count() (retried, again int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, visits := range r.visits {
		if visits[0] == 0 {
			retried++
			if visits[1] == 0 {
				again++
			}
		}
	}
	return retried, again
}

// A replica notes which calls it gets.
type replica struct {
	echov1.UnimplementedEchoServiceServer
	*replicas
	number int
}

func (r *replica) Echo(_ context.Context, req *echov1.EchoRequest) (*echov1.EchoResponse, error) {
	r.mu.Lock()
	r.visits[req.GetMessage()] = append(r.visits[req.GetMessage()], r.number)
	r.mu.Unlock()
	if r.number == 0 {
		return nil, status.Error(codes.Unavailable, "the bad replica")
	}
	return &echov1.EchoResponse{Message: req.GetMessage()}, nil
}
