package sim

import (
	"context"
	"fmt"
	"math/rand/v2"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// Progress is the progress of a simulation.
type Progress struct {
	Now    time.Duration // in simulated time
	Share  float64       // of the whole, 0 to 1, as far as that is known
	Events int64         // simulated so far
}

// Run simulates a scenario under one of its strategies, or any other. If every group has a strategy of
// its own, the zero Strategy will do. The same scenario, strategy and seed give the same result, on every
// machine with the same floating point.
//
// watch, unless nil, is called about every hundred thousand events. When ctx ends, Run returns the
// result so far, with Complete false, and the context's error. Other errors name the invalid field
// and its value; the result is then nil.
func Run(ctx context.Context, s Scenario, strategy Strategy, watch func(Progress)) (*Result, error) {
	if err := s.check(&strategy); err != nil {
		return nil, err
	}
	r, err := newRun(&s, &strategy)
	if err != nil {
		return nil, err
	}
	err = r.simulate(ctx, watch)
	return r.result(err == nil), err
}

// epoch is the time 0 of the simulation, for plans and budgets. It is far from now, so that nothing
// can mistake one clock for the other.
var epoch = time.Date(2000, 1, 1, 0, 0, 0, 0, time.UTC)

// A run is a simulation in progress. There are few kinds of event, each with a method of its own;
// if no time lies between two of them, one calls the other.
type run struct {
	scenario *Scenario
	strategy *Strategy
	end      int64 // no event is later
	bucket   int64
	now      int64
	clock    time.Time // now, for the plans; see time
	queue    queue
	events   int64

	calls    slab[call]
	attempts slab[attempt]

	groups     []*group
	servers    []*server
	downstream []*caller

	arrivals, jitter, working, balancing *rand.Rand
	network                              *sampler

	post pushbackPost

	expected int   // calls that will be made; 0 if unknown
	over     int   // calls that are over
	last     int64 // when the last call was over
	idle     int64 // when a server last finished some work

	downCalls    int // calls of clients that started during an outage
	downAttempts int // attempts made for them that arrived at the last server
}

// simulated is the net.Addr of all servers.
type simulated struct{}

// Network implements net.Addr.
func (simulated) Network() string { return "sim" }
func (simulated) String() string  { return "simulated" }

// The kinds of events, each with the sort of thing that its ref is an index of.
type eventKind uint8

const (
	groupCalls   eventKind = iota // group: the next call, or all of them
	callSends                     // call: its next attempt follows without a wait
	callDue                       // call: its plan has something due, unless that has changed
	arrives                       // attempt: at the server
	worked                        // attempt: its work is done
	answered                      // attempt: the response is back at the client
	expires                       // attempt: its timeout or the call's deadline is reached
	cancelled                     // attempt: the server learns that the client has given up
	serverBreaks                  // server: it goes down
)

func newRun(s *Scenario, strategy *Strategy) (*run, error) {
	r := &run{
		scenario:  s,
		strategy:  strategy,
		end:       int64(timeOr(s.Duration, longest)),
		bucket:    int64(timeOr(s.Bucket, time.Second)),
		arrivals:  newRandom(s.Seed, forArrivals),
		jitter:    newRandom(s.Seed, forJitter),
		working:   newRandom(s.Seed, forWork),
		balancing: newRandom(s.Seed, forBalancing),
		network:   newSampler(s.Network, newRandom(s.Seed, forNetwork)),
	}
	r.post.init()
	byName := map[string]*server{"": nil}
	for i := range s.Servers {
		one := r.newServer(&s.Servers[i])
		r.servers = append(r.servers, one)
		byName[one.config.Name] = one
	}
	byName[""] = r.servers[0]
	for i := range s.Groups {
		g, err := r.newGroup(&s.Groups[i], byName)
		if err != nil {
			return nil, fmt.Errorf("sim: groups[%d].%w", i, err)
		}
		r.groups = append(r.groups, g)
	}
	for i, one := range r.servers {
		if err := r.connect(one, byName); err != nil {
			return nil, fmt.Errorf("sim: servers[%d].calls.%w", i, err)
		}
	}
	r.begin()
	return r, nil
}

func timeOr(d, otherwise time.Duration) time.Duration {
	if d == 0 {
		return otherwise
	}
	return d
}

// begin adds the first events.
func (r *run) begin() {
	for i, s := range r.servers {
		for _, o := range s.config.Outages {
			if o.Left == 0 {
				r.put(int64(o.From), serverBreaks, int32(i))
			}
		}
	}
	known := true
	for i, g := range r.groups {
		r.expected += g.config.Clients
		known = known && g.config.Rate == 0
		r.put(int64(g.config.Start), groupCalls, int32(i))
	}
	if !known {
		r.expected = 0
	}
}

// put adds an event, unless its time is after the end.
func (r *run) put(at int64, kind eventKind, ref int32) bool {
	if at < r.now || at > r.end { // a time before now means that a sum has overflowed
		return false
	}
	r.queue.put(event{at: at, ref: ref, kind: kind})
	return true
}

// after returns the time d after now, or one just after the end if that is earlier.
func (r *run) after(d float64) int64 {
	return r.now + int64(min(d, float64(longest)))
}

// stuck is the number of events that may happen without any time passing.
const stuck = 200_000_000

func (r *run) simulate(ctx context.Context, watch func(Progress)) error {
	still := int64(0) // events since time passed
	for {
		e, ok := r.queue.take()
		if !ok {
			return nil
		}
		if e.at > r.now {
			r.now, r.clock, still = e.at, time.Time{}, r.events
		}
		r.handle(e)
		r.events++
		if r.events&(1<<12-1) != 0 {
			continue
		}
		if err := ctx.Err(); err != nil {
			return err
		}
		if r.events-still > stuck {
			return fmt.Errorf("sim: %d events happened at %v without time passing: some wait, or the network, must take time",
				stuck, time.Duration(r.now))
		}
		if watch != nil && r.events&(1<<17-1) == 0 {
			watch(r.progress())
		}
	}
}

func (r *run) handle(e event) {
	switch e.kind {
	case groupCalls:
		r.groupCalls(r.groups[e.ref], e.ref)
	case callSends:
		r.sends(e.ref, r.calls.at(e.ref))
	case callDue:
		r.due(e.ref, r.calls.at(e.ref))
	case arrives:
		r.arrives(e.ref, r.attempts.at(e.ref))
	case worked:
		r.worked(e.ref, r.attempts.at(e.ref))
	case answered:
		r.answered(e.ref, r.attempts.at(e.ref))
	case expires:
		r.expires(e.ref, r.attempts.at(e.ref))
	case cancelled:
		r.cancelled(e.ref, r.attempts.at(e.ref))
	case serverBreaks:
		r.breaks(r.servers[e.ref])
	}
}

func (r *run) progress() Progress {
	p := Progress{Now: time.Duration(r.now), Events: r.events}
	if r.scenario.Duration > 0 {
		p.Share = float64(r.now) / float64(r.end)
	}
	if r.expected > 0 {
		p.Share = max(p.Share, float64(r.over)/float64(r.expected))
	}
	return p
}

// time returns now, for the plans.
func (r *run) time() time.Time {
	if r.clock.IsZero() {
		r.clock = epoch.Add(time.Duration(r.now))
	}
	return r.clock
}

// A slab stores things of one kind that come and go, each known by its index. A thing does not move
// while it is stored.
type slab[T any] struct {
	chunks [][]T
	free   []int32
	n      int32
}

const chunkBits = 12

func (s *slab[T]) add() (int32, *T) {
	if k := len(s.free); k > 0 {
		i := s.free[k-1]
		s.free = s.free[:k-1]
		return i, s.at(i)
	}
	if int(s.n)>>chunkBits == len(s.chunks) {
		s.chunks = append(s.chunks, make([]T, 1<<chunkBits))
	}
	s.n++
	return s.n - 1, s.at(s.n - 1)
}

func (s *slab[T]) at(i int32) *T { return &s.chunks[i>>chunkBits][i&(1<<chunkBits-1)] }

// remove frees a place for the next thing that is added.
func (s *slab[T]) remove(i int32) {
	var zero T
	*s.at(i) = zero
	s.free = append(s.free, i)
}

// failures are the errors of attempts, by code, as a client would get them.
var failures = func() (errs [codes.Unauthenticated + 1]error) {
	for c := range errs {
		errs[c] = status.Error(codes.Code(c), "simulated")
	}
	return errs
}()
