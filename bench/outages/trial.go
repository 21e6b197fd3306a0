package main

import (
	"context"
	"math"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/connectivity"
	"google.golang.org/grpc/stats"
	"google.golang.org/grpc/status"

	echov1 "github.com/grpcretry/grpcretry/proto/echo/v1"
)

// measure has one client go through the outage, with a target of its own.
func (o *outage) measure(ctx context.Context, c *client) (*result, error) {
	t, err := o.target(ctx)
	if err != nil {
		return nil, err
	}
	defer t.close()
	cc, err := c.dial(t.addresses(), grpc.WithStatsHandler(failures{}))
	if err != nil {
		return nil, err
	}
	defer func() { _ = cc.Close() }()
	calls := &calls{client: echov1.NewEchoServiceClient(cc), deadline: o.deadline}
	stop := calls.steadily(ctx, o.rate)
	defer stop()
	if err := pause(ctx, o.before); err != nil {
		return nil, err
	}
	for range o.times {
		if err := o.happen(ctx, t, cc, calls); err != nil {
			return nil, err
		}
	}
	stop()
	calls.running.Wait()
	r := &result{calls: calls.made}
	if s, counts := t.(*listening); counts {
		r.attempts = s.attemptsPerCall()
	}
	return r, ctx.Err() // calls that were cut short are no result
}

// happen is one time that the target fails.
func (o *outage) happen(ctx context.Context, t target, cc *grpc.ClientConn, calls *calls) error {
	start := time.Now()
	t.fail()
	if o.burst > 0 {
		cc.WaitForStateChange(ctx, connectivity.Ready)
		calls.together(ctx, o.burst)
	}
	if err := pause(ctx, time.Until(start.Add(o.lasts))); err != nil {
		return err
	}
	if err := t.restore(ctx); err != nil {
		return err
	}
	return pause(ctx, o.after)
}

// calls are those of one client, numbered from 1.
type calls struct {
	client   echov1.EchoServiceClient
	deadline time.Duration
	running  sync.WaitGroup

	mu   sync.Mutex
	made []*call // guarded by mu until no call starts any more
}

// A call is complete when it no longer runs.
type call struct {
	start  time.Time
	late   time.Duration // it started so long after its time
	took   time.Duration
	err    error
	failed atomic.Int32 // attempts that ended with UNAVAILABLE, sent or not
}

// start starts a call whose time has come.
func (c *calls) start(ctx context.Context, due time.Time) {
	made := &call{start: time.Now()}
	made.late = made.start.Sub(due)
	c.mu.Lock()
	c.made = append(c.made, made)
	request := &echov1.EchoRequest{Sequence: int64(len(c.made))}
	c.mu.Unlock()
	c.running.Go(func() {
		ctx, cancel := context.WithDeadline(context.WithValue(ctx, callKey{}, made), made.start.Add(c.deadline))
		defer cancel()
		_, made.err = c.client.Echo(ctx, request)
		made.took = time.Since(made.start)
	})
}

// together starts n calls.
func (c *calls) together(ctx context.Context, n int) {
	for range n {
		c.start(ctx, time.Now())
	}
}

// steadily starts so many calls a second until stop returns.
func (c *calls) steadily(ctx context.Context, rate int) (stop func()) {
	if rate == 0 {
		return func() {}
	}
	interval := time.Second / time.Duration(rate)
	ticking, cancel := context.WithCancel(ctx)
	stopped := make(chan struct{})
	go func() {
		defer close(stopped)
		for next := time.Now(); pause(ticking, time.Until(next)) == nil; next = next.Add(interval) {
			c.start(ctx, next)
		}
	}()
	return func() { cancel(); <-stopped }
}

type callKey struct{}

// failures is a stats.Handler that counts the failed attempts of each call, whoever made them.
type failures struct{}

// HandleRPC counts an attempt that failed.
func (failures) HandleRPC(ctx context.Context, s stats.RPCStats) {
	if end, ok := s.(*stats.End); ok && status.Code(end.Error) == codes.Unavailable {
		if made, ok := ctx.Value(callKey{}).(*call); ok {
			made.failed.Add(1)
		}
	}
}

// TagRPC does nothing.
func (failures) TagRPC(ctx context.Context, _ *stats.RPCTagInfo) context.Context { return ctx }

// TagConn does nothing.
func (failures) TagConn(ctx context.Context, _ *stats.ConnTagInfo) context.Context { return ctx }

// HandleConn does nothing.
func (failures) HandleConn(context.Context, stats.ConnStats) {}

// pause waits for d, which may have passed already, or until ctx ends.
func pause(ctx context.Context, d time.Duration) error {
	if d <= 0 {
		return ctx.Err()
	}
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// A result is what became of one client's calls.
type result struct {
	calls    []*call // in the order in which they started
	attempts float64 // that were rejected, per call of which one was; 0 where there is no server that rejects
}

func (r *result) lost() int {
	n := 0
	for _, c := range r.calls {
		if c.err != nil {
			n++
		}
	}
	return n
}

// late returns how late one call in twenty started, or later.
func (r *result) late() time.Duration {
	var late []time.Duration
	for _, c := range r.calls {
		late = append(late, c.late)
	}
	slices.Sort(late)
	return quantile(late, 0.95)
}

// rescued returns how long those calls took, in ascending order, that succeeded although an attempt failed.
func (r *result) rescued() []time.Duration {
	var took []time.Duration
	for _, c := range r.calls {
		if c.err == nil && c.failed.Load() > 0 {
			took = append(took, c.took)
		}
	}
	slices.Sort(took)
	return took
}

// inSecond returns how long those calls took, in ascending order, that started in the nth second.
func (r *result) inSecond(n int) []time.Duration {
	var took []time.Duration
	for _, c := range r.calls {
		if since := c.start.Sub(r.calls[0].start); since/time.Second == time.Duration(n-1) {
			took = append(took, c.took)
		}
	}
	slices.Sort(took)
	return took
}

// waiting is the largest number of calls that run at the same time.
func (r *result) waiting() int {
	most := 0
	for i, c := range r.calls {
		n := 1
		for _, earlier := range r.calls[:i] {
			if earlier.start.Add(earlier.took).After(c.start) {
				n++
			}
		}
		most = max(most, n)
	}
	return most
}

// quantile of durations in ascending order: the smallest that is at least as long as a share q of them, 0 for none.
func quantile(sorted []time.Duration, q float64) time.Duration {
	if len(sorted) == 0 {
		return 0
	}
	return sorted[max(int(math.Ceil(q*float64(len(sorted))))-1, 0)]
}
