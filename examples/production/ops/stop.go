package ops

import (
	"context"
	"os/signal"
	"syscall"
	"time"
)

// UntilStopped returns a context that ends when the program is asked to stop, by Ctrl-C or by Kubernetes.
func UntilStopped() context.Context {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	context.AfterFunc(ctx, stop) // a second signal ends the program immediately
	return ctx
}

// A Drain is how a program stops. Delay plus Timeout must be less than the time after which the program is
// killed, which is 30 s in Kubernetes (terminationGracePeriodSeconds), with 5 s left to flush telemetry.
type Drain struct {
	Delay   time.Duration // how long load balancers need to see that this replica is not ready
	Timeout time.Duration // how long requests in flight may take after that
}

// FlushTimeout limits the time that is spent on telemetry at the end, because the collector may be gone.
const FlushTimeout = 5 * time.Second
