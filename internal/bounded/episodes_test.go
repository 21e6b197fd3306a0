package bounded

import (
	"fmt"
	"testing"
	"time"
)

func TestEpisodes(t *testing.T) {
	e := Episodes[string]{Quiet: 10 * time.Second}
	start := time.Now()
	for _, tt := range []struct {
		seconds int
		add     bool // or End
		name    string
		want    bool
	}{
		{0, false, "a", false},
		{0, true, "a", true},
		{5, true, "a", false},
		{5, true, "b", true},
		{14, false, "a", false}, // 9 s after the latest trouble
		{15, false, "a", true},
		{15, false, "a", false},
		{16, true, "a", true},
		{60, false, "b", true},
	} {
		now := start.Add(time.Duration(tt.seconds) * time.Second)
		what, got := "End", false
		if tt.add {
			what, got = "Add", e.Add(tt.name, now)
		} else {
			got = e.End(tt.name, now)
		}
		if got != tt.want {
			t.Errorf("%s(%s) after %d s = %t, want %t", what, tt.name, tt.seconds, got, tt.want)
		}
	}
}

func TestEpisodesAreBounded(t *testing.T) {
	e := Episodes[string]{Quiet: 10 * time.Second}
	now := time.Now()
	add := func(from, n int) (begun int) {
		for i := range n {
			if e.Add(fmt.Sprint("target ", from+i), now) {
				begun++
			}
		}
		return begun
	}
	if got := add(0, 2*MaxNames); got != MaxNames {
		t.Errorf("%d episodes have begun, want %d", got, MaxNames)
	}
	now = now.Add(e.Quiet)
	if got := add(2*MaxNames, 1); got != 1 || len(e.latest) != 1 {
		t.Errorf("%d have begun after a quiet time, and %d are known; want 1 and 1", got, len(e.latest))
	}
}
