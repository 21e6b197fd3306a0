package grpcretry

import (
	"context"
	"flag"
	"math/rand/v2"
	"runtime"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc"

	echov1 "github.com/grpcretry/grpcretry/proto/echo/v1"
)

var streamsCancelled = flag.Int("streams.cancelled", 75, "TestStreamsCancelledAtRandomLeaveNothing cancels four times as many streams")

// TestStreamsCancelledAtRandomLeaveNothing cancels streams at random moments: in waits, in
// attempts, committed or not, in and out of our methods. The bubble fails if a goroutine or
// a call is left; the heap must not grow with the number of streams.
func TestStreamsCancelledAtRandomLeaveNothing(t *testing.T) {
	bubble(t, func(t *testing.T) {
		scripts := []string{"hang", "fail UNAVAILABLE", "recv a; wait 2s; fail UNAVAILABLE", "recv a; send 1; hang", "header; hang",
			"wait 3s; send 1"}
		server := serveStreams(t, func(n int, stream grpc.ServerStream) error {
			return playServer(t, n, scripts[rand.IntN(len(scripts))], stream)
		})
		cc := server.conn(t, DialOptions(WithAttemptTimeout(4*second), WithBudget(Unlimited))...)
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()

		round := func() (heap uint64) {
			var group sync.WaitGroup
			for range *streamsCancelled {
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
		n := *streamsCancelled
		t.Logf("heap after %d streams %d KiB, after %d streams %d KiB", 2*n, first>>10, 4*n, last>>10)
		if grown, most := int(last)-int(first), n<<10; grown > most { // a leaked stream holds over 2 KiB
			t.Errorf("heap grew by %d bytes in %d streams, want at most %d", grown, 2*n, most)
		}
	})
}

// The caller's context may live for ever: nothing of a call may stay registered with it.
func TestNothingStaysWithTheCallersContext(t *testing.T) {
	for _, tt := range []struct {
		name    string
		scripts []string
		app     string
	}{
		{"success", []string{"recv a; send 1"}, "send a; close; recv 1; recv EOF"},
		{"failure", []string{"recv a; fail NOT_FOUND"}, "send a; close; recv NOT_FOUND"},
		{"failure when committed", []string{"recv a; send 1; fail UNAVAILABLE"}, "send a; close; recv 1; recv UNAVAILABLE"},
		{"a retry", []string{"fail UNAVAILABLE", "recv a; send 1"}, "send a; close; recv 1; recv EOF"},
		{"a timeout while the application is elsewhere", []string{"recv a; hang", "recv a; send 1"},
			"send a; close; wait 20s; recv 1; recv EOF"},
		{"a timeout that was committed to", []string{"recv a; hang"}, "send a; close; context; wait 20s; recv DEADLINE_EXCEEDED"},
		{"a timeout, and then committed", []string{"recv a; hang", "recv a; send 1"}, "send a; close; wait 20s; context; recv 1; recv EOF"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				server := serveStreams(t, func(n int, stream grpc.ServerStream) error { return playServer(t, n, tt.scripts[n-1], stream) })
				cc := server.conn(t, DialOptions(steady, WithAttemptTimeout(5*second))...)
				ctx := &countingContext{Context: context.WithoutCancel(t.Context())}
				stream, err := cc.NewStream(ctx, serverStream, "/s/m")
				if err != nil {
					t.Fatal(err)
				}
				if ctx.number() == 0 {
					t.Fatal("nobody waits for the context's end")
				}
				(&application{stream: stream}).play(t, tt.app)
				synctest.Wait()
				if got := ctx.number(); got != 0 {
					t.Errorf("%d functions wait for the end of the caller's context after the call", got)
				}
			})
		})
	}
}

// No timer outlives its attempt, and no context outlives it.
func TestNothingOfAStreamsAttemptsIsLeft(t *testing.T) {
	for _, tt := range []struct {
		name    string
		scripts []string
		app     string
	}{
		{"not retryable", []string{"recv a; fail NOT_FOUND"}, "send a; recv NOT_FOUND"},
		{"retries", []string{"recv a; fail UNAVAILABLE", "recv a; fail UNAVAILABLE", "recv a; send 1"}, "send a; recv 1; recv EOF"},
		{"no message", []string{"recv a; fail UNAVAILABLE", "recv a"}, "send a; recv EOF"},
		{"a failure when committed", []string{"recv a; send 1; fail UNAVAILABLE"}, "send a; recv 1; recv UNAVAILABLE"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				server := serveStreams(t, func(n int, stream grpc.ServerStream) error { return playServer(t, n, tt.scripts[n-1], stream) })
				var attempts []*attempt
				below := belowStream(func(ctx context.Context, next streamOpener) (grpc.ClientStream, error) {
					attempts = append(attempts, ctx.Value(attemptKey{}).(*attempt))
					return next(ctx)
				})
				cc := server.conn(t, append(DialOptions(steady, WithAttemptTimeout(time.Hour)), below)...)
				openOn(t, cc, bidiStream).play(t, tt.app)
				for _, a := range attempts {
					if a.bounds.timer.Stop() {
						t.Errorf("the timer of attempt %d runs on", a.number)
					}
					if a.Err() == nil {
						t.Errorf("the context of attempt %d is alive", a.number)
					}
				}
				if len(attempts) != len(tt.scripts) {
					t.Errorf("%d attempts, want %d", len(attempts), len(tt.scripts))
				}
			})
		})
	}
}
