// Package conns lets calls wait until their ClientConn has a connection, or is closed.
package conns

import (
	"context"
	"math"
	"math/rand/v2"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/connectivity"
)

// Watchers notify waiting calls when their ClientConn has a connection, or is closed. gRPC offers
// no channel for that, only a call that blocks; so one goroutine per ClientConn blocks in it, for as
// long as calls wait.
type Watchers struct {
	mu       sync.Mutex
	watchers map[*grpc.ClientConn]*watcher // guarded by mu
}

// New returns Watchers that nothing waits for.
func New() *Watchers {
	return &Watchers{watchers: map[*grpc.ClientConn]*watcher{}}
}

type watcher struct {
	cc      *grpc.ClientConn
	waiting int           // guarded by Watchers.mu; calls that wait
	closed  chan struct{} // closed with the ClientConn
	stop    context.CancelFunc
	stopped chan struct{} // closed when the goroutine has ended

	mu        sync.Mutex
	ready     chan struct{} // guarded by mu; closed while there is a connection
	connected bool          // guarded by mu; ready is closed
	wanted    int           // guarded by mu; calls that wait for a connection
	wakeups   wakeups       // guarded by mu

	seen connectivity.State // guarded by mu; the last state that was published
}

// ShortWait is a wait that is not worth a goroutine: the close is noticed when it ends.
const ShortWait = 100 * time.Millisecond

// Watch returns a channel that is closed with cc, for a wait of d. Call unwatch after it.
func (c *Watchers) Watch(cc *grpc.ClientConn, d time.Duration) (closed <-chan struct{}, unwatch func()) {
	if cc == nil || d <= ShortWait {
		return nil, func() {}
	}
	w := c.enter(cc)
	return w.closed, func() { c.leave(w) }
}

// Await returns a channel that is closed when cc has a connection, and one that is closed with
// cc. An idle cc is woken up; if that is not enough, one call receives from ready without a connection,
// see [watcher.publish]. Call unwatch after the wait.
func (c *Watchers) Await(cc *grpc.ClientConn) (ready, closed <-chan struct{}, unwatch func()) {
	w := c.enter(cc)
	ready = w.want()
	return ready, w.closed, func() {
		w.unwant()
		c.leave(w)
	}
}

func (c *Watchers) enter(cc *grpc.ClientConn) *watcher {
	c.mu.Lock()
	defer c.mu.Unlock()
	w := c.watchers[cc]
	if w == nil {
		w = newWatcher(cc)
		c.watchers[cc] = w
	}
	w.waiting++
	return w
}

// leave ends the goroutine, and waits for that, when the last call leaves.
func (c *Watchers) leave(w *watcher) {
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

func newWatcher(cc *grpc.ClientConn) *watcher {
	ctx, stop := context.WithCancel(context.Background())
	w := &watcher{
		cc:      cc,
		closed:  make(chan struct{}),
		stop:    stop,
		stopped: make(chan struct{}),
		ready:   make(chan struct{}, 1),
	}
	go w.run(ctx)
	return w
}

func (w *watcher) run(ctx context.Context) {
	defer close(w.stopped)
	for {
		state, check := w.publish()
		if state == connectivity.Shutdown {
			close(w.closed)
			return
		}
		if !w.waitForChange(ctx, state, check) {
			return
		}
	}
}

// waitForChange returns false if ctx has ended. If the channel is idle, it also returns at the time
// to check it.
func (w *watcher) waitForChange(ctx context.Context, state connectivity.State, check time.Time) bool {
	if state != connectivity.Idle {
		return w.cc.WaitForStateChange(ctx, state)
	}
	while, cancel := context.WithDeadline(ctx, check)
	defer cancel()
	return w.cc.WaitForStateChange(while, state) || ctx.Err() == nil
}

// publish announces the ClientConn's state, and wakes the ClientConn up if it is idle while calls
// wait for a connection. If the channel became idle while it was connecting, gRPC has dropped that
// connection, and one call is let go: only an RPC keeps a channel from becoming idle, and its attempt
// waits in gRPC until the connection is made. check is when to look at an idle channel again: it may
// have been woken and become idle before gRPC was asked for the change.
func (w *watcher) publish() (state connectivity.State, check time.Time) {
	w.mu.Lock()
	now := time.Now()
	state = w.cc.GetState()
	switch connected := state == connectivity.Ready; {
	case connected && !w.connected:
		close(w.ready)
		w.connected = true
	case !connected && w.connected:
		w.ready = make(chan struct{}, 1)
		w.connected = false
	}
	if w.wanted > 0 && w.seen == connectivity.Connecting && state == connectivity.Idle && len(w.ready) == 0 {
		w.ready <- struct{}{}
	}
	w.seen = state
	w.wakeups.observe(state, now)
	wake := w.wanted > 0 && state == connectivity.Idle && w.wakeups.take(now)
	check = now.Add(time.Second)
	if next := w.wakeups.next; next.After(now) && next.Before(check) {
		check = next
	}
	w.mu.Unlock()
	if wake {
		w.cc.Connect()
	}
	return state, check
}

// want returns a channel that is closed when there is a connection.
func (w *watcher) want() <-chan struct{} {
	w.mu.Lock()
	w.wanted++
	w.mu.Unlock()
	w.publish() // the goroutine may not have noticed yet that the connection is lost
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.ready
}

func (w *watcher) unwant() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.wanted--
}

// wakeups are the times at which an idle channel is woken: when gRPC would have dialed if the channel
// had not become idle, which makes it forget its backoff (see [grpc.WithIdleTimeout]).
type wakeups struct {
	awake time.Time // since when the channel has not been idle; zero while it is
	dials int       // since the last connection, including those that gRPC makes by itself while awake
	next  time.Time // no wake-up before
}

// firstRedial is gRPC's default wait after the first dial without a connection.
const firstRedial = time.Second

// redial returns gRPC's default wait after n dials without a connection; u is uniform in [0, 1).
func redial(n int, u float64) time.Duration {
	wait := min(float64(firstRedial)*math.Pow(1.6, float64(n-1)), float64(2*time.Minute))
	return time.Duration(wait * (0.8 + 0.4*u))
}

// observe records a change of the channel's state.
func (w *wakeups) observe(state connectivity.State, now time.Time) {
	switch idle := state == connectivity.Idle; {
	case state == connectivity.Ready:
		*w = wakeups{}
	case !idle && w.awake.IsZero():
		w.awake, w.dials = now, max(w.dials, 1)
	case idle && !w.awake.IsZero():
		dialed, wait := w.awake, firstRedial // gRPC's first wait has no jitter, the others have at least this
		for n := 2; !dialed.Add(wait).After(now); n++ {
			dialed, wait = dialed.Add(wait), redial(n, 0)
			w.dials++
		}
		w.awake = time.Time{}
		w.next = dialed.Add(redial(w.dials, rand.Float64()))
	}
}

// take reports whether a wake-up is due, and counts it as a dial.
func (w *wakeups) take(now time.Time) bool {
	if now.Before(w.next) {
		return false
	}
	w.dials++
	w.next = now.Add(redial(w.dials, rand.Float64()))
	return true
}

// Pause waits for d, which is above 0. It returns immediately when ctx ends, when over or cc is closed and, if connect is true,
// when Await's ready lets the call go: then connected is true. over may be nil.
func (c *Watchers) Pause(ctx context.Context, cc *grpc.ClientConn, d time.Duration, connect bool, over <-chan struct{}) (connected bool) {
	timer := time.NewTimer(d)
	defer timer.Stop()
	var ready, closed <-chan struct{}
	var unwatch func()
	if connect {
		ready, closed, unwatch = c.Await(cc)
	} else {
		closed, unwatch = c.Watch(cc, d)
	}
	defer unwatch()
	select {
	case <-timer.C:
	case <-ready:
		return true
	case <-closed:
	case <-over:
	case <-ctx.Done():
	}
	return false
}

// Waiting returns how many calls wait for each ClientConn.
func (c *Watchers) Waiting() map[*grpc.ClientConn]int {
	c.mu.Lock()
	defer c.mu.Unlock()
	waiting := map[*grpc.ClientConn]int{}
	for cc, w := range c.watchers {
		waiting[cc] = w.waiting
	}
	return waiting
}
