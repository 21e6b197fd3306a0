package bench

import (
	"context"
	"io"
	"log/slog"
	"testing"
	"time"

	sdkmetric "go.opentelemetry.io/otel/sdk/metric"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/trace"

	"github.com/grpcretry/grpcretry"
	"github.com/grpcretry/grpcretry/debug"
	echov1 "github.com/grpcretry/grpcretry/proto/echo/v1"
)

// A feature is something of ours that can be switched on.
type feature struct {
	name    string
	options func(testing.TB) []grpcretry.Option
	span    bool // the caller's context has a span that records
	page    bool
	chained bool // the interceptor is chained by hand, and not by DialOptions
}

// features are alone, but for together, which is all before it.
var features = []feature{
	{name: "none"},
	{name: "span", span: true},
	{name: "callspan", options: callSpan},
	{name: "metrics", options: metrics},
	{name: "observer", options: observer},
	{name: "logger", options: logger},
	{name: "page", page: true},
	{name: "hedging", options: hedging},
	{name: "together", span: true, page: true, options: together},
	{name: "method", options: ofMethod},
	{name: "chained", chained: true},
}

// BenchmarkFeature is what each of our features adds to the interceptor alone, for a call
// that succeeds at once and for one with a retry.
func BenchmarkFeature(b *testing.B) {
	for _, retries := range []struct {
		name     string
		failures int64
	}{{"retries=0", 0}, {"retries=1", 1}} {
		b.Run(retries.name, func(b *testing.B) {
			var contenders []contender
			for _, f := range features {
				contenders = append(contenders, contender{"feature=" + f.name, f.ready(b, retries.failures)})
			}
			inTurns(b, contenders, perOperation)
		})
	}
}

// ready makes a client with the feature, whose calls fail so many times first.
func (f *feature) ready(b *testing.B, failures int64) (do func(times int)) {
	options := ourOptions(atOnce)
	if !f.chained {
		options = asDialed(options)
	}
	if f.options != nil {
		options = append(options, f.options(b)...)
	}
	retrier, err := grpcretry.New(options...)
	if err != nil {
		b.Fatal(err)
	}
	if f.page {
		debug.Handler(retrier)
	}
	invoker := succeed
	if failures > 0 {
		invoker = failFirst(failures)
	}
	intercept, cc, opts := retrier.UnaryClientInterceptor(), unconnected(b), callOptions(false)
	req, reply := request(0), new(echov1.EchoResponse)
	spans := &callerSpans{ctx: callContext(b)}
	if f.span {
		spans.tracer = recording(b).Tracer("bench")
	}
	return serial(b, func() func() error {
		return func() error {
			return intercept(spans.next(), echov1.EchoService_Echo_FullMethodName, req, reply, cc, invoker, opts...)
		}
	})
}

// callerSpans are the spans of callers, each of which makes some calls: so that starting
// and ending them, which is not ours, hardly shows.
type callerSpans struct {
	ctx    context.Context // without a span
	tracer trace.Tracer    // nil for no spans

	current context.Context
	span    trace.Span
	calls   int
}

func (s *callerSpans) next() context.Context {
	if s.tracer == nil {
		return s.ctx
	}
	const callsOfASpan = 64
	if s.calls%callsOfASpan == 0 {
		if s.span != nil {
			s.span.End()
		}
		s.current, s.span = s.tracer.Start(s.ctx, "request")
	}
	s.calls++
	return s.current
}

// recording keeps every span until it ends, and exports none.
func recording(testing.TB) trace.TracerProvider {
	return sdktrace.NewTracerProvider(sdktrace.WithSampler(sdktrace.AlwaysSample()))
}

func callSpan(tb testing.TB) []grpcretry.Option {
	return []grpcretry.Option{grpcretry.WithTracerProvider(recording(tb)), grpcretry.WithCallSpan(true)}
}

func metrics(tb testing.TB) []grpcretry.Option {
	provider := sdkmetric.NewMeterProvider(sdkmetric.WithReader(sdkmetric.NewManualReader()))
	tb.Cleanup(func() { _ = provider.Shutdown(context.Background()) })
	return []grpcretry.Option{grpcretry.WithMeterProvider(provider)}
}

func observer(testing.TB) []grpcretry.Option {
	return []grpcretry.Option{grpcretry.WithObserver(func(context.Context, grpcretry.Event) {})}
}

// logger is at the level that programs run with: retries are logged at debug level.
func logger(testing.TB) []grpcretry.Option {
	return []grpcretry.Option{grpcretry.WithLogger(slog.New(slog.NewTextHandler(io.Discard, nil)))}
}

// hedging hedges no call here: none is as slow as that.
func hedging(testing.TB) []grpcretry.Option {
	return []grpcretry.Option{grpcretry.WithHedging(grpcretry.Hedging{
		Delay: grpcretry.HedgeAfter(time.Minute), AllMethodsAreSafe: true,
	})}
}

func ofMethod(testing.TB) []grpcretry.Option {
	return []grpcretry.Option{grpcretry.WithMethod("/echo.v1.EchoService/", grpcretry.WithMaxAttempts(attempts))}
}

func together(tb testing.TB) []grpcretry.Option {
	var options []grpcretry.Option
	for _, some := range []func(testing.TB) []grpcretry.Option{callSpan, metrics, observer, logger, hedging} {
		options = append(options, some(tb)...)
	}
	return options
}
