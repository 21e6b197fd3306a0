package grpcretry

import (
	"context"
	"errors"
	"fmt"
	"net"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"go.opentelemetry.io/otel/attribute"
	otelcodes "go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"
	oteltrace "go.opentelemetry.io/otel/trace"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	echov1 "github.com/grpcretry/grpcretry/proto/echo/v1"
	"github.com/grpcretry/grpcretry/telemetry"
)

// recordSpans is a provider that keeps the spans that have ended.
func recordSpans() (*trace.TracerProvider, *tracetest.SpanRecorder) {
	recorder := tracetest.NewSpanRecorder()
	return trace.NewTracerProvider(trace.WithSpanProcessor(recorder)), recorder
}

// withoutWaits has the spans that have ended, except those of waits.
func withoutWaits(recorder *tracetest.SpanRecorder) []trace.ReadOnlySpan {
	return slices.DeleteFunc(slices.Clone(recorder.Ended()), func(s trace.ReadOnlySpan) bool { return s.Name() == telemetry.SpanWait })
}

// eventLines are the events of a span, "name key=value …" with keys in their order.
func eventLines(span trace.ReadOnlySpan) []string {
	var lines []string
	for _, e := range span.Events() {
		lines = append(lines, strings.TrimSpace(e.Name+" "+attributeLine(e.Attributes)))
	}
	return lines
}

func attributeLine(attrs []attribute.KeyValue) string {
	var parts []string
	for _, a := range attrs {
		parts = append(parts, fmt.Sprintf("%s=%s", a.Key, a.Value.String()))
	}
	return strings.Join(parts, " ")
}

func TestEachAttemptIsAnEventOnTheCallersSpan(t *testing.T) {
	for _, tt := range []struct {
		name   string
		script func(int) answer
		opts   []Option
		want   []string
	}{
		{"success", script(ok()), nil, []string{
			"grpcretry.attempt grpcretry.attempt.number=1 rpc.response.status_code=OK grpcretry.decision=success network.peer.address=bufconn"}},
		{"retries", script(unavailable(), overloaded().pushback("7000"), fail(codes.Unavailable, "x", retryInfoOf(10*second)), ok()), nil, []string{
			"grpcretry.attempt grpcretry.attempt.number=1 rpc.response.status_code=UNAVAILABLE grpcretry.decision=retry network.peer.address=bufconn grpcretry.wait_ms=1000 grpcretry.wait_source=backoff grpcretry.budget.balance=1 grpcretry.message=db-down",
			"grpcretry.attempt grpcretry.attempt.number=2 rpc.response.status_code=RESOURCE_EXHAUSTED grpcretry.decision=retry network.peer.address=bufconn grpcretry.wait_ms=7000 grpcretry.wait_source=pushback grpcretry.budget.balance=1 grpcretry.message=queue full",
			"grpcretry.attempt grpcretry.attempt.number=3 rpc.response.status_code=UNAVAILABLE grpcretry.decision=retry network.peer.address=bufconn grpcretry.wait_ms=11000 grpcretry.wait_source=retry_info grpcretry.budget.balance=1 grpcretry.message=x",
			"grpcretry.attempt grpcretry.attempt.number=4 rpc.response.status_code=OK grpcretry.decision=success network.peer.address=bufconn"}},
		{"stop", script(unavailable().pushback("-1")), nil, []string{
			"grpcretry.attempt grpcretry.attempt.number=1 rpc.response.status_code=UNAVAILABLE grpcretry.decision=stop network.peer.address=bufconn grpcretry.reason=pushback grpcretry.budget.balance=1 grpcretry.message=db-down"}},
		{"not retryable", script(fail(codes.NotFound, "x")), nil, []string{
			"grpcretry.attempt grpcretry.attempt.number=1 rpc.response.status_code=NOT_FOUND grpcretry.decision=stop network.peer.address=bufconn grpcretry.reason=not_retryable grpcretry.budget.balance=1 grpcretry.message=x"}},
		{"disabled", script(ok()), []Option{Disable()}, nil},
	} {
		t.Run(tt.name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				server := serve(t, tt.script)
				provider, recorder := recordSpans()
				ctx, span := provider.Tracer("test").Start(t.Context(), "the caller's")
				client := server.fixed(t, 0.5, append([]Option{steady, WithBudget(&aBudget{})}, tt.opts...)...)
				client.Echo(ctx, request())
				span.End()
				if got := eventLines(withoutWaits(recorder)[0]); !slices.Equal(got, tt.want) {
					t.Errorf("events are\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(tt.want, "\n"))
				}
			})
		})
	}
}

func TestCallSpan(t *testing.T) {
	for _, tt := range []struct {
		name       string
		script     func(int) answer
		opts       []Option
		wantAttrs  string
		wantStatus otelcodes.Code
		wantEvents int
	}{
		{"recovered", script(unavailable(), ok()), nil,
			"rpc.response.status_code=OK grpcretry.attempts=2", otelcodes.Unset, 2},
		{"gave up", always(unavailable()), []Option{WithMaxAttempts(3)},
			"rpc.response.status_code=UNAVAILABLE grpcretry.attempts=3 grpcretry.reason=exhausted", otelcodes.Error, 3},
		{"not retryable", always(fail(codes.NotFound, "x")), nil,
			"rpc.response.status_code=NOT_FOUND grpcretry.attempts=1 grpcretry.reason=not_retryable", otelcodes.Error, 1},
	} {
		t.Run(tt.name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				server := serve(t, tt.script)
				provider, recorder := recordSpans()
				ctx, parent := provider.Tracer("test").Start(t.Context(), "the caller's")
				client := server.client(t, append([]Option{steady, WithCallSpan(true), WithTracerProvider(provider)}, tt.opts...)...)
				client.Echo(ctx, request())
				parent.End()
				spans := withoutWaits(recorder)
				if len(spans) != 2 {
					t.Fatalf("%d spans, want the call's and the caller's", len(spans))
				}
				span := spans[0]
				if span.Name() != "grpcretry.test.v1.EchoService/Echo" || span.SpanKind() != oteltrace.SpanKindInternal ||
					span.Parent().SpanID() != parent.SpanContext().SpanID() {
					t.Errorf("span is %q, %v, below %v", span.Name(), span.SpanKind(), span.Parent().SpanID())
				}
				want := "rpc.system.name=grpc rpc.method=grpcretry.test.v1.EchoService/Echo " + tt.wantAttrs
				if got := attributeLine(span.Attributes()); got != want {
					t.Errorf("attributes are %s, want %s", got, want)
				}
				if got := span.Status().Code; got != tt.wantStatus {
					t.Errorf("status is %v, want %v", got, tt.wantStatus)
				}
				if got := len(span.Events()); got != tt.wantEvents || len(spans[1].Events()) != 0 {
					t.Errorf("%d events on the call span and %d on the caller's, want %d and none", got, len(spans[1].Events()),
						tt.wantEvents)
				}
				if got, want := span.EndTime().Sub(span.StartTime()), server.times()[len(server.times())-1]; got != want {
					t.Errorf("span lasts %v, want %v", got, want)
				}
			})
		})
	}
}

// Each wait is a span below the call span, from the decision to the next attempt or the call's end.
func TestWaitSpans(t *testing.T) {
	hedges := []CallOption{WithHedging(Hedging{MaxAttempts: 3, Delay: HedgeAfter(second), Budget: Unlimited})}
	for _, tt := range []struct {
		name   string
		script func(int) answer
		cancel time.Duration
		opts   []CallOption
		want   []string
	}{
		{"waits", script(unavailable().after(second), overloaded().pushback("7000"), fail(codes.Unavailable, "x", retryInfoOf(10*second)), ok()), 0, nil, []string{
			"1s to 2s grpcretry.next_attempt.number=2 grpcretry.wait_ms=1000 grpcretry.wait_source=backoff",
			"2s to 9s grpcretry.next_attempt.number=3 grpcretry.wait_ms=7000 grpcretry.wait_source=pushback",
			"9s to 19s grpcretry.next_attempt.number=4 grpcretry.wait_ms=10000 grpcretry.wait_source=retry_info"}},
		{"no wait", script(unavailable().pushback("0"), ok()), 0, nil, nil},
		{"no retry", script(unavailable()), 0, []CallOption{WithBudget(stingy{})}, nil},
		{"the caller goes away", script(unavailable()), second / 4, nil, []string{
			"0s to 250ms grpcretry.next_attempt.number=2 grpcretry.wait_ms=1000 grpcretry.wait_source=backoff grpcretry.reason=cancelled"}},
		{"hedged, with a failure that is followed immediately", script(unavailable(), ok()), 0, hedges, nil},
		{"hedged, while another attempt is in flight", script(ok().after(3*second/2), hang()), 0, hedges, nil},
		{"hedged, with a failure while another attempt is in flight", script(unavailable().pushback("7000").after(3*second/2), ok().after(2*second)), 0, hedges, nil},
		{"hedged, with nothing in flight", script(unavailable().pushback("7000").after(3*second/2), unavailable().after(second), ok()), 0, hedges, []string{
			"2s to 8.5s grpcretry.next_attempt.number=3 grpcretry.wait_ms=6500 grpcretry.wait_source=pushback"}},
		{"hedged, and the caller goes away", script(unavailable().pushback("7000")), second / 4, hedges, []string{
			"0s to 250ms grpcretry.next_attempt.number=2 grpcretry.wait_ms=7000 grpcretry.wait_source=pushback grpcretry.reason=cancelled"}},
		{"an attempt that timed out", script(hang(), ok()), 0, []CallOption{WithAttemptTimeout(2 * second)}, []string{
			"2s to 3s grpcretry.next_attempt.number=2 grpcretry.wait_ms=1000 grpcretry.wait_source=backoff"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				server := serve(t, tt.script)
				provider, recorder := recordSpans()
				start, ctx := time.Now(), t.Context()
				if tt.cancel > 0 {
					limited, cancel := context.WithCancel(ctx)
					time.AfterFunc(tt.cancel, cancel)
					ctx = limited
				}
				client := server.fixed(t, 0, steady, WithBudget(Unlimited), WithCallSpan(true), WithTracerProvider(provider),
					WithMethod(echoMethod, tt.opts...))
				client.Echo(ctx, request())
				call := withoutWaits(recorder)[0]
				wantWaits(t, recorder, start, tt.want...)
				for _, s := range recorder.Ended() {
					if s.Name() == telemetry.SpanWait && s.Parent().SpanID() != call.SpanContext().SpanID() {
						t.Errorf("the wait's span is below %v, want below the call's", s.Parent().SpanID())
					}
				}
			})
		})
	}
}

// A stream's waits are spans, too, and so is the wait for a connection.
func TestWaitSpansWithoutAConnection(t *testing.T) {
	for name, call := range map[string]func(context.Context, echov1.EchoServiceClient) error{
		"stream": func(ctx context.Context, client echov1.EchoServiceClient) error {
			stream, err := client.Chat(ctx)
			if err == nil {
				_, err = stream.Recv()
			}
			return err
		},
		"hedged": func(ctx context.Context, client echov1.EchoServiceClient) error {
			_, err := client.Echo(ctx, request())
			return err
		},
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				provider, recorder := recordSpans()
				lost := grpc.WithContextDialer(func(context.Context, string) (net.Conn, error) { return nil, errRefused })
				cc, err := grpc.NewClient("passthrough:///nowhere", append(DialOptions(steady, WithCallSpan(true), WithTracerProvider(provider),
					hedged(Hedging{Delay: HedgeAfter(time.Hour)})), lost, grpc.WithTransportCredentials(insecure.NewCredentials()))...)
				if err != nil {
					t.Fatal(err)
				}
				defer cc.Close()
				start := time.Now()
				if err := call(t.Context(), echov1.NewEchoServiceClient(cc)); !errors.Is(err, ErrNotConnected) {
					t.Errorf("err = %v, want no connection", err)
				}
				wantWaits(t, recorder, start, "0s to 10s grpcretry.next_attempt.number=2 grpcretry.wait_ms=1000 grpcretry.wait_source=connect grpcretry.reason=not_connected")
			})
		})
	}
}

// A wait's span ends with its call, however that ends, and says why no attempt followed.
func TestWaitSpansEndWithTheirCall(t *testing.T) {
	const wait = "grpcretry.next_attempt.number=2 grpcretry.wait_ms=60000 grpcretry.wait_source=pushback"
	crash := func(how func()) Option {
		return WithObserver(func(_ context.Context, e Event) {
			if e.Kind == Decision {
				time.Sleep(second)
				how()
			}
		})
	}
	cause := errors.New("enough")
	for _, tt := range []struct {
		name string
		opts []Option
		end  func(cancel context.CancelCauseFunc, cc *grpc.ClientConn)
		want []string
	}{
		{"the caller cancels", nil, func(cancel context.CancelCauseFunc, _ *grpc.ClientConn) { cancel(cause) },
			[]string{"0s to 1s " + wait + " grpcretry.reason=cancelled"}},
		{"the caller's deadline comes early", nil, func(cancel context.CancelCauseFunc, _ *grpc.ClientConn) { cancel(context.DeadlineExceeded) },
			[]string{"0s to 1s " + wait + " grpcretry.reason=deadline_exceeded"}},
		{"the ClientConn is closed", nil, func(_ context.CancelCauseFunc, cc *grpc.ClientConn) { cc.Close() },
			[]string{"0s to 1s " + wait + " grpcretry.reason=conn_closed"}},
		{"an observer panics", []Option{crash(func() { panic("drawn") })}, nil, nil}, // before the wait starts
		{"an observer calls Goexit", []Option{crash(runtime.Goexit)}, nil, nil},
	} {
		for _, kind := range []struct {
			name string
			opts []Option
			call func(context.Context, *grpc.ClientConn)
		}{
			{"unary", nil, makeEcho},
			{"hedged", []Option{hedged(Hedging{Delay: HedgeAfter(time.Hour)})}, makeEcho},
			{"stream", nil, makeStream},
		} {
			t.Run(tt.name+", "+kind.name, func(t *testing.T) {
				bubble(t, func(t *testing.T) {
					server := serve(t, script(unavailable().pushback("60000")), grpc.UnknownServiceHandler(func(_ any, s grpc.ServerStream) error {
						s.SetTrailer(metadata.Pairs(pushbackKey, "60000"))
						return status.Error(codes.Unavailable, "db-down")
					}))
					provider, recorder := recordSpans()
					opts := slices.Concat(kind.opts, tt.opts, []Option{WithBudget(Unlimited), WithCallSpan(true), WithTracerProvider(provider)})
					cc := server.conn(t, DialOptions(opts...)...)
					start := time.Now()
					ctx, cancel := context.WithCancelCause(t.Context())
					defer cancel(nil)
					if tt.end != nil {
						time.AfterFunc(second, func() { tt.end(cancel, cc) })
					}
					over := make(chan struct{})
					go func() { // which Goexit may end
						defer close(over)
						defer func() { _ = recover() }()
						kind.call(ctx, cc)
					}()
					<-over
					wantWaits(t, recorder, start, tt.want...)
				})
			})
		}
	}
}

func makeEcho(ctx context.Context, cc *grpc.ClientConn) {
	echov1.NewEchoServiceClient(cc).Echo(ctx, request())
}

func makeStream(ctx context.Context, cc *grpc.ClientConn) {
	if stream, err := cc.NewStream(ctx, serverStream, "/test.Streams/Expand"); err == nil && stream.CloseSend() == nil {
		stream.RecvMsg(&echov1.EchoResponse{})
	}
}

// wantWaits compares the spans of waits, "start to end attributes", and checks that every span has
// ended.
func wantWaits(t *testing.T, recorder *tracetest.SpanRecorder, start time.Time, want ...string) {
	t.Helper()
	var got []string
	for _, s := range recorder.Ended() {
		if s.Name() == telemetry.SpanWait {
			got = append(got, fmt.Sprintf("%v to %v %s", s.StartTime().Sub(start), s.EndTime().Sub(start), attributeLine(s.Attributes())))
		}
	}
	wantList(t, "waits", got, want...)
	if started, ended := len(recorder.Started()), len(recorder.Ended()); started != ended {
		t.Errorf("%d spans started, %d ended", started, ended)
	}
}

func TestNoCallSpanUnlessAskedFor(t *testing.T) {
	bubble(t, func(t *testing.T) {
		server := serve(t, script(unavailable(), ok()))
		provider, recorder := recordSpans()
		server.client(t, steady, WithTracerProvider(provider)).Echo(t.Context(), request())
		if got := recorder.Started(); len(got) != 0 {
			t.Errorf("%d spans", len(got))
		}
	})
}

func TestNamesOfConstants(t *testing.T) {
	for _, tt := range []struct {
		got  fmt.Stringer
		want string
	}{
		{FullJitter, "full"}, {NoJitter, "none"}, {Jitter(9), "Jitter(9)"},
		{WaitNone, "none"}, {WaitRetryInfo, "retry_info"}, {WaitSource(9), "WaitSource(9)"},
	} {
		if got := tt.got.String(); got != tt.want {
			t.Errorf("%#v is %q, want %q", tt.got, got, tt.want)
		}
	}
}

func TestContextBelowTheCallSpanIsItsChild(t *testing.T) {
	bubble(t, func(t *testing.T) {
		server := serve(t, script(ok()))
		provider, recorder := recordSpans()
		var inside oteltrace.SpanContext
		client := server.client(t, WithCallSpan(true), WithTracerProvider(provider),
			WithObserver(func(ctx context.Context, e Event) { inside = oteltrace.SpanContextFromContext(ctx) }))
		client.Echo(t.Context(), request())
		if got := withoutWaits(recorder)[0].SpanContext(); got.SpanID() != inside.SpanID() {
			t.Errorf("observers run below span %v, want %v", inside.SpanID(), got.SpanID())
		}
	})
}

// The call span says which attempt won, which lost, and why each was sent; nothing of a lost
// hedge is an error.
func TestHedgesOnTheCallSpan(t *testing.T) {
	bubble(t, func(t *testing.T) {
		server := serve(t, script(hang(), unavailable().after(second/10), ok()))
		provider, recorder := recordSpans()
		server.client(t, WithBudget(Unlimited), WithTracerProvider(provider), WithCallSpan(true),
			hedged(Hedging{MaxAttempts: 3, Delay: HedgeAfter(second)})).Echo(t.Context(), request())
		spans := withoutWaits(recorder)
		if len(spans) != 1 {
			t.Fatalf("%d spans, want 1", len(spans))
		}
		const event = "grpcretry.attempt grpcretry.attempt.number="
		want := []string{
			event + "2 rpc.response.status_code=UNAVAILABLE grpcretry.decision=retry network.peer.address=bufconn " +
				"grpcretry.attempt.hedge=true grpcretry.attempt.sent_after=hedge_delay grpcretry.wait_ms=0 grpcretry.wait_source=non_fatal grpcretry.message=db-down",
			event + "1 rpc.response.status_code=CANCELLED grpcretry.decision=lost network.peer.address=bufconn",
			event + "3 rpc.response.status_code=OK grpcretry.decision=success network.peer.address=bufconn " +
				"grpcretry.attempt.hedge=true grpcretry.attempt.sent_after=non_fatal",
		}
		if got := eventLines(spans[0]); !slices.Equal(got, want) {
			t.Errorf("events are\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
		}
		attrs := attributeLine(spans[0].Attributes())
		if !strings.HasSuffix(attrs, "rpc.response.status_code=OK grpcretry.attempts=3 grpcretry.winner=3") ||
			spans[0].Status().Code != otelcodes.Unset {
			t.Errorf("call span has %s and status %v, want OK, 3 attempts, the winner, and no error", attrs, spans[0].Status())
		}
	})
}

// The last attempt's decision was to retry: something must say why that never came.
func TestACallThatEndsInAWaitLeavesAnEvent(t *testing.T) {
	for name, opts := range map[string][]Option{
		"retried": nil,
		"hedged":  {hedged(Hedging{Delay: HedgeAfter(time.Hour)})},
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				server := serve(t, script(unavailable().pushback("60000")))
				provider, recorder := recordSpans()
				ctx, span := provider.Tracer("test").Start(t.Context(), "caller")
				ctx, cancel := context.WithCancel(ctx)
				time.AfterFunc(second, cancel)
				server.client(t, append(opts, WithBudget(Unlimited))...).Echo(ctx, request())
				span.End()
				lines := eventLines(withoutWaits(recorder)[0])
				if last := lines[len(lines)-1]; len(lines) != 2 || last != "grpcretry.stop grpcretry.reason=cancelled" {
					t.Errorf("events are %q, want the attempt's and the reason why there was no other", lines)
				}
			})
		})
	}
}

func TestTheMessageOfAFailureIsOnItsEvent(t *testing.T) {
	long := strings.Repeat("ä", 300)
	for _, tt := range []struct{ name, message, want string }{
		{"short", "db-down", "db-down"},
		{"none", "", ""},
		{"long", long, long[:2*126] + "…"}, // at most 256 bytes, at a character
		{"just fits", long[:256], long[:256]},
		{"control characters", "a\x00\n\x1b[31m", "a\x00\n\x1b[31m"}, // exporters and viewers escape them
	} {
		t.Run(tt.name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				server := serve(t, script(fail(codes.NotFound, tt.message)))
				provider, recorder := recordSpans()
				ctx, span := provider.Tracer("test").Start(t.Context(), "the caller's")
				server.client(t).Echo(ctx, request())
				span.End()
				got := "none"
				for _, a := range withoutWaits(recorder)[0].Events()[0].Attributes {
					if a.Key == telemetry.AttrMessage {
						got = a.Value.AsString()
					}
				}
				if got != tt.want && (tt.want != "" || got != "none") {
					t.Errorf("the event's message is %q, want %q", got, tt.want)
				}
			})
		})
	}
}

// Some servers send other bytes than UTF-8. What stands for them is longer, and must fit as well.
func TestMessagesThatAreNotUTF8(t *testing.T) {
	const other, mark = "\uFFFD", "…"
	for _, tt := range []struct{ name, message, want string }{
		{"short", "a\xff\xfe", "a" + other},
		{"grows", strings.Repeat("a\xff", 128), strings.Repeat("a"+other, 63) + "a" + mark}, // 4*63+1+3 = 256
		{"no beginning of a character", strings.Repeat("\x80", 300), other + mark},
	} {
		t.Run(tt.name, func(t *testing.T) {
			provider, recorder := recordSpans()
			ctx, span := provider.Tracer("test").Start(t.Context(), "the caller's")
			doer(t, 0).Do(ctx, "/a/x", func(context.Context) error { return status.Error(codes.NotFound, tt.message) })
			span.End()
			got := attributeLine(recorder.Ended()[0].Events()[0].Attributes)
			if _, message, _ := strings.Cut(got, "grpcretry.message="); message != tt.want {
				t.Errorf("the event's message is %q, want %q", message, tt.want)
			}
		})
	}
}

func TestTheStatusOfACallSpanIsBounded(t *testing.T) {
	bubble(t, func(t *testing.T) {
		server := serve(t, always(fail(codes.Unavailable, strings.Repeat("x", 5000))))
		provider, recorder := recordSpans()
		server.client(t, WithMaxAttempts(2), WithCallSpan(true), WithTracerProvider(provider)).Echo(t.Context(), request())
		if got := withoutWaits(recorder)[0].Status().Description; len(got) > 2*maxMessage || !strings.HasPrefix(got, "grpcretry: gave up after 2 attempts") {
			t.Errorf("the description of the status has %d bytes: %s", len(got), got)
		}
	})
}

// A fifth of a retry for each call is no number of floating point.
func TestBalancesAreRounded(t *testing.T) {
	bubble(t, func(t *testing.T) {
		server := serve(t, always(unavailable()))
		provider, recorder := recordSpans()
		meters, reader := readMetrics()
		ctx, span := provider.Tracer("test").Start(t.Context(), "the caller's")
		server.client(t, WithMaxAttempts(2), WithBackoff(Constant(0)), WithMeterProvider(meters),
			WithBudget(&unevenBudget{})).Echo(ctx, request())
		span.End()
		for _, line := range eventLines(withoutWaits(recorder)[0]) {
			if !strings.Contains(line+" ", "grpcretry.budget.balance=1.2 ") {
				t.Errorf("event without a balance of 1.2: %s", line)
			}
		}
		if lines := metricLines(t, reader); !slices.Contains(lines, "grpcretry.budget.balance 1.2 grpcretry.budget=all") {
			t.Errorf("metrics without a balance of 1.2:\n%s", strings.Join(lines, "\n"))
		}
	})
}

type unevenBudget struct{ aBudget }

func (*unevenBudget) Balance(time.Time) float64 { return 1.2000000000000002 }
