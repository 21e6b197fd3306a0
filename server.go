package grpcretry

import (
	"context"
	"fmt"
	"math"
	"strconv"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/trace"
	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"

	"github.com/grpcretry/grpcretry/internal/instruments"
	"github.com/grpcretry/grpcretry/internal/layers"
	"github.com/grpcretry/grpcretry/internal/reasons"
	"github.com/grpcretry/grpcretry/internal/wire"
	"github.com/grpcretry/grpcretry/telemetry"
)

// This file holds the servers' side: pushback, the attempt count, the interceptors, and what a handler's own calls learn of its request.

// SetPushback asks the caller of the RPC handled in ctx to wait for delay before a retry, if the
// RPC fails with a code that the caller retries (gRFC A6 #pushback). Call it in a server's
// handler, unary or stream, before the handler returns.
//
// The delay is rounded up to whole milliseconds and can be at most 2147483647 ms. A negative or
// longer delay is an error, as is a ctx that is not a handler's, and then nothing is sent. Call
// SetPushback only once for an RPC: gRPC cannot replace a trailer, so a second call adds a second
// value, and clients read repeated values as "stop".
//
// Give waiting callers different delays, spread over the time that the backlog needs, so that they
// do not all retry together.
func SetPushback(ctx context.Context, delay time.Duration) error {
	if delay < 0 {
		return fmt.Errorf("grpcretry: SetPushback: delay %v is negative; SetNoRetry tells clients to stop", delay)
	}
	ms := int64(delay / time.Millisecond)
	if delay%time.Millisecond > 0 {
		ms++
	}
	if ms > math.MaxInt32 {
		return fmt.Errorf("grpcretry: SetPushback: delay %v is over %v, the most the trailer can hold",
			delay, math.MaxInt32*time.Millisecond)
	}
	return sendPushback(ctx, "SetPushback", strconv.FormatInt(ms, 10))
}

// SetNoRetry asks the caller of the RPC handled in ctx not to retry it (gRFC A6 #pushback). Use it
// for work that must not be repeated or can never succeed. Call it in a server's handler, unary or
// stream, before the handler returns; outside a handler it returns an error. A second call changes
// nothing.
func SetNoRetry(ctx context.Context) error {
	r := layers.Of(ctx)
	handled := r.Handles(ctx) // false without an interceptor, and if the request is that of a client in the same process
	if handled && r.Forbids() {
		return nil
	}
	err := sendPushback(ctx, "SetNoRetry", wire.NoRetry)
	if err == nil && handled {
		r.Forbid()
	}
	return err
}

func sendPushback(ctx context.Context, caller, value string) error {
	if err := grpc.SetTrailer(ctx, metadata.MD{wire.PushbackKey: {value}}); err != nil {
		return fmt.Errorf("grpcretry: %s: the context must be that of a server's handler that has not returned: %w", caller, err)
	}
	return nil
}

// PreviousAttempts returns, in a server's handler, the number of attempts that the client made at
// this RPC before the current one. It is 0 for a first attempt, if the client does not send the
// number, and outside a handler. It comes from the metadata key grpc-previous-rpc-attempts (gRFC
// A6 #exposed-retry-metadata). If the value is repeated, the largest counts; malformed values are
// ignored.
func PreviousAttempts(ctx context.Context) int { return wire.PreviousAttempts(ctx) }

// UnaryServerInterceptor returns an interceptor that keeps retries from multiplying between services,
// for [grpc.ChainUnaryInterceptor]. Without it, three services in a row that make three attempts each
// send 27 requests to the fourth while that is down. It does two things:
//
//   - If a call made by the handler has given up (its attempts, its time or its budget were used up, or a
//     server further down said "do not retry") and the handler then fails, the response says "do not
//     retry", as [SetNoRetry] does: this service has made the attempts that there are to make, and each
//     retry by its caller would make them all again. It says so even if the handler fails for another
//     reason, because that cannot be known, and even if it has called [SetPushback]. A call whose
//     patience was over has not given up, and for one that was left to gRPC's own retries (see
//     [WithBuiltInRetryDisabled]) that is not known, unless a server further down said "do not retry".
//   - If the request is a retry of which an earlier attempt got no response, or is made by another
//     service for such a request, the calls that the handler makes are not retried or hedged, and they
//     tell the next service so: an earlier attempt may still be at work, and the service that retries
//     makes up for failures, as long as it has attempts left and retries the code that the handler
//     returns. A retry that follows responses is limited as well if its client is not this library, and
//     so cannot say what became of the attempts before. Once the handler has returned, or a stream's
//     handler has sent a message, that is over.
//
// A call limited to one attempt still waits for a connection, see [WithPatience], and is not left to
// gRPC's own retries. [errors.Is] finds [ErrAttemptsExhausted] in its Error. It carries the request header
// grpcretry-caller-retries, by which the next service knows. A request is a retry if its header
// grpc-previous-rpc-attempts says so (see [PreviousAttempts]); that includes hedges. This library's
// retries carry grpcretry-caller-retries, too: 0 if all attempts before got a response, 1 if not. Headers without
// trailers of the handler's or of an interceptor's do not count as a response: a lost connection looks the same. Clients
// can send both headers as they like, but harm only their own requests.
//
// Both concern the calls that the handler makes through this package, RPCs as well as functions, with a
// context that comes from the handler's, even if [context.WithoutCancel] has detached it. The first also
// recognizes an [Error] that the handler returns or wraps, whatever context was used. The place
// in the chain does not matter, except that interceptors chained before it are not part of the handler.
// A failed call changes nothing if the handler succeeds. If the handler panics, the panic goes on, and an
// interceptor chained before this one may turn it into an error.
//
// No option is needed. A nil option makes UnaryServerInterceptor panic. If it is chained twice, the second has no effect.
func UnaryServerInterceptor(opts ...ServerOption) grpc.UnaryServerInterceptor {
	return newServer("UnaryServerInterceptor", opts).unary
}

// StreamServerInterceptor returns the same as [UnaryServerInterceptor] for streams, for
// [grpc.ChainStreamInterceptor].
func StreamServerInterceptor(opts ...ServerOption) grpc.StreamServerInterceptor {
	return newServer("StreamServerInterceptor", opts).stream
}

// A ServerOption is an option of [UnaryServerInterceptor] and [StreamServerInterceptor]. There is one, [WithMeterProvider].
type ServerOption interface{ applyToServer(*server) }

type serverOption func(*server)

func (f serverOption) applyToServer(s *server) { f(s) }

// A server holds the settings of the server interceptors.
type server struct {
	layers.Measures

	metrics *instruments.Server // nil if there are none
}

func newServer(caller string, opts []ServerOption) *server {
	s := &server{Measures: layers.Measures{StopsCallers: true, OneAttempt: true}}
	for i, o := range opts {
		if isNil(o) {
			panic(fmt.Errorf("grpcretry: %s: option number %d is nil", caller, i+1)) //nolint:forbidigo // documented
		}
		o.applyToServer(s)
	}
	return s
}

func (s *server) unary(ctx context.Context, req any, info *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (resp any, err error) {
	if layers.Of(ctx).Handles(ctx) {
		return handler(ctx, req) // chained twice
	}
	setTrailer := func(md metadata.MD) error { return grpc.SetTrailer(ctx, md) }
	err = s.handle(ctx, info.FullMethod, setTrailer, func(r *layers.Request) (err error) {
		resp, err = handler(r, req)
		return err
	})
	return resp, err
}

func (s *server) stream(srv any, stream grpc.ServerStream, info *grpc.StreamServerInfo, handler grpc.StreamHandler) (err error) {
	ctx := stream.Context()
	if layers.Of(ctx).Handles(ctx) {
		return handler(srv, stream) // chained twice
	}
	setTrailer := func(md metadata.MD) error { stream.SetTrailer(md); return nil }
	return s.handle(ctx, info.FullMethod, setTrailer, func(r *layers.Request) error { return handler(srv, &requestStream{stream, r}) })
}

// handle runs a handler for a request, and sees how it ends.
func (s *server) handle(
	ctx context.Context, method string, setTrailer func(metadata.MD) error, handler func(*layers.Request) error,
) (err error) {
	by, mark := layers.RetriedByOf(ctx)
	if by != layers.Nobody {
		s.metrics.Retry(method, string(by))
		trace.SpanFromContext(ctx).SetAttributes(attribute.String(telemetry.AttrRetriedBy, string(by)),
			attribute.Int(telemetry.AttrPreviousAttempts, PreviousAttempts(ctx)))
	}
	r := layers.New(ctx, s.Limit(by == layers.Caller, mark))
	err = errPanicked // until the handler returns
	defer func() {
		r.Respond()
		if err != nil {
			s.failed(r, err, method, setTrailer)
		}
	}()
	return handler(r)
}

// A requestStream gives a stream's handler the context of its request.
type requestStream struct {
	grpc.ServerStream
	request *layers.Request
}

// Context implements grpc.ServerStream.
func (s *requestStream) Context() context.Context { return s.request }

// SendMsg implements grpc.ServerStream. The client is committed to the stream when it has a message.
func (s *requestStream) SendMsg(m any) error {
	err := s.ServerStream.SendMsg(m)
	if err == nil {
		s.request.Respond()
	}
	return err
}

// failed has the response of a handler that failed say "do not retry", if there is a reason to. err is
// the handler's error.
func (s *server) failed(r *layers.Request, err error, method string, setTrailer func(metadata.MD) error) {
	if !s.StopsCallers || !r.GaveUp() && !tellsOfGivingUp(readable(err)) {
		return
	}
	if r.Forbid() && setTrailer(metadata.MD{wire.PushbackKey: {wire.NoRetry}}) == nil {
		s.metrics.NoRetry(method)
		trace.SpanFromContext(r).AddEvent(telemetry.SpanEventNoRetry)
	}
}

// The rest of this file has the rules about services that call one another. If each of them makes three attempts,
// three layers make 27. Two measures prevent that; both need the server interceptors, which tell the
// calls made by a handler what request they are made for:
//
//   - A service whose call has given up forbids its own caller to retry. See gaveUp for the calls, and
//     UnaryServerInterceptor for the response.
//   - A call made for a retry makes one attempt if an earlier attempt of that request got no response,
//     or if the retrying client cannot know: the service may have given up, or may still be at work. The
//     same holds for work further down. See layers.Measures for the rule, layers.Header for what a
//     client tells, and plan.again for the one attempt.
//
// After a response from a service that says when it has given up, a retry is work like any other. To
// limit it to one attempt would lose calls if several services fail in part at the same time.

// gaveUp reports whether a call that ends for a reason, with its plan at p, has given up, so that its caller's caller must not start again.
func gaveUp(p *plan, reason error) bool {
	switch r := reasons.Of(reason); {
	case p.policy.dryRun, p.policy.MaxAttempts == 1: // gRPC's own call
		return false
	case r.GivesUpIfReached:
		return p.tokenless || p.counted() > 0
	case r.GivesUpIfUsedUp:
		return p.counted() >= p.policy.MaxAttempts
	default:
		return r.GivesUp || p.tokenless && is(reason, ErrTargetDown)
	}
}
