package grpcretry

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

// EventKind is the kind of an [Event].
type EventKind int

// The kinds of a call's events, in their order. Each attempt has one AttemptStart and one
// AttemptEnd, then one Decision if it failed; one CallEnd comes last. The attempts of a hedged
// call overlap: an attempt that lost ends with [ErrHedgeLost], and without a Decision, because
// it has not failed.
const (
	AttemptStart EventKind = iota
	AttemptEnd
	Decision
	CallEnd
)

var eventKindNames = [...]string{"attempt_start", "attempt_end", "decision", "call_end"}

// String returns "attempt_start", "attempt_end", "decision" or "call_end".
func (k EventKind) String() string {
	if k < 0 || int(k) >= len(eventKindNames) {
		return fmt.Sprintf("EventKind(%d)", int(k))
	}
	return eventKindNames[k]
}

// An Event is one moment of a call, as observers see it; see [WithObserver].
type Event struct {
	Kind   EventKind
	Method string // "/pkg.Service/Method"
	Target string // in gRPC's canonical form: "dns:///shop:443"

	// Attempt is the attempt that starts, has ended, or was decided on. At CallEnd it is the
	// decisive one: the attempt that succeeded, or failed last.
	Attempt Attempt

	// A Decision says whether another attempt follows (Retry), after which Wait, and if not, the
	// Reason, which is one of the errors of [Error.Reason]. If the call stops because of the next
	// wait, or of the budget, Wait is the wait that was rejected; otherwise WaitSource is
	// WaitNone. How long a wait for a connection takes is not known yet: with WaitConnect, Wait
	// is the backoff that follows it.
	Retry      bool
	Wait       time.Duration
	WaitSource WaitSource
	Reason     error

	// A CallEnd has the error that the caller gets, and the length of the call. If the call
	// failed, Reason is set as in a Decision. Attempts are all attempts in order, if there was
	// more than one (at most the latest 1000); they must not be changed.
	Err      error
	Elapsed  time.Duration
	Attempts []Attempt

	// Budget is the budget that the call spends from. If each target has one, it is the target's.
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
	return r.report.observers.add(f)
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

// observe calls every observer with what e says about a call.
func (o *observers) observe(f *facts, e *Event) {
	list := o.list.Load()
	if list == nil {
		return
	}
	e.Method, e.Target, e.Budget = f.method, o.targets.of(f), f.budget
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
	dialed, names := targetOf(f.cc), n.names.Load()
	if names != nil {
		if name, known := (*names)[dialed]; known {
			return name
		}
	}
	name := canonicalTargetOf(f.cc)
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
