package grpcretry

import (
	"context"
	"errors"
	"log/slog"
	"runtime"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	echov1 "github.com/grpcretry/grpcretry/proto/echo/v1"
)

// A channel may lose its connection while an attempt goes on there, as when a server shuts
// down in peace: then a hedge is what connects it again.
func TestAHedgeWakesAnIdleChannel(t *testing.T) {
	bubble(t, func(t *testing.T) {
		server := serve(t, always(says("a").after(3*second)))
		events := &hedgeEvents{}
		cc := server.conn(t, grpc.WithChainUnaryInterceptor(UnaryClientInterceptor(
			WithObserver(events.observe), hedged(2, Hedging{Delay: HedgeAfter(second)}))))
		time.AfterFunc(second/2, server.server.GracefulStop)
		reply, err := echov1.NewEchoServiceClient(cc).Echo(t.Context(), request())
		if reply.GetMessage() != "a" || err != nil {
			t.Errorf("Echo = %v, %v, want a", reply, err)
		}
		var sent []time.Duration
		for _, e := range events.events {
			if e.Kind == AttemptStart {
				sent = append(sent, e.Attempt.Start.Sub(server.start))
			}
		}
		if !slices.Equal(sent, []time.Duration{0, second}) {
			t.Errorf("attempts were sent at %v, want a hedge after 1s", sent)
		}
	})
}

// hedgeEvents checks that the events of one call are as documented.
type hedgeEvents struct {
	events []Event // no lock: observers are called one at a time, which -race proves
}

func (h *hedgeEvents) observe(_ context.Context, e Event) { h.events = append(h.events, e) }

func (h *hedgeEvents) check(t *testing.T, err error) {
	t.Helper()
	state := map[int]EventKind{}
	ended := 0
	for i, e := range h.events {
		last, seen := state[e.Attempt.Number]
		good := false
		switch e.Kind {
		case AttemptStart:
			good = !seen
		case AttemptEnd:
			good = seen && last == AttemptStart
			ended++
		case Decision:
			good = seen && last == AttemptEnd && !errors.Is(e.Attempt.Err, ErrHedgeLost)
		case CallEnd:
			good = i == len(h.events)-1 && ended == len(state) && e.Err == err
			if len(state) > 1 && len(e.Attempts) != len(state) {
				t.Errorf("%d attempts at the end of the call, want %d", len(e.Attempts), len(state))
			}
			for i, a := range e.Attempts {
				if a.Number != i+1 {
					t.Errorf("attempts at the end are %v, want them in order", e.Attempts)
				}
			}
		}
		if !good {
			t.Errorf("event %d of %d is %v of attempt %d, which was at %v", i+1, len(h.events), e.Kind, e.Attempt.Number, last)
		}
		state[e.Attempt.Number] = e.Kind
	}
	if len(h.events) == 0 || h.events[len(h.events)-1].Kind != CallEnd {
		t.Error("the last event is not the end of the call")
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
		cc := server.conn(t, append(DialOptions(hedged(2, Hedging{Delay: HedgeAfter(second)})),
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

// No hedge follows when the call is decided, although an attempt is still in flight: something below takes its time to end.
func TestNoHedgeFollowsTheDecision(t *testing.T) {
	for name, tt := range map[string]struct {
		second error         // after half a second
		cancel time.Duration // since the start
		panics bool          // an observer does, at the end of the second attempt
		code   codes.Code
	}{
		"an attempt has won":       {nil, time.Hour, false, codes.OK},
		"a failure is final":       {status.Error(codes.NotFound, "gone"), time.Hour, false, codes.NotFound},
		"the caller has gone":      {errUnavailable, 7 * second / 4, false, codes.Canceled},
		"an observer has panicked": {errUnavailable, time.Hour, true, codes.Internal},
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				ctx, cancel := context.WithCancel(t.Context())
				defer cancel()
				time.AfterFunc(tt.cancel, cancel)
				start, made := time.Now(), atomic.Int32{}
				intercept := UnaryClientInterceptor(hedged(5, Hedging{Delay: HedgeAfter(second)}), WithObserver(func(_ context.Context, e Event) {
					if tt.panics && e.Kind == AttemptEnd && e.Attempt.Number == 2 {
						panic("observer")
					}
				}))
				err := func() (err error) {
					defer func() {
						if p := recover(); p != nil {
							err = status.Error(codes.Internal, "panic")
						}
					}()
					return invokeEcho(ctx, intercept, func(ctx context.Context, n int) error {
						made.Add(1)
						if n == 2 {
							time.Sleep(second / 2)
							return tt.second
						}
						time.Sleep(10 * second) // whatever happens to ctx
						return status.FromContextError(ctx.Err()).Err()
					})
				}()
				if n := made.Load(); status.Code(err) != tt.code || n != 2 || time.Since(start) != 10*second {
					t.Errorf("%v after %v and %d attempts, want %v after 10s and 2", err, time.Since(start), n, tt.code)
				}
			})
		})
	}
}

// Hedges are not saved up: what calls earn can be spent for a second, and one hedge is kept.
func TestDefaultHedgeBudget(t *testing.T) {
	b := newHedgeBudget()
	at := time.Date(2000, 1, 1, 0, 0, 0, 0, time.UTC)
	answered := func(calls int, within time.Duration) {
		for range calls {
			b.Deposit(Outcome{Attempt: 1, Result: Succeeded})
		}
		at = at.Add(within)
	}
	for _, tt := range []struct {
		name        string
		calls       int
		within      time.Duration
		least, most float64
	}{
		{"at the start", 0, 0, 0, 0},
		{"nine calls", 9, time.Second, 0.9, 0.9},
		{"ten calls", 1, time.Second, 1, 1},
		{"an hour later", 0, time.Hour, 1, 1},
		{"a thousand calls in half a second", 1000, time.Second / 2, 100, 101},
		{"ten thousand in the next ten", 10_000, 10 * time.Second, 100, 106},
		{"a quiet second later", 0, 1100 * time.Millisecond, 1, 1},
	} {
		answered(tt.calls, tt.within)
		if got := b.Balance(at); got < tt.least-1e-6 || got > tt.most+1e-6 {
			t.Errorf("%s: balance %v, want %v to %v", tt.name, got, tt.least, tt.most)
		}
	}
}

// Also a stream to which the application was bound before its first message is measured.
func TestACommittedStreamIsMeasured(t *testing.T) {
	for _, first := range []string{"", "header; ", "context; ", "trailer; "} {
		t.Run(first, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				f := serveStreams(t, func(n int, stream grpc.ServerStream) error {
					return playServer(t, n, "recv a; header; wait 2s; send x; send y", stream)
				})
				delay := &recordedDelay{HedgeDelay: switched{func() bool { return false }, HedgeAfter(second)}}
				app, err := f.openStream(t, serverStream, []Option{WithMethod("/streams/", WithHedging(Hedging{Delay: delay}))})
				if err != nil {
					t.Fatal(err)
				}
				app.play(t, "send a; close; "+first+"recv x; recv y; recv EOF")
				if want := []string{"2s"}; !slices.Equal(delay.told, want) {
					t.Errorf("the delay was told %q, want %q", delay.told, want)
				}
			})
		})
	}
}

// Without a delay, a call is as if there were no hedging, but it is measured.
func TestNoDelayNoHedge(t *testing.T) {
	bubble(t, func(t *testing.T) {
		server := serve(t, script(unavailable(), says("b").after(5*second), says("c").after(3*second),
			says("d").after(time.Hour), says("e"), unavailable().after(2*second)))
		var on atomic.Bool
		delay := &recordedDelay{HedgeDelay: HedgeAfter(second)}
		client := server.client(t, steady, hedged(2, Hedging{Delay: switched{on.Load, delay}}))
		for i, step := range []struct {
			on      bool
			reply   string
			elapsed time.Duration
			told    []string
		}{
			{false, "b", 6 * second, nil},            // failed, waited its backoff, was slow
			{false, "c", 3 * second, []string{"3s"}}, // slow
			{true, "e", second, []string{"1s lost"}}, // hedged
			{true, "", 2 * second, []string{}},       // hedged, and failed twice
		} {
			on.Store(step.on)
			delay.told = nil
			start := time.Now()
			reply, _ := client.Echo(t.Context(), request())
			if got := time.Since(start); i < 3 && (reply.GetMessage() != step.reply || got != step.elapsed) {
				t.Errorf("call %d: %q after %v, want %q after %v", i+1, reply.GetMessage(), got, step.reply, step.elapsed)
			}
			if i < 3 && !slices.Equal(delay.told, step.told) {
				t.Errorf("call %d: the delay was told %q, want %q", i+1, delay.told, step.told)
			}
		}
	})
}

func TestWhatCannotBeHedgedIsSaidOnce(t *testing.T) {
	bubble(t, func(t *testing.T) {
		server := serve(t, always(ok()))
		logs, hedges := &logRecorder{}, &aBudget{}
		cc := server.conn(t, DialOptions(WithLogger(slog.New(logs)),
			WithMethod("/grpcretry.test.v1.EchoService/",
				WithPolicy(Policy{MaxAttempts: 2, Hedging: &Hedging{Budget: hedges, Delay: HedgeAfter(second)}})))...)
		client := echov1.NewEchoServiceClient(cc)
		for range 3 {
			stream, err := client.Chat(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			stream.CloseSend()
			stream.Recv()
		}
		wantLines(t, logs, "WARN…not hedged, but retried: it has a client stream…method=/grpcretry.test.v1.EchoService/Chat")
		if len(hedges.heard) > 0 {
			t.Errorf("the budget of hedges heard of calls that cannot be hedged: %v", hedges.heard)
		}
		for range 3 {
			stream, err := cc.NewStream(t.Context(), serverStream, "/grpcretry.test.v1.EchoService/Expand", grpc.ForceCodec(oddCodec{}))
			if err != nil {
				t.Fatal(err)
			}
			(&application{stream: stream}).play(t, "send a; close")
			stream.RecvMsg(notAPointer{})
			stream.RecvMsg(notAPointer{})
		}
		wantLines(t, logs, "WARN…not hedged, but retried: no second message can be made…method=/grpcretry.test.v1.EchoService/Expand")
		for range 3 {
			cc.Invoke(t.Context(), "/grpcretry.test.v1.EchoService/Echo", request(), notAPointer{}, grpc.ForceCodec(oddCodec{}))
		}
		wantLines(t, logs, "WARN…not hedged, but retried: no second reply can be made…method=/grpcretry.test.v1.EchoService/Echo")
		cc = server.conn(t, DialOptions(WithLogger(slog.New(logs)), Disable(),
			WithMethod("/grpcretry.test.v1.EchoService/",
				WithPolicy(Policy{MaxAttempts: 2, Hedging: &Hedging{Budget: Unlimited, Delay: HedgeAfter(second)}})))...)
		for range 3 {
			stream, err := echov1.NewEchoServiceClient(cc).Chat(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			stream.CloseSend()
			stream.Recv()
		}
		wantLines(t, logs, "WARN…not hedged, but retried: it has a client stream…method=/grpcretry.test.v1.EchoService/Chat")
	})
}

// A server's throttle refuses hedges as well as retries, although the budget of hedges pays.
func TestAThrottleRefusesHedges(t *testing.T) {
	bubble(t, func(t *testing.T) {
		throttle := throttleOf(t, 2, 1)
		throttle.Deposit(Outcome{Attempt: 1, Result: Failed})
		logs := &logRecorder{}
		server := serve(t, script(ok().after(5*second)))
		err := echo(t.Context(), server.client(t, WithBudget(throttle), hedged(2, Hedging{Delay: HedgeAfter(second)}),
			WithLogger(slog.New(onlyAbove{logs, slog.LevelInfo}))))
		if err != nil {
			t.Error(err)
		}
		wantTimes(t, server, 0)
		wantLines(t, logs, "client-side retry budget exhausted")
	})
}

// A hedge is logged for those who look for details. One that is not sent is not, and neither says anything of the retries' budget.
func TestAHedgeIsLoggedIfItIsSent(t *testing.T) {
	empty := throttleOf(t, 2, 1)
	empty.Deposit(Outcome{Attempt: 1, Result: Failed})
	for _, tt := range []struct {
		name    string
		retries Budget
		hedges  Budget
		opts    []CallOption
		want    []string
	}{
		{"sent", Unlimited, Unlimited, nil,
			[]string{"level=DEBUG…grpcretry: hedging…method=" + echoMethod + " target=passthrough:///echo delay=1s"}},
		{"sent, with a throttle", throttleOf(t, 2, 1), Unlimited, nil, []string{"level=DEBUG…grpcretry: hedging"}},
		{"refused", Unlimited, stingy{}, nil, nil},
		{"too late", empty, Unlimited, []CallOption{WithMaxElapsed(second)}, nil},
	} {
		t.Run(tt.name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				logs, server := &logRecorder{}, serve(t, always(ok().after(3*second/2)))
				client := server.client(t, WithBudget(tt.retries), hedged(2, Hedging{Delay: HedgeAfter(second), Budget: tt.hedges}),
					WithMethod(echoMethod, tt.opts...), WithLogger(slog.New(logs)))
				logs.clear() // of the warning that no hedge is ever sent
				if err := echo(t.Context(), client); err != nil {
					t.Error(err)
				}
				wantLines(t, logs, tt.want...)
			})
		})
	}
}

// Hedges have a budget of their own. That one is sent does not mean that the other budget allows retries again.
func TestAHedgeIsNoRecoveryOfTheBudget(t *testing.T) {
	bubble(t, func(t *testing.T) {
		logs := &logRecorder{}
		server := serve(t, script(unavailable(), hang(), ok()))
		client := server.client(t, WithBudget(stingy{}), WithPatience(0), hedged(2, Hedging{Delay: HedgeAfter(recovered)}),
			WithLogger(slog.New(onlyAbove{logs, slog.LevelInfo})))
		if err := echo(t.Context(), client); !errors.Is(err, ErrBudgetExhausted) {
			t.Errorf("Echo = %v, want the budget to refuse a retry", err)
		}
		wantLines(t, logs, "client-side retry budget exhausted")
		if err := echo(t.Context(), client); err != nil {
			t.Error(err)
		}
		wantTimes(t, server, 0, 0, recovered)
		wantLines(t, logs)
	})
}

// An attempt that reached no server does not count towards MaxAttempts, so a hedge may still follow the one after it.
func TestAHedgeFollowsAnAttemptAfterAnUnsentOne(t *testing.T) {
	bubble(t, func(t *testing.T) {
		server := serve(t, script(ok().after(time.Minute), ok()))
		link, cc := server.linked(t, DialOptions(WithBackoff(Constant(second)), hedged(2, Hedging{Delay: HedgeAfter(second)}))...)
		link.cut()
		time.AfterFunc(second/2, link.mend)
		synctest.Wait()
		if err := echo(t.Context(), echov1.NewEchoServiceClient(cc)); err != nil {
			t.Error(err)
		}
		wantTimes(t, server, 2*second, 3*second) // gRPC connects again after 1 s, and then there is the backoff
	})
}

// The delay of a stream's hedges counts from its first RecvMsg, also if the plan was needed before that.
func TestTheDelayCountsFromTheFirstRecvMsgAfterATimeout(t *testing.T) {
	bubble(t, func(t *testing.T) {
		server := serveStreams(t, func(n int, stream grpc.ServerStream) error {
			if n == 1 {
				return playServer(t, n, "hang", stream)
			}
			return playServer(t, n, "recv a; send 1", stream)
		})
		cc := server.conn(t, DialOptions(WithAttemptTimeout(second), WithPatience(0), WithBudget(stingy{}),
			WithMethod("/elsewhere/Expand", WithMaxAttempts(2), WithHedging(Hedging{Delay: HedgeAfter(2 * second), Budget: Unlimited})))...)
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		stream, err := cc.NewStream(ctx, serverStream, "/elsewhere/Expand")
		if err != nil {
			t.Fatal(err)
		}
		app := &application{stream: stream, cancel: cancel}
		app.play(t, "send a; close")
		go stream.Header() // whose wait is what the timeout limits; the method is not linked, so that Header receives nothing ahead
		app.play(t, "wait 5s; recv 1; recv EOF")
		wantTimes(t, server, 0, 7*second)
	})
}

// Header waits for the winner also if nobody receives: the attempt whose first message comes first. The application then receives
// that message, and the others.
func TestHeaderBeforeRecvMsgWaitsForTheWinner(t *testing.T) {
	const method = "/streams/Expand"
	for _, tt := range []struct {
		name    string
		scripts []string // of the attempts
		app     string
		winner  string // what Header says
		after   time.Duration
	}{
		{"the first has sent headers, and hangs", []string{"header; recv a; hang", "recv a; header; send 1; send 2"}, "recv 1; recv 2; recv EOF",
			"2", second},
		{"the first is silent", []string{"hang", "recv a; header; send 1; send 2"}, "header; recv 1; header; recv 2; recv EOF", "2", second},
		{"the first is slow", []string{"recv a; header; wait 1500ms; send 1; fail INTERNAL", "hang"}, "recv 1; recv INTERNAL; trailer 1", "1",
			1500 * time.Millisecond},
		{"the first fails", []string{"recv a; header; fail UNAVAILABLE", "recv a; header; send 1"}, "context; recv 1; recv EOF; trailer ", "2",
			second},
		{"no message", []string{"recv a; header; wait 1500ms", "hang"}, "recv EOF; recv EOF", "1", 1500 * time.Millisecond},
		{"no message and no headers", []string{"recv a; wait 1500ms", "hang"}, "recv EOF", "", 1500 * time.Millisecond},
		{"all fail", []string{"recv a; header; fail UNAVAILABLE", "recv a; header; wait 1s; fail NOT_FOUND"}, "recv NOT_FOUND; trailer 2", "2",
			2 * second},
		{"no headers", []string{"hang", "recv a; fail NOT_FOUND"}, "no; recv NOT_FOUND", "", second},
	} {
		t.Run(tt.name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				server := serveScripts(t, tt.scripts...)
				ends := 0
				countEnd := grpc.WithDefaultCallOptions(grpc.OnFinish(func(error) { ends++ }))
				hedged := WithMethod(method, WithMaxAttempts(2), WithHedging(Hedging{Delay: HedgeAfter(second), Budget: Unlimited}))
				ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
				defer cancel()
				stream, err := server.conn(t, append(DialOptions(steady, hedged), countEnd)...).NewStream(ctx, serverStream, method)
				if err != nil {
					t.Fatal(err)
				}
				app := &application{stream: stream, cancel: cancel}
				app.play(t, "send a; close")
				md, err := stream.Header()
				if took := time.Since(server.start); err != nil || first(md["attempt"]) != tt.winner || took != tt.after {
					t.Errorf("Header = %v, %v after %v, want that of attempt %q after %v", md, err, took, tt.winner, tt.after)
				}
				app.play(t, tt.app)
				if ends != 1 {
					t.Errorf("OnFinish ran %d times, want once", ends)
				}
			})
		})
	}
}

// A goroutine that receives gets the messages in order, whatever Header has received ahead.
func TestHeaderAndRecvMsgOfAHedgedStreamTogether(t *testing.T) {
	bubble(t, func(t *testing.T) {
		server := serveScripts(t, "hang", "recv a; header; send 1; send 2; send 3")
		stream, err := server.conn(t, DialOptions(WithHedging(Hedging{Delay: HedgeAfter(second), Budget: Unlimited, AllMethodsAreSafe: true}),
			WithMaxAttempts(2))...).NewStream(t.Context(), serverStream, "/streams/Expand")
		if err != nil {
			t.Fatal(err)
		}
		app := &application{stream: stream}
		app.play(t, "send a; close")
		go stream.Header()
		synctest.Wait()
		app.play(t, "recv 1; recv 2; recv 3; recv EOF")
	})
}

// openHedged opens a stream whose hedges are due each second, and sends its request.
func openHedged(t *testing.T, server *fixture, ended func(error), opts ...Option) *application {
	t.Helper()
	hedged := WithMethod("/streams/Expand", WithMaxAttempts(2), WithHedging(Hedging{Delay: HedgeAfter(second), Budget: Unlimited}))
	app := openOn(t, server.conn(t, DialOptions(append(opts, steady, hedged)...)...), serverStream, grpc.OnFinish(ended))
	app.play(t, "send a; close")
	return app
}

// After a panic, RecvMsg returns nothing as if it were a message that Header had received ahead.
func TestAPanicWhileHeaderReceivesAhead(t *testing.T) {
	for name, exits := range map[string]bool{"panic": false, "Goexit": true} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				server := serveScripts(t, "recv a; wait 1500ms; fail UNAVAILABLE", "hang") // while a hedge is in flight
				app := openHedged(t, server, func(error) {}, WithClassifier(func(context.Context, Attempt) Classification {
					if exits {
						runtime.Goexit()
					}
					panic("classifier")
				}))
				go func() {
					defer func() { _ = recover() }()
					_, _ = app.stream.Header()
				}()
				synctest.Wait()
				var m echov1.EchoResponse
				for range 2 {
					if err := app.stream.RecvMsg(&m); status.Code(err) != codes.Internal || m.GetMessage() != "" {
						t.Errorf("RecvMsg = %q, %v, want INTERNAL and no message", m.GetMessage(), err)
					}
				}
			})
		})
	}
}

// A message that cannot be handed over ends the call, as one that cannot be decoded does.
func TestWhatHeaderHasReceivedDoesNotFit(t *testing.T) {
	bubble(t, func(t *testing.T) {
		server := serveScripts(t, "recv a; header; send 1; hang")
		var ends []error
		app := openHedged(t, server, func(err error) { ends = append(ends, err) })
		app.play(t, "header")
		err := app.stream.RecvMsg(&struct{}{})
		if status.Code(err) != codes.Internal || len(ends) != 1 || ends[0] != err {
			t.Errorf("RecvMsg = %v, and OnFinish got %v, want INTERNAL, once for both", err, ends)
		}
		if again := app.stream.RecvMsg(new(echov1.EchoResponse)); again == nil {
			t.Error("RecvMsg returns a message after that")
		}
	})
}

// A RetryInfo that comes while another attempt is in flight is spread like any other.
func TestARetryInfoIsSpreadInHedgedCalls(t *testing.T) {
	bubble(t, func(t *testing.T) {
		later := fail(codes.Unavailable, "later", retryInfoOf(10*second))
		server := serve(t, script(unavailable().after(2*second), later, ok()))
		client := server.client(t, withRandom(func() float64 { return 0.5 }), hedged(3, Hedging{Delay: HedgeAfter(second)}))
		if err := echo(t.Context(), client); err != nil {
			t.Error(err)
		}
		wantTimes(t, server, 0, second, 12*second)
	})
}

// The end of the caller's context ends all attempts in flight, and none of them is decisive.
func TestNoAttemptIsLostToTheCallersEnd(t *testing.T) {
	for _, kind := range []callKind{{"unary", nil}, {"server stream", serverStream}} {
		t.Run(kind.name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				server := serveScripts(t, "hang", "hang")
				events := &eventRecorder{start: time.Now()}
				cc := server.conn(t, DialOptions(WithMaxAttempts(2), WithObserver(events.observe),
					WithHedging(Hedging{Delay: HedgeAfter(second), Budget: Unlimited, AllMethodsAreSafe: true}))...)
				ctx, cancel := context.WithCancelCause(t.Context())
				time.AfterFunc(3*second, func() { cancel(errEnough) })
				e := asError(t, kind.call(ctx, cc, anyMethod))
				for _, a := range e.Attempts {
					if errors.Is(a.Err, ErrHedgeLost) || a.Code() != codes.Canceled {
						t.Errorf("attempt %d failed with %v, want CANCELED", a.Number, a.Err)
					}
				}
				decisions := 0
				for _, line := range events.lines {
					if strings.Contains(line, "3s decision") {
						decisions++
					}
				}
				if len(e.Attempts) != 2 || decisions != 2 || !errors.Is(e.Reason, errEnough) {
					t.Errorf("%d attempts, %d decisions at the end, and %v; want two, and the caller's cause", len(e.Attempts), decisions, e)
				}
			})
		})
	}
}

var errEnough = errors.New("enough")

// A hedge ends with the timeout of the service config, which covers the call.
func TestAHedgeEndsWithTheTimeoutOfTheServiceConfig(t *testing.T) {
	bubble(t, func(t *testing.T) {
		server := serve(t, func(n int) answer {
			if n == 1 {
				return answer{delay: 2 * second, err: status.Error(codes.Unavailable, "down")}
			}
			return answer{hang: true}
		})
		hedging := WithHedging(Hedging{Delay: HedgeAfter(second), Budget: Unlimited, AllMethodsAreSafe: true})
		cc := server.conn(t, append(DialOptions(hedging, WithMaxAttempts(2)),
			grpc.WithDefaultServiceConfig(`{"methodConfig": [{"name": [{}], "timeout": "3s"}]}`))...)
		connect(t, cc)
		start := time.Now()
		_, err := echov1.NewEchoServiceClient(cc).Echo(t.Context(), request())
		if took := time.Since(start); status.Code(err) != codes.DeadlineExceeded || took != 3*second {
			t.Errorf("the call has ended with %v after %v, want DEADLINE_EXCEEDED after 3s", err, took)
		}
	})
}

// A callback panics at the end of an attempt that has lost. The hedge that has won, and is not the newest, gives its slot back.
func TestAPanicAfterAHedgeHasWonKeepsNoSlot(t *testing.T) {
	bubble(t, func(t *testing.T) {
		server, slots := serve(t, func(n int) answer { return answer{delay: 2 * second, hang: n != 2} }), concurrencyBudgetOf(t, 2)
		client := server.client(t, WithHedging(Hedging{Delay: HedgeAfter(second), Budget: slots, AllMethodsAreSafe: true}), WithMaxAttempts(3),
			WithObserver(func(_ context.Context, e Event) {
				if e.Kind == AttemptEnd && e.Attempt.Number == 1 {
					panic("mine")
				}
			}))
		func() {
			defer func() {
				if p := recover(); p != "mine" {
					t.Errorf("the call panicked with %v, want the observer's panic", p)
				}
			}()
			_, err := client.Echo(t.Context(), request())
			t.Errorf("err = %v, want the observer's panic", err)
		}()
		wantBalance(t, slots, time.Now(), 2)
	})
}
