package grpcretry

import (
	"context"
	"fmt"
	"math"
	"strconv"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"
)

// This file is what servers use: their side of pushback and of the attempt count.

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
