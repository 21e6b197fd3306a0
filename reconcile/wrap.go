package reconcile

import (
	"context"
	"errors"
	"math/rand/v2"
	"time"

	"golang.org/x/time/rate"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	ctrl "sigs.k8s.io/controller-runtime/pkg/reconcile"
)

// Guards limit the work of a reconciler, whether it succeeds or fails. The third guard, the budget, is the
// limiter's.
type Guards struct {
	// InFlight is the number of keys that are worked on at the same time; 0 or less means no limit but that
	// of the controller, MaxConcurrentReconciles.
	InFlight int
	// Rate limits how many keys are started per second. Nil means no limit. A limiter may be shared, by
	// several controllers or with other users of the backend.
	Rate *rate.Limiter
}

// Wrap returns a reconciler that calls inner within the guards, and turns its errors into Results with
// [RateLimiter.Result]. The limiter must be the controller's, in controller.Options. It counts the
// limiter's work in flight and measures the waits for the rate.
//
// A key waits for its turn as long as its context allows. If the context has a deadline that is too near
// for the rate, the key is not started: it returns when its turn would have come. If the deadline passes while
// InFlight keys are worked on, it returns a second later. If the rate has no turn within a day, because its
// limit or burst is 0, the key returns after a minute, whatever the context. Up to a fifth is added to these
// waits, because many keys may wait for the same turn. None of this is a failure.
//
// The deprecated Result.Requeue makes the controller call AddRateLimited, which counts as a failure: a reconciler that has
// not failed returns a short RequeueAfter instead.
func Wrap[T comparable](limiter *RateLimiter[T], inner ctrl.TypedReconciler[T], g Guards) ctrl.TypedReconciler[T] {
	r := &guarded[T]{limiter: limiter, inner: inner, rate: g.Rate}
	if g.InFlight > 0 {
		r.slots = make(chan struct{}, g.InFlight)
	}
	if limiter.meter != nil {
		limiter.meter.wrapped.Store(true)
	}
	return r
}

type guarded[T comparable] struct {
	limiter *RateLimiter[T]
	inner   ctrl.TypedReconciler[T]
	rate    *rate.Limiter
	slots   chan struct{} // nil without a limit
}

// Reconcile implements [ctrl.TypedReconciler].
func (r *guarded[T]) Reconcile(ctx context.Context, item T) (ctrl.Result, error) {
	if r.slots != nil {
		select {
		case r.slots <- struct{}{}:
			defer func() { <-r.slots }()
		case <-ctx.Done():
			if errors.Is(ctx.Err(), context.DeadlineExceeded) {
				return r.notYet(item, spread(time.Second))
			}
			return r.limiter.Result(item, notBegun(ctx))
		}
	}
	if later, err := r.waitForRate(ctx); err != nil {
		return r.limiter.Result(item, err)
	} else if later > 0 {
		return r.notYet(item, later)
	}
	r.limiter.meter.working(1)
	defer r.limiter.meter.working(-1)
	result, err := r.inner.Reconcile(ctx, item)
	if err == nil {
		return result, nil
	}
	priority := result.Priority
	result, err = r.limiter.Result(item, err)
	result.Priority = priority
	return result, err
}

const (
	longestTurn = 24 * time.Hour // a turn that is further away is none: the rate is paused
	pausedFor   = time.Minute    // until the rate is looked at again
)

// notYet returns the Result of a key that was not started and has not failed.
func (r *guarded[T]) notYet(item T, later time.Duration) (ctrl.Result, error) {
	r.limiter.expectForget(item, later)
	return ctrl.Result{RequeueAfter: later}, nil
}

// spread adds up to 20%, so that keys do not return together.
func spread(d time.Duration) time.Duration { return d + time.Duration(rand.Int64N(int64(d)/5+1)) }

// waitForRate waits for the outbound rate. If the context's deadline is too near, or there is no turn, later
// is when to try again, spread, and nothing is taken from the rate.
func (r *guarded[T]) waitForRate(ctx context.Context) (later time.Duration, err error) {
	if r.rate == nil {
		return 0, nil
	}
	start := time.Now()
	turn := r.rate.ReserveN(start, 1)
	wait := turn.DelayFrom(start)
	never := !turn.OK() || wait > longestTurn
	if deadline, ok := ctx.Deadline(); never || ok && wait >= deadline.Sub(start) {
		turn.CancelAt(start)
		if never {
			wait = pausedFor
		}
		return spread(wait), nil
	}
	defer func() { r.limiter.meter.waitedForRate(ctx, time.Since(start)) }()
	if wait <= 0 {
		return 0, nil
	}
	timer := time.NewTimer(wait)
	defer timer.Stop()
	select {
	case <-timer.C:
		return 0, nil
	case <-ctx.Done():
		turn.Cancel()
		return 0, notBegun(ctx)
	}
}

// notBegun returns the error of a key whose context ended before its turn. It says nothing about the
// backend.
func notBegun(ctx context.Context) error {
	return judged{ctx.Err(), status.New(codes.Canceled, ctx.Err().Error())}
}
