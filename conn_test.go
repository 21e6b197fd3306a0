package grpcretry

import (
	"context"
	"net"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"

	"github.com/grpcretry/grpcretry/internal/conns"
	echov1 "github.com/grpcretry/grpcretry/proto/echo/v1"
)

func TestOneGoroutineWatchesForAllThatWait(t *testing.T) {
	bubble(t, func(t *testing.T) {
		server := serve(t, always(unavailable()))
		r := retrierOf(t, WithBackoff(Constant(time.Hour)), WithBudget(Unlimited))
		cc := server.conn(t, r.DialOptions()...)
		var group sync.WaitGroup
		for range 50 {
			group.Go(func() { echov1.NewEchoServiceClient(cc).Echo(t.Context(), request()) })
		}
		time.Sleep(second)
		if got := r.connections.Waiting(); len(got) != 1 || got[cc] != 50 {
			t.Errorf("watchers are %v, want one for 50 calls", got)
		}
		cc.Close()
		group.Wait()
		if got := time.Since(server.start); got != second {
			t.Errorf("calls ended after %v, want 1s", got)
		}
		if got := len(r.connections.Waiting()); got != 0 {
			t.Errorf("%d watchers are left", got)
		}
	})
}

// idling are the options of a channel with gRPC's own backoff that becomes idle after timeout, and what
// dials for it.
func idling(timeout time.Duration, dial func(context.Context, string) (net.Conn, error)) []grpc.DialOption {
	return []grpc.DialOption{
		grpc.WithIdleTimeout(timeout),
		grpc.WithConnectParams(grpc.ConnectParams{Backoff: backoff.DefaultConfig, MinConnectTimeout: 20 * second}),
		grpc.WithContextDialer(dial),
	}
}

// A channel that becomes idle forgets its backoff. While a call waits, it is woken when gRPC would have
// dialed: at 0, 1, 2.6, 5.16, 9.26, 15.8 and 26.3 s, give or take 20% of each wait, and then not before
// 34 s. If the channel stays awake for longer than gRPC's first redial takes, those that gRPC makes by
// itself count, too; the last wake-up may add some.
func TestAnIdleChannelIsWokenNoOftenerThanGRPCDials(t *testing.T) {
	for _, tt := range []struct {
		timeout     time.Duration
		least, most int32
	}{
		{time.Hour, 7, 7}, // gRPC's own
		{second / 100, 7, 7},
		{second / 2, 7, 7},
		{second * 3 / 2, 6, 8},
		{2 * second, 6, 8},
		{5 * second, 6, 8},
	} {
		t.Run(tt.timeout.String(), func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				var dials atomic.Int32
				cc := serve(t, always(ok())).conn(t, idling(tt.timeout, func(context.Context, string) (net.Conn, error) {
					dials.Add(1)
					return nil, errRefused
				})...)
				_, _, unwatch := conns.New().Await(cc)
				time.Sleep(32 * second)
				unwatch()
				if got := dials.Load(); got < tt.least || got > tt.most {
					t.Errorf("%d dials, want %d to %d", got, tt.least, tt.most)
				}
			})
		})
	}
}
