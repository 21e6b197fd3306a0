package main

import (
	"io"
	"slices"
	"strings"
	"testing"
)

// transcript is what go test -json says of a package in which Test/Good passes, Test/Bad
// fails, Test/Odd/sub fails, and Test/Rare passes.
const transcript = `
{"Action":"start","Package":"google.golang.org/grpc/test"}
{"Action":"run","Package":"google.golang.org/grpc/test","Test":"Test"}
{"Action":"run","Package":"google.golang.org/grpc/test","Test":"Test/Good"}
{"Action":"pass","Package":"google.golang.org/grpc/test","Test":"Test/Good"}
{"Action":"run","Package":"google.golang.org/grpc/test","Test":"Test/Bad"}
{"Action":"output","Package":"google.golang.org/grpc/test","Test":"Test/Bad","Output":"    tlogger.go:133: INFO server.go:742 [core] Resolver state updated: {\n"}
{"Action":"output","Package":"google.golang.org/grpc/test","Test":"Test/Bad","Output":"          \"Addresses\": []}\n"}
{"Action":"output","Package":"google.golang.org/grpc/test","Test":"Test/Bad","Output":"    end2end_test.go:2965: no header\n"}
{"Action":"output","Package":"google.golang.org/grpc/test","Test":"Test/Bad","Output":"        want one\n"}
{"Action":"fail","Package":"google.golang.org/grpc/test","Test":"Test/Bad"}
{"Action":"run","Package":"google.golang.org/grpc/test","Test":"Test/Odd"}
{"Action":"run","Package":"google.golang.org/grpc/test","Test":"Test/Odd/sub"}
{"Action":"fail","Package":"google.golang.org/grpc/test","Test":"Test/Odd/sub"}
{"Action":"fail","Package":"google.golang.org/grpc/test","Test":"Test/Odd"}
{"Action":"run","Package":"google.golang.org/grpc/test","Test":"Test/Rare"}
{"Action":"pass","Package":"google.golang.org/grpc/test","Test":"Test/Rare"}
{"Action":"fail","Package":"google.golang.org/grpc/test","Test":"Test"}
{"Action":"run","Package":"google.golang.org/grpc/test","Test":"TestLibraryIsInstalled"}
{"Action":"output","Package":"google.golang.org/grpc/test","Test":"TestLibraryIsInstalled","Output":"    install.go:138: calls=7 attempts=7\n"}
{"Action":"pass","Package":"google.golang.org/grpc/test","Test":"TestLibraryIsInstalled"}
{"Action":"fail","Package":"google.golang.org/grpc/test","Elapsed":1.5}
`

func read(t *testing.T, events, mode string, list []difference) *results {
	t.Helper()
	r := newResults(listed(mode, list))
	if err := r.read(strings.NewReader(strings.TrimSpace(events)), io.Discard); err != nil {
		t.Fatalf("read() = %v, want nil", err)
	}
	return r
}

func parse(t *testing.T, list string) []difference {
	t.Helper()
	all, err := parseDifferences(list)
	if err != nil {
		t.Fatalf("parseDifferences() = %v, want nil", err)
	}
	return all
}

func TestCompare(t *testing.T) {
	for _, tt := range []struct {
		name, list, mode string
		want             []string // the test's names, after failed, differed, skipped, passed or missing
	}{
		{"nothing listed", "", "nothing",
			[]string{"failed test Test/Bad", "failed test Test/Odd/sub"}},
		{"a subtest of a listed test", "all always test Test/Odd reason\n nothing always test Test/Bad reason", "nothing",
			[]string{"differed test Test/Bad", "differed test Test/Odd"}},
		{"another mode", "timeout always test Test/Bad reason\n timeout always test Test/Good reason", "nothing",
			[]string{"failed test Test/Bad", "failed test Test/Odd/sub"}},
		{"no library", "all sometimes test Test/Bad reason\n all always test Test/Good reason", "plain",
			[]string{"failed test Test/Bad", "failed test Test/Odd/sub"}},
		{"another package", "all sometimes interop Test/Bad reason", "nothing",
			[]string{"failed test Test/Bad", "failed test Test/Odd/sub"}},
		{"listed and passed",
			"all sometimes test Test reason\n all always test Test/Good reason\n all sometimes test Test/Rare reason", "nothing",
			[]string{"differed test Test", "passed test Test/Good"}},
		{"listed and gone", "all sometimes test Test reason\n all always test Test/Gone reason\n all hangs test Test/Stuck reason", "nothing",
			[]string{"differed test Test", "missing test Test/Gone", "skipped test Test/Stuck"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			list := parse(t, tt.list)
			j := compare(read(t, transcript, tt.mode, list), tt.mode, list)
			var got []string
			for _, name := range j.failed {
				got = append(got, "failed "+name.String())
			}
			for verdict, list := range map[string][]difference{"differed": j.differed, "skipped": j.skipped, "passed": j.passed,
				"missing": j.missing} {
				for _, d := range list {
					got = append(got, verdict+" "+d.String())
				}
			}
			slices.Sort(got)
			if !slices.Equal(got, tt.want) {
				t.Errorf("compare() = %q, want %q", got, tt.want)
			}
		})
	}
}

// A package that panics, or does not compile, must not pass because no test of it failed.
func TestPackageThatEndsEarly(t *testing.T) {
	for _, tt := range []struct{ name, events, want string }{
		{"in no test", `{"Action":"fail","Package":"google.golang.org/grpc/test"}`, "test"},
		{"in a test", `
{"Action":"run","Package":"google.golang.org/grpc/test","Test":"TestA"}
{"Action":"fail","Package":"google.golang.org/grpc/test"}`, "test TestA"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			list := parse(t, "all always test TestB reason")
			j := compare(read(t, tt.events, "nothing", list), "nothing", list)
			if len(j.failed) != 1 || j.failed[0].String() != tt.want || len(j.missing)+len(j.passed) != 0 {
				t.Errorf("compare() = %+v, want that only %s failed", j, tt.want)
			}
		})
	}
}

func TestOutput(t *testing.T) {
	r := read(t, transcript, "nothing", nil)
	const want = "    end2end_test.go:2965: no header\n        want one\n"
	if got := r.output(testName{"test", "Test/Bad"}); got != want {
		t.Errorf("output() = %q, want %q", got, want)
	}
	if got, want := r.traffic("test"), "calls=7 attempts=7"; got != want {
		t.Errorf("traffic() = %q, want %q", got, want)
	}
}

func TestParseDifferences(t *testing.T) {
	list := parse(t, differencesFile)
	if len(list) == 0 {
		t.Errorf("differ.txt lists nothing")
	}
	for _, d := range list {
		if d.in(plain) {
			t.Errorf("%s differs in mode plain, want no difference without the library", d.testName)
		}
	}
	for _, bad := range []string{
		"all always test Test/NoReason",
		"all often test Test/Kind reason",
		"slow always test Test/Mode reason",
	} {
		if _, err := parseDifferences(bad); err == nil {
			t.Errorf("parseDifferences(%q) = nil, want an error", bad)
		}
	}
}

func TestSkipPattern(t *testing.T) {
	list := parse(t, "default hangs test Test/A/b.c reason\n default hangs test TestD reason\n all always test TestE reason")
	if got, want := skipPattern("default", list), `^Test$/^A$/^b\.c$|^TestD$`; got != want {
		t.Errorf("skipPattern(default) = %q, want %q", got, want)
	}
	if got := skipPattern("nothing", list); got != "" {
		t.Errorf("skipPattern(nothing) = %q, want nothing", got)
	}
}

// Every mode of the installer can be asked for, and the other way round.
func TestModes(t *testing.T) {
	for _, mode := range append([]string{plain}, allModes...) {
		if !strings.Contains(string(installer), "\n\t\""+mode+"\": ") {
			t.Errorf("testdata/install.go has no mode %q", mode)
		}
	}
}
