package bench

import (
	"context"
	"fmt"
	"net"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/balancer"
	"google.golang.org/grpc/connectivity"
	"google.golang.org/grpc/resolver"
	"google.golang.org/grpc/resolver/manual"

	"github.com/grpcretry/grpcretry"
	grpcretrybalancer "github.com/grpcretry/grpcretry/balancer"
	echov1 "github.com/grpcretry/grpcretry/proto/echo/v1"
)

// This file compares the load-balancing policy of package balancer with grpc-go's round_robin, for calls that
// succeed on the first attempt. All calls go through the retry interceptor.

var policies = []string{"round_robin", grpcretrybalancer.Name}

// eachPolicy measures the policies beside each other.
func eachPolicy(b *testing.B, ready func(policy string) (do func(times int))) {
	var contenders []contender
	for _, policy := range policies {
		contenders = append(contenders, contender{"policy=" + policy, ready(policy)})
	}
	inTurns(b, contenders, perOperation)
}

// BenchmarkBalancerPick is the picker alone, for an attempt of a call and for a call without the interceptor. The
// interceptor itself is a part of the former, under both policies.
func BenchmarkBalancerPick(b *testing.B) {
	for _, retried := range []bool{true, false} {
		b.Run(fmt.Sprintf("retried=%v", retried), func(b *testing.B) {
			eachCores(b, func(b *testing.B, repeat repeater) {
				eachPolicy(b, func(policy string) func(int) {
					picker := readyPicker(b, policy, 3)
					return repeat(b, func() func() error { return pickEach(b, picker, retried) })
				})
			})
		})
	}
}

// pickEach returns a function that makes a call, of which nothing happens but the pick.
func pickEach(b *testing.B, picker balancer.Picker, retried bool) func() error {
	const method = echov1.EchoService_Echo_FullMethodName
	ctx, opts, cc := callContext(b), callOptions(false), unconnected(b)
	pick := func(ctx context.Context) error {
		_, err := picker.Pick(balancer.PickInfo{FullMethodName: method, Ctx: ctx})
		return err
	}
	if !retried {
		return func() error { return pick(ctx) }
	}
	intercept := grpcretry.UnaryClientInterceptor()
	invoker := func(ctx context.Context, _ string, _, _ any, _ *grpc.ClientConn, _ ...grpc.CallOption) error {
		return pick(ctx)
	}
	req, reply := request(0), new(echov1.EchoResponse)
	return func() error { return intercept(ctx, method, req, reply, cc, invoker, opts...) }
}

// readyPicker returns a policy's picker for a number of endpoints that are ready.
func readyPicker(b *testing.B, policy string, endpoints int) balancer.Picker {
	b.Helper()
	cc := &stateRecorder{updates: make(chan balancer.State, 100)}
	var state resolver.State
	for i := range endpoints {
		state.Endpoints = append(state.Endpoints, resolver.Endpoint{Addresses: []resolver.Address{{Addr: fmt.Sprint("backend-", i)}}})
	}
	built := balancer.Get(policy).Build(cc, balancer.BuildOptions{})
	b.Cleanup(built.Close)
	if err := built.UpdateClientConnState(balancer.ClientConnState{ResolverState: state}); err != nil {
		b.Fatal(err)
	}
	for i := range endpoints {
		cc.subConns[i].listener(balancer.SubConnState{ConnectivityState: connectivity.Connecting})
		cc.subConns[i].listener(balancer.SubConnState{ConnectivityState: connectivity.Ready})
	}
	for ready := 0; ; { // each endpoint that becomes ready makes a new picker
		select {
		case s := <-cc.updates:
			if s.ConnectivityState == connectivity.Ready {
				ready++
			}
			if ready == endpoints {
				return s.Picker
			}
		case <-time.After(10 * time.Second):
			b.Fatalf("%s has %d endpoints that are ready, want %d", policy, ready, endpoints)
		}
	}
}

// A stateRecorder is the ClientConn of a policy that is not in use.
type stateRecorder struct {
	balancer.ClientConn
	subConns []*idleSubConn
	updates  chan balancer.State
}

func (r *stateRecorder) UpdateState(s balancer.State) { r.updates <- s }

func (r *stateRecorder) NewSubConn(_ []resolver.Address, opts balancer.NewSubConnOptions) (balancer.SubConn, error) {
	r.subConns = append(r.subConns, &idleSubConn{listener: opts.StateListener})
	return r.subConns[len(r.subConns)-1], nil
}

// An idleSubConn connects when the benchmark says so.
type idleSubConn struct {
	balancer.SubConn
	listener func(balancer.SubConnState)
}

func (*idleSubConn) Connect()  {}
func (*idleSubConn) Shutdown() {}
func (*idleSubConn) RegisterHealthListener(listener func(balancer.SubConnState)) {
	if listener != nil {
		go listener(balancer.SubConnState{ConnectivityState: connectivity.Ready})
	}
}

// BenchmarkBalancerRPC is a whole call to one of three endpoints.
func BenchmarkBalancerRPC(b *testing.B) {
	for _, net := range []string{"bufconn", "tcp"} {
		b.Run("net="+net, func(b *testing.B) {
			eachCores(b, func(b *testing.B, repeat repeater) {
				eachPolicy(b, func(policy string) func(int) {
					client := echov1.NewEchoServiceClient(dialThree(b, net, policy))
					return repeat(b, func() func() error {
						ctx, req := callContext(b), request(0)
						return func() error { return second(client.Echo(ctx, req)) }
					})
				})
			})
		})
	}
}

// dialThree dials one server as three endpoints, and returns when all are connected.
func dialThree(b *testing.B, network, policy string) *grpc.ClientConn {
	b.Helper()
	dial := serve(b, newServer())
	if network == "tcp" {
		address, err := serverProcess()
		if err != nil {
			b.Fatal(err)
		}
		dial = grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, "tcp", address)
		})
	}
	names := manual.NewBuilderWithScheme("three")
	names.InitialState(resolver.State{Addresses: []resolver.Address{{Addr: "1"}, {Addr: "2"}, {Addr: "3"}}})
	cc := connect(b, "three:///echo", append(grpcretry.DialOptions(), dial, grpc.WithResolvers(names),
		grpc.WithDefaultServiceConfig(`{"loadBalancingConfig":[{"`+policy+`":{}}]}`))...)
	time.Sleep(200 * time.Millisecond) // connect waits for the first
	return cc
}
