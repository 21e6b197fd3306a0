package grpcretry

import (
	"fmt"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/time/rate"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"

	echov1 "github.com/grpcretry/grpcretry/proto/echo/v1"
)

func TestPerTargetBudgetIsNotSpentByAnotherTarget(t *testing.T) {
	for _, tt := range []struct {
		name    string
		option  []Option
		retries int // one target's, without a pause
	}{
		{"the default", nil, 3},
		{"WithRatioBudget", []Option{WithRatioBudget(RatioBudget{Ratio: 0.2, Reserve: 5})}, 5},
		{"PerTarget", []Option{WithBudget(PerTarget(func() Budget { return NewRateBudget(rate.NewLimiter(0.001, 7)) }))}, 7},
	} {
		t.Run(tt.name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				r, err := New(append(tt.option, WithMaxAttempts(1000), WithBackoff(Constant(0)))...)
				if err != nil {
					t.Fatal(err)
				}
				down := serve(t, always(unavailable()))
				up := serve(t, script(unavailable(), unavailable(), ok(), unavailable(), ok()))
				failing := echov1.NewEchoServiceClient(down.connTo(t, "passthrough:///down", r.DialOptions()...))
				_, err = failing.Echo(t.Context(), request())
				wantStop(t, err, codes.Unavailable, ErrBudgetExhausted, 1+tt.retries)

				for range 2 {
					good := echov1.NewEchoServiceClient(up.connTo(t, "passthrough:///up", r.DialOptions()...))
					if _, err := good.Echo(t.Context(), request()); err != nil {
						t.Errorf("Echo at the other target: %v, want its own budget", err)
					}
				}
				// A second connection to the failing target shares the budget of the first.
				again := echov1.NewEchoServiceClient(down.connTo(t, "passthrough:///down", r.DialOptions()...))
				_, err = again.Echo(t.Context(), request())
				wantStop(t, err, codes.Unavailable, ErrBudgetExhausted, 1)
			})
		})
	}
}

func TestDefaultBudgetIsOfOneRetrier(t *testing.T) {
	bubble(t, func(t *testing.T) {
		server := serve(t, always(unavailable()))
		for range 2 {
			cc := server.client(t, WithMaxAttempts(1000), WithBackoff(Constant(0)))
			_, err := cc.Echo(t.Context(), request())
			wantStop(t, err, codes.Unavailable, ErrBudgetExhausted, 4)
		}
	})
}

func TestBudgetSharedByTwoRetriersIsOne(t *testing.T) {
	bubble(t, func(t *testing.T) {
		server := serve(t, always(unavailable()))
		shared := WithBudget(NewRateBudget(rate.NewLimiter(0.001, 5)))
		for _, attempts := range []int{4, 3, 1} { // 3 retries, 2 retries, none
			_, err := server.client(t, shared, WithBackoff(Constant(0))).Echo(t.Context(), request())
			if got := len(asError(t, err).Attempts); got != attempts {
				t.Errorf("Echo made %d attempts, want %d: %v", got, attempts, err)
			}
		}
	})
}

func TestPerTargetJoinsTheFormsOfATarget(t *testing.T) {
	budgets := PerTarget(func() Budget { return NewRateBudget(rate.NewLimiter(0.001, 1)) }).(*perTarget)
	budgetOf := func(target string) Budget {
		cc, err := grpc.NewClient(target, grpc.WithTransportCredentials(insecure.NewCredentials()))
		if err != nil {
			t.Fatal(err)
		}
		defer cc.Close()
		return budgets.of(cc.Target(), cc.CanonicalTarget)
	}
	bare, full, triple := budgetOf("localhost:80"), budgetOf("dns:///localhost:80"), budgetOf("localhost:80")
	if bare != full || bare != triple {
		t.Error(`"localhost:80" and "dns:///localhost:80" have different budgets`)
	}
	if other := budgetOf("localhost:81"); other == bare {
		t.Error("localhost:80 and localhost:81 have one budget")
	}
	if other := budgetOf("passthrough:///localhost:80"); other == bare {
		t.Error("dns:///localhost:80 and passthrough:///localhost:80 have one budget")
	}
}

func TestPerTargetMakesOneBudgetForConcurrentCalls(t *testing.T) {
	budgets := PerTarget(func() Budget { return NewRateBudget(rate.NewLimiter(0.001, 1)) }).(*perTarget)
	var first atomic.Pointer[rateBudget]
	concurrently(64, func() {
		l := budgets.of("a", func() string { return "dns:///a" }).(*rateBudget)
		if !first.CompareAndSwap(nil, l) && first.Load() != l {
			t.Error("two calls to one target have different budgets")
		}
	})
}

// Outside a Retrier there is no target.
func TestPerTargetAloneIsOneBudget(t *testing.T) {
	b := AllBudgets(PerTarget(func() Budget { return ratioBudgetOf(t, RatioBudget{Ratio: 1, Reserve: 2}) }))
	wantBalance(t, b, epoch, 2)
	deposit(b, 3)
	wantWithdrawn(t, b, epoch, 5)
	b.Refund()
	wantBalance(t, b, epoch, 1)
}

// target returns the budget that calls to a target with that name get.
func target(budgets Budget, name string) Budget {
	return budgets.(*perTarget).of(name, func() string { return "dns:///" + name })
}

func remembered(budgets Budget) (n int) {
	t := budgets.(*perTarget)
	t.dialed.all.Range(func(any, any) bool { n++; return true })
	t.mu.Lock()
	defer t.mu.Unlock()
	return max(n, len(t.targets))
}

// A client that keeps dialing new targets remembers only those of the last two minutes.
func TestPerTargetForgetsTargetsThatAreNotUsed(t *testing.T) {
	bubble(t, func(t *testing.T) {
		budgets := PerTarget(func() Budget { return realRatioBudget(t, RatioBudget{}) })
		most := 0
		for i := range 1000 { // one a second
			target(budgets, fmt.Sprint(i)).Withdraw(time.Now())
			most = max(most, remembered(budgets))
			time.Sleep(second)
		}
		if most > 121 {
			t.Errorf("%d targets are remembered, want at most 121", most)
		}
		time.Sleep(time.Hour)
		for i := range 3 {
			target(budgets, fmt.Sprint("new", i))
			time.Sleep(time.Minute)
		}
		if got := remembered(budgets); got != 2 {
			t.Errorf("%d targets are remembered, want the last two", got)
		}
	})
}

// Memory is released, including that of the first target.
func TestPerTargetReleasesBudgets(t *testing.T) {
	var released atomic.Int64
	bubble(t, func(t *testing.T) {
		budgets := PerTarget(func() Budget {
			b := realRatioBudget(t, RatioBudget{})
			runtime.AddCleanup(b, func(n *atomic.Int64) { n.Add(1) }, &released)
			return b
		})
		for i := range 10_000 {
			target(budgets, fmt.Sprint(i))
		}
		for range 2 {
			time.Sleep(time.Minute)
			target(budgets, fmt.Sprint(time.Now()))
		}
		if got := remembered(budgets); got != 2 {
			t.Errorf("%d targets are remembered, want 2", got)
		}
		defer runtime.KeepAlive(budgets)
		for range 100 {
			runtime.GC()
			if released.Load() == 10_000 {
				return
			}
			runtime.Gosched()
		}
		t.Errorf("%d budgets were released, want 10000", released.Load())
	})
}

// A target that is used at least once a minute keeps its budget, whichever of its names is
// used, and so does one that is alone.
func TestPerTargetKeepsTargetsThatAreUsed(t *testing.T) {
	bubble(t, func(t *testing.T) {
		budgets := PerTarget(func() Budget { return NewRateBudget(rate.NewLimiter(0.001, 1)) }).(*perTarget)
		names := []string{"first", "dns:///first", "second", "dns:///second", "dns:/second"}
		canonical := func(name string) func() string {
			return func() string { return "dns:///" + name[strings.LastIndexByte(name, '/')+1:] }
		}
		first, other := budgets.of("first", canonical("first")), budgets.of("second", canonical("second"))
		for i := range 1000 {
			time.Sleep(10 * second)
			target(budgets, fmt.Sprint(i)) // gives it a reason to sweep
			name := names[i%len(names)]
			want := first
			if strings.HasSuffix(name, "second") {
				want = other
			}
			if budgets.of(name, canonical(name)) != want {
				t.Fatalf("%s has a new budget after %d targets", name, i)
			}
		}
		alone := PerTarget(func() Budget { return concurrencyBudgetOf(t, 1) })
		before := target(alone, "x")
		time.Sleep(24 * time.Hour)
		if target(alone, "x") != before {
			t.Error("the only target was forgotten")
		}
	})
}

// A target is never forgotten before it has been unused for a minute. After that it gets a
// budget with a full reserve, one for all its names; a call in flight stays with the old.
func TestPerTargetMakesANewBudgetForAForgottenTarget(t *testing.T) {
	bubble(t, func(t *testing.T) {
		budgets := PerTarget(func() Budget { return realRatioBudget(t, RatioBudget{}) }).(*perTarget)
		old := target(budgets, "x")
		budgets.of("dns:///x", func() string { return "dns:///x" })
		wantWithdrawn(t, old, time.Now(), 3)
		for i := range 119 { // swept after 60 s, when it had been used before
			time.Sleep(second)
			target(budgets, fmt.Sprint(i))
		}
		if got := budgets.targets["dns:///x"]; got == nil || got.Budget != old {
			t.Fatal("the target was forgotten 59 s after the first sweep")
		}
		time.Sleep(second)
		target(budgets, "another")
		if budgets.targets["dns:///x"] != nil {
			t.Fatal("the target was not forgotten")
		}
		fresh := budgets.of("dns:///x", func() string { return "dns:///x" })
		if fresh == old || fresh != target(budgets, "x") {
			t.Error("after it was forgotten, the target has its old budget, or two")
		}
		wantWithdrawn(t, fresh, time.Now(), 3)
		old.Refund()
		wantBalance(t, old, time.Now(), 1)
	})
}

// All names of a target in use share one budget, however calls and sweeps interleave.
func TestPerTargetForgetsUnderManyGoroutines(t *testing.T) {
	budgets := PerTarget(func() Budget { return &theirs{} }).(*perTarget)
	var next atomic.Int64
	concurrently(16, func() {
		for i := range 500 {
			budgets.mu.Lock()
			budgets.swept = time.Time{} // each new target sweeps
			budgets.mu.Unlock()
			target(budgets, fmt.Sprint("new", next.Add(1)))
			target(budgets, fmt.Sprint("old", i%3))
			budgets.of(fmt.Sprint("dns:///old", i%3), func() string { return fmt.Sprint("dns:///old", i%3) })
		}
	})
	for i := range 3 {
		name := fmt.Sprint("old", i)
		if target(budgets, name) != budgets.of("dns:///"+name, func() string { return "dns:///" + name }) {
			t.Errorf("%s has two budgets", name)
		}
	}
	if first := budgets.dialed.first.Load(); first != nil && budgets.targets["dns:///"+strings.TrimPrefix(first.name,
		"dns:///")] != first.targetBudget {
		t.Error("a forgotten target is still found first")
	}
}

// All users of one WithRatioBudget share its budgets; another WithRatioBudget has its own.
func TestWithRatioBudgetIsOneSetOfBudgets(t *testing.T) {
	shared := WithRatioBudget(RatioBudget{Reserve: 2})
	other := WithRatioBudget(RatioBudget{Reserve: 2})
	budgetOf := func(name string, opts ...Option) Budget {
		r, err := New(opts...)
		if err != nil {
			t.Fatal(err)
		}
		return target(r.Policy("/pkg.Service/Method").Budget, name)
	}
	one := budgetOf("x", shared)
	if budgetOf("x", shared) != one || budgetOf("x", other, WithMethod("/pkg.Service/", shared)) != one {
		t.Error("one WithRatioBudget has two budgets for one target")
	}
	if budgetOf("y", shared) == one {
		t.Error("two targets have one budget")
	}
	if budgetOf("x", other) == one {
		t.Error("two uses of WithRatioBudget have one budget")
	}
	wantBalance(t, one, epoch, 2)
}

func TestPerTargetAllocatesNothing(t *testing.T) {
	budgets := PerTarget(func() Budget { return Unlimited }).(*perTarget)
	canonical := func() string { return "dns:///x" }
	for _, name := range []string{"x", "dns:///x"} { // the first, and another
		budgets.of(name, canonical)
		if n := testing.AllocsPerRun(1000, func() { budgets.of(name, canonical) }); n != 0 {
			t.Errorf("%s: %v allocations, want none", name, n)
		}
	}
}

// BenchmarkPerTarget measures the part of PerTarget that every call runs.
func BenchmarkPerTarget(b *testing.B) {
	budgets := PerTarget(func() Budget { return Unlimited }).(*perTarget)
	canonical := func() string { return "dns:///x" }
	for _, name := range []string{"x", "dns:///x"} { // the first, and another
		b.Run("target="+name, func(b *testing.B) {
			b.ReportAllocs()
			b.RunParallel(func(pb *testing.PB) {
				for pb.Next() {
					budgets.of(name, canonical)
				}
			})
		})
	}
}
