package tried

import (
	"context"
	"math/rand/v2"
	"slices"
	"testing"
	"unique"
	"unsafe"
)

func at(channel any, addresses string) Endpoint { return unique.Make(Place{channel, addresses}) }

// TestList compares a List with a slice, for endpoints drawn at random.
func TestList(t *testing.T) {
	all := []Endpoint{at(1, "a"), at(1, "b"), at(1, "c"), at(1, "d"), at(1, "e"), at(2, "a"), at(2, "b")}
	for seed := range uint64(200) {
		random := rand.New(rand.NewPCG(seed, 1))
		var l List
		var want []Endpoint
		for range random.IntN(30) {
			e := all[random.IntN(1+random.IntN(len(all)))]
			l.Add(e)
			want = append(slices.DeleteFunc(want, func(old Endpoint) bool { return old == e }), e)
		}
		for _, e := range all {
			if got, want := l.Position(e), slices.Index(want, e); got != want {
				t.Errorf("seed %d: Position(%v) = %d, want %d", seed, e.Value(), got, want)
			}
		}
		for channel := range 4 {
			knows := slices.ContainsFunc(want, func(e Endpoint) bool { return e.Value().Channel == channel })
			if got := l.Knows(channel); got != knows {
				t.Errorf("seed %d: Knows(%d) = %v, want %v", seed, channel, got, knows)
			}
		}
		if l.IsEmpty() != (len(want) == 0) {
			t.Errorf("seed %d: IsEmpty = %v with %d endpoints", seed, l.IsEmpty(), len(want))
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
		{"no context", nil, "/s/m", nil},
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
