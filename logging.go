package grpcretry

import (
	"context"
	"errors"
	"log/slog"
	"sync/atomic"
	"time"

	"golang.org/x/time/rate"

	"github.com/grpcretry/grpcretry/internal/bounded"
	"github.com/grpcretry/grpcretry/internal/reasons"
	"github.com/grpcretry/grpcretry/internal/words"
)

// A logger writes the lines that [WithLogger] describes and no others. Neither their number nor the
// logger's memory grows with the number of calls, budgets or methods. A nil logger is one that
// is off.
type logger struct {
	*slog.Logger
	giveUps    *rate.Limiter
	suppressed atomic.Int64                   // give-ups since the last one that was logged
	exhausted  bounded.Episodes[budgetLabels] // of budgets, by their targets as dialed and their scopes

	// Methods for which a line was logged, once each.
	left, unhedged, changed bounded.Set[string]

	memoryFull atomic.Bool // the replay memory was full
	leftovers  atomic.Bool // a call had a leftover option
}

// recovered is the time without a refusal after which a budget is logged as recovered: an exhausted
// budget allows a retry now and then all through an outage.
const recovered = 10 * time.Second

func newLogger(l *slog.Logger) *logger {
	if l == nil {
		return nil
	}
	return &logger{
		Logger:    l,
		giveUps:   rate.NewLimiter(1, 100),
		exhausted: bounded.Episodes[budgetLabels]{Quiet: recovered},
	}
}

// attemptFailed logs a retry.
func (l *logger) attemptFailed(f *facts, a *Attempt, v verdict) {
	if would := is(v.Reason, errWouldRetry); l != nil && (v.retries() || would) && l.Enabled(f.ctx, slog.LevelDebug) {
		what := "grpcretry: retrying"
		if would {
			what = "grpcretry: would retry"
		}
		l.DebugContext(f.ctx, what,
			"method", f.method, "target", f.target(), "attempt", a.Number, "code", words.Code(a.Code()),
			"wait", v.Wait, "source", v.WaitSource.String(), "error", words.Message(a.Err))
	}
}

// hedging logs a hedge.
func (l *logger) hedging(f *facts, delay time.Duration) {
	if l != nil && l.Enabled(f.ctx, slog.LevelDebug) {
		l.DebugContext(f.ctx, "grpcretry: hedging", "method", f.method, "target", f.target(), "delay", delay)
	}
}

// budgetRefused logs that a budget is exhausted.
func (l *logger) budgetRefused(f *facts, now time.Time) {
	if l != nil && l.exhausted.Add(budgetLabels{f.dialed(), f.policy.budgetScope}, now) {
		l.WarnContext(f.ctx, "grpcretry: client-side retry budget exhausted, calls fail without a retry",
			"method", f.method, "target", f.target(), "budget", f.policy.budgetScope)
	}
}

// budgetAllows logs that a budget allows retries again.
func (l *logger) budgetAllows(f *facts, now instant) {
	if l != nil && l.exhausted.End(budgetLabels{f.dialed(), f.policy.budgetScope}, origin.Add(now.sinceOrigin())) {
		l.InfoContext(f.ctx, "grpcretry: client-side retry budget allows retries again",
			"method", f.method, "target", f.target(), "budget", f.policy.budgetScope)
	}
}

// targetNotice logs what has changed for the calls to a target.
func (l *logger) targetNotice(name string, what notice, waiting int) {
	switch {
	case l == nil:
	case what == callsWait:
		l.Warn("grpcretry: target is failing, calls wait for it", "target", name, "waiting", waiting)
	case what == patienceOver:
		l.Warn("grpcretry: target has been failing for too long, calls do not wait for it any more",
			"target", name, "waiting", waiting)
	case what == answersAgain:
		l.Info("grpcretry: target answers again", "target", name, "waiting", waiting)
	}
}

// gaveUp logs a call that ended with err although its failure was retryable. Calls whose reason has
// a line of its own are left out, and so are calls whose caller has gone.
func (l *logger) gaveUp(f *facts, last *Attempt, err *Error, now time.Time) {
	known := err.ctx == nil && reasons.Of(err.Reason).Logged
	callerLeft := errors.Is(err.ctx, context.Canceled) || err.ctx != nil && err.made == 1
	if l == nil || known || callerLeft {
		return
	}
	if !l.giveUps.AllowN(now, 1) {
		l.suppressed.Add(1)
		return
	}
	fields := append(make([]any, 0, 16),
		"method", f.method, "target", f.target(), "attempts", err.made, "elapsed", err.Elapsed,
		"code", words.Code(last.Code()), "reason", reasons.Of(err.Reason).Word, "error", words.Message(err.Last))
	if n := l.suppressed.Swap(0); n > 0 {
		fields = append(fields, "suppressed", n)
	}
	l.WarnContext(f.ctx, "grpcretry: gave up", fields...)
}

// notHedged logs once that a method cannot be hedged.
func (l *logger) notHedged(f *facts, why string) {
	if l != nil && l.unhedged.Add(f.method, bounded.MaxNames) {
		l.WarnContext(f.ctx, "grpcretry: method is not hedged, but retried: "+why, "method", f.method)
	}
}

// streamNotKept logs once that the replay memory is full.
func (l *logger) streamNotKept(f *facts, limit int64) {
	if l != nil && l.memoryFull.CompareAndSwap(false, true) {
		l.WarnContext(f.ctx, "grpcretry: replay memory is full, streams commit early and are not retried",
			"method", f.method, "target", f.target(), "limit", limit)
	}
}

// sentAgain logs once that a method's streams are sent one object again and again.
func (l *logger) sentAgain(f *facts) {
	if l != nil && l.changed.Add(f.method, bounded.MaxNames) {
		l.WarnContext(f.ctx,
			"grpcretry: the same object was sent twice in a row, so the stream is not retried; use a new message for each SendMsg",
			"method", f.method)
	}
}

// leftover logs once that an option of a call is ignored. One line is enough, because the option's import
// finds the others.
func (l *logger) leftover(f *facts) {
	if l != nil && l.leftovers.CompareAndSwap(false, true) {
		l.WarnContext(f.ctx, "grpcretry: the call has an option of go-grpc-middleware's retry package, which is ignored here. "+
			"If an interceptor of that package is chained after grpcretry's, it obeys the option, and the attempts multiply",
			"method", f.method)
	}
}

// leftToGRPC logs once that a method is left to gRPC's own retries.
func (l *logger) leftToGRPC(f *facts) {
	if l != nil && l.left.Add(f.method, bounded.MaxNames) {
		l.WarnContext(f.ctx, "grpcretry: the channel's service config has a retryPolicy for this method, leaving it to gRPC; "+
			"dial with DialOptions to retry here instead",
			"method", f.method, "target", f.target())
	}
}
