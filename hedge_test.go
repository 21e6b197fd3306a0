package grpcretry

import (
	"log/slog"
	"math"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc"

	echov1 "github.com/grpcretry/grpcretry/proto/echo/v1"
)

func TestHedgingThatCannotBeMeantIsRefused(t *testing.T) {
	const method = "/grpcretry.test.v1.EchoService/Echo"
	on := func(h Hedging) Option { return WithMethod(method, WithHedging(h)) }
	inMethod := " (in WithMethod " + method + ")"
	for _, tt := range []struct {
		name string
		opt  Option
		want string
	}{
		{"no delay", on(Hedging{}), "grpcretry: WithHedging: Delay is not set, want HedgeAfter or HedgeAtQuantile" + inMethod},
		{"negative delay", on(Hedging{Delay: HedgeAfter(-time.Second)}), "grpcretry: WithHedging: Delay: -1s is negative" + inMethod},
		{"quantile 0", on(Hedging{Delay: HedgeAtQuantile(0, 0, 0)}),
			"grpcretry: WithHedging: Delay: HedgeAtQuantile: q is 0, want between 0 and 1" + inMethod},
		{"quantile NaN", on(Hedging{Delay: HedgeAtQuantile(math.NaN(), 0, 0)}),
			"grpcretry: WithHedging: Delay: HedgeAtQuantile: q is NaN, want between 0 and 1" + inMethod},
		{"negative bound", on(Hedging{Delay: HedgeAtQuantile(0.9, -1, 0)}),
			"grpcretry: WithHedging: Delay: HedgeAtQuantile: bounds -1ns and 0s must not be negative" + inMethod},
		{"bounds crossed", on(Hedging{Delay: HedgeAtQuantile(0.9, time.Second, time.Millisecond)}),
			"grpcretry: WithHedging: Delay: HedgeAtQuantile: upper bound 1ms is below the lower bound 1s" + inMethod},
		{"in a policy", WithPolicy(Policy{Hedging: &Hedging{}}),
			"grpcretry: WithPolicy: Hedging: Delay is not set, want HedgeAfter or HedgeAtQuantile"},
		{"all methods", WithPolicy(Policy{MaxAttempts: 2, Hedging: &Hedging{Delay: HedgeAfter(0)}}),
			"grpcretry: WithHedging for all methods, without AllMethodsAreSafe: name the methods that are safe to run twice with WithMethod"},
		{"all methods, by a policy", WithPolicy(Policy{Hedging: &Hedging{Delay: HedgeAfter(0)}}),
			"grpcretry: WithHedging for all methods, without AllMethodsAreSafe: name the methods that are safe to run twice with WithMethod"},
		{"a client stream", WithMethod("/grpcretry.test.v1.EchoService/Collect",
			WithPolicy(Policy{MaxAttempts: 2, Hedging: &Hedging{Delay: HedgeAfter(0)}})),
			"grpcretry: WithHedging in WithMethod /grpcretry.test.v1.EchoService/Collect: a method with a client stream cannot be hedged"},
		{"a bidi stream", WithMethod("/grpcretry.test.v1.EchoService/Chat",
			WithPolicy(Policy{MaxAttempts: 2, Hedging: &Hedging{Delay: HedgeAfter(0)}})),
			"grpcretry: WithHedging in WithMethod /grpcretry.test.v1.EchoService/Chat: a method with a client stream cannot be hedged"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if _, err := New(tt.opt); err == nil || err.Error() != tt.want {
				t.Errorf("New = %v, want %s", err, tt.want)
			}
		})
	}
}

// Without a delay, a call is as if there were no hedging, but it is measured.
func TestNoDelayNoHedge(t *testing.T) {
	bubble(t, func(t *testing.T) {
		server := serve(t, script(unavailable(), says("b").after(5*second), says("c").after(3*second),
			says("d").after(time.Hour), says("e"), unavailable().after(2*second)))
		var on atomic.Bool
		delay := &recordedDelay{HedgeDelay: HedgeAfter(second)}
		client := server.client(t, steady, hedged(2, Hedging{Delay: switched{on.Load, delay}}))
		for i, step := range []struct {
			on      bool
			reply   string
			elapsed time.Duration
			told    []string
		}{
			{false, "b", 6 * second, nil},            // failed, waited its backoff, was slow
			{false, "c", 3 * second, []string{"3s"}}, // slow
			{true, "e", second, []string{"1s lost"}}, // hedged
			{true, "", 2 * second, []string{}},       // hedged, and failed twice
		} {
			on.Store(step.on)
			delay.told = nil
			start := time.Now()
			reply, _ := client.Echo(t.Context(), request())
			if got := time.Since(start); i < 3 && (reply.GetMessage() != step.reply || got != step.elapsed) {
				t.Errorf("call %d: %q after %v, want %q after %v", i+1, reply.GetMessage(), got, step.reply, step.elapsed)
			}
			if i < 3 && !slices.Equal(delay.told, step.told) {
				t.Errorf("call %d: the delay was told %q, want %q", i+1, delay.told, step.told)
			}
		}
	})
}

func TestWhatCannotBeHedgedIsSaidOnce(t *testing.T) {
	bubble(t, func(t *testing.T) {
		server := serve(t, always(ok()))
		logs := &logRecorder{}
		cc := server.conn(t, DialOptions(WithLogger(slog.New(logs)),
			WithMethod("/grpcretry.test.v1.EchoService/",
				WithPolicy(Policy{MaxAttempts: 2, Hedging: &Hedging{Budget: Unlimited, Delay: HedgeAfter(second)}})))...)
		client := echov1.NewEchoServiceClient(cc)
		for range 3 {
			stream, err := client.Chat(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			stream.CloseSend()
			stream.Recv()
		}
		wantLines(t, logs, "WARN…not hedged, but retried: it has a client stream…method=/grpcretry.test.v1.EchoService/Chat")
		for range 3 {
			stream, err := cc.NewStream(t.Context(), serverStream, "/grpcretry.test.v1.EchoService/Expand", grpc.ForceCodec(oddCodec{}))
			if err != nil {
				t.Fatal(err)
			}
			(&application{stream: stream}).play(t, "send a; close")
			stream.RecvMsg(notAPointer{})
			stream.RecvMsg(notAPointer{})
		}
		wantLines(t, logs, "WARN…not hedged, but retried: no second message can be made…method=/grpcretry.test.v1.EchoService/Expand")
		for range 3 {
			cc.Invoke(t.Context(), "/grpcretry.test.v1.EchoService/Echo", request(), notAPointer{}, grpc.ForceCodec(oddCodec{}))
		}
		wantLines(t, logs, "WARN…not hedged, but retried: no second reply can be made…method=/grpcretry.test.v1.EchoService/Echo")
		cc = server.conn(t, DialOptions(WithLogger(slog.New(logs)), Disable(),
			WithMethod("/grpcretry.test.v1.EchoService/",
				WithPolicy(Policy{MaxAttempts: 2, Hedging: &Hedging{Budget: Unlimited, Delay: HedgeAfter(second)}})))...)
		for range 3 {
			stream, err := echov1.NewEchoServiceClient(cc).Chat(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			stream.CloseSend()
			stream.Recv()
		}
		wantLines(t, logs, "WARN…not hedged, but retried: it has a client stream…method=/grpcretry.test.v1.EchoService/Chat")
	})
}
