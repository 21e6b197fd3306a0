package grpcretry

import (
	"fmt"
	"math"
	"reflect"
	"sync/atomic"
	"time"

	"golang.org/x/time/rate"

	"github.com/grpcretry/grpcretry/internal/bytarget"
)

// A Budget limits retries, so that they add little to an outage. Its Withdraw is called when the wait before a
// retry is over. Its Balance is read before that wait, if the call would not wait for a token, and by everything that
// shows the budget. If the first attempt succeeds, neither is called. Share one Budget among all clients of the
// same backend. What a refusal means for the call is described at [WithPatience].
//
// [NewRatioBudget] is the default and suits most clients. [NewRateBudget] is an absolute limit,
// [NewThrottle] works like retryThrottling in a gRPC service config, and [NewConcurrencyBudget]
// limits the retries in flight. [AllBudgets] combines budgets, and [PerTarget] creates one for
// each backend. Implementations must be safe for concurrent use.
type Budget interface {
	// Deposit reports the outcome of an attempt. It is called once for each attempt, when the
	// attempt ends.
	Deposit(Outcome)
	// Withdraw takes one token at the moment when a retry is sent. If it returns false, the retry
	// is refused and nothing was taken.
	Withdraw(now time.Time) bool
	// Balance returns the number of retries that could be sent now.
	Balance(now time.Time) float64
}

// An Outcome reports to a [Budget] how one attempt ended. An attempt that succeeds after the attempt timeout is a
// success like any other to a budget of another package; this package's budgets know that it was late.
type Outcome struct {
	// Attempt is 1 for an attempt that took no token from the budget, such as the first one that
	// reached a server. It is above 1 for each attempt that took one.
	Attempt int
	// Hedge is true for an attempt that was sent beside an earlier one in flight, and not in place of one.
	Hedge  bool
	Result Result

	// late is true for an attempt that ended after the attempt timeout, which did not cut it
	// because no retry had replaced it. The ratio budget earns nothing from it: a server with a
	// queue longer than the timeout answers every call late, and those calls would otherwise pay
	// for the retries that keep the queue long. Its token is not returned, for the same reason.
	late bool
}

// A Result classifies the end of an attempt for a [Budget].
type Result int

// The results of an attempt.
const (
	Succeeded Result = iota // status OK
	Answered                // a failure that shows a working server and a request at fault, such as NOT_FOUND
	Failed                  // a retryable failure, or one after which the server forbade a retry
	Unsent                  // the attempt reached no server, or was not sent after all: its token is returned
	Ignored                 // any other end: another failure, a cancellation by the caller, a lost hedge
)

// answered reports whether the attempt shows that the server answers calls in time.
func (o Outcome) answered() bool { return !o.late && (o.Result == Succeeded || o.Result == Answered) }

// returned is the outcome of an attempt that took a token and was not sent after all.
var returned = Outcome{Attempt: 2, Result: Unsent}

// Unlimited is a budget that never refuses a retry. With it, a client can multiply the load on a
// failing server by MaxAttempts.
var Unlimited Budget = unlimited{}

type unlimited struct{}

func (unlimited) String() string            { return "no limit" }
func (unlimited) Deposit(Outcome)           {}
func (unlimited) Withdraw(time.Time) bool   { return true }
func (unlimited) Balance(time.Time) float64 { return math.Inf(1) }

// NewRateBudget returns a budget that allows a retry whenever l allows an event. It is an absolute
// limit on retries: traffic earns nothing, and a retry that succeeds returns nothing. The token of
// an attempt that reached no server is worth a whole retry immediately. The limiter may be
// shared with other uses. [New] rejects a nil limiter.
func NewRateBudget(l *rate.Limiter) Budget { return &rateBudget{limiter: l} }

type rateBudget struct {
	limiter *rate.Limiter
	// returned tokens are kept here, because a Limiter takes nothing back. They are used first, so there are
	// never more of them than there were attempts in flight.
	returned atomic.Int64
}

// String describes the budget to readers of a policy.
func (b *rateBudget) String() string {
	if b.limiter.Limit() == rate.Inf {
		return "rate budget"
	}
	return fmt.Sprintf("rate budget: %v a second, at most %d in a burst", float64(b.limiter.Limit()), b.limiter.Burst())
}

func (b *rateBudget) Deposit(o Outcome) {
	if o.Attempt > 1 && o.Result == Unsent {
		b.returned.Add(1)
	}
}

func (b *rateBudget) Withdraw(now time.Time) bool {
	for n := b.returned.Load(); n > 0; n = b.returned.Load() {
		if b.returned.CompareAndSwap(n, n-1) {
			return true
		}
	}
	return b.limiter.AllowN(now, 1)
}

func (b *rateBudget) Balance(now time.Time) float64 {
	if b.limiter.Limit() == rate.Inf {
		return math.Inf(1)
	}
	return max(0, b.limiter.TokensAt(now)) + float64(b.returned.Load())
}

func (b *rateBudget) check() error {
	if b.limiter == nil {
		return fmt.Errorf("NewRateBudget was given a nil limiter")
	}
	return nil
}

// NewConcurrencyBudget returns a budget that allows at most n retries in flight. n is at least 1;
// other values are an error. A retry holds its slot from the moment when it is sent until its
// attempt ends; a retry that waits holds none. A retry that replaces an overdue one may have its slot. A
// stream's retry holds it only until the stream is committed, so that a long stream does not keep its slot for life.
func NewConcurrencyBudget(n int) (Budget, error) {
	if n < 1 {
		return nil, fmt.Errorf("grpcretry: NewConcurrencyBudget: n is %d, want at least 1", n)
	}
	return &concurrencyBudget{limit: int64(n)}, nil
}

type concurrencyBudget struct {
	limit int64
	inUse atomic.Int64
}

// String describes the budget to readers of a policy.
func (b *concurrencyBudget) String() string {
	return fmt.Sprintf("concurrency budget: at most %d in flight", b.limit)
}

func (b *concurrencyBudget) Deposit(o Outcome) {
	if o.Attempt > 1 { // the attempt holds a slot
		b.inUse.Add(-1)
	}
}

func (b *concurrencyBudget) Withdraw(time.Time) bool {
	for {
		n := b.inUse.Load()
		if n >= b.limit {
			return false
		}
		if b.inUse.CompareAndSwap(n, n+1) {
			return true
		}
	}
}

func (b *concurrencyBudget) Balance(time.Time) float64 { return float64(b.limit - b.inUse.Load()) }

// PerTarget returns a budget that keeps a separate budget for each target that clients are dialed
// to, so that a backend that is down does not use up the retries of the others. It calls newBudget
// on the first call to a target. Targets are compared in gRPC's canonical form, so "localhost:80"
// and "dns:///localhost:80" are the same. newBudget must be safe for concurrent use and must not
// return nil; a budget that it returns may remain unused. [New] rejects a nil newBudget.
//
// A target that has not been used for a minute, sometimes two, is forgotten when a call to a new target is
// made. If it is used again later, it gets a new budget,
// so its reserve is full again and its earnings are gone. Calls that are in flight at that time
// keep the old budget.
//
// The default budget of a [Retrier] is a PerTarget of [NewRatioBudget]. Outside a Retrier, it acts
// as the budget of the target "", which is forgotten like any other: a token that is held for over a
// minute may then be returned to a new budget. It cannot be part of [AllBudgets], but newBudget can
// return AllBudgets.
func PerTarget(newBudget func() Budget) Budget { return newPerTarget(newBudget, nil) }

type perTarget struct {
	newBudget func() Budget
	settings  any // those of every budget that it creates, to be compared; nil if only newBudget knows
	targets   bytarget.Map[Budget]
}

func newPerTarget(newBudget func() Budget, settings any) *perTarget {
	t := &perTarget{newBudget: newBudget, settings: settings}
	t.targets.Fresh = func(string) Budget { return newBudget() }
	return t
}

// String describes the budget to readers of a policy.
func (t *perTarget) String() string {
	if t.settings == nil {
		return "a budget for each target"
	}
	return fmt.Sprintf("%v, for each target", t.newBudget())
}

func (t *perTarget) Deposit(o Outcome)             { t.targets.Named("").Deposit(o) }
func (t *perTarget) Withdraw(now time.Time) bool   { return t.targets.Named("").Withdraw(now) }
func (t *perTarget) Balance(now time.Time) float64 { return t.targets.Named("").Balance(now) }

func (t *perTarget) check() error {
	if t.newBudget == nil {
		return fmt.Errorf("PerTarget was given a nil function")
	}
	return nil
}

// budgetNamed returns the budget for calls to a target in canonical form: b, or its budget for that target.
func budgetNamed(b Budget, target string) Budget {
	if t, ok := b.(*perTarget); ok {
		return t.targets.Named(target)
	}
	return b
}

// isNil reports whether v is nil, or an interface that holds a nil pointer or function.
func isNil(v any) bool {
	r := reflect.ValueOf(v)
	return !r.IsValid() || (r.Kind() == reflect.Pointer || r.Kind() == reflect.Func) && r.IsNil()
}
