package grpcretry

import (
	"fmt"
	"slices"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
)

// Hedging sends another attempt before the previous one has failed, so that a slow response does
// not hold up the call (gRFC A6 #hedging-policy). The first success wins; the other attempts are
// cancelled, with [ErrHedgeLost] as their cause, and the call waits until they have ended. See
// [WithHedging].
type Hedging struct {
	// MaxAttempts limits the attempts of a call, including the first; at least 2. The
	// default is 2, which is one hedge.
	MaxAttempts int
	// Delay is how long to wait before each further attempt: [HedgeAfter] or
	// [HedgeAtQuantile]. It must be set.
	Delay HedgeDelay
	// NonFatalCodes are the status codes after which the next attempt is sent immediately
	// while the others go on; any other failure ends the call. nil means the codes of the
	// policy, see [WithCodes]; an empty list makes every failure fatal, as A6 does with
	// a policy that has none. A [WithClassifier] is asked first, as always.
	NonFatalCodes []codes.Code
	// Budget is the budget of hedges, in addition to that of the method: both must allow a hedge. An attempt that is sent when no other is in flight is a retry and spends
	// from the latter alone. A hedge's token is not returned when the hedge wins. nil means a
	// budget per Retrier and target, of 10% of the calls that were answered in the last second,
	// and one hedge that is kept for longer: so a client sends no hedge before ten calls were
	// answered. [Unlimited] turns it off.
	Budget Budget
	// AllMethodsAreSafe states that every method that the Retrier is used for may run twice at
	// the same time. Without it [New] rejects hedging for all methods: only somebody who names
	// a method can know.
	AllMethodsAreSafe bool
}

const defaultHedgedAttempts = 2

// WithHedging sends further attempts while the first is slow: unary calls and server
// streams. A server stream is decided by its first message or its final status. Only
// for methods that are safe to run twice at the same time: set it with [WithMethod] or
// on a single call. It is never on by default.
//
// A hedged call is not retried as others are: h.MaxAttempts replaces MaxAttempts, and after a
// failure with one of h.NonFatalCodes the next attempt is sent immediately, without a backoff,
// unless the server asks for a wait. If a server forbids more attempts, those in flight may still
// win. Each attempt after the first is paid from the budget. If the budget refuses, that attempt
// is not sent, and the budget is asked again after the delay, after twice the delay, and so on;
// this series is not restarted within a call. If h.Delay has no delay to give, the call is not
// hedged, but retried like any other.
//
// Two kinds of calls are not hedged either, but retried: those whose reply is not a pointer, so
// that no second reply can be made, and streams of methods with a client stream. [New] rejects
// the ones that it can know about, and [WithLogger] logs a warning, once for each method.
// [Disable], a narrower WithMaxAttempts(1) and [WithUnsentOnly] turn hedging off too.
//
// Below the interceptor the attempts of a call run at the same time, all but the first on
// goroutines of their own: interceptors chained there must be safe for that. Observers and
// classifiers are still called one at a time for each call, but not always on its goroutine. If
// one of them panics on another goroutine, the program ends; a panic on the caller's goroutine is
// passed on to the caller, after the other attempts have ended. A later WithHedging replaces an
// earlier one.
func WithHedging(h Hedging) CallOption {
	h.NonFatalCodes = slices.Clone(h.NonFatalCodes)
	return hedgingOption(h)
}

func hedgingOption(h Hedging) *callOption {
	o := newCallOption("WithHedging", h.check(), func(s *Policy) { s.setHedging(&h) })
	o.hedging, o.keep = &h, o.keepQuantile
	return o
}

func (h *Hedging) check() error {
	switch {
	case h.MaxAttempts != 0 && h.MaxAttempts < 2:
		return fmt.Errorf("MaxAttempts: %d attempts, want at least 2", h.MaxAttempts)
	case isNil(h.Delay):
		return fmt.Errorf("Delay is not set, want HedgeAfter or HedgeAtQuantile")
	}
	if err := checkSelf(h.Delay); err != nil {
		return fmt.Errorf("Delay: %w", err)
	}
	if h.Budget != nil {
		if err := checkBudget(h.Budget); err != nil {
			return fmt.Errorf("Budget: %w", err)
		}
	}
	if len(h.NonFatalCodes) > 0 {
		if err := checkCodes(h.NonFatalCodes); err != nil {
			return fmt.Errorf("NonFatalCodes: %w", err)
		}
	}
	return nil
}

// checkHedging rejects hedging for all methods, or for those that declare nothing, unless they are
// declared safe, and hedging for methods that are known to have a client stream.
func (o *policyOptions) checkHedging(fallback budgets) error {
	// Wider scopes are for other methods, too, and what is off now may be turned on later.
	own := func(l optionList) *Hedging {
		return new(policyOptions).resolve(fallback, &scopes{rankAll: {opts: l}}).Hedging
	}
	if h := own(o.all); h != nil && !h.AllMethodsAreSafe {
		return fmt.Errorf("grpcretry: WithHedging for all methods, without AllMethodsAreSafe: " +
			"name the methods that are safe to run twice with WithMethod")
	}
	if h := own(o.levels[levelUnknown]); h != nil && !h.AllMethodsAreSafe {
		return fmt.Errorf("grpcretry: WithHedging in WithIdempotencyLevel IDEMPOTENCY_UNKNOWN, without AllMethodsAreSafe: " +
			"name the methods that are safe to run twice with WithMethod")
	}
	for pattern, opts := range o.patterns {
		if own(opts) != nil && sendsStream(pattern) {
			return fmt.Errorf("grpcretry: WithHedging in WithMethod %s: "+
				"a method with a client stream cannot be hedged", pattern)
		}
	}
	return nil
}

// sendsStream reports whether the program knows "/pkg.Service/Method" as a method with a client
// stream.
func sendsStream(method string) bool {
	d := linkedMethod(method)
	return d != nil && d.IsStreamingClient()
}

// hedgingObstacle returns why a call cannot be hedged, "" if it can; desc is nil for a unary
// call, reply for a stream.
func hedgingObstacle(desc *grpc.StreamDesc, reply any) string {
	switch {
	case desc == nil && !canHedge(reply):
		return "no second reply can be made of its type"
	case desc != nil && desc.ClientStreams:
		return "it has a client stream"
	default:
		return ""
	}
}
