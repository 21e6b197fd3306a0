package grpcretry

import (
	"fmt"
	"slices"
	"testing"

	"go.uber.org/goleak"
)

// TestMain fails if a test outside of a bubble leaves a goroutine behind; a bubble sees
// to that itself. In all tests, streams make the transitions of the table only.
func TestMain(m *testing.M) {
	onTransition = checkTransition
	goleak.VerifyTestMain(m)
}

// transitions is the table in stream_state.go.
var transitions = map[phase][]phase{
	phaseRecovering: {phaseOpen, phaseCommitted, phaseEnding},
	phaseOpen:       {phaseRecovering, phaseRacing, phaseCommitted},
	phaseRacing:     {phaseCommitted, phaseEnding},
	phaseCommitted:  {phaseEnding},
	phaseEnding:     {phaseEnded},
}

func checkTransition(from, to phase) {
	if to != phaseEnded && !slices.Contains(transitions[from], to) || from == phaseEnded && to != phaseEnded {
		panic(fmt.Sprintf("transition from phase %d to %d", from, to))
	}
}
