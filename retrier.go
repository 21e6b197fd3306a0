package grpcretry

import (
	"fmt"
	"math/rand/v2"

	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/trace"
	"google.golang.org/grpc"
)

// A Retrier provides interceptors that retry calls. It is safe for concurrent use. One Retrier may
// serve any number of ClientConns; those to the same target then share a budget. [New] creates a
// Retrier; the zero Retrier is unusable.
type Retrier struct {
	settings    *settings
	report      reporter
	random      func() float64
	connections *connections
	usage       *usage

	builtInRetryOff bool
}

// New returns a new Retrier. Without options, it makes up to 4 attempts at calls that fail with
// UNAVAILABLE or RESOURCE_EXHAUSTED, within a budget. The error names each option that has an
// invalid value, and the value.
func New(opts ...Option) (*Retrier, error) {
	var c config
	if err := c.applyAll("New", opts); err != nil {
		return nil, err
	}
	r := &Retrier{
		settings:        newSettings(),
		report:          reporter{log: newLogger(c.logger), observers: newObservers(c.observers)},
		random:          rand.Float64,
		connections:     newConnections(),
		usage:           newUsage(&c),
		builtInRetryOff: c.builtInRetryOff,
	}
	if c.random != nil {
		r.random = func() float64 { return unit(c.random()) }
	}
	if err := r.settings.replace(c.policies, 0); err != nil {
		return nil, err
	}
	var err error
	if r.report.meter, err = newMeter(&c, r.settings, r.usage); err != nil {
		return nil, fmt.Errorf("grpcretry: WithMeterProvider: %w", err)
	}
	if c.callSpan {
		r.report.tracer = tracerFrom(c.tracerProvider)
	}
	r.warn()
	return r, nil
}

// DialOptions returns the options for a ClientConn whose calls are retried: both interceptors, and
// [grpc.WithDisableRetry], so that a retryPolicy in the service config does not multiply the
// attempts. gRPC's transparent retries, of requests that no server has seen, stay on.
func (r *Retrier) DialOptions() []grpc.DialOption {
	alone := *r
	alone.builtInRetryOff = true
	return []grpc.DialOption{
		grpc.WithChainUnaryInterceptor(alone.UnaryClientInterceptor()),
		grpc.WithChainStreamInterceptor(alone.StreamClientInterceptor()),
		grpc.WithDisableRetry(),
	}
}

// Policy returns the policy for a method, "/pkg.Service/Method", with all defaults filled in.
// Options that are passed to a single call may change it for that call, and so may the channel's
// service config, see [WithResolverServiceConfig]. An [Retrier.Update] changes it for later calls.
func (r *Retrier) Policy(method string) Policy { return r.settings.current().shown(method).exported() }

// Budget returns the budget from which the retries of a method's calls to a target are paid, for
// programs that deposit or withdraw beside those calls. The target matters if there is a budget for
// each, see [PerTarget]: for RPCs it is gRPC's canonical form, such as "dns:///localhost:80". An
// [Retrier.Update] may replace the budget, so ask for it each time. Do not keep it: a budget of a
// target that is no longer used is forgotten.
func (r *Retrier) Budget(method, target string) Budget {
	return budgetNamed(r.settings.current().of(method).policy.Budget, target)
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

// tracerFrom returns the tracer for call spans; a nil provider means the global one.
func tracerFrom(tp trace.TracerProvider) trace.Tracer {
	if tp == nil {
		tp = otel.GetTracerProvider()
	}
	return tp.Tracer(instrumentationName)
}
