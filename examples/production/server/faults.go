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
	FailEvery int           // each n-th request fails with UNAVAILABLE, every other one after it has run; 0: none
	Work      time.Duration // how long each request takes
}

func (f Faults) interceptor(log *slog.Logger) grpc.UnaryServerInterceptor {
	var requests atomic.Int64
	fail := func(ctx context.Context, ran bool) error {
		log.WarnContext(ctx, "failing on purpose", "ran", ran, "previous_attempts", grpcretry.PreviousAttempts(ctx))
		return status.Error(codes.Unavailable, "failing on purpose")
	}
	return func(ctx context.Context, req any, _ *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any, error) {
		n, every := requests.Add(1), int64(f.FailEvery)
		fails := every > 0 && n%every == 0
		if fails && n/every%2 == 1 {
			return nil, fail(ctx, false)
		}
		select {
		case <-time.After(f.Work):
			reply, err := handler(ctx, req)
			if fails { // as if the response were lost: the client cannot know that the request has run
				return nil, fail(ctx, true)
			}
			return reply, err
		case <-ctx.Done():
			return nil, status.FromContextError(ctx.Err()).Err()
		}
	}
}
