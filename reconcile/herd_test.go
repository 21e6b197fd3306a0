package reconcile_test

import (
	"flag"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"k8s.io/client-go/util/workqueue"

	"github.com/grpcretry/grpcretry/reconcile"
)

var herdItems = flag.Int("herd.items", 10000, "items of the simulated controller")

// A herd is a controller whose items are all out of sync when it starts, in an outage of its backend.
type herd struct {
	items, workers int
	outage         time.Duration
	takes          time.Duration // a request, whether it fails or succeeds
}

// A crowd is what a herd did to its backend.
type crowd struct {
	perSecond []int // requests, by the second in which they began
	synced    time.Duration
}

func (c crowd) sum(from, to int) (n int) {
	for s := from; s < min(to, len(c.perSecond)); s++ {
		n += c.perSecond[s]
	}
	return n
}

func (c crowd) peak(from, to int) (most int) {
	for s := from; s < min(to, len(c.perSecond)); s++ {
		most = max(most, c.perSecond[s])
	}
	return most
}

// run must be called in a bubble. It returns when every item is in sync.
func (h herd) run(queue workqueue.TypedRateLimitingInterface[int]) crowd {
	var (
		start = time.Now()
		left  atomic.Int64
		mu    sync.Mutex
		seen  = map[int]int{}
		wg    sync.WaitGroup
	)
	left.Store(int64(h.items))
	for range h.workers {
		wg.Go(func() {
			for {
				item, shutdown := queue.Get()
				if shutdown {
					return
				}
				at := time.Since(start)
				mu.Lock()
				seen[int(at/time.Second)]++
				mu.Unlock()
				time.Sleep(h.takes)
				if at < h.outage {
					queue.AddRateLimited(item)
				} else {
					queue.Forget(item)
					if left.Add(-1) == 0 {
						queue.ShutDown()
					}
				}
				queue.Done(item)
			}
		})
	}
	for item := range h.items {
		queue.Add(item)
	}
	wg.Wait()
	c := crowd{synced: time.Since(start) - h.outage}
	c.perSecond = make([]int, int((c.synced+h.outage)/time.Second)+1)
	for s, n := range seen {
		c.perSecond[s] = n
	}
	return c
}

// TestHerd compares ten thousand items in an outage of five minutes.
func TestHerd(t *testing.T) {
	h := herd{items: *herdItems, workers: 100, outage: 5 * time.Minute, takes: 20 * time.Millisecond}
	for _, tt := range []struct {
		name  string
		queue func() workqueue.TypedRateLimitingInterface[int]
	}{
		{"default", func() workqueue.TypedRateLimitingInterface[int] {
			return workqueue.NewTypedRateLimitingQueue(workqueue.DefaultTypedControllerRateLimiter[int]())
		}},
		{"ours, client-go's queue", func() workqueue.TypedRateLimitingInterface[int] {
			return workqueue.NewTypedRateLimitingQueue[int](reconcile.NewRateLimiter[int](newRetrier(t), "/reconcile/orders"))
		}},
		{"ours, NewQueue", func() workqueue.TypedRateLimitingInterface[int] {
			return reconcile.NewQueue(reconcile.NewRateLimiter[int](newRetrier(t), "/reconcile/orders"), "")
		}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				c := h.run(tt.queue())
				t.Logf("first second %d, outage %d, of these retries %d, peak after the first pass %d; in sync %v after the outage, peak then %d",
					c.perSecond[0], c.sum(0, 300), c.sum(0, 300)-h.items, c.peak(5, 300), c.synced, c.peak(300, 1e6))
				for s := 0; s < 12; s++ {
					fmt.Print(c.perSecond[s], " ")
				}
				fmt.Println()
				for s := 298; s < min(len(c.perSecond), 330); s++ {
					fmt.Print(c.perSecond[s], " ")
				}
				fmt.Println()
			})
		})
	}
}
