// Command reconciler runs a controller that keeps a remote gRPC service in sync while that service has
// an outage. A second controller does the same with client-go's default rate limiter and a service of its
// own. It prints, second by second, how many requests each service received.
//
// Both controllers have a real workqueue, the same keys and workers, and the same outbound rate.
package main

import (
	"context"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"sync"
	"time"

	"golang.org/x/time/rate"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"k8s.io/client-go/util/workqueue"
	ctrl "sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/grpcretry/grpcretry"
	echov1 "github.com/grpcretry/grpcretry/proto/echo/v1"
	"github.com/grpcretry/grpcretry/reconcile"
)

// A setting is the same for both controllers.
type setting struct {
	keys, workers int
	perSecond     float64       // the outbound rate
	up            time.Duration // from the start to the outage
	outage        time.Duration
	limit         time.Duration // of the whole run
}

func main() {
	s := setting{}
	flag.IntVar(&s.keys, "keys", 1000, "keys to keep in sync")
	flag.IntVar(&s.workers, "workers", 16, "workers of each controller")
	flag.Float64Var(&s.perSecond, "rate", 300, "outbound rate, requests per second")
	flag.DurationVar(&s.up, "up", time.Second, "time before the outage")
	flag.DurationVar(&s.outage, "outage", 9*time.Second, "length of the outage")
	flag.DurationVar(&s.limit, "limit", 18*time.Second, "end of the run, even if keys are not in sync")
	verbose := flag.Bool("v", false, "show the limiter's log lines")
	flag.Parse()
	log := slog.New(slog.DiscardHandler)
	if *verbose {
		log = slog.New(slog.NewTextHandler(os.Stderr, nil))
	}
	if err := s.check(); err != nil {
		fmt.Fprintln(os.Stderr, "reconciler:", err)
		os.Exit(2)
	}
	if _, err := run(context.Background(), s, loopback, log, os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "reconciler:", err)
		os.Exit(1)
	}
}

func (s setting) check() error {
	switch {
	case s.keys < 1:
		return fmt.Errorf("-keys is %d, want at least 1", s.keys)
	case s.workers < 1:
		return fmt.Errorf("-workers is %d, want at least 1", s.workers)
	case !(s.perSecond > 0):
		return fmt.Errorf("-rate is %v, want more than 0", s.perSecond)
	case s.up < 0 || s.outage < 0 || s.limit <= 0:
		return fmt.Errorf("-up %v, -outage %v and -limit %v, want no negative times", s.up, s.outage, s.limit)
	default:
		return nil
	}
}

// A network returns a listener, and the address and dial option that reach it.
type network func() (net.Listener, string, grpc.DialOption, error)

func loopback() (net.Listener, string, grpc.DialOption, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, "", nil, err
	}
	return l, l.Addr().String(), grpc.EmptyDialOption{}, nil
}

// run runs both controllers until all keys of both are in sync, and at most until the limit. It returns
// the services, ours first.
func run(ctx context.Context, s setting, listen network, log *slog.Logger, out io.Writer) ([2]*service, error) {
	ctx, stop := context.WithTimeout(ctx, s.limit)
	defer stop()
	var services [2]*service
	var clients [2]echov1.EchoServiceClient
	start := time.Now()
	for i := range services {
		services[i] = &service{start: start, setting: s, state: map[string]bool{}, perSecond: map[int]int{}}
		client, closeAll, err := services[i].serve(listen)
		if err != nil {
			return services, err
		}
		defer closeAll()
		clients[i] = client
	}
	retrier, err := grpcretry.New(grpcretry.WithMethod("/reconcile/", grpcretry.WithMaxAttempts(4)))
	if err != nil {
		return services, err
	}
	var controllers sync.WaitGroup
	controllers.Go(func() { s.ours(ctx, retrier, log, clients[0]) })
	controllers.Go(func() { s.theirs(ctx, clients[1]) })

	fmt.Fprintf(out, "%d keys, %d workers, at most %v requests per second; the service is down from %v to %v\n\n",
		s.keys, s.workers, s.perSecond, s.up, s.up+s.outage)
	fmt.Fprintln(out, "                     grpcretry/reconcile   default rate limiter")
	fmt.Fprintln(out, "second   service     requests   in sync    requests   in sync")
	second := time.NewTicker(time.Second)
	defer second.Stop()
	for n := 0; ctx.Err() == nil; n++ {
		select {
		case <-second.C:
			printSecond(out, n, services)
		case <-ctx.Done():
		}
		if services[0].synced() == s.keys && services[1].synced() == s.keys {
			break
		}
	}
	stop()
	controllers.Wait()
	s.summary(out, services)
	return services, nil
}

func printSecond(out io.Writer, n int, services [2]*service) {
	is := "up"
	if services[0].isDown(time.Duration(n)*time.Second + time.Second/2) {
		is = "DOWN"
	}
	fmt.Fprintf(out, "%6d   %-7s     %8d   %7d    %8d   %7d\n", n, is,
		services[0].received(n), services[0].synced(), services[1].received(n), services[1].synced())
}

func (s setting) summary(out io.Writer, services [2]*service) {
	for i, name := range []string{"grpcretry/reconcile", "default rate limiter"} {
		fmt.Fprintf(out, "\n%-20s  %d requests failed; ", name, services[i].failures())
		if synced := services[i].synced(); synced < s.keys {
			fmt.Fprintf(out, "%d of %d keys in sync at the end", synced, s.keys)
		} else {
			fmt.Fprintf(out, "all keys in sync %v after the outage", (services[i].finished - s.up - s.outage).Round(100*time.Millisecond))
		}
	}
	fmt.Fprintln(out)
}

// put brings one key in sync.
func put(client echov1.EchoServiceClient) ctrl.TypedReconciler[string] {
	return ctrl.TypedFunc[string](func(ctx context.Context, key string) (ctrl.Result, error) {
		_, err := client.Put(ctx, &echov1.EchoRequest{Message: key})
		return ctrl.Result{}, err
	})
}

// ours runs a controller with this library until ctx ends.
func (s setting) ours(ctx context.Context, retrier *grpcretry.Retrier, log *slog.Logger, client echov1.EchoServiceClient) {
	limiter := reconcile.NewRateLimiter[string](retrier, "/reconcile/orders", reconcile.WithLogger(log))
	reconciler := reconcile.Wrap(limiter, put(client), reconcile.Guards{
		InFlight: s.workers,
		Rate:     rate.NewLimiter(rate.Limit(s.perSecond), 1),
	})
	s.control(ctx, reconcile.NewQueue(limiter, ""), reconciler.Reconcile)
}

// theirs runs a controller with client-go's defaults until ctx ends.
func (s setting) theirs(ctx context.Context, client echov1.EchoServiceClient) {
	queue := workqueue.NewTypedRateLimitingQueue(workqueue.DefaultTypedControllerRateLimiter[string]())
	outbound := rate.NewLimiter(rate.Limit(s.perSecond), 1)
	s.control(ctx, queue, func(ctx context.Context, key string) (ctrl.Result, error) {
		if err := outbound.Wait(ctx); err != nil {
			return ctrl.Result{}, err
		}
		return put(client).Reconcile(ctx, key)
	})
}

// control is the loop of a controller. A program with controller-runtime has it from there.
func (s setting) control(
	ctx context.Context, queue workqueue.TypedRateLimitingInterface[string], reconcileKey func(context.Context, string) (ctrl.Result, error),
) {
	var workers sync.WaitGroup
	for range s.workers {
		workers.Go(func() {
			for {
				key, shutdown := queue.Get()
				if shutdown {
					return
				}
				result, err := reconcileKey(ctx, key)
				switch {
				case err != nil:
					queue.AddRateLimited(key)
				case result.RequeueAfter > 0:
					queue.Forget(key)
					queue.AddAfter(key, result.RequeueAfter)
				default:
					queue.Forget(key)
				}
				queue.Done(key)
			}
		})
	}
	for n := range s.keys {
		queue.Add(fmt.Sprintf("order-%d", n))
	}
	<-ctx.Done()
	queue.ShutDown()
	workers.Wait()
}

// dial returns a client without retries of its own: the queue retries.
func dial(address string, option grpc.DialOption) (*grpc.ClientConn, error) {
	return grpc.NewClient("passthrough:///"+address, option, grpc.WithDisableRetry(), grpc.WithTransportCredentials(insecure.NewCredentials()))
}
