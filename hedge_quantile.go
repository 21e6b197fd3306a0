package grpcretry

import (
	"fmt"
	"math"
	"sync"
	"sync/atomic"
	"time"
)

// HedgeAtQuantile returns a delay that follows the latency of each method: a hedge is sent when a
// call takes longer than the q-quantile of the method's latencies in the last minute. With q =
// 0.95, about one call in twenty is hedged. q is between 0 and 1, both excluded. The delay is kept
// within [atLeast, atMost], both at least 0; an atMost of 0 means no upper limit. [New] rejects
// other values. The HedgeDelay is safe for concurrent use.
//
// Only complete responses to first attempts are measured. First attempts that lost to a hedge
// count as slower than all of those, without a value. If they were left out, the slow calls would
// disappear from the measurement, and the delay would sink from minute to minute. There is no
// hedge until the last minute has 5/(1-q) first attempts, at least 50: that is 100 for q = 0.95,
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
	return &hedgeQuantile{q: q, atLeast: atLeast, atMost: atMost}
}

const (
	quantileSlices  = 7                // the current slice, and those of the minute before it
	quantileSlice   = 10 * time.Second // the length of a slice
	quantileRefresh = time.Second      // the age at which a delay is computed again
	quantileMethods = 1000             // the most methods that are measured

	shortestLatency = 10 * time.Microsecond
	latencyBuckets  = 332            // from shortestLatency to over 100 s
	latencyStep     = 1.05           // the growth from one bucket to the next
	lostBucket      = latencyBuckets // the bucket for first attempts that lost
)

type hedgeQuantile struct {
	q               float64
	atLeast, atMost time.Duration

	methods sync.Map     // string → *latencies
	known   atomic.Int64 // the number of methods
}

// String describes the delay to readers of a policy.
func (h *hedgeQuantile) String() string {
	if h.atMost == 0 {
		return fmt.Sprintf("at the %v quantile of the last minute, at least %v", h.q, h.atLeast)
	}
	return fmt.Sprintf("at the %v quantile of the last minute, from %v to %v", h.q, h.atLeast, h.atMost)
}

func (h *hedgeQuantile) check() error {
	switch {
	case !(h.q > 0 && h.q < 1):
		return fmt.Errorf("HedgeAtQuantile: q is %v, want between 0 and 1", h.q)
	case h.atLeast < 0 || h.atMost < 0:
		return fmt.Errorf("HedgeAtQuantile: bounds %v and %v must not be negative", h.atLeast, h.atMost)
	case h.atMost != 0 && h.atMost < h.atLeast:
		return fmt.Errorf("HedgeAtQuantile: upper bound %v is below the lower bound %v", h.atMost, h.atLeast)
	}
	return nil
}

// keepQuantile returns the option with the quantile of an earlier one, which has measured latencies,
// if both have the same settings; otherwise nil.
func (o *callOption) keepQuantile(earlier *callOption) *callOption {
	if earlier.hedging == nil {
		return nil
	}
	own, _ := o.hedging.Delay.(*hedgeQuantile)
	known, _ := earlier.hedging.Delay.(*hedgeQuantile)
	if own == nil || known == nil || own.q != known.q || own.atLeast != known.atLeast || own.atMost != known.atMost {
		return nil
	}
	hedging := *o.hedging
	hedging.Delay = known
	return hedgingOption(hedging)
}

// Delay implements [HedgeDelay].
func (h *hedgeQuantile) Delay(method string, now time.Time) (time.Duration, bool) {
	l := h.latencies(method)
	if l == nil {
		return 0, false
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if !l.computed.IsZero() && now.Sub(l.computed) < quantileRefresh && !now.Before(l.computed) {
		return l.delay, l.enough
	}
	l.computed = now
	l.delay, l.enough = l.quantile(h.q, now)
	l.delay = max(l.delay, h.atLeast)
	if h.atMost > 0 {
		l.delay = min(l.delay, h.atMost)
	}
	return l.delay, l.enough
}

// Answered implements [HedgeDelay].
func (h *hedgeQuantile) Answered(method string, took time.Duration, lost bool, now time.Time) {
	l := h.latencies(method)
	if l == nil {
		return
	}
	bucket := lostBucket
	if !lost {
		bucket = latencyBucket(took)
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.slice(now)[bucket]++
}

// latencies returns the latencies of a method; nil if there are too many methods.
func (h *hedgeQuantile) latencies(method string) *latencies {
	if l, ok := h.methods.Load(method); ok {
		return l.(*latencies)
	}
	if h.known.Load() >= quantileMethods {
		return nil
	}
	l, known := h.methods.LoadOrStore(method, &latencies{})
	if !known {
		h.known.Add(1)
	}
	return l.(*latencies)
}

// latencies counts one method's responses by their latency, in slices of time.
type latencies struct {
	mu     sync.Mutex // held for a few nanoseconds, and once a second to compute the delay
	counts [quantileSlices][latencyBuckets + 1]uint32
	epochs [quantileSlices]int64 // the slice of time that each entry of counts is for; older ones are out of date

	computed time.Time
	delay    time.Duration
	enough   bool
}

// slice returns the counts of the current slice of time. The caller holds mu.
func (l *latencies) slice(now time.Time) *[latencyBuckets + 1]uint32 {
	epoch := epochOf(now)
	i := (epoch%quantileSlices + quantileSlices) % quantileSlices
	if l.epochs[i] != epoch {
		l.epochs[i] = epoch
		l.counts[i] = [latencyBuckets + 1]uint32{}
	}
	return &l.counts[i]
}

// epochOf returns the number of the slice of time that now is in. It is negative before 1970, which
// is the time on some clocks that were never set.
func epochOf(now time.Time) int64 {
	epoch := now.UnixNano() / int64(quantileSlice)
	if now.UnixNano()%int64(quantileSlice) < 0 {
		epoch--
	}
	return epoch
}

// quantile returns the q-quantile of the last minute, false if there are too few responses. The
// caller holds mu.
func (l *latencies) quantile(q float64, now time.Time) (time.Duration, bool) {
	var sum [latencyBuckets + 1]int64
	var total int64
	newest := epochOf(now)
	for i, epoch := range l.epochs {
		if epoch > newest-quantileSlices && epoch <= newest {
			for bucket, n := range l.counts[i] {
				sum[bucket] += int64(n)
				total += int64(n)
			}
		}
	}
	if float64(total) < max(50, math.Round(5/(1-q))) {
		return 0, false
	}
	if total == sum[lostBucket] { // nothing was measured, so the delay stays as it was
		return l.delay, l.enough
	}
	rank := int64(math.Ceil(q * float64(total)))
	longest := 0
	for bucket, n := range sum[:latencyBuckets] {
		if n > 0 {
			longest = bucket
		}
		if rank -= n; rank <= 0 {
			break
		}
	}
	return bucketLatency(longest), true
}

// latencyBucket returns the bucket for a latency.
func latencyBucket(took time.Duration) int {
	if took <= shortestLatency {
		return 0
	}
	bucket := int(math.Log(float64(took)/float64(shortestLatency)) / math.Log(latencyStep))
	return min(bucket, latencyBuckets-1)
}

// bucketLatency returns the end of a bucket, which is the longest latency in it.
func bucketLatency(bucket int) time.Duration {
	return time.Duration(float64(shortestLatency) * math.Pow(latencyStep, float64(bucket)+1))
}
