package bytarget

import (
	"slices"
	"strconv"
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

// A thing is kept for a target.
type thing struct{ canonical string }

func newMap() *Map[*thing] {
	return &Map[*thing]{Fresh: func(canonical string) *thing { return &thing{canonical} }}
}

// dial uses a target as a ClientConn would dial it.
func dial(m *Map[*thing], name string) *thing {
	return m.Dialed(name, func() string { return "dns:///" + name })
}

func TestEveryFormOfATargetHasOneThing(t *testing.T) {
	m := newMap()
	one := dial(m, "a")
	if one.canonical != "dns:///a" {
		t.Errorf("the thing was made for %q, want dns:///a", one.canonical)
	}
	full := m.Dialed("dns:///a", func() string { return "dns:///a" })
	if again := dial(m, "a"); again != one || full != one || m.Named("dns:///a") != one {
		t.Error("a target has several things")
	}
	if known, ok := m.Known("dns:///a"); !ok || known != one {
		t.Errorf("Known = %v, %t, want %v", known, ok, one)
	}
	if m.Named("a") == one || dial(m, "b") == one {
		t.Error("two targets have one thing")
	}
	if _, ok := m.Known("c"); ok {
		t.Error("Known makes a target known")
	}
	if got := len(slices.Collect(m.All())); got != 3 {
		t.Errorf("All has %d targets, want 3", got)
	}
}

func TestCanonicalFormIsBuiltOnce(t *testing.T) {
	m := newMap()
	built := 0
	for range 3 {
		for _, name := range []string{"a", "b"} {
			m.Dialed(name, func() string { built++; return name })
		}
	}
	if built != 2 {
		t.Errorf("the canonical form was built %d times, want once for each target", built)
	}
}

func remembered(m *Map[*thing]) (n int) {
	m.dialed.Range(func(any, any) bool { n++; return true })
	return max(n, len(slices.Collect(m.All())))
}

// A client that keeps dialing new targets remembers only those of the last two minutes.
func TestTargetsThatAreNotUsedAreForgotten(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newMap()
		most := 0
		for i := range 1000 { // one a second
			dial(m, strconv.Itoa(i))
			most = max(most, remembered(m))
			time.Sleep(time.Second)
		}
		if most > 121 {
			t.Errorf("%d targets are remembered, want at most 121", most)
		}
		time.Sleep(time.Hour)
		for i := range 3 {
			dial(m, "new"+strconv.Itoa(i))
			time.Sleep(SweepEvery)
		}
		if got := remembered(m); got != 2 {
			t.Errorf("%d targets are remembered, want the last two", got)
		}
	})
}

func TestTargetsInUseAreKept(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newMap()
		dialed, named := dial(m, "dialed"), m.Named("named")
		unused := dial(m, "unused")
		for i := range 600 {
			if dial(m, "dialed") != dialed || m.Named("named") != named {
				t.Fatalf("a target that is used every second was forgotten after %d s", i)
			}
			m.Known("dns:///unused")
			m.Named(strconv.Itoa(i)) // may sweep
			time.Sleep(time.Second)
		}
		if dial(m, "unused") == unused {
			t.Error("a target that was not used for ten minutes is remembered")
		}
	})
}

// The first target has a shortcut, which must not outlive it.
func TestTheFirstTargetIsForgotten(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newMap()
		first := dial(m, "first")
		for i := range 3 {
			m.Named(strconv.Itoa(i))
			time.Sleep(SweepEvery)
		}
		if dial(m, "first") == first {
			t.Error("the first target is remembered")
		}
	})
}

func TestForgetMayKeep(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newMap()
		busy := true
		m.Forget = func(one *thing) bool { return one.canonical != "dns:///busy" || !busy }
		one := dial(m, "busy")
		pass := func() {
			for i := range 5 {
				m.Named(strconv.Itoa(i))
				time.Sleep(SweepEvery)
			}
		}
		pass()
		if known, _ := m.Known("dns:///busy"); known != one {
			t.Error("a target that may not be forgotten was")
		}
		busy = false
		pass()
		if _, ok := m.Known("dns:///busy"); ok {
			t.Error("a target that may be forgotten was not")
		}
	})
}

func TestGoroutinesGetTheSameThing(t *testing.T) {
	const goroutines = 16
	for range 100 {
		m := newMap()
		var things [goroutines]*thing
		var all sync.WaitGroup
		for i := range goroutines {
			all.Go(func() {
				if i%2 == 0 {
					things[i] = dial(m, "a")
				} else {
					things[i] = m.Named("dns:///a")
				}
			})
		}
		all.Wait()
		for _, one := range things {
			if one != things[0] {
				t.Fatal("two goroutines got different things for one target")
			}
		}
	}
}
