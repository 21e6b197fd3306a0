//go:build e2e

package e2e

import (
	"cmp"
	"context"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"

	"github.com/grpcretry/grpcretry"
	echov1 "github.com/grpcretry/grpcretry/proto/echo/v1"
)

// A service fails as often as the message of a request says, and takes its time. It is
// a real server on the loopback interface.
type service struct {
	echov1.UnimplementedEchoServiceServer
	takes   time.Duration
	plans   map[string]plan
	touched atomic.Int64 // attempts served
}

// A plan is how each attempt of a call fails; those after the last succeed.
type plan []failure

// A failure is a status, and the pushback that goes with it: 0 for none.
type failure struct {
	code     codes.Code
	pushback time.Duration
	takes    time.Duration // if it is not 0, another time than the service's
}

// serve starts the service and returns its address.
func serve(t *testing.T, s *service) (address string) {
	t.Helper()
	listener := listen(t)
	server := grpc.NewServer()
	echov1.RegisterEchoServiceServer(server, s)
	served := make(chan error, 1)
	go func() { served <- server.Serve(listener) }()
	t.Cleanup(func() {
		server.Stop()
		if err := <-served; err != nil {
			t.Errorf("Serve = %v", err)
		}
	})
	return listener.Addr().String()
}

// dial connects to the service.
func dial(t *testing.T, address string, opts ...grpc.DialOption) echov1.EchoServiceClient {
	t.Helper()
	conn, err := grpc.NewClient(address, append(opts, grpc.WithTransportCredentials(insecure.NewCredentials()))...)
	if err != nil {
		t.Fatalf("NewClient: %v", err)
	}
	t.Cleanup(func() {
		if err := conn.Close(); err != nil {
			t.Errorf("Close = %v", err)
		}
	})
	return echov1.NewEchoServiceClient(conn)
}

// serve does what the plan has for this attempt.
func (s *service) serve(ctx context.Context, req *echov1.EchoRequest) error {
	s.touched.Add(1)
	var f failure // none
	if p, n := s.plans[req.GetMessage()], grpcretry.PreviousAttempts(ctx); n < len(p) {
		f = p[n]
	}
	if takes := cmp.Or(f.takes, s.takes); takes > 0 {
		select {
		case <-time.After(takes):
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	if f.pushback > 0 {
		if err := grpcretry.SetPushback(ctx, f.pushback); err != nil {
			return err
		}
	}
	if f.code == codes.OK {
		return nil
	}
	return status.Error(f.code, "as planned")
}

func (s *service) Echo(ctx context.Context, req *echov1.EchoRequest) (*echov1.EchoResponse, error) {
	return &echov1.EchoResponse{}, s.serve(ctx, req)
}

func (s *service) Put(ctx context.Context, req *echov1.EchoRequest) (*echov1.EchoResponse, error) {
	return &echov1.EchoResponse{}, s.serve(ctx, req)
}

// Expand sends two messages, or none.
func (s *service) Expand(req *echov1.EchoRequest, stream grpc.ServerStreamingServer[echov1.EchoResponse]) error {
	if err := s.serve(stream.Context(), req); err != nil {
		return err
	}
	if err := stream.Send(&echov1.EchoResponse{}); err != nil {
		return err
	}
	return stream.Send(&echov1.EchoResponse{})
}
