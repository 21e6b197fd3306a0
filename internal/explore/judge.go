package explore

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/grpcretry/grpcretry"
	"github.com/grpcretry/grpcretry/internal/inside"
	"github.com/grpcretry/grpcretry/internal/reasons"
)

// slack is how much later than at its deadline a stream may end: the time that the library gives gRPC to report an
// attempt's end.
const slack = 11 * time.Millisecond

// String returns what was seen, for a report.
func (o *observation) String() string {
	var b strings.Builder
	for _, c := range o.program.calls {
		fmt.Fprintf(&b, "  call %d: ", c.number)
		if end := o.endOf(c.number); end != nil {
			fmt.Fprintf(&b, "%s\n", timeline(end))
		} else {
			b.WriteString("no end\n")
		}
		for _, s := range o.served {
			if s.call == c.number {
				fmt.Fprintf(&b, "    the server: attempt %d from %v to %v: %v\n", s.attempt, s.at.Sub(o.start), s.end.Sub(o.start), status.Code(s.err))
			}
		}
		for _, r := range o.results {
			if r.call == c.number {
				fmt.Fprintf(&b, "    the application: %s and %v\n", count(len(r.replies), "reply", "replies"), status.Code(r.err))
			}
		}
	}
	return b.String()
}

// judge returns what is wrong, "" if nothing is.
func (o *observation) judge() string {
	o.mu.Lock()
	defer o.mu.Unlock()
	if len(o.problems) > 0 {
		return o.problems[0]
	}
	o.happened = o.happenings()
	for _, r := range o.results {
		c := o.planned(r.call)
		j := &judgement{observation: o, call: c, policy: o.retrier.Policy(c.method.name), result: r, events: o.events[c.number]}
		for _, s := range o.served {
			if s.call == c.number {
				j.served = append(j.served, s)
			}
		}
		j.judge()
		if j.problem != "" {
			return fmt.Sprintf("call %d: %s", c.number, j.problem)
		}
	}
	return o.judgeBudget()
}

// judgeBudgets checks that the policy's budgets keep the promises of [grpcretry.Budget], as far as they can be seen
// at one instant.
func (e *Exploration) judgeBudgets() string {
	retrier, err := grpcretry.New(e.options()...)
	if err != nil {
		return "" // the first program will say it
	}
	for _, m := range e.methods() {
		b, now := retrier.Policy(m.name).Budget, time.Now()
		before := b.Balance(now)
		switch granted := b.Withdraw(now); {
		case !granted && before >= 1:
			return fmt.Sprintf("%s: the budget has a balance of %v, and refuses a retry", m.name, before)
		case granted:
			b.Deposit(grpcretry.Outcome{Attempt: 2, Result: grpcretry.Unsent})
			if after := b.Balance(now); after < before-1e-6 {
				return fmt.Sprintf("%s: the budget has a balance of %v, and of %v after one Withdraw and its return", m.name, before, after)
			}
		}
	}
	return ""
}

// judgeBudget checks that every attempt but the first that reaches a server was paid for, and nothing else. Hedges are
// paid for by a budget of their own.
func (o *observation) judgeBudget() string {
	if o.budget == nil {
		return ""
	}
	paid, reached := 0, 0
	for _, c := range o.program.calls {
		if end := o.endOf(c.number); end != nil {
			p, r := spent(attemptsOf(end))
			paid, reached = paid+p, reached+r
		}
	}
	b := o.budget
	switch {
	case paid != b.granted-b.returned:
		return fmt.Sprintf("%d attempts had to be charged, and the budget granted %d and got back %d", paid, b.granted, b.returned)
	case paid > o.program.budget:
		return fmt.Sprintf("%d attempts were charged to a budget of %d", paid, o.program.budget)
	case b.retries != paid:
		return fmt.Sprintf("%d attempts had to be charged, and the budget received the ends of %d", paid, b.retries)
	case b.deposits != reached:
		return fmt.Sprintf("%d attempts reached a server, and %d were reported to the budget", reached, b.deposits)
	}
	return ""
}

// spent returns how many attempts the method's budget has paid for, and how many have reached a server. An attempt is free if
// none before it has reached one, as far as known when it starts.
func spent(attempts []grpcretry.Attempt) (paid, reached int) {
	var free *grpcretry.Attempt
	for i, a := range attempts {
		if !a.Unsent {
			reached++
		}
		switch {
		case free == nil || free.Unsent && !free.Start.Add(free.Duration).After(a.Start):
			free = &attempts[i]
		case !a.Hedge && !a.Unsent:
			paid++
		}
	}
	return paid, reached
}

// endOf returns the last event of a call, nil if there is none.
func (o *observation) endOf(call int) *grpcretry.Event {
	for _, e := range o.events[call] {
		if e.Kind == grpcretry.CallEnd {
			return &e
		}
	}
	return nil
}

func attemptsOf(end *grpcretry.Event) []grpcretry.Attempt {
	if len(end.Attempts) > 0 {
		return end.Attempts
	}
	return []grpcretry.Attempt{end.Attempt}
}

// A judgement is about one call.
type judgement struct {
	*observation
	call     plannedCall
	policy   grpcretry.Policy
	result   result
	events   []grpcretry.Event
	served   []*served
	attempts []grpcretry.Attempt
	problem  string // the first that is found
}

// must notes a problem if a promise is broken.
func (j *judgement) must(kept bool, format string, args ...any) {
	if !kept && j.problem == "" {
		j.problem = fmt.Sprintf(format, args...)
	}
}

func (j *judgement) judge() {
	deadline := j.start.Add(j.call.start + j.call.timeout)
	if j.call.cancel > 0 {
		deadline = j.start.Add(j.call.start + min(j.call.timeout, j.call.cancel))
	}
	j.must(!j.result.over.After(deadline.Add(slack)), "it returned %v after its deadline or cancellation", j.result.over.Sub(deadline))
	j.judgeReplies()
	j.judgeServed()
	j.judgeSeen()
	if len(j.events) == 0 { // it has passed through
		j.must(len(j.served) <= 1, "the server saw %d attempts of a call without an event", len(j.served))
		return
	}
	j.judgeEvents()
	if j.problem != "" {
		return
	}
	j.attempts = attemptsOf(&j.events[len(j.events)-1])
	j.judgeAttempts(deadline)
	j.judgeEnd()
	j.judgePatience()
	j.judgeWinner()
	for i := 1; i < len(j.attempts); i++ {
		if j.hedges() {
			j.judgeHedgedRetry(i)
		} else {
			j.judgeRetry(i)
		}
	}
}

// hedges reports whether attempts may overlap.
func (j *judgement) hedges() bool {
	return j.policy.Hedging != nil && !j.call.method.clients
}

func (j *judgement) judgeReplies() {
	replies := j.result.replies
	for i, r := range replies {
		j.must(!strings.HasPrefix(r.text, remains), "reply %d is %q: it was not reset between attempts", i+1, r.text)
		j.must(r.call == j.call.number, "reply %d is %q, which is no reply to this call", i+1, r.text)
		j.must(r.attempt == replies[0].attempt, "reply %d is from attempt %d, and reply 1 from attempt %d", i+1, r.attempt, replies[0].attempt)
		j.must(r.index == i+1, "reply %d is the server's reply %d", i+1, r.index)
	}
	if j.result.err != nil {
		return
	}
	j.must(len(replies) == j.call.replies(), "it succeeded with %s, want %d", count(len(replies), "reply", "replies"), j.call.replies())
	if n := len(replies); n > 0 && !j.call.method.servers {
		j.must(replies[n-1].received == j.call.sends(), "it succeeded although the server received %d of %d messages",
			replies[n-1].received, j.call.sends())
	}
	j.must(slices.ContainsFunc(j.served, func(s *served) bool {
		return s.err == nil && (len(replies) == 0 || s.attempt == replies[0].attempt)
	}), "it succeeded although no attempt succeeded on the server")
}

// judgeServed judges what the server has seen.
func (j *judgement) judgeServed() {
	ran := 0
	for i, s := range j.served {
		for _, other := range j.served[:i] {
			j.must(s.attempt != other.attempt, "attempt %d reached the server twice", s.attempt)
		}
		if i > 0 && j.policy.UnsentOnly && !j.asksForRetry(j.served[i-1]) {
			ran++
		}
	}
	j.must(ran == 0, "the server saw %d attempts with WithUnsentOnly, and did not ask for another", len(j.served))
	j.must(len(j.served) <= j.mostAttempts(), "the server saw %d attempts, want at most %d", len(j.served), j.mostAttempts())
	for _, s := range j.served {
		took := s.end.Sub(s.at)
		j.must(s.step.kind == hangs || s.step.kind == cuts || !s.end.IsZero() &&
			took <= s.step.delay+slack+time.Duration(j.call.sends())*j.call.pause,
			"attempt %d kept the server busy for %v, because it waited for messages", s.attempt, took)
		for _, later := range j.served {
			if s.step.kind != fails || s.end.IsZero() || !later.at.After(s.end) || status.Code(s.err) != s.step.code || !j.hasSeenEnd(s) {
				continue
			}
			push, ok := grpcretry.PushbackFrom(s.step.trailer, nil)
			j.must(!ok || !push.Stop, "attempt %d reached the server at %v, after attempt %d was answered with \"no retry\" at %v",
				later.attempt, j.since(later.at), s.attempt, j.since(s.end))
			j.must(!ok || j.isReplaced(s, later) || later.at.Sub(s.end) >= push.Delay-time.Microsecond,
				"attempt %d reached the server %v after attempt %d was answered with a pushback of %v",
				later.attempt, later.at.Sub(s.end), s.attempt, push.Delay)
			if ok && later.attempt == s.attempt+1 && !j.hedges() && !j.repeats(later.attempt) {
				j.must(later.at.Sub(s.end) <= push.Delay+time.Microsecond,
					"attempt %d reached the server %v after attempt %d was answered with a pushback of %v",
					later.attempt, later.at.Sub(s.end), s.attempt, push.Delay)
			}
		}
	}
}

// isReplaced reports whether another hedge was answered with a pushback between the end of s and a later attempt. The
// most recent counts.
func (j *judgement) isReplaced(s, later *served) bool {
	return j.hedges() && slices.ContainsFunc(j.served, func(other *served) bool {
		_, ok := grpcretry.PushbackFrom(other.step.trailer, other.err)
		return ok && other != s && other != later && !other.end.Before(s.end) && !other.end.After(later.at)
	})
}

// hasSeenEnd reports whether the client had not given the attempt up when the server ended it.
func (j *judgement) hasSeenEnd(s *served) bool {
	for _, e := range j.events {
		if e.Kind == grpcretry.AttemptEnd && e.Attempt.Number == s.attempt {
			return e.Attempt.Code() == s.step.code && !errors.Is(e.Attempt.Err, grpcretry.ErrAttemptTimeout) &&
				!e.Attempt.Start.Add(e.Attempt.Duration).Before(s.end)
		}
	}
	return false
}

// repeats reports whether the wait before an attempt was repeated.
func (j *judgement) repeats(number int) bool {
	return slices.ContainsFunc(j.events, func(e grpcretry.Event) bool {
		return e.Kind == grpcretry.AttemptStart && e.Attempt.Number == number && inside.RepeatsOf(e.Attempt) > 0
	})
}

// asksForRetry reports whether the server has answered with a wait.
func (j *judgement) asksForRetry(s *served) bool {
	push, ok := grpcretry.PushbackFrom(s.step.trailer, s.err)
	return ok && !push.Stop
}

func (j *judgement) since(t time.Time) time.Duration { return t.Sub(j.start) }

func (j *judgement) mostAttempts() int {
	return j.policy.MaxAttempts
}

// judgeEvents checks that there is a start and an end of each attempt, and one end of the call, the last event.
func (j *judgement) judgeEvents() {
	started, ended, ends := map[int]int{}, map[int]int{}, 0
	for _, e := range j.events {
		switch e.Kind {
		case grpcretry.AttemptStart:
			started[e.Attempt.Number]++
		case grpcretry.AttemptEnd:
			ended[e.Attempt.Number]++
		case grpcretry.CallEnd:
			ends++
		}
	}
	j.must(ends == 1 && j.events[len(j.events)-1].Kind == grpcretry.CallEnd,
		"it ended %d times, want once, as the last event", ends)
	for n := 1; n <= len(started); n++ {
		j.must(started[n] == 1 && ended[n] == 1, "attempt %d started %d times and ended %d times", n, started[n], ended[n])
	}
	j.must(len(started) == len(ended), "%d attempts started, and %d ended", len(started), len(ended))
	for _, s := range j.served {
		j.must(started[s.attempt] == 1, "the server saw attempt %d, which never started", s.attempt)
	}
	end := j.events[len(j.events)-1]
	j.must((end.Err == nil) == (j.result.err == nil), "it ended with %v, but the application got %v", end.Err, j.result.err)
	if r := j.result.replies; len(r) > 0 && end.Err == nil {
		j.must(r[0].attempt == end.Attempt.Number, "attempt %d succeeded, and the replies are from attempt %d", end.Attempt.Number,
			r[0].attempt)
	}
}

// judgeAttempts checks their number and their starts.
func (j *judgement) judgeAttempts(deadline time.Time) {
	sent := 0
	for i, a := range j.attempts {
		if !a.Unsent {
			sent++
		}
		if i == 0 {
			continue
		}
		// At the instant of a cancellation, either may come first.
		j.must(a.Start.Before(deadline) || j.call.cancel > 0 && a.Start.Equal(deadline),
			"attempt %d started at %v, and the deadline or cancellation was at %v", a.Number, j.since(a.Start), j.since(deadline))
		if limit := j.policy.MaxElapsed; limit > 0 {
			j.must(a.Start.Sub(j.attempts[0].Start) < limit, "attempt %d started %v after the call, and MaxElapsed is %v", a.Number,
				a.Start.Sub(j.attempts[0].Start), limit)
		}
	}
	j.must(sent <= j.mostAttempts(), "%d attempts were made, want at most %d", sent, j.mostAttempts())
	if end := j.events[len(j.events)-1]; errors.Is(end.Reason, grpcretry.ErrAttemptsExhausted) && !j.hedges() {
		j.must(sent == j.mostAttempts(), "the attempts are used up after %d, and %d are allowed", sent, j.mostAttempts())
	}
}

// judgeEnd checks that a call which is not hedged has ended with its last attempt, when it was cancelled, or when it could not wait
// again for its target. See down.go for the wait for a connection.
func (j *judgement) judgeEnd() {
	last := j.attempts[len(j.attempts)-1]
	if last.Unsent || j.hedges() {
		return
	}
	end := j.events[len(j.events)-1]
	if c := j.call.cancel; c > 0 && end.Elapsed >= c {
		j.must(end.Elapsed <= c+slack, "it ended %v after its start, and was cancelled after %v", end.Elapsed, c)
		return
	}
	waited := end.Elapsed - last.Start.Add(last.Duration).Sub(j.attempts[0].Start)
	if waited <= slack && !errors.Is(end.Reason, grpcretry.ErrTargetDown) && !errors.Is(end.Reason, grpcretry.ErrBudgetExhausted) {
		return
	}
	at, reason := j.attempts[0].Start.Sub(j.start)+end.Elapsed, reasons.Of(end.Reason).Word
	if waited <= slack && reason == "budget" && (j.budget == nil || !j.isPatient()) {
		return
	}
	w := j.waitingAfter(len(j.attempts) - 1)
	j.must(w.mayEnd(at, 0, end.Reason), "it ended %v after its last attempt, because of %s, want %v", waited, reason, w)
}

// judgeRetry checks the retry that follows attempt i-1 of a call that is not hedged.
func (j *judgement) judgeRetry(i int) {
	failed, next := j.attempts[i-1], j.attempts[i]
	ended := failed.Start.Add(failed.Duration)
	if errors.Is(failed.Err, grpcretry.ErrAttemptTimeout) { // it has gone on until the next one replaced it
		j.must(next.Start.Sub(ended) <= slack, "attempt %d started %v after the end of attempt %d, which it replaces", next.Number,
			next.Start.Sub(ended), failed.Number)
		ended = failed.Start.Add(j.policy.AttemptTimeout)
	}
	waited := next.Start.Sub(ended)
	j.must(waited >= next.Wait, "attempt %d started %v after the end of attempt %d, want %v", next.Number, waited,
		failed.Number, next.Wait)
	j.must(waited <= next.Wait+slack, "attempt %d started %v after the end of attempt %d, want %v", next.Number,
		waited, failed.Number, next.Wait)
	timedOut := errors.Is(failed.Err, grpcretry.ErrAttemptTimeout)
	if j.policy.Classifier == nil && !timedOut {
		j.must(slices.Contains(j.policy.Codes, failed.Code()), "attempt %d follows %v, which is not retryable", next.Number, failed.Code())
	}
	push, hinted := grpcretry.PushbackFrom(failed.Trailer, failed.Err)
	j.must(!hinted || !push.Stop, "attempt %d follows a \"no retry\"", next.Number)
	switch {
	case failed.Unsent:
	case hinted && push.Source == grpcretry.WaitPushback:
		j.must(next.Wait == push.Delay || inside.RepeatsOf(next) > 0 && next.Wait > push.Delay,
			"the wait before attempt %d is %v, and the pushback %v",
			next.Number, next.Wait, push.Delay)
	case hinted:
		spread := time.Duration(0.2 * j.program.u * float64(push.Delay))
		j.must((next.Wait-push.Delay-spread).Abs() <= time.Microsecond || inside.RepeatsOf(next) > 0 && next.Wait > push.Delay,
			"the wait before attempt %d is %v, and RetryInfo says %v", next.Number, next.Wait, push.Delay)
	default:
		want := j.backoff(i)
		j.must(next.Wait >= want, "the wait before attempt %d is %v, and the policy's backoff %v", next.Number, next.Wait, want)
	}
	if failed.Unsent {
		j.judgeConnected(i)
	} else {
		j.waitingAfter(i - 1).judgeAttempt(next)
	}
	if hinted && j.policy.MaxServerDelay >= 0 {
		j.must(push.Delay <= j.policy.MaxServerDelay, "attempt %d follows a pushback of %v, and MaxServerDelay is %v", next.Number, push.Delay,
			j.policy.MaxServerDelay)
	}
}

// backoff returns the wait before attempt i, counted from 0, that the policy has for it.
func (j *judgement) backoff(i int) time.Duration { return j.backoffAfter(i, i-1) }

// backoffAfter does the same for an attempt that follows the failure of another one than that before it.
func (j *judgement) backoffAfter(i, failed int) time.Duration {
	retry, prev := 1, time.Duration(0)
	delay := func(failed int) time.Duration {
		backoff := j.policy.Backoff
		if j.attempts[failed].Code() == codes.ResourceExhausted {
			backoff = j.policy.OverloadBackoff
		}
		return max(0, backoff.Delay(retry, prev, j.random()))
	}
	for k, a := range j.attempts[1:i] {
		switch a.WaitSource {
		case grpcretry.WaitBackoff:
			retry, prev = retry+1, delay(k) // not what the target has made of it
		case grpcretry.WaitPushback, grpcretry.WaitRetryInfo:
			retry, prev = 1, 0
		}
	}
	return delay(failed)
}
