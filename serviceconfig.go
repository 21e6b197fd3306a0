package grpcretry

import (
	"fmt"
	"maps"
	"slices"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"

	"github.com/grpcretry/grpcretry/internal/patterns"
	"github.com/grpcretry/grpcretry/internal/serviceconfig"
)

// WithServiceConfig sets the policies of a gRPC service config in JSON: its retryPolicy and
// hedgingPolicy, for the methods, services or all methods that an entry of methodConfig names, and
// its retryThrottling (gRFC A6 #integration-with-service-config). The rest of the config is ignored
// here; gRPC obeys it if the channel has the same config.
//
// A retryPolicy sets the attempts, the codes and an [Exponential] backoff with
// [ProportionalJitter]; a hedgingPolicy sets [Hedging] with [HedgeAfter]. The retryThrottling
// becomes the budget, a [NewThrottle] for each target. As in gRPC, one entry applies to a method:
// the one that names it, or else its service, or else the one without a name. If that entry has no
// policy, or if there is none, the method follows the other options and the defaults.
//
// Options in Go win if their scope is the same or narrower, so [WithMethod] for a service wins over
// an entry for that service, but not over one for a method of it. Pushback, deadlines, limits and
// the default budget apply as always.
//
// [New] rejects what grpc-go rejects, but for the differences that docs/service-config.md in the repository lists, and an
// invalid hedgingPolicy; the error contains the path in the JSON. Methods with a retryPolicy in the channel's own service
// config are then no longer left to gRPC, see [WithResolverServiceConfig].
//
// The default is no service config. A later WithServiceConfig replaces an earlier one, so "{}" removes
// its policies; in a [Retrier.Update] the throttle keeps its tokens if its settings are the same.
func WithServiceConfig(json string) Option {
	read, err := readServiceConfig(json)
	return configOption(func(c *config) {
		if err != nil {
			c.reject(fmt.Errorf("grpcretry: WithServiceConfig: %w", err))
			return
		}
		c.policies.setConfig(read)
	})
}

// WithResolverServiceConfig makes the retryPolicy of a channel's own service config the policy of
// its methods, with this library's pushback, limits, budgets and events. The config is read for
// each call, so that a change by the resolver applies to the next call; budgets keep their state. A call
// that starts on a channel without a connection has the config of its first failure, and has events even if
// that turns out to leave it alone.
// The scopes are those of [WithServiceConfig], except that an entry with several names has the widest
// of those that apply to the method, because gRPC does not show which one it found. The channel's
// retryPolicy replaces what WithServiceConfig says about a method. Options in Go win if their scope is
// the same or narrower.
//
// gRPC shows interceptors the retryPolicy only: a hedgingPolicy or a retryThrottling of the channel is
// not obeyed. Set the budget in Go, or pass the retryThrottling to WithServiceConfig. The routes of
// xDS keep their retry policies where no interceptor can see them, so these are not obeyed either.
//
// No method is left to gRPC's own retries then. Use [Retrier.DialOptions], which turns them off.
// Without them, each call of a method with a retryPolicy keeps gRPC from retrying what was sent,
// which also turns off most transparent retries. Two retries of gRPC's remain within one attempt: of a call
// that never got a stream, for example because its credentials failed, and of a unary call whose
// server has responded before the request was sent.
//
// The default is false. A later WithResolverServiceConfig replaces an earlier one.
func WithResolverServiceConfig(on bool) Option {
	return configOption(func(c *config) { c.policies.fromChannel = on })
}

// configPolicies are the policies of a service config.
type configPolicies struct {
	read    *serviceconfig.Config // nil if there is none
	entries map[string]partial    // by "/pkg.Service/Method", "/pkg.Service/" or ""; nothing is set for an entry without a policy
}

func readServiceConfig(json string) (c configPolicies, err error) {
	if c.read, err = serviceconfig.Parse(json); err != nil {
		return c, err
	}
	c.entries = map[string]partial{}
	for i := range c.read.Methods {
		var p Policy // of an entry without a policy
		if m := &c.read.Methods[i]; m.Retry != nil {
			p = retryPolicyOf(m.Retry)
		} else if m.Hedging != nil {
			p = hedgingPolicyOf(m.Hedging)
		}
		for _, name := range c.read.Methods[i].Names {
			c.entries[name] = WithPolicy(p).callOption().partial
		}
	}
	return c, nil
}

// retryPolicyOf returns the policy that is equivalent to a retryPolicy. The jitter of ±20% is gRFC
// A6's #exponential-backoff.
func retryPolicyOf(r *serviceconfig.Retry) Policy {
	return Policy{
		MaxAttempts: r.MaxAttempts,
		Backoff:     Exponential{r.InitialBackoff, r.MaxBackoff, r.BackoffMultiplier, ProportionalJitter},
		Codes:       r.Codes,
	}
}

// hedgingPolicyOf returns the policy that is equivalent to a hedgingPolicy: its non-fatal codes are those
// after which the call goes on, without a backoff. There may be none.
func hedgingPolicyOf(h *serviceconfig.Hedging) Policy {
	return Policy{
		MaxAttempts:     h.MaxAttempts,
		Codes:           append([]codes.Code{}, h.NonFatalCodes...),
		Backoff:         Constant(0),
		OverloadBackoff: Constant(0),
		// Whoever wrote the config says that all its methods are safe.
		Hedging: &Hedging{Delay: HedgeAfter(h.Delay), AllMethodsAreSafe: true},
	}
}

// setConfig replaces the service config. Two Retriers with the same one do not share a throttle.
func (o *policyOptions) setConfig(c configPolicies) {
	o.config, o.configUpdate = c, o.update
	delete(o.scopes, scopeThrottle)
	if t := c.read.Throttling; t != nil {
		each := newPerTarget(func() Budget {
			b, _ := NewThrottle(t.MaxTokens, t.TokenRatio) // which are valid, see serviceconfig.Parse
			return b
		}, *t)
		o.give(scopeThrottle, partial{Policy: Policy{Budget: each}, set: fieldBudget, keepsBudget: true})
	}
}

// A configEntry is what one entry of a service config says.
type configEntry struct {
	name string // as in configPolicies
	partial
}

// entryFor returns the entry of the service config that applies to the methods of a pattern.
func (o *policyOptions) entryFor(pattern string) configEntry {
	for _, name := range slices.Concat([]string{pattern}, slices.Collect(patterns.Prefixes(pattern)), []string{""}) {
		if p, named := o.config.entries[name]; named {
			p.attemptsUpdate, p.hedgingUpdate = o.configUpdate, o.configUpdate
			return configEntry{name, p}
		}
	}
	return configEntry{}
}

// A channelKey identifies a policy that is made from the retryPolicy of a channel. gRPC makes a new retryPolicy whenever it reads a config.
type channelKey struct {
	retry any           // gRPC's *RetryPolicy, whose package is internal
	of    *methodPolicy // what the Retrier's own options say
}

// maxChannelPolicies bounds the memory that outdated retryPolicies use.
const maxChannelPolicies = 1000

// fromChannel returns the method's policy with the channel's retryPolicy, if there is one.
func (m *methodPolicies) fromChannel(ch *channel, method string, of *methodPolicy) *methodPolicy {
	retry := ch.config.RetryPolicy
	if retry == nil || m.channels == nil {
		return of
	}
	key := channelKey{retry, of}
	if known := m.channels.Current()[key]; known != nil {
		return known
	}
	list := slices.Sorted(maps.Keys(retry.RetryableStatusCodes))
	p := retryPolicyOf(&serviceconfig.Retry{
		MaxAttempts:       retry.MaxAttempts,
		InitialBackoff:    retry.InitialBackoff,
		MaxBackoff:        retry.MaxBackoff,
		BackoffMultiplier: retry.BackoffMultiplier,
		Codes:             slices.DeleteFunc(list, func(c codes.Code) bool { return c == codes.OK }), // gRPC accepts it, and never retries
	})
	entry := configEntry{entryName(ch.cc, method, retry), WithPolicy(p).callOption().partial}
	resolved := m.resolve(of.level, of.pattern, entry)
	kept, _ := m.channels.Add(key, resolved, maxChannelPolicies)
	if kept == nil {
		m.channels.Clear() // full of what is outdated
		kept = resolved
	}
	return kept
}

// entryName returns the name of the entry of the channel's config that a method's retryPolicy comes from.
func entryName(cc *grpc.ClientConn, method string, retry any) string {
	for _, wider := range []string{"", patterns.ServiceOf(method)} {
		if retry == any(cc.GetMethodConfig(wider).RetryPolicy) {
			return wider
		}
	}
	return method
}
