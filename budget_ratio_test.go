package grpcretry

import (
	"flag"
	"math"
	"math/rand/v2"
	"sync"
	"testing"
	"time"
)

var budgetSeeds = flag.Uint64("budgets.seeds", 10, "how many times each random test of ratio budgets draws")

// Most of these tests use their own clock: a budget whose first look is at a time far from the real
// one never reads the real clock.
var epoch = time.Date(2020, 1, 1, 0, 0, 0, 0, time.UTC)

func at(seconds float64) time.Time { return epoch.Add(time.Duration(seconds * float64(time.Second))) }

// ratioBudgetOf returns a budget whose time starts at epoch.
func ratioBudgetOf(t testing.TB, s RatioBudget) *ratioBudget {
	t.Helper()
	b := realRatioBudget(t, s)
	b.Balance(epoch)
	return b
}

// realRatioBudget returns a budget that uses the real clock, or a bubble's.
func realRatioBudget(t testing.TB, s RatioBudget) *ratioBudget {
	t.Helper()
	b, err := NewRatioBudget(s)
	if err != nil {
		t.Fatal(err)
	}
	return b.(*ratioBudget)
}

var (
	success      = Outcome{Attempt: 1, Result: Succeeded}
	aFailure     = Outcome{Attempt: 1, Result: Failed}
	retrySuccess = Outcome{Attempt: 2, Result: Succeeded}
	retryFailure = Outcome{Attempt: 2, Result: Failed}
)

// deposit reports n first attempts that succeeded.
func deposit(b Budget, n int) {
	for range n {
		b.Deposit(success)
	}
}

// withdraw takes retries until b refuses, at most limit, and returns their number.
func withdraw(b Budget, now time.Time, limit int) (n int) {
	for n < limit && b.Withdraw(now) {
		n++
	}
	return n
}

const plenty = 1_000_000

func wantBalance(t *testing.T, b Budget, now time.Time, want float64) {
	t.Helper()
	if got := b.Balance(now); math.Abs(got-want) > 1e-6 {
		t.Errorf("Balance at %v = %v, want %v", now.Sub(epoch), got, want)
	}
}

func wantWithdrawn(t *testing.T, b Budget, now time.Time, want int) {
	t.Helper()
	if got := withdraw(b, now, plenty); got != want {
		t.Errorf("at %v the budget allowed %d retries, want %d", now.Sub(epoch), got, want)
	}
}

// Each zero field means its default, and a zero that somebody wants has a name.
func TestZeroFieldsOfARatioBudget(t *testing.T) {
	for _, tt := range []struct {
		settings RatioBudget
		want     int // retries without a pause, after 1000 answered calls
	}{
		{RatioBudget{}, 203},
		{RatioBudget{Ratio: 0.5}, 503},
		{RatioBudget{Reserve: 10}, 210},
		{RatioBudget{MinPerSecond: 1}, 213},
		{RatioBudget{Window: time.Second}, 203},
		{RatioBudget{Reserve: Nothing}, 200},
		{RatioBudget{Ratio: Nothing, Reserve: 7}, 7},
		{RatioBudget{Ratio: Nothing, Reserve: Nothing, MinPerSecond: 1}, 10},
		{RatioBudget{Ratio: Nothing, Reserve: Nothing, MinPerSecond: Nothing}, 0},
	} {
		b := ratioBudgetOf(t, tt.settings)
		deposit(b, 1000)
		if got := withdraw(b, epoch, plenty); got != tt.want {
			t.Errorf("%+v allowed %d retries, want %d", tt.settings, got, tt.want)
		}
		if got := b.Balance(epoch); got >= 1 || tt.want == 0 && got != 0 {
			t.Errorf("%+v leaves %v", tt.settings, got)
		}
	}
}

// The promise of the budget: with everything failing from the first call on, attempts ≤
// calls + Reserve + MinPerSecond × (seconds + Window), and it is used to the full.
func TestRatioBudgetBoundsAnOutageFromTheFirstCallOn(t *testing.T) {
	for _, s := range []RatioBudget{
		{},
		{Ratio: 1, Reserve: 50},
		{Ratio: 0.2, Reserve: 3, MinPerSecond: 10},
		{Ratio: 0.2, Reserve: Nothing, MinPerSecond: 0.25, Window: 4 * time.Second},
		{Ratio: 0.2, Reserve: 2.5, MinPerSecond: 0.125, Window: time.Minute},
	} {
		b, retries := ratioBudgetOf(t, s), 0
		exact := b.settings
		for i := range 6400 { // 64 calls a second with four attempts each
			seconds := float64(i) / 64
			b.Deposit(aFailure)
			for range 3 {
				if b.Withdraw(at(seconds)) {
					retries++
					b.Deposit(retryFailure)
				}
			}
			limit := exact.Reserve + exact.MinPerSecond*(seconds+exact.Window.Seconds())
			if want := int(limit); i > 100 && retries != want {
				t.Fatalf("%+v: %d retries after %v s of an outage, want %d", s, retries, seconds, want)
			}
		}
	}
}

// Retries stop in an outage and are allowed again after the recovery, and a second outage gets as many
// as the first.
func TestRatioBudgetTreatsOutagesAlike(t *testing.T) {
	b := ratioBudgetOf(t, RatioBudget{})
	i := 0
	pass := func(seconds int, failing bool) (retries int) {
		for end := i + 20*seconds; i < end; i++ { // 20 calls a second
			now := at(float64(i) / 20)
			if !failing {
				b.Deposit(success)
				b.Balance(now)
				continue
			}
			b.Deposit(aFailure)
			for range 3 {
				if b.Withdraw(now) {
					retries++
					b.Deposit(retryFailure)
				}
			}
		}
		return retries
	}
	pass(60, false)
	first := pass(60, true)
	if first < 42 || first > 45 { // 0.2 · 20 · 10 and the reserve, within a step
		t.Errorf("the first outage got %d retries, want 42 to 45", first)
	}
	if more := pass(600, true); more != 0 {
		t.Errorf("ten further minutes of it got %d retries, want none", more)
	}
	pass(60, false)
	if second := pass(60, true); second != first {
		t.Errorf("the second outage got %d retries, the first one %d, want the same", second, first)
	}
}

// Retries that help cost nothing: with a failure rate of 1%, and with one bad replica of
// three, no retry is refused, from the first call on and however low the traffic is.
func TestRatioBudgetRetriesEveryFailureThatARetryMends(t *testing.T) {
	const wait = 50 * time.Millisecond // before a retry
	for _, shape := range []struct {
		name  string
		seeds uint64
		fails func(call int, random *rand.Rand) bool
	}{
		{"1% of attempts fail", max(*budgetSeeds/20, 1), func(_ int, random *rand.Rand) bool { return random.IntN(100) == 0 }},
		{"one bad replica of three", 1, func(call int, _ *rand.Rand) bool { return call%3 == 0 }},
	} {
		for _, gap := range []time.Duration{5 * time.Millisecond, 100 * time.Millisecond, time.Second, time.Minute} {
			for seed := range shape.seeds {
				b, random := ratioBudgetOf(t, RatioBudget{}), rand.New(rand.NewPCG(seed, 5))
				var retries []time.Time // when they end
				for i := range 10_000 {
					now := epoch.Add(time.Duration(i) * gap)
					for len(retries) > 0 && !retries[0].After(now) {
						b.Deposit(retrySuccess)
						retries = retries[1:]
					}
					if !shape.fails(i, random) {
						b.Deposit(success)
						continue
					}
					b.Deposit(aFailure)
					if !b.Withdraw(now) {
						t.Fatalf("%s, seed %d, a call every %v: refused the retry of call %d", shape.name, seed, gap, i+1)
					}
					retries = append(retries, now.Add(wait))
				}
			}
		}
	}
}

// concurrently runs f on n goroutines that start together, and waits for them.
func concurrently(n int, f func()) {
	var wg sync.WaitGroup
	start := make(chan struct{})
	for range n {
		wg.Go(func() { <-start; f() })
	}
	close(start)
	wg.Wait()
}

// What the tokens do with what a Deposit tells them is tested with them, in internal/window.
func TestWhatAnOutcomeEarnsAndReturns(t *testing.T) {
	for _, tt := range []struct {
		outcome Outcome
		want    float64 // tokens more than before
	}{
		{success, 0.25},
		{Outcome{Attempt: 1, Result: Answered}, 0.25},
		{aFailure, 0},
		{Outcome{Attempt: 1, Result: Ignored}, 0},
		{Outcome{Attempt: 1, Result: Unsent}, 0},
		{retrySuccess, 1.25},
		{Outcome{Attempt: 3, Result: Answered}, 0.25},
		{retryFailure, 0},
		{Outcome{Attempt: 2, Result: Ignored}, 0},
		{Outcome{Attempt: 2, Result: Unsent}, 1},
		{Outcome{Attempt: 2, Hedge: true, Result: Succeeded}, 0.25},
		{Outcome{Attempt: 2, Hedge: true, Result: Answered}, 0.25},
		{Outcome{Attempt: 2, Hedge: true, Result: Failed}, 0},
		{Outcome{Attempt: 2, Hedge: true, Result: Unsent}, 1},
	} {
		b := ratioBudgetOf(t, RatioBudget{Ratio: 0.25, Reserve: 10})
		wantWithdrawn(t, b, epoch, 10)
		b.Deposit(tt.outcome)
		if got := b.Balance(epoch); got != tt.want {
			t.Errorf("%+v changes the balance by %v, want %v", tt.outcome, got, tt.want)
		}
	}
}

func TestLateAnswersEarnNothing(t *testing.T) {
	b, err := NewRatioBudget(RatioBudget{Ratio: 1, Reserve: 1})
	if err != nil {
		t.Fatal(err)
	}
	now := time.Now()
	b.Withdraw(now)
	for _, o := range []Outcome{{Attempt: 1, Result: Succeeded, late: true}, {Attempt: 2, Result: Succeeded, late: true},
		{Attempt: 1, Result: Answered, late: true}} {
		b.Deposit(o)
	}
	if got := b.Balance(now); got != 0 {
		t.Errorf("balance after late answers is %v, want 0", got)
	}
}
