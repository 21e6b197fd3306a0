package balancer_test

import (
	"context"
	"fmt"
	"log"
	"net"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/health"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/resolver"
	"google.golang.org/grpc/resolver/manual"
	"google.golang.org/grpc/status"

	"github.com/grpcretry/grpcretry"
	"github.com/grpcretry/grpcretry/balancer"
)

// Two of three backends fail, and no attempt goes to a backend that the call has tried.
func ExampleDialOption() {
	failing := grpc.UnaryInterceptor(func(ctx context.Context, req any, _ *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any, error) {
		if req.(*healthpb.HealthCheckRequest).GetService() == "shop" && grpcretry.PreviousAttempts(ctx) < 2 {
			return nil, status.Error(codes.Unavailable, "db-down")
		}
		return handler(ctx, req)
	})
	backends := manual.NewBuilderWithScheme("example")
	var addresses []resolver.Address
	for range 3 {
		listener, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			log.Fatal(err)
		}
		server, checks := grpc.NewServer(failing), health.NewServer()
		checks.SetServingStatus("shop", healthpb.HealthCheckResponse_SERVING)
		healthpb.RegisterHealthServer(server, checks)
		go server.Serve(listener)
		defer server.Stop()
		addresses = append(addresses, resolver.Address{Addr: listener.Addr().String()})
	}
	backends.InitialState(resolver.State{Addresses: addresses})

	visited := map[string]bool{}
	cc, err := grpc.NewClient("example:///shop", append(
		grpcretry.DialOptions(
			grpcretry.WithBackoff(grpcretry.Constant(time.Millisecond)),
			grpcretry.WithObserver(func(_ context.Context, e grpcretry.Event) {
				if e.Kind == grpcretry.AttemptEnd {
					visited[e.Attempt.Peer.String()] = true
				}
			})),
		balancer.DialOption(), // this is the line
		grpc.WithResolvers(backends),
		grpc.WithTransportCredentials(insecure.NewCredentials()))...)
	if err != nil {
		log.Fatal(err)
	}
	defer cc.Close()
	client := healthpb.NewHealthClient(cc)
	for connected := map[string]bool{}; len(connected) < 3; { // until all three are connected
		var p peer.Peer
		if _, err := client.Check(context.Background(), &healthpb.HealthCheckRequest{}, grpc.Peer(&p)); err != nil {
			log.Fatal(err)
		}
		connected[p.Addr.String()] = true
	}
	clear(visited)
	reply, err := client.Check(context.Background(), &healthpb.HealthCheckRequest{Service: "shop"})
	fmt.Println(reply.GetStatus(), err, "after visiting", len(visited), "backends")
	// Output: SERVING <nil> after visiting 3 backends
}

// A program with a default service config of its own adds the policy to it.
func ExampleServiceConfig() {
	config, err := balancer.ServiceConfig(`{"methodConfig": [{"name": [{"service": "shop.Cart"}], "timeout": "2s"}]}`)
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(config)
	_, err = balancer.ServiceConfig(`{"loadBalancingConfig": [{"round_robin": {}}]}`)
	fmt.Println(err)
	// Output:
	// {"loadBalancingConfig":[{"grpcretry_round_robin":{}}],"methodConfig":[{"name":[{"service":"shop.Cart"}],"timeout":"2s"}]}
	// balancer: ServiceConfig: loadBalancingConfig names the policy round_robin, not grpcretry_round_robin
}
