package grpcretry

import (
	"context"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	echov1 "github.com/grpcretry/grpcretry/proto/echo/v1"
)

// elapsed lets d pass and returns true, or returns false as soon as done is closed. See
// package internal/timer for why a wait that is already over needs no timer.
func elapsed(d time.Duration, done <-chan struct{}) bool {
	if d <= 0 {
		return true
	}
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-done:
		return false
	}
}

// Many hedged calls without a delay share a bubble. With timers of zero duration the race detector
// crashed in every second run.
func TestHedgesWithoutDelayShareABubble(t *testing.T) {
	bubble(t, func(t *testing.T) {
		hedge := UnaryClientInterceptor(WithBudget(Unlimited), WithPatience(0),
			WithPolicy(Policy{MaxAttempts: 3, Hedging: &Hedging{Delay: HedgeAfter(0), AllMethodsAreSafe: true, Budget: Unlimited}}))
		var attempts atomic.Int64
		fail := func(context.Context, string, any, any, *grpc.ClientConn, ...grpc.CallOption) error {
			attempts.Add(1)
			return status.Error(codes.Unavailable, "down")
		}
		const calls = 1000
		var all sync.WaitGroup
		for range calls {
			all.Go(func() {
				_ = hedge(t.Context(), "/a.B/C", new(echov1.EchoRequest), new(echov1.EchoResponse), nil, fail)
			})
		}
		all.Wait()
		if got := attempts.Load(); got != 3*calls {
			t.Errorf("%d attempts, want %d", got, 3*calls)
		}
	})
}
