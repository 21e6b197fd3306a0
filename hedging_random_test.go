package grpcretry

import (
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
	hedgedSeed      = flag.Uint64("hedges.seed", 0, "the first seed of TestHedgingAtRandom, 0 for one drawn from the clock")
)

// TestHedgingAtRandom draws hedged calls, unary ones and server streams: how long the
// server takes for each attempt and what it says then, the options, and when the caller goes
// away. Times are drawn to the nanosecond, so that no two things happen at once, and a
// model says what must come of the call, exactly: which attempts are sent, when and why, how
// each ends, what the caller gets and when, and what budget and delay are asked and told.
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
			cc := server.conn(t, append(DialOptions(WithObserver(func(ctx context.Context, e Event) { r.events.observe(ctx, e) })),
				grpc.WithChainUnaryInterceptor(r.below))...)
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

// A hedgedCall is what was drawn. Times are since its start; 0 means never, and no limit.
type hedgedCall struct {
	stream   bool
	asks     time.Duration // of a stream: when the application first receives
	attempts int
	delay    time.Duration
	timeout  time.Duration // of an attempt
	elapsed  time.Duration // MaxElapsed
	patience time.Duration // MaxServerDelay
	deadline time.Duration
	cancel   time.Duration
	commit   bool // WithCommitOnHeaders
	tokens   int  // that the budget has at first
	answers  []hedgedAnswer
}

// A hedgedAnswer is what the server does in one attempt.
type hedgedAnswer struct {
	after    time.Duration
	header   bool
	messages int // of a stream, before the status
	code     codes.Code
	pushback string
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
		patience: sometimes(4, 2*second),
		deadline: sometimes(4, 6*second),
		cancel:   sometimes(6, 6*second),
		commit:   oneIn(8),
		tokens:   []int{0, 1, 2, 9, 9, 9}[draw.IntN(6)],
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
	left     int           // tokens
	paid     bool          // it is paid for, as next says
	next     sentAttempt
	later    time.Duration // by which a hedge was put off last
	pushed   time.Duration // no attempt before this, as a server has asked
	replaced int           // the attempt that its timeout has cut, and that is decided about; 0 for none
	refusal  error         // why no other takes its place; nil if one does
	stopped  error         // no attempt may follow, because of that
	failures int
	said     codes.Code // by a server, last
	over     bool
	tie      bool // two things happened at once: anything may come of it

	sent   []sentAttempt
	winner int // 0 for none
	shown  int // the attempt whose header and trailer the caller sees, 0 for nobody's
	gone   bool
	code   codes.Code
	reason error // of the *Error, nil if the failure is gRPC's own
	asked  int   // how often the budget was
	back   int   // what it got back
	told   string
	end    time.Duration // of the call
}

type sentAttempt struct {
	at     time.Duration
	hedge  bool
	wait   time.Duration
	source WaitSource

	answer  time.Duration // when there is one
	overdue time.Duration // when the attempt timeout asks
	ends    time.Duration // when it does
	late    bool          // by the attempt timeout
	cut     bool          // by the caller, or by another that was decisive
	result  string        // lost, failed or won; empty while it is under way
	heard   Result        // by the budget
}

const never = time.Duration(math.MaxInt64)

func (c *hedgedCall) model() *hedgeModel {
	m := &hedgeModel{hedgedCall: c, left: c.tokens}
	m.send(sentAttempt{})
	m.now, m.due = c.asks, c.asks+c.delay
	m.sent[0].ends = max(m.sent[0].ends, c.asks)
	for !m.over {
		m.step()
	}
	m.freeze(nil)
	m.cut()
	m.end = m.now
	for i := range m.sent {
		if a := &m.sent[i]; a.result == "" {
			a.result, a.heard = "lost", Ignored
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
	a.at, a.hedge = m.now, m.earliest() > 0
	number, answer := len(m.sent)+1, m.answers[len(m.sent)]
	a.answer, a.overdue = m.now+answer.after, never
	if m.timeout > 0 && (m.deadline == 0 || number < m.attempts) {
		a.overdue = m.now + m.timeout
	}
	a.ends = a.answer + answer.deaf
	m.sent = append(m.sent, a)
	m.paid, m.due = false, never
	if number < m.attempts {
		m.due = max(m.now+m.delay, m.pushed)
	}
}

// slowest is the attempt whose timeout asks next, 0 if none does.
func (m *hedgeModel) slowest() (number int) {
	for i, a := range m.sent {
		if a.result == "" && a.overdue != never && (number == 0 || a.overdue < m.sent[number-1].overdue) {
			number = i + 1
		}
	}
	return number
}

// isOverdue is what happens when an attempt has reached its timeout: it is cut if another one
// can take its place, or if nothing else would end it.
func (m *hedgeModel) isOverdue(number int) {
	a := &m.sent[number-1]
	a.overdue = never
	if m.gone {
		return
	}
	cut := m.deadline == 0
	if !m.paid && !m.commit { // whether headers have come is not known
		next, reason := m.judge(hedgedAnswer{code: codes.DeadlineExceeded}, true, false)
		switch {
		case reason == nil:
			next.at = m.now + next.wait
			m.paid, m.next, m.due, cut = true, next, never, true
			fallthrough
		case cut:
			m.replaced, m.refusal = number, reason
		}
	}
	if cut && m.now < a.answer {
		a.answer, a.ends, a.late = m.now, m.now+m.answers[number-1].deaf, true
	}
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
	first, ends := m.earliest(), never
	if first > 0 {
		ends = m.sent[first-1].ends
	}
	goes := never
	if !m.gone {
		goes = min(orDefault(m.cancel, never), orDefault(m.deadline, never))
	}
	slowest, overdue := m.slowest(), never
	if slowest > 0 {
		overdue = m.sent[slowest-1].overdue
		for i, a := range m.sent {
			m.tie = m.tie || a.result == "" && a.overdue == overdue && i != slowest-1
		}
	}
	m.tie = m.tie || ends == m.due && ends < goes || overdue != never && (overdue == ends || overdue == m.due)
	switch m.now = max(m.now, min(goes, ends, overdue, m.due)); {
	case goes <= m.now:
		m.goes()
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
	m.freeze(nil)
	m.cut()
	if m.earliest() == 0 {
		m.finish(nil)
	}
}

// finish ends the call because of reason, or the caller.
func (m *hedgeModel) finish(reason error) {
	m.over, m.code, m.reason = true, m.said, reason
	switch {
	case !m.gone:
	case orDefault(m.cancel, never) < orDefault(m.deadline, never):
		m.code, m.reason = codes.Canceled, context.Canceled
	default:
		m.code, m.reason = codes.DeadlineExceeded, context.DeadlineExceeded
	}
}

func (m *hedgeModel) isDue() {
	switch {
	case m.paid:
		m.send(m.next)
	case m.elapsed > 0 && m.now >= m.elapsed:
		m.due = never
	case !m.withdraw():
		m.later = max(2*m.later, m.delay, time.Millisecond)
		m.due = max(m.now+m.later, m.pushed)
	default:
		m.send(sentAttempt{wait: m.delay, source: waitHedgeDelay})
	}
}

func (m *hedgeModel) withdraw() bool {
	m.asked++
	if m.left == 0 {
		return false
	}
	m.left--
	return true
}

// freeze lets no attempt follow, because of reason.
func (m *hedgeModel) freeze(reason error) {
	m.stopped, m.due = reason, never
	if m.paid {
		m.paid = false
		m.left++
		m.back++
	}
}

func (m *hedgeModel) ended(number int) {
	a, answer := &m.sent[number-1], m.answers[number-1]
	switch a.cut = a.cut || a.late && m.gone; {
	case a.cut:
		answer, a.late = hedgedAnswer{code: codes.Canceled}, false
	case a.late:
		answer = hedgedAnswer{code: codes.DeadlineExceeded}
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
		return
	}
	m.failures++
	if !a.late && !a.cut {
		m.said = answer.code
	}
	if m.gone {
		m.finish(nil)
		if m.failures == 1 && !retryable && !a.cut { // never one to retry
			m.code, m.reason = answer.code, nil
		}
		return
	}
	committed := m.commit && answer.header
	if ms, err := strconv.Atoi(answer.pushback); err == nil && ms >= 0 {
		m.pushed = m.now + time.Duration(ms)*time.Millisecond
		if m.due != never {
			m.due = max(m.due, m.pushed)
		}
	}
	next, reason := m.next, m.refusal
	if left := max(0, next.at-m.now); reason == nil { // the attempt may have taken its time to end
		switch {
		case m.deadline > 0 && m.now+left >= m.deadline:
			reason = ErrDeadline
		case m.elapsed > 0 && m.now+left >= m.elapsed:
			reason = ErrMaxElapsed
		}
	}
	if !a.late || m.replaced != number || m.refusal == nil && !m.paid {
		next, reason = m.judge(answer, retryable, committed)
		next.at = m.now + next.wait
	}
	switch {
	case reason == nil && next.at > m.now:
		m.paid, m.next, m.due = true, next, next.at
	case reason == nil:
		m.send(next)
	case retryable && !committed && reason != ErrBudgetExhausted && reason != ErrAttemptsExhausted:
		m.freeze(reason)
		fallthrough
	default:
		if fatal := !retryable || committed; !fatal && (m.earliest() > 0 || m.paid) {
			return
		}
		m.finish(reason)
		if !a.late {
			m.shown = number
		}
		if m.said == codes.OK { // nobody said anything
			m.code = answer.code
		}
		if m.stream && committed || m.failures == 1 && !retryable {
			m.code, m.reason = answer.code, nil
		}
	}
}

// judge says which attempt follows a failure, or why none does.
func (m *hedgeModel) judge(a hedgedAnswer, retryable, committed bool) (next sentAttempt, reason error) {
	next.source = waitNonFatal
	if m.pushed > m.now {
		next.wait, next.source = m.pushed-m.now, WaitPushback
	}
	if ms, err := strconv.Atoi(a.pushback); err == nil {
		next.wait, next.source = time.Duration(ms)*time.Millisecond, WaitPushback
	}
	switch {
	case committed:
		reason = ErrCommitted
	case next.wait < 0:
		reason = ErrPushback
	case !retryable:
		reason = ErrNotRetryable
	case m.stopped != nil:
		reason = m.stopped
	case len(m.sent) == m.attempts:
		reason = ErrAttemptsExhausted
	case m.patience > 0 && next.wait > m.patience:
		reason = ErrPushback
	case m.deadline > 0 && m.now+next.wait >= m.deadline:
		reason = ErrDeadline
	case m.elapsed > 0 && m.now+next.wait >= m.elapsed:
		reason = ErrMaxElapsed
	case !m.paid && !m.withdraw():
		reason = ErrBudgetExhausted
	}
	return next, reason
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
}

// below is an interceptor that takes its time.
func (r *randomHedges) below(ctx context.Context, method string, req, reply any, cc *grpc.ClientConn, invoker grpc.UnaryInvoker, opts ...grpc.CallOption) error {
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
	budget, delay := &tokens{left: c.tokens}, &recordedDelay{HedgeDelay: HedgeAfter(c.delay)}
	got := &hedgedResult{}
	opts := []grpc.CallOption{WithHedging(Hedging{Budget: Unlimited, MaxAttempts: c.attempts, Delay: delay}), WithBudget(budget), WithAttemptTimeout(c.timeout),
		WithMaxElapsed(c.elapsed), WithMaxServerDelay(c.patience), WithCommitOnHeaders(c.commit), grpc.Header(&got.header),
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
	want.checkAttempts(t, r.events.events, start)
	want.checkAccounts(t, budget, delay)
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
func (r *hedgedResult) receive(t *testing.T, ctx context.Context, cc *grpc.ClientConn, c *hedgedCall, draw *rand.Rand, opts []grpc.CallOption) {
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
			got := sentAttempt{at: a.Start.Sub(start), hedge: a.Hedge, wait: a.Wait, source: a.WaitSource}
			want := m.sent[n-1]
			if want = (sentAttempt{at: want.at, hedge: want.hedge, wait: want.wait, source: want.source}); a.Number != n || got != want {
				t.Errorf("attempt %d was sent as %+v, want %+v", a.Number, got, want)
			}
		case AttemptEnd:
			results[a.Number-1] = "failed"
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

// checkAccounts compares what budget and delay were asked and told.
func (m *hedgeModel) checkAccounts(t *testing.T, budget *tokens, delay *recordedDelay) {
	if len(budget.asked) != m.asked || budget.refunded != m.back || budget.left != m.left {
		t.Errorf("the budget was asked %d times, got %d back and has %d, want %d, %d and %d",
			len(budget.asked), budget.refunded, budget.left, m.asked, m.back, m.left)
	}
	var heard, want []Outcome
	for i, a := range m.sent {
		want = append(want, Outcome{Attempt: i + 1, Hedge: a.hedge, Result: a.heard})
	}
	for _, o := range budget.heard {
		o.Late = false // has a test of its own
		heard = append(heard, o)
	}
	slices.SortFunc(heard, func(a, b Outcome) int { return a.Attempt - b.Attempt })
	if !slices.Equal(heard, want) {
		t.Errorf("the budget heard %v, want %v", heard, want)
	}
	told := fmt.Sprint(delay.told)
	if told != "["+m.told+"]" {
		t.Errorf("the delay was told %s, want [%s]", told, m.told)
	}
}
