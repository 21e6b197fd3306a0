package debug

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"
)

// A chart shows the level of a budget over the last minutes. Its drawing is chartWidth by
// chartHeight and is stretched to the width of the page.
type chart struct {
	Kind    string
	Methods string // that spend from it, where it is not all of the target's
	Level   string
	Tone    string
	Refused string // empty if nothing was
	Title   string

	Top    string   // what the upper edge stands for, empty if there is nothing to draw
	Solid  []string // paths between looks that were near each other
	Dashed []string // and between those that were not
	Area   string
}

const (
	chartWidth  = 300.0 // a second each
	chartHeight = 60.0
	nearby      = 10.0 // seconds
)

// chartsOf are those of the budgets that the methods of one target spend from.
func chartsOf(methods []Method, s *Snapshot, all bool) (charts []chart) {
	for i := range s.Budgets {
		b := &s.Budgets[i]
		var names []string
		var refused int64
		for j := range methods {
			if m := &methods[j]; m.Budget == b.Number {
				_, name := splitMethod(m.Method)
				names = append(names, name)
				refused += chosen(&m.Recent, &m.Total, all).Stopped["budget"]
			}
		}
		if len(names) == 0 {
			continue
		}
		c := newChart(b)
		if len(names) < len(methods) {
			c.Methods = strings.Join(names, ", ")
		}
		if refused > 0 {
			c.Refused = plural(refused, "call", "calls")
		}
		charts = append(charts, c)
	}
	return charts
}

func newChart(b *Budget) chart {
	c := chart{Kind: b.Kind, Level: "unknown", Tone: "quiet"}
	if b.Unlimited {
		c.Level = "no limit"
	}
	if b.Level != nil {
		c.Level, c.Tone = balance(*b.Level), "good"
		if *b.Level < 1-tiny {
			c.Tone = "bad"
		}
	}
	c.draw(b.Levels)
	return c
}

func (c *chart) draw(levels []Level) {
	levels = slices.DeleteFunc(slices.Clone(levels), func(l Level) bool { return l.Level == nil })
	if len(levels) == 0 {
		return
	}
	lowest, highest := *levels[0].Level, *levels[0].Level
	for _, l := range levels {
		lowest, highest = min(lowest, *l.Level), max(highest, *l.Level)
	}
	top := max(1, highest)
	c.Top = balance(top)
	c.Title = fmt.Sprintf("budget in the last %s: between %s and %s retries", length(Recent), balance(lowest), balance(highest))

	var line strings.Builder // the path so far
	var area strings.Builder
	dashed := false
	end := func() {
		if dashed {
			c.Dashed = append(c.Dashed, line.String())
		} else {
			c.Solid = append(c.Solid, line.String())
		}
		line.Reset()
	}
	for i, l := range levels {
		at := point(l, top)
		if i == 0 {
			line.WriteString("M" + at) // and a line to itself: a dot, if it stays alone
			area.WriteString("M" + coordinate(chartWidth-l.SecondsAgo) + "," + coordinate(chartHeight))
		} else if far := levels[i-1].SecondsAgo-l.SecondsAgo > nearby; far != dashed {
			end()
			dashed = far
			line.WriteString("M" + point(levels[i-1], top))
		}
		line.WriteString("L" + at)
		area.WriteString("L" + at)
	}
	end()
	area.WriteString("L" + coordinate(chartWidth-levels[len(levels)-1].SecondsAgo) + "," + coordinate(chartHeight) + "Z")
	c.Area = area.String()
}

func point(l Level, top float64) string {
	return coordinate(chartWidth-l.SecondsAgo) + "," + coordinate(chartHeight*(1-max(0, *l.Level)/top))
}

func coordinate(x float64) string {
	return strconv.FormatFloat(max(-1e4, min(1e4, x)), 'f', 1, 64)
}

// bars show two counts over the last minutes, the first below the second.
type bars struct {
	Title        string
	First, Other bar
	Steps        []barStep
}

// A bar has a name and a tone.
type bar struct{ Name, Tone string }

// A barStep is one step, drawn from the left edge X: the heights are shares of barHeight.
type barStep struct {
	X, Width       string
	First, Other   string // heights
	FirstY, OtherY string // upper edges
	Title          string
}

const barHeight = 44.0

// newBars returns nil if there is nothing to draw.
func newBars(steps []Step, first, other bar, of func(*Step) (first, other int64)) *bars {
	highest := int64(0)
	for i := range steps {
		a, b := of(&steps[i])
		highest = max(highest, a+b)
	}
	if highest == 0 {
		return nil
	}
	height := func(n int64) float64 {
		if n <= 0 {
			return 0
		}
		return max(1.5, barHeight*float64(n)/float64(highest)) // little is not nothing
	}
	b := &bars{First: first, Other: other, Title: fmt.Sprintf("%s and %s in the last %s, in steps of %s",
		first.Name, other.Name, length(Recent), length(stepLength))}
	share := 1 / float64(recentSteps)
	for i := range steps {
		s := &steps[i]
		m, n := of(s)
		at := 1 - share*float64(len(steps)-i)
		b.Steps = append(b.Steps, barStep{
			X: width(at), Width: width(share * 0.8),
			First: coordinate(height(m)), FirstY: coordinate(barHeight - height(m)),
			Other: coordinate(height(n)), OtherY: coordinate(barHeight - height(m) - height(n)),
			Title: fmt.Sprintf("%s: %s %s, %s %s", ago(seconds(s.BeganSecondsAgo)), count(m), first.Name, count(n), other.Name),
		})
	}
	return b
}

func seconds(s float64) time.Duration { return time.Duration(s * float64(time.Second)) }
