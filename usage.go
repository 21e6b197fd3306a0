package grpcretry

import (
	"runtime"
	"sync/atomic"
)

// A Usage is what the calls of a Retrier hold at one moment, and what did not fit into memory so far.
type Usage struct {
	// WaitingCalls are calls that wait for a backoff, a server's delay or a connection before their
	// next attempt, and have no attempt in flight. Functions of [Retrier.Do] are calls, too.
	WaitingCalls int

	// OpenStreams are streams that have not ended. Streams that pass straight through to gRPC do not
	// count. If an interceptor below drops call options, a stream that the application abandons counts
	// until it is garbage.
	OpenStreams int

	// ReplayMemory is the memory, in bytes, that counts towards [WithReplayMemory] now, and ReplayLimit
	// the limit. Replies of hedges may exceed it, because their size is unknown before they arrive.
	ReplayMemory, ReplayLimit int64

	// CommittedStreams are the streams that the limit has committed since the Retrier was created, and
	// UnsentHedges the hedges that were due and not sent because of it, each time that they were due.
	CommittedStreams, UnsentHedges int64
}

// Usage returns what the Retrier's calls hold now, as metrics and the debug page show it. It is cheap
// enough for a health check.
func (r *Retrier) Usage() Usage {
	u := r.usage
	return Usage{
		WaitingCalls:     int(u.waiting.Load()),
		OpenStreams:      int(u.streams.Load()),
		ReplayMemory:     u.replay.inUse.Load(),
		ReplayLimit:      u.replay.limit,
		CommittedStreams: u.replay.committed.Load(),
		UnsentHedges:     u.replay.unhedged.Load(),
	}
}

// usage counts what a Retrier and its copies hold.
type usage struct {
	waiting atomic.Int64 // calls that wait
	streams atomic.Int64 // streams that are open
	replay  replayMemory
}

// countWaiting counts a call that starts to wait, or has stopped.
func (u *usage) countWaiting(starts bool) {
	if starts {
		u.waiting.Add(1)
	} else {
		u.waiting.Add(-1)
	}
}

// A holding is what a stream counts with. It is no part of the stream, so that it can be given back when
// the stream is garbage: if an interceptor below drops call options, nothing else reports the end of a
// stream that the application has abandoned.
type holding struct {
	usage  *usage
	memory atomic.Int64 // what the stream's queue holds
}

// hold counts a stream as open.
func (s *retryStream) hold() {
	s.holding = &holding{usage: s.call.retrier.usage}
	s.holding.usage.streams.Add(1)
	s.onGarbage = runtime.AddCleanup(s, (*holding).end, s.holding)
}

// letGo counts the stream as ended.
func (s *retryStream) letGo() {
	s.onGarbage.Stop()
	s.holding.end()
}

func (h *holding) end() {
	h.free()
	h.usage.streams.Add(-1)
}

// take counts size more bytes, if they fit.
func (h *holding) take(size int) bool {
	ok := h.usage.replay.take(int64(size))
	if ok {
		h.memory.Add(int64(size))
	}
	return ok
}

// free counts nothing for the queue any more.
func (h *holding) free() { h.usage.replay.add(-h.memory.Swap(0)) }

func newUsage(c *config) *usage {
	u := &usage{}
	u.replay.limit = defaultReplayMemory
	if c.replayMemory != nil {
		u.replay.limit = *c.replayMemory
	}
	return u
}
