package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/connectivity"
	"google.golang.org/grpc/stats"

	echov1 "github.com/grpcretry/grpcretry/proto/echo/v1"
)

// A load is how calls are made. Its numbers are the same for all clients.
type load struct {
	calls    int           // made together just after the server went away, or
	rate     int           // calls per second,
	before   time.Duration // from so long before the server goes away
	after    time.Duration // until so long after it is back
	deadline time.Duration // of each call
}

// A scenario is a server that goes away, and the calls that are made meanwhile.
type scenario struct {
	replicas int           // the first one goes away
	away     time.Duration // from the end of the process until its address is listened on again
	load     load
}

// measure runs the scenario with one client and servers of its own.
func (s *scenario) measure(ctx context.Context, c *client) (*summary, error) {
	for try := 1; ; try++ {
		t, err := s.try(ctx, c)
		if err == nil {
			return t.summarize(), nil
		}
		if try == 3 || !errors.Is(err, errNotListening) {
			return nil, fmt.Errorf("%s: %w", c.name, err)
		}
	}
}

func (s *scenario) try(ctx context.Context, c *client) (*trial, error) {
	t, err := newTrial(ctx, c, s.replicas)
	if err != nil {
		return nil, err
	}
	defer t.close()
	if s.load.rate > 0 {
		stop := t.calls.every(ctx, time.Second/time.Duration(s.load.rate), s.load.deadline)
		defer stop()
		if err := pause(ctx, s.load.before); err != nil {
			return nil, err
		}
		if err := t.restart(ctx, s.away, nil); err != nil {
			return nil, err
		}
		if err := pause(ctx, s.load.after); err != nil {
			return nil, err
		}
		stop()
	} else if err := t.restart(ctx, s.away, func() { t.calls.together(ctx, s.load.calls, s.load.deadline) }); err != nil {
		return nil, err
	}
	t.calls.running.Wait()
	t.close() // completes the arrivals
	for _, p := range t.all() {
		err = errors.Join(err, p.err)
	}
	return t, errors.Join(err, ctx.Err()) // calls that were cut short are no result
}

// A trial is one client with servers of its own.
type trial struct {
	servers     []*process
	replacement *process // of the first server, ready to listen
	cc          *grpc.ClientConn
	connections *connections
	calls       calls
}

// newTrial starts the servers and connects the client to all of them.
func newTrial(ctx context.Context, c *client, replicas int) (_ *trial, err error) {
	t := &trial{connections: &connections{lost: make(chan struct{})}}
	defer func() {
		if err != nil {
			t.close()
		}
	}()
	addresses, err := freeAddresses(replicas)
	if err != nil {
		return nil, err
	}
	for _, address := range addresses {
		p, err := startProcess(ctx, address)
		if err != nil {
			return nil, err
		}
		t.servers = append(t.servers, p)
		if err := p.listen(ctx); err != nil {
			return nil, err
		}
	}
	if t.replacement, err = startProcess(ctx, addresses[0]); err != nil {
		return nil, err
	}
	if t.cc, err = c.dial(addresses, grpc.WithStatsHandler(t.connections)); err != nil {
		return nil, err
	}
	t.calls.client = echov1.NewEchoServiceClient(t.cc)
	return t, t.connect(ctx)
}

// connect makes calls until each server has responded to one.
func (t *trial) connect(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	for responded := map[string]bool{}; len(responded) < len(t.servers); {
		response, err := t.calls.client.Echo(ctx, &echov1.EchoRequest{}, grpc.WaitForReady(true))
		if err != nil {
			return fmt.Errorf("connecting: %w", err)
		}
		responded[response.GetMessage()] = true
	}
	return nil
}

// restart takes the first server away for so long, and calls meanwhile as soon as the
// client has noticed.
func (t *trial) restart(ctx context.Context, away time.Duration, meanwhile func()) error {
	if err := t.kill(ctx); err != nil {
		return err
	}
	gone := time.Now()
	if meanwhile != nil {
		meanwhile()
	}
	if err := pause(ctx, time.Until(gone.Add(away))); err != nil {
		return err
	}
	return t.replacement.listen(ctx)
}

// kill takes the first server away and waits until the client has noticed.
func (t *trial) kill(ctx context.Context) error {
	t.servers[0].kill()
	select {
	case <-t.connections.lost:
	case <-ctx.Done():
		return ctx.Err()
	}
	if len(t.servers) > 1 {
		return nil // the others keep the ClientConn READY
	}
	if !t.cc.WaitForStateChange(ctx, connectivity.Ready) {
		return ctx.Err()
	}
	return nil
}

// close ends the client and the servers. A second close does nothing.
func (t *trial) close() {
	if t.cc != nil {
		_ = t.cc.Close() // an error says that it is closed
	}
	t.calls.running.Wait()
	for _, p := range t.all() {
		p.kill()
	}
}

func (t *trial) all() []*process {
	if t.replacement == nil {
		return t.servers
	}
	return append(slices.Clone(t.servers), t.replacement)
}

// calls are those of a trial, numbered from 1 in the order in which they start.
type calls struct {
	client  echov1.EchoServiceClient
	made    []*call // appended to by one goroutine at a time
	running sync.WaitGroup
}

// A call is complete when it no longer runs.
type call struct {
	start time.Time
	took  time.Duration
	err   error
}

func (c *calls) start(ctx context.Context, deadline time.Duration) {
	made := &call{start: time.Now()}
	c.made = append(c.made, made)
	request := &echov1.EchoRequest{Sequence: int64(len(c.made))}
	c.running.Go(func() {
		ctx, cancel := context.WithDeadline(ctx, made.start.Add(deadline))
		defer cancel()
		_, made.err = c.client.Echo(ctx, request)
		made.took = time.Since(made.start)
	})
}

// together starts n calls.
func (c *calls) together(ctx context.Context, n int, deadline time.Duration) {
	for range n {
		c.start(ctx, deadline)
	}
}

// every starts a call each interval until stop returns.
func (c *calls) every(ctx context.Context, interval, deadline time.Duration) (stop func()) {
	ticking, cancel := context.WithCancel(ctx)
	stopped := make(chan struct{})
	go func() {
		defer close(stopped)
		for next := time.Now(); pause(ticking, time.Until(next)) == nil; next = next.Add(interval) {
			c.start(ctx, deadline)
		}
	}()
	return func() { cancel(); <-stopped }
}

// connections is a stats.Handler that sees when the client loses a connection, and when it
// has one again.
type connections struct {
	lost chan struct{} // closed by the first connection that ends

	mu    sync.Mutex
	ended bool      // guarded by mu
	again time.Time // guarded by mu: the first connection after that
}

// HandleConn notes what happens first.
func (c *connections) HandleConn(_ context.Context, s stats.ConnStats) {
	c.mu.Lock()
	defer c.mu.Unlock()
	switch s.(type) {
	case *stats.ConnEnd:
		if !c.ended {
			c.ended = true
			close(c.lost)
		}
	case *stats.ConnBegin:
		if c.ended && c.again.IsZero() {
			c.again = time.Now()
		}
	}
}

// reconnected returns the time at which the client had a connection again, zero for never.
func (c *connections) reconnected() time.Time {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.again
}

// TagConn does nothing.
func (*connections) TagConn(ctx context.Context, _ *stats.ConnTagInfo) context.Context { return ctx }

// TagRPC does nothing.
func (*connections) TagRPC(ctx context.Context, _ *stats.RPCTagInfo) context.Context { return ctx }

// HandleRPC does nothing.
func (*connections) HandleRPC(context.Context, stats.RPCStats) {}

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
