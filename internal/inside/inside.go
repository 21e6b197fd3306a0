// Package inside lets the other packages of this repository reach what package grpcretry does not
// export, because the programs that use it need none of it. Package grpcretry sets the variables.
//
// A retrier is a *grpcretry.Retrier. Other types of package grpcretry, which imports this one, are
// any here, and the comment names them.
package inside

import (
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"

	"github.com/grpcretry/grpcretry/internal/layers"
)

// Observe adds an observer, a func(context.Context, grpcretry.Event, Call), to a retrier that may be in use;
// stop removes it. Calls in flight are observed from then on, so it may see the end of a call without its
// start, and may be called once more just after stop.
var Observe func(retrier, observer any) (stop func())

// A Call is what events do not tell programs about a call.
type Call struct {
	Function bool      // it is a call of a function, and not an RPC
	Budget   any       // the grpcretry.Budget that it spends from; if there is one per target, that of the event's Target
	Start    time.Time // when it started; only at its end
	Made     int       // how many attempts it has made; only at its end
}

// RepeatsOf returns how often the wait before a grpcretry.Attempt was repeated because the target was still failing,
// at most 255.
var RepeatsOf func(attempt any) int

// TrailerOf returns the trailer of a call's last attempt, or the one that forbids a retry; e is the call's *grpcretry.Error.
var TrailerOf func(e any) metadata.MD

// WaitConnect is the grpcretry.WaitSource of the wait for a connection, and the backoff after it. It follows those that
// grpcretry counts.
const WaitConnect = 5

// IsLate reports whether a grpcretry.Outcome is that of an attempt that ended after the attempt timeout, and earns nothing.
var IsLate func(outcome any) bool

// IsDryRun reports whether a grpcretry.Policy comes from WithDryRun.
var IsDryRun func(policy any) bool

// BudgetOf returns the grpcretry.Budget from which the retries of a method's calls to a target, in
// gRPC's canonical form, are paid. An Update may replace it, and a budget of a target that is no longer
// used is forgotten, so it is not to be kept.
var BudgetOf func(retrier any, method, target string) any

// A Usage is what the calls of a Retrier hold at one moment, and what did not fit into memory so far.
type Usage struct {
	// WaitingCalls wait before their next attempt, and have no attempt in flight.
	WaitingCalls int
	// OpenStreams have not ended. Streams that pass straight through to gRPC do not count.
	OpenStreams int
	// ReplayMemory is what streams keep for replay, in bytes, and ReplayLimit the most that they may.
	ReplayMemory, ReplayLimit int64
	// CommittedStreams are the streams that the limit has committed so far.
	CommittedStreams int64
}

// UsageOf returns what a retrier's calls hold now.
var UsageOf func(retrier any) Usage

// A Target is what a Retrier's calls know about a backend, see grpcretry.WithPatience.
type Target struct {
	Name    string        // in gRPC's canonical form, or a function's, see Retrier.Do
	Failing time.Duration // since the first failure after the last answered call; 0 if that call was the latest
	Waiting int           // calls that wait before their next attempt
	GaveUp  int64         // calls that have ended with ErrTargetDown
}

// TargetsOf returns each target to which a call has failed lately, sorted by name.
var TargetsOf func(retrier any) []Target

// WarningsOf returns what is doubtful about a retrier's options now, one sentence each: what a logger gets.
var WarningsOf func(retrier any) []string

// WithRandom returns a grpcretry.Option that sets the source of the random numbers for jitter, so that
// tests can predict the waits. f returns numbers in [0, 1), and must be safe for concurrent use.
var WithRandom func(f func() float64) any

// WithReplayMemory returns a grpcretry.Option with another limit, in bytes, for what the streams of a
// Retrier keep for replay together.
var WithReplayMemory func(bytes int64) any

// ServerOptions returns both server interceptors, with only the given measures against multiplying retries,
// for comparisons.
var ServerOptions func(layers.Measures) []grpc.ServerOption

// A PassedMethod is one whose calls are passed straight through to gRPC, with one attempt each.
type PassedMethod struct{ Target, Method string }

// PassedMethods returns the methods that were called while somebody observed a retrier, and were passed
// straight through, in no order: no event tells an observer of them.
var PassedMethods func(retrier any) []PassedMethod
