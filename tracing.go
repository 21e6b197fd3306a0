package grpcretry

import (
	"context"
	"time"

	"go.opentelemetry.io/otel/attribute"
	otelcodes "go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/trace"
	"google.golang.org/grpc/status"

	"github.com/grpcretry/grpcretry/internal/instruments"
	"github.com/grpcretry/grpcretry/internal/reasons"
	"github.com/grpcretry/grpcretry/internal/words"
	"github.com/grpcretry/grpcretry/telemetry"
)

// callSpans are the spans that receive a call's events. Nil stands for none.
type callSpans struct {
	events trace.Span // receives the attempts' events; it records
	call   trace.Span // our own; nil without WithCallSpan
	wait   trace.Span // the wait before the next attempt, below our own; nil if there is none
}

func startCallSpan(f *facts, tracer trace.Tracer) (context.Context, trace.Span) {
	method := instruments.MethodName(f.method)
	attrs := []attribute.KeyValue{attribute.String("rpc.system.name", "grpc"), attribute.String(instruments.AttrMethod, method)}
	if f.functionTarget != "" {
		attrs = attrs[1:] // a function may call anything
	}
	return tracer.Start(f.ctx, method, trace.WithSpanKind(trace.SpanKindInternal), trace.WithAttributes(attrs...))
}

func (s *callSpans) attemptFailed(f *facts, a *Attempt, v verdict, now time.Time) {
	more := make([]attribute.KeyValue, 0, 5)
	if !v.retries() {
		more = append(more, attribute.String(telemetry.AttrReason, reasons.Of(v.Reason).Word))
	}
	if v.WaitSource != waitNone {
		more = append(more,
			attribute.Int64(telemetry.AttrWait, v.Wait.Milliseconds()),
			attribute.String(telemetry.AttrWaitSource, v.WaitSource.String()))
	}
	if balance, limited := balanceOf(f.budget, now); limited {
		more = append(more, attribute.Float64(telemetry.AttrBudgetBalance, balance))
	}
	if message := words.Message(a.Err); message != "" {
		more = append(more, attribute.String(telemetry.AttrMessage, words.Truncate(words.Printable(message), words.MaxMessage)))
	}
	s.attemptEnded(f, a, decisionName(v), more...)
}

// attemptEnded adds the event of one attempt.
func (s *callSpans) attemptEnded(f *facts, a *Attempt, decision string, more ...attribute.KeyValue) {
	if s == nil {
		return
	}
	attrs := append(make([]attribute.KeyValue, 0, 13),
		attribute.Int(telemetry.AttrAttemptNumber, a.Number),
		attribute.String(telemetry.AttrStatusCode, words.Code(a.Code())),
		attribute.String(telemetry.AttrDecision, decision))
	if a.repeats > 0 {
		attrs = append(attrs, attribute.Int(telemetry.AttrRepeats, int(a.repeats)))
	}
	if a.Peer != nil {
		attrs = append(attrs, attribute.String(telemetry.AttrPeer, a.Peer.String()))
	}
	if f.mode == modeHedged && a.Number > 1 {
		attrs = append(attrs, attribute.Bool(telemetry.AttrHedge, a.Hedge), attribute.String(telemetry.AttrSentAfter, a.WaitSource.String()))
	}
	s.events.AddEvent(telemetry.SpanEventAttempt, trace.WithAttributes(append(attrs, more...)...))
}

// waitStarted starts a span for the wait before the next attempt, if the call has a span. No attempt
// is in flight.
func (s *callSpans) waitStarted(f *facts, tracer trace.Tracer, next int, v verdict, now time.Time) {
	if s == nil || s.call == nil {
		return
	}
	_, s.wait = tracer.Start(f.ctx, telemetry.SpanWait, trace.WithSpanKind(trace.SpanKindInternal), trace.WithTimestamp(now),
		trace.WithAttributes(
			attribute.Int(telemetry.AttrNextAttempt, next),
			attribute.Int64(telemetry.AttrWait, v.Wait.Milliseconds()),
			attribute.String(telemetry.AttrWaitSource, v.WaitSource.String())))
}

// waitEnded ends the span of a wait, if there is one.
func (s *callSpans) waitEnded() {
	if s != nil && s.wait != nil {
		span := s.wait
		s.wait = nil
		span.End()
	}
}

// waitStopped adds an event with the reason why the scheduled retry was not made. The wait's span
// gets the same reason, and ends with the call.
func (s *callSpans) waitStopped(reason error) {
	attr := attribute.String(telemetry.AttrReason, reasons.Of(reason).Word)
	s.events.AddEvent(telemetry.SpanEventStop, trace.WithAttributes(attr))
	if s.wait != nil {
		s.wait.SetAttributes(attr)
	}
}

// end ends the call span, if there is one, with the status that the caller gets. last is the number
// of the attempt that succeeded, or failed last; it is 0 after a panic.
func (s *callSpans) end(f *facts, made, last int, err, reason error) {
	if s == nil || s.call == nil {
		return
	}
	s.waitEnded()
	span := s.call
	s.call = nil // so that the span ends once, even if something panics after that
	span.SetAttributes(
		attribute.String(telemetry.AttrStatusCode, words.Code(status.Code(err))),
		attribute.Int(telemetry.AttrAttemptCount, made))
	if err == nil && f.mode == modeHedged {
		span.SetAttributes(attribute.Int(telemetry.AttrWinner, last))
	}
	if reason != nil {
		span.SetAttributes(attribute.String(telemetry.AttrReason, reasons.Of(reason).Word))
	}
	if err != nil {
		span.SetStatus(otelcodes.Error, words.Truncate(words.Printable(err.Error()), 2*words.MaxMessage)) // ours and the server's
	}
	span.End()
}

// decisionName returns the value of [telemetry.AttrDecision].
func decisionName(v verdict) string {
	switch {
	case v.retries():
		return instruments.DecisionRetry
	case is(v.Reason, errWouldRetry):
		return reasons.Of(errWouldRetry).Word
	default:
		return instruments.DecisionStop
	}
}
