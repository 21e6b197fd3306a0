package grpcretry

import (
	"context"
	"errors"
	"strings"
	"testing"

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
	if gaveUp(planAfter(4), probe.Err) {
		t.Error("a reason without GivesUp counts as given up")
	}
}

// planAfter returns the plan of a call that has made attempts, of at most 4.
func planAfter(made int32) *plan {
	return &plan{policy: &policy{Policy: Policy{MaxAttempts: 4}}, attemptCounts: attemptCounts{made: made}}
}

func TestFieldsOfAReason(t *testing.T) {
	for _, tt := range []struct {
		reason *reasons.Reason
		want   [3]bool // after so many attempts that have reached a server: none, some, all
	}{
		{&reasons.Reason{}, [3]bool{false, false, false}},
		{&reasons.Reason{GivesUp: true}, [3]bool{true, true, true}},
		{&reasons.Reason{GivesUpIfReached: true}, [3]bool{false, true, true}},
		{&reasons.Reason{GivesUpIfUsedUp: true}, [3]bool{false, false, true}},
	} {
		for i, made := range []int32{0, 1, 4} {
			if got := gaveUp(planAfter(made), tt.reason); got != tt.want[i] {
				t.Errorf("%+v after %d of 4 attempts: the call has given up: %t, want %t", tt.reason, made, got, tt.want[i])
			}
			dry := planAfter(made)
			if dry.policy.dryRun = true; gaveUp(dry, tt.reason) {
				t.Errorf("%+v: a dry run has given up", tt.reason)
			}
		}
	}
}
