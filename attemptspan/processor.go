// Package attemptspan numbers the spans of attempts: with it, a call that was retried
// twice shows in Jaeger as three different attempts and not as three equal spans.
//
//	provider := trace.NewTracerProvider(
//		trace.WithSpanProcessor(attemptspan.NewProcessor()),
//		trace.WithBatcher(exporter))
//
// The spans themselves come from what traces gRPC anyway: otelgrpc as a stats handler, or
// grpc-go's own stats/opentelemetry. The package is a module of its own because it needs
// the OpenTelemetry SDK, which grpcretry does without.
//
// # What is written on which span
//
//	key                             constant               value
//	grpcretry.attempt.number        telemetry.AttrAttemptNumber  int: 1 for the first attempt of a call
//	grpcretry.attempt.hedge         AttrHedge              bool: only on a hedge, and then true
//	grpcretry.attempt.wait_ms       AttrWait               int: the wait before the attempt, in ms; not on the first
//	grpcretry.attempt.wait_source   AttrWaitSource         string: such as backoff, pushback or connect; not on the first
//
// The sources are those of [grpcretry.WaitSource]. The wait is the one decided on, rounded
// down to a millisecond; with connect, it is what the call waited for a connection, and the
// backoff after that. It has another key than
// the wait on the event that an attempt leaves on the call's span, [telemetry.AttrWait],
// because that one is the wait after it.
//
// They are written on the spans of the RPC that the attempt is, and on no others that
// begin in its context, such as those of a token fetched by credentials:
//
//   - the client span of otelgrpc, and any other span of kind client that has the name
//     which OpenTelemetry gives such spans, "pkg.Service/Method";
//   - the span "Attempt.pkg.Service.Method" of grpc-go's stats/opentelemetry, and
//     "Sent.pkg.Service.Method" where its interceptor runs once for each attempt, that is
//     where it is chained after that of grpcretry.
//
// gRPC's transparent retries are spans of their own below one attempt, with its number.
// A call without retries (Disable, or one attempt allowed) has no attempts to number.
//
// Samplers run before span processors, so none can go by these attributes.
package attemptspan

import (
	"context"
	"strings"

	"go.opentelemetry.io/otel/attribute"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/trace"

	"github.com/grpcretry/grpcretry"
	"github.com/grpcretry/grpcretry/telemetry"
)

// The attributes of an attempt's span, next to [telemetry.AttrAttemptNumber]; the package
// comment has the table of their values.
const (
	AttrHedge      = "grpcretry.attempt.hedge"
	AttrWait       = "grpcretry.attempt.wait_ms"
	AttrWaitSource = "grpcretry.attempt.wait_source"
)

// NewProcessor returns the span processor that numbers the spans of attempts. It keeps
// nothing and exports nothing, so one may serve any number of providers, its place among
// their processors does not matter, and its methods never fail. It is safe for concurrent
// use. To a span outside of an attempt it costs one look at the context.
func NewProcessor() sdktrace.SpanProcessor { return processor{} }

type processor struct{}

// OnStart writes the attributes of the attempt, if the span is that of its RPC.
func (processor) OnStart(parent context.Context, span sdktrace.ReadWriteSpan) {
	a, ok := grpcretry.AttemptFromContext(parent)
	if ok && isRPC(span, strings.TrimPrefix(a.Method, "/")) {
		span.SetAttributes(attributes(a)...)
	}
}

// OnEnd does nothing.
func (processor) OnEnd(sdktrace.ReadOnlySpan) {}

// Shutdown does nothing.
func (processor) Shutdown(context.Context) error { return nil }

// ForceFlush does nothing.
func (processor) ForceFlush(context.Context) error { return nil }

func attributes(a grpcretry.Attempt) []attribute.KeyValue {
	attrs := append(make([]attribute.KeyValue, 0, 4), attribute.Int(telemetry.AttrAttemptNumber, a.Number))
	if a.Hedge {
		attrs = append(attrs, attribute.Bool(AttrHedge, true))
	}
	if a.WaitSource != grpcretry.WaitNone {
		attrs = append(attrs,
			attribute.Int64(AttrWait, a.Wait.Milliseconds()),
			attribute.String(AttrWaitSource, a.WaitSource.String()))
	}
	return attrs
}

// Who makes the spans, by the name of the tracer.
const (
	scopeOtelgrpc = "go.opentelemetry.io/contrib/instrumentation/google.golang.org/grpc/otelgrpc"
	scopeGRPCGo   = "grpc-go"
)

// isRPC says whether the span is that of an RPC of method, "pkg.Service/Method". What a
// span has at its start is its name, kind, tracer and first attributes; the attributes
// change from one release of the conventions to the next, and grpc-go sets none.
func isRPC(span sdktrace.ReadOnlySpan, method string) bool {
	if span.Name() == method {
		return span.SpanKind() == trace.SpanKindClient ||
			span.InstrumentationScope().Name == scopeOtelgrpc // which can be told another kind
	}
	if span.InstrumentationScope().Name != scopeGRPCGo {
		return false
	}
	_, dotted, _ := strings.Cut(span.Name(), ".")
	return dotted == strings.ReplaceAll(method, "/", ".")
}
