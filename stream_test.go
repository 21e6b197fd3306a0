package grpcretry

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"log/slog"
	"net"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"

	echov1 "github.com/grpcretry/grpcretry/proto/echo/v1"
)

func TestStreams(t *testing.T) {
	for _, tt := range []struct {
		name   string
		kind   *grpc.StreamDesc
		opts   []Option
		server []string // one script for each attempt
		app    string
		reason error           // of the *Error; nil if the error is gRPC's own, or there is none
		times  []time.Duration // of the attempts
	}{
		// Server streams.
		{"server stream fails before its first message", serverStream, nil,
			[]string{"recv a; fail UNAVAILABLE", "recv a; recv EOF; fail UNAVAILABLE", "recv a; recv EOF; send 1"},
			"send a; close; recv 1; recv EOF", nil, []time.Duration{0, 1 * second, 3 * second}},
		{"server stream fails after its first message", serverStream, nil, []string{"recv a; send 1; send 2; fail UNAVAILABLE"},
			"send a; close; recv 1; recv 2; recv UNAVAILABLE; recv UNAVAILABLE; trailer 1", nil, []time.Duration{0}},
		{"headers that the application has not seen do not commit", serverStream, nil,
			[]string{"recv a; header; fail UNAVAILABLE", "recv a; send 1"}, "send a; close; recv 1; recv EOF", nil,
			[]time.Duration{0, 1 * second}},
		{"headers that the application has seen commit", serverStream, nil, []string{"recv a; header; wait 1s; fail UNAVAILABLE"},
			"send a; close; header; recv UNAVAILABLE", nil, []time.Duration{0}},
		{"waiting for headers retries", serverStream, nil, []string{"recv a; fail UNAVAILABLE", "recv a; header; wait 1s; send 1"},
			"send a; close; header; recv 1; recv EOF", nil, []time.Duration{0, 1 * second}},
		{"Context commits", serverStream, nil, []string{"recv a; wait 1s; fail UNAVAILABLE"}, "send a; close; context; recv UNAVAILABLE",
			nil, []time.Duration{0}},
		{"not retryable after a retry", serverStream, nil, []string{"fail UNAVAILABLE", "fail NOT_FOUND"},
			"send a; close; recv NOT_FOUND", ErrNotRetryable, []time.Duration{0, 1 * second}},
		{"no attempts left, and RecvMsg called again makes no more", serverStream, []Option{WithMaxAttempts(2)},
			[]string{"fail UNAVAILABLE", "fail UNAVAILABLE"},
			"send a; close; recv UNAVAILABLE; recv UNAVAILABLE; recv UNAVAILABLE; trailer 2",
			ErrAttemptsExhausted, []time.Duration{0, 1 * second}},
		{"pushback", serverStream, nil, []string{"pushback 7000; fail UNAVAILABLE", "recv a; send 1"}, "send a; close; recv 1; recv EOF",
			nil, []time.Duration{0, 7 * second}},
		{"pushback says stop", serverStream, nil, []string{"pushback -1; fail UNAVAILABLE"}, "send a; close; recv UNAVAILABLE", ErrPushback,
			[]time.Duration{0}},
		{"a long request is not counted against the limit", serverStream, []Option{WithBufferLimit(1)},
			[]string{"fail UNAVAILABLE", "recv abc; send 1"},
			"send abc; close; recv 1; recv EOF", nil, []time.Duration{0, 1 * second}},

		// The attempt timeout.
		{"a first message too late", serverStream, []Option{WithAttemptTimeout(5 * second)},
			[]string{"recv a; wait 7s; send 1", "recv a; send 1"},
			"send a; close; recv 1; recv EOF", nil, []time.Duration{0, 6 * second}},
		{"a first message in time lives on", serverStream, []Option{WithAttemptTimeout(5 * second)},
			[]string{"recv a; wait 4s; send 1; wait 50s; send 2"},
			"send a; close; recv 1; recv 2; recv EOF", nil, []time.Duration{0}},
		{"headers in time, a first message too late", serverStream, []Option{WithAttemptTimeout(5 * second)},
			[]string{"recv a; header; hang", "recv a; send 1"}, "send a; close; recv 1; recv EOF", nil, []time.Duration{0, 6 * second}},
		{"a timeout while the application is elsewhere", serverStream, []Option{WithAttemptTimeout(5 * second)},
			[]string{"recv a; hang", "recv a; send 1"},
			"send a; close; wait 20s; recv 1; recv EOF", nil, []time.Duration{0, 26 * second}},

		// Client streams.
		{"client stream is replayed in order", clientStream, nil,
			[]string{"recv a; recv b; recv EOF; fail UNAVAILABLE", "recv a; recv b; recv EOF; send 1"},
			"send a; send b; close; recv 1", nil, []time.Duration{0, 1 * second}},
		{"client stream fails in its middle, twice", clientStream, nil,
			[]string{"recv a; fail UNAVAILABLE", "recv a; recv b; fail UNAVAILABLE", "recv a; recv b; recv c; recv EOF; send 1"},
			"send a; wait 1s; send b; wait 1s; send c; close; recv 1", nil, []time.Duration{0, 2 * second, 5 * second}},
		{"client stream, no attempts left while sending", clientStream, []Option{WithMaxAttempts(2)},
			[]string{"recv a; fail UNAVAILABLE", "recv a; recv b; fail UNAVAILABLE"},
			"send a; wait 1s; send b; wait 1s; sendeof c; close; recv UNAVAILABLE", ErrAttemptsExhausted, []time.Duration{0, 2 * second}},
		{"client stream over the buffer limit is committed", clientStream, nil,
			[]string{"recv a; recv " + long + "; recv b; fail UNAVAILABLE"},
			"send a; send " + long + "; send b; close; recv UNAVAILABLE", nil, []time.Duration{0}},
		// "aaa" is 3 bytes, in a field of 2 more, in a frame of 5 more.
		{"client stream at the buffer limit", clientStream, []Option{WithBufferLimit(20)},
			[]string{"recv aaa; recv bbb; recv EOF; fail UNAVAILABLE", "recv aaa; recv bbb; recv EOF; send 1"},
			"send aaa; send bbb; close; recv 1", nil, []time.Duration{0, 1 * second}},
		{"client stream a byte over the buffer limit", clientStream, []Option{WithBufferLimit(19)},
			[]string{"recv aaa; recv bbb; recv EOF; fail UNAVAILABLE"}, "send aaa; send bbb; close; recv UNAVAILABLE", nil, []time.Duration{0}},
		{"client stream answered early", clientStream, nil, []string{"recv a; send 1"}, "send a; wait 1s; sendeof b; close; recv 1", nil,
			[]time.Duration{0}},
		{"client stream fails after headers that the application has not seen", clientStream, nil,
			[]string{"recv a; header; fail UNAVAILABLE", "recv a; recv b; recv EOF; send 1"}, "send a; wait 1s; send b; close; recv 1", nil,
			[]time.Duration{0, 2 * second}},
		{"client stream fails for good after headers that the application has not seen", clientStream, nil,
			[]string{"recv a; header; fail NOT_FOUND"}, "send a; wait 1s; sendeof b; close; recv NOT_FOUND; trailer 1", nil,
			[]time.Duration{0}},

		// Both ways.
		{"bidi fails after headers that the application has not seen", bidiStream, nil,
			[]string{"recv a; header; fail UNAVAILABLE", "recv a; header; recv b; fail UNAVAILABLE", "recv a; recv b; recv c; recv EOF; send 1"},
			"send a; wait 1s; send b; wait 1s; send c; close; recv 1; recv EOF", nil, []time.Duration{0, 2 * second, 5 * second}},
		{"client stream ends well after headers, without a response", clientStream, nil, []string{"recv a; header"},
			"send a; wait 1s; sendeof b; close; recv INTERNAL; trailer", nil, []time.Duration{0}},
		{"bidi fails after unseen headers, with an attempt timeout", bidiStream, []Option{WithAttemptTimeout(5 * second)},
			[]string{"recv a; header; fail UNAVAILABLE", "recv a; recv b; recv EOF; send 1"},
			"send a; wait 10s; send b; close; recv 1; recv EOF", nil, []time.Duration{0, 11 * second}},
		{"bidi fails after unseen headers, with hedging, which is for streams of one request", bidiStream, []Option{WithHedging(Hedging{
			Delay: HedgeAfter(second), Budget: Unlimited, AllMethodsAreSafe: true})},
			[]string{"recv a; header; fail UNAVAILABLE", "recv a; recv b; recv EOF; send 1"},
			"send a; wait 10s; send b; close; recv 1; recv EOF", nil, []time.Duration{0, 11 * second}},
		{"bidi fails after unseen headers, in a dry run", bidiStream, []Option{WithDryRun(true)}, []string{"recv a; header; fail UNAVAILABLE"},
			"send a; wait 1s; sendeof b; close; recv UNAVAILABLE; trailer 1", nil, []time.Duration{0}},
		{"bidi fails after unseen headers, with a type that is not known", unlinkedStream, nil, []string{"recv a; header; fail UNAVAILABLE"},
			"send a; wait 1s; sendeof b; close; recv UNAVAILABLE; trailer 1", nil, []time.Duration{0}},
		{"bidi fails after a message that the application has not seen", bidiStream, nil,
			[]string{"recv a; send 1; send 2; fail UNAVAILABLE"},
			"send a; wait 1s; sendeof b; sendeof c; recv 1; recv 2; recv UNAVAILABLE; recv UNAVAILABLE; trailer 1", nil, []time.Duration{0}},
		{"bidi fails after a message that the application has not seen, and asks for headers", bidiStream, nil,
			[]string{"recv a; send 1; fail UNAVAILABLE"},
			"send a; wait 1s; sendeof b; header; recv 1; recv UNAVAILABLE", nil, []time.Duration{0}},
		{"bidi ends well before it is sent all", bidiStream, nil, []string{"recv a; header"},
			"send a; wait 1s; sendeof b; close; recv EOF; recv EOF; trailer", nil, []time.Duration{0}},
		{"bidi ends well after a message that the application has not seen", bidiStream, nil, []string{"recv a; send 1"},
			"send a; wait 1s; sendeof b; close; recv 1; recv EOF; recv EOF", nil, []time.Duration{0}},
		{"bidi fails before the first answer", bidiStream, nil,
			[]string{"recv a; recv b; fail UNAVAILABLE", "recv a; recv b; send 1; recv c; send 2; recv EOF"},
			"send a; send b; recv 1; send c; recv 2; close; recv EOF", nil, []time.Duration{0, 1 * second}},
		{"bidi fails after the first answer", bidiStream, nil, []string{"recv a; send 1; fail UNAVAILABLE"},
			"send a; recv 1; recv UNAVAILABLE; sendeof b; trailer 1", nil, []time.Duration{0}},
		{"bidi opened without a message", bidiStream, nil, []string{"fail UNAVAILABLE", "send 1; recv a; recv EOF"},
			"recv 1; send a; close; recv EOF", nil, []time.Duration{0, 1 * second}},
		{"cancelled in a wait", bidiStream, nil, []string{"recv a; fail UNAVAILABLE"}, "send a; wait 1s; cancel; recv CANCELLED; sendeof b",
			context.Canceled, []time.Duration{0}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				server := serveScripts(t, tt.server...)
				finished := 0
				app, err := server.openStream(t, tt.kind, tt.opts, grpc.OnFinish(func(error) { finished++ }))
				if err != nil {
					t.Fatal(err)
				}
				app.play(t, tt.app)
				var e *Error
				if isOurs := errors.As(app.err, &e); isOurs != (tt.reason != nil) || isOurs && !errors.Is(e.Reason, tt.reason) {
					t.Errorf("the application's error is %#v, want reason %v", app.err, tt.reason)
				}
				wantTimes(t, server, tt.times...)
				app.cancel()
				synctest.Wait()
				if finished != 1 {
					t.Errorf("OnFinish ran %d times", finished)
				}
			})
		})
	}
}

func TestAStreamWithAnInvalidOptionIsNotOpened(t *testing.T) {
	bubble(t, func(t *testing.T) {
		server := serveScripts(t, "hang")
		_, err := server.openStream(t, bidiStream, nil, WithMaxAttempts(-1))
		if status.Code(err) != codes.Internal || !strings.Contains(err.Error(), "WithMaxAttempts") {
			t.Errorf("NewStream = %v, want INTERNAL that names the option", err)
		}
		synctest.Wait()
		wantTimes(t, server)
	})
}

// An observer is told what a stream that has succeeded left, too.
func TestAStreamsSuccessIsReportedWhole(t *testing.T) {
	bubble(t, func(t *testing.T) {
		server := serveStreams(t, func(n int, stream grpc.ServerStream) error {
			stream.SetTrailer(metadata.Pairs("k", "trailer"))
			return playServer(t, n, "recv a; header; send 1", stream)
		})
		var end Attempt
		app, err := server.openStream(t, serverStream, []Option{WithObserver(func(_ context.Context, e Event) {
			if e.Kind == AttemptEnd {
				end = e.Attempt
			}
		})})
		if err != nil {
			t.Fatal(err)
		}
		app.play(t, "send a; close; recv 1; recv EOF")
		if first(end.Header["attempt"]) != "1" || first(end.Trailer["k"]) != "trailer" || end.Peer == nil {
			t.Errorf("header %v, trailer %v, peer %v; want all three", end.Header, end.Trailer, end.Peer)
		}
	})
}

func TestStreamEvents(t *testing.T) {
	bubble(t, func(t *testing.T) {
		scripts := []string{"recv a; fail UNAVAILABLE", "recv a; send 1; fail UNAVAILABLE"}
		server := serveScripts(t, scripts...)
		recorder := &eventRecorder{start: server.start}
		budget := &aBudget{}
		var at peer.Peer
		app, err := server.openStream(t, bidiStream, []Option{WithObserver(recorder.observe), WithBudget(budget)}, grpc.Peer(&at))
		if err != nil {
			t.Fatal(err)
		}
		app.play(t, "send a; recv 1; recv UNAVAILABLE")
		want := []string{
			"0s attempt_start #1", "0s attempt_end #1 UNAVAILABLE in 0s", "0s decision #1 retry after 1s by backoff",
			"1s attempt_start #2", "1s attempt_end #2 UNAVAILABLE in 0s", "1s decision #2 stop: committed",
			"1s call_end #2 committed after 1s, attempts #1 UNAVAILABLE #2 UNAVAILABLE",
		}
		if !slices.Equal(recorder.lines, want) {
			t.Errorf("events are\n%s\nwant\n%s", strings.Join(recorder.lines, "\n"), strings.Join(want, "\n"))
		}
		if want := []Outcome{{Attempt: 1, Result: Failed}, {Attempt: 2, Result: Failed}}; !slices.Equal(budget.heard, want) {
			t.Errorf("budget heard %v, want %v", budget.heard, want)
		}
		if at.Addr == nil || server.attempts()[1].previous != 1 {
			t.Errorf("peer %v, previous attempts %d, want one, 1", at.Addr, server.attempts()[1].previous)
		}
	})
}

// An interceptor may open its stream a second time, with a new token for example. The end of the first is not the
// attempt's.
func TestAnInterceptorBelowMayOpenAgain(t *testing.T) {
	bubble(t, func(t *testing.T) {
		server := serveScripts(t, "recv a; send 1; wait 1s; send 2")
		tokens := &expiredToken{}
		twice := belowStream(func(ctx context.Context, next streamOpener) (grpc.ClientStream, error) {
			stream, err := next(ctx)
			if err != nil {
				stream, err = next(ctx)
			}
			return stream, err
		})
		cc := server.conn(t, append(DialOptions(), twice, grpc.WithPerRPCCredentials(tokens))...)
		openOn(t, cc, serverStream).play(t, "send a; close; recv 1; recv 2; recv EOF")
	})
}

// An expiredToken fails the first time.
type expiredToken struct{ asked int }

func (e *expiredToken) GetRequestMetadata(context.Context, ...string) (map[string]string, error) {
	if e.asked++; e.asked == 1 {
		return nil, errors.New("expired")
	}
	return nil, nil
}

func (*expiredToken) RequireTransportSecurity() bool { return false }

// A cable is the network of a client. Cutting it breaks the connections made so far.
type cable struct {
	mu    sync.Mutex
	conns []net.Conn
}

func (c *cable) to(f *fixture) grpc.DialOption {
	return grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) {
		conn, err := f.listener.DialContext(ctx)
		c.mu.Lock()
		defer c.mu.Unlock()
		c.conns = append(c.conns, conn)
		return conn, err
	})
}

func (c *cable) cut() {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, conn := range c.conns {
		conn.Close()
	}
	c.conns = nil
}

// mergingCodec leaves what a message held and the wire does not mention, as JSON does.
type mergingCodec struct{}

func (mergingCodec) Name() string                       { return "proto" }
func (mergingCodec) Marshal(v any) ([]byte, error)      { return json.Marshal(v) }
func (mergingCodec) Unmarshal(data []byte, v any) error { return json.Unmarshal(data, v) }

// A note is a message of that codec. It knows its size, or it could not be buffered.
type note struct{ Text, Mark, Own string }

func (*note) Size() int { return 100 }

func TestNothingOfAFailedAttemptIsMergedIntoTheResponse(t *testing.T) {
	for _, tt := range []struct {
		name  string
		kind  *grpc.StreamDesc
		opts  []Option
		delay time.Duration // of the first message below us
	}{
		{"client stream that fails after its response", clientStream, nil, 0},
		{"server stream whose first message is late", serverStream, []Option{WithAttemptTimeout(5 * second)}, 7 * second},
	} {
		t.Run(tt.name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				f := serve(t, nil, grpc.ForceServerCodec(mergingCodec{}),
					grpc.UnknownServiceHandler(func(_ any, stream grpc.ServerStream) error {
						var m note
						for stream.RecvMsg(&m) == nil {
							continue
						}
						if PreviousAttempts(stream.Context()) > 0 {
							return stream.SendMsg(map[string]string{"Text": "2"})
						}
						stream.SendMsg(map[string]string{"Mark": "of attempt 1"})
						return status.Error(codes.Unavailable, "after the response")
					}))
				delay := tt.delay
				cc := f.conn(t, append(DialOptions(append(tt.opts, steady)...), below(func(s grpc.ClientStream) grpc.ClientStream {
					late := &lateStream{s, delay}
					delay = 0
					return late
				}))...)
				app := openOn(t, cc, tt.kind, grpc.ForceCodec(mergingCodec{}))
				if err := app.stream.SendMsg(&note{}); err != nil {
					t.Fatal(err)
				}
				app.play(t, "close")
				got, want := note{Own: "the application's"}, note{Text: "2"}
				if err := app.stream.RecvMsg(&got); err != nil || got != want {
					t.Errorf("RecvMsg = %+v, %v, want %+v", got, err, want)
				}
			})
		})
	}
}

// A message whose size is unknown commits its stream, and so does one that does not fit. Only an object that is sent twice is logged.
func TestWhichMessagesAreKept(t *testing.T) {
	object := &note{Text: "a"}
	for _, tt := range []struct {
		name     string
		sent     []any
		attempts int
		logged   []string
	}{
		{"known sizes", []any{&note{Text: "a"}, &note{Text: "b"}}, 2, nil},
		{"an unknown size", []any{&note{Text: "a"}, map[string]string{"Text": "b"}}, 1, nil},
		{"more than the buffer holds", []any{&note{Text: "a"}, &note{Text: "b"}, &note{Text: "c"}}, 1, nil},
		{"one object twice", []any{object, object}, 1, []string{"WARN…the same object was sent twice…method=/streams/Chat"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				attempts, logs := 0, &logRecorder{}
				server := serve(t, nil, grpc.ForceServerCodec(mergingCodec{}), grpc.UnknownServiceHandler(func(_ any, stream grpc.ServerStream) error {
					attempts++
					for range tt.sent {
						if err := stream.RecvMsg(&note{}); err != nil {
							t.Errorf("the server received %v", err)
						}
					}
					return status.Error(codes.Unavailable, "failed")
				}))
				cc := server.conn(t, DialOptions(steady, WithMaxAttempts(2), WithBufferLimit(250), WithLogger(slog.New(logs)))...)
				stream := openOn(t, cc, bidiStream, grpc.ForceCodec(mergingCodec{})).stream
				for _, m := range tt.sent {
					if err := stream.SendMsg(m); err != nil {
						t.Fatal(err)
					}
				}
				if err := stream.RecvMsg(&note{}); status.Code(err) != codes.Unavailable || attempts != tt.attempts {
					t.Errorf("RecvMsg = %v after %d attempts, want UNAVAILABLE after %d", err, attempts, tt.attempts)
				}
				if tt.attempts == 1 {
					wantLines(t, logs, tt.logged...)
				}
			})
		})
	}
}

// Messages are kept by reference, so one that was sent twice cannot be replayed as what it was
// the first time.
func TestAMessageObjectSentRepeatedlyIsNeverReplayedAsItsLastValue(t *testing.T) {
	bubble(t, func(t *testing.T) {
		var mu sync.Mutex
		var received [][]string // by attempt
		server := serveStreams(t, func(n int, stream grpc.ServerStream) error {
			var got []string
			var m echov1.EchoRequest
			for stream.RecvMsg(&m) == nil {
				got = append(got, m.GetMessage())
			}
			mu.Lock()
			received = append(received, got)
			mu.Unlock()
			if n == 1 {
				return status.Error(codes.Unavailable, "x")
			}
			return stream.SendMsg(&echov1.EchoResponse{Message: strings.Join(got, " ")})
		})
		app := openOn(t, server.conn(t, DialOptions(steady)...), clientStream)
		m, want := &echov1.EchoRequest{}, []string(nil)
		for i := range 3 {
			m.Message = strconv.Itoa(i)
			want = append(want, m.Message)
			if err := app.stream.SendMsg(m); err != nil {
				t.Fatal(err)
			}
			time.Sleep(second) // on the wire by now
		}
		app.play(t, "close")
		err := app.stream.RecvMsg(new(echov1.EchoResponse))
		for i, got := range received {
			if !slices.Equal(got, want) {
				t.Errorf("attempt %d received %q, want %q", i+1, got, want)
			}
		}
		if len(received) == 1 && status.Code(err) != codes.Unavailable {
			t.Errorf("RecvMsg = %v, want UNAVAILABLE", err)
		}
	})
}

// A heartbeat may be one object, which never changes. No attempt follows after it was sent again, so a wait for one ends at once, and the
// application gets what the server has said.
func TestAnObjectSentAgainDuringAWaitEndsTheCallAsTheServerHas(t *testing.T) {
	for name, opts := range map[string][]Option{
		"retried":         nil,
		"attempt timeout": {WithAttemptTimeout(time.Minute)},
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				server := serveScripts(t, "recv ping; fail UNAVAILABLE", "recv ping; send 1")
				slot, seen, logs := concurrencyBudgetOf(t, 1), 0, &logRecorder{}
				opts = append(opts, steady, WithBudget(slot), WithLogger(slog.New(logs)), WithObserver(func(_ context.Context, e Event) {
					if e.Kind == AttemptStart {
						seen++
					}
				}))
				app := openOn(t, server.conn(t, DialOptions(opts...)...), bidiStream)
				ping := &echov1.EchoRequest{Message: "ping"}
				received := make(chan error)
				go func() { received <- app.stream.RecvMsg(new(echov1.EchoResponse)) }()
				if err := app.stream.SendMsg(ping); err != nil {
					t.Fatal(err)
				}
				time.Sleep(second / 2)
				sent := time.Now()
				if err := app.stream.SendMsg(ping); err != io.EOF {
					t.Errorf("SendMsg = %v, want io.EOF", err)
				}
				err := <-received
				if status.Code(err) != codes.Unavailable || !errors.Is(err, ErrCommitted) {
					t.Errorf("RecvMsg = %v, want UNAVAILABLE, because the stream is committed", err)
				}
				if took := time.Since(sent); took != 0 {
					t.Errorf("both returned after %v, want at once", took)
				}
				if made := len(server.times()); made != 1 || seen != 1 {
					t.Errorf("%d attempts were made and %d reported, want 1", made, seen)
				}
				wantBalance(t, slot, time.Now(), 1)
				wantLines(t, logs, "DEBUG…retrying", "WARN…the same object was sent twice…method=/streams/Chat",
					"WARN…gave up…reason=committed")
			})
		})
	}
}

// The same if the call waits for a connection.
func TestAnObjectSentAgainWhileTheServerIsGoneEndsTheStream(t *testing.T) {
	bubble(t, func(t *testing.T) {
		server := serveScripts(t, "recv ping; hang")
		link, cc := server.linked(t, DialOptions()...)
		app := openOn(t, cc, bidiStream)
		ping, start := &echov1.EchoRequest{Message: "ping"}, time.Now()
		if err := app.stream.SendMsg(ping); err != nil {
			t.Fatal(err)
		}
		time.Sleep(second)
		link.cut()
		received := make(chan error)
		go func() { received <- app.stream.RecvMsg(new(echov1.EchoResponse)) }()
		time.Sleep(second)
		if err := app.stream.SendMsg(ping); err != io.EOF {
			t.Errorf("SendMsg = %v, want io.EOF", err)
		}
		if err := <-received; status.Code(err) != codes.Unavailable || !errors.Is(err, ErrCommitted) {
			t.Errorf("RecvMsg = %v, want UNAVAILABLE, because the stream is committed", err)
		}
		if took := time.Since(start); took != 2*second {
			t.Errorf("the call has ended after %v, want 2s", took)
		}
	})
}

// If nobody receives, SendMsg itself waits for another attempt. If none follows, the message reaches no server, and SendMsg says so.
func TestSendMsgThatWaitsInVainReturnsTheEnd(t *testing.T) {
	bubble(t, func(t *testing.T) {
		for _, desc := range []*grpc.StreamDesc{bidiStream, unlinkedStream} {
			server := serveScripts(t, "hang")
			link, cc := server.linked(t, DialOptions()...)
			app := openOn(t, cc, desc)
			time.Sleep(second)
			link.cut()
			time.Sleep(second)
			app.play(t, "sendeof a; sendeof a; recv UNAVAILABLE")
		}
	})
}

// The first attempt is still sending when the second one has succeeded with the same message.
func TestSendMsgThatIsOvertakenByARetryHasSentItsMessage(t *testing.T) {
	for _, desc := range []*grpc.StreamDesc{clientStream, bidiStream} {
		bubble(t, func(t *testing.T) {
			server, attempts := serveScripts(t, "fail UNAVAILABLE", "recv a; send 1"), 0
			app := openOn(t, server.conn(t, append(DialOptions(steady), below(func(s grpc.ClientStream) grpc.ClientStream {
				if attempts++; attempts > 1 {
					return s
				}
				return &hookedStream{ClientStream: s, send: func(m any) error {
					time.Sleep(5 * second)
					return s.SendMsg(m)
				}}
			}))...), desc)
			var receiver sync.WaitGroup
			receiver.Go(func() { app.play(t, "recv 1; recv EOF") })
			app.play(t, "send a")
			receiver.Wait()
		})
	}
}

// The retry waits in gRPC for a new connection when the object is filled and sent again. That wait ends, too.
func TestAnObjectFilledAgainWhileARetryOpensIsNotSent(t *testing.T) {
	for name, tt := range map[string]struct {
		refused bool // otherwise connecting takes for ever
		call    []grpc.CallOption
	}{
		"connecting":     {false, nil},
		"wait for ready": {true, []grpc.CallOption{grpc.WaitForReady(true)}},
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				server := serveScripts(t, "recv 1; hang", "recv 1; recv 2; send 1")
				dials := 0
				cc := server.conn(t, append(DialOptions(WithBackoff(Constant(second/10))),
					grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) {
						switch dials++; {
						case dials > 1 && tt.refused:
							return nil, errRefused
						case dials > 1:
							<-ctx.Done()
							return nil, ctx.Err()
						}
						nc, err := server.listener.DialContext(ctx)
						time.AfterFunc(second/2, func() { nc.Close() })
						return nc, err
					}))...)
				app, start := openOn(t, cc, bidiStream, tt.call...), time.Now()
				received := make(chan error)
				go func() { received <- app.stream.RecvMsg(new(echov1.EchoResponse)) }()
				m := &echov1.EchoRequest{Message: "1"}
				if err := app.stream.SendMsg(m); err != nil {
					t.Fatal(err)
				}
				time.Sleep(second)
				m.Message = "2"
				if err := app.stream.SendMsg(m); err != io.EOF {
					t.Errorf("SendMsg = %v, want io.EOF", err)
				}
				if err := <-received; err != errSpoilt {
					t.Errorf("RecvMsg = %v, want %v", err, errSpoilt)
				}
				if took := time.Since(start); took != second {
					t.Errorf("the call has ended after %v, want 1s, when the object was sent again", took)
				}
			})
		})
	}
}

// Hedges are due each second. Header waits for the attempt whose message is the first.
func TestHeaderOfAHedgedStreamWaitsForTheWinner(t *testing.T) {
	for _, tt := range []struct {
		name    string
		scripts []string
		asked   time.Duration // when Header is called
		seen    time.Duration // when it returns
		attempt string        // of the headers, and of the messages
		times   []time.Duration
	}{
		{"before a hedge is due", []string{"recv a; header; wait 5s; send 1", "recv a; hang"}, second / 2, 5 * second, "1",
			[]time.Duration{0, second}},
		{"while a hedge has no headers", []string{"recv a; header; wait 5s; send 1", "recv a; hang"}, 3 * second / 2, 5 * second, "1",
			[]time.Duration{0, second}},
		{"headers of the hedge", []string{"recv a; hang", "recv a; header; wait 5s; send 2"}, second / 2, 6 * second, "2",
			[]time.Duration{0, second}},
		{"headers that come later", []string{"recv a; wait 3s; header; wait 5s; send 1", "recv a; hang"}, 3 * second / 2, 8 * second, "1",
			[]time.Duration{0, second}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				server := serveScripts(t, tt.scripts...)
				app := openOn(t, server.conn(t, DialOptions(steady,
					WithMethod("/streams/Expand",
						WithPolicy(Policy{MaxAttempts: 2, Hedging: &Hedging{Budget: Unlimited, Delay: HedgeAfter(second)}})))...),
					serverStream)
				app.play(t, "send a; close")
				var group sync.WaitGroup
				group.Go(func() { app.play(t, "recv "+tt.attempt+"; recv EOF") })
				time.Sleep(tt.asked)
				md, err := app.stream.Header()
				if got := time.Since(server.start); err != nil || first(md["attempt"]) != tt.attempt || got != tt.seen {
					t.Errorf("Header = %v, %v after %v, want those of attempt %s after %v", md, err, got, tt.attempt, tt.seen)
				}
				group.Wait()
				wantTimes(t, server, tt.times...)
			})
		})
	}
}

// Without a goroutine that receives, Header receives the first message itself, which RecvMsg returns later.
func TestHeaderOfAHedgedStreamReceivesAhead(t *testing.T) {
	bubble(t, func(t *testing.T) {
		server := serveService(t, &expander{expand: func(stream grpc.ServerStream) error {
			previous := PreviousAttempts(stream.Context())
			return playServer(t, previous+1, []string{"hang", "header; send 2"}[previous], stream)
		}})
		stream, err := server.client(t, WithMethod("/grpcretry.test.v1.EchoService/Expand",
			WithHedging(Hedging{Delay: HedgeAfter(second), Budget: Unlimited}))).Expand(t.Context(), request())
		if err != nil {
			t.Fatal(err)
		}
		start := time.Now()
		if md, err := stream.Header(); first(md["attempt"]) != "2" || err != nil || time.Since(start) != second {
			t.Errorf("Header = %v, %v after %v, want the hedge's after 1s", md, err, time.Since(start))
		}
		if m, err := stream.Recv(); m.GetMessage() != "2" || err != nil {
			t.Errorf("Recv = %v, %v, want the message that Header has received", m, err)
		}
		if m, err := stream.Recv(); err != io.EOF {
			t.Errorf("Recv = %v, %v, want io.EOF", m, err)
		}
	})
}

// An expander is a service with a method whose type of responses the client knows.
type expander struct {
	echov1.UnimplementedEchoServiceServer
	expand func(grpc.ServerStream) error
}

func (e *expander) Expand(_ *echov1.EchoRequest, stream grpc.ServerStreamingServer[echov1.EchoResponse]) error {
	return e.expand(stream)
}

// A goroutine that receives is in a backoff from 0 s to 1 s. The application is bound to the attempt that follows.
func TestContextAndTrailerDoNotWaitForABackoff(t *testing.T) {
	for name, use := range map[string]func(grpc.ClientStream) any{
		"Context": func(s grpc.ClientStream) any { return s.Context().Err() },
		"Trailer": func(s grpc.ClientStream) any { return s.Trailer()["attempt"] },
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				server, reported := serveScripts(t, "recv a; fail UNAVAILABLE", "recv a; fail UNAVAILABLE", "recv a; send 1"), &record{}
				app := openOn(t, server.conn(t, DialOptions(append(reported.options(), steady)...)...), bidiStream, reported.onFinish())
				app.play(t, "send a")
				var received error
				var group sync.WaitGroup
				group.Go(func() {
					for received == nil {
						received = app.stream.RecvMsg(new(echov1.EchoResponse))
					}
				})
				time.Sleep(second / 2)
				use(app.stream)
				if got := time.Since(server.start); got != second/2 {
					t.Errorf("%s returned at %v, want immediately, at 500ms", name, got)
				}
				group.Wait()
				var e *Error
				if n := len(server.attempts()); status.Code(received) != codes.Unavailable || errors.As(received, &e) || n != 2 {
					t.Errorf("RecvMsg = %v after %d attempts, want the failure of the second, to which the application is bound", received, n)
				}
				reported.want(t, received)
			})
		})
	}
}

// A CloseSend that fails while a retry is possible is no more final than a SendMsg.
func TestCloseSendThatFailsIsRetried(t *testing.T) {
	for _, tt := range []struct {
		name       string
		unclosable int // so many attempts
	}{
		{"in the first attempt", 1},
		{"in the replay", 2},
	} {
		t.Run(tt.name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				server := serveStreams(t, func(n int, stream grpc.ServerStream) error {
					if PreviousAttempts(stream.Context()) < tt.unclosable { // n counts only those that came this far
						return playServer(t, n, "recv a; recv EOF; fail UNAVAILABLE", stream)
					}
					return playServer(t, n, "recv a; recv EOF; send 1", stream)
				})
				attempts := 0
				wrapped := below(func(stream grpc.ClientStream) grpc.ClientStream {
					if attempts++; attempts <= tt.unclosable {
						return unclosable{stream}
					}
					return stream
				})
				cc := server.conn(t, append(DialOptions(steady), wrapped)...)
				openOn(t, cc, bidiStream).play(t, "send a; close; recv 1; recv EOF")
				if attempts != tt.unclosable+1 {
					t.Errorf("%d attempts, want %d", attempts, tt.unclosable+1)
				}
			})
		})
	}
}

// unclosable is a stream whose CloseSend fails.
type unclosable struct{ grpc.ClientStream }

func (s unclosable) CloseSend() error {
	_ = s.ClientStream.CloseSend()
	return status.Error(codes.Unavailable, "CloseSend failed")
}

// In a dry run an empty end is what gRPC says it is.
func TestADryRunLeavesAnEmptyEndAlone(t *testing.T) {
	bubble(t, func(t *testing.T) {
		server := serveScripts(t, "recv a")
		cc := server.conn(t, append(DialOptions(WithDryRun(true)), below(func(s grpc.ClientStream) grpc.ClientStream { return nothing{s} }))...)
		openOn(t, cc, serverStream).play(t, "send a; close; recv EOF; cancel")
	})
}

// No server ends a stream like that, so another attempt follows. One that has headers is a server's, and good if there may be no message.
// If gRPC has not seen the end, an interceptor has made it.
func TestAnEndThatNoServerHasSentIsAFailure(t *testing.T) {
	for _, tt := range []struct {
		name   string
		desc   *grpc.StreamDesc
		first  func(grpc.ClientStream) grpc.ClientStream
		end    string
		served int
	}{
		{"neither headers nor a trailer", serverStream, func(s grpc.ClientStream) grpc.ClientStream { return nothing{s} }, "recv 1; recv EOF", 2},
		{"an interceptor's own", serverStream, func(s grpc.ClientStream) grpc.ClientStream { return answered{nothing{s}} }, "recv EOF", 1},
		{"headers", serverStream, func(s grpc.ClientStream) grpc.ClientStream { return headersOnly{nothing{s}} }, "recv EOF", 1},
	} {
		t.Run(tt.name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				server, opened := serveScripts(t, "recv a", "recv a; send 1"), 0
				cc := server.conn(t, append(DialOptions(steady), below(func(s grpc.ClientStream) grpc.ClientStream {
					if opened++; opened == 1 {
						return tt.first(s)
					}
					return s
				}))...)
				openOn(t, cc, tt.desc).play(t, "send a; close; "+tt.end+"; cancel")
				synctest.Wait()
				if n := len(server.attempts()); n != tt.served {
					t.Errorf("the server saw %d attempts, want %d", n, tt.served)
				}
			})
		})
	}
}

// headersOnly is a stream that has headers.
type headersOnly struct{ grpc.ClientStream }

func (headersOnly) Header() (metadata.MD, error) { return metadata.MD{}, nil }

// nothing is a stream whose end looks as if no server had sent it.
type nothing struct{ grpc.ClientStream }

func (s nothing) RecvMsg(m any) error {
	if err := s.ClientStream.RecvMsg(m); err == nil {
		return errors.New("a message")
	}
	return io.EOF
}
func (nothing) Header() (metadata.MD, error) { return nil, nil }
func (nothing) Trailer() metadata.MD         { return nil }

// answered is a stream that an interceptor answers by itself.
type answered struct{ nothing }

func (answered) RecvMsg(any) error { return io.EOF }

// rejecting is a stream whose messages an interceptor checks: "bad" is rejected in both directions.
type rejecting struct {
	grpc.ClientStream
	onTrailer func()
}

var errRejected = status.Error(codes.InvalidArgument, "rejected by an interceptor")

func (r rejecting) SendMsg(m any) error {
	if m.(*echov1.EchoRequest).GetMessage() == "bad" {
		return errRejected
	}
	return r.ClientStream.SendMsg(m)
}

func (r rejecting) RecvMsg(m any) error {
	if err := r.ClientStream.RecvMsg(m); err != nil {
		return err
	}
	if m.(*echov1.EchoResponse).GetMessage() == "bad" {
		return errRejected
	}
	return nil
}

func (r rejecting) Trailer() metadata.MD {
	r.onTrailer()
	return r.ClientStream.Trailer()
}

// An interceptor that rejects a response knows nothing of the stream's end: gRPC may still be writing the trailer.
func TestTheTrailerIsReadAfterGRPCHasReportedTheEnd(t *testing.T) {
	bubble(t, func(t *testing.T) {
		server := serveScripts(t, "recv a; send bad; hang")
		var ended atomic.Bool
		check := func(ctx context.Context, desc *grpc.StreamDesc, cc *grpc.ClientConn, method string, open grpc.Streamer,
			opts ...grpc.CallOption) (grpc.ClientStream, error) {
			// First, so that it runs before the library's own.
			opts = append([]grpc.CallOption{grpc.OnFinish(func(error) { ended.Store(true) })}, opts...)
			stream, err := open(ctx, desc, cc, method, opts...)
			return rejecting{stream, func() {
				if !ended.Load() {
					t.Error("Trailer was called before gRPC had reported the stream's end")
				}
			}}, err
		}
		cc := server.conn(t, append(DialOptions(), grpc.WithChainStreamInterceptor(check))...)
		openOn(t, cc, serverStream).play(t, "send a; close; recv INVALID_ARGUMENT")
	})
}

// The same holds for the application's Trailer, although it knows the end.
func TestTrailerAfterARejectedMessageDoesNotReadWhatGRPCMayWrite(t *testing.T) {
	bubble(t, func(t *testing.T) {
		server := serveScripts(t, "recv a; send 1; hang")
		check := func(ctx context.Context, desc *grpc.StreamDesc, cc *grpc.ClientConn, method string, open grpc.Streamer,
			opts ...grpc.CallOption) (grpc.ClientStream, error) {
			var ended atomic.Bool
			opts = append([]grpc.CallOption{grpc.OnFinish(func(error) {
				time.Sleep(5 * time.Millisecond)
				ended.Store(true)
			})}, opts...)
			stream, err := open(ctx, desc, cc, method, opts...)
			return rejecting{stream, func() {
				if !ended.Load() {
					t.Error("Trailer was called before gRPC had reported the stream's end")
				}
			}}, err
		}
		app := openOn(t, server.conn(t, append(DialOptions(), grpc.WithChainStreamInterceptor(check))...), bidiStream)
		app.play(t, "send a; recv 1")
		sent := make(chan error)
		go func() { sent <- app.stream.SendMsg(&echov1.EchoRequest{Message: "bad"}) }()
		synctest.Wait()
		app.play(t, "recv INVALID_ARGUMENT; trailer ")
		if err := <-sent; err != errRejected {
			t.Errorf("SendMsg = %v, want %v", err, errRejected)
		}
	})
}

// The call has one result, in whichever method the application sees it.
func TestAMessageThatAnInterceptorRejectsEndsTheStreamWithItsError(t *testing.T) {
	bubble(t, func(t *testing.T) {
		server := serveScripts(t, "recv a; send 1; hang")
		check := below(func(stream grpc.ClientStream) grpc.ClientStream { return rejecting{stream, func() {}} })
		var finished error
		app := openOn(t, server.conn(t, append(DialOptions(), check)...), bidiStream, grpc.OnFinish(func(err error) { finished = err }))
		app.play(t, "send a; recv 1")
		received := make(chan error)
		go func() { received <- app.stream.RecvMsg(&echov1.EchoResponse{}) }()
		synctest.Wait()
		if err := app.stream.SendMsg(&echov1.EchoRequest{Message: "bad"}); err != errRejected {
			t.Errorf("SendMsg = %v, want %v", err, errRejected)
		}
		if err := <-received; err != errRejected || finished != errRejected {
			t.Errorf("RecvMsg = %v and OnFinish(%v), want %v for both", err, finished, errRejected)
		}
	})
}

// big is more than flow control lets through to a server that does not read: gRPC takes
// one such message, and holds the next one up.
var big = strings.Repeat("x", 200<<10)

func TestOverTheBufferWhileTheReceiverRetries(t *testing.T) {
	bubble(t, func(t *testing.T) {
		scripts := []string{"recv a; fail UNAVAILABLE", "recv a; recv " + big + "; recv EOF; send 1; fail UNAVAILABLE"}
		server := serveScripts(t, scripts...)
		app, err := server.openStream(t, bidiStream, []Option{WithBufferLimit(1000)})
		if err != nil {
			t.Fatal(err)
		}
		var group sync.WaitGroup
		group.Go(func() {
			app.play(t, "send a; wait 500ms; send "+big+"; close") // the second waits for the attempt that it commits
			if got := time.Since(server.start); got != second {
				t.Errorf("SendMsg returned after %v, want 1s, when there was an attempt to commit", got)
			}
		})
		app.play(t, "recv 1; recv UNAVAILABLE")
		group.Wait()
		wantTimes(t, server, 0, second)
	})
}

// Without a buffer a stream is gRPC's own, also where it cannot be opened: no budget, no event, its error untouched.
func TestStreamsWithoutABufferPassStraightThrough(t *testing.T) {
	budget, events, attempts := &aBudget{}, 0, 0
	streamer := func(context.Context, *grpc.StreamDesc, *grpc.ClientConn, string, ...grpc.CallOption) (grpc.ClientStream, error) {
		if attempts++; attempts == 1 {
			return &endless{}, nil
		}
		return nil, status.Error(codes.Unavailable, "no stream")
	}
	open := StreamClientInterceptor(WithBufferLimit(0), WithBudget(budget), WithObserver(func(context.Context, Event) { events++ }))
	stream, err := open(t.Context(), bidiStream, nil, "/s/m", streamer)
	if _, own := stream.(*endless); !own || err != nil {
		t.Errorf("stream is %T, %v, want gRPC's own", stream, err)
	}
	_, err = open(t.Context(), bidiStream, nil, "/s/m", streamer)
	wantUntouched(t, err, codes.Unavailable, "no stream")
	if len(budget.heard) != 0 || events != 0 || attempts != 2 {
		t.Errorf("budget heard %v, %d events, %d attempts, want none, none, one a call", budget.heard, events, attempts)
	}
}
