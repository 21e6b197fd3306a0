package reconcile

import (
	"context"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"time"

	"golang.org/x/time/rate"
)

// A logger writes the lines of [WithLogger]. Each kind of line has a limit of its own, so that ten
// thousand first failures do not hide that the budget is empty.
type logger struct {
	*slog.Logger
	first, backoff, repeated, budget lineKind

	mu      sync.Mutex
	refused time.Time // guarded by mu; the last refusal; zero if the budget pays
}

// A lineKind limits lines of one kind to one per second, after a burst of ten.
type lineKind struct {
	limit *rate.Limiter

	mu         sync.Mutex
	suppressed int // guarded by mu; since the last line
}

const (
	linesPerSecond = 1
	linesAtOnce    = 10
	maxLogged      = 256 // bytes of a key or an error
	recovered      = 10 * time.Second
)

// steps are the waits of a key that are logged, each once until the key succeeds.
var steps = [...]time.Duration{time.Second, 10 * time.Second, time.Minute}

func newLogger(l *slog.Logger, name string) *logger {
	if l == nil {
		return nil
	}
	kind := func() lineKind { return lineKind{limit: rate.NewLimiter(linesPerSecond, linesAtOnce)} }
	return &logger{Logger: l.With("name", name), first: kind(), backoff: kind(), repeated: kind(), budget: kind()}
}

// failed logs a key's failure if it is remarkable. The caller holds the key's mu, which guards logged.
func (l *logger) failed(item any, failures int, logged *byte, v verdict, err error, now time.Time) {
	if l == nil {
		return
	}
	l.budgetJudged(v.reason, now)
	if failures == 1 {
		l.line(&l.first, slog.LevelInfo, now, "grpcretry: key fails", item, "wait", v.wait, "reason", v.reason, "error", shortened(err))
	}
	passed := false
	for int(*logged) < len(steps) && v.wait >= steps[*logged] {
		*logged++
		passed = true
	}
	if passed {
		l.line(&l.backoff, slog.LevelInfo, now, "grpcretry: key's backoff grows", item,
			"wait", v.wait, "passed", steps[*logged-1], "failures", failures, "reason", v.reason)
	}
	if isPowerOfTen(failures) {
		l.line(&l.repeated, slog.LevelWarn, now, "grpcretry: key fails repeatedly", item,
			"failures", failures, "wait", v.wait, "reason", v.reason, "error", shortened(err))
	}
}

// budgetJudged logs that the budget is empty, or pays again.
func (l *logger) budgetJudged(reason string, now time.Time) {
	l.mu.Lock()
	wasEmpty, since := !l.refused.IsZero(), now.Sub(l.refused)
	paid := reason == ReasonBackoff || reason == ReasonPushback || reason == ReasonRetryInfo
	if reason == ReasonBudget {
		l.refused = now
	}
	if paid && wasEmpty && since >= recovered {
		l.refused = time.Time{}
	}
	l.mu.Unlock()
	switch {
	case reason == ReasonBudget && !wasEmpty:
		l.line(&l.budget, slog.LevelWarn, now, "grpcretry: retry budget is empty, failing keys wait in the slow lane", nil)
	case paid && wasEmpty && since >= recovered:
		l.line(&l.budget, slog.LevelInfo, now, "grpcretry: retry budget pays again", nil)
	}
}

// line writes a line unless there are too many of its kind.
func (l *logger) line(kind *lineKind, level slog.Level, now time.Time, message string, item any, fields ...any) {
	if !l.Enabled(context.Background(), level) {
		return
	}
	suppressed, ok := kind.allow(now)
	if !ok {
		return
	}
	if item != nil {
		fields = append([]any{"key", short(fmt.Sprint(item))}, fields...)
	}
	if suppressed > 0 {
		fields = append(fields, "suppressed", suppressed)
	}
	l.Log(context.Background(), level, message, fields...)
}

// allow reports whether a line may be written, and how many of its kind were not since the last one.
func (k *lineKind) allow(now time.Time) (suppressed int, ok bool) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if !k.limit.AllowN(now, 1) {
		k.suppressed++
		return 0, false
	}
	suppressed, k.suppressed = k.suppressed, 0
	return suppressed, true
}

func isPowerOfTen(n int) bool {
	for n >= 10 && n%10 == 0 {
		n /= 10
		if n == 1 {
			return true
		}
	}
	return false
}

func shortened(err error) string { return short(err.Error()) }

// short returns the beginning of s, in valid UTF-8.
func short(s string) string {
	if len(s) > maxLogged {
		s = s[:maxLogged] + "…"
	}
	return strings.ToValidUTF8(s, "")
}
