package reconcile

import (
	"math"
	"math/rand/v2"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/time/rate"

	"github.com/grpcretry/grpcretry"
)

// Each slot is booked once, none before its time, and slots that are given up are booked again. The
// model looks for the first free slot one by one.
func TestLaneAtRandom(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 2))
	start := time.Now()
	for range 50 {
		l := lane{length: 100 * time.Millisecond}
		now := start
		taken := map[int64]bool{}
		for range 300 {
			now = now.Add(time.Duration(random.IntN(100)) * time.Millisecond)
			earliest := now.Add(time.Duration(random.IntN(3000)-500) * time.Millisecond)
			slot, at := l.book(now, earliest, random.Float64())
			first := int64(0)
			begins := func(n int64) time.Time { return start.Add(l.epoch.Sub(start)).Add(time.Duration(n) * l.length) }
			for taken[first] || begins(first).Before(now) || begins(first).Before(earliest) {
				first++
			}
			if slot != first || at.Before(begins(slot)) || !at.Before(begins(slot+1)) {
				t.Fatalf("booked slot %d at %v, want %d, which begins at %v", slot, at, first, begins(first))
			}
			taken[slot] = true
			for n := range taken {
				if random.IntN(10) == 0 {
					delete(taken, n)
					l.release(n)
				}
				break
			}
		}
	}
}

// A backoff that means never is not taken for one that has passed.
func TestLaneFarAway(t *testing.T) {
	now := time.Now()
	for _, length := range []time.Duration{1, time.Second, longestSlot} {
		l := lane{length: length}
		l.book(now, now, 0)
		if _, at := l.book(now, now.Add(math.MaxInt64), 0.5); at.Sub(now) < longestWait || at.Sub(now) > longestWait+2*length {
			t.Errorf("slots of %v: booked %v away, want a hundred years", length, at.Sub(now))
		}
	}
}

// A key that fails again between the moment when it is next in line and the moment when the budget
// refuses to pay for it is in line once.
func TestLineAfterFailure(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r, err := grpcretry.New(grpcretry.WithBudget(grpcretry.NewRateBudget(rate.NewLimiter(0, 0))))
		if err != nil {
			t.Fatal(err)
		}
		l := NewRateLimiter[string](r, "/reconcile/orders")
		NewQueue(l, "").ShutDown()
		wait := l.When("a")
		k, _ := l.nextInLine(time.Now())
		time.Sleep(wait)
		l.When("a")
		if _, ok := k.forward(time.Now(), false); ok {
			t.Fatal("brought forward without payment")
		}
		if len(l.line) != 1 || l.line[0] != k || k.place != 0 {
			t.Errorf("the line has %d keys, and the key is at %d, want it alone", len(l.line), k.place)
		}
	})
}
