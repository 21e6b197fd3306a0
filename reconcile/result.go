package reconcile

import (
	"errors"
	"sync"
	"time"

	ctrl "sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/grpcretry/grpcretry"
)

// Result turns an error into what a controller-runtime reconciler returns:
//
//   - nil stays nil;
//   - if a server named a wait, by pushback, RetryInfo, or Kubernetes' Retry-After, the key returns after
//     that wait (RequeueAfter). RetryInfo and Retry-After are minimums, to which up to 20% is added;
//   - [grpcretry.Permanent] becomes a TerminalError: the key returns when its object changes;
//   - any other error is returned as it is, and the queue's rate limiter says when the key returns. So is
//     an error that names no wait, by a pushback of 0 or "do not retry", or a longer one than the default MaxServerDelay, 5 minutes.
//
// Pushback is found in an [*grpcretry.Error] only, because gRPC's own errors carry no trailers.
//
// Result is for reconcilers without a [RateLimiter]. With one, use [RateLimiter.Result] or [Wrap]: a
// RequeueAfter makes the controller call Forget, which would count as a success.
func Result(err error) (ctrl.Result, error) {
	if err == nil {
		return ctrl.Result{}, nil
	}
	reading := read(defaults(), defaultName, err, time.Now())
	reading.named = reading.named && reading.wait > 0 // after a RequeueAfter, nothing would slow repeats down
	return reading.result(err)
}

const defaultName = "/reconcile"

// defaults returns a Retrier with the default policy.
var defaults = sync.OnceValue(func() *grpcretry.Retrier {
	r, err := grpcretry.New()
	if err != nil {
		panic(err) //nolint:forbidigo // cannot happen without options
	}
	return r
})

func (r reading) result(err error) (ctrl.Result, error) {
	switch {
	case isTerminal(err):
		return ctrl.Result{}, err
	case r.terminal:
		return ctrl.Result{}, ctrl.TerminalError(err)
	case r.named:
		return ctrl.Result{RequeueAfter: max(1, r.wait)}, nil
	default:
		return ctrl.Result{}, err
	}
}

func isTerminal(err error) bool { return errors.Is(err, ctrl.TerminalError(nil)) }

// Result is the function [Result] with the policy of the limiter's name, for a reconciler whose
// controller uses the limiter. It also reports the failure to the limiter: the budget sees it once, the
// next When returns the wait for this error, and the Forget after a RequeueAfter is not a success. If
// the budget does not pay for a retry after the wait that the server named, RequeueAfter is longer: the
// key waits in the slow lane. A nil err is not reported, because the controller then calls Forget.
//
// In a loop of your own, do what controller-runtime does: AddRateLimited after an error that is not
// terminal, and otherwise Forget, followed by AddAfter if RequeueAfter is not 0.
func (l *RateLimiter[T]) Result(item T, err error) (ctrl.Result, error) {
	if err == nil {
		return ctrl.Result{}, nil
	}
	reading := read(l.retrier, l.name, err, time.Now())
	reported := err
	if isTerminal(err) && !reading.terminal {
		reported = grpcretry.Permanent(err)
	}
	v := l.fail(item, reported, !reading.terminal && !isTerminal(err))
	result, err := reading.result(err)
	switch {
	case isTerminal(err): // the controller calls neither When nor Forget
		l.Drop(item)
	case result.RequeueAfter > 0:
		result.RequeueAfter = max(1, v.wait)
		l.expectForget(item, result.RequeueAfter)
	}
	return result, err
}

// expectForget has the next Forget leave the item's failures as they are, and remembers them until the item has returned
// after a wait.
func (l *RateLimiter[T]) expectForget(item T, wait time.Duration) {
	now := time.Now()
	k := l.lockKey(item, now)
	defer k.mu.Unlock()
	k.decided, k.quiet = false, true
	l.mu.Lock()
	defer l.mu.Unlock()
	if returns := now.Add(wait); k.due.Before(returns) {
		k.due = returns
	}
}
