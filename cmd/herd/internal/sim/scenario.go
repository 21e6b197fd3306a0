package sim

import (
	"time"

	"google.golang.org/grpc/codes"

	"github.com/grpcretry/grpcretry"
)

// A Scenario is what is simulated: groups of clients that call servers, and the
// strategies that are compared. [Run] checks it; an error names the field and the value.
//
// As JSON ([ReadScenarios]) the fields have the same names with a small first letter,
// durations are strings such as "1.5s", status codes are as on the wire ("UNAVAILABLE"),
// and a field that is left out is zero.
type Scenario struct {
	Name  string // one word, for files and tables
	Title string // one line
	See   string // what to see in it

	// Seed starts the random numbers: with the same seed everything happens again in the
	// same way. Each purpose has numbers of its own, so that calls arrive alike under every
	// strategy.
	Seed uint64

	// Duration ends the simulation, in simulated time, at most a day. 0 means when every
	// call is over, which the arrivals of a group with a Rate need a Stop for.
	Duration time.Duration

	// Bucket is the time that one entry of the series covers; 0 means a second. At least a
	// millisecond.
	Bucket time.Duration

	// Network is how long a message is on its way, in each direction.
	Network Distribution

	Groups  []Group  // of clients, at least one
	Servers []Server // at least one

	// Strategies are compared: each is given to the groups and downstream calls that have
	// none of their own.
	Strategies []Strategy
}

// A Strategy is how clients retry: a policy of the library, and a budget.
type Strategy struct {
	Name string

	// Policy is the policy of every call. Its Budget must be nil: every process gets one of
	// its own from Budget, below.
	Policy grpcretry.Policy

	Budget Budget

	// Hedging is how further attempts are sent while the first is slow; nil: not at all.
	// Policy.Hedging must be nil: every process gets a delay of its own, from here.
	Hedging *Hedging

	// IgnorePushback hides from the engine what servers say, as if a client could not read
	// grpc-retry-pushback-ms.
	IgnorePushback bool
}

// A Group is clients that are alike.
type Group struct {
	Name string

	// Clients make one call each: all at Start, or each at a random time within Spread
	// after it.
	Clients int
	Spread  time.Duration

	// Rate, instead of Clients, is calls per second that arrive from Start to Stop whatever
	// becomes of them: at random (a Poisson process), or evenly. Stop 0 means to the end.
	Rate float64
	Even bool

	Start, Stop time.Duration

	Deadline time.Duration // of each call, from its start; 0: none
	Target   string        // the name of a server; "" is the first

	// Processes is how many processes the clients live in; calls take turns among them.
	// Every process has a budget of its own, as each Retrier has. 0 means 1.
	Processes int

	// Strategy is this group's own; nil means the one that is compared.
	Strategy *Strategy
}

// A Server is a service that is called: one process, or several that are alike. Each works in
// one of two ways.
//
// With a Window it counts: it accepts at most Capacity × Window calls in each window of
// its clock and rejects the rest. Accepted calls take Latency, and wait for nobody.
//
// Without a Window it has workers, as many as it needs to do Capacity calls a second of
// Latency each, at least one, and calls wait for a worker in a queue of Queue places. The
// time of work is Latency, stretched so that the workers together do exactly Capacity.
type Server struct {
	Name string

	// Replicas is how many processes of it there are; 0 means 1. Capacity, Window, Queue and
	// what is said by Pushback are of each. Every process of the clients sends its attempts
	// to one after the other, beginning with any: as gRPC's round_robin does, which knows
	// neither hedges nor loads, and takes only those without a connection out of turn.
	Replicas int

	Capacity float64       // calls per second; 0 means no limit
	Window   time.Duration // see above
	Queue    int           // places to wait without a Window; beyond them calls are rejected; -1: no limit
	Latency  Distribution  // of the work

	// RejectCost is the work of saying no, as a share of the work of a call: 0 to 1. A call
	// has been read, and perhaps authenticated, before it is refused.
	RejectCost float64
	RejectCode codes.Code // of calls over capacity; OK (0) means RESOURCE_EXHAUSTED

	// IgnoresCancel is a handler that does not look at its context: calls whose client has
	// given up are worked on all the same. Otherwise they leave the queue, and the worker.
	IgnoresCancel bool

	// Optimistic makes every call a read and, a round trip later, a write that fails with
	// ABORTED if another write came between (optimistic concurrency).
	Optimistic bool

	Outages  []Outage // in order of time, those of each replica
	Pushback Pushback // what failing calls are told

	// Calls is what the handler calls before it answers; its answer is what comes of that.
	Calls *Downstream
}

// An Outage is a time in which a server can do less.
type Outage struct {
	From, For time.Duration
	Left      float64 // the share of Capacity that is left, 0 to 1

	// Replica is the one that has the outage, from 1; 0 means all of them.
	Replica int

	// When nothing is Left, calls fail with Code at once, those in the server at From
	// among them; OK (0) means UNAVAILABLE. Silent instead gives no answer at all, so that
	// clients wait for their timeout.
	Code   codes.Code
	Silent bool

	// SlowStart is how long, after the outage, the capacity takes to grow back from what
	// was Left to all of it, evenly.
	SlowStart time.Duration
}

// Pushback is what a server tells the clients of calls that it does not accept. It is
// sent as [grpcretry.SetPushback] sends it.
type Pushback struct {
	Kind  PushbackKind
	Delay time.Duration // of FixedPushback

	// Rate is how many calls per second SpreadPushback asks to come back; 0 means Capacity.
	Rate float64
}

// A PushbackKind is a rule for what a server says of the next attempt.
type PushbackKind string

// The kinds of pushback. All but the first two need a server that knows when its outage
// ends.
const (
	NoPushback     PushbackKind = ""       // nothing is said
	FixedPushback  PushbackKind = "fixed"  // always Delay
	ExactPushback  PushbackKind = "exact"  // when there will be room: the same moment for everyone
	SpreadPushback PushbackKind = "spread" // a turn for each, one behind the other
	StopPushback   PushbackKind = "stop"   // do not retry
)

// A Downstream call is made by a server for each call that it has accepted, within that
// call's deadline.
type Downstream struct {
	Target   string        // the name of another server; no server may call itself in a circle
	Deadline time.Duration // of the call; 0: only that of the call being served

	// StopCallers answers a failure with a pushback that forbids to retry, as this server
	// has tried already.
	StopCallers bool

	Strategy *Strategy // nil means the one that is compared
}

// A Distribution is of random durations, at least 0. The zero value is always 0.
type Distribution struct {
	Shape Shape
	Mean  time.Duration

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
	ExponentialShape Shape = "exponential" // as the work of a server in queueing theory
	LogNormalShape   Shape = "lognormal"   // as latencies of real servers mostly are
	ParetoShape      Shape = "pareto"      // with a tail that no average shows
)

// A Budget says what each process of a group may spend on retries. The fields below
// belong to the kind that is named with them; the others must be zero.
type Budget struct {
	Kind BudgetKind

	Ratio, MinPerSecond float64       // RatioBudget, as in grpcretry.RatioBudget; FinagleBudget
	Reserve             float64       // RatioBudget
	Window              time.Duration // RatioBudget, FinagleBudget; 0 means 10 s

	MaxTokens, TokenRatio float64 // ThrottleBudget

	PerSecond float64 // RateBudget
	Burst     int     // RateBudget

	Limit int // ConcurrencyBudget

	Of []Budget // AllBudgets

	// New makes the budget of one process, of any type; with it Kind is "". It is not part
	// of a file.
	New func() (grpcretry.Budget, error)
}

// A BudgetKind names one of the library's budgets, or one to compare them with.
type BudgetKind string

// The kinds of budget.
const (
	DefaultBudget     BudgetKind = ""            // the library's default
	UnlimitedBudget   BudgetKind = "unlimited"   // grpcretry.Unlimited
	RatioBudget       BudgetKind = "ratio"       // grpcretry.NewRatioBudget; with all fields 0 the library's default
	FinagleBudget     BudgetKind = "finagle"     // that of Finagle and Linkerd, to compare with: every call earns, also one that fails
	ThrottleBudget    BudgetKind = "throttle"    // grpcretry.NewThrottle, as gRPC's retryThrottling
	RateBudget        BudgetKind = "rate"        // grpcretry.NewRateBudget
	ConcurrencyBudget BudgetKind = "concurrency" // grpcretry.NewConcurrencyBudget
	AllBudgets        BudgetKind = "all"         // grpcretry.AllBudgets
)

// Hedging is how a [Strategy] hedges: [grpcretry.Hedging], and its delay in a form that
// every process can have one of its own of. All methods are taken to be safe.
type Hedging struct {
	Kind HedgingKind

	MaxAttempts int // the first included, at most 1000; 0 means 2

	Delay time.Duration // HedgeAfter; 0 sends all attempts at once

	Quantile        float64       // HedgeAtQuantile, between 0 and 1
	AtLeast, AtMost time.Duration // HedgeAtQuantile; AtMost 0 means no upper limit

	// NonFatalCodes are the codes after which the next attempt is sent at once. nil means
	// those of the policy, an empty list none.
	NonFatalCodes []codes.Code

	// Budget is what each process may spend on hedges, besides the Budget of the strategy; ""
	// means the library's default.
	Budget Budget

	// New makes the delay of one process, of any type; with it Kind is "". It is not part of
	// a file.
	New func() grpcretry.HedgeDelay
}

// A HedgingKind names one of the library's delays.
type HedgingKind string

// The kinds of [Hedging].
const (
	HedgeAfter      HedgingKind = "after"    // grpcretry.HedgeAfter
	HedgeAtQuantile HedgingKind = "quantile" // grpcretry.HedgeAtQuantile
)
