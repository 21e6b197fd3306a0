package grpcretry

import (
	"context"
	"math"
	"time"

	"go.opentelemetry.io/otel/trace"
	"google.golang.org/grpc/metadata"

	"github.com/grpcretry/grpcretry/internal/instruments"
	"github.com/grpcretry/grpcretry/internal/layers"
)

// This file is the one seam between a call and its telemetry. A call reports a handful of moments to
// its reporter, together with its [facts]. Only the reporter knows the four sinks: the span, the
// logger, the metrics and the observers. No sink sees the call itself.

// A reporter holds a Retrier's sinks. A sink that is off is nil, or has no observers, and
// costs one comparison. What only the logger wants to know is reported to it directly.
type reporter struct {
	tracer trace.Tracer // makes call spans
	*logger
	metrics   *metrics
	observers *observers // never nil, because an observer may be added at any time
}

// The facts of a call are all that the sinks know about it.
type facts struct {
	backend
	ctx      context.Context // the caller's, within the call span if there is one
	method   string          // "/pkg.Service/Method", or a function's name
	policy   *policy
	static   bool // the number of methods is limited: a generated stub makes the call, or it is a function
	mode     mode
	budget   Budget
	start    instant
	worksFor *layers.Request // the request of the server whose handler makes the call; nil if there is none
	spans    *callSpans      // nil if no span records
}

// balanceOf returns the number of retries that a budget would allow now, rounded to hide
// floating-point noise; limited is false if that is not a finite number.
func balanceOf(b Budget, now time.Time) (balance float64, limited bool) {
	balance = b.Balance(now)
	if math.IsInf(balance, 0) || math.IsNaN(balance) {
		return 0, false
	}
	return round(balance), true
}

// callPassed reports a call that passes straight through to gRPC.
func (r *reporter) callPassed(f *facts) {
	if r.metrics != nil {
		r.metrics.callPassed(f)
	}
	if r.observed() {
		r.observers.callPassed(f)
	}
}

// callStarted starts the call span, or finds the caller's.
func (r *reporter) callStarted(f *facts) *callSpans {
	var own trace.Span
	if r.tracer != nil {
		f.ctx, own = startCallSpan(f, r.tracer)
	}
	if span := trace.SpanFromContext(f.ctx); span.IsRecording() {
		return &callSpans{events: span, call: own}
	}
	return nil // a span of our own that does not record needs no end
}

// observed reports whether there is an observer now.
func (r *reporter) observed() bool { return !r.observers.list.IsEmpty() }

// watchesStart reports whether there is a sink for the start of a call.
func (r *reporter) watchesStart() bool { return r.tracer != nil || r.observed() }

// watches reports whether there is a sink for the success of a call in a context.
func (r *reporter) watches(ctx context.Context) bool {
	return r.metrics != nil || r.observed() || trace.SpanFromContext(ctx).IsRecording()
}

// attemptStarted reports that an attempt is about to be handed to gRPC.
func (r *reporter) attemptStarted(f *facts, a *attempt) {
	if r.observed() {
		r.observers.observe(f, &Event{Kind: AttemptStart, Attempt: a.asStarted(time.Now())})
	}
}

// attemptFailed reports an attempt's failure and the decision.
func (r *reporter) attemptFailed(f *facts, a *Attempt, v verdict, now time.Time) {
	if f.spans != nil {
		f.spans.attemptFailed(f, a, v, now)
	}
	if is(v.Reason, ErrBudgetExhausted) {
		r.budgetRefused(f, now)
	}
	r.logger.attemptFailed(f, a, v)
	if r.metrics != nil {
		r.metrics.attemptFailed(f, a, v)
	}
	if r.observed() {
		r.observers.observe(f, &Event{Kind: AttemptEnd, Attempt: *a})
		r.observers.observe(f, &Event{Kind: Decision, Attempt: *a,
			Wait: v.Wait, WaitSource: v.WaitSource, Reason: v.Reason})
	}
}

// attemptLost reports an attempt that ended after another attempt was decisive.
func (r *reporter) attemptLost(f *facts, a *Attempt) {
	f.spans.attemptEnded(f, a, instruments.DecisionLost)
	if r.metrics != nil {
		r.metrics.attemptLost(f, a)
	}
	if r.observed() {
		r.observers.observe(f, &Event{Kind: AttemptEnd, Attempt: *a})
	}
}

// hedgeJudged reports the decision about a hedge that was due. That the budget of hedges refuses one is not logged, because no call
// fails for it.
func (r *reporter) hedgeJudged(f *facts, v verdict, now time.Time) {
	switch {
	case v.retries():
		r.logger.hedging(f, v.Wait)
	case !is(v.Reason, ErrBudgetExhausted):
	case isThrottled(f.budget):
		r.budgetRefused(f, now)
	default:
		r.metrics.budgetRefused(f, hedgesBudget)
	}
}

// budgetRefused reports that the method's budget refused a retry, or a hedge.
func (r *reporter) budgetRefused(f *facts, now time.Time) {
	r.logger.budgetRefused(f, now)
	r.metrics.budgetRefused(f, f.policy.budgetScope)
}

// retrySent reports that an attempt after the first is sent.
func (r *reporter) retrySent(f *facts, a *attempt) {
	if !a.source.isHedge() {
		r.logger.budgetAllows(f, a.start)
	}
	if r.metrics != nil {
		r.metrics.retrySent(f, a)
	}
}

// waitStarted reports that a call waits before its next attempt, while no other is in flight.
func (r *reporter) waitStarted(f *facts, next int, v verdict, now time.Time) {
	f.spans.waitStarted(f, r.tracer, next, v, now)
}

// waitEnded reports that the next attempt is about to start.
func (r *reporter) waitEnded(f *facts) { f.spans.waitEnded() }

// waitStopped reports why a call ends before the attempt that was decided on.
func (r *reporter) waitStopped(f *facts, reason error) {
	if is(reason, ErrBudgetExhausted) {
		r.budgetRefused(f, time.Now())
	}
	if f.spans != nil {
		f.spans.waitStopped(reason)
	}
}

// callSucceeded reports the attempt that succeeded, and with it the call.
func (r *reporter) callSucceeded(f *facts, h *history, made int, a *attempt, header metadata.MD) {
	if f.spans != nil || r.observed() {
		now := time.Now()
		var ended Attempt
		a.describe(&ended, nil, header, now)
		f.spans.attemptEnded(f, &ended, instruments.DecisionSuccess)
		if r.observed() {
			var all []Attempt
			if !h.isEmpty() {
				all = h.all(ended)
			}
			r.observers.observe(f, &Event{Kind: AttemptEnd, Attempt: ended})
			r.observers.observe(f, &Event{Kind: CallEnd, Attempt: ended, Elapsed: instantOf(now).Sub(f.start), Attempts: all,
				start: f.start.timeFrom(now), made: made})
		}
	}
	if r.metrics != nil {
		r.metrics.callSucceeded(f, h, a)
	}
	f.spans.end(f, made, int(a.number), nil, nil)
}

// A callFailure describes the end of a call in which no attempt succeeded.
type callFailure struct {
	last    Attempt // the attempt that failed last; a copy, so that the call can stay on the stack
	verdict verdict // about it
	err     error   // returned to the caller
	gaveUp  *Error  // the same error; nil if err is returned as it came
	when    time.Time
}

// callFailed reports a call's failure. It is the call's last report.
func (r *reporter) callFailed(f *facts, h *history, made int, end *callFailure) {
	if end.gaveUp != nil {
		r.logger.gaveUp(f, &end.last, end.gaveUp, end.when)
	}
	if r.observed() {
		e := Event{Kind: CallEnd, Attempt: end.last, Err: end.err, Reason: end.verdict.Reason, Wait: end.verdict.Wait,
			WaitSource: end.verdict.WaitSource, Elapsed: instantOf(end.when).Sub(f.start), start: f.start.timeFrom(end.when), made: made}
		if made > 1 {
			e.Attempts = h.all()
		}
		r.observers.observe(f, &e)
	}
	if r.metrics != nil {
		r.metrics.callFailed(f, end)
	}
	f.spans.end(f, made, end.last.Number, end.err, end.verdict.Reason)
}

// callCrashed reports the end of a call in which something panicked.
func (r *reporter) callCrashed(f *facts, made int) {
	f.spans.end(f, made, 0, errPanicked, nil)
}
