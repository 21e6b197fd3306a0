// Package debug shows what the retriers of a program are doing, on a page of its own: is
// this client retrying, why, is it helping, and what stopped it?
//
//	retrier, err := grpcretry.New()
//	...
//	http.Handle("/debug/grpcretry", debug.Handler(retrier))
//
// The page needs no script and loads nothing else. The same as JSON, a [Snapshot], is
// under ?format=json.
//
// # For an internal port
//
// The page shows no request data: no message and no metadata. It shows what else a
// stranger need not know: targets, methods, the addresses of servers, and the status messages
// of failed calls. These are the servers' own words, cut to 120 bytes; whoever writes user
// data into a status message will find it here. So mount it where /debug/pprof would be
// mounted, on a port for the people who run the program.
//
// # Query
//
//	?window=all       what happened since the page was mounted; without it, in the last five minutes
//	?refresh=5        load the page again every 5 seconds, 1 to 3600
//	?format=json      a [Snapshot]
//	?retrier=1&target=dns:///shop&method=/shop.Cart/Get
//	                  only that; each may be left out
//
// # What it costs
//
// Nothing until [Handler] is called. Then each call looks its method up and counts; one
// that succeeds at once does so with one atomic addition and no allocation. As for any
// observer, gRPC copies the response headers of each attempt, which costs it three
// allocations ([grpcretry.WithObserver]). A call that is kept costs about twenty, and some
// microseconds. Once a second at most, a call asks its budget for the balance.
//
// Memory is bounded, whatever is called and however long: at most 5 MiB for a page, and
// 4 KiB for each retrier on it. There are counts for 100 pairs of target and method; calls of what
// comes after that are counted together, as other. It keeps the last 50 calls that made several
// attempts or gave up of each pair, 1000 in all (then the pair with the most loses its oldest), and of
// each of these calls the first attempt and the last 9. Of up to 50 budgets it keeps the
// level, once a second at most, for five minutes. Methods and targets are cut to 200
// bytes, addresses of servers to 64. No goroutine is started.
package debug

import (
	"context"
	"errors"
	"maps"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/grpcretry/grpcretry"
)

// What bounds the memory; the package comment says so.
const (
	maxRows     = 100 // pairs of target and method
	maxKept     = 50  // calls of one pair
	maxKeptAll  = 1000
	maxAttempts = 10 // of one call: the first, and the last 9
	maxBudgets  = 50
	maxName     = 200 // bytes of a target or method
	maxWords    = 120 // bytes of a status message
	maxPeer     = 64  // bytes of an address
)

// A Page shows what it has counted since [Handler] made it. It is an [http.Handler], and
// safe for concurrent use.
type Page struct {
	since   time.Time // set by Handler, then only read
	sources []*source // likewise
	stops   []func()  // likewise

	mu      sync.Mutex     // held to add a row, a budget or a call, and to copy them; never across a callback
	rows    int            // guarded by mu
	kept    int            // guarded by mu; calls, of all rows
	budgets map[any]*level // guarded by mu; by identity
	ordered []*level       // guarded by mu; the same, oldest first
	closed  time.Time      // guarded by mu; zero until Close
}

// Handler makes a page of the calls of the retriers, from now on; how they are retried
// stays as it is. A retrier that is nil, or named twice, is left out.
//
// Each call of Handler makes a page that counts by itself, so mount the same page where
// you want to see the same numbers. A page counts until [Page.Close], also when nobody
// serves it; most programs keep it for as long as they run.
func Handler(retriers ...*grpcretry.Retrier) *Page {
	p := &Page{since: time.Now(), budgets: map[any]*level{}}
	seen := map[*grpcretry.Retrier]bool{nil: true}
	for _, r := range retriers {
		if seen[r] {
			continue
		}
		seen[r] = true
		s := &source{page: p, number: len(p.sources) + 1, retrier: r}
		s.rows.Store(&map[rowKey]*row{})
		s.others = newRow(s, rowKey{})
		p.sources = append(p.sources, s)
	}
	for _, s := range p.sources {
		p.stops = append(p.stops, s.retrier.Observe(s.observe))
	}
	return p
}

// Close ends the counting, and with it what the page costs each call. The page can still
// be served: it shows what it has, and when it was closed. Closing twice does no harm.
func (p *Page) Close() {
	for _, stop := range p.stops {
		stop()
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed.IsZero() {
		p.closed = time.Now()
	}
}

// A source is one retrier of a page.
type source struct {
	page    *Page
	number  int // 1 for the first one given to Handler, and so on
	retrier *grpcretry.Retrier

	// rows are replaced, never changed, so that calls find theirs without a lock.
	rows   atomic.Pointer[map[rowKey]*row]
	others *row // for what comes after maxRows
}

// A rowKey is cut to maxName.
type rowKey struct{ target, method string }

// observe counts. A call that succeeds at once has one event that matters: its end.
func (s *source) observe(_ context.Context, e grpcretry.Event) {
	switch {
	case e.Kind == grpcretry.AttemptEnd && e.Attempt.Err != nil:
		s.attemptFailed(&e)
	case e.Kind == grpcretry.Decision:
		s.decided(&e)
	case e.Kind == grpcretry.CallEnd:
		s.ended(&e)
	}
}

func (s *source) attemptFailed(e *grpcretry.Event) {
	step := s.row(e).step(s.page.age(endOf(&e.Attempt)))
	isRetry := e.Attempt.Number > 1 && !e.Attempt.Hedge && !e.Attempt.Unsent
	if errors.Is(e.Attempt.Err, grpcretry.ErrHedgeLost) {
		step.count(attemptsBeaten)
		step.countIf(isRetry, retriesBeaten)
	} else {
		step.count(codeCounter(uint32(e.Attempt.Code())))
		step.countIf(isRetry, retriesFailed)
	}
	step.countIf(e.Attempt.Hedge && !e.Attempt.Unsent, hedgesWasted)
}

func (s *source) decided(e *grpcretry.Event) {
	at := endOf(&e.Attempt)
	row := s.row(e)
	if wait, ok := waitCounter(e.WaitSource); ok && e.Kind == grpcretry.Decision && e.Reason == nil {
		row.step(s.page.age(at)).count(wait)
	}
	s.page.look(row, e.Budget, at)
}

func (s *source) ended(e *grpcretry.Event) {
	began := callStart(e)
	at := began.Add(e.Elapsed)
	row := s.row(e)
	step := row.step(s.page.age(at))
	step.count(outcomeCounter(e))
	step.countIf(e.Err != nil && attemptsMade(e) > 1, lost)
	s.page.look(row, e.Budget, at)
	if worthKeeping(e) {
		call := newCall(e, began)
		call.Retrier = s.number
		s.page.keep(row, call)
	}
}

// attemptsMade is the number of attempts of the call that a CallEnd is about: where they
// were hedged, the decisive one need not be the last.
func attemptsMade(e *grpcretry.Event) int {
	if n := len(e.Attempts); n > 0 {
		return max(e.Attempt.Number, e.Attempts[n-1].Number)
	}
	return e.Attempt.Number
}

// endOf is when an attempt ended.
func endOf(a *grpcretry.Attempt) time.Time { return a.Start.Add(a.Duration) }

// callStart is when the call began that a CallEnd is about.
func callStart(e *grpcretry.Event) time.Time {
	switch {
	case len(e.Attempts) == 0:
		return e.Attempt.Start
	case e.Attempts[0].Number > 1: // of so many, the first are not told
		return endOf(&e.Attempt).Add(-e.Elapsed)
	default:
		return e.Attempts[0].Start
	}
}

// age is how long the page had counted at t.
func (p *Page) age(t time.Time) time.Duration { return max(0, t.Sub(p.since)) }

// row finds where to count, on the path of every call.
func (s *source) row(e *grpcretry.Event) *row {
	key := rowKey{cutLong(e.Target, maxName), cutLong(e.Attempt.Method, maxName)}
	if r := (*s.rows.Load())[key]; r != nil {
		return r
	}
	return s.addRow(key)
}

func (s *source) addRow(key rowKey) *row {
	s.page.mu.Lock()
	defer s.page.mu.Unlock()
	old := *s.rows.Load()
	if r := old[key]; r != nil {
		return r
	}
	if s.page.rows >= maxRows {
		return s.others
	}
	s.page.rows++
	key = rowKey{strings.Clone(key.target), strings.Clone(key.method)} // parts of what may be much longer
	rows := maps.Clone(old)
	rows[key] = newRow(s, key)
	s.rows.Store(&rows)
	return rows[key]
}
