// Package telemetry has the names under which package grpcretry reports calls, for programs
// that read spans and metrics or configure what collects them. docs/observing.md in the
// repository has the tables of their values.
package telemetry

// The span events.
const (
	// SpanEventAttempt is the event that each attempt leaves when it ends, on the caller's span
	// or on the call span.
	SpanEventAttempt = "grpcretry.attempt"

	// SpanEventStop is the event, with AttrReason, of a call that ends in the wait before a
	// retry: the last attempt's event says that a retry was decided on.
	SpanEventStop = "grpcretry.stop"
)

// The attributes of span events and of the call span.
const (
	AttrAttemptNumber = "grpcretry.attempt.number"
	AttrAttemptCount  = "grpcretry.attempts"
	AttrStatusCode    = "rpc.response.status_code"
	AttrPeer          = "network.peer.address"
	AttrMessage       = "grpcretry.message"
	AttrDecision      = "grpcretry.decision"
	AttrReason        = "grpcretry.reason"
	AttrWait          = "grpcretry.wait_ms"
	AttrWaitSource    = "grpcretry.wait_source"
	AttrBudgetBalance = "grpcretry.budget.balance"
	AttrHedge         = "grpcretry.attempt.hedge"
	AttrSentAfter     = "grpcretry.attempt.sent_after"
	AttrWinner        = "grpcretry.winner"
)

// The metrics.
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
)

// The attributes that only metrics have; they also have AttrStatusCode, AttrDecision and
// AttrWaitSource.
const (
	AttrTarget      = "grpcretry.target"
	AttrOutcome     = "grpcretry.outcome"
	AttrBudget      = "grpcretry.budget"
	AttrHedgeResult = "grpcretry.hedge.result"
)
