package grpcretry

import (
	"context"
	"slices"

	"google.golang.org/grpc/status"
)

// This file hedges server streams. The request is known when RecvMsg is first called. The attempt
// that is open by then is the first; from then on others may run beside it, each up to its first
// message. The winner is then committed, and the stream goes on like any other.

// A hedgedStream makes the attempts of a hedged server stream.
type hedgedStream struct {
	*retryStream
	hedging hedging
	first   *streamAttempt
	message any // the application's, for the first message
	replies replyType

	wantsHeaders bool             // guarded by mu; the application waits for headers
	inFlight     []*streamAttempt // guarded by mu; attempts that a goroutine receives from
	headless     bool             // guarded by mu; the application does not wait for headers, see noHeaders
	won          *streamAttempt   // guarded by mu; the attempt whose headers the application has seen
}

// firstMessage is the first message of an attempt that may win.
type firstMessage struct {
	from    *streamAttempt
	message any
}

// startRacing needs mu. It must be followed by a call of race, without mu.
func (s *retryStream) startRacing(first *streamAttempt, m any) {
	race := &hedgedStream{retryStream: s, first: first, message: m, replies: typeOfReply(m)}
	h := &race.hedging
	h.attempts, h.first, h.delay, h.from = race, first.attempt, s.call.delay, sinceOrigin()
	race.wantsHeaders = s.heading > 0
	s.racing = race
	first.startWaiting()
	s.to(phaseRacing)
}

// race receives a hedged stream's first message.
func (s *retryStream) race(first *streamAttempt) error {
	done := false
	defer func() {
		if !done { // a callback panics: no other goroutine may go on waiting
			s.crash(first.attempt)
		}
	}()
	first.settleVerdict()
	won, err := s.racing.outcome(s.racing.hedging.run())
	first.helpers.Wait()
	done = true
	if won == nil {
		s.conclude()
		return err
	}
	failed := err != nil && !isEOF(err) // after a win by headers
	s.mu.Lock()
	s.at = won
	s.commit(won)
	won.hasMessage = err == nil
	if failed {
		s.startEnding(won, err)
	}
	s.mu.Unlock()
	if failed {
		s.reportEnd(won, err)
	} else {
		s.afterCommit(won)
	}
	return s.receivedCommitted(won, err)
}

// outcome returns the attempt that has won, and the result of its RecvMsg; if none has won, the
// call's error. Without a race the first attempt has won.
func (s *hedgedStream) outcome(r *race) (*streamAttempt, error) {
	switch {
	case r == nil:
		s.first.measure(s.call.learner, false)
		return s.first, nil
	case r.winner == nil:
		last, _ := s.streamOf(r.lost.attempt)
		s.mu.Lock()
		if s.at = last; last.stream == nil {
			s.at = nil
		}
		s.mu.Unlock()
		return nil, r.fail()
	}
	won, message := s.streamOf(r.winner)
	if won != s.first && r.err == nil {
		copyReply(s.message, message)
	}
	return won, r.err
}

func (s *hedgedStream) share() *call { return &s.retryStream.call }

// streamOf returns the stream of an attempt, and the message that it receives into.
func (s *hedgedStream) streamOf(a *attempt) (*streamAttempt, any) {
	if a == s.first.attempt {
		return s.first, s.message
	}
	first := a.bounds.received.(*firstMessage)
	return first.from, first.message
}

// run makes an attempt up to its first message.
func (s *hedgedStream) run(a *attempt) error {
	at, message := s.first, s.message
	var err error
	if a != s.first.attempt {
		at, err = s.open(a)
		message = s.replies.make()
		a.bounds.received = &firstMessage{at, message}
	}
	if err == nil && at != s.first {
		err = s.request(at)
	}
	if err == nil {
		err = s.receiveFirst(at, message)
	}
	if inTime := at.settle(); err == nil && !inTime {
		at.discard(message)
		err = status.FromContextError(context.Canceled).Err()
	}
	if err == nil || isEOF(err) {
		return err
	}
	if at.stream != nil {
		s.read(at, err)
		at.release()
		at.helpers.Wait()
	}
	return err
}

// receiveFirst receives an attempt's first message.
func (s *hedgedStream) receiveFirst(at *streamAttempt, message any) error {
	s.mu.Lock()
	s.inFlight = append(s.inFlight, at)
	if s.wantsHeaders {
		s.watchHeaders(at)
	}
	broken := at.broken
	s.mu.Unlock()
	if broken != nil {
		return broken
	}
	err := at.stream.RecvMsg(message)
	s.mu.Lock()
	at.note(err)
	s.inFlight = slices.DeleteFunc(s.inFlight, func(one *streamAttempt) bool { return one == at })
	if at.broken != nil {
		err = at.broken
	}
	s.mu.Unlock()
	if isEOF(err) {
		return s.emptyEnd(at, message)
	}
	return err
}

// watchHeaders needs mu. It waits for an attempt's headers on a goroutine of its own.
func (s *hedgedStream) watchHeaders(at *streamAttempt) {
	at.helpers.Go(func() {
		if md, _ := at.stream.Header(); md != nil {
			s.hedging.contested().post(happening{headed: at.attempt})
		} else if !s.awaitOver(at) {
			s.noHeaders(at)
		}
	})
}

// noHeaders handles an attempt that goes on although its Header has returned nothing: an interceptor
// below returned this. The application gets the same, as without hedging.
func (s *hedgedStream) noHeaders(at *streamAttempt) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !at.received {
		s.headless = true
		s.changed()
	}
}

// request sends the application's request to an attempt.
func (s *hedgedStream) request(at *streamAttempt) error {
	s.mu.Lock()
	queue := s.queue
	at.sent, at.closed = len(queue), true
	s.mu.Unlock()
	for _, m := range queue {
		if err := at.stream.SendMsg(m); isEOF(err) {
			return nil // RecvMsg has the status
		} else if err != nil {
			return err
		}
	}
	if err := at.stream.CloseSend(); err != nil && !isEOF(err) {
		return err
	}
	return nil
}

func (s *hedgedStream) replyOf(a *attempt) any {
	_, message := s.streamOf(a)
	return message
}

// discard ends a stream whose first message came too late.
func (s *hedgedStream) discard(a *attempt) {
	at, _ := s.streamOf(a)
	at.discard(s.replies.make())
	at.helpers.Wait()
}

// askForHeaders needs mu. The application waits for headers: the first attempt that has some wins.
func (s *hedgedStream) askForHeaders() (todo func()) {
	if !s.wantsHeaders {
		s.wantsHeaders = true
		for _, at := range s.inFlight {
			s.watchHeaders(at)
		}
	}
	return s.awaitChange()
}

// bind records that an attempt has won by its headers.
func (s *hedgedStream) bind(a *attempt) {
	at, _ := s.streamOf(a)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.won = at
	s.changed()
}
