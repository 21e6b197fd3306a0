package grpcretry

import (
	"context"
	"fmt"
	"math"
	"strconv"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
)

const (
	pushbackKey         = "grpc-retry-pushback-ms"     // gRFC A6 #pushback
	previousAttemptsKey = "grpc-previous-rpc-attempts" // gRFC A6 #exposed-retry-metadata
)

// A Pushback is what a server said about the next attempt.
type Pushback struct {
	Delay  time.Duration // how long to wait, exactly as said; 0 with Stop
	Stop   bool          // no further attempt
	Source WaitSource    // WaitPushback or WaitRetryInfo
}

// PushbackFrom reads what a server said about the next attempt, from the trailer
// and the error of a failed RPC; ok is false if it said nothing.
//
// The trailer grpc-retry-pushback-ms comes first: a value in 0 … 2147483647, in
// plain decimal digits, is a wait in milliseconds; anything else, and a repeated
// value, means stop (gRFC A6 #pushback, which leaves repeated values open). Without
// the trailer, a google.rpc.RetryInfo above zero in the status details counts.
// PushbackFrom applies no limit of its own: [WithMaxServerDelay] does.
func PushbackFrom(trailer metadata.MD, err error) (p Pushback, ok bool) {
	if values := trailer[pushbackKey]; len(values) > 0 {
		delay, valid := parsePushback(values)
		return Pushback{Delay: delay, Stop: !valid, Source: WaitPushback}, true
	}
	if delay := retryInfo(err); delay > 0 {
		return Pushback{Delay: delay, Source: WaitRetryInfo}, true
	}
	return Pushback{}, false
}

func parsePushback(values []string) (delay time.Duration, valid bool) {
	if len(values) != 1 {
		return 0, false
	}
	ms, valid := parseInt32(values[0])
	return time.Duration(ms) * time.Millisecond, valid
}

// parseInt32 accepts 0 … 2147483647 in decimal digits only: no sign, no blanks, no
// leading zeros. strconv would let "+5" and "05" pass.
func parseInt32(s string) (n int64, ok bool) {
	if s == "" || len(s) > len("2147483647") || s[0] == '0' && s != "0" {
		return 0, false
	}
	for i := range len(s) {
		if s[i] < '0' || s[i] > '9' {
			return 0, false
		}
		n = 10*n + int64(s[i]-'0')
	}
	if n > math.MaxInt32 {
		return 0, false
	}
	return n, true
}

// retryInfo is the delay of the first google.rpc.RetryInfo of err, 0 if it has none
// or an invalid one.
func retryInfo(err error) time.Duration {
	st, ok := status.FromError(err)
	if !ok {
		return 0
	}
	for _, detail := range st.Details() {
		if info, ok := detail.(*errdetails.RetryInfo); ok && info.GetRetryDelay().CheckValid() == nil {
			return info.GetRetryDelay().AsDuration()
		}
	}
	return 0
}

// SetPushback asks the caller of the RPC handled in ctx to wait for delay before it
// tries again, should the RPC fail with a code that the caller retries. Call it from
// a server's handler, unary or stream, before the handler returns.
//
// The wire holds whole milliseconds up to 2147483647; delay is rounded up. A
// negative or longer delay is an error and sends nothing, as is a ctx that is not a
// handler's. gRPC cannot take a trailer back: a second call adds a second value, and
// clients read repeated values as "stop".
//
// Give waiting callers different delays: spread over the time that the backlog
// needs, they do not come back together.
func SetPushback(ctx context.Context, delay time.Duration) error {
	if delay < 0 {
		return fmt.Errorf("grpcretry: SetPushback: delay %v is negative; SetNoRetry tells clients to stop", delay)
	}
	ms := int64(delay / time.Millisecond)
	if delay%time.Millisecond > 0 {
		ms++
	}
	if ms > math.MaxInt32 {
		return fmt.Errorf("grpcretry: SetPushback: delay %v is over %v, the most the trailer can hold",
			delay, math.MaxInt32*time.Millisecond)
	}
	return sendPushback(ctx, "SetPushback", strconv.FormatInt(ms, 10))
}

// SetNoRetry tells the caller of the RPC handled in ctx not to try again. Call it
// from a server's handler, unary or stream, before the handler returns, for work
// that must not be repeated or can never succeed. It is an error outside of a handler.
func SetNoRetry(ctx context.Context) error {
	return sendPushback(ctx, "SetNoRetry", "-1")
}

func sendPushback(ctx context.Context, caller, value string) error {
	if err := grpc.SetTrailer(ctx, metadata.MD{pushbackKey: {value}}); err != nil {
		return fmt.Errorf("grpcretry: %s: %w", caller, err)
	}
	return nil
}

// PreviousAttempts returns, in a server's handler, how many attempts the client made
// of this RPC before this one: 0 on a first attempt, and where the client does not
// say. It reads grpc-previous-rpc-attempts (gRFC A6 #exposed-retry-metadata); of
// repeated values the largest counts, and malformed ones do not.
func PreviousAttempts(ctx context.Context) int {
	var previous int64
	for _, value := range metadata.ValueFromIncomingContext(ctx, previousAttemptsKey) {
		if n, ok := parseInt32(value); ok {
			previous = max(previous, n)
		}
	}
	return int(previous)
}
