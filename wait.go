package grpcretry

import "fmt"

// WaitSource names the origin of the wait before an attempt.
type WaitSource int

// The sources of a wait.
const (
	WaitNone       WaitSource = iota // no wait, as before a first attempt
	WaitBackoff                      // the policy's [Backoff]
	WaitPushback                     // the server's grpc-retry-pushback-ms trailer
	WaitRetryInfo                    // a google.rpc.RetryInfo in the server's status
	waitHedgeDelay                   // a hedged call's [HedgeDelay], which passed without a response
	waitNonFatal                     // no wait: another attempt in the hedged call failed
	WaitConnect                      // the wait for a connection, and the backoff after it
)

var waitSourceNames = [...]string{"none", "backoff", "pushback", "retry_info", "hedge_delay", "non_fatal", "connect"}

// String returns "none", "backoff", "pushback", "retry_info", "hedge_delay", "non_fatal" or
// "connect".
func (s WaitSource) String() string {
	if s < 0 || int(s) >= len(waitSourceNames) {
		return fmt.Sprintf("WaitSource(%d)", int(s))
	}
	return waitSourceNames[s]
}
