package grpcretry

import (
	"cmp"
	"fmt"
	"math"
	"time"

	"github.com/grpcretry/grpcretry/internal/window"
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
// Each [Outcome] that is Succeeded or Answered, before the attempt timeout, earns Ratio. Earnings first fill the
// reserve until it holds Reserve again; the rest can be spent for the length of the Window, so a
// good hour is not saved up for a bad minute. The reserve is full at the start and is not
// refilled by time, because such refills add up in a fleet of clients. MinPerSecond adds such a
// refill: a floor that holds up to MinPerSecond × Window, is full at the start, and gains
// MinPerSecond each second.
//
// A retry costs one token. The tokens that expire first are spent first: the oldest earnings, then
// the floor, then the reserve. The token is returned if the retry reaches no server or succeeds,
// because the budget pays only for wasted retries. For this purpose, a stream's retry has succeeded when its first message
// commits the stream, however the stream ends. A hedge that succeeds returns nothing, and neither does a
// retry that succeeds after the attempt timeout: an overloaded server answers every call late. A
// returned token is available immediately. It fills the reserve, then the floor, then replaces the
// newest earnings that were spent, which expire as if they had never been spent. If nothing is
// missing, because calls were answered in the meantime, the token is dropped. While a retry is in flight its token is out, so a client
// that makes few calls but bursts of slow ones needs a Reserve of about the size of a burst × the latency ÷ the time that is left after
// an outage.
//
// If everything fails from the first call on,
//
//	attempts ≤ calls + Reserve + MinPerSecond × (seconds + Window)
//
// If failures start later, the earnings of the preceding Window are added. They include tokens
// that are returned later for retries sent before.
//
// Deposit takes no lock. Earnings age in steps of a twentieth of the Window and last for up to one step
// longer than the Window. A call that succeeds on its first attempt counts from its start, so that it need
// not read the clock again: what a slow call earns may expire earlier by up to the time that the call took, unless other calls were
// answered meanwhile.
//
// A program with its own clock, such as a simulation, calls Balance when its time starts: if the
// first time passed to the budget is more than a Window away from the real time, the budget never
// reads the real clock. The calls between two looks (Withdraw or Balance) are then treated as
// spread evenly over the time between them.
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
	return &ratioBudget{settings: s, tokens: window.New(window.Settings(s))}
}

// withDefaults replaces the zeros that stand for a default.
func (s RatioBudget) withDefaults() RatioBudget {
	s.Ratio = cmp.Or(s.Ratio, defaultRatioBudget.Ratio)
	s.Reserve = cmp.Or(s.Reserve, defaultRatioBudget.Reserve)
	s.Window = cmp.Or(s.Window, defaultRatioBudget.Window)
	return s
}

func (s RatioBudget) check() error {
	for _, field := range []struct {
		name  string
		value float64
	}{{"Ratio", s.Ratio}, {"Reserve", s.Reserve}, {"MinPerSecond", s.MinPerSecond}} {
		if !(field.value >= 0) || math.IsInf(field.value, 0) { // NaN too
			return fmt.Errorf("RatioBudget.%s is %v, want a finite number of at least 0", field.name, field.value)
		}
	}
	if s.Window < time.Millisecond {
		return fmt.Errorf("RatioBudget.Window is %v, want at least 1ms, or 0 for %v", s.Window, defaultRatioBudget.Window)
	}
	if math.IsInf(window.Settings(s).Floor(), 0) {
		return fmt.Errorf("RatioBudget.MinPerSecond is %v, too much for a Window of %v", s.MinPerSecond, s.Window)
	}
	return nil
}

// A ratioBudget implements [NewRatioBudget].
type ratioBudget struct {
	settings RatioBudget // never changed
	tokens   *window.Tokens
}

// perTargetRatio returns a budget with a ratio budget for each target; its settings are complete.
func perTargetRatio(s RatioBudget) *perTarget {
	return newPerTarget(func() Budget { return newRatioBudget(s) }, s)
}

// String describes the budget to readers of a policy, for example
// "ratio budget: 20% of answered calls, a reserve of 3, over 10s".
func (b *ratioBudget) String() string {
	s, floor := b.settings, ""
	if s.MinPerSecond > 0 {
		floor = fmt.Sprintf(", plus %v a second", round(s.MinPerSecond))
	}
	return fmt.Sprintf("ratio budget: %v%% of answered calls, a reserve of %v%s, over %v",
		round(100*s.Ratio), round(s.Reserve), floor, s.Window)
}

// round removes the digits that floating point adds to a decimal fraction.
func round(x float64) float64 { return math.Round(x*1e6) / 1e6 }

func (b *ratioBudget) Deposit(o Outcome) {
	if o.Attempt > 1 && (o.Result == Unsent || o.Result == Succeeded && !o.late && !o.Hedge) {
		b.tokens.Return()
	}
	if o.answered() {
		b.tokens.Earn(0)
	}
}

func (b *ratioBudget) Withdraw(now time.Time) bool   { return b.tokens.Take(now) }
func (b *ratioBudget) Balance(now time.Time) float64 { return b.tokens.Balance(now) }
