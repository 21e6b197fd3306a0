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

// This file gets a stream from one attempt to the next, and to its end.

// establish opens the first attempt of a stream, or the one that follows it.
func (s *retryStream) establish(a *attempt) error {
	s.startCall(a)
	s.hold()
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

// openFrom opens an attempt or, if that fails, one that follows it. If all fail, it returns the
// call's error.
func (s *retryStream) openFrom(a *attempt) (*streamAttempt, error) {
	opened := false
	defer func() {
		if !opened && a != nil { // a callback or an interceptor below panics
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
	if err == nil {
		s.call.retrier.bindToGRPC(s.call.policy, s.call.cc, s.call.method, stream)
	}
	s.mu.Lock()
	at.stream = stream
	if err != nil && at.over { // an interceptor below has opened a stream, and abandoned it
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

// to needs mu. It makes a transition, and wakes up the goroutines that wait for one.
func (s *retryStream) to(p phase) {
	if onTransition != nil {
		onTransition(s.phase, p)
	}
	if p >= phaseEnding {
		s.dropQueue()
	}
	if p == phaseEnded && s.phase != phaseEnded {
		s.letGo()
	}
	s.phase = p
	s.changed()
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

// commit needs mu. It binds the application to the attempt. It must be followed by a call of
// afterCommit, without mu.
func (s *retryStream) commit(at *streamAttempt) {
	at.fate = fateCommitted
	at.binding = true
	at.stopWatching()
	s.to(phaseCommitted)
	clear(s.queue[:at.sent]) // these messages are not sent again
	s.queue = s.queue[at.sent:]
	at.sent = 0
	if !at.sending && !s.pending(at) {
		s.bypass(at)
	}
}

// bypass needs mu. From then on messages go straight to the attempt.
func (s *retryStream) bypass(at *streamAttempt) {
	s.dropQueue()
	at.sent = 0
	s.direct.Store(at)
	s.changed()
}

// afterCommit completes a commit with the steps that must not hold mu.
func (s *retryStream) afterCommit(at *streamAttempt) {
	if at.number > 1 {
		at.settleVerdict()
		s.call.plan().commit(int(at.number))
	}
	s.mu.Lock()
	at.binding = false
	s.changed()
	over, err, unclear := at.over, at.overErr, at.isUnclear()
	if at.finished {
		err = nil // RecvMsg has returned this, and gRPC may have reported the end of the context
	}
	s.mu.Unlock()
	switch { // gRPC has reported the end, and will not report it again
	case unclear:
		md, _ := at.stream.Header()
		s.endUnclear(at, md != nil)
	case over:
		s.end(at, err)
	}
}

// until waits for done, which it calls with mu, to return true.
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

// claim needs mu. From then on the caller alone uses the call. It must be followed by a call of
// recover, without mu.
func (s *retryStream) claim(at *streamAttempt) {
	at.stopWatching()
	s.to(phaseRecovering)
}

// recover reports an attempt's end to the call, and opens the attempt that follows. If none
// follows, the call is over.
func (s *retryStream) recover(at *streamAttempt, err error) {
	s.recoverAfter(at, err, func() {})
}

// recoverAfter is recover; it calls first beforehand, which may panic.
func (s *retryStream) recoverAfter(at *streamAttempt, err error, first func()) {
	s.recoverOn(at, err, func() {
		first()
		s.join(at)
		at.repanic(func() { s.call.deposit(at.attempt, Ignored) })
	})
}

// join waits for our goroutines that use an attempt, which has ended. If one of them has panicked,
// join repeats the panic, because this is the application's goroutine, which may handle it.
func (s *retryStream) join(at *streamAttempt) {
	at.helpers.Wait()
	s.mu.Lock()
	p := at.panicked
	at.panicked = nil
	s.mu.Unlock()
	if p != nil {
		panic(p) //nolint:forbidigo // it comes from a codec or an interceptor
	}
}

// recoverOn is recover for any goroutine; application has the steps that only the application's
// goroutines may take.
func (s *retryStream) recoverOn(at *streamAttempt, err error, application func()) {
	done := false
	defer func() {
		if !done { // a callback panics: no other goroutine may go on waiting
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
	now := time.Now() // the start of a wait
	s.read(at, err)
	s.call.options.show(at.attempt)
	if isEOF(err) {
		err = nil
	}
	return s.call.settled(at.attempt, err, now)
}

// read completes an attempt that has ended with err: its header, trailer and peer.
func (s *retryStream) read(at *streamAttempt, err error) {
	c := &s.call
	if isEOF(err) && !c.retrier.report.observed() && c.spans == nil && !c.options.outputs {
		return
	}
	at.release() // the failure may come from an interceptor, and gRPC may not know about it
	over := s.awaitOver(at)
	s.mu.Lock()
	known := over || at.received // otherwise Trailer must not be called
	s.mu.Unlock()
	if known {
		at.trailer = at.stream.Trailer()
	}
	switch {
	case over:
		at.peer = at.reached
	case known && c.options.outputs: // gRPC may still write to reached
		if p, ok := peer.FromContext(at.stream.Context()); ok {
			at.peer = *p
		}
	}
	if c.wantsHeader() || c.options.header != nil {
		at.header, _ = at.stream.Header()
	}
}

// These limit the wait for gRPC's report of an attempt's end. Another goroutine may be about to make
// the report; or there will be none, because an interceptor below drops call options.
const (
	overYields = 1000                  // first, how often to let other goroutines run
	overGrace  = 10 * time.Millisecond // then, unless the end is a success, how long to wait
)

// awaitOver waits until gRPC has reported an attempt's end. It returns false if the report does not
// come.
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

// ending is called when the call's outcome is known, before it is reported, because an observer or
// an OnFinish may use the stream.
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

// conclude is called when the call's outcome has been reported.
func (s *retryStream) conclude() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.to(phaseEnded)
}

// crash ends the call when one of the application's callbacks panics; a is the attempt that was in
// flight, or has just ended.
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

// end ends a committed call, unless that has happened: gRPC's report and the method that sees the
// end both call it. If another goroutine is just committing the call, end waits for that, because
// the plan serves one goroutine at a time.
func (s *retryStream) end(at *streamAttempt, err error) {
	if !at.isCut() {
		at.settle() // from here on the timeout cannot claim the end for itself
	}
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

// startEnding needs mu. It must be followed by a call of reportEnd, without mu.
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

// reportEnd reports the outcome of a committed call, whose attempt has ended with err.
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

// finished is called when gRPC has ended an attempt, on any goroutine. In most cases one of our
// methods is about to notice. But the application may have abandoned the stream: then the call ends
// here.
func (s *retryStream) finished(at *streamAttempt, err error) {
	s.mu.Lock()
	at.over, at.overErr = true, err
	if at.ended != nil {
		close(at.ended)
	}
	committed := s.phase == phaseCommitted && s.at == at
	silent := !at.hasMessage && at.stream != nil
	learning := s.receiving > 0 || s.asking > 0 && silent
	s.mu.Unlock()
	if err == nil && silent && at.leftNothing() {
		err = s.lost()
		s.noteLost(at)
	}
	switch {
	case committed && learning && err == nil:
		return // another goroutine, or a method around this one, will know whether the attempt has ended well
	case committed:
		s.end(at, err)
		return
	}
	s.checkAbandoned(at)
}

// enter counts a goroutine that uses an attempt, until it calls exit.
func (s *retryStream) enter() {
	s.mu.Lock()
	s.inside++
	s.mu.Unlock()
}

// exit is called when a goroutine no longer uses an attempt.
func (s *retryStream) exit(at *streamAttempt) {
	s.mu.Lock()
	s.inside--
	s.mu.Unlock()
	s.checkAbandoned(at)
}

// checkAbandoned ends the call if its attempt has ended together with the caller's context or the
// ClientConn, and no goroutine is in a method that would notice. If the attempt has ended for another
// reason, it may be retried when the application calls a method again; until then watchCaller waits
// for the caller's end.
func (s *retryStream) checkAbandoned(at *streamAttempt) {
	s.mu.Lock()
	if !s.uses(at) || s.inside > 0 || !at.over {
		s.mu.Unlock()
		return
	}
	err := at.overErr
	if err == nil { // a success that the application did not wait for
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
	s.recoverOn(at, err, func() {}) // an abandoned call is not retried
}

// untilServiceDeadline returns the time until the service config's deadline for the call; ok is false
// if there is none.
func (s *retryStream) untilServiceDeadline() (left time.Duration, ok bool) {
	now := time.Now()
	end, ok := s.call.first.serviceDeadline(now)
	return end.Sub(now), ok
}

// watchCaller calls checkAbandoned when the caller's context ends, when the ClientConn is closed and,
// if the call is limited, after the time that is left.
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

// stopWatching needs mu. It ends watchCaller.
func (at *streamAttempt) stopWatching() {
	if at.unwatch != nil {
		at.unwatch()
		at.unwatch = nil
	}
}

// isEOF reports whether err is gRPC's end of a stream, which is io.EOF itself. A wrapped io.EOF comes
// from an interceptor below, and is a failure.
func isEOF(err error) bool {
	return err == io.EOF //nolint:errorlint // identity is the contract
}
