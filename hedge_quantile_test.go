package grpcretry

import (
	"testing"
	"time"
)

// A clock that was never set may be before 1970, and pass that moment.
func TestQuantileBefore1970(t *testing.T) {
	for _, start := range []time.Time{time.Unix(-1000, 0), time.Unix(-25, 0), time.Unix(-1, -1), {}} {
		d := HedgeAtQuantile(0.9, 0, 0)
		now := start
		for range 50 { // one slice after the other
			d.Answered("/s/m", second, false, now)
			now = now.Add(second)
		}
		if got, ok := d.Delay("/s/m", now); !ok || got < second || got > second*105/100 {
			t.Errorf("from %v: Delay = %v, %v, want a second", start, got, ok)
		}
	}
}
