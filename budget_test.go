package grpcretry

import (
	"errors"
	"fmt"
	"math"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/time/rate"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"

	echov1 "github.com/grpcretry/grpcretry/proto/echo/v1"
)

func TestUnlimitedBudgetNeverRefuses(t *testing.T) {
	for range 1000 {
		Unlimited.Deposit(Outcome{Attempt: 1, Result: Failed})
		if !Unlimited.Withdraw(epoch) {
			t.Fatal("Unlimited refused")
		}
	}
	if got := Unlimited.Balance(epoch); !math.IsInf(got, 1) {
		t.Errorf("Balance = %v, want +Inf", got)
	}
}

func TestRateBudgetAllowsWhatTheLimiterAllows(t *testing.T) {
	l := rate.NewLimiter(2, 5)
	b := NewRateBudget(l)
	wantBalance(t, b, at(0), 5)
	wantWithdrawn(t, b, at(0), 5)
	wantBalance(t, b, at(0), 0)
	wantWithdrawn(t, b, at(0.49), 0)
	wantBalance(t, b, at(0.5), 1)
	wantWithdrawn(t, b, at(0.5), 1)
	wantWithdrawn(t, b, at(2), 3)
	wantWithdrawn(t, b, at(1000), 5) // never more than the burst
}

// Traffic neither earns nor costs: a rate is absolute.
func TestRateBudgetIgnoresOutcomes(t *testing.T) {
	b := NewRateBudget(rate.NewLimiter(1, 3))
	for _, result := range []Result{Succeeded, Answered, Failed, Ignored} {
		b.Deposit(Outcome{Attempt: 1, Result: result})
		b.Deposit(Outcome{Attempt: 2, Result: result})
		b.Deposit(Outcome{Attempt: 2, Hedge: true, Result: result})
	}
	wantWithdrawn(t, b, at(0), 3)
	b.Deposit(retrySuccess) // returns nothing either
	deposit(b, 100)
	wantWithdrawn(t, b, at(0), 0)
}

// A refund is worth a whole retry immediately, whenever it comes.
func TestRateBudgetRefundIsUsedAgain(t *testing.T) {
	for _, later := range []float64{0, 0.0001, 0.1, 0.9} {
		b := NewRateBudget(rate.NewLimiter(1, 3))
		wantWithdrawn(t, b, at(0), 3)
		wantWithdrawn(t, b, at(later), 0)
		b.Refund()
		b.Refund()
		wantBalance(t, b, at(later), 2+later)
		wantWithdrawn(t, b, at(later), 2)
		wantBalance(t, b, at(later), later)
		wantBalance(t, b, at(2), 2) // the limiter has gone on as if nothing had happened
		wantWithdrawn(t, b, at(2), 2)
	}
}

func TestRateBudgetRefundNeverGoesBeyondTheBurst(t *testing.T) {
	for _, tt := range []struct {
		name    string
		taken   int
		refunds int
		later   float64 // seconds
		want    int
	}{
		{"nothing was taken", 0, 4, 0, 3},
		{"more refunds than taken", 2, 4, 0, 3},
		{"the limiter has filled up meanwhile", 3, 3, 3, 3},
		{"the limiter has partly filled up", 3, 3, 1, 3},
		{"room for both", 3, 1, 1, 2},
		{"an hour later", 3, 3, 3600, 3},
	} {
		t.Run(tt.name, func(t *testing.T) {
			b := NewRateBudget(rate.NewLimiter(1, 3))
			if got := withdraw(b, at(0), tt.taken); got != tt.taken {
				t.Fatalf("got %d retries, want %d", got, tt.taken)
			}
			for range tt.refunds {
				b.Refund()
			}
			wantBalance(t, b, at(tt.later), float64(tt.want))
			wantWithdrawn(t, b, at(tt.later), tt.want)
		})
	}
}

// A refund of the only token must be there for the next retry, also when the limiter
// has earned a part of a token since.
func TestRateBudgetRefundIsKeptWithABurstOfOne(t *testing.T) {
	for _, later := range []float64{0, 0.25, 0.5, 0.999, 1, 10} {
		b := NewRateBudget(rate.NewLimiter(1, 1))
		wantWithdrawn(t, b, at(0), 1)
		b.Refund()
		if balance := b.Balance(at(later)); balance != 1 {
			t.Errorf("after %v s: Balance = %v, want 1", later, balance)
		}
		if !b.Withdraw(at(later)) {
			t.Errorf("after %v s: refused, although Balance said 1", later)
		}
	}
}

func TestRateBudgetSharesItsLimiter(t *testing.T) {
	l := rate.NewLimiter(1, 4)
	one, other := NewRateBudget(l), NewRateBudget(l)
	if !one.Withdraw(at(0)) || !other.Withdraw(at(0)) || !l.AllowN(at(0), 1) {
		t.Fatal("a burst of 4 did not give 3 tokens")
	}
	wantBalance(t, one, at(0), 1)
	wantBalance(t, other, at(0), 1)
	wantWithdrawn(t, other, at(0), 1)
	if one.Withdraw(at(0)) || l.AllowN(at(0), 1) {
		t.Error("a fifth token from a burst of 4")
	}
	// A limiter in debt to somebody else's reservation allows no retry.
	l.ReserveN(at(0), 3)
	wantBalance(t, one, at(0), 0)
	wantBalance(t, one, at(3.5), 0.5)
	if one.Withdraw(at(3.5)) {
		t.Error("a retry from a limiter with half a token")
	}
}

// Time that goes back must not be earned twice when it comes again.
func TestRateBudgetSurvivesAClockThatGoesBack(t *testing.T) {
	b := NewRateBudget(rate.NewLimiter(1, 9))
	if got := withdraw(b, at(100), 3); got != 3 {
		t.Fatalf("a burst of 9 gave %d retries, want 3", got)
	}
	for _, s := range []float64{90, 50, 99} {
		if !b.Withdraw(at(s)) {
			t.Errorf("at %v s: refused, although tokens are left", s)
		}
	}
	wantWithdrawn(t, b, at(100), 3)
	wantWithdrawn(t, b, at(0), 0)
	wantWithdrawn(t, b, at(102), 2)
}

func TestRateBudgetOfAnInfiniteLimiter(t *testing.T) {
	b := NewRateBudget(rate.NewLimiter(rate.Inf, 0))
	for range 100 {
		if !b.Withdraw(at(0)) {
			t.Fatal("an infinite limiter refused")
		}
	}
	if got := b.Balance(at(0)); !math.IsInf(got, 1) {
		t.Errorf("Balance = %v, want +Inf", got)
	}
}

// New refuses it; used all the same, it allows nothing.
func TestRateBudgetWithoutALimiterAllowsNothing(t *testing.T) {
	b := NewRateBudget(nil)
	b.Deposit(Outcome{Attempt: 1, Result: Succeeded})
	b.Refund()
	wantBalance(t, b, at(0), 0)
	wantWithdrawn(t, b, at(0), 0)
}

func TestRateBudgetGrantsExactlyTheBurst(t *testing.T) {
	b := NewRateBudget(rate.NewLimiter(1, 500))
	var granted atomic.Int64
	concurrently(64, func() {
		for range 50 {
			if b.Withdraw(at(0)) {
				granted.Add(1)
				if granted.Load()%7 == 0 { // some come back and are used again
					granted.Add(-1)
					b.Refund()
				}
			}
		}
	})
	granted.Add(int64(withdraw(b, at(0), plenty)))
	if got := granted.Load(); got != 500 {
		t.Errorf("a burst of 500 gave %d retries", got)
	}
}

func TestConcurrencyBudgetLimitsRetriesAtOnce(t *testing.T) {
	b := concurrencyBudgetOf(t, 3)
	wantBalance(t, b, epoch, 3)
	wantWithdrawn(t, b, epoch, 3)
	wantBalance(t, b, epoch, 0)
	wantWithdrawn(t, b, at(1e9), 0) // time alone gives none back

	for _, result := range []Result{Succeeded, Answered, Failed, Ignored} { // the end of a first attempt neither
		b.Deposit(Outcome{Attempt: 1, Result: result})
	}
	wantBalance(t, b, epoch, 0)

	for i, result := range []Result{Succeeded, Answered, Failed, Ignored} {
		b.Deposit(Outcome{Attempt: i + 2, Hedge: i%2 == 0, Result: result})
		wantBalance(t, b, epoch, 1)
		wantWithdrawn(t, b, epoch, 1)
	}
	b.Refund()
	b.Refund()
	wantBalance(t, b, epoch, 2)
	wantWithdrawn(t, b, epoch, 2)
}

// A stray refund must not lift the limit.
func TestConcurrencyBudgetNeverHoldsMoreThanItsLimit(t *testing.T) {
	b := concurrencyBudgetOf(t, 2)
	for range 5 {
		b.Refund()
		b.Deposit(Outcome{Attempt: 2, Result: Failed})
	}
	wantBalance(t, b, epoch, 2)
	wantWithdrawn(t, b, epoch, 2)
}

func TestConcurrencyBudgetUnderManyGoroutines(t *testing.T) {
	const limit = 5
	b := concurrencyBudgetOf(t, limit)
	var inUse, most atomic.Int64
	concurrently(64, func() {
		for range 200 {
			if !b.Withdraw(epoch) {
				continue
			}
			n := inUse.Add(1)
			for old := most.Load(); n > old && !most.CompareAndSwap(old, n); old = most.Load() {
			}
			inUse.Add(-1)
			b.Deposit(Outcome{Attempt: 2, Result: Failed})
		}
	})
	if got := most.Load(); got > limit {
		t.Errorf("%d retries at once, want at most %d", got, limit)
	}
	wantBalance(t, b, epoch, limit)
}

func TestConcurrencyBudgetRefusesToLimitToNothing(t *testing.T) {
	for _, n := range []int{0, -1, math.MinInt} {
		b, err := NewConcurrencyBudget(n)
		wantRefused(t, err, "NewConcurrencyBudget", fmt.Sprint(n))
		if b != nil {
			t.Errorf("NewConcurrencyBudget(%d) = %v, want nil beside the error", n, b)
		}
	}
}

func concurrencyBudgetOf(t *testing.T, n int) Budget {
	t.Helper()
	b, err := NewConcurrencyBudget(n)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// Two calls fail together; the one slot is free again when the first one's retry has
// ended, however it ended and however the call goes on.
func TestConcurrencyBudgetThroughTheInterceptor(t *testing.T) {
	bubble(t, func(t *testing.T) {
		b := concurrencyBudgetOf(t, 1)
		server := serve(t, func(n int) answer {
			if n <= 3 {
				return unavailable()
			}
			return ok()
		})
		cc := server.client(t, steady, WithBudget(b))
		var wg sync.WaitGroup
		errs := make([]error, 2)
		for i := range errs {
			wg.Go(func() { _, errs[i] = cc.Echo(t.Context(), request()) })
		}
		wg.Wait()
		if (errs[0] == nil) == (errs[1] == nil) || !errors.Is(errors.Join(errs...), ErrBudgetExhausted) {
			t.Errorf("Echo = %v, want one success and one %v", errs, ErrBudgetExhausted)
		}
		// 0 and 0, then one retry at 1 s, which fails, and its second at 3 s.
		wantTimes(t, server, 0, 0, 1*time.Second, 3*time.Second)
		wantBalance(t, b, time.Now(), 1)
	})
}

func TestAllBudgetsTakeFromAllOrNone(t *testing.T) {
	roomy, tight := concurrencyBudgetOf(t, 5), concurrencyBudgetOf(t, 2)
	rated := NewRateBudget(rate.NewLimiter(0.001, 4))
	for _, b := range []Budget{AllBudgets(roomy, rated, tight), AllBudgets(tight, roomy, rated), AllBudgets(rated, AllBudgets(tight), roomy)} {
		wantBalance(t, b, epoch, 2)
		wantWithdrawn(t, b, epoch, 2)
		for range 3 {
			if b.Withdraw(epoch) {
				t.Fatal("allowed, although one member refuses")
			}
		}
		wantBalance(t, roomy, epoch, 3)
		wantBalance(t, rated, epoch, 2)
		wantBalance(t, tight, epoch, 0)
		b.Refund()
		wantBalance(t, b, epoch, 1)
		wantBalance(t, roomy, epoch, 4)
		wantBalance(t, rated, epoch, 3)
		b.Refund()
	}
}

func TestAllBudgetsTellEachOfEveryOutcome(t *testing.T) {
	throttled, ratio := throttleOf(t, 10, 1), ratioBudgetOf(t, RatioBudget{Ratio: 1})
	b := AllBudgets(throttled, ratio)
	b.Deposit(Outcome{Attempt: 1, Result: Failed})
	b.Deposit(Outcome{Attempt: 2, Result: Failed})
	b.Deposit(Outcome{Attempt: 2, Result: Answered})
	wantBalance(t, ratio, epoch, 1)
	wantBalance(t, throttled, epoch, 3)
	wantBalance(t, b, epoch, 1)
}

// A retry that one budget refuses leaves no trace in any other, now or later. Those that
// were asked in vain are compared with others that were not.
func TestAllBudgetsLeaveNoTraceOfARefusedRetry(t *testing.T) {
	type budgets struct {
		ratio, floored, rated, slots Budget
	}
	made := func() budgets {
		b := budgets{
			ratioBudgetOf(t, RatioBudget{Ratio: 0.5, Reserve: 3}),
			ratioBudgetOf(t, RatioBudget{Ratio: 0.5, Reserve: 3, MinPerSecond: 0.5}),
			NewRateBudget(rate.NewLimiter(0.5, 5)),
			concurrencyBudgetOf(t, 20),
		}
		for _, b := range []Budget{b.ratio, b.floored, b.rated, b.slots} {
			deposit(b, 4)
			if got := withdraw(b, at(0), 4); got != 4 {
				t.Fatalf("%v: %d retries, want 4", b, got)
			}
		}
		return b
	}
	withdrawnAndReturned := &theirs{}
	for name, refuses := range map[string]Budget{
		"a throttle":        &throttle{full: 1000, gain: 1},
		"a full budget":     full(t),
		"no reserve":        ratioBudgetOf(t, RatioBudget{Ratio: 1}),
		"somebody else's":   &theirs{refuse: true},
		"an inner one":      AllBudgets(&theirs{}, full(t)),
		"an exhausted rate": NewRateBudget(rate.NewLimiter(0, 0)),
	} {
		asked, left := made(), made()
		b := asked
		for _, all := range []Budget{
			AllBudgets(b.ratio, b.floored, b.rated, b.slots, withdrawnAndReturned, refuses),
			AllBudgets(refuses, b.ratio, b.floored, b.rated, b.slots),
			AllBudgets(AllBudgets(b.ratio, b.floored), refuses, AllBudgets(b.rated, b.slots)),
		} {
			for i := range 100 {
				if all.Withdraw(at(float64(i) / 10)) {
					t.Fatalf("%s: allowed, although one budget refuses", name)
				}
			}
		}
		for s := 10.0; s < 40; s += 0.5 {
			for _, pair := range [][2]Budget{{asked.ratio, left.ratio}, {asked.floored, left.floored}, {asked.rated, left.rated}, {asked.slots, left.slots}} {
				if got, want := pair[0].Balance(at(s)), pair[1].Balance(at(s)); math.Abs(got-want) > 1e-9 {
					t.Fatalf("%s: the balance of the %v is %v at %v s, want %v", name, pair[0], got, s, want)
				}
			}
		}
	}
	if withdrawnAndReturned.taken != 0 {
		t.Errorf("%d retries are missing in a budget of another type", withdrawnAndReturned.taken)
	}
}

func full(t *testing.T) Budget {
	b := concurrencyBudgetOf(t, 1)
	b.Withdraw(epoch)
	return b
}

// theirs is a budget of another package.
type theirs struct {
	refuse bool
	taken  int
}

func (*theirs) Deposit(Outcome) {}
func (b *theirs) Withdraw(time.Time) bool {
	if !b.refuse {
		b.taken++
	}
	return !b.refuse
}
func (b *theirs) Refund()                 { b.taken-- }
func (*theirs) Balance(time.Time) float64 { return 0 } // it does not say

func TestAllBudgetsAskOtherTypesByWithdrawing(t *testing.T) {
	slots, other := concurrencyBudgetOf(t, 3), &theirs{}
	b := AllBudgets(slots, other)
	wantWithdrawn(t, b, epoch, 3)
	if other.taken != 3 {
		t.Errorf("%d retries were taken from a budget of another type, want 3", other.taken)
	}
}

// Two goroutines may be told yes for the last slot; one of them gives back what it took.
func TestAllBudgetsConcurrently(t *testing.T) {
	slots, ratio := concurrencyBudgetOf(t, 3), ratioBudgetOf(t, RatioBudget{Reserve: 10})
	b := AllBudgets(ratio, slots)
	concurrently(32, func() {
		for range 200 {
			if b.Withdraw(epoch) {
				b.Deposit(retrySuccess)
			}
		}
	})
	wantBalance(t, slots, epoch, 3)
	wantBalance(t, ratio, epoch, 10)
}

func TestAllBudgetsOfNoneNeverRefuse(t *testing.T) {
	b := AllBudgets()
	b.Deposit(Outcome{Attempt: 1, Result: Failed})
	b.Refund()
	if !b.Withdraw(epoch) || !math.IsInf(b.Balance(epoch), 1) {
		t.Errorf("Withdraw refused or Balance is %v, want +Inf", b.Balance(epoch))
	}
}

func TestAllBudgetsKeepTheirOwnList(t *testing.T) {
	list := []Budget{concurrencyBudgetOf(t, 1)}
	b := AllBudgets(list...)
	list[0] = Unlimited
	wantBalance(t, b, epoch, 1)
}

func TestPerTargetBudgetIsNotSpentByAnotherTarget(t *testing.T) {
	for _, tt := range []struct {
		name    string
		option  []Option
		retries int // one target's, at once
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
				// A second connection to the failing target has what the first one left.
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

// Outside of a Retrier there is no target.
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
	t.dialed.Range(func(any, any) bool { n++; return true })
	t.mu.Lock()
	defer t.mu.Unlock()
	return max(n, len(t.targets))
}

// A client that dials ever new targets remembers those of the last two minutes.
func TestPerTargetForgetsTargetsThatAreNotUsed(t *testing.T) {
	bubble(t, func(t *testing.T) {
		budgets := PerTarget(func() Budget { return realRatioBudget(t, RatioBudget{}) })
		most := 0
		for i := range 10_000 { // one a second
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

// Memory is released, also that of the target that came first.
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

// However calls and sweeps meet, all names of a target that is in use have one budget.
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
	if first := budgets.first.Load(); first != nil && budgets.targets["dns:///"+strings.TrimPrefix(first.dialed, "dns:///")] != first.targetBudget {
		t.Error("a forgotten target is still found first")
	}
}

// All that is given one WithRatioBudget shares its budgets; another use has its own.
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

func TestBudgetsAllocateNothing(t *testing.T) {
	for name, b := range map[string]Budget{
		"rate":        NewRateBudget(rate.NewLimiter(1, 10)),
		"concurrency": concurrencyBudgetOf(t, 5),
		"all":         AllBudgets(Unlimited, concurrencyBudgetOf(t, 5)),
		"all of all":  AllBudgets(AllBudgets(Unlimited, ratioBudgetOf(t, RatioBudget{})), NewRateBudget(rate.NewLimiter(1, 10)), &theirs{}),
	} {
		if n := testing.AllocsPerRun(1000, func() { b.Deposit(Outcome{Attempt: 2, Result: Failed}) }); n != 0 {
			t.Errorf("%s: Deposit makes %v allocations, want none", name, n)
		}
		if n := testing.AllocsPerRun(1000, func() { b.Withdraw(epoch) }); n != 0 {
			t.Errorf("%s: Withdraw makes %v allocations, want none", name, n)
		}
	}
}

func TestResultNames(t *testing.T) {
	for r, want := range map[Result]string{Succeeded: "succeeded", Answered: "answered", Failed: "failed", Ignored: "ignored", -1: "Result(-1)", 4: "Result(4)"} {
		if got := r.String(); got != want {
			t.Errorf("Result(%d).String() = %q, want %q", int(r), got, want)
		}
	}
}

func TestBudgetsSayWhatTheyAllow(t *testing.T) {
	throttle, err := NewThrottle(10, 0.1)
	if err != nil {
		t.Fatal(err)
	}
	three, err := NewConcurrencyBudget(3)
	if err != nil {
		t.Fatal(err)
	}
	tenth := 0.1 // three of which are 0.30000000000000004
	for want, b := range map[string]Budget{
		"ratio budget: 20% of answered calls, a reserve of 3, over 10s": realRatioBudget(t, RatioBudget{}),
		"ratio budget: 30% of answered calls, a reserve of 0.3, plus 0.3 a second, over 1m0.000000007s": realRatioBudget(t,
			RatioBudget{tenth + 2*tenth, tenth + 2*tenth, tenth + 2*tenth, time.Minute + 7}),
		"throttle: 10 tokens, 0.1 for a success":     throttle,
		"concurrency budget: 3 at once":              three,
		"rate budget: 5 a second, at most 7 at once": NewRateBudget(rate.NewLimiter(5, 7)),
		"rate budget": NewRateBudget(rate.NewLimiter(rate.Inf, 0)),
		"no limit":    Unlimited,
		"concurrency budget: 3 at once and no limit and *grpcretry.aBudget": AllBudgets(three, Unlimited, &aBudget{}),
	} {
		if got := fmt.Sprint(b); got != want {
			t.Errorf("budget is %q, want %q", got, want)
		}
	}
}

// BenchmarkPerTarget is about the path of every call.
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
