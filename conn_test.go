package grpcretry

import (
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"

	echov1 "github.com/grpcretry/grpcretry/proto/echo/v1"
)

func TestOneGoroutineWatchesForAllThatWait(t *testing.T) {
	bubble(t, func(t *testing.T) {
		server := serve(t, always(unavailable()))
		r, err := New(WithBackoff(Constant(time.Hour)), WithBudget(Unlimited))
		if err != nil {
			t.Fatal(err)
		}
		cc := server.conn(t, r.DialOptions()...)
		var group sync.WaitGroup
		for range 50 {
			group.Go(func() { echov1.NewEchoServiceClient(cc).Echo(t.Context(), request()) })
		}
		time.Sleep(second)
		r.connections.mu.Lock()
		watchers, waiting := len(r.connections.watchers), r.connections.watchers[cc].waiting
		r.connections.mu.Unlock()
		if watchers != 1 || waiting != 50 {
			t.Errorf("%d watchers for %d calls, want 1 for 50", watchers, waiting)
		}
		cc.Close()
		group.Wait()
		if got := time.Since(server.start); got != second {
			t.Errorf("calls ended after %v, want 1s", got)
		}
		if got := len(r.connections.watchers); got != 0 {
			t.Errorf("%d watchers are left", got)
		}
	})
}

func TestAHedgedCallIsWatchedNoLongerThanItWaits(t *testing.T) {
	bubble(t, func(t *testing.T) {
		server := serve(t, script(unavailable().pushback("9000"), ok()))
		r, err := New(hedged(Hedging{Delay: HedgeAfter(second)}))
		if err != nil {
			t.Fatal(err)
		}
		client := echov1.NewEchoServiceClient(server.conn(t, r.DialOptions()...))
		time.AfterFunc(5*second, func() {
			r.connections.mu.Lock()
			defer r.connections.mu.Unlock()
			if got := len(r.connections.watchers); got != 1 {
				t.Errorf("%d watchers while a call waits, want 1", got)
			}
		})
		if _, err := client.Echo(t.Context(), request()); err != nil {
			t.Error(err)
		}
		if got := len(r.connections.watchers); got != 0 {
			t.Errorf("%d watchers are left", got)
		}
	})
}

func TestShortWaitsAreNotWatched(t *testing.T) {
	c := newConnections()
	closed, unwatch := c.watch(&grpc.ClientConn{}, shortWait)
	defer unwatch()
	if closed != nil || len(c.watchers) != 0 {
		t.Error("a short wait is watched")
	}
}
