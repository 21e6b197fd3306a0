package grpcretry

import (
	"context"

	"google.golang.org/grpc"
)

// UnaryClientInterceptor returns the interceptor for unary calls, for
// [grpc.WithChainUnaryInterceptor]. Chain it first, so that the interceptors chained after it run
// for each attempt. If it is chained twice, only the outer one retries.
//
// Retries carry the number of previous attempts to the server in a [grpc.PerRPCCredsCallOption],
// together with the call's own credentials. An interceptor chained after this one that appends
// credentials to the call options replaces that option, and the server then does not receive the
// number. Such an interceptor must not put its option first: gRPC obeys the last one.
func (r *Retrier) UnaryClientInterceptor() grpc.UnaryClientInterceptor { return r.unary }

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

// unary makes a unary call, in the way that its mode says.
func (r *Retrier) unary(ctx context.Context, method string, req, reply any, cc *grpc.ClientConn,
	invoker grpc.UnaryInvoker, opts ...grpc.CallOption) error {
	var c call // stays on the stack
	c.retrier, c.ctx, c.cc, c.method = r, ctx, cc, method
	if err := c.prepare(opts, nil, reply); err != nil {
		return err
	}
	switch c.mode {
	case modePassThrough:
		return c.passUnary(req, reply, invoker)
	case modeHedged:
		return hedgeUnary(&c, req, reply, invoker)
	}
	found := newReply(reply)
	return c.makeAttempts(func(a *attempt) error {
		if a.number > 1 {
			found.restore()
		}
		return invoker(a, method, req, reply, cc, c.attemptOptions(a)...)
	})
}

// makeAttempts makes attempts, one after the other, until one succeeds or the plan ends the call. It
// is the loop of unary calls and of functions.
func (c *call) makeAttempts(run func(*attempt) error) error {
	a, done := &attempt{}, false
	defer func() {
		if !done { // an interceptor below, or a function of the application's, panicked
			c.crashed(a)
			c.endCrashed(errPanicked)
		}
	}()
	c.begin(a)
	for {
		err := readable(run(a))
		if err == nil {
			a.measure(c.learner, false)
		}
		next, err := c.next(a, err)
		if next == nil {
			done = true
			return err
		}
		a = next
	}
}
