//go:build xds

// Package outlier tests grpcretry's load-balancing policy below gRPC's outlier detection. That is a part of its xDS
// client, whose dependencies take long to compile, hence the build tag.
package outlier

import (
	"context"
	"fmt"
	"net"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/health"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/resolver"
	"google.golang.org/grpc/resolver/manual"
	"google.golang.org/grpc/status"
	_ "google.golang.org/grpc/xds" // registers outlier detection

	"github.com/grpcretry/grpcretry"
	"github.com/grpcretry/grpcretry/balancer"
	"github.com/grpcretry/grpcretry/grpcretrytest"
)

// Outlier detection ejects the backend that fails, and then no call goes there until
// the ejection is over. Before it, and after it, retries go elsewhere.
func TestOutlierDetection(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		visits := &visits{of: map[string][]string{}}
		servers := map[string]*grpcretrytest.Server{}
		for _, name := range []string{"bad", "good1", "good2"} {
			servers[name] = visits.serve(t, name)
		}
		config, err := balancer.ServiceConfig(`{"loadBalancingConfig":[{"outlier_detection_experimental":{
			"interval":"10s","baseEjectionTime":"60s","maxEjectionTime":"60s","maxEjectionPercent":50,
			"failurePercentageEjection":{"threshold":50,"enforcementPercentage":100,"minimumHosts":2,"requestVolume":5},
			"childPolicy":[{"grpcretry_round_robin":{}}]}}]}`)
		if err != nil {
			t.Fatal(err)
		}
		names := manual.NewBuilderWithScheme("outlier")
		names.InitialState(resolver.State{Addresses: []resolver.Address{{Addr: "bad"}, {Addr: "good1"}, {Addr: "good2"}}})
		cc, err := grpc.NewClient("outlier:///health",
			append(grpcretry.DialOptions(grpcretry.WithBackoff(grpcretry.Constant(0)), grpcretry.WithBudget(grpcretry.Unlimited)),
				grpc.WithDefaultServiceConfig(config), grpc.WithResolvers(names), grpc.WithTransportCredentials(insecure.NewCredentials()),
				grpc.WithContextDialer(func(ctx context.Context, address string) (net.Conn, error) {
					return servers[address].DialContext(ctx)
				}))...)
		if err != nil {
			t.Fatal(err)
		}
		defer cc.Close()
		cc.Connect()
		synctest.Wait()
		client := healthpb.NewHealthClient(cc)
		round := func(name string) (bad int) {
			t.Helper()
			for i := range 30 {
				call := fmt.Sprint(name, " ", i)
				if _, err := client.Check(metadata.AppendToOutgoingContext(t.Context(), "call", call), &healthpb.HealthCheckRequest{}); err != nil {
					t.Fatalf("call %s = %v", call, err)
				}
				v := visits.to(call)
				if len(slices.Compact(slices.Clone(v))) != len(v) || len(v) > 2 {
					t.Errorf("call %s visited %v, want no backend twice", call, v)
				}
				if v[0] == "bad" {
					bad++
				}
			}
			return bad
		}
		if got := round("before"); got < 5 {
			t.Errorf("%d calls went to the bad backend first, which is too few for its ejection", got)
		}
		time.Sleep(15 * time.Second)
		if got := round("ejected"); got != 0 {
			t.Errorf("%d calls went to the bad backend while it was ejected", got)
		}
		time.Sleep(2 * time.Minute)
		if got := round("after"); got == 0 {
			t.Error("no call went to the bad backend when its ejection was over")
		}
	})
}

// visits are the backends that each call has visited.
type visits struct {
	mu sync.Mutex
	of map[string][]string // guarded by mu
}

func (v *visits) to(call string) []string {
	v.mu.Lock()
	defer v.mu.Unlock()
	return v.of[call]
}

// serve starts a backend; the one named bad fails.
func (v *visits) serve(t *testing.T, name string) *grpcretrytest.Server {
	t.Helper()
	register := func(s grpc.ServiceRegistrar) { healthpb.RegisterHealthServer(s, health.NewServer()) }
	return grpcretrytest.NewServer(t, register,
		grpc.UnaryInterceptor(func(ctx context.Context, req any, _ *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any, error) {
			md, _ := metadata.FromIncomingContext(ctx)
			call := md.Get("call")[0]
			v.mu.Lock()
			v.of[call] = append(v.of[call], name)
			v.mu.Unlock()
			if name == "bad" {
				return nil, status.Error(codes.Unavailable, "db-down")
			}
			return handler(ctx, req)
		}))
}
