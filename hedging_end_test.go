package grpcretry

import (
	"context"
	"errors"
	"slices"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	echov1 "github.com/grpcretry/grpcretry/proto/echo/v1"
)

func TestCancelEndsAHedgedCallAtOnce(t *testing.T) {
	for name, script := range map[string]func(int) answer{
		"attempts under way": always(hang()),
		"in a wait":          always(unavailable().pushback("60000")),
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				server := serve(t, script)
				budget, hedges := &aBudget{}, &aBudget{}
				ctx, cancel := context.WithCancel(t.Context())
				time.AfterFunc(3*second/2, cancel)
				_, err := server.client(t, WithBudget(budget),
					hedged(3, Hedging{Delay: HedgeAfter(second), Budget: hedges})).Echo(ctx, request())
				if status.Code(err) != codes.Canceled || !errors.Is(err, context.Canceled) {
					t.Errorf("Echo = %v, want the cancellation", err)
				}
				if got := time.Since(server.start); got != 3*second/2 {
					t.Errorf("Echo took %v, want 1.5s", got)
				}
				wantAccounts(t, budget, hedges, len(server.attempts()))
			})
		})
	}
}

func TestClosedConnectionEndsAHedgedCallAtOnce(t *testing.T) {
	for name, script := range map[string]func(int) answer{
		"attempts under way": always(hang()),
		"in a wait":          always(unavailable().pushback("60000")),
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				server := serve(t, script)
				cc := server.conn(t, DialOptions(hedged(3, Hedging{Delay: HedgeAfter(second)}))...)
				time.AfterFunc(3*second/2, func() { cc.Close() })
				_, err := echov1.NewEchoServiceClient(cc).Echo(t.Context(), request())
				if !errors.Is(err, errConnClosed) && status.Code(err) != codes.Canceled {
					t.Errorf("Echo = %v, want the closed connection", err)
				}
				if got := time.Since(server.start); got != 3*second/2 {
					t.Errorf("Echo took %v, want 1.5s", got)
				}
			})
		})
	}
}

// What runs below an attempt that lost is told so.
func TestLosersAreToldByTheCause(t *testing.T) {
	bubble(t, func(t *testing.T) {
		server := serve(t, script(says("a").after(time.Hour), says("b")))
		causes := map[int]error{}
		below := belowUnary(func(ctx context.Context, next func(context.Context) error) error {
			err := next(ctx)
			a, _ := AttemptFromContext(ctx)
			causes[a.Number] = context.Cause(ctx) // the losers end before the winner's caller goes on
			return err
		})
		cc := server.conn(t, append(DialOptions(hedged(2, Hedging{Delay: HedgeAfter(second)})),
			below)...)
		reply, err := echov1.NewEchoServiceClient(cc).Echo(t.Context(), request())
		if reply.GetMessage() != "b" || err != nil {
			t.Errorf("Echo = %v, %v, want b", reply, err)
		}
		if causes[1] != ErrHedgeLost || causes[2] != nil {
			t.Errorf("causes are %v, want ErrHedgeLost of the first only", causes)
		}
	})
}

// Once an attempt has won, no hedge is sent, although those that lose may take their time to end.
func TestNoHedgeFollowsTheWinner(t *testing.T) {
	bubble(t, func(t *testing.T) {
		var mu sync.Mutex
		var sent []int
		start := time.Now()
		err := UnaryClientInterceptor(hedged(4, Hedging{Delay: HedgeAfter(second)}))(t.Context(), echoMethod, request(),
			&echov1.EchoResponse{}, nil,
			func(ctx context.Context, _ string, _, _ any, _ *grpc.ClientConn, _ ...grpc.CallOption) error {
				a, _ := AttemptFromContext(ctx)
				mu.Lock()
				sent = append(sent, a.Number)
				mu.Unlock()
				if a.Number == 2 {
					time.Sleep(second / 2)
					return nil
				}
				<-ctx.Done()
				time.Sleep(5 * second)
				return ctx.Err()
			})
		if took := time.Since(start); err != nil || took != 6500*time.Millisecond || !slices.Equal(sent, []int{1, 2}) {
			t.Errorf("the call returned %v after %v and the attempts %v, want success after 6.5s and the attempts 1 and 2", err, took, sent)
		}
	})
}
