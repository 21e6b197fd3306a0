package main

import (
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"
)

// someRows has as many calls as clients, of which one is lost and the others are rescued.
func someRows() []row {
	rows := []row{{outage: &outage{name: "an outage", times: 1}}, {outage: &outage{name: "dead"}}}
	for i := range rows {
		for range clients {
			r := &result{attempts: 1.5}
			for j := range clients {
				c := &call{took: time.Duration(j) * 234 * time.Millisecond}
				c.failed.Store(1)
				r.calls = append(r.calls, c)
			}
			r.calls[0].err = os.ErrClosed
			rows[i].results = append(rows[i].results, r)
		}
	}
	return rows
}

func TestPrint(t *testing.T) {
	var out strings.Builder
	for _, table := range tablesOf(someRows()) {
		if err := table.print(&out); err != nil {
			t.Fatal(err)
		}
	}
	for _, want := range []string{
		"an outage   1           1 ",
		"an outage   1.50, 1.17 s  1.50, 1.17 s",
		"plain gRPC          0.47 s    0 s       0 s        5\n",
	} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("print wrote\n%swithout %q", out.String(), want)
		}
	}
}

func TestPriceOfNothing(t *testing.T) {
	if got := (&result{calls: []*call{{}}}).price(); got != "–" {
		t.Errorf("price = %q, want –", got)
	}
}

func TestFormatDuration(t *testing.T) {
	for d, want := range map[time.Duration]string{
		0:                        "0 s",
		4 * time.Millisecond:     "0 s",
		830 * time.Millisecond:   "0.83 s",
		10 * time.Second:         "10 s",
		10004 * time.Millisecond: "10 s",
	} {
		if got := formatDuration(d); got != want {
			t.Errorf("formatDuration(%v) = %s, want %s", d, got, want)
		}
	}
}

// TestPage puts tables into a copy of the page, so that the page has all the marks.
func TestPage(t *testing.T) {
	text, err := os.ReadFile("../../docs/outages.md")
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(t.TempDir(), "outages.md")
	if err := os.WriteFile(file, text, 0o644); err != nil {
		t.Fatal(err)
	}
	if err := writePage(file, tablesOf(someRows())); err != nil {
		t.Fatal(err)
	}
	got, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"| an outage | 1 | 1 |", "| an outage | 1.50, 1.17 s |", "| plain gRPC | 0.47 s |"} {
		if strings.Count(string(got), want) != 1 {
			t.Errorf("the page does not have %q once:\n%s", want, got)
		}
	}
}

// The README's figures are those of the page.
func TestReadmeHasTheFiguresOfThePage(t *testing.T) {
	readme, err := os.ReadFile("../../README.md")
	if err != nil {
		t.Fatal(err)
	}
	page, err := os.ReadFile("../../docs/outages.md")
	if err != nil {
		t.Fatal(err)
	}
	tableOf := func(text []byte, mark string) (rows [][]string) {
		_, rest, _ := strings.Cut(string(text), "<!-- "+mark+" -->\n")
		between, _, _ := strings.Cut(rest, "<!-- end of "+mark+" -->")
		for line := range strings.Lines(between) {
			if line = strings.TrimSpace(line); strings.HasPrefix(line, "| ") || strings.HasPrefix(line, "|  |") {
				rows = append(rows, strings.Split(strings.TrimSuffix(strings.TrimPrefix(line, "| "), " |"), " | "))
			}
		}
		return rows
	}
	want := readmeRows(table{rows: tableOf(page, "lost")}, table{rows: tableOf(page, "dead")})
	if got := tableOf(readme, "outages"); len(want) < 5 || !reflect.DeepEqual(got, want) {
		t.Errorf("the README has\n%q, want\n%q; run make outages-docs", got, want)
	}
}
