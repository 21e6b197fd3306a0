package grpcretry

import (
	"cmp"
	"context"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/connectivity"
)

// A channel is what a ClientConn says about a method at one moment. A call reads it when it starts, if it may be left to gRPC, has
// a timer or obeys the service config. If there is no connection by then, it may have no service config yet, or an outdated one, so
// the call starts with what is known, and reads it again when there is something to decide: gRPC has resolved the name by then, or has
// failed to.
//
// An interceptor cannot see the timeouts and retry policies of xDS routes.
type channel struct {
	cc      *grpc.ClientConn
	ready   bool              // it has a connection, so gRPC has its service config
	builtIn bool              // gRPC's own retries are on, and the policy does not replace them
	config  grpc.MethodConfig //nolint:staticcheck // gRPC has no other name for it
}

// Several questions are about gRPC's own retries, by the retryPolicy of a method in the channel's service config:
//
//   - [Retrier.hasBuiltInPolicy]: would gRPC retry the method now?
//   - mayGRPCRetry: would it now, or with a service config that is not known yet?
//   - policy.overGRPC: does the policy replace gRPC's, or turn it off?
//   - channel.retries: may gRPC retry, and would it?
//   - isLeftToGRPC: does it retry an attempt, so that the library does not?
//   - call.stopsGRPC, extras.stopsGRPC: is it kept from retrying the first attempt, or another?

// channel returns what the call's ClientConn says now; a function has none.
func (c *call) channel() channel { return c.channelIn(stateOf(c.cc)) }

// channelIn is channel for a state that was just read. The config is read after it, and so is not older.
func (c *call) channelIn(state connectivity.State) (ch channel) {
	ch.ready = state == connectivity.Ready
	if ch.cc = c.cc; ch.cc != nil {
		ch.builtIn = !c.retrier.builtInRetryOff && !c.stopsGRPC && (c.policy == nil || !c.policy.overGRPC)
		ch.config = c.cc.GetMethodConfig(c.method)
	}
	return ch
}

// retries reports whether gRPC retries the method by itself.
func (ch *channel) retries() bool { return ch.builtIn && ch.config.RetryPolicy != nil }

// hasBuiltInPolicy reports whether gRPC would retry a call's method by itself now.
func (r *Retrier) hasBuiltInPolicy(cc *grpc.ClientConn, method string) bool {
	return cc != nil && !r.builtInRetryOff && cc.GetMethodConfig(method).RetryPolicy != nil
}

// mayGRPCRetry reports whether gRPC would retry the method by itself now, or may get a policy for that with a connection.
func (c *call) mayGRPCRetry() bool {
	return c.retrier.hasBuiltInPolicy(c.cc, c.method) || !c.retrier.builtInRetryOff && !c.channel().ready
}

// expectConfig has the policy resolved again when the channel's service config is known. A call that would pass
// through is retried if the service config says so.
func (c *call) expectConfig(policies *methodPolicies, own []*policyOption) {
	method := c.method // so that c stays on the stack
	c.unresolved = func(ch channel) *policy { return policies.withOwn(policies.on(&ch, method), own) }
	if c.mode == modePassThrough {
		c.mode = modeRetried
	}
}

// A knownConfig is what a plan knows about the service config of its call's channel.
type knownConfig struct {
	builtIn  bool // gRPC retries the method by itself
	informed bool // the channel has been read while it had a connection
	limits   bool // its timeout ends before the caller's deadline
}

// isLeftToGRPC reports whether gRPC retries an attempt by itself, so that the library does not: the first, or the first for which there
// was a connection. Later ones are ours, whatever the channel says by then. counted is the number of attempts, without the unsent.
func (k knownConfig) isLeftToGRPC(counted int) bool { return k.builtIn && counted <= 1 }

// follow makes the plan follow what the channel says. gRPC applies the service config's timeout to each call that it is
// handed, which is each attempt. For gRPC's own retries it covers all attempts, and so it does here. There it begins when
// the channel's name has been resolved. Nothing tells when that was, so a call that has waited for it for longer than the timeout ends
// at its first failure.
func (p *plan) follow(ch *channel) {
	p.config.builtIn, p.config.informed = ch.retries(), ch.ready
	if timeout := ch.config.Timeout; timeout != nil && *timeout >= 0 {
		if end := p.start.Add(*timeout); p.deadline == 0 || end < p.deadline {
			p.deadline, p.config.limits = end, true
		}
	}
}

// obey makes the plan follow a policy: the call's, or the one that the call turns out to have.
func (p *plan) obey(resolved *policy) {
	p.policy, p.elapsed, p.patience = resolved, resolved.MaxElapsed, resolved.Patience
}

// limited returns the call's context: the caller's or, if there is one, its child that ends with the service
// config's timeout.
func (c *call) limited() context.Context {
	if c.limit != nil {
		return c.limit
	}
	return c.ctx
}

// passes ends a call that passes through after all, now that its channel has been read, with the error of its attempt, at no cost to
// the budget. It returns false if the call goes on.
func (c *call) passes(a *attempt, p *plan, err error, state connectivity.State, now time.Time) (over bool, _ error) {
	var reason error
	switch {
	case p.config.isLeftToGRPC(p.counted()) && a.number == p.unsent+1 && !a.isCut(): // the first for which gRPC had a config
		reason = errLeftToGRPC
	case c.unresolved != nil && p.policy.MaxAttempts == 1:
		reason = ErrAttemptsExhausted
	default:
		return false, nil
	}
	var f failure
	c.describe(&f, a, err, state, now)
	c.history().record(a, &f)
	c.deposit(a, Ignored)
	p.leave()
	if is(reason, errLeftToGRPC) {
		c.retrier.report.leftToGRPC(&c.facts)
	}
	v := verdict{Reason: cmp.Or(f.callOver(), reason)}
	c.retrier.report.attemptFailed(&c.facts, &f.Attempt, v, now)
	c.end(&callFailure{last: f.Attempt, err: f.Attempt.Err, verdict: v, when: now})
	return true, f.Attempt.Err
}

// stateOf returns the state of a ClientConn; a function has none, and needs no connection.
func stateOf(cc *grpc.ClientConn) connectivity.State {
	if cc == nil {
		return connectivity.Ready
	}
	return cc.GetState()
}

func isClosed(cc *grpc.ClientConn) bool { return stateOf(cc) == connectivity.Shutdown }

// isUnconnected reports whether a channel in this state has no connection and is trying to get one.
func isUnconnected(state connectivity.State) bool {
	return state == connectivity.Connecting || state == connectivity.TransientFailure
}
