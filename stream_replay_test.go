package grpcretry

import (
	"context"
	"encoding/json"
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
		{"server stream whose first message is late", serverStream, []Option{WithAttemptTimeout(5 * second)}, 7 * second},
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
				got, want := note{Own: "the application's"}, note{Text: "2"}
				if err := app.stream.RecvMsg(&got); err != nil || got != want {
					t.Errorf("RecvMsg = %+v, %v, want %+v", got, err, want)
				}
			})
		})
	}
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
