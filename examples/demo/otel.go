package main

import (
	"context"
	"fmt"
	"io"
	"os"
	"sync/atomic"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/exporters/otlp/otlptrace/otlptracegrpc"
	"go.opentelemetry.io/otel/sdk/resource"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/trace"
	"go.opentelemetry.io/otel/trace/noop"
)

const serviceName = "grpcretry-demo"

// telemetry is where the traces go: to the collector that the environment names, or
// nowhere.
type telemetry struct {
	provider trace.TracerProvider

	endpoint string                   // empty: nowhere
	sdk      *sdktrace.TracerProvider // nil: likewise
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
		return &telemetry{provider: noop.NewTracerProvider()}, nil
	}
	otlp, err := otlptracegrpc.New(ctx)
	if err != nil {
		return nil, fmt.Errorf("traces to %s: %w", endpoint, err)
	}
	exporter := &countingExporter{SpanExporter: otlp}
	sdk := sdktrace.NewTracerProvider(
		sdktrace.WithBatcher(exporter),
		sdktrace.WithResource(resource.NewSchemaless(attribute.String("service.name", serviceName))),
	)
	return &telemetry{provider: sdk, endpoint: endpoint, sdk: sdk, exporter: exporter}, nil
}

func (t *telemetry) tracer() trace.Tracer { return t.provider.Tracer(serviceName) }

// finish sends what has not been sent, and says what became of the traces.
func (t *telemetry) finish(ctx context.Context, out io.Writer) error {
	if t.sdk == nil {
		fmt.Fprintln(out, "\n  To see the same in Jaeger, with one listening there:")
		fmt.Fprintln(out, "    OTEL_EXPORTER_OTLP_ENDPOINT=http://localhost:4317 go run .")
		return nil
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
	defer cancel()
	if err := t.sdk.Shutdown(ctx); err != nil {
		return fmt.Errorf("traces to %s (http:// is for a collector without TLS): %w", t.endpoint, err)
	}
	if failed := t.exporter.failed.Load(); failed > 0 {
		return fmt.Errorf("traces to %s: %d spans were not delivered", t.endpoint, failed)
	}
	fmt.Fprintf(out, "\n  Sent %d spans to %s,\n  one trace for each scene; look for the service %s.\n",
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
