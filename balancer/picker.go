package balancer

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"sync/atomic"
	"unique"

	"google.golang.org/grpc/balancer"
	"google.golang.org/grpc/balancer/endpointsharding"
	"google.golang.org/grpc/connectivity"
	"google.golang.org/grpc/resolver"

	"github.com/grpcretry/grpcretry/internal/tried"
)

// A picker chooses among the endpoints that are ready. It never changes, but for the rotations. Retries and
// hedges have a rotation of their own, so that first attempts go to all endpoints equally, as under
// round_robin: if retries took turns of the good endpoints, more first attempts would meet the bad one.
type picker struct {
	channel any
	ready   []endpoint    // at least one
	first   atomic.Uint32 // the turn that a first attempt took last; the endpoint's index modulo their number
	further atomic.Uint32 // the same for all other attempts
}

// An endpoint is one that is ready.
type endpoint struct {
	id     tried.Endpoint
	picker balancer.Picker // of its pick_first
}

// newPicker returns a picker for the children that are ready, nil if there are none.
func newPicker(channel any, children []endpointsharding.ChildState) balancer.Picker {
	p := &picker{channel: channel, ready: make([]endpoint, 0, len(children))}
	for _, child := range children {
		if child.State.ConnectivityState == connectivity.Ready {
			id := unique.Make(tried.Place{Channel: channel, Addresses: addressesOf(child.Endpoint)})
			p.ready = append(p.ready, endpoint{id, child.State.Picker})
		}
	}
	if len(p.ready) == 0 {
		return nil
	}
	for _, rotation := range []*atomic.Uint32{&p.first, &p.further} { // so that many clients do not begin with the same backend
		rotation.Store(rand.Uint32N(uint32(len(p.ready))))
	}
	return p
}

// addressesOf encodes an endpoint's set of addresses. Like endpointsharding, it ignores all but the
// addresses themselves.
func addressesOf(e resolver.Endpoint) string {
	if len(e.Addresses) == 1 && !strings.HasPrefix(e.Addresses[0].Addr, "[") {
		return e.Addresses[0].Addr // most are like that
	}
	all := make([]string, 0, len(e.Addresses))
	for _, a := range e.Addresses {
		all = append(all, a.Addr)
	}
	slices.Sort(all)
	return fmt.Sprintf("%q", all)
}

// Pick implements [balancer.Picker].
func (p *picker) Pick(info balancer.PickInfo) (balancer.PickResult, error) {
	list := tried.Of(info.Ctx, info.FullMethodName)
	if list == nil {
		return p.at(p.first.Add(1)).picker.Pick(info)
	}
	list.Lock() // for the choice and its record together: two hedges must not choose the same endpoint
	defer list.Unlock()
	chosen := p.choose(list)
	result, err := chosen.picker.Pick(info)
	if err == nil {
		list.Add(chosen.id)
	}
	return result, err
}

// at returns the endpoint whose turn it is.
func (p *picker) at(turn uint32) *endpoint { return &p.ready[turn%uint32(len(p.ready))] }

// choose needs the list's mutex. It returns the next endpoint that is not on the list. If all are, it
// returns the one whose last attempt is the oldest. Endpoints that are passed over lose their turn.
func (p *picker) choose(list *tried.List) *endpoint {
	if !list.Knows(p.channel) {
		return p.at(p.first.Add(1))
	}
	turn := p.further.Add(1) % uint32(len(p.ready)) // so that turn+passed does not overflow
	oldest, its := p.at(turn), math.MaxInt
	for passed := range uint32(len(p.ready)) {
		e := p.at(turn + passed)
		switch at := list.Position(e.id); {
		case at < 0:
			p.further.Add(passed)
			return e
		case at < its:
			oldest, its = e, at
		}
	}
	return oldest
}
