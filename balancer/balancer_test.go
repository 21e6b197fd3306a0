package balancer_test

import (
	"context"
	"fmt"
	"net"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/connectivity"
	"google.golang.org/grpc/status"

	"github.com/grpcretry/grpcretry"
	"github.com/grpcretry/grpcretry/balancer"
	echov1 "github.com/grpcretry/grpcretry/proto/echo/v1"
)

// With one of three replicas failing every call, and other calls made all the time, a retry under round_robin
// meets the bad replica again in one of three cases. Here it never does.
func TestARetryDoesNotMeetTheBadReplicaAgain(t *testing.T) {
	const callers, calls = 20, 60
	for _, policy := range []string{ours, plain} {
		t.Run(policy, func(t *testing.T) {
			bubble(t, func(t *testing.T, c *cluster) {
				c.fail("bad")
				wait := grpcretry.WithBackoff(grpcretry.Exponential{Base: second, Jitter: grpcretry.FullJitter})
				cc := c.dialPolicy(t, policy, []string{"bad", "good1", "good2"},
					grpcretry.DialOptions(append(fast(), wait, grpcretry.WithMaxAttempts(100))...)...)
				var all sync.WaitGroup
				for caller := range callers {
					all.Go(func() {
						for call := range calls {
							time.Sleep(time.Duration(caller+call) * time.Millisecond)
							if _, err := cc.echo(t.Context(), fmt.Sprint("call ", caller, " ", call)); err != nil {
								t.Errorf("Echo = %v", err)
							}
						}
					})
				}
				all.Wait()
				retried, again := c.countRetries("bad", callers, calls)
				t.Logf("%d of %d calls met the bad replica first, and %d of these met it again", retried, callers*calls, again)
				switch share := float64(again) / float64(retried); {
				case retried < callers*calls/10:
					t.Errorf("only %d calls met the bad replica, which is too few for a result", retried)
				case policy == ours && again > 0:
					t.Errorf("%d retries met the bad replica again, want none", again)
				case policy == plain && (share < 0.2 || share > 0.45):
					t.Errorf("under round_robin, %.0f%% of the retries met the bad replica again, want a third", 100*share)
				}
			}, "bad", "good1", "good2")
		})
	}
}

// countRetries returns how many calls met a replica first, and how many of those met it again at once.
func (c *cluster) countRetries(replica string, callers, calls int) (retried, again int) {
	for caller := range callers {
		for call := range calls {
			visits := c.visited(fmt.Sprint("call ", caller, " ", call))
			if visits[0] == replica {
				retried++
				if visits[1] == replica {
					again++
				}
			}
		}
	}
	return retried, again
}

// Retries take the turns of the endpoints that they pass over, so the good replicas share them equally.
func TestRetriesSpreadOverTheOthers(t *testing.T) {
	bubble(t, func(t *testing.T, c *cluster) {
		c.fail("bad")
		cc := c.dialRetried(t, []string{"bad", "b", "c", "d"})
		got := cc.tally(t, 600)
		for _, name := range []string{"b", "c", "d"} {
			if got[name] != 200 {
				t.Errorf("successes %v, want 200 for each good replica", got)
				break
			}
		}
	}, "bad", "b", "c", "d")
}

// When all have been tried, a new round begins, in the same order.
func TestRounds(t *testing.T) {
	bubble(t, func(t *testing.T, c *cluster) {
		c.fail("a", "b", "c")
		cc := c.dialRetried(t, []string{"a", "b", "c"}, grpcretry.WithMaxAttempts(7))
		for i := range 20 {
			message := fmt.Sprint("call ", i)
			_, err := cc.echo(t.Context(), message)
			wantGiveUp(t, err, 7)
			v := c.visited(message)
			if !areDistinct(v[0:3]...) || !slices.Equal(v[3:6], v[0:3]) || v[6] != v[0] {
				t.Errorf("attempts went to %v, want equal rounds over all three", v)
			}
		}
	}, "a", "b", "c")
}

func TestOneEndpoint(t *testing.T) {
	bubble(t, func(t *testing.T, c *cluster) {
		c.fail("a")
		_, err := c.dialRetried(t, []string{"a"}, grpcretry.WithMaxAttempts(3)).echo(t.Context(), "call")
		wantGiveUp(t, err, 3)
		if got := c.visited("call"); !slices.Equal(got, []string{"a", "a", "a"}) {
			t.Errorf("attempts went to %v, want a, a, a", got)
		}
	}, "a")
}

// An endpoint that the call has tried is better than one that is not ready.
func TestEndpointsThatAreNotReadyDoNotCount(t *testing.T) {
	bubble(t, func(t *testing.T, c *cluster) {
		c.dialAs("hanging", hanging)
		c.fail("a", "b")
		cc := c.dialRetried(t, []string{"a", "b", "hanging", "refused"}, grpcretry.WithMaxAttempts(5))
		start := time.Now()
		_, err := cc.echo(t.Context(), "call")
		wantGiveUp(t, err, 5)
		v := c.visited("call")
		if len(v) != 5 || v[0] == v[1] || v[1] == v[2] || v[2] == v[3] || v[3] == v[4] || time.Since(start) != 0 {
			t.Errorf("attempts went to %v within %v, want a and b in turns without a wait", v, time.Since(start))
		}
	}, "a", "b")
}

// The following tests compare with round_robin.

func TestCallsQueueWhileNothingIsReady(t *testing.T) {
	withBoth(t, func(t *testing.T, c *cluster, policy string) {
		c.dialAs("a", hanging)
		c.dialAs("b", func(ctx context.Context) (net.Conn, error) {
			time.Sleep(3 * second)
			c.start(t, "b")
			return c.dial(ctx, "b")
		})
		cc := c.dialPolicy(t, policy, []string{"a", "b"})
		if got := cc.GetState(); got != connectivity.Connecting {
			t.Fatalf("state %v, want CONNECTING", got)
		}
		start := time.Now()
		backend, err := cc.echo(t.Context(), "call")
		if err != nil || backend != "b" || time.Since(start) != 3*second {
			t.Errorf("Echo = %q, %v after %v, want b after 3s", backend, err, time.Since(start))
		}
	})
}

func TestCallsFailWhenNothingCanBeReached(t *testing.T) {
	withBoth(t, func(t *testing.T, c *cluster, policy string) {
		cc := c.dialPolicy(t, policy, []string{"a", "b"})
		if _, err := cc.echo(t.Context(), "call"); status.Code(err) != codes.Unavailable {
			t.Errorf("Echo = %v, want UNAVAILABLE", err)
		}
		time.AfterFunc(5*second, func() { c.start(t, "b") })
		if backend, err := cc.echo(t.Context(), "waiting", grpc.WaitForReady(true)); err != nil || backend != "b" {
			t.Errorf("Echo with WaitForReady = %q, %v, want b", backend, err)
		}
	})
}

// A retry that waits for a connection picks like any other.
func TestARetryThatWaitsForAConnection(t *testing.T) {
	bubble(t, func(t *testing.T, c *cluster) {
		c.behave(func(_ context.Context, backend, _ string, visit int) error {
			if visit == 1 {
				other := map[string]string{"a": "b", "b": "a"}[backend]
				go func() { c.stop(other); c.stop(backend) }() // in this order, so that the retry meets neither
				time.AfterFunc(2*second, func() { c.start(t, "a", "b") })
				time.Sleep(second)
				return errDown
			}
			return nil
		})
		cc := c.dialRetried(t, []string{"a", "b"})
		if _, err := cc.echo(t.Context(), "call"); err != nil {
			t.Fatal(err)
		}
		if v := c.visited("call"); len(v) != 2 {
			t.Errorf("attempts went to %v, want two", v)
		}
	}, "a", "b")
}

// An endpoint that goes and comes back is known as tried; those that come are new.
func TestEndpointsThatComeAndGo(t *testing.T) {
	bubble(t, func(t *testing.T, c *cluster) {
		cc := c.dialPolicy(t, ours, []string{"a", "b"}, grpcretry.DialOptions(append(fast(),
			grpcretry.WithBackoff(grpcretry.Constant(second)))...)...)
		var tried []string
		c.behave(func(_ context.Context, backend, _ string, visit int) error {
			tried = append(tried, backend)
			other := map[string]string{"a": "b", "b": "a"}[tried[0]]
			switch visit {
			case 1: // the endpoint goes, and the other is all there is
				time.AfterFunc(second/2, func() { cc.set(other) })
			case 2: // it comes back, together with a new one
				time.AfterFunc(second/2, func() { cc.set(tried[0], other, "c") })
			case 3: // all have been tried; two new ones come
				time.AfterFunc(second/2, func() { cc.set("a", "b", "c", "d") })
			case 4:
				return nil
			}
			return errDown
		})
		if _, err := cc.echo(t.Context(), "call"); err != nil {
			t.Fatal(err)
		}
		if len(tried) != 4 || tried[0] == tried[1] || tried[2] != "c" || tried[3] != "d" {
			t.Errorf("attempts went to %v, want a and b in some order, then c, then d", tried)
		}
	}, "a", "b", "c", "d")
}

// A backend whose server restarts is still known as tried.
func TestABackendThatRestarts(t *testing.T) {
	bubble(t, func(t *testing.T, c *cluster) {
		wait := grpcretry.WithBackoff(grpcretry.Constant(10 * second))
		cc := c.dialRetried(t, []string{"a", "b"}, wait)
		c.behave(func(_ context.Context, backend, _ string, visit int) error {
			if visit == 1 {
				time.AfterFunc(second, func() { c.stop(backend); c.start(t, backend) })
				return errDown
			}
			return nil
		})
		for i := range 10 {
			message := fmt.Sprint("call ", i)
			if _, err := cc.echo(t.Context(), message); err != nil {
				t.Fatal(err)
			}
			c.wantDistinct(t, message, 2)
		}
	}, "a", "b")
}

// An idle ClientConn forgets its policy, but the call knows what it has tried.
func TestIdleMode(t *testing.T) {
	bubble(t, func(t *testing.T, c *cluster) {
		wait := grpcretry.WithBackoff(grpcretry.Constant(time.Minute))
		cc := c.dialPolicy(t, ours, []string{"a", "b", "c"},
			append(grpcretry.DialOptions(append(fast(), wait)...), grpc.WithIdleTimeout(10*second))...)
		var idle atomic.Int32
		c.behave(func(_ context.Context, _, _ string, visit int) error {
			if visit == 3 {
				return nil
			}
			time.AfterFunc(30*second, func() {
				if cc.GetState() == connectivity.Idle {
					idle.Add(1)
				}
			})
			time.AfterFunc(55*second, cc.Connect) // otherwise the attempt goes to the first endpoint that is ready
			return errDown
		})
		for i := range 10 {
			message := fmt.Sprint("call ", i)
			if _, err := cc.echo(t.Context(), message); err != nil {
				t.Fatal(err)
			}
			c.wantDistinct(t, message, 3)
		}
		if got := idle.Load(); got != 20 {
			t.Errorf("the ClientConn was idle in %d of 20 waits", got)
		}
	}, "a", "b", "c")
}

func TestStreams(t *testing.T) {
	request := func(message string) *echov1.EchoRequest { return &echov1.EchoRequest{Message: message} }
	for kind, call := range map[string]func(ctx context.Context, cc *client, message string) error{
		"server": func(ctx context.Context, cc *client, message string) error {
			stream, err := cc.Expand(ctx, request(message))
			if err != nil {
				return err
			}
			_, err = stream.Recv()
			return err
		},
		"client": func(ctx context.Context, cc *client, message string) error {
			stream, err := cc.Collect(ctx)
			if err != nil {
				return err
			}
			_ = stream.Send(request(message))
			_, err = stream.CloseAndRecv()
			return err
		},
		"bidi": func(ctx context.Context, cc *client, message string) error {
			stream, err := cc.Chat(ctx)
			if err != nil {
				return err
			}
			_ = stream.Send(request(message))
			_, err = stream.Recv()
			return err
		},
	} {
		t.Run(kind, func(t *testing.T) {
			bubble(t, func(t *testing.T, c *cluster) {
				c.behave(func(_ context.Context, _, _ string, visit int) error {
					if visit < 4 {
						return errDown
					}
					return nil
				})
				cc := c.dialRetried(t, []string{"a", "b", "c", "d"})
				for i := range 20 {
					message := fmt.Sprint("call ", i)
					ctx, cancel := context.WithCancel(t.Context())
					if err := call(ctx, cc, message); err != nil {
						t.Fatal(err)
					}
					cancel()
					c.wantDistinct(t, message, 4)
				}
			}, "a", "b", "c", "d")
		})
	}
}

// Attempts of a hedged call run at the same time, on backends of their own.
func TestHedges(t *testing.T) {
	for name, delay := range map[string]time.Duration{"one after the other": second, "all at the same time": 0} {
		hedging := grpcretry.WithPolicy(grpcretry.Policy{MaxAttempts: 4,
			Hedging: &grpcretry.Hedging{Delay: grpcretry.HedgeAfter(delay), AllMethodsAreSafe: true, Budget: grpcretry.Unlimited}})
		for kind, call := range map[string]func(ctx context.Context, cc *client, message string) error{
			"unary": func(ctx context.Context, cc *client, message string) error {
				_, err := cc.echo(ctx, message)
				return err
			},
			"stream": func(ctx context.Context, cc *client, message string) error {
				stream, err := cc.Expand(ctx, &echov1.EchoRequest{Message: message})
				if err != nil {
					return err
				}
				_, err = stream.Recv()
				return err
			},
		} {
			t.Run(kind+" "+name, func(t *testing.T) {
				bubble(t, func(t *testing.T, c *cluster) {
					c.behave(func(ctx context.Context, _, _ string, visit int) error {
						if visit == 4 {
							return nil
						}
						<-ctx.Done()
						return ctx.Err()
					})
					cc := c.dialRetried(t, []string{"a", "b", "c", "d"}, hedging)
					for i := range 20 {
						message := fmt.Sprint("call ", i)
						ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
						if err := call(ctx, cc, message); err != nil {
							t.Fatal(err)
						}
						cancel()
						synctest.Wait()
						c.wantDistinct(t, message, 4)
					}
				}, "a", "b", "c", "d")
			})
		}
	}
}

// Attempts that are cut by the attempt timeout go elsewhere, too.
func TestAttemptTimeout(t *testing.T) {
	bubble(t, func(t *testing.T, c *cluster) {
		c.behave(func(ctx context.Context, backend, _ string, _ int) error {
			if backend != "good" {
				<-ctx.Done()
			}
			return ctx.Err()
		})
		cc := c.dialRetried(t, []string{"slow1", "slow2", "good"}, grpcretry.WithAttemptTimeout(second))
		for i := range 12 {
			message := fmt.Sprint("call ", i)
			if _, err := cc.echo(t.Context(), message); err != nil {
				t.Fatal(err)
			}
			if v := c.visited(message); !areDistinct(v...) {
				t.Errorf("attempts went to %v, want each backend once", v)
			}
		}
	}, "slow1", "slow2", "good")
}

// Calls without a list get plain round robin: those that are not made through an interceptor, and those that
// pass through one.
func TestCallsWithoutAList(t *testing.T) {
	withBoth(t, func(t *testing.T, c *cluster, policy string) {
		c.dialPolicy(t, policy, []string{"a", "b", "c"}).wantRotation(t, "a", "b", "c")
		c.dialPolicy(t, policy, []string{"a", "b", "c"}, grpcretry.DialOptions(grpcretry.Disable())...).wantRotation(t, "a", "b", "c")
		c.dialPolicy(t, policy, []string{"a", "b", "c"}, grpcretry.DialOptions()...).wantRotation(t, "a", "b", "c")
	}, "a", "b", "c")
}

// A call that an interceptor makes within an attempt has the attempt's context. On another ClientConn it has
// tried nothing, and what it tries is not known to the call around it; the same for another method.
func TestCallsWithinAnAttempt(t *testing.T) {
	names := []string{"a", "b", "c", "d"}
	for name, within := range map[string]func(ctx context.Context, same, other *client) (backend string, err error){
		"on another ClientConn": func(ctx context.Context, _, other *client) (string, error) {
			return other.echo(ctx, "within")
		},
		"of another method": func(ctx context.Context, same, _ *client) (string, error) {
			reply, err := same.Put(ctx, &echov1.EchoRequest{Message: "within"})
			return reply.GetMessage(), err
		},
	} {
		for calls := range 6 { // within each attempt
			t.Run(fmt.Sprint(name, " ", calls), func(t *testing.T) {
				bubble(t, func(t *testing.T, c *cluster) {
					c.behave(func(_ context.Context, _, message string, visit int) error {
						if visit < 4 && message != "within" {
							return errDown
						}
						return nil
					})
					other := c.dialPolicy(t, ours, names)
					var same *client
					below := grpc.WithChainUnaryInterceptor(func(ctx context.Context, method string, req, reply any, cc *grpc.ClientConn,
						invoker grpc.UnaryInvoker, opts ...grpc.CallOption) error {
						if method == echov1.EchoService_Echo_FullMethodName {
							var visited []string
							for range calls {
								backend, err := within(ctx, same, other)
								if err != nil {
									return err
								}
								visited = append(visited, backend)
							}
							if n := min(calls, 4); !areDistinct(visited[:n]...) {
								t.Errorf("the calls within an attempt went to %v, want them to rotate", visited)
							}
						}
						return invoker(ctx, method, req, reply, cc, opts...)
					})
					same = c.dialPolicy(t, ours, names, append(grpcretry.DialOptions(append(fast(), grpcretry.WithMethod(
						echov1.EchoService_Put_FullMethodName, grpcretry.Disable()))...), below)...)
					for i := range 10 {
						message := fmt.Sprint("call ", i)
						if _, err := same.echo(t.Context(), message); err != nil {
							t.Fatal(err)
						}
						c.wantDistinct(t, message, 4)
					}
				}, names...)
			})
		}
	}
}

// gRPC's own retries, of a call that is left to it, are picks of one attempt.
func TestRetriesByGRPC(t *testing.T) {
	bubble(t, func(t *testing.T, c *cluster) {
		c.behave(func(_ context.Context, _, _ string, visit int) error {
			if visit < 4 {
				return errDown
			}
			return nil
		})
		config, err := balancer.ServiceConfig(`{"methodConfig":[{"name":[{}],"retryPolicy":{"maxAttempts":4,
			"initialBackoff":"1s","maxBackoff":"1s","backoffMultiplier":1,"retryableStatusCodes":["UNAVAILABLE"]}}]}`)
		if err != nil {
			t.Fatal(err)
		}
		cc := c.dialEndpoints(t, endpoints("a", "b", "c", "d"), grpc.WithDefaultServiceConfig(config),
			grpc.WithChainUnaryInterceptor(grpcretry.UnaryClientInterceptor()))
		for i := range 20 {
			message := fmt.Sprint("call ", i)
			if _, err := cc.echo(t.Context(), message); err != nil {
				t.Fatal(err)
			}
			c.wantDistinct(t, message, 4)
		}
	}, "a", "b", "c", "d")
}

// However many retries there are, first attempts go to all replicas equally, as under round_robin.
func TestFirstAttemptsGoToAll(t *testing.T) {
	bubble(t, func(t *testing.T, c *cluster) {
		c.fail("bad")
		cc := c.dialRetried(t, []string{"bad", "b", "c"})
		first := map[string]int{}
		for i := range 600 {
			message := fmt.Sprint("call ", i)
			if _, err := cc.echo(t.Context(), message); err != nil {
				t.Fatal(err)
			}
			first[c.visited(message)[0]]++
		}
		for _, name := range []string{"bad", "b", "c"} {
			if first[name] != 200 {
				t.Fatalf("first attempts %v, want 200 for each", first)
			}
		}
	}, "bad", "b", "c")
}
