package waterfall

import (
	"fmt"
	"io"
	"math"
	"slices"
	"strings"
	"time"

	"github.com/grpcretry/grpcretry/telemetry"
)

// This file draws a trace as Jaeger's page shows it: a row for each span with its service, its name,
// a bar and a duration, and a mark if it failed. Some spans are opened, as by a click: below all rows
// are their tags and logs. Every word is Jaeger's, or comes from its response.

// Measures of the timeline, in pixels.
const (
	timelineTop  = 104
	timelineRow  = 28
	timelineLeft = 404
	timelineEnd  = 936
	lineHeight   = 17
	letter       = 6.7 // the width of a letter in the details, at most
)

const (
	teal = "#17b8be" // the first of Jaeger's colours of services
	dark = "#0f7f84"
)

// Draw writes the trace as an SVG.
func Draw(w io.Writer, t Trace) error {
	if len(t.Spans) == 0 {
		return fmt.Errorf("waterfall: the trace has no spans")
	}
	p := pictureOf(t, timelineLeft, timelineEnd)
	rows := p.rows("", 0)
	details, height := p.details(timelineTop + len(rows)*timelineRow + 26)

	p.open(height, p.name())
	p.heading(rows)
	p.ticks(timelineTop + len(rows)*timelineRow)
	for i, r := range rows {
		p.row(timelineTop+i*timelineRow, r)
	}
	p.out.WriteString(details)
	p.printf(`</svg>`)
	_, err := io.WriteString(w, p.out.String())
	return err
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

// name is what Jaeger calls the trace.
func (p *picture) name() string {
	first := p.trace.Spans[0]
	return p.trace.Service(first) + ": " + first.OperationName
}

func (p *picture) heading(rows []row) {
	p.text(margin, 36, black, `font-size="18" font-weight="bold"`, p.name())
	deepest, services := 0, map[string]bool{}
	for _, r := range rows {
		deepest = max(deepest, r.depth+1)
		services[p.trace.Service(r.Span)] = true
	}
	facts := []string{"Duration", duration(p.length), "Services", fmt.Sprint(len(services)),
		"Depth", fmt.Sprint(deepest), "Total Spans", fmt.Sprint(len(rows))}
	p.printf(`<text x="%d" y="60">`, margin)
	for i := 0; i < len(facts); i += 2 {
		p.printf(`<tspan fill="%s">%s</tspan> <tspan fill="%s" font-weight="bold">%s</tspan><tspan dx="14"> </tspan>`,
			grey, facts[i], black, facts[i+1])
	}
	p.printf(`</text>`)
	p.text(margin, timelineTop-12, grey, "", "Service & Operation")
}

// ticks draws Jaeger's five, from the start of the trace to its end.
func (p *picture) ticks(bottom int) {
	const intervals = 4
	for i := range intervals + 1 {
		at := p.length * time.Duration(i) / intervals
		x, anchor := p.x(p.start.Add(at)), "start"
		if i == intervals {
			anchor = "end"
		}
		p.printf(`<line x1="%.1f" y1="%d" x2="%.1f" y2="%d" stroke="%s"/>`, x, timelineTop-26, x, bottom, faint)
		offset := map[string]float64{"start": 4, "end": -4}[anchor]
		p.text(x+offset, timelineTop-12, grey, fmt.Sprintf(`font-size="12" text-anchor="%s"`, anchor), duration(at))
	}
	p.printf(`<line x1="%d" y1="%d" x2="%d" y2="%d" stroke="%s"/>`, margin, timelineTop-4, timelineEnd, timelineTop-4, faint)
}

func (p *picture) row(y int, r row) {
	middle := y + timelineRow/2
	x := float64(margin + 14*r.depth)
	p.printf(`<rect x="%.1f" y="%d" width="3" height="%d" fill="%s"/>`, x, y+3, timelineRow-6, teal)
	x += 10
	if Value(r.Tags, "error") == "true" {
		p.printf(`<circle cx="%.1f" cy="%d" r="6.5" fill="%s"/>`, x+6, middle, red)
		p.text(x+6, middle+4, "#ffffff", `font-size="11" font-weight="bold" text-anchor="middle"`, "!")
		x += 18
	}
	service := p.trace.Service(r.Span)
	p.printf(`<text x="%.1f" y="%d"><tspan fill="%s">%s</tspan> <tspan fill="%s" font-size="12">%s</tspan></text>`,
		x, middle+4, black, escape(service), grey, escape(r.OperationName))
	p.bar(middle, r.Span)
}

// bar draws a span's bar, its logs, and its duration on the side with more room.
func (p *picture) bar(middle int, s Span) {
	from, to := p.x(s.Start()), p.x(s.End())
	p.printf(`<rect x="%.1f" y="%d" width="%.1f" height="14" rx="2" fill="%s"/>`, from, middle-7, max(to-from, 2), teal)
	for _, l := range s.Logs {
		p.printf(`<line x1="%.1f" y1="%d" x2="%.1f" y2="%d" stroke="%s" stroke-width="2"/>`, p.x(l.Time()), middle-7, p.x(l.Time()),
			middle+7, black)
	}
	label := duration(s.End().Sub(s.Start()))
	width := 7 * float64(len(label))
	switch {
	case to+6+width <= timelineEnd:
		p.text(to+6, middle+4, grey, `font-size="12"`, label)
	case from-6-width >= timelineLeft:
		p.text(from-6, middle+4, grey, `font-size="12" text-anchor="end"`, label)
	default:
		p.text(to-8, middle+4, "#ffffff", `font-size="12" font-weight="bold" text-anchor="end"`, label)
	}
}

// details draws the opened spans, from y on: the call, and its last wait. It returns what it drew, and where
// that ends.
func (p *picture) details(y int) (drawn string, end int) {
	d := &picture{trace: p.trace, start: p.start, length: p.length}
	for _, s := range p.opened() {
		d.printf(`<line x1="%d" y1="%d" x2="%d" y2="%d" stroke="%s" stroke-width="3"/>`, margin, y-14, timelineEnd, y-14, teal)
		d.text(margin, y+6, black, `font-size="15" font-weight="bold"`, s.OperationName)
		y += 26
		y = d.pairs(y, "Tags", s.Tags)
		if len(s.Logs) > 0 {
			d.text(margin, y, black, `font-weight="bold"`, fmt.Sprintf("Logs (%d)", len(s.Logs)))
			y += lineHeight + 2
		}
		for _, l := range s.Logs {
			y = d.pairs(y, duration(l.Time().Sub(p.start)), l.Fields)
		}
		y += 26
	}
	return d.out.String(), y - 20
}

// opened returns the span of the call, and that of its last wait.
func (p *picture) opened() []Span {
	var spans []Span
	for _, s := range p.trace.Spans {
		if len(s.Logs) == 0 {
			continue
		}
		spans = append(spans, s)
		below := p.trace.Below(s.SpanID)
		for _, wait := range slices.Backward(below) {
			if wait.OperationName == telemetry.SpanWait {
				spans = append(spans, wait)
				break
			}
		}
	}
	return spans
}

// pairs writes a label and "key=value" for each tag, on as many lines as they need. It returns the place of
// the next line.
func (p *picture) pairs(y int, label string, tags []Tag) (next int) {
	const left = margin + 78
	p.text(margin, y, black, `font-size="12" font-weight="bold"`, label)
	x := float64(left)
	for _, t := range tags {
		if saysWhoSent(t.Key) {
			continue
		}
		value := Value([]Tag{t}, t.Key)
		length := letter * float64(len([]rune(t.Key+"="+value)))
		if x+length > timelineEnd && x > left {
			x, y = left, y+lineHeight
		}
		p.printf(`<text x="%.1f" y="%d" font-size="12"><tspan fill="%s">%s=</tspan><tspan fill="%s">%s</tspan></text>`,
			x, y, dark, escape(t.Key), black, escape(value))
		x += length + 12
	}
	return y + lineHeight + 4
}

// saysWhoSent reports whether a tag is left out: it says in which format and by which library a span was
// sent.
func saysWhoSent(key string) bool {
	return key == "internal.span.format" || strings.HasPrefix(key, "otel.scope.")
}

// duration formats d as Jaeger does.
func duration(d time.Duration) string {
	us := float64(d.Microseconds())
	switch {
	case us < 1e3:
		return fmt.Sprintf("%gμs", us)
	case us < 1e6:
		return fmt.Sprintf("%gms", math.Round(us/10)/100)
	default:
		return fmt.Sprintf("%gs", math.Round(us/1e4)/100)
	}
}
