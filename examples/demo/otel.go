package main

import (
	"context"
	"fmt"
	"io"
	"os"
	"sync/atomic"
	"time"

	"go.opentelemetry.io/contrib/instrumentation/google.golang.org/grpc/otelgrpc"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/exporters/otlp/otlptrace/otlptracegrpc"
	"go.opentelemetry.io/otel/propagation"
	"go.opentelemetry.io/otel/sdk/resource"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/trace"
	"go.opentelemetry.io/otel/trace/noop"
	"google.golang.org/grpc"

	"github.com/grpcretry/grpcretry/attemptspan"
)

// The names that client and server have in traces.
const (
	serviceName = "grpcretry-demo"
	serverName  = "grpcretry-demo-server"
)

// telemetry is where the traces go: to the collector that the environment names, or
// nowhere.
type telemetry struct {
	client trace.TracerProvider
	server trace.TracerProvider

	endpoint string // empty: nowhere
	sdks     []*sdktrace.TracerProvider
	exporter *countingExporter
}

// newTelemetry reads the standard variables of OpenTelemetry. The exporter reads the
// others itself, such as OTEL_EXPORTER_OTLP_HEADERS.
func newTelemetry(ctx context.Context) (*telemetry, error) {
	endpoint := os.Getenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
	if endpoint == "" {
		endpoint = os.Getenv("OTEL_EXPORTER_OTLP_ENDPOINT")
	}
	if endpoint == "" {
		return nowhere(), nil
	}
	otlp, err := otlptracegrpc.New(ctx)
	if err != nil {
		return nil, fmt.Errorf("traces to %s: %w", endpoint, err)
	}
	t := &telemetry{endpoint: endpoint, exporter: &countingExporter{SpanExporter: otlp}}
	t.client, t.server = t.provider(serviceName), t.provider(serverName)
	return t, nil
}

func nowhere() *telemetry {
	return &telemetry{client: noop.NewTracerProvider(), server: noop.NewTracerProvider()}
}

// provider makes the provider of one service. The processor gives the spans of attempts their
// numbers.
func (t *telemetry) provider(service string) trace.TracerProvider {
	sdk := sdktrace.NewTracerProvider(
		sdktrace.WithSpanProcessor(attemptspan.NewProcessor()),
		sdktrace.WithBatcher(t.exporter),
		sdktrace.WithResource(resource.NewSchemaless(attribute.String("service.name", service))),
	)
	t.sdks = append(t.sdks, sdk)
	return sdk
}

func (t *telemetry) tracer() trace.Tracer { return t.client.Tracer(serviceName) }

// dialOptions make a span of each attempt. grpcretry makes those of calls and waits.
func (t *telemetry) dialOptions() []grpc.DialOption {
	return []grpc.DialOption{grpc.WithStatsHandler(otelgrpc.NewClientHandler(
		otelgrpc.WithTracerProvider(t.client), otelgrpc.WithPropagators(propagation.TraceContext{})))}
}

// serverOptions make a span of each request, below that of the attempt.
func (t *telemetry) serverOptions() []grpc.ServerOption {
	return []grpc.ServerOption{grpc.StatsHandler(otelgrpc.NewServerHandler(
		otelgrpc.WithTracerProvider(t.server), otelgrpc.WithPropagators(propagation.TraceContext{})))}
}

// finish sends what has not been sent, and says what became of the traces.
func (t *telemetry) finish(ctx context.Context, out io.Writer) error {
	if t.endpoint == "" {
		fmt.Fprintln(out, "\n  To see every call, attempt and wait in Jaeger, with one listening there:")
		fmt.Fprintln(out, "    OTEL_EXPORTER_OTLP_ENDPOINT=http://localhost:4317 make demo")
		return nil
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
	defer cancel()
	for _, sdk := range t.sdks { // the first stops the exporter, which serves both
		if err := sdk.ForceFlush(ctx); err != nil {
			return fmt.Errorf("traces to %s (http:// is for a collector without TLS): %w", t.endpoint, err)
		}
	}
	for _, sdk := range t.sdks {
		if err := sdk.Shutdown(ctx); err != nil {
			return fmt.Errorf("traces to %s: %w", t.endpoint, err)
		}
	}
	if failed := t.exporter.failed.Load(); failed > 0 {
		return fmt.Errorf("traces to %s: %d spans were not delivered", t.endpoint, failed)
	}
	fmt.Fprintf(out, "\n  Sent %d spans to %s,\n  one trace for each scene; look for the service %s.\n"+
		"  Scene 2 shows a call, its attempts with their numbers, and a bar for each wait.\n",
		t.exporter.sent.Load(), t.endpoint, serviceName)
	return nil
}

// A countingExporter knows how many spans it has delivered.
type countingExporter struct {
	sdktrace.SpanExporter
	sent, failed atomic.Int64
}

// ExportSpans hands spans on, and counts them.
func (e *countingExporter) ExportSpans(ctx context.Context, spans []sdktrace.ReadOnlySpan) error {
	err := e.SpanExporter.ExportSpans(ctx, spans)
	if err != nil {
		e.failed.Add(int64(len(spans)))
	} else {
		e.sent.Add(int64(len(spans)))
	}
	return err
}
