package grpcretry

import (
	"context"
	"errors"
	"math"
	"slices"
	"testing"
	"time"

	"golang.org/x/time/rate"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"

	"github.com/grpcretry/grpcretry/internal/drive"
)

// FuzzPlan drives a Plan as its documentation says, by a script of bytes: settings first, then what
// happens to the call, and to other calls of the same target. It checks what holds for every call,
// retried or hedged: the number of attempts, the times at which they are sent, one decision for each
// failure, that each attempt is paid for by the right budget and reported once, that no retry is sent
// that could learn nothing, that no wait outlasts the patience, and that every call ends.
func FuzzPlan(f *testing.F) {
	f.Add([]byte{})
	f.Add([]byte("\x03\x00\x01\x00\x00\x00\x00\x00\x00" + "\x00\x00\x00\x03\x20\x00\x00\x01\x02")) // retries, then a success
	f.Add([]byte("\x05\x01\x00\x01\x01\x04\x00\x00\x00" + "\x03\x10\x03\x10\x00\x01\x08\x02\x01")) // hedges, a pushback, a success
	f.Add([]byte("\x03\x1c\x02\x02\x02\x08\x20\x40\x80" + "\x03\x20\x03\xff\x05\x00\x06\x03\xff")) // every limit, no connection
	f.Add([]byte("\x05\x0d\x00\x03\x01\x04\x10\x40\x80" + "\x03\x11\x03\x05\x05\x00\x00\x01\x10\x03\x20\x00\x00\x05"))
	const patient = "\x02\x00\x02\x00\x03\x00\x00\x00\x00" + "\x00\x00\x00\x80" + "\x03\x07\x07" // a failure, and most of the wait after it
	f.Add([]byte(patient + "\x09\x03\x0a\x0a\x02"))                                              // another call fails
	// another call is answered, and there is no token
	f.Add([]byte("\x02\x00\x02\x01" + patient[4:] + "\x08\x03\x0a\x0a\x01"))
	f.Add([]byte("\x02\x00\x02\x01" + patient[4:] + "\x03\x0a\x0a\x01\x03\x80\x01\x01")) // there is no token
	f.Add([]byte("\x02\x00\x02\x00\x04" + patient[5:] + "\x09\x03\xff\xff\x02"))         // patience ends
	f.Fuzz(func(t *testing.T, data []byte) {
		if len(data) > 500 {
			return
		}
		d := newPlanDriver(t, &byteScript{data})
		for !d.over && len(d.script.rest) > 0 {
			d.happens()
		}
		for n := 0; !d.over; n++ {
			if n > 200 {
				t.Fatalf("the call does not end: %d attempts in flight, due at %v", len(d.flying), d.since(d.plan.DueAt()))
			}
			d.goesOn()
		}
		d.checkTheEnd()
	})
}

// A byteScript is read byte by byte; after its end it has zeros.
type byteScript struct{ rest []byte }

func (s *byteScript) next() byte {
	if len(s.rest) == 0 {
		return 0
	}
	b := s.rest[0]
	s.rest = s.rest[1:]
	return b
}

// below returns a number in [0, n).
func (s *byteScript) below(n int) int { return int(s.next()) % n }

// A planDriver makes the attempts of a call in simulated time.
type planDriver struct {
	t      *testing.T
	script *byteScript
	plan   *drivenPlan
	now    time.Time
	ctx    *simulatedContext
	target *target
	idle   int // what was due since time last passed

	policy   Policy
	hedged   bool
	limit    int // of attempts
	retries  *accounts
	hedges   *accounts
	slots    Budget // a concurrency budget, or nil
	slotsAll float64
	generous bool // the budget never refuses

	flying     []*flight
	sent       int
	unsent     int       // reported as unsent
	fatal      bool      // the latest failure ends the call, whatever is in flight
	free       int       // the attempt that nobody paid for; 0 after it has reached no server
	trouble    time.Time // of the call's first retryable failure
	failed     time.Time // the target's latest retryable failure
	answered   time.Time // when another call to the target was answered last
	notBefore  time.Time // the newest pushback's
	forbidden  bool      // a server has said "do not retry", or named a wait that is too long
	connecting bool
	over       bool
}

// A flight is an attempt in flight.
type flight struct {
	Attempt
	overdue time.Time // zero for never
	cut     bool
	payer   *accounts // nil for none
}

// A simulatedContext ends at its deadline in simulated time, or by being cancelled.
type simulatedContext struct {
	context.Context
	deadline time.Time
	now      *time.Time
	err      error
}

func (c *simulatedContext) Deadline() (time.Time, bool) { return c.deadline, !c.deadline.IsZero() }

func (c *simulatedContext) Err() error {
	if c.err == nil && !c.deadline.IsZero() && !c.now.Before(c.deadline) {
		c.err = context.DeadlineExceeded
	}
	return c.err
}

// accounts are a budget that keeps books. The tokens that it holds were taken for attempts that have
// not ended.
type accounts struct {
	unlimited
	refuse          func() bool
	withdrawn, paid int // tokens taken, and reports of attempts that took one
	reported        int // all reports of attempts that were sent
	last            Outcome
	sent            func() int // attempts
	takenAfter      int        // the number of attempts sent before the latest token was taken; 0 after it was given back
}

func (a *accounts) held() int { return a.withdrawn - a.paid }

func (a *accounts) Withdraw(time.Time) bool {
	if a.refuse != nil && a.refuse() {
		return false
	}
	a.withdrawn++
	a.takenAfter = a.sent()
	return true
}

func (a *accounts) Deposit(o Outcome) {
	if o.Attempt > 1 {
		a.paid++
	}
	if o == returned && a.takenAfter == a.sent() { // another budget refuses
		a.takenAfter = 0
		return
	}
	if o.Result != Unsent || o.Attempt <= a.sent() {
		a.reported++
		a.last = o
	}
}

// newPlanDriver reads the settings and sends the first attempt.
func newPlanDriver(t *testing.T, script *byteScript) *planDriver {
	d := &planDriver{t: t, script: script, now: noon}
	sent := func() int { return int(d.plan.plan.made) }
	d.retries, d.hedges = &accounts{sent: sent}, &accounts{sent: sent}
	d.ctx = &simulatedContext{Context: context.Background(), now: &d.now}
	d.limit = 1 + script.below(6)
	flags := script.next()
	backoff := []Backoff{Constant(0), Constant(50 * time.Millisecond), Exponential{}, Decorrelated{}}[script.below(4)]
	kind := script.below(6)
	d.generous = kind == 0
	d.policy = Policy{
		MaxAttempts: d.limit,
		Backoff:     backoff,
		Codes:       []codes.Code{codes.Unavailable, codes.ResourceExhausted},
		Budget:      d.budget(kind, d.retries),
		Patience:    []time.Duration{0, -1, time.Millisecond, time.Hour, 2 * time.Second}[script.below(5)],
	}
	delay := script.next()
	timeout, elapsed, deadline := script.millis(), script.millis(), script.millis()
	if flags&1 != 0 && d.limit > 1 {
		d.hedged = flags&2 == 0
		d.policy.Hedging = &Hedging{Delay: HedgeAfter(time.Duration(delay) * time.Millisecond), AllMethodsAreSafe: true,
			Budget: d.budget(int(delay)%3, d.hedges)}
	}
	d.policy.UnsentOnly = flags&2 != 0
	if flags&4 != 0 {
		d.ctx.deadline = noon.Add(max(deadline, time.Millisecond))
	}
	if flags&8 != 0 {
		d.policy.AttemptTimeout = timeout
	}
	if flags&16 != 0 {
		d.policy.MaxElapsed = elapsed
	}
	d.policy.MaxServerDelay = []time.Duration{0, -1, time.Second, time.Millisecond}[flags>>6]
	r := retrierOf(t, WithPolicy(d.policy))
	d.policy = r.Policy(someMethod)
	t.Logf("policy %+v hedging %+v deadline %v", d.policy, d.policy.Hedging, d.since(d.ctx.deadline))
	d.plan = r.drive(d.ctx, someMethod, "catalog", noon)
	d.target = d.plan.plan.target
	d.send()
	return d
}

// millis returns up to 65 s.
func (s *byteScript) millis() time.Duration {
	return time.Duration(s.next()) * 256 * time.Millisecond
}

// budget returns a budget of one of several kinds, whose withdrawals a records. Each is a kind that may refuse.
func (d *planDriver) budget(kind int, a *accounts) Budget {
	other, err := Unlimited, error(nil)
	switch kind {
	case 1:
		a.refuse = func() bool { return d.script.next()&1 != 0 }
	case 2:
		if other, err = NewConcurrencyBudget(1 + d.script.below(2)); a == d.retries {
			d.slots, d.slotsAll = other, other.Balance(noon)
		}
	case 3:
		other, err = NewRatioBudget(RatioBudget{Ratio: 0.5, Reserve: 1, MinPerSecond: 1})
	case 4:
		other, err = NewThrottle(3, 0.5)
	case 5:
		other = NewRateBudget(rate.NewLimiter(2, 2))
	}
	if err != nil {
		d.t.Fatal(err)
	}
	other.Balance(noon)
	return AllBudgets(other, a)
}

// happens performs the next event of the script.
func (d *planDriver) happens() {
	switch event := d.script.below(10); {
	case event == 2:
		if f := d.some(); f != nil {
			d.succeed(f)
		}
	case event == 3 || event == 4:
		d.pass(time.Duration(d.script.next()) * time.Duration(d.script.next()) * time.Millisecond)
	case event == 5:
		if f := d.some(); f != nil {
			f.Unsent = true
			d.fail(f, errUnavailable)
		}
	case event == 6:
		if d.connecting {
			d.due()
		}
	case event == 7:
		if d.script.below(8) == 0 {
			d.ctx.err = context.Canceled
			d.contextEnds()
		}
	case event == 8:
		d.target.answer(instantOf(d.now))
		d.answered = d.now
	case event == 9:
		d.target.fail(instantOf(d.now), d.policy.Patience)
		d.failed = d.now
	default:
		if f := d.some(); f != nil {
			d.failSomehow(f)
		}
	}
}

// goesOn lets the call go on without a script, until it is over.
func (d *planDriver) goesOn() {
	if len(d.flying) == 0 {
		d.pass(max(0, d.plan.DueAt().Sub(d.now)))
		return
	}
	f := d.flying[0]
	if f.cut {
		d.fail(f, ErrAttemptTimeout)
		return
	}
	d.fail(f, errUnavailable)
}

func (d *planDriver) some() *flight {
	if len(d.flying) == 0 {
		return nil
	}
	return d.flying[d.script.below(len(d.flying))]
}

// A serverHint is what a server may say about the next attempt.
type serverHint struct {
	trailer []string
	info    time.Duration
	wait    time.Duration // that it means
	stop    bool
}

const aDecade = 10 * 365 * 24 * time.Hour

var serverHints = []serverHint{
	{}, {}, {trailer: []string{"0"}}, {trailer: []string{"7"}, wait: 7 * time.Millisecond},
	{trailer: []string{"1500"}, wait: 1500 * time.Millisecond},
	{trailer: []string{"2147483647"}, wait: math.MaxInt32 * time.Millisecond}, {trailer: []string{"-1"}, stop: true},
	{trailer: []string{"5", "5"}, stop: true},
	{info: 100 * time.Millisecond, wait: 100 * time.Millisecond}, {info: aDecade, wait: aDecade},
}

// failSomehow has an attempt fail as the script says.
func (d *planDriver) failSomehow(f *flight) {
	b := d.script.next()
	code := []codes.Code{codes.Unavailable, codes.ResourceExhausted, codes.Unavailable, codes.NotFound}[b&3]
	hint := serverHints[int(b>>2)%len(serverHints)]
	err := fail(code, "x").err
	if hint.info > 0 {
		err = fail(code, "x", retryInfoOf(hint.info)).err
	}
	if f.cut && b>>7 == 0 { // otherwise, its own failure was there in time
		hint, err = serverHint{}, ErrAttemptTimeout
	}
	if hint.trailer != nil {
		f.Trailer = metadata.MD{pushbackKey: hint.trailer}
	}
	if hint.stop || d.policy.MaxServerDelay >= 0 && hint.wait > d.policy.MaxServerDelay {
		d.forbidden = true
	}
	if hint.wait > 0 {
		d.notBefore = d.now.Add(hint.wait)
	} else if hint.trailer != nil && !hint.stop {
		d.notBefore = d.now
	}
	d.fail(f, err)
}

// fail reports the end of an attempt, and does what the drive.Step says.
func (d *planDriver) fail(f *flight, err error) {
	f.Err = err
	result := Failed
	switch {
	case f.Unsent:
		d.unsent++
		result = Unsent
	case f.Code() == codes.NotFound && !forbidsRetry(f.Trailer):
		result = Answered
	}
	judged := int(d.plan.plan.replaces) == f.Number && err == ErrAttemptTimeout // when it was overdue
	if f.Code() != codes.NotFound && !forbidsRetry(f.Trailer) && !judged {
		took := d.now.Sub(f.Start)
		if f.Unsent {
			took = 0
		}
		d.noteFailure(took)
	}
	step := d.ended(f, result, float64(d.script.next())/256)
	d.fatal = f.Code() == codes.NotFound || step.Reason == ErrMayHaveRun
	d.obey(step)
}

// noteFailure records the retryable failure of an attempt that a server had for took.
func (d *planDriver) noteFailure(took time.Duration) {
	d.failed = d.now
	if d.trouble.IsZero() || took > max(d.policy.Patience, 10*second) {
		d.trouble = d.now
	}
}

func (d *planDriver) succeed(f *flight) {
	if step := d.ended(f, Succeeded, 0); step != (drive.Step{End: true}) {
		d.t.Errorf("Ended = %+v after a success, want the end", step)
	}
	d.end()
}

// ended reports the end of an attempt. Each budget must hear of it once, and of a token from the one
// that paid.
func (d *planDriver) ended(f *flight, result Result, u float64) drive.Step {
	d.flying = slices.DeleteFunc(d.flying, func(other *flight) bool { return other == f })
	f.Duration = d.now.Sub(f.Start)
	if result == Unsent && d.free == f.Number {
		d.free = 0
	}
	before := [2]int{d.retries.reported, d.hedges.reported}
	step := d.plan.Ended(f.Attempt, d.now, u)
	for i, a := range []*accounts{d.retries, d.hedges} {
		if d.limit == 1 || a == d.hedges && !d.hedged {
			continue
		}
		o := a.last
		if a.reported != before[i]+1 || o.Result != result || o.Hedge != f.Hedge || (o.Attempt > 1) != (f.payer == a) {
			d.t.Errorf("the %s heard %d times of attempt %d (%v), paid for by the %s: %+v",
				d.nameOf(a), a.reported-before[i], f.Number, result, d.nameOf(f.payer), o)
		}
	}
	return step
}

func (d *planDriver) nameOf(a *accounts) string {
	return map[*accounts]string{nil: "nobody", d.retries: "budget", d.hedges: "budget of hedges"}[a]
}

// obey does what a drive.Step says.
func (d *planDriver) obey(step drive.Step) {
	d.t.Logf("%v: step %+v, due %v", d.since(d.now), step, d.since(d.plan.DueAt()))
	d.check(step)
	d.connecting = step.Connect
	switch {
	case step.Send:
		d.send()
	case step.End:
		d.end()
	case step.Cut != 0:
		d.cut(step)
	}
}

// check checks a step by itself.
func (d *planDriver) check(step drive.Step) {
	due, alone := d.plan.DueAt(), len(d.flying) == 0
	decisions := 0
	for _, is := range []bool{step.Send, step.Connect, step.End, step.Cut != 0} {
		if is {
			decisions++
		}
	}
	waits := decisions == 0 && step.Reason == nil || step.Connect
	switch {
	case decisions > 1, (step.Send || step.Connect) && step.Reason != nil, step.End && step.Reason == nil:
		d.t.Errorf("%+v is more than one decision", step)
	case decisions == 0 && step.Reason != nil && alone:
		d.t.Errorf("%+v does not end the call, although no attempt is in flight", step)
	case step.End && !alone && !d.fatal:
		d.t.Errorf("%+v ends the call, although %d attempts are in flight", step, len(d.flying))
	case waits && due.IsZero() && alone:
		d.t.Errorf("%+v waits for nothing", step)
	case !due.IsZero() && due.Before(d.now), waits && due.Equal(d.now) && !d.plan.isAskedAbout():
		d.t.Errorf("%+v is due %v ago", step, d.now.Sub(due))
	case waits && alone && d.isTooLate(due) && !step.Connect:
		d.t.Errorf("%+v waits until %v, when no attempt may start any more", step, d.since(due))
	case waits && alone && d.outlastsPatience(due):
		d.t.Errorf("%+v waits until %v, longer than the patience", step, d.since(due))
	case step.Send && !d.hedged && !alone:
		d.t.Errorf("%+v sends a second attempt of a call that is not hedged", step)
	}
	if !step.Send {
		d.checkTokens()
	}
}

// isTooLate reports whether no attempt may start at a time.
func (d *planDriver) isTooLate(at time.Time) bool {
	return d.policy.MaxElapsed > 0 && at.Sub(noon) >= d.policy.MaxElapsed || !d.ctx.deadline.IsZero() && !at.Before(d.ctx.deadline)
}

// outlastsPatience reports whether a wait until due is longer than the patience. The time that a server
// named, and the backoff after a connection, are waited for in any case.
func (d *planDriver) outlastsPatience(due time.Time) bool {
	next := &d.plan.plan.pending
	atAnyRate := next.source == WaitPushback || next.source == WaitRetryInfo || next.source == waitConnect && d.plan.plan.connecting == nil
	if d.policy.Patience < 0 || atAnyRate && next.repeats == 0 {
		return false
	}
	since := d.trouble
	if s := d.target.look(instantOf(d.now), d.policy.Patience).since; s != 0 && s < instantOf(since) {
		since = s.timeFrom(d.now)
	}
	return due.Sub(since) > d.policy.Patience
}

// learnsNothing reports whether a retry would only repeat what another attempt has found since the
// wait began.
func (d *planDriver) learnsNothing(waiting pending, paid bool) bool {
	named := waiting.repeats == 0 && (waiting.source == WaitPushback || waiting.source == WaitRetryInfo)
	return d.policy.Patience > 0 && !named && !paid && instantOf(d.failed) > waiting.since && instantOf(d.answered) < waiting.since
}

// checkTokens checks that each budget holds the tokens of the attempts in flight, and no other.
func (d *planDriver) checkTokens() {
	for _, a := range []*accounts{d.retries, d.hedges} {
		want := 0
		if payer := d.plan.plan.ledger.paidForNext; payer == retriesPay && a == d.retries || payer == hedgesPay && a == d.hedges {
			want++ // for the replacement of an attempt that was overdue
		}
		for _, f := range d.flying {
			if f.payer == a {
				want++
			}
		}
		if a.held() != want {
			d.t.Errorf("the %s holds %d tokens, want %d for %d attempts in flight", d.nameOf(a), a.held(), want, len(d.flying))
		}
	}
}

// send sends an attempt.
func (d *planDriver) send() {
	d.sent++
	payer := d.plan.plan.ledger.paidForNext
	a, timeout := d.plan.Sent(d.now)
	hedge := a.WaitSource == waitHedgeDelay
	wantTimeout := d.policy.AttemptTimeout
	if d.sent-d.unsent >= d.limit && !d.ctx.deadline.IsZero() {
		wantTimeout = 0 // the last attempt has all the time that is left
	}
	switch {
	case a.Number != d.sent || a.Hedge != hedge || !a.Start.Equal(d.now) || a.Wait < 0 || timeout != wantTimeout:
		d.t.Errorf("attempt %d is %+v, with a timeout of %v, want %v", d.sent, a, timeout, wantTimeout)
	case hedge && (len(d.flying) == 0 || payer == retriesPay) || !hedge && payer == hedgesPay:
		d.t.Errorf("attempt %d, sent beside %d others, is a hedge: %t, but paid for by %v", d.sent, len(d.flying), hedge, payer)
	case d.sent-d.unsent > d.limit:
		d.t.Errorf("attempt %d, of which %d were unsent, is more than %d", d.sent, d.unsent, d.limit)
	case d.sent == 1:
	case d.free > 0 && payer == nobodyPays:
		d.t.Errorf("attempt %d is paid for by %v", d.sent, payer)
	case d.forbidden:
		d.t.Errorf("attempt %d is sent although a server forbids it", d.sent)
	case d.now.Before(d.notBefore):
		d.t.Errorf("attempt %d is sent at %v, but a server has asked to wait until %v", d.sent, d.since(d.now), d.since(d.notBefore))
	case d.isTooLate(d.now):
		d.t.Errorf("attempt %d is sent at %v, after the deadline or MaxElapsed", d.sent, d.since(d.now))
	}
	d.t.Logf("%v: sent %d, hedge %v, timeout %v, due %v", d.since(d.now), a.Number, a.Hedge, timeout, d.since(d.plan.DueAt()))
	f := &flight{Attempt: a}
	switch {
	case payer == nobodyPays:
		d.free = a.Number
	case payer == hedgesPay:
		f.payer = d.hedges
	case payer == retriesPay:
		f.payer = d.retries
	}
	if timeout > 0 {
		f.overdue = d.now.Add(timeout)
	}
	d.flying = append(d.flying, f)
	d.checkTokens()
}

// pass lets time pass. What is due meanwhile is done in time.
func (d *planDriver) pass(length time.Duration) {
	until := d.now.Add(length)
	for !d.over {
		at, do := d.nextDue()
		if do == nil || at.After(until) {
			d.now = until
			d.idle = 0
			return
		}
		if d.idle++; at.After(d.now) {
			d.idle = 0
		}
		if d.idle > 50 {
			d.t.Fatalf("time does not pass any more at %v", d.since(d.now))
		}
		d.now = at
		do()
	}
}

// nextDue returns what happens next by itself, and when; nil if nothing does.
func (d *planDriver) nextDue() (at time.Time, do func()) {
	sooner := func(t time.Time, f func()) {
		if !t.IsZero() && (do == nil || t.Before(at)) {
			at, do = t, f
		}
	}
	sooner(d.ctx.deadline, d.contextEnds)
	for _, f := range d.flying {
		sooner(f.overdue, func() { d.overdue(f) })
	}
	sooner(d.plan.DueAt(), d.due)
	return at, do
}

func (d *planDriver) due() {
	d.fatal = false
	waiting, connecting := d.plan.plan.pending, d.plan.plan.connecting != nil
	paid := d.plan.plan.ledger.paidForNext != nobodyPays // it replaces an attempt that was cut
	if d.plan.isAskedAbout() {
		f := d.flying[slices.IndexFunc(d.flying, func(f *flight) bool { return f.Number == d.plan.overdue[0].Number })]
		d.judgeOverdue(f, func() drive.Step { return d.plan.Due(d.now) })
		return
	}
	step := d.plan.Due(d.now)
	switch {
	case !waiting.isDecided() || connecting:
	case (step.Send || step.Cut != 0 && d.plan.plan.pending.isDecided()) && d.learnsNothing(waiting, paid):
		d.t.Errorf("a retry is sent at %v, although another attempt has failed at %v", d.since(d.now), d.since(d.failed))
	case step == drive.Step{} && len(d.flying) == 0 && (d.policy.Patience < 0 || d.target.answers != waiting.answers):
		d.t.Errorf("a wait since %v is repeated at %v, for a target that has answered, or without patience",
			d.since(waiting.since.timeFrom(d.now)), d.since(d.now))
	case step == drive.Step{} && d.generous && instantOf(d.failed) <= waiting.since:
		d.t.Errorf("a wait since %v is repeated at %v, although nothing has happened", d.since(waiting.since.timeFrom(d.now)), d.since(d.now))
	}
	d.obey(step)
}

func (d *planDriver) overdue(f *flight) {
	f.overdue = time.Time{}
	f.Duration = d.now.Sub(f.Start)
	ask := func() drive.Step { return d.plan.Overdue(f.Attempt, d.now, float64(d.script.next())/256) }
	if !d.plan.plan.pending.isDecided() {
		d.judgeOverdue(f, ask)
	} else if step := ask(); step != (drive.Step{}) {
		d.t.Errorf("%+v for an overdue attempt while another is pending", step)
	}
}

// judgeOverdue checks what the plan says about an overdue attempt.
func (d *planDriver) judgeOverdue(f *flight, ask func() drive.Step) {
	p := &d.plan.plan
	replaces := int(p.replaces)
	d.cut(ask())
	if !f.cut && int(p.replaces) != f.Number && d.ctx.deadline.IsZero() {
		d.t.Errorf("attempt %d is neither cut nor replaced, in a call without a deadline", f.Number)
	}
	if int(p.replaces) == f.Number && replaces != f.Number {
		d.noteFailure(0)
	}
	d.checkTokens()
}

// cut cancels the attempt that a drive.Step says to.
func (d *planDriver) cut(step drive.Step) {
	for _, f := range d.flying {
		f.cut = f.cut || f.Number == step.Cut
	}
}

// contextEnds ends the call because its context has ended.
func (d *planDriver) contextEnds() {
	var step drive.Step
	if len(d.flying) == 0 {
		step = d.plan.Due(d.now)
	} else {
		f := d.flying[0]
		f.Err = errors.New("the context has ended")
		step = d.ended(f, Ignored, 0)
	}
	if !step.End || step.Reason != d.ctx.Err() {
		d.t.Errorf("%+v, want the end because of %v", step, d.ctx.Err())
	}
	d.end()
}

// end reports the attempts that are left.
func (d *planDriver) end() {
	d.over = true
	for _, f := range slices.Clone(d.flying) {
		f.Err = ErrHedgeLost
		if step := d.ended(f, Ignored, 0); !step.End {
			d.t.Errorf("%+v for an attempt of a call that is over", step)
		}
	}
}

// checkTheEnd checks that nothing is left of the call.
func (d *planDriver) checkTheEnd() {
	if due := d.plan.DueAt(); !due.IsZero() {
		d.t.Errorf("the call is over, but due at %v", d.since(due))
	}
	d.checkTokens()
	if waiting := d.target.waiting.Load(); waiting != 0 {
		d.t.Errorf("%d calls still wait for the target", waiting)
	}
	if d.slots != nil && d.slots.Balance(d.now) != d.slotsAll {
		d.t.Errorf("%v of %v slots are free", d.slots.Balance(d.now), d.slotsAll)
	}
	if d.limit > 1 && d.retries.reported != d.sent {
		d.t.Errorf("the budget heard of %d attempts, want the %d that were made", d.retries.reported, d.sent)
	}
}

func (d *planDriver) since(t time.Time) time.Duration { return t.Sub(noon) }
