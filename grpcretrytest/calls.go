package grpcretrytest

import (
	"context"
	"fmt"
	"io"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc"

	"github.com/grpcretry/grpcretry"
	"github.com/grpcretry/grpcretry/internal/inside"
)

// Calls are the calls that were recorded. [Record] starts recording; a [Server] records what is called on its
// own connections. It is safe for concurrent use.
type Calls struct {
	t testing.TB

	mu       sync.Mutex
	observed map[*grpcretry.Retrier]bool // only in a server's Calls
	ended    []call
	open     int           // calls that have started and not ended
	changed  chan struct{} // closed when a call ends
}

// A call is one that has ended.
type call struct {
	start    time.Time
	timeline timeline
}

// Record records the calls of a Retrier until the test ends, on whatever connection. Calls that pass straight through,
// because their method makes only one attempt, are recorded only on connections of [Server.DialWith].
func Record(t testing.TB, r *grpcretry.Retrier) *Calls {
	c := newCalls(t)
	t.Cleanup(inside.Observe(r, func(_ context.Context, e grpcretry.Event, of inside.Call) {
		switch {
		case e.Kind == grpcretry.AttemptStart && e.Attempt.Number == 1:
			c.begin()
		case e.Kind == grpcretry.CallEnd:
			c.end(callOf(&e, of.Start))
		}
	}))
	return c
}

func newCalls(t testing.TB) *Calls {
	return &Calls{t: t, observed: map[*grpcretry.Retrier]bool{}, changed: make(chan struct{})}
}

// callOf returns the call of its last event.
func callOf(end *grpcretry.Event, start time.Time) call {
	attempts := end.Attempts
	if len(attempts) == 0 {
		attempts = []grpcretry.Attempt{end.Attempt}
	}
	return call{start, timelineOf(end, start, attempts)}
}

func (c *Calls) begin() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.open++
}

func (c *Calls) end(one call) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.ended = append(c.ended, one)
	c.open = max(0, c.open-1)
	close(c.changed)
	c.changed = make(chan struct{})
}

// observe records what a Retrier does with the calls that entered through the interceptors. The Retrier may serve
// several connections, of this server and of others.
func (c *Calls) observe(r *grpcretry.Retrier) {
	c.mu.Lock()
	again := c.observed[r]
	c.observed[r] = true
	c.mu.Unlock()
	if again {
		return
	}
	c.t.Cleanup(inside.Observe(r, func(ctx context.Context, e grpcretry.Event, of inside.Call) {
		o, ok := ctx.Value(outerKey{}).(*outerCall)
		if !ok || o.calls != c || o.method != e.Attempt.Method || o.target != e.Target { // a call made within an attempt
			return
		}
		o.observed.Store(true)
		if e.Kind == grpcretry.CallEnd {
			o.end(callOf(&e, of.Start))
		}
	}))
}

// interceptors returns the options that see the calls of a connection, those that pass through as well.
func (c *Calls) interceptors() []grpc.DialOption {
	return []grpc.DialOption{
		grpc.WithChainUnaryInterceptor(func(ctx context.Context, method string, req, reply any, cc *grpc.ClientConn,
			invoker grpc.UnaryInvoker, opts ...grpc.CallOption) error {
			o := c.newOuterCall(cc, method)
			err := invoker(context.WithValue(ctx, outerKey{}, o), method, req, reply, cc, opts...)
			o.over(err)
			return err
		}),
		grpc.WithChainStreamInterceptor(func(ctx context.Context, desc *grpc.StreamDesc, cc *grpc.ClientConn, method string,
			streamer grpc.Streamer, opts ...grpc.CallOption) (grpc.ClientStream, error) {
			o := c.newOuterCall(cc, method)
			opts = append(slices.Clip(opts), grpc.OnFinish(o.over)) // opts may be shared
			stream, err := streamer(context.WithValue(ctx, outerKey{}, o), desc, cc, method, opts...)
			if err != nil {
				o.over(err)
				return nil, err
			}
			return &outerStream{stream, o, desc.ServerStreams}, nil
		}),
	}
}

// An outerCall is a call as it enters the connection.
type outerCall struct {
	calls    *Calls
	target   string
	method   string
	start    time.Time
	observed atomic.Bool // it has events, and ends with the last
	once     sync.Once
}

type outerKey struct{}

func (c *Calls) newOuterCall(cc *grpc.ClientConn, method string) *outerCall {
	c.begin()
	return &outerCall{calls: c, target: cc.CanonicalTarget(), method: method, start: time.Now()}
}

// over ends a call that passes through.
func (o *outerCall) over(err error) {
	if !o.observed.Load() {
		o.end(call{o.start, passedThrough(o.method, err, time.Since(o.start))})
	}
}

func (o *outerCall) end(one call) { o.once.Do(func() { o.calls.end(one) }) }

// An outerStream notices the end of a stream if an interceptor below has dropped OnFinish.
type outerStream struct {
	grpc.ClientStream
	call    *outerCall
	servers bool // the server streams
}

func (s *outerStream) RecvMsg(m any) error {
	err := s.ClientStream.RecvMsg(m)
	switch {
	case err == io.EOF:
		s.call.over(nil)
	case err != nil || !s.servers:
		s.call.over(err)
	}
	return err
}

// Want compares the calls that have ended since the last Want, with one timeline for each, and fails the test
// with a comparison if they differ. The calls are in the order of their starts or, if they start at the same time,
// of their ends. For the form of a timeline see the package's documentation. Want waits up to a second for a
// call that has not ended, because gRPC reports the end of a stream on a goroutine of its own.
func (c *Calls) Want(timelines ...string) {
	c.t.Helper()
	var want []timeline
	for _, text := range timelines {
		w, err := parse(text)
		if err != nil {
			c.t.Fatalf("grpcretrytest: Want: %v", err)
		}
		want = append(want, w)
	}
	got, open := c.take()
	if problem := compare(got, want, open); problem != "" {
		c.t.Errorf("%s", problem)
	}
}

// String returns the timelines of the same calls, each below its method.
func (c *Calls) String() string {
	c.await()
	c.mu.Lock()
	defer c.mu.Unlock()
	return text(sorted(c.ended))
}

// take removes and returns the calls that have ended, and the number of those that have not.
func (c *Calls) take() (ended []timeline, open int) {
	c.await()
	c.mu.Lock()
	defer c.mu.Unlock()
	ended, c.ended = sorted(c.ended), nil
	return ended, c.open
}

const patience = time.Second

// await waits for the calls that have not ended.
func (c *Calls) await() {
	timeout := time.NewTimer(patience)
	defer timeout.Stop()
	for {
		c.mu.Lock()
		open, changed := c.open, c.changed
		c.mu.Unlock()
		if open == 0 {
			return
		}
		select {
		case <-changed:
		case <-timeout.C:
			return
		}
	}
}

// sorted returns the timelines in the order of their starts, and of their ends if those are the same.
func sorted(calls []call) []timeline {
	slices.SortStableFunc(calls, func(a, b call) int { return a.start.Compare(b.start) })
	var all []timeline
	for _, c := range calls {
		all = append(all, c.timeline)
	}
	return all
}

func text(calls []timeline) string {
	var b strings.Builder
	for _, one := range calls {
		fmt.Fprintf(&b, "%s\n", one.head())
		for _, e := range one.body() {
			fmt.Fprintf(&b, "  %s\n", e)
		}
	}
	return b.String()
}
