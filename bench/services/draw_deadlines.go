package main

import (
	"errors"
	"fmt"
	"strconv"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/grpcretry/grpcretry"
	"github.com/grpcretry/grpcretry/bench/internal/svg"
)

// Measures of a time line.
const (
	lineTop   = 96.0 // of the first
	lineLeft  = 112.0
	laneHigh  = 26.0
	lineHigh  = 156.0 // from one to the next
	perSecond = 640.0
)

func at(d time.Duration) float64 { return lineLeft + perSecond*d.Seconds() }

// drawDeadlines returns the picture of the time lines as an SVG file.
func drawDeadlines() (string, error) {
	var p svg.Picture
	p.Text(margin, 36, "One deadline for the whole tree", svg.Title)
	p.Text(margin, 60, fmt.Sprintf("A's call has a deadline of %.0f s. All services have the library's defaults and the server interceptors.",
		deadline.Seconds()), svg.Quiet)
	x := margin
	for _, kind := range []struct{ colour, name string }{
		{svg.Blue, "A and B wait"}, {svg.Red, "attempt that fails"}, {svg.Green, "attempt that succeeds"},
		{svg.Grey, "attempt that hangs"}, {svg.Amber, "work for a caller that has left"},
	} {
		p.Rect(x, 74, 14, 9, kind.colour)
		p.Text(x+20, 83, kind.name, svg.Small)
		x += 44 + 6.3*float64(len(kind.name))
	}
	y := lineTop
	for _, c := range courses {
		t, err := c.run()
		if err != nil {
			return "", err
		}
		t.draw(&p, y)
		y += lineHigh
	}
	return p.File(width, y+12), nil
}

func (t *timeline) draw(p *svg.Picture, y float64) {
	p.Box(margin, y, width-2*margin, lineHigh-12, svg.Mist, svg.Mist, 1)
	p.Text(margin+14, y+20, t.title, svg.Head)
	lanes := y + 32
	for i := range services[:len(services)-1] {
		p.Text(margin+14, lanes+float64(i)*laneHigh+15, services[i]+" calls "+services[i+1])
	}
	p.Line(at(deadline), y+10, at(deadline), lanes+3*laneHigh)
	p.Text(at(deadline)+5, y+20, "deadline", svg.Small)
	number := 0
	for _, b := range t.bars {
		top := lanes + float64(b.caller)*laneHigh
		p.Rect(at(b.from), top+3, at(b.to)-at(b.from), laneHigh-6, b.colour())
		if b.caller == len(services)-2 {
			number++
			p.Text((at(b.from)+at(b.to))/2, top+17, strconv.Itoa(number), svg.Mid, svg.Bold, svg.Light)
		}
	}
	p.Text(margin+14, lanes+3*laneHigh+20, t.result())
}

// colour returns the colour of an attempt.
func (b bar) colour() string {
	switch {
	case b.caller < len(services)-2:
		return svg.Blue
	case b.from >= deadline:
		return svg.Amber
	case b.err == nil:
		return svg.Green
	case errors.Is(b.err, grpcretry.ErrAttemptTimeout), status.Code(b.err) == codes.DeadlineExceeded:
		return svg.Grey
	default:
		return svg.Red
	}
}

// result says what A gets, and when.
func (t *timeline) result() string {
	last := t.bars[0]
	for _, b := range t.bars {
		if b.caller == len(services)-2 && b.to >= last.to {
			last = b
		}
	}
	after := t.end.at.Sub(begin).Milliseconds()
	switch {
	case last.to > deadline:
		return fmt.Sprintf("A gets %s after %d ms, and C works on for %d ms.", name(t.end.err), after, (last.to - deadline).Milliseconds())
	case t.end.trailer != nil:
		return fmt.Sprintf("A gets %s and “do not retry” after %d ms, because another wait would reach the deadline.", name(t.end.err), after)
	default:
		return fmt.Sprintf("A gets %s after %d ms.", name(t.end.err), after)
	}
}

// name returns the name of an error's code as in the specification.
func name(err error) string { return codeNames[status.Code(err)] }

var codeNames = map[codes.Code]string{codes.OK: "the response", codes.Unavailable: "UNAVAILABLE",
	codes.DeadlineExceeded: "DEADLINE_EXCEEDED"}
