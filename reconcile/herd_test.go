package reconcile_test

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/time/rate"
	"k8s.io/client-go/util/workqueue"
	ctrl "sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/grpcretry/grpcretry/reconcile"
)

// A herd is a controller that starts in an outage of its backend, with all items out of sync.
type herd struct {
	items, workers int
	outage         time.Duration
	takes          time.Duration // a request, whether it fails or succeeds
	capacity       int           // requests per second that the backend can serve after the outage; 0: all
	fails          float64       // the share of the other requests that fail
}

// A crowd is what a herd did to its backend.
type crowd struct {
	perSecond []int // requests, by the second in which they began
	failed    int   // requests after the outage that failed
	outage    time.Duration
	nearly    time.Duration // from the end of the outage until 99% of the items were in sync
	synced    time.Duration // until all were
}

// from and until are in seconds.
func (c crowd) sum(from, until int) (n int) {
	for s := from; s < min(until, len(c.perSecond)); s++ {
		n += c.perSecond[s]
	}
	return n
}

func (c crowd) peak(from, until int) (most int) {
	for s := from; s < min(until, len(c.perSecond)); s++ {
		most = max(most, c.perSecond[s])
	}
	return most
}

func (c crowd) end() int { return int(c.outage / time.Second) }

// row is a row of the table in docs/reconcile.md.
func (c crowd) row(name string) string {
	return fmt.Sprintf("%s: first second %d, outage %d, busiest second after the first 10 %d; 99%% in sync after %v, all after %v, "+
		"busiest second then %d, failed then %d",
		name, c.perSecond[0], c.sum(0, c.end()), c.peak(10, c.end()), c.nearly.Round(time.Second), c.synced.Round(time.Second),
		c.peak(c.end(), 1e6), c.failed)
}

// run must be called in a bubble. It returns when all items are in sync.
func (h herd) run(
	ctx context.Context, queue workqueue.TypedRateLimitingInterface[int], wrap func(ctrl.TypedReconciler[int]) ctrl.TypedReconciler[int],
) crowd {
	var mu sync.Mutex
	var wg sync.WaitGroup
	start := time.Now()
	left, seen, last := h.items, map[int]int{}, 0
	c := crowd{outage: h.outage}
	down := errors.New("down")
	random := rand.New(rand.NewPCG(1, 2))
	sync := wrap(ctrl.TypedFunc[int](func(context.Context, int) (ctrl.Result, error) {
		at := time.Since(start)
		mu.Lock()
		last = int(at / time.Second)
		seen[last]++
		fails := at < h.outage
		if h.capacity > 0 && !fails && seen[last] > h.capacity {
			fails = true
			c.failed++
		}
		if !fails && h.fails > 0 && random.Float64() < h.fails {
			fails = true
			c.failed++
		}
		mu.Unlock()
		time.Sleep(h.takes)
		if fails {
			return ctrl.Result{}, down
		}
		return ctrl.Result{}, nil
	}))
	for range h.workers {
		wg.Go(func() {
			for {
				item, shutdown := queue.Get()
				if shutdown {
					return
				}
				if _, err := sync.Reconcile(ctx, item); err != nil {
					queue.AddRateLimited(item)
				} else {
					queue.Forget(item)
					mu.Lock()
					switch left--; left {
					case h.items / 100:
						c.nearly = time.Since(start) - h.outage
					case 0:
						queue.ShutDown()
					}
					mu.Unlock()
				}
				queue.Done(item)
			}
		})
	}
	for item := range h.items {
		queue.Add(item)
	}
	wg.Wait()
	c.synced = time.Since(start) - h.outage
	c.perSecond = make([]int, last+1)
	for s, n := range seen {
		c.perSecond[s] = n
	}
	return c
}

var thorough = flag.Bool("thorough", false, "simulate ten thousand items in every test, for the figures in docs/reconcile.md")

// smaller returns fewer items, unless all figures are wanted.
func (h herd) smaller() herd {
	if !*thorough {
		h.items = 2000
	}
	return h
}

func bare(r ctrl.TypedReconciler[int]) ctrl.TypedReconciler[int] { return r }

// tenThousand is the herd of docs/reconcile.md.
var tenThousand = herd{items: 10000, workers: 100, outage: 5 * time.Minute, takes: 20 * time.Millisecond}

// With our queue, an outage costs a retry per second, and its end is noticed quickly.
func TestHerd(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := tenThousand.run(t.Context(), reconcile.NewQueue(reconcile.NewRateLimiter[int](newRetrier(t), name), ""), bare)
		t.Log(c.row("NewQueue"))
		if retries := c.sum(0, 300) - 10000; retries > 300+3 || retries < 297 {
			t.Errorf("%d retries in the outage, want one per second and three from the budget's reserve", retries)
		}
		if most := c.peak(10, 300); most > 2 {
			t.Errorf("%d retries in one second of the outage, want at most the rate plus one", most)
		}
		if c.synced > 20*time.Second {
			t.Errorf("in sync %v after the outage, want at most 20s", c.synced)
		}
	})
}

// In client-go's own queue, keys cannot be brought forward: the rate is ten times higher, and still no
// higher than the default rate limiter's.
func TestHerdInPlainQueue(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		limiter := reconcile.NewRateLimiter[int](newRetrier(t), name)
		c := tenThousand.run(t.Context(), workqueue.NewTypedRateLimitingQueue[int](limiter), bare)
		t.Log(c.row("client-go's queue"))
		if retries, most := c.sum(0, 300)-10000, c.peak(10, 300); retries > 3003 || most > 11 {
			t.Errorf("%d retries in the outage, at most %d in a second; want at most 3003 and 11", retries, most)
		}
		if c.synced > 17*time.Minute {
			t.Errorf("in sync %v after the outage, want at most 17m", c.synced)
		}
	})
}

// The default rate limiter, for comparison. It cannot do better by chance, because it draws nothing.
func TestHerdWithDefaultRateLimiter(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := tenThousand.run(t.Context(), workqueue.NewTypedRateLimitingQueue(workqueue.DefaultTypedControllerRateLimiter[int]()), bare)
		t.Log(c.row("default rate limiter"))
		if retries := c.sum(0, 300) - 10000; retries < 3000 || c.synced < 16*time.Minute {
			t.Errorf("%d retries in the outage, in sync %v after it: docs/reconcile.md says 3099 and 16m40s", retries, c.synced)
		}
	})
}

// The outbound rate limits first attempts, too, and the return after the outage.
func TestHerdWithOutboundRate(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		limiter := reconcile.NewRateLimiter[int](newRetrier(t), name)
		c := tenThousand.smaller().run(t.Context(), reconcile.NewQueue(limiter, ""), func(r ctrl.TypedReconciler[int]) ctrl.TypedReconciler[int] {
			return reconcile.Wrap(limiter, r, reconcile.Guards{InFlight: 20, Rate: rate.NewLimiter(500, 50)})
		})
		t.Log(c.row("NewQueue and a rate of 500"))
		if most := c.peak(0, 1e6); most > 550 {
			t.Errorf("%d requests in one second, want at most the rate and its burst", most)
		}
		if c.synced > 40*time.Second {
			t.Errorf("in sync %v after the outage, want at most 40s", c.synced)
		}
	})
}

// A backend that can serve 500 requests per second after the outage, and fails the rest, is not kept
// down: failures earn nothing, so that fewer keys are brought forward.
func TestHerdAtWeakBackend(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := tenThousand.smaller()
		h.capacity = 500
		c := h.run(t.Context(), reconcile.NewQueue(reconcile.NewRateLimiter[int](newRetrier(t), name), ""), bare)
		t.Log(c.row("NewQueue, weak backend"))
		if c.synced > 2*time.Minute || c.failed > 4000 {
			t.Errorf("all in sync %v after the outage, with %d failures, want at most 2m and 4000", c.synced, c.failed)
		}
	})
}

// A backend that fails a share of all requests, at random: up to a third, our queue is much faster than the
// default rate limiter. From a half on, it lets keys return at the slow lane's rate.
func TestHerdAtUnreliableBackend(t *testing.T) {
	h := tenThousand.smaller()
	h.outage, h.takes = 0, 10*time.Millisecond
	for _, h.fails = range []float64{0.1, 0.3, 0.5} {
		nearly := map[string]time.Duration{}
		for how, queue := range map[string]func() workqueue.TypedRateLimitingInterface[int]{
			"NewQueue": func() workqueue.TypedRateLimitingInterface[int] {
				return reconcile.NewQueue(reconcile.NewRateLimiter[int](newRetrier(t), name), "")
			},
			"Rate: 10": func() workqueue.TypedRateLimitingInterface[int] {
				tenTimes := reconcile.WithSlowLane(reconcile.SlowLane{Rate: 10})
				return reconcile.NewQueue(reconcile.NewRateLimiter[int](newRetrier(t), name, tenTimes), "")
			},
			"default rate limiter": func() workqueue.TypedRateLimitingInterface[int] {
				return workqueue.NewTypedRateLimitingQueue(workqueue.DefaultTypedControllerRateLimiter[int]())
			},
		} {
			synctest.Test(t, func(t *testing.T) {
				c := h.run(t.Context(), queue(), bare)
				nearly[how] = c.nearly
				t.Logf("%.0f%% fail, %s: all in sync after %v, failed %d", 100*h.fails, how, c.synced.Round(time.Second), c.failed)
			})
		}
		if ours, theirs := nearly["NewQueue"], nearly["default rate limiter"]; h.fails < 0.4 && ours > theirs {
			t.Errorf("%.0f%% fail: 99%% in sync after %v, want at most the default rate limiter's %v", 100*h.fails, ours, theirs)
		}
	}
}

// Keys that can never succeed, a third of all here, do not hold up the return of the others after an outage.
func TestHerdWithPoisonedKeys(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const items, workers, outage = 900, 20, 2 * time.Minute
		limiter := reconcile.NewRateLimiter[int](newRetrier(t), name)
		queue := reconcile.NewQueue(limiter, "")
		start := time.Now()
		var mu sync.Mutex
		synced := map[int]bool{}
		var wg sync.WaitGroup
		for range workers {
			wg.Go(func() {
				for {
					item, shutdown := queue.Get()
					if shutdown {
						return
					}
					time.Sleep(10 * time.Millisecond)
					if item%3 == 0 || time.Since(start) < outage {
						queue.AddRateLimited(item)
					} else {
						queue.Forget(item)
						mu.Lock()
						synced[item] = true
						mu.Unlock()
					}
					queue.Done(item)
				}
			})
		}
		for item := range items {
			queue.Add(item)
		}
		time.Sleep(outage + 2*time.Minute)
		queue.ShutDown()
		wg.Wait()
		t.Logf("%d of %d keys in sync two minutes after the outage", len(synced), items*2/3)
		if len(synced) < items/3 { // a failure costs more budget than two successes earn
			t.Errorf("%d of %d keys in sync two minutes after the outage, want half of them", len(synced), items*2/3)
		}
	})
}
