package grpcretrytest_test

import (
	"context"
	"fmt"
	"io"
	"net"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/resolver"
	"google.golang.org/grpc/resolver/manual"

	"github.com/grpcretry/grpcretry"
	"github.com/grpcretry/grpcretry/balancer"
	. "github.com/grpcretry/grpcretry/grpcretrytest"
	echov1 "github.com/grpcretry/grpcretry/proto/echo/v1"
)

// A program has one Retrier for all of its connections. Each server records the calls on its own, once.
func TestOneRetrierForSeveralConnections(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		shop, stock := NewServer(t, register), NewServer(t, register)
		retrier := newRetrier(t, Jitter(0.5))
		for _, cc := range []*grpc.ClientConn{shop.DialWith(retrier), stock.DialWith(retrier), shop.DialWith(retrier)} {
			clientOf(cc).Echo(t.Context(), hello())
		}
		stock.On("/", Fail(codes.Unavailable, "draining"))
		clientOf(stock.DialWith(retrier)).Echo(t.Context(), hello())
		shop.Want("0s attempt 1 OK", "0s attempt 1 OK")
		stock.Want("0s attempt 1 OK", "0s attempt 1 UNAVAILABLE; wait 75ms backoff; 75ms attempt 2 OK")
	})
}

// A call that an interceptor below makes at another server is not the call within whose attempt it is made, although method and Retrier
// are the same.
func TestCallsWithinAnAttempt(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		shop, mirror := NewServer(t, register), NewServer(t, register)
		shop.On("/", Fail(codes.Unavailable, "draining"))
		mirror.On("/", Fail(codes.NotFound, "no mirror").Always())
		retrier := newRetrier(t, Jitter(0.5))
		mirrored := clientOf(mirror.Conn(retrier.DialOptions()...))
		client := clientOf(shop.DialWith(retrier, grpc.WithChainUnaryInterceptor(func(ctx context.Context, method string, req, reply any,
			cc *grpc.ClientConn, invoker grpc.UnaryInvoker, opts ...grpc.CallOption) error {
			mirrored.Echo(ctx, hello())
			return invoker(ctx, method, req, reply, cc, opts...)
		})))
		if _, err := client.Echo(t.Context(), hello()); err != nil {
			t.Error(err)
		}
		shop.Want("0s attempt 1 UNAVAILABLE; wait 75ms backoff; 75ms attempt 2 OK")
	})
}

// Of a call with very many attempts only the latest are told, but times count from its start, and so does its place among other calls.
func TestACallWithVeryManyAttempts(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		server := NewServer(t, register)
		server.On(echoMethod, Fail(codes.Unavailable, "draining").Always())
		retrier := newRetrier(t, grpcretry.WithMaxAttempts(20), grpcretry.WithBackoff(grpcretry.Constant(time.Second)),
			grpcretry.WithBudget(grpcretry.Unlimited), grpcretry.WithPatience(0))
		recorded, client := Record(t, retrier), clientOf(server.DialWith(retrier))
		time.AfterFunc(2*time.Second, func() { client.Append(t.Context(), hello()) })
		client.Echo(t.Context(), hello())
		want := echoMethod
		for n := 5; n <= 20; n++ {
			want += fmt.Sprintf("; wait 1s backoff; %ds attempt %d UNAVAILABLE", n-1, n)
		}
		want += "; 19s stop exhausted"
		for _, calls := range []*Calls{recorded, server.Calls} {
			calls.Want(want, "/grpcretry.test.v1.EchoService/Append; 0s attempt 1 OK")
		}
	})
}

// To a Retrier, each server is a target of its own.
func TestServersHaveBudgetsOfTheirOwn(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		shop, stock := NewServer(t, register), NewServer(t, register)
		retrier := newRetrier(t, Jitter(0.5), grpcretry.WithMaxAttempts(2), grpcretry.WithPatience(0),
			grpcretry.WithRatioBudget(grpcretry.RatioBudget{Ratio: grpcretry.Nothing, Reserve: 1}))
		for _, server := range []*Server{shop, stock} {
			server.On("/", Fail(codes.Unavailable, "draining"))
			clientOf(server.DialWith(retrier)).Echo(t.Context(), hello())
			server.Want("0s attempt 1 UNAVAILABLE; wait 75ms backoff; 75ms attempt 2 OK")
			server.On("/", Fail(codes.Unavailable, "draining").Always())
			for range 2 {
				clientOf(server.DialWith(retrier)).Echo(t.Context(), hello())
			}
			server.Want("0s attempt 1 UNAVAILABLE; wait 75ms backoff; 75ms attempt 2 UNAVAILABLE; 75ms stop exhausted",
				"0s attempt 1 UNAVAILABLE; 0s stop budget instead of wait 75ms backoff")
		}
	})
}

// A call is recorded once, however it ends and whether it is retried or passes through.
func TestEveryEndOfAStreamIsRecordedOnce(t *testing.T) {
	receive := func(s echov1.EchoService_ChatClient) {
		s.CloseSend()
		for err := error(nil); err == nil; {
			_, err = s.Recv()
		}
	}
	for name, opt := range map[string]grpcretry.Option{"retried": generous, "disabled": grpcretry.Disable(),
		"unbuffered": grpcretry.WithBufferLimit(0)} {
		for _, tt := range []struct {
			name  string
			use   func(s echov1.EchoService_ChatClient, cancel func())
			steps []Step
		}{
			{"received", func(s echov1.EchoService_ChatClient, _ func()) { receive(s) }, nil},
			{"failed", func(s echov1.EchoService_ChatClient, _ func()) { receive(s) }, []Step{Fail(codes.Aborted, "").Always()}},
			{"cancelled", func(s echov1.EchoService_ChatClient, cancel func()) { s.Recv(); cancel(); receive(s) }, nil},
			{"cancelled and left", func(_ echov1.EchoService_ChatClient, cancel func()) { cancel() }, nil},
			{"too late", func(s echov1.EchoService_ChatClient, _ func()) { s.Recv(); <-time.After(time.Minute) }, nil},
		} {
			t.Run(name+" "+tt.name, func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					server := NewServer(t, register)
					server.On("/", tt.steps...)
					ctx, cancel := context.WithTimeout(t.Context(), time.Second)
					defer cancel()
					stream, err := clientOf(server.Dial(opt)).Chat(ctx)
					if err != nil {
						t.Fatal(err)
					}
					stream.Send(hello())
					tt.use(stream, cancel)
					if n := strings.Count(server.String(), chatMethod); n != 1 {
						t.Errorf("%d calls are recorded, want 1:\n%s", n, server.Calls)
					}
				})
			})
		}
	}
}

// The end of a call is seen although an interceptor loses the call options.
func TestInterceptorsThatDropCallOptions(t *testing.T) {
	below := []grpc.DialOption{
		grpc.WithChainUnaryInterceptor(func(ctx context.Context, method string, req, reply any, cc *grpc.ClientConn, invoker grpc.UnaryInvoker,
			_ ...grpc.CallOption) error {
			return invoker(ctx, method, req, reply, cc)
		}),
		grpc.WithChainStreamInterceptor(func(ctx context.Context, desc *grpc.StreamDesc, cc *grpc.ClientConn, method string,
			streamer grpc.Streamer, _ ...grpc.CallOption) (grpc.ClientStream, error) {
			return streamer(ctx, desc, cc, method)
		}),
	}
	for _, tt := range []struct {
		name   string
		policy grpcretry.Option
		reason string
	}{{"retried", generous, "not_retryable"}, {"disabled", grpcretry.Disable(), "passed_through"}} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				server := NewServer(t, register)
				client := clientOf(server.DialWith(newRetrier(t, tt.policy), below...))
				client.Echo(t.Context(), hello())
				if _, err := expand(t.Context(), client); err != io.EOF {
					t.Error(err)
				}
				upload, err := client.Collect(t.Context())
				if err != nil {
					t.Fatal(err)
				}
				upload.Send(hello())
				if _, err := upload.CloseAndRecv(); err != nil {
					t.Error(err)
				}
				server.On(chatMethod, Fail(codes.Aborted, "lost"))
				chat, err := client.Chat(t.Context())
				if err != nil {
					t.Fatal(err)
				}
				if _, err := chat.Recv(); err == nil || err == io.EOF {
					t.Errorf("the stream has ended with %v, want ABORTED", err)
				}
				server.Want("0s attempt 1 OK", "0s attempt 1 OK", "0s attempt 1 OK", "0s attempt 1 ABORTED; 0s stop "+tt.reason)
			})
		})
	}
}

// Call options that goroutines share are not written to.
func TestCallOptionsThatAreShared(t *testing.T) {
	server := NewServer(t, register)
	cc := server.Dial()
	opts := append(make([]grpc.CallOption, 0, 10), grpc.WaitForReady(true))
	var callers sync.WaitGroup
	for range 4 {
		callers.Go(func() {
			stream, err := cc.NewStream(t.Context(), &grpc.StreamDesc{ServerStreams: true}, expandMethod, opts...)
			if err == nil {
				err = stream.SendMsg(hello())
			}
			if err == nil {
				err = stream.CloseSend()
			}
			for err == nil {
				err = stream.RecvMsg(&echov1.EchoResponse{})
			}
			if err != io.EOF {
				t.Errorf("the stream has ended with %v, want EOF", err)
			}
		})
	}
	callers.Wait()
	server.Want(slices.Repeat([]string{"attempt 1 OK"}, 4)...)
}

// Several servers are the replicas behind one client, and a retry goes to the other.
func TestServersBehindOneClient(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		replicas := map[string]*Server{}
		var addresses []resolver.Address
		for _, name := range []string{"a", "b"} {
			replicas[name] = NewServer(t, register)
			replicas[name].Next("/", Fail(codes.Unavailable, name)) // the first attempt that arrives
			addresses = append(addresses, resolver.Address{Addr: name})
		}
		retrier := newRetrier(t, Jitter(0.5))
		calls := Record(t, retrier)
		names := manual.NewBuilderWithScheme("replicas")
		names.InitialState(resolver.State{Addresses: addresses})
		cc, err := grpc.NewClient("replicas:///shop", append(retrier.DialOptions(), balancer.DialOption(), grpc.WithResolvers(names),
			grpc.WithTransportCredentials(insecure.NewCredentials()),
			grpc.WithContextDialer(func(ctx context.Context, name string) (net.Conn, error) { return replicas[name].DialContext(ctx) }))...)
		if err != nil {
			t.Fatal(err)
		}
		defer cc.Close()

		clientOf(cc).Echo(t.Context(), hello())

		calls.Want("0s attempt 1 UNAVAILABLE; wait 75ms backoff; 75ms attempt 2 UNAVAILABLE; wait 300ms backoff; 375ms attempt 3 OK")
	})
}
