package grpcretrytest_test

import (
	"fmt"
	"testing"
	"time"

	"google.golang.org/grpc/codes"

	"github.com/grpcretry/grpcretry"
	"github.com/grpcretry/grpcretry/grpcretrytest"
	echov1 "github.com/grpcretry/grpcretry/proto/echo/v1"
)

// In these examples, run is a test function in virtual time: synctest.Test(t, …). A test would not print, but
// end with Want.

// A policy for each method: Echo may be repeated, and Append must not.
func Example_methods() {
	policy := []grpcretry.Option{
		grpcretry.WithMethod("/grpcretry.test.v1.EchoService/Echo", grpcretry.WithMaxAttempts(2)),
		grpcretry.WithMethod("/grpcretry.test.v1.EchoService/Append", grpcretry.Disable()),
	}
	run(func(t *testing.T) {
		server := grpcretrytest.NewServer(t, register)
		server.On("/", grpcretrytest.Fail(codes.Unavailable, "db-down").Always())
		client := echov1.NewEchoServiceClient(server.Dial(policy...))

		client.Echo(t.Context(), &echov1.EchoRequest{})
		fmt.Print(server.Calls)
		server.Want("0s attempt 1 UNAVAILABLE; wait 75ms backoff; 75ms attempt 2 UNAVAILABLE; 75ms stop exhausted")

		client.Append(t.Context(), &echov1.EchoRequest{})
		fmt.Print(server.Calls)
		server.Want("0s attempt 1 UNAVAILABLE; 0s stop passed_through")
	})
	// Output:
	// /grpcretry.test.v1.EchoService/Echo
	//   0s attempt 1 UNAVAILABLE
	//   wait 75ms backoff
	//   75ms attempt 2 UNAVAILABLE
	//   75ms stop exhausted
	// /grpcretry.test.v1.EchoService/Append
	//   0s attempt 1 UNAVAILABLE
	//   0s stop passed_through
}

// The server decides how long to wait, and when to stop.
func Example_pushback() {
	run(func(t *testing.T) {
		server := grpcretrytest.NewServer(t, register)
		server.On("/grpcretry.test.v1.EchoService/Echo",
			grpcretrytest.Fail(codes.Unavailable, "draining").Pushback(2*time.Second),
			grpcretrytest.Fail(codes.ResourceExhausted, "queue full").NoRetry())
		client := echov1.NewEchoServiceClient(server.Dial())

		client.Echo(t.Context(), &echov1.EchoRequest{})

		fmt.Print(server.Calls)
	})
	// Output:
	// /grpcretry.test.v1.EchoService/Echo
	//   0s attempt 1 UNAVAILABLE
	//   wait 2s pushback
	//   2s attempt 2 RESOURCE_EXHAUSTED
	//   2s stop pushback
}

// The default budget holds three retries before the server has answered anything. Without a token, a call waits
// for the server, and from 10 seconds after the first failure on, none waits.
func Example_budget() {
	run(func(t *testing.T) {
		server := grpcretrytest.NewServer(t, register)
		server.On("/", grpcretrytest.Fail(codes.Unavailable, "db-down").Always())
		client := echov1.NewEchoServiceClient(server.Dial())

		for range 3 {
			client.Echo(t.Context(), &echov1.EchoRequest{})
		}

		fmt.Print(server.Calls)
	})
	// Output:
	// /grpcretry.test.v1.EchoService/Echo
	//   0s attempt 1 UNAVAILABLE
	//   wait 75ms backoff
	//   75ms attempt 2 UNAVAILABLE
	//   wait 300ms backoff
	//   375ms attempt 3 UNAVAILABLE
	//   wait 1.2s backoff
	//   1.575s attempt 4 UNAVAILABLE
	//   1.575s stop exhausted
	// /grpcretry.test.v1.EchoService/Echo
	//   0s attempt 1 UNAVAILABLE
	//   6.398438s stop target_down
	// /grpcretry.test.v1.EchoService/Echo
	//   0s attempt 1 UNAVAILABLE
	//   0s stop target_down instead of wait 3.986719s backoff
}

// A stream is retried until the application has received something.
func Example_stream() {
	run(func(t *testing.T) {
		server := grpcretrytest.NewServer(t, register)
		server.On("/grpcretry.test.v1.EchoService/Expand",
			grpcretrytest.Fail(codes.Unavailable, "draining"),
			grpcretrytest.Cut().AfterSending(2))
		client := echov1.NewEchoServiceClient(server.Dial())

		stream, err := client.Expand(t.Context(), &echov1.EchoRequest{Message: "hello"})
		for err == nil {
			var reply *echov1.EchoResponse
			if reply, err = stream.Recv(); err == nil {
				fmt.Println(reply.GetMessage())
			}
		}

		fmt.Print(server.Calls)
	})
	// Output:
	// hello 1
	// hello 2
	// /grpcretry.test.v1.EchoService/Expand
	//   0s attempt 1 UNAVAILABLE
	//   wait 75ms backoff
	//   75ms attempt 2 UNAVAILABLE
	//   75ms stop committed
}

// The second attempt starts while the first is slow, and wins.
func Example_hedging() {
	hedged := grpcretry.WithPolicy(grpcretry.Policy{MaxAttempts: 2,
		Hedging: &grpcretry.Hedging{Delay: grpcretry.HedgeAfter(20 * time.Millisecond), Budget: grpcretry.Unlimited}})
	run(func(t *testing.T) {
		server := grpcretrytest.NewServer(t, register)
		server.On("/grpcretry.test.v1.EchoService/Echo",
			grpcretrytest.OK().After(time.Second),
			grpcretrytest.OK().After(5*time.Millisecond))
		client := echov1.NewEchoServiceClient(server.Dial(grpcretry.WithMethod("/grpcretry.test.v1.EchoService/Echo", hedged)))

		client.Echo(t.Context(), &echov1.EchoRequest{})

		fmt.Print(server.Calls)
	})
	// Output:
	// /grpcretry.test.v1.EchoService/Echo
	//   0s attempt 1 lost after 25ms
	//   20ms hedge 2 OK after 5ms
}
