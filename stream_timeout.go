package grpcretry

import "time"

// This file is how the attempt timeout works for streams. It covers the time until the first
// message comes. gRPC does not say that a message has come before somebody receives it, but it
// does say that headers or the end have. So if the timeout passes while nobody waits for a
// message, and headers have come, the message may be there, and the attempt is left alone: the
// timeout starts anew when the application receives.

// lookTime is how long headers that have come may take to be seen.
const lookTime = 10 * time.Millisecond

// isWanted needs mu. It reports whether a goroutine has waited for the attempt long enough to
// have got a message that was there.
func (s *retryStream) isWanted(at *streamAttempt) bool {
	return s.receiving+s.heading > 0 && sinceOrigin()-at.waiting >= min(lookTime, at.bounds.timeout/2)
}

// overdue is what the timer of an attempt timeout runs.
func (s *retryStream) overdue(a *attempt) {
	s.mu.Lock()
	at := s.at
	unwanted := s.racing == nil && at != nil && at.attempt == a && s.inUse() && !s.isWanted(at)
	if unwanted {
		at.expired = true
		s.inside++
		at.helpers.Add(1)
		at.unseen = time.AfterFunc(lookTime, func() { s.judgeExpired(at) })
	}
	s.mu.Unlock()
	if unwanted {
		s.look(at)
	} else {
		s.judge(a)
	}
}

// look waits for the headers of an attempt.
func (s *retryStream) look(at *streamAttempt) {
	defer func() {
		p := recover() // an interceptor's, and for a goroutine of the application
		s.mu.Lock()
		if p != nil {
			at.panicked, at.broken = p, errPanicked
		}
		s.mu.Unlock()
		at.helpers.Done()
		s.exit(at)
	}()
	_, _ = at.stream.Header() // also returns if the attempt ends
	s.mu.Lock()
	defer s.mu.Unlock()
	at.answered = at.expired
	at.unseen.Stop()
}

// startWaiting needs mu. A goroutine is about to receive from the attempt, or to ask it for
// headers.
func (at *streamAttempt) startWaiting() {
	if at.bounds.timeout == 0 {
		return
	}
	at.waiting = sinceOrigin()
	if at.answered {
		at.expired, at.answered = false, false
		at.renew()
	}
}

// judgeExpired judges an attempt whose timeout has passed, unless headers have come.
func (s *retryStream) judgeExpired(at *streamAttempt) {
	s.mu.Lock()
	due := at.expired && !at.answered
	at.expired = at.answered
	s.mu.Unlock()
	if due {
		s.judge(at.attempt)
	}
}

// judge asks the plan about an attempt that has reached its timeout.
func (s *retryStream) judge(a *attempt) {
	if racing := s.judgeAlone(a); racing != nil {
		racing.hedging.overdue(a)
	}
}

// judgeAlone is judge unless attempts race: then that is for the race.
func (s *retryStream) judgeAlone(a *attempt) *hedgedStream {
	a.bounds.judge()
	defer a.bounds.judged()
	s.mu.Lock()
	racing := s.racing
	committed := s.phase >= phaseCommitted
	s.mu.Unlock()
	if racing != nil {
		return racing
	}
	_, limited := s.call.ctx.Deadline()
	a.judgeOverdueLocked(committed, func() bool {
		s.mu.Lock()
		defer s.mu.Unlock()
		nowCommitted := s.phase >= phaseCommitted
		if nowCommitted && limited {
			return false
		}
		cut := a.tryCut()
		s.changed()
		return cut && nowCommitted == committed
	})
	return nil
}
