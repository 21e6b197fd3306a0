package grpcretry

import (
	"context"
	"errors"
	"io"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/emptypb"
)

// establish opens the first attempt of a stream, or the one that follows it.
func (s *retryStream) establish(a *attempt) error {
	at, err := s.openFrom(a)
	if at == nil {
		return err
	}
	s.publish(at)
	s.checkAbandoned(at)
	return nil
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
		s.call.show(a)
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
	a.PeerAddr = &at.reached
	opts := append(s.call.attemptOptions(a), grpc.OnFinish(func(err error) { s.finished(at, err) }))
	stream, err := s.streamer(a, s.desc, s.call.cc, s.call.method, opts...)
	at.stream = stream
	if err != nil {
		s.mu.Lock()
		if at.over { // an interceptor below has used a stream, and given it up
			a.peer = at.reached
		}
		s.mu.Unlock()
		a.checkUnsent(err)
	}
	return at, err
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
	over, err := at.over, at.overErr
	s.mu.Unlock()
	if over { // gRPC has reported that, and will not again
		s.end(at, err)
	}
}

// await needs mu. Like the Wait of a sync.Cond it gives mu up until something has changed.
func (s *retryStream) await() {
	if s.waits == nil {
		s.waits = make(chan struct{})
	}
	waits := s.waits
	s.mu.Unlock()
	<-waits
	s.mu.Lock()
}

// Sending

// errCommitFirst: the message does not fit into the queue, so the stream is now committed.
var errCommitFirst = errors.New("grpcretry: committed by the buffer limit")

// errEnded: the call is over.
var errEnded = errors.New("grpcretry: the stream has ended")

// keep puts m into the queue. It returns the attempt that the caller is to hand the queue to;
// nil if another goroutine does that. With errEnded it returns the call's last attempt.
func (s *retryStream) keep(m any, weight int) (*streamAttempt, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for !s.isOver() {
		fits := weight >= 0 && s.size+weight <= s.call.policy.BufferLimit
		switch {
		case s.direct.Load() != nil:
			return nil, errCommitFirst
		case fits && !s.complete(s.desc.ClientStreams):
			return s.keepFitting(m, weight), nil
		}
		s.makeRoom()
	}
	if s.at == nil {
		return nil, io.EOF
	}
	return s.at, errEnded
}

// keepFitting needs mu.
func (s *retryStream) keepFitting(m any, weight int) *streamAttempt {
	s.queue = append(s.queue, m)
	s.size += weight
	at := s.at
	if s.phase != phaseOpen && s.phase != phaseCommitted || at.sending {
		return nil // the goroutine that recovers, or sends, sends this one too
	}
	s.startSending(at)
	return at
}

// makeRoom needs mu, and gives it up meanwhile. It brings a stream nearer to being committed
// with an empty queue.
func (s *retryStream) makeRoom() {
	at := s.at
	switch {
	case s.phase == phaseOpen && at.failure() != nil && s.receiving == 0:
		err := at.failure()
		s.claim(at)
		s.mu.Unlock()
		s.recover(at, err)
		s.mu.Lock()
	case s.phase == phaseOpen && at.failure() == nil:
		s.commit(at)
		s.mu.Unlock()
		s.afterCommit(at)
		s.mu.Lock()
	case s.phase == phaseCommitted && !at.sending:
		s.startSending(at)
		s.mu.Unlock()
		_ = s.drain(at) // the message that is to be sent fails too
		s.mu.Lock()
	default:
		s.await()
	}
}

// pending needs mu. It reports whether the attempt lacks something that the application sent.
func (s *retryStream) pending(at *streamAttempt) bool {
	return at.sent < len(s.queue) || s.done && !at.closed
}

// startSending needs mu. The caller then calls drain.
func (s *retryStream) startSending(at *streamAttempt) {
	at.sending = true
	s.inside++
}

// catchUp needs mu. If the attempt lacks something and no goroutine sends that, it sees to
// it. It returns true if the caller is to call drain: for what cannot block longer than the
// application's own SendMsg would have. Anything else is sent by a goroutine of its own,
// because the server may want to be received from first.
func (s *retryStream) catchUp(at *streamAttempt) (drain bool) {
	if at.sending || !s.pending(at) {
		return false
	}
	s.startSending(at)
	if !s.desc.ClientStreams || at.sent == len(s.queue) {
		return true
	}
	at.helpers.Go(func() { s.help(at) })
	return false
}

// help is the goroutine that sends what is in the queue while the application receives.
func (s *retryStream) help(at *streamAttempt) {
	failed := errPanicked
	defer func() {
		if isEOF(failed) || failed == nil {
			return
		}
		s.mu.Lock()
		if failed == errPanicked { //nolint:errorlint // set here
			at.panicked = recover()
		}
		committed := s.phase == phaseCommitted && s.at == at
		if at.broken == nil {
			at.broken = failed
		}
		s.changed()
		s.mu.Unlock()
		at.release() // wakes up the goroutine that receives
		if committed {
			s.end(at, failed)
		}
	}()
	failed = s.drain(at)
}

// drain hands an attempt what is in the queue, to its end. The caller has called
// startSending. If it returns an error, the attempt has failed.
func (s *retryStream) drain(at *streamAttempt) error {
	done := false
	defer func() {
		if !done {
			s.stopSending(at)
		}
		s.exit(at)
	}()
	for {
		m, next := s.nextToSend(at)
		var err error
		switch next {
		case sendNothing:
			done = true
			return nil
		case sendMessage:
			err = at.stream.SendMsg(m)
		case sendClose:
			err = at.stream.CloseSend()
		}
		if err != nil {
			return err
		}
	}
}

// What drain does next.
type sendStep int

const (
	sendNothing sendStep = iota
	sendMessage
	sendClose
)

func (s *retryStream) nextToSend(at *streamAttempt) (any, sendStep) {
	s.mu.Lock()
	defer s.mu.Unlock()
	current := s.at == at && (s.phase == phaseOpen || s.phase == phaseCommitted)
	switch {
	case current && at.sent < len(s.queue):
		m := s.queue[at.sent]
		at.sent++
		if s.phase == phaseCommitted {
			s.queue[at.sent-1] = nil // it is not sent again
		}
		return m, sendMessage
	case current && s.done && !at.closed:
		at.closed = true
		return nil, sendClose
	}
	s.stopSendingLocked(at)
	return nil, sendNothing
}

func (s *retryStream) stopSending(at *streamAttempt) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.stopSendingLocked(at)
}

func (s *retryStream) stopSendingLocked(at *streamAttempt) {
	at.sending = false
	if s.phase == phaseCommitted && s.at == at {
		s.bypass(at)
	}
	s.changed()
}

// handOver hands an attempt what is in the queue, and the attempts that follow if it fails
// meanwhile. It returns what SendMsg returns.
func (s *retryStream) handOver(at *streamAttempt) error {
	for {
		err := s.drain(at)
		if err == nil {
			return nil
		}
		if at, err = s.sendFailed(at, err); at == nil {
			return s.sendError(err)
		}
	}
}

// sendFailed deals with an attempt to which something could not be sent. It returns the
// attempt that the caller is to hand the queue to or, without one, what SendMsg returns.
func (s *retryStream) sendFailed(at *streamAttempt, err error) (*streamAttempt, error) {
	if !isEOF(err) {
		return s.sendBroken(at, err)
	}
	if !s.desc.ClientStreams {
		return nil, nil // RecvMsg will learn why
	}
	s.mu.Lock()
	unclear := s.uses(at) && s.receiving == 0
	s.mu.Unlock()
	var cause error
	if unclear {
		cause = s.whySendFailed(at)
	}
	s.mu.Lock()
	switch {
	case s.at == at && s.phase >= phaseCommitted, s.isOver():
		s.mu.Unlock()
		return nil, err
	case !s.uses(at) || s.receiving > 0 || !unclear:
		s.mu.Unlock()
		return nil, nil // it was sent again, or will be
	case cause == nil: // only RecvMsg can tell
		s.commit(at)
		s.mu.Unlock()
		s.afterCommit(at)
		return nil, err
	}
	s.claim(at)
	s.mu.Unlock()
	s.recover(at, cause)
	return s.takeOver(err)
}

// sendBroken deals with an error of SendMsg or CloseSend that is not gRPC's end of the
// stream: a message that cannot be sent, or an interceptor below that fails. gRPC may not know
// that the attempt has failed.
func (s *retryStream) sendBroken(at *streamAttempt, err error) (*streamAttempt, error) {
	s.mu.Lock()
	if s.uses(at) {
		at.broken = err
		s.inside++
		s.mu.Unlock()
		at.release() // wakes up the goroutine that receives
		s.mu.Lock()
		for s.uses(at) && s.receiving > 0 {
			s.await()
		}
		s.inside--
		if s.uses(at) {
			s.claim(at)
			s.mu.Unlock()
			s.recover(at, err)
			return s.takeOver(err)
		}
	}
	for s.phase == phaseRecovering {
		s.await()
	}
	committed := s.at == at && s.phase == phaseCommitted
	over := s.isOver()
	s.mu.Unlock()
	switch {
	case committed:
		s.end(at, err)
		return nil, err
	case over:
		return s.takeOver(err)
	default:
		return nil, nil
	}
}

// takeOver returns the attempt that the caller is to hand the queue to, after a recovery, or
// what SendMsg returns, which has failed with err.
func (s *retryStream) takeOver(err error) (*streamAttempt, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch at := s.at; {
	case s.isOver() && isEOF(err):
		return nil, err
	case s.isOver():
		return nil, s.final
	case s.phase != phaseOpen && s.phase != phaseCommitted || at.sending || !s.pending(at):
		return nil, nil
	default:
		s.startSending(at)
		return at, nil
	}
}

// whySendFailed finds out why gRPC has ended an attempt that the application does not receive
// from. It returns nil if only RecvMsg can tell, because headers have come, or if the attempt
// has ended well.
func (s *retryStream) whySendFailed(at *streamAttempt) error {
	s.enter()
	defer s.exit(at)
	if err := s.knownCause(at); err != nil {
		return err
	}
	if md, err := at.stream.Header(); md != nil || err != nil {
		return nil
	}
	return s.whyNoHeaders(at)
}

// whyNoHeaders finds out why an attempt has ended without headers. It returns nil if the
// attempt has ended well, or if gRPC does not say that it has ended: then a wrapper made by an
// interceptor below has no headers to show.
func (s *retryStream) whyNoHeaders(at *streamAttempt) error {
	if err := s.knownCause(at); err != nil {
		return err
	}
	if !s.awaitOver(at) {
		return nil
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	return at.overErr
}

// knownCause returns why an attempt has ended if that was our own doing.
func (s *retryStream) knownCause(at *streamAttempt) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return at.cause()
}

// cause needs mu.
func (at *streamAttempt) cause() error {
	if at.broken != nil {
		return at.broken
	}
	if at.isCut() {
		return status.FromContextError(context.Canceled).Err()
	}
	return nil
}

// failure needs mu. It returns the failure of an attempt if that is known.
func (at *streamAttempt) failure() error {
	if err := at.cause(); err != nil || !at.over {
		return err
	}
	return at.overErr
}

// Headers

// enterHeader waits until there is an attempt to ask for headers. It returns nil if the call
// is over without one. If use is true, the caller is to call headerOf and headed.
func (s *retryStream) enterHeader() (at *streamAttempt, use bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for {
		at := s.at
		switch {
		case s.phase == phaseRacing && s.racing == nil:
			s.await()
		case s.phase == phaseRacing && s.racing.won != nil:
			return s.racing.won, false
		case s.phase == phaseRacing:
			s.racing.askRace()
		case s.phase == phaseRecovering:
			s.await()
		case s.phase != phaseOpen && s.phase != phaseCommitted:
			return at, false
		case s.readyToUse(at):
			committed := s.phase == phaseCommitted
			if !committed {
				s.inside++
				s.heading++
			}
			return at, !committed
		}
	}
}

// readyToUse needs mu, and may give it up meanwhile; then it returns false, and the state has
// to be looked at again. It sees to everything that must be done before an attempt is received
// from, or asked for headers.
func (s *retryStream) readyToUse(at *streamAttempt) bool {
	open := s.phase == phaseOpen
	switch {
	case open && at.failure() != nil && s.receiving > 0:
		s.await()
	case open && at.failure() != nil:
		err := at.failure()
		s.claim(at)
		s.mu.Unlock()
		s.recover(at, err)
		s.mu.Lock()
	case s.catchUp(at):
		s.mu.Unlock()
		err := s.drain(at)
		s.mu.Lock()
		if err != nil && !isEOF(err) && s.uses(at) {
			at.broken = err
		}
	default:
		return true
	}
	return false
}

func (s *retryStream) headerOf(at *streamAttempt) (metadata.MD, error) {
	defer func() {
		s.mu.Lock()
		s.heading--
		s.mu.Unlock()
		s.exit(at)
	}()
	return at.stream.Header()
}

// headed takes in what Header of an attempt returned. It returns true if that is what the
// application gets.
func (s *retryStream) headed(at *streamAttempt, md metadata.MD, err error) bool {
	s.mu.Lock()
	for md == nil && err == nil && s.uses(at) && s.receiving > 0 {
		s.await() // the goroutine that receives is about to learn why
	}
	switch {
	case !s.uses(at):
		bound := s.at == at && s.phase >= phaseCommitted
		s.mu.Unlock()
		return bound
	case err != nil && at.cause() == nil: // an interceptor's: gRPC has none here
		s.mu.Unlock()
		return true
	case md != nil && at.cause() == nil:
		s.commit(at)
		s.mu.Unlock()
		s.afterCommit(at)
		return true
	}
	s.mu.Unlock()
	cause := s.whyNoHeaders(at)
	s.mu.Lock()
	switch {
	case !s.uses(at) || s.receiving > 0:
		s.mu.Unlock()
		return false
	case cause != nil:
		s.claim(at)
		s.mu.Unlock()
		s.recover(at, cause)
		return false
	case at.over: // it ended well
		s.commit(at)
		s.mu.Unlock()
		s.afterCommit(at)
		return true
	default:
		s.mu.Unlock()
		return true
	}
}

// Receiving

// receive is RecvMsg as long as the stream is not committed, and for the first message.
func (s *retryStream) receive(m any) error {
	if p := s.call.policy; p.hedges && !canHedge(m) {
		s.call.retrier.log.logNotHedged(s.call.ctx, s.call.method, p, "no second message can be made of its type")
	}
	reply := newReply(m)
	for {
		at, err := s.enterReceive(m)
		switch {
		case err == errRace: //nolint:errorlint // set by enterReceive
			return s.race(at, m)
		case at == nil:
			return err
		}
		if over, err := s.received(at, reply, s.receiveFrom(at, m)); over {
			return err
		}
	}
}

// errRace: attempts are to race for the first message.
var errRace = errors.New("grpcretry: attempts race")

// errPanicked stands for the error of something that panics.
var errPanicked = status.Error(codes.Internal, "grpcretry: panic while retrying")

// enterReceive waits until there is an attempt to receive from. After the end of the call there
// is none, and it returns what RecvMsg returns.
func (s *retryStream) enterReceive(m any) (*streamAttempt, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	reporting := s.phase == phaseEnding // then this may be called by what is being reported to
	for {
		at := s.at
		switch {
		case s.phase == phaseRecovering, s.phase == phaseRacing, s.phase == phaseEnding && !reporting:
			s.await()
		case s.isOver():
			return nil, s.receiveAtEnd(at, m)
		case s.phase == phaseOpen && s.call.policy.hedges && s.complete(s.desc.ClientStreams) && canHedge(m):
			at.stopWatching()
			s.to(phaseRacing)
			return at, errRace
		case s.readyToUse(at):
			s.inside++
			s.receiving++
			at.waitAnew()
			return at, nil
		}
	}
}

// receiveAtEnd needs mu, and gives it up meanwhile. It is RecvMsg after the end of the call.
func (s *retryStream) receiveAtEnd(at *streamAttempt, m any) error {
	var timeout *attemptTimeoutError
	if at == nil || at.fate != fateCommitted || errors.As(s.final, &timeout) {
		return s.final
	}
	s.mu.Unlock()
	defer s.mu.Lock()
	return at.stream.RecvMsg(m)
}

func (s *retryStream) receiveFrom(at *streamAttempt, m any) error {
	returned := false
	defer func() {
		if !returned { // a codec panics
			s.mu.Lock()
			s.receiving--
			s.changed()
			s.mu.Unlock()
			s.exit(at)
		}
	}()
	err := at.stream.RecvMsg(m)
	if isEOF(err) && !at.begun {
		err = s.emptyEnd(at)
	}
	returned = true
	return err
}

// emptyEnd is the end of a stream that has brought no message. gRPC reports the end of a
// stream without a failure if it has lost the connection, retried the call transparently, and
// lost the connection again while it sent the messages again: the status is then in the next
// RecvMsg. Without a response there is no good end of a client stream, so gRPC's is never
// believed there.
func (s *retryStream) emptyEnd(at *streamAttempt) error {
	if md, _ := at.stream.Header(); md == nil && len(at.stream.Trailer()) == 0 || !s.desc.ServerStreams {
		if err := at.stream.RecvMsg(new(emptypb.Empty)); err != nil && !isEOF(err) {
			return err
		}
	}
	if !s.desc.ServerStreams {
		return status.Error(codes.Unavailable, "grpcretry: the stream ended without a response and without a failure")
	}
	return io.EOF
}

// received takes in what RecvMsg of an attempt returned. It returns true if the application
// gets err.
func (s *retryStream) received(at *streamAttempt, reply reply, err error) (over bool, _ error) {
	inTime := at.settle() // before mu is held: it may wait for a verdict
	// After the timeout has cut an attempt, a message is of use only if nothing follows it.
	cut := err == nil && !inTime && s.desc.ServerStreams
	s.mu.Lock()
	s.receiving--
	s.inside--
	at.received = at.received || err != nil
	switch {
	case s.at == at && s.phase >= phaseCommitted:
		s.changed()
		s.mu.Unlock()
		if cut {
			at.discard(reply.message)
			reply.restore()
			err = status.FromContextError(context.Canceled).Err()
		}
		return true, s.receivedCommitted(at, err)
	case !s.uses(at):
		s.mu.Unlock()
		reply.restore()
		return false, nil // of an attempt that was given up: the application does not see it
	case err == nil && !cut && at.broken == nil:
		s.commit(at)
		s.mu.Unlock()
		s.afterCommit(at)
		s.answered(at)
		return true, s.receivedCommitted(at, nil)
	}
	if cause := at.cause(); cause != nil && !isEOF(err) {
		err = cause
	}
	s.claim(at)
	s.mu.Unlock()
	if cut {
		at.discard(reply.message)
	}
	reply.restore()
	s.recover(at, err)
	if isEOF(err) {
		s.answered(at)
	}
	return false, nil
}

// discard ends an attempt whose first message has come with the attempt timeout. It reads to
// the end, so that interceptors below see that.
func (at *streamAttempt) discard(into any) {
	at.release()
	for at.stream.RecvMsg(into) == nil {
		continue
	}
}

// receivedCommitted takes in the first result of RecvMsg of a committed attempt.
func (s *retryStream) receivedCommitted(at *streamAttempt, err error) error {
	if err == nil {
		at.begun = true
		if s.desc.ServerStreams {
			return nil
		}
	}
	return s.receivedLast(at, err)
}

// receivedLast ends a committed call, whose RecvMsg has returned err. What the application
// sees then comes after OnFinish and the last event.
func (s *retryStream) receivedLast(at *streamAttempt, err error) error {
	s.mu.Lock()
	at.received = at.received || err != nil
	s.mu.Unlock()
	s.end(at, err)
	at.helpers.Wait()
	s.mu.Lock()
	for s.phase == phaseEnding {
		s.await()
	}
	s.mu.Unlock()
	if err != nil && at.timedOut(err) {
		return &attemptTimeoutError{at.bounds.timeout}
	}
	return err
}

// Recovering

// claim needs mu. The caller alone uses the call from now on; it calls recover without mu.
func (s *retryStream) claim(at *streamAttempt) {
	at.stopWatching()
	s.to(phaseRecovering)
}

// recover reports to the call how an attempt ended, and makes the attempt that follows the one
// in use. If none follows, the call is over.
func (s *retryStream) recover(at *streamAttempt, err error) {
	s.recoverOn(at, err, func() {
		at.helpers.Wait()
		at.repanic(func() { s.call.deposit(at.attempt, Ignored) })
		if p := at.panicked; p != nil {
			panic(p) //nolint:forbidigo // it is a codec's or an interceptor's, and the application's to handle
		}
	})
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
	s.read(at, err)
	s.call.show(at.attempt)
	if isEOF(err) {
		err = nil
	}
	return s.call.next(at.attempt, err)
}

// read fills in what gRPC knows of an attempt that has ended with err.
func (s *retryStream) read(at *streamAttempt, err error) {
	c := &s.call
	if isEOF(err) && !c.observed() && c.spans == nil && !c.options.targets {
		return
	}
	over := s.awaitOver(at)
	s.mu.Lock()
	known := over || at.received // else the trailer must not be asked for
	s.mu.Unlock()
	if known {
		at.trailer = at.stream.Trailer()
	}
	if over { // else gRPC may still write to it
		at.peer = at.reached
	}
	if c.wantsHeader() || c.options.header != nil {
		at.header, _ = at.stream.Header()
	}
}

// overGrace is how long to wait for gRPC to report the end of an attempt. That may be under way
// on another goroutine; or it never comes, because an interceptor below drops call options.
const overGrace = 10 * time.Millisecond

// awaitOver waits until gRPC has ended an attempt that has failed, which it is told to do, in
// case the failure is an interceptor's. It returns false if gRPC does not say so.
func (s *retryStream) awaitOver(at *streamAttempt) bool {
	at.release()
	s.mu.Lock()
	if at.over {
		s.mu.Unlock()
		return true
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
	s.call.options.finish(final)
}

// end ends a committed call. gRPC reports the end first, or the method that sees it.
func (s *retryStream) end(at *streamAttempt, err error) {
	s.mu.Lock()
	if s.phase != phaseCommitted || s.at != at {
		s.mu.Unlock()
		return
	}
	s.final = err
	switch {
	case err == nil:
		s.final = io.EOF
	case at.timedOut(err):
		s.final = &attemptTimeoutError{at.bounds.timeout}
	}
	s.direct.Store(nil)
	s.to(phaseEnding)
	s.mu.Unlock()
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
	s.mu.Unlock()
	if committed {
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
	if !s.uses(at) || s.inside > 0 || !at.over || at.overErr == nil {
		s.mu.Unlock()
		return
	}
	err := at.overErr
	if s.call.ctx.Err() == nil && !s.call.closed() {
		if at.unwatch == nil {
			at.unwatch = context.AfterFunc(s.call.ctx, func() { s.checkAbandoned(at) })
		}
		s.mu.Unlock()
		return
	}
	s.claim(at)
	s.mu.Unlock()
	s.recoverOn(at, err, func() {}) // a call that is abandoned is not retried
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
