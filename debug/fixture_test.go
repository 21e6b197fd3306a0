package debug

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/grpcretry/grpcretry"
	"github.com/grpcretry/grpcretry/grpcretrytest"
	"github.com/grpcretry/grpcretry/internal/goroutines"
	echov1 "github.com/grpcretry/grpcretry/proto/echo/v1"
)

// This file has the gRPC server that the tests call, in memory and in virtual time.
// What it answers is in the message: a word for each attempt, the last one for all further
// attempts. Time passes only where somebody waits, so every number is exact.

func TestMain(m *testing.M) { goroutines.Main(m) }

// answers that the words of a message stand for; "after=3s" comes before another.
var scripted = map[string]func(context.Context) error{
	"ok":   func(context.Context) error { return nil },
	"down": func(context.Context) error { return status.Error(codes.Unavailable, "db-down") },
	"gone": func(context.Context) error { return status.Error(codes.NotFound, "no such cart") },
	"full": func(ctx context.Context) error {
		_ = grpcretry.SetPushback(ctx, 7*time.Second)
		return status.Error(codes.ResourceExhausted, "queue is full")
	},
	"never": func(ctx context.Context) error {
		_ = grpcretry.SetNoRetry(ctx)
		return status.Error(codes.Unavailable, "shutting down")
	},
	"hang": func(ctx context.Context) error {
		<-ctx.Done()
		return status.FromContextError(ctx.Err()).Err()
	},
	"evil": func(context.Context) error {
		return status.Error(codes.Unavailable, "<script>alert('status')</script>\r\n\u202egnihton\x00")
	},
}

type server struct {
	echov1.UnimplementedEchoServiceServer
}

func (server) Echo(ctx context.Context, req *echov1.EchoRequest) (*echov1.EchoResponse, error) {
	return &echov1.EchoResponse{}, answerTo(ctx, req.GetMessage())
}

func (s server) Put(ctx context.Context, req *echov1.EchoRequest) (*echov1.EchoResponse, error) {
	return s.Echo(ctx, req)
}

// Expand sends a message, then what it is told.
func (server) Expand(req *echov1.EchoRequest, stream grpc.ServerStreamingServer[echov1.EchoResponse]) error {
	if err := stream.Send(&echov1.EchoResponse{}); err != nil {
		return err
	}
	return answerTo(stream.Context(), req.GetMessage())
}

// Chat goes on until the client leaves.
func (server) Chat(stream grpc.BidiStreamingServer[echov1.EchoRequest, echov1.EchoResponse]) error {
	<-stream.Context().Done()
	return nil
}

func answerTo(ctx context.Context, message string) error {
	words := strings.Fields(message)
	word := words[min(grpcretry.PreviousAttempts(ctx), len(words)-1)]
	if wait, rest, ok := strings.Cut(word, ":"); ok {
		d, err := time.ParseDuration(wait)
		if err != nil {
			return status.Error(codes.Internal, err.Error())
		}
		if d > 0 {
			select {
			case <-time.After(d):
			case <-ctx.Done():
			}
		}
		word = rest
	}
	return scripted[word](ctx)
}

// A client calls the server.
type client struct {
	t *testing.T
	echov1.EchoServiceClient
	*grpc.ClientConn
}

// dial starts a server, and dials it as target.
func dial(t *testing.T, r *grpcretry.Retrier, target string) *client {
	t.Helper()
	return dialFrom(t, r, target, "")
}

// dialFrom has the server at an address.
func dialFrom(t *testing.T, r *grpcretry.Retrier, target, address string) *client {
	t.Helper()
	return dialWhen(t, r, target, address, func() bool { return true })
}

// dialLater has no server until it has been away for that long. gRPC connects again after 1 s,
// 1.6 s, 2.56 s, …, without jitter.
func dialLater(t *testing.T, r *grpcretry.Retrier, away time.Duration) *client {
	t.Helper()
	start := time.Now()
	return dialWhen(t, r, "passthrough:///echo", "10.0.0.7:443",
		func() bool { return time.Since(start) >= away },
		grpc.WithConnectParams(grpc.ConnectParams{Backoff: backoff.Config{BaseDelay: time.Second, Multiplier: 1.6, MaxDelay: time.Minute}}))
}

// dialWhen lets the client connect while up says so.
func dialWhen(t *testing.T, r *grpcretry.Retrier, target, address string, up func() bool, more ...grpc.DialOption) *client {
	t.Helper()
	s := grpcretrytest.NewServer(t, func(s grpc.ServiceRegistrar) { echov1.RegisterEchoServiceServer(s, server{}) })
	dialer := grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) {
		if !up() {
			return nil, errors.New("nobody listens")
		}
		conn, err := s.DialContext(ctx)
		if err == nil && address != "" {
			conn = addressed{conn, address}
		}
		return conn, err
	})
	cc, err := grpc.NewClient(target, slices.Concat(s.DialOptions(), r.DialOptions(), []grpc.DialOption{dialer}, more)...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { cc.Close() })
	return &client{t, echov1.NewEchoServiceClient(cc), cc}
}

// addressed is a connection to where it says.
type addressed struct {
	net.Conn
	address string
}

func (a addressed) RemoteAddr() net.Addr { return a }
func (a addressed) Network() string      { return "tcp" }
func (a addressed) String() string       { return a.address }

// echo makes a call that is answered as the message says, and returns its code.
func (c *client) echo(message string, opts ...grpc.CallOption) codes.Code {
	return c.echoWithin(time.Hour, message, opts...)
}

func (c *client) echoWithin(timeout time.Duration, message string, opts ...grpc.CallOption) codes.Code {
	c.t.Helper()
	ctx, cancel := context.WithTimeout(c.t.Context(), timeout)
	defer cancel()
	_, err := c.Echo(ctx, &echov1.EchoRequest{Message: message}, opts...)
	return status.Code(err)
}

// expand opens a stream, and reads it to its end.
func (c *client) expand(message string) error {
	c.t.Helper()
	stream, err := c.Expand(c.t.Context(), &echov1.EchoRequest{Message: message})
	for err == nil {
		_, err = stream.Recv()
	}
	return err
}

const echoMethod = "/grpcretry.test.v1.EchoService/Echo"

// steady waits 1 s, 2 s, 4 s, … after every code.
var steady = grpcretry.WithBackoff(grpcretry.Exponential{Base: time.Second, Max: time.Hour, Jitter: grpcretry.NoJitter})

// unlimited is for tests in which every retry is to happen, because they are not about budgets.
var unlimited = grpcretry.WithBudget(grpcretry.Unlimited)

// retrier makes one with a steady backoff.
func retrier(t testing.TB, opts ...grpcretry.Option) *grpcretry.Retrier {
	t.Helper()
	r, err := grpcretry.New(append([]grpcretry.Option{steady}, opts...)...)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// handler mounts a page for the length of a test.
func handler(t testing.TB, retriers ...*grpcretry.Retrier) *Page {
	t.Helper()
	p := Handler(retriers...)
	t.Cleanup(p.Close)
	return p
}

// bubble runs f in virtual time.
func bubble(t *testing.T, f func(t *testing.T)) {
	t.Helper()
	synctest.Test(t, f)
}

// get asks for the page.
func get(t testing.TB, p *Page, query string) *httptest.ResponseRecorder {
	t.Helper()
	w := httptest.NewRecorder()
	p.ServeHTTP(w, httptest.NewRequest(http.MethodGet, "/debug/grpcretry?"+query, nil))
	if w.Code != http.StatusOK {
		t.Fatalf("GET ?%s = %d %s, want 200", query, w.Code, w.Body)
	}
	return w
}

// getJSON asks for the page as JSON, and holds it against Snapshot.
func getJSON(t testing.TB, p *Page, query string) (s Snapshot) {
	t.Helper()
	body := get(t, p, "format=json&"+query).Body
	decoder := json.NewDecoder(body)
	decoder.DisallowUnknownFields()
	if err := decoder.Decode(&s); err != nil {
		t.Fatalf("GET ?format=json&%s: %v", query, err)
	}
	return s
}

// want compares what was got, as printed.
func want(t testing.TB, what string, got, want any) {
	t.Helper()
	if g, w := fmt.Sprintf("%+v", got), fmt.Sprintf("%+v", want); g != w {
		t.Errorf("%s:\ngot  %s\nwant %s", what, g, w)
	}
}
