// Package debug serves a page about a program's retriers: is this client retrying, why, is it
// helping, and what stopped it?
//
//	retrier, err := grpcretry.New()
//	...
//	http.Handle("/debug/grpcretry", debug.Handler(retrier))
//
// The page needs no script and loads nothing else. With ?format=json it is a [Snapshot].
//
// # For an internal port
//
// The page shows no request data: no messages and no metadata. But it shows targets, methods,
// the addresses of servers, and the status messages of failed calls, cut to 120 bytes. User data
// that a server writes into a status message appears here. So mount the page where
// /debug/pprof would be mounted, on a port for the people who run the program.
//
// # Query
//
//	?window=all       everything since the page was mounted, instead of the last five minutes
//	?refresh=5        load the page again every 5 seconds, 1 to 3600
//	?format=json      a [Snapshot]
//	?retrier=1&target=dns:///shop&method=/shop.Cart/Get
//	                  only these; each may be left out
//
// # What it costs
//
// Nothing until [Handler] is called. Then each call looks its method up and counts; a call that
// succeeds on its first attempt does so with one atomic addition and no allocation. As for any
// observer, gRPC copies the response headers of each attempt, which costs it three
// allocations ([grpcretry.WithObserver]). A call that is kept costs about twenty, and some
// microseconds. At most once a second, a call asks its budget for the balance.
//
// Memory is bounded: at most 5 MiB for a page, and 4 KiB for each retrier on it. There are counts
// for 100 pairs of target and method; later pairs are counted together, as others. For each pair
// the page keeps the last 50 calls that retried, hedged, waited or gave up, 1000 in all (then the
// pair with the most loses its oldest), and for each of these calls the first attempt and the
// last 9. For the first 50 budgets it keeps the level, at most once a second, for five minutes.
// Methods and targets are cut to 200 bytes, addresses of servers to 64. No goroutine is started.
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
	"github.com/grpcretry/grpcretry/internal/inside"
)

// The bounds of the memory, as in the package comment.
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

// A Page counts calls from [Handler] on, and shows the counts. It is an [http.Handler], and safe
// for concurrent use.
type Page struct {
	since   time.Time // set by Handler, then only read
	sources []*source // set by Handler, then only read
	stops   []func()  // set by Handler, then only read

	mu      sync.Mutex     // held to add a row, a budget or a call, and to copy them; never across a callback
	rows    int            // guarded by mu
	kept    int            // guarded by mu; calls, of all rows
	budgets map[any]*level // guarded by mu; by identity
	ordered []*level       // guarded by mu; the same, oldest first
	closed  time.Time      // guarded by mu; zero until Close
}

// Handler returns a page about the calls of the retriers from now on. It does not change how
// they are retried. A retrier that is nil, or named twice, is ignored.
//
// Each page counts separately: to see the same numbers in two places, mount the same page. A
// page counts until [Page.Close], even if nobody serves it; most programs keep it for as long as
// they run.
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
		p.stops = append(p.stops, inside.Observe(s.retrier, s.observe))
	}
	return p
}

// Close stops counting, so that calls pay nothing for the page any more. The page can still be
// served: it shows its counts, and when it was closed. A second Close does nothing.
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
	number  int // 1 for the first retrier passed to Handler, and so on
	retrier *grpcretry.Retrier

	// rows are replaced, never changed, so that calls find theirs without a lock.
	rows   atomic.Pointer[map[rowKey]*row]
	others *row // for pairs after maxRows
}

// A rowKey has names cut to maxName.
type rowKey struct {
	target, method string
	function       bool // the calls are not RPCs
}

// observe counts. Only the end of a call matters if its first attempt succeeds.
func (s *source) observe(_ context.Context, e grpcretry.Event, of inside.Call) {
	switch {
	case e.Kind == grpcretry.AttemptStart && e.Attempt.Number > 1:
		s.page.look(s.row(&e, of), of.Budget, e.Attempt.Start)
	case e.Kind == grpcretry.AttemptEnd && e.Attempt.Err != nil:
		s.attemptFailed(&e, of)
	case e.Kind == grpcretry.Decision:
		s.decided(&e, of)
	case e.Kind == grpcretry.CallEnd:
		s.ended(&e, of)
	}
}

func (s *source) attemptFailed(e *grpcretry.Event, of inside.Call) {
	step := s.row(e, of).step(s.page.age(endOf(&e.Attempt)))
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

func (s *source) decided(e *grpcretry.Event, of inside.Call) {
	at := endOf(&e.Attempt)
	row := s.row(e, of)
	if wait, ok := waitCounter(e.WaitSource); ok && e.Kind == grpcretry.Decision && e.Reason == nil {
		row.step(s.page.age(at)).count(wait)
	}
	s.page.look(row, of.Budget, at)
}

func (s *source) ended(e *grpcretry.Event, of inside.Call) {
	at := of.Start.Add(e.Elapsed)
	row := s.row(e, of)
	step := row.step(s.page.age(at))
	step.count(outcomeCounter(e))
	step.countIf(e.Err != nil && of.Made > 1, failedRetried)
	s.page.look(row, of.Budget, at)
	if worthKeeping(e, of.Made) {
		call := newCall(e, of)
		call.Retrier = s.number
		s.page.keep(row, call)
	}
}

// endOf returns when an attempt ended.
func endOf(a *grpcretry.Attempt) time.Time { return a.Start.Add(a.Duration) }

// age returns how long the page had counted at t.
func (p *Page) age(t time.Time) time.Duration { return max(0, t.Sub(p.since)) }

// row finds the row to count into, on the path of every call.
func (s *source) row(e *grpcretry.Event, of inside.Call) *row {
	key := rowKey{cutLong(e.Target, maxName), cutLong(e.Attempt.Method, maxName), of.Function}
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
	key = rowKey{strings.Clone(key.target), strings.Clone(key.method), key.function} // parts of what may be much longer
	rows := maps.Clone(old)
	rows[key] = newRow(s, key)
	s.rows.Store(&rows)
	return rows[key]
}
