package debug

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/grpcretry/grpcretry"
	"github.com/grpcretry/grpcretry/internal/inside"
	echov1 "github.com/grpcretry/grpcretry/proto/echo/v1"
)

func TestPageCountsWhatHappens(t *testing.T) {
	bubble(t, func(t *testing.T) {
		r := retrier(t, unlimited) // every retry is to happen
		c := dial(t, r, "passthrough:///echo")
		c.echo("ok") // before anybody counts
		p := handler(t, r)
		for range 5 {
			c.echo("ok")
		}
		c.echo("down down ok")                      // two retries, rescued
		c.echo("down")                              // three retries, exhausted
		c.echo("gone")                              // not retryable
		c.echo("down gone")                         // one retry, not retryable
		c.echo("full ok")                           // pushback, rescued
		c.echo("never")                             // told to stop
		c.echoWithin(time.Second, "down")           // no time for a wait of 1 s
		c.echo("hang ok", attemptTimeout)           // rescued
		c.echoWithin(500*time.Millisecond, "hang")  // the caller's deadline
		c.echoWithin(1500*time.Millisecond, "down") // the second wait does not fit
		want(t, "Snapshot().Total", p.Snapshot().Total, Counts{
			Calls: 15, FirstTry: 5, Rescued: 3, FailedOnce: 4, FailedRetried: 3,
			Attempts: 5 + 3 + 4 + 1 + 2 + 2 + 1 + 1 + 2 + 1 + 2,
			Retries:  9, Wasted: 6, RetryShare: 9.0 / 24,
			Stopped: map[string]int64{"exhausted": 1, "not_retryable": 2, "pushback": 1, "deadline": 2, "deadline_exceeded": 1},
			Failed:  map[string]int64{"UNAVAILABLE": 11, "NOT_FOUND": 2, "RESOURCE_EXHAUSTED": 1, "DEADLINE_EXCEEDED": 2},
			Waits:   map[string]int64{"backoff": 8, "pushback": 1},
		})
		want(t, "recent counts", p.Snapshot().Recent, p.Snapshot().Total)
		methods := p.Snapshot().Methods
		if len(methods) != 1 || methods[0].Target != "passthrough:///echo" || methods[0].Method != echoMethod || methods[0].Retrier != 1 {
			t.Fatalf("Snapshot().Methods = %+v, want one of the echo service", methods)
		}
		want(t, "the method's counts", methods[0].Total, p.Snapshot().Total)
		want(t, "the method's recent counts", methods[0].Recent, p.Snapshot().Total)
	})
}

var attemptTimeout = grpcretry.WithAttemptTimeout(2 * time.Second)

// Attempts are counted when they end, so that a call in a long wait is seen.
func TestPageCountsCallsThatAreUnderWay(t *testing.T) {
	bubble(t, func(t *testing.T) {
		r := retrier(t)
		c := dial(t, r, "passthrough:///echo")
		p := handler(t, r)
		var call sync.WaitGroup
		call.Go(func() { c.echo("full ok") })
		time.Sleep(5 * time.Second)
		want(t, "in a wait", p.Snapshot().Total, Counts{
			Attempts: 1, Stopped: map[string]int64{}, Failed: map[string]int64{"RESOURCE_EXHAUSTED": 1}, Waits: map[string]int64{"pushback": 1},
		})
		call.Wait()
		want(t, "afterwards, Rescued", p.Snapshot().Total.Rescued, 1)
	})
}

// What calls and streams hold appears while they hold it.
func TestPageShowsWhatCallsHold(t *testing.T) {
	bubble(t, func(t *testing.T) {
		r := retrier(t, unlimited, inside.WithReplayMemory(1<<20).(grpcretry.Option))
		c := dial(t, r, "passthrough:///echo")
		p := handler(t, r)
		var calls sync.WaitGroup
		for range 1000 {
			calls.Go(func() { c.echo("full ok") })
		}
		ctx, cancel := context.WithCancel(t.Context())
		for range 100 {
			stream, err := c.Chat(ctx)
			if err == nil {
				err = stream.Send(&echov1.EchoRequest{Message: "hello"})
			}
			if err != nil {
				t.Fatal(err)
			}
		}
		time.Sleep(5 * time.Second)
		got := p.Snapshot().Retriers
		kept := inside.UsageOf(r).ReplayMemory
		want := []Retrier{{Number: 1, WaitingCalls: 1000, OpenStreams: 100, ReplayMemory: kept, ReplayLimit: 1 << 20}}
		if !slices.Equal(got, want) || kept < 100*5 {
			t.Errorf("Retriers = %+v, want %+v", got, want)
		}
		if page := get(t, p, "").Body.String(); !strings.Contains(page, "Now 1,000 calls wait, 100 streams are open, and ") {
			t.Errorf("the page does not say what calls hold:\n%s", page)
		}
		calls.Wait()
		cancel()
		synctest.Wait()
		if got, want := p.Snapshot().Retriers, []Retrier{{Number: 1, ReplayLimit: 1 << 20}}; !slices.Equal(got, want) {
			t.Errorf("in the end, Retriers = %+v, want %+v", got, want)
		}
	})
}

func TestRecentCountsGoByAndTotalsStay(t *testing.T) {
	bubble(t, func(t *testing.T) {
		r := retrier(t, grpcretry.WithBackoff(grpcretry.Constant(0)))
		c := dial(t, r, "passthrough:///echo")
		p := handler(t, r)
		c.echo("down ok")
		time.Sleep(20 * time.Second)
		c.echo("ok")
		time.Sleep(280*time.Second - time.Nanosecond) // 5 min - 1 ns
		s := p.Snapshot()
		want(t, "recent calls, within five minutes", s.Recent.Calls, 2)
		want(t, "steps, within five minutes", s.Steps[:2], []Step{
			{BeganSecondsAgo: s.Now.Sub(s.Since).Seconds(), Calls: 1, Attempts: 2, Retries: 1, Rescued: 1},
			{BeganSecondsAgo: s.Now.Sub(s.Since).Seconds() - 15, Calls: 1, Attempts: 1},
		})
		time.Sleep(15*time.Second + time.Nanosecond) // the first step is over
		s = p.Snapshot()
		want(t, "recent, a step later", s.Recent, Counts{Calls: 1, FirstTry: 1, Attempts: 1,
			Stopped: map[string]int64{}, Failed: map[string]int64{}, Waits: map[string]int64{}})
		want(t, "total, a step later", s.Total.Calls, 2)
		want(t, "steps, a step later", len(s.Steps), 21)
		time.Sleep(24 * time.Hour)
		s = p.Snapshot()
		want(t, "recent, a day later", s.Recent.Calls+s.Recent.Attempts, 0)
		want(t, "total, a day later", s.Total.Retries, 1)
		c.echo("ok")
		want(t, "recent, after another call", p.Snapshot().Recent.Calls, 1)
		want(t, "total, after another call", p.Snapshot().Total.Calls, 3)
	})
}

func TestCallsAreKeptAttemptByAttempt(t *testing.T) {
	bubble(t, func(t *testing.T) {
		r := retrier(t)
		c := dialFrom(t, r, "passthrough:///echo", "10.0.0.7:443")
		p := handler(t, r)
		ended := time.Now().Add(8300 * time.Millisecond)
		c.echo("100ms:down 200ms:full 1s:ok")
		want(t, "the call", p.Snapshot().Calls, []Call{{
			Retrier: 1, Target: "passthrough:///echo", Method: echoMethod,
			Ended: ended.Add(time.Second), ElapsedMs: 9300, Outcome: "recovered", Code: "OK", Made: 3,
			Attempts: []Attempt{
				{Number: 1, DurationMs: 100, Code: "UNAVAILABLE", Message: "db-down", Peer: "10.0.0.7:443",
					WaitSource: "none", Decision: "retry"},
				{Number: 2, StartMs: 1100, DurationMs: 200, Code: "RESOURCE_EXHAUSTED", Message: "queue is full", Peer: "10.0.0.7:443",
					WaitMs: 1000, WaitSource: "backoff", Decision: "retry"},
				{Number: 3, StartMs: 8300, DurationMs: 1000, Code: "OK", Peer: "10.0.0.7:443",
					WaitMs: 7000, WaitSource: "pushback", Decision: "success"},
			},
		}})
	})
}

func TestWhichCallsAreKept(t *testing.T) {
	for _, tt := range []struct {
		name string
		call func(*client)
		want string // outcome, code, decision and reason of the last attempt, refused wait
	}{
		{"success at once", func(c *client) { c.echo("ok") }, ""},
		{"not retryable at once", func(c *client) { c.echo("gone") }, ""},
		{"the caller's deadline in the first attempt", func(c *client) { c.echoWithin(time.Second, "hang") }, ""},
		{"rescued", func(c *client) { c.echo("down ok") }, "recovered OK success  0 "},
		{"exhausted", func(c *client) { c.echo("down") }, "exhausted UNAVAILABLE stop exhausted 0 "},
		{"not retryable after a retry", func(c *client) { c.echo("down gone") }, "not_retryable NOT_FOUND stop not_retryable 0 "},
		{"told to stop", func(c *client) { c.echo("never") }, "pushback UNAVAILABLE stop pushback 0 "},
		{"no time for the wait", func(c *client) { c.echoWithin(3*time.Second, "full") },
			"deadline RESOURCE_EXHAUSTED stop deadline 7000 pushback"},
		{"no budget", func(c *client) { c.echo("down", grpcretry.WithBudget(empty{}), grpcretry.WithPatience(0)) },
			"budget UNAVAILABLE stop budget 1000 backoff"},
		{"no budget for as long as it waits", func(c *client) { c.echo("down", grpcretry.WithBudget(empty{})) },
			"target_down UNAVAILABLE stop target_down 0 "},
		{"the caller went away in the wait", func(c *client) {
			ctx, cancel := context.WithTimeout(c.t.Context(), time.Second/2)
			defer cancel()
			untold, stop := context.WithCancel(context.WithoutCancel(ctx)) // a deadline would end the call before the wait
			defer context.AfterFunc(ctx, stop)()
			_, _ = c.Echo(untold, &echov1.EchoRequest{Message: "down"})
		}, "cancelled CANCELLED stop cancelled 0 "},
		{"a stream that has begun", func(c *client) { _ = c.expand("3s:down") }, ""},
		{"it may have run", func(c *client) { c.echo("down", grpcretry.WithUnsentOnly(true)) }, ""},
		{"it may have run after a retry", func(c *client) { c.echo("full down", grpcretry.WithUnsentOnly(true)) },
			"may_have_run UNAVAILABLE stop may_have_run 0 "},
		{"a stream that ends well", func(c *client) { _ = c.expand("ok") }, ""},
	} {
		t.Run(tt.name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				r := retrier(t)
				c := dial(t, r, "passthrough:///echo")
				p := handler(t, r)
				tt.call(c)
				got := ""
				for _, call := range p.Snapshot().Calls {
					last := call.Attempts[len(call.Attempts)-1]
					got += fmt.Sprintf("%s %s %s %s %v %s", call.Outcome, call.Code, last.Decision, last.Reason,
						call.RefusedWaitMs, call.RefusedWaitSource)
				}
				want(t, "kept", got, tt.want)
				want(t, "calls counted", p.Snapshot().Total.Calls, 1)
				get(t, p, "") // draws it
			})
		})
	}
}

// empty is a budget that refuses everything.
type empty struct{}

func (empty) Deposit(grpcretry.Outcome) {}
func (empty) Withdraw(time.Time) bool   { return false }
func (empty) Balance(time.Time) float64 { return 0 }

// Hedges overlap with what they are to overtake, and what loses has not failed.
func TestHedgesAreCountedAndDrawn(t *testing.T) {
	for _, tt := range []struct {
		message string // what the server does with each attempt; hedges go out after 1 s and 2 s
		want    Counts
		call    string // attempts with hedge, start, code, decision, reason and what followed
	}{
		{"ok", Counts{Calls: 1, FirstTry: 1, Attempts: 1}, ""},
		{"hang 100ms:ok", Counts{Calls: 1, HedgeWon: 1, Attempts: 2, Hedges: 1},
			"hedge won: 1 at 0 ms CANCELLED lost: cancelled, another attempt was decisive; " +
				"2 hedge at 1 s OK success: success"},
		{"1200ms:ok hang", Counts{Calls: 1, FirstTry: 1, Attempts: 2, Hedges: 1, HedgesWasted: 1},
			"first won: 1 at 0 ms OK success: success; " +
				"2 hedge at 1 s CANCELLED lost: cancelled, another attempt was decisive"},
		{"500ms:down ok", Counts{Calls: 1, Rescued: 1, Attempts: 2, Retries: 1, RetryShare: 0.5,
			Failed: map[string]int64{"UNAVAILABLE": 1}, Waits: map[string]int64{"backoff": 1}},
			"rescued: 1 at 0 ms UNAVAILABLE retry: retry after 1 s (backoff); 2 at 1.5 s OK success: success"},
		{"hang 500ms:down 100ms:ok", Counts{Calls: 1, HedgeWon: 1, Attempts: 3, Hedges: 2, HedgesWasted: 1,
			Failed: map[string]int64{"UNAVAILABLE": 1}},
			"hedge won: 1 at 0 ms CANCELLED lost: cancelled, another attempt was decisive; " +
				"2 hedge at 1 s UNAVAILABLE stop: stop, while others were under way; 3 hedge at 2 s OK success: success"},
		{"hang 500ms:gone", Counts{Calls: 1, FailedRetried: 1, Attempts: 2, Hedges: 1, HedgesWasted: 1,
			Stopped: map[string]int64{"not_retryable": 1}, Failed: map[string]int64{"NOT_FOUND": 1}},
			"not_retryable: 1 at 0 ms CANCELLED lost: cancelled, another attempt was decisive; " +
				"2 hedge at 1 s NOT_FOUND stop not_retryable: stop: failure is not retryable"},
		{"500ms:down hang 100ms:ok", Counts{Calls: 1, HedgeWon: 1, Attempts: 3, Retries: 1, RetryShare: 1.0 / 3, Hedges: 1,
			Failed: map[string]int64{"UNAVAILABLE": 1}, Waits: map[string]int64{"backoff": 1}},
			"hedge won: 1 at 0 ms UNAVAILABLE retry: retry after 1 s (backoff); " +
				"2 at 1.5 s CANCELLED lost: cancelled, another attempt was decisive; 3 hedge at 2.5 s OK success: success"},
		{"3s:ok 1500ms:down 200ms:down", Counts{Calls: 1, FirstTry: 1, Attempts: 3, Hedges: 2, HedgesWasted: 2,
			Failed: map[string]int64{"UNAVAILABLE": 2}},
			"first won: 1 at 0 ms OK success: success; 2 hedge at 1 s UNAVAILABLE stop: stop, while others were under way; " +
				"3 hedge at 2 s UNAVAILABLE stop: stop, while others were under way"},
	} {
		t.Run(tt.message, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				r := retrier(t, grpcretry.WithMethod(echoMethod, grpcretry.WithPolicy(grpcretry.Policy{MaxAttempts: 3, Hedging: &grpcretry.Hedging{
					Delay: grpcretry.HedgeAfter(time.Second), Budget: grpcretry.Unlimited}})))
				c := dial(t, r, "passthrough:///echo")
				p := handler(t, r)
				c.echo(tt.message)
				s := getJSON(t, p, "")
				for _, names := range []*map[string]int64{&tt.want.Stopped, &tt.want.Failed, &tt.want.Waits} {
					if *names == nil {
						*names = map[string]int64{}
					}
				}
				want(t, "counts", s.Total, tt.want)
				got := ""
				for i := range s.Calls {
					view := newCallView(&s.Calls[i], s.Now, false, scaleOf(s.Calls))
					got = view.Outcome + ": "
					for j, a := range s.Calls[i].Attempts {
						if j > 0 {
							got += "; "
						}
						if got += fmt.Sprint(a.Number); a.Hedge {
							got += " hedge"
						}
						if got += " at " + lengthMs(a.StartMs) + " " + a.Code + " " + a.Decision; a.Reason != "" {
							got += " " + a.Reason
						}
						got += ": " + view.Attempts[j].Then
					}
				}
				want(t, "the call", got, tt.call)
				get(t, p, "")
			})
		})
	}
}

func TestTargetsAndMethodsAreTold(t *testing.T) {
	bubble(t, func(t *testing.T) {
		one, two := retrier(t), retrier(t)
		p := handler(t, one, nil, two, one)
		cart, user := dial(t, one, "passthrough:///cart"), dial(t, one, "passthrough:///user")
		cart.echo("ok")
		cart.echo("down ok")
		user.echo("ok")
		_ = user.expand("ok")
		dial(t, two, "passthrough:///cart").echo("ok")
		got := []string{}
		for _, m := range getJSON(t, p, "").Methods {
			got = append(got, fmt.Sprint(m.Retrier, m.Target, m.Method, m.Total.Calls, m.Budget))
		}
		want(t, "methods", got, []string{
			fmt.Sprint(1, "passthrough:///cart", echoMethod, 2, 1),
			fmt.Sprint(1, "passthrough:///user", echoMethod, 1, 2),
			fmt.Sprint(1, "passthrough:///user", "/grpcretry.test.v1.EchoService/Expand", 1, 2),
			fmt.Sprint(2, "passthrough:///cart", echoMethod, 1, 3),
		})
		want(t, "calls of the target cart", getJSON(t, p, "target=passthrough:///cart").Total.Calls, 3)
		want(t, "of retrier 1", getJSON(t, p, "target=passthrough:///cart&retrier=1").Total.Calls, 2)
		want(t, "of a method", getJSON(t, p, "method="+echoMethod).Total.Calls, 4)
		want(t, "kept of retrier 2", len(getJSON(t, p, "retrier=2").Calls), 0)
		want(t, "budgets of retrier 2", len(getJSON(t, p, "retrier=2").Budgets), 1)
		want(t, "of nothing", getJSON(t, p, "target=none").Total.Calls, 0)
	})
}

// Each Handler counts by itself; Close ends that, and the page stays.
func TestHandlerTwiceAndClose(t *testing.T) {
	bubble(t, func(t *testing.T) {
		r := retrier(t)
		c := dial(t, r, "passthrough:///echo")
		first := handler(t, r)
		c.echo("ok")
		second := handler(t, r)
		c.echo("ok")
		first.Close()
		closed := time.Now()
		time.Sleep(time.Minute)
		first.Close()
		c.echo("ok")
		want(t, "calls of the first page", first.Snapshot().Total.Calls, 2)
		want(t, "calls of the second page", second.Snapshot().Total.Calls, 2)
		if got := first.Snapshot().Closed; got == nil || !got.Equal(closed) {
			t.Errorf("Closed = %v, want %v", got, closed)
		}
		want(t, "Closed of the second page", second.Snapshot().Closed == nil, true)
		get(t, first, "")
	})
}

func TestPageWithoutRetriersOrCalls(t *testing.T) {
	for _, tt := range []struct {
		page *Page
		want string
	}{
		{handler(t), "debug.Handler was called without a Retrier"},
		{handler(t, nil), "debug.Handler was called without a Retrier"},
		{handler(t, retrier(t)), "No calls yet"},
	} {
		s := getJSON(t, tt.page, "")
		if s.Methods == nil || s.Budgets == nil || s.Calls == nil || s.Total.Stopped == nil {
			t.Errorf("%s: %+v has null where a list or an object should be", tt.want, s)
		}
		wantIn(t, get(t, tt.page, "").Body.String(), tt.want)
	}
}

// Calls, reads and Close may all happen at once.
func TestPageIsSafeForConcurrentUse(t *testing.T) {
	bubble(t, func(t *testing.T) {
		r := retrier(t, unlimited, grpcretry.WithBackoff(grpcretry.Constant(time.Millisecond)))
		p := handler(t, r)
		clients := []*client{dial(t, r, "passthrough:///cart"), dial(t, r, "passthrough:///user")}
		var all sync.WaitGroup
		for i := range 20 {
			c := clients[i%2]
			all.Go(func() {
				for range 10 {
					c.echo("ok")
					c.echo("down ok")
					_ = c.expand("1s:ok")
				}
			})
			if i%5 > 0 {
				continue
			}
			all.Go(func() {
				for range 5 {
					get(t, p, "")
					getJSON(t, p, "window=all")
					time.Sleep(time.Second)
				}
			})
		}
		all.Wait()
		s := p.Snapshot()
		want(t, "calls", s.Total.Calls, 600)
		want(t, "rescued", s.Total.Rescued, 200)
		want(t, "recent", s.Recent, s.Total)
		all.Go(p.Close)
		all.Go(func() { get(t, p, "") })
		all.Wait()
	})
}
