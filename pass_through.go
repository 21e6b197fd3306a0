package grpcretry

import (
	"context"
	"slices"
	"time"

	"google.golang.org/grpc"
)

// passThrough makes a call that is neither retried nor hedged: one attempt, without a budget, an
// event or a change of its error. A method that would be hedged if its delay were known is
// measured all the same.
func (c *call) passThrough(run func(context.Context) error) error {
	first := attempt{method: c.method, number: 1}
	if c.learner != nil {
		first.start = sinceOrigin()
	}
	err := c.runWithin(run)
	if err == nil {
		first.measure(c.learner, false)
	}
	return err
}

// passOptions returns the options of a call that passes through. gRPC is kept from retries of its
// own if a service config is obeyed here.
func (c *call) passOptions(opts []grpc.CallOption) []grpc.CallOption {
	if c.retrier.stopsGRPC(c.policy, c.cc, c.method) {
		return append(slices.Clip(opts), noBuiltInRetry())
	}
	return opts
}

// passStream opens a stream that passes through.
func (c *call) passStream(desc *grpc.StreamDesc, streamer grpc.Streamer, opts []grpc.CallOption) (grpc.ClientStream, error) {
	stream, err := streamer(c.ctx, desc, c.cc, c.method, c.passOptions(opts)...)
	if err == nil {
		c.retrier.bindToGRPC(c.policy, c.cc, c.method, stream)
	}
	return stream, err
}

// runWithin makes the one attempt. The attempt timeout ends an attempt that no other follows
// only if the caller has no deadline, so that the call cannot hang.
func (c *call) runWithin(run func(context.Context) error) error {
	timeout := time.Duration(0)
	if c.policy != nil {
		timeout = c.policy.AttemptTimeout
	}
	if _, limited := c.ctx.Deadline(); timeout <= 0 || limited {
		return run(c.ctx)
	}
	ctx, cancel := context.WithCancelCause(c.ctx)
	defer cancel(nil)
	timer := time.AfterFunc(timeout, func() { cancel(ErrAttemptTimeout) })
	defer timer.Stop()
	err := run(ctx)
	timedOut := context.Cause(ctx) == ErrAttemptTimeout //nolint:errorlint // this call's own value
	if timedOut && err != nil && isContextEnd(readable(err)) {
		return newAttemptTimeoutError(timeout, err)
	}
	return err
}
