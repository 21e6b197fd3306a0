package reconcile

import (
	"container/heap"
	"sync"
	"time"

	"github.com/grpcretry/grpcretry"
	"github.com/grpcretry/grpcretry/internal/drive"
)

// A key is an item that has failed since its last success. It is the budget of its own plan: it pays
// from the Retrier's budget as long as the item is allowed to, and keeps the charge for the item's
// next attempt, whoever decided on that attempt.
type key[T comparable] struct {
	limiter *RateLimiter[T]
	item    T

	mu        sync.Mutex
	gone      bool                          // removed from the limiter; another key may have taken its place
	plan      drive.Plan[grpcretry.Attempt] // the quick retries; nil before the first failure, and in the slow lane
	charged   grpcretry.Budget              // which paid for the next attempt; nil if none did
	failures  int                           // since the last success
	parkings  int                           // failures after which the item went to the slow lane
	limit     int                           // attempts that may be paid from the budget
	exhausted bool                          // the limit has refused the retry
	forwarded bool                          // the next attempt was brought forward
	decided   bool                          // the wait after the last failure is known, but When has not returned it
	quiet     bool                          // the next Forget follows a failure
	logged    byte                          // steps of the backoff that were logged

	// The rest is guarded by the limiter's mu.
	due     time.Time // of the next attempt
	slot    int64     // in the lane; noSlot if it has none
	slow    bool      // in the slow lane, even if that has no slots
	rests   time.Time // until when it is not to be brought forward, while resting
	resting int       // in the limiter's heap of resting keys; noPlace if it does not rest
	times   int       // parkings when it came to the slow lane
	place   int       // in the limiter's line; noPlace if it is not in it
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

// giveBack returns what was paid for an attempt that is not made.
func (k *key[T]) giveBack() {
	if b := k.charged; b != nil {
		k.charged = nil
		b.Deposit(grpcretry.Outcome{Attempt: 2, Result: grpcretry.Unsent})
	}
}

// Balance returns the retries that the key may make now: one that was paid for, or what is left in the
// Retrier's budget.
func (k *key[T]) Balance(now time.Time) float64 {
	switch k.exhausted = k.failures >= k.limit; {
	case k.exhausted:
		return 0
	case k.charged != nil:
		return 1
	default:
		return k.limiter.budget().Balance(now)
	}
}

// A line holds the keys that can be brought forward, as a heap. The key that has come to the slow lane the
// fewest times in a row comes first: otherwise keys that cannot succeed would come before those that can.
// Among equals it is the key that is due last, so that the lane stays full in the near future, and keys return
// from it even if nothing succeeds for a while.
type line[T comparable] []*key[T]

func (l line[T]) Len() int { return len(l) }
func (l line[T]) Less(i, j int) bool {
	if l[i].times != l[j].times {
		return l[i].times < l[j].times
	}
	return l[i].due.After(l[j].due)
}
func (l line[T]) Swap(i, j int) {
	l[i], l[j] = l[j], l[i]
	l[i].place, l[j].place = i, j
}
func (l *line[T]) Push(x any) {
	k := x.(*key[T])
	k.place = len(*l)
	*l = append(*l, k)
}
func (l *line[T]) Pop() any {
	last := (*l)[len(*l)-1]
	(*l)[len(*l)-1] = nil
	*l = (*l)[:len(*l)-1]
	last.place = noPlace
	return last
}

// noPlace is the place of a key that is not in a heap.
const noPlace = -1

// remove takes a key out of the line, if it is in it.
func (l *line[T]) remove(k *key[T]) {
	if k.place != noPlace {
		heap.Remove(l, k.place)
	}
}

// rests are the keys that are not to be brought forward for a while, as a heap.
type rests[T comparable] []*key[T]

func (r rests[T]) Len() int           { return len(r) }
func (r rests[T]) Less(i, j int) bool { return r[i].rests.Before(r[j].rests) }
func (r rests[T]) Swap(i, j int) {
	r[i], r[j] = r[j], r[i]
	r[i].resting, r[j].resting = i, j
}

func (r *rests[T]) Push(x any) {
	k := x.(*key[T])
	k.resting = len(*r)
	*r = append(*r, k)
}

func (r *rests[T]) Pop() any {
	last := len(*r) - 1
	k := (*r)[last]
	(*r)[last] = nil
	*r = (*r)[:last]
	k.resting = noPlace
	return k
}
