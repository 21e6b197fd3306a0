package grpcretry

import (
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"

	"github.com/grpcretry/grpcretry/internal/bytarget"
	"github.com/grpcretry/grpcretry/internal/inside"
)

// A target is what a Retrier's calls know about a backend: whether it is failing, since when, and how
// many calls wait for it. Calls report their failures to it and, while it is failing, their answers. It is
// safe for concurrent use.
//
// A target is failing from the first retryable failure after its last answered call until an attempt is answered, see answer. After
// a Patience without news, the next failure counts as the first again.
type target struct {
	name string // in gRPC's canonical form, or a function's
	all  *targets

	failing atomic.Bool  // changed with mu held
	waiting atomic.Int64 // calls that wait before their next attempt
	scouted atomic.Int64 // the instant at which the latest retry was sent, or is about to be; 0 if it was cancelled

	mu      sync.Mutex
	trouble               // guarded by mu; the latest
	longAgo instant       // guarded by mu; since, for calls with more than the default patience, which remember for longer
	news    instant       // guarded by mu; the latest failure, or the latest call that gave up
	lasts   time.Duration // guarded by mu; the longest patience of the calls that met this trouble: without news for that long, it is over
	gaveUp  int64         // guarded by mu; calls that ended because the patience was over
	logged  notice        // guarded by mu; the latest that was logged since the last answer

	heard     bool // guarded by mu; an attempt that was sent before the onset has been answered since
	forgotten bool // guarded by mu; a sweep has found it unused, so only calls that began long ago know it
}

// targets has a Retrier's targets.
type targets struct {
	bytarget.Map[*target]
	failing atomic.Int32 // how many of them are failing, so that in good times a success looks none up
	log     *logger      // nil for one that is off
}

func newTargets(log *logger) *targets {
	all := &targets{log: log}
	all.Fresh = func(name string) *target { return &target{name: name, all: all} }
	all.Forget = func(t *target) bool {
		t.mu.Lock()
		defer t.mu.Unlock()
		if t.waiting.Load() > 0 {
			return false
		}
		t.setFailing(false)
		t.forgotten = true
		return true
	}
	return all
}

// A trouble is what is known about a failing target at one moment.
type trouble struct {
	since   instant // the first failure; to a call 0 if the target is not failing
	onset   instant // the first of the failures that followed one another closely up to the latest
	latest  instant // the latest failure
	answers int64   // how often a call was answered while the target was failing
}

// look returns what a call with that patience can know now.
func (t *target) look(now instant, patience time.Duration) trouble {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.known(now, patience)
}

// known is look for those who hold mu.
func (t *target) known(now instant, patience time.Duration) trouble {
	known := t.trouble
	if patience > defaultPatience {
		known.since = t.longAgo
	}
	if !t.isFailing(now, patience) {
		known.since = 0
	}
	return known
}

// isFailing needs mu. It reports whether the target is failing for a call with that patience. A trouble is over after so long without
// news, but not before the default patience, unless all calls have a shorter one; then the next failure begins another one.
func (t *target) isFailing(now instant, patience time.Duration) bool {
	return t.failing.Load() && !t.hasAnswered(now) && now.Sub(t.news) <= min(t.lasts, max(patience, defaultPatience))
}

// hasAnswered needs mu. It reports whether the answer to an attempt that was sent before the onset has ended the trouble: it does if
// no other failure follows closely. A server that begins to fail goes on with what it has begun.
func (t *target) hasAnswered(now instant) bool { return t.heard && now.Sub(t.latest) > closely }

// closely is how soon a failure follows another one if they may have the same cause.
const closely = time.Second

// fail records a retryable failure, and returns what is known now.
func (t *target) fail(now instant, patience time.Duration) trouble {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.hasAnswered(now) {
		t.setFailing(false)
		t.answers++
	}
	t.heard = false
	if t.lasts = max(t.lasts, patience); !t.isFailing(now, defaultPatience) {
		t.since = now
	}
	if !t.isFailing(now, t.lasts) {
		t.longAgo, t.lasts = now, patience
	}
	if now.Sub(t.latest) > closely {
		t.onset = now
	}
	t.latest = max(t.latest, now)
	t.news = max(t.news, now)
	t.setFailing(true)
	return t.known(now, patience)
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

// answer records that an attempt was answered in time.
func (t *target) answer(sent instant) {
	if !t.failing.Load() {
		return
	}
	t.mu.Lock()
	early, waited := sent < t.onset, t.logged != nothingToSay
	if t.heard = early; !early {
		t.setFailing(false)
		t.answers++
		t.logged = nothingToSay // another answer may be waiting for mu
	}
	t.mu.Unlock()
	if waited && !early {
		t.say(answersAgain)
	}
}

// state returns what is known now.
func (t *target) state(now instant) inside.Target {
	t.mu.Lock()
	defer t.mu.Unlock()
	s := inside.Target{Name: t.name, Waiting: int(t.waiting.Load()), GaveUp: t.gaveUp}
	if t.isFailing(now, t.lasts) {
		s.Failing = max(0, now.Sub(t.longAgo))
	}
	return s
}

// states returns the state of each target to which a call has failed lately, sorted by name.
func (all *targets) states(now time.Time) []inside.Target {
	var states []inside.Target
	for t := range all.All() {
		states = append(states, t.state(instantOf(now)))
	}
	slices.SortFunc(states, func(a, b inside.Target) int { return strings.Compare(a.Name, b.Name) })
	return states
}

// maxWaiting is how many calls may wait for one target.
const maxWaiting = 10_000

// enter counts one more waiting call. It returns false if there are too many.
func (t *target) enter() bool {
	if t.waiting.Add(1) <= maxWaiting {
		return true
	}
	t.waiting.Add(-1)
	return false
}

// exit counts one waiting call fewer.
func (t *target) exit() { t.waiting.Add(-1) }

// A notice is something that is logged once until the target answers.
type notice int

const (
	nothingToSay notice = iota
	callsWait           // calls wait until the target answers, or is connected
	patienceOver        // calls do not wait for it any more
	answersAgain
)

// await records that a call waits for the target, and not only for its backoff.
func (t *target) await() { t.sayOnce(callsWait) }

// giveUp records that a call has ended because no further wait fits into its patience, or too many calls wait. That counts as
// news, so that a trouble lasts while calls only wait.
func (t *target) giveUp(now instant) {
	t.mu.Lock()
	t.news = max(t.news, now)
	t.gaveUp++
	over := t.waiting.Load() == 0 || now >= t.longAgo.Add(t.lasts) // otherwise other calls go on waiting
	t.mu.Unlock()
	if over {
		t.sayOnce(patienceOver)
	}
}

func (t *target) sayOnce(what notice) {
	t.mu.Lock()
	first := t.logged < what
	t.logged = max(t.logged, what)
	t.mu.Unlock()
	if first {
		t.say(what)
	}
}

// say logs a notice, without mu, because a handler may take its time.
func (t *target) say(what notice) { t.all.log.targetNotice(t.name, what, int(t.waiting.Load())) }

// A backend is what a call is made to.
type backend struct {
	cc             *grpc.ClientConn // nil for a function, and in this package's tests that make no connection
	functionTarget string           // the target of a function, see Retrier.Do; otherwise ""
}

// dialed returns the target as it was dialed.
func (of backend) dialed() string {
	if of.cc == nil {
		return of.functionTarget
	}
	return of.cc.Target()
}

// target returns the target in gRPC's canonical form, with a scheme, or a function's as it is.
func (of backend) target() string {
	if of.cc == nil {
		return of.functionTarget
	}
	return of.cc.CanonicalTarget()
}

// budgetOf returns the budget that calls to the backend spend from: b, or b's for the target.
func (of backend) budgetOf(b Budget) Budget {
	if t, ok := b.(*perTarget); ok {
		return ofTarget(of, &t.targets)
	}
	return b
}

// targetOf returns what the Retrier knows about a backend.
func (r *Retrier) targetOf(of backend) *target { return ofTarget(of, &r.targets.Map) }

// ofTarget returns what m has for a backend's target.
func ofTarget[T any](of backend, m *bytarget.Map[T]) T {
	if of.cc == nil {
		return m.Named(of.functionTarget)
	}
	return m.Dialed(of.cc.Target(), of.cc.CanonicalTarget)
}

// noteAnswer records that a backend has answered an attempt. In good times, it costs a comparison.
func (r *Retrier) noteAnswer(by backend, sent instant) {
	if r.targets.failing.Load() > 0 {
		r.targetOf(by).answer(sent)
	}
}
