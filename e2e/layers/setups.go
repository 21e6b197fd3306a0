package main

import (
	"fmt"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/grpcretry/grpcretry"
	"github.com/grpcretry/grpcretry/internal/inside"
	"github.com/grpcretry/grpcretry/internal/layers"
)

// All setups have the same policy, whatever applies it.
const (
	attempts    = 3 // of each layer, the first included
	baseWait    = 20 * time.Millisecond
	longestWait = 200 * time.Millisecond
)

// A setup is one way to configure A, B and C. D is a gRPC server without the library.
type setup struct {
	name   string
	server func() []grpc.ServerOption // of A, B and C; nil for none

	// client returns the options with which A, B and C dial the next service. The library takes
	// more options, which trace its calls.
	client func(more ...grpcretry.Option) []grpc.DialOption
}

// The names of setups are those of the strategies of layers-proof, a scenario of cmd/herd.
const (
	noLibrary  = "no library"
	budgets    = "budgets"
	stop       = "stop callers"
	oneAttempt = "one attempt for retries"
	everything = "everything"
)

var setups = []setup{
	{name: noLibrary, client: builtIn},
	{name: budgets, client: impatient},
	{name: stop, client: unlimited, server: func() []grpc.ServerOption {
		return inside.ServerOptions(layers.Measures{StopsCallers: true})
	}},
	{name: oneAttempt, client: unlimited, server: func() []grpc.ServerOption {
		return inside.ServerOptions(layers.Measures{OneAttempt: true})
	}},
	{name: everything, client: library, server: func() []grpc.ServerOption {
		return []grpc.ServerOption{grpc.ChainUnaryInterceptor(grpcretry.UnaryServerInterceptor()),
			grpc.ChainStreamInterceptor(grpcretry.StreamServerInterceptor())}
	}},
}

func setupNamed(name string) (*setup, error) {
	for i := range setups {
		if setups[i].name == name {
			return &setups[i], nil
		}
	}
	return nil, fmt.Errorf("there is no setup %q", name)
}

// builtIn makes gRPC retry. Its jitter is 20% either way.
func builtIn(...grpcretry.Option) []grpc.DialOption {
	return []grpc.DialOption{grpc.WithDefaultServiceConfig(fmt.Sprintf(`{"methodConfig": [{
		"name": [{}],
		"retryPolicy": {
			"maxAttempts": %d,
			"initialBackoff": "%.3fs",
			"maxBackoff": "%.3fs",
			"backoffMultiplier": 2,
			"retryableStatusCodes": ["UNAVAILABLE"]
		}
	}]}`, attempts, baseWait.Seconds(), longestWait.Seconds()))}
}

// library is the library with the policy of all setups, and defaults for the rest.
func library(more ...grpcretry.Option) []grpc.DialOption {
	return grpcretry.DialOptions(append([]grpcretry.Option{
		grpcretry.WithMaxAttempts(attempts),
		grpcretry.WithBackoff(grpcretry.Exponential{Base: baseWait, Max: longestWait}),
	}, more...)...)
}

// impatient is the library without patience: calls that wait until D responds again would not show
// what the budgets and the measures do.
func impatient(more ...grpcretry.Option) []grpc.DialOption {
	return library(append(more, grpcretry.WithPatience(0))...)
}

// unlimited is the same without a budget.
func unlimited(more ...grpcretry.Option) []grpc.DialOption {
	return impatient(append(more, grpcretry.WithBudget(grpcretry.Unlimited))...)
}

// dial connects to a service.
func dial(address string, opts ...grpc.DialOption) (*grpc.ClientConn, error) {
	return grpc.NewClient(address, append(opts, grpc.WithTransportCredentials(insecure.NewCredentials()))...)
}
