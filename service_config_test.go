package grpcretry

import (
	"context"
	"errors"
	"log/slog"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/resolver"
	"google.golang.org/grpc/resolver/manual"
	"google.golang.org/grpc/status"

	echov1 "github.com/grpcretry/grpcretry/proto/echo/v1"
)

const builtInPolicy = `{"methodConfig": [{
	"name": [{"service": "grpcretry.test.v1.EchoService", "method": "Echo"}],
	"retryPolicy": {"maxAttempts": 3, "initialBackoff": "1s", "maxBackoff": "1s",
	"backoffMultiplier": 1, "retryableStatusCodes": ["UNAVAILABLE"]}
}]}`

func TestMethodsWithABuiltInPolicyAreLeftToGRPC(t *testing.T) {
	bubble(t, func(t *testing.T) {
		server := serve(t, always(unavailable()))
		logs := &logRecorder{}
		budget := &aBudget{}
		cc := server.conn(t, grpc.WithDefaultServiceConfig(builtInPolicy), grpc.WithChainUnaryInterceptor(
			UnaryClientInterceptor(WithMaxAttempts(5), WithLogger(slog.New(logs)), WithBudget(budget))))
		client := echov1.NewEchoServiceClient(cc)
		for range 3 { // from the first call of a fresh channel on
			before := len(server.attempts())
			_, err := client.Echo(t.Context(), request())
			if got := len(server.attempts()) - before; got != 3 {
				t.Errorf("%d attempts, want the 3 of gRPC's policy", got)
			}
			var e *Error
			if errors.As(err, &e) || status.Code(err) != codes.Unavailable {
				t.Errorf("err = %v, want gRPC's own", err)
			}
		}
		if got := logs.lines(); len(got) != 1 || !strings.Contains(got[0], "retryPolicy") || !strings.Contains(got[0], "/Echo") {
			t.Errorf("logged %q, want one line", got)
		}
		// Once the service config is known, calls pass through.
		if want := []Outcome{{Attempt: 1, Result: Ignored}}; !slices.Equal(budget.heard, want) || budget.asked != nil {
			t.Errorf("budget heard %v and was asked at %v, want %v and never", budget.heard, budget.asked, want)
		}
		// Another method of the same service is ours.
		before := len(server.attempts())
		client.Put(t.Context(), request())
		if got := len(server.attempts()) - before; got != 5 {
			t.Errorf("%d attempts of a method without a policy, want 5", got)
		}
	})
}

func TestBuiltInPolicyLeavesStreamsToGRPC(t *testing.T) {
	bubble(t, func(t *testing.T) {
		server := serveStreams(t, func(n int, stream grpc.ServerStream) error { return playServer(t, n, "fail UNAVAILABLE", stream) })
		cc := server.conn(t, grpc.WithDefaultServiceConfig(strings.Replace(builtInPolicy,
			`"grpcretry.test.v1.EchoService", "method": "Echo"`, `"s"`, 1)),
			grpc.WithChainStreamInterceptor(StreamClientInterceptor(WithMaxAttempts(5))))
		stream, err := cc.NewStream(t.Context(), serverStream, "/s/m")
		if err != nil {
			t.Fatal(err)
		}
		app := &application{stream: stream}
		app.play(t, "send a; close; recv UNAVAILABLE")
		var e *Error
		if got := len(server.attempts()); got != 3 || errors.As(app.err, &e) {
			t.Errorf("%d attempts and %v, want gRPC's 3 and its own error", got, app.err)
		}
	})
}

// What gRPC retries itself is not hedged: it gets one attempt, and its error as it comes.
func TestHedgedCallsLeftToGRPC(t *testing.T) {
	for _, tt := range []struct {
		name   string
		script func(int) answer
		code   codes.Code
		want   []time.Duration
		logs   bool // told to the logger, at the failure
	}{
		{"success", script(ok().after(5 * second)), codes.OK, []time.Duration{0}, false},
		{"a failure that gRPC does not retry", script(unavailable()), codes.Unavailable, []time.Duration{0}, true},
		{"a slow one", script(unavailable().after(5 * second)), codes.Unavailable, []time.Duration{0}, true},
		{"gRPC's own retries", script(fail(codes.Aborted, "x").pushback("1000"), fail(codes.NotFound, "x")), codes.NotFound,
			[]time.Duration{0, second}, true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				server := serve(t, tt.script)
				budget, events, logs := &aBudget{}, &hedgeEvents{}, &logRecorder{}
				cc := server.conn(t, grpc.WithDefaultServiceConfig(`{"methodConfig":[{"name":[{}],"retryPolicy":{"maxAttempts":2,`+
					`"initialBackoff":"1s","maxBackoff":"1s","backoffMultiplier":1,"retryableStatusCodes":["ABORTED"]}}]}`),
					grpc.WithChainUnaryInterceptor(UnaryClientInterceptor(WithBudget(budget), WithObserver(events.observe),
						WithLogger(slog.New(logs)),
						hedged(9, Hedging{Delay: HedgeAfter(second)}))))
				_, err := echov1.NewEchoServiceClient(cc).Echo(t.Context(), request())
				wantTimes(t, server, tt.want...)
				events.check(t, err)
				if tt.code != codes.OK {
					wantUntouched(t, err, tt.code, status.Convert(err).Message())
				}
				if status.Code(err) != tt.code || len(budget.asked) != 0 || len(budget.heard) != 1 {
					t.Errorf("Echo = %v, budget asked at %v and told %v, want %v, never and once", err, budget.asked, budget.heard, tt.code)
				}
				for _, e := range events.events {
					if (e.Kind == Decision || e.Kind == CallEnd && err != nil) && e.Reason != errLeftToGRPC {
						t.Errorf("%v has reason %v, want that it is left to gRPC", e.Kind, e.Reason)
					}
				}
				if tt.logs {
					wantLines(t, logs, "WARN…leaving it to gRPC")
				} else {
					wantLines(t, logs)
				}
			})
		})
	}
}

// Whether gRPC retries a method itself is known when the channel is ready: until then there
// is no hedge, which could not be sent anyway.
func TestNoHedgeBeforeTheServiceConfigIsKnown(t *testing.T) {
	for _, tt := range []struct {
		name   string
		config string
		want   []time.Duration
	}{
		{"left to gRPC", `{"methodConfig":[{"name":[{}],"retryPolicy":{"maxAttempts":2,"initialBackoff":"1s","maxBackoff":"1s",` +
			`"backoffMultiplier":1,"retryableStatusCodes":["ABORTED"]}}]}`, []time.Duration{3 * second / 2}},
		{"hedged", `{}`, []time.Duration{3 * second / 2, 2 * second}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				server := serve(t, script(says("a").after(2*second), says("b").after(time.Hour)))
				slow := manual.NewBuilderWithScheme("slow")
				cc := server.connTo(t, "slow:///echo", grpc.WithResolvers(slow), grpc.WithDefaultServiceConfig(tt.config),
					grpc.WithChainUnaryInterceptor(UnaryClientInterceptor(hedged(2, Hedging{Delay: HedgeAfter(second)}))))
				time.AfterFunc(3*second/2, func() {
					slow.UpdateState(resolver.State{Addresses: []resolver.Address{{Addr: "echo"}}})
				})
				reply, err := echov1.NewEchoServiceClient(cc).Echo(t.Context(), request())
				if reply.GetMessage() != "a" || err != nil {
					t.Errorf("Echo = %v, %v, want a", reply, err)
				}
				wantTimes(t, server, tt.want...)
			})
		})
	}
}

func TestBuiltInPolicyWhereBuiltInRetriesAreOff(t *testing.T) {
	for _, tt := range []struct {
		name string
		dial []grpc.DialOption
	}{
		{"DialOptions", DialOptions(WithBackoff(Constant(second)), WithMaxAttempts(5), WithBudget(Unlimited))},
		{"WithBuiltInRetryDisabled", []grpc.DialOption{grpc.WithDisableRetry(), grpc.WithChainUnaryInterceptor(
			UnaryClientInterceptor(WithBackoff(Constant(second)), WithMaxAttempts(5), WithBudget(Unlimited), WithBuiltInRetryDisabled()))}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				server := serve(t, always(unavailable()))
				cc := server.conn(t, append(tt.dial, grpc.WithDefaultServiceConfig(builtInPolicy))...)
				_, err := echov1.NewEchoServiceClient(cc).Echo(t.Context(), request())
				wantStop(t, err, codes.Unavailable, ErrAttemptsExhausted, 5)
				if got := len(server.attempts()); got != 5 {
					t.Errorf("%d attempts, want our 5", got)
				}
			})
		})
	}
}

func TestAttemptTimeoutIsNotImposedOnGRPCsOwnRetries(t *testing.T) {
	bubble(t, func(t *testing.T) {
		server := serve(t, always(unavailable().after(10*second)))
		cc := server.conn(t, grpc.WithDefaultServiceConfig(builtInPolicy), grpc.WithChainUnaryInterceptor(
			UnaryClientInterceptor(WithAttemptTimeout(15*second))))
		client := echov1.NewEchoServiceClient(cc)
		client.Put(t.Context(), request()) // the channel has been resolved
		before := len(server.attempts())
		if _, err := client.Echo(t.Context(), request()); status.Code(err) != codes.Unavailable {
			t.Errorf("err = %v, want UNAVAILABLE", err)
		}
		if got := len(server.attempts()) - before; got != 3 {
			t.Errorf("%d attempts, want the 3 of gRPC's policy", got)
		}
	})
}

// On a channel that has its service config, such calls pass through: they are not hedged, have no attempt timeout, and
// are not reported.
func TestMethodsLeftToGRPCPassThrough(t *testing.T) {
	for name, opts := range map[string][]Option{
		"retried":         nil,
		"attempt timeout": {WithAttemptTimeout(second / 2)},
		"hedged":          {hedged(9, Hedging{Delay: HedgeAfter(second / 4)})},
	} {
		for _, kind := range callKinds {
			t.Run(name+", "+kind.name, func(t *testing.T) {
				bubble(t, func(t *testing.T) {
					server, logs := serve(t, always(aborted().after(second))), &logRecorder{}
					r := even(t, append(opts, WithLogger(slog.New(logs)), WithObserver(func(_ context.Context, e Event) {
						t.Errorf("%v is reported", e.Kind)
					}))...)
					cc, _ := server.live(t, 0, configOf(retrying(nameEcho, 2)), r.onlyInterceptors()...)
					connect(t, cc)
					err := kind.call(t.Context(), cc, echoMethod)
					var e *Error
					if got := len(server.attempts()); got != 2 || status.Code(err) != codes.Aborted || errors.As(err, &e) {
						t.Errorf("%d attempts and %v, want the 2 of gRPC's policy and its own error", got, err)
					}
					wantLines(t, logs, "WARN…leaving it to gRPC")
				})
			})
		}
	}
}
