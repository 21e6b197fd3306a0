package grpcretry_test

import (
	"context"
	"io"
	"net"
	"strconv"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/grpcretry/grpcretry"
)

// gRPC reports a false end, see false_eof_test.go, also without a second loss: if the server ends the
// replay's stream before the messages have been sent again. For that, too, csAttempt.sendMsg returns
// io.EOF, and so RecvMsg says that all went well, whatever the server's status is, and although
// messages may have arrived. If Header made the replay, OnFinish gets nil, and RecvMsg the truth.

// An early is a response that comes before the request.
type early struct {
	headers  bool // there are headers before the status
	messages int  // between them
	ends     bool
	code     codes.Code
}

func (e early) sends() bool { return e.headers || e.ends }

func (e early) respond(conn net.Conn, stream uint32) {
	end := field("grpc-status", strconv.Itoa(int(e.code)))
	if e.headers {
		writeHeaders(conn, stream)
		writeMessages(conn, stream, e.messages)
	} else {
		end = append(responseFields(), end...)
	}
	if e.ends {
		writeFrame(conn, frameHeaders, flagEndHeaders|flagEndStream, stream, end)
	}
}

// An earlyEnd is a case of it.
type earlyEnd struct {
	name  string
	kind  *grpc.StreamDesc // nil for a unary call
	by    string           // the method that finds out, if not RecvMsg
	early early
	plain error // what plain gRPC reports: that of RecvMsg

	// What the library reports.
	want     codes.Code
	messages int
}

var (
	trailersOnly = func(code codes.Code) early { return early{ends: true, code: code} }
	withHeaders  = func(messages int, code codes.Code) early {
		return early{headers: true, messages: messages, ends: true, code: code}
	}
)

var earlyEnds = []earlyEnd{
	{"a server stream fails", falseServerStream, "", trailersOnly(codes.FailedPrecondition), io.EOF, codes.FailedPrecondition, 0},
	{"a server stream may be retried", falseServerStream, "", trailersOnly(codes.Unavailable), io.EOF, codes.OK, 2},
	{"a server stream succeeds", falseServerStream, "", trailersOnly(codes.OK), io.EOF, codes.OK, 0},
	{"a server stream fails after headers", falseServerStream, "", withHeaders(0, codes.FailedPrecondition), io.EOF,
		codes.FailedPrecondition, 0},
	{"a server stream succeeds after headers", falseServerStream, "", withHeaders(0, codes.OK), io.EOF, codes.OK, 0},
	{"a server stream fails after a message", falseServerStream, "", withHeaders(1, codes.FailedPrecondition), io.EOF,
		codes.FailedPrecondition, 1},
	{"a server stream succeeds after a message", falseServerStream, "", withHeaders(1, codes.OK), io.EOF, codes.OK, 1},
	{"a client stream fails", falseClientStream, "", trailersOnly(codes.FailedPrecondition), io.EOF, codes.FailedPrecondition, 0},
	{"a client stream fails after headers", falseClientStream, "", withHeaders(0, codes.FailedPrecondition), io.EOF,
		codes.FailedPrecondition, 0},
	{"a client stream ends without a response", falseClientStream, "", trailersOnly(codes.OK), io.EOF, codes.Internal, 0},
	{"a client stream succeeds", falseClientStream, "", withHeaders(1, codes.OK), io.EOF, codes.OK, 1},
	{"a unary call", nil, "", trailersOnly(codes.Unavailable), io.EOF, codes.OK, 1},
	{"a unary call, after headers", nil, "", withHeaders(0, codes.Unavailable), io.EOF, codes.OK, 1},
	{"Header, and the stream fails", falseServerStream, "Header", trailersOnly(codes.FailedPrecondition),
		status.Error(codes.FailedPrecondition, ""), codes.FailedPrecondition, 0},
	{"Header, and the stream may be retried", falseServerStream, "Header", trailersOnly(codes.Unavailable),
		status.Error(codes.Unavailable, ""), codes.OK, 2},
	{"Header, and the stream succeeds", falseServerStream, "Header", trailersOnly(codes.OK), io.EOF, codes.OK, 0},
	{"Header, and the stream fails after headers", falseServerStream, "Header", withHeaders(0, codes.FailedPrecondition),
		status.Error(codes.FailedPrecondition, ""), codes.FailedPrecondition, 0},
	{"Header, and a client stream ends without a response", falseClientStream, "Header", trailersOnly(codes.OK),
		status.Error(codes.Internal, ""), codes.Internal, 0},
	{"SendMsg, and a client stream ends without a response", falseClientStream, "SendMsg", trailersOnly(codes.OK),
		status.Error(codes.Internal, ""), codes.Internal, 0},
}

func (e *earlyEnd) falseEOF() *falseEOF {
	f := &falseEOF{name: e.name, kind: e.kind, sent: []int{1}, by: e.by}
	f.server = refusing{awaited: 1, window: 1 << 20, messages: 2, early: e.early}
	if e.kind != falseServerStream {
		f.server.messages = 1
	}
	return f
}

// TestEarlyEnd: nothing of it happens beneath the library, which repeats the refused attempt itself. It reports
// what the server has sent, and OnFinish gets the same as the application.
func TestEarlyEnd(t *testing.T) {
	hedged := grpcretry.WithPolicy(grpcretry.Policy{MaxAttempts: 2, Hedging: &grpcretry.Hedging{Delay: grpcretry.HedgeAfter(time.Hour)}})
	for _, e := range earlyEnds {
		for _, with := range []struct {
			name string
			opts []grpcretry.Option
		}{
			{"plain", nil},
			{"hedged", []grpcretry.Option{grpcretry.WithMethod("/false/", hedged)}},
			{"observed", []grpcretry.Option{grpcretry.WithObserver(func(context.Context, grpcretry.Event) {})}},
		} {
			t.Run(e.name+"/"+with.name, func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					f := e.falseEOF()
					end := f.play(t, f.kind != nil, grpcretry.DialOptions(append(with.opts, afterTheClose)...)...)
					end.check(t, e.want, e.messages)
				})
			})
		}
	}
}

// TestARefusedStreamThatIsCommitted: if the buffer is full, nothing is repeated.
func TestARefusedStreamThatIsCommitted(t *testing.T) {
	for _, e := range earlyEnds {
		if e.kind != falseServerStream {
			continue
		}
		e.kind = &grpc.StreamDesc{ServerStreams: true, ClientStreams: true}
		t.Run(e.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				end := e.falseEOF().play(t, true, grpcretry.DialOptions(grpcretry.WithBufferLimit(1),
					grpcretry.WithMaxAttempts(2), grpcretry.WithBackoff(grpcretry.Constant(time.Hour)))...)
				end.check(t, codes.Unavailable, 0)
			})
		})
	}
}

// check checks the outcome of a call in which nothing may contradict anything.
func (end *falseEnd) check(t *testing.T, want codes.Code, messages int) {
	t.Helper()
	if end.err == io.EOF {
		end.err = nil
	}
	if status.Code(end.err) != want || end.messages != messages {
		t.Errorf("%d messages, then %v; want %d, and %v", end.messages, end.err, messages, want)
	}
	if len(end.finished) != 1 || status.Code(end.finished[0]) != want {
		t.Errorf("OnFinish got %v; want %v", end.finished, want)
	}
	if end.again != nil && (want == codes.OK) != (end.again == io.EOF) {
		t.Errorf("RecvMsg, once more: %v", end.again)
	}
}

// TestEarlyEndOfGRPC shows what plain gRPC does, as TestFalseEOFOfGRPC.
func TestEarlyEndOfGRPC(t *testing.T) {
	for _, e := range earlyEnds {
		t.Run(e.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				end := e.falseEOF().play(t, false)
				if end.messages != 0 || status.Code(end.err) != status.Code(e.plain) || (end.err == io.EOF) != (e.plain == io.EOF) {
					t.Errorf("plain gRPC: %d messages, then %v; want 0, and %v", end.messages, end.err, e.plain)
				}
				if wantNil := e.by != "SendMsg"; len(end.finished) != 1 || (end.finished[0] == nil) != wantNil {
					t.Errorf("plain gRPC: OnFinish got %v; want nil: %v", end.finished, wantNil)
				}
			})
		})
	}
}
