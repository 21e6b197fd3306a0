package sim

import (
	"math"
	"time"

	"google.golang.org/grpc/codes"
)

// A Gate is the part of a [Server] that accepts or rejects a call when it arrives: outages, the
// counting of a Window, and the pushback for the next attempt. The simulator asks it in simulated
// time; a real server can ask it in real time, for comparison.
//
// A Gate is not safe for concurrent use.
type Gate struct {
	server    *Server
	rejection codes.Code
	pace      []segment
	current   int // of pace

	windowEnd int64
	used      float64 // of the window that ends there

	turn      float64 // when the next client in turn is asked to retry, in nanoseconds
	between   float64 // nanoseconds between two turns
	perWindow float64
}

// An Answer is a server's decision about a call.
type Answer struct {
	Code codes.Code    // OK: it is accepted
	Say  Say           // an instruction for the next attempt
	Wait time.Duration // with SayWait

	down bool // because of an outage
}

// Say is an instruction that an [Answer] adds to its code.
type Say uint8

// The instructions of an [Answer].
const (
	SayNothing Say = iota
	SayWait        // retry after Wait: to be sent with grpcretry.SetPushback
	SayNoRetry     // do not retry: to be sent with grpcretry.SetNoRetry
	SaySilence     // no response is sent: the code does not reach the client
)

// A segment is a time in which a server's share of its capacity changes evenly from one value to
// another.
type segment struct {
	from, to     int64
	begin, end   float64
	down, silent bool
	code         codes.Code
	errors       float64
	up           int64 // of one that is down: when the outage is over, slow start included
}

const forever = math.MaxInt64

// NewGate returns the gate of a server that counts or has unlimited capacity. An error names the
// invalid field; servers with workers need a simulation.
func NewGate(s Server) (*Gate, error) {
	if err := s.check("server"); err != nil {
		return nil, err
	}
	if s.Capacity > 0 && s.Window == 0 {
		return nil, invalid("server.window", s.Window, "a window: a gate alone has no workers")
	}
	for _, o := range s.Outages {
		if o.Errors > 0 {
			return nil, invalid("server.outages.errors", o.Errors, "0: a gate alone has no random numbers")
		}
	}
	return newGate(&s, 0), nil
}

// newGate returns the gate of a replica, counted from 0.
func newGate(s *Server, replica int) *Gate {
	g := &Gate{server: s, rejection: codeOr(s.RejectCode, codes.ResourceExhausted)}
	g.perWindow = s.Capacity * s.Window.Seconds()
	if rate := rateOr(s.Pushback.Rate, s.Capacity); rate > 0 {
		g.between = float64(time.Second) / rate
	}
	last := int64(0)
	for _, o := range s.Outages {
		if o.Replica > 0 && o.Replica != replica+1 {
			continue
		}
		begin, end := int64(o.From), int64(o.From+o.For)
		grown := end + int64(o.SlowStart)
		g.add(segment{from: last, to: begin, begin: 1, end: 1})
		g.add(segment{from: begin, to: end, begin: o.Left, end: o.Left, up: grown,
			down: o.Left == 0, silent: o.Silent, errors: o.Errors, code: codeOr(o.Code, codes.Unavailable)})
		g.add(segment{from: end, to: grown, begin: o.Left, end: 1})
		last = grown
	}
	g.add(segment{from: last, to: forever, begin: 1, end: 1})
	return g
}

func (g *Gate) add(s segment) {
	if s.from < s.to {
		g.pace = append(g.pace, s)
	}
}

// Admit decides about a call that arrives at a time since the start, which never decreases.
func (g *Gate) Admit(at time.Duration) Answer {
	now := int64(at)
	if s := g.segment(now); s.down {
		return g.refuse(now, s, s.up)
	}
	if g.server.Window == 0 || g.count(now) {
		return Answer{}
	}
	return g.refuse(now, nil, g.windowEnd)
}

// count takes a place of the window and returns true, if there is one left.
func (g *Gate) count(now int64) bool {
	window := int64(g.server.Window)
	if now >= g.windowEnd {
		windows := (now-g.windowEnd)/window + 1
		g.windowEnd += windows * window
		g.used = max(0, g.used-float64(windows)*g.perWindow) // rejections may have cost more
	}
	if g.used+1 > g.perWindow*g.segment(now).share(now)+1e-9 {
		g.used += g.server.RejectCost
		return false
	}
	g.used++
	return true
}

// refuse rejects a call that arrives during an outage or, if down is nil, over capacity. There will
// be room from the time room on.
func (g *Gate) refuse(now int64, down *segment, room int64) Answer {
	a := Answer{Code: g.rejection}
	if down != nil {
		a.Code, a.down = down.code, true
		if down.silent {
			a.Say = SaySilence
			return a
		}
	}
	if g.server.Pushback.Kind != NoPushback {
		a.Say, a.Wait = g.pushback(now, room)
	}
	return a
}

// pushback returns the instruction for the next attempt.
func (g *Gate) pushback(now, room int64) (Say, time.Duration) {
	switch p := g.server.Pushback; p.Kind {
	case FixedPushback:
		return SayWait, p.Delay
	case ExactPushback:
		return SayWait, time.Duration(max(0, room-now))
	case SpreadPushback:
		g.turn = max(g.turn, float64(max(now, room)))
		wait := time.Duration(g.turn) - time.Duration(now)
		g.turn += g.between
		return SayWait, wait
	default:
		return SayNoRetry, 0
	}
}

// segment returns the segment of the time now, which never decreases.
func (g *Gate) segment(now int64) *segment {
	for now >= g.pace[g.current].to {
		g.current++
	}
	return &g.pace[g.current]
}

// done returns when work that starts now is done, if it takes that long at full capacity.
func (g *Gate) done(now int64, work float64) int64 {
	for i := g.current; ; i++ {
		s := &g.pace[i]
		if s.to <= now {
			continue
		}
		from := max(now, s.from)
		all := s.area(from, s.to)
		if work > all {
			work -= all
			continue
		}
		share := s.share(from)
		slope := s.slope()
		taken := 2 * work / (share + math.Sqrt(share*share+2*slope*work))
		if math.IsNaN(taken) { // no work, no share
			taken = 0
		}
		return from + int64(math.Round(taken))
	}
}

// Up returns the share of its capacity that the server has between two times, on average over all
// replicas: 1 unless there is an [Outage].
func (s Server) Up(from, to time.Duration) float64 {
	if to <= from {
		return 1
	}
	var sum float64
	for i := range s.replicas() {
		sum += newGate(&s, i).up(int64(from), int64(to))
	}
	return sum / float64(s.replicas())
}

func (g *Gate) up(from, to int64) float64 {
	var area float64
	for _, s := range g.pace {
		if begin, end := max(from, s.from), min(to, s.to); begin < end {
			area += s.area(begin, end)
		}
	}
	return area / float64(to-from)
}

// Total returns how many calls per second all replicas can serve together; 0 means no limit.
func (s Server) Total() float64 { return s.Capacity * float64(s.replicas()) }

func (s *Server) replicas() int { return max(1, s.Replicas) }

func (s *segment) share(at int64) float64 {
	return s.begin + s.slope()*float64(at-s.from)
}

func (s *segment) slope() float64 {
	if s.begin == s.end {
		return 0
	}
	return (s.end - s.begin) / float64(s.to-s.from)
}

// area returns the segment's full-capacity time between two times.
func (s *segment) area(from, to int64) float64 {
	return (s.share(from) + s.share(to)) / 2 * float64(to-from)
}

func codeOr(c, otherwise codes.Code) codes.Code {
	if c == codes.OK {
		return otherwise
	}
	return c
}

func rateOr(v, otherwise float64) float64 {
	if v == 0 {
		return otherwise
	}
	return v
}
