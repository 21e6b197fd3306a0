package goroutines

import (
	"os"
	"os/signal"
	"strings"
	"testing"
)

func TestMain(m *testing.M) { Main(m) }

func waitFor(end chan struct{}) { <-end }

func TestOnlyWhatATestStartsIsFound(t *testing.T) {
	signals := make(chan os.Signal, 1)
	signal.Notify(signals, os.Interrupt) // starts a goroutine that never ends
	defer signal.Stop(signals)
	if got := Now(); len(got) != 0 {
		t.Errorf("found %v, want none", got)
	}

	first, second := make(chan struct{}), make(chan struct{})
	go waitFor(first)
	before := Now()
	go waitFor(second)
	after := Now()
	if len(before) != 1 || len(after) != 2 {
		t.Errorf("found %d goroutines and then %d, want 1 and 2", len(before), len(after))
	}
	for _, stack := range after {
		if !strings.Contains(stack, "created by github.com/grpcretry/grpcretry/internal/goroutines.Test") {
			t.Errorf("found\n%s\nwant only what this test started", stack)
		}
	}
	close(second)
	if err := Left(before); err != nil {
		t.Error(err)
	}
	close(first)
	if err := Left(nil); err != nil {
		t.Error(err)
	}
}
