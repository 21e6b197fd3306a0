package grpcretry

import (
	"context"
	"errors"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	echov1 "github.com/grpcretry/grpcretry/proto/echo/v1"
)

// A call that passes through cannot hang either. The attempt timeout ends it only if the caller
// has no deadline, because no retry takes its place.
func TestTheAttemptTimeoutOfACallThatPassesThrough(t *testing.T) {
	for _, tt := range []struct {
		name     string
		opts     []Option
		deadline time.Duration // 0 for none
		answer   answer
		want     codes.Code
		took     time.Duration
		timeout  bool
	}{
		{"disabled", []Option{Disable()}, 0, hang(), codes.DeadlineExceeded, 2 * second, true},
		{"one attempt", []Option{WithMaxAttempts(1)}, 0, hang(), codes.DeadlineExceeded, 2 * second, true},
		{"one attempt of a hedged method", []Option{hedged(1, Hedging{Delay: HedgeAtQuantile(0.9, 0, 0)})}, 0, hang(),
			codes.DeadlineExceeded, 2 * second, true},
		{"the caller has a deadline", []Option{Disable()}, 5 * second, hang(), codes.DeadlineExceeded, 5 * second, false},
		{"in time", []Option{Disable()}, 0, ok().after(second), codes.OK, second, false},
		{"a failure in time", []Option{Disable()}, 0, fail(codes.NotFound, "gone").after(second), codes.NotFound, second, false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				server := serve(t, always(tt.answer))
				client := server.client(t, append([]Option{WithAttemptTimeout(2 * second)}, tt.opts...)...)
				ctx := t.Context()
				if tt.deadline > 0 {
					limited, cancel := context.WithTimeout(ctx, tt.deadline)
					defer cancel()
					ctx = limited
				}
				_, err := client.Echo(ctx, request())
				if got := time.Since(server.start); status.Code(err) != tt.want || got != tt.took || errors.Is(err, ErrAttemptTimeout) != tt.timeout {
					t.Errorf("Echo = %v after %v, want %v after %v, by the attempt timeout: %v", err, got, tt.want, tt.took, tt.timeout)
				}
				wantTimes(t, server, 0)
			})
		})
	}
}

// What no service config can turn on passes through, although the channel's config is not known yet.
func TestADisabledCallOnAFreshChannelHasNoEvents(t *testing.T) {
	for _, tt := range []struct {
		name string
		opts []Option
		call []grpc.CallOption
		want bool // events, because the config might retry the method
	}{
		{"the call", nil, []grpc.CallOption{Disable()}, false},
		{"its method", []Option{WithMethod(echoMethod, Disable())}, nil, false},
		{"all methods", []Option{Disable()}, nil, true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				server, events, budget := serve(t, script(ok())), 0, &tally{}
				cc := server.conn(t, DialOptions(append(tt.opts, WithResolverServiceConfig(true), WithBudget(budget),
					WithObserver(func(context.Context, Event) { events++ }))...)...)
				_, err := echov1.NewEchoServiceClient(cc).Echo(t.Context(), request(), tt.call...)
				if err != nil || events > 0 != tt.want || budget.counts != (counts{}) != tt.want {
					t.Errorf("Echo = %v, with %d events and %+v in the budget", err, events, budget.counts)
				}
			})
		})
	}
}
