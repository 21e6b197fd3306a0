package grpcretry

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	echov1 "github.com/grpcretry/grpcretry/proto/echo/v1"
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
	{"negative attempts", WithMaxAttempts(-3), []string{"WithMaxAttempts", "-3"}},
	{"nil backoff", WithBackoff(nil), []string{"WithBackoff", "nil"}},
	{"nil overload backoff", WithOverloadBackoff(nil), []string{"WithOverloadBackoff", "nil"}},
	{"negative base", WithBackoff(Exponential{Base: -time.Second}), []string{"WithBackoff", "Base", "-1s"}},
	{"negative max", WithBackoff(Exponential{Max: -time.Second}), []string{"WithBackoff", "Max", "-1s"}},
	{"max below base", WithBackoff(Exponential{Base: 3 * time.Second, Max: 2 * time.Second}), []string{"WithBackoff", "Max", "2s", "3s"}},
	{"max below the default base", WithBackoff(Exponential{Max: 99 * time.Millisecond}), []string{"WithBackoff", "99ms", "100ms"}},
	{"default max below base", WithBackoff(Exponential{Base: 6 * time.Second}), []string{"WithBackoff", "5s", "6s"}},
	{"multiplier below 1", WithBackoff(Exponential{Multiplier: 0.5}), []string{"WithBackoff", "Multiplier", "0.5"}},
	{"negative multiplier", WithBackoff(Exponential{Multiplier: -2}), []string{"WithBackoff", "Multiplier", "-2"}},
	{"multiplier NaN", WithBackoff(Exponential{Multiplier: math.NaN()}), []string{"WithBackoff", "Multiplier", "NaN"}},
	{"multiplier infinite", WithBackoff(Exponential{Multiplier: math.Inf(1)}), []string{"WithBackoff", "Multiplier", "Inf"}},
	{"unknown jitter", WithBackoff(Exponential{Jitter: 4}), []string{"WithBackoff", "Jitter", "4"}},
	{"negative jitter", WithBackoff(Exponential{Jitter: -1}), []string{"WithBackoff", "Jitter", "-1"}},
	{"overload multiplier", WithOverloadBackoff(Exponential{Multiplier: 0.99}), []string{"WithOverloadBackoff", "Multiplier", "0.99"}},
	{"decorrelated base", WithBackoff(Decorrelated{Base: -1}), []string{"WithBackoff", "Decorrelated.Base", "-1ns"}},
	{"decorrelated max", WithBackoff(Decorrelated{Max: -1}), []string{"WithBackoff", "Decorrelated.Max", "-1ns"}},
	{"decorrelated max below base", WithOverloadBackoff(Decorrelated{Base: 2, Max: 1}), []string{"WithOverloadBackoff", "1ns", "2ns"}},
	{"negative constant", WithBackoff(Constant(-time.Second)), []string{"WithBackoff", "Constant", "-1s"}},
	{"no codes", WithCodes(), []string{"WithCodes", "no codes"}},
	{"OK", WithCodes(codes.Unavailable, codes.OK), []string{"WithCodes", "OK"}},
	{"code 17", WithCodes(codes.Unavailable, 17), []string{"WithCodes", "17"}},
	{"code 1<<31", WithCodes(1 << 31), []string{"WithCodes", "2147483648"}},
	{"negative attempt timeout", WithAttemptTimeout(-time.Second), []string{"WithAttemptTimeout", "-1s"}},
	{"negative max elapsed", WithMaxElapsed(-time.Second), []string{"WithMaxElapsed", "-1s"}},
	{"negative buffer limit", WithBufferLimit(-1), []string{"WithBufferLimit", "-1"}},
	{"nil budget", WithBudget(nil), []string{"WithBudget", "nil"}},
	{"nil limiter", WithBudget(NewRateBudget(nil)), []string{"WithBudget", "NewRateBudget", "nil"}},
	{"nil function", WithBudget(PerTarget(nil)), []string{"WithBudget", "PerTarget", "nil"}},
	{"nil budget among others", WithBudget(AllBudgets(Unlimited, nil)), []string{"WithBudget", "AllBudgets", "number 2", "nil"}},
	{"nil limiter among others", WithBudget(AllBudgets(AllBudgets(NewRateBudget(nil)))),
		[]string{"WithBudget", "AllBudgets", "NewRateBudget", "nil"}},

	{"policy: attempts", WithPolicy(Policy{MaxAttempts: -1}), []string{"WithPolicy", "MaxAttempts", "-1"}},
	{"policy: backoff", WithPolicy(Policy{Backoff: Exponential{Multiplier: 0.5}}), []string{"WithPolicy", "Backoff", "0.5"}},
	{"policy: overload backoff", WithPolicy(Policy{OverloadBackoff: Constant(-1)}), []string{"WithPolicy", "OverloadBackoff", "-1ns"}},
	{"policy: empty codes", WithPolicy(Policy{Codes: []codes.Code{}}), []string{"WithPolicy", "Codes", "no codes"}},
	{"policy: OK", WithPolicy(Policy{Codes: []codes.Code{codes.OK}}), []string{"WithPolicy", "Codes", "OK"}},
	{"policy: code 99", WithPolicy(Policy{Codes: []codes.Code{99}}), []string{"WithPolicy", "Codes", "99"}},
	{"policy: attempt timeout", WithPolicy(Policy{AttemptTimeout: -7}), []string{"WithPolicy", "AttemptTimeout", "-7ns"}},
	{"policy: max elapsed", WithPolicy(Policy{MaxElapsed: -7}), []string{"WithPolicy", "MaxElapsed", "-7ns"}},
	{"policy: buffer limit", WithPolicy(Policy{BufferLimit: -2}), []string{"WithPolicy", "BufferLimit", "-2"}},
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

func TestNewRefusesBadOptionsOfAMethod(t *testing.T) {
	for _, tt := range badOptions {
		t.Run(tt.name, func(t *testing.T) {
			for _, pattern := range []string{"/pkg.Service/Method", "/pkg.Service/"} {
				_, err := New(WithMethod(pattern, steady, tt.opt))
				wantRefused(t, err, append([]string{"WithMethod", pattern}, tt.words...)...)
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
	for _, pattern := range []string{"/a/b", "/a/", "/pkg.v1.Service/Method", "/pkg.v1.Service/", "/a.b/*", "/a/b/c", "/a/b/"} {
		if _, err := New(WithMethod(pattern)); err != nil {
			t.Errorf("pattern %q: %v", pattern, err)
		}
	}
	for _, pattern := range []string{"", "/", "x", "/a", "a/b", "a/", "//", "//b", "///", "/a//b", "/a//", "/a/b//", "x/a/b", "*", "/a\xff/"} {
		_, err := New(WithMethod(pattern))
		wantRefused(t, err, "WithMethod", fmt.Sprintf("%q", pattern))
	}
}

func TestNewNamesEveryBadOption(t *testing.T) {
	_, err := New(
		WithMaxAttempts(-3),
		nil,
		WithMethod("/a/b", WithCodes(17), WithMaxElapsed(-5)),
		WithMethod("nowhere"),
		WithBackoff(Exponential{Multiplier: 0.5}),
		WithBudget(nil),
	)
	wantRefused(t, err, "WithMaxAttempts", "-3", "number 2", "/a/b", "WithCodes", "17", "WithMaxElapsed", "-5ns",
		`"nowhere"`, "WithBackoff", "0.5", "WithBudget")
}

// The error names each option that has an invalid value, as New's comment promises.
func TestNewNamesBadOptionsWithinABadPattern(t *testing.T) {
	_, err := New(WithMethod("nowhere", WithMaxAttempts(-3)))
	wantRefused(t, err, `"nowhere"`, "WithMaxAttempts", "-3")
}

// An option that a later one replaces is still a mistake.
func TestNewRefusesABadOptionThatIsReplaced(t *testing.T) {
	_, err := New(WithMaxAttempts(0), WithMaxAttempts(3))
	wantRefused(t, err, "WithMaxAttempts", "0")
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

// However a call ends, grpc.OnFinish runs once.
func TestBadCallOptionRunsOnFinish(t *testing.T) {
	bubble(t, func(t *testing.T) {
		server := serve(t, script())
		synctest.Wait() // no call waits for the server to start
		var finished []error
		_, err := server.client(t, steady).Echo(t.Context(), request(), WithMaxAttempts(-1),
			grpc.OnFinish(func(err error) { finished = append(finished, err) }))
		if len(finished) != 1 || status.Code(finished[0]) != codes.Internal {
			t.Errorf("Echo = %v, and OnFinish ran with %v, want once with it", err, finished)
		}
	})
}

// The inner one of two Retriers ignores an invalid option, because the outer one has already
// rejected it.
func TestBadCallOptionIsRefusedOnce(t *testing.T) {
	bubble(t, func(t *testing.T) {
		server := serve(t, script())
		synctest.Wait() // no call waits for the server to start
		cc := server.conn(t, append(DialOptions(steady), DialOptions(steady)...)...)
		_, err := echov1.NewEchoServiceClient(cc).Echo(t.Context(), request(), WithMaxAttempts(-1))
		if strings.Count(fmt.Sprint(err), "WithMaxAttempts") != 1 || status.Code(err) != codes.Internal {
			t.Errorf("Echo = %v, want INTERNAL, and the option named once", err)
		}
	})
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

// Within a scope the later option wins. Between scopes the narrower one wins, whatever their order.
func TestScopeBeatsOrder(t *testing.T) {
	const method, service = echov1.EchoService_Echo_FullMethodName, "/grpcretry.test.v1.EchoService/"
	n := WithMaxAttempts
	for _, tt := range []struct {
		name string
		opts []Option
		dial []grpc.CallOption // grpc.WithDefaultCallOptions
		call []grpc.CallOption
		want int // attempts
	}{
		{"the default", nil, nil, nil, 4},
		{"all", []Option{n(2)}, nil, nil, 2},
		{"all, the later one", []Option{n(2), n(3)}, nil, nil, 3},
		{"service over all", []Option{WithMethod(service, n(3)), n(2)}, nil, nil, 3},
		{"service, the later one", []Option{WithMethod(service, n(3), n(5)), n(2)}, nil, nil, 5},
		{"service, the later use", []Option{WithMethod(service, n(3)), WithMethod(service, n(5)), n(2)}, nil, nil, 5},
		{"method over service and all", []Option{WithMethod(method, n(6)), WithMethod(service, n(3)), n(2)}, nil, nil, 6},
		{"method, the later one", []Option{WithMethod(method, n(6), n(7)), WithMethod(service, n(3))}, nil, nil, 7},
		{"method, the later use", []Option{WithMethod(method, n(6)), WithMethod(method, n(7))}, nil, nil, 7},
		{"call over method", []Option{WithMethod(method, n(6)), n(2)}, nil, []grpc.CallOption{n(8)}, 8},
		{"call over service", []Option{WithMethod(service, n(6)), n(2)}, nil, []grpc.CallOption{n(8)}, 8},
		{"call over all", []Option{n(2)}, nil, []grpc.CallOption{n(8)}, 8},
		{"call, the later one", nil, nil, []grpc.CallOption{n(8), grpc.WaitForReady(true), n(9)}, 9},
		{"dialed", []Option{WithMethod(method, n(6))}, []grpc.CallOption{n(5)}, nil, 5},
		{"call over dialed", []Option{WithMethod(method, n(6))}, []grpc.CallOption{n(5)}, []grpc.CallOption{n(3)}, 3},
		{"another method", []Option{WithMethod(service+"Put", n(6)), n(2)}, nil, nil, 2},
		{"another method of the service", []Option{WithMethod(service+"Put", n(6)), WithMethod(service, n(3)), n(2)}, nil, nil, 3},
		{"another service", []Option{WithMethod("/grpcretry.test.v1.EchoServic/", n(6)), n(2)}, nil, nil, 2},
		{"a method whose name begins the same", []Option{WithMethod(method+"o", n(6)), WithMethod(method[:len(method)-1], n(7)),
			n(2)}, nil, nil, 2},
		{"Disable for all, on again for a method", []Option{WithMethod(method, n(3)), Disable()}, nil, nil, 3},
		{"Disable for a method", []Option{WithMethod(method, Disable()), n(3)}, nil, nil, 1},
		{"Disable for a call", []Option{n(3)}, nil, []grpc.CallOption{Disable()}, 1},
		{"Disable, on again for a call", []Option{Disable()}, nil, []grpc.CallOption{n(3)}, 3},
		{"a policy for a call over a method", []Option{WithMethod(method, n(6))}, nil,
			[]grpc.CallOption{WithPolicy(Policy{MaxAttempts: 2})}, 2},
		{"an empty policy for a call changes nothing", []Option{WithMethod(method, n(6))}, nil, []grpc.CallOption{WithPolicy(Policy{})}, 6},
	} {
		t.Run(tt.name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				server := serve(t, always(unavailable()))
				dial := append(DialOptions(append([]Option{WithBackoff(Constant(0)), WithBudget(Unlimited)}, tt.opts...)...),
					grpc.WithDefaultCallOptions(tt.dial...))
				_, err := echov1.NewEchoServiceClient(server.conn(t, dial...)).Echo(t.Context(), request(), tt.call...)
				if got := len(server.attempts()); got != tt.want || status.Code(err) != codes.Unavailable {
					t.Errorf("Echo = %v after %d attempts, want %d", err, got, tt.want)
				}
			})
		})
	}
}

// A call's option of one kind does not affect options of other kinds from wider scopes.
func TestScopesAreLaidOverEachOther(t *testing.T) {
	bubble(t, func(t *testing.T) {
		server := serve(t, always(fail(codes.Aborted, "x")))
		cc := server.client(t, WithBackoff(Constant(time.Second)),
			WithMethod("/grpcretry.test.v1.EchoService/", WithCodes(codes.Aborted)),
			WithMethod(echov1.EchoService_Echo_FullMethodName, WithMaxElapsed(2500*time.Millisecond)))
		_, err := cc.Echo(t.Context(), request(), WithMaxAttempts(100))
		wantStop(t, err, codes.Aborted, ErrMaxElapsed, 3)
	})
}

// An option may be shared: the calls that use it do not affect each other.
func TestOptionsOfACallAreForgottenAfterIt(t *testing.T) {
	bubble(t, func(t *testing.T) {
		server := serve(t, always(unavailable()))
		cc := server.client(t, WithBackoff(Constant(0)), WithBudget(Unlimited), WithMaxAttempts(2))
		for i, want := range []int{5, 2, 5, 2} {
			var opts []grpc.CallOption
			if want == 5 {
				opts = []grpc.CallOption{WithMaxAttempts(5)}
			}
			before := len(server.attempts())
			if _, err := cc.Echo(t.Context(), request(), opts...); err == nil {
				t.Fatal("Echo succeeded")
			}
			if got := len(server.attempts()) - before; got != want {
				t.Errorf("call %d made %d attempts, want %d", i+1, got, want)
			}
		}
	})
}

func TestBackoffCoversOverloadUnlessThatHasItsOwn(t *testing.T) {
	const method = echov1.EchoService_Echo_FullMethodName
	seconds := func(n int) Backoff { return Constant(time.Duration(n) * time.Second) }
	for _, tt := range []struct {
		name     string
		opts     []Option
		call     []grpc.CallOption
		wait     time.Duration // after UNAVAILABLE
		overload time.Duration // after RESOURCE_EXHAUSTED
	}{
		{"one backoff for both", []Option{WithBackoff(seconds(3))}, nil, 3 * time.Second, 3 * time.Second},
		{"one each", []Option{WithBackoff(seconds(3)), WithOverloadBackoff(seconds(7))}, nil, 3 * time.Second, 7 * time.Second},
		{"one each, the other way round", []Option{WithOverloadBackoff(seconds(7)), WithBackoff(seconds(3))}, nil, 3 * time.Second,
			7 * time.Second},
		{"overload in a wider scope", []Option{WithOverloadBackoff(seconds(7)), WithMethod(method, WithBackoff(seconds(3)))}, nil,
			3 * time.Second, 7 * time.Second},
		{"overload in a wider scope than the call", []Option{WithMethod(method, WithOverloadBackoff(seconds(7)))},
			[]grpc.CallOption{WithBackoff(seconds(3))}, 3 * time.Second, 7 * time.Second},
		{"backoff in a narrower scope", []Option{WithBackoff(seconds(3)), WithMethod(method, WithBackoff(seconds(5)))}, nil,
			5 * time.Second, 5 * time.Second},
		{"backoff of a call", []Option{WithBackoff(seconds(3))}, []grpc.CallOption{WithBackoff(seconds(5))}, 5 * time.Second,
			5 * time.Second},
		{"as a policy", []Option{WithPolicy(Policy{Backoff: seconds(3)})}, nil, 3 * time.Second, 3 * time.Second},
		{"as a policy, one each", []Option{WithPolicy(Policy{Backoff: seconds(3), OverloadBackoff: seconds(7)})}, nil, 3 * time.Second,
			7 * time.Second},
	} {
		t.Run(tt.name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				server := serve(t, script(unavailable(), overloaded(), ok()))
				if _, err := server.client(t, tt.opts...).Echo(t.Context(), request(), tt.call...); err != nil {
					t.Fatalf("Echo: %v", err)
				}
				wantTimes(t, server, 0, tt.wait, tt.wait+tt.overload)
			})
		})
	}
}

// The default backoff after RESOURCE_EXHAUSTED is ten times that after UNAVAILABLE, and
// grows to four times its cap.
func TestDefaultBackoffs(t *testing.T) {
	bubble(t, func(t *testing.T) {
		server := serve(t, script(unavailable(), unavailable(), overloaded(), ok()))
		cc := server.fixed(t, 0.5)
		if _, err := cc.Echo(t.Context(), request()); err != nil {
			t.Fatalf("Echo: %v", err)
		}
		// 0.5·100 ms, 0.5·200 ms, 0.5·4 s: the third retry counts as the third, even after another code.
		wantTimes(t, server, 0, 50*time.Millisecond, 150*time.Millisecond, 2150*time.Millisecond)
	})
}

func TestMaxAttemptsHasNoHiddenCap(t *testing.T) {
	bubble(t, func(t *testing.T) {
		server := serve(t, always(unavailable()))
		_, err := server.client(t, WithMaxAttempts(100), WithBackoff(Constant(time.Second)),
			WithBudget(Unlimited)).Echo(t.Context(), request())
		wantStop(t, err, codes.Unavailable, ErrAttemptsExhausted, 100)
		if got := server.times(); len(got) != 100 || got[99] != 99*time.Second {
			t.Errorf("the server saw %d attempts, want 100, the last after 99 s: %v", len(got), got)
		}
	})
}

// If retries are off, the interceptor adds nothing to a call: no budget, no event and no metadata for
// the server, and the error is gRPC's own.
func TestCallsWithoutRetriesPassStraightThrough(t *testing.T) {
	const method = echov1.EchoService_Echo_FullMethodName
	for _, tt := range []struct {
		name string
		opts []Option
		call []grpc.CallOption
	}{
		{"Disable", []Option{Disable()}, nil},
		{"one attempt", []Option{WithMaxAttempts(1)}, nil},
		{"one attempt as a policy", []Option{WithPolicy(Policy{MaxAttempts: 1})}, nil},
		{"Disable for the method", []Option{WithMethod(method, Disable())}, nil},
		{"Disable for the call", nil, []grpc.CallOption{Disable()}},
		{"one attempt for the call", nil, []grpc.CallOption{WithMaxAttempts(1)}},
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

// A narrower option can remove a wider scope's AttemptTimeout, MaxElapsed or classifier; a zero field
// of a policy cannot.
func TestZeroTakesALimitBack(t *testing.T) {
	opts := []Option{steady, WithAttemptTimeout(time.Second), WithMaxElapsed(time.Second),
		WithClassifier(func(context.Context, Attempt) Classification { return Stop }), WithCommitOnHeaders(true),
		WithMaxServerDelay(time.Millisecond)}
	bubble(t, func(t *testing.T) {
		server := serve(t, script(unavailable().after(2*time.Second).withHeader("k", "v").pushback("3000"), ok()))
		_, err := server.client(t, opts...).Echo(t.Context(), request(), WithAttemptTimeout(0), WithMaxElapsed(0),
			WithClassifier(nil), WithCommitOnHeaders(false), WithMaxServerDelay(0))
		if err != nil {
			t.Errorf("Echo: %v", err)
		}
		wantTimes(t, server, 0, 5*time.Second)
	})
	r, err := New(append(opts, WithPolicy(Policy{}))...)
	if err != nil {
		t.Fatal(err)
	}
	p := r.Policy("/a/b")
	if p.AttemptTimeout != time.Second || p.MaxElapsed != time.Second || p.Classifier == nil || !p.CommitOnHeaders ||
		p.MaxServerDelay != time.Millisecond {
		t.Errorf("an empty policy changed the one below to %+v", p)
	}
}

// An option copies the lists that are passed to it.
func TestOptionsKeepTheirOwnCodes(t *testing.T) {
	list := []codes.Code{codes.Aborted}
	withCodes, withPolicy := WithCodes(list...), WithPolicy(Policy{Codes: list})
	list[0] = codes.OK
	for _, opt := range []Option{withCodes, withPolicy} {
		r, err := New(opt)
		if err != nil {
			t.Fatal(err)
		}
		if got := r.Policy("/a/b").Codes; !slices.Equal(got, []codes.Code{codes.Aborted}) {
			t.Errorf("codes %v, want those at the time of the option", got)
		}
	}
}

func TestErrorsOfNewAreJoined(t *testing.T) {
	_, err := New(WithMaxAttempts(0), WithMaxElapsed(-1))
	var joined interface{ Unwrap() []error }
	if !errors.As(err, &joined) || len(joined.Unwrap()) != 2 {
		t.Errorf("New = %v, want two errors", err)
	}
}
