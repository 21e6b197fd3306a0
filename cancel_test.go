package grpcretry

import (
	"context"
	"errors"
	"log/slog"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	echov1 "github.com/grpcretry/grpcretry/proto/echo/v1"
)

func TestCancelEndsACallAtOnce(t *testing.T) {
	myCause := errors.New("user closed the tab")
	for _, tt := range []struct {
		name     string
		script   func(int) answer
		attempts int
		last     codes.Code // the server's last word
		refunds  int
	}{
		{"in a wait", script(unavailable()), 1, codes.Unavailable, 1},
		{"in the first attempt", script(hang()), 1, codes.Canceled, 0},
		{"in a later attempt", script(unavailable().pushback("1000"), hang()), 2, codes.Unavailable, 0},
	} {
		t.Run(tt.name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				server := serve(t, tt.script)
				budget := &aBudget{}
				client := server.client(t, WithBackoff(Constant(time.Hour)), WithBudget(budget))
				ctx, cancel := context.WithCancelCause(t.Context())
				start := time.Now()
				time.AfterFunc(2*second, func() { cancel(myCause) })
				_, err := client.Echo(ctx, request())
				if got := time.Since(start); got != 2*second {
					t.Errorf("Echo took %v, want 2s", got)
				}
				e := wantStop(t, err, codes.Canceled, myCause, tt.attempts)
				if e.Reason != myCause || !errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded) {
					t.Errorf("%v: reason %v, want %v and context.Canceled", err, e.Reason, myCause)
				}
				if got := status.Code(e.Last); got != tt.last {
					t.Errorf("Last is %v, want %v", e.Last, tt.last)
				}
				if tt.last == codes.Unavailable && !strings.Contains(err.Error(), "db-down") {
					t.Errorf("%q does not say what the server said", err)
				}
				if budget.refunded != tt.refunds {
					t.Errorf("%d refunds, want %d", budget.refunded, tt.refunds)
				}
				wantTimes(t, server, []time.Duration{0, second}[:tt.attempts]...)
			})
		})
	}
}

func TestNoAttemptReachesTheServerAfterTheContextEnded(t *testing.T) {
	bubble(t, func(t *testing.T) {
		server := serve(t, always(unavailable()))
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		_, err := server.client(t).Echo(ctx, request())
		wantStop(t, err, codes.Canceled, context.Canceled, 1)
		wantTimes(t, server)
	})
}

func TestClosedConnectionEndsACallAtOnce(t *testing.T) {
	t.Run("before the call", func(t *testing.T) {
		bubble(t, func(t *testing.T) {
			server := serve(t, always(ok()))
			// CANCELED, gRPC's code for it, being retryable does not matter.
			cc := server.conn(t, DialOptions(WithCodes(codes.Canceled, codes.Unavailable))...)
			cc.Close()
			start := time.Now()
			_, err := echov1.NewEchoServiceClient(cc).Echo(t.Context(), request())
			if status.Code(err) != codes.Canceled || time.Since(start) != 0 {
				t.Errorf("Echo = %v after %v, want CANCELED at once", err, time.Since(start))
			}
		})
	})
	t.Run("in an attempt", func(t *testing.T) {
		bubble(t, func(t *testing.T) {
			server := serve(t, always(hang()))
			cc := server.conn(t, DialOptions(WithClassifier(func(context.Context, Attempt) Classification { return Retry }))...)
			time.AfterFunc(second, func() { cc.Close() })
			_, err := echov1.NewEchoServiceClient(cc).Echo(t.Context(), request())
			if err == nil || time.Since(server.start) != second {
				t.Errorf("Echo = %v after %v, want an error after 1s", err, time.Since(server.start))
			}
			wantTimes(t, server, 0)
		})
	})
	t.Run("in a wait", func(t *testing.T) {
		bubble(t, func(t *testing.T) {
			server := serve(t, always(unavailable()))
			budget := &aBudget{}
			cc := server.conn(t, DialOptions(steady, WithBudget(budget))...)
			time.AfterFunc(second/2, func() { cc.Close() })
			_, err := echov1.NewEchoServiceClient(cc).Echo(t.Context(), request())
			wantStop(t, err, codes.Unavailable, errConnClosed, 1)
			if got := time.Since(server.start); got != second/2 || budget.refunded != 1 {
				t.Errorf("returned after %v with %d refunds, want at once, 500ms, and 1", got, budget.refunded)
			}
			wantTimes(t, server, 0)
		})
	})
}

func TestACallThatIsCancelledAndClosedInAWaitIsCancelled(t *testing.T) {
	bubble(t, func(t *testing.T) {
		server := serve(t, always(unavailable()))
		cc := server.conn(t, DialOptions(steady)...)
		ctx, cancel := context.WithCancel(t.Context())
		time.AfterFunc(second/2, func() { cancel(); cc.Close() })
		_, err := echov1.NewEchoServiceClient(cc).Echo(ctx, request())
		if e := wantStop(t, err, codes.Canceled, context.Canceled, 1); e.Reason != context.Canceled {
			t.Errorf("Reason is %v, want the caller's", e.Reason)
		}
		wantTimes(t, server, 0)
	})
}

// lateContext has a deadline, but does not notice that it has passed.
type lateContext struct {
	context.Context
	deadline time.Time
}

func (c lateContext) Deadline() (time.Time, bool) { return c.deadline, true }

// gRPC on either side has timers of its own: DEADLINE_EXCEEDED may be here before the
// context knows. That is the caller's deadline all the same.
func TestDeadlineExceededAtTheVeryMomentOfTheDeadline(t *testing.T) {
	for _, tt := range []struct {
		after time.Duration
		ours  bool
	}{
		{second - 1, false}, // a server's own
		{second, true},
		{second + 1, true},
	} {
		bubble(t, func(t *testing.T) {
			attempts := 0
			invoker := func(context.Context, string, any, any, *grpc.ClientConn, ...grpc.CallOption) error {
				attempts++
				time.Sleep(tt.after)
				return status.Error(codes.DeadlineExceeded, "late")
			}
			ctx := lateContext{t.Context(), time.Now().Add(second)}
			err := UnaryClientInterceptor()(ctx, "/s/m", nil, nil, nil, invoker)
			if tt.ours {
				e := wantStop(t, err, codes.DeadlineExceeded, context.DeadlineExceeded, 1)
				if e.Reason != context.DeadlineExceeded {
					t.Errorf("after %v: Reason is %v, want the deadline", tt.after, e.Reason)
				}
			} else {
				wantUntouched(t, err, codes.DeadlineExceeded, "late")
			}
			if attempts != 1 {
				t.Errorf("after %v: %d attempts, want 1", tt.after, attempts)
			}
		})
	}
}

// Interceptors below may return the error of a context as it is.
func TestBareContextErrors(t *testing.T) {
	t.Run("attempt timeout", func(t *testing.T) {
		bubble(t, func(t *testing.T) {
			made, err := invoke(t.Context(), UnaryClientInterceptor(WithAttemptTimeout(second), steady),
				func(ctx context.Context, number int) error {
					if number == 1 {
						<-ctx.Done()
					}
					return ctx.Err()
				})
			if made != 2 || err != nil {
				t.Errorf("%d attempts and %v, want 2 and success", made, err)
			}
		})
	})
	t.Run("the caller's deadline", func(t *testing.T) {
		bubble(t, func(t *testing.T) {
			ctx, cancel := context.WithTimeout(t.Context(), 3*second)
			defer cancel()
			_, err := invoke(ctx, UnaryClientInterceptor(steady), func(ctx context.Context, number int) error {
				if number == 1 {
					return errUnavailable
				}
				<-ctx.Done()
				return ctx.Err()
			})
			e := wantStop(t, err, codes.DeadlineExceeded, context.DeadlineExceeded, 2)
			if e.Last != errUnavailable {
				t.Errorf("Last is %v, want what the server said", e.Last)
			}
		})
	})
}

// A caller's cause may be an Error of another call, as with an errgroup.
func TestACauseThatIsAnErrorOfOursIsTheCallers(t *testing.T) {
	for _, reason := range []error{errConnClosed, ErrBudgetExhausted} {
		bubble(t, func(t *testing.T) {
			logs := &logRecorder{}
			ctx, cancel := context.WithCancelCause(t.Context())
			time.AfterFunc(second/2, func() { cancel(&Error{Reason: reason}) })
			_, err := invoke(ctx, UnaryClientInterceptor(steady, WithLogger(slog.New(logs))),
				func(context.Context, int) error { return errUnavailable })
			e := wantStop(t, err, codes.Canceled, context.Canceled, 1)
			if got := ReasonName(e.Reason); got != "cancelled" {
				t.Errorf("the reason is named %s, want cancelled", got)
			}
			wantLines(t, logs, "DEBUG") // the retry that was to come
		})
	}
}
