package layers

import (
	"context"
	"reflect"
	"strconv"
	"testing"

	"google.golang.org/grpc/metadata"

	"github.com/grpcretry/grpcretry/internal/wire"
)

func TestHeaderOfAnAttempt(t *testing.T) {
	for previous := range 12 { // more than are shared
		for _, limited := range []bool{false, true} {
			h, want := Header{previous, limited}, metadata.MD{}
			if previous > 0 {
				want = metadata.Pairs(wire.PreviousAttemptsKey, strconv.Itoa(previous), MarkKey, "0")
			}
			if limited {
				want.Set(MarkKey, "1")
			}
			if got := h.Metadata(); !reflect.DeepEqual(got, want) {
				t.Errorf("%+v.Metadata() = %v, want %v", h, got, want)
			}
		}
	}
}

func TestHeaderReplacesTheCallersValues(t *testing.T) {
	ctx := metadata.NewOutgoingContext(context.Background(), metadata.Pairs("k", "v", MarkKey, "0"))
	ctx = metadata.AppendToOutgoingContext(ctx, "GRPC-previous-rpc-attempts", "17")
	got, _ := metadata.FromOutgoingContext(Header{3, true}.In(ctx))
	if want := metadata.Pairs("k", "v", wire.PreviousAttemptsKey, "3", MarkKey, "1"); !reflect.DeepEqual(got, want) {
		t.Errorf("metadata = %v, want %v", got, want)
	}
	if before, _ := metadata.FromOutgoingContext(ctx); before.Get("k")[0] != "v" || before.Get(MarkKey)[0] != "0" {
		t.Errorf("the caller's metadata has become %v", before)
	}
	if same := (Header{}).In(ctx); same != ctx {
		t.Error("a header that says nothing makes a new context")
	}
}

// TestHeaderAsAValue is about a context that has the header without being made by In.
func TestHeaderAsAValue(t *testing.T) {
	for previous := range 12 {
		h := Header{previous, true}
		ctx, added := h.Added(t.Context())
		if (added != nil) != (previous < len(sharedHeaders)) || added != nil && ctx != t.Context() {
			t.Fatalf("%+v added to a context without metadata = %v, %v", h, ctx, added)
		}
		if _, added := h.Added(metadata.NewOutgoingContext(t.Context(), metadata.MD{})); added != nil {
			t.Errorf("%+v would replace the caller's metadata", h)
		}
		if added == nil {
			continue
		}
		got, _ := metadata.FromOutgoingContext(headed{ctx, added})
		want, _ := metadata.FromOutgoingContext(h.In(t.Context()))
		if !reflect.DeepEqual(got, want) {
			t.Errorf("%+v has metadata %v, want %v", h, got, want)
		}
	}
}

type headed struct {
	context.Context
	added *Shared
}

func (c headed) Value(key any) any {
	if v := c.added.Value(key); v != nil {
		return v
	}
	return c.Context.Value(key)
}

func TestRetriedByOf(t *testing.T) {
	const previous = wire.PreviousAttemptsKey
	for _, tt := range []struct {
		header   metadata.MD
		want     RetriedBy
		wantMark Mark
	}{
		{nil, Nobody, Unmarked},
		{metadata.Pairs(MarkKey, "0"), Nobody, Answered},
		{metadata.Pairs(MarkKey, "1"), EarlierCaller, Limited},
		{metadata.Pairs(MarkKey, "x"), EarlierCaller, Limited},
		{metadata.Pairs(MarkKey, "0", MarkKey, "0"), Nobody, Answered},
		{metadata.Pairs(MarkKey, "0", MarkKey, "1"), EarlierCaller, Limited},
		{metadata.Pairs(previous, "0"), Nobody, Unmarked},
		{metadata.Pairs(previous, "2"), Caller, Unmarked},
		{metadata.Pairs(previous, "2", MarkKey, "0"), Caller, Answered},
		{metadata.Pairs(previous, "2", MarkKey, "1"), Caller, Limited},
	} {
		if by, mark := RetriedByOf(metadata.NewIncomingContext(context.Background(), tt.header)); by != tt.want || mark != tt.wantMark {
			t.Errorf("RetriedByOf a request with %v = %q, %d, want %q, %d", tt.header, by, mark, tt.want, tt.wantMark)
		}
	}
}
