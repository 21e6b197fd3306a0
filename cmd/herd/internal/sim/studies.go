package sim

import (
	"fmt"
	"slices"
	"time"

	"google.golang.org/grpc/codes"

	"github.com/grpcretry/grpcretry"
)

// A Study is a set of scenarios that belong together, with an explanation.
type Study struct {
	Name, Title, See string // as those of a [Scenario]
	Scenarios        []Scenario
	Further          []Scenario // that run only on request

	// Vary, unless empty, names the number that grows from one scenario to the next while all else
	// stays the same, and Values are its values. There may be several such rows of len(Values)
	// scenarios, one after the other. Measures are the figures to compare, and Draw is the name of
	// the scenario to draw.
	// Labels are the values instead if they are not numbers.
	Vary     string
	Values   []float64
	Labels   []string
	Measures []Measure
	Draw     string

	// Tail says that the study is about the latency of the slowest calls, rather than about the load
	// that the server sees.
	Tail bool

	// Costs says that it is about what calls and servers bear while a failure lasts.
	Costs bool
}

// Points returns the texts of the values that the study varies, as they end the names of its scenarios.
func (s Study) Points() []string {
	points := s.Labels
	for _, v := range s.Values {
		points = append(points, fmt.Sprintf("%.0f", v))
	}
	return points
}

// A Measure is a figure of a [Summary], or of two strategies.
type Measure string

// The measures.
const (
	MeasureFailed Measure = "failed" // calls that failed
	MeasureStable Measure = "stable" // how long after the outage the server recovered
	MeasureDown   Measure = "down"   // attempts per call that starts during the outage
	MeasureLoad   Measure = "load"   // the highest load after the outage, as a share of the capacity

	MeasureSaved      Measure = "saved"      // see Saved, and attempts that fail per call that fails without retries
	MeasureSavedAfter Measure = "savedAfter" // the median and the p99 of the latency of calls that were retried and succeeded
)

// Saved is the share of the calls which fail without retries that succeed; negative if more fail. ok
// is false if none fails.
func Saved(strategy, none Summary) (share float64, ok bool) {
	if none.Failed == 0 {
		return 0, false
	}
	return (strategy.Succeeded - none.Succeeded) / none.Failed, true
}

// Rescued is the share of the calls saved by unlimited retries that a strategy saves too: 0
// without retries, 1 with unlimited ones, negative if it does harm. ok is false if unlimited
// retries save none.
func Rescued(strategy, none, unlimited Summary) (share float64, ok bool) {
	all := unlimited.Succeeded - none.Succeeded
	if all <= 0 {
		return 0, false
	}
	return (strategy.Succeeded - none.Succeeded) / all, true
}

// Studies returns the shipped studies, in the order in which to read them.
func Studies() []Study {
	return []Study{
		classic(), brownouts(), budget(), drain(), risks(), layersStudy(), services(), tails(), pushback(),
	}
}

// FindStudy returns the shipped study with a name.
func FindStudy(name string) (Study, bool) {
	for _, s := range Studies() {
		if s.Name == name {
			return s, true
		}
	}
	return Study{}, false
}

// untilSuccess is more attempts than any simulation makes.
const untilSuccess = 1_000_000_000

// noPatience sends a retry after its backoff, whatever other calls know, as other libraries do.
const noPatience time.Duration = -1

// persistent returns a strategy that retries until it succeeds, with the same backoff for every
// code.
func persistent(name string, b grpcretry.Backoff) Strategy {
	return Strategy{
		Name:   name,
		Policy: grpcretry.Policy{MaxAttempts: untilSuccess, Backoff: b, Patience: noPatience},
		Budget: Budget{Kind: UnlimitedBudget},
	}
}

func exponential(base, most time.Duration, j grpcretry.Jitter) grpcretry.Exponential {
	return grpcretry.Exponential{Base: base, Max: most, Jitter: j}
}

const (
	ms  = time.Millisecond
	sec = time.Second
)

// outageScenario returns the scenario that most studies start from.
func outageScenario(name string) Scenario {
	return Scenario{
		Name:   name,
		Groups: []Group{{Name: "clients", Clients: 1000}},
		Servers: []Server{{
			Name:     "server",
			Capacity: 200, Window: sec,
			RejectCode: codes.Unavailable,
			Outages:    []Outage{{For: 10 * sec}},
		}},
	}
}

func classicStrategies() []Strategy {
	return []Strategy{
		persistent("constant 1ms", grpcretry.Constant(ms)),
		persistent("exponential", exponential(100*ms, 10*sec, grpcretry.NoJitter)),
		persistent("full jitter", exponential(100*ms, 10*sec, grpcretry.FullJitter)),
		persistent("equal jitter", exponential(100*ms, 10*sec, grpcretry.EqualJitter)),
		persistent("decorrelated", grpcretry.Decorrelated{Base: 100 * ms, Max: 10 * sec}),
	}
}

func classic() Study {
	s := outageScenario("classic")
	s.Title = "1,000 clients at once, a server of 200 calls a second that is down for 10 s"
	s.Strategies = classicStrategies()
	return Study{
		Name:  "classic",
		Title: "All clients call at the same time, and the server is down for 10 s",
		See: `With waits of a millisecond the server gets a million attempts a second. Exponential backoff
without jitter is worse for the clients: all retry at the same instant, the server accepts 200 of them in that
second and is idle for the next nine. Jitter alone turns the same waits into a load that the server can handle.`,
		Scenarios: []Scenario{s},
	}
}

// fleets are the numbers of processes that the studies of budgets compare.
var fleets = []float64{10, 100, 1000, 10_000}

// ofFleets returns a scenario for each fleet.
func ofFleets(s Scenario, set func(s *Scenario, processes int)) (all []Scenario) {
	for _, n := range fleets {
		one := s
		one.Name = fmt.Sprintf("%s-%.0f", s.Name, n)
		one.Groups, one.Servers = slices.Clone(s.Groups), slices.Clone(s.Servers)
		set(&one, int(n))
		all = append(all, one)
	}
	return all
}

func clientsAre(s *Scenario, processes int) { s.Groups[0].Processes = processes }

// overload returns a steady load on a server with a fifth of its capacity to spare, which loses most
// of it for 10 s.
func overload(name string, s Server) Scenario {
	s.Name = "server"
	s.Capacity = 1200
	s.Latency = Distribution{Shape: ExponentialShape, Mean: 20 * ms}
	s.Outages = []Outage{{From: 10 * sec, For: 10 * sec, Left: 0.3}}
	return Scenario{
		Name:     name,
		Duration: 50 * sec,
		Network:  Distribution{Mean: ms},
		Groups:   []Group{{Name: "clients", Rate: 1000, Deadline: 10 * sec}},
		Servers:  []Server{s},
	}
}

// alternatives returns the default, and the alternatives to its budget, which come without patience.
// Each makes up to so many attempts.
func alternatives(attempts int, p grpcretry.Policy) []Strategy {
	with := func(name string, attempts int, b Budget) Strategy {
		p := p
		p.MaxAttempts = attempts
		if name != "default" {
			p.Patience = noPatience
		}
		return Strategy{Name: name, Policy: p, Budget: b}
	}
	return []Strategy{
		with("no retries", 1, Budget{}),
		with("no budget", attempts, Budget{Kind: UnlimitedBudget}),
		with("default", attempts, Budget{}),
		with("Finagle 20% + 10/s", attempts, Budget{Kind: FinagleBudget, Ratio: 0.2, MinPerSecond: 10}),
		with("10% + 0.1/s", attempts, Budget{Kind: FinagleBudget, Ratio: 0.1, MinPerSecond: 0.1}),
		with("A6 throttle", attempts, Budget{Kind: ThrottleBudget, MaxTokens: 10, TokenRatio: 0.1}),
	}
}

func budget() Study {
	costly := overload("budget", Server{Queue: 240, RejectCost: 0.3})
	costly.Title = "1,000 calls a second, capacity 1,200, a dip to 30% for 10 s; a rejection costs a third of a call"
	long := overload("budget-queue", Server{Queue: 2400, IgnoresCancel: true})
	long.Title = "1,000 calls a second, capacity 1,200, a dip to 30% for 10 s; a queue of 2 s, and no work is cancelled"
	costly.Strategies = alternatives(4, grpcretry.Policy{AttemptTimeout: sec})
	long.Strategies = costly.Strategies
	return Study{
		Name:  "budget",
		Title: "A server that stays down because its clients retry",
		See: `The dip ends at 20 s. Without a budget, four attempts per call keep the server so busy with rejections
that it fails indefinitely (a metastable failure), until there are fewer retries. Finagle's budget has a
floor of 10 retries a second for each process, which is no limit for a thousand processes. The default earns
retries only from calls that the server answers in time, so it stops retries when the server stops serving, and
fleets of any size recover. Its cost is the reserve of each process: ten thousand processes have 30,000 retries in reserve.`,
		Scenarios: append(ofFleets(costly, clientsAre), ofFleets(long, clientsAre)...),
		Vary:      "processes",
		Values:    fleets,
		Measures:  []Measure{MeasureStable, MeasureFailed},
		Draw:      "budget-queue-1000",
	}
}

func pushback() Study {
	strategies := func() []Strategy {
		deaf := persistent("ignores it", exponential(100*ms, 10*sec, grpcretry.FullJitter))
		deaf.IgnorePushback = true
		return []Strategy{deaf, persistent("obeys", exponential(100*ms, 10*sec, grpcretry.FullJitter))}
	}
	told := func(name, title string, p Pushback) Scenario {
		s := outageScenario(name)
		s.Title = title
		s.Servers[0].Pushback = p
		s.Strategies = strategies()
		return s
	}
	return Study{
		Name:  "pushback",
		Title: "The classic outage, with a server that says when to retry",
		See: `If pushback names the exact end of the outage, all clients retry at that instant, and those that
find no room at the next one: every wait is right, and four of five attempts are wasted. If each client gets its own turn, none
is rejected twice, and the last is done when the server has had just the time that the work takes. Clients that ignore
pushback gain nothing from either.`,
		Scenarios: []Scenario{
			told("pushback-fixed", "every client is asked to wait 5 s", Pushback{Kind: FixedPushback, Delay: 5 * sec}),
			told("pushback-exact", "every client is asked to retry when there will be room", Pushback{Kind: ExactPushback}),
			told("pushback-spread", "each client gets a turn of its own", Pushback{Kind: SpreadPushback}),
		},
	}
}

// inLayers returns a scenario in which clients call A, A calls B, B calls C, and C calls D. Clients
// call A once: only the servers retry.
func inLayers(name, title string, rate float64) Scenario {
	s := Scenario{
		Name:   name,
		Title:  title,
		Groups: []Group{{Name: "clients", Rate: rate, Deadline: 10 * sec}},
	}
	for i, one := range []string{"A", "B", "C"} {
		s.Servers = append(s.Servers, Server{Name: one, Calls: &Downstream{Target: string("BCD"[i])}})
	}
	s.Servers = append(s.Servers, Server{Name: "D"})
	s.Groups[0].Strategy = &Strategy{Name: "once", Policy: grpcretry.Policy{MaxAttempts: 1}}
	return s
}

// layered returns the budgets to compare in each layer.
func layered() []Strategy {
	return alternatives(3, grpcretry.Policy{Backoff: exponential(20*ms, 200*ms, grpcretry.FullJitter)})
}

// measured returns a strategy with the first, the second and both measures of the server interceptors.
func measured(s Strategy) []Strategy {
	with := func(name string, stopCallers, oneAttempt bool) Strategy {
		s := s
		s.Name, s.StopCallers, s.OneAttempt = s.Name+", "+name, stopCallers, oneAttempt
		return s
	}
	return []Strategy{with("stop callers", true, false), with("one attempt for retries", false, true), with("both", true, true)}
}

func layersStudy() Study {
	plain := inLayers("layers", "clients call A, A calls B, B calls C, C calls D; D is down from 10 s to 20 s", 400)
	plain.Duration = 30 * sec
	plain.Network.Mean = ms
	for i := range plain.Servers {
		plain.Servers[i].Latency.Mean = ms
	}
	plain.Servers[3].Outages = []Outage{{From: 10 * sec, For: 10 * sec}}
	plain.Strategies = layered()
	with := plain
	with.Name = "layers-measures"
	with.Title = "clients call A, A calls B, B calls C, C calls D; the servers have interceptors"
	with.Strategies = append(measured(plain.Strategies[1]), measured(plain.Strategies[2])...)
	each := func(s *Scenario, processes int) {
		for i := range 3 {
			s.Servers[i].Replicas = processes
		}
	}
	return Study{
		Name:  "layers",
		Title: "Retries on every layer multiply",
		See: `Three layers with three attempts each call the failing server 27 times for each call of a client. A
budget in each layer prevents most of that, without any layer knowing about the others, as long as each process
makes more calls than its reserve covers. The server interceptors let the layers know. If a layer that gave up forbids
its caller to retry, 3 attempts are left instead of 27; if a layer makes one attempt for requests that are retries, 7: with
any budget and any fleet.`,
		Scenarios: append(ofFleets(plain, each), ofFleets(with, each)...),
		Further:   []Scenario{proof()},
		Vary:      "processes",
		Values:    fleets,
		Measures:  []Measure{MeasureDown},
		Draw:      "layers-100",
	}
}

// proof returns a scenario like the four processes that make layers runs, which call one another over the
// loopback network for ten seconds.
func proof() Scenario {
	s := inLayers("layers-proof", "one process for each of A, B, C and D; D is down from 3 s to 7 s", 40)
	s.Duration = 10 * sec
	s.Network.Mean = ms / 10
	s.Groups[0].Even = true
	s.Servers[3].Outages = []Outage{{From: 3 * sec, For: 4 * sec}}
	all := layered()
	without, budgets := all[1], all[2]
	without.Name, budgets.Name = "no library", "budgets"
	measures := measured(without)
	stop, one := measures[0], measures[1]
	stop.Name, one.Name = "stop callers", "one attempt for retries"
	without.Policy.Backoff = exponential(20*ms, 200*ms, grpcretry.ProportionalJitter) // gRPC's own retries have this jitter
	everything := measured(budgets)[2]
	everything.Name = "everything"
	budgets.Policy.Patience = noPatience
	s.Strategies = []Strategy{without, budgets, stop, one, everything}
	return s
}

// services returns the study of what the measures between services cost.
func services() Study {
	in := func(name, title string, set func(*Scenario)) Scenario {
		s := inLayers("services-"+name, title, 600)
		s.Duration = 25 * sec
		s.Network.Mean = ms / 2
		for i := range s.Servers {
			s.Servers[i].Replicas = 3
			s.Servers[i].Latency.Mean = ms
		}
		set(&s)
		all := alternatives(4, grpcretry.Policy{})[:3]
		s.Strategies = append(all, measured(all[2])...)
		for i := range s.Strategies {
			s.Strategies[i].Untried = true
		}
		return s
	}
	blip := func(length time.Duration) Scenario {
		return in("blip-"+length.String(), fmt.Sprintf("D is down for %d ms", length.Milliseconds()), func(s *Scenario) {
			s.Servers[3].Outages = []Outage{{From: 12 * sec, For: length}}
		})
	}
	// C waits for D within the deadline of its request: these scenarios show what its callers see of that.
	down := func(length time.Duration) Scenario {
		title := fmt.Sprintf("D is down for %v; the clients have a deadline of 5 s", length)
		return in("down-"+length.String(), title, func(s *Scenario) {
			s.Groups[0].Deadline = 5 * sec
			s.Servers[3].Outages = []Outage{{From: 12 * sec, For: length}}
		})
	}
	bad := func(name, title string, servers ...int) Scenario {
		return in(name, title, func(s *Scenario) {
			for _, i := range servers {
				s.Servers[i].Outages = []Outage{{From: 12 * sec, For: 10 * sec, Replica: 1}}
			}
		})
	}
	return Study{
		Name:  "services",
		Title: "What the measures between services cost",
		See: `If only the service next to the failure retries, its own waits must outlast the failure. With patience they do: with the
default policy and "do not retry", a failure of up to 2 s costs no call. One bad replica
of three costs nothing, as long as each attempt goes to another replica. If bad replicas are in several
services at the same time, as when a zone fails, then the retries of one service need those of the next: one attempt for
each retry then costs up to a quarter of the calls that retries would save. Both measures together cost none: a service that has
given up says so, and a retry that follows any other response is work like any other.`,
		Scenarios: []Scenario{
			blip(100 * ms), blip(300 * ms), blip(500 * ms),
			bad("replica", "one replica of three of D fails every call for 10 s", 3),
			bad("replicas", "one replica of three of C and one of D fail every call for 10 s", 2, 3),
			bad("zone", "one replica of three of B, C and D fails every call for 10 s", 1, 2, 3),
			down(2 * sec), down(10 * sec),
		},
		Draw: "services-zone",
	}
}

// slowResponses returns a load of a third of three replicas' capacity. Most responses take 10 ms,
// but one in a hundred takes more than ten times as long.
func slowResponses(name string) Scenario {
	return Scenario{
		Name:    name,
		Network: Distribution{Mean: ms / 2},
		Groups:  []Group{{Name: "clients", Rate: 1000, Deadline: 2 * sec, Processes: 4}},
		Servers: []Server{{
			Name:     "server",
			Replicas: 3,
			Capacity: 1000, Queue: -1,
			Latency: Distribution{Shape: ParetoShape, Mean: 18 * ms, Tail: 1.5},
		}},
	}
}

func hedgedAfter(name string, d time.Duration, b Budget) Strategy {
	return hedged(name, Hedging{Kind: HedgeAfter, Delay: d}, b)
}

func hedgedAt(name string, q float64, b Budget) Strategy {
	return hedged(name, Hedging{Kind: HedgeAtQuantile, Quantile: q, AtLeast: 5 * ms, AtMost: sec}, b)
}

// hedged returns a strategy with one hedge, which spends from b alone, unless that is the default.
func hedged(name string, h Hedging, b Budget) Strategy {
	if b.Kind != DefaultBudget {
		h.Budget = Budget{Kind: UnlimitedBudget}
	}
	return Strategy{Name: name, Policy: grpcretry.Policy{MaxAttempts: 2}, Hedging: &h, Budget: b}
}

func tails() Study {
	luck := slowResponses("tail")
	luck.Title = "1,000 calls a second to 3 replicas that could do 3,000, where one response in a hundred takes ten times as long"
	luck.Groups[0].Stop = 120 * sec
	luck.Strategies = []Strategy{
		{Name: "without hedging"},
		hedgedAfter("after 50 ms", 50*ms, Budget{}),
		hedgedAt("0.95-quantile", 0.95, Budget{}),
		hedgedAt("0.99-quantile", 0.99, Budget{}),
	}
	slow := slowResponses("tail-slow")
	slow.Title = "1,000 calls a second to the same 3 replicas; for 10 s everything takes 2.4 times as long, and no work is cancelled"
	slow.Seed = 2 // an average one
	slow.Duration = 60 * sec
	slow.Servers[0].IgnoresCancel = true
	slow.Servers[0].Outages = []Outage{{From: 20 * sec, For: 10 * sec, Left: 0.42}}
	unlimited := Budget{Kind: UnlimitedBudget}
	finagle := Budget{Kind: FinagleBudget, Ratio: 0.2, MinPerSecond: 10}
	slow.Strategies = []Strategy{
		{Name: "without hedging"},
		hedgedAfter("after 50 ms, no budget", 50*ms, unlimited),
		hedgedAt("0.95-quantile, no budget", 0.95, unlimited),
		hedgedAt("0.95-quantile, 20% + 10/s", 0.95, finagle),
		hedgedAfter("after 50 ms", 50*ms, Budget{}),
		hedgedAt("0.95-quantile", 0.95, Budget{}),
	}
	return Study{
		Name:  "tail",
		Title: "A second attempt when the first is slow",
		Tail:  true,
		See: `Nearly all responses are fast, and a slow one is bad luck that the next replica does not share. A
second attempt for the slowest twentieth of the calls halves the p99 and cuts the p99.9 to a sixth, for less than 5%
more attempts; hedging later costs less and helps only calls that are slower still. When everything is slow, every call
looks like one to hedge: without a budget the hedges use up the remaining capacity, and calls fail that would only have
been slow. With the default budget the p99 is lower than without hedging.`,
		Scenarios: []Scenario{luck, slow},
	}
}
