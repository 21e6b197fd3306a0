package explore

import (
	"fmt"
	"math"
	"sync"
	"time"

	"github.com/grpcretry/grpcretry"
	"github.com/grpcretry/grpcretry/internal/inside"
)

// A comparedBudget asks a budget of the library, and expects of it what a model says. If the two differ, it panics,
// which an exploration reports.
type comparedBudget struct {
	mu       sync.Mutex
	budget   grpcretry.Budget
	model    budgetModel
	disagree func(string)
}

// A budgetModel says what the documentation of a budget says, in the simplest way.
type budgetModel interface {
	deposit(o grpcretry.Outcome)
	withdraw() bool
	balance() float64
}

// Deposit implements [grpcretry.Budget].
func (b *comparedBudget) Deposit(o grpcretry.Outcome) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.budget.Deposit(o)
	b.model.deposit(o)
	b.compare(time.Now(), fmt.Sprintf("attempt %d, which has %s,", o.Attempt, resultNames[o.Result]))
}

var resultNames = map[grpcretry.Result]string{grpcretry.Succeeded: "succeeded", grpcretry.Answered: "been answered",
	grpcretry.Failed: "failed",
	grpcretry.Unsent: "not been sent", grpcretry.Ignored: "been ignored"}

// Withdraw implements [grpcretry.Budget].
func (b *comparedBudget) Withdraw(now time.Time) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	got, want := b.budget.Withdraw(now), b.model.withdraw()
	if got != want {
		b.disagree(fmt.Sprintf("%v: Withdraw = %v, want %v, with a balance of %v", b.budget, got, want, b.model.balance()))
	}
	b.compare(now, "Withdraw")
	return want
}

// Balance implements [grpcretry.Budget].
func (b *comparedBudget) Balance(now time.Time) float64 {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.budget.Balance(now)
}

// compare compares the balances. The caller holds mu.
func (b *comparedBudget) compare(now time.Time, after string) {
	if got, want := b.budget.Balance(now), b.model.balance(); math.Abs(got-want) > 1e-6 {
		b.disagree(fmt.Sprintf("%v: after %s the balance is %v, want %v", b.budget, after, got, want))
	}
}

// A ratioModel is a ratio budget whose earnings do not expire.
type ratioModel struct{ ratio, full, reserve, earned, spent float64 }

func (m *ratioModel) deposit(o grpcretry.Outcome) {
	late := inside.IsLate(o)
	succeeded := o.Result == grpcretry.Succeeded && !late
	if o.Attempt > 1 && (o.Result == grpcretry.Unsent || succeeded && !o.Hedge) {
		m.giveBack()
	}
	if !succeeded && (late || o.Result != grpcretry.Answered) {
		return
	}
	toReserve := min(m.ratio, m.full-m.reserve)
	m.reserve += toReserve
	m.earned += m.ratio - toReserve
}

func (m *ratioModel) withdraw() bool {
	if m.balance() < 1 {
		return false
	}
	fromEarned := min(1, m.earned-m.spent)
	m.spent += fromEarned
	m.reserve -= 1 - fromEarned
	return true
}

func (m *ratioModel) giveBack() {
	toReserve := min(1, m.full-m.reserve)
	m.reserve += toReserve
	m.spent -= min(1-toReserve, m.spent)
}

func (m *ratioModel) balance() float64 { return m.reserve + m.earned - m.spent }

// A throttleModel is the throttle of gRFC A6.
type throttleModel struct{ full, gain, tokens float64 }

func (m *throttleModel) deposit(o grpcretry.Outcome) {
	switch o.Result {
	case grpcretry.Succeeded:
		m.tokens = min(m.full, m.tokens+m.gain)
	case grpcretry.Failed:
		m.tokens = max(0, m.tokens-1)
	}
}

func (m *throttleModel) withdraw() bool { return m.tokens > m.full/2 }

func (m *throttleModel) balance() float64 {
	return math.Ceil(max(0, math.Round(1000*(m.tokens-m.full/2))/1000))
}

// compared returns options with a budget that is compared with its model.
func compared(budget grpcretry.Budget, err error, model budgetModel) []grpcretry.Option {
	if err != nil {
		panic(err)
	}
	return []grpcretry.Option{grpcretry.WithBudget(&comparedBudget{budget: budget, model: model, disagree: func(why string) { panic(why) }})}
}
