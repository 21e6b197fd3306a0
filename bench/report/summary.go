package main

import (
	"fmt"
	"slices"
	"strings"
)

// The summary is what RESULTS.md starts with: one row for each thing that is compared, with the alternatives that are
// better, worse, and neither, and by how much.

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
			column, said := 4, title(client)+" "+byHowMuch(s, own, t.unit)
			switch {
			case own.clearlyLower(s, t.unit):
				column = 2
			case s.clearlyLower(own, t.unit):
				column = 3
			}
			row[column] = strings.TrimPrefix(row[column]+"; "+said, "; ")
		}
		rows = append(rows, row)
	}
	return rows
}

// clearlyLower is lower or, of what hardly differs from run to run and is measured in few runs, lower by 2% in each.
func (s *sample) clearlyLower(other *sample, unit string) bool {
	if strings.HasPrefix(unit, "B/") || unit == "attempts/call" {
		return slices.Max(s.values()) < 0.98*slices.Min(other.values())
	}
	is, _ := s.lower(other)
	return is
}

// byHowMuch is a ratio to ours, or for what is added to something the figure itself, of which a ratio says nothing
// near zero.
func byHowMuch(s, own *sample, unit string) string {
	if r, ok := s.over(own); ok && !strings.HasPrefix(unit, "added-") {
		return ratio(r)
	}
	return format(s.center(), unit)
}

// summary is empty if nothing of it was measured.
func summary(m *measurements) string {
	rows := summaryRows(m)
	if len(rows) == 1 {
		return ""
	}
	won, lost := 0, 0
	for _, row := range rows[1:] {
		won += alternativesIn(row[2])
		lost += alternativesIn(row[3])
	}
	said := fmt.Sprintf("Of the comparisons below, %d are won, %d are lost, and the rest are too close to call.", won, lost)
	if m.runs < enoughRuns {
		said = fmt.Sprintf("Only %d runs: too few to say who wins in what varies from run to run.", m.runs)
	}
	return "## Summary\n\n" + said + " A ratio compares with ours: above 1× is slower, or more.\n\n" +
		markdownText(rows) + "\n"
}

func alternativesIn(cell string) int {
	return len(slices.DeleteFunc(strings.Split(cell, "; "), func(s string) bool { return s == "" }))
}
