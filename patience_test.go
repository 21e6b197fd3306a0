package grpcretry

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/time/rate"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"

	echov1 "github.com/grpcretry/grpcretry/proto/echo/v1"
)

// The tests here are about what calls to one target learn from one another, see WithPatience.

const tenth = second / 10

// awayUntil is a script of a server that responds UNAVAILABLE until d after its start.
func awayUntil(d time.Duration) func(int) answer {
	start := time.Now()
	return func(int) answer {
		if time.Since(start) < d {
			return unavailable()
		}
		return ok()
	}
}

// A timed call starts at a time after the others, and ends with err after its start.
type timedCall struct {
	at      time.Duration
	message string
	opts    []CallOption

	err  error
	took time.Duration
}

// makeCalls makes the calls at their times, and returns when all have ended.
func makeCalls(t *testing.T, client echov1.EchoServiceClient, calls ...*timedCall) {
	t.Helper()
	var all sync.WaitGroup
	for _, c := range calls {
		all.Go(func() {
			time.Sleep(c.at)
			start := time.Now()
			opts := make([]grpc.CallOption, len(c.opts))
			for i, o := range c.opts {
				opts[i] = o
			}
			_, c.err = client.Echo(t.Context(), &echov1.EchoRequest{Message: c.message}, opts...)
			c.took = time.Since(start)
		})
	}
	all.Wait()
}

// wantServed compares what the server saw, as "message at time".
func wantServed(t *testing.T, server *fixture, want ...string) {
	t.Helper()
	var got []string
	for _, one := range server.attempts() {
		got = append(got, fmt.Sprintf("%s at %v", one.message, one.at))
	}
	if !slices.Equal(got, want) {
		t.Errorf("server saw\n%q, want\n%q", got, want)
	}
}

func TestARetryThatCanLearnNothingIsNotSent(t *testing.T) {
	bubble(t, func(t *testing.T) {
		server := serve(t, awayUntil(300*time.Millisecond))
		budget := &tally{}
		client := server.fixed(t, 0.5, WithBackoff(Constant(tenth)), WithBudget(budget))
		a, b := &timedCall{message: "a"}, &timedCall{message: "b", at: 60 * time.Millisecond}
		makeCalls(t, client, a, b)
		// At 100 ms b has failed during a's wait, so a waits for half of its 100 ms of trouble, and sends at 150 ms
		// because nobody has failed since. At 160 ms b's wait has seen that failure: it waits for half of 160 ms and
		// sends at 240 ms. Its next wait is half of 240 ms; a's, of 100 ms, is repeated for half of 250 ms.
		wantServed(t, server, "a at 0s", "b at 60ms", "a at 150ms", "b at 240ms", "b at 360ms", "a at 375ms")
		if a.err != nil || b.err != nil {
			t.Errorf("the calls ended with %v and %v, want success", a.err, b.err)
		}
	})
}

// A burst of calls that nobody follows has the reserve of three, which they do not use up at once. When the
// first retry has failed, the next one is sent after seven times as long, or when a token's share of half the time left is over.
func TestABurstOfCallsKeepsTokensForLater(t *testing.T) {
	for _, tt := range []struct {
		name  string
		calls int
		away  time.Duration
		opts  []Option
		tries []time.Duration // the retries that fail, and the first that does not
		saved bool
	}{
		{"2 calls, 2 s", 2, 2 * second, nil, []time.Duration{75, 562, 3965}, true},
		{"10 calls, 400 ms", 10, 4 * tenth, nil, []time.Duration{75, 563}, true},
		{"10 calls, 2 s", 10, 2 * second, nil, []time.Duration{75, 563, 3968}, true},
		{"100 calls, 2 s", 100, 2 * second, nil, []time.Duration{84, 594, 4324}, true},
		{"10 calls, 5 s", 10, 5 * second, nil, []time.Duration{75, 563, 3968}, false},
		{"10 calls, 0.9 s, within 2 s", 10, 9 * tenth, []Option{WithMaxElapsed(2 * second)}, []time.Duration{75, 563, 1283}, true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				server := serve(t, awayUntil(tt.away))
				client := server.fixed(t, 0.5, tt.opts...)
				calls := make([]*timedCall, tt.calls)
				for i := range calls {
					calls[i] = &timedCall{message: fmt.Sprint(i), at: time.Duration(i) * time.Millisecond / 10}
				}
				makeCalls(t, client, calls...)
				var tries []time.Duration
				for _, one := range server.attempts() {
					if one.previous > 0 && len(tries) < len(tt.tries) {
						tries = append(tries, one.at/time.Millisecond)
					}
				}
				if !slices.Equal(tries, tt.tries) {
					t.Errorf("retries were sent at %d ms, want %d", tries, tt.tries)
				}
				for _, c := range calls {
					if saved := c.err == nil; saved != tt.saved {
						t.Errorf("call %s ended with %v after %v; want saved: %v", c.message, c.err, c.took, tt.saved)
					}
				}
			})
		})
	}
}

// If the server needs time to fail, or to answer, the others wait for the retries that are in flight: for what they tell, and for their
// tokens.
func TestABurstSurvivesTheOutageOfASlowServer(t *testing.T) {
	for _, n := range []int{2, 3, 10, 100} {
		for _, away := range []time.Duration{3 * tenth, second, 2 * second} {
			everyFailure(t, fmt.Sprintf("%d calls, %v", n, away), func(t *testing.T, failure answer) {
				const takes = 30 * time.Millisecond
				script := awayUntil(away)
				server := serve(t, func(n int) answer {
					if a := script(n); a.err == nil {
						return a.after(takes)
					}
					return failure.after(takes)
				})
				calls := make([]*timedCall, n)
				for i := range calls {
					calls[i] = &timedCall{}
				}
				var drawn atomic.Int64
				spread := withRandom(func() float64 { return math.Mod(float64(drawn.Add(1))*math.Phi, 1) })
				makeCalls(t, server.client(t, spread), calls...)
				for i, c := range calls {
					if c.err != nil {
						t.Errorf("call %d ended with %v after %v", i, c.err, c.took)
					}
				}
				if made := len(server.attempts()); made > 2*n+3 {
					t.Errorf("%d attempts, want at most one that succeeds for each call, one that fails, and three more", made)
				}
			})
		}
	}
}

// A retry that was about to be sent, and got no token, is not waited for like one in flight.
func TestARefusedRetryIsNotWaitedFor(t *testing.T) {
	bubble(t, func(t *testing.T) {
		server := serve(t, awayUntil(3*tenth))
		limiter := rate.NewLimiter(1, 1)
		limiter.Allow() // the next token comes after a second
		client := server.fixed(t, 0.5, WithBackoff(Constant(tenth)),
			WithBudget(AllBudgets(realRatioBudget(t, RatioBudget{Reserve: 1}), NewRateBudget(limiter))))
		makeCalls(t, client, &timedCall{message: "a"}, &timedCall{message: "b", at: 60 * time.Millisecond})
		if at := server.times()[2]; at > 2*second {
			t.Errorf("the first retry is sent after %v, want soon after 1s", at)
		}
	})
}

// A short outage costs few attempts, also if the client has earned many tokens.
func TestAnOutageCostsFewAttempts(t *testing.T) {
	for _, lasts := range []time.Duration{2 * tenth, 3 * tenth, 5 * tenth, second, 2 * second} {
		bubble(t, func(t *testing.T) {
			start, during, met := time.Now(), 0, 0
			server := serve(t, func(int) answer {
				if since := (time.Since(start) - 12*second) % (15 * second); since >= 0 && since < lasts {
					during++
					return unavailable()
				}
				return ok().after(50 * time.Millisecond)
			})
			var calls []*timedCall
			for at := 3 * time.Millisecond; at < 165*second; at += tenth {
				if since := (at - 12*second) % (15 * second); since >= 0 && since < lasts {
					met++
				}
				calls = append(calls, &timedCall{at: at})
			}
			var drawn atomic.Int64
			makeCalls(t, server.client(t, withRandom(func() float64 { return math.Mod(float64(drawn.Add(1))*math.Phi, 1) })), calls...)
			for _, c := range calls {
				if c.err != nil {
					t.Errorf("the call at %v ended with %v after %v", c.at, c.err, c.took)
				}
			}
			oneRetry := 1 + float64(tenth)/float64(lasts)
			if made := float64(during) / float64(met); made > max(1.3, oneRetry) {
				t.Errorf("an outage of %v costs %.2f attempts for each call, want at most 1.3, or one retry", lasts, made)
			}
		})
	}
}

// A backoff with full jitter has hardly a shortest wait, which would let a burst spend all tokens within a second.
func TestABurstWithShortWaitsKeepsTokens(t *testing.T) {
	bubble(t, func(t *testing.T) {
		away := awayUntil(second)
		server := serve(t, func(n int) answer {
			if a := away(n); a.err == nil {
				return a
			}
			return overloaded().after(time.Millisecond)
		})
		calls := make([]*timedCall, 10)
		for i := range calls {
			calls[i] = &timedCall{}
		}
		makeCalls(t, server.fixed(t, 0.01), calls...)
		for i, c := range calls {
			if c.err != nil {
				t.Errorf("call %d ended with %v after %v", i, c.err, c.took)
			}
		}
	})
}

// everyFailure runs a test in a bubble for each of the codes that are retried by default.
func everyFailure(t *testing.T, name string, f func(t *testing.T, failure answer)) {
	t.Helper()
	for _, failure := range []answer{unavailable(), overloaded()} {
		t.Run(name+", "+Attempt{Err: failure.err}.Code().String(), func(t *testing.T) { bubble(t, func(t *testing.T) { f(t, failure) }) })
	}
}

// Tokens are kept only if time refills none.
func TestTokensThatComeByThemselvesAreNotKept(t *testing.T) {
	for _, tt := range []struct {
		name string
		opt  Option
	}{
		{"a floor", WithRatioBudget(RatioBudget{Reserve: Nothing, MinPerSecond: 0.3})},
		{"a rate", WithBudget(NewRateBudget(rate.NewLimiter(0, 9)))},
		{"concurrency", WithBudget(concurrencyBudgetOf(t, 1))},
	} {
		t.Run(tt.name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				server := serve(t, awayUntil(300*time.Millisecond))
				client := server.fixed(t, 0.5, WithBackoff(Constant(tenth)), tt.opt)
				makeCalls(t, client, &timedCall{message: "a"}, &timedCall{message: "b", at: 60 * time.Millisecond})
				wantServed(t, server, "a at 0s", "b at 60ms", "a at 150ms", "b at 240ms", "b at 360ms", "a at 375ms")
			})
		})
	}
}

// Nor are those of a budget that only looks at the moment, or refuses nothing, also if a retry has been sent a moment ago.
func TestOnlyScarceTokensAreKept(t *testing.T) {
	of := &target{all: newTargets(nil)}
	now := instantOf(noon)
	of.fail(now.Add(-5*second), 10*second) // longer ago than a token's share
	of.waiting.Store(2)
	known := of.look(now, 10*second)
	of.scouted.Store(int64(now)) // of another call that is due
	for _, tt := range []struct {
		name   string
		budget Budget
		kept   bool
	}{
		{"tokens that must be earned", realRatioBudget(t, RatioBudget{}), true},
		{"no tokens", Unlimited, false},
		{"slots", concurrencyBudgetOf(t, 1), false},
	} {
		w := &waiter{target: of, patience: 10 * second}
		if got := w.keeps(&ledger{budget: tt.budget, now: noon, freeAttempt: 1}, known, &limits{}, now); got != tt.kept {
			t.Errorf("%s: kept is %v, want %v", tt.name, got, tt.kept)
		}
	}
}

// A tenth of a token, ten times, is a little less than one token. It is enough for a call that waits alone.
func TestALoneCallUsesItsToken(t *testing.T) {
	bubble(t, func(t *testing.T) {
		server := serve(t, func(n int) answer {
			switch n {
			case 11:
				return unavailable().pushback("-1")
			case 12:
				return unavailable()
			default:
				return ok()
			}
		})
		client := server.fixed(t, 0.5, WithBackoff(Constant(tenth)), WithRatioBudget(RatioBudget{Ratio: 0.1, Reserve: Nothing}))
		for range 10 {
			makeCalls(t, client, &timedCall{at: second * 6 / 10})
		}
		alone := &timedCall{at: second}
		makeCalls(t, client, &timedCall{}, alone)
		if want := second / 2; alone.err != nil || alone.took != want { // of the trouble that it has come into
			t.Errorf("the call ended with %v after %v, want success after %v", alone.err, alone.took, want)
		}
	})
}

func TestFirstAttemptsAreAlwaysSentAndOneAnswerEndsTheTrouble(t *testing.T) {
	bubble(t, func(t *testing.T) {
		server := serve(t, awayUntil(second))
		budget := &tally{}
		client := server.fixed(t, 0.5, WithBackoff(Constant(tenth)), WithBudget(budget))
		calls := make([]*timedCall, 300) // one each 10 ms
		for i := range calls {
			calls[i] = &timedCall{message: fmt.Sprint(i), at: time.Duration(i) * 10 * time.Millisecond}
		}
		makeCalls(t, client, calls...)
		firsts := map[string]time.Duration{}
		during := 0
		for _, one := range server.attempts() {
			if _, seen := firsts[one.message]; !seen {
				firsts[one.message] = one.at
			}
			if one.at < second {
				during++
			}
		}
		for _, c := range calls {
			if c.err != nil {
				t.Fatalf("call %s: %v", c.message, c.err)
			}
			if firsts[c.message] != c.at {
				t.Errorf("the first attempt of call %s was sent at %v, want %v", c.message, firsts[c.message], c.at)
			}
		}
		if during != 100 {
			t.Errorf("the server saw %d attempts while it was failing, want only the first ones of 100 calls", during)
		}
		if budget.withdrawn != 100 {
			t.Errorf("%d tokens were taken, want one for each of the 100 calls that were rescued", budget.withdrawn)
		}
	})
}

func TestAWaitIsAsLongAsTheTrouble(t *testing.T) {
	bubble(t, func(t *testing.T) {
		server := serve(t, script(unavailable(), unavailable(), unavailable(), ok()))
		client := server.fixed(t, 0.5, WithBackoff(Constant(second)), WithMaxAttempts(9), WithBudget(Unlimited))
		makeCalls(t, client, &timedCall{message: "a"})
		// The third wait is half of the 2 s that the target has been failing; the fourth would be longer than the backoff.
		wantServed(t, server, "a at 0s", "a at 1s", "a at 2s", "a at 3s")
	})
	bubble(t, func(t *testing.T) {
		server := serve(t, script(unavailable(), unavailable(), unavailable(), unavailable(), ok()))
		client := server.fixed(t, 0.75, WithBackoff(Constant(second)), WithMaxAttempts(9), WithBudget(Unlimited))
		makeCalls(t, client, &timedCall{message: "a"})
		wantServed(t, server, "a at 0s", "a at 1s", "a at 2s", "a at 3.5s", "a at 6.125s") // 0.75 × 2 s, 0.75 × 3.5 s
	})
}

func TestOnlyAnAbsentTargetIsWaitedFor(t *testing.T) {
	for _, tt := range []struct {
		name   string
		other  time.Duration // when another call is answered; 0 for never
		reason error
		took   time.Duration
	}{
		// The wait of 100 ms is repeated for half the trouble each time, at 150, 225, 337.5 … and not past 10 s.
		{"nothing is answered", 0, ErrTargetDown, 0},
		{"another call is answered during the wait", 50 * time.Millisecond, ErrBudgetExhausted, tenth},
	} {
		t.Run(tt.name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				server := serve(t, nil)
				server.script = func(int) answer {
					if tt.other > 0 && time.Since(server.start) == tt.other {
						return ok()
					}
					return unavailable()
				}
				client := server.fixed(t, 0.5, WithBackoff(Constant(tenth)), WithBudget(stingy{}))
				a, other := &timedCall{message: "a"}, &timedCall{message: "other", at: tt.other}
				calls := []*timedCall{a}
				if tt.other > 0 {
					calls = append(calls, other)
				}
				makeCalls(t, client, calls...)
				wantStop(t, a.err, codes.Unavailable, tt.reason, 1)
				if other.err != nil {
					t.Errorf("the other call: %v", other.err)
				}
				if tt.took > 0 && a.took != tt.took || tt.took == 0 && (a.took < 6*second || a.took > 10*second) {
					t.Errorf("the call took %v", a.took)
				}
			})
		})
	}
}

// While a retry in flight has the only token, which it gives back if it succeeds, another call waits for it, if the target is back.
func TestATokenInUseIsWaitedFor(t *testing.T) {
	inUse := []string{"a at 0s", "b at 1ms", "answered at 2s", "a at 4s"}
	for _, tt := range []struct {
		name   string
		budget Option
		retry  answer   // to a's, after 200 ms
		then   []string // what follows
		took   time.Duration
	}{
		// At 4.001 s, b waits again for half a second.
		{"a ratio budget", WithRatioBudget(RatioBudget{Reserve: 1}), ok(), []string{"b at 4.501s"}, 0},
		{"it is used in vain", WithRatioBudget(RatioBudget{Reserve: 1}), unavailable(), nil, 9 * second / 2},
		{"a slot", WithBudget(concurrencyBudgetOf(t, 1)), ok(), nil, 4 * second},
		{"it is never given back", WithBudget(NewRateBudget(rate.NewLimiter(0, 1))), ok(), nil, 4 * second},
	} {
		t.Run(tt.name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				server := serve(t, script(unavailable(), unavailable(), ok(), tt.retry.after(2*tenth), ok()))
				client := server.fixed(t, 0.5, WithBackoff(Constant(4*second)), WithMaxAttempts(2), tt.budget)
				b := &timedCall{message: "b", at: time.Millisecond}
				makeCalls(t, client, &timedCall{message: "a"}, b, &timedCall{message: "answered", at: 2 * second})
				wantServed(t, server, append(slices.Clip(inUse), tt.then...)...)
				if tt.then == nil {
					wantStop(t, b.err, codes.Unavailable, ErrBudgetExhausted, 1)
				} else if b.err != nil {
					t.Errorf("b ended with %v, want success", b.err)
				}
				if tt.took > 0 && b.took != tt.took {
					t.Errorf("b took %v, want %v", b.took, tt.took)
				}
			})
		})
	}
}

// If no retry was sent for three seconds, none gives a token back, and so no call waits for that.
func TestATokenThatNobodyHasIsNotWaitedFor(t *testing.T) {
	bubble(t, func(t *testing.T) {
		server := serve(t, script(unavailable(), ok()))
		client := server.fixed(t, 0.5, WithBackoff(Constant(4*second)), WithRatioBudget(RatioBudget{Ratio: 0.1, Reserve: Nothing}))
		a := &timedCall{message: "a"}
		makeCalls(t, client, a, &timedCall{message: "answered", at: 2 * second})
		wantStop(t, a.err, codes.Unavailable, ErrBudgetExhausted, 1)
		if a.took != 4*second {
			t.Errorf("the call took %v, want 4s", a.took)
		}
	})
}

// A target that has failed a moment ago is not back, although it has answered since: calls that wait for its tokens would be a queue.
func TestATokenInUseIsNotWaitedForIfTheTargetStillFails(t *testing.T) {
	bubble(t, func(t *testing.T) {
		server := serve(t, script(unavailable(), unavailable(), unavailable(), ok(), ok().after(second)))
		client := server.fixed(t, 0.5, WithBackoff(Constant(4*second)), WithRatioBudget(RatioBudget{Reserve: 1}))
		b := &timedCall{message: "b", at: time.Millisecond}
		makeCalls(t, client, &timedCall{message: "a"}, b, &timedCall{message: "fails", at: 39 * tenth, opts: onlyOnce},
			&timedCall{message: "answered", at: 395 * tenth / 10})
		wantServed(t, server, "a at 0s", "b at 1ms", "fails at 3.9s", "answered at 3.95s", "a at 4s")
		wantStop(t, b.err, codes.Unavailable, ErrBudgetExhausted, 1)
		if b.took != 4*second {
			t.Errorf("b took %v, want 4s", b.took)
		}
	})
}

// A retry that is cancelled holds nobody up any more.
func TestACancelledRetryIsNotWaitedFor(t *testing.T) {
	bubble(t, func(t *testing.T) {
		server := serve(t, script(unavailable(), unavailable(), hang(), ok()))
		client := server.fixed(t, 0.5)
		go func() {
			time.Sleep(time.Millisecond)
			ctx, cancel := context.WithCancel(t.Context())
			time.AfterFunc(3*tenth, cancel)
			_, _ = client.Echo(ctx, &echov1.EchoRequest{Message: "cancelled"})
		}()
		makeCalls(t, client, &timedCall{message: "a"})
		wantServed(t, server, "a at 0s", "cancelled at 1ms", "cancelled at 76ms", "a at 379.6875ms")
	})
}

// A failure during the wait puts off no retry if something was answered as well: the target is there.
func TestARetryIsSentIfAnythingWasAnswered(t *testing.T) {
	bubble(t, func(t *testing.T) {
		server := serve(t, script(unavailable(), ok(), unavailable(), ok()))
		client := server.client(t, WithBackoff(Constant(tenth)), WithBudget(Unlimited))
		makeCalls(t, client, &timedCall{message: "a"}, &timedCall{message: "answered", at: tenth / 4},
			&timedCall{message: "b", at: tenth / 2, opts: onlyOnce})
		wantServed(t, server, "a at 0s", "answered at 25ms", "b at 50ms", "a at 100ms")
	})
	bubble(t, func(t *testing.T) { // with the default budget it must be the latest news
		server := serve(t, script(unavailable(), unavailable(), ok(), ok()))
		client := server.client(t, WithBackoff(Constant(tenth)))
		makeCalls(t, client, &timedCall{message: "a"}, &timedCall{message: "b", at: tenth / 4, opts: onlyOnce},
			&timedCall{message: "answered", at: tenth / 2})
		wantServed(t, server, "a at 0s", "b at 25ms", "answered at 50ms", "a at 100ms")
	})
}

// A retry that would be sent at the very end of the patience is sent.
func TestAWaitMayEndWithThePatience(t *testing.T) {
	bubble(t, func(t *testing.T) {
		server := serve(t, script(unavailable(), ok()))
		client := server.client(t, WithBackoff(Constant(second)), WithPatience(second))
		makeCalls(t, client, &timedCall{message: "a"})
		wantServed(t, server, "a at 0s", "a at 1s")
	})
}

func TestAThrottleIsNeverWaitedFor(t *testing.T) {
	bubble(t, func(t *testing.T) {
		throttle, err := NewThrottle(2, 1)
		if err != nil {
			t.Fatal(err)
		}
		server := serve(t, always(unavailable()))
		client := server.client(t, WithBackoff(Constant(tenth)), WithBudget(AllBudgets(Unlimited, throttle)))
		a := &timedCall{message: "a"}
		makeCalls(t, client, a)
		wantStop(t, a.err, codes.Unavailable, ErrBudgetExhausted, 1)
		if a.took != 0 {
			t.Errorf("the call took %v, want 0s", a.took)
		}
	})
}

// The budget beside a throttle is, as long as the throttle has tokens.
func TestTheBudgetBesideAThrottleIsWaitedFor(t *testing.T) {
	bubble(t, func(t *testing.T) {
		server := serve(t, awayUntil(second))
		beside := NewRateBudget(rate.NewLimiter(1, 1))
		beside.Withdraw(time.Now())
		client := server.client(t, WithBackoff(Constant(tenth)), WithBudget(AllBudgets(throttleOf(t, 100, 1), beside)))
		a := &timedCall{message: "a"}
		makeCalls(t, client, a)
		if a.err != nil {
			t.Error(a.err)
		}
	})
}

// Nor is one that refuses only when the wait is over, because another call has failed meanwhile.
func TestAThrottleThatRefusesAfterTheWait(t *testing.T) {
	bubble(t, func(t *testing.T) {
		server := serve(t, always(unavailable()))
		logs := &logRecorder{}
		client := server.client(t, WithBackoff(Constant(tenth)), WithBudget(throttleOf(t, 4, 1)),
			WithLogger(slog.New(onlyAbove{logs, slog.LevelInfo})))
		a := &timedCall{message: "a"}
		makeCalls(t, client, a, &timedCall{message: "b", at: tenth / 2, opts: onlyOnce})
		wantStop(t, a.err, codes.Unavailable, ErrBudgetExhausted, 1)
		wantLines(t, logs, "reason=max_elapsed", "calls wait for it", "budget exhausted") // and not that the patience is over
		if a.took > second {
			t.Errorf("the call took %v, although a throttle is not waited for", a.took)
		}
	})
}

func TestPatienceEnds(t *testing.T) {
	bubble(t, func(t *testing.T) {
		server := serve(t, awayUntil(time.Minute))
		client := server.fixed(t, 0.5, WithPatience(2*second))
		var calls []*timedCall
		for i := range 600 { // ten a second
			calls = append(calls, &timedCall{message: fmt.Sprint(i), at: time.Duration(i) * tenth})
		}
		makeCalls(t, client, calls...)
		for i, c := range calls {
			switch e := asError(t, c.err); {
			case c.at+c.took > 2*second && c.took > 0:
				t.Fatalf("call %d, at %v, took %v, although the patience is over after 2s", i, c.at, c.took)
			case !errors.Is(c.err, ErrTargetDown):
				t.Fatalf("call %d, at %v: %v, want ErrTargetDown", i, c.at, c.err)
			case c.at > 2*second && len(e.Attempts) != 1:
				t.Fatalf("call %d, at %v, made %d attempts, want 1", i, c.at, len(e.Attempts))
			}
		}
		if n := len(server.attempts()); n > 620 {
			t.Errorf("600 calls made %d attempts, want hardly more", n)
		}
	})
}

// A call whose time is over while it waits for a token says so: otherwise it would look as if the target had been asked again.
func TestACallThatGotNoTokenSaysSo(t *testing.T) {
	const noToken = " (the client-side retry budget had no token for another attempt): rpc error"
	for name, tt := range map[string]struct {
		opts   []Option
		limit  time.Duration
		reason error
		text   string
	}{
		"patience":    {nil, time.Minute, ErrTargetDown, ": target is down" + noToken},
		"deadline":    {nil, 5 * second, ErrDeadline, ": deadline too near for another attempt" + noToken},
		"max elapsed": {[]Option{WithMaxElapsed(5 * second)}, time.Minute, ErrMaxElapsed, " near for another attempt" + noToken},
		"a token in time": {[]Option{WithBudget(NewRateBudget(rate.NewLimiter(0.25, 1)))}, 7 * second, ErrDeadline,
			" (a wait of 4s by backoff was not started): rpc error"},
		"no patience": {[]Option{WithPatience(0)}, time.Minute, ErrBudgetExhausted, " (a wait of 1s by backoff was not started): rpc error"},
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				budget := RatioBudget{Reserve: Nothing}
				server := serve(t, always(unavailable()))
				client := server.fixed(t, 0.5, append([]Option{steady, WithRatioBudget(budget)}, tt.opts...)...)
				ctx, cancel := context.WithTimeout(t.Context(), tt.limit)
				defer cancel()
				_, err := client.Echo(ctx, request())
				if !errors.Is(err, tt.reason) || !strings.Contains(err.Error(), tt.text) {
					t.Errorf("err = %v, want %v, and a text with %q", err, tt.reason, tt.text)
				}
			})
		})
	}
}

func TestTooManyCallsWait(t *testing.T) {
	bubble(t, func(t *testing.T) {
		server := serve(t, awayUntil(tenth))
		r := retrierOf(t, WithBackoff(Constant(tenth)), unmoved)
		of := r.targets.Dialed("passthrough:///echo", func() string { return "passthrough:///echo" })
		of.waiting.Store(maxWaiting - 1)
		client := newEchoClient(t, server, r)
		a, b := &timedCall{message: "a"}, &timedCall{message: "b", at: tenth / 2}
		makeCalls(t, client, a, b)
		if a.err != nil {
			t.Errorf("the call that waits as number 10,000: %v", a.err)
		}
		wantStop(t, b.err, codes.Unavailable, ErrTargetDown, 1)
		if waiting := of.waiting.Load(); waiting != maxWaiting-1 {
			t.Errorf("%d calls wait after all have ended, want %d", waiting, maxWaiting-1)
		}
	})
}

func TestTooManyCallsWaitForAConnection(t *testing.T) {
	bubble(t, func(t *testing.T) {
		r := retrierOf(t)
		link, cc := serve(t, always(ok())).linked(t, r.DialOptions()...)
		r.targets.Dialed(cc.Target(), cc.CanonicalTarget).waiting.Store(maxWaiting)
		link.cut()
		synctest.Wait()
		start := time.Now()
		err := echo(t.Context(), echov1.NewEchoServiceClient(cc))
		wantStop(t, err, codes.Unavailable, ErrTargetDown, 1)
		if took := time.Since(start); took != 0 {
			t.Errorf("the call took %v, want 0s", took)
		}
	})
}

func TestATimeThatTheServerNamedIsUsed(t *testing.T) {
	bubble(t, func(t *testing.T) {
		server := serve(t, script(unavailable().pushback("15000"), unavailable(), ok(), ok()))
		client := server.fixed(t, 0, WithBackoff(Constant(tenth)), WithMaxAttempts(2))
		a, b := &timedCall{message: "a"}, &timedCall{message: "b", at: 14950 * time.Millisecond}
		makeCalls(t, client, a, b)
		// b's failure during a's wait does not put off a's turn, and 15 s are not too long for a patience of 10 s.
		wantServed(t, server, "a at 0s", "b at 14.95s", "a at 15s", "b at 15.05s")
	})
	bubble(t, func(t *testing.T) { // after a RetryInfo, there is no patience left for another wait
		server := serve(t, script(fail(codes.Unavailable, "busy", retryInfoOf(15*second)), unavailable(), ok(), ok()))
		client := server.fixed(t, 0, WithBackoff(Constant(tenth)), WithMaxAttempts(2))
		makeCalls(t, client, &timedCall{message: "a"}, &timedCall{message: "b", at: 14950 * time.Millisecond})
		wantServed(t, server, "a at 0s", "b at 14.95s", "a at 15s", "b at 15.05s")
	})
}

// A target's trouble is nobody else's, whatever the budget.
func TestTargetsAreIndependent(t *testing.T) {
	bubble(t, func(t *testing.T) {
		away, well := serve(t, awayUntil(time.Minute)), serve(t, script(unavailable(), ok()))
		r := retrierOf(t, WithBackoff(Constant(tenth)), WithBudget(Unlimited), WithPatience(second), unmoved)
		one := echov1.NewEchoServiceClient(away.connTo(t, "passthrough:///one", r.DialOptions()...))
		two := echov1.NewEchoServiceClient(well.connTo(t, "passthrough:///two", r.DialOptions()...))
		makeCalls(t, one, &timedCall{message: "a"}, &timedCall{message: "b", at: tenth / 2})
		time.Sleep(second / 2)
		c := &timedCall{message: "c"}
		makeCalls(t, two, c)
		if c.err != nil || c.took != tenth {
			t.Errorf("a call to the other target took %v and ended with %v", c.took, c.err)
		}
		states := r.targets.states(time.Now())
		if len(states) != 2 || states[0].Name != "passthrough:///one" || states[0].Failing == 0 || states[1].Failing != 0 {
			t.Errorf("the targets are %+v, want one that is failing, and two that is not", states)
		}
		wantFailing(t, r, 1)
	})
}

// A target that nobody has used for long is forgotten, and does not count as failing any more: also if an attempt that was
// sent before fails after that.
func TestATargetThatIsForgottenIsNotFailing(t *testing.T) {
	bubble(t, func(t *testing.T) {
		server := serve(t, script(unavailable(), unavailable().after(time.Hour)))
		r := retrierOf(t, WithMaxAttempts(2), WithBackoff(Constant(tenth)))
		var slow sync.WaitGroup
		slow.Go(func() { _ = echo(t.Context(), newEchoClient(t, server, r)) })
		for i := range 3 {
			time.Sleep(10 * time.Minute)
			_ = r.Do(t.Context(), fmt.Sprintf("/other%d/x", i), func(context.Context) error { return errUnavailable })
		}
		wantFailing(t, r, 2) // a target is forgotten if it was not used between two others
		slow.Wait()
		wantFailing(t, r, 2)
	})
}

func wantFailing(t *testing.T, r *Retrier, want int32) {
	t.Helper()
	if got := r.targets.failing.Load(); got != want {
		t.Errorf("%d targets are failing, want %d", got, want)
	}
}

// An outage of less than two seconds loses no call of a burst because the target answers others meanwhile.
func TestABurstSurvivesAnOutageThatIsNotTotal(t *testing.T) {
	info := fail(codes.ResourceExhausted, "drawn", retryInfoOf(tenth))
	for _, tt := range []struct {
		name    string
		failure answer
		others  []*timedCall // answered
	}{
		{"another method works", unavailable(), []*timedCall{{at: tenth}, {at: 2 * tenth}, {at: 4 * tenth}}},
		{"a wait that is the same for all", info, nil},
	} {
		t.Run(tt.name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				away := awayUntil(7 * tenth)
				var server *fixture
				server = serve(t, func(n int) answer {
					if server.attempts()[n-1].message == "answered" {
						return ok().after(tenth + 50*time.Millisecond)
					}
					if away(n).err != nil {
						return tt.failure
					}
					return ok().after(20 * time.Millisecond)
				})
				var calls []*timedCall
				for range 30 {
					calls = append(calls, &timedCall{at: tenth})
				}
				for _, c := range tt.others {
					calls = append(calls, &timedCall{message: "answered", at: c.at + tenth})
				}
				var drawn atomic.Int64
				spread := withRandom(func() float64 { return math.Mod(float64(drawn.Add(1))*math.Phi, 1) })
				makeCalls(t, server.client(t, spread, WithRatioBudget(RatioBudget{Reserve: 10})), calls...)
				for i, c := range calls {
					if c.err != nil {
						t.Errorf("call %d ended with %v after %v", i, c.err, c.took)
					}
				}
			})
		})
	}
}

// A slow server that begins to fail goes on with what it has begun. Its answers do not make a burst spend its tokens.
func TestABurstSurvivesTheLastAnswersOfASlowServer(t *testing.T) {
	bubble(t, func(t *testing.T) {
		start := time.Now()
		server := serve(t, func(int) answer {
			if now := time.Since(start); now < 2*second || now >= 4*second {
				return ok().after(2 * second)
			}
			return unavailable()
		})
		var calls []*timedCall
		for at := time.Duration(0); at < 2*second; at += tenth {
			calls = append(calls, &timedCall{at: at})
		}
		for range 20 {
			calls = append(calls, &timedCall{at: 2*second + tenth/2})
		}
		var drawn atomic.Int64
		spread := withRandom(func() float64 { return math.Mod(float64(drawn.Add(1))*math.Phi, 1) })
		makeCalls(t, server.client(t, spread, WithRatioBudget(RatioBudget{Ratio: Nothing, Reserve: 10})), calls...)
		for i, c := range calls {
			if c.err != nil {
				t.Errorf("call %d ended with %v after %v", i, c.err, c.took)
			}
		}
	})
}

// A server may ask every call to come back after a time. If they failed at the same time, none makes another wait in vain.
func TestABurstReturnsWhenTheServerHasAskedTo(t *testing.T) {
	for _, after := range []time.Duration{3 * second, 5 * second, 8 * second} {
		bubble(t, func(t *testing.T) {
			away := awayUntil(second)
			server := serve(t, func(n int) answer {
				if away(n).err != nil {
					return fail(codes.Unavailable, "drawn", retryInfoOf(after))
				}
				return ok()
			})
			var calls []*timedCall
			for i := range 10 {
				calls = append(calls, &timedCall{at: time.Duration(i) * time.Millisecond})
			}
			makeCalls(t, server.fixed(t, 0.5), calls...)
			for i, c := range calls {
				if want := after * 11 / 10; c.err != nil || c.took != want {
					t.Errorf("call %d ended with %v after %v, want success after %v", i, c.err, c.took, want)
				}
			}
		})
	}
}

// With little patience it is soon clear that a target which answers others is overloaded.
func TestLittlePatienceForATargetThatAnswersOthers(t *testing.T) {
	bubble(t, func(t *testing.T) {
		var server *fixture
		server = serve(t, func(n int) answer {
			if server.attempts()[n-1].message == "answered" {
				return ok()
			}
			return unavailable()
		})
		client := server.fixed(t, 0.5, WithBackoff(Constant(tenth)), WithPatience(second),
			WithRatioBudget(RatioBudget{Ratio: Nothing, Reserve: Nothing}))
		a := &timedCall{message: "a"}
		calls := []*timedCall{a, {message: "fails, so that the target is not back", at: 3 * tenth}}
		for at := tenth / 2; at < second; at += tenth / 2 {
			calls = append(calls, &timedCall{message: "answered", at: at})
		}
		makeCalls(t, client, calls...)
		wantStop(t, a.err, codes.Unavailable, ErrBudgetExhausted, 1)
		if a.took < second/3 || a.took > second/2 {
			t.Errorf("the call ended after %v, want soon after a third of its patience", a.took)
		}
	})
}

// Answers to attempts that were sent before the failures began end the trouble of a slow server that fails now and then, but not that of
// one that goes on failing.
func TestWhichAnswersEndATrouble(t *testing.T) {
	of := &target{all: newTargets(nil)}
	at := func(seconds float64) instant { return instantOf(noon.Add(time.Duration(seconds * float64(second)))) }
	for _, step := range []struct {
		name    string
		failed  []float64 // when attempts fail
		sent    float64   // when an attempt was sent that is answered then; 0 for none
		asked   float64
		failing bool
	}{
		{"sent before the first failure", []float64{10, 10.9}, 9.9, 11, true},
		{"no failure follows closely", nil, 9.9, 12, false},
		{"one does", []float64{20, 21}, 19.9, 21, true},
		{"another one does", []float64{22}, 0, 23.5, true},
		{"sent before the latest of the failures", nil, 21.5, 23.5, false},
		{"a failure that follows no other closely", []float64{30}, 29.9, 30.9, true},
	} {
		for _, seconds := range step.failed {
			of.fail(at(seconds), 10*second)
		}
		if step.sent > 0 {
			of.answer(at(step.sent))
		}
		if got := of.look(at(step.asked), 10*second).since != 0; got != step.failing {
			t.Errorf("%s: failing is %v, want %v", step.name, got, step.failing)
		}
	}
}

// A late response is no answer: a server with a queue longer than the timeout answers every call late.
func TestALateResponseEndsNoTrouble(t *testing.T) {
	of := &target{all: newTargets(nil)}
	plan := planOf(t, Policy{}, Unlimited, noon, time.Time{})
	plan.target = of
	of.fail(instantOf(noon), second)
	plan.deposit(Outcome{Attempt: 1, Result: Succeeded, late: true}, instantOf(noon))
	plan.deposit(Outcome{Attempt: 1, Result: Ignored}, instantOf(noon))
	if !of.failing.Load() {
		t.Error("a late response has ended the trouble")
	}
	plan.deposit(Outcome{Attempt: 1, Result: Answered}, instantOf(noon))
	if of.failing.Load() {
		t.Error("an answer has not ended the trouble")
	}
}

// A stream's first message is an answer, although the stream may go on for days, also if the application has seen its headers before.
// One that comes after the attempt timeout is none.
func TestTheFirstMessageOfAStreamEndsTheTrouble(t *testing.T) {
	late := []Option{WithAttemptTimeout(second / 2), WithMaxAttempts(2)}
	for _, tt := range []struct {
		steps string
		opts  []Option
		fails bool
	}{
		{"recv 1", nil, false},
		{"header; recv 1", nil, false},
		{"recv 1", late, true},
		{"recv 1", append(late, WithHedging(Hedging{Delay: HedgeAfter(time.Hour), AllMethodsAreSafe: true})), true},
	} {
		bubble(t, func(t *testing.T) {
			server := serveStreams(t, func(n int, stream grpc.ServerStream) error {
				if n == 1 {
					return unavailable().err
				}
				return playServer(t, n, "recv a; header; wait 1s; send 1; wait 10s", stream)
			})
			ctx, cancel := context.WithTimeout(t.Context(), 5*second) // so that a slow attempt goes on
			defer cancel()
			r := retrierOf(t, append(tt.opts, WithBackoff(Constant(tenth)), unmoved)...)
			stream, err := server.conn(t, r.DialOptions()...).NewStream(ctx, serverStream, "/streams/"+serverStream.StreamName)
			if err != nil {
				t.Fatal(err)
			}
			(&application{stream: stream, cancel: cancel}).play(t, "send a; close; "+tt.steps)
			states := r.targets.states(time.Now())
			if len(states) != 1 || (states[0].Failing != 0) != tt.fails || time.Since(server.start) != second+tenth {
				t.Errorf("%s, %d options: after %v the targets are %+v, want one that is failing: %t",
					tt.steps, len(tt.opts), time.Since(server.start), states, tt.fails)
			}
		})
	}
}

// A target that is gone holds nobody up, not even calls that come one after another and see no failure
// while they wait.
func TestADeadTargetIsWaitedForOnce(t *testing.T) {
	bubble(t, func(t *testing.T) {
		server := serve(t, always(ok()))
		waits := 0
		link, cc := server.linked(t, DialOptions(WithPatience(2*second), unmoved, WithObserver(func(_ context.Context, e Event) {
			if e.Kind == Decision && e.Reason == nil {
				waits++
			}
		}))...)
		link.cut()
		synctest.Wait()
		client := echov1.NewEchoServiceClient(cc)
		for i := range 5 {
			start := time.Now()
			_, err := client.Echo(t.Context(), request())
			wantStop(t, err, codes.Unavailable, ErrTargetDown, 1)
			if took := time.Since(start); i == 0 && took != 2*second || i > 0 && took != 0 {
				t.Errorf("call %d took %v, want 2s for the first one, and then nothing", i+1, took)
			}
			time.Sleep(tenth)
		}
		if waits != 1 {
			t.Errorf("%d calls decided to wait, want 1", waits)
		}
	})
}

// The backoff after a connection was made may be longer than what is left of the patience.
func TestACallWaitsForAConnectionHoweverLongItsBackoff(t *testing.T) {
	bubble(t, func(t *testing.T) {
		server := serve(t, always(ok()))
		link, cc := server.linked(t, DialOptions(WithPatience(2*second), WithBackoff(Constant(5*second)))...)
		link.cut()
		synctest.Wait()
		time.AfterFunc(second/2, link.mend)
		start := time.Now()
		_, err := echov1.NewEchoServiceClient(cc).Echo(t.Context(), request())
		if took := time.Since(start); err != nil || took != 6*second {
			t.Errorf("the call has ended after %v with %v, want a success 6s after its start", took, err)
		}
	})
}

// The patience of one call is not that of another: a job that waits for an hour does not make others' troubles last, and one
// that hardly waits at all does not end them.
func TestTheTroubleOfACallWithAnotherPatience(t *testing.T) {
	for name, other := range map[string]CallOption{
		"longer":              WithPatience(time.Hour),
		"longer, by its wait": WithBackoff(Constant(10 * time.Minute)),
		"the same":            WithPatience(10 * second),
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				client := serve(t, awayUntil(50*time.Minute+2*tenth)).client(t, WithBudget(Unlimited))
				ctx, cancel := context.WithTimeout(t.Context(), 10*time.Minute)
				defer cancel()
				if _, err := client.Echo(ctx, request(), other, WithMaxElapsed(1)); err == nil {
					t.Fatal("the job has succeeded")
				}
				time.Sleep(50 * time.Minute)
				if _, err := client.Echo(t.Context(), request()); err != nil {
					t.Errorf("a blip is not survived: %v", err)
				}
			})
		})
	}
	t.Run("shorter, of calls that come seldom", func(t *testing.T) {
		bubble(t, func(t *testing.T) {
			client := serve(t, always(unavailable())).client(t, WithBudget(Unlimited), WithPatience(time.Minute))
			for i := range 5 {
				start := time.Now()
				_, err := client.Echo(t.Context(), request(), WithMaxAttempts(9))
				if took := time.Since(start); i > 2 && took != 0 || !errors.Is(err, ErrTargetDown) && i > 2 {
					t.Errorf("call %d has ended after %v with %v, want that it does not wait: the patience is over", i, took, err)
				}
				time.Sleep(11 * second)
				_, _ = client.Echo(t.Context(), request(), WithPatience(second))
				time.Sleep(11 * second)
			}
		})
	})
	t.Run("shorter", func(t *testing.T) {
		bubble(t, func(t *testing.T) {
			client := serve(t, always(unavailable())).client(t, WithBudget(Unlimited), WithPatience(3*second))
			_, _ = client.Echo(t.Context(), request(), WithMaxElapsed(1))
			for range 4 { // the trouble goes on, although each of these calls hears nothing for longer than it would wait
				_, _ = client.Echo(t.Context(), request(), WithPatience(tenth))
				time.Sleep(second)
			}
			start := time.Now()
			_, err := client.Echo(t.Context(), request())
			wantStop(t, err, codes.Unavailable, ErrTargetDown, 1)
			if took := time.Since(start); took != 0 {
				t.Errorf("the call has waited for %v, want that it does not: the patience is over", took)
			}
		})
	})
}

// What passes through is answered by the same target.
func TestAnswersToCallsThatPassThroughEndATrouble(t *testing.T) {
	bubble(t, func(t *testing.T) {
		server := serve(t, script(unavailable(), ok()))
		r := retrierOf(t, WithPatience(second), WithBackoff(Constant(tenth)), WithBudget(stingy{}), WithMethod(putMethod, Disable()), unmoved)
		client := newEchoClient(t, server, r)
		time.AfterFunc(tenth/2, func() { _, _ = client.Put(t.Context(), request()) })
		_, err := client.Echo(t.Context(), request())
		wantStop(t, err, codes.Unavailable, ErrBudgetExhausted, 1)
	})
}

// onlyOnce leaves a call no time for a retry. (Without any, it would pass through, and nobody would see it fail.)
var onlyOnce = []CallOption{WithMaxElapsed(time.Millisecond)}

// A repeated wait is no step of the backoff: the next wait is the second one.
func TestARepeatedWaitTakesNoStepOfTheBackoff(t *testing.T) {
	bubble(t, func(t *testing.T) {
		server := serve(t, awayUntil(tenth+30*time.Millisecond))
		client := server.client(t, WithBackoff(Exponential{Base: tenth, Multiplier: 2, Jitter: NoJitter}), WithBudget(Unlimited))
		makeCalls(t, client, &timedCall{message: "a"}, &timedCall{message: "b", at: tenth / 2, opts: onlyOnce})
		wantServed(t, server, "a at 0s", "b at 50ms", "a at 120ms", "a at 320ms")
	})
}

// A failure that no policy would retry is an answer.
func TestAnAnswerThatIsAFailureIsNoTrouble(t *testing.T) {
	bubble(t, func(t *testing.T) {
		server := serve(t, script(fail(codes.PermissionDenied, "no"), unavailable(), fail(codes.PermissionDenied, "no")))
		r := retrierOf(t, WithBackoff(Constant(tenth)))
		client := newEchoClient(t, server, r)
		_ = echo(t.Context(), client)
		wantFailing(t, r, 0)
		_ = echo(t.Context(), client)
		wantFailing(t, r, 0)
	})
}

// A call that panics is no answer.
func TestAPanicEndsNoTrouble(t *testing.T) {
	bubble(t, func(t *testing.T) {
		server := serve(t, always(unavailable()))
		r := retrierOf(t)
		client := echov1.NewEchoServiceClient(server.conn(t, append(r.DialOptions(),
			belowUnary(func(ctx context.Context, next func(context.Context) error) error {
				if len(server.attempts()) == 1 {
					panic("below")
				}
				return next(ctx)
			}))...))
		_, _ = client.Echo(t.Context(), request(), WithMaxElapsed(time.Millisecond))
		func() {
			defer func() { recover() }()
			_ = echo(t.Context(), client)
		}()
		wantFailing(t, r, 1)
	})
}

// Each failure of a call whose attempts last for long, as those of a quiet stream do, is a trouble of its own.
func TestAnAttemptThatOutlastsThePatienceBeginsTheTroubleAnew(t *testing.T) {
	bubble(t, func(t *testing.T) {
		server := serve(t, script(unavailable().after(time.Minute), unavailable().after(time.Minute), ok()))
		makeCalls(t, server.fixed(t, 0.5), &timedCall{message: "a"})
		wantServed(t, server, "a at 0s", "a at 1m0.075s", "a at 2m0.375s")
	})
}

// The trouble of an attempt that has outlasted its timeout, because nothing could replace it, began when it was overdue.
func TestALateAttemptDoesNotBeginTheTroubleAnew(t *testing.T) {
	bubble(t, func(t *testing.T) {
		server := serve(t, always(unavailable().after(20*second)))
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		client := server.fixed(t, 0.5, WithAttemptTimeout(2*second), WithRatioBudget(RatioBudget{Ratio: Nothing, Reserve: Nothing}))
		start := time.Now()
		wantStop(t, echo(ctx, client), codes.Unavailable, ErrTargetDown, 1)
		if took := time.Since(start); took != 20*second {
			t.Errorf("the call took %v, want 20s", took)
		}
	})
}

// A call's own trouble is longer than its target's if another call has been answered meanwhile.
func TestARepeatedWaitIsAsLongAsTheCallsOwnTrouble(t *testing.T) {
	bubble(t, func(t *testing.T) {
		server := serve(t, script(unavailable(), ok(), unavailable(), unavailable(), ok()))
		client := server.fixed(t, 0.5, WithBackoff(Constant(second)), WithBudget(Unlimited))
		makeCalls(t, client, &timedCall{message: "a"}, &timedCall{message: "answered", at: second / 2},
			&timedCall{message: "b", at: 3 * second / 2, opts: onlyOnce})
		// At 2 s b has failed, so a waits for half of its 2 s, and not of the target's 1 s.
		wantServed(t, server, "a at 0s", "answered at 500ms", "a at 1s", "b at 1.5s", "a at 3s")
	})
}

// An attempt that is cut at its timeout is a failure from which other calls learn.
func TestACutAttemptIsAFailureOfTheTarget(t *testing.T) {
	bubble(t, func(t *testing.T) {
		server := serve(t, script(hang(), unavailable(), ok(), ok()))
		client := server.client(t, WithBackoff(Constant(tenth)), WithAttemptTimeout(second), WithBudget(Unlimited))
		makeCalls(t, client, &timedCall{message: "a"}, &timedCall{message: "b", at: second - tenth/2})
		wantServed(t, server, "a at 0s", "b at 950ms", "b at 1.07s", "a at 1.1s") // a is cut during b's wait, at 1 s
	})
}

// A call that has come into a trouble waits for a share of all that it has lasted.
func TestACallWaitsForAShareOfTheTroubleThatItComesInto(t *testing.T) {
	for _, tt := range []struct {
		name   string
		u      float64
		begins time.Duration
		answer answer // to b's first attempt
		again  string // when b is sent again; never if this is empty
	}{
		{"half", 0.5, 4 * second, unavailable(), "6s"},
		{"less than the backoff", 0, 4 * second, unavailable(), "4.5s"},
		{"more than the patience that is left", 0.5, 8 * second, unavailable(), ""},
		{"until an attempt is overdue", 0.5, 2 * second, hang(), "6s"}, // at 4 s
		{"a trouble that is over", 0.5, 11 * second, hang(), "13.5s"},  // after 10 s without news
	} {
		t.Run(tt.name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				server := serve(t, script(unavailable().pushback("-1"), tt.answer, ok()))
				client := server.fixed(t, tt.u, WithBackoff(Constant(second/2)), WithAttemptTimeout(2*second))
				makeCalls(t, client, &timedCall{message: "a"}, &timedCall{message: "b", at: tt.begins})
				want := []string{"a at 0s", fmt.Sprint("b at ", tt.begins)}
				if tt.again != "" {
					want = append(want, "b at "+tt.again)
				}
				wantServed(t, server, want...)
			})
		})
	}
}

// If that share is longer than the time left, the wait is as much of that.
func TestACallThatComesIntoALongTroubleWaitsForAShareOfItsTime(t *testing.T) {
	bubble(t, func(t *testing.T) {
		server := serve(t, script(unavailable().pushback("-1"), unavailable(), ok()))
		client := server.fixed(t, 0.5, WithBackoff(Constant(tenth)), WithPatience(time.Hour))
		b := &timedCall{message: "b", at: 8 * second, opts: []CallOption{WithMaxElapsed(2 * second)}}
		makeCalls(t, client, &timedCall{message: "a"}, b)
		wantServed(t, server, "a at 0s", "b at 8s", "b at 9s")
	})
}

// While calls wait and give up, a trouble lasts, although nothing is sent. After a patience without news it is over.
func TestACallThatGivesUpIsNewsOfItsTarget(t *testing.T) {
	bubble(t, func(t *testing.T) {
		server := serve(t, always(unavailable()))
		client := server.fixed(t, 0.5, WithBackoff(Constant(second)), WithMaxAttempts(2))
		a := &timedCall{message: "a", opts: []CallOption{WithBudget(&aBudget{refuse: true})}} // it gives up after 7.6 s
		b, c := &timedCall{message: "b", at: 17 * second}, &timedCall{message: "c", at: 28 * second}
		makeCalls(t, client, a, b, c)
		wantServed(t, server, "a at 0s", "b at 17s", "c at 28s", "c at 29s")
	})
}

// A backoffOfTest waits a second, and remembers the previous waits that it was told of.
type backoffOfTest struct{ told *[]time.Duration }

func (b backoffOfTest) Delay(_ int, prev time.Duration, _ float64) time.Duration {
	*b.told = append(*b.told, prev)
	return second
}

// A backoff grows from its own waits, and not from those that the target's trouble has made longer.
func TestTheBackoffIsToldOfItsOwnWaits(t *testing.T) {
	bubble(t, func(t *testing.T) {
		server := serve(t, always(unavailable()))
		var told []time.Duration
		client := server.fixed(t, 0.5, WithPatience(time.Hour), WithBudget(Unlimited), WithMaxAttempts(3))
		a := &timedCall{message: "a", opts: []CallOption{WithMaxAttempts(2), WithBackoff(Constant(second))}}
		b := &timedCall{message: "b", at: 20 * second, opts: []CallOption{WithBackoff(backoffOfTest{&told})}}
		makeCalls(t, client, a, b)
		wantServed(t, server, "a at 0s", "a at 1s", "b at 20s", "b at 30s", "b at 45s") // half of the trouble's 20 s, and of 30 s
		if want := []time.Duration{0, second}; !slices.Equal(told, want) {
			t.Errorf("the backoff was told of previous waits %v, want %v", told, want)
		}
	})
}

// What others learned while a call waited for the connection is no news to its retry, which comes after the connection.
func TestAFailureBeforeTheConnectionPutsOffNoRetry(t *testing.T) {
	bubble(t, func(t *testing.T) {
		server := serve(t, always(ok()))
		link, cc := server.linked(t, DialOptions(unmoved, WithBackoff(Constant(second)))...)
		link.cut()
		time.AfterFunc(second/2, link.mend)
		synctest.Wait()
		makeCalls(t, echov1.NewEchoServiceClient(cc), &timedCall{message: "a"}, &timedCall{message: "b", at: second / 2})
		wantTimes(t, server, 2*second, 2*second) // gRPC connects again after 1 s, and then there is the backoff
	})
}

// A hedged stream's first message is an answer, too.
func TestTheFirstMessageOfAHedgedStreamEndsTheTrouble(t *testing.T) {
	bubble(t, func(t *testing.T) {
		server := serveScripts(t, "recv a; fail UNAVAILABLE", "recv a; send 1; wait 10s")
		r := retrierOf(t, WithBackoff(Constant(tenth)), unmoved,
			WithMethod("/streams/Expand", WithMaxAttempts(2), WithHedging(Hedging{Delay: HedgeAfter(time.Hour), Budget: Unlimited})))
		openOn(t, server.conn(t, r.DialOptions()...), serverStream).play(t, "send a; close; recv 1")
		if states := r.targets.states(time.Now()); len(states) != 1 || states[0].Failing != 0 {
			t.Errorf("the targets are %+v, want one that is not failing", states)
		}
	})
}

// A logger that panics when the target answers again ends the stream whose message has told so, and frees what it holds.
func TestAPanicWhenATargetAnswersAgain(t *testing.T) {
	for _, opts := range [][]Option{nil, {WithHedging(Hedging{Delay: HedgeAfter(time.Hour), AllMethodsAreSafe: true})}} {
		bubble(t, func(t *testing.T) {
			server := serveScripts(t, "fail UNAVAILABLE", "recv a; send 1; wait 1h")
			logger := WithLogger(slog.New(panicsAtInfo{slog.DiscardHandler}))
			r := retrierOf(t, append(opts, WithBackoff(Constant(second)), WithPatience(time.Minute), logger)...)
			time.AfterFunc(second/2, func() { // so that the retry waits again, which is logged
				r.targets.Named("passthrough:///echo").fail(instantNow(), time.Minute)
			})
			finished := 0
			app := openOn(t, server.conn(t, r.DialOptions()...), serverStream, grpc.OnFinish(func(error) { finished++ }))
			func() {
				defer func() {
					if recover() == nil {
						t.Error("the panic has not reached RecvMsg")
					}
				}()
				app.play(t, "send a; close; recv 1")
			}()
			if u := r.usage.now(); finished != 1 || u.OpenStreams != 0 || u.ReplayMemory != 0 {
				t.Errorf("OnFinish ran %d times, usage %+v, want once and nothing", finished, u)
			}
		})
	}
}
