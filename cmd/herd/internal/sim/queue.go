package sim

import "math/bits"

// An event is something that will happen. It has only 16 bytes, because a million clients have a
// million events.
type event struct {
	at   int64 // nanoseconds since the start
	ref  int32 // index of the thing that it happens to, of the sort that kind names
	kind eventKind
}

// A queue returns events in the order of their times, and those of the same time in the order in
// which they were added. It is a radix heap: because time never goes back, an event needs to be
// looked at only when the clock comes near it, and is moved along with its neighbours. A binary heap of
// a million events misses the cache at every level.
//
// Bucket 0 holds the events of the time now. Bucket b holds those whose time differs from
// now in bit b-1 and in no higher one, so all of a bucket come before all of the next one.
// Events of one time are always in one bucket, in order: that is why no event needs a
// number of its own.
type queue struct {
	now     int64 // the time of the event that was taken last
	taken   int   // the number of events that were taken from bucket 0
	n       int
	filled  uint64 // bit b is set if bucket b may have events; never for bucket 0
	buckets [64][]event
}

func (q *queue) len() int { return q.n }

// put adds an event. Its time must not be before that of the one taken last.
func (q *queue) put(e event) {
	b := bits.Len64(uint64(e.at ^ q.now))
	q.buckets[b] = append(q.buckets[b], e)
	q.filled |= 1 << b &^ 1
	q.n++
}

// take removes the next event; ok is false if there is none.
func (q *queue) take() (e event, ok bool) {
	if q.taken == len(q.buckets[0]) {
		if q.n == 0 {
			return event{}, false
		}
		q.advance()
	}
	e = q.buckets[0][q.taken]
	q.taken++
	q.n--
	return e, true
}

// advance moves the clock to the next event, and the bucket that it was in to lower ones.
// There must be an event, but none in bucket 0.
func (q *queue) advance() {
	q.buckets[0], q.taken = q.buckets[0][:0], 0
	b := bits.TrailingZeros64(q.filled)
	q.filled &^= 1 << b
	moved := q.buckets[b]
	q.buckets[b] = moved[:0]
	q.now = moved[0].at
	for _, e := range moved[1:] {
		q.now = min(q.now, e.at)
	}
	for _, e := range moved {
		to := bits.Len64(uint64(e.at ^ q.now))
		q.buckets[to] = append(q.buckets[to], e)
		q.filled |= 1 << to &^ 1
	}
}
