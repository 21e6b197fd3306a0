package grpcretrytest

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"

	"github.com/grpcretry/grpcretry"
)

// A down is a time in which the server is down.
type down struct{ after, length time.Duration } // after is the time since the last one

// drawDowns draws when the server is down. No step ends at the same time, because then either could come first. Some
// connections last for less than a backoff, as gRPC tries again a second after the first failure.
func (p *program) drawDowns() {
	const odd, reconnect = 777 * time.Microsecond, time.Second
	r := rand.New(rand.NewPCG(p.seed, 1<<32))
	for range r.IntN(8) - 4 {
		p.downs = append(p.downs, down{
			after:  pickOne(r, 0, 5*time.Millisecond, 40*time.Millisecond, 300*time.Millisecond, 2*time.Second) + odd,
			length: pickOne(r, 100*time.Millisecond, reconnect-5*time.Millisecond, 3*time.Second, time.Minute),
		})
	}
}

func (p program) withFewerDowns() (all []program) {
	for i := range p.downs {
		q := p
		q.downs = slices.Delete(slices.Clone(p.downs), i, i+1)
		all = append(all, q)
	}
	return all
}

// String returns the time for a report.
func (d down) String() string {
	return fmt.Sprintf("the server goes down after %v, for %v", d.after, d.length)
}

// steadyConnect has gRPC connect without jitter, so that a program does the same each time.
var steadyConnect = grpc.WithConnectParams(grpc.ConnectParams{
	Backoff: backoff.Config{BaseDelay: time.Second, Multiplier: 1.6, MaxDelay: 10 * time.Second}, MinConnectTimeout: 20 * time.Second,
})

// goDown takes the server down as planned, until the function returned is called.
func (o *observation) goDown(server *Server) (stop func()) {
	stopped, over := make(chan struct{}), make(chan struct{})
	wait := func(d time.Duration) bool {
		if d <= 0 {
			return true
		}
		select {
		case <-time.After(d):
			return true
		case <-stopped:
			return false
		}
	}
	go func() {
		defer close(over)
		for _, d := range o.program.downs {
			if !wait(d.after) {
				return
			}
			server.listener.goDown()
			goOn := wait(d.length)
			_ = server.listener.goUp() // fails with TCP only
			if !goOn {
				return
			}
		}
	}()
	return func() {
		close(stopped)
		<-over
	}
}

// judgeConnectWait checks that a call which is not hedged has waited for connections no longer than ConnectWait in all.
func (j *judgement) judgeConnectWait() {
	limit := j.policy.ConnectWait
	if limit < 0 || j.hedges() {
		return
	}
	waited := time.Duration(0)
	for i, a := range j.attempts {
		if a.WaitSource == grpcretry.WaitConnect {
			waited += a.Wait - j.backoff(i)
		}
	}
	if last := j.attempts[len(j.attempts)-1]; last.Unsent {
		end := j.events[len(j.events)-1]
		waited += end.Elapsed - last.Start.Add(last.Duration).Sub(j.attempts[0].Start)
	}
	j.must(waited <= limit+slack, "it has waited %v for connections, and ConnectWait is %v", waited, limit)
}

// judgeWinner checks that a hedged call ends with the attempt that succeeds first, without waiting for the others.
func (j *judgement) judgeWinner() {
	if !j.hedges() || j.call.method.servers {
		return
	}
	end := j.events[len(j.events)-1]
	if a := end.Attempt; end.Err == nil {
		late := j.result.over.Sub(a.Start.Add(a.Duration))
		j.must(late <= slack, "it has returned %v after attempt %d had succeeded", late, a.Number)
	}
}
