package main

import (
	"fmt"
	"regexp"
	"time"

	"github.com/grpcretry/grpcretry"
	"github.com/grpcretry/grpcretry/cmd/herd/internal/sim"
)

// This file describes a policy and its circumstances in words.

// words is the section on the policy, with the source of each part.
func (e *explanation) words() explainSection {
	s := explainSection{Title: "The policy"}
	var points []string
	say := func(text string, part func(sim.Strategy) any) {
		points = append(points, fmt.Sprintf("%s (%s)", text, e.origin(part)))
	}
	if e.strategy.Hedging != nil {
		say(e.hedgingWords(), func(s sim.Strategy) any { return s.Hedging })
	} else {
		say(
			fmt.Sprintf("at most %s of a call", plural(e.policy.MaxAttempts, "attempt")),
			func(s sim.Strategy) any { return s.Policy.MaxAttempts },
		)
	}
	if h := e.strategy.Hedging; h != nil && h.Kind == sim.HedgeAtQuantile {
		points = append(points, fmt.Sprintf("while a process has not measured enough calls, they are not hedged, but retried: at most %s (%s)",
			plural(e.policy.MaxAttempts, "attempt"), e.origin(func(s sim.Strategy) any { return s.Policy.MaxAttempts })))
	}
	if all := e.codes(); len(all) > 0 {
		say(fmt.Sprintf("another one after %s", codeList(all)), e.codesOf)
	} else {
		say("none after a failure", e.codesOf)
	}
	say("before a retry "+backoffWords(e.policy.Backoff), func(s sim.Strategy) any { return s.Policy.Backoff })
	if overload := backoffWords(e.policy.OverloadBackoff); overload != backoffWords(e.policy.Backoff) {
		say("after RESOURCE_EXHAUSTED instead "+overload, func(s sim.Strategy) any { return s.Policy.OverloadBackoff })
	}
	say("budget: "+e.budgetWords(), func(s sim.Strategy) any { return s.Budget })
	if d := e.policy.Patience; d > 0 {
		say(
			fmt.Sprintf(
				"patience: for %s after its first failure, calls wait for a target that answers nothing, and send only what can learn something",
				shortTime(d),
			),
			func(s sim.Strategy) any { return s.Policy.Patience },
		)
	}
	if d := e.policy.AttemptTimeout; d > 0 {
		say(
			fmt.Sprintf("an attempt that takes longer than %s makes room for the next one", shortTime(d)),
			func(s sim.Strategy) any { return s.Policy.AttemptTimeout },
		)
	}
	if d := e.policy.MaxElapsed; d > 0 {
		say(fmt.Sprintf("no attempt starts later than %s after the first", shortTime(d)), func(s sim.Strategy) any { return s.Policy.MaxElapsed })
	}
	s.Parts = []explainPart{{Points: points}}
	if e.unsentOnly {
		s.Parts = append(
			s.Parts,
			explainPart{
				Text: fmt.Sprintf(
					"Only calls that have certainly run nowhere are retried, or those for which the server asks for another attempt, by pushback or "+
						"RetryInfo (your flags). "+
						"In an outage of a server that is connected there are no retries; without a connection, a call waits for one, at most %s.",
					shortTime(max(0, e.policy.Patience)),
				),
			},
		)
	}
	s.Parts = append(s.Parts, explainPart{Text: "The circumstances: " + e.circumstances()})
	return s
}

func (e *explanation) codesOf(s sim.Strategy) any {
	if s.Policy.Classifier != nil {
		return "none" // see asHedgingPolicy
	}
	return s.Policy.Codes
}

func (e *explanation) hedgingWords() string {
	h := e.strategy.Hedging
	text := fmt.Sprintf("at most %s of a call; ", plural(e.policy.MaxAttempts, "attempt"))
	switch {
	case h.Kind == sim.HedgeAtQuantile:
		text += fmt.Sprintf(
			"another one is sent while none has succeeded after the time that %s of the calls take, now %s",
			percent(h.Quantile),
			roundTime(e.hedges),
		)
	case h.Delay == 0:
		text += "all are sent immediately"
	default:
		text += fmt.Sprintf("another one is sent while none has succeeded after %s", shortTime(h.Delay))
	}
	return text + "; such an attempt is a hedge"
}

// backoffWords describes the waits before retries.
func backoffWords(b grpcretry.Backoff) string {
	switch b := b.(type) {
	case grpcretry.Exponential:
		text := map[grpcretry.Jitter]string{
			grpcretry.FullJitter:         "a random wait of up to %s",
			grpcretry.EqualJitter:        "a random wait from " + shortTime(b.Base/2) + " to %s",
			grpcretry.ProportionalJitter: "a wait of %s, ±20%% at random",
			grpcretry.NoJitter:           "a wait of exactly %s",
		}[b.Jitter]
		text = fmt.Sprintf(text, shortTime(b.Base))
		if b.Multiplier > 1 && b.Max > b.Base {
			text += fmt.Sprintf(", then each time %v times as long, up to %s", b.Multiplier, shortTime(b.Max))
		}
		return text
	case shrinking:
		return backoffWords(grpcretry.Exponential(b)) + fmt.Sprintf(", then each time %v times as long", b.Multiplier)
	case grpcretry.Decorrelated:
		return fmt.Sprintf("a random wait from %s to three times the last one, up to %s", shortTime(b.Base), shortTime(b.Max))
	case grpcretry.Constant:
		return fmt.Sprintf("a wait of exactly %s", shortTime(time.Duration(b)))
	default:
		return fmt.Sprint(b)
	}
}

// budgetWords describes the strategy's budget.
func (e *explanation) budgetWords() string {
	b := e.strategy.Budget
	switch b.Kind {
	case sim.UnlimitedBudget:
		return "none, retries are not limited"
	case sim.ThrottleBudget:
		return fmt.Sprintf(
			"a throttle of %v tokens; a failure costs one, a success returns %v, and there are no retries while half are gone",
			b.MaxTokens,
			b.TokenRatio,
		)
	case sim.DefaultBudget, sim.RatioBudget:
		return e.ratioWords()
	default:
		made, err := b.Make()
		if err != nil {
			return string(b.Kind)
		}
		return fmt.Sprint(made)
	}
}

// ratioWords describes a ratio budget; for the library's default, by what the library says of it.
func (e *explanation) ratioWords() string {
	b := e.strategy.Budget
	said := fmt.Sprint(e.policy.Budget)
	if b.Kind == sim.RatioBudget {
		if made, err := b.Make(); err == nil {
			said = fmt.Sprint(made)
		}
	}
	m := ratioText.FindStringSubmatch(said)
	if m == nil {
		return said
	}
	kept := m[4]
	if d, err := time.ParseDuration(kept); err == nil {
		kept = shortTime(d)
	}
	return fmt.Sprintf(
		"retries for %s of the calls that the server answers, kept for %s, and a reserve of %s in each process%s; a retry that succeeds is free",
		m[1],
		kept,
		m[2],
		m[3],
	)
}

// ratioText is how the library describes a ratio budget.
var ratioText = regexp.MustCompile(
	`^ratio budget: (\S+) of answered calls, a reserve of ([0-9.e+-]+)(, plus \S+ a second)?, over (\w+)(, for each target)?$`,
)

func (q *question) circumstances() string {
	deadline := "no deadline"
	if q.deadline > 0 {
		deadline = "a deadline of " + shortTime(q.deadline)
	}
	return fmt.Sprintf("%s calls/s from %s; %s; the server takes %s on average and can serve %s more than the normal load.",
		grouped(q.rate), processes(q.processes), deadline, shortTime(q.latency.Mean), percent(q.headroom))
}

func processes(n int) string {
	if n == 1 {
		return "1 process"
	}
	return grouped(float64(n)) + " processes"
}
