package main

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"google.golang.org/grpc/codes"

	"github.com/grpcretry/grpcretry"
	"github.com/grpcretry/grpcretry/cmd/herd/internal/sim"
)

// This file writes a strategy as Go options and as a service config.

// copyable are the recommended policy's forms to copy.
func (e *explanation) copyable(r *recommendation) []explainPart {
	parts := []explainPart{{Text: "In Go:"}, {Code: e.goOptions(r.found.strategy)}}
	if r.config == nil {
		return append(parts, explainPart{Text: "No service config is safe in these circumstances: it has no budget but a throttle, and longer waits for the same backoff."})
	}
	differs, note := "other jitter", ""
	if r.config.strategy.Hedging != nil {
		differs, note = "a fixed delay", " grpc-go itself ignores a hedgingPolicy; WithServiceConfig obeys it."
	}
	return append(parts,
		explainPart{Text: fmt.Sprintf("As a service config, which has another budget and %s; this is the nearest safe one, in the last column above.%s", differs, note)},
		explainPart{Code: e.serviceConfig(r.config.strategy)})
}

// goOptions writes a strategy as options.
func (e *explanation) goOptions(s sim.Strategy) string {
	var lines []string
	add := func(format string, args ...any) { lines = append(lines, fmt.Sprintf("grpcretry."+format+",", args...)) }
	p := s.Policy
	if s.Hedging == nil {
		add("WithMaxAttempts(%d)", p.MaxAttempts)
		if p.Backoff != nil {
			add("WithBackoff(%s)", goBackoff(p.Backoff))
		}
		if p.OverloadBackoff != nil && (p.Codes == nil || slices.Contains(p.Codes, codes.ResourceExhausted)) {
			add("WithOverloadBackoff(%s)", goBackoff(p.OverloadBackoff))
		}
	}
	if p.Codes != nil && !slices.Equal(p.Codes, []codes.Code{codes.ResourceExhausted, codes.Unavailable}) { // the default
		var names []string
		for _, c := range p.Codes {
			names = append(names, "codes."+c.String())
		}
		add("WithCodes(%s)", strings.Join(names, ", "))
	}
	if p.AttemptTimeout > 0 {
		add("WithAttemptTimeout(%s)", goTime(p.AttemptTimeout))
	}
	if p.MaxElapsed > 0 {
		add("WithMaxElapsed(%s)", goTime(p.MaxElapsed))
	}
	if b := s.Budget; b.Kind == sim.RatioBudget {
		add("WithRatioBudget(grpcretry.RatioBudget{Ratio: %v, Reserve: %v, Window: %s})", b.Ratio, b.Reserve, goTime(b.Window))
	}
	if h := s.Hedging; h != nil {
		add("WithMethod(%q, grpcretry.WithHedging(grpcretry.Hedging{\n\tMaxAttempts: %d,\n\tDelay:       grpcretry.HedgeAtQuantile(%v, %s, %s),\n}))",
			e.methodName(), h.MaxAttempts, h.Quantile, goTime(h.AtLeast), goTime(h.AtMost))
	}
	return strings.Join(lines, "\n")
}

// goBackoff writes a backoff as a Go expression.
func goBackoff(b grpcretry.Backoff) string {
	switch b := b.(type) {
	case grpcretry.Exponential:
		fields := fmt.Sprintf("Base: %s, Max: %s, Multiplier: %v", goTime(b.Base), goTime(b.Max), b.Multiplier)
		if b.Jitter != grpcretry.FullJitter {
			fields += ", Jitter: grpcretry." + map[grpcretry.Jitter]string{grpcretry.EqualJitter: "EqualJitter",
				grpcretry.ProportionalJitter: "ProportionalJitter", grpcretry.NoJitter: "NoJitter"}[b.Jitter]
		}
		return "grpcretry.Exponential{" + fields + "}"
	case grpcretry.Decorrelated:
		return fmt.Sprintf("grpcretry.Decorrelated{Base: %s, Max: %s}", goTime(b.Base), goTime(b.Max))
	case grpcretry.Constant:
		return fmt.Sprintf("grpcretry.Constant(%s)", goTime(time.Duration(b)))
	default:
		return fmt.Sprint(b)
	}
}

// goTime writes a duration as a Go expression.
func goTime(d time.Duration) string {
	for _, unit := range []struct {
		length time.Duration
		name   string
	}{{time.Second, "time.Second"}, {time.Millisecond, "time.Millisecond"}, {time.Microsecond, "time.Microsecond"}} {
		switch {
		case d == unit.length:
			return unit.name
		case d%unit.length == 0:
			return fmt.Sprintf("%d*%s", d/unit.length, unit.name)
		}
	}
	return strconv.FormatInt(int64(d), 10)
}

// serviceConfig writes a strategy that [search.asConfig] returned.
func (e *explanation) serviceConfig(s sim.Strategy) string {
	service, method, _ := strings.Cut(strings.TrimPrefix(e.methodName(), "/"), "/")
	name := fmt.Sprintf(`{"service": %q}`, service)
	if method != "" {
		name = fmt.Sprintf(`{"service": %q, "method": %q}`, service, method)
	}
	policy := ""
	if h := s.Hedging; h != nil {
		policy = fmt.Sprintf(`"hedgingPolicy": {"maxAttempts": %d, "hedgingDelay": %q,
      "nonFatalStatusCodes": [%s]}`, h.MaxAttempts, jsonTime(h.Delay), jsonCodes(h.NonFatalCodes))
	} else {
		b, _ := s.Policy.Backoff.(grpcretry.Exponential)
		policy = fmt.Sprintf(`"retryPolicy": {"maxAttempts": %d, "initialBackoff": %q, "maxBackoff": %q,
      "backoffMultiplier": %v, "retryableStatusCodes": [%s]}`,
			s.Policy.MaxAttempts, jsonTime(b.Base), jsonTime(b.Max), b.Multiplier, jsonCodes(s.Policy.Codes))
	}
	return fmt.Sprintf(`{"methodConfig": [{
    "name": [%s],
    %s
  }],
  "retryThrottling": {"maxTokens": %v, "tokenRatio": %v}}`, name, policy, s.Budget.MaxTokens, s.Budget.TokenRatio)
}

// methodName is the method or the service that the policy is for, or a placeholder.
func (e *explanation) methodName() string {
	if e.question.method != "" {
		return e.question.method
	}
	if name := strings.TrimPrefix(e.base.Name, "policy "); strings.HasPrefix(name, "/") {
		return name
	}
	return "/pkg.Service/Method"
}

func jsonTime(d time.Duration) string { return strconv.FormatFloat(d.Seconds(), 'f', -1, 64) + "s" }

func jsonCodes(all []codes.Code) string {
	var names []string
	for _, c := range all {
		names = append(names, strconv.Quote(sim.CodeName(c)))
	}
	return strings.Join(names, ", ")
}
