package attemptspan

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net"
	"slices"
	"strings"
	"testing"
	"time"

	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/trace"
	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"
	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"

	"github.com/grpcretry/grpcretry"
	echov1 "github.com/grpcretry/grpcretry/proto/echo/v1"
)

// This file says what traces look like, with either instrumentation and in every order of
// interceptors. Events are the lines that begin with @.

func TestOrders(t *testing.T) {
	callSpan := grpcretry.WithCallSpan(true)
	for _, tt := range []struct {
		name string
		opts func(f *fixture) []grpc.DialOption
		want string
	}{
		// A stats handler runs for each attempt, wherever it stands among the options.
		{"otelgrpc", func(f *fixture) []grpc.DialOption {
			return append(f.retries(), f.withOtelgrpc())
		}, `
caller internal 0s-8s Unset
  @0s attempt.number=1 UNAVAILABLE decision=retry wait_ms=1000 wait_source=backoff
  @1s attempt.number=2 UNAVAILABLE decision=retry wait_ms=7000 wait_source=pushback
  @8s attempt.number=3 OK decision=success
  pkg.Service/Echo client 0s-0s Error attempt.number=1 UNAVAILABLE
  attempt 2 pkg.Service/Echo client 1s-1s Error attempt.number=2 attempt.wait_ms=1000 attempt.wait_source=backoff UNAVAILABLE
  attempt 3 pkg.Service/Echo client 8s-8s Unset attempt.number=3 attempt.wait_ms=7000 attempt.wait_source=pushback OK
`},
		{"otelgrpc before", func(f *fixture) []grpc.DialOption {
			return append([]grpc.DialOption{f.withOtelgrpc()}, f.retries(callSpan)...)
		}, withCallSpanAndOtelgrpc},
		{"otelgrpc after", func(f *fixture) []grpc.DialOption {
			return append(f.retries(callSpan), f.withOtelgrpc())
		}, withCallSpanAndOtelgrpc},

		// Outside of the retries grpc-go's interceptor makes one span for the call: the
		// events are on it, and its attempts are numbered from 0.
		{"grpc-go outside", func(f *fixture) []grpc.DialOption {
			return append([]grpc.DialOption{f.withGRPCGo()}, f.retries()...)
		}, `
caller internal 0s-8s Unset
  Sent.pkg.Service.Echo client 0s-8s Ok
    @0s attempt.number=1 UNAVAILABLE decision=retry wait_ms=1000 wait_source=backoff
    @1s attempt.number=2 UNAVAILABLE decision=retry wait_ms=7000 wait_source=pushback
    @8s attempt.number=3 OK decision=success
    Attempt.pkg.Service.Echo internal 0s-0s Error attempt.number=1 0
    attempt 2 Attempt.pkg.Service.Echo internal 1s-1s Error attempt.number=2 attempt.wait_ms=1000 attempt.wait_source=backoff 1
    attempt 3 Attempt.pkg.Service.Echo internal 8s-8s Ok attempt.number=3 attempt.wait_ms=7000 attempt.wait_source=pushback 2
`},
		{"grpc-go outside of a call span", func(f *fixture) []grpc.DialOption {
			return append([]grpc.DialOption{f.withGRPCGo()}, f.retries(callSpan)...)
		}, `
caller internal 0s-8s Unset
  Sent.pkg.Service.Echo client 0s-8s Ok
    pkg.Service/Echo internal 0s-8s Unset OK attempts=3
      @0s attempt.number=1 UNAVAILABLE decision=retry wait_ms=1000 wait_source=backoff
      @1s attempt.number=2 UNAVAILABLE decision=retry wait_ms=7000 wait_source=pushback
      @8s attempt.number=3 OK decision=success
      Attempt.pkg.Service.Echo internal 0s-0s Error attempt.number=1 0
      retry wait internal 0s-1s Unset next_attempt.number=2 wait_ms=1000 wait_source=backoff
      attempt 2 Attempt.pkg.Service.Echo internal 1s-1s Error attempt.number=2 attempt.wait_ms=1000 attempt.wait_source=backoff 1
      retry wait internal 1s-8s Unset next_attempt.number=3 wait_ms=7000 wait_source=pushback
      attempt 3 Attempt.pkg.Service.Echo internal 8s-8s Ok attempt.number=3 attempt.wait_ms=7000 attempt.wait_source=pushback 2
`},

		// Inside it makes one for each attempt, with one attempt below, numbered 0.
		{"grpc-go inside", func(f *fixture) []grpc.DialOption {
			return append(f.retries(), f.withGRPCGo())
		}, `
caller internal 0s-8s Unset
  @0s attempt.number=1 UNAVAILABLE decision=retry wait_ms=1000 wait_source=backoff
  @1s attempt.number=2 UNAVAILABLE decision=retry wait_ms=7000 wait_source=pushback
  @8s attempt.number=3 OK decision=success
  Sent.pkg.Service.Echo client 0s-0s Error attempt.number=1
    Attempt.pkg.Service.Echo internal 0s-0s Error attempt.number=1 0
  attempt 2 Sent.pkg.Service.Echo client 1s-1s Error attempt.number=2 attempt.wait_ms=1000 attempt.wait_source=backoff
    attempt 2 Attempt.pkg.Service.Echo internal 1s-1s Error attempt.number=2 attempt.wait_ms=1000 attempt.wait_source=backoff 0
  attempt 3 Sent.pkg.Service.Echo client 8s-8s Ok attempt.number=3 attempt.wait_ms=7000 attempt.wait_source=pushback
    attempt 3 Attempt.pkg.Service.Echo internal 8s-8s Ok attempt.number=3 attempt.wait_ms=7000 attempt.wait_source=pushback 0
`},
		{"grpc-go inside of a call span", func(f *fixture) []grpc.DialOption {
			return append(f.retries(callSpan), f.withGRPCGo())
		}, `
caller internal 0s-8s Unset
  pkg.Service/Echo internal 0s-8s Unset OK attempts=3
    @0s attempt.number=1 UNAVAILABLE decision=retry wait_ms=1000 wait_source=backoff
    @1s attempt.number=2 UNAVAILABLE decision=retry wait_ms=7000 wait_source=pushback
    @8s attempt.number=3 OK decision=success
    Sent.pkg.Service.Echo client 0s-0s Error attempt.number=1
      Attempt.pkg.Service.Echo internal 0s-0s Error attempt.number=1 0
    retry wait internal 0s-1s Unset next_attempt.number=2 wait_ms=1000 wait_source=backoff
    attempt 2 Sent.pkg.Service.Echo client 1s-1s Error attempt.number=2 attempt.wait_ms=1000 attempt.wait_source=backoff
      attempt 2 Attempt.pkg.Service.Echo internal 1s-1s Error attempt.number=2 attempt.wait_ms=1000 attempt.wait_source=backoff 0
    retry wait internal 1s-8s Unset next_attempt.number=3 wait_ms=7000 wait_source=pushback
    attempt 3 Sent.pkg.Service.Echo client 8s-8s Ok attempt.number=3 attempt.wait_ms=7000 attempt.wait_source=pushback
      attempt 3 Attempt.pkg.Service.Echo internal 8s-8s Ok attempt.number=3 attempt.wait_ms=7000 attempt.wait_source=pushback 0
`},
	} {
		for _, kind := range kinds {
			t.Run(tt.name+"/"+kind.method, func(t *testing.T) {
				inBubble(t, 2, func(t *testing.T, f *fixture) {
					if err := f.below(t, kind.call, f.client(tt.opts(f)...)); err != nil {
						t.Errorf("%s = %v, want nil", kind.method, err)
					}
					wantTree(t, f, strings.ReplaceAll(tt.want, "Echo", kind.method))
				})
			})
		}
	}
}

// A unary call and two kinds of stream: their traces are the same.
var kinds = []struct {
	method string
	call   caller
}{{"Echo", echo}, {"Expand", expand}, {"Chat", chat}}

const withCallSpanAndOtelgrpc = `
caller internal 0s-8s Unset
  pkg.Service/Echo internal 0s-8s Unset OK attempts=3
    @0s attempt.number=1 UNAVAILABLE decision=retry wait_ms=1000 wait_source=backoff
    @1s attempt.number=2 UNAVAILABLE decision=retry wait_ms=7000 wait_source=pushback
    @8s attempt.number=3 OK decision=success
    pkg.Service/Echo client 0s-0s Error attempt.number=1 UNAVAILABLE
    retry wait internal 0s-1s Unset next_attempt.number=2 wait_ms=1000 wait_source=backoff
    attempt 2 pkg.Service/Echo client 1s-1s Error attempt.number=2 attempt.wait_ms=1000 attempt.wait_source=backoff UNAVAILABLE
    retry wait internal 1s-8s Unset next_attempt.number=3 wait_ms=7000 wait_source=pushback
    attempt 3 pkg.Service/Echo client 8s-8s Unset attempt.number=3 attempt.wait_ms=7000 attempt.wait_source=pushback OK
`

func TestInterceptorsOutsideRunOnceAndInsideForEachAttempt(t *testing.T) {
	inBubble(t, 1, func(t *testing.T, f *fixture) {
		opts := append([]grpc.DialOption{f.withTracing("outside")}, f.retries()...)
		f.below(t, echo, f.client(append(opts, f.withTracing("inside"), f.withOtelgrpc())...))
		wantTree(t, f, `
caller internal 0s-1s Unset
  outside internal 0s-1s Unset
    @0s attempt.number=1 UNAVAILABLE decision=retry wait_ms=1000 wait_source=backoff
    @1s attempt.number=2 OK decision=success
    inside internal 0s-0s Unset
      pkg.Service/Echo client 0s-0s Error attempt.number=1 UNAVAILABLE
    inside internal 1s-1s Unset
      attempt 2 pkg.Service/Echo client 1s-1s Unset attempt.number=2 attempt.wait_ms=1000 attempt.wait_source=backoff OK
`)
	})
}

// Without a span of the caller's there is nothing to hold the attempts together but the
// call span: without that each is a trace of its own, for which the sampler decides anew.
func TestWithoutASpanOfTheCaller(t *testing.T) {
	for _, kind := range kinds {
		inBubble(t, 1, func(t *testing.T, f *fixture) {
			kind.call(t.Context(), f.client(append(f.retries(), f.withOtelgrpc())...))
			wantTree(t, f, strings.ReplaceAll(`
pkg.Service/Echo client 0s-0s Error attempt.number=1 UNAVAILABLE
attempt 2 pkg.Service/Echo client 1s-1s Unset attempt.number=2 attempt.wait_ms=1000 attempt.wait_source=backoff OK
`, "Echo", kind.method))
			if got := f.traces(); got != 2 {
				t.Errorf("%s left %d traces, want 2", kind.method, got)
			}
		})
		inBubble(t, 1, func(t *testing.T, f *fixture) {
			kind.call(t.Context(), f.client(append(f.retries(grpcretry.WithCallSpan(true)), f.withOtelgrpc())...))
			wantTree(t, f, strings.ReplaceAll(`
pkg.Service/Echo internal 0s-1s Unset OK attempts=2
  @0s attempt.number=1 UNAVAILABLE decision=retry wait_ms=1000 wait_source=backoff
  @1s attempt.number=2 OK decision=success
  pkg.Service/Echo client 0s-0s Error attempt.number=1 UNAVAILABLE
  retry wait internal 0s-1s Unset next_attempt.number=2 wait_ms=1000 wait_source=backoff
  attempt 2 pkg.Service/Echo client 1s-1s Unset attempt.number=2 attempt.wait_ms=1000 attempt.wait_source=backoff OK
`, "Echo", kind.method))
			if got := f.traces(); got != 1 {
				t.Errorf("%s with a call span left %d traces, want 1", kind.method, got)
			}
		})
	}
}

func TestCallSpanEndsWithTheFinalStatus(t *testing.T) {
	for _, kind := range kinds {
		t.Run("exhausted/"+kind.method, func(t *testing.T) {
			inBubble(t, 9, func(t *testing.T, f *fixture) {
				opts := f.retries(grpcretry.WithCallSpan(true), grpcretry.WithMaxAttempts(2))
				f.below(t, kind.call, f.client(append(opts, f.withOtelgrpc())...))
				wantTree(t, f, strings.ReplaceAll(`
caller internal 0s-1s Unset
  pkg.Service/Echo internal 0s-1s Error UNAVAILABLE attempts=2 reason=exhausted
    @0s attempt.number=1 UNAVAILABLE decision=retry wait_ms=1000 wait_source=backoff
    @1s attempt.number=2 UNAVAILABLE decision=stop reason=exhausted
    pkg.Service/Echo client 0s-0s Error attempt.number=1 UNAVAILABLE
    retry wait internal 0s-1s Unset next_attempt.number=2 wait_ms=1000 wait_source=backoff
    attempt 2 pkg.Service/Echo client 1s-1s Error attempt.number=2 attempt.wait_ms=1000 attempt.wait_source=backoff UNAVAILABLE
`, "Echo", kind.method))
			})
		})
		// The last event still says retry: only the call span tells what came in between.
		t.Run("cancelled in the wait/"+kind.method, func(t *testing.T) {
			inBubble(t, 9, func(t *testing.T, f *fixture) {
				client := f.client(append(f.retries(grpcretry.WithCallSpan(true)), f.withOtelgrpc())...)
				f.below(t, func(ctx context.Context, client echov1.EchoServiceClient) error {
					ctx, cancel := context.WithCancel(ctx)
					defer time.AfterFunc(3*time.Second, cancel).Stop()
					return kind.call(ctx, client)
				}, client)
				wantTree(t, f, strings.ReplaceAll(`
caller internal 0s-3s Unset
  pkg.Service/Echo internal 0s-3s Error CANCELLED attempts=2 reason=cancelled
    @0s attempt.number=1 UNAVAILABLE decision=retry wait_ms=1000 wait_source=backoff
    @1s attempt.number=2 UNAVAILABLE decision=retry wait_ms=7000 wait_source=pushback
    pkg.Service/Echo client 0s-0s Error attempt.number=1 UNAVAILABLE
    retry wait internal 0s-1s Unset next_attempt.number=2 wait_ms=1000 wait_source=backoff
    attempt 2 pkg.Service/Echo client 1s-1s Error attempt.number=2 attempt.wait_ms=1000 attempt.wait_source=backoff UNAVAILABLE
    retry wait internal 1s-3s Unset next_attempt.number=3 wait_ms=7000 wait_source=pushback reason=cancelled
`, "Echo", kind.method))
			})
		})
	}
}

// A stream is often read after the span that it was opened in has ended. Events that come
// after that end are lost, as OpenTelemetry has it; a call span lives as long as its call.
func TestStreamThatOutlivesTheCallersSpan(t *testing.T) {
	for _, tt := range []struct {
		callSpan bool
		want     string
	}{
		{false, `
caller internal 0s-0s Unset
  pkg.Service/Expand client 0s-2s Error attempt.number=1 UNAVAILABLE
  attempt 2 pkg.Service/Expand client 3s-3s Unset attempt.number=2 attempt.wait_ms=1000 attempt.wait_source=backoff OK
`},
		{true, `
caller internal 0s-0s Unset
  pkg.Service/Expand internal 0s-3s Unset OK attempts=2
    @2s attempt.number=1 UNAVAILABLE decision=retry wait_ms=1000 wait_source=backoff
    @3s attempt.number=2 OK decision=success
    pkg.Service/Expand client 0s-2s Error attempt.number=1 UNAVAILABLE
    retry wait internal 2s-3s Unset next_attempt.number=2 wait_ms=1000 wait_source=backoff
    attempt 2 pkg.Service/Expand client 3s-3s Unset attempt.number=2 attempt.wait_ms=1000 attempt.wait_source=backoff OK
`},
	} {
		inBubble(t, 1, func(t *testing.T, f *fixture) {
			client := f.client(append(f.retries(grpcretry.WithCallSpan(tt.callSpan)), f.withOtelgrpc())...)
			ctx, span := f.provider.Tracer("test").Start(t.Context(), "caller")
			stream, err := client.Expand(ctx, &echov1.EchoRequest{})
			span.End()
			if err != nil {
				t.Fatalf("Expand = %v", err)
			}
			time.Sleep(2 * time.Second) // of the bubble
			if err := drain(stream); err != nil {
				t.Errorf("reading the stream = %v, want nil", err)
			}
			wantTree(t, f, tt.want)
		})
	}
}

// Each attempt hands its own span to the server, whatever those before it handed over.
func TestServerSpansAreBelowTheirAttempt(t *testing.T) {
	for _, instrumented := range []struct {
		name string
		opts func(f *fixture) []grpc.DialOption
	}{
		{"otelgrpc", func(f *fixture) []grpc.DialOption { return append(f.retries(), f.withOtelgrpc()) }},
		{"grpc-go outside", func(f *fixture) []grpc.DialOption { return append([]grpc.DialOption{f.withGRPCGo()}, f.retries()...) }},
		{"grpc-go inside", func(f *fixture) []grpc.DialOption { return append(f.retries(), f.withGRPCGo()) }},
	} {
		for _, kind := range kinds {
			t.Run(instrumented.name+"/"+kind.method, func(t *testing.T) {
				inBubble(t, 2, func(t *testing.T, f *fixture) {
					f.below(t, kind.call, f.client(instrumented.opts(f)...))
					f.tree() // waits until all have ended
					parents := map[trace.SpanID]int{}
					for _, s := range f.recorder.Ended() {
						if s.SpanKind() == trace.SpanKindServer {
							parents[s.Parent().SpanID()]++
						}
					}
					attempts := 0
					for _, s := range f.recorder.Ended() {
						if parents[s.SpanContext().SpanID()] == 1 && numbered(s) {
							attempts++
						}
					}
					if len(parents) != 3 || attempts != 3 {
						t.Errorf("server spans hang below %d spans, %d of them of attempts, want 3 and 3", len(parents), attempts)
					}
				})
			})
		}
	}
}

func numbered(s sdktrace.ReadOnlySpan) bool {
	return strings.Contains(text(s.Attributes()), "attempt.number=")
}

func TestErrorIsTheStatusOfTheOuterSpan(t *testing.T) {
	for _, kind := range kinds {
		t.Run(kind.method, func(t *testing.T) {
			inBubble(t, 9, func(t *testing.T, f *fixture) {
				opts := append([]grpc.DialOption{f.withGRPCGo()}, f.retries(grpcretry.WithMaxAttempts(2))...)
				err := f.below(t, kind.call, f.client(opts...))
				if !errors.Is(err, grpcretry.ErrAttemptsExhausted) {
					t.Errorf("%s = %v, want %v", kind.method, err, grpcretry.ErrAttemptsExhausted)
				}
				wantTree(t, f, strings.ReplaceAll(`
caller internal 0s-1s Unset
  Sent.pkg.Service.Echo client 0s-1s Error
    @0s attempt.number=1 UNAVAILABLE decision=retry wait_ms=1000 wait_source=backoff
    @1s attempt.number=2 UNAVAILABLE decision=stop reason=exhausted
    Attempt.pkg.Service.Echo internal 0s-0s Error attempt.number=1 0
    attempt 2 Attempt.pkg.Service.Echo internal 1s-1s Error attempt.number=2 attempt.wait_ms=1000 attempt.wait_source=backoff 1
`, "Echo", kind.method))
			})
		})
	}
}

// An attempt that reaches no server, because there is none, has its span all the same, whether the call then
// waits for a connection in vain, as by default, or not at all.
func TestServerThatIsNotThere(t *testing.T) {
	gone := grpc.WithContextDialer(func(context.Context, string) (net.Conn, error) {
		return nil, errors.New("nobody listens")
	})
	for _, tt := range []struct {
		name string
		opts func(f *fixture) []grpc.DialOption
		want string
	}{
		{"otelgrpc, no wait", func(f *fixture) []grpc.DialOption {
			return append(f.retries(grpcretry.WithCallSpan(true), grpcretry.WithPatience(0)),
				f.withOtelgrpc())
		}, `
caller internal 0s-0s Unset
  pkg.Service/Echo internal 0s-0s Error UNAVAILABLE attempts=1 reason=target_down
    @0s attempt.number=1 UNAVAILABLE decision=stop reason=target_down
    pkg.Service/Echo client 0s-0s Error attempt.number=1 UNAVAILABLE
`},
		{"otelgrpc", func(f *fixture) []grpc.DialOption {
			return append(f.retries(grpcretry.WithCallSpan(true), grpcretry.WithMaxAttempts(2)), f.withOtelgrpc())
		}, `
caller internal 0s-10s Unset
  pkg.Service/Echo internal 0s-10s Error UNAVAILABLE attempts=1 reason=target_down
    @0s attempt.number=1 UNAVAILABLE decision=retry wait_ms=1000 wait_source=connect
    pkg.Service/Echo client 0s-0s Error attempt.number=1 UNAVAILABLE
    retry wait internal 0s-10s Unset next_attempt.number=2 wait_ms=1000 wait_source=connect reason=target_down
`},
		{"grpc-go outside, no wait", func(f *fixture) []grpc.DialOption {
			return append([]grpc.DialOption{f.withGRPCGo()},
				f.retries(grpcretry.WithMaxAttempts(2), grpcretry.WithPatience(0))...)
		}, `
caller internal 0s-0s Unset
  Sent.pkg.Service.Echo client 0s-0s Error
    @0s attempt.number=1 UNAVAILABLE decision=stop reason=target_down
    Attempt.pkg.Service.Echo internal 0s-0s Error attempt.number=1 0
`},
		{"grpc-go outside", func(f *fixture) []grpc.DialOption {
			return append([]grpc.DialOption{f.withGRPCGo()}, f.retries(grpcretry.WithMaxAttempts(2))...)
		}, `
caller internal 0s-10s Unset
  Sent.pkg.Service.Echo client 0s-10s Error
    @0s attempt.number=1 UNAVAILABLE decision=retry wait_ms=1000 wait_source=connect
    Attempt.pkg.Service.Echo internal 0s-0s Error attempt.number=1 0
`},
	} {
		for _, kind := range kinds {
			t.Run(tt.name+"/"+kind.method, func(t *testing.T) {
				inBubble(t, 0, func(t *testing.T, f *fixture) {
					f.below(t, kind.call, f.client(append(tt.opts(f), gone)...))
					wantTree(t, f, strings.ReplaceAll(tt.want, "Echo", kind.method))
				})
			})
		}
	}
}

// The span of an attempt that waited for a connection says how long, with the backoff.
func TestServerThatIsThereLater(t *testing.T) {
	for _, kind := range kinds {
		t.Run(kind.method, func(t *testing.T) {
			inBubble(t, 0, func(t *testing.T, f *fixture) {
				start := time.Now()
				later := grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) {
					if time.Since(start) < 1500*time.Millisecond {
						return nil, errors.New("nobody listens")
					}
					return f.DialContext(ctx)
				})
				// gRPC dials after 0 s, 1 s and 2.6 s.
				redial := grpc.WithConnectParams(grpc.ConnectParams{
					Backoff: backoff.Config{BaseDelay: time.Second, Multiplier: 1.6, MaxDelay: time.Minute}})
				opts := append(f.retries(grpcretry.WithCallSpan(true)), f.withOtelgrpc(), later, redial)
				if err := f.below(t, kind.call, f.client(opts...)); err != nil {
					t.Errorf("%s = %v, want success after 3.6 s", kind.method, err)
				}
				wantTree(t, f, strings.ReplaceAll(`
caller internal 0s-3.6s Unset
  pkg.Service/Echo internal 0s-3.6s Unset OK attempts=2
    @0s attempt.number=1 UNAVAILABLE decision=retry wait_ms=1000 wait_source=connect
    @3.6s attempt.number=2 OK decision=success
    pkg.Service/Echo client 0s-0s Error attempt.number=1 UNAVAILABLE
    retry wait internal 0s-3.6s Unset next_attempt.number=2 wait_ms=1000 wait_source=connect
    attempt 2 pkg.Service/Echo client 3.6s-3.6s Unset attempt.number=2 attempt.wait_ms=3600 attempt.wait_source=connect OK
`, "Echo", kind.method))
			})
		})
	}
}

// A request that the server has refused unseen is sent again by gRPC itself, in the same
// attempt: a second span with the same number.
func TestTransparentRetriesHaveTheNumberOfTheirAttempt(t *testing.T) {
	inBubble(t, 0, func(t *testing.T, f *fixture) {
		client, server := net.Pipe()
		refused := make(chan error, 1)
		go func() { refused <- refuseOnce(server) }()
		conn := f.client(append(f.retries(), f.withOtelgrpc(),
			grpc.WithContextDialer(func(context.Context, string) (net.Conn, error) { return client, nil }))...)
		f.below(t, echo, conn)
		if err := <-refused; err != nil {
			t.Errorf("the server: %v", err)
		}
		client.Close()
		f.tree() // waits until all have ended
		var got []string
		for _, s := range f.recorder.Ended() {
			if s.SpanKind() == trace.SpanKindClient {
				number, _, _ := strings.Cut(text(s.Attributes()), " ")
				got = append(got, number)
			}
		}
		// Not their codes: of an attempt that fails while gRPC is still sending it tells
		// stats handlers no error, so that otelgrpc writes OK.
		if want := []string{"attempt.number=1", "attempt.number=1"}; !slices.Equal(got, want) {
			t.Errorf("client spans are of %q, want %q", got, want)
		}
	})
}

// refuseOnce speaks HTTP/2 with a client: it refuses the first request, and answers the
// second with NOT_FOUND.
func refuseOnce(conn net.Conn) error {
	if _, err := io.ReadFull(conn, make([]byte, len(http2.ClientPreface))); err != nil {
		return err
	}
	framer := http2.NewFramer(conn, conn)
	// A pipe holds nothing: writing would wait for a client that is writing itself.
	writes := make(chan func() error, 10)
	defer close(writes)
	go func() {
		for write := range writes {
			_ = write() // the client has gone
		}
	}()
	writes <- func() error { return framer.WriteSettings() }
	for requests := 0; ; {
		frame, err := framer.ReadFrame()
		if err != nil {
			return err
		}
		switch frame := frame.(type) {
		case *http2.SettingsFrame:
			if !frame.IsAck() {
				writes <- framer.WriteSettingsAck
			}
		case *http2.HeadersFrame:
			id := frame.StreamID
			if requests++; requests == 1 {
				writes <- func() error { return framer.WriteRSTStream(id, http2.ErrCodeRefusedStream) }
				continue
			}
			var block bytes.Buffer
			encoder := hpack.NewEncoder(&block)
			for _, f := range []hpack.HeaderField{{Name: ":status", Value: "200"},
				{Name: "content-type", Value: "application/grpc"}, {Name: "grpc-status", Value: "5"}} {
				if err := encoder.WriteField(f); err != nil {
					return err
				}
			}
			writes <- func() error {
				return framer.WriteHeaders(http2.HeadersFrameParam{StreamID: id, BlockFragment: block.Bytes(), EndHeaders: true, EndStream: true})
			}
			go io.Copy(io.Discard, conn)
			return nil
		}
	}
}
