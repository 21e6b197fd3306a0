package grpcretry

import (
	"context"
	"net"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/test/bufconn"

	echov1 "github.com/grpcretry/grpcretry/proto/echo/v1"
)

// BenchmarkFirstAttemptSucceeds is the cost of the interceptor alone. Calls of a stub, with DialOptions, cost less: see the module bench.
func BenchmarkFirstAttemptSucceeds(b *testing.B) {
	intercept := UnaryClientInterceptor()
	b.ReportAllocs()
	for b.Loop() {
		callOnce(b, intercept, succeed)
	}
}

func BenchmarkFirstAttemptSucceedsOnAllCores(b *testing.B) {
	intercept := UnaryClientInterceptor()
	b.ReportAllocs()
	b.RunParallel(func(pb *testing.PB) {
		for pb.Next() {
			callOnce(b, intercept, succeed)
		}
	})
}

// BenchmarkFirstAttemptSucceedsWithOwnOptions is the same for a call with options of its own, in a Retrier
// with options for the service and the method.
func BenchmarkFirstAttemptSucceedsWithOwnOptions(b *testing.B) {
	intercept := UnaryClientInterceptor(WithMaxElapsed(time.Minute), WithMethod("/pkg.Service/", WithCodes(codes.Aborted)),
		WithMethod("/pkg.Service/Method", WithMaxAttempts(3)))
	own := []grpc.CallOption{WithMaxAttempts(2), WithBackoff(Constant(0))}
	b.ReportAllocs()
	for b.Loop() {
		if err := intercept(b.Context(), "/pkg.Service/Method", nil, nil, nil, succeed, own...); err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkOneRetryWithoutAWait(b *testing.B) {
	intercept := UnaryClientInterceptor(WithBackoff(Constant(0)), WithBudget(Unlimited))
	b.ReportAllocs()
	for b.Loop() {
		callOnce(b, intercept, failOnce)
	}
}

// BenchmarkMessageOfACommittedStream compares a message received on a committed stream
// with and without the interceptor.
func BenchmarkMessageOfACommittedStream(b *testing.B) {
	for _, client := range []struct {
		name string
		opts []grpc.DialOption
	}{{"bare", nil}, {"grpcretry", DialOptions()}} {
		b.Run("client="+client.name, func(b *testing.B) {
			listener := bufconn.Listen(1 << 20)
			server := grpc.NewServer()
			echov1.RegisterEchoServiceServer(server, talker{})
			go server.Serve(listener)
			defer server.Stop()
			cc, err := grpc.NewClient("passthrough:///talker", append(client.opts,
				grpc.WithTransportCredentials(insecure.NewCredentials()),
				grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) { return listener.DialContext(ctx) }))...)
			if err != nil {
				b.Fatal(err)
			}
			defer cc.Close()
			ctx, cancel := context.WithCancel(b.Context())
			defer cancel()
			stream, err := echov1.NewEchoServiceClient(cc).Expand(ctx, request())
			if err != nil {
				b.Fatal(err)
			}
			m := &echov1.EchoResponse{}
			b.ReportAllocs()
			for b.Loop() {
				if err := stream.RecvMsg(m); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

// talker sends until nobody listens.
type talker struct {
	echov1.UnimplementedEchoServiceServer
}

func (talker) Expand(_ *echov1.EchoRequest, stream grpc.ServerStreamingServer[echov1.EchoResponse]) error {
	m := &echov1.EchoResponse{Message: "hello"}
	for {
		if err := stream.Send(m); err != nil {
			return err
		}
	}
}

func BenchmarkRatioBudget(b *testing.B) {
	budget := newRatioBudget(defaultRatioBudget)
	b.Run("Deposit", func(b *testing.B) {
		b.ReportAllocs()
		b.RunParallel(func(pb *testing.PB) {
			for pb.Next() {
				budget.Deposit(Outcome{Attempt: 1})
			}
		})
	})
	b.Run("Withdraw", func(b *testing.B) {
		b.ReportAllocs()
		now := time.Now()
		for b.Loop() {
			budget.Withdraw(now)
		}
	})
}

func BenchmarkServerInterceptor(b *testing.B) {
	intercept := UnaryServerInterceptor()
	ctx := metadata.NewIncomingContext(b.Context(), metadata.Pairs("user-agent", "grpc-go"))
	info := &grpc.UnaryServerInfo{FullMethod: echoMethod}
	handle := func(context.Context, any) (any, error) { return nil, nil }
	b.ReportAllocs()
	for b.Loop() {
		if _, err := intercept(ctx, nil, info, handle); err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkHedgedFirstAttemptSucceeds(b *testing.B) {
	for _, bm := range []struct {
		name string
		opts []Option
	}{
		{"hedging=off", nil},
		{"hedging=after",
			[]Option{WithPolicy(Policy{MaxAttempts: 2, Hedging: &Hedging{Delay: HedgeAfter(time.Minute), AllMethodsAreSafe: true}})}},
	} {
		b.Run(bm.name, func(b *testing.B) {
			intercept := UnaryClientInterceptor(bm.opts...)
			reply := &echov1.EchoResponse{}
			ctx, cancel := context.WithCancel(context.Background())
			defer cancel()
			b.ReportAllocs()
			for b.Loop() {
				if err := intercept(ctx, "/pkg.Service/Method", nil, reply, nil, succeed, stubOptions...); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
