package grpcretry

import (
	"context"
	"maps"
	"slices"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"

	"github.com/grpcretry/grpcretry/internal/inside"
	"github.com/grpcretry/grpcretry/internal/layers"
)

// The other packages of this repository reach what follows through package inside.
func init() {
	inside.Observe = func(retrier, observer any) (stop func()) {
		observe := observer.(func(context.Context, Event, inside.Call))
		return retrier.(*Retrier).checked().report.observers.list.Add(func(ctx context.Context, e Event) {
			observe(ctx, e, inside.Call{Function: e.function, Budget: e.budget, Start: e.start, Made: e.made})
		})
	}
	inside.BudgetOf = func(retrier any, method, target string) any { return retrier.(*Retrier).budgetOf(method, target) }
	inside.IsLate = func(outcome any) bool { return outcome.(Outcome).late }
	inside.IsDryRun = func(policy any) bool { return policy.(Policy).dryRun }
	inside.TrailerOf = func(e any) metadata.MD { return e.(*Error).trailer() }
	inside.RepeatsOf = func(attempt any) int { return int(attempt.(Attempt).repeats) }
	inside.UsageOf = func(retrier any) inside.Usage { return retrier.(*Retrier).checked().usage.now() }
	inside.TargetsOf = func(retrier any) []inside.Target { return retrier.(*Retrier).checked().targets.states(time.Now()) }
	inside.PassedMethods = func(retrier any) []inside.PassedMethod {
		return slices.Collect(maps.Keys(retrier.(*Retrier).report.observers.passed.All()))
	}
	inside.WarningsOf = func(retrier any) []string { return retrier.(*Retrier).checked().settings.current().warnings() }
	inside.WithRandom = func(f func() float64) any { return withRandom(f) }
	inside.WithReplayMemory = func(bytes int64) any { return withReplayMemory(bytes) }
	inside.ServerOptions = func(m layers.Measures) []grpc.ServerOption { return serverOptions(withMeasures(m)) }
}

// budgetOf returns the budget of a method's calls to a target in canonical form.
func (r *Retrier) budgetOf(method, target string) Budget {
	return budgetNamed(r.checked().settings.current().of(method).policy.Budget, target)
}

// withRandom sets the source of the random numbers for jitter. Any number that is not in [0, 1) counts as
// the nearest of these, and NaN as 0. A nil f means [math/rand/v2.Float64].
func withRandom(f func() float64) Option {
	return fixedOption("withRandom", func(c *config) { c.random = f })
}

// withReplayMemory replaces defaultReplayMemory.
func withReplayMemory(bytes int64) Option {
	return fixedOption("withReplayMemory", func(c *config) { c.replayMemory = bytes })
}

// serverOptions returns both server interceptors, which share what they keep.
func serverOptions(opts ...ServerOption) []grpc.ServerOption {
	s := newServer("serverOptions", opts)
	return []grpc.ServerOption{grpc.ChainUnaryInterceptor(s.unary), grpc.ChainStreamInterceptor(s.stream)}
}

// withMeasures turns single measures against multiplying retries off.
func withMeasures(m layers.Measures) ServerOption {
	return serverOption(func(s *server) { s.Measures = m })
}
