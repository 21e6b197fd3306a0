package grpcretry

import (
	"context"
	"errors"
	"maps"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"
	"google.golang.org/grpc/codes"

	"github.com/grpcretry/grpcretry/internal/striped"
	"github.com/grpcretry/grpcretry/telemetry"
)

// The instruments of gRFC A96 that [WithGRPCMetrics] records.
const (
	metricCallRetries    = "grpc.client.call.retries"
	metricCallHedges     = "grpc.client.call.hedges"
	metricCallRetryDelay = "grpc.client.call.retry_delay"
)

// other stands for the methods that no stub calls and, as method and target, for all pairs after
// maxMetricRows.
const other = "other"

// maxMetricRows limits the pairs of target and method, and so the memory: later pairs are counted as
// method "other" and target "other". Stubs have a limited number of methods, but a client that dials
// each address separately has an unlimited number of targets.
const maxMetricRows = 2000

// maxMetricName limits the names that are shown, in bytes. A function whose name or target is longer is
// counted with the pairs after maxMetricRows.
const maxMetricName = 512

var (
	waitBounds = []float64{0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60, 300}

	// The bounds that gRFC A96 recommends, the second by reference to A66.
	retriesBounds    = []float64{1, 2, 3, 4, 5}
	retryDelayBounds = []float64{0, 0.00001, 0.00005, 0.0001, 0.0003, 0.0006, 0.0008, 0.001, 0.002, 0.003, 0.004,
		0.005, 0.006, 0.008, 0.01, 0.013, 0.016, 0.02, 0.025, 0.03, 0.04, 0.05, 0.065, 0.08, 0.1, 0.13, 0.16,
		0.2, 0.25, 0.3, 0.4, 0.5, 0.65, 0.8, 1, 2, 5, 10, 20, 50, 100}
)

// metrics counts a Retrier's calls and their outcomes. The counters are our own, and OpenTelemetry
// reads them when it collects: recording with its instruments would cost a call that succeeds on its
// first attempt several times as much.
type metrics struct {
	settings *settings
	usage    *usage
	targets  *targets

	wait metric.Float64Histogram

	// The instruments of gRFC A96; nil unless WithGRPCMetrics is on.
	retries    metric.Int64Histogram
	hedges     metric.Int64Histogram
	retryDelay metric.Float64Histogram

	mu         sync.Mutex // held to add a row; the maps are replaced, never changed
	rows       atomic.Pointer[map[rowKey]*metricRow]
	overflow   *metricRow  // counts the pairs after maxMetricRows, and those with long names
	overflowed atomic.Bool // the overflow has counted something
	budgets    atomic.Pointer[map[budgetLabels]*budgetRow]
}

// A rowKey has a target either as it was dialed or in gRPC's canonical form. Both lead to the same
// row, which shows the canonical form.
type rowKey struct{ target, method string }

// A metricRow counts the calls of one method to one target.
type metricRow struct {
	target, method string

	firstTries striped.Counter // calls whose first attempt succeeded; they are counted only here
	passed     striped.Counter // calls that passed straight through

	mu       sync.Mutex // held to count, and to read the fields below
	attempts map[attemptKind]int64
	calls    map[string]int64 // by outcome
	rescued  int64
	wasted   int64

	hedgesWon, hedgesWasted int64

	waits [len(waitSourceNames)][]metric.RecordOption // by source; as slices, whose use allocates nothing
	a96   []metric.RecordOption
}

type attemptKind struct{ code, decision string }

type budgetLabels struct{ target, scope string }

// A budgetRow counts the refusals of a budget.
type budgetRow struct {
	refusals atomic.Int64
}

// newMetrics makes the instruments. It returns nil without WithMeterProvider. The provider holds the
// counters from then on, so that they do not end with the Retrier: a total that shrinks would be a reset to
// its readers, and what was counted last would be missing from the last flush.
func newMetrics(c *config, s *settings, u *usage, t *targets) (*metrics, error) {
	if !c.metrics {
		return nil, nil
	}
	mp := c.meterProvider
	if mp == nil {
		mp = otel.GetMeterProvider()
	}
	m := &metrics{settings: s, usage: u, targets: t, overflow: newMetricRow(rowKey{other, other})}
	m.rows.Store(&map[rowKey]*metricRow{})
	m.budgets.Store(&map[budgetLabels]*budgetRow{})
	if err := m.register(mp.Meter(instrumentationName), c.grpcMetrics); err != nil {
		return nil, err
	}
	return m, nil
}

func (m *metrics) register(from metric.Meter, a96 bool) error {
	var errs []error
	counter := func(name, unit, description string) metric.Int64Observable {
		c, err := from.Int64ObservableCounter(name, metric.WithUnit(unit), metric.WithDescription(description))
		errs = append(errs, err)
		return c
	}
	seconds := func(name, description string, bounds []float64) metric.Float64Histogram {
		h, err := from.Float64Histogram(name, metric.WithUnit("s"), metric.WithDescription(description),
			metric.WithExplicitBucketBoundaries(bounds...))
		errs = append(errs, err)
		return h
	}
	o := observables{
		attempts: counter(telemetry.MetricAttempts, "{attempt}", "Attempts that ended, by status code and by what was decided."),
		calls:    counter(telemetry.MetricCalls, "{call}", "Calls that ended, by outcome."),
		rescued:  counter(telemetry.MetricRescuedCalls, "{call}", "Calls that succeeded after a retry."),
		wasted:   counter(telemetry.MetricWastedAttempts, "{attempt}", "Retries that failed."),
		hedges:   counter(telemetry.MetricHedges, "{hedge}", "Hedges that ended, by whether they won their call."),
		passed:   counter(telemetry.MetricPassedCalls, "{call}", "Calls that passed straight through to gRPC, without retries."),
		refusals: counter(telemetry.MetricBudgetRefusals, "{retry}", "Retries and hedges that the budget refused."),
	}
	gauge := func(name, unit, description string) metric.Int64Observable {
		g, err := from.Int64ObservableUpDownCounter(name, metric.WithUnit(unit), metric.WithDescription(description))
		errs = append(errs, err)
		return g
	}
	o.waiting = gauge(telemetry.MetricWaitingCalls, "{call}", "Calls that wait before their next attempt.")
	o.streams = gauge(telemetry.MetricOpenStreams, "{stream}", "Streams that have not ended.")
	o.replay = gauge(telemetry.MetricReplayMemory, "By", "Memory that is kept to replay streams.")
	o.notKept = counter(telemetry.MetricReplayRefusals, "{refusal}", "Streams that committed because the replay memory was full.")
	o.targetWaiting = gauge(telemetry.MetricTargetWaiting, "{call}", "Calls that wait before their next attempt, by target.")
	o.targetGaveUp = counter(telemetry.MetricTargetGaveUp, "{call}", "Calls that ended because the target had been failing for too long.")
	var err error
	o.targetFailing, err = from.Float64ObservableGauge(telemetry.MetricTargetFailing, metric.WithUnit("s"),
		metric.WithDescription("How long the target has been failing; 0 if its latest call was answered."))
	errs = append(errs, err)
	o.balance, err = from.Float64ObservableGauge(telemetry.MetricBudgetBalance, metric.WithUnit("{retry}"),
		metric.WithDescription("Retries that the budget would allow now."))
	errs = append(errs, err)
	m.wait = seconds(telemetry.MetricWaitDuration, "Waits before the attempts after the first, when they are sent.", waitBounds)
	if a96 {
		number := func(name, unit, description string) metric.Int64Histogram {
			h, err := from.Int64Histogram(name, metric.WithUnit(unit), metric.WithDescription(description),
				metric.WithExplicitBucketBoundaries(retriesBounds...))
			errs = append(errs, err)
			return h
		}
		m.retryDelay = seconds(metricCallRetryDelay,
			"Total time of delay while there is no active attempt during the client call.", retryDelayBounds)
		m.retries = number(metricCallRetries, "{retry}",
			"Number of retries during the client call. If there were no retries, 0 is not reported.")
		m.hedges = number(metricCallHedges, "{hedge}",
			"Number of hedges during the client call. If there were no hedges, 0 is not reported.")
	}
	_, err = from.RegisterCallback(func(_ context.Context, to metric.Observer) error {
		m.observe(to, &o)
		return nil
	}, o.attempts, o.calls, o.rescued, o.wasted, o.hedges, o.passed, o.refusals, o.balance,
		o.waiting, o.streams, o.replay, o.notKept, o.targetWaiting, o.targetGaveUp, o.targetFailing)
	return errors.Join(append(errs, err)...)
}

// observables are the instruments that OpenTelemetry reads when it collects.
type observables struct {
	attempts, calls, rescued, wasted, hedges, passed, refusals metric.Int64Observable
	balance                                                    metric.Float64Observable
	waiting, streams, replay, notKept                          metric.Int64Observable // of the whole Retrier
	targetWaiting, targetGaveUp                                metric.Int64Observable
	targetFailing                                              metric.Float64Observable
}

// observe reports every count.
func (m *metrics) observe(to metric.Observer, o *observables) {
	seen := map[*metricRow]bool{} // a row may have two keys
	rows := *m.rows.Load()
	for _, row := range rows {
		if !seen[row] {
			seen[row] = true
			row.observe(to, o)
		}
	}
	if m.overflowed.Load() {
		m.overflow.observe(to, o)
	}
	m.usage.observe(to, o)
	now := time.Now()
	m.targets.each(func(name string, t *target) {
		attrs := metric.WithAttributes(attribute.String(telemetry.AttrTarget, printable(name)))
		state := t.state(now)
		to.ObserveInt64(o.targetWaiting, int64(state.Waiting), attrs)
		to.ObserveInt64(o.targetGaveUp, state.GaveUp, attrs)
		to.ObserveFloat64(o.targetFailing, state.Failing.Seconds(), attrs)
	})
	for key, row := range *m.budgets.Load() {
		attrs := metric.WithAttributes(attribute.String(telemetry.AttrTarget, printable(key.target)),
			attribute.String(telemetry.AttrBudget, key.scope))
		to.ObserveInt64(o.refusals, row.refusals.Load(), attrs)
		budget := m.budgetOf(key)
		if budget == nil {
			continue
		}
		if balance, limited := balanceOf(budget, now); limited {
			to.ObserveFloat64(o.balance, balance, attrs)
		}
	}
}

func (u *usage) observe(to metric.Observer, o *observables) {
	to.ObserveInt64(o.waiting, u.waiting.Load())
	to.ObserveInt64(o.streams, u.streams.Load())
	to.ObserveInt64(o.replay, u.replay.inUse.Load())
	to.ObserveInt64(o.notKept, u.replay.committed.Load())
}

func (row *metricRow) observe(to metric.Observer, o *observables) {
	attrs := func(more ...attribute.KeyValue) metric.MeasurementOption {
		return metric.WithAttributes(append(row.attributes(), more...)...)
	}
	row.mu.Lock()
	attempts, calls := maps.Clone(row.attempts), maps.Clone(row.calls)
	rescued, wasted, hedgesWon, hedgesWasted := row.rescued, row.wasted, row.hedgesWon, row.hedgesWasted
	row.mu.Unlock()

	firstTries := row.firstTries.Sum()
	calls[outcomeFirstTry] += firstTries
	attempts[attemptKind{codeName(codes.OK), decisionSuccess}] += firstTries
	for kind, n := range attempts {
		to.ObserveInt64(o.attempts, n, attrs(
			attribute.String(telemetry.AttrStatusCode, kind.code), attribute.String(telemetry.AttrDecision, kind.decision)))
	}
	for outcome, n := range calls {
		to.ObserveInt64(o.calls, n, attrs(attribute.String(telemetry.AttrOutcome, outcome)))
	}
	to.ObserveInt64(o.rescued, rescued, attrs())
	to.ObserveInt64(o.wasted, wasted, attrs())
	if passed := row.passed.Sum(); passed > 0 {
		to.ObserveInt64(o.passed, passed, attrs())
	}
	if hedgesWon+hedgesWasted > 0 {
		to.ObserveInt64(o.hedges, hedgesWon, attrs(attribute.String(telemetry.AttrHedgeResult, "won")))
		to.ObserveInt64(o.hedges, hedgesWasted, attrs(attribute.String(telemetry.AttrHedgeResult, "wasted")))
	}
}

func (row *metricRow) attributes() []attribute.KeyValue {
	return []attribute.KeyValue{attribute.String(attrMethod, row.method), attribute.String(telemetry.AttrTarget, printable(row.target))}
}

// callPassed counts a call that passed straight through.
func (m *metrics) callPassed(f *facts) { m.row(f).passed.Add() }

// callSucceeded counts an attempt that succeeded, and with it the call.
func (m *metrics) callSucceeded(f *facts, h *history, a *attempt) {
	row := m.row(f)
	if a.number == 1 && h.isEmpty() {
		row.firstTries.Add()
		m.recordA96(f, row, 0, 0)
		return
	}
	row.mu.Lock()
	row.attempts[attemptKind{codeName(codes.OK), decisionSuccess}]++
	row.calls[outcomeOf(int(a.number), a.hedge)]++
	switch {
	case a.hedge:
		row.hedgesWon++
	case a.number > 1:
		row.rescued++
	}
	row.mu.Unlock()
	m.recordA96(f, row, h.made(int(a.number))-1, h.idle)
}

// attemptFailed counts an attempt that failed, by status code and decision.
func (m *metrics) attemptFailed(f *facts, a *Attempt, v verdict) {
	row := m.row(f)
	row.mu.Lock()
	row.attempts[attemptKind{knownCodeName(a.Code()), decisionName(v)}]++
	switch {
	case a.Unsent: // such an attempt cost no token, and no server anything
	case a.Hedge:
		row.hedgesWasted++
	case a.Number > 1:
		row.wasted++
	}
	row.mu.Unlock()
	m.countRefusal(f.policy.budgetScope, row, v)
}

// attemptLost counts an attempt that was cancelled because another was decisive.
func (m *metrics) attemptLost(f *facts, a *Attempt) {
	row := m.row(f)
	row.mu.Lock()
	defer row.mu.Unlock()
	row.attempts[attemptKind{codeName(codes.Canceled), decisionLost}]++
	if a.Hedge {
		row.hedgesWasted++
	}
}

// hedgesBudget stands for the budgets of hedges in telemetry.AttrBudget.
const hedgesBudget = "hedges"

// hedgeJudged counts a hedge that a budget refused: that of hedges, or a throttle.
func (m *metrics) hedgeJudged(f *facts, v verdict) {
	scope := hedgesBudget
	if isThrottled(f.budget) {
		scope = f.policy.budgetScope
	}
	m.countRefusal(scope, m.row(f), v)
}

// retrySent records the wait before an attempt after the first.
func (m *metrics) retrySent(f *facts, a *attempt) {
	m.wait.Record(f.ctx, a.wait.Seconds(), m.row(f).waits[a.source]...)
}

// budgetRefused counts a retry that the budget refused when its wait was over.
func (m *metrics) budgetRefused(f *facts) {
	m.countRefusal(f.policy.budgetScope, m.row(f), verdict{Reason: ErrBudgetExhausted})
}

func (m *metrics) countRefusal(scope string, row *metricRow, v verdict) {
	if v.refusedByBudget() {
		m.budgetRow(budgetLabels{row.target, scope}).refusals.Add(1)
	}
}

// callFailed counts a call that failed.
func (m *metrics) callFailed(f *facts, h *history, end *callFailure) {
	row := m.row(f)
	row.mu.Lock()
	row.calls[ReasonName(end.reason)]++
	row.mu.Unlock()
	idle := end.when.Sub(h.lastEnd(&end.last)) // nonzero if the call ended in a wait
	m.recordA96(f, row, h.made(end.last.Number)-1, h.idle+idle)
}

// recordA96 records a call's end as gRFC A96 defines: the delay of every call, and the number of
// further attempts if there were any.
func (m *metrics) recordA96(f *facts, row *metricRow, more int, idle time.Duration) {
	if m.retryDelay == nil || f.functionTarget != "" { // those metrics are about gRPC only
		return
	}
	m.retryDelay.Record(f.ctx, idle.Seconds(), row.a96...)
	switch {
	case more == 0:
	case f.mode == modeHedged:
		m.hedges.Record(f.ctx, int64(more), row.a96...)
	default:
		m.retries.Record(f.ctx, int64(more), row.a96...)
	}
}

// row returns the row of a call. It is on the path of every call.
func (m *metrics) row(f *facts) *metricRow {
	key := rowKey{f.dialed(), other}
	if f.static {
		key.method = f.method
	}
	rows := *m.rows.Load()
	if row := rows[key]; row != nil {
		return row
	}
	if len(rows) >= maxMetricRows || max(len(key.method), len(key.target)) > maxMetricName {
		m.overflowed.Store(true)
		return m.overflow
	}
	return m.addRow(key, f.target())
}

func (m *metrics) addRow(key rowKey, canonical string) *metricRow {
	m.mu.Lock()
	defer m.mu.Unlock()
	rows := maps.Clone(*m.rows.Load())
	if row := rows[key]; row != nil {
		return row
	}
	shown := rowKey{canonical, key.method}
	if rows[shown] == nil {
		rows[shown] = newMetricRow(shown)
		m.addBudgets(map[string]bool{canonical: true})
	}
	rows[key] = rows[shown]
	m.rows.Store(&rows)
	return rows[key]
}

func newMetricRow(key rowKey) *metricRow {
	row := &metricRow{
		target:   key.target,
		method:   printable(strings.TrimPrefix(key.method, "/")),
		attempts: map[attemptKind]int64{},
		calls:    map[string]int64{},
	}
	for source := range row.waits {
		row.waits[source] = recorded(append(row.attributes(), attribute.String(telemetry.AttrWaitSource, WaitSource(source).String()))...)
	}
	row.a96 = recorded(attribute.String("grpc.method", row.method), attribute.String("grpc.target", printable(row.target)))
	return row
}

func recorded(attrs ...attribute.KeyValue) []metric.RecordOption {
	return []metric.RecordOption{metric.WithAttributeSet(attribute.NewSet(attrs...))}
}

// addBudgets adds the budgets that calls to targets, in canonical form, can spend from. It needs mu.
func (m *metrics) addBudgets(targets map[string]bool) {
	var missing []budgetLabels
	known := *m.budgets.Load()
	for scope, b := range m.settings.current().budgets {
		for target := range targets {
			budgetNamed(b, target) // makes it, so that a balance is shown before the first call fails
			if key := (budgetLabels{target, scope}); known[key] == nil {
				missing = append(missing, key)
			}
		}
	}
	m.addBudgetRows(missing)
}

// addNewBudgets adds the budgets that are new after an Update.
func (m *metrics) addNewBudgets() {
	m.mu.Lock()
	defer m.mu.Unlock()
	targets := map[string]bool{}
	for _, row := range *m.rows.Load() {
		targets[row.target] = true
	}
	m.addBudgets(targets)
}

// budgetOf returns the budget with these labels; nil if there is none now, because a perTarget has
// forgotten the target or an Update has taken the scope's budget away, or if each call may have
// its own.
func (m *metrics) budgetOf(key budgetLabels) Budget {
	b := m.settings.current().budgets[key.scope]
	if each, ok := b.(*perTarget); ok {
		b, _ = each.known(key.target)
	}
	return b
}

func (m *metrics) budgetRow(key budgetLabels) *budgetRow {
	if row := (*m.budgets.Load())[key]; row != nil {
		return row
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if (*m.budgets.Load())[key] == nil {
		m.addBudgetRows([]budgetLabels{key})
	}
	return (*m.budgets.Load())[key]
}

// addBudgetRows adds rows that are missing. All are added in one go, because each change copies the
// map. It needs mu.
func (m *metrics) addBudgetRows(missing []budgetLabels) {
	if len(missing) == 0 {
		return
	}
	rows := maps.Clone(*m.budgets.Load())
	for _, key := range missing {
		rows[key] = &budgetRow{}
	}
	m.budgets.Store(&rows)
}
