package explore

import (
	"context"
	"math/rand/v2"
	"strings"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/encoding"
	"google.golang.org/grpc/encoding/proto"
	"google.golang.org/grpc/mem"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"github.com/grpcretry/grpcretry"
)

// The habits of an application are how it makes a call, apart from what every application does.
type habits struct {
	onFinish   bool          // it passes an OnFinish
	merges     bool          // its codec adds to what a reply holds, instead of replacing that
	ownContext bool          // its context is of a type of its own, so that derived contexts take a goroutine
	header     bool          // it asks a stream for its headers before it receives
	pause      time.Duration // before each message of a bidi stream, which it sends on a goroutine of its own
}

// drawHabits draws the call's habits, and what servers do about them.
func (c *plannedCall) drawHabits(seed uint64, hedges bool) {
	r := rand.New(rand.NewPCG(seed, uint64(c.number)))
	c.onFinish, c.ownContext = r.IntN(2) == 0, r.IntN(4) == 0
	streams := c.method.clients || c.method.servers
	c.merges = !streams && r.IntN(2) == 0
	c.header = streams && r.IntN(4) == 0
	if c.method.clients && c.method.servers && r.IntN(2) == 0 {
		c.pause = pickOne(r, time.Millisecond, 10*time.Millisecond, 40*time.Millisecond)
	}
	if hedges && len(c.steps) > 1 && r.IntN(3) == 0 { // attempt 1 fails while the pushback of its hedge is in force
		c.steps[0] = failing(codes.Unavailable).after(30 * time.Millisecond)
		c.steps[1] = failing(codes.Unavailable).pushback(700 * time.Millisecond)
	}
	for i := range c.steps {
		if c.merges && c.steps[i].kind == fails && r.IntN(2) == 0 {
			c.steps[i].Step = c.steps[i].AfterSending(1) // a failure after the reply
		}
	}
}

// fewer returns the habits that lack one of these.
func (h habits) fewer() []habits {
	var all []habits
	for _, drop := range []func(h *habits){
		func(h *habits) { h.onFinish = false },
		func(h *habits) { h.merges = false },
		func(h *habits) { h.ownContext = false },
		func(h *habits) { h.header = false },
		func(h *habits) { h.pause = 0 },
	} {
		less := h
		if drop(&less); less != h {
			all = append(all, less)
		}
	}
	return all
}

// String returns the habits for a report.
func (h habits) String() string {
	var b strings.Builder
	say := func(given bool, text string) {
		if given {
			b.WriteString("; " + text)
		}
	}
	say(h.onFinish, "it has an OnFinish")
	say(h.merges, "its codec merges")
	say(h.ownContext, "its context has a type of its own")
	say(h.header, "it calls Header first")
	say(h.pause > 0, "it waits "+h.pause.String()+" before each message")
	return b.String()
}

// seen is what an application sees besides replies and the result.
type seen struct {
	mu       sync.Mutex
	finished []error   // what OnFinish has received, each time; guarded by mu
	headed   time.Time // when a stream's headers came; zero if none did
}

// options returns the call's options.
func (h *habits) options(s *seen) (opts []grpc.CallOption) {
	if h.onFinish {
		opts = append(opts, grpc.OnFinish(s.finish))
	}
	if h.merges {
		opts = append(opts, grpc.ForceCodec(merging{}))
	}
	return opts
}

func (s *seen) finish(err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.finished = append(s.finished, err)
}

func (s *seen) look(stream grpc.ClientStream) {
	if md, err := stream.Header(); err == nil && md != nil {
		s.headed = time.Now()
	}
}

// judgeSeen checks what OnFinish and Header have returned.
func (j *judgement) judgeSeen() {
	s := j.result.seen
	s.mu.Lock()
	defer s.mu.Unlock()
	if j.call.onFinish {
		j.must(len(s.finished) == 1, "OnFinish was called %d times", len(s.finished))
		if len(s.finished) == 1 && len(j.events) > 0 {
			got := s.finished[0]
			j.must(status.Code(got) == status.Code(j.result.err), "OnFinish has received %v, and the application %v", got, j.result.err)
		}
	}
	for _, e := range j.events {
		if !s.headed.IsZero() && e.Kind == grpcretry.AttemptStart {
			j.must(!e.Attempt.Start.After(s.headed), "attempt %d has started at %v, and the application had got headers at %v",
				e.Attempt.Number, j.since(e.Attempt.Start), j.since(s.headed))
		}
	}
}

const remains = "the remains of "

// merging is a codec that adds to what a reply holds. So a reply that holds something of an earlier attempt is not
// one of its call.
type merging struct{}

func (merging) Name() string { return proto.Name }

func (merging) Marshal(m any) ([]byte, error) {
	data, err := encoding.GetCodecV2(proto.Name).Marshal(m)
	if err != nil {
		return nil, err
	}
	defer data.Free()
	return data.Materialize(), nil
}

func (merging) Unmarshal(data []byte, m any) error {
	value, ok := m.(*wrapperspb.StringValue)
	if !ok {
		return status.Errorf(codes.Internal, "%T is not this package's", m)
	}
	var more wrapperspb.StringValue
	if err := unmarshal(data, &more); err != nil {
		return err
	}
	if value.Value != "" {
		value.Value = remains + value.Value + " and "
	}
	value.Value += more.Value
	return nil
}

// An ownContext has a type that package context does not know, which therefore starts a goroutine for each context
// derived from it, until that ends. So the goroutines show which have not ended.
type ownContext struct {
	context.Context
	done chan struct{}
}

func newOwnContext(parent context.Context) *ownContext {
	c := &ownContext{Context: parent, done: make(chan struct{})}
	context.AfterFunc(parent, func() { close(c.done) })
	return c
}

// Done implements [context.Context].
func (c *ownContext) Done() <-chan struct{} { return c.done }

// Err implements [context.Context].
func (c *ownContext) Err() error {
	select {
	case <-c.done:
		return c.Context.Err()
	default:
		return nil
	}
}

// later runs a function when the program has been judged.
func (o *observation) later(f func()) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.leave = append(o.leave, f)
}

// leaveAll runs the functions.
func (o *observation) leaveAll() {
	o.mu.Lock()
	defer o.mu.Unlock()
	for _, leave := range o.leave {
		leave()
	}
	o.leave = nil
}

func unmarshal(data []byte, m any) error {
	return encoding.GetCodecV2(proto.Name).Unmarshal(mem.BufferSlice{mem.SliceBuffer(data)}, m)
}
