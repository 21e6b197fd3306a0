package waterfall

import (
	"bytes"
	"encoding/xml"
	"flag"
	"io"
	"os"
	"regexp"
	"strconv"
	"strings"
	"testing"
)

var update = flag.Bool("update", false, "write the pictures in docs again, from testdata")

const (
	answer  = "testdata/trace.json" // what Jaeger answered in a run of make docs-pictures
	drawing = "../../docs/trace.svg"
	title   = "One call: it failed twice, waited, and the third attempt rescued it"
)

func readTrace(t *testing.T, file string) Trace {
	t.Helper()
	f, err := os.Open(file)
	if err != nil {
		t.Fatalf("the kept trace: %v", err)
	}
	defer f.Close()
	traces, err := Read(f)
	if err != nil || len(traces) != 1 {
		t.Fatalf("Read = %d traces, %v, want one", len(traces), err)
	}
	return traces[0]
}

func draw(t *testing.T, title string, trace Trace) string {
	t.Helper()
	var out bytes.Buffer
	if err := Draw(&out, title, trace); err != nil {
		t.Fatalf("Draw = %v", err)
	}
	return out.String()
}

func TestPictureInTheDocumentationIsOfTheKeptTrace(t *testing.T) {
	checkPicture(t, draw(t, title, readTrace(t, answer)), drawing)
}

func TestPictureSaysWhatHappened(t *testing.T) {
	got := draw(t, title, readTrace(t, answer))
	for _, want := range []string{">GET /cart<", ">EchoService/Echo<", ">the call, 3 attempts<",
		">attempt 1<", ">attempt 2<", ">attempt 3<",
		">retry wait<", ">before attempt 2<", ">before attempt 3<"} {
		if !strings.Contains(got, want) {
			t.Errorf("the picture does not say %s", want)
		}
	}
	// Each wait is said twice: in its bar and in the table.
	for _, want := range []string{">60 ms, backoff<", ">130 ms, asked for by the server<"} {
		if n := strings.Count(got, want); n != 2 {
			t.Errorf("the picture says %s %d times, want twice", want, n)
		}
	}
	if got := strings.Count(got, ">UNAVAILABLE<"); got != 4 {
		t.Errorf("the picture says UNAVAILABLE %d times, want twice at the attempts and twice in the table", got)
	}
}

func TestTextFits(t *testing.T) { checkTextFits(t, draw(t, title, readTrace(t, answer))) }

// checkTextFits checks that nothing is cut off: text fits between its place and the edge, at eight
// pixels for a letter, which is more than the fonts need.
func checkTextFits(t *testing.T, got string) {
	t.Helper()
	for _, m := range regexp.MustCompile(`<text x="([0-9.]+)" y="[0-9]+" [^>]*>([^<]*)</text>`).FindAllStringSubmatch(got, -1) {
		x, err := strconv.ParseFloat(m[1], 64)
		if err != nil {
			t.Fatalf("%s: %v", m[0], err)
		}
		size := 8.0
		if strings.Contains(m[0], `font-size="19"`) {
			size = 11
		}
		if end := x + size*float64(len([]rune(m[2]))); end > width && !strings.Contains(m[0], "middle") {
			t.Errorf("text %q ends at about %.0f, want at most %d", m[2], end, width)
		}
	}
}

func TestPictureEscapesWhatPeersSay(t *testing.T) {
	trace := readTrace(t, answer)
	trace.Spans[0].OperationName = `</text><script>alert("1")</script>&`
	got := draw(t, `<b>"title" & more</b>`, trace)
	if strings.Contains(got, "<script") || strings.Contains(got, "<b>") {
		t.Errorf("markup of a peer is in the picture:\n%s", got)
	}
	for decoder := xml.NewDecoder(strings.NewReader(got)); ; {
		if _, err := decoder.Token(); err == io.EOF {
			break
		} else if err != nil {
			t.Fatalf("the picture is no XML: %v", err)
		}
	}
}

func TestReadRefusesWhatIsNoAnswer(t *testing.T) {
	for _, tt := range []struct{ in, want string }{
		{`<html>`, "not an answer of Jaeger"},
		{`{"data":null,"errors":[{"code":404,"msg":"trace not found"}]}`, "Jaeger says: trace not found"},
	} {
		if _, err := Read(strings.NewReader(tt.in)); err == nil || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("Read(%s) = %v, want %q in it", tt.in, err, tt.want)
		}
	}
}

func TestDrawNeedsSpans(t *testing.T) {
	if err := Draw(io.Discard, "", Trace{}); err == nil {
		t.Error("Draw of a trace without spans = nil, want an error")
	}
}
