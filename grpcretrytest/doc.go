// Package grpcretrytest tests a retry policy against a program's own server. The server runs in the test
// and fails as a script says, and what each call did is compared as text:
//
//	func TestCheckoutWaitsAsAsked(t *testing.T) {
//		synctest.Test(t, func(t *testing.T) {
//			server := grpcretrytest.NewServer(t, func(s grpc.ServiceRegistrar) { shoppb.RegisterShopServer(s, &shop{}) })
//			server.On("/shop.v1.Shop/Checkout", grpcretrytest.Fail(codes.Unavailable, "draining").Pushback(120*time.Millisecond))
//
//			shoppb.NewShopClient(server.Dial(policy...)).Checkout(t.Context(), &shoppb.CheckoutRequest{})
//
//			server.Want("0s attempt 1 UNAVAILABLE; wait 120ms pushback; 120ms attempt 2 OK")
//		})
//	}
//
// # Scripts
//
// [Server.On] says what happens to attempt 1, 2, 3, … of each call of a method, and [Server.Next] to the attempts
// that arrive next, whichever their calls. After that the program's own handlers answer. A [Step] fails with a
// code, pushback, RetryInfo, headers and trailers; hangs; is slow; or cuts the connection; and with streams all
// failures may come after a number of messages. [Server.Down] takes the whole server away.
//
// # Timelines
//
// The timeline of a call has one entry per attempt, wait and reason to stop. Entries are separated by semicolons or
// line breaks:
//
//	0s attempt 1 UNAVAILABLE after 30ms
//	wait 75ms backoff
//	105ms attempt 2 UNAVAILABLE
//	105ms stop exhausted
//
// It starts with the method if that matters: "/shop.v1.Shop/Checkout; 0s attempt 1 OK". The entries are
//
//   - "0s attempt 1 UNAVAILABLE after 30ms": when it started, since the start of the call, its code, and how long
//     it took, unless that is no time at all. An attempt that is sent beside another in flight, and not in place of one, is a
//     hedge: "20ms hedge 2 OK". In place of the code, "lost" means that another attempt decided the call, and "timeout"
//     that the attempt timeout ended it. "UNAVAILABLE unsent" means that the attempt reached no server.
//   - "wait 75ms backoff": the wait before the next attempt and its source, as [grpcretry.WaitSource] writes it. It is the
//     whole wait, with all repetitions, see [grpcretry.WithPatience].
//   - "105ms stop exhausted": why the call failed, in a word as in the metrics; with the wait that was not
//     started, if that is the reason: "0s stop deadline instead of wait 7s pushback". "passed_through" is a call that
//     is not retried in any case.
//
// Of a call with more than 16 attempts, the timeline has only the latest 16, see [grpcretry.Event].
//
// Any time may also be a range: "wait 0s..100ms backoff". What is left out is not compared: a time, a duration, the
// source of a wait, the method. But an attempt whose time is left out must not have started before the wait above it
// was over. So "wait 0s..100ms backoff; attempt 2 OK" tests a policy with its own jitter, and works in real time.
//
// # Time
//
// In a bubble of [testing/synctest], time is virtual and passes only while everything waits: minutes of backoff
// take microseconds, and every time is exact. Outside, time is real, and [OverTCP] replaces the connection in memory.
//
// # What it cannot do
//
// A script acts in place of the server's handlers. It does not damage frames, send GOAWAY, or slow down the network,
// and cannot fail an attempt before it reaches the server, other than by [Server.Down] and [Cut].
package grpcretrytest
