package main

import (
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"time"
	"unicode/utf8"

	"google.golang.org/genproto/googleapis/rpc/code"
	"google.golang.org/grpc/codes"

	"github.com/grpcretry/grpcretry"
	"github.com/grpcretry/grpcretry/internal/inside"
	"github.com/grpcretry/grpcretry/internal/reasons"
)

const (
	columns   = 80
	nameWidth = 13                        // of the names of calls, with the margin
	lineWidth = columns - nameWidth       // of a timeline that has the line for itself
	briefLine = lineWidth - 27            // of a timeline that is followed by waits and result
	codeWidth = len("RESOURCE_EXHAUSTED") // the longest code that the demo shows
)

// A picture draws calls as text, in 80 columns.
type picture struct {
	out   io.Writer
	color bool
}

// isTerminal says whether f wants colours: a terminal whose user has not said no
// (https://no-color.org).
func isTerminal(f *os.File) bool {
	info, err := f.Stat()
	return err == nil && info.Mode()&os.ModeCharDevice != 0 &&
		os.Getenv("NO_COLOR") == "" && os.Getenv("TERM") != "dumb"
}

// A style is an ANSI escape sequence, or none.
type style string

const (
	plain  style = ""
	bold   style = "\x1b[1m"
	dim    style = "\x1b[2m"
	red    style = "\x1b[31m"
	green  style = "\x1b[32m"
	yellow style = "\x1b[33m"
	cyan   style = "\x1b[36m"
)

func (p *picture) paint(s style, text string) string {
	if !p.color || s == plain || text == "" {
		return text
	}
	return string(s) + text + "\x1b[0m"
}

// line prints a line without blanks at its end.
func (p *picture) line(parts ...string) {
	fmt.Fprintln(p.out, strings.TrimRight(strings.Join(parts, ""), " "))
}

// intro says what the signs mean.
func (p *picture) intro() {
	p.line(p.paint(bold, "grpcretry"), ": one gRPC server, one client, and what becomes of every attempt")
	p.line()
	p.line("  ", p.paint(green, "●"), " succeeded   ", p.paint(red, "×"), " failed   ",
		p.paint(cyan, "━"), " in flight   ", p.paint(yellow, "─"), " backoff   ",
		p.paint(yellow, "┄"), " wait named by the server")
	p.line("  ", p.paint(yellow, "·"), " wait for a connection, and then the backoff")
}

// scene draws the calls of a scene below a common time axis.
func (p *picture) scene(r result) {
	p.heading(fmt.Sprintf("%d  %s", r.number, r.scene.title))
	for _, text := range r.scene.caption {
		p.line("  ", text)
	}
	p.line()
	axis := newAxis(r.records, lineWidth)
	if r.scene.brief {
		axis = newAxis(r.records, briefLine)
	}
	p.axis(axis)
	for i, rec := range r.records {
		if r.scene.brief {
			p.brief(axis, rec)
			continue
		}
		if i > 0 {
			p.line()
		}
		p.full(axis, rec)
	}
}

func (p *picture) heading(title string) {
	p.line()
	rule := strings.Repeat("─", columns-4-utf8.RuneCountInString(title))
	p.line(p.paint(dim, "─ "), p.paint(bold, title), " ", p.paint(dim, rule+"─"))
}

// brief draws a call in one line: its timeline, its waits, and how it ended.
func (p *picture) brief(a axis, r *record) {
	end, s := "OK", green
	if !r.succeeded() {
		end, s = "stop: "+reasons.Of(r.end.Reason).Word, red
	}
	p.line(p.name(r), p.timeline(a, r), "  ", p.paint(yellow, waits(r)), p.paint(s, end))
}

// waits lists the waits of a call, nothing if there were none.
func waits(r *record) string {
	var ms []string
	for _, s := range r.steps {
		if s.WaitSource != 0 {
			ms = append(ms, fmt.Sprint(s.Wait.Milliseconds()))
		}
	}
	if len(ms) == 0 {
		return ""
	}
	return "waits " + strings.Join(ms, "+") + " ms, "
}

// full draws a call with a line for each attempt, and the error if it failed.
func (p *picture) full(a axis, r *record) {
	p.line(p.name(r), p.timeline(a, r))
	for _, s := range r.steps {
		codeStyle := red
		if s.Err == nil {
			codeStyle = green
		}
		p.line(fmt.Sprintf("   #%d %5d ms  ", s.Number, r.offset(s).Milliseconds()),
			p.paint(codeStyle, fmt.Sprintf("%-*s", codeWidth, codeName(s.Code()))),
			"  ", p.outcome(r, s))
	}
	if !r.succeeded() {
		p.wrapped("   the caller gets: ", r.err.Error())
	}
}

// outcome says what followed an attempt.
func (p *picture) outcome(r *record, s step) string {
	d := s.decision
	retry := d.Kind == grpcretry.Decision && d.Reason == nil
	switch {
	case s.Err == nil && r.rescued():
		return p.paint(green, "rescued by a retry")
	case s.Err == nil:
		return ""
	case retry && d.WaitSource == inside.WaitConnect:
		return p.paint(yellow, "reached no server; waits for a connection")
	case retry && errors.Is(s.Err, grpcretry.ErrAttemptTimeout):
		return p.paint(yellow, "timeout; replaced after "+waitText(d))
	case retry:
		return p.paint(yellow, "waits "+waitText(d))
	case errors.Is(d.Reason, grpcretry.ErrDeadline): // Wait is the one that did not fit
		return p.paint(red, "stop: "+reasons.Of(d.Reason).Word+"; needs "+waitText(d))
	default:
		return p.paint(red, "stop: "+reasons.Of(d.Reason).Word)
	}
}

// waitText is the wait of a decision and where it came from.
func waitText(d grpcretry.Event) string {
	return fmt.Sprintf("%d ms (%s)", d.Wait.Milliseconds(), d.WaitSource)
}

// wrapped prints text over several lines, after a label.
func (p *picture) wrapped(label, text string) {
	line, indent := label, strings.Repeat(" ", 5)
	for i, word := range strings.Fields(text) {
		if i > 0 && utf8.RuneCountInString(line)+1+len(word) > columns {
			p.line(p.paint(dim, line))
			line = indent + word
			continue
		}
		if i > 0 {
			line += " "
		}
		line += word
	}
	p.line(p.paint(dim, line))
}

func (p *picture) name(r *record) string {
	return fmt.Sprintf("  %-*s", nameWidth-2, r.name)
}

// timeline draws the attempts of a call and the waits between them.
func (p *picture) timeline(a axis, r *record) string {
	row := newRow(a.width)
	next := 0 // the first column that no attempt has taken
	for _, s := range r.steps {
		from := max(next, a.column(r.offset(s)))
		to := max(from, a.column(r.offset(s)+s.Duration))
		row.fill(next, from, waitSign(s.WaitSource), yellow)
		row.fill(from, to, '━', cyan)
		if s.Err == nil {
			row.fill(to, to+1, '●', green)
		} else {
			row.fill(to, to+1, '×', red)
		}
		next = to + 1
	}
	return row.draw(p)
}

func waitSign(s grpcretry.WaitSource) rune {
	switch s {
	case grpcretry.WaitPushback, grpcretry.WaitRetryInfo:
		return '┄'
	case inside.WaitConnect:
		return '·'
	default:
		return '─'
	}
}

// A row is a line of single characters, each with its style.
type row struct {
	signs  []rune
	styles []style
}

func newRow(width int) row {
	r := row{make([]rune, width), make([]style, width)}
	r.fill(0, width, ' ', plain)
	return r
}

// fill sets the columns from … to-1; those outside of the row are left out.
func (r row) fill(from, to int, sign rune, s style) {
	for i := max(0, from); i < min(to, len(r.signs)); i++ {
		r.signs[i], r.styles[i] = sign, s
	}
}

// draw paints columns of one style together.
func (r row) draw(p *picture) string {
	var b strings.Builder
	for from := 0; from < len(r.signs); {
		to := from + 1
		for to < len(r.signs) && r.styles[to] == r.styles[from] {
			to++
		}
		b.WriteString(p.paint(r.styles[from], string(r.signs[from:to])))
		from = to
	}
	return b.String()
}

// An axis maps the time since the start of a call to columns.
type axis struct {
	width int
	end   time.Duration // the last column
	tick  time.Duration
}

// newAxis fits the longest of the calls.
func newAxis(records []*record, width int) axis {
	a := axis{width: width, end: 100 * time.Millisecond}
	for _, r := range records {
		for _, s := range r.steps {
			// A tenth more, so that short attempts pushed apart still fit.
			a.end = max(a.end, (r.offset(s)+s.Duration)*11/10)
		}
	}
	a.tick = tickFor(a.end)
	return a
}

// tickFor is the smallest of 10, 20, 50, 100 ms … that gives no more than six ticks.
func tickFor(end time.Duration) time.Duration {
	for unit := 10 * time.Millisecond; ; unit *= 10 {
		for _, tick := range []time.Duration{unit, 2 * unit, 5 * unit} {
			if end <= 6*tick {
				return tick
			}
		}
	}
}

func (a axis) column(d time.Duration) int {
	return int(int64(d) * int64(a.width-1) / int64(a.end))
}

// axis draws the scale: a tick stands right above the column that it names.
func (p *picture) axis(a axis) {
	labels, rule := newRow(a.width), newRow(a.width)
	rule.fill(0, a.width, '╌', dim)
	for at := time.Duration(0); at <= a.end; at += a.tick {
		label := fmt.Sprint(at.Milliseconds())
		if at == 0 {
			label = "0 ms"
		}
		column := a.column(at)
		if column+len(label) <= a.width {
			labels.write(column, label, dim)
		}
		rule.fill(column, column+1, '┬', dim)
	}
	margin := strings.Repeat(" ", nameWidth)
	p.line(margin, labels.draw(p))
	p.line(margin, rule.draw(p))
}

func (r row) write(column int, text string, s style) {
	for i, sign := range text {
		r.fill(column+i, column+i+1, sign, s)
	}
}

// totals draws the table of all scenes.
func (p *picture) totals(results []result) {
	p.heading("Totals")
	p.line(p.paint(dim, fmt.Sprintf("  %-24s%6s%9s%12s%9s%9s%9s",
		"", "calls", "attempts", "server saw", "retries", "rescued", "gave up")))
	all := tally{stops: map[string]int{}}
	for _, r := range results {
		t := r.tally()
		p.row(fmt.Sprintf("%2d  %s", r.number, r.scene.title), t)
		if n := t.attempts - t.serverSaw; n > 0 {
			p.line(p.paint(dim, fmt.Sprintf("      (%d reached no server)", n)))
		}
		all.add(t)
	}
	p.line("  ", p.paint(dim, strings.Repeat("─", columns-2)))
	p.row("all", all)
	p.line()
	p.line("  ", p.paint(bold, fmt.Sprintf("Amplification %.2f", float64(all.serverSaw)/float64(all.calls))),
		fmt.Sprintf(": for %d calls the server saw %d attempts.", all.calls, all.serverSaw))
	if n := all.attempts - all.serverSaw; n > 0 {
		p.line(fmt.Sprintf("  Of %d attempts %d reached no server.", all.attempts, n))
	}
	p.line("  Gave up because of")
	for _, reason := range stopReasons {
		name := reasons.Of(reason).Word
		p.line(fmt.Sprintf("    %-20s%2d   %v", name, all.stops[name], reason))
	}
	p.line()
}

func (p *picture) row(name string, t tally) {
	p.line(fmt.Sprintf("  %-24s%6d%9d%12d%9d%9d%9d",
		name, t.calls, t.attempts, t.serverSaw, t.attempts-t.calls, t.rescued, t.gaveUp()))
}

func (t *tally) add(other tally) {
	t.calls += other.calls
	t.attempts += other.attempts
	t.serverSaw += other.serverSaw
	t.rescued += other.rescued
	for reason, n := range other.stops {
		t.stops[reason] += n
	}
}

// codeName is a status code as gRPC spells it on the wire: UNAVAILABLE.
func codeName(c codes.Code) string {
	return code.Code(c).String()
}
