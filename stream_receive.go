package grpcretry

import (
	"context"
	"io"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
)

// This file is how the application gets headers and messages from an attempt. The goroutine
// that receives judges a failure, because it alone learns the status. A goroutine that asks for
// headers, or sends, learns only what gRPC reports to others than the receiver.

// tryHeader returns the attempt to ask for headers, nil if the call is over without one. If use
// is true, the caller is to call headerOf and headed. If todo is not nil, it comes first.
func (s *retryStream) tryHeader() (at *streamAttempt, use bool, todo func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	at = s.at
	switch {
	case s.phase == phaseRacing && s.racing.won != nil:
		return s.racing.won, false, nil
	case s.phase == phaseRacing:
		return nil, false, s.racing.ask()
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

// prepareUse needs mu. It returns what must be done before an attempt is received from, or asked
// for headers; nil for nothing.
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

func (s *retryStream) headerOf(at *streamAttempt) (metadata.MD, error) {
	defer func() {
		s.mu.Lock()
		s.heading--
		s.mu.Unlock()
		s.exit(at)
	}()
	return at.headers()
}

// headed takes in what Header of an attempt returned. It returns true if that is what the
// application gets.
func (s *retryStream) headed(at *streamAttempt, md metadata.MD, err error) bool {
	missing := md == nil && err == nil
	over := missing && s.awaitOver(at)
	if over && at.leftNothing() {
		s.noteLost(at)
	}
	if over || s.knownCause(at) != nil {
		s.until(func() bool { return !s.isReceived(at) }) // the goroutine that receives is about to learn why
	}
	todo, done := s.judgeHeaders(at, missing, over, err)
	if todo != nil {
		todo()
	}
	return done
}

// judgeHeaders decides what comes of an attempt that has returned headers or, if they are
// missing, none; over says that gRPC has reported its end.
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
		return nil, true // an interceptor's below: RecvMsg learns what has become of the attempt
	default: // headers, or an end without a failure
		s.commit(at)
		return func() { s.afterCommit(at) }, true
	}
}

// receive is RecvMsg as long as the stream is not committed, and for the first message.
func (s *retryStream) receive(m any) error {
	if s.call.mode == modeHedged && !canHedge(m) {
		s.call.retrier.report.notHedged(&s.call.facts, "no second message can be made of its type")
	}
	s.mu.Lock()
	reporting := s.phase == phaseEnding // then this may be called by what is being reported to
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

// What receive does next.
type receiveStep int

const (
	receiveLater  receiveStep = iota // something else comes first
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

// errPanicked stands for the error of something that panics.
var errPanicked = status.Error(codes.Internal, "grpcretry: panic while retrying")

// receiveAtEnd is RecvMsg after the end of the call.
func (s *retryStream) receiveAtEnd(at *streamAttempt, m any) error {
	s.mu.Lock()
	final := s.final
	committed := at != nil && at.fate == fateCommitted && at.broken == nil
	if at != nil {
		at.note(final)
	}
	s.mu.Unlock()
	if !committed || at.isCut() {
		return final
	}
	err := at.stream.RecvMsg(m)
	if isEOF(err) && !at.begun {
		return s.emptyEnd(at)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	at.begun = at.begun || err == nil
	return err
}

// note needs mu. It notes what RecvMsg has returned.
func (at *streamAttempt) note(err error) {
	if err != nil {
		at.received = true
		at.finished = at.finished || isEOF(err)
	}
}

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
	if isEOF(err) && !at.begun {
		err = s.emptyEnd(at)
	}
	returned = true
	return err
}

// emptyEnd is the end of a stream that has brought no message. RecvMsg must not be called again
// to find out more: in the same cases as below, gRPC's blocks for ever.
func (s *retryStream) emptyEnd(at *streamAttempt) error {
	if !s.desc.ServerStreams {
		return errNoResponse
	}
	if at.leftNothing() {
		return errLost
	}
	return io.EOF
}

// leftNothing reports whether gRPC has made up the end of a stream that had no headers. It does
// that if it has lost the connection, retries the call transparently, and loses the connection
// again before it has sent the messages again; or if the connection is lost before it has sent
// anything. A server that ends a stream leaves at least the content-type in the trailer. The
// stream must be done; Trailer also keeps gRPC from a transparent retry from now on.
func (at *streamAttempt) leftNothing() bool {
	trailer := at.stream.Trailer()
	md, _ := at.stream.Header()
	return md == nil && len(trailer) == 0
}

// What is made of an end without a failure that no server can have sent.
var (
	errLost       = status.Error(codes.Unavailable, "grpcretry: the connection was lost, and gRPC reported an end without a failure")
	errNoResponse = status.Error(codes.Unavailable, "grpcretry: the stream ended without a response and without a failure")
)

// received takes in what RecvMsg of an attempt returned. It returns true if the application
// gets err.
func (s *retryStream) received(at *streamAttempt, reply reply, err error) (over bool, _ error) {
	inTime := at.settle() // before mu is held: it may wait for a verdict
	// After the timeout has cut an attempt, a message is of use only if nothing follows it.
	cut := err == nil && !inTime && s.desc.ServerStreams
	s.mu.Lock()
	cut = cut && !(at.over && at.overErr == nil) // then all that follows is there
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
		return false, nil // of an attempt that was given up: the application does not see it
	case err == nil && !cut && at.broken == nil:
		s.commit(at)
		if !s.desc.ServerStreams {
			at.begun = true
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
		s.call.answered(at.attempt, false)
	}
	return false, nil
}

// answered tells the delay that measures first attempts of the first message.
func (s *retryStream) answered(at *streamAttempt) {
	done := false
	defer func() {
		if !done { // it panics
			s.crash(at.attempt)
		}
	}()
	s.call.answered(at.attempt, false)
	done = true
}

// discard ends an attempt whose first message has come with the attempt timeout. It reads to
// the end, so that interceptors below see that.
func (at *streamAttempt) discard(into any) {
	at.release()
	for at.stream.RecvMsg(into) == nil {
		continue
	}
}

// receivedCommitted takes in the first result of RecvMsg of a committed attempt.
func (s *retryStream) receivedCommitted(at *streamAttempt, err error) error {
	if err == nil {
		s.mu.Lock()
		at.begun = true
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

// receivedLast ends a committed call, whose RecvMsg has returned err. What the application
// sees then comes after OnFinish and the last event.
func (s *retryStream) receivedLast(at *streamAttempt, err error) error {
	s.mu.Lock()
	at.note(err)
	s.mu.Unlock()
	s.end(at, err)
	s.join(at)
	s.until(func() bool { return s.phase == phaseEnded })
	s.mu.Lock()
	defer s.mu.Unlock()
	if !isEOF(s.final) && (at.isCut() || at.broken != nil) { // it is we who ended the attempt
		return s.final
	}
	return err
}
