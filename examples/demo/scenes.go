package main

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"go.opentelemetry.io/otel/trace"
	"google.golang.org/grpc"

	"github.com/grpcretry/grpcretry"
	"github.com/grpcretry/grpcretry/internal/reasons"
	echov1 "github.com/grpcretry/grpcretry/proto/echo/v1"
)

// A scene is a few calls that show one thing.
type scene struct {
	title    string
	caption  []string // what the reader sees
	calls    []plan
	away     time.Duration     // how long the server is gone, from before the first call on; 0 if it is there
	opts     []grpc.CallOption // of every call
	oneByOne bool              // the calls follow each other; else they start together
	brief    bool              // one line for each call
	want     tally
}

// A plan is one call: what the client asks, and what the server answers, the last answer
// again and again.
type plan struct {
	name    string
	script  []answer
	timeout time.Duration // the caller's deadline; 0 for none
	payload int           // bytes
	opts    []grpc.CallOption
}

// newScenes writes the play.
func newScenes() []scene {
	// The last two scenes share a budget with the default settings, which no scene before
	// them has used. A program needs no option for that.
	newDefault := grpcretry.WithRatioBudget(grpcretry.RatioBudget{})
	return []scene{
		healthy(),
		outage(),
		jitter(),
		serverSaysWhen(),
		serverSaysStop(),
		noCure(),
		deadlines(),
		restart(),
		budgetRunsOut(newDefault),
		recovery(newDefault),
	}
}

// unlimited is for scenes that make more retries than a client's default budget pays for when
// hardly a call has been answered, and in which the waits of one call do not depend on the others. In
// production stay with the defaults.
var unlimited = []grpc.CallOption{grpcretry.WithBudget(grpcretry.Unlimited), grpcretry.WithPatience(0)}

func healthy() scene {
	return scene{
		title:   "All is well",
		caption: []string{"Calls that succeed on their first attempt, at almost no cost."},
		calls: []plan{
			{name: "get cart"},
			{name: "get user"},
			{name: "get price"},
		},
		brief: true,
		want:  tally{calls: 3, attempts: 3},
	}
}

func outage() scene {
	return scene{
		title: "Outage",
		caption: []string{
			"The server is UNAVAILABLE for a moment. Each wait is twice the one before;",
			"the second call meets a longer outage and gives up after 4 attempts.",
			"Scenes 2 to 4 have no budget, which scene 9 has, and no patience: otherwise a",
			"call would wait longer when it sees that another one has just failed.",
		},
		opts: unlimited,
		calls: []plan{
			{name: "get cart", script: []answer{down, down, ok}},
			{name: "get user", script: []answer{down}},
		},
		want: tally{calls: 2, attempts: 7, rescued: 1,
			stops: map[string]int{"exhausted": 1}},
	}
}

func jitter() scene {
	fullJitter := []grpc.CallOption{grpcretry.WithBackoff(grpcretry.Exponential{Base: 400 * time.Millisecond})}
	s := scene{
		title: "Full jitter",
		caption: []string{
			"Six clients find the server UNAVAILABLE at the same moment. With full jitter",
			"they do not all retry at the same moment: look down the columns.",
		},
		opts:  unlimited,
		brief: true,
		want:  tally{calls: 6, attempts: 18, rescued: 6},
	}
	for i := range 6 {
		s.calls = append(s.calls, plan{
			name: fmt.Sprintf("client %d", i+1), script: []answer{down, down, ok}, opts: fullJitter})
	}
	return s
}

func serverSaysWhen() scene {
	return scene{
		title: "The server says when",
		caption: []string{
			"Overloaded, it names the wait. Pushback is exact; RetryInfo is a minimum, to",
			"which up to 20% is added. After either, the backoff starts again at 60 ms.",
		},
		opts: unlimited,
		calls: []plan{
			{name: "get cart", script: []answer{overloaded(250 * time.Millisecond), ok}},
			{name: "get user", script: []answer{overQuota(250 * time.Millisecond), ok}},
			{name: "get price", script: []answer{down, overloaded(150 * time.Millisecond), down, ok}},
		},
		want: tally{calls: 3, attempts: 8, rescued: 3},
	}
}

func serverSaysStop() scene {
	return scene{
		title: "The server says stop",
		caption: []string{
			"UNAVAILABLE would be retried, but this server says not to. And ten minutes are",
			"over MaxServerDelay, 5 min: such a wait is not shortened, the call ends.",
		},
		calls: []plan{
			{name: "get cart", script: []answer{shuttingDown}},
			{name: "get user", script: []answer{overloaded(10 * time.Minute)}},
		},
		want: tally{calls: 2, attempts: 2, stops: map[string]int{"pushback": 2}},
	}
}

func noCure() scene {
	return scene{
		title: "No cure",
		caption: []string{
			"Failures that another attempt cannot cure. RESOURCE_EXHAUSTED is retried where",
			"it means overload, and not where it means a message over the size limit.",
		},
		calls: []plan{
			{name: "get cart 7", script: []answer{notFound}},
			{name: "get report", payload: 64 << 10, opts: []grpc.CallOption{grpc.MaxCallRecvMsgSize(4 << 10)}},
		},
		want: tally{calls: 2, attempts: 2, stops: map[string]int{"not_retryable": 2}},
	}
}

// hangsFor is how long an attempt may hang if another one can follow.
const hangsFor = 300 * time.Millisecond

// The first call would otherwise wait longer, because the target has been failing since the scene before.
func deadlines() scene {
	return scene{
		title: "Deadlines",
		caption: []string{
			"A replica hangs: the attempt timeout of 300 ms frees the call to try again.",
			"A wait of 5 s with a deadline in 1 s: the call fails now, not in a second.",
		},
		calls: []plan{
			{name: "get cart", script: []answer{hang, ok}, timeout: 5 * time.Second, opts: []grpc.CallOption{
				grpcretry.WithAttemptTimeout(hangsFor), grpcretry.WithMaxAttempts(2), grpcretry.WithPatience(0)}},
			{name: "get user", script: []answer{overloaded(5 * time.Second)}, timeout: time.Second},
		},
		want: tally{calls: 2, attempts: 3, rescued: 1,
			stops: map[string]int{"deadline": 1}},
	}
}

// restart has calls that find nobody at the server's address. gRPC connects again after a
// second, give or take a fifth.
func restart() scene {
	return scene{
		title: "The server restarts",
		caption: []string{
			"It is gone for 300 ms. Calls that reach no server wait for gRPC to connect",
			"again, in about a second, and then for their backoff. No budget is charged.",
		},
		calls: []plan{
			{name: "get cart"},
			{name: "get user", timeout: 5 * time.Second},
		},
		away: 300 * time.Millisecond,
		want: tally{calls: 2, attempts: 4, rescued: 2},
	}
}

// budgetRunsOut has 20 calls, each of which would make 4 attempts. The budget has 3 retries,
// whichever calls take them.
func budgetRunsOut(newDefault grpcretry.CallOption) scene {
	s := scene{
		title: "The budget runs out",
		caption: []string{
			"All is UNAVAILABLE for 20 calls: 80 attempts, if every call made its 4.",
			"The default budget of a new client has a reserve of 3, so the server gets 23.",
			"WithPatience(0): without a retry, the other calls do not wait for the server.",
		},
		opts:  []grpc.CallOption{newDefault, grpcretry.WithPatience(0)},
		brief: true,
		want: tally{calls: 20, attempts: 23,
			stops: map[string]int{"budget": 20}},
	}
	for i := range 20 {
		s.calls = append(s.calls, plan{name: fmt.Sprintf("call %d", i+1), script: []answer{down}})
	}
	return s
}

// recovery begins with the budget that the scene before has emptied. Its first five calls
// earn the one retry that the last two need, one after the other.
func recovery(newDefault grpcretry.CallOption) scene {
	s := scene{
		title: "Recovery",
		caption: []string{
			"The server is back. Five calls that it answers earn one retry, which rescues",
			"call 6 from a short outage and, because it did, is there again for call 7.",
		},
		opts:     []grpc.CallOption{newDefault},
		oneByOne: true,
		brief:    true,
		want:     tally{calls: 7, attempts: 9, rescued: 2},
	}
	for i := range 7 {
		p := plan{name: fmt.Sprintf("call %d", i+1)}
		if i >= 5 {
			p.script = []answer{down, ok}
		}
		s.calls = append(s.calls, p)
	}
	return s
}

// play makes the calls of a scene, in a trace of their own.
func (sc scene) play(ctx context.Context, number int, s *server, c *client, tracer trace.Tracer) (result, error) {
	ctx, span := tracer.Start(ctx, fmt.Sprintf("scene %d: %s", number, sc.title))
	defer span.End()

	r := result{scene: sc, number: number, records: make([]*record, len(sc.calls))}
	back := func() error { return nil }
	if sc.away > 0 {
		back = s.goAway(ctx, c, sc.away)
	}
	var running sync.WaitGroup
	for i, plan := range sc.calls {
		plan.opts = slices.Concat(sc.opts, plan.opts)
		running.Go(func() { r.records[i] = plan.play(ctx, number, s, c) })
		if sc.oneByOne {
			running.Wait()
		}
	}
	running.Wait()
	return r, errors.Join(back(), ctx.Err()) // a scene that the reader interrupted proves nothing
}

// play makes one call.
func (p plan) play(ctx context.Context, scene int, s *server, c *client) *record {
	if p.timeout > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, p.timeout)
		defer cancel()
	}
	message := fmt.Sprintf("scene %d: %s", scene, p.name) // by which the server knows the call
	s.expect(message, p.script)
	r := c.call(ctx, p.name, &echov1.EchoRequest{Message: message, Payload: make([]byte, p.payload)}, p.opts...)
	r.serverSaw = s.attempts(message)
	return r
}

// A result is what became of a scene.
type result struct {
	scene   scene
	number  int
	records []*record
}

// A tally counts.
type tally struct {
	calls, attempts, rescued int
	serverSaw                int            // what the server counted, not the client; not for want
	stops                    map[string]int // calls given up, by the name of the reason
}

func (t tally) gaveUp() (n int) {
	for _, count := range t.stops {
		n += count
	}
	return n
}

// tally counts what the observer saw in a scene.
func (r result) tally() tally {
	t := tally{calls: len(r.records), stops: map[string]int{}}
	for _, rec := range r.records {
		t.attempts += len(rec.steps)
		t.serverSaw += rec.serverSaw
		switch {
		case rec.rescued():
			t.rescued++
		case !rec.succeeded():
			t.stops[reasons.Of(rec.end.Reason).Word]++
		}
	}
	return t
}

// verify compares a scene with what it should show.
func (r result) verify() error {
	var errs []error
	for _, rec := range r.records {
		if err := rec.verify(); err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", rec.name, err))
		}
	}
	got, want := r.tally(), r.scene.want
	if got.calls != want.calls || got.attempts != want.attempts || got.rescued != want.rescued {
		errs = append(errs, fmt.Errorf("got %d calls, %d attempts, %d rescued; want %d, %d, %d",
			got.calls, got.attempts, got.rescued, want.calls, want.attempts, want.rescued))
	}
	if !maps.Equal(got.stops, want.stops) {
		errs = append(errs, fmt.Errorf("calls given up by reason: %v, want %v", got.stops, want.stops))
	}
	return errors.Join(errs...)
}
