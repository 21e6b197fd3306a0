package grpcretry

import (
	"fmt"
	"time"
)

// EventKind says what an [Event] is about.
type EventKind int

// The kinds of events of a call, in the order in which they come. For each attempt
// there is one AttemptStart and one AttemptEnd, then one Decision if it failed; one
// CallEnd comes last.
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

// An Event tells an observer what happens in a call, see [WithObserver].
type Event struct {
	Kind   EventKind
	Method string // "/pkg.Service/Method"
	Target string // as the ClientConn was dialed

	// Attempt is the attempt that starts, has ended, or is decided on; at CallEnd the last
	// one made.
	Attempt Attempt

	// Of a Decision: whether there will be another attempt, after which wait, and if not,
	// why. Reason is one of the errors of [Error.Reason]. Where the call stops because of
	// its next wait, or the budget, that wait is told too; else WaitSource is WaitNone.
	Retry      bool
	Wait       time.Duration
	WaitSource WaitSource
	Reason     error

	// Of CallEnd: what the caller gets, and how long the call took. Reason is set as in a
	// Decision where the call failed.
	Err     error
	Elapsed time.Duration
}

// observe tells every observer.
func (c *call) observe(e Event) {
	e.Method, e.Target = c.method, c.target()
	for _, f := range c.retrier.observers {
		f(c.ctx, e)
	}
}

func (c *call) observed() bool { return len(c.retrier.observers) > 0 }
