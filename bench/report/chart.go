package main

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"github.com/grpcretry/grpcretry/bench/internal/svg"
)

// The bar chart: panels side by side, each with bars from 0 of one unit, the shorter the
// better.

// A panel is about one case of one benchmark.
type panel struct {
	title     string
	benchmark string
	prefix    string // of the key, before the client
	unit      string
}

var panels = []panel{
	{"Interceptor alone, header and trailer to the caller: time", "UnaryInterceptor", "info=equal/cores=one/", "sec/op"},
	{"Interceptor alone, one retry without the wait: time", "RetryInterceptor", "retries=1/", "sec/op"},
	{"Whole call over TCP that succeeds on its first attempt: time", "UnaryRPC", "net=tcp/info=plain/cores=one/", "sec/op"},
	{"Whole call over TCP with one retry: time", "RetryRPC", "net=tcp/retries=1/", "sec/op"},
	{"A call that waits in backoff: heap and stack", "WaitingCalls", "", "B/call"},
	{"5 seconds of outage: attempts sent per call", "Outage", "", "attempts/call"},
}

const (
	chartWidth  = 1120
	margin      = 24
	panelWidth  = (chartWidth - 3*margin) / 2
	nameWidth   = 190 // of the names beside the bars
	valueWidth  = 80  // of the numbers behind them
	barHeight   = 18
	barDistance = 25
	headHeight  = 86 // of the chart
	titleHeight = 34 // of a panel
)

// drawChart leaves panels out of which nothing was measured.
func drawChart(m *measurements) string {
	var p svg.Picture
	p.Text(margin, 34, "What each way to retry costs", svg.Title)
	legend(&p, margin, 60)
	y := float64(headHeight)
	drawn := slices.DeleteFunc(slices.Clone(panels), func(one panel) bool { return len(one.bars(m)) == 0 })
	for pair := range slices.Chunk(drawn, 2) {
		tallest := 0.0
		for i, one := range pair {
			tallest = max(tallest, one.draw(&p, m, float64(margin+i*(panelWidth+margin)), y))
		}
		y += tallest + margin
	}
	p.Text(margin, y+16, footer(m), svg.Small)
	return p.File(chartWidth, y+30)
}

func legend(p *svg.Picture, x, y float64) {
	for _, entry := range []struct{ colour, text string }{
		{svg.Blue, "grpcretry"}, {svg.Grey, "alternatives"}, {svg.Pale, "no interceptor: gRPC alone"},
	} {
		p.Rect(x, y-10, 12, 12, entry.colour)
		p.Text(x+18, y, entry.text)
		x += 40 + 7.5*float64(len(entry.text))
	}
	p.Text(x, y, "Shorter bars are better. Each panel has its own unit and starts at 0.", svg.Quiet)
}

func footer(m *measurements) string {
	said := []string{fmt.Sprintf("medians of %d runs", m.runs)}
	if m.runs == 1 {
		said = []string{"one run"}
	}
	if v := m.machine["cpu"]; v != "" {
		said = append(said, v+", "+m.machine["cores"]+" cores, Go "+m.machine["go"])
	}
	for _, key := range []string{"grpc-go", "go-grpc-middleware", "failsafe-go"} {
		if v := m.machine[key]; v != "" {
			said = append(said, key+" "+v)
		}
	}
	if date, _, ok := strings.Cut(m.machine["date"], " "); ok {
		said = append(said, date)
	}
	return strings.Join(said, " · ")
}

type bar struct {
	client string
	value  float64
}

func (one panel) bars(m *measurements) []bar {
	var found []bar
	for _, client := range inOrder(m.values(one.benchmark, "client")) {
		if s := m.find(one.benchmark, one.prefix+"client="+client, one.unit); s != nil {
			found = append(found, bar{client, s.center()})
		}
	}
	return found
}

// draw returns the height.
func (one panel) draw(p *svg.Picture, m *measurements, x, y float64) float64 {
	bars := one.bars(m)
	p.Text(x, y+16, one.title, svg.Head)
	longest := slices.MaxFunc(bars, func(a, b bar) int { return cmp.Compare(a.value, b.value) }).value
	const room = panelWidth - nameWidth - valueWidth
	for i, b := range bars {
		top := y + titleHeight + float64(i)*barDistance
		width := 0.0
		if longest > 0 {
			width = room * b.value / longest
		}
		weight, colour := svg.Plain, svg.Grey
		switch b.client {
		case ours:
			weight, colour = svg.Bold, svg.Blue
		case bare:
			colour = svg.Pale
		}
		p.Text(x+nameWidth-8, top+13, chartName(b.client), svg.AtEnd, weight)
		p.Rect(x+nameWidth, top, width, barHeight, colour)
		p.Text(x+nameWidth+width+6, top+13, format(b.value, one.unit), weight)
	}
	height := titleHeight + float64(len(bars))*barDistance
	p.Line(x+nameWidth, y+titleHeight-4, x+nameWidth, y+height-2)
	return height
}

// chartName is short enough for the space beside the bars.
func chartName(client string) string {
	switch client {
	case "builtin+throttling":
		return "built-in, throttling"
	case "failsafe+budget":
		return "failsafe-go, with budget"
	default:
		return strings.Trim(title(client), "*")
	}
}
