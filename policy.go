package grpcretry

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
)

// The defaults of a [Policy].
const (
	defaultMaxAttempts    = 4
	defaultMaxServerDelay = 5 * time.Minute
	defaultPatience       = 10 * time.Second
	defaultBufferLimit    = 256 << 10
)

// defaultBackoff makes three retries cover a second, also in a process that makes one call a second
// and learns from nobody.
var defaultBackoff = Exponential{Multiplier: 4, Jitter: EqualJitter}

// A Policy holds the settings by which a method's calls are retried. In a Policy passed to
// [WithPolicy], a zero field leaves the setting to the wider scopes and finally to the default.
// [Retrier.Policy] returns a Policy with every default filled in.
//
// Each field has an option that documents it, and whose name is the field's with the prefix
// With: [WithMaxAttempts] sets MaxAttempts.
type Policy struct {
	MaxAttempts     int          // attempts, including the first; default 4
	Backoff         Backoff      // default: equal jitter, 100 ms, 400 ms, 1.6 s, then 5 s
	OverloadBackoff Backoff      // after RESOURCE_EXHAUSTED; default 1 s doubling to 20 s, or Backoff if that is set
	Codes           []codes.Code // the codes that are retried; default UNAVAILABLE and RESOURCE_EXHAUSTED
	// Classifier decides before Codes; default none.
	Classifier func(context.Context, Attempt) Classification

	AttemptTimeout time.Duration // default none
	MaxElapsed     time.Duration // default none
	MaxServerDelay time.Duration // default 5 min; negative: no limit
	Patience       time.Duration // default 10 s, see [WithPatience]; negative: calls do not wait for a target

	Budget Budget // default NewRatioBudget(RatioBudget{}), one for each target of the Retrier

	BufferLimit int // bytes kept for replay per stream; default 256 KiB; -1: streams pass through

	Hedging *Hedging // default nil: one attempt at a time

	UnsentOnly bool // default false; only WithUnsentOnly(false) overrides a wider scope's true
	dryRun     bool // default false; only WithDryRun(false) overrides a wider scope's true
}

// fields is a set of a Policy's fields.
type fields uint16

const (
	fieldMaxAttempts fields = 1 << iota
	fieldBackoff
	fieldOverloadBackoff
	fieldCodes
	fieldClassifier
	fieldAttemptTimeout
	fieldMaxElapsed
	fieldMaxServerDelay
	fieldPatience
	fieldBudget
	fieldBufferLimit
	fieldHedging
	fieldUnsentOnly
	fieldDryRun

	// switchOff, which is no field, takes MaxAttempts and Hedging back: [Disable], or one attempt.
	switchOff
)

func (f fields) has(field fields) bool { return f&field != 0 }

// A partial is a Policy of which some fields are set, to zero or not: an option, all options of a scope,
// or what the scopes of a method add up to.
type partial struct {
	Policy
	set fields

	attemptsScope, budgetScope, hedgingScope string // the scopes that MaxAttempts, Budget and Hedging come from

	keepsBudget bool // an Update with a Budget of the same settings keeps this one

	// The numbers of the Updates that the fields come from, 0 for [New].
	attemptsUpdate, hedgingUpdate int
}

// add replaces the fields that a narrower scope, or a later option of the same scope, sets.
func (p *partial) add(scope string, o *partial) {
	if o.set.has(switchOff) {
		p.MaxAttempts, p.attemptsScope, p.set = 1, scope, p.set&^(fieldMaxAttempts|fieldHedging)
	}
	if o.set.has(fieldMaxAttempts) {
		p.MaxAttempts, p.attemptsScope, p.attemptsUpdate = o.MaxAttempts, scope, o.attemptsUpdate
	}
	if o.set.has(fieldHedging) {
		p.Hedging, p.hedgingScope, p.hedgingUpdate = o.Hedging, scope, o.hedgingUpdate
	}
	if o.set.has(fieldBudget) {
		p.Budget, p.budgetScope, p.keepsBudget = o.Budget, scope, o.keepsBudget
	}
	replace(o.set.has(fieldBackoff), &p.Backoff, o.Backoff)
	replace(o.set.has(fieldOverloadBackoff), &p.OverloadBackoff, o.OverloadBackoff)
	replace(o.set.has(fieldCodes), &p.Codes, o.Codes)
	replace(o.set.has(fieldClassifier), &p.Classifier, o.Classifier)
	replace(o.set.has(fieldAttemptTimeout), &p.AttemptTimeout, o.AttemptTimeout)
	replace(o.set.has(fieldMaxElapsed), &p.MaxElapsed, o.MaxElapsed)
	replace(o.set.has(fieldMaxServerDelay), &p.MaxServerDelay, o.MaxServerDelay)
	replace(o.set.has(fieldPatience), &p.Patience, o.Patience)
	replace(o.set.has(fieldBufferLimit), &p.BufferLimit, o.BufferLimit)
	replace(o.set.has(fieldUnsentOnly), &p.UnsentOnly, o.UnsentOnly)
	replace(o.set.has(fieldDryRun), &p.dryRun, o.dryRun)
	p.set |= o.set
}

func replace[T any](set bool, field *T, with T) {
	if set {
		*field = with
	}
}

// since returns what is still in effect after the Update that turned everything off; off is 0 if
// everything is on.
func (p partial) since(off int) *partial {
	if p.attemptsUpdate < off {
		p.set &^= fieldMaxAttempts
	}
	if p.hedgingUpdate < off {
		p.set &^= fieldHedging
	}
	return &p
}

// keepState returns p with the state of the same scope before an Update, if the settings are the same.
func (p partial) keepState(before partial) partial {
	if p.keepsBudget && before.keepsBudget && p.Budget.(*perTarget).settings == before.Budget.(*perTarget).settings {
		p.Budget = before.Budget
	}
	if p.Hedging != nil && before.Hedging != nil && isSameQuantile(p.Hedging.Delay, before.Hedging.Delay) {
		hedging := *p.Hedging
		hedging.Delay = before.Hedging.Delay
		p.Hedging = &hedging
	}
	return p
}

// checkGiven rejects a backoff or budget that is nil, and this package's own if they find themselves invalid.
func checkGiven(what string, v any) error {
	if isNil(v) {
		return fmt.Errorf("%s is nil", what)
	}
	return checkSelf(v)
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

func checkNotNegative[T int | time.Duration](x T) error {
	if x < 0 {
		return fmt.Errorf("%v is negative", x)
	}
	return nil
}

// A policy is a Policy for the code that makes calls: every field is resolved, and the codes are
// a set. It never changes.
type policy struct {
	Policy
	codes                                    codeSet
	attemptsScope, budgetScope, hedgingScope string // the names of the scopes that MaxAttempts, Budget and Hedging come from
	overGRPC                                 bool   // calls are not left to gRPC, see methodPolicies.finish
	isPlain                                  bool   // a success needs none of it but the budget, see Retrier.plain
}

// newPolicy fills in the defaults: in place of fields that are not set, and of values that stand for them.
func newPolicy(given *partial, fallback budgets) *policy {
	p := &policy{Policy: given.Policy, attemptsScope: given.attemptsScope, budgetScope: given.budgetScope, hedgingScope: given.hedgingScope}
	if !given.set.has(fieldHedging) { // Disable only takes it out of the set
		p.Hedging = nil
	}
	p.MaxAttempts = cmp.Or(p.MaxAttempts, defaultMaxAttempts)
	if p.Patience == 0 {
		p.Patience = max(defaultPatience, 2*p.longestWait(p.Backoff), 2*p.longestWait(p.OverloadBackoff))
	}
	p.OverloadBackoff = withDefaults(cmp.Or[Backoff](p.OverloadBackoff, p.Backoff, Exponential{Base: overloadBase, Max: overloadMax}))
	p.Backoff = withDefaults(cmp.Or[Backoff](p.Backoff, defaultBackoff))
	if p.Codes == nil {
		p.Codes = []codes.Code{codes.ResourceExhausted, codes.Unavailable}
	}
	p.codes = newCodeSet(p.Codes)
	p.MaxServerDelay = cmp.Or(p.MaxServerDelay, defaultMaxServerDelay)
	p.BufferLimit = cmp.Or(p.BufferLimit, defaultBufferLimit)
	if p.Budget == nil {
		p.Budget, p.budgetScope = fallback.retries, scopeAll
	}
	if p.Hedging != nil && p.Hedging.Budget == nil {
		hedging := *p.Hedging
		hedging.Budget = fallback.hedges
		p.Hedging = &hedging
	}
	p.isPlain = p.MaxAttempts > 1 && p.Hedging == nil && p.AttemptTimeout <= 0 && !p.UnsentOnly && !p.dryRun && p.Classifier == nil
	return p
}

// longestWait returns how long a backoff of this package may keep one call waiting in total; 0 for
// others. A Patience below that would make a policy's own waits impossible.
func (p *policy) longestWait(b Backoff) (total time.Duration) {
	if !isOurs(b) {
		return 0
	}
	const most, counted = 24 * time.Hour, 10_000
	prev := time.Duration(0)
	for retry := 1; retry < p.MaxAttempts && total < most; retry++ {
		wait := nextBackoff(b, retry, prev, 1)
		last := nextBackoff(b, p.MaxAttempts-1, wait, 1)
		if wait == last || retry == counted { // all others are as long, or a little shorter
			total += duration(float64(last) * float64(p.MaxAttempts-retry))
			break
		}
		total += min(wait, most)
		prev = wait
	}
	return min(total, most).Round(time.Millisecond)
}

// A mode says whether a call passes through, is retried or is hedged.
type mode uint8

const (
	modePassThrough mode = iota // the call goes straight to gRPC, without a budget, an event or a retry
	modeRetried
	modeHedged
)

// modeOf returns the mode of a call before hedging is considered; desc is nil for unary calls and functions.
func (p *policy) modeOf(desc *grpc.StreamDesc) mode {
	if p.MaxAttempts == 1 || p.passesStream(desc) {
		return modePassThrough
	}
	return modeRetried
}

// passesStream reports whether a stream passes through because it has no replay buffer.
func (p *policy) passesStream(desc *grpc.StreamDesc) bool { return desc != nil && p.BufferLimit < 0 }

// exported returns a copy of the policy that its caller may change.
func (p *policy) exported() Policy {
	shown := p.Policy
	shown.Codes = slices.Clone(p.Codes)
	slices.Sort(shown.Codes)
	if p.Hedging != nil {
		hedging := *p.Hedging
		shown.Hedging = &hedging
	}
	return shown
}

// budgets are the default budgets, for calls without a budget of their own.
type budgets struct{ retries, hedges Budget }

func defaultBudgets() budgets {
	return budgets{retries: perTargetRatio(defaultRatioBudget), hedges: newPerTarget(newHedgeBudget, hedgeRatioBudget)}
}

// hedgeRatioBudget allows hedges for 10% of answered calls. The window is short, because the
// savings of good times would all be spent when everything becomes slow, on top of the share:
// with a window of 10 s that alone overloads a server that has a fifth of its capacity to spare
// (study tail-slow in docs/herd.md). The reserve keeps one hedge for clients with few calls. It
// is empty at the start, because hedges are an extra that a fleet which has just started, or a
// server that answers no calls, can do without.
var hedgeRatioBudget = RatioBudget{Ratio: 0.1, Reserve: 1, Window: time.Second}

func newHedgeBudget() Budget {
	b := newRatioBudget(hedgeRatioBudget)
	b.tokens.EmptyReserve()
	return b
}
