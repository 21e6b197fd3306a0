package reconcile

import (
	"context"
	"errors"
	"maps"
	"math"
	"runtime"
	"sync"
	"sync/atomic"
	"time"
	"weak"

	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"
)

const instrumentationName = "github.com/grpcretry/grpcretry/reconcile"

var rateWaitBounds = []float64{0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1, 5, 10, 30, 60, 300}

// A meter counts what a limiter does. OpenTelemetry reads the counts when it collects, as long as the
// limiter is reachable. The nil meter counts nothing.
type meter struct {
	rateWait metric.Float64Histogram
	name     metric.MeasurementOption

	inFlight atomic.Int64
	wrapped  atomic.Bool // there is a reconciler that counts inFlight
	brought  atomic.Int64
	refusals atomic.Int64

	mu      sync.Mutex
	retries map[string]int64 // guarded by mu; by reason
}

// A gauges value is the state of a limiter at one time.
type gauges struct {
	failing, waiting, depth, inFlight int64
	oldest, balance                   float64
	queue, work                       bool // depth and oldest, or inFlight, are known
}

type observables struct {
	retries, forwarded, refusals      metric.Int64Observable
	failing, waiting, depth, inFlight metric.Int64Observable
	oldest, balance                   metric.Float64Observable
}

// newMeter makes the instruments, or returns nil without [WithMeterProvider].
func newMeter[T comparable](l *RateLimiter[T]) *meter {
	if l.config.meters == nil {
		return nil
	}
	m := &meter{retries: map[string]int64{}, name: metric.WithAttributes(attribute.String(AttrName, l.name))}
	limiter := weak.Make(l)
	registration, err := m.register(l.config.meters.Meter(instrumentationName), func() (gauges, bool) {
		if l := limiter.Value(); l != nil {
			return l.gauges(m, time.Now()), true
		}
		return gauges{}, false
	})
	if err != nil {
		otel.Handle(err)
	}
	if registration != nil {
		runtime.AddCleanup(l, func(r metric.Registration) { _ = r.Unregister() }, registration)
	}
	return m
}

func (m *meter) register(from metric.Meter, state func() (gauges, bool)) (metric.Registration, error) {
	var errs []error
	counter := func(name, unit, description string) metric.Int64Observable {
		c, err := from.Int64ObservableCounter(name, metric.WithUnit(unit), metric.WithDescription(description))
		errs = append(errs, err)
		return c
	}
	gauge := func(name, unit, description string) metric.Int64Observable {
		g, err := from.Int64ObservableGauge(name, metric.WithUnit(unit), metric.WithDescription(description))
		errs = append(errs, err)
		return g
	}
	amount := func(name, unit, description string) metric.Float64Observable {
		g, err := from.Float64ObservableGauge(name, metric.WithUnit(unit), metric.WithDescription(description))
		errs = append(errs, err)
		return g
	}
	o := observables{
		retries:   counter(MetricRetries, "{retry}", "Retries that were decided on, by the reason for their time."),
		forwarded: counter(MetricForwarded, "{retry}", "Retries that were brought forward from the slow lane."),
		refusals:  counter(MetricBudgetRefusals, "{retry}", "Retries that the budget refused."),
		failing:   gauge(MetricFailingKeys, "{key}", "Keys that have failed since they last succeeded."),
		waiting:   gauge(MetricWaitingKeys, "{key}", "Failing keys that wait in the slow lane."),
		depth:     gauge(MetricQueueDepth, "{key}", "Keys in the queue that are ready for a worker."),
		inFlight:  gauge(MetricInFlight, "{key}", "Keys that are being worked on."),
		oldest:    amount(MetricQueueOldest, "s", "How long the oldest key in the queue has been ready."),
		balance:   amount(MetricBudgetBalance, "{retry}", "Retries that the budget would allow now."),
	}
	var err error
	m.rateWait, err = from.Float64Histogram(MetricRateWait, metric.WithUnit("s"),
		metric.WithDescription("Time spent waiting for the outbound rate."), metric.WithExplicitBucketBoundaries(rateWaitBounds...))
	errs = append(errs, err)
	registration, err := from.RegisterCallback(func(_ context.Context, to metric.Observer) error {
		m.observe(to, &o, state)
		return nil
	}, o.retries, o.forwarded, o.refusals, o.failing, o.waiting, o.depth, o.inFlight, o.oldest, o.balance)
	return registration, errors.Join(append(errs, err)...)
}

func (m *meter) observe(to metric.Observer, o *observables, state func() (gauges, bool)) {
	now, ok := state()
	if !ok {
		return
	}
	m.mu.Lock()
	retries := maps.Clone(m.retries)
	m.mu.Unlock()
	for reason, n := range retries {
		to.ObserveInt64(o.retries, n, m.name, metric.WithAttributes(attribute.String(AttrReason, reason)))
	}
	to.ObserveInt64(o.forwarded, m.brought.Load(), m.name)
	to.ObserveInt64(o.refusals, m.refusals.Load(), m.name)
	to.ObserveInt64(o.failing, now.failing, m.name)
	to.ObserveInt64(o.waiting, now.waiting, m.name)
	if now.queue {
		to.ObserveInt64(o.depth, now.depth, m.name)
		to.ObserveFloat64(o.oldest, now.oldest, m.name)
	}
	if now.work {
		to.ObserveInt64(o.inFlight, now.inFlight, m.name)
	}
	if !math.IsInf(now.balance, 1) {
		to.ObserveFloat64(o.balance, now.balance, m.name)
	}
}

func (l *RateLimiter[T]) gauges(m *meter, now time.Time) gauges {
	g := gauges{balance: l.budget().Balance(now), inFlight: m.inFlight.Load()}
	l.mu.Lock()
	defer l.mu.Unlock()
	g.failing = int64(len(l.keys))
	g.waiting = l.parked(now)
	g.queue = l.depth != nil
	g.work = g.queue || m.wrapped.Load()
	if g.queue {
		var oldest time.Duration
		g.depth, oldest = l.depth.look(now)
		g.oldest = oldest.Seconds()
	}
	return g
}

func (m *meter) failed(v verdict) {
	if m == nil {
		return
	}
	if v.reason == ReasonBudget {
		m.refusals.Add(1)
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.retries[v.reason]++
}

func (m *meter) forwarded() {
	if m != nil {
		m.brought.Add(1)
	}
}

// working adds n to the number of keys that are worked on.
func (m *meter) working(n int64) {
	if m != nil {
		m.inFlight.Add(n)
	}
}

func (m *meter) waitedForRate(ctx context.Context, d time.Duration) {
	if m != nil {
		m.rateWait.Record(ctx, d.Seconds(), m.name)
	}
}
