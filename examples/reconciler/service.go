package main

import (
	"context"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	echov1 "github.com/grpcretry/grpcretry/proto/echo/v1"
)

// A service is the remote state, and counts the requests it receives.
type service struct {
	echov1.UnimplementedEchoServiceServer
	start time.Time
	setting

	mu        sync.Mutex
	state     map[string]bool
	perSecond map[int]int
	failed    int
	finished  time.Duration // when the last key came in sync
}

// serve starts the service and returns a client of it.
func (s *service) serve(listen network) (echov1.EchoServiceClient, func(), error) {
	listener, address, option, err := listen()
	if err != nil {
		return nil, nil, err
	}
	server := grpc.NewServer()
	echov1.RegisterEchoServiceServer(server, s)
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = server.Serve(listener)
	}()
	cc, err := dial(address, option)
	closeAll := func() {
		if cc != nil {
			cc.Close()
		}
		server.Stop()
		<-done
	}
	if err != nil {
		closeAll()
		return nil, nil, err
	}
	return echov1.NewEchoServiceClient(cc), closeAll, nil
}

// Put sets a key's state, unless the service is down.
func (s *service) Put(_ context.Context, r *echov1.EchoRequest) (*echov1.EchoResponse, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	at := time.Since(s.start)
	s.perSecond[int(at/time.Second)]++
	if s.isDown(at) {
		s.failed++
		return nil, status.Error(codes.Unavailable, "the service is down")
	}
	if !s.state[r.GetMessage()] {
		s.state[r.GetMessage()] = true
		s.finished = at
	}
	return &echov1.EchoResponse{}, nil
}

func (s *service) isDown(at time.Duration) bool { return at >= s.up && at < s.up+s.outage }

func (s *service) synced() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.state)
}

func (s *service) received(second int) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.perSecond[second]
}

func (s *service) failures() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.failed
}
