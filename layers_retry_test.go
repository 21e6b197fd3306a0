package grpcretry

import (
	"context"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	echov1 "github.com/grpcretry/grpcretry/proto/echo/v1"
)

// These tests hold what a retry tells its server: whether each earlier attempt got a response, so that
// nobody is at work on it any more, and the server may retry its own calls.

// A mark is what an attempt says in its header grpcretry-caller-retries; "" without it.
type mark = string

// marks are those that a server has seen.
type marks struct {
	mu   sync.Mutex
	seen []mark
}

// add notes the mark of the request that is handled in ctx, and returns the number of requests so far.
func (m *marks) add(ctx context.Context) int {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.seen = append(m.seen, first(metadata.ValueFromIncomingContext(ctx, callerRetriesKey)))
	return len(m.seen)
}

// list returns a copy.
func (m *marks) list() []mark {
	m.mu.Lock()
	defer m.mu.Unlock()
	return slices.Clone(m.seen)
}

// marksOf makes a call, of each kind, whose attempt n is handled by handlers[n-1], and compares the marks
// that the server sees. The handler can cut the link.
func marksOf(t *testing.T, opts []grpc.DialOption, want []mark, handlers ...func(context.Context, *link) error) {
	t.Helper()
	for kind, send := range kinds {
		t.Run(kind, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				var seen marks
				var l *link
				server := serveHandler(t, func(ctx context.Context) error {
					n := seen.add(ctx)
					if n > len(handlers) {
						return nil
					}
					return handlers[n-1](ctx, l)
				})
				l, cc := server.linked(t, opts...)
				_, err := send(t.Context(), echov1.NewEchoServiceClient(cc))
				synctest.Wait()
				if got := seen.list(); !slices.Equal(got, want) {
					t.Errorf("marks %q and error %v, want %q", got, err, want)
				}
			})
		})
	}
}

func TestARetryTellsWhetherEarlierAttemptsGotAResponse(t *testing.T) {
	type handler = func(context.Context, *link) error
	fails := func(context.Context, *link) error { return errUnavailable }
	failsAfterHeaders := func(ctx context.Context, _ *link) error {
		return afterHeaders(ctx)
	}
	saysSomethingAfterHeaders := func(ctx context.Context, _ *link) error {
		grpc.SetTrailer(ctx, metadata.Pairs("k", "v"))
		return afterHeaders(ctx)
	}
	hangs := func(ctx context.Context, _ *link) error { <-ctx.Done(); return ctx.Err() }
	breaks := func(ctx context.Context, l *link) error { l.cut(); l.mend(); <-ctx.Done(); return ctx.Err() }
	options := func(more ...Option) []grpc.DialOption {
		return DialOptions(append([]Option{steady, WithBudget(Unlimited), WithPatience(1000 * second)}, more...)...)
	}
	for _, tt := range []struct {
		name     string
		opts     []grpc.DialOption
		handlers []handler
		want     []mark
	}{
		{"responses", options(), []handler{fails, fails}, []mark{"", "0", "0"}},
		{"no response within the attempt timeout", options(WithAttemptTimeout(second)), []handler{hangs, fails}, []mark{"", "1", "1"}},
		{"no response the second time", options(WithAttemptTimeout(second)), []handler{fails, hangs}, []mark{"", "0", "1"}},
		{"the connection breaks", options(), []handler{breaks, fails}, []mark{"", "1", "1"}},
		{"headers, and then perhaps no more", options(), []handler{failsAfterHeaders}, []mark{"", "1"}},
		{"headers and trailers", options(), []handler{saysSomethingAfterHeaders}, []mark{"", "0"}},
		{"a credential that is not there", append(options(), grpc.WithPerRPCCredentials(lateCreds{})), nil, []mark{"0"}},
	} {
		t.Run(tt.name, func(t *testing.T) { marksOf(t, tt.opts, tt.want, tt.handlers...) })
	}
}

// afterHeaders fails after it has sent headers.
func afterHeaders(ctx context.Context) error {
	if err := grpc.SendHeader(ctx, metadata.Pairs("k", "v")); err != nil {
		return err
	}
	return errUnavailable
}

// lateCreds fail a first attempt, so that it reaches no server although there is a connection.
type lateCreds struct{}

func (lateCreds) GetRequestMetadata(ctx context.Context, _ ...string) (map[string]string, error) {
	if a, _ := AttemptFromContext(ctx); a.Number == 1 {
		return nil, status.Error(codes.Unavailable, "no token")
	}
	return nil, nil
}
func (lateCreds) RequireTransportSecurity() bool { return false }

// A hedge is sent while an earlier attempt has no response yet.
func TestAHedgeTellsThatAnAttemptHasNoResponse(t *testing.T) {
	hangs := func(ctx context.Context, _ *link) error { <-ctx.Done(); return ctx.Err() }
	hedges := DialOptions(WithHedging(Hedging{Delay: HedgeAfter(second), Budget: Unlimited, AllMethodsAreSafe: true}), WithBudget(Unlimited))
	marksOf(t, hedges, []mark{"", "1"}, hangs)
}

// A retry meets the failure of the next service: in a zone that fails, for example. It is retried there,
// unless an earlier attempt may still be at work.
func TestARetryThatMeetsAnotherFailure(t *testing.T) {
	for _, tt := range []struct {
		name   string
		middle func(context.Context) error // the first attempt at the service in the middle
		want   codes.Code
		made   int64 // attempts at the last service
	}{
		{"after a response", isDown, codes.OK, 2},
		{"after no response", func(ctx context.Context) error { <-ctx.Done(); return ctx.Err() }, codes.Unavailable, 1},
	} {
		for kind, send := range kinds {
			t.Run(tt.name+"/"+kind, func(t *testing.T) {
				bubble(t, func(t *testing.T) {
					var made, asked atomic.Int64
					last := serveHandler(t, func(context.Context) error {
						if made.Add(1) == 1 {
							return status.Error(codes.Unavailable, "down")
						}
						return nil
					})
					below := last.client(t, steady)
					middle := serveHandler(t, func(ctx context.Context) error {
						if asked.Add(1) == 1 {
							return tt.middle(ctx)
						}
						_, err := below.Echo(ctx, request())
						return err
					}, serverOptions()...)
					client := middle.client(t, steady, WithMaxAttempts(2), WithAttemptTimeout(10*second), WithBudget(Unlimited))
					_, err := send(t.Context(), client)
					if kind == "stream" && tt.want == codes.OK { // the stream ends without a message
						err = nil
					}
					if got := made.Load(); status.Code(err) != tt.want || got != tt.made {
						t.Errorf("error %v after %d attempts at the last service, want %v after %d", err, got, tt.want, tt.made)
					}
				})
			})
		}
	}
}

// No server is at work for an attempt that one has refused, be it the first or a later one.
func TestARefusedStreamIsNoAttemptWithoutAResponse(t *testing.T) {
	everyKind(t, func(t *testing.T, kind callKind) {
		if kind.desc == nil {
			return // an interceptor does not learn of it
		}
		var seen []mark
		server := &frameServer{script: []frameStep{reset(refusedStream)}}
		cc := server.dial(t, append(DialOptions(), grpc.WithChainStreamInterceptor(func(ctx context.Context, desc *grpc.StreamDesc,
			cc *grpc.ClientConn, method string, streamer grpc.Streamer, opts ...grpc.CallOption) (grpc.ClientStream, error) {
			sent, _ := metadata.FromOutgoingContext(ctx)
			seen = append(seen, first(sent[callerRetriesKey]))
			return streamer(ctx, desc, cc, method, opts...)
		}))...)
		if err := kind.call(t.Context(), cc, anyMethod); status.Code(err) != codes.Unavailable {
			t.Errorf("the call returned %v, want UNAVAILABLE", err)
		}
		if want := []mark{"", "0", "0", "0", "0"}; !slices.Equal(seen, want) {
			t.Errorf("marks %q, want %q", seen, want)
		}
	})
}

// An attempt that the server has refused has multiplied nothing.
func TestWorkForARetryRepeatsARefusedStream(t *testing.T) {
	everyKind(t, func(t *testing.T, kind callKind) {
		if kind.desc == nil {
			return // gRPC sends it again by itself
		}
		server := &frameServer{script: []frameStep{reset(refusedStream), reset(cancelStream)}}
		cc := server.conn(t)
		service := serveHandler(t, func(ctx context.Context) error { return kind.call(ctx, cc, anyMethod) }, serverOptions()...)
		retried := metadata.AppendToOutgoingContext(t.Context(), previousAttemptsKey, "1")
		_ = echo(retried, echov1.NewEchoServiceClient(service.conn(t)))
		if got := server.seen(); got != 2 {
			t.Errorf("the server saw %d streams, want 2", got)
		}
	})
}
