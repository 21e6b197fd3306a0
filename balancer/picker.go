package balancer

import (
	"fmt"
	"math/rand/v2"
	"slices"
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
	if len(e.Addresses) == 1 {
		return e.Addresses[0].Addr
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
	chosen, repeats := p.choose(list)
	result, err := chosen.picker.Pick(info)
	if err == nil {
		p.record(list, chosen, repeats)
	}
	return result, err
}

// at returns the endpoint whose turn it is.
func (p *picker) at(turn uint32) *endpoint { return &p.ready[turn%uint32(len(p.ready))] }

// choose needs the list's mutex. It returns the next endpoint that is not on the list. If all are,
// repeats is true, and the endpoint is the next that was not tried last.
func (p *picker) choose(list *tried.List) (chosen *endpoint, repeats bool) {
	last := list.Last(p.channel)
	if last == (tried.Endpoint{}) {
		return p.at(p.first.Add(1)), false
	}
	turn := p.further.Add(1)
	if e := p.pass(turn, list.Has); e != nil {
		return e, false
	}
	if e := p.pass(turn, func(id tried.Endpoint) bool { return id == last }); e != nil {
		return e, true
	}
	return p.at(turn), true // the only one
}

// pass returns the first endpoint, from a turn on, that is not to be passed over, nil if there is none.
// Those that are passed over lose their turn.
func (p *picker) pass(turn uint32, over func(tried.Endpoint) bool) *endpoint {
	for passed := range uint32(len(p.ready)) {
		if e := p.at(turn + passed); !over(e.id) {
			if passed > 0 {
				p.further.Add(passed)
			}
			return e
		}
	}
	return nil
}

// record needs the list's mutex. An endpoint that repeats starts a new round, in which only its
// predecessor counts as tried.
func (p *picker) record(list *tried.List, chosen *endpoint, repeats bool) {
	if repeats {
		last := list.Last(p.channel)
		list.Forget(p.channel)
		list.Add(last)
	}
	list.Add(chosen.id)
}
