package grpcretry

import (
	"context"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/connectivity"
)

// closing tells waiting calls that their ClientConn has been closed. gRPC has no channel
// for that, only a call that blocks; so one goroutine for each ClientConn blocks in it,
// for as long as calls wait.
type closing struct {
	mu       sync.Mutex
	watchers map[*grpc.ClientConn]*closeWatcher // guarded by mu
}

type closeWatcher struct {
	waiting int           // guarded by closing.mu
	closed  chan struct{} // closed with the ClientConn
	stop    context.CancelFunc
	stopped chan struct{} // closed when the goroutine has ended
}

// shortWait is not worth a goroutine: the close is noticed at its end.
const shortWait = 100 * time.Millisecond

// watch returns a channel that is closed with cc, for a wait of d. Call unwatch after it.
func (c *closing) watch(cc *grpc.ClientConn, d time.Duration) (closed <-chan struct{}, unwatch func()) {
	if cc == nil || d <= shortWait {
		return nil, func() {}
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	w := c.watchers[cc]
	if w == nil {
		w = newCloseWatcher(cc)
		c.watchers[cc] = w
	}
	w.waiting++
	return w.closed, func() { c.unwatch(cc, w) }
}

// unwatch ends the goroutine with the last that waits, and waits for it.
func (c *closing) unwatch(cc *grpc.ClientConn, w *closeWatcher) {
	c.mu.Lock()
	w.waiting--
	last := w.waiting == 0
	if last {
		delete(c.watchers, cc)
	}
	c.mu.Unlock()
	if last {
		w.stop()
		<-w.stopped
	}
}

func newCloseWatcher(cc *grpc.ClientConn) *closeWatcher {
	ctx, stop := context.WithCancel(context.Background())
	w := &closeWatcher{closed: make(chan struct{}), stop: stop, stopped: make(chan struct{})}
	go func() {
		defer close(w.stopped)
		for state := cc.GetState(); state != connectivity.Shutdown; state = cc.GetState() {
			if !cc.WaitForStateChange(ctx, state) {
				return
			}
		}
		close(w.closed)
	}()
	return w
}
