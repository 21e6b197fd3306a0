// Package explore looks for programs that break a promise of package grpcretry. It draws calls and scripts at random,
// runs them with a policy, and judges what client, server and application have seen.
package explore

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"runtime/debug"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"github.com/grpcretry/grpcretry"
	"github.com/grpcretry/grpcretry/grpcretrytest"
	"github.com/grpcretry/grpcretry/internal/inside"
)

// An Exploration says which programs to run.
//
// The messages and handlers are this package's own, for every method of the service, so that each message can carry a
// number. In each program, a few calls run at the same time in virtual time. What is checked:
//
//   - each call ends once, not after its deadline, and with the result of one attempt; no wait is in vain;
//   - attempts are within MaxAttempts, none starts at or after the deadline or MaxElapsed, and none follows a failure
//     that is not retryable, or a server's "no retry";
//   - each wait is the server's pushback, or else the policy's backoff or what the state of the target makes of it, to the
//     microsecond; no retry is sent that can learn nothing; and a call that waits again, or ends in a wait, has a reason to;
//   - each attempt that must be paid for was withdrawn from its budget, and what was not sent was returned; and the
//     policy's own budgets grant what they have, and take tokens back;
//   - the server has seen each attempt that it was sent once, and with WithUnsentOnly ran no method twice;
//   - no message of a stream is doubled, lost, late or reordered, and all replies are those of one attempt;
//   - headers that the application has seen commit a stream, OnFinish runs once, and a reply holds nothing of an
//     earlier attempt;
//   - no wait outlasts Patience, other than one that the server asks for, and the backoff after a connection was made;
//   - a call that has ended leaves no goroutine, no context and no memory behind, and no call panics.
//
// An interceptor may change the result of an attempt: the Retrier then acts on what it returns.
type Exploration struct {
	Service *grpc.ServiceDesc // as generated code exports it: &shoppb.Shop_ServiceDesc

	// Policy returns the Retrier's options. It is called for every program, so that each has new budgets. In
	// every second program, a small budget that counts replaces them. nil means the defaults.
	Policy func() []grpcretry.Option

	// DialOptions are for every connection, for example interceptors that run below the Retrier's. They do not change
	// the policy: what call options or a service config of the channel say about retries is judged as a fault.
	DialOptions []grpc.DialOption

	Programs int    // how many programs to run; 0 means 200, which take about a second
	Seed     uint64 // of the first program; the others count on from there. The same seed draws the same program
}

// Run runs the programs. It fails the test at the first that breaks a promise, with the seed, the program reduced
// to what is needed, and the timelines of its calls. Call it outside of a bubble: each program has its own.
func (e Exploration) Run(t *testing.T) {
	t.Helper()
	if report := e.explore(t); report != "" {
		t.Errorf("%s", report)
	}
}

// explore returns a report of the first program that breaks a promise, "" if none does.
func (e Exploration) explore(t *testing.T) string {
	if e.Service == nil || len(e.methods()) == 0 {
		return "Exploration.Service has no methods"
	}
	if e.Programs < 0 {
		return fmt.Sprintf("Exploration.Programs is %d, want at least 0", e.Programs)
	}
	if e.Programs == 0 {
		e.Programs = 200
	}
	if problem := e.judgeBudgets(); problem != "" {
		return problem
	}
	for i := range uint64(e.Programs) {
		p := e.draw(e.Seed + i)
		problem, seen := e.try(t, p)
		if problem == "" {
			continue
		}
		for smaller := true; smaller; {
			p, problem, seen, smaller = e.reduce(t, p, problem, seen)
		}
		return fmt.Sprintf("%s\nExploration.Seed = %d; reduced to\n%swhat was seen:\n%s", problem, p.seed, p, seen)
	}
	return ""
}

// A program is what an exploration runs.
type program struct {
	seed   uint64
	u      float64 // the random number of all jitter
	budget int     // of the budget that counts; -1 for the policy's own
	calls  []plannedCall
	downs  []down // one after the other
}

// A plannedCall is one call of a program. Its number is in its metadata.
type plannedCall struct {
	number   int
	method   method
	start    time.Duration
	timeout  time.Duration
	cancel   time.Duration // when the caller cancels it, after its start; 0 for never
	messages int           // what a client sends, or a server if that alone is a stream
	steps    []step        // for its attempts; then the handler answers
	habits
}

// A method is one of the service.
type method struct {
	name             string // "/pkg.Service/Method"
	clients, servers bool   // the sides that stream
}

func (e *Exploration) methods() []method {
	var all []method
	for _, m := range e.Service.Methods {
		all = append(all, method{name: "/" + e.Service.ServiceName + "/" + m.MethodName})
	}
	for _, s := range e.Service.Streams {
		all = append(all, method{"/" + e.Service.ServiceName + "/" + s.StreamName, s.ClientStreams, s.ServerStreams})
	}
	return all
}

// draw returns the program of a seed.
func (e *Exploration) draw(seed uint64) program {
	r := rand.New(rand.NewPCG(seed, 0))
	p := program{seed: seed, u: float64(r.IntN(9)) / 8, budget: -1}
	if seed%2 == 0 {
		p.budget = pickOne(r, 0, 1, 2, 5, 1000)
	}
	methods := e.methods()
	retrier, err := grpcretry.New(e.options()...)
	if err != nil {
		return p // the program will fail
	}
	for number := range 1 + r.IntN(4) {
		c := plannedCall{
			number:   number + 1,
			method:   methods[r.IntN(len(methods))],
			start:    pickOne(r, 0, 0, time.Millisecond, time.Second),
			timeout:  pickOne(r, 5*time.Millisecond, 150*time.Millisecond, 700*time.Millisecond, 3*time.Second, 10*time.Second, 20*time.Minute),
			messages: r.IntN(5),
		}
		if r.IntN(6) == 0 {
			c.cancel = pickOne(r, 2*time.Millisecond, 25*time.Millisecond, 60*time.Millisecond, 400*time.Millisecond)
		}
		policy := retrier.Policy(c.method.name)
		for range r.IntN(7) {
			c.steps = append(c.steps, c.drawStep(r, policy))
		}
		c.drawHabits(seed, policy.Hedging != nil)
		p.calls = append(p.calls, c)
	}
	p.drawDowns()
	return p
}

// drawStep draws a step. Some of its times are close to the policy's limits.
func (c *plannedCall) drawStep(r *rand.Rand, policy grpcretry.Policy) step {
	limit := max(policy.MaxServerDelay, 0).Truncate(time.Millisecond)
	elapsed := (policy.MaxElapsed / 2).Truncate(time.Millisecond)
	code := pickOne(r, codes.Unavailable, codes.Unavailable, codes.Unavailable, codes.ResourceExhausted, codes.ResourceExhausted,
		codes.Aborted, codes.Internal, codes.DeadlineExceeded)
	s := failing(code)
	switch r.IntN(12) {
	case 0:
		s = step{Step: grpcretrytest.Hang(), kind: hangs}
	case 1:
		s = step{Step: grpcretrytest.Cut(), kind: cuts}
	case 2:
		s = step{Step: grpcretrytest.OK()}
	}
	s = s.after(pickOne(r, 0, 0, 0, time.Millisecond, 10*time.Millisecond, 20*time.Millisecond, 30*time.Millisecond, 2*time.Second))
	if s.kind == answers {
		return s
	}
	if s.kind == fails {
		switch r.IntN(8) {
		case 0, 1, 2:
			s = s.pushback(pickOne(r, 0, 10*time.Millisecond, 700*time.Millisecond, 3*time.Second, elapsed, 2*elapsed, limit,
				limit+time.Millisecond))
		case 3:
			s = s.pushbackValue([][]string{{"-1"}, {""}, {"+5"}, {"5", "5"}}[r.IntN(4)]...)
		}
		if r.IntN(8) == 0 {
			s.Step = s.RetryInfo(pickOne(r, 20*time.Millisecond, time.Second))
		}
	}
	if r.IntN(4) == 0 {
		s.Step = s.Header("drawn", "1")
	}
	if c.method.servers && r.IntN(3) == 0 {
		s.Step = s.AfterSending(r.IntN(3))
	} else if (c.method.clients || c.method.servers) && r.IntN(3) == 0 {
		s.Step = s.AfterReceiving(r.IntN(3))
	}
	return s
}

func pickOne[T any](r *rand.Rand, choices ...T) T { return choices[r.IntN(len(choices))] }

// reduce leaves one thing out of a program that breaks a promise without it as well; smaller is false if there is
// none.
func (e *Exploration) reduce(t *testing.T, p program, problem, seen string) (_ program, _, _ string, smaller bool) {
	for _, q := range p.smaller() {
		if problem, seen := e.try(t, q); problem != "" {
			return q, problem, seen, true
		}
	}
	return p, problem, seen, false
}

// smaller returns the programs that have one thing less.
func (p program) smaller() []program {
	all := p.withFewerDowns()
	for i, c := range p.calls {
		without := func(c ...plannedCall) {
			q := p
			q.calls = append(append(append([]plannedCall(nil), p.calls[:i]...), c...), p.calls[i+1:]...)
			all = append(all, q)
		}
		if len(p.calls) > 1 {
			without()
		}
		for j := range c.steps {
			d := c
			d.steps = append(append([]step(nil), c.steps[:j]...), c.steps[j+1:]...)
			without(d)
		}
		if c.start > 0 {
			d := c
			d.start = 0
			without(d)
		}
		if c.cancel > 0 {
			d := c
			d.cancel = 0
			without(d)
		}
		if c.messages > 1 {
			d := c
			d.messages--
			without(d)
		}
		for _, h := range c.fewer() {
			d := c
			d.habits = h
			without(d)
		}
	}
	return all
}

// String returns the program for a report.
func (p program) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "  jitter %v", p.u)
	if p.budget >= 0 {
		fmt.Fprintf(&b, ", a budget of %s", count(p.budget, "retry", "retries"))
	}
	b.WriteString("\n")
	for _, d := range p.downs {
		fmt.Fprintf(&b, "  %v\n", d)
	}
	for _, c := range p.calls {
		fmt.Fprintf(&b, "  call %d, %s: starts at %v, has a timeout of %v", c.number, c.method.name, c.start, c.timeout)
		if c.method.clients || c.method.servers {
			fmt.Fprintf(&b, " and %s", count(c.messages, "message", "messages"))
		}
		if c.cancel > 0 {
			fmt.Fprintf(&b, "; it is cancelled after %v", c.cancel)
		}
		fmt.Fprintf(&b, "%v\n", c.habits)
		for i, s := range c.steps {
			fmt.Fprintf(&b, "    attempt %d: %v\n", i+1, s)
		}
	}
	return b.String()
}

// An observation is all that was seen in a program.
type observation struct {
	program program
	retrier *grpcretry.Retrier
	budget  *countingBudget // nil if the policy's own is used
	start   time.Time

	mu       sync.Mutex
	events   map[int][]grpcretry.Event // by the call's number
	seenAt   map[int][]time.Duration   // when they were, by the call's number
	decided  map[int]map[int]decision  // by the numbers of call and attempt
	happened []happening               // set by judge
	served   []*served
	results  []result
	problems []string // what was noticed at the time
	leave    []func() // cancel the contexts of the calls
}

// A served attempt is one that has arrived at the server.
type served struct {
	call, attempt int
	at, end       time.Time // end is zero until then
	err           error
	received      int // messages
	step          step
	ran           bool // the handler
}

// A result is what the application got from a call.
type result struct {
	call    int
	over    time.Time
	err     error
	replies []reply
	seen    *seen // by the application
}

// A reply is one message from the server.
type reply struct {
	call, attempt, index, received int
	text                           string // as it was received
	at                             time.Time
}

const callKey = "explore-call"

// try runs a program in a bubble. It returns what is wrong, "" if nothing is, and what was seen.
func (e *Exploration) try(t *testing.T, p program) (problem, seen string) {
	t.Helper()
	defer func() { // synctest panics if goroutines stay blocked
		if r := recover(); r != nil && problem == "" {
			problem = fmt.Sprintf("goroutines are left: %v", r)
		}
	}()
	synctest.Test(t, func(t *testing.T) {
		o := &observation{program: p, start: time.Now(), events: map[int][]grpcretry.Event{}, seenAt: map[int][]time.Duration{},
			decided: map[int]map[int]decision{}}
		o.run(t, e)
		problem, seen = o.judge(), o.String()
	})
	return problem, seen
}

func (o *observation) run(t *testing.T, e *Exploration) {
	server := grpcretrytest.Serve(t, func(own ...grpc.ServerOption) *grpc.Server {
		return grpc.NewServer(append([]grpc.ServerOption{grpc.ChainStreamInterceptor(o.log), grpc.UnknownServiceHandler(o.handle)}, own...)...)
	})
	o.program.script(server)
	r, err := grpcretry.New(o.options(e)...)
	if err != nil {
		t.Fatalf("Exploration.Policy: %v", err)
	}
	o.retrier = r
	defer inside.Observe(r, o.observe)()
	cc := server.Conn(append(append(r.DialOptions(), steadyConnect), e.DialOptions...)...)
	defer o.goDown(server)()
	over := make(chan result, len(o.program.calls))
	for _, c := range o.program.calls {
		go func() { over <- o.callSafely(cc, c) }()
	}
	timeout := time.After(time.Hour)
	for range o.program.calls {
		select {
		case one := <-over:
			o.results = append(o.results, one)
		case <-timeout:
			o.problem("a call has not ended an hour after the start")
			o.leaveAll()
			return
		}
	}
	<-time.After(time.Second)
	o.judgeLeftover()
	o.leaveAll()
	<-time.After(time.Minute) // what gRPC reports on goroutines of its own
}

// options returns the policy's options.
func (e *Exploration) options() []grpcretry.Option {
	if e.Policy == nil {
		return nil
	}
	return e.Policy()
}

// options returns the policy's options, and those that make it predictable.
func (o *observation) options(e *Exploration) []grpcretry.Option {
	opts := append(slices.Clip(e.options()), grpcretrytest.Jitter(o.program.u)) // the policy may keep its own
	if o.program.budget < 0 {
		return opts
	}
	r, err := grpcretry.New(opts...)
	if err != nil {
		return opts // New will say it again
	}
	o.budget = &countingBudget{left: o.program.budget}
	for _, m := range e.methods() {
		opts = append(opts, grpcretry.WithMethod(m.name, grpcretry.WithBudget(o.budget)))
		if h := r.Policy(m.name).Hedging; h != nil {
			hedging := *h
			hedging.Budget = grpcretry.Unlimited
			opts = append(opts, grpcretry.WithMethod(m.name, grpcretry.WithHedging(hedging)))
		}
	}
	return opts
}

func (o *observation) observe(ctx context.Context, e grpcretry.Event, _ inside.Call) {
	number, _ := ctx.Value(callNumber{}).(int)
	o.mu.Lock()
	defer o.mu.Unlock()
	now := time.Since(o.start)
	o.events[number] = append(o.events[number], e)
	o.seenAt[number] = append(o.seenAt[number], now)
	if e.Kind != grpcretry.Decision {
		return
	}
	if o.decided[number] == nil {
		o.decided[number] = map[int]decision{}
	}
	o.decided[number][e.Attempt.Number] = decision{now, e.Reason == nil}
}

// A decision is what a Retrier has made of a failed attempt.
type decision struct {
	at      time.Duration
	retries bool
}

type callNumber struct{}

type servedKey struct{}

func servedOf(ctx context.Context) *served { return ctx.Value(servedKey{}).(*served) }

// log remembers each attempt that arrives, and says which step of the script it takes.
func (o *observation) log(srv any, stream grpc.ServerStream, _ *grpc.StreamServerInfo, handler grpc.StreamHandler) error {
	ctx := stream.Context()
	number, err := strconv.Atoi(strings.Join(metadata.ValueFromIncomingContext(ctx, callKey), ","))
	s := &served{call: number, attempt: grpcretry.PreviousAttempts(ctx) + 1, at: time.Now()}
	s.step, ctx = o.program.scripted(ctx, s.call, s.attempt)
	o.mu.Lock()
	o.served = append(o.served, s)
	if err != nil {
		o.problems = append(o.problems, fmt.Sprintf("an attempt has no metadata %s", callKey))
	}
	o.mu.Unlock()
	err = handler(srv, &loggedStream{stream, context.WithValue(ctx, servedKey{}, s)})
	o.mu.Lock()
	defer o.mu.Unlock()
	s.end, s.err = time.Now(), err
	return err
}

type loggedStream struct {
	grpc.ServerStream
	ctx context.Context
}

func (s *loggedStream) Context() context.Context { return s.ctx }

// handle is the handler of every method. Each reply says which attempt it is from, its own number, and how many
// messages the server had received.
func (o *observation) handle(_ any, stream grpc.ServerStream) error {
	s := servedOf(stream.Context())
	c := o.planned(s.call)
	o.mu.Lock()
	s.ran = true
	o.mu.Unlock()
	sent := 0
	send := func() error {
		sent++
		return stream.SendMsg(reply{call: s.call, attempt: s.attempt, index: sent, received: s.received}.message())
	}
	for {
		m := &wrapperspb.StringValue{}
		if err := stream.RecvMsg(m); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			return err
		}
		o.received(s, m)
		if c.method.clients && c.method.servers {
			if err := send(); err != nil {
				return err
			}
		}
	}
	if want := c.sends(); s.received != want {
		o.problem("call %d, attempt %d: the server received %s before the end of the stream, want %d", s.call, s.attempt,
			count(s.received, "message", "messages"), want)
	}
	for sent < c.replies() {
		if err := send(); err != nil {
			return err
		}
	}
	return nil
}

// received checks a message from the client.
func (o *observation) received(s *served, m *wrapperspb.StringValue) {
	o.mu.Lock()
	defer o.mu.Unlock()
	s.received++
	if want := requestText(s.call, s.received); m.GetValue() != want {
		o.problems = append(o.problems,
			fmt.Sprintf("call %d, attempt %d: the server received %q, want %q", s.call, s.attempt, m.GetValue(), want))
	}
}

func (o *observation) problem(format string, args ...any) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.problems = append(o.problems, fmt.Sprintf(format, args...))
}

func (o *observation) planned(number int) plannedCall {
	for _, c := range o.program.calls {
		if c.number == number {
			return c
		}
	}
	return plannedCall{}
}

// sends returns how many messages the client sends.
func (c *plannedCall) sends() int {
	if c.method.clients {
		return c.messages
	}
	return 1
}

// replies returns how many messages the server sends.
func (c *plannedCall) replies() int {
	if c.method.servers {
		return c.messages
	}
	return 1
}

func requestText(call, index int) string { return fmt.Sprintf("call %d message %d", call, index) }

func request(call, index int) *wrapperspb.StringValue {
	return wrapperspb.String(requestText(call, index))
}

func (r reply) message() *wrapperspb.StringValue {
	return wrapperspb.String(fmt.Sprint(r.call, r.attempt, r.index, r.received))
}

func replyOf(m *wrapperspb.StringValue) (r reply) {
	if _, err := fmt.Sscan(m.GetValue(), &r.call, &r.attempt, &r.index, &r.received); err != nil {
		r = reply{} // of no call, which judge notices
	}
	r.text = m.GetValue()
	return r
}

// callSafely makes a panic in a call a problem of the program.
func (o *observation) callSafely(cc *grpc.ClientConn, c plannedCall) (res result) {
	defer func() {
		if r := recover(); r != nil {
			o.problem("call %d: panic: %v\n%s", c.number, r, debug.Stack())
			res = result{call: c.number, over: time.Now(), err: errPanic}
		}
	}()
	return o.call(cc, c)
}

var errPanic = errors.New("panic")

// call makes one call as an application does.
func (o *observation) call(cc *grpc.ClientConn, c plannedCall) result {
	if c.start > 0 {
		<-time.After(c.start)
	}
	ctx := metadata.AppendToOutgoingContext(context.WithValue(context.Background(), callNumber{}, c.number), callKey, strconv.Itoa(c.number))
	ctx, cancel := context.WithTimeout(ctx, c.timeout)
	o.later(cancel)
	if c.cancel > 0 {
		defer time.AfterFunc(c.cancel, cancel).Stop()
	}
	if c.ownContext {
		ctx = newOwnContext(ctx)
	}
	res := result{call: c.number, seen: &seen{}}
	opts := c.options(res.seen)
	if !c.method.clients && !c.method.servers {
		var m wrapperspb.StringValue
		if res.err = cc.Invoke(ctx, c.method.name, request(c.number, 1), &m, opts...); res.err == nil {
			res.replies = append(res.replies, replyOf(&m))
		}
	} else {
		res.replies, res.err = callStream(ctx, cc, c, res.seen, opts)
	}
	res.over = time.Now()
	return res
}

func callStream(ctx context.Context, cc *grpc.ClientConn, c plannedCall, seen *seen, opts []grpc.CallOption) (replies []reply, err error) {
	desc := &grpc.StreamDesc{ClientStreams: c.method.clients, ServerStreams: c.method.servers}
	stream, err := cc.NewStream(ctx, desc, c.method.name, opts...)
	if err != nil {
		return nil, err
	}
	if c.pause > 0 {
		over := make(chan struct{})
		defer close(over)
		go func() { _ = sendAll(stream, c, over) }() // RecvMsg returns the status
	} else if err := sendAll(stream, c, nil); err != nil && !errors.Is(err, io.EOF) { // after EOF, RecvMsg has the status
		return nil, err
	}
	if c.header {
		seen.look(stream)
	}
	for {
		var m wrapperspb.StringValue
		if err = stream.RecvMsg(&m); errors.Is(err, io.EOF) {
			return replies, nil
		} else if err != nil {
			return replies, err
		}
		replies = append(replies, replyOf(&m))
		replies[len(replies)-1].at = time.Now()
		if !c.method.servers {
			return replies, nil
		}
	}
}

// sendAll sends a stream's messages, with pauses if there are to be any, until over is closed.
func sendAll(stream grpc.ClientStream, c plannedCall, over <-chan struct{}) error {
	for i := range c.sends() {
		if c.pause > 0 {
			select {
			case <-time.After(c.pause):
			case <-over:
				return nil
			}
		}
		if err := stream.SendMsg(request(c.number, i+1)); err != nil {
			return err
		}
	}
	return stream.CloseSend()
}

// A countingBudget holds a number of retries, and earns none.
type countingBudget struct {
	mu                                         sync.Mutex
	left, deposits, retries, granted, returned int
	grants, refusals                           []time.Time
}

// Deposit implements [grpcretry.Budget].
func (b *countingBudget) Deposit(o grpcretry.Outcome) {
	b.mu.Lock()
	defer b.mu.Unlock()
	switch {
	case o.Result != grpcretry.Unsent:
		b.deposits++
		if o.Attempt > 1 {
			b.retries++
		}
	case o.Attempt > 1:
		b.left++
		b.returned++
	}
}

// Withdraw implements [grpcretry.Budget].
func (b *countingBudget) Withdraw(now time.Time) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.left == 0 {
		b.refusals = append(b.refusals, now)
		return false
	}
	b.left--
	b.granted++
	b.grants = append(b.grants, now)
	return true
}

// said returns what the budget has said to a retry at a time. It would grant one that has not asked.
func (b *countingBudget) said(at time.Time) (granted, refused bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	then := func(t time.Time) bool { return t.Sub(at).Abs() <= time.Microsecond }
	refused = slices.ContainsFunc(b.refusals, then)
	return !refused || slices.ContainsFunc(b.grants, then), refused
}

// Balance implements [grpcretry.Budget].
func (b *countingBudget) Balance(time.Time) float64 {
	b.mu.Lock()
	defer b.mu.Unlock()
	return float64(b.left)
}
