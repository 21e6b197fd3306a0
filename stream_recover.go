package grpcretry

import (
	"cmp"
	"context"
	"io"
	"slices"
	"time"

	"google.golang.org/grpc"

	"github.com/grpcretry/grpcretry/internal/replies"
)

// This file gets a stream from one attempt to the next, and to its end.

// openFrom opens an attempt or, if that fails, one that follows it. If none is left, the call is over, and openFrom
// returns its error: ended, or that of the last attempt.
func (s *retryStream) openFrom(a *attempt, ended error) error {
	for a != nil {
		at, err := s.open(a)
		if err == nil {
			s.publish(at)
			return nil
		}
		s.call.contest.settle(a)
		s.call.contest.repanic()
		s.call.show(a)
		a, ended = s.call.next(ending{attempt: a, err: err})
	}
	s.conclude()
	return ended
}

// open hands an attempt to gRPC.
func (s *retryStream) open(a *attempt) (*streamAttempt, error) {
	at := &s.opened
	if a.number > 1 {
		at = &streamAttempt{}
	}
	at.attempt, at.of = a, s
	a.PeerAddr = &at.unread
	opts := slices.Clip(append(s.call.attemptOptions(a), grpc.OnFinish(at.finished)))
	if a.number > 1 {
		s.onSpoilt(func() { at.broken = errSpoilt; a.endContext() })
	}
	stream, err := s.streamer(a, s.desc, s.call.cc, s.call.method, opts...)
	reported := at.users.hasEnded()
	ch := s.call.channel()
	ours := a.extras().stopsGRPC || !s.call.policy.dryRun && !ch.retries()
	var ctx context.Context = a
	if _, another := stream.(*retryStream); err == nil && (reported || !another && ours) {
		ctx = cmp.Or(stream.Context(), ctx) // our replay replaces gRPC's, which may lose messages, see internal/judges
	}
	below := ctx.Err() // without mu, because it may be an interceptor's
	s.mu.Lock()
	at.stream, s.rest, s.abort = stream, nil, nil
	if at.broken != nil && (err == nil || s.call.ctx.Err() == nil && !isClosed(s.call.cc)) {
		err = at.broken
	}
	if err == nil {
		a.bounds().stream = at
	}
	if ended := err != nil || below != nil || a.Err() != nil || isClosed(s.call.cc); reported && !ended {
		// That was the end of another stream, which an interceptor below has opened before this one.
		at.end = nil
		at.users.forget()
	}
	s.mu.Unlock()
	return at, err
}

// publish makes an attempt the one in use.
func (s *retryStream) publish(at *streamAttempt) {
	s.mu.Lock()
	s.at = at
	if s.bind {
		s.bindTo(at)
	} else {
		s.setPhase(phaseOpen)
		at.catchUp()
		s.mu.Unlock()
	}
	s.idle()
	at.noticed(false)
}

// bindTo needs mu, and returns without. It commits the stream to the attempt.
func (s *retryStream) bindTo(at *streamAttempt) {
	answered := at.hasMessage || s.ahead != nil
	at.committed, s.rest = true, at
	s.setPhase(phaseCommitting)
	clear(s.out.queue[:at.sent]) // these messages are not sent again
	at.catchUp()
	switch at.sender {
	case senderApplication:
		s.bypass(at)
	case senderNone:
		s.out.drop()
	}
	s.mu.Unlock()
	s.orCrash(func() { s.commitPlan(at, answered) })
	s.mu.Lock()
	s.setPhase(phaseCommitted)
	s.mu.Unlock()
	at.noticed(false) // gRPC will not report the end again
}

// commitPlan reports a commit to the plan; answered means that the attempt's first message has led to it.
func (s *retryStream) commitPlan(at *streamAttempt, answered bool) {
	k := s.call.contest
	if k != nil {
		k.turn.Take() // the timer may be using the plan
		defer k.turn.Give()
	}
	if p := s.call.plan(); p != nil {
		p.undecide()                                          // nothing replaces the attempt any more
		p.ledger.release(at.number, answered && !at.isLate()) // a stream may live for days: it is no retry in flight any more
		if k != nil {
			k.arm()
		}
	}
}

// recover needs mu, and returns without. It reports an attempt's end to the call, and opens the attempt that follows, before which it
// empties what the application is receiving into. If none follows, the call is over.
func (s *retryStream) recover(at *streamAttempt, err error, into any) {
	s.setPhase(phaseRecovering)
	s.mu.Unlock()
	s.orCrash(func() {
		s.call.contest.repanic()
		a, ended := s.next(at, err)
		if a != nil {
			replies.Empty(into)
		}
		_ = s.openFrom(a, ended)
	})
}

// next asks the call about an attempt that ended with err. The end of a stream without a
// failure is io.EOF.
func (s *retryStream) next(at *streamAttempt, err error) (*attempt, error) {
	s.call.contest.settle(at.attempt)
	now := time.Now()
	at.bounds().ended = instantOf(now)
	at.read(err) // which may wait
	s.call.show(at.attempt)
	if isEOF(err) {
		return s.call.next(ending{attempt: at.attempt})
	}
	return s.call.afterFailure(ending{attempt: at.attempt, err: err}, now)
}

// orCrash takes steps. If a callback, a codec or an interceptor below panics in them, the call ends, so
// that no other goroutine goes on waiting for it.
func (s *retryStream) orCrash(steps func()) {
	done := false
	defer s.call.guard(&done)
	steps()
	done = true
}

// end ends a committed call, unless that has happened: gRPC's report and the method that sees the
// end both call it. If another goroutine is just committing the call, end waits for that, because
// the plan serves one goroutine at a time.
func (s *retryStream) end(at *streamAttempt, err error) {
	s.call.contest.settle(at.attempt) // from here on the timeout cannot claim the end for itself
	s.mu.Lock()
	for s.phase == phaseCommitting {
		s.change.Wait()
	}
	if s.phase != phaseCommitted || s.at != at {
		s.mu.Unlock()
		return
	}
	s.setPhase(phaseClosing)
	s.mu.Unlock()
	s.orCrash(func() {
		_ = s.openFrom(s.next(at, cmp.Or(err, io.EOF))) // none follows
	})
}
