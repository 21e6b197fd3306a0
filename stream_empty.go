package grpcretry

import (
	"io"
	"runtime"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/emptypb"
)

// This file finds out how an attempt has ended if gRPC reports an end without a failure before any
// message. Such a report may be false, if gRPC has retried the call transparently: RecvMsg and
// Header then return without an error because gRPC could not send the messages again. Either the
// connection was lost once more, or the server has ended the attempt early, with any status.
//
// If the server has ended the attempt, RecvMsg, called again, returns what the server has sent. If it
// has not, RecvMsg may block forever, even beyond the end of its context.

// The errors for an end without a failure that no server can have sent.
var (
	errLost       = status.Error(codes.Unavailable, "grpcretry: the connection was lost, and gRPC reported an end without a failure")
	errNoResponse = status.Error(codes.Unavailable, "grpcretry: the stream ended without a response and without a failure")
)

// isMadeUp reports whether an error is one of these.
func isMadeUp(err error) bool {
	return err == errLost || err == errNoResponse //nolint:errorlint // set here
}

// emptyEnd returns the error of a stream that has ended without a message and, according to gRPC,
// without a failure. It returns nil if m has become the response of a client stream.
func (s *retryStream) emptyEnd(at *streamAttempt, m any) error {
	switch err := s.receiveEnd(at, m); {
	case err == nil && s.desc.ServerStreams:
		return errLost // there are messages, but gRPC has given the stream up
	case isEOF(err) && !s.desc.ServerStreams:
		return errNoResponse
	default:
		return err
	}
}

// receiveEnd calls RecvMsg for emptyEnd, unless that can block.
func (s *retryStream) receiveEnd(at *streamAttempt, m any) error {
	trailer := at.stream.Trailer()
	md, _ := at.stream.Header()
	switch {
	case md == nil && len(trailer) == 0:
		return s.lost()
	case !s.isReported(at):
		return io.EOF // it comes from an interceptor below
	case len(trailer) > 0: // the server has ended the stream
		return at.stream.RecvMsg(m)
	case canHedge(m):
		return s.tryReceiveEnd(at, m)
	default:
		return io.EOF
	}
}

// lost is the error of an attempt that nobody has ended.
func (s *retryStream) lost() error {
	if s.desc.ServerStreams {
		return errLost
	}
	return errNoResponse
}

// endGrace is the time within which RecvMsg must return the end of a stream that has ended.
const endGrace = time.Second

// tryReceiveEnd calls RecvMsg on a goroutine of its own, because it is not known whether the server
// has ended the stream. If it has, RecvMsg does not wait for anything. If it has not, gRPC may leave
// the goroutine blocked forever.
func (s *retryStream) tryReceiveEnd(at *streamAttempt, m any) error {
	into := typeOfReply(m).make()
	ended := make(chan error, 1)
	go func() {
		err := errPanicked
		defer func() {
			_ = recover() // from a codec
			ended <- err
		}()
		err = at.stream.RecvMsg(into)
	}()
	err, received := awaitEnd(ended)
	switch {
	case !received:
		return s.lost()
	case err == nil:
		copyReply(m, into)
	}
	return err
}

// awaitEnd waits for endGrace and, because the whole process may have been stopped meanwhile, until
// other goroutines have run.
func awaitEnd(ended <-chan error) (err error, received bool) {
	grace := time.NewTimer(endGrace)
	defer grace.Stop()
	select {
	case err = <-ended:
		return err, true
	case <-grace.C:
	}
	for range overYields {
		select {
		case err = <-ended:
			return err, true
		default:
			runtime.Gosched()
		}
	}
	return nil, false
}

// leftNothing reports whether gRPC has made up the end of a stream without headers, because it has
// lost the connection. If a server ends a stream, the trailer has at least the content-type. The
// stream must have ended; calling Trailer also rules out a transparent retry from now on.
func (at *streamAttempt) leftNothing() bool {
	trailer := at.stream.Trailer()
	md, _ := at.stream.Header()
	return md == nil && len(trailer) == 0
}

// isUnclear needs mu. It reports whether gRPC has reported an end without a failure, and RecvMsg has
// not. Header makes gRPC do so if there are no headers.
func (at *streamAttempt) isUnclear() bool {
	return at.over && at.overErr == nil && !at.received && !at.hasMessage
}

// headersOf asks an attempt for its headers and, if that makes gRPC end the attempt, ends the call.
func (s *retryStream) headersOf(at *streamAttempt) (md metadata.MD, _ error) {
	s.mu.Lock()
	s.asking++
	s.mu.Unlock()
	defer func() {
		s.mu.Lock()
		s.asking--
		unclear := s.phase == phaseCommitted && s.at == at && at.isUnclear()
		s.mu.Unlock()
		if unclear {
			s.endUnclear(at, md != nil)
		}
	}()
	return at.headers()
}

// endUnclear ends a committed call whose attempt has an unclear end. If a goroutine receives, that
// goroutine ends the call. With headers the end is believed: an interceptor below may have received
// everything already.
func (s *retryStream) endUnclear(at *streamAttempt, headed bool) {
	s.mu.Lock()
	if s.phase != phaseCommitted || s.at != at || s.receiving > 0 || at.confirming {
		s.mu.Unlock()
		return
	}
	at.confirming = true
	s.mu.Unlock()
	err := errPanicked
	defer func() {
		s.mu.Lock()
		at.confirming = false
		s.changed()
		s.mu.Unlock()
		s.end(at, err)
	}()
	if headed {
		err = nil
	} else {
		err = s.confirmEnd(at)
	}
}

// recoverUnclear handles the unclear end of an attempt that the caller has claimed.
func (s *retryStream) recoverUnclear(at *streamAttempt) {
	done := false
	defer func() {
		if !done { // an interceptor below panics
			s.crash(at.attempt)
		}
	}()
	err := s.confirmEnd(at)
	done = true
	s.recover(at, err)
}

// confirmEnd returns the error with which RecvMsg ends an attempt, after Header has found an unclear
// end without headers.
func (s *retryStream) confirmEnd(at *streamAttempt) error {
	if md, _ := at.stream.Header(); md != nil {
		return s.lost() // gRPC has given the stream up
	}
	err := s.emptyEnd(at, new(emptypb.Empty))
	if err == nil {
		err = s.lost()
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	at.note(err)
	return err
}
