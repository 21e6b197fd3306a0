package main

import (
	"fmt"
	"slices"
	"strings"
)

// The bill is what docs/performance.md starts with: what ours adds, and to what.

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
	cell := signed(took.center(), "sec/op")
	if low, high, known := took.interval(); known {
		cell += fmt.Sprintf(" (%s to %s)", signed(low, "sec/op"), signed(high, "sec/op"))
	}
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
	s := &sample{byRun: map[int]float64{}}
	if own == nil || other == nil {
		return s
	}
	for run, v := range own.byRun {
		if o, both := other.byRun[run]; both {
			s.byRun[run] = v - o
		}
	}
	return s
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
				row = append(row, m.plainCell(h.benchmark, h.prefix+client, unit))
			}
		}
		if measured([][]string{row}) {
			rows = append(rows, row)
		}
	}
	return rows
}

// bill is the bill as the page shows it.
func bill(m *measurements) string {
	return m.provenance() + "\n\n" + markdown(billRows(m))
}

// memoryBill is nothing but its table: it comes from the same runs as the bill.
func memoryBill(m *measurements) string { return markdown(memoryRows(m)) }

// The bill's other half is what it buys: the calls that survive a restart, which docs/restart.md has.

// rescued are the clients whose fate the bill shows, as docs/restart.md calls them.
var rescued = []string{"none", "grpc-go built-in", "grpcretry"}

// restartRows takes from docs/restart.md how many calls of a steady load fail while a single server restarts.
func restartRows(page string) ([][]string, error) {
	_, text, found := strings.Cut(page, "<!-- steady single -->")
	text, _, ended := strings.Cut(text, "<!-- end of steady single -->")
	if !found || !ended {
		return nil, fmt.Errorf("the page on restarts has no table of a steady load on a single server")
	}
	rows := [][]string{{"the server is away for", "succeed without retries", "with " + rescued[1], "with " + rescued[2]}}
	for line := range strings.Lines(text) {
		cells := strings.Split(strings.Trim(strings.TrimSpace(line), "|"), "|")
		if len(cells) < 4 {
			continue
		}
		for i := range cells {
			cells[i] = strings.TrimSpace(cells[i])
		}
		away, client, calls, succeeded := cells[0], cells[1], cells[2], cells[3]
		i := slices.Index(rescued, client)
		switch {
		case i < 0:
		case i == 0:
			rows = append(rows, []string{away, succeeded + " of " + calls})
		case rows[len(rows)-1][0] != away:
			return nil, fmt.Errorf("%s of %s has no row without retries before it", client, away)
		default:
			rows[len(rows)-1] = append(rows[len(rows)-1], succeeded+" of "+calls)
		}
	}
	for _, row := range rows {
		if len(row) != 1+len(rescued) {
			return nil, fmt.Errorf("row %q lacks a client", row)
		}
	}
	if len(rows) == 1 {
		return nil, fmt.Errorf("the page on restarts shows no client")
	}
	return rows, nil
}
