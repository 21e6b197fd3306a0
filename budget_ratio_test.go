package grpcretry

import (
	"fmt"
	"math"
	"math/rand/v2"
	"strings"
	"sync"
	"testing"
	"time"
)

// These tests say themselves what time it is: a budget is told, it does not look.
// Times before the budget was made are fine, as long as the first look is one.
var epoch = time.Date(2020, 1, 1, 0, 0, 0, 0, time.UTC)

func at(seconds float64) time.Time { return epoch.Add(time.Duration(seconds * float64(time.Second))) }

// ratioBudgetOf makes a budget whose time begins at epoch.
func ratioBudgetOf(t testing.TB, s RatioBudget) *ratioBudget {
	t.Helper()
	b, err := NewRatioBudget(s)
	if err != nil {
		t.Fatal(err)
	}
	b.Balance(epoch)
	return b.(*ratioBudget)
}

// deposit tells b of n first attempts.
func deposit(b Budget, n int) {
	for range n {
		b.Deposit(Outcome{Attempt: 1, Result: Succeeded})
	}
}

// withdraw takes retries until b refuses, at most limit, and returns how many.
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
		want     int // retries at once
	}{
		{"the zero value is 20 % and 10 a second over 10 s: the floor", RatioBudget{}, 0, 100},
		{"the zero value is 20 % and 10 a second over 10 s: the share", RatioBudget{}, 1000, 300},
		{"only a ratio: no floor", RatioBudget{Ratio: 0.5}, 0, 0},
		{"only a ratio: the share", RatioBudget{Ratio: 0.5}, 9, 4},
		{"only a floor: no share, 10 s", RatioBudget{MinPerSecond: 1}, 1000, 10},
		{"only a window: neither share nor floor", RatioBudget{Window: time.Second}, 1000, 0},
		{"ratio and floor with a window", RatioBudget{Ratio: 0.1, MinPerSecond: 3, Window: 4 * time.Second}, 50, 12 + 5},
		{"a floor below one in a window is none", RatioBudget{MinPerSecond: 0.09}, 0, 0},
		{"a floor of one in a window", RatioBudget{MinPerSecond: 0.1}, 0, 1},
		{"a ratio above 1", RatioBudget{Ratio: 3}, 5, 15},
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

func TestRatioBudgetDefaultWindowIsTenSeconds(t *testing.T) {
	for _, s := range []RatioBudget{{}, {Ratio: 0.2}} {
		b := ratioBudgetOf(t, s)
		floor := b.Balance(epoch)
		deposit(b, 100)
		wantBalance(t, b, at(0), floor+20)
		wantBalance(t, b, at(9.99), floor+20)
		wantBalance(t, b, at(10.51), floor)
	}
}

// Calls count for the time between two looks, not for any time before the first of them,
// also where a goroutine looks with a time that it has read before another's.
func TestRatioBudgetSpreadsCallsSinceTheLastLook(t *testing.T) {
	for name, looks := range map[string][]float64{
		"the last look":                {5.4},
		"an older one":                 {1, 3.2, 5.4},
		"one with a time of before":    {5.4, 0.1},
		"one a moment before the last": {5.4, 5.3},
	} {
		t.Run(name, func(t *testing.T) {
			b := ratioBudgetOf(t, RatioBudget{Ratio: 0.2})
			for _, look := range looks {
				b.Balance(at(look))
			}
			deposit(b, 100)
			wantBalance(t, b, at(10), 20)
			wantBalance(t, b, at(15), 20) // nothing of it is older than 5 s
			if got := b.Balance(at(17.5)); got < 8 || got > 12 {
				t.Errorf("Balance at 17.5s = %v, want about half of 20, as half the calls were made before 7.7s", got)
			}
		})
	}
}

func TestNewRatioBudgetRefuses(t *testing.T) {
	for _, tt := range []struct {
		settings RatioBudget
		want     string
	}{
		{RatioBudget{Ratio: -0.1}, "Ratio is -0.1"},
		{RatioBudget{Ratio: math.NaN()}, "Ratio is NaN"},
		{RatioBudget{Ratio: math.Inf(1)}, "Ratio is +Inf"},
		{RatioBudget{MinPerSecond: -1}, "MinPerSecond is -1"},
		{RatioBudget{MinPerSecond: math.NaN()}, "MinPerSecond is NaN"},
		{RatioBudget{MinPerSecond: math.Inf(1)}, "MinPerSecond is +Inf"},
		{RatioBudget{Ratio: 0.2, Window: -time.Second}, "Window is -1s"},
		{RatioBudget{Ratio: 0.2, Window: time.Millisecond - 1}, "Window is 999.999µs"},
	} {
		b, err := NewRatioBudget(tt.settings)
		if err == nil || b != nil || !strings.Contains(err.Error(), tt.want) || !strings.HasPrefix(err.Error(), "grpcretry: NewRatioBudget: ") {
			t.Errorf("NewRatioBudget(%+v) = %v, %v, want an error with %q", tt.settings, b, err, tt.want)
		}
	}
	if _, err := NewRatioBudget(RatioBudget{Ratio: 0.2, Window: time.Millisecond}); err != nil {
		t.Errorf("NewRatioBudget with a window of 1 ms: %v", err)
	}
}

// Only the end of a first attempt is a deposit, whatever its result: the share is of
// calls, not of attempts and not of successes.
func TestRatioBudgetCountsCallsWhateverTheirResult(t *testing.T) {
	b := ratioBudgetOf(t, RatioBudget{Ratio: 1})
	for i, result := range []Result{Succeeded, Failed, Ignored} {
		b.Deposit(Outcome{Attempt: 1, Result: result})
		wantBalance(t, b, epoch, float64(i+1))
		b.Deposit(Outcome{Attempt: 2, Result: result})
		b.Deposit(Outcome{Attempt: 7, Result: result})
		wantBalance(t, b, epoch, float64(i+1))
	}
}

func TestRatioBudgetCapsAThousandFailuresAtOnce(t *testing.T) {
	for _, tt := range []struct {
		settings RatioBudget
		want     int // 0.2 · 1000 + MinPerSecond · window
	}{
		{RatioBudget{Ratio: 0.2}, 200},
		{RatioBudget{Ratio: 0.2, MinPerSecond: 10}, 200 + 100},
		{RatioBudget{Ratio: 0.2, MinPerSecond: 5, Window: 2 * time.Second}, 200 + 10},
		{RatioBudget{}, 200 + 100},
	} {
		b := ratioBudgetOf(t, tt.settings)
		for range 1000 {
			b.Deposit(Outcome{Attempt: 1, Result: Failed})
		}
		// Four attempts a call: 3000 retries are asked for.
		if got := withdraw(b, epoch, 3000); got != tt.want {
			t.Errorf("%+v: 1000 failures at once got %d retries, want %d", tt.settings, got, tt.want)
		}
	}
}

// A tick is what happened at one moment of a simulated outage.
type tick struct {
	at             time.Time
	calls, retries int
}

// An outage is traffic of some shape in which calls fail.
type outage struct {
	name  string
	gap   func(*rand.Rand) time.Duration
	calls func(random *rand.Rand, elapsed time.Duration) int
}

var outages = []outage{
	{"steady", evenly(100 * time.Millisecond), func(*rand.Rand, time.Duration) int { return 7 }},
	{"one call now and then", upTo(30 * time.Second), func(*rand.Rand, time.Duration) int { return 1 }},
	{"bursts", upTo(12 * time.Second), func(r *rand.Rand, _ time.Duration) int { return r.IntN(150) }},
	{"a day's curve", evenly(300 * time.Millisecond), func(_ *rand.Rand, elapsed time.Duration) int {
		return int(20 * (1 + math.Sin(elapsed.Seconds()/10)))
	}},
	{"on the edges of steps and windows", evenly(500 * time.Millisecond), func(r *rand.Rand, _ time.Duration) int { return r.IntN(30) }},
	{"all at once, window for window", evenly(10 * time.Second), func(*rand.Rand, time.Duration) int { return 50 }},
	{"just over a window apart", evenly(10*time.Second + 501*time.Millisecond), func(*rand.Rand, time.Duration) int { return 50 }},
	{"dense, then silent", func(r *rand.Rand) time.Duration {
		if r.IntN(40) == 0 {
			return time.Duration(r.Int64N(int64(time.Hour)))
		}
		return time.Duration(r.Int64N(int64(50 * time.Millisecond)))
	}, func(r *rand.Rand, _ time.Duration) int { return r.IntN(20) }},
}

func evenly(d time.Duration) func(*rand.Rand) time.Duration {
	return func(*rand.Rand) time.Duration { return d }
}

func upTo(d time.Duration) func(*rand.Rand) time.Duration {
	return func(r *rand.Rand) time.Duration { return time.Duration(r.Int64N(int64(d))) }
}

// run sends the calls of the outage, of which a share fails, with up to four attempts.
func (o outage) run(b Budget, random *rand.Rand, failing float64) []tick {
	now, ticks := epoch, []tick(nil)
	for range 200 {
		one := tick{at: now, calls: o.calls(random, now.Sub(epoch))}
		for range one.calls {
			failed := random.Float64() < failing
			result := Succeeded
			if failed {
				result = Failed
			}
			b.Deposit(Outcome{Attempt: 1, Result: result})
			for number := 2; failed && number <= 4 && b.Withdraw(now); number++ {
				one.retries++
				b.Deposit(Outcome{Attempt: number, Result: Failed})
			}
		}
		ticks = append(ticks, one)
		now = now.Add(o.gap(random))
	}
	return ticks
}

var ratioSettings = []RatioBudget{
	{},
	{Ratio: 0.1},
	{Ratio: 1, MinPerSecond: 1, Window: time.Second},
	{MinPerSecond: 2},
	{Ratio: 0.03, MinPerSecond: 0.5, Window: time.Minute},
}

// forEachOutage runs f for every shape of traffic, every setting and some seeds.
func forEachOutage(t *testing.T, f func(t *testing.T, o outage, s RatioBudget, random *rand.Rand)) {
	for _, o := range outages {
		for _, s := range ratioSettings {
			t.Run(fmt.Sprintf("%s/%v+%v", o.name, s.Ratio, s.MinPerSecond), func(t *testing.T) {
				for seed := range uint64(2) {
					f(t, o, s, rand.New(rand.NewPCG(seed, 7)))
				}
			})
		}
	}
}

// The promise of the budget: attempts ≤ calls × (1 + Ratio) + MinPerSecond × (span +
// Window), here for every span that starts with the first call.
func TestRatioBudgetBoundsAttemptsOfAnOutage(t *testing.T) {
	forEachOutage(t, func(t *testing.T, o outage, s RatioBudget, random *rand.Rand) {
		wantBounded(t, s, o.run(ratioBudgetOf(t, s), random, 1), 0)
	})
}

// A part of the calls failing saves up no more than calls × Ratio either.
func TestRatioBudgetBoundsAttemptsWhenSomeFail(t *testing.T) {
	forEachOutage(t, func(t *testing.T, o outage, s RatioBudget, random *rand.Rand) {
		wantBounded(t, s, o.run(ratioBudgetOf(t, s), random, 0.3), 0)
	})
}

// A span that begins within the outage may spend, besides its own deposits, those of the
// window before it (and the step under way), but nothing older.
func TestRatioBudgetBoundsAttemptsOfAnySpan(t *testing.T) {
	forEachOutage(t, func(t *testing.T, o outage, s RatioBudget, random *rand.Rand) {
		ticks := o.run(ratioBudgetOf(t, s), random, 1)
		window := orDefault(orDefault(s, defaultRatioBudget).Window, 10*time.Second)
		for first := range ticks {
			from, before := ticks[first].at.Add(-window-window/ratioSteps), 0
			for _, one := range ticks[:first] {
				if !one.at.Before(from) {
					before += one.calls
				}
			}
			wantBounded(t, s, ticks[first:], orDefault(s, defaultRatioBudget).Ratio*float64(before))
		}
	})
}

func wantBounded(t *testing.T, s RatioBudget, ticks []tick, saved float64) {
	t.Helper()
	s = orDefault(s, defaultRatioBudget)
	window := orDefault(s.Window, 10*time.Second)
	calls, attempts := 0, 0
	for _, one := range ticks {
		calls += one.calls
		attempts += one.calls + one.retries
		span := one.at.Sub(ticks[0].at)
		bound := float64(calls)*(1+s.Ratio) + s.MinPerSecond*(span+window).Seconds() + saved
		if float64(attempts) > bound+1e-6 {
			t.Fatalf("%d calls made %d attempts within %v from %v on, want at most %v",
				calls, attempts, span, ticks[0].at.Sub(epoch), bound)
		}
	}
}

// The bound is of little worth if the budget refuses what it could allow: in steady
// traffic an outage gets the share it was promised, and the floor.
func TestRatioBudgetAllowsItsShare(t *testing.T) {
	b := ratioBudgetOf(t, RatioBudget{Ratio: 0.2, MinPerSecond: 10})
	calls, retries := 0, 0
	for ms := 0; ms < 600_000; ms += 10 { // 100 calls a second for ten minutes
		deposit(b, 1)
		calls++
		retries += withdraw(b, at(float64(ms)/1000), 3)
	}
	if want := int(0.95 * (0.2*float64(calls) + 10*600)); retries < want {
		t.Errorf("%d failing calls in ten minutes got %d retries, want at least %d", calls, retries, want)
	}
}

func TestRatioBudgetRetriesEveryFailureOfOnePercent(t *testing.T) {
	random := rand.New(rand.NewPCG(3, 4))
	for _, s := range []RatioBudget{{}, {Ratio: 0.2}} {
		b := ratioBudgetOf(t, s)
		for i := range 100_000 { // 100 calls a second
			b.Deposit(Outcome{Attempt: 1, Result: Succeeded})
			if now := at(float64(i) / 100); i > 1000 && random.IntN(100) == 0 && !b.Withdraw(now) {
				t.Fatalf("%+v: refused the retry of call %d, although only 1 %% fail", s, i)
			}
		}
	}
}

// The second outage is handled as the first one was.
func TestRatioBudgetRecoversBetweenOutages(t *testing.T) {
	b := ratioBudgetOf(t, RatioBudget{Ratio: 0.2, MinPerSecond: 1})
	seconds := 0.0
	pass := func(duration float64, failing bool) (retries int) {
		for end := seconds + duration; seconds < end; seconds += 0.01 {
			deposit(b, 1)
			if failing {
				retries += withdraw(b, at(seconds), 3)
			}
		}
		return retries
	}
	pass(60, false)
	first := pass(60, true)
	if refused := b.Withdraw(at(seconds)); refused {
		t.Fatal("the first outage did not use the budget up")
	}
	pass(60, false)
	if got := b.Balance(at(seconds)); got < 199 { // 0.2 · 1000 + 10
		t.Errorf("a minute after the outage the balance is %v, want about 210", got)
	}
	second := pass(60, true)
	if diff := first - second; diff < -25 || diff > 25 || second < 1000 {
		t.Errorf("the first outage got %d retries, the second %d, want about the same", first, second)
	}
}

func TestRatioBudgetForgetsAnHourOfGoodTraffic(t *testing.T) {
	for _, tt := range []struct {
		name string
		look bool // during the hour
	}{
		{"looked at all the time", true},
		{"not looked at", false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			b := ratioBudgetOf(t, RatioBudget{Ratio: 0.2, MinPerSecond: 1})
			for i := range 360_000 { // 100 a second
				deposit(b, 1)
				if tt.look {
					b.Balance(at(float64(i) / 100))
				}
			}
			// 0.2 · 100 · 10 + 10, and at most a step of a twentieth more.
			if got := withdraw(b, at(3600), plenty); got < 205 || got > 220 {
				t.Errorf("after an hour at 100 calls a second the budget allowed %d retries, want 210 … 220", got)
			}
		})
	}
}

func TestRatioBudgetDepositsAgeOut(t *testing.T) {
	b := ratioBudgetOf(t, RatioBudget{Ratio: 1, Window: 20 * time.Second}) // steps of 1 s
	deposit(b, 100)
	wantBalance(t, b, at(0), 100)
	wantBalance(t, b, at(5), 100)
	deposit(b, 10)
	wantBalance(t, b, at(5), 110) // since the last look no time has passed
	wantBalance(t, b, at(19.999), 110)
	wantBalance(t, b, at(21), 10)
	wantBalance(t, b, at(24.999), 10)
	wantBalance(t, b, at(26), 0)
	wantBalance(t, b, at(1e6), 0)
}

func TestRatioBudgetRetriesAgeOut(t *testing.T) {
	b := ratioBudgetOf(t, RatioBudget{MinPerSecond: 1, Window: 20 * time.Second})
	if got := withdraw(b, at(0), 15); got != 15 {
		t.Fatalf("the floor of 20 allowed %d retries, want 15", got)
	}
	wantWithdrawn(t, b, at(7), 5)
	wantWithdrawn(t, b, at(19.999), 0)
	wantWithdrawn(t, b, at(21), 15)
	wantWithdrawn(t, b, at(28), 5)
	wantWithdrawn(t, b, at(29), 0)
}

// A deposit pays for a retry once: it does not come back when the retry leaves the window.
func TestRatioBudgetUsesADepositOnce(t *testing.T) {
	b := ratioBudgetOf(t, RatioBudget{Ratio: 1, Window: 20 * time.Second})
	deposit(b, 10)
	b.Balance(at(0))
	wantWithdrawn(t, b, at(10), 10)
	for s := 10.0; s < 80; s += 0.25 {
		wantWithdrawn(t, b, at(s), 0)
	}
}

// exactWindow is the model that the doc comment of NewRatioBudget compares with.
type exactWindow struct {
	RatioBudget
	calls, retries []time.Time
}

func within(times []time.Time, from, to time.Time) (n int) { // from < t ≤ to
	for _, t := range times {
		if t.After(from) && !t.After(to) {
			n++
		}
	}
	return n
}

func (m *exactWindow) balance(now time.Time) float64 {
	from := now.Add(-m.Window)
	return m.MinPerSecond*m.Window.Seconds() + m.Ratio*float64(within(m.calls, from, now)) - float64(within(m.retries, from, now))
}

// errorBound is what NewRatioBudget promises: Ratio × the calls of three steps, here
// those around the far edge of the window.
func (m *exactWindow) errorBound(now time.Time) float64 {
	edge, step := now.Add(-m.Window), m.Window/ratioSteps
	return m.Ratio*float64(within(m.calls, edge.Add(-2*step), edge.Add(step))) + 1e-6
}

// keptRetries are those that have left the exact window within the last step.
func (m *exactWindow) keptRetries(now time.Time) float64 {
	edge, step := now.Add(-m.Window), m.Window/ratioSteps
	return float64(within(m.retries, edge.Add(-step), edge))
}

func TestRatioBudgetIsCloseToAnExactWindow(t *testing.T) {
	for seed := range uint64(8) {
		random := rand.New(rand.NewPCG(seed, 11))
		settings := RatioBudget{Ratio: 0.3, MinPerSecond: 2, Window: 2 * time.Second} // steps of 100 ms
		b, exact := ratioBudgetOf(t, settings), &exactWindow{RatioBudget: settings}
		now := epoch
		for range 300 {
			look := now.Add(time.Duration(random.Int64N(int64(100*time.Millisecond)) + 1)) // once per step
			for range random.IntN(30) {
				deposit(b, 1)
				exact.calls = append(exact.calls, now.Add(time.Duration(random.Int64N(int64(look.Sub(now)))+1)))
			}
			now = look
			got, want, bound := b.balance(now), exact.balance(now), exact.errorBound(now)
			// A retry is kept for up to a step longer, on the safe side.
			if got > want+bound || got < want-bound-exact.keptRetries(now) {
				t.Fatalf("seed %d at %v: balance %v, exact window %v, want no further apart than %v and %v retries",
					seed, now.Sub(epoch), got, want, bound, exact.keptRetries(now))
			}
			if random.IntN(3) == 0 && b.Withdraw(now) {
				exact.retries = append(exact.retries, now)
			}
		}
	}
}

func TestRatioBudgetRefund(t *testing.T) {
	b := ratioBudgetOf(t, RatioBudget{MinPerSecond: 0.3}) // 3 in 10 s
	wantWithdrawn(t, b, at(0), 3)
	b.Refund()
	wantBalance(t, b, at(0), 1)
	wantWithdrawn(t, b, at(4), 1)

	// What was taken in another step is given back too, up to a window later.
	b.Refund()
	b.Refund()
	wantBalance(t, b, at(9.9), 2)
	wantWithdrawn(t, b, at(9.9), 2)
}

// More refunds than retries, and those of retries that have left the window, add nothing.
func TestRatioBudgetRefundAddsNothingToAFullBudget(t *testing.T) {
	b := ratioBudgetOf(t, RatioBudget{MinPerSecond: 0.3})
	b.Refund()
	wantBalance(t, b, at(0), 3)
	wantWithdrawn(t, b, at(0), 3)
	for range 5 {
		b.Refund()
	}
	wantBalance(t, b, at(0), 3)
	wantWithdrawn(t, b, at(0), 3)
	wantBalance(t, b, at(11), 3)
	b.Refund()
	wantBalance(t, b, at(11), 3)
	wantBalance(t, b, at(30), 3)
}

// The bound speaks of attempts sent. A refund must not let a retry that was sent be
// forgotten early, because an older one, that was not sent, is remembered in its place.
func TestRatioBudgetBoundHoldsWithRefunds(t *testing.T) {
	settings := RatioBudget{MinPerSecond: 0.2} // 2 in 10 s
	b := ratioBudgetOf(t, settings)
	if !b.Withdraw(at(0)) { // waits, is cancelled at 9.9
		t.Fatal("no retry from a full budget")
	}
	sent := tick{at: at(9.9), retries: withdraw(b, at(9.9), plenty)}
	b.Refund()
	sent.retries += withdraw(b, at(9.9), plenty)
	later := tick{at: at(11), retries: withdraw(b, at(11), plenty)} // 0.2 · (1.1 + 10) = 2.22
	wantBounded(t, settings, []tick{sent, later}, 0)
}

func TestRatioBudgetSurvivesAClockThatGoesBack(t *testing.T) {
	b := ratioBudgetOf(t, RatioBudget{Ratio: 0.5, MinPerSecond: 1})
	deposit(b, 10)
	wantWithdrawn(t, b, at(100), 10) // the deposits of 100 s count for a tenth, rounded down to none
	for _, s := range []float64{99, 90, 50, 0, -1000} {
		wantWithdrawn(t, b, at(s), 0)
		deposit(b, 2)
		wantWithdrawn(t, b, at(s), 1)
	}
	wantWithdrawn(t, b, at(109), 0)
	wantWithdrawn(t, b, at(111), 10)
}

// A budget made earlier or later than the time it is first told of works the same.
func TestRatioBudgetTakesAnyClock(t *testing.T) {
	for _, start := range []time.Time{epoch, time.Now(), time.Now().Add(time.Hour), time.Date(2200, 1, 1, 0, 0, 0, 0, time.UTC)} {
		b, err := NewRatioBudget(RatioBudget{Ratio: 1, MinPerSecond: 1})
		if err != nil {
			t.Fatal(err)
		}
		wantWithdrawn(t, b, start, 10)
		deposit(b, 5)
		wantWithdrawn(t, b, start, 5)
		wantWithdrawn(t, b, start.Add(9*time.Second), 0)
		wantWithdrawn(t, b, start.Add(11*time.Second), 10)
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

func TestRatioBudgetGrantsExactlyItsBalance(t *testing.T) {
	const goroutines, each, calls = 64, 50, 2000
	b := ratioBudgetOf(t, RatioBudget{Ratio: 0.25, MinPerSecond: 10})
	deposit(b, calls)
	granted := make(chan int, goroutines)
	concurrently(goroutines, func() { granted <- withdraw(b, epoch, each) })
	total := 0
	for range goroutines {
		total += <-granted
	}
	if want := calls/4 + 100; total != want {
		t.Errorf("%d goroutines were granted %d retries, want %d", goroutines, total, want)
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
	b := ratioBudgetOf(t, RatioBudget{Ratio: 1})
	now := epoch
	for name, f := range map[string]func(){
		"Deposit":  func() { b.Deposit(Outcome{Attempt: 1, Result: Succeeded}) },
		"Withdraw": func() { now = now.Add(77 * time.Millisecond); b.Withdraw(now) },
		"Refund":   b.Refund,
		"Balance":  func() { b.Balance(now) },
	} {
		if n := testing.AllocsPerRun(1000, f); n != 0 {
			t.Errorf("%s makes %v allocations, want none", name, n)
		}
	}
}

// Calls between two looks count for the part of that time that is in the window, exactly, also
// where the looks are further apart than the window or in the middle of steps.
func TestRatioBudgetSpreadsCallsBetweenLooks(t *testing.T) {
	for _, tt := range []struct {
		name        string
		first, then time.Duration // looks; the calls come between them
		calls       int
		at          time.Duration
		want        float64
	}{
		{"within the window", 0, 4 * second, 300, 4 * second, 300},
		{"one and a half windows", 0, 15 * second, 300, 15 * second, 200},
		{"four windows", 0, 40 * second, 400, 40 * second, 100},
		{"across a step, which then leaves", 400 * time.Millisecond, 600 * time.Millisecond, 100, 10500 * time.Millisecond, 50},
	} {
		t.Run(tt.name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				b, err := NewRatioBudget(RatioBudget{Ratio: 1, Window: 10 * second})
				if err != nil {
					t.Fatal(err)
				}
				start := time.Now()
				b.Balance(start)
				b.Balance(start.Add(tt.first))
				for range tt.calls {
					b.Deposit(Outcome{Attempt: 1, Result: Succeeded})
				}
				b.Balance(start.Add(tt.then))
				if got := b.Balance(start.Add(tt.at)); math.Abs(got-tt.want) > 1e-6 {
					t.Errorf("balance is %v after %v, want %v", got, tt.at, tt.want)
				}
			})
		})
	}
}
