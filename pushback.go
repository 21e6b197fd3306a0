package grpcretry

import (
	"time"

	"google.golang.org/grpc/metadata"

	"github.com/grpcretry/grpcretry/internal/wire"
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
// The trailer grpc-retry-pushback-ms takes precedence: a value from 0 to 2147483647, in decimal
// digits without leading zeros, is a wait in milliseconds. Any other value, and a repeated value, means stop
// (gRFC A6 #pushback, which leaves repeated values open). Without that trailer, a
// google.rpc.RetryInfo in the status details is used if its delay is positive. PushbackFrom applies no limit;
// [WithMaxServerDelay] does. A classifier that returns [Stop] if ok is false retries only what the server asks for.
func PushbackFrom(trailer metadata.MD, err error) (p Pushback, ok bool) {
	if values := trailer[wire.PushbackKey]; len(values) > 0 {
		delay, valid := wire.Pushback(values)
		return Pushback{Delay: delay, Stop: !valid, Source: WaitPushback}, true
	}
	if delay := wire.RetryInfo(err); delay > 0 {
		return Pushback{Delay: delay, Source: WaitRetryInfo}, true
	}
	return Pushback{}, false
}

// forbidsRetry reports whether a server's trailer says "do not retry".
func forbidsRetry(trailer metadata.MD) bool {
	p, _ := PushbackFrom(trailer, nil)
	return p.Stop
}
