package grpcretry

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/grpcretry/grpcretry/internal/bounded"
	"github.com/grpcretry/grpcretry/internal/patterns"
	"github.com/grpcretry/grpcretry/internal/protos"
	"github.com/grpcretry/grpcretry/internal/window"
)

// This file finds what is doubtful about a Retrier's options: a pattern that names no method of the protos that
// the program links, an attempt timeout that no attempt can meet, a policy that can never retry, and settings
// that contradict each other. What is plainly wrong is an error from [New] instead.

// warn logs the warnings that were not logged before. An Update may name ever new patterns.
func (r *Retrier) warn() {
	for _, text := range r.settings.current().warnings() {
		if r.settings.warned.Add(text, bounded.MaxNames) && r.report.logger != nil {
			r.report.logger.Warn("grpcretry: " + text)
		}
	}
}

// warnings returns what is doubtful, one sentence each, which names the option and the value, in a fixed order.
func (m *methodPolicies) warnings() []string {
	all := m.options.unlinkedPatterns()
	all = append(all, m.options.configWarnings()...)
	for l, t := range m.tables {
		all = append(all, m.tableWarnings(level(l), t)...)
	}
	slices.Sort(all)
	return slices.Compact(all)
}

// unlinkedPatterns warns of WithMethod patterns that name nothing.
func (o *policyOptions) unlinkedPatterns() []string {
	var all []string
	for _, pattern := range slices.Sorted(maps.Keys(o.scopes)) {
		if !isPattern(pattern) {
			continue
		}
		method := strings.TrimSuffix(pattern, "/")
		if protos.Method(method) != nil && method != pattern {
			all = append(all, fmt.Sprintf("WithMethod %s: a slash after a method matches nothing", pattern))
		} else if name, ok := protos.Lacks(pattern); ok {
			all = append(all, fmt.Sprintf("WithMethod %s: service %s has no method %s", pattern, patterns.ServiceName(pattern), name))
		} else if patterns.MayBeProto(pattern) && protos.Service(patterns.ServiceOf(pattern)) == nil {
			all = append(all, fmt.Sprintf("WithMethod %s: the program links no proto with a service %s", pattern, patterns.ServiceName(pattern)))
		} else if full, ok := protos.Qualified(patterns.ServiceOf(pattern)); ok {
			all = append(all, fmt.Sprintf("WithMethod %s: if it is for the linked service, its name is %s", pattern, full))
		}
	}
	return all
}

// configWarnings warns of a service config's entries. A config may well name services that this
// program does not link, because other clients use it too.
func (o *policyOptions) configWarnings() []string {
	if o.config.read == nil {
		return nil
	}
	var all []string
	warn := func(format string, args ...any) {
		all = append(all, "WithServiceConfig: "+fmt.Sprintf(format, args...))
	}
	for _, note := range o.config.read.Notes {
		warn("%s", note)
	}
	for _, m := range o.config.read.Methods {
		for _, name := range m.Names {
			if method, unknown := protos.Lacks(name); unknown {
				warn("%s.name: service %s has no method %s", m.Path, patterns.ServiceName(name), method)
			}
			if name == "" && m.Hedging != nil {
				warn("%s.hedgingPolicy applies to all methods, and not all may be safe to run twice at the same time", m.Path)
			}
		}
	}
	return all
}

// tableWarnings warns of a level's policies. What a wider scope was warned of is not repeated.
func (m *methodPolicies) tableWarnings(l level, t policyTable) []string {
	var all []string
	for pattern, p := range t {
		if m.leveled && !patterns.IsWide(pattern) && protos.LookUpLevel(pattern) != l {
			continue
		}
		where := pattern
		if pattern == "" {
			where = "all methods"
		}
		if l != levelUnknown {
			where += " of level " + l.String()
		}
		known := widerWarnings(t, pattern)
		if l != levelUnknown {
			known = append(known, m.tables[levelUnknown][""].warnings()...)
		}
		for _, text := range p.warnings() {
			if !slices.Contains(known, text) {
				all = append(all, where+": "+text)
			}
		}
	}
	return all
}

// widerWarnings returns the warnings of the scopes that are wider than a pattern's.
func widerWarnings(t policyTable, pattern string) (all []string) {
	if pattern == "" {
		return nil
	}
	for prefix := range patterns.Prefixes(pattern) {
		if p := t[prefix]; p != nil && prefix != pattern {
			all = append(all, p.warnings()...)
		}
	}
	return append(all, t[""].warnings()...)
}

// shortestAttempt is less than any attempt takes, be it on the loopback interface.
const shortestAttempt = 50 * time.Microsecond

// warnings returns what is doubtful about a policy.
func (p *policy) warnings() []string {
	var all []string
	warn := func(when bool, format string, args ...any) {
		if when {
			all = append(all, fmt.Sprintf(format, args...))
		}
	}
	timeout, limit := p.AttemptTimeout, p.MaxElapsed
	warn(timeout > 0 && timeout < shortestAttempt, "WithAttemptTimeout is %v, and no attempt takes less than %v", timeout, shortestAttempt)
	if p.MaxAttempts == 1 {
		warn(p.Hedging != nil, "WithMaxAttempts is 1, so WithHedging has no effect")
		return all
	}
	warn(limit > 0 && timeout >= limit,
		"WithAttemptTimeout is %v, and WithMaxElapsed is %v: no retry can follow an attempt that times out", timeout, limit)
	warn(p.dryRun, "WithDryRun is on, so nothing is retried")
	warn(p.UnsentOnly && p.Hedging != nil, "WithUnsentOnly is on, so WithHedging has no effect")
	warn(len(p.Codes) == 0 && !p.mayHedge(), "no status code is retried")
	warn(neverAllows(p.Budget), "the budget never allows a retry: %v", p.Budget)
	if p.mayHedge() {
		warn(neverAllows(p.Hedging.Budget), "the budget of hedges never allows one: %v", p.Hedging.Budget)
		delay, fixed := p.Hedging.Delay.(hedgeAfter)
		warn(fixed && timeout > 0 && time.Duration(delay) >= timeout,
			"WithHedging has a delay of %v, and WithAttemptTimeout is %v: no hedge is ever sent", time.Duration(delay), timeout)
		warn(fixed && limit > 0 && time.Duration(delay) >= limit,
			"WithHedging has a delay of %v, and WithMaxElapsed is %v: no hedge is ever sent", time.Duration(delay), limit)
		return all
	}
	first := shortestWait(p.Backoff)
	warn(p.Patience > 0 && p.Patience < first,
		"WithPatience is %v, and WithBackoff waits %v or more: no retry follows UNAVAILABLE unless the server names a time", p.Patience, first)
	shortest := min(shortestWait(p.Backoff), shortestWait(p.OverloadBackoff))
	warn(limit > 0 && shortest >= limit, "WithMaxElapsed is %v, and the backoff waits %v or more: no retry is ever made", limit, shortest)
	return all
}

// shortestWait returns the shortest first wait of one of this package's backoffs; 0 for others,
// because it is not known how they use the random number.
func shortestWait(b Backoff) time.Duration {
	if isOurs(b) {
		return nextBackoff(b, 1, 0, 0)
	}
	return 0
}

// neverAllows reports whether one of this package's budgets is empty from the start and earns nothing.
func neverAllows(b Budget) bool {
	if each, ok := b.(*perTarget); ok {
		settings, isRatio := each.settings.(RatioBudget)
		return isRatio && settings.isEmpty()
	}
	if all, ok := b.(*allBudgets); ok {
		return slices.ContainsFunc(all.budgets, neverAllows)
	}
	ratio, ok := b.(*ratioBudget)
	return ok && ratio.settings.isEmpty()
}

// isEmpty reports whether the settings never allow a retry: answered calls earn nothing, and the
// reserve and the floor never hold a whole token.
func (s RatioBudget) isEmpty() bool {
	return s.Ratio <= Nothing && s.Reserve+window.Settings(s).Floor() < 1
}
