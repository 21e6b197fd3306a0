package grpcretry

import (
	"flag"
	"fmt"
	"math"
	"math/rand/v2"
	"strings"
	"sync"
	"sync/atomic"
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

func TestRatioBudgetSettings(t *testing.T) {
	for _, tt := range []struct {
		name     string
		settings RatioBudget
		calls    int
		want     int // retries without a pause
	}{
		{"the zero value has a reserve of 3", RatioBudget{}, 0, 3},
		{"the zero value earns 20%", RatioBudget{}, 1000, 203},
		{"only a ratio: nothing to begin with", RatioBudget{Ratio: 0.5}, 0, 0},
		{"only a ratio: the share", RatioBudget{Ratio: 0.5}, 9, 4},
		{"only a reserve: no share", RatioBudget{Reserve: 7}, 1000, 7},
		{"only a floor: no share, 10 s", RatioBudget{MinPerSecond: 1}, 1000, 10},
		{"only a window: nothing", RatioBudget{Window: time.Second}, 1000, 0},
		{"everything", RatioBudget{Ratio: 0.1, Reserve: 2, MinPerSecond: 3, Window: 4 * time.Second}, 50, 5 + 2 + 12},
		{"a floor below one is none by itself", RatioBudget{MinPerSecond: 0.09}, 0, 0},
		{"parts of reserve, floor and share make one", RatioBudget{Ratio: 0.05, Reserve: 0.5, MinPerSecond: 0.03}, 4, 1},
		{"a ratio above 1", RatioBudget{Ratio: 3}, 5, 15},
		{"five additions of 0.2 make one token", RatioBudget{Ratio: 0.2}, 5, 1},
		{"ten tenths are a whole", RatioBudget{Ratio: 0.1}, 10, 1},
		{"nine tenths are none", RatioBudget{Ratio: 0.1}, 9, 0},
		{"a hundred times 0.29 are 29, not 28.999999999999996", RatioBudget{Ratio: 0.29}, 100, 29},
		{"three thirds are a whole", RatioBudget{Ratio: 1.0 / 3}, 3, 1},
	} {
		t.Run(tt.name, func(t *testing.T) {
			b := ratioBudgetOf(t, tt.settings)
			deposit(b, tt.calls)
			wantWithdrawn(t, b, epoch, tt.want)
		})
	}
}

// Fractions that are added one by one also make a whole.
func TestRatioBudgetAddsFractions(t *testing.T) {
	for _, s := range []RatioBudget{{Ratio: 0.2}, {Ratio: 0.1}, {Ratio: 0.2, Reserve: 1}, {Ratio: 1.0 / 7, Reserve: 0.3}} {
		b := ratioBudgetOf(t, s)
		whole := int(math.Round(1 / s.Ratio))
		withdraw(b, epoch, plenty)
		left := b.Balance(epoch)
		for i := range 50 * whole {
			deposit(b, 1)
			b.Balance(at(float64(i) / 100))
		}
		wantWithdrawn(t, b, at(0.5*float64(whole)), int(50+left+1e-9))
	}
}

func TestRatioBudgetDefaultWindowIsTenSeconds(t *testing.T) {
	for _, s := range []RatioBudget{{}, {Ratio: 0.2}} {
		b := ratioBudgetOf(t, s)
		start := b.Balance(epoch)
		deposit(b, 100)
		wantBalance(t, b, at(0), start+20)
		wantBalance(t, b, at(10.499), start+20)
		wantBalance(t, b, at(10.5), start)
	}
}

func TestNewRatioBudgetRejects(t *testing.T) {
	nan, inf := math.NaN(), math.Inf(1)
	for _, tt := range []struct {
		settings RatioBudget
		want     string
	}{
		{RatioBudget{Ratio: -0.1}, "Ratio is -0.1"},
		{RatioBudget{Ratio: nan}, "Ratio is NaN"},
		{RatioBudget{Ratio: inf}, "Ratio is +Inf"},
		{RatioBudget{Reserve: -3}, "Reserve is -3"},
		{RatioBudget{Reserve: nan}, "Reserve is NaN"},
		{RatioBudget{Reserve: inf}, "Reserve is +Inf"},
		{RatioBudget{MinPerSecond: -1}, "MinPerSecond is -1"},
		{RatioBudget{MinPerSecond: nan}, "MinPerSecond is NaN"},
		{RatioBudget{MinPerSecond: inf}, "MinPerSecond is +Inf"},
		{RatioBudget{MinPerSecond: 1e308}, "MinPerSecond is 1e+308"},
		{RatioBudget{Ratio: 0.2, Window: -time.Second}, "Window is -1s"},
		{RatioBudget{Ratio: 0.2, Window: time.Millisecond - 1}, "Window is 999.999µs"},
	} {
		b, err := NewRatioBudget(tt.settings)
		if err == nil || b != nil || !strings.HasPrefix(err.Error(), "grpcretry: NewRatioBudget: RatioBudget."+tt.want) {
			t.Errorf("NewRatioBudget(%+v) = %v, %v, want an error with %q", tt.settings, b, err, tt.want)
		}
		_, err = New(WithRatioBudget(tt.settings))
		if err == nil || !strings.HasPrefix(err.Error(), "grpcretry: WithRatioBudget: RatioBudget."+tt.want) {
			t.Errorf("New(WithRatioBudget(%+v)): %v, want an error with %q", tt.settings, err, tt.want)
		}
	}
	if _, err := NewRatioBudget(RatioBudget{Ratio: 0.2, Window: time.Millisecond}); err != nil {
		t.Errorf("NewRatioBudget with a window of 1 ms: %v", err)
	}
}

// Every answered attempt earns retries, whichever attempt of its call it is.
func TestRatioBudgetIsEarnedByAnsweredCalls(t *testing.T) {
	for _, attempt := range []int{0, 1, 2, 7} {
		for result, want := range map[Result]float64{Succeeded: 1, Answered: 1, Failed: 0, Ignored: 0, -1: 0, 4: 0} {
			b := ratioBudgetOf(t, RatioBudget{Ratio: 1})
			b.Deposit(Outcome{Attempt: attempt, Result: result})
			if got := b.Balance(epoch); got != want {
				t.Errorf("attempt %d %v earns %v, want %v", attempt, result, got, want)
			}
		}
	}
}

func TestRatioBudgetFillsTheReserveFirst(t *testing.T) {
	b := ratioBudgetOf(t, RatioBudget{Ratio: 0.5, Reserve: 3})
	wantWithdrawn(t, b, at(0), 3)
	wantBalance(t, b, at(3600), 0) // not refilled by time
	deposit(b, 4)
	wantBalance(t, b, at(3600), 2)
	deposit(b, 10)
	wantBalance(t, b, at(3601), 7)
	wantBalance(t, b, at(3700), 3) // what the window held is gone, the reserve is not
	wantBalance(t, b, at(1e6), 3)
	wantWithdrawn(t, b, at(1e6), 3)
}

// A retry takes the earnings that expire first, then the floor, then the reserve.
func TestRatioBudgetTakesWhatExpiresFirst(t *testing.T) {
	b := ratioBudgetOf(t, RatioBudget{Ratio: 1, Reserve: 2, MinPerSecond: 0.125, Window: 20 * time.Second}) // steps of 1 s, a floor of 2.5
	deposit(b, 2)
	wantBalance(t, b, at(0), 6.5)
	b.Balance(at(5))
	deposit(b, 2)
	wantBalance(t, b, at(5), 8.5)
	if got := withdraw(b, at(5), 1); got != 1 { // of the earnings of 0 s
		t.Fatal("refused")
	}
	wantBalance(t, b, at(5), 7.5)
	wantBalance(t, b, at(21), 6.5) // the other one of 0 s has expired
	if got := withdraw(b, at(21), 3); got != 3 {
		t.Fatal("refused")
	}
	wantBalance(t, b, at(21), 3.5)
	wantBalance(t, b, at(25), 4) // one of the three was the floor's, and half of it is back
	wantBalance(t, b, at(29), 4.5)
	wantBalance(t, b, at(100), 4.5)
	wantWithdrawn(t, b, at(100), 4) // 2.5 of the floor, 1.5 of the reserve
	wantBalance(t, b, at(104), 1)
	wantBalance(t, b, at(200), 3) // the floor is full, half a token is left of the reserve
	wantWithdrawn(t, b, at(200), 3)
	wantBalance(t, b, at(300), 2.5)
}

func TestRatioBudgetFloorRefills(t *testing.T) {
	b := ratioBudgetOf(t, RatioBudget{MinPerSecond: 1, Window: 20 * time.Second})
	wantWithdrawn(t, b, at(0), 20)
	wantBalance(t, b, at(0.5), 0.5)
	wantWithdrawn(t, b, at(0.5), 0)
	wantWithdrawn(t, b, at(7.25), 7)
	wantBalance(t, b, at(10), 3)
	wantBalance(t, b, at(1000), 20)
	wantWithdrawn(t, b, at(1000), 20)
}

func TestRatioBudgetEarningsAgeOut(t *testing.T) {
	b := ratioBudgetOf(t, RatioBudget{Ratio: 1, Window: 20 * time.Second}) // steps of 1 s
	deposit(b, 100)
	wantBalance(t, b, at(0), 100)
	wantBalance(t, b, at(5), 100)
	deposit(b, 10)
	wantBalance(t, b, at(5), 110) // since the last look no time has passed
	wantBalance(t, b, at(20.999), 110)
	wantBalance(t, b, at(21), 10)
	wantBalance(t, b, at(25.999), 10)
	wantBalance(t, b, at(26), 0)
	wantBalance(t, b, at(1e6), 0)
}

// A call pays for a retry once: its token does not return when the retry was long ago.
func TestRatioBudgetSpendsEarningsOnce(t *testing.T) {
	b := ratioBudgetOf(t, RatioBudget{Ratio: 1, Window: 20 * time.Second})
	deposit(b, 10)
	b.Balance(at(0))
	wantWithdrawn(t, b, at(10), 10)
	for s := 10.0; s < 80; s += 0.25 {
		wantWithdrawn(t, b, at(s), 0)
	}
}

func TestRatioBudgetReturnsTokensImmediately(t *testing.T) {
	for _, tt := range []struct {
		name    string
		outcome *Outcome // nil: a refund
		want    float64  // tokens returned, in addition to the ratio of 0.25
	}{
		{"refund", nil, 1},
		{"a retry that succeeds", &Outcome{Attempt: 2, Result: Succeeded}, 1.25},
		{"a fourth attempt that succeeds", &Outcome{Attempt: 4, Result: Succeeded}, 1.25},
		{"a first attempt that succeeds", &Outcome{Attempt: 1, Result: Succeeded}, 0.25},
		{"a hedge that succeeds", &Outcome{Attempt: 2, Hedge: true, Result: Succeeded}, 0.25},
		{"a retry that is answered", &Outcome{Attempt: 2, Result: Answered}, 0.25},
		{"a retry that fails", &Outcome{Attempt: 2, Result: Failed}, 0},
		{"a retry that is ignored", &Outcome{Attempt: 2, Result: Ignored}, 0},
	} {
		for _, later := range []float64{0, 0.001, 0.1, 4, 9.9} {
			for name, s := range map[string]RatioBudget{
				"reserve": {Ratio: 0.25, Reserve: 4},
				"share":   {Ratio: 0.25},
			} {
				b := ratioBudgetOf(t, s)
				deposit(b, 16)
				b.Balance(at(0))
				withdraw(b, at(0), plenty)
				wantBalance(t, b, at(later), 0)
				if tt.outcome == nil {
					b.Refund()
				} else {
					b.Deposit(*tt.outcome)
				}
				if got := b.Balance(at(later)); got != tt.want {
					t.Errorf("%s, of the %s: Balance after %v s = %v, want %v", tt.name, name, later, got, tt.want)
				}
				if got := b.Withdraw(at(later)); got != (tt.want >= 1) {
					t.Errorf("%s, of the %s: Withdraw after %v s = %t, want %t", tt.name, name, later, got, tt.want >= 1)
				}
			}
		}
	}
}

// A returned token expires as if it had never been spent.
func TestRatioBudgetReturnedTokensKeepTheirAge(t *testing.T) {
	b := ratioBudgetOf(t, RatioBudget{Ratio: 1, Window: 20 * time.Second}) // steps of 1 s
	deposit(b, 2)
	b.Balance(at(0))
	b.Balance(at(5))
	deposit(b, 2)
	wantWithdrawn(t, b, at(5), 4)
	for range 3 { // two of 5 s, one of 0 s
		b.Refund()
	}
	wantBalance(t, b, at(20.999), 3)
	wantBalance(t, b, at(21), 2)
	wantWithdrawn(t, b, at(25), 2)
	b.Refund()
	wantBalance(t, b, at(25.999), 1)
	wantBalance(t, b, at(26), 0)
	b.Refund() // of a retry whose earnings are gone
	wantBalance(t, b, at(26), 0)
}

func TestRatioBudgetReturnedTokensFillTheReserveThenTheFloor(t *testing.T) {
	b := ratioBudgetOf(t, RatioBudget{Ratio: 1, Reserve: 1, MinPerSecond: 0.125, Window: 8 * time.Second})
	deposit(b, 1)
	wantWithdrawn(t, b, at(0), 3)
	b.Refund()
	wantBalance(t, b, at(0), 1)
	wantBalance(t, b, at(7), 1.875) // so it is not in the floor, which keeps filling
	b.Refund()
	wantBalance(t, b, at(7), 2.875) // an eighth fills the floor, the rest is the call's
	wantBalance(t, b, at(7.999), 2.875)
	wantBalance(t, b, at(8.4), 2)
}

// More refunds than retries add nothing.
func TestRatioBudgetNeverHoldsMoreThanItsLimits(t *testing.T) {
	b := ratioBudgetOf(t, RatioBudget{Ratio: 1, Reserve: 3, MinPerSecond: 0.25, Window: 8 * time.Second})
	deposit(b, 4)
	for range 5 {
		b.Refund()
		b.Deposit(Outcome{Attempt: 2, Result: Failed})
	}
	wantBalance(t, b, at(0), 9)
	wantWithdrawn(t, b, at(0), 9)
	for range 20 {
		b.Refund()
	}
	wantBalance(t, b, at(0), 9)
	wantWithdrawn(t, b, at(0), 9)
	wantBalance(t, b, at(100), 2)
	for range 20 {
		b.Refund()
	}
	wantBalance(t, b, at(100), 5)
	wantBalance(t, b, at(1000), 5)
}

// Without a floor, a retry that is refunded has changed nothing at all.
func TestRatioBudgetRefundUndoesAWithdrawal(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 2))
	for range 50 {
		b := ratioBudgetOf(t, RatioBudget{Ratio: 0.25, Reserve: float64(random.IntN(12)) / 4})
		for s := range 30 {
			now := at(float64(s) / 2)
			deposit(b, random.IntN(6))
			withdraw(b, now, random.IntN(3))
			b.Balance(now)
			before := snapshot(b)
			if b.Withdraw(now) {
				b.Refund()
				b.Balance(now)
			}
			if after := snapshot(b); after != before {
				t.Fatalf("a refunded retry turned\n%v into\n%v", before, after)
			}
		}
	}
}

// snapshot is all the state that decides about retries.
func snapshot(b *ratioBudget) string {
	return fmt.Sprint(b.reserve, b.floor, b.steps, b.earned, b.spent)
}

// The promise of the budget: with everything failing from the first call on, attempts ≤
// calls + Reserve + MinPerSecond × (seconds + Window), and it is used to the full.
func TestRatioBudgetBoundsAnOutageFromTheFirstCallOn(t *testing.T) {
	for _, s := range []RatioBudget{
		{},
		{Ratio: 1, Reserve: 50},
		{Ratio: 0.2, Reserve: 3, MinPerSecond: 10},
		{Ratio: 0.2, MinPerSecond: 0.25, Window: 4 * time.Second},
		{Ratio: 0.2, Reserve: 2.5, MinPerSecond: 0.125, Window: time.Minute},
	} {
		b, retries := ratioBudgetOf(t, s), 0
		defaulted := s.withDefaults()
		for i := range 6400 { // 64 calls a second with four attempts each
			seconds := float64(i) / 64
			b.Deposit(aFailure)
			for range 3 {
				if b.Withdraw(at(seconds)) {
					retries++
					b.Deposit(retryFailure)
				}
			}
			limit := defaulted.Reserve + defaulted.MinPerSecond*(seconds+defaulted.Window.Seconds())
			if want := int(limit); i > 100 && retries != want {
				t.Fatalf("%+v: %d retries after %v s of an outage, want %d", s, retries, seconds, want)
			}
		}
	}
}

// An exactBudget follows the rules in NewRatioBudget's comment, step by step, for a caller that looks
// after each operation.
type exactBudget struct {
	RatioBudget
	now            time.Time
	reserve, floor float64
	earned, spent  map[int64]float64 // by step
}

func newExactBudget(s RatioBudget) *exactBudget {
	return &exactBudget{s, epoch, s.Reserve, s.fullFloor(), map[int64]float64{}, map[int64]float64{}}
}

func (m *exactBudget) number() int64 { return int64(m.now.Sub(epoch) / (m.Window / 20)) }

func (m *exactBudget) pass(now time.Time) {
	if !now.After(m.now) {
		return
	}
	m.floor = min(m.fullFloor(), m.floor+m.MinPerSecond*now.Sub(m.now).Seconds())
	m.now = now
	for n := range m.earned {
		if n < m.number()-20 {
			delete(m.earned, n)
			delete(m.spent, n)
		}
	}
}

func (m *exactBudget) balance() float64 {
	sum := m.reserve + m.floor
	for n := range m.earned {
		sum += m.earned[n] - m.spent[n]
	}
	return sum
}

func (m *exactBudget) earn(ratio float64) {
	fill := min(ratio, m.Reserve-m.reserve)
	m.reserve += fill
	m.earned[m.number()] += ratio - fill
}

func (m *exactBudget) withdraw() bool {
	if m.balance() < 1 {
		return false
	}
	rest := 1.0
	for n := m.number() - 20; n <= m.number(); n++ {
		part := min(rest, m.earned[n]-m.spent[n])
		m.spent[n] += part
		rest -= part
	}
	part := min(rest, m.floor)
	m.floor -= part
	m.reserve -= rest - part
	return true
}

func (m *exactBudget) giveBack() {
	rest := 1.0
	part := min(rest, m.Reserve-m.reserve)
	m.reserve += part
	rest -= part
	part = min(rest, m.fullFloor()-m.floor)
	m.floor += part
	rest -= part
	for n := m.number(); n >= m.number()-20; n-- {
		part = min(rest, m.spent[n])
		m.spent[n] -= part
		rest -= part
	}
}

// Random traffic with bursts, quiet periods, refunds, retries that succeed and a clock that
// goes back: the budget follows the rules exactly, and the bound holds for every
// span. Settings and times are multiples of a 64th, so that nothing is rounded.
func TestRatioBudgetFollowsTheRuleExactly(t *testing.T) {
	t.Parallel()
	for seed := range max(*budgetSeeds/2, 1) {
		random := rand.New(rand.NewPCG(seed, 11))
		s := RatioBudget{
			Ratio:        float64(random.IntN(80)) / 64,
			Reserve:      float64(random.IntN(40)) / 8,
			MinPerSecond: float64(random.IntN(3)*random.IntN(8)) / 4,
			Window:       []time.Duration{5 * time.Second, 10 * time.Second, 40 * time.Second}[random.IntN(3)],
		}
		b, exact := ratioBudgetOf(t, s), newExactBudget(s)
		now, waiting := epoch, 0 // retries decided on that have not ended
		var log []ratioEvent
		for i := range 1500 {
			now = now.Add(randomGap(random))
			exact.pass(now)
			e := ratioEvent{at: exact.now, balance: b.Balance(now)}
			switch random.IntN(6) {
			case 0, 1:
				for range 1 + random.IntN(1+random.IntN(60)) {
					b.Deposit([]Outcome{success, {Attempt: 1, Result: Answered},
						{Attempt: 3, Hedge: true, Result: Succeeded}}[random.IntN(3)])
					b.Balance(now)
					exact.earn(s.Ratio)
					e.earned += s.Ratio
				}
			case 2, 3:
				for range 1 + random.IntN(8) {
					got, want := b.Withdraw(now), exact.withdraw()
					if got != want {
						t.Fatalf("seed %d, %+v, operation %d: Withdraw = %t, want %t", seed, s, i, got, want)
					}
					if got {
						waiting++
						e.taken++
					}
				}
			case 4:
				for ; waiting > 0 && random.IntN(3) > 0; waiting-- {
					exact.giveBack()
					e.taken--
					if random.IntN(2) == 0 {
						b.Refund()
					} else {
						b.Deposit(retrySuccess)
						exact.earn(s.Ratio)
						e.earned += s.Ratio
					}
					b.Balance(now)
				}
			case 5:
				b.Deposit([]Outcome{aFailure, retryFailure, {Attempt: 1, Result: Ignored}}[random.IntN(3)])
				waiting = max(0, waiting-random.IntN(4))
			}
			if got, want := b.Balance(now), exact.balance(); got != want {
				t.Fatalf("seed %d, %+v, operation %d: Balance = %v, want %v", seed, s, i, got, want)
			}
			log = append(log, e)
		}
		wantBounded(t, s, log)
	}
}

// randomGap is the time between two operations, in 64ths of a second.
func randomGap(random *rand.Rand) time.Duration {
	const tick = time.Second / 64
	switch n := random.IntN(100); {
	case n < 50:
		return 0
	case n < 90:
		return tick * time.Duration(random.IntN(20))
	case n < 95:
		return tick * time.Duration(random.IntN(64*60))
	case n < 96:
		return time.Hour
	default:
		return -tick * time.Duration(random.IntN(64*30))
	}
}

// A ratioEvent describes one moment of random traffic.
type ratioEvent struct {
	at      time.Time
	balance float64 // before it
	earned  float64
	taken   int // less what was returned
}

// wantBounded checks the bound for every span of events. It may begin with the reserve, a
// full floor, and the earnings of the window and a step before it.
func wantBounded(t *testing.T, s RatioBudget, log []ratioEvent) {
	t.Helper()
	for first := 0; first < len(log); first += 23 {
		start := log[first].at
		limit := s.Reserve + s.fullFloor()
		for i := first - 1; i >= 0 && start.Sub(log[i].at) <= s.Window+s.Window/20; i-- {
			limit += log[i].earned
		}
		if log[first].balance > limit+1e-9 {
			t.Fatalf("%+v: Balance at %v = %v, want at most %v", s, start.Sub(epoch), log[first].balance, limit)
		}
		limit, taken := log[first].balance, 0
		for _, e := range log[first:] {
			taken += e.taken
			limit += e.earned
			if most := limit + s.MinPerSecond*e.at.Sub(start).Seconds(); float64(taken) > most+1e-9 {
				t.Fatalf("%+v: %d retries from %v to %v, want at most %v", s, taken, start.Sub(epoch), e.at.Sub(epoch), most)
			}
		}
	}
}

// The same bound for callers that look whenever they like, with any settings.
func TestRatioBudgetNeverGrantsMoreThanWasEarned(t *testing.T) {
	t.Parallel()
	for seed := range *budgetSeeds {
		random := rand.New(rand.NewPCG(seed, 13))
		s := RatioBudget{
			Ratio:        random.Float64() * 2,
			Reserve:      random.Float64() * 5,
			MinPerSecond: float64(random.IntN(2)) * random.Float64() * 3,
			Window:       time.Millisecond + time.Duration(random.Int64N(int64(20*time.Second))),
		}
		b, now, latest := ratioBudgetOf(t, s), epoch, epoch
		earned, taken := 0.0, 0
		for range 3000 {
			now = now.Add(randomGap(random))
			if now.After(latest) {
				latest = now
			}
			switch random.IntN(4) {
			case 0:
				calls := random.IntN(1 + random.IntN(50))
				deposit(b, calls)
				earned += float64(calls) * s.Ratio
			case 1:
				if taken > 0 && random.IntN(2) == 0 {
					b.Refund()
					taken--
				}
			case 2:
				taken += withdraw(b, now, random.IntN(30))
			case 3:
				b.Balance(now)
			}
			limit := earned + s.Reserve + s.MinPerSecond*(latest.Sub(epoch)+s.Window).Seconds()
			if float64(taken) > limit+1e-6 {
				t.Fatalf("seed %d, %+v: %d retries until %v, want at most %v", seed, s, taken, latest.Sub(epoch), limit)
			}
		}
	}
}

func TestRatioBudgetGrantsNoMoreThanWasEarnedToManyGoroutines(t *testing.T) {
	const goroutines, rounds = 32, 300
	b := realRatioBudget(t, RatioBudget{Ratio: 0.25, Window: time.Hour}) // with a reserve, see the next test
	var answered, taken atomic.Int64
	concurrently(goroutines, func() {
		for i := range rounds {
			answered.Add(1)
			b.Deposit(success)
			if !b.Withdraw(time.Now()) {
				continue
			}
			switch taken.Add(1); i % 3 {
			case 0:
				b.Refund()
				taken.Add(-1)
			case 1:
				answered.Add(1)
				b.Deposit(retrySuccess)
				taken.Add(-1)
			}
		}
	})
	// Nothing has expired, so what was not taken is left: no token was lost, none made.
	want := float64(answered.Load())/4 - float64(taken.Load())
	if got := b.Balance(time.Now()); math.Abs(got-want) > 1e-6 {
		t.Errorf("%d answered calls and %d retries leave a balance of %v, want %v", answered.Load(), taken.Load(), got, want)
	}
}

// A token that is returned when everything is full is dropped, because the calls answered in the
// meantime have replaced it.
func TestATokenThatComesBackToAFullReserve(t *testing.T) {
	b := realRatioBudget(t, RatioBudget{Ratio: 0.5, Reserve: 2})
	now := time.Now()
	b.Withdraw(now)
	deposit(b, 2)
	wantBalance(t, b, now, 2)
	for range 2 {
		b.Refund()
		if got := b.Balance(now); got != 2 {
			t.Errorf("balance is %v, want the reserve of 2", got)
		}
	}
}

func TestRatioBudgetGrantsExactlyItsBalance(t *testing.T) {
	const goroutines, each, calls = 64, 50, 2000
	b := ratioBudgetOf(t, RatioBudget{Ratio: 0.25, Reserve: 40, MinPerSecond: 6})
	deposit(b, calls)
	granted := make(chan int, goroutines)
	concurrently(goroutines, func() { granted <- withdraw(b, epoch, each) })
	total := 0
	for range goroutines {
		total += <-granted
	}
	if want := calls/4 + 40 + 60; total != want {
		t.Errorf("%d goroutines were granted %d retries, want %d", goroutines, total, want)
	}
}

func TestRatioBudgetLosesNoDeposit(t *testing.T) {
	const goroutines, each = 64, 500
	b := ratioBudgetOf(t, RatioBudget{Ratio: 1})
	concurrently(goroutines, func() {
		for i := range each {
			deposit(b, 1)
			if i%50 == 0 {
				b.Balance(epoch)
			}
		}
	})
	wantBalance(t, b, epoch, goroutines*each)
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

func TestRatioBudgetForgetsAnHourOfGoodTraffic(t *testing.T) {
	for _, looks := range []bool{true, false} {
		b := ratioBudgetOf(t, RatioBudget{Ratio: 0.2, Reserve: 3})
		for i := range 36_000 { // 10 a second
			deposit(b, 1)
			if looks {
				b.Balance(at(float64(i) / 10))
			}
		}
		// 0.2 · 10 · 10 + 3, and at most a step of a twentieth more; the call at the very edge
		// may count as just before it.
		if got := withdraw(b, at(3600), plenty); got < 22 || got > 24 {
			t.Errorf("looks: %t: after an hour at 10 calls a second the budget allowed %d retries, want 22 to 24", looks, got)
		}
	}
}

// slidingWindow holds the times of calls, to count those that are in the window.
type slidingWindow []time.Time

func (w slidingWindow) within(from, to time.Time) (n int) { // from < t ≤ to
	for _, t := range w {
		if t.After(from) && !t.After(to) {
			n++
		}
	}
	return n
}

// wantWithin checks a balance of b against the documented error: Ratio × (the calls of three
// steps + unseen). The three steps are those around the far edge of the window.
func (w slidingWindow) wantWithin(t *testing.T, b *ratioBudget, now time.Time, unseen int) {
	t.Helper()
	s := b.settings
	edge, step := now.Add(-s.Window), s.Window/20
	want := s.Reserve + s.Ratio*float64(w.within(edge, now))
	limit := s.Ratio*float64(w.within(edge.Add(-2*step), edge.Add(step))+unseen) + 1e-6
	if got := b.Balance(now); math.Abs(got-want) > limit {
		t.Fatalf("Balance at %v = %v, want %v, give or take %v", now, got, want, limit)
	}
}

// A caller with its own clock looks once per step.
func TestRatioBudgetIsCloseToAnExactWindow(t *testing.T) {
	t.Parallel()
	for seed := range max(*budgetSeeds/5, 1) {
		random := rand.New(rand.NewPCG(seed, 11))
		b, calls, now := ratioBudgetOf(t, RatioBudget{Ratio: 0.3, Reserve: 2, Window: 2 * time.Second}), slidingWindow{}, epoch
		for range 300 {
			look := now.Add(time.Duration(random.Int64N(int64(100*time.Millisecond)) + 1))
			for range random.IntN(30) {
				deposit(b, 1)
				calls = append(calls, now.Add(time.Duration(random.Int64N(int64(look.Sub(now)))+1)))
			}
			now = look
			calls.wantWithin(t, b, now, 0)
		}
	}
}

// With the real clock the caller need not look, because the deposits do, whatever the
// traffic and on however many goroutines.
func TestRatioBudgetIsCloseToAnExactWindowWithoutLooks(t *testing.T) {
	for seed := range max(*budgetSeeds/5, 1) {
		bubble(t, func(t *testing.T) {
			random := rand.New(rand.NewPCG(seed, 17))
			b := realRatioBudget(t, RatioBudget{Ratio: 0.3, Reserve: 2, Window: 2 * time.Second})
			var calls slidingWindow
			for range 200 {
				switch random.IntN(20) {
				case 0:
					time.Sleep(time.Duration(random.Int64N(int64(time.Hour))))
				case 1:
					time.Sleep(time.Duration(random.Int64N(int64(3 * time.Second))))
				default:
					time.Sleep(time.Duration(random.Int64N(int64(50 * time.Millisecond))))
				}
				burst := random.IntN(1 + random.IntN(300))
				var group sync.WaitGroup
				for range random.IntN(20) + 1 {
					for range burst / 20 {
						calls = append(calls, time.Now())
					}
					group.Go(func() { deposit(b, burst/20) })
				}
				group.Wait()
				if random.IntN(10) == 0 {
					calls.wantWithin(t, b, time.Now(), maxUnseen)
				}
			}
		})
	}
}

// After a quiet hour without any look, the calls made since then count.
func TestRatioBudgetCountsCallsAfterAQuietHour(t *testing.T) {
	for _, goroutines := range []int{1, 10, 100} {
		for _, before := range []int{0, 3000} {
			t.Run(fmt.Sprintf("%d goroutines, %d calls before", goroutines, before), func(t *testing.T) {
				bubble(t, func(t *testing.T) {
					b := realRatioBudget(t, RatioBudget{})
					deposit(b, before)
					time.Sleep(time.Hour)
					var group sync.WaitGroup
					for range goroutines { // 10,000 calls in 10 s
						group.Go(func() {
							for range 10_000 / goroutines {
								time.Sleep(time.Millisecond * time.Duration(goroutines))
								b.Deposit(success)
							}
						})
					}
					group.Wait()
					const documented = 0.2 * (3*500 + maxUnseen)
					if got := b.Balance(time.Now()); math.Abs(got-2003) > documented {
						t.Errorf("Balance = %v, want 2003, give or take %v", got, documented)
					}
				})
			})
		}
	}
}

// Calls since the last look do not count as recent after a quiet minute.
func TestRatioBudgetForgetsCallsInAQuietMinute(t *testing.T) {
	bubble(t, func(t *testing.T) {
		b := realRatioBudget(t, RatioBudget{Ratio: 1})
		deposit(b, 100_000) // at one moment
		time.Sleep(time.Minute)
		if got := b.Balance(time.Now()); got > maxUnseen {
			t.Errorf("after a quiet minute the balance is %v, want at most %d", got, maxUnseen)
		}
	})
}

// A caller with its own clock gets the same, however much real time passes.
func TestRatioBudgetWithACallersClockIgnoresTheRealOne(t *testing.T) {
	for _, early := range []int{0, 100_000} { // calls before the first look
		b := realRatioBudget(t, RatioBudget{Ratio: 1, Reserve: 2, Window: time.Millisecond})
		deposit(b, early)
		if got, want := b.Balance(epoch), float64(early+2); got != want {
			t.Errorf("%d calls before the first look: Balance = %v, want %v", early, got, want)
		}
		for begin := time.Now(); time.Since(begin) < 5*time.Millisecond; {
			deposit(b, 100) // for several windows of real time
			early += 100
		}
		if got, want := b.Balance(epoch), float64(early+2); got != want {
			t.Errorf("%d calls in no time: Balance = %v, want %v", early, got, want)
		}
	}
}

func TestRatioBudgetOfOutsideABubbleWorksWithin(t *testing.T) {
	b := realRatioBudget(t, RatioBudget{})
	deposit(b, 1000)
	bubble(t, func(t *testing.T) {
		for range 400 {
			time.Sleep(50 * time.Millisecond)
			deposit(b, 20)
		}
		// 4000 calls in the last 10 s, and up to a step more.
		if got := b.Balance(time.Now()); got < 803 || got > 843 {
			t.Errorf("Balance = %v, want 803 to 843", got)
		}
		withdraw(b, time.Now(), plenty)
		time.Sleep(11 * time.Second)
		deposit(b, 1)
		if got := b.Balance(time.Now()); got < 0.2 || got >= 1.2 {
			t.Errorf("Balance = %v after the budget was used up and one call was answered", got)
		}
	})
	deposit(b, 10) // and outside again
	if got := b.Balance(time.Now()); got < 2.2 || got >= 3.2 {
		t.Errorf("Balance = %v after ten more answered calls, want 2 more", got)
	}
}

// A budget works the same whether it was created before or after the first time passed to it.
func TestRatioBudgetTakesAnyClock(t *testing.T) {
	for _, start := range []time.Time{epoch, time.Now(), time.Now().Add(time.Hour), time.Date(2200, 1, 1, 0, 0, 0, 0, time.UTC)} {
		b := realRatioBudget(t, RatioBudget{Ratio: 1, Reserve: 10})
		wantWithdrawn(t, b, start, 10)
		deposit(b, 15)
		wantWithdrawn(t, b, start, 15)
		deposit(b, 25)
		wantBalance(t, b, start.Add(9*time.Second), 25)
		wantBalance(t, b, start.Add(time.Minute), 10)
	}
}

// If the time goes back, the budget stands still, and counts no time twice.
func TestRatioBudgetSurvivesAClockThatGoesBack(t *testing.T) {
	b := ratioBudgetOf(t, RatioBudget{Ratio: 0.5, MinPerSecond: 1})
	b.Balance(at(100))
	deposit(b, 10)
	wantWithdrawn(t, b, at(100), 15)
	for _, s := range []float64{99, 90, 50, 0, -1000} {
		wantWithdrawn(t, b, at(s), 0)
		deposit(b, 2)
		wantWithdrawn(t, b, at(s), 1)
	}
	wantBalance(t, b, at(100), 0)
	wantBalance(t, b, at(105), 5)
	wantBalance(t, b, at(200), 10)
}

// Calls between two looks count for the part of that time that is in the window, exactly,
// also if the looks are further apart than the window or in the middle of steps.
func TestRatioBudgetSpreadsCallsBetweenLooks(t *testing.T) {
	for _, tt := range []struct {
		name        string
		reserve     float64 // empty at the first look
		first, then float64 // looks; the calls come between them
		calls       int
		at          float64
		want        float64
	}{
		{"within the window", 0, 0, 4, 300, 4, 300},
		{"one and a half windows", 0, 0, 15, 300, 15, 200},
		{"four windows", 0, 0, 40, 400, 40, 100},
		{"the first half fills the reserve", 200, 0, 40, 400, 40, 200 + 100},
		{"the first half fills the reserve, the rest ages", 200, 0, 40, 400, 45.5, 200 + 45},
		{"the reserve takes all", 500, 0, 40, 400, 100, 400},
		{"across a step, which then leaves", 0, 0.4, 0.6, 100, 10.5, 50},
	} {
		t.Run(tt.name, func(t *testing.T) {
			b := ratioBudgetOf(t, RatioBudget{Ratio: 1, Reserve: tt.reserve})
			withdraw(b, at(0), plenty)
			b.Balance(at(tt.first))
			deposit(b, tt.calls)
			b.Balance(at(tt.then))
			wantBalance(t, b, at(tt.at), tt.want)
		})
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

func TestRatioBudgetAllocatesNothing(t *testing.T) {
	for name, b := range map[string]*ratioBudget{
		"a clock of its own": ratioBudgetOf(t, RatioBudget{Ratio: 1}),
		"the real clock":     realRatioBudget(t, RatioBudget{Ratio: 1, Window: time.Millisecond}),
	} {
		now := epoch
		if name == "the real clock" {
			now = time.Now()
		}
		for operation, f := range map[string]func(){
			"Deposit":            func() { b.Deposit(success) },
			"Deposit, a retry's": func() { b.Deposit(retrySuccess) },
			"Withdraw":           func() { now = now.Add(77 * time.Millisecond); b.Withdraw(now) },
			"Refund":             b.Refund,
			"Balance":            func() { b.Balance(now) },
		} {
			if n := testing.AllocsPerRun(1000, f); n != 0 {
				t.Errorf("%s: %s makes %v allocations, want none", name, operation, n)
			}
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
	for _, o := range []Outcome{{Attempt: 1, Result: Succeeded, Late: true}, {Attempt: 2, Result: Succeeded, Late: true},
		{Attempt: 1, Result: Answered, Late: true}} {
		b.Deposit(o)
	}
	if got := b.Balance(now); got != 0 {
		t.Errorf("balance after late answers is %v, want 0", got)
	}
}
