package bounded

import (
	"maps"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
)

func TestAddKeepsTheFirstValueOfEachKey(t *testing.T) {
	var m Map[string, int]
	for _, tt := range []struct {
		key       string
		value     int
		wantKept  int
		wantIsNew bool
	}{
		{"a", 1, 1, true},
		{"a", 2, 1, false},
		{"b", 3, 3, true},
		{"c", 4, 0, false}, // no room
		{"b", 5, 3, false},
	} {
		kept, isNew := m.Add(tt.key, tt.value, 2)
		if kept != tt.wantKept || isNew != tt.wantIsNew {
			t.Errorf("Add(%q, %d, 2) = %d, %t, want %d, %t", tt.key, tt.value, kept, isNew, tt.wantKept, tt.wantIsNew)
		}
	}
	if got, want := m.Current(), (map[string]int{"a": 1, "b": 3}); !maps.Equal(got, want) {
		t.Errorf("Current = %v, want %v", got, want)
	}
	m.Clear()
	if _, isNew := m.Add("c", 6, 2); !isNew || len(m.Current()) != 1 {
		t.Errorf("after Clear and Add, Current = %v, want one key", m.Current())
	}
}

func TestCurrentIsNeverChanged(t *testing.T) {
	var m Map[string, int]
	m.Add("a", 1, 2)
	before := m.Current()
	m.Add("b", 2, 2)
	m.Clear()
	if want := (map[string]int{"a": 1}); !maps.Equal(before, want) {
		t.Errorf("the map of an earlier Current = %v, want %v", before, want)
	}
}

func TestGetMakesWhatIsNotKept(t *testing.T) {
	var m Map[string, int]
	made := 0
	fresh := func(string) int { made++; return made }
	for _, tt := range []struct {
		key  string
		want int
	}{
		{"a", 1}, {"a", 1}, {"b", 2}, {"c", 3}, {"c", 4}, {"a", 1}, {"b", 2},
	} {
		if got := m.Get(tt.key, 2, fresh); got != tt.want {
			t.Errorf("Get(%q, 2) = %d, want %d", tt.key, got, tt.want)
		}
	}
}

// All goroutines get the one value that is kept, also those that have made another.
func TestGetReturnsOneValueToManyGoroutines(t *testing.T) {
	const goroutines = 16
	for range 100 {
		var m Map[string, *int]
		var values [goroutines]*int
		var all sync.WaitGroup
		for i := range goroutines {
			all.Go(func() { values[i] = m.Get("key", 1, func(string) *int { return new(int) }) })
		}
		all.Wait()
		for _, value := range values {
			if value != m.Current()["key"] {
				t.Fatalf("Get = %p, and %p is kept", value, m.Current()["key"])
			}
		}
	}
}

func TestSetAddsEachKeyOnce(t *testing.T) {
	var s Set[string]
	var added atomic.Int32
	var all sync.WaitGroup
	const most = 10
	for range 8 {
		all.Go(func() {
			for i := range 2 * most {
				if s.Add(strconv.Itoa(i), most) {
					added.Add(1)
				}
			}
		})
	}
	all.Wait()
	if added.Load() != most || len(s.All()) != most {
		t.Errorf("%d keys were new and %d are known, want %d", added.Load(), len(s.All()), most)
	}
	if s.Add("0", 2*most) || !s.Add("new", 2*most) {
		t.Error("with more room, Add reports a known key as new, or a new one as known")
	}
}
