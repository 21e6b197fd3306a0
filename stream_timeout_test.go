package grpcretry

import (
	"context"
	"io"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	echov1 "github.com/grpcretry/grpcretry/proto/echo/v1"
)

// The tests here are of streams with an attempt timeout of 5 s.

func TestACommittedClientStreamThatSucceedsInTimeIsASuccess(t *testing.T) {
	for _, tt := range []struct {
		name, server, app string
		limit             int
	}{
		{"committed by the buffer limit", "recv a; recv " + big + "; recv EOF; wait 1s; send 1",
			"send a; send " + big + "; close; recv 1", 100},
		{"committed by Context", "recv a; recv EOF; wait 1s; send 1", "send a; context; close; recv 1", 1 << 20},
		{"committed by Trailer", "recv a; recv EOF; wait 1s; send 1", "send a; trailer ; close; recv 1", 1 << 20},
		{"committed by Header", "recv a; header; recv EOF; wait 1s; send 1", "send a; header; close; recv 1", 1 << 20},
	} {
		t.Run(tt.name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				server, reported := serveScripts(t, tt.server), &record{}
				opts := append(reported.options(), WithAttemptTimeout(5*second), WithBufferLimit(tt.limit))
				app := openOn(t, server.conn(t, DialOptions(opts...)...), clientStream, reported.onFinish())
				app.play(t, tt.app)
				reported.want(t, nil)
				wantTimes(t, server, 0)
			})
		})
	}
}

// A deaf stream has all that it will ever receive, and does not notice that its attempt is
// cancelled, like one of an interceptor below that reads ahead.
type deaf struct {
	grpc.ClientStream
	kind     *grpc.StreamDesc
	first    time.Duration // until the first message; each further one takes a second
	messages []string
	finish   func(error)
}

func (d *deaf) SendMsg(any) error            { return nil }
func (d *deaf) CloseSend() error             { return nil }
func (d *deaf) Context() context.Context     { return context.Background() }
func (d *deaf) Header() (metadata.MD, error) { return metadata.MD{}, nil }
func (d *deaf) Trailer() metadata.MD         { return nil }

func (d *deaf) RecvMsg(m any) error {
	time.Sleep(d.first)
	d.first = second
	if len(d.messages) == 0 {
		d.finish(nil)
		return io.EOF
	}
	m.(*echov1.EchoResponse).Message = d.messages[0]
	d.messages = d.messages[1:]
	if !d.kind.ServerStreams {
		d.finish(nil)
	}
	return nil
}

// crossing receives a stream whose first attempt has its first message a second after the
// attempt timeout, while another goroutine uses the stream.
func crossing(t *testing.T, kind *grpc.StreamDesc, reported *record, use func(grpc.ClientStream)) (messages []string, err error) {
	t.Helper()
	attempts := []*deaf{{kind: kind, first: 6 * second, messages: []string{"1.1", "1.2"}}, {kind: kind, messages: []string{"2.1", "2.2"}}}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	stream, err := StreamClientInterceptor(append(reported.options(), WithAttemptTimeout(5*second), steady)...)(ctx, kind, nil, "/s/m",
		func(_ context.Context, _ *grpc.StreamDesc, _ *grpc.ClientConn, _ string, opts ...grpc.CallOption) (grpc.ClientStream, error) {
			d := attempts[0]
			attempts = attempts[1:]
			d.finish = func(err error) {
				for _, opt := range opts {
					if opt, ok := opt.(grpc.OnFinishCallOption); ok {
						opt.OnFinish(err)
					}
				}
			}
			return d, nil
		}, reported.onFinish())
	if err != nil {
		t.Fatal(err)
	}
	used := make(chan struct{})
	go func() { defer close(used); use(stream) }()
	for err == nil {
		var m echov1.EchoResponse
		if err = stream.RecvMsg(&m); err == nil {
			messages = append(messages, m.GetMessage())
		}
		if !kind.ServerStreams {
			break
		}
	}
	<-used
	return messages, err
}

var uses = map[string]func(grpc.ClientStream){
	"Context": func(s grpc.ClientStream) { s.Context() },
	"Header":  func(s grpc.ClientStream) { s.Header() },
	"Trailer": func(s grpc.ClientStream) { s.Trailer() },
}

// forEachUse runs a test for each method that commits, before and after the attempt timeout,
// and while a late attempt is read to its end.
func forEachUse(t *testing.T, f func(t *testing.T, use func(grpc.ClientStream))) {
	for name, use := range uses {
		for _, at := range []time.Duration{4500 * time.Millisecond, 5500 * time.Millisecond, 6500 * time.Millisecond,
			7500 * time.Millisecond} {
			t.Run(name+" after "+at.String(), func(t *testing.T) {
				bubble(t, func(t *testing.T) { f(t, func(s grpc.ClientStream) { time.Sleep(at); use(s) }) })
			})
		}
	}
}

func TestAStreamThatEndsWellHasAllMessagesAlsoAfterTheAttemptTimeout(t *testing.T) {
	forEachUse(t, func(t *testing.T, use func(grpc.ClientStream)) {
		got, err := crossing(t, serverStream, &record{}, use)
		if all := strings.Join(got, " "); err == io.EOF && all != "1.1 1.2" && all != "2.1 2.2" {
			t.Errorf("received %q and io.EOF, want both messages of one attempt", got)
		}
		if err != io.EOF && len(got) > 0 {
			t.Errorf("received %q and %v, and the server had sent no failure", got, err)
		}
	})
}

func TestReportsAgreeWithTheApplicationAfterTheAttemptTimeout(t *testing.T) {
	for _, kind := range []*grpc.StreamDesc{serverStream, clientStream} {
		t.Run(kind.StreamName, func(t *testing.T) {
			forEachUse(t, func(t *testing.T, use func(grpc.ClientStream)) {
				reported := &record{}
				_, err := crossing(t, kind, reported, use)
				if err == io.EOF {
					err = nil
				}
				reported.want(t, err)
			})
		})
	}
}

// The attempt timeout is the server's time to answer, not the application's time to read.
func TestAResponseThatArrivedInTimeIsDeliveredToALateReader(t *testing.T) {
	for _, tt := range []struct {
		name        string
		kind        *grpc.StreamDesc
		server, app string
	}{
		{"server stream", serverStream, "recv a; send 1; send 2", "send a; close; wait 20s; recv 1; recv 2; recv EOF"},
		{"server stream that goes on", serverStream, "recv a; send 1; wait 1m; send 2",
			"send a; close; wait 20s; recv 1; recv 2; recv EOF"},
		{"empty server stream", serverStream, "recv a", "send a; close; wait 20s; recv EOF"},
		{"client stream", clientStream, "recv a; recv EOF; wait 1s; send 1", "send a; close; wait 20s; recv 1"},
		{"bidi", bidiStream, "recv a; wait 1s; send 1; recv b; send 2; recv EOF",
			"send a; wait 20s; recv 1; send b; recv 2; close; recv EOF"},
		{"committed by Header", bidiStream, "recv a; header; send 1; send 2", "send a; header; wait 20s; recv 1; recv 2; recv EOF"},
		{"committed by Context", bidiStream, "recv a; wait 1s; send 1; wait 1m; send 2",
			"send a; context; wait 20s; recv 1; recv 2; recv EOF"},
		{"a failure", serverStream, "recv a; fail NOT_FOUND", "send a; close; wait 20s; recv NOT_FOUND"},
		{"a failure after headers", bidiStream, "recv a; header; wait 1s; fail NOT_FOUND", "send a; wait 20s; recv NOT_FOUND"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				server, reported := serveScripts(t, tt.server), &record{}
				app := openOn(t, server.conn(t, DialOptions(append(reported.options(), WithAttemptTimeout(5*second))...)...), tt.kind,
					reported.onFinish())
				app.play(t, tt.app)
				reported.want(t, app.err)
				wantTimes(t, server, 0)
				if b := &reported.budget; len(b.asked) != b.refunded {
					t.Errorf("%d retries were withdrawn and %d refunded, want none to be paid for", len(b.asked), b.refunded)
				}
				if app.err != nil && status.Convert(app.err).Message() != "failed in attempt 1" {
					t.Errorf("RecvMsg = %v, want the server's failure", app.err)
				}
			})
		})
	}
}

// lateStream is a stream whose first message is slow to come up.
type lateStream struct {
	grpc.ClientStream
	delay time.Duration
}

func (s *lateStream) RecvMsg(m any) error {
	err := s.ClientStream.RecvMsg(m)
	time.Sleep(s.delay)
	return err
}

// A first message that crosses the attempt timeout is not handed out: nothing could follow
// it but a failure that the server did not send.
func TestAFirstMessageThatCrossesTheAttemptTimeoutIsNotSeen(t *testing.T) {
	bubble(t, func(t *testing.T) {
		scripts := []string{"recv a; send 1; send 2; hang", "recv a; send 3; send 4"}
		server := serveStreams(t, func(n int, stream grpc.ServerStream) error { return playServer(t, n, scripts[n-1], stream) })
		delay := 6 * second
		wrapped := below(func(stream grpc.ClientStream) grpc.ClientStream {
			late := &lateStream{stream, delay}
			delay = 0
			return late
		})
		budget := &aBudget{}
		cc := server.conn(t, append(DialOptions(steady, WithAttemptTimeout(5*second), WithBudget(budget)), wrapped)...)
		openOn(t, cc, serverStream).play(t, "send a; close; recv 3; recv 4; recv EOF")
		if len(server.attempts()) != 2 {
			t.Errorf("%d attempts, want 2", len(server.attempts()))
		}
		if want := []Outcome{{Attempt: 1, Result: Failed}, {Attempt: 2, Result: Succeeded}}; !slices.Equal(budget.heard, want) {
			t.Errorf("budget heard %v, want %v", budget.heard, want)
		}
	})
}

// A committed stream may still time out before its first message, and ends then.
func TestCommittedStreamsThatTimeOutEnd(t *testing.T) {
	for _, tt := range []struct {
		name, server, app string
		delay             time.Duration // of what RecvMsg returns
	}{
		{"abandoned after the timeout", "recv a; hang", "send a; context; wait 10s; cancel", 0},
		{"found out", "recv a; hang", "send a; context; wait 10s; recv DEADLINE_EXCEEDED; recv DEADLINE_EXCEEDED", 0},
		{"a first message that crosses the timeout", "recv a; send 1; send 2; hang", "send a; context; recv DEADLINE_EXCEEDED", 6 * second},
	} {
		t.Run(tt.name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				server := serveStreams(t, func(n int, stream grpc.ServerStream) error { return playServer(t, n, tt.server, stream) })
				ends, finished := 0, 0
				cc := server.conn(t, append(DialOptions(steady, WithAttemptTimeout(5*second),
					WithObserver(func(_ context.Context, e Event) {
						if e.Kind == CallEnd {
							ends++
						}
					})), below(func(s grpc.ClientStream) grpc.ClientStream { return &lateStream{s, tt.delay} }))...)
				ctx, cancel := context.WithCancel(t.Context())
				defer cancel()
				stream, err := cc.NewStream(ctx, bidiStream, "/s/m", grpc.OnFinish(func(error) { finished++ }))
				if err != nil {
					t.Fatal(err)
				}
				(&application{stream: stream, cancel: cancel}).play(t, tt.app)
				synctest.Wait()
				if ends != 1 || finished != 1 {
					t.Errorf("CallEnd came %d times and OnFinish ran %d times, want once each", ends, finished)
				}
				wantTimes(t, server, 0)
			})
		})
	}
}
