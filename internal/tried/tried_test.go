package tried

import (
	"context"
	"testing"
	"unique"
	"unsafe"
)

func at(channel any, addresses string) Endpoint { return unique.Make(Place{channel, addresses}) }

func TestList(t *testing.T) {
	var l List
	if !l.IsEmpty() || l.Has(at(1, "a")) || l.Last(1) != (Endpoint{}) {
		t.Error("the zero List is not empty")
	}
	want := func(step string, has ...Endpoint) {
		t.Helper()
		for _, e := range []Endpoint{at(1, "a"), at(1, "b"), at(1, "c"), at(1, "d"), at(1, "e"), at(2, "a"), at(2, "b")} {
			wants := false
			for _, one := range has {
				wants = wants || one == e
			}
			if l.Has(e) != wants {
				t.Errorf("%s: Has(%v) = %v, want %v", step, e.Value(), l.Has(e), wants)
			}
		}
		n := 0
		if l.first != (Endpoint{}) {
			n++
		}
		if l.more != nil {
			n += len(l.more.endpoints)
		}
		if n != len(has) {
			t.Errorf("%s: the list has %d entries, want %d", step, n, len(has))
		}
	}
	for _, e := range []Endpoint{at(1, "a"), at(1, "a"), at(2, "a"), at(1, "b"), at(1, "c"), at(1, "d"), at(1, "e"), at(1, "b")} {
		l.Add(e)
	}
	want("seven are added", at(1, "a"), at(2, "a"), at(1, "b"), at(1, "c"), at(1, "d"), at(1, "e"))
	if l.Last(1) != at(1, "e") || l.Last(2) != at(2, "a") || l.Last(3) != (Endpoint{}) {
		t.Error("Last is not what was added last")
	}
	l.Forget(3)
	l.Forget(1)
	want("channel 1 is forgotten", at(2, "a"))
	if l.Last(2) != at(2, "a") || l.Last(1) != (Endpoint{}) || l.IsEmpty() {
		t.Error("what is left is not that of channel 2")
	}
	l.Add(at(1, "c"))
	want("and used again", at(2, "a"), at(1, "c"))
	l.Forget(2)
	want("channel 2 is forgotten", at(1, "c"))
}

type attempt struct{ list List }

func (a *attempt) Tried(method string) *List {
	if method != "/s/m" {
		return nil
	}
	return &a.list
}

func TestOf(t *testing.T) {
	a := &attempt{}
	ctx := context.WithValue(t.Context(), Key{}, a)
	for _, tt := range []struct {
		name   string
		ctx    context.Context
		method string
		want   *List
	}{
		{"the call's own method", ctx, "/s/m", &a.list},
		{"another method", ctx, "/s/other", nil},
		{"no attempt", t.Context(), "/s/m", nil},
		{"something else", context.WithValue(t.Context(), Key{}, "text"), "/s/m", nil},
	} {
		if got := Of(tt.ctx, tt.method); got != tt.want {
			t.Errorf("%s: Of = %p, want %p", tt.name, got, tt.want)
		}
	}
}

// A List is a part of every attempt.
func TestListIsSmall(t *testing.T) {
	if got, limit := unsafe.Sizeof(List{}), 8+2*unsafe.Sizeof(uintptr(0)); got > limit {
		t.Errorf("a List takes %d bytes, want at most %d", got, limit)
	}
}
