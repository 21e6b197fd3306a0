package grpcretry

import (
	"cmp"
	"io"
	"sync"
	"sync/atomic"
)

// A phase is a stage in a stream's life. These are all the transitions:
//
//	from        to          when
//	recovering  open        the next attempt has a stream
//	recovering  committing  the same, and Context or Trailer was called meanwhile
//	recovering  ending      no attempt follows
//	open        recovering  the attempt has failed, and this goroutine finds the next
//	open        racing      RecvMsg or Header of a hedged stream is called for the first time,
//	                        or SendMsg or Header finds out why the attempt has ended
//	open        committing  the application has seen something of the attempt, or has
//	                        called Context or Trailer, or the buffer is full, or only
//	                        RecvMsg can tell why the attempt has ended
//	racing      committing  an attempt has won
//	racing      recovering  all in flight have failed
//	committing  committed   the plan knows about it
//	committed   closing     the attempt has ended
//	closing     ending      the caller's outputs are complete
//	ending      ended       OnFinish and observers have been called
//
// A panic in one of the application's callbacks leads from every phase to ended.
type phase uint8

const (
	phaseRecovering phase = iota // one goroutine uses the call and opens attempts
	phaseOpen                    // the attempt is in use, and another may take its place
	phaseRacing                  // one goroutine receives the first message; in a hedged stream, from attempts beside each other
	phaseCommitting              // the application is bound to the attempt, and one goroutine tells the plan
	phaseCommitted               // the plan knows it, too
	phaseClosing                 // one goroutine reads what the attempt has left: header, trailer and peer
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
	out    outbox

	// The attempt in use; while recovering, the one that has failed; at the end, the one whose result the call
	// returns. It is nil if that attempt has no stream.
	at *streamAttempt

	// The attempt that the application is bound to or, at the end, that has ended the call while the application received nothing: it may
	// still have messages. It is nil if there is none.
	rest *streamAttempt

	// The numbers of the application's goroutines that receive from an attempt, ask for its headers, or send. The one
	// that receives judges a failure, because it alone learns the status.
	receiving, heading, sending int32

	phase      phase
	bind       bool   // commit to the attempt that follows: Context or Trailer was called
	halfClosed bool   // CloseSend was called
	spoilt     bool   // a message may have changed since it was sent: they must not be sent again
	abort      func() // ends the wait for another attempt, or its opening, when spoilt becomes true; nil for none
	ahead      any    // the first message of a hedged stream, received to know whose headers to return; nil for none
	final      error  // when ending or ended: the error that RecvMsg returns
}

// show makes the attempt whose end the application would see now the one in use.
func (s *streamState) show(a *attempt) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.at = a.bounds().stream
}

// isOver needs mu. It reports whether the outcome is known.
func (s *streamState) isOver() bool { return s.phase >= phaseEnding }

// isBound needs mu. It reports whether the application is bound to the attempt.
func (s *streamState) isBound() bool { return s.phase >= phaseCommitting && !s.isOver() }

// uses needs mu. It reports whether the attempt is in use, and may be replaced.
func (s *streamState) uses(at *streamAttempt) bool { return s.phase == phaseOpen && s.at == at }

// isAwaited needs mu. It reports whether the application waits for a message or for headers.
func (s *streamState) isAwaited() bool { return s.receiving+s.heading > 0 }

// setPhase needs mu. It makes a transition, and wakes up the goroutines that wait for one.
func (s *streamState) setPhase(p phase) {
	s.phase = p
	s.change.Broadcast()
}

// bypass needs mu. From then on messages go straight to the attempt.
func (s *streamState) bypass(at *streamAttempt) {
	s.out.drop()
	s.direct.Store(at)
	s.change.Broadcast()
}

// ending is called when the call's outcome is known, before it is reported, because an observer or
// an OnFinish may use the stream.
func (s *streamState) ending(err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.isOver() {
		return
	}
	s.final = cmp.Or(err, io.EOF)
	s.direct.Store(nil)
	s.out.drop()
	s.out.usage.streams.Add(-1)
	s.setPhase(phaseEnding)
}

// conclude is called when the call's outcome has been reported.
func (s *streamState) conclude() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.setPhase(phaseEnded)
}

// isFinal reports whether no other attempt may follow: the application is bound to one, or a message may have changed since it was sent.
// A unary call, which has no stream, is never final.
func (s *retryStream) isFinal() bool {
	if s == nil {
		return false
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.phase >= phaseCommitting || s.spoilt
}

// becomesFinal returns a channel that is closed if the stream becomes final while the call waits for another attempt. It is nil for a
// unary call.
func (s *retryStream) becomesFinal() <-chan struct{} {
	if s == nil {
		return nil
	}
	final := make(chan struct{})
	s.onSpoilt(func() { close(final) })
	return final
}

// onSpoilt has abort called, with mu held, when spoilt becomes true, or now if it is.
func (s *streamState) onSpoilt(abort func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.abort = abort; s.spoilt {
		abort()
	}
}

// cut ends an overdue attempt. It returns false if another one is to replace it, but the application has become bound to it. One that
// nothing replaces is cut all the same, because it could hang.
func (s *streamState) cut(a *attempt, replaced bool) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if replaced && s.phase >= phaseCommitting {
		return false
	}
	a.bounds().own.Cancel(ErrAttemptTimeout)
	return true
}
