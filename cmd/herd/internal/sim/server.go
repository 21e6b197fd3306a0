package sim

import (
	"context"
	"math"
	"slices"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"

	"github.com/grpcretry/grpcretry"
)

// A server is the state of a [Server].
type server struct {
	config   *Server
	method   string
	replicas []replica
	work     *sampler

	workers int     // of each replica; 0 if no call has to wait for one
	stretch float64 // the factor of service times that makes the workers serve exactly Capacity

	calls *caller // nil if it calls no other server

	ServerResult
	seen    series[ServerBucket]
	inside  int // attempts in it
	opened  int // calls to it in flight
	lost    int // attempts that were in it when it broke
	changed int64
	waited  float64 // total nanoseconds in the queue, of attempts whose work started
	started int
	worked  float64 // total nanoseconds of all workers
	stayed  float64 // total nanoseconds of all attempts
}

// A replica is one process of a server, with a capacity of its own.
type replica struct {
	*server
	index int
	gate  *Gate

	busy    int
	queue   ring // attempts, some of them gone
	waiting int  // attempts in the queue that are not gone
	broken  bool // it goes down at this moment
	debt    float64
}

func (r *run) newServer(config *Server) *server {
	s := &server{
		config:   config,
		method:   "/sim.Server/" + config.Name,
		replicas: make([]replica, config.replicas()),
		work:     newSampler(config.Latency, r.working),
		stretch:  1,
	}
	for i := range s.replicas {
		s.replicas[i] = replica{server: s, index: i, gate: newGate(config, i)}
	}
	s.Name = config.Name
	s.seen = newSeries(r.bucket, func(next, last *ServerBucket) { next.Open = last.Open })
	if config.Capacity > 0 && config.Window == 0 {
		mean := config.Latency.Mean.Seconds()
		s.workers = max(1, int(math.Round(config.Capacity*mean)))
		if mean > 0 {
			s.stretch = float64(s.workers) / config.Capacity / mean
		}
	}
	s.Workers = s.workers * len(s.replicas)
	return s
}

// up returns the share of its capacity that the server has between two times, over all replicas.
func (s *server) up(from, to int64) float64 {
	var sum float64
	for i := range s.replicas {
		sum += s.replicas[i].gate.up(from, to)
	}
	return sum / float64(len(s.replicas))
}

// instant reports whether the server takes no time for anything.
func (s *server) instant() bool {
	silent := slices.ContainsFunc(s.config.Outages, func(o Outage) bool { return o.Silent })
	return s.workers == 0 && s.work.always0() && s.config.Calls == nil && !silent
}

// ask asks the gate about an attempt that arrives, and counts its answer.
func (r *run) ask(s *replica, seen *ServerBucket, from flight) Answer {
	seen.Offered++
	if from.number > 1 {
		seen.Retried++
	}
	if from.down && s.server == r.servers[len(r.servers)-1] {
		r.downAttempts++
	}
	answer := s.gate.Admit(time.Duration(r.now))
	if now := s.gate.segment(r.now); now.errors > 0 && answer.Code == codes.OK && r.working.Float64() < now.errors {
		answer = s.gate.refuse(r.now, now, now.up)
	}
	if answer.Code == codes.OK && s.workers > 0 && s.busy == s.workers && s.full() {
		s.debt += s.config.RejectCost * s.capacityTime()
		answer = s.gate.refuse(r.now, nil, r.now+s.backlog())
	}
	switch {
	case answer.Code == codes.OK:
		seen.Accepted++
	case answer.down:
		seen.Down++
	default:
		seen.Rejected++
	}
	return answer
}

// arrives handles the arrival of an attempt at its server.
func (r *run) arrives(ai int32, a *attempt) {
	s := a.replica
	answer := r.ask(s, s.seen.at(r.now), a.flight)
	switch {
	case answer.Say == SaySilence:
		a.state = gone
		r.release(ai, a)
	case answer.Code != codes.OK:
		r.answer(ai, a, answer)
	default:
		r.admit(ai, a, s)
	}
}

func (s *replica) full() bool { return s.config.Queue >= 0 && s.waiting >= s.config.Queue }

// capacityTime returns the work of one call at full capacity, in nanoseconds of one worker.
func (s *server) capacityTime() float64 {
	return float64(time.Second) * float64(s.workers) / s.config.Capacity
}

// backlog returns about how long the queue takes.
func (s *replica) backlog() int64 {
	return int64(float64(s.waiting+1) / s.config.Capacity * float64(time.Second))
}

// admit gives an accepted attempt to a worker, or puts it into the queue.
func (r *run) admit(ai int32, a *attempt, s *replica) {
	if s.workers == 0 && s.work.always0() && s.calls == nil {
		r.serve(ai, a, s.server)
		return
	}
	r.inside(s.server, 1)
	a.since = r.now
	if s.workers > 0 && s.busy == s.workers {
		a.state = queued
		s.waiting++
		s.queue.push(ai)
		return
	}
	r.work(ai, a, s)
}

// work starts the work of an attempt.
func (r *run) work(ai int32, a *attempt, s *replica) {
	s.started++
	s.waited += float64(r.now - a.since)
	a.since = r.now
	a.state = busy
	if s.workers == 0 {
		r.travel(r.after(s.work.draw()), worked, ai, a)
		return
	}
	s.busy++
	took := s.work.draw()*s.stretch + s.debt
	if s.work.always0() {
		took = s.capacityTime() + s.debt
	}
	s.debt = 0
	r.travel(s.gate.done(r.now, took), worked, ai, a)
}

// worked handles the end of an attempt's work.
func (r *run) worked(ai int32, a *attempt) {
	if a.state == gone {
		r.release(ai, a)
		return
	}
	s := a.replica
	r.next(s, a)
	if s.calls != nil && !a.given {
		a.state = calling
		a.child = -1
		s.calls.turn = s.index // a replica is a process
		child := r.downstreamCall(s.calls, ai, a)
		if a.state == calling { // the call is not over yet
			a.child = child
		}
		return
	}
	r.inside(s.server, -1)
	r.serve(ai, a, s.server)
}

// next frees the worker of an attempt and gives it the next attempt.
func (r *run) next(s *replica, a *attempt) {
	r.idle = r.now
	if s.workers == 0 {
		return
	}
	s.worked += float64(r.now - a.since)
	s.busy--
	for s.busy < s.workers && s.queue.len() > 0 {
		ai := s.queue.pop()
		a := r.attempts.at(ai)
		if a.state == gone {
			r.release(ai, a)
			continue
		}
		s.waiting--
		r.work(ai, a, s)
	}
}

// serve finishes an attempt with success.
func (r *run) serve(ai int32, a *attempt, s *server) {
	seen := s.seen.at(r.now)
	if a.given {
		seen.Late++
	} else {
		seen.Served++
	}
	r.answer(ai, a, Answer{})
}

// called handles the end of the downstream call that an attempt waited for.
func (r *run) called(ai int32, code codes.Code) {
	a := r.attempts.at(ai)
	if a.state != calling {
		return
	}
	s := a.replica.server
	r.inside(s, -1)
	a.state = travelling
	if code == codes.OK {
		r.serve(ai, a, s)
		return
	}
	say := SayNothing
	if s.calls.rules.forbidsRetry(a.request) {
		say = SayNoRetry
	}
	r.answer(ai, a, Answer{Code: code, Say: say})
}

// answer sends the response to an attempt.
func (r *run) answer(ai int32, a *attempt, answer Answer) {
	a.state = travelling
	a.code = answer.Code
	a.trailer = r.post.trailer(answer)
	if delay := r.network.draw(); delay > 0 {
		r.travel(r.after(delay), answered, ai, a)
	} else {
		r.answered(ai, a)
	}
}

// cancelled handles the news that the client has given up on an attempt.
func (r *run) cancelled(ai int32, a *attempt) {
	s := a.replica
	switch a.state {
	case queued:
		a.state = gone
		s.waiting--
		r.inside(s.server, -1)
		s.seen.at(r.now).Late++
	case busy:
		a.state = gone
		r.inside(s.server, -1)
		s.seen.at(r.now).Late++
		r.next(s, a)
	case calling:
		a.state = gone
		r.inside(s.server, -1)
		s.seen.at(r.now).Late++
		if a.child >= 0 {
			r.cancelCall(a.child)
		}
		r.release(ai, a)
	}
	r.release(ai, a)
}

// breaks handles an outage's start: the attempts in its replicas fail, or are lost.
func (r *run) breaks(s *server) {
	for i := range s.replicas {
		one := &s.replicas[i]
		if down := one.gate.segment(r.now); down.down && down.from == r.now {
			one.broken = true
		}
	}
	for ai := range r.attempts.n {
		a := r.attempts.at(ai)
		if a.replica == nil || a.replica.server != s || !a.replica.broken || a.state != queued && a.state != busy && a.state != calling {
			continue
		}
		was := a.state
		a.state = gone
		s.lost++
		r.idle = r.now
		r.inside(s, -1)
		s.seen.at(r.now).Down++
		switch {
		case was == busy && s.workers > 0:
			s.worked += float64(r.now - a.since)
		case was == calling:
			if a.child >= 0 {
				r.cancelCall(a.child)
			}
		}
		r.breakOff(ai, a)
		if was == calling { // queue and worker keep their attempts until their turn comes
			r.release(ai, a)
		}
	}
	for i := range s.replicas {
		if one := &s.replicas[i]; one.broken {
			one.broken, one.busy, one.waiting, one.debt = false, 0, 0, 0
		}
	}
}

// breakOff fails an attempt that its replica will not finish, without a response if that is silent.
func (r *run) breakOff(ai int32, a *attempt) {
	gate := a.replica.gate
	down := gate.segment(r.now)
	if a.given || down.silent {
		return
	}
	a.code = down.code
	a.trailer = r.post.trailer(gate.refuse(r.now, down, down.up))
	a.holders++
	r.travel(r.after(r.network.draw()), answered, ai, a)
}

// inside counts the attempts in a server.
func (r *run) inside(s *server, change int) {
	s.account(r.now, r.bucket)
	s.inside += change
}

// account adds the time that attempts have spent in the server, bucket by bucket.
func (s *server) account(now, width int64) {
	for s.changed < now {
		seen := s.seen.at(s.changed)
		until := min(now, (s.changed/width+1)*width)
		stay := float64(s.inside) * float64(until-s.changed)
		seen.InFlight += stay / float64(width)
		s.stayed += stay
		s.changed = until
	}
}

// A pushbackPost makes the trailers of responses with the library's own server functions.
type pushbackPost struct {
	ctx context.Context
	md  metadata.MD
}

func (p *pushbackPost) init() {
	p.ctx = grpc.NewContextWithServerTransportStream(context.Background(), p)
}

func (p *pushbackPost) trailer(a Answer) metadata.MD {
	var err error
	switch a.Say {
	case SayWait:
		err = grpcretry.SetPushback(p.ctx, a.Wait)
	case SayNoRetry:
		err = grpcretry.SetNoRetry(p.ctx)
	default:
		return nil
	}
	if err != nil {
		return nil // no trailer can hold this wait
	}
	return p.md
}

// Method, SetHeader, SendHeader and SetTrailer implement grpc.ServerTransportStream.

// Method is of no interest.
func (p *pushbackPost) Method() string { return "" }

// SetHeader ignores it.
func (p *pushbackPost) SetHeader(metadata.MD) error { return nil }

// SendHeader ignores it.
func (p *pushbackPost) SendHeader(metadata.MD) error { return nil }

// SetTrailer keeps what the library sends.
func (p *pushbackPost) SetTrailer(md metadata.MD) error {
	p.md = md
	return nil
}

// A ring is a queue of attempts.
type ring struct {
	items []int32
	head  int
	n     int
}

func (q *ring) len() int { return q.n }

func (q *ring) push(v int32) {
	if q.n == len(q.items) {
		grown := make([]int32, max(64, 2*q.n))
		for i := range q.n {
			grown[i] = q.items[(q.head+i)%q.n]
		}
		q.items, q.head = grown, 0
	}
	q.items[(q.head+q.n)%len(q.items)] = v
	q.n++
}

func (q *ring) pop() int32 {
	v := q.items[q.head]
	q.head = (q.head + 1) % len(q.items)
	q.n--
	return v
}
