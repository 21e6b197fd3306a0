package main

import (
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/grpcretry/grpcretry"
	"github.com/grpcretry/grpcretry/cmd/herd/internal/sim"
	"github.com/grpcretry/grpcretry/internal/drive"
	"github.com/grpcretry/grpcretry/internal/reasons"
)

// This file tells what happens in calls that keep failing. It drives Plans, as the simulator does,
// with chosen random numbers for the shortest, the typical and the longest call, and with drawn ones
// for the figures about many calls.

// oneWay is the latency of a message, in timelines and in simulations.
const oneWay = time.Millisecond

// A failureKind says how every attempt of a call fails.
type failureKind struct {
	name   string
	code   codes.Code
	silent bool // the server does not respond
	unsent bool // there is no connection, so that the attempt reaches no server

	instant bool // an attempt fails without any time passing
}

// A story is what happened in one call.
type story struct {
	sent  []time.Duration // when each attempt was sent, since the start of the call
	waits []time.Duration // before each attempt
	end   time.Duration   // when the caller got the error; negative: never
	why   error           // grpcretry's reason, or that of the caller's context
}

// storyContext is the context of a call, in simulated time.
type storyContext struct {
	context.Context
	deadline time.Time
}

// Deadline implements context.Context.
func (c storyContext) Deadline() (time.Time, bool) { return c.deadline, !c.deadline.IsZero() }

// storyStart is far from now, so that no budget mistakes one clock for the other.
var storyStart = time.Date(2000, 1, 1, 0, 0, 0, 0, time.UTC)

// A teller drives the Plan of one call.
type teller struct {
	plan drive.Plan[grpcretry.Attempt]
	kind failureKind
	u    func() float64

	start    time.Time
	now      time.Time
	deadline time.Time
	inFlight []storyAttempt
	story    story
	over     bool
}

// A storyAttempt is an attempt in flight.
type storyAttempt struct {
	grpcretry.Attempt
	fails   time.Time // when it fails; zero for never
	overdue time.Time // when Overdue is called; zero for never
}

// tell drives a call to a target that starts at the time start until it is over. What one call learns about
// a target, the next one knows.
func tell(r *grpcretry.Retrier, kind failureKind, target string, start time.Time, deadline time.Duration, u func() float64) story {
	t := &teller{kind: kind, u: u, start: start, now: start}
	if deadline > 0 {
		t.deadline = start.Add(deadline)
	}
	t.plan = drive.New[grpcretry.Attempt](storyContext{context.Background(), t.deadline}, r, "/herd.Explain/Call", target, start, nil)
	t.send()
	for !t.over {
		if !t.next() {
			t.story.end = -1
			break
		}
	}
	if t.over {
		t.story.end = t.now.Sub(start)
	}
	return t.story
}

func (t *teller) send() {
	a, timeout := t.plan.Sent(t.now)
	t.story.sent = append(t.story.sent, t.now.Sub(t.start))
	t.story.waits = append(t.story.waits, a.Wait)
	one := storyAttempt{Attempt: a}
	one.Unsent = t.kind.unsent
	if !one.Unsent {
		one.Peer = reachedServer{}
	}
	switch {
	case t.kind.unsent, t.kind.instant:
		one.fails = t.now
	case t.kind.silent:
		one.fails = t.deadline
		if timeout > 0 {
			one.overdue = t.now.Add(timeout)
		}
	default:
		one.fails = t.now.Add(2 * oneWay)
	}
	if !t.deadline.IsZero() && one.fails.After(t.deadline) {
		one.fails = t.deadline
	}
	t.inFlight = append(t.inFlight, one)
}

// tooLong is the time after which a call counts as endless, because its hedges are postponed again and
// again.
const tooLong = 24 * time.Hour

// reachedServer is the address of the server in every story.
type reachedServer struct{}

// Network implements net.Addr.
func (reachedServer) Network() string { return "herd" }
func (reachedServer) String() string  { return "server" }

// next does what happens next in the call; it returns false if nothing ever will.
func (t *teller) next() bool {
	at, do := time.Time{}, func() {}
	consider := func(when time.Time, what func()) {
		if !when.IsZero() && (at.IsZero() || when.Before(at)) {
			at, do = when, what
		}
	}
	for i := range t.inFlight {
		consider(t.inFlight[i].fails, func() { t.fail(i, t.failure()) })
		consider(t.inFlight[i].overdue, func() { t.late(i) })
	}
	consider(t.plan.DueAt(), func() { t.follow(t.plan.Due(t.now)) })
	if at.IsZero() {
		return false
	}
	if at.Sub(t.start) > tooLong {
		return false
	}
	t.now = at
	do()
	return true
}

// failure is the error of an attempt that fails now.
func (t *teller) failure() error {
	if !t.deadline.IsZero() && !t.now.Before(t.deadline) {
		return status.Error(codes.DeadlineExceeded, "simulated")
	}
	return status.Error(t.kind.code, "simulated")
}

// fail reports the end of an attempt.
func (t *teller) fail(i int, err error) {
	a := t.inFlight[i].Attempt
	t.inFlight = slices.Delete(t.inFlight, i, i+1)
	a.Duration, a.Err = t.now.Sub(a.Start), err
	t.follow(t.plan.Ended(a, t.now, t.u()))
}

// late asks what follows an attempt that has reached its timeout.
func (t *teller) late(i int) {
	t.inFlight[i].overdue = time.Time{}
	a := t.inFlight[i].Attempt
	a.Duration = t.now.Sub(a.Start)
	t.follow(t.plan.Overdue(a, t.now, t.u()))
}

func (t *teller) follow(step drive.Step) {
	switch {
	case step.End:
		t.over, t.story.why = true, step.Reason
		for _, one := range t.inFlight {
			one.Err, one.Duration = grpcretry.ErrHedgeLost, t.now.Sub(one.Start)
			t.plan.Ended(one.Attempt, t.now, 0)
		}
	case step.Send:
		t.send()
	case step.Cut != 0:
		t.fail(slices.IndexFunc(t.inFlight, func(one storyAttempt) bool { return one.Number == step.Cut }), grpcretry.ErrAttemptTimeout)
	}
}

// failureStories are the stories of one kind of failure.
type failureStories struct {
	kind                       failureKind
	shortest, typical, longest story
	many                       manyCalls
}

// manyCalls are figures about calls with drawn random numbers, and with retries that no budget
// refuses.
type manyCalls struct {
	calls    int
	mean     time.Duration // until the caller gets the error
	p50, p99 time.Duration
	attempts float64 // of each call, on average
	cut      float64 // the share of the calls that get fewer attempts than the policy allows, because of the deadline
	elapsed  float64 // the same, because of MaxElapsed
}

// tellAll tells the stories of all kinds of failure.
func (e *explanation) tellAll() error {
	s := e.unlimited()
	r, err := s.Retrier()
	if err != nil {
		return err
	}
	kinds := e.kinds()
	for _, kind := range kinds {
		f := failureStories{kind: kind}
		f.tell(e, r)
		e.stories = append(e.stories, f)
	}
	return nil
}

func (f *failureStories) tell(e *explanation, r *grpcretry.Retrier) {
	fixed := func(u float64) story {
		return tell(r, f.kind, fmt.Sprint(f.kind.name, u), storyStart, e.deadline, func() float64 { return u })
	}
	f.shortest, f.typical, f.longest = fixed(0), fixed(0.5), fixed(math.Nextafter(1, 0))
	if f.longest.end < 0 {
		return
	}
	random := rand.New(rand.NewPCG(e.seed, 1))
	f.many = drawCalls(r, f.kind, e.deadline, e.effort.stories, random.Float64)
}

// drawCalls tells many stories and sums them up.
func drawCalls(r *grpcretry.Retrier, kind failureKind, deadline time.Duration, calls int, u func() float64) manyCalls {
	m := manyCalls{calls: calls}
	var ends []time.Duration
	attempts, sum := 0, 0.0
	allowed := r.Policy("").MaxAttempts
	for i := range calls {
		s := tell(r, kind, fmt.Sprint(kind.name, " of ", i), storyStart, deadline, u)
		ends = append(ends, s.end)
		sum += s.end.Seconds()
		attempts += len(s.sent)
		switch {
		case len(s.sent) == allowed:
		case errors.Is(s.why, grpcretry.ErrDeadline), errors.Is(s.why, context.DeadlineExceeded):
			m.cut += 1 / float64(calls)
		case errors.Is(s.why, grpcretry.ErrMaxElapsed):
			m.elapsed += 1 / float64(calls)
		}
	}
	slices.Sort(ends)
	m.mean = time.Duration(sum / float64(calls) * float64(time.Second))
	m.p50, m.p99 = ends[calls/2], ends[calls*99/100]
	m.attempts = float64(attempts) / float64(calls)
	return m
}

// unlimited returns the strategy with budgets that refuse nothing, and with the delay that hedging
// has in good times.
func (e *explanation) unlimited() sim.Strategy {
	s := e.strategy
	s.Budget = sim.Budget{Kind: sim.UnlimitedBudget}
	if s.Hedging != nil {
		h := *s.Hedging
		h.Budget = sim.Budget{Kind: sim.UnlimitedBudget}
		if h.Kind == sim.HedgeAtQuantile {
			h.Kind, h.Quantile, h.AtLeast, h.AtMost, h.Delay = sim.HedgeAfter, 0, 0, 0, e.hedges
		}
		s.Hedging = &h
	}
	return s
}

// kinds returns the failures that calls are shown with: RESOURCE_EXHAUSTED only if it has waits of its
// own.
func (e *explanation) kinds() []failureKind {
	all := []failureKind{{name: sim.CodeName(e.outageCode()), code: e.outageCode()}}
	overload := codes.ResourceExhausted
	if slices.Contains(e.codes(), overload) && e.outageCode() != overload &&
		fmt.Sprint(e.policy.Backoff) != fmt.Sprint(e.policy.OverloadBackoff) {
		all = append(all, failureKind{name: sim.CodeName(overload), code: overload})
	}
	return append(all,
		failureKind{name: "no response", code: codes.DeadlineExceeded, silent: true},
		failureKind{name: "no connection", code: codes.Unavailable, unsent: true})
}

// codes returns the codes after which another attempt may follow.
func (e *explanation) codes() []codes.Code {
	if e.strategy.Hedging != nil && e.strategy.Policy.Classifier != nil {
		return nil // see asHedgingPolicy
	}
	return e.policy.Codes
}

// outageCode returns the code with which calls fail in an outage: UNAVAILABLE, if it is retried.
func (e *explanation) outageCode() codes.Code {
	all := e.codes()
	if len(all) == 0 || slices.Contains(all, codes.Unavailable) {
		return codes.Unavailable
	}
	return all[0]
}

// timelines is the section on calls that keep failing.
func (e *explanation) timelines() explainSection {
	s := explainSection{Title: "A call that keeps failing"}
	intro := "When each attempt of a call that has no others beside it is sent, and when the caller gets the error, both since the start " +
		"of the call. Chance decides between the shortest and the longest call."
	if e.strategy.Budget.Kind != sim.UnlimitedBudget && !e.unsentOnly {
		intro += ` "Budget empty" is a call whose retry the budget refuses.`
	}
	s.Parts = append(s.Parts, explainPart{Text: intro})
	for _, f := range e.stories {
		if f.single() {
			s.Parts = append(s.Parts, explainPart{Text: e.singleText(f)})
			continue
		}
		table := e.timelineTable(f)
		s.Parts = append(s.Parts, explainPart{Text: headingOf(f.kind) + e.manyText(f)},
			explainPart{Table: table, Left: []int{len(table[0]) - 1}})
	}
	return s
}

// headingOf says how the attempts fail.
func headingOf(k failureKind) string {
	switch {
	case k.silent:
		return "The server does not respond at all."
	case k.unsent:
		return "There is no connection to a server."
	default:
		return fmt.Sprintf("Every attempt fails with %s, %s after it was sent.", k.name, shortTime(2*oneWay))
	}
}

// timelineTable has a column for each attempt, and two lines for each different story: when the
// attempts are sent, and the waits before them.
func (e *explanation) timelineTable(f failureStories) [][]string {
	type line struct {
		name string
		story
	}
	lines := []line{{"shortest", f.shortest}, {"typical", f.typical}, {"longest", f.longest}}
	if same(f.shortest, f.longest) {
		lines = []line{{"always", f.typical}}
	}
	if refused, ok := e.refused(f.kind); ok && !same(refused, f.typical) {
		lines = append(lines, line{"budget empty", refused})
	}
	var counts []int
	for _, one := range lines {
		counts = append(counts, len(one.sent))
	}
	head, most := attemptHeads(counts)
	table := [][]string{append(head, "error", "because")}
	for _, one := range lines {
		table = append(table, one.row(one.name, most, one.sent, one.ending(), reasonText(one.why, e.policy)))
		if slices.ContainsFunc(one.waits, func(d time.Duration) bool { return d > 0 }) {
			table = append(table, one.row("  wait", most, one.waits, "", ""))
		}
	}
	return table
}

// mostColumns is the largest number of attempts that a table shows.
const mostColumns = 6

// shownAttempts returns the indexes of the attempts that a table shows; -1 stands for those that are
// left out.
func shownAttempts(n int) (all []int) {
	for i := range n {
		switch {
		case n <= mostColumns || i < mostColumns-2 || i == n-1:
			all = append(all, i)
		case i == mostColumns-2:
			all = append(all, -1)
		}
	}
	return all
}

// attemptHeads returns the heads of the columns for stories with so many attempts, and the largest
// number of attempts.
func attemptHeads(counts []int) (head []string, most int) {
	most = slices.Max(counts)
	head = []string{"", "attempt 1"}
	for _, i := range shownAttempts(most)[1:] {
		if i < 0 {
			head = append(head, "…")
			continue
		}
		head = append(head, fmt.Sprint(i+1))
	}
	fewer := func(n int) bool { return n > mostColumns-2 && n < most }
	if most > mostColumns && slices.ContainsFunc(counts, fewer) {
		head[len(head)-1] = "last"
	}
	return head, most
}

// row returns a line with a time for each attempt that the table shows, in a table whose longest line
// has most attempts.
func (s story) row(name string, most int, times []time.Duration, end, why string) []string {
	row, n, wait := []string{name}, len(times), name == "  wait"
	for _, i := range shownAttempts(most) {
		if i == most-1 && most > mostColumns && n > mostColumns-2 {
			i = n - 1 // the column of the last attempt
		}
		switch {
		case i < 0 && n > mostColumns-1:
			row = append(row, "…")
		case wait && (i <= 0 || i >= n):
			row = append(row, "")
		case i < 0 || i >= n:
			row = append(row, "–")
		default:
			row = append(row, roundTime(times[i]))
		}
	}
	return append(row, end, why)
}

func same(a, b story) bool { return slices.Equal(a.sent, b.sent) && a.end == b.end }

// refused tells the story of a call whose budget is empty; ok is false if there is no budget.
func (e *explanation) refused(kind failureKind) (story, bool) {
	if e.strategy.Budget.Kind == sim.UnlimitedBudget {
		return story{}, false
	}
	s := e.unlimited()
	s.Budget = sim.Budget{Kind: sim.RatioBudget, Window: time.Second} // it earns nothing
	if e.strategy.Budget.Kind == sim.ThrottleBudget {                 // calls do not wait for its tokens
		s.Budget = sim.Budget{Kind: sim.ThrottleBudget, MaxTokens: 1, TokenRatio: 0.001} // the first failure uses it up
	}
	r, err := s.Retrier()
	if err != nil {
		return story{}, false
	}
	return tell(r, kind, "", storyStart, e.deadline, func() float64 { return 0.5 }), true
}

func (s story) ending() string {
	if s.end < 0 {
		return "never"
	}
	return roundTime(s.end)
}

// roundTime is shortTime without the digits that nobody needs.
func roundTime(d time.Duration) string {
	switch {
	case d >= time.Second:
		return shortTime(d.Round(10 * time.Millisecond))
	case d >= time.Millisecond:
		return shortTime(d.Round(time.Millisecond))
	default:
		return shortTime(d)
	}
}

// reasonText says why no further attempt followed.
func reasonText(why error, p grpcretry.Policy) string {
	switch {
	case errors.Is(why, grpcretry.ErrAttemptsExhausted):
		return plural(p.MaxAttempts, "attempt") + " made"
	case errors.Is(why, grpcretry.ErrBudgetExhausted):
		return "budget"
	case errors.Is(why, grpcretry.ErrDeadline):
		return "deadline too near"
	case errors.Is(why, context.DeadlineExceeded):
		return "deadline"
	case errors.Is(why, grpcretry.ErrMaxElapsed):
		return "max elapsed"
	case errors.Is(why, grpcretry.ErrTargetDown):
		return "patience"
	case errors.Is(why, grpcretry.ErrNotRetryable):
		return "not retried"
	case why == nil:
		return "nothing ends it"
	default:
		return reasons.Of(why).Word
	}
}

func plural(n int, word string) string {
	if n == 1 {
		return "1 " + word
	}
	return fmt.Sprintf("%s %ss", grouped(float64(n)), word)
}

// single reports whether the first attempt is the last, whatever the waits are.
func (f *failureStories) single() bool {
	return len(f.shortest.sent) == 1 && len(f.typical.sent) == 1 && len(f.longest.sent) == 1
}

// singleText tells of a call whose first attempt is its last.
func (e *explanation) singleText(f failureStories) string {
	s := f.typical
	switch {
	case f.kind.unsent && s.end >= 0:
		return fmt.Sprintf(
			"%s A call waits for one, and gets its error after %s (%s). What reached no server is no attempt that counts.",
			headingOf(f.kind),
			roundTime(s.end),
			reasonText(s.why, e.policy),
		)
	case s.end < 0:
		return headingOf(f.kind) + " The call has one attempt, and nothing ends it."
	default:
		return fmt.Sprintf(
			"%s The call has one attempt, and gets its error after %s (%s).",
			headingOf(f.kind),
			roundTime(s.end),
			reasonText(s.why, e.policy),
		)
	}
}

// manyText sums up many calls, unless all are alike.
func (e *explanation) manyText(f failureStories) string {
	m := f.many
	if m.calls == 0 || f.kind.unsent || same(f.shortest, f.longest) {
		return ""
	}
	if m.p50 == m.p99 && m.cut == 0 {
		return ""
	}
	text := fmt.Sprintf(" Of %s such calls, half have the error within %s, and 99%% within %s; %s on average.",
		grouped(float64(m.calls)), roundTime(m.p50), roundTime(m.p99), roundTime(m.mean))
	if allowed := e.policy.MaxAttempts; e.deadline > 0 && allowed > 1 {
		if m.cut == 0 {
			return text + " The deadline cuts none of them short."
		}
		text += fmt.Sprintf(" %s never get their last attempt because of the deadline.", percent(m.cut))
	}
	return text
}

// percent formats a share with as few digits as it needs.
func percent(share float64) string {
	switch v := 100 * share; {
	case v == 0:
		return "0%"
	case v < 0.1:
		return "less than 0.1%"
	case v < 10:
		return strings.TrimSuffix(fmt.Sprintf("%.1f", v), ".0") + "%"
	default:
		return grouped(math.Round(v)) + "%"
	}
}
