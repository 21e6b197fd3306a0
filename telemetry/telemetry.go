// Package telemetry has the names that package grpcretry uses in spans and metrics, for programs
// that read spans and metrics or configure their collection. docs/observing.md in the repository
// lists the meanings and values.
package telemetry

// The names of the span events.
const (
	// SpanEventAttempt is the event that is recorded when an attempt ends, on the caller's span or
	// on the call span.
	SpanEventAttempt = "grpcretry.attempt"

	// SpanEventStop is the event, with AttrReason, that is recorded when a call ends while it waits
	// to retry: the last attempt's event has announced that retry.
	SpanEventStop = "grpcretry.stop"

	// SpanEventNoRetry is the event that the server interceptors record on the request's span when the
	// response says "do not retry".
	SpanEventNoRetry = "grpcretry.no_retry"
)

// SpanWait is the name of the span for each wait with no attempt in flight, below the call span.
const SpanWait = "retry wait"

// The names of the attributes on span events and on the spans.
const (
	AttrAttemptNumber = "grpcretry.attempt.number"
	AttrAttemptCount  = "grpcretry.attempts"
	AttrNextAttempt   = "grpcretry.next_attempt.number"
	AttrStatusCode    = "rpc.response.status_code"
	AttrPeer          = "network.peer.address"
	AttrMessage       = "grpcretry.message"
	AttrDecision      = "grpcretry.decision"
	AttrReason        = "grpcretry.reason"
	AttrWait          = "grpcretry.wait_ms"
	AttrWaitSource    = "grpcretry.wait_source"
	AttrRepeats       = "grpcretry.wait.repeats"
	AttrBudgetBalance = "grpcretry.budget.balance"
	AttrHedge         = "grpcretry.attempt.hedge"
	AttrSentAfter     = "grpcretry.attempt.sent_after"
	AttrWinner        = "grpcretry.winner"

	// On a server's span of a request that is retried; AttrRetriedBy is also on metrics.
	AttrPreviousAttempts = "grpcretry.previous_attempts"
	AttrRetriedBy        = "grpcretry.retried_by"
)

// The names of the metrics.
const (
	MetricAttempts       = "grpcretry.attempts"
	MetricCalls          = "grpcretry.calls"
	MetricRescuedCalls   = "grpcretry.rescued_calls"
	MetricWastedAttempts = "grpcretry.wasted_attempts"
	MetricPassedCalls    = "grpcretry.passed_calls"
	MetricWaitDuration   = "grpcretry.wait.duration"
	MetricBudgetBalance  = "grpcretry.budget.balance"
	MetricBudgetRefusals = "grpcretry.budget.refusals"
	MetricHedges         = "grpcretry.hedges"
	MetricWaitingCalls   = "grpcretry.waiting_calls"
	MetricTargetWaiting  = "grpcretry.target.waiting_calls"
	MetricTargetFailing  = "grpcretry.target.failing"
	MetricOpenStreams    = "grpcretry.open_streams"
	MetricReplayMemory   = "grpcretry.replay.memory"
	MetricReplayRefusals = "grpcretry.replay.refusals"

	// Of the server interceptors.
	MetricServerRetries   = "grpcretry.server.retries"
	MetricServerNoRetries = "grpcretry.server.no_retry_responses"
)

// The names of the attributes that only metrics have. Metrics also have AttrStatusCode,
// AttrDecision and AttrWaitSource.
const (
	AttrTarget      = "grpcretry.target"
	AttrOutcome     = "grpcretry.outcome"
	AttrBudget      = "grpcretry.budget"
	AttrHedgeResult = "grpcretry.hedge.result"
)
