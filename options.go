package grpcretry

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"time"

	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/metric"
	"go.opentelemetry.io/otel/trace"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"

	"github.com/grpcretry/grpcretry/internal/instruments"
	"github.com/grpcretry/grpcretry/internal/patterns"
)

// An Option configures a [Retrier].
//
// The scope counts before the order: an option for one call wins over one for the exact method,
// that over one for the service, and that over one for all methods. Within one scope, a later use
// of an option replaces an earlier one. [WithPolicy], [WithMethod] and [WithObserver] add to
// earlier uses instead, as their comments say.
type Option interface {
	apply(*config)
}

// A CallOption is an [Option] that controls how calls are retried. Passed to [New] it applies to
// every method, passed to [WithMethod] to those methods, and passed to a call as a
// [grpc.CallOption] to that call. [grpc.WithDefaultCallOptions] passes it to every call of a
// ClientConn, so it wins over those passed to New.
//
// New rejects invalid values. If an option passed to a single call has one, the call fails with
// INTERNAL before anything is sent. Without an interceptor of this package, gRPC ignores it.
type CallOption interface {
	Option
	grpc.CallOption
	callOption() *policyOption
}

// policyOption implements [CallOption].
type policyOption struct {
	grpc.EmptyCallOption
	partial
	err error // names the option and the invalid value; nil if the value is valid
}

func (o *policyOption) apply(c *config) {
	if o.err != nil {
		c.reject(o.err)
	}
	c.policies.give(scopeAll, o.partial)
}

func (o *policyOption) callOption() *policyOption { return o }

// newCallOption returns the option called name, which sets some fields to those of p; err, if not nil,
// says why the value is invalid.
func newCallOption(name string, set fields, p Policy, err error) *policyOption {
	if err != nil {
		err = fmt.Errorf("grpcretry: %s: %w", name, err)
	}
	if set.has(fieldMaxAttempts) && p.MaxAttempts == 1 {
		set = set&^fieldMaxAttempts | switchOff
	}
	return &policyOption{partial: partial{Policy: p, set: set}, err: err}
}

// WithPolicy sets several settings at once: every field of p that is not zero, as the options of
// the same names do, except that -1 in BufferLimit or Patience is 0 in the option. Zero fields leave what
// wider scopes and earlier options have set.
func WithPolicy(p Policy) CallOption {
	o := &policyOption{}
	add := func(given bool, option func() CallOption) {
		if !given {
			return
		}
		field := option().callOption()
		if field.err != nil && o.err == nil {
			o.err = fmt.Errorf("grpcretry: WithPolicy: %s", strings.TrimPrefix(field.err.Error(), "grpcretry: With"))
		}
		o.add("", &field.partial)
	}
	add(p.MaxAttempts != 0, func() CallOption { return WithMaxAttempts(p.MaxAttempts) })
	add(p.Backoff != nil, func() CallOption { return WithBackoff(p.Backoff) })
	add(p.OverloadBackoff != nil, func() CallOption { return WithOverloadBackoff(p.OverloadBackoff) })
	add(p.Codes != nil, func() CallOption { return WithCodes(p.Codes...) })
	add(p.Classifier != nil, func() CallOption { return WithClassifier(p.Classifier) })
	add(p.AttemptTimeout != 0, func() CallOption { return WithAttemptTimeout(p.AttemptTimeout) })
	add(p.MaxElapsed != 0, func() CallOption { return WithMaxElapsed(p.MaxElapsed) })
	add(p.MaxServerDelay != 0, func() CallOption { return WithMaxServerDelay(p.MaxServerDelay) })
	add(p.Patience != 0, func() CallOption { return WithPatience(max(p.Patience, 0)) })
	add(p.Budget != nil, func() CallOption { return WithBudget(p.Budget) })
	add(p.Hedging != nil, func() CallOption { return WithHedging(*p.Hedging) })
	add(p.BufferLimit < -1, func() CallOption {
		return newCallOption("WithBufferLimit", fieldBufferLimit, Policy{}, fmt.Errorf("%d, want at least -1", p.BufferLimit))
	})
	add(p.BufferLimit == -1, func() CallOption { return WithBufferLimit(0) })
	add(p.BufferLimit > 0, func() CallOption { return WithBufferLimit(p.BufferLimit) })
	add(p.UnsentOnly, func() CallOption { return WithUnsentOnly(true) })
	add(p.dryRun, func() CallOption { return WithDryRun(true) })
	return o
}

// WithMaxAttempts limits a call to n attempts, including the first. n is at least 1, and has no
// upper limit; 1 turns retries and hedging off, as [Disable] does. Hedges count as well, see
// [WithHedging]; attempts that reached no server do not, see [WithPatience].
//
// The default is 4. More than 5 attempts by the default backoff need a longer [WithPatience]. A later WithMaxAttempts
// replaces an earlier one.
func WithMaxAttempts(n int) CallOption {
	return newCallOption("WithMaxAttempts", fieldMaxAttempts, Policy{MaxAttempts: n}, checkMaxAttempts(n))
}

// WithBackoff sets the wait before a retry if the server does not ask for one. It also applies
// after RESOURCE_EXHAUSTED, unless [WithOverloadBackoff] is used in any scope. New rejects nil.
//
// The default is Exponential{Multiplier: 4, Jitter: EqualJitter}: 50 to 100 ms, then 200 to 400 ms,
// 0.8 to 1.6 s, and 2.5 to 5 s from there on. A later WithBackoff replaces an earlier one.
func WithBackoff(b Backoff) CallOption {
	return newCallOption("WithBackoff", fieldBackoff, Policy{Backoff: b}, checkGiven("backoff", b))
}

// WithOverloadBackoff sets the wait before a retry after RESOURCE_EXHAUSTED if the server does
// not ask for one. New rejects nil.
//
// The default is the backoff that [WithBackoff] sets, or else Exponential{Base: time.Second,
// Max: 20 * time.Second}. A later WithOverloadBackoff replaces an earlier one.
func WithOverloadBackoff(b Backoff) CallOption {
	return newCallOption("WithOverloadBackoff", fieldOverloadBackoff, Policy{OverloadBackoff: b}, checkGiven("backoff", b))
}

// WithCodes sets the status codes that are retried: at least one, and only codes that gRPC
// defines, without OK. Whatever the codes, three kinds of failure are not retried: the end of the
// caller's own context; a message over a size limit, which gRPC reports as RESOURCE_EXHAUSTED; and
// an RPC that the load balancer dropped on purpose, which gRPC reports as UNAVAILABLE. A [WithClassifier]
// that returns [Retry] overrules the last two.
//
// List only codes after which it is safe to repeat the call. Even UNAVAILABLE does not prove that
// the server did nothing.
//
// The default is UNAVAILABLE and RESOURCE_EXHAUSTED. A later WithCodes replaces an earlier one.
func WithCodes(c ...codes.Code) CallOption {
	c = slices.Clone(c)
	return newCallOption("WithCodes", fieldCodes, Policy{Codes: c}, checkCodes(c))
}

// WithClassifier sets a function that decides whether a failed attempt is retryable, before the
// codes do: it returns [Retry] or [Stop], or [Default] to leave the decision to the codes. Its
// context is the caller's. It is not called for a failure that the end of that context explains, nor if the call is
// committed. It cannot choose the wait; an interceptor chained after this one can, with a RetryInfo in the status.
//
// f must be safe for concurrent use. It runs on the call's goroutine or, at an attempt timeout, on
// a timer's goroutine while the call waits; see [WithHedging] for hedged calls. An attempt that nothing
// replaces at its timeout is judged again when it ends. f must not use the stream that it judges.
//
// A nil f, the default, leaves every decision to the codes. A later WithClassifier replaces an
// earlier one.
func WithClassifier(f func(context.Context, Attempt) Classification) CallOption {
	return newCallOption("WithClassifier", fieldClassifier, Policy{Classifier: f}, nil)
}

// WithRetryIf is a [WithClassifier] in short: a failed attempt is retryable if f returns true for its
// error, whatever the codes, and final otherwise. f must be safe for concurrent use. A nil f leaves every
// decision to the codes. A later WithRetryIf or WithClassifier replaces an earlier one.
func WithRetryIf(f func(error) bool) CallOption {
	if f == nil {
		return WithClassifier(nil)
	}
	return WithClassifier(func(_ context.Context, a Attempt) Classification {
		if f(a.Err) {
			return Retry
		}
		return Stop
	})
}

// WithAttemptTimeout has another attempt replace one that has run for d, whatever the codes. The
// replacement is a retry like any other: it follows after its backoff, and is paid for when it is
// sent. Only then is the slow attempt cancelled; until then it may still respond. If nothing can
// replace it (after the last attempt, with an empty budget, if the deadline, [WithMaxElapsed] or
// [WithPatience] leaves no room, or if a [WithClassifier] says [Stop]), it continues and is judged by
// its own result, so that a slow response is not turned into a
// failure; the budget earns nothing from it. In a call without a deadline such an attempt ends after d,
// so that the call cannot hang. The timeout of a service config counts as a deadline; if the
// config gets or loses it while a call's first attempt runs, gRPC may not end that attempt, and neither may d.
// The server receives the caller's deadline, not d.
//
// If there is no connection when d is over, and the caller has set a deadline, the attempt may go on, and its
// server has the whole of d to respond once there is one. If only a service config limits the call, a first attempt
// goes on as well, and nothing replaces it.
//
// For a stream, d covers the time in which the application waits for the first message, in RecvMsg, or
// for headers, in Header: uploads, and whatever the application does before that, take as long as they take.
// A stream that is committed before the first message is not retried, so its attempt ends after
// d only if the caller has no deadline.
//
// In a hedged call, one further attempt is decided on at a time: while a replacement waits for its backoff, no hedge is
// sent, and the timeouts of other attempts take effect only when it has been sent or given up. So set d well above the hedge delay.
//
// Set d well above the latency of a server under load: when all its responses are slow, and not only those of one replica, replacements
// lengthen its queue. Processes that make few calls each cannot tell the two apart, and a fleet of them then recovers later than without d.
//
// A classifier, [Backoff] or [Budget] that is consulted at the timeout runs on the timer's
// goroutine while the call waits in gRPC, and so does one that is consulted when the replacement is
// due; if it panics, the panic continues on the call's own goroutine.
//
// A unary call that passes straight through, because of [Disable] or one attempt, ends after d
// if its caller has set no deadline, whatever a service config says. Streams that pass through have no timeout.
//
// d is at least 0; 0, the default, means no timeout. A later WithAttemptTimeout replaces an
// earlier one.
func WithAttemptTimeout(d time.Duration) CallOption {
	return newCallOption("WithAttemptTimeout", fieldAttemptTimeout, Policy{AttemptTimeout: d}, checkNotNegative(d))
}

// WithMaxElapsed limits when an attempt may start: less than d after the start of the call. It does
// not limit how long the attempt runs. The call ends with [ErrMaxElapsed] instead of a wait that
// would be too long.
//
// d is at least 0; 0, the default, means no limit. A later WithMaxElapsed replaces an earlier one.
func WithMaxElapsed(d time.Duration) CallOption {
	return newCallOption("WithMaxElapsed", fieldMaxElapsed, Policy{MaxElapsed: d}, checkNotNegative(d))
}

// WithMaxServerDelay limits the wait that a server may ask for, by pushback or RetryInfo. A server
// that asks for more ends the call with [ErrPushback]; the wait is never shortened. The limit
// applies to a RetryInfo as the server sent it, without the up to 20% that are added to it.
//
// A negative d means no limit; 0 means the default, 5 minutes. A later WithMaxServerDelay replaces
// an earlier one.
func WithMaxServerDelay(d time.Duration) CallOption {
	return newCallOption("WithMaxServerDelay", fieldMaxServerDelay, Policy{MaxServerDelay: d}, nil)
}

// WithBudget sets the budget that retries spend from. Share one budget among all clients of
// the same backend. [Unlimited] turns the limit off. New rejects nil.
//
// The default is NewRatioBudget(RatioBudget{}), one for each target of the Retrier. A later
// WithBudget or [WithRatioBudget] replaces an earlier one.
func WithBudget(b Budget) CallOption {
	return newCallOption("WithBudget", fieldBudget, Policy{Budget: b}, checkGiven("budget", b))
}

// WithRatioBudget limits retries to a share of the calls that the server answered, with a ratio
// budget for each target. [RatioBudget] has the ranges and defaults of its fields, and [NewRatioBudget]
// the rules.
//
// The budgets belong to the CallOption that is returned: every method, Retrier and call that uses
// it shares them, one per target. Another WithRatioBudget has budgets of its own, even with the
// same settings. So do not create a new one for each call, because every call would then have a
// full reserve.
//
// The default is WithRatioBudget(RatioBudget{}): a retry for every five answered calls of the last
// 10 s, and a reserve of 3. A later WithRatioBudget or [WithBudget] replaces an earlier one.
func WithRatioBudget(s RatioBudget) CallOption {
	s = s.withDefaults()
	o := newCallOption("WithRatioBudget", fieldBudget, Policy{Budget: perTargetRatio(s)}, s.check())
	o.keepsBudget = true
	return o
}

// WithBufferLimit limits the sent messages that one stream keeps for replay. A message that does not fit
// commits the stream: no retry follows. As in gRPC's own buffer, a message counts with its encoded size, in
// bytes, and a prefix of five. The one request of a server stream does not count. A message whose size
// is unknown (one that is not a proto.Message and has no Size method) never fits.
//
// bytes is at least 0. With 0, streams pass through without retries. Unary calls keep their one
// message in any case. The default is 256 KiB. A later WithBufferLimit replaces an earlier one.
// All streams of a Retrier together keep at most 64 MiB: a message that does not fit commits its stream, which
// is logged once, and counted by the metrics.
func WithBufferLimit(bytes int) CallOption {
	return newCallOption("WithBufferLimit", fieldBufferLimit, Policy{BufferLimit: cmp.Or(bytes, -1)}, checkNotNegative(bytes))
}

// WithPatience limits how long calls wait for a target, a backend as the Retrier knows it, that is
// failing: d counts from the target's first retryable failure after its last call that was answered
// in time, and from the call's own first failure. If no attempt fails and no call gives up for as
// long as the longest patience of the calls that have met the failures (at most 10 s, if d is no
// longer), the next failure counts as the first. For the call itself, so does the failure of an
// attempt that a server had for longer than d and 10 s, a quiet stream for example: attempts that
// are all that slow end with [WithMaxAttempts], the budget or the deadline. Calls to a target learn
// from one another:
//
//   - While the target is failing, a backoff is at least u times as long as the failing has lasted,
//     with u uniform in [0, 1), or as the time left if it would reach the deadline or
//     [WithMaxElapsed], so that those who wait do not all return at once.
//   - A retry that can learn nothing is not sent: if nothing was answered during its wait, but
//     another attempt was made and failed, the call waits again, for u times the length of the
//     trouble and at least 20 ms. That costs no token and counts no attempt. First attempts are
//     always sent, and so is a retry at the time of a pushback, which is its turn, or of a
//     RetryInfo if more than half of d is over or nothing has failed in the second half of the
//     wait. The first attempt that is answered ends all of this; if it was sent before the failures
//     began, only after a second without another failure: a server that begins to fail goes on with
//     what it has begun.
//   - If several calls wait, a ratio budget without a floor keeps its tokens: they wait again in
//     the same way while a retry of theirs is in flight, and until the trouble has lasted seven
//     times as long as at the latest failure, at least for 50 ms after it, but at most for a
//     token's share of half the time, up to 10 s, that was left then. So nearly all calls of a
//     burst that nobody follows survive two seconds on the reserve of three.
//   - Only an absent target is waited for. If the budget refuses a retry, the call waits again,
//     unless the target has answered something during its wait: then it is overloaded, and the call
//     ends with [ErrBudgetExhausted]. There are two exceptions for such a ratio budget. A target
//     that has not failed for a quarter of the call's trouble is back, and the call waits for a
//     token that a retry may give back, if one was sent, or an attempt failed, in the last three
//     seconds (a third of d, if that is less). And for as long after the call's own first failure
//     or, if that was earlier, the first of those that follow one another within a second, answers
//     do not count: another method may work while this one is down. Nothing waits for
//     [NewThrottle].
//   - An attempt that reached no server, because there was no connection, does not count towards
//     [WithMaxAttempts], and its token is returned. The call waits until the channel is READY and
//     then for its backoff. Calls with [grpc.WaitForReady] wait inside gRPC instead. A channel with
//     a short [grpc.WithIdleTimeout] becomes idle meanwhile, and drops a connection that it is
//     making: it is woken at the times of gRPC's default backoff, and after a drop one of the
//     waiting calls sends its attempt early, which keeps the channel awake.
//
// No wait is started that would outlast d, not even a backoff (only the one after a connection
// may), and at most 10,000 calls wait for one target. Other calls whose attempt fails end
// immediately, with the last status and [ErrTargetDown]: a target that is gone holds nobody up. A
// wait that the server asks for may outlast d, but counts for the waits after it: where servers ask
// for long ones, set a longer d. The deadline and [WithMaxElapsed] end a wait earlier.
//
// d is at least 0. With 0 calls wait for nothing but their backoff and the server's delays: without
// a token or a connection they end, as soon as an attempt has failed or, later, when the retry is
// due. With less than the first backoff, only retries whose time the server names are made, which
// is logged ([WithLogger]). The default is 10 s or, if it is longer, twice the time that the waits
// of an [Exponential], [Decorrelated] or [Constant] set by [WithBackoff] or [WithOverloadBackoff]
// can add up to, at most two days; beside a Backoff of another type with long waits, or many
// attempts by the default backoff, set it. A later WithPatience replaces an earlier one.
func WithPatience(d time.Duration) CallOption {
	return newCallOption("WithPatience", fieldPatience, Policy{Patience: cmp.Or(d, -1)}, checkNotNegative(d))
}

// WithUnsentOnly restricts retries to failures after which a retry cannot run the method twice:
// the attempt certainly ran nowhere, or the server asked for another one, by a pushback of at
// least 0 or by a positive RetryInfo. It is for methods that must not run twice, but whose calls
// still deserve to survive a restart of the server. Everything else applies as well: the codes, a
// classifier, the number of attempts, the deadline and the budget. Neither a classifier that
// returns [Retry] nor [WithAttemptTimeout] overrides the rule. A call that would have been retried
// without it returns an [Error] whose Reason is [ErrMayHaveRun], also after its first attempt; in metrics
// and spans the reason is "may_have_run".
//
// An attempt certainly ran nowhere if gRPC has reported its end and has opened no stream for it:
// there was no connection, or gRPC found no room on one, or the credentials or the load balancer
// refused it; or if the server has refused the stream, which for a unary call only gRPC can tell. As soon
// as any other stream is open, the method may have run, even if the connection breaks a moment later.
// The retries that gRPC makes by itself below are as safe: it makes them only if it has sent nothing, or
// if the server has reported that it processed nothing. The retries by the retryPolicy of a service
// config are not as safe, so such a method is not left to gRPC, but dial with [Retrier.DialOptions] to be
// certain: without it, gRPC still retries by the policies of xDS routes, by a policy that arrives while
// interceptors below run, if a server ends a unary call before the request is sent, and if an interceptor
// below replaces the Context of a stream that receives before it sends.
//
// Interceptors chained below must pass all call options on. An attempt whose options they drop
// counts as one that may have run. The rule cannot see a second request that an interceptor
// below, a proxy or a server makes by itself.
//
// An attempt in flight is never replaced by another. So with an attempt timeout, an attempt goes
// on to the caller's deadline; without a deadline it is cut, and the call then ends unless the
// attempt ran nowhere. Hedging is off, whatever scope [WithHedging] comes from.
//
// A first attempt that succeeds costs three allocations more than otherwise. The default is false.
// A later WithUnsentOnly replaces an earlier one.
func WithUnsentOnly(on bool) CallOption {
	return newCallOption("WithUnsentOnly", fieldUnsentOnly, Policy{UnsentOnly: on}, nil)
}

// WithDryRun has calls make one attempt, whose result is returned unchanged, and report what would have
// been done after a failure: the Decision, the span event, the metrics and the debug page name
// "would_retry", and the wait, or the reason why no attempt would have followed. So a
// fleet can look before retries are turned on, by method or with [Retrier.Update].
//
// Everything that a policy does is left out: there is no attempt timeout, no hedge and no wait, and gRPC's
// own retries stay as they are, and so do those of a Retrier that is chained below. Whether a retry would
// have been paid for depends on the budget's balance; nothing is spent. Results of attempts are reported to
// the budgets, and failures are remembered for [WithPatience], as always.
//
// The default is false. A later WithDryRun replaces an earlier one.
func WithDryRun(on bool) CallOption {
	return newCallOption("WithDryRun", fieldDryRun, Policy{dryRun: on}, nil)
}

// Disable turns retries and hedging off. The call passes straight through to gRPC: without a
// budget, without events, and with its error unchanged. Only [WithAttemptTimeout] may still end a
// unary call that has no deadline. A later or narrower [WithMaxAttempts] turns retries on again, and
// with [WithHedging] beside it hedging; WithHedging alone does not, because a hedge is a second attempt.
func Disable() CallOption { return WithMaxAttempts(1) }

// WithMethod applies opts to one method, with a pattern of the form "/pkg.Service/Method", or to
// all methods of a service, with "/pkg.Service/". Patterns for functions, see [Retrier.Do], may have
// more words: one that ends in a slash applies to all names that begin with it, and a longer one
// wins. [New] rejects patterns without two slashes, those with an empty word, a star, a control character or a
// blank at the edge of a word, and nil options. One that names no method of the protos that the program links
// is no error, and is logged ([WithLogger]). A second WithMethod with the same pattern adds its options after
// those of the first.
func WithMethod(pattern string, opts ...CallOption) Option {
	opts = slices.Clone(opts)
	return configOption(func(c *config) {
		if err := patterns.Check(pattern); err != nil {
			c.reject(fmt.Errorf("grpcretry: WithMethod: %w", err))
		}
		c.give(pattern, "WithMethod "+pattern, opts)
	})
}

// WithObserver calls f with every [Event] of every call that may be retried, with the call's
// context. f runs on the call's goroutine, so a slow f slows the call down, and a panic in f
// reaches the caller. The events of a call with hedging or an attempt timeout also come one at a time, but from
// any of its goroutines; the call waits for f, even if it has its response. If a stream ends while no goroutine
// uses it, f runs on a goroutine of the library, where a panic ends the program. f must be safe for concurrent use,
// and must not use the call's own stream before [CallEnd]. To follow single calls, put a value into the call's
// context.
//
// With an observer or a classifier, gRPC is asked for the response headers, and Attempt.Header is
// set; otherwise it stays nil, because copying headers costs every call three allocations.
//
// A nil f is ignored. A second WithObserver adds an observer; observers are called in the order
// in which they were added.
func WithObserver(f func(context.Context, Event)) Option {
	return fixedOption("WithObserver", func(c *config) {
		if f != nil {
			c.observers = append(c.observers, f)
		}
	})
}

// WithLogger writes to l
//
//   - at debug level: retries, hedges, and what a dry run would have done;
//   - at warn level: calls that gave up, but not for want of a token or of patience (at most a hundred in a burst, then one a
//     second, with the number of calls left out), exhausted budgets (once, until they recover), that calls wait
//     for a target, and that they do not any more (once each, until it answers), and, once each,
//     what is doubtful about the options (a pattern that names no method of the protos that the program
//     links, an attempt timeout that no attempt can meet, a policy that can never retry, settings that
//     contradict each other), methods that are left to gRPC's own retries or cannot be hedged,
//     methods whose streams are sent the same object twice in a row, calls with an option of go-grpc-middleware's retry package, and a
//     full replay memory;
//   - at info level: targets that answer again, and budgets that have recovered: with the first retry that
//     is sent after 10 seconds without a refusal.
//
// A call that succeeds on the first attempt logs nothing, except that its target answers again. A nil
// l, the default, turns logging off. A later WithLogger replaces an earlier one.
func WithLogger(l *slog.Logger) Option {
	return fixedOption("WithLogger", func(c *config) { c.logger = l })
}

// WithTracerProvider sets the provider for the spans of [WithCallSpan]. Span events need no
// provider, because they go to the caller's span. nil, the default, means OpenTelemetry's global
// provider, [go.opentelemetry.io/otel.GetTracerProvider]. A later WithTracerProvider replaces an
// earlier one.
func WithTracerProvider(tp trace.TracerProvider) Option {
	return fixedOption("WithTracerProvider", func(c *config) { c.tracerProvider = tp })
}

// WithCallSpan starts a span for each call that may be retried, with the call's final status. The attempts and the waits before
// retries are its children. The default is false. A later WithCallSpan replaces an earlier one.
func WithCallSpan(on bool) Option {
	return fixedOption("WithCallSpan", func(c *config) { c.callSpan = on })
}

// WithMeterProvider records metrics. Given to [New], it does so for all calls that may be retried: attempts,
// calls by outcome, waits, the budgets' refusals, and the levels of those for retries. As a [ServerOption], it records requests that
// were retries, and responses that say "do not retry". docs/observing.md in the repository lists them all. nil
// means OpenTelemetry's global provider, [go.opentelemetry.io/otel.GetMeterProvider]. The default,
// without this option, is no metrics. A later WithMeterProvider replaces an earlier one.
//
// Calls that are not made through a generated stub are counted with the method "other", and so are
// all calls after the first 2000 pairs of target and method. Two Retriers with the same provider
// add up in the same series, but if both have a budget of the same scope and target,
// grpcretry.budget.balance shows only one of the two: share the budget, or the Retrier.
//
// The provider keeps the counters until it is shut down, also those of a Retrier that nobody holds any
// more. So a program that makes new Retriers again and again should give them no provider.
func WithMeterProvider(mp metric.MeterProvider) meterOption {
	return meterOption{
		fixedOption("WithMeterProvider", func(c *config) { c.meterProvider = cmp.Or(mp, otel.GetMeterProvider()) }),
		serverOption(func(s *server) { s.metrics = instruments.NewServer(cmp.Or(mp, otel.GetMeterProvider())) }),
	}
}

// A meterOption is for clients and for servers.
type meterOption struct {
	Option
	ServerOption
}

// WithBuiltInRetryDisabled declares that the ClientConn was dialed with [grpc.WithDisableRetry].
// Without it, methods with a retryPolicy in the channel's service config are left to gRPC, so that
// the two kinds of retries do not multiply; not, however, with [WithServiceConfig] or
// [WithResolverServiceConfig], nor methods with [WithUnsentOnly], nor calls that make only one attempt
// because of [UnaryServerInterceptor]. A policy that appears or disappears while a call runs, or while
// the channel is idle, may have that call retried by both, or by neither and without its attempt timeout.
// [Retrier.DialOptions] implies this option, and prevents that. A second use has no further effect.
func WithBuiltInRetryDisabled() Option {
	return fixedOption("WithBuiltInRetryDisabled", func(c *config) { c.builtInRetryOff = true })
}

// config collects the options of [New] or [Retrier.Update].
type config struct {
	policies policyOptions

	// The rest is never changed by an Update.
	observers       []func(context.Context, Event)
	random          func() float64 // nil means rand.Float64
	logger          *slog.Logger
	tracerProvider  trace.TracerProvider
	callSpan        bool
	meterProvider   metric.MeterProvider // nil means no metrics
	builtInRetryOff bool
	replayMemory    int64 // in bytes

	errs []error
}

type configOption func(*config)

func (f configOption) apply(c *config) { f(c) }

// fixedOption returns an option that is for New only.
func fixedOption(name string, set func(*config)) Option {
	return configOption(func(c *config) {
		if c.policies.update > 0 {
			c.reject(fmt.Errorf("grpcretry: Update: %s is for New only", name))
			return
		}
		set(c)
	})
}

// applyAll applies the options of the function called caller, and returns what is wrong with them.
func (c *config) applyAll(caller string, opts []Option) error {
	for i, o := range opts {
		if o == nil {
			c.reject(fmt.Errorf("grpcretry: %s: option number %d is nil", caller, i+1))
			continue
		}
		o.apply(c)
	}
	return errors.Join(c.errs...)
}

// give adds the options given to an option, such as WithMethod, that narrows their scope.
func (c *config) give(scope, within string, opts []CallOption) {
	c.policies.give(scope, partial{}) // a pattern is named even if it has no options
	for _, o := range opts {
		if o == nil {
			c.reject(fmt.Errorf("grpcretry: %s: option is nil", strings.Replace(within, " ", ": ", 1)))
			continue
		}
		own := o.callOption()
		if own.err != nil {
			c.reject(fmt.Errorf("%w (in %s)", own.err, within))
		}
		c.policies.give(scope, own.partial)
	}
}

func (c *config) reject(err error) { c.errs = append(c.errs, err) }

// firstError returns the error of the first option with an invalid value; nil if there is none.
func firstError(opts []*policyOption) error {
	for _, o := range opts {
		if o.err != nil {
			return o.err
		}
	}
	return nil
}
