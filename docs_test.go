package grpcretry

import (
	"context"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"
	"unicode"

	"go.opentelemetry.io/otel/attribute"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"

	"github.com/grpcretry/grpcretry/internal/reasons"
	"github.com/grpcretry/grpcretry/internal/recorded"
	echov1 "github.com/grpcretry/grpcretry/proto/echo/v1"
	"github.com/grpcretry/grpcretry/telemetry"
)

// observingPage has a table for each kind of telemetry. The tests below compare the tables
// with the names in the source and with what calls record.
const observingPage = "docs/observing.md"

// The heads of the tables' first columns.
const (
	attemptEventTable = "attribute of `grpcretry.attempt`"
	stopEventTable    = "attribute of `grpcretry.stop`"
	callSpanTable     = "attribute of the call span"
	waitSpanTable     = "attribute of the wait span"
	serverSpanTable   = "attribute of the server's span"
	reasonTable       = "reason"
	metricTable       = "metric"
	metricAttrTable   = "attribute of metrics"
)

// A pageTable is a table of a page, its rows by the code in their first cell.
type pageTable struct {
	head []string
	rows map[string][]string
}

// cell returns a row's cell below the given head, without back quotes.
func (p pageTable) cell(row, head string) string {
	i := slices.Index(p.head, head)
	if i < 0 || p.rows[row] == nil {
		return ""
	}
	return strings.ReplaceAll(p.rows[row][i], "`", "")
}

func (p pageTable) names() []string { return slices.Sorted(maps.Keys(p.rows)) }

// readTable finds the table whose first column has the given head.
func readTable(t *testing.T, page, firstHead string) pageTable {
	t.Helper()
	text, err := os.ReadFile(page)
	if err != nil {
		t.Fatal(err)
	}
	var found pageTable
	for line := range strings.Lines(string(text)) {
		cells := strings.Split(strings.Trim(strings.TrimSpace(line), "|"), "|")
		for i := range cells {
			cells[i] = strings.TrimSpace(cells[i])
		}
		switch {
		case !strings.HasPrefix(line, "|"):
			if found.rows != nil {
				return found
			}
		case cells[0] == firstHead:
			found = pageTable{cells, map[string][]string{}}
		case found.rows != nil && !strings.HasPrefix(line, "|--"):
			found.rows[strings.Trim(cells[0], "`")] = cells
		}
	}
	if found.rows == nil {
		t.Fatalf("%s has no table that begins with | %s |", page, firstHead)
	}
	return found
}

// stringConstants returns the exported string constants of package telemetry with one of the given
// prefixes, by name.
func stringConstants(t *testing.T, prefixes ...string) map[string]string {
	t.Helper()
	found := map[string]string{}
	_, files := sources(t, "telemetry")
	for _, file := range files {
		ast.Inspect(file, func(n ast.Node) bool {
			spec, ok := n.(*ast.ValueSpec)
			if !ok {
				return true
			}
			for i, name := range spec.Names {
				if i >= len(spec.Values) || !slices.ContainsFunc(prefixes, func(p string) bool { return strings.HasPrefix(name.Name, p) }) {
					continue
				}
				if literal, ok := spec.Values[i].(*ast.BasicLit); ok && literal.Kind == token.STRING {
					value, err := strconv.Unquote(literal.Value)
					if err != nil {
						t.Fatal(err)
					}
					found[name.Name] = value
				}
			}
			return true
		})
	}
	return found
}

// sources parses the package in a folder, without its tests.
func sources(t *testing.T, folder string) (*token.FileSet, []*ast.File) {
	t.Helper()
	entries, err := os.ReadDir(folder)
	if err != nil {
		t.Fatal(err)
	}
	fileSet := token.NewFileSet()
	var files []*ast.File
	for _, entry := range entries {
		name := entry.Name()
		if !strings.HasSuffix(name, ".go") || strings.HasSuffix(name, "_test.go") {
			continue
		}
		file, err := parser.ParseFile(fileSet, filepath.Join(folder, name), nil, parser.ParseComments)
		if err != nil {
			t.Fatal(err)
		}
		files = append(files, file)
	}
	return fileSet, files
}

// Every attribute and metric that has a constant stands in a table, and the page names every event.
func TestTablesHaveEveryTelemetryConstant(t *testing.T) {
	var shown []string
	for _, head := range []string{attemptEventTable, stopEventTable, callSpanTable, waitSpanTable, serverSpanTable, metricTable,
		metricAttrTable} {
		shown = append(shown, readTable(t, observingPage, head).names()...)
	}
	for name, value := range stringConstants(t, "Attr", "Metric") {
		if !slices.Contains(shown, value) {
			t.Errorf("no table of %s has %s, %q", observingPage, name, value)
		}
	}
	page, err := os.ReadFile(observingPage)
	if err != nil {
		t.Fatal(err)
	}
	events := stringConstants(t, "SpanEvent")
	if len(events) != 3 {
		t.Fatalf("the source has the span events %v, want three", events)
	}
	for name, value := range events {
		if !strings.Contains(string(page), "the event `"+value+"`") {
			t.Errorf("%s does not name the event %s, %q", observingPage, name, value)
		}
	}
}

func TestTableHasEveryReason(t *testing.T) {
	want := slices.Sorted(slices.Values(reasons.Words()))
	if got := slices.Sorted(slices.Values(append(readTable(t, observingPage, reasonTable).names(), "probe"))); !slices.Equal(got, want) {
		t.Errorf("the reasons are\n%q, want\n%q", got, want)
	}
}

// recordEverything makes calls that record all there is to record: one that is retried, one
// that is hedged, one that ends in a wait, one whose wait is repeated, and one that passes straight through.
func recordEverything(t *testing.T) ([]*recorded.Span, []recorded.Metric) {
	t.Helper()
	spans, meters := &recorded.Spans{}, &recorded.Meters{}
	var metrics []recorded.Metric
	bubble(t, func(t *testing.T) {
		telemetry := []Option{WithCallSpan(true), WithTracerProvider(spans), WithMeterProvider(meters)}

		retried := serve(t, script(unavailable(), ok(), fail(codes.NotFound, "no such thing"), unavailable(), ok()))
		client := retried.client(t, telemetry...)
		for range 2 {
			client.Echo(t.Context(), request())
		}
		ctx, cancel := context.WithCancel(t.Context())
		time.AfterFunc(time.Nanosecond, cancel) // while it waits
		client.Echo(ctx, request())
		client.Echo(t.Context(), request(), Disable())

		hedged := serve(t, script(ok().after(time.Minute), ok()))
		client = hedged.client(t, append(telemetry, WithMethod(echoMethod, WithPolicy(Policy{MaxAttempts: 2, Hedging: &Hedging{
			Delay: HedgeAfter(time.Second), Budget: Unlimited}})))...)
		client.Echo(t.Context(), request())

		late := &aBudget{refuse: true} // the wait is repeated until it allows the retry
		time.AfterFunc(time.Second, func() {
			late.mu.Lock()
			defer late.mu.Unlock()
			late.refuse = false
		})
		serve(t, script(unavailable(), ok())).client(t, append(telemetry, WithBudget(late))...).Echo(t.Context(), request())

		givesUp := serveHandler(t, func(ctx context.Context) error {
			_, err := serve(t, always(unavailable())).client(t, WithRatioBudget(RatioBudget{Ratio: 1, Reserve: Nothing}),
				WithPatience(0)).Echo(ctx, request())
			return err
		}, append([]grpc.ServerOption{grpc.ChainUnaryInterceptor(withServerSpan(spans))},
			serverOptions(WithMeterProvider(meters))...)...)
		client = echov1.NewEchoServiceClient(givesUp.conn(t))
		client.Echo(t.Context(), request())
		client.Echo(metadata.AppendToOutgoingContext(t.Context(), previousAttemptsKey, "1"), request())

		metrics = collect(t, meters)
	})
	return spans.Ended(), metrics
}

// withServerSpan returns an interceptor that starts a span for each request.
func withServerSpan(spans *recorded.Spans) grpc.UnaryServerInterceptor {
	return func(ctx context.Context, req any, _ *grpc.UnaryServerInfo, next grpc.UnaryHandler) (any, error) {
		ctx, span := spans.Tracer("server").Start(ctx, "the server")
		defer span.End()
		return next(ctx, req)
	}
}

func TestTablesHaveTheAttributesOfSpans(t *testing.T) {
	spans, _ := recordEverything(t)
	got := map[string]map[string]bool{}
	add := func(table string, attrs []attribute.KeyValue) {
		if got[table] == nil {
			got[table] = map[string]bool{}
		}
		for _, a := range attrs {
			got[table][string(a.Key)] = true
		}
	}
	for _, span := range spans {
		switch span.Name() {
		case telemetry.SpanWait:
			add(waitSpanTable, span.Attributes())
		case "the server":
			add(serverSpanTable, span.Attributes())
		default:
			add(callSpanTable, span.Attributes())
		}
		for _, event := range span.Events() {
			if event.Name == telemetry.SpanEventNoRetry && len(event.Attributes) == 0 {
				continue
			}
			add("attribute of `"+event.Name+"`", event.Attributes)
		}
	}
	for _, table := range []string{attemptEventTable, stopEventTable, callSpanTable, waitSpanTable, serverSpanTable} {
		found := slices.Sorted(maps.Keys(got[table]))
		if shown := readTable(t, observingPage, table).names(); !slices.Equal(shown, found) {
			t.Errorf("the table | %s | has\n%q, recorded were\n%q", table, shown, found)
		}
		delete(got, table)
	}
	if len(got) > 0 {
		t.Errorf("no table for %v", got)
	}
}

func TestTablesHaveTheMetrics(t *testing.T) {
	_, metrics := recordEverything(t)
	ours := readTable(t, observingPage, metricTable)
	shown := map[string]string{}
	for _, name := range ours.names() {
		attrs := strings.Split(ours.cell(name, "attributes"), ", ")
		slices.Sort(attrs)
		if slices.Equal(attrs, []string{"none"}) {
			attrs = nil
		}
		shown[name] = fmt.Sprint(ours.cell(name, "kind, unit"), attrs)
	}
	measured, attributes := map[string]string{}, map[string]bool{}
	for _, m := range metrics {
		keys := map[string]bool{}
		for _, s := range m.Series {
			for _, a := range s.Attributes.ToSlice() {
				keys[string(a.Key)] = true
			}
		}
		measured[m.Name] = fmt.Sprint(m.Kind, ", ", m.Unit, slices.Sorted(maps.Keys(keys)))
		maps.Copy(attributes, keys)
		if got, want := ours.cell(m.Name, "in Prometheus"), prometheusName(m.Name, m.Kind, m.Unit); got != want {
			t.Errorf("the table has %s for %s, want %s", got, m.Name, want)
		}
	}
	if !maps.Equal(shown, measured) {
		t.Errorf("the tables have\n%v\nrecorded were\n%v", shown, measured)
	}
	if got, want := readTable(t, observingPage, metricAttrTable).names(), slices.Sorted(maps.Keys(attributes)); !slices.Equal(got, want) {
		t.Errorf("the table | %s | has\n%q, recorded were\n%q", metricAttrTable, got, want)
	}
}

// prometheusName is the name that OpenTelemetry's exporter gives a metric.
func prometheusName(name, kind, unit string) string {
	name = strings.ReplaceAll(name, ".", "_")
	switch {
	case kind == "counter":
		return name + "_total"
	case unit == "s":
		return name + "_seconds"
	case unit == "By":
		return name + "_bytes"
	default:
		return name
	}
}

// The pages link to each other and to files of the repository.
func TestPageLinks(t *testing.T) {
	pages := []string{"README.md", "CHANGELOG.md", "testdata/README.md", "examples/production/README.md"}
	entries, err := os.ReadDir("docs")
	if err != nil {
		t.Fatal(err)
	}
	for _, entry := range entries {
		if strings.HasSuffix(entry.Name(), ".md") {
			pages = append(pages, "docs/"+entry.Name())
		}
	}
	for _, page := range pages {
		text, err := os.ReadFile(page)
		if err != nil {
			t.Fatal(err)
		}
		for _, link := range pageLink.FindAllStringSubmatch(string(text), -1) {
			if err := checkLink(page, link[1]); err != nil {
				t.Errorf("%s: %v", page, err)
			}
		}
	}
}

// pageLink matches [text](address) and ![text](address).
var pageLink = regexp.MustCompile(`\]\(([^()\s]+)\)`)

// checkLink looks for the file that a relative link of a page means, and for the heading.
func checkLink(page, link string) error {
	if strings.Contains(link, "://") {
		return nil
	}
	file, heading, _ := strings.Cut(link, "#")
	if file == "" {
		file = page
	} else {
		file = filepath.Join(filepath.Dir(page), file)
	}
	if _, err := os.Stat(file); err != nil {
		return fmt.Errorf("(%s): %w", link, err)
	}
	if heading == "" {
		return nil
	}
	text, err := os.ReadFile(file)
	if err != nil {
		return err
	}
	for line := range strings.Lines(string(text)) {
		if strings.HasPrefix(line, "#") && anchor(line) == heading {
			return nil
		}
	}
	return fmt.Errorf("(%s): %s has no such heading", link, file)
}

// anchor is the name that GitHub gives a heading: lower case, blanks as hyphens, without
// punctuation.
func anchor(heading string) string {
	heading = strings.ToLower(strings.TrimSpace(strings.TrimLeft(heading, "#")))
	return strings.Map(func(r rune) rune {
		switch {
		case r == ' ':
			return '-'
		case r == '-' || r == '_' || unicode.IsLetter(r) || unicode.IsDigit(r):
			return r
		default:
			return -1
		}
	}, heading)
}
