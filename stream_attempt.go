package grpcretry

import (
	"cmp"
	"context"
	"io"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"

	"github.com/grpcretry/grpcretry/internal/messages"
)

// A streamAttempt is one attempt and its stream. This file has what becomes of it: which end is known, and from whom.
type streamAttempt struct {
	*attempt
	of     *retryStream
	stream grpc.ClientStream
	unread peer.Peer // written by gRPC, on any goroutine, so that it is read from the stream's context instead

	users users

	// The fields below are guarded by the stream's mu.
	sender     sender // who may hand it the next entry of the outbox
	committed  bool   // the application is bound to it
	hasMessage bool   // RecvMsg has returned a message; the goroutine that receives reads it without mu
	received   bool   // RecvMsg has returned the end
	sent       int    // entries of the outbox that were handed to the stream
	end        error  // as gRPC has reported it; nil before that, io.EOF after a success
	broken     error  // the failure because of which the library has given the attempt up before that
}

// users counts the goroutines that have entered a method of an attempt's stream without mu, which would cost each message two locks.
// One bit above the count says that gRPC has reported the attempt's end, another one that the end of the attempt's context is waited for.
type users struct{ state atomic.Int32 }

const usersEnded, usersWatched = 1 << 30, 1 << 29

func (u *users) enter()              { u.state.Add(1) }
func (u *users) leave() (ended bool) { return u.state.Add(-1) >= usersEnded }
func (u *users) isNone() bool        { return u.state.Load()&(usersWatched-1) == 0 }
func (u *users) end() (unused bool)  { return u.state.Or(usersEnded) == 0 }
func (u *users) hasEnded() bool      { return u.state.Load() >= usersEnded }
func (u *users) watch() (first bool) { return u.state.Or(usersWatched)&usersWatched == 0 }
func (u *users) forget()             { u.state.Store(0) }

// failure needs mu. It returns the attempt's failure, nil if none is known outside of RecvMsg.
func (at *streamAttempt) failure() error {
	switch {
	case at.broken != nil:
		return at.broken
	case at.end == io.EOF: //nolint:errorlint // our own mark
		return nil
	case at.end != nil:
		return at.end
	case at.isCut():
		return errCut
	default:
		return nil
	}
}

// finished is called when gRPC has ended an attempt, on any goroutine.
func (at *streamAttempt) finished(err error) {
	s := at.of
	s.mu.Lock()
	at.end = io.EOF
	if err != nil && !at.received { // otherwise RecvMsg knows better
		at.end = err
	}
	s.change.Broadcast()
	unseen := at.users.end() && s.at == at && s.receiving+s.heading+s.sending == 0
	s.mu.Unlock()
	if unseen {
		go at.noticed(false) // an interceptor below may hold a lock here, and need it to tell what the attempt has left
	}
}

// endsWell needs mu. The attempt has succeeded, whatever gRPC has reported: the end of its context, for example.
func (at *streamAttempt) endsWell() {
	if at.end != nil {
		at.end = io.EOF
	}
}

// abandon ends an attempt because of an error about which gRPC need not know: a message cannot be sent, or an interceptor below panics.
// An end that gRPC has reported is the attempt's all the same. before means that it had done so when SendMsg was called: then messages
// may have been kept back below.
func (at *streamAttempt) abandon(err error, before bool) {
	s := at.of
	s.mu.Lock()
	ended := at.end != nil
	if at.broken == nil && !ended {
		at.broken = err
	}
	s.change.Broadcast() // a Header may wait for a RecvMsg that has panicked
	s.mu.Unlock()
	at.noticed(!before)
	if !ended {
		at.endContext() // wakes up the goroutine that receives
	}
}

// noticed deals with an attempt that may have ended although no goroutine is in RecvMsg or Header: the application may never
// call a method again. told is true if its SendMsg is about to return the end.
func (at *streamAttempt) noticed(told bool) {
	s := at.of
	over := at.Err() != nil || isClosed(s.call.cc)
	s.mu.Lock()
	err := at.certainEnd(told || over)
	if told {
		err = cmp.Or(err, at.end)
	}
	switch bound, used := s.isBound() && s.at == at, s.uses(at); {
	case err != nil && bound:
		s.mu.Unlock()
		s.end(at, err)
		return
	case err != nil && used && !s.isAwaited():
		s.rest = at
		s.recover(at, err, nil)
		return
	case (bound || used) && at.isUnreceived() && at.users.watch():
		context.AfterFunc(at, func() { at.noticed(false) })
	}
	s.mu.Unlock()
}

// certainEnd needs mu. It returns the attempt's failure, unless that is left to the application to receive, for as long as the
// call's context lasts: an interceptor below that receives ahead may keep messages back. told means that nothing else can come.
func (at *streamAttempt) certainEnd(told bool) error {
	err := at.failure()
	if err == nil && at.isUnreceived() {
		err = status.FromContextError(at.Err()).Err() // nil if the context has not ended
	}
	if told || at.broken != nil || isContextEnd(err) { // of a context that gRPC or an interceptor below has made
		return err
	}
	return nil
}

// isUnreceived needs mu. It reports whether gRPC has ended the attempt, and no method has told the application, or is about to.
func (at *streamAttempt) isUnreceived() bool {
	return at.end != nil && !at.received && !at.of.isAwaited() && at.users.isNone()
}

// left records that one of the n goroutines that are in the same method of an attempt has left it. If gRPC has reported an
// end meanwhile, it deals with that, by a goroutine of its own unless waits is true.
func (s *retryStream) left(n *int32, waits bool) {
	s.mu.Lock()
	*n--
	at, ended := s.at, s.at != nil && s.at.end != nil
	s.mu.Unlock()
	switch {
	case ended && waits:
		at.noticed(false)
	case ended:
		go at.noticed(false)
	}
}

// cleanEnd returns the error of a stream that has ended without a failure: io.EOF if that is true. If gRPC says so, an end that
// has neither headers nor a trailer was sent by no server. A client stream that has ended well has a response. If gRPC has seen a
// failure, or no end yet, an interceptor below has made this one up: gRPC's Header could wait, and its Trailer must not be called.
func (at *streamAttempt) cleanEnd() error {
	at.of.mu.Lock()
	hasMessage, end := at.hasMessage, at.end
	at.of.mu.Unlock()
	switch {
	case hasMessage, end != nil && end != io.EOF: //nolint:errorlint // our own mark
		return io.EOF
	case end != nil && !at.of.call.policy.dryRun && at.isEmpty():
		return errConnLost
	case !at.of.desc.ServerStreams:
		return errNoResponse
	default:
		return io.EOF
	}
}

// errNoResponse is gRPC's.
var errNoResponse = status.Error(codes.Internal, "cardinality violation: received no response message from non-server-streaming RPC")

// isEmpty reports whether a stream that has ended has neither headers nor a trailer; that of a server has at least the content-type.
func (at *streamAttempt) isEmpty() bool {
	md, err := at.stream.Header()
	return md == nil && err == nil && len(at.stream.Trailer()) == 0
}

// overGrace limits the wait for gRPC's report of an attempt's end, which does not come if an interceptor below drops
// call options.
const overGrace = 10 * time.Millisecond

// awaitOver waits until gRPC has reported an attempt's end, which another goroutine may be about to do.
func (at *streamAttempt) awaitOver() bool {
	s := at.of
	s.mu.Lock()
	defer s.mu.Unlock()
	if at.end != nil {
		return true
	}
	deadline := time.Now().Add(overGrace)
	grace := time.AfterFunc(overGrace, func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.change.Broadcast()
	})
	defer grace.Stop()
	for at.end == nil && time.Now().Before(deadline) {
		s.change.Wait()
	}
	return at.end != nil
}

// drain ends an attempt whose first message arrived too late. It reads to the end, so that
// interceptors below see the end.
func (at *streamAttempt) drain(into any) {
	at.endContext()
	for at.recv(into) == nil {
		continue
	}
}

// read completes an attempt that has ended with err: its header, trailer and peer.
func (at *streamAttempt) read(err error) {
	s := at.of
	c := &s.call
	if isEOF(err) && !c.retrier.report.observed() && c.spans == nil && !c.options.outputs() {
		return
	}
	at.endContext() // the failure may come from an interceptor, and gRPC may not know about it
	over := at.awaitOver()
	s.mu.Lock()
	received := at.received
	s.mu.Unlock()
	if over || received { // otherwise gRPC may still write the trailer
		at.trailer = at.stream.Trailer()
	}
	if ctx := at.stream.Context(); ctx != nil {
		if p, ok := peer.FromContext(ctx); ok {
			at.peer = *p
		}
	}
	if c.retrier.report.wantsHeader(&c.facts) || c.options.header != nil {
		at.extras().header, _ = at.stream.Header()
	}
	if over && at.refused(err) {
		at.extras().sighting.Store(sawRefusal)
	}
}

// refused reports whether an attempt that has ended with err was refused before any handler could run. A server cannot
// pretend it, because its own end comes with headers or a trailer.
func (at *streamAttempt) refused(err error) bool {
	end, isStatus := readable(err).(interface{ GRPCStatus() *status.Status }) // a wrapped one is not gRPC's
	if !isStatus {
		return false
	}
	st := end.GRPCStatus()
	if st.Code() != codes.Unavailable || !messages.IsRefusal(st.Message()) {
		return false
	}
	return at.isEmpty()
}
