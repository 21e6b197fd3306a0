package grpcretry

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	"github.com/grpcretry/grpcretry/internal/layers"
	echov1 "github.com/grpcretry/grpcretry/proto/echo/v1"
)

// A service further up makes up for failures only until the handler has returned, or has sent a message.
// A queue that goes on with the handler's context, or a stream that lives for days, has its own retries.
func TestWorkAfterTheResponseIsRetriedAgain(t *testing.T) {
	retried := metadata.Pairs(previousAttemptsKey, "1")
	t.Run("after the handler", func(t *testing.T) {
		for kind, send := range kinds {
			t.Run(kind, func(t *testing.T) {
				bubble(t, func(t *testing.T) {
					last := serve(t, always(unavailable()))
					client := last.client(t, steady, WithMaxAttempts(2))
					background := make(chan context.Context, 1)
					service := serveHandler(t, func(ctx context.Context) error { background <- context.WithoutCancel(ctx); return nil }, ServerOptions()...)
					send(metadata.NewOutgoingContext(t.Context(), retried), echov1.NewEchoServiceClient(service.conn(t)))
					synctest.Wait()
					client.Echo(<-background, request())
					wantMade(t, last, 2)
				})
			})
		}
	})
	t.Run("after a message that was not sent", func(t *testing.T) {
		bubble(t, func(t *testing.T) {
			last := serve(t, always(unavailable()))
			client := last.client(t, steady, WithMaxAttempts(2))
			done := make(chan struct{})
			handle := func(_ any, stream grpc.ServerStream) error {
				defer close(done)
				if stream.SendMsg("no message") == nil {
					t.Error("SendMsg sends what is no message")
				}
				client.Echo(context.WithoutCancel(stream.Context()), request()) // gRPC has ended the stream
				wantMade(t, last, 1)
				return nil
			}
			service := serveHandler(t, nil, append(ServerOptions(), grpc.UnknownServiceHandler(handle))...)
			stream, err := service.conn(t).NewStream(metadata.NewOutgoingContext(t.Context(), retried), serverStream, "/streams/Server")
			for err == nil {
				err = stream.RecvMsg(&echov1.EchoResponse{})
			}
			<-done
		})
	})
	t.Run("after a message", func(t *testing.T) {
		bubble(t, func(t *testing.T) {
			last := serve(t, always(unavailable()))
			client := last.client(t, steady, WithMaxAttempts(2))
			handle := func(_ any, stream grpc.ServerStream) error {
				client.Echo(stream.Context(), request())
				wantMade(t, last, 1)
				if err := stream.SendMsg(&echov1.EchoResponse{}); err != nil {
					return err
				}
				client.Echo(stream.Context(), request())
				wantMade(t, last, 3)
				return nil
			}
			service := serveHandler(t, nil, append(ServerOptions(), grpc.UnknownServiceHandler(handle))...)
			stream, err := service.conn(t).NewStream(metadata.NewOutgoingContext(t.Context(), retried), serverStream, "/streams/Server")
			for err == nil {
				err = stream.RecvMsg(&echov1.EchoResponse{})
			}
		})
	})
}

func wantMade(t *testing.T, f *fixture, want int) {
	t.Helper()
	if got := len(f.attempts()); got != want {
		t.Errorf("the last server has seen %d attempts, want %d", got, want)
	}
}

// gRPC's own retries would be attempts like any others.
func TestWorkForARetryIsNotLeftToGRPC(t *testing.T) {
	const config = `{"methodConfig":[{"name":[{}],"retryPolicy":{"maxAttempts":3,` +
		`"initialBackoff":"1s","maxBackoff":"1s","backoffMultiplier":1,"retryableStatusCodes":["UNAVAILABLE"]}}]}`
	for _, tt := range []struct {
		name   string
		header metadata.MD
		opts   []Option
		want   int
	}{
		{"a first attempt", nil, nil, 3},
		{"a retry", metadata.Pairs(previousAttemptsKey, "1"), nil, 1},
		{"a call that passes through", metadata.Pairs(previousAttemptsKey, "1"), []Option{Disable()}, 1},
		{"an attempt timeout", metadata.Pairs(previousAttemptsKey, "1"), []Option{WithAttemptTimeout(time.Minute)}, 1},
	} {
		for kind, send := range kinds {
			for _, fresh := range []bool{true, false} {
				t.Run(tt.name+"/"+kind, func(t *testing.T) {
					bubble(t, func(t *testing.T) {
						made := 0
						last := serveHandler(t, func(context.Context) error { made++; return status.Error(codes.Unavailable, "down") })
						cc := last.conn(t, grpc.WithDefaultServiceConfig(config),
							grpc.WithChainUnaryInterceptor(UnaryClientInterceptor(tt.opts...)), grpc.WithChainStreamInterceptor(StreamClientInterceptor(tt.opts...)))
						if !fresh {
							cc.Connect()
							synctest.Wait()
						}
						service := serveHandler(t, func(ctx context.Context) error {
							_, err := send(ctx, echov1.NewEchoServiceClient(cc))
							return err
						}, ServerOptions()...)
						_, err := send(metadata.NewOutgoingContext(t.Context(), tt.header), echov1.NewEchoServiceClient(service.conn(t)))
						if status.Code(err) != codes.Unavailable || made != tt.want {
							t.Errorf("%d attempts and error %v, want %d and Unavailable", made, err, tt.want)
						}
					})
				})
			}
		}
	}
}

// A call that has reached no server has not given up: the caller's retry may meet a service that has a
// connection.
func TestWaitingInVainIsNotGivingUp(t *testing.T) {
	for name, opt := range map[string]Option{
		"ConnectWait": WithConnectWait(second),
		"deadline":    WithConnectWait(time.Hour),
		"MaxElapsed":  WithMaxElapsed(second),
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				last := serve(t, always(ok()))
				link, cc := last.linked(t, DialOptions(steady, opt)...)
				link.cut()
				synctest.Wait()
				handle := func(ctx context.Context) error {
					ctx, cancel := context.WithTimeout(ctx, 5*second)
					defer cancel()
					_, err := echov1.NewEchoServiceClient(cc).Echo(ctx, request())
					if e := asError(t, err); errors.Is(err, context.DeadlineExceeded) || len(e.Attempts) == 0 || errors.Is(err, errGaveUp) {
						t.Errorf("%v, reason %v", err, e.Reason)
					}
					return err
				}
				var trailer metadata.MD
				service := serveHandler(t, handle, ServerOptions()...)
				echov1.NewEchoServiceClient(service.conn(t)).Echo(t.Context(), request(), grpc.Trailer(&trailer))
				if got := trailer[pushbackKey]; got != nil {
					t.Errorf("trailer %v, want none", got)
				}
			})
		})
	}
}

// Mocks and loggers print contexts, while calls that are made with them end.
func TestPrintingARequestReadsNothingThatChanges(t *testing.T) {
	if got := fmt.Sprintf("%v %+v", layers.New(t.Context(), true), layers.New(t.Context(), false)); got != "grpcretry.Request grpcretry.Request" {
		t.Error(got)
	}
}

// A server that runs in one process with its client may get the client's context.
func TestSetNoRetryIsForTheServersOwnCaller(t *testing.T) {
	bubble(t, func(t *testing.T) {
		last := serve(t, always(unavailable()))
		client := last.client(t, steady, WithMaxAttempts(2))
		inner := &transportStream{}
		service := serveHandler(t, func(ctx context.Context) error {
			if err := SetNoRetry(grpc.NewContextWithServerTransportStream(ctx, inner)); err != nil {
				t.Error(err)
			}
			_, err := client.Echo(ctx, request())
			return err
		}, ServerOptions()...)
		var trailer metadata.MD
		echov1.NewEchoServiceClient(service.conn(t)).Echo(t.Context(), request(), grpc.Trailer(&trailer))
		want := []string{"-1"}
		if !slices.Equal(trailer[pushbackKey], want) || !slices.Equal(inner.trailer[pushbackKey], want) {
			t.Errorf("trailers %v and %v, want -1 in both", trailer, inner.trailer)
		}
	})
}

// The same for the interceptors: the request of such a server is a request of its own, and so is its response.
func TestAServerInTheSameProcessHasItsOwnRequests(t *testing.T) {
	gaveUp := &Error{Reason: ErrAttemptsExhausted, Last: errUnavailable}
	for name, handle := range map[string]func(context.Context, *transportStream) error{
		"unary": func(ctx context.Context, _ *transportStream) error {
			_, err := UnaryServerInterceptor()(ctx, nil, &grpc.UnaryServerInfo{FullMethod: echoMethod}, func(context.Context, any) (any, error) { return nil, gaveUp })
			return err
		},
		"stream": func(ctx context.Context, inner *transportStream) error {
			stream := localStream{ctx: ctx, transport: inner}
			return StreamServerInterceptor()(nil, stream, &grpc.StreamServerInfo{FullMethod: echoMethod}, func(any, grpc.ServerStream) error { return gaveUp })
		},
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				inner := &transportStream{}
				service := serveHandler(t, func(ctx context.Context) error {
					handle(grpc.NewContextWithServerTransportStream(ctx, inner), inner)
					return errors.New("hidden")
				}, ServerOptions()...)
				var trailer metadata.MD
				echov1.NewEchoServiceClient(service.conn(t)).Echo(t.Context(), request(), grpc.Trailer(&trailer))
				if got := inner.trailer[pushbackKey]; !slices.Equal(got, []string{"-1"}) || trailer[pushbackKey] != nil {
					t.Errorf("trailers %v of the server within and %v of the one around, want -1 only in the first", inner.trailer, trailer)
				}
			})
		})
	}
}

// A localStream is a stream of a server in the same process.
type localStream struct {
	grpc.ServerStream
	ctx       context.Context
	transport *transportStream
}

func (s localStream) Context() context.Context  { return s.ctx }
func (s localStream) SetTrailer(md metadata.MD) { _ = s.transport.SetTrailer(md) }

// A transportStream is that of a server in the same process.
type transportStream struct{ trailer metadata.MD }

func (*transportStream) Method() string               { return echoMethod }
func (*transportStream) SetHeader(metadata.MD) error  { return nil }
func (*transportStream) SendHeader(metadata.MD) error { return nil }

func (s *transportStream) SetTrailer(md metadata.MD) error {
	s.trailer = metadata.Join(s.trailer, md)
	return nil
}
