package debug

import (
	"strings"
	"testing"
	"time"

	"github.com/grpcretry/grpcretry"
	"github.com/grpcretry/grpcretry/grpcretrytest"
)

// A call that reached no server waits for a connection. Its first attempt counts as one that
// failed; the budget pays nothing.
func TestCallThatWaitsForAConnectionIsRescued(t *testing.T) {
	bubble(t, func(t *testing.T) {
		r := retrier(t)
		p := handler(t, r)
		c := dialLater(t, r, 1500*time.Millisecond) // gRPC dials after 0 s, 1 s and 2.6 s
		ended := time.Now().Add(3600 * time.Millisecond)
		want(t, "code", c.echo("ok"), "OK")
		s := getJSON(t, p, "")
		want(t, "counts", s.Total, Counts{
			Calls: 1, Rescued: 1, Attempts: 2, Retries: 1, RetryShare: 0.5,
			Stopped: map[string]int64{}, Failed: map[string]int64{"UNAVAILABLE": 1}, Waits: map[string]int64{"connect": 1},
		})
		first := &s.Calls[0].Attempts[0]
		wantIn(t, first.Message, "nobody listens")
		first.Message = "" // else gRPC's own words
		want(t, "the call", s.Calls, []Call{{
			Retrier: 1, Target: "passthrough:///echo", Method: echoMethod,
			Ended: ended.UTC(), ElapsedMs: 3600, Outcome: "recovered", Code: "OK", Made: 2,
			Attempts: []Attempt{
				{Number: 1, Code: "UNAVAILABLE", WaitSource: "none", Decision: "retry"},
				{Number: 2, StartMs: 3600, Code: "OK", Peer: "10.0.0.7:443",
					WaitMs: 3600, WaitSource: "connect", Decision: "success"},
			},
		}})
		want(t, "the budget's level", levels(s.Budgets[0]), "3.6 s: 3; 0 s: 3; now 3.2")
		page := get(t, p, "").Body.String()
		wantIn(t, page, "waits chosen: 1 for a connection")
		wantIn(t, page, "retry after 3.6 s (connection and backoff)")
		wantIn(t, page, "waited 3.6 s (connection and backoff)")
		wantIn(t, page, "2 attempts in 3.6 s: UNAVAILABLE, wait of 3.6 s, OK")
		wantIn(t, page, "1 of 1 retried call rescued")
		wantIn(t, page, "wait for a connection, and then the backoff")
		wantIn(t, page, "none reached")
	})
}

func TestCallThatGetsNoConnectionGivesUp(t *testing.T) {
	bubble(t, func(t *testing.T) {
		r := retrier(t, grpcretry.WithPatience(10*time.Second))
		p := handler(t, r)
		want(t, "code", dialLater(t, r, time.Hour).echo("ok"), "Unavailable")
		s := getJSON(t, p, "")
		want(t, "counts", s.Total, Counts{
			Calls: 1, FailedOnce: 1, Attempts: 1,
			Stopped: map[string]int64{"target_down": 1}, Failed: map[string]int64{"UNAVAILABLE": 1}, Waits: map[string]int64{"connect": 1},
		})
		call := s.Calls[0]
		want(t, "outcome", call.Outcome, "target_down")
		want(t, "elapsed", call.ElapsedMs, 10000.0)
		want(t, "the attempt's end", call.Attempts[0].Decision+" "+call.Attempts[0].Reason, "stop target_down")
		want(t, "the budget's level", levels(s.Budgets[0]), "10 s: 3; 0 s: 3; now 3")
		page := get(t, p, "").Body.String()
		wantIn(t, page, "Target down")
		wantIn(t, page, "target_down: target is down")
		wantIn(t, page, "stop: the target was still down after 10 s")
		wantIn(t, page, "waited for the target until the call ended")
		wantIn(t, page, "1 of 1 call failed")
	})
}

// The page shows which targets are failing, how many calls wait for them, and how many have given up.
func TestFailingTargets(t *testing.T) {
	bubble(t, func(t *testing.T) {
		r := retrier(t, grpcretry.WithPatience(10*time.Second))
		p := handler(t, r, retrier(t))
		want(t, "before any call", getJSON(t, p, "").Targets, []Target{})
		if page := get(t, p, "").Body.String(); strings.Contains(page, "Which targets are failing?") {
			t.Error("the page has a table of targets, although none is failing")
		}
		gone := dialFrom(t, r, "passthrough:///echo", "") // the same server, up
		gone.echo("gone")
		down := dialWhen(t, r, "passthrough:///<down>", "", func() bool { return false })
		for range 3 {
			go down.echo("ok")
		}
		time.Sleep(4 * time.Second)
		want(t, "while calls wait", getJSON(t, p, "").Targets,
			[]Target{{Retrier: 1, Target: "passthrough:///<down>", FailingMs: 4000, WaitingCalls: 3, PatienceMs: 10000}})
		page := get(t, p, "").Body.String()
		wantIn(t, page, `<th role="rowheader" scope="row">retrier 1, <span class="mono">passthrough:///&lt;down&gt;</span></th>`)
		wantIn(t, page, `<td role="cell" data-label="Failing for">4 s</td>`)
		wantIn(t, page, `<td role="cell" data-label="Waiting">3</td>`)
		wantIn(t, page, `<td role="cell" data-label="Patience">10 s</td>`)
		wantIn(t, page, `<td role="cell" data-label="Gave up">0</td>`)
		time.Sleep(7 * time.Second)
		want(t, "when they have given up", getJSON(t, p, "").Targets,
			[]Target{{Retrier: 1, Target: "passthrough:///<down>", FailingMs: 11000, GaveUp: 3, PatienceMs: 10000}})
		wantIn(t, get(t, p, "").Body.String(), `<td role="cell" data-label="Patience">10 s <span class="chip bad">over</span></td>`)
		for _, other := range []string{"retrier=2", "target=passthrough:///echo"} {
			want(t, other, getJSON(t, p, other).Targets, []Target{})
		}
	})
}

// A deadline ends the wait for a connection before Patience does, early enough for the
// backoff.
func TestCallThatGetsNoConnectionBeforeItsDeadline(t *testing.T) {
	bubble(t, func(t *testing.T) {
		r := retrier(t)
		p := handler(t, r)
		want(t, "code", dialLater(t, r, time.Hour).echoWithin(5*time.Second, "ok"), "Unavailable")
		call := p.Snapshot().Calls[0]
		want(t, "outcome", call.Outcome, "deadline")
		want(t, "elapsed", call.ElapsedMs, 4000.0)
		wantIn(t, get(t, p, "").Body.String(), "stop: deadline too near for another attempt")
	})
}

// The default budget is a reserve of 3, to which answered calls add a fifth of a retry each,
// and time adds nothing.
func TestLevelOfTheDefaultBudget(t *testing.T) {
	bubble(t, func(t *testing.T) {
		r := retrier(t, grpcretry.WithPatience(0), grpcretrytest.Jitter(0))
		p := handler(t, r)
		c := dial(t, r, "passthrough:///echo")
		level := func(when, wanted string) {
			t.Helper()
			want(t, when, levels(p.Snapshot().Budgets[0]), wanted)
		}
		c.echo("ok")
		level("after a success", "0 s: 3.2; now 3.2")
		time.Sleep(20 * time.Second)
		level("when what it has earned is over", "20 s: 3.2; 0 s: 3; now 3")
		c.echo("1s:down") // 1 s, 2 s, 4 s and three more seconds for the attempts
		level("after three retries in vain", "31 s: 3.2; 11 s: 3; 10 s: 3; 9 s: 2; 8 s: 2; 6 s: 1; 5 s: 1; 1 s: 0; 0 s: 0; now 0")
		c.echo("down")
		want(t, "stopped", p.Snapshot().Total.Stopped, map[string]int64{"exhausted": 1, "budget": 1})
		time.Sleep(time.Minute)
		level("a minute later", "91 s: 3.2; 71 s: 3; 70 s: 3; 69 s: 2; 68 s: 2; 66 s: 1; 65 s: 1; 61 s: 0; 60 s: 0; 0 s: 0; now 0")
		b := newChart(&p.Snapshot().Budgets[0])
		want(t, "the chart of an empty one", b.Kind+"; "+b.Level+" "+b.Tone+"; up to "+b.Top+"; "+b.Title,
			"ratio budget: 20% of answered calls, a reserve of 3, over 10s; 0 bad; up to 3.2; "+
				"budget in the last 5 min: between 0 and 3.2 retries")
		for range 5 {
			c.echo("gone") // the server answers
		}
		c.echo("down ok") // its token is returned
		s := p.Snapshot()
		want(t, "rescued", s.Total.Rescued, 1)
		want(t, "level after five answered calls and a rescue", levels(Budget{Level: s.Budgets[0].Level}), "now 1.2")
		want(t, "the chart's tone", newChart(&s.Budgets[0]).Tone, "good")
		wantIn(t, get(t, p, "").Body.String(), "1 call refused")
	})
}

// Hedges are paid from a budget of their own, too, which the policy names.
func TestHedgeBudgetInWords(t *testing.T) {
	for _, tt := range []struct {
		name   string
		budget grpcretry.Budget
		want   string
	}{
		{"default", nil, "ratio budget: 10% of answered calls, a reserve of 1, over 1s, for each target"},
		{"unlimited", grpcretry.Unlimited, "no limit"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			r := retrier(t, grpcretry.WithMethod(echoMethod, grpcretry.WithHedging(
				grpcretry.Hedging{Delay: grpcretry.HedgeAfter(time.Second), Budget: tt.budget})))
			want(t, "Hedging.Budget", describe(r.Policy(echoMethod), echoMethod, false).Hedging.Budget, tt.want)
		})
	}
}

// A hedge that the hedge budget refuses is not sent: the call is what it would be without.
func TestHedgesOfANewClientAreNotSent(t *testing.T) {
	bubble(t, func(t *testing.T) {
		r := retrier(t, grpcretry.WithMethod(echoMethod, grpcretry.WithHedging(
			grpcretry.Hedging{Delay: grpcretry.HedgeAfter(time.Second)})))
		p := handler(t, r)
		c := dial(t, r, "passthrough:///echo")
		c.echo("5s:ok")
		want(t, "before there is a budget", p.Snapshot().Total.Hedges, 0)
		for range 9 {
			c.echo("ok") // with the first, ten that were answered
		}
		c.echo("5s:ok ok")
		want(t, "after ten answered calls", p.Snapshot().Total.Hedges, 1)
		want(t, "won", p.Snapshot().Total.HedgeWon, 1)
	})
}
