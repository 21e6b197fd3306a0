package grpcretry

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/peer"

	echov1 "github.com/grpcretry/grpcretry/proto/echo/v1"
)

// The tests here are of what happens while another goroutine, or another attempt, is at work.

// SendMsg commits a stream that is sent the same object twice. Nothing that happens while the warning is written makes it wait.
func TestSendMsgOfTheSameObjectReturnsAlthoughTheStreamGoesOnMeanwhile(t *testing.T) {
	for _, tt := range []struct {
		server string
		recv   string
	}{
		{"recv a; wait 500ms; send 1; recv a; send 2; hang", "recv 1"},
		{"recv a; wait 500ms; fail INVALID_ARGUMENT", "recv INVALID_ARGUMENT"},
	} {
		t.Run(tt.recv, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				server := serveScripts(t, tt.server)
				app := openOn(t, server.conn(t, DialOptions(steady, WithLogger(slog.New(slowLog{slog.DiscardHandler})))...), bidiStream)
				var receiver sync.WaitGroup
				receiver.Go(func() { app.play(t, tt.recv) })
				start, m := time.Now(), &echov1.EchoRequest{Message: "a"}
				if err := app.stream.SendMsg(m); err != nil {
					t.Fatal(err)
				}
				err := app.stream.SendMsg(m)
				if took := time.Since(start); took > 2*second {
					t.Errorf("the second SendMsg returned %v after %v, want to wait for the logger only", err, took)
				}
				receiver.Wait()
			})
		})
	}
}

// slowLog takes a second for each record.
type slowLog struct{ slog.Handler }

func (slowLog) Enabled(context.Context, slog.Level) bool { return true }

func (slowLog) Handle(context.Context, slog.Record) error {
	time.Sleep(second)
	return nil
}

// A stream that the application has committed before its first message is ended by the attempt timeout if it has no deadline, in
// Header, too.
func TestTheAttemptTimeoutEndsHeaderOfACommittedStream(t *testing.T) {
	bubble(t, func(t *testing.T) {
		server := serveScripts(t, "hang")
		app := openOn(t, server.conn(t, DialOptions(steady, WithAttemptTimeout(5*second))...), bidiStream)
		app.play(t, "context; wait 20s")
		start := time.Now()
		md, err := app.stream.Header()
		if took := time.Since(start); took != 5*second || md != nil || err != nil {
			t.Errorf("Header = %v, %v after %v, want nothing after 5s, as for other failures", md, err, took)
		}
		app.play(t, "recv DEADLINE_EXCEEDED")
	})
}

// The attempt timeout cuts an attempt whose message has arrived in an interceptor below. The caller's outputs, and what observers see, are
// those of an attempt, hedged or not.
func TestOutputsOfAnAttemptThatIsCutWithItsMessage(t *testing.T) {
	hedging := WithHedging(Hedging{Delay: HedgeAfter(time.Hour), AllMethodsAreSafe: true})
	for name, opts := range map[string][]Option{"retried": nil, "hedged": {hedging}} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				server := serveScripts(t, "header; send 1; fail NOT_FOUND", "header; send 1; fail NOT_FOUND")
				opts := append([]Option{steady, WithMaxAttempts(2), WithAttemptTimeout(5 * second),
					WithObserver(func(_ context.Context, e Event) {
						if a := e.Attempt; e.Kind == AttemptEnd && (a.Peer == nil || a.Header == nil) {
							t.Errorf("attempt %d has ended with peer %v and header %v, want those of its stream", a.Number, a.Peer, a.Header)
						}
					})}, opts...)
				cc := server.conn(t, append(DialOptions(opts...),
					below(func(s grpc.ClientStream) grpc.ClientStream { return &lateStream{s, 10 * second} }))...)
				var header, trailer metadata.MD
				var from peer.Peer
				app := openOn(t, cc, serverStream, grpc.Header(&header), grpc.Trailer(&trailer), grpc.Peer(&from))
				app.play(t, "send a; close; recv DEADLINE_EXCEEDED")
				shown, _ := app.stream.Header()
				if fmt.Sprint(header) != fmt.Sprint(shown) || fmt.Sprint(trailer) != fmt.Sprint(app.stream.Trailer()) || from.Addr == nil {
					t.Errorf("the caller has header %v, trailer %v and peer %v, want those of the stream: %v, %v", header, trailer, from.Addr,
						shown, app.stream.Trailer())
				}
			})
		})
	}
}

// A hedge wins with the end of an empty stream, while the first attempt's message is on its way.
func TestNothingOfALoserIsLeftInTheMessageOfAnEmptyStream(t *testing.T) {
	bubble(t, func(t *testing.T) {
		server, attempts := serveScripts(t, "header; send 1; hang", "header"), 0
		hedging := WithHedging(Hedging{Delay: HedgeAfter(second), Budget: Unlimited, AllMethodsAreSafe: true})
		cc := server.conn(t, append(DialOptions(steady, hedging),
			below(func(s grpc.ClientStream) grpc.ClientStream {
				if attempts++; attempts > 1 {
					return s
				}
				return &lateStream{s, 10 * second}
			}))...)
		app := openOn(t, cc, serverStream)
		app.play(t, "send a; close")
		var m echov1.EchoResponse
		if err := app.stream.RecvMsg(&m); !isEOF(err) || m.GetMessage() != "" {
			t.Errorf("RecvMsg = %v with %q, want %v and nothing", err, m.GetMessage(), io.EOF)
		}
	})
}
