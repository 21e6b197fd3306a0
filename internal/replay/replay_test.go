package replay

import (
	"math"
	"sync"
	"sync/atomic"
	"testing"

	echov1 "github.com/grpcretry/grpcretry/proto/echo/v1"
)

func TestMemory(t *testing.T) {
	m := Memory{Limit: 10}
	for _, tt := range []struct {
		size      int
		want      bool
		wantInUse int64
	}{
		{11, false, 0}, {10, true, 10}, {1, false, 10}, {0, true, 10},
	} {
		if got := m.Reserve(tt.size); got != tt.want || m.InUse() != tt.wantInUse {
			t.Errorf("Reserve(%d) = %t with %d bytes in use, want %t with %d", tt.size, got, m.InUse(), tt.want, tt.wantInUse)
		}
	}
	m.Release(4)
	if !m.Reserve(4) || m.Reserve(1) {
		t.Error("after Release(4), want room for 4 bytes")
	}
	if none := (Memory{}); none.Reserve(1) {
		t.Error("a Memory with a Limit of 0 has room")
	}
}

func TestMemoryIsNeverExceeded(t *testing.T) {
	m := Memory{Limit: 100}
	var all sync.WaitGroup
	var held, most atomic.Int64
	for size := 1; size <= 16; size++ {
		all.Go(func() {
			for range 1000 {
				if !m.Reserve(size) {
					continue
				}
				now := held.Add(int64(size))
				for before := most.Load(); now > before && !most.CompareAndSwap(before, now); before = most.Load() {
				}
				held.Add(-int64(size))
				m.Release(size)
			}
		})
	}
	all.Wait()
	if most.Load() > m.Limit || m.InUse() != 0 {
		t.Errorf("at most %d bytes were held at once, and %d are in use at the end; want at most %d, and 0", most.Load(), m.InUse(), m.Limit)
	}
}

type sized int

func (s sized) Size() int { return int(s) }

// An old message is one of protobuf's first API.
type old struct{ _ string }

func (*old) Reset()         {}
func (*old) String() string { return "" }
func (*old) ProtoMessage()  {}

type unsized struct{ _ string }

type panics struct{ *int }

func (p panics) Size() int { return *p.int }

func TestSize(t *testing.T) {
	for _, tt := range []struct {
		m         any
		want      int
		wantKnown bool
	}{
		{&echov1.EchoRequest{}, 5, true},
		{&echov1.EchoRequest{Message: "abc", Payload: []byte("de")}, 5 + 5 + 4, true},
		{sized(7), 12, true},
		{sized(-7), 5, true},
		{sized(math.MaxInt), math.MaxInt32, true},
		{panics{}, 5, false},
		{&old{}, 5, true},
		{&unsized{}, 5, false},
		{nil, 5, false},
	} {
		if got, known := Size(tt.m); got != tt.want || known != tt.wantKnown {
			t.Errorf("Size of %T = %d, %t, want %d, %t", tt.m, got, known, tt.want, tt.wantKnown)
		}
	}
}
