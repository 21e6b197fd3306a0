package turn

import (
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

func TestOneHolderAtATime(t *testing.T) {
	var l Lock
	var all sync.WaitGroup
	const goroutines, times = 8, 1000
	count := 0 // the race detector finds a second holder
	for range goroutines {
		all.Go(func() {
			for range times {
				l.Take()
				count++
				l.Give()
			}
		})
	}
	all.Wait()
	if count != goroutines*times {
		t.Errorf("count = %d, want %d", count, goroutines*times)
	}
	if l.taken || l.waiting != 0 {
		t.Errorf("taken = %v, waiting = %d after the last Give, want a free lock", l.taken, l.waiting)
	}
}

func TestLockIsGivenInOrder(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var l Lock
		l.Take()
		var order []int
		const waiters = 10
		for i := range waiters {
			go func() {
				l.Take()
				order = append(order, i)
				if i < waiters/2 {
					l.Give() // the others are in line already
					l.Take()
					order = append(order, waiters+i)
				}
				l.Give()
			}()
			synctest.Wait() // until it waits
		}
		l.Give()
		synctest.Wait()
		if want := []int{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14}; !slices.Equal(order, want) {
			t.Errorf("order = %v, want %v", order, want)
		}
	})
}

// A Mutex would stop the time of the bubble, so that the test could not end.
func TestVirtualTimePassesWhileOthersWait(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var l Lock
		start := time.Now()
		var waited time.Duration
		l.Take()
		var all sync.WaitGroup
		all.Go(func() {
			l.Take()
			defer l.Give()
			waited = time.Since(start)
		})
		time.Sleep(time.Minute)
		l.Give()
		all.Wait()
		if waited != time.Minute {
			t.Errorf("Take returned after %v, want %v", waited, time.Minute)
		}
	})
}
