package grpcretry

import (
	"fmt"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
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
