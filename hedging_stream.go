package grpcretry

// This file hedges server streams. The request is known when RecvMsg is first called. The attempt
// that is open by then is the first; from then on others may run beside it, each up to its first
// message. The winner is then committed, and the stream goes on like any other.

// A hedgedStream makes the attempts of a hedged server stream.
type hedgedStream struct {
	*retryStream
	first   *streamAttempt
	replies replyType
}

// A firstMessage is that of a hedge, which may win.
type firstMessage struct {
	from    *streamAttempt
	message any
}

// race receives a hedged stream's first message. It returns false if that has failed, and another attempt is open.
func (s *retryStream) race(first *streamAttempt, m any) (over bool, _ error) {
	k := s.call.contest
	h := &hedgedStream{s, first, typeOfReply(m)}
	k.compete(h)
	first.awaited()
	e := k.race(first.attempt, func(*attempt) error { return h.complete(first, h.receiveFirst(first, m)) })
	k.compete(nil)
	at := first
	if theirs, hedged := e.attempt.bounds.received.(*firstMessage); hedged {
		at = theirs.from
		if e.err == nil {
			copyReply(m, theirs.message)
		}
	}
	if e.err != nil && !isEOF(e.err) {
		return s.allLost(at, e, m)
	}
	return true, s.won(at, e.err)
}

// won commits a hedged stream to the attempt that has won, and returns the result of its RecvMsg.
func (s *retryStream) won(at *streamAttempt, err error) error {
	s.mu.Lock()
	s.at = at
	if isEOF(err) {
		at.overErr = nil // gRPC may have reported the end of the context instead
	}
	s.commit(at)
	s.mu.Unlock()
	s.call.noteAnswer()
	s.afterCommit(at)
	return s.receivedCommitted(at, err)
}

// allLost goes on after all attempts in flight have failed. It returns true if the call is over.
func (s *retryStream) allLost(at *streamAttempt, e ending, m any) (over bool, _ error) {
	s.mu.Lock()
	if s.at = at; at.stream == nil {
		s.at = nil
	}
	s.setPhase(phaseRecovering)
	s.mu.Unlock()
	emptyReply(m)
	s.call.options.show(at.attempt)
	next, err := s.call.settled(e)
	if next == nil {
		s.conclude()
		return true, err
	}
	err = s.openFrom(next)
	return err != nil, err
}

// hedge makes an attempt up to its first message.
func (s *hedgedStream) hedge(a *attempt) error {
	at, err := s.open(a)
	message := s.replies.make()
	a.bounds.received = &firstMessage{at, message}
	if err == nil {
		at.replay()
		err = s.receiveFirst(at, message)
	}
	return s.complete(at, err)
}

// complete reads what is known of an attempt that has failed, and ends it.
func (s *hedgedStream) complete(at *streamAttempt, err error) error {
	if err != nil && !isEOF(err) && at.stream != nil {
		at.read(err)
		at.release()
	}
	return err
}

// receiveFirst receives an attempt's first message.
func (s *hedgedStream) receiveFirst(at *streamAttempt, message any) error {
	err := at.recv(message)
	s.mu.Lock()
	defer s.mu.Unlock()
	if at.broken != nil { // it was released then, so that RecvMsg has ended
		return at.broken
	}
	return err
}

// discard ends a stream whose first message came too late.
func (s *hedgedStream) discard(a *attempt) {
	at := s.first
	if theirs, hedged := a.bounds.received.(*firstMessage); hedged {
		at = theirs.from
	}
	at.discard(s.replies.make())
}
