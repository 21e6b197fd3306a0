package server

import (
	"context"
	"sync"

	echov1 "github.com/grpcretry/grpcretry/proto/echo/v1"
)

// service is where your code goes. Its proto declares idempotency levels, from which clients know what may
// be sent twice: Echo has no side effects, Put is idempotent, and of Append nothing is known.
type service struct {
	echov1.UnimplementedEchoServiceServer

	mu      sync.Mutex
	value   string // guarded by mu
	entries int64  // guarded by mu
}

// Echo is a read: it may run twice, even at the same time.
func (s *service) Echo(_ context.Context, in *echov1.EchoRequest) (*echov1.EchoResponse, error) {
	return &echov1.EchoResponse{Message: in.GetMessage()}, nil
}

// Put may run twice: the second time changes nothing.
func (s *service) Put(_ context.Context, in *echov1.EchoRequest) (*echov1.EchoResponse, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.value = in.GetMessage()
	return &echov1.EchoResponse{Message: s.value}, nil
}

// Append must not run twice: it would append two entries.
func (s *service) Append(_ context.Context, in *echov1.EchoRequest) (*echov1.EchoResponse, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.entries++
	return &echov1.EchoResponse{Message: in.GetMessage(), Sequence: s.entries}, nil
}
