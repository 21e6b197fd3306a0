// Package grpcsuite is copied into grpc-go's source, where a test package that imports it
// has grpcretry on every ClientConn. GRPC_SUITE_MODE says how the library is configured.
//
// The dial options are gRPC's own global ones, which every ClientConn applies before those
// that it is given. So the library is the outermost of all chained interceptors, as its
// documentation recommends; only an interceptor that a test sets with
// grpc.WithUnaryInterceptor or grpc.WithStreamInterceptor is further out, because gRPC puts
// that one first.
package grpcsuite

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"os"
	"sync/atomic"
	"testing"
	"time"

	"github.com/grpcretry/grpcretry"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/internal"

	sdkmetric "go.opentelemetry.io/otel/sdk/metric"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"
)

var mode = os.Getenv("GRPC_SUITE_MODE")

// retryNothing makes the library judge every failure, and find it final. No server of the
// suites sends ALREADY_EXISTS to a method that is not left to gRPC's own retries; Check
// finds out if one does. A hedge would be sent after an hour.
var retryNothing = grpcretry.WithCodes(codes.AlreadyExists)

// modes are the ways to configure the library. plain does without it.
var modes = map[string][]grpcretry.Option{
	"plain":   nil,
	"nothing": {retryNothing},
	"timeout": {retryNothing, grpcretry.WithAttemptTimeout(time.Minute)},
	"observer": {
		retryNothing,
		grpcretry.WithObserver(countEnds),
		grpcretry.WithCallSpan(true),
		grpcretry.WithTracerProvider(sdktrace.NewTracerProvider(sdktrace.WithSyncer(tracetest.NewNoopExporter()))),
		grpcretry.WithMeterProvider(sdkmetric.NewMeterProvider(sdkmetric.WithReader(sdkmetric.NewManualReader()))),
		grpcretry.WithLogger(slog.New(slog.NewTextHandler(io.Discard, &slog.HandlerOptions{Level: slog.LevelDebug}))),
	},
	"hedging": {retryNothing, grpcretry.WithHedging(grpcretry.Hedging{
		Delay:             grpcretry.HedgeAfter(time.Hour),
		AllMethodsAreSafe: true,
	})},
	"default": {},
}

// What the ClientConns of this test binary have done, retries in other processes excluded.
var (
	calls    atomic.Int64 // RPCs handed to the library
	attempts atomic.Int64 // attempts that the library handed on
	repeated atomic.Int64 // second attempts, in a mode that retries nothing: after a stream that a server has refused
	left     atomic.Int64 // RPCs that it left to gRPC's own retries
	passed   atomic.Int64 // RPCs that it handed on without being able to retry them, for any other reason
	ends     atomic.Int64 // CallEnd events
)

func init() {
	options, known := modes[mode]
	if !known {
		panic(fmt.Sprintf("GRPC_SUITE_MODE=%q is not a mode", mode))
	}
	if mode == "plain" {
		return
	}
	r, err := grpcretry.New(options...)
	if err != nil {
		panic(err)
	}
	install(
		grpc.WithChainUnaryInterceptor(callUnary, r.UnaryClientInterceptor(), attemptUnary),
		grpc.WithChainStreamInterceptor(callStream, r.StreamClientInterceptor(), attemptStream),
	)
}

// install adds the options to every ClientConn, also to those made after a test that clears
// the global options.
func install(options ...grpc.DialOption) {
	add := internal.AddGlobalDialOptions.(func(...grpc.DialOption))
	add(options...)
	forget := internal.ClearGlobalDialOptions
	internal.ClearGlobalDialOptions = func() {
		forget()
		add(options...)
	}
}

func callUnary(
	ctx context.Context, method string, req, reply any, cc *grpc.ClientConn, invoker grpc.UnaryInvoker, opts ...grpc.CallOption,
) error {
	calls.Add(1)
	return invoker(ctx, method, req, reply, cc, opts...)
}

func callStream(
	ctx context.Context, desc *grpc.StreamDesc, cc *grpc.ClientConn, method string, streamer grpc.Streamer, opts ...grpc.CallOption,
) (grpc.ClientStream, error) {
	calls.Add(1)
	return streamer(ctx, desc, cc, method, opts...)
}

func attemptUnary(
	ctx context.Context, method string, req, reply any, cc *grpc.ClientConn, invoker grpc.UnaryInvoker, opts ...grpc.CallOption,
) error {
	countAttempt(ctx, cc, method)
	return invoker(ctx, method, req, reply, cc, opts...)
}

func attemptStream(
	ctx context.Context, desc *grpc.StreamDesc, cc *grpc.ClientConn, method string, streamer grpc.Streamer, opts ...grpc.CallOption,
) (grpc.ClientStream, error) {
	countAttempt(ctx, cc, method)
	return streamer(ctx, desc, cc, method, opts...)
}

func countAttempt(ctx context.Context, cc *grpc.ClientConn, method string) {
	switch a, ok := grpcretry.AttemptFromContext(ctx); {
	case ok && mode != "default" && a.Number == 2:
		repeated.Add(1)
	case ok:
		attempts.Add(1)
	case cc.GetMethodConfig(method).RetryPolicy != nil:
		left.Add(1)
	default:
		passed.Add(1)
	}
}

func countEnds(_ context.Context, e grpcretry.Event) {
	if e.Kind == grpcretry.CallEnd {
		ends.Add(1)
	}
}

// Check is the last test of a package. It fails if the tests before it have not tested the
// library.
func Check(t *testing.T) {
	if mode == "plain" {
		t.Skip("the library is not installed")
	}
	for range 1000 { // a stream that was abandoned may end after its test
		if mode != "observer" || ends.Load()+left.Load() == calls.Load() {
			break
		}
		time.Sleep(10 * time.Millisecond)
	}
	c, a, l, p, e := calls.Load(), attempts.Load(), left.Load(), passed.Load(), ends.Load()
	t.Logf("calls=%d attempts=%d left=%d passed=%d ends=%d", c, a, l, p, e)
	if n := repeated.Load(); n*100 > c {
		t.Errorf("%d of %d calls made a second attempt, although only refused streams are sent again", n, c)
	}
	switch {
	case c == 0:
		t.Error("no call went through the library")
	case p > 0:
		t.Errorf("%d of %d calls passed straight through the library", p, c)
	case mode != "default" && a+l != c:
		t.Errorf("%d calls made %d attempts, and %d were left to gRPC, although nothing is retried", c, a, l)
	case mode == "observer" && e+l != c:
		t.Errorf("%d calls have ended %d times for the observer, and %d were left to gRPC", c, e, l)
	}
}
