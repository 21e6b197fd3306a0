package grpcretry_test

import (
	"context"
	"errors"
	"fmt"
	"log"
	"log/slog"
	"os"
	"sync"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/descriptorpb"

	"github.com/grpcretry/grpcretry"
	echov1 "github.com/grpcretry/grpcretry/proto/echo/v1"
)

// A lossyServer runs every method, but the response to each call's first attempt is lost.
type lossyServer struct {
	echov1.UnimplementedEchoServiceServer
	mu   sync.Mutex
	runs map[string]int // guarded by mu; by method
}

func (s *lossyServer) run(ctx context.Context, method string) (*echov1.EchoResponse, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.runs[method]++
	if grpcretry.PreviousAttempts(ctx) == 0 {
		return nil, status.Error(codes.Unavailable, "connection lost")
	}
	return &echov1.EchoResponse{}, nil
}

// count returns how often a method ran.
func (s *lossyServer) count(method string) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.runs[method]
}

func (s *lossyServer) Echo(ctx context.Context, _ *echov1.EchoRequest) (*echov1.EchoResponse, error) {
	return s.run(ctx, "Echo")
}

func (s *lossyServer) Put(ctx context.Context, _ *echov1.EchoRequest) (*echov1.EchoResponse, error) {
	return s.run(ctx, "Put")
}

func (s *lossyServer) Append(ctx context.Context, _ *echov1.EchoRequest) (*echov1.EchoResponse, error) {
	return s.run(ctx, "Append")
}

// The proto declares Echo as NO_SIDE_EFFECTS and Put as IDEMPOTENT, and nothing about Append. Reads are
// retried and hedged, idempotent writes are retried, and everything else runs at most once.
func ExampleWithIdempotencyLevel() {
	r, err := grpcretry.New(fast,
		grpcretry.WithUnsentOnly(true), // nothing runs twice, unless its proto allows it:
		grpcretry.WithIdempotencyLevel(descriptorpb.MethodOptions_IDEMPOTENT, grpcretry.WithUnsentOnly(false)),
		grpcretry.WithIdempotencyLevel(descriptorpb.MethodOptions_NO_SIDE_EFFECTS, grpcretry.WithUnsentOnly(false), grpcretry.WithHedging(
			grpcretry.Hedging{Delay: grpcretry.HedgeAtQuantile(0.95, 5*time.Millisecond, time.Second)})),
	)
	if err != nil {
		log.Fatal(err)
	}
	server := &lossyServer{runs: map[string]int{}}
	client, stop := dial(server, r.DialOptions()...)
	defer stop()

	ctx, request := context.Background(), &echov1.EchoRequest{}
	_, err = client.Echo(ctx, request)
	fmt.Println("Echo:", server.count("Echo"), "runs,", status.Code(err))
	_, err = client.Put(ctx, request)
	fmt.Println("Put:", server.count("Put"), "runs,", status.Code(err))
	_, err = client.Append(ctx, request)
	fmt.Println("Append:", server.count("Append"), "run,", status.Code(err))

	fmt.Println("Echo hedged:", r.Policy(echov1.EchoService_Echo_FullMethodName).Hedging != nil)
	fmt.Println("Put hedged:", r.Policy(echov1.EchoService_Put_FullMethodName).Hedging != nil)
	// Output:
	// Echo: 2 runs, OK
	// Put: 2 runs, OK
	// Append: 1 run, Unavailable
	// Echo hedged: true
	// Put hedged: false
}

// Methods whose proto declares them safe are retried. The others run at most once, and the error says when one
// may have.
func ExampleWithSafeMethods() {
	server := &lossyServer{runs: map[string]int{}}
	client, stop := dial(server, grpcretry.DialOptions(fast, grpcretry.WithSafeMethods())...)
	defer stop()

	ctx, request := context.Background(), &echov1.EchoRequest{}
	_, err := client.Echo(ctx, request)
	fmt.Println("Echo:", server.count("Echo"), "runs,", status.Code(err))
	_, err = client.Append(ctx, request)
	fmt.Println("Append:", server.count("Append"), "run,", status.Code(err))
	fmt.Println("it may have run:", errors.Is(err, grpcretry.ErrMayHaveRun))
	// Output:
	// Echo: 2 runs, OK
	// Append: 1 run, Unavailable
	// it may have run: true
}

// A dry run shows what retries would do, before they are turned on.
func ExampleWithDryRun() {
	r, err := grpcretry.New(grpcretry.WithDryRun(true), grpcretry.WithBackoff(grpcretry.Constant(time.Millisecond)),
		grpcretry.WithObserver(func(_ context.Context, e grpcretry.Event) {
			if e.Kind == grpcretry.Decision {
				fmt.Println(e.Reason, "after", e.Wait)
			}
		}))
	if err != nil {
		log.Fatal(err)
	}
	client, stop := dial(&flakyServer{failures: 1, fail: unavailable}, r.DialOptions()...)
	defer stop()

	_, err = client.Echo(context.Background(), &echov1.EchoRequest{Message: "hello"})
	fmt.Println(status.Code(err))
	// Output:
	// grpcretry: dry run: another attempt would follow after 1ms
	// Unavailable
}

// The policies of a gRPC service config, and one in Go, which wins because its scope is narrower.
func ExampleWithServiceConfig() {
	r, err := grpcretry.New(
		grpcretry.WithServiceConfig(`{
			"methodConfig": [{
				"name": [{"service": "shop.v1.Catalog"}],
				"retryPolicy": {
					"maxAttempts": 3, "initialBackoff": "0.1s", "maxBackoff": "1s", "backoffMultiplier": 2,
					"retryableStatusCodes": ["UNAVAILABLE", "ABORTED"]
				}
			}],
			"retryThrottling": {"maxTokens": 10, "tokenRatio": 0.1}
		}`),
		grpcretry.WithMethod("/shop.v1.Catalog/AddItem", grpcretry.Disable()),
	)
	if err != nil {
		log.Fatal(err)
	}
	for _, method := range []string{"/shop.v1.Catalog/GetItem", "/shop.v1.Catalog/AddItem", "/shop.v1.Cart/Checkout"} {
		p := r.Policy(method)
		fmt.Println(method, p.MaxAttempts, p.Codes)
	}

	_, err = grpcretry.New(grpcretry.WithServiceConfig(`{"retryThrottling": {"maxTokens": 0, "tokenRatio": 0.1}}`))
	fmt.Println(err)
	// Output:
	// /shop.v1.Catalog/GetItem 3 [Aborted Unavailable]
	// /shop.v1.Catalog/AddItem 1 [Aborted Unavailable]
	// /shop.v1.Cart/Checkout 4 [ResourceExhausted Unavailable]
	// grpcretry: WithServiceConfig: retryThrottling.maxTokens: 0, want above 0 and at most 1000
}

// During an incident, retries are turned off for every method; afterwards, all that was configured before
// is in effect again.
func ExampleRetrier_Update() {
	r, err := grpcretry.New(fast, grpcretry.WithMethod("/grpcretry.test.v1.EchoService/", grpcretry.WithMaxAttempts(3)))
	if err != nil {
		log.Fatal(err)
	}
	client, stop := dial(&flakyServer{failures: 4, fail: unavailable}, r.DialOptions()...)
	defer stop()
	call := func() {
		reply, err := client.Echo(context.Background(), &echov1.EchoRequest{Message: "hello"})
		fmt.Printf("%q %v\n", reply.GetMessage(), status.Code(err))
	}

	if err := r.Update(grpcretry.Disable()); err != nil {
		log.Fatal(err)
	}
	call()
	call()
	if err := r.Update(grpcretry.WithMaxAttempts(4)); err != nil {
		log.Fatal(err)
	}
	call() // the method's own limit is 3
	fmt.Println(r.Update(grpcretry.WithMaxAttempts(0)))
	// Output:
	// "" Unavailable
	// "" Unavailable
	// "hello, attempt 3" OK
	// grpcretry: WithMaxAttempts: 0 attempts, want at least 1
}

// What is doubtful about the options is logged when the Retrier is made.
func ExampleWithLogger() {
	plain := &slog.HandlerOptions{ReplaceAttr: func(_ []string, a slog.Attr) slog.Attr {
		if a.Key == slog.TimeKey {
			return slog.Attr{}
		}
		return a
	}}
	_, err := grpcretry.New(
		grpcretry.WithLogger(slog.New(slog.NewTextHandler(os.Stdout, plain))),
		grpcretry.WithMethod("/grpcretry.test.v1.EchoService/Ehco", grpcretry.Disable()),
	)
	if err != nil {
		log.Fatal(err)
	}
	// Output:
	// level=WARN msg="grpcretry: WithMethod /grpcretry.test.v1.EchoService/Ehco: service grpcretry.test.v1.EchoService has no method Ehco"
}
