package grpcretry

import (
	"context"
	"errors"
	"io"
	"runtime"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
)

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

// exiting ends the goroutine of the second SendMsg: that of the replay.
type exiting struct {
	grpc.ClientStream
	sent *int
}

func (s exiting) SendMsg(m any) error {
	if *s.sent++; *s.sent == 2 {
		runtime.Goexit()
	}
	return s.ClientStream.SendMsg(m)
}

func TestGoexitInAReplayEndsTheCall(t *testing.T) {
	bubble(t, func(t *testing.T) {
		server := serveScripts(t, "recv a; fail UNAVAILABLE", "recv a; hang")
		sent := 0
		cc := server.conn(t, append(DialOptions(steady), below(func(s grpc.ClientStream) grpc.ClientStream { return exiting{s, &sent} }))...)
		openOn(t, cc, bidiStream).play(t, "send a; recv INTERNAL")
	})
}

// In a dry run an empty end is what gRPC says it is.
func TestADryRunLeavesAnEmptyEndAlone(t *testing.T) {
	bubble(t, func(t *testing.T) {
		server := serveScripts(t, "hang")
		cc := server.conn(t, append(DialOptions(WithDryRun(true)), below(func(s grpc.ClientStream) grpc.ClientStream { return nothing{s} }))...)
		openOn(t, cc, serverStream).play(t, "send a; close; recv EOF; cancel")
	})
}

// nothing is a stream that an interceptor answers by itself.
type nothing struct{ grpc.ClientStream }

func (nothing) RecvMsg(any) error            { return io.EOF }
func (nothing) Header() (metadata.MD, error) { return nil, nil }
func (nothing) Trailer() metadata.MD         { return nil }
