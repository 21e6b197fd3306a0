// Package waterfall reads a trace as Jaeger's query API gives it, and draws it: a row for
// each span, attempts with their status codes and waits with their sources in plain words, and
// the events of the call in a table below.
package waterfall

import (
	"cmp"
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"github.com/grpcretry/grpcretry"
	"github.com/grpcretry/grpcretry/telemetry"
)

// A Trace is one of the "data" of an answer of /api/traces.
type Trace struct {
	TraceID   string             `json:"traceID"`
	Spans     []Span             `json:"spans"`
	Processes map[string]Process `json:"processes"`
}

// A Process is one of those that spans came from.
type Process struct {
	ServiceName string `json:"serviceName"`
}

// A Span is a span in Jaeger's words: attributes are tags, events are logs.
type Span struct {
	SpanID        string      `json:"spanID"`
	ProcessID     string      `json:"processID"`
	OperationName string      `json:"operationName"`
	References    []Reference `json:"references"`
	StartTime     int64       `json:"startTime"` // µs since 1970
	Duration      int64       `json:"duration"`  // µs
	Tags          []Tag       `json:"tags"`
	Logs          []Log       `json:"logs"`
}

// A Reference names the parent of a span.
type Reference struct {
	RefType string `json:"refType"`
	SpanID  string `json:"spanID"`
}

// A Tag is an attribute. Numbers are float64 here, as JSON has them.
type Tag struct {
	Key   string `json:"key"`
	Value any    `json:"value"`
}

// A Log is an event; its name is the field "event".
type Log struct {
	Timestamp int64 `json:"timestamp"` // µs since 1970
	Fields    []Tag `json:"fields"`
}

// Read reads the answer of /api/traces or /api/traces/ID.
func Read(r io.Reader) ([]Trace, error) {
	var answer struct {
		Data   []Trace `json:"data"`
		Errors []struct {
			Msg string `json:"msg"`
		} `json:"errors"`
	}
	if err := json.NewDecoder(r).Decode(&answer); err != nil {
		return nil, fmt.Errorf("waterfall: not an answer of Jaeger: %w", err)
	}
	if len(answer.Errors) > 0 {
		return nil, fmt.Errorf("waterfall: Jaeger says: %s", answer.Errors[0].Msg)
	}
	for _, t := range answer.Data {
		slices.SortStableFunc(t.Spans, func(a, b Span) int {
			return cmp.Or(cmp.Compare(a.StartTime, b.StartTime), cmp.Compare(b.Duration, a.Duration))
		})
	}
	return answer.Data, nil
}

// Below returns the spans whose parent is a span of that ID, in the order of their start;
// of "" those that have none.
func (t Trace) Below(parent string) []Span {
	var spans []Span
	for _, s := range t.Spans {
		if s.Parent() == parent {
			spans = append(spans, s)
		}
	}
	return spans
}

// Service is the name of the service that the span came from.
func (t Trace) Service(s Span) string { return t.Processes[s.ProcessID].ServiceName }

// Parent is the ID of the span's parent, "" if it has none.
func (s Span) Parent() string {
	for _, r := range s.References {
		if r.RefType == "CHILD_OF" {
			return r.SpanID
		}
	}
	return ""
}

// Start is when the span began.
func (s Span) Start() time.Time { return time.UnixMicro(s.StartTime) }

// End is when the span ended.
func (s Span) End() time.Time { return time.UnixMicro(s.StartTime + s.Duration) }

// Time is when the event happened.
func (l Log) Time() time.Time { return time.UnixMicro(l.Timestamp) }

// Value is that of the tag with the key, as text; "" if there is none.
func Value(tags []Tag, key string) string {
	for _, t := range tags {
		if t.Key == key {
			return fmt.Sprint(t.Value)
		}
	}
	return ""
}

// Measures of the picture, in pixels.
const (
	width     = 960
	margin    = 24
	chartLeft = 250
	chartEnd  = 760 // right of it there is room for the longest status code
	top       = 104
	rowHeight = 46
	bar       = 16
)

const (
	blue  = "#3b6ea5"
	green = "#2e7d32"
	red   = "#b3261e"
	grey  = "#5f6368"
	faint = "#dadce0"
	black = "#202124"
)

// A wait is a light bar with dark text in it, which is legible where it ends outside, too.
const (
	amber     = "#fdecc8"
	darkAmber = "#7a4f01"
)

// Draw writes the trace as an SVG. It is for one call with its attempts, below at most a
// few spans of its caller.
func Draw(w io.Writer, title string, t Trace) error {
	if len(t.Spans) == 0 {
		return fmt.Errorf("waterfall: the trace has no spans")
	}
	p := pictureOf(t, chartEnd)
	rows := p.rows("", 0)
	events := p.events()
	bottom := top + len(rows)*rowHeight
	height := bottom + 8
	if len(events) > 0 {
		height = bottom + 84 + 22*len(events)
	}

	p.begin(height, title, "A trace as Jaeger gives it back. Yellow: the waits. Diamonds: the events in the table.")
	p.axis(bottom)
	for i, r := range rows {
		p.row(top+i*rowHeight, r)
	}
	p.table(bottom+40, events)
	p.printf(`</svg>`)
	_, err := io.WriteString(w, p.out.String())
	return err
}

// A picture is an SVG being written.
type picture struct {
	trace  Trace
	start  time.Time
	length time.Duration
	right  float64 // the end of the time axis
	out    strings.Builder
}

func pictureOf(t Trace, right float64) *picture {
	p := &picture{trace: t, start: t.Spans[0].Start(), right: right}
	for _, s := range t.Spans {
		p.length = max(p.length, s.End().Sub(p.start))
	}
	return p
}

// begin writes the head of the picture and its titles.
func (p *picture) begin(height int, title, subtitle string) {
	p.printf(`<svg xmlns="http://www.w3.org/2000/svg" width="%d" height="%d" viewBox="0 0 %d %d" role="img" `+
		`font-family="Liberation Sans, Arial, Helvetica, sans-serif" font-size="13">`, width, height, width, height)
	p.printf(`<title>%s</title>`, escape(title))
	p.printf(`<rect width="%d" height="%d" fill="#ffffff"/>`, width, height)
	p.text(margin, 38, black, `font-size="19" font-weight="bold"`, title)
	p.text(margin, 62, grey, "", subtitle)
}

// A row is a span, and how deep it is below the first.
type row struct {
	Span
	depth int
}

func (p *picture) rows(parent string, depth int) []row {
	var rows []row
	for _, s := range p.trace.Below(parent) {
		rows = append(rows, row{s, depth})
		rows = append(rows, p.rows(s.SpanID, depth+1)...)
	}
	return rows
}

// events are those that attempts left, in order.
func (p *picture) events() []Log {
	var events []Log
	for _, s := range p.trace.Spans {
		for _, l := range s.Logs {
			if Value(l.Fields, "event") == telemetry.SpanEventAttempt {
				events = append(events, l)
			}
		}
	}
	slices.SortStableFunc(events, func(a, b Log) int { return cmp.Compare(a.Timestamp, b.Timestamp) })
	return events
}

// axis draws a line for each round number of milliseconds.
func (p *picture) axis(bottom int) {
	step := time.Millisecond
	for i := 0; p.length/step > 8; i++ {
		step = step * time.Duration([]int{20, 25, 20}[i%3]) / 10 // 1, 2, 5, 10, 20 …
	}
	for at := time.Duration(0); at <= p.length; at += step {
		x := p.x(p.start.Add(at))
		p.printf(`<line x1="%.1f" y1="%d" x2="%.1f" y2="%d" stroke="%s"/>`, x, top-12, x, bottom, faint)
		p.text(x, top-18, grey, `text-anchor="middle" font-size="12"`, fmt.Sprintf("%d ms", at.Milliseconds()))
	}
}

func (p *picture) x(at time.Time) float64 {
	return chartLeft + float64(at.Sub(p.start))/float64(p.length)*(p.right-chartLeft)
}

func (p *picture) row(y int, r row) {
	middle := y + rowHeight/2
	label, kind := names(r.Span)
	x := margin + 16*r.depth
	p.text(float64(x), middle-2, black, `font-weight="bold"`, label)
	p.text(float64(x), middle+14, grey, `font-size="12"`, kind)

	from, to := p.x(r.Start()), p.x(r.End())
	if r.isWait() {
		p.wait(middle, from, to, r.Span)
		return
	}
	p.printf(`<rect x="%.1f" y="%d" width="%.1f" height="%d" rx="3" fill="%s"/>`, from, middle-bar/2, max(to-from, 3), bar, color(r.Span))
	code := Value(r.Tags, telemetry.AttrStatusCode)
	p.text(max(to, from+3)+12, middle+5, color(r.Span), `font-weight="bold"`, code)
	for _, l := range r.Logs {
		if Value(l.Fields, "event") == telemetry.SpanEventAttempt {
			x := p.x(l.Time())
			p.printf(`<path d="M%.1f %d l6 6 l-6 6 l-6 -6 z" fill="#ffffff" stroke="%s" stroke-width="1.5"/>`, x, middle-6, black)
		}
	}
}

func (p *picture) wait(middle int, from, to float64, s Span) {
	const bar = bar + 6 // with room for the text
	p.printf(`<rect x="%.1f" y="%d" width="%.1f" height="%d" rx="3" fill="%s" stroke="%s"/>`,
		from, middle-bar/2, max(to-from, 3), bar, amber, darkAmber)
	p.text(from+8, middle+4, darkAmber, `font-size="12"`, p.decided(s))
}

// decided is what was decided before a wait, of which the bar shows how long it really was: it is in
// the last event before the next attempt.
func (p *picture) decided(wait Span) (text string) {
	for _, l := range p.events() {
		if Value(l.Fields, telemetry.AttrDecision) == "retry" && l.Time().Before(wait.End()) {
			text = waitAfter(l)
		}
	}
	return text
}

// waitAfter is the wait that follows an attempt, in words, "" if none does.
func waitAfter(l Log) string {
	ms := Value(l.Fields, telemetry.AttrWait)
	if ms == "" {
		return ""
	}
	return ms + " ms, " + source(Value(l.Fields, telemetry.AttrWaitSource))
}

// isWait reports whether the span is a wait between two attempts.
func (s Span) isWait() bool { return s.OperationName == telemetry.SpanWait }

// names are what a span is called, and what it is.
func names(s Span) (label, kind string) {
	method := s.OperationName[strings.LastIndex(s.OperationName, ".")+1:]
	switch {
	case s.isWait():
		return s.OperationName, "before attempt " + Value(s.Tags, telemetry.AttrNextAttempt)
	case Value(s.Tags, telemetry.AttrAttemptNumber) != "":
		return "attempt " + Value(s.Tags, telemetry.AttrAttemptNumber), method
	case Value(s.Tags, telemetry.AttrAttemptCount) != "":
		return method, "the call, " + Value(s.Tags, telemetry.AttrAttemptCount) + " attempts"
	default:
		return s.OperationName, "the caller"
	}
}

// source says in words who chose a wait.
func source(s string) string {
	switch s {
	case grpcretry.WaitPushback.String():
		return "asked for by the server"
	case grpcretry.WaitRetryInfo.String():
		return "at least what the server asked for"
	default:
		return s
	}
}

func color(s Span) string {
	switch code := Value(s.Tags, telemetry.AttrStatusCode); {
	case Value(s.Tags, telemetry.AttrAttemptNumber) == "":
		return blue
	case code == "OK":
		return green
	default:
		return red
	}
}

// table lists the events.
func (p *picture) table(y int, events []Log) {
	if len(events) == 0 {
		return
	}
	p.text(margin, y, black, `font-size="15" font-weight="bold"`, "Events "+telemetry.SpanEventAttempt)
	columns := []struct {
		x    float64
		head string
		cell func(Log) string
	}{
		{margin, "at", func(l Log) string { return fmt.Sprintf("%.1f ms", l.Time().Sub(p.start).Seconds()*1000) }},
		{120, "attempt", func(l Log) string { return Value(l.Fields, telemetry.AttrAttemptNumber) }},
		{200, "status code", func(l Log) string { return Value(l.Fields, telemetry.AttrStatusCode) }},
		{390, "decision", func(l Log) string {
			return strings.TrimSpace(Value(l.Fields, telemetry.AttrDecision) + " " + Value(l.Fields, telemetry.AttrReason))
		}},
		{540, "wait that follows", func(l Log) string { return cmp.Or(waitAfter(l), "–") }},
		{780, "retries left in budget", func(l Log) string { return cmp.Or(Value(l.Fields, telemetry.AttrBudgetBalance), "–") }},
	}
	for _, c := range columns {
		p.text(c.x, y+26, grey, `font-size="12"`, c.head)
		for i, l := range events {
			p.text(c.x, y+50+22*i, black, "", c.cell(l))
		}
	}
	p.printf(`<line x1="%d" y1="%d" x2="%d" y2="%d" stroke="%s"/>`, margin, y+33, width-margin, y+33, faint)
}

func (p *picture) text(x float64, y int, color, attributes, s string) {
	p.printf(`<text x="%.1f" y="%d" fill="%s" %s>%s</text>`, x, y, color, attributes, escape(s))
}

func (p *picture) printf(format string, args ...any) {
	fmt.Fprintf(&p.out, format+"\n", args...)
}

func escape(s string) string {
	return strings.NewReplacer("&", "&amp;", "<", "&lt;", ">", "&gt;", `"`, "&quot;").Replace(s)
}
