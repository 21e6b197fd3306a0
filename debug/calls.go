package debug

import (
	"errors"
	"slices"
	"strings"
	"time"
	"unicode"

	"github.com/grpcretry/grpcretry"
)

// A Call is one that made several attempts, retries or hedges, or that gave up although
// its failure was one to retry: attempt by attempt, in the order of their numbers.
type Call struct {
	Retrier int    `json:"retrier"` // 1 for the first one given to Handler, and so on
	Target  string `json:"target"`
	Method  string `json:"method"`

	Ended     time.Time `json:"ended"`
	ElapsedMs float64   `json:"elapsed_ms"`
	Outcome   string    `json:"outcome"` // as [grpcretry.Event.Outcome] has it
	Code      string    `json:"code"`    // that the caller got, as spelled on the wire: UNAVAILABLE

	// The wait that was not begun, where the call stopped because of it; else 0 and "".
	RefusedWaitMs     float64 `json:"refused_wait_ms"`
	RefusedWaitSource string  `json:"refused_wait_source"`

	Made     int       `json:"attempts_made"`
	Attempts []Attempt `json:"attempts"` // the first and the last 9 of them
}

// An Attempt is one try of a [Call].
type Attempt struct {
	Number     int     `json:"number"`
	Hedge      bool    `json:"hedge"`
	StartMs    float64 `json:"start_ms"` // since the start of the call
	DurationMs float64 `json:"duration_ms"`
	Code       string  `json:"code"`
	Message    string  `json:"message"`     // the status message, cut to 120 bytes
	Ours       bool    `json:"ours"`        // Message is from this library, which ended the attempt
	Peer       string  `json:"peer"`        // the address of the server, empty if none was reached
	WaitMs     float64 `json:"wait_ms"`     // before the attempt, as decided
	WaitSource string  `json:"wait_source"` // of that wait, as [grpcretry.WaitSource] has it: backoff, …
	Decision   string  `json:"decision"`    // success, retry, stop, or lost to another attempt of a hedged call
	Reason     string  `json:"reason"`      // of the stop that ended the call, as [grpcretry.ReasonName] has it; else ""
}

// What is decided after an attempt.
const (
	success = "success"
	retry   = "retry"
	stop    = "stop"
	beaten  = "lost"
)

// worthKeeping says whether the call that e ended is one for the page: it retried, or
// gave up. A first failure that no policy retries is not, nor is a caller that went away.
func worthKeeping(e *grpcretry.Event) bool {
	if made := attemptsMade(e); e.Err == nil || made > 1 {
		return made > 1
	}
	switch grpcretry.ReasonName(e.Reason) {
	case "not_retryable", "left_to_grpc":
		return false
	case "cancelled", "deadline_exceeded", "conn_closed":
		return !endedWithCaller(&e.Attempt) // but in the wait after it
	default:
		return true
	}
}

// endedWithCaller says whether an attempt ended as one does whose caller goes away.
func endedWithCaller(a *grpcretry.Attempt) bool {
	code := codeName(uint32(a.Code()))
	return (code == "CANCELLED" || code == "DEADLINE_EXCEEDED") && !errors.Is(a.Err, grpcretry.ErrAttemptTimeout)
}

// newCall copies what the page shows of a call, so that nothing of the call itself stays
// alive.
func newCall(e *grpcretry.Event, began time.Time) *Call {
	c := &Call{
		Target:    text(e.Target, maxName),
		Method:    text(e.Method, maxName),
		Ended:     began.Add(e.Elapsed),
		ElapsedMs: ms(e.Elapsed),
		Outcome:   e.Outcome(),
		Code:      codeName(uint32(grpcretry.Attempt{Err: e.Err}.Code())),
		Made:      attemptsMade(e),
	}
	var gaveUp *grpcretry.Error
	if errors.As(e.Err, &gaveUp) && gaveUp.WaitSource != grpcretry.WaitNone {
		c.RefusedWaitMs, c.RefusedWaitSource = ms(gaveUp.Wait), gaveUp.WaitSource.String()
	}
	attempts := firstAndLast(e)
	c.Attempts = make([]Attempt, 0, len(attempts))
	for i := range attempts {
		a := &attempts[i]
		c.add(a, began)
		kept := &c.Attempts[i]
		switch {
		case a.Err == nil:
			kept.Decision = success
		case errors.Is(a.Err, grpcretry.ErrHedgeLost):
			kept.Decision = beaten
		case a.Number == e.Attempt.Number:
			kept.Decision, kept.Reason = stop, grpcretry.ReasonName(e.Reason)
		case slices.ContainsFunc(attempts[i+1:], func(b grpcretry.Attempt) bool { return follows(&b, a) }):
			kept.Decision = retry
		default:
			kept.Decision = stop
		}
	}
	return c
}

// follows says whether b was sent because a had failed, or an attempt after a.
func follows(b, a *grpcretry.Attempt) bool {
	return b.WaitSource != grpcretry.WaitNone && b.WaitSource != grpcretry.WaitHedgeDelay && !b.Start.Before(endOf(a))
}

// firstAndLast are the attempts that are kept.
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
	if n := len(c.Attempts); n > 0 { // mostly each says the same: keep it once
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

// words are the message of a status, without what gRPC puts before it.
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

// text makes what somebody else has written fit to be kept and shown: at most n bytes, and
// no character that could change how others are shown, such as a line feed or one that turns the
// direction of writing.
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

// keep adds a call to its row, and lets an older one go where there are too many.
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

// fullest needs mu. It is the row that keeps the most calls.
func (p *Page) fullest() (fullest *row) {
	for r := range p.allRows {
		if fullest == nil || len(r.kept) > len(fullest.kept) {
			fullest = r
		}
	}
	return fullest
}

// allRows goes through the rows of all retriers, in no order.
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
