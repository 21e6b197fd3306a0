package grpcretry

import (
	"fmt"
	"maps"
	"slices"
	"sync"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"

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
// [New] rejects what grpc-go rejects, and an invalid hedgingPolicy; the error contains the path in
// the JSON. docs/service-config.md in the repository lists the differences. Methods with a
// retryPolicy in the channel's own service config are then no longer left to gRPC, see
// [WithResolverServiceConfig].
//
// The default is no service config. A later WithServiceConfig replaces an earlier one, so "{}" removes
// its policies; in an [Retrier.Update] the throttle keeps its tokens if its settings are the same.
func WithServiceConfig(json string) Option {
	read, err := readServiceConfig(json)
	return configOption(func(c *config) {
		if err != nil {
			c.reject(fmt.Errorf("grpcretry: WithServiceConfig: %w", err))
			return
		}
		c.policies.setConfig(read.forRetrier(), c.update)
	})
}

// WithResolverServiceConfig makes the retryPolicy of a channel's own service config the policy of
// its methods, with this library's pushback, limits, budgets and events. The config is read for
// each call, so that a change by the resolver applies to the next call; budgets keep their state.
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
// Without, the calls of a method with a retryPolicy keep gRPC from retrying what it has sent, which
// also turns off most transparent retries. Two retries of gRPC's remain within one attempt: of a call
// that never got a stream, for example because its credentials failed, and of a unary call whose
// server has responded before the request was sent.
//
// The default is false. A later WithResolverServiceConfig replaces an earlier one.
func WithResolverServiceConfig(on bool) Option {
	return configOption(func(c *config) { c.policies.fromChannel = on })
}

// configPolicies are the policies of a service config.
type configPolicies struct {
	read     *serviceconfig.Config
	entries  map[string]*callOption // by "/pkg.Service/Method", "/pkg.Service/" or ""; nil for an entry without a policy
	throttle *callOption            // nil without retryThrottling; see forRetrier
}

func readServiceConfig(json string) (*configPolicies, error) {
	read, err := serviceconfig.Parse(json)
	if err != nil {
		return nil, err
	}
	c := &configPolicies{read: read, entries: map[string]*callOption{}}
	for i := range read.Methods {
		option := optionOf(&read.Methods[i])
		for _, name := range read.Methods[i].Names {
			c.entries[name] = option
		}
	}
	if t := read.Throttling; t != nil {
		if _, err := throttleSettingsOf(t).newThrottle(); err != nil {
			return nil, fmt.Errorf("retryThrottling: %w", err)
		}
	}
	return c, nil
}

// forRetrier returns the policies with a throttle of their own, because two Retriers with the same
// option do not share one.
func (c *configPolicies) forRetrier() *configPolicies {
	own := *c
	if t := c.read.Throttling; t != nil {
		own.throttle = throttleOption(t)
	}
	return &own
}

// optionOf returns the option that is equivalent to an entry; nil if the entry has no policy.
func optionOf(m *serviceconfig.Method) *callOption {
	var p Policy
	switch {
	case m.Retry != nil:
		p = retryPolicyOf(m.Retry)
	case m.Hedging != nil:
		p.Hedging = &Hedging{
			MaxAttempts:       m.Hedging.MaxAttempts,
			Delay:             HedgeAfter(m.Hedging.Delay),
			NonFatalCodes:     m.Hedging.NonFatalCodes,
			AllMethodsAreSafe: true, // whoever wrote the config says so
		}
	default:
		return nil
	}
	return &callOption{name: "WithPolicy", parts: p.parts()}
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

func throttleSettingsOf(t *serviceconfig.Throttling) throttleSettings {
	return throttleSettings{t.MaxTokens, t.TokenRatio}
}

// throttleOption returns the option that is equivalent to a retryThrottling, which is valid.
func throttleOption(t *serviceconfig.Throttling) *callOption {
	settings := throttleSettingsOf(t)
	each := &perTarget{settings: settings, newBudget: func() Budget {
		b, _ := settings.newThrottle()
		return b
	}}
	o := &callOption{name: nameBudget, budgets: each, set: func(p *Policy) { p.Budget = each }}
	o.keep = o.keepBudgets
	return o
}

// setConfig replaces the service config. A throttle with the same settings keeps its state.
func (o *policyOptions) setConfig(c *configPolicies, update int) {
	if o.config != nil && o.config.throttle != nil && c.throttle != nil && o.configUpdate < update {
		if kept := c.throttle.keep(o.config.throttle); kept != nil {
			c = &configPolicies{c.read, c.entries, kept}
		}
	}
	o.config, o.configUpdate = c, update
}

// addTo adds the config's scopes for a method.
func (c *configPolicies) addTo(s *scopes, service, method string, update int) {
	s[rankConfigDefault].name = scopeAll
	if c.throttle != nil {
		s[rankConfigDefault].opts = s[rankConfigDefault].opts.with(c.throttle, update)
	}
	at, entry := rankConfigMethod, method
	if _, named := c.entries[method]; !named || method == "" {
		at, entry = rankConfigService, service
	}
	if _, named := c.entries[service]; at == rankConfigService && (!named || service == "") {
		at, entry = rankConfigDefault, ""
	}
	if option := c.entries[entry]; option != nil {
		s[at].opts = s[at].opts.with(option, update)
	}
}

// channelPolicies are the policies made from the retryPolicies of channels.
type channelPolicies struct {
	mu    sync.RWMutex
	known map[channelKey]*methodPolicy // guarded by mu
}

// A channelKey identifies such a policy. gRPC makes a new retryPolicy whenever it reads a config.
type channelKey struct {
	retry any           // gRPC's *RetryPolicy, whose package is internal
	of    *methodPolicy // what the Retrier's own options say
}

// maxChannelPolicies bounds the memory that outdated retryPolicies use.
const maxChannelPolicies = 1000

// fromChannel returns the method's policy with the channel's retryPolicy, if there is one.
func (m *methodPolicies) fromChannel(cc *grpc.ClientConn, method string, of *methodPolicy) *methodPolicy {
	retry := cc.GetMethodConfig(method).RetryPolicy
	if retry == nil {
		return of
	}
	key := channelKey{retry, of}
	m.channels.mu.RLock()
	known := m.channels.known[key]
	m.channels.mu.RUnlock()
	if known != nil {
		return known
	}
	s := of.scopes.withoutConfig()
	at := rankOf(cc, method, retry)
	option := &callOption{parts: retryPolicyOf(&serviceconfig.Retry{
		MaxAttempts:       retry.MaxAttempts,
		InitialBackoff:    retry.InitialBackoff,
		MaxBackoff:        retry.MaxBackoff,
		BackoffMultiplier: retry.BackoffMultiplier,
		Codes:             withoutOK(slices.Sorted(maps.Keys(retry.RetryableStatusCodes))),
	}).parts()}
	s[at].opts = s[at].opts.with(option, 0)
	return m.channels.add(key, &methodPolicy{m.options.resolve(m.fallback, s), s})
}

// withoutOK drops OK, which gRPC accepts among the codes, and never retries.
func withoutOK(list []codes.Code) []codes.Code {
	return slices.DeleteFunc(list, func(c codes.Code) bool { return c == codes.OK })
}

func (c *channelPolicies) add(key channelKey, p *methodPolicy) *methodPolicy {
	c.mu.Lock()
	defer c.mu.Unlock()
	if known := c.known[key]; known != nil {
		return known
	}
	if c.known == nil || len(c.known) >= maxChannelPolicies {
		c.known = map[channelKey]*methodPolicy{}
	}
	c.known[key] = p
	return p
}

// withoutConfig returns a copy of the scopes without a service config's entry, but with its throttle.
func (s *scopes) withoutConfig() *scopes {
	c := *s
	c[rankConfigService].opts, c[rankConfigMethod].opts = nil, nil
	c[rankConfigDefault].name = scopeAll
	c[rankConfigDefault].opts = slices.DeleteFunc(slices.Clone(c[rankConfigDefault].opts), func(o givenOption) bool {
		return o.name != nameBudget
	})
	return &c
}

// rankOf returns the scope of the channel's config that a method's retryPolicy comes from.
func rankOf(cc *grpc.ClientConn, method string, retry any) rank {
	switch retry {
	case cc.GetMethodConfig("").RetryPolicy:
		return rankConfigDefault
	case cc.GetMethodConfig(serviceOf(method)).RetryPolicy:
		return rankConfigService
	default:
		return rankConfigMethod
	}
}
