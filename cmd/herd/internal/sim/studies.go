package sim

import (
	"fmt"
	"math"
	"slices"
	"time"

	"google.golang.org/grpc/codes"

	"github.com/grpcretry/grpcretry"
)

// A Study is scenarios that belong together, with what to see in them.
type Study struct {
	Name, Title, See string
	Scenarios        []Scenario

	// Vary, if it is not empty, says what grows from one scenario to the next while all else
	// stays the same, and Values how. There may be several such rows of len(Values) scenarios,
	// one after the other. Measures are what to look at in them, and Draw is the name of the
	// scenario to draw; "" draws curves.
	Vary     string
	Values   []float64
	Measures []Measure
	Draw     string

	// Tail says that the study is about how long the slowest calls take, rather than about what
	// the server sees.
	Tail bool
}

// A Measure is a figure of a [Summary], or of two strategies.
type Measure string

// The measures.
const (
	MeasureAttempts Measure = "attempts" // all attempts
	MeasureDone     Measure = "done"     // when the last call was over
	MeasureFailed   Measure = "failed"   // calls that failed
	MeasureStable   Measure = "stable"   // how long after the outage the server recovered
	MeasureDown     Measure = "down"     // attempts per call during the outage
	MeasureRescued  Measure = "rescued"  // see Rescued
)

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

// Studies are those that are shipped, in the order in which to read them.
func Studies() []Study {
	return []Study{
		classic(), budget(), defaults(), layers(), tails(), pushback(), aws(), thousands(), mixed(), multiplier(), limit(),
	}
}

// FindStudy is the shipped study of a name.
func FindStudy(name string) (Study, bool) {
	for _, s := range Studies() {
		if s.Name == name {
			return s, true
		}
	}
	return Study{}, false
}

// untilSuccess is attempts enough for any simulation.
const untilSuccess = 1_000_000_000

// persistent is a strategy that retries until it succeeds, after the same backoff whatever
// the code.
func persistent(name string, b grpcretry.Backoff) Strategy {
	return Strategy{
		Name:   name,
		Policy: grpcretry.Policy{MaxAttempts: untilSuccess, Backoff: b},
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

// outageScenario is the one that most studies begin with.
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
		Title: "Everybody comes at once, and the server is down for 10 s",
		See: `Without a wait worth the name the server is asked a million times a second. Exponential
backoff alone makes it worse for the clients: all come back in the same instant, the server takes 200 of
them in that second and is idle for the next nine. Jitter, and nothing else, turns the same waits into a
load that the server can take.`,
		Scenarios: []Scenario{s},
	}
}

func aws() Study {
	on := func(s Strategy) Strategy {
		s.Policy.Codes = []codes.Code{codes.Aborted}
		return s
	}
	study := Study{
		Name:  "aws",
		Title: "The 2015 experiment: writers of one row, each of whom must win once",
		See: `A writer reads a row, and writes it if nobody else has since. N writers need at least N
writes; all others are lost. No backoff is quick and wasteful, exponential backoff without jitter is neither
quick nor frugal. Full and equal jitter make the fewest calls, full jitter is quicker; decorrelated is as quick and makes more. The waits are
those of the experiment: its "base 5 ms" is doubled before the first wait, so here exponentials begin at 10 ms.`,
		Vary:     "writers",
		Measures: []Measure{MeasureAttempts, MeasureDone},
	}
	for n := 10; n <= 190; n += 10 {
		study.Values = append(study.Values, float64(n))
		study.Scenarios = append(study.Scenarios, Scenario{
			Name:    fmt.Sprintf("aws-%d", n),
			Title:   fmt.Sprintf("%d writers of one row, 10 ± 2 ms of network", n),
			Network: Distribution{Shape: NormalShape, Mean: 10 * ms, Spread: 2 * ms},
			Groups:  []Group{{Name: "writers", Clients: n}},
			Servers: []Server{{Name: "row", Optimistic: true}},
			Strategies: []Strategy{
				on(persistent("none", grpcretry.Constant(0))),
				on(persistent("exponential", exponential(10*ms, 2*sec, grpcretry.NoJitter))),
				on(persistent("equal jitter", exponential(10*ms, 2*sec, grpcretry.EqualJitter))),
				on(persistent("full jitter", exponential(10*ms, 2*sec, grpcretry.FullJitter))),
				on(persistent("decorrelated", grpcretry.Decorrelated{Base: 5 * ms, Max: 2 * sec})),
			},
		})
	}
	return study
}

func thousands() Study {
	five := func(name string, b grpcretry.Backoff) Strategy {
		s := persistent(name, b)
		s.Policy.MaxAttempts = 5
		return s
	}
	return Study{
		Name:  "thousands",
		Title: "10,000 clients with 5 attempts each, seen in buckets of 50 ms",
		See: `Five attempts are all that a client has, so a retry that comes at a bad moment is lost for good.
Without jitter all 10,000 spend theirs in the same five instants: whoever is not among the few that the
server takes in that instant has one chance less. Jitter lowers the peaks, and more calls succeed.`,
		Scenarios: []Scenario{{
			Name:   "thousands",
			Title:  "10,000 clients at once with 5 attempts, a server of 10,000 calls a second that is down for 300 ms",
			Bucket: 50 * ms,
			Groups: []Group{{Name: "clients", Clients: 10_000}},
			Servers: []Server{{
				Name:     "server",
				Capacity: 10_000, Window: 50 * ms,
				RejectCode: codes.Unavailable,
				Outages:    []Outage{{For: 300 * ms}},
			}},
			Strategies: []Strategy{
				five("constant 100ms", grpcretry.Constant(100*ms)),
				five("exponential", exponential(100*ms, 10*sec, grpcretry.NoJitter)),
				five("full jitter", exponential(100*ms, 10*sec, grpcretry.FullJitter)),
				five("equal jitter", exponential(100*ms, 10*sec, grpcretry.EqualJitter)),
				five("A6 ±20%", exponential(100*ms, 10*sec, grpcretry.ProportionalJitter)),
				five("decorrelated", grpcretry.Decorrelated{Base: 100 * ms, Max: 10 * sec}),
			},
		}},
	}
}

// fleets are the numbers of processes that the studies of budgets compare.
var fleets = []float64{10, 100, 1000, 10_000}

// ofFleets is a scenario for each fleet.
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

// overload is a steady load on a server with a fifth of its capacity to spare, which loses
// most of it for 10 s.
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

// alternatives are the strategies that the default budget is compared with, and itself. Each
// makes up to so many attempts.
func alternatives(attempts int, p grpcretry.Policy) []Strategy {
	with := func(name string, attempts int, b Budget) Strategy {
		p := p
		p.MaxAttempts = attempts
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
	long.Title = "the same load on a server with a queue of 2 s that works on calls that were given up"
	costly.Strategies = alternatives(4, grpcretry.Policy{AttemptTimeout: sec})
	long.Strategies = costly.Strategies
	return Study{
		Name:  "budget",
		Title: "A server that stays down because its clients retry",
		See: `The dip is over at 20 s. Without a budget, four attempts per call keep the server so busy rejecting
that it goes on failing indefinitely (a metastable failure), and only fewer retries heal it. Finagle's budget has a
floor of 10 retries a second for each process, which is no limit for a thousand processes. The default earns
retries only from calls that the server answers in time, so it stops when the server does, and recovers with
fleets of any size. What remains is the reserve of each process: ten thousand have 30,000 retries in hand.`,
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
		Title: "The classic outage, with a server that says when to come back",
		See: `Told the exact end of the outage, all clients come in that very moment, and those who find no room
are told the next moment: every wait is right and four of five attempts are wasted. Given a turn each, no client
is rejected twice, and the last is done when the server has had just the time that the work takes. A
client that does not listen gains nothing from either.`,
		Scenarios: []Scenario{
			told("pushback-fixed", "everyone is told 5 s", Pushback{Kind: FixedPushback, Delay: 5 * sec}),
			told("pushback-exact", "everyone is told when there will be room", Pushback{Kind: ExactPushback}),
			told("pushback-spread", "each is given a turn", Pushback{Kind: SpreadPushback}),
		},
	}
}

func layers() Study {
	chain := func(name, title string, stop bool) Scenario {
		s := Scenario{
			Name:       name,
			Title:      title,
			Duration:   30 * sec,
			Network:    Distribution{Mean: ms},
			Groups:     []Group{{Name: "clients", Rate: 400, Deadline: 10 * sec}},
			Strategies: alternatives(3, grpcretry.Policy{Backoff: exponential(20*ms, 200*ms, grpcretry.FullJitter)}),
		}
		for i, one := range []string{"A", "B", "C", "D"} {
			server := Server{Name: one, Latency: Distribution{Mean: ms}}
			if i < 3 {
				server.Calls = &Downstream{Target: string("ABCD"[i+1]), StopCallers: stop}
			} else {
				server.Outages = []Outage{{From: 10 * sec, For: 10 * sec}}
			}
			s.Servers = append(s.Servers, server)
		}
		// Clients call A once: what is multiplied are the calls between the servers.
		s.Groups[0].Strategy = &Strategy{Name: "once", Policy: grpcretry.Policy{MaxAttempts: 1}}
		return s
	}
	each := func(s *Scenario, processes int) {
		for i := range 3 {
			s.Servers[i].Replicas = processes
		}
	}
	plain := chain("layers", "clients call A, A calls B, B calls C, C calls D; D is down from 10 s to 20 s", false)
	stopped := chain("layers-stop", "the same, and a layer that has retried tells its caller not to", true)
	return Study{
		Name:  "layers",
		Title: "Retries on every layer multiply",
		See: `Three layers with three attempts each ask the failing server 27 times for each call of a client. A
budget in each layer leaves little of that, without any layer knowing about the others, as long as each process
makes more calls than its reserve covers. A layer that says "do not retry, I have" with its failure takes away the
product, whatever the budget and the fleet: 3 attempts, not 27.`,
		Scenarios: append(ofFleets(plain, each), ofFleets(stopped, each)...),
		Vary:      "processes",
		Values:    fleets,
		Measures:  []Measure{MeasureDown},
		Draw:      "layers-100",
	}
}

func mixed() Study {
	s := outageScenario("mixed")
	s.Title = "the classic outage; half of the clients use full jitter, the others what is compared"
	good := persistent("full jitter", exponential(100*ms, 10*sec, grpcretry.FullJitter))
	s.Groups = []Group{
		{Name: "full jitter", Clients: 500, Strategy: &good},
		{Name: "others", Clients: 500},
	}
	s.Strategies = []Strategy{
		persistent("full jitter", exponential(100*ms, 10*sec, grpcretry.FullJitter)),
		persistent("exponential", exponential(100*ms, 10*sec, grpcretry.NoJitter)),
		persistent("constant 1s", grpcretry.Constant(sec)),
		persistent("constant 10ms", grpcretry.Constant(10*ms)),
	}
	return Study{
		Name:  "mixed",
		Title: "What good manners gain among bad ones",
		See: `Beside clients that come back all at once after long waits, those with jitter win: they find
the server free between the bursts, and are done long before. Beside clients that hammer they lose: whoever asks
a hundred times a second gets every free place. Jitter is no handicap among the careless, only among the
greedy, and against those only the server can help.`,
		Scenarios: []Scenario{s},
	}
}

// The winners of the search for the policy that comes nearest to the limit, with the
// server's help and without; see docs/herd.md for how they were found.
func limitStrategies() []Strategy {
	return []Strategy{
		persistent("default backoff", grpcretry.Exponential{}),
		persistent("default ×4", grpcretry.Exponential{Multiplier: 4}),
		persistent("equal 4s", exponential(4*sec, 4*sec, grpcretry.EqualJitter)),
		persistent("decorrelated 1s..7s", grpcretry.Decorrelated{Base: sec, Max: 7 * sec}),
		persistent("equal 6s..7s", exponential(6*sec, 7*sec, grpcretry.EqualJitter)),
	}
}

func limit() Study {
	alone := outageScenario("limit")
	alone.Title = "the classic outage, and what comes nearest to the limit without any help"
	alone.Strategies = limitStrategies()
	helped := outageScenario("limit-pushback")
	helped.Title = "the same, with a server that gives each client its turn"
	helped.Servers[0].Pushback = Pushback{Kind: SpreadPushback}
	helped.Strategies = limitStrategies()[:1]
	far := outageScenario("limit-network")
	far.Title = "the same over a network of 5 to 45 ms"
	far.Network = Distribution{Shape: UniformShape, Mean: 25 * ms, Spread: 20 * ms}
	far.Servers[0].Pushback = Pushback{Kind: SpreadPushback}
	far.Strategies = limitStrategies()[:1]
	return Study{
		Name:  "limit",
		Title: "How near to the possible",
		See: `After 10 s of outage, 1,000 calls at 200 a second take 5 s: nobody can do it in less than 15 s, nor
with less than one wasted attempt for each client that came during the outage. A server that gives
turns reaches that limit. Without it the longer waits win: what is saved are the many short ones at the
start of the outage, which nobody needed.`,
		Scenarios: []Scenario{alone, helped, far},
	}
}

func defaults() Study {
	load := func(name, title string, server Server) Scenario {
		server.Name, server.Queue, server.RejectCost = "server", 240, 0.3
		server.Latency = Distribution{Shape: ExponentialShape, Mean: 20 * ms}
		return Scenario{
			Name:       "defaults-" + name,
			Title:      title,
			Duration:   28 * sec,
			Bucket:     200 * ms,
			Network:    Distribution{Mean: ms},
			Groups:     []Group{{Name: "clients", Rate: 1000, Deadline: 10 * sec}},
			Servers:    []Server{server},
			Strategies: alternatives(4, grpcretry.Policy{}),
		}
	}
	study := Study{
		Name:  "defaults",
		Title: "What a budget must not cost",
		See: `A budget must leave the retries that help. A retry that succeeds returns its token to the default
budget, so all calls that meet one bad replica of three are rescued, and a blip of 200 ms goes unnoticed. In a blip
of a second a busy process spends what ten seconds have earned on calls that come too early, and has nothing left for
those that a retry would rescue; a process with a few calls a second has its reserve. Finagle's budget rescues those
calls, and pays for it in the study budget. The smaller ones hold back most of what would help.`,
		Vary:     "processes",
		Values:   fleets,
		Measures: []Measure{MeasureRescued},
		Draw:     "defaults-replica-10",
	}
	for _, d := range []time.Duration{200 * ms, sec, 3 * sec} {
		s := load("blip-"+d.String(), fmt.Sprintf("1,000 calls a second, capacity 2,000, and nothing for %v", d),
			Server{Capacity: 2000, Outages: []Outage{{From: 16 * sec, For: d}}})
		study.Scenarios = append(study.Scenarios, ofFleets(s, clientsAre)...)
	}
	replica := load("replica", "the same load on three replicas, one of which fails all calls for 10 s",
		Server{Capacity: 1000, Replicas: 3, Outages: []Outage{{Replica: 1, From: 16 * sec, For: 10 * sec}}})
	study.Scenarios = append(study.Scenarios, ofFleets(replica, clientsAre)...)
	return study
}

func multiplier() Study {
	blip := func(outage time.Duration) Scenario {
		s := outageScenario("multiplier-" + outage.String())
		s.Title = fmt.Sprintf("1,000 clients at once with 4 attempts, a server of 2,000 calls a second that is down for %v", outage)
		s.Bucket = 100 * ms
		s.Servers[0].Capacity, s.Servers[0].Window = 2000, 100*ms
		s.Servers[0].Outages[0].For = outage
		for _, multiplier := range []float64{2, 3, 4} {
			s.Strategies = append(s.Strategies, Strategy{
				Name:   fmt.Sprintf("full jitter ×%v", multiplier),
				Policy: grpcretry.Policy{Backoff: grpcretry.Exponential{Multiplier: multiplier}},
				Budget: Budget{Kind: UnlimitedBudget},
			})
		}
		return s
	}
	return Study{
		Name:  "multiplier",
		Title: "Four attempts that double are soon over",
		See: `Four attempts with waits of up to 100, 200 and 400 ms are spent after a third of a second on
average. Multiplied by four instead of two, the same number of attempts outlasts more, and asks less often.`,
		Scenarios: []Scenario{blip(300 * ms), blip(sec)},
	}
}

// slowAnswers is a load of a third of what three replicas can do, whose answers take 10 ms,
// but one in a hundred more than ten times as long.
func slowAnswers(name string) Scenario {
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

// hedged is a strategy whose hedges spend from b alone, unless that is the default.
func hedged(name string, h Hedging, b Budget) Strategy {
	if b.Kind != DefaultBudget {
		h.Budget = Budget{Kind: UnlimitedBudget}
	}
	return Strategy{Name: name, Hedging: &h, Budget: b}
}

func tails() Study {
	luck := slowAnswers("tail")
	luck.Title = "1,000 calls a second to 3 replicas that could do 3,000, where one response in a hundred takes ten times as long"
	luck.Groups[0].Stop = 120 * sec
	luck.Strategies = []Strategy{
		{Name: "without hedging"},
		hedgedAfter("after 50 ms", 50*ms, Budget{}),
		hedgedAt("0.95-quantile", 0.95, Budget{}),
		hedgedAt("0.99-quantile", 0.99, Budget{}),
	}
	slow := slowAnswers("tail-slow")
	slow.Title = "the same, and for 10 s everything takes 2.4 times as long; handlers go on with calls that were given up"
	slow.Seed = 2 // neither a lucky one nor an unlucky one
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
		See: `Nearly all responses are quick, and a slow one is bad luck that the next replica does not share. A
second attempt for the slowest twentieth of the calls halves the p99 and takes five sixths off the p99.9, for
less than 5% more attempts; hedging later costs less and helps only those that are slower still. When everything is
slow, every call looks like one to hedge: without a budget the hedges take what capacity was left, and calls fail
that would only have been slow. With the default budget the slow time is shorter than without hedging.`,
		Scenarios: []Scenario{luck, slow},
	}
}

// A Limit is what no policy can better.
type Limit struct {
	P99, Done time.Duration // when 99 % of the calls, and all of them, can be done
	Wasted    int           // attempts that must fail
}

// LimitOf is the physical limit of a scenario with one server and clients that call once,
// as [Run] would have it: from the capacity after the outages and the calls that begin in
// one. ok is false for other scenarios.
func LimitOf(s Scenario) (l Limit, ok bool) {
	if s.check(&Strategy{}) != nil || len(s.Servers) != 1 || s.Servers[0].Capacity == 0 || s.Servers[0].Replicas > 1 {
		return Limit{}, false
	}
	gate := newGate(&s.Servers[0], 0)
	total := 0
	for _, g := range s.Groups {
		if g.Rate > 0 || g.Spread > 0 || g.Start > 0 {
			return Limit{}, false
		}
		total += g.Clients
	}
	if gate.pace[0].down {
		l.Wasted = total
	}
	l.P99 = gate.earliest(math.Ceil(0.99 * float64(total)))
	l.Done = gate.earliest(float64(total))
	return l, true
}

// earliest is when so many calls can have been accepted, if they come one after another.
func (g *Gate) earliest(calls float64) time.Duration {
	need := calls / g.server.Capacity * float64(time.Second)
	return time.Duration((&Gate{pace: g.pace}).done(0, need))
}
