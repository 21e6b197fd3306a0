package grpcretry

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	echov1 "github.com/grpcretry/grpcretry/proto/echo/v1"
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
		{"the budget is empty", 20 * second, []Option{WithBudget(stingy{})}, []answer{slow}, codes.OK, []time.Duration{0}, 5 * second, 0},
		{"the last attempt", 20 * second, []Option{WithMaxAttempts(2)}, []answer{slow, slow}, codes.OK, []time.Duration{0, 3 * second},
			8 * second, 1},
		{"the deadline leaves no room", 3 * second, nil, []answer{ok().after(5 * second / 2)}, codes.OK, []time.Duration{0},
			5 * second / 2, 0},
		{"MaxElapsed leaves no room", 20 * second, []Option{WithMaxElapsed(3 * second)}, []answer{slow}, codes.OK, []time.Duration{0},
			5 * second, 0},
		{"a classifier forbids it", 20 * second, []Option{WithClassifier(func(context.Context, Attempt) Classification { return Stop })},
			[]answer{slow}, codes.OK, []time.Duration{0}, 5 * second, 0},
		{"it is judged by its own result", 20 * second, []Option{WithBudget(stingy{})},
			[]answer{fail(codes.NotFound, "gone").after(5 * second)}, codes.NotFound, []time.Duration{0}, 5 * second, 0},
		{"its own failure may be retried", 20 * second, []Option{WithMaxElapsed(7 * second), WithBackoff(Constant(6 * second))},
			[]answer{unavailable().after(5 * second).pushback("1000"), ok()}, codes.OK, []time.Duration{0, 6 * second}, 6 * second, 1},
		{"without a deadline it ends all the same", 0, []Option{WithBudget(stingy{})}, []answer{hang()},
			codes.DeadlineExceeded, []time.Duration{0}, 2 * second, 0},
		{"without a deadline the last attempt ends too", 0, []Option{WithMaxAttempts(2)}, []answer{hang(), hang()},
			codes.DeadlineExceeded, []time.Duration{0, 3 * second}, 5 * second, 1},
	} {
		for _, kind := range []string{"unary", "hedged", "stream"} {
			if kind == "hedged" && (strings.Contains(tt.name, "attempt") || strings.Contains(tt.name, "no room")) ||
				kind != "unary" && strings.Contains(tt.name, "its own failure") {
				continue // a hedged call counts its attempts in another way, and has no backoff
			}
			t.Run(kind+", "+tt.name, func(t *testing.T) {
				bubble(t, func(t *testing.T) {
					budget := &tally{}
					opts := append([]Option{WithBackoff(Constant(second)), WithAttemptTimeout(2 * second), WithBudget(budget)}, tt.opts...)
					ctx, cancel := context.WithCancel(t.Context())
					if tt.limit > 0 {
						ctx, cancel = context.WithTimeout(t.Context(), tt.limit)
					}
					defer cancel()
					want, took := tt.want, tt.took
					var server *fixture
					var err error
					switch kind {
					case "stream":
						server = serveStreams(t, func(n int, stream grpc.ServerStream) error { return serveAnswer(tt.script[n-1], stream) })
						err = streamOnce(ctx, server.conn(t, DialOptions(opts...)...))
					case "hedged":
						server = serve(t, script(tt.script...))
						opts = append(opts, hedged(Hedging{MaxAttempts: 4, Delay: HedgeAfter(time.Hour)}))
						if len(want) > 1 { // what follows a failure of a hedged call has no backoff
							want, took = []time.Duration{0, 2 * second}, took-second
						}
						_, err = server.client(t, opts...).Echo(ctx, request())
					default:
						server = serve(t, script(tt.script...))
						_, err = server.client(t, opts...).Echo(ctx, request())
					}
					if status.Code(err) != tt.code {
						t.Errorf("err = %v, want %v", err, tt.code)
					}
					if got := time.Since(server.start); got != took {
						t.Errorf("the call took %v, want %v", got, took)
					}
					wantTimes(t, server, want...)
					if budget.withdrawn != tt.paid || budget.refunded != 0 {
						t.Errorf("%d retries were paid and %d refunded, want %d and 0", budget.withdrawn, budget.refunded, tt.paid)
					}
				})
			})
		}
	}
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

func streamOnce(ctx context.Context, cc *grpc.ClientConn) error {
	stream, err := cc.NewStream(ctx, serverStream, "/s/m")
	if err != nil {
		return err
	}
	if err := errors.Join(stream.SendMsg(request()), stream.CloseSend()); err != nil {
		return err
	}
	return stream.RecvMsg(request())
}

// A retry that was paid for at the timeout is given back if the attempt ends by itself after
// all: its response was on the way, and an interceptor below hides it from the timer.
func TestARetryPaidForAtTheTimeoutIsGivenBack(t *testing.T) {
	late := belowUnary(func(ctx context.Context, next func(context.Context) error) error {
		err := next(ctx)
		if a, _ := AttemptFromContext(ctx); a.Number == 1 {
			time.Sleep(5 * second)
		}
		return err
	})
	for _, tt := range []struct {
		name string
		say  answer
		want counts
	}{
		{"a success", ok(), counts{withdrawn: 1, refunded: 1, told: [4]int{Succeeded: 1}, highest: 1}},
		{"a failure that is final", fail(codes.NotFound, "gone"), counts{withdrawn: 1, refunded: 1, told: [4]int{Answered: 1}, highest: 1}},
		{"a failure that is retried", unavailable(), counts{withdrawn: 1, told: [4]int{Succeeded: 1, Failed: 1}, highest: 2}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				server, budget := serve(t, script(tt.say, ok())), &tally{}
				cc := server.conn(t, append(DialOptions(WithBackoff(Constant(second)), WithAttemptTimeout(3*second), WithBudget(budget)),
					late)...)
				_ = cc.Invoke(t.Context(), echoMethod, request(), request())
				if budget.counts != tt.want {
					t.Errorf("budget is %+v, want %+v", budget.counts, tt.want)
				}
			})
		})
	}
}

// A panic of what runs at the timeout is the caller's, on the caller's goroutine.
func TestAPanicAtTheTimeoutIsTheCallers(t *testing.T) {
	for name, opt := range map[string]Option{
		"classifier": WithClassifier(func(context.Context, Attempt) Classification { panic("boom") }),
		"backoff":    WithBackoff(panicking{}),
		"budget":     WithBudget(panickingBudget{}),
	} {
		for _, kind := range []string{"unary", "stream"} {
			t.Run(name+", "+kind, func(t *testing.T) {
				bubble(t, func(t *testing.T) {
					server := serveStreams(t, func(_ int, stream grpc.ServerStream) error { return serveAnswer(hang(), stream) })
					cc := server.conn(t, DialOptions(WithAttemptTimeout(second), opt)...)
					var got any
					func() {
						defer func() { got = recover() }()
						if kind == "stream" {
							_ = streamOnce(t.Context(), cc)
							return
						}
						_ = cc.Invoke(t.Context(), "/s/m", request(), request())
					}()
					if fmt.Sprint(got) != "boom" {
						t.Errorf("the caller recovered %v, want boom", got)
					}
					if took := time.Since(server.start); took != second {
						t.Errorf("after %v, want 1s", took)
					}
				})
			})
		}
	}
}

// Withdrawals are retries sent and refunds, whatever happens to hundreds of calls at once.
func TestAccountsBalance(t *testing.T) {
	bubble(t, func(t *testing.T) {
		var mu sync.Mutex
		n := 0
		server := serve(t, func(int) answer {
			mu.Lock()
			defer mu.Unlock()
			n++
			return []answer{ok(), unavailable(), ok().after(second), hang(), overloaded(), fail(codes.NotFound, "x"),
				unavailable().pushback("-1"), unavailable().pushback("300")}[n%8]
		})
		budget, sent, ended := &tally{}, 0, 0
		link, cc := server.linked(t, DialOptions(WithBudget(budget), WithAttemptTimeout(second/3),
			WithObserver(func(_ context.Context, e Event) {
				mu.Lock()
				defer mu.Unlock()
				switch {
				case e.Kind == AttemptEnd && !e.Attempt.Unsent:
					ended++
				case e.Kind == CallEnd:
					charged := -1 // the first that reached a server is free
					for _, a := range e.Attempts {
						if !a.Unsent {
							charged++
						}
					}
					sent += max(charged, 0)
				}
			}), WithMethod(putMethod, WithHedging(Hedging{MaxAttempts: 3, Delay: HedgeAfter(second / 10), Budget: Unlimited})))...)
		time.AfterFunc(2*second, link.cut)
		time.AfterFunc(3*second, link.mend)
		var group sync.WaitGroup
		for i := range 250 {
			group.Go(func() {
				time.Sleep(time.Duration(i) * second / 50)
				ctx, cancel := context.WithTimeout(t.Context(), time.Duration(i%7+1)*second/2)
				defer cancel()
				method := echoMethod
				if i%3 == 0 {
					method = putMethod
				}
				_ = cc.Invoke(ctx, method, request(), request())
			})
		}
		group.Wait()
		told := 0
		for _, n := range budget.told {
			told += n
		}
		if budget.withdrawn == 0 || budget.refunded == 0 || budget.withdrawn != sent+budget.refunded {
			t.Errorf("%d retries were withdrawn, %d sent and %d refunded", budget.withdrawn, sent, budget.refunded)
		}
		if told != ended {
			t.Errorf("the budget was told of %v, %d attempts, and %d ended", budget.told, told, ended)
		}
	})
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
		{"late", []Option{WithBudget(stingy{})}, []answer{ok().after(3 * second)}, []Outcome{{Attempt: 1, Result: Succeeded, Late: true}}},
		{"late, and the last attempt", []Option{WithMaxAttempts(2)}, []answer{unavailable(), ok().after(3 * second)},
			[]Outcome{{Attempt: 1, Result: Failed}, {Attempt: 2, Result: Succeeded, Late: true}}},
		{"an answer that is late", []Option{WithMaxAttempts(2)}, []answer{unavailable(), fail(codes.NotFound, "x").after(3 * second)},
			[]Outcome{{Attempt: 1, Result: Failed}, {Attempt: 2, Result: Answered, Late: true}}},
		{"cut", nil, []answer{ok().after(3 * second), ok()}, []Outcome{{Attempt: 1, Result: Failed}, {Attempt: 2, Result: Succeeded}}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				server, heard := serve(t, script(tt.script...)), &aBudget{}
				late := 0
				opts := append([]Option{WithBackoff(Constant(second)), WithAttemptTimeout(2 * second), WithBudget(heard),
					WithObserver(func(_ context.Context, e Event) {
						if e.Kind == AttemptEnd && e.Attempt.late {
							late++
						}
					})}, tt.opts...)
				if len(tt.opts) > 0 && tt.name == "late" {
					heard.refuse = true
					opts = opts[:len(opts)-1]
				}
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

// A stream is in time if its first message is: how long it goes on does not matter.
func TestALongStreamIsNotLate(t *testing.T) {
	bubble(t, func(t *testing.T) {
		server := serveStreams(t, func(n int, stream grpc.ServerStream) error {
			return playServer(t, n, "recv a; send 1; wait 1m; send 2", stream)
		})
		heard := &aBudget{}
		cc := server.conn(t, DialOptions(WithAttemptTimeout(2*second), WithBudget(heard))...)
		openOn(t, cc, serverStream).play(t, "send a; close; recv 1; recv 2; recv EOF")
		if want := []Outcome{{Attempt: 1, Result: Succeeded}}; !slices.Equal(heard.heard, want) {
			t.Errorf("the budget heard %+v, want %+v", heard.heard, want)
		}
	})
}

// An overdue retry that holds the only place of a concurrency budget can be replaced: it gives
// the place back when it is cut.
func TestAnOverdueRetryIsReplacedInItsPlace(t *testing.T) {
	one, err := NewConcurrencyBudget(1)
	if err != nil {
		t.Fatal(err)
	}
	for name, budget := range map[string]Budget{"alone": one, "with others": AllBudgets(Unlimited, one)} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				server := serve(t, script(hang(), hang(), hang(), ok()))
				ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
				defer cancel()
				client := server.client(t, WithBackoff(Constant(second)), WithAttemptTimeout(2*second), WithBudget(budget))
				if _, err := client.Echo(ctx, request()); err != nil {
					t.Error(err)
				}
				wantTimes(t, server, 0, 3*second, 6*second, 9*second)
				if got := budget.Balance(time.Now()); got != 1 {
					t.Errorf("balance is %v after the call, want 1", got)
				}
			})
		})
	}
}

// Faults that an attack found, which did not know the tests above.

func TestATimeoutBeforeTheHedgedCallHasBegun(t *testing.T) {
	slow := WithObserver(func(_ context.Context, e Event) {
		if e.Kind == AttemptStart && e.Attempt.Number == 1 {
			time.Sleep(3 * second)
		}
	})
	bubble(t, func(t *testing.T) {
		server := serve(t, script(says("a"), says("b")))
		budget := &tally{}
		client := server.client(t, slow, WithAttemptTimeout(second), WithBudget(budget), hedged(Hedging{Delay: HedgeAfter(time.Minute)}))
		if _, err := client.Echo(t.Context(), request()); err != nil {
			t.Error(err)
		}
		// Now and then gRPC sends the first attempt although it is too late, and then cuts it off. It
		// may have reached the server, so it is an outcome, and the retry is charged.
		outcomes := 0
		for _, n := range budget.told {
			outcomes += n
		}
		if handled := len(server.attempts()); outcomes < handled || budget.withdrawn-budget.refunded != outcomes-1 {
			t.Errorf("budget is %+v, and %d attempts were handled; want each attempt but the first charged", budget.counts, handled)
		}
	})
}

// Headers commit, and nobody knows whether they have come: such an attempt is not cut.
func TestATimeoutDoesNotCutWhatHeadersMayHaveCommitted(t *testing.T) {
	bubble(t, func(t *testing.T) {
		server := serve(t, always(answer{header: map[string][]string{"k": {"v"}}, do: nil, delay: 3 * second}))
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		if _, err := server.client(t, WithAttemptTimeout(second), WithCommitOnHeaders(true)).Echo(ctx, request()); err != nil {
			t.Error(err)
		}
		wantTimes(t, server, 0)
	})
}

// An interceptor below that makes another error of what it gets does not hide the timeout.
func TestATimeoutBehindAnotherError(t *testing.T) {
	reword := belowUnary(func(ctx context.Context, next func(context.Context) error) error {
		if err := next(ctx); err != nil {
			return fmt.Errorf("below: %v", err)
		}
		return nil
	})
	bubble(t, func(t *testing.T) {
		server := serve(t, script(hang(), ok()))
		cc := server.conn(t, append(DialOptions(WithBackoff(Constant(second)), WithAttemptTimeout(second)), reword)...)
		if err := cc.Invoke(t.Context(), echoMethod, request(), request()); err != nil {
			t.Error(err)
		}
		wantTimes(t, server, 0, 2*second)
	})
}

// A retry that was decided on while the application was elsewhere is not sent too late.
func TestARetryOfAnAbandonedStreamIsNotSentTooLate(t *testing.T) {
	bubble(t, func(t *testing.T) {
		server := serveStreams(t, func(_ int, stream grpc.ServerStream) error { return serveAnswer(hang(), stream) })
		budget := &tally{}
		cc := server.conn(t, DialOptions(WithBackoff(Constant(second)), WithAttemptTimeout(second), WithMaxElapsed(5*second),
			WithBudget(budget))...)
		app := openOn(t, cc, serverStream)
		app.play(t, "send a; close; wait 60s")
		wantStop(t, app.stream.RecvMsg(request()), codes.DeadlineExceeded, ErrMaxElapsed, 1)
		wantTimes(t, server, 0)
		if budget.withdrawn != budget.refunded {
			t.Errorf("budget is %+v, want everything back", budget.counts)
		}
	})
}

// A budget may take its time when it is asked at the timeout, in virtual time too.
func TestASlowBudgetAtTheTimeout(t *testing.T) {
	bubble(t, func(t *testing.T) {
		server := serve(t, script(ok().after(5*second), ok()))
		client := server.client(t, WithBackoff(Constant(second)), WithAttemptTimeout(2*second), WithBudget(sluggish{}))
		if _, err := client.Echo(t.Context(), request()); err != nil {
			t.Error(err)
		}
		if got := time.Since(server.start); got != 6*second { // the response came before the verdict
			t.Errorf("the call took %v, want 6s", got)
		}
	})
}

type sluggish struct{ unlimited }

func (sluggish) Withdraw(time.Time) bool { time.Sleep(4 * second); return true }

// The response of a client stream is complete when it has come, whatever the timer says.
func TestACompleteResponseIsTakenAfterTheTimeout(t *testing.T) {
	bubble(t, func(t *testing.T) {
		server := serveStreams(t, func(n int, stream grpc.ServerStream) error {
			return playServer(t, n, "recv a; recv EOF; send 1", stream)
		})
		budget := &tally{}
		cc := server.conn(t, append(DialOptions(WithAttemptTimeout(5*second), WithBudget(budget)),
			below(func(s grpc.ClientStream) grpc.ClientStream { return &lateStream{s, 6 * second} }))...)
		openOn(t, cc, clientStream).play(t, "send a; close; recv 1")
		wantTimes(t, server, 0)
		if want := (counts{withdrawn: 1, refunded: 1, told: [4]int{Succeeded: 1}, highest: 1}); budget.counts != want {
			t.Errorf("budget is %+v, want %+v", budget.counts, want)
		}
	})
}

// A stream that the application is bound to is not cut, and no retry is paid for it; also if it
// becomes bound while the budget makes up its mind.
func TestATimeoutLeavesACommittedStreamAlone(t *testing.T) {
	for name, tt := range map[string]struct {
		app    string
		budget Budget
		paid   int
	}{
		"committed before":    {"send a; close; context; recv 1; recv EOF", &tally{}, 0},
		"committed meanwhile": {"send a; close; wait 3s; context; recv 1; recv EOF", &slowTally{}, 1},
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				server := serveStreams(t, func(n int, stream grpc.ServerStream) error {
					return playServer(t, n, "recv a; wait 10s; send 1", stream)
				})
				cc := server.conn(t, DialOptions(WithAttemptTimeout(2*second), WithBudget(tt.budget))...)
				ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
				defer cancel()
				stream, err := cc.NewStream(ctx, serverStream, "/s/m")
				if err != nil {
					t.Fatal(err)
				}
				(&application{stream: stream}).play(t, tt.app)
				wantTimes(t, server, 0)
				budget, ok := tt.budget.(*tally)
				if !ok {
					budget = &tt.budget.(*slowTally).tally
				}
				if budget.withdrawn != tt.paid || budget.refunded != tt.paid {
					t.Errorf("budget is %+v, want %d withdrawn and refunded", budget.counts, tt.paid)
				}
			})
		})
	}
}

// A slowTally takes its time to allow a retry.
type slowTally struct{ tally }

func (b *slowTally) Withdraw(now time.Time) bool {
	time.Sleep(4 * second)
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
			if budget.withdrawn != 0 || budget.told != [4]int{Succeeded: 1} {
				t.Errorf("with a deadline %v: budget is %+v, want nothing but the success", limited, budget.counts)
			}
		})
	}
}

func TestAttemptTimeoutIsSeenInTheError(t *testing.T) {
	bubble(t, func(t *testing.T) {
		server := serve(t, always(hang()))
		_, err := server.client(t, steady, WithAttemptTimeout(2*second), WithMaxAttempts(2)).Echo(t.Context(), request())
		wantStop(t, err, codes.DeadlineExceeded, ErrAttemptsExhausted, 2)
		if !errors.Is(err, ErrAttemptTimeout) || errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("%v: want ErrAttemptTimeout, and not the caller's deadline", err)
		}
	})
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

// An attempt that the server ended did not time out, even if we learn of it late: the
// cause of its context is asked only where the code may come from a context.
func TestAServersWordAfterTheAttemptTimeoutIsTheServers(t *testing.T) {
	late := belowUnary(func(ctx context.Context, next func(context.Context) error) error {
		err := next(ctx)
		time.Sleep(6 * second)
		return err
	})
	bubble(t, func(t *testing.T) {
		server := serve(t, script(unavailable(), fail(codes.NotFound, "gone")))
		cc := server.conn(t, append(DialOptions(steady, WithAttemptTimeout(5*second)), late)...)
		_, err := echov1.NewEchoServiceClient(cc).Echo(t.Context(), request())
		e := wantStop(t, err, codes.NotFound, ErrNotRetryable, 2)
		for i, want := range []codes.Code{codes.Unavailable, codes.NotFound} {
			if got := e.Attempts[i]; got.Code() != want || errors.Is(got.Err, ErrAttemptTimeout) {
				t.Errorf("attempt %d failed with %v, want the server's %v", i+1, got.Err, want)
			}
		}
		wantTimes(t, server, 0, 7*second)
	})
}
