package grpcretrytest

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"
	"unicode"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/grpcretry/grpcretry"
	"github.com/grpcretry/grpcretry/internal/inside"
	"github.com/grpcretry/grpcretry/internal/reasons"
)

// A timeline is what happened in one call, or what a test wants to have happened. Its first entry names the
// method; a wanted timeline may do without.
type timeline []entry

// An entry is one line of a timeline. What is not set is not compared.
type entry struct {
	kind    entryKind
	method  string
	at      span // of attempts and stops, since the start of the call
	number  int
	outcome string // of an attempt: a code, lost or timeout; of a stop: its reason
	span    span   // of a wait, or of an attempt its duration
	source  string // of a wait
	early   bool   // the attempt has started before the wait was over
}

type entryKind int

const (
	aMethod entryKind = iota
	anAttempt
	aHedge
	aWait
	aStop
)

// A span is a duration, or a range of them.
type span struct {
	set         bool
	least, most time.Duration
}

// exactly returns a span that is one duration, to the microsecond.
func exactly(d time.Duration) span {
	d = d.Round(time.Microsecond)
	return span{true, d, d}
}

// holds reports whether another span lies within s.
func (s span) holds(other span) bool {
	return !s.set || other.set && s.least <= other.least && other.most <= s.most
}

func (s span) String() string {
	if s.least == s.most {
		return s.least.String()
	}
	return s.least.String() + ".." + s.most.String()
}

// timelineOf returns the timeline of a call that has ended.
func timelineOf(end *grpcretry.Event, start time.Time, attempts []grpcretry.Attempt) timeline {
	line := timeline{{kind: aMethod, method: end.Attempt.Method}}
	for i, a := range attempts {
		one := entry{kind: anAttempt, at: exactly(a.Start.Sub(start)), number: a.Number, outcome: outcomeOf(a), span: exactly(a.Duration)}
		if a.Hedge {
			one.kind = aHedge
		}
		if waited(a) {
			line = append(line, entry{kind: aWait, span: exactly(a.Wait), source: a.WaitSource.String()})
			one.early = !a.Hedge && a.Start.Before(waitStart(attempts[:i]).Add(a.Wait))
		}
		line = append(line, one)
	}
	if end.Err == nil {
		return line
	}
	stop := entry{kind: aStop, at: exactly(end.Elapsed), outcome: reasons.Of(end.Reason).Word}
	if end.WaitSource != 0 {
		stop.span, stop.source = exactly(end.Wait), end.WaitSource.String()
	}
	return append(line, stop)
}

// waitStart returns when the wait before the attempt that follows these began: at the latest of their ends. Beside hedges, it is not
// known which of them it follows, and the earliest end counts.
func waitStart(attempts []grpcretry.Attempt) (start time.Time) {
	hedged := slices.ContainsFunc(attempts, func(a grpcretry.Attempt) bool { return a.Hedge })
	for i, a := range attempts {
		end := a.Start.Add(a.Duration)
		if errors.Is(a.Err, grpcretry.ErrAttemptTimeout) {
			end = a.Start // the wait starts at the timeout, when gRPC has yet to end the attempt
		}
		if i == 0 || end.After(start) != hedged {
			start = end
		}
	}
	return start
}

// waited reports whether an attempt was preceded by a wait that is worth an entry. The delay of a hedge is
// seen in its time.
func waited(a grpcretry.Attempt) bool {
	switch a.WaitSource {
	case grpcretry.WaitBackoff, grpcretry.WaitPushback, grpcretry.WaitRetryInfo, inside.WaitConnect:
		return true
	default:
		return false
	}
}

// passedThrough returns the timeline of a call that is left to gRPC.
func passedThrough(method string, err error, took time.Duration) timeline {
	line := timeline{{kind: aMethod, method: method},
		{kind: anAttempt, at: exactly(0), number: 1, outcome: codeName(status.Code(err)), span: exactly(took)}}
	if err != nil {
		line = append(line, entry{kind: aStop, at: exactly(took), outcome: wordPassed})
	}
	return line
}

func outcomeOf(a grpcretry.Attempt) string {
	switch {
	case errors.Is(a.Err, grpcretry.ErrHedgeLost):
		return "lost"
	case errors.Is(a.Err, grpcretry.ErrAttemptTimeout):
		return "timeout"
	case a.Unsent:
		return codeName(a.Code()) + " unsent"
	default:
		return codeName(a.Code())
	}
}

// codeName returns a code as gRPC writes it on the wire: DEADLINE_EXCEEDED.
func codeName(c codes.Code) string {
	switch c {
	case codes.OK:
		return "OK"
	case codes.Canceled:
		return "CANCELLED"
	}
	var b strings.Builder
	for i, r := range c.String() {
		if i > 0 && unicode.IsUpper(r) {
			b.WriteByte('_')
		}
		b.WriteRune(unicode.ToUpper(r))
	}
	return b.String()
}

// String returns the entries on one line.
func (l timeline) String() string {
	var all []string
	for _, e := range l {
		all = append(all, e.String())
	}
	return strings.Join(all, "; ")
}

// head returns the method, "" if the timeline names none.
func (l timeline) head() string {
	if len(l) > 0 && l[0].kind == aMethod {
		return l[0].method
	}
	return ""
}

// body returns the entries after the method.
func (l timeline) body() timeline {
	if l.head() != "" {
		return l[1:]
	}
	return l
}

// String returns the entry as it is written in a timeline.
func (e entry) String() string {
	var words []string
	say := func(format string, args ...any) { words = append(words, fmt.Sprintf(format, args...)) }
	if e.at.set {
		say("%v", e.at)
	}
	switch e.kind {
	case aMethod:
		say("%s", e.method)
	case anAttempt, aHedge:
		say("%s %d %s", attemptWord(e.kind), e.number, e.outcome)
		if e.span.set && e.span.most > 0 {
			say("after %v", e.span)
		}
	case aWait:
		say("wait")
		e.sayWait(say)
	case aStop:
		say("stop %s", e.outcome)
		if e.span.set || e.source != "" {
			say("instead of wait")
			e.sayWait(say)
		}
	}
	return strings.Join(words, " ")
}

func (e entry) sayWait(say func(string, ...any)) {
	if e.span.set {
		say("%v", e.span)
	}
	if e.source != "" {
		say("%s", e.source)
	}
}

func attemptWord(k entryKind) string {
	if k == aHedge {
		return "hedge"
	}
	return "attempt"
}
