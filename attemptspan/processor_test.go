package attemptspan

import (
	"context"
	"slices"
	"strings"
	"testing"
	"time"

	"go.opentelemetry.io/contrib/instrumentation/google.golang.org/grpc/otelgrpc"
	"go.opentelemetry.io/otel/attribute"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/trace"
	"google.golang.org/grpc"

	"github.com/grpcretry/grpcretry"
	echov1 "github.com/grpcretry/grpcretry/proto/echo/v1"
)

func TestAttributes(t *testing.T) {
	for _, tt := range []struct {
		name string
		a    grpcretry.Attempt
		want string
	}{
		{"first", grpcretry.Attempt{Number: 1}, "attempt.number=1"},
		{"after a backoff", grpcretry.Attempt{Number: 2, Wait: 1999 * time.Microsecond, WaitSource: grpcretry.WaitBackoff},
			"attempt.number=2 attempt.wait_ms=1 attempt.wait_source=backoff"},
		{"at once, as the server asked", grpcretry.Attempt{Number: 3, WaitSource: grpcretry.WaitPushback},
			"attempt.number=3 attempt.wait_ms=0 attempt.wait_source=pushback"},
		{"after a RetryInfo", grpcretry.Attempt{Number: 4, Wait: time.Minute, WaitSource: grpcretry.WaitRetryInfo},
			"attempt.number=4 attempt.wait_ms=60000 attempt.wait_source=retry_info"},
		{"hedge", grpcretry.Attempt{Number: 2, Hedge: true}, "attempt.number=2 attempt.hedge=true"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if got := text(attributes(tt.a)); got != tt.want {
				t.Errorf("attributes = %s, want %s", got, tt.want)
			}
		})
	}
}

// The names are a contract with dashboards and saved searches, too. There are few of them, whatever the
// number of attempts.
func TestNames(t *testing.T) {
	for _, tt := range []struct {
		a    grpcretry.Attempt
		want string
	}{
		{grpcretry.Attempt{Number: 1}, "pkg.Service/Method"},
		{grpcretry.Attempt{Number: 2}, "attempt 2 pkg.Service/Method"},
		{grpcretry.Attempt{Number: 3, Hedge: true}, "hedge 3 pkg.Service/Method"},
		{grpcretry.Attempt{Number: 9}, "attempt 9 pkg.Service/Method"},
		{grpcretry.Attempt{Number: 10}, "attempt 10+ pkg.Service/Method"},
		{grpcretry.Attempt{Number: 1000, Hedge: true}, "hedge 10+ pkg.Service/Method"},
	} {
		if got := nameOf(tt.a, "pkg.Service/Method"); got != tt.want {
			t.Errorf("the name of %+v = %q, want %q", tt.a, got, tt.want)
		}
	}
}

func TestNamesMayStayAsTheyAre(t *testing.T) {
	processor := NewProcessor(WithNames(true), WithNames(false))
	inBubbleWith(t, processor, 1, func(t *testing.T, f *fixture) {
		f.below(t, echo, f.client(append(f.retries(), f.withOtelgrpc())...))
		wantTree(t, f, `
caller internal 0s-1s Unset
  @0s attempt.number=1 UNAVAILABLE decision=retry wait_ms=1000 wait_source=backoff
  @1s attempt.number=2 OK decision=success
  pkg.Service/Echo client 0s-0s Error attempt.number=1 UNAVAILABLE
  pkg.Service/Echo client 1s-1s Unset attempt.number=2 attempt.wait_ms=1000 attempt.wait_source=backoff OK
`)
	})
}

// slowFirst are credentials that take until the end of the first attempt.
type slowFirst struct{}

func (slowFirst) GetRequestMetadata(ctx context.Context, _ ...string) (map[string]string, error) {
	if a, _ := grpcretry.AttemptFromContext(ctx); a.Number == 1 {
		<-ctx.Done()
		return nil, ctx.Err()
	}
	return nil, nil
}

func (slowFirst) RequireTransportSecurity() bool { return false }

// A hedge is called so, but not the attempt of a hedged call that is sent while no other is in flight.
func TestHedges(t *testing.T) {
	hedging := grpcretry.WithPolicy(grpcretry.Policy{MaxAttempts: 3, Hedging: &grpcretry.Hedging{
		Delay: grpcretry.HedgeAfter(time.Second), AllMethodsAreSafe: true, Budget: grpcretry.Unlimited}})
	inBubble(t, 1, func(t *testing.T, f *fixture) {
		f.below(t, echo, f.client(append(f.retries(hedging), f.withOtelgrpc(), grpc.WithPerRPCCredentials(slowFirst{}))...))
		wantTree(t, f, `
caller internal 0s-2s Unset
  @1s attempt.number=2 UNAVAILABLE decision=stop attempt.hedge=true attempt.sent_after=hedge_delay reason=in_flight
  @2s attempt.number=1 CANCELLED decision=lost
  @2s attempt.number=3 OK decision=success attempt.hedge=true attempt.sent_after=hedge_delay
  pkg.Service/Echo client 0s-2s Error attempt.number=1 UNAUTHENTICATED
  hedge 2 pkg.Service/Echo client 1s-1s Error attempt.number=2 attempt.hedge=true attempt.wait_ms=1000 attempt.wait_source=hedge_delay UNAVAILABLE
  hedge 3 pkg.Service/Echo client 2s-2s Unset attempt.number=3 attempt.hedge=true attempt.wait_ms=1000 attempt.wait_source=hedge_delay OK
`)
	})
	inBubble(t, 1, func(t *testing.T, f *fixture) {
		f.below(t, echo, f.client(append(f.retries(hedging), f.withOtelgrpc())...))
		wantTree(t, f, `
caller internal 0s-1s Unset
  @0s attempt.number=1 UNAVAILABLE decision=retry wait_ms=1000 wait_source=backoff
  @1s attempt.number=2 OK decision=success attempt.hedge=false attempt.sent_after=backoff
  pkg.Service/Echo client 0s-0s Error attempt.number=1 UNAVAILABLE
  attempt 2 pkg.Service/Echo client 1s-1s Unset attempt.number=2 attempt.wait_ms=1000 attempt.wait_source=backoff OK
`)
	})
}

// The keys are a contract with dashboards and saved searches.
func TestKeys(t *testing.T) {
	got := attributes(grpcretry.Attempt{Number: 2, Hedge: true, WaitSource: grpcretry.WaitBackoff})
	want := []attribute.KeyValue{
		attribute.Int("grpcretry.attempt.number", 2),
		attribute.Bool("grpcretry.attempt.hedge", true),
		attribute.Int("grpcretry.attempt.wait_ms", 0),
		attribute.String("grpcretry.attempt.wait_source", "backoff"),
	}
	if !slices.Equal(got, want) {
		t.Errorf("attributes = %v, want %v", got, want)
	}
}

// credentials fetch a token for each attempt, once by HTTP and once by gRPC.
type credentials struct {
	tracer trace.Tracer
	tokens echov1.EchoServiceClient
}

func (c credentials) GetRequestMetadata(ctx context.Context, _ ...string) (map[string]string, error) {
	_, span := c.tracer.Start(ctx, "POST", trace.WithSpanKind(trace.SpanKindClient))
	span.End()
	_, err := c.tokens.Put(ctx, &echov1.EchoRequest{})
	return nil, err
}

func (credentials) RequireTransportSecurity() bool { return false }

func TestOtherSpansInAnAttemptAreLeftAlone(t *testing.T) {
	inBubble(t, 1, func(t *testing.T, f *fixture) {
		fetches := credentials{f.provider.Tracer("test"), f.client(f.withOtelgrpc())}
		f.below(t, echo, f.client(append(f.retries(), f.withOtelgrpc(), grpc.WithPerRPCCredentials(fetches))...))
		wantTree(t, f, `
caller internal 0s-1s Unset
  @0s attempt.number=1 UNAVAILABLE decision=retry wait_ms=1000 wait_source=backoff
  @1s attempt.number=2 OK decision=success
  pkg.Service/Echo client 0s-0s Error attempt.number=1 UNAVAILABLE
    POST client 0s-0s Unset
    pkg.Service/Put client 0s-0s Unset OK
  attempt 2 pkg.Service/Echo client 1s-1s Unset attempt.number=2 attempt.wait_ms=1000 attempt.wait_source=backoff OK
    POST client 1s-1s Unset
    pkg.Service/Put client 1s-1s Unset OK
`)
	})
}

// What runs in an attempt may make a call that has attempts of its own.
func TestCallWithinAnAttemptHasItsOwnNumbers(t *testing.T) {
	inBubble(t, 1, func(t *testing.T, f *fixture) {
		tokens := f.client(append(f.retries(), f.withOtelgrpc())...)
		fetches := credentials{f.provider.Tracer("test"), tokens}
		f.below(t, echo, f.client(append(f.retries(), f.withOtelgrpc(), grpc.WithPerRPCCredentials(fetches))...))
		var got []string
		for l := range strings.Lines(f.tree()) {
			if strings.Contains(l, " client ") {
				got = append(got, strings.TrimSpace(l))
			}
		}
		want := []string{
			"pkg.Service/Echo client 0s-0s Error attempt.number=1 UNAVAILABLE",
			"POST client 0s-0s Unset",
			"pkg.Service/Put client 0s-0s Unset attempt.number=1 OK",
			"attempt 2 pkg.Service/Echo client 1s-1s Unset attempt.number=2 attempt.wait_ms=1000 attempt.wait_source=backoff OK",
			"POST client 1s-1s Unset",
			"pkg.Service/Put client 1s-1s Unset attempt.number=1 OK",
		}
		if !slices.Equal(got, want) {
			t.Errorf("spans are\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
		}
	})
}

// A call that is made within an attempt may wait, too: its waits have its own numbers, and nothing of
// the attempt's.
func TestWaitsWithinAnAttemptAreLeftAlone(t *testing.T) {
	inBubble(t, 1, func(t *testing.T, f *fixture) {
		inner := f.client(append(f.retries(grpcretry.WithCallSpan(true)), f.withOtelgrpc())...)
		within := grpc.WithChainUnaryInterceptor(func(ctx context.Context, method string, req, reply any,
			cc *grpc.ClientConn, invoker grpc.UnaryInvoker, opts ...grpc.CallOption) error {
			if err := expand(ctx, inner); err != nil { // fails once, the rest succeeds
				return err
			}
			return invoker(ctx, method, req, reply, cc, opts...)
		})
		f.below(t, echo, f.client(append(f.retries(), within, f.withOtelgrpc())...))
		wantTree(t, f, `
caller internal 0s-1s Unset
  @1s attempt.number=1 OK decision=success
  pkg.Service/Expand internal 0s-1s Unset OK attempts=2
    @0s attempt.number=1 UNAVAILABLE decision=retry wait_ms=1000 wait_source=backoff
    @1s attempt.number=2 OK decision=success
    pkg.Service/Expand client 0s-0s Error attempt.number=1 UNAVAILABLE
    retry wait internal 0s-1s Unset next_attempt.number=2 wait_ms=1000 wait_source=backoff
    attempt 2 pkg.Service/Expand client 1s-1s Unset attempt.number=2 attempt.wait_ms=1000 attempt.wait_source=backoff OK
  pkg.Service/Echo client 1s-1s Unset attempt.number=1 OK
`)
	})
}

// otelgrpc can be told to make its spans of another kind.
func TestOtelgrpcWithAnotherKind(t *testing.T) {
	inBubble(t, 0, func(t *testing.T, f *fixture) {
		f.client(append(f.retries(), f.withOtelgrpc(otelgrpc.WithSpanKind(trace.SpanKindInternal)))...).Echo(t.Context(), &echov1.EchoRequest{})
		wantTree(t, f, `
pkg.Service/Echo internal 0s-0s Unset attempt.number=1 OK
`)
	})
}

// Other programs' spans of an RPC have the name that OpenTelemetry gives them; a span of
// another kind may have that name for any reason.
func TestSpansOfOtherInstrumentations(t *testing.T) {
	inBubble(t, 0, func(t *testing.T, f *fixture) {
		name := strings.TrimPrefix(echov1.EchoService_Echo_FullMethodName, "/")
		tracer := f.provider.Tracer("another")
		start := grpc.WithChainUnaryInterceptor(func(ctx context.Context, method string, req, reply any,
			cc *grpc.ClientConn, invoker grpc.UnaryInvoker, opts ...grpc.CallOption) error {
			for _, kind := range []trace.SpanKind{trace.SpanKindClient, trace.SpanKindInternal} {
				_, span := tracer.Start(ctx, name, trace.WithSpanKind(kind))
				span.End()
			}
			return invoker(ctx, method, req, reply, cc, opts...)
		})
		f.client(append(f.retries(), start)...).Echo(t.Context(), &echov1.EchoRequest{})
		wantTree(t, f, `
pkg.Service/Echo client 0s-0s Unset attempt.number=1
pkg.Service/Echo internal 0s-0s Unset
`)
	})
}

func TestCallWithoutRetriesHasNoNumbers(t *testing.T) {
	inBubble(t, 0, func(t *testing.T, f *fixture) {
		f.client(append(f.retries(grpcretry.Disable()), f.withOtelgrpc())...).Echo(t.Context(), &echov1.EchoRequest{})
		wantTree(t, f, `
pkg.Service/Echo client 0s-0s Unset OK
`)
	})
}

func TestShutdownIsNothing(t *testing.T) {
	p := NewProcessor()
	if err := p.ForceFlush(t.Context()); err != nil {
		t.Errorf("ForceFlush = %v, want nil", err)
	}
	if err := p.Shutdown(t.Context()); err != nil {
		t.Errorf("Shutdown = %v, want nil", err)
	}
}

func TestOutsideOfAnAttemptNothingIsAllocated(t *testing.T) {
	ctx, span := outside(t)
	p := NewProcessor()
	if got := testing.AllocsPerRun(100, func() { p.OnStart(ctx, span) }); got != 0 {
		t.Errorf("OnStart outside of an attempt = %v allocations, want 0", got)
	}
}

func BenchmarkOnStart(b *testing.B) {
	p := NewProcessor()
	b.Run("outside of an attempt", func(b *testing.B) {
		ctx, span := outside(b)
		b.ReportAllocs()
		for b.Loop() {
			p.OnStart(ctx, span)
		}
	})
	b.Run("in an attempt", func(b *testing.B) {
		ctx, span := inside(b)
		b.ReportAllocs()
		for b.Loop() {
			p.OnStart(ctx, span)
		}
	})
}

// outside is a span, and the context that it began in.
func outside(tb testing.TB) (context.Context, sdktrace.ReadWriteSpan) {
	ctx := context.WithValue(tb.Context(), struct{ key int }{1}, "a value")
	return ctx, clientSpan(ctx)
}

// inside is a span of the first attempt of a call.
func inside(tb testing.TB) (ctx context.Context, span sdktrace.ReadWriteSpan) {
	err := grpcretry.UnaryClientInterceptor()(tb.Context(), "/pkg.Service/Method", nil, nil, nil,
		func(attempt context.Context, _ string, _, _ any, _ *grpc.ClientConn, _ ...grpc.CallOption) error {
			ctx, span = attempt, clientSpan(attempt)
			return nil
		})
	if err != nil {
		tb.Fatalf("the call = %v, want nil", err)
	}
	return ctx, span
}

func clientSpan(ctx context.Context) sdktrace.ReadWriteSpan {
	_, span := sdktrace.NewTracerProvider().Tracer("test").Start(ctx, "pkg.Service/Method", trace.WithSpanKind(trace.SpanKindClient))
	return span.(sdktrace.ReadWriteSpan)
}
