package grpcretry

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// The tests here are of the attempt timeout, which ends an attempt only if another one follows.

// A slow response arrives if no retry could take its place.
func TestATimeoutTurnsNoSlowResponseIntoAFailure(t *testing.T) {
	slow := ok().after(5 * second)
	for _, tt := range []struct {
		name   string
		limit  time.Duration // the caller's deadline; 0 for none
		opts   []Option
		script []answer
		code   codes.Code
		want   []time.Duration // attempts
		took   time.Duration
		paid   int
	}{
		{"a retry follows", 20 * second, nil, []answer{slow, ok()}, codes.OK, []time.Duration{0, 3 * second}, 3 * second, 1},
		{"it responds before it is replaced", 20 * second, nil, []answer{ok().after(5 * second / 2)}, codes.OK, []time.Duration{0},
			5 * second / 2, 0},
		{"it fails before it is replaced", 20 * second, nil, []answer{unavailable().after(5 * second / 2), ok()}, codes.OK,
			[]time.Duration{0, 7 * second / 2}, 7 * second / 2, 1},
		{"the budget is empty", 20 * second, []Option{WithBudget(stingy{})}, []answer{slow}, codes.OK, []time.Duration{0}, 5 * second, 0},
		{"the budget is empty at the timeout, and not when the retry is due", 20 * second, []Option{WithBudget(opening{after: 5 * second / 2})},
			[]answer{slow, ok()}, codes.OK, []time.Duration{0, 3 * second}, 3 * second, 0},
		{"the same without patience", 20 * second, []Option{WithBudget(opening{after: 5 * second / 2}), WithPatience(0)},
			[]answer{slow, ok()}, codes.OK, []time.Duration{0, 3 * second}, 3 * second, 0},
		{"the last attempt", 20 * second, []Option{WithMaxAttempts(2)}, []answer{slow, slow}, codes.OK, []time.Duration{0, 3 * second},
			8 * second, 1},
		{"MaxElapsed leaves no room", 20 * second, []Option{WithMaxElapsed(3 * second)}, []answer{slow}, codes.OK, []time.Duration{0},
			5 * second, 0},
		{"it is judged by its own result", 20 * second, []Option{WithBudget(stingy{})},
			[]answer{fail(codes.NotFound, "gone").after(5 * second)}, codes.NotFound, []time.Duration{0}, 5 * second, 0},
		{"its own failure may be retried", 20 * second, []Option{WithMaxElapsed(7 * second), WithBackoff(Constant(6 * second))},
			[]answer{unavailable().after(5 * second).pushback("1000"), ok()}, codes.OK, []time.Duration{0, 6 * second}, 6 * second, 1},
		{"without a deadline it ends all the same", 0, []Option{WithBudget(stingy{})}, []answer{hang()},
			codes.DeadlineExceeded, []time.Duration{0}, 2 * second, 0},
	} {
		for _, kind := range []string{"unary", "hedged", "stream"} {
			t.Run(kind+", "+tt.name, func(t *testing.T) {
				bubble(t, func(t *testing.T) {
					budget := &tally{}
					opts := append([]Option{WithBackoff(Constant(second)), WithAttemptTimeout(2 * second), WithBudget(budget)}, tt.opts...)
					ctx, cancel := context.WithCancel(t.Context())
					if tt.limit > 0 {
						ctx, cancel = context.WithTimeout(t.Context(), tt.limit)
					}
					defer cancel()
					var server *fixture
					var err error
					switch kind {
					case "stream":
						server = serveStreams(t, func(n int, stream grpc.ServerStream) error { return serveAnswer(tt.script[n-1], stream) })
						err = callKinds[1].call(ctx, server.conn(t, DialOptions(opts...)...), anyMethod)
					case "hedged":
						server = serve(t, script(tt.script...))
						opts = append(opts, WithMethod(echoMethod, WithHedging(Hedging{Delay: HedgeAfter(time.Hour), Budget: Unlimited})))
						_, err = server.client(t, opts...).Echo(ctx, request())
					default:
						server = serve(t, script(tt.script...))
						_, err = server.client(t, opts...).Echo(ctx, request())
					}
					if status.Code(err) != tt.code {
						t.Errorf("err = %v, want %v", err, tt.code)
					}
					if got := time.Since(server.start); got != tt.took {
						t.Errorf("the call took %v, want %v", got, tt.took)
					}
					wantTimes(t, server, tt.want...)
					if budget.withdrawn != tt.paid || budget.refunded != 0 {
						t.Errorf("%d retries were paid and %d given back, want %d and 0", budget.withdrawn, budget.refunded, tt.paid)
					}
				})
			})
		}
	}
}

// An opening budget allows retries after a time in a bubble.
type opening struct {
	unlimited
	after time.Duration
}

func (b opening) Balance(now time.Time) float64 {
	if now.Sub(time.Date(2000, 1, 1, 0, 0, 0, 0, time.UTC)) < b.after { // when the time of a bubble begins
		return 0
	}
	return 1
}

func (b opening) Withdraw(now time.Time) bool { return b.Balance(now) > 0 }

// A pushback of a hedge postpones the retry that replaces a slow attempt. If it would then start after MaxElapsed, the slow attempt
// goes on.
func TestAPushbackLeavesNoTimeToReplace(t *testing.T) {
	const ms = time.Millisecond
	bubble(t, func(t *testing.T) {
		server := serve(t, script(ok().after(600*ms), unavailable().after(110*ms).pushback("150")))
		client := server.client(t, WithBackoff(Constant(50*ms)), WithMethod(echoMethod, WithAttemptTimeout(300*ms), WithMaxElapsed(400*ms),
			WithHedging(Hedging{Delay: HedgeAfter(200 * ms), Budget: Unlimited})))
		ctx, cancel := context.WithTimeout(t.Context(), 2*second)
		defer cancel()
		if _, err := client.Echo(ctx, request()); err != nil || time.Since(server.start) != 600*ms {
			t.Errorf("%v after %v, want the response of the first attempt after 600ms", err, time.Since(server.start))
		}
		wantTimes(t, server, 0, 200*ms)
	})
}

// serveAnswer plays an answer on a stream.
func serveAnswer(a answer, stream grpc.ServerStream) error {
	var m = request()
	if err := stream.RecvMsg(m); err != nil {
		return err
	}
	if a.hang {
		<-stream.Context().Done()
		return status.FromContextError(stream.Context().Err()).Err()
	}
	if !elapsed(a.delay, stream.Context().Done()) {
		return status.FromContextError(stream.Context().Err()).Err()
	}
	if a.trailer != nil {
		stream.SetTrailer(a.trailer)
	}
	if a.err != nil {
		return a.err
	}
	return stream.SendMsg(m)
}

// A response that comes after the attempt timeout is seen, and earns nothing: a queue that is
// longer than the timeout would pay for the retries that keep it long.
func TestALateResponseEarnsNothing(t *testing.T) {
	for _, tt := range []struct {
		name   string
		opts   []Option
		script []answer
		want   []Outcome
	}{
		{"in time", nil, []answer{ok().after(second)}, []Outcome{{Attempt: 1, Result: Succeeded}}},
		{"late, and there is no token", nil, []answer{ok().after(3 * second)}, []Outcome{{Attempt: 1, Result: Succeeded, late: true}}},
		{"late, and the last attempt", []Option{WithMaxAttempts(2)}, []answer{unavailable(), ok().after(3 * second)},
			[]Outcome{{Attempt: 1, Result: Failed}, {Attempt: 2, Result: Succeeded, late: true}}},
		{"an answer that is late", []Option{WithMaxAttempts(2)}, []answer{unavailable(), fail(codes.NotFound, "x").after(3 * second)},
			[]Outcome{{Attempt: 1, Result: Failed}, {Attempt: 2, Result: Answered, late: true}}},
		{"cut", nil, []answer{ok().after(4 * second), ok()}, []Outcome{{Attempt: 1, Result: Failed}, {Attempt: 2, Result: Succeeded}}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				server, heard := serve(t, script(tt.script...)), &aBudget{}
				var budget Budget = heard
				if strings.Contains(tt.name, "no token") {
					budget = AllBudgets(heard, stingy{})
				}
				late := 0
				opts := append([]Option{WithBackoff(Constant(second)), WithAttemptTimeout(2 * second), WithBudget(budget),
					WithObserver(func(_ context.Context, e Event) {
						if e.Kind == AttemptEnd && e.Attempt.late {
							late++
						}
					})}, tt.opts...)
				ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
				defer cancel()
				_, _ = server.client(t, opts...).Echo(ctx, request())
				if !slices.Equal(heard.heard, tt.want) {
					t.Errorf("the budget heard %+v, want %+v", heard.heard, tt.want)
				}
				if want := strings.Count(fmt.Sprint(tt.want), "true}"); late != want {
					t.Errorf("%d attempts were late for the observer, want %d", late, want)
				}
			})
		})
	}
}

// It is late also if it comes at the very moment of the timeout: whether the timer has had its turn by then makes no difference.
func TestAResponseAtTheTimeoutIsLateForAll(t *testing.T) {
	for range 50 {
		bubble(t, func(t *testing.T) {
			heard, late := &aBudget{}, false
			r := doer(t, 0, steady, WithAttemptTimeout(second), WithBudget(heard), WithObserver(func(_ context.Context, e Event) {
				late = late || e.Kind == AttemptEnd && e.Attempt.late
			}))
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			defer cancel()
			if err := r.Do(ctx, "/sql/read", func(context.Context) error { time.Sleep(second); return nil }); err != nil {
				t.Fatal(err)
			}
			if want := []Outcome{{Attempt: 1, Result: Succeeded, late: true}}; !late || !slices.Equal(heard.heard, want) {
				t.Errorf("late for the observer: %t; the budget heard %+v, want %+v", late, heard.heard, want)
			}
			earns := ratioBudgetOf(t, RatioBudget{Ratio: 1, Reserve: Nothing})
			if err := r.Do(ctx, "/sql/read", func(context.Context) error { time.Sleep(second); return nil }, WithBudget(earns)); err != nil {
				t.Fatal(err)
			}
			wantBalance(t, earns, time.Now(), 0)
		})
	}
}

// A stream is in time if its first message is: how long it goes on does not matter.
func TestALongStreamIsNotLate(t *testing.T) {
	bubble(t, func(t *testing.T) {
		server := serveScripts(t, "recv a; send 1; wait 1m; send 2")
		heard := &aBudget{}
		cc := server.conn(t, DialOptions(WithAttemptTimeout(2*second), WithBudget(heard))...)
		openOn(t, cc, serverStream).play(t, "send a; close; recv 1; recv 2; recv EOF")
		if want := []Outcome{{Attempt: 1, Result: Succeeded}}; !slices.Equal(heard.heard, want) {
			t.Errorf("the budget heard %+v, want %+v", heard.heard, want)
		}
	})
}

// Faults that an attack found, which did not know the tests above.

// A stream that the application is bound to is not cut. If it becomes bound while the budget makes up
// its mind, the token is returned.
func TestATimeoutLeavesACommittedStreamAlone(t *testing.T) {
	for name, tt := range map[string]struct {
		app    string
		budget *slowTally
	}{
		"committed before":    {"send a; close; context; recv 1; recv EOF", &slowTally{}},
		"committed meanwhile": {"send a; close; recv 1; recv EOF", &slowTally{delay: 4 * second}},
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				server := serveScripts(t, "recv a; wait 10s; send 1")
				cc := server.conn(t, DialOptions(WithAttemptTimeout(2*second), WithBudget(tt.budget))...)
				ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
				defer cancel()
				stream, err := cc.NewStream(ctx, serverStream, "/s/m")
				if err != nil {
					t.Fatal(err)
				}
				time.AfterFunc(3*second, func() { stream.Context() })
				(&application{stream: stream}).play(t, tt.app)
				wantTimes(t, server, 0)
				if b := tt.budget; b.withdrawn != b.refunded || b.withdrawn > 0 != (b.delay > 0) {
					t.Errorf("budget is %+v, want what was withdrawn meanwhile to be returned", b.counts)
				}
			})
		})
	}
}

// A slowTally takes its time to say what it has.
type slowTally struct {
	tally
	delay time.Duration
}

func (b *slowTally) Withdraw(now time.Time) bool {
	time.Sleep(b.delay)
	return b.tally.Withdraw(now)
}

// An attempt that waits in gRPC for a connection is not cut: another would wait there too.
func TestATimeoutWithoutAConnectionCutsNothing(t *testing.T) {
	for _, limited := range []bool{true, false} {
		bubble(t, func(t *testing.T) {
			server, budget := serve(t, always(ok())), &tally{}
			link, cc := server.linked(t, DialOptions(WithBackoff(Constant(second)), WithAttemptTimeout(second/4), WithBudget(budget))...)
			link.cut()
			time.AfterFunc(5*second/2, link.mend) // connected at 2.6 s
			synctest.Wait()
			ctx, cancel := context.WithCancel(t.Context())
			want := 2600 * time.Millisecond
			if limited {
				ctx, cancel = context.WithTimeout(t.Context(), 20*second)
			} else {
				want += second // the attempt is cut so that the call cannot hang, and the call waits in its place
			}
			defer cancel()
			if err := cc.Invoke(ctx, echoMethod, request(), request(), grpc.WaitForReady(true)); err != nil {
				t.Error(err)
			}
			wantTimes(t, server, want)
			if budget.withdrawn != 0 || budget.told != [5]int{Succeeded: 1} {
				t.Errorf("with a deadline %v: budget is %+v, want nothing but the success", limited, budget.counts)
			}
		})
	}
}

func TestAttemptTimeoutIsToldFromTheServersDeadlineExceeded(t *testing.T) {
	for _, tt := range []struct {
		name  string
		first answer
		opts  []Option
		want  []time.Duration // when the server sees attempts
	}{
		{"our attempt timeout is retried", hang(), nil, []time.Duration{0, 11 * time.Second}},
		{"a server's DEADLINE_EXCEEDED is not", fail(codes.DeadlineExceeded, "x"), nil, []time.Duration{0}},
		{"a server's late DEADLINE_EXCEEDED is not", fail(codes.DeadlineExceeded, "x").after(9 * time.Second), nil, []time.Duration{0}},
		{"a server's CANCELED is not", fail(codes.Canceled, "x").after(9 * time.Second), nil, []time.Duration{0}},
		{"a server's DEADLINE_EXCEEDED in the set is", fail(codes.DeadlineExceeded, "x"), []Option{WithCodes(codes.DeadlineExceeded)},
			[]time.Duration{0, time.Second}},
		{"a server's CANCELED in the set is", fail(codes.Canceled, "x"), []Option{WithCodes(codes.Canceled)},
			[]time.Duration{0, time.Second}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				server := serve(t, script(tt.first, ok()))
				cc := server.client(t, append([]Option{steady, WithAttemptTimeout(10 * time.Second)}, tt.opts...)...)
				_, err := cc.Echo(t.Context(), request())
				if (err == nil) != (len(tt.want) == 2) || errors.Is(err, ErrAttemptTimeout) {
					t.Errorf("Echo: %v", err)
				}
				wantTimes(t, server, tt.want...)
			})
		})
	}
}

// A classifier judges each attempt once, be it at its timeout or at its end. One that nothing replaces is judged
// again when it ends.
func TestAnOverdueAttemptIsClassifiedOnce(t *testing.T) {
	for _, tt := range []struct {
		name   string
		unsent bool // WithUnsentOnly
		script []answer
		want   int // calls of the classifier
	}{
		{"replaced", false, []answer{hang(), ok()}, 1},
		{"nothing may replace it", true, []answer{ok().after(5 * second)}, 0},
		{"it is the last, and then fails", false, []answer{unavailable(), unavailable().after(5 * second)}, 3},
	} {
		t.Run(tt.name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				classified := 0
				client := serve(t, script(tt.script...)).client(t, WithAttemptTimeout(2*second), WithBackoff(Constant(second)),
					WithBudget(Unlimited), WithMaxAttempts(2), WithUnsentOnly(tt.unsent),
					WithClassifier(func(context.Context, Attempt) Classification { classified++; return Default }))
				ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
				defer cancel()
				_, _ = client.Echo(ctx, request())
				if classified != tt.want {
					t.Errorf("the classifier was called %d times, want %d", classified, tt.want)
				}
			})
		})
	}
}
