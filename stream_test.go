package grpcretry

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"
	"unsafe"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"

	echov1 "github.com/grpcretry/grpcretry/proto/echo/v1"
)

// The tests of streams are scripts: what the server does in each attempt, and what the
// application does, step by step.
//
// Server steps:          Application steps:
//
//	recv TEXT  expects     send TEXT
//	recv EOF               close         CloseSend
//	send TEXT              recv TEXT     expects
//	header     sends one   recv EOF
//	wait 3s                recv CODE     expects a failure with this code
//	fail CODE              header, no header, context, trailer
//	pushback MS            wait 3s, cancel
//	hang                   sendeof TEXT  expects SendMsg to return io.EOF
//	                       try TEXT      sends, whatever SendMsg returns
//
// A server script that ends without fail ends with OK.

// kinds of streams.
var (
	serverStream = &grpc.StreamDesc{StreamName: "Expand", ServerStreams: true}
	clientStream = &grpc.StreamDesc{StreamName: "Collect", ClientStreams: true}
	bidiStream   = &grpc.StreamDesc{StreamName: "Chat", ClientStreams: true, ServerStreams: true}
)

// serveStreams starts a server whose attempt n runs play(n, …), for any method.
func serveStreams(t *testing.T, play func(n int, stream grpc.ServerStream) error) *fixture {
	t.Helper()
	var f *fixture
	ready := make(chan struct{})
	f = serve(t, nil, grpc.UnknownServiceHandler(func(_ any, stream grpc.ServerStream) error {
		<-ready
		return play(f.note(stream.Context(), ""), stream)
	}))
	close(ready)
	return f
}

// playServer runs the script of one attempt.
func playServer(t *testing.T, attempt int, steps string, stream grpc.ServerStream) error {
	for _, step := range split(steps) {
		verb, arg, _ := strings.Cut(step, " ")
		switch verb {
		case "recv":
			var m echov1.EchoRequest
			err := stream.RecvMsg(&m)
			switch {
			case stream.Context().Err() != nil:
				return err
			case arg == "EOF" && err == io.EOF:
			case err != nil || m.GetMessage() != arg:
				t.Errorf("server, attempt %d: %s: got %q, %v", attempt, step, brief(m.GetMessage()), err)
				return status.Error(codes.DataLoss, "script")
			}
		case "send":
			if err := stream.SendMsg(&echov1.EchoResponse{Message: arg}); err != nil {
				return err
			}
		case "header":
			if err := stream.SendHeader(metadata.Pairs("attempt", strconv.Itoa(attempt))); err != nil {
				return err
			}
		case "pushback":
			stream.SetTrailer(metadata.Pairs(pushbackKey, arg))
		case "wait":
			if !elapsed(parseDuration(t, arg), stream.Context().Done()) { // or a test that fails would leave this goroutine
				return status.FromContextError(stream.Context().Err()).Err()
			}
		case "hang":
			<-stream.Context().Done()
			return status.FromContextError(stream.Context().Err()).Err()
		case "fail":
			stream.SetTrailer(metadata.Pairs("attempt", strconv.Itoa(attempt)))
			return status.Error(parseCode(t, arg), "failed in attempt "+strconv.Itoa(attempt))
		default:
			t.Errorf("no such step: %s", step)
		}
	}
	return nil
}

// An application runs its script on a stream.
type application struct {
	stream grpc.ClientStream
	cancel context.CancelFunc
	err    error // the last that was not nil
}

func (app *application) play(t *testing.T, steps string) {
	for _, step := range split(steps) {
		verb, arg, _ := strings.Cut(step, " ")
		switch verb {
		case "send", "sendeof":
			err := app.stream.SendMsg(&echov1.EchoRequest{Message: arg})
			if want := map[string]error{"send": nil, "sendeof": io.EOF}[verb]; err != want {
				t.Errorf("application: %s: got %v", brief(step), err)
			}
		case "try":
			app.stream.SendMsg(&echov1.EchoRequest{Message: arg})
		case "close":
			if err := app.stream.CloseSend(); err != nil {
				t.Errorf("application: %s: got %v", step, err)
			}
		case "recv":
			var m echov1.EchoResponse
			err := app.stream.RecvMsg(&m)
			got := m.GetMessage()
			if err == io.EOF {
				got = "EOF"
			} else if err != nil {
				app.err = err
				got = codeName(status.Code(err))
			}
			if got != arg {
				t.Errorf("application: %s: got %s, %v", step, got, err)
			}
		case "header":
			if md, err := app.stream.Header(); md == nil || err != nil {
				t.Errorf("application: %s: got %v, %v", step, md, err)
			}
		case "no":
			if md, err := app.stream.Header(); md != nil || err != nil {
				t.Errorf("application: %s: got %v, %v", step, md, err)
			}
		case "context":
			if app.stream.Context() == nil {
				t.Errorf("application: %s: got nil", step)
			}
		case "trailer":
			if got := first(app.stream.Trailer()["attempt"]); got != arg {
				t.Errorf("application: %s: got %q", step, got)
			}
		case "wait":
			time.Sleep(parseDuration(t, arg))
		case "cancel":
			app.cancel()
		default:
			t.Errorf("no such step: %s", step)
		}
	}
}

func split(steps string) []string {
	if steps == "" {
		return nil
	}
	return strings.Split(steps, "; ")
}

func brief(s string) string { return s[:min(len(s), 40)] }

func parseDuration(t *testing.T, s string) time.Duration {
	d, err := time.ParseDuration(s)
	if err != nil {
		t.Error(err)
	}
	return d
}

func parseCode(t *testing.T, s string) (c codes.Code) {
	if err := c.UnmarshalJSON([]byte(strconv.Quote(s))); err != nil {
		t.Error(err)
	}
	return c
}

// openStream dials with opts and opens a stream.
func (f *fixture) openStream(t *testing.T, desc *grpc.StreamDesc, opts []Option, call ...grpc.CallOption) (*application, error) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	t.Cleanup(cancel)
	cc := f.conn(t, DialOptions(append([]Option{steady}, opts...)...)...)
	stream, err := cc.NewStream(ctx, desc, "/streams/"+desc.StreamName, call...)
	return &application{stream: stream, cancel: cancel}, err
}

// openOn opens a stream of a ClientConn. A test that hangs is cancelled after an hour, so that
// it fails and does not stop the others.
func openOn(t *testing.T, cc *grpc.ClientConn, desc *grpc.StreamDesc, call ...grpc.CallOption) *application {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	guard := time.AfterFunc(time.Hour, func() { t.Error("nothing has happened for an hour"); cancel() })
	t.Cleanup(func() { guard.Stop(); cancel() })
	stream, err := cc.NewStream(ctx, desc, "/streams/"+desc.StreamName, call...)
	if err != nil {
		t.Fatal(err)
	}
	return &application{stream: stream, cancel: cancel}
}

// serveScripts starts a server with one script for each attempt.
func serveScripts(t *testing.T, scripts ...string) *fixture {
	t.Helper()
	return serveStreams(t, func(n int, stream grpc.ServerStream) error {
		if n > len(scripts) {
			return status.Error(codes.DataLoss, "one attempt too many")
		}
		return playServer(t, n, scripts[n-1], stream)
	})
}

// asPlain runs a test with plain gRPC, which shows what is right, and then with retries.
func asPlain(t *testing.T, opts []Option, f func(t *testing.T, dial []grpc.DialOption)) {
	t.Helper()
	t.Run("plain gRPC", func(t *testing.T) { bubble(t, func(t *testing.T) { f(t, nil) }) })
	t.Run("with retries", func(t *testing.T) {
		bubble(t, func(t *testing.T) { f(t, DialOptions(append([]Option{steady}, opts...)...)) })
	})
}

// A record is what the library reports of a call: its end to OnFinish and to an observer, and
// its attempts to a budget.
type record struct {
	budget aBudget

	mu              sync.Mutex
	finished, ended []error
}

func (r *record) options() []Option {
	return []Option{WithBudget(&r.budget), WithObserver(func(_ context.Context, e Event) {
		if e.Kind == CallEnd {
			r.mu.Lock()
			defer r.mu.Unlock()
			r.ended = append(r.ended, e.Err)
		}
	})}
}

func (r *record) onFinish() grpc.CallOption {
	return grpc.OnFinish(func(err error) {
		r.mu.Lock()
		defer r.mu.Unlock()
		r.finished = append(r.finished, err)
	})
}

// want compares the reports with the result that the application has seen, nil for a success.
func (r *record) want(t *testing.T, result error) {
	t.Helper()
	r.mu.Lock()
	defer r.mu.Unlock()
	for name, got := range map[string][]error{"OnFinish": r.finished, "CallEnd": r.ended} {
		if len(got) != 1 || status.Code(got[0]) != status.Code(result) {
			t.Errorf("%s reported %v, want %v once", name, got, result)
		}
	}
	r.budget.mu.Lock()
	defer r.budget.mu.Unlock()
	succeeded := slices.ContainsFunc(r.budget.heard, func(o Outcome) bool { return o.Result == Succeeded })
	if succeeded != (result == nil) {
		t.Errorf("budget heard %v of a call with the result %v", r.budget.heard, result)
	}
	charged := 0
	for _, o := range r.budget.heard {
		charged += min(1, o.Attempt-1)
	}
	if paid := len(r.budget.asked) - r.budget.refunded; paid != charged {
		t.Errorf("budget gave %d retries, got %d back and heard %v, want each of the others in an outcome",
			len(r.budget.asked), r.budget.refunded, r.budget.heard)
	}
}

var long = strings.Repeat("x", 300<<10) // more than the default buffer holds

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
			[]string{"recv a; header; fail UNAVAILABLE", "recv a; send 1"}, "send a; close; recv 1; recv EOF", nil, []time.Duration{0, 1 * second}},
		{"headers that the application has seen commit", serverStream, nil, []string{"recv a; header; wait 1s; fail UNAVAILABLE"},
			"send a; close; header; recv UNAVAILABLE", nil, []time.Duration{0}},
		{"waiting for headers retries", serverStream, nil, []string{"recv a; fail UNAVAILABLE", "recv a; header; wait 1s; send 1"},
			"send a; close; header; recv 1; recv EOF", nil, []time.Duration{0, 1 * second}},
		{"waiting for headers in vain", serverStream, []Option{WithMaxAttempts(2)}, []string{"recv a; fail UNAVAILABLE", "recv a; fail UNAVAILABLE"},
			"send a; close; no header; recv UNAVAILABLE; trailer 2", ErrAttemptsExhausted, []time.Duration{0, 1 * second}},
		{"headers commit by the letter of A6", serverStream, []Option{WithCommitOnHeaders(true)}, []string{"recv a; header; fail UNAVAILABLE"},
			"send a; close; recv UNAVAILABLE", nil, []time.Duration{0}},
		{"trailers only do not commit by the letter of A6", serverStream, []Option{WithCommitOnHeaders(true)},
			[]string{"recv a; fail UNAVAILABLE", "recv a; send 1"}, "send a; close; recv 1; recv EOF", nil, []time.Duration{0, 1 * second}},
		{"Context commits", serverStream, nil, []string{"recv a; wait 1s; fail UNAVAILABLE"}, "send a; close; context; recv UNAVAILABLE", nil, []time.Duration{0}},
		{"Trailer commits", serverStream, nil, []string{"recv a; wait 1s; fail UNAVAILABLE"}, "send a; close; trailer ; recv UNAVAILABLE; trailer 1", nil, []time.Duration{0}},
		{"not retryable", serverStream, nil, []string{"recv a; fail NOT_FOUND"}, "send a; close; recv NOT_FOUND; recv NOT_FOUND", nil, []time.Duration{0}},
		{"not retryable after a retry", serverStream, nil, []string{"fail UNAVAILABLE", "fail NOT_FOUND"},
			"send a; close; recv NOT_FOUND", ErrNotRetryable, []time.Duration{0, 1 * second}},
		{"no attempts left, and RecvMsg called again makes no more", serverStream, []Option{WithMaxAttempts(2)},
			[]string{"fail UNAVAILABLE", "fail UNAVAILABLE"}, "send a; close; recv UNAVAILABLE; recv UNAVAILABLE; recv UNAVAILABLE; trailer 2",
			ErrAttemptsExhausted, []time.Duration{0, 1 * second}},
		{"pushback", serverStream, nil, []string{"pushback 7000; fail UNAVAILABLE", "recv a; send 1"}, "send a; close; recv 1; recv EOF", nil, []time.Duration{0, 7 * second}},
		{"pushback says stop", serverStream, nil, []string{"pushback -1; fail UNAVAILABLE"}, "send a; close; recv UNAVAILABLE", ErrPushback, []time.Duration{0}},
		{"budget", serverStream, []Option{WithBudget(&aBudget{refuse: true})}, []string{"fail UNAVAILABLE"}, "send a; close; recv UNAVAILABLE", ErrBudgetExhausted, []time.Duration{0}},
		{"a long request is not counted against the limit", serverStream, []Option{WithBufferLimit(1)}, []string{"fail UNAVAILABLE", "recv abc; send 1"},
			"send abc; close; recv 1; recv EOF", nil, []time.Duration{0, 1 * second}},
		{"no buffer, no retries", serverStream, []Option{WithBufferLimit(0)}, []string{"fail UNAVAILABLE"}, "send a; close; recv UNAVAILABLE", nil, []time.Duration{0}},
		{"disabled", serverStream, []Option{Disable()}, []string{"fail UNAVAILABLE"}, "send a; close; recv UNAVAILABLE", nil, []time.Duration{0}},

		// The attempt timeout.
		{"a first message too late", serverStream, []Option{WithAttemptTimeout(5 * second)}, []string{"recv a; wait 6s; send 1", "recv a; send 1"},
			"send a; close; recv 1; recv EOF", nil, []time.Duration{0, 6 * second}},
		{"a first message in time lives on", serverStream, []Option{WithAttemptTimeout(5 * second)}, []string{"recv a; wait 4s; send 1; wait 50s; send 2"},
			"send a; close; recv 1; recv 2; recv EOF", nil, []time.Duration{0}},
		{"headers in time, a first message too late", serverStream, []Option{WithAttemptTimeout(5 * second)},
			[]string{"recv a; header; hang", "recv a; send 1"}, "send a; close; recv 1; recv EOF", nil, []time.Duration{0, 6 * second}},
		{"headers seen in time, a first message too late", serverStream, []Option{WithAttemptTimeout(5 * second)}, []string{"recv a; header; hang"},
			"send a; close; header; recv DEADLINE_EXCEEDED; recv DEADLINE_EXCEEDED", nil, []time.Duration{0}},
		{"headers seen and a first message in time live on", serverStream, []Option{WithAttemptTimeout(5 * second)},
			[]string{"recv a; header; wait 4s; send 1; wait 50s; send 2"}, "send a; close; header; recv 1; recv 2; recv EOF", nil, []time.Duration{0}},
		{"over the buffer limit, and a response too late", clientStream, []Option{WithAttemptTimeout(5 * second), WithBufferLimit(1)},
			[]string{"recv a; recv EOF; hang"}, "send a; close; recv DEADLINE_EXCEEDED", nil, []time.Duration{0}},
		{"all first messages too late", serverStream, []Option{WithAttemptTimeout(5 * second), WithMaxAttempts(2)}, []string{"hang", "hang"},
			"send a; close; recv DEADLINE_EXCEEDED", ErrAttemptsExhausted, []time.Duration{0, 6 * second}},
		{"a response too late", clientStream, []Option{WithAttemptTimeout(5 * second)}, []string{"recv a; recv EOF; hang", "recv a; recv EOF; send 1"},
			"send a; close; recv 1", nil, []time.Duration{0, 6 * second}},
		{"a timeout while the application is elsewhere", serverStream, []Option{WithAttemptTimeout(5 * second)}, []string{"recv a; hang", "recv a; send 1"},
			"send a; close; wait 20s; recv 1; recv EOF", nil, []time.Duration{0, 20 * second}},

		// Client streams.
		{"client stream, nothing fails", clientStream, nil, []string{"recv a; recv b; recv EOF; send 1"}, "send a; send b; close; recv 1", nil, []time.Duration{0}},
		{"client stream is replayed in order", clientStream, nil, []string{"recv a; recv b; recv EOF; fail UNAVAILABLE", "recv a; recv b; recv EOF; send 1"},
			"send a; send b; close; recv 1", nil, []time.Duration{0, 1 * second}},
		{"client stream fails between two messages", clientStream, nil, []string{"recv a; fail UNAVAILABLE", "recv a; recv b; recv c; recv EOF; send 1"},
			"send a; wait 1s; send b; send c; close; recv 1", nil, []time.Duration{0, 2 * second}},
		{"client stream fails in its middle, twice", clientStream, nil, []string{"recv a; fail UNAVAILABLE", "recv a; recv b; fail UNAVAILABLE", "recv a; recv b; recv c; recv EOF; send 1"},
			"send a; wait 1s; send b; wait 1s; send c; close; recv 1", nil, []time.Duration{0, 2 * second, 5 * second}},
		{"client stream, no attempts left while sending", clientStream, []Option{WithMaxAttempts(2)}, []string{"recv a; fail UNAVAILABLE", "recv a; recv b; fail UNAVAILABLE"},
			"send a; wait 1s; send b; wait 1s; sendeof c; close; recv UNAVAILABLE", ErrAttemptsExhausted, []time.Duration{0, 2 * second}},
		{"client stream over the buffer limit is committed", clientStream, nil, []string{"recv a; recv " + long + "; recv b; fail UNAVAILABLE"},
			"send a; send " + long + "; send b; close; recv UNAVAILABLE", nil, []time.Duration{0}},
		{"client stream within a larger limit is not", clientStream, []Option{WithBufferLimit(1 << 20)},
			[]string{"recv a; recv " + long + "; recv EOF; fail UNAVAILABLE", "recv a; recv " + long + "; recv EOF; send 1"},
			"send a; send " + long + "; close; recv 1", nil, []time.Duration{0, 1 * second}},
		{"client stream committed when it is dead", clientStream, []Option{WithBufferLimit(1000)}, []string{"recv a; fail UNAVAILABLE"},
			"send a; wait 1s; sendeof " + big + "; recv UNAVAILABLE", nil, []time.Duration{0}},
		{"client stream answered early", clientStream, nil, []string{"recv a; send 1"}, "send a; wait 1s; sendeof b; close; recv 1", nil, []time.Duration{0}},

		// Both ways.
		{"bidi, nothing fails", bidiStream, nil, []string{"recv a; send 1; recv b; send 2; recv EOF"}, "send a; recv 1; send b; recv 2; close; recv EOF", nil, []time.Duration{0}},
		{"bidi fails before the first answer", bidiStream, nil, []string{"recv a; recv b; fail UNAVAILABLE", "recv a; recv b; send 1; recv c; send 2; recv EOF"},
			"send a; send b; recv 1; send c; recv 2; close; recv EOF", nil, []time.Duration{0, 1 * second}},
		{"bidi fails after the first answer", bidiStream, nil, []string{"recv a; send 1; fail UNAVAILABLE"}, "send a; recv 1; recv UNAVAILABLE; sendeof b; trailer 1", nil, []time.Duration{0}},
		{"bidi opened without a message", bidiStream, nil, []string{"fail UNAVAILABLE", "send 1; recv a; recv EOF"}, "recv 1; send a; close; recv EOF", nil, []time.Duration{0, 1 * second}},
		{"bidi with an answer that nobody took", bidiStream, nil, []string{"recv a; send 1; fail UNAVAILABLE"}, "send a; wait 1s; sendeof b; recv 1; recv UNAVAILABLE", nil, []time.Duration{0}},
		{"cancelled in a wait", bidiStream, nil, []string{"recv a; fail UNAVAILABLE"}, "send a; wait 1s; cancel; recv CANCELLED; sendeof b", context.Canceled, []time.Duration{0}},
		{"cancelled when committed", bidiStream, nil, []string{"recv a; send 1; hang"}, "send a; recv 1; cancel; recv CANCELLED", nil, []time.Duration{0}},
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

func TestStreamCreationIsRetried(t *testing.T) {
	bubble(t, func(t *testing.T) {
		server := serveStreams(t, func(n int, stream grpc.ServerStream) error { return playServer(t, n, "recv a; send 1", stream) })
		attempts := 0
		below := func(ctx context.Context, desc *grpc.StreamDesc, cc *grpc.ClientConn, method string, streamer grpc.Streamer, opts ...grpc.CallOption) (grpc.ClientStream, error) {
			if attempts++; attempts < 3 {
				return nil, status.Error(codes.Unavailable, "no stream")
			}
			return streamer(ctx, desc, cc, method, opts...)
		}
		cc := server.conn(t, append(DialOptions(steady), grpc.WithChainStreamInterceptor(below))...)
		stream, err := cc.NewStream(t.Context(), serverStream, "/s/m")
		if err != nil || time.Since(server.start) != 3*second {
			t.Fatalf("NewStream = %v after %v, want a stream after 3s", err, time.Since(server.start))
		}
		(&application{stream: stream}).play(t, "send a; close; recv 1; recv EOF")
	})
}

func TestStreamCreationInVain(t *testing.T) {
	bubble(t, func(t *testing.T) {
		server := serveStreams(t, nil)
		finished := 0
		cc := server.conn(t, append(DialOptions(steady, WithMaxAttempts(3)),
			grpc.WithContextDialer(func(context.Context, string) (net.Conn, error) { return nil, errors.New("no route") }))...)
		_, err := cc.NewStream(t.Context(), serverStream, "/s/m", grpc.OnFinish(func(error) { finished++ }))
		wantStop(t, err, codes.Unavailable, ErrNotConnected, 1)
		if got := time.Since(server.start); got != 10*second {
			t.Errorf("NewStream took %v, want 10s of waiting for a connection", got)
		}
		if finished != 1 {
			t.Errorf("OnFinish ran %d times", finished)
		}
	})
}

func TestStreamSendsWhileTheReceiverRetries(t *testing.T) {
	bubble(t, func(t *testing.T) {
		var got []string
		server := serveStreams(t, func(n int, stream grpc.ServerStream) error {
			if n < 3 {
				return playServer(t, n, "recv 0; recv 1; fail UNAVAILABLE", stream)
			}
			got = nil
			for {
				var m echov1.EchoRequest
				if err := stream.RecvMsg(&m); err == io.EOF {
					return stream.SendMsg(&echov1.EchoResponse{Message: "done"})
				} else if err != nil {
					return err
				}
				got = append(got, m.GetMessage())
			}
		})
		app, err := server.openStream(t, bidiStream, nil)
		if err != nil {
			t.Fatal(err)
		}
		var want []string
		var group sync.WaitGroup
		group.Go(func() { // one message each 50 ms for 5 s: through two failures and their waits
			for i := range 100 {
				want = append(want, strconv.Itoa(i))
				app.play(t, "send "+strconv.Itoa(i)+"; wait 50ms")
			}
			app.play(t, "close")
		})
		app.play(t, "recv done; recv EOF")
		group.Wait()
		if !slices.Equal(got, want) {
			t.Errorf("the server that answered got %v, want 0 to 99 in order", got)
		}
	})
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

// unsized is a message that cannot tell its size; the codec below knows it.
type unsized struct{ text string }

func TestAMessageWithoutASizeCommits(t *testing.T) {
	s := &retryStream{desc: bidiStream}
	for _, tt := range []struct {
		m    any
		want int
	}{
		{&echov1.EchoRequest{}, slotSize + int(unsafe.Sizeof(echov1.EchoRequest{}))},
		{&echov1.EchoRequest{Message: "abc", Payload: []byte("de")}, slotSize + int(unsafe.Sizeof(echov1.EchoRequest{})) + 5},
		{sized(7), slotSize + int(unsafe.Sizeof(sized(0))) + 7},
		{&unsized{"x"}, -1},
	} {
		if got := s.weigh(tt.m).size; got != tt.want {
			t.Errorf("size of %T = %d, want %d", tt.m, got, tt.want)
		}
	}
}

type sized int

func (s sized) Size() int { return int(s) }

func TestGRPCsNameForTheBufferLimit(t *testing.T) {
	bubble(t, func(t *testing.T) {
		server := serveStreams(t, func(n int, stream grpc.ServerStream) error {
			return playServer(t, n, "recv aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa; recv EOF; fail UNAVAILABLE", stream)
		})
		app, err := server.openStream(t, clientStream, nil, grpc.MaxRetryRPCBufferSize(20))
		if err != nil {
			t.Fatal(err)
		}
		app.play(t, "send aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa; close; recv UNAVAILABLE")
		wantTimes(t, server, 0)
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
			"1s attempt_start #2", "1s attempt_end #2 UNAVAILABLE in 0s", "1s decision #2 stop: committed", "1s call_end #2 committed after 1s, attempts #1 UNAVAILABLE #2 UNAVAILABLE",
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

func TestAbandonedStreamEnds(t *testing.T) {
	for _, tt := range []struct {
		name, server, app string
		opts              []Option
		close             bool // the ClientConn instead of cancelling
	}{
		{name: "before anything", server: "hang"},
		{name: "after a send", server: "hang", app: "send a"},
		{name: "when committed", server: "send 1; hang", app: "send a; recv 1"},
		{name: "after its failure", server: "recv a; fail UNAVAILABLE", app: "send a; wait 1s"},
		{name: "after a timeout", server: "hang", app: "send a; wait 10s", opts: []Option{WithAttemptTimeout(second)}},
		{name: "after a timeout, headers and a send", server: "header; hang", app: "send a; wait 10s; send b", opts: []Option{WithAttemptTimeout(second)}},
		{name: "after a timeout, headers and Context", server: "header; hang", app: "send a; wait 10s; context", opts: []Option{WithAttemptTimeout(second)}},
		{name: "by closing the connection", server: "hang", app: "send a", close: true},
		{name: "by closing the connection when committed", server: "send 1; hang", app: "send a; recv 1", close: true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				server := serveStreams(t, func(n int, stream grpc.ServerStream) error { return playServer(t, n, tt.server, stream) })
				finished, ends := 0, 0
				atOnce, err := NewConcurrencyBudget(1)
				if err != nil {
					t.Fatal(err)
				}
				cc := server.conn(t, DialOptions(append(tt.opts, WithBudget(atOnce), WithObserver(func(_ context.Context, e Event) {
					if e.Kind == CallEnd {
						ends++
					}
				}))...)...)
				ctx, cancel := context.WithCancel(t.Context())
				defer cancel()
				stream, err := cc.NewStream(ctx, bidiStream, "/s/m", grpc.OnFinish(func(err error) {
					finished++
					if err == nil {
						t.Error("OnFinish says success")
					}
				}))
				if err != nil {
					t.Fatal(err)
				}
				(&application{stream: stream}).play(t, tt.app)
				if finished != 0 {
					t.Fatal("OnFinish ran before the end")
				}
				if tt.close {
					cc.Close()
				} else {
					cancel()
				}
				synctest.Wait()
				if finished != 1 || ends != 1 {
					t.Errorf("OnFinish ran %d times and CallEnd came %d times, want once each", finished, ends)
				}
				if got := atOnce.Balance(time.Now()); got != 1 {
					t.Errorf("budget has %v retries, want 1", got)
				}
			})
		})
	}
}

func TestBuiltInPolicyLeavesStreamsToGRPC(t *testing.T) {
	bubble(t, func(t *testing.T) {
		server := serveStreams(t, func(n int, stream grpc.ServerStream) error { return playServer(t, n, "fail UNAVAILABLE", stream) })
		cc := server.conn(t, grpc.WithDefaultServiceConfig(strings.Replace(builtInPolicy, `"grpcretry.test.v1.EchoService", "method": "Echo"`, `"s"`, 1)),
			grpc.WithChainStreamInterceptor(StreamClientInterceptor(WithMaxAttempts(5))))
		stream, err := cc.NewStream(t.Context(), serverStream, "/s/m")
		if err != nil {
			t.Fatal(err)
		}
		app := &application{stream: stream}
		app.play(t, "send a; close; recv UNAVAILABLE")
		var e *Error
		if got := len(server.attempts()); got != 3 || errors.As(app.err, &e) {
			t.Errorf("%d attempts and %v, want gRPC's 3 and its own error", got, app.err)
		}
	})
}

func TestNestedStreamInterceptorsDoNotMultiply(t *testing.T) {
	bubble(t, func(t *testing.T) {
		server := serveStreams(t, func(n int, stream grpc.ServerStream) error { return playServer(t, n, "fail UNAVAILABLE", stream) })
		cc := server.conn(t, grpc.WithChainStreamInterceptor(
			StreamClientInterceptor(WithMaxAttempts(3), WithBackoff(Constant(0))), StreamClientInterceptor(WithMaxAttempts(5))))
		stream, err := cc.NewStream(t.Context(), serverStream, "/s/m")
		if err != nil {
			t.Fatal(err)
		}
		(&application{stream: stream}).play(t, "send a; close; recv UNAVAILABLE")
		wantTimes(t, server, 0, 0, 0)
	})
}

func TestCommittedStreamAllocatesNothingPerMessage(t *testing.T) {
	stream := &endless{}
	s, err := StreamClientInterceptor()(t.Context(), bidiStream, nil, "/s/m",
		func(context.Context, *grpc.StreamDesc, *grpc.ClientConn, string, ...grpc.CallOption) (grpc.ClientStream, error) {
			return stream, nil
		})
	if err != nil {
		t.Fatal(err)
	}
	var m any = &echov1.EchoRequest{}
	if err := s.RecvMsg(m); err != nil { // commits
		t.Fatal(err)
	}
	if got := testing.AllocsPerRun(100, func() { _, _ = s.SendMsg(m), s.RecvMsg(m) }); got != 0 {
		t.Errorf("%v allocations per message, want 0", got)
	}
}

// endless is a stream that takes and gives any message.
type endless struct{ grpc.ClientStream }

func (*endless) SendMsg(any) error    { return nil }
func (*endless) RecvMsg(any) error    { return nil }
func (*endless) Trailer() metadata.MD { return nil }

// big is more than flow control lets through to a server that does not read: gRPC takes
// one such message, and holds the next one up.
var big = strings.Repeat("x", 200<<10)

func TestSendHeldUpByFlowControlWhileTheReceiverRetries(t *testing.T) {
	bubble(t, func(t *testing.T) {
		scripts := []string{"wait 3s; fail UNAVAILABLE", "recv " + big + "; recv " + big + "; recv b; recv EOF; send 1"}
		server := serveStreams(t, func(n int, stream grpc.ServerStream) error { return playServer(t, n, scripts[n-1], stream) })
		app, err := server.openStream(t, bidiStream, []Option{WithBufferLimit(1 << 20)})
		if err != nil {
			t.Fatal(err)
		}
		var group sync.WaitGroup
		group.Go(func() {
			app.play(t, "send "+big+"; send "+big)
			if got := time.Since(server.start); got != 3*second {
				t.Errorf("SendMsg returned after %v, want 3s, when its attempt failed", got)
			}
			app.play(t, "send b; close")
		})
		app.play(t, "recv 1; recv EOF")
		group.Wait()
		wantTimes(t, server, 0, 4*second)
	})
}

func TestSendHeldUpByFlowControlWhileTheReceiverCommits(t *testing.T) {
	bubble(t, func(t *testing.T) {
		server := serveStreams(t, func(n int, stream grpc.ServerStream) error {
			return playServer(t, n, "wait 1s; send 1; wait 1s; fail UNAVAILABLE", stream)
		})
		app, err := server.openStream(t, bidiStream, []Option{WithBufferLimit(1 << 20)})
		if err != nil {
			t.Fatal(err)
		}
		var group sync.WaitGroup
		group.Go(func() { app.play(t, "send "+big+"; sendeof "+big) })
		app.play(t, "recv 1; recv UNAVAILABLE")
		group.Wait()
		wantTimes(t, server, 0)
	})
}

func TestOverTheBufferWhileTheReceiverRetries(t *testing.T) {
	bubble(t, func(t *testing.T) {
		scripts := []string{"recv a; fail UNAVAILABLE", "recv a; recv " + big + "; recv EOF; send 1; fail UNAVAILABLE"}
		server := serveStreams(t, func(n int, stream grpc.ServerStream) error { return playServer(t, n, scripts[n-1], stream) })
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

func TestMessageOverASizeLimitEndsACommittedStream(t *testing.T) {
	bubble(t, func(t *testing.T) {
		server := serveStreams(t, func(n int, stream grpc.ServerStream) error { return playServer(t, n, "send 1; hang", stream) })
		ends := 0
		app, err := server.openStream(t, bidiStream, []Option{WithObserver(func(_ context.Context, e Event) {
			if e.Kind == CallEnd {
				ends++
				if status.Code(e.Err) != codes.ResourceExhausted {
					t.Errorf("CallEnd has %v, want RESOURCE_EXHAUSTED", e.Err)
				}
			}
		})}, grpc.MaxCallSendMsgSize(100))
		if err != nil {
			t.Fatal(err)
		}
		app.play(t, "recv 1")
		if err := app.stream.SendMsg(&echov1.EchoRequest{Message: big}); status.Code(err) != codes.ResourceExhausted || ends != 1 {
			t.Errorf("SendMsg = %v, and %d ends, want RESOURCE_EXHAUSTED and one", err, ends)
		}
	})
}

// Header on a third goroutine, while another waits for a message.
func TestHeaderWhileReceiving(t *testing.T) {
	for _, tt := range []struct{ name, second, recv string }{
		{"with headers", "header; recv go; send 1", "recv 1"},
		{"in vain", "fail NOT_FOUND", "recv NOT_FOUND"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				scripts := []string{"wait 1s; fail UNAVAILABLE", tt.second}
				server := serveStreams(t, func(n int, stream grpc.ServerStream) error { return playServer(t, n, scripts[n-1], stream) })
				app, err := server.openStream(t, bidiStream, nil)
				if err != nil {
					t.Fatal(err)
				}
				var group sync.WaitGroup
				group.Go(func() { app.play(t, tt.recv) })
				synctest.Wait()
				md, err := app.stream.Header()
				if hasHeader := tt.name == "with headers"; (md != nil) != hasHeader || err != nil {
					t.Errorf("Header = %v, %v", md, err)
				} else if hasHeader {
					app.play(t, "send go")
				}
				group.Wait()
				wantTimes(t, server, 0, 2*second)
			})
		})
	}
}

func TestContextAndTrailerAfterTheEnd(t *testing.T) {
	bubble(t, func(t *testing.T) {
		attempts := 0
		below := func(ctx context.Context, desc *grpc.StreamDesc, cc *grpc.ClientConn, method string, streamer grpc.Streamer, opts ...grpc.CallOption) (grpc.ClientStream, error) {
			if attempts++; attempts > 1 {
				return nil, status.Error(codes.NotFound, "no stream")
			}
			return streamer(ctx, desc, cc, method, opts...)
		}
		server := serveStreams(t, func(n int, stream grpc.ServerStream) error { return playServer(t, n, "fail UNAVAILABLE", stream) })
		cc := server.conn(t, append(DialOptions(steady), grpc.WithChainStreamInterceptor(below))...)
		stream, err := cc.NewStream(t.Context(), bidiStream, "/s/m")
		if err != nil {
			t.Fatal(err)
		}
		app := &application{stream: stream}
		app.play(t, "send a; recv NOT_FOUND; context; sendeof b; close; no header")
		if got := stream.Trailer(); got != nil {
			t.Errorf("Trailer = %v of a last attempt that had no stream", got)
		}
		wantStop(t, app.err, codes.NotFound, ErrNotRetryable, 2)
	})
}

// below wraps what streams return.
func below(wrap func(grpc.ClientStream) grpc.ClientStream) grpc.DialOption {
	return grpc.WithChainStreamInterceptor(func(ctx context.Context, desc *grpc.StreamDesc, cc *grpc.ClientConn, method string,
		streamer grpc.Streamer, opts ...grpc.CallOption) (grpc.ClientStream, error) {
		stream, err := streamer(ctx, desc, cc, method, opts...)
		return wrap(stream), err
	})
}

type truncated struct{ grpc.ClientStream }

func (truncated) RecvMsg(any) error { return fmt.Errorf("decrypt: %w", io.EOF) }

func TestAFailureThatWrapsEOFIsAFailure(t *testing.T) {
	bubble(t, func(t *testing.T) {
		server := serveStreams(t, func(n int, stream grpc.ServerStream) error { return playServer(t, n, "hang", stream) })
		budget := &aBudget{}
		cc := server.conn(t, append(DialOptions(WithBudget(budget)), below(func(s grpc.ClientStream) grpc.ClientStream { return truncated{s} }))...)
		stream, err := cc.NewStream(t.Context(), bidiStream, "/s/m")
		if err != nil {
			t.Fatal(err)
		}
		if err := stream.RecvMsg(new(echov1.EchoResponse)); err == io.EOF || !errors.Is(err, io.EOF) {
			t.Errorf("RecvMsg = %v, want the wrapped io.EOF", err)
		}
		if want := []Outcome{{Attempt: 1, Result: Ignored}}; !slices.Equal(budget.heard, want) {
			t.Errorf("budget heard %v, want %v", budget.heard, want)
		}
	})
}

func TestAPanicWhileRecoveringLeavesNobodyWaiting(t *testing.T) {
	bubble(t, func(t *testing.T) {
		server := serveStreams(t, func(n int, stream grpc.ServerStream) error {
			return playServer(t, n, "recv a; fail UNAVAILABLE", stream)
		})
		app, err := server.openStream(t, bidiStream, []Option{WithClassifier(func(context.Context, Attempt) Classification { panic("classifier") })})
		if err != nil {
			t.Fatal(err)
		}
		app.play(t, "send a")
		func() {
			defer func() {
				if recover() == nil {
					t.Error("the classifier's panic did not come out")
				}
			}()
			app.play(t, "recv 1")
		}()
		app.play(t, "sendeof b; recv INTERNAL")
	})
}
