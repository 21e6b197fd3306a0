// Package server is the gRPC server.
package server

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"time"

	"go.opentelemetry.io/contrib/instrumentation/google.golang.org/grpc/otelgrpc"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/health"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/keepalive"

	"github.com/grpcretry/grpcretry"
	"github.com/grpcretry/grpcretry/examples/production/ops"
	echov1 "github.com/grpcretry/grpcretry/proto/echo/v1"
)

// DefaultInternal is on the loopback interface, so that the internal port is opened to others on purpose only.
const DefaultInternal = "127.0.0.1:9101"

// A Config has listeners instead of addresses, so that a taken port is an error before anything has started.
type Config struct {
	Public, Internal net.Listener
	Credentials      credentials.TransportCredentials
	Log              *slog.Logger
	Capacity         int // requests in flight; more are rejected
	Drain            ops.Drain
	Faults           Faults
}

// Run serves until ctx ends and the requests in flight are finished.
func Run(ctx context.Context, config Config) error {
	telemetry, err := ops.NewTelemetry(ctx, "shop-server")
	if err != nil {
		return err
	}
	server := grpc.NewServer(options(config, telemetry)...)
	echov1.RegisterEchoServiceServer(server, &service{})
	ready := health.NewServer()
	healthpb.RegisterHealthServer(server, ready)

	failed := make(chan error, 1)
	go func() { failed <- server.Serve(config.Public) }()
	internal := ops.ServeHTTP(config.Internal, telemetry.InternalMux())
	config.Log.Info("serving", "grpc", config.Public.Addr().String(), "internal", config.Internal.Addr().String())

	select {
	case <-ctx.Done():
	case err = <-failed:
	case err = <-internal.Failed:
	}
	config.Log.Info("stopping", "delay", config.Drain.Delay.String(), "timeout", config.Drain.Timeout.String())
	stop(server, ready, config.Drain)

	// The metrics port closes last, so that the drain can be watched.
	flush, cancel := context.WithTimeout(context.WithoutCancel(ctx), ops.FlushTimeout)
	defer cancel()
	return errors.Join(err, internal.Shutdown(flush), telemetry.Flush(flush))
}

func options(config Config, telemetry *ops.Telemetry) []grpc.ServerOption {
	// First the retry interceptors: with them, the retries of services in a row do not multiply.
	metrics := grpcretry.WithMeterProvider(telemetry.Metrics)
	return []grpc.ServerOption{
		grpc.ChainUnaryInterceptor(grpcretry.UnaryServerInterceptor(metrics)),
		grpc.ChainStreamInterceptor(grpcretry.StreamServerInterceptor(metrics)),
		grpc.Creds(config.Credentials),
		grpc.StatsHandler(otelgrpc.NewServerHandler(telemetry.ForGRPC()...)),
		grpc.ChainUnaryInterceptor(limit(config.Capacity), config.Faults.interceptor(config.Log)),
		grpc.ConnectionTimeout(config.Drain.Timeout), // even Stop waits for a connection that says nothing, by default for 2 minutes
		grpc.KeepaliveParams(keepalive.ServerParameters{
			MaxConnectionAge:      5 * time.Minute,  // clients resolve the name again, and find new replicas
			MaxConnectionAgeGrace: 30 * time.Second, // longer than the longest call, which would be cut
			Time:                  time.Minute,      // finds clients that vanished
			Timeout:               10 * time.Second,
		}),
		grpc.KeepaliveEnforcementPolicy(keepalive.EnforcementPolicy{
			MinTime:             20 * time.Second, // less than the clients' keepalive time, or they are disconnected
			PermitWithoutStream: true,             // as the clients do
		}),
	}
}

// stop loses no call: new ones go elsewhere, those in flight are finished, up to a limit.
func stop(server *grpc.Server, ready *health.Server, drain ops.Drain) {
	ready.Shutdown() // NOT_SERVING, for good
	<-time.After(drain.Delay)
	cut := time.AfterFunc(drain.Timeout, server.Stop) // a stream that never ends must not keep the process alive
	defer cut.Stop()
	server.GracefulStop()
}
