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
	"unicode/utf8"

	"go.opentelemetry.io/otel/sdk/metric"
	"go.opentelemetry.io/otel/sdk/metric/metricdata"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"
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
		return r.Do(context.Background(), "/below", func(context.Context) error { n++; return errs[n-1] }, WithMaxAttempts(len(errs)))
	}
	synctest.Test(t, func(t *testing.T) {
		for name, test := range map[string]struct {
			err  error
			want bool
		}{
			"alone":                       {Unsent(errDown), true},
			"wrapped":                     {fmt.Errorf("query: %w", Unsent(errDown)), true},
			"below Permanent":             {Permanent(Unsent(errDown)), true},
			"joined with another":         {errors.Join(Unsent(errDown), errDown), false},
			"wrapped with another":        {fmt.Errorf("%w, %w", errDown, Unsent(errDown)), false},
			"joined with its like":        {errors.Join(Unsent(errDown), nil, Unsent(errDown)), true},
			"around a join":               {Unsent(errors.Join(errDown, errDown)), true},
			"unreadable":                  {readable(Unsent((*pointerError)(nil))), true},
			"a call's last attempt":       {below(errDown, Unsent(errDown)), false},
			"a call's first attempt":      {below(Unsent(errDown), errDown), false},
			"all attempts of a call":      {below(Unsent(errDown), Unsent(errDown)), true},
			"wrapped, attempts of a call": {fmt.Errorf("x: %w", below(errDown, Unsent(errDown))), false},
			"around a call":               {Unsent(below(errDown, errDown)), true},
			"nil Error":                   {(*Error)(nil), false},
			"empty Error":                 {&Error{}, false},
			"other":                       {errDown, false},
		} {
			if got := isUnsent(test.err); got != test.want {
				t.Errorf("%s: isUnsent is %v", name, got)
			}
		}
		outer := 0
		err := r.Do(t.Context(), "/outer", func(context.Context) error { outer++; return below(errDown, Unsent(errDown)) }, WithUnsentOnly(true))
		if outer != 1 || err == nil {
			t.Errorf("a function whose call below may have had an effect ran %d times: %v", outer, err)
		}
	})
}

type pointerError struct{ text string }

func (e *pointerError) Error() string { return e.text }

// Without a wait, such calls would never end: neither MaxAttempts nor ConnectWait would limit them.
func TestAFunctionWithoutABackoffIsNotCalledWithoutEnd(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r, runs := retrierOf(t, WithBackoff(Constant(0)), WithConnectWait(100*time.Millisecond)), 0
		start := time.Now()
		err := r.Do(t.Context(), "/a/x", func(context.Context) error {
			if runs++; runs > 1000 {
				return Permanent(errors.New("endless"))
			}
			return Unsent(errDown)
		})
		if !errors.Is(err, ErrNotConnected) || runs != 101 || time.Since(start) != 100*time.Millisecond {
			t.Errorf("%d runs in %v: %v", runs, time.Since(start), err)
		}
	})
}

// An open circuit breaker may know when it is to be asked again.
func TestTheWaitOfAnUnsentFunctionsErrorIsObeyed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := retrierOf(t, WithConnectWait(12*time.Second), WithBackoff(Constant(time.Second)), WithMaxAttempts(2))
		start, runs := time.Now(), []time.Duration(nil)
		err := r.Do(t.Context(), "/a/x", func(context.Context) error {
			runs = append(runs, time.Since(start))
			return Unsent(fail(codes.Unavailable, "open", retryInfoOf(4*time.Second)).err)
		})
		if !errors.Is(err, ErrNotConnected) || len(runs) < 3 {
			t.Fatalf("after %d runs: %v", len(runs), err)
		}
		for i, at := range runs[1:] {
			if wait := at - runs[i]; wait < 4*time.Second || wait > 4800*time.Millisecond {
				t.Errorf("wait %d is %v", i+1, wait)
			}
		}
		runs = nil
		err = r.Do(t.Context(), "/a/x", func(context.Context) error {
			runs = append(runs, 0)
			return Unsent(fail(codes.Unavailable, "open", retryInfoOf(4*time.Second)).err)
		}, WithMaxServerDelay(time.Second))
		if !errors.Is(err, ErrPushback) || len(runs) != 1 {
			t.Errorf("%d runs: %v", len(runs), err)
		}
	})
}

func TestHeadersDoNotCommitAFunction(t *testing.T) {
	for _, deadline := range []time.Duration{0, time.Minute} {
		synctest.Test(t, func(t *testing.T) {
			ctx := t.Context()
			if deadline > 0 {
				limited, cancel := context.WithTimeout(ctx, deadline)
				defer cancel()
				ctx = limited
			}
			r, runs := retrierOf(t, WithCommitOnHeaders(true), WithAttemptTimeout(time.Second)), 0
			err := r.Do(ctx, "/a/x", func(ctx context.Context) error {
				if runs++; runs == 2 {
					return nil
				}
				<-ctx.Done()
				return ctx.Err()
			})
			if err != nil || runs != 2 {
				t.Errorf("deadline %v: %d runs: %v", deadline, runs, err)
			}
		})
	}
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
		(*pointerError)(nil), (*Error)(nil), &Error{}, Permanent((*pointerError)(nil)), Unsent((*pointerError)(nil)),
		Unsent(panicsInUnwrap{}), fmt.Errorf("%w", panicsInAs{}), errors.Join(uncomparable{}, (*pointerError)(nil), panicsInIs{}),
	} {
		for name, opts := range map[string][]CallOption{
			"defaults": nil, "retried": {retryAll}, "off": {Disable()}, "connect": {WithConnectWait(time.Second), retryAll},
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

// The errors of functions are seldom statuses, and may hold a response.
func TestEarlierErrorsOfAFunctionAreShort(t *testing.T) {
	for _, cut := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			r := retrierOf(t, WithBudget(Unlimited), WithCodes(codes.Unknown), WithBackoff(Constant(time.Millisecond)), WithMaxAttempts(50))
			err := r.Do(t.Context(), "/a/x", func(context.Context) error {
				if cut {
					time.Sleep(2 * time.Second)
				}
				return errors.New(strings.Repeat("x", 1<<16))
			}, WithAttemptTimeout(time.Second))
			var failed *Error
			if !errors.As(err, &failed) || len(failed.Attempts) != 50 {
				t.Fatal(err)
			}
			held := 0
			for _, a := range failed.Attempts[:49] {
				if held += len(a.Err.Error()); errors.Is(a.Err, ErrAttemptTimeout) != cut {
					t.Errorf("cut %v: %v", cut, a.Err)
				}
				timeout := (*attemptTimeoutError)(nil)
				if errors.As(a.Err, &timeout) && timeout.err != nil {
					held += len(timeout.err.Error())
				}
			}
			if held > 1<<16+49*2*(maxText+100) || held > 4<<16 {
				t.Errorf("cut %v: the attempts hold %d bytes", cut, held)
			}
		})
	}
}

// Protobuf has no such strings, so an exporter would lose the whole batch.
func TestSpansOfFunctionsAreUTF8(t *testing.T) {
	recorder := tracetest.NewSpanRecorder()
	provider := sdktrace.NewTracerProvider(sdktrace.WithSpanProcessor(recorder))
	r := retrierOf(t, WithCallSpan(true), WithTracerProvider(provider))
	_ = r.Do(t.Context(), "/a/x", func(context.Context) error { return errors.New("reply \xff\xfe") })
	for _, span := range recorder.Ended() {
		if !utf8.ValidString(span.Status().Description) {
			t.Errorf("status %q", span.Status().Description)
		}
		for _, event := range span.Events() {
			for _, attr := range event.Attributes {
				if !utf8.ValidString(attr.Value.String()) {
					t.Errorf("%s is %q", attr.Key, attr.Value.String())
				}
			}
		}
	}
	if len(recorder.Ended()) != 1 {
		t.Errorf("%d spans", len(recorder.Ended()))
	}
}

func TestNamesOfFunctionsAreUTF8InTelemetry(t *testing.T) {
	provider, recorder := recordSpans()
	meters, reader := readMetrics()
	r := retrierOf(t, WithCallSpan(true), WithTracerProvider(provider), WithMeterProvider(meters))
	if err := r.Do(t.Context(), "/\xfe/\xff", func(context.Context) error { return nil }); err != nil {
		t.Error(err)
	}
	if name := recorder.Ended()[0].Name(); name != "\uFFFD/\uFFFD" {
		t.Errorf("the span is %q", name)
	}
	lines := metricLines(t, reader)
	for _, line := range lines {
		if !utf8.ValidString(line) {
			t.Errorf("metric %q", line)
		}
	}
	if len(lines) == 0 {
		t.Error("no metrics")
	}
}

// A dashboard of gRPC's own metrics would count queries as RPCs.
func TestFunctionsAreNotInGRPCsMetrics(t *testing.T) {
	reader := metric.NewManualReader()
	r := retrierOf(t, WithMeterProvider(metric.NewMeterProvider(metric.WithReader(reader))), WithGRPCMetrics(true), WithBackoff(Constant(0)))
	runs := 0
	if err := r.Do(t.Context(), "/a/x", func(context.Context) error {
		if runs++; runs == 1 {
			return errDown
		}
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	var all metricdata.ResourceMetrics
	if err := reader.Collect(t.Context(), &all); err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, scope := range all.ScopeMetrics {
		for _, m := range scope.Metrics {
			if names = append(names, m.Name); strings.HasPrefix(m.Name, "grpc.") {
				t.Errorf("recorded %s of type %v", m.Name, reflect.TypeOf(m.Data))
			}
		}
	}
	if len(names) == 0 {
		t.Error("no metrics")
	}
}

// The target that a program gives to Plan or Budget is in canonical form, and not as a ClientConn is dialed.
func TestAPlansTargetIsNotAClientConns(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := retrierOf(t)
		for range 2 { // three retries are all that a budget has
			p := r.Plan(t.Context(), "/x/y", "api.example.com", time.Now())
			for end := false; !end; {
				a, _ := p.Sent(time.Now())
				a.Err = errDown
				end = p.Ended(a, time.Now(), 0).End
			}
		}
		if got := r.Budget("/x/y", "api.example.com").Balance(time.Now()); got != 0 {
			t.Errorf("the plans' budget is at %v, want 0", got)
		}
		cc, err := grpc.NewClient("api.example.com", grpc.WithTransportCredentials(insecure.NewCredentials()))
		if err != nil {
			t.Fatal(err)
		}
		defer cc.Close()
		var left float64
		stop := r.Observe(func(_ context.Context, e Event) { left = e.Budget.Balance(time.Now()) })
		defer stop()
		succeed := func(context.Context, string, any, any, *grpc.ClientConn, ...grpc.CallOption) error { return nil }
		if err := r.unary(t.Context(), "/x/y", nil, nil, cc, succeed); err != nil {
			t.Fatal(err)
		}
		if left < 3 {
			t.Errorf("the ClientConn's budget is at %v, want 3", left)
		}
		if got := r.Budget("/x/y", "dns:///api.example.com").Balance(time.Now()); got != left {
			t.Errorf("Budget in canonical form is at %v, want the ClientConn's %v", got, left)
		}
	})
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
			if b := each.known(target); b == nil || math.Floor(b.Balance(time.Now())) != want {
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
		if each.exact.find("api.example.com") != nil || each.known("api.example.com") != nil {
			t.Error("a target that is not used is kept")
		}
	})
}
