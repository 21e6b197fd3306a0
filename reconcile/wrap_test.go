package reconcile_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/go-logr/logr"
	"golang.org/x/time/rate"
	"google.golang.org/grpc/codes"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/util/workqueue"
	"sigs.k8s.io/controller-runtime/pkg/controller"
	ctrl "sigs.k8s.io/controller-runtime/pkg/reconcile"
	"sigs.k8s.io/controller-runtime/pkg/source"

	"github.com/grpcretry/grpcretry"
	"github.com/grpcretry/grpcretry/reconcile"
)

func request(name string) ctrl.Request {
	return ctrl.Request{NamespacedName: types.NamespacedName{Namespace: "shop", Name: name}}
}

// runController runs a real controller of controller-runtime with these keys, until do has been called
// often enough. It returns when do was called.
func runController(t *testing.T, options controller.Options, calls int, keys ...string) []time.Duration {
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	var mu sync.Mutex
	var called []time.Duration
	start := time.Now()
	inner := options.Reconciler
	options.Reconciler = ctrl.Func(func(ctx context.Context, r ctrl.Request) (ctrl.Result, error) {
		mu.Lock()
		called = append(called, time.Since(start))
		if len(called) == calls {
			stop()
		}
		mu.Unlock()
		return inner.Reconcile(ctx, r)
	})
	options.Logger = logr.Discard()
	options.SkipNameValidation = new(true)
	c, err := controller.NewUnmanaged("orders", options)
	if err != nil {
		t.Fatal(err)
	}
	c.Watch(source.Func(func(_ context.Context, q workqueue.TypedRateLimitingInterface[ctrl.Request]) error {
		for _, key := range keys {
			q.Add(request(key))
		}
		return nil
	}))
	if err := c.Start(ctx); err != nil {
		t.Fatal(err)
	}
	return called
}

// A real controller follows the policy, the server, and the slow lane, with its own priority queue and
// with ours.
func TestController(t *testing.T) {
	for queue, newQueue := range map[string]func(*reconcile.RateLimiter[ctrl.Request]) func(string,
		workqueue.TypedRateLimiter[ctrl.Request]) workqueue.TypedRateLimitingInterface[ctrl.Request]{
		"controller-runtime's": func(*reconcile.RateLimiter[ctrl.Request]) func(string,
			workqueue.TypedRateLimiter[ctrl.Request]) workqueue.TypedRateLimitingInterface[ctrl.Request] {
			return nil
		},
		"NewQueue": func(l *reconcile.RateLimiter[ctrl.Request]) func(string,
			workqueue.TypedRateLimiter[ctrl.Request]) workqueue.TypedRateLimitingInterface[ctrl.Request] {
			return func(name string, _ workqueue.TypedRateLimiter[ctrl.Request]) workqueue.TypedRateLimitingInterface[ctrl.Request] {
				return reconcile.NewQueue(l, name)
			}
		},
	} {
		t.Run(queue, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				b := ratio(t, 0, 3)
				limiter := reconcile.NewRateLimiter[ctrl.Request](newRetrier(t, grpcretry.WithBudget(b), grpcretry.WithBackoff(doubling)), name, slow)
				script := []error{
					statusError(codes.Unavailable, 0), // backoff: 100 ms
					pushback("5000"),                  // 5 s, and the backoff starts again
					statusError(codes.Unavailable, 0), // 100 ms
					statusError(codes.Unavailable, 0), // MaxAttempts: 7 s
					grpcretry.Permanent(errors.New("never")),
				}
				n := 0
				got := runController(t, controller.Options{
					RateLimiter: limiter, NewQueue: newQueue(limiter),
					Reconciler: reconcile.Wrap(limiter, ctrl.Func(func(context.Context, ctrl.Request) (ctrl.Result, error) {
						n++
						return ctrl.Result{}, script[n-1]
					}), reconcile.Guards{}),
				}, len(script), "a")
				want := []time.Duration{0, 100, 5100, 5200, 12200}
				for i := range want {
					want[i] *= time.Millisecond
				}
				if !slices.Equal(got, want) {
					t.Errorf("reconciled after %v, want %v", got, want)
				}
				if got := limiter.NumRequeues(request("a")); got != 0 {
					t.Errorf("NumRequeues after a permanent error = %d, want 0: the key is dropped", got)
				}
			})
		})
	}
}

// Wrap limits the work in flight and the rate.
func TestGuards(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		limiter := reconcile.NewRateLimiter[int](newRetrier(t), name)
		var inFlight, most atomic.Int64
		var mu sync.Mutex
		var begun []time.Duration
		start := time.Now()
		r := reconcile.Wrap(limiter, ctrl.TypedFunc[int](func(context.Context, int) (ctrl.Result, error) {
			most.Store(max(most.Load(), inFlight.Add(1)))
			defer inFlight.Add(-1)
			mu.Lock()
			begun = append(begun, time.Since(start))
			mu.Unlock()
			time.Sleep(time.Second)
			return ctrl.Result{RequeueAfter: time.Hour}, nil
		}), reconcile.Guards{InFlight: 3, Rate: rate.NewLimiter(2, 1)})
		var wg sync.WaitGroup
		for item := range 6 {
			wg.Go(func() {
				if got, err := r.Reconcile(t.Context(), item); got.RequeueAfter != time.Hour || err != nil {
					t.Errorf("Reconcile = %v, %v, want what the inner one returns", got, err)
				}
			})
		}
		wg.Wait()
		want := []time.Duration{0, 500, 1000, 1500, 2000, 2500}
		for i := range want {
			want[i] *= time.Millisecond
		}
		if !slices.Equal(begun, want) || most.Load() > 3 {
			t.Errorf("begun after %v, at most %d at a time; want %v, at most 3", begun, most.Load(), want)
		}
	})
}

func TestInFlight(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		start := time.Now()
		r := reconcile.Wrap(reconcile.NewRateLimiter[int](newRetrier(t), name),
			ctrl.TypedFunc[int](func(context.Context, int) (ctrl.Result, error) {
				time.Sleep(time.Second)
				return ctrl.Result{}, nil
			}), reconcile.Guards{InFlight: 3})
		var wg sync.WaitGroup
		for item := range 10 {
			wg.Go(func() { r.Reconcile(t.Context(), item) })
		}
		wg.Wait()
		if got := time.Since(start); got != 4*time.Second {
			t.Errorf("ten keys of 1s each, three at a time, took %v, want 4s", got)
		}
	})
}

// A key whose turn is after its deadline is not begun, and has not failed.
func TestRateAndDeadline(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := ratio(t, 1, 3)
		limiter := reconcile.NewRateLimiter[string](newRetrier(t, grpcretry.WithBudget(b)), name)
		outbound := rate.NewLimiter(0.1, 1)
		begun := 0
		r := reconcile.Wrap(limiter, ctrl.TypedFunc[string](func(context.Context, string) (ctrl.Result, error) {
			begun++
			return ctrl.Result{}, nil
		}), reconcile.Guards{Rate: outbound})
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		r.Reconcile(ctx, "a")
		got, err := r.Reconcile(ctx, "b")
		if err != nil || got.RequeueAfter < 10*time.Second || got.RequeueAfter > 12*time.Second {
			t.Errorf("Reconcile = %v, %v, want RequeueAfter 10s to 12s", got, err)
		}
		limiter.Forget("b")
		if n := limiter.NumRequeues("b"); begun != 1 || n != 0 || b.Balance(time.Now()) != 3 {
			t.Errorf("begun %d, NumRequeues %d, balance %v, want 1, 0 and 3", begun, n, b.Balance(time.Now()))
		}
		time.Sleep(10 * time.Second)
		if !outbound.Allow() {
			t.Error("the turn that was not taken is gone")
		}
	})
}

// A key that waits for its turn ends its wait with its context, and that says nothing about the backend.
// A rate that allows nothing holds no worker, and keys follow when it allows some again.
func TestPausedRate(t *testing.T) {
	for what, outbound := range map[string]func() *rate.Limiter{
		"limit 0":       func() *rate.Limiter { return rate.NewLimiter(0, 1) },
		"burst 0":       func() *rate.Limiter { return rate.NewLimiter(1, 0) },
		"one a century": func() *rate.Limiter { return rate.NewLimiter(1e-10, 1) },
	} {
		for _, timeout := range []time.Duration{time.Second, 0} {
			t.Run(fmt.Sprint(what, ", timeout ", timeout), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					outbound := outbound()
					outbound.Allow() // the burst
					begun := 0
					r := reconcile.Wrap(reconcile.NewRateLimiter[string](newRetrier(t), name),
						ctrl.TypedFunc[string](func(context.Context, string) (ctrl.Result, error) {
							begun++
							return ctrl.Result{}, nil
						}), reconcile.Guards{Rate: outbound})
					ctx := t.Context()
					if timeout > 0 {
						limited, cancel := context.WithTimeout(ctx, timeout)
						defer cancel()
						ctx = limited
					}
					start := time.Now()
					got, err := r.Reconcile(ctx, "a")
					if err != nil || got.RequeueAfter < time.Minute || got.RequeueAfter > 72*time.Second || begun != 0 || time.Since(start) > 0 {
						t.Errorf("Reconcile = %v, %v after %v, begun %d; want RequeueAfter 1m to 1m12s immediately, and nothing begun", got,
							err, time.Since(start), begun)
					}
					outbound.SetLimit(rate.Inf)
					if r.Reconcile(ctx, "a"); begun != 1 {
						t.Errorf("begun %d when the rate is back, want 1", begun)
					}
				})
			})
		}
	}
}

// A key that waits for a paused rate has not been dropped: its failures still count after longer than the retention.
func TestAPausedRateForgetsNoFailures(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		limiter := reconcile.NewRateLimiter[string](newRetrier(t), name)
		for range 3 {
			time.Sleep(limiter.When("a"))
		}
		r := reconcile.Wrap(limiter, ctrl.TypedFunc[string](func(context.Context, string) (ctrl.Result, error) {
			t.Error("begun")
			return ctrl.Result{}, nil
		}), reconcile.Guards{Rate: rate.NewLimiter(0, 0)})
		for range 30 {
			result, err := r.Reconcile(t.Context(), "a")
			if err != nil {
				t.Fatal(err)
			}
			limiter.Forget("a") // as the controller does
			time.Sleep(result.RequeueAfter)
		}
		if n := limiter.NumRequeues("a"); n != 3 {
			t.Errorf("%d failures after a pause of half an hour, want 3", n)
		}
	})
}

// A key whose deadline passes while it waits for others has not failed.
func TestInFlightAndDeadline(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := ratio(t, 1, 3)
		limiter := reconcile.NewRateLimiter[string](newRetrier(t, grpcretry.WithBudget(b)), name)
		r := reconcile.Wrap(limiter, ctrl.TypedFunc[string](func(context.Context, string) (ctrl.Result, error) {
			time.Sleep(time.Minute)
			return ctrl.Result{}, nil
		}), reconcile.Guards{InFlight: 1})
		go r.Reconcile(t.Context(), "a")
		synctest.Wait()
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
		defer cancel()
		got, err := r.Reconcile(ctx, "b")
		if err != nil || got.RequeueAfter < time.Second || got.RequeueAfter > 1200*time.Millisecond {
			t.Errorf("Reconcile = %v, %v, want RequeueAfter 1s to 1.2s", got, err)
		}
		limiter.Forget("b")
		if n := limiter.NumRequeues("b"); n != 0 || b.Balance(time.Now()) != 3 {
			t.Errorf("NumRequeues %d, balance %v, want 0 and 3", n, b.Balance(time.Now()))
		}
		time.Sleep(time.Minute)
	})
}

func TestCancelledWait(t *testing.T) {
	for what, g := range map[string]reconcile.Guards{
		"rate":      {Rate: rate.NewLimiter(0.01, 1)},
		"in flight": {InFlight: 1},
	} {
		t.Run(what, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				b, _ := grpcretry.NewThrottle(10, 1)
				limiter := reconcile.NewRateLimiter[string](newRetrier(t, grpcretry.WithBudget(b)), name)
				ctx, cancel := context.WithCancel(t.Context())
				r := reconcile.Wrap(limiter, ctrl.TypedFunc[string](func(context.Context, string) (ctrl.Result, error) {
					if g.InFlight > 0 {
						<-ctx.Done()
					}
					return ctrl.Result{}, nil
				}), g)
				done := make(chan struct{})
				go func() {
					defer close(done)
					r.Reconcile(ctx, "a")
				}()
				synctest.Wait()
				time.AfterFunc(time.Second, cancel)
				start := time.Now()
				_, err := r.Reconcile(ctx, "b")
				if !errors.Is(err, context.Canceled) || time.Since(start) != time.Second {
					t.Errorf("Reconcile = %v after %v, want cancelled after 1s", err, time.Since(start))
				}
				<-done
				if got := b.Balance(time.Now()); got != 5 { // 10, of which half may be used
					t.Errorf("balance = %v, want 5: nothing has failed", got)
				}
			})
		})
	}
}

// A panic frees its place.
func TestPanic(t *testing.T) {
	limiter := reconcile.NewRateLimiter[string](newRetrier(t), name)
	panics := true
	r := reconcile.Wrap(limiter, ctrl.TypedFunc[string](func(context.Context, string) (ctrl.Result, error) {
		if panics {
			panic("reconciler")
		}
		return ctrl.Result{}, nil
	}), reconcile.Guards{InFlight: 1})
	func() {
		defer func() { recover() }()
		r.Reconcile(t.Context(), "a")
	}()
	panics = false
	if _, err := r.Reconcile(t.Context(), "a"); err != nil {
		t.Error(err)
	}
}
