package sim

import (
	"fmt"

	"golang.org/x/time/rate"

	"github.com/grpcretry/grpcretry"
)

// process makes an engine and a budget, as a process has them.
func (s *Strategy) process() (process, error) {
	e, err := grpcretry.NewEngine(s.Policy)
	if err != nil {
		return process{}, fmt.Errorf("strategy %q: policy: %w", s.Name, err)
	}
	b, err := s.Budget.make()
	if err != nil {
		return process{}, fmt.Errorf("strategy %q: budget: %w", s.Name, err)
	}
	if b == nil {
		b = e.Policy().Budget // the library's default, of this engine alone
	}
	return process{engine: e, budget: b, classifies: s.Policy.Classifier != nil}, nil
}

// make is nil for the default.
func (b *Budget) make() (grpcretry.Budget, error) {
	if b.New != nil {
		return b.New()
	}
	switch b.Kind {
	case UnlimitedBudget:
		return grpcretry.Unlimited, nil
	case RatioBudget:
		return grpcretry.NewRatioBudget(grpcretry.RatioBudget{
			Ratio: b.Ratio, MinPerSecond: b.MinPerSecond, Window: b.Window})
	case ThrottleBudget:
		return grpcretry.NewThrottle(b.MaxTokens, b.TokenRatio)
	case RateBudget:
		return grpcretry.NewRateBudget(rate.NewLimiter(rate.Limit(b.PerSecond), b.Burst)), nil
	case ConcurrencyBudget:
		return grpcretry.NewConcurrencyBudget(b.Limit)
	case AllBudgets:
		return makeAll(b.Of)
	default:
		return nil, nil
	}
}

func makeAll(of []Budget) (grpcretry.Budget, error) {
	var all []grpcretry.Budget
	for i := range of {
		b, err := of[i].make()
		if err != nil {
			return nil, fmt.Errorf("of[%d]: %w", i, err)
		}
		all = append(all, b)
	}
	return grpcretry.AllBudgets(all...), nil
}
