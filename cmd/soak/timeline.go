package main

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
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
	at     time.Duration // when the observer was called, since the start of the call
	ended  time.Duration // when the attempt ended, likewise
	code   codes.Code
	reason error
	wait   time.Duration
	source grpcretry.WaitSource
	err    error    // of an attempt's end, and of the call's
	asked  []string // the pushback in the trailer
	cut    bool     // the attempt timeout ended the attempt
}

// bounds is what a call's policy allows.
type bounds struct {
	attempts int           // at most
	exact    bool          // a call that has used up its attempts has made so many
	codes    []codes.Code  // that are retried
	wait     time.Duration // at most, apart from those that the server asks for
	deadline time.Duration // since the start of the call
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
	m.ended = e.Attempt.Start.Add(e.Attempt.Duration).Sub(t.start)
	switch e.Kind {
	case grpcretry.AttemptEnd:
		m.err = e.Attempt.Err
		m.code = e.Attempt.Code()
		m.asked = e.Attempt.Trailer.Get(pushbackKey)
		m.cut = errors.Is(e.Attempt.Err, grpcretry.ErrAttemptTimeout)
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

// check returns what is wrong with the events of a call that has ended with err; "" if nothing is.
func (t *timeline) check(err error, in *bounds) string {
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
			if wrong := t.checkDecision(i, in); wrong != "" {
				return wrong
			}
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
	if started-unsent > in.attempts {
		return fmt.Sprintf("%d attempts were sent, and the policy allows %d", started-unsent, in.attempts)
	}
	if in.exact && started-unsent < in.attempts && errors.Is(last.reason, grpcretry.ErrAttemptsExhausted) {
		return fmt.Sprintf("the attempts are used up after %d, and the policy allows %d", started-unsent, in.attempts)
	}
	return ""
}

// checkDecision checks a decision against what the server asked for, and against the policy.
func (t *timeline) checkDecision(i int, in *bounds) string {
	m := &t.moments[i]
	if m.reason != nil {
		return ""
	}
	end := t.endOf(m.number, i)
	if len(end.asked) > 0 {
		wait, err := strconv.ParseUint(end.asked[0], 10, 31)
		if len(end.asked) > 1 || err != nil || end.asked[0] != strconv.FormatUint(wait, 10) {
			return fmt.Sprintf("the server forbade another attempt by the pushback %q, and another follows", end.asked)
		}
		if want := time.Duration(wait) * time.Millisecond; m.source == grpcretry.WaitPushback && m.wait != want {
			return fmt.Sprintf("the server asked for a wait of %v, and the call waits %v", want, m.wait)
		}
		if m.source == grpcretry.WaitBackoff {
			return fmt.Sprintf("the server asked for a wait of %q ms, and the call waits for its backoff", end.asked[0])
		}
	}
	if !end.cut && !end.unsent && !slices.Contains(in.codes, end.code) {
		return fmt.Sprintf("%v is not among the codes that are retried, and another attempt follows", end.code)
	}
	if m.source == grpcretry.WaitBackoff && m.wait > in.wait {
		return fmt.Sprintf("the wait is %v, and its limit is %v", m.wait, in.wait)
	}
	if m.ended+m.wait > in.deadline && m.waits() && !end.cut {
		return fmt.Sprintf("a wait of %v starts %v before the deadline", m.wait, in.deadline-m.ended)
	}
	return ""
}

// waits says that the call waits for a time that was decided on, rather than for a connection or until a
// hedge is due, which may then not be sent.
func (m *moment) waits() bool {
	return m.source == grpcretry.WaitPushback || m.source == grpcretry.WaitBackoff || m.source == grpcretry.WaitRetryInfo
}

// endOf returns the end of an attempt before an event.
func (t *timeline) endOf(number, before int) *moment {
	for i := before - 1; i >= 0; i-- {
		if m := &t.moments[i]; m.kind == grpcretry.AttemptEnd && m.number == number {
			return m
		}
	}
	return new(moment)
}

// checkWait checks that an attempt after a decision has waited as long as was decided. The wait after
// an attempt timeout begins when that passes, before the attempt has ended.
func (t *timeline) checkWait(start int) string {
	for i := start - 1; i >= 0; i-- {
		m := &t.moments[i]
		if m.kind != grpcretry.Decision {
			continue
		}
		if waited := t.moments[start].at - m.ended; m.reason == nil && m.waits() && !t.endOf(m.number, i).cut && waited < m.wait {
			return fmt.Sprintf("a wait of %v was decided on (%v), and attempt %d starts after %v", m.wait, m.source, t.moments[start].number, waited)
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
			if len(m.asked) > 0 {
				fmt.Fprintf(&b, ", pushback %q", m.asked)
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
