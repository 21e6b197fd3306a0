package bench

import (
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	echov1 "github.com/grpcretry/grpcretry/proto/echo/v1"
)

// BenchmarkOutage is 5 seconds in which the server fails everything, and what comes of the
// calls of 64 goroutines. Each makes 100 calls a second as long as they return in time; a
// call that is kept busy with retries delays the next, so what counts is attempts per call.
func BenchmarkOutage(b *testing.B) {
	const (
		goroutines = 64
		pace       = 10 * time.Millisecond
	)
	duration := 5 * time.Second
	if testing.Short() {
		duration = 300 * time.Millisecond
	}
	oneByOne(b, slices.Concat(all, careful), func(b *testing.B, r *alternative) {
		client := echov1.NewEchoServiceClient(tcp.dial(b, r.dialOptions(asUsed)...))
		watch := echov1.NewEchoServiceClient(tcp.dial(b))
		for b.Loop() {
			attemptsBefore, before := attemptsAt(b, watch), spend()
			calls := outage(b, client, goroutines, pace, duration)
			after, sent := spend(), attemptsAt(b, watch)-attemptsBefore
			b.ReportMetric(float64(calls), "calls")
			b.ReportMetric(float64(sent), "attempts")
			b.ReportMetric(float64(sent)/float64(calls), "attempts/call")
			b.ReportMetric(float64((after.cpu - before.cpu).Milliseconds()), "cpu-ms")
			b.ReportMetric(float64(after.mallocs-before.mallocs)/float64(calls), "allocs/call")
		}
		b.ReportMetric(0, "ns/op") // is the duration
	})
}

// outage returns the number of calls begun in that time, and returns when all have failed
// for good: the server stays down. The goroutines take turns, so that the calls are spread.
func outage(b *testing.B, client echov1.EchoServiceClient, goroutines int, pace, duration time.Duration) int64 {
	ctx := callContext(b)
	var calls atomic.Int64
	var running sync.WaitGroup
	start := time.Now()
	for i := range goroutines {
		running.Go(func() {
			req := request(failAlways)
			for next := start.Add(pace * time.Duration(i) / time.Duration(goroutines)); next.Sub(start) < duration; {
				time.Sleep(time.Until(next))
				calls.Add(1)
				if _, err := client.Echo(ctx, req); err == nil {
					b.Error("a call succeeded in the outage")
				}
				for next = next.Add(pace); next.Before(time.Now()); {
					next = next.Add(pace)
				}
			}
		})
	}
	running.Wait()
	return calls.Load()
}

// spent is what this process has used so far.
type spent struct {
	cpu     time.Duration // 0 where it cannot be asked for
	mallocs uint64
}

func spend() spent {
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return spent{cpuTime(), m.Mallocs}
}
