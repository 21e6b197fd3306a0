package grpcretry

import (
	"context"
	"testing"
	"time"
	"unique"

	"google.golang.org/grpc"

	"github.com/grpcretry/grpcretry/internal/tried"
	echov1 "github.com/grpcretry/grpcretry/proto/echo/v1"
)

// A balancer sees what earlier attempts have tried, also if the first one ended before it came to a balancer.
func TestAttemptsShareWhatWasTried(t *testing.T) {
	const method = "/pkg.Service/Method"
	backend := unique.Make(tried.Place{Channel: "channel", Addresses: "a"})
	knows := map[int]bool{}
	invoker := func(ctx context.Context, _ string, _, _ any, _ *grpc.ClientConn, _ ...grpc.CallOption) error {
		a, _ := AttemptFromContext(ctx)
		if a.Number == 1 {
			return errUnavailable
		}
		list := tried.Of(ctx, method)
		list.Lock()
		defer list.Unlock()
		knows[a.Number] = list.Knows("channel")
		list.Add(backend)
		if a.Number < 4 {
			return errUnavailable
		}
		return nil
	}
	callOnce(t, UnaryClientInterceptor(WithBackoff(Constant(0)), WithBudget(Unlimited)), invoker)
	if knows[2] || !knows[3] || !knows[4] || len(knows) != 3 {
		t.Errorf("the attempts know of the backend: %v, want the third and the fourth", knows)
	}
}

// Attempts that run at the same time share it, too: here the first comes to a balancer after the second.
func TestHedgedAttemptsShareWhatWasTried(t *testing.T) {
	const method = "/pkg.Service/Method"
	backend := unique.Make(tried.Place{Channel: "channel", Addresses: "a"})
	bubble(t, func(t *testing.T) {
		intercept := UnaryClientInterceptor(WithMaxAttempts(2), WithPolicy(Policy{MaxAttempts: 2, Hedging: &Hedging{
			Delay: HedgeAfter(time.Second), Budget: Unlimited, AllMethodsAreSafe: true}}))
		known := false
		invoker := func(ctx context.Context, _ string, _, _ any, _ *grpc.ClientConn, _ ...grpc.CallOption) error {
			if a, _ := AttemptFromContext(ctx); a.Number == 1 {
				time.Sleep(2 * time.Second)
			}
			list := tried.Of(ctx, method)
			list.Lock()
			known = list.Knows("channel")
			list.Add(backend)
			list.Unlock()
			time.Sleep(time.Minute)
			return nil
		}
		if err := intercept(t.Context(), method, nil, &echov1.EchoResponse{}, nil, invoker, stubOptions...); err != nil {
			t.Fatal(err)
		}
		if !known {
			t.Error("the first attempt does not know what the second has tried")
		}
	})
}
