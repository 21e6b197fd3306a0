package grpcretry

import (
	"context"
	"errors"
	"net"
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/connectivity"
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
	Wait       time.Duration // the wait before it, as decided; if it was for a connection, all of it
	WaitSource WaitSource    // where Wait came from
	Unsent     bool          // it reached no server, see WithConnectWait

	late bool // it ended after the attempt timeout, because no retry could take its place
}

// Code is the status code of Err: codes.OK for nil, codes.Unknown for an error that
// is no gRPC status.
func (a Attempt) Code() codes.Code { return status.Code(a.Err) }

// AttemptFromContext returns the attempt that ctx belongs to; ok is false outside of
// one. It works below the interceptor on the client: in interceptors chained after
// it, in stats handlers, per-RPC credentials and load-balancing policies.
func AttemptFromContext(ctx context.Context) (a Attempt, ok bool) {
	if running, ok := ctx.Value(attemptKey{}).(*attempt); ok {
		return running.begun(time.Now()), true
	}
	return Attempt{}, false
}

type attemptKey struct{}

// An attempt is one try under way, the context that it runs in, and its options for gRPC.
// They live as long as each other, so one allocation serves all; it is all that a call
// allocates whose first attempt succeeds, so it is kept small.
type attempt struct {
	context.Context // the caller's; for a retry, without the caller's word on previous attempts

	// An *attempt among the options of a call asks gRPC for the peer, and marks the call
	// as an attempt of ours.
	grpc.PeerCallOption

	// Never changed after the start: others may read it through the context.
	cc     *grpc.ClientConn
	method string
	start  time.Duration // since the origin
	wait   time.Duration
	number int32
	source shortSource

	hedge     bool // sent while others were in flight
	reported  bool // the plan, or else the budgets, know how it ended
	collected bool // header and trailer are the caller's, and were taken over
	fate      fate
	bounds    *bounds // nil for the attempt of a unary call without a timeout

	fresh bool         // the channel had no connection at the start, and perhaps no service config
	asked atomic.Int64 // of a fresh channel, when the deadline was first asked for with the config there, since the origin

	// What gRPC fills in before it returns.
	header  metadata.MD
	trailer metadata.MD
	peer    peer.Peer

	room [4]grpc.CallOption // for the options, where they fit
}

// A fate is what has become of an attempt, as far as that rules out other things.
type fate uint8

const (
	fateCommitted fate = iota + 1 // the application is bound to its stream
	fateUnsent                    // it has ended and certainly reached no server
)

// origin is where the starts of attempts are counted from: that takes the monotonic clock
// alone, which is read in little more than half the time of time.Now.
var origin = time.Now()

func sinceOrigin() time.Duration { return time.Since(origin) }

// timeOf is the time that was d after the origin, by the wall clock of now.
func timeOf(d time.Duration, now time.Time) time.Time { return now.Add(d - now.Sub(origin)) }

// Value makes the attempt known to what runs below, see [AttemptFromContext].
func (a *attempt) Value(key any) any {
	if key == (attemptKey{}) {
		return a
	}
	if a.bounds != nil {
		return a.bounds.parent(a.Context).Value(key)
	}
	return a.Context.Value(key)
}

// Done is closed with the caller's context or, where the attempt has bounds, before.
func (a *attempt) Done() <-chan struct{} {
	if a.bounds != nil {
		return a.bounds.context(a.Context).Done()
	}
	return a.Context.Done()
}

// Err is not nil when Done is closed.
func (a *attempt) Err() error {
	if a.bounds != nil {
		return a.bounds.parent(a.Context).Err()
	}
	return a.Context.Err()
}

// A shortSource is a [WaitSource] that takes no room beside other small fields.
type shortSource uint8

// bounds end an attempt before the caller's context does. The context that does so is
// made when somebody asks for Done: an attempt that is answered without gRPC, and that is
// half of what a hedged call pays for its bounds, needs none.
type bounds struct {
	timeout time.Duration // 0 for none
	timer   *time.Timer   // until the timeout; nil without one
	limit   time.Time     // the end of the call's timeout by the service config; zero without one
	retrier *Retrier      // to decide at the timeout, with plan; nil without one
	plan    *plan         // used by the timer until the attempt is settled, with judging taken

	received any // what an attempt of a hedged call has received, until it is known to win

	// judging holds a token while the timer uses the plan; nobody else waits for that but the
	// call. It is no Mutex because callbacks run meanwhile, which may wait for the time of a
	// testing/synctest bubble. nil without a timer.
	judging  chan struct{}
	panicked any // guarded by judging; what a callback of the timer panicked with

	mu      sync.Mutex
	ctx     context.Context // guarded by mu; nil until it is needed
	stop    context.CancelCauseFunc
	ended   bool // guarded by mu; cancelled because of cause
	cause   error
	settled bool // guarded by mu; the attempt has ended, or its first message has come
	renewed bool // guarded by mu; the timeout has started anew
	cut     bool // guarded by mu; the timeout has ended it before it was settled
	late    bool // guarded by mu; it was settled after the timeout
}

// context is the attempt's own, below the caller's.
func (b *bounds) context(callers context.Context) context.Context {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.ctx == nil {
		b.ctx, b.stop = withLimit(callers, b.limit)
		if b.ended {
			b.stop(b.cause)
		}
	}
	return b.ctx
}

// parent is where to look up values and the end: the attempt's own context, or the
// caller's as long as that says the same.
func (b *bounds) parent(callers context.Context) context.Context {
	b.mu.Lock()
	same := b.ctx == nil && !b.ended && b.limit.IsZero()
	b.mu.Unlock()
	if same {
		return callers
	}
	return b.context(callers)
}

// cancel ends the attempt because of cause, nil for context.Canceled.
func (b *bounds) cancel(cause error) {
	b.mu.Lock()
	if !b.ended {
		b.ended, b.cause = true, cause
	}
	stop := b.stop
	b.mu.Unlock()
	if stop != nil {
		stop(cause)
	}
}

// expire starts the timer of the attempt timeout. It is a timer, not a deadline of the
// context, because the attempt may be allowed to run on when it has fired. Nor is the server
// told of it: its deadline is the caller's.
func (a *attempt) expire(overdue func(*attempt)) {
	if overdue == nil {
		overdue = (*attempt).judgeOverdue
	}
	a.bounds.judging = make(chan struct{}, 1)
	a.bounds.timer = time.AfterFunc(a.bounds.timeout, func() { overdue(a) })
}

// judgeOverdue asks the plan, on the timer's goroutine, whether the attempt is to be cut. The
// call's own goroutine is in gRPC meanwhile; when it returns from there, settle waits.
func (a *attempt) judgeOverdue() {
	a.bounds.judge()
	defer a.bounds.judged()
	a.judgeOverdueLocked(false, a.tryCut)
}

// judge waits until nobody else uses the plan; judged ends that.
func (b *bounds) judge() {
	if b.judging != nil {
		b.judging <- struct{}{}
	}
}

func (b *bounds) judged() {
	if b.judging != nil {
		<-b.judging
	}
}

// judgeOverdueLocked needs judging. It asks the plan, and cuts the attempt with cut, which
// returns false if the application has become bound to the attempt meanwhile.
func (a *attempt) judgeOverdueLocked(committed bool, cut func() bool) {
	b := a.bounds
	if b.isSettled() || b.retrier.leavesToGRPC(a.cc, a.method) {
		return
	}
	done := false
	defer func() {
		if b.panicked = recover(); b.panicked == nil && !done {
			b.panicked = exited{}
		}
		if b.panicked != nil {
			cut() // the call's goroutine panics, or ends
		}
	}()
	now := time.Now()
	if a.number == 1 {
		b.plan.limit(a, now)
	}
	f := a.overdueFailure(now)
	f.Committed = f.Committed || committed
	if step := b.plan.overdue(a.Context, &f, now, b.retrier.random()); step.Cut && !cut() {
		b.plan.leave()
	}
	done = true
}

// exited stands for a panic of a callback that called [runtime.Goexit].
type exited struct{}

// overdueFailure is what is known of an attempt that has reached its timeout. Whether headers
// have come is not known, so a policy for which they commit takes them as there.
func (a *attempt) overdueFailure(now time.Time) failure {
	info := a.begun(now)
	info.Duration = now.Sub(origin) - a.start
	info.Err = newAttemptTimeoutError(a.bounds.timeout, nil)
	return failure{
		Attempt:   info,
		CtxErr:    a.bounds.plan.gone(a.Context, now),
		Closed:    isClosed(a.cc),
		Unsent:    isUnconnected(a.cc),
		Committed: a.bounds.plan.policy.CommitOnHeaders,
	}
}

// tryCut ends the attempt because of its timeout, unless it is settled.
func (a *attempt) tryCut() bool {
	b := a.bounds
	b.mu.Lock()
	cut := !b.settled
	b.cut = b.cut || cut
	b.mu.Unlock()
	if cut {
		b.cancel(ErrAttemptTimeout)
	}
	return cut
}

// settle lifts the timeout. It returns false if that has already ended the attempt.
func (a *attempt) settle() bool {
	b := a.bounds
	if b == nil || b.timeout == 0 {
		return true
	}
	if b.timer != nil {
		b.timer.Stop()
	}
	b.judge()
	defer b.judged()
	b.mu.Lock()
	defer b.mu.Unlock()
	if !b.settled {
		b.settled, b.late = true, !b.renewed && sinceOrigin()-a.start >= b.timeout
	}
	return !b.cut
}

// renew starts the timeout anew.
func (a *attempt) renew() {
	b := a.bounds
	b.mu.Lock()
	defer b.mu.Unlock()
	if !b.settled {
		b.renewed = true
		b.timer.Reset(b.timeout)
	}
}

// repanic panics with what a callback of the timer panicked with, or ends the goroutine as that did,
// after report. It is for the goroutines of the caller: on any other, the panic would end the
// program.
func (a *attempt) repanic(report func()) {
	if a.bounds == nil || a.bounds.judging == nil {
		return
	}
	a.bounds.judge()
	p := a.bounds.panicked
	a.bounds.panicked = nil
	a.bounds.judged()
	if p != nil {
		report()
		if _, ends := p.(exited); ends {
			runtime.Goexit()
		}
		panic(p) //nolint:forbidigo // it is the classifier's or the budget's, and the caller's to handle
	}
}

// settleVerdict waits for a verdict of the timer that is under way.
func (a *attempt) settleVerdict() {
	a.bounds.judge()
	a.bounds.judged()
}

func (b *bounds) isSettled() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.settled
}

// isCut reports whether the timeout has ended the attempt.
func (a *attempt) isCut() bool {
	if a.bounds == nil || a.bounds.timer == nil {
		return false
	}
	a.bounds.mu.Lock()
	defer a.bounds.mu.Unlock()
	return a.bounds.cut
}

// isLate reports whether the attempt has run for longer than the attempt timeout.
func (a *attempt) isLate() bool {
	if a.bounds == nil || a.bounds.timeout == 0 {
		return false
	}
	a.bounds.mu.Lock()
	defer a.bounds.mu.Unlock()
	return a.bounds.late
}

// Deadline is the caller's, or the end of the call's timeout by the service config. gRPC asks
// for it when it starts such a timeout for a first attempt; interceptors below may ask again later.
func (a *attempt) Deadline() (time.Time, bool) {
	if a.fresh && a.asked.Load() == 0 && a.cc.GetMethodConfig(a.method).Timeout != nil {
		a.asked.CompareAndSwap(0, int64(sinceOrigin()))
	}
	if a.bounds != nil && !a.bounds.limit.IsZero() {
		return a.bounds.limit, true
	}
	return a.Context.Deadline()
}

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

// timedOut reports whether our attempt timeout ended the attempt with err, rather than the
// caller's context or the server. An error that is no status is an interceptor's, and hides
// what ended the attempt.
func (a *attempt) timedOut(err error) bool {
	if !a.isCut() {
		return false
	}
	_, isStatus := status.FromError(err)
	return isContextEnd(err) || !isStatus
}

// checkUnsent remembers, as soon as gRPC has returned err, whether the attempt certainly reached
// no server: it failed with UNAVAILABLE, or was cut while it waited in gRPC; gRPC opened no
// stream for it (only then is its peer unknown), and the channel has no connection that it could
// have been opened on.
//
// An attempt that fails like that on a channel that is READY, or IDLE, was not failed by gRPC's
// lack of a connection: gRPC wakes an idle channel and waits. It may have been per-RPC
// credentials, an interceptor or a load-balancing policy, and counts like any other.
func (a *attempt) checkUnsent(err error) {
	unknown := a.peer.Addr == nil && a.peer.LocalAddr == nil && a.peer.AuthInfo == nil
	failed := status.Code(err) == codes.Unavailable || isContextEnd(err) && a.isCut()
	if unknown && failed && isUnconnected(a.cc) {
		a.fate = fateUnsent
	}
}

// isUnconnected reports whether a channel has no connection and tries to get one.
func isUnconnected(cc *grpc.ClientConn) bool {
	if cc == nil {
		return false
	}
	state := cc.GetState()
	return state == connectivity.Connecting || state == connectivity.TransientFailure
}

// isContextEnd says whether err can be the end of a context: as a status, or bare, as
// interceptors below may return it.
func isContextEnd(err error) bool {
	code := status.Code(err)
	return code == codes.Canceled || code == codes.DeadlineExceeded ||
		errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded)
}

// begun is the attempt as it is known from its start on.
func (a *attempt) begun(now time.Time) Attempt {
	return Attempt{
		Method:     a.method,
		Number:     int(a.number),
		Hedge:      a.hedge,
		Start:      timeOf(a.start, now),
		Wait:       a.wait,
		WaitSource: WaitSource(a.source),
	}
}

// ended is the attempt as it is known after it ended with err.
func (a *attempt) ended(err error, now time.Time) Attempt {
	took := now.Sub(origin) - a.start
	return Attempt{
		Method:     a.method,
		Number:     int(a.number),
		Hedge:      a.hedge,
		Start:      now.Add(-took),
		Duration:   took,
		Err:        err,
		Header:     a.header,
		Trailer:    a.trailer,
		Peer:       a.peer.Addr,
		Wait:       a.wait,
		WaitSource: WaitSource(a.source),
		late:       a.isLate() && !a.isCut(),
	}
}
