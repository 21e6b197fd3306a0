package attemptspan_test

import (
	"context"
	"fmt"
	"log"
	"net"
	"time"

	"go.opentelemetry.io/contrib/instrumentation/google.golang.org/grpc/otelgrpc"
	"go.opentelemetry.io/otel/sdk/trace"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/status"
	"google.golang.org/grpc/test/bufconn"

	"github.com/grpcretry/grpcretry"
	"github.com/grpcretry/grpcretry/attemptspan"
)

// A restarting server is unavailable twice, and asks for 20 ms the second time.
type restarting struct {
	healthpb.UnimplementedHealthServer
	calls int
}

func (s *restarting) Check(ctx context.Context, _ *healthpb.HealthCheckRequest) (*healthpb.HealthCheckResponse, error) {
	s.calls++
	switch s.calls {
	case 1:
		return nil, status.Error(codes.Unavailable, "restarting")
	case 2:
		if err := grpcretry.SetPushback(ctx, 20*time.Millisecond); err != nil {
			return nil, err
		}
		return nil, status.Error(codes.Unavailable, "restarting")
	default:
		return &healthpb.HealthCheckResponse{}, nil
	}
}

// A printer is an exporter; programs have one that sends spans to Jaeger.
type printer struct{}

func (printer) ExportSpans(_ context.Context, spans []trace.ReadOnlySpan) error {
	for _, s := range spans {
		fmt.Println(s.Name(), s.SpanKind())
		for _, a := range s.Attributes() {
			if a.Key != "server.address" && a.Key != "rpc.system.name" && a.Key != "rpc.method" {
				fmt.Printf("    %s = %v\n", a.Key, a.Value.AsInterface())
			}
		}
	}
	return nil
}

func (printer) Shutdown(context.Context) error { return nil }

// Three attempts of one call, told apart by their own spans, and the waits between them.
func ExampleNewProcessor() {
	listener := bufconn.Listen(1 << 16)
	server := grpc.NewServer()
	healthpb.RegisterHealthServer(server, &restarting{})
	go server.Serve(listener)
	defer server.Stop()

	provider := trace.NewTracerProvider(
		trace.WithSpanProcessor(attemptspan.NewProcessor()),
		trace.WithSyncer(printer{}))

	conn, err := grpc.NewClient("passthrough:///health", append(
		grpcretry.DialOptions(
			grpcretry.WithBackoff(grpcretry.Constant(10*time.Millisecond)),
			grpcretry.WithCallSpan(true),
			grpcretry.WithTracerProvider(provider)),
		grpc.WithStatsHandler(otelgrpc.NewClientHandler(otelgrpc.WithTracerProvider(provider))),
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) { return listener.DialContext(ctx) }))...)
	if err != nil {
		log.Fatal(err)
	}
	defer conn.Close()

	if _, err := healthpb.NewHealthClient(conn).Check(context.Background(), &healthpb.HealthCheckRequest{}); err != nil {
		log.Fatal(err)
	}
	// Output:
	// grpc.health.v1.Health/Check client
	//     grpcretry.attempt.number = 1
	//     rpc.response.status_code = UNAVAILABLE
	// retry wait internal
	//     grpcretry.next_attempt.number = 2
	//     grpcretry.wait_ms = 10
	//     grpcretry.wait_source = backoff
	// attempt 2 grpc.health.v1.Health/Check client
	//     grpcretry.attempt.number = 2
	//     grpcretry.attempt.wait_ms = 10
	//     grpcretry.attempt.wait_source = backoff
	//     rpc.response.status_code = UNAVAILABLE
	// retry wait internal
	//     grpcretry.next_attempt.number = 3
	//     grpcretry.wait_ms = 20
	//     grpcretry.wait_source = pushback
	// attempt 3 grpc.health.v1.Health/Check client
	//     grpcretry.attempt.number = 3
	//     grpcretry.attempt.wait_ms = 20
	//     grpcretry.attempt.wait_source = pushback
	//     rpc.response.status_code = OK
	// grpc.health.v1.Health/Check internal
	//     rpc.response.status_code = OK
	//     grpcretry.attempts = 3
}
