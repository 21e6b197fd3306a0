package grpcretry

import (
	"context"
	"errors"
	"fmt"
	"math"
	"reflect"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/descriptorpb"
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
	{"default max below base", WithBackoff(Exponential{Base: 6 * time.Second}), []string{"WithBackoff", "5s", "6s"}},
	{"multiplier below 1", WithBackoff(Exponential{Multiplier: 0.5}), []string{"WithBackoff", "Multiplier", "0.5"}},
	{"multiplier NaN", WithBackoff(Exponential{Multiplier: math.NaN()}), []string{"WithBackoff", "Multiplier", "NaN"}},
	{"unknown jitter", WithBackoff(Exponential{Jitter: 4}), []string{"WithBackoff", "Jitter", "4"}},
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
	{"policy: budget", WithPolicy(Policy{Budget: NewRateBudget(nil)}), []string{"WithPolicy", "Budget", "NewRateBudget", "nil"}},
}

func TestNewRefusesBadOptions(t *testing.T) {
	for _, tt := range badOptions {
		t.Run(tt.name, func(t *testing.T) {
			r, err := New(steady, tt.opt)
			wantRefused(t, err, tt.words...)
			if r != nil {
				t.Error("New gave a Retrier beside the error")
			}
		})
	}
}

func TestNewRefusesWhatIsNoOption(t *testing.T) {
	for _, tt := range []struct {
		name  string
		opts  []Option
		words []string
	}{
		{"nil", []Option{nil}, []string{"New", "number 1", "nil"}},
		{"nil among others", []Option{steady, nil}, []string{"New", "number 2", "nil"}},
		{"nil for a method", []Option{WithMethod("/a/b", nil)}, []string{"WithMethod", "/a/b", "nil"}},
		{"nil for a method, among others", []Option{WithMethod("/a/b", steady, nil)}, []string{"WithMethod", "/a/b", "nil"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			_, err := New(tt.opts...)
			wantRefused(t, err, tt.words...)
		})
	}
}

func TestMethodPatterns(t *testing.T) {
	for _, pattern := range []string{"/a/b", "/a/", "/pkg.v1.Service/Method", "/pkg.v1.Service/", "/a/b/c", "/a/b/"} {
		if _, err := New(WithMethod(pattern)); err != nil {
			t.Errorf("pattern %q: %v", pattern, err)
		}
	}
	for _, pattern := range []string{"", "/", "x", "/a", "a/b", "a/", "//", "//b", "///", "/a//b", "/a//", "/a/b//", "x/a/b", "*", "/a\xff/",
		"/*", "/*/*"} {
		_, err := New(WithMethod(pattern))
		wantRefused(t, err, "WithMethod", fmt.Sprintf("%q", pattern))
	}
}

// A star in a pattern is rejected with what to write instead: it would name no method.
func TestPatternsWithAStar(t *testing.T) {
	for pattern, instead := range map[string]string{
		"/shop.Inventory/*":    `"/shop.Inventory/" for all methods of a service`,
		"/shop.Inventory/Get*": `"/shop.Inventory/" for all methods of a service`,
		"/http/host/*":         `"/http/host/" for all methods of a service`,
		"/*/Get":               `"/pkg.Service/Method" or "/pkg.Service/"`,
	} {
		_, err := New(WithMethod(pattern, WithMaxAttempts(2)))
		wantRefused(t, err, "WithMethod", fmt.Sprintf("%q", pattern), instead)
	}
}

func TestNewTakesEdgeValues(t *testing.T) {
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

func TestBadCallOptionEndsTheCallBeforeAnythingIsSent(t *testing.T) {
	for _, tt := range badOptions {
		t.Run(tt.name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				server := serve(t, script())
				synctest.Wait() // no call waits for the server to start
				cc, count := server.counted(t, steady)
				_, err := cc.Echo(t.Context(), request(), WithMaxAttempts(2), tt.opt)
				if got := status.Code(err); got != codes.Internal {
					t.Errorf("Echo = %v, want INTERNAL", err)
				}
				wantRefused(t, err, tt.words...)
				if count.made != 0 || len(server.attempts()) != 0 {
					t.Errorf("%d attempts were made, %d reached the server, want none", count.made, len(server.attempts()))
				}
			})
		})
	}
}

func TestShortFormsPanicWhereNewReturnsAnError(t *testing.T) {
	_, want := New(WithMaxAttempts(-3))
	for name, short := range map[string]func(...Option){
		"UnaryClientInterceptor":  func(o ...Option) { UnaryClientInterceptor(o...) },
		"StreamClientInterceptor": func(o ...Option) { StreamClientInterceptor(o...) },
		"DialOptions":             func(o ...Option) { DialOptions(o...) },
	} {
		t.Run(name, func(t *testing.T) {
			short() // the zero set of options is fine
			defer func() {
				if got := recover(); fmt.Sprint(got) != want.Error() {
					t.Errorf("panic %v, want %v", got, want)
				}
			}()
			short(WithMaxAttempts(-3))
		})
	}
}

// If retries are off, the interceptor adds nothing to a call: no budget, no event and no metadata for
// the server, and the error is gRPC's own.
func TestCallsWithoutRetriesPassStraightThrough(t *testing.T) {
	for _, tt := range []struct {
		name string
		opts []Option
		call []grpc.CallOption
	}{
		{"Disable", []Option{Disable()}, nil},
		{"one attempt", []Option{WithMaxAttempts(1)}, nil},
		{"Disable for the call", nil, []grpc.CallOption{Disable()}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				server := serve(t, always(unavailable().after(second/2).pushback("5")))
				budget := &aBudget{}
				opts := append([]Option{steady, WithBudget(budget), WithAttemptTimeout(time.Second),
					WithObserver(func(_ context.Context, e Event) { t.Errorf("event %+v", e) }),
					WithClassifier(func(context.Context, Attempt) Classification { t.Error("classifier asked"); return Retry })},
					tt.opts...)
				cc, count := server.counted(t, opts...)
				_, err := cc.Echo(t.Context(), request(), tt.call...)
				wantUntouched(t, err, codes.Unavailable, "db-down")
				if count.made != 1 || err != count.last {
					t.Errorf("Echo = %v after %d attempts, want what gRPC returned after 1: %v", err, count.made, count.last)
				}
				if len(budget.heard)+len(budget.asked)+budget.refunded > 0 {
					t.Errorf("budget heard %v and was asked %v", budget.heard, budget.asked)
				}
				if got := server.attempts()[0]; got.timeout != 0 || got.metadata["grpc-previous-rpc-attempts"] != nil {
					t.Errorf("the server saw a timeout of %v and metadata %v, want neither", got.timeout, got.metadata)
				}
			})
		})
	}
}

func TestPolicyHasTheDocumentedDefaults(t *testing.T) {
	want := Policy{
		MaxAttempts:     4,
		Backoff:         Exponential{Base: 100 * time.Millisecond, Max: 5 * time.Second, Multiplier: 4, Jitter: EqualJitter},
		OverloadBackoff: Exponential{Base: time.Second, Max: 20 * time.Second, Multiplier: 2, Jitter: FullJitter},
		Codes:           []codes.Code{codes.ResourceExhausted, codes.Unavailable},
		MaxServerDelay:  5 * time.Minute,
		Patience:        10 * time.Second,
		BufferLimit:     256 << 10,
	}
	for _, method := range []string{"/pkg.Service/Method", "/pkg.Service/", "nonsense", ""} {
		got := retrierOf(t).Policy(method)
		wantBalance(t, got.Budget, time.Now(), 3) // the reserve
		deposit(got.Budget, 100)
		wantBalance(t, got.Budget, time.Now(), 23)
		got.Budget = nil
		if !reflect.DeepEqual(got, want) {
			t.Errorf("Policy(%q) = %+v, want %+v", method, got, want)
		}
	}
}

func TestPolicyIsACopy(t *testing.T) {
	r := retrierOf(t)
	shown := r.Policy("/a/b")
	shown.Codes[0], shown.Codes[1] = codes.NotFound, codes.OK
	shown.MaxAttempts = 1
	if again := r.Policy("/a/b"); again.MaxAttempts != 4 ||
		!slices.Equal(again.Codes, []codes.Code{codes.ResourceExhausted, codes.Unavailable}) {
		t.Errorf("after a change of what Policy returned it returns %+v", again)
	}
}

// Passing the result of Policy to WithPolicy changes nothing.
func TestPolicyGoesRoundUnchanged(t *testing.T) {
	for name, opts := range map[string][]Option{
		"defaults": nil,
		"edges":    {WithBufferLimit(0), WithMaxServerDelay(-1), WithMaxAttempts(1), WithBackoff(Constant(0))},
	} {
		first := retrierOf(t, opts...).Policy("/a/b")
		if second := retrierOf(t, WithPolicy(first)).Policy("/a/b"); !reflect.DeepEqual(first, second) {
			t.Errorf("%s: %+v became %+v", name, first, second)
		}
	}
}

// Each field of a Policy has an option that WithPolicy uses, and is part of what the scopes add up to.
func TestEveryFieldOfAPolicyCounts(t *testing.T) {
	full := Policy{MaxAttempts: 2, Backoff: Constant(1), OverloadBackoff: Constant(2), Codes: []codes.Code{codes.Aborted},
		Classifier:     func(context.Context, Attempt) Classification { return Stop },
		AttemptTimeout: 3, MaxElapsed: 4, MaxServerDelay: 5, Patience: 6, Budget: Unlimited, BufferLimit: 7,
		Hedging: &Hedging{Delay: HedgeAfter(8)}, UnsentOnly: true, DryRun: true}
	option := WithPolicy(full).callOption()
	if option.err != nil || option.set != fieldDryRun<<1-1 {
		t.Errorf("WithPolicy sets %b, want all fields: %v", option.set, option.err)
	}
	var sum partial
	sum.add(scopeAll, &option.partial)
	fields := reflect.ValueOf(sum.Policy)
	for i := range fields.NumField() {
		if fields.Field(i).IsZero() {
			t.Errorf("%s is lost", fields.Type().Field(i).Name)
		}
	}
	if sum.set != option.set {
		t.Errorf("the sum has %b, want %b", sum.set, option.set)
	}
}

const (
	noSideEffects = descriptorpb.MethodOptions_NO_SIDE_EFFECTS
	idempotent    = descriptorpb.MethodOptions_IDEMPOTENT
)

// WithSafeMethods retries what declares that it is safe. Narrower options win, and later ones for all methods.
func TestSafeMethods(t *testing.T) {
	const service = "/grpcretry.test.v1.EchoService/"
	for _, tt := range []struct {
		name   string
		opts   []Option
		closed []string // the methods that are retried only if they ran nowhere
	}{
		{"the preset", []Option{WithSafeMethods()}, []string{"Append", "Expand", "/sql/read"}},
		{"a method opened", []Option{WithMethod(service+"Append", WithUnsentOnly(false)), WithSafeMethods()}, []string{"Expand", "/sql/read"}},
		{"a method closed", []Option{WithMethod(service+"Echo", WithUnsentOnly(true)), WithSafeMethods()},
			[]string{"Echo", "Append", "Expand", "/sql/read"}},
		{"functions opened", []Option{WithSafeMethods(), WithMethod("/sql/", WithUnsentOnly(false))}, []string{"Append", "Expand"}},
		{"a level closed", []Option{WithSafeMethods(), WithIdempotencyLevel(idempotent, WithUnsentOnly(true))},
			[]string{"Put", "Append", "Expand", "/sql/read"}},
		{"everything opened", []Option{WithSafeMethods(), WithUnsentOnly(false)}, nil},
	} {
		var closed []string
		for _, method := range []string{"Echo", "Put", "Append", "Expand", "/sql/read"} {
			name := method
			if !strings.HasPrefix(name, "/") {
				name = service + name
			}
			if retrierOf(t, tt.opts...).Policy(name).UnsentOnly {
				closed = append(closed, method)
			}
		}
		wantList(t, tt.name, closed, tt.closed...)
	}
	bubble(t, func(t *testing.T) {
		server := serve(t, always(unavailable()))
		client := server.fixed(t, 0, WithBackoff(Constant(second)), WithMaxAttempts(2), WithSafeMethods())
		client.Echo(t.Context(), request())
		client.Put(t.Context(), request())
		if _, err := client.Append(t.Context(), request()); !errors.Is(err, ErrMayHaveRun) {
			t.Errorf("Append ended with %v, want ErrMayHaveRun", err)
		}
		wantTimes(t, server, 0, second, second, 2*second, 2*second)
	})
}

func TestNewRefusesBadLevels(t *testing.T) {
	for _, l := range []level{-1, 3, 1 << 30} {
		_, err := New(WithIdempotencyLevel(l, WithMaxAttempts(2)))
		wantRefused(t, err, "WithIdempotencyLevel", fmt.Sprint(int32(l)))
	}
	_, err := New(WithIdempotencyLevel(idempotent, WithMaxAttempts(0)))
	wantRefused(t, err, "WithMaxAttempts", "0 attempts", "WithIdempotencyLevel IDEMPOTENT")
	_, err = New(WithIdempotencyLevel(idempotent, nil))
	wantRefused(t, err, "WithIdempotencyLevel", "IDEMPOTENT", "nil")

	h := Hedging{Delay: HedgeAfter(time.Second)}
	_, err = New(WithIdempotencyLevel(levelUnknown, WithHedging(h)))
	wantRefused(t, err, "WithHedging", "IDEMPOTENCY_UNKNOWN", "AllMethodsAreSafe")
	for _, l := range []level{noSideEffects, idempotent} {
		if r := retrierOf(t, WithIdempotencyLevel(l, WithHedging(h))); r.Policy(echoMethod).Hedging != nil != (l == noSideEffects) {
			t.Errorf("hedging for %v shows as %v for a method with NO_SIDE_EFFECTS", l, r.Policy(echoMethod).Hedging)
		}
	}
}
