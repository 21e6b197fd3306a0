package sim

import (
	"testing"
	"time"

	"google.golang.org/grpc/codes"

	"github.com/grpcretry/grpcretry"
)

// A load is a service under a steady load that has an outage at 12 s.
type load struct {
	name      string
	processes int
	rate      float64       // calls per second
	spare     float64       // capacity over that, as a share
	queue     int           // places of the server
	reject    float64       // the cost of a rejection
	ignores   bool          // the server works on what was given up
	down      time.Duration // how long the outage is
	left      float64       // of the capacity
	timeout   time.Duration // of an attempt; 0 for none
	deadline  time.Duration
	silent    bool
	code      codes.Code
	replicas  int // of which the first has the outage; 0: one server, which has it
}

func (l load) scenario() Scenario {
	replicas, only := 1, 0
	if l.replicas > 0 {
		replicas, only = l.replicas, 1
	}
	return Scenario{
		Name:     l.name,
		Duration: 12*sec + l.down + 14*sec,
		Network:  Distribution{Mean: ms},
		Groups:   []Group{{Name: "clients", Rate: l.rate, Deadline: l.deadline, Processes: l.processes}},
		Servers: []Server{{
			Name:     "server",
			Replicas: replicas,
			Capacity: l.rate * (1 + l.spare) / float64(replicas),
			Queue:    l.queue, RejectCost: l.reject, RejectCode: l.code, IgnoresCancel: l.ignores,
			Latency: Distribution{Shape: ExponentialShape, Mean: 20 * ms},
			Outages: []Outage{{Replica: only, From: 12 * sec, For: l.down, Left: l.left, Silent: l.silent}},
		}},
	}
}

// The loads are chosen so that without retries the server recovers within 10 s.
var loads = []load{
	{"three clients, a dip", 3, 1000, 0.2, 240, 0.3, false, 10 * sec, 0.3, sec, 10 * sec, false, 0, 0},
	{"ten, a long queue", 10, 1000, 0.2, 2000, 0, true, 10 * sec, 0.3, sec, 10 * sec, false, 0, 0},
	{"thirty, hardly anything to spare", 30, 1000, 0.1, 100, 0.3, false, 10 * sec, 0.5, sec, 10 * sec, false, 0, 0},
	{"a hundred, costly rejections", 100, 1000, 0.25, 240, 0.6, false, 10 * sec, 0.2, sec, 10 * sec, false, 0, 0},
	{"a hundred, no attempt timeout", 100, 1000, 0.2, 1000, 0.1, true, 10 * sec, 0.3, 0, 5 * sec, false, 0, 0},
	{"three hundred, half a minute of outage", 300, 1000, 0.2, 240, 0.3, false, 30 * sec, 0, sec, 10 * sec, false, 0, 0},
	{"a thousand, half a minute of a third", 1000, 1000, 0.2, 240, 0.3, false, 30 * sec, 0.3, sec, 10 * sec, false, 0, 0},
	{"a thousand, a long queue", 1000, 1000, 0.25, 2000, 0, true, 10 * sec, 0.2, sec, 10 * sec, false, 0, 0},
	{"a thousand, nobody answers", 1000, 1000, 0.3, 240, 0.1, false, 10 * sec, 0, 500 * ms, 2 * sec, true, 0, 0},
	{"three thousand, UNAVAILABLE", 3000, 1000, 0.3, 100, 0.3, false, 10 * sec, 0.3, sec, 10 * sec, false, codes.Unavailable, 0},
	{"three thousand, busy ones", 3000, 3000, 0.2, 600, 0.3, false, 5 * sec, 0.3, sec, 5 * sec, false, 0, 0},
	{"ten thousand, quiet ones", 10000, 1000, 0.3, 240, 0.3, false, 10 * sec, 0.3, sec, 10 * sec, false, 0, 0},
	{"ten thousand, a total outage", 10000, 1000, 0.3, 240, 0.3, false, 10 * sec, 0, sec, 10 * sec, false, 0, 0},
	{"ten thousand, a long queue", 10000, 1000, 0.3, 2000, 0, true, 10 * sec, 0.3, sec, 10 * sec, false, 0, 0},
	{"ten thousand, half the capacity", 10000, 2000, 0.2, 500, 0.2, false, 20 * sec, 0.5, 0, 5 * sec, false, 0, 0},
	{"fifty, short deadlines", 50, 1000, 0.2, 1000, 0.2, true, 10 * sec, 0.3, 200 * ms, sec, false, 0, 0},
	{"fifty, a very long outage of nearly all", 50, 500, 0.2, 100, 0.3, false, 60 * sec, 0.1, sec, 10 * sec, false, 0, 0},
	{"five, one replica of three down", 5, 1000, 1, 100, 0.3, false, 20 * sec, 0, sec, 10 * sec, false, 0, 3},
	{"five hundred, one replica of five slow", 500, 1000, 0.5, 200, 0.3, true, 20 * sec, 0.1, sec, 10 * sec, false, 0, 5},
	{"two hundred, one replica of two silent", 200, 500, 1.5, 200, 0.1, false, 15 * sec, 0, 300 * ms, 3 * sec, true, 0, 2},
}

// The default lets every one of these servers recover within 10 s.
func TestDefaultRecoversUnderAllLoads(t *testing.T) {
	looksAtFigures(t)
	t.Parallel()
	for _, l := range loads {
		t.Run(l.name, func(t *testing.T) {
			t.Parallel()
			l.check(t)
		})
	}
}

func (l load) check(t *testing.T) {
	s := l.scenario()
	r := mustRun(t, s, Strategy{Policy: grpcretry.Policy{AttemptTimeout: l.timeout}}).Summary
	if r.Stable < 0 || r.Stable > 10*sec {
		t.Errorf("stable after %v, want within 10 s", r.Stable)
	}
}
