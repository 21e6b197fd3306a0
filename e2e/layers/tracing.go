package main

import (
	"context"
	"fmt"
	"io"
	"net"
	"time"

	"go.opentelemetry.io/contrib/instrumentation/google.golang.org/grpc/otelgrpc"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/exporters/otlp/otlptrace/otlptracegrpc"
	"go.opentelemetry.io/otel/propagation"
	"go.opentelemetry.io/otel/sdk/resource"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"google.golang.org/grpc"

	"github.com/grpcretry/grpcretry"
	"github.com/grpcretry/grpcretry/attemptspan"
	echov1 "github.com/grpcretry/grpcretry/proto/echo/v1"
)

// tracing is how one process traces its calls: spans of attempts and requests by otelgrpc, which
// pass W3C trace contexts on, and spans of calls and waits by the library. A nil tracing does
// nothing.
type tracing struct{ provider *sdktrace.TracerProvider }

// startTracing sends spans of the service to a receiver of OTLP. It returns nil for an empty address.
func startTracing(otlp, service string) (*tracing, error) {
	if otlp == "" {
		return nil, nil
	}
	exporter, err := otlptracegrpc.New(context.Background(), otlptracegrpc.WithEndpoint(otlp), otlptracegrpc.WithInsecure())
	if err != nil {
		return nil, err
	}
	return &tracing{sdktrace.NewTracerProvider(
		sdktrace.WithSampler(sdktrace.AlwaysSample()),
		sdktrace.WithSpanProcessor(attemptspan.NewProcessor()),
		sdktrace.WithBatcher(exporter),
		sdktrace.WithResource(resource.NewSchemaless(attribute.String("service.name", service))))}, nil
}

func (t *tracing) otelgrpc() []otelgrpc.Option {
	return []otelgrpc.Option{otelgrpc.WithTracerProvider(t.provider), otelgrpc.WithPropagators(propagation.TraceContext{})}
}

func (t *tracing) serverOptions() []grpc.ServerOption {
	if t == nil {
		return nil
	}
	return []grpc.ServerOption{grpc.StatsHandler(otelgrpc.NewServerHandler(t.otelgrpc()...))}
}

func (t *tracing) dialOptions() []grpc.DialOption {
	if t == nil {
		return nil
	}
	return []grpc.DialOption{grpc.WithStatsHandler(otelgrpc.NewClientHandler(t.otelgrpc()...))}
}

// options are those of the library.
func (t *tracing) options() []grpcretry.Option {
	if t == nil {
		return nil
	}
	return []grpcretry.Option{grpcretry.WithTracerProvider(t.provider), grpcretry.WithCallSpan(true)}
}

// stop sends what has not been sent yet.
func (t *tracing) stop() error {
	if t == nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	return t.provider.Shutdown(ctx)
}

// traceCalls makes one call while D is down, for each of two setups, and prints the IDs of their
// traces when all spans have been sent.
func traceCalls(ctx context.Context, otlp string, out io.Writer) error {
	receiver, err := net.DialTimeout("tcp", otlp, 5*time.Second) // an exporter only logs that there is none
	if err != nil {
		return fmt.Errorf("no receiver of traces: %w", err)
	}
	_ = receiver.Close()
	for _, name := range []string{everything, oneAttempt} {
		id, err := traceCall(ctx, name, otlp)
		if err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
		fmt.Fprintf(out, "%s: trace %s\n", name, id)
	}
	return nil
}

// traceCall makes a call that fails, and returns the ID of its trace.
func traceCall(ctx context.Context, setup, otlp string) (id string, err error) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	services, err := startServices(ctx, setup, otlp, cancel)
	if err != nil {
		return "", err
	}
	defer services.stop()
	if _, err := services.d.become(ctx, down); err != nil {
		return "", err
	}
	client, err := startTracing(otlp, "client")
	if err != nil {
		return "", err
	}
	defer func() {
		if stopErr := client.stop(); err == nil && stopErr != nil {
			err = fmt.Errorf("sending traces to %s: %w", otlp, stopErr)
		}
	}()
	cc, err := dial(services.address.a, append(client.dialOptions(), grpc.WithDisableRetry())...)
	if err != nil {
		return "", err
	}
	defer cc.Close()
	ctx, span := client.provider.Tracer("layers").Start(ctx, "one call, "+setup)
	defer span.End()
	ctx, cancelCall := context.WithTimeout(ctx, measured.deadline)
	defer cancelCall()
	if _, err := echov1.NewEchoServiceClient(cc).Echo(ctx, &echov1.EchoRequest{Sequence: 1}); err == nil {
		return "", fmt.Errorf("the call succeeded, although D is down")
	}
	if err := context.Cause(ctx); err != nil {
		return "", err
	}
	return span.SpanContext().TraceID().String(), nil
}
