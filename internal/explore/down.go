package explore

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"

	"github.com/grpcretry/grpcretry"
	"github.com/grpcretry/grpcretry/grpcretrytest"
	"github.com/grpcretry/grpcretry/internal/inside"
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
func (o *observation) goDown(server *grpcretrytest.Server) (stop func()) {
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
			began := time.Now()
			server.Down()
			goOn := wait(d.length - time.Since(began))
			server.Up()
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

// judgePatience checks that no wait has outlasted Patience, other than one that the server asked for. The backoff that
// follows a wait for a connection may. Without patience, nothing follows an attempt that was not sent.
func (j *judgement) judgePatience() {
	trouble, failures := j.firstFailure()
	over := trouble + j.policy.Patience
	for i, a := range j.attempts[min(1, len(j.attempts)):] {
		start, last := a.Start.Sub(j.start), over
		switch {
		case a.Hedge:
			continue
		case !j.isPatient():
			j.must(!j.attempts[i].Unsent || j.hedges(), "attempt %d followed one that reached no server, and Patience is 0", a.Number)
			continue
		case a.WaitSource == inside.WaitConnect && !(j.hedges() && j.isPushed()):
			last += j.backoff(i + 1)
		case a.WaitSource != grpcretry.WaitBackoff && inside.RepeatsOf(a) == 0:
			continue
		}
		j.must(failures > 0 && start <= last+time.Microsecond, "the wait before attempt %d ended at %v, and Patience at %v",
			a.Number, start, last)
	}
	j.judgeLastWait(over)
}

// judgeLastWait checks how long a call has waited after an attempt that reached no server. For others, see judgeEnd.
func (j *judgement) judgeLastWait(over time.Duration) {
	last, end := j.attempts[len(j.attempts)-1], j.events[len(j.events)-1]
	if !last.Unsent || j.hedges() {
		return
	}
	ended := last.Start.Add(last.Duration).Sub(j.start)
	if at := j.attempts[0].Start.Sub(j.start) + end.Elapsed; j.isPatient() {
		limit := max(ended, over+j.backoff(len(j.attempts)))
		j.must(at <= limit+slack, "it waited for a connection until %v, and Patience was over at %v", at, limit)
	} else {
		j.must(at <= ended+slack, "it waited for a connection until %v, and Patience is 0", at)
	}
}

// firstFailure returns when the call's first attempt has failed, and how many have.
func (j *judgement) firstFailure() (at time.Duration, failures int) {
	for i := range j.attempts {
		if _, decided := j.decided[j.call.number][j.attempts[i].Number]; !decided {
			continue
		}
		if failed := j.failedAt(i); failures == 0 || failed < at {
			at = failed
		}
		failures++
	}
	return at, failures
}

// isPushed reports whether a server has asked the call to wait.
func (j *judgement) isPushed() bool {
	return slices.ContainsFunc(j.attempts, func(a grpcretry.Attempt) bool {
		_, ok := grpcretry.PushbackFrom(a.Trailer, a.Err)
		return ok
	})
}

// judgeHedgedRetry checks an attempt of a hedged call: a hedge is sent while others are in flight, and any other attempt after its
// backoff when none is.
func (j *judgement) judgeHedgedRetry(i int) {
	next, last := j.attempts[i], 0
	inFlight, ended := 0, time.Time{}
	for k, a := range j.attempts[:i] {
		end := a.Start.Add(a.Duration)
		if errors.Is(a.Err, grpcretry.ErrAttemptTimeout) {
			end = a.Start.Add(j.policy.AttemptTimeout)
		}
		if end.After(next.Start) {
			inFlight++
		}
		if end.After(ended) {
			ended, last = end, k
		}
	}
	if next.Hedge {
		j.must(inFlight > 0 || !ended.Before(next.Start), "hedge %d started at %v, and the attempts before it had ended by %v",
			next.Number, j.since(next.Start), j.since(ended))
		return
	}
	j.must(inFlight == 0, "attempt %d is no hedge, and started while another was in flight", next.Number)
	if next.WaitSource != grpcretry.WaitBackoff {
		return
	}
	want := j.backoffAfter(i, last)
	waited := next.Start.Sub(ended)
	j.must(next.Wait >= want && waited >= want, "attempt %d started %v after the others ended, with a wait of %v, want at least %v",
		next.Number, waited, next.Wait, want)
}

// judgeWinner checks that a hedged call ends with the attempt that succeeds first, without waiting for the others.
func (j *judgement) judgeWinner() {
	if !j.hedges() || j.call.method.servers {
		return
	}
	end := j.events[len(j.events)-1]
	if a := end.Attempt; end.Err == nil {
		late := j.result.over.Sub(a.Start.Add(a.Duration))
		j.must(late <= slack, "it returned %v after attempt %d succeeded", late, a.Number)
	}
}
