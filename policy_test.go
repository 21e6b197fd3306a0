package grpcretry

import (
	"context"
	"reflect"
	"slices"
	"testing"
	"time"

	"golang.org/x/time/rate"
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
		Backoff:         Exponential{Base: 100 * time.Millisecond, Max: 5 * time.Second, Multiplier: 2, Jitter: FullJitter},
		OverloadBackoff: Exponential{Base: time.Second, Max: 20 * time.Second, Multiplier: 2, Jitter: FullJitter},
		Codes:           []codes.Code{codes.ResourceExhausted, codes.Unavailable},
		MaxServerDelay:  5 * time.Minute,
		ConnectWait:     10 * time.Second,
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

func TestPolicyShowsWhatTheOptionsSet(t *testing.T) {
	budget := NewRateBudget(rate.NewLimiter(1, 1))
	want := Policy{
		MaxAttempts:     7,
		Backoff:         Decorrelated{Base: 2 * time.Second, Max: 3 * time.Second},
		OverloadBackoff: Constant(9 * time.Second),
		Codes:           []codes.Code{codes.Aborted, codes.Unavailable},
		AttemptTimeout:  11 * time.Second,
		MaxElapsed:      12 * time.Second,
		MaxServerDelay:  -1,
		ConnectWait:     14 * time.Second,
		Budget:          budget,
		BufferLimit:     13,
		CommitOnHeaders: true,
		UnsentOnly:      true,
	}
	for name, opts := range map[string][]CallOption{
		"options": {WithMaxAttempts(7), WithBackoff(want.Backoff), WithOverloadBackoff(want.OverloadBackoff),
			WithCodes(codes.Unavailable, codes.Aborted), WithAttemptTimeout(11 * time.Second), WithMaxElapsed(12 * time.Second),
			WithMaxServerDelay(-1), WithConnectWait(14 * time.Second), WithBudget(budget), WithBufferLimit(13), WithCommitOnHeaders(true),
			WithUnsentOnly(true)},
		"a policy":                      {WithPolicy(want)},
		"an empty policy over a policy": {WithPolicy(want), WithPolicy(Policy{})},
	} {
		all := make([]Option, len(opts))
		for i, o := range opts {
			all[i] = o
		}
		for _, r := range []*Retrier{retrierOf(t, all...), retrierOf(t, WithMethod("/a/b", opts...)),
			retrierOf(t, WithMethod("/a/", opts...))} {
			if got := r.Policy("/a/b"); !reflect.DeepEqual(got, want) {
				t.Errorf("%s: Policy = %+v, want %+v", name, got, want)
			}
		}
	}
}

// Each field of a policy replaces the one of a wider scope, independently of the others.
func TestPolicyFieldsThatAreZeroMeanAsBelow(t *testing.T) {
	classifier := func(context.Context, Attempt) Classification { return Default }
	below := Policy{
		MaxAttempts: 7, Backoff: Constant(1), OverloadBackoff: Constant(2), Codes: []codes.Code{codes.Aborted},
		AttemptTimeout: 3, MaxElapsed: 4, MaxServerDelay: 5, ConnectWait: 8, Budget: Unlimited, BufferLimit: 6, CommitOnHeaders: true,
	}
	for name, set := range map[string]func(*Policy){
		"MaxAttempts":     func(p *Policy) { p.MaxAttempts = 70 },
		"Backoff":         func(p *Policy) { p.Backoff = Constant(10) },
		"OverloadBackoff": func(p *Policy) { p.OverloadBackoff = Constant(20) },
		"Codes":           func(p *Policy) { p.Codes = []codes.Code{codes.Internal} },
		"AttemptTimeout":  func(p *Policy) { p.AttemptTimeout = 30 },
		"MaxElapsed":      func(p *Policy) { p.MaxElapsed = 40 },
		"MaxServerDelay":  func(p *Policy) { p.MaxServerDelay = -1 },
		"ConnectWait":     func(p *Policy) { p.ConnectWait = -1 },
		"Budget":          func(p *Policy) { p.Budget = NewRateBudget(rate.NewLimiter(1, 1)) },
		"BufferLimit":     func(p *Policy) { p.BufferLimit = -1 },
		"nothing":         func(*Policy) {},
	} {
		var over Policy
		set(&over)
		want := below
		set(&want)
		if name == "Budget" {
			want.Budget = over.Budget
		}
		got := retrierOf(t, WithPolicy(over), WithMethod("/a/", WithPolicy(below)), WithMethod("/a/b", WithPolicy(over))).Policy("/a/b")
		if !reflect.DeepEqual(got, want) {
			t.Errorf("%s over %+v is %+v, want %+v", name, below, got, want)
		}
	}
	// DeepEqual cannot compare functions.
	p := retrierOf(t, WithPolicy(Policy{Classifier: classifier}), WithPolicy(below)).Policy("/a/b")
	if p.Classifier == nil {
		t.Error("a policy without a classifier took the one below away")
	}
}

func TestPolicyFillsInZeroFieldsOfBackoffs(t *testing.T) {
	for _, tt := range []struct{ given, want Backoff }{
		{Exponential{Max: time.Minute}, Exponential{Base: 100 * time.Millisecond, Max: time.Minute, Multiplier: 2}},
		{Exponential{Base: time.Second, Jitter: NoJitter},
			Exponential{Base: time.Second, Max: 5 * time.Second, Multiplier: 2, Jitter: NoJitter}},
		{Decorrelated{}, Decorrelated{Base: 100 * time.Millisecond, Max: 5 * time.Second}},
		{Constant(7), Constant(7)},
	} {
		p := retrierOf(t, WithBackoff(tt.given)).Policy("/a/b")
		if p.Backoff != tt.want || p.OverloadBackoff != tt.want {
			t.Errorf("WithBackoff(%+v): Policy has %+v and %+v, want %+v", tt.given, p.Backoff, p.OverloadBackoff, tt.want)
		}
		p = retrierOf(t, WithOverloadBackoff(tt.given)).Policy("/a/b")
		if p.OverloadBackoff != tt.want || p.Backoff != (Exponential{Base: defaultBase, Max: defaultMax, Multiplier: 2}) {
			t.Errorf("WithOverloadBackoff(%+v): Policy has %+v and %+v, want the default and %+v", tt.given, p.Backoff,
				p.OverloadBackoff, tt.want)
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
		"edges":    {WithBufferLimit(0), WithMaxServerDelay(-1), WithMaxAttempts(1), WithCommitOnHeaders(true), WithBackoff(Constant(0))},
	} {
		first := retrierOf(t, opts...).Policy("/a/b")
		if second := retrierOf(t, WithPolicy(first)).Policy("/a/b"); !reflect.DeepEqual(first, second) {
			t.Errorf("%s: %+v became %+v", name, first, second)
		}
	}
}

func TestPolicyOfMethods(t *testing.T) {
	r := retrierOf(t, WithMaxAttempts(2),
		WithMethod("/a.B/", WithMaxAttempts(3), WithMaxElapsed(time.Second)),
		WithMethod("/a.B/C", WithMaxAttempts(5)))
	for method, want := range map[string]int{
		"/a.B/C": 5, "/a.B/D": 3, "/a.B/CC": 3, "/a.B/": 3, "/a.BB/C": 2, "/a/C": 2, "/x/C": 2, "a.B/C": 2, "": 2, "/": 2, "C": 2,
	} {
		if got := r.Policy(method).MaxAttempts; got != want {
			t.Errorf("Policy(%q).MaxAttempts = %d, want %d", method, got, want)
		}
	}
	if got := r.Policy("/a.B/C").MaxElapsed; got != time.Second {
		t.Errorf("MaxElapsed of a method = %v, want its service's", got)
	}
}
