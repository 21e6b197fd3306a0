package grpcretry

import (
	"context"
	"fmt"
	"maps"
	"strings"
	"sync"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	"github.com/grpcretry/grpcretry/internal/instruments"
	"github.com/grpcretry/grpcretry/internal/recorded"
	echov1 "github.com/grpcretry/grpcretry/proto/echo/v1"
	"github.com/grpcretry/grpcretry/telemetry"
)

// sums returns the counters of a server as text: the name, the attributes and the value.
func sums(metrics []recorded.Metric) map[string]int64 {
	found := map[string]int64{}
	for _, m := range metrics {
		for _, s := range m.Series {
			var labels []string
			for _, a := range s.Attributes.ToSlice() {
				labels = append(labels, a.Value.AsString())
			}
			found[m.Name+" "+strings.Join(labels, " ")] = int64(s.Value)
		}
	}
	return found
}

func TestServerMetrics(t *testing.T) {
	const echo, expand = "grpcretry.test.v1.EchoService/Echo", "grpcretry.test.v1.EchoService/Expand"
	bubble(t, func(t *testing.T) {
		meters := &recorded.Meters{}
		gaveUp := &Error{Reason: ErrAttemptsExhausted, Last: status.Error(codes.Unavailable, "down")}
		var fails error
		forbids := false
		server := serveHandler(t, func(ctx context.Context) error {
			if forbids {
				if err := SetNoRetry(ctx); err != nil {
					t.Error(err)
				}
			}
			return fails
		}, append(serverOptions(WithMeterProvider(meters)), serverOptions(WithMeterProvider(meters))...)...) // the second has no effect
		client := echov1.NewEchoServiceClient(server.conn(t))
		send := func(kind string, header ...string) {
			kinds[kind](metadata.AppendToOutgoingContext(t.Context(), header...), client)
		}
		send("unary")
		send("unary", previousAttemptsKey, "2")
		send("unary", previousAttemptsKey, "1", callerRetriesKey, "1")
		send("stream", callerRetriesKey, "1")
		fails = status.Error(codes.Unavailable, "on its own")
		send("unary")
		fails = fmt.Errorf("cart: %w", gaveUp)
		send("unary")
		send("stream")
		send("stream", previousAttemptsKey, "1")
		forbids = true // as the handler does by itself, the interceptor has nothing to add
		send("unary")
		got := sums(collect(t, meters))
		want := map[string]int64{
			telemetry.MetricServerRetries + " caller " + echo:           2,
			telemetry.MetricServerRetries + " earlier_caller " + expand: 1,
			telemetry.MetricServerRetries + " caller " + expand:         1,
			telemetry.MetricServerNoRetries + " " + echo:                1,
			telemetry.MetricServerNoRetries + " " + expand:              2,
		}
		if !maps.Equal(got, want) {
			t.Errorf("counted\n%v, want\n%v", got, want)
		}
	})
}

// A server that handles unknown methods gets their names from its clients.
func TestServerMetricsHaveALimitedNumberOfMethods(t *testing.T) {
	meters := &recorded.Meters{}
	s := newServer("test", []ServerOption{WithMeterProvider(meters)})
	ctx := metadata.NewIncomingContext(t.Context(), metadata.Pairs(previousAttemptsKey, "1"))
	handle := func(context.Context, any) (any, error) { return nil, nil }
	receive := func(method string) {
		if _, err := s.unary(ctx, nil, &grpc.UnaryServerInfo{FullMethod: method}, handle); err != nil {
			t.Error(err)
		}
	}
	longest := strings.Repeat("m", instruments.MaxName-1)
	for _, method := range []string{"/" + longest, "/m" + longest, "/a/\xff"} {
		receive(method)
	}
	var all sync.WaitGroup
	for quarter := range 4 {
		all.Go(func() {
			for n := range (instruments.MaxServerMethods + 100) / 4 {
				receive(fmt.Sprintf("/any.Service/%d of %d", n, quarter))
			}
		})
	}
	all.Wait()
	got := sums(collect(t, meters))
	if n := got[telemetry.MetricServerRetries+" caller "+instruments.Other]; len(got) != instruments.MaxServerMethods+1 || n != 103 {
		t.Errorf("%d series, of which other counts %d; want %d and 103", len(got), n, instruments.MaxServerMethods+1)
	}
	if n, m := got[telemetry.MetricServerRetries+" caller "+longest],
		got[telemetry.MetricServerRetries+" caller m"+longest]; n != 1 || m != 0 {
		t.Errorf("the longest name was counted %d times, and one that is too long %d times; want 1 and 0", n, m)
	}
	if n := got[telemetry.MetricServerRetries+" caller a/\uFFFD"]; n != 1 {
		t.Errorf("a name that is not UTF-8 was counted %d times, want 1", n)
	}
}

func TestServersSpan(t *testing.T) {
	bubble(t, func(t *testing.T) {
		spans := &recorded.Spans{}
		gaveUp := &Error{Reason: ErrBudgetExhausted, Last: status.Error(codes.Unavailable, "down")}
		server := serveHandler(t, func(context.Context) error { return gaveUp },
			append([]grpc.ServerOption{grpc.ChainUnaryInterceptor(withServerSpan(spans))}, serverOptions()...)...)
		client := echov1.NewEchoServiceClient(server.conn(t))
		client.Echo(t.Context(), request())
		client.Echo(metadata.AppendToOutgoingContext(t.Context(), previousAttemptsKey, "3"), request())
		var got []string
		for _, span := range spans.Ended() {
			text := recorded.Text(span.Attributes())
			if text != "" {
				text += " "
			}
			for _, e := range span.Events() {
				text += e.Name
			}
			got = append(got, text)
		}
		if want := "[grpcretry.no_retry grpcretry.retried_by=caller grpcretry.previous_attempts=3 grpcretry.no_retry]"; fmt.Sprint(got) != want {
			t.Errorf("spans %v, want %v", got, want)
		}
	})
}
