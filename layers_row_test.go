package grpcretry

import (
	"context"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/grpcretry/grpcretry/internal/layers"
	echov1 "github.com/grpcretry/grpcretry/proto/echo/v1"
)

// These tests hold what docs/services.md says about services in a row that do not all use the server
// interceptors and this package's clients alike.

// A hop is a service that calls the next one: the options of its server, and of its client.
type hop struct {
	server []grpc.ServerOption
	client []grpc.DialOption
}

// attemptsAtTheEnd makes a call through a row of services, of which the first is only a client, and returns
// how many attempts reach the last, which handles them with end. It returns after the call's last attempt
// has ended.
func attemptsAtTheEnd(t *testing.T, end func(context.Context) error, row ...hop) int {
	t.Helper()
	made := make(chan struct{}, 100)
	next := serveHandler(t, func(ctx context.Context) error { made <- struct{}{}; return end(ctx) })
	for i := len(row) - 1; i > 0; i-- {
		client := echov1.NewEchoServiceClient(next.conn(t, row[i].client...))
		next = serveHandler(t, func(ctx context.Context) error { _, err := client.Echo(ctx, request()); return err }, row[i].server...)
	}
	echov1.NewEchoServiceClient(next.conn(t, row[0].client...)).Echo(t.Context(), request())
	return len(made)
}

func isDown(context.Context) error { return status.Error(codes.Unavailable, "down") }

var (
	threeAttempts = DialOptions(WithBackoff(Constant(second)), WithMaxAttempts(3), WithBudget(Unlimited), WithPatience(0))
	grpcsOwn      = []grpc.DialOption{grpc.WithDefaultServiceConfig(`{"methodConfig": [{"name": [{}], "retryPolicy": {
		"maxAttempts": 3, "initialBackoff": "1s", "maxBackoff": "1s", "backoffMultiplier": 1, "retryableStatusCodes": ["UNAVAILABLE"]}}]}`)}
)

func TestRowsOfDifferentServices(t *testing.T) {
	on := func(opts ...ServerOption) []grpc.ServerOption { return serverOptions(opts...) }
	onlyOne := DialOptions(WithMaxAttempts(1))
	for _, tt := range []struct {
		name string
		row  []hop
		want int
	}{
		{"gRPC's own retries, no interceptors", []hop{{nil, grpcsOwn}, {nil, threeAttempts}}, 9},
		{"gRPC's own retries obey", []hop{{nil, grpcsOwn}, {on(), threeAttempts}}, 3},
		{"gRPC's own retries are known", []hop{{nil, grpcsOwn}, {on(withMeasures(layers.Measures{OneAttempt: true})), threeAttempts}}, 5},
		{"a service whose client lacks the library", []hop{{nil, threeAttempts}, {on(), nil}, {on(), threeAttempts}}, 9},
		{"a service whose server lacks the interceptors", []hop{{nil, threeAttempts}, {nil, threeAttempts}, {on(), threeAttempts}}, 9},
		{"a service that does not retry passes both on", []hop{{nil, threeAttempts}, {on(), onlyOne}, {on(), threeAttempts}}, 3},
		{"only the first retries, without interceptors", []hop{{nil, threeAttempts}, {nil, onlyOne}, {nil, onlyOne}}, 3},
	} {
		t.Run(tt.name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				if got := attemptsAtTheEnd(t, isDown, tt.row...); got != tt.want {
					t.Errorf("%d attempts at the last service, want %d", got, tt.want)
				}
			})
		})
	}
}

// Functions, and with them HTTP requests, follow the same rules as RPCs.
func TestFunctionsOfAHandler(t *testing.T) {
	for _, tt := range []struct {
		retry  bool
		reason error
		calls  int
		gaveUp bool
	}{
		{retry: false, reason: ErrAttemptsExhausted, calls: 2, gaveUp: true},
		{retry: true, reason: errCallerRetries, calls: 1, gaveUp: false},
	} {
		bubble(t, func(t *testing.T) {
			r := retrierOf(t, steady, WithMaxAttempts(2))
			work, calls := layers.New(t.Context(), tt.retry), 0
			err := r.Do(work, "/sql/read", func(context.Context) error { calls++; return errUnavailable })
			if e := asError(t, err); e.Reason != tt.reason || calls != tt.calls || work.GaveUp() != tt.gaveUp {
				t.Errorf("for a retry %t: %v after %d calls, gave up %t; want %+v", tt.retry, e.Reason, calls, work.GaveUp(), tt)
			}
		})
	}
}

// Three services hedge, and the last one is slow: a hedge is a retry to the services further down, which then
// do not hedge.
func TestRowsOfHedges(t *testing.T) {
	slow := func(ctx context.Context) error {
		select {
		case <-ctx.Done():
		case <-time.After(time.Minute):
		}
		return ctx.Err()
	}
	hedges := DialOptions(hedged(2, Hedging{Delay: HedgeAfter(second)}), WithBudget(Unlimited))
	for name, tt := range map[string]struct {
		server []grpc.ServerOption
		want   int
	}{"without the interceptors": {nil, 8}, "with them": {serverOptions(), 4}} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				if got := attemptsAtTheEnd(t, slow, hop{nil, hedges}, hop{tt.server, hedges}, hop{tt.server, hedges}); got != tt.want {
					t.Errorf("%d attempts at the last service, want %d", got, tt.want)
				}
			})
		})
	}
}
