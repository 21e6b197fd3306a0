package sim

import (
	"math"
	"time"

	"google.golang.org/grpc/codes"
)

// A Gate is the part of a [Server] that says yes or no to a call when it arrives: outages,
// the counting of a Window, and what is said of the next attempt. The simulator asks it in
// simulated time; a real server can ask the same in real time, to be compared.
//
// A Gate is not safe for concurrent use.
type Gate struct {
	server    *Server
	rejection codes.Code
	pace      []segment
	current   int // of pace

	windowEnd int64
	used      float64 // of the window that ends there

	turn      float64 // when the next client in turn is asked to come back, in nanoseconds
	between   float64 // nanoseconds between two turns
	perWindow float64
}

// An Answer is what a server says to a call.
type Answer struct {
	Code codes.Code // OK: it is accepted
	Say  Say
	Wait time.Duration // with SayWait

	down bool // because of an outage
}

// Say is what an [Answer] adds to its code.
type Say uint8

// What an [Answer] can add.
const (
	SayNothing Say = iota
	SayWait        // come back after Wait: to be sent with grpcretry.SetPushback
	SayNoRetry     // do not come back: to be sent with grpcretry.SetNoRetry
	SaySilence     // and there is no answer at all: the code does not reach the client
)

// A segment is a time in which the share of the capacity that a server has goes evenly
// from one value to another.
type segment struct {
	from, to     int64
	begin, end   float64
	down, silent bool
	code         codes.Code
	up           int64 // of one that is down: when the outage is over, slow start included
}

const forever = math.MaxInt64

// NewGate makes the gate of a server that counts or has no limit of capacity. An error
// names the field that cannot be meant; servers with workers need a simulation.
func NewGate(s Server) (*Gate, error) {
	if err := s.check("server"); err != nil {
		return nil, err
	}
	if s.Capacity > 0 && s.Window == 0 {
		return nil, invalid("server.window", s.Window, "a window: a gate alone has no workers")
	}
	return newGate(&s, 0), nil
}

// newGate makes the gate of a replica, from 0.
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
			down: o.Left == 0, silent: o.Silent, code: codeOr(o.Code, codes.Unavailable)})
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

// Admit is asked when a call arrives, at a time since the start that never goes back.
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

// count is whether the window has room for one more, which then is taken.
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

// refuse answers a call that comes in an outage, or if down is nil over capacity. There is
// room from the time room on.
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

// pushback is what is said of the next attempt.
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

// segment is the one that now is in; now never goes back.
func (g *Gate) segment(now int64) *segment {
	for now >= g.pace[g.current].to {
		g.current++
	}
	return &g.pace[g.current]
}

// done is when work begun now is done, if at full capacity it takes so long.
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

// Up is the share of its capacity that the server has between two times, on average over all
// replicas: 1 unless an [Outage] says otherwise.
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

// Total is how many calls per second all replicas can do together; 0 means no limit.
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

// area is the full-capacity time that passes in the segment from one time to another.
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
