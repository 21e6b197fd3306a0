package sim

import (
	"math"
	"slices"
	"time"
)

// A Result is the outcome of a simulation.
type Result struct {
	Scenario, Strategy string // their names
	Seed               uint64 // of the scenario

	// Complete is false if the simulation was stopped before its end.
	Complete bool
	End      time.Duration // when all calls and all work were over, or the Duration of the scenario
	Bucket   time.Duration // covered by one entry of the series
	Events   int64         // the number of simulated events

	Summary Summary // of all client groups together

	// Tail holds the latencies that certain shares of the calls exceed, from all calls to a single
	// one, with twenty points for each factor of ten. Calls that failed count as slower than all
	// others and have no point.
	Tail []TailPoint

	Groups     []GroupResult  // of the clients
	Downstream []GroupResult  // of what servers called, in the order of the servers
	Servers    []ServerResult // in the order of the scenario
}

// A Summary holds the main figures of a result. All its fields are numbers, so that [Mean] can
// average runs with several seeds.
type Summary struct {
	Calls     float64 // calls that were started
	Succeeded float64 // calls
	Failed    float64 // calls
	Open      float64 // calls that were not over at the end
	Refused   float64 // calls that failed because a budget refused them a retry

	Attempts      float64 // sent
	Wasted        float64 // attempts that failed
	Hedges        float64 // attempts sent beside another one of their call, and in place of none
	Lost          float64 // attempts that were cancelled because another one was decisive
	Suppressed    float64 // times that a hedge was due and a budget refused it
	Down          float64 // attempts that an outage failed, at all servers
	Amplification float64 // attempts at the last server for each call
	AmplifiedDown float64 // the same, for the calls that started during an outage; 0 without such calls

	P50, P90, P99, P999, Longest time.Duration // latency of calls that succeeded
	Done                         time.Duration // when the last call was over

	// Stable is the time from the end of the last outage until at most 1% of the attempts fail in
	// every later bucket. It is negative if that never happens.
	Stable time.Duration

	// Rates of attempts at the last server, per second, by bucket: the highest rate, the highest
	// rate after the last outage, and by how much a rate after it exceeded the capacity (0 if it did
	// not).
	Peak, PeakAfter, Over float64
}

// A TailPoint is a point of the curve of latencies.
type TailPoint struct {
	Share   float64       // of all calls that are over, 0 to 1
	Latency time.Duration // exceeded by that share
}

// A GroupResult is the outcome of the calls of one group of clients, or of one server's downstream
// calls.
type GroupResult struct {
	Name string // of the group; "A calls B" for downstream calls

	// The sums of the fields of [GroupBucket] with the same names. Open is the number of calls that
	// were in flight at the end.
	Calls, Succeeded, Failed, Open int
	Attempts, Retries, Wasted      int
	Hedges, Lost, Suppressed       int
	Refused                        int

	Outcomes map[string]int // calls by outcome, see reasons.Outcome

	Latency     Quantiles // of calls that succeeded
	Rescued     Quantiles // latency of calls that succeeded with another attempt than the first
	FailedAfter Quantiles // of calls that failed
	PerCall     Counts    // attempts of each call that is over

	Series []GroupBucket // by time
}

// A GroupBucket is one entry of the series of a group.
type GroupBucket struct {
	Calls     int // started
	Succeeded int // calls
	Failed    int // calls
	Refused   int // calls that ended because a budget refused them a retry
	Attempts  int // sent
	Retries   int // attempts sent after the first of their call, hedges among them
	Wasted    int // attempts that failed
	Hedges    int // attempts sent beside another one of their call, and in place of none
	Lost      int // attempts that were cancelled because another one was decisive

	Suppressed int // times that a hedge was due and a budget refused it; it may be sent later
	Open       int // calls in flight at its end
}

// A ServerResult holds the events at one server.
type ServerResult struct {
	Name string // of the server

	Offered  int // attempts that arrived
	Retried  int // attempts that arrived and were not the first of their call
	Accepted int // into the server or its queue
	Rejected int // over capacity
	Down     int // failed by an outage
	Served   int // finished for a client that waited
	Late     int // finished, or dropped, after the client had given up

	Workers     int           // of all replicas together; 0 if it has none
	Utilisation float64       // share of time that a worker is busy
	MeanWait    time.Duration // in the queue, of attempts whose work started
	MeanInside  float64       // the average number of attempts in the server

	Series []ServerBucket // by time
}

// A ServerBucket is one entry of the series of a server.
type ServerBucket struct {
	// As in [ServerResult].
	Offered, Retried, Accepted, Rejected, Down, Served, Late int

	Refused  int     // calls to it that ended because a budget refused a retry
	Capacity float64 // attempts that it could accept; 0 without a limit
	InFlight float64 // attempts in it, on average
	Open     int     // calls to it in flight at its end
}

// Quantiles are quantiles of durations; all are 0 if there were none.
type Quantiles struct {
	N                        int           // durations
	Mean                     time.Duration // the average
	P50, P90, P99, P999, Max time.Duration // Max is the longest
}

// Counts are quantiles of numbers.
type Counts struct {
	Mean               float64 // the average
	P50, P90, P99, Max int     // Max is the largest
}

func quantiles(values []int64) Quantiles {
	if len(values) == 0 {
		return Quantiles{}
	}
	slices.Sort(values)
	var sum float64
	for _, v := range values {
		sum += float64(v)
	}
	at := func(q float64) time.Duration { return time.Duration(quantile(values, q)) }
	return Quantiles{
		N:    len(values),
		Mean: time.Duration(sum / float64(len(values))),
		P50:  at(0.5), P90: at(0.9), P99: at(0.99), P999: at(0.999), Max: at(1),
	}
}

func counts(values []int32) Counts {
	if len(values) == 0 {
		return Counts{}
	}
	slices.Sort(values)
	var sum float64
	for _, v := range values {
		sum += float64(v)
	}
	at := func(q float64) int { return int(quantile(values, q)) }
	return Counts{Mean: sum / float64(len(values)), P50: at(0.5), P90: at(0.9), P99: at(0.99), Max: at(1)}
}

// quantile returns the smallest value that at least a share q of the sorted values do not exceed.
func quantile[T any](sorted []T, q float64) T {
	n := int(math.Ceil(q*float64(len(sorted)) - 1e-9))
	return sorted[min(max(n, 1), len(sorted))-1]
}

// tail computes [Result.Tail] from the sorted latencies of the calls that succeeded and the number
// of those that failed.
func tail(sorted []int64, failed int) (points []TailPoint) {
	const perDecade = 20
	all := float64(len(sorted) + failed)
	for k := 0; ; k++ {
		share := math.Pow(10, -float64(k)/perDecade)
		n := max(1, int(math.Ceil((1-share)*all-1e-9)))
		if share*all < 1 || n > len(sorted) {
			return points
		}
		points = append(points, TailPoint{share, time.Duration(sorted[n-1])})
	}
}

// Mean returns the average of runs of one scenario and strategy with several seeds. Stable is
// negative if it is negative in any of them.
func Mean(runs []Summary) Summary {
	var mean Summary
	never := false
	for _, s := range runs {
		mean.each(&s, func(sum, v float64) float64 { return sum + v })
		never = never || s.Stable < 0
	}
	mean.each(&mean, func(sum, _ float64) float64 { return sum / float64(len(runs)) })
	if never {
		mean.Stable = -1
	}
	return mean
}

// each sets every field to f of itself and of the same field of other.
func (s *Summary) each(other *Summary, f func(a, b float64) float64) {
	numbers, others := s.numbers(), other.numbers()
	for i := range numbers {
		*numbers[i] = f(*numbers[i], *others[i])
	}
	times, otherTimes := s.times(), other.times()
	for i := range times {
		*times[i] = time.Duration(math.Round(f(float64(*times[i]), float64(*otherTimes[i]))))
	}
}

func (s *Summary) numbers() []*float64 {
	return []*float64{&s.Calls, &s.Succeeded, &s.Failed, &s.Open, &s.Refused,
		&s.Attempts, &s.Wasted, &s.Hedges, &s.Lost, &s.Suppressed, &s.Down, &s.Amplification, &s.AmplifiedDown,
		&s.Peak, &s.PeakAfter, &s.Over}
}

func (s *Summary) times() []*time.Duration {
	return []*time.Duration{&s.P50, &s.P90, &s.P99, &s.P999, &s.Longest, &s.Done, &s.Stable}
}
