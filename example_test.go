package grpcretry_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"go.opentelemetry.io/otel"
	"golang.org/x/time/rate"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	"google.golang.org/grpc/test/bufconn"

	"github.com/grpcretry/grpcretry"
	echov1 "github.com/grpcretry/grpcretry/proto/echo/v1"
)

// A flakyServer fails a number of times, then succeeds.
type flakyServer struct {
	echov1.UnimplementedEchoServiceServer
	mu       sync.Mutex
	failures int // guarded by mu
	fail     func(ctx context.Context) error
	stuck    bool // a first attempt gets no response
}

// fails reports whether to fail, and counts the failure.
func (s *flakyServer) fails() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.failures--
	return s.failures >= 0
}

func (s *flakyServer) Echo(ctx context.Context, req *echov1.EchoRequest) (*echov1.EchoResponse, error) {
	if s.stuck && grpcretry.PreviousAttempts(ctx) == 0 {
		<-ctx.Done()
		return nil, ctx.Err()
	}
	if s.fails() {
		return nil, s.fail(ctx)
	}
	return &echov1.EchoResponse{Message: fmt.Sprintf("%s, attempt %d", req.GetMessage(), 1+grpcretry.PreviousAttempts(ctx))}, nil
}

// Expand responds to one request with three messages.
func (s *flakyServer) Expand(req *echov1.EchoRequest, stream grpc.ServerStreamingServer[echov1.EchoResponse]) error {
	if s.fails() {
		return s.fail(stream.Context())
	}
	for i := range 3 {
		if err := stream.Send(&echov1.EchoResponse{Message: fmt.Sprint(req.GetMessage(), " ", i+1)}); err != nil {
			return err
		}
	}
	return nil
}

// Collect joins the messages that it receives.
func (s *flakyServer) Collect(stream grpc.ClientStreamingServer[echov1.EchoRequest, echov1.EchoResponse]) error {
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
		if s.fails() { // after it has read some of the messages
			return s.fail(stream.Context())
		}
	}
}

func unavailable(context.Context) error { return status.Error(codes.Unavailable, "db-down") }

// dial starts the server and returns a client for it, and a function that stops both.
func dial(server echov1.EchoServiceServer, opts ...grpc.DialOption) (echov1.EchoServiceClient, func()) {
	listener := bufconn.Listen(1 << 16)
	s := grpc.NewServer()
	echov1.RegisterEchoServiceServer(s, server)
	go s.Serve(listener)

	cc, err := grpc.NewClient("passthrough:///echo", append(opts,
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) { return listener.DialContext(ctx) }))...)
	if err != nil {
		log.Fatal(err)
	}
	return echov1.NewEchoServiceClient(cc), func() { cc.Close(); s.Stop() }
}

var fast = grpcretry.WithBackoff(grpcretry.Exponential{Base: time.Millisecond, Max: 10 * time.Millisecond})

func Example() {
	client, stop := dial(&flakyServer{failures: 2, fail: unavailable}, grpcretry.DialOptions(fast)...)
	defer stop()

	reply, err := client.Echo(context.Background(), &echov1.EchoRequest{Message: "hello"})
	fmt.Println(reply.GetMessage(), err)
	// Output: hello, attempt 3 <nil>
}

func ExampleUnaryClientInterceptor() {
	client, stop := dial(&flakyServer{failures: 1, fail: unavailable},
		grpc.WithChainUnaryInterceptor(grpcretry.UnaryClientInterceptor(fast)))
	defer stop()

	reply, err := client.Echo(context.Background(), &echov1.EchoRequest{Message: "hello"})
	fmt.Println(reply.GetMessage(), err)
	// Output: hello, attempt 2 <nil>
}

func ExampleNew() {
	_, err := grpcretry.New(
		grpcretry.WithMaxAttempts(0),
		grpcretry.WithBackoff(grpcretry.Exponential{Base: time.Minute, Max: time.Second}))
	fmt.Println(err)
	// Output:
	// grpcretry: WithMaxAttempts: 0 attempts, want at least 1
	// grpcretry: WithBackoff: Exponential.Max is 1s, below Base 1m0s
}

// A handler can distinguish the ways in which a call to the next service failed.
func ExampleError() {
	client, stop := dial(&flakyServer{failures: 9, fail: unavailable},
		grpcretry.DialOptions(fast, grpcretry.WithMaxAttempts(3))...)
	defer stop()

	_, err := client.Echo(context.Background(), &echov1.EchoRequest{Message: "hello"})

	var failed *grpcretry.Error
	switch {
	case err == nil:
	case errors.Is(err, grpcretry.ErrBudgetExhausted):
		fmt.Println("the backend is down for many callers, so fail fast")
	case errors.As(err, &failed):
		fmt.Println(status.Code(err), "after", len(failed.Attempts), "attempts:", failed.Reason)
		fmt.Println("the server's last word:", failed.Last)
	default:
		fmt.Println("not retryable:", err)
	}
	// Output:
	// Unavailable after 3 attempts: grpcretry: no attempts left
	// the server's last word: rpc error: code = Unavailable desc = db-down
}

func ExampleWithMethod() {
	r, err := grpcretry.New(
		grpcretry.WithMethod("/shop.Cart/", grpcretry.WithMaxAttempts(6)),
		grpcretry.WithMethod("/shop.Cart/Checkout", grpcretry.Disable()))
	if err != nil {
		log.Fatal(err)
	}
	for _, method := range []string{"/shop.Cart/Get", "/shop.Cart/Checkout", "/shop.Stock/Get"} {
		fmt.Println(method, r.Policy(method).MaxAttempts)
	}
	// Output:
	// /shop.Cart/Get 6
	// /shop.Cart/Checkout 1
	// /shop.Stock/Get 4
}

func ExampleDisable() {
	client, stop := dial(&flakyServer{failures: 1, fail: unavailable}, grpcretry.DialOptions(fast)...)
	defer stop()

	_, err := client.Echo(context.Background(), &echov1.EchoRequest{Message: "hello"}, grpcretry.Disable())
	fmt.Println(err)
	// Output: rpc error: code = Unavailable desc = db-down
}

// flakyTokens are credentials that cannot be had for a while.
type flakyTokens struct{ failures int }

func (f *flakyTokens) GetRequestMetadata(context.Context, ...string) (map[string]string, error) {
	if f.failures--; f.failures >= 0 {
		return nil, status.Error(codes.Unavailable, "no token")
	}
	return nil, nil
}

func (*flakyTokens) RequireTransportSecurity() bool { return false }

// A method that must not run twice is retried while nothing has been sent. When the server has
// failed, it may have run the method, and nobody but the server can say that another attempt is
// safe.
func ExampleWithUnsentOnly() {
	client, stop := dial(&flakyServer{failures: 1, fail: unavailable}, grpcretry.DialOptions(fast,
		grpcretry.WithMethod(echov1.EchoService_Echo_FullMethodName, grpcretry.WithUnsentOnly(true)))...)
	defer stop()

	for range 2 {
		tokens := grpc.PerRPCCredentials(&flakyTokens{failures: 1})
		reply, err := client.Echo(context.Background(), &echov1.EchoRequest{Message: "hello"}, tokens)
		if failed := (*grpcretry.Error)(nil); errors.As(err, &failed) {
			fmt.Println(failed.Reason, "in attempt", len(failed.Attempts))
			continue
		}
		fmt.Println(reply.GetMessage(), err)
	}
	// Output:
	// grpcretry: failure is not retryable: the method may have run, and it must not run twice in attempt 2
	// hello, attempt 2 <nil>
}

// Here INTERNAL is retried only if the server reports a failover.
func ExampleWithClassifier() {
	failover := func(_ context.Context, a grpcretry.Attempt) grpcretry.Classification {
		if a.Code() == codes.Internal && status.Convert(a.Err).Message() == "failover in progress" {
			return grpcretry.Retry
		}
		return grpcretry.Default
	}
	client, stop := dial(&flakyServer{failures: 1, fail: func(context.Context) error {
		return status.Error(codes.Internal, "failover in progress")
	}}, grpcretry.DialOptions(fast, grpcretry.WithClassifier(failover))...)
	defer stop()

	reply, err := client.Echo(context.Background(), &echov1.EchoRequest{Message: "hello"})
	fmt.Println(reply.GetMessage(), err)
	// Output: hello, attempt 2 <nil>
}

// A server that knows when it will have recovered tells its clients.
func ExampleSetPushback() {
	busy := func(ctx context.Context) error {
		if err := grpcretry.SetPushback(ctx, 20*time.Millisecond); err != nil {
			return err
		}
		return status.Error(codes.ResourceExhausted, "queue full")
	}
	client, stop := dial(&flakyServer{failures: 1, fail: busy}, grpcretry.DialOptions(
		grpcretry.WithObserver(func(_ context.Context, e grpcretry.Event) {
			if e.Kind == grpcretry.Decision {
				fmt.Println("retry:", e.Reason == nil, "after", e.Wait, "by", e.WaitSource)
			}
		}))...)
	defer stop()

	reply, err := client.Echo(context.Background(), &echov1.EchoRequest{Message: "hello"})
	fmt.Println(reply.GetMessage(), err)
	// Output:
	// retry: true after 20ms by pushback
	// hello, attempt 2 <nil>
}

func ExampleSetNoRetry() {
	poison := func(ctx context.Context) error {
		if err := grpcretry.SetNoRetry(ctx); err != nil {
			return err
		}
		return status.Error(codes.Unavailable, "this request crashed a worker")
	}
	client, stop := dial(&flakyServer{failures: 9, fail: poison}, grpcretry.DialOptions()...)
	defer stop()

	_, err := client.Echo(context.Background(), &echov1.EchoRequest{})
	fmt.Println(errors.Is(err, grpcretry.ErrPushback), status.Convert(err).Message())
	// Output: true this request crashed a worker
}

// One budget for all clients of the same backend: here retries are at most a tenth of the calls plus
// one a second, and never more than 50 at the same time.
func ExampleAllBudgets() {
	share, err := grpcretry.NewRatioBudget(grpcretry.RatioBudget{Ratio: 0.1, Reserve: grpcretry.Nothing, MinPerSecond: 1})
	if err != nil {
		log.Fatal(err)
	}
	atOnce, err := grpcretry.NewConcurrencyBudget(50)
	if err != nil {
		log.Fatal(err)
	}
	budget := grpcretry.AllBudgets(share, atOnce)
	fmt.Println("retries that may be made now:", budget.Balance(time.Now()))

	orders := grpcretry.DialOptions(grpcretry.WithBudget(budget))
	carts := grpcretry.DialOptions(grpcretry.WithBudget(budget))
	_, _ = orders, carts
	// Output: retries that may be made now: 10
}

func ExampleNewRateBudget() {
	client, stop := dial(&flakyServer{failures: 9, fail: unavailable}, grpcretry.DialOptions(fast,
		grpcretry.WithPatience(0), grpcretry.WithBudget(grpcretry.NewRateBudget(rate.NewLimiter(rate.Every(time.Hour), 1))))...)
	defer stop()

	_, err := client.Echo(context.Background(), &echov1.EchoRequest{})
	fmt.Println(errors.Is(err, grpcretry.ErrBudgetExhausted), status.Code(err))
	// Output: true Unavailable
}

func ExampleNewThrottle() {
	throttle, err := grpcretry.NewThrottle(10, 0.1)
	if err != nil {
		log.Fatal(err)
	}
	for range 5 {
		throttle.Deposit(grpcretry.Outcome{Attempt: 1, Result: grpcretry.Failed})
	}
	fmt.Println(throttle.Withdraw(time.Now()), throttle.Balance(time.Now()))
	// Output: false 0
}

// An interceptor chained after ours runs for each attempt and can tell them apart.
func ExampleAttemptFromContext() {
	printAttempt := func(ctx context.Context, method string, req, reply any, cc *grpc.ClientConn, invoker grpc.UnaryInvoker,
		opts ...grpc.CallOption) error {
		if a, ok := grpcretry.AttemptFromContext(ctx); ok {
			fmt.Println("attempt", a.Number, "after", a.WaitSource)
		}
		return invoker(ctx, method, req, reply, cc, opts...)
	}
	client, stop := dial(&flakyServer{failures: 1, fail: unavailable},
		append(grpcretry.DialOptions(fast), grpc.WithChainUnaryInterceptor(printAttempt))...)
	defer stop()

	_, err := client.Echo(context.Background(), &echov1.EchoRequest{})
	fmt.Println(err)
	// Output:
	// attempt 1 after none
	// attempt 2 after backoff
	// <nil>
}

func ExampleWithAttemptTimeout() {
	client, stop := dial(&flakyServer{stuck: true},
		grpcretry.DialOptions(fast, grpcretry.WithMaxAttempts(2), grpcretry.WithAttemptTimeout(20*time.Millisecond))...)
	defer stop()

	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	reply, err := client.Echo(ctx, &echov1.EchoRequest{Message: "hello"})
	fmt.Println(reply.GetMessage(), err)
	// Output: hello, attempt 2 <nil>
}

// If a server stream fails before its first message, it is retried.
func ExampleRetrier_StreamClientInterceptor() {
	r, err := grpcretry.New(fast)
	if err != nil {
		log.Fatal(err)
	}
	client, stop := dial(&flakyServer{failures: 2, fail: unavailable},
		grpc.WithChainStreamInterceptor(r.StreamClientInterceptor()))
	defer stop()

	stream, err := client.Expand(context.Background(), &echov1.EchoRequest{Message: "line"})
	for err == nil {
		var reply *echov1.EchoResponse
		if reply, err = stream.Recv(); err == nil {
			fmt.Println(reply.GetMessage())
		}
	}
	fmt.Println(err)
	// Output:
	// line 1
	// line 2
	// line 3
	// EOF
}

// A client stream's messages are sent again, in order, as long as they fit the buffer.
func ExampleWithBufferLimit() {
	client, stop := dial(&flakyServer{failures: 1, fail: unavailable},
		grpcretry.DialOptions(fast, grpcretry.WithBufferLimit(1<<20))...)
	defer stop()

	stream, err := client.Collect(context.Background())
	if err != nil {
		log.Fatal(err)
	}
	for _, word := range []string{"none", "is", "lost"} {
		if err := stream.Send(&echov1.EchoRequest{Message: word}); err != nil {
			log.Fatal(err)
		}
	}
	reply, err := stream.CloseAndRecv()
	fmt.Println(reply.GetMessage(), err)
	// Output: none is lost <nil>
}

// Metrics are recorded with the program's own provider, here the global one that otel.SetMeterProvider has set:
// an SDK with a Prometheus or an OTLP exporter. The metric of calls counts this call as "recovered".
func ExampleWithMeterProvider() {
	client, stop := dial(&flakyServer{failures: 1, fail: unavailable},
		grpcretry.DialOptions(fast, grpcretry.WithMeterProvider(otel.GetMeterProvider()))...)
	defer stop()
	reply, err := client.Echo(context.Background(), &echov1.EchoRequest{Message: "hello"})
	fmt.Println(reply.GetMessage(), err)
	// Output: hello, attempt 2 <nil>
}

// The first attempt is stuck. After a tenth of a second without a response, a second one is sent, and
// wins. Use hedging only for methods that may run twice at the same time.
func ExampleWithHedging() {
	client, stop := dial(&flakyServer{stuck: true}, grpcretry.DialOptions(
		grpcretry.WithMethod(echov1.EchoService_Echo_FullMethodName, grpcretry.WithMaxAttempts(2), grpcretry.WithHedging(grpcretry.Hedging{
			Delay:  grpcretry.HedgeAfter(100 * time.Millisecond),
			Budget: grpcretry.Unlimited, // the default budget allows hedges for 10% of answered calls, and no call has been answered yet
		})))...)
	defer stop()

	reply, err := client.Echo(context.Background(), &echov1.EchoRequest{Message: "hello"})
	fmt.Println(reply.GetMessage(), err)
	// Output: hello, attempt 2 <nil>
}

// Hedge the slowest twentieth of the calls, as measured over the last minute, but never
// before 5 ms.
func ExampleHedgeAtQuantile() {
	r, err := grpcretry.New(grpcretry.WithMethod("/shop.v1.Catalog/", grpcretry.WithHedging(grpcretry.Hedging{
		Delay: grpcretry.HedgeAtQuantile(0.95, 5*time.Millisecond, time.Second)})))
	if err != nil {
		log.Fatal(err)
	}
	policy := r.Policy("/shop.v1.Catalog/GetItem")
	_, known := policy.Hedging.Delay.Delay("/shop.v1.Catalog/GetItem", time.Now())
	fmt.Println(policy.MaxAttempts, "attempts; delay known:", known)
	// Output: 4 attempts; delay known: false
}

// A switchedDelay uses another delay while hedging is switched on. That delay measures latencies
// in any case.
type switchedDelay struct {
	on *atomic.Bool
	grpcretry.HedgeDelay
}

func (s switchedDelay) Delay(method string, now time.Time) (time.Duration, bool) {
	if !s.on.Load() {
		return 0, false
	}
	return s.HedgeDelay.Delay(method, now)
}

// Hedging that can be switched off while the program runs.
func ExampleHedgeDelay() {
	var on atomic.Bool
	r, err := grpcretry.New(grpcretry.WithMethod("/shop.v1.Catalog/", grpcretry.WithHedging(grpcretry.Hedging{
		Delay: switchedDelay{&on, grpcretry.HedgeAfter(20 * time.Millisecond)}})))
	if err != nil {
		log.Fatal(err)
	}
	delay := r.Policy("/shop.v1.Catalog/GetItem").Hedging.Delay
	_, hedged := delay.Delay("/shop.v1.Catalog/GetItem", time.Now())
	fmt.Println("hedged:", hedged)
	on.Store(true)
	after, hedged := delay.Delay("/shop.v1.Catalog/GetItem", time.Now())
	fmt.Println("hedged:", hedged, "after", after)
	// Output:
	// hedged: false
	// hedged: true after 20ms
}
