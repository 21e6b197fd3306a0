package main

import (
	"fmt"
	"strings"
	"sync"
	"time"

	"google.golang.org/grpc/codes"

	"github.com/grpcretry/grpcretry"
)

// A moment is one event of a call, as short as can be.
type moment struct {
	kind   grpcretry.EventKind
	number int
	hedge  bool
	unsent bool
	at     time.Duration // since the start of the call
	code   codes.Code
	reason error
	wait   time.Duration
	source grpcretry.WaitSource
	err    error  // of an attempt's end, and of the call's
	asked  string // the pushback in the trailer
}

// A timeline is what the library's observer and OnFinish have said about a call.
type timeline struct {
	start time.Time

	mu       sync.Mutex
	moments  []moment // guarded by mu
	room     [4]moment
	finished int           // guarded by mu; calls of OnFinish
	result   error         // guarded by mu; of the first
	over     bool          // guarded by mu; nothing may follow
	late     string        // guarded by mu; what followed nevertheless
	done     chan struct{} // closed by the first OnFinish
}

func (t *timeline) begin(now time.Time) {
	t.start, t.done = now, make(chan struct{})
	t.moments = t.room[:0]
}

// add adds an event.
func (t *timeline) add(e *grpcretry.Event) {
	m := moment{
		kind: e.Kind, number: e.Attempt.Number, hedge: e.Attempt.Hedge, unsent: e.Attempt.Unsent, at: time.Since(t.start),
		reason: e.Reason, wait: e.Wait, source: e.WaitSource,
	}
	switch e.Kind {
	case grpcretry.AttemptEnd:
		m.err = e.Attempt.Err
		m.code = e.Attempt.Code()
		if asked := e.Attempt.Trailer.Get(pushbackKey); len(asked) > 0 {
			m.asked = fmt.Sprintf("%q", asked)
		}
	case grpcretry.CallEnd:
		m.err = e.Err
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.over {
		t.late += fmt.Sprintf("%s after the call had ended; ", e.Kind)
	}
	t.moments = append(t.moments, m)
}

// finish is the call's OnFinish.
func (t *timeline) finish(err error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.finished++
	if t.finished == 1 {
		t.result = err
		close(t.done)
	}
	if t.over {
		t.late += "OnFinish after the call had ended; "
	}
}

// close has everything that follows reported as too late.
func (t *timeline) close() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.over = true
}

// attempts returns the number of attempts that have started, and how many of them were unsent.
func (t *timeline) attempts() (started, unsent int) {
	for i := range t.moments {
		switch m := &t.moments[i]; m.kind {
		case grpcretry.AttemptStart:
			started++
		case grpcretry.AttemptEnd:
			if m.unsent {
				unsent++
			}
		}
	}
	return started, unsent
}

// check returns what is wrong with the events of a call that has ended with err, after at most limit
// attempts; "" if nothing is.
func (t *timeline) check(err error, limit int) string {
	if len(t.moments) == 0 {
		return "" // the call passed straight through
	}
	var ended, decided uint64
	starts := 0
	for i := range t.moments {
		m := &t.moments[i]
		if i > 0 && t.moments[i-1].kind == grpcretry.CallEnd {
			return fmt.Sprintf("the event %s follows the end of the call", m.kind)
		}
		bit := uint64(1) << (m.number & 63)
		switch m.kind {
		case grpcretry.AttemptStart:
			starts++
			if m.number != starts {
				return fmt.Sprintf("attempt %d starts as number %d", m.number, starts)
			}
			if wrong := t.checkWait(i); wrong != "" {
				return wrong
			}
		case grpcretry.AttemptEnd:
			if m.number > starts || ended&bit != 0 {
				return fmt.Sprintf("attempt %d ends without a start, or twice", m.number)
			}
			ended |= bit
		case grpcretry.Decision:
			if ended&bit == 0 || decided&bit != 0 {
				return fmt.Sprintf("attempt %d is decided on before its end, or twice", m.number)
			}
			decided |= bit
		}
	}
	last := &t.moments[len(t.moments)-1]
	if last.kind != grpcretry.CallEnd {
		return "the last event is not the end of the call"
	}
	if !sameResult(last.err, err) {
		return fmt.Sprintf("the event of the call's end says %s, and the call returned %s", textOf(last.err), textOf(err))
	}
	started, unsent := t.attempts()
	if full := uint64(1)<<(started+1) - 2; started < 63 && ended != full {
		return fmt.Sprintf("%d attempts started, and not all of them ended before the call", started)
	}
	if started-unsent > limit {
		return fmt.Sprintf("%d attempts were sent, and the policy allows %d", started-unsent, limit)
	}
	return ""
}

// checkWait checks that an attempt after a pushback has waited as long as the server asked.
func (t *timeline) checkWait(start int) string {
	for i := start - 1; i >= 0; i-- {
		m := &t.moments[i]
		if m.kind != grpcretry.Decision {
			continue
		}
		if m.reason == nil && m.source == grpcretry.WaitPushback && t.moments[start].at-m.at < m.wait-2*time.Millisecond {
			return fmt.Sprintf("the server asked for a wait of %v, and attempt %d starts after %v", m.wait, t.moments[start].number, t.moments[start].at-m.at)
		}
		return ""
	}
	return ""
}

// String returns the timeline, one line for each event.
func (t *timeline) String() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	var b strings.Builder
	for i := range t.moments {
		m := &t.moments[i]
		fmt.Fprintf(&b, "%v ", m.at.Round(10*time.Microsecond))
		switch m.kind {
		case grpcretry.AttemptStart:
			fmt.Fprintf(&b, "attempt %d starts", m.number)
			if m.hedge {
				b.WriteString(" as a hedge")
			}
		case grpcretry.AttemptEnd:
			fmt.Fprintf(&b, "attempt %d ends: %s", m.number, textOf(m.err))
			if m.unsent {
				b.WriteString(", unsent")
			}
			if m.asked != "" {
				b.WriteString(", pushback " + m.asked)
			}
		case grpcretry.Decision:
			if m.reason == nil {
				fmt.Fprintf(&b, "attempt %d is followed by another after %v (%v)", m.number, m.wait, m.source)
			} else {
				fmt.Fprintf(&b, "attempt %d is not followed by another: %v", m.number, m.reason)
			}
		case grpcretry.CallEnd:
			fmt.Fprintf(&b, "the call ends: %s", textOf(m.err))
		}
		b.WriteByte('\n')
	}
	fmt.Fprintf(&b, "OnFinish was called %d times", t.finished)
	if t.finished > 0 {
		fmt.Fprintf(&b, ", first with %s", textOf(t.result))
	}
	return b.String()
}
