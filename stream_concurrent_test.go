package grpcretry

import (
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
)

func TestSendHeldUpByFlowControlWhileTheReceiverRetries(t *testing.T) {
	bubble(t, func(t *testing.T) {
		scripts := []string{"wait 3s; fail UNAVAILABLE", "recv " + big + "; recv " + big + "; recv b; recv EOF; send 1"}
		server := serveStreams(t, func(n int, stream grpc.ServerStream) error { return playServer(t, n, scripts[n-1], stream) })
		app, err := server.openStream(t, bidiStream, []Option{WithBufferLimit(1 << 20)})
		if err != nil {
			t.Fatal(err)
		}
		var group sync.WaitGroup
		group.Go(func() {
			app.play(t, "send "+big+"; send "+big)
			if got := time.Since(server.start); got != 3*second {
				t.Errorf("SendMsg returned after %v, want 3s, when its attempt failed", got)
			}
			app.play(t, "send b; close")
		})
		app.play(t, "recv 1; recv EOF")
		group.Wait()
		wantTimes(t, server, 0, 4*second)
	})
}

// slowRelease is a budget that takes its time to take back the place of a committed retry.
type slowRelease struct {
	tally
	released int
}

func (b *slowRelease) release() { time.Sleep(second); b.released++ }

func (b *slowRelease) depositReleased(Outcome) { b.released++ }

// The end of a stream may be seen by one goroutine while another one commits the stream: the plan is
// then used by one after the other, and the retry's place is given back once.
func TestACommitAndTheEndShareThePlan(t *testing.T) {
	bubble(t, func(t *testing.T) {
		server := serveScripts(t, "recv a; fail UNAVAILABLE", "recv a; header; wait 500ms; send 1")
		budget := &slowRelease{}
		app := openOn(t, server.conn(t, DialOptions(steady, WithBudget(budget))...), serverStream)
		app.play(t, "send a; close")
		var group sync.WaitGroup
		group.Go(func() { app.play(t, "header") })
		app.play(t, "recv 1; recv EOF")
		group.Wait()
		if want := (counts{withdrawn: 1, told: [5]int{Failed: 1}, highest: 1}); budget.released != 2 || budget.counts != want {
			t.Errorf("budget is %+v and heard %d times of the place released, want %+v and twice", budget.counts, budget.released, want)
		}
	})
}
