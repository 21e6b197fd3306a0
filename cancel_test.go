package grpcretry

import (
	"context"
	"errors"
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
		paid     int        // retries
	}{
		{"in a wait", script(unavailable()), 1, codes.Unavailable, 0},
		{"in the first attempt", script(hang()), 1, codes.Canceled, 0},
		{"in a later attempt", script(unavailable().pushback("1000"), hang()), 2, codes.Unavailable, 1},
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
				if len(budget.asked) != tt.paid || len(budget.heard) != tt.attempts {
					t.Errorf("the budget was asked at %v and heard of %v, want %d retries and %d attempts", budget.asked, budget.heard,
						tt.paid, tt.attempts)
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

// Plain gRPC's calls end with their ClientConn; a wait must, too.
func TestClosedConnectionEndsAWaitAtOnce(t *testing.T) {
	bubble(t, func(t *testing.T) {
		server := serve(t, always(unavailable()))
		budget := &aBudget{}
		cc := server.conn(t, DialOptions(steady, WithBudget(budget))...)
		time.AfterFunc(second/2, func() { cc.Close() })
		_, err := echov1.NewEchoServiceClient(cc).Echo(t.Context(), request())
		wantStop(t, err, codes.Unavailable, errConnClosed, 1)
		if got := time.Since(server.start); got != second/2 || len(budget.asked) != 0 {
			t.Errorf("returned after %v with %d retries paid, want at once, 500ms, and none", got, len(budget.asked))
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
