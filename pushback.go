package grpcretry

import (
	"math"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
)

const (
	pushbackKey         = "grpc-retry-pushback-ms"     // gRFC A6 #pushback
	noRetry             = "-1"                         // the value of pushbackKey that this package's servers send for "do not retry"
	previousAttemptsKey = "grpc-previous-rpc-attempts" // gRFC A6 #exposed-retry-metadata
)

// A Pushback is a server's instruction about the next attempt.
type Pushback struct {
	Delay  time.Duration // the wait that the server asked for, unchanged; 0 if Stop is set
	Stop   bool          // the server forbids further attempts
	Source WaitSource    // WaitPushback or WaitRetryInfo
}

// PushbackFrom returns a server's instruction about the next attempt, from the trailer and the
// error of a failed RPC; ok is false if there is none.
//
// The trailer grpc-retry-pushback-ms takes precedence: a value from 0 to 2147483647, in plain
// decimal digits, is a wait in milliseconds. Any other value, and a repeated value, means stop
// (gRFC A6 #pushback, which leaves repeated values open). Without that trailer, a
// google.rpc.RetryInfo with a positive delay in the status details is used. PushbackFrom applies
// no limit; [WithMaxServerDelay] does.
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

// parsePushback returns the wait in the values of grpc-retry-pushback-ms; valid is false if they
// mean stop.
func parsePushback(values []string) (delay time.Duration, valid bool) {
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

// retryInfo returns the delay in the first google.rpc.RetryInfo of err's details that is valid; 0
// if there is none.
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
