// Package svg writes the few shapes that the pictures of the benchmarks are made of.
package svg

import (
	"fmt"
	"html"
	"strings"
)

// The colours of the pictures, and of the text on them.
const (
	Blue  = "#1a6fb5"
	Grey  = "#9aa5b1"
	Pale  = "#d8dde3"
	Mist  = "#f3f5f7"
	Sky   = "#e6f0f9"
	Green = "#2e7d32"
	Red   = "#b3261e"
	Amber = "#b7791f"
	White = "#ffffff"
	Line  = "#7b8794"
	Muted = "#52606d"
)

// A Picture is written from top to bottom; its height is known at the end. Lengths are in
// pixels, from the upper left corner. The zero value is an empty picture.
type Picture struct{ body strings.Builder }

// A Style is added to a text, such as Bold and AtEnd; styles are joined with a space.
type Style string

// The styles of a text. AtEnd makes x its right end.
const (
	Plain Style = ""
	Bold  Style = `font-weight="bold"`
	AtEnd Style = `text-anchor="end"`
	Mid   Style = `text-anchor="middle"`
	Small Style = `font-size="11" fill="` + Muted + `"`
	Light Style = `fill="` + White + `"`
	Alarm Style = `fill="` + Red + `"`
	Mono  Style = `font-family="DejaVu Sans Mono, Menlo, Consolas, monospace"`
	Quiet Style = `fill="` + Muted + `"`
	Title Style = `font-size="18" font-weight="bold"`
	Head  Style = `font-size="13" font-weight="bold"`
)

// Text writes s on the line at y.
func (p *Picture) Text(x, y float64, s string, styles ...Style) {
	attributes := ""
	for _, style := range styles {
		if style != Plain {
			attributes += " " + string(style)
		}
	}
	fmt.Fprintf(&p.body, `<text x="%.1f" y="%.1f"%s>%s</text>`+"\n", x, y, attributes, html.EscapeString(s))
}

// Rect draws a filled rectangle from its upper left corner; it is at least a pixel wide.
func (p *Picture) Rect(x, y, width, height float64, colour string) {
	fmt.Fprintf(&p.body, `<rect x="%.1f" y="%.1f" width="%.1f" height="%.1f" fill="%s"/>`+"\n", x, y, max(width, 1), height, colour)
}

// Line draws a thin line.
func (p *Picture) Line(x1, y1, x2, y2 float64) {
	fmt.Fprintf(&p.body, `<line x1="%.1f" y1="%.1f" x2="%.1f" y2="%.1f" stroke="%s"/>`+"\n", x1, y1, x2, y2, Line)
}

// Box draws a rectangle with round corners and an edge of the given width.
func (p *Picture) Box(x, y, width, height float64, fill, edge string, stroke float64) {
	fmt.Fprintf(&p.body, `<rect x="%.1f" y="%.1f" width="%.1f" height="%.1f" rx="8" fill="%s" stroke="%s" stroke-width="%.1f"/>`+"\n",
		x, y, width, height, fill, edge, stroke)
}

// Circle draws a filled circle with an edge; dashed applies to the edge.
func (p *Picture) Circle(x, y, radius float64, fill, edge string, dashed bool) {
	dashes := ""
	if dashed {
		dashes = ` stroke-dasharray="4 3"`
	}
	fmt.Fprintf(&p.body, `<circle cx="%.1f" cy="%.1f" r="%.1f" fill="%s" stroke="%s" stroke-width="2"%s/>`+"\n", x, y, radius,
		fill, edge, dashes)
}

// Arrow draws a horizontal line that points to the right, at x2.
func (p *Picture) Arrow(x1, x2, y float64) {
	fmt.Fprintf(&p.body, `<path d="M%.1f %.1f H%.1f" stroke="%s" stroke-width="1.5"/>`+"\n", x1, y, x2-6, Line)
	fmt.Fprintf(&p.body, `<path d="M%.1f %.1f l-8 -5 v10 z" fill="%s"/>`+"\n", x2, y, Line)
}

// File is the picture as a file of that size, on white.
func (p *Picture) File(width, height float64) string {
	return fmt.Sprintf(`<svg xmlns="http://www.w3.org/2000/svg" width="%.0f" height="%.0f" viewBox="0 0 %.0f %.0f" `+
		`font-family="Verdana, 'DejaVu Sans', sans-serif" font-size="12" fill="#1f2933">`+"\n"+
		`<rect width="100%%" height="100%%" fill="#ffffff"/>`+"\n%s</svg>\n", width, height, width, height, p.body.String())
}
