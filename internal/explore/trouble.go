package explore

import (
	"cmp"
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"time"

	"google.golang.org/grpc/codes"

	"github.com/grpcretry/grpcretry"
	"github.com/grpcretry/grpcretry/internal/inside"
	"github.com/grpcretry/grpcretry/internal/reasons"
)

// This file has the rules of [grpcretry.WithPatience], in the simplest way. All calls of a program share one target.
// Times are counted from the start of the program.

// never is the time of what has not happened.
const never = time.Duration(-1 << 62)

// A happening is what the target's state depends on: a retryable failure of an attempt, an answer, or a call that gives up.
type happening struct {
	at       time.Duration
	sent     time.Duration // the attempt
	answer   bool
	gaveUp   bool
	certain  bool          // otherwise it may be none
	patience time.Duration // of the call
}

// A standing is what the calls know about their target at one moment.
type standing struct {
	since, latest time.Duration // the first failure since the last answer, and the latest of all; or never
	onset         time.Duration // the first of the failures that follow one another closely
	heard         bool          // an attempt that was sent before the onset was answered after the latest failure
	news          time.Duration // the latest failure, or call that gave up
	answers       int           // those that have ended a time of failures
}

func (s standing) after(h happening) standing {
	switch {
	case h.answer && s.since == never:
		return s
	case h.answer && h.sent < s.onset:
		s.heard = true
		return s
	case h.answer:
		s.since, s.heard = never, false
		s.answers++
		return s
	case h.gaveUp:
		s.news = h.at
		return s
	}
	if s.hasAnswered(h.at) {
		s.since = never
		s.answers++
	}
	if s.since == never || h.at-s.news > h.patience {
		s.since = h.at
	}
	if s.latest == never || h.at-s.latest > time.Second {
		s.onset = h.at
	}
	s.latest, s.news, s.heard = h.at, h.at, false
	return s
}

// hasAnswered reports whether the answer to an early attempt has ended the time of failures.
func (s standing) hasAnswered(at time.Duration) bool { return s.heard && at-s.latest > time.Second }

// happenings returns what has happened, in order.
func (o *observation) happenings() (all []happening) {
	for number, events := range o.events {
		policy := o.retrier.Policy(o.planned(number).method.name)
		decided := o.decided[number]
		for i, e := range events {
			if e.Kind == grpcretry.CallEnd && errors.Is(e.Reason, grpcretry.ErrTargetDown) {
				all = append(all, happening{at: o.seenAt[number][i], gaveUp: true, certain: true})
			}
			if e.Kind != grpcretry.AttemptEnd {
				continue
			}
			h, relevant := meaning(e.Attempt, &policy)
			h.at, h.sent, h.patience = o.seenAt[number][i], e.Attempt.Start.Sub(o.start), policy.Patience
			if e.Attempt.Unsent {
				h.sent = h.at
			}
			d, wasDecided := decided[e.Attempt.Number]
			switch {
			case h.answer && e.Attempt.Err == nil && policy.Hedging != nil:
				h.certain = h.certain && o.endOf(number) != nil && o.endOf(number).Attempt.Number == e.Attempt.Number
			case errors.Is(e.Attempt.Err, grpcretry.ErrAttemptTimeout):
				h.certain = wasDecided && d.retries
			default:
				h.certain = h.certain && (wasDecided || e.Attempt.Err == nil)
			}
			if limit := policy.AttemptTimeout; limit > 0 && e.Attempt.Duration >= limit {
				overdue := happening{at: e.Attempt.Start.Add(limit).Sub(o.start), sent: h.sent, patience: policy.Patience}
				if errors.Is(e.Attempt.Err, grpcretry.ErrAttemptTimeout) {
					overdue.certain, relevant = h.certain, false
				}
				all = append(all, overdue)
			}
			if relevant {
				all = append(all, h)
			}
		}
	}
	for _, r := range o.results { // a stream's first message is an answer, unless it is late
		if end := o.endOf(r.call); end != nil && len(r.replies) > 0 && !r.replies[0].at.IsZero() {
			all = append(all, happening{at: r.replies[0].at.Sub(o.start), sent: end.Attempt.Start.Sub(o.start), answer: true})
		}
	}
	slices.SortStableFunc(all, func(a, b happening) int { return cmp.Compare(a.at, b.at) })
	return all
}

// meaning returns what the end of an attempt means for the target, if it may mean anything.
func meaning(a grpcretry.Attempt, policy *grpcretry.Policy) (h happening, relevant bool) {
	late := policy.AttemptTimeout > 0 && a.Duration >= policy.AttemptTimeout
	switch code := a.Code(); {
	case a.Err == nil:
		return happening{answer: true, certain: !late}, true
	case errors.Is(a.Err, grpcretry.ErrHedgeLost):
		return happening{}, false
	case policy.Classifier != nil, slices.Contains(policy.Codes, code), errors.Is(a.Err, grpcretry.ErrAttemptTimeout):
		ofContext := code == codes.Canceled || code == codes.DeadlineExceeded
		return happening{certain: policy.Classifier == nil && !ofContext}, true
	case slices.Contains(answered, code):
		_, hinted := grpcretry.PushbackFrom(a.Trailer, a.Err)
		return happening{answer: true, certain: !hinted && !late}, true
	default:
		return happening{}, false
	}
}

// answered are the codes that show a working server, see [grpcretry.Answered].
var answered = []codes.Code{codes.InvalidArgument, codes.NotFound, codes.AlreadyExists, codes.PermissionDenied, codes.Unauthenticated,
	codes.FailedPrecondition, codes.OutOfRange, codes.Aborted, codes.Unimplemented}

// standings returns all states of the target that are possible at a time: what has happened then may have come before or after.
func (o *observation) standings(at time.Duration) []standing {
	states, all := []standing{{since: never, latest: never, news: never}}, o.happened
	for len(all) > 0 && all[0].at <= at {
		n := 1
		for n < len(all) && all[n].at == all[0].at {
			n++
		}
		states = together(states, all[:n], all[0].at < at)
		all = all[n:]
	}
	for i := range states {
		if states[i].hasAnswered(at) {
			states[i].since = never
		}
	}
	return states
}

// together returns the states that are possible after what has happened at one time, in any order, or without what is not certain; or
// in the middle of it, unless all has happened.
func together(states []standing, group []happening, all bool) []standing {
	type path struct {
		standing
		done [2]uint64 // of the group
	}
	var paths []path
	seen, result := map[path]bool{}, map[standing]bool{}
	reach := func(p path) {
		if !seen[p] {
			seen[p] = true
			paths = append(paths, p)
		}
	}
	for _, s := range states {
		reach(path{standing: s})
	}
	for i := 0; i < len(paths); i++ {
		p, left := paths[i], 0
		tried := map[happening]bool{}
		for k, h := range group {
			bit := uint64(1) << (k % 64)
			if p.done[k/64]&bit != 0 {
				continue
			}
			left++
			if tried[h] { // the same as another one
				continue
			}
			tried[h] = true
			next := p
			next.done[k/64] |= bit
			if !h.certain {
				reach(next)
			}
			next.standing = p.after(h)
			reach(next)
		}
		if !all || left == 0 {
			result[p.standing] = true
		}
	}
	states = nil
	for s := range result {
		states = append(states, s)
	}
	return states
}

// An outcome is how a wait may end: at a time with an attempt, or with the call.
type outcome struct {
	at      time.Duration
	repeats int
	reason  error // nil for an attempt
}

// A part of a wait ends with an attempt, a repetition or the call.
type part struct {
	since, at time.Duration
	answers   int
	repeats   int
}

// A waiting is the wait after one failure of a call that is not hedged.
type waiting struct {
	*judgement
	from     time.Duration // when it was decided on
	trouble  time.Duration // when the call's first attempt failed
	first    time.Duration // the wait that the server asks for, or the backoff
	pushed   bool          // the server asks for it
	turn     bool          // by a pushback
	free     bool          // no attempt has reached a server, so that the next is not paid for
	outcomes []outcome
	useless  []time.Duration // when an attempt could have learned nothing
	endless  bool            // there are too many outcomes to know them all
}

// waitingAfter returns the wait after an attempt that has reached a server.
func (j *judgement) waitingAfter(i int) *waiting {
	w := &waiting{judgement: j, from: j.failedAt(i), trouble: j.failedAt(0)}
	push, hinted := grpcretry.PushbackFrom(j.attempts[i].Trailer, j.attempts[i].Err)
	w.first, w.pushed, w.turn = push.Delay, hinted, hinted && push.Source == grpcretry.WaitPushback
	switch {
	case !hinted:
		w.first = j.backoff(i + 1)
	case push.Source == grpcretry.WaitRetryInfo:
		left := min(j.limits()) - w.from - push.Delay
		w.first += time.Duration(j.random() * float64(max(0, min(push.Delay/5, left))))
	}
	for _, a := range j.attempts[1 : i+1] { // a long one has its own
		late := j.policy.AttemptTimeout > 0 && a.Duration >= j.policy.AttemptTimeout
		if !a.Unsent && !late && a.Duration > max(j.policy.Patience, 10*time.Second) {
			w.trouble = a.Start.Add(a.Duration).Sub(j.start)
		}
	}
	w.explore()
	// The trouble may have begun when an attempt was overdue that nothing has replaced in the end.
	if limit := j.policy.AttemptTimeout; limit > 0 && j.attempts[0].Duration >= limit {
		w.trouble = min(w.trouble, j.attempts[0].Start.Add(limit).Sub(j.start))
		w.explore()
	}
	return w
}

func (j *judgement) random() float64 { return min(j.program.u, 1-0x1p-53) }

// failedAt returns when an attempt has failed for the Retrier.
func (j *judgement) failedAt(i int) time.Duration {
	a := j.attempts[i]
	if errors.Is(a.Err, grpcretry.ErrAttemptTimeout) {
		return a.Start.Add(j.policy.AttemptTimeout).Sub(j.start)
	}
	if d, ok := j.decided[j.call.number][a.Number]; ok {
		return d.at
	}
	return a.Start.Add(a.Duration).Sub(j.start)
}

func (j *judgement) isPatient() bool { return j.policy.Patience > 0 }

// limits returns when the deadline and MaxElapsed are reached.
func (j *judgement) limits() (deadline, elapsed time.Duration) {
	deadline, elapsed = j.call.start+j.call.timeout, math.MaxInt64
	if limit := j.policy.MaxElapsed; limit > 0 {
		elapsed = j.attempts[0].Start.Sub(j.start) + limit
	}
	return deadline, elapsed
}

// tooLate returns why no attempt may start at a time, nil if one may.
func (j *judgement) tooLate(at time.Duration) error {
	switch deadline, elapsed := j.limits(); {
	case at >= deadline:
		return grpcretry.ErrDeadline
	case at >= elapsed:
		return grpcretry.ErrMaxElapsed
	default:
		return nil
	}
}

// inTime returns a wait, or u times the time left at now if it would last too long.
func (w *waiting) inTime(wait, now time.Duration) time.Duration {
	if w.tooLate(now+wait) != nil {
		return time.Duration(w.random() * float64(min(w.limits())-now))
	}
	return wait
}

// ends returns when the patience is over.
func (w *waiting) ends(known standing, now time.Duration) time.Duration {
	if known.since != never {
		now = min(now, known.since)
	}
	return min(now, w.trouble) + w.policy.Patience
}

const shortestRepeat = 20 * time.Millisecond

// explore finds the possible outcomes.
func (w *waiting) explore() {
	var parts []part
	seen := map[part]bool{}
	reach := func(p part) {
		if !seen[p] {
			seen[p] = true
			parts = append(parts, p)
		}
	}
	for _, known := range w.standings(w.from) {
		wait := w.first
		if known.latest < w.from {
			continue // without this failure
		}
		if reason := w.tooLate(w.from + wait); reason != nil {
			w.end(w.from, 0, reason)
			continue
		}
		if !w.pushed && w.isPatient() && known.since != never {
			wait = max(wait, w.inTime(time.Duration(w.random()*float64(w.from-known.since)), w.from))
		}
		if !w.pushed && w.isPatient() && w.from+wait > w.ends(known, w.from) {
			w.end(w.from, 0, grpcretry.ErrTargetDown)
			continue
		}
		since := w.from
		if w.pushed { // only a failure in its second half counts
			since += wait / 2
		}
		reach(part{since: since, at: w.from + wait, answers: known.answers})
	}
	for i := 0; i < len(parts); i++ {
		if i >= 10_000 {
			w.endless = true
			return
		}
		for _, known := range w.standings(parts[i].at) {
			if next, ok := w.after(parts[i], known); ok {
				reach(next)
			}
		}
	}
}

// after adds the outcomes that are possible when a part of the wait is over, and returns the part that repeats it, if one may.
func (w *waiting) after(p part, known standing) (next part, ok bool) {
	// In the first seconds it is not clear what answers mean.
	unclear := w.isScarce() && p.at-min(known.onset, w.trouble) < w.unsure()
	hasAnswered := known.answers != p.answers
	answered := hasAnswered && !unclear
	itsTurn := p.repeats == 0 && w.pushed && (w.turn || 2*(p.at-(w.ends(known, p.at)-w.policy.Patience)) > w.policy.Patience)
	if !w.isPatient() || itsTurn || answered || known.latest <= p.since || known.since == never { // it could learn something
		granted, refused := w.mayPay(p.at)
		if granted {
			w.end(p.at, p.repeats, nil)
		}
		mayBeBack := w.isScarce() && known.since == never && 4*(p.at-known.latest) >= p.at-w.trouble
		isBack := mayBeBack && p.at-known.latest <= w.unsure()
		mayBeBack = isBack || mayBeBack && w.isRetrySent(p.at-w.unsure(), p.at) // one that was cancelled since does not count
		if refused && (answered && !isBack || !w.isPatient() || w.budget == nil) {
			w.end(p.at, p.repeats, grpcretry.ErrBudgetExhausted)
		}
		if !refused || answered && !mayBeBack || !w.isPatient() {
			return part{}, false
		}
	} else {
		w.useless = append(w.useless, p.at)
	}
	length := p.at - w.trouble
	if known.since != never {
		length = max(length, p.at-known.since)
	}
	inVain := grpcretry.ErrTargetDown
	if known.since == never && hasAnswered {
		length, inVain = min(length, time.Second), grpcretry.ErrBudgetExhausted
	}
	wait := max(w.inTime(time.Duration(w.random()*float64(length)), p.at), shortestRepeat)
	switch reason := w.tooLate(p.at + wait); {
	case reason != nil:
		w.end(p.at, p.repeats, reason)
	case p.at+wait > w.ends(known, p.at):
		w.end(p.at, p.repeats, inVain)
	default:
		return part{since: p.at, at: p.at + wait, answers: p.answers, repeats: p.repeats + 1}, true
	}
	return part{}, false
}

// isRetrySent reports whether any call has sent a retry between two times.
func (o *observation) isRetrySent(from, to time.Duration) bool {
	for _, events := range o.events {
		for _, e := range events {
			at := e.Attempt.Start.Sub(o.start)
			if e.Kind == grpcretry.AttemptStart && e.Attempt.Number > 1 && !e.Attempt.Hedge && from <= at && at <= to {
				return true
			}
		}
	}
	return false
}

// unsure is how long it is not clear what answers mean.
func (w *waiting) unsure() time.Duration { return min(3*time.Second, w.policy.Patience/3) }

// isScarce reports whether a ratio budget without a floor pays for the attempt.
func (w *waiting) isScarce() bool {
	budget := fmt.Sprint(w.policy.Budget)
	return !w.free && strings.HasPrefix(budget, "ratio budget") && !strings.Contains(budget, "a second")
}

func (w *waiting) end(at time.Duration, repeats int, reason error) {
	if one := (outcome{at, repeats, reason}); !slices.Contains(w.outcomes, one) {
		w.outcomes = append(w.outcomes, one)
	}
}

// mayPay returns what the budget may have said at a time.
func (w *waiting) mayPay(at time.Duration) (granted, refused bool) {
	switch {
	case w.free:
		return true, false
	case w.budget != nil:
		return w.budget.said(w.start.Add(at))
	default:
		return true, w.policy.Budget != grpcretry.Unlimited
	}
}

// judgeAttempt checks that an attempt may be sent at the end of the wait.
func (w *waiting) judgeAttempt(next grpcretry.Attempt) {
	at := w.from + next.Wait
	if w.mayEnd(at, inside.RepeatsOf(next), nil) {
		return
	}
	w.must(!slices.Contains(w.useless, at), "attempt %d could learn nothing: another has failed since %v, and none was answered",
		next.Number, w.from)
	w.must(false, "the wait before attempt %d is %v, with %s, want %v", next.Number, next.Wait,
		count(inside.RepeatsOf(next), "repetition", "repetitions"), w)
}

// judgeConnected checks the wait before attempt i, which follows one that has reached no server: when there is a connection, the
// backoff follows, in which the call learns from others as in any wait.
func (j *judgement) judgeConnected(i int) {
	next, want := j.attempts[i], j.backoff(i)
	least := want + time.Duration(inside.RepeatsOf(next))*shortestRepeat
	j.must(next.Wait >= least, "the wait before attempt %d is %v, with %s, want at least %v", next.Number, next.Wait,
		count(inside.RepeatsOf(next), "repetition", "repetitions"), least)
	if inside.RepeatsOf(next) > 0 {
		return
	}
	start := next.Start.Sub(j.start)
	w := &waiting{judgement: j, trouble: j.failedAt(0), from: start - want}
	w.free = !slices.ContainsFunc(j.attempts[:i], func(a grpcretry.Attempt) bool { return !a.Unsent })
	next.Wait = want
	for _, known := range j.standings(w.from) {
		for _, later := range j.standings(start) {
			w.after(part{since: w.from, at: start, answers: known.answers}, later)
		}
	}
	w.judgeAttempt(next)
}

// mostRepeats is what an Attempt counts to.
const mostRepeats = 255

// mayEnd returns whether the wait may have ended so.
func (w *waiting) mayEnd(at time.Duration, repeats int, reason error) bool {
	return w.endless || slices.ContainsFunc(w.outcomes, func(o outcome) bool {
		return (o.at-at).Abs() <= time.Microsecond && (reason != nil || min(o.repeats, mostRepeats) == repeats) && errors.Is(reason, o.reason)
	})
}

// String returns the possible outcomes for a report.
func (w *waiting) String() string {
	var all []string
	for _, o := range w.outcomes {
		if o.reason == nil {
			all = append(all, fmt.Sprintf("an attempt after %v with %s", o.at-w.from, count(o.repeats, "repetition", "repetitions")))
		} else {
			all = append(all, fmt.Sprintf("%s after %v", reasons.Of(o.reason).Word, o.at-w.from))
		}
	}
	return strings.Join(all[max(0, len(all)-5):], ", or ")
}
