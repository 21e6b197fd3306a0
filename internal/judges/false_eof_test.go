package judges_test

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/stats"
	"google.golang.org/grpc/status"
	"google.golang.org/grpc/test/bufconn"
	"google.golang.org/protobuf/proto"

	"github.com/grpcretry/grpcretry"
	echov1 "github.com/grpcretry/grpcretry/proto/echo/v1"
)

// gRPC reports the success of a call that no server has answered. It takes two losses:
//
//  1. The server refuses the call's stream, by RST_STREAM with REFUSED_STREAM or by a GOAWAY that
//     does not include it. gRPC retries that transparently, whatever the policy: RecvMsg (or
//     Header, SendMsg, CloseSend) calls clientStream.retryLocked, and that replayBufferLocked.
//  2. The connection is lost after the first operation of the replay, which creates the new
//     stream, and before one of the next, which send the messages again.
//
// Then csAttempt.sendMsg returns io.EOF, by which it means "ask RecvMsg for the status". In
// withRetry that is what happens. But in a replay it becomes the lastErr of retryLocked;
// csAttempt.shouldRetry returns it as it is, because only a first attempt is retried
// transparently; and so it becomes what RecvMsg returns, which says: OK, there are no more messages.
// OnFinish gets nil. In Header it ends the call, with nil for OnFinish.
//
// The library binds every stream that it can replay itself, so that gRPC retries none transparently, and takes the
// end of a unary call with neither headers nor trailer for the lost connection that it is.
//
// All of it is as in grpc-go 1.85.0.

// A refusal is a server that speaks just enough HTTP/2: it refuses the first stream, loses the
// connection of the second, and responds to all others.
type refusal struct {
	refusing
	listener *bufconn.Listener

	mu      sync.Mutex
	streams int        // guarded by mu; that the server has seen
	lost    bool       // guarded by mu; the connection was, and the server is now as it should be
	conns   []net.Conn // guarded by mu
	group   sync.WaitGroup
}

// What a refusal does.
type refusing struct {
	window   uint32 // of a stream when it is replayed
	awaited  int    // messages of the first stream before it is refused
	lose     bool   // the connection is lost as soon as the replay has a stream
	messages int    // in a response
}

func (r *refusal) serve(t *testing.T) {
	r.listener = bufconn.Listen(1 << 20)
	r.group.Go(func() {
		for {
			conn, err := r.listener.Accept()
			if err != nil {
				return
			}
			r.mu.Lock()
			r.conns = append(r.conns, conn)
			r.mu.Unlock()
			r.group.Go(func() {
				defer conn.Close()
				if err := r.speak(conn); err != nil && !errors.Is(err, io.EOF) && !errors.Is(err, io.ErrClosedPipe) {
					t.Errorf("the server: %v", err)
				}
			})
		}
	})
	t.Cleanup(func() {
		r.listener.Close()
		r.mu.Lock()
		for _, conn := range r.conns {
			conn.Close()
		}
		r.mu.Unlock()
		r.group.Wait()
	})
}

// The frames of HTTP/2 that the server knows.
const (
	frameData         = 0x0
	frameHeaders      = 0x1
	frameRSTStream    = 0x3
	frameSettings     = 0x4
	framePing         = 0x6
	frameWindowUpdate = 0x8

	flagAck        = 0x1
	flagEndStream  = 0x1
	flagEndHeaders = 0x4

	refusedStream = 0x7
)

func writeFrame(w io.Writer, kind, flags byte, stream uint32, payload []byte) error {
	head := binary.BigEndian.AppendUint32(nil, uint32(len(payload))<<8|uint32(kind))
	head = append(head, flags)
	head = binary.BigEndian.AppendUint32(head, stream)
	_, err := w.Write(append(head, payload...))
	return err
}

func uint32s(values ...uint32) (b []byte) {
	for _, v := range values {
		b = binary.BigEndian.AppendUint32(b, v)
	}
	return b
}

// initialWindow is a setting.
func initialWindow(size uint32) []byte { return append([]byte{0, 4}, uint32s(size)...) }

func (r *refusal) speak(conn net.Conn) error {
	if _, err := io.ReadFull(conn, make([]byte, len("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"))); err != nil {
		return err
	}
	r.mu.Lock()
	first := r.streams == 0
	r.mu.Unlock()
	window := r.window
	if first {
		window = 1 << 20
	}
	writeFrame(conn, frameSettings, 0, 0, initialWindow(window))
	writeFrame(conn, frameWindowUpdate, 0, 0, uint32s(1<<20))
	var number int              // 1 for a stream to refuse, 2 for one to lose, 3 for one to respond to
	received := &bytes.Buffer{} // of the latest stream
	for {
		head := make([]byte, 9)
		if _, err := io.ReadFull(conn, head); err != nil {
			return err
		}
		length := binary.BigEndian.Uint32(head) >> 8
		kind, flags, stream := head[3], head[4], binary.BigEndian.Uint32(head[5:])
		payload := make([]byte, length)
		if _, err := io.ReadFull(conn, payload); err != nil {
			return err
		}
		switch {
		case kind == frameSettings && flags&flagAck == 0:
			writeFrame(conn, frameSettings, flagAck, 0, nil)
		case kind == framePing && flags&flagAck == 0:
			writeFrame(conn, framePing, flagAck, 0, payload)
		case kind == frameHeaders:
			r.mu.Lock()
			r.streams++
			number = min(r.streams, 2)
			if r.lost {
				number = 3
			}
			r.lost = r.lost || number == 2 && r.lose
			r.mu.Unlock()
			received.Reset()
			if number == 2 && r.lose {
				return nil
			}
			if number == 3 {
				writeFrame(conn, frameSettings, 0, 0, initialWindow(1<<20))
			}
		case kind == frameData:
			received.Write(payload)
			count := 0
			for b := received.Bytes(); len(b) >= 5 && len(b)-5 >= int(binary.BigEndian.Uint32(b[1:])); count++ {
				b = b[5+binary.BigEndian.Uint32(b[1:]):]
			}
			switch {
			case number == 1 && count == r.awaited:
				writeFrame(conn, frameSettings, 0, 0, initialWindow(r.window))
				writeFrame(conn, frameRSTStream, 0, stream, uint32s(refusedStream))
			case number == 3 && flags&flagEndStream != 0:
				r.respond(conn, stream)
			}
		}
	}
}

func (r *refusal) respond(conn net.Conn, stream uint32) {
	writeHeaders(conn, stream)
	writeMessages(conn, stream, r.messages)
	writeFrame(conn, frameHeaders, flagEndHeaders|flagEndStream, stream, field("grpc-status", "0"))
}

// field is a header field as HPACK has it: literal, not indexed, not compressed.
func field(name, value string) []byte {
	return append(append([]byte{0, byte(len(name))}, name...), append([]byte{byte(len(value))}, value...)...)
}

// responseFields begin every response: the HTTP status 200 and the content-type.
func responseFields() []byte {
	return append([]byte{0x88}, field("content-type", "application/grpc")...)
}

func writeHeaders(conn net.Conn, stream uint32) {
	writeFrame(conn, frameHeaders, flagEndHeaders, stream, responseFields())
}

func writeMessages(conn net.Conn, stream uint32, n int) {
	for i := range n {
		m, _ := proto.Marshal(&echov1.EchoResponse{Message: fmt.Sprint("response ", i)})
		writeFrame(conn, frameData, 0, stream, append(append([]byte{0}, uint32s(uint32(len(m)))...), m...))
	}
}

// A loss is a stats.Handler that loses the connection when the second stream has been created, and before its
// message is sent: gRPC reports OutHeader just between.
type loss struct {
	lose  func()
	begun atomic.Int32 // attempts, by gRPC or by the library
}

type attemptNumber struct{}

func (l *loss) TagRPC(ctx context.Context, _ *stats.RPCTagInfo) context.Context {
	return context.WithValue(ctx, attemptNumber{}, new(int32))
}

func (l *loss) HandleRPC(ctx context.Context, s stats.RPCStats) {
	number := ctx.Value(attemptNumber{}).(*int32)
	switch s.(type) {
	case *stats.Begin:
		*number = l.begun.Add(1)
	case *stats.OutHeader:
		if *number == 2 {
			l.lose()
		}
	}
}

func (l *loss) TagConn(ctx context.Context, _ *stats.ConnTagInfo) context.Context { return ctx }

func (l *loss) HandleConn(context.Context, stats.ConnStats) {}

// A falseEOF is a case of it.
type falseEOF struct {
	name   string
	server refusing
	kind   *grpc.StreamDesc // nil for a unary call
	sent   []int            // sizes of the messages
	closes bool             // the client's side closes the connection, if the server does not
	by     string           // the method that finds out, if not RecvMsg
}

var (
	falseServerStream = &grpc.StreamDesc{StreamName: "Expand", ServerStreams: true}
	falseClientStream = &grpc.StreamDesc{StreamName: "Collect", ClientStreams: true}
)

// Messages of a client stream that need more than the write quota of 64 KiB, so that a replay
// waits for a window that never opens.
var overQuota = []int{60 << 10, 60 << 10, 60 << 10}

var falseEOFs = []falseEOF{
	{"client stream", refusing{awaited: 3, lose: true, messages: 1}, falseClientStream, overQuota, false, ""},
	{"server stream", refusing{awaited: 1, window: 1 << 20, messages: 2}, falseServerStream, []int{1}, true, ""},
	{"server stream, by Header", refusing{awaited: 1, window: 1 << 20, messages: 2}, falseServerStream, []int{1}, true, "Header"},
	{"unary", refusing{awaited: 1, window: 1 << 20, messages: 1}, nil, []int{1}, true, ""},
}

// A falseEnd is what the application sees.
type falseEnd struct {
	messages int
	err      error
	finished []error
}

// play makes the call on a ClientConn with the options given.
func (f *falseEOF) play(t *testing.T, opts ...grpc.DialOption) (end falseEnd) {
	server := &refusal{refusing: f.server}
	server.serve(t)
	var latest net.Conn
	l := &loss{lose: func() {
		if f.server.lose {
			return
		}
		server.mu.Lock()
		server.lost = true
		server.mu.Unlock()
		latest.Close()
		time.Sleep(time.Second) // until the transport has noticed
	}}
	cc, err := grpc.NewClient("passthrough:///refusal", append(opts,
		grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithStatsHandler(l),
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) {
			conn, err := server.listener.DialContext(ctx)
			latest = conn
			return conn, err
		}))...)
	if err != nil {
		t.Fatal(err)
	}
	defer cc.Close()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	finish := grpc.OnFinish(func(err error) { end.finished = append(end.finished, err) })
	if f.kind == nil {
		end.err = cc.Invoke(ctx, "/false/Unary", &echov1.EchoRequest{Message: "a"}, new(echov1.EchoResponse), finish)
		if end.err == nil {
			end.messages++
		}
		return end
	}
	stream, err := cc.NewStream(ctx, f.kind, "/false/Stream", finish)
	if err != nil {
		t.Fatal(err)
	}
	for _, size := range f.sent {
		if err := stream.SendMsg(&echov1.EchoRequest{Payload: make([]byte, size)}); err != nil {
			t.Errorf("SendMsg: %v", err)
		}
	}
	time.Sleep(time.Second) // the stream is refused
	if f.by == "Header" {
		if md, err := stream.Header(); len(md) > 0 && f.server.messages == 0 || err != nil {
			t.Errorf("Header = %v, %v", md, err)
		}
	}
	if err := stream.CloseSend(); err != nil {
		t.Errorf("CloseSend: %v", err)
	}
	for end.err == nil && end.messages < 10 {
		if end.err = stream.RecvMsg(new(echov1.EchoResponse)); end.err == nil {
			end.messages++
			if !f.kind.ServerStreams {
				end.err = io.EOF
			}
		}
	}
	return end
}

// TestFalseEOFOfGRPC shows what plain gRPC does. When a version of it no longer does, this test
// fails, and what the library does about it can go.
func TestFalseEOFOfGRPC(t *testing.T) {
	var minor int
	if n, err := fmt.Sscanf(grpc.Version, "1.%d", &minor); n != 1 || err != nil {
		t.Fatalf("grpc-go is %s: %v", grpc.Version, err)
	}
	if minor < 84 {
		t.Skip("1.82 and older report the lost connection") // 1.84 does not
	}
	for _, f := range falseEOFs {
		t.Run(f.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				end := f.play(t)
				switch {
				case f.by == "Header":
					if status.Code(end.err) != codes.Unavailable || len(end.finished) != 1 || end.finished[0] != nil {
						t.Errorf("plain gRPC: %v; OnFinish %v; want UNAVAILABLE, and OnFinish with nil", end.err, end.finished)
					}
				case end.err != io.EOF || end.messages != 0 || len(end.finished) != 1 || end.finished[0] != nil:
					t.Errorf("plain gRPC: %d messages, then %v; OnFinish %v; want 0, EOF, and OnFinish with nil", end.messages,
						end.err, end.finished)
				}
			})
		})
	}
}

// afterTheClose has retries wait until gRPC has closed the connection. Until then gRPC tries it again and
// again without a pause, and in a bubble no time passes meanwhile.
var afterTheClose = grpcretry.WithBackoff(grpcretry.Constant(2 * time.Second))

// TestFalseEOFIsAFailure: the library treats it as the lost connection that it is, and retries.
func TestFalseEOFIsAFailure(t *testing.T) {
	for _, f := range falseEOFs {
		t.Run(f.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				end := f.play(t, grpcretry.DialOptions(afterTheClose)...)
				wantErr := io.EOF
				if f.kind == nil {
					wantErr = nil
				}
				if end.err != wantErr || end.messages != f.server.messages || len(end.finished) != 1 || end.finished[0] != nil {
					t.Errorf("%d messages, then %v; OnFinish %v; want the %d of the second attempt, and OnFinish with nil",
						end.messages, end.err, end.finished, f.server.messages)
				}
				end = f.play(t, grpcretry.DialOptions(grpcretry.WithBackoff(grpcretry.Constant(time.Hour)))...)
				if code := status.Code(end.err); code != codes.Unavailable || end.messages != 0 || len(end.finished) != 1 ||
					status.Code(end.finished[0]) != code {
					t.Errorf("without time for a retry: %d messages, then %v; OnFinish %v; want UNAVAILABLE", end.messages,
						end.err, end.finished)
				}
			})
		})
	}
}
