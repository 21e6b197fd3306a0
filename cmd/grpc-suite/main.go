// Grpc-suite runs grpc-go's own tests with grpcretry installed on every ClientConn.
//
//	make grpc-suite                           # all modes
//	make grpc-suite MODES="nothing timeout"   # some of them
//	make grpc-suite MODES=plain               # the same tests without the library
//
// It copies grpc-go's source, in the version that go.mod names, from the module cache to a
// temporary folder, adds testdata/install.go to the copy and a test file that imports it to
// each package, and runs the packages' tests once per mode:
//
//	nothing    every failure is judged and found final; nothing is retried
//	timeout    the same, with attempt timeouts of a minute
//	observer   the same, with an observer, call spans, metrics and a debug log
//	hedging    the same, with hedges that would be sent after an hour
//	default    New() without options: failures are retried
//	plain      without the library, to see what fails anyway
//
// The tests that differ are listed in differ.txt, each with its reason. The program's exit
// status is 1 if another test fails, or if one of them passes after all. A test that fails
// without being listed is run alone five times more; if it passes every time, it is
// reported as flaky and does not count.
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
	"syscall"
	"time"
)

var allModes = []string{"nothing", "timeout", "observer", "hedging", "default"}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := command(ctx, os.Args[1:], os.Stdout, os.Stderr)
	stop()
	switch {
	case errors.Is(err, flag.ErrHelp):
	case err != nil:
		fmt.Fprintln(os.Stderr, "grpc-suite:", err)
		os.Exit(1)
	}
}

// command does what the arguments say.
func command(ctx context.Context, args []string, stdout, stderr io.Writer) error {
	flags := flag.NewFlagSet("grpc-suite", flag.ContinueOnError)
	flags.SetOutput(stderr)
	modes := flags.String("modes", strings.Join(allModes, " "), "run these `modes`")
	packages := flags.String("packages", strings.Join(suites, " "), "run the tests of these `packages` of grpc-go, and of those below them")
	library := flags.String("library", ".", "the `folder` of the library, which names the version of grpc-go in its go.mod")
	dir := flags.String("dir", "",
		"copy grpc-go to this `folder` and leave it there, so that the next run compiles less (default a temporary one)")
	extra := flags.String("testflags", "", "further `flags` of go test, such as -race")
	if err := flags.Parse(args); err != nil {
		return err
	}
	for _, mode := range strings.Fields(*modes) {
		if mode != plain && !slices.Contains(allModes, mode) {
			return fmt.Errorf("-modes: there is no mode %q", mode)
		}
	}
	list, err := parseDifferences(differencesFile)
	if err != nil {
		return err
	}
	s, err := newSuite(ctx, *library, *dir, strings.Fields(*packages))
	if err != nil {
		return err
	}
	if *dir == "" {
		defer os.RemoveAll(s.dir)
	}
	s.testFlags = strings.Fields(*extra)
	var failed []string
	for _, mode := range strings.Fields(*modes) {
		start := time.Now()
		fmt.Fprintf(stdout, "\n==> grpc-go %s, mode %s\n", s.version, mode)
		r, err := s.run(ctx, mode, list, stdout)
		if err != nil {
			return err
		}
		ok := s.judge(ctx, mode, r, list, stdout)
		fmt.Fprintf(stdout, "mode %s took %v\n", mode, time.Since(start).Round(time.Second))
		if !ok {
			failed = append(failed, mode)
		}
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	if len(failed) > 0 {
		return fmt.Errorf("failed in mode %s", strings.Join(failed, ", "))
	}
	return nil
}

// judge compares the results with the list of differences, and reports on out how they
// differ. It returns false if they differ in a way that is not listed.
func (s *suite) judge(ctx context.Context, mode string, r *results, list []difference, out io.Writer) bool {
	j := compare(r, mode, list)
	ok := true
	for _, f := range j.failed {
		fmt.Fprintf(out, "\n--- output of %s\n%s---\n", f, r.output(f))
		if f.test != "" && len(j.failed) <= maxAlone && s.passesAlone(ctx, mode, f) {
			fmt.Fprintf(out, "FLAKY   %s: passed %d times alone\n", f, runsAlone)
			continue
		}
		ok = false
		fmt.Fprintf(out, "FAILED  %s\n", f)
	}
	for _, d := range j.differed {
		fmt.Fprintf(out, "differs %s: %s\n", d.testName, d.reason)
	}
	for _, d := range j.skipped {
		fmt.Fprintf(out, "skipped %s: %s\n", d.testName, d.reason)
	}
	for _, d := range j.passed {
		ok = false
		fmt.Fprintf(out, "PASSED  %s, although differ.txt says that it fails: %s\n", d.testName, d.reason)
	}
	for _, d := range j.missing {
		ok = false
		fmt.Fprintf(out, "MISSING %s, which differ.txt lists\n", d.testName)
	}
	return ok
}

// A test that fails is run alone runsAlone times, unless more than maxAlone tests failed.
const (
	runsAlone = 5
	maxAlone  = 10
)
