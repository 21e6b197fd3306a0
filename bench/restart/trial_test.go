package main

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/stats"

	echov1 "github.com/grpcretry/grpcretry/proto/echo/v1"
)

// silent is a client whose calls end with their context.
type silent struct{ echov1.EchoServiceClient }

func (silent) Echo(ctx context.Context, _ *echov1.EchoRequest, _ ...grpc.CallOption) (*echov1.EchoResponse, error) {
	<-ctx.Done()
	return nil, ctx.Err()
}

func TestCallsTogether(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := calls{client: silent{}}
		c.together(t.Context(), 3, 10*time.Second)
		c.running.Wait()
		checkCalls(t, c.made, []time.Duration{0, 0, 0})
	})
}

func TestCallsEveryInterval(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := calls{client: silent{}}
		stop := c.every(t.Context(), 5*time.Millisecond, 10*time.Second)
		if err := pause(t.Context(), 12*time.Millisecond); err != nil {
			t.Fatal(err)
		}
		stop()
		c.running.Wait()
		checkCalls(t, c.made, []time.Duration{0, 5 * time.Millisecond, 10 * time.Millisecond})
	})
}

// checkCalls takes calls with a deadline of 10 s, which ends them, and when each started.
func checkCalls(t *testing.T, made []*call, starts []time.Duration) {
	t.Helper()
	if len(made) != len(starts) {
		t.Fatalf("%d calls, want %d", len(made), len(starts))
	}
	for i, c := range made {
		if started := c.start.Sub(made[0].start); started != starts[i] {
			t.Errorf("call %d started after %v, want %v", i+1, started, starts[i])
		}
		if c.took != 10*time.Second || !errors.Is(c.err, context.DeadlineExceeded) {
			t.Errorf("call %d ended after %v with %v, want its deadline of 10 s", i+1, c.took, c.err)
		}
	}
}

func TestConnections(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := &connections{lost: make(chan struct{})}
		see := func(s stats.ConnStats) {
			c.HandleConn(t.Context(), s)
			time.Sleep(time.Second)
		}
		start := time.Now()
		see(&stats.ConnBegin{})
		select {
		case <-c.lost:
			t.Error("a connection is lost before any has ended")
		default:
		}
		see(&stats.ConnEnd{})
		<-c.lost
		if got := c.reconnected(); !got.IsZero() {
			t.Errorf("reconnected = %v without a connection", got)
		}
		see(&stats.ConnBegin{})
		see(&stats.ConnEnd{})
		see(&stats.ConnBegin{})
		if got := c.reconnected().Sub(start); got != 2*time.Second {
			t.Errorf("reconnected after %v, want 2 s, when the first connection after the loss began", got)
		}
	})
}

func TestPauseEndsWithTheContext(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := pause(ctx, time.Hour); !errors.Is(err, context.Canceled) {
		t.Errorf("pause = %v, want %v", err, context.Canceled)
	}
}
