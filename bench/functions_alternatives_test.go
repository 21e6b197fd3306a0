package bench

import (
	"context"
	"errors"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	avast "github.com/avast/retry-go/v5"
	cenkalti "github.com/cenkalti/backoff/v7"
	failsafego "github.com/failsafe-go/failsafe-go"
	"github.com/failsafe-go/failsafe-go/budget"
	"github.com/failsafe-go/failsafe-go/retrypolicy"
	sethvargo "github.com/sethvargo/go-retry"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/grpcretry/grpcretry"
)

// This file configures the libraries that retry functions. The rule is that of
// alternatives_test.go: documented defaults, and 4 attempts.

// A functionAlternative is a library that retries a function.
type functionAlternative struct {
	name string

	// retries makes everything that all calls can share, such as a policy.
	retries func(setting) caller

	// permanent marks an error that is not retried, and retryable one that is. An
	// alternative without the mark needs none.
	permanent, retryable func(error) error

	budget bool // limits the retries of all calls together
}

// A caller returns a call of f with retries. It makes what a goroutine's calls can share, such as
// the function with the signature that the library wants.
type caller func(ctx context.Context, f func(context.Context) error) (call func() error)

// direct is a call of the function itself.
var direct = functionAlternative{
	name: "direct",
	retries: func(setting) caller {
		return func(ctx context.Context, f func(context.Context) error) func() error {
			return func() error { return f(ctx) }
		}
	},
}

// cenkaltiBackoff has no limit of attempts by default, but one of 15 minutes. Its options can
// be shared by calls, unlike the BackOff that most of them make.
var cenkaltiBackoff = functionAlternative{
	name:      "cenkalti",
	permanent: cenkalti.Permanent,
	retries: func(s setting) caller {
		opts := []cenkalti.RetryOption{cenkalti.WithMaxTries(attempts)}
		switch s {
		case atOnce:
			opts = append(opts, cenkalti.WithBackOff(&cenkalti.ZeroBackOff{}))
		case inBackoff:
			opts = append(opts, cenkalti.WithBackOff(cenkalti.NewConstantBackOff(anHour)), cenkalti.WithMaxElapsedTime(0))
		}
		return func(ctx context.Context, f func(context.Context) error) func() error {
			operation := func() (struct{}, error) { return struct{}{}, f(ctx) }
			return func() error { return second(cenkalti.Retry(ctx, operation, opts...)) }
		}
	},
}

// sethvargoRetry has no defaults: the wait before the first retry is ours. It retries what the
// function marks as retryable. A Backoff counts the attempts of a call, so each call makes one.
var sethvargoRetry = functionAlternative{
	name:      "sethvargo",
	retryable: sethvargo.RetryableError,
	retries: func(s setting) caller {
		waits := func() sethvargo.Backoff { return sethvargo.NewExponential(100 * time.Millisecond) }
		switch s {
		case atOnce:
			waits = func() sethvargo.Backoff {
				return sethvargo.BackoffFunc(func() (time.Duration, bool) { return 0, false })
			}
		case inBackoff:
			waits = func() sethvargo.Backoff { return sethvargo.NewConstant(anHour) }
		}
		return func(ctx context.Context, f func(context.Context) error) func() error {
			return func() error { return sethvargo.Do(ctx, sethvargo.WithMaxRetries(attempts-1, waits()), f) }
		}
	},
}

// avastRetry makes 10 attempts by default. Its Retrier can be shared by calls if they have one
// context, because the context is an option of the Retrier. That is so here, and cheaper than
// a Retrier for each call.
var avastRetry = functionAlternative{
	name:      "avast",
	permanent: avast.Unrecoverable,
	retries:   func(s setting) caller { return avastCaller(s) },
}

// avastThrottled has the throttle that retry-go offers, which is a token bucket, with its defaults.
var avastThrottled = functionAlternative{
	name:      "avast+throttle",
	permanent: avast.Unrecoverable,
	budget:    true,
	retries: func(s setting) caller {
		var config avast.FixedTokenBucketThrottleConfig
		if s == atOnce {
			config.SuccessReleaseCost = 5 * (attempts - 1) // as many tokens as the retries took
		}
		return avastCaller(s, avast.WithThrottle(avast.NewFixedTokenBucketThrottle(config)))
	},
}

func avastCaller(s setting, opts ...avast.Option) caller {
	opts = append(opts, avast.Attempts(attempts))
	switch s {
	case atOnce:
		opts = append(opts, avast.DelayType(func(uint, error, avast.DelayContext) time.Duration { return 0 }))
	case inBackoff:
		opts = append(opts, avast.DelayType(avast.FixedDelay), avast.Delay(anHour))
	}
	return func(ctx context.Context, f func(context.Context) error) func() error {
		retrier, function := avast.New(append(slices.Clone(opts), avast.Context(ctx))...), func() error { return f(ctx) }
		return func() error { return retrier.Do(function) }
	}
}

var errPermanent = errors.New("permanent")

// failsafeRetry makes 3 attempts without waits by default, of whatever fails with an error that
// is not listed. Its function takes no context unless it asks for more, which costs more.
var failsafeRetry = functionAlternative{
	name:      "failsafe",
	permanent: failsafePermanent,
	retries:   func(s setting) caller { return failsafeCaller(failsafePolicy(s)) },
}

// failsafeBudgetedRetry has failsafe-go's own budget with its defaults, too.
var failsafeBudgetedRetry = functionAlternative{
	name:      "failsafe+budget",
	permanent: failsafePermanent,
	budget:    true,
	retries:   func(s setting) caller { return failsafeCaller(failsafePolicy(s).WithBudget(budget.New())) },
}

func failsafePermanent(err error) error { return errors.Join(errPermanent, err) }

func failsafePolicy(s setting) retrypolicy.Builder[any] {
	policy := retrypolicy.NewBuilder[any]().WithMaxAttempts(attempts).AbortOnErrors(errPermanent)
	if s == inBackoff {
		return policy.WithDelay(anHour)
	}
	return policy
}

func failsafeCaller(policy retrypolicy.Builder[any]) caller {
	executor := failsafego.With(policy.Build())
	return func(ctx context.Context, f func(context.Context) error) func() error {
		function := func() error { return f(ctx) }
		return func() error { return executor.WithContext(ctx).Run(function) }
	}
}

// oursForFunctions has the options of alternatives_test.go.
var oursForFunctions = functionAlternative{
	name:      ours.name,
	permanent: grpcretry.Permanent,
	budget:    true,
	retries: func(s setting) caller {
		retrier, err := grpcretry.New(ourOptions(s)...)
		if err != nil {
			panic(err)
		}
		return func(ctx context.Context, f func(context.Context) error) func() error {
			return func() error { return retrier.Do(ctx, "/bench/function", f) }
		}
	},
}

var functionAlternatives = []functionAlternative{
	direct, cenkaltiBackoff, sethvargoRetry, avastRetry, avastThrottled, failsafeRetry, failsafeBudgetedRetry, oursForFunctions,
}

// unavailable returns the error of a failed attempt with the alternative's mark.
func (a *functionAlternative) unavailable() error {
	err := status.Error(codes.Unavailable, "down for maintenance")
	if a.retryable != nil {
		return a.retryable(err)
	}
	return err
}

// notFound returns an error that no alternative retries.
func (a *functionAlternative) notFound() error {
	err := status.Error(codes.NotFound, "no such thing")
	if a.permanent != nil {
		return a.permanent(err)
	}
	return err
}

// The tests here show that the numbers compare like with like.

func TestFunctionAlternativesMakeTheSameAttempts(t *testing.T) {
	for _, a := range functionAlternatives {
		for name, s := range settings {
			for _, tt := range []struct {
				failure error
				want    int
			}{{a.unavailable(), attempts}, {a.notFound(), 1}} {
				want := tt.want
				if a.name == direct.name {
					want = 1
				}
				t.Run(a.name+"/"+name+"/"+status.Code(tt.failure).String(), func(t *testing.T) {
					synctest.Test(t, func(t *testing.T) {
						made := 0
						call := a.retries(s)(callContext(t), func(context.Context) error {
							made++
							return tt.failure
						})
						if err := call(); err == nil || made != want {
							t.Errorf("the call returned %v after %d attempts, want an error after %d", err, made, want)
						}
					})
				})
			}
		}
	}
}

func TestFunctionAlternativesAreRescued(t *testing.T) {
	for _, a := range functionAlternatives[1:] {
		for name, s := range settings {
			t.Run(a.name+"/"+name, func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					made := 0
					call := a.retries(s)(callContext(t), func(context.Context) error {
						if made++; made < attempts {
							return a.unavailable()
						}
						return nil
					})
					start := time.Now()
					if err := call(); err != nil || made != attempts {
						t.Errorf("the call returned %v after %d attempts, want nil after %d", err, made, attempts)
					}
					if took := time.Since(start); s == atOnce && took > 0 {
						t.Errorf("the call waited %v, want no wait", took)
					}
				})
			})
		}
	}
}

// In an outage every alternative makes all its attempts, unless it has a budget.
func TestFunctionAlternativesWithBudgets(t *testing.T) {
	const calls = 100
	for _, a := range functionAlternatives[1:] {
		t.Run(a.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				made := make(chan struct{}, calls*attempts)
				call := a.retries(asUsed)(callContext(t), func(context.Context) error {
					made <- struct{}{}
					time.Sleep(time.Second)
					return a.unavailable()
				})
				share(calls, calls, func(int, int) { _ = call() })
				if got := len(made); (got < calls*attempts) != a.budget {
					t.Errorf("%d calls made %d attempts, want fewer than %d: %t", calls, got, calls*attempts, a.budget)
				}
			})
		})
	}
}
