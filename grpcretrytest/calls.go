package grpcretrytest

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc"

	"github.com/grpcretry/grpcretry"
)

// Calls are the calls that were recorded. [Record] starts recording; a [Server] records what is called on its
// own connections. It is safe for concurrent use.
type Calls struct {
	t testing.TB

	mu      sync.Mutex
	ended   []call
	open    int           // calls that have started and not ended
	outer   int           // the same, as the interceptors count them
	changed chan struct{} // closed when a call ends
}

// A call is one that has ended.
type call struct {
	start    time.Time
	timeline timeline
}

// Record records the calls of a Retrier until the test ends. Calls that pass straight through, because their
// method makes only one attempt, are not seen; those on a connection of [Server.DialWith] are.
func Record(t testing.TB, r *grpcretry.Retrier) *Calls {
	c := newCalls(t)
	c.observe(r)
	return c
}

func newCalls(t testing.TB) *Calls { return &Calls{t: t, changed: make(chan struct{})} }

func (c *Calls) observe(r *grpcretry.Retrier) {
	c.t.Cleanup(r.Observe(func(ctx context.Context, e grpcretry.Event) {
		switch {
		case e.Kind == grpcretry.AttemptStart && e.Attempt.Number == 1:
			c.mu.Lock()
			c.open++
			c.mu.Unlock()
		case e.Kind == grpcretry.CallEnd:
			if o, ok := ctx.Value(outerKey{}).(*outerCall); ok && o.method == e.Attempt.Method {
				o.recorded.Store(true)
			}
			attempts := e.Attempts
			if len(attempts) == 0 {
				attempts = []grpcretry.Attempt{e.Attempt}
			}
			c.add(call{attempts[0].Start, timelineOf(&e, attempts)}, &c.open)
		}
	}))
}

// add adds a call that has ended, and counts it out.
func (c *Calls) add(one call, open *int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if one.timeline != nil {
		c.ended = append(c.ended, one)
	}
	*open = max(0, *open-1)
	close(c.changed)
	c.changed = make(chan struct{})
}

// interceptors returns the options that see the calls that pass through as well.
func (c *Calls) interceptors() []grpc.DialOption {
	return []grpc.DialOption{
		grpc.WithChainUnaryInterceptor(func(ctx context.Context, method string, req, reply any, cc *grpc.ClientConn,
			invoker grpc.UnaryInvoker, opts ...grpc.CallOption) error {
			o := c.newOuterCall(method)
			err := invoker(context.WithValue(ctx, outerKey{}, o), method, req, reply, cc, opts...)
			o.end(err)
			return err
		}),
		grpc.WithChainStreamInterceptor(func(ctx context.Context, desc *grpc.StreamDesc, cc *grpc.ClientConn, method string,
			streamer grpc.Streamer, opts ...grpc.CallOption) (grpc.ClientStream, error) {
			o := c.newOuterCall(method)
			stream, err := streamer(context.WithValue(ctx, outerKey{}, o), desc, cc, method, append(opts, grpc.OnFinish(o.end))...)
			if err != nil {
				o.end(err)
			}
			return stream, err
		}),
	}
}

// An outerCall is a call as it enters the connection.
type outerCall struct {
	calls    *Calls
	method   string
	start    time.Time
	recorded atomic.Bool // by an observer
	once     sync.Once
}

type outerKey struct{}

func (c *Calls) newOuterCall(method string) *outerCall {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.outer++
	return &outerCall{calls: c, method: method, start: time.Now()}
}

func (o *outerCall) end(err error) {
	o.once.Do(func() {
		var passed timeline
		if !o.recorded.Load() {
			passed = passedThrough(o.method, err, time.Since(o.start))
		}
		o.calls.add(call{o.start, passed}, &o.calls.outer)
	})
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
	return ended, max(c.open, c.outer)
}

const patience = time.Second

// await waits for the calls that have not ended.
func (c *Calls) await() {
	timeout := time.NewTimer(patience)
	defer timeout.Stop()
	for {
		c.mu.Lock()
		open, changed := max(c.open, c.outer), c.changed
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
