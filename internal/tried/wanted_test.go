package tried

import "testing"

func TestWanted(t *testing.T) {
	want := func(step string, want bool) {
		t.Helper()
		if got := Wanted(); got != want {
			t.Errorf("%s: Wanted() = %t, want %t", step, got, want)
		}
	}
	want("at the start", false)
	Grant(0)
	first, second := Want(), Want()
	want("after two wishes", true)
	Grant(second)
	want("one is granted", true)
	Grant(second) // a channel that was idle
	want("one is granted twice", true)
	Grant(first)
	want("both are granted", false)
	if third := Want(); third == first || third == second || third == 0 {
		t.Errorf("the third wish has the number %d, those before it %d and %d", third, first, second)
	}
	want("after a third", true)
	Grant(0)
	want("a channel uses the policy for another reason", false)
	for range 2 * maxPending {
		Want()
	}
	if n := len(wanted.pending); n != maxPending {
		t.Errorf("%d wishes are kept, want %d", n, maxPending)
	}
	wanted.pending = nil
}
