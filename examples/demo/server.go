package main

import (
	"context"
	"net"
	"sync"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/connectivity"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/grpcretry/grpcretry"
	echov1 "github.com/grpcretry/grpcretry/proto/echo/v1"
)

// An answer is what the server does with one attempt: nil for OK, else the status.
type answer func(context.Context) error

// ok answers after 20 ms of work.
func ok(ctx context.Context) error {
	select {
	case <-time.After(20 * time.Millisecond):
		return nil
	case <-ctx.Done():
		return status.FromContextError(ctx.Err()).Err()
	}
}

// down is a server that is restarting.
func down(context.Context) error {
	return status.Error(codes.Unavailable, "replica is restarting")
}

// overloaded sheds load, and tells clients when to retry.
func overloaded(comeBackAfter time.Duration) answer {
	return func(ctx context.Context) error {
		if err := grpcretry.SetPushback(ctx, comeBackAfter); err != nil {
			return status.Error(codes.Internal, err.Error())
		}
		return status.Error(codes.ResourceExhausted, "queue is full")
	}
}

// overQuota says the same as a Google API says it: in the details of the status.
func overQuota(comeBackAfter time.Duration) answer {
	return func(context.Context) error {
		st, err := status.New(codes.ResourceExhausted, "quota used up").
			WithDetails(&errdetails.RetryInfo{RetryDelay: durationpb.New(comeBackAfter)})
		if err != nil {
			return status.Error(codes.Internal, err.Error())
		}
		return st.Err()
	}
}

// shuttingDown fails with a code that clients retry, and asks them not to.
func shuttingDown(ctx context.Context) error {
	if err := grpcretry.SetNoRetry(ctx); err != nil {
		return status.Error(codes.Internal, err.Error())
	}
	return status.Error(codes.Unavailable, "shutting down for good")
}

// notFound is an answer that another attempt would not change.
func notFound(context.Context) error {
	return status.Error(codes.NotFound, "no cart 7")
}

// hang never answers, like a replica that lost its disk.
func hang(ctx context.Context) error {
	<-ctx.Done()
	return status.FromContextError(ctx.Err()).Err()
}

// A server answers each call from the script that belongs to it, and counts.
type server struct {
	echov1.UnimplementedEchoServiceServer

	listen  func() (net.Listener, error) // at the same address each time
	options []grpc.ServerOption
	grpc    *grpc.Server
	served  chan struct{} // closed when Serve has returned

	mu      sync.Mutex
	scripts map[string][]answer // guarded by mu; by the message of the call
	seen    map[string]int      // guarded by mu; attempts, by the message of the call
}

func startServer(listen func() (net.Listener, error), options ...grpc.ServerOption) (*server, error) {
	s := &server{
		listen:  listen,
		options: options,
		scripts: map[string][]answer{},
		seen:    map[string]int{},
	}
	return s, s.start()
}

func (s *server) start() error {
	listener, err := s.listen()
	if err != nil {
		return err
	}
	server, served := grpc.NewServer(s.options...), make(chan struct{})
	s.grpc, s.served = server, served
	echov1.RegisterEchoServiceServer(server, s)
	go func() {
		defer close(served)
		_ = server.Serve(listener) // if it fails early, the calls fail
	}()
	return nil
}

func (s *server) stop() {
	s.grpc.Stop()
	<-s.served
}

// goAway stops the server, and starts it again some time after the client has noticed. It
// returns what waits for that.
func (s *server) goAway(ctx context.Context, c *client, away time.Duration) (back func() error) {
	s.stop()
	for c.GetState() == connectivity.Ready && c.WaitForStateChange(ctx, connectivity.Ready) {
	}
	started := make(chan error, 1)
	time.AfterFunc(away, func() { started <- s.start() })
	return func() error { return <-started }
}

// expect sets what the attempts of a call are answered, the last answer for all further
// ones.
func (s *server) expect(call string, script []answer) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.scripts[call] = script
}

// attempts is how many attempts of a call have arrived.
func (s *server) attempts(call string) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.seen[call]
}

// Echo implements the service.
func (s *server) Echo(ctx context.Context, req *echov1.EchoRequest) (*echov1.EchoResponse, error) {
	// The client says which attempt this is, so the server can script it, or log it.
	answer := s.next(req.GetMessage(), grpcretry.PreviousAttempts(ctx))
	if err := answer(ctx); err != nil {
		return nil, err
	}
	return &echov1.EchoResponse{Message: req.GetMessage(), Payload: req.GetPayload()}, nil
}

// next counts an attempt and finds its answer.
func (s *server) next(call string, previous int) answer {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.seen[call]++
	script := s.scripts[call]
	if len(script) == 0 {
		return ok
	}
	return script[min(previous, len(script)-1)]
}
