// Herd shows what retries do to a server that recovers: it simulates many clients on the
// decision engine and the budgets of github.com/grpcretry/grpcretry, and draws the load that
// the server sees.
//
//	herd                              the classic outage, under every strategy
//	herd -list                        the shipped studies, and what each of them shows
//	herd -study budget -png out.png   another study, as a picture
//	herd -policy config.json          the policy of a gRPC service config, compared with the others
//	herd -clients 5000 -outage 0s+30s the same with other numbers
//	herd -study classic -dump         the scenario as JSON, to edit and to run with -scenario
//	herd -live                        real gRPC beside the simulation, in real seconds
//	herd -search                      the backoffs that come closest to the optimum
//	herd explain -policy config.json  one page on what calls experience under a policy; explain -h
//
// docs/herd.md explains the results, and how to try a policy of your own.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"slices"
	"strings"
	"time"

	"github.com/grpcretry/grpcretry/cmd/herd/internal/sim"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	go func() {
		<-ctx.Done()
		stop() // a second Ctrl-C ends the program immediately
	}()
	os.Exit(run(ctx, os.Args[1:], os.Stdin, os.Stdout, os.Stderr))
}

// run runs the program. It returns the exit status: 0 on success, 1 if something failed or was
// interrupted, and 2 for an invalid command line.
func run(ctx context.Context, args []string, stdin io.Reader, stdout, stderr io.Writer) int {
	if len(args) > 0 && args[0] == "explain" {
		return runExplain(ctx, args[1:], stdout, stderr)
	}
	o, err := parse(args, stderr)
	switch {
	case errors.Is(err, flag.ErrHelp):
		return 0
	case err != nil:
		return 2 // parse has printed the reason
	}
	switch err := o.do(ctx, stdin, stdout, stderr); {
	case errors.Is(err, context.Canceled):
		fmt.Fprintln(stderr, "herd: interrupted")
		return 1
	case err != nil:
		fmt.Fprintln(stderr, "herd:", err)
		return 1
	}
	return 0
}

func (o *options) do(ctx context.Context, stdin io.Reader, stdout, stderr io.Writer) error {
	if o.list {
		return list(stdout)
	}
	if o.docs != "" {
		return writeDocs(ctx, o.docs, stdout)
	}
	study, err := o.study(stdin)
	if err != nil {
		return err
	}
	switch {
	case o.dump:
		return dump(stdout, study)
	case o.live:
		return o.goLive(ctx, study, stdout)
	case o.doSearch:
		return o.search(ctx, study, stdout, stderr)
	}
	seen, err := o.simulate(ctx, study, stderr)
	if len(seen.scenarios) == 0 {
		return err
	}
	if err != nil {
		fmt.Fprintf(stdout, "Stopped before the end. The results so far:\n\n")
	}
	out := &report{w: stdout, charts: o.charts && study.Vary == "", rows: 60}
	out.study(seen)
	return errors.Join(err, out.err, o.writeFiles(seen))
}

// A seen study is a study with its results.
type seen struct {
	sim.Study
	scenarios []seenScenario
	runs      int
}

type seenScenario struct {
	sim.Scenario
	found []sim.Comparison
	tail  bool // the study is about the slowest calls
}

// study returns the study that the command line selects, with its flags applied.
func (o *options) study(stdin io.Reader) (study sim.Study, err error) {
	if o.scenario != "" {
		study, err = readStudy(o.scenario, stdin)
		if err != nil {
			return sim.Study{}, err
		}
	} else {
		var ok bool
		if study, ok = sim.FindStudy(o.name); !ok {
			return sim.Study{}, fmt.Errorf("-study %q: there is no such study, want one of %s", o.name, strings.Join(studyNames(), ", "))
		}
	}
	var added []sim.Strategy
	if o.policy != "" {
		if added, err = readPolicy(o.policy, o.method); err != nil {
			return sim.Study{}, err
		}
	}
	if o.part != "" {
		if err := keepPart(&study, strings.Split(o.part, ",")); err != nil {
			return sim.Study{}, err
		}
	}
	for i := range study.Scenarios {
		if err := o.change(&study.Scenarios[i], added); err != nil {
			return sim.Study{}, err
		}
	}
	o.retitle(&study)
	return withoutRepetitions(study), nil
}

func studyNames() (names []string) {
	for _, s := range sim.Studies() {
		names = append(names, s.Name)
	}
	return names
}

// readStudy reads scenarios from a file, or from standard input if path is "-".
func readStudy(path string, stdin io.Reader) (sim.Study, error) {
	in := stdin
	if path != "-" {
		f, err := os.Open(path)
		if err != nil {
			return sim.Study{}, fmt.Errorf("-scenario: %w", err)
		}
		defer f.Close()
		in = f
	}
	scenarios, err := sim.ReadScenarios(in)
	if err != nil {
		return sim.Study{}, fmt.Errorf("-scenario %s: %w", path, err)
	}
	for i := range scenarios {
		if scenarios[i].Name == "" {
			scenarios[i].Name = fmt.Sprintf("scenario-%d", i+1)
		}
	}
	study := sim.Study{Name: scenarios[0].Name, Title: scenarios[0].Title, See: scenarios[0].See, Scenarios: scenarios}
	for _, s := range scenarios {
		study.Tail = study.Tail || slices.ContainsFunc(s.Strategies, func(one sim.Strategy) bool { return one.Hedging != nil })
	}
	return study, nil
}

// simulate runs every scenario of a study. When interrupted, it returns the results so far.
func (o *options) simulate(ctx context.Context, study sim.Study, stderr io.Writer) (seen, error) {
	bar := newProgressBar(stderr)
	defer bar.clear()
	out := seen{Study: study, runs: max(o.runs, 1)}
	for i, s := range study.Scenarios {
		bar.begin(s.Name, i, len(study.Scenarios))
		found, err := sim.Compare(ctx, s, o.runs, bar.show)
		if len(found) > 0 {
			out.scenarios = append(out.scenarios, seenScenario{s, found, study.Tail})
		}
		if err != nil {
			return out, err
		}
	}
	return out, nil
}

func list(w io.Writer) error {
	for _, s := range sim.Studies() {
		if _, err := fmt.Fprintf(w, "%s: %s.\n%s\n", s.Name, s.Title, indent(fill(s.See, 96), "    ")); err != nil {
			return err
		}
		shown := s.Further
		if s.Vary == "" {
			shown = slices.Concat(s.Scenarios, s.Further)
		}
		for _, one := range shown {
			fmt.Fprintf(w, "    - %s: %s\n", one.Name, one.Title)
		}
		fmt.Fprintln(w)
	}
	return nil
}

// fill breaks text into lines of at most width characters.
func fill(text string, width int) string {
	var lines []string
	line := ""
	for _, word := range strings.Fields(text) {
		if line != "" && len([]rune(line))+1+len([]rune(word)) > width {
			lines = append(lines, line)
			line = ""
		}
		if line != "" {
			line += " "
		}
		line += word
	}
	return strings.Join(append(lines, line), "\n")
}

func indent(text, by string) string { return by + strings.ReplaceAll(text, "\n", "\n"+by) }

// A progressBar shows the progress of a long run: as a bar on a terminal, elsewhere as a line
// every ten seconds.
type progressBar struct {
	w        io.Writer
	terminal bool
	begun    time.Time
	shown    time.Time
	drawn    bool
	name     string
	part, of int
}

func newProgressBar(w io.Writer) *progressBar {
	now := time.Now()
	return &progressBar{w: w, terminal: isTerminal(w), begun: now, shown: now}
}

func isTerminal(w io.Writer) bool {
	f, ok := w.(*os.File)
	if !ok {
		return false
	}
	info, err := f.Stat()
	return err == nil && info.Mode()&os.ModeCharDevice != 0
}

// begin names the part that runs now, and its place among all parts.
func (b *progressBar) begin(name string, part, of int) { b.name, b.part, b.of = name, part, of }

func (b *progressBar) show(p sim.Progress) {
	pause, wait := 10*time.Second, 10*time.Second
	if b.terminal {
		pause, wait = 100*time.Millisecond, 500*time.Millisecond
	}
	now := time.Now()
	if now.Sub(b.begun) < wait || now.Sub(b.shown) < pause {
		return
	}
	b.shown = now
	share := (float64(b.part) + min(p.Share, 1)) / float64(b.of)
	if !b.terminal {
		fmt.Fprintf(b.w, "herd: %s: %.0f%%, %s events\n", b.name, 100*share, grouped(float64(p.Events)))
		return
	}
	const width = 30
	done := int(share * width)
	fmt.Fprintf(b.w, "\r%s%s %3.0f%%  %s, %s events\x1b[K", strings.Repeat("█", done), strings.Repeat("░", width-done),
		100*share, b.name, grouped(float64(p.Events)))
	b.drawn = true
}

// clear removes the bar.
func (b *progressBar) clear() {
	if b.drawn {
		fmt.Fprint(b.w, "\r\x1b[K")
	}
}
