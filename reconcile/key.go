package reconcile

import (
	"sync"
	"time"

	"github.com/grpcretry/grpcretry"
)

// A key is an item that has failed since its last success. It is the budget of its own plan: it pays
// from the Retrier's budget as long as the item is allowed to, and keeps the charge for the item's
// next attempt, whoever decided on that attempt.
type key[T comparable] struct {
	limiter *RateLimiter[T]
	item    T

	mu        sync.Mutex
	gone      bool             // removed from the limiter; another key may have taken its place
	plan      *grpcretry.Plan  // the quick retries; nil before the first failure, and in the slow lane
	charged   grpcretry.Budget // which paid for the next attempt; nil if none did
	failures  int              // since the last success
	parkings  int              // failures after which the item went to the slow lane
	limit     int              // attempts that may be paid from the budget
	exhausted bool             // the limit has refused the retry
	forwarded bool             // the next attempt was brought forward
	decided   bool             // the wait after the last failure is known, but When has not returned it
	quiet     bool             // the next Forget follows a failure
	logged    byte             // steps of the backoff that were logged

	// The rest is guarded by the limiter's mu.
	due     time.Time // of the next attempt
	slot    int64     // in the lane; noSlot if it has none
	slow    bool      // in the slow lane, even if that has no slots
	rests   time.Time // until when it is not to be brought forward, while resting
	resting int       // its place in the limiter's heap of resting keys, from 1; 0 if it does not rest
	waiting bool      // in the limiter's list of keys that can be brought forward
	earlier *key[T]   // in that list
	later   *key[T]
}

// Withdraw pays for a retry. It implements [grpcretry.Budget] for the key's plan.
func (k *key[T]) Withdraw(now time.Time) bool {
	k.exhausted = k.failures >= k.limit
	if k.exhausted {
		return false
	}
	return k.charged != nil || k.charge(now)
}

// charge pays for the next attempt.
func (k *key[T]) charge(now time.Time) bool {
	b := k.limiter.budget()
	if b.Withdraw(now) {
		k.charged = b
	}
	return k.charged != nil
}

// Deposit reports an attempt, as a first one if nothing was paid for it.
func (k *key[T]) Deposit(o grpcretry.Outcome) {
	b := k.charged
	k.charged = nil
	o.Attempt = max(2, o.Attempt)
	if b == nil {
		b = k.limiter.budget()
		o.Attempt = 1
	}
	b.Deposit(o)
}

// Refund returns what was paid for an attempt that is not made.
func (k *key[T]) Refund() {
	if b := k.charged; b != nil {
		k.charged = nil
		b.Refund()
	}
}

// Balance returns the retries left in the Retrier's budget.
func (k *key[T]) Balance(now time.Time) float64 { return k.limiter.budget().Balance(now) }

// A line holds the keys that can be brought forward, the one that has waited longest first.
type line[T comparable] struct{ first, last *key[T] }

func (l *line[T]) push(k *key[T]) {
	k.waiting = true
	k.earlier, k.later = l.last, nil
	if l.last == nil {
		l.first = k
	} else {
		l.last.later = k
	}
	l.last = k
}

func (l *line[T]) pushFront(k *key[T]) {
	k.waiting = true
	k.earlier, k.later = nil, l.first
	if l.first == nil {
		l.last = k
	} else {
		l.first.earlier = k
	}
	l.first = k
}

func (l *line[T]) remove(k *key[T]) {
	if !k.waiting {
		return
	}
	k.waiting = false
	if k.earlier == nil {
		l.first = k.later
	} else {
		k.earlier.later = k.later
	}
	if k.later == nil {
		l.last = k.earlier
	} else {
		k.later.earlier = k.earlier
	}
	k.earlier, k.later = nil, nil
}

// rests are the keys that are not to be brought forward for a while, as a heap.
type rests[T comparable] []*key[T]

func (r rests[T]) Len() int           { return len(r) }
func (r rests[T]) Less(i, j int) bool { return r[i].rests.Before(r[j].rests) }
func (r rests[T]) Swap(i, j int) {
	r[i], r[j] = r[j], r[i]
	r[i].resting, r[j].resting = i+1, j+1
}

func (r *rests[T]) Push(x any) {
	k := x.(*key[T])
	*r = append(*r, k)
	k.resting = len(*r)
}

func (r *rests[T]) Pop() any {
	last := len(*r) - 1
	k := (*r)[last]
	(*r)[last] = nil
	*r = (*r)[:last]
	k.resting = 0
	return k
}
