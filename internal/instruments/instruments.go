// Package instruments has the metrics of this library, as OpenTelemetry reads them. It knows nothing of calls.
package instruments

import (
	"context"
	"errors"
	"maps"
	"strings"
	"sync"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"

	"github.com/grpcretry/grpcretry/internal/words"
	"github.com/grpcretry/grpcretry/telemetry"
)

// AttrMethod is the attribute that has a method.
const AttrMethod = "rpc.method"

// Scope is the name under which instruments and spans are made.
const Scope = "github.com/grpcretry/grpcretry"

// Other stands for methods and targets that have no series of their own.
const Other = "other"

// MaxName limits the names that are shown, in bytes. What has a longer one is counted as [Other].
const MaxName = 512

// An Instrument is one that OpenTelemetry reads when it collects.
type Instrument int

// The instruments. Those from Waiting on are gauges, whose values may go down, and those from Failing on
// have values that are not whole numbers.
const (
	Attempts Instrument = iota
	Calls
	Rescued
	Wasted
	Hedges
	Passed
	Refusals
	NotKept
	Waiting
	Streams
	ReplayMemory
	TargetWaiting
	Failing
	Balance
)

var table = [...]struct {
	name, unit, description string
	labels                  []string // of a Series, beside those of its owner
}{
	Attempts: {telemetry.MetricAttempts, "{attempt}", "Attempts that ended, by status code and by what was decided.",
		[]string{telemetry.AttrStatusCode, telemetry.AttrDecision}},
	Calls:   {telemetry.MetricCalls, "{call}", "Calls that ended, by outcome.", []string{telemetry.AttrOutcome}},
	Rescued: {telemetry.MetricRescuedCalls, "{call}", "Calls that succeeded after a retry.", nil},
	Wasted:  {telemetry.MetricWastedAttempts, "{attempt}", "Retries that failed.", nil},
	Hedges: {telemetry.MetricHedges, "{hedge}", "Hedges that ended, by whether they won their call.",
		[]string{telemetry.AttrHedgeResult}},
	Passed:        {telemetry.MetricPassedCalls, "{call}", "Calls that passed straight through to gRPC, without retries.", nil},
	Refusals:      {telemetry.MetricBudgetRefusals, "{retry}", "Retries and hedges that the budget refused.", nil},
	NotKept:       {telemetry.MetricReplayRefusals, "{refusal}", "Streams that committed because the replay memory was full.", nil},
	Waiting:       {telemetry.MetricWaitingCalls, "{call}", "Calls that wait before their next attempt.", nil},
	Streams:       {telemetry.MetricOpenStreams, "{stream}", "Streams that have not ended.", nil},
	ReplayMemory:  {telemetry.MetricReplayMemory, "By", "Memory that is kept to replay streams.", nil},
	TargetWaiting: {telemetry.MetricTargetWaiting, "{call}", "Calls that wait before their next attempt, by target.", nil},
	Failing:       {telemetry.MetricTargetFailing, "s", "How long the target has been failing; 0 if its latest call was answered.", nil},
	Balance:       {telemetry.MetricBudgetBalance, "{retry}", "Retries that the budget would allow now.", nil},
}

// Register makes the instruments, with collect as the function that OpenTelemetry calls to read them, and a
// histogram of waits in seconds.
func Register(mp metric.MeterProvider, collect func(*Collection)) (wait metric.Float64Histogram, _ error) {
	from := mp.Meter(Scope)
	var errs []error
	o := make([]metric.Observable, len(table))
	for i, about := range table {
		unit, description := metric.WithUnit(about.unit), metric.WithDescription(about.description)
		var err error
		switch {
		case Instrument(i) < Waiting:
			o[i], err = from.Int64ObservableCounter(about.name, unit, description)
		case Instrument(i) < Failing:
			o[i], err = from.Int64ObservableUpDownCounter(about.name, unit, description)
		default:
			o[i], err = from.Float64ObservableGauge(about.name, unit, description)
		}
		errs = append(errs, err)
	}
	wait, err := from.Float64Histogram(telemetry.MetricWaitDuration, metric.WithUnit("s"),
		metric.WithDescription("Waits before the attempts after the first, when they are sent."),
		metric.WithExplicitBucketBoundaries(0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60, 300))
	errs = append(errs, err)
	_, err = from.RegisterCallback(func(_ context.Context, to metric.Observer) error {
		collect(&Collection{to, o})
		return nil
	}, o...)
	return wait, errors.Join(append(errs, err)...)
}

// A Collection receives the counts when OpenTelemetry collects them.
type Collection struct {
	to          metric.Observer
	instruments []metric.Observable
}

// Count reports the value of an instrument.
func (c *Collection) Count(i Instrument, n int64, attrs ...attribute.KeyValue) {
	c.to.ObserveInt64(c.instruments[i].(metric.Int64Observable), n, metric.WithAttributes(attrs...))
}

// Measure is Count for an instrument whose values are not whole numbers.
func (c *Collection) Measure(i Instrument, x float64, attrs ...attribute.KeyValue) {
	c.to.ObserveFloat64(c.instruments[i].(metric.Float64Observable), x, metric.WithAttributes(attrs...))
}

// A Series is one of several counters that have an owner, with the values of its instrument's labels.
type Series struct {
	Of     Instrument
	Labels [2]string
}

// Counts are the series of one owner. They are safe for concurrent use.
type Counts struct {
	mu  sync.Mutex // held to count, and to read
	all map[Series]int64
}

// Add adds n to each of some series. A series is shown when something was added to it, be it 0.
func (c *Counts) Add(n int64, all ...Series) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.all == nil {
		c.all = map[Series]int64{}
	}
	for _, s := range all {
		c.all[s] += n
	}
}

// Report reports the series together with more of them, which may be the same. attrs are those of the owner.
func (c *Counts) Report(to *Collection, more map[Series]int64, attrs ...attribute.KeyValue) {
	counts := maps.Clone(more)
	c.mu.Lock()
	for s, n := range c.all {
		counts[s] += n
	}
	c.mu.Unlock()
	for s, n := range counts {
		own := attrs[:len(attrs):len(attrs)]
		for i, label := range table[s.Of].labels {
			own = append(own, attribute.String(label, s.Labels[i]))
		}
		to.Count(s.Of, n, own...)
	}
}

// MethodName returns "/pkg.Service/Method" as telemetry shows it.
func MethodName(method string) string { return words.Printable(strings.TrimPrefix(method, "/")) }
