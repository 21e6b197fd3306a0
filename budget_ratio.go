package grpcretry

import (
	"fmt"
	"math"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"
)

// RatioBudget holds the settings of [NewRatioBudget] and [WithRatioBudget]. The zero
// value means a Ratio of 0.2, a Reserve of 3, no MinPerSecond and a Window of 10 s. In
// any other value the fields are taken as they are, except that a Window of 0 means 10 s.
type RatioBudget struct {
	Ratio        float64       // retries earned by an answered call, at least 0: 0.2 is one retry for five calls
	Reserve      float64       // retries in hand, at least 0, full at the start and earned back first
	MinPerSecond float64       // retries per second on top, at least 0, whatever the traffic
	Window       time.Duration // how long earned retries can be spent, at least 1 ms; 0 means 10 s
}

var defaultRatioBudget = RatioBudget{Ratio: 0.2, Reserve: 3, Window: 10 * time.Second}

// NewRatioBudget allows retries as a share of the calls that the server answered. An
// outage earns nothing, so while it lasts the server soon gets one attempt per call.
//
// Each [Outcome] that is Succeeded or Answered, and not Late, earns Ratio. Earnings first fill the
// reserve until it holds Reserve again; the others can be spent for the length of the
// Window, so a good hour is not saved up for a bad minute. The reserve is full at the
// start and is not refilled by time, because such refills add up in a fleet of clients.
// MinPerSecond is for those who want one: a floor that holds up to MinPerSecond ×
// Window, is full at the start, and gains MinPerSecond each second.
//
// A retry costs one token, taken from what expires first: the oldest earnings, then the
// floor, then the reserve. The token is returned if the retry is refunded or if it
// succeeds, because the budget pays for wasted retries only; a hedge that succeeds
// returns nothing. A returned token is available immediately. It fills the reserve, then
// the floor, then pays for the newest earnings that were spent, which expire as if they
// never had been. If all of that is full, because calls were answered meanwhile, nothing is
// missing and the token is dropped.
//
// If everything fails from the first call on,
//
//	attempts ≤ calls + Reserve + MinPerSecond × (seconds + Window)
//
// If failures begin later, the earnings of the preceding Window are added, and a token
// that is returned after that for a retry decided on before counts among them.
//
// Deposit takes no lock, and only every sixteenth reads the clock. Earnings age in steps
// of a twentieth of the window and last for up to one step longer than the window.
// Compared with an exact sliding window, the earnings are therefore off by at most
// Ratio × (the calls of three steps + 240). The bound above is not affected if
// everything fails from the first call on.
//
// A program with a clock of its own, such as a simulation, calls Balance when its time
// begins: if the first time that the budget gets is further than a Window from the real
// time, the budget never reads the real clock. Calls between two looks (Withdraw or
// Balance) then count as spread evenly over the time between them, and the error above
// holds if there is a look in each step.
func NewRatioBudget(s RatioBudget) (Budget, error) {
	s = s.withDefaults()
	if err := s.check(); err != nil {
		return nil, fmt.Errorf("grpcretry: NewRatioBudget: %w", err)
	}
	return newRatioBudget(s), nil
}

// newRatioBudget needs settings that are filled and checked.
func newRatioBudget(s RatioBudget) *ratioBudget {
	b := &ratioBudget{
		settings: s,
		step:     s.Window / ratioSteps,
		epoch:    time.Now(),
		reserve:  s.Reserve,
		floor:    s.fullFloor(),
	}
	b.dueAfter(b.epoch)
	return b
}

// filled replaces the values that mean a default.
func (s RatioBudget) withDefaults() RatioBudget {
	s = orDefault(s, defaultRatioBudget)
	s.Window = orDefault(s.Window, defaultRatioBudget.Window)
	return s
}

func (s RatioBudget) check() error {
	for _, field := range []struct {
		name  string
		value float64
	}{{"Ratio", s.Ratio}, {"Reserve", s.Reserve}, {"MinPerSecond", s.MinPerSecond}} {
		if !(field.value >= 0) || math.IsInf(field.value, 0) { // NaN too
			return fmt.Errorf("RatioBudget.%s is %v, want a number of at least 0", field.name, field.value)
		}
	}
	if s.Window < time.Millisecond {
		return fmt.Errorf("RatioBudget.Window is %v, want at least 1ms, or 0 for %v", s.Window, defaultRatioBudget.Window)
	}
	if math.IsInf(s.fullFloor(), 0) {
		return fmt.Errorf("RatioBudget.MinPerSecond is %v, too much for a Window of %v", s.MinPerSecond, s.Window)
	}
	return nil
}

// fullFloor is how many tokens the floor holds.
func (s RatioBudget) fullFloor() float64 { return s.MinPerSecond * s.Window.Seconds() }

// ratioSteps is the number of steps in a window.
const ratioSteps = 20

// A ratioBudget implements [NewRatioBudget].
//
// Why the bound holds: a retry takes exactly one token, in all, and tokens come from
// nowhere but an answered call, the time that refills the floor, and a retry that gives
// its own token back. While everything fails, the first and the last do not happen for
// attempts that were sent; so the retries sent since the first call are at most the
// tokens there were, Reserve + MinPerSecond × Window, plus MinPerSecond for each second.
// Nothing holds more tokens than its limit, and returned tokens never renew the age of
// earnings. So at any later moment there are besides, at most, the earnings of the
// window before it.
//
// There are unspent earnings only while the reserve is full, because earnings and returned
// tokens fill the reserve first and retries empty it last. Without a floor, a returned
// token therefore goes exactly where its retry took it from, if nothing happened between.
type ratioBudget struct {
	settings RatioBudget   // set by newRatioBudget, then only read
	step     time.Duration // likewise

	calls    stripedCounter // answered calls
	returned atomic.Int64   // tokens returned since the last look
	due      atomic.Int64   // the time since the origin when a Deposit should look

	mu      sync.Mutex              // held to take a retry and to judge by it: two cannot both take the last token
	looked  bool                    // guarded by mu; Withdraw or Balance was called
	epoch   time.Time               // guarded by mu; where step 0 begins
	last    time.Duration           // guarded by mu; the latest look, since the epoch
	newest  int64                   // guarded by mu; the number of the step of the latest look
	seen    int64                   // guarded by mu; calls that have earned their share
	reserve float64                 // guarded by mu
	floor   float64                 // guarded by mu
	steps   [ratioSteps + 1]float64 // guarded by mu; a ring of earnings: the current step and the window before it
	earned  float64                 // guarded by mu; the sum of steps
	spent   float64                 // guarded by mu; how much of earned was spent, which is its oldest part
}

// perTargetRatio makes a ratio budget for each target. It needs settings that are filled.
func perTargetRatio(s RatioBudget) Budget {
	return &perTarget{newBudget: func() Budget { return newRatioBudget(s) }, settings: s}
}

// String describes the budget to readers of a policy, for example
// "ratio budget: 20% of answered calls, a reserve of 3, over 10s".
func (b *ratioBudget) String() string { return b.settings.describe() }

func (s RatioBudget) describe() string {
	floor := ""
	if s.MinPerSecond > 0 {
		floor = fmt.Sprintf(", plus %v a second", round(s.MinPerSecond))
	}
	return fmt.Sprintf("ratio budget: %v%% of answered calls, a reserve of %v%s, over %v",
		round(100*s.Ratio), round(s.Reserve), floor, s.Window)
}

// round removes the digits that floating point adds to a number that somebody wrote.
func round(x float64) float64 { return math.Round(x*1e6) / 1e6 }

func (b *ratioBudget) Deposit(o Outcome) {
	if o.Late || o.Result != Succeeded && o.Result != Answered {
		return
	}
	if o.Attempt > 1 && o.Result == Succeeded && !o.Hedge {
		b.returned.Add(1)
	}
	if uint64(b.calls.add())%lookEvery == 0 {
		b.lookIfDue()
	}
}

// lookEvery is how many deposits of one cell of the counter come to one that reads the
// clock, and maxUnseen how many calls can come after the time for a look and before it.
const (
	lookEvery = 16
	maxUnseen = counterCells * (lookEvery - 1)
)

// neverDue is the due of a budget that lives by its caller's clock.
const neverDue = math.MaxInt64

// dueAfter needs mu. It lets the next look of a Deposit be a step after now.
func (b *ratioBudget) dueAfter(now time.Time) { b.due.Store(int64(now.Sub(origin) + b.step)) }

// lookIfDue looks if a step has passed since the last look, or if the clock has gone far
// back. If the lock is taken, its holder looks.
func (b *ratioBudget) lookIfDue() {
	due := b.due.Load()
	early := time.Duration(due) - sinceOrigin()
	if due == neverDue || early > 0 && early < b.settings.Window || !b.mu.TryLock() {
		return
	}
	defer b.mu.Unlock()
	if b.due.Load() == due { // else another goroutine has looked meanwhile
		b.settle(time.Now())
	}
}

func (b *ratioBudget) Withdraw(now time.Time) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	if !b.hasOne(now) {
		return false
	}
	rest := 1.0
	b.spent += take(&rest, b.earned-b.spent)
	b.floor -= take(&rest, b.floor)
	b.reserve -= take(&rest, b.reserve)
	return true
}

// allows reports whether Withdraw would return true.
func (b *ratioBudget) allows(now time.Time) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.hasOne(now)
}

// hasOne needs mu.
func (b *ratioBudget) hasOne(now time.Time) bool {
	return b.balance(now) >= 1-1e-9 // five fifths are a whole
}

// take returns as much of rest as there is, and reduces rest by that.
func take(rest *float64, available float64) float64 {
	taken := max(0, min(*rest, available))
	*rest -= taken
	return taken
}

func (b *ratioBudget) Refund() { b.returned.Add(1) }

func (b *ratioBudget) Balance(now time.Time) float64 {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.balance(now)
}

// balance needs mu.
func (b *ratioBudget) balance(now time.Time) float64 {
	b.look(now)
	return b.reserve + b.floor + max(0, b.earned-b.spent)
}

// look needs mu.
func (b *ratioBudget) look(now time.Time) {
	if !b.looked && time.Since(now).Abs() > b.settings.Window {
		b.restart(now)
	}
	b.looked = true
	b.settle(now)
}

// restart needs mu. It lets the time of the budget begin at now, on the caller's clock.
// All calls so far count as made at that time, whatever Deposit made of them by the real
// clock; nothing was spent yet.
func (b *ratioBudget) restart(now time.Time) {
	b.epoch, b.last, b.newest, b.seen = now, 0, 0, 0
	b.steps, b.earned = [ratioSteps + 1]float64{}, 0
	b.due.Store(neverDue)
}

// settle needs mu. It brings the tokens up to date: it drops the earnings older than a
// window, and adds what time, returned tokens and calls have brought since the last look.
// Returned tokens come before calls: a retry that succeeds returns its token, then earns.
func (b *ratioBudget) settle(now time.Time) {
	total := b.calls.sum() // before returned, because Deposit writes that first
	calls := total - b.seen
	b.seen = total
	own := b.due.Load() != neverDue
	from, at := b.last, now.Sub(b.epoch)
	if own && at < from-b.settings.Window {
		b.epoch = now.Add(-from) // time goes on from here, in or after a bubble of testing/synctest
	}
	at = max(from, at) // the clock may have been read before another goroutine's look
	b.last = at
	b.advance(int64(at / b.step))
	b.floor = min(b.settings.fullFloor(), b.floor+b.settings.MinPerSecond*(at-from).Seconds())
	if returned := b.returned.Swap(0); returned > 0 {
		b.giveBack(float64(returned))
	}
	if own {
		// All but a few of the calls came before the look was due.
		if early := calls - maxUnseen; early > 0 && at > from+b.step {
			b.earn(early, from, from+b.step)
			calls -= early
		}
		b.dueAfter(now)
	}
	b.earn(calls, from, at)
}

// advance needs mu. It makes the step of that number the newest.
func (b *ratioBudget) advance(newest int64) {
	if newest == b.newest {
		return
	}
	for n := max(b.newest+1, newest-ratioSteps); n <= newest; n++ {
		s := b.at(n)
		b.spent = max(0, b.spent-*s)
		*s = 0
	}
	b.newest = newest
	b.earned = 0 // added up anew, so that no rounding error stays
	for _, earned := range b.steps {
		b.earned += earned
	}
	b.spent = min(b.spent, b.earned)
}

// giveBack needs mu. It adds returned tokens, in the reverse order of Withdraw.
func (b *ratioBudget) giveBack(tokens float64) {
	b.reserve += take(&tokens, b.settings.Reserve-b.reserve)
	b.floor += take(&tokens, b.settings.fullFloor()-b.floor)
	b.spent -= take(&tokens, b.spent)
}

// earn needs mu. It adds the earnings of calls that were spread evenly between from and
// to. The first of them fill the reserve, and earnings older than the window are gone.
func (b *ratioBudget) earn(calls int64, from, to time.Duration) {
	earnings := float64(calls) * b.settings.Ratio
	if earnings <= 0 {
		return
	}
	rest := earnings
	b.reserve += take(&rest, b.settings.Reserve-b.reserve)
	from += time.Duration(float64(to-from) * (1 - rest/earnings))
	for n := max(int64(from/b.step), b.newest-ratioSteps, 0); n <= int64(to/b.step); n++ {
		share := 1.0
		if to > from {
			share = float64(min(to, b.begin(n+1))-max(from, b.begin(n))) / float64(to-from)
		}
		*b.at(n) += rest * share
		b.earned += rest * share
	}
}

func (b *ratioBudget) begin(number int64) time.Duration { return time.Duration(number) * b.step }
func (b *ratioBudget) at(number int64) *float64         { return &b.steps[number%int64(len(b.steps))] }

// counterCells is the number of cells of a stripedCounter, a power of two.
const counterCells = 16

// A stripedCounter counts without a lock, and without cores fighting over a cache line:
// each goroutine has a cell, chosen by the address of its stack. That takes a third of
// the time of choosing a cell at random, and the line stays with the core.
type stripedCounter struct {
	cells [counterCells]struct {
		n atomic.Int64
		_ [56]byte
	}
}

// add returns the new count of the goroutine's cell.
func (c *stripedCounter) add() int64 {
	var here byte
	stack := uint64(uintptr(unsafe.Pointer(&here))) >> 11 // stacks are 2 KiB or more
	return c.cells[stack*0x9E3779B97F4A7C15>>60].n.Add(1) // spread, because stacks come in steps
}

func (c *stripedCounter) sum() (total int64) {
	for i := range c.cells {
		total += c.cells[i].n.Load()
	}
	return total
}
