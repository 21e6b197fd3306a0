package grpcretry

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	otelcodes "go.opentelemetry.io/otel/codes"
	oteltrace "go.opentelemetry.io/otel/trace"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/grpcretry/grpcretry/internal/recorded"
	"github.com/grpcretry/grpcretry/telemetry"
)

// withoutWaits has the spans that have ended, except those of waits.
func withoutWaits(spans *recorded.Spans) []*recorded.Span {
	return slices.DeleteFunc(spans.Ended(), func(s *recorded.Span) bool { return s.Name() == telemetry.SpanWait })
}

// eventLines are the events of a span, "name key=value …" with keys in their order.
func eventLines(span *recorded.Span) []string {
	var lines []string
	for _, e := range span.Events() {
		lines = append(lines, strings.TrimSpace(e.Name+" "+recorded.Text(e.Attributes)))
	}
	return lines
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
		{"retries", script(unavailable(), overloaded().pushback("7000"), fail(codes.Unavailable, "x", retryInfoOf(10*second)), ok()),
			nil, []string{
				"grpcretry.attempt grpcretry.attempt.number=1 rpc.response.status_code=UNAVAILABLE grpcretry.decision=retry " +
					"network.peer.address=bufconn grpcretry.wait_ms=1000 grpcretry.wait_source=backoff grpcretry.budget.balance=1 " +
					"grpcretry.message=db-down",
				"grpcretry.attempt grpcretry.attempt.number=2 rpc.response.status_code=RESOURCE_EXHAUSTED grpcretry.decision=retry " +
					"network.peer.address=bufconn grpcretry.wait_ms=7000 grpcretry.wait_source=pushback grpcretry.budget.balance=1 " +
					"grpcretry.message=queue full",
				"grpcretry.attempt grpcretry.attempt.number=3 rpc.response.status_code=UNAVAILABLE grpcretry.decision=retry " +
					"network.peer.address=bufconn grpcretry.wait_ms=11000 grpcretry.wait_source=retry_info grpcretry.budget.balance=1 grpcretry.message=x",
				"grpcretry.attempt grpcretry.attempt.number=4 rpc.response.status_code=OK grpcretry.decision=success network.peer.address=bufconn"}},
		{"stop", script(unavailable().pushback("-1")), nil, []string{
			"grpcretry.attempt grpcretry.attempt.number=1 rpc.response.status_code=UNAVAILABLE grpcretry.decision=stop " +
				"network.peer.address=bufconn grpcretry.reason=pushback grpcretry.budget.balance=1 grpcretry.message=db-down"}},
		{"not retryable", script(fail(codes.NotFound, "x")), nil, []string{
			"grpcretry.attempt grpcretry.attempt.number=1 rpc.response.status_code=NOT_FOUND grpcretry.decision=stop " +
				"network.peer.address=bufconn grpcretry.reason=not_retryable grpcretry.budget.balance=1 grpcretry.message=x"}},
		{"stop in a wait", script(unavailable()), []Option{WithBudget(stingy{}), WithPatience(5 * second)}, []string{
			"grpcretry.attempt grpcretry.attempt.number=1 rpc.response.status_code=UNAVAILABLE grpcretry.decision=retry " +
				"network.peer.address=bufconn grpcretry.wait_ms=1000 grpcretry.wait_source=backoff grpcretry.budget.balance=0 " +
				"grpcretry.message=db-down",
			"grpcretry.stop grpcretry.reason=target_down"}},
		{"disabled", script(ok()), []Option{Disable()}, nil},
	} {
		t.Run(tt.name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				server := serve(t, tt.script)
				spans := &recorded.Spans{}
				ctx, span := spans.Tracer("test").Start(t.Context(), "the caller's")
				client := server.fixed(t, 0.5, append([]Option{steady, WithBudget(&aBudget{})}, tt.opts...)...)
				client.Echo(ctx, request())
				span.End()
				if got := eventLines(withoutWaits(spans)[0]); !slices.Equal(got, tt.want) {
					t.Errorf("events are\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(tt.want, "\n"))
				}
			})
		})
	}
}

func TestTheCallSpanCountsAnAttemptThatPanics(t *testing.T) {
	for panics := 1; panics <= 3; panics++ {
		bubble(t, func(t *testing.T) {
			spans, calls := &recorded.Spans{}, 0
			r := doer(t, 0, steady, WithCallSpan(true), WithTracerProvider(spans))
			func() {
				defer func() { _ = recover() }()
				_ = r.Do(t.Context(), "/sql/read", func(context.Context) error {
					if calls++; calls == panics {
						panic("x")
					}
					return errUnavailable
				})
			}()
			got := recorded.Text(withoutWaits(spans)[0].Attributes())
			if want := fmt.Sprintf("grpcretry.attempts=%d", panics); !strings.HasSuffix(got, want) {
				t.Errorf("a panic in attempt %d: the span has %s, want %s", panics, got, want)
			}
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
		{"hedged, without a winner", always(unavailable()), []Option{hedged(2, Hedging{Delay: HedgeAfter(2 * second)})},
			"rpc.response.status_code=UNAVAILABLE grpcretry.attempts=2 grpcretry.reason=exhausted", otelcodes.Error, 2},
	} {
		t.Run(tt.name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				server := serve(t, tt.script)
				spans := &recorded.Spans{}
				ctx, parent := spans.Tracer("test").Start(t.Context(), "the caller's")
				client := server.client(t, append([]Option{steady, WithCallSpan(true), WithTracerProvider(spans)}, tt.opts...)...)
				client.Echo(ctx, request())
				parent.End()
				ended := withoutWaits(spans)
				if len(ended) != 2 {
					t.Fatalf("%d spans, want the call's and the caller's", len(ended))
				}
				span := ended[0]
				if span.Name() != "grpcretry.test.v1.EchoService/Echo" || span.SpanKind() != oteltrace.SpanKindInternal ||
					span.Parent().SpanID() != parent.SpanContext().SpanID() {
					t.Errorf("span is %q, %v, below %v", span.Name(), span.SpanKind(), span.Parent().SpanID())
				}
				want := "rpc.system.name=grpc rpc.method=grpcretry.test.v1.EchoService/Echo " + tt.wantAttrs
				if got := recorded.Text(span.Attributes()); got != want {
					t.Errorf("attributes are %s, want %s", got, want)
				}
				if got, _ := span.Status(); got != tt.wantStatus {
					t.Errorf("status is %v, want %v", got, tt.wantStatus)
				}
				if got := len(span.Events()); got != tt.wantEvents || len(ended[1].Events()) != 0 {
					t.Errorf("%d events on the call span and %d on the caller's, want %d and none", got, len(ended[1].Events()),
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
	hedges := []CallOption{WithPolicy(Policy{MaxAttempts: 3, Hedging: &Hedging{Delay: HedgeAfter(second), Budget: Unlimited}})}
	for _, tt := range []struct {
		name   string
		script func(int) answer
		cancel time.Duration
		opts   []CallOption
		want   []string
	}{
		{"waits", script(unavailable().after(second), overloaded().pushback("7000"), fail(codes.Unavailable, "x", retryInfoOf(10*second)), ok()),
			0, nil, []string{
				"1s to 2s grpcretry.next_attempt.number=2 grpcretry.wait_ms=1000 grpcretry.wait_source=backoff",
				"2s to 9s grpcretry.next_attempt.number=3 grpcretry.wait_ms=7000 grpcretry.wait_source=pushback",
				"9s to 19s grpcretry.next_attempt.number=4 grpcretry.wait_ms=10000 grpcretry.wait_source=retry_info"}},
		{"the caller goes away", script(unavailable()), second / 4, nil, []string{
			"0s to 250ms grpcretry.next_attempt.number=2 grpcretry.wait_ms=1000 grpcretry.wait_source=backoff grpcretry.reason=cancelled"}},
		{"a retry without a backoff waits for a token", script(unavailable().pushback("0")), 0,
			[]CallOption{WithBudget(stingy{}), WithPatience(5 * second)}, []string{
				"0s to 5s grpcretry.next_attempt.number=2 grpcretry.wait_ms=0 grpcretry.wait_source=pushback grpcretry.reason=target_down"}},
		{"a retry is sent immediately", script(unavailable().pushback("0"), ok()), 0, nil, nil},
		{"hedged, whose only attempt fails", script(unavailable(), ok()), 0, hedges, []string{
			"0s to 1s grpcretry.next_attempt.number=2 grpcretry.wait_ms=1000 grpcretry.wait_source=backoff"}},
		{"hedged, with nothing in flight",
			script(unavailable().pushback("7000").after(3*second/2), unavailable().after(second), ok().after(second)), 0, hedges, []string{
				"2s to 8.5s grpcretry.next_attempt.number=3 grpcretry.wait_ms=6500 grpcretry.wait_source=pushback"}},
		{"an attempt that is replaced goes on meanwhile", script(hang(), ok()), 0, []CallOption{WithAttemptTimeout(2 * second)}, nil},
	} {
		t.Run(tt.name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				server := serve(t, tt.script)
				spans := &recorded.Spans{}
				start, ctx := time.Now(), t.Context()
				if tt.cancel > 0 {
					limited, cancel := context.WithCancel(ctx)
					time.AfterFunc(tt.cancel, cancel)
					ctx = limited
				}
				client := server.fixed(t, 0, steady, WithBudget(Unlimited), WithCallSpan(true), WithTracerProvider(spans),
					WithMethod(echoMethod, tt.opts...))
				client.Echo(ctx, request())
				call := withoutWaits(spans)[0]
				wantWaits(t, spans, start, tt.want...)
				for _, s := range spans.Ended() {
					if s.Name() == telemetry.SpanWait && s.Parent().SpanID() != call.SpanContext().SpanID() {
						t.Errorf("the wait's span is below %v, want below the call's", s.Parent().SpanID())
					}
				}
			})
		})
	}
}

// wantWaits compares the spans of waits, "start to end attributes", and checks that every span has
// ended.
func wantWaits(t *testing.T, spans *recorded.Spans, start time.Time, want ...string) {
	t.Helper()
	var got []string
	for _, s := range spans.Ended() {
		if s.Name() == telemetry.SpanWait {
			got = append(got, fmt.Sprintf("%v to %v %s", s.StartTime().Sub(start), s.EndTime().Sub(start), recorded.Text(s.Attributes())))
		}
	}
	wantList(t, "waits", got, want...)
	if started, ended := len(spans.Started()), len(spans.Ended()); started != ended {
		t.Errorf("%d spans started, %d ended", started, ended)
	}
}

func TestNoCallSpanUnlessAskedFor(t *testing.T) {
	bubble(t, func(t *testing.T) {
		server := serve(t, script(unavailable(), ok()))
		spans := &recorded.Spans{}
		server.client(t, steady, WithTracerProvider(spans)).Echo(t.Context(), request())
		if got := spans.Started(); len(got) != 0 {
			t.Errorf("%d spans", len(got))
		}
	})
}

// The call span says which attempt won, which lost, and why each was sent; nothing of a lost
// hedge is an error.
func TestHedgesOnTheCallSpan(t *testing.T) {
	bubble(t, func(t *testing.T) {
		server := serve(t, script(hang(), unavailable().after(second/10), ok()))
		spans := &recorded.Spans{}
		server.client(t, WithBudget(Unlimited), WithTracerProvider(spans), WithCallSpan(true),
			hedged(3, Hedging{Delay: HedgeAfter(second)})).Echo(t.Context(), request())
		ended := withoutWaits(spans)
		if len(ended) != 1 {
			t.Fatalf("%d spans, want 1", len(ended))
		}
		const event = "grpcretry.attempt grpcretry.attempt.number="
		want := []string{
			event + "2 rpc.response.status_code=UNAVAILABLE grpcretry.decision=stop network.peer.address=bufconn " +
				"grpcretry.attempt.hedge=true grpcretry.attempt.sent_after=hedge_delay grpcretry.reason=in_flight grpcretry.message=db-down",
			event + "1 rpc.response.status_code=CANCELLED grpcretry.decision=lost network.peer.address=bufconn",
			event + "3 rpc.response.status_code=OK grpcretry.decision=success network.peer.address=bufconn " +
				"grpcretry.attempt.hedge=true grpcretry.attempt.sent_after=hedge_delay",
		}
		if got := eventLines(ended[0]); !slices.Equal(got, want) {
			t.Errorf("events are\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
		}
		attrs := recorded.Text(ended[0].Attributes())
		code, description := ended[0].Status()
		if !strings.HasSuffix(attrs, "rpc.response.status_code=OK grpcretry.attempts=3 grpcretry.winner=3") ||
			code != otelcodes.Unset {
			t.Errorf("call span has %s and status %v %s, want OK, 3 attempts, the winner, and no error", attrs, code, description)
		}
	})
}

func TestTheMessageOfAFailureIsOnItsEvent(t *testing.T) {
	long := strings.Repeat("ä", 300)
	for _, tt := range []struct{ name, message, want string }{
		{"short", "db-down", "db-down"},
		{"none", "", "none"},
		{"long", long, long[:2*126] + "…"}, // at most 256 bytes, at a character
		{"just fits", long[:256], long[:256]},
		{"control characters", "a\x00\n\x1b[31m", "a\x00\n\x1b[31m"}, // exporters and viewers escape them
	} {
		t.Run(tt.name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				server := serve(t, script(fail(codes.NotFound, tt.message)))
				spans := &recorded.Spans{}
				ctx, span := spans.Tracer("test").Start(t.Context(), "the caller's")
				server.client(t).Echo(ctx, request())
				span.End()
				got := "none"
				for _, a := range withoutWaits(spans)[0].Events()[0].Attributes {
					if a.Key == telemetry.AttrMessage {
						got = a.Value.AsString()
					}
				}
				if got != tt.want {
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
			spans := &recorded.Spans{}
			ctx, span := spans.Tracer("test").Start(t.Context(), "the caller's")
			doer(t, 0).Do(ctx, "/a/x", func(context.Context) error { return status.Error(codes.NotFound, tt.message) })
			span.End()
			got := recorded.Text(spans.Ended()[0].Events()[0].Attributes)
			if _, message, _ := strings.Cut(got, "grpcretry.message="); message != tt.want {
				t.Errorf("the event's message is %q, want %q", message, tt.want)
			}
		})
	}
}

func TestContextBelowTheCallSpanIsItsChild(t *testing.T) {
	bubble(t, func(t *testing.T) {
		server := serve(t, script(ok()))
		spans := &recorded.Spans{}
		var inside oteltrace.SpanContext
		client := server.client(t, WithCallSpan(true), WithTracerProvider(spans),
			WithObserver(func(ctx context.Context, e Event) { inside = oteltrace.SpanContextFromContext(ctx) }))
		client.Echo(t.Context(), request())
		if got := withoutWaits(spans)[0].SpanContext(); got.SpanID() != inside.SpanID() {
			t.Errorf("observers run below span %v, want %v", inside.SpanID(), got.SpanID())
		}
	})
}
