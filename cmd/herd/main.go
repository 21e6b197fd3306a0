// Herd shows what retries do to a server that recovers: it simulates many clients on the
// decision engine and the budgets of github.com/grpcretry/grpcretry, and draws the load that
// the server sees.
//
//	herd                              the classic outage, under every strategy
//	herd -list                        the shipped studies, and what each of them shows
//	herd -study budget -png out.png   another study, as a picture
//	herd -policy config.json          the policy of a gRPC service config, compared with the others
//	herd -clients 5000 -outage 0s+30s the same with other numbers
//	herd -v                           all figures
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
	os.Exit(run(ctx, os.Args[1:], os.Stdout, os.Stderr))
}

// run runs the program. It returns the exit status: 0 on success, 1 if something failed or was
// interrupted, and 2 for an invalid command line.
func run(ctx context.Context, args []string, stdout, stderr io.Writer) int {
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
	switch err := o.do(ctx, stdout, stderr); {
	case errors.Is(err, context.Canceled):
		fmt.Fprintln(stderr, "herd: interrupted")
		return 1
	case err != nil:
		fmt.Fprintln(stderr, "herd:", err)
		return 1
	}
	return 0
}

func (o *options) do(ctx context.Context, stdout, stderr io.Writer) error {
	if o.list {
		return list(stdout)
	}
	if o.docs != "" {
		return writeDocs(ctx, o.docs, stdout)
	}
	study, err := o.study()
	if err != nil {
		return err
	}
	seen, err := o.simulate(ctx, study, stderr)
	if len(seen.scenarios) == 0 {
		return err
	}
	if err != nil {
		fmt.Fprintf(stdout, "Stopped before the end. The results so far:\n\n")
	}
	out := &report{w: stdout, verbose: o.verbose}
	out.study(seen)
	return errors.Join(err, out.err, writeFile("-png", o.png, func(w io.Writer) error { return writePNG(w, seen) }))
}

// writeFile creates a file, unless its path is empty. Its errors name the flag and the file.
func writeFile(name, path string, write func(io.Writer) error) error {
	if path == "" {
		return nil
	}
	f, err := os.Create(path)
	if err != nil {
		return fmt.Errorf("%s: %w", name, err)
	}
	if err := errors.Join(write(f), f.Close()); err != nil {
		return fmt.Errorf("%s %s: %w", name, path, err)
	}
	return nil
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
	costs bool // or about what a failure costs
}

// study returns the study that the command line selects, with its flags applied.
func (o *options) study() (sim.Study, error) {
	study, ok := sim.FindStudy(o.name)
	if !ok {
		return sim.Study{}, fmt.Errorf("-study %q: there is no such study, want one of %s", o.name, strings.Join(studyNames(), ", "))
	}
	var added []sim.Strategy
	if o.policy != "" {
		var err error
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

// simulate runs every scenario of a study. When interrupted, it returns the results so far.
func (o *options) simulate(ctx context.Context, study sim.Study, stderr io.Writer) (seen, error) {
	bar := &progress{w: stderr, shown: time.Now()}
	out := seen{Study: study, runs: max(o.runs, 1)}
	for i, s := range study.Scenarios {
		bar.begin(s.Name, i, len(study.Scenarios))
		found, err := sim.Compare(ctx, s, o.runs, bar.show)
		if len(found) > 0 {
			out.scenarios = append(out.scenarios, seenScenario{s, found, study.Tail, study.Costs})
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

// progress says every ten seconds how far a long run is.
type progress struct {
	w        io.Writer
	shown    time.Time
	name     string
	part, of int
}

// begin names the part that runs now, and its place among all parts.
func (p *progress) begin(name string, part, of int) { p.name, p.part, p.of = name, part, of }

func (p *progress) show(now sim.Progress) {
	if time.Since(p.shown) < 10*time.Second {
		return
	}
	p.shown = time.Now()
	share := (float64(p.part) + min(now.Share, 1)) / float64(p.of)
	fmt.Fprintf(p.w, "herd: %s: %.0f%%, %s events\n", p.name, 100*share, grouped(float64(now.Events)))
}
