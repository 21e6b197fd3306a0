package server

import (
	"context"
	"log/slog"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/grpcretry/grpcretry"
)

// Faults make the example worth looking at. Do not copy this file.
type Faults struct {
	FailEvery int           // each n-th request fails with UNAVAILABLE; 0: none
	Work      time.Duration // how long each request takes
}

func (f Faults) interceptor(log *slog.Logger) grpc.UnaryServerInterceptor {
	var requests atomic.Int64
	return func(ctx context.Context, req any, _ *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any, error) {
		if f.FailEvery > 0 && requests.Add(1)%int64(f.FailEvery) == 0 {
			log.WarnContext(ctx, "failing on purpose", "previous_attempts", grpcretry.PreviousAttempts(ctx))
			return nil, status.Error(codes.Unavailable, "failing on purpose")
		}
		select {
		case <-time.After(f.Work):
			return handler(ctx, req)
		case <-ctx.Done():
			return nil, status.FromContextError(ctx.Err()).Err()
		}
	}
}
