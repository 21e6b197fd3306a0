package grpcretry

import (
	"context"
	"maps"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/grpcretry/grpcretry/internal/off"
)

// An EventKind names what an [Event] is about.
type EventKind string

// The kinds of events of a call, in the order in which they come. For each attempt there is one
// AttemptStart and one AttemptEnd, then one Decision if the attempt failed; one CallEnd comes
// last. The attempts of a hedged call overlap. An attempt that lost ends with [ErrHedgeLost] and
// without a Decision, because it has not failed.
const (
	AttemptStart EventKind = "attempt_start"
	AttemptEnd   EventKind = "attempt_end"
	Decision     EventKind = "decision"
	CallEnd      EventKind = "call_end"
)

// An Event tells an observer what happens in a call, see [WithObserver].
type Event struct {
	Kind     EventKind
	Target   string // in gRPC's canonical form: "dns:///shop:443"; see Retrier.Do for functions
	Function bool   // the call is of a function, and not an RPC

	// Attempt is the attempt that starts, has ended, or was decided on. At CallEnd it is the
	// decisive one: the attempt that succeeded, or failed last. It names the method.
	Attempt Attempt

	// Reason is nil in a Decision to make another attempt. Otherwise it says why no further
	// attempt follows: an error as in [Error.Reason]. In a CallEnd it is set if the call failed.
	Reason error

	// Wait and WaitSource are set in a Decision: the wait before the next attempt, or the wait
	// that was rejected because of Reason; a CallEnd repeats the latter. WaitSource is WaitNone
	// if no wait was computed. With WaitConnect, Wait is the backoff that follows the wait for
	// a connection, because how long that takes is not known yet.
	Wait       time.Duration
	WaitSource WaitSource

	// Err and Elapsed are set in a CallEnd: what the caller gets, and how long the call took.
	// Attempts then are all attempts made, in order, if there was more than one (at most the
	// latest 16); they must not be changed.
	Err      error
	Elapsed  time.Duration
	Attempts []Attempt

	// Budget is the budget that the call spends from; if there is one per target, that of Target.
	Budget Budget
}

// Outcome returns one word for how a call ended; e is the call's [CallEnd] event. The word is
// "first_try", "recovered" for a success after retries, "hedge_won" for the success of an
// attempt that was sent while an earlier one was in flight, or the [ReasonName] of the failure.
func (e Event) Outcome() string {
	if e.Err != nil {
		return ReasonName(e.Reason)
	}
	return outcomeOf(e.Attempt.Number, e.Attempt.Hedge)
}

// Observe adds an observer to a Retrier that may be in use; stop removes it. See [WithObserver].
// Calls in flight are observed from then on, so f may see the end of a call without its start,
// and may be called once more just after stop. A Retrier without observers pays nothing for them.
func (r *Retrier) Observe(f func(context.Context, Event)) (stop func()) {
	return r.made().report.observers.add(f)
}

// observers are called in the order in which they were added. The list is replaced, never
// changed, so that calls read it without a lock.
type observers struct {
	mu   sync.Mutex                   // held to replace the list
	list atomic.Pointer[observerList] // nil if empty

	targets targetNames
	passed  passedMethods
}

type observerList []*observer

type observer struct {
	f func(context.Context, Event)
}

func newObservers(fs []func(context.Context, Event)) *observers {
	o := &observers{}
	for _, f := range fs {
		o.add(f)
	}
	return o
}

func (o *observers) add(f func(context.Context, Event)) (remove func()) {
	added := &observer{f}
	o.replace(func(list observerList) observerList { return append(list, added) })
	return func() {
		o.replace(func(list observerList) observerList {
			return slices.DeleteFunc(list, func(one *observer) bool { return one == added })
		})
	}
}

func (o *observers) replace(change func(observerList) observerList) {
	o.mu.Lock()
	defer o.mu.Unlock()
	var list observerList
	if old := o.list.Load(); old != nil {
		list = slices.Clone(*old)
	}
	if list = change(list); len(list) == 0 {
		o.list.Store(nil)
		return
	}
	o.list.Store(&list)
}

// observe completes e with the call's target and budget, and passes it to every observer.
func (o *observers) observe(f *facts, e *Event) {
	list := o.list.Load()
	if list == nil {
		return
	}
	e.Target, e.Function, e.Budget = o.targets.of(f), f.functionTarget != "", f.budget
	for _, one := range *list {
		one.f(f.ctx, *e)
	}
}

// targetNames caches the canonical form of targets, which gRPC builds anew each time.
type targetNames struct {
	mu    sync.Mutex // held to add one; the map is replaced, never changed
	names atomic.Pointer[map[string]string]
}

const maxTargetNames = 1000

func (n *targetNames) of(f *facts) string {
	if f.functionTarget != "" { // it has no other form, and might be one in which a ClientConn was dialed
		return f.functionTarget
	}
	dialed, names := f.dialed(), n.names.Load()
	if names != nil {
		if name, known := (*names)[dialed]; known {
			return name
		}
	}
	name := f.target()
	n.add(dialed, name)
	return name
}

func (n *targetNames) add(dialed, name string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	names := map[string]string{}
	if old := n.names.Load(); old != nil {
		if len(*old) == maxTargetNames {
			return
		}
		names = maps.Clone(*old)
	}
	names[dialed] = name
	n.names.Store(&names)
}

func init() {
	off.Methods = func(retrier any) []off.Method {
		return retrier.(*Retrier).report.observers.passed.list()
	}
}

const (
	maxPassed     = 100
	maxPassedName = 200 // bytes of a target or method
)

// passedMethods holds the methods whose calls were passed straight through.
type passedMethods struct {
	mu  sync.Mutex // held to add one; the map is replaced, never changed
	set atomic.Pointer[map[off.Method]bool]
}

// add is on the path of every such call. Methods with very long names, and those after
// maxPassed, are not remembered.
func (p *passedMethods) add(m off.Method) {
	old := p.set.Load()
	known := old != nil && ((*old)[m] || len(*old) >= maxPassed)
	if known || max(len(m.Target), len(m.Method)) > maxPassedName {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	set := map[off.Method]bool{}
	if old := p.set.Load(); old != nil {
		set = maps.Clone(*old)
	}
	if len(set) < maxPassed {
		set[off.Method{Target: m.Target, Method: strings.Clone(m.Method)}] = true // it may be a part of something long
	}
	p.set.Store(&set)
}

func (p *passedMethods) list() []off.Method {
	set := p.set.Load()
	if set == nil {
		return nil
	}
	return slices.Collect(maps.Keys(*set))
}
