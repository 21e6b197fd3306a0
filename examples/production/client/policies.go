package client

import (
	"time"

	"github.com/grpcretry/grpcretry"
	echov1 "github.com/grpcretry/grpcretry/proto/echo/v1"
)

// maxAttempts limits the attempts of a call, the first included, unless the settings say otherwise.
const maxAttempts = 4

// policies are the decisions of this client. What is not here is the library's default: retries after
// UNAVAILABLE and RESOURCE_EXHAUSTED, jitter, and a budget of one retry for five answered calls, so
// that retries cannot make an outage worse.
func policies() []grpcretry.Option {
	return []grpcretry.Option{
		grpcretry.WithMaxAttempts(maxAttempts),

		// Nothing runs twice unless its proto allows it. Append has no level, so it survives a restart of
		// the server, but a lost response is reported, not retried.
		grpcretry.WithSafeMethods(),

		// The slowest reads are sent to a second replica: at most 5% more load, paid from the budget.
		grpcretry.WithMethod(echov1.EchoService_Echo_FullMethodName, grpcretry.WithHedging(grpcretry.Hedging{
			Delay: grpcretry.HedgeAtQuantile(0.95, 5*time.Millisecond, time.Second),
		})),

		// A replica that hangs must not use up the whole deadline: 1.5 times what nearly all calls need.
		grpcretry.WithMethod(echov1.EchoService_Put_FullMethodName, grpcretry.WithAttemptTimeout(2*time.Second)),
	}
}
