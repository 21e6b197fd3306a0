package grpcretry

import (
	"context"
	"strings"
	"sync"

	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"
	"go.opentelemetry.io/otel/trace"

	"github.com/grpcretry/grpcretry/telemetry"
)

// This file has what the server interceptors report.

// showRetry marks the span of a request that is retried.
func showRetry(ctx context.Context, by retriedBy) {
	if span := trace.SpanFromContext(ctx); span.IsRecording() {
		span.SetAttributes(attribute.String(telemetry.AttrRetriedBy, string(by)),
			attribute.Int(telemetry.AttrPreviousAttempts, PreviousAttempts(ctx)))
	}
}

// showNoRetry adds the event of a response that says "do not retry".
func showNoRetry(ctx context.Context) {
	if span := trace.SpanFromContext(ctx); span.IsRecording() {
		span.AddEvent(telemetry.SpanEventNoRetry)
	}
}

// serverMetrics are the instruments of the server interceptors. The methods of a nil serverMetrics do
// nothing.
type serverMetrics struct {
	retries, noRetries metric.Int64Counter

	mu      sync.Mutex
	methods map[string]string // guarded by mu; by the name that clients use
}

// maxServerMethods limits the methods that have series of their own. OpenTelemetry keeps at most 2000 series of a
// metric, and there are two for each method.
const maxServerMethods = 900

// newServerMetrics returns nil if the provider makes no instruments: then nothing is lost but the
// metrics. OpenTelemetry reports the error.
func newServerMetrics(mp metric.MeterProvider) *serverMetrics {
	if mp == nil {
		mp = otel.GetMeterProvider()
	}
	meter := mp.Meter(instrumentationName)
	m := &serverMetrics{methods: map[string]string{}}
	counter := func(name, unit, description string) metric.Int64Counter {
		c, err := meter.Int64Counter(name, metric.WithUnit(unit), metric.WithDescription(description))
		if err != nil {
			otel.Handle(err)
		}
		return c
	}
	m.retries = counter(telemetry.MetricServerRetries, "{request}", "Requests that were retries, or were made for one.")
	m.noRetries = counter(telemetry.MetricServerNoRetries, "{response}", `Responses that said "do not retry", because a call made for the request had given up.`)
	if m.retries == nil || m.noRetries == nil {
		return nil
	}
	return m
}

// retry counts a request that is retried.
func (m *serverMetrics) retry(method string, by retriedBy) {
	if m != nil {
		m.retries.Add(context.Background(), 1,
			metric.WithAttributes(attribute.String(attrMethod, m.label(method)), attribute.String(telemetry.AttrRetriedBy, string(by))))
	}
}

// noRetry counts a response that says "do not retry".
func (m *serverMetrics) noRetry(method string) {
	if m != nil {
		m.noRetries.Add(context.Background(), 1, metric.WithAttributes(attribute.String(attrMethod, m.label(method))))
	}
}

// label returns a method as metrics show it. The number of methods is limited, because a server that
// handles unknown methods gets any number of names from its clients.
func (m *serverMetrics) label(method string) string {
	m.mu.Lock()
	defer m.mu.Unlock()
	label, known := m.methods[method]
	if known {
		return label
	}
	if len(m.methods) >= maxServerMethods || len(method) > maxMetricName {
		return other
	}
	label = printable(strings.TrimPrefix(method, "/"))
	m.methods[strings.Clone(method)] = label
	return label
}
