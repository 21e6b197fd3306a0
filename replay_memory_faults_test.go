package grpcretry

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"math"
	"runtime"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"

	echov1 "github.com/grpcretry/grpcretry/proto/echo/v1"
)

// A hedge that is due but not sent, because an observer ends the goroutine, leaves nothing over.
func TestReplayMemoryOfAHedgeThatAnObserverStops(t *testing.T) {
	bubble(t, func(t *testing.T) {
		r := retrierOf(t, hedged(Hedging{MaxAttempts: 2, Delay: HedgeAfter(second)}),
			WithObserver(func(_ context.Context, e Event) {
				if e.Kind == AttemptStart && e.Attempt.Number == 2 {
					runtime.Goexit()
				}
			}))
		done := make(chan bool)
		go func() {
			defer close(done)
			_ = invokeEcho(t.Context(), r.UnaryClientInterceptor(), func(context.Context, int) error {
				time.Sleep(2 * second)
				return nil
			})
			t.Error("the call returned, want it to end its goroutine like the observer")
		}()
		<-done
		wantUsage(t, "in the end", r, Usage{})
	})
}

// A log that panics when the memory is full takes nothing else along.
func TestReplayMemoryFullAndTheLogPanics(t *testing.T) {
	bubble(t, func(t *testing.T) {
		r := retrierOf(t, WithReplayMemory(0), WithLogger(slog.New(panickingLog{slog.DiscardHandler})))
		server := serveScripts(t, "recv bbb; send 1")
		app := openOn(t, server.conn(t, r.DialOptions()...), bidiStream)
		func() {
			defer func() { _ = recover() }()
			app.play(t, "send aaa")
			t.Error("SendMsg returned, want the log's panic")
		}()
		app.play(t, "send bbb; close; recv 1; recv EOF")
		wantUsage(t, "in the end", r, Usage{CommittedStreams: 1})
	})
}

type panickingLog struct{ slog.Handler }

func (panickingLog) Enabled(context.Context, slog.Level) bool  { return true }
func (panickingLog) Handle(context.Context, slog.Record) error { panic("log") }

// A telling message says how large it is; a negative number makes it panic.
type telling int

func (s *telling) Size() int {
	if *s < 0 {
		panic("a negative size")
	}
	return int(*s)
}

// Whatever messages say about their size, streams keep no more than the limit, and send as in gRPC.
func TestReplayMemoryOfMessagesOfOtherTypes(t *testing.T) {
	for name, m := range map[string]any{
		"nil": nil, "bytes": []byte("aaa"), "text": "aaa", "nil request": (*echov1.EchoRequest)(nil),
		"size 0": new(telling(0)), "size 100": new(telling(100)), "largest size": new(telling(math.MaxInt)),
		"size of almost 2 GiB": new(telling(math.MaxInt32 - 10)), "panics": new(telling(-1)),
	} {
		for _, desc := range []*grpc.StreamDesc{serverStream, bidiStream} {
			for _, limit := range []int{0, 64, 1 << 20, math.MaxInt32, math.MaxInt} {
				t.Run(fmt.Sprint(name, "/", desc.StreamName, "/", limit), func(t *testing.T) {
					r := retrierOf(t, WithReplayMemory(limit), WithBufferLimit(math.MaxInt))
					below := &countedStream{}
					stream, err := r.StreamClientInterceptor()(t.Context(), desc, nil, "/s/m",
						func(context.Context, *grpc.StreamDesc, *grpc.ClientConn, string, ...grpc.CallOption) (grpc.ClientStream, error) {
							return below, nil
						})
					if err != nil {
						t.Fatal(err)
					}
					for n := 1; n == 1 || n == 2 && desc.ClientStreams; n++ {
						if err := stream.SendMsg(m); err != nil || below.sent != n {
							t.Errorf("after SendMsg = %v, gRPC has %d messages, want %d", err, below.sent, n)
						}
						u := r.Usage()
						if u.ReplayMemory < 0 || u.ReplayMemory > int64(limit) {
							t.Errorf("ReplayMemory = %d", u.ReplayMemory)
						}
						if limit == 0 && stream.(*retryStream).direct.Load() == nil {
							t.Error("with a limit of 0 the first message has not committed the stream")
						}
					}
					for range 2 {
						err = stream.RecvMsg(new(echov1.EchoResponse))
					}
					if err != io.EOF {
						t.Errorf("the second RecvMsg = %v, want EOF", err)
					}
					wantUsage(t, "in the end", r, Usage{CommittedStreams: r.Usage().CommittedStreams})
				})
			}
		}
	}
}

// A countedStream counts the messages that it is sent, and receives one.
type countedStream struct {
	oneMessage
	sent int
}

func (s *countedStream) SendMsg(any) error          { s.sent++; return nil }
func (*countedStream) Header() (metadata.MD, error) { return nil, nil }
func (*countedStream) Context() context.Context     { return context.Background() }

// A hedge whose reply cannot say its size wins nevertheless.
func TestAReplyThatPanicsWhenAskedForItsSize(t *testing.T) {
	bubble(t, func(t *testing.T) {
		r := retrierOf(t, hedged(Hedging{MaxAttempts: 2, Delay: HedgeAfter(second)}))
		reply := new(telling(7))
		err := r.UnaryClientInterceptor()(t.Context(), echoMethod, request(), reply, nil, func(ctx context.Context, _ string, _, reply any,
			_ *grpc.ClientConn, _ ...grpc.CallOption) error {
			if a, _ := AttemptFromContext(ctx); a.Number == 1 {
				<-ctx.Done()
				return ctx.Err()
			}
			*reply.(*telling) = -1
			return nil
		})
		if err != nil || *reply != -1 {
			t.Errorf("the call = %v, its reply %d, want the hedge's", err, *reply)
		}
		wantUsage(t, "in the end", r, Usage{})
	})
}

// The estimate of a reply's size follows the replies of streams that have won by their headers, too:
// otherwise one huge message would switch off hedging for a program that asks for headers.
func TestHugeReplyIsForgottenByStreamsThatWinByHeaders(t *testing.T) {
	bubble(t, func(t *testing.T) {
		const limit = 100_000
		r := retrierOf(t, WithReplayMemory(limit), WithBudget(Unlimited),
			WithMethod("/streams/Expand", WithHedging(Hedging{MaxAttempts: 2, Delay: HedgeAfter(second), Budget: Unlimited})))
		huge := strings.Repeat("x", 2*limit)
		server := serveStreams(t, func(n int, stream grpc.ServerStream) error {
			text := "small"
			if n == 1 {
				text = huge
			}
			return playServer(t, n, "wait 1500ms; header; send "+text, stream)
		})
		cc := server.conn(t, r.DialOptions()...)
		for i := range 20 {
			stream, err := cc.NewStream(t.Context(), serverStream, "/streams/Expand", grpc.StaticMethod())
			if err != nil {
				t.Fatal(err)
			}
			if stream.SendMsg(request()) != nil || stream.CloseSend() != nil {
				t.Fatal("cannot send")
			}
			headers := make(chan bool)
			go func() {
				defer close(headers)
				time.Sleep(second / 2)
				if i > 0 {
					stream.Header()
				}
			}()
			for stream.RecvMsg(new(echov1.EchoResponse)) == nil {
				continue
			}
			<-headers
		}
		made := len(server.attempts())
		if unsent := r.Usage().UnsentHedges; unsent != 6 || made != 34 {
			t.Errorf("%d hedges were not sent, and 20 calls made %d attempts, want 6 and 34", unsent, made)
		}
	})
}

// A stream that the application abandons counts no longer than it lives, if an interceptor below drops
// call options, so that gRPC cannot report the end, or returns no stream at all.
func TestUsageAfterStreamsWhoseEndIsHidden(t *testing.T) {
	for name, open := range map[string]grpc.StreamClientInterceptor{
		"options are dropped": func(ctx context.Context, desc *grpc.StreamDesc, cc *grpc.ClientConn, method string,
			streamer grpc.Streamer, _ ...grpc.CallOption) (grpc.ClientStream, error) {
			return streamer(ctx, desc, cc, method)
		},
		"there is no stream": func(context.Context, *grpc.StreamDesc, *grpc.ClientConn, string, grpc.Streamer,
			...grpc.CallOption) (grpc.ClientStream, error) {
			return nil, nil
		},
	} {
		for _, desc := range []*grpc.StreamDesc{serverStream, clientStream, bidiStream} {
			t.Run(name+"/"+desc.StreamName, func(t *testing.T) {
				bubble(t, func(t *testing.T) {
					r := retrierOf(t)
					server := serveStreams(t, func(_ int, stream grpc.ServerStream) error {
						<-stream.Context().Done()
						return nil
					})
					cc := server.conn(t, append(r.DialOptions(), grpc.WithChainStreamInterceptor(open))...)
					ctx, cancel := context.WithCancel(t.Context())
					for range 10 {
						stream, err := cc.NewStream(ctx, desc, "/s/m")
						if err != nil {
							t.Fatal(err)
						}
						func() {
							defer func() { _ = recover() }() // there may be no stream
							_ = stream.SendMsg(request())
						}()
					}
					if u := r.Usage(); u.OpenStreams != 10 || u.ReplayMemory == 0 {
						t.Errorf("Usage with 10 streams = %+v", u)
					}
					cancel()
					for i := 0; i < 1000 && r.Usage() != (Usage{ReplayLimit: defaultReplayMemory}); i++ {
						runtime.GC()
						time.Sleep(time.Millisecond)
					}
					wantUsage(t, "when they are garbage", r, Usage{})
				})
			})
		}
	}
}
