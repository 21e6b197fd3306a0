package main

import (
	"fmt"
	"math"
	"slices"
	"strings"

	"google.golang.org/grpc/codes"

	"github.com/grpcretry/grpcretry/cmd/herd/internal/sim"
	"github.com/grpcretry/grpcretry/internal/inside"
)

// This file warns of policies that do not do what their authors expect: those which the library warns of, and
// those which harm a server or help nobody. Each warning says what to change.

// warnings is the section of warnings.
func (e *explanation) warnings() explainSection {
	if all := e.warned(); len(all) > 0 {
		return explainSection{Title: "Warnings", Parts: []explainPart{{Points: all}}}
	}
	return explainSection{Title: "Warnings", Parts: []explainPart{{Text: "None."}}}
}

// hopeless are codes that another attempt does not change.
var hopeless = []codes.Code{codes.InvalidArgument, codes.NotFound, codes.AlreadyExists, codes.PermissionDenied, codes.Unauthenticated,
	codes.FailedPrecondition, codes.OutOfRange, codes.Unimplemented}

func (e *explanation) warned() (all []string) {
	warn := func(wrong bool, text string) {
		if wrong {
			all = append(all, text)
		}
	}
	retried, useless := e.codes(), []codes.Code(nil)
	for _, c := range retried {
		if slices.Contains(hopeless, c) {
			useless = append(useless, c)
		}
	}
	warn(e.policy.MaxAttempts == 1, "There are no retries: a call has one attempt. Set at least 2 (-attempts, WithMaxAttempts).")
	warn(
		len(useless) > 0,
		codeList(useless)+" will be the same the next time: the request is at fault. Leave it to the caller (-codes, WithCodes).",
	)
	warn(
		slices.Contains(retried, codes.DeadlineExceeded),
		"DEADLINE_EXCEEDED comes from servers that are too slow already, and may still be working on the call. Leave it out (-codes, "+
			"WithCodes), or hedge.",
	)
	warn(
		!slices.Contains(retried, codes.Unavailable) && !e.unsentOnly,
		"UNAVAILABLE is not retried, the code of servers that restart. Add it (-codes, WithCodes).",
	)
	warn(
		e.inStep(),
		"The waits have no jitter: clients that fail together retry together, at the same instant. Use full jitter (-jitter full, FullJitter).",
	)
	warn(
		e.deadline == 0,
		"Calls have no deadline: one that a server never answers hangs until the attempt timeout, or forever. Give every call a deadline.",
	)
	warn(
		e.strategy.Budget.Kind == sim.UnlimitedBudget && e.policy.MaxAttempts > 1,
		fmt.Sprintf(
			"There is no budget: in an outage a server gets up to %d attempts per call for as long as it lasts, which can keep it down after "+
				"the cause is gone. "+
				"Add one (-budget default, WithRatioBudget).",
			e.policy.MaxAttempts,
		),
	)
	if r, err := e.strategy.Retrier(); err == nil {
		for _, text := range inside.WarningsOf(r) {
			warn(true, strings.TrimPrefix(text, "all methods: ")+". The library logs this, too (WithLogger).")
		}
	}
	return all
}

// inStep reports whether clients that fail at the same time retry at the same time.
func (e *explanation) inStep() bool {
	if e.strategy.Hedging != nil || e.unsentOnly {
		return false
	}
	for retry := 1; retry < min(e.policy.MaxAttempts, 10); retry++ {
		if e.policy.Backoff.Delay(retry, 0, math.Nextafter(1, 0)) > e.policy.Backoff.Delay(retry, 0, 0) {
			return false
		}
	}
	return e.policy.MaxAttempts > 1
}
