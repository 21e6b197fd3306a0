package sim

import (
	"context"
	"errors"
	"slices"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	"github.com/grpcretry/grpcretry"
	"github.com/grpcretry/grpcretry/internal/drive"
	"github.com/grpcretry/grpcretry/internal/layers"
	"github.com/grpcretry/grpcretry/internal/reasons"
)

// This file simulates the clients. Like the loop of an interceptor it sends attempts and keeps
// timers; a [drive.Plan] for each call decides everything else.

// A caller is a source of calls that are alike: a group of clients, or a server that calls
// another.
type caller struct {
	target    *server
	deadline  time.Duration
	deaf      bool // to pushback
	instant   bool // neither the network nor the target takes any time
	rules     layerRules
	untried   bool // attempts go to replicas that the call has not tried
	processes []process
	turn      int // of the processes

	GroupResult
	seen      series[GroupBucket]
	succeeded []int64 // latencies, in nanoseconds
	rescued   []int64 // those of calls that succeeded with another attempt than the first
	failed    []int64
	perCall   []int32
}

// A process has a Retrier of its own, and so its own budgets.
type process struct {
	retrier *grpcretry.Retrier
	turn    int // of the target's replicas
}

// pick returns the replica for the next attempt, unless the call prefers others.
func (p *process) pick(s *server) *replica {
	if len(s.replicas) == 1 {
		return &s.replicas[0]
	}
	p.turn = (p.turn + 1) % len(s.replicas)
	return &s.replicas[p.turn]
}

// pick returns the replica for the call's next attempt.
func (c *call) pick() *replica {
	s := c.caller.target
	next := c.process.pick(s)
	if !c.caller.untried || len(s.replicas) == 1 {
		return next
	}
	for range s.replicas {
		if !slices.Contains(c.tried, next.index) {
			break
		}
		next = c.process.pick(s)
	}
	c.tried = append(c.tried, next.index)
	return next
}

// A lifetime is the context of a call, in simulated time.
type lifetime struct {
	context.Context
	deadline time.Time // zero for none
	ended    bool      // cancelled
}

// Deadline implements context.Context.
func (l *lifetime) Deadline() (time.Time, bool) { return l.deadline, !l.deadline.IsZero() }

// Err implements context.Context. The deadline is compared with simulated time by the plan.
func (l *lifetime) Err() error {
	if l.ended {
		return context.Canceled
	}
	return nil
}

// A group is a caller that consists of clients.
type group struct {
	caller
	config *Group
	begun  bool
	stop   int64
}

// A call is what a client wants.
type call struct {
	plan     drive.Plan[grpcretry.Attempt]
	caller   *caller
	process  *process
	start    int64
	deadline int64 // 0 for none
	context  lifetime
	down     bool  // its client's call started during an outage
	parent   int32 // the attempt at a server that waits for this call; -1 for none
	number   int32 // of the newest attempt
	failure  error // of the attempt that failed last
	hedged   bool
	over     bool

	timers int32 // events to come
	armed  int64 // when the plan's next decision is due, if there is an event for it; else -1

	open []int32 // the attempts in flight
	room [2]int32

	tried []int // replicas; nil if nobody asks
}

// An attempt is one try of a call, as client and server see it. It is kept until neither
// the client, nor the server or the network, nor a timer knows it any more.
type attempt struct {
	call    int32
	child   int32 // the downstream call that it waits for; -1 for none
	holders int8  // who knows it
	state   state
	given   bool // the client has given up on it
	ended   bool // for the client
	code    codes.Code
	flight

	replica *replica
	request *layers.Request // what its downstream call is made for; nil without a server interceptor
	trailer metadata.MD
	since   int64 // when it arrived, and then when its work was begun
}

// A flight is what the client knows of an attempt.
type flight struct {
	number int32
	hedge  bool
	mark   layers.Mark // what it tells its server about the attempts before
	down   bool        // its client's call started during an outage
	source grpcretry.WaitSource
	wait   time.Duration
	sent   int64
}

// A state is where an attempt is, for the server.
type state uint8

const (
	travelling state = iota // to the server, or back
	queued
	busy    // being worked on
	calling // waiting for a downstream call
	gone    // out of the server without an answer
)

func (r *run) newGroup(config *Group, byName map[string]*server) (*group, error) {
	g := &group{config: config, stop: r.end}
	if config.Stop > 0 {
		g.stop = int64(config.Stop)
	}
	strategy := config.Strategy
	if strategy == nil {
		strategy = r.strategy
	}
	g.Name = config.Name
	g.target = byName[config.Target]
	g.deadline = config.Deadline
	if config.With != "" {
		same := slices.IndexFunc(r.groups, func(one *group) bool { return one.Name == config.With })
		r.prepare(&g.caller, strategy)
		g.processes = r.groups[same].processes
		return g, nil
	}
	return g, r.equip(&g.caller, strategy, max(1, config.Processes))
}

// connect gives a server the callers for its downstream calls.
func (r *run) connect(s *server, byName map[string]*server) error {
	config := s.config.Calls
	if config == nil {
		return nil
	}
	strategy := config.Strategy
	if strategy == nil {
		strategy = r.strategy
	}
	s.calls = &caller{
		GroupResult: GroupResult{Name: s.config.Name + " calls " + config.Target},
		target:      byName[config.Target],
		deadline:    config.Deadline,
		rules: layerRules{layers.Measures{
			StopsCallers: config.StopCallers || strategy.StopCallers,
			OneAttempt:   config.OneAttempt || strategy.OneAttempt,
		}},
	}
	r.downstream = append(r.downstream, s.calls)
	return r.equip(s.calls, strategy, len(s.replicas))
}

// equip makes the processes of a caller, each with a budget of its own.
func (r *run) equip(c *caller, strategy *Strategy, processes int) error {
	r.prepare(c, strategy)
	c.processes = make([]process, processes)
	for i := range c.processes {
		p, err := strategy.process()
		if err != nil {
			return err
		}
		if n := len(c.target.replicas); n > 1 {
			p.turn = r.balancing.IntN(n)
		}
		c.processes[i] = p
	}
	return nil
}

// prepare sets everything but the processes.
func (r *run) prepare(c *caller, strategy *Strategy) {
	c.Outcomes = map[string]int{}
	c.seen = newSeries(r.bucket, func(next, last *GroupBucket) { next.Open = last.Open })
	c.deaf = strategy.IgnorePushback
	c.untried = strategy.Untried
	c.instant = strategy.Hedging == nil && r.network.always0() && c.target.instant()
}

// groupCalls starts a group's next call, or all its calls if they start together.
func (r *run) groupCalls(g *group, ref int32) {
	c := g.config
	switch {
	case c.Rate > 0:
		if g.begun { // the first event is only the start
			r.clientCall(&g.caller)
		}
		wait := float64(time.Second) / c.Rate
		if !c.Even {
			wait *= r.arrivals.ExpFloat64()
		}
		if at := r.after(wait); at < g.stop {
			r.put(at, groupCalls, ref)
		}
	case c.Spread > 0 && !g.begun:
		for range c.Clients {
			r.put(int64(c.Start)+r.arrivals.Int64N(int64(c.Spread)), groupCalls, ref)
		}
	case c.Spread > 0:
		r.clientCall(&g.caller)
	default:
		for range c.Clients {
			r.clientCall(&g.caller)
		}
	}
	g.begun = true
}

// clientCall begins a client's call.
func (r *run) clientCall(from *caller) {
	down := r.inOutage()
	if down {
		r.downCalls++
	}
	r.newCall(call{caller: from, context: lifetime{Context: context.Background()}, down: down, parent: -1})
}

// downstreamCall begins the call that a server makes for an attempt.
func (r *run) downstreamCall(from *caller, ai int32, a *attempt) int32 {
	a.request = from.rules.request(a.flight)
	c := call{caller: from, context: lifetime{Context: context.Background()}, down: a.down, parent: ai}
	c.deadline = r.calls.at(a.call).deadline
	if a.request != nil {
		c.context.Context = a.request
	}
	return r.newCall(c)
}

// newCall begins a call. Its deadline is that of the attempt that it serves, if any.
func (r *run) newCall(begun call) int32 {
	i, c := r.calls.add()
	*c = begun
	from, within := c.caller, c.deadline
	c.process, c.start, c.armed = &from.processes[from.turn], r.now, -1
	c.open = c.room[:0]
	if from.turn++; from.turn == len(from.processes) {
		from.turn = 0
	}
	if from.deadline > 0 && (within == 0 || r.now+int64(from.deadline) < within) {
		c.deadline = r.now + int64(from.deadline)
	}
	if c.deadline > 0 {
		c.context.deadline = epoch.Add(time.Duration(c.deadline))
	}
	c.plan = drive.New[grpcretry.Attempt](&c.context, c.process.retrier, from.target.method, "", r.time(), nil)
	from.seen.at(r.now).Calls++
	r.open(from, 1)
	r.send(i, c)
	return i
}

// send begins an attempt.
func (r *run) send(i int32, c *call) {
	sent, timeout := c.plan.Sent(r.time())
	one := flight{
		number: int32(sent.Number), hedge: sent.Hedge, source: sent.WaitSource, wait: sent.Wait, sent: r.now,
		mark: markIn(c.plan.RequestHeader()), down: c.down,
	}
	if c.number = one.number; c.number == 1 {
		c.hedged = !c.plan.DueAt().IsZero() // something is due while the first attempt is in flight
	}
	seen := c.caller.seen.at(r.now)
	seen.Attempts++
	if one.number > 1 {
		seen.Retries++
	}
	if one.hedge {
		seen.Hedges++
	}
	if c.caller.instant {
		r.sendAtOnce(i, c, one)
		return
	}
	r.arm(i, c)
	ai, a := r.attempts.add()
	a.call, a.child, a.flight = i, -1, one
	a.replica = c.pick()
	a.holders = 2 // the client, and what is on its way
	c.open = append(c.open, ai)
	until := c.deadline
	if timeout > 0 && (until == 0 || r.now+int64(timeout) < until) {
		until = r.now + int64(timeout)
	}
	r.expireAt(until, ai, a)
	if delay := r.network.draw(); delay > 0 {
		r.travel(r.after(delay), arrives, ai, a)
	} else {
		r.arrives(ai, a)
	}
}

// expireAt sets a timer for an attempt, unless at is 0.
func (r *run) expireAt(at int64, ai int32, a *attempt) {
	if at > 0 && r.put(at, expires, ai) {
		a.holders++
	}
}

// sendAtOnce makes an attempt that ends before any time passes, so that nobody has to
// remember it. It is a shortcut with the same result.
func (r *run) sendAtOnce(i int32, c *call, one flight) {
	s := c.pick()
	seen := s.seen.at(r.now)
	answer := r.ask(s, seen, one)
	if answer.Code == codes.OK {
		seen.Served++
	}
	r.settle(i, c, one, failures[answer.Code], r.post.trailer(answer))
}

// travel schedules an event of an attempt that one of its holders waits for.
func (r *run) travel(at int64, kind eventKind, ai int32, a *attempt) {
	if !r.put(at, kind, ai) {
		r.release(ai, a)
	}
}

func (r *run) release(ai int32, a *attempt) {
	if a.holders--; a.holders == 0 {
		r.attempts.remove(ai)
	}
}

// answered handles the arrival of the response at the client.
func (r *run) answered(ai int32, a *attempt) {
	if !a.ended {
		r.endAttempt(ai, a, failures[a.code])
	}
	r.release(ai, a)
}

// expires handles an attempt that has reached its timeout or the call's deadline.
func (r *run) expires(ai int32, a *attempt) {
	if !a.ended {
		r.expire(ai, a)
	}
	r.release(ai, a)
}

// expire ends an attempt at the deadline, and asks the plan about it at the attempt timeout.
func (r *run) expire(ai int32, a *attempt) {
	c := r.calls.at(a.call)
	if c.deadline > 0 && r.now >= c.deadline {
		r.abandon(ai, a, failures[codes.DeadlineExceeded])
		return
	}
	step := c.plan.Overdue(r.describe(c, a.flight), r.time(), r.jitter.Float64())
	r.expireAt(c.deadline, ai, a)
	if !r.cut(c, step) {
		r.arm(a.call, c)
	}
}

// cut ends the attempt that a step says is to be cut, if any.
func (r *run) cut(c *call, step drive.Step) bool {
	for _, ai := range c.open {
		if a := r.attempts.at(ai); int(a.flight.number) == step.Cut {
			r.abandon(ai, a, grpcretry.ErrAttemptTimeout)
			return true
		}
	}
	return false
}

// abandon ends an attempt for the client, with err, while the server may still have it.
func (r *run) abandon(ai int32, a *attempt, err error) {
	a.given = true
	a.trailer = nil
	if a.replica.config.IgnoresCancel {
		r.endAttempt(ai, a, err)
		return
	}
	a.holders++
	r.endAttempt(ai, a, err)
	r.cancel(ai, a)
}

// cancel tells the server that the client has given up.
func (r *run) cancel(ai int32, a *attempt) {
	if delay := r.network.draw(); delay > 0 {
		r.travel(r.after(delay), cancelled, ai, a)
	} else {
		r.cancelled(ai, a)
	}
}

// endAttempt ends an attempt for the client, with err.
func (r *run) endAttempt(ai int32, a *attempt, err error) {
	a.ended = true
	c := r.calls.at(a.call)
	at := slices.Index(c.open, ai)
	c.open = slices.Delete(c.open, at, at+1)
	r.settle(a.call, c, a.flight, err, a.trailer)
	r.release(ai, a)
}

// settle handles the end of an attempt, which has succeeded if err is nil.
func (r *run) settle(i int32, c *call, one flight, err error, trailer metadata.MD) {
	ended := r.describe(c, one)
	ended.Err = err
	if !c.caller.deaf {
		ended.Trailer = trailer
	}
	if err == nil {
		c.plan.Ended(ended, r.time(), 0)
		r.loseAll(c)
		r.endCall(i, c, ending{number: one.number, hedge: one.hedge})
		return
	}
	c.caller.seen.at(r.now).Wasted++
	c.failure = err
	step := c.plan.Ended(ended, r.time(), r.jitter.Float64())
	if step.End {
		r.loseAll(c)
		r.endCall(i, c, ending{number: one.number, hedge: one.hedge, err: err, reason: step.Reason})
		return
	}
	r.follow(i, c, step)
}

// describe returns what the client knows of an attempt, except how it ended.
func (r *run) describe(c *call, one flight) grpcretry.Attempt {
	took := time.Duration(r.now - one.sent)
	return grpcretry.Attempt{
		Method:     c.caller.target.method,
		Number:     int(one.number),
		Hedge:      one.hedge,
		Start:      r.time().Add(-took),
		Duration:   took,
		Peer:       simulated{}, // an attempt without one may have reached no server
		Wait:       one.wait,
		WaitSource: one.source,
	}
}

// follow does what a step says, unless the step ends the call.
func (r *run) follow(i int32, c *call, step drive.Step) {
	switch {
	case step.Send && c.hedged:
		r.send(i, c)
	case step.Send: // an event, because a call whose waits are 0 may have attempts without end
		r.put(r.now, callSends, i)
		c.timers++
	default:
		r.arm(i, c)
	}
}

// arm sets the timer of a call to the time when its plan has something due.
func (r *run) arm(i int32, c *call) {
	due := c.plan.DueAt()
	if due.IsZero() {
		return // what is set already will find that
	}
	if at := int64(due.Sub(epoch)); at != c.armed && r.put(at, callDue, i) {
		c.timers++
		c.armed = at
	}
}

// sends makes the next attempt of a call that does not wait before it.
func (r *run) sends(i int32, c *call) {
	if r.timerEnds(i, c) {
		r.send(i, c)
	}
}

// due asks the plan at a time when it had something due; that may have changed since.
func (r *run) due(i int32, c *call) {
	if !r.timerEnds(i, c) {
		return
	}
	if c.armed == r.now {
		c.armed = -1
	}
	due := c.plan.DueAt()
	if due.IsZero() || r.time().Before(due) {
		return
	}
	switch step := c.plan.Due(r.time()); {
	case step.End && len(c.open) > 0: // the deadline, which ends the attempts as well
	case step.End:
		r.endCall(i, c, ending{number: c.number, err: c.failure, reason: step.Reason})
	case step.Send:
		r.send(i, c)
	case r.cut(c, step):
	default: // a wait is repeated, or a hedge is not sent
		if errors.Is(step.Reason, grpcretry.ErrBudgetExhausted) {
			c.caller.seen.at(r.now).Suppressed++
		}
		r.arm(i, c)
	}
}

// timerEnds reports whether the call that an event was for goes on. If not, and no other event
// is to come, the call is forgotten.
func (r *run) timerEnds(i int32, c *call) bool {
	c.timers--
	goesOn := !c.over
	r.forget(i, c)
	return goesOn
}

// forget removes a call that is over, once no event is to come.
func (r *run) forget(i int32, c *call) {
	if c.over && c.timers == 0 {
		r.calls.remove(i)
	}
}

// cancelCall ends a downstream call whose caller has given up.
func (r *run) cancelCall(i int32) {
	c := r.calls.at(i)
	c.context.ended = true
	if len(c.open) > 0 {
		r.abandon(c.open[0], r.attempts.at(c.open[0]), failures[codes.Canceled])
		return
	}
	c.plan.Due(r.time())
	r.endCall(i, c, ending{number: c.number, err: failures[codes.Canceled], reason: context.Canceled})
}

// An ending describes how a call ends: with success if err is nil, otherwise for a reason.
type ending struct {
	number      int32 // of the decisive attempt
	hedge       bool  // it was one
	err, reason error
}

// endCall ends a call.
func (r *run) endCall(i int32, c *call, e ending) {
	from := c.caller
	r.open(from, -1)
	r.over++
	r.last = r.now
	latency := r.now - c.start
	seen := from.seen.at(r.now)
	from.perCall = append(from.perCall, c.number)
	from.Outcomes[reasons.Outcome(e.err, e.reason, int(e.number), e.hedge)]++
	if e.err == nil {
		seen.Succeeded++
		from.succeeded = append(from.succeeded, latency)
		if e.number > 1 {
			from.rescued = append(from.rescued, latency)
		}
	} else {
		seen.Failed++
		from.failed = append(from.failed, latency)
	}
	if errors.Is(e.reason, grpcretry.ErrBudgetExhausted) {
		seen.Refused++
		from.target.seen.at(r.now).Refused++
	}
	parent := c.parent
	c.over = true
	r.forget(i, c)
	if parent >= 0 {
		r.called(parent, codeOf(e.err))
	}
}

func codeOf(err error) codes.Code {
	if err == grpcretry.ErrAttemptTimeout { //nolint:errorlint // as a handler would pass it on
		return codes.DeadlineExceeded
	}
	return status.Code(err)
}

// open counts a caller's calls in flight.
func (r *run) open(from *caller, change int) {
	from.Open += change
	from.seen.at(r.now).Open = from.Open
	from.target.opened += change
	from.target.seen.at(r.now).Open = from.target.opened
}
