package grpcretry

import (
	"fmt"
	"math"
	"sync"
	"sync/atomic"
	"time"

	"github.com/grpcretry/grpcretry/internal/striped"
)

// RatioBudget holds the settings for [NewRatioBudget] and [WithRatioBudget]. A zero field means its
// default; [Nothing] stands for a Ratio or Reserve of zero. No field may be negative.
type RatioBudget struct {
	Ratio        float64       // retries earned by an answered call; the default, 0.2, is one retry for five calls
	Reserve      float64       // retries that do not expire, full at the start and refilled first; default 3
	MinPerSecond float64       // additional retries per second, whatever the traffic; default none
	Window       time.Duration // how long earned retries can be spent, at least 1 ms; default 10 s
}

// Nothing is a [RatioBudget]'s Ratio or Reserve of zero, because a zero field means the default:
// RatioBudget{Reserve: Nothing} has no retries at the start.
const Nothing float64 = math.SmallestNonzeroFloat64 // too little to make a difference, should it meet arithmetic

var defaultRatioBudget = RatioBudget{Ratio: 0.2, Reserve: 3, Window: 10 * time.Second}

// NewRatioBudget returns a budget that limits retries to a share of the calls that the server
// answered. An outage earns nothing, so while it lasts clients soon make one attempt per call.
// Invalid settings are an error.
//
// Each [Outcome] that is Succeeded or Answered, and not Late, earns Ratio. Earnings first fill the
// reserve until it holds Reserve again; the rest can be spent for the length of the Window, so a
// good hour is not saved up for a bad minute. The reserve is full at the start and is not
// refilled by time, because such refills add up in a fleet of clients. MinPerSecond adds such a
// refill: a floor that holds up to MinPerSecond × Window, is full at the start, and gains
// MinPerSecond each second.
//
// A retry costs one token. The tokens that expire first are spent first: the oldest earnings, then
// the floor, then the reserve. The token is returned if the retry reaches no server or succeeds,
// because the budget pays only for wasted retries; a hedge that succeeds returns nothing. A
// returned token is available immediately. It fills the reserve, then the floor, then replaces the
// newest earnings that were spent, which expire as if they had never been spent. If nothing is
// missing, because calls were answered in the meantime, the token is dropped.
//
// If everything fails from the first call on,
//
//	attempts ≤ calls + Reserve + MinPerSecond × (seconds + Window)
//
// If failures start later, the earnings of the preceding Window are added. They include tokens
// that are returned later for retries sent before.
//
// Deposit takes no lock, and only every sixteenth Deposit reads the clock. Earnings age in steps of
// a twentieth of the Window and last for up to one step longer than the Window.
// Compared with an exact sliding window, the earnings are therefore off by at most
// Ratio × (the calls of three steps + 240). The bound above is not affected if
// everything fails from the first call on.
//
// A program with its own clock, such as a simulation, calls Balance when its time starts: if the
// first time passed to the budget is more than a Window away from the real time, the budget never
// reads the real clock. The calls between two looks (Withdraw or Balance) are then treated as
// spread evenly over the time between them, and the error above holds if there is a look in each
// step.
func NewRatioBudget(s RatioBudget) (Budget, error) {
	s = s.withDefaults()
	if err := s.check(); err != nil {
		return nil, fmt.Errorf("grpcretry: NewRatioBudget: %w", err)
	}
	return newRatioBudget(s), nil
}

// newRatioBudget returns a budget with settings that are complete and valid.
func newRatioBudget(s RatioBudget) *ratioBudget {
	for _, field := range []*float64{&s.Ratio, &s.Reserve, &s.MinPerSecond} {
		if *field == Nothing {
			*field = 0
		}
	}
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

// withDefaults replaces the zeros that stand for a default.
func (s RatioBudget) withDefaults() RatioBudget {
	s.Ratio = orDefault(s.Ratio, defaultRatioBudget.Ratio)
	s.Reserve = orDefault(s.Reserve, defaultRatioBudget.Reserve)
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

// fullFloor returns the number of tokens that the floor can hold.
func (s RatioBudget) fullFloor() float64 { return s.MinPerSecond * s.Window.Seconds() }

// ratioSteps is the number of steps in a window.
const ratioSteps = 20

// A ratioBudget implements [NewRatioBudget].
//
// Why the bound holds: a retry takes exactly one token in total, and there are only three sources
// of tokens: answered calls, the time that refills the floor, and retries that return their own
// token. While everything fails, no call is answered, and no retry that was sent returns its
// token. So the retries sent since the first call are at most the tokens at the start, Reserve +
// MinPerSecond × Window, plus MinPerSecond for each second. Neither reserve nor floor holds more
// tokens than its limit, and returned tokens do not make earnings younger. So if failures start
// later, the only additional tokens are the earnings of the preceding window.
//
// There are unspent earnings only while the reserve is full, because earnings and returned tokens
// fill the reserve first and retries empty it last. Without a floor, a returned token therefore
// goes exactly where its retry took it from, if nothing has happened in between.
type ratioBudget struct {
	settings RatioBudget   // set by newRatioBudget, then only read
	step     time.Duration // set by newRatioBudget, then only read

	calls    striped.Counter // answered calls
	returned atomic.Int64    // tokens returned since the last look
	due      atomic.Int64    // the time since the origin when a Deposit should look

	mu      sync.Mutex              // held from the check to the take: two retries cannot both take the last token
	looked  bool                    // guarded by mu; Withdraw or Balance was called
	epoch   time.Time               // guarded by mu; the start of step 0
	last    time.Duration           // guarded by mu; the time of the latest look, since the epoch
	newest  int64                   // guarded by mu; the number of the step of the latest look
	seen    int64                   // guarded by mu; calls that have earned their share
	reserve float64                 // guarded by mu
	floor   float64                 // guarded by mu
	steps   [ratioSteps + 1]float64 // guarded by mu; a ring of earnings: the current step and the window before it
	earned  float64                 // guarded by mu; the sum of steps
	spent   float64                 // guarded by mu; the part of earned that was spent, which is its oldest
}

// perTargetRatio returns a budget with a ratio budget for each target; its settings are complete.
func perTargetRatio(s RatioBudget) *perTarget {
	return newPerTarget(func() Budget { return newRatioBudget(s) }, s)
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

// round removes the digits that floating point adds to a decimal fraction.
func round(x float64) float64 { return math.Round(x*1e6) / 1e6 }

func (b *ratioBudget) Deposit(o Outcome) {
	if o.Attempt > 1 && (o.Result == Unsent || o.Result == Succeeded && !o.Late && !o.Hedge) {
		b.returned.Add(1)
	}
	if !o.answered() {
		return
	}
	if uint64(b.calls.Add())%lookEvery == 0 {
		b.lookIfDue()
	}
}

// In each cell of the counter, one of lookEvery deposits reads the clock. So at most maxUnseen calls
// are counted after a look is due and before it happens.
const (
	lookEvery = 16
	maxUnseen = striped.Cells * (lookEvery - 1)
)

// neverDue is the value of due in a budget that uses its caller's clock.
const neverDue = math.MaxInt64

// dueAfter makes the next look by a Deposit due a step after now. The caller holds mu.
func (b *ratioBudget) dueAfter(now time.Time) { b.due.Store(int64(now.Sub(origin) + b.step)) }

// lookIfDue takes a look if a step has passed since the last one, or if the clock has gone far
// back. It does nothing if the lock is taken, because the lock's holder looks.
func (b *ratioBudget) lookIfDue() {
	due := b.due.Load()
	early := time.Duration(due) - sinceOrigin()
	if due == neverDue || early > 0 && early < b.settings.Window || !b.mu.TryLock() {
		return
	}
	defer b.mu.Unlock()
	if b.due.Load() == due { // otherwise another goroutine has looked in the meantime
		b.settle(time.Now())
	}
}

func (b *ratioBudget) Withdraw(now time.Time) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.balance(now) < wholeToken {
		return false
	}
	rest := 1.0
	b.spent += take(&rest, b.earned-b.spent)
	b.floor -= take(&rest, b.floor)
	b.reserve -= take(&rest, b.reserve)
	return true
}

// take reduces rest by as much as is available, and returns how much that is.
func take(rest *float64, available float64) float64 {
	taken := max(0, min(*rest, available))
	*rest -= taken
	return taken
}

func (b *ratioBudget) Balance(now time.Time) float64 {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.balance(now)
}

// balance returns the number of tokens at now. The caller holds mu.
func (b *ratioBudget) balance(now time.Time) float64 {
	b.look(now)
	return b.reserve + b.floor + max(0, b.earned-b.spent)
}

// look brings the budget up to date, on the clock of its caller. The caller holds mu.
func (b *ratioBudget) look(now time.Time) {
	if !b.looked && time.Since(now).Abs() > b.settings.Window {
		b.restart(now)
	}
	b.looked = true
	b.settle(now)
}

// restart makes the budget's time start at now, on the caller's clock. All calls so far count as
// made at that time, although Deposit has counted them by the real clock; nothing has been spent
// yet. The caller holds mu.
func (b *ratioBudget) restart(now time.Time) {
	b.epoch, b.last, b.newest, b.seen = now, 0, 0, 0
	b.steps, b.earned = [ratioSteps + 1]float64{}, 0
	b.due.Store(neverDue)
}

// settle brings the tokens up to date: it drops the earnings that are older than a window, and
// adds those from time, returned tokens and calls since the last look. Returned tokens come before
// calls, because a retry that succeeds first returns its token and then earns. The caller holds
// mu.
func (b *ratioBudget) settle(now time.Time) {
	total := b.calls.Sum() // read before returned, because Deposit writes returned first
	calls := total - b.seen
	b.seen = total
	own := b.due.Load() != neverDue
	from, at := b.last, now.Sub(b.epoch)
	if own && at < from-b.settings.Window {
		b.epoch = now.Add(-from) // time continues from here, inside or after a bubble of testing/synctest
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

// advance makes the step with the number newest the newest one. The caller holds mu.
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
	b.earned = 0 // summed up again, so that no rounding error stays
	for _, earned := range b.steps {
		b.earned += earned
	}
	b.spent = min(b.spent, b.earned)
}

// giveBack adds returned tokens, in the reverse order of Withdraw. The caller holds mu.
func (b *ratioBudget) giveBack(tokens float64) {
	b.reserve += take(&tokens, b.settings.Reserve-b.reserve)
	b.floor += take(&tokens, b.settings.fullFloor()-b.floor)
	b.spent -= take(&tokens, b.spent)
}

// earn adds the earnings of calls that were spread evenly between from and to. The first earnings
// fill the reserve, and those older than the window are dropped. The caller holds mu.
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
			share = float64(min(to, b.stepStart(n+1))-max(from, b.stepStart(n))) / float64(to-from)
		}
		*b.at(n) += rest * share
		b.earned += rest * share
	}
}

// stepStart returns when a step starts, since the epoch.
func (b *ratioBudget) stepStart(number int64) time.Duration { return time.Duration(number) * b.step }

// at returns the earnings of a step.
func (b *ratioBudget) at(number int64) *float64 { return &b.steps[number%int64(len(b.steps))] }
