package grpcretry

import (
	"context"
	"fmt"
	"time"

	"google.golang.org/grpc/codes"
)

// This file is the decision engine: after an attempt has failed it says whether there
// is another, and when. It reads no clock, draws no random number and does no I/O, so
// that a table can test every rule. Everything that retries drives it: no rule of it
// stands anywhere else.

// An Engine decides on retries without making any: it is what the interceptors of this
// package drive, for programs that drive it by themselves, such as a simulator. For
// gRPC calls use [New]. An Engine is never changed and safe for concurrent use, as far
// as the [Backoff] and the Classifier of its [Policy] are.
type Engine struct{ policy *policy }

// NewEngine makes the engine of a policy. Zero fields of p mean the defaults, as in
// [WithPolicy]; an error names the field that cannot be meant, and its value.
func NewEngine(p Policy) (*Engine, error) {
	if err := p.check(); err != nil {
		return nil, fmt.Errorf("grpcretry: NewEngine: %w", err)
	}
	o := WithPolicy(p).callOption()
	e := &Engine{resolve(PerTarget(newDefaultBudget), scope{scopeAll, []*callOption{o}})}
	if e.policy.hedged != nil {
		e.policy = e.policy.hedged
	}
	return e, nil
}

// Policy returns the policy with every default filled in.
func (e *Engine) Policy() Policy { return e.policy.public() }

// A History is what the engine knows of a call between two attempts. A new call has
// Start and Deadline, and after each verdict to retry [History.Retried] is to be called.
type History struct {
	Start    time.Time     // when the call began
	Deadline time.Time     // the caller's; zero without one
	Retry    int           // retries since the backoff was last restarted
	Prev     time.Duration // what the backoff gave last; 0 after a restart. Of a hedged call: see PutOff
	Stopped  error         // of a hedged call: why there is no further attempt, said to one before
	Paid     bool          // of a hedged call: the next attempt waits, and is paid for; another takes its place
}

// A Failure is an attempt that failed, and what only its loop can know of it. The
// engine reads Number, Err and Trailer of the Attempt; a Classifier may read all of it.
type Failure struct {
	Attempt   Attempt
	Made      int   // attempts of the call so far, where some are hedges; 0 means Attempt.Number
	TimedOut  bool  // the attempt timeout ended it
	Committed bool  // the application has seen something of it
	CtxErr    error // context.Cause of the caller's context if that has ended
	Closed    bool  // the ClientConn is closed
}

// A Verdict is what the engine says of a failure.
type Verdict struct {
	Retry      bool          // make another attempt after Wait; else stop, because of Reason
	Wait       time.Duration // never negative; of a stop the one that was refused, if it came to that
	WaitSource WaitSource    // WaitNone if it did not
	Reason     error         // to stop, as in [Error.Reason]; nil of a retry

	// Fatal, of a stop, ends a hedged call although other attempts of it are under way; any
	// other stop only lets no more be sent (gRFC A6 #hedging-policy).
	Fatal bool

	result    Result // what the budget heard
	untouched bool   // of a stop: the failure was never one to retry, whatever else stopped it
}

// Due decides on a hedge when the delay of the policy's [Hedging] has passed, at the time
// now, after made attempts were sent. A yes takes the retry from the budget, as in
// [Engine.Judge]; a no is no reason to end the attempts under way.
func (e *Engine) Due(b Budget, h *History, made int, now time.Time) Verdict {
	return e.policy.due(b, h, made, now)
}

// Judge decides on a failure at the time now, with u uniform in [0, 1). It tells the
// budget b of the failure and, for a retry that is not [History].Paid, takes it from there;
// where that retry is never sent, the caller gives it back with [Budget.Refund]. Nothing else is changed.
// Attempts that succeed are the caller's to tell the budget, with [Budget.Deposit].
// The ctx is only handed to the Classifier.
func (e *Engine) Judge(ctx context.Context, b Budget, h *History, f *Failure, now time.Time, u float64) Verdict {
	return e.policy.judge(ctx, b, h, f, now, u)
}

// AttemptTimeout is how long an attempt of the call may take before it is to be ended and
// judged as TimedOut; number is the attempt's, from 1. It is 0 for an attempt that may take
// all the time that is left: without a timeout in the policy, and for the last attempt of a
// call with a deadline.
func (e *Engine) AttemptTimeout(h *History, number int) time.Duration {
	return e.policy.attemptTimeout(number, !h.Deadline.IsZero())
}

func (p *policy) attemptTimeout(number int, limited bool) time.Duration {
	if limited && number >= p.MaxAttempts {
		return 0
	}
	return p.AttemptTimeout
}

// judge decides on f, at the time now, with u uniform in [0, 1). The first match ends it:
//
//  1. the caller's context has ended, or the ClientConn is closed: stop
//  2. the call is committed: stop
//  3. the server said not to retry: stop
//  4. the classifier, else the code set, says no: stop
//  5. MaxAttempts were made: stop
//  6. the wait: pushback, else RetryInfo, else the backoff of the code; longer than
//     MaxServerDelay: stop
//  7. the wait would pass the deadline or MaxElapsed: stop
//  8. the budget refuses: stop
//  9. retry after the wait, which the budget has paid for
func (p *policy) judge(ctx context.Context, b Budget, h *History, f *Failure, now time.Time, u float64) Verdict {
	hint, hinted := PushbackFrom(f.Attempt.Trailer, f.Attempt.Err)
	code := f.Attempt.Code()
	retryable := !f.isCallers() && p.retryable(ctx, f, code)

	result := Ignored
	if retryable || hint.Stop {
		result = Failed
	}
	untouched := !retryable && !(f.isCallers() && f.CtxErr != nil)
	b.Deposit(Outcome{Attempt: f.Attempt.Number, Result: result})

	if reason := p.decide(h, f, hint, retryable); reason != nil {
		fatal := untouched || f.CtxErr != nil || f.Committed // nothing of a closed connection is retryable
		return Verdict{Reason: reason, Fatal: fatal, result: result, untouched: untouched}
	}
	wait, source, reason := p.schedule(h, code, hint, hinted, now, u)
	if reason == nil && !h.Paid && !b.Withdraw(now) {
		reason = ErrBudgetExhausted
	}
	return Verdict{
		Retry:      reason == nil,
		Wait:       wait,
		WaitSource: source,
		Reason:     reason,
		result:     result,
		untouched:  untouched,
	}
}

// isCallers says whether the failure is the caller's own doing: the CANCELED or
// DEADLINE_EXCEEDED of a context that has ended, or a closed connection.
func (f *Failure) isCallers() bool {
	return f.Closed || f.CtxErr != nil && isContextEnd(f.Attempt.Err)
}

// decide answers whether the failure may be retried at all: nil, or why not.
func (p *policy) decide(h *History, f *Failure, hint Pushback, retryable bool) error {
	switch {
	case f.CtxErr != nil:
		return f.CtxErr
	case f.Closed:
		return ErrConnClosed
	case f.Committed:
		return ErrCommitted
	case hint.Stop:
		return ErrPushback
	case !retryable:
		return ErrNotRetryable
	case h.Stopped != nil:
		return h.Stopped
	case max(f.Made, f.Attempt.Number) >= p.MaxAttempts:
		return ErrAttemptsExhausted
	default:
		return nil
	}
}

// schedule answers when the next attempt may start, and whether that is in time.
func (p *policy) schedule(h *History, code codes.Code, hint Pushback, hinted bool, now time.Time, u float64) (time.Duration, WaitSource, error) {
	wait, source := time.Duration(0), WaitBackoff
	switch {
	case hinted && p.MaxServerDelay >= 0 && hint.Delay > p.MaxServerDelay:
		return hint.Delay, hint.Source, ErrPushback
	case hinted && hint.Source == WaitRetryInfo:
		// Spread: the server told every client the same.
		wait, source = max(hint.Delay, duration(float64(hint.Delay)*(1+0.2*unit(u)))), WaitRetryInfo
	case hinted:
		wait, source = hint.Delay, WaitPushback
	case p.hedges:
		source = WaitNonFatal // the next attempt is due at once
	default:
		wait = nextBackoff(p.backoff(code), h.Retry+1, h.Prev, u)
	}
	if !h.Deadline.IsZero() && wait >= h.Deadline.Sub(now) {
		return wait, source, ErrDeadline
	}
	if p.MaxElapsed > 0 && wait >= p.MaxElapsed-now.Sub(h.Start) {
		return wait, source, ErrMaxElapsed
	}
	return wait, source, nil
}

// due decides on a hedge when its delay has passed, made being the attempts sent before it.
func (p *policy) due(b Budget, h *History, made int, now time.Time) Verdict {
	v := Verdict{WaitSource: WaitHedgeDelay}
	switch {
	case made >= p.MaxAttempts:
		v.Reason = ErrAttemptsExhausted
	case !h.Deadline.IsZero() && !now.Before(h.Deadline):
		v.Reason = ErrDeadline
	case p.MaxElapsed > 0 && now.Sub(h.Start) >= p.MaxElapsed:
		v.Reason = ErrMaxElapsed
	case !b.Withdraw(now):
		v.Reason = ErrBudgetExhausted
	default:
		v.Retry = true
	}
	return v
}

// backoff is the one for the code just seen: overload heals more slowly than a blip.
func (p *policy) backoff(c codes.Code) Backoff {
	if c == codes.ResourceExhausted {
		return p.OverloadBackoff
	}
	return p.Backoff
}

// Retried takes a verdict to retry into the history. What a server says of the wait
// restarts the backoff (gRFC A6 #pushback).
func (h *History) Retried(v Verdict) {
	if v.WaitSource == WaitBackoff {
		h.Retry++
		h.Prev = v.Wait
	} else {
		h.Retry, h.Prev = 0, 0
	}
}

// PutOff is after what time a hedge is due again that is due, but cannot be sent now; delay
// is the one of the call. It is longer each time: there may be thousands of calls with a
// hedge that is due.
func (h *History) PutOff(delay time.Duration) time.Duration {
	h.Prev = max(2*h.Prev, delay, time.Millisecond)
	return h.Prev
}

// Refused takes a stop that is not fatal into the history of a hedged call. It is true if no
// attempt may be sent any more. After a lack of budget a hedge may, once it is due; and where
// the attempts are used up there is none that waits.
func (h *History) Refused(v Verdict) bool {
	if v.Reason == ErrBudgetExhausted || v.Reason == ErrAttemptsExhausted { //nolint:errorlint // the engine's own words
		return false
	}
	h.Stopped = v.Reason
	return true
}
