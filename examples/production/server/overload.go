package server

import (
	"context"
	"math/rand/v2"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/status"

	"github.com/grpcretry/grpcretry"
)

// limit rejects requests above the capacity before they cost anything, and tells the clients when to retry.
// A server with streams needs the same for them.
func limit(capacity int) grpc.UnaryServerInterceptor {
	slots := make(chan struct{}, capacity)
	return func(ctx context.Context, req any, info *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any, error) {
		if strings.HasPrefix(info.FullMethod, "/"+healthpb.Health_ServiceDesc.ServiceName+"/") {
			return handler(ctx, req) // a busy server is healthy: a restart would make it worse
		}
		select {
		case slots <- struct{}{}:
			defer func() { <-slots }()
			return handler(ctx, req)
		default:
			// Each client gets another delay, so that they do not all return at the same instant.
			if err := grpcretry.SetPushback(ctx, 500*time.Millisecond+rand.N(time.Second)); err != nil {
				return nil, err
			}
			return nil, status.Error(codes.ResourceExhausted, "server is at capacity")
		}
	}
}
