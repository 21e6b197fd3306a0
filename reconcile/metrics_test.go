package reconcile_test

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"runtime"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	promclient "github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"go.opentelemetry.io/otel/exporters/prometheus"
	sdkmetric "go.opentelemetry.io/otel/sdk/metric"
	"go.opentelemetry.io/otel/sdk/metric/metricdata"
	"golang.org/x/time/rate"
	"google.golang.org/grpc/codes"
	ctrl "sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/grpcretry/grpcretry"
	"github.com/grpcretry/grpcretry/reconcile"
)

// busy makes a limiter whose every metric has a value, and its queue. It needs a bubble.
func busy(t *testing.T, opts ...reconcile.Option) (stop func()) {
	b := ratio(t, 0.25, 3)
	r := newRetrier(t, grpcretry.WithBudget(b), grpcretry.WithBackoff(doubling))
	limiter := reconcile.NewRateLimiter[string](r, name, append(opts, slow)...)
	queue := reconcile.NewQueue(limiter, "")
	for _, fail := range []struct {
		item string
		err  error
	}{
		{"a", statusError(codes.Unavailable, 0)},
		{"b", pushback("60000")},
		{"c", statusError(codes.Unavailable, time.Minute)},
		{"d", statusError(codes.Unavailable, 0)}, // the budget is empty
		{"e", statusError(codes.InvalidArgument, 0)},
		{"f", pushback("-1")},
	} {
		limiter.Failed(fail.item, fail.err)
		queue.AddRateLimited(fail.item)
	}
	limiter.Result("g", grpcretry.Permanent(errors.New("never"))) // no retry follows
	// is paid back, so that d and e are brought forward, but there is enough for one
	limiter.Forget("c")
	time.Sleep(7 * time.Second)
	guarded := reconcile.Wrap(limiter, ctrl.TypedFunc[string](func(ctx context.Context, _ string) (ctrl.Result, error) {
		<-ctx.Done()
		return ctrl.Result{}, nil
	}), reconcile.Guards{Rate: rate.NewLimiter(0.5, 1)})
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{}, 2)
	for range 2 {
		item, _ := queue.Get()
		go func() {
			guarded.Reconcile(ctx, item)
			queue.Done(item)
			done <- struct{}{}
		}()
	}
	time.Sleep(3 * time.Second)
	return func() {
		runtime.KeepAlive(limiter)
		cancel()
		<-done
		<-done
		queue.ShutDown()
	}
}

// wantMetrics is what busy leaves behind.
var wantMetrics = []string{
	`grpcretry.reconcile.budget.balance{} 0.5`,
	`grpcretry.reconcile.budget.refusals{} 1`,
	`grpcretry.reconcile.failing_keys{} 5`,
	`grpcretry.reconcile.forwarded{} 1`,
	`grpcretry.reconcile.in_flight{} 2`,
	`grpcretry.reconcile.queue.depth{} 2`,
	`grpcretry.reconcile.queue.oldest{} 3`,
	`grpcretry.reconcile.rate_wait.duration{} 2 waits of 2s`,
	`grpcretry.reconcile.retries{backoff} 1`,
	`grpcretry.reconcile.retries{budget} 1`,
	`grpcretry.reconcile.retries{not_retryable} 1`,
	`grpcretry.reconcile.retries{pushback} 1`,
	`grpcretry.reconcile.retries{retry_info} 1`,
	`grpcretry.reconcile.retries{server} 1`,
	`grpcretry.reconcile.waiting_keys{} 0`,
}

func TestMetrics(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		reader := sdkmetric.NewManualReader()
		stop := busy(t, reconcile.WithMeterProvider(sdkmetric.NewMeterProvider(sdkmetric.WithReader(reader))))
		got := collect(t, reader)
		if !slices.Equal(got, wantMetrics) {
			t.Errorf("metrics are\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(wantMetrics, "\n"))
		}
		stop()
	})
}

func collect(t *testing.T, reader sdkmetric.Reader) (lines []string) {
	var all metricdata.ResourceMetrics
	if err := reader.Collect(t.Context(), &all); err != nil {
		t.Fatal(err)
	}
	for _, scope := range all.ScopeMetrics {
		for _, m := range scope.Metrics {
			switch data := m.Data.(type) {
			case metricdata.Sum[int64]:
				for _, p := range data.DataPoints {
					reason, _ := p.Attributes.Value(reconcile.AttrReason)
					lines = append(lines, fmt.Sprintf("%s{%s} %d", m.Name, reason.AsString(), p.Value))
				}
			case metricdata.Gauge[int64]:
				lines = append(lines, fmt.Sprintf("%s{} %d", m.Name, data.DataPoints[0].Value))
			case metricdata.Gauge[float64]:
				lines = append(lines, fmt.Sprintf("%s{} %v", m.Name, data.DataPoints[0].Value))
			case metricdata.Histogram[float64]:
				p := data.DataPoints[0]
				lines = append(lines, fmt.Sprintf("%s{} %d waits of %vs", m.Name, p.Count, p.Sum))
			}
		}
	}
	slices.Sort(lines)
	return lines
}

// A Prometheus scrape returns the same metrics, with seconds as unit and bucket bounds.
func TestPrometheus(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		registry := promclient.NewRegistry()
		exporter, err := prometheus.New(prometheus.WithRegisterer(registry), prometheus.WithoutScopeInfo(), prometheus.WithoutTargetInfo())
		if err != nil {
			t.Fatal(err)
		}
		stop := busy(t, reconcile.WithMeterProvider(sdkmetric.NewMeterProvider(sdkmetric.WithReader(exporter))))
		page := httptest.NewRecorder()
		promhttp.HandlerFor(registry, promhttp.HandlerOpts{}).ServeHTTP(page, httptest.NewRequest(http.MethodGet, "/metrics", nil))
		const labels = `grpcretry_reconcile_name="/reconcile/orders"`
		for _, want := range []string{
			`grpcretry_reconcile_budget_balance{` + labels + `} 0.5`,
			`grpcretry_reconcile_budget_refusals_total{` + labels + `} 1`,
			`grpcretry_reconcile_failing_keys{` + labels + `} 5`,
			`grpcretry_reconcile_forwarded_total{` + labels + `} 1`,
			`grpcretry_reconcile_in_flight{` + labels + `} 2`,
			`grpcretry_reconcile_queue_depth{` + labels + `} 2`,
			`grpcretry_reconcile_queue_oldest_seconds{` + labels + `} 3`,
			`grpcretry_reconcile_rate_wait_duration_seconds_bucket{` + labels + `,le="0.001"} 1`,
			`grpcretry_reconcile_rate_wait_duration_seconds_bucket{` + labels + `,le="1"} 1`,
			`grpcretry_reconcile_rate_wait_duration_seconds_bucket{` + labels + `,le="5"} 2`,
			`grpcretry_reconcile_rate_wait_duration_seconds_sum{` + labels + `} 2`,
			`grpcretry_reconcile_retries_total{` + labels + `,grpcretry_reconcile_reason="budget"} 1`,
			`grpcretry_reconcile_waiting_keys{` + labels + `} 0`,
		} {
			if !strings.Contains(page.Body.String(), "\n"+want+"\n") {
				t.Errorf("the scrape does not have %s", want)
			}
		}
		if t.Failed() {
			t.Log(page.Body.String())
		}
		stop()
	})
}

// A limiter that is gone leaves nothing in the metrics.
// What the limiter cannot know is absent, not zero.
func TestMetricsWithoutQueue(t *testing.T) {
	reader := sdkmetric.NewManualReader()
	limiter := reconcile.NewRateLimiter[string](newRetrier(t), name,
		reconcile.WithMeterProvider(sdkmetric.NewMeterProvider(sdkmetric.WithReader(reader))))
	absent := func(names ...string) {
		t.Helper()
		got := strings.Join(collect(t, reader), "\n")
		for _, name := range []string{reconcile.MetricQueueDepth, reconcile.MetricQueueOldest, reconcile.MetricInFlight} {
			if want := !slices.Contains(names, name); strings.Contains(got, name+"{") != want {
				t.Errorf("%s is there: %v, want %v", name, !want, want)
			}
		}
	}
	absent(reconcile.MetricQueueDepth, reconcile.MetricQueueOldest, reconcile.MetricInFlight)
	reconcile.Wrap(limiter, ctrl.TypedFunc[string](nil), reconcile.Guards{})
	absent(reconcile.MetricQueueDepth, reconcile.MetricQueueOldest)
	reconcile.NewQueue(limiter, "").ShutDown()
	absent()
	runtime.KeepAlive(limiter)
}

func TestMetricsEnd(t *testing.T) {
	reader := sdkmetric.NewManualReader()
	limiter := reconcile.NewRateLimiter[string](newRetrier(t), name,
		reconcile.WithMeterProvider(sdkmetric.NewMeterProvider(sdkmetric.WithReader(reader))))
	limiter.Failed("a", errors.New("down"))
	if got := len(collect(t, reader)); got == 0 {
		t.Error("there are no metrics")
	}
	runtime.KeepAlive(limiter)
	for range 5 {
		runtime.GC()
	}
	if got := collect(t, reader); len(got) != 0 {
		t.Errorf("metrics of a limiter that is gone: %v", got)
	}
}
