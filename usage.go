package grpcretry

import (
	"sync/atomic"

	"github.com/grpcretry/grpcretry/internal/inside"
	"github.com/grpcretry/grpcretry/internal/replay"
)

// usage counts what a Retrier and its copies hold.
type usage struct {
	waiting atomic.Int64  // calls that wait
	streams atomic.Int64  // streams that are open
	replay  replay.Memory // sent messages of streams that are not committed
	notKept atomic.Int64  // streams that committed because their messages did not fit into it
}

// now returns what is held now.
func (u *usage) now() inside.Usage {
	return inside.Usage{
		WaitingCalls:     int(u.waiting.Load()),
		OpenStreams:      int(u.streams.Load()),
		ReplayMemory:     u.replay.InUse(),
		ReplayLimit:      u.replay.Limit,
		CommittedStreams: u.notKept.Load(),
	}
}

// defaultReplayMemory is how many bytes of sent messages the uncommitted streams of a Retrier together keep for
// replay. A message that does not fit commits its stream, like one that exceeds [WithBufferLimit].
const defaultReplayMemory = 64 << 20
