package grpcretry

import (
	"context"
	"errors"
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/peer"
)

// StreamClientInterceptor returns the interceptor for streams, for
// [grpc.WithChainStreamInterceptor]. Chain it first, like the unary one.
//
// The application's messages are kept, by reference, and replayed in order when an attempt fails,
// until the stream is committed: when the application has received a message or headers, has
// called Context or Trailer, or has sent more than [WithBufferLimit] or [WithReplayMemory] allows. From
// then on gRPC's errors are returned unchanged, except that an attempt ended by [WithAttemptTimeout] before its
// first message reports that, and a message costs nothing extra. As gRPC demands anyway, a message
// must not be changed after SendMsg. If the program fills one object again and again, the stream is
// not retried, and a warning is logged. More complicated reuse is not detected, because that would
// take a copy of each message; the objects would be replayed with their latest contents.
//
// SendMsg may return nil although the attempt has failed: the message will be sent again. As
// in gRPC, it returns io.EOF when the stream has ended; if the server had sent headers, the
// library cannot see the status before RecvMsg, so from then on the stream is committed.
// SendMsg may wait while another goroutine is retrying and the buffer, or the replay memory, is full.
//
// Header waits for the headers of the attempt that succeeds. Context and Trailer never wait;
// between two attempts Context returns the call's context.
//
// Interceptors chained below must pass the call options on. If one does not, the end of a stream
// that the application abandons is not reported, SendMsg and Header leave more failures to RecvMsg,
// and the server does not receive the number of previous attempts; nothing else changes. For
// interceptors that add credentials, see [Retrier.UnaryClientInterceptor].
func (r *Retrier) StreamClientInterceptor() grpc.StreamClientInterceptor { return r.stream }

func (r *Retrier) stream(ctx context.Context, desc *grpc.StreamDesc, cc *grpc.ClientConn, method string,
	streamer grpc.Streamer, opts ...grpc.CallOption) (grpc.ClientStream, error) {
	c := call{rpc: rpc{retrier: r, facts: facts{ctx: ctx, cc: cc, method: method}}}
	if err := c.prepare(opts, desc, nil); err != nil {
		return nil, err
	}
	if c.mode == modePassThrough && c.learner == nil {
		return c.passStream(desc, streamer)
	}
	s := &retryStream{call: c, desc: desc, streamer: streamer}
	s.call.stream = s
	if c.policy.AttemptTimeout > 0 {
		s.call.overdue = s.overdue
	}
	if err := s.establish(&s.first); err != nil {
		return nil, err
	}
	return s, nil
}

// A retryStream is the application's stream. Beneath it one attempt follows another, each with a
// stream of its own, until one is committed. This file has the methods that the application calls,
// stream_state.go the state that they share, and stream_recover.go the way from a failed attempt to
// the next one.
//
// One goroutine may send while another receives. The goroutine that finds the attempt failed changes
// the phase to recovering. It alone then uses the call, waits and opens the next attempt, without
// holding mu; the other goroutines add to the queue, or wait for a change.
type retryStream struct {
	call     call
	first    attempt // part of the stream to save an allocation
	desc     *grpc.StreamDesc
	streamer grpc.Streamer

	// direct is the attempt that the application is committed to. It is set when that attempt
	// has been sent the whole queue; from then on messages bypass the fields below.
	direct atomic.Pointer[streamAttempt]

	holding   *holding // what the stream counts with in Usage
	onGarbage runtime.Cleanup

	mu          sync.Mutex // never held during an RPC, a wait or a callback
	streamState            // guarded by mu

	racing *hedgedStream // guarded by mu; from the first RecvMsg of a hedged stream on
}

// A streamAttempt is one attempt and its stream.
type streamAttempt struct {
	*attempt
	stream     grpc.ClientStream
	reached    peer.Peer      // written by gRPC before the end of the attempt
	hasMessage bool           // a message has arrived; written with mu, by the receiving goroutine
	helpers    sync.WaitGroup // goroutines of ours that use the stream

	// The fields below are guarded by the stream's mu.
	over     bool          // gRPC has reported the attempt's end
	overErr  error         // the error that it ended with; nil after a success
	ended    chan struct{} // closed when over; nil while nobody waits for that
	unwatch  func()        // see retryStream.checkAbandoned
	received bool          // RecvMsg has returned an error, io.EOF included
	finished bool          // RecvMsg has returned io.EOF

	sent    int   // queued messages that were handed to the stream
	closed  bool  // the stream's CloseSend was called
	sending bool  // a goroutine is handing the queue to the stream
	broken  error // the error of SendMsg or CloseSend because of which the library has ended the attempt

	confirming bool // a goroutine receives the end, see endUnclear

	binding  bool // committed, but afterCommit has not yet reported that to the plan
	panicked any  // the value of a panic on one of our goroutines

	waiting  time.Duration // the time since which a goroutine has waited for a message, if there is a timeout
	unseen   *time.Timer   // fires when headers that have arrived must have been seen
	expired  bool          // the attempt timeout has passed while nobody waited for a message
	answered bool          // the same, and headers or the end have arrived
}

// SendMsg implements grpc.ClientStream.
func (s *retryStream) SendMsg(m any) error {
	for {
		if at := s.direct.Load(); at != nil {
			return s.sendDirect(at, m)
		}
		at, err := s.keep(m, s.weigh(m))
		switch {
		case errors.Is(err, errCommitFirst):
			continue
		case at == nil:
			return s.sendError(err)
		case err != nil: // the call is over, and gRPC knows which error to return
			return s.sendError(s.atEnd(at, func() error { return at.stream.SendMsg(m) }))
		}
		return s.handOver(at)
	}
}

func (s *retryStream) sendDirect(at *streamAttempt, m any) error {
	err := at.stream.SendMsg(m)
	if err == nil {
		return nil
	}
	switch {
	case !isEOF(err): // gRPC has ended the stream with this error
		s.end(at, err)
	case s.desc.ClientStreams:
		at.stream.Context() // gRPC must not retry a stream whose end the application has seen
	}
	return s.sendError(err)
}

// sendError returns the error of SendMsg for err: for the one request of a server stream gRPC does
// not return io.EOF, because RecvMsg returns the status.
func (s *retryStream) sendError(err error) error {
	if isEOF(err) && !s.desc.ClientStreams {
		return nil
	}
	return err
}

// CloseSend implements grpc.ClientStream.
func (s *retryStream) CloseSend() error {
	if at := s.direct.Load(); at != nil {
		return at.stream.CloseSend()
	}
	s.mu.Lock()
	s.done = true
	at := s.at
	if s.isOver() && at != nil {
		s.mu.Unlock()
		return s.atEnd(at, at.stream.CloseSend)
	}
	if !s.inUse() || at.sending {
		s.mu.Unlock()
		return nil // the recovering or sending goroutine calls CloseSend
	}
	s.startSending(at)
	s.mu.Unlock()
	if err := s.handOver(at); !isEOF(err) {
		return err
	}
	return nil // RecvMsg returns the status
}

// RecvMsg implements grpc.ClientStream.
func (s *retryStream) RecvMsg(m any) error {
	if at := s.direct.Load(); at != nil && at.hasMessage {
		if err := at.stream.RecvMsg(m); err != nil {
			return s.receivedLast(at, err)
		}
		return nil
	}
	return s.receive(m)
}

// Header implements grpc.ClientStream. Headers that the application has seen commit the stream.
func (s *retryStream) Header() (metadata.MD, error) {
	for {
		if at := s.direct.Load(); at != nil {
			return s.headersOf(at)
		}
		at, use, todo := s.tryHeader()
		switch {
		case todo != nil:
			todo()
		case at == nil:
			return nil, nil // as in gRPC: RecvMsg returns the status
		case !use:
			return s.headersOf(at)
		default:
			md, err := s.headerOf(at)
			if s.headed(at, md, err) {
				return md, err
			}
		}
	}
}

// Context implements grpc.ClientStream. It commits the stream, and does not wait.
func (s *retryStream) Context() context.Context {
	if at := s.bindNow(); at != nil {
		return at.stream.Context()
	}
	return s.call.ctx
}

// Trailer implements grpc.ClientStream. It returns nil before the call's end. It commits the stream,
// and does not wait.
func (s *retryStream) Trailer() metadata.MD {
	at := s.bindNow()
	if at == nil {
		return nil
	}
	s.mu.Lock()
	known := s.isOver() && s.at == at && (at.over || at.received)
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
	commits := s.phase == phaseOpen && at.failure() == nil
	switch {
	case commits:
		s.commit(at)
	case s.phase < phaseCommitted:
		s.bind = true
		at = nil
	}
	s.mu.Unlock()
	if commits {
		s.afterCommit(at)
	}
	return at
}
