package grpcretry

import (
	"context"
	"io"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/connectivity"
	"google.golang.org/grpc/status"

	"github.com/grpcretry/grpcretry/internal/errtype"
	"github.com/grpcretry/grpcretry/internal/layers"
	"github.com/grpcretry/grpcretry/internal/tried"
)

// A call is one RPC, or one function, from its first attempt to its end. A loop begins it, runs an
// attempt, and hands the attempt's end to next, until next returns no further attempt.
//
// One goroutine at a time uses a call.
type call struct {
	facts
	retrier *Retrier
	options grpcOptions
	stream  *retryStream // nil for a unary call
	newest  *attempt     // sent last or, after a race, the one that decided it; nil before the first, and when the call has let it go

	hedgeBudget Budget        // the additional budget of hedges; nil if the call may not be hedged
	delay       time.Duration // until the next attempt of a hedged call
	learner     HedgeDelay    // measures the first attempt; nil if nothing does

	unresolved func(channel) *policy // set if the policy depends on a service config that is not known yet
	stopsGRPC  bool                  // gRPC is kept from retrying the method by itself
	limit      context.Context       // see planned and limited; nil before there is a limit
	free       context.CancelFunc    // of the limit

	discard func()      // runs before the wait for another attempt; nil for none
	isLast  func() bool // reports that no attempt can follow the newest; nil if one always can

	contest *contest // nil if the call has neither an attempt timeout nor hedges

	*cold // nil until there is something to decide
}

// The cold part of a call is made when there is something to decide. A call that succeeds on its first attempt
// needs none.
type cold struct {
	rules plan
	past  history
	tried *tried.List // the endpoints that the attempts before have tried; nil if no balancer has asked
}

// prepare reads the call's options, resolves its policy and chooses its mode. desc is nil for a
// unary call, reply for a stream. The policy stays nil if an outer interceptor, or gRPC, retries the call.
func (c *call) prepare(opts []grpc.CallOption, desc *grpc.StreamDesc, reply any) error {
	own, nested := c.options.read(opts, &c.facts, &c.retrier.report)
	if nested {
		return nil
	}
	c.worksFor = layers.Of(c.ctx)
	policies := c.retrier.settings.current()
	var ch channel // read only if the call must know at its start what it says
	if c.cc != nil && policies.channels != nil || c.retrier.hasBuiltInPolicy(c.cc, c.method) {
		ch = c.channel()
	}
	if err := firstError(own); err != nil {
		err = status.Error(codes.Internal, err.Error())
		c.options.finish(err)
		return err
	}
	p := policies.withOwn(policies.on(&ch, c.method), own)
	switch {
	case p.overGRPC && p.dryRun: // gRPC's retries stay as they are
	case p.overGRPC || c.worksFor.IsRetry() && !p.dryRun: // for a retry, gRPC's would be further attempts
		c.stopsGRPC = c.mayGRPCRetry()
	case ch.ready && ch.retries():
		c.retrier.report.leftToGRPC(&c.facts)
		c.retrier.report.callPassed(&c.facts)
		return nil
	}
	c.policy = p
	c.mode = p.modeOf(desc)
	if c.mode == modeRetried && p.mayHedge() {
		c.tryHedging(desc, reply)
	}
	if policies.channels != nil && c.cc != nil && !p.passesStream(desc) && !policies.isOff(p, &ch) && !ch.ready {
		c.expectConfig(policies, own)
	}
	if c.mode == modePassThrough {
		c.retrier.report.callPassed(&c.facts)
	}
	return nil
}

// plain returns what prepare would find out about a plain call, as most are, in a third of the time: its policy and, in o, its options.
// A call is plain if a generated stub makes it, for no request of a server, with options of gRPC that need no care, and if its policy is
// plain and does not depend on the channel. For other calls the policy is nil, and prepare decides.
func (r *Retrier) plain(ctx context.Context, cc *grpc.ClientConn, method string, opts []grpc.CallOption, o *grpcOptions) *policy {
	static := false
	for _, opt := range opts {
		switch opt := opt.(type) {
		case grpc.StaticMethodCallOption:
			static = true
		case grpc.HeaderCallOption:
			o.header, o.others = opt.HeaderAddr, o.others || o.header != nil
		case grpc.TrailerCallOption:
			o.trailer, o.others = opt.TrailerAddr, o.others || o.trailer != nil
		default:
			return nil
		}
	}
	policies := r.settings.current()
	if !static || o.others || policies.channels != nil || layers.Of(ctx) != nil || r.hasBuiltInPolicy(cc, method) {
		return nil
	}
	m := policies.only
	if m == nil {
		m = policies.ofStub(method)
	}
	if !m.isPlain || m.overGRPC && !r.builtInRetryOff {
		return nil
	}
	o.list = opts
	return m.policy
}

// begin starts the call and its first attempt, which it returns; in makes it in its context.
func (c *call) begin(in func(context.Context) *attempt) *attempt {
	c.budget, c.hedgeBudget = c.budgetOf(c.policy.Budget), c.budgetOf(c.hedgeBudget)
	c.options.clear() // an earlier call may have filled the same variables
	c.spans, c.start = c.retrier.report.callStarted(&c.facts), instantNow()
	a := in(c.firstContext())
	a.cc, a.method, a.number, a.start = c.cc, c.method, 1, c.start
	a.PeerAddr, c.newest = &a.peer, a
	c.retrier.report.attemptStarted(&c.facts, a)
	c.contest.start(a)
	return a
}

// firstContext returns the context of a first attempt: the caller's or, if a server's handler makes the call, one that adds
// what the server must know, see layers.Header.
func (f *facts) firstContext() context.Context {
	if f.worksFor == nil || f.functionTarget != "" { // a function sends no header
		return f.ctx
	}
	return layers.Header{Limited: f.worksFor.IsRetry()}.In(f.ctx)
}

// newFirst returns the first attempt of a call that is neither a stream nor contested, in a context. It has extras if it needs them.
func (c *call) newFirst(ctx context.Context) *attempt {
	if c.policy.UnsentOnly || c.retrier.report.wantsHeader(&c.facts) {
		return new(fullAttempt).in(ctx)
	}
	return &attempt{Context: ctx}
}

// A call asks for its plan in three ways: plan returns it if there is one; informedPlan makes it, and reads the channel, until
// it has done so while there was a connection; planned also limits the call to the service config's timeout, so only the goroutine
// that uses the call's context may ask for it.

// planned returns the call's plan, and limits the call to the plan's deadline. The first attempt needs no such limit, because gRPC
// applies the config's timeout to it.
func (c *call) planned(state connectivity.State, now time.Time) *plan {
	p := c.informedPlan(state, now)
	if p.config.limits && c.limit == nil {
		c.limit, c.free = context.WithDeadline(c.ctx, p.deadline.timeFrom(now))
	}
	return p
}

// informedPlan returns the call's plan, which knows the first attempt, and what the channel says.
func (c *call) informedPlan(state connectivity.State, now time.Time) *plan {
	p := c.startPlan(now)
	if !p.config.informed {
		ch := c.channelIn(state)
		if k := c.contest; k != nil && k.channel.ready {
			ch = k.channel // as when the call started: gRPC neither limits nor retries the first attempt by what the config says later
		}
		if c.unresolved != nil {
			p.obey(c.unresolved(ch))
		}
		p.follow(&ch)
	}
	return p
}

// startPlan returns the call's plan, which knows the first attempt.
func (c *call) startPlan(now time.Time) *plan {
	if p := c.plan(); p != nil {
		return p
	}
	c.cold = &cold{}
	p := c.plan()
	p.begin(c.policy, c.budget, c.hedgeBudget, c.retrier.targetOf(c.backend), c.start, deadlineOf(c.ctx, now))
	p.single = c.worksFor.IsRetry()
	if c.mode == modeHedged {
		p.delay = c.delay
	}
	p.send(c.start)
	if k := c.contest; k != nil {
		p.hedgeFrom(k.from)
	}
	return p
}

// plan returns the call's plan, nil as long as there was nothing to decide.
func (c *cold) plan() *plan {
	if c == nil {
		return nil
	}
	return &c.rules
}

// made returns how many attempts were made.
func (c *cold) made() int {
	if c == nil {
		return 1
	}
	return int(c.rules.made)
}

// history returns the call's failed attempts. It is empty, and must not be changed, as long as there was nothing to
// decide.
func (c *cold) history() *history {
	if c == nil {
		return &noHistory
	}
	return &c.past
}

var noHistory history

// isContested reports whether the call needs a contest.
func (f *facts) isContested() bool {
	return f.mode == modeHedged || f.policy.AttemptTimeout > 0 && !f.policy.dryRun
}

// next takes the end of an attempt. It returns the next attempt, after the wait before it, or nil and the
// result of the call.
func (c *call) next(e ending) (*attempt, error) {
	if e.err == nil {
		c.succeed(e.attempt)
		e.attempt.endContext()
		return nil, nil
	}
	return c.afterFailure(e, time.Now())
}

// afterFailure is next for an attempt that has failed. The wait counts from now.
func (c *call) afterFailure(e ending, now time.Time) (*attempt, error) {
	v, err := c.judge(e, now)
	if v.do == doEnd {
		return nil, err
	}
	c.cold.tried = c.newest.tried.Load()
	if c.stream == nil && c.contest == nil && !c.options.outputs() { // the call need not show the attempt, and thousands may wait
		c.newest, c.past.from = nil, nil
	}
	if c.discard != nil {
		c.discard()
	}
	if reason, gone := c.wait(v.do); reason != nil {
		c.plan().leave()
		c.retrier.report.waitStopped(&c.facts, reason)
		return nil, c.giveUp(&c.history().last, verdict{Reason: reason}, gone, time.Now())
	}
	c.options.clear()
	a := c.another()
	c.contest.start(a)
	return a, nil
}

// judge asks the plan about a failed attempt. It returns the plan's verdict and, if that ends the
// call, the error that the call returns.
func (c *call) judge(e ending, now time.Time) (verdict, error) {
	a := e.attempt
	defer a.endContext()
	if e.defeat != nil {
		return verdict{do: doEnd}, c.stop(&e.defeat.failure, e.defeat.verdict, now)
	}
	err, state := readable(e.err), stateOf(c.cc)
	if !c.policy.dryRun {
		err = a.truthOf(err)
	}
	p := c.planned(state, now)
	if over, err := c.passes(a, p, err, state, now); over {
		return verdict{do: doEnd}, err
	}
	var f failure // filled in where it is, because it is large
	v := c.ask(p, &f, a, err, state, now)
	if v.do == doEnd {
		return v, c.stop(&f, v, now)
	}
	if v.do != doSend {
		c.retrier.report.waitStarted(&c.facts, int(p.made)+1, v, now)
	}
	return v, nil
}

// ask asks the plan about a failed attempt.
func (c *call) ask(p *plan, f *failure, a *attempt, err error, state connectivity.State, now time.Time) verdict {
	u := c.retrier.random() // it may panic, so before the attempt counts as reported
	c.describe(f, a, err, state, now)
	c.history().record(a, f)
	if !p.isReplaced(f) {
		p.policy.examine(c.ctx, f)
	}
	a.reported = true
	v := p.failed(f, p.ledger.noted(now), u)
	c.retrier.report.attemptFailed(&c.facts, &f.Attempt, v, now)
	return v
}

// isEOF reports whether err is gRPC's end of a stream, which is io.EOF itself. A wrapped io.EOF comes
// from an interceptor below, and is a failure.
func isEOF(err error) bool {
	return err == io.EOF //nolint:errorlint // identity is the contract
}

// truthOf returns what the error of an attempt means. gRPC returns a bare io.EOF for a unary call
// if it could not send the request again in a transparent retry, see internal/judges.
func (a *attempt) truthOf(err error) error {
	if isEOF(err) && a.peer.Addr != nil && !a.hasStream() {
		return errConnLost
	}
	return err
}

var errConnLost = status.Error(codes.Unavailable, "grpcretry: the connection was lost, and gRPC reported an end without a failure")

// describe describes a failed attempt to the plan, in a zero failure. state is the channel's after the attempt's end.
func (c *call) describe(f *failure, a *attempt, err error, state connectivity.State, now time.Time) {
	header := c.collect(a)
	unsent := false
	f.Function = c.functionTarget != ""
	if f.Function {
		unsent = isUnsent(err)
		if below, _ := errtype.As[*Error](err); below != nil { // its pushback applies to the function, which would call the same server
			a.trailer = below.trailer()
		}
		f.NotRun = unsent // only the function's own word counts
	} else {
		unsent, f.NotRun = a.isUnsent(err, state), a.hasNotRun()
	}
	a.describe(&f.Attempt, err, header, now)
	f.CtxErr, f.Closed = endOf(c.limited(), now), state == connectivity.Shutdown
	f.Committed, f.Last = c.stream.isFinal(), c.isLast != nil && c.isLast()
	if a.timedOut(err) {
		f.TimedOut = true
		f.Attempt.Err = newAttemptTimeoutError(c.policy.AttemptTimeout, err)
	}
	f.Refused = a.number == 1 && a.seen() == sawRefusal
	f.Attempt.Unsent = f.Refused || unsent && (f.NotRun || !c.policy.UnsentOnly)
	f.NoResponse = a.gotNoResponse()
}

// noReplay keeps gRPC from retrying a call once its first message is sent, because the message
// does not fit into the buffer for its replay. A negative size would cover the moments before that as
// well, but gRPC panics. It is gRPC's MaxRetryRPCBufferSize(0) in a type of our own, so that it is not taken for the
// caller's if an interceptor below passes the options on to another ClientConn.
type noReplay struct {
	grpc.MaxRetryRPCBufferSizeCallOption
}

// wait returns when the next attempt is to be sent, or when the call is to end because of
// reason. It returns immediately when the ClientConn is closed, or the caller's context ends; gone
// reports the latter.
func (c *call) wait(do action) (reason error, gone bool) {
	for p := c.plan(); do != doSend; {
		connected := false
		if d := p.dueAt.Sub(instantNow()); d > 0 {
			c.retrier.usage.waiting.Add(1)
			connected = c.retrier.connections.Pause(c.limited(), c.cc, d, do == doConnect, c.stream.becomesFinal())
			c.retrier.usage.waiting.Add(-1)
		}
		now := time.Now()
		gone := endOf(c.limited(), now)
		var v verdict
		switch {
		case gone != nil:
			return gone, true
		case isClosed(c.cc):
			return errConnClosed, false
		case c.stream.isFinal():
			return ErrCommitted, false
		case connected:
			v = p.connected(p.ledger.noted(now), c.retrier.random())
		default:
			v = p.due(p.ledger.noted(now), c.retrier.random())
		}
		if do = v.do; do == doEnd {
			return v.Reason, false
		}
	}
	if ctx := c.limited(); ctx.Err() != nil { // the rest was asked when the attempt failed, and after a wait
		return causeOf(ctx), true
	}
	return nil, false
}

// another returns the next attempt, which is to be handed to gRPC.
func (c *call) another() *attempt {
	start := instantNow()
	c.retrier.report.waitEnded(&c.facts)
	a := c.newAttempt(c.plan().send(start), start)
	c.retrier.report.retrySent(&c.facts, a)
	c.retrier.report.attemptStarted(&c.facts, a)
	return a
}

// newAttempt returns an attempt after the first, which the caller then makes ready.
func (c *call) newAttempt(sent sending, start instant) (a *attempt) {
	ctx, added := c.limited(), (*layers.Shared)(nil)
	if c.functionTarget == "" { // which sends no header
		ctx, added = layers.Header{Previous: int(sent.number) - 1, Limited: sent.silent || c.worksFor.IsRetry()}.Added(ctx)
	}
	if c.mode == modeHedged { // the newest one is in flight, and may try an endpoint later
		c.cold.tried = c.newest.triedList()
	}
	if c.stream != nil || c.contest != nil {
		a = new(boundedAttempt).in(ctx)
	} else {
		a = new(fullAttempt).in(ctx)
	}
	a.cc, a.method, a.start, a.number, a.source = c.cc, c.method, start, sent.number, sent.source
	x := a.extras()
	x.added, x.wait, x.repeats, x.stopsGRPC = added, sent.wait, sent.repeats, c.stopsRetriesOfGRPC()
	a.tried.Store(c.cold.tried)
	a.PeerAddr, c.newest = &a.peer, a
	return a
}

// stopsRetriesOfGRPC reports whether gRPC must be kept from retrying the newest attempt by itself, because its channel may have got a
// policy for that. The price is that gRPC does not repeat the attempt either if a server refuses it. So only a policy that is there
// counts, except for calls that are never left to gRPC: those take no risk.
func (c *call) stopsRetriesOfGRPC() bool {
	if c.policy.overGRPC {
		return c.mayGRPCRetry()
	}
	p := c.plan()
	return (p.counted() > 1 || p.config.informed && !p.config.builtIn) && c.retrier.hasBuiltInPolicy(c.cc, c.method)
}

// deposit reports an attempt's result to the budgets. It is for attempts that succeeded, or that the
// plan was not asked about.
func (c *call) deposit(a *attempt, r Result) {
	a.reported = true
	o := Outcome{Attempt: int(a.number), Hedge: a.source.isHedge(), Result: r, late: c.contest != nil && r == Succeeded && a.isLate()}
	if p := c.plan(); p != nil {
		p.ended(o, a.start)
		return
	}
	depositUnplanned(c.budget, o, c.start)
	if c.hedgeBudget != nil {
		c.hedgeBudget.Deposit(o) // dated at the call's end: the window of the default is only a second
	}
	if o.answered() {
		c.retrier.noteAnswer(c.backend, a.start)
	}
}

// depositUnplanned reports the result of an attempt, without a plan, to the method's budget. start is the call's.
func depositUnplanned(b Budget, o Outcome, start instant) {
	if ratio, is := b.(*ratioBudget); is && o.answered() {
		ratio.tokens.Earn(start.sinceOrigin()) // as Deposit does, but dated without the clock
	} else {
		b.Deposit(o)
	}
}
