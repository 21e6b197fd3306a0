package main

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"
)

const picture = "../../docs/three-questions.svg"

// The picture's numbers are the library's: two tokens for three failures.
func TestAsk(t *testing.T) {
	got, err := ask()
	if err != nil {
		t.Fatal(err)
	}
	want := []answer{{90 * time.Millisecond, true}, {2200 * time.Millisecond, true}, {300 * time.Millisecond, false}}
	if !slices.Equal(got, want) {
		t.Errorf("the library decides %v, want %v", got, want)
	}
}

func TestPictureIsUpToDate(t *testing.T) {
	got := filepath.Join(t.TempDir(), "picture.svg")
	if err := run(got); err != nil {
		t.Fatal(err)
	}
	drawn, err := os.ReadFile(got)
	if err != nil {
		t.Fatal(err)
	}
	kept, err := os.ReadFile(picture)
	if err != nil {
		t.Fatal(err)
	}
	if string(drawn) != string(kept) {
		t.Errorf("%s is not what the program draws: run make questions-picture", picture)
	}
	for _, want := range []string{">in 90 ms<", ">in 2.2 s<", ">token 2 of 2<", ">none left<"} {
		if !strings.Contains(string(drawn), want) {
			t.Errorf("the picture does not say %s", want)
		}
	}
}

// Text fits in its place, at so much for a letter that wide fonts fit too.
func TestTextFits(t *testing.T) {
	const bold, small, plain, mono = 9.2, 6.3, 7.6, 7.4
	fits := func(text string, letter, place float64) {
		t.Helper()
		if wide := letter * float64(len([]rune(text))); wide > place {
			t.Errorf("%q may be %.0f wide, want at most %.0f", text, wide, place)
		}
	}
	for _, l := range lanes {
		fits(l.what, bold, failed.width)
		fits(l.which, mono, failed.width)
		fits(l.error, plain, failed.width)
		for _, box := range []struct {
			column
			lines [2]string
		}{{decide, l.decided}, {schedule, l.scheduled}, {outcome, l.admitted}, {outcome, l.notPassed}} {
			lines := filled(box.lines, "888 ms")
			fits(lines[0], bold, box.width-8)
			fits(lines[1], small, box.width-4)
		}
	}
	for _, c := range []column{decide, schedule, admit} {
		fits(c.question, small, c.width)
	}
}
