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
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"

	"github.com/grpcretry/grpcretry/internal/tried"
)

// An Attempt is one try of a call. For observers, classifiers and [Error] it holds all that is
// known at that time; [AttemptFromContext] returns it before it has run, so with Method, Number,
// Hedge, Start, Wait and WaitSource only.
type Attempt struct {
	Method     string        // "/pkg.Service/Method"
	Number     int           // 1 for the first attempt of a call
	Hedge      bool          // sent while an earlier attempt was still in flight
	Start      time.Time     // when it was handed to gRPC
	Duration   time.Duration // from Start to its end
	Err        error         // the failure, nil after a success; see ErrAttemptTimeout
	Header     metadata.MD   // of the response; see WithObserver for when it is filled
	Trailer    metadata.MD   // of the response
	Peer       net.Addr      // the server it reached, nil if it reached none
	Wait       time.Duration // the wait before it, as decided; if it was for a connection, all of it
	WaitSource WaitSource    // the origin of Wait
	Unsent     bool          // it reached no server, see WithConnectWait

	late bool // it ended after the attempt timeout, because no retry could replace it
}

// Code returns the status code of Err: codes.OK for nil, codes.Unknown for an error that is not a
// gRPC status.
func (a Attempt) Code() codes.Code { return status.Code(a.Err) }

// AttemptFromContext returns the attempt that ctx belongs to; ok is false if there is none. It
// works on the client below the interceptor: in interceptors chained after it, in stats handlers,
// per-RPC credentials and load-balancing policies; and in a function that [Retrier.Do] calls. Below a
// call that passes through, it returns the attempt of a call around that, if there is one.
func AttemptFromContext(ctx context.Context) (a Attempt, ok bool) {
	if running, ok := ctx.Value(attemptKey{}).(*attempt); ok {
		return running.asStarted(time.Now()), true
	}
	return Attempt{}, false
}

type attemptKey struct{}

// An attempt is one try in flight, the context that it runs in, and its options for gRPC. They
// share a lifetime, so they share an allocation. A call whose first attempt succeeds makes no other
// allocation, so an attempt is kept small.
type attempt struct {
	context.Context // the caller's; for a retry, without the caller's own count of previous attempts

	// An *attempt among the options of a call asks gRPC for the peer, and marks the call
	// as an attempt of ours.
	grpc.PeerCallOption

	// These never change after the start: other goroutines may read them through the context.
	cc     *grpc.ClientConn
	method string
	start  time.Duration // since the origin
	wait   time.Duration
	number int32
	source smallSource

	hedge     bool // sent while others were in flight
	reported  bool // its result was reported to the plan or, without one, to the budgets
	collected bool // header and trailer are the caller's, and were copied
	fate      fate
	fresh     bool // the channel had no connection at the start, and perhaps no service config
	sighting  sighting
	bounds    *bounds // nil for a unary call's attempt without a timeout

	extras atomic.Pointer[extras] // nil until something needs them

	// Filled in by gRPC before it returns.
	header  metadata.MD
	trailer metadata.MD
	peer    peer.Peer

	optionSpace [4]grpc.CallOption // holds the options if they fit
}

// The extras are what few calls need. All attempts of a call have the same, see newAttempt.
type extras struct {
	tried tried.List   // the endpoints that the call has tried
	asked atomic.Int64 // on a fresh channel with a config, when gRPC first asked for the deadline, since the origin
}

// ownExtras returns the attempt's extras. Goroutines that ask at the same time get the same.
func (a *attempt) ownExtras() *extras {
	if a.extras.Load() == nil {
		a.extras.CompareAndSwap(nil, &extras{})
	}
	return a.extras.Load()
}

// A fate is what has happened to an attempt, as far as that rules out something else.
type fate uint8

const (
	fateCommitted fate = iota + 1 // the application is bound to its stream
	fateUnsent                    // it has ended and certainly reached no server
)

// origin is the time from which starts of attempts are counted: that needs only the monotonic
// clock, which is read in little more than half the time of time.Now.
var origin = time.Now()

func sinceOrigin() time.Duration { return time.Since(origin) }

// timeOf returns the time d after the origin, by the wall clock of now.
func timeOf(d time.Duration, now time.Time) time.Time { return now.Add(d - now.Sub(origin)) }

// Value makes the attempt known to everything that runs below, see [AttemptFromContext], and to the
// load-balancing policy of package balancer.
func (a *attempt) Value(key any) any {
	if key == (attemptKey{}) || key == (tried.Key{}) {
		return a
	}
	if a.bounds != nil {
		return a.bounds.parent(a.Context).Value(key)
	}
	return a.Context.Value(key)
}

// Tried implements [tried.Attempt]. A call of another method has the attempt's context because it is
// made within the attempt, by an interceptor for example.
func (a *attempt) Tried(method string) *tried.List {
	if method != a.method {
		return nil
	}
	return &a.ownExtras().tried
}

// Done returns a channel that is closed with the caller's context or, if the attempt has bounds,
// possibly before.
func (a *attempt) Done() <-chan struct{} {
	if a.bounds != nil {
		return a.bounds.context(a.Context).Done()
	}
	return a.Context.Done()
}

// Err returns a non-nil error when Done is closed.
func (a *attempt) Err() error {
	if a.bounds != nil {
		return a.bounds.parent(a.Context).Err()
	}
	return a.Context.Err()
}

// A smallSource is a [WaitSource] in one byte, which fits beside other small fields.
type smallSource uint8

// bounds end an attempt before the caller's context does. The context for that is made when Done is
// first called: an attempt that succeeds without gRPC needs none, and the context is half the cost
// of a hedged call's bounds.
type bounds struct {
	timeout time.Duration // 0 for none
	timer   *time.Timer   // until the timeout; nil without one
	limit   time.Time     // the end of the service config's timeout for the call; zero without one
	isLast  func() bool   // reports that no attempt can follow this one; nil if one always can
	retrier *Retrier      // for the decision at the timeout; nil without one
	plan    *plan         // used by the timer until the attempt is settled, while it holds judging

	received any // the response to a hedged call's attempt, until the attempt is known to win

	// judging holds a token while the timer uses the plan; only the call waits for that. It is
	// not a Mutex, because callbacks run meanwhile, which may wait for the virtual time of a
	// testing/synctest bubble. It is nil without a timer.
	judging  chan struct{}
	panicked any // guarded by judging; the value of a panic in a callback on the timer's goroutine

	mu      sync.Mutex
	ctx     context.Context // guarded by mu; nil until Done is called
	stop    context.CancelCauseFunc
	ended   bool // guarded by mu; cancelled because of cause
	cause   error
	settled bool // guarded by mu; the attempt has ended, or its first message has arrived
	renewed bool // guarded by mu; the timeout was restarted
	cut     bool // guarded by mu; the timeout has ended it before it was settled
	late    bool // guarded by mu; the attempt was settled after the timeout
}

// context returns the attempt's own context, a child of the caller's.
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

// parent returns the context for values and errors: the attempt's own or, as long as it would
// return the same, the caller's.
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

// expire starts the timer of the attempt timeout. It is a timer rather than a context deadline,
// because the attempt may be allowed to run on when the timer has fired, and because gRPC would send
// a deadline to the server, which is to see the caller's.
func (a *attempt) expire(overdue func(*attempt)) {
	if overdue == nil {
		overdue = (*attempt).judgeOverdue
	}
	a.bounds.judging = make(chan struct{}, 1)
	a.bounds.timer = time.AfterFunc(a.bounds.timeout, func() { overdue(a) })
}

// judgeOverdue asks the plan, on the timer's goroutine, whether the attempt is to be cut. The
// call's own goroutine is in gRPC meanwhile; when gRPC returns, settle waits for the result.
func (a *attempt) judgeOverdue() {
	a.bounds.judge()
	defer a.bounds.judged()
	a.judgeOverdueLocked(false, a.tryCut)
}

// judge waits until no other goroutine uses the plan, and reserves it until judged.
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

// judgeOverdueLocked needs judging. It asks the plan, and calls cut if the attempt is to be cut; cut
// returns false if the application has become bound to the attempt meanwhile.
func (a *attempt) judgeOverdueLocked(committed bool, cut func() bool) {
	b := a.bounds
	if b.isSettled() || b.retrier.leavesToGRPC(b.plan.policy, a.cc, a.method) {
		return
	}
	done := false
	defer func() {
		if b.panicked = recover(); b.panicked == nil && !done {
			b.panicked = exited{}
		}
		if b.panicked != nil {
			cut() // then the call's goroutine panics, or ends, see repanic
		}
	}()
	now := time.Now()
	if a.number == 1 {
		b.plan.readServiceConfig(a, now)
	}
	f := a.overdueFailure(now)
	f.Committed = f.Committed || committed
	if step := b.plan.overdue(a.Context, &f, now, b.retrier.random()); step.Cut && !cut() {
		b.plan.leave()
	}
	done = true
}

// exited stands for a panic if a callback calls [runtime.Goexit].
type exited struct{}

// overdueFailure describes an attempt that has reached its timeout. Whether headers have arrived is
// not known, so a policy that lets headers commit assumes that they have.
func (a *attempt) overdueFailure(now time.Time) failure {
	info := a.asStarted(now)
	info.Duration = now.Sub(origin) - a.start
	info.Err = newAttemptTimeoutError(a.bounds.timeout, nil)
	if a.bounds.isLast != nil && a.bounds.isLast() {
		info.Err = Permanent(info.Err)
	}
	return failure{
		Attempt:   info,
		CtxErr:    a.bounds.plan.gone(a.Context, now),
		Closed:    isClosed(a.cc),
		Unsent:    isUnconnected(a.cc),
		Committed: a.bounds.plan.policy.CommitOnHeaders && !a.bounds.plan.dials, // a function has no headers
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

// settle lifts the attempt timeout. It returns false if the timeout has already ended the attempt.
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

// renew restarts the attempt timeout.
func (a *attempt) renew() {
	b := a.bounds
	b.mu.Lock()
	defer b.mu.Unlock()
	if !b.settled {
		b.renewed = true
		b.timer.Reset(b.timeout)
	}
}

// repanic repeats, after report, a callback's panic on the timer's goroutine, or ends the goroutine
// if the callback did. It is for the caller's goroutines: on any other, the panic would end the
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
		panic(p) //nolint:forbidigo // it comes from the classifier or the budget, and the caller may handle it
	}
}

// settleVerdict waits until the timer does not use the plan.
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

// Deadline returns the caller's deadline or, if it is earlier, the end of the service config's
// timeout for the call. gRPC asks for it when it starts such a timeout for a first attempt;
// interceptors below may ask again later.
func (a *attempt) Deadline() (time.Time, bool) {
	if a.fresh && a.cc.GetMethodConfig(a.method).Timeout != nil {
		if asked := &a.ownExtras().asked; asked.Load() == 0 {
			asked.CompareAndSwap(0, int64(sinceOrigin()))
		}
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

// timedOut reports whether our attempt timeout ended the attempt with err, rather than the caller's
// context or the server. An error that is not a status comes from an interceptor, and hides the
// attempt's own end.
func (a *attempt) timedOut(err error) bool {
	if !a.isCut() || isPermanent(err) {
		return false
	}
	_, isStatus := status.FromError(err)
	return isContextEnd(err) || !isStatus
}

// checkUnsent records, as soon as gRPC has returned err, whether the attempt certainly reached no
// server: it failed with UNAVAILABLE, or was cut while it waited in gRPC; gRPC opened no stream for
// it (only then is its peer unknown); and the channel has no connection for such a stream.
//
// If an attempt fails like that on a channel that is READY or IDLE, the reason is not the lack of a
// connection: gRPC wakes an idle channel and waits. The reason may be per-RPC credentials, an
// interceptor or a load-balancing policy, and the attempt counts like any other.
func (a *attempt) checkUnsent(err error) {
	if a.cc == nil { // a function
		a.checkFunction(err)
		return
	}
	unknown := a.peer.Addr == nil && a.peer.LocalAddr == nil && a.peer.AuthInfo == nil
	failed := status.Code(err) == codes.Unavailable || isContextEnd(err) && a.isCut()
	if unknown && failed && isUnconnected(a.cc) {
		a.fate = fateUnsent
	}
}

// checkFunction records what a function's error says about the attempt: whether it had an effect and,
// if the error is that of a call below, that call's last trailer. The server's pushback in there holds
// for the function, too, because calling it again calls that server again.
func (a *attempt) checkFunction(err error) {
	if isUnsent(err) {
		a.fate = fateUnsent
	}
	if below, ok := errors.AsType[*Error](err); ok && below != nil && len(below.Attempts) > 0 {
		a.trailer = below.Attempts[len(below.Attempts)-1].Trailer
	}
}

// isContextEnd reports whether err can be the end of a context, either as a status or, from an
// interceptor below, as the context's own error.
func isContextEnd(err error) bool {
	code := status.Code(err)
	return code == codes.Canceled || code == codes.DeadlineExceeded ||
		errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded)
}

// asStarted describes the attempt from its start on.
func (a *attempt) asStarted(now time.Time) Attempt {
	return Attempt{
		Method:     a.method,
		Number:     int(a.number),
		Hedge:      a.hedge,
		Start:      timeOf(a.start, now),
		Wait:       a.wait,
		WaitSource: WaitSource(a.source),
	}
}

// asEnded describes the attempt after it has ended with err.
func (a *attempt) asEnded(err error, now time.Time) Attempt {
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
