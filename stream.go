package grpcretry

import (
	"context"

	"google.golang.org/grpc"
)

// StreamClientInterceptor returns the interceptor for streams, for
// [grpc.WithChainStreamInterceptor].
func (r *Retrier) StreamClientInterceptor() grpc.StreamClientInterceptor { return r.stream }

func (r *Retrier) stream(ctx context.Context, desc *grpc.StreamDesc, cc *grpc.ClientConn, method string,
	streamer grpc.Streamer, opts ...grpc.CallOption) (grpc.ClientStream, error) {
	return streamer(ctx, desc, cc, method, opts...)
}
