package sim

import (
	"context"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	"github.com/grpcretry/grpcretry"
)

// This file is the clients. It does what the loop of an interceptor does, start attempts
// and wait, and asks the engine everything else.

// A caller is where calls come from that are alike: a group of clients, or the downstream
// calls of a server.
type caller struct {
	target    *server
	deadline  time.Duration
	deaf      bool // to pushback
	instant   bool // neither the network nor the target takes any time
	processes []process
	turn      int // of the processes

	GroupResult
	seen      series[GroupBucket]
	succeeded []int64 // latencies, in nanoseconds
	failed    []int64
	perCall   []int32
}

// A process has one engine and one budget for its calls, as a Retrier for one target has.
type process struct {
	engine     *grpcretry.Engine
	budget     grpcretry.Budget
	hedges     *hedges // nil where no call is hedged
	classifies bool    // and so reads of an attempt what the engine does not
	turn       int     // of the target's replicas
}

// pick is the replica for the next attempt.
func (p *process) pick(s *server) *replica {
	if len(s.replicas) == 1 {
		return &s.replicas[0]
	}
	p.turn = (p.turn + 1) % len(s.replicas)
	return &s.replicas[p.turn]
}

// A group is the caller that clients are.
type group struct {
	caller
	config *Group
	begun  bool
	stop   int64
}

// A call is what a client wants. Unless it is hedged it has one attempt in flight, or is
// waiting.
type call struct {
	history grpcretry.History // what the engine knows
	caller  *caller
	process *process
	parent  int32 // the attempt at a server that waits for this call; -1 for none
	attempt int32 // in flight; -1 while it waits, and of a hedged call
	race    int32 // of a hedged call; else -1
	number  int32 // attempts begun
	over    bool  // ended during a wait, which then leads nowhere

	wait   time.Duration // before the attempt
	source grpcretry.WaitSource
}

// An attempt is one try of a call, as client and server see it. It is kept until neither
// the client, nor the server or the network, nor a timer knows it any more.
type attempt struct {
	call    int32
	child   int32 // the downstream call that it waits for; -1 for none
	number  int32
	holders int8 // who knows it
	state   state
	given   bool // the client has given up on it
	ended   bool // for the client
	hedge   bool // sent while another one was in flight
	code    codes.Code

	replica  *replica
	trailer  metadata.MD
	sent     int64
	deadline int64 // 0 for none; goes to the server with it
	since    int64 // when it arrived, and then when its work was begun
	version  int64 // that it has read, at an optimistic server
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
	return g, r.equip(&g.caller, strategy, max(1, config.Processes))
}

// connect gives a server what it calls with.
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
	}
	r.downstream = append(r.downstream, s.calls)
	return r.equip(s.calls, strategy, len(s.replicas))
}

// equip makes the processes of a caller, each with a budget of its own.
func (r *run) equip(c *caller, strategy *Strategy, processes int) error {
	c.Outcomes = map[string]int{}
	c.seen = newSeries(r.bucket, func(next, last *GroupBucket) { next.Open = last.Open })
	c.deaf = strategy.IgnorePushback
	c.instant = strategy.Hedging == nil && r.network.always0() && c.target.instant()
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

// groupCalls begins the next call of a group, or all that begin at once.
func (r *run) groupCalls(g *group, ref int32) {
	c := g.config
	switch {
	case c.Rate > 0:
		if g.begun { // the first event is only the start
			r.newCall(&g.caller, -1, 0)
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
		r.newCall(&g.caller, -1, 0)
	default:
		for range c.Clients {
			r.newCall(&g.caller, -1, 0)
		}
	}
	g.begun = true
}

// newCall begins a call; within is the deadline of the attempt that it serves, if any.
func (r *run) newCall(from *caller, parent int32, within int64) int32 {
	i, c := r.calls.add()
	*c = call{
		history: grpcretry.History{Start: r.time()},
		caller:  from,
		process: &from.processes[from.turn],
		parent:  parent,
		attempt: -1,
		race:    -1,
	}
	if from.turn++; from.turn == len(from.processes) {
		from.turn = 0
	}
	deadline := within
	if from.deadline > 0 && (deadline == 0 || r.now+int64(from.deadline) < deadline) {
		deadline = r.now + int64(from.deadline)
	}
	if deadline > 0 {
		c.history.Deadline = epoch.Add(time.Duration(deadline))
	}
	from.seen.at(r.now).Calls++
	r.open(from, 1)
	if c.process.hedges != nil {
		r.beginRace(i, c)
	}
	r.send(i, c)
	return i
}

// send begins an attempt.
func (r *run) send(i int32, c *call) {
	c.number++
	seen := c.caller.seen.at(r.now)
	seen.Attempts++
	if c.number > 1 {
		seen.Retries++
	}
	if c.caller.instant {
		r.sendAtOnce(i, c)
		return
	}
	ai, a := r.attempts.add()
	a.call, a.child, a.number = i, -1, c.number
	a.replica, a.sent = c.process.pick(c.caller.target), r.now
	a.holders = 2 // the client, and what is on its way
	if c.race >= 0 {
		a.hedge = r.races.at(c.race).enter(ai)
	} else {
		c.attempt = ai
	}
	if a.hedge {
		seen.Hedges++
	}
	if timeout := c.engine().AttemptTimeout(&c.history, int(c.number)); timeout > 0 {
		a.deadline = r.now + int64(timeout)
	}
	if !c.history.Deadline.IsZero() {
		deadline := int64(c.history.Deadline.Sub(epoch))
		if a.deadline == 0 || deadline < a.deadline {
			a.deadline = deadline
		}
	}
	if a.deadline > 0 && r.put(a.deadline, expires, ai) {
		a.holders++
	}
	if delay := r.network.draw(); delay > 0 {
		r.travel(r.after(delay), arrives, ai, a)
	} else {
		r.arrives(ai, a)
	}
}

// sendAtOnce makes an attempt that is over before any time passes, so that nobody has to
// remember it. It is only a short way to the same end.
func (r *run) sendAtOnce(i int32, c *call) {
	s := c.process.pick(c.caller.target)
	seen := s.seen.at(r.now)
	answer := r.ask(s, seen, c.number)
	if answer.Code == codes.OK {
		seen.Served++
	}
	r.newFailure(failures[answer.Code]).Attempt.Trailer = r.post.trailer(answer)
	r.settle(i, c, c.number, r.now)
}

// travel puts an event of an attempt that one of its holders waits for.
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

// answered is when the answer reaches the client.
func (r *run) answered(ai int32, a *attempt) {
	if !a.ended {
		f := r.newFailure(failures[a.code])
		f.Attempt.Trailer = a.trailer
		r.endAttempt(ai, a)
	}
	r.release(ai, a)
}

// expires is when the timeout of an attempt, or the deadline of its call, is reached.
func (r *run) expires(ai int32, a *attempt) {
	if !a.ended {
		c := r.calls.at(a.call)
		if d := c.history.Deadline; !d.IsZero() && !r.time().Before(d) {
			r.newFailure(failures[codes.DeadlineExceeded]).CtxErr = context.DeadlineExceeded
		} else {
			r.newFailure(grpcretry.ErrAttemptTimeout).TimedOut = true
		}
		r.abandon(ai, a)
	}
	r.release(ai, a)
}

// newFailure readies the failure that is next told to the engine.
func (r *run) newFailure(err error) *grpcretry.Failure {
	f := &r.failure
	f.Attempt.Err, f.Attempt.Trailer = err, nil
	f.TimedOut, f.CtxErr = false, nil
	return f
}

// abandon ends an attempt for the client while the server may still have it; the failure
// says why.
func (r *run) abandon(ai int32, a *attempt) {
	a.given = true
	if a.replica.config.IgnoresCancel {
		r.endAttempt(ai, a)
		return
	}
	a.holders++
	r.endAttempt(ai, a)
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

// endAttempt ends an attempt for the client.
func (r *run) endAttempt(ai int32, a *attempt) {
	a.ended = true
	c := r.calls.at(a.call)
	if c.race >= 0 {
		r.leaveRace(ai, a, c)
	} else {
		c.attempt = -1
		r.settle(a.call, c, a.number, a.sent)
	}
	r.release(ai, a)
}

// settle is what follows from the only attempt of a call, which has ended: with success if
// the failure has no error, else the engine is asked.
func (r *run) settle(i int32, c *call, number int32, sent int64) {
	f := &r.failure
	budget := c.process.budget
	if h := c.process.hedges; h != nil {
		if f.Attempt.Err == nil && number == 1 {
			h.delay.Answered(c.caller.target.method, time.Duration(r.now-sent), false, r.time())
		}
		if h.straight {
			budget = grpcretry.Unlimited // it hears nothing of calls that pass straight through
		}
	}
	if f.Attempt.Err == nil {
		budget.Deposit(grpcretry.Outcome{Attempt: int(number), Result: grpcretry.Succeeded})
		r.endCall(i, c, ending{number: number})
		return
	}
	v := r.judge(c, budget, number, sent, flight{wait: c.wait, source: c.source})
	if !v.Retry {
		r.endCall(i, c, ending{number: number, err: f.Attempt.Err, reason: v.Reason})
		return
	}
	c.history.Retried(v)
	c.wait, c.source = v.Wait, v.WaitSource
	r.put(r.now+int64(v.Wait), callRetries, i)
}

// judge asks the engine about the failure of an attempt.
func (r *run) judge(c *call, budget grpcretry.Budget, number int32, sent int64, fl flight) grpcretry.Verdict {
	f := &r.failure
	c.caller.seen.at(r.now).Wasted++
	if c.caller.deaf {
		f.Attempt.Trailer = nil
	}
	now := r.time()
	f.Attempt.Number, f.Made = int(number), int(c.number)
	if c.process.classifies {
		f.Attempt.Method = c.caller.target.method
		f.Attempt.Hedge = fl.hedge
		f.Attempt.Wait, f.Attempt.WaitSource = fl.wait, fl.source
		f.Attempt.Duration = time.Duration(r.now - sent)
		f.Attempt.Start = now.Add(-f.Attempt.Duration)
	}
	return c.engine().Judge(r.engine, budget, &c.history, f, now, r.jitter.Float64())
}

// engine is the one that the call obeys.
func (c *call) engine() *grpcretry.Engine {
	if c.race >= 0 {
		return c.process.hedges.engine
	}
	return c.process.engine
}

// retries is when the wait before an attempt is over.
func (r *run) retries(i int32, c *call) {
	if c.over {
		r.calls.remove(i)
		return
	}
	r.send(i, c)
}

// cancelCall ends a downstream call whose caller has given up.
func (r *run) cancelCall(i int32) {
	c := r.calls.at(i)
	if c.race >= 0 {
		r.cancelRace(i, c)
		return
	}
	if c.attempt >= 0 {
		r.newFailure(failures[codes.Canceled]).CtxErr = context.Canceled
		r.abandon(c.attempt, r.attempts.at(c.attempt))
		return
	}
	c.process.budget.Refund() // the retry is never sent
	c.over = true
	r.endCall(i, c, ending{number: c.number, err: failures[codes.Canceled], reason: context.Canceled})
}

// An ending is how a call ends: with success if err is nil, else for a reason.
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
	latency := r.now - int64(c.history.Start.Sub(epoch))
	seen := from.seen.at(r.now)
	from.perCall = append(from.perCall, c.number)
	from.Outcomes[grpcretry.OutcomeName(grpcretry.Event{
		Attempt: grpcretry.Attempt{Number: int(e.number), Hedge: e.hedge}, Err: e.err, Reason: e.reason})]++
	if e.err == nil {
		seen.Succeeded++
		from.succeeded = append(from.succeeded, latency)
	} else {
		seen.Failed++
		from.failed = append(from.failed, latency)
	}
	if e.reason == grpcretry.ErrBudgetExhausted { //nolint:errorlint // the engine's own value
		seen.Refused++
		from.target.seen.at(r.now).Refused++
	}
	parent := c.parent
	if !c.over {
		r.calls.remove(i)
	}
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

// open counts the calls of a caller that are under way.
func (r *run) open(from *caller, change int) {
	from.Open += change
	from.seen.at(r.now).Open = from.Open
	from.target.opened += change
	from.target.seen.at(r.now).Open = from.target.opened
}
