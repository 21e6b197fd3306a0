package debug

import (
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/grpcretry/grpcretry"
	"github.com/grpcretry/grpcretry/internal/inside"
	"github.com/grpcretry/grpcretry/internal/reasons"
)

// A row counts the calls of one method to one target, by one retrier: since the page was
// made, and in the last five minutes.
//
// The recent past is a ring of steps. Counting into the current step takes no lock; a step that
// leaves the ring is added to the sum of everything before.
type row struct {
	source *source
	key    rowKey // zero of a row of others

	newest atomic.Int64 // the number of the current step
	steps  [recentSteps]step
	level  atomic.Pointer[level] // of the budget last seen, nil before

	mu   sync.Mutex // held to move on by a step, and to read; not to count
	past counts     // guarded by mu; what has left the steps

	kept []*Call // guarded by the page's mu; oldest first
}

// The recent past is Recent, and up to a step more.
const (
	stepLength  = 15 * time.Second
	recentSteps = int64(Recent/stepLength) + 1 // the current one, and as many full ones
)

// Recent is the length of "the last minutes" on the page and in [Snapshot.Recent]. They count
// in steps of 15 s, so it may be up to a step more.
const Recent = 5 * time.Minute

// A counter is the index of a count in a row.
type counter int

const (
	firstOutcome = counter(0)
	firstCode    = firstOutcome + mostOutcomes
	firstWait    = firstCode + counter(len(codeNames))

	failedRetried  = firstWait + counter(len(waitSources)) // calls that failed after a retry or a hedge
	retriesFailed  = failedRetried + 1
	retriesBeaten  = failedRetried + 2 // cancelled, because another attempt of the hedged call was decisive
	hedgesWasted   = failedRetried + 3 // failed or cancelled
	attemptsBeaten = failedRetried + 4 // cancelled: retries, hedges and first attempts
	counters       = failedRetried + 5
)

// outcomes are how calls end, as reasons.Outcome returns them. The first three are successes.
var outcomes = append([]string{firstTry, rescued, hedgeWon}, reasons.Words()...)

const mostOutcomes = 24 // there is a counter for each

const (
	firstTry = "first_try"
	rescued  = "recovered"
	hedgeWon = "hedge_won"

	successes = 3
)

// codeNames are the status codes as gRPC spells them on the wire, by number, and OTHER for
// numbers without a name.
var codeNames = [...]string{
	"OK", "CANCELLED", "UNKNOWN", "INVALID_ARGUMENT", "DEADLINE_EXCEEDED", "NOT_FOUND", "ALREADY_EXISTS",
	"PERMISSION_DENIED", "RESOURCE_EXHAUSTED", "FAILED_PRECONDITION", "ABORTED", "OUT_OF_RANGE",
	"UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS", "UNAUTHENTICATED", "OTHER",
}

var waitSources = [...]grpcretry.WaitSource{grpcretry.WaitBackoff, grpcretry.WaitPushback, grpcretry.WaitRetryInfo, inside.WaitConnect}

func outcomeCounter(e *grpcretry.Event) counter {
	if e.Err == nil && e.Attempt.Number == 1 {
		return firstOutcome // as nearly always
	}
	return firstOutcome + counter(slices.Index(outcomes, reasons.Outcome(e.Err, e.Reason, e.Attempt.Number, e.Attempt.Hedge)))
}

func codeCounter(code uint32) counter {
	return firstCode + counter(min(code, uint32(len(codeNames)-1))) // a large code is a negative int on 32 bits
}

func codeName(code uint32) string { return codeNames[codeCounter(code)-firstCode] }

// waitCounter is not ok if there was no wait after a failure: a hedge was due, or the next
// attempt was sent immediately.
func waitCounter(s grpcretry.WaitSource) (c counter, ok bool) {
	i := slices.Index(waitSources[:], s)
	return firstWait + counter(i), i >= 0
}

// A step counts what happens in stepLength.
type step [counters]atomic.Uint32

func (s *step) count(c counter) { s[c].Add(1) }

func (s *step) countIf(when bool, c counter) {
	if when {
		s.count(c)
	}
}

// counts are the counts of any period.
type counts [counters]int64

func (c *counts) add(more *counts) {
	for i := range c {
		c[i] += more[i]
	}
}

func newRow(s *source, key rowKey) *row { return &row{source: s, key: key} }

// step returns the step to count into at an age of the page.
func (r *row) step(age time.Duration) *step {
	n := int64(age / stepLength)
	if n > r.newest.Load() {
		r.moveTo(n)
	}
	return &r.steps[n%recentSteps]
}

// moveTo makes n the current step. A late count, for a step that has left the ring, goes to the
// step that took its place: none is lost.
func (r *row) moveTo(n int64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	newest := r.newest.Load()
	for i := max(newest+1, n-recentSteps+1); i <= n; i++ {
		s := &r.steps[i%recentSteps]
		for c := range s {
			r.past[c] += int64(s[c].Swap(0))
		}
	}
	r.newest.Store(max(n, newest))
}

// read returns the counts of the recent past, the oldest step first, and of all time.
func (r *row) read(age time.Duration) (recent history, total counts) {
	r.step(age) // drops steps that are no longer recent
	r.mu.Lock()
	defer r.mu.Unlock()
	total = r.past
	newest := r.newest.Load()
	for i := range recent {
		s := &r.steps[(newest+1+int64(i))%recentSteps]
		for c := range s {
			recent[i][c] = int64(s[c].Load())
		}
		total.add(&recent[i])
	}
	return recent, total
}

// A history is the recent past, the oldest step first.
type history [recentSteps]counts

func (h *history) sum() (sum counts) {
	for i := range h {
		sum.add(&h[i])
	}
	return sum
}

func (h *history) add(more *history) {
	for i := range h {
		h[i].add(&more[i])
	}
}

// cutLong cuts s to at most n bytes, between two characters, and marks the cut. The result
// shares memory with s.
func cutLong(s string, n int) string {
	if len(s) <= n {
		return s
	}
	const mark = "…"
	return strings.ToValidUTF8(s[:n-len(mark)], "") + mark
}
