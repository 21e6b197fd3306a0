package grpcretry

import (
	"context"
	"errors"
	"fmt"

	"go.opentelemetry.io/otel/metric"
	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"

	"github.com/grpcretry/grpcretry/internal/layers"
)

// UnaryServerInterceptor returns an interceptor that keeps retries from multiplying between services,
// for [grpc.ChainUnaryInterceptor]. Without it, three services in a row that make three attempts each
// send 27 requests to the fourth while that is down. It does two things, each with an option that turns
// it off:
//
//   - If a call made by the handler has given up (its attempts, its time or its budget were used up, or a
//     server further down said "do not retry") and the handler then fails, the response says "do not
//     retry", as [SetNoRetry] does. See [WithNoRetryAfterGivingUp].
//   - If the request is a retry, or is made by another service for a request that is one, the calls
//     that the handler makes are not retried or hedged, and they tell the next service so. See
//     [WithOneAttemptForRetries].
//
// Both concern the calls that the handler makes through this package, RPCs as well as functions, with a
// context that comes from the handler's, even if [context.WithoutCancel] has detached it. The first also
// recognizes an [Error] that the handler returns or wraps, whatever context was used. The place
// in the chain does not matter, except that interceptors chained before it are not part of the handler.
// A failed call changes nothing if the handler succeeds. If the handler panics, the panic goes on, and an
// interceptor chained before this one may turn it into an error.
//
// The options are for tests and for special cases: no option is needed. A nil option makes
// UnaryServerInterceptor panic. If it is chained twice, the second has no effect.
func UnaryServerInterceptor(opts ...ServerOption) grpc.UnaryServerInterceptor {
	return newServer("UnaryServerInterceptor", opts).unary
}

// StreamServerInterceptor returns the same as [UnaryServerInterceptor] for streams, for
// [grpc.ChainStreamInterceptor].
func StreamServerInterceptor(opts ...ServerOption) grpc.StreamServerInterceptor {
	return newServer("StreamServerInterceptor", opts).stream
}

// ServerOptions returns both server interceptors, for [grpc.NewServer].
func ServerOptions(opts ...ServerOption) []grpc.ServerOption {
	s := newServer("ServerOptions", opts)
	return []grpc.ServerOption{grpc.ChainUnaryInterceptor(s.unary), grpc.ChainStreamInterceptor(s.stream)}
}

// A ServerOption is an option of [UnaryServerInterceptor] and [StreamServerInterceptor].
type ServerOption interface{ applyToServer(*server) }

type serverOption func(*server)

func (f serverOption) applyToServer(s *server) { f(s) }

// WithNoRetryAfterGivingUp sets whether the response says "do not retry" if a call made by the handler
// has given up and the handler fails. The default is true: this service has made the attempts that
// there are to make, and each retry by its caller would make them all again. The response says so even if
// the handler fails for another reason, because that cannot be known, and even if it has called
// [SetPushback]. A call that waited for a connection in vain has not given up, and of one that was left
// to gRPC's own retries (see [WithBuiltInRetryDisabled]) it is not known, unless a server further down
// said "do not retry". A later WithNoRetryAfterGivingUp replaces an earlier one.
func WithNoRetryAfterGivingUp(on bool) ServerOption {
	return serverOption(func(s *server) { s.stopsCallers = on })
}

// WithOneAttemptForRetries sets whether calls made for a request that is itself a retry, or that is made for
// one further up, make only one attempt. The default is true: the service that retries makes up for their
// failures, as long as it has attempts left and retries the code that the handler returns. Once the handler
// has returned, or a stream's handler has sent a message, that is over, and calls are retried again. A
// later WithOneAttemptForRetries replaces an earlier one.
//
// A call limited to one attempt still waits for a connection, see [WithConnectWait], and is not left to
// gRPC's own retries. Its Error's Reason is [ErrRetriedUpstream]. It carries the request header
// grpcretry-retried-upstream, by which the next service knows, unless an interceptor chained below this
// library's appends credentials, see [Retrier.UnaryClientInterceptor].
//
// A request is a retry if its header grpc-previous-rpc-attempts says so (see [PreviousAttempts]);
// that includes hedges. Clients can send both headers as they like, but harm only their own requests.
func WithOneAttemptForRetries(on bool) ServerOption {
	return serverOption(func(s *server) { s.oneAttempt = on })
}

// WithServerMeterProvider records metrics: requests that were retries, and responses that say "do not
// retry"; docs/observing.md in the repository lists them. nil means OpenTelemetry's global provider,
// [go.opentelemetry.io/otel.GetMeterProvider]. The default, without this option, is no metrics. A later
// WithServerMeterProvider replaces an earlier one.
func WithServerMeterProvider(mp metric.MeterProvider) ServerOption {
	return serverOption(func(s *server) { s.measured, s.meterProvider = true, mp })
}

// A server holds the settings of the server interceptors.
type server struct {
	stopsCallers, oneAttempt bool

	measured      bool
	meterProvider metric.MeterProvider // nil means the global one
	metrics       *serverMetrics       // nil if there are none
}

func newServer(caller string, opts []ServerOption) *server {
	s := &server{stopsCallers: true, oneAttempt: true}
	for i, o := range opts {
		if isNil(o) {
			panic(fmt.Errorf("grpcretry: %s: option number %d is nil", caller, i+1)) //nolint:forbidigo // documented
		}
		o.applyToServer(s)
	}
	if s.measured {
		s.metrics = newServerMetrics(s.meterProvider)
	}
	return s
}

func (s *server) unary(ctx context.Context, req any, info *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (resp any, err error) {
	if layers.Of(ctx).Handles(ctx) {
		return handler(ctx, req) // chained twice
	}
	r := s.begin(ctx, info.FullMethod)
	succeeded := false // a panic is a failure
	defer func() {
		r.Respond()
		if !succeeded {
			s.failed(r, err, info.FullMethod, func(md metadata.MD) error { return grpc.SetTrailer(ctx, md) })
		}
	}()
	resp, err = handler(r, req)
	succeeded = err == nil
	return resp, err
}

func (s *server) stream(srv any, stream grpc.ServerStream, info *grpc.StreamServerInfo, handler grpc.StreamHandler) (err error) {
	ctx := stream.Context()
	if layers.Of(ctx).Handles(ctx) {
		return handler(srv, stream) // chained twice
	}
	r := s.begin(ctx, info.FullMethod)
	succeeded := false // a panic is a failure
	defer func() {
		r.Respond()
		if !succeeded {
			s.failed(r, err, info.FullMethod, func(md metadata.MD) error { stream.SetTrailer(md); return nil })
		}
	}()
	err = handler(srv, &requestStream{stream, r})
	succeeded = err == nil
	return err
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

// begin looks at a request that has arrived.
func (s *server) begin(ctx context.Context, method string) *layers.Request {
	by := retriedByOf(ctx)
	if by != nobody {
		s.metrics.retry(method, by)
		showRetry(ctx, by)
	}
	return layers.New(ctx, s.oneAttempt && by != nobody)
}

// failed has the response of a handler that failed say "do not retry", if there is a reason to. err is
// the handler's error, nil if it panicked.
func (s *server) failed(r *layers.Request, err error, method string, setTrailer func(metadata.MD) error) {
	if !s.stopsCallers || !r.GaveUp() && !errors.Is(readable(err), errGaveUp) {
		return
	}
	if r.Forbid() && setTrailer(metadata.MD{pushbackKey: {noRetry}}) == nil {
		s.metrics.noRetry(method)
		showNoRetry(r)
	}
}
