package grpcretry

import (
	"sync"
	"sync/atomic"
)

// settings are what [Retrier.Update] changes. A Retrier and its copies share them.
type settings struct {
	policies atomic.Pointer[methodPolicies]

	mu       sync.Mutex    // held by an Update
	options  policyOptions // guarded by mu
	updates  int           // guarded by mu
	fallback budgets       // never changes, so that the default budgets keep their state
	warnings warnings
}

func newSettings() *settings { return &settings{fallback: defaultBudgets()} }

// current returns the policies for calls that start now.
func (s *settings) current() *methodPolicies { return s.policies.Load() }

// Update changes policies while calls run, as if the options had been passed to [New] after
// those that were passed to it and to earlier Updates. The narrower scope still wins, and settings
// that opts do not mention stay as they are. Calls that start later follow all of the changes,
// and calls in flight none of them. The cost to a call is one atomic load.
//
// During an incident, Update([Disable]()) turns retries and hedging off for every method, whatever
// older options say; only options of single calls, and options for narrower scopes in the same
// Update or a later one, turn them on. A later Update with [WithMaxAttempts] or [WithHedging] for
// all methods puts the older options into effect again, except the one that it replaces. As long as
// the switch is off, gRPC's own retries by a retryPolicy in the channel's service config are off, too.
//
// State outlives an Update if its settings are the same: the default budgets; a budget that is
// passed again; the budgets of [WithRatioBudget] and of a service config's retryThrottling, and
// what [HedgeAtQuantile] has measured, also if a new option with the same settings for the same
// scope replaces the old one; budgets that the new option shares with others are then not used.
// Everything else starts afresh.
//
// The options may be those about policies: CallOptions, WithMethod, [WithIdempotencyLevel],
// [WithServiceConfig] and [WithResolverServiceConfig]. If an option is another one, or has an invalid
// value, the error names the option and the value, and nothing changes. Update is safe for
// concurrent use; Updates take effect one after another.
func (r *Retrier) Update(opts ...Option) error {
	if err := r.settings.update(opts); err != nil {
		return err
	}
	if r.report.meter != nil {
		r.report.meter.addNewBudgets()
	}
	r.warn() // without a lock, because the logger may call Update
	return nil
}

// update applies the options of one Update.
func (s *settings) update(opts []Option) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	c := config{policies: s.options.clone(), update: s.updates + 1}
	if err := c.applyAll("Update", opts); err != nil {
		return err
	}
	return s.replace(c.policies, c.update)
}

// replace puts options into effect, unless they do not go together. The caller holds mu, or is alone.
func (s *settings) replace(o policyOptions, update int) error {
	policies := newMethodPolicies(s.fallback, o)
	if err := o.checkHedging(s.fallback); err != nil {
		return err
	}
	s.options, s.updates = o, update
	s.warnings.set(policies.warnings())
	s.policies.Store(policies)
	return nil
}
