package debug

import (
	"encoding/json"
	"os"
	"strings"
	"testing"

	"github.com/grpcretry/grpcretry"
	"github.com/grpcretry/grpcretry/internal/recorded"
	"github.com/grpcretry/grpcretry/telemetry"
)

// "Is it helping?" is one division everywhere: retries that succeeded, by retries that reached
// a server. One call here needs three retries, and another one gives up after three.
func TestHelpingIsWhatTheMetricsSay(t *testing.T) {
	bubble(t, func(t *testing.T) {
		meters := &recorded.Meters{}
		r := retrier(t, unlimited, grpcretry.WithMeterProvider(meters))
		page := handler(t, r)
		c := dial(t, r, "passthrough:///echo")
		c.echo("down down down ok")
		c.echo("down")
		c.echo("ok")

		s := page.Snapshot()
		rescued, wasted := sumOf(t, meters, telemetry.MetricRescuedCalls), sumOf(t, meters, telemetry.MetricWastedAttempts)
		want(t, "rescued and wasted", []int64{s.Total.Rescued, s.Total.Wasted}, []int64{rescued, wasted})
		want(t, "the same", []int64{rescued, wasted}, []int64{1, 5})
		answer := answers(&s, true)[2]
		want(t, answer.Question, answer.Short+", "+answer.Line, "17 %, 1 of 6 retries succeeded")
	})
}

func sumOf(t *testing.T, meters *recorded.Meters, name string) (sum int64) {
	t.Helper()
	all, err := meters.Collect(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for _, m := range all {
		for _, s := range m.Series {
			if m.Name == name {
				sum += int64(s.Value)
			}
		}
	}
	return sum
}

func TestHelpingIsTheSameInTheDocuments(t *testing.T) {
	rate := func(series string) string { return "sumby(job,grpcretry_target)(rate(" + series + "[5m]))" }
	rescued, wasted := rate("grpcretry_rescued_calls_total"), rate("grpcretry_wasted_attempts_total")
	division := rescued + "/(" + rescued + "+" + wasted + ")"
	for _, file := range []string{"observing.md", "alerts.yml", "grafana-dashboard.json"} {
		text, err := os.ReadFile("../docs/" + file)
		if err != nil {
			t.Fatal(err)
		}
		if strings.HasSuffix(file, ".json") {
			text = []byte(strings.Join(expressions(t, text), " "))
		}
		if got := strings.Join(strings.Fields(string(text)), ""); strings.Count(got, division) != 1 {
			t.Errorf("%s has this %d times, want once:\n%s", file, strings.Count(got, division), division)
		}
	}
}

// expressions are the queries of a dashboard.
func expressions(t *testing.T, dashboard []byte) (all []string) {
	t.Helper()
	var d struct {
		Panels []struct {
			Targets []struct{ Expr string }
		}
	}
	if err := json.Unmarshal(dashboard, &d); err != nil {
		t.Fatal(err)
	}
	for _, p := range d.Panels {
		for _, target := range p.Targets {
			all = append(all, target.Expr)
		}
	}
	return all
}
