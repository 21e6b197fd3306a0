package main

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// TestMain is also what a server process does, since the tests start themselves again.
func TestMain(m *testing.M) {
	if address := os.Getenv(addressVariable); address != "" {
		if err := serve(address, os.Stdin, os.Stdout); err != nil {
			fmt.Fprintln(os.Stderr, "server:", err)
			os.Exit(1)
		}
		return
	}
	os.Exit(m.Run())
}

func TestBadFlags(t *testing.T) {
	for _, tt := range []struct {
		args []string
		want string
	}{
		{[]string{"-calls", "0"}, "-calls is 0, want 1 to 5000"},
		{[]string{"-calls", "5001"}, "-calls is 5001, want 1 to 5000"},
		{[]string{"-rate", "-1"}, "-rate is -1, want 1 to 5000"},
	} {
		if err := command(t.Context(), tt.args, t.Output()); err == nil || err.Error() != tt.want {
			t.Errorf("command(%q) = %v, want %s", tt.args, err, tt.want)
		}
	}
}

func TestRow(t *testing.T) {
	for _, tt := range []struct {
		name string
		row  row
		want string
	}{
		{
			"calls that waited",
			row{2500 * time.Millisecond, "patient", &summary{
				calls: 50, succeeded: 49, median: 2786 * time.Millisecond, longest: 2900 * time.Millisecond, attempts: 51,
				back: comeback{attempts: 48, over: 96 * time.Millisecond, peak: 7},
			}},
			"2.5 s|patient|50|49|2.79 s|2.9 s|51|48|96 ms|7",
		},
		{
			"no success and no attempt",
			row{100 * time.Millisecond, "hasty", &summary{calls: 50}},
			"100 ms|hasty|50|0|–|–|0|–|–|–",
		},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if got := strings.Join(tt.row.cells(), "|"); got != tt.want {
				t.Errorf("cells = %s, want %s", got, tt.want)
			}
		})
	}
}

func TestFormatDuration(t *testing.T) {
	for d, want := range map[time.Duration]string{
		0:                         "0.0 ms",
		340 * time.Microsecond:    "0.3 ms",
		9949 * time.Microsecond:   "9.9 ms",
		9950 * time.Microsecond:   "10 ms",
		21 * time.Millisecond:     "21 ms",
		999 * time.Millisecond:    "999 ms",
		999500 * time.Microsecond: "1 s",
		time.Second:               "1 s",
		1066 * time.Millisecond:   "1.07 s",
		10 * time.Second:          "10 s",
	} {
		if got := formatDuration(d); got != want {
			t.Errorf("formatDuration(%v) = %s, want %s", d, got, want)
		}
	}
}

func TestPrintNamesEachAbsenceOnce(t *testing.T) {
	table := table{title: "A title", rows: []row{
		{time.Second, "one", &summary{calls: 1}},
		{time.Second, "another", &summary{calls: 2}},
		{2 * time.Second, "one", &summary{calls: 3}},
	}}
	var out strings.Builder
	if err := table.print(&out); err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(out.String(), "A title\n") {
		t.Errorf("print wrote\n%swithout the title", out.String())
	}
	if got := strings.Count(out.String(), "1 s"); got != 1 {
		t.Errorf("print wrote\n%swith 1 s %d times, want once", out.String(), got)
	}
}

// TestPage puts tables into a copy of the page, so that the page has all the marks.
func TestPage(t *testing.T) {
	text, err := os.ReadFile("../../docs/restart.md")
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(t.TempDir(), "restart.md")
	if err := os.WriteFile(file, text, 0o644); err != nil {
		t.Fatal(err)
	}
	tables := (&plan{calls: 1, rate: 1}).tables()
	for i := range tables {
		tables[i].rows = []row{{time.Second, tables[i].mark, &summary{calls: 17}}}
	}
	if err := writePage(file, tables); err != nil {
		t.Fatal(err)
	}
	got, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	for _, table := range tables {
		if want := "| 1 s | " + table.mark + " | 17 | 0 |"; strings.Count(string(got), want) != 1 {
			t.Errorf("the page does not have %q once:\n%s", want, got)
		}
	}
}
