package grpcretry

import (
	"context"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc/codes"

	"github.com/grpcretry/grpcretry/internal/bounded"
	echov1 "github.com/grpcretry/grpcretry/proto/echo/v1"
)

func TestLogger(t *testing.T) {
	bubble(t, func(t *testing.T) {
		var answers []answer
		server := serve(t, func(n int) answer { a := answers[0]; answers = answers[1:]; return a })
		logs := &logRecorder{}
		client := server.client(t, steady, WithMaxAttempts(3), WithBudget(Unlimited), WithLogger(slog.New(logs)))
		call := func(ctx context.Context, script ...answer) {
			answers = script
			client.Echo(ctx, request())
		}

		call(t.Context(), ok())
		wantLines(t, logs)

		call(t.Context(), fail(codes.NotFound, "x"))
		wantLines(t, logs)

		call(t.Context(), unavailable(), overloaded().pushback("5"), ok())
		wantLines(t, logs,
			`level=DEBUG…retrying…method=/grpcretry.test.v1.EchoService/Echo target=passthrough:///echo attempt=1 code=UNAVAILABLE`+
				` wait=1s source=backoff error=db-down`,
			`level=DEBUG…attempt=2 code=RESOURCE_EXHAUSTED wait=5ms source=pushback`)

		call(t.Context(), unavailable(), unavailable(), unavailable())
		wantLines(t, logs, "DEBUG", "DEBUG", `level=WARN…gave up…attempts=3 elapsed=3s code=UNAVAILABLE reason=exhausted error=db-down`)

		call(t.Context(), unavailable().pushback("-1"))
		wantLines(t, logs, `level=WARN…gave up…attempts=1…reason=pushback`)

		ctx, cancel := context.WithCancel(t.Context())
		time.AfterFunc(second/2, cancel)
		call(ctx, unavailable())
		wantLines(t, logs, "DEBUG") // a caller that goes away is no failure

		ctx, cancel = context.WithTimeout(t.Context(), second)
		call(ctx, hang())
		wantLines(t, logs) // nothing was retried
		cancel()
	})
}

func TestLoggerSpeaksOncePerChangeOfTheBudget(t *testing.T) {
	bubble(t, func(t *testing.T) {
		server := serve(t, always(unavailable()))
		logs := &logRecorder{}
		budget := &aBudget{}
		r := retrierOf(t, WithMaxAttempts(2), WithBudget(budget), WithLogger(slog.New(logs)), WithBackoff(Constant(0)), WithPatience(0))
		logs.clear()
		client := echov1.NewEchoServiceClient(server.conn(t, r.DialOptions()...))
		for range 3 {
			budget.refuse = true
			for range 5 {
				client.Echo(t.Context(), request())
			}
			wantLines(t, logs, `level=WARN…budget exhausted…target=passthrough:///echo`)
			budget.refuse = false
			time.Sleep(recovered - 1)
			client.Echo(t.Context(), request())
			wantLines(t, logs, "DEBUG", "WARN") // a retry now and then is no recovery
			time.Sleep(time.Nanosecond)
			client.Echo(t.Context(), request())
			client.Echo(t.Context(), request())
			wantLines(t, logs, "DEBUG", `level=INFO…budget allows`, "WARN", "DEBUG", "WARN")
		}
	})
}

// That one budget is exhausted says nothing about another of the same target.
func TestLoggerTellsTheBudgetsOfATargetApart(t *testing.T) {
	bubble(t, func(t *testing.T) {
		const putMethod = "/grpcretry.test.v1.EchoService/Put"
		server := serve(t, always(unavailable()))
		logs := &logRecorder{}
		of := map[string]*aBudget{echoMethod: {refuse: true}, putMethod: {}}
		client := server.client(t, WithMaxAttempts(2), WithBackoff(Constant(0)), WithPatience(0),
			WithLogger(slog.New(onlyAbove{logs, slog.LevelInfo})),
			WithMethod(echoMethod, WithBudget(of[echoMethod])), WithMethod(putMethod, WithBudget(of[putMethod])))
		client.Echo(t.Context(), request())
		wantLines(t, logs, "WARN…budget exhausted…target=passthrough:///echo budget="+echoMethod)
		time.Sleep(recovered)
		client.Put(t.Context(), request())
		wantLines(t, logs, "WARN…gave up…reason=exhausted")
		of[putMethod].refuse = true
		client.Put(t.Context(), request())
		wantLines(t, logs, "WARN…budget exhausted…target=passthrough:///echo budget="+putMethod)
		of[echoMethod].refuse = false
		client.Echo(t.Context(), request())
		wantLines(t, logs, "INFO…budget allows retries again…target=passthrough:///echo budget="+echoMethod, "gave up")
	})
}

// A dependency is down, and 5,000 calls to it fail. Until patience is over, there are at most a hundred
// lines about calls at once, and then one a second; two lines are about the target.
func TestAStormWritesFewLines(t *testing.T) {
	for _, tt := range []struct {
		name   string
		budget []Option
		atMost int
	}{
		{"the default budget", nil, 112},
		{"a budget that always refuses", []Option{WithBudget(&aBudget{refuse: true})}, 2},
		{"a budget that always refuses, and no patience", []Option{WithBudget(&aBudget{refuse: true}), WithPatience(0)}, 1},
		{"no budget", []Option{WithBudget(Unlimited)}, 112},
	} {
		t.Run(tt.name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				logs := &logRecorder{}
				opts := []Option{WithMaxAttempts(2), WithBackoff(Constant(0)), WithLogger(slog.New(onlyAbove{logs, slog.LevelInfo}))}
				intercept := UnaryClientInterceptor(append(opts, tt.budget...)...)
				var group sync.WaitGroup
				for range 100 {
					group.Go(func() {
						for range 50 {
							invoke(t.Context(), intercept, func(context.Context, int) error { return errUnavailable })
							time.Sleep(second / 10)
						}
					})
				}
				group.Wait()
				lines := logs.lines()
				if suppresses := strings.Contains(strings.Join(lines, "\n"), " suppressed="); suppresses != (tt.name == "no budget") {
					t.Errorf("a line tells how many were suppressed: %t", suppresses)
				}
				if got := len(lines); got < 1 || got > tt.atMost {
					t.Errorf("5,000 failing calls wrote %d lines, want 1 to %d:\n%s", got, tt.atMost, strings.Join(logs.lines(), "\n"))
				}
			})
		})
	}
}

// onlyAbove is a handler with a level.
type onlyAbove struct {
	slog.Handler
	level slog.Level
}

func (h onlyAbove) Enabled(_ context.Context, l slog.Level) bool { return l >= h.level }

// silent logs nothing below error level.
var silent = slog.New(onlyAbove{slog.DiscardHandler, slog.LevelError})

// What a server says may be as long as gRPC lets a trailer be.
func TestLogLinesAreBounded(t *testing.T) {
	bubble(t, func(t *testing.T) {
		long := strings.Repeat("ä", 4000) // two bytes each
		server := serve(t, always(fail(codes.Unavailable, long)))
		logs := &logRecorder{}
		client := server.client(t, WithMaxAttempts(2), WithBackoff(Constant(0)), WithBudget(Unlimited), WithLogger(slog.New(logs)))
		client.Echo(t.Context(), request())
		cut := "error=" + strings.Repeat("ä", 126) + "… "
		wantLines(t, logs, "DEBUG…"+"retrying", "WARN…gave up")
		client.Echo(t.Context(), request())
		for _, line := range logs.lines() {
			if !strings.Contains(line+" ", cut) {
				t.Errorf("line does not have the message, cut to 256 bytes:\n%s", line)
			}
		}
	})
}

// A proxy may call methods without bound, and each of them may be left to gRPC, or not hedged.
func TestLoggerBoundsTheMethodsItKnows(t *testing.T) {
	logs := &logRecorder{}
	l := newLogger(slog.New(logs))
	p := &policy{Policy: Policy{MaxAttempts: 2}}
	for round := range 2 {
		for i := range 3 * bounded.MaxNames {
			f := &facts{ctx: t.Context(), method: fmt.Sprintf("/proxy.Service/Method%d", i), policy: p}
			l.notHedged(f, "because")
			l.sentAgain(f)
			l.leftToGRPC(f)
		}
		if got, want := len(logs.lines()), 3*bounded.MaxNames; got != want {
			t.Errorf("after round %d there are %d lines, want %d: one for each of the first %d methods, and each kind",
				round+1, got, want, bounded.MaxNames)
		}
	}
}
