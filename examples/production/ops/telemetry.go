// Package ops has what every service needs, server or client: traces, metrics, logs, HTTP ports and an
// orderly end.
package ops

import (
	"context"
	"errors"
	"fmt"
	"os"

	"github.com/prometheus/client_golang/prometheus"
	"go.opentelemetry.io/contrib/instrumentation/google.golang.org/grpc/otelgrpc"
	"go.opentelemetry.io/contrib/instrumentation/google.golang.org/grpc/otelgrpc/filters"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/exporters/otlp/otlpmetric/otlpmetricgrpc"
	"go.opentelemetry.io/otel/exporters/otlp/otlptrace/otlptracegrpc"
	otelprom "go.opentelemetry.io/otel/exporters/prometheus"
	"go.opentelemetry.io/otel/propagation"
	sdkmetric "go.opentelemetry.io/otel/sdk/metric"
	"go.opentelemetry.io/otel/sdk/resource"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"

	"github.com/grpcretry/grpcretry/attemptspan"
)

// Telemetry is the destination of a program's traces and metrics. It is passed to those who need it, not
// made global, so that nothing records to a provider that was set too late.
type Telemetry struct {
	Traces     *sdktrace.TracerProvider
	Metrics    *sdkmetric.MeterProvider
	Propagator propagation.TextMapPropagator
	Prometheus *prometheus.Registry // for /metrics
}

// NewTelemetry obeys OpenTelemetry's variables, such as OTEL_EXPORTER_OTLP_ENDPOINT,
// OTEL_SERVICE_NAME, OTEL_TRACES_SAMPLER and OTEL_BSP_SCHEDULE_DELAY.
func NewTelemetry(ctx context.Context, service string) (*Telemetry, error) {
	identity, err := resource.New(ctx,
		resource.WithAttributes(attribute.String("service.name", service)),
		resource.WithTelemetrySDK(),
		resource.WithFromEnv()) // last, because the environment knows the deployment better
	if err != nil {
		return nil, fmt.Errorf("resource: %w", err)
	}
	registry := prometheus.NewRegistry()
	pull, err := otelprom.New(otelprom.WithRegisterer(registry), otelprom.WithoutScopeInfo())
	if err != nil {
		return nil, fmt.Errorf("exporter for Prometheus: %w", err)
	}
	traces := []sdktrace.TracerProviderOption{
		sdktrace.WithResource(identity),
		sdktrace.WithSpanProcessor(attemptspan.NewProcessor()), // says which attempt a client span is
	}
	metrics := []sdkmetric.Option{sdkmetric.WithResource(identity), sdkmetric.WithReader(pull)}

	// Without an endpoint nothing is sent: a laptop has no collector, and each export would log an error.
	if os.Getenv("OTEL_EXPORTER_OTLP_ENDPOINT") != "" {
		spans, err := otlptracegrpc.New(ctx)
		if err != nil {
			return nil, fmt.Errorf("traces: %w", err)
		}
		push, err := otlpmetricgrpc.New(ctx)
		if err != nil {
			return nil, fmt.Errorf("metrics: %w", err)
		}
		traces = append(traces, sdktrace.WithBatcher(spans))
		// Most companies want one of the two, pull or push: delete the other.
		metrics = append(metrics, sdkmetric.WithReader(sdkmetric.NewPeriodicReader(push)))
	}
	return &Telemetry{
		Traces:     sdktrace.NewTracerProvider(traces...),
		Metrics:    sdkmetric.NewMeterProvider(metrics...),
		Propagator: propagation.TraceContext{},
		Prometheus: registry,
	}, nil
}

// ForGRPC are the options for otelgrpc's stats handlers, which make a span for each attempt.
func (t *Telemetry) ForGRPC() []otelgrpc.Option {
	return []otelgrpc.Option{
		otelgrpc.WithTracerProvider(t.Traces),
		otelgrpc.WithMeterProvider(t.Metrics),
		otelgrpc.WithPropagators(t.Propagator),                  // otherwise the server's spans are traces of their own
		otelgrpc.WithFilter(filters.Not(filters.HealthCheck())), // health checks would be most of the traces
	}
}

// Flush sends what has not been sent yet: the last seconds before an end are the ones worth seeing.
func (t *Telemetry) Flush(ctx context.Context) error {
	return errors.Join(t.Traces.Shutdown(ctx), t.Metrics.Shutdown(ctx))
}
