package grpcretry

import (
	"io"
	"sync"
	"sync/atomic"
	"time"
)

// A phase is a stage in a stream's life. These are all the transitions:
//
//	from        to          when
//	recovering  open        the next attempt has a stream
//	recovering  committing  the same, and Context or Trailer was called meanwhile; or
//	                        only RecvMsg can tell why the attempt has ended
//	recovering  ending      no attempt follows
//	open        recovering  the attempt has failed, and this goroutine finds the next
//	open        racing      RecvMsg of a hedged stream is called for the first time
//	open        committing  the application has seen something of the attempt, or has
//	                        called Context or Trailer, or the buffer is full
//	racing      committing  an attempt has won
//	racing      recovering  all in flight have failed
//	committing  committed   the plan knows about it
//	committing  ending      the response of a client stream is its end
//	committed   ending      the attempt has ended
//	ending      ended       OnFinish and observers have been called
//
// A panic in one of the application's callbacks leads from every phase to ended.
type phase uint8

const (
	phaseRecovering phase = iota // one goroutine uses the call and opens attempts
	phaseOpen                    // the attempt is in use, and another may take its place
	phaseRacing                  // attempts of a hedged stream run beside each other
	phaseCommitting              // the application is bound to the attempt, and one goroutine tells the plan
	phaseCommitted               // the plan knows it, too
	phaseEnding                  // the outcome is known, and is being reported
	phaseEnded
)

// A streamState is the state of a stream. What needs mu says so.
type streamState struct {
	// direct is the attempt that the application is committed to. It is set when that attempt
	// has been sent the whole outbox; from then on messages bypass the fields below.
	direct atomic.Pointer[streamAttempt]

	mu     sync.Mutex // guards the fields below; never held during an RPC, a wait or a callback
	change sync.Cond  // of these fields; uses mu
	phase  phase
	out    outbox

	// The attempt in use; while recovering, the one that has failed; at the end, the last one. It
	// is nil if that attempt has no stream.
	at *streamAttempt

	// The numbers of the application's goroutines that send to an attempt, receive from it, or ask for
	// its headers. The one that receives judges a failure, because it alone learns the status. Without
	// any of them, nobody notices the end of the caller's context: see checkAbandoned.
	sending, receiving, heading int32

	bind  bool  // commit to the attempt that follows: Context or Trailer was called
	final error // when ending or ended: the error that RecvMsg returns
}

// isOver reports whether the outcome is known.
func (s *streamState) isOver() bool { return s.phase >= phaseEnding }

// isBound reports whether the application is bound to the attempt.
func (s *streamState) isBound() bool { return s.phase == phaseCommitting || s.phase == phaseCommitted }

// uses reports whether the attempt is in use, and may be replaced.
func (s *streamState) uses(at *streamAttempt) bool { return s.phase == phaseOpen && s.at == at }

// setPhase needs mu. It makes a transition, and wakes up the goroutines that wait for one.
func (s *streamState) setPhase(p phase) {
	if p >= phaseEnding {
		s.direct.Store(nil)
		s.out.drop()
	}
	if p == phaseEnded && s.phase != phaseEnded {
		s.out.holding.end()
	}
	s.phase = p
	s.change.Broadcast()
}

// claim needs mu. From then on the caller alone uses the call, until it changes the phase again.
func (s *streamState) claim(at *streamAttempt) {
	at.stopWatching()
	s.setPhase(phaseRecovering)
}

// bypass needs mu. From then on messages go straight to the attempt.
func (s *streamState) bypass(at *streamAttempt) {
	s.out.drop()
	at.sent = 0
	s.direct.Store(at)
	s.change.Broadcast()
}

func (s *streamState) isSpoilt() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.out.spoilt
}

// ending is called when the call's outcome is known, before it is reported, because an observer or
// an OnFinish may use the stream.
func (s *streamState) ending(err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.isOver() {
		return
	}
	s.final = err
	if err == nil {
		s.final = io.EOF
	}
	s.setPhase(phaseEnding)
}

// result returns the outcome of a call that is over, nil for a success.
func (s *streamState) result() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if isEOF(s.final) {
		return nil
	}
	return s.final
}

// conclude is called when the call's outcome has been reported.
func (s *streamState) conclude() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.setPhase(phaseEnded)
}

// overGrace limits the wait for gRPC's report of an attempt's end, which does not come if an interceptor below drops
// call options.
const overGrace = 10 * time.Millisecond

// awaitOver waits until gRPC has reported an attempt's end, which another goroutine may be about to do. It returns
// whether that has come, and whether the end is certain.
func (s *streamState) awaitOver(at *streamAttempt) (over, ended bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if at.over || s.out.holding.usage.hidden.Load() {
		return at.over, at.hasEnded()
	}
	expired := false
	grace := time.AfterFunc(overGrace, func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		expired = true
		s.change.Broadcast()
	})
	defer grace.Stop()
	for !at.over && !expired {
		s.change.Wait()
	}
	return at.over, at.hasEnded()
}

func (s *streamState) isCommitted() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.phase >= phaseCommitting
}

// cut ends an overdue attempt. Unless committed is true, it returns false if the application has become bound to
// the attempt.
func (s *streamState) cut(a *attempt, committed bool) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.phase >= phaseCommitting && !committed {
		return false
	}
	a.bounds.cancel(ErrAttemptTimeout)
	s.change.Broadcast()
	return true
}

// nextToReplay returns a function that sends what the attempt lacks first, nil if that is nothing.
func (s *streamState) nextToReplay(at *streamAttempt) (send func() error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case s.at != at && s.phase != phaseRacing, s.phase == phaseRecovering, s.isOver(), !s.out.lacks(at):
		s.caughtUp(at)
		return nil
	case at.sent == len(s.out.queue):
		at.closed = true
		return at.stream.CloseSend
	}
	m := s.out.queue[at.sent]
	at.sent++
	if s.isBound() {
		s.out.queue[at.sent-1] = nil // the message is not sent again
	}
	return func() error { return at.stream.SendMsg(m) }
}

// caughtUp needs mu. The application's goroutine sends from now on.
func (s *streamState) caughtUp(at *streamAttempt) {
	at.replaying = false
	if s.isBound() && s.at == at && at.broken == nil {
		s.bypass(at)
	}
	s.change.Broadcast()
}

// endWithoutHeaders returns the error of an attempt that has ended without headers: io.EOF after a success, nil if
// gRPC does not report an end, because an interceptor hides the headers.
func (s *streamState) endWithoutHeaders(at *streamAttempt) error {
	over, _ := s.awaitOver(at)
	s.mu.Lock()
	err := at.failure()
	s.mu.Unlock()
	switch {
	case err != nil:
		return err
	case over:
		return at.emptyEnd()
	default:
		return nil
	}
}
