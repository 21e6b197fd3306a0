package bench

import (
	"context"
	"runtime"
	"slices"
	"sync"
	"testing"
	"time"

	echov1 "github.com/grpcretry/grpcretry/proto/echo/v1"
)

// Memory is measured of a process that talks to its server over TCP, after the garbage has
// been collected: what lives on the heap, and the stacks of the goroutines.

// BenchmarkWaitingCalls is what a call holds while it waits for its retry, of very many at
// the same time. The server is down for all of them; bare is a goroutine that waits by
// itself after the call, the least that waiting can cost.
func BenchmarkWaitingCalls(b *testing.B) {
	calls := 100_000
	if testing.Short() {
		calls = 1_000
	}
	oneByOne(b, all, func(b *testing.B, r *alternative) {
		client := echov1.NewEchoServiceClient(tcp.dial(b, r.dialOptions(inBackoff)...))
		watch := echov1.NewEchoServiceClient(tcp.dial(b))
		for b.Loop() {
			m := holding(b, calls, func(ctx context.Context, wait func()) {
				_, _ = client.Echo(ctx, request(failAlways))
				if !r.retries {
					wait()
				}
			}, func() int64 { return attemptsAt(b, watch) })
			b.ReportMetric(m.heap, "heap-B/call")
			b.ReportMetric(m.stack, "stack-B/call")
			b.ReportMetric(m.heap+m.stack, "B/call")
		}
		b.ReportMetric(0, "ns/op") // is about when memory was looked at
	})
}

// BenchmarkOpenStreams is what an open stream holds. Before its commit it has sent a message of 4 kB and has received
// nothing: who retries keeps the message, and gRPC itself keeps it too, whether its retries are on or off. All of
// them together stay below the memory that a Retrier spends on replay. After its commit the stream has had a response.
func BenchmarkOpenStreams(b *testing.B) {
	b.Run("commit=before", func(b *testing.B) {
		openStreams(b, failAlways, func(chatStream) error { return nil })
	})
	b.Run("commit=after", func(b *testing.B) {
		openStreams(b, 0, func(stream chatStream) error { return second(stream.Recv()) })
	})
}

// openStreams measures streams that have sent a message, and then have done what settle does. Each has a message of its own.
func openStreams(b *testing.B, sequence int64, settle func(chatStream) error) {
	streams := 10_000
	if testing.Short() {
		streams = 100
	}
	const size = 4000 // with its frame it fits a buffer of 4 KiB of gRPC's pool
	oneByOne(b, which(withClientStreams), func(b *testing.B, r *alternative) {
		client := echov1.NewEchoServiceClient(tcp.dial(b, r.dialOptions(asUsed)...))
		watch := echov1.NewEchoServiceClient(tcp.dial(b))
		for b.Loop() {
			m := holding(b, streams, func(ctx context.Context, wait func()) {
				stream, err := client.Chat(ctx)
				if err != nil {
					b.Error(err)
					return
				}
				if err := stream.Send(&echov1.EchoRequest{Payload: make([]byte, size), Sequence: sequence}); err != nil {
					b.Error(err)
					return
				}
				if err := settle(stream); err != nil {
					b.Error(err)
					return
				}
				wait()
				runtime.KeepAlive(stream)
			}, func() int64 { return messagesAt(b, watch) })
			b.ReportMetric(m.heap, "heap-B/stream")
			b.ReportMetric(m.stack, "stack-B/stream")
			b.ReportMetric(m.heap+m.stack, "B/stream")
		}
		b.ReportMetric(0, "ns/op")
	})
}

// held is in bytes for each of many.
type held struct{ heap, stack float64 }

// holding runs many of f, and measures what they hold when the server has seen all of them
// and they have come to rest. Then it ends their context; wait is until then.
func holding(b *testing.B, many int, f func(ctx context.Context, wait func()), seen func() int64) held {
	ctx, cancel := context.WithCancel(b.Context())
	defer cancel()
	var running sync.WaitGroup
	for range many { // the runtime keeps about 500 bytes for each goroutine that there has ever been at once
		running.Go(func() { <-ctx.Done() })
	}
	cancel()
	running.Wait()
	ctx, cancel = context.WithCancel(b.Context())
	defer cancel()
	seenBefore, before := seen(), inUse()
	for range many {
		running.Go(func() { f(ctx, func() { <-ctx.Done() }) })
	}
	for seen()-seenBefore < int64(many) {
		pause(b)
	}
	now := inUse()
	for {
		pause(b)
		last := now
		now = inUse()
		if near(now.heap, last.heap) && near(now.stack, last.stack) {
			break
		}
	}
	cancel()
	running.Wait()
	return held{(now.heap - before.heap) / float64(many), (now.stack - before.stack) / float64(many)}
}

// inUse is the least of some looks after a collection. Each collection may halve a stack
// that is mostly empty.
func inUse() held {
	looks := make([]held, 3)
	for i := range looks {
		runtime.GC()
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		looks[i] = held{float64(m.HeapAlloc), float64(m.StackInuse)}
	}
	return slices.MinFunc(looks, func(a, b held) int { return int(a.heap + a.stack - b.heap - b.stack) })
}

func near(a, b float64) bool { return a > 0.99*b && a < 1.01*b }

func pause(b *testing.B) {
	select {
	case <-time.After(50 * time.Millisecond):
	case <-b.Context().Done():
		b.Fatal(b.Context().Err())
	}
}

func attemptsAt(tb testing.TB, client echov1.EchoServiceClient) int64 {
	tb.Helper()
	answer, err := client.Append(tb.Context(), request(0))
	if err != nil {
		tb.Fatal(err)
	}
	return answer.GetSequence()
}

func messagesAt(tb testing.TB, client echov1.EchoServiceClient) int64 {
	tb.Helper()
	answer, err := client.Put(tb.Context(), request(0))
	if err != nil {
		tb.Fatal(err)
	}
	return answer.GetSequence()
}
