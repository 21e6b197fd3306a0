package grpcretry

import "github.com/grpcretry/grpcretry/internal/replies"

// This file hedges server streams. The request is known when RecvMsg, or Header, is first called. The attempt
// that is open by then is the first; from then on others may run beside it, each up to its first
// message. The winner is then committed, and the stream goes on like any other. A SendMsg that has failed, and a
// Header that finds none, receive the first message in the same way, without others as long as the request is not known.

// mayRace needs mu. It reports whether others may run beside an open attempt: the request is known.
func (s *retryStream) mayRace() bool { return s.call.mode == modeHedged && s.isComplete() }

// race needs mu, and returns without. It receives a stream's first message. It returns false if that has failed: another
// attempt is open, or the call is over.
func (s *retryStream) race(first *streamAttempt, m any) (over bool, err error) {
	hedged := s.mayRace()
	s.setPhase(phaseRacing)
	s.mu.Unlock()
	s.orCrash(func() { over, err = s.raceFrom(first, m, hedged) })
	return over, err
}

func (s *retryStream) raceFrom(first *streamAttempt, m any, hedged bool) (over bool, _ error) {
	k, e := s.call.contest, ending{attempt: first.attempt}
	if k == nil {
		e.err = first.receiveFirst(m)
	} else {
		k.replies = replies.TypeOf(m)
		if hedged {
			k.compete(s)
		}
		k.resume(first.attempt)
		e = k.race(first.attempt, func(*attempt) error { return first.receiveFirst(m) })
		k.compete(nil)
	}
	if e.err != nil && !isEOF(e.err) {
		s.allLost(e, m)
		return false, nil
	}
	at := e.attempt.bounds.stream
	if at != first && e.err == nil {
		replies.Copy(m, e.attempt.bounds.received)
	} else if at != first {
		replies.Empty(m) // the first attempt may have received something
	}
	return true, s.won(at, e.err)
}

// won commits a hedged stream to the attempt that has won, and returns the result of its RecvMsg.
func (s *retryStream) won(at *streamAttempt, err error) error {
	s.mu.Lock()
	s.at = at
	if isEOF(err) {
		at.endsWell()
		s.ahead = nil
	}
	if s.ahead != nil {
		at.hasMessage, at.received = false, false // for the application
	}
	s.commit(at)
	s.mu.Unlock()
	at.noteAnswer()
	s.afterCommit(at)
	if err == nil {
		return nil // the application receives the rest, or all if it is ahead
	}
	return s.receivedCommitted(at, err)
}

// allLost goes on after all attempts in flight have failed.
func (s *retryStream) allLost(e ending, m any) {
	s.mu.Lock()
	s.ahead = nil
	s.setPhase(phaseRecovering)
	s.mu.Unlock()
	replies.Empty(m)
	s.call.show(e.attempt)
	_ = s.openFrom(s.call.next(e))
}

// hedge makes an attempt up to its first message.
func (s *retryStream) hedge(a *attempt) error {
	at, err := s.open(a)
	if err != nil {
		return err
	}
	a.bounds.received = s.call.contest.replies.New()
	at.replay()
	return at.receiveFirst(a.bounds.received)
}

// receiveFirst receives the first message of an attempt. If that fails, it reads what is known of the attempt, and ends it.
func (at *streamAttempt) receiveFirst(message any) error {
	s := at.of
	err := at.recv(message)
	s.mu.Lock()
	if at.broken != nil { // it was released then, so that RecvMsg has ended
		err = at.broken
	}
	s.mu.Unlock()
	if err != nil && !isEOF(err) {
		at.read(err)
		at.release()
	}
	return err
}

// drain ends a stream whose first message came too late.
func (k *contest) drain(a *attempt) {
	a.bounds.stream.drain(k.replies.New())
	a.bounds.stream.read(errCut)
}
