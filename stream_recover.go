package grpcretry

import (
	"context"
	"io"
	"runtime"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"
)

// This file is how a stream gets from one attempt to the next, and to its end.

// establish opens the first attempt of a stream, or the one that follows it.
func (s *retryStream) establish(a *attempt) error {
	s.startCall(a)
	at, err := s.openFrom(a)
	if at == nil {
		return err
	}
	s.publish(at)
	s.checkAbandoned(at)
	return nil
}

// startCall starts the call with its first attempt.
func (s *retryStream) startCall(a *attempt) {
	done := false
	defer func() {
		if !done { // an observer panics
			s.call.endCrashed(errPanicked)
		}
	}()
	s.call.begin(a)
	done = true
}

// openFrom opens a or, if that fails, an attempt that follows it. It returns the error of the
// call if there is none.
func (s *retryStream) openFrom(a *attempt) (*streamAttempt, error) {
	opened := false
	defer func() {
		if !opened && a != nil { // something below panics
			s.crash(a)
		}
	}()
	for {
		at, err := s.open(a)
		if err == nil {
			opened = true
			return at, nil
		}
		s.mu.Lock()
		s.at = nil
		s.mu.Unlock()
		a.settle()
		a.repanic(func() { s.call.deposit(a, Ignored) })
		s.call.options.show(a)
		next, err := s.call.next(a, err)
		if a = next; a == nil {
			s.conclude()
			return nil, err
		}
	}
}

// open hands an attempt to gRPC.
func (s *retryStream) open(a *attempt) (*streamAttempt, error) {
	at := &streamAttempt{attempt: a}
	if s.isSpoilt() {
		a.fate = fateCommitted
		return at, errSpoilt
	}
	a.PeerAddr = &at.reached
	opts := append(s.call.attemptOptions(a), grpc.OnFinish(func(err error) { s.finished(at, err) }))
	stream, err := s.streamer(a, s.desc, s.call.cc, s.call.method, opts...)
	err = readable(err)
	s.mu.Lock()
	at.stream = stream
	if err != nil && at.over { // an interceptor below has used a stream, and given it up
		a.peer = at.reached
	}
	s.mu.Unlock()
	if err != nil {
		a.checkUnsent(err)
	}
	return at, err
}

var errSpoilt = status.Error(codes.Internal, "grpcretry: a message was changed after SendMsg, and cannot be sent again")

func (s *retryStream) isSpoilt() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.spoilt
}

// publish makes an attempt the one in use.
func (s *retryStream) publish(at *streamAttempt) {
	s.mu.Lock()
	s.at = at
	bound := s.bind
	if bound {
		s.commit(at)
	} else {
		s.to(phaseOpen)
	}
	s.mu.Unlock()
	if bound {
		s.afterCommit(at)
	}
}

// commit needs mu. From now on the attempt is the application's stream. Call afterCommit
// without mu.
func (s *retryStream) commit(at *streamAttempt) {
	at.fate = fateCommitted
	at.binding = true
	at.stopWatching()
	s.to(phaseCommitted)
	clear(s.queue[:at.sent]) // they are not sent again
	s.queue = s.queue[at.sent:]
	at.sent = 0
	if !at.sending && !s.pending(at) {
		s.bypass(at)
	}
}

// bypass needs mu. It lets messages pass by.
func (s *retryStream) bypass(at *streamAttempt) {
	s.queue, s.size, at.sent = nil, 0, 0
	s.direct.Store(at)
	s.changed()
}

// afterCommit is what cannot be done while mu is held.
func (s *retryStream) afterCommit(at *streamAttempt) {
	if at.number > 1 {
		at.settleVerdict()
		s.call.plan().commit(int(at.number))
	}
	s.mu.Lock()
	at.binding = false
	s.changed()
	over, err := at.over, at.overErr
	s.mu.Unlock()
	if over { // gRPC has reported that, and will not again
		s.end(at, err)
	}
}

// until waits until done, which needs mu, returns true.
func (s *retryStream) until(done func() bool) {
	for {
		s.mu.Lock()
		if done() {
			s.mu.Unlock()
			return
		}
		wait := s.awaitChange()
		s.mu.Unlock()
		wait()
	}
}

// recoverNext needs mu. It claims the recovery of an attempt for the caller.
func (s *retryStream) recoverNext(at *streamAttempt, err error) (todo func()) {
	s.claim(at)
	return func() { s.recover(at, err) }
}

// claim needs mu. The caller alone uses the call from now on; it calls recover without mu.
func (s *retryStream) claim(at *streamAttempt) {
	at.stopWatching()
	s.to(phaseRecovering)
}

// recover reports to the call how an attempt ended, and makes the attempt that follows the one
// in use. If none follows, the call is over.
func (s *retryStream) recover(at *streamAttempt, err error) {
	s.recoverAfter(at, err, func() {})
}

// recoverAfter is recover after something that may panic.
func (s *retryStream) recoverAfter(at *streamAttempt, err error, first func()) {
	s.recoverOn(at, err, func() {
		first()
		s.join(at)
		at.repanic(func() { s.call.deposit(at.attempt, Ignored) })
	})
}

// join waits for our goroutines that use an attempt, which has ended. What one of them panicked
// with is for the application to handle, whose goroutine this is.
func (s *retryStream) join(at *streamAttempt) {
	at.helpers.Wait()
	s.mu.Lock()
	p := at.panicked
	at.panicked = nil
	s.mu.Unlock()
	if p != nil {
		panic(p) //nolint:forbidigo // a codec's or an interceptor's
	}
}

// recoverOn is recover on any goroutine; application does what only one of the application
// may do.
func (s *retryStream) recoverOn(at *streamAttempt, err error, application func()) {
	done := false
	defer func() {
		if !done { // something that the application has given us panics: let nobody wait
			s.crash(at.attempt)
		}
	}()
	at.settle()
	if !isEOF(err) {
		at.release()
	}
	application()
	a, _ := s.next(at, err)
	done = true
	if a == nil {
		s.conclude()
		return
	}
	if next, _ := s.openFrom(a); next != nil {
		s.publish(next)
	}
}

// next asks the call about an attempt that ended with err. The end of a stream without a
// failure is io.EOF.
func (s *retryStream) next(at *streamAttempt, err error) (*attempt, error) {
	at.settle()
	now := time.Now() // a wait counts from here
	s.read(at, err)
	s.call.options.show(at.attempt)
	if isEOF(err) {
		err = nil
	}
	return s.call.settled(at.attempt, err, now)
}

// read fills in what gRPC knows of an attempt that has ended with err.
func (s *retryStream) read(at *streamAttempt, err error) {
	c := &s.call
	if isEOF(err) && !c.retrier.report.observed() && c.spans == nil && !c.options.targets {
		return
	}
	at.release() // the failure may be an interceptor's, and gRPC not know of it
	over := s.awaitOver(at)
	s.mu.Lock()
	known := over || at.received // else the trailer must not be asked for
	s.mu.Unlock()
	if known {
		at.trailer = at.stream.Trailer()
	}
	switch {
	case over:
		at.peer = at.reached
	case known && c.options.targets: // gRPC may still write to reached
		if p, ok := peer.FromContext(at.stream.Context()); ok {
			at.peer = *p
		}
	}
	if c.wantsHeader() || c.options.header != nil {
		at.header, _ = at.stream.Header()
	}
}

// How long to wait for gRPC to report the end of an attempt: that may be under way on another
// goroutine; or it never comes, because an interceptor below drops call options.
const (
	overYields = 1000                  // at first, let other goroutines run
	overGrace  = 10 * time.Millisecond // then, unless the end is a success, let time pass
)

// awaitOver waits until gRPC has reported the end of an attempt. It returns false if gRPC does
// not do that.
func (s *retryStream) awaitOver(at *streamAttempt) bool {
	for range overYields {
		if s.isReported(at) {
			return true
		}
		runtime.Gosched()
	}
	s.mu.Lock()
	if at.over || at.finished {
		defer s.mu.Unlock()
		return at.over
	}
	if at.ended == nil {
		at.ended = make(chan struct{})
	}
	ended := at.ended
	s.mu.Unlock()
	grace := time.NewTimer(overGrace)
	defer grace.Stop()
	select {
	case <-ended:
		return true
	case <-grace.C:
		return false
	}
}

func (s *retryStream) isReported(at *streamAttempt) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return at.over
}

// ending is called when the outcome of the call is known, before anything is reported: what is
// reported to may use the stream.
func (s *retryStream) ending(err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.isOver() {
		return
	}
	s.final = err
	if err == nil {
		s.final = io.EOF
	}
	s.direct.Store(nil)
	s.to(phaseEnding)
}

// conclude is called when the outcome has been reported.
func (s *retryStream) conclude() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.to(phaseEnded)
}

// crash ends the call when something that the application has given us panics; a is the attempt
// that was in flight, or has just ended.
func (s *retryStream) crash(a *attempt) {
	s.call.crashed(a)
	s.mu.Lock()
	if !s.isOver() {
		s.final = errPanicked
	}
	s.direct.Store(nil)
	s.to(phaseEnded)
	final := s.final
	s.mu.Unlock()
	if isEOF(final) {
		final = nil
	}
	s.call.endCrashed(final)
}

// end ends a committed call. gRPC reports the end first, or the method that sees it. If another
// goroutine is just committing the call, end waits for that: the plan serves one at a time.
func (s *retryStream) end(at *streamAttempt, err error) {
	s.until(func() bool { return !at.binding || s.phase != phaseCommitted })
	s.mu.Lock()
	ends := s.phase == phaseCommitted && s.at == at
	if ends {
		s.startEnding(at, err)
	}
	s.mu.Unlock()
	if ends {
		s.reportEnd(at, err)
	}
}

// startEnding needs mu. The caller then calls reportEnd.
func (s *retryStream) startEnding(at *streamAttempt, err error) {
	s.final = err
	switch {
	case err == nil, isEOF(err):
		s.final = io.EOF
	case at.timedOut(err):
		s.final = newAttemptTimeoutError(at.bounds.timeout, err)
	}
	s.direct.Store(nil)
	s.to(phaseEnding)
}

func (s *retryStream) reportEnd(at *streamAttempt, err error) {
	done := false
	defer func() {
		if !done {
			s.crash(at.attempt)
		}
	}()
	if err == nil {
		err = io.EOF
	}
	_, _ = s.next(at, err) // the application has the error already
	done = true
	s.conclude()
}

// finished is called when gRPC has ended an attempt, on any goroutine. Mostly a method of ours
// is about to see that. But the application may have abandoned the stream: then the call ends
// here.
func (s *retryStream) finished(at *streamAttempt, err error) {
	s.mu.Lock()
	at.over, at.overErr = true, err
	if at.ended != nil {
		close(at.ended)
	}
	committed := s.phase == phaseCommitted && s.at == at
	receiving, silent := s.receiving > 0, !at.begun && at.stream != nil
	s.mu.Unlock()
	if err == nil && silent && at.leftNothing() {
		err = errLost
		s.noteLost(at)
	}
	switch {
	case committed && receiving && err == nil:
		return // that goroutine knows better whether it ended well
	case committed:
		s.end(at, err)
		return
	}
	s.checkAbandoned(at)
}

// enter counts a goroutine that uses an attempt, until exit.
func (s *retryStream) enter() {
	s.mu.Lock()
	s.inside++
	s.mu.Unlock()
}

func (s *retryStream) exit(at *streamAttempt) {
	s.mu.Lock()
	s.inside--
	s.mu.Unlock()
	s.checkAbandoned(at)
}

// checkAbandoned ends the call if its attempt has ended with the caller's context, or with the
// ClientConn, and no goroutine is in a method that would notice. An attempt that has ended
// because of something else may be retried when the application calls a method again; until
// then the end of the caller's context is waited for.
func (s *retryStream) checkAbandoned(at *streamAttempt) {
	s.mu.Lock()
	if !s.uses(at) || s.inside > 0 || !at.over {
		s.mu.Unlock()
		return
	}
	err := at.overErr
	if err == nil { // but the application has not come for that
		err = status.FromContextError(context.Canceled).Err()
	}
	left, limited := s.untilServiceDeadline()
	if s.call.ctx.Err() == nil && !isClosed(s.call.cc) && (!limited || left > 0) {
		if at.unwatch == nil {
			at.unwatch = s.watchCaller(at, left, limited)
		}
		s.mu.Unlock()
		return
	}
	s.claim(at)
	s.mu.Unlock()
	s.recoverOn(at, err, func() {}) // a call that is abandoned is not retried
}

// untilServiceDeadline returns how long the service config still lets the call run; ok is false
// if it sets no limit.
func (s *retryStream) untilServiceDeadline() (left time.Duration, ok bool) {
	now := time.Now()
	end, ok := s.call.first.serviceDeadline(now)
	return end.Sub(now), ok
}

// watchCaller calls checkAbandoned when the caller's context ends, the ClientConn is closed or, if
// the call is limited, the time that is left has passed.
func (s *retryStream) watchCaller(at *streamAttempt, left time.Duration, limited bool) (unwatch func()) {
	stop := make(chan struct{})
	go func() {
		closed, leave := s.call.retrier.connections.watch(s.call.cc, shortWait+1)
		defer leave()
		var expired <-chan time.Time
		if limited {
			timer := time.NewTimer(left)
			defer timer.Stop()
			expired = timer.C
		}
		select {
		case <-s.call.ctx.Done():
		case <-closed:
		case <-expired:
		case <-stop:
			return
		}
		s.checkAbandoned(at)
	}()
	return func() { close(stop) }
}

// stopWatching needs mu.
func (at *streamAttempt) stopWatching() {
	if at.unwatch != nil {
		at.unwatch()
		at.unwatch = nil
	}
}

// isEOF: gRPC's end of a stream is io.EOF itself. One wrapped by an interceptor below is a
// failure.
func isEOF(err error) bool {
	return err == io.EOF //nolint:errorlint // identity is the contract
}
