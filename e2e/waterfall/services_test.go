package waterfall

import (
	"bytes"
	"io"
	"os"
	"strings"
	"testing"
)

const layersTitle = "Four services in a row, D is down: only C retries"

func drawServices(t *testing.T) string {
	t.Helper()
	var out bytes.Buffer
	if err := DrawServices(&out, layersTitle, readTrace(t, "testdata/layers.json")); err != nil {
		t.Fatalf("DrawServices = %v", err)
	}
	return out.String()
}

func TestPictureOfServicesIsOfTheKeptTrace(t *testing.T) {
	checkPicture(t, drawServices(t), "../../docs/layers-trace.svg")
}

func TestPictureOfServicesSaysWhatHappened(t *testing.T) {
	got := drawServices(t)
	for want, times := range map[string]int{
		">A<": 1, ">B<": 1, ">C<": 1, ">D<": 3,
		">the client's call<": 1, ">attempt 1 by A<": 1, ">attempt 1 by B<": 1,
		">attempt 1 by C<": 1, ">attempt 2 by C<": 1, ">attempt 3 by C<": 1,
		">UNAVAILABLE, do not retry<": 3, ">UNAVAILABLE<": 3,
		">1 attempt, then: pushback<": 2, ">3 attempts, then: exhausted<": 1,
	} {
		if n := strings.Count(got, want); n != times {
			t.Errorf("the picture says %s %d times, want %d", want, n, times)
		}
	}
	checkTextFits(t, got)
}

func TestDrawServicesNeedsSpans(t *testing.T) {
	if err := DrawServices(io.Discard, "", Trace{}); err == nil {
		t.Error("DrawServices of a trace without spans = nil, want an error")
	}
}

// checkPicture compares a picture with the one in docs or, with -update, writes that again.
func checkPicture(t *testing.T, got, file string) {
	t.Helper()
	if *update {
		if err := os.WriteFile(file, []byte(got), 0o644); err != nil {
			t.Fatalf("writing the picture: %v", err)
		}
	}
	want, err := os.ReadFile(file)
	if err != nil {
		t.Fatalf("the picture: %v", err)
	}
	if got != string(want) {
		t.Errorf("%s does not show the kept trace: run make docs-pictures", file)
	}
}
