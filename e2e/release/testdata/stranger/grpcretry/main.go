// Program grpcretry calls a server that is unavailable for the first attempt.
package main

import (
	"context"
	"fmt"
	"log"
	"net"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/status"

	"github.com/grpcretry/grpcretry"
)

type server struct {
	healthpb.UnimplementedHealthServer
	attempts int
}

func (s *server) Check(context.Context, *healthpb.HealthCheckRequest) (*healthpb.HealthCheckResponse, error) {
	s.attempts++
	if s.attempts == 1 {
		return nil, status.Error(codes.Unavailable, "restarting")
	}
	return &healthpb.HealthCheckResponse{}, nil
}

func main() {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		log.Fatal(err)
	}
	s := &server{}
	g := grpc.NewServer()
	healthpb.RegisterHealthServer(g, s)
	go g.Serve(listener)

	cc, err := grpc.NewClient(listener.Addr().String(), append(grpcretry.DialOptions(),
		grpc.WithTransportCredentials(insecure.NewCredentials()))...)
	if err != nil {
		log.Fatal(err)
	}
	if _, err := healthpb.NewHealthClient(cc).Check(context.Background(), &healthpb.HealthCheckRequest{}); err != nil {
		log.Fatal(err)
	}
	cc.Close()
	g.Stop()
	fmt.Println(s.attempts, "attempts")
}
