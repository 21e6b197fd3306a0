package grpcretry

import "sync/atomic"

// A Usage is what the calls of a Retrier hold at one moment, and what did not fit into memory so far.
type Usage struct {
	// WaitingCalls are calls that wait for a backoff, a server's delay or a connection before their
	// next attempt, and have no attempt in flight. Functions of [Retrier.Do] are calls, too.
	WaitingCalls int

	// OpenStreams are streams that have not ended. Streams that pass straight through to gRPC do not
	// count.
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

func newUsage(c *config) *usage {
	u := &usage{}
	u.replay.limit = defaultReplayMemory
	if c.replayMemory != nil {
		u.replay.limit = *c.replayMemory
	}
	return u
}
