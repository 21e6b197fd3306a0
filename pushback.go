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
