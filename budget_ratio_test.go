package grpcretry

import (
	"cmp"
	"flag"
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

// literal returns settings in which zeros are zeros, not defaults.
func literal(s RatioBudget) RatioBudget {
	s.Ratio, s.Reserve = cmp.Or(s.Ratio, Nothing), cmp.Or(s.Reserve, Nothing)
	return s
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
		b, exact := ratioBudgetOf(t, literal(s)), newExactBudget(s)
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
						b.Deposit(returned)
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

func TestRatioBudgetGrantsNoMoreThanWasEarnedToManyGoroutines(t *testing.T) {
	const goroutines, rounds = 32, 300
	b := realRatioBudget(t, RatioBudget{Ratio: 0.25, Reserve: Nothing, Window: time.Hour}) // with a reserve, see the next test
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
				b.Deposit(returned)
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

// If the time goes back, the budget stands still, and counts no time twice.
func TestRatioBudgetSurvivesAClockThatGoesBack(t *testing.T) {
	b := ratioBudgetOf(t, RatioBudget{Ratio: 0.5, Reserve: Nothing, MinPerSecond: 1})
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
