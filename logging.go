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
	changed    sync.Map     // likewise
	exhausted  exhaustedBudgets
}

// recovered is how long a budget must refuse nothing before that is worth a line: one
// that is used up allows a retry now and then all through an outage.
const recovered = 10 * time.Second

func newLogger(l *slog.Logger) *logger {
	if l == nil {
		return nil
	}
	return &logger{
		Logger:    l,
		giveUps:   rate.NewLimiter(1, 100),
		exhausted: exhaustedBudgets{lines: rate.NewLimiter(1, 100), refused: map[any]time.Time{}},
	}
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
			"wait", v.Wait, "source", v.WaitSource.String(), "error", shortText(status.Convert(a.Err).Message(), maxText))
	}
}

// logBudget logs a change of the budget.
func (l *logger) logBudget(c *call, v Verdict, now time.Time) {
	switch {
	case v.refused():
		if l.exhausted.add(budgetKey(c.budget), now) {
			l.WarnContext(c.ctx, "grpcretry: client-side retry budget exhausted, calls fail without a retry",
				"method", c.method, "target", c.target())
		}
	case v.Retry:
		if l.exhausted.remove(budgetKey(c.budget), now) {
			l.InfoContext(c.ctx, "grpcretry: client-side retry budget allows retries again",
				"method", c.method, "target", c.target())
		}
	}
}

// maxExhausted is the number of exhausted budgets that are remembered. Only programs that
// make a budget for each call, or dial thousands of targets, have more.
const maxExhausted = 1000

// exhaustedBudgets holds the budgets that were logged as exhausted.
type exhaustedBudgets struct {
	lines *rate.Limiter // of budgets that are logged as exhausted

	mu      sync.Mutex
	refused map[any]time.Time // guarded by mu; the last refusal, by budgetKey
}

// add notes a refusal. It reports whether the budget is to be logged as exhausted.
func (e *exhaustedBudgets) add(key any, now time.Time) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	_, known := e.refused[key]
	if !known && !e.lines.AllowN(now, 1) {
		return false
	}
	if !known && len(e.refused) == maxExhausted {
		delete(e.refused, e.oldest())
	}
	e.refused[key] = now
	return !known
}

// oldest needs mu. It searches all, which is rare: the limit on lines is a limit on new
// budgets.
func (e *exhaustedBudgets) oldest() (oldest any) {
	for key, refused := range e.refused {
		if oldest == nil || refused.Before(e.refused[oldest]) {
			oldest = key
		}
	}
	return oldest
}

// remove reports whether the budget was exhausted and has refused nothing for long enough,
// and then forgets it.
func (e *exhaustedBudgets) remove(key any, now time.Time) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	refused, known := e.refused[key]
	if !known || now.Sub(refused) < recovered {
		return false
	}
	delete(e.refused, key)
	return true
}

// budgetKey tells budgets apart. Budgets that cannot be compared count as one per type.
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
		"code", codeName(last.Code()), "reason", ReasonName(err.Reason), "error", shortText(status.Convert(err.Last).Message(), maxText),
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

// logChanged logs once that a method's messages are changed after SendMsg.
func (l *logger) logChanged(c *call) {
	if l == nil {
		return
	}
	if _, told := l.changed.LoadOrStore(c.method, true); !told {
		l.WarnContext(c.ctx, "grpcretry: a message was changed after SendMsg, so the stream cannot be retried", "method", c.method)
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
