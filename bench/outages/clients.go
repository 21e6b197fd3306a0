package main

import (
	"fmt"
	"time"

	"github.com/failsafe-go/failsafe-go/failsafegrpc"
	"github.com/grpc-ecosystem/go-grpc-middleware/v2/interceptors/retry"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/resolver"
	"google.golang.org/grpc/resolver/manual"

	"github.com/grpcretry/grpcretry"
	echov1 "github.com/grpcretry/grpcretry/proto/echo/v1"
)

// The alternatives make four attempts, as ours do by default, and wait about 0.1, 0.2 and 0.4 s
// between them, each wait up to 20% longer or shorter.
const (
	attempts     = 4
	firstBackoff = 100 * time.Millisecond
	longest      = time.Second // of a backoff; never reached
	jitter       = 0.2
)

// A client is one way to call.
type client struct {
	name         string
	options      func() []grpc.DialOption // nil for none
	methodConfig string                   // an entry of the service config's methodConfig, or empty
}

var clients = []client{
	plain,
	{
		name: "service config", // its jitter is 20%
		methodConfig: fmt.Sprintf(`{
			"name": [{}],
			"retryPolicy": {
				"maxAttempts": %d,
				"initialBackoff": "%vs",
				"maxBackoff": "%vs",
				"backoffMultiplier": 2,
				"retryableStatusCodes": ["UNAVAILABLE", "RESOURCE_EXHAUSTED"]
			}
		}`, attempts, firstBackoff.Seconds(), longest.Seconds()),
	},
	{
		name: "go-grpc-middleware",
		options: func() []grpc.DialOption {
			return []grpc.DialOption{grpc.WithChainUnaryInterceptor(retry.UnaryClientInterceptor(
				retry.WithMax(attempts), retry.WithCodes(codes.Unavailable, codes.ResourceExhausted),
				retry.WithBackoff(retry.BackoffExponentialWithJitter(firstBackoff, jitter))))}
		},
	},
	{
		name: "failsafe-go",
		options: func() []grpc.DialOption {
			return []grpc.DialOption{grpc.WithChainUnaryInterceptor(failsafegrpc.NewUnaryClientInterceptor(
				failsafegrpc.NewRetryPolicyBuilder[any]().WithMaxAttempts(attempts).
					WithBackoffFactor(firstBackoff, longest, 2).WithJitterFactor(jitter).Build()))}
		},
	},
	ours,
	oursHedged,
}

var (
	plain = client{name: "plain gRPC"}
	ours  = client{name: "grpcretry", options: func() []grpc.DialOption { return grpcretry.DialOptions() }}
	// oursHedged is the README's hedged read.
	oursHedged = client{
		name: "grpcretry, hedged",
		options: func() []grpc.DialOption {
			return grpcretry.DialOptions(grpcretry.WithMethod(echov1.EchoService_Echo_FullMethodName, grpcretry.WithHedging(
				grpcretry.Hedging{Delay: grpcretry.HedgeAtQuantile(0.95, 5*time.Millisecond, time.Second)})))
		},
	}
)

// dial returns a ClientConn to all the addresses, which takes turns if there are several.
func (c *client) dial(addresses []string, more ...grpc.DialOption) (*grpc.ClientConn, error) {
	known := manual.NewBuilderWithScheme("replicas")
	var endpoints []resolver.Endpoint
	for _, a := range addresses {
		endpoints = append(endpoints, resolver.Endpoint{Addresses: []resolver.Address{{Addr: a}}})
	}
	known.InitialState(resolver.State{Endpoints: endpoints})
	balancer := "pick_first" // gRPC's default
	if len(addresses) > 1 {
		balancer = "round_robin"
	}
	opts := []grpc.DialOption{
		grpc.WithResolvers(known),
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithDefaultServiceConfig(fmt.Sprintf(
			`{"loadBalancingConfig": [{%q: {}}], "methodConfig": [%s]}`, balancer, c.methodConfig)),
	}
	if c.options != nil {
		opts = append(opts, c.options()...)
	}
	return grpc.NewClient("replicas:///echo", append(opts, more...)...)
}
