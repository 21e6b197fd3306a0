package grpcretry

import (
	"context"
	"log/slog"
	"slices"
	"strings"
	"testing"

	echov1 "github.com/grpcretry/grpcretry/proto/echo/v1"
	"github.com/grpcretry/grpcretry/telemetry"
)

// A target has one name, however it was dialed.
func TestEverySinkNamesATargetInTheSameWay(t *testing.T) {
	for _, dialed := range []string{"passthrough:echo", "passthrough:///echo"} {
		t.Run(dialed, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				const want = "passthrough:///echo"
				server := serve(t, always(unavailable()))
				logs := &logRecorder{}
				meters, reader := readMetrics()
				var events []string
				r, err := New(WithMaxAttempts(2), WithBackoff(Constant(0)), WithMeterProvider(meters), WithLogger(slog.New(logs)),
					WithObserver(func(_ context.Context, e Event) { events = append(events, e.Target) }))
				if err != nil {
					t.Fatal(err)
				}
				echov1.NewEchoServiceClient(server.connTo(t, dialed, r.DialOptions()...)).Echo(t.Context(), request())
				if got := slices.Compact(events); !slices.Equal(got, []string{want}) {
					t.Errorf("events have the targets %q, want %q", got, want)
				}
				for _, line := range logs.lines() {
					if !strings.Contains(line, "target="+want+" ") {
						t.Errorf("want target=%s in the line\n%s", want, line)
					}
				}
				for _, line := range metricLines(t, reader) { // which leaves this target out
					if strings.Contains(line, telemetry.AttrTarget) {
						t.Errorf("want the target %s in %s", want, line)
					}
				}
			})
		})
	}
}
