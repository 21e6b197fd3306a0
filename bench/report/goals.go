package main

import (
	"fmt"

	"github.com/grpcretry/grpcretry/bench/internal/pages"
)

// A target is one of the goals of docs/design.md, which has them in the same words and order.
type target struct {
	text string
	// judge says what was measured, and whether that is as wanted.
	judge func(*measurements) (measured string, met, known bool)
}

var targets = []target{
	{"unary, succeeds on its first attempt: at most 1 allocation",
		atMost("UnaryInterceptor", "info=plain/cores=one/client="+ours, "allocs/op", 1)},
	{"unary, succeeds on its first attempt: at most 1.3 × the limit, which is one record (context, mark and outputs), the clock and an atomic",
		ratioAtMost("Limit", "client=", "limit", "sec/op", 1.3)},
	{"unary, succeeds on its first attempt, header and trailer to the caller: at most 1.3 × go-grpc-middleware",
		ratioAtMost("UnaryInterceptor", "info=equal/cores=one/client=", "middleware", "sec/op", 1.3)},
	{"unary, one retry without the wait: at most 1.5 × go-grpc-middleware",
		ratioAtMost("RetryInterceptor", "retries=1/client=", "middleware", "sec/op", 1.5)},
	{"unary, one retry: no more allocations than go-grpc-middleware",
		ratioAtMost("RetryInterceptor", "retries=1/client=", "middleware", "allocs/op", 1)},
	{"unary, one retry without the wait: at most 0.8 × failsafe-go",
		ratioAtMost("RetryInterceptor", "retries=1/client=", "failsafe", "sec/op", 0.8)},
	{"loopback RPC that succeeds: within 1% of no interceptor",
		withLimit(atMost("UnaryRPC", wholeCall+ours, "%over", 1))},
	{"loopback RPC that succeeds: at most 2 more allocations than no interceptor",
		atMost("UnaryRPC", wholeCall+ours, "added-allocs/op", 2.05)},
	{"new stream with one message: within 10% of no interceptor",
		atMost("PingPong", "commit=before/client="+ours, "%over", 10)},
	{"new stream with one message: at most 8 more allocations than no interceptor",
		moreAtMost("PingPong", "commit=before/client="+ours, "commit=before/client="+bare, "allocs/msg", 8.05)},
	{"committed stream: no additional allocation per message",
		moreAtMost("PingPong", "commit=after/client="+ours, "commit=after/client="+bare, "allocs/msg", 0.05)},
	{"budget, Deposit: no allocation", atMost("Budget", "op=Deposit/goroutines=1", "allocs/op", 0)},
	{"budget, Withdraw: no allocation", atMost("Budget", "op=Withdraw/goroutines=1", "allocs/op", 0)},
	{"budget, Deposit scales: with 2 goroutines at most 0.6 × the time per operation", depositScales},
	{"100,000 calls in backoff: under 2 KiB of heap each, beyond no interceptor",
		moreAtMost("WaitingCalls", "client="+ours, "client="+bare, "heap-B/call", 2048)},
	{"100,000 calls in backoff: the same, with their stacks",
		moreAtMost("WaitingCalls", "client="+ours, "client="+bare, "B/call", 2048)},
}

func atMost(benchmark, key, unit string, limit float64) func(*measurements) (string, bool, bool) {
	return func(m *measurements) (string, bool, bool) {
		s := m.find(benchmark, key, unit)
		if s == nil {
			return "", false, false
		}
		return format(s.center(), unit), s.center() <= limit, true
	}
}

// withLimit adds what the limit adds to a call over TCP.
func withLimit(judge func(*measurements) (string, bool, bool)) func(*measurements) (string, bool, bool) {
	return func(m *measurements) (string, bool, bool) {
		measured, met, known := judge(m)
		if s := m.find("UnaryRPC", wholeCall+"limit", "%over"); s != nil {
			measured += fmt.Sprintf(" (the limit: %s)", format(s.center(), "%over"))
		}
		return measured, met, known
	}
}

// ratioAtMost is of ours to the client's.
func ratioAtMost(benchmark, prefix, client, unit string, limit float64) func(*measurements) (string, bool, bool) {
	return func(m *measurements) (string, bool, bool) {
		s, other := m.find(benchmark, prefix+ours, unit), m.find(benchmark, prefix+client, unit)
		if s == nil || other == nil {
			return "", false, false
		}
		r := s.over(other)
		return fmt.Sprintf("%.3g × (%s, %s)", r, format(s.center(), unit), format(other.center(), unit)), r <= limit, true
	}
}

func moreAtMost(benchmark, key, below, unit string, limit float64) func(*measurements) (string, bool, bool) {
	return func(m *measurements) (string, bool, bool) {
		s, other := m.find(benchmark, key, unit), m.find(benchmark, below, unit)
		if s == nil || other == nil {
			return "", false, false
		}
		more := s.center() - other.center()
		return signed(more, unit), more <= limit, true
	}
}

func depositScales(m *measurements) (string, bool, bool) {
	const prefix = "op=Deposit/goroutines="
	one, two := m.find("Budget", prefix+"1", "sec/op"), m.find("Budget", prefix+"2", "sec/op")
	if one == nil || two == nil {
		return "", false, false
	}
	r := two.over(one)
	return fmt.Sprintf("%.2f × (%s, %s)", r, format(two.center(), "sec/op"), format(one.center(), "sec/op")), r <= 0.6, true
}

func goalTable(m *measurements) string {
	rows := [][]string{{"target", "measured", ""}}
	for _, t := range targets {
		measured, met, known := t.judge(m)
		verdict := ""
		switch {
		case !known:
			measured = "not measured"
		case met:
			verdict = "met"
		default:
			verdict = "**not met**"
		}
		rows = append(rows, []string{t.text, measured, verdict})
	}
	return pages.Table(rows, len(rows[0]))
}
