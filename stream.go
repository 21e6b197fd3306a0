package grpcretry

import (
	"context"

	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"
)

// StreamClientInterceptor returns the interceptor for streams, for
// [grpc.WithChainStreamInterceptor]. Chain it first, like the unary one.
//
// The application's messages are kept, by reference, and replayed in order when an attempt fails,
// until the stream is committed: when the application has received a message or headers, has
// called Context or Trailer, has sent more than [WithBufferLimit] or the replay memory allows, or has
// sent the same object twice in a row. From then on gRPC's errors are returned unchanged, except that an
// attempt ended by [WithAttemptTimeout] before its first message reports that, and a message costs next to
// nothing. If an object is sent again after an attempt has failed, no other attempt follows, and the error
// may be an [*Error]. As gRPC demands anyway, a message must not be changed after SendMsg. A program that
// fills one object again and again is noticed, and a warning is logged. More complicated reuse is not: the
// objects would be replayed with their latest contents.
//
// SendMsg may return nil although the attempt has failed: the message will be sent again. As
// in gRPC, it returns io.EOF when the stream has ended; an interceptor below whose SendMsg returns io.EOF, or wraps
// it, says the same. If the server has sent headers, gRPC tells only in RecvMsg why the attempt has failed. If no
// other goroutine is in RecvMsg or Header, SendMsg receives instead, as the type that the linked proto names, like
// Header in a hedged stream, see [WithHedging]. If the type is not certain, the stream is committed from then on.
// SendMsg waits for the next attempt if it has found the failure itself, or if the buffer or the replay memory is full while another
// goroutine is retrying.
//
// Header waits for the headers of the attempt that succeeds. Context and Trailer never wait;
// between two attempts Context returns the call's context, which the stream's end does not end. They do not commit a hedged stream
// while its first message is awaited. At the end, all three belong to the attempt whose
// status the call returns, as the caller's outputs do; that need not be the last one.
//
// Each attempt is bound when it opens, by a call of its Context, so that gRPC's transparent retry, which may lose
// messages, never runs beneath it. So a stream that is committed although the application has received nothing is not sent again if a
// server refuses it.
//
// A later attempt is sent the messages by a goroutine of the library. If a codec or an interceptor below panics there,
// the call ends with INTERNAL. If a stream ends while no goroutine uses it, the library may call Header and Trailer of interceptors
// below on a goroutine of its own, where a panic ends the program.
//
// Interceptors chained below must pass the call options on. If one does not, the end of a stream that the
// application abandons is not reported, and the stream counts as open, with its memory, for ever; Trailer may return nil; SendMsg and
// Header leave more failures to RecvMsg, and may take up to 10 ms longer to find one; nothing else changes. For
// interceptors that add credentials, see [Retrier.UnaryClientInterceptor].
//
// The stream that an interceptor below returns must have gRPC's Context, or one that comes from it, because that knows the peer.
// An interceptor that opens another stream in its place, with the same options, must have seen the end of the first. One that
// receives ahead of the application loses the messages that it has kept back if the server itself ends the stream with CANCELED or
// DEADLINE_EXCEEDED, which look like the end of a context, or if the application sends a message that cannot be kept or sent.
//
// After a retry, the streams that interceptors below wrap see SendMsg and RecvMsg at the same time, even
// if the application calls them in turn: the messages are replayed on one goroutine while another waits for
// the response. gRPC allows that, so their methods must not share data without a lock; the logging
// interceptor of go-grpc-middleware does, and the race detector reports it. A lock that both take must not be held while they
// wait.
//
// OnFinish runs when the application gets the end, with the same error, even if an interceptor below has learned of the end
// before, or has changed the error. If the application never asks, it runs when the call's context ends; after an interceptor
// below, or a SendMsg, has received the end, closing the ClientConn is not enough.
func (r *Retrier) StreamClientInterceptor() grpc.StreamClientInterceptor { return r.checked().stream }

func (r *Retrier) stream(ctx context.Context, desc *grpc.StreamDesc, cc *grpc.ClientConn, method string,
	streamer grpc.Streamer, opts ...grpc.CallOption) (grpc.ClientStream, error) {
	c := call{retrier: r, facts: facts{backend: backend{cc: cc}, ctx: ctx, method: method}}
	if err := c.prepare(opts, desc, nil); err != nil {
		return nil, err
	}
	if c.mode == modePassThrough {
		return passing{&c}.stream(desc, streamer)
	}
	s := &retryStream{call: c, desc: desc, streamer: streamer}
	s.call.stream = s
	s.change.L, s.out.usage = &s.mu, r.usage
	s.out.queue = s.out.space[:0]
	r.usage.streams.Add(1)
	if c.isContested() {
		new(contest).join(&s.call)
	}
	var err error
	s.orCrash(func() {
		err = s.openFrom(s.call.begin(s.first.in), nil)
	})
	if err != nil {
		return nil, err
	}
	return s, nil
}

// A retryStream is the application's stream. Beneath it one attempt follows another, each with a
// stream of its own, until one is committed. This file has most methods that the application calls,
// stream_state.go the state that they share, and stream_recover.go the way from a failed attempt to
// the next one.
//
// One goroutine may send while another receives. The goroutine that finds the attempt failed changes
// the phase to recovering. It alone then uses the call, waits and opens the next attempt, without
// holding mu; the other goroutines add to the outbox, or wait for a change.
type retryStream struct {
	call     call
	desc     *grpc.StreamDesc
	streamer grpc.Streamer

	// What the first attempt needs is part of the stream, to save allocations.
	first  boundedAttempt
	opened streamAttempt

	streamState
}

// SendMsg implements grpc.ClientStream.
func (s *retryStream) SendMsg(m any) error {
	err := s.send(m)
	if isEOF(err) && !s.desc.ClientStreams {
		return nil // as in gRPC: RecvMsg returns the status
	}
	return err
}

// CloseSend implements grpc.ClientStream.
func (s *retryStream) CloseSend() error {
	s.mu.Lock()
	at, again := s.at, s.halfClosed
	s.halfClosed = true
	switch {
	case s.mayPass(at):
		s.mu.Unlock()
		return at.stream.CloseSend()
	case s.isOver() || again:
		s.mu.Unlock()
		return nil
	}
	s.out.queue = append(s.out.queue, halfClose{})
	if s.phase != phaseOpen || at.sender != senderApplication {
		s.mu.Unlock()
		return nil // the goroutine that replays calls CloseSend
	}
	if err := s.sendNow(at, at.stream.CloseSend); !isEOF(err) {
		return err
	}
	return nil // RecvMsg returns the status
}

// RecvMsg implements grpc.ClientStream.
func (s *retryStream) RecvMsg(m any) error {
	if at := s.direct.Load(); at != nil && at.hasMessage {
		return at.receiveMore(m)
	}
	return s.receive(m)
}

// Context implements grpc.ClientStream. It commits the stream, except a hedged one between attempts or while some compete, and does not
// wait.
func (s *retryStream) Context() context.Context {
	if at := s.bindNow(); at != nil {
		return at.stream.Context()
	}
	return s.call.ctx
}

// Trailer implements grpc.ClientStream. It returns nil before the call's end. It commits the stream
// as Context does, and does not wait.
func (s *retryStream) Trailer() metadata.MD {
	s.bindNow()
	s.mu.Lock()
	at := s.at
	known := s.isOver() && at != nil && (at.end != nil || at.received)
	s.mu.Unlock()
	if !known {
		return nil // gRPC's Trailer must not be called before the end
	}
	return at.stream.Trailer()
}

// bindNow commits the stream and returns the attempt that the application is bound to; at the end
// of the call that is the last attempt. It returns nil if that attempt has no stream, or is yet to
// come.
func (s *retryStream) bindNow() *streamAttempt {
	if at := s.direct.Load(); at != nil {
		return at
	}
	s.mu.Lock()
	at := s.at
	switch {
	case s.phase >= phaseCommitting:
		s.mu.Unlock()
	case s.phase == phaseOpen && at.failure() == nil:
		s.bindTo(at)
	default:
		s.bind = s.call.mode != modeHedged // whose first message decides
		s.mu.Unlock()
		if s.call.ctx.Err() != nil || isClosed(s.call.cc) {
			return at // no attempt follows
		}
		return nil
	}
	return at
}
