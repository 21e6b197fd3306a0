package grpcretry

import (
	"errors"
	"fmt"
	"math"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/time/rate"
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
		wantBalance(t, b, at(2), 2) // the limiter has continued as if nothing had happened
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
	// A limiter with another user's reservation outstanding allows no retry.
	l.ReserveN(at(0), 3)
	wantBalance(t, one, at(0), 0)
	wantBalance(t, one, at(3.5), 0.5)
	if one.Withdraw(at(3.5)) {
		t.Error("a retry from a limiter with half a token")
	}
}

// If the time goes back, it must not be counted twice.
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

// New rejects it; used without New, it allows nothing.
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
				if granted.Load()%7 == 0 { // some are refunded and used again
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
	wantWithdrawn(t, b, at(1e9), 0) // time alone returns none

	for _, result := range []Result{Succeeded, Answered, Failed, Ignored} { // nor does the end of a first attempt
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
// ended, however it ended and however the call continues.
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
	for _, b := range []Budget{AllBudgets(roomy, rated, tight), AllBudgets(tight, roomy, rated),
		AllBudgets(rated, AllBudgets(tight), roomy)} {
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

// A retry that one budget refuses leaves no trace in any other, now or later. The budgets that were
// asked in vain are compared with others that were not asked.
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
			for _, pair := range [][2]Budget{{asked.ratio, left.ratio}, {asked.floored, left.floored}, {asked.rated, left.rated},
				{asked.slots, left.slots}} {
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
func (*theirs) Balance(time.Time) float64 { return 0 } // its balance is not known

func TestAllBudgetsAskOtherTypesByWithdrawing(t *testing.T) {
	slots, other := concurrencyBudgetOf(t, 3), &theirs{}
	b := AllBudgets(slots, other)
	wantWithdrawn(t, b, epoch, 3)
	if other.taken != 3 {
		t.Errorf("%d retries were taken from a budget of another type, want 3", other.taken)
	}
}

// Two goroutines may both be allowed the last slot; one of them then gives back the retry that it took.
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
		"throttle: 10 tokens, 0.1 for a success":        throttle,
		"concurrency budget: at most 3 in flight":       three,
		"rate budget: 5 a second, at most 7 in a burst": NewRateBudget(rate.NewLimiter(5, 7)),
		"rate budget": NewRateBudget(rate.NewLimiter(rate.Inf, 0)),
		"no limit":    Unlimited,
		"concurrency budget: at most 3 in flight and no limit and *grpcretry.aBudget": AllBudgets(three, Unlimited, &aBudget{}),
	} {
		if got := fmt.Sprint(b); got != want {
			t.Errorf("budget is %q, want %q", got, want)
		}
	}
}
