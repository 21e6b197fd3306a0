package balancer

import (
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"

	"google.golang.org/grpc/balancer"
	"google.golang.org/grpc/balancer/endpointsharding"
	"google.golang.org/grpc/connectivity"
	"google.golang.org/grpc/resolver"

	"github.com/grpcretry/grpcretry/internal/tried"
)

// The tests in this file call the picker alone.

// A fakeConn is the SubConn of the endpoint with that address.
type fakeConn struct {
	balancer.SubConn
	address string
}

// A fakePicker picks a fakeConn, or fails.
type fakePicker struct {
	result balancer.PickResult
	err    error
}

func (f *fakePicker) Pick(balancer.PickInfo) (balancer.PickResult, error) { return f.result, f.err }

// children returns the states of endpoints, each ready.
func children(addresses ...string) []endpointsharding.ChildState {
	var all []endpointsharding.ChildState
	for _, a := range addresses {
		all = append(all, child(a, connectivity.Ready, nil))
	}
	return all
}

func child(address string, state connectivity.State, err error) endpointsharding.ChildState {
	return endpointsharding.ChildState{
		Endpoint: resolver.Endpoint{Addresses: []resolver.Address{{Addr: address}}},
		State:    balancer.State{ConnectivityState: state, Picker: &fakePicker{balancer.PickResult{SubConn: fakeConn{address: address}}, err}},
	}
}

// A fakeCall is the context of a call's attempts.
type fakeCall struct {
	context.Context
	list tried.List
}

func newCall() *fakeCall { return &fakeCall{Context: context.Background()} }

func (c *fakeCall) Value(key any) any {
	if key == (tried.Key{}) {
		return c
	}
	return nil
}

func (c *fakeCall) Tried(method string) *tried.List {
	if method != "/s/m" {
		return nil
	}
	return &c.list
}

// pick returns the address that a picker picks for a call.
func pick(tb testing.TB, p balancer.Picker, ctx context.Context) string {
	tb.Helper()
	r, err := p.Pick(balancer.PickInfo{FullMethodName: "/s/m", Ctx: ctx})
	if err != nil {
		tb.Fatal(err)
	}
	return r.SubConn.(fakeConn).address
}

// A model is the same policy, for one call at a time, in as few words as possible.
type model struct {
	tried []string // by the call, in the order of the last attempts
}

// allows returns the endpoints that the policy may choose from those that are ready.
func (m *model) allows(ready []string) []string {
	if fresh := without(ready, m.tried...); len(fresh) > 0 {
		return fresh
	}
	for _, oldest := range m.tried {
		if slices.Contains(ready, oldest) {
			return []string{oldest}
		}
	}
	return nil
}

// chose records a choice.
func (m *model) chose(address string) {
	m.tried = append(without(m.tried, address), address)
}

func without(list []string, these ...string) []string {
	return slices.DeleteFunc(slices.Clone(list), func(a string) bool { return slices.Contains(these, a) })
}

// TestPickerMatchesItsModel draws calls on a channel whose endpoints come and go at random.
func TestPickerMatchesItsModel(t *testing.T) {
	all := []string{"a", "b", "c", "d", "e", "f"}
	for seed := range uint64(200) {
		random := rand.New(rand.NewPCG(seed, 1))
		calls := []*fakeCall{newCall(), newCall(), newCall()}
		models := make([]model, len(calls))
		var p balancer.Picker
		var ready []string
		for range 60 {
			if p == nil || random.IntN(4) == 0 {
				random.Shuffle(len(all), func(i, j int) { all[i], all[j] = all[j], all[i] })
				ready = slices.Clone(all[:1+random.IntN(len(all))])
				p = newPicker("channel",
					slices.Concat(children(ready...), []endpointsharding.ChildState{child("lost", connectivity.TransientFailure, nil)}))
			}
			n := random.IntN(len(calls))
			got, want := pick(t, p, calls[n]), models[n].allows(ready)
			if !slices.Contains(want, got) {
				t.Fatalf("seed %d: call %d, which has tried %v, goes to %s, want one of %v", seed, n, models[n].tried, got, want)
			}
			models[n].chose(got)
			if random.IntN(10) == 0 {
				calls[n], models[n] = newCall(), model{}
			}
		}
	}
}

// TestPickerAgainstItsRotations compares each choice with the rotations: the first allowed endpoint from
// there on.
func TestPickerAgainstItsRotations(t *testing.T) {
	p := newPicker("channel", children("a", "b", "c", "d")).(*picker)
	order := []string{"a", "b", "c", "d"}
	p.first.Store(3) // the next turn is a's
	p.further.Store(3)
	first, second := newCall(), newCall()
	for i, step := range []struct {
		call *fakeCall
		want string
	}{
		{first, "a"},
		{first, "b"},                 // a is passed over, and loses its turn
		{second, "b"},                // the first attempt of a call takes a turn of its own
		{second, "c"}, {second, "d"}, // the turns after the first call's b
		{nil, "c"},   // a call without a list makes a first attempt
		{first, "c"}, // a and b are passed over
		{nil, "d"}, {first, "d"},
		{first, "a"},  // all have been tried, a the longest ago
		{second, "a"}, // b, c and d are passed over
		{first, "b"},  // a new round has the order of the one before
		{second, "b"}, {second, "c"},
		{nil, "a"}, {second, "d"}, {first, "c"}, {second, "a"},
	} {
		ctx := context.Background()
		if step.call != nil {
			ctx = step.call
		}
		if got := pick(t, p, ctx); got != step.want {
			t.Fatalf("step %d goes to %s, want %s (rotation over %v)", i, got, step.want, order)
		}
	}
}

// The turns are counted with 32 bits, and 2^32 is not a multiple of three.
func TestRotationsStartAgain(t *testing.T) {
	for turn := range uint32(3) {
		p := newPicker("channel", children("a", "b", "c")).(*picker)
		call := newCall()
		got := []string{pick(t, p, call), pick(t, p, call)}
		p.further.Store(math.MaxUint32 - turn)
		if got = append(got, pick(t, p, call)); len(without([]string{"a", "b", "c"}, got...)) > 0 {
			t.Errorf("%d turns before the end, picks go to %v, want all three", turn, got)
		}
	}
}

// A pick with an error is not an attempt.
func TestFailedPicksAreNotRecorded(t *testing.T) {
	broken := errors.New("no connection")
	p := newPicker("channel", []endpointsharding.ChildState{child("a", connectivity.Ready, broken)})
	call := newCall()
	if _, err := p.Pick(balancer.PickInfo{FullMethodName: "/s/m", Ctx: call}); err != broken {
		t.Errorf("Pick = %v, want the child's error", err)
	}
	if call.list.Knows("channel") {
		t.Error("the list has an endpoint that was not picked")
	}
}

// The tests of grpc-go's parent policies pick without a context.
func TestPickWithoutAContext(t *testing.T) {
	if got := pick(t, newPicker("channel", children("a")), nil); got != "a" {
		t.Errorf("the pick goes to %s, want a", got)
	}
}

// The list of a call stays as long as there are endpoints, however many attempts the call makes.
func TestListsDoNotGrow(t *testing.T) {
	call := newCall()
	for i := range 1000 {
		p := newPicker("channel", children("a", "b", "c", fmt.Sprint("d", i%2)))
		pick(t, p, call)
	}
	call.list.Lock()
	defer call.list.Unlock()
	n := 0
	for _, address := range []string{"a", "b", "c", "d0", "d1"} {
		if call.list.Position(newPicker("channel", children(address)).(*picker).ready[0].id) >= 0 {
			n++
		}
	}
	if n > 5 {
		t.Errorf("the list has %d endpoints, want at most 5", n)
	}
}

// Endpoints are known by their set of addresses and their channel.
func TestIdentityOfEndpoints(t *testing.T) {
	of := func(channel any, addresses ...string) tried.Endpoint {
		var e resolver.Endpoint
		for _, a := range addresses {
			e.Addresses = append(e.Addresses, resolver.Address{Addr: a, ServerName: fmt.Sprint(rand.Int())})
		}
		state := balancer.State{ConnectivityState: connectivity.Ready, Picker: &fakePicker{}}
		return newPicker(channel, []endpointsharding.ChildState{{Endpoint: e, State: state}}).(*picker).ready[0].id
	}
	if one, again := of(1, "a"), of(1, "a"); one != again || of(1, "a", "b") != of(1, "b", "a") {
		t.Error("the same addresses are different endpoints")
	}
	different := []tried.Endpoint{of(1, "a"), of(2, "a"), of(1, "b"), of(1, "a", "b"), of(1, "a b"), of(1, `a" "b`), of(1, `["a" "b"]`),
		of(1, "a", "b", "c"), of(1), of(1, "[]")}
	for i := range different {
		if slices.Index(different, different[i]) != i {
			t.Errorf("endpoint %d is the same as another", i)
		}
	}
}

// Picks at the same time, for one call, choose different endpoints.
func TestPicksAtTheSameTime(t *testing.T) {
	for range 200 {
		p := newPicker("channel", children("a", "b", "c", "d"))
		call := newCall()
		var all sync.WaitGroup
		got := make([]string, 4)
		for i := range got {
			all.Go(func() { got[i] = pick(t, p, call) })
			all.Go(func() { pick(t, p, context.Background()) })
		}
		all.Wait()
		if slices.Sort(got); !slices.Equal(got, []string{"a", "b", "c", "d"}) {
			t.Fatalf("four picks went to %v", got)
		}
	}
}

// The first pick of a call allocates nothing, and one more attempt allocates once.
func TestPicksAllocateNothing(t *testing.T) {
	p := newPicker("channel", children("a", "b", "c"))
	call := newCall()
	info := balancer.PickInfo{FullMethodName: "/s/m", Ctx: call}
	for _, tt := range []struct {
		name string
		run  func()
		want float64
	}{
		{"without a list", func() { p.Pick(balancer.PickInfo{FullMethodName: "/other", Ctx: call}) }, 0},
		{"first attempt", func() { call.list = tried.List{}; p.Pick(info) }, 0},
		{"one retry", func() { call.list = tried.List{}; p.Pick(info); p.Pick(info) }, 1},
	} {
		if got := testing.AllocsPerRun(100, tt.run); got > tt.want {
			t.Errorf("%s: %v allocations, want %v", tt.name, got, tt.want)
		}
	}
}

// Many clients do not begin with the same backend.
func TestRotationsBeginAnywhere(t *testing.T) {
	first, further := map[uint32]bool{}, map[uint32]bool{}
	for range 200 {
		p := newPicker("channel", children("a", "b", "c")).(*picker)
		first[p.first.Load()], further[p.further.Load()] = true, true
	}
	if len(first) != 3 || len(further) != 3 {
		t.Errorf("rotations begin at %v and %v, want all three in both", first, further)
	}
}
