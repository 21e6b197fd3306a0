package grpcretry

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
)

type panicking struct{}

func (panicking) Delay(int, time.Duration, float64) time.Duration { panic("boom") }

type panickingBudget struct{ unlimited }

func (panickingBudget) Withdraw(time.Time) bool { panic("boom") }

// A panic leaks no place of a concurrency budget.
func TestAPanicLeaksNoPlace(t *testing.T) {
	for _, tt := range []struct {
		name   string
		second answer // to the retry
		opt    func(panics *bool) Option
	}{
		{"classifier", unavailable(), func(panics *bool) Option {
			return WithClassifier(func(_ context.Context, a Attempt) Classification {
				if a.Number == 2 && *panics {
					panic("boom")
				}
				return Default
			})
		}},
		{"classifier, once, at the timeout", hang(), func(panics *bool) Option {
			return WithClassifier(func(_ context.Context, a Attempt) Classification {
				if a.Number == 2 && *panics {
					*panics = false
					panic("boom")
				}
				return Default
			})
		}},
		{"observer", unavailable(), func(*bool) Option {
			return WithObserver(func(_ context.Context, e Event) {
				if e.Kind == Decision && e.Attempt.Number == 2 {
					panic("boom")
				}
			})
		}},
	} {
		for _, kind := range []string{"unary", "stream"} {
			t.Run(tt.name+", "+kind, func(t *testing.T) {
				bubble(t, func(t *testing.T) {
					one, err := NewConcurrencyBudget(1)
					if err != nil {
						t.Fatal(err)
					}
					panics, finished := true, 0
					server := serveStreams(t, func(n int, stream grpc.ServerStream) error {
						return serveAnswer([]answer{unavailable(), tt.second, ok(), ok()}[n-1], stream)
					})
					cc := server.conn(t, DialOptions(WithBackoff(Constant(second)), WithBudget(one), WithAttemptTimeout(5*second),
						tt.opt(&panics))...)
					var got any
					func() {
						defer func() { got = recover() }()
						if kind == "stream" {
							stream, err := cc.NewStream(t.Context(), serverStream, "/s/m", grpc.OnFinish(func(error) { finished++ }))
							if err != nil {
								t.Fatal(err)
							}
							_ = errors.Join(stream.SendMsg(request()), stream.CloseSend())
							_ = stream.RecvMsg(request())
							return
						}
						_ = cc.Invoke(t.Context(), "/s/m", request(), request())
					}()
					if fmt.Sprint(got) != "boom" {
						t.Fatalf("the caller recovered %v, want boom", got)
					}
					if balance := one.Balance(time.Now()); balance != 1 {
						t.Errorf("balance is %v, want the place back", balance)
					}
					if kind == "stream" && finished != 1 {
						t.Errorf("OnFinish ran %d times, want once", finished)
					}
				})
			})
		}
	}
}

// An OnFinish that panics has run all the same, and is not run again.
func TestAnOnFinishThatPanicsRunsOnce(t *testing.T) {
	bubble(t, func(t *testing.T) {
		server := serveStreams(t, func(_ int, stream grpc.ServerStream) error { return serveAnswer(fail(codes.NotFound, "x"), stream) })
		finished := 0
		stream, err := server.conn(t, DialOptions()...).NewStream(t.Context(), serverStream, "/s/m",
			grpc.OnFinish(func(error) { finished++; panic("boom") }))
		if err != nil {
			t.Fatal(err)
		}
		_ = errors.Join(stream.SendMsg(request()), stream.CloseSend())
		var got any
		func() {
			defer func() { got = recover() }()
			_ = stream.RecvMsg(request())
		}()
		if got != "boom" || finished != 1 {
			t.Errorf("the caller recovered %v after OnFinish ran %d times, want boom after once", got, finished)
		}
	})
}
