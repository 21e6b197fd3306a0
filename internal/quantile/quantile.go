// Package quantile estimates how long a method usually takes: the delay after which a hedge is due.
package quantile

import (
	"fmt"
	"math"
	"sync"
	"sync/atomic"
	"time"
)

const (
	sliceCount  = 7                // the current slice, and those of the minute before it
	sliceLength = 10 * time.Second // the length of a slice
	refresh     = time.Second      // the age at which a delay is computed again
	maxMethods  = 1000             // the most methods that are measured

	shortestLatency = 10 * time.Microsecond
	latencyBuckets  = 332            // from shortestLatency to over 100 s
	latencyStep     = 1.05           // the growth from one bucket to the next
	lostBucket      = latencyBuckets // the bucket for first attempts that lost
)

// An Estimator keeps the quantile Q of each method's latencies in the last minute, as package grpcretry's HedgeAtQuantile
// describes it. It is safe for concurrent use.
type Estimator struct {
	Settings

	methods sync.Map     // string → *latencies
	known   atomic.Int64 // the number of methods
}

// Settings are what the user of an [Estimator] chooses.
type Settings struct {
	Q               float64
	AtLeast, AtMost time.Duration
}

// New returns an Estimator that has measured nothing.
func New(s Settings) *Estimator { return &Estimator{Settings: s} }

// String describes the delay to readers of a policy.
func (s Settings) String() string {
	if s.AtMost == 0 {
		return fmt.Sprintf("at the %v quantile of the last minute, at least %v", s.Q, s.AtLeast)
	}
	return fmt.Sprintf("at the %v quantile of the last minute, from %v to %v", s.Q, s.AtLeast, s.AtMost)
}

// Check returns what is wrong with the settings.
func (s Settings) Check() error {
	switch {
	case !(s.Q > 0 && s.Q < 1):
		return fmt.Errorf("q is %v, want between 0 and 1, both excluded", s.Q)
	case s.AtLeast < 0 || s.AtMost < 0:
		return fmt.Errorf("bounds %v and %v must not be negative", s.AtLeast, s.AtMost)
	case s.AtMost != 0 && s.AtMost < s.AtLeast:
		return fmt.Errorf("upper bound %v is below the lower bound %v", s.AtMost, s.AtLeast)
	}
	return nil
}

// Delay returns the delay for a call of a method that starts now, false if too little was measured.
func (e *Estimator) Delay(method string, now time.Time) (time.Duration, bool) {
	l := e.latencies(method)
	if l == nil {
		return 0, false
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if !l.computed.IsZero() && now.Sub(l.computed) < refresh && !now.Before(l.computed) {
		return l.delay, l.enough
	}
	l.computed = now
	l.delay, l.enough = l.quantile(e.Q, now)
	l.delay = max(l.delay, e.AtLeast)
	if e.AtMost > 0 {
		l.delay = min(l.delay, e.AtMost)
	}
	return l.delay, l.enough
}

// Answered adds how long a call took. If it lost, it would have taken longer.
func (e *Estimator) Answered(method string, took time.Duration, lost bool, now time.Time) {
	l := e.latencies(method)
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
func (e *Estimator) latencies(method string) *latencies {
	if l, ok := e.methods.Load(method); ok {
		return l.(*latencies)
	}
	if e.known.Load() >= maxMethods {
		return nil
	}
	l, known := e.methods.LoadOrStore(method, &latencies{})
	if !known {
		e.known.Add(1)
	}
	return l.(*latencies)
}

// latencies counts one method's responses by their latency, in slices of time.
type latencies struct {
	mu     sync.Mutex // held for a few nanoseconds, and once a second to compute the delay
	counts [sliceCount][latencyBuckets + 1]uint32
	epochs [sliceCount]int64 // the slice of time that each entry of counts is for; older ones are out of date

	computed time.Time
	delay    time.Duration
	enough   bool
}

// slice returns the counts of the current slice of time. The caller holds mu.
func (l *latencies) slice(now time.Time) *[latencyBuckets + 1]uint32 {
	epoch := epochOf(now)
	i := (epoch%sliceCount + sliceCount) % sliceCount
	if l.epochs[i] != epoch {
		l.epochs[i] = epoch
		l.counts[i] = [latencyBuckets + 1]uint32{}
	}
	return &l.counts[i]
}

// epochOf returns the number of the slice of time that now is in. It is negative before 1970, which
// is the time on some clocks that were never set.
func epochOf(now time.Time) int64 {
	epoch := now.UnixNano() / int64(sliceLength)
	if now.UnixNano()%int64(sliceLength) < 0 {
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
		if epoch > newest-sliceCount && epoch <= newest {
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
