package bench

import (
	"context"
	"fmt"
	"net"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	echov1 "github.com/grpcretry/grpcretry/proto/echo/v1"
)

// BenchmarkRetryInterceptor is what the interceptor alone makes of one and of three
// retries, without the waits.
func BenchmarkRetryInterceptor(b *testing.B) {
	eachRetries(b, func(b *testing.B, retries int64) {
		eachAlternative(b, which(func(r *alternative) bool { return r.unary != nil }), perOperation, func(r *alternative) func(times int) {
			cc, intercept, invoker := unconnected(b), r.unary(atOnce), failFirst(retries)
			ctx, opts := callContext(b), callOptions(false)
			req, reply := request(0), new(echov1.EchoResponse)
			return serial(b, func() func() error {
				return func() error {
					return intercept(ctx, echov1.EchoService_Echo_FullMethodName, req, reply, cc, invoker, opts...)
				}
			})
		})
	})
}

// BenchmarkRetryRPC is a whole call with one and with three retries, without the waits; of
// grpc-go's with the least that it takes, a nanosecond.
func BenchmarkRetryRPC(b *testing.B) {
	eachNetwork(b, func(b *testing.B, net network) {
		eachRetries(b, func(b *testing.B, retries int64) {
			eachAlternative(b, which(withRetries), perOperation, func(r *alternative) func(times int) {
				client := echov1.NewEchoServiceClient(net.dial(b, r.dialOptions(atOnce)...))
				ctx, req := callContext(b), request(retries)
				return serial(b, func() func() error {
					return func() error { return second(client.Echo(ctx, req)) }
				})
			})
		})
	})
}

func eachRetries(b *testing.B, f func(b *testing.B, retries int64)) {
	for _, retries := range []int64{1, attempts - 1} {
		b.Run(fmt.Sprintf("retries=%d", retries), func(b *testing.B) { f(b, retries) })
	}
}

// failFirst fails so many attempts before it lets one succeed, for calls one after the
// other. It names a peer as gRPC does: otherwise an attempt would look unsent, and not be retried at once.
func failFirst(failures int64) grpc.UnaryInvoker {
	unavailable := status.Error(codes.Unavailable, "down for maintenance")
	made := int64(0)
	address := &net.TCPAddr{}
	return func(_ context.Context, _ string, _, _ any, _ *grpc.ClientConn, opts ...grpc.CallOption) error {
		made++
		if made%(failures+1) != 0 {
			for _, o := range opts {
				if p, ok := o.(grpc.PeerCallOption); ok {
					p.PeerAddr.Addr = address
				}
			}
			return unavailable
		}
		return nil
	}
}
