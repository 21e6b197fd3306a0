// Program attemptspan makes a call that fails twice, and counts the numbered spans of its attempts.
package main

import (
	"context"
	"fmt"
	"log"
	"net"
	"time"

	"go.opentelemetry.io/contrib/instrumentation/google.golang.org/grpc/otelgrpc"
	"go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"

	"github.com/grpcretry/grpcretry"
	"github.com/grpcretry/grpcretry/attemptspan"
)

func main() {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		log.Fatal(err)
	}
	g := grpc.NewServer() // which knows no service, so that every attempt fails
	go g.Serve(listener)

	spans := tracetest.NewInMemoryExporter()
	provider := trace.NewTracerProvider(trace.WithSpanProcessor(attemptspan.NewProcessor()), trace.WithSyncer(spans))
	cc, err := grpc.NewClient(listener.Addr().String(), append(
		grpcretry.DialOptions(
			grpcretry.WithMaxAttempts(2),
			grpcretry.WithClassifier(func(context.Context, grpcretry.Attempt) grpcretry.Classification { return grpcretry.Retry }),
			grpcretry.WithBackoff(grpcretry.Constant(time.Millisecond)),
			grpcretry.WithCallSpan(true),
			grpcretry.WithTracerProvider(provider)),
		grpc.WithStatsHandler(otelgrpc.NewClientHandler(otelgrpc.WithTracerProvider(provider))),
		grpc.WithTransportCredentials(insecure.NewCredentials()))...)
	if err != nil {
		log.Fatal(err)
	}
	if _, err := healthpb.NewHealthClient(cc).Check(context.Background(), &healthpb.HealthCheckRequest{}); err == nil {
		log.Fatal("a server without services has a response")
	}
	cc.Close()
	g.Stop()

	numbered := 0
	for _, s := range spans.GetSpans() {
		for _, a := range s.Attributes {
			if a.Key == "grpcretry.attempt.number" {
				numbered++
			}
		}
	}
	fmt.Println(numbered, "attempts")
}
