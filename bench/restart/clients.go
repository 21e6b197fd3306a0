package main

import (
	"fmt"

	"github.com/failsafe-go/failsafe-go/failsafegrpc"
	"github.com/grpc-ecosystem/go-grpc-middleware/v2/interceptors/retry"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/resolver"
	"google.golang.org/grpc/resolver/manual"

	"github.com/grpcretry/grpcretry"
)

// attempts is how many a call may make, the first one included, if a client needs a number.
const attempts = 4

// A client is one way to call. As in alternatives_test.go, each client has the defaults it
// documents or, if it documents none, its own documented example.
type client struct {
	name         string
	settings     string                   // as the output describes them
	options      func() []grpc.DialOption // nil for none
	methodConfig string                   // an entry of the service config's methodConfig, or empty
}

var clients = []client{
	{
		name:     "none",
		settings: "gRPC without retries",
	},
	{
		name:     "WaitForReady",
		settings: "gRPC without retries, but with grpc.WaitForReady(true)",
		options: func() []grpc.DialOption {
			return []grpc.DialOption{grpc.WithDefaultCallOptions(grpc.WaitForReady(true))}
		},
	},
	{
		name:     "grpc-go built-in",
		settings: "retryPolicy in the service config: 4 attempts, the backoff of gRFC A6's example (0.1 s doubling to 1 s)",
		methodConfig: fmt.Sprintf(`{
			"name": [{}],
			"retryPolicy": {
				"maxAttempts": %d,
				"initialBackoff": "0.1s",
				"maxBackoff": "1s",
				"backoffMultiplier": 2,
				"retryableStatusCodes": ["UNAVAILABLE", "RESOURCE_EXHAUSTED"]
			}
		}`, attempts),
	},
	{
		name:     "go-grpc-middleware",
		settings: "interceptors/retry: WithMax(4), its default backoff (50 ms)",
		options: func() []grpc.DialOption {
			return []grpc.DialOption{grpc.WithChainUnaryInterceptor(retry.UnaryClientInterceptor(
				retry.WithMax(attempts), retry.WithCodes(codes.Unavailable, codes.ResourceExhausted)))}
		},
	},
	{
		name:     "failsafe-go",
		settings: "failsafegrpc: WithMaxAttempts(4), its default delay (none)",
		options: func() []grpc.DialOption {
			return []grpc.DialOption{grpc.WithChainUnaryInterceptor(failsafegrpc.NewUnaryClientInterceptor(
				failsafegrpc.NewRetryPolicyBuilder[any]().WithMaxAttempts(attempts).Build()))}
		},
	},
	ours,
}

var ours = client{
	name:     "grpcretry",
	settings: "grpcretry.DialOptions()",
	options:  func() []grpc.DialOption { return grpcretry.DialOptions() },
}

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
