package grpcretry

import (
	"errors"
	"io"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/grpcretry/grpcretry/internal/replay"
	"github.com/grpcretry/grpcretry/internal/replies"
)

// This file gets messages from the application to an attempt. They are kept in the outbox as long as another
// attempt may need them. The application's goroutine sends them to the first attempt. To each later one, a
// goroutine of ours sends the whole outbox; it is the only sender until it has caught up.

// An outbox holds what the application has sent.
type outbox struct {
	queue []any  // the messages, and the half-close, in order, as long as they may be needed again
	space [2]any // for the queue
	size  int    // of the messages in the queue
	usage *usage // counts the size
}

// A halfClose stands for CloseSend in an outbox.
type halfClose struct{}

// keep adds a message. It returns false if there is no memory for it.
func (o *outbox) keep(m any, size int) bool {
	if !o.usage.replay.Reserve(size) {
		return false
	}
	o.size += size
	o.queue = append(o.queue, m)
	return true
}

// drop forgets the messages.
func (o *outbox) drop() {
	o.usage.replay.Release(o.size)
	o.queue, o.space, o.size = nil, [2]any{}, 0
}

// isLatest reports whether m is the object that was sent last. It may have other contents now: gRPC forbids
// that, but a program that does it works until a stream is retried.
func (o *outbox) isLatest(m any) bool {
	return len(o.queue) > 0 && replies.IsPointer(m) && o.queue[len(o.queue)-1] == m
}

// lacks reports whether the attempt lacks messages, or the CloseSend, of the application.
func (o *outbox) lacks(at *streamAttempt) bool { return at.sent < len(o.queue) }

// isComplete needs mu. It reports whether the application has nothing more to send.
func (s *retryStream) isComplete() bool {
	return s.halfClosed || !s.desc.ClientStreams && len(s.out.queue) > 0
}

// A sender says who may send to an attempt.
type sender uint8

const (
	senderApplication sender = iota // the application's goroutine, if the attempt lacks nothing
	senderReplay                    // a goroutine of ours
	senderNone                      // nobody: SendMsg has failed, so that something is missing
)

// send is SendMsg, except that it returns io.EOF at the end of a server stream.
func (s *retryStream) send(m any) error {
	if at := s.direct.Load(); at != nil {
		return s.sendTo(at, m)
	}
	size, known := replay.Size(m)
	s.mu.Lock()
	for {
		switch at := s.at; {
		case s.mayPass(at):
			s.mu.Unlock()
			return s.sendTo(at, m)
		case s.isOver(), s.isBound() && at.sender == senderNone:
			s.mu.Unlock()
			return io.EOF
		case !s.mayKeep(m, size, known):
			s.commitToSend(false)
		case !s.out.keep(m, size):
			s.commitToSend(true)
		case s.phase != phaseOpen || at.sender == senderReplay:
			s.mu.Unlock()
			return nil // the goroutine that replays sends this message, too
		default:
			return s.sendNow(at, func() error { return at.stream.SendMsg(m) })
		}
	}
}

// mayPass needs mu. It reports whether gRPC's own SendMsg and CloseSend have the result for the application: from the time
// when the attempt has been sent everything, and after its end.
func (s *retryStream) mayPass(at *streamAttempt) bool {
	return s.direct.Load() != nil || s.isOver() && at != nil && at.end != nil && at.sender == senderApplication
}

// sendTo sends a message to an attempt that has been sent everything.
func (s *retryStream) sendTo(at *streamAttempt, m any) error {
	at.users.enter()
	defer at.leave()
	before := at.users.hasEnded()
	err := at.stream.SendMsg(m)
	if err != nil && !asksRecvMsg(err) {
		at.abandon(err, before) // gRPC has ended the stream with this error, unless an interceptor below made it up
	}
	return err
}

// mayKeep needs mu. It reports whether a message may be kept for a replay. Otherwise the stream commits; then it is not
// repeated even if a server refuses it before it runs, which gRPC itself would do. The one request of a server stream may always be kept.
func (s *retryStream) mayKeep(m any, size int, known bool) bool {
	if !s.desc.ClientStreams {
		return !s.isComplete()
	}
	if s.out.isLatest(m) && !s.spoilt {
		s.spoilt = true
		if s.abort != nil {
			s.abort()
		}
	}
	return known && size <= s.call.policy.BufferLimit-s.out.size && !s.spoilt && !s.halfClosed
}

// commitToSend needs mu, which it gives back in between. It takes the next step towards a committed stream, which
// keeps no messages. full means that the Retrier's replay memory is.
func (s *retryStream) commitToSend(full bool) {
	at := s.at
	if s.phase != phaseOpen || s.receiving > 0 && at.failure() != nil {
		s.change.Wait()
		return
	}
	spoilt := s.spoilt
	if err := at.failure(); err != nil {
		s.recover(at, err, nil)
	} else {
		s.bindTo(at)
		switch u := s.call.retrier.usage; {
		case full:
			u.notKept.Add(1)
			s.call.retrier.report.streamNotKept(&s.call.facts, u.replay.Limit)
		case spoilt:
			s.call.retrier.report.sentAgain(&s.call.facts)
		}
	}
	s.mu.Lock()
}

// sendNow needs mu, and returns without. It sends the newest entry of the outbox to an attempt that lacks no other.
func (s *retryStream) sendNow(at *streamAttempt, send func() error) error {
	at.sent++
	if at.sender == senderNone {
		s.mu.Unlock()
		return s.sendFailed(at, io.EOF)
	}
	s.sending++
	s.mu.Unlock()
	defer s.left(&s.sending, false)
	if err := at.hand(send); err != nil {
		return s.sendFailed(at, err)
	}
	return nil
}

// sendFailed returns the error of the application's SendMsg when that of an attempt has failed with err. If nobody
// receives, this goroutine finds out why: from RecvMsg or, if it cannot call that, from Header.
func (s *retryStream) sendFailed(at *streamAttempt, err error) error {
	asks := asksRecvMsg(err) // without mu, because it may be an interceptor's
	s.mu.Lock()
	if asks && s.uses(at) && !s.isAwaited() && !s.receiveAhead() {
		s.heading++
		s.mu.Unlock()
		md, headerErr := at.askHeader() // which does not wait, because the stream has ended
		s.headed(at, md, headerErr)
		s.mu.Lock()
		if s.uses(at) { // an interceptor below hides what it is, so that only RecvMsg can tell
			s.bindTo(at)
			s.mu.Lock()
		}
	}
	for !asks && (s.uses(at) || s.phase == phaseRecovering || s.phase == phaseRacing) {
		if s.uses(at) && at.end != nil && !s.isAwaited() { // it had ended before SendMsg, and only RecvMsg can tell how
			s.bindTo(at)
			s.mu.Lock()
			continue
		}
		s.change.Wait() // for the goroutine that judges the failure
	}
	defer s.mu.Unlock()
	switch {
	case s.isOver() && s.at != at && !isEOF(s.final):
		return io.EOF // whichever attempts the message has reached, they have failed
	case s.at != at || !s.isOver() && !s.isBound():
		return nil // the message was replayed, or will be
	}
	at.sender = senderApplication // which knows what is missing
	if s.isBound() {
		s.bypass(at)
	}
	if s.isOver() && !asks && isSame(s.final, err) {
		return s.final
	}
	return err
}

// asksRecvMsg reports whether the error of a SendMsg says that only RecvMsg can tell why the stream has ended: io.EOF, however an
// interceptor below words it.
func asksRecvMsg(err error) bool { return errors.Is(readable(err), io.EOF) }

// hand calls SendMsg or CloseSend of an attempt on the application's goroutine.
func (at *streamAttempt) hand(send func() error) (err error) {
	err = errPanicked
	before := at.users.hasEnded()
	defer func() { at.handed(err, before) }()
	return send()
}

// handed takes the result of SendMsg or CloseSend. If it is io.EOF, the failure is gRPC's, and is found by whoever sends or
// receives next. For before, see abandon.
func (at *streamAttempt) handed(err error, before bool) {
	if err == nil {
		return
	}
	s := at.of
	s.mu.Lock()
	at.sender = senderNone
	s.change.Broadcast()
	s.mu.Unlock()
	if !asksRecvMsg(err) {
		at.abandon(err, before)
	}
}

// catchUp needs mu. It starts to send the outbox to an attempt that lacks some of it.
func (at *streamAttempt) catchUp() {
	if at.sender == senderApplication && at.of.out.lacks(at) {
		at.sender = senderReplay
		go at.replay()
	}
}

// replay sends the outbox to an attempt, on a goroutine of ours.
func (at *streamAttempt) replay() {
	before := at.users.hasEnded()
	err := errExited // if a codec or an interceptor below calls runtime.Goexit
	defer func() {
		if p := recover(); p != nil {
			err = status.Errorf(codes.Internal, "grpcretry: panic while a message was sent again: %v", p)
		}
		at.handed(err, before)
	}()
	err = at.sendOutbox()
}

// sendOutbox sends what the attempt lacks, as long as SendMsg does not fail.
func (at *streamAttempt) sendOutbox() (err error) {
	for err == nil {
		switch entry := at.of.nextToReplay(at); entry {
		case nil:
			return nil
		case halfClose{}:
			err = at.stream.CloseSend()
		case errSpoilt:
			err = errSpoilt
		default:
			err = at.stream.SendMsg(entry)
		}
	}
	return err
}

var errSpoilt = status.Error(codes.Unavailable,
	"grpcretry: the stream has failed, and cannot be sent again: an object was sent twice, and may have had other contents the first time")

// nextToReplay returns what the attempt lacks first, nil if that is nothing: then the application's goroutine sends from now on. It
// returns errSpoilt if that must not be sent.
func (s *streamState) nextToReplay(at *streamAttempt) (entry any) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.at != at && s.phase != phaseRacing || s.phase == phaseRecovering || s.isOver() || !s.out.lacks(at) {
		at.sender = senderApplication
		if s.isBound() && s.at == at {
			s.bypass(at)
		}
		return nil
	}
	if s.spoilt {
		return errSpoilt
	}
	entry = s.out.queue[at.sent]
	if s.isBound() {
		s.out.queue[at.sent] = nil // it is not sent again
	}
	at.sent++
	return entry
}
