package main

import (
	"context"
	"sync/atomic"
	"testing"
	"testing/synctest"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/grpcretry/grpcretry/grpcretrytest"
	echov1 "github.com/grpcretry/grpcretry/proto/echo/v1"
)

// TestClientsMakeTheSameAttempts is why the tables compare like with like.
func TestClientsMakeTheSameAttempts(t *testing.T) {
	for _, c := range clients {
		for code, want := range map[codes.Code]int64{
			codes.Unavailable:       attempts,
			codes.ResourceExhausted: attempts,
			codes.NotFound:          1,
		} {
			if c.name == plain.name {
				want = 1
			}
			t.Run(c.name+"/"+code.String(), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					server := &failing{code: code}
					_, err := echov1.NewEchoServiceClient(dialFailing(t, &c, server)).Echo(t.Context(), &echov1.EchoRequest{})
					if got := server.attempts.Load(); status.Code(err) != code || got != want {
						t.Errorf("Echo = %v after %d attempts, want %v after %d", err, got, code, want)
					}
				})
			})
		}
	}
}

// failing is a server that responds with an error.
type failing struct {
	echov1.UnimplementedEchoServiceServer
	code     codes.Code
	attempts atomic.Int64
}

func (f *failing) Echo(context.Context, *echov1.EchoRequest) (*echov1.EchoResponse, error) {
	f.attempts.Add(1)
	return nil, status.Error(f.code, "as the test says")
}

// dialFailing connects the client to the server in memory, since TCP knows no virtual time.
func dialFailing(t *testing.T, c *client, server *failing, more ...grpc.DialOption) *grpc.ClientConn {
	t.Helper()
	s := grpcretrytest.NewServer(t, func(s grpc.ServiceRegistrar) { echov1.RegisterEchoServiceServer(s, server) })
	cc, err := c.dial([]string{"memory"}, append(more, s.DialOptions()...)...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = cc.Close() })
	return cc
}
