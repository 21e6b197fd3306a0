package grpcretry

import (
	"context"
	"errors"
	"io"
	"reflect"

	"google.golang.org/grpc/status"
)

// This file gets messages from the application to an attempt: into a queue, which is kept as long as
// another attempt may need it, and from there to the attempt in use. A new attempt is sent the whole
// queue. One goroutine at a time sends; others only add to the queue.

// errCommitFirst means that the message does not fit into the queue, so that the stream has committed.
var errCommitFirst = errors.New("grpcretry: committed by the buffer limit")

// errEnded means that the call is over.
var errEnded = errors.New("grpcretry: the stream has ended")

// keep puts a message into the queue. It returns the attempt that the caller is to hand the queue to,
// nil if another goroutine does that. With errEnded it returns the call's last attempt.
func (s *retryStream) keep(m any, w weighing) (*streamAttempt, error) {
	for {
		at, todo, err := s.tryKeep(m, w)
		if todo == nil {
			return at, err
		}
		todo()
	}
}

// tryKeep is keep, unless something must be done or waited for first: then it returns that as todo.
func (s *retryStream) tryKeep(m any, w weighing) (_ *streamAttempt, todo func(), _ error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	fits := !s.desc.ClientStreams || w.size >= 0 && w.size <= s.call.policy.BufferLimit-s.size
	if !s.spoilt && s.changes(m, w.print) {
		s.spoilt = true
		return nil, func() { s.call.retrier.report.messageChanged(&s.call.facts) }, nil
	}
	switch at := s.at; {
	case s.isOver() && at == nil:
		return nil, nil, io.EOF
	case s.isOver() && at.sending:
		return nil, s.awaitChange(), nil
	case s.isOver() && at.fate != fateCommitted && !s.done && !at.over && s.desc.ClientStreams:
		return nil, nil, io.EOF
	case s.isOver():
		return at, nil, errEnded
	case s.direct.Load() != nil:
		return nil, nil, errCommitFirst
	case !fits || s.spoilt || s.complete(s.desc.ClientStreams):
		return nil, s.makeRoom(at), nil
	case s.phase == phaseRecovering && s.call.ctx.Err() != nil: // no attempt follows
		return nil, s.awaitChange(), nil
	case !s.holding.take(w.size):
		return nil, s.makeRoomForAll(at), nil
	}
	s.queue = append(s.queue, m)
	s.size += w.size
	s.print = w.print
	if !s.inUse() || s.at.sending {
		return nil, nil, nil // the recovering or sending goroutine sends this message too
	}
	s.startSending(s.at)
	return s.at, nil, nil
}

// changes needs mu. It reports whether m is the object that was sent last, with different contents.
// gRPC forbids that, but a program that does it works until a stream is retried.
func (s *retryStream) changes(m any, hash uint64) bool {
	if !s.desc.ClientStreams || len(s.queue) == 0 || reflect.ValueOf(m).Kind() != reflect.Pointer {
		return false
	}
	return s.queue[len(s.queue)-1] == m && (hash == 0 || hash != s.print)
}

// atEnd calls a method of a stream that has ended, so that the application gets gRPC's own result.
// It makes one such call at a time, as gRPC requires of the application.
func (s *retryStream) atEnd(at *streamAttempt, send func() error) error {
	s.until(func() bool {
		free := !at.sending
		at.sending = true
		return free
	})
	defer func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		at.sending = false
		s.changed()
	}()
	return send()
}

// makeRoom needs mu. It returns the next step towards a committed stream with an empty queue.
func (s *retryStream) makeRoom(at *streamAttempt) (todo func()) {
	switch {
	case s.phase == phaseOpen && at.failure() == nil:
		s.commit(at)
		return func() { s.afterCommit(at) }
	case s.phase == phaseOpen && s.receiving == 0:
		return s.recoverNext(at, at.failure())
	case s.phase == phaseCommitted && !at.sending:
		s.startSending(at)
		return func() { _ = s.drain(at) } // if it fails, so will the message that is to be sent
	default:
		return s.awaitChange()
	}
}

// makeRoomForAll needs mu. It is makeRoom for a message that exceeds the memory of the Retrier's calls
// together.
func (s *retryStream) makeRoomForAll(at *streamAttempt) (todo func()) {
	wasOpen := s.phase == phaseOpen
	next := s.makeRoom(at)
	if !wasOpen || s.phase != phaseCommitted {
		return next
	}
	return func() {
		memory := &s.call.retrier.usage.replay
		memory.committed.Add(1)
		next() // before the report, which may panic
		s.call.retrier.report.streamNotKept(&s.call.facts, memory.limit)
	}
}

// dropQueue needs mu. It forgets the application's messages.
func (s *retryStream) dropQueue() {
	s.holding.free()
	s.queue, s.size = nil, 0
}

// pending needs mu. It reports whether the attempt lacks messages, or a CloseSend, of the
// application.
func (s *retryStream) pending(at *streamAttempt) bool {
	return at.broken == nil && (at.sent < len(s.queue) || s.done && !at.closed)
}

// startSending needs mu. It must be followed by a call of drain, without mu.
func (s *retryStream) startSending(at *streamAttempt) {
	at.sending = true
	s.inside++
}

// catchUp needs mu. If the attempt lacks something and no goroutine is sending, it starts to send.
// It returns true if the caller is to call drain, because that cannot block longer than the
// application's own SendMsg would have. Anything else is sent on a goroutine of its own, because the
// server may wait for the application to receive first.
func (s *retryStream) catchUp(at *streamAttempt) (drain bool) {
	if at.sending || !s.pending(at) {
		return false
	}
	s.startSending(at)
	if !s.desc.ClientStreams || at.sent == len(s.queue) {
		return true
	}
	at.helpers.Go(func() { s.help(at) })
	return false
}

// sendRequest sends the part that catchUp has left to the caller. If that fails, RecvMsg returns the
// status.
func (s *retryStream) sendRequest(at *streamAttempt) {
	err := s.drain(at)
	if err == nil || isEOF(err) {
		return
	}
	s.mu.Lock()
	committed := s.phase == phaseCommitted && s.at == at
	s.mu.Unlock()
	if committed {
		at.release()
		s.end(at, err)
	}
}

// sendMissing needs mu. It makes sure that an attempt is sent everything that it lacks; todo, unless it
// is nil, sends the caller's part.
func (s *retryStream) sendMissing(at *streamAttempt) (todo func()) {
	if !s.catchUp(at) {
		return nil
	}
	return func() { s.sendRequest(at) }
}

// help sends the queue, on a goroutine of ours, while the application receives.
func (s *retryStream) help(at *streamAttempt) {
	failed := errPanicked
	defer func() {
		if isEOF(failed) || failed == nil {
			return
		}
		s.mu.Lock()
		if failed == errPanicked { //nolint:errorlint // set here
			at.panicked = recover()
		}
		committed := s.phase == phaseCommitted && s.at == at
		if at.broken == nil {
			at.broken = failed
		}
		s.changed()
		s.mu.Unlock()
		at.release() // wakes up the goroutine that receives
		if committed {
			s.end(at, failed)
		}
	}()
	failed = s.drain(at)
}

// drain hands the whole queue to an attempt, after a call of startSending. If it returns an error, the
// attempt has failed.
func (s *retryStream) drain(at *streamAttempt) error {
	done, failed := false, errPanicked
	ended := false // SendMsg has just returned io.EOF
	defer func() {
		if !done {
			s.stopSending(at, failed)
		}
		s.exit(at)
	}()
	for {
		m, next := s.nextToSend(at)
		var err error
		switch next {
		case sendNothing:
			done = true
			return nil
		case sendMessage:
			err = at.stream.SendMsg(m)
		case sendClose:
			err = at.stream.CloseSend()
		}
		switch {
		case err == nil:
			ended = false
		case isEOF(err) && !ended && s.mayGoOn(at):
			// gRPC may be about to retry the call transparently in RecvMsg. If it still does,
			// it has kept this message, and accepts the next ones.
			ended = true
			at.stream.Context() // see whySendFailed
		default:
			if isEOF(err) && s.isCommittedTo(at) {
				at.stream.Context() // gRPC must not retry a stream that is not sent the rest
			}
			failed = err
			return err
		}
	}
}

// mayGoOn reports whether to go on after io.EOF: a goroutine receives from the attempt and, if that is
// committed, there is more to send. Otherwise the application gets the io.EOF, as from gRPC.
func (s *retryStream) mayGoOn(at *streamAttempt) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.isReceived(at) || s.phase == phaseCommitted && s.at == at && s.receiving > 0 && s.pending(at)
}

func (s *retryStream) isCommittedTo(at *streamAttempt) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.phase == phaseCommitted && s.at == at
}

// A sendStep is the next step of drain.
type sendStep int

const (
	sendNothing sendStep = iota
	sendMessage
	sendClose
)

func (s *retryStream) nextToSend(at *streamAttempt) (any, sendStep) {
	s.mu.Lock()
	defer s.mu.Unlock()
	// A race may start while the request is being sent to the first attempt.
	current := s.at == at && (s.inUse() || s.phase == phaseRacing) && at.broken == nil
	switch {
	case current && at.sent < len(s.queue):
		m := s.queue[at.sent]
		at.sent++
		if s.phase == phaseCommitted {
			s.queue[at.sent-1] = nil // the message is not sent again
		}
		return m, sendMessage
	case current && s.done && !at.closed:
		at.closed = true
		return nil, sendClose
	}
	s.stopSendingLocked(at)
	return nil, sendNothing
}

func (s *retryStream) stopSending(at *streamAttempt, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !isEOF(err) && at.broken == nil && s.at == at && !s.isOver() {
		at.broken = err // the attempt lacks the message
	}
	s.stopSendingLocked(at)
}

func (s *retryStream) stopSendingLocked(at *streamAttempt) {
	at.sending = false
	if s.phase == phaseCommitted && s.at == at {
		s.bypass(at)
	}
	s.changed()
}

// handOver hands the queue to an attempt and, if that fails meanwhile, to those that follow it. It
// returns the error of SendMsg.
func (s *retryStream) handOver(at *streamAttempt) error {
	for {
		err := s.drain(at)
		if err == nil {
			return nil
		}
		if at, err = s.sendFailed(at, err); at == nil {
			return s.sendError(err)
		}
	}
}

// sendFailed handles the failure of a send. It returns the attempt that the caller is to hand the
// queue to or, without one, the error of SendMsg.
func (s *retryStream) sendFailed(at *streamAttempt, err error) (*streamAttempt, error) {
	if !isEOF(err) {
		return s.sendBroken(at, err)
	}
	if !s.desc.ClientStreams {
		return nil, nil // RecvMsg will learn the reason
	}
	s.mu.Lock()
	unclear := s.uses(at) && s.receiving == 0
	s.mu.Unlock()
	var cause error
	if unclear {
		cause = s.whySendFailed(at)
	}
	s.mu.Lock()
	switch {
	case s.at == at && s.phase >= phaseCommitted, s.isOver():
		s.mu.Unlock()
		return nil, err
	case !s.uses(at) || s.receiving > 0 || !unclear:
		s.mu.Unlock()
		return nil, nil // the message was replayed, or will be
	case cause == nil: // only RecvMsg can tell
		s.commit(at)
		s.bypass(at) // the rest of the queue cannot be sent
		s.mu.Unlock()
		s.afterCommit(at)
		return nil, err
	}
	s.claim(at)
	s.mu.Unlock()
	s.recover(at, cause)
	return s.takeOver(err)
}

// sendBroken handles an error of SendMsg or CloseSend that is not gRPC's end of the stream: a message
// that cannot be sent, or an interceptor below that fails. gRPC may not know that the attempt has
// failed.
func (s *retryStream) sendBroken(at *streamAttempt, err error) (*streamAttempt, error) {
	s.mu.Lock()
	broken := at.broken != nil
	s.mu.Unlock()
	if broken {
		at.release() // wakes up the goroutine that receives
	}
	s.until(func() bool { return !s.isReceived(at) && s.phase != phaseRecovering })
	s.mu.Lock()
	committed := s.at == at && s.phase == phaseCommitted
	recovers := s.uses(at)
	over := s.isOver()
	if recovers {
		s.claim(at)
	}
	s.mu.Unlock()
	switch {
	case recovers:
		s.recover(at, err)
		return s.takeOver(err)
	case committed:
		s.end(at, err)
		return nil, err
	case over:
		return s.takeOver(err)
	default:
		return nil, nil // the message is sent to another attempt
	}
}

// takeOver returns, after a recovery, the attempt that the caller is to hand the queue to or, without
// one, the error of SendMsg; err is the failure before the recovery.
func (s *retryStream) takeOver(err error) (*streamAttempt, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch at := s.at; {
	case s.isOver() && (isEOF(err) || !errors.Is(s.final, err)):
		return nil, err
	case s.isOver():
		return nil, s.final
	case !s.inUse() || at.sending || !s.pending(at):
		return nil, nil
	default:
		s.startSending(at)
		return at, nil
	}
}

// whySendFailed finds out why gRPC has ended an attempt that the application does not receive
// from. It returns nil if only RecvMsg can tell, because headers have come, or if the attempt
// has ended well.
func (s *retryStream) whySendFailed(at *streamAttempt) error {
	s.enter()
	defer s.exit(at)
	if err := s.knownCause(at); err != nil {
		return err
	}
	// gRPC must not retry a stream whose end the application has seen. Context rules that out, as
	// Trailer does, which may be called only after the end.
	at.stream.Context()
	if md, err := at.stream.Header(); md != nil || err != nil {
		return nil
	}
	return s.whyNoHeaders(at)
}

// whyNoHeaders finds out why an attempt has ended without headers. It returns nil if the attempt has
// ended well, or if gRPC does not report an end: then an interceptor's wrapper below returns no
// headers.
func (s *retryStream) whyNoHeaders(at *streamAttempt) error {
	if err := s.knownCause(at); err != nil {
		return err
	}
	if !s.awaitOver(at) {
		return nil
	}
	if at.leftNothing() {
		s.noteLost(at)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	return at.overErr
}

// noteLost records that an attempt without headers and trailer was not a success.
func (s *retryStream) noteLost(at *streamAttempt) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if at.overErr == nil {
		at.overErr = s.lost()
	}
}

// knownCause returns the library's own reason to end an attempt, nil if it had none.
func (s *retryStream) knownCause(at *streamAttempt) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return at.cause()
}

// cause is knownCause, and needs mu.
func (at *streamAttempt) cause() error {
	if at.broken != nil {
		return at.broken
	}
	if at.isCut() {
		return status.FromContextError(context.Canceled).Err()
	}
	return nil
}

// failure needs mu. It returns the attempt's failure, nil if none is known.
func (at *streamAttempt) failure() error {
	if at.over && at.broken == nil {
		return at.overErr // gRPC knows best
	}
	return at.cause()
}
