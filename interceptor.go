package grpcretry

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"

	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/trace"
	"google.golang.org/grpc"
)

// A Retrier retries the calls of the ClientConns that its interceptors are installed
// on. It is safe for concurrent use; one may serve any number of ClientConns, and then
// shares its budgets among those to the same target.
type Retrier struct {
	policies    *methodPolicies
	report      reporter
	random      func() float64
	connections *connections

	builtInRetryOff bool
}

// New makes a Retrier. Without options it makes up to 4 attempts on UNAVAILABLE and
// RESOURCE_EXHAUSTED, within a budget. An error names each option that has a bad value,
// and the value.
func New(opts ...Option) (*Retrier, error) {
	c := config{byPattern: map[string][]*callOption{}}
	for i, o := range opts {
		if o == nil {
			c.refuse(fmt.Errorf("grpcretry: New: option number %d is nil", i+1))
			continue
		}
		o.apply(&c)
	}
	if err := errors.Join(c.errs...); err != nil {
		return nil, err
	}
	r := &Retrier{
		policies:        newMethodPolicies(defaultBudgets(), c.all, c.byPattern),
		report:          reporter{log: newLogger(c.logger), observers: newObservers(c.observers)},
		random:          rand.Float64,
		connections:     newConnections(),
		builtInRetryOff: c.builtInRetryOff,
	}
	if err := r.policies.checkHedging(); err != nil {
		return nil, err
	}
	var err error
	if r.report.meter, err = newMeter(&c, r.policies); err != nil {
		return nil, fmt.Errorf("grpcretry: WithMeterProvider: %w", err)
	}
	if c.callSpan {
		r.report.tracer = tracerFrom(c.tracerProvider)
	}
	return r, nil
}

func tracerFrom(tp trace.TracerProvider) trace.Tracer {
	if tp == nil {
		tp = otel.GetTracerProvider()
	}
	return tp.Tracer(instrumentationName)
}

// UnaryClientInterceptor returns the interceptor for unary calls, for
// [grpc.WithChainUnaryInterceptor]. Chain it first, so that what comes after it runs
// for each attempt; chained twice, the outer one retries. Retries tell the server the number of
// previous attempts by a call option: an interceptor below that adds grpc.PerRPCCredentials of
// its own replaces that.
func (r *Retrier) UnaryClientInterceptor() grpc.UnaryClientInterceptor { return r.unary }

// DialOptions returns what a ClientConn needs: both interceptors, and
// [grpc.WithDisableRetry] so that a retryPolicy in the service config does not multiply
// the attempts. gRPC's transparent retries of requests that no server has seen stay on.
func (r *Retrier) DialOptions() []grpc.DialOption {
	alone := *r
	alone.builtInRetryOff = true
	return []grpc.DialOption{
		grpc.WithChainUnaryInterceptor(alone.UnaryClientInterceptor()),
		grpc.WithChainStreamInterceptor(alone.StreamClientInterceptor()),
		grpc.WithDisableRetry(),
	}
}

// Policy returns what applies to a method, "/pkg.Service/Method", with all defaults
// filled in. Options of single calls come on top.
func (r *Retrier) Policy(method string) Policy { return r.policies.of(method).public() }

// UnaryClientInterceptor is the interceptor for unary calls of a [Retrier] of its own.
// It panics where [New] returns an error.
func UnaryClientInterceptor(opts ...Option) grpc.UnaryClientInterceptor {
	return mustNew(opts).UnaryClientInterceptor()
}

// StreamClientInterceptor is the interceptor for streams of a [Retrier] of its own. It
// panics where [New] returns an error.
func StreamClientInterceptor(opts ...Option) grpc.StreamClientInterceptor {
	return mustNew(opts).StreamClientInterceptor()
}

// DialOptions are the [Retrier.DialOptions] of a Retrier of its own. It panics where
// [New] returns an error.
func DialOptions(opts ...Option) []grpc.DialOption { return mustNew(opts).DialOptions() }

func mustNew(opts []Option) *Retrier {
	r, err := New(opts...)
	if err != nil {
		panic(err) //nolint:forbidigo // documented; New is the door for who wants an error
	}
	return r
}

// unary is the loop: attempt, ask, wait.
func (r *Retrier) unary(ctx context.Context, method string, req, reply any, cc *grpc.ClientConn,
	invoker grpc.UnaryInvoker, opts ...grpc.CallOption) error {
	var c call // stays on the stack
	c.retrier, c.ctx, c.cc, c.method = r, ctx, cc, method
	if err := c.prepare(opts, nil, reply); err != nil {
		return err
	}
	switch c.mode {
	case modePassThrough:
		return c.passThrough(req, reply, invoker, opts)
	case modeHedged:
		return hedgeUnary(&c, req, reply, invoker)
	}
	return c.retryUnary(req, reply, invoker)
}

// retryUnary makes attempts until one succeeds or the plan stops.
func (c *call) retryUnary(req, reply any, invoker grpc.UnaryInvoker) error {
	a, found, done := &attempt{}, newReply(reply), false
	defer func() {
		if !done { // something below, or that the application has given us, panics
			c.crashed(a)
			c.endCrashed(errPanicked)
		}
	}()
	c.begin(a)
	for {
		err := invoker(a, c.method, req, reply, c.cc, c.attemptOptions(a)...)
		if err == nil {
			a.measure(c.learner, false)
		}
		next, err := c.next(a, err)
		if next == nil {
			done = true
			return err
		}
		found.restore()
		a = next
	}
}

// passThrough makes a call that is neither retried nor hedged. A method that would be hedged
// if its delay were known is measured all the same.
func (c *call) passThrough(req, reply any, invoker grpc.UnaryInvoker, opts []grpc.CallOption) error {
	if c.learner == nil {
		return invoker(c.ctx, c.method, req, reply, c.cc, opts...)
	}
	first := attempt{method: c.method, number: 1, start: sinceOrigin()}
	err := invoker(c.ctx, c.method, req, reply, c.cc, opts...)
	if err == nil {
		first.measure(c.learner, false)
	}
	return err
}
