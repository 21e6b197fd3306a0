package grpcretry

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/time/rate"
	"google.golang.org/grpc"

	echov1 "github.com/grpcretry/grpcretry/proto/echo/v1"
)

func TestRateBudgetAllowsWhatTheLimiterAllows(t *testing.T) {
	l := rate.NewLimiter(2, 5)
	b := NewRateBudget(l)
	wantBalance(t, b, at(0), 5)
	wantWithdrawn(t, b, at(0), 5)
	wantBalance(t, b, at(0), 0)
	wantWithdrawn(t, b, at(0.49), 0)
	wantBalance(t, b, at(0.5), 1)
	wantWithdrawn(t, b, at(0.5), 1)
	wantWithdrawn(t, b, at(2), 3)
	wantWithdrawn(t, b, at(1000), 5) // never more than the burst
}

// A refund is worth a whole retry immediately, whenever it comes.
func TestRateBudgetRefundIsUsedAgain(t *testing.T) {
	for _, later := range []float64{0, 0.0001, 0.1, 0.9} {
		b := NewRateBudget(rate.NewLimiter(1, 3))
		wantWithdrawn(t, b, at(0), 3)
		wantWithdrawn(t, b, at(later), 0)
		b.Deposit(Outcome{Attempt: 1, Result: Unsent}) // it took no token
		b.Deposit(returned)
		b.Deposit(returned)
		wantBalance(t, b, at(later), 2+later)
		wantWithdrawn(t, b, at(later), 2)
		wantBalance(t, b, at(later), later)
		wantBalance(t, b, at(2), 2) // the limiter has continued as if nothing had happened
		wantWithdrawn(t, b, at(2), 2)
	}
}

func TestConcurrencyBudgetLimitsRetriesAtOnce(t *testing.T) {
	b := concurrencyBudgetOf(t, 3)
	wantBalance(t, b, epoch, 3)
	wantWithdrawn(t, b, epoch, 3)
	wantBalance(t, b, epoch, 0)
	wantWithdrawn(t, b, at(1e9), 0) // time alone returns none

	for _, result := range []Result{Succeeded, Answered, Failed, Ignored} { // nor does the end of a first attempt
		b.Deposit(Outcome{Attempt: 1, Result: result})
	}
	wantBalance(t, b, epoch, 0)

	for i, result := range []Result{Succeeded, Answered, Failed, Ignored} {
		b.Deposit(Outcome{Attempt: i + 2, Hedge: i%2 == 0, Result: result})
		wantBalance(t, b, epoch, 1)
		wantWithdrawn(t, b, epoch, 1)
	}
	b.Deposit(returned)
	b.Deposit(returned)
	wantBalance(t, b, epoch, 2)
	wantWithdrawn(t, b, epoch, 2)
}

func TestConcurrencyBudgetUnderManyGoroutines(t *testing.T) {
	const limit = 5
	b := concurrencyBudgetOf(t, limit)
	var inUse, most atomic.Int64
	concurrently(64, func() {
		for range 200 {
			if !b.Withdraw(epoch) {
				continue
			}
			n := inUse.Add(1)
			for old := most.Load(); n > old && !most.CompareAndSwap(old, n); old = most.Load() {
			}
			inUse.Add(-1)
			b.Deposit(Outcome{Attempt: 2, Result: Failed})
		}
	})
	if got := most.Load(); got > limit {
		t.Errorf("%d retries at once, want at most %d", got, limit)
	}
	wantBalance(t, b, epoch, limit)
}

func concurrencyBudgetOf(t *testing.T, n int) Budget {
	t.Helper()
	b, err := NewConcurrencyBudget(n)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// Attempts 1 and 3 have been judged when attempt 2, the last in flight, fails.
func TestAPanicOverAHedgeThatIsNotTheNewestLosesNoSlot(t *testing.T) {
	bubble(t, func(t *testing.T) {
		slots := concurrencyBudgetOf(t, 2)
		takes := []time.Duration{second, 3 * second, 2 * second}
		intercept := UnaryClientInterceptor(
			WithMethod(echoMethod, WithMaxAttempts(3), WithHedging(Hedging{Delay: HedgeAfter(0), Budget: slots})),
			WithClassifier(func(_ context.Context, a Attempt) Classification {
				if a.Number == 2 {
					panic(errBomb)
				}
				return Default
			}))
		defer func() {
			if p := recover(); p != errBomb {
				t.Errorf("recovered %v, want %v", p, errBomb)
			}
			wantBalance(t, slots, time.Now(), 2)
		}()
		_ = intercept(t.Context(), echoMethod, request(), new(echov1.EchoResponse), nil,
			func(ctx context.Context, _ string, _, _ any, _ *grpc.ClientConn, _ ...grpc.CallOption) error {
				a, _ := AttemptFromContext(ctx)
				time.Sleep(takes[a.Number-1])
				return errUnavailable
			})
	})
}

// The waits of two calls end together; the one slot is free again when the first one's retry has
// ended, however it ended and however the call continues.
func TestConcurrencyBudgetThroughTheInterceptor(t *testing.T) {
	bubble(t, func(t *testing.T) {
		b := concurrencyBudgetOf(t, 1)
		server := serve(t, func(n int) answer {
			switch n {
			case 1, 2:
				return unavailable()
			case 3:
				return unavailable().after(second)
			}
			return ok()
		})
		cc := server.client(t, steady, WithPatience(0), WithBudget(b))
		var wg sync.WaitGroup
		errs := make([]error, 2)
		for i := range errs {
			wg.Go(func() { _, errs[i] = cc.Echo(t.Context(), request()) })
		}
		wg.Wait()
		if (errs[0] == nil) == (errs[1] == nil) || !errors.Is(errors.Join(errs...), ErrBudgetExhausted) {
			t.Errorf("Echo = %v, want one success and one %v", errs, ErrBudgetExhausted)
		}
		// 0 and 0, then one retry at 1 s, which fails at 2 s, and its second at 4 s.
		wantTimes(t, server, 0, 0, 1*time.Second, 4*time.Second)
		wantBalance(t, b, time.Now(), 1)
	})
}

func TestAllBudgetsTakeFromAllOrNone(t *testing.T) {
	roomy, tight := concurrencyBudgetOf(t, 5), concurrencyBudgetOf(t, 2)
	rated := NewRateBudget(rate.NewLimiter(0.001, 4))
	for _, b := range []Budget{AllBudgets(roomy, rated, tight), AllBudgets(tight, roomy, rated),
		AllBudgets(rated, AllBudgets(tight), roomy)} {
		wantBalance(t, b, epoch, 2)
		wantWithdrawn(t, b, epoch, 2)
		for range 3 {
			if b.Withdraw(epoch) {
				t.Fatal("allowed, although one member refuses")
			}
		}
		wantBalance(t, roomy, epoch, 3)
		wantBalance(t, rated, epoch, 2)
		wantBalance(t, tight, epoch, 0)
		b.Deposit(returned)
		wantBalance(t, b, epoch, 1)
		wantBalance(t, roomy, epoch, 4)
		wantBalance(t, rated, epoch, 3)
		b.Deposit(returned)
	}
}

type panicking struct{ unlimited }

func (panicking) Deposit(Outcome) { panic("as the test wants") }

// A budget of another package that panics takes no slot away from other calls.
func TestNoSlotIsLostThoughAnotherBudgetPanics(t *testing.T) {
	slots, usedUp := concurrencyBudgetOf(t, 1), concurrencyBudget{}
	for name, use := range map[string]func(){
		"at Withdraw": func() { AllBudgets(slots, panicsWhenAsked{}).Withdraw(epoch) },
		"at Deposit": func() {
			b := AllBudgets(panicsWhenTold{}, slots)
			b.Withdraw(epoch)
			b.Deposit(Outcome{Attempt: 2, Result: Failed})
		},
		"when it is given back": func() { AllBudgets(slots, panicsWhenTold{}, concurrencyBudgetOf(t, 1), &usedUp).Withdraw(epoch) },
	} {
		func() {
			defer func() {
				if recover() == nil {
					t.Errorf("%s: nothing has panicked", name)
				}
			}()
			use()
		}()
		wantBalance(t, slots, epoch, 1)
	}
}

type (
	panicsWhenAsked struct{ unlimited }
	panicsWhenTold  struct{ unlimited }
)

func (panicsWhenAsked) Withdraw(time.Time) bool { panic("as the test wants") }
func (panicsWhenTold) Deposit(Outcome)          { panic("as the test wants") }

// A budget that takes long, and refuses, takes no tokens from the others meanwhile: given back at once, they would make a burst.
func TestASlowBudgetHoldsNoTokensOfOthers(t *testing.T) {
	bubble(t, func(t *testing.T) {
		limited := NewRateBudget(rate.NewLimiter(1, 1))
		b := AllBudgets(limited, slowRefusal{})
		var group sync.WaitGroup
		for range 10 {
			group.Go(func() {
				for range 100 {
					b.Withdraw(time.Now())
				}
			})
		}
		group.Wait()
		wantBalance(t, limited, time.Now(), 1)
	})
}

type slowRefusal struct{ unlimited }

func (slowRefusal) Withdraw(time.Time) bool { time.Sleep(second); return false }

// The slot of a hedge, or of a retry, is given back although the method's budget panics at its end, or the logger does when
// the target answers again.
func TestASlotIsGivenBackThoughAnotherCallbackPanics(t *testing.T) {
	for name, tt := range map[string]struct {
		first answer
		opts  func(slots Budget) []Option
	}{
		"the method's budget": {hang(), func(slots Budget) []Option {
			return []Option{WithMethod("/grpcretry.test.v1.EchoService/Echo", WithBudget(panicking{}),
				WithHedging(Hedging{Delay: HedgeAfter(second), Budget: slots}))}
		}},
		"the logger": {unavailable(), func(slots Budget) []Option {
			return []Option{WithBudget(AllBudgets(&refusesOnce{}, slots)), WithLogger(slog.New(panicsAtInfo{slog.DiscardHandler}))}
		}},
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				slots := concurrencyBudgetOf(t, 1)
				client := serve(t, script(tt.first, ok())).client(t, append(tt.opts(slots), WithBackoff(Constant(second)))...)
				func() {
					defer func() {
						if recover() == nil {
							t.Error("nothing has panicked")
						}
					}()
					_, _ = client.Echo(t.Context(), request())
				}()
				wantBalance(t, slots, time.Now(), 1)
			})
		})
	}
}

// refusesOnce refuses the first retry, so that the call waits for its target.
type refusesOnce struct {
	unlimited
	asked bool
}

func (b *refusesOnce) Withdraw(time.Time) bool {
	allows := b.asked
	b.asked = true
	return allows
}

type panicsAtInfo struct{ slog.Handler }

func (panicsAtInfo) Enabled(context.Context, slog.Level) bool { return true }

func (panicsAtInfo) Handle(_ context.Context, r slog.Record) error {
	if r.Level == slog.LevelInfo {
		panic("as the test wants")
	}
	return nil
}

// theirs is a budget of another package.
type theirs struct {
	refuse bool
	taken  int
}

func (b *theirs) Deposit(o Outcome) {
	if o == returned {
		b.taken--
	}
}
func (b *theirs) Withdraw(time.Time) bool {
	if !b.refuse {
		b.taken++
	}
	return !b.refuse
}
func (*theirs) Balance(time.Time) float64 { return 0 } // its balance is not known

func TestBudgetsAllocateNothing(t *testing.T) {
	for name, b := range map[string]Budget{
		"rate":        NewRateBudget(rate.NewLimiter(1, 10)),
		"concurrency": concurrencyBudgetOf(t, 5),
		"all":         AllBudgets(Unlimited, concurrencyBudgetOf(t, 5)),
		"all of all":  AllBudgets(AllBudgets(Unlimited, ratioBudgetOf(t, RatioBudget{})), NewRateBudget(rate.NewLimiter(1, 10)), &theirs{}),
	} {
		if n := testing.AllocsPerRun(1000, func() { b.Deposit(Outcome{Attempt: 2, Result: Failed}) }); n != 0 {
			t.Errorf("%s: Deposit makes %v allocations, want none", name, n)
		}
		if n := testing.AllocsPerRun(1000, func() { b.Withdraw(epoch) }); n != 0 {
			t.Errorf("%s: Withdraw makes %v allocations, want none", name, n)
		}
	}
}

func TestBudgetsSayWhatTheyAllow(t *testing.T) {
	throttle, err := NewThrottle(10, 0.1)
	if err != nil {
		t.Fatal(err)
	}
	three, err := NewConcurrencyBudget(3)
	if err != nil {
		t.Fatal(err)
	}
	tenth := 0.1 // three of which are 0.30000000000000004
	for want, b := range map[string]Budget{
		"ratio budget: 20% of answered calls, a reserve of 3, over 10s": realRatioBudget(t, RatioBudget{}),
		"ratio budget: 30% of answered calls, a reserve of 0.3, plus 0.3 a second, over 1m0.000000007s": realRatioBudget(t,
			RatioBudget{tenth + 2*tenth, tenth + 2*tenth, tenth + 2*tenth, time.Minute + 7}),
		"throttle: 10 tokens, 0.1 for a success":        throttle,
		"concurrency budget: at most 3 in flight":       three,
		"rate budget: 5 a second, at most 7 in a burst": NewRateBudget(rate.NewLimiter(5, 7)),
		"rate budget": NewRateBudget(rate.NewLimiter(rate.Inf, 0)),
		"no limit":    Unlimited,
		"concurrency budget: at most 3 in flight and no limit and *grpcretry.aBudget": AllBudgets(three, Unlimited, &aBudget{}),
	} {
		if got := fmt.Sprint(b); got != want {
			t.Errorf("budget is %q, want %q", got, want)
		}
	}
}

// A budget that refuses after others have given a token is no reason to give anything back to those that come before it.
func TestAllBudgetsReturnToThoseThatGave(t *testing.T) {
	slots, a, b := concurrencyBudgetOf(t, 2), &theirs{}, &theirs{refuse: true}
	slots.Withdraw(epoch) // by another call
	if AllBudgets(slots, a, b).Withdraw(epoch) || a.taken != 0 || slots.Balance(epoch) != 1 {
		t.Errorf("%d tokens were taken and %v slots are free, want none and 1", a.taken, slots.Balance(epoch))
	}
}

// A budget of another package is asked by Withdraw alone, because it may not know its balance.
func TestAllBudgetsDoNotTrustTheBalanceOfOthers(t *testing.T) {
	if a := (&theirs{}); !AllBudgets(concurrencyBudgetOf(t, 1), a).Withdraw(epoch) || a.taken != 1 {
		t.Errorf("%d tokens were taken, want 1", a.taken)
	}
}

// A retry that takes over the slot of an overdue one holds it, also after that one has ended.
func TestASlotThatIsTakenOverIsHeld(t *testing.T) {
	bubble(t, func(t *testing.T) {
		slots := concurrencyBudgetOf(t, 1)
		free := -1.0
		looks := ok().after(second / 2)
		looks.do = func(context.Context) error { free = slots.Balance(time.Now()); return nil }
		server := serve(t, script(unavailable(), hang(), looks))
		client := server.client(t, WithBudget(AllBudgets(slots, Unlimited)), WithPatience(0), WithAttemptTimeout(second))
		if err := echo(t.Context(), client); err != nil || free != 0 {
			t.Errorf("Echo = %v with %v free slots during the last attempt, want success with 0", err, free)
		}
	})
}

// panicsOnce panics when it first gets a token back.
type panicsOnce struct {
	unlimited
	returned int
}

func (b *panicsOnce) Deposit(o Outcome) {
	if o.Result == Unsent {
		if b.returned++; b.returned == 1 {
			panic("as the test wants")
		}
	}
}

// A token is given back once, also to a budget that panics.
func TestABudgetThatPanicsGetsATokenBackOnce(t *testing.T) {
	bubble(t, func(t *testing.T) {
		budget := &panicsOnce{}
		intercept := UnaryClientInterceptor(WithAttemptTimeout(second), WithBackoff(Constant(second)), WithBudget(budget))
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		defer func() {
			if p := recover(); p == nil || budget.returned != 1 {
				t.Errorf("a token was given back %d times, and the panic was %v; want once, and the budget's", budget.returned, p)
			}
		}()
		_ = invokeEcho(ctx, intercept, func(ctx context.Context, _ int) error {
			<-ctx.Done() // the attempt is cut when the next one has been paid for
			return nil
		})
	})
}

// A hedge is cut for a retry, but fails by itself. The retry's token is given back; if the budget panics at that, the hedge gives
// its slot back all the same.
func TestABudgetThatPanicsCostsAnotherNoSlot(t *testing.T) {
	bubble(t, func(t *testing.T) {
		hedges := concurrencyBudgetOf(t, 1)
		server := serve(t, script(hang(), hang()))
		failsWhenCut := belowUnary(func(ctx context.Context, next func(context.Context) error) error {
			if err := next(ctx); ctx.Err() == nil {
				return err
			}
			return errUnavailable
		})
		onlyTheHedge := WithClassifier(func(_ context.Context, a Attempt) Classification {
			return map[int]Classification{1: Stop}[a.Number]
		})
		r := retrierOf(t, WithBackoff(Constant(0)), WithBudget(&panicsOnce{}), WithMethod(echoMethod, WithAttemptTimeout(second), onlyTheHedge,
			WithHedging(Hedging{Delay: HedgeAfter(second / 2), Budget: hedges})))
		client := echov1.NewEchoServiceClient(server.conn(t, append(r.DialOptions(), failsWhenCut)...))
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		defer func() {
			if p, free := recover(), hedges.Balance(time.Now()); p == nil || free != 1 {
				t.Errorf("the panic was %v, and %v slots are free; want the budget's, and 1", p, free)
			}
		}()
		_, _ = client.Echo(ctx, request())
	})
}

// A secretive budget has a field that its lock guards, and no String.
type secretive struct {
	mu    sync.Mutex
	heard int
}

func (*secretive) Withdraw(time.Time) bool   { return true }
func (*secretive) Balance(time.Time) float64 { return 1 }

func (b *secretive) Deposit(Outcome) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.heard++
}

// A budget of another package may be in use while it is described: the race detector reports it if its fields are read.
func TestAllBudgetsReadNoFieldsOfOthers(t *testing.T) {
	all := AllBudgets(&secretive{}, Unlimited)
	var deposits sync.WaitGroup
	deposits.Go(func() {
		for range 1000 {
			all.Deposit(Outcome{})
		}
	})
	for range 100 {
		if got, want := fmt.Sprint(all), "*grpcretry.secretive and no limit"; got != want {
			t.Errorf("String = %q, want %q", got, want)
		}
	}
	deposits.Wait()
}
