package grpcretry

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"go.opentelemetry.io/otel/sdk/metric"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"

	"github.com/grpcretry/grpcretry/internal/function"
)

// This file has functions that do to Do what functions should not.

var errDown = status.Error(codes.Unavailable, "down")

// Unsent must not be believed of more than it was said of: the function would run twice.
func TestUnsentHoldsForAllOfAnErrorOrForNothing(t *testing.T) {
	r := retrierOf(t, WithBudget(Unlimited), WithBackoff(Constant(time.Second)))
	below := func(errs ...error) error {
		n := 0
		return r.Do(context.Background(), "/below", func(context.Context) error {
			if n++; n > len(errs) {
				return Permanent(errs[len(errs)-1])
			}
			return errs[n-1]
		}, WithMaxAttempts(len(errs)))
	}
	synctest.Test(t, func(t *testing.T) {
		for name, test := range map[string]struct {
			err  error
			want bool
		}{
			"alone":                       {MarkUnsent(errDown), true},
			"wrapped":                     {fmt.Errorf("query: %w", MarkUnsent(errDown)), true},
			"below Permanent":             {Permanent(MarkUnsent(errDown)), true},
			"joined with another":         {errors.Join(MarkUnsent(errDown), errDown), false},
			"wrapped with another":        {fmt.Errorf("%w, %w", errDown, MarkUnsent(errDown)), false},
			"joined with its like":        {errors.Join(MarkUnsent(errDown), nil, MarkUnsent(errDown)), true},
			"around a join":               {MarkUnsent(errors.Join(errDown, errDown)), true},
			"a call's last attempts":      {below(errDown, MarkUnsent(errDown)), false},
			"a call's first attempt":      {below(MarkUnsent(errDown), errDown, errDown), false},
			"all attempts of a call":      {below(MarkUnsent(errDown), MarkUnsent(errDown)), true},
			"wrapped, attempts of a call": {fmt.Errorf("x: %w", below(errDown, MarkUnsent(errDown))), false},
			"around a call":               {MarkUnsent(below(errDown, errDown)), true},
			"nil Error":                   {(*Error)(nil), false},
			"empty Error":                 {&Error{}, false},
			"other":                       {errDown, false},
		} {
			if got := isUnsent(test.err); got != test.want {
				t.Errorf("%s: isUnsent is %v", name, got)
			}
		}
		outer := 0
		err := r.Do(t.Context(), "/outer", func(context.Context) error {
			outer++
			return below(errDown, MarkUnsent(errDown))
		}, WithUnsentOnly(true))
		if outer != 1 || err == nil {
			t.Errorf("a function whose call below may have had an effect ran %d times: %v", outer, err)
		}
	})
}

type pointerError struct{ text string }

func (e *pointerError) Error() string { return e.text }

// Without a wait, such calls would never end: neither MaxAttempts nor Patience would limit them.
func TestAFunctionWithoutABackoffIsNotCalledWithoutEnd(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r, runs := doer(t, 0, WithBackoff(Constant(0)), WithPatience(100*time.Millisecond)), 0
		start := time.Now()
		err := r.Do(t.Context(), "/a/x", func(context.Context) error {
			if runs++; runs > 1000 {
				return Permanent(errors.New("endless"))
			}
			return MarkUnsent(errDown)
		})
		if !errors.Is(err, ErrTargetDown) || runs != 101 || time.Since(start) != 100*time.Millisecond {
			t.Errorf("%d runs in %v: %v", runs, time.Since(start), err)
		}
	})
}

type (
	panicsInAs      struct{ withStatus }
	panicsInIs      struct{ withStatus }
	panicsInUnwrap  struct{ withStatus }
	uncomparable    []error
	withStatus      struct{}
	withOKStatus    struct{ withStatus }
	withoutStatus   struct{ withStatus }
	panicsInTimeout struct{ withStatus }
)

func (withStatus) Error() string                 { return "text" }
func (withStatus) GRPCStatus() *status.Status    { return status.New(codes.Unavailable, "text") }
func (withOKStatus) GRPCStatus() *status.Status  { return status.New(codes.OK, "") }
func (withoutStatus) GRPCStatus() *status.Status { return nil }
func (panicsInAs) As(any) bool                   { panic("As") }
func (panicsInIs) Is(error) bool                 { panic("Is") }
func (panicsInUnwrap) Unwrap() error             { panic("Unwrap") }
func (panicsInTimeout) Timeout() bool            { panic("Timeout") }
func (uncomparable) Error() string               { return "uncomparable" }

// A panic while an error is examined would look like one in the function.
func TestErrorsWithHostileMethods(t *testing.T) {
	retryAll := WithClassifier(func(context.Context, Attempt) Classification { return Retry })
	for _, hostile := range []error{
		panicsInAs{}, panicsInIs{}, panicsInUnwrap{}, panicsInTimeout{}, withOKStatus{}, withoutStatus{}, uncomparable{errDown},
		(*pointerError)(nil), (*Error)(nil), &Error{}, Permanent((*pointerError)(nil)), MarkUnsent((*pointerError)(nil)),
		MarkUnsent(panicsInUnwrap{}), fmt.Errorf("%w", panicsInAs{}), errors.Join(uncomparable{}, (*pointerError)(nil), panicsInIs{}),
	} {
		for name, opts := range map[string][]CallOption{
			"defaults": nil, "retried": {retryAll}, "off": {Disable()}, "connect": {WithPatience(time.Second), retryAll},
			"timeout": {WithAttemptTimeout(time.Second)}, "off, timeout": {Disable(), WithAttemptTimeout(time.Second)},
		} {
			for _, cut := range []bool{false, true} {
				synctest.Test(t, func(t *testing.T) {
					err := retrierOf(t).Do(t.Context(), "/a/x", func(context.Context) error {
						if cut {
							time.Sleep(2 * time.Second)
						}
						return hostile
					}, opts...)
					if err == nil {
						t.Errorf("%T, %s, cut %v: no error", hostile, name, cut)
					}
					if failed, ours := err.(*Error); ours && failed != nil && failed != hostile {
						_ = err.Error()
						_, _ = status.FromError(err)
					}
				})
			}
		}
	}
}

// A function's target may be one that a ClientConn is dialed to, in a form without a scheme.
func TestAFunctionsTargetIsNotAClientConns(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var targets []string
		r := retrierOf(t, WithMeterProvider(metric.NewMeterProvider(metric.WithReader(metric.NewManualReader()))),
			WithObserver(func(_ context.Context, e Event) {
				if e.Kind == CallEnd {
					targets = append(targets, e.Target)
				}
			}))
		cc, err := grpc.NewClient("api.example.com", grpc.WithTransportCredentials(insecure.NewCredentials()))
		if err != nil {
			t.Fatal(err)
		}
		defer cc.Close()
		succeed := func(context.Context, string, any, any, *grpc.ClientConn, ...grpc.CallOption) error { return nil }
		if err := r.unary(t.Context(), "/x/y", nil, nil, cc, succeed); err != nil {
			t.Fatal(err)
		}
		for range 2 { // three retries are all that its budget has
			_ = function.Do(t.Context(), r, &function.Call{Name: "/http/api.example.com/GET", Target: "api.example.com",
				Run: func(context.Context) error { return errDown }})
		}
		each := r.settings.current().of("/x/y").Budget.(*perTarget)
		for target, want := range map[string]float64{"dns:///api.example.com": 3, "api.example.com": 0} {
			if b, ok := each.known(target); !ok || math.Floor(b.Balance(time.Now())) != want {
				t.Errorf("the budget of %s is not at %v", target, want)
			}
		}
		want := []string{"dns:///api.example.com", "api.example.com", "api.example.com"}
		if !slices.Equal(targets, want) {
			t.Errorf("targets %q", targets)
		}
		for _, unused := range []string{"a", "b", "c"} {
			time.Sleep(2 * time.Minute)
			each.named(unused)
		}
		if _, ok := each.known("api.example.com"); ok || each.exact.find("api.example.com") != nil {
			t.Error("a target that is not used is kept")
		}
	})
}
