package grpcretry

// A phase is a stage in a stream's life. These are all the transitions:
//
//	from        to          when
//	recovering  open        the next attempt has a stream
//	recovering  committed   the same, and Context or Trailer was called meanwhile
//	recovering  ending      no attempt follows
//	open        recovering  the attempt has failed, and this goroutine finds the next
//	open        racing      RecvMsg of a hedged stream is called for the first time
//	open        committed   the application has seen something of the attempt, or has
//	                        called Context or Trailer, or the buffer is full
//	racing      committed   an attempt has won
//	racing      ending      none can win any more
//	committed   ending      the attempt has ended
//	ending      ended       OnFinish and observers have been called
//
// A panic in one of the application's callbacks leads from every phase to ended.
type phase uint8

const (
	phaseRecovering phase = iota // one goroutine uses the call and opens attempts
	phaseOpen                    // the attempt is in use, and another may take its place
	phaseRacing                  // attempts of a hedged stream run beside each other
	phaseCommitted               // the application is bound to the attempt
	phaseEnding                  // the outcome is known, and is being reported
	phaseEnded
)

// A streamState is the state of a stream. It is guarded by the stream's mu.
type streamState struct {
	phase phase

	// The attempt in use; while recovering, the one that has failed; at the end, the last one. It
	// is nil if that attempt has no stream.
	at *streamAttempt

	// The numbers of goroutines that use an attempt, including our helpers; that receive; and
	// that ask for headers. A goroutine that receives judges a failure, because it alone learns
	// the status; the others wait for it. When no goroutine is inside, none notices the end of
	// the caller's context: see checkAbandoned.
	inside, receiving, heading int32

	asking int16 // goroutines that ask the attempt in use for headers, also after a commit, see headersOf

	bind   bool          // commit to the attempt that follows: Context or Trailer was called
	final  error         // when ending or ended: the error that RecvMsg returns
	queue  []any         // the application's messages, in order, as long as they may be needed again
	size   int           // the memory that they hold
	print  uint64        // a hash of the last of them
	spoilt bool          // one of them was changed after SendMsg: they must not be sent again
	done   bool          // CloseSend was called
	waits  chan struct{} // closed at the next change; nil while no goroutine waits
}

// onTransition lets tests check the table above.
var onTransition func(from, to phase)

// changed wakes up the goroutines that wait for a change.
func (s *streamState) changed() {
	if s.waits != nil {
		close(s.waits)
		s.waits = nil
	}
}

// awaitChange returns a function that waits for the next change.
func (s *streamState) awaitChange() (todo func()) {
	if s.waits == nil {
		s.waits = make(chan struct{})
	}
	waits := s.waits
	return func() { <-waits }
}

// inUse reports whether an attempt is in use, so that the application can send to it, and
// receive from it.
func (s *streamState) inUse() bool { return s.phase == phaseOpen || s.phase == phaseCommitted }

// isOver reports whether the outcome is known.
func (s *streamState) isOver() bool { return s.phase >= phaseEnding }

// uses reports whether the attempt is in use, and may be replaced.
func (s *streamState) uses(at *streamAttempt) bool { return s.phase == phaseOpen && s.at == at }

// isReceived reports whether the attempt is in use and may be replaced, and a goroutine receives
// from it.
func (s *streamState) isReceived(at *streamAttempt) bool { return s.uses(at) && s.receiving > 0 }

// complete reports whether the application has nothing more to send.
func (s *streamState) complete(clientStreams bool) bool {
	return s.done || !clientStreams && len(s.queue) > 0
}
