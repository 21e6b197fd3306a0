package grpcretry

import (
	"context"
	"math/rand/v2"
	"runtime"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc"

	echov1 "github.com/grpcretry/grpcretry/proto/echo/v1"
)

// TestStreamsCancelledAtRandomLeaveNothing cancels 2,000 streams at random moments: in
// waits, in attempts, committed or not, in and out of our methods. The bubble fails if a
// goroutine or a call is left; the heap must not grow with the number of streams.
func TestStreamsCancelledAtRandomLeaveNothing(t *testing.T) {
	bubble(t, func(t *testing.T) {
		scripts := []string{"hang", "fail UNAVAILABLE", "recv a; wait 2s; fail UNAVAILABLE", "recv a; send 1; hang", "header; hang", "wait 3s; send 1"}
		server := serveStreams(t, func(n int, stream grpc.ServerStream) error {
			return playServer(t, n, scripts[rand.IntN(len(scripts))], stream)
		})
		cc := server.conn(t, DialOptions(WithAttemptTimeout(4*second), WithBudget(Unlimited))...)
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()

		round := func() (heap uint64) {
			var group sync.WaitGroup
			for range 500 {
				group.Go(func() {
					ctx, cancel := context.WithCancel(ctx)
					defer cancel()
					time.AfterFunc(time.Duration(1+rand.IntN(6000))*time.Millisecond, cancel)
					stream, err := cc.NewStream(ctx, bidiStream, "/s/m")
					if err != nil {
						return
					}
					stream.SendMsg(&echov1.EchoRequest{Message: "a"})
					switch rand.IntN(3) {
					case 0:
						<-ctx.Done()
					case 1:
						stream.Header()
					}
					for stream.RecvMsg(new(echov1.EchoResponse)) == nil {
						continue
					}
				})
			}
			group.Wait()
			time.Sleep(time.Minute)
			synctest.Wait()
			runtime.GC()
			runtime.GC()
			var m runtime.MemStats
			runtime.ReadMemStats(&m)
			server.mu.Lock()
			server.seen = nil
			server.mu.Unlock()
			return m.HeapAlloc
		}
		round()
		first := round()
		round()
		last := round()
		t.Logf("heap after 1,000 streams %d KiB, after 2,000 %d KiB", first>>10, last>>10)
		if last > first+512<<10 { // a leaked stream holds over 2 KiB
			t.Errorf("heap grew from %d to %d KiB in 1,000 streams", first>>10, last>>10)
		}
	})
}
