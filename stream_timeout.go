package grpcretry

import "time"

// This file applies the attempt timeout to streams, up to the first message. gRPC does not report
// that a message has arrived before a goroutine receives it, but it does report the arrival of
// headers, and of the end. So if the timeout passes while no goroutine waits for a message, and
// headers have arrived, the message may be there too, and the attempt goes on: the timeout is
// restarted when the application receives.

// lookTime is the time within which headers that have arrived are seen.
const lookTime = 10 * time.Millisecond

// isWanted needs mu. It reports whether a goroutine has waited for the attempt long enough to receive
// a message that had arrived.
func (s *retryStream) isWanted(at *streamAttempt) bool {
	return s.receiving+s.heading > 0 && sinceOrigin()-at.waiting >= min(lookTime, at.bounds.timeout/2)
}

// overdue runs on the timer of an attempt timeout.
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

// look waits for an attempt's headers.
func (s *retryStream) look(at *streamAttempt) {
	defer func() {
		p := recover() // from an interceptor; join repeats the panic on the application's goroutine
		s.mu.Lock()
		if p != nil {
			at.panicked, at.broken = p, errPanicked
		}
		s.mu.Unlock()
		at.helpers.Done()
		s.exit(at)
	}()
	_, _ = s.headersOf(at) // also returns if the attempt ends
	s.mu.Lock()
	defer s.mu.Unlock()
	at.answered = at.expired
	at.unseen.Stop()
}

// startWaiting needs mu. It is called before a goroutine receives from the attempt, or asks it for
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

// judgeExpired judges an attempt whose timeout has passed, unless headers have arrived.
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

// judgeAlone is judge for an attempt that does not race. If there is a race, it is returned, and
// judges the attempt.
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
