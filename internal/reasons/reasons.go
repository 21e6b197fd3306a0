// Package reasons has the type of the errors for which package grpcretry ends calls. All that the
// packages of this module must know about a reason is in its fields.
package reasons

import (
	"context"
	"errors"
	"slices"

	"github.com/grpcretry/grpcretry/internal/errtype"
)

// A Reason is why a call is not retried.
type Reason struct {
	Word string // for metrics, spans and logs; docs/observing.md lists them
	Text string // for people
	Kind error  // the more general reason that [errors.Is] finds as well; otherwise nil

	// GivesUp: the call has used up its attempts or its budget, or was told not to go on. Its caller's
	// caller must not start again.
	GivesUp bool
	// GivesUpIfReached: the same if an attempt has reached a server. Otherwise the call has waited for a
	// connection in vain, and another server may have one.
	GivesUpIfReached bool
	// GivesUpIfUsedUp: the same if the call had no attempts left.
	GivesUpIfUsedUp bool
	// Untouched: a first failure is returned to the caller as it came.
	Untouched bool
	// Quiet: no policy would have retried the call.
	Quiet bool
	// ByCaller: the caller has ended the call.
	ByCaller bool
	// Logged: a line of its own tells when calls begin to end for this reason.
	Logged bool
}

// Error returns the reason's text.
func (r *Reason) Error() string {
	if r.Kind != nil {
		return r.Kind.Error() + ": " + r.Text
	}
	return "grpcretry: " + r.Text
}

// Unwrap lets [errors.Is] find the Kind.
func (r *Reason) Unwrap() error { return r.Kind }

// The causes of a context that has ended. They stand for the caller's errors and are not returned
// themselves.
var (
	deadlineExceeded = &Reason{
		Word: "deadline_exceeded", Text: "the deadline of the caller passed", GivesUpIfUsedUp: true, Quiet: true, ByCaller: true,
	}
	cancelled = &Reason{Word: "cancelled", Text: "the caller gave up", Quiet: true, ByCaller: true}
)

var own []*Reason // without those two

// New adds a reason. It is for package variables.
func New(r Reason) error {
	own = append(own, &r)
	return &r
}

// All returns the reasons, also those for callers who ended their calls.
func All() []*Reason { return append(slices.Clone(own), deadlineExceeded, cancelled) }

// Words returns the words of all reasons.
func Words() []string {
	var words []string
	for _, r := range All() {
		words = append(words, r.Word)
	}
	return words
}

// Is reports whether err itself is a Reason. An error that wraps one is a caller's cause.
func Is(err error) bool {
	_, ours := any(err).(*Reason)
	return ours
}

// Of returns the Reason that err is. Any other error is the cause of a caller's context, for which
// there are two.
func Of(err error) *Reason {
	if r, ours := any(err).(*Reason); ours {
		return r
	}
	if errors.Is(err, context.DeadlineExceeded) {
		return deadlineExceeded
	}
	return cancelled
}

// The outcomes of calls that succeeded.
const (
	FirstTry  = "first_try"
	Recovered = "recovered" // after retries
	HedgeWon  = "hedge_won" // with a hedge
)

// Outcome returns one word for how a call ended: by a failure with err, for a reason, or by the success of
// the attempt with a number, which may be a hedge.
func Outcome(err, reason error, number int, hedge bool) string {
	switch {
	case err != nil:
		return Of(reason).Word
	case hedge:
		return HedgeWon
	case number > 1:
		return Recovered
	default:
		return FirstTry
	}
}

// Disown wraps err so that [errors.Is] finds no Reason in it, because it belongs to another call. An error
// without one is returned as it is.
func Disown(err error) error {
	if _, found := errtype.As[*Reason](err); found {
		return anothers{err}
	}
	return err
}

// An anothers error holds a Reason that is another call's.
type anothers struct{ error }

func (a anothers) Is(target error) bool { return !Is(target) && errors.Is(a.error, target) }

func (a anothers) As(target any) bool { return errors.As(a.error, target) }
