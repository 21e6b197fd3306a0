package recorded

import (
	"context"
	"encoding/binary"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/trace"
	"go.opentelemetry.io/otel/trace/noop"
)

// Spans is a provider that keeps all spans.
type Spans struct {
	noop.TracerProvider
	mu      sync.Mutex
	started []*Span // guarded by mu
	ended   []*Span // likewise
}

// Started returns the spans in the order in which they were started.
func (r *Spans) Started() []*Span {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.Clone(r.started)
}

// Ended returns the spans that have ended, in the order in which they did.
func (r *Spans) Ended() []*Span {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.Clone(r.ended)
}

// Tracer returns a tracer, the same for every name.
func (r *Spans) Tracer(string, ...trace.TracerOption) trace.Tracer { return tracer{of: r} }

type tracer struct {
	noop.Tracer
	of *Spans
}

// Start starts a span below the context's.
func (t tracer) Start(ctx context.Context, name string, opts ...trace.SpanStartOption) (context.Context, trace.Span) {
	config := trace.NewSpanStartConfig(opts...)
	s := &Span{of: t.of, name: name, kind: trace.ValidateSpanKind(config.SpanKind()), start: config.Timestamp(),
		parent: trace.SpanContextFromContext(ctx)}
	if s.start.IsZero() {
		s.start = time.Now()
	}
	s.SetAttributes(config.Attributes()...)

	t.of.mu.Lock()
	t.of.started = append(t.of.started, s)
	number := uint64(len(t.of.started))
	t.of.mu.Unlock()

	own := trace.SpanContextConfig{TraceID: s.parent.TraceID(), TraceFlags: trace.FlagsSampled}
	binary.BigEndian.PutUint64(own.SpanID[:], number)
	if !own.TraceID.IsValid() {
		binary.BigEndian.PutUint64(own.TraceID[:], number)
	}
	s.own = trace.NewSpanContext(own)
	return trace.ContextWithSpan(ctx, s), s
}

// A Span keeps what is recorded on it until it ends. It is safe for concurrent use.
type Span struct {
	noop.Span
	of          *Spans
	name        string
	kind        trace.SpanKind
	own, parent trace.SpanContext
	start       time.Time

	mu          sync.Mutex
	end         time.Time // guarded by mu, as all below
	attributes  []attribute.KeyValue
	events      []Event
	status      codes.Code
	description string
}

// An Event is what AddEvent received.
type Event struct {
	Name       string
	Attributes []attribute.KeyValue
	Time       time.Time
}

// Name returns the span's name.
func (s *Span) Name() string { return s.name }

// SpanKind returns the span's kind.
func (s *Span) SpanKind() trace.SpanKind { return s.kind }

// SpanContext returns the span's identity.
func (s *Span) SpanContext() trace.SpanContext { return s.own }

// Parent returns the identity of the span above.
func (s *Span) Parent() trace.SpanContext { return s.parent }

// TracerProvider returns the provider that keeps the span.
func (s *Span) TracerProvider() trace.TracerProvider { return s.of }

// StartTime returns when the span was started.
func (s *Span) StartTime() time.Time { return s.start }

// EndTime returns when the span ended.
func (s *Span) EndTime() time.Time {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.end
}

// Attributes returns the span's attributes, in the order in which they were first set.
func (s *Span) Attributes() []attribute.KeyValue {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.attributes)
}

// Events returns the span's events.
func (s *Span) Events() []Event {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.events)
}

// Status returns the span's status.
func (s *Span) Status() (codes.Code, string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.status, s.description
}

// IsRecording reports whether the span has not ended.
func (s *Span) IsRecording() bool { return s.EndTime().IsZero() }

// SetAttributes sets attributes. A later value replaces an earlier one of the same key.
func (s *Span) SetAttributes(attrs ...attribute.KeyValue) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.end.IsZero() {
		return
	}
	for _, a := range attrs {
		if i := slices.IndexFunc(s.attributes, func(b attribute.KeyValue) bool { return a.Key == b.Key }); i >= 0 {
			s.attributes[i] = a
		} else {
			s.attributes = append(s.attributes, a)
		}
	}
}

// AddEvent adds an event.
func (s *Span) AddEvent(name string, opts ...trace.EventOption) {
	config := trace.NewEventConfig(opts...)
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.end.IsZero() {
		s.events = append(s.events, Event{Name: name, Attributes: config.Attributes(), Time: config.Timestamp()})
	}
}

// SetStatus sets the status. One of lower rank changes nothing, as OpenTelemetry specifies: OK is above
// Error, and Error above Unset.
func (s *Span) SetStatus(code codes.Code, description string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.end.IsZero() || code < s.status {
		return
	}
	if s.status, s.description = code, ""; code == codes.Error {
		s.description = description
	}
}

// End ends the span. Further calls have no effect.
func (s *Span) End(opts ...trace.SpanEndOption) {
	config := trace.NewSpanEndConfig(opts...)
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.end.IsZero() {
		return
	}
	if s.end = config.Timestamp(); s.end.IsZero() {
		s.end = time.Now()
	}
	s.of.mu.Lock()
	defer s.of.mu.Unlock()
	s.of.ended = append(s.of.ended, s)
}

// Text returns attributes as "key=value key=value".
func Text(attrs []attribute.KeyValue) string {
	var parts []string
	for _, a := range attrs {
		parts = append(parts, fmt.Sprintf("%s=%v", a.Key, a.Value.AsInterface()))
	}
	return strings.Join(parts, " ")
}
