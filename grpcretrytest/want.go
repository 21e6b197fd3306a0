package grpcretrytest

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"google.golang.org/grpc/codes"

	"github.com/grpcretry/grpcretry"
	"github.com/grpcretry/grpcretry/internal/inside"
	"github.com/grpcretry/grpcretry/internal/reasons"
)

// parse reads a timeline that a test wants.
func parse(text string) (timeline, error) {
	var line timeline
	for part := range strings.FieldsFuncSeq(text, func(r rune) bool { return r == ';' || r == '\n' }) {
		if words := strings.Fields(part); len(words) > 0 {
			e, err := parseEntry(words)
			if err != nil {
				return nil, fmt.Errorf("%q: %w", strings.TrimSpace(part), err)
			}
			if e.kind == aMethod && len(line) > 0 {
				return nil, fmt.Errorf("%q: the method comes first", e.method)
			}
			line = append(line, e)
		}
	}
	if len(line.body()) == 0 {
		return nil, fmt.Errorf("the timeline %q is empty", text)
	}
	return line, nil
}

func parseEntry(words []string) (e entry, err error) {
	rest := words
	if len(rest) > 1 && isSpan(rest[0]) {
		if e.at, err = parseSpan(rest[0]); err != nil {
			return e, err
		}
		rest = rest[1:]
	}
	head, rest := rest[0], rest[1:]
	switch {
	case strings.HasPrefix(head, "/") && len(rest) == 0 && !e.at.set:
		e.kind, e.method = aMethod, head
		return e, nil
	case head == "attempt" || head == "hedge":
		return e.parseAttempt(head, rest)
	case head == "wait" && !e.at.set:
		e.kind = aWait
		return e.parseWait(rest)
	case head == "stop" && len(rest) > 0:
		return e.parseStop(rest)
	default:
		return e, fmt.Errorf(`want "[time] attempt 1 CODE [after duration]", the same with hedge, ` +
			`"wait [duration] [source]", or "[time] stop reason"`)
	}
}

func (e entry) parseAttempt(head string, rest []string) (_ entry, err error) {
	if e.kind = anAttempt; head == "hedge" {
		e.kind = aHedge
	}
	if len(rest) < 2 {
		return e, fmt.Errorf("want a number and a code")
	}
	if e.number, err = strconv.Atoi(rest[0]); err != nil || e.number < 1 || strconv.Itoa(e.number) != rest[0] {
		return e, fmt.Errorf("%q is not the number of an attempt", rest[0])
	}
	e.outcome, rest = rest[1], rest[2:]
	if !slices.Contains(outcomes, e.outcome) && !isUndefinedCode(e.outcome) {
		return e, fmt.Errorf("%q is none of %s", e.outcome, strings.Join(outcomes, ", "))
	}
	if len(rest) > 0 && rest[0] == "unsent" && !slices.Contains([]string{"OK", "lost", "timeout"}, e.outcome) {
		e.outcome, rest = e.outcome+" unsent", rest[1:]
	}
	if len(rest) == 2 && rest[0] == "after" {
		e.span, err = parseSpan(rest[1])
		return e, err
	}
	return e, tooMuch(rest)
}

func (e entry) parseWait(rest []string) (_ entry, err error) {
	if len(rest) > 0 && isSpan(rest[0]) {
		if e.span, err = parseSpan(rest[0]); err != nil {
			return e, err
		}
		rest = rest[1:]
	}
	if len(rest) > 0 {
		e.source, rest = rest[0], rest[1:]
		if !slices.Contains(sources, e.source) {
			return e, fmt.Errorf("%q is none of %s", e.source, strings.Join(sources, ", "))
		}
	}
	return e, tooMuch(rest)
}

func (e entry) parseStop(rest []string) (entry, error) {
	e.kind, e.outcome = aStop, rest[0]
	if !slices.Contains(stops, e.outcome) {
		return e, fmt.Errorf("%q is none of %s", e.outcome, strings.Join(stops, ", "))
	}
	rest = rest[1:]
	if len(rest) >= 3 && strings.Join(rest[:3], " ") == "instead of wait" {
		return e.parseWait(rest[3:])
	}
	return e, tooMuch(rest)
}

// isUndefinedCode reports whether a word names a code that gRPC does not define: CODE(17).
func isUndefinedCode(word string) bool {
	number := strings.TrimSuffix(strings.TrimPrefix(word, "CODE("), ")")
	c, err := strconv.ParseUint(number, 10, 32)
	return err == nil && codeName(codes.Code(c)) == word
}

func tooMuch(rest []string) error {
	if len(rest) > 0 {
		return fmt.Errorf("what does %q mean?", strings.Join(rest, " "))
	}
	return nil
}

// The words that timelines have.
var (
	outcomes = func() []string {
		words := []string{"lost", "timeout"}
		for c := codes.OK; c <= codes.Unauthenticated; c++ {
			words = append(words, codeName(c))
		}
		return words
	}()
	sources = []string{grpcretry.WaitBackoff.String(), grpcretry.WaitPushback.String(), grpcretry.WaitRetryInfo.String(),
		grpcretry.WaitSource(inside.WaitConnect).String()}
	stops = append(reasons.Words(), wordPassed)
)

// wordPassed is the word for the end of a call that no policy applies to.
const wordPassed = "passed_through"

func isSpan(word string) bool { return word[0] >= '0' && word[0] <= '9' || word[0] == '-' }

// parseSpan reads 120ms, or 0s..100ms.
func parseSpan(word string) (s span, err error) {
	least, most, isRange := strings.Cut(word, "..")
	if s.least, err = time.ParseDuration(least); err != nil {
		return s, err
	}
	if s.most = s.least; isRange {
		if s.most, err = time.ParseDuration(most); err != nil {
			return s, err
		}
	}
	if s.most < s.least || s.least < 0 {
		return s, fmt.Errorf("%q is not a range", word)
	}
	s.set = true
	return s, nil
}

// allows reports whether what happened, got, is as wanted.
func (e entry) allows(got entry) bool {
	return e.kind == got.kind && e.method == got.method && e.number == got.number && e.outcome == got.outcome &&
		(e.source == "" || e.source == got.source) && e.at.holds(got.at) && e.span.holds(got.span) &&
		(e.at.set || !got.early)
}

// compare returns what differs between calls and wanted timelines, "" if nothing does.
func compare(got, want []timeline, open int) string {
	var b strings.Builder
	if open > 0 {
		fmt.Fprintf(&b, "%s not ended\n", count(open, "call has", "calls have"))
	}
	if len(got) != len(want) {
		fmt.Fprintf(&b, "got %s, want %d", count(len(got), "call", "calls"), len(want))
		if len(got) > 0 {
			fmt.Fprintf(&b, ":\n%s", text(got))
		}
		return strings.TrimSuffix(b.String(), "\n")
	}
	for i := range got {
		g, w := got[i], want[i]
		if w.head() == "" || w.head() == g.head() {
			g, w = g.body(), w.body()
		}
		if d := diff(g, w); d != "" {
			number := ""
			if len(got) > 1 {
				number = fmt.Sprintf("call %d, ", i+1)
			}
			fmt.Fprintf(&b, "%s%s:\n%s", number, got[i].head(), d)
		}
	}
	return strings.TrimSuffix(b.String(), "\n")
}

func count(n int, one, many string) string {
	if n == 1 {
		return "1 " + one
	}
	return fmt.Sprintf("%d %s", n, many)
}

// diff returns the two timelines side by side, with a mark at each line that differs; "" if none does.
func diff(got, want timeline) string {
	type row struct {
		got, want string
		same      bool
	}
	rows, differ := []row{{"got", "want", true}}, false
	common := align(got, want)
	for len(got) > 0 || len(want) > 0 {
		var r row
		switch paired := len(got) > 0 && len(want) > 0; {
		case paired && common[len(got)][len(want)] == common[len(got)-1][len(want)-1]+1 && want[0].allows(got[0]):
			r = row{got[0].String(), want[0].asked(), true}
			got, want = got[1:], want[1:]
		case paired && common[len(got)-1][len(want)-1] == common[len(got)][len(want)]:
			r = row{got: got[0].told(), want: want[0].asked()}
			got, want = got[1:], want[1:]
		case len(want) == 0 || len(got) > 0 && common[len(got)-1][len(want)] == common[len(got)][len(want)]:
			r.got, got = got[0].told(), got[1:]
		default:
			r.want, want = want[0].asked(), want[1:]
		}
		differ = differ || !r.same
		rows = append(rows, r)
	}
	if !differ {
		return ""
	}
	width := 0
	for _, r := range rows {
		width = max(width, len(r.got))
	}
	var b strings.Builder
	for _, r := range rows {
		mark := "!"
		if r.same {
			mark = " "
		}
		b.WriteString(strings.TrimRight(fmt.Sprintf("%s %-*s   %s", mark, width, r.got, r.want), " ") + "\n")
	}
	return b.String()
}

// asked returns a wanted entry, also with a duration that String leaves out.
func (e entry) asked() string {
	if e.span == exactly(0) && (e.kind == anAttempt || e.kind == aHedge) {
		return e.String() + " after 0s"
	}
	return e.String()
}

// told returns an entry that differs, with what cannot be seen otherwise.
func (e entry) told() string {
	if e.early {
		return e.String() + " (before the wait was over)"
	}
	return e.String()
}

// align returns the length of the longest common part of the last i entries of got and the last j of want.
func align(got, want timeline) [][]int {
	common := make([][]int, len(got)+1)
	for i := range common {
		common[i] = make([]int, len(want)+1)
		for j := 1; i > 0 && j <= len(want); j++ {
			common[i][j] = max(common[i-1][j], common[i][j-1])
			if want[len(want)-j].allows(got[len(got)-i]) {
				common[i][j] = max(common[i][j], common[i-1][j-1]+1)
			}
		}
	}
	return common
}
