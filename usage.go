package grpcretry

import (
	"math"
	"sync/atomic"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/protoadapt"

	"github.com/grpcretry/grpcretry/internal/inside"
)

// usage counts what a Retrier and its copies hold.
type usage struct {
	waiting atomic.Int64 // calls that wait
	streams atomic.Int64 // streams that are open
	replay  replayMemory
}

// now returns what is held now.
func (u *usage) now() inside.Usage {
	return inside.Usage{
		WaitingCalls:     int(u.waiting.Load()),
		OpenStreams:      int(u.streams.Load()),
		ReplayMemory:     u.replay.inUse.Load(),
		ReplayLimit:      u.replay.limit,
		CommittedStreams: u.replay.committed.Load(),
	}
}

func newUsage(c *config) *usage {
	u := &usage{}
	u.replay.limit = defaultReplayMemory
	if c.replayMemory != nil {
		u.replay.limit = *c.replayMemory
	}
	return u
}

// defaultReplayMemory is how many bytes of sent messages the uncommitted streams of a Retrier together keep for
// replay. A message that does not fit commits its stream, like one that exceeds [WithBufferLimit].
const defaultReplayMemory = 64 << 20

// A replayMemory counts what a Retrier's streams keep for replay. It is safe for concurrent use.
type replayMemory struct {
	limit int64
	inUse atomic.Int64

	committed atomic.Int64 // streams, because their messages did not fit
}

// reserve counts size more bytes, if they fit.
func (m *replayMemory) reserve(size int64) bool {
	for {
		used := m.inUse.Load()
		if size > m.limit-used {
			return false
		}
		if m.inUse.CompareAndSwap(used, used+size) {
			return true
		}
	}
}

// add counts size more bytes, which are there already; a negative size gives bytes back.
func (m *replayMemory) add(size int64) { m.inUse.Add(size) }

// prefixSize is what gRPC adds to each message of a stream.
const prefixSize = 5

// sizeOf returns what a message counts with: its encoded size and gRPC's prefix, as in gRPC's own buffer; known is
// false if the message cannot tell.
func sizeOf(m any) (size int, known bool) {
	switch m := m.(type) {
	case proto.Message:
		return prefixSize + proto.Size(m), true
	case interface{ Size() int }:
		n, ok := sizeBy(m)
		return prefixSize + max(0, min(n, math.MaxInt32-prefixSize)), ok
	case protoadapt.MessageV1:
		return prefixSize + proto.Size(protoadapt.MessageV2Of(m)), true
	default:
		return prefixSize, false
	}
}

// sizeBy asks a message for its size; ok is false if it panics. gRPC would never ask, so that a program
// need not be prepared for that.
func sizeBy(m interface{ Size() int }) (n int, ok bool) {
	defer func() {
		if !ok {
			_ = recover()
		}
	}()
	return m.Size(), true
}
