package reconcile_test

import (
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/time/rate"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"k8s.io/client-go/util/workqueue"

	"github.com/grpcretry/grpcretry"
	"github.com/grpcretry/grpcretry/internal/inside"
	"github.com/grpcretry/grpcretry/reconcile"
)

// slow is a slow lane without a rate, so that its waits can be compared: 7 s each.
var slow = reconcile.WithSlowLane(reconcile.SlowLane{Rate: rate.Inf, Backoff: grpcretry.Constant(7 * time.Second)})

// A backend fails until it has failed often enough, and keeps the times of its requests.
type backend struct {
	mu     sync.Mutex
	start  time.Time
	fails  int
	err    error
	called []time.Duration
}

func (b *backend) call() error {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.called = append(b.called, time.Since(b.start))
	if len(b.called) <= b.fails {
		return b.err
	}
	return nil
}

// work is the loop of a controller with one worker, until the queue is shut down.
func work(queue workqueue.TypedRateLimitingInterface[string], do func(item string) error) {
	for {
		item, shutdown := queue.Get()
		if shutdown {
			return
		}
		if err := do(item); err != nil {
			queue.AddRateLimited(item)
		} else {
			queue.Forget(item)
		}
		queue.Done(item)
	}
}

// A key's first retries have the policy's backoff. After MaxAttempts it waits in the slow lane, until
// it succeeds.
func TestBackoff(t *testing.T) {
	for _, tt := range []struct {
		name string
		opts []grpcretry.CallOption
		want []time.Duration // of the requests, in ms
	}{
		{"quick retries, then the slow lane", []grpcretry.CallOption{grpcretry.WithMaxAttempts(4)},
			[]time.Duration{0, 100, 300, 700, 7700, 14700}},
		{"one quick retry", []grpcretry.CallOption{grpcretry.WithMaxAttempts(2)}, []time.Duration{0, 100, 7100, 14100, 21100, 28100}},
		{"retries are off", []grpcretry.CallOption{grpcretry.Disable()}, []time.Duration{0, 7000, 14000, 21000, 28000, 35000}},
		{"MaxElapsed", []grpcretry.CallOption{grpcretry.WithMaxAttempts(9), grpcretry.WithMaxElapsed(500 * time.Millisecond)},
			[]time.Duration{0, 100, 300, 7300, 7400, 7600}},
		{"not retryable", []grpcretry.CallOption{grpcretry.WithCodes(codes.Aborted)}, []time.Duration{0, 7000, 14000, 21000, 28000, 35000}},
		{"hedging means nothing here", []grpcretry.CallOption{grpcretry.WithMaxAttempts(4),
			grpcretry.WithHedging(grpcretry.Hedging{Delay: grpcretry.HedgeAfter(time.Millisecond)})},
			[]time.Duration{0, 100, 300, 700, 7700, 14700}},
		{"UnsentOnly means nothing here", []grpcretry.CallOption{grpcretry.WithMaxAttempts(4), grpcretry.WithUnsentOnly(true)},
			[]time.Duration{0, 100, 300, 700, 7700, 14700}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				r := newRetrier(t, grpcretry.WithBackoff(doubling), grpcretry.WithBudget(grpcretry.Unlimited),
					grpcretry.WithMethod("/reconcile/", tt.opts...))
				limiter := reconcile.NewRateLimiter[string](r, name, slow)
				queue := workqueue.NewTypedRateLimitingQueue[string](limiter)
				b := &backend{start: time.Now(), fails: 5, err: errors.New("down")}
				queue.Add("a")
				work(queue, func(string) error {
					err := b.call()
					if err == nil {
						queue.ShutDown()
					} else if got := limiter.NumRequeues("a"); got != len(b.called)-1 {
						t.Errorf("NumRequeues before failure %d = %d", len(b.called), got)
					}
					return err
				})
				for i := range tt.want {
					tt.want[i] *= time.Millisecond
				}
				if !slices.Equal(b.called, tt.want) {
					t.Errorf("requests after %v, want %v", b.called, tt.want)
				}
				if got := limiter.NumRequeues("a"); got != 0 {
					t.Errorf("NumRequeues after the success = %d, want 0", got)
				}
			})
		})
	}
}

// The budget pays for three retries. A retry that succeeds is paid back, and each success earns 0.2.
func TestBudget(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := ratio(t, 0.2, 3)
		limiter := reconcile.NewRateLimiter[string](newRetrier(t, grpcretry.WithBudget(b), grpcretry.WithBackoff(doubling)), name, slow)
		balance := func(when string, want float64) {
			t.Helper()
			if got := math.Round(10*b.Balance(time.Now())) / 10; got != want {
				t.Errorf("balance %s = %v, want %v", when, got, want)
			}
		}
		for _, tt := range []struct {
			item string
			want time.Duration
		}{{"a", 100}, {"b", 100}, {"a", 200}, {"c", 7000}, {"b", 7000}, {"d", 7000}} {
			if got := limiter.When(tt.item); got != tt.want*time.Millisecond && tt.item != "b" {
				t.Errorf("When(%s) = %v, want %v", tt.item, got, tt.want*time.Millisecond)
			}
		}
		balance("after failures", 0)
		limiter.Forget("c") // from the slow lane: nobody paid
		balance("after a success in the slow lane", 0.2)
		limiter.Forget("a") // its retry was paid for
		time.Sleep(time.Second)
		balance("after a retry that succeeded", 1.4)
		for range 3 {
			limiter.Forget("new")
		}
		time.Sleep(time.Second)
		balance("after five successes in all", 2)
	})
}

// What the server says about a failure decides its wait, also in client-go's own queue.
func TestFailed(t *testing.T) {
	pushback := func(ms string) error {
		return &grpcretry.Error{Last: statusError(codes.Unavailable, 0), Reason: grpcretry.ErrAttemptsExhausted,
			Attempts: []grpcretry.Attempt{{Trailer: metadata.Pairs("grpc-retry-pushback-ms", ms)}}}
	}
	hedged := &grpcretry.Error{Last: statusError(codes.Unavailable, 0), Reason: grpcretry.ErrPushback,
		Attempts: []grpcretry.Attempt{{Number: 1, Trailer: metadata.Pairs("grpc-retry-pushback-ms", "-1")}, {Number: 2}}}
	for _, tt := range []struct {
		name     string
		err      error
		min, max time.Duration
	}{
		{"unavailable", statusError(codes.Unavailable, 0), 100 * time.Millisecond, 100 * time.Millisecond},
		{"overloaded", statusError(codes.ResourceExhausted, 0), 100 * time.Millisecond, 100 * time.Millisecond},
		{"without a status", errors.New("not ready"), 100 * time.Millisecond, 100 * time.Millisecond},
		{"the request is at fault", statusError(codes.InvalidArgument, 0), 7 * time.Second, 7 * time.Second},
		{"RetryInfo", statusError(codes.Unavailable, 10*time.Second), 10 * time.Second, 12 * time.Second},
		{"pushback", pushback("30000"), 30 * time.Second, 30 * time.Second},
		{"pushback says no", pushback("-1"), 7 * time.Second, 7 * time.Second},
		{"pushback says no, in a hedged call's earlier attempt", hedged, 7 * time.Second, 7 * time.Second},
		{"RetryInfo over the limit", statusError(codes.Unavailable, time.Hour), 5 * time.Minute, 5 * time.Minute},
		{"Kubernetes", tooManyRequests(20), 20 * time.Second, 24 * time.Second},
		{"permanent", grpcretry.Permanent(errors.New("never")), 7 * time.Second, 7 * time.Second},
		{"cancelled", context.Canceled, 7 * time.Second, 7 * time.Second},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				limiter := reconcile.NewRateLimiter[string](newRetrier(t, grpcretry.WithBackoff(doubling)), name, slow)
				limiter.Failed("a", fmt.Errorf("sync: %w", tt.err))
				if got := limiter.When("a"); got < tt.min || got > tt.max {
					t.Errorf("When = %v, want %v to %v", got, tt.min, tt.max)
				}
				if got := limiter.NumRequeues("a"); got != 1 {
					t.Errorf("NumRequeues = %d, want 1", got)
				}
			})
		})
	}
}

// However many keys fail, at most one per second returns from the slow lane, and in no second more
// than two.
func TestSlowLaneBound(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := ratio(t, 0.2, 0)
		limiter := reconcile.NewRateLimiter[int](newRetrier(t, grpcretry.WithBudget(b)), name,
			reconcile.WithSlowLane(reconcile.SlowLane{Rate: 1, Backoff: grpcretry.Constant(0)}))
		var due []time.Duration
		for i := range 500 {
			due = append(due, limiter.When(i))
			if i%3 == 0 { // a place that is given up is taken by the next
				limiter.Drop(i)
				due = due[:len(due)-1]
			}
		}
		slices.Sort(due)
		if last := due[len(due)-1]; last > 335*time.Second {
			t.Errorf("%d keys are due within %v", len(due), last)
		}
		for i := 2; i < len(due); i++ {
			if due[i]-due[i-2] < time.Second {
				t.Fatalf("due after %v: three within a second", due[i-2:i+1])
			}
		}
	})
}

// After an outage, each success brings keys forward for which the budget pays. A key that fails although
// it was brought forward waits.
func TestBringForward(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := ratio(t, 1, 1)
		r := newRetrier(t, grpcretry.WithBudget(b), grpcretry.WithBackoff(grpcretry.Constant(50*time.Millisecond)))
		limiter := reconcile.NewRateLimiter[string](r, name, slow)
		queue := reconcile.NewQueue(limiter, "")
		defer queue.ShutDown()
		fail := func(item string) {
			queue.Add(item)
			queue.Get()
			queue.AddRateLimited(item)
			queue.Done(item)
		}
		fail("pays") // the budget is empty now
		start := time.Now()
		next := func() string {
			item, _ := queue.Get()
			queue.Done(item)
			return fmt.Sprintf("%s after %v", item, time.Since(start))
		}
		expect := func(want string) {
			t.Helper()
			if got := next(); got != want {
				t.Errorf("next is %s, want %s", got, want)
			}
		}
		for _, item := range []string{"a", "b", "c"} {
			fail(item)
			time.Sleep(10 * time.Millisecond)
		}
		expect("pays after 50ms")
		limiter.Forget("pays") // returns its retry, and earns one: the last two are brought forward
		expect("c after 100ms")
		expect("b after 100ms")
		wait := limiter.When("b")
		if wait != 7*time.Second {
			t.Errorf("When(b), brought forward = %v, want 7s", wait)
		}
		queue.AddAfter("b", wait)
		limiter.Forget("c") // returns its retry, and earns one: a is next, but not b
		expect("a after 150ms")
		limiter.Forget("a")
		time.Sleep(time.Second)
		limiter.Forget("new")
		expect("b after 7.1s") // because it rests until it is due
	})
}

// A key whose server has named a wait is not brought forward before that is over.
func TestBringForwardAfterServersWait(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRetrier(t, grpcretry.WithBudget(ratio(t, 1, 0)), grpcretry.WithBackoff(grpcretry.Constant(50*time.Millisecond)))
		limiter := reconcile.NewRateLimiter[string](r, name, reconcile.WithSlowLane(reconcile.SlowLane{Rate: 0.01}))
		queue := reconcile.NewQueue(limiter, "")
		defer queue.ShutDown()
		limiter.Failed("a", pushback("30000"))
		queue.AddRateLimited("a") // the budget is empty: the lane returns it after 100 s at the earliest
		time.Sleep(30*time.Second - 1)
		limiter.Forget("new")
		time.Sleep(time.Second)
		if got := queue.Len(); got != 0 {
			t.Error("the key was brought forward before the wait that the server named was over")
		}
		limiter.Forget("new")
		time.Sleep(time.Second)
		limiter.Forget("new")
		time.Sleep(50 * time.Millisecond)
		synctest.Wait()
		if got := queue.Len(); got != 1 {
			t.Error("the key was not brought forward after it")
		}
	})
}

// Keys that are dropped without Forget are forgotten, and what was paid for them is refunded.
func TestRetention(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := ratio(t, 0.2, 3)
		limiter := reconcile.NewRateLimiter[int](newRetrier(t, grpcretry.WithBudget(b), grpcretry.WithBackoff(doubling)), name, slow,
			reconcile.WithRetention(5*time.Minute))
		for i := range 1000 {
			limiter.When(i)
		}
		time.Sleep(5*time.Minute + 6*time.Second)
		limiter.When(1000)
		if got := limiter.NumRequeues(500); got != 1 { // due after 7 s
			t.Errorf("NumRequeues before the retention is over = %d, want 1", got)
		}
		time.Sleep(time.Minute)
		limiter.When(1000)
		failing := 0
		for i := range 1000 {
			failing += limiter.NumRequeues(i)
		}
		if failing != 0 {
			t.Errorf("%d of 1000 keys are remembered, want none", failing)
		}
		if got := b.Balance(time.Now()); got != 1 { // of three, key 1000 has two
			t.Errorf("balance = %v, want 1", got)
		}
	})
}

// A loop that gives up reports no success.
// Keys that the program has dropped are also forgotten when nothing fails any more.
func TestRetentionWithoutFailures(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b, err := grpcretry.NewConcurrencyBudget(1)
		if err != nil {
			t.Fatal(err)
		}
		limiter := reconcile.NewRateLimiter[string](newRetrier(t, grpcretry.WithBudget(b)), name)
		limiter.When("dropped")
		time.Sleep(11 * time.Minute)
		limiter.Forget("good")
		if n, left := limiter.NumRequeues("dropped"), b.Balance(time.Now()); n != 0 || left != 1 {
			t.Errorf("NumRequeues %d, balance %v, want 0 and 1", n, left)
		}
	})
}

// A Classifier's panic reaches the reconciler, where controller-runtime recovers it. The When that follows
// does not panic again, because nobody would recover that.
func TestClassifierPanics(t *testing.T) {
	b := ratio(t, 1, 3)
	limiter := reconcile.NewRateLimiter[string](newRetrier(t, grpcretry.WithBudget(b), grpcretry.WithClassifier(
		func(context.Context, grpcretry.Attempt) grpcretry.Classification { panic("classifier") })), name, slow)
	for range 2 {
		func() {
			defer func() {
				if recover() == nil {
					t.Error("the panic was swallowed")
				}
			}()
			limiter.Result("a", errors.New("down"))
		}()
		if got := limiter.When("a"); got <= 6*time.Second || got > 7*time.Second {
			t.Errorf("When = %v, want the slow lane's 7s", got)
		}
	}
	if n := limiter.NumRequeues("a"); n != 2 || b.Balance(time.Now()) != 3 {
		t.Errorf("NumRequeues %d, balance %v, want 2 and 3", n, b.Balance(time.Now()))
	}
}

// A queue that is shut down holds no retries of a budget that others use, too.
func TestShutDown(t *testing.T) {
	for name, shutDown := range map[string]func(workqueue.TypedRateLimitingInterface[string]){
		"immediately": workqueue.TypedRateLimitingInterface[string].ShutDown,
		"with drain":  workqueue.TypedRateLimitingInterface[string].ShutDownWithDrain,
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				b, err := grpcretry.NewConcurrencyBudget(3)
				if err != nil {
					t.Fatal(err)
				}
				limiter := reconcile.NewRateLimiter[string](newRetrier(t, grpcretry.WithBudget(b),
					grpcretry.WithBackoff(grpcretry.Constant(time.Minute))), "/reconcile/orders")
				queue := reconcile.NewQueue(limiter, "")
				queue.AddRateLimited("waits")
				queue.AddRateLimited("waits in the slow lane")
				limiter.When("in flight")
				time.Sleep(time.Minute - time.Second)
				queue.Add("in flight")
				item, _ := queue.Get()
				time.Sleep(2 * time.Second)
				queue.AddRateLimited("waits")
				go shutDown(queue)
				time.Sleep(time.Second)
				queue.AddRateLimited(item)
				queue.Done(item)
				synctest.Wait()
				if got := b.Balance(time.Now()); got != 3 {
					t.Errorf("balance = %v, want 3", got)
				}
			})
		})
	}
}

func TestDrop(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := ratio(t, 1, 2)
		limiter := reconcile.NewRateLimiter[string](newRetrier(t, grpcretry.WithBudget(b)), name, slow)
		for range 2 {
			limiter.When("a")
		}
		limiter.Drop("a") // one retry was made, the other was not
		if got := b.Balance(time.Now()); got != 1 {
			t.Errorf("balance after Drop = %v, want 1", got)
		}
		limiter.Failed("b", errors.New("down"))
		limiter.Forget("b") // without a When in between
		if got := b.Balance(time.Now()); got != 1 {
			t.Errorf("balance after Failed and Forget = %v, want 1", got)
		}
		if got := limiter.NumRequeues("b"); got != 0 {
			t.Errorf("NumRequeues after Forget = %d, want 0", got)
		}
	})
}

// An Update applies to later failures.
func TestUpdate(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRetrier(t, grpcretry.WithBudget(grpcretry.Unlimited), grpcretry.WithBackoff(doubling))
		limiter := reconcile.NewRateLimiter[string](r, name, slow)
		waits := func(want ...time.Duration) {
			t.Helper()
			for i, want := range want {
				time.Sleep(10 * time.Second) // so that nothing fails early
				if got := limiter.When("a"); got != want*time.Millisecond {
					t.Errorf("When number %d = %v, want %v", i+1, got, want*time.Millisecond)
				}
			}
		}
		r.Update(grpcretry.WithMethod(name, grpcretry.WithMaxAttempts(3)))
		waits(100, 200, 7000)
		r.Update(grpcretry.WithMethod(name, grpcretry.WithMaxAttempts(5), grpcretry.WithBackoff(grpcretry.Constant(time.Second))))
		waits(1000, 7000)
		r.Update(grpcretry.Disable())
		limiter.Forget("a")
		waits(7000)
	})
}

// While retries are off, nothing is brought forward and nothing paid. When they are on again, the keys that
// have failed in the meantime are brought forward like any others.
func TestSwitchedOff(t *testing.T) {
	for name, off := range map[string][2]grpcretry.Option{
		"Disable":   {grpcretry.Disable(), grpcretry.WithMaxAttempts(4)},
		"a dry run": {grpcretry.WithDryRun(true), grpcretry.WithDryRun(false)},
	} {
		t.Run(name, func(t *testing.T) { testSwitchedOff(t, off[0], off[1]) })
	}
}

func testSwitchedOff(t *testing.T, off, on grpcretry.Option) {
	synctest.Test(t, func(t *testing.T) {
		r := newRetrier(t, grpcretry.WithBudget(ratio(t, 1, 3)), grpcretry.WithBackoff(grpcretry.Constant(50*time.Millisecond)))
		limiter := reconcile.NewRateLimiter[string](r, name, slow)
		queue := reconcile.NewQueue(limiter, "")
		defer queue.ShutDown()
		balance := func() float64 { return inside.BudgetOf(r, name, "").(grpcretry.Budget).Balance(time.Now()) }
		r.Update(off)
		for _, item := range []string{"a", "b", "c"} {
			queue.AddRateLimited(item)
		}
		limiter.Forget("good")
		time.Sleep(time.Second)
		if got, paid := queue.Len(), 3-balance(); got != 0 || paid > 0 {
			t.Errorf("%d keys brought forward for %v retries while retries are off, want none", got, paid)
		}
		r.Update(on)
		limiter.Forget("good")
		time.Sleep(time.Second)
		if got := queue.Len(); got != 2 {
			t.Errorf("%d keys brought forward when retries are on again, want 2", got)
		}
	})
}

// Keys and calls to the same target share a budget.
func TestTarget(t *testing.T) {
	r := newRetrier(t)
	for target, l := range map[string]*reconcile.RateLimiter[string]{
		"/reconcile":         reconcile.NewRateLimiter[string](r, name),
		"dns:///orders:8443": reconcile.NewRateLimiter[string](r, name, reconcile.WithTarget("dns:///orders:8443")),
		"/orders":            reconcile.NewRateLimiter[string](r, "/orders"),
	} {
		l.When("a")
		if got := inside.BudgetOf(r, name, target).(grpcretry.Budget).Balance(time.Now()); got != 2 {
			t.Errorf("balance of %s = %v, want 2", target, got)
		}
	}
}

// A key that fails before it is due, because an event has added it, keeps its place in the slow lane.
func TestEarlyFailure(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		limiter := reconcile.NewRateLimiter[string](newRetrier(t, grpcretry.WithBudget(ratio(t, 1, 0))), name, slow)
		limiter.When("a")
		time.Sleep(2 * time.Second)
		if got := limiter.When("a"); got != 5*time.Second {
			t.Errorf("When after 2s of 7s = %v, want 5s", got)
		}
	})
}

func TestInvalid(t *testing.T) {
	r := newRetrier(t)
	for want, f := range map[string]func(){
		"grpcretry: the Retrier is nil: create it with New": func() { reconcile.NewRateLimiter[int](nil, name) },
		"grpcretry: the Retrier is zero: create it with New": func() {
			reconcile.NewRateLimiter[int](&grpcretry.Retrier{}, name)
		},
		"grpcretry/reconcile: NewRateLimiter: option number 2 is nil": func() {
			reconcile.NewRateLimiter[int](r, name, reconcile.WithRetention(1), nil)
		},
		"grpcretry/reconcile: NewRateLimiter: WithSlowLane: Backoff: grpcretry: WithBackoff: backoff is nil": func() {
			reconcile.NewRateLimiter[int](r, name, reconcile.WithSlowLane(reconcile.SlowLane{Backoff: (*grpcretry.Exponential)(nil)}))
		},
		`grpcretry/reconcile: NewRateLimiter: name is "orders", want words with a leading slash, such as "/reconcile/orders"`: func() {
			reconcile.NewRateLimiter[int](r, "orders")
		},
		"grpcretry/reconcile: NewRateLimiter: WithSlowLane: Rate is -1, want at least 0": func() {
			reconcile.NewRateLimiter[int](r, name, reconcile.WithSlowLane(reconcile.SlowLane{Rate: -1}))
		},
		"grpcretry/reconcile: NewRateLimiter: WithRetention: 0s, want more than 0": func() {
			reconcile.NewRateLimiter[int](r, name, reconcile.WithRetention(0))
		},
	} {
		func() {
			defer func() {
				if got := fmt.Sprint(recover()); got != want {
					t.Errorf("panic %q, want %q", got, want)
				}
			}()
			f()
		}()
	}
}

// Many workers use one limiter, and at the end nothing is left of any key, and no retry is owed.
func TestConcurrent(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		in, err := grpcretry.NewConcurrencyBudget(20)
		if err != nil {
			t.Fatal(err)
		}
		limiter := reconcile.NewRateLimiter[int](newRetrier(t, grpcretry.WithBudget(in)), name,
			reconcile.WithSlowLane(reconcile.SlowLane{Rate: 100, Backoff: grpcretry.Constant(time.Second)}))
		queue := reconcile.NewQueue(limiter, "")
		var wg sync.WaitGroup
		for w := range 8 {
			wg.Go(func() {
				random := rand.New(rand.NewPCG(1, uint64(w)))
				for range 500 {
					item := random.IntN(50)
					switch random.IntN(6) {
					case 0, 1:
						queue.AddRateLimited(item)
					case 2:
						limiter.Failed(item, statusError(codes.ResourceExhausted, time.Second))
					case 3:
						queue.Forget(item)
					case 4:
						limiter.Drop(item)
					default:
						time.Sleep(time.Duration(random.IntN(100)) * time.Millisecond)
					}
				}
			})
		}
		wg.Wait()
		queue.ShutDown()
		for item := range 50 {
			limiter.Drop(item)
			if got := limiter.NumRequeues(item); got != 0 {
				t.Errorf("NumRequeues(%d) = %d, want 0", item, got)
			}
		}
		if got := in.Balance(time.Now()); got != 20 {
			t.Errorf("balance = %v, want 20", got)
		}
	})
}

// Two queues with one limiter would get each other's keys.
func TestASecondQueueIsRejected(t *testing.T) {
	limiter := reconcile.NewRateLimiter[string](newRetrier(t), name, slow)
	reconcile.NewQueue(limiter, "").ShutDown()
	defer func() {
		if recover() == nil {
			t.Error("NewQueue has taken the limiter of another queue")
		}
	}()
	reconcile.NewQueue(limiter, "").ShutDown()
}
