package grpcretry

import (
	"context"
	"errors"
	"net"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/connectivity"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"

	"github.com/grpcretry/grpcretry/internal/layers"
	"github.com/grpcretry/grpcretry/internal/lazy"
	"github.com/grpcretry/grpcretry/internal/tried"
)

// An Attempt is one try of a call. For observers, classifiers and [Error] it holds all that is
// known at that time; [AttemptFromContext] returns it before it has run, so with Method, Number,
// Hedge, Start, Wait and WaitSource only.
type Attempt struct {
	Method     string        // "/pkg.Service/Method"
	Number     int           // 1 for the first attempt of a call
	Start      time.Time     // when it was handed to gRPC
	Duration   time.Duration // from Start to its end
	Err        error         // the failure, nil after a success; see ErrAttemptTimeout
	Header     metadata.MD   // of the response; see WithObserver for when it is filled
	Trailer    metadata.MD   // of the response
	Peer       net.Addr      // the server it reached, nil if it reached none
	Wait       time.Duration // the wait before it, as decided; with all repetitions, and the time without a connection
	WaitSource WaitSource    // the origin of Wait
	Hedge      bool          // sent beside an earlier attempt in flight, and not in place of one
	Unsent     bool          // it reached no server, see WithPatience

	late    bool  // it ended after the attempt timeout, when no retry had replaced it
	repeats uint8 // how often the wait was repeated because the target was still failing, see WithPatience; at most 255
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
	context.Context // the caller's, with what the server must know about the attempt, see layers.Header; or the attempt's extras

	// An *attempt among the options of a call asks gRPC for the peer, and marks the call
	// as an attempt of ours.
	grpc.PeerCallOption

	// These never change after the start: other goroutines may read them through the context.
	cc     *grpc.ClientConn
	method string
	start  instant
	number int32
	source WaitSource

	reported bool // its result was reported to the plan or, without one, to the budgets

	tried atomic.Pointer[tried.List] // the endpoints that the call has tried; nil until a balancer asks

	// Filled in by gRPC, by collect from the caller's own variable or, for a stream, by read.
	trailer metadata.MD
	peer    peer.Peer

	optionSpace [4]grpc.CallOption // holds the options if they fit
}

// Value makes the attempt known to everything that runs below, see [AttemptFromContext], and to the
// load-balancing policy of package balancer.
func (a *attempt) Value(key any) any {
	if key == (attemptKey{}) || key == (tried.Key{}) {
		return a
	}
	return a.Context.Value(key)
}

// Tried implements [tried.Attempt]. It returns nil to a call of another method, which has the attempt's context because it is
// made within the attempt, by an interceptor for example.
func (a *attempt) Tried(method string) *tried.List {
	if method != a.method {
		return nil
	}
	return a.triedList()
}

// triedList returns the list that all attempts of the call share. Goroutines that ask at the same time get the same.
func (a *attempt) triedList() *tried.List {
	if a.tried.Load() == nil {
		a.tried.CompareAndSwap(nil, &tried.List{})
	}
	return a.tried.Load()
}

// extras hold what most first attempts of unary calls can do without: that makes a success 11 ns faster, and a retry 30 ns slower. They
// serve as the attempt's context.
type extras struct {
	context.Context                // the caller's, with what the server must know about the attempt; or that of bounds
	added           *layers.Shared // has values that come before these; nil for none

	wait      time.Duration
	repeats   uint8         // at most 255
	stopsGRPC bool          // gRPC is kept from retrying the attempt by itself; see also call
	sighting  atomic.Uint32 // what gRPC has reported, see sawStream; 0 for nothing
	header    metadata.MD   // filled in like the trailer
	bounds    *bounds       // nil for an attempt of a unary call without a contest
}

// Value implements [context.Context].
func (x *extras) Value(key any) any {
	if v := x.added.Value(key); v != nil {
		return v
	}
	return x.Context.Value(key)
}

// A fullAttempt is an attempt with extras. It is one allocation.
type fullAttempt struct {
	attempt attempt
	extras  extras
}

// in returns the attempt, in a context that has its extras.
func (f *fullAttempt) in(ctx context.Context) *attempt {
	f.extras.Context, f.attempt.Context = ctx, &f.extras
	return &f.attempt
}

// A boundedAttempt is an attempt of a stream, or of a call with a contest. It is one allocation.
type boundedAttempt struct {
	fullAttempt
	bounds bounds
}

// in returns the attempt, in a context that has its extras and bounds.
func (b *boundedAttempt) in(ctx context.Context) *attempt {
	b.bounds.own.Context, b.extras.bounds = ctx, &b.bounds
	return b.fullAttempt.in(&b.bounds.own)
}

// extras returns the attempt's extras, nil if it has none.
func (a *attempt) extras() *extras {
	x, _ := a.Context.(*extras)
	return x
}

// bounds returns the attempt's bounds, nil if it has none.
func (a *attempt) bounds() *bounds {
	if x := a.extras(); x != nil {
		return x.bounds
	}
	return nil
}

// bounds end an attempt before the caller's context does. The context for that is made when Done is
// first called: an attempt that succeeds without gRPC needs none, and the context is half the cost
// of a hedged call's bounds.
type bounds struct {
	received any            // the response to a hedge, until the hedge is known to win
	stream   *streamAttempt // nil for a unary call, and for an attempt without a stream
	ended    instant        // 0 unless the call takes note of the end later

	// The turn of the call's contest guards these. Without a contest, they are zero.
	expires  instant // when the attempt timeout is over, or never, also after an end in time
	slowness slowness

	own lazy.Context // a child of the caller's, with what the server must know
}

// A slowness is what was found out when an attempt had last run for the attempt timeout.
type slowness uint8

const (
	slowNotYet      slowness = iota // nothing: the timeout was not over yet
	slowUnconnected                 // there was no connection
	slowJudged                      // the plan was asked
)

// isCut reports whether the attempt timeout has ended the attempt.
func (a *attempt) isCut() bool {
	b := a.bounds()
	return b != nil && errors.Is(b.own.Cause(), ErrAttemptTimeout)
}

// isLate reports whether the attempt, which is not in flight any more, has run for longer than the attempt timeout.
func (a *attempt) isLate() bool {
	b := a.bounds()
	return b != nil && b.expires != 0 && b.expires != never
}

// errCut is what gRPC returns for an attempt that the library has cancelled.
var errCut = status.FromContextError(context.Canceled).Err()

// endContext ends the attempt's context, if it has one of its own.
func (a *attempt) endContext() {
	if b := a.bounds(); b != nil {
		b.own.Cancel(context.Canceled)
	}
}

// timedOut reports whether our attempt timeout ended the attempt with err, rather than the caller's
// context or the server.
func (a *attempt) timedOut(err error) bool { return a.isCut() && isTimeoutEnd(err) }

// isTimeoutEnd reports whether err may be due to the attempt timeout, which has ended the context. An error that is not a status comes
// from a function, or from an interceptor, which hides gRPC's.
func isTimeoutEnd(err error) bool {
	_, isStatus := status.FromError(err)
	return !isPermanent(err) && (isContextEnd(err) || !isStatus)
}

// isUnsent reports, soon after gRPC has returned err, with the channel in that state, whether the attempt certainly reached no
// server: it failed with UNAVAILABLE, or was cut while it waited in gRPC; gRPC opened no stream for
// it (only then is its peer unknown); and the channel has no connection for such a stream.
//
// If an attempt fails like that on a channel that is READY or IDLE, the reason is not the lack of a
// connection: gRPC wakes an idle channel and waits. The reason may be per-RPC credentials, an
// interceptor or a load-balancing policy, and the attempt counts like any other.
func (a *attempt) isUnsent(err error, state connectivity.State) bool {
	if a.hasStream() { // it was opened, so it has a server
		return false
	}
	return !a.hasPeer() && (status.Code(err) == codes.Unavailable || isContextEnd(err) && a.isCut()) && isUnconnected(state)
}

// hasStream reports whether the attempt has a stream.
func (a *attempt) hasStream() bool {
	b := a.bounds()
	return b != nil && b.stream != nil
}

// hasPeer reports whether gRPC has opened a stream for an attempt that has ended.
func (a *attempt) hasPeer() bool {
	return a.peer.Addr != nil || a.peer.LocalAddr != nil || a.peer.AuthInfo != nil
}

// gotNoResponse reports whether a server may have received an attempt that has failed, and has not
// responded. A response has trailers, unless the server has sent headers before; headers alone look like those of a
// connection that was lost later, and do not count as a response. An attempt without a peer was not
// sent; an interceptor below that drops the option for the peer drops the one for the header as well.
func (a *attempt) gotNoResponse() bool {
	return a.hasPeer() && len(a.trailer) == 0 && a.seen() != sawRefusal
}

// isContextEnd reports whether err can be the end of a context, either as a status or, from an
// interceptor below, as the context's own error.
func isContextEnd(err error) bool {
	code := status.Code(err)
	return code == codes.Canceled || code == codes.DeadlineExceeded ||
		errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded)
}

// asStarted describes the attempt from its start on.
func (a *attempt) asStarted(now time.Time) (info Attempt) {
	a.describeStart(&info, now)
	return info
}

// describe fills in what is known of the attempt after it has ended with err and with a header.
func (a *attempt) describe(info *Attempt, err error, header metadata.MD, now time.Time) {
	a.describeStart(info, now)
	info.Duration = now.Sub(info.Start)
	if b := a.bounds(); b != nil && b.ended != 0 {
		info.Duration = b.ended.Sub(a.start)
	}
	info.Err, info.Header, info.Trailer, info.Peer = err, header, a.trailer, a.peer.Addr
	info.late = a.isLate() && !a.isCut()
}

// describeStart fills in what is known of the attempt from its start on.
func (a *attempt) describeStart(info *Attempt, now time.Time) {
	info.Method, info.Number, info.Hedge = a.method, int(a.number), a.source.isHedge()
	info.Start, info.WaitSource = a.start.timeFrom(now), a.source
	if x := a.extras(); x != nil {
		info.Wait, info.repeats = x.wait, x.repeats
	}
}

// The rest of this file finds out whether an attempt has certainly run nowhere: for [WithUnsentOnly] by a witness, for any stream by a
// server's refusal. That takes more than a peer that is unknown when the attempt has ended, because an interceptor below
// may drop the option that asks for the peer. gRPC itself must have reported the attempt's end:
// it calls OnFinish at the end of every call whose options it has seen, also if it could not open
// a stream, and before that it fills in the peer if it has opened one.

// What gRPC has reported about an attempt, see extras.sighting.
const (
	sawStream  uint32 = iota + 1 // there was a stream, so a server may have run the method
	sawNone                      // the attempt has ended, and there was none
	sawRefusal                   // the server has refused it
)

// seen returns what gRPC has reported, 0 for nothing.
func (a *attempt) seen() uint32 {
	if x := a.extras(); x != nil {
		return x.sighting.Load()
	}
	return 0
}

// witness appends the options by which gRPC reports whether it has opened a stream for the attempt.
// The peer has a variable of its own: something below that makes the call in its place, such as
// another Retrier on another ClientConn, overwrites the variables of the options that it is
// given, even if it reached no server in the end.
func (x *extras) witness(opts []grpc.CallOption) []grpc.CallOption {
	w := &witness{}
	w.peer.AuthInfo = noStream{}
	return append(append(w.optionSpace[:0], opts...), grpc.Peer(&w.peer), grpc.OnFinish(func(error) {
		if _, none := w.peer.AuthInfo.(noStream); none {
			x.sighting.CompareAndSwap(0, sawNone)
		} else {
			x.sighting.Store(sawStream)
		}
	}))
}

// A witness is the peer that gRPC reports, and room for the options, which are two more than without it.
type witness struct {
	peer        peer.Peer
	optionSpace [6]grpc.CallOption
}

// noStream marks a peer that has not been filled in. An empty peer would not do, because gRPC fills
// in an empty one if the connection and its credentials have nothing to say.
type noStream struct{ credentials.AuthInfo }

// hasNotRun reports whether an attempt has certainly run on no server. Something that
// is not gRPC's own ClientConn may treat options in its own way, so it proves nothing.
func (a *attempt) hasNotRun() bool {
	seen := a.seen()
	return seen == sawRefusal || seen == sawNone && !a.hasPeer() // the attempt itself has asked for the peer, too
}
