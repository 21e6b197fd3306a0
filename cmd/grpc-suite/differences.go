package main

import (
	_ "embed"
	"fmt"
	"maps"
	"slices"
	"strings"
)

//go:embed differ.txt
var differencesFile string

// A difference is a line of differ.txt: a test that fails in some modes.
type difference struct {
	testName
	modes  []string // nil for all but plain
	kind   kind
	reason string
}

// A kind says how a test differs.
type kind string

const (
	always    kind = "always"    // it fails; if not, that is a finding too
	sometimes kind = "sometimes" // it fails or passes
	hangs     kind = "hangs"     // it is not run
)

// in reports whether the test differs in a mode.
func (d difference) in(mode string) bool {
	return mode != plain && (d.modes == nil || slices.Contains(d.modes, mode))
}

// listed returns whether a test is known to differ in a mode.
func listed(mode string, list []difference) func(testName) bool {
	return func(name testName) bool {
		return slices.ContainsFunc(list, func(d difference) bool { return d.in(mode) && d.contains(name) })
	}
}

// parseDifferences reads the list, whose format differ.txt describes.
func parseDifferences(list string) ([]difference, error) {
	var all []difference
	n := 0
	for line := range strings.Lines(list) {
		n++
		line = strings.TrimSpace(line)
		if line == "" || strings.HasPrefix(line, "#") {
			continue
		}
		fields := strings.Fields(line)
		if len(fields) < 5 {
			return nil, fmt.Errorf("differ.txt:%d: %d fields, want modes, kind, package, test and reason", n, len(fields))
		}
		d := difference{testName{fields[2], fields[3]}, nil, kind(fields[1]), strings.Join(fields[4:], " ")}
		if fields[0] != "all" {
			d.modes = strings.Split(fields[0], ",")
		}
		for _, mode := range d.modes {
			if !slices.Contains(allModes, mode) {
				return nil, fmt.Errorf("differ.txt:%d: there is no mode %q", n, mode)
			}
		}
		if d.kind != always && d.kind != sometimes && d.kind != hangs {
			return nil, fmt.Errorf("differ.txt:%d: %q, want always, sometimes or hangs", n, d.kind)
		}
		all = append(all, d)
	}
	return all, nil
}

// A judgement is what is to be said about the results in one mode.
type judgement struct {
	failed   []testName   // not listed
	differed []difference // listed, and failed
	skipped  []difference // listed, and not run
	passed   []difference // listed as failing always, and passed
	missing  []difference // listed, and neither failed nor passed
}

// compare compares the results with the list. Listed tests of packages that were not run,
// or that ended early, are left alone.
func compare(r *results, mode string, list []difference) judgement {
	var j judgement
	var failed []testName
	whole := map[string]bool{} // packages of which every test has ended
	for _, pkg := range slices.Sorted(maps.Keys(r.packages)) {
		failed = append(failed, r.failed(pkg)...)
		whole[pkg] = r.count(pkg, "run") == 0 && r.outcomes[testName{pkg, "TestLibraryIsInstalled"}] != ""
	}
	j.failed = slices.DeleteFunc(slices.Clone(failed), r.listed)
	for _, d := range list {
		switch {
		case !d.in(mode) || r.packages[d.pkg] == "":
		case d.kind == hangs:
			j.skipped = append(j.skipped, d)
		case slices.ContainsFunc(failed, d.contains):
			j.differed = append(j.differed, d)
		case !whole[d.pkg]:
		case r.outcomes[d.testName] == "":
			j.missing = append(j.missing, d)
		case d.kind == always:
			j.passed = append(j.passed, d)
		}
	}
	return j
}

// skipPattern is what go test must skip in a mode. It goes by the tests' names alone,
// whatever their packages.
func skipPattern(mode string, list []difference) string {
	var patterns []string
	for _, d := range list {
		if d.in(mode) && d.kind == hangs {
			patterns = append(patterns, d.pattern())
		}
	}
	return strings.Join(patterns, "|")
}
