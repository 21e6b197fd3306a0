package grpcretry

import (
	"fmt"
	"math"
	"reflect"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/time/rate"
)

// A Budget limits retries, so that they cannot make an outage worse. It never delays a first
// attempt; an exhausted budget only refuses retries that have not been sent. Share one Budget
// among all clients of the same backend.
//
// [NewRatioBudget] is the default and suits most clients. [NewRateBudget] is an absolute limit,
// [NewThrottle] works like retryThrottling in a gRPC service config, and [NewConcurrencyBudget]
// limits the retries in flight. [AllBudgets] combines budgets, and [PerTarget] creates one for
// each backend. Implementations must be safe for concurrent use.
type Budget interface {
	// Deposit reports the outcome of an attempt that reached a server. It is called once for each
	// such attempt, when the attempt ends.
	Deposit(Outcome)
	// Withdraw takes one retry when the retry is decided on, before the wait. If it returns
	// false, the retry is refused and nothing was taken.
	Withdraw(now time.Time) bool
	// Refund returns one withdrawn retry that will not be sent.
	Refund()
	// Balance returns the number of retries that could be withdrawn now.
	Balance(now time.Time) float64
}

// An Outcome reports to a [Budget] how one attempt ended.
type Outcome struct {
	// Attempt is 1 for an attempt that was not charged to the budget, such as the first one that
	// reached a server. It is above 1 for each attempt that was charged.
	Attempt int
	// Hedge is true for an attempt that was sent while an earlier one was in flight.
	Hedge  bool
	Result Result
	// Late is true for an attempt that ended after the attempt timeout, which did not cut it
	// because no retry could replace it. The ratio budget earns nothing from it: a server with a
	// queue longer than the timeout answers every call late, and those calls would otherwise pay
	// for the retries that keep the queue long.
	Late bool
}

// A Result classifies the end of an attempt for a [Budget].
type Result int

// The results of an attempt.
const (
	Succeeded Result = iota // status OK
	Answered                // a failure that shows a working server and a request at fault, such as NOT_FOUND
	Failed                  // a retryable failure, or one after which the server forbade a retry
	Ignored                 // any other end: another failure, a cancellation by the caller, a lost hedge
)

// Unlimited is a budget that never refuses a retry. With it, a client can multiply the load on a
// failing server by MaxAttempts.
var Unlimited Budget = unlimited{}

type unlimited struct{}

func (unlimited) String() string            { return "no limit" }
func (unlimited) Deposit(Outcome)           {}
func (unlimited) Withdraw(time.Time) bool   { return true }
func (unlimited) allows(time.Time) bool     { return true }
func (unlimited) Refund()                   {}
func (unlimited) Balance(time.Time) float64 { return math.Inf(1) }

// NewRateBudget returns a budget that allows a retry whenever l allows an event. It is an absolute
// limit on retries: traffic earns nothing, and a retry that succeeds returns nothing. A refund is
// worth a whole retry immediately, unless the limiter's burst is full. The limiter may be shared
// with other uses. [New] rejects a nil limiter.
func NewRateBudget(l *rate.Limiter) Budget { return &rateBudget{limiter: l} }

type rateBudget struct {
	limiter *rate.Limiter

	mu       sync.Mutex // held from the check to the take: two retries cannot both use one refund
	refunded float64    // guarded by mu; a whole number, kept here because a Limiter accepts no refunds
	last     time.Time  // guarded by mu; the latest time, because a Limiter counts time twice if it goes back
}

// String describes the budget to readers of a policy.
func (b *rateBudget) String() string {
	if b.limiter == nil || b.limiter.Limit() == rate.Inf {
		return "rate budget"
	}
	return fmt.Sprintf("rate budget: %v a second, at most %d in a burst", float64(b.limiter.Limit()), b.limiter.Burst())
}

func (b *rateBudget) Deposit(Outcome) {}

func (b *rateBudget) Withdraw(now time.Time) bool {
	if b.limiter == nil {
		return false
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if tokens := b.balance(now); b.refunded >= 1 && tokens >= 1 {
		b.refunded--
		return true
	}
	return b.limiter.AllowN(b.last, 1)
}

// allows reports whether Withdraw would return true. A Limiter allows an event that is
// due in less than a nanosecond.
func (b *rateBudget) allows(now time.Time) bool { return b.Balance(now) >= 1-1e-9 }

func (b *rateBudget) Refund() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.refunded++
}

func (b *rateBudget) Balance(now time.Time) float64 {
	if b.limiter == nil {
		return 0
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.balance(now)
}

// balance returns what the limiter and the refunds allow at now. It drops refunds that would
// exceed the limiter's burst. The caller holds mu.
func (b *rateBudget) balance(now time.Time) float64 {
	if now.After(b.last) {
		b.last = now
	}
	if b.limiter.Limit() == rate.Inf {
		return math.Inf(1)
	}
	tokens, burst := b.limiter.TokensAt(b.last), float64(b.limiter.Burst())
	b.refunded = min(b.refunded, math.Ceil(max(0, burst-tokens)))
	return max(0, min(burst, tokens+b.refunded))
}

func (b *rateBudget) check() error {
	if b.limiter == nil {
		return fmt.Errorf("NewRateBudget was given a nil limiter")
	}
	return nil
}

// NewConcurrencyBudget returns a budget that allows at most n retries at the same time. n is at
// least 1; other values are an error. A retry counts from the decision, through its wait, until
// its attempt ends. A stream's retry counts only until the stream is committed, so that a long
// stream does not hold its slot for life.
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
	if o.Attempt > 1 { // the attempt was withdrawn
		b.Refund()
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

// allows reports whether Withdraw would return true.
func (b *concurrencyBudget) allows(time.Time) bool { return b.inUse.Load() < b.limit }

// replace takes a slot even if none is free, because the replaced attempt is about to give its
// slot back.
func (b *concurrencyBudget) replace(time.Time) bool {
	b.inUse.Add(1)
	return true
}

func (b *concurrencyBudget) Refund() {
	for {
		n := b.inUse.Load()
		if n <= 0 || b.inUse.CompareAndSwap(n, n-1) {
			return
		}
	}
}

func (b *concurrencyBudget) Balance(time.Time) float64 {
	return float64(b.limit - b.inUse.Load())
}

// AllBudgets returns a budget that allows a retry only if every one of the budgets does. It takes
// the retry from all of them or from none. This package's budgets are all checked before anything
// is taken, so a refused retry leaves no trace in them; a [Budget] of another type may receive a
// Withdraw followed by a Refund. AllBudgets() never refuses a retry. [New] rejects a nil budget.
func AllBudgets(b ...Budget) Budget {
	all := &allBudgets{}
	for _, b := range b {
		if inner, ok := b.(*allBudgets); ok && inner != nil {
			all.budgets = append(all.budgets, inner.budgets...)
		} else {
			all.budgets = append(all.budgets, b)
		}
	}
	return all
}

type allBudgets struct{ budgets []Budget }

// String describes the budgets to readers of a policy.
func (all *allBudgets) String() string {
	names := make([]string, len(all.budgets))
	for i, b := range all.budgets {
		names[i] = fmt.Sprint(b)
		if _, ok := b.(fmt.Stringer); !ok {
			names[i] = fmt.Sprintf("%T", b)
		}
	}
	return strings.Join(names, " and ")
}

func (all *allBudgets) Deposit(o Outcome) {
	for _, b := range all.budgets {
		b.Deposit(o)
	}
}

// A replacer is a budget that limits the retries in flight. It lets a retry replace an overdue
// one, which gives its slot back when it has ended.
type replacer interface{ replace(now time.Time) bool }

// withdrawFrom takes a retry from b; replacing means that it replaces an overdue retry.
func withdrawFrom(b Budget, now time.Time, replacing bool) bool {
	if r, ok := b.(replacer); ok && replacing {
		return r.replace(now)
	}
	return b.Withdraw(now)
}

// A releaser is a budget that limits the retries in flight. A retry whose stream is committed no
// longer counts as in flight, although its attempt has not ended: release gives its slot back,
// and depositReleased is called instead of Deposit when it ends.
type releaser interface {
	release()
	depositReleased(Outcome)
}

// release gives back the slot of a retry whose stream is committed, if b has slots.
func release(b Budget) {
	if r, ok := b.(releaser); ok {
		r.release()
	}
}

// depositIn reports to b how an attempt ended; released means that release was called for it.
func depositIn(b Budget, o Outcome, released bool) {
	if r, ok := b.(releaser); ok && released {
		r.depositReleased(o)
		return
	}
	b.Deposit(o)
}

func (b *concurrencyBudget) release()                { b.Refund() }
func (b *concurrencyBudget) depositReleased(Outcome) {}

func (all *allBudgets) release() {
	for _, b := range all.budgets {
		release(b)
	}
}

func (all *allBudgets) depositReleased(o Outcome) {
	for _, b := range all.budgets {
		depositIn(b, o, true)
	}
}

// An asker is a budget that can report whether it would allow a retry, without taking one.
type asker interface{ allows(now time.Time) bool }

// Withdraw takes from budgets of other types first: if they refuse, nothing was taken from ours.
// After that, only a concurrent retry can make one of ours refuse.
func (all *allBudgets) Withdraw(now time.Time) bool { return all.take(now, false) }

// replace withdraws a retry that replaces an overdue one.
func (all *allBudgets) replace(now time.Time) bool { return all.take(now, true) }

// take asks the askers, then withdraws from all budgets or from none.
func (all *allBudgets) take(now time.Time, replacing bool) bool {
	for _, b := range all.budgets {
		if _, replaces := b.(replacer); replacing && replaces {
			continue
		}
		if ours, ok := b.(asker); ok && !ours.allows(now) {
			return false
		}
	}
	return all.withdraw(now, replacing, false) && (all.withdraw(now, replacing, true) || all.refund(len(all.budgets), false))
}

// withdraw takes from all budgets that are ours, or from all that are not, or from none.
func (all *allBudgets) withdraw(now time.Time, replacing, ours bool) bool {
	for i, b := range all.budgets {
		if isOurs(b) == ours && !withdrawFrom(b, now, replacing) {
			return all.refund(i, ours)
		}
	}
	return true
}

// refund returns what was taken from the first n budgets. The result is always false.
func (all *allBudgets) refund(n int, ours bool) bool {
	for _, b := range all.budgets[:n] {
		if isOurs(b) == ours {
			b.Refund()
		}
	}
	return false
}

func isOurs(b Budget) bool {
	_, ok := b.(asker)
	return ok
}

func (all *allBudgets) Refund() {
	for _, b := range all.budgets {
		b.Refund()
	}
}

func (all *allBudgets) Balance(now time.Time) float64 {
	least := math.Inf(1)
	for _, b := range all.budgets {
		least = min(least, b.Balance(now))
	}
	return least
}

func (all *allBudgets) check() error {
	for i, b := range all.budgets {
		if err := checkBudget(b); err != nil {
			return fmt.Errorf("AllBudgets, number %d: %w", i+1, err)
		}
		if _, ok := b.(*perTarget); ok {
			return fmt.Errorf("AllBudgets, number %d: PerTarget would be one budget for all targets here, put AllBudgets into PerTarget", i+1)
		}
	}
	return nil
}

// PerTarget returns a budget that keeps a separate budget for each target that clients are dialed
// to, so that a backend that is down does not use up the retries of the others. It calls newBudget
// on the first call to a target. Targets are compared in gRPC's canonical form, so "localhost:80"
// and "dns:///localhost:80" are the same. newBudget must be safe for concurrent use and must not
// return nil; a budget that it returns may remain unused. [New] rejects a nil newBudget.
//
// A target that is no longer used is forgotten when a call to a new target is made and the old
// one has not been used for at least a minute. If it is used again later, it gets a new budget,
// so its reserve is full again and its earnings are gone. Calls that are in flight at that time
// keep the old budget.
//
// The default budget of a [Retrier] is a PerTarget of [NewRatioBudget]. Outside a Retrier, it acts
// as the budget of the target "". It cannot be part of [AllBudgets], but newBudget can return
// AllBudgets.
func PerTarget(newBudget func() Budget) Budget { return &perTarget{newBudget: newBudget} }

type perTarget struct {
	newBudget func() Budget
	settings  budgetSettings // of every budget that it creates; nil if only newBudget knows
	dialed    budgetNames    // by the target as dialed
	exact     budgetNames    // by the target in canonical form, see named

	mu      sync.Mutex               // never held while newBudget runs
	targets map[string]*targetBudget // guarded by mu; by the target in canonical form
	swept   time.Time                // guarded by mu; zero before the first target
}

// budgetSettings are the settings of one of this package's budgets. They can be compared.
type budgetSettings interface{ describe() string }

// keepBudgets returns an earlier option whose budgets have the same settings, because they know
// what has happened; nil if its budgets are others.
func (o *callOption) keepBudgets(earlier *callOption) *callOption {
	if earlier.budgets != nil && earlier.budgets.settings == o.budgets.settings {
		return earlier
	}
	return nil
}

type targetBudget struct {
	Budget
	used   atomic.Bool // since the last sweep
	dialed []string    // guarded by perTarget.mu; the target's keys in perTarget.dialed
}

// use marks the budget as used and returns it. It writes only once between two sweeps, so that
// the cores of a busy client share the cache line.
func (b *targetBudget) use() Budget {
	if !b.used.Load() {
		b.used.Store(true)
	}
	return b.Budget
}

// budgetNames finds budgets by the names that calls give their targets. Names are added and forgotten with
// perTarget.mu held.
type budgetNames struct {
	all   sync.Map                    // string → *targetBudget
	first atomic.Pointer[namedBudget] // one of all, because most clients have no other
}

type namedBudget struct {
	name string
	*targetBudget
}

// find returns the budget with a name; nil if there is none.
func (n *budgetNames) find(name string) *targetBudget {
	if first := n.first.Load(); first != nil && first.name == name {
		return first.targetBudget
	}
	if b, ok := n.all.Load(name); ok {
		return b.(*targetBudget)
	}
	return nil
}

// add reports whether the name is new.
func (n *budgetNames) add(name string, b *targetBudget) bool {
	_, known := n.all.LoadOrStore(name, b)
	n.first.CompareAndSwap(nil, &namedBudget{name, b})
	return !known
}

func (n *budgetNames) forget(name string) {
	n.all.Delete(name)
	if first := n.first.Load(); first != nil && first.name == name {
		n.first.Store(nil)
	}
}

// sweepEvery is the shortest time between two sweeps, and so the shortest time that an unused
// target is remembered. It is longer than the default Window, after which a budget without calls
// has little left to lose.
const sweepEvery = time.Minute

// String describes the budget to readers of a policy.
func (t *perTarget) String() string {
	if t.settings == nil {
		return "a budget for each target"
	}
	return t.settings.describe() + ", for each target"
}

func noTarget() string { return "" }

func (t *perTarget) Deposit(o Outcome)             { t.of("", noTarget).Deposit(o) }
func (t *perTarget) Withdraw(now time.Time) bool   { return t.of("", noTarget).Withdraw(now) }
func (t *perTarget) Refund()                       { t.of("", noTarget).Refund() }
func (t *perTarget) Balance(now time.Time) float64 { return t.of("", noTarget).Balance(now) }

// of returns the budget for a target as dialed. The canonical form costs an allocation, so it is
// built only if the target is new.
func (t *perTarget) of(dialed string, canonical func() string) Budget {
	if b := t.dialed.find(dialed); b != nil {
		return b.use()
	}
	return t.add(dialed, canonical(), &t.dialed).use()
}

// named returns the budget for a target in canonical form, such as a function's: "api.example.com" is not
// the "dns:///api.example.com" that a ClientConn makes of it.
func (t *perTarget) named(target string) Budget {
	if b := t.exact.find(target); b != nil {
		return b.use()
	}
	return t.add(target, target, &t.exact).use()
}

// add returns the budget of a target that is not known under its name as dialed.
func (t *perTarget) add(dialed, canonical string, names *budgetNames) *targetBudget {
	if b := t.alias(dialed, canonical, names, nil); b != nil {
		return b
	}
	return t.alias(dialed, canonical, names, &targetBudget{Budget: t.newBudget()})
}

// known returns the budget of a target in canonical form; nil if the target has none.
func (t *perTarget) known(canonical string) Budget {
	t.mu.Lock()
	defer t.mu.Unlock()
	if b := t.targets[canonical]; b != nil {
		return b.Budget
	}
	return nil
}

// alias adds dialed to the target's names, and returns the target's budget, which is fresh if it had none.
// It returns nil if the target has no budget and fresh is nil.
func (t *perTarget) alias(dialed, canonical string, names *budgetNames, fresh *targetBudget) *targetBudget {
	t.mu.Lock()
	defer t.mu.Unlock()
	b := t.targets[canonical]
	if b == nil {
		if fresh == nil {
			return nil
		}
		t.sweep(time.Now())
		b = fresh
		t.targets[canonical] = b
	}
	b.use() // before anything can sweep it
	if names.add(dialed, b) && names == &t.dialed {
		b.dialed = append(b.dialed, dialed)
	}
	return b
}

// sweep forgets the targets that were not used since the previous sweep, if that was long enough
// ago. The caller holds mu.
func (t *perTarget) sweep(now time.Time) {
	if t.targets == nil {
		t.targets, t.swept = map[string]*targetBudget{}, now
	}
	if now.Sub(t.swept) < sweepEvery {
		return
	}
	t.swept = now
	for canonical, b := range t.targets {
		if b.used.Swap(false) {
			continue
		}
		delete(t.targets, canonical)
		t.exact.forget(canonical)
		for _, dialed := range b.dialed {
			t.dialed.forget(dialed)
		}
	}
}

func (t *perTarget) check() error {
	if t.newBudget == nil {
		return fmt.Errorf("PerTarget was given a nil function")
	}
	return nil
}

// checkBudget rejects nil, and this package's budgets if they find themselves invalid.
func checkBudget(b Budget) error {
	if isNil(b) {
		return fmt.Errorf("budget is nil")
	}
	return checkSelf(b)
}

// isNil reports whether v is nil, or an interface that holds a nil pointer.
func isNil(v any) bool {
	if v == nil {
		return true
	}
	r := reflect.ValueOf(v)
	return r.Kind() == reflect.Pointer && r.IsNil()
}
