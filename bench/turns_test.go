package bench

import (
	"flag"
	"math"
	"math/rand/v2"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"
)

// This file is how times are measured: in turns. A machine, and a virtual one above all,
// is a fifth slower in one second than in the next. So contenders do not run one after the
// other, each for its share of the time, but all of them in every few milliseconds, in an
// order drawn anew for each round: what slows the machine down slows down all alike. A
// contender's time is the median of its turns, and what it allocates is the mean.

// aTurn is about how long a turn takes: many times the machine's short halts, and long
// enough that what allocates much pays for the collection of its own garbage.
const aTurn = 5 * time.Millisecond

// A contender is measured beside others.
type contender struct {
	name string          // of its sub-benchmark, client=bare
	do   func(times int) // what is measured, so many times
}

// references are the contenders that others are compared with, round by round: of each other one it is reported what it adds to the
// first of these beside it, in percent (%over), in time and in allocations.
var references = []string{"client=bare", "client=limit", "feature=none", "policy=round_robin"}

// inTurns measures the contenders beside each other, each for about -benchtime, and reports
// them as sub-benchmarks. With -benchtime 3x each has three turns of one.
func inTurns(b *testing.B, contenders []contender, report func(*testing.B, *turns)) {
	measured := make([]*turns, len(contenders))
	for i, c := range contenders {
		measured[i] = &turns{contender: c}
	}
	rounds := calibrate(measured)
	runtime.GC()
	for range rounds {
		for _, i := range rand.Perm(len(measured)) {
			measured[i].take()
		}
	}
	if b.Failed() {
		return
	}
	reference := referenceAmong(measured)
	for i, t := range measured {
		b.Run(t.name, func(b *testing.B) {
			report(b, t)
			if reference >= 0 && i != reference {
				added(b, t, measured[reference])
			}
		})
	}
}

// referenceAmong returns the index of the reference, -1 if there is none.
func referenceAmong(measured []*turns) int {
	for _, name := range references {
		if i := slices.IndexFunc(measured, func(t *turns) bool { return t.name == name }); i >= 0 {
			return i
		}
	}
	return -1
}

// added reports what t adds to the reference. Allocations are not rounded down here, so that their difference is exact.
func added(b *testing.B, t, reference *turns) {
	b.ReportMetric(t.over(reference), "%over")
	b.ReportMetric(t.longer(reference), "added-ns/op")
	b.ReportMetric(t.perTime(t.mallocs)-reference.perTime(reference.mallocs), "added-allocs/op")
}

// perOperation reports what an operation takes, allocations as Go does: whole ones.
func perOperation(b *testing.B, t *turns) {
	b.ReportAllocs()
	b.ReportMetric(t.nanoseconds(), "ns/op")
	b.ReportMetric(math.Floor(t.perTime(t.mallocs)), "allocs/op")
	b.ReportMetric(math.Floor(t.perTime(t.bytes)), "B/op")
}

// perMessage reports what each of the messages takes that an operation handles.
func perMessage(messages float64) func(*testing.B, *turns) {
	return func(b *testing.B, t *turns) {
		perOperation(b, t)
		b.ReportMetric(t.nanoseconds()/messages, "ns/msg")
		b.ReportMetric(t.perTime(t.mallocs)/messages, "allocs/msg")
	}
}

// turns are those that a contender has had.
type turns struct {
	contender
	times int       // in each turn
	took  []float64 // nanoseconds for each time, a value for each turn

	mallocs, bytes uint64 // in all turns
}

// calibrate makes what is made once, such as a target's budget, says how often each does
// its thing in a turn, and returns the number of rounds.
func calibrate(all []*turns) (rounds int) {
	length, count := benchtime()
	for _, t := range all {
		t.do(3)
		t.times = 1
		if count == 0 {
			t.times = timesIn(aTurn, t.do)
		}
	}
	if count > 0 {
		return count
	}
	return max(1, int(length/aTurn))
}

// timesIn is how often do does it in about so long.
func timesIn(length time.Duration, do func(times int)) int {
	const most = 1 << 30
	for times := 1; ; times *= 2 {
		start := time.Now()
		do(times)
		took := time.Since(start)
		if took >= length/4 || times >= most {
			return max(1, int(float64(times)*float64(length)/float64(took)))
		}
	}
}

// benchtime is what -benchtime says: a length of time, or else a count.
func benchtime() (length time.Duration, count int) {
	given := flag.Lookup("test.benchtime").Value.String()
	if n, isCount := strings.CutSuffix(given, "x"); isCount {
		count, _ = strconv.Atoi(n)
		return 0, count
	}
	length, _ = time.ParseDuration(given)
	return length, 0
}

func (t *turns) take() {
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	start := time.Now()
	t.do(t.times)
	took := time.Since(start)
	runtime.ReadMemStats(&after)
	t.took = append(t.took, float64(took)/float64(t.times))
	t.mallocs += after.Mallocs - before.Mallocs
	t.bytes += after.TotalAlloc - before.TotalAlloc
}

func (t *turns) nanoseconds() float64 { return median(slices.Clone(t.took)) }

func (t *turns) perTime(total uint64) float64 {
	return float64(total) / float64(t.times*len(t.took))
}

// over is by how many percent t takes longer than other: the median of the rounds, in each
// of which they were measured a few milliseconds apart.
func (t *turns) over(other *turns) float64 {
	ratios := make([]float64, len(t.took))
	for round, took := range t.took {
		ratios[round] = took / other.took[round]
	}
	return 100 * (median(ratios) - 1)
}

// longer is by how many nanoseconds t takes longer than other, likewise.
func (t *turns) longer(other *turns) float64 {
	differences := make([]float64, len(t.took))
	for round, took := range t.took {
		differences[round] = took - other.took[round]
	}
	return median(differences)
}

// median puts v in order.
func median(v []float64) float64 {
	slices.Sort(v)
	return (v[(len(v)-1)/2] + v[len(v)/2]) / 2
}

// A repeater makes of a call one that is made many times. Each goroutine has a call of its
// own.
type repeater func(b *testing.B, each func() (call func() error)) (do func(times int))

// serial makes them one after the other.
func serial(b *testing.B, each func() func() error) func(times int) {
	call := each()
	return func(times int) {
		for range times {
			if err := call(); err != nil {
				b.Fatal(err)
			}
		}
	}
}

// parallel makes them on all cores.
func parallel(b *testing.B, each func() func() error) func(times int) {
	calls := make([]func() error, runtime.GOMAXPROCS(0))
	for i := range calls {
		calls[i] = each()
	}
	return func(times int) {
		share(len(calls), times, func(i, times int) {
			for range times {
				if err := calls[i](); err != nil {
					b.Error(err)
					return
				}
			}
		})
	}
}

// share has goroutines do so many things together.
func share(goroutines, times int, do func(goroutine, times int)) {
	var all sync.WaitGroup
	for i := range goroutines {
		own := times / goroutines
		if i < times%goroutines {
			own++
		}
		all.Go(func() { do(i, own) })
	}
	all.Wait()
}
