package grpcretry

import (
	"context"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
)

// A fussyError is an error whose method panics if there is none.
type fussyError struct{ text string }

func (e *fussyError) Error() string { return e.text }

// An error that is a nil pointer is a mistake below, or of the caller, that plain gRPC does not
// make a panic of.
func TestAnErrorThatIsANilPointerIsNoPanic(t *testing.T) {
	var null *fussyError
	retry := WithClassifier(func(_ context.Context, a Attempt) Classification {
		if a.Code() != codes.Unknown && a.Err != errUnavailable {
			t.Errorf("the attempt has code %v, want UNKNOWN", a.Code())
		}
		return Retry
	})
	hedging := WithPolicy(Policy{MaxAttempts: 2, Hedging: &Hedging{Delay: HedgeAfter(0), AllMethodsAreSafe: true, Budget: Unlimited}})
	spans, _ := recordSpans()
	for name, opts := range map[string][]Option{
		"not retried": {},
		"classified":  {retry},
		"hedged":      {hedging},
		"traced":      {retry, WithTracerProvider(spans), WithCallSpan(true), WithLogger(silent), WithMeterProvider(nil)},
	} {
		for _, kind := range []string{"unary", "stream"} {
			for _, cause := range []bool{false, true} {
				if cause && name == "hedged" {
					continue // both attempts have failed before
				}
				t.Run(name+", "+kind, func(t *testing.T) {
					bubble(t, func(t *testing.T) {
						ctx, cancel := context.WithCancelCause(t.Context())
						defer cancel(nil)
						err := oneCallIn(ctx, t, kind, append(opts, WithBackoff(Constant(second))), func(int) error {
							if cause {
								time.AfterFunc(second/2, func() { cancel(null) })
								return errUnavailable
							}
							return null
						})
						if err == nil || !strings.Contains(err.Error(), "*grpcretry.fussyError, whose methods panic") {
							t.Errorf("err = %v, want one that names the type", err)
						}
					})
				})
			}
		}
	}
}
