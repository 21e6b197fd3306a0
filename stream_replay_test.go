package grpcretry

import (
	"context"
	"encoding/json"
	"io"
	"net"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	echov1 "github.com/grpcretry/grpcretry/proto/echo/v1"
)

// A cable is the network of a client. Cutting it breaks the connections made so far.
type cable struct {
	mu    sync.Mutex
	conns []net.Conn
}

func (c *cable) to(f *fixture) grpc.DialOption {
	return grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) {
		conn, err := f.listener.DialContext(ctx)
		c.mu.Lock()
		defer c.mu.Unlock()
		c.conns = append(c.conns, conn)
		return conn, err
	})
}

func (c *cable) cut() {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, conn := range c.conns {
		conn.Close()
	}
	c.conns = nil
}

// numbered sends messages with the numbers given, of 1 KiB each.
func (app *application) numbered(t *testing.T, from, to int64) {
	for i := from; i < to; i++ {
		if err := app.stream.SendMsg(&echov1.EchoRequest{Sequence: i, Payload: make([]byte, 1<<10)}); err != nil {
			t.Errorf("SendMsg of message %d = %v", i, err)
			return
		}
	}
}

// echoes receives n responses, and calls first after the first one.
func (app *application) echoes(t *testing.T, n int64, first func()) {
	defer first()
	for i := range n {
		var m echov1.EchoResponse
		if err := app.stream.RecvMsg(&m); err != nil || m.GetSequence() != i {
			t.Errorf("RecvMsg = response %d, %v, want response %d", m.GetSequence(), err, i)
			return
		}
		if i == 0 {
			first()
		}
	}
	app.play(t, "recv EOF")
}

// The server of the second attempt reads on only while its responses of 64 KiB are read: a
// replay that receives nothing fills the windows of both directions, and stops. A new connection
// has small windows again.
func TestReplayReceivesWhileItSends(t *testing.T) {
	const replayed, further = 240, 10 // messages sent before and after the first response
	for _, tt := range []struct {
		name string
		run  func(t *testing.T, app *application)
	}{
		{"one goroutine", func(t *testing.T, app *application) {
			app.numbered(t, 0, replayed)
			app.play(t, "close")
			app.echoes(t, replayed, func() {})
		}},
		{"two goroutines", func(t *testing.T, app *application) {
			var group sync.WaitGroup
			answered := make(chan struct{})
			group.Go(func() {
				app.numbered(t, 0, replayed)
				<-answered
				app.numbered(t, replayed, replayed+further)
				app.play(t, "close")
			})
			app.echoes(t, replayed+further, sync.OnceFunc(func() { close(answered) }))
			group.Wait()
		}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				var network cable
				server := serveStreams(t, func(n int, stream grpc.ServerStream) error {
					for i := int64(0); ; i++ {
						var m echov1.EchoRequest
						if err := stream.RecvMsg(&m); err == io.EOF {
							return nil
						} else if err != nil {
							return err
						}
						if m.GetSequence() != i {
							t.Errorf("attempt %d received message %d as number %d", n, m.GetSequence(), i)
							return status.Error(codes.DataLoss, "out of order")
						}
						if n == 1 && i == replayed-1 {
							network.cut()
						}
						if n == 1 {
							continue
						}
						if err := stream.SendMsg(&echov1.EchoResponse{Sequence: i, Payload: make([]byte, 32<<10)}); err != nil {
							return err
						}
					}
				})
				tt.run(t, openOn(t, server.conn(t, append(DialOptions(steady, WithBufferLimit(1<<20)), network.to(server))...), bidiStream))
				wantTimes(t, server, 0, second)
			})
		})
	}
}

// mergingCodec leaves what a message held and the wire does not mention, as JSON does.
type mergingCodec struct{}

func (mergingCodec) Name() string                       { return "proto" }
func (mergingCodec) Marshal(v any) ([]byte, error)      { return json.Marshal(v) }
func (mergingCodec) Unmarshal(data []byte, v any) error { return json.Unmarshal(data, v) }

// A note is a message of that codec. It knows its size, or it could not be buffered.
type note struct{ Text, Mark, Own string }

func (*note) Size() int { return 100 }

func TestNothingOfAFailedAttemptIsMergedIntoTheResponse(t *testing.T) {
	for _, tt := range []struct {
		name  string
		kind  *grpc.StreamDesc
		opts  []Option
		delay time.Duration // of the first message below us
	}{
		{"client stream that fails after its response", clientStream, nil, 0},
		{"server stream whose first message is late", serverStream, []Option{WithAttemptTimeout(5 * second)}, 6 * second},
	} {
		t.Run(tt.name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				f := serve(t, nil, grpc.ForceServerCodec(mergingCodec{}),
					grpc.UnknownServiceHandler(func(_ any, stream grpc.ServerStream) error {
						var m note
						for stream.RecvMsg(&m) == nil {
							continue
						}
						if PreviousAttempts(stream.Context()) > 0 {
							return stream.SendMsg(map[string]string{"Text": "2"})
						}
						stream.SendMsg(map[string]string{"Mark": "of attempt 1"})
						return status.Error(codes.Unavailable, "after the response")
					}))
				delay := tt.delay
				cc := f.conn(t, append(DialOptions(append(tt.opts, steady)...), below(func(s grpc.ClientStream) grpc.ClientStream {
					late := &lateStream{s, delay}
					delay = 0
					return late
				}))...)
				app := openOn(t, cc, tt.kind, grpc.ForceCodec(mergingCodec{}))
				if err := app.stream.SendMsg(&note{}); err != nil {
					t.Fatal(err)
				}
				app.play(t, "close")
				got, want := note{Own: "the application's"}, note{Text: "2", Own: "the application's"}
				if err := app.stream.RecvMsg(&got); err != nil || got != want {
					t.Errorf("RecvMsg = %+v, %v, want %+v", got, err, want)
				}
			})
		})
	}
}

// sendsEOF is a stream that does not send, because it knows that its attempt is dead.
type sendsEOF struct{ grpc.ClientStream }

func (sendsEOF) SendMsg(any) error { return io.EOF }

// Generated stubs return what SendMsg returns instead of a stream.
func TestSendMsgOfAServerStreamNeverReturnsEOF(t *testing.T) {
	same := func(s grpc.ClientStream) grpc.ClientStream { return s }
	dead := func(s grpc.ClientStream) grpc.ClientStream { return sendsEOF{s} }
	for _, tt := range []struct {
		name    string
		scripts []string
		opts    []Option
		wrap    func(grpc.ClientStream) grpc.ClientStream
		app     string
	}{
		{"no attempts left", []string{"fail UNAVAILABLE", "fail UNAVAILABLE"}, []Option{WithMaxAttempts(2)}, dead,
			"send a; close; recv UNAVAILABLE"},
		{"not retryable", []string{"fail NOT_FOUND"}, nil, dead, "send a; close; recv NOT_FOUND"},
		{"retryable", []string{"fail UNAVAILABLE", "recv a; send 1"}, nil, same, "wait 1s; send a; close; recv 1; recv EOF"},
		{"ended while the application waited for headers", []string{"fail NOT_FOUND"}, nil, same,
			"no header; send a; close; recv NOT_FOUND"},
		{"over already", []string{""}, nil, same, "wait 1s; send a; close; recv EOF"},
		{"failed after headers", []string{"header; fail NOT_FOUND"}, nil, dead, "wait 1s; send a; close; recv NOT_FOUND"},
		{"committed", []string{"header; fail UNAVAILABLE"}, nil, dead, "header; wait 1s; send a; close; recv UNAVAILABLE"},
		{"cancelled", []string{"hang"}, nil, same, "cancel; wait 1s; send a; close; recv CANCELLED"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				server := serveScripts(t, tt.scripts...)
				openOn(t, server.conn(t, append(DialOptions(append(tt.opts, steady)...), below(tt.wrap))...), serverStream).play(t, tt.app)
			})
		})
	}
	t.Run("generated stub", func(t *testing.T) {
		bubble(t, func(t *testing.T) {
			server := serveScripts(t, "fail NOT_FOUND")
			cc := server.conn(t, append(DialOptions(steady), below(dead))...)
			stream, err := echov1.NewEchoServiceClient(streamsOnly{cc}).Expand(t.Context(), request())
			if err != nil {
				t.Fatalf("Expand = %v, want a stream", err)
			}
			if _, err := stream.Recv(); status.Code(err) != codes.NotFound {
				t.Errorf("Recv = %v, want NOT_FOUND", err)
			}
		})
	})
}

// streamsOnly opens streams under a name that no service of the test server has.
type streamsOnly struct{ *grpc.ClientConn }

func (c streamsOnly) NewStream(ctx context.Context, desc *grpc.StreamDesc, _ string, opts ...grpc.CallOption) (grpc.ClientStream, error) {
	return c.ClientConn.NewStream(ctx, desc, "/streams/"+desc.StreamName, opts...)
}

// An application that only sends learns from SendMsg that it sends into the void.
func TestSendMsgReturnsEOFOnADeadStreamThatWasAnswered(t *testing.T) {
	for _, tt := range []struct {
		name        string
		kind        *grpc.StreamDesc
		server, app string
	}{
		{"a failure after headers", bidiStream, "recv a; header; fail UNAVAILABLE",
			"send a; wait 1s; sendeof b; recv UNAVAILABLE; trailer 1"},
		{"a failure after headers, client stream", clientStream, "recv a; header; fail UNAVAILABLE",
			"send a; wait 1s; sendeof b; recv UNAVAILABLE"},
		{"a failure after a message", bidiStream, "recv a; send 1; fail UNAVAILABLE",
			"send a; wait 1s; sendeof b; sendeof c; recv 1; recv UNAVAILABLE"},
		{"an early OK to a client stream", clientStream, "recv a; send 1", "send a; wait 1s; sendeof b; sendeof c; recv 1"},
		{"an early OK", bidiStream, "recv a; send 1; send 2", "send a; wait 1s; sendeof b; recv 1; recv 2; recv EOF"},
		{"an early OK without a message", bidiStream, "recv a", "send a; wait 1s; sendeof b; recv EOF"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			asPlain(t, nil, func(t *testing.T, dial []grpc.DialOption) {
				server := serveScripts(t, tt.server)
				openOn(t, server.conn(t, dial...), tt.kind).play(t, tt.app)
				wantTimes(t, server, 0)
			})
		})
	}
}

// A server that is stopped gracefully ends its streams one by one.
func TestASlowUploaderLearnsThatItsServerIsGone(t *testing.T) {
	asPlain(t, nil, func(t *testing.T, dial []grpc.DialOption) {
		server := serveStreams(t, func(_ int, stream grpc.ServerStream) error {
			stream.SendHeader(nil)
			<-stream.Context().Done()
			return nil
		})
		app := openOn(t, server.conn(t, dial...), clientStream)
		time.AfterFunc(10*second, server.server.Stop)
		sent := 0
		for app.stream.SendMsg(request()) == nil && sent < 60 {
			sent++
			time.Sleep(second)
		}
		if sent > 12 {
			t.Errorf("SendMsg returned nil for %d s, and the server was gone after 10 s", sent)
		}
		app.play(t, "recv UNAVAILABLE")
	})
}

// slowReceiver is a stream whose RecvMsg is slow to report a failure.
type slowReceiver struct {
	grpc.ClientStream
	delay time.Duration
}

func (s slowReceiver) RecvMsg(m any) error {
	err := s.ClientStream.RecvMsg(m)
	if err != nil {
		time.Sleep(s.delay)
	}
	return err
}

// While a goroutine is in RecvMsg, a failure after headers is that goroutine's to retry.
func TestSendMsgOnADeadStreamLeavesTheRetryToTheReceiver(t *testing.T) {
	bubble(t, func(t *testing.T) {
		server := serveScripts(t, "recv a; header; wait 1s; fail UNAVAILABLE", "recv a; recv b; send 1; recv EOF")
		app := openOn(t, server.conn(t, append(DialOptions(steady),
			below(func(s grpc.ClientStream) grpc.ClientStream { return slowReceiver{s, second} }))...), bidiStream)
		var group sync.WaitGroup
		group.Go(func() { app.play(t, "send a; wait 1500ms; send b; close") })
		app.play(t, "recv 1; recv EOF")
		group.Wait()
		wantTimes(t, server, 0, 3*second)
	})
}

// Messages are kept by reference, so one that was sent twice cannot be replayed as what it was
// the first time.
func TestAMessageObjectSentRepeatedlyIsNeverReplayedAsItsLastValue(t *testing.T) {
	bubble(t, func(t *testing.T) {
		var mu sync.Mutex
		var received [][]string // by attempt
		server := serveStreams(t, func(n int, stream grpc.ServerStream) error {
			var got []string
			var m echov1.EchoRequest
			for stream.RecvMsg(&m) == nil {
				got = append(got, m.GetMessage())
			}
			mu.Lock()
			received = append(received, got)
			mu.Unlock()
			if n == 1 {
				return status.Error(codes.Unavailable, "x")
			}
			return stream.SendMsg(&echov1.EchoResponse{Message: strings.Join(got, " ")})
		})
		app := openOn(t, server.conn(t, DialOptions(steady)...), clientStream)
		m, want := &echov1.EchoRequest{}, []string(nil)
		for i := range 3 {
			m.Message = strconv.Itoa(i)
			want = append(want, m.Message)
			if err := app.stream.SendMsg(m); err != nil {
				t.Fatal(err)
			}
			time.Sleep(second) // on the wire by now
		}
		app.play(t, "close")
		err := app.stream.RecvMsg(new(echov1.EchoResponse))
		for i, got := range received {
			if !slices.Equal(got, want) {
				t.Errorf("attempt %d received %q, want %q", i+1, got, want)
			}
		}
		if len(received) == 1 && status.Code(err) != codes.Unavailable {
			t.Errorf("RecvMsg = %v, want UNAVAILABLE", err)
		}
	})
}
