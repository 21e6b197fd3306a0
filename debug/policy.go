package debug

import (
	"fmt"
	"strings"
	"time"

	"github.com/grpcretry/grpcretry"
)

// A Policy is what [grpcretry.Retrier.Policy] says of a method. Options of single calls come
// on top of it, and are not known here.
type Policy struct {
	Text []string `json:"text"` // all of it, for people; its words may change

	MaxAttempts      int      `json:"max_attempts"`
	Codes            []string `json:"codes"`      // that are retried
	Classifier       bool     `json:"classifier"` // a function of the program is asked before the codes
	Backoff          string   `json:"backoff"`    // in words
	OverloadBackoff  string   `json:"overload_backoff"`
	AttemptTimeoutMs float64  `json:"attempt_timeout_ms"`  // 0 without one
	MaxElapsedMs     float64  `json:"max_elapsed_ms"`      // 0 without one
	MaxServerDelayMs float64  `json:"max_server_delay_ms"` // negative: no limit
	BufferLimitBytes int      `json:"buffer_limit_bytes"`  // -1: streams pass through
	CommitOnHeaders  bool     `json:"commit_on_headers"`
}

func describe(from grpcretry.Policy) *Policy {
	p := &Policy{
		MaxAttempts:      from.MaxAttempts,
		Codes:            make([]string, len(from.Codes)),
		Classifier:       from.Classifier != nil,
		Backoff:          describeBackoff(from.Backoff),
		OverloadBackoff:  describeBackoff(from.OverloadBackoff),
		AttemptTimeoutMs: ms(from.AttemptTimeout),
		MaxElapsedMs:     ms(from.MaxElapsed),
		MaxServerDelayMs: ms(from.MaxServerDelay),
		BufferLimitBytes: from.BufferLimit,
		CommitOnHeaders:  from.CommitOnHeaders,
	}
	for i, code := range from.Codes {
		p.Codes[i] = codeName(uint32(code))
	}
	p.Text = p.sentences(&from)
	return p
}

// sentences say the policy to people. What is off is left out.
func (p *Policy) sentences(from *grpcretry.Policy) []string {
	all := []string{fmt.Sprintf("up to %d attempts, retried after %s", p.MaxAttempts, strings.Join(p.Codes, " or "))}
	add := func(when bool, format string, args ...any) {
		if when {
			all = append(all, fmt.Sprintf(format, args...))
		}
	}
	add(p.Classifier, "a classifier of this program is asked before the codes")
	add(true, "wait: %s", p.Backoff)
	add(p.OverloadBackoff != p.Backoff, "wait after RESOURCE_EXHAUSTED: %s", p.OverloadBackoff)
	add(from.MaxServerDelay >= 0, "waits that the server asks for: up to %s", length(from.MaxServerDelay))
	add(from.MaxServerDelay < 0, "waits that the server asks for: as long as it says")
	add(from.AttemptTimeout > 0, "an attempt ends after %s", length(from.AttemptTimeout))
	add(from.MaxElapsed > 0, "no attempt starts later than %s after the call", length(from.MaxElapsed))
	add(p.BufferLimitBytes >= 0, "a stream keeps up to %s for replay", size(p.BufferLimitBytes))
	add(p.BufferLimitBytes < 0, "streams pass through without retries")
	add(p.CommitOnHeaders, "no retry once response headers have come")
	add(true, "paid from: %s", kindOf(from.Budget))
	return all
}

func describeBackoff(b grpcretry.Backoff) string {
	switch b := b.(type) {
	case grpcretry.Exponential:
		growth := fmt.Sprintf("growing by %v", b.Multiplier)
		if b.Multiplier == 2 {
			growth = "doubling"
		}
		jitter := b.Jitter.String() + " jitter"
		if b.Jitter == grpcretry.NoJitter {
			jitter = "no jitter"
		}
		return fmt.Sprintf("%s %s to %s, %s", length(b.Base), growth, length(b.Max), jitter)
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
