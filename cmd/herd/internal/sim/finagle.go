package sim

import (
	"sync"
	"time"

	"github.com/grpcretry/grpcretry"
)

// finagleSteps is the number of steps in a window.
const finagleSteps = 20

// A finagleBudget is the RetryBudget of Finagle and Linkerd, for comparison: the calls of a window
// earn a share of their number, whether they succeed or not, and time earns a floor. A retry that
// succeeds costs as much as any other.
type finagleBudget struct {
	ratio, floor float64
	step         time.Duration

	mu     sync.Mutex
	last   time.Time                 // guarded by mu; the latest look
	begin  time.Time                 // guarded by mu; of the newest step
	unseen float64                   // guarded by mu; calls since the latest look
	steps  [finagleSteps + 1]float64 // guarded by mu; earned less spent, the newest first
}

func newFinagleBudget(ratio, minPerSecond float64, window time.Duration) *finagleBudget {
	return &finagleBudget{ratio: ratio, floor: minPerSecond * window.Seconds(), step: window / finagleSteps}
}

// Deposit counts first attempts, whatever their result, and returns the retries that reached no server.
func (b *finagleBudget) Deposit(o grpcretry.Outcome) {
	b.mu.Lock()
	defer b.mu.Unlock()
	switch {
	case o.Attempt <= 1:
		b.unseen++
	case o.Result == grpcretry.Unsent:
		b.steps[0]++
	}
}

// Withdraw takes one retry if there is one.
func (b *finagleBudget) Withdraw(now time.Time) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.balance(now) < 1-1e-9 {
		return false
	}
	b.steps[0]--
	return true
}

// Balance returns the number of retries that could be withdrawn now.
func (b *finagleBudget) Balance(now time.Time) float64 {
	b.mu.Lock()
	defer b.mu.Unlock()
	return max(0, b.balance(now))
}

// balance returns the same. The caller holds mu.
func (b *finagleBudget) balance(now time.Time) float64 {
	b.look(now)
	all := b.floor
	for _, one := range b.steps {
		all += one
	}
	return all
}

// look drops steps older than the window, and spreads the calls since the latest look evenly over
// the time between. The caller holds mu.
func (b *finagleBudget) look(now time.Time) {
	if b.last.IsZero() {
		b.last, b.begin = now, now
	}
	if !now.After(b.last) {
		now = b.last
	}
	from, perSecond := b.last, 0.0
	if gap := now.Sub(from).Seconds(); gap > 0 {
		perSecond = b.unseen * b.ratio / gap
	} else {
		b.steps[0] += b.unseen * b.ratio
	}
	for next := b.begin.Add(b.step); !now.Before(next); next = b.begin.Add(b.step) {
		b.steps[0] += perSecond * next.Sub(from).Seconds()
		copy(b.steps[1:], b.steps[:])
		b.steps[0] = 0
		b.begin, from = next, next
		if behind := now.Sub(next) - (finagleSteps+2)*b.step; behind > 0 { // that is all outside the window
			skip := behind / b.step * b.step
			b.steps = [finagleSteps + 1]float64{}
			b.begin = b.begin.Add(skip)
			from = b.begin
		}
	}
	b.steps[0] += perSecond * now.Sub(from).Seconds()
	b.last, b.unseen = now, 0
}
