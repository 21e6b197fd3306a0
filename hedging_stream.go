package grpcretry

import (
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// This file is how a server stream is hedged. Its request is known when RecvMsg is first
// called; the attempt that was opened until then is the first, and from then on others may
// run beside it, each up to its first message. The winner is then committed, and the
// stream goes on as any other.

// hedge chooses the policy of a stream whose method is hedged.
func (s *retryStream) hedge(method string, p *policy) {
	delay, ok := p.Hedging.delay(method)
	if !ok {
		s.measured = p.Hedging.Delay
		return
	}
	s.call.delay, s.call.policy = delay, p.hedged
}

// answered tells of a first attempt that had its first message, or ended well without one,
// where the stream is not hedged but its method is.
func (s *retryStream) answered(at *streamAttempt) {
	if s.measured == nil || at.number > 1 {
		return
	}
	now := time.Now()
	s.measured.Answered(s.call.method, now.Sub(origin)-at.start, false, now)
}

// race receives the first message of a hedged stream. The caller has set recovering, so
// that no other goroutine touches the call or the attempts.
func (s *retryStream) race(first *streamAttempt, m any) error {
	attempts := &hedgedStream{s, first, m, typeOfReply(m)}
	decided := false
	defer func() {
		if !decided { // a classifier or observer panics: let nobody wait for us
			first.release()
			s.conclude(first, status.Error(codes.Internal, "grpcretry: panic while hedging"))
		}
	}()
	h := &hedging{attempts: attempts, first: first.attempt, delay: s.call.delay, from: sinceOrigin()}
	s.mu.Lock()
	s.racing = h
	s.mu.Unlock()
	first.settleVerdict()
	race := h.run()
	if race == nil {
		s.call.answered(first.attempt, false)
	}
	decided = true
	if race == nil {
		return s.win(first, m, nil)
	}
	if race.winner == nil {
		final := race.conclude()
		last, _ := attempts.of(race.lost.attempt)
		s.conclude(last, final)
		return final
	}
	won, message := attempts.of(race.winner)
	if won != first && race.err == nil {
		copyReply(m, message)
	}
	return s.win(won, m, race.err)
}

// win commits the stream to the attempt that has won.
func (s *retryStream) win(won *streamAttempt, m any, err error) error {
	s.mu.Lock()
	s.current, s.recovering = won, false
	s.commit(won)
	s.mu.Unlock()
	return s.committedTo(won, m, err)
}

// A hedgedStream is how a hedged stream makes its attempts.
type hedgedStream struct {
	*retryStream
	first   *streamAttempt
	message any // of the application
	replies replyType
}

// received is the first message of an attempt that may win.
type received struct {
	from    *streamAttempt
	message any
}

func (s *hedgedStream) share() *call { return &s.retryStream.call }

// of is the stream of an attempt, and where its first message is received.
func (s *hedgedStream) of(a *attempt) (*streamAttempt, any) {
	if a == s.first.attempt {
		return s.first, s.message
	}
	r := a.bounds.received.(*received)
	return r.from, r.message
}

func (s *hedgedStream) run(a *attempt) error {
	at, message := s.first, s.message
	var err error
	if a != s.first.attempt {
		at, err = s.open(a)
		message = s.replies.make()
		a.bounds.received = &received{at, message}
	}
	if err == nil && at != s.first {
		err = s.request(at)
	}
	if err == nil {
		err = at.stream.RecvMsg(message)
	}
	if inTime := at.settle(); err == nil && !inTime {
		err = at.discard(message)
	}
	if err == nil || isEOF(err) {
		at.begun = err == nil
		return err
	}
	s.mu.Lock()
	over := at.over
	s.mu.Unlock()
	at.read(&s.call, err, over)
	return err
}

// request sends what the application has sent.
func (s *hedgedStream) request(at *streamAttempt) error {
	s.mu.Lock()
	buffer := s.buffer
	s.mu.Unlock()
	for _, m := range buffer {
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

// discard ends a stream that had its first message too late.
func (s *hedgedStream) discard(a *attempt) {
	at, _ := s.of(a)
	_ = at.discard(s.replies.make())
}
