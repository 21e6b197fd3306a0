package grpcretry

import (
	"context"
	"errors"
	"io"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	echov1 "github.com/grpcretry/grpcretry/proto/echo/v1"
)

// The tests here are of streams with an attempt timeout of 5 s.

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

// finish reports the end of an attempt as gRPC does.
func finish(opts []grpc.CallOption, err error) {
	for _, opt := range opts {
		if opt, ok := opt.(grpc.OnFinishCallOption); ok {
			opt.OnFinish(err)
		}
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

// A cutStream is a stream whose RecvMsg waits for the end of the context.
type cutStream struct {
	deaf
	ctx context.Context
	end func(finish func(error)) error
}

func (s *cutStream) RecvMsg(any) error {
	<-s.ctx.Done()
	return s.end(s.finish)
}

// receiveCut receives from a client stream whose attempt is cut after a second, and whose RecvMsg then ends with
// what end returns.
func receiveCut(t *testing.T, ctx context.Context, use func(grpc.ClientStream), end func(finish func(error)) error) error {
	t.Helper()
	reported := &record{}
	stream, err := StreamClientInterceptor(append(reported.options(), WithAttemptTimeout(second))...)(ctx, clientStream, nil, "/s/m",
		func(ctx context.Context, _ *grpc.StreamDesc, _ *grpc.ClientConn, _ string, opts ...grpc.CallOption) (grpc.ClientStream, error) {
			return &cutStream{deaf{finish: func(err error) { finish(opts, err) }}, ctx, end}, nil
		}, reported.onFinish())
	if err != nil {
		t.Fatal(err)
	}
	use(stream)
	err = stream.RecvMsg(&echov1.EchoResponse{})
	reported.want(t, err)
	return err
}

// gRPC's RecvMsg returns the response of a client stream after it has seen the status, so it is a success, although
// the report of the cut came first.
func TestAResponseThatCrossesTheReportOfTheCutIsASuccess(t *testing.T) {
	bubble(t, func(t *testing.T) {
		err := receiveCut(t, t.Context(), func(grpc.ClientStream) {}, func(finish func(error)) error {
			finish(errCut)
			time.Sleep(second)
			return nil
		})
		if err != nil {
			t.Errorf("got %v, want the response", err)
		}
	})
}

// The caller cancels a committed stream between the cut and its end: the application and the reports are told the
// same.
func TestACutStreamThatIsCancelled(t *testing.T) {
	bubble(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		err := receiveCut(t, ctx, func(s grpc.ClientStream) { s.Context() }, func(finish func(error)) error {
			cancel()
			finish(errCut)
			return errCut
		})
		if !errors.Is(err, ErrAttemptTimeout) {
			t.Errorf("got %v, want ErrAttemptTimeout", err)
		}
	})
}
