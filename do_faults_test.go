package grpcretry

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	"github.com/grpcretry/grpcretry/internal/function"
)

// This file has functions that do to Do what functions should not.

var errDown = status.Error(codes.Unavailable, "down")

// Unsent must not be believed of more than it was said of: the function would run twice.
func TestUnsentHoldsForAllOfAnErrorOrForNothing(t *testing.T) {
	r := doer(t, 0, WithBudget(Unlimited), WithBackoff(Constant(time.Second)), WithPatience(time.Hour))
	unsent := slices.Repeat([]error{function.MarkUnsent(errDown)}, maxKept)
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
			"alone":                       {function.MarkUnsent(errDown), true},
			"wrapped":                     {fmt.Errorf("query: %w", function.MarkUnsent(errDown)), true},
			"below Permanent":             {Permanent(function.MarkUnsent(errDown)), true},
			"joined with another":         {errors.Join(function.MarkUnsent(errDown), errDown), false},
			"wrapped with another":        {fmt.Errorf("%w, %w", errDown, function.MarkUnsent(errDown)), false},
			"joined with its like":        {errors.Join(function.MarkUnsent(errDown), nil, function.MarkUnsent(errDown)), true},
			"around a join":               {function.MarkUnsent(errors.Join(errDown, errDown)), true},
			"a call's last attempts":      {below(errDown, function.MarkUnsent(errDown)), false},
			"a call's first attempt":      {below(function.MarkUnsent(errDown), errDown, errDown), false},
			"all attempts of a call":      {below(function.MarkUnsent(errDown), function.MarkUnsent(errDown)), true},
			"all that a call keeps":       {below(append([]error{errDown}, unsent...)...), false},
			"wrapped, attempts of a call": {fmt.Errorf("x: %w", below(errDown, function.MarkUnsent(errDown))), false},
			"around a call":               {function.MarkUnsent(below(errDown, errDown)), true},
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
			return below(errDown, function.MarkUnsent(errDown))
		}, WithUnsentOnly(true))
		if outer != 1 || err == nil {
			t.Errorf("a function whose call below may have had an effect ran %d times: %v", outer, err)
		}
	})
}

// Some functions return the cause for which the caller's context has ended. That is no failure of the backend.
func TestAFunctionMayReturnTheCallersCause(t *testing.T) {
	for name, end := range map[string]func(context.Context) error{
		"cause": context.Cause,
		"error": context.Context.Err,
	} {
		t.Run(name, func(t *testing.T) {
			throttle, err := NewThrottle(10, 0.1)
			if err != nil {
				t.Fatal(err)
			}
			r := retrierOf(t, WithBudget(throttle), WithClassifier(func(context.Context, Attempt) Classification {
				t.Error("the classifier was called, although the caller has gone")
				return Default
			}))
			gone := errors.New("the user has closed the page")
			ctx, cancel := context.WithCancelCause(t.Context())
			err = r.Do(ctx, "/sql/read", func(ctx context.Context) error {
				cancel(gone)
				return end(ctx)
			})
			if !errors.Is(err, gone) {
				t.Errorf("Do = %v, want the caller's cause", err)
			}
			wantBalance(t, throttle, time.Now(), 5)
		})
	}
}

// Without a wait, such calls would never end: neither MaxAttempts nor Patience would limit them.
func TestAFunctionWithoutABackoffIsNotCalledWithoutEnd(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r, runs := doer(t, 0, WithBackoff(Constant(0)), WithPatience(100*time.Millisecond)), 0
		start := time.Now()
		err := r.Do(t.Context(), "/a/x", func(context.Context) error {
			if runs++; runs > 1000 {
				return Permanent(errors.New("endless"))
			}
			return function.MarkUnsent(errDown)
		})
		if !errors.Is(err, ErrTargetDown) || runs != 101 || time.Since(start) != 100*time.Millisecond {
			t.Errorf("%d runs in %v: %v", runs, time.Since(start), err)
		}
	})
}

// A function is no request, so the RPCs that it makes carry no number of previous attempts.
func TestAFunctionSendsNoHeader(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		err := doer(t, 0).Do(t.Context(), "/a/x", func(ctx context.Context) error {
			if md, sent := metadata.FromOutgoingContext(ctx); sent {
				t.Errorf("the context has the metadata %v", md)
			}
			if a, _ := AttemptFromContext(ctx); a.Number < 3 {
				return errDown
			}
			return nil
		})
		if err != nil {
			t.Error(err)
		}
	})
}

func TestPermanentOfNoError(t *testing.T) {
	if err := Permanent(nil); err != nil {
		t.Errorf("Permanent(nil) = %v, want nil", err)
	}
}
