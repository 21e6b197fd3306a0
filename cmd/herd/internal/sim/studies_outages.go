package sim

import (
	"fmt"
	"slices"
	"time"

	"github.com/grpcretry/grpcretry"
)

// This file has the studies of patience: what it saves in short outages, and what it costs otherwise.

// elsewhere returns what other libraries do by default, or in their examples.
func elsewhere() []Strategy {
	with := func(name string, b grpcretry.Backoff, budget Budget) Strategy {
		return Strategy{Name: name, Policy: grpcretry.Policy{MaxAttempts: 4, Backoff: b, Patience: noPatience}, Budget: budget}
	}
	doubling := exponential(100*ms, 5*sec, grpcretry.ProportionalJitter)
	return []Strategy{
		{Name: "no retries", Policy: grpcretry.Policy{MaxAttempts: 1}},
		with("service config", doubling, Budget{Kind: UnlimitedBudget}),
		with("middleware", grpcretry.Constant(100*ms), Budget{Kind: UnlimitedBudget}),
		with("Finagle 20% + 10/s", doubling, Budget{Kind: FinagleBudget, Ratio: 0.2, MinPerSecond: 10}),
	}
}

// The brownouts' loads: calls per second of each process, and processes. 100x1000 would take minutes.
var brownoutLoads = []string{"1x1", "1x10", "1x100", "1x1000", "10x1", "10x10", "10x100", "10x1000", "100x1", "100x10", "100x100"}

// brownout returns a scenario in which a server fails every call for some time, again and again: up to
// 60 times, and less often if there are many calls.
func brownout(length time.Duration, load string) Scenario {
	var rate, processes float64
	fmt.Sscanf(load, "%fx%f", &rate, &processes) //nolint:errcheck // one of brownoutLoads
	period := 20*sec + length
	times := int(min(60, max(1, 100_000/(rate*processes*period.Seconds()))))
	s := Scenario{
		Name:       fmt.Sprintf("brownouts-%v-%s", length, load),
		Title:      fmt.Sprintf("every call fails for %v", length),
		Duration:   10*sec + time.Duration(times)*period,
		Bucket:     200 * ms,
		Groups:     []Group{{Name: "clients", Rate: rate * processes, Processes: int(processes), Deadline: 5 * sec}},
		Servers:    []Server{{Name: "server"}},
		Strategies: append(elsewhere(), Strategy{Name: "default"}),
	}
	s.Groups[0].Stop = s.Duration - 8*sec
	for i := range times {
		s.Servers[0].Outages = append(s.Servers[0].Outages, Outage{From: 10*sec + time.Duration(i)*period, For: length})
	}
	return s
}

func brownouts() Study {
	study := Study{
		Name:  "brownouts",
		Title: "Short outages, in which every call fails immediately",
		See: `A brownout lasts 0.2 to 5 s, and calls have 5 s. Saved is the share of the calls that fail without
retries; in brackets are the attempts that the server gets in the brownout for each of these calls. Four attempts from
100 ms on outlast half a second, and cost the server two to four attempts for each call. With patience calls wait until
another call's attempt was answered: nearly all are saved, and the server hardly notices. Only processes with a call per second
have nobody else to learn from.`,
		Vary:     "calls/s x processes",
		Labels:   brownoutLoads,
		Measures: []Measure{MeasureSaved, MeasureSavedAfter},
		Draw:     "brownouts-1s-100x10",
	}
	for _, length := range []time.Duration{200 * ms, 600 * ms, sec, 2 * sec, 5 * sec} {
		for _, load := range brownoutLoads {
			study.Scenarios = append(study.Scenarios, brownout(length, load))
		}
	}
	return study
}

func drain() Study {
	study := Study{
		Name:  "drain",
		Title: "The calls that have waited, when a target with little to spare returns",
		See: `1,000 calls a second; the server is down for 9 s, and each call that it rejects costs it 40% of one
that it serves. When it returns, those who have waited come on top of the load. With a fifth of the capacity to spare it copes
with that, whatever the fleet. With less, few processes that make many calls may keep it down: retries that succeed are free,
and take the place of calls that are rejected then. Let such a server send pushback, a turn for each call at half the rate that it
has to spare (drain-10%-turns, drain-5%-turns), or give its clients a ratio of 0.1 and no reserve (drain-10%).`,
		Vary:     "processes",
		Values:   fleets,
		Measures: []Measure{MeasureStable, MeasureFailed, MeasureLoad},
		Draw:     "drain-20%-1000",
	}
	for _, spare := range []float64{0.2, 0.1, 0.05} {
		s := Scenario{
			Name:     fmt.Sprintf("drain-%.0f%%", 100*spare),
			Title:    fmt.Sprintf("capacity for %.0f%% more than the usual load", 100*spare),
			Duration: 80 * sec,
			Network:  Distribution{Mean: ms},
			Groups:   []Group{{Name: "clients", Rate: 1000, Deadline: 30 * sec}},
			Servers: []Server{{Name: "server", Capacity: 1000 * (1 + spare), Queue: 240, RejectCost: 0.4,
				Latency: Distribution{Shape: ExponentialShape, Mean: 20 * ms},
				Outages: []Outage{{From: 12 * sec, For: 9 * sec}}}},
			Strategies: []Strategy{
				elsewhere()[0], elsewhere()[1],
				{Name: "default"},
				{Name: "ratio 0.1", Budget: Budget{Kind: RatioBudget, Ratio: 0.1, Reserve: 3}},
				{Name: "ratio 0.05", Budget: Budget{Kind: RatioBudget, Ratio: 0.05, Reserve: 3}},
				{Name: "patience 2 s", Policy: grpcretry.Policy{Patience: 2 * sec}},
				{Name: "patience 0", Policy: grpcretry.Policy{Patience: noPatience}},
			},
		}
		study.Scenarios = append(study.Scenarios, ofFleets(s, clientsAre)...)
		if spare < 0.2 {
			study.Further = append(study.Further, withTurns(s, 1000*spare/2))
		}
	}
	return study
}

// withTurns returns a scenario whose server gives a turn to each call that it rejects, so many in a
// second, and has ten clients.
func withTurns(s Scenario, rate float64) Scenario {
	s.Name += "-turns"
	s.Title += ", and a turn for each rejected call; processes: 10"
	s.Groups, s.Servers = slices.Clone(s.Groups), slices.Clone(s.Servers)
	s.Groups[0].Processes = 10
	s.Servers[0].Pushback = Pushback{Kind: SpreadPushback, Rate: rate}
	return s
}

// troubled returns 1,000 calls a second without a deadline, to a server of any capacity that has an
// outage from 12 s to 72 s.
func troubled(name, title string, processes int, o Outage) Scenario {
	o.From, o.For = 12*sec, 60*sec
	return Scenario{
		Name:     "risks-" + name,
		Title:    title,
		Duration: 90 * sec,
		Network:  Distribution{Mean: ms},
		Groups:   []Group{{Name: "clients", Rate: 1000, Processes: processes}},
		Servers:  []Server{{Name: "server", Latency: Distribution{Mean: 10 * ms}, Outages: []Outage{o}}},
		Strategies: []Strategy{elsewhere()[0], elsewhere()[1], {Name: "default"},
			{Name: "patience 0", Policy: grpcretry.Policy{Patience: noPatience}}},
	}
}

func risks() Study {
	study := Study{
		Name:  "risks",
		Title: "What patience costs when a target is not just away for a moment",
		Costs: true,
		See: `A target that is away for a minute makes calls wait for ten seconds at most, counted from its
first failure; from then on a call fails at once, and nothing queues up. If some calls are answered, the target counts as
overloaded, and calls end when the budget has no token. A method that always fails behind methods that work gets its
retries from the same budget. Patience 0 is for callers who would rather fail fast.`,
		Draw: "risks-gone",
	}
	add := func(s Scenario, change func(*Scenario)) {
		if change != nil {
			change(&s)
		}
		study.Scenarios = append(study.Scenarios, s)
	}
	add(troubled("gone", "all calls fail for a minute", 10, Outage{}), nil)
	for _, errors := range []float64{0.9, 0.97, 0.995} {
		for _, n := range []int{1, 100} {
			add(troubled(fmt.Sprintf("errors-%g-%d", 100*errors, n), fmt.Sprintf("%g%% of all calls fail for a minute; processes: %d",
				100*errors, n), n, Outage{Left: 1, Errors: errors}), nil)
		}
	}
	add(troubled("method", "one of two methods fails for a minute, the other works", 10, Outage{}), func(s *Scenario) {
		s.Groups[0].Rate, s.Groups[0].Name = 500, "failing"
		s.Groups = append(s.Groups, Group{Name: "working", Rate: 500, Target: "working", With: "failing"})
		s.Servers = append([]Server{{Name: "working", Latency: s.Servers[0].Latency}}, s.Servers...)
		s.Groups[0].Target = "server"
	})
	slow := func(s *Scenario) {
		s.Groups[0].Deadline = 5 * sec
		s.Servers[0].Capacity, s.Servers[0].Queue = 1200, -1
		for i := range s.Strategies {
			s.Strategies[i].Policy.AttemptTimeout = sec
		}
	}
	add(troubled("slow", "everything takes 1.5 times as long as the server can bear, for a minute; attempts time out after 1 s", 10,
		Outage{Left: 0.56}), slow)
	add(troubled("silent", "no call is answered for a minute; attempts time out after 1 s", 10, Outage{Silent: true}), slow)
	for _, n := range []int{10, 10_000} {
		add(troubled(fmt.Sprintf("third-%d", n), fmt.Sprintf("a third of the capacity is lost for 30 s; processes: %d", n), n,
			Outage{Left: 2.0 / 3}), lostThird)
	}
	add(troubled("replica", "one replica of three fails every call for a minute", 10, Outage{Replica: 1}), func(s *Scenario) {
		s.Servers[0].Replicas = 3
	})
	return study
}

// lostThird is a server whose capacity was just right.
func lostThird(s *Scenario) {
	s.Groups[0].Rate, s.Groups[0].Deadline = 600, 10*sec
	s.Duration = 60 * sec
	server := &s.Servers[0]
	server.Capacity, server.Queue, server.RejectCost = 660, 100, 0.1
	server.Outages = slices.Clone(server.Outages)
	server.Outages[0].For = 30 * sec
}
