package bench

import (
	"context"
	"math/rand/v2"
	"testing"
)

// BenchmarkFunction is a call of a function that succeeds immediately.
func BenchmarkFunction(b *testing.B) {
	eachCores(b, func(b *testing.B, repeat repeater) {
		eachFunctionAlternative(b, functionAlternatives, func(a *functionAlternative) func(times int) {
			caller := a.retries(asUsed)
			return repeat(b, func() func() error {
				return caller(callContext(b), func(context.Context) error { return nil })
			})
		})
	})
}

// BenchmarkFunctionRetry is a call of a function that fails once, or three times, and then
// succeeds, without the waits.
func BenchmarkFunctionRetry(b *testing.B) {
	eachRetries(b, func(b *testing.B, retries int64) {
		eachFunctionAlternative(b, functionAlternatives[1:], func(a *functionAlternative) func(times int) {
			unavailable, made := a.failure(), int64(0)
			return serial(b, func() func() error {
				return a.retries(atOnce)(callContext(b), func(context.Context) error {
					made++
					if made%(retries+1) != 0 {
						return unavailable()
					}
					return nil
				})
			})
		})
	})
}

// failure returns a function that makes the error of a failed attempt: one error for all,
// and a mark around it each time if the alternative needs one.
func (a *functionAlternative) failure() func() error {
	err := (&functionAlternative{}).unavailable()
	if a.retryable == nil {
		return func() error { return err }
	}
	return func() error { return a.retryable(err) }
}

func eachFunctionAlternative(b *testing.B, alternatives []functionAlternative, ready func(*functionAlternative) (do func(times int))) {
	contenders := make([]contender, len(alternatives))
	for _, i := range rand.Perm(len(alternatives)) {
		contenders[i] = contender{"client=" + alternatives[i].name, ready(&alternatives[i])}
	}
	inTurns(b, contenders, perOperation)
}
