package grpcretry

import (
	"context"
	"io"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
)

// This file gets headers and messages from an attempt to the application. The goroutine that
// receives judges a failure, because it alone learns the status. A goroutine that asks for headers,
// or sends, learns only what gRPC reports outside of RecvMsg.

// tryHeader returns the attempt to ask for headers, nil if the call is over without one. If use is
// true, headerOf and headed must follow. If todo is not nil, the caller runs it and tries again.
func (s *retryStream) tryHeader() (at *streamAttempt, use bool, todo func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	at = s.at
	switch {
	case s.phase == phaseRacing && s.racing.won != nil:
		return s.racing.won, false, nil
	case s.phase == phaseRacing && s.racing.headless:
		return nil, false, nil
	case s.phase == phaseRacing:
		return nil, false, s.racing.askForHeaders()
	case s.phase == phaseRecovering:
		return nil, false, s.awaitChange()
	case !s.inUse():
		return at, false, nil
	}
	if todo = s.prepareUse(at); todo != nil {
		return nil, false, todo
	}
	if s.phase == phaseCommitted {
		return at, false, nil
	}
	s.inside++
	s.heading++
	at.startWaiting()
	return at, true, nil
}

// prepareUse needs mu. The function that it returns, unless that is nil, must run before a goroutine
// receives from the attempt or asks it for headers.
func (s *retryStream) prepareUse(at *streamAttempt) (todo func()) {
	failure := error(nil)
	if s.phase == phaseOpen {
		failure = at.failure()
	}
	switch {
	case failure != nil && s.receiving > 0:
		return s.awaitChange()
	case failure != nil:
		return s.recoverNext(at, failure)
	default:
		return s.sendMissing(at)
	}
}

// headerOf asks an attempt for its headers.
func (s *retryStream) headerOf(at *streamAttempt) (metadata.MD, error) {
	defer func() {
		s.mu.Lock()
		s.heading--
		s.mu.Unlock()
		s.exit(at)
	}()
	return at.headers()
}

// headed takes the result of an attempt's Header. It returns true if the application gets that
// result.
func (s *retryStream) headed(at *streamAttempt, md metadata.MD, err error) bool {
	missing := md == nil && err == nil
	over := missing && s.awaitOver(at)
	if over && at.leftNothing() {
		s.noteLost(at)
	}
	if over || s.knownCause(at) != nil {
		s.until(func() bool { return !s.isReceived(at) }) // the receiving goroutine is about to learn why
	}
	todo, done := s.judgeHeaders(at, missing, over, err)
	if todo != nil {
		todo()
	}
	return done
}

// judgeHeaders decides about an attempt whose Header has returned; missing means that it returned
// nothing, and over that gRPC has reported the attempt's end. If done is true, the application gets
// the result of Header.
func (s *retryStream) judgeHeaders(at *streamAttempt, missing, over bool, err error) (todo func(), done bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	failure := at.failure()
	switch {
	case !s.uses(at):
		return nil, s.at == at && s.phase >= phaseCommitted
	case failure != nil && (missing || at.cause() != nil):
		if s.receiving > 0 {
			return nil, false
		}
		return s.recoverNext(at, failure), false
	case err != nil, missing && !over:
		return nil, true // an interceptor below returned this: RecvMsg learns the fate of the attempt
	case missing: // an end without a failure
		if s.receiving > 0 {
			return nil, false
		}
		s.claim(at)
		return func() { s.recoverUnclear(at) }, false
	default:
		s.commit(at)
		return func() { s.afterCommit(at) }, true
	}
}

// receive implements RecvMsg until the stream has committed and received its first message.
func (s *retryStream) receive(m any) error {
	if s.call.mode == modeHedged && !canHedge(m) {
		s.call.retrier.report.notHedged(&s.call.facts, "no second message can be made of its type")
	}
	s.mu.Lock()
	reporting := s.phase == phaseEnding // then the caller may be an observer or an OnFinish
	s.mu.Unlock()
	reply := newReply(m)
	for {
		at, next, todo := s.tryReceive(m, reporting)
		switch next {
		case receiveLater:
			todo()
		case receiveRacing:
			return s.race(at)
		case receiveAtEnd:
			return s.receiveAtEnd(at, m)
		case receiveNow:
			if over, err := s.received(at, reply, s.receiveFrom(at, m)); over {
				return err
			}
		}
	}
}

// A receiveStep is the next step of receive.
type receiveStep int

const (
	receiveLater  receiveStep = iota // do something else first
	receiveNow                       // call receiveFrom and received
	receiveRacing                    // let attempts race for the first message
	receiveAtEnd                     // the call is over
)

func (s *retryStream) tryReceive(m any, reporting bool) (at *streamAttempt, next receiveStep, todo func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	at = s.at
	switch {
	case s.phase == phaseRecovering, s.phase == phaseRacing, s.phase == phaseEnding && !reporting:
		return nil, receiveLater, s.awaitChange()
	case s.isOver():
		return at, receiveAtEnd, nil
	case at.confirming:
		return nil, receiveLater, s.awaitChange()
	case s.phase == phaseOpen && s.call.mode == modeHedged && s.complete(s.desc.ClientStreams) && canHedge(m):
		if todo = s.sendMissing(at); todo != nil {
			return nil, receiveLater, todo
		}
		at.stopWatching()
		s.startRacing(at, m)
		return at, receiveRacing, nil
	}
	if todo = s.prepareUse(at); todo != nil {
		return nil, receiveLater, todo
	}
	s.inside++
	s.receiving++
	at.startWaiting()
	return at, receiveNow, nil
}

// errPanicked is the error of a call, or an attempt, that ends in a panic.
var errPanicked = status.Error(codes.Internal, "grpcretry: panic while retrying")

// receiveAtEnd implements RecvMsg after the call's end.
func (s *retryStream) receiveAtEnd(at *streamAttempt, m any) error {
	s.mu.Lock()
	final := s.final
	committed := at != nil && at.fate == fateCommitted && at.broken == nil
	if at != nil {
		at.note(final)
	}
	s.mu.Unlock()
	if !committed || at.isCut() || isMadeUp(final) {
		return final
	}
	err := at.stream.RecvMsg(m)
	if isEOF(err) && !at.hasMessage {
		return s.emptyEnd(at, m)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	at.hasMessage = at.hasMessage || err == nil
	return err
}

// note needs mu. It records the result of RecvMsg.
func (at *streamAttempt) note(err error) {
	if err != nil {
		at.received = true
		at.finished = at.finished || isEOF(err)
	}
}

// receiveFrom receives a message from an attempt.
func (s *retryStream) receiveFrom(at *streamAttempt, m any) error {
	returned := false
	defer func() {
		if !returned { // a codec panics
			s.mu.Lock()
			s.receiving--
			s.changed()
			over, err := at.over, at.overErr
			s.mu.Unlock()
			s.exit(at)
			if over { // finished has left that to this goroutine
				s.end(at, err)
			}
		}
	}()
	err := at.stream.RecvMsg(m)
	if isEOF(err) && !at.hasMessage {
		err = s.emptyEnd(at, m)
	}
	returned = true
	return err
}

// received takes the result of an attempt's RecvMsg. It returns true if the application gets the
// error returned.
func (s *retryStream) received(at *streamAttempt, reply reply, err error) (over bool, _ error) {
	inTime := at.settle() // without mu, because this may wait for a verdict
	// If the timeout has cut an attempt, its message is usable only if nothing follows it.
	cut := err == nil && !inTime && s.desc.ServerStreams
	s.mu.Lock()
	cut = cut && !(at.over && at.overErr == nil) // after a success everything that follows has arrived
	s.receiving--
	s.inside--
	at.note(err)
	switch {
	case s.at == at && s.phase >= phaseCommitted:
		s.changed()
		s.mu.Unlock()
		if cut {
			err = status.FromContextError(context.Canceled).Err()
			s.end(at, err) // before gRPC reports another end
			at.discard(reply.message)
			reply.restore()
		}
		return true, s.receivedCommitted(at, err)
	case !s.uses(at):
		s.mu.Unlock()
		reply.restore()
		return false, nil // the attempt was given up: the application does not see its message
	case err == nil && !cut && at.broken == nil:
		s.commit(at)
		at.hasMessage = true
		if !s.desc.ServerStreams {
			at.note(io.EOF) // the response and the end come together
			s.startEnding(at, nil)
		}
		s.mu.Unlock()
		s.answered(at)
		if !s.desc.ServerStreams {
			s.reportEnd(at, nil)
			s.join(at)
			return true, nil
		}
		s.afterCommit(at)
		return true, s.receivedCommitted(at, nil)
	}
	if cause := at.cause(); cause != nil && (err == nil || at.broken != nil && !isEOF(err)) {
		err = cause
	}
	s.claim(at)
	s.mu.Unlock()
	s.recoverAfter(at, err, func() {
		if cut {
			at.discard(reply.message)
		}
		reply.restore()
	})
	if isEOF(err) {
		at.measure(s.call.learner, false)
	}
	return false, nil
}

// answered reports the first message to the delay that measures first attempts.
func (s *retryStream) answered(at *streamAttempt) {
	done := false
	defer func() {
		if !done { // the delay panics
			s.crash(at.attempt)
		}
	}()
	at.measure(s.call.learner, false)
	done = true
}

// discard ends an attempt whose first message arrived too late. It reads to the end, so that
// interceptors below see the end.
func (at *streamAttempt) discard(into any) {
	at.release()
	for at.stream.RecvMsg(into) == nil {
		continue
	}
}

// receivedCommitted takes the first result of a committed attempt's RecvMsg.
func (s *retryStream) receivedCommitted(at *streamAttempt, err error) error {
	if err == nil {
		s.mu.Lock()
		at.hasMessage = true
		if !s.desc.ServerStreams {
			at.note(io.EOF)
		}
		s.mu.Unlock()
		if s.desc.ServerStreams {
			return nil
		}
	}
	return s.receivedLast(at, err)
}

// receivedLast ends a committed call, whose RecvMsg has returned err. It returns after OnFinish and
// the call's last event.
func (s *retryStream) receivedLast(at *streamAttempt, err error) error {
	s.mu.Lock()
	at.note(err)
	s.mu.Unlock()
	s.end(at, err)
	s.join(at)
	s.until(func() bool { return s.phase == phaseEnded })
	s.mu.Lock()
	defer s.mu.Unlock()
	if !isEOF(s.final) && (at.isCut() || at.broken != nil) { // the library ended the attempt
		return s.final
	}
	return err
}
