package main

import (
	"fmt"
	"time"

	"github.com/grpcretry/grpcretry/bench/internal/svg"
)

// Measures of the picture, in pixels.
const (
	width      = 960.0
	margin     = 24.0
	top        = 148.0 // of the first lane
	laneHeight = 96.0
	laneGap    = 14.0
)

// A column is one step from a failure to the next attempt.
type column struct {
	x, width       float64
	number         string // of a question
	name, question string
}

var (
	failed   = column{x: 40, width: 196, name: "what failed"}
	decide   = column{x: 260, width: 164, number: "1", name: "decide", question: "May it be retried?"}
	schedule = column{x: 448, width: 164, number: "2", name: "schedule", question: "When?"}
	admit    = column{x: 636, width: 124, number: "3", name: "admit", question: "Is there a token?"}
	outcome  = column{x: 784, width: 136, name: "what follows"}
)

// A lane is what one of the failures goes through; each pair is a line and a smaller one.
type lane struct {
	what, which, error  string
	decided, scheduled  [2]string
	admitted, notPassed [2]string // what follows
}

var lanes = []lane{
	{
		what: "an RPC", which: "/shop.Catalog/Get", error: "UNAVAILABLE",
		decided:   [2]string{"yes", "by its status code"},
		scheduled: [2]string{"in %s", "backoff with full jitter"},
		admitted:  [2]string{"next attempt", "in %s"},
	},
	{
		what: "an HTTP request", which: "GET api.shop.com/items", error: "503, Retry-After: 2",
		decided:   [2]string{"yes", "503, and GET is safe"},
		scheduled: [2]string{"in %s", "the 2 s, and some jitter"},
		admitted:  [2]string{"next attempt", "in %s"},
	},
	{
		what: "a reconcile key", which: "orders/4711", error: "Reconcile has failed",
		decided:   [2]string{"yes", "the error is not terminal"},
		scheduled: [2]string{"in %s", "backoff of this key"},
		notPassed: [2]string{"slow lane", "one key per second"},
	},
}

// draw returns the picture as an SVG file.
func draw() (string, error) {
	answers, err := ask()
	if err != nil {
		return "", err
	}
	var p svg.Picture
	p.Text(margin, 36, "Three questions before every retry, and one budget for everything", svg.Title)
	p.Text(margin, 60, fmt.Sprintf("The backend is down. Everything that calls it fails, and all retries together have %d tokens left.",
		tokens), svg.Quiet)
	for _, c := range []column{failed, decide, schedule, admit, outcome} {
		c.head(&p)
	}
	y := top
	for range lanes {
		p.Box(margin, y, width-2*margin, laneHeight, svg.Mist, svg.Mist, 1)
		y += laneHeight + laneGap
	}
	bottom := y - laneGap
	p.Box(admit.x, top-10, admit.width, bottom-top+20, svg.Sky, svg.Blue, 2)
	given := 0
	for i, l := range lanes {
		if answers[i].admitted {
			given++
		}
		l.draw(&p, top+float64(i)*(laneHeight+laneGap), answers[i], given)
	}
	p.Text(admit.x+admit.width/2, bottom+31, "the shared budget", svg.Mid, svg.Head)
	p.Text(admit.x+admit.width/2, bottom+49, "Each answered call refills it a little,", svg.Mid, svg.Small)
	p.Text(admit.x+admit.width/2, bottom+64, "whatever kind of call it is.", svg.Mid, svg.Small)
	return p.File(width, bottom+82), nil
}

func (c column) head(p *svg.Picture) {
	x := c.x
	if c.number != "" {
		p.Circle(x+12, 102, 12, svg.Blue, svg.Blue, false)
		p.Text(x+12, 106.5, c.number, svg.Mid, svg.Bold, svg.Light)
		x += 32
	}
	if c.question == "" {
		p.Text(x, 106.5, c.name, svg.Quiet)
		return
	}
	p.Text(x, 100, c.name, svg.Head)
	p.Text(x, 116, c.question, svg.Small)
}

func (l lane) draw(p *svg.Picture, y float64, a answer, given int) {
	middle := y + laneHeight/2
	p.Text(failed.x, middle-18, l.what, svg.Head)
	p.Text(failed.x, middle+2, l.which, svg.Mono)
	p.Text(failed.x, middle+22, l.error, svg.Alarm)
	for _, arrow := range [][2]column{{failed, decide}, {decide, schedule}, {schedule, admit}, {admit, outcome}} {
		p.Arrow(arrow[0].x+arrow[0].width+2, arrow[1].x-2, middle)
	}
	decide.box(p, middle, svg.Pale, l.decided)
	wait := inWords(a.wait)
	schedule.box(p, middle, svg.Pale, filled(l.scheduled, wait))
	x := admit.x + admit.width/2
	if a.admitted {
		p.Circle(x, middle-10, 15, svg.Blue, svg.Blue, false)
		p.Text(x, middle-5.5, fmt.Sprint(given), svg.Mid, svg.Bold, svg.Light)
		p.Text(x, middle+24, fmt.Sprintf("token %d of %d", given, tokens), svg.Mid)
		outcome.box(p, middle, svg.Green, filled(l.admitted, wait))
		return
	}
	p.Circle(x, middle-10, 15, svg.White, svg.Blue, true)
	p.Text(x, middle+24, "none left", svg.Mid)
	outcome.box(p, middle, svg.Amber, filled(l.notPassed, wait))
}

// box draws a box in the column with two lines.
func (c column) box(p *svg.Picture, middle float64, edge string, lines [2]string) {
	p.Box(c.x, middle-32, c.width, 64, svg.White, edge, 1.5)
	p.Text(c.x+c.width/2, middle-4, lines[0], svg.Mid, svg.Head)
	p.Text(c.x+c.width/2, middle+16, lines[1], svg.Mid, svg.Small)
}

// filled puts the wait into the lines that have a place for it.
func filled(lines [2]string, wait string) [2]string {
	for i, line := range lines {
		if n := len(line); n > 2 && line[n-2:] == "%s" {
			lines[i] = line[:n-2] + wait
		}
	}
	return lines
}

func inWords(d time.Duration) string {
	if d < time.Second {
		return fmt.Sprintf("%d ms", d.Milliseconds())
	}
	return fmt.Sprintf("%.2g s", d.Seconds())
}
