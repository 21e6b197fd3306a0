package main

import (
	"fmt"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
)

// machineLines are what -machine prints.
const machineLines = `date: 2026-11-21 08:00 UTC
cores: 2
go: 1.26.8 linux/amd64
grpc-go: 1.85.0
go-grpc-middleware: 2.3.4
failsafe-go: 0.9.8
grpcretry: 0123456789ab
`

// rawRuns is what so many runs print; line gives the lines of one, from 1.
func rawRuns(runs int, lines func(run int) string) string {
	var b strings.Builder
	b.WriteString(machineLines)
	for run := 1; run <= runs; run++ {
		fmt.Fprintf(&b, "run: %d\nload: 0.%d\ngoos: linux\npkg: bench\ncpu: Abacus 3000\n%sPASS\n", run, run, lines(run))
	}
	return b.String()
}

func result(name string, values string) string { return "Benchmark" + name + "-2 100 " + values + "\n" }

// wholeRun has a bit of every table. Its machine slows down from run to run.
func wholeRun(run int) string {
	ns := func(v float64) string { return strconv.FormatFloat(v*(1+float64(run)/10), 'f', 2, 64) + " ns/op " }
	var b strings.Builder
	for _, info := range []string{"plain", "equal"} {
		prefix := "UnaryInterceptor/info=" + info + "/cores=one/client="
		b.WriteString(result(prefix+"bare", ns(5)+"0 B/op 0 allocs/op"))
		b.WriteString(result(prefix+"middleware", ns(500)+"112 B/op 3 allocs/op"))
		b.WriteString(result(prefix+"failsafe", ns(2000)+"832 B/op 17 allocs/op"))
		b.WriteString(result(prefix+"grpcretry", ns(250)+"384 B/op 1 allocs/op"))
	}
	b.WriteString(result("UnaryRPC/net=tcp/info=plain/cores=one/client=bare", "100000 ns/op 90 allocs/op"))
	for client, over := range map[string]float64{"middleware": 0.12, "grpcretry": 5.02} {
		over += float64(run) / 10
		b.WriteString(result("UnaryRPC/net=tcp/info=plain/cores=one/client="+client,
			fmt.Sprintf("%.2f %%over %.0f added-ns/op 2.01 added-allocs/op %.0f ns/op 92 allocs/op", over, 1000*over, 100000+1000*over)))
	}
	b.WriteString(result("RetryRPC/net=tcp/retries=1/client=builtin", "300000 ns/op 144 allocs/op"))
	b.WriteString(result("RetryRPC/net=tcp/retries=1/client=grpcretry", fmt.Sprintf("%d ns/op 171 allocs/op", 310000+1000*run)))
	b.WriteString(result("RetryInterceptor/retries=1/client=middleware", ns(700)+"9 allocs/op"))
	b.WriteString(result("RetryInterceptor/retries=1/client=grpcretry", ns(1900)+"9 allocs/op"))
	b.WriteString(functionRun(run))
	b.WriteString(result("PingPong/commit=after/client=bare", "19.01 allocs/msg 90000 ns/msg"))
	b.WriteString(result("PingPong/commit=after/client=grpcretry", "19.02 allocs/msg 91000 ns/msg"))
	for _, retries := range []string{"0", "1"} {
		b.WriteString(result("Feature/retries="+retries+"/feature=none", ns(250)+"1 allocs/op"))
		b.WriteString(result("Feature/retries="+retries+"/feature=span", ns(1250)+"6 allocs/op 1500 added-ns/op 5.01 added-allocs/op"))
	}
	b.WriteString(result("BalancerPick/retried=true/cores=one/policy=grpcretry_round_robin", "60 added-ns/op 0.0001 added-allocs/op"))
	b.WriteString(result("WaitingCalls/client=bare", "0 ns/op 4780 B/call 684 heap-B/call 4096 stack-B/call"))
	if run <= 3 { // as the real ones, of which three runs are measured
		b.WriteString(result("WaitingCalls/client=builtin", fmt.Sprintf("0 ns/op %d B/call", 12700+run)))
	}
	b.WriteString(result("WaitingCalls/client=grpcretry", "0 ns/op 10450 B/call 2258 heap-B/call 8192 stack-B/call"))
	for _, commit := range []string{"before", "after"} {
		b.WriteString(result("OpenStreams/commit="+commit+"/client=bare", "0 ns/op 15360 B/stream 10240 heap-B/stream 5120 stack-B/stream"))
		b.WriteString(result("OpenStreams/commit="+commit+"/client=grpcretry", "0 ns/op 17408 B/stream 12288 heap-B/stream 5120 stack-B/stream"))
	}
	b.WriteString(result("Outage/client=builtin+throttling", "31890 attempts 1.000 attempts/call 31890 calls 2553 cpu-ms 77.8 allocs/call"))
	b.WriteString(result("Outage/client=grpcretry", "19514 attempts 1.206 attempts/call 16179 calls 1714 cpu-ms 99.9 allocs/call"))
	return b.String()
}

// functionRun has functions only.
func functionRun(run int) string {
	var b strings.Builder
	for client, ns := range map[string]float64{"direct": 2, "cenkalti": 100, "failsafe+budget": 800, "grpcretry": 200} {
		times := fmt.Sprintf("%.1f ns/op 1 allocs/op", ns*(1+float64(run)/10))
		b.WriteString(result("Function/cores=one/client="+client, times))
		if client != "direct" {
			b.WriteString(result("FunctionRetry/retries=1/client="+client, times))
		}
	}
	return b.String()
}

func read(t *testing.T, raw string) *measurements {
	t.Helper()
	m, err := readFiles([]string{write(t, raw)})
	if err != nil {
		t.Fatal(err)
	}
	return m
}

func write(t *testing.T, content string) string {
	t.Helper()
	name := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(name, []byte(content), 0o644); err != nil {
		t.Fatal(err)
	}
	return name
}

func TestTables(t *testing.T) {
	var out strings.Builder
	if err := run([]string{write(t, rawRuns(10, wholeRun))}, &out); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{
		"From 10 runs on 2026-11-21 08:00 UTC of 0123456789ab, with a load of 0.10 to 0.90 when a run started, on 2 cores.\n\n|  | without |",
		"| a call that succeeds on its first attempt | 100 µs | +5.57 µs (+5.22 µs to +5.92 µs) | +2 |",
		"compared with grpc-go's own retries | 300 µs | +15.5 µs (+12 µs to +19 µs) | +27 |",
		"| a call that waits for its retry, one of 100,000 | 684 B | 2.21 KiB | 4 KiB | 8 KiB |",
		"| an open stream after its first response, one of 10,000 | 10 KiB | 12 KiB | 5 KiB | 5 KiB |",
		"| a call over TCP that succeeds on its first attempt: time added to it | +5.57 µs |  | go-grpc-middleware +670 ns |  |",
		"| a call that waits for its retry: heap and stack | 10.2 KiB | grpc-go built-in 1.22× |  |  |",
		"| the same: the interceptor alone, in a loop | 387 ns | go-grpc-middleware 2.00×; failsafe-go 8.00× |  |  |",
		"| an outage: attempts sent per call | 1.21 |  | grpc-go built-in, with throttling 0.83× |  |",
		"| a function with one retry, without the wait: time | 310 ns | failsafe-go, with budget 4.00× | cenkalti/backoff 0.50× |  |",
		"| a recording span in the caller's context | +1.5 µs | +5 | +1.5 µs | +5 |",
		"| `balancer.DialOption()`, compared with `round_robin` | +60 ns | 0 | – | – |",
	} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("the tables are without\n%s", want)
		}
	}
	if strings.Contains(out.String(), "at a server") {
		t.Error("the bill charges for what was not measured")
	}
	if t.Failed() {
		t.Logf("they are\n%s", out.String())
	}
}

func TestGoals(t *testing.T) {
	goals := goalTable(read(t, rawRuns(10, wholeRun)))
	for _, want := range []string{
		"| unary, succeeds on its first attempt: at most 1 allocation | 1 | met |",
		"at most 1.3 × go-grpc-middleware | 0.5 × (387 ns, 775 ns) | met |",
		"at most 1.5 × go-grpc-middleware | 2.71 × (2.95 µs, 1.09 µs) | **not met** |",
		"| loopback RPC that succeeds: within 1% of no interceptor | +5.6% | **not met** |",
		"| loopback RPC that succeeds: at most 2 more allocations than no interceptor | +2 | met |",
		"| committed stream: no additional allocation per message | +0.01 | met |",
		"under 2 KiB of heap each, beyond no interceptor | +1.54 KiB | met |",
		"the same, with their stacks | +5.54 KiB | **not met** |",
	} {
		if !strings.Contains(goals, want) {
			t.Errorf("the goals are without\n%s", want)
		}
	}
	if t.Failed() {
		t.Logf("they are\n%s", goals)
	}
}

// The design has the goals that are checked, in the same words and order.
func TestDesignHasTheGoals(t *testing.T) {
	var got, want []string
	for line := range strings.Lines(between(t, "../../docs/design.md", "goals")) {
		cells := strings.Split(line, "|")
		if goal := strings.TrimSpace(cells[1]); goal != "target" && !strings.HasPrefix(goal, "---") {
			got = append(got, goal)
		}
	}
	for _, goal := range targets {
		want = append(want, goal.text)
	}
	if !slices.Equal(got, want) {
		t.Errorf("docs/design.md has the goals\n%q\nchecked are\n%q", got, want)
	}
}

// between returns what is between the marks of a page.
func between(t *testing.T, page, name string) string {
	t.Helper()
	text, err := os.ReadFile(page)
	if err != nil {
		t.Fatal(err)
	}
	_, rest, found := strings.Cut(string(text), "<!-- "+name+" -->\n")
	inside, _, ended := strings.Cut(rest, "<!-- end of "+name+" -->")
	if !found || !ended || inside == "" {
		t.Fatalf("%s has nothing marked %q", page, name)
	}
	return inside
}

// TestRatiosAreOfTheSameRun has a machine whose mood changes by more than what is compared.
func TestRatiosAreOfTheSameRun(t *testing.T) {
	m := read(t, rawRuns(5, func(run int) string {
		slow := float64(run * run)
		return result("RetryInterceptor/retries=1/client=middleware", fmt.Sprintf("%.1f ns/op", 110*slow)) +
			result("RetryInterceptor/retries=1/client=grpcretry", fmt.Sprintf("%.1f ns/op", 100*slow))
	}))
	s := m.find("RetryInterceptor", "retries=1/client=middleware", "sec/op")
	if got := s.over(m.find("RetryInterceptor", "retries=1/client=grpcretry", "sec/op")); math.Abs(got-1.1) > 1e-6 {
		t.Errorf("the ratio is %v, want 1.1", got)
	}
}

// TestBetterIsWhatNearlyEveryRunSays has an alternative a hundredth faster in so many of ten runs, on
// a machine that slows down to a tenth meanwhile.
func TestBetterIsWhatNearlyEveryRunSays(t *testing.T) {
	for faster, column := range map[int]int{10: 3, 9: 3, 8: 4, 5: 4, 2: 4, 1: 2, 0: 2} {
		rows := summaryRows(read(t, rawRuns(10, func(run int) string {
			slow, alternative := float64(run), 101.0
			if run <= faster {
				alternative = 99
			}
			return result("RetryInterceptor/retries=1/client=middleware", fmt.Sprintf("%.1f ns/op", alternative*slow)) +
				result("RetryInterceptor/retries=1/client=grpcretry", fmt.Sprintf("%.1f ns/op", 100*slow))
		})))
		if len(rows) != 2 || rows[1][column] == "" {
			t.Errorf("an alternative that is faster in %d of 10 runs: %q, want it in column %d", faster, rows, column)
		}
	}
}

func TestChart(t *testing.T) {
	chart := drawChart(read(t, rawRuns(4, wholeRun)))
	for _, want := range []string{"What each way to retry costs", ">go-grpc-middleware<", ">grpcretry<", ">312 ns<",
		"medians of 4 runs · Abacus 3000, 2 cores"} {
		if !strings.Contains(chart, want) {
			t.Errorf("the chart is without %q", want)
		}
	}
}

func TestFormat(t *testing.T) {
	for _, c := range []struct {
		value float64
		unit  string
		want  string
	}{
		{3.2e-9, "sec/op", "3.2 ns"},
		{206.4e-9, "sec/op", "206 ns"},
		{999.6e-9, "sec/op", "1 µs"},
		{684, "heap-B/call", "684 B"},
		{4096, "stack-B/call", "4 KiB"},
		{10450, "B/call", "10.2 KiB"},
		{1714, "cpu-ms", "1.71 s"},
		{152, "cpu-ms", "152 ms"},
		{17, "allocs/op", "17"},
		{7.106, "allocs/msg", "7.11"},
		{31818, "attempts", "31,818"},
		{1234567, "attempts", "1,234,567"},
		{0, "allocs/op", "0"},
		{-0.0001, "added-allocs/op", "0"},
		{-0.26, "added-allocs/op", "−0.3"},
		{2.62e-6, "added-sec/op", "+2.62 µs"},
		{-40e-9, "added-sec/op", "−40 ns"},
		{5.27, "%over", "+5.3%"},
		{-0.43, "%over", "−0.4%"},
	} {
		if got := format(c.value, c.unit); got != c.want {
			t.Errorf("format(%v, %q) = %q, want %q", c.value, c.unit, got, c.want)
		}
	}
}

func TestRunWritesWhatItIsTold(t *testing.T) {
	raw, chart := write(t, rawRuns(4, wholeRun)), filepath.Join(t.TempDir(), "chart.svg")
	marked := func(names ...string) (page string) {
		for _, name := range names {
			page += "<!-- " + name + " -->\nold\n<!-- end of " + name + " -->\n"
		}
		return page + "after\n"
	}
	goals, page := write(t, marked("goals")), write(t, marked("bill", "summary", "memory", "features"))
	var out strings.Builder
	if err := run([]string{"-chart", chart, "-page", page, "-goals", goals, raw}, &out); err != nil || out.Len() > 0 {
		t.Fatalf("run = %v, printed %q; want nothing", err, out.String())
	}
	for file, want := range map[string]string{chart: "<svg", page: "| a recording span", goals: "| target |"} {
		if got, err := os.ReadFile(file); err != nil || !strings.Contains(string(got), want) || strings.Contains(string(got), "\nold\n") {
			t.Errorf("%s has no %q: %v", file, want, err)
		}
	}
}

// The page has all marks, so that make bench can write it.
func TestThePageHasTheMarks(t *testing.T) {
	for _, b := range blocks {
		between(t, "../../docs/performance.md", b.mark)
	}
}
