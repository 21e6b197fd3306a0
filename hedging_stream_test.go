package grpcretry

import (
	"strings"
	"testing"
)

// A stream that is not hedged for want of a delay is measured.
func TestStreamsAreMeasured(t *testing.T) {
	bubble(t, func(t *testing.T) {
		scripts := []string{"recv a; wait 3s; send 1; wait 9s", "recv a; wait 2s", "recv a; hang", "recv a; send 1",
			"recv a; wait 500ms; send 1", "recv a; wait 700ms", "recv a; fail UNAVAILABLE", "recv a; send 1"}
		server := serveScripts(t, scripts...)
		on := false
		delay := &recordedDelay{HedgeDelay: HedgeAfter(second)}
		cc := server.conn(t, DialOptions(WithMethod("/streams/Expand",
			WithHedging(Hedging{Budget: Unlimited, Delay: switched{func() bool { return on }, delay}})))...)
		for i, step := range []struct {
			on        bool
			app, want string
		}{
			{false, "recv 1; recv EOF", "3s"},
			{false, "recv EOF", "2s"}, // without a message
			{true, "recv 1; recv EOF", "1s lost"},
			{true, "recv 1; recv EOF", "500ms"},
			{true, "recv EOF", "700ms"},
			{false, "recv 1; recv EOF", ""}, // a retry is not measured
		} {
			on, delay.told = step.on, nil
			stream, err := cc.NewStream(t.Context(), serverStream, "/streams/Expand")
			if err != nil {
				t.Fatal(err)
			}
			(&application{stream: stream}).play(t, "send a; close; "+step.app)
			if strings.Join(delay.told, ", ") != step.want {
				t.Errorf("stream %d: the delay was told %q, want %q", i+1, delay.told, step.want)
			}
		}
	})
}
