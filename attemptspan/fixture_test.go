package attemptspan

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"go.opentelemetry.io/contrib/instrumentation/google.golang.org/grpc/otelgrpc"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/propagation"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"
	"go.opentelemetry.io/otel/trace"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	experimental "google.golang.org/grpc/experimental/opentelemetry"
	"google.golang.org/grpc/stats/opentelemetry"

	"github.com/grpcretry/grpcretry"
	"github.com/grpcretry/grpcretry/grpcretrytest"
	echov1 "github.com/grpcretry/grpcretry/proto/echo/v1"
	"github.com/grpcretry/grpcretry/telemetry"
)

// This file has the server, which fails as scripted, the client under each of the two
// instrumentations, and the text that the tests compare: a trace as an indented tree.

// An answering server gives an answer to every attempt that the script leaves to it.
type answering struct {
	echov1.UnimplementedEchoServiceServer
}

func (answering) Echo(context.Context, *echov1.EchoRequest) (*echov1.EchoResponse, error) {
	return &echov1.EchoResponse{}, nil
}

func (answering) Put(context.Context, *echov1.EchoRequest) (*echov1.EchoResponse, error) {
	return &echov1.EchoResponse{}, nil
}

// Expand sends two messages.
func (answering) Expand(_ *echov1.EchoRequest, stream grpc.ServerStreamingServer[echov1.EchoResponse]) error {
	if err := stream.Send(&echov1.EchoResponse{}); err != nil {
		return err
	}
	return stream.Send(&echov1.EchoResponse{})
}

// Chat answers one message.
func (answering) Chat(stream grpc.BidiStreamingServer[echov1.EchoRequest, echov1.EchoResponse]) error {
	if _, err := stream.Recv(); err != nil {
		return err
	}
	return stream.Send(&echov1.EchoResponse{})
}

// A fixture is a server that fails as scripted, and what records the spans of its clients.
type fixture struct {
	*grpcretrytest.Server
	provider *sdktrace.TracerProvider
	recorder *tracetest.SpanRecorder
}

// inBubble runs test in virtual time with a server that fails so many times, except in Put. Without
// jitter and limits, clients wait 1 s before the second attempt, 7 s before the third as
// the server asks, and 1 s before the fourth.
func inBubble(t *testing.T, failures int, test func(t *testing.T, f *fixture)) {
	t.Helper()
	inBubbleWith(t, NewProcessor(), failures, test)
}

func inBubbleWith(t *testing.T, processor sdktrace.SpanProcessor, failures int, test func(t *testing.T, f *fixture)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		recorder := tracetest.NewSpanRecorder()
		provider := sdktrace.NewTracerProvider(sdktrace.WithSpanProcessor(recorder), sdktrace.WithSpanProcessor(processor))
		server := grpcretrytest.NewServer(t, func(s grpc.ServiceRegistrar) { echov1.RegisterEchoServiceServer(s, answering{}) },
			grpc.StatsHandler(otelgrpc.NewServerHandler(
				otelgrpc.WithTracerProvider(provider), otelgrpc.WithPropagators(propagation.TraceContext{}))))
		// gRPC gives stats handlers no error for a stream that fails while its message is being sent.
		down := grpcretrytest.Fail(codes.Unavailable, "down").AfterReceiving(1)
		scripted := append([]grpcretrytest.Step{down, down.Pushback(7 * time.Second)}, slices.Repeat([]grpcretrytest.Step{down}, 7)...)
		server.Next("/", scripted[:failures]...)
		server.Next(echov1.EchoService_Put_FullMethodName, grpcretrytest.OK().Always())
		test(t, &fixture{server, provider, recorder})
	})
}

// client dials the server with the dial options in their order: that of the interceptors.
func (f *fixture) client(opts ...grpc.DialOption) echov1.EchoServiceClient {
	return echov1.NewEchoServiceClient(f.Conn(opts...))
}

// retries are the dial options of grpcretry, joined into one that has a place in an order.
func (f *fixture) retries(opts ...grpcretry.Option) []grpc.DialOption {
	return grpcretry.DialOptions(append([]grpcretry.Option{
		grpcretry.WithBackoff(grpcretry.Constant(time.Second)),
		grpcretry.WithBudget(grpcretry.Unlimited),
		grpcretry.WithTracerProvider(f.provider),
	}, opts...)...)
}

// withOtelgrpc is the stats handler of otelgrpc.
func (f *fixture) withOtelgrpc(opts ...otelgrpc.Option) grpc.DialOption {
	return grpc.WithStatsHandler(otelgrpc.NewClientHandler(append([]otelgrpc.Option{
		otelgrpc.WithTracerProvider(f.provider),
		otelgrpc.WithPropagators(propagation.TraceContext{})}, opts...)...))
}

// withGRPCGo is grpc-go's own instrumentation: an interceptor and a stats handler.
func (f *fixture) withGRPCGo() grpc.DialOption {
	return opentelemetry.DialOption(opentelemetry.Options{TraceOptions: experimental.TraceOptions{
		TracerProvider:    f.provider,
		TextMapPropagator: propagation.TraceContext{}}})
}

// withTracing is an interceptor as programs have them: one span for each time it runs.
func (f *fixture) withTracing(name string) grpc.DialOption {
	tracer := f.provider.Tracer("test")
	return grpc.WithChainUnaryInterceptor(func(ctx context.Context, method string, req, reply any,
		cc *grpc.ClientConn, invoker grpc.UnaryInvoker, opts ...grpc.CallOption) error {
		ctx, span := tracer.Start(ctx, name)
		defer span.End()
		return invoker(ctx, method, req, reply, cc, opts...)
	})
}

// A kind of call to make, until its end.
type caller func(ctx context.Context, client echov1.EchoServiceClient) error

func echo(ctx context.Context, client echov1.EchoServiceClient) error {
	_, err := client.Echo(ctx, &echov1.EchoRequest{})
	return err
}

func expand(ctx context.Context, client echov1.EchoServiceClient) error {
	stream, err := client.Expand(ctx, &echov1.EchoRequest{})
	if err != nil {
		return err
	}
	return drain(stream)
}

func chat(ctx context.Context, client echov1.EchoServiceClient) error {
	stream, err := client.Chat(ctx)
	if err != nil {
		return err
	}
	if err := stream.Send(&echov1.EchoRequest{}); err != nil {
		return err
	}
	if err := stream.CloseSend(); err != nil {
		return err
	}
	return drain(stream)
}

func drain(stream grpc.ServerStreamingClient[echov1.EchoResponse]) error {
	for {
		if _, err := stream.Recv(); err == io.EOF {
			return nil
		} else if err != nil {
			return err
		}
	}
}

// below makes a call within a span of the caller's.
func (f *fixture) below(t *testing.T, call caller, client echov1.EchoServiceClient) error {
	t.Helper()
	ctx, span := f.provider.Tracer("test").Start(t.Context(), "caller")
	defer span.End()
	return call(ctx, client)
}

// tree is all spans that have ended, but those of the server, as text: a line for each
// span, and for each event that the interceptor left, indented below its parent. Of spans that
// begin at the same time the shorter comes first: an attempt that takes no time, then the wait after
// it. Times are since the first span began.
func (f *fixture) tree() string {
	synctest.Wait()
	spans := f.recorder.Ended()
	slices.SortStableFunc(spans, func(a, b sdktrace.ReadOnlySpan) int {
		return cmp.Or(a.StartTime().Compare(b.StartTime()), a.EndTime().Compare(b.EndTime()))
	})
	var out strings.Builder
	known := map[trace.SpanID]bool{}
	for _, s := range spans {
		known[s.SpanContext().SpanID()] = true
	}
	var write func(parent trace.SpanID, indent string)
	write = func(parent trace.SpanID, indent string) {
		for _, s := range spans {
			if s.SpanKind() == trace.SpanKindServer || s.Parent().SpanID() != parent {
				continue
			}
			out.WriteString(indent + line(s, spans[0].StartTime()))
			for _, e := range s.Events() {
				if e.Name == telemetry.SpanEventAttempt {
					fmt.Fprintf(&out, "%s  @%v %s\n", indent, e.Time.Sub(spans[0].StartTime()), text(e.Attributes))
				}
			}
			write(s.SpanContext().SpanID(), indent+"  ")
		}
	}
	write(trace.SpanID{}, "")
	return out.String()
}

func line(s sdktrace.ReadOnlySpan, start time.Time) string {
	name := strings.Replace(s.Name(), "grpcretry.test.v1.EchoService", "pkg.Service", 1)
	parts := []string{name, s.SpanKind().String(),
		fmt.Sprintf("%v-%v", s.StartTime().Sub(start), s.EndTime().Sub(start)), s.Status().Code.String()}
	if attrs := text(s.Attributes()); attrs != "" {
		parts = append(parts, attrs)
	}
	return strings.Join(parts, " ") + "\n"
}

// text is the attributes that concern attempts, with short keys, without status messages.
func text(attrs []attribute.KeyValue) string {
	var parts []string
	for _, a := range attrs {
		key := string(a.Key)
		if short, ours := strings.CutPrefix(key, "grpcretry."); ours && key != telemetry.AttrMessage {
			parts = append(parts, fmt.Sprintf("%s=%v", short, a.Value.AsInterface()))
		} else if key == "rpc.response.status_code" || key == "previous-rpc-attempts" {
			parts = append(parts, fmt.Sprint(a.Value.AsInterface()))
		}
	}
	return strings.Join(parts, " ")
}

// traces counts those that have ended spans.
func (f *fixture) traces() int {
	ids := map[trace.TraceID]bool{}
	for _, s := range f.recorder.Ended() {
		ids[s.SpanContext().TraceID()] = true
	}
	return len(ids)
}

func wantTree(t *testing.T, f *fixture, want string) {
	t.Helper()
	want = strings.TrimPrefix(want, "\n")
	if got := f.tree(); got != want {
		t.Errorf("spans are\n%s\nwant\n%s", got, want)
	}
}
