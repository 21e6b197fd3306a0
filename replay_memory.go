package grpcretry

import (
	"fmt"
	"math"
	"sync"
	"sync/atomic"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/protoadapt"
)

const defaultReplayMemory = 64 << 20

// WithReplayMemory limits the memory, in bytes, that all calls of a Retrier together keep in order to
// repeat them: the sent messages that uncommitted streams would replay, and the replies of hedges. A
// message that does not fit commits its stream, like one that exceeds [WithBufferLimit]; a hedge whose
// reply might not fit is not sent, and asked for again later. The first of either kind is logged at warn
// level, and all are counted: see [Retrier.Usage]. No call is refused, and none waits for memory. As with
// a full buffer, a SendMsg whose message does not fit waits while another goroutine is retrying.
//
// Sent messages count with their approximate size in memory, the request of a server stream included. If
// that is neither a protobuf message nor has a method Size() int, it counts with 16 bytes.
// The size of a reply is unknown before it arrives. So a hedge counts with the size of the largest reply
// that recent hedged calls of its method have received, at first with 4 KiB, and from its arrival with
// its own. Requests of unary calls do not count, because their callers hold them anyway, nor do the
// copies that gRPC itself keeps of what it has sent.
//
// bytes is at least 0. With 0 every stream commits with its first message, and nothing is hedged. The
// default is 64 MiB. The limit belongs to New, and no Update changes it. A later WithReplayMemory
// replaces an earlier one.
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

// A replayMemory counts what a Retrier's calls keep in order to repeat them. It is safe for concurrent
// use.
type replayMemory struct {
	limit int64
	inUse atomic.Int64

	committed, unhedged atomic.Int64 // refusals

	replies sync.Map // the *replySize of each hedged method, by name
}

// take counts size more bytes, if they fit.
func (m *replayMemory) take(size int64) bool {
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

// A replySize is an estimate of how large a method's next reply is.
type replySize struct{ atomic.Int64 }

// firstReplySize is the estimate before there was a reply.
const firstReplySize = 4 << 10

// replySize returns the estimate for a method. Methods that no stub calls share one, so that there is
// a limited number.
func (m *replayMemory) replySize(f *facts) *replySize {
	name := f.method
	if !f.static {
		name = other
	}
	if known, ok := m.replies.Load(name); ok {
		return known.(*replySize)
	}
	fresh := &replySize{}
	fresh.Store(firstReplySize)
	known, _ := m.replies.LoadOrStore(name, fresh)
	return known.(*replySize)
}

// learn follows the largest reply, and forgets it over the next dozens of smaller ones.
func (s *replySize) learn(size int64) {
	old := s.Load()
	s.Store(max(size, old-old/8)) // another goroutine's reply may be lost: this is an estimate
}

// raceReplies counts the replies of the attempts that a race sends. The attempt with which the race
// starts receives into the caller's own; for a stream that need not be the call's first attempt.
type raceReplies struct {
	first  *attempt // with which the race starts
	memory *replayMemory
	likely *replySize
	size   int64 // what the reply of an attempt in flight counts with
	spared bool  // the reply of a hedge that is about to be sent is counted
	kept   int64 // what the winner's reply counts with
}

func (r *raceReplies) begin(first *attempt, m *replayMemory, f *facts) {
	r.first = first
	r.memory, r.likely = m, m.replySize(f)
	r.size = r.likely.Load()
}

// spare counts the reply of a hedge that is due. It returns false if it might not fit.
func (r *raceReplies) spare() bool {
	r.spared = r.memory.take(r.size)
	if !r.spared {
		r.memory.unhedged.Add(1)
	}
	return r.spared
}

// giveSpare takes back the count for a hedge that was not sent after all.
func (r *raceReplies) giveSpare() {
	if r.spared {
		r.spared = false
		r.memory.add(-r.size)
	}
}

// sent counts the reply of an attempt that is sent, unless that was done by spare. Retries do not ask
// for memory first, because no other attempt may be in flight.
func (r *raceReplies) sent() {
	if !r.spared {
		r.memory.add(r.size)
	}
	r.spared = false
}

// ended records the end of an attempt, whose reply is kept only if it has won.
func (r *raceReplies) ended(a *attempt) {
	if a != r.first {
		r.memory.add(-r.size)
	}
}

// won records the size of the winner's reply.
func (r *raceReplies) won(a *attempt, size int64) {
	r.likely.learn(size)
	if a != r.first {
		r.kept = size
		r.memory.add(size)
	}
}

// end records that the call has ended, and its replies can go. If a callback has ended the goroutine
// that was about to send a hedge, that one's reply goes as well.
func (r *raceReplies) end() {
	r.giveSpare()
	r.memory.add(-r.kept)
	r.kept = 0
}

// sizeOf returns roughly the memory that a message holds; 0 if that is unknown.
func sizeOf(m any) int64 {
	switch m := m.(type) {
	case proto.Message:
		return int64(structSize(m) + proto.Size(m))
	case interface{ Size() int }:
		if n, ok := sizeBy(m); ok {
			return int64(structSize(m)) + max(0, min(int64(n), math.MaxInt32))
		}
	case protoadapt.MessageV1:
		return int64(structSize(m) + proto.Size(protoadapt.MessageV2Of(m)))
	}
	return 0
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
