package debug

import (
	"errors"
	"slices"
	"strings"
	"time"
	"unicode"

	"github.com/grpcretry/grpcretry"
	"github.com/grpcretry/grpcretry/internal/inside"
	"github.com/grpcretry/grpcretry/internal/reasons"
)

// A Call retried, hedged or waited, or gave up although its failure was retryable.
type Call struct {
	Retrier int    `json:"retrier"` // 1 for the first retrier passed to Handler, and so on
	Target  string `json:"target"`  // in gRPC's canonical form: "dns:///shop:443"
	Method  string `json:"method"`  // "/pkg.Service/Method"

	Function bool `json:"function"` // it is a function, and not an RPC: no peer is known

	Ended     time.Time `json:"ended"`      // when it ended
	ElapsedMs float64   `json:"elapsed_ms"` // from its start to its end
	Outcome   string    `json:"outcome"`    // a word, as in the metrics
	Code      string    `json:"code"`       // returned to the caller, as spelled on the wire: UNAVAILABLE

	RefusedWaitMs     float64 `json:"refused_wait_ms"`     // the wait that was rejected, if the call stopped because of it; else 0
	RefusedWaitSource string  `json:"refused_wait_source"` // the source of that wait; else ""

	Made     int       `json:"attempts_made"` // how many attempts were made
	Attempts []Attempt `json:"attempts"`      // the first that [grpcretry.Event] holds and the last 9, in the order of their numbers
}

// An Attempt is one try of a [Call].
type Attempt struct {
	Number     int     `json:"number"`      // 1 for the first attempt of a call
	Hedge      bool    `json:"hedge"`       // it was sent beside an earlier attempt in flight, and not in place of one
	StartMs    float64 `json:"start_ms"`    // from the start of the call to the start of the attempt
	DurationMs float64 `json:"duration_ms"` // from its start to its end
	Code       string  `json:"code"`        // its status code, as spelled on the wire: UNAVAILABLE
	Message    string  `json:"message"`     // its status message, cut to 120 bytes
	Ours       bool    `json:"ours"`        // Message is from this library, which ended the attempt
	Peer       string  `json:"peer"`        // the address of the server, empty if none was reached
	WaitMs     float64 `json:"wait_ms"`     // the wait before the attempt, as decided
	WaitSource string  `json:"wait_source"` // the [grpcretry.WaitSource] of that wait: backoff, …
	Decision   string  `json:"decision"`    // success, retry, stop, or lost to another attempt of a hedged call
	Reason     string  `json:"reason"`      // a word for the stop that ended the call, as in the metrics; else ""
}

// The decisions about an attempt.
const (
	success = "success"
	retry   = "retry"
	stop    = "stop"
	beaten  = "lost"
)

// worthKeeping reports whether the page keeps the call that e ended: it retried, hedged, waited or gave up.
// The page keeps no first failure that no policy retries, none that may have run or committed its stream,
// and no call whose caller went away.
func worthKeeping(e *grpcretry.Event, made int) bool {
	if e.Err == nil || made > 1 {
		return made > 1
	}
	why := reasons.Of(e.Reason)
	if why.ByCaller {
		return !endedWithCaller(&e.Attempt) // it ended in the wait after the attempt
	}
	return !why.Quiet && !errors.Is(e.Reason, grpcretry.ErrMayHaveRun) && !errors.Is(e.Reason, grpcretry.ErrCommitted)
}

// endedWithCaller reports whether an attempt ended as attempts do when the caller goes away.
func endedWithCaller(a *grpcretry.Attempt) bool {
	code := codeName(uint32(a.Code()))
	return (code == "CANCELLED" || code == "DEADLINE_EXCEEDED") && !errors.Is(a.Err, grpcretry.ErrAttemptTimeout)
}

// newCall copies what the page shows of a call, so that the page keeps nothing else alive.
func newCall(e *grpcretry.Event, of inside.Call) *Call {
	c := &Call{
		Target:    text(e.Target, maxName),
		Method:    text(e.Attempt.Method, maxName),
		Function:  of.Function,
		Ended:     of.Start.Add(e.Elapsed),
		ElapsedMs: ms(e.Elapsed),
		Outcome:   reasons.Outcome(e.Err, e.Reason, e.Attempt.Number, e.Attempt.Hedge),
		Code:      codeName(uint32(grpcretry.Attempt{Err: e.Err}.Code())),
		Made:      of.Made,
	}
	if e.WaitSource != 0 {
		c.RefusedWaitMs, c.RefusedWaitSource = ms(e.Wait), e.WaitSource.String()
	}
	attempts := firstAndLast(e)
	c.Attempts = make([]Attempt, 0, len(attempts))
	for i := range attempts {
		a := &attempts[i]
		c.add(a, of.Start)
		kept := &c.Attempts[i]
		switch {
		case a.Err == nil:
			kept.Decision = success
		case errors.Is(a.Err, grpcretry.ErrHedgeLost):
			kept.Decision = beaten
		case a.Number == e.Attempt.Number:
			kept.Decision, kept.Reason = stop, reasons.Of(e.Reason).Word
		case slices.ContainsFunc(attempts[i+1:], func(b grpcretry.Attempt) bool { return follows(&b, a) }):
			kept.Decision = retry
		default:
			kept.Decision = stop
		}
	}
	return c
}

// follows reports whether b was sent because a, or an attempt after a, had failed.
func follows(b, a *grpcretry.Attempt) bool {
	return b.WaitSource != 0 && b.WaitSource.String() != hedgeDelay && !b.Start.Before(endOf(a))
}

// firstAndLast returns the attempts that are kept.
func firstAndLast(e *grpcretry.Event) []grpcretry.Attempt {
	all := e.Attempts
	if len(all) == 0 {
		return []grpcretry.Attempt{e.Attempt}
	}
	if len(all) <= maxAttempts {
		return all
	}
	return append(all[:1:1], all[len(all)-maxAttempts+1:]...)
}

func (c *Call) add(a *grpcretry.Attempt, began time.Time) {
	one := Attempt{
		Number:     a.Number,
		Hedge:      a.Hedge,
		StartMs:    ms(a.Start.Sub(began)),
		DurationMs: ms(a.Duration),
		Code:       codeName(uint32(a.Code())),
		Message:    text(words(a.Err), maxWords),
		Ours:       errors.Is(a.Err, grpcretry.ErrHedgeLost) || errors.Is(a.Err, grpcretry.ErrAttemptTimeout),
		WaitMs:     ms(a.Wait),
		WaitSource: a.WaitSource.String(),
	}
	if a.Peer != nil {
		one.Peer = text(a.Peer.String(), maxPeer)
	}
	if n := len(c.Attempts); n > 0 { // mostly they are the same: keep one
		last := c.Attempts[n-1]
		share(&one.Message, last.Message)
		share(&one.Peer, last.Peer)
	}
	c.Attempts = append(c.Attempts, one)
}

func share(s *string, with string) {
	if *s == with {
		*s = with
	}
}

// words returns the message of a status, without gRPC's prefix.
func words(err error) string {
	if err == nil {
		return ""
	}
	s := err.Error()
	if rest, ok := strings.CutPrefix(s, "rpc error: code = "); ok {
		if _, message, ok := strings.Cut(rest, " desc = "); ok {
			return message
		}
	}
	return s
}

// text makes foreign text fit to be kept and shown: at most n bytes, and no character that could
// change how others are shown, such as a line feed or one that turns the direction of writing.
func text(s string, n int) string {
	s = strings.Map(func(r rune) rune {
		if !unicode.IsGraphic(r) {
			return unicode.ReplacementChar
		}
		return r
	}, strings.ToValidUTF8(cutLong(s, n), string(unicode.ReplacementChar)))
	return strings.Clone(cutLong(s, n)) // s may be a part of something long
}

func ms(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }

// keep adds a call to its row, and drops an older one if there are too many.
func (p *Page) keep(r *row, c *Call) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(r.kept) == maxKept {
		p.dropOldest(r)
	} else if p.kept == maxKeptAll {
		p.dropOldest(p.fullest())
	}
	r.kept = append(r.kept, c)
	p.kept++
}

// dropOldest needs mu.
func (p *Page) dropOldest(r *row) {
	r.kept = slices.Delete(r.kept, 0, 1)
	p.kept--
}

// fullest needs mu. It returns the row that keeps the most calls.
func (p *Page) fullest() (fullest *row) {
	for r := range p.allRows {
		if fullest == nil || len(r.kept) > len(fullest.kept) {
			fullest = r
		}
	}
	return fullest
}

// allRows yields the rows of all retriers, in no order.
func (p *Page) allRows(yield func(*row) bool) {
	for _, s := range p.sources {
		for _, r := range *s.rows.Load() {
			if !yield(r) {
				return
			}
		}
		if !yield(s.others) {
			return
		}
	}
}
