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

// A logger writes what [WithLogger] promises and no more.
type logger struct {
	*slog.Logger
	giveUps    *rate.Limiter
	suppressed atomic.Int64 // give-ups not logged since the last that was
	exhausted  exhaustedBudgets

	leftMethods, notHedgedMethods, changedMethods sync.Map // methods that were logged
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

// attemptFailed logs a retry, and a change of the budget.
func (l *logger) attemptFailed(f *facts, a *Attempt, v verdict, now time.Time) {
	l.budgetJudged(f, v, now)
	if v.Retry && l.Enabled(f.ctx, slog.LevelDebug) {
		l.DebugContext(f.ctx, "grpcretry: retrying",
			"method", f.method, "target", targetOf(f.cc), "attempt", a.Number, "code", codeName(a.Code()),
			"wait", v.Wait, "source", v.WaitSource.String(), "error", status.Convert(a.Err).Message())
	}
}

// hedgeJudged logs a hedge, and a change of the budget.
func (l *logger) hedgeJudged(f *facts, v verdict, now time.Time) {
	l.budgetJudged(f, v, now)
	if v.Retry && l.Enabled(f.ctx, slog.LevelDebug) {
		l.DebugContext(f.ctx, "grpcretry: hedging", "method", f.method, "target", targetOf(f.cc), "delay", v.Wait)
	}
}

// budgetJudged logs a change of the budget.
func (l *logger) budgetJudged(f *facts, v verdict, now time.Time) {
	switch {
	case v.refused():
		if l.exhausted.add(budgetKey(f.budget), now) {
			l.WarnContext(f.ctx, "grpcretry: client-side retry budget exhausted, calls fail without a retry",
				"method", f.method, "target", targetOf(f.cc))
		}
	case v.Retry:
		if l.exhausted.remove(budgetKey(f.budget), now) {
			l.InfoContext(f.ctx, "grpcretry: client-side retry budget allows retries again",
				"method", f.method, "target", targetOf(f.cc))
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

// gaveUp logs a call that ended with err although its failure was retryable. Stops by the
// budget were logged when it was exhausted, and a caller that goes away is no failure.
func (l *logger) gaveUp(f *facts, last *Attempt, err *Error, now time.Time) {
	byBudget := err.ctx == nil && errors.Is(err.Reason, ErrBudgetExhausted)
	callerLeft := errors.Is(err.ctx, context.Canceled) || err.ctx != nil && err.made == 1
	if byBudget || callerLeft {
		return
	}
	if !l.giveUps.AllowN(now, 1) {
		l.suppressed.Add(1)
		return
	}
	l.WarnContext(f.ctx, "grpcretry: gave up",
		"method", f.method, "target", targetOf(f.cc), "attempts", err.made, "elapsed", err.Elapsed,
		"code", codeName(last.Code()), "reason", ReasonName(err.Reason), "error", status.Convert(err.Last).Message(),
		"suppressed", l.suppressed.Swap(0))
}

// notHedged logs once that a method cannot be hedged.
func (l *logger) notHedged(f *facts, why string) {
	but := ", but retried"
	if f.policy.modeUnhedged() == modePassThrough {
		but = ""
	}
	if _, logged := l.notHedgedMethods.LoadOrStore(f.method, true); !logged {
		l.WarnContext(f.ctx, "grpcretry: method is not hedged"+but+": "+why, "method", f.method)
	}
}

// messageChanged logs once that a method's messages are changed after SendMsg.
func (l *logger) messageChanged(f *facts) {
	if _, logged := l.changedMethods.LoadOrStore(f.method, true); !logged {
		l.WarnContext(f.ctx, "grpcretry: a message was changed after SendMsg, so the stream cannot be retried", "method", f.method)
	}
}

// leftToGRPC logs once that a method is left to gRPC's own retries.
func (l *logger) leftToGRPC(f *facts) {
	if _, logged := l.leftMethods.LoadOrStore(f.method, true); !logged {
		l.WarnContext(f.ctx, "grpcretry: the channel's service config has a retryPolicy for this method, leaving it to gRPC; "+
			"dial with DialOptions to retry here instead",
			"method", f.method, "target", targetOf(f.cc))
	}
}
