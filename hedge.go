package grpcretry

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"google.golang.org/grpc"

	"github.com/grpcretry/grpcretry/internal/layers"
	"github.com/grpcretry/grpcretry/internal/protos"
	"github.com/grpcretry/grpcretry/internal/quantile"
	"github.com/grpcretry/grpcretry/internal/replies"
)

// Hedging sends another attempt before the previous one has failed, so that a slow response does
// not hold up the call (gRFC A6 #hedging-policy). The first success wins; the other attempts are
// cancelled, with [ErrHedgeLost] as their cause, and the call waits until they have ended. See
// [WithHedging].
type Hedging struct {
	// Delay is how long to wait before each further attempt: [HedgeAfter] or
	// [HedgeAtQuantile]. It must be set.
	Delay HedgeDelay
	// Budget is the budget that hedges spend from, and nothing else does. An attempt that is sent
	// when no other is in flight is a retry, and spends from the method's budget. A hedge's token
	// is not returned when the hedge wins. While a [NewThrottle] of the method refuses retries, it
	// refuses hedges as well. Do not use the method's own budget: it would receive each outcome twice. nil
	// means a budget per Retrier and target, of 10% of the calls of hedged methods that were answered in the last
	// second, plus a reserve of one hedge. The reserve is empty at the start, so a client sends its first hedge
	// after ten such calls. [Unlimited] turns it off.
	Budget Budget
	// AllMethodsAreSafe states that every method that the Retrier is used for may run twice at
	// the same time. Without it [New] rejects hedging for all methods: only somebody who names
	// a method can know.
	AllMethodsAreSafe bool
}

// WithHedging sends further attempts while the first is slow: unary calls and server
// streams. A server stream is decided by its first message or its final status. Only
// for methods that are safe to run twice at the same time: set it with [WithMethod] or
// on a single call. It is never on by default.
//
// A hedged call is a retried call that also answers slowness. [WithMaxAttempts] counts all its
// attempts. A failure that is not retryable ends the call. After any other failure, the attempts
// in flight decide; when the last of them has failed, the call is retried like any other, with
// backoff, patience and budget. No attempt is sent before the time that the newest pushback named. If
// a server forbids more attempts, those in flight may still win. If the budget of hedges refuses a
// hedge, it is asked again after the delay, after twice the delay, and so on; this series is not
// restarted within a call. If h.Delay has no delay to give, the call is not hedged.
//
// Two kinds of calls are not hedged either, but retried: those whose reply is not a pointer, so
// that no second reply can be made, and streams of methods with a client stream. [New] rejects
// the ones that it can know about, and [WithLogger] logs a warning, once for each method.
// [Disable], a narrower WithMaxAttempts(1) and [WithUnsentOnly] turn hedging off too.
//
// Below the interceptor the attempts of a call run at the same time, all but the first on
// goroutines of their own: interceptors chained there must be safe for that. Observers and
// classifiers are still called one at a time for each call, but not always on its goroutine. If
// one of them panics, the panic continues on the call's own goroutine, after the other attempts have
// ended; if an interceptor below panics in a hedge, the program ends.
//
// A stream's Header waits for the attempt that wins, the first to receive a message. So do not hedge a method whose server sends
// its first message only once the client has seen the headers. If RecvMsg has not been called, Header receives that message itself,
// as the type that the linked proto names, and RecvMsg returns it later. It does not do so if the proto is not linked, or if
// a call option chooses the codec. No interceptor below may choose another codec, and none for other types may be
// registered as "proto".
//
// A later WithHedging replaces an earlier one.
func WithHedging(h Hedging) CallOption {
	return newCallOption("WithHedging", fieldHedging, Policy{Hedging: &h}, h.check())
}

func (h *Hedging) check() error {
	if isNil(h.Delay) {
		return fmt.Errorf("Delay is not set, want HedgeAfter or HedgeAtQuantile")
	}
	if err := checkSelf(h.Delay); err != nil {
		return fmt.Errorf("Delay: %w", err)
	}
	if h.Budget != nil {
		if err := checkGiven("budget", h.Budget); err != nil {
			return fmt.Errorf("Budget: %w", err)
		}
	}
	return nil
}

// checkHedging rejects hedging for all methods, or for those that declare nothing, unless they are
// declared safe, and hedging for methods that are known to have a client stream.
func (o *policyOptions) checkHedging() error {
	for _, scope := range slices.Sorted(maps.Keys(o.scopes)) {
		// Wider scopes are for other methods, too, and what is off now may be turned on later.
		own, method := o.scopes[scope], protos.Method(scope)
		switch {
		case !own.set.has(fieldHedging):
		case scope == scopeAll && !own.Hedging.AllMethodsAreSafe:
			return errors.New("grpcretry: WithHedging for all methods, without AllMethodsAreSafe: " +
				"name the methods that are safe to run twice with WithMethod")
		case scope == levelUnknown.String() && !own.Hedging.AllMethodsAreSafe:
			return errors.New("grpcretry: WithHedging in WithIdempotencyLevel IDEMPOTENCY_UNKNOWN, without AllMethodsAreSafe: " +
				"name the methods that are safe to run twice with WithMethod")
		case method != nil && method.IsStreamingClient():
			return fmt.Errorf("grpcretry: WithHedging in WithMethod %s: a method with a client stream cannot be hedged", scope)
		}
	}
	return nil
}

// mayHedge reports whether the policy allows hedges: one is sent while another attempt may be running.
func (p *policy) mayHedge() bool {
	return p.Hedging != nil && !p.UnsentOnly && !p.dryRun && p.MaxAttempts > 1
}

// hedgeBudget returns the budget that only hedges spend from; nil if the policy allows none.
func (p *policy) hedgeBudget() Budget {
	if !p.mayHedge() {
		return nil
	}
	return p.Hedging.Budget
}

// hedgingOf decides whether a call is hedged, and after which delay. It is not if it is made for a retry, because a
// hedge would be another attempt, or if there is no delay yet. The learner, if there is one, measures the first
// attempt in any case.
func (p *policy) hedgingOf(
	method string, worksFor *layers.Request, now func() time.Time,
) (delay time.Duration, learner HedgeDelay, hedged bool) {
	if !p.mayHedge() || worksFor.IsRetry() {
		return 0, nil, false
	}
	if d, fixed := p.Hedging.Delay.(hedgeAfter); fixed { // without two looks at the clock
		return time.Duration(d), nil, true
	}
	delay, hedged = p.Hedging.Delay.Delay(method, now())
	return delay, p.Hedging.Delay, hedged
}

// tryHedging chooses the hedged mode, unless the call cannot be hedged; desc is nil for a unary call, reply for a
// stream. Rules that hold for driven plans as well are in hedgingOf. Functions are never hedged.
func (c *call) tryHedging(desc *grpc.StreamDesc, reply any) {
	hedged := false
	switch {
	case desc == nil && !replies.IsPointer(reply):
		c.retrier.report.notHedged(&c.facts, "no second reply can be made of its type")
	case desc != nil && desc.ClientStreams:
		c.retrier.report.notHedged(&c.facts, "it has a client stream")
	default:
		c.hedgeBudget = c.policy.Hedging.Budget // open finds that of the target, under the call's guard
		c.delay, c.learner, hedged = c.policy.hedgingOf(c.method, c.worksFor, time.Now)
	}
	if hedged {
		c.mode = modeHedged
	}
}

// A HedgeDelay says when a hedge is due. Most programs need [HedgeAfter] or [HedgeAtQuantile];
// others may be written, such as a switch around one of those, and must be safe for concurrent
// use. One HedgeDelay may serve any number of methods and Retriers.
type HedgeDelay interface {
	// Delay returns how long a call to method, "/pkg.Service/Method", that starts at the time now
	// waits without a success before it sends its next attempt; d is at least 0, and holds for all
	// attempts of the call. If ok is false, the call is not hedged. If it panics, the call has not begun, and its
	// OnFinish does not run.
	Delay(method string, now time.Time) (d time.Duration, ok bool)
	// Answered receives how long the first attempt of a call took to succeed, also if the call
	// was not hedged because there was no delay. If lost, the attempt was cancelled after that
	// time, because another had won: it would have taken longer. For a stream it is the
	// time to the first message, from the stream's start, also if the application asks for it later. It runs at
	// the end of every such call.
	Answered(method string, took time.Duration, lost bool, now time.Time)
}

// measure reports to learner, unless that is nil, how long a call's first attempt took; lost
// means that another attempt had won.
func (a *attempt) measure(learner HedgeDelay, lost bool) {
	if learner == nil || a.number > 1 {
		return
	}
	now := time.Now()
	learner.Answered(a.method, instantOf(now).Sub(a.start), lost, now)
}

// HedgeAfter sends a hedge after each d without a success; with 0 all attempts are sent
// immediately. [New] rejects a negative d.
func HedgeAfter(d time.Duration) HedgeDelay { return hedgeAfter(d) }

type hedgeAfter time.Duration

func (d hedgeAfter) Delay(string, time.Time) (time.Duration, bool)   { return time.Duration(d), true }
func (d hedgeAfter) Answered(string, time.Duration, bool, time.Time) {}

// String describes the delay to readers of a policy.
func (d hedgeAfter) String() string { return "after " + time.Duration(d).String() }

func (d hedgeAfter) check() error {
	if d < 0 {
		return fmt.Errorf("HedgeAfter: %v is negative", time.Duration(d))
	}
	return nil
}

// HedgeAtQuantile returns a delay that follows the latency of each method: a hedge is sent when a
// call takes longer than the q-quantile of the method's latencies in the last 60 to 70 seconds. With q =
// 0.95, about one call in twenty is hedged. q is between 0 and 1, both excluded. The delay is kept
// within [atLeast, atMost], both at least 0; an atMost of 0 means no upper limit. [New] rejects
// other values. The HedgeDelay is safe for concurrent use.
//
// Only complete responses to first attempts are measured. First attempts that lost to a hedge
// count as slower than all of those, without a value. If they were left out, the slow calls would
// disappear from the measurement, and the delay would sink from minute to minute. There is no
// hedge until that time has 5/(1-q) first attempts, at least 50: that is 100 for q = 0.95,
// and 500 for q = 0.99. If more than 1-q of them lost, the delay is the longest latency measured.
//
// The delay is the exact quantile or up to 5% more, never less, so that at most 1-q of the calls
// are hedged while latencies are stable. This holds for latencies from 10 µs to 100 s; shorter and
// longer ones count as those. The delay is computed at most once a second for each method.
//
// One HedgeAtQuantile uses about 10 KiB for each method. It measures at most 1000 methods; others
// are not hedged. It does not distinguish targets: if your backends differ in latency, use one for
// each.
func HedgeAtQuantile(q float64, atLeast, atMost time.Duration) HedgeDelay {
	return hedgeQuantile{quantile.New(quantile.Settings{Q: q, AtLeast: atLeast, AtMost: atMost})}
}

type hedgeQuantile struct{ *quantile.Estimator }

func (h hedgeQuantile) check() error {
	if err := h.Check(); err != nil {
		return fmt.Errorf("HedgeAtQuantile: %w", err)
	}
	return nil
}

// isSameQuantile reports whether both delays are quantiles with the same settings.
func isSameQuantile(a, b HedgeDelay) bool {
	one, ok := a.(hedgeQuantile)
	other, okToo := b.(hedgeQuantile)
	return ok && okToo && one.Settings == other.Settings
}
