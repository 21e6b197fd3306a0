//go:build e2e

package e2e

import (
	"context"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"

	"github.com/grpcretry/grpcretry/grpcretrytest"
	echov1 "github.com/grpcretry/grpcretry/proto/echo/v1"
)

// A plan is how each attempt of a call fails; those after the last succeed.
type plan []grpcretrytest.Step

// planned is a failure. Those of streams come after the request, because gRPC reports no error to stats handlers
// for a stream that fails while the request is being sent.
func planned(code codes.Code) grpcretrytest.Step {
	return grpcretrytest.Fail(code, "as planned").AfterReceiving(1)
}

// serve starts the service. It is a real server on the loopback interface.
func serve(t *testing.T, opts ...grpc.ServerOption) *grpcretrytest.Server {
	t.Helper()
	return grpcretrytest.NewServer(t, func(s grpc.ServiceRegistrar) { echov1.RegisterEchoServiceServer(s, service{}) },
		append(opts, grpcretrytest.OverTCP())...)
}

// A service responds to what no plan fails.
type service struct {
	echov1.UnimplementedEchoServiceServer
}

func (service) Echo(context.Context, *echov1.EchoRequest) (*echov1.EchoResponse, error) {
	return &echov1.EchoResponse{}, nil
}

func (service) Put(context.Context, *echov1.EchoRequest) (*echov1.EchoResponse, error) {
	return &echov1.EchoResponse{}, nil
}

// Expand sends two messages.
func (service) Expand(_ *echov1.EchoRequest, stream grpc.ServerStreamingServer[echov1.EchoResponse]) error {
	if err := stream.Send(&echov1.EchoResponse{}); err != nil {
		return err
	}
	return stream.Send(&echov1.EchoResponse{})
}
