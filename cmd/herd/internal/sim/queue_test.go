package sim

import (
	"cmp"
	"math/rand/v2"
	"slices"
	"testing"
)

// The queue against a sorted list: any mix of puts and takes.
func TestQueueGivesEventsInOrder(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 2))
	for range 200 {
		var q queue
		var want []event // in order of time, then of putting
		var now int64
		span := int64(1) << random.IntN(40)
		for n := range 500 {
			if random.IntN(5) < 3 {
				e := event{at: now + random.Int64N(span), ref: int32(n)}
				if random.IntN(4) == 0 {
					e.at = now // at once
				}
				q.put(e)
				at, _ := slices.BinarySearchFunc(want, e.at+1, func(w event, at int64) int { return cmp.Compare(w.at, at) })
				want = slices.Insert(want, at, e)
				continue
			}
			got, ok := q.take()
			if ok != (len(want) > 0) || ok && got != want[0] {
				t.Fatalf("take() = %v, %v; want the first of %v", got, ok, want)
			}
			if ok {
				now, want = got.at, want[1:]
			}
			if q.len() != len(want) {
				t.Fatalf("len() = %d, want %d", q.len(), len(want))
			}
		}
	}
}

func BenchmarkQueue(b *testing.B) {
	for _, n := range []int{1_000, 1_000_000} {
		b.Run(map[int]string{1_000: "clients=1e3", 1_000_000: "clients=1e6"}[n], func(b *testing.B) {
			random := rand.New(rand.NewPCG(1, 2))
			var q queue
			for i := range n {
				q.put(event{at: random.Int64N(1e10), ref: int32(i)})
			}
			for b.Loop() {
				e, _ := q.take()
				e.at += random.Int64N(1e10)
				q.put(e)
			}
		})
	}
}
