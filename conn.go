package grpcretry

import (
	"context"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/connectivity"
)

// connections notify waiting calls when their ClientConn has a connection, or is closed. gRPC offers
// no channel for that, only a call that blocks; so one goroutine per ClientConn blocks in it, for as
// long as calls wait.
type connections struct {
	mu       sync.Mutex
	watchers map[*grpc.ClientConn]*connWatcher // guarded by mu

	known atomic.Pointer[grpc.ClientConn] // the first ClientConn that was seen with a connection, see isFresh
}

func newConnections() *connections {
	return &connections{watchers: map[*grpc.ClientConn]*connWatcher{}}
}

type connWatcher struct {
	cc      *grpc.ClientConn
	waiting int           // guarded by connections.mu; calls that wait
	closed  chan struct{} // closed with the ClientConn
	stop    context.CancelFunc
	stopped chan struct{} // closed when the goroutine has ended

	mu        sync.Mutex
	ready     chan struct{} // guarded by mu; closed while there is a connection
	connected bool          // guarded by mu; ready is closed
	wanted    int           // guarded by mu; calls that wait for a connection
}

// shortWait is a wait that is not worth a goroutine: the close is noticed when it ends.
const shortWait = 100 * time.Millisecond

// watch returns a channel that is closed with cc, for a wait of d. Call unwatch after it.
func (c *connections) watch(cc *grpc.ClientConn, d time.Duration) (closed <-chan struct{}, unwatch func()) {
	if cc == nil || d <= shortWait {
		return nil, func() {}
	}
	w := c.enter(cc)
	return w.closed, func() { c.leave(w) }
}

// await returns a channel that is closed when cc has a connection, and one that is closed with
// cc. An idle cc is woken up. Call unwatch after the wait.
func (c *connections) await(cc *grpc.ClientConn) (ready, closed <-chan struct{}, unwatch func()) {
	w := c.enter(cc)
	ready = w.want()
	return ready, w.closed, func() {
		w.unwant()
		c.leave(w)
	}
}

func (c *connections) enter(cc *grpc.ClientConn) *connWatcher {
	c.mu.Lock()
	defer c.mu.Unlock()
	w := c.watchers[cc]
	if w == nil {
		w = newConnWatcher(cc)
		c.watchers[cc] = w
	}
	w.waiting++
	return w
}

// leave ends the goroutine, and waits for that, when the last call leaves.
func (c *connections) leave(w *connWatcher) {
	c.mu.Lock()
	w.waiting--
	last := w.waiting == 0
	if last {
		delete(c.watchers, w.cc)
	}
	c.mu.Unlock()
	if last {
		w.stop()
		<-w.stopped
	}
}

func newConnWatcher(cc *grpc.ClientConn) *connWatcher {
	ctx, stop := context.WithCancel(context.Background())
	w := &connWatcher{
		cc:      cc,
		closed:  make(chan struct{}),
		stop:    stop,
		stopped: make(chan struct{}),
		ready:   make(chan struct{}),
	}
	go w.run(ctx)
	return w
}

func (w *connWatcher) run(ctx context.Context) {
	defer close(w.stopped)
	for {
		state := w.cc.GetState()
		w.publish(state)
		if state == connectivity.Shutdown {
			close(w.closed)
			return
		}
		if !w.waitForChange(ctx, state) {
			return
		}
	}
}

// waitForChange returns false if ctx has ended. If the channel is idle, it also returns after a
// while: the channel may have been woken and become idle again before gRPC was asked for the change.
func (w *connWatcher) waitForChange(ctx context.Context, state connectivity.State) bool {
	if state != connectivity.Idle {
		return w.cc.WaitForStateChange(ctx, state)
	}
	while, cancel := context.WithTimeout(ctx, time.Second)
	defer cancel()
	return w.cc.WaitForStateChange(while, state) || ctx.Err() == nil
}

// publish announces the ClientConn's state, and wakes the ClientConn up if it is idle while calls
// wait for a connection.
func (w *connWatcher) publish(state connectivity.State) {
	w.mu.Lock()
	switch connected := state == connectivity.Ready; {
	case connected && !w.connected:
		close(w.ready)
		w.connected = true
	case !connected && w.connected:
		w.ready = make(chan struct{})
		w.connected = false
	}
	wake := w.wanted > 0 && state == connectivity.Idle
	w.mu.Unlock()
	if wake {
		w.cc.Connect()
	}
}

// want returns a channel that is closed when there is a connection.
func (w *connWatcher) want() <-chan struct{} {
	w.mu.Lock()
	w.wanted++
	w.mu.Unlock()
	w.publish(w.cc.GetState()) // the goroutine may not have noticed yet that the connection is lost
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.ready
}

func (w *connWatcher) unwant() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.wanted--
}

// pause waits for d. It returns immediately when ctx ends, when cc is closed and, if connect is true,
// when there is a connection: then connected is true.
func (c *connections) pause(ctx context.Context, cc *grpc.ClientConn, d time.Duration, connect bool) (connected bool) {
	timer := time.NewTimer(d)
	defer timer.Stop()
	var ready, closed <-chan struct{}
	var unwatch func()
	if connect {
		ready, closed, unwatch = c.await(cc)
	} else {
		closed, unwatch = c.watch(cc, d)
	}
	defer unwatch()
	select {
	case <-timer.C:
	case <-ready:
		return true
	case <-closed:
	case <-ctx.Done():
	}
	return false
}

// isClosed reports whether a ClientConn, if there is one, is closed.
func isClosed(cc *grpc.ClientConn) bool {
	return cc != nil && cc.GetState() == connectivity.Shutdown
}

// isUnconnected reports whether a channel has no connection and is trying to get one.
func isUnconnected(cc *grpc.ClientConn) bool {
	if cc == nil {
		return false
	}
	state := cc.GetState()
	return state == connectivity.Connecting || state == connectivity.TransientFailure
}
