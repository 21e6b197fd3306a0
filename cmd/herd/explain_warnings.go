package main

import (
	"fmt"
	"math"
	"slices"
	"strings"
	"time"

	"google.golang.org/grpc/codes"

	"github.com/grpcretry/grpcretry/cmd/herd/internal/sim"
)

// This file warns of policies that do not do what their authors expect. Each warning says what to
// change.

// warnings is the section of warnings.
func (e *explanation) warnings() explainSection {
	if all := e.warned(); len(all) > 0 {
		return explainSection{Title: "Warnings", Parts: []explainPart{{Points: all}}}
	}
	return explainSection{Title: "Warnings", Parts: []explainPart{{Text: "None."}}}
}

func (e *explanation) warned() (all []string) {
	for _, look := range []func() []string{
		e.warnOfNoRetries, e.warnOfCodes, e.warnOfNoJitter, e.warnOfLastAttempt, e.warnOfTimeouts,
		e.warnOfHedging, e.warnOfNoBudget, e.warnOfBudget, e.warnOfLayers, e.warnAsTheLibrary,
	} {
		all = append(all, look()...)
	}
	return all
}

// warnAsTheLibrary returns the warnings that a program with this policy logs.
func (e *explanation) warnAsTheLibrary() (all []string) {
	r, err := e.strategy.Retrier()
	if err != nil {
		return nil
	}
	for _, text := range r.Warnings() {
		all = append(all, strings.TrimPrefix(text, "all methods: ")+". The library logs this, too (Retrier.Warnings).")
	}
	return all
}

func (e *explanation) warnOfNoRetries() []string {
	if e.policy.MaxAttempts == 1 {
		return []string{"There are no retries: a call has one attempt. Set at least 2 (-attempts, WithMaxAttempts)."}
	}
	return nil
}

// hopeless are codes that another attempt does not change.
var hopeless = []codes.Code{codes.InvalidArgument, codes.NotFound, codes.AlreadyExists, codes.PermissionDenied, codes.Unauthenticated,
	codes.FailedPrecondition, codes.OutOfRange, codes.Unimplemented}

func (e *explanation) warnOfCodes() (all []string) {
	var useless []codes.Code
	for _, c := range e.codes() {
		if slices.Contains(hopeless, c) {
			useless = append(useless, c)
		}
	}
	if len(useless) > 0 {
		all = append(all, fmt.Sprintf("%s will be the same the next time: the request is at fault. Leave it to the caller (-codes, WithCodes).", codeList(useless)))
	}
	if slices.Contains(e.codes(), codes.DeadlineExceeded) {
		all = append(all, "DEADLINE_EXCEEDED comes from servers that are too slow already, and may still be working on the call. Leave it out (-codes, WithCodes), or hedge.")
	}
	if !slices.Contains(e.codes(), codes.Unavailable) && !e.unsentOnly {
		all = append(all, "UNAVAILABLE is not retried, the code of servers that restart. Add it (-codes, WithCodes).")
	}
	return all
}

// retries returns the number of waits that a backoff is asked for.
func (e *explanation) retries() int {
	if e.strategy.Hedging != nil || e.unsentOnly {
		return 0
	}
	return e.policy.MaxAttempts - 1
}

func (e *explanation) warnOfNoJitter() []string {
	for retry := 1; retry <= min(e.retries(), 10); retry++ {
		least := e.policy.Backoff.Delay(retry, 0, 0)
		if e.policy.Backoff.Delay(retry, 0, math.Nextafter(1, 0)) > least {
			return nil
		}
	}
	if e.retries() == 0 {
		return nil
	}
	return []string{"The waits have no jitter: clients that fail together retry together, at the same instant. Use full jitter (-jitter full, FullJitter)."}
}

// rarely is the share of calls below which nothing is said of them.
const rarely = 0.01

func (e *explanation) warnOfLastAttempt() (all []string) {
	for _, f := range e.stories {
		if f.kind.unsent || f.kind.silent || e.unsentOnly {
			continue
		}
		if f.many.cut >= rarely {
			all = append(all, fmt.Sprintf("After %s, %s of the calls never get their last attempt because of the deadline. "+
				"Lower the waits or the number of attempts, or raise the deadline.", f.kind.name, percent(f.many.cut)))
		}
		if f.many.elapsed >= rarely {
			all = append(all, fmt.Sprintf("After %s, %s of the calls never get their last attempt because no attempt starts later than %s. "+
				"Raise that limit (-max-elapsed, WithMaxElapsed), or lower the waits.", f.kind.name, percent(f.many.elapsed), shortTime(e.policy.MaxElapsed)))
		}
	}
	return all
}

func (e *explanation) warnOfTimeouts() (all []string) {
	timeout := e.policy.AttemptTimeout
	if e.deadline == 0 {
		all = append(all, "Calls have no deadline: one that a server never answers hangs until the attempt timeout, or forever. Give every call a deadline.")
	} else if timeout >= e.deadline {
		all = append(all, fmt.Sprintf("The attempt timeout of %s is not below the deadline of %s, so it never ends an attempt. Set it to at most %s (-attempt-timeout, WithAttemptTimeout).",
			shortTime(timeout), shortTime(e.deadline), shortTime(e.deadline/2)))
	}
	if late := 1 - e.answered(); e.deadline > 0 && late >= rarely {
		all = append(all, fmt.Sprintf("In good times %s of the calls end with the deadline of %s, because the server takes longer. Raise the deadline.",
			percent(late), shortTime(e.deadline)))
	}
	if slow := e.calm.Groups[0].Latency.P99; timeout > 0 && timeout < slow {
		all = append(all, fmt.Sprintf("The attempt timeout of %s is shorter than healthy responses: 1%% of them take over %s. Set it to several times that (-attempt-timeout, WithAttemptTimeout).",
			shortTime(timeout), roundTime(slow)))
	}
	return all
}

func (e *explanation) warnOfHedging() (all []string) {
	h := e.strategy.Hedging
	if h == nil {
		return nil
	}
	longest := e.hedges
	if h.Kind == sim.HedgeAtQuantile {
		longest = h.AtMost
	}
	if e.deadline > 0 && longest >= e.deadline {
		all = append(all, fmt.Sprintf("The hedging delay, of up to %s, is not below the deadline of %s: no hedge is sent. Lower it (-hedge, HedgeAfter or the upper bound of HedgeAtQuantile).",
			shortTime(longest), shortTime(e.deadline)))
	}
	if _, due := e.hedgedShare(); due > 0.15 {
		all = append(all, fmt.Sprintf("In good times a hedge is due in %s of the calls: %s is a delay that healthy responses exceed. Use a quantile (-hedge quantile:0.95,5ms..1s, HedgeAtQuantile).",
			percent(min(due, 1)), shortTime(e.hedges)))
	}
	return all
}

func (e *explanation) warnOfNoBudget() []string {
	if e.strategy.Budget.Kind != sim.UnlimitedBudget || e.policy.MaxAttempts == 1 {
		return nil
	}
	change := "Add a budget (-budget default, WithRatioBudget)."
	if e.configured {
		change = `Add "retryThrottling" to the service config, or let this library obey it, which adds its own budget (-budget default, WithServiceConfig).`
	}
	return []string{fmt.Sprintf("There is no budget: in an outage the server gets %s times its normal load for as long as it lasts, which can keep it down after the cause is gone. %s",
		times(e.lastSimulated(1).steady), change)}
}

// lastSimulated returns the figures for so many layers or, if they are too many to simulate, for the
// largest number that is not.
func (e *explanation) lastSimulated(layers int) outageFigures {
	for _, f := range slices.Backward(e.outages[:layers]) {
		if !math.IsNaN(f.steady) {
			return f
		}
	}
	each := e.stories[0].many.attempts
	return outageFigures{layers: 1, first: each, steady: each}
}

// times formats a number of attempts per call for a sentence.
func times(v float64) string { return grouped(math.Round(10*v) / 10) }

func (e *explanation) warnOfBudget() (all []string) {
	if e.budget.unlimited {
		return nil
	}
	n := float64(e.processes)
	if share := e.budget.perSecond * n / e.rate; share > e.headroom+0.005 {
		all = append(all, fmt.Sprintf("The budget allows retries of %s of the load, more than the headroom of %s: retries alone can overload the server. Lower the ratio to %s (-budget, WithRatioBudget).",
			percent(share), percent(e.headroom), percent(e.headroom)))
	}
	if load := e.budget.fresh * n / e.rate; load > 2 {
		all = append(all, fmt.Sprintf("%s processes have %s retries in reserve, the calls of %s: many processes with few calls each. Lower the reserve (-budget ratio:…,reserve=1, RatioBudget.Reserve).",
			grouped(n), grouped(e.budget.fresh*n), shortTime(time.Duration(load*float64(time.Second)).Round(time.Millisecond))))
	}
	return all
}

func (e *explanation) warnOfLayers() []string {
	if e.layers < 2 || e.policy.MaxAttempts == 1 || e.unsentOnly {
		return nil
	}
	f := e.lastSimulated(e.layers)
	if f.layers < 2 {
		return nil
	}
	change := fmt.Sprintf("Retry at one layer only, or let servers that gave up forbid it to their callers (grpcretry.UnaryServerInterceptor): %s are left.",
		times(f.intercepted))
	switch {
	case e.strategy.Budget.Kind == sim.UnlimitedBudget:
		return []string{fmt.Sprintf("Retries of %d layers multiply: one call of a client becomes %s attempts at the last server. %s", f.layers, times(f.steady), change)}
	case f.first > 2:
		return []string{fmt.Sprintf("Retries of %d layers multiply: in the first 10 s of an outage one call of a client becomes %s attempts at the last server. %s", f.layers, times(f.first), change)}
	}
	return nil
}
