package grpcretry

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/grpcretry/grpcretry/telemetry"
)

// Nothing of a call is left when something below it, or that was given to the library, panics
// or ends its goroutine: the budget's slot comes back, the call span ends, contexts end, OnFinish
// has run.
func TestAPanicOfAUnaryCallLeavesNothing(t *testing.T) {
	drawn := func() { panic("drawn") }
	second := func(a Attempt) bool { return a.Number == 2 }
	for _, tt := range []struct {
		name  string
		below func(a Attempt) // before an attempt ends
		opts  []Option
	}{
		{"a first attempt", func(Attempt) { drawn() }, nil},
		{"a second attempt", func(a Attempt) {
			if second(a) {
				drawn()
			}
		}, nil},
		{"Goexit in a second attempt", func(a Attempt) {
			if second(a) {
				runtime.Goexit()
			}
		}, nil},
		{"a classifier", nil, []Option{WithClassifier(func(_ context.Context, a Attempt) Classification {
			if second(a) {
				drawn()
			}
			return Default
		})}},
		{"Goexit in a classifier", nil, []Option{WithClassifier(func(_ context.Context, a Attempt) Classification {
			if second(a) {
				runtime.Goexit()
			}
			return Default
		})}},
		{"a backoff", nil, []Option{WithBackoff(panicAfter(1))}},
		{"an observer", nil, []Option{WithObserver(func(_ context.Context, e Event) {
			if e.Kind == AttemptStart && second(e.Attempt) {
				drawn()
			}
		})}},
		{"an observer of the end", nil, []Option{WithMaxAttempts(2), WithObserver(func(_ context.Context, e Event) {
			if e.Kind == CallEnd {
				drawn()
			}
		})}},
	} {
		for name, more := range map[string][]Option{
			"retried":             nil,
			"with a timeout":      {WithAttemptTimeout(time.Hour)},
			"hedged, none is due": {WithHedging(Hedging{MaxAttempts: 3, Delay: HedgeAfter(time.Hour), AllMethodsAreSafe: true, Budget: Unlimited})},
		} {
			if name == "hedged, none is due" && tt.name != "a first attempt" {
				continue // on another goroutine a panic ends the program
			}
			t.Run(tt.name+", "+name, func(t *testing.T) {
				bubble(t, func(t *testing.T) {
					budget, err := NewConcurrencyBudget(1)
					if err != nil {
						t.Fatal(err)
					}
					spans, recorder := recordSpans()
					opts := append([]Option{WithBackoff(Constant(0)), WithBudget(budget), WithTracerProvider(spans), WithCallSpan(true)}, more...)
					var attempts []context.Context
					finished := 0
					var ended sync.WaitGroup
					ended.Go(func() {
						defer func() { _ = recover() }()
						_ = UnaryClientInterceptor(append(opts, tt.opts...)...)(t.Context(), brokenMethod, nil, &basket{}, nil,
							func(ctx context.Context, _ string, _, _ any, _ *grpc.ClientConn, _ ...grpc.CallOption) error {
								attempts = append(attempts, ctx)
								if ctx.Done(); tt.below != nil {
									a, _ := AttemptFromContext(ctx)
									tt.below(a)
								}
								return errUnavailable
							}, grpc.OnFinish(func(error) { finished++ }))
						t.Error("the call returned, want a panic or the end of the goroutine")
					})
					ended.Wait()
					if got := budget.Balance(time.Now()); got != 1 {
						t.Errorf("%v of 1 retry is left in the budget", got)
					}
					if got := len(recorder.Ended()); got != 1 {
						t.Errorf("%d call spans have ended, want 1", got)
					}
					if finished != 1 {
						t.Errorf("OnFinish ran %d times, want once", finished)
					}
					for i, ctx := range attempts {
						if more != nil && ctx.Err() == nil {
							t.Errorf("the context of attempt %d is alive after the call", i+1)
						}
					}
				})
			})
		}
	}
}

// panicAfter is a backoff that panics after so many waits, none of which takes time.
type panicAfter int

func (n panicAfter) Delay(retry int, _ time.Duration, _ float64) time.Duration {
	if retry > int(n) {
		panic("drawn")
	}
	return 0
}

// A hedge whose goroutine is ended by an interceptor below has failed; the call does not wait for it.
func TestAHedgeThatEndsItsGoroutineHasFailed(t *testing.T) {
	bubble(t, func(t *testing.T) {
		budget, err := NewConcurrencyBudget(1)
		if err != nil {
			t.Fatal(err)
		}
		err = hedgedEcho(t.Context(), func(_ context.Context, n int) error {
			if n == 2 {
				runtime.Goexit()
			}
			time.Sleep(3 * second)
			return nil
		}, WithBudget(budget), hedged(Hedging{Delay: HedgeAfter(second), Budget: Unlimited}))
		if status.Code(err) != codes.Internal {
			t.Errorf("the call returned %v, want INTERNAL", err)
		}
		if got := budget.Balance(time.Now()); got != 1 {
			t.Errorf("%v of 1 retry is left in the budget", got)
		}
	})
}

func TestAStreamThatPanicsEndsItsCallSpan(t *testing.T) {
	bubble(t, func(t *testing.T) {
		spans, recorder := recordSpans()
		intercept := StreamClientInterceptor(WithTracerProvider(spans), WithCallSpan(true))
		func() {
			defer func() { _ = recover() }()
			_, _ = intercept(t.Context(), serverStream, nil, brokenMethod,
				func(context.Context, *grpc.StreamDesc, *grpc.ClientConn, string, ...grpc.CallOption) (grpc.ClientStream, error) {
					panic("drawn")
				})
		}()
		synctest.Wait()
		if got := fmt.Sprint(len(recorder.Ended())); got != "1" {
			t.Errorf("%s call spans have ended, want 1", got)
		}
	})
}

// An observer may panic when a wait is decided on, before it starts, or when it is over: all spans
// end.
func TestAPanicAroundAWaitEndsItsSpan(t *testing.T) {
	for name, kind := range map[string]EventKind{"before": Decision, "after": AttemptStart} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				spans, recorder := recordSpans()
				start := time.Now()
				intercept := UnaryClientInterceptor(steady, WithTracerProvider(spans), WithCallSpan(true),
					WithObserver(func(_ context.Context, e Event) {
						if e.Kind == kind && (kind == Decision || e.Attempt.Number == 2) {
							panic("drawn")
						}
					}))
				func() {
					defer func() { _ = recover() }()
					_ = intercept(t.Context(), brokenMethod, nil, nil, nil,
						func(context.Context, string, any, any, *grpc.ClientConn, ...grpc.CallOption) error {
							return errUnavailable
						})
					t.Error("the call returned, want a panic")
				}()
				var got []string
				for _, s := range recorder.Ended() {
					got = append(got, fmt.Sprintf("%s, %v", s.Name(), s.EndTime().Sub(start)))
				}
				call := strings.TrimPrefix(brokenMethod, "/")
				wantList(t, "ended", got, map[EventKind][]string{
					Decision:     {call + ", 0s"},
					AttemptStart: {telemetry.SpanWait + ", 1s", call + ", 1s"},
				}[kind]...)
			})
		})
	}
}

// A callback that ends the goroutine of the attempt timeout ends that of the call.
func TestGoexitAtTheAttemptTimeoutEndsTheCallsGoroutine(t *testing.T) {
	for name, option := range map[string]Option{
		"in a classifier": WithClassifier(func(context.Context, Attempt) Classification { runtime.Goexit(); return Retry }),
		"in a backoff":    WithBackoff(exiting{}),
	} {
		for _, kind := range []string{"unary", "stream"} {
			t.Run(name+", "+kind, func(t *testing.T) {
				bubble(t, func(t *testing.T) {
					budget, err := NewConcurrencyBudget(1)
					if err != nil {
						t.Fatal(err)
					}
					server := serveStreams(t, func(_ int, stream grpc.ServerStream) error { return serveAnswer(hang(), stream) })
					cc := server.conn(t, DialOptions(WithBudget(budget), WithAttemptTimeout(second), option)...)
					ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
					defer cancel()
					start, finished := time.Now(), 0
					var ended sync.WaitGroup
					ended.Go(func() {
						onFinish := grpc.OnFinish(func(error) { finished++ })
						if kind == "stream" {
							stream, err := cc.NewStream(ctx, serverStream, "/s/m", onFinish)
							if err != nil {
								t.Error(err)
								return
							}
							_ = errors.Join(stream.SendMsg(request()), stream.CloseSend())
							_ = stream.RecvMsg(request())
						} else {
							_ = cc.Invoke(ctx, "/s/m", request(), request(), onFinish)
						}
						t.Error("the call returned, want the end of its goroutine")
					})
					ended.Wait()
					if took := time.Since(start); took != second || finished != 1 || budget.Balance(time.Now()) != 1 {
						t.Errorf("after %v OnFinish ran %d times, %v left in the budget; want 1s, once, 1", took, finished, budget.Balance(time.Now()))
					}
				})
			})
		}
	}
}

type exiting struct{}

func (exiting) Delay(int, time.Duration, float64) time.Duration { runtime.Goexit(); return 0 }

// A classifier that ends the goroutine of any attempt of a hedged call ends that of the call.
func TestGoexitInAHedgedCallEndsTheCallsGoroutine(t *testing.T) {
	for _, ends := range []int{1, 2} { // the number of the attempt that fails last
		for _, cancelled := range []bool{false, true} {
			t.Run(fmt.Sprintf("attempt %d, cancelled %v", ends, cancelled), func(t *testing.T) {
				bubble(t, func(t *testing.T) {
					budget, err := NewConcurrencyBudget(1)
					if err != nil {
						t.Fatal(err)
					}
					ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
					defer cancel()
					if cancelled {
						time.AfterFunc(5*second, cancel)
					}
					start := time.Now()
					classifier := WithClassifier(func(_ context.Context, a Attempt) Classification {
						if a.Number == ends {
							runtime.Goexit()
						}
						return Default
					})
					var ended sync.WaitGroup
					ended.Go(func() {
						err := hedgedEcho(ctx, func(_ context.Context, n int) error {
							if n == ends {
								time.Sleep(7 * second)
							}
							return errUnavailable
						}, WithBudget(budget), classifier, hedged(Hedging{Delay: HedgeAfter(second)}))
						if !cancelled {
							t.Errorf("the call returned %v, want the end of its goroutine", err)
						}
					})
					ended.Wait()
					if took := time.Since(start); took > 10*second || budget.Balance(time.Now()) != 1 {
						t.Errorf("it ended after %v, with %v left in the budget", took, budget.Balance(time.Now()))
					}
				})
			})
		}
	}
}

// A retry that the attempt timeout decides on while the attempt panics is given back.
func TestAPanicWhileTheAttemptTimeoutDecides(t *testing.T) {
	bubble(t, func(t *testing.T) {
		budget, err := NewConcurrencyBudget(1)
		if err != nil {
			t.Fatal(err)
		}
		slow := WithClassifier(func(context.Context, Attempt) Classification { time.Sleep(second); return Retry })
		func() {
			defer func() { _ = recover() }()
			_, _ = invoke(t.Context(), UnaryClientInterceptor(WithBudget(budget), WithAttemptTimeout(second), slow), func(context.Context, int) error {
				time.Sleep(3 * second / 2)
				panic("drawn")
			})
		}()
		time.Sleep(second)
		if got := budget.Balance(time.Now()); got != 1 {
			t.Errorf("%v of 1 retry is left in the budget", got)
		}
	})
}
