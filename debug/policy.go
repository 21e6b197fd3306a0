package debug

import (
	"fmt"
	"reflect"
	"strings"
	"time"

	"github.com/grpcretry/grpcretry"
	"github.com/grpcretry/grpcretry/internal/inside"
)

// A Policy describes the [grpcretry.Retrier.Policy] of a method. Options of single calls may
// change it, and are not known here.
type Policy struct {
	Text []string `json:"text"` // the whole policy, for people; its words may change

	MaxAttempts      int      `json:"max_attempts"`        // the first attempt included
	Codes            []string `json:"codes"`               // the status codes that are retried
	Classifier       bool     `json:"classifier"`          // a function of the program is asked before the codes
	Backoff          string   `json:"backoff"`             // in words
	OverloadBackoff  string   `json:"overload_backoff"`    // in words; after RESOURCE_EXHAUSTED
	AttemptTimeoutMs float64  `json:"attempt_timeout_ms"`  // 0 without one
	MaxElapsedMs     float64  `json:"max_elapsed_ms"`      // 0 without one
	MaxServerDelayMs float64  `json:"max_server_delay_ms"` // negative: no limit
	PatienceMs       float64  `json:"patience_ms"`         // negative: calls do not wait for a target
	BufferLimitBytes int      `json:"buffer_limit_bytes"`  // -1: streams pass through
	UnsentOnly       bool     `json:"unsent_only"`         // no retry of what may have run
	DryRun           bool     `json:"dry_run"`             // one attempt; the rest says what would be done
	Hedging          *Hedging `json:"hedging"`             // null: one attempt at a time
}

// Hedging describes the [grpcretry.Hedging] of a method.
type Hedging struct {
	Delay  string `json:"delay"`  // in words, with the time measured so far
	Budget string `json:"budget"` // in words; only hedges spend from it
}

func describe(from grpcretry.Policy, method string, function bool) *Policy {
	p := &Policy{
		MaxAttempts:      from.MaxAttempts,
		Codes:            namesOf(from.Codes),
		Classifier:       from.Classifier != nil,
		Backoff:          describeBackoff(from.Backoff),
		OverloadBackoff:  describeBackoff(from.OverloadBackoff),
		AttemptTimeoutMs: ms(from.AttemptTimeout),
		MaxElapsedMs:     ms(from.MaxElapsed),
		MaxServerDelayMs: ms(from.MaxServerDelay),
		PatienceMs:       ms(from.Patience),
		BufferLimitBytes: from.BufferLimit,
		UnsentOnly:       from.UnsentOnly,
		DryRun:           inside.IsDryRun(from),
	}
	if h := from.Hedging; h != nil && !from.UnsentOnly && from.MaxAttempts > 1 {
		p.Hedging = &Hedging{Delay: describeDelay(h.Delay, method), Budget: kindOf(h.Budget)}
	}
	p.Text = p.sentences(&from, function)
	return p
}

func namesOf[C ~uint32](codes []C) []string {
	names := make([]string, len(codes))
	for i, code := range codes {
		names[i] = codeName(uint32(code))
	}
	return names
}

// sentences describe the policy to people, without what is off and, for a function, without what is for
// RPCs only.
func (p *Policy) sentences(from *grpcretry.Policy, function bool) []string {
	if p.MaxAttempts == 1 {
		return []string{"off: every call makes one attempt, and passes straight through"}
	}
	all := []string{fmt.Sprintf("up to %d attempts, retried after %s", p.MaxAttempts, strings.Join(p.Codes, " or "))}
	if function {
		all[0] += ", or an error without a gRPC status"
	}
	if p.DryRun {
		all = append([]string{"dry run: every call makes one attempt, and the outcome would_retry says that another would follow"}, all...)
	}
	add := func(when bool, format string, args ...any) {
		if when {
			all = append(all, fmt.Sprintf(format, args...))
		}
	}
	add(p.Classifier, "a classifier of this program is asked before the codes")
	add(true, "wait: %s", p.Backoff)
	add(p.OverloadBackoff != p.Backoff, "wait after RESOURCE_EXHAUSTED: %s", p.OverloadBackoff)
	add(from.MaxServerDelay >= 0, "waits that the server asks for: up to %s", length(from.MaxServerDelay))
	add(from.MaxServerDelay < 0, "waits that the server asks for: without a limit")
	add(from.Patience > 0, "calls wait for a target that is failing: up to %s", length(from.Patience))
	add(from.Patience < 0, "calls do not wait for a target that is failing")
	add(from.AttemptTimeout > 0, "an attempt ends after %s, if another one follows", length(from.AttemptTimeout))
	add(from.MaxElapsed > 0, "no attempt starts later than %s after the call", length(from.MaxElapsed))
	add(p.BufferLimitBytes >= 0 && !function, "a stream keeps up to %s for replay", size(p.BufferLimitBytes))
	add(p.BufferLimitBytes < 0 && !function, "streams pass through without retries")
	add(p.UnsentOnly, "no retry of what may have run, unless the server asks for it, and no hedging")
	if h := p.Hedging; h != nil && !function {
		add(true, "hedged: while an attempt is slow, the next one %s", h.Delay)
		add(h.Budget != "", "hedges are charged to: %s", h.Budget)
	}
	add(true, "charged to: %s", kindOf(from.Budget))
	return all
}

// describeDelay describes a delay, with what a quantile has measured by now. Delays of others are
// not asked, because they may count their calls.
func describeDelay(d grpcretry.HedgeDelay, method string) string {
	if reflect.TypeOf(d) == reflect.TypeOf(grpcretry.HedgeAtQuantile(0, 0, 0)) {
		measured, ok := d.Delay(method, time.Now())
		if !ok {
			return "after a measured time, not known yet"
		}
		return "after a measured time, now " + length(measured)
	}
	if s, ok := d.(fmt.Stringer); ok {
		return text(s.String(), maxName)
	}
	return "after a time by " + text(fmt.Sprintf("%T", d), maxName)
}

func describeBackoff(b grpcretry.Backoff) string {
	switch b := b.(type) {
	case grpcretry.Exponential:
		return describeGrowth(b) + ", " + jitters[b.Jitter] + " jitter"
	case grpcretry.Decorrelated:
		return fmt.Sprintf("%s to %s, decorrelated jitter", length(b.Base), length(b.Max))
	case grpcretry.Constant:
		return fmt.Sprintf("always %s", length(time.Duration(b)))
	case fmt.Stringer:
		return text(b.String(), maxName)
	default:
		return text(fmt.Sprintf("%T", b), maxName)
	}
}

var jitters = map[grpcretry.Jitter]string{
	grpcretry.FullJitter: "full", grpcretry.EqualJitter: "equal", grpcretry.ProportionalJitter: "proportional", grpcretry.NoJitter: "no",
}

func describeGrowth(e grpcretry.Exponential) string {
	switch base, most := length(e.Base), length(e.Max); {
	case e.Multiplier < 1: // the only case in which a Base above Max matters
		return fmt.Sprintf("%s, then %v times the last, at most %s", base, e.Multiplier, most)
	case e.Base > e.Max:
		return "always " + most
	case e.Multiplier == 2:
		return fmt.Sprintf("%s doubling to %s", base, most)
	default:
		return fmt.Sprintf("%s growing by %v to %s", base, e.Multiplier, most)
	}
}
