package grpcretry

import (
	"context"
	"errors"
	"maps"
	"math"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"
	"google.golang.org/grpc/codes"

	"github.com/grpcretry/grpcretry/internal/bounded"
	"github.com/grpcretry/grpcretry/internal/reasons"
	"github.com/grpcretry/grpcretry/internal/striped"
	"github.com/grpcretry/grpcretry/internal/words"
	"github.com/grpcretry/grpcretry/telemetry"
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

// metrics counts a Retrier's calls and their outcomes. The counters are our own, and OpenTelemetry
// reads them when it collects: recording with its instruments would cost a call that succeeds on its
// first attempt several times as much.
type metrics struct {
	settings *settings
	usage    *usage
	targets  *targets

	wait       metric.Float64Histogram
	rows       bounded.Map[rowKey, *metricRow] // by the target in canonical form
	dialed     bounded.Map[rowKey, *metricRow] // the same rows by the target as dialed
	overflow   *metricRow                      // counts the pairs after maxMetricRows, and those with long names
	overflowed atomic.Bool                     // the overflow has counted something
	refusals   bounded.Map[budgetLabels, *atomic.Int64]
}

// A rowKey has a target either as it was dialed or in gRPC's canonical form, which the row shows.
type rowKey struct{ target, method string }

// A metricRow counts the calls of one method to one target.
type metricRow struct {
	target, method string

	firstTries striped.Counter // calls whose first attempt succeeded; they are counted only here
	passed     striped.Counter // calls that passed straight through

	mu     sync.Mutex // held to count, and to read
	counts map[series]int64
}

// A series is one of a row's counters, with the values of its instrument's labels.
type series struct {
	of     instrument
	labels [2]string
}

type budgetLabels struct{ target, scope string }

// An instrument is one that OpenTelemetry reads when it collects.
type instrument int

const (
	countAttempts instrument = iota
	countCalls
	countRescued
	countWasted
	countHedges
	countPassed
	countRefusals
	countNotKept
	countGaveUp
	nowWaiting
	nowStreams
	nowReplayMemory
	nowTargetWaiting
	floatTargetFailing
	floatBalance
)

// firstFloat is the first instrument whose values are not whole numbers, and firstGauge the first whose
// values may go down.
const (
	firstGauge = nowWaiting
	firstFloat = floatTargetFailing
)

var instruments = [...]struct {
	name, unit, description string
	labels                  []string // of a row's counters, beside the method and the target
}{
	countAttempts: {telemetry.MetricAttempts, "{attempt}", "Attempts that ended, by status code and by what was decided.",
		[]string{telemetry.AttrStatusCode, telemetry.AttrDecision}},
	countCalls:   {telemetry.MetricCalls, "{call}", "Calls that ended, by outcome.", []string{telemetry.AttrOutcome}},
	countRescued: {telemetry.MetricRescuedCalls, "{call}", "Calls that succeeded after a retry.", nil},
	countWasted:  {telemetry.MetricWastedAttempts, "{attempt}", "Retries that failed.", nil},
	countHedges: {telemetry.MetricHedges, "{hedge}", "Hedges that ended, by whether they won their call.",
		[]string{telemetry.AttrHedgeResult}},
	countPassed:        {telemetry.MetricPassedCalls, "{call}", "Calls that passed straight through to gRPC, without retries.", nil},
	countRefusals:      {telemetry.MetricBudgetRefusals, "{retry}", "Retries and hedges that the budget refused.", nil},
	countNotKept:       {telemetry.MetricReplayRefusals, "{refusal}", "Streams that committed because the replay memory was full.", nil},
	countGaveUp:        {telemetry.MetricTargetGaveUp, "{call}", "Calls that ended because the target had been failing for too long.", nil},
	nowWaiting:         {telemetry.MetricWaitingCalls, "{call}", "Calls that wait before their next attempt.", nil},
	nowStreams:         {telemetry.MetricOpenStreams, "{stream}", "Streams that have not ended.", nil},
	nowReplayMemory:    {telemetry.MetricReplayMemory, "By", "Memory that is kept to replay streams.", nil},
	nowTargetWaiting:   {telemetry.MetricTargetWaiting, "{call}", "Calls that wait before their next attempt, by target.", nil},
	floatTargetFailing: {telemetry.MetricTargetFailing, "s", "How long the target has been failing; 0 if its latest call was answered.", nil},
	floatBalance:       {telemetry.MetricBudgetBalance, "{retry}", "Retries that the budget would allow now.", nil},
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
	if err := m.register(mp.Meter(instrumentationName)); err != nil {
		return nil, err
	}
	return m, nil
}

func (m *metrics) register(from metric.Meter) error {
	var errs []error
	o := make([]metric.Observable, len(instruments))
	for i, about := range instruments {
		unit, description := metric.WithUnit(about.unit), metric.WithDescription(about.description)
		var err error
		switch {
		case instrument(i) < firstGauge:
			o[i], err = from.Int64ObservableCounter(about.name, unit, description)
		case instrument(i) < firstFloat:
			o[i], err = from.Int64ObservableUpDownCounter(about.name, unit, description)
		default:
			o[i], err = from.Float64ObservableGauge(about.name, unit, description)
		}
		errs = append(errs, err)
	}
	var err error
	m.wait, err = from.Float64Histogram(telemetry.MetricWaitDuration, metric.WithUnit("s"),
		metric.WithDescription("Waits before the attempts after the first, when they are sent."),
		metric.WithExplicitBucketBoundaries(0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60, 300))
	errs = append(errs, err)
	_, err = from.RegisterCallback(func(_ context.Context, to metric.Observer) error {
		m.observe(&collection{to, o})
		return nil
	}, o...)
	return errors.Join(append(errs, err)...)
}

// A collection receives the counts when OpenTelemetry collects them.
type collection struct {
	metric.Observer
	instruments []metric.Observable
}

// count reports the value of an instrument.
func (c *collection) count(i instrument, n int64, attrs ...attribute.KeyValue) {
	c.ObserveInt64(c.instruments[i].(metric.Int64Observable), n, metric.WithAttributes(attrs...))
}

// measure is count for an instrument whose values are not whole numbers.
func (c *collection) measure(i instrument, x float64, attrs ...attribute.KeyValue) {
	c.ObserveFloat64(c.instruments[i].(metric.Float64Observable), x, metric.WithAttributes(attrs...))
}

// observe reports every count.
func (m *metrics) observe(to *collection) {
	seen := map[*metricRow]bool{} // a row may have two keys
	called := map[string]bool{}   // targets
	for _, row := range m.rows.Current() {
		if !seen[row] {
			seen[row], called[row.target] = true, true
			row.observe(to)
		}
	}
	if m.overflowed.Load() {
		m.overflow.observe(to)
	}
	u := m.usage.now()
	to.count(nowWaiting, int64(u.WaitingCalls))
	to.count(nowStreams, int64(u.OpenStreams))
	to.count(nowReplayMemory, u.ReplayMemory)
	to.count(countNotKept, u.CommittedStreams)
	now := time.Now()
	for _, t := range m.targets.states(now) {
		attr := attribute.String(telemetry.AttrTarget, words.Printable(t.Name))
		to.count(nowTargetWaiting, int64(t.Waiting), attr)
		to.count(countGaveUp, t.GaveUp, attr)
		to.measure(floatTargetFailing, t.Failing.Seconds(), attr)
	}
	m.observeBudgets(to, called, now)
}

// observeBudgets reports the level and the refusals of each budget that calls to the targets may spend
// from, and the refusals of those that an Update has taken away, or that single calls have.
func (m *metrics) observeBudgets(to *collection, targets map[string]bool, now time.Time) {
	refusals := map[budgetLabels]int64{}
	budgets := m.settings.current().budgets
	for scope := range budgets {
		for target := range targets {
			refusals[budgetLabels{target, scope}] = 0
		}
	}
	for labels, n := range m.refusals.Current() {
		refusals[labels] = n.Load()
	}
	for labels, n := range refusals {
		attrs := []attribute.KeyValue{attribute.String(telemetry.AttrTarget, words.Printable(labels.target)),
			attribute.String(telemetry.AttrBudget, labels.scope)}
		to.count(countRefusals, n, attrs...)
		if labels.target == other { // there is no such budget
			continue
		}
		if b := shownBudget(budgets[labels.scope], labels.target); b != nil {
			if balance, limited := balanceOf(b, now); limited {
				to.measure(floatBalance, balance, attrs...)
			}
		}
	}
}

// shownBudget returns the budget for a target in canonical form: the one that a perTarget would make if it has
// not seen the target lately. It is nil if there is none for the scope.
func shownBudget(b Budget, target string) Budget {
	each, ok := b.(*perTarget)
	if !ok {
		return b
	}
	if known, ok := each.targets.Known(target); ok {
		return known
	}
	return each.newBudget()
}

func (row *metricRow) observe(to *collection) {
	row.mu.Lock()
	counts := maps.Clone(row.counts)
	row.mu.Unlock()

	firstTries := row.firstTries.Sum()
	counts[callsBy(reasons.FirstTry)] += firstTries
	counts[attemptsBy(words.Code(codes.OK), decisionSuccess)] += firstTries
	if passed := row.passed.Sum(); passed > 0 {
		counts[series{of: countPassed}] = passed
	}
	for s, n := range counts {
		attrs := row.attributes()
		for i, label := range instruments[s.of].labels {
			attrs = append(attrs, attribute.String(label, s.labels[i]))
		}
		to.count(s.of, n, attrs...)
	}
}

func (row *metricRow) attributes() []attribute.KeyValue {
	return []attribute.KeyValue{attribute.String(attrMethod, row.method), attribute.String(telemetry.AttrTarget, words.Printable(row.target))}
}

// count adds one to each of some series.
func (row *metricRow) count(all ...series) {
	row.mu.Lock()
	defer row.mu.Unlock()
	for _, s := range all {
		row.counts[s]++
	}
}

func attemptsBy(code, decision string) series {
	return series{countAttempts, [2]string{code, decision}}
}

func callsBy(outcome string) series { return series{countCalls, [2]string{outcome}} }

// The two results of hedges.
var (
	hedgesWon    = series{countHedges, [2]string{"won"}}
	hedgesWasted = series{countHedges, [2]string{"wasted"}}
)

// countHedge adds one to the hedges that have won, or to the others. Both are shown then.
func (row *metricRow) countHedge(result series) {
	row.mu.Lock()
	defer row.mu.Unlock()
	row.counts[hedgesWon] += 0
	row.counts[hedgesWasted] += 0
	row.counts[result]++
}

// callPassed counts a call that passed straight through.
func (m *metrics) callPassed(f *facts) { m.row(f).passed.Add() }

// callSucceeded counts an attempt that succeeded, and with it the call.
func (m *metrics) callSucceeded(f *facts, h *history, a *attempt) {
	row := m.row(f)
	if a.number == 1 && h.isEmpty() {
		row.firstTries.Add()
		return
	}
	row.count(attemptsBy(words.Code(codes.OK), decisionSuccess), callsBy(reasons.Outcome(nil, nil, int(a.number), a.hedge)))
	switch {
	case a.hedge:
		row.countHedge(hedgesWon)
	case a.number > 1:
		row.count(series{of: countRescued})
	}
}

// attemptFailed counts an attempt that failed, by status code and decision.
func (m *metrics) attemptFailed(f *facts, a *Attempt, v verdict) {
	row := m.row(f)
	row.count(attemptsBy(words.KnownCode(a.Code()), decisionName(v)))
	switch {
	case a.Unsent: // such an attempt cost no token, and no server anything
	case a.Hedge:
		row.countHedge(hedgesWasted)
	case a.Number > 1:
		row.count(series{of: countWasted})
	}
	m.countRefusal(f.policy.budgetScope, row, v)
}

// attemptLost counts an attempt that was cancelled because another was decisive.
func (m *metrics) attemptLost(f *facts, a *Attempt) {
	row := m.row(f)
	row.count(attemptsBy(words.Code(codes.Canceled), decisionLost))
	if a.Hedge {
		row.countHedge(hedgesWasted)
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
	source := attribute.String(telemetry.AttrWaitSource, WaitSource(a.source).String())
	m.wait.Record(f.ctx, a.wait.Seconds(), metric.WithAttributes(append(m.row(f).attributes(), source)...))
}

// budgetRefused counts a retry that the budget refused when its wait was over.
func (m *metrics) budgetRefused(f *facts) {
	m.countRefusal(f.policy.budgetScope, m.row(f), verdict{Reason: ErrBudgetExhausted})
}

func (m *metrics) countRefusal(scope string, row *metricRow, v verdict) {
	if !v.refusedByBudget() {
		return
	}
	labels := budgetLabels{row.target, scope}
	// There are as many scopes as the options have.
	m.refusals.Get(labels, math.MaxInt, func(budgetLabels) *atomic.Int64 { return new(atomic.Int64) }).Add(1)
}

// callFailed counts a call that failed.
func (m *metrics) callFailed(f *facts, end *callFailure) {
	m.row(f).count(callsBy(ReasonName(end.reason)))
}

// row returns the row of a call. It is on the path of every call.
func (m *metrics) row(f *facts) *metricRow {
	key := rowKey{f.dialed(), other}
	if f.static {
		key.method = f.method
	}
	if row := m.dialed.Current()[key]; row != nil {
		return row
	}
	if max(len(key.method), len(key.target)) <= maxMetricName {
		shown := rowKey{f.target(), key.method}
		rows := m.rows.Current()
		row := rows[shown]
		if row == nil && len(rows) < maxMetricRows {
			row, _ = m.rows.Add(shown, newMetricRow(shown), maxMetricRows)
		}
		if row != nil {
			m.dialed.Add(key, row, maxMetricRows)
			return row
		}
	}
	m.overflowed.Store(true)
	return m.overflow
}

func newMetricRow(key rowKey) *metricRow {
	return &metricRow{
		target: key.target,
		method: words.Printable(strings.TrimPrefix(key.method, "/")),
		counts: map[series]int64{{of: countRescued}: 0, {of: countWasted}: 0}, // shown from the first call on
	}
}
