package suite_test

import (
	"testing"

	"google.golang.org/grpc/internal/grpcsuite"
)

// TestLibraryIsInstalled comes last, because this file does.
func TestLibraryIsInstalled(t *testing.T) { grpcsuite.Check(t) }
