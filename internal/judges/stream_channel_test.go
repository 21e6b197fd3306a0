package judges_test

import (
	"context"
	"errors"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/balancer"
	"google.golang.org/grpc/balancer/base"
	"google.golang.org/grpc/connectivity"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/resolver"
	"google.golang.org/grpc/resolver/manual"
)

// This file holds the channel of programs whose method is left to gRPC: a real ClientConn that
// opens no connection, but reports to be READY, and whose service config has a retryPolicy. It
// is fresh: the policy arrives during the creation of the first attempt's stream, as with a real
// resolver.

const readyName = "programs_ready"

func init() { balancer.Register(readyBuilder{}) }

type readyBuilder struct{}

func (readyBuilder) Name() string { return readyName }

func (readyBuilder) Build(cc balancer.ClientConn, _ balancer.BuildOptions) balancer.Balancer {
	return readyBalancer{cc}
}

// A readyBalancer reports a connection that is not there: the fake does without.
type readyBalancer struct{ cc balancer.ClientConn }

func (b readyBalancer) UpdateClientConnState(balancer.ClientConnState) error {
	b.cc.UpdateState(balancer.State{
		ConnectivityState: connectivity.Ready,
		Picker:            base.NewErrPicker(errors.New("programs make no calls on the channel itself")),
	})
	return nil
}

func (readyBalancer) ResolverError(error)                                        {}
func (readyBalancer) UpdateSubConnState(balancer.SubConn, balancer.SubConnState) {}
func (readyBalancer) Close()                                                     {}
func (readyBalancer) ExitIdle()                                                  {}

const leftConfig = `{"loadBalancingConfig": [{"` + readyName + `": {}}],
	"methodConfig": [{"name": [{"service": "s"}], "retryPolicy": {"maxAttempts": 3, "initialBackoff": "1s",
		"maxBackoff": "1s", "backoffMultiplier": 1, "retryableStatusCodes": ["UNAVAILABLE"]}}]}`

// connect opens the channel. The caller closes it.
func (r *run) connect() {
	r.resolver = manual.NewBuilderWithScheme("programs")
	r.resolver.BuildCallback = func(resolver.Target, resolver.ClientConn, resolver.BuildOptions) {}
	cc, err := grpc.NewClient("programs:///x", grpc.WithResolvers(r.resolver),
		grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithIdleTimeout(0))
	if err != nil {
		panic(err)
	}
	r.cc = cc
}

// resolve is what ClientConn.waitForResolvedAddrs waits for, after a fresh channel has left idle.
func (r *run) resolve(ctx context.Context, after time.Duration) {
	cc := r.cc
	if cc == nil || cc.GetState() == connectivity.Ready {
		return
	}
	cc.Connect()
	time.Sleep(after)
	config := r.resolver.CC().ParseServiceConfig(leftConfig)
	r.resolver.UpdateState(resolver.State{ServiceConfig: config,
		Endpoints: []resolver.Endpoint{{Addresses: []resolver.Address{{Addr: "x"}}}}})
	for s := cc.GetState(); s != connectivity.Ready && cc.WaitForStateChange(ctx, s); {
		s = cc.GetState()
	}
	r.mu.Lock()
	r.resolved = r.tick()
	r.mu.Unlock()
}
