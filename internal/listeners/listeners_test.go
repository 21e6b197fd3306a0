package listeners

import (
	"slices"
	"sync"
	"testing"
)

func TestListenersAreCalledInOrder(t *testing.T) {
	var l List[func()]
	var got []string
	add := func(name string) (remove func()) { return l.Add(func() { got = append(got, name) }) }
	want := func(names ...string) {
		t.Helper()
		got = nil
		for _, f := range l.All() {
			(*f)()
		}
		if !slices.Equal(got, names) || l.IsEmpty() != (len(names) == 0) {
			t.Errorf("called %q, IsEmpty = %t, want %q", got, l.IsEmpty(), names)
		}
	}
	want()
	removeA := add("a")
	removeB := add("b")
	removeOther := add("a")
	want("a", "b", "a")
	before := l.All()
	removeA()
	want("b", "a")
	removeA() // has no effect
	want("b", "a")
	removeB()
	removeOther()
	want()
	if len(before) != 3 || before[0] == nil {
		t.Error("the slice of an earlier All has changed")
	}
}

func TestListenersMayChangeWhileTheyAreCalled(t *testing.T) {
	var l List[func()]
	var all sync.WaitGroup
	for range 8 {
		all.Go(func() {
			for range 500 {
				remove := l.Add(func() {})
				for _, f := range l.All() {
					(*f)()
				}
				remove()
			}
		})
	}
	all.Wait()
	if !l.IsEmpty() {
		t.Errorf("%d listeners are left", len(l.All()))
	}
}
