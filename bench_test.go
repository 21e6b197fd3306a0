package grpcretry_test

import (
	"context"
	"testing"

	"google.golang.org/grpc"

	"github.com/grpcretry/grpcretry"
)

// BenchmarkFirstAttemptSucceeds is the cost of the interceptor on the path that nearly
// every call takes: at most one allocation.
func BenchmarkFirstAttemptSucceeds(b *testing.B) {
	intercept := grpcretry.UnaryClientInterceptor()
	invoker := func(context.Context, string, any, any, *grpc.ClientConn, ...grpc.CallOption) error { return nil }
	opts := []grpc.CallOption{grpc.StaticMethod()}
	b.ReportAllocs()
	for b.Loop() {
		if err := intercept(context.Background(), "/pkg.Service/Method", nil, nil, nil, invoker, opts...); err != nil {
			b.Fatal(err)
		}
	}
}
