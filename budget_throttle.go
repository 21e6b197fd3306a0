package grpcretry

import (
	"fmt"
	"math"
	"sync/atomic"
	"time"
)

// NewThrottle returns a budget that works like retryThrottling in a gRPC service config (gRFC A6
// #throttling-retry-attempts-and-hedged-rpcs). Its token count starts at maxTokens, loses 1 for
// each failed attempt and gains tokenRatio for each successful one, but stays between 0 and
// maxTokens. Retries are allowed while the count is above half of maxTokens.
//
// maxTokens is at least 0.001 and at most 1000, tokenRatio is at least 0.001; other values are an error. Decimals
// beyond the third are ignored in both, as A6 specifies for tokenRatio. A retry itself costs no
// token. A failure that is [Answered] changes nothing, because to A6 it is neither a success nor a
// failure. A throttle that refuses ends the call immediately: nothing waits for it. It takes no lock.
//
// A6 keeps one count for each server: a client of several servers uses NewThrottle within
// [PerTarget].
func NewThrottle(maxTokens, tokenRatio float64) (Budget, error) {
	if !(maxTokens <= 1000) || thousandths(maxTokens) < 1 { // NaN too
		return nil, fmt.Errorf("grpcretry: NewThrottle: maxTokens is %v, want at least 0.001 and at most 1000", maxTokens)
	}
	t := &throttle{full: thousandths(maxTokens), gain: thousandths(min(tokenRatio, maxTokens))}
	if !(tokenRatio > 0) || math.IsInf(tokenRatio, 0) || t.gain < 1 {
		return nil, fmt.Errorf("grpcretry: NewThrottle: tokenRatio is %v, want a finite number of at least 0.001", tokenRatio)
	}
	t.tokens.Store(t.full)
	return t, nil
}

// thousandths returns x in thousandths, cut after the third decimal. It adds a little first, for
// numbers such as 0.29, whose nearest float is just below.
func thousandths(x float64) int64 { return int64(x*1000 + 1e-6) }

type throttle struct {
	full, gain int64        // thousandths of a token; set by NewThrottle, then only read
	tokens     atomic.Int64 // thousandths of a token, 0 … full
}

// String describes the throttle to readers of a policy, for example
// "throttle: 10 tokens, 0.1 for a success".
func (t *throttle) String() string {
	return fmt.Sprintf("throttle: %v tokens, %v for a success", float64(t.full)/1000, float64(t.gain)/1000)
}

func (t *throttle) Deposit(o Outcome) {
	switch o.Result {
	case Succeeded:
		t.add(t.gain)
	case Failed:
		t.add(-1000)
	}
}

func (t *throttle) add(delta int64) {
	for {
		old := t.tokens.Load()
		tokens := min(t.full, max(0, old+delta))
		// If the count is full it is only read, so the cores of a healthy client share it.
		if tokens == old || t.tokens.CompareAndSwap(old, tokens) {
			return
		}
	}
}

func (t *throttle) Withdraw(time.Time) bool { return t.allows() }

func (t *throttle) allows() bool { return 2*t.tokens.Load() > t.full }

// Balance returns how many retries can fail before the next one is refused.
func (t *throttle) Balance(time.Time) float64 {
	return math.Ceil(max(0, float64(t.tokens.Load())-float64(t.full)/2) / 1000)
}
