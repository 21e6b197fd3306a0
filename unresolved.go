package grpcretry

import (
	"context"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/connectivity"
)

// This file finds the policy of a call that starts on a channel without a connection. Such a channel
// may have no service config yet, or an outdated one, so the call starts with the policy that is known,
// and the plan asks again when there is something to decide. gRPC chooses the service config for an
// attempt when it has resolved the name, and afterwards reads metadata from the attempt's context:
// the last such moment before the channel has a connection shows which config that is. Later changes
// do not concern the call.

// An unresolvedPolicy is the policy of such a call. It is also the call's context: the caller's.
type unresolvedPolicy struct {
	context.Context
	policies *methodPolicies
	cc       *grpc.ClientConn
	method   string
	own      []*callOption // the call's; they have been checked

	seen  atomic.Pointer[methodPolicy] // by the service config at the last use of the context; nil before that
	final atomic.Bool                  // seen does not change any more
}

// Value implements context.Context.
func (u *unresolvedPolicy) Value(key any) any {
	if !u.final.Load() {
		u.look()
	}
	return u.Context.Value(key)
}

func (u *unresolvedPolicy) look() {
	awaits := awaitsConfig(u.cc)
	u.seen.Store(u.policies.on(u.cc, u.method))
	if !awaits {
		u.final.Store(true)
	}
}

// awaitsConfig reports whether gRPC may be waiting for a channel's service config, as it does when a
// channel is new, and again when it has been idle.
func awaitsConfig(cc *grpc.ClientConn) bool { return cc != nil && cc.GetState() != connectivity.Ready }

// keep makes the policy final, because an attempt has reached a server. If no policy of the channel was
// seen, an interceptor below may have replaced the context, so that gRPC has not used this one.
func (u *unresolvedPolicy) keep() {
	if u.final.Load() {
		return
	}
	if of := u.seen.Load(); of == nil || of == u.policies.of(u.method) {
		u.look()
	}
	u.final.Store(true)
}

// resolve returns the policy by the service config that gRPC has chosen or, if it has not yet, by the
// one that the channel has now.
func (u *unresolvedPolicy) resolve() *policy {
	of := u.seen.Load()
	if !u.final.Load() || of == nil {
		of = u.policies.on(u.cc, u.method)
	}
	return u.policies.withOwn(of, u.own)
}

// obey makes the plan follow the policy that its call turns out to have.
func (p *plan) obey(resolved *policy) {
	switch {
	case p.policy.hedges && resolved.hedged != nil:
		resolved = resolved.hedged
	case p.policy.hedges && !p.next.decided && p.connecting == nil:
		p.dueAt = time.Time{} // no hedge is due
	}
	p.policy = resolved
}

// expectConfig has the policy resolved again when there is something to decide. A call that would pass
// through is retried if the service config says so.
func (c *call) expectConfig(policies *methodPolicies, own []*callOption) {
	c.unresolved = &unresolvedPolicy{Context: c.ctx, policies: policies, cc: c.cc, method: c.method, own: own}
	c.ctx = c.unresolved
	if c.mode == modePassThrough {
		c.mode = modeRetried
	}
}

// plannedAfter returns the call's plan when an attempt has ended.
func (c *call) plannedAfter(a *attempt, now time.Time) *plan {
	if c.unresolved != nil && a.fate != fateUnsent {
		c.unresolved.keep()
	}
	return c.planned(now)
}

// passesAfterAll reports whether a call would have passed through if its policy had been known.
func (c *call) passesAfterAll(p *plan) bool {
	return c.unresolved != nil && c.mode == modeRetried && p.policy.MaxAttempts == 1
}

// passAfterAll ends such a call with the error of its only attempt, at no cost to the budget.
func (c *call) passAfterAll(a *attempt, err error, now time.Time) error {
	f := c.failure(a, err, now)
	if f.TimedOut {
		err = f.Attempt.Err
	}
	c.deposit(a, Ignored)
	c.plan().leave()
	c.retrier.report.attemptFailed(&c.facts, &f.Attempt, verdict{Reason: ErrAttemptsExhausted}, now)
	c.end(&callFailure{last: f.Attempt, err: err, reason: ErrAttemptsExhausted, when: now})
	return err
}
