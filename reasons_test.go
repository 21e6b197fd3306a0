package grpcretry

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/grpcretry/grpcretry/internal/reasons"
	"github.com/grpcretry/grpcretry/internal/reasons/probe"
)

// What handles reasons handles a new one. The packages debug and grpcretrytest test the same.
func TestANewReason(t *testing.T) {
	e := &Error{Last: errUnavailable, Reason: probe.Err}
	if got := outcomeOf(Event{Err: e, Reason: probe.Err}); got != "probe" {
		t.Errorf("outcome is %q, want probe", got)
	}
	if !errors.Is(e, probe.Err) || !strings.Contains(e.Error(), ": a test was curious: ") {
		t.Errorf("the reason is not found in %v", e)
	}
	if outer := (&Error{Last: e, Reason: ErrDeadline}); errors.Is(outer, probe.Err) {
		t.Errorf("another call's reason is found in %v", outer)
	}
	ctx, cancel := context.WithCancelCause(t.Context())
	cancel(probe.Err)
	if cause := causeOf(ctx); reasons.Of(cause).Word != "cancelled" || errors.Is(cause, probe.Err) {
		t.Errorf("another call's reason is found in the cause %v", cause)
	}
	if gaveUp(probe.Err, true, false) {
		t.Error("a reason without GivesUp counts as given up")
	}
}

func TestFieldsOfAReason(t *testing.T) {
	if given := (&reasons.Reason{GivesUp: true}); !gaveUp(given, false, false) {
		t.Error("GivesUp has no effect")
	}
	if late := (&reasons.Reason{GivesUpIfReached: true}); gaveUp(late, false, false) || !gaveUp(late, true, false) {
		t.Error("GivesUpIfReached does not depend on whether an attempt has reached a server")
	}
	for _, goOn := range []bool{false, true} {
		p := plan{policy: &policy{}, hedging: true, delay: time.Second, attemptCounts: attemptCounts{open: 1}}
		reason := &reasons.Reason{HedgesGoOn: goOn}
		p.stop(verdict{Reason: reason}, false)
		if stopped := p.stopped != nil; stopped == goOn {
			t.Errorf("HedgesGoOn %t: hedging has ended: %t", goOn, stopped)
		}
	}
}
