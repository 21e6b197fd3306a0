package main

import (
	"bytes"
	"flag"
	"go/parser"
	"io"
	"math"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"google.golang.org/grpc/codes"

	"github.com/grpcretry/grpcretry"
	"github.com/grpcretry/grpcretry/cmd/herd/internal/sim"
)

var update = flag.Bool("update", false, "write the files in testdata/explain again")

// explained are the shipped examples. The three lines of the README are reads, idempotent, which is
// the default, and unsent.
var explained = []struct{ name, args string }{
	{"default", ""},
	{"careless", "-backoff none:3s..20s -attempts 6 -codes unavailable,deadline_exceeded,not_found -attempt-timeout 15s -max-elapsed 8s " +
		"-budget ratio:0.5,0,10s,reserve=100 -rate 200 -processes 10 -headroom 10%"},
	{"reads", "-method /shop.Catalog/Get -hedge quantile:0.95,5ms..1s"},
	{"unsent", "-method /shop.Cart/Buy -unsent-only"},
}

func TestExplainGolden(t *testing.T) {
	for _, tt := range explained {
		t.Run(tt.name, func(t *testing.T) {
			if tt.name != "unsent" {
				looksAtFigures(t)
			}
			t.Parallel()
			out, errs, status := herd(t, append([]string{"explain"}, strings.Fields(tt.args)...)...)
			if status != 0 {
				t.Fatalf("herd explain %s: status %d, %s", tt.args, status, errs)
			}
			wantGolden(t, tt.name+".txt", out)
			for line := range strings.Lines(out) {
				if n := utf8.RuneCountInString(strings.TrimRight(line, "\n")); n > 100 && !strings.Contains(line, "grpcretry.") {
					t.Errorf("a line of %d characters: %s", n, line)
				}
			}
		})
	}
}

func wantGolden(t *testing.T, name, got string) {
	t.Helper()
	path := filepath.Join("testdata", "explain", name)
	if *update {
		if err := os.WriteFile(path, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	if want := string(read(t, path)); got != want {
		t.Errorf("%s is not what is printed now; if that is right, run go test -run Explain -update .\ngot:\n%s\nwant:\n%s", path, got, want)
	}
}

// quick is the effort for tests in which figures do not matter.
var quick = effort{rate: 10, stories: 200}

// The search runs on all cores, and finds the same each time.
func TestExplainSearchesInParallel(t *testing.T) {
	t.Parallel()
	search := func(seed string) string {
		e := explanationOf(t, "-rate 10 -processes 2 -seed "+seed, quick)
		r, err := e.recommend(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		var b bytes.Buffer
		p := explainPage{Sections: []explainSection{e.verdict(r), e.comparison(r)}}
		p.print(&report{w: &b})
		return b.String()
	}
	first := search("1")
	if again := search("1"); again != first || !contains(first, "VERDICT") {
		t.Errorf("the second time the page says\n%s\nat first:\n%s", again, first)
	}
	if !raceDetector && search("2") == first {
		t.Error("-seed changes nothing")
	}
}

// explanationOf reads a command line and makes all of the page but the recommendation.
func explanationOf(t *testing.T, args string, much ...effort) *explanation {
	t.Helper()
	o, err := parseExplain(strings.Fields(args), io.Discard)
	if err != nil {
		t.Fatalf("herd explain %s: %v", args, err)
	}
	if err := o.read(); err != nil {
		t.Fatalf("herd explain %s: %v", args, err)
	}
	if len(much) > 0 {
		o.effort = much[0]
	}
	e, err := newExplanation(t.Context(), &o.question)
	if err != nil {
		t.Fatalf("herd explain %s: %v", args, err)
	}
	return e
}

func TestExplainWarns(t *testing.T) {
	looksAtFigures(t)
	t.Parallel()
	const few = "-rate 20 -processes 2 "
	for _, tt := range []struct{ args, want string }{
		{"", ""},
		{"-hedge quantile:0.95,5ms..1s", ""},
		{"-attempts 1", "There are no retries"},
		{"-codes unavailable,invalid_argument", "INVALID_ARGUMENT will be the same the next time"},
		{"-codes unavailable,deadline_exceeded", "DEADLINE_EXCEEDED comes from servers that are too slow already"},
		{"-codes internal", "UNAVAILABLE is not retried"},
		{"-jitter none", "The waits have no jitter"},
		{"-backoff constant:100ms", "The waits have no jitter"},
		{"-deadline 0", "Calls have no deadline"},
		{"-attempt-timeout 3s -max-elapsed 2s", "no retry can follow an attempt that times out. The library logs this, too"},
		{"-hedge after:2s -attempt-timeout 1s", "WithHedging has a delay of 2s, and WithAttemptTimeout is 1s: no hedge is ever sent"},
		{"-budget unlimited", "There is no budget: in an outage a server gets up to 4 attempts per call"},
		{"-policy testdata/explain/grpc-docs.json", ""}, // WithServiceConfig adds the default budget
	} {
		s := explanationOf(t, few+tt.args, quick).warnings()
		all := strings.Join(s.Parts[0].Points, "\n")
		wanted := contains(all, tt.want)
		if tt.want == "" {
			wanted = all == ""
		}
		if !wanted {
			t.Errorf("herd explain %s warns:\n%s\nwant %q", tt.args, all, tt.want)
		}
	}
}

// The order of the flags does not matter.
func TestExplainFlagsInAnyOrder(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct{ args, want string }{
		{"-attempts 3 -hedge after:10ms", "at most 3 attempts of a call; another one is sent while none has succeeded after 10 ms"},
		{"-jitter none -base 20ms -backoff full:1s..2s", "before a retry a wait of exactly 20 ms"},
	} {
		s := explanationOf(t, ""+tt.args, quick).words()
		if got := strings.Join(s.Parts[0].Points, "\n"); !contains(got, tt.want) {
			t.Errorf("herd explain %s:\n%s\nwant %q", tt.args, got, tt.want)
		}
	}
}

// A service config can hedge without any code after which another attempt follows.
func TestExplainHedgingWithoutCodes(t *testing.T) {
	t.Parallel()
	file := filepath.Join(t.TempDir(), "config.json")
	config := `{"methodConfig": [{"name": [{}], "hedgingPolicy": {"maxAttempts": 3, "hedgingDelay": "0.05s"}}]}`
	if err := os.WriteFile(file, []byte(config), 0o600); err != nil {
		t.Fatal(err)
	}
	s := explanationOf(t, "-policy "+file, quick).words()
	if got := s.Parts[0].Points[1]; got != "none after a failure (service config)" {
		t.Errorf("the codes are %q, want none after a failure", got)
	}
}

// Stories of different lengths share a table: each time stands below the number of its attempt, or below
// "last".
func TestExplainTimelines(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct{ args, want string }{
		{"-attempts 8", `
			|attempt 1|2|3|4|…|last|error|because
			shortest|0 s|52 ms|254 ms|1.06 s|…|8.56 s|8.56 s|deadline too near
			  wait||50 ms|200 ms|800 ms|…|2.5 s||
			typical|0 s|77 ms|379 ms|1.58 s|…|9.09 s|9.09 s|deadline too near
			  wait||75 ms|300 ms|1.2 s|…|3.75 s||
			longest|0 s|102 ms|504 ms|2.11 s|–|7.11 s|7.11 s|deadline too near
			  wait||100 ms|400 ms|1.6 s||5 s||
			budget empty|0 s|–|–|–|–|–|9.98 s|deadline too near`},
		{"-attempts 8 -deadline 3s", `
			|attempt 1|2|3|4|error|because
			shortest|0 s|52 ms|254 ms|1.06 s|1.06 s|deadline too near
			  wait||50 ms|200 ms|800 ms||
			typical|0 s|77 ms|379 ms|1.58 s|1.58 s|deadline too near
			  wait||75 ms|300 ms|1.2 s||
			longest|0 s|102 ms|504 ms|2.11 s|2.11 s|deadline too near
			  wait||100 ms|400 ms|1.6 s||
			budget empty|0 s|–|–|–|2.99 s|deadline too near`},
		{"-attempts 7", `
			|attempt 1|2|3|4|…|last|error|because
			shortest|0 s|52 ms|254 ms|1.06 s|…|8.56 s|8.56 s|7 attempts made
			  wait||50 ms|200 ms|800 ms|…|2.5 s||
			typical|0 s|77 ms|379 ms|1.58 s|…|9.09 s|9.09 s|deadline too near
			  wait||75 ms|300 ms|1.2 s|…|3.75 s||
			longest|0 s|102 ms|504 ms|2.11 s|–|7.11 s|7.11 s|deadline too near
			  wait||100 ms|400 ms|1.6 s||5 s||
			budget empty|0 s|–|–|–|–|–|9.98 s|deadline too near`},
		{"-deadline 60ms", `
			|attempt 1|2|error|because
			shortest|0 s|52 ms|54 ms|deadline too near
			  wait||50 ms||
			typical|0 s|–|2 ms|deadline too near
			longest|0 s|–|2 ms|deadline too near`},
		{"-policy testdata/explain/throttled.json -method /shop.Cart/Get", `
			|attempt 1|2|3|error|because
			shortest|0 s|162 ms|644 ms|646 ms|3 attempts made
			  wait||160 ms|480 ms||
			typical|0 s|202 ms|804 ms|806 ms|3 attempts made
			  wait||200 ms|600 ms||
			longest|0 s|242 ms|964 ms|966 ms|3 attempts made
			  wait||240 ms|720 ms||
			budget empty|0 s|–|–|2 ms|budget`}, // nobody waits for a throttle
	} {
		s := explanationOf(t, ""+tt.args, quick).timelines()
		got := ""
		for _, line := range s.Parts[2].Table {
			got += "\n\t\t\t" + strings.Join(line, "|")
		}
		if got != tt.want {
			t.Errorf("herd explain %s:%s\nwant:%s", tt.args, got, tt.want)
		}
	}
}

// A throttle allows most retries if calls fail one by one: 20 that succeed earn what a call and its
// retry cost.
func TestExplainBudgetOfAThrottle(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		args string
		want float64
	}{
		{"-budget throttle:10,0.1 -rate 200", 20. / 21},
		{"-budget throttle:10,0.1 -rate 1000", 100. / 21},
		{"-budget throttle:1000,0.01 -rate 1000", 100. / 201},
	} {
		e := explanationOf(t, ""+tt.args, quick)
		if got := e.budget.perSecond; math.Abs(got-tt.want) > 0.05*tt.want {
			t.Errorf("herd explain %s: %v retries per second of each process, want %v", tt.args, got, tt.want)
		}
	}
}

// Calls that the deadline ends earn no retries.
func TestExplainBudgetOfCallsThatFail(t *testing.T) {
	t.Parallel()
	e := explanationOf(t, "-deadline 60ms -latency 1s", quick)
	if b := e.budget; b.fresh != 3 || b.saved != 3 || b.perSecond != 0 {
		t.Errorf("the budget allows %+v, want 3 retries and none in good times", b)
	}
}

// Each part of the policy has its source.
func TestExplainNamesTheSourceOfEachPart(t *testing.T) {
	t.Parallel()
	e := explanationOf(t, "-policy testdata/explain/throttled.json -method /shop.Cart/Get -attempt-timeout 500ms -base 50ms", quick)
	s := e.words()
	got := strings.Join(s.Parts[0].Points, "\n")
	for _, want := range []string{
		"at most 3 attempts of a call (service config)",
		"another one after UNAVAILABLE and RESOURCE_EXHAUSTED (service config)",
		"a wait of 50 ms, ±20% at random, then each time 3 times as long, up to 2 s (your flags)",
		"budget: a throttle of 10 tokens; a failure costs one, a success returns 0.1, and there are no retries while half are gone (service " +
			"config)",
		"an attempt that takes longer than 500 ms makes room for the next one (your flags)",
	} {
		if !contains(got, want) {
			t.Errorf("the policy is\n%s\nwithout %q", got, want)
		}
	}
	unthrottled := strings.Join(explanationOf(t, "-policy testdata/explain/grpc-docs.json", quick).words().Parts[0].Points, "\n")
	for _, want := range []string{"budget: retries for 20% of the calls", "patience: for 10 s", "succeeds is free (default)"} {
		if !contains(unthrottled, want) {
			t.Errorf("the policy is\n%s\nwithout %q", unthrottled, want)
		}
	}
	plain := explanationOf(t, "-rate 10", quick).words()
	for _, one := range plain.Parts[0].Points {
		if !strings.HasSuffix(one, " (default)") {
			t.Errorf("without flags the page says %q, want a default", one)
		}
	}
}

// The options to copy are the recommended policy, as Go.
func TestExplainOptionsToCopy(t *testing.T) {
	const ms = time.Millisecond
	retried := sim.Strategy{
		Policy: grpcretry.Policy{MaxAttempts: 5, Codes: []codes.Code{codes.Unavailable}, Patience: noPatience,
			Backoff: grpcretry.Exponential{Base: 50 * ms, Max: 1500 * ms, Multiplier: 3, Jitter: grpcretry.ProportionalJitter}},
		Budget: sim.Budget{Kind: sim.RatioBudget, Ratio: 0.1, Reserve: 1, Window: 10 * time.Second},
	}
	hedged := sim.Strategy{Policy: grpcretry.Policy{MaxAttempts: 2},
		Hedging: &sim.Hedging{Kind: sim.HedgeAtQuantile, Quantile: 0.9, AtLeast: 5 * ms, AtMost: time.Second}}
	e := &explanation{question: &question{}}
	for _, tt := range []struct {
		strategy sim.Strategy
		want     string
	}{
		{retried, "Exponential{Base: 50*time.Millisecond, Max: 1500*time.Millisecond, Multiplier: 3, Jitter: grpcretry.ProportionalJitter}"},
		{retried, "WithPatience(0)"},
		{retried, "RatioBudget{Ratio: 0.1, Reserve: 1, Window: 10*time.Second}"},
		{hedged, "HedgeAtQuantile(0.9, 5*time.Millisecond, time.Second)"},
	} {
		code, ok := e.goOptions(tt.strategy)
		if _, err := parser.ParseExpr("f(\n" + code + "\n)"); err != nil || !ok || !contains(code, tt.want) {
			t.Errorf("options (%v, %v)\n%s\nwant Go with %s", ok, err, code, tt.want)
		}
	}
}

func TestExplainMistakesAreNamed(t *testing.T) {
	for _, tt := range []struct {
		args   string
		status int
		want   string
	}{
		{"more", 2, `unexpected argument "more"`},
		{"-rate 0", 2, "-rate 0: want 0.01"},
		{"-processes 0", 2, "-processes 0: want 1"},
		{"-rate 200000 -processes 1", 2, "at most 100,000 calls per second of each process"},
		{"-deadline -1s", 2, "-deadline -1s: want 0 (none)"},
		{"-latency 0s", 2, "-latency 0s: want a time above 0"},
		{"-latency square:9ms", 1, `-latency: sim: servers[0].latency.shape is "square"`},
		{"-latency long", 2, "-latency long"},
		{"-headroom much", 2, "-headroom much: want a share such as 25% or 0.25"},
		{"-method Get", 2, "-method Get: want /pkg.Service/Method"},
		{"-backoff soon", 2, "want full:100ms..5s×2"},
		{"-attempts 0", 1, "-attempts 0: want at least 1"},
		{"-multiplier 3 -backoff constant:1s", 1, "-multiplier 3: the backoff is not exponential"},
		{"-jitter none -hedge after:1s -backoff decorrelated:1s..2s", 1, "-jitter none: the backoff is not exponential"},
		{"-base 9s -attempts 3", 1, `-base 9s: sim: strategies[0]: strategy ""`},
		{"-study classic", 2, "flag provided but not defined: -study"},
		{"-policy testdata/explain/none.json", 1, "no such file"},
		{"-policy testdata/explain/throttled.json", 1, "has 2 policies (/shop.Cart/Get, /shop.Cart/): choose one with -method"},
	} {
		_, errs, status := herd(t, append([]string{"explain"}, strings.Fields(tt.args)...)...)
		if status != tt.status || !contains(errs, tt.want) {
			t.Errorf("herd explain %s: status %d, %q; want %d and %q", tt.args, status, errs, tt.status, tt.want)
		}
	}
	_, errs, status := herd(t, "explain", "-h")
	if status != 0 || !contains(errs, "herd explain [flags]") || !contains(errs, "-headroom share") {
		t.Errorf("herd explain -h: status %d\n%s", status, errs)
	}
	if _, errs, _ := herd(t, "-h"); !contains(errs, "herd explain [flags]") {
		t.Errorf("herd -h does not mention explain:\n%s", errs)
	}
}

// The recommended policy keeps its promises with other seeds and a whole fleet.
func TestExplainRecommendsWhatHolds(t *testing.T) {
	t.Parallel()
	looksAtFigures(t)
	for _, args := range []string{"-headroom 5%", "-budget unlimited -jitter none -headroom 10% -processes 40 -deadline 3s"} {
		e := explanationOf(t, ""+args)
		r, err := e.recommend(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if r.found == nil || r.found == r.current {
			t.Fatalf("herd explain %s recommends nothing else", args)
		}
		load := downScenario(12*time.Second, 10*time.Second, codes.Unavailable)
		load.Groups[0].Deadline, load.Groups[0].Processes = e.deadline, e.processes
		load.Servers[0].Outages[0].For = 10 * time.Second
		load.Servers[0].Capacity, load.Servers[0].Queue, load.Servers[0].RejectCost = 1000*(1+e.headroom), 500, 0.3
		load.Duration = 60 * time.Second
		down := simulate(t, load, r.found.strategy)
		attempts, calls := 0, 0
		for i := 12; i < 22; i++ {
			attempts += down.Servers[0].Series[i].Offered
			calls += down.Groups[0].Series[i].Calls
		}
		if extra := float64(attempts)/float64(calls) - 1; extra > e.headroom+0.02 {
			t.Errorf("herd explain %s recommends a policy that adds %.3f of the load in an outage, want at most %.2f", args, extra, e.headroom)
		}
		load.Servers[0].Outages[0].Left = 0.3
		overload := simulate(t, load, r.found.strategy)
		none := simulate(t, load, sim.Strategy{Policy: grpcretry.Policy{MaxAttempts: 1}})
		if got, want := overload.Summary.Stable, none.Summary.Stable; got < 0 || want >= 0 && got > want+2*time.Second {
			t.Errorf("herd explain %s recommends a policy that recovers after %v, without retries it takes %v", args, got, want)
		}
		t.Logf(
			"%s: saved %.3f, before %.3f; recovered after %v, without retries %v",
			args,
			r.found.saved,
			r.current.saved,
			overload.Summary.Stable,
			none.Summary.Stable,
		)
	}
}

func simulate(t *testing.T, s sim.Scenario, strategy sim.Strategy) *sim.Result {
	t.Helper()
	strategy.Policy.Patience = noPatience
	r, err := sim.Run(t.Context(), s, strategy, nil)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// downScenario has calls to a server that is down from a time on, for good.
func downScenario(from, length time.Duration, code codes.Code) sim.Scenario {
	return sim.Scenario{
		Seed:     4711,
		Duration: from + length,
		Network:  sim.Distribution{Mean: time.Millisecond},
		Groups:   []sim.Group{{Rate: 1000, Processes: 10, Deadline: 10 * time.Second}},
		Servers: []sim.Server{{Latency: sim.Distribution{Shape: sim.LogNormalShape, Mean: 20 * time.Millisecond, Spread: 20 * time.Millisecond},
			Outages: []sim.Outage{{From: from, For: length + time.Hour, Code: code}}}},
	}
}

// A backoff of nothing is a setting, and no default.
func TestAConstantBackoffOfZeroIsNoDefault(t *testing.T) {
	for want, backoff := range map[string]grpcretry.Backoff{"default": nil, "service config": grpcretry.Constant(0)} {
		s := sim.Strategy{Policy: grpcretry.Policy{Backoff: backoff}}
		q := question{strategy: s, base: s}
		if got := q.origin(func(s sim.Strategy) any { return s.Policy.Backoff }); got != want {
			t.Errorf("a backoff of %v comes from %q, want %q", backoff, got, want)
		}
	}
}
