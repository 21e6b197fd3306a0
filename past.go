package grpcretry

import (
	"slices"
	"time"
)

// The past of a call holds its attempts that ended without success.
type past struct {
	last     Attempt   // the attempt that ended last: most calls have no other, and no memory for more
	earlier  []Attempt // the attempts that ended before it, in that order; the latest, fewer than maxKept
	failures int
	said     error         // the last failure that came from a server or gRPC, not from a timeout or the caller
	idle     time.Duration // without an attempt in flight, before the one in flight now
}

// maxKept bounds the memory of a call with very many attempts.
const maxKept = 1000

// none reports whether no attempt has ended yet.
func (p *past) none() bool { return p.last.Number == 0 }

// all returns the attempts, and more that ended, in the order of their numbers.
func (p *past) all(more ...Attempt) []Attempt {
	all := slices.Concat(p.earlier, []Attempt{p.last}, more)
	slices.SortFunc(all, func(a, b Attempt) int { return a.Number - b.Number })
	return all
}

// record adds a failed attempt.
func (p *past) record(f *failure) {
	p.keep(f.Attempt)
	p.failures++
	if !f.TimedOut && !f.isCallers() {
		p.said = f.Attempt.Err
	}
}

func (p *past) keep(a Attempt) {
	if !p.none() {
		p.keepEarlier(p.last)
	}
	p.last = a
}

func (p *past) keepEarlier(a Attempt) {
	if len(p.earlier) == maxKept-1 {
		p.earlier = slices.Delete(p.earlier, 0, maxKept/2)
	}
	if p.earlier == nil {
		p.earlier = make([]Attempt, 0, defaultMaxAttempts-1) // once for most calls
	}
	p.earlier = append(p.earlier, a)
}

// made returns the number of attempts made, one of which has the number given.
func (p *past) made(number int) int {
	number = max(number, p.last.Number)
	for i := range p.earlier {
		number = max(number, p.earlier[i].Number)
	}
	return number
}

// lastEnd returns when the last attempt in flight ended, whether or not that was decisive.
func (p *past) lastEnd(decisive *Attempt) time.Time {
	last := decisive.Start.Add(decisive.Duration)
	for i := range p.earlier {
		last = later(last, &p.earlier[i])
	}
	if p.none() {
		return last
	}
	return later(last, &p.last)
}

func later(t time.Time, a *Attempt) time.Time {
	if end := a.Start.Add(a.Duration); end.After(t) {
		return end
	}
	return t
}
