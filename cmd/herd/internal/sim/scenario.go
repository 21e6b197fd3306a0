package sim

import (
	"strings"
	"time"
	"unicode"

	"google.golang.org/grpc/codes"

	"github.com/grpcretry/grpcretry"
)

// A Scenario describes a simulation: groups of clients that call servers, and the strategies that
// are compared. [Run] checks it; an error names the field and the value.
type Scenario struct {
	Name  string // one word, for files and tables
	Title string // one line
	See   string // what it shows

	// Seed starts the random numbers: with the same seed everything happens again in the same way.
	// Each purpose has numbers of its own, so that calls arrive at the same times under every
	// strategy.
	Seed uint64

	// Duration ends the simulation, in simulated time, at most a day. 0 means that it ends with the
	// last call; then every group with a Rate needs a Stop.
	Duration time.Duration

	// Bucket is the time that one entry of the series covers; 0 means a second. At least a
	// millisecond.
	Bucket time.Duration

	// Network is the latency of a message, in each direction.
	Network Distribution

	Groups  []Group  // of clients, at least one
	Servers []Server // at least one

	// Strategies are compared: each in turn applies to the groups and downstream calls that have no
	// strategy of their own.
	Strategies []Strategy
}

// A Strategy says how clients retry: with a policy of the library, and a budget.
type Strategy struct {
	Name string // a few words, for tables and pictures

	// Policy is the policy of every call. Its Budget must be nil: every process gets a budget of its
	// own, as Budget describes.
	Policy grpcretry.Policy

	Budget Budget // the kind of budget that every process has

	// Hedging says when further attempts are sent while the first is slow; nil means never.
	// Policy.Hedging must be nil: every process gets a delay of its own, as Hedging describes.
	Hedging *Hedging

	// IgnorePushback hides pushback from the engine, as if a client could not read
	// grpc-retry-pushback-ms.
	IgnorePushback bool

	// Untried sends attempts to replicas that the call has not tried, as long as there are any, like
	// the load-balancing policy of package balancer. Without it they take turns, like round_robin.
	Untried bool

	// StopCallers and OneAttempt are the measures of the library's server interceptors against retries
	// that multiply from one service to the next, taken by the servers that call others under this
	// strategy. The library has both on by default; here both are off, as in a server without the
	// interceptors. A Downstream can turn them on for one server.
	//
	// With StopCallers the response to a request that fails after its downstream call gave up says "do
	// not retry", see [grpcretry.UnaryServerInterceptor]. With OneAttempt a request that is a retry
	// after no response, or that is made for one further up, gets a single attempt downstream, and with
	// OneAttempt alone each request that is a retry, see [grpcretry.UnaryServerInterceptor].
	StopCallers, OneAttempt bool
}

// A Group is a number of clients that are alike.
type Group struct {
	Name string // one or two words, for tables

	// Clients make one call each: all at Start, or each at a random time within Spread
	// after it.
	Clients int
	Spread  time.Duration

	// Rate, instead of Clients, is the number of calls that arrive per second from Start to Stop,
	// regardless of how earlier ones end: at random (a Poisson process), or evenly if Even is set.
	// Stop 0 means the end of the scenario.
	Rate float64
	Even bool

	Start, Stop time.Duration // simulated time; Stop is for Rate

	Deadline time.Duration // of each call, from its start; 0: none
	Target   string        // the name of a server; "" is the first

	// Processes is the number of client processes; calls take turns among them. Every process has a
	// budget of its own, as each Retrier has. 0 means 1.
	Processes int

	// With names an earlier group from whose processes the calls come, so that both share budgets and
	// what is known about the target. Processes and Strategy must be zero.
	With string

	// Strategy is the group's own strategy; nil means the one that is compared.
	Strategy *Strategy
}

// A Server is a service: one process, or several that are alike. Each works in one of two ways.
//
// With a Window it counts: it accepts at most Capacity × Window calls in each window of
// its clock and rejects the rest. Accepted calls take Latency, and wait for nobody.
//
// Without a Window it has workers, as many as it needs to serve Capacity calls a second that take
// Latency each, at least one, and calls wait for a worker in a queue with Queue places. The service
// time is Latency, stretched so that the workers together serve exactly Capacity.
type Server struct {
	Name string // for Target, tables and pictures

	// Replicas is the number of its processes; 0 means 1. Each has the Capacity, Window, Queue and
	// Pushback below. Every client process sends its attempts to them in turn, starting with any, as
	// gRPC's round_robin does, which knows neither hedges nor loads and skips only replicas without
	// a connection; see also Strategy.Untried.
	Replicas int

	Capacity float64       // calls per second; 0 means no limit
	Window   time.Duration // in which calls are counted; see above
	Queue    int           // places to wait without a Window; beyond them calls are rejected; -1: no limit
	Latency  Distribution  // the service time

	// RejectCost is the cost of a rejection, as a share of the cost of a call: 0 to 1. A call has
	// been read, and perhaps authenticated, before it is rejected.
	RejectCost float64
	RejectCode codes.Code // of calls over capacity; OK (0) means RESOURCE_EXHAUSTED

	// IgnoresCancel stands for a handler that ignores its context: it keeps working on calls whose
	// clients have given up. Otherwise they leave the queue, and the worker.
	IgnoresCancel bool

	Outages  []Outage // in order of time, for each replica
	Pushback Pushback // for the clients of rejected calls

	// Calls is the downstream call that the handler makes before it responds, with the result of
	// that call.
	Calls *Downstream
}

// An Outage is a time in which a server can do less.
type Outage struct {
	From, For time.Duration // start and length
	Left      float64       // the share of Capacity that is left, 0 to 1

	// Replica is the number of the replica that has the outage, from 1; 0 means all.
	Replica int

	// If Left is 0, calls fail immediately with Code, also those in the server at From; OK (0) means
	// UNAVAILABLE. With Silent there is no response at all instead, so that clients wait for their
	// timeout.
	Code   codes.Code
	Silent bool

	// SlowStart is the time in which, after the outage, the capacity grows back evenly from Left to
	// all of it.
	SlowStart time.Duration

	// Errors is the share of the calls that fail immediately with Code, chosen at random, 0 to 1. Left
	// must then be above 0.
	Errors float64
}

// Pushback is a server's instruction to the clients of calls that it rejects. It is sent as
// [grpcretry.SetPushback] sends it.
type Pushback struct {
	Kind  PushbackKind  // the rule
	Delay time.Duration // for FixedPushback

	// Rate is the number of calls per second that SpreadPushback invites; 0 means Capacity.
	Rate float64
}

// A PushbackKind is a rule for a server's pushback.
type PushbackKind string

// The kinds of pushback. ExactPushback and SpreadPushback need a server that knows when its outage
// ends.
const (
	NoPushback     PushbackKind = ""       // none
	FixedPushback  PushbackKind = "fixed"  // always Delay
	ExactPushback  PushbackKind = "exact"  // when there will be room: the same moment for all
	SpreadPushback PushbackKind = "spread" // a turn for each, one after the other
	StopPushback   PushbackKind = "stop"   // do not retry
)

// A Downstream call is made by a server for each call that it has accepted, within that call's
// deadline.
type Downstream struct {
	Target   string        // the name of another server; no server may call itself in a circle
	Deadline time.Duration // of the call; 0: only that of the call being served

	// StopCallers and OneAttempt turn on a measure in this server, as in a Strategy, even if the
	// strategy has it off.
	StopCallers, OneAttempt bool

	Strategy *Strategy // of the downstream calls; nil means the one that is compared
}

// CodeName returns a status code's name on the wire, such as "UNAVAILABLE".
func CodeName(c codes.Code) string {
	switch c {
	case codes.OK:
		return "OK"
	case codes.Canceled:
		return "CANCELLED"
	}
	var b strings.Builder
	for i, r := range c.String() {
		if i > 0 && unicode.IsUpper(r) {
			b.WriteByte('_')
		}
		b.WriteRune(unicode.ToUpper(r))
	}
	return b.String()
}

// A Distribution describes random durations of at least 0. The zero value is always 0.
type Distribution struct {
	Shape Shape         // the kind of distribution
	Mean  time.Duration // the average

	// Spread is the half width of UniformShape, and the standard deviation of NormalShape
	// and LogNormalShape.
	Spread time.Duration

	// Tail is the exponent of ParetoShape, above 1: the smaller, the heavier the tail.
	Tail float64
}

// A Shape is a kind of [Distribution].
type Shape string

// The shapes of a [Distribution].
const (
	ConstantShape    Shape = ""            // always Mean
	UniformShape     Shape = "uniform"     // Mean ± Spread
	NormalShape      Shape = "normal"      // its absolute value: times are not negative
	ExponentialShape Shape = "exponential" // as service times in queueing theory
	LogNormalShape   Shape = "lognormal"   // as latencies of real servers mostly are
	ParetoShape      Shape = "pareto"      // with a heavy tail
)

// A Budget limits the retries of each process of a group. Each field below belongs to the kinds that
// its comment names; with other kinds it must be zero.
type Budget struct {
	Kind BudgetKind // the kind of budget

	Ratio, MinPerSecond float64       // RatioBudget, as in grpcretry.RatioBudget; FinagleBudget
	Reserve             float64       // RatioBudget
	Window              time.Duration // RatioBudget, FinagleBudget; 0 means 10 s

	MaxTokens, TokenRatio float64 // ThrottleBudget

	PerSecond float64 // RateBudget
	Burst     int     // RateBudget

	Limit int // ConcurrencyBudget

	// New makes the budget of one process, of any type; then Kind must be "".
	New func() (grpcretry.Budget, error)
}

// A BudgetKind names one of the library's budgets, or one that they are compared with.
type BudgetKind string

// The kinds of budget.
const (
	DefaultBudget     BudgetKind = ""            // the library's default
	UnlimitedBudget   BudgetKind = "unlimited"   // grpcretry.Unlimited
	RatioBudget       BudgetKind = "ratio"       // grpcretry.NewRatioBudget; with all fields 0 the library's default
	FinagleBudget     BudgetKind = "finagle"     // Finagle's and Linkerd's, for comparison: every call earns, even if it fails
	ThrottleBudget    BudgetKind = "throttle"    // grpcretry.NewThrottle, as gRPC's retryThrottling
	RateBudget        BudgetKind = "rate"        // grpcretry.NewRateBudget
	ConcurrencyBudget BudgetKind = "concurrency" // grpcretry.NewConcurrencyBudget
)

// Hedging says how a [Strategy] hedges: it is [grpcretry.Hedging], with a description of the delay,
// so that every process has a delay of its own. All methods count as safe.
type Hedging struct {
	Kind HedgingKind // the kind of delay

	Delay time.Duration // HedgeAfter; 0 sends all attempts immediately

	Quantile        float64       // HedgeAtQuantile, between 0 and 1
	AtLeast, AtMost time.Duration // HedgeAtQuantile; AtMost 0 means no upper limit

	// Budget limits the hedges of each process, in addition to the strategy's Budget; "" means the
	// library's default.
	Budget Budget

	// New makes the delay of one process, of any type; then Kind must be "".
	New func() grpcretry.HedgeDelay
}

// A HedgingKind names one of the library's delays.
type HedgingKind string

// The kinds of [Hedging].
const (
	HedgeAfter      HedgingKind = "after"    // grpcretry.HedgeAfter
	HedgeAtQuantile HedgingKind = "quantile" // grpcretry.HedgeAtQuantile
)
