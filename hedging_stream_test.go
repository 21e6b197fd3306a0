package grpcretry

import (
	"context"
	"errors"
	"io"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/peer"

	echov1 "github.com/grpcretry/grpcretry/proto/echo/v1"
)

// Server streams are hedged up to their first message. Hedges are due each second.
func TestHedgedStreams(t *testing.T) {
	for _, tt := range []struct {
		name   string
		opts   []Option
		server []string // one script for each attempt
		app    string
		times  []time.Duration
		reason error // of the *Error; nil if the error is gRPC's own, or there is none
	}{
		{name: "the first is quick", server: []string{"recv a; recv EOF; send 1; wait 9s; send 2"},
			app: "send a; close; recv 1; recv 2; recv EOF; recv EOF", times: []time.Duration{0}},
		{name: "the hedge wins", server: []string{"recv a; hang", "recv a; recv EOF; send 1; send 2"},
			app: "send a; close; recv 1; recv 2; recv EOF; recv EOF", times: []time.Duration{0, second}},
		{name: "the first wins after all", server: []string{"recv a; wait 1500ms; send 1; send 2", "recv a; hang"},
			app: "send a; close; recv 1; recv 2; recv EOF", times: []time.Duration{0, second}},
		{name: "an empty stream wins", server: []string{"recv a; hang", "recv a; recv EOF"},
			app: "send a; close; recv EOF; recv EOF", times: []time.Duration{0, second}},
		{name: "an empty stream at once", server: []string{"recv a; recv EOF"},
			app: "send a; close; recv EOF; recv EOF", times: []time.Duration{0}},
		{name: "headers decide nothing", server: []string{"recv a; header; hang", "recv a; header; send 1"},
			app: "send a; close; recv 1; header; recv EOF", times: []time.Duration{0, second}},
		{name: "a fatal status ends the call", server: []string{"recv a; hang", "recv a; fail NOT_FOUND"},
			app: "send a; close; recv NOT_FOUND; recv NOT_FOUND; trailer 2", times: []time.Duration{0, second}},
		{name: "a failure sends the next now", server: []string{"recv a; fail UNAVAILABLE", "recv a; send 1"},
			app: "send a; close; recv 1; recv EOF", times: []time.Duration{0, 0}},
		{name: "a failure before the request", server: []string{"fail UNAVAILABLE", "recv a; send 1"},
			app: "wait 1s; send a; close; recv 1; recv EOF", times: []time.Duration{0, second}},
		{name: "all fail", server: []string{"recv a; wait 1500ms; fail UNAVAILABLE", "recv a; wait 2s; fail RESOURCE_EXHAUSTED"},
			app: "send a; close; recv RESOURCE_EXHAUSTED; recv RESOURCE_EXHAUSTED; trailer 2", times: []time.Duration{0, second},
			reason: ErrAttemptsExhausted},
		{name: "a hedge that fails ends nothing", server: []string{"recv a; wait 5s; send 1", "recv a; fail UNAVAILABLE"},
			app: "send a; close; recv 1; recv EOF", times: []time.Duration{0, second}},
		{name: "pushback", server: []string{"recv a; pushback 3000; fail UNAVAILABLE", "recv a; send 1"},
			app: "send a; close; recv 1; recv EOF", times: []time.Duration{0, 3 * second}},
		{name: "pushback stop", server: []string{"recv a; wait 5s; send 1", "recv a; pushback -1; fail UNAVAILABLE"},
			app: "send a; close; recv 1; recv EOF", times: []time.Duration{0, second}},
		{name: "a failure after the first message is the application's",
			server: []string{"recv a; hang", "recv a; send 1; fail UNAVAILABLE"},
			app:    "send a; close; recv 1; recv UNAVAILABLE; trailer 2", times: []time.Duration{0, second}},
		{name: "the attempt timeout", opts: []Option{WithAttemptTimeout(3 * second / 2)},
			server: []string{"recv a; hang", "recv a; wait 1s; send 1"},
			app:    "send a; close; recv 1; wait 9s; recv EOF", times: []time.Duration{0, second}},
		{name: "the attempt timeout ends with the first message", opts: []Option{WithAttemptTimeout(3 * second / 2)},
			server: []string{"recv a; hang", "recv a; wait 1s; send 1; wait 50s; send 2"},
			app:    "send a; close; recv 1; recv 2; recv EOF", times: []time.Duration{0, second}},
		{name: "no request but its end", server: []string{"recv EOF; hang", "recv EOF; send 1"},
			app: "close; recv 1; recv EOF", times: []time.Duration{0, second}},
		{name: "the application asks late", server: []string{"recv a; send 1"},
			app: "send a; close; wait 10s; recv 1; recv EOF", times: []time.Duration{0}},
		{name: "the application wants the headers first", server: []string{"recv a; header; wait 5s; send 1"},
			app: "send a; close; header; recv 1; recv EOF", times: []time.Duration{0}},
		{name: "the context of a stream commits it", server: []string{"recv a; wait 5s; send 1"},
			app: "send a; close; context; recv 1; recv EOF", times: []time.Duration{0}},
		{name: "no second request, no hedge", server: []string{"wait 5s; send 1"},
			app: "recv 1; recv EOF", times: []time.Duration{0}},
		{name: "cancelled", server: []string{"recv a; hang"},
			app: "send a; close; wait 10ms; cancel; recv CANCELLED", times: []time.Duration{0}, reason: context.Canceled},
	} {
		t.Run(tt.name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				server := serveStreams(t, func(n int, stream grpc.ServerStream) error { return playServer(t, n, tt.server[n-1], stream) })
				budget, events := &aBudget{}, &hedgeEvents{}
				app, err := server.openStream(t, serverStream, append([]Option{WithBudget(budget), WithObserver(events.observe),
					WithMethod("/streams/Expand", WithHedging(Hedging{Budget: Unlimited, Delay: HedgeAfter(second)}))}, tt.opts...))
				if err != nil {
					t.Fatal(err)
				}
				app.play(t, tt.app)
				wantTimes(t, server, tt.times...)
				var e *Error
				if errors.As(app.err, &e) != (tt.reason != nil) || tt.reason != nil && !errors.Is(e.Reason, tt.reason) {
					t.Errorf("RecvMsg = %v, want reason %v", app.err, tt.reason)
				}
				synctest.Wait()
				events.check(t, events.events[len(events.events)-1].Err)
				wantAccounts(t, budget, len(tt.times))
			})
		})
	}
}

// What the caller gave as header, trailer and peer shows the attempt that won, and
// OnFinish runs once.
func TestHedgedStreamShowsTheWinner(t *testing.T) {
	bubble(t, func(t *testing.T) {
		server := serveStreams(t, func(n int, stream grpc.ServerStream) error {
			return playServer(t, n, []string{"recv a; header; hang", "recv a; header; send 1"}[n-1], stream)
		})
		var header, trailer metadata.MD
		var at peer.Peer
		finished := 0
		app, err := server.openStream(t, serverStream, []Option{WithMethod("/streams/Expand",
			WithHedging(Hedging{Budget: Unlimited, Delay: HedgeAfter(second)}))},
			grpc.Header(&header), grpc.Trailer(&trailer), grpc.Peer(&at), grpc.OnFinish(func(error) { finished++ }))
		if err != nil {
			t.Fatal(err)
		}
		app.play(t, "send a; close; recv 1")
		if header != nil || trailer != nil || at.Addr != nil {
			t.Errorf("with the first message the caller sees header %v, trailer %v, peer %v, want nothing before the end", header,
				trailer, at.Addr)
		}
		app.play(t, "recv EOF")
		if first(header["attempt"]) != "2" || at.Addr == nil || finished != 1 {
			t.Errorf("header %v, peer %v, %d times finished, want those of attempt 2, once", header, at.Addr, finished)
		}
	})
}

// A stream that no attempt opens fails where it is opened, as without hedging.
func TestHedgedStreamThatCannotBeOpened(t *testing.T) {
	bubble(t, func(t *testing.T) {
		server := serve(t, nil)
		open := 0
		refuse := belowStream(func(ctx context.Context, next streamOpener) (grpc.ClientStream, error) {
			open++
			return nil, errUnavailable
		})
		cc := server.conn(t, append(DialOptions(steady, WithConnectWait(0),
			WithMethod("/grpcretry.test.v1.EchoService/Expand",
				WithHedging(Hedging{Budget: Unlimited, MaxAttempts: 3, Delay: HedgeAfter(second)}))),
			refuse)...)
		_, err := echov1.NewEchoServiceClient(cc).Expand(t.Context(), request())
		wantStop(t, err, codes.Unavailable, ErrAttemptsExhausted, 3)
		if open != 3 || time.Since(server.start) != 0 {
			t.Errorf("%d attempts in %v, want 3 at once", open, time.Since(server.start))
		}
	})
}

// A stream that is not hedged for want of a delay is measured.
func TestStreamsAreMeasured(t *testing.T) {
	bubble(t, func(t *testing.T) {
		scripts := []string{"recv a; wait 3s; send 1; wait 9s", "recv a; wait 2s", "recv a; hang", "recv a; send 1",
			"recv a; wait 500ms; send 1", "recv a; wait 700ms", "recv a; fail UNAVAILABLE", "recv a; send 1"}
		server := serveStreams(t, func(n int, stream grpc.ServerStream) error { return playServer(t, n, scripts[n-1], stream) })
		on := false
		delay := &recordedDelay{HedgeDelay: HedgeAfter(second)}
		cc := server.conn(t, DialOptions(WithMethod("/streams/Expand",
			WithHedging(Hedging{Budget: Unlimited, Delay: switched{func() bool { return on }, delay}})))...)
		for i, step := range []struct {
			on        bool
			app, want string
		}{
			{false, "recv 1; recv EOF", "3s"},
			{false, "recv EOF", "2s"}, // without a message
			{true, "recv 1; recv EOF", "1s lost"},
			{true, "recv 1; recv EOF", "500ms"},
			{true, "recv EOF", "700ms"},
			{false, "recv 1; recv EOF", ""}, // a retry is not measured
		} {
			on, delay.told = step.on, nil
			stream, err := cc.NewStream(t.Context(), serverStream, "/streams/Expand")
			if err != nil {
				t.Fatal(err)
			}
			(&application{stream: stream}).play(t, "send a; close; "+step.app)
			if strings.Join(delay.told, ", ") != step.want {
				t.Errorf("stream %d: the delay was told %q, want %q", i+1, delay.told, step.want)
			}
		}
	})
}

// Nothing of a hedged stream stays with the caller's context, and no attempt of it is left.
func TestNothingOfAHedgedStreamStays(t *testing.T) {
	for _, tt := range []struct {
		name    string
		scripts []string
		app     string
	}{
		{"the first is quick", []string{"recv a; send 1"}, "send a; close; recv 1; recv EOF"},
		{"the hedge wins", []string{"recv a; hang", "recv a; send 1"}, "send a; close; recv 1; recv EOF"},
		{"an empty hedge wins", []string{"recv a; hang", "recv a"}, "send a; close; recv EOF"},
		{"a fatal failure", []string{"recv a; hang", "recv a; fail NOT_FOUND"}, "send a; close; recv NOT_FOUND"},
		{"all fail", []string{"recv a; fail UNAVAILABLE", "recv a; fail UNAVAILABLE"}, "send a; close; recv UNAVAILABLE"},
		{"a failure when committed", []string{"recv a; send 1; fail UNAVAILABLE"}, "send a; close; recv 1; recv UNAVAILABLE"},
		{"a timeout while the application is elsewhere", []string{"recv a; hang", "recv a; send 1"},
			"send a; close; wait 20s; recv 1; recv EOF"},
		{"a timeout while the application is elsewhere, and a failure", []string{"recv a; hang", "recv a; fail UNAVAILABLE"},
			"send a; close; wait 20s; recv UNAVAILABLE"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				server := serveStreams(t, func(n int, stream grpc.ServerStream) error { return playServer(t, n, tt.scripts[n-1], stream) })
				var mu sync.Mutex
				var attempts []*attempt
				note := belowStream(func(ctx context.Context, next streamOpener) (grpc.ClientStream, error) {
					mu.Lock()
					attempts = append(attempts, ctx.Value(attemptKey{}).(*attempt))
					mu.Unlock()
					return next(ctx)
				})
				cc := server.conn(t, append(DialOptions(WithAttemptTimeout(5*second),
					WithMethod("/s/m", WithHedging(Hedging{Budget: Unlimited, Delay: HedgeAfter(second)}))),
					note)...)
				ctx := &countingContext{Context: context.WithoutCancel(t.Context())}
				stream, err := cc.NewStream(ctx, serverStream, "/s/m")
				if err != nil {
					t.Fatal(err)
				}
				(&application{stream: stream}).play(t, tt.app)
				synctest.Wait()
				if got := ctx.number(); got != 0 {
					t.Errorf("%d functions wait for the end of the caller's context after the call", got)
				}
				for _, a := range attempts {
					if a.bounds.timer.Stop() {
						t.Errorf("the timer of attempt %d runs on", a.number)
					}
					if a.Err() == nil {
						t.Errorf("the context of attempt %d is alive", a.number)
					}
				}
				if len(attempts) != len(tt.scripts) {
					t.Errorf("%d attempts, want %d", len(attempts), len(tt.scripts))
				}
			})
		})
	}
}

// A classifier that panics leaves nobody waiting for a hedged stream.
func TestAPanicOfAHedgedStreamLeavesNobodyWaiting(t *testing.T) {
	bubble(t, func(t *testing.T) {
		server := serveStreams(t, func(n int, stream grpc.ServerStream) error {
			return playServer(t, n, []string{"recv a; wait 1500ms; fail UNAVAILABLE", "recv a; hang"}[n-1], stream)
		})
		app, err := server.openStream(t, serverStream, []Option{WithMethod("/streams/Expand",
			WithHedging(Hedging{Budget: Unlimited, Delay: HedgeAfter(second)})),
			WithClassifier(func(context.Context, Attempt) Classification { panic("classifier") })})
		if err != nil {
			t.Fatal(err)
		}
		app.play(t, "send a; close")
		var group sync.WaitGroup
		group.Go(func() {
			time.Sleep(second)
			app.play(t, "no header")
		})
		func() {
			defer func() {
				if recover() == nil {
					t.Error("the classifier's panic did not come out")
				}
			}()
			app.play(t, "recv 1")
		}()
		group.Wait()
		app.play(t, "recv INTERNAL; recv INTERNAL")
	})
}

// The end of a stream without a message leaves the application's alone, as gRPC does.
func TestAnEmptyHedgeWritesNoMessage(t *testing.T) {
	bubble(t, func(t *testing.T) {
		server := serveStreams(t, func(n int, stream grpc.ServerStream) error {
			return playServer(t, n, []string{"recv a; hang", "recv a"}[n-1], stream)
		})
		app, err := server.openStream(t, serverStream, []Option{WithMethod("/streams/Expand",
			WithHedging(Hedging{Budget: Unlimited, Delay: HedgeAfter(second)}))})
		if err != nil {
			t.Fatal(err)
		}
		app.play(t, "send a; close")
		m := &echov1.EchoResponse{Message: "mine"}
		if err := app.stream.RecvMsg(m); err != io.EOF || m.GetMessage() != "mine" {
			t.Errorf("RecvMsg = %v, and the message is %q, want io.EOF and mine", err, m.GetMessage())
		}
	})
}

// refusesRequest is a stream that has ended when the request is sent, or the sending ended.
type refusesRequest struct {
	grpc.ClientStream
	send, closeSend error
}

func (s refusesRequest) SendMsg(any) error { return s.send }
func (s refusesRequest) CloseSend() error  { return s.closeSend }
func (s refusesRequest) RecvMsg(any) error { return errUnavailable }

func TestAHedgeThatCannotSendItsRequest(t *testing.T) {
	for name, refusal := range map[string]refusesRequest{
		"ended":        {send: io.EOF},
		"ended later":  {closeSend: io.EOF},
		"failed":       {send: errUnavailable},
		"failed later": {closeSend: errUnavailable},
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				server := serveStreams(t, func(n int, stream grpc.ServerStream) error {
					return playServer(t, 1, map[bool]string{true: "recv a; wait 3s; send 1", false: "hang"}[n == 1], stream)
				})
				events := &hedgeEvents{}
				streams := 0
				cc := server.conn(t, append(DialOptions(WithObserver(events.observe),
					WithMethod("/s/m", WithHedging(Hedging{Budget: Unlimited, Delay: HedgeAfter(second)}))),
					below(func(s grpc.ClientStream) grpc.ClientStream {
						if streams++; streams == 1 {
							return s
						}
						refusal.ClientStream = s
						return refusal
					}))...)
				stream, err := cc.NewStream(t.Context(), serverStream, "/s/m")
				if err != nil {
					t.Fatal(err)
				}
				(&application{stream: stream}).play(t, "send a; close; recv 1; recv EOF")
				events.check(t, nil)
				if got := events.lines(); !slices.Contains(got, "attempt_end #2 UNAVAILABLE lost=false") || streams != 2 {
					t.Errorf("%d streams and events %q, want the hedge to fail with its status", streams, got)
				}
			})
		})
	}
}

// Two streams have their first message at the same moment: one wins, and the
// other has been read to its end when the application has the message.
func TestAHedgedStreamThatIsJustTooLate(t *testing.T) {
	bubble(t, func(t *testing.T) {
		script := []string{"recv a; recv EOF; wait 1500ms; send 1; send 1; send 1", "recv a; recv EOF; wait 500ms; send 2; send 2; send 2"}
		server := serveStreams(t, func(n int, stream grpc.ServerStream) error { return playServer(t, n, script[(n-1)%2], stream) })
		var mu sync.Mutex
		over := 0
		cc := server.conn(t, append(DialOptions(WithBudget(Unlimited),
			WithMethod("/s/m", WithHedging(Hedging{Budget: Unlimited, Delay: HedgeAfter(second)}))),
			below(func(s grpc.ClientStream) grpc.ClientStream {
				return &endingStream{s, func() {
					mu.Lock()
					defer mu.Unlock()
					over++
				}}
			}))...)
		for range 50 {
			over = 0
			stream, err := cc.NewStream(t.Context(), serverStream, "/s/m")
			if err != nil {
				t.Fatal(err)
			}
			app := &application{stream: stream}
			app.play(t, "send a; close")
			m := &echov1.EchoResponse{}
			if err := stream.RecvMsg(m); err != nil {
				t.Fatal(err)
			}
			mu.Lock()
			if over != 1 {
				t.Errorf("%d attempts are over when the first message is there, want the loser", over)
			}
			mu.Unlock()
			app.play(t, strings.Repeat("recv "+m.GetMessage()+"; ", 2)+"recv EOF")
			synctest.Wait()
		}
	})
}

// An endingStream tells when RecvMsg has returned its end. grpc.OnFinish would not do: after
// a cancellation gRPC may run that on a goroutine of its own, a little later.
type endingStream struct {
	grpc.ClientStream
	over func()
}

func (s *endingStream) RecvMsg(m any) error {
	err := s.ClientStream.RecvMsg(m)
	if err != nil {
		s.over()
	}
	return err
}

// A first message that comes with the attempt timeout is too late, also for a hedged stream:
// the attempt has failed, and the next is sent.
func TestTheFirstMessageOfAHedgedStreamIsTooLate(t *testing.T) {
	bubble(t, func(t *testing.T) {
		scripts := []string{"recv a; send 1; send 2; hang", "recv a; send 3; send 4"}
		server := serveStreams(t, func(n int, stream grpc.ServerStream) error { return playServer(t, n, scripts[n-1], stream) })
		events, delay := &hedgeEvents{}, 6*second
		cc := server.conn(t, append(DialOptions(WithAttemptTimeout(5*second), WithObserver(events.observe),
			WithMethod("/s/m", WithHedging(Hedging{Budget: Unlimited, Delay: HedgeAfter(time.Hour)}))),
			below(func(s grpc.ClientStream) grpc.ClientStream {
				late := &lateStream{s, delay}
				delay = 0
				return late
			}))...)
		stream, err := cc.NewStream(t.Context(), serverStream, "/s/m")
		if err != nil {
			t.Fatal(err)
		}
		(&application{stream: stream}).play(t, "send a; close; recv 3; recv 4; recv EOF")
		if len(server.attempts()) != 2 {
			t.Errorf("%d attempts, want 2", len(server.attempts()))
		}
		events.check(t, nil)
		if got := events.events[1].Attempt.Err; !errors.Is(got, ErrAttemptTimeout) {
			t.Errorf("the first attempt failed with %v, want its timeout", got)
		}
	})
}

// When the delay panics as it is told of the first message, the attempt has ended all the same.
func TestAPanicOfTheDelayEndsTheStream(t *testing.T) {
	bubble(t, func(t *testing.T) {
		server := serveStreams(t, func(n int, stream grpc.ServerStream) error { return playServer(t, n, "recv a; send 1; hang", stream) })
		var first context.Context
		note := belowStream(func(ctx context.Context, next streamOpener) (grpc.ClientStream, error) {
			first = ctx
			return next(ctx)
		})
		cc := server.conn(t, append(DialOptions(WithMethod("/s/m",
			WithHedging(Hedging{Budget: Unlimited, Delay: panickyDelay{HedgeAfter(second)}}))),
			note)...)
		stream, err := cc.NewStream(t.Context(), serverStream, "/s/m")
		if err != nil {
			t.Fatal(err)
		}
		app := &application{stream: stream}
		app.play(t, "send a; close")
		func() {
			defer func() {
				if got := recover(); got != "drawn" {
					t.Errorf("recovered %v, want what was thrown", got)
				}
			}()
			app.play(t, "recv 1")
		}()
		if first.Err() == nil {
			t.Error("the context of the attempt is alive after the panic")
		}
		app.play(t, "recv INTERNAL")
	})
}
