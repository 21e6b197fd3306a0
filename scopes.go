package grpcretry

import (
	"fmt"
	"iter"
	"maps"
	"slices"
	"strings"
	"unicode/utf8"

	"google.golang.org/grpc"
)

// This file says which options apply to a method: the scopes, their order, and how an Update
// changes them. policy.go says what a policy is.

// A rank is the place of a scope in the order in which scopes are applied: a later scope wins.
type rank int

const (
	rankConfigDefault rank = iota // a service config, for all methods
	rankAll
	rankLevel         // WithIdempotencyLevel
	rankConfigService // a service config, for one service
	rankService       // WithMethod, for one service
	rankConfigMethod  // a service config, for one method
	rankMethod        // WithMethod, for one method
	rankCall
	ranks
)

const (
	scopeAll  = "all"
	scopeCall = "call"
)

// A scope holds the options for all methods, for those of a level, a service config's entry or a
// [WithMethod] pattern, or for one call.
type scope struct {
	name  string
	opts  optionList
	wider []scope // of the same rank, to be applied before: "/http/" for "/http/api.example.com/"
}

// scopes are all scopes that apply to a method or a call.
type scopes [ranks]scope

// An optionList holds the options of one scope in the order in which they are applied, at most one
// of each name. It is never changed in place.
type optionList []givenOption

// A givenOption is an option and the number of the [Retrier.Update] that it comes from, 0 for [New].
type givenOption struct {
	*callOption
	update int
}

// with returns the list with one more option, in place of an earlier one of the same name. State
// outlives an Update only: among the options of one New or one Update, the last is the one in effect.
func (l optionList) with(o *callOption, update int) optionList {
	if o.set == nil {
		for _, part := range o.parts {
			l = l.with(part, update)
		}
		return l
	}
	longer := make(optionList, 0, len(l)+1)
	for _, earlier := range l {
		switch {
		case earlier.name != o.name:
			longer = append(longer, earlier)
		case o.keep != nil && earlier.update < update:
			if kept := o.keep(earlier.callOption); kept != nil {
				o = kept
			}
		}
	}
	return append(longer, givenOption{o, update})
}

// turnsOn reports whether the option may turn retries or hedging on.
func (o *callOption) turnsOn() bool { return o.name == nameAttempts || o.name == nameHedging }

// policyOptions are the options that policies are made from. An Update changes a copy.
type policyOptions struct {
	all      optionList
	levels   [levels]optionList
	patterns map[string]optionList // by "/pkg.Service/Method" or "/pkg.Service/", see checkPattern

	config       *configPolicies // from WithServiceConfig; otherwise nil
	configUpdate int             // the number of the Update that it comes from
	fromChannel  bool            // WithResolverServiceConfig

	// off is the number of the Update that turned everything off; 0 if everything is on. Options of
	// narrower scopes that are older do not turn it on again.
	off int
}

func (o *policyOptions) clone() policyOptions {
	c := *o
	c.patterns = maps.Clone(o.patterns)
	return c
}

// addForAll adds an option for all methods. In an Update, Disable is a switch that reaches the
// narrower scopes as well, until a later Update turns retries or hedging on for all methods.
func (o *policyOptions) addForAll(opt *callOption, update int) {
	switch {
	case opt.set == nil:
		for _, part := range opt.parts {
			o.addForAll(part, update)
		}
		return
	case opt.name == nameOff && update > 0:
		o.off = update
		return
	case opt.turnsOn():
		o.off = 0
	}
	o.all = o.all.with(opt, update)
}

// addFor adds the options for the methods of a pattern.
func (o *policyOptions) addFor(pattern string, opts []*callOption, update int) {
	if o.patterns == nil {
		o.patterns = map[string]optionList{}
	}
	list := o.patterns[pattern]
	for _, opt := range opts {
		list = list.with(opt, update)
	}
	o.patterns[pattern] = list
}

// addForLevel adds the options for the methods of an idempotency level.
func (o *policyOptions) addForLevel(l level, opts []*callOption, update int) {
	for _, opt := range opts {
		o.levels[l] = o.levels[l].with(opt, update)
	}
}

// scopesOf returns the scopes of a method. The service and the method may be "" if no option names
// them.
func (o *policyOptions) scopesOf(l level, service, method string) *scopes {
	s := &scopes{
		rankAll:     {name: scopeAll, opts: o.all},
		rankLevel:   {name: l.String(), opts: o.levels[l]},
		rankService: {service, o.patterns[service], o.widerThan(service)},
		rankMethod:  {name: method, opts: o.patterns[method]},
	}
	if o.config != nil {
		o.config.addTo(s, service, method, o.configUpdate)
	}
	return s
}

// widerThan returns the scopes of the patterns that a service's pattern begins with, the widest first.
// Only the names of functions have any, see [Retrier.Do].
func (o *policyOptions) widerThan(service string) []scope {
	var wider []scope
	for prefix := range prefixesOf(service) {
		if opts, named := o.patterns[prefix]; named && prefix != service {
			wider = append(wider, scope{name: prefix, opts: opts})
		}
	}
	slices.Reverse(wider)
	return wider
}

// resolve applies the scopes, from the widest to the narrowest, then the call's own options, and
// fills in the defaults.
func (o *policyOptions) resolve(fallback budgets, s *scopes, own ...*callOption) *policy {
	p := &policy{budgetScope: scopeAll}
	for r := range s {
		for _, wider := range s[r].wider {
			o.apply(p, &wider, rank(r))
		}
		o.apply(p, &s[r], rank(r))
	}
	p.within(scopeCall, func() {
		for _, opt := range own {
			opt.applyTo(&p.Policy)
		}
	})
	// gRPC's own retries would multiply with those by a service config that is read here, might run a method
	// twice, and would go on while everything is off.
	p.overGRPC = o.config != nil || o.fromChannel || p.UnsentOnly || o.off > 0
	p.fillDefaults(fallback)
	return p
}

// apply applies one scope to a policy.
func (o *policyOptions) apply(p *policy, s *scope, r rank) {
	p.within(s.name, func() {
		for _, opt := range s.opts {
			if r == rankAll || opt.update >= o.off || !opt.turnsOn() {
				opt.set(&p.Policy)
			}
		}
		if r == rankAll && o.off > 0 {
			p.setMaxAttempts(1)
		}
	})
}

// within notes the scope that the policy's budget comes from while apply applies that scope.
func (p *policy) within(scope string, apply func()) {
	wider := p.Budget
	p.Budget = nil
	apply()
	if p.Budget == nil {
		p.Budget = wider
	} else {
		p.budgetScope = scope
	}
}

// methodPolicies holds the policies for all methods. It never changes; an Update makes a new one.
type methodPolicies struct {
	options  policyOptions
	fallback budgets
	tables   [levels]policyTable // one for each level, or only that of levelUnknown
	leveled  bool                // there are options for levels
	plain    *methodPolicy       // the policy for every method, if there is only one; otherwise nil
	channels *channelPolicies    // nil without WithResolverServiceConfig
	budgets  map[string]Budget   // the budgets of all scopes, by the scopes' names
}

// A policyTable holds the policies for all methods of one idempotency level. The policy for an exact
// method wins over the one for its service, and that over the one for all methods.
type policyTable struct {
	all      *methodPolicy
	services map[string]*methodPolicy // by "/pkg.Service/"
	methods  map[string]*methodPolicy // by "/pkg.Service/Method"
}

// A methodPolicy is a policy and the scopes it was resolved from, for calls that add a scope.
type methodPolicy struct {
	*policy
	scopes *scopes
}

func newMethodPolicies(fallback budgets, o policyOptions) *methodPolicies {
	m := &methodPolicies{options: o, fallback: fallback, budgets: map[string]Budget{}}
	for l := range o.levels {
		m.leveled = m.leveled || len(o.levels[l]) > 0
	}
	for l := range m.tables {
		if level(l) == levelUnknown || m.leveled {
			m.tables[l] = m.newTable(level(l))
		}
	}
	if o.fromChannel {
		m.channels = &channelPolicies{}
	}
	if t := &m.tables[levelUnknown]; !m.leveled && !o.fromChannel && len(t.services)+len(t.methods) == 0 {
		m.plain = t.all
	}
	return m
}

func (m *methodPolicies) newTable(l level) policyTable {
	t := policyTable{services: map[string]*methodPolicy{}, methods: map[string]*methodPolicy{}}
	t.all = m.resolved(m.options.scopesOf(l, "", ""))
	for _, pattern := range m.options.named() {
		if service := serviceOf(pattern); pattern == service {
			t.services[pattern] = m.resolved(m.options.scopesOf(l, service, ""))
		} else {
			t.methods[pattern] = m.resolved(m.options.scopesOf(l, service, pattern))
		}
	}
	return t
}

// named returns the services and methods that an option or the service config names.
func (o *policyOptions) named() []string {
	named := slices.Collect(maps.Keys(o.patterns))
	if o.config != nil {
		for pattern := range o.config.entries {
			if _, both := o.patterns[pattern]; !both && pattern != "" {
				named = append(named, pattern)
			}
		}
	}
	return named
}

func (m *methodPolicies) resolved(s *scopes) *methodPolicy {
	p := &methodPolicy{m.options.resolve(m.fallback, s), s}
	m.budgets[p.budgetScope] = p.Budget
	return p
}

// of returns a method's policy, without what the channel's service config says. Every call runs it.
func (m *methodPolicies) of(method string) *methodPolicy {
	if m.plain != nil {
		return m.plain
	}
	if m.leveled {
		return m.tables[levelOf(method)].of(method)
	}
	return m.tables[levelUnknown].of(method)
}

// shown is of for readers of a policy who make no call.
func (m *methodPolicies) shown(method string) *methodPolicy {
	if m.leveled {
		return m.tables[lookUpLevel(method)].of(method)
	}
	return m.of(method)
}

func (t *policyTable) of(method string) *methodPolicy {
	if p, ok := t.methods[method]; ok {
		return p
	}
	for prefix := range prefixesOf(method) {
		if p, ok := t.services[prefix]; ok {
			return p
		}
	}
	if len(t.services) > 0 && len(method) > 1 && strings.LastIndexByte(method, '/') == 0 {
		if p, ok := t.services[method+"/"]; ok { // a function's name may have no second slash
			return p
		}
	}
	return t.all
}

// forCall returns the policy for one call: its method's policy, changed by the channel's service
// config and by the call's own options.
func (m *methodPolicies) forCall(cc *grpc.ClientConn, method string, own []*callOption) (*policy, error) {
	if len(own) > 0 {
		if err := firstError(own); err != nil {
			return nil, err
		}
	}
	return m.withOwn(m.on(cc, method), own), nil
}

// on returns a method's policy on a channel; cc may be nil.
func (m *methodPolicies) on(cc *grpc.ClientConn, method string) *methodPolicy {
	of := m.of(method)
	if m.channels != nil && cc != nil {
		of = m.fromChannel(cc, method, of)
	}
	return of
}

// withOwn returns the policy with a call's own options, which are valid.
func (m *methodPolicies) withOwn(of *methodPolicy, own []*callOption) *policy {
	if len(own) == 0 {
		return of.policy
	}
	return m.options.resolve(m.fallback, of.scopes, own...)
}

// serviceOf returns "/pkg.Service/" for "/pkg.Service/Method".
func serviceOf(method string) string { return method[:strings.LastIndexByte(method, '/')+1] }

// prefixesOf returns the patterns that apply to all names that begin with them, the longest first:
// "/pkg.Service/" for a method, "/http/api.example.com/" and "/http/" for "/http/api.example.com/GET".
func prefixesOf(name string) iter.Seq[string] {
	return func(yield func(string) bool) {
		for prefix := serviceOf(name); len(prefix) > 1 && yield(prefix); {
			prefix = serviceOf(prefix[:len(prefix)-1])
		}
	}
}

// checkPattern accepts "/pkg.Service/Method" and "/pkg.Service/" and, for functions, patterns with
// more slashes.
func checkPattern(pattern string) error {
	words := strings.Split(pattern, "/")
	last := len(words) - 1
	if last < 2 || words[0] != "" || slices.Contains(words[1:last], "") || !utf8.ValidString(pattern) {
		return fmt.Errorf(`pattern %q, want "/pkg.Service/Method" or "/pkg.Service/"`, pattern)
	}
	return nil
}
