package bench

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/failsafe-go/failsafe-go/budget"
	"github.com/failsafe-go/failsafe-go/failsafegrpc"
	"github.com/failsafe-go/failsafe-go/retrypolicy"
	"github.com/grpc-ecosystem/go-grpc-middleware/v2/interceptors/retry"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"

	"github.com/grpcretry/grpcretry"
)

// This file is the one place that says what is compared, and how each is configured.
//
// The rule is "as people use it": what each documents as its default, and where that
// says nothing its own documented example, plus what makes the numbers comparable:
// 4 attempts, on UNAVAILABLE and RESOURCE_EXHAUSTED. alternatives_retry_test.go holds every one
// of them to it.

const attempts = 4 // of a call, the first included

var retried = []codes.Code{codes.Unavailable, codes.ResourceExhausted}

// A setting is what a table needs of all alternatives alike.
type setting int

const (
	asUsed    setting = iota // see above
	atOnce                   // retries wait as little as the alternative can be told to, and nothing refuses them
	inBackoff                // the wait before a retry is an hour
)

const anHour = time.Hour

// An alternative is one way to retry.
type alternative struct {
	name string // as in the names of benchmarks

	// unary makes its interceptor; nil if it has none.
	unary func(setting) grpc.UnaryClientInterceptor
	// dial is all that a ClientConn needs; nil for nothing.
	dial func(setting) []grpc.DialOption

	retries       bool // unary calls
	serverStreams bool // retried too, or at least not refused
	clientStreams bool // likewise, client and bidirectional ones
}

// bare is no retry at all: what is measured with it is gRPC's own.
var bare = alternative{name: "bare", serverStreams: true, clientStreams: true}

// builtin is grpc-go's, by service config. It has no defaults: the waits are those of the
// example in gRFC A6 and in gRPC's guide. The least wait it can be told is a nanosecond.
var builtin = alternative{
	name:    "builtin",
	retries: true, serverStreams: true, clientStreams: true,
	dial: func(s setting) []grpc.DialOption { return serviceConfig(s, "") },
}

func serviceConfig(s setting, more string) []grpc.DialOption {
	initial, longest := "0.1s", "1s"
	switch s {
	case atOnce:
		initial, longest = "0.000000001s", "0.000000001s"
	case inBackoff:
		initial, longest = "3600s", "3600s"
	}
	return []grpc.DialOption{grpc.WithDefaultServiceConfig(fmt.Sprintf(`{
		"methodConfig": [{
			"name": [{}],
			"retryPolicy": {
				"maxAttempts": %d,
				"initialBackoff": %q,
				"maxBackoff": %q,
				"backoffMultiplier": 2,
				"retryableStatusCodes": ["UNAVAILABLE", "RESOURCE_EXHAUSTED"]
			}
		}]%s
	}`, attempts, initial, longest, more))}
}

// middleware is go-grpc-middleware's interceptors/retry. By default it retries nothing
// until told a number, which counts attempts; its default codes are ours, its wait is
// 50 ms ± 10 %. It refuses client and bidirectional streams.
var middleware = alternative{
	name:    "middleware",
	retries: true, serverStreams: true,
	unary: func(s setting) grpc.UnaryClientInterceptor {
		return retry.UnaryClientInterceptor(middlewareOptions(s)...)
	},
	dial: func(s setting) []grpc.DialOption {
		return []grpc.DialOption{
			grpc.WithChainUnaryInterceptor(retry.UnaryClientInterceptor(middlewareOptions(s)...)),
			grpc.WithChainStreamInterceptor(retry.StreamClientInterceptor(middlewareOptions(s)...)),
		}
	},
}

func middlewareOptions(s setting) []retry.CallOption {
	opts := []retry.CallOption{retry.WithMax(attempts), retry.WithCodes(retried...)}
	switch s {
	case atOnce:
		opts = append(opts, retry.WithBackoff(retry.BackoffLinear(0)))
	case inBackoff:
		opts = append(opts, retry.WithBackoff(retry.BackoffLinear(anHour)))
	}
	return opts
}

// failsafe is failsafe-go's failsafegrpc. By default it makes 3 attempts, without any wait
// between them, on our codes and on DEADLINE_EXCEEDED, which no server here sends. Its
// type parameter is any, as one ClientConn has methods of several types. It has nothing
// for streams.
var failsafe = alternative{
	name:    "failsafe",
	retries: true,
	unary: func(s setting) grpc.UnaryClientInterceptor {
		policy := failsafegrpc.NewRetryPolicyBuilder[any]().WithMaxAttempts(attempts)
		if s == inBackoff {
			policy = policy.WithDelay(anHour)
		}
		return failsafegrpc.NewUnaryClientInterceptor(policy.Build())
	},
}

// ours has the options of its README. Where a table retries every call, its default budget
// would refuse most of that, as it is there to do: atOnce has one of the same kind that is
// large enough, so that its work is measured all the same. Nor does it wait for a target that is
// failing, which at most 10,000 calls do at a time.
var ours = alternative{
	name:    "grpcretry",
	retries: true, serverStreams: true, clientStreams: true,
	unary: func(s setting) grpc.UnaryClientInterceptor {
		return grpcretry.UnaryClientInterceptor(asDialed(ourOptions(s))...)
	},
	dial: func(s setting) []grpc.DialOption { return grpcretry.DialOptions(ourOptions(s)...) },
}

// asDialed adds what DialOptions knows: gRPC's own retries are off. An interceptor that is chained by hand asks the channel.
func asDialed(options []grpcretry.Option) []grpcretry.Option {
	return append(options, grpcretry.WithBuiltInRetryDisabled())
}

func ourOptions(s setting) []grpcretry.Option {
	switch s {
	case atOnce:
		return []grpcretry.Option{grpcretry.WithBackoff(grpcretry.Constant(0)), grpcretry.WithBudget(largeBudget()), grpcretry.WithPatience(0)}
	case inBackoff:
		return []grpcretry.Option{grpcretry.WithBackoff(grpcretry.Constant(anHour)), grpcretry.WithBudget(largeBudget()),
			grpcretry.WithPatience(0)}
	default:
		return nil
	}
}

// largeBudget is the default kind of budget, one for each target, with room for any number
// of retries that a benchmark makes.
func largeBudget() grpcretry.Budget {
	return grpcretry.PerTarget(func() grpcretry.Budget {
		b, err := grpcretry.NewRatioBudget(grpcretry.RatioBudget{Ratio: attempts, MinPerSecond: 1e9})
		if err != nil {
			panic(err)
		}
		return b
	})
}

// The careful are the alternatives with what they document against making an outage worse. They
// only compete where there is one.

// builtinThrottled has the retryThrottling of the example in gRFC A6.
var builtinThrottled = alternative{
	name:    "builtin+throttling",
	retries: true,
	dial: func(s setting) []grpc.DialOption {
		return serviceConfig(s, `, "retryThrottling": {"maxTokens": 10, "tokenRatio": 0.1}`)
	},
}

// failsafeBudgeted has our waits, with jitter, and failsafe-go's own budget with its
// defaults: a fifth of the calls under way, and at least 3.
var failsafeBudgeted = alternative{
	name:    "failsafe+budget",
	retries: true,
	unary: func(setting) grpc.UnaryClientInterceptor {
		return failsafegrpc.NewUnaryClientInterceptor(failsafegrpc.NewRetryPolicyBuilder[any]().
			WithMaxAttempts(attempts).
			WithBackoff(100*time.Millisecond, 5*time.Second).
			WithJitterFactor(0.5).
			WithBudget(budget.New()).
			Build())
	},
}

var _ retrypolicy.RetryPolicy[any] // failsafegrpc's builder is one of retrypolicy

// dialOptions are what a ClientConn of the alternative needs.
func (r *alternative) dialOptions(s setting) []grpc.DialOption {
	switch {
	case r.dial != nil:
		return r.dial(s)
	case r.unary != nil:
		return []grpc.DialOption{grpc.WithChainUnaryInterceptor(r.unary(s))}
	default:
		return nil
	}
}

var (
	all     = []alternative{bare, builtin, middleware, failsafe, ours}
	careful = []alternative{builtinThrottled, failsafeBudgeted}
)

// which are the alternatives for which f holds.
func which(f func(*alternative) bool) []alternative {
	return slices.DeleteFunc(slices.Clone(all), func(r alternative) bool { return !f(&r) })
}

func withRetries(r *alternative) bool       { return r.retries }
func withServerStreams(r *alternative) bool { return r.serverStreams }
func withClientStreams(r *alternative) bool { return r.clientStreams }

// interceptors are the alternatives that are one, and bare to compare them with.
func interceptors(r *alternative) bool { return r.unary != nil || r.name == bare.name }

// eachAlternative measures the alternatives in turns. ready makes an alternative's client, and returns what
// is measured of it.
func eachAlternative(
	b *testing.B, alternatives []alternative, report func(*testing.B, *turns), ready func(*alternative) (do func(times int)),
) {
	contenders := make([]contender, len(alternatives))
	for _, i := range rand.Perm(len(alternatives)) {
		contenders[i] = contender{"client=" + alternatives[i].name, ready(&alternatives[i])}
	}
	inTurns(b, contenders, report)
}

// oneByOne measures the alternatives one after the other, where f is no matter of time.
func oneByOne(b *testing.B, alternatives []alternative, f func(*testing.B, *alternative)) {
	for _, i := range rand.Perm(len(alternatives)) {
		b.Run("client="+alternatives[i].name, func(b *testing.B) { f(b, &alternatives[i]) })
	}
}
