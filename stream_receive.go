package grpcretry

import (
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
)

// This file gets headers and messages from an attempt to the application. The goroutine that
// receives judges a failure, because it alone learns the status. A goroutine that asks for headers,
// or sends, learns only what gRPC reports outside of RecvMsg.

// awaitHeader implements Header until the stream is committed.
func (s *retryStream) awaitHeader() (metadata.MD, error) {
	s.mu.Lock()
	for {
		switch at := s.at; {
		case s.phase == phaseRecovering, s.phase == phaseRacing:
			s.change.Wait()
		case at == nil:
			s.mu.Unlock()
			return nil, nil // as in gRPC: RecvMsg returns the status
		case s.phase != phaseOpen:
			s.mu.Unlock()
			return at.headers()
		default:
			s.heading++
			s.mu.Unlock()
			md, err := at.askHeader()
			if s.headed(at, md, err) {
				return md, err
			}
			s.mu.Lock()
		}
	}
}

// headed takes the result of an attempt's Header. It returns true if the application gets that
// result.
func (s *retryStream) headed(at *streamAttempt, md metadata.MD, err error) bool {
	missing, failure := md == nil && err == nil, error(nil)
	if missing {
		failure = s.endWithoutHeaders(at)
	}
	s.mu.Lock()
	if !missing {
		failure = at.cause()
	}
	for failure != nil && s.uses(at) && s.receiving > 0 {
		s.change.Wait() // for the goroutine that is about to learn why
	}
	switch {
	case !s.uses(at):
		defer s.mu.Unlock()
		return s.at == at && s.phase >= phaseCommitting
	case failure != nil:
		s.recover(at, failure, s.call.contest.repanic)
		return false
	case md == nil: // an interceptor below returned this: RecvMsg learns the fate of the attempt
		s.mu.Unlock()
		return true
	default:
		s.bindTo(at)
		return true
	}
}

// receive implements RecvMsg until the stream has committed and received its first message.
func (s *retryStream) receive(m any) error {
	hedged := s.call.mode == modeHedged && isPointer(m)
	if !hedged && s.call.mode == modeHedged {
		s.call.retrier.report.notHedged(&s.call.facts, "no second message can be made of its type")
	}
	s.mu.Lock()
	for {
		switch at := s.at; {
		case s.phase == phaseRecovering, s.phase == phaseRacing:
			s.change.Wait()
		case s.isOver():
			s.mu.Unlock()
			return s.receiveAtEnd(at, m)
		case s.phase == phaseOpen && hedged && s.out.isComplete():
			at.stopWatching()
			s.setPhase(phaseRacing)
			s.mu.Unlock()
			if over, err := s.race(at, m); over {
				return err
			}
			s.mu.Lock()
		default:
			s.receiving++
			s.mu.Unlock()
			if over, err := s.received(at, m, at.receiveFrom(m)); over {
				return err
			}
			s.mu.Lock()
		}
	}
}

// errPanicked is the error of a call, or an attempt, that ends in a panic.
var errPanicked = status.Error(codes.Internal, "grpcretry: panic while retrying")

// receiveAtEnd implements RecvMsg after the call's end.
func (s *retryStream) receiveAtEnd(at *streamAttempt, m any) error {
	s.mu.Lock()
	final := s.final
	ours := at == nil || at.fate != fateCommitted || at.broken != nil || at.isCut() || final == errConnLost //nolint:errorlint // set here
	if at != nil {
		at.received = at.received || final != nil
	}
	s.mu.Unlock()
	if ours {
		return final
	}
	err := at.stream.RecvMsg(m)
	if isEOF(err) && !at.hasMessage {
		return at.emptyEnd()
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	at.hasMessage = at.hasMessage || err == nil
	return err
}

// received takes the result of an attempt's RecvMsg. It returns true if the application gets the
// error returned.
func (s *retryStream) received(at *streamAttempt, m any, err error) (over bool, _ error) {
	inTime := at.settle() // without mu, because this may wait for a verdict
	// If the timeout has cut an attempt, its message is usable only if nothing follows it.
	cut := err == nil && !inTime && s.desc.ServerStreams
	s.mu.Lock()
	cut = cut && !(at.over && at.overErr == nil) // after a success everything that follows has arrived
	s.receiving--
	at.received = at.received || err != nil
	if err == nil && !s.desc.ServerStreams {
		at.received, at.overErr = true, nil // the status came with the response, whatever was reported before
	}
	s.change.Broadcast()
	switch {
	case s.at == at && s.phase >= phaseCommitting:
		s.mu.Unlock()
		if cut {
			err = errCut
			s.end(at, err) // before gRPC reports another end
			at.discard(m)
			emptyReply(m)
		}
		return true, s.receivedCommitted(at, err)
	case !s.uses(at):
		s.mu.Unlock()
		emptyReply(m)
		return false, nil // the attempt was given up: the application does not see its message
	case err == nil && !cut && at.broken == nil:
		s.commit(at)
		s.mu.Unlock()
		s.call.noteAnswer()
		s.orCrash(func() { at.measure(s.call.learner, false) })
		s.afterCommit(at)
		return true, s.receivedCommitted(at, nil)
	}
	failed := err
	switch {
	case at.broken != nil && !isEOF(err):
		failed = at.broken
	case cut:
		failed = errCut
	}
	s.recover(at, failed, func() {
		if cut {
			at.discard(m)
		}
		emptyReply(m)
		s.call.contest.repanic()
	})
	if isEOF(err) {
		at.measure(s.call.learner, false)
	}
	return false, nil
}

// receivedCommitted takes the first result of a committed attempt's RecvMsg.
func (s *retryStream) receivedCommitted(at *streamAttempt, err error) error {
	if err == nil {
		s.mu.Lock()
		at.hasMessage = true
		s.mu.Unlock()
		if s.desc.ServerStreams {
			return nil
		}
	}
	return s.receivedLast(at, err) // the response of a client stream is its end
}

// receivedLast ends a committed call, whose RecvMsg has returned err. It returns after OnFinish and
// the call's last event.
func (s *retryStream) receivedLast(at *streamAttempt, err error) error {
	s.mu.Lock()
	at.received = true
	s.mu.Unlock()
	s.end(at, err)
	s.mu.Lock()
	defer s.mu.Unlock()
	for s.phase != phaseEnded {
		s.change.Wait()
	}
	if !isEOF(s.final) && (at.isCut() || at.broken != nil) { // the library ended the attempt
		return s.final
	}
	return err
}
