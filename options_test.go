package grpcretry

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/types/descriptorpb"
)

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
		Hedging: &Hedging{Delay: HedgeAfter(8)}, UnsentOnly: true, dryRun: true}
	option := WithPolicy(full).callOption()
	if option.err != nil || option.set != switchOff-1 {
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
