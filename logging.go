package grpcretry

import (
	"context"
	"errors"
	"log/slog"
	"reflect"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/time/rate"
	"google.golang.org/grpc/status"
)

// A logger writes what [WithLogger] promises and no more; a nil one writes nothing.
type logger struct {
	*slog.Logger
	giveUps    *rate.Limiter
	suppressed atomic.Int64 // give-ups not logged since the last that was
	leftToGRPC sync.Map     // methods that were logged as such
	notHedged  sync.Map     // methods that were logged as such
	exhausted  sync.Map     // budgets that were logged as such: budgetKey → *atomic.Int64, the time of the last refusal
}

// recovered is how long a budget must refuse nothing before that is worth a line: one
// that is used up allows a retry now and then all through an outage.
const recovered = 10 * time.Second

func newLogger(l *slog.Logger) *logger {
	if l == nil {
		return nil
	}
	return &logger{Logger: l, giveUps: rate.NewLimiter(1, 100)}
}

// logDecision logs a retry, and a change of the budget.
func (c *call) logDecision(a *Attempt, v Verdict, now time.Time) {
	l := c.retrier.log
	if l == nil {
		return
	}
	l.logBudget(c, v, now)
	if v.Retry && l.Enabled(c.ctx, slog.LevelDebug) {
		l.DebugContext(c.ctx, "grpcretry: retrying",
			"method", c.method, "target", c.target(), "attempt", a.Number, "code", codeName(a.Code()),
			"wait", v.Wait, "source", v.WaitSource.String(), "error", status.Convert(a.Err).Message())
	}
}

// logBudget logs a change of the budget.
func (l *logger) logBudget(c *call, v Verdict, now time.Time) {
	key := budgetKey(c.budget)
	switch {
	case v.refused():
		last, told := l.exhausted.LoadOrStore(key, new(atomic.Int64))
		last.(*atomic.Int64).Store(now.UnixNano())
		if !told {
			l.WarnContext(c.ctx, "grpcretry: client-side retry budget exhausted, calls fail without a retry",
				"method", c.method, "target", c.target())
		}
	case v.Retry && l.hasRecovered(key, now):
		l.InfoContext(c.ctx, "grpcretry: client-side retry budget allows retries again",
			"method", c.method, "target", c.target())
	}
}

// hasRecovered is true once, when a budget that was exhausted has refused nothing for long enough.
func (l *logger) hasRecovered(key any, now time.Time) bool {
	last, told := l.exhausted.Load(key)
	if !told || now.UnixNano()-last.(*atomic.Int64).Load() < int64(recovered) {
		return false
	}
	return l.exhausted.CompareAndDelete(key, last)
}

// budgetKey tells budgets apart. Those that cannot be compared are one for each type.
func budgetKey(b Budget) any {
	if v := reflect.ValueOf(b); !v.Comparable() {
		return v.Type()
	}
	return b
}

// logDue logs a hedge that was due.
func (c *call) logDue(v Verdict, now time.Time) {
	l := c.retrier.log
	if l == nil {
		return
	}
	l.logBudget(c, v, now)
	if v.Retry && l.Enabled(c.ctx, slog.LevelDebug) {
		l.DebugContext(c.ctx, "grpcretry: hedging", "method", c.method, "target", c.target(), "delay", v.Wait)
	}
}

// logGiveUp logs a call that ended with err although its failure was retryable. Stops
// by the budget were logged when it ran out, and a caller that goes away is no failure.
func (c *call) logGiveUp(last *Attempt, err *Error, now time.Time) {
	l := c.retrier.log
	if l == nil || err.ctx == nil && errors.Is(err.Reason, ErrBudgetExhausted) || errors.Is(err.ctx, context.Canceled) || err.ctx != nil && err.made == 1 {
		return
	}
	if !l.giveUps.AllowN(now, 1) {
		l.suppressed.Add(1)
		return
	}
	l.WarnContext(c.ctx, "grpcretry: gave up",
		"method", c.method, "target", c.target(), "attempts", err.made, "elapsed", err.Elapsed,
		"code", codeName(last.Code()), "reason", ReasonName(err.Reason), "error", status.Convert(err.Last).Message(),
		"suppressed", l.suppressed.Swap(0))
}

// logNotHedged logs once that a method cannot be hedged.
func (l *logger) logNotHedged(ctx context.Context, method string, p *policy, why string) {
	if l == nil {
		return
	}
	but := ", but retried"
	if p.MaxAttempts == 1 {
		but = ""
	}
	if _, told := l.notHedged.LoadOrStore(method, true); !told {
		l.WarnContext(ctx, "grpcretry: method is not hedged"+but+": "+why, "method", method)
	}
}

// logLeftToGRPC logs once that a method is left to gRPC's own retries.
func (l *logger) logLeftToGRPC(c *call) {
	if l == nil {
		return
	}
	if _, told := l.leftToGRPC.LoadOrStore(c.method, true); !told {
		l.WarnContext(c.ctx, "grpcretry: the channel's service config has a retryPolicy for this method, leaving it to gRPC; "+
			"dial with DialOptions to retry here instead",
			"method", c.method, "target", c.target())
	}
}
