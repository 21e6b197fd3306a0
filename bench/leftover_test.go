package bench

import (
	"bytes"
	"context"
	"log/slog"
	"strings"
	"testing"
	"testing/synctest"

	"github.com/grpc-ecosystem/go-grpc-middleware/v2/interceptors/retry"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/grpcretry/grpcretry"
	echov1 "github.com/grpcretry/grpcretry/proto/echo/v1"
)

// Options of go-grpc-middleware that a call still has are ignored, and that is said once.
func TestLeftoverOptionsAreReported(t *testing.T) {
	left := []grpc.CallOption{retry.WithMax(7), retry.Disable()}
	for _, tt := range []struct {
		name string
		opts []grpcretry.Option
		dial []grpc.DialOption
		call func(context.Context, echov1.EchoServiceClient) error
		want string // the method
	}{
		{name: "call", call: func(ctx context.Context, c echov1.EchoServiceClient) error {
			_, err := c.Echo(ctx, request(0), left...)
			return err
		}, want: echov1.EchoService_Echo_FullMethodName},
		{name: "default call options", dial: []grpc.DialOption{grpc.WithDefaultCallOptions(left...)},
			call: func(ctx context.Context, c echov1.EchoServiceClient) error {
				_, err := c.Echo(ctx, request(0))
				return err
			}, want: echov1.EchoService_Echo_FullMethodName},
		{name: "method that passes through", opts: []grpcretry.Option{grpcretry.Disable()},
			call: func(ctx context.Context, c echov1.EchoServiceClient) error {
				_, err := c.Append(ctx, request(0), left...)
				return err
			}, want: echov1.EchoService_Append_FullMethodName},
		{name: "stream", call: func(ctx context.Context, c echov1.EchoServiceClient) error {
			stream, err := c.Chat(ctx, left...)
			if err == nil {
				finishChat(t, stream)
			}
			return err
		}, want: echov1.EchoService_Chat_FullMethodName},
		{name: "none", call: func(ctx context.Context, c echov1.EchoServiceClient) error {
			_, err := c.Echo(ctx, request(0), grpc.WaitForReady(true), grpcretry.WithMaxAttempts(2))
			return err
		}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var log bytes.Buffer
				r, err := grpcretry.New(append(tt.opts, grpcretry.WithLogger(slog.New(slog.NewTextHandler(&log, nil))))...)
				if err != nil {
					t.Fatal(err)
				}
				client := echov1.NewEchoServiceClient(dialServer(t, newServer(), append(r.DialOptions(), tt.dial...)...))
				for range 3 {
					if err := tt.call(t.Context(), client); err != nil {
						t.Fatal(err)
					}
				}
				if err := r.Update(grpcretry.WithMaxAttempts(3)); err != nil {
					t.Fatal(err)
				}
				said := log.String()
				if tt.want == "" {
					if said != "" {
						t.Errorf("logged %q, want nothing", said)
					}
					return
				}
				if strings.Count(said, "\n") != 1 || !strings.Contains(said, "method="+tt.want) || !strings.Contains(said, "go-grpc-middleware") {
					t.Errorf("logged %q, want one line about %s", said, tt.want)
				}
			})
		})
	}
}

// What the warning says of an interceptor that is chained below: it obeys its options, and the attempts
// multiply.
func TestLeftoverOptionsWithTheirInterceptorBelow(t *testing.T) {
	for _, tt := range []struct {
		opts []grpc.CallOption
		want int64
	}{
		{nil, 2},
		{[]grpc.CallOption{retry.WithMax(3)}, 2 * 3},
	} {
		synctest.Test(t, func(t *testing.T) {
			server := newServer()
			dial := append(grpcretry.DialOptions(grpcretry.WithMaxAttempts(2)), grpc.WithChainUnaryInterceptor(retry.UnaryClientInterceptor()))
			client := echov1.NewEchoServiceClient(dialServer(t, server, dial...))
			if _, err := client.Echo(t.Context(), request(failAlways), tt.opts...); status.Code(err) != codes.Unavailable {
				t.Errorf("Echo = %v, want UNAVAILABLE", err)
			}
			if got := server.attempts.Load(); got != tt.want {
				t.Errorf("the server saw %d attempts, want %d", got, tt.want)
			}
		})
	}
}
