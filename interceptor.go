package grpcretry

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"go.opentelemetry.io/otel"
	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"

	"github.com/grpcretry/grpcretry/internal/bounded"
	"github.com/grpcretry/grpcretry/internal/conns"
	"github.com/grpcretry/grpcretry/internal/instruments"
	"github.com/grpcretry/grpcretry/internal/layers"
	"github.com/grpcretry/grpcretry/internal/replay"
	"github.com/grpcretry/grpcretry/internal/replies"
)

// UnaryClientInterceptor returns the interceptor for unary calls, for
// [grpc.WithChainUnaryInterceptor]. Chain it first, so that the interceptors chained after it run
// for each attempt. If it is chained twice, only the outer one retries, unless its policy lets the
// call pass through, or is a dry run: then the inner one does.
//
// Retries carry the number of previous attempts to the server in the outgoing metadata of the attempt's
// context. Calls that an interceptor chained after this one makes with that context, on another
// ClientConn for example, carry it as well. The response header that the caller gets after a retry tells the
// number, too: grpc-previous-rpc-attempts (gRFC A6 #exposed-retry-metadata).
//
// An interceptor chained after this one must not return before its invoker has, for example at a timeout of
// its own: gRPC would go on writing the reply, the header and the trailer, while they are read here or
// another attempt fills them. To end an attempt early, cancel the context that the invoker is called with. Nor may it return
// io.EOF: that is how gRPC reports a unary call whose connection was lost while its request was being repeated, so it counts as
// UNAVAILABLE.
func (r *Retrier) UnaryClientInterceptor() grpc.UnaryClientInterceptor { return r.checked().unary }

// UnaryClientInterceptor returns the [Retrier.UnaryClientInterceptor] of a new Retrier. It panics
// if [New] returns an error.
func UnaryClientInterceptor(opts ...Option) grpc.UnaryClientInterceptor {
	return mustNew(opts).UnaryClientInterceptor()
}

// StreamClientInterceptor returns the [Retrier.StreamClientInterceptor] of a new Retrier. It
// panics if [New] returns an error.
func StreamClientInterceptor(opts ...Option) grpc.StreamClientInterceptor {
	return mustNew(opts).StreamClientInterceptor()
}

// unary makes a unary call. A plain one becomes a call only when there is something to decide or to report, which makes a success a
// tenth faster.
func (r *Retrier) unary(ctx context.Context, method string, req, reply any, cc *grpc.ClientConn,
	invoker grpc.UnaryInvoker, opts ...grpc.CallOption) error {
	var (
		o      grpcOptions
		budget Budget
		first  ending
	)
	of, p := backend{cc: cc}, r.plain(ctx, cc, method, opts, &o)
	if p != nil && !r.report.watchesStart() {
		budget = of.budgetOf(p.Budget)
		o.clear() // an earlier call may have filled the same variables
		a := &attempt{Context: ctx, cc: cc, method: method, number: 1, start: instantNow()}
		a.PeerAddr = &a.peer
		ended := false
		defer func() {
			if !ended {
				budget.Deposit(Outcome{Attempt: 1, Result: Ignored})
			}
		}()
		err := invoker(a, method, req, reply, cc, a.plainOptions(&o)...)
		unwatched := err == nil && !r.report.watches(ctx)
		ended = true
		if unwatched {
			depositUnplanned(budget, Outcome{Attempt: 1, Result: Succeeded}, a.start)
			r.noteAnswer(of, a.start)
			return nil
		}
		first = ending{attempt: a, err: err}
	}
	c := call{retrier: r, options: o, facts: facts{backend: of, ctx: ctx, method: method, policy: p, budget: budget}} // stays on the stack
	return c.unary(first, opts, req, reply, invoker)
}

// unary makes a unary call in the way that its mode says. If it is plain, it has a policy already, and the first attempt may have ended.
func (c *call) unary(first ending, opts []grpc.CallOption, req, reply any, invoker grpc.UnaryInvoker) error {
	if c.policy != nil {
		c.mode, c.static = modeRetried, true
	} else if err := c.prepare(opts, nil, reply); err != nil {
		return err
	}
	if c.mode == modePassThrough {
		return passing{c}.unary(req, reply, invoker)
	}
	if c.isContested() {
		return contestUnary(c, req, reply, invoker)
	}
	return c.makeAttempts(first, c.newFirst, func(a *attempt) ending {
		if a.number > 1 {
			replies.Empty(reply)
		}
		err := invoker(a, c.method, req, reply, c.cc, c.attemptOptions(a)...)
		if err == nil {
			a.measure(c.learner, false)
		} else if a.number > 1 {
			replies.Empty(reply)
		}
		return ending{attempt: a, err: err}
	})
}

// makeAttempts makes attempts, one after the other, until one succeeds or the plan ends the call. It is the loop of functions and
// unary calls. e is the end of the first; if e is zero, in makes the first in its context. run may make others beside the attempt that
// it is given.
func (c *call) makeAttempts(e ending, in func(context.Context) *attempt, run func(*attempt) ending) error {
	done := false
	defer c.guard(&done)
	if a := e.attempt; a != nil {
		c.start, c.newest = a.start, a // first, because the caller's span may panic
		c.spans = c.retrier.report.callStarted(&c.facts)
	} else {
		e = run(c.begin(in))
	}
	for {
		a, err := c.next(e)
		if a == nil {
			done = true
			return err
		}
		e = run(a)
	}
}

// guard is deferred by each loop, and by a stream's orCrash. If that is not done, the application's code has panicked, or that of an
// interceptor below. Contests and replays, which have goroutines of their own, have guards of their own.
func (c *call) guard(done *bool) {
	if !*done {
		c.crashed()
	}
}

// A Retrier provides interceptors that retry calls. It is safe for concurrent use. One Retrier may
// serve any number of ClientConns; those to the same target then share a budget. [New] creates a
// Retrier. The methods of a nil or zero Retrier panic, saying so, except [Retrier.Update] and [Retrier.Do],
// which return an error.
type Retrier struct {
	settings    *settings
	report      reporter
	random      func() float64
	connections *conns.Watchers
	targets     *targets
	usage       *usage

	builtInRetryOff bool
}

// New returns a new Retrier. Without options, it makes up to 4 attempts at calls that fail with
// UNAVAILABLE or RESOURCE_EXHAUSTED, within a budget. The error names each option that has an
// invalid value, and its first such value.
func New(opts ...Option) (*Retrier, error) {
	c := config{replayMemory: defaultReplayMemory}
	if err := c.applyAll("New", opts); err != nil {
		return nil, err
	}
	r := &Retrier{
		settings:        &settings{fallback: defaultBudgets()},
		report:          reporter{logger: newLogger(c.logger), observers: &observers{}},
		random:          rand.Float64,
		connections:     conns.New(),
		usage:           &usage{replay: replay.Memory{Limit: c.replayMemory}},
		builtInRetryOff: c.builtInRetryOff,
	}
	for _, f := range c.observers {
		r.report.observers.list.Add(f)
	}
	if c.random != nil {
		r.random = func() float64 { return unit(c.random()) }
	}
	if err := r.settings.replace(c.policies); err != nil {
		return nil, err
	}
	r.targets = newTargets(r.report.logger)
	var err error
	if r.report.metrics, err = newMetrics(&c, r.settings, r.usage, r.targets); err != nil {
		return nil, fmt.Errorf("grpcretry: WithMeterProvider: %w", err)
	}
	if c.callSpan {
		r.report.tracer = cmp.Or(c.tracerProvider, otel.GetTracerProvider()).Tracer(instruments.Scope)
	}
	r.warn()
	return r, nil
}

// checked returns the Retrier. It panics if New has not made it.
func (r *Retrier) checked() *Retrier {
	if err := r.check(); err != nil {
		panic(err) //nolint:forbidigo // documented; otherwise it would be a nil dereference without a reason
	}
	return r
}

// check returns an error if New has not made the Retrier.
func (r *Retrier) check() error {
	switch {
	case r == nil:
		return errors.New("grpcretry: the Retrier is nil: create it with New")
	case r.settings == nil:
		return errors.New("grpcretry: the Retrier is zero: create it with New")
	default:
		return nil
	}
}

// DialOptions returns the options for a ClientConn whose calls are retried: both interceptors, and
// [grpc.WithDisableRetry], so that a retryPolicy in the service config does not multiply the
// attempts. gRPC's transparent retries, of unary calls that no server has seen, stay on.
func (r *Retrier) DialOptions() []grpc.DialOption {
	alone := *r.checked()
	alone.builtInRetryOff = true
	return []grpc.DialOption{
		grpc.WithChainUnaryInterceptor(alone.UnaryClientInterceptor()),
		grpc.WithChainStreamInterceptor(alone.StreamClientInterceptor()),
		grpc.WithDisableRetry(),
	}
}

// Policy returns the policy for a method, "/pkg.Service/Method", with all defaults filled in.
// Options that are passed to a single call may change it for that call, and so may the channel's
// service config, see [WithResolverServiceConfig]. A [Retrier.Update] changes it for later calls.
func (r *Retrier) Policy(method string) Policy {
	return r.checked().settings.current().shown(method).exported()
}

// DialOptions returns the [Retrier.DialOptions] of a new Retrier. It panics if [New] returns an
// error.
func DialOptions(opts ...Option) []grpc.DialOption { return mustNew(opts).DialOptions() }

func mustNew(opts []Option) *Retrier {
	r, err := New(opts...)
	if err != nil {
		panic(err) //nolint:forbidigo // documented; callers who want an error use New
	}
	return r
}

// settings are what [Retrier.Update] changes. A Retrier and its copies share them.
type settings struct {
	policies atomic.Pointer[methodPolicies]

	mu       sync.Mutex          // held by an Update
	options  policyOptions       // guarded by mu
	fallback budgets             // never changes, so that the default budgets keep their state
	warned   bounded.Set[string] // the warnings that were logged
}

// current returns the policies for calls that start now.
func (s *settings) current() *methodPolicies { return s.policies.Load() }

// Update changes policies while calls run, as if the options had been passed to [New] after
// those that were passed to it and to earlier Updates. The narrower scope still wins, and settings
// that opts do not mention stay as they are. Calls that start later follow all of the changes,
// and calls in flight none of them. The cost to a call is one atomic load.
//
// During an incident, Update([Disable]()) turns retries and hedging off for every method, whatever
// older options say; only options of single calls, and options for narrower scopes in the same
// Update or a later one, turn them on. A later Update with [WithMaxAttempts] or [WithHedging] for
// all methods puts the older options into effect again, except the one that it replaces. As long as
// the switch is off, gRPC's own retries by a retryPolicy in the channel's service config are off, too,
// except in a dry run.
//
// State outlives an Update if its settings are the same: the default budgets; a budget that is
// passed again; the budgets of [WithRatioBudget] and of a service config's retryThrottling, and
// what [HedgeAtQuantile] has measured, also if a new option with the same settings for the same
// scope replaces the old one; budgets that the new option shares with others are then not used.
// Everything else starts afresh.
//
// The options may be those about policies: CallOptions, WithMethod, [WithIdempotencyLevel],
// [WithServiceConfig] and [WithResolverServiceConfig]. If an option is another one, or has an invalid
// value, the error names the option and the value, and nothing changes. Update is safe for
// concurrent use; Updates take effect one after another.
func (r *Retrier) Update(opts ...Option) error {
	if err := r.check(); err != nil {
		return err
	}
	if err := r.settings.update(opts); err != nil {
		return err
	}
	r.warn() // without a lock, because the logger may call Update
	return nil
}

// update applies the options of one Update.
func (s *settings) update(opts []Option) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	c := config{policies: s.options}
	c.policies.scopes = maps.Clone(s.options.scopes)
	c.policies.update++
	if err := c.applyAll("Update", opts); err != nil {
		return err
	}
	c.policies.keepState(s.options.scopes)
	return s.replace(c.policies)
}

// replace puts options into effect, unless they do not go together. The caller holds mu, or is alone.
func (s *settings) replace(o policyOptions) error {
	if err := o.checkHedging(); err != nil {
		return err
	}
	policies := newMethodPolicies(s.fallback, o)
	s.options = o
	s.policies.Store(policies)
	return nil
}

// A passing call is neither retried nor hedged: it makes one attempt, without a budget, an event or a change of its error, except
// that the attempt timeout may end it. gRPC is kept from retries of its own if a service config is obeyed here.
type passing struct{ *call }

// through makes the call.
func (c passing) through(run func(context.Context) error) error {
	start := instantNow()
	err := c.runWithin(run)
	if err == nil {
		c.retrier.noteAnswer(c.backend, start)
	}
	return err
}

// unary makes a unary call.
func (c passing) unary(req, reply any, invoker grpc.UnaryInvoker) error {
	opts := c.options.passedOn(true, c.stopsGRPC)
	var trailer *metadata.MD // for a call of a server's handler only, because it is an allocation
	if c.worksFor != nil {
		trailer = new(metadata.MD)
		opts = append(slices.Clip(opts), grpc.Trailer(trailer))
	}
	err := c.through(func(ctx context.Context) error { return invoker(ctx, c.method, req, reply, c.cc, opts...) })
	if err != nil && trailer != nil && forbidsRetry(*trailer) {
		c.worksFor.GiveUp()
	}
	return err
}

// stream opens a stream.
func (c passing) stream(desc *grpc.StreamDesc, streamer grpc.Streamer) (grpc.ClientStream, error) {
	stream, err := streamer(c.firstContext(), desc, c.cc, c.method, c.options.passedOn(false, c.stopsGRPC)...)
	if err != nil {
		return stream, err
	}
	if c.stopsGRPC {
		stream.Context() // binds a stream that gRPC has opened, also before the first message
	}
	if c.worksFor != nil {
		stream = &passedStream{stream, c.worksFor}
	}
	return stream, nil
}

// A passedStream is a stream that passes through and is opened by a server's handler.
type passedStream struct {
	grpc.ClientStream
	worksFor *layers.Request
}

// RecvMsg implements grpc.ClientStream. It notes in the request whether the server says "do not retry".
func (s *passedStream) RecvMsg(m any) error {
	err := s.ClientStream.RecvMsg(m)
	if err != nil && !isEOF(err) && forbidsRetry(s.Trailer()) {
		s.worksFor.GiveUp()
	}
	return err
}

// runWithin makes the one attempt of a passing call. The attempt timeout ends an attempt that no other follows
// only if the caller has no deadline, so that the call cannot hang.
func (f *facts) runWithin(run func(context.Context) error) error {
	timeout := time.Duration(0)
	if f.policy != nil && !f.policy.dryRun {
		timeout = f.policy.AttemptTimeout
	}
	ctx := f.firstContext()
	if _, limited := ctx.Deadline(); timeout <= 0 || limited {
		return run(ctx)
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	timer := time.AfterFunc(timeout, func() { cancel(ErrAttemptTimeout) })
	defer timer.Stop()
	err := run(ctx)
	timedOut := context.Cause(ctx) == ErrAttemptTimeout //nolint:errorlint // this call's own value
	if timedOut && err != nil && isTimeoutEnd(readable(err)) {
		return newAttemptTimeoutError(timeout, err)
	}
	return err
}
