package grpcretry

import (
	"context"
	"errors"
	"io"
	"sync"
	"sync/atomic"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/protoadapt"
	"google.golang.org/protobuf/types/known/emptypb"
)

// StreamClientInterceptor returns the interceptor for streams, for
// [grpc.WithChainStreamInterceptor]. Chain it first, as its unary sister.
//
// Messages that the application sends are kept, by reference, and sent again in order
// when an attempt fails, until the stream is committed: when the application has seen a
// message or headers of it, has called its Context or Trailer, or has sent more than
// [WithBufferLimit] allows. From then on errors come out untouched, but for the end by
// [WithAttemptTimeout] before a first message, and a message costs nothing more than
// without the interceptor. As gRPC demands anyway, a message must not be changed after
// SendMsg.
//
// SendMsg may return nil although the attempt has failed: the message will be sent
// again. It may wait while another goroutine is retrying and the buffer is full.
func (r *Retrier) StreamClientInterceptor() grpc.StreamClientInterceptor { return r.stream }

func (r *Retrier) stream(ctx context.Context, desc *grpc.StreamDesc, cc *grpc.ClientConn, method string,
	streamer grpc.Streamer, opts ...grpc.CallOption) (grpc.ClientStream, error) {
	c := call{rpc: rpc{retrier: r, ctx: ctx, cc: cc, method: method, stream: true}}
	if err := c.prepare(opts); err != nil {
		return nil, err
	}
	p := c.policy
	hedged := p != nil && p.hedged != nil
	if hedged && desc.ClientStreams {
		r.log.logNotHedged(ctx, method, p, "it has a client stream")
		hedged = false
	}
	if p == nil || p.BufferLimit < 0 || p.MaxAttempts == 1 && !hedged {
		return streamer(ctx, desc, cc, method, opts...)
	}
	s := &retryStream{call: c, desc: desc, streamer: streamer}
	if p.AttemptTimeout > 0 {
		s.call.overdue = s.overdue
	}
	if hedged {
		s.hedge(method, p)
	}
	a := &s.first
	s.call.begin(a)
	for {
		at, err := s.open(a)
		if err == nil {
			s.publish(at)
			return s, nil
		}
		if a, err = s.call.next(a, err); a == nil {
			return nil, err
		}
	}
}

// A retryStream is what the application holds: one stream to it, and beneath it one
// stream after the other, until one is committed.
//
// One goroutine may send while another receives. Whoever sees an attempt fail recovers:
// it alone uses the call, waits and opens the next attempt, without holding mu. The
// other goroutine meanwhile adds to the buffer, or waits for a change.
type retryStream struct {
	call     call
	first    attempt // part of the stream to save an allocation
	desc     *grpc.StreamDesc
	streamer grpc.Streamer

	// committed is the attempt that the application is bound to; nil before. Once it is
	// set, messages pass by everything below.
	committed atomic.Pointer[streamAttempt]

	mu         sync.Mutex     // never held across an RPC, a wait or a callback
	current    *streamAttempt // guarded by mu; the latest attempt that has a stream
	recovering bool           // guarded by mu; a goroutine recovers: no other touches current
	receiving  int            // guarded by mu; goroutines in RecvMsg of an uncommitted attempt
	busy       int            // guarded by mu; goroutines in any method of an uncommitted attempt
	ended      bool           // guarded by mu; the call is over
	final      error          // guarded by mu; what RecvMsg returns then
	told       bool           // guarded by mu; OnFinish and observers know of the end
	changed    chan struct{}  // guarded by mu; closed at the next change of the above; nil while nobody waits

	buffer []any // guarded by mu; messages sent, in order, until committed
	size   int   // guarded by mu; of buffer, as framed on the wire
	closed bool  // guarded by mu; CloseSend was called

	measured HedgeDelay // to be told of the first attempt of a call that is not hedged; nil for nobody
	racing   *hedging   // guarded by mu; from the first RecvMsg of a hedged stream on
}

// A streamAttempt is one attempt and its stream.
type streamAttempt struct {
	*attempt
	stream  grpc.ClientStream
	reached peer.Peer // written by gRPC before it is over
	begun   bool      // a message has come; of the goroutine that receives

	over    bool        // guarded by the stream's mu; gRPC has ended it, with overErr
	overErr error       // likewise
	unwatch func() bool // likewise; see finished
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

// SendMsg implements grpc.ClientStream.
func (s *retryStream) SendMsg(m any) error {
	for {
		if at := s.committed.Load(); at != nil {
			return s.sendCommitted(at, m)
		}
		at, err := s.keep(m, s.weight(m))
		if errors.Is(err, errCommitFirst) {
			continue
		}
		if at == nil {
			return err
		}
		return s.sent(at, at.stream.SendMsg(m))
	}
}

func (s *retryStream) sendCommitted(at *streamAttempt, m any) error {
	err := at.stream.SendMsg(m)
	if err != nil && !isEOF(err) { // gRPC has ended the stream with it
		s.end(at, err)
	}
	return err
}

// errCommitFirst: the message does not fit into the buffer, the stream is now committed.
var errCommitFirst = errors.New("grpcretry: committed by the buffer limit")

// keep puts m into the buffer. It returns the attempt to send it to now, if any.
func (s *retryStream) keep(m any, weight int) (*streamAttempt, error) {
	fits := func() bool { return weight >= 0 && s.size+weight <= s.call.policy.BufferLimit }
	s.mu.Lock()
	defer s.mu.Unlock()
	if !fits() {
		s.settleRecovery(fits)
	}
	switch {
	case s.ended:
		return nil, io.EOF
	case s.committed.Load() == nil && !fits():
		s.commit(s.current)
		return nil, errCommitFirst
	case s.committed.Load() != nil:
		return nil, errCommitFirst
	}
	s.buffer = append(s.buffer, m)
	s.size += max(0, weight)
	if s.recovering {
		return nil, nil // who recovers will send it
	}
	s.busy++
	return s.current, nil
}

// weight is what m counts in the buffer: its size as framed on the wire, 0 for the one
// request of a server stream, negative if m cannot tell.
func (s *retryStream) weight(m any) int {
	const frame = 5 // bytes in front of each message
	if !s.desc.ClientStreams {
		return 0
	}
	switch m := m.(type) {
	case proto.Message:
		return frame + proto.Size(m)
	case protoadapt.MessageV1:
		return frame + proto.Size(protoadapt.MessageV2Of(m))
	case interface{ Size() int }:
		return frame + m.Size()
	default:
		return -1
	}
}

// sent is told what SendMsg of an uncommitted attempt returned for a message that is in
// the buffer.
func (s *retryStream) sent(at *streamAttempt, err error) error {
	s.mu.Lock()
	s.busy--
	switch {
	case err == nil:
	case s.committed.Load() == at:
		s.mu.Unlock()
		if !isEOF(err) {
			s.end(at, err)
		}
		return err
	case s.ended:
		err = io.EOF
	case s.recovering || s.current != at:
		err = nil // it was sent again, or will be
	case !isEOF(err):
		return s.recoverLocked(at, err, true)
	case s.receiving > 0:
		err = nil // who receives will learn why, and recover
	default:
		if final := s.recoverLocked(at, nil, true); final != nil {
			return io.EOF // RecvMsg has the status
		}
		return nil
	}
	s.unlock(at)
	return err
}

// CloseSend implements grpc.ClientStream.
func (s *retryStream) CloseSend() error {
	if at := s.committed.Load(); at != nil {
		return at.stream.CloseSend()
	}
	s.mu.Lock()
	s.closed = true
	at := s.current
	if s.ended || s.recovering {
		s.mu.Unlock()
		return nil // who recovers will send it
	}
	s.busy++
	s.mu.Unlock()
	err := at.stream.CloseSend()
	s.mu.Lock()
	s.busy--
	s.unlock(at)
	if s.committed.Load() == at {
		return err
	}
	return nil // RecvMsg will learn of a failure
}

// RecvMsg implements grpc.ClientStream.
func (s *retryStream) RecvMsg(m any) error {
	for {
		if at := s.committed.Load(); at != nil {
			return s.receiveCommitted(at, m)
		}
		s.mu.Lock()
		for s.recovering {
			s.await()
		}
		if s.ended {
			defer s.mu.Unlock()
			return s.final
		}
		at := s.current
		if s.committed.Load() != nil {
			s.mu.Unlock()
			continue
		}
		if s.call.policy.hedges && s.closed && canHedge(m) {
			s.recovering = true
			s.unwatch(at)
			s.mu.Unlock()
			return s.race(at, m)
		}
		s.receiving++
		s.busy++
		s.mu.Unlock()
		if s.call.policy.hedges && !canHedge(m) {
			s.call.retrier.log.logNotHedged(s.call.ctx, s.call.method, s.call.policy, "no second message can be made of its type")
		}
		if done, err := s.received(at, m, at.stream.RecvMsg(m)); done {
			return err
		}
	}
}

func (s *retryStream) receiveCommitted(at *streamAttempt, m any) error {
	err := at.stream.RecvMsg(m)
	if err == nil && at.begun && s.desc.ServerStreams {
		return nil
	}
	return s.committedTo(at, m, err)
}

// committedTo is told what RecvMsg of a committed attempt returned, where that is an end
// or the first message. An attempt timeout is still on until then; it cannot be retried.
func (s *retryStream) committedTo(at *streamAttempt, m any, err error) error {
	if err == nil && !at.begun {
		at.begun = true
		if !at.settle() && s.desc.ServerStreams {
			err = at.discard(m)
		}
	}
	if err == nil && s.desc.ServerStreams {
		return nil
	}
	s.end(at, err)
	if err != nil && at.timedOut(err) {
		return &attemptTimeoutError{at.bounds.timeout}
	}
	return err
}

// received is told what RecvMsg of an uncommitted attempt returned. It is done unless
// there is another attempt to receive from.
func (s *retryStream) received(at *streamAttempt, m any, err error) (done bool, _ error) {
	inTime := at.settle() // before mu is held: it may wait for a verdict
	s.mu.Lock()
	s.receiving--
	s.busy--
	switch {
	case s.committed.Load() == at: // by another goroutine, meanwhile
		s.mu.Unlock()
		return true, s.committedTo(at, m, err)
	case s.ended:
		defer s.mu.Unlock()
		return true, s.final
	case s.recovering || s.current != at:
		s.mu.Unlock()
		return false, nil // of an attempt that was given up: nobody sees it
	case err == nil && !inTime && s.desc.ServerStreams: // a response without more is complete
		s.mu.Unlock()
		err = at.discard(m)
		s.mu.Lock()
		if !s.usable(at) { // committed, meanwhile
			s.mu.Unlock()
			return false, nil
		}
	case err == nil:
		at.begun = true
		s.commit(at)
		s.mu.Unlock()
		s.answered(at)
		if !s.desc.ServerStreams {
			s.end(at, nil)
		}
		return true, nil
	}
	final := s.recoverLocked(at, err, true)
	if isEOF(final) {
		s.answered(at)
	}
	return final != nil, final
}

// Header implements grpc.ClientStream. Having seen headers commits.
func (s *retryStream) Header() (metadata.MD, error) {
	for {
		if at := s.committed.Load(); at != nil {
			return at.stream.Header()
		}
		s.mu.Lock()
		s.settleRecovery(nil)
		if s.ended {
			s.mu.Unlock()
			return nil, nil // as gRPC has it: RecvMsg has the status
		}
		if s.committed.Load() != nil {
			s.mu.Unlock()
			continue
		}
		at := s.current
		s.busy++
		s.mu.Unlock()
		md, err := at.stream.Header()
		s.headed(at, md != nil && err == nil)
	}
}

// headed is told whether an uncommitted attempt has headers. If not, it has ended.
func (s *retryStream) headed(at *streamAttempt, headers bool) {
	s.mu.Lock()
	s.busy--
	headers = headers && !at.isCut()
	for !headers && s.receiving > 0 && s.usable(at) {
		s.await() // who receives is about to learn why, and to recover
	}
	if headers && s.usable(at) {
		s.commit(at)
	}
	if headers || !s.usable(at) {
		s.unlock(at)
		return
	}
	_ = s.recoverLocked(at, nil, true) // RecvMsg has the error
}

// usable needs mu. It says whether at is still the attempt that matters, and undecided.
func (s *retryStream) usable(at *streamAttempt) bool {
	return !s.ended && !s.recovering && s.current == at && s.committed.Load() == nil
}

// Context implements grpc.ClientStream. It commits.
func (s *retryStream) Context() context.Context {
	if at := s.commitCurrent(); at != nil {
		return at.stream.Context()
	}
	return s.call.ctx
}

// Trailer implements grpc.ClientStream. Before the end of the call there is none, and it
// commits.
func (s *retryStream) Trailer() metadata.MD {
	at := s.commitCurrent()
	s.mu.Lock()
	over := s.ended && at != nil && at.over
	s.mu.Unlock()
	if !over {
		return nil // gRPC's own must not be asked before the end
	}
	return at.stream.Trailer()
}

// commitCurrent binds the application to the attempt under way. At the end of the call
// that is the last one, or nil if that had no stream.
func (s *retryStream) commitCurrent() *streamAttempt {
	if at := s.committed.Load(); at != nil {
		return at
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.settleRecovery(nil)
	if !s.ended && s.committed.Load() == nil {
		s.commit(s.current)
	}
	return s.current
}

// settleRecovery needs mu, and gives it up meanwhile. It returns when no recovery is going on
// or to come, or when enough says so: an attempt that its timeout has cut is recovered from
// here, unless a goroutine is receiving and about to do that.
func (s *retryStream) settleRecovery(enough func() bool) {
	for enough == nil || !enough() {
		at := s.current
		switch {
		case s.recovering:
			s.await()
		case !s.usable(at) || !at.isCut():
			return
		case s.receiving > 0:
			s.await()
		default:
			_ = s.recoverLocked(at, nil, true) // RecvMsg has the error
			s.mu.Lock()
		}
	}
}

// overdue is what the timer of an attempt timeout runs.
func (s *retryStream) overdue(a *attempt) {
	if racing := s.judgeOverdue(a); racing != nil {
		racing.overdue(a)
	}
}

// judgeOverdue asks the plan about an attempt that has reached its timeout, unless attempts are
// racing: then that is the race's to do.
func (s *retryStream) judgeOverdue(a *attempt) (racing *hedging) {
	a.bounds.judge()
	defer a.bounds.judged()
	s.mu.Lock()
	racing = s.racing
	committed := s.ended || s.committed.Load() != nil
	s.mu.Unlock()
	if racing != nil {
		return racing
	}
	_, limited := s.call.ctx.Deadline()
	a.judgeOverdueLocked(committed, func() bool {
		s.mu.Lock()
		defer s.mu.Unlock()
		nowCommitted := s.ended || s.committed.Load() != nil
		if nowCommitted && limited {
			return false
		}
		return a.tryCut() && nowCommitted == committed
	})
	return nil
}

// commit needs mu. From now on at is the application's stream.
func (s *retryStream) commit(at *streamAttempt) {
	at.fate = committed
	s.buffer, s.size = nil, 0
	s.committed.Store(at)
	s.notify()
	if at.over { // gRPC has told us already, and will not again
		s.watch(at)
	}
}

// watch needs mu. An attempt that gRPC has ended ends the call with the caller's context,
// unless the application comes back and finds out.
func (s *retryStream) watch(at *streamAttempt) {
	if err := at.overErr; at.unwatch == nil {
		at.unwatch = context.AfterFunc(s.call.ctx, func() { s.finished(at, err) })
	}
}

// unwatch needs mu.
func (s *retryStream) unwatch(at *streamAttempt) {
	if at.unwatch != nil {
		at.unwatch()
		at.unwatch = nil
	}
}

// await needs mu. It gives mu up until something has changed.
func (s *retryStream) await() {
	if s.changed == nil {
		s.changed = make(chan struct{})
	}
	changed := s.changed
	s.mu.Unlock()
	<-changed
	s.mu.Lock()
}

// notify needs mu.
func (s *retryStream) notify() {
	if s.changed != nil {
		close(s.changed)
		s.changed = nil
	}
}

// recoverLocked needs mu, and a usable attempt that has failed with err; nil if that is
// to be found out; application says that this is a goroutine of the application. It gives mu up. It returns nil if the stream goes on, else what
// RecvMsg returns from now on.
func (s *retryStream) recoverLocked(at *streamAttempt, err error, application bool) error {
	s.recovering = true
	s.unwatch(at)
	s.mu.Unlock()
	done := false
	defer func() {
		if !done { // a classifier or observer panics: let nobody wait for us
			s.call.plan().Leave()
			s.conclude(at, status.Error(codes.Internal, "grpcretry: panic while retrying"))
			at.release()
			s.call.options.finish(s.final)
		}
	}()
	if at.settle(); application {
		at.repanic(func() { s.call.deposit(at.attempt, Ignored) })
	}
	final := s.recovery(at, err)
	done = true
	return final
}

func (s *retryStream) recovery(at *streamAttempt, err error) error {
	if err == nil {
		if err = at.status(); err == nil {
			s.publish(at) // RecvMsg will learn more
			return nil
		}
	}
	for {
		a, final := s.next(at, err)
		if a == nil {
			s.conclude(at, final)
			return final
		}
		if at, err = s.open(a); err == nil {
			if err = s.replay(at); err == nil {
				return nil
			}
		}
	}
}

// next asks the call about an attempt that ended with err. The end of a stream without
// a failure is io.EOF.
func (s *retryStream) next(at *streamAttempt, err error) (*attempt, error) {
	at.settle()
	s.mu.Lock()
	over := at.over
	s.mu.Unlock()
	at.read(&s.call, err, over)
	s.call.show(at.attempt)
	if isEOF(err) {
		a, _ := s.call.next(at.attempt, nil)
		return a, io.EOF
	}
	return s.call.next(at.attempt, err)
}

// conclude ends a call whose last attempt was at.
func (s *retryStream) conclude(at *streamAttempt, final error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.ended, s.told, s.final, s.recovering = true, true, final, false
	s.buffer, s.size = nil, 0
	s.current = at
	if at.stream == nil {
		s.current = nil
	}
	s.notify()
}

// replay sends what the application has sent so far, then makes at the attempt to go on
// with. It fails if at does.
func (s *retryStream) replay(at *streamAttempt) error {
	closed := false
	for sent := 0; ; {
		s.mu.Lock()
		if sent == len(s.buffer) && closed == s.closed {
			s.publishLocked(at)
			return nil
		}
		if sent == len(s.buffer) {
			s.mu.Unlock()
			closed = true
			if err := at.stream.CloseSend(); err != nil && !isEOF(err) {
				return err
			}
			continue
		}
		m := s.buffer[sent]
		sent++
		s.mu.Unlock()
		err := at.stream.SendMsg(m)
		if isEOF(err) {
			if err = at.status(); err == nil {
				s.publish(at) // RecvMsg will learn more
				return nil
			}
		}
		if err != nil {
			return err
		}
	}
}

// publish makes at the attempt that the application uses.
func (s *retryStream) publish(at *streamAttempt) {
	s.mu.Lock()
	s.publishLocked(at)
}

// publishLocked needs mu, and gives it up.
func (s *retryStream) publishLocked(at *streamAttempt) {
	s.current, s.recovering = at, false
	s.notify()
	s.unlock(at)
}

// unlock gives mu up, and sees to an attempt that gRPC has ended meanwhile.
func (s *retryStream) unlock(at *streamAttempt) {
	over, err := at.over && s.busy == 0 && s.usable(at), at.overErr
	s.mu.Unlock()
	if over {
		s.finished(at, err)
	}
}

// finished is called when gRPC has ended an attempt, on whatever goroutine. Mostly the
// application is about to learn of it from a method of ours. But it may have abandoned
// the stream: then the call ends here.
func (s *retryStream) finished(at *streamAttempt, err error) {
	s.mu.Lock()
	at.over, at.overErr = true, err
	if s.committed.Load() == at {
		s.mu.Unlock()
		s.end(at, err)
		return
	}
	switch {
	case err == nil || s.busy > 0 || !s.usable(at):
		s.mu.Unlock()
	case s.call.ctx.Err() != nil || s.call.closed():
		_ = s.recoverLocked(at, err, false) // a call that is abandoned is not retried
	default:
		s.watch(at) // it timed out while the application was elsewhere
		s.mu.Unlock()
	}
}

// end ends a committed call. gRPC tells of that first, or the method that sees it.
func (s *retryStream) end(at *streamAttempt, err error) {
	s.mu.Lock()
	if s.ended {
		for !s.told { // what the application sees comes after OnFinish and the last event
			s.await()
		}
		s.mu.Unlock()
		return
	}
	s.unwatch(at)
	s.ended, s.final = true, err
	if err == nil {
		s.final = io.EOF
	}
	s.mu.Unlock()
	_, _ = s.next(at, s.final) // the application has the error already
	s.mu.Lock()
	s.told = true
	s.notify()
	s.mu.Unlock()
}

// status is why an attempt has ended. It is nil if the attempt had headers: then there
// may be a message, which is the application's to take.
func (at *streamAttempt) status() error {
	if at.isCut() {
		return status.FromContextError(context.Canceled).Err()
	}
	if md, _ := at.stream.Header(); md != nil {
		return nil
	}
	if err := at.Err(); err != nil { // then there might be a message all the same
		return status.FromContextError(err).Err()
	}
	return at.stream.RecvMsg(new(emptypb.Empty)) // is not written to
}

// discard ends an attempt whose first message came with the attempt timeout. It reads to
// the end, into the message of the application, which nobody has seen yet, so that gRPC
// is done with the attempt.
func (at *streamAttempt) discard(m any) error {
	at.bounds.cancel(ErrAttemptTimeout)
	for at.stream.RecvMsg(m) == nil {
		continue
	}
	return status.FromContextError(context.Canceled).Err()
}

// isEOF: gRPC's end of a stream is io.EOF itself. One wrapped by an interceptor below is
// a failure.
func isEOF(err error) bool {
	return err == io.EOF //nolint:errorlint // identity is the contract
}

// read fills in what gRPC knows of an attempt that has ended with err; over says that
// gRPC has said so.
func (at *streamAttempt) read(c *call, err error, over bool) {
	if at.stream == nil || isEOF(err) && !c.observed() && c.spans == nil && !c.options.targets {
		return
	}
	// An interceptor below may have failed an attempt that gRPC knows to be alive: without
	// this, its headers would be waited for.
	at.release()
	if over { // else gRPC may still write to them, and the failure is not the server's
		at.trailer, at.peer = at.stream.Trailer(), at.reached
	}
	if c.wantsHeader() || c.options.header != nil {
		at.header, _ = at.stream.Header()
	}
}
