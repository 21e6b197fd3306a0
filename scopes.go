package grpcretry

import (
	"fmt"
	"slices"
	"strings"

	"google.golang.org/protobuf/types/descriptorpb"

	"github.com/grpcretry/grpcretry/internal/bounded"
	"github.com/grpcretry/grpcretry/internal/patterns"
	"github.com/grpcretry/grpcretry/internal/protos"
)

// This file says which options apply to a method: the scopes, their order, and how an Update
// changes them. policy.go says what a policy is.

// The names of scopes. The others are those of the levels, and the patterns of [WithMethod].
const (
	scopeAll      = "all"
	scopeCall     = "call"
	scopeThrottle = "retryThrottling" // of [WithServiceConfig], wider than all others
)

// policyOptions are the options that policies are made from. An Update changes a copy.
type policyOptions struct {
	scopes map[string]partial // by name
	update int                // the number of the Update that these options are the result of, 0 for New

	config       configPolicies // from WithServiceConfig
	configUpdate int            // the number of the Update that it comes from
	fromChannel  bool           // WithResolverServiceConfig

	// off is the number of the Update that turned everything off; 0 if everything is on. Options of
	// narrower scopes that are older do not turn it on again.
	off int
}

// give adds options to a scope. In an Update, Disable for all methods is a switch that reaches the
// narrower scopes as well, until attempts are given for all methods, or hedging in a later Update.
func (o *policyOptions) give(scope string, opts partial) {
	if scope == scopeAll && o.update > 0 && opts.set.has(switchOff) {
		o.off, opts.set = o.update, opts.set&^switchOff
	}
	if scope == scopeAll && (opts.set.has(fieldMaxAttempts) || opts.set.has(fieldHedging) && o.off < o.update) {
		o.off = 0
	}
	if o.scopes == nil {
		o.scopes = map[string]partial{}
	}
	p := o.scopes[scope]
	opts.attemptsUpdate, opts.hedgingUpdate = o.update, o.update
	p.add(scope, &opts)
	o.scopes[scope] = p
}

// keepState keeps the state of the scopes before an Update. It outlives an Update only: among the options
// of one New or one Update, the last is the one in effect.
func (o *policyOptions) keepState(before map[string]partial) {
	for scope, p := range o.scopes {
		o.scopes[scope] = p.keepState(before[scope])
	}
}

// isPattern reports whether a scope is that of a WithMethod.
func isPattern(scope string) bool { return strings.HasPrefix(scope, "/") }

// merge adds up the scopes of a pattern's methods, from the widest to the narrowest; "" stands for the
// methods that no pattern names. The entry of the service config comes before the options in Go of its rank.
func (o *policyOptions) merge(l level, pattern string, entry configEntry) (p partial) {
	add := func(scope string) {
		own := o.scopes[scope]
		p.add(scope, own.since(o.off))
	}
	addEntry := func(isItsRank bool) {
		if isItsRank {
			p.add("", entry.since(o.off))
		}
	}
	all, throttle := o.scopes[scopeAll], o.scopes[scopeThrottle]
	p.add(scopeAll, &throttle)
	addEntry(entry.name == "")
	p.add(scopeAll, &all)
	if o.off > 0 {
		p.add(scopeAll, &partial{set: switchOff})
	}
	add(l.String())
	addEntry(entry.name != "" && patterns.IsWide(entry.name))
	for _, prefix := range slices.Backward(slices.Collect(patterns.Prefixes(pattern))) {
		add(prefix)
	}
	addEntry(!patterns.IsWide(entry.name))
	if !patterns.IsWide(pattern) {
		add(pattern)
	}
	return p
}

// methodPolicies holds the policies for all methods. Apart from what it remembers, it never changes; an Update makes a new one.
type methodPolicies struct {
	options  policyOptions
	fallback budgets
	tables   [protos.Levels]policyTable         // one for each level, or only that of levelUnknown
	leveled  bool                               // there are options for levels
	only     *methodPolicy                      // the policy for every method, if there is only one; otherwise nil
	stubs    bounded.Map[string, *methodPolicy] // by method, see ofStub
	// The policies made from the retryPolicies of channels; nil without WithResolverServiceConfig.
	channels *bounded.Map[channelKey, *methodPolicy]
	budgets  map[string]Budget // the budgets of all scopes, by the scopes' names
}

// A policyTable holds the policies for all methods of one idempotency level, by patterns.
type policyTable = patterns.Table[*methodPolicy]

// A methodPolicy is a policy and what it was made from, for calls that add a scope.
type methodPolicy struct {
	*policy
	given   partial
	level   level // of the table; unknown for every method if no option is for a level, see protos.LevelOf
	pattern string
}

func newMethodPolicies(fallback budgets, o policyOptions) *methodPolicies {
	m := &methodPolicies{options: o, fallback: fallback, budgets: map[string]Budget{}}
	for l := range level(protos.Levels) {
		m.leveled = m.leveled || o.scopes[l.String()].set != 0
	}
	for l := range m.tables {
		if level(l) == levelUnknown || m.leveled {
			m.tables[l] = m.newTable(level(l))
		}
	}
	if o.fromChannel {
		m.channels = &bounded.Map[channelKey, *methodPolicy]{}
	}
	if t := m.tables[levelUnknown]; !m.leveled && len(t) == 1 {
		m.only = t[""]
	}
	return m
}

func (m *methodPolicies) newTable(l level) policyTable {
	t := policyTable{"": nil}
	for scope := range m.options.scopes {
		if isPattern(scope) {
			t[scope] = nil
		}
	}
	for name := range m.options.config.entries {
		t[name] = nil
	}
	for pattern := range t {
		p := m.resolve(l, pattern, m.options.entryFor(pattern))
		t[pattern], m.budgets[p.budgetScope] = p, p.Budget
	}
	return t
}

// resolve makes the policy of a pattern's methods.
func (m *methodPolicies) resolve(l level, pattern string, entry configEntry) *methodPolicy {
	given := m.options.merge(l, pattern, entry)
	return &methodPolicy{m.finish(&given), given, l, pattern}
}

// finish makes a policy of what the scopes add up to.
func (m *methodPolicies) finish(given *partial) *policy {
	p := newPolicy(given, m.fallback)
	// gRPC's own retries would multiply with those by a service config that is read here, might run a method
	// twice, and would go on while everything is off.
	p.overGRPC = m.options.config.read != nil || m.options.fromChannel || p.UnsentOnly || m.options.off > 0
	return p
}

// isOff reports whether a policy makes one attempt whatever the channel will say: that has no narrower scope, or is older than
// the Update that has turned everything off.
func (m *methodPolicies) isOff(p *policy, ch *channel) bool {
	isNarrowest := p.attemptsScope == scopeCall || isPattern(p.attemptsScope) && !patterns.IsWide(p.attemptsScope)
	return p.MaxAttempts == 1 && (isNarrowest || m.options.off > 0 && ch.config.RetryPolicy == nil)
}

// of returns a method's policy, without what the channel's service config says. Every call runs it.
func (m *methodPolicies) of(method string) *methodPolicy {
	if m.only != nil {
		return m.only
	}
	if m.leveled {
		return m.tables[protos.LevelOf(method)].Of(method)
	}
	return m.tables[levelUnknown].Of(method)
}

// ofStub is of for the call of a generated stub: from the second call of a method on, it takes half the time. Other calls' methods are
// not remembered, because they may have any number of names.
func (m *methodPolicies) ofStub(method string) *methodPolicy {
	const most = 100 // for each, the others are copied
	return m.stubs.Get(method, most, m.of)
}

// shown is like of, for callers that only display the policy.
func (m *methodPolicies) shown(method string) *methodPolicy {
	if m.leveled {
		return m.tables[protos.LookUpLevel(method)].Of(method)
	}
	return m.of(method)
}

// on returns a method's policy on a channel.
func (m *methodPolicies) on(ch *channel, method string) *methodPolicy {
	return m.fromChannel(ch, method, m.of(method))
}

// withOwn returns the policy with a call's own options, which are valid.
func (m *methodPolicies) withOwn(of *methodPolicy, own []*policyOption) *policy {
	if len(own) == 0 {
		return of.policy
	}
	given := of.given
	for _, o := range own {
		given.add(scopeCall, &o.partial)
	}
	return m.finish(&given)
}

// WithIdempotencyLevel applies opts to all methods whose proto declares the level l, with
// "option idempotency_level". Streams are included. The level is looked up on a method's first
// call, among the protos that are linked into the program: importing the generated code links
// them. IDEMPOTENCY_UNKNOWN stands for methods that declare nothing, and for those that are not
// linked.
//
// The scope is narrower than all methods and wider than a service: an option for the level wins over
// one for all methods, and one from [WithMethod] wins over both. [New] rejects other levels, nil
// options, and [WithHedging] for IDEMPOTENCY_UNKNOWN without AllMethodsAreSafe. A second
// WithIdempotencyLevel with the same level adds its options after those of the first.
func WithIdempotencyLevel(l descriptorpb.MethodOptions_IdempotencyLevel, opts ...CallOption) Option {
	opts = slices.Clone(opts)
	return configOption(func(c *config) {
		if l < 0 || l >= protos.Levels {
			c.reject(fmt.Errorf("grpcretry: WithIdempotencyLevel: level %d, want IDEMPOTENCY_UNKNOWN, NO_SIDE_EFFECTS or IDEMPOTENT", l))
			return
		}
		c.give(l.String(), "WithIdempotencyLevel "+l.String(), opts)
	})
}

// WithSafeMethods is the preset for most programs, in one line: methods whose proto declares that they
// have no side effects, or are idempotent, are retried, and every other one only if that cannot run it
// twice. It stands for [WithUnsentOnly](true) for all methods, and false for the levels NO_SIDE_EFFECTS and
// IDEMPOTENT, see [WithIdempotencyLevel]. So [WithMethod] opens, or closes, single methods and services, and
// a later WithUnsentOnly replaces the part for all methods.
//
// Functions, see [Retrier.Do], and HTTP requests declare nothing, so they count as other methods: open the
// safe ones with WithMethod("/sql/", WithUnsentOnly(false)).
func WithSafeMethods() Option {
	return configOption(func(c *config) {
		c.give(scopeAll, "WithSafeMethods", []CallOption{WithUnsentOnly(true)})
		for _, l := range []level{descriptorpb.MethodOptions_NO_SIDE_EFFECTS, descriptorpb.MethodOptions_IDEMPOTENT} {
			c.give(l.String(), "WithSafeMethods", []CallOption{WithUnsentOnly(false)})
		}
	})
}

type level = protos.Level

const levelUnknown = descriptorpb.MethodOptions_IDEMPOTENCY_UNKNOWN
