package grpcretry

import (
	"errors"
	"io"
)

// This file gets messages from the application to an attempt. They are kept in the outbox as long as another
// attempt may need them. The application's goroutine sends them to the first attempt. To each later one, a
// goroutine of ours sends the whole outbox; it is the only sender until it has caught up.

// An outbox holds what the application has sent.
type outbox struct {
	queue   []any    // the messages, in order, as long as they may be needed again
	space   [1]any   // for the queue
	size    int      // of the queue
	spoilt  bool     // a message may have changed since it was sent: they must not be sent again
	done    bool     // CloseSend was called
	single  bool     // there is one message at most
	holding *holding // what the queue counts with in Usage
}

// keep adds a message. It returns false if there is no memory for it.
func (o *outbox) keep(m any, size int) bool {
	if !o.holding.reserve(size) {
		return false
	}
	if o.queue == nil {
		o.queue = o.space[:0]
	}
	o.queue = append(o.queue, m)
	o.size += size
	return true
}

// drop forgets the messages.
func (o *outbox) drop() {
	o.holding.release()
	o.queue, o.space, o.size = nil, [1]any{}, 0
}

// isLatest reports whether m is the object that was sent last. It may have other contents now: gRPC forbids
// that, but a program that does it works until a stream is retried.
func (o *outbox) isLatest(m any) bool {
	return len(o.queue) > 0 && isPointer(m) && o.queue[len(o.queue)-1] == m
}

// lacks reports whether the attempt lacks messages, or the CloseSend, of the application.
func (o *outbox) lacks(at *streamAttempt) bool {
	return at.sent < len(o.queue) || o.done && !at.closed
}

// isComplete reports whether the application has nothing more to send.
func (o *outbox) isComplete() bool { return o.done || o.single && len(o.queue) > 0 }

// send is SendMsg, except that it returns io.EOF at the end of a server stream.
func (s *retryStream) send(m any) error {
	if at := s.direct.Load(); at != nil {
		return s.sendTo(at, m)
	}
	size, known := sizeOf(m)
	s.mu.Lock()
	for {
		switch at := s.at; {
		case s.direct.Load() != nil:
			s.mu.Unlock()
			return s.sendTo(at, m)
		case s.isOver() && (at == nil || at.isOpenBelow() && !s.out.done && s.desc.ClientStreams):
			s.mu.Unlock()
			return io.EOF // the stream of gRPC, if there is one, would accept the message
		case s.isOver():
			return s.atEnd(at, func() error { return at.stream.SendMsg(m) })
		case !s.mayKeep(m, size, known):
			s.commitToSend(false)
		case !s.out.keep(m, size):
			s.commitToSend(true)
		case s.phase != phaseOpen || at.replaying:
			s.mu.Unlock()
			return nil // the goroutine that replays sends this message, too
		default:
			return s.sendNow(at, m)
		}
	}
}

// sendTo sends a message to the attempt that the stream is committed to.
func (s *retryStream) sendTo(at *streamAttempt, m any) error {
	err := at.stream.SendMsg(m)
	if err != nil && !isEOF(err) { // gRPC has ended the stream with this error
		s.end(at, err)
	}
	return err
}

// atEnd needs mu, and returns without. It calls a method of the attempt of a call that is over, so that the application
// gets gRPC's own result.
func (s *retryStream) atEnd(at *streamAttempt, send func() error) error {
	for at.replaying {
		s.change.Wait()
	}
	s.mu.Unlock()
	return send()
}

// mayKeep needs mu. It reports whether a message may be kept for a replay; otherwise the stream commits. One request
// of a server stream always may.
func (s *retryStream) mayKeep(m any, size int, known bool) bool {
	if !s.desc.ClientStreams {
		return !s.out.isComplete()
	}
	if !s.out.spoilt && s.out.isLatest(m) {
		s.out.spoilt = true
		s.mu.Unlock()
		s.call.retrier.report.sentAgain(&s.call.facts)
		s.mu.Lock()
	}
	return known && size <= s.call.policy.BufferLimit-s.out.size && !s.out.spoilt && !s.out.done
}

// commitToSend needs mu, which it gives back in between. It takes the next step towards a committed stream, which
// keeps no messages. full means that the memory of the Retrier's calls together is.
func (s *retryStream) commitToSend(full bool) {
	at := s.at
	if s.phase != phaseOpen || s.receiving > 0 && at.failure() != nil {
		s.change.Wait()
		return
	}
	if err := at.failure(); err != nil {
		s.recover(at, err, s.call.contest.repanic)
	} else {
		s.bindTo(at)
		if memory := &s.call.retrier.usage.replay; full {
			memory.committed.Add(1)
			s.call.retrier.report.streamNotKept(&s.call.facts, memory.limit)
		}
	}
	s.mu.Lock()
}

// sendNow needs mu, and returns without. It sends the newest message, which is in the outbox, to an attempt that
// lacks no other. It returns the error of SendMsg.
func (s *retryStream) sendNow(at *streamAttempt, m any) error {
	at.sent++
	if at.deaf {
		return s.sendFailed(at, io.EOF)
	}
	s.sending++
	s.mu.Unlock()
	err := at.hand(func() error { return at.stream.SendMsg(m) })
	if err == nil {
		return nil
	}
	s.mu.Lock()
	return s.sendFailed(at, err)
}

// sendFailed needs mu, and returns without. It returns the error of the application's SendMsg when that of an attempt
// has failed with err. If nobody receives, this goroutine finds out why.
func (s *retryStream) sendFailed(at *streamAttempt, err error) error {
	for !isEOF(err) && (s.uses(at) && s.receiving+s.heading > 0 || s.phase == phaseRecovering && s.at == at) {
		s.change.Wait()
	}
	if s.uses(at) && s.receiving+s.heading == 0 && (s.desc.ClientStreams || !isEOF(err)) {
		s.learnWhy(at)
		s.mu.Lock()
	}
	defer s.mu.Unlock()
	switch {
	case s.isOver() && !isEOF(err) && errors.Is(s.final, err):
		return s.final
	case s.isOver(), s.isBound() && s.at == at:
		return err
	default:
		return nil // the message was replayed, or will be
	}
}

// learnWhy needs mu, and returns without. It recovers from the failure of an attempt that nobody receives from. If only
// RecvMsg can tell what the failure is, because there are headers, the stream is committed.
func (s *retryStream) learnWhy(at *streamAttempt) {
	why := at.failure()
	if why == nil {
		s.claim(at)
		s.mu.Unlock()
		s.orCrash(func() {
			if md, err := at.stream.Header(); md == nil && err == nil {
				why = s.endWithoutHeaders(at)
			}
		})
		s.mu.Lock()
	}
	if why == nil {
		s.bindTo(at)
		return
	}
	s.recover(at, why, s.call.contest.repanic)
}

// close implements CloseSend until the stream is committed.
func (s *retryStream) close() error {
	s.mu.Lock()
	at := s.at
	s.out.done = true
	if s.direct.Load() != nil {
		s.mu.Unlock()
		return at.stream.CloseSend()
	}
	if s.isOver() && at != nil {
		return s.atEnd(at, at.stream.CloseSend)
	}
	if s.phase != phaseOpen || at.replaying || at.closed || at.deaf {
		s.mu.Unlock()
		return nil // the goroutine that replays calls CloseSend
	}
	at.closed = true
	s.sending++
	s.mu.Unlock()
	err := at.hand(at.stream.CloseSend)
	if err != nil {
		s.mu.Lock()
		err = s.sendFailed(at, err)
	}
	if isEOF(err) {
		return nil // RecvMsg returns the status
	}
	return err
}
