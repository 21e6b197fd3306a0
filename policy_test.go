package grpcretry

import (
	"context"
	"reflect"
	"slices"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
)

func retrierOf(t *testing.T, opts ...Option) *Retrier {
	t.Helper()
	r, err := New(opts...)
	if err != nil {
		t.Fatal(err)
	}
	return r
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

func TestPolicyBufferLimitOfZeroIsShownAsPassThrough(t *testing.T) {
	if got := retrierOf(t, WithBufferLimit(0)).Policy("/a/b").BufferLimit; got != -1 {
		t.Errorf("WithBufferLimit(0): Policy has a BufferLimit of %d, want -1", got)
	}
	if got := retrierOf(t, WithBufferLimit(0), WithMethod("/a/b", WithPolicy(Policy{}))).Policy("/a/b").BufferLimit; got != -1 {
		t.Errorf("with an empty policy over it: BufferLimit %d, want -1", got)
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
