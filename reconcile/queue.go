package reconcile

import (
	"sync"
	"time"

	"k8s.io/client-go/util/workqueue"
)

// NewQueue returns a [workqueue.NewTypedRateLimitingQueueWithConfig] with the limiter, which it attaches,
// so that items leave the slow lane early when the backend answers again. The limiter's metrics then
// include the queue's depth and the age of its oldest item. When the queue is shut down, the limiter
// drops its items, see [RateLimiter.Drop]. Items are served in the order in which they became ready. name
// is the queue's name in client-go's own metrics; "" means that there are none. It panics if the limiter has a queue already: keys would
// return to the wrong one.
//
// For controller-runtime:
//
//	NewQueue: func(name string, _ workqueue.TypedRateLimiter[reconcile.Request]) workqueue.TypedRateLimitingInterface[reconcile.Request] {
//		return grpcreconcile.NewQueue(limiter, name)
//	},
func NewQueue[T comparable](limiter *RateLimiter[T], name string) workqueue.TypedRateLimitingInterface[T] {
	d := &depth[T]{}
	limiter.own(d)
	ready := workqueue.NewTypedWithConfig(workqueue.TypedQueueConfig[T]{Name: name, Queue: d})
	q := &queue[T]{
		limiter: limiter,
		meter:   limiter.meter,
		TypedRateLimitingInterface: workqueue.NewTypedRateLimitingQueueWithConfig(limiter, workqueue.TypedRateLimitingQueueConfig[T]{
			Name:          name,
			DelayingQueue: workqueue.NewTypedDelayingQueueWithConfig(workqueue.TypedDelayingQueueConfig[T]{Name: name, Queue: ready}),
		}),
	}
	limiter.Attach(q)
	return q
}

// own makes the limiter that of the queue whose depth is d.
func (l *RateLimiter[T]) own(d *depth[T]) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.depth != nil {
		panic("grpcretry/reconcile: NewQueue: the limiter has a queue already, and each needs its own") //nolint:forbidigo // documented
	}
	l.depth = d
}

// A queue counts the items that are worked on. Once it is shut down, no item returns, so the limiter drops
// all of them, and those that fail from then on.
type queue[T comparable] struct {
	workqueue.TypedRateLimitingInterface[T]
	limiter *RateLimiter[T]
	meter   *meter
}

func (q *queue[T]) ShutDown() {
	q.TypedRateLimitingInterface.ShutDown()
	q.limiter.dropAll()
}

func (q *queue[T]) ShutDownWithDrain() {
	q.TypedRateLimitingInterface.ShutDownWithDrain()
	q.TypedRateLimitingInterface.ShutDown() // or client-go's goroutine for waiting items lives up to ten seconds longer
	q.limiter.dropAll()
}

func (q *queue[T]) Get() (item T, shutdown bool) {
	item, shutdown = q.TypedRateLimitingInterface.Get()
	if !shutdown && !q.counted() {
		q.meter.working(1)
	}
	return item, shutdown
}

func (q *queue[T]) Done(item T) {
	if !q.counted() {
		q.meter.working(-1)
	}
	if q.ShuttingDown() {
		q.limiter.Drop(item)
	}
	q.TypedRateLimitingInterface.Done(item)
}

// counted reports whether a reconciler of [Wrap] counts the work in flight.
func (q *queue[T]) counted() bool { return q.meter == nil || q.meter.wrapped.Load() }

// A depth is the order of ready items in a workqueue, with the time at which each became ready. It
// implements [workqueue.Queue].
type depth[T comparable] struct {
	mu    sync.Mutex // because metrics are read from another goroutine
	ready []readyItem[T]
}

type readyItem[T comparable] struct {
	item  T
	since time.Time
}

// Touch does nothing: an item that is added again keeps its place.
func (d *depth[T]) Touch(T) {}

// Push adds an item at the end.
func (d *depth[T]) Push(item T) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.ready = append(d.ready, readyItem[T]{item, time.Now()})
}

// Len returns the number of items.
func (d *depth[T]) Len() int {
	d.mu.Lock()
	defer d.mu.Unlock()
	return len(d.ready)
}

// Pop removes the first item.
func (d *depth[T]) Pop() T {
	d.mu.Lock()
	defer d.mu.Unlock()
	first := d.ready[0]
	d.ready[0] = readyItem[T]{} // the array lives on
	d.ready = d.ready[1:]
	return first.item
}

// look returns the number of items and the age of the first.
func (d *depth[T]) look(now time.Time) (n int64, oldest time.Duration) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if len(d.ready) > 0 {
		oldest = max(0, now.Sub(d.ready[0].since))
	}
	return int64(len(d.ready)), oldest
}
