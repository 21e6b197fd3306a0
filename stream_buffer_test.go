package grpcretry

import (
	"context"
	"math"
	"strconv"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	echov1 "github.com/grpcretry/grpcretry/proto/echo/v1"
)

// A stream is committed when the limit is passed, not when it is reached, and all its
// messages count. "aaa" is 3 bytes, in a field of 2 more, in a frame of 5 more.
func TestTheBufferLimitIsExact(t *testing.T) {
	const small = 10
	for _, tt := range []struct {
		limit    int
		attempts []time.Duration
		app      string
	}{
		{2 * small, []time.Duration{0, 1 * second}, "send aaa; send bbb; close; recv 1"},
		{2*small - 1, []time.Duration{0}, "send aaa; send bbb; close; recv UNAVAILABLE"},
	} {
		t.Run(strconv.Itoa(tt.limit), func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				scripts := []string{"recv aaa; recv bbb; recv EOF; fail UNAVAILABLE", "recv aaa; recv bbb; recv EOF; send 1"}
				server := serveStreams(t, func(n int, stream grpc.ServerStream) error { return playServer(t, n, scripts[n-1], stream) })
				app, err := server.openStream(t, clientStream, []Option{WithBufferLimit(tt.limit)})
				if err != nil {
					t.Fatal(err)
				}
				app.play(t, tt.app)
				wantTimes(t, server, tt.attempts...)
			})
		})
	}
}

// An EchoRequest without contents takes 5 bytes, those of the prefix.
func TestTheDefaultBufferLimit(t *testing.T) {
	for _, tt := range []struct {
		name     string
		messages int
		size     int
		attempts int
	}{
		{"many empty messages are over the default limit", 256<<10/5 + 1, 0, 1},
		{"one less is within it", 256 << 10 / 5, 0, 2},
		{"few messages are within it", 500, 100, 2},
		{"one large message is over it", 1, 300 << 10, 1},
	} {
		t.Run(tt.name, func(t *testing.T) {
			attempts := 0
			stream, err := StreamClientInterceptor(WithMaxAttempts(2), WithBackoff(Constant(0)))(t.Context(), bidiStream, nil, "/s/m",
				func(context.Context, *grpc.StreamDesc, *grpc.ClientConn, string, ...grpc.CallOption) (grpc.ClientStream, error) {
					attempts++
					return counting{&endless{}, status.Error(codes.Unavailable, "x")}, nil
				})
			if err != nil {
				t.Fatal(err)
			}
			for range tt.messages {
				if err := stream.SendMsg(&echov1.EchoRequest{Payload: make([]byte, tt.size)}); err != nil {
					t.Fatal(err)
				}
			}
			if err := stream.RecvMsg(new(echov1.EchoResponse)); status.Code(err) != codes.Unavailable || attempts != tt.attempts {
				t.Errorf("RecvMsg = %v after %d attempts, want UNAVAILABLE after %d", err, attempts, tt.attempts)
			}
		})
	}
}

// counting is a stream that takes any message and fails when it is to receive one.
type counting struct {
	*endless
	err error
}

func (counting) CloseSend() error             { return nil }
func (counting) Header() (metadata.MD, error) { return nil, nil }
func (c counting) RecvMsg(any) error          { return c.err }

// Without a buffer a stream is gRPC's own: no budget, no event, its error untouched, also
// where it cannot be opened.
func TestStreamsWithoutABufferPassStraightThrough(t *testing.T) {
	for _, tt := range []struct {
		name string
		opt  Option
	}{
		{"WithBufferLimit", WithBufferLimit(0)},
		{"Policy.BufferLimit", WithPolicy(Policy{BufferLimit: -1})},
	} {
		t.Run(tt.name, func(t *testing.T) {
			budget, events, attempts := &aBudget{}, 0, 0
			streamer := func(context.Context, *grpc.StreamDesc, *grpc.ClientConn, string, ...grpc.CallOption) (grpc.ClientStream, error) {
				if attempts++; attempts == 1 {
					return &endless{}, nil
				}
				return nil, status.Error(codes.Unavailable, "no stream")
			}
			open := StreamClientInterceptor(tt.opt, WithBudget(budget), WithObserver(func(context.Context, Event) { events++ }))
			stream, err := open(t.Context(), bidiStream, nil, "/s/m", streamer)
			if _, own := stream.(*endless); !own || err != nil {
				t.Errorf("stream is %T, %v, want gRPC's own", stream, err)
			}
			_, err = open(t.Context(), bidiStream, nil, "/s/m", streamer)
			wantUntouched(t, err, codes.Unavailable, "no stream")
			if len(budget.heard) != 0 || events != 0 || attempts != 2 {
				t.Errorf("budget heard %v, %d events, %d attempts, want none, none, one a call", budget.heard, events, attempts)
			}
		})
	}
}

// unsized is a message that cannot tell its size; the codec below knows it.
type unsized struct{ text string }

func TestSizeOfAMessage(t *testing.T) {
	for _, tt := range []struct {
		m     any
		want  int
		known bool
	}{
		{&echov1.EchoRequest{}, 5, true},
		{&echov1.EchoRequest{Message: "abc", Payload: []byte("de")}, 5 + 5 + 4, true},
		{sized(7), 12, true},
		{sized(-7), 5, true},
		{sized(math.MaxInt), math.MaxInt32, true},
		{&unsized{"x"}, 5, false},
	} {
		if got, known := sizeOf(tt.m); got != tt.want || known != tt.known {
			t.Errorf("size of %T = %d, %v, want %d, %v", tt.m, got, known, tt.want, tt.known)
		}
	}
}

type sized int

func (s sized) Size() int { return int(s) }

func TestOverTheBufferWhileTheReceiverRetries(t *testing.T) {
	bubble(t, func(t *testing.T) {
		scripts := []string{"recv a; fail UNAVAILABLE", "recv a; recv " + big + "; recv EOF; send 1; fail UNAVAILABLE"}
		server := serveStreams(t, func(n int, stream grpc.ServerStream) error { return playServer(t, n, scripts[n-1], stream) })
		app, err := server.openStream(t, bidiStream, []Option{WithBufferLimit(1000)})
		if err != nil {
			t.Fatal(err)
		}
		var group sync.WaitGroup
		group.Go(func() {
			app.play(t, "send a; wait 500ms; send "+big+"; close") // the second waits for the attempt that it commits
			if got := time.Since(server.start); got != second {
				t.Errorf("SendMsg returned after %v, want 1s, when there was an attempt to commit", got)
			}
		})
		app.play(t, "recv 1; recv UNAVAILABLE")
		group.Wait()
		wantTimes(t, server, 0, second)
	})
}
