package waterfall

import (
	"fmt"
	"io"

	"github.com/grpcretry/grpcretry/telemetry"
)

// servicesEnd is the end of the time axis; there is room to the right of it for what a service did.
const servicesEnd = 680

// DrawServices writes the trace of a call through several services as an SVG, with a row for each
// request that a service received.
func DrawServices(w io.Writer, title string, t Trace) error {
	if len(t.Spans) == 0 {
		return fmt.Errorf("waterfall: the trace has no spans")
	}
	p := pictureOf(t, chartLeft, servicesEnd)
	requests := p.requests("", "the client's call", 0)
	bottom := top + len(requests)*rowHeight
	p.begin(bottom+8, title, "A trace as Jaeger returns it. Each row is a request, with the response and the end of the service's own call.")
	p.axis(bottom)
	for i, r := range requests {
		p.request(top+i*rowHeight, r)
	}
	p.printf(`</svg>`)
	_, err := io.WriteString(w, p.out.String())
	return err
}

// A request is the span of a service that handled it.
type request struct {
	Span
	depth int
	from  string // the attempt that sent it
	call  Span   // of the service, for this request
}

// requests returns those below a span, each followed by those that it led to.
func (p *picture) requests(parent, from string, depth int) []request {
	var all []request
	for _, s := range p.trace.Below(parent) {
		below, inside := from, depth
		switch {
		case Value(s.Tags, "span.kind") == "server":
			all = append(all, request{s, depth, from, p.callOf(s)})
			inside++
		case Value(s.Tags, telemetry.AttrAttemptNumber) != "":
			below = "attempt " + Value(s.Tags, telemetry.AttrAttemptNumber) + " by " + p.trace.Service(s)
		}
		all = append(all, p.requests(s.SpanID, below, inside)...)
	}
	return all
}

// callOf returns the call that a service made for a request, or a zero Span.
func (p *picture) callOf(request Span) Span {
	for _, s := range p.trace.Below(request.SpanID) {
		if Value(s.Tags, telemetry.AttrAttemptCount) != "" {
			return s
		}
	}
	return Span{}
}

func (p *picture) request(y int, r request) {
	middle := y + rowHeight/2
	x := float64(margin + 16*r.depth)
	p.text(x, middle-2, black, `font-weight="bold"`, p.trace.Service(r.Span))
	p.text(x, middle+14, grey, `font-size="12"`, r.from)
	from, to := p.x(r.Start()), p.x(r.End())
	color, code := green, Value(r.Tags, telemetry.AttrStatusCode)
	if code != "OK" {
		color = red
	}
	p.printf(`<rect x="%.1f" y="%d" width="%.1f" height="%d" rx="3" fill="%s"/>`, from, middle-bar/2, max(to-from, 3), bar, color)
	if r.forbidsRetry() {
		code += ", do not retry"
	}
	right := max(to, from+3) + 12
	if r.call.SpanID == "" {
		p.text(right, middle+5, color, `font-weight="bold"`, code)
		return
	}
	p.text(right, middle-2, color, `font-weight="bold"`, code)
	p.text(right, middle+14, grey, `font-size="12"`, r.made())
}

// forbidsRetry reports whether the response says "do not retry".
func (r *request) forbidsRetry() bool {
	for _, l := range r.Logs {
		if Value(l.Fields, "event") == telemetry.SpanEventNoRetry {
			return true
		}
	}
	return false
}

// made says how many attempts the service made itself, and why no more.
func (r *request) made() string {
	n, reason := Value(r.call.Tags, telemetry.AttrAttemptCount), Value(r.call.Tags, telemetry.AttrReason)
	words := n + " attempts"
	if n == "1" {
		words = "1 attempt"
	}
	if reason == "" {
		return words
	}
	return words + ", then: " + reason
}
