package grpcretry

import (
	"testing"

	"go.uber.org/goleak"
)

// TestMain fails if a test outside of a bubble leaves a goroutine behind; a bubble sees
// to that itself.
func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }
