package reconcile

import (
	"container/heap"
	"context"
	"errors"
	"fmt"
	"maps"
	"math"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	"golang.org/x/time/rate"
	"k8s.io/client-go/util/workqueue"

	"github.com/grpcretry/grpcretry"
	"github.com/grpcretry/grpcretry/internal/drive"
	"github.com/grpcretry/grpcretry/internal/inside"
	"github.com/grpcretry/grpcretry/internal/reasons"
)

// A RateLimiter says when the failed items of a workqueue return. It implements
// [workqueue.TypedRateLimiter] and is safe for concurrent use.
//
// An item's first failure starts a plan with the Retrier's policy for the limiter's name,
// and its retries return after that plan's waits. When the plan ends, because the budget refuses,
// MaxAttempts attempts have failed in a row, the failure is not retryable, or the server forbids
// another attempt, the item goes to the slow lane, from which one item per second returns, see
// [SlowLane]. So in an outage, no more retries are due in any second than the slow lane's rate, rounded
// up, plus one, and what is left in the budget. An item never ends: it stays in the slow lane until it
// succeeds. An item that an event adds to the queue is tried immediately, and keeps its place in the slow
// lane if it fails.
//
// The first items that succeed after an outage earn budget for the others. If the limiter knows the
// queue, each success brings up to two items forward that wait in the slow lane, spread over the
// policy's first backoff. The budget pays for them, and gets its payment back if they succeed; only an
// item that takes the place of one for which nobody paid is free. An item that fails although it was brought
// forward rests for its backoff before it is brought forward again.
type RateLimiter[T comparable] struct {
	retrier *grpcretry.Retrier
	name    string
	config  *config
	meter   *meter
	log     *logger

	mu      sync.Mutex // a key's mu may be held when mu is locked, but not the other way round
	keys    map[T]*key[T]
	line    line[T]
	lane    lane
	resting rests[T]
	queue   adder[T] // nil if the limiter knows none
	swept   time.Time

	depth *depth[T]
}

// An adder is the method of a workqueue that brings an item forward.
type adder[T any] interface {
	AddAfter(item T, after time.Duration)
}

var _ workqueue.TypedRateLimiter[string] = (*RateLimiter[string])(nil)

// NewRateLimiter returns a rate limiter for [workqueue.NewTypedRateLimitingQueue], for
// controller-runtime's controller.Options, or for [NewQueue]. Each queue needs its own limiter, but
// limiters may share the Retrier. The name, such as "/reconcile/orders", finds the policy: options of r
// apply that were set with WithMethod("/reconcile/orders", ...) or WithMethod("/reconcile/", ...). A
// [grpcretry.Retrier.Update] applies to an item's later failures: its budget and MaxAttempts
// immediately, the rest as soon as its quick retries are over.
//
// With MaxAttempts 1, Disable or a dry run, all failed items go to the slow lane, none is brought forward, and the
// budget pays for nothing. MaxElapsed limits an item's quick retries. Patience, AttemptTimeout, UnsentOnly
// (also that of WithSafeMethods) and hedging have no meaning here.
//
// NewRateLimiter panics if [grpcretry.New] has not made r, or if the name or an option is invalid.
func NewRateLimiter[T comparable](r *grpcretry.Retrier, name string, opts ...Option) *RateLimiter[T] {
	r.Policy(name) // it panics if New has not made r
	c, err := newConfig(name, opts)
	if err != nil {
		panic(fmt.Errorf("grpcretry/reconcile: NewRateLimiter: %w", err)) //nolint:forbidigo // documented; the options are part of the program
	}
	l := &RateLimiter[T]{retrier: r, name: name, config: c, keys: map[T]*key[T]{}, log: newLogger(c.logger, name)}
	l.setRate(defaultRateNoQueue)
	l.meter = newMeter(l)
	return l
}

// Attach gives the limiter its queue, so that items can be brought forward from the slow lane. It is
// for queues that the program makes itself, such as controller-runtime's priority queue; [NewQueue]
// calls it. Call it before the queue is used. A later Attach replaces the queue.
func (l *RateLimiter[T]) Attach(q interface {
	AddAfter(item T, after time.Duration)
}) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.queue = q
	l.setRate(defaultRate)
}

// setRate sets the lane's rate to the configured one, or to a default.
func (l *RateLimiter[T]) setRate(otherwise rate.Limit) {
	r := l.config.slowLane.Rate
	if r == 0 {
		r = otherwise
	}
	if r != rate.Inf {
		l.lane.length = max(1, time.Duration(min(float64(time.Second)/float64(r), float64(longestSlot))))
	}
}

// budget returns the Retrier's budget.
func (l *RateLimiter[T]) budget() grpcretry.Budget {
	return inside.BudgetOf(l.retrier, l.name, l.config.target).(grpcretry.Budget)
}

// When reports that an item has failed, and returns the wait before the item is added again. If
// [RateLimiter.Failed] was called, that call's error counts; otherwise the failure counts as
// UNAVAILABLE.
func (l *RateLimiter[T]) When(item T) time.Duration {
	if wait, ok := l.take(item); ok {
		return wait
	}
	l.Failed(item, errUnknown)
	wait, _ := l.take(item)
	return wait
}

var errUnknown = errors.New("reconciliation failed")

// take returns the wait that was decided on, once.
func (l *RateLimiter[T]) take(item T) (time.Duration, bool) {
	k := l.lookUp(item)
	if k == nil {
		return 0, false
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	if !k.decided {
		return 0, false
	}
	k.decided = false
	return l.untilDue(k, time.Now()), true
}

// NumRequeues returns how often the item has failed since it last succeeded.
func (l *RateLimiter[T]) NumRequeues(item T) int {
	k := l.lookUp(item)
	if k == nil {
		return 0
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.failures
}

// Forget reports that an item has succeeded, which earns budget, and releases its memory. A loop that
// gives up on an item calls [RateLimiter.Drop] instead: Forget would report a success that never was.
func (l *RateLimiter[T]) Forget(item T) {
	defer l.sweep(time.Now())
	k := l.lookUp(item)
	if k == nil {
		l.budget().Deposit(grpcretry.Outcome{Attempt: 1, Result: grpcretry.Succeeded})
		l.bringForward(false)
		return
	}
	k.mu.Lock()
	switch {
	case k.gone:
		k.mu.Unlock()
		return
	case k.quiet:
		k.quiet = false
		if k.failures == 0 {
			l.remove(k)
		}
		k.mu.Unlock()
		return
	case k.decided: // Failed, and then given up
		k.mu.Unlock()
		l.Drop(item)
		return
	}
	l.remove(k)
	unpaid := k.plan == nil && k.charged == nil
	k.succeed(time.Now())
	k.mu.Unlock()
	l.bringForward(unpaid)
}

// succeed reports the attempt that has ended. The caller holds mu.
func (k *key[T]) succeed(now time.Time) {
	if k.plan == nil {
		k.Deposit(grpcretry.Outcome{Attempt: 1, Result: grpcretry.Succeeded})
		return
	}
	k.plan.Due(now)
	a, _ := k.plan.Sent(now)
	k.plan.Ended(a, now, 0)
}

// Drop releases an item's memory without a success: the program has given it up, or its object is
// gone. What was paid for its next attempt is refunded.
func (l *RateLimiter[T]) Drop(item T) {
	k := l.lookUp(item)
	if k == nil {
		return
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	l.remove(k)
	k.giveBack()
}

// Failed reports why an item has failed, so that the error decides the wait: the backoff for its code,
// or what a server asks for. Call it before AddRateLimited, whose When returns the wait. A
// nil err does nothing. The error's status code decides whether the failure is retryable;
// an error without one is UNAVAILABLE, and Kubernetes' Retry-After is a RetryInfo.
func (l *RateLimiter[T]) Failed(item T, err error) {
	if err != nil {
		l.fail(item, err, true)
	}
}

// A verdict is what follows a failure.
type verdict struct {
	wait   time.Duration
	reason string
}

// fail reports an attempt that has failed; returns is false if the item is then dropped.
func (l *RateLimiter[T]) fail(item T, err error, returns bool) verdict {
	now := time.Now()
	k := l.lockKey(item, now)
	defer k.mu.Unlock()
	k.failures++
	k.limit = l.retrier.Policy(l.name).MaxAttempts
	early := k.failures > 1 && l.untilDue(k, now) > 0
	judged := false
	defer func() {
		if !judged { // a Classifier or budget has panicked; a controller recovers and then calls When
			l.park(k, serverWait{}, now, early)
			k.forwarded, k.decided, k.quiet = false, true, false
		}
	}()
	step, hint := k.attempt(err, now)
	judged = true
	v := verdict{reason: hint.reason()}
	if step.End {
		v.reason = k.reasonFor(step.Reason)
		l.park(k, hint, now, early)
	} else {
		k.parkings = 0
		l.setDue(k, now.Add(max(0, k.plan.DueAt().Sub(now))))
	}
	k.forwarded, k.decided, k.quiet = false, true, false
	v.wait = l.untilDue(k, now)
	if returns {
		l.meter.failed(v)
	} else {
		v = verdict{reason: terminal}
	}
	l.log.failed(k.item, k.failures, &k.logged, v, err, now)
	return v
}

// terminal is the reason in log lines about a key that does not return by itself.
const terminal = "terminal"

// lockKey returns the item's key, locked. It is made if there is none.
func (l *RateLimiter[T]) lockKey(item T, now time.Time) *key[T] {
	for {
		l.sweep(now)
		l.mu.Lock()
		k := l.keys[item]
		if k == nil {
			k = &key[T]{limiter: l, item: item, slot: noSlot, place: noPlace, resting: noPlace, due: now}
			l.keys[item] = k
		}
		l.mu.Unlock()
		k.mu.Lock()
		if !k.gone {
			return k
		}
		k.mu.Unlock()
	}
}

// attempt reports a failed attempt to the plan. The caller holds mu.
func (k *key[T]) attempt(err error, now time.Time) (drive.Step, serverWait) {
	l := k.limiter
	if k.plan == nil {
		k.plan = drive.New[grpcretry.Attempt](context.Background(), l.retrier, l.name, l.config.target, now,
			alone(l.retrier, l.name, math.MaxInt32, k))
	}
	a, _ := k.plan.Sent(now)
	a.Err, a.Trailer = forEngine(err), trailerOf(err)
	step := k.plan.Ended(a, now, rand.Float64())
	if !step.Send && !step.End { // a key is paid for when it is put back, so that the queue never holds more than the budget allows
		step = k.plan.Due(k.plan.DueAt())
	}
	hint, hinted := grpcretry.PushbackFrom(a.Trailer, a.Err)
	return step, serverWait{hint, hinted}
}

// A serverWait is what a server has said about the next attempt, if given.
type serverWait struct {
	grpcretry.Pushback
	given bool
}

// reason is one of the values of AttrReason, for a retry that the budget paid.
func (w serverWait) reason() string {
	switch {
	case !w.given:
		return ReasonBackoff
	case w.Source == grpcretry.WaitRetryInfo:
		return ReasonRetryInfo
	default:
		return ReasonPushback
	}
}

// reasonFor returns a value of AttrReason, for the end of a plan.
func (k *key[T]) reasonFor(end error) string {
	switch {
	case errors.Is(end, grpcretry.ErrBudgetExhausted) && k.exhausted:
		return ReasonExhausted
	case errors.Is(end, grpcretry.ErrPushback):
		return ReasonServer
	case errors.Is(end, grpcretry.ErrNotRetryable):
		return ReasonNotRetryable
	default: // such as ReasonBudget and ReasonMaxElapsed
		return reasons.Of(end).Word
	}
}

// park sends a key to the slow lane. A key that failed early, because an event had added it before
// it was due, keeps its place: the queue returns it then in any case. The caller holds the key's mu.
func (l *RateLimiter[T]) park(k *key[T], hint serverWait, now time.Time, early bool) {
	k.plan = nil
	k.giveBack()
	if early {
		return
	}
	k.parkings++
	wait := l.config.slowLane.Backoff.Delay(k.parkings, 0, rand.Float64())
	asked := hint.Delay
	if limit := l.retrier.Policy(l.name).MaxServerDelay; limit >= 0 {
		asked = min(asked, limit)
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.leaveLane(k)
	k.slow, k.times = true, k.parkings
	k.slot, k.due = l.lane.book(now, now.Add(max(wait, asked)), rand.Float64())
	switch {
	case k.forwarded || hint.Stop:
		l.rest(k, now.Add(max(wait, asked)))
	case hint.given:
		l.rest(k, now.Add(asked))
	default:
		heap.Push(&l.line, k)
	}
}

// rest keeps a key from being brought forward for a while. The caller holds l.mu.
func (l *RateLimiter[T]) rest(k *key[T], until time.Time) {
	k.rests = until
	heap.Push(&l.resting, k)
}

func (l *RateLimiter[T]) setDue(k *key[T], due time.Time) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.leaveLane(k)
	k.due = due
}

// leaveLane gives up the key's place in the slow lane, if it has one. The caller holds l.mu.
func (l *RateLimiter[T]) leaveLane(k *key[T]) {
	l.line.remove(k)
	l.lane.release(k.slot)
	if k.resting != noPlace {
		heap.Remove(&l.resting, k.resting)
	}
	k.slot, k.slow = noSlot, false
}

func (l *RateLimiter[T]) untilDue(k *key[T], now time.Time) time.Duration {
	l.mu.Lock()
	defer l.mu.Unlock()
	return max(0, k.due.Sub(now))
}

func (l *RateLimiter[T]) lookUp(item T) *key[T] {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.keys[item]
}

// parked returns the number of keys that wait in the slow lane. The caller holds mu.
func (l *RateLimiter[T]) parked(now time.Time) (n int64) {
	for _, k := range l.keys {
		if k.slow && k.due.After(now) {
			n++
		}
	}
	return n
}

// remove forgets a key. The caller holds the key's mu.
func (l *RateLimiter[T]) remove(k *key[T]) {
	l.mu.Lock()
	defer l.mu.Unlock()
	k.gone = true
	l.leaveLane(k)
	if l.keys[k.item] == k {
		delete(l.keys, k.item)
	}
}

// bringForward lets keys leave the slow lane, because the backend has answered and the budget pays
// for them again. If replace is true, a key has left the slow lane for which nobody paid, and the next
// takes its place for nothing: otherwise an outage would end no faster than the lane's rate lets the first
// keys earn.
func (l *RateLimiter[T]) bringForward(replace bool) {
	if p := l.retrier.Policy(l.name); p.MaxAttempts <= 1 || inside.IsDryRun(p) { // retries are off
		return
	}
	now := time.Now()
	for range forwardedPerSuccess {
		k, queue := l.nextInLine(now)
		if k == nil {
			l.moveUp(now)
			continue
		}
		if wait, ok := k.forward(now, replace); ok {
			l.meter.forwarded()
			queue.AddAfter(k.item, wait)
		}
		replace = false
	}
}

// moveUp moves a random resting key to an earlier free slot after its rest. Its slot may date from a
// time when thousands of keys were ahead of it.
func (l *RateLimiter[T]) moveUp(now time.Time) {
	l.mu.Lock()
	queue := l.queue
	if queue == nil || len(l.resting) == 0 {
		l.mu.Unlock()
		return
	}
	k := l.resting[rand.IntN(len(l.resting))]
	slot, at := l.lane.book(now, k.rests, rand.Float64())
	if !at.Before(k.due) {
		l.lane.release(slot)
		l.mu.Unlock()
		return
	}
	l.lane.release(k.slot)
	k.slot, k.due = slot, at
	l.mu.Unlock()
	queue.AddAfter(k.item, max(1, at.Sub(now)))
}

// nextInLine takes the first key out of the line. Keys that are due anyway are passed over. It returns nil if
// there is none, or the limiter knows no queue.
func (l *RateLimiter[T]) nextInLine(now time.Time) (*key[T], adder[T]) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for len(l.resting) > 0 && !l.resting[0].rests.After(now) {
		heap.Push(&l.line, heap.Pop(&l.resting).(*key[T]))
	}
	for l.queue != nil && len(l.line) > 0 {
		if k := heap.Pop(&l.line).(*key[T]); k.due.After(now) {
			return k, l.queue
		}
	}
	return nil, nil
}

// forward pays for a key's next attempt, unless that is free; it is to be made after wait. If the budget
// does not pay, the key keeps its place.
func (k *key[T]) forward(now time.Time, free bool) (wait time.Duration, ok bool) {
	l := k.limiter
	k.mu.Lock()
	defer k.mu.Unlock()
	if !l.stillWaits(k) {
		return 0, false
	}
	if !free && !k.charge(now) {
		l.mu.Lock()
		defer l.mu.Unlock()
		heap.Push(&l.line, k)
		return 0, false
	}
	wait = max(1, l.retrier.Policy(l.name).Backoff.Delay(1, 0, rand.Float64()))
	k.forwarded = true
	l.setDue(k, now.Add(wait))
	return wait, true
}

// stillWaits reports whether nothing has happened to a key since it was taken out of the line. The caller
// holds the key's mu.
func (l *RateLimiter[T]) stillWaits(k *key[T]) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return !k.gone && k.slow && k.place == noPlace && k.resting == noPlace
}

// sweepEvery is the shortest time between two searches for keys that the program has dropped.
const sweepEvery = time.Minute

// sweep forgets the keys that the program has dropped.
func (l *RateLimiter[T]) sweep(now time.Time) {
	for _, k := range l.dropped(now) {
		k.mu.Lock()
		if l.untilDue(k, now) == 0 && !k.gone {
			l.remove(k)
			k.giveBack()
		}
		k.mu.Unlock()
	}
}

// dropAll drops all keys. A key that is being worked on is then reported to the budget as one for which
// nobody has paid.
func (l *RateLimiter[T]) dropAll() {
	l.mu.Lock()
	items := slices.Collect(maps.Keys(l.keys))
	l.mu.Unlock()
	for _, item := range items {
		l.Drop(item)
	}
}

func (l *RateLimiter[T]) dropped(now time.Time) (dropped []*key[T]) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if now.Sub(l.swept) < min(sweepEvery, l.config.retention) {
		return nil
	}
	l.swept = now
	for _, k := range l.keys {
		if now.Sub(k.due) >= l.config.retention {
			dropped = append(dropped, k)
		}
	}
	return dropped
}
