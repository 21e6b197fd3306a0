package window

import (
	"math"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
)

// Most of these tests use their own clock: tokens whose first look is at a time far from the real
// one never read the real clock.
var epoch = time.Date(2020, 1, 1, 0, 0, 0, 0, time.UTC)

func at(seconds float64) time.Time { return epoch.Add(time.Duration(seconds * float64(time.Second))) }

// tokensOf returns tokens whose time starts at epoch.
func tokensOf(s Settings) *Tokens {
	b := New(s)
	b.Balance(epoch)
	return b
}

func earn(b *Tokens, calls int) {
	for range calls {
		b.Earn(0)
	}
}

func wantTaken(t *testing.T, b *Tokens, now time.Time, want int) {
	t.Helper()
	got := 0
	for b.Take(now) {
		got++
	}
	if got != want {
		t.Errorf("at %v %d tokens were taken, want %d", now.Sub(epoch), got, want)
	}
}

func wantBalance(t *testing.T, b *Tokens, now time.Time, want float64) {
	t.Helper()
	if got := b.Balance(now); math.Abs(got-want) > 1e-6 {
		t.Errorf("Balance at %v = %v, want %v", now.Sub(epoch), got, want)
	}
}

// An exactTokens follows the rules in the comment of grpcretry.NewRatioBudget, step by step, for a caller that looks
// after each operation.
type exactTokens struct {
	Settings
	now            time.Time
	reserve, floor float64
	earned, spent  map[int64]float64 // by step
}

func newExact(s Settings) *exactTokens {
	return &exactTokens{s, epoch, s.Reserve, s.Floor(), map[int64]float64{}, map[int64]float64{}}
}

func (m *exactTokens) number() int64 { return int64(m.now.Sub(epoch) / (m.Window / 20)) }

func (m *exactTokens) pass(now time.Time) {
	if !now.After(m.now) {
		return
	}
	m.floor = min(m.Floor(), m.floor+m.MinPerSecond*now.Sub(m.now).Seconds())
	m.now = now
	for n := range m.earned {
		if n < m.number()-20 {
			delete(m.earned, n)
			delete(m.spent, n)
		}
	}
}

func (m *exactTokens) balance() float64 {
	sum := m.reserve + m.floor
	for n := range m.earned {
		sum += m.earned[n] - m.spent[n]
	}
	return sum
}

func (m *exactTokens) earn(ratio float64) {
	fill := min(ratio, m.Reserve-m.reserve)
	m.reserve += fill
	m.earned[m.number()] += ratio - fill
}

func (m *exactTokens) withdraw() bool {
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

func (m *exactTokens) giveBack() {
	rest := 1.0
	part := min(rest, m.Reserve-m.reserve)
	m.reserve += part
	rest -= part
	part = min(rest, m.Floor()-m.floor)
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
func TestTokensFollowTheRuleExactly(t *testing.T) {
	t.Parallel()
	seeds := uint64(50)
	if testing.Short() {
		seeds = 5
	}
	for seed := range seeds {
		random := rand.New(rand.NewPCG(seed, 11))
		s := Settings{
			Ratio:        float64(random.IntN(80)) / 64,
			Reserve:      float64(random.IntN(40)) / 8,
			MinPerSecond: float64(random.IntN(3)*random.IntN(8)) / 4,
			Window:       []time.Duration{5 * time.Second, 10 * time.Second, 40 * time.Second}[random.IntN(3)],
		}
		b, exact := tokensOf(s), newExact(s)
		now, waiting := epoch, 0 // retries decided on that have not ended
		var log []event
		for i := range 1500 {
			now = now.Add(randomGap(random))
			exact.pass(now)
			e := event{at: exact.now, balance: b.Balance(now)}
			switch random.IntN(6) {
			case 0, 1:
				for range 1 + random.IntN(1+random.IntN(60)) {
					b.Earn(0)
					b.Balance(now)
					exact.earn(s.Ratio)
					e.earned += s.Ratio
				}
			case 2, 3:
				for range 1 + random.IntN(8) {
					got, want := b.Take(now), exact.withdraw()
					if got != want {
						t.Fatalf("seed %d, %+v, operation %d: Take = %t, want %t", seed, s, i, got, want)
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
					b.Return()
					if random.IntN(2) == 0 {
						b.Earn(0)
						exact.earn(s.Ratio)
						e.earned += s.Ratio
					}
					b.Balance(now)
				}
			case 5:
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

// An event describes one moment of random traffic.
type event struct {
	at      time.Time
	balance float64 // before it
	earned  float64
	taken   int // less what was returned
}

// wantBounded checks the bound for every span of events. It may begin with the reserve, a
// full floor, and the earnings of the window and a step before it.
func wantBounded(t *testing.T, s Settings, log []event) {
	t.Helper()
	for first := 0; first < len(log); first += 23 {
		start := log[first].at
		limit := s.Reserve + s.Floor()
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

func TestManyGoroutinesTakeNoMoreThanWasEarned(t *testing.T) {
	const goroutines, rounds = 32, 300
	b := New(Settings{Ratio: 0.25, Window: time.Hour})
	var answered, taken atomic.Int64
	concurrently(goroutines, func() {
		for i := range rounds {
			answered.Add(1)
			b.Earn(0)
			if !b.Take(time.Now()) {
				continue
			}
			switch taken.Add(1); i % 3 {
			case 0:
				b.Return()
				taken.Add(-1)
			case 1:
				answered.Add(1)
				b.Return()
				b.Earn(0)
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

// If the time goes back, the tokens stand still, and no time counts twice.
func TestTokensSurviveAClockThatGoesBack(t *testing.T) {
	b := tokensOf(Settings{Ratio: 0.5, MinPerSecond: 1, Window: 10 * time.Second})
	b.Balance(at(100))
	earn(b, 10)
	wantTaken(t, b, at(100), 15)
	for _, s := range []float64{99, 90, 50, 0, -1000} {
		wantTaken(t, b, at(s), 0)
		earn(b, 2)
		wantTaken(t, b, at(s), 1)
	}
	wantBalance(t, b, at(100), 0)
	wantBalance(t, b, at(105), 5)
	wantBalance(t, b, at(200), 10)
}

// After 292 years, which is the longest duration, the time stands still.
func TestTokensSurviveALeapOfCenturies(t *testing.T) {
	b := tokensOf(Settings{Ratio: 0.5, Reserve: 3, MinPerSecond: 1, Window: 10 * time.Second})
	earn(b, 10)
	wantBalance(t, b, at(1e9).AddDate(1000, 0, 0), 13)
	earn(b, 10)
	wantBalance(t, b, at(1e9).AddDate(2000, 0, 0), 18)
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

func TestTheReserveMayBeEmptyAtTheStart(t *testing.T) {
	b := New(Settings{Ratio: 0.5, Reserve: 2, Window: time.Second})
	b.EmptyReserve()
	wantTaken(t, b, at(0), 0)
	earn(b, 10)
	wantTaken(t, b, at(0), 5)
	earn(b, 4)
	wantBalance(t, b, at(100), 2) // it does not expire
}

// Without a look for a long time, Earn itself looks, so that old earnings expire. Compared with an exact window they
// are off by at most the calls of two steps.
func TestEarningsExpireByTheRealClock(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const ratio, perSecond = 0.25, 200
		b := New(Settings{Ratio: ratio, Window: 10 * time.Second})
		for range 60 * perSecond {
			b.Earn(0)
			time.Sleep(time.Second / perSecond)
		}
		const want, off = ratio * 10 * perSecond, ratio * perSecond
		if got := b.Balance(time.Now()); math.Abs(got-want) > off {
			t.Errorf("Balance after a minute of %d calls a second = %v, want %v ± %v", perSecond, got, want, off)
		}
		time.Sleep(11 * time.Second)
		if got := b.Balance(time.Now()); got != 0 {
			t.Errorf("Balance after a pause of 11 s = %v, want 0", got)
		}
	})
}

// What was earned before a pause that is longer than the window is gone, however few calls earned it. A call that took long
// counts when it started.
func TestNothingIsLeftAfterAPause(t *testing.T) {
	for _, tt := range []struct {
		calls int
		gap   time.Duration
		took  time.Duration // of each call; 0 if that is not known
	}{
		{1, 0, 0}, {15, 10 * time.Millisecond, 0}, {15, 10 * time.Millisecond, time.Millisecond}, {50, 10 * time.Millisecond, time.Millisecond},
		{100, 0, 0}, {100, 0, time.Millisecond}, {300, 10 * time.Millisecond, 3 * time.Second}, {1000, 10 * time.Millisecond, time.Millisecond},
	} {
		synctest.Test(t, func(t *testing.T) {
			b := New(Settings{Ratio: 0.2, Reserve: 3, Window: 10 * time.Second})
			b.Balance(time.Now())
			time.Sleep(time.Second)
			for range tt.calls {
				start := time.Duration(0)
				if tt.took > 0 {
					start = time.Since(Origin) - tt.took
				}
				b.Earn(start)
				time.Sleep(tt.gap)
			}
			earned := 0.2 * float64(tt.calls)
			early := earned * tt.took.Seconds() / 10 // what may be gone, because it counts from the start
			if got := b.Balance(time.Now()); got > 3+earned+1e-6 || got < 3+earned-early-1e-6 {
				t.Errorf("%+v: after them, Balance = %v, want %v, less at most %v", tt, got, 3+earned, early)
			}
			time.Sleep(11 * time.Second)
			if got := b.Balance(time.Now()); got != 3 {
				t.Errorf("%+v: after the pause, Balance = %v, want the reserve of 3", tt, got)
			}
		})
	}
}

// What is earned after a pause counts from then, whether the calls know their start or not.
func TestWhatIsEarnedAfterAPause(t *testing.T) {
	for _, took := range []time.Duration{0, time.Millisecond} {
		for _, calls := range []int{1, 10, 100, 1000} {
			synctest.Test(t, func(t *testing.T) {
				b := New(Settings{Ratio: 0.25, Window: 10 * time.Second})
				b.Balance(time.Now())
				time.Sleep(30 * time.Second)
				for range calls {
					start := time.Duration(0)
					if took > 0 {
						start = time.Since(Origin) - took
					}
					b.Earn(start)
				}
				time.Sleep(9 * time.Second)
				if got, want := b.Balance(time.Now()), 0.25*float64(calls); got != want {
					t.Errorf("%d calls that took %v: Balance = %v, want %v", calls, took, got, want)
				}
			})
		}
	}
}

// Calls of a slow client are dated one by one, though nobody looks.
func TestEarningsOfASlowClient(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := New(Settings{Ratio: 0.25, Window: 10 * time.Second})
		for range 60 {
			time.Sleep(time.Second)
			b.Earn(time.Since(Origin) - time.Millisecond)
		}
		time.Sleep(600 * time.Millisecond)
		if got := b.Balance(time.Now()); got != 2.5 {
			t.Errorf("Balance = %v, want 2.5 for the 10 calls in the window", got)
		}
	})
}

// Many calls in one moment, for which no clock is read, do not keep those that follow slowly from being dated.
func TestEarningsOfASlowClientAfterABurst(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := New(Settings{Ratio: 0.1, Window: time.Second})
		earn(b, 80)
		for range 40 {
			time.Sleep(50 * time.Millisecond)
			earn(b, 1)
		}
		if got := b.Balance(time.Now()); got < 0.5 {
			t.Errorf("a second with 20 calls has earned %v, want 2, of which at most 15 calls are lost", got)
		}
	})
}

func TestTokensAllocateNothing(t *testing.T) {
	b := New(Settings{Ratio: 0.5, Reserve: 3, Window: time.Second})
	got := testing.AllocsPerRun(1000, func() { b.Earn(0); b.Return(); b.Take(time.Now()); b.Balance(time.Now()) })
	if got != 0 {
		t.Errorf("%v allocations, want none", got)
	}
}

// Slow calls earn as much as others, once the first has been answered.
func TestEarningsOfSlowCalls(t *testing.T) {
	for _, took := range []time.Duration{time.Millisecond, 6 * time.Second, time.Minute} {
		synctest.Test(t, func(t *testing.T) {
			b := New(Settings{Ratio: 0.25, Window: 10 * time.Second})
			for range 600 {
				time.Sleep(100 * time.Millisecond)
				b.Earn(time.Since(Origin) - took)
			}
			if got := b.Balance(time.Now()); got < 25 || got > 25.5 {
				t.Errorf("calls of %v: Balance = %v, want 25 for the 100 calls in the window, and up to a step more", took, got)
			}
		})
	}
}

// A call that took no time lasts for a window, wherever in a step others have looked.
func TestEarningsLastForAWindow(t *testing.T) {
	for _, looked := range []time.Duration{0, 400 * time.Millisecond, 490 * time.Millisecond} {
		synctest.Test(t, func(t *testing.T) {
			b := New(Settings{Ratio: 0.25, Window: 10 * time.Second})
			time.Sleep(looked)
			b.Balance(time.Now())
			time.Sleep(900*time.Millisecond - looked)
			b.Earn(time.Since(Origin))
			time.Sleep(10 * time.Second)
			if got := b.Balance(time.Now()); got != 0.25 {
				t.Errorf("looked after %v: Balance = %v, want 0.25", looked, got)
			}
		})
	}
}

// A call that takes its look late, when another look has seen the call, does not make that count again.
func TestNoCallIsCountedTwice(t *testing.T) {
	b := New(Settings{Ratio: 1, Window: time.Hour})
	b.calls.Add()
	b.Balance(time.Now())
	b.mu.Lock()
	b.settle(time.Now(), 1)
	b.mu.Unlock()
	wantBalance(t, b, time.Now(), 1)
}
