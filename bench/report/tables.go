package main

import (
	"fmt"
	"slices"
	"strings"
)

// our name among the clients, and that of the lack of any retries.
const (
	ours   = "grpcretry"
	bare   = "bare"
	direct = "direct" // a function that is called without any library
)

// titles are what the tables call the clients.
var titles = map[string]string{
	bare:                 "no interceptor",
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

// inOrder puts clients into the order of the registry, whatever order they ran in.
func inOrder(clients []string) []string {
	order := []string{
		bare, direct, "builtin", "builtin+throttling", "middleware",
		"cenkalti", "sethvargo", "avast", "avast+throttle", "failsafe", "failsafe+budget", ours,
	}
	slices.SortStableFunc(clients, func(a, b string) int { return slices.Index(order, a) - slices.Index(order, b) })
	return clients
}

// A section is one table of the report, and what is said about it.
type section struct {
	title string
	text  string
	table func(*measurements) table
}

// A table, and the cases in which an alternative is better than ours.
type table struct {
	rows   [][]string
	better []string

	compared bool // with alternatives
}

var sections = []section{
	{"A unary call that succeeds on its first attempt: the interceptor alone",
		"gRPC is replaced by a function that does nothing; with header and trailer, it returns both, because each client asks for them.",
		cases([]string{"UnaryInterceptor"}, "sec/op", "allocs/op")},
	{"A unary call that succeeds on its first attempt: the whole call",
		"128 bytes in each direction. Over TCP the server is a process of its own, so the allocations are the client's alone; over bufconn they are those of both sides.",
		cases([]string{"UnaryRPC"}, "sec/op", "allocs/op")},
	{"A unary call that succeeds on its first attempt: overhead",
		"The same calls: how much longer a turn of a few milliseconds took than the turns next to it on a connection without an interceptor, which is the more precise comparison. " +
			"In brackets: the 95% confidence interval of the runs.",
		overhead},
	{"Retries without waits: the interceptor alone",
		"gRPC is replaced by a function that fails once, or three times, and then succeeds.",
		cases([]string{"RetryInterceptor"}, "sec/op", "allocs/op")},
	{"Retries without waits: the whole call",
		"The server fails once, or three times, with UNAVAILABLE. grpc-go's built-in retries wait a nanosecond, the least that a service config allows.",
		cases([]string{"RetryRPC"}, "sec/op", "allocs/op")},
	{"Streams, per message",
		"Over TCP. A server stream of 1000 messages; a client stream of 100, all kept for replay until the response; ping-pong on a new stream each time, " +
			"which one message commits, and on one long stream after that. go-grpc-middleware rejects all streams but server streams; failsafe-go does not retry streams.",
		cases([]string{"ServerStream", "ClientStream", "PingPong"}, "sec/msg", "allocs/msg")},
	functions,
	{"What each of our features adds",
		"Time and allocations added to the interceptor alone, as above. The calls never reach gRPC, and the balancer only picks.",
		func(m *measurements) table { return table{rows: featureRows(m)} }},
	{"Budgets",
		"One Deposit, as for every call, and one Withdraw, as for every retry, with the given number of goroutines doing so concurrently: time per operation.",
		func(m *measurements) table { return table{rows: budgetRows(m)} }},
	{"Memory: calls that wait in backoff",
		"100,000 calls; memory per call. Without an interceptor: a goroutine that only waits.",
		clients("WaitingCalls", "", "heap-B/call", "stack-B/call", "B/call")},
	{"Memory: open streams that can be retried",
		"10,000 streams, each of which has sent a message of 4 kB and has received nothing; memory per stream. gRPC itself keeps the message, too, whatever is installed.",
		clients("OpenStreams", "commit=before/", "heap-B/stream", "stack-B/stream", "B/stream")},
	{"Memory: open streams after their first response",
		"The same streams, each of which has received the response to its message. Now nothing is kept for replay.",
		clients("OpenStreams", "commit=after/", "heap-B/stream", "stack-B/stream", "B/stream")},
	{"An outage",
		"For 5 seconds the server fails everything that 64 goroutines send. Each makes up to 100 calls a second: " +
			"a goroutine that is busy with retries makes fewer. So compare processor time together with the number of calls. failsafe-go with its budget also waits between attempts.",
		clients("Outage", "", "calls", "attempts", "attempts/call", "cpu-ms", "allocs/call")},
}

// cases makes a table with a row for each case and a column for each client. A cell has
// the time, its ratio to ours, and the allocations.
func cases(benchmarks []string, time, allocs string) func(*measurements) table {
	return func(m *measurements) table {
		var columns []string
		for _, benchmark := range benchmarks {
			for _, client := range m.values(benchmark, "client") {
				if !slices.Contains(columns, client) {
					columns = append(columns, client)
				}
			}
		}
		columns = inOrder(columns)
		t := table{rows: [][]string{{""}}}
		for _, client := range columns {
			t.rows[0] = append(t.rows[0], title(client))
		}
		for _, benchmark := range benchmarks {
			for _, c := range m.casesOf(benchmark) {
				t.add(m, c, columns, time, allocs)
			}
		}
		return t
	}
}

// A benchCase is a benchmark and what it is about, but for the client.
type benchCase struct{ benchmark, key string }

func (c benchCase) of(client string) string {
	return strings.TrimPrefix(c.key+"/client="+client, "/")
}

func (m *measurements) casesOf(benchmark string) []benchCase {
	var found []benchCase
	for _, k := range m.order {
		rest, _, ok := strings.Cut(k.key, "client=")
		c := benchCase{benchmark, strings.TrimSuffix(rest, "/")}
		if ok && k.benchmark == benchmark && !slices.Contains(found, c) {
			found = append(found, c)
		}
	}
	return found
}

func (t *table) add(m *measurements, c benchCase, columns []string, time, allocs string) {
	row := []string{c.words()}
	for _, client := range columns {
		row = append(row, m.cell(c, client, time, allocs))
		t.compare(m, c.benchmark, c.of(client), c.of(ours), client, c.words(), time, allocs)
	}
	t.rows = append(t.rows, row)
}

// cell is "206 ns ± 2%, 0.53×, 3 allocs".
func (m *measurements) cell(c benchCase, client, time, allocs string) string {
	s := m.find(c.benchmark, c.of(client), time)
	if s == nil {
		return "–"
	}
	center, spread := s.median()
	cell := format(center, time)
	if spread > 0 {
		cell += " ± " + percent(spread)
	}
	if own := m.find(c.benchmark, c.of(ours), time); own != nil && client != ours {
		if r, ok := s.over(own); ok {
			cell += ", " + ratio(r)
		}
	}
	if a := m.find(c.benchmark, c.of(client), allocs); a != nil {
		cell += "<br>" + allocations(a.center())
	}
	return cell
}

// compare notes where an alternative is better than ours. To do nothing is not to be an alternative.
func (t *table) compare(m *measurements, benchmark, key, ourKey, client, words string, units ...string) {
	if client == ours || client == bare || client == direct {
		return
	}
	for _, unit := range units {
		s, own := m.find(benchmark, key, unit), m.find(benchmark, ourKey, unit)
		if s == nil || own == nil {
			continue
		}
		t.compared = true
		if is, p := s.lower(own); is {
			t.better = append(t.better, fmt.Sprintf("%s, %s: %s with %s, %s with ours (%s)", unitWords[unit], words,
				format(s.center(), unit), title(client), format(own.center(), unit), sure(p)))
		}
	}
}

// sure says how sure a comparison is; p is 0 of numbers that are the same in every run.
func sure(p float64) string {
	if p == 0 {
		return "in every run"
	}
	return fmt.Sprintf("p = %.2g", p)
}

var unitWords = map[string]string{
	"sec/op": "time", "sec/msg": "time", "allocs/op": "allocations", "allocs/msg": "allocations",
	"%over": "overhead", "heap-B/call": "heap", "stack-B/call": "stack", "B/call": "heap and stack",
	"heap-B/stream": "heap", "stack-B/stream": "stack", "B/stream": "heap and stack",
	"calls": "calls", "attempts": "attempts sent", "attempts/call": "attempts per call",
	"cpu-ms": "processor time", "allocs/call": "allocations per call",
}

// words turns net=tcp/info=equal/cores=one into what a reader wants to know.
func (c benchCase) words() string {
	words := map[string]string{
		"net=bufconn": "bufconn", "net=tcp": "TCP",
		"info=plain": "", "info=equal": "header and trailer",
		"cores=one": "one core", "cores=all": "all cores",
		"retries=1": "one retry", "retries=3": "three retries",
		"commit=before": "ping-pong on a new stream", "commit=after": "ping-pong after commit",
	}
	var said []string
	if c.benchmark == "Function" {
		said = append(said, "first attempt succeeds")
	}
	for part := range strings.SplitSeq(c.key, "/") {
		if word, known := words[part]; !known {
			said = append(said, part)
		} else if word != "" {
			said = append(said, word)
		}
	}
	if c.key == "" {
		return map[string]string{"ServerStream": "server stream", "ClientStream": "client stream"}[c.benchmark]
	}
	return strings.Join(said, ", ")
}

// overhead makes a table of what each adds to a call without interceptor, in percent.
func overhead(m *measurements) table {
	columns := slices.DeleteFunc(inOrder(m.values("UnaryRPC", "client")), func(c string) bool { return c == bare })
	t := table{rows: [][]string{{""}}}
	for _, client := range columns {
		t.rows[0] = append(t.rows[0], title(client))
	}
	for _, c := range m.casesOf("UnaryRPC") {
		row := []string{c.words()}
		for _, client := range columns {
			row = append(row, m.overheadCell(c.of(client)))
			t.compare(m, c.benchmark, c.of(client), c.of(ours), client, c.words(), "%over")
		}
		t.rows = append(t.rows, row)
	}
	return t
}

func (m *measurements) overheadCell(key string) string {
	s := m.find("UnaryRPC", key, "%over")
	if s == nil {
		return "–"
	}
	cell := format(s.center(), "%over")
	if low, high, known := s.interval(); known {
		cell += fmt.Sprintf(" (%s to %s)", format(low, "%over"), format(high, "%over"))
	}
	return cell
}

// clients makes a table with a row for each client and a column for each unit.
func clients(benchmark, prefix string, units ...string) func(*measurements) table {
	return func(m *measurements) table {
		head := []string{""}
		for _, unit := range units {
			head = append(head, unitWords[unit])
		}
		t := table{rows: [][]string{head}}
		for _, client := range inOrder(m.values(benchmark, "client")) {
			key, row := prefix+"client="+client, []string{title(client)}
			for _, unit := range units {
				row = append(row, m.plainCell(benchmark, key, unit))
				if unit != "calls" && unit != "attempts" { // of these, fewer is not better
					t.compare(m, benchmark, key, prefix+"client="+ours, client, "as above", unit)
				}
			}
			t.rows = append(t.rows, row)
		}
		return t
	}
}

func (m *measurements) plainCell(benchmark, key, unit string) string {
	s := m.find(benchmark, key, unit)
	if s == nil {
		return "–"
	}
	center, spread := s.median()
	if spread >= 0.01 {
		return format(center, unit) + " ± " + percent(spread)
	}
	return format(center, unit)
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
}

func featureRows(m *measurements) [][]string {
	rows := [][]string{{"", "first attempt succeeds", "allocations", "one retry", "allocations"}}
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

func signed(v float64, unit string) string {
	if v < 0 {
		return "−" + format(-v, unit)
	}
	return "+" + format(v, unit)
}

// featureTable is what docs/performance.md has of it.
func featureTable(m *measurements) string { return markdown(featureRows(m)) }

func budgetRows(m *measurements) [][]string {
	goroutines := m.values("Budget", "goroutines")
	rows := [][]string{slices.Concat([]string{"goroutines"}, goroutines, []string{"allocs"})}
	for _, op := range m.values("Budget", "op") {
		for _, kind := range m.values("Budget", "budget") {
			row, key := []string{op + ", " + kind}, "op="+op+"/budget="+kind+"/goroutines="
			allocs := 0.0
			for _, n := range goroutines {
				row = append(row, m.plainCell("Budget", key+n, "sec/op"))
				if s := m.find("Budget", key+n, "allocs/op"); s != nil {
					allocs = max(allocs, s.center())
				}
			}
			rows = append(rows, append(row, format(allocs, "allocs/op")))
		}
	}
	return rows
}

// tables are all sections of which there is something to show.
func tables(m *measurements) string {
	var b strings.Builder
	if m.machine["mode"] == "short" {
		b.WriteString("This was a short run: 1,000 calls in backoff, 100 open streams and 0.3 s of outage, instead of the numbers that the texts give.\n\n")
	}
	for _, s := range sections {
		t := s.table(m)
		if len(t.rows) < 2 || !measured(t.rows[1:]) {
			continue
		}
		fmt.Fprintf(&b, "## %s\n\n%s\n\n", s.title, s.text)
		if s.title == functions.title {
			b.WriteString("<!-- functions -->\n" + functionResults(m) + "<!-- end of functions -->\n\n")
			continue
		}
		fmt.Fprintf(&b, "%s\n%s", markdown(t.rows), t.verdict(m))
	}
	return b.String()
}

// functions is a section that is also measured alone, because functions need no server. It has a line
// that says when.
var functions = section{"Functions that are not RPCs",
	"`Retrier.Do` with a function that does nothing, or that fails once, or three times, with UNAVAILABLE before it does nothing. Nothing waits between attempts. " +
		"[functions_alternatives_test.go](functions_alternatives_test.go) configures the alternatives.",
	cases([]string{"Function", "FunctionRetry"}, "sec/op", "allocs/op")}

// functionResults is what RESULTS.md has of functions.
func functionResults(m *measurements) string {
	t := functions.table(m)
	return functionTable(m) + "\n" + strings.TrimSuffix(t.verdict(m), "\n")
}

// functionTable is what docs/performance.md has of it.
func functionTable(m *measurements) string {
	return m.provenance() + "\n\n" + markdown(functions.table(m).rows)
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
		said += fmt.Sprintf(", with a load of %s when a run started, on %s cores", m.loadRange(), m.machine["cores"])
	}
	return said + "."
}

func (m *measurements) loadRange() string {
	return fmt.Sprintf("%.2f to %.2f", slices.Min(m.loads), slices.Max(m.loads))
}

// enoughRuns is the least number of which the test can say that one is better.
const enoughRuns = 6

// verdict names each case in which an alternative is better, and says so if there is none.
func (t *table) verdict(m *measurements) string {
	var b strings.Builder
	for _, line := range t.better {
		fmt.Fprintf(&b, "- Better than ours: %s.\n", line)
	}
	switch {
	case len(t.better) > 0:
		b.WriteString("\n")
	case !t.compared:
	case m.runs < enoughRuns:
		b.WriteString("Too few runs to say whether an alternative is better.\n\n")
	default:
		b.WriteString("No alternative is better than ours in any case of this table.\n\n")
	}
	return b.String()
}

// measured says whether a table has a number in it.
func measured(rows [][]string) bool {
	return slices.ContainsFunc(rows, func(row []string) bool {
		return slices.ContainsFunc(row[1:], func(cell string) bool { return cell != "–" && cell != "" })
	})
}

// resultsPage is RESULTS.md.
func resultsPage(m *measurements) string {
	var b strings.Builder
	b.WriteString("# Results\n\n" + "Written by `make bench` from " + fmt.Sprint(m.runs) + ` runs. [What it means](../docs/performance.md), [what is compared](alternatives_test.go).

A time is the median of the runs, ± half its 95% confidence interval. A ratio is the median of the ratios within each run, and
compares with ours: above 1× is slower than ours. "Better than ours" lists what was better in so many runs that a sign test finds it
significant at 5%.

`)
	b.WriteString(summary(m))
	b.WriteString("## Machine and versions\n\n")
	b.WriteString(markdownText(m.machineRows()))
	b.WriteString("\nThe library's own goals, and why some are not met: [design](../docs/design.md#performance-goals).\n\n")
	b.WriteString("![Times, memory and attempts side by side](../docs/performance.svg)\n\n")
	b.WriteString(tables(m))
	return strings.TrimRight(b.String(), "\n") + "\n"
}

func (m *measurements) machineRows() [][]string {
	rows := [][]string{{"", ""}}
	for _, key := range []string{"date", "processor", "cores", "memory", "kernel", "go", "grpc-go", "go-grpc-middleware", "failsafe-go",
		"cenkalti/backoff", "sethvargo/go-retry", "avast/retry-go", "otel-sdk", "grpcretry"} {
		if v := m.machine[key]; v != "" {
			rows = append(rows, []string{key, v})
		}
	}
	if len(m.loads) > 0 {
		rows = append(rows, []string{"load when a run started", m.loadRange()})
	}
	return rows
}
