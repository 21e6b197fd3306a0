package main

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"strings"

	"github.com/grpcretry/grpcretry/bench/internal/pages"
)

// This file makes the tables of docs/performance.md. benchstat has all others.

// blocks are the parts of the page that are written here, by their marks. A block of which nothing was measured
// stays as it is.
var blocks = []struct {
	mark string
	rows func(*measurements) [][]string
	left int // columns of words
}{
	{"bill", billRows, 1},
	{"summary", summaryRows, 5},
	{"memory", memoryRows, 1},
	{"features", featureRows, 1},
}

// text returns the contents of a block. The first begins with what everything was measured on.
func (m *measurements) text(mark string, rows [][]string, left int) string {
	table := pages.Table(rows, left)
	if mark == "bill" {
		return m.provenance() + "\n\n" + table
	}
	return table
}

// our name among the clients, and that of the lack of any retries.
const (
	ours   = "grpcretry"
	bare   = "bare"
	direct = "direct" // a function that is called without any library
)

// titles are what the tables call the clients.
var titles = map[string]string{
	bare:                 "no interceptor",
	"limit":              "the limit",
	"builtin":            "grpc-go built-in",
	"middleware":         "go-grpc-middleware",
	"failsafe":           "failsafe-go",
	ours:                 "**grpcretry**",
	"builtin+throttling": "grpc-go built-in, with throttling",
	"failsafe+budget":    "failsafe-go, with budget",
	direct:               "no retries",
	"cenkalti":           "cenkalti/backoff",
	"sethvargo":          "sethvargo/go-retry",
	"avast":              "avast/retry-go",
	"avast+throttle":     "avast/retry-go, with throttle",
}

func title(client string) string {
	if t, ok := titles[client]; ok {
		return t
	}
	return client
}

// inOrder puts clients into the order of the registry.
func inOrder(clients []string) []string {
	order := []string{
		bare, direct, "limit", "builtin", "builtin+throttling", "middleware",
		"cenkalti", "sethvargo", "avast", "avast+throttle", "failsafe", "failsafe+budget", ours,
	}
	slices.SortStableFunc(clients, func(a, b string) int { return slices.Index(order, a) - slices.Index(order, b) })
	return clients
}

// provenance says how often, when, of which commit and on how busy a machine something was measured.
func (m *measurements) provenance() string {
	said := fmt.Sprintf("From %d runs", m.runs)
	if m.runs == 1 {
		said = "From one run"
	}
	if date := m.machine["date"]; date != "" {
		said += " on " + date
	}
	if revision := m.machine["grpcretry"]; revision != "" {
		said += " of " + revision
	}
	if len(m.loads) > 0 {
		said += fmt.Sprintf(", with a load of %s when a run started, on %s cores",
			fmt.Sprintf("%.2f to %.2f", slices.Min(m.loads), slices.Max(m.loads)), m.machine["cores"])
	}
	return said + "."
}

// wholeCall is the call that the bill, the summary and the targets are about: a program that makes one call after
// the other, over loopback TCP, through a generated stub.
const wholeCall = "net=tcp/info=plain/cores=one/client="

// A charge is one line of the bill: what ours adds to the time and the allocations of something.
type charge struct {
	what      string
	benchmark string
	prefix    string // of the key, before the client
	client    string // what ours adds to; "" for bare
}

var charges = []charge{
	{"a call that succeeds on its first attempt", "UnaryRPC", wholeCall, ""},
	{"the same, if the caller asks for header and trailer", "UnaryRPC", "net=tcp/info=equal/cores=one/client=", ""},
	{"a call with one retry, without the wait, compared with grpc-go's own retries", "RetryRPC", "net=tcp/retries=1/client=", "builtin"},
	{"a new stream with one message and its response", "PingPong", "commit=before/client=", ""},
	{"one more message and its response on a committed stream", "PingPong", "commit=after/client=", ""},
	{"a request at a server with our interceptor: the interceptor alone", "ServerInterceptor", "client=", ""},
}

func billRows(m *measurements) [][]string {
	rows := [][]string{{"", "without", "added", "allocations added"}}
	for _, c := range charges {
		if row := c.row(m); row != nil {
			rows = append(rows, row)
		}
	}
	return rows
}

// row is nil if the charge was not measured.
func (c *charge) row(m *measurements) []string {
	than := c.client
	if than == "" {
		than = bare
	}
	without := m.find(c.benchmark, c.prefix+than, "sec/op")
	if without == nil || m.find(c.benchmark, c.prefix+ours, "sec/op") == nil {
		return nil
	}
	took := m.added(c.benchmark, c.prefix, than, "sec/op")
	show := func(v float64) string { return signed(v, "sec/op") }
	cell := show(took.center()) + took.interval(show)
	allocs := m.added(c.benchmark, c.prefix, than, "allocs/op").center()
	return []string{c.what, format(without.center(), "sec/op"), cell, format(allocs, "added-allocs/op")}
}

// added is what ours adds to a client, run by run: as the benchmark has it from round to round or, for a client that
// is not its reference, the difference.
func (m *measurements) added(benchmark, prefix, client, unit string) *sample {
	if client == bare {
		if s := m.find(benchmark, prefix+ours, "added-"+unit); s != nil {
			return s
		}
	}
	own, other := m.find(benchmark, prefix+ours, unit), m.find(benchmark, prefix+client, unit)
	if own == nil || other == nil {
		return &sample{}
	}
	return own.minus(other)
}

// A holding is one line of the bill for memory.
type holding struct {
	what      string
	benchmark string
	prefix    string
	of        string // call or stream, in the units
}

var holdings = []holding{
	{"a call that waits for its retry, one of 100,000", "WaitingCalls", "client=", "call"},
	{"an open stream that can be retried, with a message of 4 kB, one of 10,000", "OpenStreams", "commit=before/client=", "stream"},
	{"an open stream after its first response, one of 10,000", "OpenStreams", "commit=after/client=", "stream"},
}

func memoryRows(m *measurements) [][]string {
	rows := [][]string{{"", "heap without", "heap", "stack without", "stack"}}
	for _, h := range holdings {
		row := []string{h.what}
		for _, unit := range []string{"heap-B/" + h.of, "stack-B/" + h.of} {
			for _, client := range []string{bare, ours} {
				if s := m.find(h.benchmark, h.prefix+client, unit); s != nil {
					row = append(row, format(s.center(), unit))
				}
			}
		}
		if len(row) == len(rows[0]) {
			rows = append(rows, row)
		}
	}
	return rows
}

// The summary has a row for each thing that is compared, with the alternatives that are better, worse and
// neither, and by how much.
type topic struct {
	what      string
	benchmark string
	prefix    string // of the key, before the client
	unit      string
}

var topics = []topic{
	{"a call over TCP that succeeds on its first attempt: time added to it", "UnaryRPC", wholeCall, "added-sec/op"},
	{"the same: allocations added to it", "UnaryRPC", wholeCall, "added-allocs/op"},
	{"the same: the interceptor alone, in a loop", "UnaryInterceptor", "info=plain/cores=one/client=", "sec/op"},
	{"one retry over TCP, without the wait: time", "RetryRPC", "net=tcp/retries=1/client=", "sec/op"},
	{"the same: the interceptor alone, in a loop", "RetryInterceptor", "retries=1/client=", "sec/op"},
	{"a new stream with one message: time", "PingPong", "commit=before/client=", "sec/op"},
	{"a message on a committed stream: time", "PingPong", "commit=after/client=", "sec/op"},
	{"a call that waits for its retry: heap and stack", "WaitingCalls", "client=", "B/call"},
	{"an open stream that can be retried: heap and stack", "OpenStreams", "commit=before/client=", "B/stream"},
	{"an outage: attempts sent per call", "Outage", "client=", "attempts/call"},
	{"a function that succeeds on its first attempt: time", "Function", "cores=one/client=", "sec/op"},
	{"a function with one retry, without the wait: time", "FunctionRetry", "retries=1/client=", "sec/op"},
}

func summaryRows(m *measurements) [][]string {
	rows := [][]string{{"", "**grpcretry**", "we win against", "we lose to", "no clear difference"}}
	for _, t := range topics {
		own := m.find(t.benchmark, t.prefix+ours, t.unit)
		if own == nil {
			continue
		}
		row := []string{t.what, format(own.center(), t.unit), "", "", ""}
		for _, client := range inOrder(m.values(t.benchmark, "client")) {
			s := m.find(t.benchmark, t.prefix+client, t.unit)
			if s == nil || client == ours || client == bare || client == direct {
				continue
			}
			column := 4
			switch s.compare(own, t.unit) {
			case 1:
				column = 2
			case -1:
				column = 3
			}
			said := title(client) + " " + byHowMuch(s, own, t.unit)
			row[column] = strings.TrimPrefix(row[column]+"; "+said, "; ")
		}
		rows = append(rows, row)
	}
	return rows
}

// compare returns -1 if s is clearly lower than ours, 1 if it is clearly higher, and 0 otherwise: by a sign test
// of the runs, in each of which both were measured beside each other, or of what hardly varies and is measured in
// few runs, by 2% in each.
func (s *sample) compare(own *sample, unit string) int {
	if strings.HasPrefix(unit, "B/") || unit == "attempts/call" {
		theirs, ourOwn := s.values(), own.values()
		switch {
		case slices.Max(theirs) < 0.98*slices.Min(ourOwn):
			return -1
		case slices.Max(ourOwn) < 0.98*slices.Min(theirs):
			return 1
		}
		return 0
	}
	lower, higher := 0, 0
	for _, d := range s.minus(own).byRun {
		switch {
		case d < 0:
			lower++
		case d > 0:
			higher++
		}
	}
	if signTest(lower, higher) >= 0.05 {
		return 0
	}
	return cmp.Compare(higher, lower)
}

// signTest returns how likely tosses of a coin are to be at least as uneven as that.
func signTest(a, b int) float64 {
	p, ways := 0.0, 1.0
	for k := range min(a, b) + 1 {
		p += ways
		ways *= float64(a+b-k) / float64(k+1)
	}
	return min(1, 2*p/math.Exp2(float64(a+b)))
}

// byHowMuch is a ratio to ours, or for what is added to something the figure itself, of which a ratio says nothing
// near zero.
func byHowMuch(s, own *sample, unit string) string {
	if strings.HasPrefix(unit, "added-") {
		return format(s.center(), unit)
	}
	return ratio(s.over(own))
}

// featureWords are in the order of the table.
var featureWords = [][2]string{
	{"span", "a recording span in the caller's context"},
	{"callspan", "`WithCallSpan`"},
	{"metrics", "`WithMeterProvider`"},
	{"observer", "`WithObserver`"},
	{"logger", "`WithLogger`, level info"},
	{"page", "the debug page"},
	{"hedging", "`WithHedging`, not due"},
	{"together", "all of these together"},
	{"method", "`WithMethod` for the method's service"},
	{"chained", "the interceptor chained without `DialOptions`, so that it looks for gRPC's own retries"},
}

func featureRows(m *measurements) [][]string {
	rows := [][]string{{"", "first attempt succeeds", "allocations", "one retry", "allocations"}}
	if !m.has("Feature") {
		return rows
	}
	for _, f := range featureWords {
		row := []string{f[1]}
		for _, retries := range []string{"0", "1"} {
			row = append(row, m.addedCells("Feature", "retries="+retries+"/feature="+f[0])...)
		}
		rows = append(rows, row)
	}
	if row := m.addedCells("BalancerPick", "retried=true/cores=one/policy=grpcretry_round_robin"); row[0] != "–" {
		rows = append(rows, []string{"`balancer.DialOption()`, compared with `round_robin`", row[0], row[1], "–", "–"})
	}
	return rows
}

// addedCells are the time and the allocations that something adds to its reference.
func (m *measurements) addedCells(benchmark, key string) []string {
	took, allocs := m.find(benchmark, key, "added-sec/op"), m.find(benchmark, key, "added-allocs/op")
	if took == nil || allocs == nil {
		return []string{"–", "–"}
	}
	return []string{format(took.center(), "added-sec/op"), format(allocs.center(), "added-allocs/op")}
}
