package reconcile_test

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/time/rate"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"k8s.io/client-go/util/workqueue"
	ctrl "sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/grpcretry/grpcretry"
	"github.com/grpcretry/grpcretry/grpcretrytest"
	"github.com/grpcretry/grpcretry/httpretry"
	echov1 "github.com/grpcretry/grpcretry/proto/echo/v1"
	"github.com/grpcretry/grpcretry/reconcile"
)

// The tests here have one Retrier serve RPCs, HTTP requests and a workqueue at the same time, over real
// connections, and count what the three servers receive.

const (
	eachKind = 20 // RPCs, requests and keys
	tokens   = 15 // in the shared budget
)

// One budget limits the sum: in an outage, the servers receive the first attempts and as many retries as
// the budget has tokens, whoever sends them.
func TestOneBudgetLimitsTheSumOfAllKinds(t *testing.T) {
	for name, budget := range map[string]grpcretry.Budget{
		"ratio": reserve(t, tokens),
		"rate":  grpcretry.NewRateBudget(rate.NewLimiter(0, tokens)),
	} {
		t.Run(name, func(t *testing.T) {
			b := newBackends(t, alwaysDown)
			b.outage(t, grpcretry.WithBudget(budget))
			if got, want := b.sum(), 3*eachKind+tokens; got != want {
				t.Errorf("the servers received %d attempts (%v), want %d: %d first ones and %d retries", got, b, want, 3*eachKind, tokens)
			}
		})
	}
}

// The sum shows a budget that is not shared.
func TestBudgetsOfTheirOwnAddUp(t *testing.T) {
	const own = 7
	for _, pattern := range []string{"/" + echov1.EchoService_ServiceDesc.ServiceName + "/", "/http/", "/reconcile/"} {
		t.Run(pattern, func(t *testing.T) {
			b := newBackends(t, alwaysDown)
			b.outage(t, grpcretry.WithBudget(reserve(t, tokens)), grpcretry.WithMethod(pattern, grpcretry.WithBudget(reserve(t, own))))
			if got, want := b.sum(), 3*eachKind+tokens+own; got != want {
				t.Errorf("the servers received %d attempts (%v), want %d", got, b, want)
			}
		})
	}
}

// When every server fails the first attempts only, a retry rescues every call. Tokens return with each
// success, so that fewer of them than calls are enough for calls one after the other.
func TestOneRetrierRescuesAllKinds(t *testing.T) {
	b := newBackends(t, func(attempt int) bool { return attempt%2 == 1 })
	clients := b.serve(t, grpcretry.WithBudget(reserve(t, 1)))
	for range eachKind {
		for name, call := range clients.calls {
			if err := call(t.Context()); err != nil {
				t.Fatalf("%s = %v, want nil", name, err)
			}
		}
		clients.queue.Add("key")
		select {
		case <-clients.done:
		case <-time.After(10 * time.Second):
			t.Fatal("the key was not reconciled within 10 seconds")
		}
	}
	for name, got := range map[string]int64{"RPCs": b.rpcs.Load(), "requests": b.requests.Load(), "keys": b.keys.Load()} {
		if got != 2*eachKind {
			t.Errorf("%d attempts for %d %s, want %d", got, eachKind, name, 2*eachKind)
		}
	}
}

// reserve returns a budget with so many tokens. While nothing succeeds, it earns none.
func reserve(t *testing.T, tokens float64) grpcretry.Budget {
	t.Helper()
	b, err := grpcretry.NewRatioBudget(grpcretry.RatioBudget{Ratio: 0.1, Reserve: tokens})
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// backends are three servers that count attempts: for RPCs, for HTTP requests, and for what the reconciler
// of a key sends.
type backends struct {
	echov1.UnimplementedEchoServiceServer
	fails                func(attempt int) bool
	rpcs, requests, keys atomic.Int64

	target, site, store string // their addresses
}

func alwaysDown(int) bool { return true }

func newBackends(t *testing.T, fails func(attempt int) bool) *backends {
	t.Helper()
	b := &backends{fails: fails}
	server := grpcretrytest.NewServer(t, func(s grpc.ServiceRegistrar) { echov1.RegisterEchoServiceServer(s, b) }, grpcretrytest.OverTCP())
	b.target = server.Target()
	b.site, b.store = b.web(t, &b.requests), b.web(t, &b.keys)
	return b
}

func (b *backends) Echo(context.Context, *echov1.EchoRequest) (*echov1.EchoResponse, error) {
	if b.fails(int(b.rpcs.Add(1))) {
		return nil, status.Error(codes.Unavailable, "down for maintenance")
	}
	return &echov1.EchoResponse{}, nil
}

func (b *backends) web(t *testing.T, received *atomic.Int64) (url string) {
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		if b.fails(int(received.Add(1))) {
			w.WriteHeader(http.StatusServiceUnavailable)
		}
	}))
	t.Cleanup(server.Close)
	return server.URL
}

func (b *backends) sum() int { return int(b.rpcs.Load() + b.requests.Load() + b.keys.Load()) }

func (b *backends) String() string {
	return fmt.Sprintf("%d RPCs, %d requests, %d for keys", b.rpcs.Load(), b.requests.Load(), b.keys.Load())
}

// outage makes calls of each kind, all at the same time, until the budgets refuse every one of them.
func (b *backends) outage(t *testing.T, opts ...grpcretry.Option) {
	t.Helper()
	clients := b.serve(t, opts...)
	var calls sync.WaitGroup
	for i := range eachKind {
		clients.queue.Add(fmt.Sprint("key ", i))
		for name, call := range clients.calls {
			calls.Go(func() {
				if err := call(t.Context()); err == nil {
					t.Errorf("%s succeeded in an outage", name)
				}
			})
		}
	}
	calls.Wait()
	for range eachKind {
		select {
		case <-clients.refused:
		case <-time.After(10 * time.Second):
			t.Fatal("a key was still retried after 10 seconds")
		}
	}
}

// clients are all kinds, with one Retrier.
type clients struct {
	calls   map[string]func(context.Context) error
	queue   workqueue.TypedRateLimitingInterface[string]
	refused chan struct{} // a key was refused by the budget
	done    chan struct{} // a key was reconciled
}

// serve starts the workers of the queue, too.
func (b *backends) serve(t *testing.T, opts ...grpcretry.Option) *clients {
	t.Helper()
	r, err := grpcretry.New(append([]grpcretry.Option{
		grpcretry.WithBackoff(grpcretry.Constant(time.Millisecond)), grpcretry.WithMaxAttempts(1000),
	}, opts...)...)
	if err != nil {
		t.Fatal(err)
	}
	cc, err := grpc.NewClient(b.target, append(r.DialOptions(), grpc.WithTransportCredentials(insecure.NewCredentials()))...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { cc.Close() })
	plain := &http.Transport{}
	t.Cleanup(plain.CloseIdleConnections)
	browser := &http.Client{Transport: httpretry.NewTransport(r, plain)}
	c := &clients{
		calls: map[string]func(context.Context) error{
			"Echo": func(ctx context.Context) error {
				_, err := echov1.NewEchoServiceClient(cc).Echo(ctx, &echov1.EchoRequest{})
				return err
			},
			"Get": func(ctx context.Context) error { return get(ctx, browser, b.site) },
		},
		refused: make(chan struct{}, eachKind), done: make(chan struct{}, eachKind),
	}
	limiter := reconcile.NewRateLimiter[string](r, "/reconcile/orders", reconcile.WithSlowLane(
		reconcile.SlowLane{Rate: rate.Every(time.Hour), Backoff: grpcretry.Constant(time.Hour)}))
	c.queue = workqueue.NewTypedRateLimitingQueue[string](watched{limiter, c.refused})
	c.work(t, func(ctx context.Context) error { return get(ctx, &http.Client{Transport: plain}, b.store) })
	return c
}

// work starts workers that reconcile keys as controllers do.
func (c *clients) work(t *testing.T, reconcileKey func(context.Context) error) {
	var workers sync.WaitGroup
	t.Cleanup(func() {
		c.queue.ShutDown()
		workers.Wait()
	})
	for range 4 {
		workers.Go(func() {
			for {
				key, shutdown := c.queue.Get()
				if shutdown {
					return
				}
				if err := reconcileKey(context.Background()); err != nil {
					c.queue.AddRateLimited(key)
				} else {
					c.queue.Forget(key)
					c.done <- struct{}{}
				}
				c.queue.Done(key)
			}
		})
	}
}

// A watched limiter reports keys that are sent to the slow lane, whose waits are an hour or longer.
type watched struct {
	*reconcile.RateLimiter[string]
	refused chan<- struct{}
}

func (w watched) When(key string) time.Duration {
	wait := w.RateLimiter.When(key)
	if wait >= time.Minute {
		w.refused <- struct{}{}
	}
	return wait
}

func get(ctx context.Context, client *http.Client, url string) error {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, http.NoBody)
	if err != nil {
		return err
	}
	resp, err := client.Do(req)
	if err != nil {
		return err
	}
	resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return errors.New(resp.Status)
	}
	return nil
}

// A relay is a service that calls another one.
type relay struct {
	echov1.UnimplementedEchoServiceServer
	next echov1.EchoServiceClient
}

func (r *relay) Echo(ctx context.Context, req *echov1.EchoRequest) (*echov1.EchoResponse, error) {
	return r.next.Echo(ctx, req)
}

// A service that has given up on another one says "do not retry", whatever has failed there. The key returns all the same.
func TestAnOutageFurtherDownEndsNoKey(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		up := time.Now().Add(time.Second)
		below := grpcretrytest.NewServer(t, func(s grpc.ServiceRegistrar) {
			echov1.RegisterEchoServiceServer(s, &backends{fails: func(int) bool { return time.Now().Before(up) }})
		})
		service := grpcretrytest.NewServer(t, func(s grpc.ServiceRegistrar) {
			echov1.RegisterEchoServiceServer(s, &relay{next: echov1.NewEchoServiceClient(below.Dial(grpcretry.WithMaxAttempts(2)))})
		}, grpc.UnaryInterceptor(grpcretry.UnaryServerInterceptor()))
		client := echov1.NewEchoServiceClient(service.Dial(grpcretry.WithMaxElapsed(1)))
		limiter := reconcile.NewRateLimiter[string](newRetrier(t), name)
		queue := workqueue.NewTypedRateLimitingQueue[string](limiter)
		queue.Add("a")
		refused := 0
		work(queue, func(key string) error {
			_, err := client.Echo(t.Context(), &echov1.EchoRequest{})
			if err == nil {
				queue.ShutDown()
				return nil
			}
			if hint, _ := grpcretry.PushbackFrom(trailerOf(err), nil); hint.Stop {
				refused++
			}
			_, err = limiter.Result(key, err)
			if errors.Is(err, ctrl.TerminalError(nil)) {
				queue.ShutDown()
				t.Errorf("the key has ended: %v", err)
			}
			return err
		})
		if refused == 0 {
			t.Error("the service has not forbidden a retry")
		}
	})
}

// trailerOf returns the trailer of a call's last attempt.
func trailerOf(err error) metadata.MD {
	var call *grpcretry.Error
	if errors.As(err, &call) {
		return call.Attempts[len(call.Attempts)-1].Trailer
	}
	return nil
}
