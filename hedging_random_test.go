package grpcretry

import (
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"slices"
	"strconv"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"

	echov1 "github.com/grpcretry/grpcretry/proto/echo/v1"
)

var (
	hedgedSequences = flag.Int("hedges.sequences", 100, "how many calls TestHedgingAtRandom draws")
	hedgedSeed      = flag.Uint64("hedges.seed", 1, "the first seed of TestHedgingAtRandom, 0 for one drawn from the clock, as in make soak")
)

// TestHedgingAtRandom draws hedged calls, unary ones and server streams: how long the
// server takes for each attempt and what it says then, the options, what becomes of other calls to the
// target, and when the caller goes away. Times are drawn to the nanosecond, so that no two things happen at once except a failure and its
// retry without a backoff, and a model says what must come of the call, exactly: which attempts are sent, when and why, how
// each ends, what the caller gets and when, and what the budgets and the delay are asked and told.
//
// Reply, header, trailer and peer must be those of one attempt, and OnFinish run once.
// That nothing is left behind, and nothing hangs, the bubble sees to.
func TestHedgingAtRandom(t *testing.T) {
	seed := *hedgedSeed
	if seed == 0 {
		seed = uint64(time.Now().UnixNano())
	}
	t.Logf("seeds %d to %d", seed, seed+uint64(*hedgedSequences)-1)
	const perBubble = 50
	for done := 0; done < *hedgedSequences && !t.Failed(); done += perBubble {
		bubble(t, func(t *testing.T) {
			r := &randomHedges{}
			server := serveStreams(t, func(_ int, stream grpc.ServerStream) error { return r.call.serve(stream) })
			retrier := retrierOf(t, WithObserver(func(ctx context.Context, e Event) { r.events.observe(ctx, e) }),
				withRandom(func() float64 { return r.call.u }))
			cc := server.conn(t, append(retrier.DialOptions(), grpc.WithChainUnaryInterceptor(r.below))...)
			r.target = retrier.targets.Dialed(cc.Target(), cc.CanonicalTarget)
			for i := range min(perBubble, *hedgedSequences-done) {
				seed := seed + uint64(done+i)
				r.run(t, cc, seed)
				if t.Failed() {
					t.Fatalf("drawn was %+v\n-hedges.seed=%d -hedges.sequences=1 draws it again", *r.call, seed)
				}
			}
		})
	}
}

// forever is a time that does not come.
const forever = time.Duration(math.MaxInt64)

// A hedgedCall is what was drawn. Times are since its start; 0 means never, and no limit.
type hedgedCall struct {
	stream   bool
	asks     time.Duration // of a stream: when the application first receives
	attempts int
	delay    time.Duration
	timeout  time.Duration // of an attempt
	elapsed  time.Duration // MaxElapsed
	longest  time.Duration // MaxServerDelay
	patience time.Duration // 0 for none
	backoff  time.Duration // the first
	u        float64       // every random number
	deadline time.Duration
	cancel   time.Duration
	tokens   int // that the budget has at first
	hedges   int // that the budget of hedges has
	answers  []hedgedAnswer
	others   []otherCall // in the order of time
}

// An otherCall is answered, or fails, while the drawn one is under way.
type otherCall struct {
	at     time.Duration
	failed bool
}

// A hedgedAnswer is what the server does in one attempt.
type hedgedAnswer struct {
	after    time.Duration
	header   bool
	messages int // of a stream, before the status
	code     codes.Code
	pushback string
	timedOut bool          // the attempt timeout took its place
	deaf     time.Duration // of a unary call: what an interceptor below takes when the attempt has ended
}

// won says whether the answer is a success, as far as hedging goes.
func (a hedgedAnswer) won() bool { return a.code == codes.OK || a.messages > 0 }

func drawHedgedCall(draw *rand.Rand) *hedgedCall {
	oneIn := func(n int) bool { return draw.IntN(n) == 0 }
	sometimes := func(n int, longest time.Duration) time.Duration {
		if oneIn(n) {
			return drawTime(draw, longest)
		}
		return 0
	}
	c := &hedgedCall{
		stream:   oneIn(2),
		attempts: 2 + draw.IntN(4),
		delay:    sometimes(2, 2*second) + sometimes(2, second),
		timeout:  sometimes(4, 4*second),
		elapsed:  sometimes(6, 3*second),
		longest:  sometimes(4, 2*second),
		patience: []time.Duration{0, 10 * second, drawTime(draw, 4*second)}[draw.IntN(3)],
		backoff:  []time.Duration{0, drawTime(draw, second), drawTime(draw, second), drawTime(draw, second)}[draw.IntN(4)],
		u:        []float64{0, draw.Float64()}[draw.IntN(2)],
		deadline: sometimes(4, 6*second),
		cancel:   sometimes(6, 6*second),
		tokens:   []int{0, 1, 2, 9, 9, 9}[draw.IntN(6)],
		hedges:   []int{0, 1, 2, 9, 9, 9}[draw.IntN(6)],
	}
	for at := drawTime(draw, 2*second); oneIn(2); at += drawTime(draw, 2*second) {
		c.others = append(c.others, otherCall{at, !oneIn(3)})
	}
	deaf := !c.stream && oneIn(3)
	for range c.attempts {
		a := hedgedAnswer{after: drawTime(draw, 4*second), header: oneIn(3), code: []codes.Code{codes.OK, codes.OK,
			codes.Unavailable, codes.Unavailable, codes.Unavailable, codes.ResourceExhausted, codes.Internal}[draw.IntN(7)]}
		switch draw.IntN(8) {
		case 0:
			a.after += time.Hour
		case 1:
			a.after = 1 + a.after/1000
		}
		if a.code != codes.OK && oneIn(3) {
			a.pushback = strconv.Itoa([]int{-1, 0, draw.IntN(4000)}[draw.IntN(3)])
		}
		if c.stream && (a.code == codes.OK || oneIn(4)) {
			a.messages = draw.IntN(3)
		}
		if deaf {
			a.deaf = drawTime(draw, second)
		}
		c.answers = append(c.answers, a)
	}
	if c.stream && c.delay > 0 && oneIn(3) {
		c.asks = drawTime(draw, second)
		for _, end := range []*time.Duration{&c.timeout, &c.deadline, &c.cancel} {
			if *end > 0 {
				*end += c.asks
			}
		}
	}
	return c
}

func drawTime(draw *rand.Rand, longest time.Duration) time.Duration {
	return time.Duration(1 + draw.Int64N(int64(longest)))
}

// A hedgeModel plays a call, one thing after the other. It knows the rules, and nothing of
// goroutines, contexts and timers.
type hedgeModel struct {
	*hedgedCall
	now      time.Duration
	due      time.Duration // the next attempt
	own      modelBudget
	hedging  modelBudget
	decided  bool          // on the next attempt
	next     sentAttempt   // as decided on
	later    time.Duration // by which a hedge was put off last
	pushed   time.Duration // no attempt before this, as a server has asked
	replaced int           // the overdue attempt that the next one replaces; 0 for none
	stopped  error         // no attempt may follow, because of that
	retry    int           // of the backoff
	trouble  time.Duration // the call's first failure; never before that
	target   modelTarget
	heard    int // of other calls
	failures int
	last     int        // the number of the attempt that failed last
	said     codes.Code // by a server, last
	speaker  int        // the attempt that said it
	over     bool
	tie      bool // two things happened at once: anything may come of it

	sent   []sentAttempt
	winner int // 0 for none
	shown  int // the attempt whose header and trailer the caller sees, 0 for nobody's
	gone   bool
	code   codes.Code
	reason error // of the *Error, nil if the failure is gRPC's own
	told   string
	end    time.Duration // of the call
}

type modelBudget struct {
	left, asked int
	returned    int
}

func (b *modelBudget) withdraw() bool {
	b.asked++
	if b.left == 0 {
		return false
	}
	b.left--
	return true
}

// A modelTarget is what is known about the target.
type modelTarget struct {
	failing       bool
	since, latest time.Duration
	lasts         time.Duration
	answers       int
}

func (t *modelTarget) fail(now, patience time.Duration) {
	if !t.isFailing(now) {
		t.since = now
	}
	t.failing, t.latest, t.lasts = true, now, patience
}

func (t *modelTarget) isFailing(now time.Duration) bool { return t.failing && now-t.latest <= t.lasts }

func (t *modelTarget) answer() {
	if t.failing {
		t.failing = false
		t.answers++
	}
}

type sentAttempt struct {
	at      time.Duration
	hedge   bool
	wait    time.Duration
	source  WaitSource
	repeats int
	payer   *modelBudget // nil for the first

	from, since time.Duration // the wait's beginning, and that of its latest repetition
	answers     int           // the target's by then
	retryBefore int           // the model's retry before it was decided on

	answer  time.Duration // when there is one
	overdue time.Duration // when the attempt timeout asks
	ends    time.Duration // when it does
	late    bool          // by the attempt timeout
	cut     bool          // by the caller, or by another that was decisive
	result  string        // lost, failed or won; empty while it is under way
	heard   Result        // by the budgets
}

// policyBackoff is the call's backoff: it starts at c.backoff and doubles; 0 stays 0.
func (c *hedgedCall) policyBackoff() Backoff {
	if c.backoff == 0 {
		return Constant(0)
	}
	return Exponential{Base: c.backoff, Max: time.Hour, Multiplier: 2, Jitter: NoJitter}
}

func (c *hedgedCall) model() *hedgeModel {
	m := &hedgeModel{hedgedCall: c, own: modelBudget{left: c.tokens}, hedging: modelBudget{left: c.hedges}, trouble: forever}
	m.send(sentAttempt{})
	m.now, m.due = c.asks, c.asks+c.delay
	m.sent[0].ends = max(m.sent[0].ends, c.asks)
	if first := &m.sent[0]; first.overdue != forever {
		first.overdue += c.asks // a stream's timeout counts while the application waits
	}
	for !m.over {
		m.step()
	}
	m.leave()
	m.cut()
	m.end = m.now
	for i := range m.sent {
		if a := &m.sent[i]; a.result == "" {
			a.result, a.heard = "lost", Ignored
			if m.gone && (a.cut || a.late || m.answers[i].code != codes.OK) { // the caller has ended it, too
				a.result = "failed"
			}
			m.end = max(m.end, a.ends)
		}
	}
	switch {
	case m.winner == 1:
		m.told = m.now.String()
	case m.winner > 1 && m.sent[0].result == "lost":
		m.told = m.sent[0].ends.String() + " lost"
	}
	return m
}

// cut cancels what is under way.
func (m *hedgeModel) cut() {
	for i := range m.sent {
		if a := &m.sent[i]; a.result == "" && m.now < a.answer {
			a.answer, a.ends, a.cut, a.late = m.now, m.now+m.answers[i].deaf, true, false
		}
	}
}

// send sends an attempt now.
func (m *hedgeModel) send(a sentAttempt) {
	a.at, a.hedge = m.now, a.source == waitHedgeDelay
	number, answer := len(m.sent)+1, m.answers[len(m.sent)]
	a.answer, a.overdue = m.now+answer.after, forever
	if m.timeout > 0 && (m.deadline == 0 || number < m.attempts) {
		a.overdue = m.now + m.timeout
	}
	a.ends = a.answer + answer.deaf
	m.sent = append(m.sent, a)
	m.decided, m.due = false, forever
	if number < m.attempts {
		m.due = max(m.now+m.delay, m.pushed)
	}
}

// slowest is the attempt whose timeout asks next, 0 if none does. While one is decided on, none does.
func (m *hedgeModel) slowest() (number int) {
	if m.decided {
		return 0
	}
	for i, a := range m.sent {
		if a.result == "" && a.overdue != forever && (number == 0 || a.overdue < m.sent[number-1].overdue) {
			number = i + 1
		}
	}
	return number
}

// isOverdue is what happens when an attempt has reached its timeout: another one may take its place
// later. Without a deadline, it ends if none may, because nothing else would end it.
func (m *hedgeModel) isOverdue(number int) {
	m.sent[number-1].overdue = forever
	if m.gone {
		return
	}
	m.replaced = number
	if m.again(hedgedAnswer{code: codes.DeadlineExceeded, timedOut: true}) == nil {
		m.noteFailure(0)
		m.goOn()
		return
	}
	m.replaced = 0
	m.letRun(number)
}

// letRun lets an overdue attempt go on to the deadline.
func (m *hedgeModel) letRun(number int) {
	if m.deadline == 0 {
		m.cutOverdue(number)
	}
}

// cutOverdue ends an attempt because of its timeout.
func (m *hedgeModel) cutOverdue(number int) {
	if a := &m.sent[number-1]; m.now < a.answer {
		a.answer, a.ends, a.late = m.now, m.now+m.answers[number-1].deaf, true
	}
}

// noteFailure is about an attempt that took so long.
func (m *hedgeModel) noteFailure(took time.Duration) {
	m.target.fail(m.now, m.patience)
	if m.trouble = min(m.trouble, m.now); took > max(m.patience, 10*second) {
		m.trouble = m.now
	}
}

// isOpen says whether an attempt is in flight.
func (m *hedgeModel) isOpen() bool { return m.earliest() > 0 }

// payer is the budget that pays for an attempt sent now.
func (m *hedgeModel) payer() *modelBudget {
	if m.isOpen() && m.replaced == 0 {
		return &m.hedging
	}
	return &m.own
}

// earliest is the attempt that ends next, 0 if none is under way.
func (m *hedgeModel) earliest() (number int) {
	for i, a := range m.sent {
		if a.result == "" && (number == 0 || a.ends < m.sent[number-1].ends) {
			number = i + 1
		}
	}
	return number
}

// step plays what comes next.
func (m *hedgeModel) step() {
	first, ends := m.earliest(), forever
	if first > 0 {
		ends = m.sent[first-1].ends
	}
	goes := forever
	if !m.gone {
		goes = min(cmp.Or(m.cancel, forever), cmp.Or(m.deadline, forever))
	}
	slowest, overdue := m.slowest(), forever
	if slowest > 0 {
		overdue = m.sent[slowest-1].overdue
		for i, a := range m.sent {
			m.tie = m.tie || a.result == "" && a.overdue == overdue && i != slowest-1
		}
	}
	others := forever
	if m.heard < len(m.others) {
		others = m.others[m.heard].at
	}
	m.tie = m.tie || others != forever && (others == goes || others == ends || others == overdue || others == m.due)
	m.tie = m.tie || ends == m.due && ends < goes || overdue != forever && (overdue == ends || overdue == m.due)
	switch m.now = max(m.now, min(goes, ends, overdue, others, m.due)); {
	case goes <= m.now:
		m.goes()
	case others <= m.now:
		if m.others[m.heard].failed {
			m.target.fail(others, m.patience) // maybe before the application has asked
		} else {
			m.target.answer()
		}
		m.heard++
	case overdue <= m.now:
		m.isOverdue(slowest)
	case ends <= m.now:
		m.ended(first)
	default:
		m.isDue()
	}
}

// goes is what happens when the caller goes away.
func (m *hedgeModel) goes() {
	m.gone = true
	m.leave()
	m.cut()
	if m.earliest() == 0 {
		m.finish(nil)
	}
}

// finish ends the call because of reason, or the caller.
func (m *hedgeModel) finish(reason error) {
	m.over, m.code, m.reason = true, m.said, reason
	if m.last > 0 {
		if last := m.sent[m.last-1]; !last.late {
			m.shown = m.last
		} else if m.said == codes.OK { // nobody said anything
			m.code = codes.DeadlineExceeded
		} else {
			m.shown = m.speaker
		}
	}
	switch {
	case !m.gone:
	case cmp.Or(m.cancel, forever) < cmp.Or(m.deadline, forever):
		m.code, m.reason = codes.Canceled, context.Canceled
	default:
		m.code, m.reason = codes.DeadlineExceeded, context.DeadlineExceeded
	}
}

func (m *hedgeModel) isDue() {
	switch {
	case m.decided:
		m.retryIsDue()
	case m.elapsed > 0 && m.now >= m.elapsed:
		m.due = forever
	case !m.hedging.withdraw():
		m.putOff()
	default:
		m.send(sentAttempt{wait: m.delay, source: waitHedgeDelay, payer: &m.hedging})
	}
}

func (m *hedgeModel) putOff() {
	m.later = max(2*m.later, m.delay, time.Millisecond)
	m.due = max(m.now+m.later, m.pushed)
}

// retryIsDue: a retry that would learn nothing is not sent, and only an absent target is waited for.
func (m *hedgeModel) retryIsDue() {
	if reason := m.tooLate(0); reason != nil { // a pushback has moved it
		if m.isOpen() {
			m.giveWay()
			return
		}
		m.leave()
		m.finish(reason)
		return
	}
	if m.next.payer != nil { // it replaces one that was cut, and was pushed back
		m.send(m.next)
		return
	}
	answered := m.target.answers != m.next.answers
	if m.patience > 0 && (m.next.source != WaitPushback || m.next.repeats > 0) && !answered && m.target.latest > m.next.since {
		m.waitAgain()
		return
	}
	payer := m.payer()
	switch {
	case payer.withdraw():
		m.next.payer = payer
		if m.replaced > 0 {
			m.due = forever
			m.cutOverdue(m.replaced)
			return
		}
		m.send(m.next)
	case m.isOpen():
		m.giveWay()
	case m.patience == 0 || answered:
		m.leave()
		m.finish(ErrBudgetExhausted)
	default:
		m.waitAgain()
	}
}

func (m *hedgeModel) waitAgain() {
	length := m.now - m.trouble
	if m.target.isFailing(m.now) {
		length = max(length, m.now-m.target.since)
	}
	wait := max(m.inTime(part(length, m.u)), 20*time.Millisecond)
	reason := m.tooLate(wait)
	if reason == nil && m.now+wait > m.patienceEnds() {
		reason = ErrTargetDown
	}
	switch {
	case reason == nil:
		m.next.since, m.next.answers = m.now, m.target.answers
		m.next.repeats++
		m.next.at = m.now + wait
		m.next.wait = m.next.at - m.next.from
		m.due = m.next.at
	case m.isOpen():
		m.giveWay()
	default:
		m.leave()
		m.finish(reason)
	}
}

// giveWay leaves the call to the attempts in flight.
func (m *hedgeModel) giveWay() {
	overdue := m.replaced
	m.retry = m.next.retryBefore
	m.leave()
	m.putOff()
	if overdue > 0 {
		m.letRun(overdue)
	}
}

func (m *hedgeModel) patienceEnds() time.Duration {
	since := min(m.now, m.trouble)
	if m.target.isFailing(m.now) {
		since = min(since, m.target.since)
	}
	return since + m.patience
}

// tooLate says why no attempt may start after a wait.
func (m *hedgeModel) tooLate(wait time.Duration) error {
	switch {
	case m.deadline > 0 && m.now+wait >= m.deadline:
		return ErrDeadline
	case m.elapsed > 0 && m.now+wait >= m.elapsed:
		return ErrMaxElapsed
	}
	return nil
}

// inTime is a wait for the target, or a part of the time that is left.
func (m *hedgeModel) inTime(wait time.Duration) time.Duration {
	left := min(cmp.Or(m.deadline, forever), cmp.Or(m.elapsed, forever)) - m.now
	if wait < left {
		return wait
	}
	return part(left, m.u)
}

// leave gives up the attempt that was decided on. If that was paid for, its token is returned.
func (m *hedgeModel) leave() {
	if m.decided && m.next.payer != nil {
		m.next.payer.left++
		m.next.payer.returned++
	}
	m.decided, m.due, m.replaced = false, forever, 0
}

func (m *hedgeModel) ended(number int) {
	a, answer := &m.sent[number-1], m.answers[number-1]
	switch a.cut = a.cut || a.late && m.gone; {
	case a.cut:
		answer, a.late = hedgedAnswer{code: codes.Canceled}, false
	case a.late:
		answer = hedgedAnswer{code: codes.DeadlineExceeded, timedOut: true}
	}
	retryable := a.late || answer.code == codes.Unavailable || answer.code == codes.ResourceExhausted
	stop := answer.pushback == "-1"
	switch {
	case answer.code == codes.OK:
		a.result, a.heard = "won", Succeeded
	case retryable || stop:
		a.result, a.heard = "failed", Failed
	default:
		a.result, a.heard = "failed", Ignored
	}
	if answer.won() {
		m.over, m.winner, m.shown, m.code, m.gone = true, number, number, answer.code, false
		m.leave()
		return
	}
	m.failures++
	m.last = number
	if !a.late && !a.cut {
		m.said, m.speaker = answer.code, number
	}
	if m.gone {
		m.finish(nil)
		if m.failures == 1 && !retryable && !a.cut { // never one to retry
			m.code, m.reason = answer.code, nil
		}
		return
	}
	if m.replaced == number {
		m.replaced = 0
		if a.late {
			if reason := m.tooLate(max(0, m.next.at-m.now)); reason != nil { // it took its time to end
				m.stop(reason, false)
			} else {
				m.goOn()
			}
			return
		}
		m.retry = m.next.retryBefore // its own failure counts
		m.leave()
	}
	m.failed(answer, retryable, m.now-a.at)
}

// failed says what follows a failure.
func (m *hedgeModel) failed(answer hedgedAnswer, retryable bool, took time.Duration) {
	ms, err := strconv.Atoi(answer.pushback)
	wait := time.Duration(ms) * time.Millisecond
	if err == nil && ms >= 0 {
		m.pushed = m.now + wait
		if m.decided && m.next.at < m.pushed {
			m.next.at, m.next.source = m.pushed, WaitPushback
			m.next.wait = m.next.at - m.next.from
		}
		if m.due != forever {
			m.due = max(m.due, m.pushed)
		}
	}
	if retryable {
		m.noteFailure(took)
	}
	if m.decided && !m.isOpen() { // when others were in flight; it may be paid for
		m.retry = m.next.retryBefore
		m.leave()
	}
	switch {
	case ms < 0:
		m.stop(ErrPushback, !retryable)
	case !retryable:
		m.stop(ErrNotRetryable, true)
	case m.isOpen() && m.longest > 0 && wait > m.longest:
		m.stop(ErrPushback, false)
	case m.isOpen():
		if m.due == forever && !m.decided && m.stopped == nil && len(m.sent) < m.attempts {
			m.putOff()
		}
	default:
		if reason := m.again(answer); reason != nil {
			m.stop(reason, false)
		} else {
			m.goOn()
		}
	}
	if m.over && m.failures == 1 && !retryable {
		m.code, m.reason = answer.code, nil
	}
}

// goOn sends the next attempt when its time has come.
func (m *hedgeModel) goOn() {
	if m.due = m.next.at; m.now >= m.due {
		m.retryIsDue()
	}
}

// stop rules out further attempts because of reason, unless that may pass. The call is over if nothing is
// in flight.
func (m *hedgeModel) stop(reason error, fatal bool) {
	if fatal || reason != ErrBudgetExhausted && reason != ErrAttemptsExhausted {
		overdue := m.replaced
		m.leave()
		if m.stopped = reason; overdue > 0 {
			m.letRun(overdue) // nothing replaces it
		}
	}
	if fatal || !m.isOpen() && !m.decided {
		m.finish(reason)
	}
}

// again decides on the attempt that follows a failure, or says why there is none.
func (m *hedgeModel) again(a hedgedAnswer) (reason error) {
	next := sentAttempt{source: WaitBackoff}
	ms, err := strconv.Atoi(a.pushback)
	switch {
	case m.stopped != nil:
		return m.stopped
	case len(m.sent) == m.attempts:
		return ErrAttemptsExhausted
	case err == nil:
		next.wait, next.source = time.Duration(ms)*time.Millisecond, WaitPushback
		if m.longest > 0 && next.wait > m.longest {
			return ErrPushback
		}
	case m.pushed > m.now:
		next.wait, next.source = m.pushed-m.now, WaitPushback
	default:
		next.wait = m.backoff << m.retry
	}
	if reason := m.tooLate(next.wait); reason != nil {
		return reason
	}
	if next.source == WaitBackoff && m.patience > 0 && m.target.isFailing(m.now) {
		next.wait = max(next.wait, m.inTime(part(m.now-m.target.since, m.u)))
	}
	switch {
	case (!a.timedOut && m.patience == 0 || a.timedOut && m.deadline == 0) && m.payer().left == 0:
		return ErrBudgetExhausted
	case m.patience > 0 && next.source == WaitBackoff && m.now+next.wait > m.patienceEnds():
		return ErrTargetDown
	}
	next.from, next.since, next.answers, next.retryBefore = m.now, m.now, m.target.answers, m.retry
	next.at = m.now + next.wait
	if m.retry++; next.source == WaitPushback {
		m.retry, m.pushed = 0, next.at
	}
	m.decided, m.next = true, next
	return nil
}

// serve plays the server in one attempt.
func (c *hedgedCall) serve(stream grpc.ServerStream) error {
	number := PreviousAttempts(stream.Context()) + 1
	a, text := c.answers[number-1], strconv.Itoa(number)
	var m echov1.EchoRequest
	if err := stream.RecvMsg(&m); err != nil {
		return err
	}
	if !elapsed(a.after, stream.Context().Done()) {
		return status.FromContextError(stream.Context().Err()).Err()
	}
	if a.header {
		if err := stream.SendHeader(metadata.Pairs("attempt", text)); err != nil {
			return err
		}
	}
	stream.SetTrailer(metadata.Pairs("attempt", text))
	if a.pushback != "" {
		stream.SetTrailer(metadata.Pairs(pushbackKey, a.pushback))
	}
	messages := a.messages
	if !c.stream && a.code == codes.OK {
		messages = 1
	}
	for i := range messages {
		if err := stream.SendMsg(&echov1.EchoResponse{Message: fmt.Sprintf("%d/%d", number, i)}); err != nil {
			return err
		}
	}
	if a.code != codes.OK {
		return status.Error(a.code, "attempt "+text)
	}
	return nil
}

// randomHedges is the state of one call after the other.
type randomHedges struct {
	call   *hedgedCall
	events *hedgeEvents
	target *target
}

// below is an interceptor that takes its time.
func (r *randomHedges) below(
	ctx context.Context, method string, req, reply any, cc *grpc.ClientConn, invoker grpc.UnaryInvoker, opts ...grpc.CallOption,
) error {
	err := invoker(ctx, method, req, reply, cc, opts...)
	a, _ := AttemptFromContext(ctx)
	time.Sleep(r.call.answers[a.Number-1].deaf)
	return err
}

func (r *randomHedges) run(t *testing.T, cc *grpc.ClientConn, seed uint64) {
	draw := rand.New(rand.NewPCG(seed, 0))
	c := drawHedgedCall(draw)
	want := c.model()
	for want.tie {
		c = drawHedgedCall(draw)
		want = c.model()
	}
	r.call, r.events = c, &hedgeEvents{}

	// Without this a call that hangs would go on to the end of virtual time.
	defer time.AfterFunc(24*time.Hour, func() { panic(fmt.Sprintf("seed %d hangs", seed)) }).Stop()
	r.target.answer(never) // earlier calls are forgotten
	budget, hedges, delay := &purse{tokens{left: c.tokens}}, &purse{tokens{left: c.hedges}}, &recordedDelay{HedgeDelay: HedgeAfter(c.delay)}
	got := &hedgedResult{}
	opts := []grpc.CallOption{WithPolicy(Policy{MaxAttempts: c.attempts, Hedging: &Hedging{Budget: hedges, Delay: delay}}),
		WithBudget(budget), WithAttemptTimeout(c.timeout),
		WithBackoff(c.policyBackoff()), WithPatience(c.patience),
		WithMaxElapsed(c.elapsed), WithMaxServerDelay(c.longest), grpc.Header(&got.header),
		grpc.Trailer(&got.trailer), grpc.Peer(&got.peer), grpc.OnFinish(func(error) { got.finished++ })}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	if c.deadline > 0 {
		ctx, cancel = context.WithTimeout(ctx, c.deadline)
		defer cancel()
	}
	if c.cancel > 0 {
		defer time.AfterFunc(c.cancel, cancel).Stop()
	}
	for _, other := range c.others {
		defer time.AfterFunc(other.at, func() {
			if other.failed {
				r.target.fail(instantNow(), c.patience)
			} else {
				r.target.answer(instantNow())
			}
		}).Stop()
	}
	start := time.Now()
	if c.stream {
		got.receive(t, ctx, cc, c, draw, opts)
	} else {
		reply := &echov1.EchoResponse{Message: "old", Payload: []byte("old")}
		got.err = cc.Invoke(ctx, "/random/Echo", request(), reply, opts...)
		got.at = time.Now()
		if got.err == nil && len(reply.GetPayload()) == 0 {
			got.messages = []string{reply.GetMessage()}
		}
	}
	want.check(t, got, got.at.Sub(start))
	r.events.check(t, got.err)
	if waiting := r.target.waiting.Load(); waiting != 0 {
		t.Errorf("%d calls still wait for the target", waiting)
	}
	want.checkAttempts(t, r.events.events, start)
	want.checkAccounts(t, budget, hedges, delay)
	cancel()
	synctest.Wait() // the server's attempts end
}

// A hedgedResult is what the caller sees of a call.
type hedgedResult struct {
	messages        []string
	err             error
	at              time.Time // of a stream: of the first message, or the end
	header, trailer metadata.MD
	peer            peer.Peer
	finished        int
}

// receive plays the application of a stream. A second goroutine uses the stream meanwhile.
func (r *hedgedResult) receive(
	t *testing.T, ctx context.Context, cc *grpc.ClientConn, c *hedgedCall, draw *rand.Rand, opts []grpc.CallOption,
) {
	stream, err := cc.NewStream(ctx, serverStream, "/random/Expand", opts...)
	if err != nil {
		t.Fatalf("NewStream: %v", err)
	}
	if err := stream.SendMsg(request()); err != nil {
		t.Fatalf("SendMsg: %v", err)
	}
	if err := stream.CloseSend(); err != nil {
		t.Fatalf("CloseSend: %v", err)
	}
	time.Sleep(c.asks)
	var group sync.WaitGroup
	defer group.Wait()
	group.Go(func() {
		time.Sleep(drawTime(draw, 4*second))
		switch draw.IntN(5) { // not Header, which makes the attempt win whose headers it returns
		case 1:
			stream.Context()
		case 2:
			stream.Trailer()
		case 3:
			stream.CloseSend()
		}
	})
	m := &echov1.EchoResponse{Message: "old", Payload: []byte("old")}
	for r.err == nil {
		r.err = stream.RecvMsg(m)
		if r.at.IsZero() {
			r.at = time.Now()
		}
		if r.err == nil {
			r.messages = append(r.messages, m.GetMessage()+string(m.GetPayload()))
		}
	}
	if r.err == io.EOF {
		r.err = nil
	}
}

// check compares what the caller sees.
func (m *hedgeModel) check(t *testing.T, got *hedgedResult, at time.Duration) {
	var messages []string
	if m.winner > 0 {
		for i := range m.answers[m.winner-1].messages {
			messages = append(messages, fmt.Sprintf("%d/%d", m.winner, i))
		}
		if !m.stream {
			messages = []string{fmt.Sprintf("%d/0", m.winner)}
		}
	}
	if !slices.Equal(got.messages, messages) || status.Code(got.err) != m.code || at != m.end {
		t.Errorf("the call had %q and %v after %v, want %q and %v after %v", got.messages, got.err, at, messages, m.code, m.end)
	}
	var e *Error
	if errors.As(got.err, &e) != (m.reason != nil) || e != nil && e.Reason != m.reason {
		t.Errorf("the call returned %#v, want reason %v", got.err, m.reason)
	}
	if got.finished != 1 {
		t.Errorf("OnFinish ran %d times", got.finished)
	}
	if m.gone {
		return
	}
	header, trailer := "", ""
	if m.shown > 0 {
		trailer = strconv.Itoa(m.shown)
		if m.answers[m.shown-1].header {
			header = trailer
		}
	}
	if first(got.header["attempt"]) != header || first(got.trailer["attempt"]) != trailer || m.shown > 0 && got.peer.Addr == nil {
		t.Errorf("the caller sees header %v, trailer %v, peer %v, want those of attempt %d", got.header, got.trailer, got.peer.Addr, m.shown)
	}
}

// checkAttempts compares the attempts as the events have them.
func (m *hedgeModel) checkAttempts(t *testing.T, events []Event, start time.Time) {
	var results, wanted []string
	for _, a := range m.sent {
		wanted = append(wanted, a.result)
	}
	for _, e := range events {
		a := e.Attempt
		switch e.Kind {
		case AttemptStart:
			results = append(results, "")
			n := len(results)
			if n > len(m.sent) {
				continue
			}
			got := sentAttempt{at: a.Start.Sub(start), hedge: a.Hedge, wait: a.Wait, source: a.WaitSource, repeats: int(a.repeats)}
			want := m.sent[n-1]
			if want = (sentAttempt{at: want.at, hedge: want.hedge, wait: want.wait, source: want.source, repeats: want.repeats}); a.Number != n ||
				got != want {
				t.Errorf("attempt %d was sent as %+v, want %+v", a.Number, got, want)
			}
		case AttemptEnd:
			results[a.Number-1] = "failed"
			if a.Number > len(m.sent) {
				continue
			}
			if want := m.sent[a.Number-1]; a.Duration != want.ends-want.at {
				t.Errorf("attempt %d took %v, want %v", a.Number, a.Duration, want.ends-want.at)
			}
			if a.Err == nil {
				results[a.Number-1] = "won"
				if got := first(a.Trailer["attempt"]); got != strconv.Itoa(a.Number) || a.Peer == nil {
					t.Errorf("attempt %d succeeded with the trailer of %q and peer %v", a.Number, got, a.Peer)
				}
			} else if errors.Is(a.Err, ErrHedgeLost) {
				results[a.Number-1] = "lost"
			}
		}
	}
	if m.gone { // who notices first is not told
		slices.Sort(results)
		slices.Sort(wanted)
	}
	if !slices.Equal(results, wanted) {
		t.Errorf("attempts %q, want %q", results, wanted)
	}
}

// checkAccounts compares what budgets and delay were asked and told.
func (m *hedgeModel) checkAccounts(t *testing.T, own, hedges *purse, delay *recordedDelay) {
	m.own.check(t, "budget", own, m)
	m.hedging.check(t, "budget of hedges", hedges, m)
	told := fmt.Sprint(delay.told)
	if told != "["+m.told+"]" {
		t.Errorf("the delay was told %s, want [%s]", told, m.told)
	}
}

// check compares what a budget was asked and told. It sees attempts that it has not paid for as first ones.
func (b *modelBudget) check(t *testing.T, name string, got *purse, m *hedgeModel) {
	if len(got.asked) != b.asked || got.refunded != b.returned || got.left != b.left {
		t.Errorf("the %s was asked %d times, got %d back and has %d, want %d, %d and %d", name, len(got.asked), got.refunded, got.left, b.asked,
			b.returned, b.left)
	}
	var heard, want []string
	for i, a := range m.sent {
		o := Outcome{Attempt: 1, Hedge: a.hedge, Result: a.heard}
		if a.payer == b {
			o.Attempt = i + 1
		}
		want = append(want, fmt.Sprint(o))
	}
	for _, o := range got.heard {
		o.late = false // has a test of its own
		heard = append(heard, fmt.Sprint(o))
	}
	slices.Sort(heard)
	slices.Sort(want)
	if !slices.Equal(heard, want) {
		t.Errorf("the %s heard %v, want %v", name, heard, want)
	}
}

// A purse has tokens, and knows how many.
type purse struct{ tokens }

func (p *purse) Balance(time.Time) float64 {
	p.mu.Lock()
	defer p.mu.Unlock()
	return float64(p.left)
}
