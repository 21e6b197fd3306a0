package grpcretry

import (
	"context"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"testing"
	"time"

	oteltrace "go.opentelemetry.io/otel/trace"
	"go.opentelemetry.io/otel/trace/noop"
	"google.golang.org/grpc"
	"google.golang.org/grpc/status"

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

// A sink that panics does so on the caller's goroutine; nothing of the call is left behind.
func TestAPanicOfASinkLeavesNothing(t *testing.T) {
	type moment struct {
		name string
		opts []Option
		ctx  func(context.Context) context.Context
	}
	var moments []moment
	for _, kind := range []EventKind{AttemptStart, AttemptEnd, Decision, CallEnd} {
		for number := range 3 {
			moments = append(moments, moment{name: fmt.Sprintf("observer of %v of attempt %d", kind, number+1),
				opts: []Option{WithObserver(func(_ context.Context, e Event) {
					if e.Kind == kind && e.Attempt.Number == number+1 {
						panic("drawn")
					}
				})}})
		}
	}
	for _, line := range []string{"retrying", "gave up"} {
		moments = append(moments, moment{name: "logger, " + line, opts: []Option{WithLogger(slog.New(explosive{line: line}))}})
	}
	for n := range 3 {
		moments = append(moments, moment{name: fmt.Sprintf("span, event %d", n+1), ctx: func(ctx context.Context) context.Context {
			return oteltrace.ContextWithSpan(ctx, &explosiveSpan{after: n})
		}})
	}
	for _, m := range moments {
		for _, last := range []answer{ok(), unavailable()} {
			t.Run(fmt.Sprintf("%s, then %v", m.name, status.Code(last.err)), func(t *testing.T) {
				bubble(t, func(t *testing.T) {
					server := serve(t, script(unavailable(), unavailable(), last))
					budget, err := NewConcurrencyBudget(1)
					if err != nil {
						t.Fatal(err)
					}
					client := server.client(t, append(m.opts, WithMaxAttempts(3), WithBudget(budget), WithBackoff(Constant(0)))...)
					ctx := t.Context()
					if m.ctx != nil {
						ctx = m.ctx(ctx)
					}
					finished := 0
					func() {
						defer func() { _ = recover() }() // some moments do not come in a call that succeeds
						_, _ = client.Echo(ctx, request(), grpc.OnFinish(func(error) { finished++ }))
					}()
					if got := budget.Balance(time.Now()); got != 1 {
						t.Errorf("%v of 1 retry is left in the budget", got)
					}
					if finished != 1 {
						t.Errorf("OnFinish ran %d times, want once", finished)
					}
				})
			})
		}
	}
}

// explosive is a handler that panics at a line.
type explosive struct {
	slog.Handler
	line string
}

func (explosive) Enabled(context.Context, slog.Level) bool { return true }
func (h explosive) Handle(_ context.Context, r slog.Record) error {
	if strings.Contains(r.Message, h.line) {
		panic("drawn")
	}
	return nil
}

// explosiveSpan panics at an event after so many.
type explosiveSpan struct {
	noop.Span
	after int
}

func (*explosiveSpan) IsRecording() bool { return true }
func (s *explosiveSpan) AddEvent(string, ...oteltrace.EventOption) {
	if s.after == 0 {
		panic("drawn")
	}
	s.after--
}
