// Package attemptspan names and numbers the spans of attempts, so that Jaeger shows a call that was
// retried twice as three different attempts rather than three identical spans.
//
//	provider := trace.NewTracerProvider(
//		trace.WithSpanProcessor(attemptspan.NewProcessor()),
//		trace.WithBatcher(exporter))
//
// The spans themselves come from otelgrpc as a stats handler, or from grpc-go's own
// stats/opentelemetry. The package is a module of its own because it needs the OpenTelemetry
// SDK, which grpcretry does not.
//
// # Names
//
//	pkg.Service/Method                  the first attempt of every call
//	attempt 2 pkg.Service/Method        a retry
//	hedge 2 pkg.Service/Method          a hedge
//	attempt 10+ pkg.Service/Method      every attempt from the tenth on
//
// OpenTelemetry's conventions say that the span of an RPC should have the name of the method
// (https://opentelemetry.io/docs/specs/semconv/rpc/rpc-spans/, section "Span name"), and that a name stands
// for a class of spans, not for a single one
// (https://opentelemetry.io/docs/specs/otel/trace/api/#span). Therefore the first attempt, which is the
// only one of nearly every call, keeps its name; a method has at most 18 further names, whatever the
// policy; and each is an action and its target, like OpenTelemetry's "GET /cart". The number comes
// first because Jaeger cuts long names off at the end. The attribute rpc.method stays as it is. To the
// names of grpc-go's own spans, such as "Attempt.pkg.Service.Method", the same words are added.
//
// Tools that group spans by name, such as a collector's spanmetrics connector, see retries and hedges
// as operations of their own. [WithNames] turns the names off, for this reason or another; the
// attributes stay. Samplers run before span processors and see the method's name.
//
// # Attributes
//
//	key                             constant                     value
//	grpcretry.attempt.number        telemetry.AttrAttemptNumber  int: 1 for the first attempt of a call
//	grpcretry.attempt.hedge         AttrHedge                    bool: true on a hedge, absent otherwise
//	grpcretry.attempt.wait_ms       AttrWait                     int: the wait before the attempt, in ms; absent on the first
//	grpcretry.attempt.wait_source   AttrWaitSource               string: such as backoff, pushback or hedge_delay; absent on the first
//
// The sources are those of [grpcretry.WaitSource]. The wait is the wait that was decided on,
// rounded down to a millisecond; with connect, it is the time that the call waited for a
// connection, plus the backoff after that. Its key differs from [telemetry.AttrWait], which is
// the wait after an attempt, on the attempt's event on the call's span.
//
// The attributes are set on the spans of the attempt's RPC, and of other calls of the same method that
// are made within it, but on no other spans that start in its context, such as those of a token that
// credentials fetch:
//
//   - the client span of otelgrpc, and any other span of kind client with OpenTelemetry's name
//     for such spans, "pkg.Service/Method";
//   - the span "Attempt.pkg.Service.Method" of grpc-go's stats/opentelemetry, and
//     "Sent.pkg.Service.Method" if its interceptor runs once for each attempt, because it is
//     chained after grpcretry's.
//
// gRPC's transparent retries have spans of their own below one attempt, with its number.
// A call without retries (Disable, or one attempt allowed) has no attempts to number.
//
// The spans "retry wait" of [grpcretry.WithCallSpan] belong to no attempt, and get no number.
//
// Samplers run before span processors, so they cannot use these attributes.
package attemptspan

import (
	"context"
	"strconv"
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

// NewProcessor returns the span processor that names and numbers the spans of attempts. It keeps and
// exports nothing, so one processor may serve any number of providers, once each. Its place among their
// processors does not matter, and its methods never fail. It is safe for concurrent use. A span
// outside of an attempt costs one look at the context.
func NewProcessor(opts ...Option) sdktrace.SpanProcessor {
	p := processor{names: true}
	for _, o := range opts {
		o.apply(&p)
	}
	return p
}

// An Option changes what a processor does.
type Option interface{ apply(*processor) }

type optionFunc func(*processor)

func (f optionFunc) apply(p *processor) { f(p) }

// WithNames sets whether the names of the spans begin with the attempt's number, from the second
// attempt on; otherwise spans have only the attributes. The package comment has the names, and the
// reasons for either.
//
// The default is true. A later WithNames replaces an earlier one.
func WithNames(on bool) Option {
	return optionFunc(func(p *processor) { p.names = on })
}

type processor struct{ names bool }

// OnStart sets the name and the attributes of the attempt, if the span is that of its RPC.
func (p processor) OnStart(parent context.Context, span sdktrace.ReadWriteSpan) {
	a, ok := grpcretry.AttemptFromContext(parent)
	if !ok || !isRPC(span, strings.TrimPrefix(a.Method, "/")) {
		return
	}
	span.SetAttributes(attributes(a)...)
	if p.names {
		span.SetName(nameOf(a, span.Name()))
	}
}

// OnEnd does nothing.
func (processor) OnEnd(sdktrace.ReadOnlySpan) {}

// Shutdown does nothing.
func (processor) Shutdown(context.Context) error { return nil }

// ForceFlush does nothing.
func (processor) ForceFlush(context.Context) error { return nil }

// mostNumbers limits how many names a method's spans may have.
const mostNumbers = 10

// nameOf returns the name of an attempt's span that is called name without this package.
func nameOf(a grpcretry.Attempt, name string) string {
	if a.Number <= 1 {
		return name
	}
	kind, number := "attempt ", strconv.Itoa(min(a.Number, mostNumbers))
	if a.Hedge {
		kind = "hedge "
	}
	if a.Number >= mostNumbers {
		number += "+"
	}
	return kind + number + " " + name
}

func attributes(a grpcretry.Attempt) []attribute.KeyValue {
	attrs := append(make([]attribute.KeyValue, 0, 4), attribute.Int(telemetry.AttrAttemptNumber, a.Number))
	if a.Hedge {
		attrs = append(attrs, attribute.Bool(AttrHedge, true))
	}
	if a.WaitSource != 0 {
		attrs = append(attrs,
			attribute.Int64(AttrWait, a.Wait.Milliseconds()),
			attribute.String(AttrWaitSource, a.WaitSource.String()))
	}
	return attrs
}

// The tracers that make the spans.
const (
	scopeOtelgrpc = "go.opentelemetry.io/contrib/instrumentation/google.golang.org/grpc/otelgrpc"
	scopeGRPCGo   = "grpc-go"
)

// isRPC reports whether the span is that of an RPC of method, "pkg.Service/Method". At its
// start a span has a name, a kind, a tracer and its first attributes; the attributes change from
// one release of the conventions to the next, and grpc-go sets none.
func isRPC(span sdktrace.ReadOnlySpan, method string) bool {
	if span.Name() == method {
		return span.SpanKind() == trace.SpanKindClient ||
			span.InstrumentationScope().Name == scopeOtelgrpc // whose spans may be set to another kind
	}
	if span.InstrumentationScope().Name != scopeGRPCGo {
		return false
	}
	_, dotted, _ := strings.Cut(span.Name(), ".")
	return dotted == strings.ReplaceAll(method, "/", ".")
}
