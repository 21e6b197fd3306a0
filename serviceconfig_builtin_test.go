package grpcretry

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/encoding"
	"google.golang.org/grpc/mem"
	"google.golang.org/grpc/status"

	echov1 "github.com/grpcretry/grpcretry/proto/echo/v1"
)

// The tests here are about clients that obey a service config but leave gRPC's own retries on, because
// they do not use DialOptions: attempts must not multiply.

// obeying are the options with which a service config is obeyed. Both allow Echo three attempts.
var obeying = map[string]Option{
	"WithServiceConfig":         WithServiceConfig(configOf(retrying(nameEcho, 3))),
	"WithResolverServiceConfig": WithResolverServiceConfig(true),
}

func TestAttemptsDoNotMultiply(t *testing.T) {
	for with, option := range obeying {
		for _, kind := range callKinds {
			for _, tt := range []struct {
				name string
				opts []Option
				call []grpc.CallOption
				want int
			}{
				{"obeyed", nil, nil, 3},
				{"call turned off", nil, []grpc.CallOption{Disable()}, 1},
				{"method turned off", []Option{WithMethod(echoMethod, Disable())}, nil, 1},
				{"the caller wants a large buffer", nil, []grpc.CallOption{grpc.MaxRetryRPCBufferSize(1 << 20)}, 3},
				{"call turned off, and the caller wants a large buffer", nil, []grpc.CallOption{Disable(), grpc.MaxRetryRPCBufferSize(1 << 20)}, 1},
				{"no buffer for streams", []Option{WithBufferLimit(0)}, nil, 0}, // 1 if it is a stream
			} {
				t.Run(with+", "+kind.name+", "+tt.name, func(t *testing.T) {
					bubble(t, func(t *testing.T) {
						server := serve(t, always(aborted()))
						cc, _ := server.live(t, 0, configOf(retrying(nameEcho, 3)), even(t, append(tt.opts, option)...).onlyInterceptors()...)
						want := tt.want
						if want == 0 {
							if want = 3; kind.desc != nil {
								want = 1
							}
						}
						for range 2 {
							before := len(server.attempts())
							if err := kind.call(t.Context(), cc, echoMethod, tt.call...); status.Code(err) != codes.Aborted {
								t.Errorf("err = %v, want ABORTED", err)
							}
							if got := len(server.attempts()) - before; got != want {
								t.Errorf("%d attempts, want %d", got, want)
							}
						}
					})
				})
			}
		}
	}
}

// The application may receive, or wait for headers, before it sends anything.
func TestAttemptsOfAStreamThatHasSentNothingDoNotMultiply(t *testing.T) {
	for _, steps := range []string{"recv ABORTED", "close; recv ABORTED", "header", "wait 1s; try a; recv ABORTED"} {
		for with, option := range obeying {
			for off, want := range map[bool]int{false: 3, true: 1} {
				t.Run(fmt.Sprintf("%s, %s, off %v", steps, with, off), func(t *testing.T) {
					bubble(t, func(t *testing.T) {
						server := serveStreams(t, func(int, grpc.ServerStream) error { return status.Error(codes.Aborted, "conflict") })
						config := configOf(retrying(nameDefault, 3))
						opts := []Option{option}
						if with == "WithServiceConfig" {
							opts = []Option{WithServiceConfig(config)}
						}
						var call []grpc.CallOption
						if off {
							call = append(call, Disable())
						}
						cc, _ := server.live(t, 0, config, even(t, opts...).onlyInterceptors()...)
						for range 2 {
							before := len(server.attempts())
							app := openOn(t, cc, bidiStream, call...)
							if steps == "header" {
								_, _ = app.stream.Header()
								app.play(t, "recv ABORTED")
							} else {
								app.play(t, steps)
							}
							if got := len(server.attempts()) - before; got != want {
								t.Errorf("%d attempts, want %d", got, want)
							}
						}
					})
				})
			}
		}
	}
}

// Without either option, the method is left to gRPC, and a call that passes through as well.
func TestMethodsAreLeftToGRPCWithoutTheOptions(t *testing.T) {
	for _, tt := range []struct {
		name string
		opts []Option
		want int
	}{
		{"retried", []Option{WithMaxAttempts(5)}, 3},
		{"turned off", []Option{Disable()}, 3},
		{"turned off again", []Option{WithResolverServiceConfig(true), WithResolverServiceConfig(false)}, 3},
		{"an empty service config is obeyed", []Option{WithServiceConfig("{}")}, 1}, // ABORTED is not retried by default
	} {
		for _, kind := range callKinds {
			t.Run(tt.name+", "+kind.name, func(t *testing.T) {
				bubble(t, func(t *testing.T) {
					server := serve(t, always(aborted()))
					cc, _ := server.live(t, 0, configOf(retrying(nameEcho, 3)), even(t, tt.opts...).onlyInterceptors()...)
					for range 2 {
						before := len(server.attempts())
						_ = kind.call(t.Context(), cc, echoMethod)
						if got := len(server.attempts()) - before; got != tt.want {
							t.Errorf("%d attempts, want %d", got, tt.want)
						}
					}
				})
			})
		}
	}
}

// failingCreds fail with UNAVAILABLE.
type failingCreds struct{ asked *int }

func (c failingCreds) GetRequestMetadata(context.Context, ...string) (map[string]string, error) {
	*c.asked++
	return nil, status.Error(codes.Unavailable, "token service is down")
}

func (failingCreds) RequireTransportSecurity() bool { return false }

// What fails before gRPC has a stream is retried by gRPC within each attempt, unless DialOptions turns
// that off. No server sees it.
func TestFailuresBeforeThereIsAStreamMultiply(t *testing.T) {
	config := strings.ReplaceAll(configOf(retrying(nameEcho, 3)), "ABORTED", "UNAVAILABLE")
	for way, want := range map[string]int{"DialOptions": 3, "interceptors only": 9} {
		t.Run(way, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				server, asked := serve(t, always(ok())), 0
				cc, _ := server.live(t, 0, config, ways[way](even(t, WithResolverServiceConfig(true)))...)
				connect(t, cc)
				err := echoOnce(t.Context(), cc, "unary", grpc.PerRPCCredentials(failingCreds{&asked}))
				wantStop(t, err, codes.Unavailable, ErrAttemptsExhausted, 3)
				if asked != want {
					t.Errorf("credentials were asked for %d times, want %d", asked, want)
				}
				wantTimes(t, server)
			})
		})
	}
}

// While there is no connection, gRPC's own retries delay a call, but the server sees no more attempts.
func TestCallsWithoutAConnectionDoNotMultiply(t *testing.T) {
	config := strings.ReplaceAll(configOf(retrying(nameEcho, 3)), "ABORTED", "UNAVAILABLE")
	for way, dial := range ways {
		for _, kind := range callKinds {
			t.Run(way+", "+kind.name, func(t *testing.T) {
				bubble(t, func(t *testing.T) {
					server := serve(t, always(unavailable()))
					cc, l := server.live(t, 0, config, dial(even(t, WithResolverServiceConfig(true)))...)
					connect(t, cc)
					l.cc.ReportError(errors.New("no such host")) // changes nothing: gRPC has addresses
					err := kind.call(t.Context(), cc, echoMethod)
					wantStop(t, err, codes.Unavailable, ErrAttemptsExhausted, 3)
					wantTimes(t, server, 0, second, 3*second)
				})
			})
		}
	}
}

// slowCodec takes a second to encode a request, so that a server that does not read requests responds
// before gRPC sends this one.
type slowCodec struct{ encoding.CodecV2 }

func (c slowCodec) Marshal(v any) (mem.BufferSlice, error) {
	time.Sleep(second)
	return c.CodecV2.Marshal(v)
}

// Except by DialOptions, gRPC cannot be kept from retrying a unary call whose server responds before the
// request is sent. It does so once in each attempt, because the request is then ready to be sent. When
// this test fails, gRPC has changed: see noBuiltInRetry.
func TestAnEarlyResponseIsRetriedByGRPC(t *testing.T) {
	for way, want := range map[string]int{"DialOptions": 3, "interceptors only": 6} {
		t.Run(way, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				server := serveStreams(t, func(int, grpc.ServerStream) error { return status.Error(codes.Aborted, "conflict") })
				cc, _ := server.live(t, 0, configOf(retrying(nameDefault, 3)), ways[way](even(t, WithResolverServiceConfig(true)))...)
				connect(t, cc)
				err := cc.Invoke(t.Context(), "/s/m", request(), &echov1.EchoResponse{}, grpc.ForceCodecV2(slowCodec{encoding.GetCodecV2("proto")}))
				wantStop(t, err, codes.Aborted, ErrAttemptsExhausted, 3)
				if got := len(server.attempts()); got != want {
					t.Errorf("%d attempts, want %d", got, want)
				}
			})
		})
	}
}

// A negative buffer size would be the better way to keep gRPC from retrying. When this test fails, gRPC
// no longer panics: see noBuiltInRetry.
func TestANegativeBufferSizeMakesGRPCPanic(t *testing.T) {
	bubble(t, func(t *testing.T) {
		server := serve(t, always(ok()))
		cc := server.conn(t)
		connect(t, cc)
		defer func() {
			if recover() == nil {
				t.Error("no panic")
			}
		}()
		_ = cc.Invoke(t.Context(), echoMethod, request(), &echov1.EchoResponse{}, grpc.MaxRetryRPCBufferSize(-1))
	})
}
