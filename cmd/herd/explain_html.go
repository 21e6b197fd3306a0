package main

import (
	"fmt"
	"html/template"
	"io"
	"strings"
)

// This file writes the page of "herd explain" as HTML that needs no other file.

// writeHTML writes the page.
func (p *explainPage) writeHTML(w io.Writer) error { return explainTemplate.Execute(w, p) }

// SVG draws the chart: a line for each policy, on the outage's grey, with the capacity as a dashed
// line. Its colours come from the page.
func (c *loadChart) SVG() template.HTML {
	const width, height, left, right, top, bottom = 720.0, 260.0, 48.0, 8.0, 34.0, 34.0
	n := float64(len(c.Loads[0]))
	most := c.scale() * loadBar * 1.05
	x := func(i float64) float64 { return left + (width-left-right)*i/n }
	y := func(v float64) float64 { return height - bottom - (height-top-bottom)*min(v, most)/most }
	var b strings.Builder
	put := func(format string, args ...any) { fmt.Fprintf(&b, format+"\n", args...) }
	put(`<svg viewBox="0 0 %.0f %.0f" role="img" aria-label=%q>`, width, height, template.HTMLEscapeString(c.Title))
	put(`<rect class="down" x="%.1f" y="%.1f" width="%.1f" height="%.1f"/>`, x(float64(-c.From)), top, x(float64(c.Outage))-x(0), height-top-bottom)
	put(`<text x="%.1f" y="%.1f">down</text>`, x(float64(-c.From))+6, height-bottom-8)
	for _, v := range []float64{0, 1, 2, 3, 4} {
		if v <= most {
			put(`<line class="grid" x1="%.1f" y1="%.1f" x2="%.1f" y2="%.1f"/>`, left, y(v), width-right, y(v))
			put(`<text x="%.1f" y="%.1f" text-anchor="end">%.0f%%</text>`, left-6, y(v)+4, 100*v)
		}
	}
	put(`<line class="capacity" x1="%.1f" y1="%.1f" x2="%.1f" y2="%.1f"/>`, left, y(c.Capacity), width-right, y(c.Capacity))
	for i := range c.Loads[0] {
		if second := c.From + i; second%5 == 0 {
			put(`<text x="%.1f" y="%.1f" text-anchor="middle">%d s</text>`, x(float64(i)), height-bottom+18, second)
		}
	}
	for k, loads := range c.Loads {
		path := ""
		for i, v := range loads {
			path += fmt.Sprintf("%.1f,%.1f %.1f,%.1f ", x(float64(i)), y(v), x(float64(i+1)), y(v))
		}
		put(`<polyline class="load%d" points="%s"/>`, k, strings.TrimSpace(path))
		put(`<line class="load%d" x1="%.1f" y1="14" x2="%.1f" y2="14"/>`, k, left+float64(k)*190, left+float64(k)*190+24)
		put(`<text x="%.1f" y="18">%s</text>`, left+float64(k)*190+30, template.HTMLEscapeString(c.Names[k]))
	}
	put(`<line class="capacity" x1="%.1f" y1="14" x2="%.1f" y2="14"/><text x="%.1f" y="18">capacity</text>`, left+380, left+404, left+410)
	put(`</svg>`)
	return template.HTML(b.String()) // our own drawing, its texts escaped
}

// Lines are the table's cells with their alignment.
func (p explainPart) Lines() (lines [][]explainCell) {
	for k, line := range p.Table {
		var cells []explainCell
		for i, text := range line {
			cells = append(cells, explainCell{Text: text, Left: p.align(i) == 'l', Head: k == 0})
		}
		lines = append(lines, cells)
	}
	return lines
}

// An explainCell is a cell of a table in HTML.
type explainCell struct {
	Text       string
	Left, Head bool
}

var explainTemplate = template.Must(template.New("explain").Parse(`<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{{.Title}}</title>
<style>
` + pageStyle + `
.chart { overflow-x: auto }
.chart text { fill: var(--text); font: 12px 'Liberation Sans', Arial, Helvetica, sans-serif }
.chart .down { fill: var(--box) } .chart .grid { stroke: var(--line) }
.chart .capacity { stroke: var(--text); stroke-dasharray: 5 4 }
.chart polyline { fill: none } .chart .load0, .chart .load1 { stroke-width: 2.2; stroke: #ee963c } .chart .load1 { stroke: #3b78c8 }
@media (prefers-color-scheme: dark) { .chart .load1 { stroke: #6fa8f0 } }
td.left, th.left { text-align: left }
table { font-size: 13px }
</style>
</head>
<body>
<h1>{{.Title}}</h1>
<p><code>{{.Command}}</code></p>
{{range .Sections}}
<h2>{{.Title}}</h2>
{{range .Parts}}{{with .Text}}<p>{{.}}</p>
{{end}}{{if .Table}}<div class="table"><table>
{{range .Lines}}<tr>{{range .}}{{if .Head}}<th{{if .Left}} class="left"{{end}}>{{.Text}}</th>{{else}}<td{{if .Left}} class="left"{{end}}>{{.Text}}</td>{{end}}{{end}}</tr>
{{end}}</table></div>
{{end}}{{with .Points}}<ul>
{{range .}}<li>{{.}}</li>
{{end}}</ul>
{{end}}{{with .Code}}<pre>{{.}}</pre>
{{end}}{{with .Chart}}<p>{{.Title}}</p>
<div class="chart">{{.SVG}}</div>
{{end}}{{end}}{{end}}
</body>
</html>
`))
