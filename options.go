package grpcretry

import (
	"context"
	"fmt"
	"log/slog"
	"slices"
	"time"

	"go.opentelemetry.io/otel/metric"
	"go.opentelemetry.io/otel/trace"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
)

// An Option configures a [Retrier].
//
// Scope beats order: an option for one call wins over one for the exact method, that
// over one for the service, and that over one for all methods. Within one scope the
// later option wins. [WithObserver] is the exception, see there.
type Option interface {
	apply(*config)
}

// A CallOption is an [Option] about how calls are retried. Given to [New] it is for
// every method, within [WithMethod] for those methods, and as a [grpc.CallOption] for
// one call. grpc.WithDefaultCallOptions counts as "one call" for all calls of a
// ClientConn.
//
// A bad value is refused by New; in a single call it ends the call with INTERNAL
// before anything is sent.
type CallOption interface {
	Option
	grpc.CallOption
	callOption() *callOption
}

// callOption implements [CallOption].
type callOption struct {
	grpc.EmptyCallOption
	set func(*Policy)
	err error // names the option and the value, nil if the value is good
}

func (o *callOption) apply(c *config) {
	c.all = append(c.all, o)
	if o.err != nil {
		c.reject(o.err)
	}
}

func (o *callOption) callOption() *callOption { return o }

// newCallOption makes the option called name. err is what is wrong with its value.
func newCallOption(name string, err error, set func(*Policy)) CallOption {
	if err != nil {
		err = fmt.Errorf("grpcretry: %s: %w", name, err)
	}
	return &callOption{set: set, err: err}
}

// WithPolicy sets every field of p that is not zero, as the options of the same names
// do.
func WithPolicy(p Policy) CallOption {
	p.Codes = slices.Clone(p.Codes)
	if p.Hedging != nil {
		hedging := *p.Hedging
		hedging.NonFatalCodes = slices.Clone(hedging.NonFatalCodes)
		p.Hedging = &hedging
	}
	return newCallOption("WithPolicy", p.check(), func(s *Policy) { p.overlay(s) })
}

// WithMaxAttempts limits a call to n attempts, the first one included; n is at least 1,
// and there is no cap above it. 1 turns retries off, as [Disable] does. The default
// is 4. Hedged calls have a limit of their own, see [WithHedging].
func WithMaxAttempts(n int) CallOption {
	return newCallOption("WithMaxAttempts", checkMaxAttempts(n), func(s *Policy) { s.setMaxAttempts(n) })
}

// WithBackoff sets the wait before a retry where the server does not say. Without a
// [WithOverloadBackoff] in any scope it covers RESOURCE_EXHAUSTED too. The default is
// Exponential{}: full jitter, 100 ms doubling to 5 s.
func WithBackoff(b Backoff) CallOption {
	return newCallOption("WithBackoff", checkBackoff(b), func(s *Policy) { s.Backoff = b })
}

// WithOverloadBackoff sets the wait before a retry after RESOURCE_EXHAUSTED, where the
// server does not say. The default is Exponential{Base: time.Second, Max: 20 *
// time.Second}, or what [WithBackoff] sets.
func WithOverloadBackoff(b Backoff) CallOption {
	return newCallOption("WithOverloadBackoff", checkBackoff(b), func(s *Policy) { s.OverloadBackoff = b })
}

// WithCodes sets the status codes that are retried, at least one, and OK not among
// them. The default is UNAVAILABLE and RESOURCE_EXHAUSTED. Whatever the codes, two
// things are never retried: the end of the caller's own context, and a message over a
// size limit, which gRPC reports as RESOURCE_EXHAUSTED.
//
// Only list codes after which repeating the call is safe: UNAVAILABLE already does not
// prove that the server did nothing.
func WithCodes(c ...codes.Code) CallOption {
	c = slices.Clone(c)
	return newCallOption("WithCodes", checkCodes(c), func(s *Policy) { s.Codes = c })
}

// WithClassifier sets a function that is asked about each failed attempt before the
// codes are, with the caller's context. It may say [Retry] or [Stop], or [Default] to
// leave it to the codes. It is not asked about the end of the caller's own context.
// It runs on the goroutine of the call, or at an attempt timeout on a timer's while the call
// waits; it must be safe for concurrent use, and must not use the stream that it is asked about. nil, the default, asks nobody.
func WithClassifier(f func(context.Context, Attempt) Classification) CallOption {
	return newCallOption("WithClassifier", nil, func(s *Policy) { s.Classifier = f })
}

// WithAttemptTimeout ends an attempt after d and retries it, whatever the codes, but only if
// a retry takes its place. If none can (after the last attempt, with an empty budget, if the
// deadline or [WithMaxElapsed] leaves no room, or if a [WithClassifier] says [Stop]), the
// attempt continues and is judged by its own result, so that a slow response is not turned
// into a failure; the budget counts it as Late. In a call without a deadline the attempt ends
// after d in any case, so that the call cannot hang. The server receives the caller's
// deadline, not d. The retry is charged when the timeout fires.
//
// For a stream, d covers the time until the first message from the server arrives, or until
// the response to a client stream arrives: choose it longer than the longest upload. A
// response that was there in time is not lost if the application receives it later: if headers
// have come while the application is not receiving, the timeout starts again when it receives.
// A stream that is committed before the first message is not retried, so its attempt ends after
// d only if the caller has no deadline.
//
// d is at least 0; 0, the default, means no timeout. A classifier, [Backoff] or [Budget] that
// is consulted at the timeout runs on the timer's goroutine while the call waits in gRPC; if it
// panics, the panic continues on the call's own goroutine.
func WithAttemptTimeout(d time.Duration) CallOption {
	return newCallOption("WithAttemptTimeout", checkNotNegative(d), func(s *Policy) { s.AttemptTimeout = d })
}

// WithMaxElapsed limits when an attempt may start: less than d after the start of the
// call. It does not limit how long the attempt runs. 0, the default, means no limit.
func WithMaxElapsed(d time.Duration) CallOption {
	return newCallOption("WithMaxElapsed", checkNotNegative(d), func(s *Policy) { s.MaxElapsed = d })
}

// WithMaxServerDelay limits the wait that a server may ask for, by pushback or
// RetryInfo, before the fifth that is added to a RetryInfo at most. A longer one ends the
// call with [ErrPushback]; it is never shortened. A negative d means no limit; 0 means the
// default, 5 min.
func WithMaxServerDelay(d time.Duration) CallOption {
	return newCallOption("WithMaxServerDelay", nil, func(s *Policy) { s.MaxServerDelay = d })
}

// WithBudget sets what retries are paid from. Give one budget to all that load the
// same backend. The default is NewRatioBudget(RatioBudget{}), one for each target of
// the Retrier; [Unlimited] turns budgets off.
func WithBudget(b Budget) CallOption {
	return newCallOption("WithBudget", checkBudget(b), func(s *Policy) { s.Budget = b })
}

// WithRatioBudget limits retries to a share of the calls that the server answered, with
// a ratio budget of its own for each target. Ratio, Reserve and MinPerSecond are at least
// 0, Window is at least 1 ms; see [RatioBudget] for zeros, and [NewRatioBudget] for the
// rules. The default is WithRatioBudget(RatioBudget{}): a retry for every five answered
// calls of the last 10 s, and a reserve of 3.
//
// The budgets belong to this use of the option: every method, Retrier and call that is
// given the same CallOption shares them, one per target, and a second WithRatioBudget has
// budgets of its own, whatever its settings. So do not create the option anew for each
// call, because every call would then have a full reserve.
func WithRatioBudget(s RatioBudget) CallOption {
	s = s.withDefaults()
	budget := perTargetRatio(s)
	return newCallOption("WithRatioBudget", s.check(), func(p *Policy) { p.Budget = budget })
}

// WithBufferLimit limits the memory, in bytes, of the sent messages that one stream keeps for
// replay. A message that does not fit commits the stream: no retry follows. The limit counts
// what the messages hold in memory, roughly, which for small messages is far more than their
// bytes on the wire. The one request of a server stream does not count. A message whose size
// is unknown (one that is not a proto.Message and has no Size method) never fits.
//
// bytes is at least 0. With 0, streams pass through without retries. The default is 256 KiB.
// Unary calls keep their one message in any case.
func WithBufferLimit(bytes int) CallOption {
	return newCallOption("WithBufferLimit", checkBufferLimit(bytes), func(s *Policy) {
		s.BufferLimit = orDefault(bytes, -1)
	})
}

// WithConnectWait limits how long a call waits, over all its attempts, for a connection that is
// not there: with a server that restarts, attempts fail immediately and reach nobody until gRPC
// has connected again, a second later at the earliest. Such an attempt does not count towards
// [WithMaxAttempts] and is not charged; the next one is sent when the channel is READY, after
// the backoff, so that not all waiting calls return at the same instant. The wait ends with the
// caller's context, and early enough for the deadline and [WithMaxElapsed]. When d is used up
// the call ends with the last status and [ErrNotConnected].
//
// d is at least 0. With 0 a call fails as gRPC lets it fail, and an attempt that reached no
// server counts like any other. The default is 10 s: gRPC's third redial may come 6 s after the
// loss of a connection. Calls with [grpc.WaitForReady] wait inside gRPC instead.
func WithConnectWait(d time.Duration) CallOption {
	return newCallOption("WithConnectWait", checkNotNegative(d), func(s *Policy) {
		s.ConnectWait = orDefault(d, -1)
	})
}

// WithCommitOnHeaders follows gRFC A6 #when-retries-are-valid to the letter: once response
// headers have arrived, no retry follows, not even in a unary call, which then ends with
// [ErrCommitted]. The default is off, because the application has seen nothing of a failed
// attempt, whether headers had arrived or not.
func WithCommitOnHeaders(on bool) CallOption {
	return newCallOption("WithCommitOnHeaders", nil, func(s *Policy) { s.CommitOnHeaders = on })
}

// Disable turns retries off. The call passes straight through: no budget, no event, its
// error untouched, no hedging. A narrower [WithMaxAttempts] or [WithHedging] turns that on
// again.
func Disable() CallOption {
	return newCallOption("Disable", nil, func(s *Policy) { s.setMaxAttempts(1) })
}

// WithMethod applies opts to "/pkg.Service/Method" or, with "/pkg.Service/", to all
// methods of a service. A second use for the same pattern adds its options after the
// first one's.
func WithMethod(pattern string, opts ...CallOption) Option {
	return configOption(func(c *config) {
		if err := checkPattern(pattern); err != nil {
			c.reject(fmt.Errorf("grpcretry: WithMethod: %w", err))
		}
		for _, o := range opts {
			if o == nil {
				c.reject(fmt.Errorf("grpcretry: WithMethod: %s: option is nil", pattern))
				continue
			}
			inner := o.callOption()
			if inner.err != nil {
				c.reject(fmt.Errorf("%w (in WithMethod %s)", inner.err, pattern))
			}
			c.byPattern[pattern] = append(c.byPattern[pattern], inner)
		}
	})
}

// WithObserver calls f with every [Event] of every call that may be retried, on the
// goroutine of the call: f must be safe for concurrent use, a slow f slows the call,
// and a panic of f is the caller's. Events of a hedged call come one at a time too, but
// from any of its goroutines. A second WithObserver adds an observer; they are
// called in order. nil is ignored. An observer that wants to follow single calls puts
// a record of its own into the context of the call: f gets that context.
//
// With an observer, a classifier or [WithCommitOnHeaders], gRPC is asked for the
// response headers and Attempt.Header is filled; without them it stays nil, as
// copying headers costs every call three allocations.
func WithObserver(f func(context.Context, Event)) Option {
	return configOption(func(c *config) {
		if f != nil {
			c.observers = append(c.observers, f)
		}
	})
}

// WithLogger logs retries at debug level; at warn level calls that gave up (in a burst
// at most a hundred, then one a second, with the number left out), once when a budget is
// exhausted, and once per method that is left to gRPC's own retries; and at info level
// once when a budget that was exhausted has refused nothing for 10 seconds. nil, the default, logs nothing. A call
// that succeeds at once logs nothing.
func WithLogger(l *slog.Logger) Option {
	return configOption(func(c *config) { c.logger = l })
}

// WithTracerProvider sets where the spans of [WithCallSpan] come from. The default is
// the global provider of OpenTelemetry, [go.opentelemetry.io/otel.GetTracerProvider].
// Span events need none: they go to the caller's span.
func WithTracerProvider(tp trace.TracerProvider) Option {
	return configOption(func(c *config) { c.tracerProvider = tp })
}

// WithCallSpan makes a span for each call that may be retried, with the attempts below
// it. It has the call's final status. Off by default.
func WithCallSpan(on bool) Option {
	return configOption(func(c *config) { c.callSpan = on })
}

// WithMeterProvider records metrics of all calls that may be retried: attempts, calls by
// outcome, waits, and the level and the refusals of the budgets; the package comment has
// the table. nil means the global provider, [go.opentelemetry.io/otel.GetMeterProvider].
// Without this option there are no metrics.
//
// Methods that no generated stub calls are counted as "other", and so is everything after
// the first 2000 pairs of target and method. Two Retriers on one provider count into
// the same series, but grpcretry.budget.balance then shows the budget of only one of them
// if both have one of the same name and target: share the budget, or the Retrier.
func WithMeterProvider(mp metric.MeterProvider) Option {
	return configOption(func(c *config) { c.metrics, c.meterProvider = true, mp })
}

// WithGRPCMetrics records, where there is a [WithMeterProvider], three instruments of gRFC
// A96 as well, with its attributes grpc.method and grpc.target: grpc.client.call.retries
// and grpc.client.call.hedges, the further attempts of each call that had some, the latter
// of hedged calls; and grpc.client.call.retry_delay, the time that each call was without an
// attempt under way. Off by default. Do not turn it on where
// gRPC's own OpenTelemetry plugin records them too: to gRPC each attempt is a call, without
// retries and without delay, and the two would be mixed in one series.
//
// The fourth of A96 is not recorded: transparent retries are gRPC's own and not seen from
// here.
func WithGRPCMetrics(on bool) Option {
	return configOption(func(c *config) { c.grpcMetrics = on })
}

// WithBuiltInRetryDisabled says that the ClientConn was dialed with
// [grpc.WithDisableRetry]. Without it, a method for which the channel's service config
// has a retryPolicy is left to gRPC, so that the two do not multiply.
// [Retrier.DialOptions] implies it.
func WithBuiltInRetryDisabled() Option {
	return configOption(func(c *config) { c.builtInRetryOff = true })
}

// config is what the options of a [Retrier] come to.
type config struct {
	all       []*callOption            // for every method
	byPattern map[string][]*callOption // for the methods of a pattern

	observers       []func(context.Context, Event)
	logger          *slog.Logger
	tracerProvider  trace.TracerProvider
	callSpan        bool
	metrics         bool
	meterProvider   metric.MeterProvider // nil: the global one
	grpcMetrics     bool
	builtInRetryOff bool

	errs []error
}

type configOption func(*config)

func (f configOption) apply(c *config) { f(c) }

func (c *config) reject(err error) { c.errs = append(c.errs, err) }

// firstError is what is wrong with the first bad option of a call.
func firstError(opts []*callOption) error {
	for _, o := range opts {
		if o.err != nil {
			return o.err
		}
	}
	return nil
}
