// Package window holds the tokens of a retry budget: a share of what happened within a sliding window of time.
package window

import (
	"math"
	"sync"
	"sync/atomic"
	"time"

	"github.com/grpcretry/grpcretry/internal/striped"
)

// Settings are those of [Tokens]; grpcretry.NewRatioBudget documents them. Here a zero is a zero, and no
// default.
type Settings struct {
	Ratio        float64       // tokens earned by an answered call
	Reserve      float64       // tokens that do not expire
	MinPerSecond float64       // tokens added by time
	Window       time.Duration // how long earnings last, at least 1 ms
}

// Floor returns the number of tokens that MinPerSecond can gather.
func (s Settings) Floor() float64 { return s.MinPerSecond * s.Window.Seconds() }

// steps is the number of steps in a window.
const steps = 20

// Tokens are safe for concurrent use. Answered calls earn them, retries take them, and some retries return them.
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
type Tokens struct {
	settings Settings      // set by New, then only read
	step     time.Duration // set by New, then only read

	calls    striped.Counter // answered calls
	returned atomic.Int64    // tokens returned since the last look
	due      atomic.Int64    // the time since Origin when Earn should look

	mu      sync.Mutex         // held from the check to the take: two retries cannot both take the last token
	looked  bool               // guarded by mu; Take or Balance was called
	epoch   time.Time          // guarded by mu; the start of step 0
	last    time.Duration      // guarded by mu; the time of the latest look, since the epoch
	newest  int64              // guarded by mu; the number of the step of the latest look
	seen    int64              // guarded by mu; calls that have earned their share
	reserve float64            // guarded by mu
	floor   float64            // guarded by mu
	ring    [steps + 1]float64 // guarded by mu; earnings by step: the current step and the window before it
	earned  float64            // guarded by mu; the sum of the ring
	spent   float64            // guarded by mu; the part of earned that was spent, which is its oldest
}

// New returns tokens with a full reserve and a full floor.
func New(s Settings) *Tokens {
	t := &Tokens{
		settings: s,
		step:     s.Window / steps,
		epoch:    time.Now(),
		reserve:  s.Reserve,
		floor:    s.Floor(),
	}
	t.expectLook()
	return t
}

// EmptyReserve makes the reserve empty at the start. It is called before the first use.
func (t *Tokens) EmptyReserve() { t.reserve = 0 }

// Return gives back the token of a retry. A retry that also earns returns its token first.
func (t *Tokens) Return() { t.returned.Add(1) }

// Earn counts an answered call, which started at a time since Origin; 0 means that it ends now. It takes no lock. A call that
// started after a look is due takes it, so those that are not seen yet belong to the step before. Calls that take long may end
// after it, and would let the looks lag behind; so one of lookEvery calls reads the clock, too. So do the first calls after a look
// that started before its step, or whose start is not known: a client that makes few calls, or slow ones, has each of them dated.
func (t *Tokens) Earn(start time.Duration) {
	n, due := t.calls.Add(), t.due.Load()
	if n%lookEvery == 0 || n < lookEvery && (start == 0 || int64(start) < due-int64(t.step)) || start != 0 && int64(start) >= due {
		t.lookIfDue()
	}
}

const lookEvery = 16

// neverDue is the value of due in tokens that use their caller's clock.
const neverDue = math.MaxInt64

// Origin is a time to count from: that needs only the monotonic clock.
var Origin = time.Now()

// expectLook makes the next look by Earn due when the step of the latest look is over. The caller holds mu.
func (t *Tokens) expectLook() { t.due.Store(int64(t.epoch.Sub(Origin) + t.stepStart(t.newest+1))) }

// lookIfDue takes a look, before the call that has just been counted, if a step has passed since the last one, or if the clock
// has gone far back. It does nothing if the lock is taken, because the lock's holder looks.
func (t *Tokens) lookIfDue() {
	due := t.due.Load()
	early := time.Duration(due) - time.Since(Origin)
	if due == neverDue || early > 0 && early < t.settings.Window || !t.mu.TryLock() {
		return
	}
	defer t.mu.Unlock()
	if t.due.Load() == due { // otherwise another goroutine has looked in the meantime
		t.settle(time.Now(), 1)
	}
}

// Whole is a little less than one token, because five additions of 0.2 may sum to just under 1.
const Whole = 1 - 1e-9

// Take takes a token at now. It reports whether there was a whole one.
func (t *Tokens) Take(now time.Time) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.balance(now) < Whole {
		return false
	}
	rest := 1.0
	t.spent += take(&rest, t.earned-t.spent)
	t.floor -= take(&rest, t.floor)
	t.reserve -= take(&rest, t.reserve)
	return true
}

// take reduces rest by as much as is available, and returns how much that is.
func take(rest *float64, available float64) float64 {
	if available > *rest { // not min and max, which take longer because of NaN
		available = *rest
	} else if available < 0 {
		available = 0
	}
	*rest -= available
	return available
}

// Balance returns the number of tokens at now.
func (t *Tokens) Balance(now time.Time) float64 {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.balance(now)
}

// balance returns the number of tokens at now. The caller holds mu.
func (t *Tokens) balance(now time.Time) float64 {
	t.look(now)
	return t.reserve + t.floor + max(0, t.earned-t.spent)
}

// look brings the tokens up to date, on the clock of its caller. The caller holds mu.
func (t *Tokens) look(now time.Time) {
	if !t.looked && time.Since(now).Abs() > t.settings.Window {
		t.restart(now)
	}
	t.looked = true
	t.settle(now, 0)
}

// restart makes the time start at now, on the caller's clock. All calls so far count as
// made at that time, although Earn has counted them by the real clock; nothing has been spent
// yet. The caller holds mu.
func (t *Tokens) restart(now time.Time) {
	t.epoch, t.last, t.newest, t.seen = now, 0, 0, 0
	t.ring, t.earned = [steps + 1]float64{}, 0
	t.due.Store(neverDue)
}

// settle brings the tokens up to date: it drops the earnings that are older than a window, and
// adds those from time, returned tokens and calls since the last look. Returned tokens come before
// calls, because a retry that succeeds first returns its token and then earns. So many calls as after
// says have been counted since now. The caller holds mu.
func (t *Tokens) settle(now time.Time, after int64) {
	total := t.calls.Sum() - after // read before returned, because a retry that does both returns first
	calls := max(0, total-t.seen)  // another look may have seen the call that comes after
	t.seen += calls
	own := t.due.Load() != neverDue
	step, from, at := t.newest, t.last, min(now.Sub(t.epoch), math.MaxInt64-t.step) // so that the next step has a start
	if own && at < from-t.settings.Window {
		t.epoch = now.Add(-from) // time continues from here, inside or after a bubble of testing/synctest
	}
	at = max(from, at) // the clock may have been read before another goroutine's look
	t.last = at
	if at >= t.stepStart(step+1) {
		t.advance(int64(at / t.step))
	}
	t.floor = min(t.settings.Floor(), t.floor+t.settings.MinPerSecond*(at-from).Seconds())
	if returned := t.returned.Swap(0); returned > 0 {
		t.giveBack(float64(returned))
	}
	if own {
		t.expectLook()
		at = min(at, t.stepStart(step+1)) // the calls came before a look was due
	}
	t.earn(calls, step, from, at)
}

// advance makes the step with the number newest, which is a later one, the newest. The caller holds mu.
func (t *Tokens) advance(newest int64) {
	for n := max(t.newest+1, newest-steps); n <= newest; n++ {
		s := t.at(n)
		t.spent = max(0, t.spent-*s)
		*s = 0
	}
	t.newest = newest
	t.earned = 0 // summed up again, so that no rounding error stays
	for _, earned := range t.ring {
		t.earned += earned
	}
	t.spent = min(t.spent, t.earned)
}

// giveBack adds returned tokens, in the reverse order of Take. The caller holds mu.
func (t *Tokens) giveBack(tokens float64) {
	t.reserve += take(&tokens, t.settings.Reserve-t.reserve)
	t.floor += take(&tokens, t.settings.Floor()-t.floor)
	t.spent -= take(&tokens, t.spent)
}

// earn adds the earnings of calls that were spread evenly between from, which is in step, and to. The first earnings
// fill the reserve, and those older than the window are dropped. The caller holds mu.
func (t *Tokens) earn(calls, step int64, from, to time.Duration) {
	earnings := float64(calls) * t.settings.Ratio
	if earnings <= 0 {
		return
	}
	rest := earnings
	t.reserve += take(&rest, t.settings.Reserve-t.reserve)
	from += time.Duration(float64(to-from) * (1 - rest/earnings))
	for n := max(step, t.newest-steps); t.stepStart(n) <= to; n++ {
		share := 1.0
		if to > from {
			share = max(0, float64(min(to, t.stepStart(n+1))-max(from, t.stepStart(n)))/float64(to-from))
		}
		*t.at(n) += rest * share
		t.earned += rest * share
	}
}

// stepStart returns when a step starts, since the epoch.
func (t *Tokens) stepStart(number int64) time.Duration { return time.Duration(number) * t.step }

// at returns the earnings of a step.
func (t *Tokens) at(number int64) *float64 { return &t.ring[number%int64(len(t.ring))] }
