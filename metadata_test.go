package grpcretry

import (
	"context"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	echov1 "github.com/grpcretry/grpcretry/proto/echo/v1"
)

// What an earlier call has left in the variables of grpc.Header and grpc.Trailer says nothing
// about the next one: here of each kind, to a server that is not there.
func TestLeftoversOfAnEarlierCallDecideNothing(t *testing.T) {
	hedging := WithHedging(Hedging{MaxAttempts: 2, Delay: HedgeAfter(0), AllMethodsAreSafe: true, Budget: Unlimited})
	for name, opts := range map[string][]Option{
		"retried":                  nil,
		"committing on headers":    {WithCommitOnHeaders(true)},
		"with an observer":         {WithObserver(func(context.Context, Event) {})},
		"hedged":                   {hedging},
		"hedged, committing":       {hedging, WithCommitOnHeaders(true)},
		"with an attempt timeout":  {WithAttemptTimeout(time.Hour), WithCommitOnHeaders(true)},
		"hedging without a delay":  {WithHedging(Hedging{Delay: HedgeAtQuantile(0.9, 0, 0), AllMethodsAreSafe: true}), WithCommitOnHeaders(true)},
		"with waits for the other": {WithConnectWait(0), WithCommitOnHeaders(true)},
	} {
		for _, kind := range []string{"unary", "stream"} {
			for _, leftover := range []string{"-1", "7000"} {
				t.Run(name+", "+kind+", "+leftover, func(t *testing.T) {
					bubble(t, func(t *testing.T) {
						var sent []time.Duration
						start := time.Now()
						below := func(n int) error {
							sent = append(sent, time.Since(start))
							if n == 1 {
								return errUnavailable // without having reached a server
							}
							return nil
						}
						header := metadata.Pairs("k", "of an earlier call")
						trailer := metadata.MD{pushbackKey: {leftover}}
						call := []grpc.CallOption{grpc.Header(&header), grpc.Trailer(&trailer)}
						opts := append([]Option{WithBackoff(Constant(second)), WithBudget(Unlimited)}, opts...)
						if err := oneCall(t, kind, opts, below, call...); err != nil {
							t.Errorf("the call ended with %v, want a success on the second attempt", err)
						}
						for i, at := range sent {
							if at > second {
								t.Errorf("attempt %d was sent after %v: the leftovers were read as pushback", i+1, at)
							}
						}
						if header != nil || trailer != nil {
							t.Errorf("header %v and trailer %v are left, want none", header, trailer)
						}
					})
				})
			}
		}
	}
}

// oneCall makes a call without a server, to its end. below is called for each attempt.
func oneCall(t *testing.T, kind string, opts []Option, below func(n int) error, call ...grpc.CallOption) error {
	number := func(ctx context.Context) int {
		a, _ := AttemptFromContext(ctx)
		return a.Number
	}
	if kind == "unary" {
		return UnaryClientInterceptor(opts...)(t.Context(), brokenMethod, nil, &basket{}, nil,
			func(ctx context.Context, _ string, _, _ any, _ *grpc.ClientConn, _ ...grpc.CallOption) error {
				return below(number(ctx))
			}, call...)
	}
	stream, err := StreamClientInterceptor(opts...)(t.Context(), serverStream, nil, brokenMethod,
		func(ctx context.Context, _ *grpc.StreamDesc, _ *grpc.ClientConn, _ string, _ ...grpc.CallOption) (grpc.ClientStream, error) {
			if err := below(number(ctx)); err != nil {
				return nil, err
			}
			return &oneMessage{}, nil
		}, call...)
	if err != nil {
		return err
	}
	if err := stream.SendMsg(&echov1.EchoRequest{}); err != nil {
		return err
	}
	return stream.RecvMsg(&echov1.EchoResponse{})
}

// Calls that pass straight through, or are left to gRPC, are decided by gRPC: the leftovers do
// not even come near.
func TestLeftoversOfAnEarlierCallDoNotDecideForGRPC(t *testing.T) {
	leave := grpc.WithDefaultServiceConfig(`{"methodConfig":[{"name":[{}],"retryPolicy":{"maxAttempts":2,` +
		`"initialBackoff":"1s","maxBackoff":"1s","backoffMultiplier":1,"retryableStatusCodes":["UNAVAILABLE"]}}]}`)
	for name, dial := range map[string][]grpc.DialOption{
		"passing through": {grpc.WithUnaryInterceptor(UnaryClientInterceptor(Disable()))},
		"left to gRPC":    {leave, grpc.WithUnaryInterceptor(UnaryClientInterceptor(WithCommitOnHeaders(true)))},
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				server := serve(t, always(fail(codes.NotFound, "x")))
				header, trailer := metadata.Pairs("k", "v"), metadata.MD{pushbackKey: {"-1"}}
				cc := server.conn(t, dial...)
				_, err := echov1.NewEchoServiceClient(cc).Echo(t.Context(), request(), grpc.Header(&header), grpc.Trailer(&trailer))
				if status.Code(err) != codes.NotFound || first(header.Get("k")) == "v" || trailer[pushbackKey] != nil {
					t.Errorf("err = %v, header %v, trailer %v, want only what this call's server sent", err, header, trailer)
				}
			})
		})
	}
}
