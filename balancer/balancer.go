// Package balancer has a gRPC load-balancing policy, grpcretry_round_robin, that sends each attempt of
// a call to a backend that the call has not tried. One more line turns it on:
//
//	opts := append(grpcretry.DialOptions(), balancer.DialOption())
//
// Under round_robin, a retry meets the backend that has just failed again in one of three cases if there
// are three backends, because other calls move the rotation on in the meantime. Under this policy,
// retries and hedges go to the next ready endpoint that the call has not tried. If it has tried all that
// are ready, a new round begins, in the order of their last attempts. An endpoint that is not
// connected is never waited for if another one is ready. Retries and hedges have a rotation of their own:
// first attempts go to all endpoints equally, as under round_robin, and so do the retries to those that
// they do not pass over.
//
// In everything else the policy is round_robin: it is made of the same parts of grpc-go, one pick_first
// for each endpoint, so address lists, health checks, outlier detection, endpoints with several addresses
// and reconnects are grpc-go's. Calls that are not made through a grpcretry interceptor, and those that
// pass straight through one, get plain round robin. gRPC's transparent retries count as attempts.
//
// A call's list of endpoints lives as long as the call, and costs one allocation until there is a second attempt.
//
// # Stability
//
// The policy needs APIs that grpc-go 1.85 declares experimental: the packages
// [google.golang.org/grpc/balancer], [google.golang.org/grpc/balancer/endpointsharding],
// [google.golang.org/grpc/resolver] and [google.golang.org/grpc/serviceconfig], and
// [pickfirst.EnableHealthListener]. A later grpc-go may change them, and then only a later version of this
// package compiles with it. That is why this is a package of its own: package grpcretry imports neither it
// nor an experimental package of grpc-go.
package balancer

import (
	"google.golang.org/grpc"
	"google.golang.org/grpc/balancer"
	"google.golang.org/grpc/balancer/endpointsharding"
	"google.golang.org/grpc/balancer/pickfirst"
)

// Name is the name of the policy in a service config. It has no settings:
//
//	{"loadBalancingConfig": [{"grpcretry_round_robin": {}}]}
const Name = "grpcretry_round_robin"

// DialOption makes a ClientConn use the policy, by [grpc.WithDefaultServiceConfig]. gRPC obeys only the
// last such option, so a program that has a default service config of its own passes that through
// [ServiceConfig] instead. A service config from the name resolver takes precedence over the default, so
// it must name the policy itself: if it names none, gRPC uses pick_first, and says nothing.
func DialOption() grpc.DialOption {
	return grpc.WithDefaultServiceConfig(`{"loadBalancingConfig":[{"` + Name + `":{}}]}`)
}

func init() { balancer.Register(builder{}) }

type builder struct{}

func (builder) Name() string { return Name }

// Build implements [balancer.Builder].
func (builder) Build(cc balancer.ClientConn, opts balancer.BuildOptions) balancer.Balancer {
	channel := &channel{ClientConn: cc, id: opts.ChannelzParent}
	if channel.id == nil {
		channel.id = channel
	}
	pickFirst := balancer.Get(pickfirst.Name).Build
	return roundRobin{endpointsharding.NewBalancer(channel, opts, pickFirst, endpointsharding.Options{})}
}

// A roundRobin has one pick_first for each endpoint.
type roundRobin struct {
	balancer.Balancer
}

// UpdateClientConnState makes the children report an endpoint as ready only if health checks and outlier
// detection, if configured, say so.
func (b roundRobin) UpdateClientConnState(s balancer.ClientConnState) error {
	return b.Balancer.UpdateClientConnState(balancer.ClientConnState{
		ResolverState: pickfirst.EnableHealthListener(s.ResolverState),
	})
}

// A channel is the ClientConn as endpointsharding sees it.
type channel struct {
	balancer.ClientConn
	id any // of the ClientConn, the same after it was idle; without one, the channel itself
}

// UpdateState passes on the state of all endpoints, with a picker of this package if some are ready.
func (c *channel) UpdateState(s balancer.State) {
	if p := newPicker(c.id, endpointsharding.ChildStatesFromPicker(s.Picker)); p != nil {
		s.Picker = p
	}
	c.ClientConn.UpdateState(s)
}
