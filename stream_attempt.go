package grpcretry

import (
	"context"
	"io"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"
)

// A streamAttempt is one attempt and its stream.
type streamAttempt struct {
	*attempt
	of         *retryStream
	stream     grpc.ClientStream
	reached    peer.Peer // written by gRPC before the end of the attempt
	hasMessage bool      // a message has arrived; written with mu, by the receiving goroutine

	// The fields below are guarded by the stream's mu.
	sent      int         // queued messages that were handed to the stream
	closed    bool        // the stream's CloseSend was called
	replaying bool        // a goroutine of ours is handing the queue to the stream
	deaf      bool        // SendMsg has failed: nothing more may be sent, because something is missing
	broken    error       // unless it was with io.EOF, the error, because of which the attempt is given up
	over      bool        // gRPC has reported the attempt's end
	overErr   error       // the error that it ended with; nil after a success
	received  bool        // RecvMsg has returned an error, io.EOF included
	unwatch   func() bool // see retryStream.checkAbandoned
}

// cause needs mu. It returns the library's own reason to end the attempt, nil if it had none.
func (at *streamAttempt) cause() error {
	switch {
	case at.broken != nil:
		return at.broken
	case at.isCut():
		return errCut
	default:
		return nil
	}
}

// failure needs mu. It returns the attempt's failure, nil if none is known.
func (at *streamAttempt) failure() error {
	if at.over && at.broken == nil {
		return at.overErr // gRPC knows best
	}
	return at.cause()
}

// hasEnded needs mu. It reports whether the attempt's end is certain, so that there is a trailer.
func (at *streamAttempt) hasEnded() bool { return at.over || at.received }

// isOpenBelow needs mu. It reports whether an attempt that the library has given up has not ended in gRPC.
func (at *streamAttempt) isOpenBelow() bool {
	return (at.fate != fateCommitted || at.broken != nil) && !at.over
}

// stopWatching needs mu. Nobody waits for the caller's end any more, see retryStream.checkAbandoned.
func (at *streamAttempt) stopWatching() {
	if at.unwatch != nil {
		at.unwatch()
		at.unwatch = nil
	}
}

// awaited starts the attempt timeout, which counts while the application waits for an attempt's first message or
// for its headers: nothing else can tell whether the message is there.
func (at *streamAttempt) awaited() {
	at.of.call.contest.resume(at.attempt)
}

// headers returns the stream's headers as the application sees them.
func (at *streamAttempt) headers() (metadata.MD, error) {
	header, err := at.stream.Header()
	return at.withPreviousAttempts(header), err
}

// discard ends an attempt whose first message arrived too late. It reads to the end, so that
// interceptors below see the end.
func (at *streamAttempt) discard(into any) {
	at.release()
	for at.stream.RecvMsg(into) == nil {
		continue
	}
}

// hand calls SendMsg or CloseSend of an attempt, after sending was counted.
func (at *streamAttempt) hand(send func() error) (err error) {
	s := at.of
	err = errPanicked
	defer func() {
		s.mu.Lock()
		s.sending--
		at.noteSend(err)
		s.mu.Unlock()
		if err != nil && !isEOF(err) {
			at.giveUp(err)
		}
		at.checkAbandoned()
	}()
	return send()
}

// replay sends the outbox to an attempt, on a goroutine of ours.
func (at *streamAttempt) replay() {
	err := errExited // if a codec or an interceptor below calls runtime.Goexit
	defer func() {
		if p := recover(); p != nil {
			err = status.Errorf(codes.Internal, "grpcretry: panic while a message was sent again: %v", p)
		}
		at.replayed(err)
	}()
	err = at.sendOutbox()
}

// sendOutbox sends what the attempt lacks, as long as SendMsg does not fail.
func (at *streamAttempt) sendOutbox() error {
	for {
		send := at.of.nextToReplay(at)
		if send == nil {
			return nil
		}
		if err := send(); err != nil {
			return err
		}
	}
}

// replayed ends a replay. The attempt's failure, if it is gRPC's, is found by whoever sends or receives next.
func (at *streamAttempt) replayed(err error) {
	s := at.of
	s.mu.Lock()
	if at.noteSend(err); err != nil {
		s.caughtUp(at)
	}
	s.mu.Unlock()
	if err != nil && !isEOF(err) {
		at.giveUp(err)
	}
}

// noteSend needs mu. It records the result of SendMsg or CloseSend.
func (at *streamAttempt) noteSend(err error) {
	at.deaf = at.deaf || err != nil
	if err != nil && !isEOF(err) && at.broken == nil && !at.of.isOver() {
		at.broken = err
	}
}

// giveUp ends an attempt because of an error about which gRPC need not know: a message cannot be sent, or an
// interceptor below fails.
func (at *streamAttempt) giveUp(err error) {
	s := at.of
	s.mu.Lock()
	at.noteSend(err)
	bound := s.isBound() && s.at == at
	if at.over {
		err = at.overErr // gRPC knows best
	}
	s.change.Broadcast()
	s.mu.Unlock()
	if bound {
		s.end(at, err)
	}
	at.release() // wakes up the goroutine that receives
}

// catchUp needs mu. It starts to send the outbox to an attempt that lacks some of it.
func (at *streamAttempt) catchUp() {
	s := at.of
	if s.out.lacks(at) && !at.replaying && !at.deaf {
		at.replaying = true
		go at.replay()
	}
}

// read completes an attempt that has ended with err: its header, trailer and peer.
func (at *streamAttempt) read(err error) {
	s := at.of
	c := &s.call
	if isEOF(err) && !c.retrier.report.observed() && c.spans == nil && !c.options.outputs {
		return
	}
	at.release() // the failure may come from an interceptor, and gRPC may not know about it
	over, ended := s.awaitOver(at)
	if ended { // otherwise gRPC may still write the trailer
		at.trailer = at.stream.Trailer()
	}
	if over {
		at.peer = at.reached
	} else {
		c.retrier.usage.hidden.Store(true)
		if p, ok := at.peerBelow(); ok {
			at.peer = *p
		}
	}
	if c.wantsHeader() || c.options.header != nil {
		at.header, _ = at.stream.Header()
	}
	if over && at.refused(err) {
		at.sighting.Store(sawNone)
		if at.number == 1 {
			at.fate = fateRefused
		}
	}
}

// peerBelow returns the server of an attempt whose end gRPC has not reported: until then it may write to reached.
func (at *streamAttempt) peerBelow() (*peer.Peer, bool) {
	if ctx := at.stream.Context(); ctx != nil {
		return peer.FromContext(ctx)
	}
	return nil, false
}

// finished is called when gRPC has ended an attempt, on any goroutine. In most cases one of our
// methods is about to notice. But the application may have abandoned the stream: then the call ends
// here.
func (at *streamAttempt) finished(err error) {
	s := at.of
	s.mu.Lock()
	at.over = true
	if !at.received { // otherwise RecvMsg knows better
		at.overErr = err
	}
	bound := s.isBound() && s.at == at
	learning := s.receiving > 0
	silent := err == nil && !at.hasMessage && at.stream != nil
	s.change.Broadcast()
	s.mu.Unlock()
	switch {
	case bound && learning && err == nil:
		return // the receiving goroutine will know whether the attempt has ended well
	case bound && silent:
		s.end(at, at.emptyEnd())
	case bound:
		s.end(at, err)
	default:
		at.checkAbandoned()
	}
}

// checkAbandoned ends the call if its attempt has ended together with the caller's context or the
// ClientConn, and no goroutine is in a method that would notice. If the attempt has ended for another
// reason, it may be retried when the application calls a method again, until the caller's end.
func (at *streamAttempt) checkAbandoned() {
	s := at.of
	s.mu.Lock()
	if !s.uses(at) || s.sending+s.receiving+s.heading > 0 || !at.over {
		s.mu.Unlock()
		return
	}
	err := at.overErr
	if err == nil { // a success that the application did not wait for
		err = status.FromContextError(context.Canceled).Err()
	}
	ch := s.call.channel()
	s.call.limitTo(ch.deadline(timeOf(s.call.start, time.Now())))
	if s.call.limited().Err() == nil && !isClosed(s.call.cc) {
		if at.unwatch == nil {
			at.unwatch = context.AfterFunc(s.call.limited(), func() { at.checkAbandoned() })
		}
		s.mu.Unlock()
		return
	}
	s.recover(at, err, func() {}) // an abandoned call is not retried
}

// An end that gRPC reports as no failure, and that has neither headers nor a trailer, was sent by no server: the
// connection was lost. A client stream that has ended well has a response.
var (
	errConnLost = status.Error(codes.Unavailable, "grpcretry: the connection was lost, and gRPC reported an end without a failure")
	// as in gRPC
	errNoResponse = status.Error(codes.Internal, "cardinality violation: received no response message from non-server-streaming RPC")
)

// emptyEnd returns the error of a stream that has ended without a message and, according to gRPC,
// without a failure: io.EOF if that is true.
func (at *streamAttempt) emptyEnd() error {
	trailer := at.stream.Trailer()
	md, _ := at.stream.Header()
	switch {
	case md == nil && len(trailer) == 0 && !at.of.call.policy.DryRun: // that of a server has at least the content-type
		return errConnLost
	case !at.of.desc.ServerStreams:
		return errNoResponse
	default:
		return io.EOF
	}
}

// receiveFrom receives a message from an attempt, after receiving was counted.
func (at *streamAttempt) receiveFrom(m any) error {
	s := at.of
	returned := false
	defer func() {
		if !returned { // a codec panics
			s.mu.Lock()
			s.receiving--
			s.change.Broadcast()
			s.mu.Unlock()
			at.giveUp(errPanicked)
			at.checkAbandoned()
		}
	}()
	at.awaited()
	err := at.stream.RecvMsg(m)
	if isEOF(err) && !at.hasMessage {
		err = at.emptyEnd()
	}
	returned = true
	return err
}

// askHeader asks an attempt for its headers, after heading was counted.
func (at *streamAttempt) askHeader() (metadata.MD, error) {
	s := at.of
	defer func() {
		s.mu.Lock()
		s.heading--
		s.mu.Unlock()
		s.idle()
		at.checkAbandoned()
	}()
	at.awaited()
	return at.headers()
}
