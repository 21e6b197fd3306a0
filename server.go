package grpcretry

import (
	"context"
	"fmt"
	"math"
	"strconv"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"

	"github.com/grpcretry/grpcretry/internal/layers"
)

// This file holds the servers' side of pushback and of the attempt count.

// SetPushback asks the caller of the RPC handled in ctx to wait for delay before a retry, if the
// RPC fails with a code that the caller retries (gRFC A6 #pushback). Call it in a server's
// handler, unary or stream, before the handler returns.
//
// The delay is rounded up to whole milliseconds and can be at most 2147483647 ms. A negative or
// longer delay is an error, as is a ctx that is not a handler's, and then nothing is sent. Call
// SetPushback only once for an RPC: gRPC cannot replace a trailer, so a second call adds a second
// value, and clients read repeated values as "stop".
//
// Give waiting callers different delays, spread over the time that the backlog needs, so that they
// do not all retry together.
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

// SetNoRetry asks the caller of the RPC handled in ctx not to retry it (gRFC A6 #pushback). Use it
// for work that must not be repeated or can never succeed. Call it in a server's handler, unary or
// stream, before the handler returns; outside a handler it returns an error. A second call changes
// nothing.
func SetNoRetry(ctx context.Context) error {
	r := layers.Of(ctx)
	if !r.Handles(ctx) { // there is no interceptor, or the request is that of a client in the same process
		return sendPushback(ctx, "SetNoRetry", noRetry)
	}
	if r.Forbids() {
		return nil
	}
	err := sendPushback(ctx, "SetNoRetry", noRetry)
	if err == nil {
		r.Forbid()
	}
	return err
}

func sendPushback(ctx context.Context, caller, value string) error {
	if err := grpc.SetTrailer(ctx, metadata.MD{pushbackKey: {value}}); err != nil {
		return fmt.Errorf("grpcretry: %s: %w", caller, err)
	}
	return nil
}

// PreviousAttempts returns, in a server's handler, the number of attempts that the client made at
// this RPC before the current one. It is 0 for a first attempt, if the client does not send the
// number, and outside a handler. It comes from the metadata key grpc-previous-rpc-attempts (gRFC
// A6 #exposed-retry-metadata). If the value is repeated, the largest counts; malformed values are
// ignored.
func PreviousAttempts(ctx context.Context) int {
	var previous int64
	for _, value := range metadata.ValueFromIncomingContext(ctx, previousAttemptsKey) {
		if n, ok := parseInt32(value); ok {
			previous = max(previous, n)
		}
	}
	return int(previous)
}
