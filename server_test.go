package grpcretry

import (
	"context"
	"errors"
	"math"
	"slices"
	"strconv"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/grpc/test/bufconn"

	echov1 "github.com/grpcretry/grpcretry/proto/echo/v1"
)

// A handler is a server whose unary and stream handlers do the same thing, and send no response.
type handler struct {
	echov1.UnimplementedEchoServiceServer
	handle func(context.Context) error
}

func (h *handler) Echo(ctx context.Context, _ *echov1.EchoRequest) (*echov1.EchoResponse, error) {
	return nil, h.handle(ctx)
}

func (h *handler) Expand(_ *echov1.EchoRequest, stream grpc.ServerStreamingServer[echov1.EchoResponse]) error {
	return h.handle(stream.Context())
}

// kinds has functions that make one RPC of each kind, without retries, and return its trailer.
var kinds = map[string]func(ctx context.Context, client echov1.EchoServiceClient) (metadata.MD, error){
	"unary": func(ctx context.Context, client echov1.EchoServiceClient) (trailer metadata.MD, err error) {
		_, err = client.Echo(ctx, request(), grpc.Trailer(&trailer))
		return trailer, err
	},
	"stream": func(ctx context.Context, client echov1.EchoServiceClient) (metadata.MD, error) {
		stream, err := client.Expand(ctx, request())
		if err != nil {
			return nil, err
		}
		_, err = stream.Recv()
		return stream.Trailer(), err
	},
}

// forEachKind runs an RPC of each kind against handle.
func forEachKind(t *testing.T, ctx context.Context, handle func(context.Context) error,
	check func(t *testing.T, trailer metadata.MD, err error)) {
	for name, send := range kinds {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				f := &fixture{listener: bufconn.Listen(1 << 20), server: grpc.NewServer()}
				echov1.RegisterEchoServiceServer(f.server, &handler{handle: handle})
				served := make(chan struct{})
				go func() {
					defer close(served)
					if err := f.server.Serve(f.listener); err != nil {
						t.Errorf("Serve: %v", err)
					}
				}()
				defer func() { f.server.Stop(); <-served }()
				trailer, err := send(ctx, echov1.NewEchoServiceClient(f.conn(t)))
				check(t, trailer, err)
			})
		})
	}
}

func TestSetPushbackIsSentInWholeMilliseconds(t *testing.T) {
	const ms = time.Millisecond
	for _, tt := range []struct {
		name  string
		delay time.Duration
		want  string
	}{
		{"zero", 0, "0"},
		{"whole milliseconds", 1500 * ms, "1500"},
		{"a nanosecond is rounded up", 1, "1"},
		{"a part of a millisecond is rounded up", 7*ms + 1, "8"},
		{"just under a millisecond more", 8*ms - 1, "8"},
		{"the most that the wire holds", math.MaxInt32 * ms, "2147483647"},
		{"rounded up to the most", math.MaxInt32*ms - 1, "2147483647"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			handle := func(ctx context.Context) error {
				if err := SetPushback(ctx, tt.delay); err != nil {
					return err
				}
				return status.Error(codes.Unavailable, "later")
			}
			forEachKind(t, context.Background(), handle, func(t *testing.T, trailer metadata.MD, err error) {
				if got := trailer[pushbackKey]; !slices.Equal(got, []string{tt.want}) || status.Code(err) != codes.Unavailable {
					t.Errorf("trailer %v and error %v, want %q and Unavailable", trailer, err, tt.want)
				}
				ms, _ := strconv.Atoi(tt.want)
				if got, _ := PushbackFrom(trailer, err); got.Stop || got.Delay != time.Duration(ms)*time.Millisecond {
					t.Errorf("read back as %+v, want %s ms", got, tt.want)
				}
			})
		})
	}
}

func TestSetPushbackRejectsWhatTheWireCannotHold(t *testing.T) {
	for _, delay := range []time.Duration{-1, -time.Hour, math.MinInt64, math.MaxInt32*time.Millisecond + 1, math.MaxInt64} {
		handle := func(ctx context.Context) error {
			wantRefused(t, SetPushback(ctx, delay), "SetPushback", delay.String())
			return status.Error(codes.Unavailable, "later")
		}
		forEachKind(t, context.Background(), handle, func(t *testing.T, trailer metadata.MD, err error) {
			if len(trailer[pushbackKey]) > 0 {
				t.Errorf("SetPushback(%v) sent %v, want nothing", delay, trailer)
			}
		})
	}
}

func TestSetNoRetryIsReadAsStop(t *testing.T) {
	handle := func(ctx context.Context) error {
		if err := SetNoRetry(ctx); err != nil {
			return err
		}
		return status.Error(codes.Unavailable, "never again")
	}
	forEachKind(t, context.Background(), handle, func(t *testing.T, trailer metadata.MD, err error) {
		want := Pushback{Stop: true, Source: WaitPushback}
		if got, ok := PushbackFrom(trailer, err); !ok || got != want || status.Code(err) != codes.Unavailable {
			t.Errorf("read back as %+v, %t with error %v, want %+v", got, ok, err, want)
		}
	})
}

// gRPC sends both trailers, and a repeated value means stop, as SetPushback's comment says.
func TestSecondPushbackOfAHandlerMeansStop(t *testing.T) {
	handle := func(ctx context.Context) error {
		return errors.Join(SetPushback(ctx, time.Second), SetPushback(ctx, time.Second))
	}
	forEachKind(t, context.Background(), handle, func(t *testing.T, trailer metadata.MD, _ error) {
		if got, _ := PushbackFrom(trailer, nil); !got.Stop {
			t.Errorf("trailer %v read as %+v, want stop", trailer, got)
		}
	})
}

func TestPushbackOutsideOfAHandlerIsAnError(t *testing.T) {
	ctx := metadata.NewIncomingContext(t.Context(), metadata.Pairs("k", "v"))
	wantRefused(t, SetPushback(ctx, time.Second), "SetPushback")
	wantRefused(t, SetNoRetry(ctx), "SetNoRetry")
}

// This package's client obeys what its server functions send.
func TestPushbackOfAHandlerIsObeyed(t *testing.T) {
	bubble(t, func(t *testing.T) {
		pushback := unavailable()
		pushback.do = func(ctx context.Context) error { return SetPushback(ctx, 3*time.Second+1) }
		never := unavailable()
		never.do = SetNoRetry
		server := serve(t, script(pushback, never))
		_, err := server.client(t, steady).Echo(t.Context(), request())
		wantStop(t, err, codes.Unavailable, ErrPushback, 2)
		wantTimes(t, server, 0, 3001*time.Millisecond)
	})
}

func TestPreviousAttempts(t *testing.T) {
	for _, tt := range []struct {
		name   string
		values []string
		want   int
	}{
		{"a first attempt", nil, 0},
		{"a second one", []string{"1"}, 1},
		{"repeated: the largest counts", []string{"1", "7", "3"}, 7},
		{"malformed among others", []string{"x", "2"}, 2},
	} {
		t.Run(tt.name, func(t *testing.T) {
			ctx := metadata.NewOutgoingContext(context.Background(), metadata.MD{"grpc-previous-rpc-attempts": tt.values})
			got := -1
			handle := func(ctx context.Context) error { got = PreviousAttempts(ctx); return nil }
			forEachKind(t, ctx, handle, func(t *testing.T, _ metadata.MD, _ error) {
				if got != tt.want {
					t.Errorf("PreviousAttempts with %q = %d, want %d", tt.values, got, tt.want)
				}
			})
		})
	}
	if got := PreviousAttempts(t.Context()); got != 0 {
		t.Errorf("PreviousAttempts outside of a handler = %d, want 0", got)
	}
}
