package main

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"
)

// The figures are those of docs/services.md.
func TestTrees(t *testing.T) {
	want := []int{27, 7, 3}
	for i, one := range panels {
		tree, err := attemptsWith(one.opts...)
		if err != nil {
			t.Fatal(err)
		}
		if got := tree.leaves(); got != want[i] {
			t.Errorf("%s: %d attempts reach the last service, want %d", one.title, got, want[i])
		}
	}
}

func TestTimelines(t *testing.T) {
	for i, want := range []struct {
		end, last time.Duration // of A's call, and of C's newest attempt
		attempts  int           // of C
		forbidden bool
	}{
		{950 * time.Millisecond, 940 * time.Millisecond, 3, true},
		{deadline, 2540 * time.Millisecond, 4, false},
		{440 * time.Millisecond, 430 * time.Millisecond, 2, false},
		{deadline, deadline, 1, false},
	} {
		got, err := courses[i].run()
		if err != nil {
			t.Fatal(err)
		}
		made := slices.DeleteFunc(slices.Clone(got.bars), func(b bar) bool { return b.caller != 2 })
		last := made[len(made)-1].to
		if end := got.end.at.Sub(begin); end != want.end || last != want.last || len(made) != want.attempts ||
			(got.end.trailer != nil) != want.forbidden {
			t.Errorf("%s: A's call ends at %v with trailer %v, C's %d attempts at %v; want %+v", courses[i].title, end, got.end.trailer, len(made),
				last, want)
		}
	}
}

func TestPicturesAreUpToDate(t *testing.T) {
	for picture, draw := range map[string]func() (string, error){"layers.svg": drawLayers, "deadlines.svg": drawDeadlines} {
		drawn := filepath.Join(t.TempDir(), picture)
		if err := write(drawn, draw); err != nil {
			t.Fatal(err)
		}
		if read(t, drawn) != read(t, "../../docs/"+picture) {
			t.Errorf("docs/%s is not what the program draws: run make services-pictures", picture)
		}
	}
}

// The page quotes the time lines.
func TestPageQuotesThePictures(t *testing.T) {
	page := read(t, "../../docs/services.md")
	for _, want := range []string{"](layers.svg)", "](deadlines.svg)", "950 ms", "440 ms", "1.54 s"} {
		if !strings.Contains(page, want) {
			t.Errorf("docs/services.md does not have %q", want)
		}
	}
}

// The page quotes figures of the simulator.
func TestPageQuotesTheSimulator(t *testing.T) {
	page, herd := read(t, "../../docs/services.md"), read(t, "../../docs/herd.md")
	figure := func(scenario, strategy string, column int) string {
		t.Helper()
		_, row, found := strings.Cut(herd, fmt.Sprintf("| `%s` | %s |", scenario, strategy))
		if !found {
			t.Fatalf("docs/herd.md has no %s of %s", strategy, scenario)
		}
		return strings.TrimSpace(strings.Split(row, "|")[column])
	}
	span := func(scenario, strategy string) string { // of figures below 10
		var all []string
		for column := range 4 {
			all = append(all, figure(scenario, strategy, column))
		}
		return "| " + slices.Min(all) + " to " + slices.Max(all) + " |"
	}
	want := []string{
		"| " + figure("layers", "no budget", 0) + " |",
		span("layers", "default"),
		"| " + figure("layers-measures", "no budget, stop callers", 0) + " |",
		"| " + figure("layers-measures", "no budget, one attempt for retries", 0) + " |",
		span("layers-measures", "default, both"),
	}
	for _, scenario := range []string{"services-blip-500ms", "services-zone"} {
		want = append(want, figure(scenario, "default", 0)+" of the calls", figure(scenario, "default, both", 0)+" of the calls")
	}
	for _, one := range want {
		if !strings.Contains(page, one) {
			t.Errorf("docs/services.md does not have %q, as docs/herd.md has", one)
		}
	}
}

func read(t *testing.T, name string) string {
	t.Helper()
	text, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}
