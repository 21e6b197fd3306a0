package grpcretry

import (
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
	defaultConnectWait    = 10 * time.Second
	defaultBufferLimit    = 256 << 10
)

// A Policy holds the settings by which a method's calls are retried. In a Policy passed to
// [WithPolicy], a zero field leaves the setting to the wider scopes and finally to the default.
// [Retrier.Policy] returns a Policy with every default filled in.
//
// Each field has an option that documents it, and whose name is the field's with the prefix
// With: [WithMaxAttempts] sets MaxAttempts.
type Policy struct {
	MaxAttempts     int          // attempts, including the first; default 4
	Backoff         Backoff      // default Exponential{}: full jitter, 100 ms doubling to 5 s
	OverloadBackoff Backoff      // after RESOURCE_EXHAUSTED; default 1 s doubling to 20 s, or Backoff if that is set
	Codes           []codes.Code // the codes that are retried; default UNAVAILABLE and RESOURCE_EXHAUSTED
	// Classifier decides before Codes; default none.
	Classifier func(context.Context, Attempt) Classification

	AttemptTimeout time.Duration // default none
	MaxElapsed     time.Duration // default none
	MaxServerDelay time.Duration // default 5 min; negative: no limit
	ConnectWait    time.Duration // default 10 s; negative: calls do not wait for a connection

	Budget Budget // default NewRatioBudget(RatioBudget{}), one for each target of the Retrier

	BufferLimit     int  // bytes kept for replay per stream; default 256 KiB; -1: streams pass through
	CommitOnHeaders bool // default false; only WithCommitOnHeaders(false) overrides a wider scope's true

	Hedging *Hedging // default nil: one attempt at a time

	UnsentOnly bool // default false; only WithUnsentOnly(false) overrides a wider scope's true
}

// parts returns one option for each field that is not zero. The policy has been checked as a whole.
func (p Policy) parts() []*callOption {
	var parts []*callOption
	add := func(given bool, option func() CallOption) {
		if given {
			parts = append(parts, option().callOption())
		}
	}
	add(p.MaxAttempts != 0, func() CallOption { return WithMaxAttempts(p.MaxAttempts) })
	add(p.Hedging != nil, func() CallOption { return WithHedging(*p.Hedging) })
	add(p.Budget != nil, func() CallOption { return WithBudget(p.Budget) })
	add(p.Backoff != nil, func() CallOption { return WithBackoff(p.Backoff) })
	add(p.OverloadBackoff != nil, func() CallOption { return WithOverloadBackoff(p.OverloadBackoff) })
	add(p.Codes != nil, func() CallOption { return WithCodes(p.Codes...) })
	add(p.Classifier != nil, func() CallOption { return WithClassifier(p.Classifier) })
	add(p.AttemptTimeout != 0, func() CallOption { return WithAttemptTimeout(p.AttemptTimeout) })
	add(p.MaxElapsed != 0, func() CallOption { return WithMaxElapsed(p.MaxElapsed) })
	add(p.MaxServerDelay != 0, func() CallOption { return WithMaxServerDelay(p.MaxServerDelay) })
	add(p.ConnectWait != 0, func() CallOption { return WithConnectWait(p.ConnectWait) })
	add(p.BufferLimit != 0, func() CallOption { return WithBufferLimit(p.BufferLimit) })
	add(p.CommitOnHeaders, func() CallOption { return WithCommitOnHeaders(true) })
	add(p.UnsentOnly, func() CallOption { return WithUnsentOnly(true) })
	return parts
}

// setMaxAttempts sets the limit; 1 turns hedging off, too.
func (p *Policy) setMaxAttempts(n int) {
	p.MaxAttempts = n
	if n == 1 {
		p.Hedging = nil
	}
}

// setHedging turns hedging on, even if retries are off.
func (p *Policy) setHedging(h *Hedging) {
	hedging := *h
	hedging.MaxAttempts = orDefault(h.MaxAttempts, defaultHedgedAttempts)
	p.Hedging = &hedging
}

// check rejects invalid fields and names the first. Zero fields are valid.
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

// A policy is a Policy for the code that makes calls: every field is resolved, and the codes are
// a set. It never changes.
type policy struct {
	Policy
	codes       codeSet
	budgetScope string        // the name of the scope that Budget comes from
	overGRPC    bool          // calls are not left to gRPC, see resolve
	redialFor   time.Duration // a function's ConnectWait, which is off unless an option sets it, see Retrier.Do

	// hedged is the same policy for calls that are hedged, with the attempts and codes of Hedging;
	// nil without Hedging, and with UnsentOnly. In hedged itself, hedges is true.
	hedged *policy
	hedges bool
}

// fillDefaults replaces the zero fields that stand for a default.
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
	p.redialFor = p.ConnectWait
	p.ConnectWait = orDefault(p.ConnectWait, defaultConnectWait)
	p.BufferLimit = orDefault(p.BufferLimit, defaultBufferLimit)
	if p.Budget == nil {
		p.Budget = fallback.retries
	}
	if p.Hedging != nil {
		if p.Hedging.Budget == nil {
			p.Hedging.Budget = fallback.hedges
		}
		if !p.UnsentOnly { // a hedge is sent while another attempt may be running
			p.hedged = p.forHedging()
		}
	}
}

// A mode says whether a call passes through, is retried or is hedged.
type mode uint8

const (
	modePassThrough mode = iota // the call goes straight to gRPC, without a budget, an event or a retry
	modeRetried
	modeHedged
)

// modeOf returns the mode of a call that is hedged if its method is; desc is nil for unary calls.
func (p *policy) modeOf(desc *grpc.StreamDesc) mode {
	switch {
	case p.passesStream(desc):
		return modePassThrough
	case p.hedged != nil:
		return modeHedged
	default:
		return p.modeUnhedged()
	}
}

// passesStream reports whether a stream passes through because it has no replay buffer.
func (p *policy) passesStream(desc *grpc.StreamDesc) bool { return desc != nil && p.BufferLimit < 0 }

// modeUnhedged returns the mode of a call that is not hedged, whatever its method.
func (p *policy) modeUnhedged() mode {
	if p.MaxAttempts == 1 {
		return modePassThrough
	}
	return modeRetried
}

// forHedging returns the policy for hedged calls: the number of attempts and the codes that allow
// another attempt are those of Hedging.
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

// insteadOfGRPC returns the same policy for a call that is not left to gRPC.
func (p *policy) insteadOfGRPC() *policy {
	own := *p
	own.overGRPC = true
	return &own
}

// withDefaults replaces the zero fields of this package's backoffs by their defaults, for readers
// of a Policy.
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

// exported returns a copy of the policy that its caller may change.
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

// budgets are the default budgets, for calls without a budget of their own.
type budgets struct{ retries, hedges Budget }

func defaultBudgets() budgets {
	return budgets{retries: perTargetRatio(defaultRatioBudget), hedges: &perTarget{newBudget: newHedgeBudget, settings: hedgeRatioBudget}}
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
	b.reserve = 0
	return b
}

// budgetFor returns the budget for calls to a target: b, or its budget for that target.
func budgetFor(b Budget, dialed string, canonical func() string) Budget {
	if t, ok := b.(*perTarget); ok {
		return t.of(dialed, canonical)
	}
	return b
}

// budgetNamed is budgetFor for a target in canonical form.
func budgetNamed(b Budget, target string) Budget {
	if t, ok := b.(*perTarget); ok {
		return t.named(target)
	}
	return b
}

// hedgeBudget returns the second budget, from which only hedges spend; nil if the method is not hedged.
func (p *policy) hedgeBudget() Budget {
	if p.Hedging == nil || p.UnsentOnly {
		return nil
	}
	return p.Hedging.Budget
}
