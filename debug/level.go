package debug

import (
	"reflect"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/grpcretry/grpcretry"
)

// A level is the history of one budget: its balance, sampled at most once a second, when a call
// spends from it or ends, and when the page is read.
type level struct {
	number int // from 1, in the order in which they were seen
	budget grpcretry.Budget
	key    any // its identity

	pointer bool // so that comparing it is quick, and cannot panic

	second atomic.Int64 // of the latest look, by the age of the page

	mu      sync.Mutex
	samples []sample // guarded by mu; oldest first, none older than Recent
}

// A sample is a balance at an age of the page.
type sample struct {
	age     time.Duration
	balance float64
}

// look finds the level of a budget, and adds to it.
func (p *Page) look(r *row, budget any, at time.Time) {
	b, ok := budget.(grpcretry.Budget)
	if !ok {
		return
	}
	l := r.level.Load()
	if l == nil || !l.of(b) {
		l = p.levelOf(b)
		if r.level.Store(l); l == nil {
			return
		}
	}
	l.sample(p.age(at), at)
}

// of reports whether l is the level of b.
func (l *level) of(b grpcretry.Budget) bool {
	if l.pointer {
		return l.budget == b
	}
	return l.key == identity(b)
}

// identity distinguishes budgets. Those that cannot be compared share one identity per type.
func identity(b grpcretry.Budget) any {
	if v := reflect.ValueOf(b); !v.Comparable() {
		return v.Type()
	}
	return b
}

// levelOf returns the level of a budget, nil if there are too many.
func (p *Page) levelOf(b grpcretry.Budget) *level {
	key := identity(b)
	p.mu.Lock()
	defer p.mu.Unlock()
	if l := p.budgets[key]; l != nil {
		return l
	}
	if len(p.ordered) == maxBudgets {
		return nil
	}
	l := &level{number: len(p.ordered) + 1, budget: b, key: key,
		pointer: reflect.TypeOf(b).Kind() == reflect.Pointer}
	l.second.Store(-1)
	p.budgets[key] = l
	p.ordered = append(p.ordered, l)
	return l
}

// sample reads the balance, unless that has been done in the same second.
func (l *level) sample(age time.Duration, at time.Time) {
	second := int64(age / time.Second)
	before := l.second.Load()
	if second <= before || !l.second.CompareAndSwap(before, second) {
		return
	}
	balance := l.budget.Balance(at) // may be anybody's code: without the lock
	l.mu.Lock()
	defer l.mu.Unlock()
	l.samples = slices.DeleteFunc(l.samples, func(s sample) bool { return s.age < age-Recent })
	if n := len(l.samples); n == 0 || l.samples[n-1].age < age { // else one of a later second was quicker
		l.samples = append(l.samples, sample{age, balance})
	}
}

// read returns the balance now and the samples of the last minutes, oldest first.
func (l *level) read(age time.Duration, now time.Time) (float64, []sample) {
	l.sample(age, now)
	balance := l.budget.Balance(now)
	l.mu.Lock()
	defer l.mu.Unlock()
	var samples []sample
	for _, s := range l.samples {
		if s.age >= age-Recent {
			samples = append(samples, s)
		}
	}
	return balance, samples
}
