package grpcretry

import (
	"context"

	"google.golang.org/grpc"
)

// UnaryClientInterceptor returns the interceptor for unary calls, for
// [grpc.WithChainUnaryInterceptor]. Chain it first, so that what comes after it runs
// for each attempt; chained twice, the outer one retries. Retries tell the server the number of
// previous attempts by a call option: an interceptor below that adds grpc.PerRPCCredentials of
// its own replaces that.
func (r *Retrier) UnaryClientInterceptor() grpc.UnaryClientInterceptor { return r.unary }

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
			c.answered(a, false)
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
	first := attempt{number: 1, start: sinceOrigin()}
	err := invoker(c.ctx, c.method, req, reply, c.cc, opts...)
	if err == nil {
		c.answered(&first, false)
	}
	return err
}
