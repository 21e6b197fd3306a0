package grpcretry

import (
	"context"
	"strings"
	"time"

	"github.com/grpcretry/grpcretry/internal/bounded"
	"github.com/grpcretry/grpcretry/internal/inside"
	"github.com/grpcretry/grpcretry/internal/listeners"
)

// An EventKind names what an [Event] is about.
type EventKind string

// The kinds of events of a call, in the order in which they come. For each attempt there is one
// AttemptStart and one AttemptEnd, then one Decision if the attempt failed; one CallEnd comes
// last. If a callback or a function panics, the events that would have followed do not come. The attempts
// of a hedged call overlap. An attempt that lost ends with [ErrHedgeLost] and without a Decision, because it has not
// failed.
const (
	AttemptStart EventKind = "attempt_start"
	AttemptEnd   EventKind = "attempt_end"
	Decision     EventKind = "decision"
	CallEnd      EventKind = "call_end"
)

// An Event tells an observer what happens in a call, see [WithObserver].
type Event struct {
	Kind   EventKind
	Target string // in gRPC's canonical form: "dns:///shop:443"; see Retrier.Do for functions

	// Attempt is the attempt that starts, has ended, or was decided on. At CallEnd it is the
	// decisive one: the attempt that succeeded, or failed last. It names the method.
	Attempt Attempt

	// Reason is nil in a Decision to make another attempt. Otherwise it says why no further
	// attempt follows: an error as in [Error.Reason]. In a CallEnd it is set if the call failed.
	Reason error

	// Wait and WaitSource are set in a Decision: the wait before the next attempt, or the wait
	// that was rejected because of Reason; a CallEnd repeats the latter. WaitSource is 0
	// if no wait was computed. With the source "connect", Wait is the backoff that follows the wait for
	// a connection, because how long that takes is not known yet.
	Wait       time.Duration
	WaitSource WaitSource

	// Err and Elapsed are set in a CallEnd: what the caller gets, and how long the call took. A stream whose
	// context ends while the application is in none of its methods ends there, although the application
	// may still receive messages that had arrived before, and the end that followed them.
	// Attempts then are all attempts made, in order, if there was more than one (at most the
	// latest 16); they must not be changed.
	Err      error
	Elapsed  time.Duration
	Attempts []Attempt

	function bool      // the call is of a function, and not an RPC
	budget   Budget    // the call spends from it; if there is one per target, that of Target
	start    time.Time // set in a CallEnd: when the call started, also if Attempts do not have its first attempt
	made     int       // set in a CallEnd: how many attempts the call has made
}

// observers are called in the order in which they were added.
type observers struct {
	list listeners.List[func(context.Context, Event)]

	targets bounded.Map[string, string]      // by the target as dialed, in canonical form
	passed  bounded.Set[inside.PassedMethod] // the methods whose calls were passed straight through
}

// observe completes e with the call's target and budget, and passes it to every observer.
func (o *observers) observe(f *facts, e *Event) {
	e.Target, e.function, e.budget = o.target(f), f.functionTarget != "", f.budget
	for _, one := range o.list.All() {
		(*one)(f.ctx, *e)
	}
}

// target returns the canonical form of a call's target, which gRPC would build anew each time.
func (o *observers) target(f *facts) string {
	if f.cc == nil { // a function's has no other form, and might be one in which a ClientConn was dialed
		return f.functionTarget
	}
	return o.targets.Get(f.cc.Target(), bounded.MaxNames, func(string) string { return f.target() })
}

const (
	maxPassed     = 100
	maxPassedName = 200 // bytes of a target or method
)

// callPassed remembers the method of a call that passes straight through. Methods with very long names, and
// those after maxPassed, are not remembered.
func (o *observers) callPassed(f *facts) {
	m := inside.PassedMethod{Target: o.target(f), Method: f.method}
	if _, known := o.passed.All()[m]; known || max(len(m.Target), len(m.Method)) > maxPassedName {
		return
	}
	m.Method = strings.Clone(m.Method) // it may be a part of something long
	o.passed.Add(m, maxPassed)
}
