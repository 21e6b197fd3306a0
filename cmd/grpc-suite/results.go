package main

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"regexp"
	"slices"
	"strings"
	"time"
)

// A testName is a test of grpc-go, or with an empty test a package.
type testName struct {
	pkg  string // below google.golang.org/grpc
	test string // as go test prints it, "Test/Subtest"
}

func (n testName) String() string { return strings.TrimSpace(n.pkg + " " + n.test) }

// pattern matches the test, and nothing else, after go test's -run or -skip.
func (n testName) pattern() string {
	parts := strings.Split(n.test, "/")
	for i, part := range parts {
		parts[i] = "^" + regexp.QuoteMeta(part) + "$"
	}
	return strings.Join(parts, "/")
}

// contains reports whether n is other, or a test that other is a subtest of.
func (n testName) contains(other testName) bool {
	return n.pkg == other.pkg && (n.test == other.test || strings.HasPrefix(other.test, n.test+"/"))
}

// results are what go test -json has said.
type results struct {
	outcomes map[testName]string // "pass", "fail", "skip"; "run" of a test that did not end
	packages map[string]string   // likewise
	outputs  map[testName][]string
	order    []testName // of the tests' starts
	listed   func(testName) bool
}

// newResults returns results to be read. A test that fails and is listed is reported as one
// that differs.
func newResults(listed func(testName) bool) *results {
	return &results{
		listed:   listed,
		outcomes: map[testName]string{},
		packages: map[string]string{},
		outputs:  map[testName][]string{},
	}
}

// An event is one line of go test -json, see "go doc test2json".
type event struct {
	Action, Package, ImportPath, Test, Output string
	Elapsed                                   float64
}

// read reads all events, and reports each package on out when its tests have ended.
func (r *results) read(events io.Reader, out io.Writer) error {
	lines := bufio.NewReader(events)
	for {
		line, err := lines.ReadBytes('\n')
		if len(line) > 0 {
			var e event
			if json.Unmarshal(line, &e) == nil {
				r.add(e, out)
			} else {
				fmt.Fprintf(out, "%s", line)
			}
		}
		switch {
		case err == io.EOF:
			return nil
		case err != nil:
			return err
		}
	}
}

func (r *results) add(e event, out io.Writer) {
	name := testName{strings.TrimPrefix(e.Package, grpcModule+"/"), e.Test}
	switch e.Action {
	case "build-output":
		fmt.Fprint(out, e.Output)
	case "output":
		r.outputs[name] = append(r.outputs[name], e.Output)
	case "run":
		r.order = append(r.order, name)
		r.outcomes[name] = "run"
	case "pass", "fail", "skip":
		if e.Test != "" {
			r.outcomes[name] = e.Action
			return
		}
		r.packages[name.pkg] = e.Action
		took := time.Duration(e.Elapsed * float64(time.Second)).Round(100 * time.Millisecond)
		failed := r.failed(name.pkg)
		unlisted := slices.DeleteFunc(slices.Clone(failed), r.listed)
		verdict := "ok"
		if len(unlisted) > 0 {
			verdict = "fail"
		}
		fmt.Fprintf(out, "%-4s %-36s %7v  %3d passed, %d failed, %d differ  %s\n", verdict, name.pkg, took,
			r.count(name.pkg, "pass"), len(unlisted), len(failed)-len(unlisted), r.traffic(name.pkg))
	}
}

// count is how many tests of a package have an outcome, those that hold subtests excluded.
func (r *results) count(pkg, outcome string) int {
	n := 0
	for name, o := range r.outcomes {
		if name.pkg == pkg && o == outcome && !r.hasSubtests(name) {
			n++
		}
	}
	return n
}

func (r *results) hasSubtests(name testName) bool {
	return slices.ContainsFunc(r.order, func(other testName) bool { return other != name && name.contains(other) })
}

// failed returns the tests of a package that failed, those excluded that did so because of
// a subtest. If a package failed and no test did, that is the package itself.
func (r *results) failed(pkg string) []testName {
	var failed []testName
	for _, name := range r.order {
		if o := r.outcomes[name]; name.pkg == pkg && (o == "fail" || o == "run") {
			failed = append(failed, name)
		}
	}
	failed = slices.DeleteFunc(slices.Clone(failed), func(name testName) bool {
		return slices.ContainsFunc(failed, func(other testName) bool { return other != name && name.contains(other) })
	})
	if len(failed) == 0 && r.packages[pkg] == "fail" {
		failed = append(failed, testName{pkg: pkg})
	}
	return failed
}

// traffic is what the package's last test says about the calls of all.
func (r *results) traffic(pkg string) string {
	for _, line := range r.outputs[testName{pkg, "TestLibraryIsInstalled"}] {
		if _, numbers, ok := strings.Cut(line, ": calls="); ok {
			return "calls=" + strings.TrimSpace(numbers)
		}
	}
	return ""
}

// output is the end of what a test, or a package, printed, without gRPC's own log of what is
// no error.
func (r *results) output(name testName) string {
	const most = 60
	var lines []string
	chatter := false
	for _, line := range r.outputs[name] {
		switch {
		case strings.Contains(line, " INFO ") && strings.HasPrefix(line, "    tlogger.go:"):
			chatter = true
		case chatter && strings.HasPrefix(line, "        "): // a log entry of several lines
		default:
			chatter = false
			lines = append(lines, line)
		}
	}
	return strings.Join(lines[max(0, len(lines)-most):], "")
}
