package grpcretry

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/grpcretry/grpcretry/internal/function"
	"github.com/grpcretry/grpcretry/internal/reasons"
	"github.com/grpcretry/grpcretry/internal/recorded"
)

var functionDraws = flag.Int("functions.draws", 100, "programs that TestAFunctionIsRetriedLikeAnRPC draws")

// A doer is a Retrier whose random number is always u.
func doer(t *testing.T, u float64, opts ...Option) *Retrier {
	t.Helper()
	return retrierOf(t, append(opts, withRandom(func() float64 { return u }))...)
}

// A played function returns the errors of its script, one per attempt, and remembers when.
type played struct {
	start time.Time
	at    []time.Duration
}

func play(script ...error) (*played, func(context.Context) error) {
	p := &played{start: time.Now()}
	return p, func(ctx context.Context) error {
		p.at = append(p.at, time.Since(p.start))
		if n := len(p.at); n <= len(script) {
			return script[n-1]
		}
		return nil
	}
}

func withRetryInfo(d time.Duration) error {
	return fail(codes.Unavailable, "later", retryInfoOf(d)).err
}

// A nilStatus has the method of a status, and has none, like errors for RPCs and HTTP responses.
type nilStatus struct{}

func (nilStatus) Error() string              { return "HTTP 503" }
func (nilStatus) GRPCStatus() *status.Status { return nil }

func TestDo(t *testing.T) {
	plain, notFound := errors.New("plain"), status.Error(codes.NotFound, "no row")
	refused := status.Error(codes.Unavailable, "refused")
	for _, tt := range []struct {
		name   string
		opts   []CallOption
		script []error
		at     []time.Duration
		err    error // as it is returned, if reason is nil
		reason error
	}{
		{name: "success", at: []time.Duration{0}},
		{name: "backoff by the code",
			script: []error{errUnavailable, status.Error(codes.ResourceExhausted, "full"), fmt.Errorf("wrapped: %w", errUnavailable)},
			at:     []time.Duration{0, second, 3 * second, 7 * second}},
		{name: "attempts used up", opts: []CallOption{WithMaxAttempts(2)}, script: []error{errUnavailable, errUnavailable},
			at: []time.Duration{0, second}, reason: ErrAttemptsExhausted},
		{name: "a status that is not retried", script: []error{notFound}, at: []time.Duration{0}, err: notFound},
		{name: "an error that is no status", script: []error{plain, plain, plain, plain}, at: []time.Duration{0, second, 3 * second, 7 * second},
			reason: ErrAttemptsExhausted},
		{name: "an error whose status is nil", script: []error{nilStatus{}}, at: []time.Duration{0, second}},
		{name: "whatever the codes", opts: []CallOption{WithCodes(codes.NotFound)}, script: []error{plain}, at: []time.Duration{0, second}},
		{name: "WithRetryIf", opts: []CallOption{WithRetryIf(func(err error) bool { return errors.Is(err, notFound) })},
			script: []error{notFound, plain}, at: []time.Duration{0, second}, reason: ErrNotRetryable},
		{name: "a classifier", opts: []CallOption{WithClassifier(func(_ context.Context, a Attempt) Classification {
			if errors.Is(a.Err, plain) {
				return Retry
			}
			return Stop
		})}, script: []error{plain, errUnavailable}, at: []time.Duration{0, second}, reason: ErrNotRetryable},
		{name: "a RetryInfo is obeyed and restarts the backoff", opts: []CallOption{WithPatience(time.Hour)},
			script: []error{errUnavailable, withRetryInfo(30 * second), errUnavailable},
			at:     []time.Duration{0, second, 31 * second, 32 * second}},
		{name: "Permanent", script: []error{Permanent(errUnavailable)}, at: []time.Duration{0}, err: errUnavailable},
		{name: "Permanent overrules a classifier", opts: []CallOption{WithClassifier(func(context.Context, Attempt) Classification {
			return Retry
		})},
			script: []error{Permanent(plain)}, at: []time.Duration{0}, err: plain},
		{name: "Permanent after a retry", script: []error{errUnavailable, Permanent(errUnavailable)}, at: []time.Duration{0, second},
			reason: ErrNotRetryable},
		{name: "UnsentOnly after an attempt that may have had an effect", opts: []CallOption{WithUnsentOnly(true)},
			script: []error{errUnavailable},
			at:     []time.Duration{0}, reason: ErrMayHaveRun},
		{name: "UnsentOnly after one that had none", opts: []CallOption{WithUnsentOnly(true)},
			script: []error{function.MarkUnsent(refused), withRetryInfo(5 * second), errUnavailable},
			at:     []time.Duration{0, second, 6 * second}, reason: ErrNotRetryable},
		{name: "unsent attempts are not counted", opts: []CallOption{WithMaxAttempts(2), WithBudget(&tokens{left: 1})},
			script: []error{function.MarkUnsent(refused), function.MarkUnsent(refused), errUnavailable, errUnavailable},
			at:     []time.Duration{0, second, 3 * second, 7 * second}, reason: ErrAttemptsExhausted},
		{name: "unsent without patience", opts: []CallOption{WithPatience(0)}, script: []error{function.MarkUnsent(refused)},
			at:     []time.Duration{0},
			reason: ErrTargetDown},
		{name: "unsent, and the backoff is longer than the patience", opts: []CallOption{WithPatience(second / 2)},
			script: []error{function.MarkUnsent(refused)},
			at:     []time.Duration{0},
			reason: ErrTargetDown},
		{name: "unsent, and the server's wait is longer than the patience", opts: []CallOption{WithPatience(second / 2)},
			script: []error{function.MarkUnsent(withRetryInfo(2 * second))},
			at:     []time.Duration{0, 2 * second}},
		{name: "off", opts: []CallOption{Disable()}, script: []error{errUnavailable}, at: []time.Duration{0}, err: errUnavailable},
	} {
		t.Run(tt.name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				p, f := play(tt.script...)
				err := doer(t, 0, steady).Do(t.Context(), "/sql/read", f, tt.opts...)
				if !slices.Equal(p.at, tt.at) {
					t.Errorf("called at %v, want %v", p.at, tt.at)
				}
				if tt.reason != nil {
					wantStop(t, err, status.Code(err), tt.reason, len(tt.at))
					if last := tt.script[len(tt.at)-1]; !errors.Is(err, last) || status.Code(err) != status.Code(last) {
						t.Errorf("err = %v, want it to hold %v and to have its code", err, last)
					}
					return
				}
				var e *Error
				if errors.As(err, &e) {
					t.Errorf("err = %v, an *Error, want it untouched", err)
				}
				if tt.err == nil && err != nil || tt.err != nil && (!errors.Is(err, tt.err) || err != tt.script[len(tt.at)-1]) {
					t.Errorf("err = %v, want %v", err, tt.err)
				}
			})
		})
	}
}

// A program written with Do behaves like one that calls a server which fails in the same way.
func TestAFunctionIsRetriedLikeAnRPC(t *testing.T) {
	for seed := range uint64(*functionDraws) {
		bubble(t, func(t *testing.T) {
			draw := rand.New(rand.NewPCG(seed, 17))
			opts := drawOptions(draw)
			script := make([]answer, 1+draw.IntN(7))
			for i := range script {
				script[i] = drawAnswer(draw)
			}
			timeout := []time.Duration{0, second, 10 * second}[draw.IntN(3)]
			u := draw.Float64()
			rpc := threeCalls(t, u, timeout, opts, func(ctx context.Context, r *Retrier) error {
				var at atomic.Int64 // a handler may still run when the next one starts
				server := serve(t, func(int) answer { return script[int(at.Add(1)-1)%len(script)] })
				defer server.server.Stop()
				_, err := newEchoClient(t, server, r).Echo(ctx, request())
				return err
			})
			function := threeCalls(t, u, timeout, opts, func(ctx context.Context, r *Retrier) error {
				at := 0
				return r.Do(ctx, echoMethod, func(ctx context.Context) error {
					at++
					return runAnswer(ctx, script[(at-1)%len(script)])
				})
			})
			if rpc != function {
				t.Fatalf("seed %d: the RPC\n%s\nthe function\n%s", seed, rpc, function)
			}
		})
	}
}

func drawOptions(draw *rand.Rand) []Option {
	all := []Option{
		steady,
		WithBackoff(Exponential{Base: second / 4, Max: 3 * second}),
		WithMaxAttempts(2 + draw.IntN(5)),
		WithMaxElapsed(time.Duration(1+draw.IntN(20)) * second),
		WithMaxServerDelay(time.Duration(1+draw.IntN(5)) * second),
		WithAttemptTimeout(time.Duration(1+draw.IntN(8)) * second / 2),
		WithCodes(codes.Unavailable, codes.Aborted),
		WithUnsentOnly(true),
		WithClassifier(func(_ context.Context, a Attempt) Classification { return Classification(a.Number % 3) }),
	}
	var opts []Option
	for _, o := range all {
		if draw.IntN(3) == 0 {
			opts = append(opts, o)
		}
	}
	return opts
}

func drawAnswer(draw *rand.Rand) answer {
	var a answer
	switch draw.IntN(8) {
	case 0:
		a = ok()
	case 1:
		a = fail(codes.Unavailable, "later", retryInfoOf(time.Duration(draw.IntN(6))*second))
	case 2:
		a = fail(codes.ResourceExhausted, "full")
	case 3:
		a = fail(codes.Aborted, "conflict")
	default:
		a = unavailable()
	}
	if draw.IntN(3) == 0 {
		a.delay = time.Duration(1+draw.IntN(40))*second/8 + second/300 // never at the moment of a timeout
	}
	return a
}

// runAnswer does what the scripted server does.
func runAnswer(ctx context.Context, a answer) error {
	if a.delay > 0 {
		select {
		case <-time.After(a.delay):
		case <-ctx.Done():
			return status.FromContextError(ctx.Err()).Err()
		}
	}
	return a.err
}

// threeCalls makes three calls and returns all that can be observed, one line each.
func threeCalls(t *testing.T, u float64, timeout time.Duration, opts []Option, call func(context.Context, *Retrier) error) string {
	t.Helper()
	recorder := &eventRecorder{start: time.Now()}
	budget := newRatioBudget(RatioBudget{Ratio: 0.5, Reserve: 3, Window: 10 * second})
	r := doer(t, u, append(opts, WithObserver(recorder.observe), WithBudget(budget))...)
	for range 3 {
		ctx, cancel := t.Context(), context.CancelFunc(func() {})
		if timeout > 0 {
			ctx, cancel = context.WithTimeout(ctx, timeout)
		}
		err := call(ctx, r)
		cancel()
		line := fmt.Sprintf("%v: %v, balance %v", time.Since(recorder.start), status.Code(err), budget.Balance(time.Now()))
		var e *Error
		if errors.As(err, &e) {
			line += fmt.Sprintf(", %d attempts, %s, last %v", len(e.Attempts), reasons.Of(e.Reason).Word, status.Code(e.Last))
		}
		recorder.lines = append(recorder.lines, line)
	}
	return strings.Join(recorder.lines, "\n")
}

// A name up to its second slash has a budget.
func TestBudgetsOfFunctions(t *testing.T) {
	bubble(t, func(t *testing.T) {
		shared := &tokens{left: 2}
		r := doer(t, 0, WithBackoff(Constant(0)), WithPatience(0), WithRatioBudget(RatioBudget{Ratio: Nothing, Reserve: 1}),
			WithMethod("/shared/", WithBudget(shared)), WithMethod(echoMethod, WithBudget(shared)))
		retries := func(name string) int {
			p, f := play(errUnavailable, errUnavailable, errUnavailable, errUnavailable)
			r.Do(t.Context(), name, f)
			return len(p.at) - 1
		}
		for _, tt := range []struct {
			name string
			want int
		}{{"/sql/read", 1}, {"/sql/write", 0}, {"/sql", 0}, {"/sql/a/b", 0}, {"/mail/send", 1}, {"/sqlite/read", 1}} {
			if got := retries(tt.name); got != tt.want {
				t.Errorf("%s is retried %d times, want %d", tt.name, got, tt.want)
			}
		}
		// One budget for functions and RPCs.
		server := serve(t, always(unavailable()))
		if _, err := newEchoClient(t, server, r).Echo(t.Context(), request(), WithMaxAttempts(2)); !errors.Is(err, ErrAttemptsExhausted) {
			t.Errorf("Echo = %v, want a retry", err)
		}
		if got := retries("/shared/a"); got != 1 {
			t.Errorf("%d retries, want the one that the RPC has left", got)
		}
		if _, err := newEchoClient(t, server, r).Echo(t.Context(), request()); !errors.Is(err, ErrBudgetExhausted) {
			t.Errorf("Echo = %v, want no retry", err)
		}
	})
}

func TestAttemptTimeoutOfAFunction(t *testing.T) {
	obedient := func(ctx context.Context) error {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(3 * second):
			return nil
		}
	}
	deaf := func(context.Context) error { time.Sleep(3 * second); return nil }
	for _, tt := range []struct {
		name     string
		f        func(context.Context) error
		deadline time.Duration
		opts     []CallOption
		calls    int
		elapsed  time.Duration
		reason   error
	}{
		{"the last attempt of a call with a deadline is not cut", obedient, time.Hour, []CallOption{WithMaxAttempts(2)}, 2, 5 * second, nil},
		{"without a deadline it is", obedient, 0, []CallOption{WithMaxAttempts(2)}, 2, 3 * second, ErrAttemptsExhausted},
		{"a function that ignores its context", deaf, time.Hour, nil, 1, 3 * second, nil},
		{"off, without a deadline", obedient, 0, []CallOption{Disable()}, 1, second, ErrAttemptTimeout},
	} {
		t.Run(tt.name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				budget := &tally{}
				opts := []Option{steady, WithAttemptTimeout(second), WithBackoff(Constant(second)), WithBudget(budget)}
				ctx := t.Context()
				if tt.deadline > 0 {
					limited, cancel := context.WithTimeout(ctx, tt.deadline)
					defer cancel()
					ctx = limited
				}
				start, calls := time.Now(), 0
				err := doer(t, 0, opts...).Do(ctx, "/sql/read", func(ctx context.Context) error { calls++; return tt.f(ctx) }, tt.opts...)
				if calls != tt.calls || time.Since(start) != tt.elapsed || !errors.Is(err, tt.reason) {
					t.Errorf("Do = %v after %v and %d calls, want %v after %v and %d", err, time.Since(start), calls, tt.reason, tt.elapsed, tt.calls)
				}
				if open := budget.withdrawn - budget.refunded; open < 0 || open > tt.calls-1 {
					t.Errorf("%d retries withdrawn, %d refunded", budget.withdrawn, budget.refunded)
				}
			})
		})
	}
}

// What a function says when the attempt timeout ends it is kept, except for the end of its context: that would look like the caller's.
func TestAFunctionsErrorAtTheAttemptTimeoutIsKept(t *testing.T) {
	slow, ended := errors.New("the query is slow"), []error{context.Canceled, context.DeadlineExceeded}
	for _, tt := range []struct {
		name string
		err  error
		text string
		is   []error // of slow and ended
	}{
		{"the end of the context", context.Canceled, "attempt timeout of 1s", nil},
		{"the end, wrapped", fmt.Errorf("query: %w", context.Canceled), "attempt timeout of 1s: query: context canceled", nil},
		{"a deadline of its own", fmt.Errorf("query: %w", context.DeadlineExceeded),
			"attempt timeout of 1s: query: context deadline exceeded", nil},
		{"another error", slow, "attempt timeout of 1s: the query is slow", []error{slow}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				r := doer(t, 0, steady, WithAttemptTimeout(second), WithMaxAttempts(2))
				err := r.Do(t.Context(), "/sql/read", func(ctx context.Context) error { <-ctx.Done(); return tt.err })
				for _, a := range wantStop(t, err, codes.DeadlineExceeded, ErrAttemptsExhausted, 2).Attempts {
					if want := "rpc error: code = DeadlineExceeded desc = " + tt.text; a.Err.Error() != want || !errors.Is(a.Err, ErrAttemptTimeout) {
						t.Errorf("attempt %d ended with %q, want %q and the attempt timeout", a.Number, a.Err, want)
					}
					for _, one := range append(ended, slow) {
						if got, want := errors.Is(a.Err, one), slices.Contains(tt.is, one); got != want {
							t.Errorf("errors.Is(%v, %v) is %t, want %t", a.Err, one, got, want)
						}
					}
				}
			})
		})
	}
}

// The mark of Permanent stays although the attempt timeout has ended the attempt, with retries and without.
func TestPermanentOutlivesTheAttemptTimeout(t *testing.T) {
	for _, attempts := range []int{1, 2} {
		bubble(t, func(t *testing.T) {
			r := doer(t, 0, steady, WithMaxAttempts(attempts), WithAttemptTimeout(second))
			err := r.Do(t.Context(), "/sql/read", func(ctx context.Context) error { <-ctx.Done(); return Permanent(ctx.Err()) })
			if !isPermanent(err) || errors.Is(err, ErrAttemptTimeout) {
				t.Errorf("with %d attempts, Do = %v (%T), want the permanent error", attempts, err, err)
			}
		})
	}
}

// At the attempt timeout of a call that passes through, any error but a status is due to it, as with retries.
func TestAnErrorAtTheAttemptTimeoutOfACallThatPassesThrough(t *testing.T) {
	for _, tt := range []struct {
		err     error
		timeout bool
	}{{errors.New("the query is slow"), true}, {status.Error(codes.NotFound, "gone"), false}} {
		bubble(t, func(t *testing.T) {
			r := doer(t, 0, steady, Disable(), WithAttemptTimeout(second))
			err := r.Do(t.Context(), "/sql/read", func(ctx context.Context) error { <-ctx.Done(); return tt.err })
			if !errors.Is(err, tt.err) || errors.Is(err, ErrAttemptTimeout) != tt.timeout {
				t.Errorf("Do = %v, want %v, by the attempt timeout: %t", err, tt.err, tt.timeout)
			}
		})
	}
}

func TestTelemetryOfFunctions(t *testing.T) {
	bubble(t, func(t *testing.T) {
		spans := &recorded.Spans{}
		meters := &recorded.Meters{}
		logs, events := &logRecorder{}, &eventRecorder{start: time.Now()}
		r := doer(t, 0, steady, WithMaxAttempts(2), WithBudget(&aBudget{}), WithCallSpan(true), WithTracerProvider(spans),
			WithMeterProvider(meters), WithLogger(slog.New(logs)), WithObserver(events.observe))
		_, f := play(errUnavailable)
		r.Do(t.Context(), "/sql/read", f)
		if events.last.Target != "/sql" || events.last.Attempt.Method != "/sql/read" {
			t.Errorf("event of %s at %s, want /sql/read at /sql", events.last.Attempt.Method, events.last.Target)
		}
		wantList(t, "events", events.lines, "0s attempt_start #1", "0s attempt_end #1 UNAVAILABLE in 0s",
			"0s decision #1 retry after 1s by backoff",
			"1s attempt_start #2", "1s attempt_end #2 OK in 0s", "1s call_end #2 recovered after 1s, attempts #1 UNAVAILABLE #2 OK")
		wantLines(t, logs,
			"level=DEBUG…retrying…method=/sql/read target=/sql attempt=1 code=UNAVAILABLE wait=1s source=backoff error=db-down")
		span := withoutWaits(spans)[0]
		if span.Name() != "sql/read" ||
			recorded.Text(span.Attributes()) != "rpc.method=sql/read rpc.response.status_code=OK grpcretry.attempts=2" {
			t.Errorf("span %s with %s", span.Name(), recorded.Text(span.Attributes()))
		}
		if got := len(span.Events()); got != 2 {
			t.Errorf("%d events on the span, want 2", got)
		}
		const labels = " grpcretry.target=/sql rpc.method=sql/read"
		wantMetrics(t, meters,
			"grpcretry.attempts 1 grpcretry.decision=retry"+labels+" rpc.response.status_code=UNAVAILABLE",
			"grpcretry.attempts 1 grpcretry.decision=success"+labels+" rpc.response.status_code=OK",
			"grpcretry.budget.balance 1 grpcretry.budget=all grpcretry.target=/sql",
			"grpcretry.calls 1 grpcretry.outcome=recovered"+labels,
			"grpcretry.rescued_calls 1"+labels,
			"grpcretry.wait.duration 1/1s grpcretry.target=/sql grpcretry.wait_source=backoff rpc.method=sql/read")
		events.lines = nil
		r.Do(t.Context(), "/sql/read", func(context.Context) error { return errUnavailable }, Disable())
		wantList(t, "events while off", events.lines)
		post := &function.Call{Name: "/sql/read", Target: "/sql", UnsentOnly: true} // one attempt, without WithUnsentOnly
		_ = r.do(t.Context(), post, func(context.Context) error { return errUnavailable }, nil)
		wantList(t, "events of a call that may be made once", events.lines)
		if got, want := metricLines(t, meters), "grpcretry.passed_calls 2"+labels; !slices.Contains(got, want) {
			t.Errorf("metrics are\n%s\nwant among them\n%s", strings.Join(got, "\n"), want)
		}
	})
}

func wantList(t *testing.T, what string, got []string, want ...string) {
	t.Helper()
	if !slices.Equal(got, want) {
		t.Errorf("%s are\n%s\nwant\n%s", what, strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
}

// A server's pushback for an RPC that the function makes holds for the function as well.
func TestPushbackOfACallBelowAFunction(t *testing.T) {
	for _, tt := range []struct {
		name     string
		pushback string
		times    []time.Duration
		reason   error
	}{
		{"do not retry", "-1", []time.Duration{0}, ErrPushback},
		{"wait", "7000", []time.Duration{0, 7 * second}, ErrAttemptsExhausted},
	} {
		t.Run(tt.name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				server := serve(t, always(unavailable().pushback(tt.pushback)))
				client := server.client(t, WithMaxElapsed(1)) // gives up immediately
				err := doer(t, 0, steady, WithMaxAttempts(2)).Do(t.Context(), "/outer/f", func(ctx context.Context) error {
					_, err := client.Echo(ctx, request())
					return err
				})
				wantStop(t, err, codes.Unavailable, tt.reason, len(tt.times))
				wantTimes(t, server, tt.times...)
			})
		})
	}
}

// The server that forbids a retry of a hedged call need not be that of its last attempt.
func TestDoNotRetryOfAHedgedCallBelowAFunction(t *testing.T) {
	bubble(t, func(t *testing.T) {
		server := serve(t, func(n int) answer {
			if n == 1 {
				return unavailable().after(2 * second).pushback("-1")
			}
			return unavailable().after(5 * second)
		})
		client := server.client(t, WithMaxAttempts(2),
			WithHedging(Hedging{Delay: HedgeAfter(second), Budget: Unlimited, AllMethodsAreSafe: true}))
		err := doer(t, 0, steady).Do(t.Context(), "/outer/f", func(ctx context.Context) error {
			_, err := client.Echo(ctx, request())
			return err
		})
		wantStop(t, err, codes.Unavailable, ErrPushback, 1)
		wantTimes(t, server, 0, second)
	})
}

// The hook of package httpretry.
func TestDiscardRunsBeforeTheWait(t *testing.T) {
	bubble(t, func(t *testing.T) {
		start := time.Now()
		var got []string
		note := func(what string) { got = append(got, fmt.Sprint(time.Since(start), " ", what)) }
		r := doer(t, 0, steady, WithMaxAttempts(3), WithObserver(func(_ context.Context, e Event) {
			if e.Kind == CallEnd {
				note("end at " + e.Target)
			}
		}))
		err := function.Do(t.Context(), r, &function.Call{
			Name: "/http/a.example/GET", Target: "a.example",
			Run:     func(context.Context) error { note("run"); return errUnavailable },
			Discard: func() { note("discard") },
		})
		wantStop(t, err, codes.Unavailable, ErrAttemptsExhausted, 3)
		wantList(t, "calls", got, "0s run", "0s discard", "1s run", "1s discard", "3s run", "3s end at a.example")
	})
}

// Hedging for all methods is meant for RPCs. An Update that turns it on must not break functions.
func TestAFunctionIsNotHedged(t *testing.T) {
	bubble(t, func(t *testing.T) {
		logs, hedges := &logRecorder{}, &aBudget{}
		r := doer(t, 0, steady, WithLogger(slog.New(logs)),
			WithPolicy(Policy{MaxAttempts: 2, Hedging: &Hedging{Delay: HedgeAfter(second), Budget: hedges, AllMethodsAreSafe: true}}))
		for range 2 {
			p, f := play(errUnavailable)
			if err := r.Do(t.Context(), "/sql/read", f); err != nil || !slices.Equal(p.at, []time.Duration{0, second}) {
				t.Errorf("Do = %v, called at %v, want a retry after 1s", err, p.at)
			}
		}
		wantLines(t, logs, "level=WARN…method is not hedged, but retried: a function cannot be hedged…method=/sql/read", "DEBUG…retrying",
			"DEBUG…retrying")
		if len(hedges.heard) > 0 {
			t.Errorf("the budget of hedges heard of functions: %v", hedges.heard)
		}
	})
}

func TestPatternsOfFunctions(t *testing.T) {
	n := func(n int) CallOption { return WithMaxAttempts(n) }
	r := doer(t, 0, n(2), WithMethod("/http/", n(3), WithMaxElapsed(3)), WithMethod("/http/a.example/", n(4)),
		WithMethod("/http/a.example/v1/", n(6)), WithMethod("/http/a.example/GET", n(5)), WithMethod("/sql/", n(7)),
		WithMethod("/pkg.Service/Method", n(8)))
	for _, tt := range []struct {
		name     string
		attempts int
		elapsed  time.Duration
	}{
		{"/mail/send", 2, 0},
		{"/http/b.example/GET", 3, 3},
		{"/http/a.example/PUT", 4, 3},
		{"/http/a.example/GET", 5, 3},
		{"/http/a.example/v1/GET", 6, 3},
		{"/http/a.example/v2/v3/GET", 4, 3},
		{"/http", 3, 3},
		{"/https/a.example/GET", 2, 0},
		{"/sql", 7, 0},
		{"/sql/", 7, 0},
		{"/sqlite", 2, 0},
		{"/pkg.Service/Method", 8, 0},
	} {
		if p := r.Policy(tt.name); p.MaxAttempts != tt.attempts || p.MaxElapsed != tt.elapsed {
			t.Errorf("%s has %d attempts and MaxElapsed %v, want %d and %v", tt.name, p.MaxAttempts, p.MaxElapsed, tt.attempts, tt.elapsed)
		}
		calls := 0
		r.Do(t.Context(), tt.name, func(context.Context) error {
			calls++
			return errUnavailable
		}, WithBackoff(Constant(0)), WithBudget(Unlimited), WithMaxElapsed(0))
		if calls != tt.attempts {
			t.Errorf("%s is called %d times, want %d", tt.name, calls, tt.attempts)
		}
	}
	if w := r.settings.current().warnings(); len(w) != 1 || !strings.Contains(w[0], "pkg.Service") {
		t.Errorf("warnings are %q, want one about pkg.Service", w)
	}
}
