package grpcretry

import (
	"cmp"
	"io"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	"github.com/grpcretry/grpcretry/internal/protos"
	"github.com/grpcretry/grpcretry/internal/replies"
	"github.com/grpcretry/grpcretry/internal/wire"
)

// This file gets headers and messages from an attempt to the application. The goroutine that
// receives judges a failure, because it alone learns the status, and what interceptors below make of it. A goroutine that asks
// for headers, or sends, receives ahead if it knows what to; otherwise it learns only what gRPC reports outside of RecvMsg.

// Header implements grpc.ClientStream. Headers that the application has seen commit the stream.
func (s *retryStream) Header() (metadata.MD, error) {
	s.mu.Lock()
	for {
		switch at := s.at; {
		case s.phase == phaseRecovering, s.phase == phaseRacing:
			s.change.Wait()
		case at == nil:
			s.mu.Unlock()
			return nil, nil // as in gRPC: RecvMsg returns the status
		case s.phase == phaseOpen && s.mayRace() && s.receiving == 0 && s.receiveAhead():
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

// receiveAhead needs mu, which it gives back in between. It receives the first message before the application does: that of a hedged
// stream decides whose headers the application gets, and a failure in its place is why SendMsg has failed, or why there are no headers.
// It returns false if the message's type is not certain.
func (s *retryStream) receiveAhead() bool {
	m := protos.NewReply(s.call.method, s.call.options.list)
	if m == nil {
		return false
	}
	_, _ = s.race(s.at, m, true)
	s.mu.Lock()
	return true
}

// askHeader asks an attempt for its headers, after heading was counted.
func (at *streamAttempt) askHeader() (metadata.MD, error) {
	s := at.of
	defer func() {
		s.left(&s.heading, true)
		s.idle()
	}()
	s.call.contest.resume(at.attempt)
	header, err := at.stream.Header()
	return wire.WithPreviousAttempts(header, int(at.number)-1), err
}

// headed takes the result of an attempt's Header. It returns true if the application gets that
// result.
func (s *retryStream) headed(at *streamAttempt, md metadata.MD, err error) bool {
	var end error
	if md == nil && err == nil && at.awaitOver() { // unless an interceptor below hides the headers or the end
		end = at.cleanEnd()
	}
	s.mu.Lock()
	failure := cmp.Or(at.failure(), end)
	for failure != nil && s.uses(at) && s.receiving > 0 {
		s.change.Wait() // for the goroutine that is about to learn why
	}
	switch {
	case !s.uses(at):
		decided := s.at == at && s.phase >= phaseCommitting
		ends := decided && md == nil && failure != nil && s.receiving == 0 && !at.received && s.ahead == nil
		s.mu.Unlock()
		if ends {
			s.end(at, failure)
		}
		return decided
	case failure != nil && md == nil && s.receiveAhead(): // interceptors below see the end, and may change it
		s.mu.Unlock()
		return false
	case failure != nil && (md == nil || at.Err() != nil): // otherwise messages may have been kept back below
		s.recover(at, failure, nil)
		return false
	case md == nil: // an interceptor below returned this, or gRPC's report is late: RecvMsg learns the fate of the attempt
		s.mu.Unlock()
		return true
	default:
		s.bindTo(at)
		return true
	}
}

// receive implements RecvMsg until the stream has committed and received its first message.
func (s *retryStream) receive(m any) error {
	if s.call.mode == modeHedged && !replies.IsPointer(m) {
		s.call.retrier.report.notHedged(&s.call.facts, "no second message can be made of its type")
	}
	s.mu.Lock()
	for {
		switch at := s.at; {
		case s.phase == phaseRecovering, s.phase == phaseRacing:
			s.change.Wait()
		case s.ahead != nil:
			ahead := s.ahead
			s.ahead, at.hasMessage, at.received = nil, true, !s.desc.ServerStreams
			s.mu.Unlock()
			err := replies.Hand(m, ahead)
			if err != nil {
				at.abandon(err, false)
			}
			return s.receivedCommitted(at, err)
		case s.isOver():
			return s.receiveRest(m)
		case s.phase == phaseOpen && s.mayRace() && replies.IsPointer(m):
			if over, err := s.race(at, m, false); over {
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

// receiveRest needs mu, and returns without. It receives what had arrived when the call ended. If that is only a failure, and not of the
// attempt that the application is bound to, it returns the call's own error.
func (s *retryStream) receiveRest(m any) error {
	at, final, ended := s.rest, s.final, s.phase == phaseEnded
	nothing := at == nil || at.received || at.broken != nil || at.isCut()
	s.mu.Unlock()
	if nothing {
		return final
	}
	err := at.recv(m)
	if ended && !at.committed && (err == nil || isEOF(err)) {
		s.call.show(at.attempt) // in place of one that had failed before
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case err == nil && s.desc.ServerStreams:
		return nil
	case err == nil:
		s.final = io.EOF // the status came with the response
		return nil
	case isEOF(err), status.Code(readable(err)) != codes.Canceled && (at.committed || at.hasMessage || s.call.policy.dryRun):
		s.final = err // unless it is CANCELED: the library may have cancelled the attempt
	}
	return s.final
}

// receiveFrom receives a message from an attempt, after receiving was counted. If it is the first, and the timeout has cut
// the attempt, the messages that follow are lost.
func (at *streamAttempt) receiveFrom(m any) error {
	s := at.of
	returned := false
	defer func() {
		if !returned { // a codec panics
			s.left(&s.receiving, true)
			at.abandon(errPanicked, false)
		}
	}()
	s.call.contest.resume(at.attempt)
	first := !at.hasMessage
	err := at.recv(m)
	s.call.contest.settle(at.attempt)
	if err == nil && s.desc.ServerStreams && at.isCut() {
		at.drain(m)
		replies.Empty(m)
		err = errCut
	}
	returned = true
	if first && err == nil {
		s.orCrash(at.noteAnswer)
	}
	return err
}

// receiveMore receives a message of a committed stream that follows its first.
func (at *streamAttempt) receiveMore(m any) error {
	at.users.enter()
	defer at.leave()
	return at.of.receivedCommitted(at, at.stream.RecvMsg(m))
}

// leave is called when a goroutine leaves a method of an attempt that was entered past mu.
func (at *streamAttempt) leave() {
	if at.users.leave() {
		at.noticed(false)
	}
}

// recv calls RecvMsg of an attempt, and records the result. Nothing of another attempt, or of a retry that fails, stays in the
// application's message.
func (at *streamAttempt) recv(m any) error {
	err := at.stream.RecvMsg(m)
	if err != nil && at.number > 1 && !at.hasMessage {
		replies.Empty(m)
	}
	if isEOF(err) {
		err = at.cleanEnd()
	}
	at.of.mu.Lock()
	defer at.of.mu.Unlock()
	switch {
	case err != nil:
		at.received = true
		if at.broken != nil && !isEOF(err) {
			err = at.broken // the attempt was released then
		}
	case at.of.desc.ServerStreams:
		at.hasMessage = true
	default:
		at.hasMessage, at.received = true, true
		at.endsWell() // the status came with the response
	}
	return err
}

// received takes the result of an attempt's RecvMsg. It returns true if the application gets the
// error returned.
func (s *retryStream) received(at *streamAttempt, m any, err error) (over bool, _ error) {
	s.mu.Lock()
	s.receiving--
	s.change.Broadcast()
	if s.at == at && s.phase >= phaseCommitting {
		s.mu.Unlock()
		defer at.noticed(false)
		return true, s.receivedCommitted(at, err)
	}
	if !s.uses(at) {
		s.mu.Unlock()
		replies.Empty(m)
		return false, nil // the attempt was given up: the application does not see its message
	}
	if err == nil {
		s.bindTo(at)
		return true, s.receivedCommitted(at, nil)
	}
	s.recover(at, err, m)
	if isEOF(err) {
		at.measure(s.call.learner, false)
	}
	return false, nil
}

// noteAnswer takes note of an attempt's first message.
func (at *streamAttempt) noteAnswer() {
	if !at.isLate() {
		at.of.call.retrier.noteAnswer(at.of.call.backend, at.start)
	}
	at.measure(at.of.call.learner, false)
}

// receivedCommitted takes a result of a committed attempt's RecvMsg. If that is the call's end, it returns after OnFinish
// and the call's last event.
func (s *retryStream) receivedCommitted(at *streamAttempt, err error) error {
	if err == nil && s.desc.ServerStreams {
		return nil
	}
	s.mu.Lock()
	at.received = true
	end := cmp.Or(at.broken, err)
	s.mu.Unlock()
	s.end(at, end)
	defer s.call.contest.repanic() // after mu is given back
	s.mu.Lock()
	defer s.mu.Unlock()
	for s.phase != phaseEnded {
		s.change.Wait()
	}
	if !isEOF(s.final) && (at.isCut() || at.broken != nil) { // the library ended the attempt
		return s.final
	}
	if err != nil {
		s.final = err
	}
	return err
}
