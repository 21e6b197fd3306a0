//go:build e2e

package e2e

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"math"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	promclient "github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	otelprom "go.opentelemetry.io/otel/exporters/prometheus"
	"go.opentelemetry.io/otel/metric"
	sdkmetric "go.opentelemetry.io/otel/sdk/metric"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/tap"

	"github.com/grpcretry/grpcretry"
	"github.com/grpcretry/grpcretry/grpcretrytest"
	echov1 "github.com/grpcretry/grpcretry/proto/echo/v1"
)

// A prometheus is a server that scrapes one job, "shop", and evaluates the rules of docs.
type prometheus struct{ api string }

const prometheusConfig = `
global:
  scrape_interval: 200ms
  scrape_timeout: 200ms
  evaluation_interval: 500ms
rule_files:
  - %s
scrape_configs:
  - job_name: shop
    static_configs:
      - targets: [%q]
`

func startPrometheus(t *testing.T, target string) prometheus {
	t.Helper()
	rules, err := filepath.Abs(rulesFile)
	if err != nil {
		t.Fatalf("Abs(%s): %v", rulesFile, err)
	}
	dir := t.TempDir()
	config := filepath.Join(dir, "prometheus.yml")
	if err := os.WriteFile(config, fmt.Appendf(nil, prometheusConfig, rules, target), 0o644); err != nil {
		t.Fatalf("writing the configuration: %v", err)
	}
	address := freeAddresses(t, 1)[0]
	p := start(t, "prometheus",
		"--config.file="+config,
		"--storage.tsdb.path="+filepath.Join(dir, "data"),
		"--web.listen-address="+address,
		"--log.level=warn")
	p.ready(t, "http://"+address+"/-/ready")
	return prometheus{api: "http://" + address + "/api/v1/"}
}

// ask asks the API, and reads the data of its answer into data.
func (p prometheus) ask(ctx context.Context, path string, data any) error {
	body, err := get(ctx, p.api+path)
	if err != nil {
		return err
	}
	answer := struct {
		Status string `json:"status"`
		Data   any    `json:"data"`
	}{Data: data}
	if err := json.Unmarshal(body, &answer); err != nil {
		return err
	}
	if answer.Status != "success" {
		return fmt.Errorf("prometheus answers %s", body)
	}
	return nil
}

// query evaluates an expression now. The values are by the labels that the query leaves,
// without the name, the job and the target, which are the same for all: "" where nothing
// else is left, else "label=value …".
func (p prometheus) query(ctx context.Context, expr string) (map[string]float64, error) {
	var data struct {
		Result []struct {
			Metric map[string]string `json:"metric"`
			Value  [2]any            `json:"value"` // time and value
		} `json:"result"`
	}
	if err := p.ask(ctx, "query?query="+url.QueryEscape(expr), &data); err != nil {
		return nil, err
	}
	values := map[string]float64{}
	for _, r := range data.Result {
		for _, same := range []string{"__name__", "job", "grpcretry_target"} {
			delete(r.Metric, same)
		}
		var labels []string
		for key, value := range r.Metric {
			labels = append(labels, key+"="+value)
		}
		value, err := strconv.ParseFloat(fmt.Sprint(r.Value[1]), 64)
		if err != nil {
			return nil, err
		}
		values[strings.Join(labels, " ")] = value
	}
	return values, nil
}

// wantValues waits until a query gives these values.
func (p prometheus) wantValues(t *testing.T, expr string, want map[string]float64) {
	t.Helper()
	eventually(t, "the values of "+expr, func() error {
		got, err := p.query(t.Context(), expr)
		if err != nil {
			return err
		}
		if !maps.EqualFunc(got, want, isClose) {
			return fmt.Errorf("got %v, want %v", got, want)
		}
		return nil
	})
}

// isClose allows for rounding, and for nothing else.
func isClose(a, b float64) bool { return math.Abs(a-b) <= 1e-9*math.Max(math.Abs(a), math.Abs(b)) }

// measured serves the metrics of a provider, as a program would, and returns where.
func measured(t *testing.T) (provider metric.MeterProvider, address string) {
	t.Helper()
	registry := promclient.NewRegistry()
	exporter, err := otelprom.New(otelprom.WithRegisterer(registry))
	if err != nil {
		t.Fatalf("prometheus.New: %v", err)
	}
	listener := listen(t)
	mux := http.NewServeMux()
	mux.Handle("/metrics", promhttp.HandlerFor(registry, promhttp.HandlerOpts{}))
	server := &http.Server{Handler: mux, ReadHeaderTimeout: 10 * time.Second}
	served := make(chan error, 1)
	go func() { served <- server.Serve(listener) }()
	t.Cleanup(func() {
		server.Close()
		if err := <-served; !errors.Is(err, http.ErrServerClosed) {
			t.Errorf("Serve = %v", err)
		}
	})
	return sdkmetric.NewMeterProvider(sdkmetric.WithReader(exporter)), listener.Addr().String()
}

// A batch is so many calls that go the same way, and what each of them must come to.
type batch struct {
	calls    int
	name     string
	plan     plan
	call     func(ctx context.Context, client echov1.EchoServiceClient) error
	attempts int
	outcome  string // as the metrics have it
	wantErr  error  // errors.Is; nil for success
}

var unavailable = planned(codes.Unavailable)

// traffic is one round of calls: 36 of them, with 49 attempts.
var traffic = []batch{
	{20, "well", nil, echo, 1, "first_try", nil},
	{4, "once", plan{unavailable}, echo, 2, "recovered", nil},
	{2, "twice", plan{unavailable, unavailable}, echo, 3, "recovered", nil},
	{2, "stream once", plan{unavailable}, expand, 2, "recovered", nil},
	{1, "down", plan{unavailable.Always()}, echo, 4, "exhausted", grpcretry.ErrAttemptsExhausted},
	{1, "far too long", plan{unavailable.Pushback(time.Hour)}, echo, 1, "pushback", grpcretry.ErrPushback},
	{1, "too long", plan{unavailable.Pushback(time.Minute)}, inTenSeconds, 1, "deadline", grpcretry.ErrDeadline},
	{2, "wrong", plan{planned(codes.NotFound)}, echo, 1, "not_retryable", errNotFound},
	{3, "refused", plan{unavailable}, put, 1, "budget", grpcretry.ErrBudgetExhausted},
}

// errNotFound stands for the status that a call ends with untouched.
var errNotFound = errors.New("NotFound")

func inTenSeconds(ctx context.Context, client echov1.EchoServiceClient) error {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	return echo(ctx, client)
}

func put(ctx context.Context, client echov1.EchoServiceClient) error {
	_, err := client.Put(ctx, &echov1.EchoRequest{})
	return err
}

// Every wait of a round, without jitter: 8 ms before the first retry, 16 ms before the
// second, 32 ms before the third.
const (
	firstWaits  = 4 + 2 + 2 + 1
	secondWaits = 2 + 1
	thirdWaits  = 1
	allWaits    = firstWaits + secondWaits + thirdWaits
)

// round makes the calls of a round, one after the other.
func round(t *testing.T, server *grpcretrytest.Server, client echov1.EchoServiceClient) {
	t.Helper()
	for _, b := range traffic {
		server.On("/", b.plan...)
		for range b.calls {
			err := b.call(t.Context(), client)
			switch {
			case b.wantErr == nil && err != nil,
				b.wantErr == errNotFound && err == nil,
				b.wantErr != errNotFound && !errors.Is(err, b.wantErr):
				t.Fatalf("call %q = %v, want %v", b.name, err, b.wantErr)
			}
		}
	}
}

func TestPrometheusAnswersTheQueries(t *testing.T) {
	calls, attempts, rescued, wasted := 0, 0, 0, 0
	lost := map[string]float64{} // calls by outcome
	for _, b := range traffic {
		calls += b.calls
		attempts += b.calls * b.attempts
		switch {
		case b.outcome == "recovered":
			rescued += b.calls
			wasted += b.calls * (b.attempts - 2)
		case b.wantErr != nil:
			wasted += b.calls * (b.attempts - 1)
			lost["grpcretry_outcome="+b.outcome] += float64(b.calls)
		}
	}
	for outcome := range lost {
		lost[outcome] /= float64(calls)
	}

	// A budget whose level follows from the attempts alone, and one that refuses all.
	budget, err := grpcretry.NewThrottle(1000, 1)
	if err != nil {
		t.Fatalf("NewThrottle: %v", err)
	}
	empty, err := grpcretry.NewRatioBudget(grpcretry.RatioBudget{Ratio: grpcretry.Nothing, Reserve: grpcretry.Nothing, Window: time.Second})
	if err != nil {
		t.Fatalf("NewRatioBudget: %v", err)
	}
	provider, metrics := measured(t)
	var seen atomic.Int64 // attempts
	server := serve(t, grpc.InTapHandle(func(ctx context.Context, _ *tap.Info) (context.Context, error) {
		seen.Add(1)
		return ctx, nil
	}))
	client := echov1.NewEchoServiceClient(server.Conn(grpcretry.DialOptions(
		grpcretry.WithMeterProvider(provider),
		grpcretry.WithBackoff(grpcretry.Exponential{Base: 8 * time.Millisecond, Jitter: grpcretry.NoJitter}),
		grpcretry.WithBudget(budget),
		grpcretry.WithMethod(echov1.EchoService_Put_FullMethodName, grpcretry.WithBudget(empty), grpcretry.WithPatience(0)))...))

	// A rate is seen between two scrapes. With one round before the first and one after
	// it, every series has grown by as much as it began with, so that what Prometheus adds
	// to the ends of its window is the same share of each, and cancels out.
	round(t, server, client)
	p := startPrometheus(t, metrics)
	p.wantValues(t, "min(count_over_time(grpcretry_calls_total[5m])) >= bool 3", map[string]float64{"": 1})
	round(t, server, client)
	if got := seen.Load(); got != int64(2*attempts) {
		t.Errorf("the server saw %d attempts, want %d", got, 2*attempts)
	}
	for name, want := range map[string]int{
		"grpcretry_calls_total":                 calls,
		"grpcretry_attempts_total":              attempts,
		"grpcretry_rescued_calls_total":         rescued,
		"grpcretry_wasted_attempts_total":       wasted,
		"grpcretry_budget_refusals_total":       3,
		"grpcretry_wait_duration_seconds_count": allWaits,
	} {
		p.wantValues(t, "sum("+name+")", map[string]float64{"": float64(2 * want)})
	}

	// The 99th percentile is within the bucket of the longest wait, from 25 to 50 ms, as
	// far in as the rank is among the waits there.
	rank := 0.99 * allWaits
	longest := 0.025 + (0.050-0.025)*(rank-firstWaits-secondWaits)/thirdWaits

	level := budget.Balance(time.Now())
	if level >= 500 {
		t.Errorf("the budget is full, at %v: a level that failures have not lowered proves nothing", level)
	}
	want := map[string]map[string]float64{
		"grpcretry:retry_share":   {"": float64(rescued+wasted) / float64(attempts)},
		"grpcretry:rescued_share": {"": float64(rescued) / float64(rescued+wasted)},
		"grpcretry:lost_share":    lost,
		"grpcretry:budget_level": {
			"grpcretry_budget=all": level,
			"grpcretry_budget=" + echov1.EchoService_Put_FullMethodName: 0,
		},
		"grpcretry:wait_p99_seconds": {"": longest},
	}
	for name, expr := range queries(t) {
		t.Run(name, func(t *testing.T) {
			p.wantValues(t, expr, want[name])
			p.wantValues(t, name, want[name]) // as the rule has recorded it
			t.Logf("%s is %v", name, want[name])
		})
	}

	t.Run("alerts", func(t *testing.T) { checkAlerts(t, p) })
	t.Run("dashboard", func(t *testing.T) { checkDashboard(t, p) })
}

// checkAlerts wants those alerts pending that the traffic is bad enough for. They would
// fire after minutes, which promtool lets pass in virtual time.
func checkAlerts(t *testing.T, p prometheus) {
	want := map[string]string{
		"GRPCRetryShareHigh":   "pending",
		"GRPCRetriesDoNotHelp": "inactive",
		"GRPCCallsLost":        "pending",
		"GRPCRetryBudgetEmpty": "pending",
		"GRPCRetryWaitsLong":   "inactive",
	}
	eventually(t, "the state of the alerts", func() error {
		var data struct {
			Groups []struct {
				Rules []struct {
					Name, State, Health, LastError string
				} `json:"rules"`
			} `json:"groups"`
		}
		if err := p.ask(t.Context(), "rules", &data); err != nil {
			return err
		}
		got := map[string]string{}
		for _, g := range data.Groups {
			for _, r := range g.Rules {
				if r.Health != "ok" {
					return fmt.Errorf("rule %s is %s: %s", r.Name, r.Health, r.LastError)
				}
				if r.State != "" {
					got[r.Name] = r.State
				}
			}
		}
		if !maps.Equal(got, want) {
			return fmt.Errorf("got %v, want %v", got, want)
		}
		return nil
	})
}

// checkDashboard wants data in every panel.
func checkDashboard(t *testing.T, p prometheus) {
	for _, panel := range dashboard(t) {
		for _, target := range panel.Targets {
			values, err := p.query(t.Context(), target.Expr)
			if err != nil || len(values) == 0 {
				t.Errorf("panel %q: %s gives %v, %v, want data", panel.Title, target.Expr, values, err)
			}
		}
	}
}

func TestAlertsFireWhenTheyShould(t *testing.T) {
	for _, args := range [][]string{
		{"check", "rules", rulesFile},
		{"test", "rules", "testdata/alerts.test.yml"},
	} {
		if output, err := exec.CommandContext(t.Context(), "promtool", args...).CombinedOutput(); err != nil {
			t.Errorf("promtool %s: %v\n%s", strings.Join(args, " "), err, output)
		}
	}
}
