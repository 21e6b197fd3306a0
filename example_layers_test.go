package grpcretry_test

import (
	"context"
	"fmt"
	"log"
	"net"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	"google.golang.org/grpc/test/bufconn"

	"github.com/grpcretry/grpcretry"
	echov1 "github.com/grpcretry/grpcretry/proto/echo/v1"
)

// A stock is the last service, and it is down.
type stock struct {
	echov1.UnimplementedEchoServiceServer
	requests int
}

func (s *stock) Echo(context.Context, *echov1.EchoRequest) (*echov1.EchoResponse, error) {
	s.requests++
	return nil, status.Error(codes.Unavailable, "the stock is down")
}

// A cart calls the stock for each request.
type cart struct {
	echov1.UnimplementedEchoServiceServer
	stock echov1.EchoServiceClient
}

func (c *cart) Echo(ctx context.Context, req *echov1.EchoRequest) (*echov1.EchoResponse, error) {
	return c.stock.Echo(ctx, req)
}

// start starts a service and returns a client for it, which makes up to three attempts.
func start(service echov1.EchoServiceServer, opts ...grpc.ServerOption) (echov1.EchoServiceClient, func()) {
	listener := bufconn.Listen(1 << 16)
	server := grpc.NewServer(opts...)
	echov1.RegisterEchoServiceServer(server, service)
	go server.Serve(listener)

	cc, err := grpc.NewClient("passthrough:///service", append(
		grpcretry.DialOptions(
			grpcretry.WithMaxAttempts(3),
			grpcretry.WithBackoff(grpcretry.Constant(time.Millisecond)),
			grpcretry.WithBudget(grpcretry.Unlimited)), // so that the budget does not help
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) { return listener.DialContext(ctx) }))...)
	if err != nil {
		log.Fatal(err)
	}
	return echov1.NewEchoServiceClient(cc), func() { cc.Close(); server.Stop() }
}

// requestsToTheStock makes one call to the cart and returns how many requests it causes at the stock.
func requestsToTheStock(opts ...grpc.ServerOption) int {
	last := &stock{}
	stockClient, stopStock := start(last)
	defer stopStock()
	cartClient, stopCart := start(&cart{stock: stockClient}, opts...)
	defer stopCart()
	_, _ = cartClient.Echo(context.Background(), &echov1.EchoRequest{})
	return last.requests
}

// A client calls the cart, which calls the stock, and both calls are retried. The cart's interceptors keep
// the retries from multiplying. Only unary calls are made here, so that one of the two is enough.
func ExampleUnaryServerInterceptor() {
	fmt.Println("without the server interceptors:", requestsToTheStock())
	fmt.Println("with them:", requestsToTheStock(grpc.ChainUnaryInterceptor(grpcretry.UnaryServerInterceptor())))
	// Output:
	// without the server interceptors: 9
	// with them: 3
}
