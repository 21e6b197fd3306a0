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
	h, err := s.hedges()
	if err != nil {
		return process{}, fmt.Errorf("strategy %q: hedging: %w", s.Name, err)
	}
	b, err := s.Budget.Make()
	if err != nil {
		return process{}, fmt.Errorf("strategy %q: budget: %w", s.Name, err)
	}
	if b == nil {
		b = e.Policy().Budget // the library's default, of this engine alone
	}
	return process{engine: e, budget: b, hedges: h, classifies: s.Policy.Classifier != nil}, nil
}

// hedges makes what a process needs for calls that are hedged; nil if none are.
func (s *Strategy) hedges() (*hedges, error) {
	p := s.Policy
	p.Hedging = s.Hedging.Make()
	if p.Hedging == nil {
		return nil, nil
	}
	e, err := grpcretry.NewEngine(p)
	if err != nil {
		return nil, err
	}
	return &hedges{
		engine:      e,
		delay:       p.Hedging.Delay,
		maxAttempts: e.Policy().Hedging.MaxAttempts,
		straight:    p.MaxAttempts == 1,
	}, nil
}

// Make is the library's form for one process, with a delay of its own; nil for nil.
func (h *Hedging) Make() *grpcretry.Hedging {
	if h == nil {
		return nil
	}
	out := &grpcretry.Hedging{
		MaxAttempts:       h.MaxAttempts,
		NonFatalCodes:     h.NonFatalCodes,
		AllMethodsAreSafe: true,
	}
	switch {
	case h.New != nil:
		out.Delay = h.New()
	case h.Kind == HedgeAtQuantile:
		out.Delay = grpcretry.HedgeAtQuantile(h.Quantile, h.AtLeast, h.AtMost)
	default:
		out.Delay = grpcretry.HedgeAfter(h.Delay)
	}
	return out
}

// Make is the budget for one process; nil stands for the library's default.
func (b Budget) Make() (grpcretry.Budget, error) {
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
		b, err := of[i].Make()
		if err != nil {
			return nil, fmt.Errorf("of[%d]: %w", i, err)
		}
		all = append(all, b)
	}
	return grpcretry.AllBudgets(all...), nil
}
