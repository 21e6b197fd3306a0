package balancer_test

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/resolver"
	"google.golang.org/grpc/status"

	healthpb "google.golang.org/grpc/health/grpc_health_v1"

	"github.com/grpcretry/grpcretry"
	"github.com/grpcretry/grpcretry/grpcretrytest"
)

// The tests in this file combine retries with what grpc-go does beneath the policy.

// An endpoint with several addresses is one endpoint, whatever their order and whichever is in use.
func TestRetriesWithSeveralAddresses(t *testing.T) {
	bubble(t, func(t *testing.T, c *cluster) {
		config := grpc.WithDefaultServiceConfig(`{"loadBalancingConfig":[{"grpcretry_round_robin":{}}]}`)
		wait := grpcretry.WithBackoff(grpcretry.Constant(10 * second))
		cc := c.dialEndpoints(t, []resolver.Endpoint{endpoint("a4", "a6"), endpoint("b4", "b6")},
			append(grpcretry.DialOptions(append(fast(), wait)...), config)...)
		c.behave(func(_ context.Context, backend, _ string, visit int) error {
			if visit > 1 {
				return nil
			}
			time.AfterFunc(second, func() { // its other address takes over, and the resolver changes the order
				c.stop(backend)
				cc.names.UpdateState(resolver.State{Endpoints: []resolver.Endpoint{endpoint("b6", "b4"), endpoint("a6", "a4")}})
			})
			return errDown
		})
		for i := range 2 {
			message := fmt.Sprint("call ", i)
			if _, err := cc.echo(t.Context(), message); err != nil {
				t.Fatal(err)
			}
			if v := c.visited(message); len(v) != 2 || v[0][0] == v[1][0] {
				t.Errorf("attempts went to %v, want two endpoints", v)
			}
		}
	}, "a4", "a6", "b4", "b6")
}

// A backend that is not healthy is not ready. Retries do without it, and do not wait for it.
func TestRetriesWithHealthChecks(t *testing.T) {
	bubble(t, func(t *testing.T, c *cluster) {
		for _, name := range []string{"a", "b", "c"} {
			serving := map[bool]healthpb.HealthCheckResponse_ServingStatus{true: healthpb.HealthCheckResponse_SERVING,
				false: healthpb.HealthCheckResponse_NOT_SERVING}
			c.startWith(t, name).health.SetServingStatus("echo", serving[name != "c"])
		}
		c.fail("a", "b")
		cc := c.dialEndpoints(t, endpoints("a", "b", "c"),
			append(grpcretry.DialOptions(append(fast(), grpcretry.WithMaxAttempts(4))...), healthConfig(ours))...)
		_, err := cc.echo(t.Context(), "call")
		wantGiveUp(t, err, 4)
		if v := c.visited("call"); slices.Contains(v, "c") || v[0] == v[1] || v[1] == v[2] || v[2] == v[3] {
			t.Errorf("attempts went to %v, want a and b in turns", v)
		}
		c.running["c"].health.SetServingStatus("echo", healthpb.HealthCheckResponse_SERVING)
		synctest.Wait()
		if backend, err := cc.echo(t.Context(), "healthy"); err != nil || backend != "c" {
			t.Errorf("Echo = %q, %v, want c", backend, err)
		}
		c.wantDistinct(t, "healthy", len(c.visited("healthy")))
	})
}

// With WaitForReady, gRPC waits, and then the attempt picks like any other.
func TestRetriesWithWaitForReady(t *testing.T) {
	bubble(t, func(t *testing.T, c *cluster) {
		wait := grpcretry.WithBackoff(grpcretry.Constant(second))
		cc := c.dialRetried(t, []string{"a", "b"}, wait, grpcretrytest.Jitter(0))
		c.behave(func(_ context.Context, backend, _ string, visit int) error {
			switch visit {
			case 1:
				time.AfterFunc(second/2, func() { cc.set() })        // then there is no endpoint
				time.AfterFunc(5*second, func() { cc.set(backend) }) // and then the one that was tried
				return errDown
			case 2:
				cc.set("a", "b")
				return errDown
			}
			return nil
		})
		start := time.Now()
		if _, err := cc.echo(t.Context(), "call", grpc.WaitForReady(true)); err != nil {
			t.Fatal(err)
		}
		if v := c.visited("call"); len(v) != 3 || v[0] != v[1] || v[1] == v[2] || time.Since(start) != 6*second {
			t.Errorf("attempts went to %v within %v, want the same twice, then the other, within 6s", v, time.Since(start))
		}
	}, "a", "b")
}

// A call with very many attempts goes round and round, and keeps nothing but the endpoints.
func TestVeryManyAttempts(t *testing.T) {
	bubble(t, func(t *testing.T, c *cluster) {
		names := []string{"a", "b", "c", "d", "e"}
		c.fail(names...)
		_, err := c.dialRetried(t, names, grpcretry.WithMaxAttempts(201)).echo(t.Context(), "call")
		if status.Code(err) != codes.Unavailable {
			t.Fatal(err)
		}
		v := c.visited("call")
		for i := 0; i+5 <= len(v); i += 4 { // the last of a round is the first of the next
			if !areDistinct(v[i : i+5]...) {
				t.Fatalf("attempts %d to %d went to %v, want five backends", i+1, i+5, v[i:i+5])
			}
		}
		if len(v) != 201 {
			t.Errorf("%d attempts, want 201", len(v))
		}
	}, "a", "b", "c", "d", "e")
}

// If the interceptors are chained twice, the outer one retries, and its list counts.
func TestInterceptorsChainedTwice(t *testing.T) {
	bubble(t, func(t *testing.T, c *cluster) {
		c.behave(func(_ context.Context, _, _ string, visit int) error {
			if visit < 3 {
				return errDown
			}
			return nil
		})
		twice := append(grpcretry.DialOptions(fast()...), grpcretry.DialOptions(fast()...)...)
		cc := c.dialPolicy(t, ours, []string{"a", "b", "c"}, twice...)
		for i := range 10 {
			message := fmt.Sprint("call ", i)
			if _, err := cc.echo(t.Context(), message); err != nil {
				t.Fatal(err)
			}
			c.wantDistinct(t, message, 3)
		}
	}, "a", "b", "c")
}

// Two ClientConns to the same backends have nothing in common, not even if one Retrier serves both.
func TestTwoClientConns(t *testing.T) {
	bubble(t, func(t *testing.T, c *cluster) {
		c.behave(func(_ context.Context, _, _ string, visit int) error {
			if visit < 3 {
				return errDown
			}
			return nil
		})
		r, err := grpcretry.New(fast()...)
		if err != nil {
			t.Fatal(err)
		}
		names := []string{"a", "b", "c"}
		var all sync.WaitGroup
		for n := range 2 {
			cc := c.dialPolicy(t, ours, names, r.DialOptions()...)
			all.Go(func() {
				for i := range 50 {
					message := fmt.Sprint("client ", n, " call ", i)
					if _, err := cc.echo(t.Context(), message); err != nil {
						t.Error(err)
					}
					c.wantDistinct(t, message, 3)
				}
			})
		}
		all.Wait()
	}, "a", "b", "c")
}

// Updates of the resolver and calls, all at the same time. A pick whose connection is gone counts as tried although
// no backend has seen the attempt, so now and then a backend is visited twice in a row, but not in a third of all cases.
func TestEverythingAtTheSameTime(t *testing.T) {
	bubble(t, func(t *testing.T, c *cluster) {
		names := []string{"a", "b", "c", "d"}
		c.behave(func(_ context.Context, _, message string, visit int) error {
			time.Sleep(5 * time.Millisecond)
			if visit <= len(message)%4 {
				return errDown
			}
			return nil
		})
		cc := c.dialRetried(t, names, grpcretry.WithBackoff(grpcretry.Constant(7*time.Millisecond)))
		done := make(chan struct{})
		var updates, calls sync.WaitGroup
		updates.Go(func() {
			for i := 0; ; i++ {
				select {
				case <-done:
					return
				case <-time.After(3 * time.Millisecond):
					left := slices.Delete(slices.Clone(names), i%4, i%4+1) // one endpoint is missing at any time
					cc.names.UpdateState(resolver.State{Endpoints: endpoints(left...)})
				}
			}
		})
		for caller := range 4 {
			calls.Go(func() {
				for i := range 30 {
					message := fmt.Sprint("call ", caller, " ", i, strings.Repeat("!", i%4))
					if _, err := cc.echo(t.Context(), message); err != nil {
						t.Error(err)
					}
				}
			})
		}
		calls.Wait()
		close(done)
		updates.Wait()
		pairs, same := 0, 0
		for _, v := range c.visits {
			for n := 1; n < len(v); n++ {
				pairs++
				if v[n] == v[n-1] {
					same++
				}
			}
		}
		t.Logf("%d of %d retries went to the same backend again", same, pairs)
		if pairs < 100 || same > pairs/20 {
			t.Errorf("%d of %d retries went to the same backend again, want hardly any of many", same, pairs)
		}
	}, "a", "b", "c", "d")
}
