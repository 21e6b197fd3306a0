// Package waterfall reads a trace as Jaeger's query API returns it, and draws it: as Jaeger's own page
// shows it, or with a row for each request and what became of it in words.
package waterfall

import (
	"cmp"
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"
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
	top       = 104
	rowHeight = 46
	bar       = 16
)

const (
	green = "#2e7d32"
	red   = "#b3261e"
	grey  = "#5f6368"
	faint = "#dadce0"
	black = "#202124"
)

// A picture is an SVG being written.
type picture struct {
	trace  Trace
	start  time.Time
	length time.Duration
	left   float64 // the start of the time axis
	right  float64 // and its end
	out    strings.Builder
}

func pictureOf(t Trace, left, right float64) *picture {
	p := &picture{trace: t, start: t.Spans[0].Start(), left: left, right: right}
	for _, s := range t.Spans {
		p.length = max(p.length, s.End().Sub(p.start))
	}
	return p
}

// begin writes the head of the picture and its titles.
func (p *picture) begin(height int, title, subtitle string) {
	p.open(height, title)
	p.text(margin, 38, black, `font-size="19" font-weight="bold"`, title)
	p.text(margin, 62, grey, "", subtitle)
}

// open writes the head of the picture, with a name for programs that read it aloud.
func (p *picture) open(height int, title string) {
	p.printf(`<svg xmlns="http://www.w3.org/2000/svg" width="%d" height="%d" viewBox="0 0 %d %d" role="img" `+
		`font-family="Liberation Sans, Arial, Helvetica, sans-serif" font-size="13">`, width, height, width, height)
	p.printf(`<title>%s</title>`, escape(title))
	p.printf(`<rect width="%d" height="%d" fill="#ffffff"/>`, width, height)
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
	return p.left + float64(at.Sub(p.start))/float64(p.length)*(p.right-p.left)
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
