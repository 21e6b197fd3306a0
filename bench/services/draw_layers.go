package main

import (
	"fmt"

	"google.golang.org/grpc"

	"github.com/grpcretry/grpcretry/bench/internal/svg"
	"github.com/grpcretry/grpcretry/internal/inside"
	"github.com/grpcretry/grpcretry/internal/layers"
)

// Measures of the pictures, in pixels.
const (
	width  = 960.0
	margin = 24.0
)

// A panel is a tree of attempts.
type panel struct {
	title, subtitle string
	opts            []grpc.ServerOption
	sum             string // how the attempts add up
}

var panels = []panel{
	{"Retries alone", "no server interceptors", nil, "3 × 3 × 3"},
	{"One attempt for retries", "the second measure alone",
		inside.ServerOptions(layers.Measures{OneAttempt: true}),
		"3 and two retries of B, and two of A"},
	{"Both measures", "both server interceptors", inside.ServerOptions(layers.Measures{StopsCallers: true, OneAttempt: true}),
		"as many with the first measure alone"},
}

// Measures of a tree.
const (
	panelTop = 100.0
	treeTop  = 186.0
	column   = 82.0 // from a service to the next
	line     = 13.5 // from an attempt to the next
	radius   = 4.5
	treeLeft = 26.0 // in the panel
	across   = 306.0
	gap      = 8.0
)

// drawLayers returns the picture of the trees as an SVG file.
func drawLayers() (string, error) {
	var p svg.Picture
	p.Text(margin, 36, "What one call causes while the last of four services is down", svg.Title)
	p.Text(margin, 60, fmt.Sprintf("A, B and C each make up to %d attempts. D fails all of them.", maxAttempts), svg.Quiet)
	x := margin
	for _, kind := range []struct{ colour, name string }{{svg.Blue, "first attempt"}, {svg.Red, "retry"},
		{svg.Amber, "first attempt of work for a retry"}} {
		p.Circle(x+6, 82, radius, kind.colour, kind.colour, false)
		p.Text(x+18, 86, kind.name, svg.Small)
		x += 42 + 6.3*float64(len(kind.name))
	}
	most := 0
	trees := make([]*attempt, len(panels))
	for i, one := range panels {
		var err error
		if trees[i], err = attemptsWith(one.opts...); err != nil {
			return "", err
		}
		most = max(most, trees[i].leaves())
	}
	height := float64(most) * line
	for i, one := range panels {
		one.draw(&p, margin+float64(i)*across, height, trees[i])
	}
	return p.File(width, treeTop+height+92), nil
}

func (one panel) draw(p *svg.Picture, x, height float64, tree *attempt) {
	p.Box(x, panelTop, across-gap, treeTop-panelTop+height+72, svg.Mist, svg.Mist, 1)
	p.Text(x+14, 122, one.title, svg.Head)
	p.Text(x+14, 139, one.subtitle, svg.Small)
	for i, name := range services {
		p.Text(x+treeLeft+float64(i)*column, 168, name, svg.Mid, svg.Head)
	}
	reached := tree.leaves()
	top := treeTop + (height-float64(reached)*line)/2
	drawTree(p, tree, x+treeLeft, top)
	p.Text(x+14, treeTop+height+36, fmt.Sprintf("%d attempts at D", reached), svg.Title)
	p.Text(x+14, treeTop+height+56, one.sum, svg.Small)
}

// drawTree draws an attempt and those below it, downwards from top.
func drawTree(p *svg.Picture, a *attempt, x, top float64) {
	middle := top + float64(a.leaves())*line/2
	next := top
	for _, one := range a.next {
		end := next + float64(one.leaves())*line/2
		p.Line(x, middle, x+column, end)
		if one.stopped {
			p.Text(x+column/2, (middle+end)/2-7, "“do not", svg.Mid, svg.Small)
			p.Text(x+column/2, (middle+end)/2+15, "retry”", svg.Mid, svg.Small)
		}
		drawTree(p, one, x+column, next)
		next += float64(one.leaves()) * line
	}
	colour := svg.Blue
	switch {
	case a.number > 1:
		colour = svg.Red
	case a.forRetry:
		colour = svg.Amber
	}
	p.Circle(x, middle, radius, colour, colour, false)
}
