package grpcretry

import (
	"context"
	"fmt"
	"math"
	"slices"
	"strings"
	"testing"
	"time"

	"go.opentelemetry.io/otel/metric/noop"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/grpcretry/grpcretry/internal/recorded"
	echov1 "github.com/grpcretry/grpcretry/proto/echo/v1"
	"github.com/grpcretry/grpcretry/telemetry"
)

func collect(t *testing.T, meters *recorded.Meters) []recorded.Metric {
	t.Helper()
	all, err := meters.Collect(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return all
}

// metricLines is every series that is not zero, sorted, as "name value attributes": of a
// histogram the value is its count and its sum. The target and the method that all tests
// use are left out.
func metricLines(t *testing.T, meters *recorded.Meters) []string {
	t.Helper()
	var lines []string
	usual := []string{"grpcretry.target=passthrough:///echo", "rpc.method=grpcretry.test.v1.EchoService/Echo"}
	for _, m := range collect(t, meters) {
		for _, s := range m.Series {
			value := fmt.Sprint(s.Value)
			switch {
			case m.Kind == "histogram":
				value = fmt.Sprintf("%d/%gs", s.Count, s.Value)
			case s.Value == 0:
				continue
			}
			fields := slices.DeleteFunc(strings.Fields(recorded.Text(s.Attributes.ToSlice())),
				func(attr string) bool { return slices.Contains(usual, attr) })
			lines = append(lines, strings.Join(append([]string{m.Name, value}, fields...), " "))
		}
	}
	slices.Sort(lines)
	return lines
}

func wantMetrics(t *testing.T, meters *recorded.Meters, want ...string) {
	t.Helper()
	if got := metricLines(t, meters); !slices.Equal(got, want) {
		t.Errorf("metrics are\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
}

func TestMetricsOfACall(t *testing.T) {
	for _, tt := range []struct {
		name    string
		script  func(int) answer
		opts    []Option
		timeout time.Duration
		want    []string
	}{
		{name: "first try", script: script(ok()), want: []string{
			"grpcretry.attempts 1 grpcretry.decision=success rpc.response.status_code=OK",
			"grpcretry.calls 1 grpcretry.outcome=first_try",
		}},
		{name: "recovered", script: script(unavailable(), overloaded().pushback("7000"), ok()), want: []string{
			"grpcretry.attempts 1 grpcretry.decision=retry rpc.response.status_code=RESOURCE_EXHAUSTED",
			"grpcretry.attempts 1 grpcretry.decision=retry rpc.response.status_code=UNAVAILABLE",
			"grpcretry.attempts 1 grpcretry.decision=success rpc.response.status_code=OK",
			"grpcretry.calls 1 grpcretry.outcome=recovered",
			"grpcretry.rescued_calls 1",
			"grpcretry.wait.duration 1/1s grpcretry.wait_source=backoff",
			"grpcretry.wait.duration 1/7s grpcretry.wait_source=pushback",
			"grpcretry.wasted_attempts 1",
		}},
		{name: "exhausted", script: always(unavailable()), opts: []Option{WithMaxAttempts(3)}, want: []string{
			"grpcretry.attempts 1 grpcretry.decision=stop rpc.response.status_code=UNAVAILABLE",
			"grpcretry.attempts 2 grpcretry.decision=retry rpc.response.status_code=UNAVAILABLE",
			"grpcretry.calls 1 grpcretry.outcome=exhausted",
			"grpcretry.target.failing 3",
			"grpcretry.wait.duration 2/3s grpcretry.wait_source=backoff",
			"grpcretry.wasted_attempts 2",
		}},
		{name: "budget", script: always(unavailable()), opts: []Option{WithBudget(stingy{}), WithPatience(0)}, want: []string{
			"grpcretry.attempts 1 grpcretry.decision=stop rpc.response.status_code=UNAVAILABLE",
			"grpcretry.budget.refusals 1 grpcretry.budget=all",
			"grpcretry.calls 1 grpcretry.outcome=budget",
		}},
		{name: "target down", script: always(unavailable()), opts: []Option{WithBudget(stingy{}), WithPatience(5 * second)}, want: []string{
			"grpcretry.attempts 1 grpcretry.decision=retry rpc.response.status_code=UNAVAILABLE",
			"grpcretry.calls 1 grpcretry.outcome=target_down",
			"grpcretry.target.failing 5",
		}},
		{name: "not retryable", script: script(fail(codes.NotFound, "x")), want: []string{
			"grpcretry.attempts 1 grpcretry.decision=stop rpc.response.status_code=NOT_FOUND",
			"grpcretry.calls 1 grpcretry.outcome=not_retryable",
		}},
		{name: "deadline", script: script(unavailable()), timeout: second / 2, want: []string{
			"grpcretry.attempts 1 grpcretry.decision=stop rpc.response.status_code=UNAVAILABLE",
			"grpcretry.calls 1 grpcretry.outcome=deadline",
		}},
		{name: "hedge won", script: script(hang(), ok()), opts: []Option{hedged(3, Hedging{Delay: HedgeAfter(second)})},
			want: []string{
				"grpcretry.attempts 1 grpcretry.decision=lost rpc.response.status_code=CANCELLED",
				"grpcretry.attempts 1 grpcretry.decision=success rpc.response.status_code=OK",
				"grpcretry.calls 1 grpcretry.outcome=hedge_won",
				"grpcretry.hedges 1 grpcretry.hedge.result=won",
				"grpcretry.wait.duration 1/1s grpcretry.wait_source=hedge_delay",
			}},
		{name: "hedges wasted", script: script(ok().after(5*second/2), hang(), unavailable().after(second/4)),
			opts: []Option{hedged(3, Hedging{Delay: HedgeAfter(second)})}, want: []string{
				"grpcretry.attempts 1 grpcretry.decision=lost rpc.response.status_code=CANCELLED",
				"grpcretry.attempts 1 grpcretry.decision=stop rpc.response.status_code=UNAVAILABLE",
				"grpcretry.attempts 1 grpcretry.decision=success rpc.response.status_code=OK",
				"grpcretry.calls 1 grpcretry.outcome=first_try",
				"grpcretry.hedges 2 grpcretry.hedge.result=wasted",
				"grpcretry.target.failing 0.25", // the attempt that was answered was sent before the hedge that failed
				"grpcretry.wait.duration 2/2s grpcretry.wait_source=hedge_delay",
			}},
		{name: "hedge refused", script: script(ok().after(3 * second / 2)),
			opts: []Option{hedged(3, Hedging{Delay: HedgeAfter(second), Budget: stingy{}})}, want: []string{
				"grpcretry.attempts 1 grpcretry.decision=success rpc.response.status_code=OK",
				"grpcretry.budget.refusals 1 grpcretry.budget=hedges",
				"grpcretry.calls 1 grpcretry.outcome=first_try",
			}},
		{name: "switched off", script: script(unavailable()), opts: []Option{Disable()}, want: []string{"grpcretry.passed_calls 1"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				server := serve(t, tt.script)
				meters := &recorded.Meters{}
				client := server.client(t, append([]Option{steady, WithBudget(Unlimited), WithMeterProvider(meters)}, tt.opts...)...)
				ctx := t.Context()
				if tt.timeout > 0 {
					var cancel context.CancelFunc
					ctx, cancel = context.WithTimeout(ctx, tt.timeout)
					defer cancel()
				}
				client.Echo(ctx, request())
				wantMetrics(t, meters, tt.want...)
			})
		})
	}
}

func TestMetricsOfBudgets(t *testing.T) {
	const service, method = "/grpcretry.test.v1.EchoService/", "/grpcretry.test.v1.EchoService/Put"
	three, err := NewConcurrencyBudget(3)
	if err != nil {
		t.Fatal(err)
	}
	bubble(t, func(t *testing.T) {
		server := serve(t, always(unavailable()))
		meters := &recorded.Meters{}
		client := server.client(t, steady, WithMeterProvider(meters), WithPatience(0),
			WithMethod(service, WithBudget(three)),
			WithMethod(method, WithBudget(fickle{}), WithMaxAttempts(2)),
			WithMethod("/other.Service/Method", WithBudget(Unlimited)))
		client.Put(t.Context(), request())
		client.Echo(t.Context(), request(), WithBudget(fickle{}))
		var got []string
		for _, line := range metricLines(t, meters) {
			if strings.HasPrefix(line, "grpcretry.budget.") {
				got = append(got, line)
			}
		}
		want := []string{
			"grpcretry.budget.balance 1 grpcretry.budget=" + method,
			"grpcretry.budget.balance 3 grpcretry.budget=" + service,
			"grpcretry.budget.balance 3 grpcretry.budget=all", // the reserve
			"grpcretry.budget.refusals 1 grpcretry.budget=" + method,
			"grpcretry.budget.refusals 1 grpcretry.budget=call",
		}
		if !slices.Equal(got, want) {
			t.Errorf("metrics of budgets are\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
		}
	})
}

// shows is a budget that shows a balance, even one that is no finite number.
type shows struct {
	unlimited
	balance float64
}

func (b shows) Balance(time.Time) float64 { return b.balance }

func TestOnlyAFiniteBalanceIsShown(t *testing.T) {
	for balance, want := range map[float64]string{math.Inf(1): "", math.Inf(-1): "", math.NaN(): "", 2.00000003: "2"} {
		bubble(t, func(t *testing.T) {
			server, meters, got := serve(t, always(ok())), &recorded.Meters{}, ""
			_ = echo(t.Context(), server.client(t, WithBudget(shows{balance: balance}), WithMeterProvider(meters)))
			for _, line := range metricLines(t, meters) {
				if after, found := strings.CutPrefix(line, "grpcretry.budget.balance "); found {
					got = strings.TrimSuffix(after, " grpcretry.budget=all")
				}
			}
			if got != want {
				t.Errorf("the balance %v shows as %q, want %q", balance, got, want)
			}
		})
	}
}

// A collection makes no budgets.
func TestACollectionCallsNoFunctionOfTheProgram(t *testing.T) {
	bubble(t, func(t *testing.T) {
		made := 0
		perTarget := PerTarget(func() Budget { made++; return Unlimited })
		server, meters := serve(t, always(ok())), &recorded.Meters{}
		client := server.client(t, WithMeterProvider(meters), WithMethod("/other.Service/", WithBudget(perTarget)))
		if err := echo(t.Context(), client); err != nil {
			t.Fatal(err)
		}
		metricLines(t, meters)
		if made != 0 {
			t.Errorf("the function was called %d times, and no call to its methods was made", made)
		}
	})
}

// A proxy that forwards any method would make a series of each.
func TestMethodsThatNoStubKnowsAreOther(t *testing.T) {
	bubble(t, func(t *testing.T) {
		server := serve(t, always(ok()))
		meters := &recorded.Meters{}
		cc := server.conn(t, DialOptions(WithMeterProvider(meters))...)
		for i := range 3 {
			cc.Invoke(t.Context(), fmt.Sprintf("/made.Up/Method%d", i), request(), &echov1.EchoResponse{})
		}
		cc.Invoke(t.Context(), "/grpcretry.test.v1.EchoService/Echo", request(), &echov1.EchoResponse{})
		want := []string{"grpcretry.calls 1 grpcretry.outcome=first_try rpc.method=other",
			"grpcretry.calls 3 grpcretry.outcome=not_retryable rpc.method=other"}
		got := slices.DeleteFunc(metricLines(t, meters), func(line string) bool { return !strings.HasPrefix(line, "grpcretry.calls") })
		if !slices.Equal(got, want) {
			t.Errorf("calls are %q, want %q", got, want)
		}
	})
}

func TestTooManyMethodsAreCountedTogether(t *testing.T) {
	meters := &recorded.Meters{}
	r := retrierOf(t, WithMeterProvider(meters))
	const calls = maxMetricRows + 500
	cc, err := grpc.NewClient("localhost:1", grpc.WithTransportCredentials(insecure.NewCredentials())) // has two names
	if err != nil {
		t.Fatal(err)
	}
	defer cc.Close()
	for i := range 2 * calls { // each method twice: those that had a row keep it
		r.unary(t.Context(), fmt.Sprintf("/pkg.Service/Method%d", i%calls), nil, nil, cc, succeed, stubOptions...)
	}
	if rows := len(r.report.metrics.rows.Current()); rows > maxMetricRows {
		t.Errorf("%d rows, want at most %d", rows, maxMetricRows)
	}
	if got := callsCounted(t, meters); got != 2*calls {
		t.Errorf("%d calls counted, want %d", got, 2*calls)
	}
	if got := r.report.metrics.overflow.FirstTries.Sum(); got != 2*500 {
		t.Errorf("%d calls counted as other, want the two of each method that came too late", got)
	}
	refused := func(context.Context, string, any, any, *grpc.ClientConn, ...grpc.CallOption) error {
		return errUnavailable
	}
	for range 10 { // more than the reserve
		r.unary(t.Context(), "/pkg.Service/Late", nil, nil, cc, refused, append(stubOptions, WithPatience(0), WithBackoff(Constant(0)))...)
	}
	for _, line := range metricLines(t, meters) {
		if strings.HasPrefix(line, "grpcretry.budget.balance") && strings.Contains(line, "=other") {
			t.Errorf("%s: there is no such budget", line)
		}
	}
}

// The targets of functions and of HTTP requests may come from others, by a redirect for example.
func TestTooManyTargetsHaveNoSeries(t *testing.T) {
	meters := &recorded.Meters{}
	r := retrierOf(t, WithMeterProvider(meters), WithPatience(0), WithBackoff(Constant(0)))
	const targets = maxMetricRows + 10
	for i := range targets {
		_ = r.Do(t.Context(), fmt.Sprintf("/host%d/GET", i), func(context.Context) error { return errUnavailable })
	}
	about := 0
	for _, m := range collect(t, meters) {
		if strings.HasPrefix(m.Name, "grpcretry.target.") {
			about++
			if n := len(m.Series); n != maxMetricRows {
				t.Errorf("%s has %d series, want %d", m.Name, n, maxMetricRows)
			}
		}
	}
	if about != 2 {
		t.Errorf("%d instruments are about targets, want 2", about)
	}
}

// The definitions are what dashboards build on.
func TestInstrumentsHaveUnitsAndBounds(t *testing.T) {
	bubble(t, func(t *testing.T) {
		server := serve(t, script(unavailable(), ok(), hang(), ok()))
		meters := &recorded.Meters{}
		server.client(t, steady, WithMeterProvider(meters)).Echo(t.Context(), request())
		server.client(t, hedged(2, Hedging{Delay: HedgeAfter(second)}), WithMeterProvider(meters)).Echo(t.Context(), request())
		units := map[string]string{
			"grpcretry.attempts": "{attempt}", "grpcretry.calls": "{call}", "grpcretry.rescued_calls": "{call}",
			"grpcretry.wasted_attempts": "{attempt}", "grpcretry.wait.duration": "s",
			"grpcretry.budget.balance": "{retry}", "grpcretry.hedges": "{hedge}",
			"grpcretry.target.waiting_calls": "{call}", "grpcretry.target.failing": "s",
			"grpcretry.budget.refusals": "{retry}", "grpcretry.waiting_calls": "{call}", "grpcretry.open_streams": "{stream}",
			"grpcretry.replay.memory": "By", "grpcretry.replay.refusals": "{refusal}",
		}
		for _, m := range collect(t, meters) {
			if m.Unit != units[m.Name] || m.Description == "" {
				t.Errorf("%s has unit %q and description %q, want unit %q and some description", m.Name, m.Unit, m.Description,
					units[m.Name])
			}
			delete(units, m.Name)
			var want []float64
			if m.Kind == "histogram" {
				want = []float64{0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60, 300}
			}
			if !slices.Equal(m.Bounds, want) {
				t.Errorf("%s has bounds %v, want %v", m.Name, m.Bounds, want)
			}
		}
		if len(units) != 0 {
			t.Errorf("metrics without %v", units)
		}
	})
}

func callsCounted(t *testing.T, meters *recorded.Meters) (total int64) {
	t.Helper()
	for _, m := range collect(t, meters) {
		if m.Name == telemetry.MetricCalls {
			for _, s := range m.Series {
				total += int64(s.Value)
			}
		}
	}
	return total
}

// Counting is on the path of every call.
func TestMetricsAllocateNothingOnAFirstTry(t *testing.T) {
	meters := &recorded.Meters{}
	for name, opts := range map[string][]Option{
		"nobody reads": {WithMeterProvider(noop.NewMeterProvider())},
		"read":         {WithMeterProvider(meters)},
	} {
		intercept := UnaryClientInterceptor(opts...)
		callOnce(t, intercept, succeed)
		collect(t, meters)
		if got := testing.AllocsPerRun(1000, func() { callOnce(t, intercept, succeed) }); got > 1 {
			t.Errorf("%s: %v allocations, want no more than the one of a call without metrics", name, got)
		}
	}
}

func BenchmarkFirstAttemptSucceedsWithMetrics(b *testing.B) {
	meters := &recorded.Meters{}
	for _, bm := range []struct {
		name string
		opts []Option
	}{
		{"metrics=off", nil},
		{"metrics=on", []Option{WithMeterProvider(meters)}},
	} {
		b.Run(bm.name, func(b *testing.B) {
			intercept := UnaryClientInterceptor(bm.opts...)
			b.ReportAllocs()
			for b.Loop() {
				callOnce(b, intercept, succeed)
			}
		})
	}
}

// A retry that reached no server was free and is not wasted.
func TestAnUnsentRetryIsNotWasted(t *testing.T) {
	bubble(t, func(t *testing.T) {
		server := serve(t, script(unavailable(), ok()))
		meters := &recorded.Meters{}
		link, cc := server.linked(t, DialOptions(WithBackoff(Constant(second)), WithMeterProvider(meters))...)
		time.AfterFunc(second/2, link.cut)
		time.AfterFunc(3*second/2, link.mend)
		if err := echo(t.Context(), echov1.NewEchoServiceClient(cc)); err != nil {
			t.Error(err)
		}
		lines := metricLines(t, meters)
		if !slices.Contains(lines, "grpcretry.rescued_calls 1") || strings.Contains(strings.Join(lines, "\n"), telemetry.MetricWastedAttempts) {
			t.Errorf("metrics are\n%s\nwant one rescued call and nothing wasted", strings.Join(lines, "\n"))
		}
	})
}
