package grpcretry

import (
	"bytes"
	"context"
	"errors"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
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
		{"server stream, nothing fails", serverStream, nil, []string{"recv a; recv EOF; send 1; send 2"},
			"send a; close; recv 1; recv 2; recv EOF; recv EOF", nil, []time.Duration{0}},
		{"server stream fails before its first message", serverStream, nil,
			[]string{"recv a; fail UNAVAILABLE", "recv a; recv EOF; fail UNAVAILABLE", "recv a; recv EOF; send 1"},
			"send a; close; recv 1; recv EOF", nil, []time.Duration{0, 1 * second, 3 * second}},
		{"server stream fails before it reads", serverStream, nil, []string{"fail UNAVAILABLE", "recv a; send 1"},
			"send a; close; recv 1; recv EOF", nil, []time.Duration{0, 1 * second}},
		{"server stream fails after its first message", serverStream, nil, []string{"recv a; send 1; send 2; fail UNAVAILABLE"},
			"send a; close; recv 1; recv 2; recv UNAVAILABLE; recv UNAVAILABLE; trailer 1", nil, []time.Duration{0}},
		{"server stream without messages", serverStream, nil, []string{"recv a"}, "send a; close; recv EOF", nil, []time.Duration{0}},
		{"headers that the application has not seen do not commit", serverStream, nil,
			[]string{"recv a; header; fail UNAVAILABLE", "recv a; send 1"}, "send a; close; recv 1; recv EOF", nil,
			[]time.Duration{0, 1 * second}},
		{"headers that the application has seen commit", serverStream, nil, []string{"recv a; header; wait 1s; fail UNAVAILABLE"},
			"send a; close; header; recv UNAVAILABLE", nil, []time.Duration{0}},
		{"waiting for headers retries", serverStream, nil, []string{"recv a; fail UNAVAILABLE", "recv a; header; wait 1s; send 1"},
			"send a; close; header; recv 1; recv EOF", nil, []time.Duration{0, 1 * second}},
		{"waiting for headers in vain", serverStream, []Option{WithMaxAttempts(2)},
			[]string{"recv a; fail UNAVAILABLE", "recv a; fail UNAVAILABLE"},
			"send a; close; no header; recv UNAVAILABLE; trailer 2", ErrAttemptsExhausted, []time.Duration{0, 1 * second}},
		{"Context commits", serverStream, nil, []string{"recv a; wait 1s; fail UNAVAILABLE"}, "send a; close; context; recv UNAVAILABLE",
			nil, []time.Duration{0}},
		{"Trailer commits", serverStream, nil, []string{"recv a; wait 1s; fail UNAVAILABLE"},
			"send a; close; trailer ; recv UNAVAILABLE; trailer 1", nil, []time.Duration{0}},
		{"not retryable", serverStream, nil, []string{"recv a; fail NOT_FOUND"}, "send a; close; recv NOT_FOUND; recv NOT_FOUND", nil,
			[]time.Duration{0}},
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
		{"budget", serverStream, []Option{WithBudget(&aBudget{refuse: true}), WithPatience(0)}, []string{"fail UNAVAILABLE"},
			"send a; close; recv UNAVAILABLE", ErrBudgetExhausted, []time.Duration{0}},
		{"a long request is not counted against the limit", serverStream, []Option{WithBufferLimit(1)},
			[]string{"fail UNAVAILABLE", "recv abc; send 1"},
			"send abc; close; recv 1; recv EOF", nil, []time.Duration{0, 1 * second}},
		{"no buffer, no retries", serverStream, []Option{WithBufferLimit(0)}, []string{"fail UNAVAILABLE"},
			"send a; close; recv UNAVAILABLE", nil, []time.Duration{0}},
		{"disabled", serverStream, []Option{Disable()}, []string{"fail UNAVAILABLE"}, "send a; close; recv UNAVAILABLE", nil,
			[]time.Duration{0}},

		// The attempt timeout.
		{"a first message too late", serverStream, []Option{WithAttemptTimeout(5 * second)},
			[]string{"recv a; wait 6s; send 1", "recv a; send 1"},
			"send a; close; recv 1; recv EOF", nil, []time.Duration{0, 6 * second}},
		{"a first message in time lives on", serverStream, []Option{WithAttemptTimeout(5 * second)},
			[]string{"recv a; wait 4s; send 1; wait 50s; send 2"},
			"send a; close; recv 1; recv 2; recv EOF", nil, []time.Duration{0}},
		{"headers in time, a first message too late", serverStream, []Option{WithAttemptTimeout(5 * second)},
			[]string{"recv a; header; hang", "recv a; send 1"}, "send a; close; recv 1; recv EOF", nil, []time.Duration{0, 6 * second}},
		{"headers seen in time, a first message too late", serverStream, []Option{WithAttemptTimeout(5 * second)},
			[]string{"recv a; header; hang"},
			"send a; close; header; recv DEADLINE_EXCEEDED; recv DEADLINE_EXCEEDED", nil, []time.Duration{0}},
		{"headers seen and a first message in time live on", serverStream, []Option{WithAttemptTimeout(5 * second)},
			[]string{"recv a; header; wait 4s; send 1; wait 50s; send 2"}, "send a; close; header; recv 1; recv 2; recv EOF", nil,
			[]time.Duration{0}},
		{"over the buffer limit, and a response too late", clientStream, []Option{WithAttemptTimeout(5 * second), WithBufferLimit(1)},
			[]string{"recv a; recv EOF; hang"}, "send a; close; recv DEADLINE_EXCEEDED", nil, []time.Duration{0}},
		{"all first messages too late", serverStream, []Option{WithAttemptTimeout(5 * second), WithMaxAttempts(2)},
			[]string{"hang", "hang"},
			"send a; close; recv DEADLINE_EXCEEDED", ErrAttemptsExhausted, []time.Duration{0, 6 * second}},
		{"a response too late", clientStream, []Option{WithAttemptTimeout(5 * second)},
			[]string{"recv a; recv EOF; hang", "recv a; recv EOF; send 1"},
			"send a; close; recv 1", nil, []time.Duration{0, 6 * second}},
		{"a timeout while the application is elsewhere", serverStream, []Option{WithAttemptTimeout(5 * second)},
			[]string{"recv a; hang", "recv a; send 1"},
			"send a; close; wait 20s; recv 1; recv EOF", nil, []time.Duration{0, 26 * second}},

		// Client streams.
		{"client stream, nothing fails", clientStream, nil, []string{"recv a; recv b; recv EOF; send 1"}, "send a; send b; close; recv 1",
			nil, []time.Duration{0}},
		{"client stream is replayed in order", clientStream, nil,
			[]string{"recv a; recv b; recv EOF; fail UNAVAILABLE", "recv a; recv b; recv EOF; send 1"},
			"send a; send b; close; recv 1", nil, []time.Duration{0, 1 * second}},
		{"client stream fails between two messages", clientStream, nil,
			[]string{"recv a; fail UNAVAILABLE", "recv a; recv b; recv c; recv EOF; send 1"},
			"send a; wait 1s; send b; send c; close; recv 1", nil, []time.Duration{0, 2 * second}},
		{"client stream fails in its middle, twice", clientStream, nil,
			[]string{"recv a; fail UNAVAILABLE", "recv a; recv b; fail UNAVAILABLE", "recv a; recv b; recv c; recv EOF; send 1"},
			"send a; wait 1s; send b; wait 1s; send c; close; recv 1", nil, []time.Duration{0, 2 * second, 5 * second}},
		{"client stream, no attempts left while sending", clientStream, []Option{WithMaxAttempts(2)},
			[]string{"recv a; fail UNAVAILABLE", "recv a; recv b; fail UNAVAILABLE"},
			"send a; wait 1s; send b; wait 1s; sendeof c; close; recv UNAVAILABLE", ErrAttemptsExhausted, []time.Duration{0, 2 * second}},
		{"client stream over the buffer limit is committed", clientStream, nil,
			[]string{"recv a; recv " + long + "; recv b; fail UNAVAILABLE"},
			"send a; send " + long + "; send b; close; recv UNAVAILABLE", nil, []time.Duration{0}},
		{"client stream within a larger limit is not", clientStream, []Option{WithBufferLimit(1 << 20)},
			[]string{"recv a; recv " + long + "; recv EOF; fail UNAVAILABLE", "recv a; recv " + long + "; recv EOF; send 1"},
			"send a; send " + long + "; close; recv 1", nil, []time.Duration{0, 1 * second}},
		{"client stream committed when it is dead", clientStream, []Option{WithBufferLimit(1000)}, []string{"recv a; fail UNAVAILABLE"},
			"send a; wait 1s; sendeof " + big + "; recv UNAVAILABLE", nil, []time.Duration{0}},
		{"client stream answered early", clientStream, nil, []string{"recv a; send 1"}, "send a; wait 1s; sendeof b; close; recv 1", nil,
			[]time.Duration{0}},

		// Both ways.
		{"bidi, nothing fails", bidiStream, nil, []string{"recv a; send 1; recv b; send 2; recv EOF"},
			"send a; recv 1; send b; recv 2; close; recv EOF", nil, []time.Duration{0}},
		{"bidi fails before the first answer", bidiStream, nil,
			[]string{"recv a; recv b; fail UNAVAILABLE", "recv a; recv b; send 1; recv c; send 2; recv EOF"},
			"send a; send b; recv 1; send c; recv 2; close; recv EOF", nil, []time.Duration{0, 1 * second}},
		{"bidi fails after the first answer", bidiStream, nil, []string{"recv a; send 1; fail UNAVAILABLE"},
			"send a; recv 1; recv UNAVAILABLE; sendeof b; trailer 1", nil, []time.Duration{0}},
		{"bidi opened without a message", bidiStream, nil, []string{"fail UNAVAILABLE", "send 1; recv a; recv EOF"},
			"recv 1; send a; close; recv EOF", nil, []time.Duration{0, 1 * second}},
		{"bidi with an answer that nobody took", bidiStream, nil, []string{"recv a; send 1; fail UNAVAILABLE"},
			"send a; wait 1s; sendeof b; recv 1; recv UNAVAILABLE", nil, []time.Duration{0}},
		{"cancelled in a wait", bidiStream, nil, []string{"recv a; fail UNAVAILABLE"}, "send a; wait 1s; cancel; recv CANCELLED; sendeof b",
			context.Canceled, []time.Duration{0}},
		{"cancelled when committed", bidiStream, nil, []string{"recv a; send 1; hang"}, "send a; recv 1; cancel; recv CANCELLED", nil,
			[]time.Duration{0}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				server := serveStreams(t, func(n int, stream grpc.ServerStream) error {
					if n > len(tt.server) {
						return status.Error(codes.DataLoss, "one attempt too many")
					}
					return playServer(t, n, tt.server[n-1], stream)
				})
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

func TestStreamMessageOverASizeLimitIsNotRetried(t *testing.T) {
	bubble(t, func(t *testing.T) {
		server := serveStreams(t, func(n int, stream grpc.ServerStream) error { return playServer(t, n, "hang", stream) })
		app, err := server.openStream(t, bidiStream, []Option{WithBufferLimit(10 << 20)}, grpc.MaxCallSendMsgSize(100))
		if err != nil {
			t.Fatal(err)
		}
		err = app.stream.SendMsg(&echov1.EchoRequest{Payload: bytes.Repeat([]byte("x"), 200)})
		var e *Error
		if status.Code(err) != codes.ResourceExhausted || errors.As(err, &e) {
			t.Errorf("SendMsg = %v, want gRPC's own RESOURCE_EXHAUSTED", err)
		}
		if err := app.stream.RecvMsg(new(echov1.EchoResponse)); status.Code(err) != codes.ResourceExhausted {
			t.Errorf("RecvMsg = %v, want RESOURCE_EXHAUSTED", err)
		}
		if got := len(server.attempts()); got > 1 {
			t.Errorf("%d attempts", got)
		}
	})
}

func TestStreamEvents(t *testing.T) {
	bubble(t, func(t *testing.T) {
		scripts := []string{"recv a; fail UNAVAILABLE", "recv a; send 1; fail UNAVAILABLE"}
		server := serveStreams(t, func(n int, stream grpc.ServerStream) error { return playServer(t, n, scripts[n-1], stream) })
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
