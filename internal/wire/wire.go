// Package wire reads and writes what clients and servers say to each other about retries: the metadata of gRFC A6,
// and google.rpc.RetryInfo.
package wire

import (
	"context"
	"maps"
	"math"
	"strconv"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
)

// The keys of gRFC A6's metadata.
const (
	PushbackKey         = "grpc-retry-pushback-ms"     // in trailers, see #pushback
	PreviousAttemptsKey = "grpc-previous-rpc-attempts" // in headers, see #exposed-retry-metadata
)

// NoRetry is the value of [PushbackKey] that this library's servers send for "do not retry".
const NoRetry = "-1"

// Pushback returns the wait in the values of [PushbackKey]; valid is false if they mean stop.
func Pushback(values []string) (delay time.Duration, valid bool) {
	if len(values) != 1 {
		return 0, false
	}
	ms, valid := parseInt32(values[0])
	return time.Duration(ms) * time.Millisecond, valid
}

// parseInt32 accepts 0 to 2147483647 in decimal digits only: no sign, no blanks, no leading zeros.
// strconv would accept "+5" and "05".
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

// RetryInfo returns the first delay above zero that a google.rpc.RetryInfo of err's details has; 0 if there is none. One that is too
// long for a time.Duration counts as the longest.
func RetryInfo(err error) time.Duration {
	st, ok := status.FromError(err)
	if !ok {
		return 0
	}
	for _, detail := range st.Details() {
		info, ok := detail.(*errdetails.RetryInfo)
		if d := info.GetRetryDelay(); ok && d.AsDuration() > 0 {
			return d.AsDuration()
		}
	}
	return 0
}

// PreviousAttempts returns the number of attempts before that of the request handled in ctx. If the
// value is repeated, the largest counts; malformed values are ignored.
func PreviousAttempts(ctx context.Context) int {
	var previous int64
	for _, value := range metadata.ValueFromIncomingContext(ctx, PreviousAttemptsKey) {
		if n, ok := parseInt32(value); ok {
			previous = max(previous, n)
		}
	}
	return int(previous)
}

// WithPreviousAttempts returns the headers of a response as the application sees them: with the number of
// attempts before, unless that is 0 or there are no headers.
func WithPreviousAttempts(header metadata.MD, previous int) metadata.MD {
	if previous == 0 || header == nil {
		return header
	}
	header = maps.Clone(header)
	header[PreviousAttemptsKey] = []string{strconv.Itoa(previous)}
	return header
}
