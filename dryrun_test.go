package grpcretry

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"net"
	"strings"
	"testing"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"

	"github.com/grpcretry/grpcretry/internal/reasons"
	"github.com/grpcretry/grpcretry/internal/recorded"
	echov1 "github.com/grpcretry/grpcretry/proto/echo/v1"
	"github.com/grpcretry/grpcretry/telemetry"
)

// A dry run makes one attempt, at once, and returns gRPC's own error. The decision says what would have followed.
func TestDryRunSaysWhatWouldBeDone(t *testing.T) {
	for _, tt := range []struct {
		name   string
		opts   []Option
		script string
		reason error
		wait   time.Duration
		source WaitSource
	}{
		{"a retry after the backoff", nil, "fail UNAVAILABLE", errWouldRetry, second, WaitBackoff},
		{"a retry after a pushback", nil, "pushback 7000; fail UNAVAILABLE", errWouldRetry, 7 * second, WaitPushback},
		{"a retry at once", nil, "pushback 0; fail UNAVAILABLE", errWouldRetry, 0, WaitPushback},
		{"a stop by the server", nil, "pushback -1; fail UNAVAILABLE", ErrPushback, 0, waitNone},
		{"a final code", nil, "fail NOT_FOUND", ErrNotRetryable, 0, waitNone},
		{"no token", []Option{WithBudget(stingy{})}, "fail UNAVAILABLE", ErrBudgetExhausted, second, WaitBackoff},
		{"no token and no patience", []Option{WithBudget(stingy{}), WithPatience(0)}, "fail UNAVAILABLE", ErrBudgetExhausted, second,
			WaitBackoff},
		{"no time", []Option{WithMaxElapsed(second)}, "fail UNAVAILABLE", ErrMaxElapsed, second, WaitBackoff},
		{"a method that may have run", []Option{WithUnsentOnly(true)}, "fail UNAVAILABLE", ErrMayHaveRun, 0, waitNone},
		{"a hedged method", []Option{WithHedging(Hedging{Delay: HedgeAfter(1), AllMethodsAreSafe: true})}, "fail UNAVAILABLE", errWouldRetry,
			second, WaitBackoff},
	} {
		t.Run(tt.name, func(t *testing.T) {
			everyKind(t, func(t *testing.T, kind callKind) {
				server := serveScripts(t, "recv hello; "+tt.script, onceMore)
				var decision, end Event
				opts := append([]Option{steady, WithDryRun(true), WithObserver(func(_ context.Context, e Event) {
					switch e.Kind {
					case Decision:
						decision = e
					case CallEnd:
						end = e
					}
				})}, tt.opts...)
				err := kind.call(t.Context(), server.conn(t, DialOptions(opts...)...), anyMethod)
				code := codes.Unavailable
				if tt.reason == ErrNotRetryable {
					code = codes.NotFound
				}
				wantUntouched(t, err, code, "failed in attempt 1")
				wantTimes(t, server, 0)
				if took := time.Since(server.start); took != 0 {
					t.Errorf("the call took %v, want 0", took)
				}
				if !errors.Is(decision.Reason, tt.reason) || decision.Wait != tt.wait || decision.WaitSource != tt.source {
					t.Errorf("the decision is %v, %v by %v, want %v, %v by %v", decision.Reason, decision.Wait, decision.WaitSource, tt.reason,
						tt.wait, tt.source)
				}
				if end.Wait != tt.wait || end.WaitSource != tt.source {
					t.Errorf("the call ends with a wait of %v by %v, want the decision's", end.Wait, end.WaitSource)
				}
				if got := outcomeOf(end); got != reasons.Of(tt.reason).Word {
					t.Errorf("the outcome is %q, want %q", got, reasons.Of(tt.reason).Word)
				}
			})
		})
	}
}

// Nothing is spent or waited for, and slow attempts go on.
func TestDryRunDoesNothing(t *testing.T) {
	for name, backoff := range map[string]Option{"budget": steady, "budget, retries at once": WithBackoff(Constant(0))} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				budget := &tally{}
				server := serve(t, script(unavailable(), ok()))
				client := server.fixed(t, 0, backoff, WithDryRun(true), WithBudget(budget))
				_, first := client.Echo(t.Context(), request())
				_, second := client.Echo(t.Context(), request())
				if want := (counts{told: [5]int{Succeeded: 1, Failed: 1}, highest: 1}); status.Code(first) != codes.Unavailable || second != nil ||
					budget.counts != want {
					t.Errorf("%v, %v, and the budget is %+v, want UNAVAILABLE, a success and %+v", first, second, budget.counts, want)
				}
			})
		})
	}
	t.Run("target", func(t *testing.T) {
		bubble(t, func(t *testing.T) {
			logs := &logRecorder{}
			server := serve(t, always(unavailable()))
			client := server.client(t, WithBackoff(Constant(0)), WithDryRun(true), WithBudget(stingy{}), WithLogger(slog.New(logs)))
			_, _ = client.Echo(t.Context(), request())
			if text := strings.Join(logs.lines(), "\n"); strings.Contains(text, "calls wait for it") {
				t.Errorf("logged\n%s\nalthough no call waits", text)
			}
		})
	})
	t.Run("connection", func(t *testing.T) {
		everyKind(t, func(t *testing.T, kind callKind) {
			start := time.Now()
			retrier := retrierOf(t, WithDryRun(true))
			cc, err := grpc.NewClient("passthrough:///nobody",
				append(retrier.DialOptions(), grpc.WithTransportCredentials(insecure.NewCredentials()),
					grpc.WithContextDialer(func(context.Context, string) (net.Conn, error) { return nil, errors.New("refused") }))...)
			if err != nil {
				t.Fatal(err)
			}
			defer cc.Close()
			wantUntouched(t, kind.call(t.Context(), cc, anyMethod), codes.Unavailable,
				`connection error: desc = "transport: Error while dialing: refused"`)
			if u := retrier.usage.now(); time.Since(start) != 0 || u.WaitingCalls != 0 || retrier.targets.states(time.Now())[0].Waiting != 0 {
				t.Errorf("after %v: %+v, %+v, want nothing that waits", time.Since(start), u, retrier.targets.states(time.Now()))
			}
		})
	})
	t.Run("attempt timeout", func(t *testing.T) {
		for name, off := range map[string]Option{
			"on": WithMaxAttempts(4), "off": Disable(),
			"method off": WithMethod(echoMethod, Disable()), "functions off": WithMethod("/sql/", Disable()),
		} {
			bubble(t, func(t *testing.T) {
				server := serve(t, always(ok().after(10*second)))
				r := retrierOf(t, off, WithDryRun(true), WithAttemptTimeout(second))
				if err := callKinds[0].call(t.Context(), server.conn(t, r.DialOptions()...), echoMethod); err != nil {
					t.Errorf("%s: %v, want the slow response", name, err)
				}
				err := r.Do(t.Context(), "/sql/read", func(ctx context.Context) error { time.Sleep(2 * second); return ctx.Err() })
				if err != nil {
					t.Errorf("%s: a function returns %v, want nil", name, err)
				}
			})
		}
	})
	t.Run("gRPC's own retries", func(t *testing.T) {
		everyKind(t, func(t *testing.T, kind callKind) {
			everyMethod := strings.Replace(builtInPolicy, `"service": "grpcretry.test.v1.EchoService", "method": "Echo"`, "", 1)
			server := serveScripts(t, "recv hello; fail UNAVAILABLE", onceMore)
			cc := server.conn(t, grpc.WithDefaultServiceConfig(everyMethod),
				grpc.WithChainUnaryInterceptor(UnaryClientInterceptor(WithDryRun(true), WithServiceConfig(everyMethod))),
				grpc.WithChainStreamInterceptor(StreamClientInterceptor(WithDryRun(true), WithServiceConfig(everyMethod))))
			if err := kind.call(t.Context(), cc, anyMethod); err != nil {
				t.Errorf("err = %v, want gRPC to retry", err)
			}
		})
	})
}

func TestDryRunIsSeenInSpansMetricsAndLogs(t *testing.T) {
	bubble(t, func(t *testing.T) {
		spans, meters, logs := &recorded.Spans{}, &recorded.Meters{}, &logRecorder{}
		r := doer(t, 0, steady, WithDryRun(true), WithCallSpan(true), WithTracerProvider(spans), WithMeterProvider(meters),
			WithLogger(slog.New(logs)))
		logs.clear() // of the warning that nothing is retried
		_, _ = newEchoClient(t, serve(t, always(unavailable())), r).Echo(t.Context(), request())
		wantLines(t, logs, "level=DEBUG…grpcretry: would retry…method=/grpcretry.test.v1.EchoService/Echo target=passthrough:///echo "+
			"attempt=1 code=UNAVAILABLE wait=1s source=backoff error=db-down")
		event := spans.Ended()[0].Events()[0]
		attrs := attribute.NewSet(event.Attributes...)
		for key, want := range map[attribute.Key]string{telemetry.AttrDecision: "would_retry", telemetry.AttrReason: "would_retry",
			telemetry.AttrWaitSource: "backoff"} {
			if got, _ := attrs.Value(key); got.AsString() != want {
				t.Errorf("%s of %s is %q, want %q", key, event.Name, got.AsString(), want)
			}
		}
		if got := strings.Join(metricLines(t, meters), "\n"); !strings.Contains(got, "would_retry") {
			t.Errorf("the metrics are\n%s\nwithout would_retry", got)
		}
	})
}

// By io.EOF, gRPC reports a unary call whose connection it has lost. A dry run returns it as it is.
func TestADryRunReturnsTheEOFOfAUnaryCall(t *testing.T) {
	ends := func(
		ctx context.Context, method string, req, reply any, cc *grpc.ClientConn, next grpc.UnaryInvoker, opts ...grpc.CallOption,
	) error {
		if err := next(ctx, method, req, reply, cc, opts...); err != nil {
			return err
		}
		return io.EOF
	}
	for _, dry := range []bool{true, false} {
		bubble(t, func(t *testing.T) {
			server := serve(t, always(ok()))
			opts := append(DialOptions(steady, WithDryRun(dry)), grpc.WithChainUnaryInterceptor(ends))
			_, err := echov1.NewEchoServiceClient(server.conn(t, opts...)).Echo(t.Context(), request())
			if (err == io.EOF) != dry || (status.Code(err) == codes.Unavailable) == dry || (len(server.attempts()) == 1) != dry {
				t.Errorf("dry run %t: Echo = %v after %d attempts", dry, err, len(server.attempts()))
			}
		})
	}
}

// A dry run does not give up, and is not counted as if it had.
func TestADryRunIsNotCountedAsGivenUp(t *testing.T) {
	bubble(t, func(t *testing.T) {
		r := retrierOf(t, WithDryRun(true))
		for range 30 {
			r.Do(t.Context(), "/x/y", func(context.Context) error { return errUnavailable })
			time.Sleep(second)
		}
		if got := r.targets.states(time.Now())[0].GaveUp; got != 0 {
			t.Errorf("%d calls have given up, want none", got)
		}
	})
}

// A dry run does nothing, so a Retrier chained below it retries as ever.
func TestARetrierBelowADryRunRetries(t *testing.T) {
	everyKind(t, func(t *testing.T, kind callKind) {
		server := serveScripts(t, "recv hello; fail UNAVAILABLE", "recv hello; send hello")
		var seen []error
		above := retrierOf(t, WithDryRun(true), WithObserver(func(_ context.Context, e Event) {
			if e.Kind == CallEnd {
				seen = append(seen, e.Err)
			}
		}))
		dial := append(above.DialOptions(), DialOptions(WithBackoff(Constant(second)))...)
		if err := kind.call(t.Context(), server.conn(t, dial...), anyMethod); err != nil {
			t.Error(err)
		}
		wantTimes(t, server, 0, second)
		if len(seen) != 1 || seen[0] != nil {
			t.Errorf("the dry run saw calls end with %v, want one success", seen)
		}
	})
}
