package grpcretry

import (
	"context"
	"errors"
	"slices"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"

	"github.com/grpcretry/grpcretry/internal/layers"
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

// passUnary makes a unary call that passes through.
func (c *call) passUnary(req, reply any, invoker grpc.UnaryInvoker) error {
	opts := c.passOptions()
	if c.worksFor == nil {
		return c.passThrough(func(ctx context.Context) error { return invoker(ctx, c.method, req, reply, c.cc, opts...) })
	}
	trailer := new(metadata.MD)
	opts = append(slices.Clip(opts), grpc.Trailer(trailer))
	err := c.passThrough(func(ctx context.Context) error { return invoker(ctx, c.method, req, reply, c.cc, opts...) })
	if err != nil && forbidsRetry(*trailer) {
		c.worksFor.GiveUp()
	}
	return err
}

// passOptions returns the options of a call that passes through. gRPC is kept from retries of its
// own if a service config is obeyed here.
func (c *call) passOptions() []grpc.CallOption {
	opts := c.options.own()
	if c.retrier.stopsGRPC(c.policy, c.cc, c.method) {
		opts = append(slices.Clip(opts), noBuiltInRetry())
	}
	if c.worksFor.IsRetry() {
		opts = append(slices.Clip(opts), attemptHeader{retried: true}.option(c.options.creds))
	}
	return opts
}

// passStream opens a stream that passes through.
func (c *call) passStream(desc *grpc.StreamDesc, streamer grpc.Streamer) (grpc.ClientStream, error) {
	stream, err := streamer(c.ctx, desc, c.cc, c.method, c.passOptions()...)
	if err != nil {
		return stream, err
	}
	c.retrier.bindToGRPC(c.policy, c.cc, c.method, stream)
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
	if timedOut && err != nil && isTimeoutEnd(readable(err)) {
		return newAttemptTimeoutError(timeout, err)
	}
	return err
}

// isTimeoutEnd reports whether err can be the end of a context by the attempt timeout: some functions return
// the context's cause.
func isTimeoutEnd(err error) bool { return isContextEnd(err) || errors.Is(err, ErrAttemptTimeout) }
