package grpcretry

import (
	"fmt"
	"math"
	"sync/atomic"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/protoadapt"
)

// A Usage is what the calls of a Retrier hold at one moment, and what did not fit into memory so far.
type Usage struct {
	// WaitingCalls are calls that wait for a backoff, a server's delay or a connection before their
	// next attempt, and have no attempt in flight. Functions of [Retrier.Do] are calls, too.
	WaitingCalls int

	// OpenStreams are streams that have not ended. Streams that pass straight through to gRPC do not
	// count. If an interceptor below drops call options, a stream that the application abandons counts
	// on, here and in ReplayMemory.
	OpenStreams int

	// ReplayMemory is the memory, in bytes, that counts towards [WithReplayMemory] now, and ReplayLimit
	// the limit.
	ReplayMemory, ReplayLimit int64

	// CommittedStreams are the streams that the limit has committed since the Retrier was created.
	CommittedStreams int64
}

// Usage returns what the Retrier's calls hold now, as metrics and the debug page show it. It is cheap
// enough for a health check.
func (r *Retrier) Usage() Usage {
	u := r.made().usage
	return Usage{
		WaitingCalls:     int(u.waiting.Load()),
		OpenStreams:      int(u.streams.Load()),
		ReplayMemory:     u.replay.inUse.Load(),
		ReplayLimit:      u.replay.limit,
		CommittedStreams: u.replay.committed.Load(),
	}
}

// usage counts what a Retrier and its copies hold.
type usage struct {
	waiting atomic.Int64 // calls that wait
	streams atomic.Int64 // streams that are open
	replay  replayMemory
}

func newUsage(c *config) *usage {
	u := &usage{}
	u.replay.limit = defaultReplayMemory
	if c.replayMemory != nil {
		u.replay.limit = *c.replayMemory
	}
	return u
}

const defaultReplayMemory = 64 << 20

// WithReplayMemory limits the memory, in bytes, for the sent messages that all uncommitted streams of a
// Retrier together keep for replay. A message that does not fit commits its stream, like one that exceeds
// [WithBufferLimit]. The first is logged at warn level, and all are counted: see [Retrier.Usage]. No call
// is refused, and none waits for memory. As with a full buffer, a SendMsg whose message does not fit waits
// while another goroutine is retrying.
//
// Messages count with their encoded size and gRPC's prefix of five bytes, the request of a server stream
// included. If that is neither a protobuf message nor has a method Size() int, it counts with the prefix.
// Requests of unary calls do not count, because their callers hold them anyway.
//
// bytes is at least 0. With 0 every stream commits with its first message. The default is 64 MiB. The
// limit belongs to New, and no Update changes it. A later WithReplayMemory replaces an earlier one.
func WithReplayMemory(bytes int) Option {
	return fixedOption("WithReplayMemory", func(c *config) {
		if bytes < 0 {
			c.reject(fmt.Errorf("grpcretry: WithReplayMemory: %d bytes is negative", bytes))
			return
		}
		limit := int64(bytes)
		c.replayMemory = &limit
	})
}

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
