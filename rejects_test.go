package grpcretry

import (
	"context"
	"fmt"
	"math"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// wantRefused fails the test unless err is one of this package's errors and contains all the words.
func wantRefused(t *testing.T, err error, words ...string) {
	t.Helper()
	if err == nil {
		t.Errorf("no error, want one that says %q", words)
		return
	}
	for _, word := range append(words, "grpcretry: ") {
		if !strings.Contains(err.Error(), word) {
			t.Errorf("error %q does not say %q", err, word)
		}
	}
}

// badOptions are options that New rejects, with the words that its error must contain: the option
// and the value. All of them are invalid for a single call, too.
var badOptions = []struct {
	name  string
	opt   CallOption
	words []string
}{
	{"no attempts", WithMaxAttempts(0), []string{"WithMaxAttempts", "0 attempts"}},
	{"nil backoff", WithBackoff(nil), []string{"WithBackoff", "nil"}},
	{"negative base", WithBackoff(Exponential{Base: -time.Second}), []string{"WithBackoff", "Base", "-1s"}},
	{"max below base", WithBackoff(Exponential{Base: 3 * time.Second, Max: 2 * time.Second}), []string{"WithBackoff", "Max", "2s", "3s"}},
	{"default max below base", WithBackoff(Exponential{Base: 6 * time.Second}), []string{"WithBackoff", "5s, the default", "6s"}},
	{"multiplier below 1", WithBackoff(Exponential{Multiplier: 0.5}), []string{"WithBackoff", "Multiplier", "0.5"}},
	{"multiplier NaN", WithBackoff(Exponential{Multiplier: math.NaN()}), []string{"WithBackoff", "Multiplier", "NaN"}},
	{"multiplier infinite", WithBackoff(Exponential{Multiplier: math.Inf(1)}), []string{"WithBackoff", "Multiplier", "+Inf"}},
	{"unknown jitter", WithBackoff(Exponential{Jitter: 4}), []string{"WithBackoff", "Jitter", "4"}},
	{"negative jitter", WithBackoff(Exponential{Jitter: -1}), []string{"WithBackoff", "Jitter", "-1"}},
	{"decorrelated base", WithBackoff(Decorrelated{Base: -1}), []string{"WithBackoff", "Decorrelated.Base", "-1ns"}},
	{"decorrelated max below base", WithOverloadBackoff(Decorrelated{Base: 2, Max: 1}), []string{"WithOverloadBackoff", "1ns", "2ns"}},
	{"negative constant", WithBackoff(Constant(-time.Second)), []string{"WithBackoff", "Constant", "-1s"}},
	{"no codes", WithCodes(), []string{"WithCodes", "no codes"}},
	{"OK", WithCodes(codes.Unavailable, codes.OK), []string{"WithCodes", "OK"}},
	{"code 1<<31", WithCodes(1 << 31), []string{"WithCodes", "2147483648"}},
	{"negative attempt timeout", WithAttemptTimeout(-time.Second), []string{"WithAttemptTimeout", "-1s"}},
	{"negative max elapsed", WithMaxElapsed(-time.Second), []string{"WithMaxElapsed", "-1s"}},
	{"negative buffer limit", WithBufferLimit(-1), []string{"WithBufferLimit", "-1"}},
	{"nil budget", WithBudget(nil), []string{"WithBudget", "nil"}},
	{"nil limiter", WithBudget(NewRateBudget(nil)), []string{"WithBudget", "NewRateBudget", "nil"}},
	{"nil function", WithBudget(PerTarget(nil)), []string{"WithBudget", "PerTarget", "nil"}},
	{"nil budget among others", WithBudget(AllBudgets(Unlimited, nil)), []string{"WithBudget", "AllBudgets", "number 2", "nil"}},

	{"policy: attempts", WithPolicy(Policy{MaxAttempts: -1}), []string{"WithPolicy", "MaxAttempts", "-1"}},
	{"policy: backoff", WithPolicy(Policy{Backoff: Exponential{Multiplier: 0.5}}), []string{"WithPolicy", "Backoff", "0.5"}},
	{"policy: empty codes", WithPolicy(Policy{Codes: []codes.Code{}}), []string{"WithPolicy", "Codes", "no codes"}},
	{"policy: buffer limit", WithPolicy(Policy{BufferLimit: -2}), []string{"WithPolicy: BufferLimit: -2, want at least -1"}},
	{"policy: budget", WithPolicy(Policy{Budget: NewRateBudget(nil)}), []string{"WithPolicy", "Budget", "NewRateBudget", "nil"}},
}

// New rejects a bad option, and so does a call, which ends before anything is sent.
func TestBadOptionsAreRejected(t *testing.T) {
	for _, tt := range badOptions {
		t.Run(tt.name, func(t *testing.T) {
			r, err := New(steady, tt.opt)
			wantRefused(t, err, tt.words...)
			if r != nil {
				t.Error("New gave a Retrier beside the error")
			}
			made, err := invoke(t.Context(), UnaryClientInterceptor(steady), succeedAt, WithMaxAttempts(2), tt.opt)
			wantRefused(t, err, tt.words...)
			if got := status.Code(err); got != codes.Internal || made != 0 {
				t.Errorf("the call ended with %v after %d attempts, want INTERNAL before any", got, made)
			}
		})
	}
}

func succeedAt(context.Context, int) error { return nil }

// What is wrong with an option, a method's options or a budget is said with its name and its value.
func TestWhatIsRejected(t *testing.T) {
	const service = "/grpcretry.test.v1.EchoService/"
	nan, inf := math.NaN(), math.Inf(1)
	made := func(opts ...Option) error { _, err := New(opts...); return err }
	pattern := func(p string) error { return made(WithMethod(p, WithMaxAttempts(2))) }
	onEcho := func(h Hedging) error { return made(WithMethod(echoMethod, WithHedging(h))) }
	quantile := func(q float64, least, most time.Duration) error {
		return onEcho(Hedging{Delay: HedgeAtQuantile(q, least, most)})
	}
	hedging := func(delay HedgeDelay) CallOption {
		return WithPolicy(Policy{MaxAttempts: 2, Hedging: &Hedging{Delay: delay}})
	}
	ratio := func(s RatioBudget) error { _, err := NewRatioBudget(s); return err }
	throttled := func(maxTokens, ratio float64) error { _, err := NewThrottle(maxTokens, ratio); return err }
	slots := func(n int) error { _, err := NewConcurrencyBudget(n); return err }
	config := func(json string) error { return made(WithServiceConfig(json)) }
	nothing := func(context.Context) error { return nil }
	do := func(ctx context.Context, name string, f func(context.Context) error, opts ...CallOption) error {
		r := retrierOf(t, WithMethod("/hedged/", WithPolicy(Policy{Hedging: &Hedging{Delay: HedgeAfter(second)}})))
		err := r.Do(ctx, name, f, opts...)
		if _, is := status.FromError(err); is {
			t.Errorf("Do(%q) = %v, want an ordinary error", name, err)
		}
		return err
	}
	const needsMethods = "WithHedging for all methods, without AllMethodsAreSafe"
	const clientStreams = "a method with a client stream cannot be hedged"
	for _, tt := range []struct {
		err   error
		words []string
	}{
		{made(nil), []string{"New", "number 1", "nil"}},
		{made(steady, nil), []string{"New", "number 2", "nil"}},
		{made(WithMethod("/a/b", nil)), []string{"WithMethod", "/a/b", "nil"}},
		{made(WithMethod("/a/b", steady, nil)), []string{"WithMethod", "/a/b", "nil"}},

		// A star would name no method.
		{pattern("/shop.Inventory/*"), []string{`"/shop.Inventory/*"`, `"/shop.Inventory/" for all methods of a service`}},
		{pattern("/shop.Inventory/Get*"), []string{`"/shop.Inventory/Get*"`, `"/shop.Inventory/" for all methods of a service`}},
		{pattern("/http/host/*"), []string{`"/http/host/*"`, `"/http/host/" for all methods of a service`}},
		{pattern("/*/Get"), []string{`"/*/Get"`, `"/pkg.Service/Method" or "/pkg.Service/"`}},

		{made(WithIdempotencyLevel(-1)), []string{"WithIdempotencyLevel", "-1"}},
		{made(WithIdempotencyLevel(3)), []string{"WithIdempotencyLevel", "3"}},
		{made(WithIdempotencyLevel(idempotent, WithMaxAttempts(0))),
			[]string{"WithMaxAttempts", "0 attempts", "WithIdempotencyLevel IDEMPOTENT"}},
		{made(WithIdempotencyLevel(idempotent, nil)), []string{"WithIdempotencyLevel", "IDEMPOTENT", "nil"}},
		{made(WithIdempotencyLevel(levelUnknown, WithHedging(Hedging{Delay: HedgeAfter(second)}))),
			[]string{"WithHedging", "IDEMPOTENCY_UNKNOWN", "AllMethodsAreSafe"}},

		{onEcho(Hedging{}), []string{"WithHedging: Delay is not set, want HedgeAfter or HedgeAtQuantile (in WithMethod " + echoMethod + ")"}},
		{onEcho(Hedging{Delay: HedgeAfter(-second)}), []string{"WithHedging: Delay: HedgeAfter: -1s is negative"}},
		{quantile(0, 0, 0), []string{"HedgeAtQuantile: q is 0, want between 0 and 1, both excluded"}},
		{quantile(nan, 0, 0), []string{"HedgeAtQuantile: q is NaN, want between 0 and 1, both excluded"}},
		{quantile(0.9, -1, 0), []string{"HedgeAtQuantile: bounds -1ns and 0s must not be negative"}},
		{quantile(0.9, second, second/1000), []string{"HedgeAtQuantile: upper bound 1ms is below the lower bound 1s"}},
		{made(hedging(nil)), []string{"WithPolicy: Hedging: Delay is not set, want HedgeAfter or HedgeAtQuantile"}},
		{made(hedging(HedgeAfter(0))), []string{needsMethods, "name the methods that are safe to run twice with WithMethod"}},
		{made(WithMethod(service+"Collect", hedging(HedgeAfter(0)))),
			[]string{"WithHedging in WithMethod " + service + "Collect: ", clientStreams}},
		{made(WithMethod(service+"Chat", hedging(HedgeAfter(0)))),
			[]string{"WithHedging in WithMethod " + service + "Chat: ", clientStreams}},

		{ratio(RatioBudget{Ratio: -0.1}), []string{"NewRatioBudget: RatioBudget.Ratio is -0.1"}},
		{made(WithRatioBudget(RatioBudget{Ratio: -0.1})), []string{"WithRatioBudget: RatioBudget.Ratio is -0.1"}},
		{ratio(RatioBudget{Ratio: nan}), []string{"Ratio is NaN"}},
		{ratio(RatioBudget{Ratio: inf}), []string{"Ratio is +Inf"}},
		{ratio(RatioBudget{Reserve: -3}), []string{"Reserve is -3"}},
		{ratio(RatioBudget{Reserve: nan}), []string{"Reserve is NaN"}},
		{ratio(RatioBudget{Reserve: inf}), []string{"Reserve is +Inf"}},
		{ratio(RatioBudget{MinPerSecond: -1}), []string{"MinPerSecond is -1"}},
		{ratio(RatioBudget{MinPerSecond: nan}), []string{"MinPerSecond is NaN"}},
		{ratio(RatioBudget{MinPerSecond: inf}), []string{"MinPerSecond is +Inf"}},
		{ratio(RatioBudget{MinPerSecond: 1e308}), []string{"MinPerSecond is 1e+308"}},
		{ratio(RatioBudget{Window: -second}), []string{"Window is -1s"}},
		{ratio(RatioBudget{Window: time.Millisecond - 1}), []string{"Window is 999.999µs"}},

		{throttled(0, 0.1), []string{"NewThrottle: ", "maxTokens is 0"}},
		{throttled(-1, 0.1), []string{"maxTokens is -1"}},
		{throttled(1000.001, 0.1), []string{"maxTokens is 1000.001"}},
		{throttled(inf, 0.1), []string{"maxTokens is +Inf"}},
		{throttled(nan, 0.1), []string{"maxTokens is NaN"}},
		{throttled(0.0009, 0.1), []string{"maxTokens is 0.0009"}},
		{throttled(10, 0.0009999989), []string{"tokenRatio is 0.0009999989"}},
		{throttled(10, -0.1), []string{"tokenRatio is -0.1"}},
		{throttled(10, inf), []string{"tokenRatio is +Inf"}},
		{throttled(10, nan), []string{"tokenRatio is NaN"}},
		{throttled(10, 0.0009), []string{"tokenRatio is 0.0009"}},
		{slots(0), []string{"NewConcurrencyBudget", "0"}},
		{slots(-1), []string{"NewConcurrencyBudget", "-1"}},

		{config(configOf(retrying(nameEcho, 1))), []string{"WithServiceConfig: ", "methodConfig[0].retryPolicy.maxAttempts: 1"}},
		{config(withThrottle(configOf(), 1001, 1)), []string{"WithServiceConfig: ", "retryThrottling.maxTokens: 1001"}},
		{config("{"), []string{"WithServiceConfig: ", "JSON"}},
		{config(""), []string{"WithServiceConfig: ", "empty"}},

		{do(t.Context(), "", nothing), []string{`Do "": invalid name, want a word with a leading slash, such as "/sql/read"`}},
		{do(t.Context(), "/", nothing), []string{`Do "/": invalid name`}},
		{do(t.Context(), "//read", nothing), []string{`Do "//read": invalid name`}},
		{do(t.Context(), "sql/read", nothing), []string{`Do "sql/read": invalid name`}},
		{do(t.Context(), "/sql/read", nil), []string{`Do "/sql/read": the function is nil`}},
		{do(nil, "/sql/read", nothing), []string{`Do "/sql/read": the context is nil`}},
		{do(t.Context(), "/sql/read", nothing, WithMaxAttempts(2), nil), []string{`Do "/sql/read": option number 2 is nil`}},
		{do(t.Context(), "/sql/read", nothing, WithMaxAttempts(-3)), []string{`Do "/sql/read": WithMaxAttempts: -3 attempts, want at least 1`}},
		{do(t.Context(), "/sql/read", nothing, hedging(HedgeAfter(0))),
			[]string{`Do "/sql/read": the call has WithHedging, but a function cannot be hedged`}},
		{do(t.Context(), "/hedged/orders/read", nothing), []string{`Do "/hedged/orders/read": WithMethod /hedged/ has WithHedging`}},
	} {
		wantRefused(t, tt.err, tt.words...)
	}
	for _, p := range []string{"", "/", "x", "/a", "a/b", "a/", "//", "//b", "///", "/a//b", "/a//", "/a/b//", "x/a/b", "*", "/a\xff/",
		"/*", "/*/*"} {
		wantRefused(t, pattern(p), "WithMethod", fmt.Sprintf("%q", p))
	}
}

// The values next to those that are rejected.
func TestWhatIsNotRejected(t *testing.T) {
	for _, p := range []string{"/a/b", "/a/", "/pkg.v1.Service/Method", "/pkg.v1.Service/", "/a/b/c", "/a/b/"} {
		retrierOf(t, WithMethod(p))
	}
	if err := retrierOf(t).Do(t.Context(), "/a", func(context.Context) error { return nil }); err != nil {
		t.Error(err)
	}
	retrierOf(t, WithRatioBudget(RatioBudget{Window: time.Millisecond}))
	for _, good := range [][2]float64{{1000, 0.001}, {0.001, 0.001}, {1, 1e300}} {
		throttleOf(t, good[0], good[1])
	}
	for _, l := range []level{noSideEffects, idempotent} {
		r := retrierOf(t, WithIdempotencyLevel(l, WithHedging(Hedging{Delay: HedgeAfter(second)})))
		if hedged := r.Policy(echoMethod).Hedging != nil; hedged != (l == noSideEffects) {
			t.Errorf("hedging for %v shows as %v for a method with NO_SIDE_EFFECTS", l, hedged)
		}
	}
	for _, opt := range []CallOption{
		WithMaxAttempts(1), WithMaxAttempts(math.MaxInt),
		WithBackoff(Exponential{Base: 1, Max: 1, Multiplier: 1}), WithBackoff(Constant(0)),
		WithBackoff(Exponential{Base: math.MaxInt64, Max: math.MaxInt64, Multiplier: math.MaxFloat64, Jitter: NoJitter}),
		WithBackoff(Decorrelated{Base: 1, Max: 1}),
		WithCodes(codes.Canceled), WithCodes(codes.Unauthenticated, codes.Unauthenticated),
		WithClassifier(nil),
		WithAttemptTimeout(0), WithMaxElapsed(0), WithMaxElapsed(1),
		WithMaxServerDelay(-1), WithMaxServerDelay(0), WithMaxServerDelay(math.MaxInt64),
		WithBufferLimit(0), WithBufferLimit(math.MaxInt),
		WithBudget(AllBudgets()), WithBudget(Unlimited),
		WithPolicy(Policy{}), WithPolicy(Policy{BufferLimit: -1, MaxServerDelay: -1}),
	} {
		if _, err := New(opt, WithMethod("/a/b", opt)); err != nil {
			t.Errorf("New: %v", err)
		}
	}
	if _, err := New(WithObserver(nil), WithLogger(nil), WithTracerProvider(nil), WithCallSpan(true),
		WithBuiltInRetryDisabled()); err != nil {
		t.Errorf("New: %v", err)
	}
}
