package grpcretry

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
)

// The defaults of a [Policy].
const (
	defaultMaxAttempts    = 4
	defaultMaxServerDelay = 5 * time.Minute
	defaultConnectWait    = 10 * time.Second
	defaultBufferLimit    = 256 << 10
)

// A Policy says how the calls of a method are retried. In a Policy given to
// [WithPolicy] a zero field means "as below": as a wider scope has it, down to the
// default. [Retrier.Policy] returns one with every default filled in.
//
// Each field has an option of its own that says more: MaxAttempts is
// [WithMaxAttempts], and so on.
type Policy struct {
	MaxAttempts     int          // attempts, the first included; default 4
	Backoff         Backoff      // default Exponential{}: full jitter, 100 ms doubling to 5 s
	OverloadBackoff Backoff      // after RESOURCE_EXHAUSTED; default 1 s doubling to 20 s, or Backoff if that is set
	Codes           []codes.Code // retried; default UNAVAILABLE and RESOURCE_EXHAUSTED
	// Classifier is asked before Codes; default nobody.
	Classifier func(context.Context, Attempt) Classification

	AttemptTimeout time.Duration // default none
	MaxElapsed     time.Duration // default none
	MaxServerDelay time.Duration // default 5 min; negative: no limit
	ConnectWait    time.Duration // default 10 s; negative: calls do not wait for a connection

	Budget Budget // default NewRatioBudget(RatioBudget{}), one per Retrier and target

	BufferLimit     int  // bytes to replay of one stream, default 256 KiB; -1: streams pass through
	CommitOnHeaders bool // default false; only WithCommitOnHeaders(false) can take a true back

	Hedging *Hedging // default nil: one attempt at a time
}

// over lays the non-zero fields of p over those of s.
func (p Policy) overlay(s *Policy) {
	if p.MaxAttempts != 0 {
		s.setMaxAttempts(p.MaxAttempts)
	}
	if p.Hedging != nil {
		s.setHedging(p.Hedging)
	}
	if p.Budget != nil {
		s.Budget = p.Budget
	}
	if p.Backoff != nil {
		s.Backoff = p.Backoff
	}
	if p.OverloadBackoff != nil {
		s.OverloadBackoff = p.OverloadBackoff
	}
	if p.Codes != nil {
		s.Codes = p.Codes
	}
	if p.Classifier != nil {
		s.Classifier = p.Classifier
	}
	setIfGiven(&s.AttemptTimeout, p.AttemptTimeout)
	setIfGiven(&s.MaxElapsed, p.MaxElapsed)
	setIfGiven(&s.MaxServerDelay, p.MaxServerDelay)
	setIfGiven(&s.ConnectWait, p.ConnectWait)
	setIfGiven(&s.BufferLimit, p.BufferLimit)
	setIfGiven(&s.CommitOnHeaders, p.CommitOnHeaders)
}

// maxAttempts sets the limit; 1 turns everything off.
func (p *Policy) setMaxAttempts(n int) {
	p.MaxAttempts = n
	if n == 1 {
		p.Hedging = nil
	}
}

// hedge turns hedging on, also where retries are off.
func (p *Policy) setHedging(h *Hedging) {
	filled := *h
	filled.MaxAttempts = orDefault(h.MaxAttempts, defaultHedgedAttempts)
	p.Hedging = &filled
}

func setIfGiven[T comparable](below *T, above T) { *below = orDefault(above, *below) }

// check finds what cannot be meant. Zero fields are fine.
func (p Policy) check() error {
	for _, field := range []struct {
		name string
		err  error
	}{
		{"MaxAttempts", checkIf(p.MaxAttempts != 0, checkMaxAttempts, p.MaxAttempts)},
		{"Backoff", checkIf(p.Backoff != nil, checkBackoff, p.Backoff)},
		{"OverloadBackoff", checkIf(p.OverloadBackoff != nil, checkBackoff, p.OverloadBackoff)},
		{"Codes", checkIf(p.Codes != nil, checkCodes, p.Codes)},
		{"AttemptTimeout", checkNotNegative(p.AttemptTimeout)},
		{"MaxElapsed", checkNotNegative(p.MaxElapsed)},
		{"Budget", checkIf(p.Budget != nil, checkBudget, p.Budget)},
		{"Hedging", checkIf(p.Hedging != nil, (*Hedging).check, p.Hedging)},
		{"BufferLimit", checkIf(p.BufferLimit != -1, checkBufferLimit, p.BufferLimit)},
	} {
		if field.err != nil {
			return fmt.Errorf("%s: %w", field.name, field.err)
		}
	}
	return nil
}

func checkIf[T any](set bool, check func(T) error, v T) error {
	if !set {
		return nil
	}
	return check(v)
}

// checkSelf returns what is wrong with one of this package's own backoffs, budgets or delays;
// nil for those of other packages, which cannot be checked.
func checkSelf(v any) error {
	if c, ok := v.(interface{ check() error }); ok {
		return c.check()
	}
	return nil
}

func checkMaxAttempts(n int) error {
	if n < 1 {
		return fmt.Errorf("%d attempts, want at least 1", n)
	}
	return nil
}

func checkNotNegative(d time.Duration) error {
	if d < 0 {
		return fmt.Errorf("%v is negative", d)
	}
	return nil
}

func checkBufferLimit(bytes int) error {
	if bytes < 0 {
		return fmt.Errorf("%d bytes is negative", bytes)
	}
	return nil
}

// A policy is what one call obeys: every field resolved, and in the form that the
// loops use. It is never changed.
type policy struct {
	Policy
	codes       codeSet
	budgetScope string // the scope that Budget comes from

	// hedged is the policy of calls that are hedged: of its retries, those of Hedging. nil
	// where there is no Hedging. In hedged itself, hedges is true.
	hedged *policy
	hedges bool
}

// A scope is where options hold: all methods, the pattern of a [WithMethod], or one call.
type scope struct {
	name string
	opts []*callOption
}

const (
	scopeAll  = "all"
	scopeCall = "call"
)

// resolve lays the scopes over each other and fills in the defaults.
func resolve(fallback budgets, scopes ...scope) *policy {
	p := &policy{budgetScope: scopeAll}
	for _, s := range scopes {
		below := p.Budget
		p.Budget = nil
		for _, o := range s.opts {
			o.set(&p.Policy)
		}
		if p.Budget == nil {
			p.Budget = below
		} else {
			p.budgetScope = s.name
		}
	}
	p.fillDefaults(fallback)
	return p
}

func (p *policy) fillDefaults(fallback budgets) {
	p.MaxAttempts = orDefault(p.MaxAttempts, defaultMaxAttempts)
	if p.OverloadBackoff == nil {
		p.OverloadBackoff = p.Backoff
	}
	if p.OverloadBackoff == nil {
		p.OverloadBackoff = Exponential{Base: overloadBase, Max: overloadMax}
	}
	if p.Backoff == nil {
		p.Backoff = Exponential{}
	}
	p.Backoff, p.OverloadBackoff = withDefaults(p.Backoff), withDefaults(p.OverloadBackoff)
	if p.Codes == nil {
		p.Codes = []codes.Code{codes.ResourceExhausted, codes.Unavailable}
	}
	p.codes = newCodeSet(p.Codes)
	p.MaxServerDelay = orDefault(p.MaxServerDelay, defaultMaxServerDelay)
	p.ConnectWait = orDefault(p.ConnectWait, defaultConnectWait)
	p.BufferLimit = orDefault(p.BufferLimit, defaultBufferLimit)
	if p.Budget == nil {
		p.Budget = fallback.retries
	}
	if p.Hedging != nil {
		if p.Hedging.Budget == nil {
			p.Hedging.Budget = fallback.hedges
		}
		p.hedged = p.forHedging()
	}
}

// A mode is how a call goes.
type mode uint8

const (
	modePassThrough mode = iota // straight to gRPC, without a budget, an event or a retry
	modeRetried
	modeHedged
)

// modeOf is the mode of calls that can be hedged if their method is; desc is nil for unary ones.
func (p *policy) modeOf(desc *grpc.StreamDesc) mode {
	switch {
	case desc != nil && p.BufferLimit < 0:
		return modePassThrough
	case p.hedged != nil:
		return modeHedged
	default:
		return p.modeUnhedged()
	}
}

func (p *policy) modeUnhedged() mode {
	if p.MaxAttempts == 1 {
		return modePassThrough
	}
	return modeRetried
}

// forHedging is the policy with what hedging changes: how many attempts, and after which
// codes there is another.
func (p *policy) forHedging() *policy {
	hedged := *p
	hedged.hedges = true
	hedged.MaxAttempts = p.Hedging.MaxAttempts
	if p.Hedging.NonFatalCodes != nil {
		hedged.Codes = p.Hedging.NonFatalCodes
		hedged.codes = newCodeSet(hedged.Codes)
	}
	return &hedged
}

// filled writes the defaults of our own backoffs out, for who reads a Policy.
func withDefaults(b Backoff) Backoff {
	switch b := b.(type) {
	case Exponential:
		return b.withDefaults()
	case Decorrelated:
		return b.withDefaults()
	default:
		return b
	}
}

// public is the policy as a user may see and change it.
func (p *policy) exported() Policy {
	shown := p.Policy
	shown.Codes = slices.Clone(p.Codes)
	slices.Sort(shown.Codes)
	if p.Hedging != nil {
		hedging := *p.Hedging
		hedging.NonFatalCodes = slices.Clone(hedging.NonFatalCodes)
		shown.Hedging = &hedging
	}
	return shown
}

// budgets are what calls spend from that have been given no budget.
type budgets struct{ retries, hedges Budget }

func defaultBudgets() budgets {
	return budgets{retries: perTargetRatio(defaultRatioBudget), hedges: &perTarget{newBudget: newHedgeBudget, settings: hedgeRatioBudget}}
}

// hedgeRatioBudget is 10% of answered calls. The window is short, because what is saved up in
// good times would be spent at once when everything becomes slow, on top of the share: with a
// window of 10 s that alone overloads a server that has a fifth of its capacity to spare (study
// tail-slow in docs/herd.md). The reserve keeps one hedge for clients with few calls. It is
// empty at the start: hedges are an extra that a fleet which has just started, or a server
// that answers nobody, can do without.
var hedgeRatioBudget = RatioBudget{Ratio: 0.1, Reserve: 1, Window: time.Second}

func newHedgeBudget() Budget {
	b := newRatioBudget(hedgeRatioBudget)
	b.reserve = 0
	return b
}

// budgetFor returns what calls to a target spend from, if they spend from b.
func budgetFor(b Budget, dialed string, canonical func() string) Budget {
	if t, ok := b.(*perTarget); ok {
		return t.of(dialed, canonical)
	}
	return b
}

// hedgeBudget is what hedges spend besides; nil if the method is not hedged.
func (p *policy) hedgeBudget() Budget {
	if p.Hedging == nil {
		return nil
	}
	return p.Hedging.Budget
}

// methodPolicies finds the policy of a method: exact method, then service, then all.
type methodPolicies struct {
	fallback budgets
	all      *methodPolicy
	services map[string]*methodPolicy // by "/pkg.Service/"
	methods  map[string]*methodPolicy // by "/pkg.Service/Method"
	onlyAll  bool                     // there is none but all
}

// A methodPolicy keeps the scopes it was resolved from, for calls that add their own.
type methodPolicy struct {
	*policy
	scopes []scope
}

func newMethodPolicies(fallback budgets, all []*callOption, byPattern map[string][]*callOption) *methodPolicies {
	m := &methodPolicies{
		fallback: fallback,
		services: map[string]*methodPolicy{},
		methods:  map[string]*methodPolicy{},
		onlyAll:  len(byPattern) == 0,
	}
	of := func(pattern string) scope { return scope{pattern, byPattern[pattern]} }
	everywhere := scope{scopeAll, all}
	m.all = m.resolved(everywhere)
	for pattern := range byPattern {
		if service := serviceOf(pattern); pattern == service {
			m.services[pattern] = m.resolved(everywhere, of(pattern))
		} else {
			m.methods[pattern] = m.resolved(everywhere, of(service), of(pattern))
		}
	}
	return m
}

// budgetScopes is one policy for each scope that has a budget.
func (m *methodPolicies) budgetScopes() map[string]*policy {
	found := map[string]*policy{scopeAll: m.all.policy}
	for _, patterns := range []map[string]*methodPolicy{m.services, m.methods} {
		for _, p := range patterns {
			found[p.budgetScope] = p.policy
		}
	}
	return found
}

func (m *methodPolicies) resolved(scopes ...scope) *methodPolicy {
	return &methodPolicy{resolve(m.fallback, scopes...), scopes}
}

// of is on the path of every call.
func (m *methodPolicies) of(method string) *methodPolicy {
	if m.onlyAll {
		return m.all
	}
	if p, ok := m.methods[method]; ok {
		return p
	}
	if p, ok := m.services[serviceOf(method)]; ok {
		return p
	}
	return m.all
}

// forCall lays the options of one call over the policy of its method.
func (m *methodPolicies) forCall(method string, opts []*callOption) (*policy, error) {
	below := m.of(method)
	if len(opts) == 0 {
		return below.policy, nil
	}
	if err := firstError(opts); err != nil {
		return nil, err
	}
	return resolve(m.fallback, append(slices.Clip(below.scopes), scope{scopeCall, opts})...), nil
}

// serviceOf cuts "/pkg.Service/Method" to "/pkg.Service/".
func serviceOf(method string) string { return method[:strings.LastIndexByte(method, '/')+1] }

// checkPattern accepts "/pkg.Service/Method" and "/pkg.Service/".
func checkPattern(pattern string) error {
	service, method, ok := strings.Cut(strings.TrimPrefix(pattern, "/"), "/")
	if !strings.HasPrefix(pattern, "/") || !ok || service == "" || strings.Contains(method, "/") {
		return fmt.Errorf(`pattern %q, want "/pkg.Service/Method" or "/pkg.Service/"`, pattern)
	}
	return nil
}
