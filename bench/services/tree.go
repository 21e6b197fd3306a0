package main

import (
	"context"
	"errors"
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

// services are in a row. All but the last retry calls to the next; the last is down.
var services = []string{"A", "B", "C", "D"}

// maxAttempts is how many attempts each of them makes.
const maxAttempts = 3

// An attempt is one that a service has received, and those that it has made for it.
type attempt struct {
	number   int        // among those of the same call
	forRetry bool       // the call was made for a retry
	stopped  bool       // the response said "do not retry"
	next     []*attempt // made for this one
}

// leaves returns how many attempts have reached the last service.
func (a *attempt) leaves() int {
	if len(a.next) == 0 {
		return 1
	}
	sum := 0
	for _, next := range a.next {
		sum += next.leaves()
	}
	return sum
}

// attemptsWith makes a call to the first service, whose server and those of the others have the
// options, and returns it with all attempts that followed from it.
func attemptsWith(opts ...grpc.ServerOption) (*attempt, error) {
	var row []*service
	for i := len(services) - 1; i >= 0; i-- {
		s := &service{}
		row = append(row, s)
		if i < len(services)-1 {
			below := row[len(row)-2]
			below.above = s
			cc, err := below.dial()
			if err != nil {
				return nil, err
			}
			defer func() { _ = cc.Close() }()
			s.next = echov1.NewEchoServiceClient(cc)
		}
		if i > 0 {
			defer s.start(opts)()
		}
	}
	first := row[len(row)-1]
	first.handling = &attempt{number: 1}
	if status.Code(first.callNext(context.Background())) != codes.Unavailable {
		return nil, errors.New("the last service was not down")
	}
	return first.handling, nil
}

// A service fails every request, if it is the last, or passes it on.
type service struct {
	echov1.UnimplementedEchoServiceServer
	listener *bufconn.Listener
	above    *service
	next     echov1.EchoServiceClient
	handling *attempt // the newest
}

// start starts the server, and returns a function that stops it.
func (s *service) start(opts []grpc.ServerOption) func() {
	s.listener = bufconn.Listen(1 << 16)
	server := grpc.NewServer(opts...)
	echov1.RegisterEchoServiceServer(server, s)
	go func() { _ = server.Serve(s.listener) }()
	return server.Stop
}

// dial returns a client that retries calls to the service, without a budget.
func (s *service) dial() (*grpc.ClientConn, error) {
	return grpc.NewClient("passthrough:///service", append(
		grpcretry.DialOptions(
			grpcretry.WithMaxAttempts(maxAttempts),
			grpcretry.WithBackoff(grpcretry.Constant(time.Millisecond)),
			grpcretry.WithBudget(grpcretry.Unlimited), grpcretry.WithPatience(0),
		),
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) { return s.listener.DialContext(ctx) }),
	)...)
}

func (s *service) Echo(ctx context.Context, _ *echov1.EchoRequest) (*echov1.EchoResponse, error) {
	caller := s.above.handling
	s.handling = &attempt{number: 1 + grpcretry.PreviousAttempts(ctx), forRetry: caller.number > 1 || caller.forRetry}
	caller.next = append(caller.next, s.handling)
	if s.next == nil {
		return nil, status.Error(codes.Unavailable, "down")
	}
	return nil, s.callNext(ctx)
}

// callNext calls the next service.
func (s *service) callNext(ctx context.Context) error {
	_, err := s.next.Echo(ctx, &echov1.EchoRequest{})
	if made := s.handling.next; errors.Is(err, grpcretry.ErrPushback) {
		made[len(made)-1].stopped = true
	}
	return err
}
