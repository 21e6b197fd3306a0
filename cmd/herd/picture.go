package main

import (
	"cmp"
	"fmt"
	"image"
	"image/color"
	"image/png"
	"io"
	"maps"
	"math"
	"slices"
	"strings"
	"time"

	xfont "golang.org/x/image/font"
	"gonum.org/v1/plot"
	"gonum.org/v1/plot/font"
	"gonum.org/v1/plot/plotter"
	"gonum.org/v1/plot/text"
	"gonum.org/v1/plot/vg"
	"gonum.org/v1/plot/vg/draw"
	"gonum.org/v1/plot/vg/vgimg"

	"github.com/grpcretry/grpcretry/cmd/herd/internal/sim"
)

// This file draws results: a column of small panels that share their axes for each scenario, with
// a panel for each strategy; curves for a study of the slowest calls.

var (
	ink       = color.Gray{Y: 0x22}
	faint     = color.Gray{Y: 0xdd}
	outageInk = color.Gray{Y: 0xe6}
	stripInk  = color.Gray{Y: 0x77}
	accepted  = color.RGBA{R: 0x3b, G: 0x78, B: 0xc8, A: 0xff} // blue and orange: distinct for the colour-blind too
	failed    = color.RGBA{R: 0xee, G: 0x96, B: 0x3c, A: 0xff}
	served    = color.RGBA{R: 0x10, G: 0x6b, B: 0x2e, A: 0xff}

	curveInks = []color.Color{
		color.RGBA{
			R: 0x7a,
			G: 0x7a,
			B: 0x7a,
			A: 0xff,
		},
		color.RGBA{R: 0xc0, G: 0x39, B: 0x2b, A: 0xff},
		color.RGBA{R: 0xee, G: 0x96, B: 0x3c, A: 0xff},
		color.RGBA{
			R: 0x3b,
			G: 0x78,
			B: 0xc8,
			A: 0xff,
		},
		color.RGBA{R: 0x10, G: 0x6b, B: 0x2e, A: 0xff},
		color.RGBA{R: 0x8e, G: 0x44, B: 0xad, A: 0xff},
	}
)

const (
	columnWidth = 17 * vg.Centimeter
	panelHeight = 2.9 * vg.Centimeter
	headHeight  = 1.5 * vg.Centimeter
	footHeight  = 0.8 * vg.Centimeter
)

// strip is the height of the mark above a panel that shows an outage, as a share of the panel: bars
// may hide the grey behind them.
const strip = 0.06

// A figure is a picture that knows its size.
type figure struct {
	width, height vg.Length
	draw          func(draw.Canvas) error
}

func figureOf(s seen) figure {
	if i := slices.IndexFunc(s.scenarios, func(one seenScenario) bool { return one.Name == s.Draw }); i >= 0 {
		return scenarioFigure(s.scenarios[i], axesOf(s.scenarios[i]))
	}
	if s.Tail {
		var parts []figure
		for _, one := range s.scenarios {
			parts = append(parts, tailFigure(one))
		}
		return stacked(parts)
	}
	var parts []figure
	longest := 0.0
	for _, one := range s.scenarios {
		longest = max(longest, axesOf(one).until)
	}
	for _, one := range s.scenarios {
		axes := axesOf(one)
		if longest <= 2*axes.until {
			axes.until = longest // so that scenarios can be compared
		}
		parts = append(parts, scenarioFigure(one, axes))
	}
	return stacked(parts)
}

// stacked returns a figure of several of the same width, one below the other.
func stacked(parts []figure) figure {
	all := figure{width: columnWidth}
	for _, f := range parts {
		all.height += f.height
	}
	all.draw = func(c draw.Canvas) error {
		top := all.height
		for _, f := range parts {
			part := draw.Canvas{Canvas: c.Canvas, Rectangle: vg.Rectangle{Min: vg.Point{Y: top - f.height}, Max: vg.Point{X: f.width, Y: top}}}
			if err := f.draw(part); err != nil {
				return err
			}
			top -= f.height
		}
		return nil
	}
	return all
}

// scenarioFigure has a panel for each strategy, one below the other.
func scenarioFigure(s seenScenario, axes axes) figure {
	title := titleLines(capital(s.Title))
	head := headHeight + title.more()
	height := head + footHeight + vg.Length(len(s.found))*panelHeight
	return figure{columnWidth, height, func(c draw.Canvas) error {
		var panels [][]*plot.Plot
		for i, one := range s.found {
			panels = append(panels, []*plot.Plot{newPanel(one, axes, i == len(s.found)-1)})
		}
		heading(draw.Crop(c, 0.3*vg.Centimeter, 0, 0, -0.15*vg.Centimeter), title, legendOf(axes))
		body := draw.Crop(c, 0.3*vg.Centimeter, -0.5*vg.Centimeter, 0.2*vg.Centimeter, -head)
		tiles := draw.Tiles{Rows: len(panels), Cols: 1, PadY: 0.12 * vg.Centimeter}
		for i, canvases := range plot.Align(panels, tiles, body) {
			panels[i][0].Draw(canvases[0])
		}
		return nil
	}}
}

// axes are what the panels of a scenario share.
type axes struct {
	until    float64 // seconds
	most     float64 // attempts per second
	index    int     // the server whose attempts are drawn
	server   sim.Server
	capacity bool
	cut      bool // some bars are higher than most
	succeeds bool // draw the attempts served in time, if the server may accept more than those
}

func axesOf(s seenScenario) axes {
	a := axes{index: len(s.Servers) - 1, server: s.Servers[len(s.Servers)-1]}
	peak, capacity := 1.0, a.server.Total()
	for _, c := range s.found {
		a.until = max(a.until, c.Result.End.Seconds())
		peak = max(peak, c.Result.Summary.Peak)
	}
	a.most, a.capacity = 1.1*peak, capacity > 0
	if a.capacity {
		a.most = max(1.5*capacity, min(1.1*peak, 5.5*capacity))
	}
	a.cut = peak > a.most
	a.succeeds = a.server.Window == 0 && a.capacity
	bucket := s.found[0].Result.Bucket.Seconds()
	a.until = math.Ceil(a.until/bucket) * bucket
	return a
}

// newPanel draws the attempts of one strategy; only the last panel has labels on its time axis.
func newPanel(c sim.Comparison, a axes, last bool) *plot.Plot {
	p := plot.New()
	style(p)
	p.X.Min, p.X.Max, p.Y.Min, p.Y.Max = 0, max(a.until, 1e-3), 0, a.most*(1+strip)
	p.Title.Text = panelTitle(c)
	p.Y.Tick.Marker = plot.TickerFunc(fewTicks(3))
	p.X.Tick.Marker = plot.TickerFunc(fewTicks(12))
	if last {
		p.X.Label.Text = "seconds"
	} else {
		p.X.Tick.Marker = withoutLabels(p.X.Tick.Marker)
	}
	p.Add(&bars{result: c.Result, axes: a})
	return p
}

func panelTitle(c sim.Comparison) string {
	m := c.Mean
	var parts []string
	if m.Failed > 0 {
		parts = append(parts, grouped(m.Failed)+" of "+grouped(m.Calls)+" calls fail")
	}
	switch last := c.Result.Servers[len(c.Result.Servers)-1]; {
	case len(c.Result.Downstream) > 0:
		parts = append(parts, fmt.Sprintf("%.1f attempts at %s per call during the outage", m.AmplifiedDown, last.Name))
	case len(c.Result.Groups) > 1:
		for _, g := range c.Result.Groups {
			parts = append(parts, g.Name+": p99 "+shortTime(g.Latency.P99))
		}
	default:
		parts = append(parts, grouped(m.Wasted)+" attempts wasted")
		if m.Succeeded > 0 {
			parts = append(parts, "p99 "+shortTime(m.P99))
		}
	}
	if m.Stable < 0 {
		parts = append(parts, "never stable")
	}
	return c.Strategy + " – " + strings.Join(parts, ", ")
}

func style(p *plot.Plot) {
	sans := func(size vg.Length) font.Font {
		return font.Font{Typeface: "Liberation", Variant: "Sans", Size: size}
	}
	p.BackgroundColor = color.White
	p.Title.TextStyle.Font = sans(9)
	p.Title.TextStyle.Color = ink
	p.Title.TextStyle.XAlign = draw.XCenter
	p.Title.Padding = 1
	p.Legend.TextStyle.Font = sans(8)
	p.Legend.TextStyle.Color = ink
	for _, axis := range []*plot.Axis{&p.X, &p.Y} {
		axis.Label.TextStyle.Font = sans(8)
		axis.Label.TextStyle.Color = ink
		axis.Tick.Label.Font = sans(8)
		axis.Tick.Label.Color = ink
		axis.LineStyle.Width = 0.5
		axis.Tick.LineStyle.Width = 0.5
		axis.Padding = 0
	}
}

// fewTicks puts about n round numbers on an axis.
func fewTicks(n int) func(low, high float64) []plot.Tick {
	return func(low, high float64) (ticks []plot.Tick) {
		step := math.Pow(10, math.Floor(math.Log10((high-low)/float64(n))))
		for _, factor := range []float64{1, 2, 5, 10} {
			if (high-low)/(step*factor) <= float64(n) {
				step *= factor
				break
			}
		}
		for i := 0; float64(i)*step <= high*(1+1e-9); i++ {
			v := float64(i) * step
			label := grouped(v)
			if step < 1 {
				label = fmt.Sprintf("%.*f", int(math.Ceil(-math.Log10(step))), v)
			}
			ticks = append(ticks, plot.Tick{Value: v, Label: label})
		}
		return ticks
	}
}

func withoutLabels(t plot.Ticker) plot.Ticker {
	return plot.TickerFunc(func(low, high float64) []plot.Tick {
		ticks := t.Ticks(low, high)
		for i := range ticks {
			ticks[i].Label = ""
		}
		return ticks
	})
}

// bars are the attempts of each bucket: the accepted ones, and the failed ones on top of them; with
// the outages behind them and the capacity as a line.
type bars struct {
	result *sim.Result
	axes   axes
}

// Plot implements plot.Plotter.
func (b *bars) Plot(c draw.Canvas, p *plot.Plot) {
	x, y := p.Transforms(&c)
	bucket := b.result.Bucket.Seconds()
	series := b.result.Servers[b.axes.index].Series
	until := int(math.Round(b.axes.until / bucket))
	at := func(i int) float64 { return min(float64(i)*bucket, b.axes.until) }
	up := func(i int) float64 {
		return b.axes.server.Up(time.Duration(i)*b.result.Bucket, time.Duration(i+1)*b.result.Bucket)
	}
	box := func(ink color.Color, i int, low, high float64) {
		if high > low {
			c.FillPolygon(ink, []vg.Point{{X: x(at(i)), Y: y(low)}, {X: x(at(i + 1)), Y: y(low)},
				{X: x(at(i + 1)), Y: y(high)}, {X: x(at(i)), Y: y(high)}})
		}
	}
	for i := range until {
		if lost := 1 - up(i); lost > 0.01 {
			box(shade(outageInk, lost), i, 0, b.axes.most)
			box(shade(stripInk, lost), i, b.axes.most*(1+strip/4), b.axes.most*(1+strip))
		}
	}
	for i, one := range series[:min(until, len(series))] {
		good, all := min(float64(one.Accepted)/bucket, b.axes.most), min(float64(one.Offered)/bucket, b.axes.most)
		box(accepted, i, 0, good)
		box(failed, i, good, all)
		if float64(one.Offered)/bucket > b.axes.most {
			defer cut(c, x((at(i)+at(i+1))/2), y(b.axes.most)) // above its neighbours
		}
	}
	steps := func(ink color.Color, n int, dashes []vg.Length, value func(int) float64) {
		var points []vg.Point
		for i := range n {
			v := y(min(value(i), b.axes.most))
			points = append(points, vg.Point{X: x(at(i)), Y: v}, vg.Point{X: x(at(i + 1)), Y: v})
		}
		c.StrokeLines(draw.LineStyle{Color: ink, Width: 1, Dashes: dashes}, points)
	}
	if b.axes.succeeds {
		steps(served, min(until, len(series)), nil, func(i int) float64 { return float64(series[i].Served) / bucket })
	}
	if b.axes.capacity {
		steps(ink, until, []vg.Length{3, 2}, func(i int) float64 { return b.axes.server.Total() * up(i) })
	}
}

// shade returns ink if everything is lost, and white if nothing is.
func shade(ink color.Gray, lost float64) color.Gray {
	return color.Gray{Y: uint8(0xff - lost*float64(0xff-ink.Y))}
}

// cut marks a bar that is higher than the panel.
func cut(c draw.Canvas, x, y vg.Length) {
	c.FillPolygon(ink, []vg.Point{{X: x - 2.5, Y: y - 4}, {X: x + 2.5, Y: y - 4}, {X: x, Y: y}})
}

// A legendItem is a colour and its meaning.
type legendItem struct {
	ink   color.Color
	text  string
	line  bool
	dash  bool
	arrow bool
}

func legendOf(a axes) (items []legendItem) {
	at := ""
	if name := a.server.Name; name != "" && name != "server" {
		at = " at " + name
	}
	items = append(items, legendItem{ink: accepted, text: "attempts per second" + at + ": accepted"}, legendItem{ink: failed, text: "failed"})
	if a.succeeds {
		items = append(items, legendItem{ink: served, text: "served in time", line: true})
	}
	if a.capacity {
		items = append(items, legendItem{ink: ink, text: "capacity", line: true, dash: true})
	}
	if len(a.server.Outages) > 0 {
		items = append(items, legendItem{ink: stripInk, text: "outage"})
	}
	if a.cut {
		items = append(items, legendItem{ink: ink, text: "higher than shown", arrow: true})
	}
	return items
}

// A title holds the lines of a figure's title, and their style.
type title struct {
	lines []string
	style text.Style
}

const titleLine = 0.45 * vg.Centimeter // the height of a further line

// more returns the height of all lines but the first.
func (t title) more() vg.Length { return vg.Length(len(t.lines)-1) * titleLine }

// titleLines makes a title smaller until it fits on a line, and breaks it if that is not enough.
func titleLines(words string) title {
	const room = columnWidth - 0.8*vg.Centimeter
	bold := textStyle(10.5)
	bold.Font.Weight = xfont.WeightBold
	for bold.Width(words) > room && bold.Font.Size > 8 {
		bold.Font.Size -= 0.25
	}
	t := title{style: bold}
	line := ""
	for _, word := range strings.Fields(words) {
		switch {
		case line == "":
			line = word
		case bold.Width(line+" "+word) > room:
			t.lines, line = append(t.lines, line), word
		default:
			line += " " + word
		}
	}
	t.lines = append(t.lines, line)
	return t
}

// heading writes the title of a figure and the meaning of its colours.
func heading(c draw.Canvas, t title, items []legendItem) {
	for i, line := range t.lines {
		c.FillText(t.style, vg.Point{X: c.Min.X, Y: c.Max.Y - 0.55*vg.Centimeter - vg.Length(i)*titleLine}, line)
	}
	x, y := c.Min.X, c.Max.Y-1.05*vg.Centimeter-t.more()
	small := textStyle(8)
	for _, one := range items {
		const box = 8
		middle := y + 2.8
		switch {
		case one.arrow:
			c.FillPolygon(one.ink, []vg.Point{{X: x + 2, Y: y + 1}, {X: x + 7, Y: y + 1}, {X: x + 4.5, Y: y + 5}})
		case one.line:
			s := draw.LineStyle{Color: one.ink, Width: 1.2}
			if one.dash {
				s.Dashes = []vg.Length{3, 2}
			}
			c.StrokeLine2(s, x, middle, x+box+3, middle)
			x += 3
		default:
			c.FillPolygon(one.ink, []vg.Point{{X: x, Y: y - 0.5}, {X: x + box, Y: y - 0.5}, {X: x + box, Y: y + 6.5}, {X: x, Y: y + 6.5}})
		}
		c.FillText(small, vg.Point{X: x + box + 3, Y: y}, one.text)
		x += box + 3 + 1.15*small.Width(one.text) + 12 // another font may be wider
	}
}

func textStyle(size vg.Length) text.Style {
	return text.Style{Color: ink, Font: font.Font{Typeface: "Liberation", Variant: "Sans", Size: size}, Handler: plot.DefaultTextHandler}
}

// tailFigure has a curve for each strategy: the share of the calls that take longer than a time.
func tailFigure(s seenScenario) figure {
	const height, row = 7.5 * vg.Centimeter, 0.36 * vg.Centimeter
	title := titleLines(capital(s.Title))
	head := 0.85*vg.Centimeter + title.more()
	above := head + vg.Length(len(s.found))*row + 0.1*vg.Centimeter
	return figure{columnWidth, height + above, func(c draw.Canvas) error {
		p := plot.New()
		style(p)
		p.X.Scale, p.Y.Scale = plot.LogScale{}, plot.LogScale{}
		p.X.Label.Text, p.Y.Label.Text = "a call takes longer than this", "share of the calls"
		p.X.Tick.Marker, p.Y.Tick.Marker = plot.TickerFunc(timeTicks), plot.TickerFunc(shareTicks)
		grid := plotter.NewGrid()
		grid.Vertical.Color, grid.Horizontal.Color = faint, faint
		p.Add(grid)
		shortest, longest := math.Inf(1), 0.0
		for i, one := range s.found {
			line := &plotter.Line{LineStyle: draw.LineStyle{Color: curveInks[i%len(curveInks)], Width: 1.4}}
			for _, at := range one.Result.Tail {
				line.XYs = append(line.XYs, plotter.XY{X: max(at.Latency.Seconds(), 1e-6), Y: at.Share})
			}
			if n := len(line.XYs); n > 0 {
				shortest, longest = min(shortest, line.XYs[0].X), max(longest, line.XYs[n-1].X)
			}
			p.Add(line)
			at := vg.Point{X: c.Min.X + 0.35*vg.Centimeter, Y: c.Max.Y - head - vg.Length(i+1)*row}
			c.StrokeLine2(line.LineStyle, at.X, at.Y+2.8, at.X+0.6*vg.Centimeter, at.Y+2.8)
			c.FillText(textStyle(8), vg.Point{X: at.X + 0.8*vg.Centimeter, Y: at.Y}, legendText(one))
		}
		if longest == 0 {
			shortest, longest = 0.001, 1 // nothing succeeded
		}
		p.X.Min, p.X.Max = shortest/1.1, longest*1.5
		p.Y.Min, p.Y.Max = 1e-4, 1
		heading(draw.Crop(c, 0.3*vg.Centimeter, 0, 0, -0.15*vg.Centimeter), title, nil)
		p.Draw(draw.Crop(c, 0.3*vg.Centimeter, -0.5*vg.Centimeter, 0.2*vg.Centimeter, -above))
		return nil
	}}
}

// legendText names a strategy, with what it does and what it costs.
func legendText(c sim.Comparison) string {
	m := c.Mean
	parts := []string{"p99 " + latency(m, m.P99), "p99.9 " + latency(m, m.P999)}
	if m.Hedges > 0 {
		parts = append(parts, more(m)+" more attempts")
	}
	if 1000*m.Failed > m.Calls {
		parts = append(parts, fmt.Sprintf("%.1f%% fail", 100*m.Failed/m.Calls))
	}
	return c.Strategy + ": " + strings.Join(parts, ", ")
}

// timeTicks are 1, 2 and 5 of each power of ten seconds.
func timeTicks(low, high float64) (ticks []plot.Tick) {
	for decade := math.Floor(math.Log10(low)); decade <= math.Log10(high); decade++ {
		for k := 1.0; k < 10; k++ {
			v := k * math.Pow(10, decade)
			if v < low || v > high {
				continue
			}
			label := ""
			if k == 1 || k == 2 || k == 5 {
				label = shortTime(time.Duration(math.Round(v * 1e9)))
			}
			ticks = append(ticks, plot.Tick{Value: v, Label: label})
		}
	}
	return ticks
}

// shareTicks are percentages, with the names of the quantiles.
func shareTicks(float64, float64) []plot.Tick {
	return []plot.Tick{{Value: 1, Label: "100%"}, {Value: 0.5, Label: "p50"}, {Value: 0.1, Label: "10%  p90"}, {Value: 0.01, Label: "1%  p99"},
		{Value: 0.001, Label: "0.1%  p99.9"}, {Value: 0.0001, Label: "0.01%  p99.99"}}
}

func capital(s string) string {
	if s == "" {
		return s
	}
	return strings.ToUpper(s[:1]) + s[1:]
}

// writePNG draws for a screen of nearly twice the usual density, and for print.
func writePNG(w io.Writer, s seen) error {
	f := figureOf(s)
	c := vgimg.NewWith(vgimg.UseWH(f.width, f.height), vgimg.UseDPI(160), vgimg.UseBackgroundColor(color.White))
	if err := f.draw(draw.New(c)); err != nil {
		return err
	}
	encoder := png.Encoder{CompressionLevel: png.BestCompression}
	return encoder.Encode(w, withPalette(c.Image()))
}

// withPalette reduces a picture to its 256 most frequent colours: that is a third of the bytes and
// no visible difference, because it has few colours and the greys of letters.
func withPalette(from image.Image) *image.Paletted {
	bounds := from.Bounds()
	count := map[color.RGBA]int{}
	each := func(f func(x, y int, c color.RGBA)) {
		for y := bounds.Min.Y; y < bounds.Max.Y; y++ {
			for x := bounds.Min.X; x < bounds.Max.X; x++ {
				f(x, y, color.RGBAModel.Convert(from.At(x, y)).(color.RGBA))
			}
		}
	}
	each(func(_, _ int, c color.RGBA) { count[c]++ })
	inks := slices.SortedFunc(maps.Keys(count), func(a, b color.RGBA) int {
		if count[a] != count[b] {
			return count[b] - count[a]
		}
		return cmp.Compare(number(a), number(b))
	})
	var palette color.Palette
	for _, one := range inks[:min(len(inks), 256)] {
		palette = append(palette, one)
	}
	index := map[color.RGBA]uint8{}
	for _, one := range inks {
		index[one] = uint8(palette.Index(one))
	}
	to := image.NewPaletted(bounds, palette)
	each(func(x, y int, c color.RGBA) { to.SetColorIndex(x, y, index[c]) })
	return to
}

func number(c color.RGBA) uint32 { return uint32(c.R)<<16 | uint32(c.G)<<8 | uint32(c.B) }
