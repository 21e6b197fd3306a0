package grpcretry

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	echov1 "github.com/grpcretry/grpcretry/proto/echo/v1"
)

// refusing is a stream that an interceptor fails by itself, as fault injection does.
type refusing struct {
	grpc.ClientStream
	recv, send error
}

func (s refusing) RecvMsg(m any) error {
	if s.recv != nil {
		return s.recv
	}
	return s.ClientStream.RecvMsg(m)
}

func (s refusing) SendMsg(m any) error {
	if s.send != nil {
		return s.send
	}
	return s.ClientStream.SendMsg(m)
}

func TestAnInterceptorBelowMayFailAStreamByItself(t *testing.T) {
	injected := status.Error(codes.Unavailable, "injected")
	for _, tt := range []struct {
		name  string
		first refusing
		opts  []Option
	}{
		{"RecvMsg", refusing{recv: injected}, nil},
		{"SendMsg", refusing{send: injected}, nil},
		{"RecvMsg, observed", refusing{recv: injected}, []Option{WithObserver(func(context.Context, Event) {})}},
		{"SendMsg, observed", refusing{send: injected}, []Option{WithObserver(func(context.Context, Event) {})}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				server := serveStreams(t, func(n int, stream grpc.ServerStream) error {
					if PreviousAttempts(stream.Context()) == 0 {
						return playServer(t, n, "hang", stream)
					}
					return playServer(t, n, "recv a; send 1", stream)
				})
				attempts := 0
				below := belowStream(func(ctx context.Context, next streamOpener) (grpc.ClientStream, error) {
					stream, err := next(ctx)
					if attempts++; attempts > 1 || err != nil {
						return stream, err
					}
					first := tt.first
					first.ClientStream = stream
					return first, nil
				})
				cc := server.conn(t, append(DialOptions(append(tt.opts, steady)...), below)...)
				ctx, cancel := context.WithTimeout(t.Context(), time.Minute) // ends a test that hangs
				defer cancel()
				stream, err := cc.NewStream(ctx, bidiStream, "/s/m")
				if err != nil {
					t.Fatal(err)
				}
				(&application{stream: stream}).play(t, "send a; close; recv 1; recv EOF")
				if got := time.Since(server.start); got != second {
					t.Errorf("the call took %v, want 1s", got)
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

type truncated struct{ grpc.ClientStream }

func (truncated) RecvMsg(any) error { return fmt.Errorf("decrypt: %w", io.EOF) }

func TestAFailureThatWrapsEOFIsAFailure(t *testing.T) {
	bubble(t, func(t *testing.T) {
		server := serveStreams(t, func(n int, stream grpc.ServerStream) error { return playServer(t, n, "hang", stream) })
		budget := &aBudget{}
		cc := server.conn(t, append(DialOptions(WithBudget(budget)),
			below(func(s grpc.ClientStream) grpc.ClientStream { return truncated{s} }))...)
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

// headerless is a stream of an interceptor below that knows nothing of headers.
type headerless struct{ grpc.ClientStream }

func (headerless) Header() (metadata.MD, error) { return nil, nil }

// gRPC's Header returns nil at the end of a stream only; another one's may not.
func TestAStreamBelowWithoutHeadersLosesNoMessages(t *testing.T) {
	all := "recv 1; recv 2; recv 3; recv 4; recv 5; recv EOF"
	for _, tt := range []struct {
		name    string
		kind    *grpc.StreamDesc
		scripts []string
		app     string
		times   []time.Duration
	}{
		{"Header", bidiStream, []string{"recv a; send 1; send 2; send 3; send 4; send 5"}, "send a; no header; " + all, []time.Duration{0}},
		{"Header of a server stream", serverStream, []string{"recv a; send 1; send 2; send 3; send 4; send 5"},
			"send a; close; no header; " + all, []time.Duration{0}},
		{"Header of a client stream", clientStream, []string{"recv a; recv EOF; send 1"}, "send a; close; no header; recv 1",
			[]time.Duration{0}},
		{"Header long before the messages", bidiStream, []string{"recv a; wait 9s; send 1; send 2; send 3; send 4; send 5"},
			"send a; no header; " + all, []time.Duration{0}},
		{"SendMsg on a stream that is over", bidiStream, []string{"send 1; send 2; send 3; send 4; send 5"}, "wait 1s; try a; " + all,
			[]time.Duration{0}},
		{"SendMsg on a server stream that is over", serverStream, []string{"send 1; send 2; send 3; send 4; send 5"},
			"wait 1s; try a; " + all, []time.Duration{0}},
		{"a retry", bidiStream, []string{"recv a; fail UNAVAILABLE", "recv a; send 1; send 2; send 3; send 4; send 5"}, "send a; " + all,
			[]time.Duration{0, second}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				server, reported := serveScripts(t, tt.scripts...), &record{}
				cc := server.conn(t, append(DialOptions(append(reported.options(), steady)...),
					below(func(s grpc.ClientStream) grpc.ClientStream { return headerless{s} }))...)
				openOn(t, cc, tt.kind, reported.onFinish()).play(t, tt.app)
				reported.want(t, nil)
				wantTimes(t, server, tt.times...)
			})
		})
	}
}

// The race detector shows whether the end of an attempt may come while it is being opened.
func TestAnInterceptorBelowMayReadAStreamBeforeItReturnsIt(t *testing.T) {
	bubble(t, func(t *testing.T) {
		server, reported := serveScripts(t, "send 1"), &record{}
		eager := belowStream(func(ctx context.Context, next streamOpener) (grpc.ClientStream, error) {
			stream, err := next(ctx)
			go func() {
				for stream.RecvMsg(new(echov1.EchoResponse)) == nil {
					continue
				}
			}()
			time.Sleep(second)
			return stream, err
		})
		cc := server.conn(t, append(DialOptions(reported.options()...), eager)...)
		openOn(t, cc, bidiStream, reported.onFinish()).play(t, "recv EOF")
		reported.want(t, nil)
	})
}
