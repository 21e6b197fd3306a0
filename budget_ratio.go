package grpcretry

import (
	"fmt"
	"math"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"
)

// RatioBudget are the settings of [NewRatioBudget]. The zero value means 20 % of
// calls plus 10 a second, over 10 s; in any other value Ratio and MinPerSecond are
// taken as they are.
type RatioBudget struct {
	Ratio        float64       // retries per call, at least 0: 0.2 is one retry for five calls
	MinPerSecond float64       // retries per second on top, at least 0, so that a quiet client can retry too
	Window       time.Duration // how long a call counts, at least 1 ms; 0 means 10 s
}

var defaultRatioBudget = RatioBudget{Ratio: 0.2, MinPerSecond: 10, Window: 10 * time.Second}

// NewRatioBudget allows retries as a share of the calls of the last Window, plus a
// floor for clients with little traffic. The idea is Finagle's RetryBudget.
//
// From the first call on, with every attempt failing,
//
//	attempts ≤ calls × (1 + Ratio) + MinPerSecond × (time + Window)
//
// and a span that begins later may spend, besides, what the calls of the Window before
// it deposited.
//
// The balance is MinPerSecond × Window, plus Ratio for each first attempt that ended
// within the window, minus the retries taken within it. A good hour is not saved up
// for a bad minute. A product MinPerSecond × Window below 1 gives no floor.
//
// Deposit takes no lock and reads no clock. Deposits made between two looks (Withdraw
// or Balance) are taken as spread evenly over the time between them, and they age in
// steps of a twentieth of the window. Looked at no less than once per step, the
// share of the calls in the balance is therefore within Ratio × (the calls of three
// steps) of an exact sliding window; a retry counts for up to a step longer than the
// window. The bound above holds whatever the looks.
func NewRatioBudget(s RatioBudget) (Budget, error) {
	if s == (RatioBudget{}) {
		s = defaultRatioBudget
	}
	s.Window = orDefault(s.Window, defaultRatioBudget.Window)
	if err := s.check(); err != nil {
		return nil, fmt.Errorf("grpcretry: NewRatioBudget: %w", err)
	}
	return &ratioBudget{
		ratio:   s.Ratio,
		reserve: s.MinPerSecond * s.Window.Seconds(),
		step:    s.Window / ratioSteps,
		epoch:   time.Now(),
	}, nil
}

func (s RatioBudget) check() error {
	if !(s.Ratio >= 0) || math.IsInf(s.Ratio, 0) { // NaN too
		return fmt.Errorf("RatioBudget.Ratio is %v, want a number of at least 0", s.Ratio)
	}
	if !(s.MinPerSecond >= 0) || math.IsInf(s.MinPerSecond, 0) {
		return fmt.Errorf("RatioBudget.MinPerSecond is %v, want a number of at least 0", s.MinPerSecond)
	}
	if s.Window < time.Millisecond {
		return fmt.Errorf("RatioBudget.Window is %v, want at least 1ms, or 0 for %v", s.Window, defaultRatioBudget.Window)
	}
	return nil
}

// ratioSteps is the number of steps in a window.
const ratioSteps = 20

type ratioBudget struct {
	ratio, reserve float64       // set by NewRatioBudget, then only read
	step           time.Duration // likewise

	calls stripedCounter

	mu     sync.Mutex                // held to take a retry and to judge by it: two cannot both win the last
	looked bool                      // guarded by mu
	epoch  time.Time                 // guarded by mu; where step 0 begins
	last   time.Duration             // guarded by mu; the latest look, since the epoch
	newest int64                     // guarded by mu; the number of the step of the latest look
	seen   int64                     // guarded by mu; calls that are already in steps
	steps  [ratioSteps + 1]ratioStep // guarded by mu; a ring: the step under way and a whole window before it
	window ratioStep                 // guarded by mu; the sum of the steps
}

// String is for who reads a policy: "ratio budget: 20 % of calls plus 10 a second, over 10s".
func (b *ratioBudget) String() string {
	window := b.step * ratioSteps
	return fmt.Sprintf("ratio budget: %v %% of calls plus %v a second, over %v", round(100*b.ratio), round(b.reserve/window.Seconds()), window)
}

// round cuts what floating point adds to a number that somebody wrote.
func round(x float64) float64 { return math.Round(x*1e6) / 1e6 }

// ratioStep holds what happened in one step. A retry is never in an older step than a
// deposit that paid for it, and both leave the ring by steps: so no deposit is used
// twice, and no part of the reserve twice within a window.
type ratioStep struct{ deposited, withdrawn float64 }

func (b *ratioBudget) Deposit(o Outcome) {
	if o.Attempt <= 1 {
		b.calls.add()
	}
}

func (b *ratioBudget) Withdraw(now time.Time) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.balance(now) < 1-1e-9 { // five fifths are a whole
		return false
	}
	b.add(b.newest, ratioStep{withdrawn: 1})
	return true
}

// Refund takes back the oldest retry in the window. Which one was refunded nobody knows;
// so the retries that were sent count for no less time than they must. Only if the
// refunded one has left the window, after a long pushback, another counts for less.
func (b *ratioBudget) Refund() {
	b.mu.Lock()
	defer b.mu.Unlock()
	for n := b.oldest(); n <= b.newest; n++ {
		if b.at(n).withdrawn >= 1 {
			b.add(n, ratioStep{withdrawn: -1})
			return
		}
	}
}

func (b *ratioBudget) Balance(now time.Time) float64 {
	b.mu.Lock()
	defer b.mu.Unlock()
	return max(0, b.balance(now))
}

// balance needs mu.
func (b *ratioBudget) balance(now time.Time) float64 {
	b.look(now)
	return b.reserve + b.ratio*b.window.deposited - b.window.withdrawn
}

// look needs mu. It lets steps older than a window go and puts the calls since the
// last look into the steps of that time.
func (b *ratioBudget) look(now time.Time) {
	if !b.looked && time.Since(now).Abs() > ratioSteps*b.step {
		b.epoch = now // on another clock, as in a test
	}
	b.looked = true
	total := b.calls.sum()
	calls := float64(total - b.seen)
	b.seen = total
	at := max(b.last, now.Sub(b.epoch)) // it may be read before another goroutine's, and used after it
	if at < b.begin(b.newest+1) {
		b.last = at
		b.add(b.newest, ratioStep{deposited: calls})
		return
	}
	if gap, window := at-b.last, ratioSteps*b.step; gap > 2*window {
		calls *= float64(window) / float64(gap)
		b.last = at - window
	}
	b.advance(int64(at / b.step))
	b.spread(calls, b.last, at)
	b.last = at
}

// advance makes the step of that number the newest.
func (b *ratioBudget) advance(newest int64) {
	for n := max(b.newest+1, newest-ratioSteps); n <= newest; n++ {
		*b.at(n) = ratioStep{}
	}
	b.newest = newest
	b.window = ratioStep{} // added up anew, so that no rounding stays
	for _, s := range b.steps {
		b.window.deposited += s.deposited
		b.window.withdrawn += s.withdrawn
	}
}

// spread deposits calls evenly between from and to. What falls before the window is
// gone.
func (b *ratioBudget) spread(calls float64, from, to time.Duration) {
	for n := max(int64(from/b.step), b.oldest()); n <= b.newest; n++ {
		share := min(to, b.begin(n+1)) - max(from, b.begin(n))
		b.add(n, ratioStep{deposited: calls * float64(share) / float64(to-from)})
	}
}

// add changes a step, which is in the window.
func (b *ratioBudget) add(number int64, change ratioStep) {
	for _, s := range [...]*ratioStep{b.at(number), &b.window} {
		s.deposited += change.deposited
		s.withdrawn += change.withdrawn
	}
}

func (b *ratioBudget) begin(number int64) time.Duration { return time.Duration(number) * b.step }
func (b *ratioBudget) oldest() int64                    { return max(0, b.newest-ratioSteps) }
func (b *ratioBudget) at(number int64) *ratioStep       { return &b.steps[number%int64(len(b.steps))] }

// A stripedCounter counts without a lock, and without cores fighting over a cache line:
// each goroutine has a cell, chosen by where its stack is. That is a third of the cost of
// a random cell, and the line stays with the core.
type stripedCounter struct {
	cells [16]struct {
		n atomic.Int64
		_ [56]byte
	}
}

func (c *stripedCounter) add() {
	var here byte
	stack := uint64(uintptr(unsafe.Pointer(&here))) >> 11 // stacks are 2 KiB or more
	c.cells[stack*0x9E3779B97F4A7C15>>60].n.Add(1)        // spread, as stacks come in steps
}

func (c *stripedCounter) sum() (total int64) {
	for i := range c.cells {
		total += c.cells[i].n.Load()
	}
	return total
}
