package sim

import (
	"cmp"
	"fmt"
	"time"

	"golang.org/x/time/rate"

	"github.com/grpcretry/grpcretry"
)

// process makes a Retrier, as a process has one.
func (s *Strategy) process() (process, error) {
	r, err := s.Retrier()
	return process{retrier: r}, err
}

// Retrier returns the Retrier of one process, with a budget and a delay of its own. Its budgets know
// no clock but that of the plans' driver, whose times must be far from now.
func (s *Strategy) Retrier() (*grpcretry.Retrier, error) {
	fail := func(what string, err error) (*grpcretry.Retrier, error) {
		return nil, fmt.Errorf("strategy %q: %s: %w", s.Name, what, err)
	}
	p := s.Policy
	var err error
	if _, err = grpcretry.New(grpcretry.WithPolicy(p)); err != nil {
		return fail("policy", err)
	}
	if p.Hedging, err = s.Hedging.Make(); err != nil {
		return fail("hedging", err)
	}
	if p.Budget, err = s.Budget.Make(); err != nil {
		return fail("budget", err)
	}
	r, err := grpcretry.New(grpcretry.WithPolicy(p))
	if err != nil {
		return fail("hedging", err)
	}
	resolved := r.Policy("")
	resolved.Budget.Balance(epoch) // so that it knows of no other clock
	if resolved.Hedging != nil {
		resolved.Hedging.Budget.Balance(epoch)
	}
	return r, nil
}

// Make returns the library's form for one process, with a delay and a budget of its own; nil for
// nil.
func (h *Hedging) Make() (*grpcretry.Hedging, error) {
	if h == nil {
		return nil, nil
	}
	budget, err := h.Budget.Make()
	if err != nil {
		return nil, fmt.Errorf("budget: %w", err)
	}
	out := &grpcretry.Hedging{
		Budget:            budget,
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
	return out, nil
}

// Make returns the budget for one process; nil stands for the library's default.
func (b Budget) Make() (grpcretry.Budget, error) {
	if b.New != nil {
		return b.New()
	}
	switch b.Kind {
	case UnlimitedBudget:
		return grpcretry.Unlimited, nil
	case RatioBudget:
		s := grpcretry.RatioBudget{Ratio: b.Ratio, Reserve: b.Reserve, MinPerSecond: b.MinPerSecond, Window: b.Window}
		if s != (grpcretry.RatioBudget{}) {
			s.Ratio, s.Reserve = cmp.Or(s.Ratio, grpcretry.Nothing), cmp.Or(s.Reserve, grpcretry.Nothing)
		}
		return grpcretry.NewRatioBudget(s)
	case FinagleBudget:
		return newFinagleBudget(b.Ratio, b.MinPerSecond, timeOr(b.Window, 10*time.Second)), nil
	case ThrottleBudget:
		return grpcretry.NewThrottle(b.MaxTokens, b.TokenRatio)
	case RateBudget:
		return grpcretry.NewRateBudget(rate.NewLimiter(rate.Limit(b.PerSecond), b.Burst)), nil
	case ConcurrencyBudget:
		return grpcretry.NewConcurrencyBudget(b.Limit)
	default:
		return nil, nil
	}
}
