package judges_test

import (
	"testing"

	"github.com/grpcretry/grpcretry/internal/declared"
	"github.com/grpcretry/grpcretry/internal/draws"
	"github.com/grpcretry/grpcretry/internal/goroutines"
)

// TestMain fails if a test outside a bubble leaves a goroutine behind; a bubble checks that
// itself.
func TestMain(m *testing.M) {
	draws.Set([]draws.Count{
		{Flag: "differential.programs", Thorough: 2000, Short: 50},
		{Flag: "faults.streams", Thorough: 600, Short: 40},
		{Flag: "programs.count", Thorough: 20_000, Short: 200},
	})
	declared.Echo("s", "m")
	goroutines.Main(m)
}
