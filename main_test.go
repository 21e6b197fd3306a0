package grpcretry

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
		{Flag: "backoff.stride", Thorough: 1, Short: 401},
		{Flag: "budgets.seeds", Thorough: 100, Short: 1},
		{Flag: "configs.draws", Thorough: 100, Short: 10},
		{Flag: "functions.draws", Thorough: 1000, Short: 20},
		{Flag: "hedges.sequences", Thorough: 500, Short: 50},
		{Flag: "panics.points", Thorough: 12, Short: 1},
		{Flag: "scopes.draws", Thorough: 500, Short: 50},
	})
	declared.Echo("streams", "Expand", "Collect", "Chat", "Method")
	declared.Echo("random", "Expand")
	goroutines.Main(m)
}
