package telemetry

import (
	"context"
	"flag"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"
	sdkmetric "go.opentelemetry.io/otel/sdk/metric"
	"go.opentelemetry.io/otel/sdk/metric/metricdata"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"
	"go.opentelemetry.io/otel/trace"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/grpcretry/grpcretry"
	"github.com/grpcretry/grpcretry/grpcretrytest"
	"github.com/grpcretry/grpcretry/internal/recorded"
	echov1 "github.com/grpcretry/grpcretry/proto/echo/v1"
)

var update = flag.Bool("update", false, "write testdata/sdk.txt again")

const golden = "testdata/sdk.txt"

func TestWhatTheSDKExports(t *testing.T) {
	reader, spans := sdkmetric.NewManualReader(), tracetest.NewSpanRecorder()
	makeCalls(t, sdkmetric.NewMeterProvider(sdkmetric.WithReader(reader)), sdktrace.NewTracerProvider(sdktrace.WithSpanProcessor(spans)))
	var exported metricdata.ResourceMetrics
	if err := reader.Collect(t.Context(), &exported); err != nil {
		t.Fatal(err)
	}
	if len(exported.ScopeMetrics) != 1 {
		t.Fatalf("%d scopes, want one", len(exported.ScopeMetrics))
	}
	var metrics []recorded.Metric
	for _, m := range exported.ScopeMetrics[0].Metrics {
		metrics = append(metrics, metricOf(t, m))
	}
	var ended []span
	for _, s := range spans.Ended() {
		one := span{s.Name(), s.SpanKind(), s.Status().Code.String(), s.StartTime(), s.EndTime(), s.Attributes(), nil}
		for _, e := range s.Events() {
			one.events = append(one.events, recorded.Event{Name: e.Name, Attributes: e.Attributes})
		}
		ended = append(ended, one)
	}
	got := "scope " + exported.ScopeMetrics[0].Scope.Name + "\n" + describe(metrics, ended)

	if *update {
		if err := os.WriteFile(golden, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(golden)
	if err != nil {
		t.Fatal(err)
	}
	if got != string(want) {
		t.Errorf("exported\n%s\nwant\n%s", got, want)
	}
}

func TestTestsRecordWhatTheSDKExports(t *testing.T) {
	meters, spans := &recorded.Meters{}, &recorded.Spans{}
	makeCalls(t, meters, spans)
	metrics, err := meters.Collect(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	var ended []span
	for _, s := range spans.Ended() {
		code, _ := s.Status()
		ended = append(ended, span{s.Name(), s.SpanKind(), code.String(), s.StartTime(), s.EndTime(), s.Attributes(), s.Events()})
	}
	want, err := os.ReadFile(golden)
	if err != nil {
		t.Fatal(err)
	}
	_, exported, _ := strings.Cut(string(want), "\n") // without the scope
	if got := describe(metrics, ended); got != exported {
		t.Errorf("package recorded has\n%s\nand the SDK\n%s", got, exported)
	}
}

// makeCalls makes calls that record every metric and every kind of span.
func makeCalls(t *testing.T, meters metric.MeterProvider, tracers trace.TracerProvider) {
	synctest.Test(t, func(t *testing.T) {
		server := grpcretrytest.NewServer(t, func(s grpc.ServiceRegistrar) { echov1.RegisterEchoServiceServer(s, echo{}) },
			grpc.ChainUnaryInterceptor(grpcretry.UnaryServerInterceptor(grpcretry.WithMeterProvider(meters))),
			grpc.ChainStreamInterceptor(grpcretry.StreamServerInterceptor(grpcretry.WithMeterProvider(meters))))
		cc, err := grpc.NewClient("passthrough:///echo", slices.Concat(server.DialOptions(), grpcretry.DialOptions(
			grpcretry.WithMeterProvider(meters), grpcretry.WithTracerProvider(tracers), grpcretry.WithCallSpan(true),
			grpcretry.WithBackoff(grpcretry.Constant(time.Second)), grpcretry.WithMaxAttempts(3), grpcretry.WithPatience(0),
			grpcretry.WithMethod(echov1.EchoService_Put_FullMethodName, grpcretry.WithHedging(grpcretry.Hedging{
				Delay: grpcretry.HedgeAfter(time.Second), Budget: grpcretry.Unlimited}))))...)
		if err != nil {
			t.Fatal(err)
		}
		defer cc.Close()
		client := echov1.NewEchoServiceClient(cc)
		call := func(f func(context.Context, *echov1.EchoRequest, ...grpc.CallOption) (*echov1.EchoResponse, error), script string,
			opts ...grpc.CallOption) {
			_, _ = f(t.Context(), &echov1.EchoRequest{Message: script}, opts...)
		}
		call(client.Echo, "ok")
		call(client.Echo, "down down ok")
		call(client.Echo, "gone")
		call(client.Echo, "down", grpcretry.WithMaxAttempts(2))
		call(client.Echo, "ok", grpcretry.Disable())
		call(client.Put, "hang ok")
		cut, cancel := context.WithTimeout(t.Context(), 500*time.Millisecond) // in the wait
		defer cancel()
		_, _ = client.Echo(cut, &echov1.EchoRequest{Message: "down ok"})
		waits, stop := context.WithCancel(t.Context())
		time.AfterFunc(500*time.Millisecond, stop)
		_, _ = client.Echo(waits, &echov1.EchoRequest{Message: "down ok"})
		call(client.Echo, "gave-up")
		call(client.Echo, "down") // the budget refuses the last retry
		synctest.Wait()
	})
}

type echo struct {
	echov1.UnimplementedEchoServiceServer
}

// Echo does what the message's word for the attempt says, or the last word.
func (echo) Echo(ctx context.Context, req *echov1.EchoRequest) (*echov1.EchoResponse, error) {
	words := strings.Fields(req.GetMessage())
	switch words[min(grpcretry.PreviousAttempts(ctx), len(words)-1)] {
	case "down":
		return nil, status.Error(codes.Unavailable, "db-down")
	case "gone":
		return nil, status.Error(codes.NotFound, "no such cart")
	case "gave-up":
		return nil, &grpcretry.Error{Reason: grpcretry.ErrAttemptsExhausted, Last: status.Error(codes.Unavailable, "db-down")}
	case "hang":
		<-ctx.Done()
		return nil, ctx.Err()
	default:
		return &echov1.EchoResponse{}, nil
	}
}

func (e echo) Put(ctx context.Context, req *echov1.EchoRequest) (*echov1.EchoResponse, error) {
	return e.Echo(ctx, req)
}

// metricOf returns what the SDK exports in the form of package recorded.
func metricOf(t *testing.T, m metricdata.Metrics) recorded.Metric {
	t.Helper()
	found := recorded.Metric{Name: m.Name, Unit: m.Unit, Description: m.Description}
	add := func(attrs attribute.Set, value float64, count int) {
		found.Series = append(found.Series, recorded.Series{Attributes: attrs, Value: value, Count: count})
	}
	switch data := m.Data.(type) {
	case metricdata.Sum[int64]:
		if found.Kind = "up-down counter"; data.IsMonotonic {
			found.Kind = "counter"
		}
		if data.Temporality != metricdata.CumulativeTemporality {
			t.Errorf("%s is %s", m.Name, data.Temporality)
		}
		for _, p := range data.DataPoints {
			add(p.Attributes, float64(p.Value), 0)
		}
	case metricdata.Gauge[float64]:
		found.Kind = "gauge"
		for _, p := range data.DataPoints {
			add(p.Attributes, p.Value, 0)
		}
	case metricdata.Histogram[float64]:
		found.Kind = "histogram"
		for _, p := range data.DataPoints {
			found.Bounds = p.Bounds
			add(p.Attributes, p.Sum, int(p.Count))
		}
	default:
		t.Errorf("%s is a %T", m.Name, data)
	}
	return found
}

// A span is one of the SDK or of package recorded.
type span struct {
	name       string
	kind       trace.SpanKind
	status     string
	start, end time.Time
	attributes []attribute.KeyValue
	events     []recorded.Event
}

func describe(metrics []recorded.Metric, spans []span) string {
	var lines []string
	for _, m := range metrics {
		head := fmt.Sprintf("metric %s: %s, %s, %q", m.Name, m.Kind, m.Unit, m.Description)
		if m.Kind == "histogram" {
			head += fmt.Sprint(", bounds ", m.Bounds)
		}
		for _, s := range m.Series {
			line := fmt.Sprintf("%s\n  %v", head, s.Value)
			if m.Kind == "histogram" {
				line += fmt.Sprintf(" in %d", s.Count)
			}
			lines = append(lines, strings.TrimSpace(line+" "+recorded.Text(s.Attributes.ToSlice())))
		}
	}
	slices.Sort(lines)
	var text strings.Builder
	last := ""
	for _, line := range lines { // each head once
		head, series, _ := strings.Cut(line, "\n")
		if head != last {
			fmt.Fprintln(&text, head)
			last = head
		}
		fmt.Fprintln(&text, series)
	}
	for _, s := range spans {
		fmt.Fprintf(&text, "span %s: %s, %s, %v\n  %s\n", s.name, s.kind, s.status, s.end.Sub(s.start), recorded.Text(s.attributes))
		for _, e := range s.events {
			fmt.Fprintf(&text, "  event %s: %s\n", e.Name, recorded.Text(e.Attributes))
		}
	}
	return text.String()
}
