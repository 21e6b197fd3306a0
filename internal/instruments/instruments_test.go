package instruments

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"testing"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"
	"go.opentelemetry.io/otel/metric/noop"

	"github.com/grpcretry/grpcretry/internal/recorded"
	"github.com/grpcretry/grpcretry/telemetry"
)

// measured returns the value of each series, by the metric's name and the values of the attributes.
func measured(t *testing.T, meters *recorded.Meters) map[string]float64 {
	t.Helper()
	all, err := meters.Collect(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	values := map[string]float64{}
	for _, m := range all {
		for _, s := range m.Series {
			words := []string{strings.TrimPrefix(m.Name, "grpcretry.")}
			for _, attr := range s.Attributes.ToSlice() {
				words = append(words, attr.Value.AsString())
			}
			values[strings.Join(words, " ")] = s.Value
		}
	}
	return values
}

func TestEveryInstrumentIsRead(t *testing.T) {
	meters := &recorded.Meters{}
	wait, err := Register(meters, func(to *Collection) {
		for i := range Failing {
			to.Count(i, int64(i)+1)
		}
		to.Measure(Failing, 0.5, attribute.String("k", "v"))
		to.Measure(Balance, 0.25)
	})
	if err != nil {
		t.Fatal(err)
	}
	wait.Record(t.Context(), 2)
	all, err := meters.Collect(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	kinds := map[string]int{}
	for _, m := range all {
		kinds[m.Kind]++
		if m.Unit == "" || m.Description == "" || len(m.Series) != 1 {
			t.Errorf("%s has unit %q, description %q and %d series", m.Name, m.Unit, m.Description, len(m.Series))
		}
	}
	if want := map[string]int{"counter": 8, "up-down counter": 4, "gauge": 2, "histogram": 1}; !maps.Equal(kinds, want) {
		t.Errorf("there are %v, want %v", kinds, want)
	}
	got := measured(t, meters)
	for name, want := range map[string]float64{"attempts": 1, "waiting_calls": 9, "target.waiting_calls": 12,
		"target.failing v": 0.5, "budget.balance": 0.25, "wait.duration": 2} {
		if got[name] != want {
			t.Errorf("%s = %v, want %v", name, got[name], want)
		}
	}
}

// noCounters is a provider whose meters make no counters, as one that rejects their names would.
type noCounters struct{ noop.MeterProvider }

func (noCounters) Meter(string, ...metric.MeterOption) metric.Meter { return noCountersMeter{} }

type noCountersMeter struct{ noop.Meter }

var errNoCounter = errors.New("no counter")

func (noCountersMeter) Int64Counter(string, ...metric.Int64CounterOption) (metric.Int64Counter, error) {
	return nil, errNoCounter
}

func (noCountersMeter) Int64ObservableCounter(string, ...metric.Int64ObservableCounterOption) (metric.Int64ObservableCounter, error) {
	return nil, errNoCounter
}

func TestProvidersThatMakeNoInstruments(t *testing.T) {
	if _, err := Register(noCounters{}, func(*Collection) {}); !errors.Is(err, errNoCounter) {
		t.Errorf("Register = %v, want the provider's error", err)
	}
	s := NewServer(noCounters{}) // whose methods do nothing
	s.Retry("/s/m", "caller")
	s.NoRetry("/s/m")
	if s != nil {
		t.Errorf("NewServer = %v, want nil", s)
	}
}

func TestCounts(t *testing.T) {
	won, retried := Series{Hedges, [2]string{"won"}}, Series{Attempts, [2]string{"UNAVAILABLE", "retry"}}
	var counts Counts
	meters := &recorded.Meters{}
	if _, err := Register(meters, func(to *Collection) {
		counts.Report(to, map[Series]int64{retried: 2, {Of: Passed}: 3}, attribute.String(telemetry.AttrTarget, "t"))
	}); err != nil {
		t.Fatal(err)
	}
	want := map[string]float64{"attempts retry t UNAVAILABLE": 2, "passed_calls t": 3}
	if got := measured(t, meters); !maps.Equal(got, want) {
		t.Errorf("before anything is counted: %v, want %v", got, want)
	}
	counts.Add(0, won, Series{Of: Rescued})
	var all sync.WaitGroup
	for range 8 {
		all.Go(func() { counts.Add(1, retried, Series{Of: Rescued}) })
	}
	all.Wait()
	want = map[string]float64{"attempts retry t UNAVAILABLE": 10, "passed_calls t": 3, "hedges won t": 0, "rescued_calls t": 8}
	for range 2 { // a report changes nothing
		if got := measured(t, meters); !maps.Equal(got, want) {
			t.Errorf("measured %v, want %v", got, want)
		}
	}
}

func TestServersMethodsAreLimited(t *testing.T) {
	meters := &recorded.Meters{}
	s := NewServer(meters)
	s.NoRetry("/a.B/C")
	s.Retry("/a.B/\xff", "caller")
	s.Retry("/"+strings.Repeat("m", MaxName), "caller") // too long
	for i := range MaxServerMethods {
		s.Retry(fmt.Sprintf("/many.Service/M%d", i), "caller")
	}
	got := measured(t, meters)
	for name, want := range map[string]float64{"server.no_retry_responses a.B/C": 1, "server.retries caller a.B/\uFFFD": 1,
		"server.retries caller other": 3} {
		if got[name] != want {
			t.Errorf("%s = %v, want %v", name, got[name], want)
		}
	}
	if len(got) != MaxServerMethods+1 {
		t.Errorf("%d series, of them %v; want %d", len(got), slices.Sorted(maps.Keys(got))[:3], MaxServerMethods+1)
	}
}
