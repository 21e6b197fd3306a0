package grpcretry

import (
	"math"
	"sync/atomic"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"

	"github.com/grpcretry/grpcretry/internal/bounded"
	"github.com/grpcretry/grpcretry/internal/instruments"
	"github.com/grpcretry/grpcretry/internal/reasons"
	"github.com/grpcretry/grpcretry/internal/words"
	"github.com/grpcretry/grpcretry/telemetry"
)

// maxMetricRows limits the pairs of target and method, and so the memory: later pairs are counted as
// method "other" and target "other". Stubs have a limited number of methods, but a client that dials
// each address separately has an unlimited number of targets.
const maxMetricRows = 2000

// metrics counts a Retrier's calls and their outcomes. The counters are our own, and OpenTelemetry
// reads them when it collects: recording with its instruments would cost a call that succeeds on its
// first attempt several times as much.
type metrics struct {
	settings *settings
	usage    *usage
	targets  *targets

	wait       metric.Float64Histogram
	rows       bounded.Map[rowKey, *instruments.Row] // by the target in canonical form
	dialed     bounded.Map[rowKey, *instruments.Row] // the same rows by the target as dialed
	overflow   *instruments.Row                      // counts the pairs after maxMetricRows, and those with long names
	overflowed atomic.Bool                           // the overflow has counted something
	refusals   bounded.Map[budgetLabels, *atomic.Int64]
}

// A rowKey has a target either as it was dialed or in gRPC's canonical form, which the row shows.
type rowKey struct{ target, method string }

type budgetLabels struct{ target, scope string }

// newMetrics makes the instruments. It returns nil without WithMeterProvider. The provider holds the
// counters from then on, so that they do not end with the Retrier: a total that shrinks would be a reset to
// its readers, and what was counted last would be missing from the last flush.
func newMetrics(c *config, s *settings, u *usage, t *targets) (*metrics, error) {
	if c.meterProvider == nil {
		return nil, nil
	}
	m := &metrics{settings: s, usage: u, targets: t, overflow: instruments.NewRow(instruments.Other, instruments.Other)}
	var err error
	if m.wait, err = instruments.Register(c.meterProvider, m.observe); err != nil {
		return nil, err
	}
	return m, nil
}

// observe reports every count.
func (m *metrics) observe(to *instruments.Collection) {
	called := map[string]bool{} // targets
	for _, row := range m.rows.Current() {
		called[row.Target] = true
		row.Report(to)
	}
	if m.overflowed.Load() {
		m.overflow.Report(to)
	}
	u := m.usage.now()
	to.Count(instruments.Waiting, int64(u.WaitingCalls))
	to.Count(instruments.Streams, int64(u.OpenStreams))
	to.Count(instruments.ReplayMemory, u.ReplayMemory)
	to.Count(instruments.NotKept, u.CommittedStreams)
	now := time.Now()
	for _, t := range m.targets.states(now) {
		if m.overflowed.Load() && !called[t.Name] { // there are too many
			continue
		}
		attr := attribute.String(telemetry.AttrTarget, words.Printable(t.Name))
		to.Count(instruments.TargetWaiting, int64(t.Waiting), attr)
		to.Measure(instruments.Failing, t.Failing.Seconds(), attr)
	}
	m.observeBudgets(to, called, now)
}

// observeBudgets reports the level and the refusals of each budget that calls to the targets may spend
// from, and the refusals of those that an Update has taken away, or that single calls have.
func (m *metrics) observeBudgets(to *instruments.Collection, targets map[string]bool, now time.Time) {
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
		to.Count(instruments.Refusals, n, attrs...)
		if labels.target == instruments.Other { // there is no such budget
			continue
		}
		if b := shownBudget(budgets[labels.scope], labels.target); b != nil {
			if balance, limited := balanceOf(b, now); limited {
				to.Measure(instruments.Balance, balance, attrs...)
			}
		}
	}
}

// shownBudget returns the budget for a target in canonical form: the one that a perTarget would make if it has
// not seen the target lately, unless the program's function makes it. It is nil if there is none to show.
func shownBudget(b Budget, target string) Budget {
	each, ok := b.(*perTarget)
	if !ok {
		return b
	}
	if known, ok := each.targets.Known(target); ok {
		return known
	}
	if each.settings == nil {
		return nil
	}
	return each.newBudget()
}

// callPassed counts a call that passed straight through.
func (m *metrics) callPassed(f *facts) { m.row(f).Passed.Add() }

// callSucceeded counts an attempt that succeeded, and with it the call.
func (m *metrics) callSucceeded(f *facts, h *history, a *attempt) {
	row := m.row(f)
	if a.number == 1 && h.isEmpty() {
		row.FirstTries.Add()
		return
	}
	hedge := a.source.isHedge()
	row.Succeeded(reasons.Outcome(nil, nil, int(a.number), hedge), int(a.number), hedge)
}

// attemptFailed counts an attempt that failed, by status code and decision.
func (m *metrics) attemptFailed(f *facts, a *Attempt, v verdict) {
	m.row(f).Failed(words.KnownCode(a.Code()), decisionName(v), a.Number, a.Hedge, a.Unsent)
}

// attemptLost counts an attempt that was cancelled because another was decisive.
func (m *metrics) attemptLost(f *facts, a *Attempt) { m.row(f).Lost(a.Hedge) }

// hedgesBudget stands for the budgets of hedges in telemetry.AttrBudget.
const hedgesBudget = "hedges"

// retrySent records the wait before an attempt after the first.
func (m *metrics) retrySent(f *facts, a *attempt) {
	source := attribute.String(telemetry.AttrWaitSource, a.source.String())
	m.wait.Record(f.ctx, a.extras().wait.Seconds(), metric.WithAttributes(append(m.row(f).Attributes(), source)...))
}

// budgetRefused counts that the budget of a scope refused an attempt. It does nothing if m is nil.
func (m *metrics) budgetRefused(f *facts, scope string) {
	if m == nil {
		return
	}
	labels := budgetLabels{m.row(f).Target, scope}
	// There are as many scopes as the options have.
	m.refusals.Get(labels, math.MaxInt, func(budgetLabels) *atomic.Int64 { return new(atomic.Int64) }).Add(1)
}

// callFailed counts a call that failed.
func (m *metrics) callFailed(f *facts, end *callFailure) {
	m.row(f).CallFailed(reasons.Of(end.verdict.Reason).Word)
}

// row returns the row of a call. It is on the path of every call.
func (m *metrics) row(f *facts) *instruments.Row {
	key := rowKey{f.dialed(), instruments.Other}
	if f.static {
		key.method = f.method
	}
	if row := m.dialed.Current()[key]; row != nil {
		return row
	}
	if max(len(key.method), len(key.target)) <= instruments.MaxName {
		shown := rowKey{f.target(), key.method}
		rows := m.rows.Current()
		row := rows[shown]
		if row == nil && len(rows) < maxMetricRows {
			row, _ = m.rows.Add(shown, instruments.NewRow(shown.target, shown.method), maxMetricRows)
		}
		if row != nil {
			m.dialed.Add(key, row, maxMetricRows)
			return row
		}
	}
	m.overflowed.Store(true)
	return m.overflow
}
