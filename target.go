package grpcretry

import (
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/grpcretry/grpcretry/internal/inside"
)

// A target is what a Retrier's calls know about a backend: whether it is failing, since when, and how
// many calls wait for it. Calls tell it about failures, and about answers while it is failing. It is
// safe for concurrent use.
//
// A target is failing from the first retryable failure after its last answered call, or after a
// Patience without any failure, until a call is answered again.
type target struct {
	name string // in gRPC's canonical form, or a function's
	all  *targets

	failing atomic.Bool // changed with mu held

	mu      sync.Mutex
	since   time.Time     // guarded by mu; the first failure of the latest trouble
	latest  time.Time     // guarded by mu; the latest failure
	news    time.Time     // guarded by mu; the latest failure, or the latest call that gave up
	lasts   time.Duration // guarded by mu; a trouble ends that long after its news: the longest patience of its calls
	answers int64         // guarded by mu; how often a call was answered while the target was failing
	waiting int           // guarded by mu; calls that wait before their next attempt
	gaveUp  int64         // guarded by mu; calls that ended because the patience was over
	logged  notice        // guarded by mu; the latest that was logged about this trouble

	forgotten bool // guarded by mu; a sweep has found it unused, so only calls that began long ago know it
}

// targets has a Retrier's targets.
type targets struct {
	byTarget[*target]
	failing atomic.Int32 // how many of them are failing, so that in good times a success looks none up
	log     *logger      // nil for none
}

func newTargets(log *logger) *targets {
	all := &targets{log: log}
	all.mayForget = func(t *target) bool {
		t.mu.Lock()
		defer t.mu.Unlock()
		if t.waiting == 0 {
			t.setFailing(false)
			t.forgotten = true
		}
		return t.waiting == 0
	}
	return all
}

// of returns the target that a ClientConn was dialed to.
func (all *targets) of(dialed string, canonical func() string) *target {
	return all.dialedAs(dialed, canonical, all.fresh)
}

// named returns the target with a name in canonical form, or a function's.
func (all *targets) named(name string) *target {
	return all.byTarget.named(name, all.fresh)
}

func (all *targets) fresh(name string) *target { return &target{name: name, all: all} }

// A trouble is what is known about a failing target at one moment. If the target is not failing,
// since is the zero time.
type trouble struct {
	since, latest time.Time
	answers       int64
}

// trouble returns what is known now. Only a new failure tells that a trouble is over, and this is also asked before an
// attempt has failed: then the trouble counts for as long as an unused target is remembered.
func (t *target) trouble(now time.Time) trouble {
	t.mu.Lock()
	defer t.mu.Unlock()
	known := trouble{latest: t.latest, answers: t.answers}
	if t.failing.Load() && now.Sub(t.news) <= max(t.lasts, sweepEvery) {
		known.since = t.since
	}
	return known
}

// isFailing needs mu. It reports whether the target is failing, and that is no old news.
func (t *target) isFailing(now time.Time) bool { return t.failing.Load() && now.Sub(t.news) <= t.lasts }

// fail records a retryable failure.
func (t *target) fail(now time.Time, patience time.Duration) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.lasts = max(t.lasts, patience); !t.isFailing(now) {
		t.since, t.lasts, t.logged = now, patience, nothingToSay
	}
	if now.After(t.latest) {
		t.latest = now
	}
	t.note(now)
	t.setFailing(true)
}

// setFailing needs mu.
func (t *target) setFailing(on bool) {
	if t.forgotten || t.failing.Swap(on) == on {
		return
	}
	if on {
		t.all.failing.Add(1)
	} else {
		t.all.failing.Add(-1)
	}
}

// answer records that a call was answered in time.
func (t *target) answer() {
	if !t.failing.Load() {
		return
	}
	t.mu.Lock()
	t.setFailing(false)
	t.answers++
	waited, calls := t.logged != nothingToSay, t.waiting
	t.logged = nothingToSay
	t.mu.Unlock()
	if waited {
		t.say(answersAgain, calls)
	}
}

// state returns what is known now.
func (t *target) state(now time.Time) inside.Target {
	t.mu.Lock()
	defer t.mu.Unlock()
	s := inside.Target{Name: t.name, Waiting: t.waiting, GaveUp: t.gaveUp}
	if t.isFailing(now) {
		s.Failing = max(0, now.Sub(t.since))
	}
	return s
}

// states returns the state of each target to which a call has failed lately, sorted by name.
func (all *targets) states(now time.Time) []inside.Target {
	var states []inside.Target
	all.each(func(_ string, t *target) { states = append(states, t.state(now)) })
	slices.SortFunc(states, func(a, b inside.Target) int { return strings.Compare(a.Name, b.Name) })
	return states
}

// maxWaiting is how many calls may wait for one target.
const maxWaiting = 10_000

// enter counts one more waiting call. It returns false if there are too many.
func (t *target) enter() bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.waiting >= maxWaiting {
		return false
	}
	t.waiting++
	return true
}

// exit counts one waiting call less.
func (t *target) exit() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.waiting--
}

// A notice is something that is logged once about a trouble.
type notice int

const (
	nothingToSay notice = iota
	callsWait           // calls wait until the target answers, or is connected
	patienceOver        // calls do not wait for it any more
	answersAgain
)

// await records that a call waits for the target, and not only for its backoff.
func (t *target) await() { t.sayOnce(callsWait, 0) }

// giveUp records that a call ends because the patience is over. That is news of the target, too: calls
// that have waited all the time, and seen no failure, are followed by others.
func (t *target) giveUp(now time.Time) {
	t.mu.Lock()
	t.note(now)
	t.mu.Unlock()
	t.sayOnce(patienceOver, 1)
}

// note needs mu. It records that there is news of the target's trouble.
func (t *target) note(now time.Time) {
	if now.After(t.news) {
		t.news = now
	}
}

func (t *target) sayOnce(what notice, gaveUp int64) {
	t.mu.Lock()
	t.gaveUp += gaveUp
	first, calls := t.logged < what, t.waiting
	t.logged = max(t.logged, what)
	t.mu.Unlock()
	if first {
		t.say(what, calls)
	}
}

// say logs a notice, without mu, because a handler may take its time.
func (t *target) say(what notice, waiting int) {
	if t.all.log != nil {
		t.all.log.targetNotice(t.name, what, waiting)
	}
}

// A byTarget keeps one thing for each target: a budget, or what is known about the target. It is
// safe for concurrent use, and finds what it has without a lock.
type byTarget[T any] struct {
	targets sync.Map                      // *entry[T] by the target in canonical form, or a function's
	dialed  sync.Map                      // the same by the target as dialed
	first   atomic.Pointer[dialedName[T]] // one of dialed, because most clients have no other

	mu        sync.Mutex   // held to add and to forget targets and names
	swept     time.Time    // guarded by mu; zero before the first target
	mayForget func(T) bool // asked by a sweep about what is not used; nil for always
}

type entry[T any] struct {
	of     T
	used   atomic.Bool // since the last sweep
	dialed []string    // guarded by byTarget.mu; the target's keys in byTarget.dialed
}

type dialedName[T any] struct {
	name string
	*entry[T]
}

// use marks the entry as used and returns what it holds. It writes only once between two sweeps, so
// that the cores of a busy client share the cache line.
func (e *entry[T]) use() T {
	if !e.used.Load() {
		e.used.Store(true)
	}
	return e.of
}

// sweepEvery is the shortest time between two sweeps, and so the shortest time that an unused
// target is remembered. It is longer than the default Window, after which a budget without calls
// has little left to lose.
const sweepEvery = time.Minute

// dialedAs returns what is kept for a target as dialed. The canonical form costs an allocation, so
// it is built only if the target is new.
func (t *byTarget[T]) dialedAs(dialed string, canonical func() string, fresh func(canonical string) T) T {
	if first := t.first.Load(); first != nil && first.name == dialed {
		return first.use()
	}
	if e, ok := t.dialed.Load(dialed); ok {
		return e.(*entry[T]).use()
	}
	name := canonical()
	made := fresh(name) // without mu, because it may be the program's function
	t.mu.Lock()
	defer t.mu.Unlock()
	e := t.add(name, made)
	if _, known := t.dialed.LoadOrStore(dialed, e); !known {
		e.dialed = append(e.dialed, dialed)
	}
	t.first.CompareAndSwap(nil, &dialedName[T]{dialed, e})
	return e.of
}

// named returns what is kept for a target in canonical form, such as a function's:
// "api.example.com" is not the "dns:///api.example.com" that a ClientConn makes of it.
func (t *byTarget[T]) named(target string, fresh func(canonical string) T) T {
	if e, ok := t.targets.Load(target); ok {
		return e.(*entry[T]).use()
	}
	made := fresh(target)
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.add(target, made).of
}

// add needs mu. It returns the entry of a target, which holds made if it had none.
func (t *byTarget[T]) add(target string, made T) *entry[T] {
	if e, ok := t.targets.Load(target); ok {
		e.(*entry[T]).use()
		return e.(*entry[T])
	}
	t.sweep(time.Now())
	e := &entry[T]{of: made}
	e.use() // before anything can sweep it
	t.targets.Store(target, e)
	return e
}

// known returns what is kept for a target in canonical form, if anything is.
func (t *byTarget[T]) known(canonical string) (of T, ok bool) {
	if e, ok := t.targets.Load(canonical); ok {
		return e.(*entry[T]).of, true
	}
	return of, false
}

// each calls f for every target, in no particular order.
func (t *byTarget[T]) each(f func(canonical string, of T)) {
	t.targets.Range(func(canonical, e any) bool {
		f(canonical.(string), e.(*entry[T]).of)
		return true
	})
}

// sweep needs mu. It forgets the targets that were not used since the previous sweep, if that was
// long enough ago.
func (t *byTarget[T]) sweep(now time.Time) {
	if t.swept.IsZero() {
		t.swept = now
	}
	if now.Sub(t.swept) < sweepEvery {
		return
	}
	t.swept = now
	t.targets.Range(func(canonical, known any) bool {
		e := known.(*entry[T])
		if e.used.Swap(false) || t.mayForget != nil && !t.mayForget(e.of) {
			return true
		}
		t.targets.Delete(canonical)
		for _, dialed := range e.dialed {
			t.dialed.Delete(dialed)
		}
		if first := t.first.Load(); first != nil && first.entry == e {
			t.first.Store(nil)
		}
		return true
	})
}
