package grpcretry

import (
	"context"
	"errors"
	"net"
	"strconv"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"
)

// An Attempt is one try of a call. Observers, classifiers and [Error] get it with all
// that is known when they get it; [AttemptFromContext] gets it before it has run, so
// with Method, Number, Hedge, Start, Wait and WaitSource only.
type Attempt struct {
	Method     string        // "/pkg.Service/Method"
	Number     int           // 1 for the first attempt of a call
	Hedge      bool          // sent while an earlier attempt was still open
	Start      time.Time     // when it was handed to gRPC
	Duration   time.Duration // from Start to its end
	Err        error         // how it failed, nil if it did not; see ErrAttemptTimeout
	Header     metadata.MD   // of the response; see WithObserver for when it is filled
	Trailer    metadata.MD   // of the response
	Peer       net.Addr      // the server it reached, nil if it reached none
	Wait       time.Duration // the wait before it, as decided
	WaitSource WaitSource    // where Wait came from
}

// Code is the status code of Err: codes.OK for nil, codes.Unknown for an error that
// is no gRPC status.
func (a Attempt) Code() codes.Code { return status.Code(a.Err) }

// AttemptFromContext returns the attempt that ctx belongs to; ok is false outside of
// one. It works below the interceptor on the client: in interceptors chained after
// it, in stats handlers, per-RPC credentials and load-balancing policies.
func AttemptFromContext(ctx context.Context) (a Attempt, ok bool) {
	if running, ok := ctx.Value(attemptKey{}).(*attempt); ok {
		return running.begun(), true
	}
	return Attempt{}, false
}

type attemptKey struct{}

// An attempt is one try under way, and the context that it runs in: the two live as
// long as each other, so one allocation serves both. It is kept small, as the first of
// each call is made whatever comes of it.
type attempt struct {
	context.Context // the caller's, with the attempt's timeout and metadata if it has any

	// Never changed after the start: others may read it through the context.
	call   *call
	start  time.Time
	wait   time.Duration
	number int
	source WaitSource

	hedge     bool    // sent while others were under way
	committed bool    // of a stream: the application is bound to it
	bounds    *bounds // nil for the attempt of a unary call without a timeout

	// What gRPC fills in before it returns.
	header  metadata.MD
	trailer metadata.MD
	peer    peer.Peer
}

// bounds end the context of an attempt before the caller's.
type bounds struct {
	cancel  context.CancelCauseFunc
	timeout time.Duration // 0 for none
	timer   *time.Timer   // until the timeout; nil without one
	expires time.Time     // when the timeout ends it, where gRPC is told; else zero

	received any // what an attempt of a hedged call has received, until it is known to win
}

// Value makes the attempt known to what runs below, see [AttemptFromContext].
func (a *attempt) Value(key any) any {
	if key == (attemptKey{}) {
		return a
	}
	return a.Context.Value(key)
}

// bound gives the attempt a context of its own and, unless timeout is 0, a timeout, told
// from other ends by its cause. It is a timer, not a deadline of the context, so that it
// can be lifted: when a stream has begun, and for a call that turns out to be left to gRPC.
func (a *attempt) bound(timeout time.Duration) {
	ctx, cancel := context.WithCancelCause(a.Context)
	a.Context = ctx
	a.bounds = &bounds{cancel: cancel, timeout: timeout}
	if timeout > 0 {
		a.bounds.timer = time.AfterFunc(timeout, a.expire)
	}
}

func (a *attempt) expire() {
	if a.number > 1 || !a.call.leftToGRPC() {
		a.bounds.cancel(ErrAttemptTimeout)
	}
}

// announce lets gRPC tell the server of the timeout, as of any deadline.
func (a *attempt) announce() { a.bounds.expires = a.start.Add(a.bounds.timeout) }

// Deadline is the caller's, or that of the attempt if it is announced and earlier.
func (a *attempt) Deadline() (time.Time, bool) {
	deadline, ok := a.Context.Deadline()
	if a.bounds == nil || a.bounds.expires.IsZero() || ok && deadline.Before(a.bounds.expires) {
		return deadline, ok
	}
	return a.bounds.expires, true
}

// inTime lifts the timeout. It is false if that has already ended the attempt.
func (a *attempt) inTime() bool { return a.bounds.timer == nil || a.bounds.timer.Stop() }

// release ends the attempt's context, if it has one of its own.
func (a *attempt) release() {
	if a.bounds == nil {
		return
	}
	if a.bounds.timer != nil {
		a.bounds.timer.Stop()
	}
	a.bounds.cancel(nil)
}

// timedOut says whether our attempt timeout ended the attempt with err, rather than
// the caller's context or the server's word. The cause tells, not the status code.
func (a *attempt) timedOut(err error, now time.Time) bool {
	if a.bounds == nil || a.bounds.timeout == 0 || !isContextEnd(err) {
		return false
	}
	if errors.Is(context.Cause(a.Context), ErrAttemptTimeout) {
		return true
	}
	// At the very moment of the deadline gRPC may be told before the context is.
	return !a.bounds.expires.IsZero() && a.Context.Err() == nil && !now.Before(a.bounds.expires)
}

// isContextEnd says whether err can be the end of a context: as a status, or bare, as
// interceptors below may return it.
func isContextEnd(err error) bool {
	code := status.Code(err)
	return code == codes.Canceled || code == codes.DeadlineExceeded ||
		errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded)
}

// begun is the attempt as it is known from its start on.
func (a *attempt) begun() Attempt {
	return Attempt{
		Method:     a.call.method,
		Number:     a.number,
		Hedge:      a.hedge,
		Start:      a.start,
		Wait:       a.wait,
		WaitSource: a.source,
	}
}

// ended is the attempt as it is known after it ended with err.
func (a *attempt) ended(err error, now time.Time) Attempt {
	info := a.begun()
	info.Duration = now.Sub(info.Start)
	info.Err = err
	info.Header = a.header
	info.Trailer = a.trailer
	info.Peer = a.peer.Addr
	return info
}

// withPreviousAttempts sets the header that tells the server how many attempts were
// made before (gRFC A6 #exposed-retry-metadata). It replaces what the caller put
// there: repeated values would tell nothing.
func withPreviousAttempts(ctx context.Context, previous int) context.Context {
	value := strconv.Itoa(previous)
	md, ok := metadata.FromOutgoingContext(ctx) // a copy, fresh for each attempt
	if !ok {
		return metadata.NewOutgoingContext(ctx, metadata.MD{previousAttemptsKey: {value}})
	}
	md[previousAttemptsKey] = []string{value}
	return metadata.NewOutgoingContext(ctx, md)
}
