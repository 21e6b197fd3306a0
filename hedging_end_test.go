package grpcretry

import (
	"context"
	"errors"
	"fmt"
	"io"
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
				budget := &aBudget{}
				ctx, cancel := context.WithCancel(t.Context())
				time.AfterFunc(3*second/2, cancel)
				_, err := server.client(t, WithBudget(budget),
					hedged(Hedging{MaxAttempts: 3, Delay: HedgeAfter(second)})).Echo(ctx, request())
				if status.Code(err) != codes.Canceled || !errors.Is(err, context.Canceled) {
					t.Errorf("Echo = %v, want the cancellation", err)
				}
				if got := time.Since(server.start); got != 3*second/2 {
					t.Errorf("Echo took %v, want 1.5s", got)
				}
				wantAccounts(t, budget, len(server.attempts()))
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
				cc := server.conn(t, DialOptions(hedged(Hedging{MaxAttempts: 3, Delay: HedgeAfter(second)}))...)
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
		cc := server.conn(t, append(DialOptions(hedged(Hedging{Delay: HedgeAfter(second)})),
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

// Nothing is sent any more when the caller has gone, also while attempts take their time
// to notice.
func TestNoHedgeForACallerThatHasGone(t *testing.T) {
	for name, pushback := range map[string]string{"a hedge": "", "a retry": "1000"} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				budget := &aBudget{}
				ctx, cancel := context.WithCancel(t.Context())
				defer cancel()
				time.AfterFunc(3*second/2, cancel)
				var mu sync.Mutex
				sent := 0
				err := hedgedEcho(ctx, func(ctx context.Context, n int) error {
					mu.Lock()
					sent++
					mu.Unlock()
					if n == 2 && pushback != "" {
						return fail(codes.Unavailable, "x", retryInfoOf(second)).err
					}
					time.Sleep(5 * second) // deaf
					return ctx.Err()
				}, WithBudget(budget), hedged(Hedging{MaxAttempts: 9, Delay: HedgeAfter(second)}))
				if status.Code(err) != codes.Canceled || sent != 2 {
					t.Errorf("%d attempts, and %v, want 2 and the cancellation", sent, err)
				}
				wantAccounts(t, budget, 2)
			})
		})
	}
	t.Run("closed", func(t *testing.T) {
		bubble(t, func(t *testing.T) {
			server := serve(t, always(hang()))
			slow := belowUnary(func(ctx context.Context, next func(context.Context) error) error {
				defer time.Sleep(5 * second)
				return next(ctx)
			})
			events := &hedgeEvents{}
			cc := server.conn(t, append(DialOptions(WithObserver(events.observe),
				hedged(Hedging{MaxAttempts: 9, Delay: HedgeAfter(second)})),
				slow)...)
			time.AfterFunc(3*second/2, func() { cc.Close() })
			_, err := echov1.NewEchoServiceClient(cc).Echo(t.Context(), request())
			events.check(t, err)
			if got := len(events.events[len(events.events)-1].Attempts); got != 2 {
				t.Errorf("%d attempts, the last after the connection was closed, want 2", got)
			}
		})
	})
}

// The contexts of all attempts end with the call, and nothing stays with the caller's.
func TestNothingOfAHedgedCallStays(t *testing.T) {
	retryPolicy := grpc.WithDefaultServiceConfig(`{"methodConfig":[{"name":[{}],"retryPolicy":{"maxAttempts":2,` +
		`"initialBackoff":"1s","maxBackoff":"1s","backoffMultiplier":1,"retryableStatusCodes":["ABORTED"]}}]}`)
	for _, tt := range []struct {
		name   string
		script func(int) answer
		dial   []grpc.DialOption
	}{
		{"success", script(ok()), nil},
		{"the hedge wins", script(hang(), ok()), nil},
		{"the first wins", script(ok().after(3*second/2), hang()), nil},
		{"a fatal failure", script(hang(), fail(codes.NotFound, "x")), nil},
		{"all fail", always(unavailable()), nil},
		{"left to gRPC", script(unavailable()), []grpc.DialOption{retryPolicy}},
		{"left to gRPC, and slow", script(unavailable().after(9 * second)), []grpc.DialOption{retryPolicy}},
		{"attempt timeouts", always(hang()), nil},
	} {
		t.Run(tt.name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				server := serve(t, tt.script)
				var mu sync.Mutex
				var attempts []*attempt
				note := func(ctx context.Context, method string, req, reply any, cc *grpc.ClientConn, invoker grpc.UnaryInvoker,
					opts ...grpc.CallOption) error {
					mu.Lock()
					attempts = append(attempts, ctx.Value(attemptKey{}).(*attempt))
					mu.Unlock()
					return invoker(ctx, method, req, reply, cc, opts...)
				}
				cc := server.conn(t, append(tt.dial, grpc.WithChainUnaryInterceptor(UnaryClientInterceptor(
					WithAttemptTimeout(20*second), hedged(Hedging{Delay: HedgeAfter(second)})), note))...)
				ctx := &countingContext{Context: context.WithoutCancel(t.Context())}
				echov1.NewEchoServiceClient(cc).Echo(ctx, request())
				if got := ctx.number(); got != 0 {
					t.Errorf("%d functions wait for the end of the caller's context after the call", got)
				}
				for _, a := range attempts {
					if a.bounds.timer != nil && a.bounds.timer.Stop() {
						t.Errorf("the timer of attempt %d runs on", a.number)
					}
					if a.Err() == nil {
						t.Errorf("the context of attempt %d is alive", a.number)
					}
				}
				if len(attempts) == 0 {
					t.Error("no attempts")
				}
			})
		})
	}
}

// The timer too ends with the call.
func TestTheTimerOfAHedgedCallEnds(t *testing.T) {
	bubble(t, func(t *testing.T) {
		for name, run := range map[string]func(n int) error{
			"the hedge wins": func(n int) error { time.Sleep(time.Duration(3-n) * second); return nil },
			"success":        func(int) error { return nil },
			"a fatal failure": func(n int) error {
				time.Sleep(time.Duration(3-n) * second)
				return io.EOF
			},
			"no more": func(n int) error { return fail(codes.Unavailable, "x", retryInfoOf(time.Hour)).err },
		} {
			r, err := New(hedged(Hedging{MaxAttempts: 3, Delay: HedgeAfter(3 * second / 4)}), WithMaxServerDelay(time.Minute))
			if err != nil {
				t.Fatal(err)
			}
			u := &hedgedUnary{reply: &echov1.EchoResponse{}, replies: typeOfReply(&echov1.EchoResponse{})}
			u.invoker = func(ctx context.Context, _ string, _, _ any, _ *grpc.ClientConn, _ ...grpc.CallOption) error {
				return run(int(ctx.(*attempt).number))
			}
			u.hedging.attempts, u.hedging.first, u.hedging.delay = u, &u.first, 3*second/4
			c := call{rpc: rpc{retrier: r, facts: facts{ctx: t.Context(), method: echoMethod, policy: r.settings.current().of(echoMethod).hedged,
				mode: modeHedged}, delay: 3 * second / 4}}
			c.begin(&u.first)
			u.rpc = c.rpc
			u.hedging.run()
			if u.hedging.timer.Stop() {
				t.Errorf("%s: the timer runs on", name)
			}
		}
	})
}

// A panic of what a caller gives us, or of an attempt below, is the caller's where it
// happens on its goroutine, and nothing of the call is left then: the other attempts have
// ended, and what was paid for is given back.
func TestAPanicOfAHedgedCallIsTheCallers(t *testing.T) {
	during := func(kind EventKind) Option {
		return WithObserver(func(_ context.Context, e Event) {
			if e.Kind == kind && e.Attempt.Number == 1 {
				panic("drawn")
			}
		})
	}
	stop := func(context.Context, Attempt) Classification { panic("drawn") }
	for _, tt := range []struct {
		name  string
		first func() error
		opts  []Option
	}{
		{"an attempt", func() error { panic("drawn") }, nil},
		{"the classifier", func() error { return errUnavailable }, []Option{WithClassifier(stop)}},
		{"an observer of a failure", func() error { return errUnavailable }, []Option{during(AttemptEnd)}},
		{"an observer of a decision", func() error { return errUnavailable }, []Option{during(Decision)}},
		{"the delay", func() error { return nil }, []Option{hedged(Hedging{Delay: panickyDelay{HedgeAfter(second)}})}},
	} {
		for _, after := range []time.Duration{second / 2, second, 3 * second / 2} { // before the hedge, with it, and while it runs
			if tt.name != "an attempt" && after == second {
				continue // the panic may be the timer's, and end the program
			}
			t.Run(fmt.Sprint(tt.name, " after ", after), func(t *testing.T) {
				bubble(t, func(t *testing.T) {
					budget := &aBudget{}
					var mu sync.Mutex
					open, hedges := 0, 0
					var first context.Context
					defer func() {
						if got := recover(); got != "drawn" {
							t.Errorf("recovered %v, want what was thrown", got)
						}
						mu.Lock()
						defer mu.Unlock()
						if open != 0 {
							t.Errorf("%d attempts run on after the call", open)
						}
						if first.Err() == nil {
							t.Error("the context of the first attempt is alive after the call")
						}
						if paid := len(budget.asked) - budget.refunded; paid != hedges {
							t.Errorf("%d hedges were sent and %d paid for", hedges, paid)
						}
						heard := 0
						for _, o := range budget.heard {
							if o.Attempt > 1 {
								heard++
								if o.Result != Ignored {
									t.Errorf("budget heard %v of a hedge, want Ignored", o.Result)
								}
							}
						}
						if heard != hedges {
							t.Errorf("budget heard of %d hedges, want %d", heard, hedges)
						}
					}()
					hedgedEcho(t.Context(), func(ctx context.Context, n int) error {
						if n == 1 {
							first = ctx
							time.Sleep(after)
							return tt.first()
						}
						mu.Lock()
						open++
						hedges++
						mu.Unlock()
						<-ctx.Done()
						time.Sleep(second) // it takes its time to end
						mu.Lock()
						defer mu.Unlock()
						open--
						return ctx.Err()
					}, append([]Option{WithBudget(budget), hedged(Hedging{Delay: HedgeAfter(second)})}, tt.opts...)...)
				})
			})
		}
	}
}

// What happened before a panic, and waits to be handled, is not handled after it: it
// might panic again.
func TestAfterAPanicNobodyIsTold(t *testing.T) {
	bubble(t, func(t *testing.T) {
		var mu sync.Mutex
		asked, events, open := 0, 0, 0
		defer func() {
			if got := recover(); got != "drawn" {
				t.Errorf("recovered %v, want what was thrown", got)
			}
			mu.Lock()
			defer mu.Unlock()
			if asked != 1 || open != 0 || events != 3 {
				t.Errorf("the classifier was asked %d times, %d attempts run on, and there were %d events, want 1, 0 and 3 starts",
					asked, open, events)
			}
		}()
		hedgedEcho(t.Context(), func(ctx context.Context, n int) error {
			mu.Lock()
			open++
			mu.Unlock()
			defer func() {
				mu.Lock()
				defer mu.Unlock()
				open--
			}()
			switch n {
			case 1:
				time.Sleep(5 * second / 2)
				return errUnavailable
			case 2:
				time.Sleep(2 * second) // fails while the classifier is asked about the first
				return errUnavailable
			}
			<-ctx.Done()
			return ctx.Err()
		}, WithObserver(func(context.Context, Event) { mu.Lock(); events++; mu.Unlock() }),
			WithClassifier(func(context.Context, Attempt) Classification {
				mu.Lock()
				asked++
				mu.Unlock()
				time.Sleep(second)
				panic("drawn")
			}), hedged(Hedging{MaxAttempts: 3, Delay: HedgeAfter(second)}))
	})
}
