package main

import (
	"context"
	"net"
	"sync/atomic"
	"testing"
	"testing/synctest"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/grpc/test/bufconn"

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
			if c.name == "none" || c.name == "WaitForReady" {
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
func dialFailing(t *testing.T, c *client, server *failing) *grpc.ClientConn {
	t.Helper()
	listener := bufconn.Listen(1 << 16)
	s := grpc.NewServer()
	echov1.RegisterEchoServiceServer(s, server)
	served := make(chan struct{})
	go func() {
		defer close(served)
		_ = s.Serve(listener) // ends with Stop
	}()
	t.Cleanup(func() { s.Stop(); <-served })
	cc, err := c.dial([]string{"memory"}, grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) {
		return listener.DialContext(ctx)
	}))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = cc.Close() })
	return cc
}
