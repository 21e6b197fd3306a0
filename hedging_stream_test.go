package grpcretry

import (
	"errors"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc"
)

// Server streams are hedged up to their first message. Hedges are due each second.
func TestHedgedStreams(t *testing.T) {
	for _, tt := range []struct {
		name   string
		opts   []Option
		server []string // one script for each attempt
		app    string
		times  []time.Duration
		reason error // of the *Error; nil if the error is gRPC's own, or there is none
	}{
		{name: "the hedge wins", server: []string{"recv a; hang", "recv a; recv EOF; send 1; send 2"},
			app: "send a; close; recv 1; recv 2; recv EOF; recv EOF", times: []time.Duration{0, second}},
		{name: "the first wins after all", server: []string{"recv a; wait 1500ms; send 1; send 2", "recv a; hang"},
			app: "send a; close; recv 1; recv 2; recv EOF", times: []time.Duration{0, second}},
		{name: "headers decide nothing", server: []string{"recv a; header; hang", "recv a; header; send 1"},
			app: "send a; close; recv 1; header; recv EOF", times: []time.Duration{0, second}},
		{name: "a fatal status ends the call", server: []string{"recv a; hang", "recv a; fail NOT_FOUND"},
			app: "send a; close; recv NOT_FOUND; recv NOT_FOUND; trailer 2", times: []time.Duration{0, second}},
		{name: "a retry", server: []string{"recv a; fail UNAVAILABLE", "recv a; send 1"},
			app: "send a; close; recv 1; recv EOF", times: []time.Duration{0, second}},
		{name: "all fail", server: []string{"recv a; wait 1500ms; fail UNAVAILABLE", "recv a; wait 2s; fail RESOURCE_EXHAUSTED"},
			app: "send a; close; recv RESOURCE_EXHAUSTED; recv RESOURCE_EXHAUSTED; trailer 2", times: []time.Duration{0, second},
			reason: ErrAttemptsExhausted},
		{name: "a failure after the first message is the application's",
			server: []string{"recv a; hang", "recv a; send 1; fail UNAVAILABLE"},
			app:    "send a; close; recv 1; recv UNAVAILABLE; trailer 2", times: []time.Duration{0, second}},
		{name: "the application wants the headers first", server: []string{"recv a; header; wait 5s; send 1"},
			app: "send a; close; header; recv 1; recv EOF", times: []time.Duration{0}},
		{name: "the context of a stream commits it", server: []string{"recv a; wait 5s; send 1"},
			app: "send a; close; context; recv 1; recv EOF", times: []time.Duration{0}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				server := serveStreams(t, func(n int, stream grpc.ServerStream) error { return playServer(t, n, tt.server[n-1], stream) })
				budget, hedges, events := &aBudget{}, &aBudget{}, &hedgeEvents{}
				app, err := server.openStream(t, serverStream, append([]Option{WithBudget(budget), WithObserver(events.observe),
					WithMethod("/streams/Expand", WithPolicy(Policy{MaxAttempts: 2, Hedging: &Hedging{Budget: hedges, Delay: HedgeAfter(second)}}))},
					tt.opts...))
				if err != nil {
					t.Fatal(err)
				}
				app.play(t, tt.app)
				wantTimes(t, server, tt.times...)
				var e *Error
				if errors.As(app.err, &e) != (tt.reason != nil) || tt.reason != nil && !errors.Is(e.Reason, tt.reason) {
					t.Errorf("RecvMsg = %v, want reason %v", app.err, tt.reason)
				}
				synctest.Wait()
				events.check(t, events.events[len(events.events)-1].Err)
				wantAccounts(t, budget, hedges, len(tt.times))
			})
		})
	}
}

// A stream that is not hedged for want of a delay is measured.
func TestStreamsAreMeasured(t *testing.T) {
	bubble(t, func(t *testing.T) {
		scripts := []string{"recv a; wait 3s; send 1; wait 9s", "recv a; wait 2s", "recv a; hang", "recv a; send 1",
			"recv a; wait 500ms; send 1", "recv a; wait 700ms", "recv a; fail UNAVAILABLE", "recv a; send 1"}
		server := serveStreams(t, func(n int, stream grpc.ServerStream) error { return playServer(t, n, scripts[n-1], stream) })
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
