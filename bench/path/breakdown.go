package main

import (
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"github.com/google/pprof/profile"

	"github.com/grpcretry/grpcretry/bench/internal/svg"
)

// A part of the path is what some functions do, with all that they call.
type part struct {
	name      string
	functions []string // of our package, or with the name of theirs
	measured  time.Duration
}

const library = "github.com/grpcretry/grpcretry."

// path has the parts in the order in which a call comes to them. The last is what none of
// the others is.
func path() []part {
	return []part{
		{name: "read the call options, find the policy", functions: []string{"(*Retrier).plain"}},
		{name: "check for a span and observers", functions: []string{"(*reporter).watchesStart", "(*reporter).watches"}},
		{name: "look up the target's budget", functions: []string{"backend.budgetOf"}},
		{name: "empty the caller's header and trailer", functions: []string{"(*grpcOptions).clear"}},
		{name: "allocate the attempt, and collect it", functions: []string{
			"runtime.newobject", "runtime.mallocgc", "runtime.growslice", "runtime.makeslice", "runtime.gcBgMarkWorker", "runtime.bgsweep",
			"runtime.bgscavenge", "runtime.gcAssistAlloc", "runtime.gcStart", "runtime.wbBufFlush", "gcWriteBarrier", "runtime.gcWriteBarrier",
		}},
		{name: "read the clock", functions: []string{"time.Now", "time.Since", "runtime.nanotime", "time.runtimeNow"}},
		{name: "build the attempt's call options", functions: []string{"(*attempt).plainOptions"}},
		{name: "report the success to the budget", functions: []string{"depositUnplanned", "(*Retrier).noteAnswer"}},
		{name: "the rest: the loop, and to fill in the attempt"},
	}
}

// A breakdown is where the time of a call goes. It is processor time, of all cores: that of
// the collector too, which mostly runs beside the calls.
type breakdown struct {
	parts   []part
	total   time.Duration
	samples int64
}

// breakDown shares out the time of a profile in which so many calls were made. What the loop
// around the calls takes, and what stands for gRPC, is so little that it goes to the rest.
func breakDown(p *profile.Profile, calls int) breakdown {
	b := breakdown{parts: path()}
	spent := make([]int64, len(b.parts)) // in ns
	for _, s := range p.Sample {
		if onPath(s) {
			spent[b.partOf(s)] += s.Value[1]
			b.samples += s.Value[0]
		}
	}
	for i, ns := range spent {
		b.parts[i].measured = time.Duration(ns / int64(max(calls, 1)))
		b.total += b.parts[i].measured
	}
	return b
}

// onPath leaves out what the process does besides: the profiler, and waiting for work.
func onPath(s *profile.Sample) bool {
	for f := range frames(s) {
		if strings.HasPrefix(f, "runtime/pprof.") || f == "runtime.findRunnable" || f == "runtime.sysmon" {
			return false
		}
	}
	return true
}

// partOf goes from the innermost function outwards to the first that a part names.
func (b *breakdown) partOf(s *profile.Sample) int {
	for f := range frames(s) {
		for i, part := range b.parts {
			if slices.ContainsFunc(part.functions, func(name string) bool { return is(f, name) }) {
				return i
			}
		}
	}
	return len(b.parts) - 1
}

// is says whether f is the function called name. Variants of one have a suffix, such as
// runtime.mallocgcSmallScanNoHeader.
func is(f, name string) bool {
	if own, ok := strings.CutPrefix(f, library); ok {
		return own == name
	}
	return strings.HasPrefix(name, "runtime.") && strings.HasPrefix(f, name) || f == name
}

// frames are the functions of a sample, the innermost first, inlined ones too.
func frames(s *profile.Sample) func(yield func(string) bool) {
	return func(yield func(string) bool) {
		for _, l := range s.Location {
			for _, line := range l.Line {
				if line.Function != nil && !yield(line.Function.Name) {
					return
				}
			}
		}
	}
}

func (b *breakdown) share(p part) float64 { return float64(p.measured) / float64(max(b.total, 1)) }

func (b *breakdown) print(out io.Writer) {
	for _, p := range b.parts {
		fmt.Fprintf(out, "%5d ns  %4.1f%%  %s\n", p.measured.Nanoseconds(), 100*b.share(p), p.name)
	}
	fmt.Fprintf(out, "%5d ns, from %d samples\n", b.total.Nanoseconds(), b.samples)
}

// draw makes a row of each part; each begins where the last ended, as the call goes on. It shows shares: what a call
// takes is measured beside the alternatives, not by a profiler.
func (b *breakdown) draw(machine string) string {
	const (
		width, margin = 960, 24.0
		names, values = 350.0, 110.0
		top, distance = 84.0, 28.0
		room          = width - 2*margin - names - values
	)
	var p svg.Picture
	p.Text(margin, 34, "A call that succeeds on its first attempt: where the interceptor's time goes", svg.Title)
	p.Text(margin, 58, "Processor time of the interceptor alone, with its defaults. Each bar starts where the previous one ends.", svg.Quiet)
	y, done := top, 0.0
	for _, one := range b.parts {
		share := b.share(one)
		p.Text(margin+names-10, y+14, one.name, svg.AtEnd)
		p.Rect(margin+names+room*done, y, room*share, 20, svg.Blue)
		done += share
		p.Text(margin+names+room*done+8, y+14, fmt.Sprintf("%.0f%%", 100*share))
		y += distance
	}
	p.Line(margin+names, top-4, margin+names, y-4)
	p.Text(margin, y+20, fmt.Sprintf("From %d samples of a processor profile · %s", b.samples, machine), svg.Small)
	return p.File(width, y+36)
}
