package grpcretrytest_test

import (
	"context"
	"fmt"
	"io"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	"github.com/grpcretry/grpcretry"
	. "github.com/grpcretry/grpcretry/grpcretrytest"
	echov1 "github.com/grpcretry/grpcretry/proto/echo/v1"
)

type echo struct {
	echov1.UnimplementedEchoServiceServer
}

func (echo) Echo(_ context.Context, req *echov1.EchoRequest) (*echov1.EchoResponse, error) {
	return &echov1.EchoResponse{Message: req.GetMessage()}, nil
}

func (echo) Append(ctx context.Context, req *echov1.EchoRequest) (*echov1.EchoResponse, error) {
	return echo{}.Echo(ctx, req)
}

// Expand responds with three messages.
func (echo) Expand(req *echov1.EchoRequest, stream grpc.ServerStreamingServer[echov1.EchoResponse]) error {
	for i := range 3 {
		if err := stream.Send(&echov1.EchoResponse{Message: fmt.Sprint(req.GetMessage(), " ", i+1)}); err != nil {
			return err
		}
	}
	return nil
}

// Collect responds with the messages that it has received.
func (echo) Collect(stream grpc.ClientStreamingServer[echov1.EchoRequest, echov1.EchoResponse]) error {
	var all []string
	for {
		req, err := stream.Recv()
		if err == io.EOF {
			return stream.SendAndClose(&echov1.EchoResponse{Message: strings.Join(all, " ")})
		}
		if err != nil {
			return err
		}
		all = append(all, req.GetMessage())
	}
}

// Chat sends each message back.
func (echo) Chat(stream grpc.BidiStreamingServer[echov1.EchoRequest, echov1.EchoResponse]) error {
	for {
		req, err := stream.Recv()
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return err
		}
		if err := stream.Send(&echov1.EchoResponse{Message: req.GetMessage()}); err != nil {
			return err
		}
	}
}

const echoMethod = "/grpcretry.test.v1.EchoService/Echo"

func register(s grpc.ServiceRegistrar) { echov1.RegisterEchoServiceServer(s, echo{}) }

func clientOf(cc grpc.ClientConnInterface) echov1.EchoServiceClient {
	return echov1.NewEchoServiceClient(cc)
}

func hello() *echov1.EchoRequest { return &echov1.EchoRequest{Message: "hello"} }

var generous = grpcretry.WithBudget(grpcretry.Unlimited)

func TestSteps(t *testing.T) {
	unavailable := Fail(codes.Unavailable, "db-down")
	for _, tt := range []struct {
		name  string
		steps []Step
		want  string
	}{
		{"no step", nil, "0s attempt 1 OK"},
		{"a failure", []Step{unavailable}, "0s attempt 1 UNAVAILABLE; wait 75ms backoff; 75ms attempt 2 OK"},
		{"another code", []Step{Fail(codes.NotFound, "no such thing")}, "0s attempt 1 NOT_FOUND; 0s stop not_retryable"},
		{"two attempts", []Step{unavailable.Times(2)}, `
			0s attempt 1 UNAVAILABLE
			wait 75ms backoff
			75ms attempt 2 UNAVAILABLE
			wait 300ms backoff
			375ms attempt 3 OK`},
		{"all attempts", []Step{unavailable.Always()}, `
			0s attempt 1 UNAVAILABLE
			wait 75ms backoff
			75ms attempt 2 UNAVAILABLE
			wait 300ms backoff
			375ms attempt 3 UNAVAILABLE
			wait 1.2s backoff
			1.575s attempt 4 UNAVAILABLE
			1.575s stop exhausted`},
		{"slow", []Step{OK().After(time.Second)}, "0s attempt 1 OK after 1s"},
		{"a slow failure", []Step{unavailable.After(time.Second)},
			"0s attempt 1 UNAVAILABLE after 1s; wait 75ms backoff; 1.075s attempt 2 OK"},
		{"hang", []Step{Hang()}, "0s attempt 1 DEADLINE_EXCEEDED after 1m0s; 1m0s stop deadline_exceeded"},
		{"cut", []Step{Cut().After(time.Second)}, "0s attempt 1 UNAVAILABLE after 1s; wait 75ms backoff; 1.075s attempt 2 OK"},
		{"pushback", []Step{unavailable.Pushback(7 * time.Second)}, "0s attempt 1 UNAVAILABLE; wait 7s pushback; 7s attempt 2 OK"},
		{"no retry", []Step{unavailable.NoRetry()}, "0s attempt 1 UNAVAILABLE; 0s stop pushback"},
		{"malformed pushback", []Step{unavailable.PushbackValue("+5")}, "0s attempt 1 UNAVAILABLE; 0s stop pushback"},
		{"repeated pushback", []Step{unavailable.PushbackValue("5", "5")}, "0s attempt 1 UNAVAILABLE; 0s stop pushback"},
		{"a pushback that is replaced", []Step{unavailable.NoRetry().Pushback(time.Second)},
			"0s attempt 1 UNAVAILABLE; wait 1s pushback; 1s attempt 2 OK"},
		{"RetryInfo", []Step{unavailable.RetryInfo(time.Second)}, "0s attempt 1 UNAVAILABLE; wait 1.1s retry_info; 1.1s attempt 2 OK"},
		{"too long", []Step{unavailable.Pushback(2 * time.Minute)}, "0s attempt 1 UNAVAILABLE; 0s stop deadline instead of wait 2m0s pushback"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				server := NewServer(t, register)
				server.On(echoMethod, tt.steps...)
				ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
				defer cancel()
				clientOf(server.Dial(generous)).Echo(ctx, hello())
				server.Want(tt.want)
			})
		})
	}
}

// A Step is a value: its methods do not change it.
func TestStepsAreValues(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		server := NewServer(t, register)
		unavailable := Fail(codes.Unavailable, "db-down").Trailer("a", "1")
		unavailable.Pushback(time.Second)
		unavailable.Trailer("a", "2")
		server.On(echoMethod, unavailable)
		var trailer metadata.MD
		clientOf(server.Dial(grpcretry.Disable())).Echo(t.Context(), hello(), grpc.Trailer(&trailer))
		if got := trailer["a"]; !slices.Equal(got, []string{"1"}) || len(trailer["grpc-retry-pushback-ms"]) > 0 {
			t.Errorf("the trailer is %v, want a=1 and no pushback", trailer)
		}
	})
}

func TestHeadersAndTrailers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		server := NewServer(t, register)
		server.On(echoMethod, Fail(codes.Unavailable, "db-down").Header("from", "1"), OK().Header("from", "2").Trailer("load", "high"))
		client := clientOf(server.Dial())
		var header, trailer metadata.MD
		if _, err := client.Echo(t.Context(), hello(), grpc.Header(&header), grpc.Trailer(&trailer)); err != nil {
			t.Fatal(err)
		}
		if !slices.Equal(header["from"], []string{"2"}) || !slices.Equal(trailer["load"], []string{"high"}) {
			t.Errorf("header %v and trailer %v, want from=2 and load=high", header, trailer)
		}
	})
}

func TestNextCountsAttemptsOfAllCalls(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		server := NewServer(t, register)
		server.Next("/", Fail(codes.Unavailable, "starting").Times(2))
		server.Next("/", OK(), Fail(codes.ResourceExhausted, "full"))
		server.On(echoMethod, Fail(codes.Aborted, "later"))
		client := clientOf(server.Dial(generous, grpcretry.WithMaxAttempts(2)))
		for range 4 {
			client.Echo(t.Context(), hello())
		}
		server.Want(
			"0s attempt 1 UNAVAILABLE; wait 75ms; attempt 2 UNAVAILABLE; stop exhausted",
			"attempt 1 OK",
			"attempt 1 RESOURCE_EXHAUSTED; wait 500ms; attempt 2 OK",
			"attempt 1 ABORTED; stop not_retryable")
	})
}

func TestTheNarrowestPatternCounts(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		server := NewServer(t, register)
		server.On("/", Fail(codes.Internal, "all"))
		client := clientOf(server.Dial())
		client.Echo(t.Context(), hello())
		server.On("/grpcretry.test.v1.EchoService/", Fail(codes.NotFound, "service"))
		client.Echo(t.Context(), hello())
		server.On(echoMethod, Fail(codes.Aborted, "method"))
		client.Echo(t.Context(), hello())
		server.On(echoMethod)
		client.Echo(t.Context(), hello())
		client.Append(t.Context(), hello())
		for i, outcome := range []string{"INTERNAL", "NOT_FOUND", "ABORTED", "OK", "NOT_FOUND"} {
			if got := strings.Count(server.String(), outcome); got != 1 && outcome != "NOT_FOUND" || got == 0 {
				t.Errorf("%d calls with the outcome of call %d, %s:\n%v", got, i+1, outcome, server.Calls)
			}
		}
	})
}

// expand receives a server stream to its end.
func expand(ctx context.Context, client echov1.EchoServiceClient) (messages []string, err error) {
	stream, err := client.Expand(ctx, hello())
	for err == nil {
		var reply *echov1.EchoResponse
		if reply, err = stream.Recv(); err == nil {
			messages = append(messages, reply.GetMessage())
		}
	}
	return messages, err
}

const expandMethod, collectMethod, chatMethod = "/grpcretry.test.v1.EchoService/Expand",
	"/grpcretry.test.v1.EchoService/Collect", "/grpcretry.test.v1.EchoService/Chat"

func TestStepsAfterSending(t *testing.T) {
	for _, tt := range []struct {
		name string
		step Step
		code codes.Code
		got  int
		want string
	}{
		{"fail", Fail(codes.Aborted, "lost"), codes.Aborted, 2, "0s attempt 1 ABORTED; 0s stop committed"},
		{"cut", Cut(), codes.Unavailable, 2, "0s attempt 1 UNAVAILABLE; 0s stop committed"},
		{"hang", Hang(), codes.DeadlineExceeded, 2, "0s attempt 1 DEADLINE_EXCEEDED after 1m0s; 1m0s stop deadline_exceeded"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				server := NewServer(t, register)
				server.On(expandMethod, tt.step.AfterSending(2))
				ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
				defer cancel()
				got, err := expand(ctx, clientOf(server.Dial()))
				if len(got) != tt.got || status.Code(err) != tt.code {
					t.Errorf("received %q and %v, want %d messages and %v", got, err, tt.got, tt.code)
				}
				server.Want(tt.want)
			})
		})
	}
}

// The headers of a step are sent with the handler's, or before the attempt ends.
func TestHeadersAndMessages(t *testing.T) {
	failed := Fail(codes.Aborted, "lost")
	for name, step := range map[string]Step{
		"fail, sending": failed.AfterSending(1), "cut, sending": Cut().AfterSending(1), "hang, sending": Hang().AfterSending(1),
		"fail, receiving": failed.AfterReceiving(1), "cut, receiving": Cut().AfterReceiving(1), "hang, receiving": Hang().AfterReceiving(1),
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				server := NewServer(t, register)
				server.On(expandMethod, step.Header("step", "1"))
				ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
				defer cancel()
				stream, err := clientOf(server.Dial(grpcretry.Disable())).Expand(ctx, hello())
				if err != nil {
					t.Fatal(err)
				}
				header, err := stream.Header()
				if got := header.Get("step"); err != nil || !slices.Equal(got, []string{"1"}) {
					t.Errorf("the header is %q, %v, want 1", got, err)
				}
				want := codes.Aborted
				if strings.HasPrefix(name, "cut") {
					want = codes.Unavailable
				} else if strings.HasPrefix(name, "hang") {
					want = codes.DeadlineExceeded
				}
				for err == nil {
					_, err = stream.Recv()
				}
				if status.Code(err) != want {
					t.Errorf("the stream has ended with %v, want %v", err, want)
				}
			})
		})
	}
}

func TestAHandlerThatEndsEarlierCounts(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		server := NewServer(t, register)
		server.On(expandMethod, Fail(codes.Aborted, "never").AfterSending(4))
		if got, err := expand(t.Context(), clientOf(server.Dial())); len(got) != 3 || err != io.EOF {
			t.Errorf("received %q and %v, want 3 messages and EOF", got, err)
		}
		server.Want("0s attempt 1 OK")
	})
}

func TestStepsAfterReceiving(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		server := NewServer(t, register)
		server.On(collectMethod, Fail(codes.Unavailable, "draining").AfterReceiving(2))
		stream, err := clientOf(server.Dial()).Collect(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		for range 3 {
			stream.Send(hello())
		}
		if reply, err := stream.CloseAndRecv(); reply.GetMessage() != "hello hello hello" {
			t.Errorf("CloseAndRecv = %v, %v, want three times hello", reply, err)
		}
		server.Want("0s attempt 1 UNAVAILABLE; wait 75ms backoff; 75ms attempt 2 OK")
	})
}

// The handler of a bidirectional stream is in RecvMsg when the script ends its attempt, and sends nothing more.
func TestAChatEndsInTheMiddle(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		server := NewServer(t, register)
		server.On(chatMethod, Fail(codes.Aborted, "lost").AfterReceiving(2))
		stream, err := clientOf(server.Dial()).Chat(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		var received int
		for err == nil {
			stream.Send(hello())
			if _, err = stream.Recv(); err == nil {
				received++
			}
		}
		if received != 1 || status.Code(err) != codes.Aborted {
			t.Errorf("received %d messages and %v, want 1 and ABORTED", received, err)
		}
		server.Want("0s attempt 1 ABORTED; 0s stop committed")
	})
}

func TestDownAndUp(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		server := NewServer(t, register)
		client := clientOf(server.Dial())
		client.Echo(t.Context(), hello())
		server.Want("attempt 1 OK")

		server.Down()
		time.AfterFunc(500*time.Millisecond, server.Up)
		if _, err := client.Echo(t.Context(), hello()); err != nil {
			t.Error(err)
		}
		server.Want("0s attempt 1 UNAVAILABLE unsent; wait 1.075s connect; 1.075s attempt 2 OK")
	})
}

func TestServeTakesAProgramsOwnServer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var seen int
		build := func(opts ...grpc.ServerOption) *grpc.Server {
			s := grpc.NewServer(append(opts, grpc.ChainUnaryInterceptor(func(ctx context.Context, req any, _ *grpc.UnaryServerInfo,
				handler grpc.UnaryHandler) (any, error) {
				seen++
				return handler(ctx, req)
			}))...)
			register(s)
			return s
		}
		server := Serve(t, build)
		server.On(echoMethod, Fail(codes.Unavailable, "db-down"))
		clientOf(server.Dial()).Echo(t.Context(), hello())
		server.Want("0s attempt 1 UNAVAILABLE; wait 75ms backoff; 75ms attempt 2 OK")
		if seen != 1 {
			t.Errorf("the program's interceptor has seen %d attempts, want 1: the script comes first", seen)
		}
	})
}

func TestRecordSeesAConnectionOfTheProgram(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		retrier, err := grpcretry.New()
		if err != nil {
			t.Fatal(err)
		}
		server := NewServer(t, register)
		server.On("/", Fail(codes.Unavailable, "db-down"))
		cc, err := grpc.NewClient(server.Target(), append(server.DialOptions(), retrier.DialOptions()...)...)
		if err != nil {
			t.Fatal(err)
		}
		defer cc.Close()
		calls := Record(t, retrier)
		clientOf(cc).Echo(t.Context(), hello())
		calls.Want("0s attempt 1 UNAVAILABLE; wait 0s..100ms backoff; attempt 2 OK")
		calls.Want()
		server.Want()
	})
}

// Streams that pass straight through are recorded when gRPC reports their end.
func TestCallsThatPassThrough(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		server := NewServer(t, register)
		client := clientOf(server.Dial(grpcretry.Disable()))
		if _, err := expand(t.Context(), client); err != io.EOF {
			t.Error(err)
		}
		client.Echo(t.Context(), hello())
		server.Down()
		expand(t.Context(), client)
		server.Want(expandMethod+"; 0s attempt 1 OK", echoMethod+"; 0s attempt 1 OK",
			expandMethod+"; 0s attempt 1 UNAVAILABLE; 0s stop passed_through")
	})
}

func TestRealTime(t *testing.T) {
	for name, opts := range map[string][]grpc.ServerOption{"in memory": nil, "over TCP": {OverTCP()}} {
		t.Run(name, func(t *testing.T) {
			server := NewServer(t, register, opts...)
			client := clientOf(server.Dial(grpcretry.WithBackoff(grpcretry.Constant(time.Millisecond)), Jitter(0)))
			server.On("/", Fail(codes.Unavailable, "draining").Pushback(2*time.Millisecond), Cut())
			client.Echo(t.Context(), hello())
			server.Want("attempt 1 UNAVAILABLE; wait 2ms pushback; attempt 2 UNAVAILABLE; wait 1ms backoff; attempt 3 OK")

			server.On(expandMethod, Cut().AfterSending(2))
			if got, err := expand(t.Context(), client); len(got) != 2 || status.Code(err) != codes.Unavailable {
				t.Errorf("received %q and %v, want 2 messages and UNAVAILABLE", got, err)
			}
			server.Want("attempt 1 UNAVAILABLE; stop committed")
		})
	}
}

// gRPC connects anew 1s, 2.6s and 5.16s after its first failure, and the Retrier's second backoff of 300ms follows.
func TestARestartTakesTheSameTimeInEveryRun(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		server := NewServer(t, register)
		server.Next("/", OK().After(time.Minute))
		defer time.AfterFunc(500*time.Millisecond, server.Down).Stop()
		defer time.AfterFunc(4*time.Second, server.Up).Stop()
		clientOf(server.Dial()).Echo(t.Context(), hello())
		server.Want(`
			0s attempt 1 UNAVAILABLE after 500ms
			wait 75ms backoff
			575ms attempt 2 UNAVAILABLE unsent
			wait 5.46s connect
			6.035s attempt 3 OK`)
	})
}

func TestATCPServerComesUpAgain(t *testing.T) {
	server := NewServer(t, register, OverTCP())
	cc := server.DialWith(newRetrier(t), grpc.WithConnectParams(grpc.ConnectParams{
		Backoff: backoff.Config{BaseDelay: time.Millisecond, MaxDelay: time.Millisecond}, MinConnectTimeout: time.Minute}))
	client := clientOf(cc)
	client.Echo(t.Context(), hello())
	server.Down()
	client.Echo(t.Context(), hello(), grpcretry.WithPatience(0))
	server.Up()
	client.Echo(t.Context(), hello(), grpcretry.WithBudget(grpcretry.Unlimited), grpc.WaitForReady(true))
	server.Want("attempt 1 OK", "attempt 1 UNAVAILABLE unsent; stop target_down", "attempt 1 OK")
}

func newRetrier(t *testing.T, opts ...grpcretry.Option) *grpcretry.Retrier {
	t.Helper()
	r, err := grpcretry.New(opts...)
	if err != nil {
		t.Fatal(err)
	}
	return r
}
