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
		return running.info, true
	}
	return Attempt{}, false
}

type attemptKey struct{}

// An attempt is one try under way, and the context that it runs in: the two live as
// long as each other, so one allocation serves both.
type attempt struct {
	context.Context // the caller's, with the attempt's timeout and metadata if it has any

	info      Attempt // never changed after the start: others may read it through the context
	limited   bool    // it has a timeout of its own
	committed bool    // of a stream: the application is bound to it

	// Of a unary attempt with a timeout.
	cancel  context.CancelFunc
	expires time.Time // when the timeout ends it

	// Of a stream.
	cancelCause context.CancelCauseFunc
	timer       *time.Timer // until the timeout, nil without one

	// What gRPC fills in before it returns.
	header  metadata.MD
	trailer metadata.MD
	peer    peer.Peer
}

// Value makes the attempt known to what runs below, see [AttemptFromContext].
func (a *attempt) Value(key any) any {
	if key == (attemptKey{}) {
		return a
	}
	return a.Context.Value(key)
}

// limit gives a unary attempt a timeout of its own, told from others by its cause.
func (a *attempt) limit(timeout time.Duration) {
	a.limited = true
	a.expires = a.info.Start.Add(timeout)
	a.Context, a.cancel = context.WithDeadlineCause(a.Context, a.expires, ErrAttemptTimeout)
}

// limitStart gives the attempt of a stream a context of its own, and a timeout that can
// be lifted when the stream has begun; 0 for none.
func (a *attempt) limitStart(timeout time.Duration) {
	a.Context, a.cancelCause = context.WithCancelCause(a.Context)
	if timeout > 0 {
		a.limited = true
		a.timer = time.AfterFunc(timeout, a.expire)
	}
}

func (a *attempt) expire() { a.cancelCause(ErrAttemptTimeout) }

// inTime lifts the timeout. It is false if that has already ended the attempt.
func (a *attempt) inTime() bool { return a.timer == nil || a.timer.Stop() }

// release ends the attempt's context, if it has one of its own.
func (a *attempt) release() {
	if a.timer != nil {
		a.timer.Stop()
	}
	if a.cancel != nil {
		a.cancel()
	}
	if a.cancelCause != nil {
		a.cancelCause(nil)
	}
}

// timedOut says whether our attempt timeout ended the attempt with err, rather than
// the caller's context or the server's word. The cause tells, not the status code; but
// only these two codes can come from a context.
func (a *attempt) timedOut(err error, now time.Time) bool {
	if code := status.Code(err); !a.limited || code != codes.DeadlineExceeded && code != codes.Canceled {
		return false
	}
	if errors.Is(context.Cause(a.Context), ErrAttemptTimeout) {
		return true
	}
	// At the very moment of the deadline gRPC may be told before the context is.
	return !a.expires.IsZero() && a.Context.Err() == nil && !now.Before(a.expires)
}

// ended is the attempt as it is known after it failed with err.
func (a *attempt) ended(err error, now time.Time) Attempt {
	info := a.info
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
