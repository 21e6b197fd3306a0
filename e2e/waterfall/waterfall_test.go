package waterfall

import (
	"bytes"
	"encoding/xml"
	"flag"
	"fmt"
	"io"
	"math"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"
)

var update = flag.Bool("update", false, "write the pictures in docs again, from testdata")

const (
	response = "testdata/trace.json" // Jaeger's, in a run of make docs-pictures
	drawing  = "../../docs/trace.svg"
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

func draw(t *testing.T, trace Trace) string {
	t.Helper()
	var out bytes.Buffer
	if err := Draw(&out, trace); err != nil {
		t.Fatalf("Draw = %v", err)
	}
	return out.String()
}

func TestPictureInTheDocumentationIsOfTheKeptTrace(t *testing.T) {
	checkPicture(t, draw(t, readTrace(t, response)), drawing)
}

func TestPictureHasTheSpansOfTheTrace(t *testing.T) {
	const echo = "grpcretry.test.v1.EchoService/Echo"
	var got []string
	labels := regexp.MustCompile(`<tspan [^>]*>shop</tspan> <tspan [^>]*>([^<]*)</tspan>`)
	for _, m := range labels.FindAllStringSubmatch(draw(t, readTrace(t, response)), -1) {
		got = append(got, m[1])
	}
	want := []string{"GET /cart", echo, echo, "retry wait", "attempt 2 " + echo, "retry wait", "attempt 3 " + echo}
	if !slices.Equal(got, want) {
		t.Errorf("the picture has the spans %q, want %q", got, want)
	}
}

// Every text of the picture is in Jaeger's response, is a time of it as Jaeger's page formats times, or
// stands on that page beside them.
func TestPictureShowsWhatJaegerShows(t *testing.T) {
	file, err := os.ReadFile(response)
	if err != nil {
		t.Fatal(err)
	}
	known := map[string]bool{"!": true} // the mark of a failed span
	for _, label := range []string{"Duration", "Services", "Depth", "Total Spans", "Service & Operation", "Tags", "Logs (3)"} {
		known[label] = true
	}
	for _, count := range []string{"1", "3", "7"} { // services, depth and spans
		known[count] = true
	}
	for _, m := range regexp.MustCompile(`"(?:[^"\\\\]|\\\\.)*"|[0-9.]+|true|false`).FindAllString(string(file), -1) {
		text := strings.Trim(m, `"`)
		known[text], known[text+"="] = true, true
	}
	trace := readTrace(t, response)
	start, length := trace.Spans[0].StartTime, trace.Spans[0].Duration
	for i := range int64(5) {
		known[microseconds(length*i/4)] = true
	}
	for _, s := range trace.Spans {
		known[microseconds(s.Duration)] = true
		for _, l := range s.Logs {
			known[microseconds(l.Timestamp-start)] = true
		}
	}
	known["shop: GET /cart"] = true // the service and the first span

	texts := regexp.MustCompile(`>([^<>\n]+)<`).FindAllStringSubmatch(draw(t, trace), -1)
	for _, m := range texts {
		if text := strings.ReplaceAll(m[1], "&amp;", "&"); !known[text] && strings.TrimSpace(text) != "" {
			t.Errorf("the picture says %q, which is not in Jaeger's response", text)
		}
	}
	if len(texts) < 100 {
		t.Errorf("the picture has %d texts, want those of 7 rows, 3 logs and the tags", len(texts))
	}
}

// microseconds are a time as Jaeger's page formats it.
func microseconds(us int64) string {
	if us < 1000 {
		return fmt.Sprintf("%dμs", us)
	}
	return strconv.FormatFloat(math.Round(float64(us)/10)/100, 'f', -1, 64) + "ms"
}

func TestDuration(t *testing.T) {
	for d, want := range map[time.Duration]string{
		0: "0μs", 999 * time.Microsecond: "999μs", 25737 * time.Microsecond: "25.74ms", 130 * time.Millisecond: "130ms",
		1250 * time.Millisecond: "1.25s", 2 * time.Minute: "120s",
	} {
		if got := duration(d); got != want {
			t.Errorf("duration(%v) = %q, want %q", d, got, want)
		}
	}
}

func TestTextFits(t *testing.T) { checkTextFits(t, draw(t, readTrace(t, response))) }

// checkTextFits checks that nothing is cut off: text fits between its place and the edge, at more pixels for
// a letter than the fonts need.
func checkTextFits(t *testing.T, got string) {
	t.Helper()
	inner := regexp.MustCompile(`<[^>]*>`)
	for _, m := range regexp.MustCompile(`(?s)<text x="([0-9.]+)" y="[0-9]+"([^>]*)>(.*?)</text>`).FindAllStringSubmatch(got, -1) {
		x, err := strconv.ParseFloat(m[1], 64)
		if err != nil {
			t.Fatalf("%s: %v", m[0], err)
		}
		size := 8.0
		switch {
		case strings.Contains(m[2], `font-size="12"`):
			size = 6.9
		case strings.Contains(m[2], `font-size="18"`), strings.Contains(m[2], `font-size="19"`):
			size = 11
		}
		text := inner.ReplaceAllString(m[3], "")
		if end := x + size*float64(len([]rune(text))); end > width && !strings.Contains(m[2], "anchor") {
			t.Errorf("text %q ends at about %.0f, want at most %d", text, end, width)
		}
	}
}

func TestPictureEscapesWhatPeersSay(t *testing.T) {
	trace := readTrace(t, response)
	trace.Spans[0].OperationName = `</text><script>alert("1")</script>&`
	got := draw(t, trace)
	if strings.Contains(got, "<script") {
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
	if err := Draw(io.Discard, Trace{}); err == nil {
		t.Error("Draw of a trace without spans = nil, want an error")
	}
}
