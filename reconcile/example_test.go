package reconcile_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"golang.org/x/time/rate"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"k8s.io/client-go/util/workqueue"
	"sigs.k8s.io/controller-runtime/pkg/controller"
	ctrl "sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/grpcretry/grpcretry"
	"github.com/grpcretry/grpcretry/reconcile"
)

// A controller's own loop, with client-go's interface. The order fails twice; Failed passes the error on,
// so that the wait is that of its code, or the server's.
func ExampleNewQueue() {
	retrier, err := grpcretry.New(grpcretry.WithMethod("/reconcile/", grpcretry.WithBackoff(grpcretry.Constant(time.Millisecond))))
	if err != nil {
		fmt.Println(err)
		return
	}
	attempts, synced := 0, make(chan bool)
	syncOrder := func(string) error {
		if attempts++; attempts < 3 {
			fmt.Println("orders are down")
			return status.Error(codes.Unavailable, "orders are down")
		}
		fmt.Println("in sync")
		close(synced)
		return nil
	}

	limiter := reconcile.NewRateLimiter[string](retrier, "/reconcile/orders")
	queue := reconcile.NewQueue(limiter, "orders")
	worker := func() {
		for {
			order, shutdown := queue.Get()
			if shutdown {
				return
			}
			if err := syncOrder(order); err != nil {
				limiter.Failed(order, err)
				queue.AddRateLimited(order)
			} else {
				queue.Forget(order)
			}
			queue.Done(order)
		}
	}
	var workers sync.WaitGroup
	workers.Go(worker)
	queue.Add("shop/1")
	<-synced
	queue.ShutDown()
	workers.Wait()
	// Output:
	// orders are down
	// orders are down
	// in sync
}

// The limiter alone, in client-go's own queue.
func ExampleNewRateLimiter() {
	retrier, err := grpcretry.New(grpcretry.WithMethod("/reconcile/", grpcretry.WithBackoff(grpcretry.Constant(10*time.Millisecond))))
	if err != nil {
		fmt.Println(err)
		return
	}
	limiter := reconcile.NewRateLimiter[string](retrier, "/reconcile/orders")
	queue := workqueue.NewTypedRateLimitingQueue[string](limiter)
	defer queue.ShutDown()

	queue.AddRateLimited("shop/1")
	order, _ := queue.Get()
	fmt.Println(order, queue.NumRequeues(order))
	queue.Forget(order)
	queue.Done(order)
	fmt.Println(order, queue.NumRequeues(order))
	// Output:
	// shop/1 1
	// shop/1 0
}

// A reconciler of controller-runtime with the three guards, and the options of its controller.
func ExampleWrap() {
	retrier, err := grpcretry.New()
	if err != nil {
		fmt.Println(err)
		return
	}
	syncOrder := func(context.Context, ctrl.Request) error { return grpcretry.Permanent(errors.New("no such shop")) }

	limiter := reconcile.NewRateLimiter[ctrl.Request](retrier, "/reconcile/orders",
		reconcile.WithTarget("dns:///orders:443"), // one budget with the RPCs of this Retrier
		reconcile.WithLogger(slog.New(slog.DiscardHandler)),
		reconcile.WithMeterProvider(nil)) // the global one
	inner := ctrl.Func(func(ctx context.Context, request ctrl.Request) (ctrl.Result, error) {
		return ctrl.Result{}, syncOrder(ctx, request)
	})
	options := controller.Options{
		Reconciler: reconcile.Wrap(limiter, inner, reconcile.Guards{
			InFlight: 10,
			Rate:     rate.NewLimiter(100, 10), // keys per second, all workers together
		}),
		RateLimiter: limiter,
		NewQueue: func(name string, _ workqueue.TypedRateLimiter[ctrl.Request]) workqueue.TypedRateLimitingInterface[ctrl.Request] {
			return reconcile.NewQueue(limiter, name)
		},
		MaxConcurrentReconciles: 10,
	}

	_, err = options.Reconciler.Reconcile(context.Background(), ctrl.Request{})
	fmt.Println(err)
	// Output:
	// terminal error: no such shop
}

// A reconciler's last line.
func ExampleResult() {
	syncOrder := func() error { return tooManyRequests(30) }

	reconcileOrder := func(context.Context, ctrl.Request) (ctrl.Result, error) {
		return reconcile.Result(syncOrder())
	}

	result, err := reconcileOrder(context.Background(), ctrl.Request{})
	fmt.Println(result.RequeueAfter >= 30*time.Second, result.RequeueAfter <= 36*time.Second, err)
	// Output:
	// true true <nil>
}

// Client-go's usual loop forgets keys that it gives up. Drop does that without reporting a success.
func ExampleRateLimiter_Drop() {
	budget, err := grpcretry.NewRatioBudget(grpcretry.RatioBudget{Ratio: 0.5, Reserve: 2})
	if err != nil {
		fmt.Println(err)
		return
	}
	retrier, err := grpcretry.New(grpcretry.WithBudget(budget))
	if err != nil {
		fmt.Println(err)
		return
	}
	limiter := reconcile.NewRateLimiter[string](retrier, "/reconcile/orders")

	var once sync.Once
	for {
		order := "shop/1"
		if limiter.NumRequeues(order) >= 2 {
			limiter.Drop(order)
			break
		}
		limiter.When(order)
		once.Do(func() { fmt.Println("budget after a failure:", budget.Balance(time.Now())) })
	}
	fmt.Println("budget after the key was given up:", budget.Balance(time.Now()))
	// Output:
	// budget after a failure: 1
	// budget after the key was given up: 1
}
