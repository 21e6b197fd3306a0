package bench

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/connectivity"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/grpc/test/bufconn"

	"github.com/grpcretry/grpcretry"
	echov1 "github.com/grpcretry/grpcretry/proto/echo/v1"
)

// A server is the same for all. A request says by its sequence how often it is to fail
// first, so that one server is enough.
type server struct {
	echov1.UnimplementedEchoServiceServer
	failure error // what attempts fail with

	attempts atomic.Int64 // of Echo
	turn     atomic.Int64 // of attempts that ask for failures
	messages atomic.Int64 // received from streams
}

func newServer() *server {
	return &server{failure: status.Error(codes.Unavailable, "down for maintenance")}
}

const failAlways = -1

// Echo answers. With a sequence k above 0 it fails k attempts, answers one, fails k: exact
// for calls one after the other. With failAlways it fails.
func (s *server) Echo(_ context.Context, req *echov1.EchoRequest) (*echov1.EchoResponse, error) {
	s.attempts.Add(1)
	failures := req.GetSequence()
	if failures == failAlways || failures > 0 && s.turn.Add(1)%(failures+1) != 0 {
		return nil, s.failure
	}
	return &echov1.EchoResponse{Message: req.GetMessage(), Payload: req.GetPayload()}, nil
}

// Append tells how many attempts of Echo the server has seen, Put how many messages of
// streams.
func (s *server) Append(context.Context, *echov1.EchoRequest) (*echov1.EchoResponse, error) {
	return &echov1.EchoResponse{Sequence: s.attempts.Load()}, nil
}

// Put is explained at Append.
func (s *server) Put(context.Context, *echov1.EchoRequest) (*echov1.EchoResponse, error) {
	return &echov1.EchoResponse{Sequence: s.messages.Load()}, nil
}

// Expand sends as many messages as the sequence says.
func (s *server) Expand(req *echov1.EchoRequest, stream grpc.ServerStreamingServer[echov1.EchoResponse]) error {
	m := &echov1.EchoResponse{Message: req.GetMessage(), Payload: req.GetPayload()}
	for range req.GetSequence() {
		if err := stream.Send(m); err != nil {
			return err
		}
	}
	return nil
}

// Collect answers the end of the messages.
func (s *server) Collect(stream grpc.ClientStreamingServer[echov1.EchoRequest, echov1.EchoResponse]) error {
	for {
		if _, err := stream.Recv(); errors.Is(err, io.EOF) {
			return stream.SendAndClose(&echov1.EchoResponse{})
		} else if err != nil {
			return err
		}
		s.messages.Add(1)
	}
}

// Chat answers each message; those with failAlways it only takes.
func (s *server) Chat(stream grpc.BidiStreamingServer[echov1.EchoRequest, echov1.EchoResponse]) error {
	for {
		req, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		s.messages.Add(1)
		if req.GetSequence() == failAlways {
			continue
		}
		if err := stream.Send(&echov1.EchoResponse{Message: req.GetMessage(), Payload: req.GetPayload()}); err != nil {
			return err
		}
	}
}

// payload is what every request and every answer carries.
var payload = []byte(strings.Repeat("0123456789abcdef", 8))

func request(sequence int64) *echov1.EchoRequest {
	return &echov1.EchoRequest{Message: "hello", Payload: payload, Sequence: sequence}
}

// A network is how a client reaches a server. Both networks connect before they return.
type network struct {
	name string
	dial func(testing.TB, ...grpc.DialOption) *grpc.ClientConn
}

var (
	inMemory = network{"bufconn", dialBufconn}
	tcp      = network{"tcp", dialTCP}
)

// dialBufconn connects to a server of its own in this process.
func dialBufconn(tb testing.TB, opts ...grpc.DialOption) *grpc.ClientConn {
	return dialServer(tb, newServer(), opts...)
}

func dialServer(tb testing.TB, s echov1.EchoServiceServer, opts ...grpc.DialOption) *grpc.ClientConn {
	tb.Helper()
	return connect(tb, "passthrough:///echo", append(opts, serve(tb, s))...)
}

// serve starts a server and returns the option that connects to it.
func serve(tb testing.TB, s echov1.EchoServiceServer) grpc.DialOption {
	tb.Helper()
	listener := bufconn.Listen(1 << 20)
	g := grpc.NewServer()
	echov1.RegisterEchoServiceServer(g, s)
	served := make(chan struct{})
	go func() {
		defer close(served)
		_ = g.Serve(listener) // ends with Stop
	}()
	tb.Cleanup(func() { g.Stop(); <-served })
	return grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) { return listener.DialContext(ctx) })
}

// dialTCP connects over loopback to the server process, which all share.
func dialTCP(tb testing.TB, opts ...grpc.DialOption) *grpc.ClientConn {
	tb.Helper()
	address, err := serverProcess()
	if err != nil {
		tb.Fatal(err)
	}
	return connect(tb, "passthrough:///"+address, opts...)
}

func connect(tb testing.TB, target string, opts ...grpc.DialOption) *grpc.ClientConn {
	tb.Helper()
	cc, err := grpc.NewClient(target, append(opts, grpc.WithTransportCredentials(insecure.NewCredentials()))...)
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() { cc.Close() })
	cc.Connect()
	for state := cc.GetState(); state != connectivity.Ready; state = cc.GetState() {
		if !cc.WaitForStateChange(tb.Context(), state) {
			tb.Fatalf("not connected to %s: %v", target, state)
		}
	}
	return cc
}

// The server process is this test binary, started a second time and told so by the
// environment. It ends with its standard input, so also if this process is killed.

const serverVariable = "GRPCRETRY_BENCH_SERVER"

var serverProcess = sync.OnceValues(func() (address string, err error) {
	self, err := os.Executable()
	if err != nil {
		return "", err
	}
	cmd := exec.Command(self)
	cmd.Env = append(os.Environ(), serverVariable+"=1")
	cmd.Stderr = os.Stderr
	if stopServer, err = cmd.StdinPipe(); err != nil {
		return "", err
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		return "", err
	}
	if err := cmd.Start(); err != nil {
		return "", err
	}
	line, err := bufio.NewReader(out).ReadString('\n')
	if err != nil {
		return "", fmt.Errorf("the server process told no address: %w", err)
	}
	return strings.TrimSpace(line), nil
})

var stopServer io.Closer

// serveProcess is what the server process does.
func serveProcess() error {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	fmt.Println(listener.Addr())
	g := grpc.NewServer()
	echov1.RegisterEchoServiceServer(g, newServer())
	go func() {
		_, _ = io.Copy(io.Discard, os.Stdin)
		g.Stop()
	}()
	return g.Serve(listener)
}

// BenchmarkServerInterceptor is what our interceptor adds to a request at a server: the interceptor alone, for a handler
// that does nothing.
func BenchmarkServerInterceptor(b *testing.B) {
	intercept := grpcretry.UnaryServerInterceptor()
	ctx := metadata.NewIncomingContext(b.Context(), metadata.Pairs("user-agent", "grpc-go"))
	info := &grpc.UnaryServerInfo{FullMethod: echov1.EchoService_Echo_FullMethodName}
	handle := func(context.Context, any) (any, error) { return nil, nil }
	inTurns(b, []contender{
		{"client=bare", serial(b, func() func() error {
			return func() error { return second(handle(ctx, nil)) }
		})},
		{"client=grpcretry", serial(b, func() func() error {
			return func() error { return second(intercept(ctx, nil, info, handle)) }
		})},
	}, perOperation)
}

func TestMain(m *testing.M) {
	if os.Getenv(serverVariable) != "" {
		if err := serveProcess(); err != nil {
			fmt.Fprintln(os.Stderr, "server:", err)
			os.Exit(1)
		}
		return
	}
	code := m.Run()
	if stopServer != nil {
		stopServer.Close()
	}
	os.Exit(code)
}

// callContext is what a caller has: a deadline. Each goroutine has one of its own.
func callContext(tb testing.TB) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), time.Hour)
	tb.Cleanup(cancel)
	return ctx
}
