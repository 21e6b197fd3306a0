// Package recorded has OpenTelemetry providers for tests. They keep measurements and spans in memory, as
// OpenTelemetry's SDK does, which the tests do without: a module requires what its tests import, and the SDK
// would be listed in the go.mod of every user. What the SDK itself makes of the library is tested in
// package github.com/grpcretry/grpcretry/e2e/telemetry.
package recorded

import (
	"cmp"
	"context"
	"maps"
	"slices"
	"sync"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"
	"go.opentelemetry.io/otel/metric/noop"
)

// Meters is a provider that keeps what its instruments measure. It has the kinds of instruments that the
// library uses; others measure nothing.
type Meters struct {
	noop.MeterProvider
	mu        sync.Mutex
	metrics   map[string]*instrument // by name
	callbacks []metric.Callback
}

// A Metric is an instrument with all its series.
type Metric struct {
	Name, Unit, Description string
	Kind                    string    // counter, up-down counter, gauge or histogram
	Bounds                  []float64 // of a histogram
	Series                  []Series
}

// A Series is what an instrument measured with one set of attributes. A histogram's value is the sum.
type Series struct {
	Attributes attribute.Set
	Value      float64
	Count      int
}

// Collect runs the callbacks and returns all metrics that have a series, sorted by name.
func (m *Meters) Collect(ctx context.Context) ([]Metric, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, one := range m.metrics {
		if one.observable {
			clear(one.series)
		}
	}
	for _, callback := range m.callbacks {
		if err := callback(ctx, observer{}); err != nil {
			return nil, err
		}
	}
	var all []Metric
	for _, one := range m.metrics {
		if found, ok := one.read(); ok {
			all = append(all, found)
		}
	}
	slices.SortFunc(all, func(a, b Metric) int { return cmp.Compare(a.Name, b.Name) })
	return all, nil
}

// Meter returns a meter, the same for every name.
func (m *Meters) Meter(string, ...metric.MeterOption) metric.Meter { return meter{of: m} }

type meter struct {
	noop.Meter
	of *Meters
}

// An instrument is what all instruments of one name share.
type instrument struct {
	about      Metric
	observable bool

	mu     sync.Mutex
	series map[attribute.Distinct]*Series // guarded by mu
}

func (m meter) instrument(kind string, observable bool, about Metric) *instrument {
	m.of.mu.Lock()
	defer m.of.mu.Unlock()
	if m.of.metrics == nil {
		m.of.metrics = map[string]*instrument{}
	}
	one := m.of.metrics[about.Name]
	if one == nil {
		about.Kind = kind
		one = &instrument{about: about, observable: observable, series: map[attribute.Distinct]*Series{}}
		m.of.metrics[about.Name] = one
	}
	return one
}

// measure adds to a series, or sets it.
func (i *instrument) measure(x float64, attrs attribute.Set) {
	i.mu.Lock()
	defer i.mu.Unlock()
	s := i.series[attrs.Equivalent()]
	if s == nil {
		s = &Series{Attributes: attrs}
		i.series[attrs.Equivalent()] = s
	}
	s.Count++
	if i.about.Kind == "gauge" {
		s.Value = x
	} else {
		s.Value += x
	}
}

func (i *instrument) read() (Metric, bool) {
	i.mu.Lock()
	defer i.mu.Unlock()
	found := i.about
	for s := range maps.Values(i.series) {
		found.Series = append(found.Series, *s)
	}
	return found, len(found.Series) > 0
}

// RegisterCallback makes Collect run the callback.
func (m meter) RegisterCallback(f metric.Callback, _ ...metric.Observable) (metric.Registration, error) {
	m.of.mu.Lock()
	defer m.of.mu.Unlock()
	m.of.callbacks = append(m.of.callbacks, f)
	return noop.Registration{}, nil
}

type observer struct{ noop.Observer }

func (observer) ObserveInt64(of metric.Int64Observable, n int64, opts ...metric.ObserveOption) {
	switch of := of.(type) {
	case observableCounter:
		of.measure(float64(n), metric.NewObserveConfig(opts).Attributes())
	case observableUpDownCounter:
		of.measure(float64(n), metric.NewObserveConfig(opts).Attributes())
	}
}

func (observer) ObserveFloat64(of metric.Float64Observable, x float64, opts ...metric.ObserveOption) {
	if of, ok := of.(observableGauge); ok {
		of.measure(x, metric.NewObserveConfig(opts).Attributes())
	}
}

type (
	counter struct {
		noop.Int64Counter
		*instrument
	}
	histogram struct {
		noop.Float64Histogram
		*instrument
	}
	observableCounter struct {
		noop.Int64ObservableCounter
		*instrument
	}
	observableUpDownCounter struct {
		noop.Int64ObservableUpDownCounter
		*instrument
	}
	observableGauge struct {
		noop.Float64ObservableGauge
		*instrument
	}
)

func (c counter) Add(_ context.Context, n int64, opts ...metric.AddOption) {
	c.measure(float64(n), metric.NewAddConfig(opts).Attributes())
}

func (h histogram) Record(_ context.Context, x float64, opts ...metric.RecordOption) {
	h.measure(x, metric.NewRecordConfig(opts).Attributes())
}

func (m meter) Int64Counter(name string, opts ...metric.Int64CounterOption) (metric.Int64Counter, error) {
	c := metric.NewInt64CounterConfig(opts...)
	return counter{instrument: m.instrument("counter", false, Metric{Name: name, Unit: c.Unit(), Description: c.Description()})}, nil
}

func (m meter) Float64Histogram(name string, opts ...metric.Float64HistogramOption) (metric.Float64Histogram, error) {
	c := metric.NewFloat64HistogramConfig(opts...)
	return histogram{instrument: m.instrument("histogram", false,
		Metric{Name: name, Unit: c.Unit(), Description: c.Description(), Bounds: c.ExplicitBucketBoundaries()})}, nil
}

func (m meter) Int64ObservableCounter(name string, opts ...metric.Int64ObservableCounterOption) (metric.Int64ObservableCounter, error) {
	c := metric.NewInt64ObservableCounterConfig(opts...)
	return observableCounter{instrument: m.instrument("counter", true,
		Metric{Name: name, Unit: c.Unit(), Description: c.Description()})}, nil
}

func (m meter) Int64ObservableUpDownCounter(name string, opts ...metric.Int64ObservableUpDownCounterOption) (
	metric.Int64ObservableUpDownCounter, error) {
	c := metric.NewInt64ObservableUpDownCounterConfig(opts...)
	return observableUpDownCounter{instrument: m.instrument("up-down counter", true,
		Metric{Name: name, Unit: c.Unit(), Description: c.Description()})}, nil
}

func (m meter) Float64ObservableGauge(name string, opts ...metric.Float64ObservableGaugeOption) (metric.Float64ObservableGauge, error) {
	c := metric.NewFloat64ObservableGaugeConfig(opts...)
	return observableGauge{instrument: m.instrument("gauge", true,
		Metric{Name: name, Unit: c.Unit(), Description: c.Description()})}, nil
}
