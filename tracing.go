package grpcretry

import (
	"context"
	"errors"
	"fmt"
	"math"
	"strings"
	"time"

	"go.opentelemetry.io/otel/attribute"
	otelcodes "go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/trace"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// EventAttempt is the name of the span event that each attempt leaves when it ends, on
// the caller's span or on the call span that [WithCallSpan] makes.
const EventAttempt = "grpcretry.attempt"

// EventStop is the name of the span event that a call leaves, with AttrReason, when it ends
// in the wait for a retry. The last attempt's decision was to make that.
const EventStop = "grpcretry.stop"

// The attributes of the span event and of the call span; the package comment has the
// table of their values.
const (
	AttrAttempt       = "grpcretry.attempt.number"
	AttrStatusCode    = "rpc.response.status_code"
	AttrPeer          = "network.peer.address"
	AttrDecision      = "grpcretry.decision"
	AttrReason        = "grpcretry.reason"
	AttrWait          = "grpcretry.wait_ms"
	AttrWaitSource    = "grpcretry.wait_source"
	AttrBudgetBalance = "grpcretry.budget.balance"
	AttrAttempts      = "grpcretry.attempts"
	AttrHedge         = "grpcretry.attempt.hedge"
	AttrSentAfter     = "grpcretry.attempt.sent_after"
	AttrWinner        = "grpcretry.winner"

	attrSystem = "rpc.system.name"
	attrMethod = "rpc.method"
)

// The values of AttrDecision.
const (
	decisionSuccess = "success"
	decisionRetry   = "retry"
	decisionStop    = "stop"
	decisionLost    = "lost" // of a hedged call: another attempt was decisive
)

const instrumentationName = "github.com/grpcretry/grpcretry"

// callSpans are where a call is traced to.
type callSpans struct {
	events trace.Span // takes the events of the attempts; nil if it does not record
	call   trace.Span // of our own; nil without WithCallSpan
}

// startSpan finds the span to write to: a call span of our own, or the caller's.
func (c *call) startSpan() {
	var own trace.Span
	if c.retrier.tracer != nil {
		c.ctx, own = c.retrier.tracer.Start(c.ctx, strings.TrimPrefix(c.method, "/"),
			trace.WithSpanKind(trace.SpanKindInternal),
			trace.WithAttributes(
				attribute.String(attrSystem, "grpc"),
				attribute.String(attrMethod, strings.TrimPrefix(c.method, "/"))))
	}
	if span := trace.SpanFromContext(c.ctx); span.IsRecording() {
		c.spans = &callSpans{events: span, call: own}
	} else if own != nil {
		c.spans = &callSpans{call: own}
	}
}

// traceSuccess and traceFailure put the event of one attempt on the span.

func (c *call) traceSuccess(a *Attempt) {
	if c.spans == nil || c.spans.events == nil {
		return
	}
	c.traceAttempt(a, codes.OK, decisionSuccess)
}

func (c *call) traceFailure(a *Attempt, v Verdict, now time.Time) {
	if c.spans == nil || c.spans.events == nil {
		return
	}
	more := make([]attribute.KeyValue, 0, 4)
	decision := decisionRetry
	if !v.Retry {
		decision = decisionStop
		more = append(more, attribute.String(AttrReason, ReasonName(v.Reason)))
	}
	if v.WaitSource != WaitNone {
		more = append(more,
			attribute.Int64(AttrWait, v.Wait.Milliseconds()),
			attribute.String(AttrWaitSource, v.WaitSource.String()))
	}
	if balance := c.budget.Balance(now); !math.IsInf(balance, 0) {
		more = append(more, attribute.Float64(AttrBudgetBalance, balance))
	}
	c.traceAttempt(a, a.Code(), decision, more...)
}

func (c *call) traceLost(a *Attempt) {
	if c.spans != nil && c.spans.events != nil {
		c.traceAttempt(a, a.Code(), decisionLost)
	}
}

func (c *call) traceAttempt(a *Attempt, code codes.Code, decision string, more ...attribute.KeyValue) {
	attrs := append(make([]attribute.KeyValue, 0, 11),
		attribute.Int(AttrAttempt, a.Number),
		attribute.String(AttrStatusCode, codeName(code)),
		attribute.String(AttrDecision, decision))
	if a.Peer != nil {
		attrs = append(attrs, attribute.String(AttrPeer, a.Peer.String()))
	}
	if c.policy.hedges && a.Number > 1 {
		attrs = append(attrs, attribute.Bool(AttrHedge, a.Hedge), attribute.String(AttrSentAfter, a.WaitSource.String()))
	}
	c.spans.events.AddEvent(EventAttempt, trace.WithAttributes(append(attrs, more...)...))
}

// traceStop says why there was no further attempt although there was to be one.
func (c *call) traceStop(reason error) {
	if c.spans != nil && c.spans.events != nil {
		c.spans.events.AddEvent(EventStop, trace.WithAttributes(attribute.String(AttrReason, ReasonName(reason))))
	}
}

// endSpan ends the call span, if there is one, with the status that the caller gets. The
// last attempt is the one that succeeded, or failed last; it is 0 after a panic.
func (c *call) endSpan(last int, err, reason error) {
	if c.spans == nil || c.spans.call == nil {
		return
	}
	span := c.spans.call
	c.spans.call = nil // it ends once, also if something panics after that
	span.SetAttributes(
		attribute.String(AttrStatusCode, codeName(status.Code(err))),
		attribute.Int(AttrAttempts, c.made(last)))
	if err == nil && c.policy.hedges {
		span.SetAttributes(attribute.Int(AttrWinner, last))
	}
	if reason != nil {
		span.SetAttributes(attribute.String(AttrReason, ReasonName(reason)))
	}
	if err != nil {
		span.SetStatus(otelcodes.Error, shortText(err.Error(), 2*maxText))
	}
	span.End()
}

// ReasonName is the short form of a reason to stop ([Error.Reason], [Event.Reason]), as
// span attributes and logs have it: one of few words, fit for a metric label. The package
// comment lists them. What is no reason of this package is the caller's cancellation,
// "cancelled".
func ReasonName(reason error) string {
	for _, r := range reasons {
		if reason == r.err { //nolint:errorlint // a caller's cause may wrap one of ours, and is none
			return r.name
		}
	}
	if errors.Is(reason, context.DeadlineExceeded) {
		return "deadline_exceeded"
	}
	return "cancelled"
}

type namedReason struct {
	err  error
	name string
}

var reasons = [...]namedReason{
	{ErrAttemptsExhausted, "exhausted"},
	{ErrBudgetExhausted, "budget"},
	{ErrDeadline, "deadline"},
	{ErrMaxElapsed, "max_elapsed"},
	{ErrPushback, "pushback"},
	{ErrNotRetryable, "not_retryable"},
	{ErrCommitted, "committed"},
	{ErrConnClosed, "conn_closed"},
	{ErrNotConnected, "not_connected"},
	{ErrLeftToGRPC, "left_to_grpc"},
}

// codeName is a status code as gRPC spells it on the wire and in A66: UNAVAILABLE.
func codeName(c codes.Code) string {
	if int(c) < len(codeNames) {
		return codeNames[c]
	}
	return fmt.Sprintf("CODE(%d)", uint32(c))
}

var codeNames = [...]string{
	"OK", "CANCELLED", "UNKNOWN", "INVALID_ARGUMENT", "DEADLINE_EXCEEDED", "NOT_FOUND", "ALREADY_EXISTS",
	"PERMISSION_DENIED", "RESOURCE_EXHAUSTED", "FAILED_PRECONDITION", "ABORTED", "OUT_OF_RANGE",
	"UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS", "UNAUTHENTICATED",
}
