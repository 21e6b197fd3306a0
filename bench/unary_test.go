package bench

import (
	"context"
	"slices"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"

	echov1 "github.com/grpcretry/grpcretry/proto/echo/v1"
)

// BenchmarkUnaryInterceptor is the interceptor alone: gRPC is a function that does nothing
// or, where the caller asks for header and trailer, hands over what it is known to have.
func BenchmarkUnaryInterceptor(b *testing.B) {
	eachInformation(b, func(b *testing.B, equal bool) {
		eachCores(b, func(b *testing.B, repeat repeater) {
			eachAlternative(b, which(interceptors), perOperation, func(r *alternative) func(times int) {
				cc := unconnected(b)
				intercept := passThrough
				if r.unary != nil {
					intercept = r.unary(asUsed)
				}
				return repeat(b, func() func() error {
					ctx, opts, invoker := callContext(b), callOptions(equal), succeed
					if equal {
						invoker = handOver
					}
					req, reply := request(0), new(echov1.EchoResponse)
					return func() error {
						return intercept(ctx, echov1.EchoService_Echo_FullMethodName, req, reply, cc, invoker, opts...)
					}
				})
			})
		})
	})
}

// BenchmarkUnaryRPC is a whole call that succeeds at once, through a generated stub. Unless the caller asks for more, the limit is
// measured, too: see BenchmarkLimit.
func BenchmarkUnaryRPC(b *testing.B) {
	eachNetwork(b, func(b *testing.B, net network) {
		eachInformation(b, func(b *testing.B, equal bool) {
			alternatives := all
			if !equal {
				alternatives = append(slices.Clip(all), limit)
			}
			eachCores(b, func(b *testing.B, repeat repeater) {
				eachAlternative(b, alternatives, perOperation, func(r *alternative) func(times int) {
					client := echov1.NewEchoServiceClient(net.dial(b, r.dialOptions(asUsed)...))
					return repeat(b, func() func() error {
						ctx, req := callContext(b), request(0)
						if !equal {
							return func() error { return second(client.Echo(ctx, req)) }
						}
						return func() error {
							var header, trailer metadata.MD
							return second(client.Echo(ctx, req, grpc.Header(&header), grpc.Trailer(&trailer)))
						}
					})
				})
			})
		})
	})
}

func second[T any](_ T, err error) error { return err }

// The dimensions of the tables.

func eachNetwork(b *testing.B, f func(*testing.B, network)) {
	for _, net := range []network{inMemory, tcp} {
		b.Run("net="+net.name, func(b *testing.B) { f(b, net) })
	}
}

// eachInformation is about what the caller learns. The alternatives' own interceptors learn more
// or less of a call; equal is where each has to hand header and trailer to the caller.
func eachInformation(b *testing.B, f func(b *testing.B, equal bool)) {
	b.Run("info=plain", func(b *testing.B) { f(b, false) })
	b.Run("info=equal", func(b *testing.B) { f(b, true) })
}

func eachCores(b *testing.B, f func(*testing.B, repeater)) {
	b.Run("cores=one", func(b *testing.B) { f(b, serial) })
	b.Run("cores=all", func(b *testing.B) { f(b, parallel) })
}

// unconnected is a ClientConn for interceptors to look at. Nothing is sent on it.
func unconnected(tb testing.TB) *grpc.ClientConn {
	cc, err := grpc.NewClient("dns:///echo.example:443", grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() { cc.Close() })
	return cc
}

// callOptions are those that a generated stub passes on.
func callOptions(equal bool) []grpc.CallOption {
	opts := []grpc.CallOption{grpc.StaticMethod()}
	if equal {
		opts = append(opts, grpc.Header(new(metadata.MD)), grpc.Trailer(new(metadata.MD)))
	}
	return opts
}

func passThrough(
	ctx context.Context, method string, req, reply any, cc *grpc.ClientConn, invoker grpc.UnaryInvoker, opts ...grpc.CallOption,
) error {
	return invoker(ctx, method, req, reply, cc, opts...)
}

func succeed(context.Context, string, any, any, *grpc.ClientConn, ...grpc.CallOption) error {
	return nil
}

var someHeader, someTrailer = metadata.Pairs("content-type", "application/grpc"), metadata.MD{}

// handOver does with header and trailer what gRPC does.
func handOver(_ context.Context, _ string, _, _ any, _ *grpc.ClientConn, opts ...grpc.CallOption) error {
	for _, opt := range opts {
		switch opt := opt.(type) {
		case grpc.HeaderCallOption:
			*opt.HeaderAddr = someHeader
		case grpc.TrailerCallOption:
			*opt.TrailerAddr = someTrailer
		}
	}
	return nil
}
