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
	"retryPolicy": {"maxAttempts": 3, "initialBackoff": "1s", "maxBackoff": "1s", "backoffMultiplier": 1, "retryableStatusCodes": ["UNAVAILABLE"]}
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
		if want := []Outcome{{Attempt: 1, Result: Ignored}, {Attempt: 1, Result: Ignored},
			{Attempt: 1, Result: Ignored}}; !slices.Equal(budget.heard, want) || budget.asked != nil {
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
						hedged(Hedging{MaxAttempts: 9, Delay: HedgeAfter(second)}))))
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
					grpc.WithChainUnaryInterceptor(UnaryClientInterceptor(hedged(Hedging{Delay: HedgeAfter(second)}))))
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

// DialOptions says that built-in retries are off of the ClientConns that it is given to,
// and of no other that the Retrier is used on.
func TestDialOptionsDoNotSpeakForOtherConnections(t *testing.T) {
	bubble(t, func(t *testing.T) {
		server := serve(t, always(unavailable()))
		r, err := New(WithBackoff(Constant(second)), WithMaxAttempts(5), WithBudget(Unlimited))
		if err != nil {
			t.Fatal(err)
		}
		ours := server.conn(t, append(r.DialOptions(), grpc.WithDefaultServiceConfig(builtInPolicy))...)
		theirs := server.conn(t, grpc.WithChainUnaryInterceptor(r.UnaryClientInterceptor()), grpc.WithDefaultServiceConfig(builtInPolicy))
		for _, tt := range []struct {
			name string
			cc   *grpc.ClientConn
			want int
		}{{"with DialOptions", ours, 5}, {"without", theirs, 3}} {
			before := len(server.attempts())
			if _, err := echov1.NewEchoServiceClient(tt.cc).Echo(t.Context(), request()); status.Code(err) != codes.Unavailable {
				t.Errorf("%s: err = %v, want UNAVAILABLE", tt.name, err)
			}
			if got := len(server.attempts()) - before; got != tt.want {
				t.Errorf("%s: %d attempts, want %d", tt.name, got, tt.want)
			}
		}
	})
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

func TestAttemptTimeoutOnAFreshChannelLeavesGRPCsRetriesAlone(t *testing.T) {
	bubble(t, func(t *testing.T) {
		server := serve(t, always(unavailable().after(10*second)))
		cc := server.conn(t, grpc.WithDefaultServiceConfig(builtInPolicy), grpc.WithChainUnaryInterceptor(
			UnaryClientInterceptor(WithAttemptTimeout(15*second))))
		if _, err := echov1.NewEchoServiceClient(cc).Echo(t.Context(), request()); status.Code(err) != codes.Unavailable {
			t.Errorf("err = %v, want UNAVAILABLE", err)
		}
		if got := len(server.attempts()); got != 3 {
			t.Errorf("%d attempts, want the 3 of gRPC's policy", got)
		}
	})
}

// The first attempt never reaches gRPC, which would end it at the deadline by itself.
func TestAttemptTimeoutWhereBuiltInRetriesAreOff(t *testing.T) {
	bubble(t, func(t *testing.T) {
		server := serve(t, script(ok(), ok()))
		below := func(ctx context.Context, method string, req, reply any, cc *grpc.ClientConn, invoker grpc.UnaryInvoker,
			opts ...grpc.CallOption) error {
			if a, _ := AttemptFromContext(ctx); a.Number > 1 || method != echoMethod {
				return invoker(ctx, method, req, reply, cc, opts...)
			}
			select {
			case <-ctx.Done():
				return status.FromContextError(ctx.Err()).Err()
			case <-time.After(time.Hour):
				return errors.New("the first attempt has all the time in the world")
			}
		}
		cc := server.conn(t, append(DialOptions(steady, WithAttemptTimeout(5*second)),
			grpc.WithDefaultServiceConfig(builtInPolicy), grpc.WithChainUnaryInterceptor(below))...)
		client := echov1.NewEchoServiceClient(cc)
		if _, err := client.Put(t.Context(), request()); err != nil { // the channel knows its service config
			t.Error(err)
		}
		if _, err := client.Echo(t.Context(), request()); err != nil {
			t.Error(err)
		}
		wantTimes(t, server, 0, 6*second)
	})
}

// The service config of a fresh channel is not known when its first stream begins.
func TestAStreamLeftToGRPCHasNoAttemptTimeout(t *testing.T) {
	const config = `{"methodConfig": [{"name": [{"service": "streams"}], "retryPolicy": {"maxAttempts": 3,
		"initialBackoff": "0.1s", "maxBackoff": "1s", "backoffMultiplier": 2, "retryableStatusCodes": ["UNAVAILABLE"]}}]}`
	for _, tt := range []struct {
		kind        *grpc.StreamDesc
		server, app string
	}{
		{serverStream, "recv a; wait 6s; send 1; send 2", "send a; close; recv 1; recv 2; recv EOF"},
		{bidiStream, "recv a; wait 6s; send 1; send 2", "send a; recv 1; recv 2; recv EOF"},
		{clientStream, "recv a; recv EOF; wait 6s; send 1", "send a; close; recv 1"},
		{clientStream, "recv a; recv EOF; wait 6s; send 1", "send a; context; close; recv 1"},
	} {
		t.Run(tt.kind.StreamName, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				server, reported := serveScripts(t, tt.server), &record{}
				cc := server.conn(t, grpc.WithDefaultServiceConfig(config),
					grpc.WithChainStreamInterceptor(StreamClientInterceptor(append(reported.options(), WithAttemptTimeout(5*second))...)))
				openOn(t, cc, tt.kind, reported.onFinish()).play(t, tt.app)
				reported.want(t, nil)
				wantTimes(t, server, 0)
			})
		})
	}
}
