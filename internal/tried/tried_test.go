package tried

import (
	"context"
	"slices"
	"testing"
	"unique"
	"unsafe"
)

func at(channel any, addresses string) Endpoint { return unique.Make(Place{channel, addresses}) }

// The list has each endpoint once, in the order of the last attempts.
func TestList(t *testing.T) {
	var l List
	if l.Position(at(1, "a")) != -1 || l.Knows(1) {
		t.Error("the zero List is not empty")
	}
	for step, tt := range []struct {
		add  Endpoint
		want []Endpoint
	}{
		{at(1, "a"), []Endpoint{at(1, "a")}},
		{at(1, "a"), []Endpoint{at(1, "a")}},
		{at(2, "a"), []Endpoint{at(1, "a"), at(2, "a")}},
		{at(1, "b"), []Endpoint{at(1, "a"), at(2, "a"), at(1, "b")}},
		{at(1, "a"), []Endpoint{at(2, "a"), at(1, "b"), at(1, "a")}},
		{at(1, "a"), []Endpoint{at(2, "a"), at(1, "b"), at(1, "a")}},
		{at(1, "b"), []Endpoint{at(2, "a"), at(1, "a"), at(1, "b")}},
		{at(1, "c"), []Endpoint{at(2, "a"), at(1, "a"), at(1, "b"), at(1, "c")}},
		{at(1, "d"), []Endpoint{at(2, "a"), at(1, "a"), at(1, "b"), at(1, "c"), at(1, "d")}},
		{at(2, "a"), []Endpoint{at(1, "a"), at(1, "b"), at(1, "c"), at(1, "d"), at(2, "a")}},
	} {
		l.Add(tt.add)
		for _, e := range []Endpoint{at(1, "a"), at(1, "b"), at(1, "c"), at(1, "d"), at(2, "a"), at(2, "b")} {
			if got, want := l.Position(e), slices.Index(tt.want, e); got != want {
				t.Errorf("step %d: the position of %v is %d, want %d", step, e.Value(), got, want)
			}
		}
		if !l.Knows(1) || l.Knows(2) != slices.Contains(tt.want, at(2, "a")) || l.Knows(3) {
			t.Errorf("step %d: the list knows 1, 2, 3: %t, %t, %t", step, l.Knows(1), l.Knows(2), l.Knows(3))
		}
	}
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
