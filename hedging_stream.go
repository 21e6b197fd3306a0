package grpcretry

import "github.com/grpcretry/grpcretry/internal/replies"

// This file hedges server streams. The request is known when RecvMsg, or Header, is first called. The attempt
// that is open by then is the first; from then on others may run beside it, each up to its first
// message. The winner is then committed, and the stream goes on like any other. A SendMsg that has failed, and a
// Header that finds none, receive the first message in the same way, without others as long as the request is not known.

// mayRace needs mu. It reports whether others may run beside an open attempt: the request is known.
func (s *retryStream) mayRace() bool { return s.call.mode == modeHedged && s.isComplete() }

// race needs mu, and returns without. It receives a stream's first message, ahead of the application or for it. It returns
// false if that has failed: another attempt is open, or the call is over.
func (s *retryStream) race(first *streamAttempt, m any, ahead bool) (over bool, err error) {
	hedged := s.mayRace()
	s.setPhase(phaseRacing)
	s.mu.Unlock()
	s.orCrash(func() {
		e := s.raceFrom(first, m, hedged)
		if over = e.err == nil || isEOF(e.err); over {
			err = s.won(e, m, ahead)
		} else {
			s.allLost(e, m)
		}
	})
	return over, err
}

// raceFrom returns the end of the attempt that decides. If that has a message, it is in m.
func (s *retryStream) raceFrom(first *streamAttempt, m any, hedged bool) ending {
	k := s.call.contest
	if k == nil {
		return ending{attempt: first.attempt, err: first.receiveFirst(m)}
	}
	k.replies = replies.TypeOf(m)
	if hedged {
		k.compete(s)
	}
	k.resume(first.attempt)
	e := k.race(first.attempt, func(*attempt) error { return first.receiveFirst(m) })
	k.compete(nil)
	if e.attempt != first.attempt {
		replies.Empty(m) // the first attempt may have received something
		if e.err == nil {
			replies.Copy(m, e.attempt.bounds().received)
		}
	}
	return e
}

// won commits the stream to the attempt that has won, and returns the result of its RecvMsg.
func (s *retryStream) won(e ending, m any, ahead bool) error {
	at := e.attempt.bounds().stream
	if !at.isLate() {
		s.call.retrier.noteAnswer(s.call.backend, at.start) // while no other goroutine can end the call
	}
	s.mu.Lock()
	s.at = at
	switch {
	case isEOF(e.err):
		at.endsWell()
	case ahead:
		s.ahead, at.hasMessage, at.received = m, false, false // for the application
	}
	s.bindTo(at)
	if e.err == nil {
		return nil // the application receives the rest, or all if it is ahead
	}
	return s.receivedCommitted(at, e.err)
}

// allLost goes on after all attempts in flight have failed.
func (s *retryStream) allLost(e ending, m any) {
	s.mu.Lock()
	s.setPhase(phaseRecovering)
	s.mu.Unlock()
	s.call.show(e.attempt)
	a, err := s.call.next(e)
	replies.Empty(m)
	_ = s.openFrom(a, err)
}

// hedge makes an attempt up to its first message.
func (s *retryStream) hedge(a *attempt) error {
	at, err := s.open(a)
	if err != nil {
		return err
	}
	a.bounds().received = s.call.contest.replies.New()
	at.replay()
	return at.receiveFirst(a.bounds().received)
}

// receiveFirst receives the first message of an attempt. If that fails, it reads what is known of the attempt, and ends it.
func (at *streamAttempt) receiveFirst(message any) error {
	err := at.recv(message)
	if err != nil && !isEOF(err) {
		at.read(err)
	}
	return err
}

// drain ends a stream whose first message came too late.
func (k *contest) drain(a *attempt) {
	a.bounds().stream.drain(k.replies.New())
	a.bounds().stream.read(errCut)
}
