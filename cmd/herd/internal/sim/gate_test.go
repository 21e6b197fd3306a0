package sim

import (
	"math"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
)

func TestGateCountsAndRefuses(t *testing.T) {
	g, err := NewGate(Server{
		Capacity: 2, Window: time.Second,
		Outages:  []Outage{{From: sec, For: sec, Code: codes.Internal}, {From: 3 * sec, For: sec, Silent: true}},
		Pushback: Pushback{Kind: ExactPushback},
	})
	if err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct {
		at   time.Duration
		want Answer
	}{
		{0, Answer{}},
		{500 * ms, Answer{}},
		{600 * ms, Answer{Code: codes.ResourceExhausted, Say: SayWait, Wait: 400 * ms}},
		{1500 * ms, Answer{Code: codes.Internal, Say: SayWait, Wait: 500 * ms, down: true}},
		{2 * sec, Answer{}},
		{3500 * ms, Answer{Code: codes.Unavailable, Say: SaySilence, down: true}},
		{4 * sec, Answer{}},
		{time.Hour, Answer{}},
	} {
		if got := g.Admit(tt.at); got != tt.want {
			t.Errorf("Admit(%v) = %+v, want %+v", tt.at, got, tt.want)
		}
	}
}

func TestNewGateRefusesWorkers(t *testing.T) {
	for field, s := range map[string]Server{
		"server.window":   {Capacity: 10},
		"server.capacity": {Capacity: -1},
	} {
		if _, err := NewGate(s); err == nil || !strings.Contains(err.Error(), field+" is ") {
			t.Errorf("NewGate(%+v) = %v, want an error that names %s", s, err, field)
		}
	}
}

// The closed form of how work goes on through dips and slow starts, against adding it up.
func TestGateWorksAtItsPace(t *testing.T) {
	g := newGate(&Server{Capacity: 100, Outages: []Outage{
		{From: sec, For: sec, Left: 0.25, SlowStart: 2 * sec},
		{From: 5 * sec, For: sec, SlowStart: sec},
	}}, 0)
	const step = 20 * time.Microsecond
	for _, begin := range []time.Duration{0, 900 * ms, 1500 * ms, 2500 * ms, 4500 * ms, 5500 * ms, 6100 * ms, 9 * sec} {
		for _, work := range []time.Duration{ms, 300 * ms, 2 * sec, 7 * sec} {
			got := time.Duration(g.done(int64(begin), float64(work)))
			left, at := float64(work), begin
			fresh := &Gate{server: g.server, pace: g.pace}
			for left > 0 {
				s := fresh.segment(int64(at))
				left -= s.share(int64(at)) * float64(step)
				at += step
			}
			if (got - at).Abs() > 5*step {
				t.Errorf("work of %v begun at %v is done at %v, want %v", work, begin, got, at)
			}
		}
	}
	for _, tt := range []struct {
		from, to time.Duration
		want     float64
	}{
		{0, sec, 100}, {sec, 2 * sec, 25}, {2 * sec, 4 * sec, 125}, {3 * sec, 4 * sec, 81.25},
		{5 * sec, 6 * sec, 0}, {6 * sec, 7 * sec, 50}, {500 * ms, 1500 * ms, 62.5},
	} {
		if got := 100 * g.up(int64(tt.from), int64(tt.to)) * (tt.to - tt.from).Seconds(); math.Abs(got-tt.want) > 1e-6 {
			t.Errorf("between %v and %v it could do %v, want %v", tt.from, tt.to, got, tt.want)
		}
	}
}

func TestServerUp(t *testing.T) {
	s := Server{Outages: []Outage{{From: sec, For: sec, SlowStart: 2 * sec}}}
	for _, tt := range []struct {
		from, to time.Duration
		want     float64
	}{
		{0, sec, 1}, {sec, 2 * sec, 0}, {2 * sec, 4 * sec, 0.5}, {500 * ms, 1500 * ms, 0.5}, {time.Hour, time.Hour, 1},
	} {
		if got := s.Up(tt.from, tt.to); math.Abs(got-tt.want) > 1e-9 {
			t.Errorf("Up(%v, %v) = %v, want %v", tt.from, tt.to, got, tt.want)
		}
	}
}
