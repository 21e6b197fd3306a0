package grpcretry

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

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
					service := serveHandler(t, func(ctx context.Context) error {
						background <- context.WithoutCancel(ctx)
						return nil
					}, serverOptions()...)
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
			service := serveHandler(t, nil, append(serverOptions(), grpc.UnknownServiceHandler(handle))...)
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
			service := serveHandler(t, nil, append(serverOptions(), grpc.UnknownServiceHandler(handle))...)
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
		{"a dry run, which changes nothing", metadata.Pairs(previousAttemptsKey, "1"), []Option{WithDryRun(true)}, 3},
	} {
		for kind, send := range kinds {
			for _, fresh := range []bool{true, false} {
				t.Run(tt.name+"/"+kind, func(t *testing.T) {
					bubble(t, func(t *testing.T) {
						made := 0
						last := serveHandler(t, func(context.Context) error { made++; return status.Error(codes.Unavailable, "down") })
						cc := last.conn(t, grpc.WithDefaultServiceConfig(config),
							grpc.WithChainUnaryInterceptor(UnaryClientInterceptor(tt.opts...)),
							grpc.WithChainStreamInterceptor(StreamClientInterceptor(tt.opts...)))
						if !fresh {
							cc.Connect()
							synctest.Wait()
						}
						service := serveHandler(t, func(ctx context.Context) error {
							_, err := send(ctx, echov1.NewEchoServiceClient(cc))
							return err
						}, serverOptions()...)
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
		"ConnectWait": WithPatience(second),
		"deadline":    WithPatience(time.Hour),
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
					if e := asError(t, err); errors.Is(err, context.DeadlineExceeded) || len(e.Attempts) == 0 || tellsOfGivingUp(err) {
						t.Errorf("%v, reason %v", err, e.Reason)
					}
					return err
				}
				var trailer metadata.MD
				service := serveHandler(t, handle, serverOptions()...)
				echov1.NewEchoServiceClient(service.conn(t)).Echo(t.Context(), request(), grpc.Trailer(&trailer))
				if got := trailer[pushbackKey]; got != nil {
					t.Errorf("trailer %v, want none", got)
				}
			})
		})
	}
}

// A call that has waited for a token in vain has given up, like one whose budget refuses at once: all services in a row would
// wait, one after the other.
func TestATokenAwaitedInVainIsGivingUp(t *testing.T) {
	for kind, send := range kinds {
		t.Run(kind, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				last := serveHandler(t, func(context.Context) error { return status.Error(codes.Unavailable, "down") })
				below := last.client(t, WithBudget(stingy{}))
				made := 0
				middle := serveHandler(t, func(ctx context.Context) error {
					made++
					if _, err := send(ctx, below); !tellsOfGivingUp(err) {
						t.Errorf("%v does not tell that the call has given up", err)
					}
					return errUnavailable // does not tell
				}, serverOptions()...)
				start := time.Now()
				_, err := send(t.Context(), middle.client(t, WithBudget(Unlimited)))
				if took := time.Since(start); !errors.Is(err, ErrPushback) || made != 1 || took > defaultPatience {
					t.Errorf("%v after %v and %d requests, want one, which says that there is no other", err, took, made)
				}
			})
		})
	}
}

// A call whose last attempt runs into a deadline that is its handler's own has given up. One that has attempts left has not: another
// replica of the service may have a better server below.
func TestAttemptsUsedUpAtTheHandlersOwnDeadline(t *testing.T) {
	for attempts, usedUp := range map[int]bool{5: true, 6: false} { // the handler has time for 5
		for kind, send := range kinds {
			t.Run(fmt.Sprint(attempts, " attempts/", kind), func(t *testing.T) {
				bubble(t, func(t *testing.T) {
					var made atomic.Int32
					last := serveHandler(t, func(ctx context.Context) error {
						made.Add(1)
						<-ctx.Done()
						return ctx.Err()
					})
					below := last.client(t, WithBackoff(Constant(second/10)), WithMaxAttempts(attempts), WithAttemptTimeout(second), WithBudget(Unlimited))
					middle := serveHandler(t, func(ctx context.Context) error {
						ctx, cancel := context.WithTimeoutCause(ctx, 5*second, errors.New("a page must be fast"))
						defer cancel()
						_, _ = send(ctx, below)
						return errUnavailable // does not tell
					}, serverOptions()...)
					ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
					defer cancel()
					_, err := send(ctx, middle.client(t, WithMaxAttempts(2), WithBudget(Unlimited)))
					if (made.Load() == 5) != usedUp || errors.Is(err, ErrPushback) != usedUp {
						t.Errorf("%d requests and error %v; used up: %t", made.Load(), err, usedUp)
					}
				})
			})
		}
	}
}

// A service that has given up stops its caller. One that made attempts and then waited for a connection in vain does
// not, so the caller's retry makes all attempts again. To the caller, its failure reads like a lost connection.
func TestAttemptsBeforeAWaitInVainAreMadeAgain(t *testing.T) {
	for kind, send := range kinds {
		t.Run(kind, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				made := 0
				var l *link
				last := serveHandler(t, func(context.Context) error {
					if made++; made == 2 {
						time.AfterFunc(second/2, l.cut)
					}
					return status.Error(codes.Unavailable, "down")
				})
				below := func() []grpc.DialOption {
					return DialOptions(steady, WithMaxAttempts(3), WithBudget(Unlimited), WithPatience(5*second))
				}
				l, lost := last.linked(t, below()...)
				replicas := []*grpc.ClientConn{lost, last.conn(t, below()...)} // of the service in the middle
				var seen marks
				middle := serveHandler(t, func(ctx context.Context) error {
					_, err := send(ctx, echov1.NewEchoServiceClient(replicas[seen.add(ctx)-1]))
					return err
				}, serverOptions()...)
				var first Attempt
				observe := WithObserver(func(_ context.Context, e Event) {
					if e.Kind == AttemptEnd && e.Attempt.Number == 1 {
						first = e.Attempt
					}
				})
				_, err := send(t.Context(), middle.client(t, steady, WithMaxAttempts(4), WithBudget(Unlimited), observe))
				if status.Code(err) != codes.Unavailable || made != 2+3 || !slices.Equal(seen.list(), []mark{"", "0"}) {
					t.Errorf("%v after %d attempts at the last service, marks %q; want Unavailable after 5, no mark and 0", err, made, seen.list())
				}
				if !strings.Contains(first.Err.Error(), errRefused.Error()) || first.Peer == nil || first.Unsent || forbidsRetry(first.Trailer) {
					t.Errorf("the first attempt is %+v, want a response with the other service's failure", first)
				}
			})
		})
	}
}
