package grpcretry

import (
	"log/slog"
	"math"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"

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
		{"one attempt", on(Hedging{MaxAttempts: 1, Delay: HedgeAfter(0)}),
			"grpcretry: WithHedging: MaxAttempts: 1 attempts, want at least 2" + inMethod},
		{"less than none", on(Hedging{MaxAttempts: -2, Delay: HedgeAfter(0)}),
			"grpcretry: WithHedging: MaxAttempts: -2 attempts, want at least 2" + inMethod},
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
		{"OK", on(Hedging{Delay: HedgeAfter(0), NonFatalCodes: []codes.Code{codes.OK}}),
			"grpcretry: WithHedging: NonFatalCodes: code OK is not a failure" + inMethod},
		{"in a policy", WithPolicy(Policy{Hedging: &Hedging{}}),
			"grpcretry: WithPolicy: Hedging: Delay is not set, want HedgeAfter or HedgeAtQuantile"},
		{"all methods", WithHedging(Hedging{Delay: HedgeAfter(0)}),
			"grpcretry: WithHedging for all methods, without AllMethodsAreSafe: name the methods that are safe to run twice with WithMethod"},
		{"all methods, by a policy", WithPolicy(Policy{Hedging: &Hedging{Delay: HedgeAfter(0)}}),
			"grpcretry: WithHedging for all methods, without AllMethodsAreSafe: name the methods that are safe to run twice with WithMethod"},
		{"a client stream", WithMethod("/grpcretry.test.v1.EchoService/Collect", WithHedging(Hedging{Delay: HedgeAfter(0)})),
			"grpcretry: WithHedging in WithMethod /grpcretry.test.v1.EchoService/Collect: a method with a client stream cannot be hedged"},
		{"a bidi stream", WithMethod("/grpcretry.test.v1.EchoService/Chat", WithHedging(Hedging{Delay: HedgeAfter(0)})),
			"grpcretry: WithHedging in WithMethod /grpcretry.test.v1.EchoService/Chat: a method with a client stream cannot be hedged"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if _, err := New(tt.opt); err == nil || err.Error() != tt.want {
				t.Errorf("New = %v, want %s", err, tt.want)
			}
		})
	}
}

func TestHedgingThatIsMeant(t *testing.T) {
	h := Hedging{Delay: HedgeAfter(time.Second)}
	r, err := New(
		WithMethod("/grpcretry.test.v1.EchoService/", WithHedging(h)), // its streams are not hedged
		WithMethod("/grpcretry.test.v1.EchoService/Expand", WithHedging(Hedging{MaxAttempts: 5, Delay: HedgeAtQuantile(0.9, 0, 0)})),
		WithMethod("/grpcretry.test.v1.EchoService/Put", Disable()),
		WithMethod("/grpcretry.test.v1.EchoService/Append", WithMaxAttempts(3)),
		WithMethod("/unknown.Service/Method", WithHedging(h)))
	if err != nil {
		t.Fatal(err)
	}
	for method, want := range map[string]int{"Echo": 2, "Expand": 5, "Put": 0, "Append": 2} {
		got := 0
		if h := r.Policy("/grpcretry.test.v1.EchoService/" + method).Hedging; h != nil {
			got = h.MaxAttempts
		}
		if got != want {
			t.Errorf("%s has %d hedged attempts, want %d", method, got, want)
		}
	}
	if _, err := New(WithHedging(Hedging{Delay: HedgeAfter(0), AllMethodsAreSafe: true})); err != nil {
		t.Errorf("New = %v although all methods are said to be safe", err)
	}
	if _, err := New(Disable(), WithMethod("/a.B/C", WithHedging(h))); err != nil {
		t.Error(err)
	}
	const chat = "/grpcretry.test.v1.EchoService/Chat"
	for _, all := range []Option{WithHedging(Hedging{Delay: HedgeAfter(0), AllMethodsAreSafe: true}),
		WithMethod("/grpcretry.test.v1.EchoService/", WithHedging(h))} {
		if _, err := New(all, WithMethod(chat, WithMaxAttempts(3))); err != nil {
			t.Errorf("New = %v although nobody asks for hedging of the one method with a client stream", err)
		}
	}
}

func TestPolicyHandsOutItsOwnHedging(t *testing.T) {
	h := Hedging{Delay: HedgeAfter(0), NonFatalCodes: []codes.Code{codes.Internal}}
	r, err := New(WithMethod("/a.B/C", WithHedging(h)))
	if err != nil {
		t.Fatal(err)
	}
	h.NonFatalCodes[0] = codes.Aborted
	shown := r.Policy("/a.B/C").Hedging
	shown.MaxAttempts, shown.NonFatalCodes[0] = 9, codes.DataLoss
	if got := r.Policy("/a.B/C").Hedging; got.MaxAttempts != 2 || got.NonFatalCodes[0] != codes.Internal {
		t.Errorf("hedging is %+v, want what New was given", got)
	}
}

// If retries are off for all methods and hedging is on for one, that is what each gets.
func TestHedgingWhereRetriesAreOff(t *testing.T) {
	bubble(t, func(t *testing.T) {
		server := serve(t, script(says("a").after(time.Hour), says("b"), unavailable()))
		client := server.client(t, Disable(), hedged(Hedging{Delay: HedgeAfter(second)}))
		if reply, err := client.Echo(t.Context(), request()); reply.GetMessage() != "b" || err != nil {
			t.Errorf("Echo = %v, %v, want b from the hedge", reply, err)
		}
		_, err := client.Put(t.Context(), request())
		wantUntouched(t, err, codes.Unavailable, "db-down")
		wantTimes(t, server, 0, second, second)
	})
}

// A call that is hedged and not retried, and for which there is no delay yet, is one attempt:
// its error is the server's own.
func TestNoDelayAndNoRetries(t *testing.T) {
	bubble(t, func(t *testing.T) {
		server := serve(t, always(unavailable()))
		_, err := server.client(t, steady, WithMaxAttempts(1), hedged(Hedging{Delay: HedgeAtQuantile(0.95, 0, 0)})).
			Echo(t.Context(), request())
		wantUntouched(t, err, codes.Unavailable, "db-down")
		wantTimes(t, server, 0)
	})
}

// Without a delay, a call is as if there were no hedging, but it is measured.
func TestNoDelayNoHedge(t *testing.T) {
	bubble(t, func(t *testing.T) {
		server := serve(t, script(unavailable(), says("b").after(5*second), says("c").after(3*second),
			says("d").after(time.Hour), says("e"), unavailable().after(2*second)))
		var on atomic.Bool
		delay := &recordedDelay{HedgeDelay: HedgeAfter(second)}
		client := server.client(t, steady, hedged(Hedging{Delay: switched{on.Load, delay}}))
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
			WithMethod("/grpcretry.test.v1.EchoService/", WithHedging(Hedging{Budget: Unlimited, Delay: HedgeAfter(second)})))...)
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
			WithMethod("/grpcretry.test.v1.EchoService/", WithHedging(Hedging{Budget: Unlimited, Delay: HedgeAfter(second)})))...)
		for range 3 {
			stream, err := echov1.NewEchoServiceClient(cc).Chat(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			stream.CloseSend()
			stream.Recv()
		}
		wantLines(t, logs, "WARN…not hedged: it has a client stream…method=/grpcretry.test.v1.EchoService/Chat")
	})
}
