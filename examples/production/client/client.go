// Package client is an HTTP service that calls the gRPC server.
package client

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"net/http"
	"os"
	"sync/atomic"
	"time"

	"go.opentelemetry.io/contrib/instrumentation/google.golang.org/grpc/otelgrpc"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/keepalive"

	"github.com/grpcretry/grpcretry"
	"github.com/grpcretry/grpcretry/balancer"
	"github.com/grpcretry/grpcretry/debug"
	"github.com/grpcretry/grpcretry/examples/production/ops"
	echov1 "github.com/grpcretry/grpcretry/proto/echo/v1"
)

// DefaultInternal is on the loopback interface, because the debug page shows the server's messages.
const DefaultInternal = "127.0.0.1:9102"

// A Config has listeners instead of addresses, so that a taken port is an error before anything has started.
type Config struct {
	Public, Internal net.Listener
	Target           string // of the gRPC server; dns:/// resolves to all replicas, which the balancer needs
	Credentials      credentials.TransportCredentials
	Timeout          time.Duration // the deadline of each request, and of all calls made for it
	Log              *slog.Logger
	Settings         string           // file of the settings that operators may change; empty: none
	Reload           <-chan os.Signal // read Settings again
	Drain            ops.Drain
}

// Run serves until ctx ends and the requests in flight are finished.
func Run(ctx context.Context, config Config) error {
	telemetry, err := ops.NewTelemetry(ctx, "shop-client")
	if err != nil {
		return err
	}
	// One Retrier for all connections of the program, because they then share budgets and metrics.
	retrier, err := grpcretry.New(append(policies(),
		grpcretry.WithCallSpan(true), // otherwise attempts are traces of their own in background work
		grpcretry.WithTracerProvider(telemetry.Traces),
		grpcretry.WithMeterProvider(telemetry.Metrics),
		grpcretry.WithLogger(config.Log))...)
	if err != nil {
		return err
	}
	if err := reload(config.Settings, retrier); err != nil {
		return err
	}
	conn, err := dial(config, retrier, telemetry)
	if err != nil {
		return err
	}
	err = serve(ctx, config, retrier, conn, telemetry)

	// Telemetry last, because everything above still records.
	flush, cancel := context.WithTimeout(context.WithoutCancel(ctx), ops.FlushTimeout)
	defer cancel()
	return errors.Join(err, conn.Close(), telemetry.Flush(flush))
}

func dial(config Config, retrier *grpcretry.Retrier, telemetry *ops.Telemetry) (*grpc.ClientConn, error) {
	// First the retry interceptors, so that your own interceptors run for each attempt.
	return grpc.NewClient(config.Target, append(retrier.DialOptions(),
		balancer.DialOption(), // a retry goes to another replica
		grpc.WithTransportCredentials(config.Credentials),
		grpc.WithStatsHandler(otelgrpc.NewClientHandler(telemetry.ForGRPC()...)),
		grpc.WithKeepaliveParams(keepalive.ClientParameters{
			Time:                30 * time.Second, // finds servers that vanished; servers must permit it
			Timeout:             5 * time.Second,
			PermitWithoutStream: true, // so that the first call after a quiet hour meets no dead connection
		}))...)
}

// serve opens the public and the internal port.
func serve(ctx context.Context, config Config, retrier *grpcretry.Retrier, conn *grpc.ClientConn, telemetry *ops.Telemetry) error {
	page := debug.Handler(retrier)
	defer page.Close()
	var stopping atomic.Bool
	mux := telemetry.InternalMux()
	mux.Handle("GET /debug/grpcretry", page) // never on the public port
	mux.HandleFunc("GET /ready", func(w http.ResponseWriter, _ *http.Request) {
		if stopping.Load() {
			w.WriteHeader(http.StatusServiceUnavailable)
		}
	})
	internal := ops.ServeHTTP(config.Internal, mux)
	api := &api{echov1.NewEchoServiceClient(conn), config.Timeout, config.Log}
	public := ops.ServeHTTP(config.Public, api.routes(telemetry))
	config.Log.Info("serving", "http", config.Public.Addr().String(), "internal", config.Internal.Addr().String(), "target", config.Target)

	err := wait(ctx, config, retrier, public.Failed, internal.Failed)

	// Calls in flight keep the connection and their retries until they are finished.
	config.Log.Info("stopping", "delay", config.Drain.Delay.String(), "timeout", config.Drain.Timeout.String())
	stopping.Store(true)
	<-time.After(config.Drain.Delay)
	drain, cancel := context.WithTimeout(context.WithoutCancel(ctx), config.Drain.Timeout)
	defer cancel()
	return errors.Join(err, public.Shutdown(drain), internal.Shutdown(drain))
}

// wait obeys reloads until the program is asked to stop, or a port fails.
func wait(ctx context.Context, config Config, retrier *grpcretry.Retrier, public, internal <-chan error) error {
	for {
		select {
		case <-ctx.Done():
			return nil
		case err := <-public:
			return err
		case err := <-internal:
			return err
		case <-config.Reload:
			if err := reload(config.Settings, retrier); err != nil {
				config.Log.Error("settings are unchanged", "error", err) // a typo must not end the program
				continue
			}
			config.Log.Info("settings reloaded", "file", config.Settings)
		}
	}
}
