package timer

import (
	"slices"
	"testing"
	"testing/synctest"
	"time"
)

func TestTimer(t *testing.T) {
	for _, tt := range []struct {
		name string
		use  func(*Timer, func())
		want []time.Duration // when the function is started
	}{
		{"one wait", func(t *Timer, f func()) { t.Set(time.Second, f) }, []time.Duration{time.Second}},
		{"no wait", func(t *Timer, f func()) { t.Set(0, f) }, []time.Duration{0}},
		{"a wait that is over", func(t *Timer, f func()) { t.Set(-time.Second, f) }, []time.Duration{0}},
		{"stopped", func(t *Timer, f func()) { t.Set(time.Second, f); t.Stop() }, nil},
		{"stopped before it is set", func(t *Timer, f func()) { t.Stop() }, nil},
		{"later", func(t *Timer, f func()) { t.Set(time.Second, f); t.Set(time.Minute, f) }, []time.Duration{time.Minute}},
		{"earlier", func(t *Timer, f func()) { t.Set(time.Minute, f); t.Set(time.Second, f) }, []time.Duration{time.Second}},
		{"now instead", func(t *Timer, f func()) { t.Set(time.Minute, f); t.Set(0, f) }, []time.Duration{0}},
		{"again", func(t *Timer, f func()) { t.Set(0, f); t.Set(time.Second, f) }, []time.Duration{0, time.Second}},
		{"set after a stop", func(t *Timer, f func()) { t.Set(time.Minute, f); t.Stop(); t.Set(time.Second, f) },
			[]time.Duration{time.Second}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				started := make(chan time.Duration, 10)
				start := time.Now()
				var timer Timer
				tt.use(&timer, func() { started <- time.Since(start) })
				time.Sleep(time.Hour)
				synctest.Wait()
				close(started)
				var got []time.Duration
				for at := range started {
					got = append(got, at)
				}
				if !slices.Equal(got, tt.want) {
					t.Errorf("started at %v, want %v", got, tt.want)
				}
			})
		})
	}
}

// With timers of zero duration the race detector crashed.
func TestTimersWithoutAWaitShareABubble(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const timers = 1000
		started := make(chan bool, timers)
		for range timers {
			go new(Timer).Set(0, func() { started <- true })
		}
		for range timers {
			<-started
		}
	})
}
