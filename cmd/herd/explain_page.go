package main

import (
	"fmt"
	"math"
	"regexp"
	"strings"
)

// This file holds the page of "herd explain", and prints it as text. explain_html.go writes the same
// page as HTML.

// explainWidth is the number of characters in a line of the page.
const explainWidth = 92

// An explainPage is a title and sections.
type explainPage struct {
	Title    string
	Command  string // that makes the page again
	Sections []explainSection
}

// An explainSection is a part of the page with a heading.
type explainSection struct {
	Title string
	Parts []explainPart
}

// An explainPart is one of its fields.
type explainPart struct {
	Text   string     // a paragraph
	Table  [][]string // lines of cells, the first one being the heading
	Align  string     // of the table: l or r for each column; "" means l for the first and r for the others
	Points []string   // a list
	Code   string     // lines to copy
	Chart  *loadChart
}

// print prints the page as text.
func (p *explainPage) print(out *report) {
	out.printf("%s\n%s\n", p.Title, strings.Repeat("=", len([]rune(p.Title))))
	out.printf("%s\n", fill(p.Command, explainWidth))
	for _, s := range p.Sections {
		out.printf("\n%s\n", strings.ToUpper(s.Title))
		for i, part := range s.Parts {
			if tableOfText := part.Table != nil && i > 0 && s.Parts[i-1].Text != ""; i > 0 && !tableOfText {
				out.printf("\n")
			}
			part.print(out)
		}
	}
}

func (p *explainPart) print(out *report) {
	switch {
	case p.Text != "":
		out.printf("%s\n", indent(fillUnits(p.Text, explainWidth-2), "  "))
	case p.Table != nil:
		p.printTable(out)
	case p.Points != nil:
		for _, one := range p.Points {
			out.printf("  - %s\n", strings.TrimSpace(indent(fillUnits(one, explainWidth-4), "    ")))
		}
	case p.Code != "":
		out.printf("%s\n", indent(p.Code, "    "))
	case p.Chart != nil:
		p.Chart.print(out)
	}
}

// fillUnits is fill, without a break between a number and its unit.
func fillUnits(text string, width int) string {
	const joint = "\u2060" // a word joiner, which is no space to fill
	return strings.ReplaceAll(fill(unit.ReplaceAllString(text, "$1"+joint+"$2"), width), joint, " ")
}

var unit = regexp.MustCompile(`([0-9]) (s|ms|µs|calls/s|attempts|processes|layers)\b`)

// A loadChart compares the attempts per second that a server gets under several policies, as shares
// of the normal load.
type loadChart struct {
	Title    string
	Names    []string // of the policies, at most two
	From     int      // the second of the first value; the outage starts at 0
	Outage   int      // the length of the outage in seconds
	Capacity float64  // of the healthy server
	Loads    [][]float64
}

const loadBar = 30 // characters of a bar

// print prints a line for each second, with a bar for each policy.
func (c *loadChart) print(out *report) {
	out.printf("%s\n", indent(fill(c.Title, explainWidth-2), "  "))
	scale := c.scale()
	head := fmt.Sprintf("  %8s ", "second")
	for _, name := range c.Names {
		head += fmt.Sprintf("  %-*s", loadBar+6, name)
	}
	out.printf("%s\n", strings.TrimRight(head, " "))
	for i := range c.Loads[0] {
		second := c.From + i
		mark := ""
		if second >= 0 && second < c.Outage {
			mark = "down"
		}
		line := fmt.Sprintf("  %3d %4s ", second, mark)
		for _, loads := range c.Loads {
			line += fmt.Sprintf("  %s %4.0f%%", c.bar(loads[i], scale), 100*loads[i])
		}
		out.printf("%s\n", line)
	}
}

// scale returns the share of the normal load that a character stands for.
func (c *loadChart) scale() float64 {
	top := 1.25 * c.Capacity
	for _, loads := range c.Loads {
		for _, v := range loads {
			top = max(top, v)
		}
	}
	return min(top, 4) / loadBar
}

// bar draws a load, with a line where the capacity of the healthy server ends.
func (c *loadChart) bar(load, scale float64) string {
	bar := []rune(strings.Repeat(" ", loadBar))
	for i := range min(loadBar, int(math.Round(load/scale))) {
		bar[i] = '█'
	}
	bar[min(loadBar-1, int(math.Round(c.Capacity/scale)))] = '│'
	if load > scale*(loadBar+0.5) {
		bar[loadBar-1] = '»'
	}
	return string(bar)
}

// align returns l or r for a column of the table.
func (p *explainPart) align(column int) byte {
	switch {
	case column < len(p.Align):
		return p.Align[column]
	case column == 0:
		return 'l'
	default:
		return 'r'
	}
}

func (p *explainPart) printTable(out *report) {
	var widths []int
	for _, line := range p.Table {
		for i, cell := range line {
			if i == len(widths) {
				widths = append(widths, 0)
			}
			widths[i] = max(widths[i], len([]rune(cell)))
		}
	}
	for _, line := range p.Table {
		text := ""
		for i, cell := range line {
			gap := strings.Repeat(" ", widths[i]-len([]rune(cell)))
			if p.align(i) == 'l' {
				text += "  " + cell + gap
			} else {
				text += "  " + gap + cell
			}
		}
		out.printf("  %s\n", strings.TrimRight(text, " "))
	}
}
