package main

import (
	"math"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"

	"github.com/grpcretry/grpcretry"
	"github.com/grpcretry/grpcretry/cmd/herd/internal/sim"
)

// What the page says of the three lines in docs/hedging.md agrees with simulations that have nothing to do
// with it: other seeds, all processes, and calls that arrive at random.

// agreement is the largest difference between the page and a simulation, as a share.
const agreement = 0.07

// readmePolicies are the three lines of docs/hedging.md: reads, idempotent writes, everything else.
var readmePolicies = map[string]sim.Strategy{
	"-hedge quantile:0.95,5ms..1s": {Hedging: &sim.Hedging{Kind: sim.HedgeAtQuantile, Quantile: 0.95, AtLeast: 5 * time.Millisecond, AtMost: time.Second}},
	"":                             {},
	"-unsent-only":                 {Policy: grpcretry.Policy{UnsentOnly: true}},
}

func TestReadmePoliciesAreThoseOfTheReadme(t *testing.T) {
	text := string(read(t, "../../docs/hedging.md"))
	for _, want := range []string{
		"grpcretry.WithUnsentOnly(true),",
		"WithIdempotencyLevel(descriptorpb.MethodOptions_IDEMPOTENT, grpcretry.WithUnsentOnly(false)),",
		"WithIdempotencyLevel(descriptorpb.MethodOptions_NO_SIDE_EFFECTS, grpcretry.WithUnsentOnly(false), grpcretry.WithHedging(",
		"Hedging{Delay: grpcretry.HedgeAtQuantile(0.95, 5*time.Millisecond, time.Second)})),",
	} {
		if !contains(text, want) {
			t.Errorf("docs/hedging.md has no line %q", want)
		}
	}
}

// A pageReader finds figures in a page as it is printed.
type pageReader struct {
	t    *testing.T
	page *explainPage
}

func pageOf(t *testing.T, args string) pageReader {
	t.Helper()
	looksAtFigures(t)
	e := explanationOf(t, args+" -patience -1s") // with it, what a call does depends on others
	return pageReader{t, &explainPage{Sections: []explainSection{e.words(), e.timelines(), e.outage(), e.allowance()}}}
}

// cell is the text in a table whose heading line has the column, in the line that begins with row; of
// several tables that of the number nth.
func (p pageReader) cell(row, column string, nth int) string {
	p.t.Helper()
	for _, s := range p.page.Sections {
		for _, part := range s.Parts {
			at := -1
			if len(part.Table) > 0 {
				for i, head := range part.Table[0] {
					if strings.HasPrefix(head, column) {
						at = i
					}
				}
			}
			if at < 0 {
				continue
			}
			for _, line := range part.Table[1:] {
				if strings.HasPrefix(line[0], row) {
					if nth--; nth < 0 {
						return line[at]
					}
				}
			}
		}
	}
	p.t.Fatalf("no table has a column %q and a line %q", column, row)
	return ""
}

// find returns what the group of a regular expression matches in a paragraph.
func (p pageReader) find(form string) string {
	p.t.Helper()
	re := regexp.MustCompile(form)
	for _, s := range p.page.Sections {
		for _, part := range s.Parts {
			if m := re.FindStringSubmatch(part.Text); m != nil {
				return m[1]
			}
		}
	}
	p.t.Fatalf("no paragraph matches %q", form)
	return ""
}

// figure reads 1,234, 1.5 s, 300 ms, 20%, 20/s.
func (p pageReader) figure(text string) float64 {
	p.t.Helper()
	text = strings.TrimSpace(strings.ReplaceAll(text, ",", ""))
	if d, err := time.ParseDuration(strings.ReplaceAll(text, " ", "")); err == nil && text != "0" {
		return d.Seconds()
	}
	scale := 1.0
	if strings.HasSuffix(text, "%") {
		scale = 0.01
	}
	v, err := strconv.ParseFloat(strings.TrimRight(text, "%/s"), 64)
	if err != nil {
		p.t.Fatalf("%q is not a figure: %v", text, err)
	}
	return v * scale
}

// agree compares a figure of the page with that of a simulation.
func (p pageReader) agree(what, printed string, simulated float64) {
	p.t.Helper()
	said := p.figure(printed)
	p.t.Logf("%s: the page says %s, the simulation %.4g", what, printed, simulated)
	if math.Abs(said-simulated) > agreement*math.Abs(simulated) {
		p.t.Errorf("%s: the page says %s, the simulation %.4g", what, printed, simulated)
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

// How long a call that keeps failing lasts.
func TestExplainAgreesOnFailingCalls(t *testing.T) {
	t.Parallel()
	for args, strategy := range readmePolicies {
		p := pageOf(t, "-layers 1 "+args)
		strategy.Budget = sim.Budget{Kind: sim.UnlimitedBudget}
		failing := func(code codes.Code) sim.Quantiles {
			s := downScenario(20*time.Second, 30*time.Second, code)
			s.Groups[0].Stop = 40 * time.Second
			return simulate(t, s, strategy).Groups[0].FailedAfter
		}
		unavailable := failing(codes.Unavailable)
		if args == "" {
			overload := failing(codes.ResourceExhausted)
			for i, one := range []struct {
				name string
				q    sim.Quantiles
			}{{"UNAVAILABLE", unavailable}, {"RESOURCE_EXHAUSTED", overload}} {
				p.agree(one.name+" typically", p.cell("typical", "error", i), one.q.Mean.Seconds())
				p.agree(one.name+" at the longest", p.cell("longest", "error", i), one.q.Max.Seconds())
				p.agree(one.name+", median", p.find("fails with "+one.name+".* have the error within ([^,]+)"), one.q.P50.Seconds())
				p.agree(one.name+", p99", p.find("fails with "+one.name+".*99% within ([^;]+)"), one.q.P99.Seconds())
				p.agree(one.name+" on average", p.find("fails with "+one.name+".*; (.*) on average"), one.q.Mean.Seconds())
			}
			continue
		}
		if args == "-unsent-only" {
			p.agree("unsent only", p.find(`fails with UNAVAILABLE.*gets its error after ([^(]+) \(`), unavailable.P50.Seconds())
			continue
		}
		p.agree(args, p.cell("typical", "error", 0), unavailable.Mean.Seconds())
		p.agree(args+", no response", p.cell("always", "error", 0), 10)
	}
}

// Calls that never get their last attempt.
func TestExplainAgreesOnTheLastAttempt(t *testing.T) {
	t.Parallel()
	p := pageOf(t, "-layers 1 -deadline 4s")
	s := downScenario(0, 40*time.Second, codes.ResourceExhausted)
	s.Groups[0].Deadline, s.Groups[0].Stop = 4*time.Second, 30*time.Second
	g := simulate(t, s, sim.Strategy{Budget: sim.Budget{Kind: sim.UnlimitedBudget}}).Groups[0]
	p.agree("cut by the deadline", p.find(`fails with RESOURCE_EXHAUSTED.* (\S+) never get their last attempt`), float64(g.Outcomes["deadline"])/float64(g.Failed))
	p.agree("on average", p.find("fails with RESOURCE_EXHAUSTED.*; (.*) on average"), g.FailedAfter.Mean.Seconds())
}

// The current policy's column of the table with the recommended one.
func TestExplainAgreesOnTheComparison(t *testing.T) {
	t.Parallel()
	for args, strategy := range readmePolicies {
		if strategy.Policy.UnsentOnly {
			continue // there is no comparison
		}
		p := pageOf(t, "-layers 1 "+args)
		e := explanationOf(t, "-patience -1s -layers 1 "+args)
		r, err := e.recommend(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		p.page.Sections = append(p.page.Sections, e.comparison(r))
		said := func(row string) string { return p.cell(row, "this policy", 0) }
		load := downScenario(12*time.Second, 10*time.Second, codes.Unavailable)
		load.Groups[0].Even = true
		load.Servers[0].Capacity, load.Servers[0].Window, load.Servers[0].RejectCode = 1250, 200*time.Millisecond, codes.Unavailable
		load.Servers[0].Outages[0].For = 10 * time.Second
		load.Duration = 40 * time.Second
		down := simulate(t, load, strategy)
		attempts := 0
		for _, b := range down.Servers[0].Series[12:22] {
			attempts += b.Offered
		}
		p.agree(args+", extra load", said("extra load"), float64(attempts)/10_000-1)

		load.Servers[0].Outages = nil
		for i, length := range []time.Duration{300, 1000, 2000} {
			load.Servers[0].Outages = append(load.Servers[0].Outages, sim.Outage{From: time.Duration(12+14*i) * time.Second, For: length * time.Millisecond})
		}
		load.Duration = 54 * time.Second
		load.Groups[0].Rate, load.Groups[0].Processes, load.Servers[0].Capacity = 2000, 20, 2500 // for enough calls that are rescued
		var failed, all, rescued float64
		const seeds = 3
		for range seeds {
			load.Seed++
			r := simulate(t, load, strategy)
			none := simulate(t, load, sim.Strategy{Policy: grpcretry.Policy{MaxAttempts: 1}})
			failed += r.Summary.Failed / none.Summary.Failed / seeds
			all += r.Summary.P99.Seconds() / seeds
			rescued += r.Groups[0].Rescued.P99.Seconds() / seeds
		}
		if args == "" {
			p.agree(args+", calls saved", said("calls saved"), 1-failed)
		} else {
			p.agree(args+", p99", said("p99 of all calls"), all)
		}
		p.agree(args+", p99 of the rescued", said("p99 of the rescued"), rescued)
	}
}

// The recommended policy keeps its promises with other seeds and a whole fleet.
func TestExplainRecommendsWhatHolds(t *testing.T) {
	t.Parallel()
	looksAtFigures(t)
	for _, args := range []string{"", "-budget unlimited -jitter none -headroom 10% -processes 40 -deadline 3s"} {
		e := explanationOf(t, "-layers 1 "+args)
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
		t.Logf("%s: saved %.3f, before %.3f; recovered after %v, without retries %v", args, r.found.saved, r.current.saved, overload.Summary.Stable, none.Summary.Stable)
	}
}

// Attempts per call in an outage, alone and across layers.
func TestExplainAgreesOnOutages(t *testing.T) {
	t.Parallel()
	const from, length = 20 * time.Second, 30 * time.Second
	for args, strategy := range readmePolicies {
		p := pageOf(t, args)
		for layers := 1; layers <= 3; layers++ {
			s := downScenario(from, length, codes.Unavailable)
			last := s.Servers[0]
			s.Servers = nil
			for i := range layers - 1 {
				s.Servers = append(s.Servers, sim.Server{Name: string(rune('A' + i)), Replicas: 10, Calls: &sim.Downstream{Target: string(rune('B' + i))}})
			}
			last.Name = string(rune('A' + layers - 1))
			s.Servers = append(s.Servers, last)
			row := strconv.Itoa(layers)
			r := simulate(t, s, strategy)
			perCall := func(from, until int) float64 {
				attempts, calls := 0, 0
				for i := from; i < until; i++ {
					attempts += r.Servers[layers-1].Series[i].Offered
					calls += r.Groups[0].Series[i].Calls
				}
				return float64(attempts) / float64(calls)
			}
			worst := 0.0
			for i := 20; i < 50; i++ {
				worst = max(worst, perCall(i, i+1))
			}
			p.agree(args+" "+row+", worst second", p.cell(row, "worst second", 0), worst)
			p.agree(args+" "+row+", first 10 s", p.cell(row, "first 10 s", 0), perCall(20, 30))
			p.agree(args+" "+row+", after 20 s", p.cell(row, "after 20 s", 0), perCall(40, 50))
			if layers == 3 && !strategy.Policy.UnsentOnly {
				intercepted := strategy
				intercepted.StopCallers, intercepted.OneAttempt = true, true
				r = simulate(t, s, intercepted)
				p.agree(args+" with interceptors", p.find(`server interceptors.*in a row send (\S+)`), perCall(20, 30))
			}
			unlimited := strategy
			unlimited.Budget = sim.Budget{Kind: sim.UnlimitedBudget}
			if h := unlimited.Hedging; h != nil {
				more := *h
				more.Budget = unlimited.Budget
				unlimited.Hedging = &more
			}
			s.Groups[0].Rate = 100
			r = simulate(t, s, unlimited)
			p.agree(args+" "+row+", no budget", p.cell(row, "with no budget", 0), perCall(40, 50))
		}
	}
}

// What the budget allows.
func TestExplainAgreesOnBudgets(t *testing.T) {
	t.Parallel()
	for args, strategy := range readmePolicies {
		if strategy.Policy.UnsentOnly {
			continue // no budget is asked
		}
		p := pageOf(t, "-layers 1 "+args)
		retries := func(s sim.Scenario) (sum int) {
			outage := int(s.Servers[0].Outages[0].From / time.Second)
			for _, b := range simulate(t, s, strategy).Groups[0].Series[outage:] {
				sum += b.Retries
			}
			return sum
		}
		const all = "in all 10 processes"
		p.agree(args+", saved up", p.cell("saved up", all, 0), float64(retries(downScenario(20*time.Second, 30*time.Second, codes.Unavailable))))
		p.agree(args+", just started", p.cell("in processes", all, 0), float64(retries(downScenario(0, 30*time.Second, codes.Unavailable))))

		// A server that accepts half of the calls earns retries with them. Those count that fail, because
		// the others return their token.
		busy := downScenario(0, 100*time.Second, codes.Unavailable)
		busy.Servers = []sim.Server{{Capacity: 500, Window: 10 * time.Millisecond, RejectCode: codes.Unavailable}}
		g := simulate(t, busy, strategy).Groups[0]
		firstFailed := g.Succeeded + g.Failed - g.Outcomes["first_try"]
		p.agree(args+", in good times", p.cell("in good times", all, 0), 1000*float64(g.Wasted-firstFailed)/float64(g.Succeeded))

		// Every call is slow enough for a hedge.
		if h := strategy.Hedging; h != nil {
			slow := downScenario(0, 40*time.Second, codes.Unavailable)
			slow.Servers = []sim.Server{{Latency: sim.Distribution{Mean: 100 * time.Millisecond}}}
			g := simulate(t, slow, sim.Strategy{Hedging: &sim.Hedging{Kind: sim.HedgeAfter, Delay: 20 * time.Millisecond}}).Groups[0]
			p.agree(args+", hedges", p.find(`Hedges need a second budget.* (\S+) in all`), float64(g.Hedges)/40)
		}
	}
}

// How often reads are hedged in good times, after which delay, and what that does to the slowest.
func TestExplainAgreesOnHedges(t *testing.T) {
	t.Parallel()
	const args = "-hedge quantile:0.95,5ms..1s"
	p := pageOf(t, "-layers 1 "+args)
	calm := downScenario(100*time.Second, time.Second, codes.Unavailable)
	calm.Duration -= time.Second
	hedged, plain := simulate(t, calm, readmePolicies[args]).Groups[0], simulate(t, calm, sim.Strategy{}).Groups[0]
	p.agree("calls hedged", p.find(`In good times (\S+) of the calls are hedged`), float64(hedged.Hedges)/float64(hedged.Calls))
	p.agree("p99", p.find("1% of the calls take over ([^;]+)"), hedged.Latency.P99.Seconds())
	p.agree("p99 without hedging", p.find(`without hedging, over (.+)\.`), plain.Latency.P99.Seconds())
	found := simulate(t, calm, sim.Strategy{Policy: grpcretry.Policy{MaxAttempts: 1}})
	slower := found.Tail[0].Latency
	for _, point := range found.Tail {
		if point.Share >= 0.05 {
			slower = point.Latency
		}
	}
	p.agree("delay", p.cell("  wait", "2", 5), slower.Seconds())
}
