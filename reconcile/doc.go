// Package reconcile applies the policies of package grpcretry to keys in a Kubernetes workqueue: the
// same backoff, the same budget, the same obedience to what a server says.
//
// A level-triggered controller never gives up on a key. In an outage it needs a limit on how often it
// tries, for all keys together. [NewRateLimiter] returns a rate limiter for client-go's workqueue that
// has one: the Retrier's budget pays for a key's first retries, and a key for which it no longer pays
// waits in a slow lane, which lets one key per second pass, or ten if the limiter knows no queue. [NewQueue]
// returns a workqueue whose keys leave the slow lane early once the backend responds again.
//
// With controller-runtime, [Wrap] adds the other two guards to a reconciler, a limit on the work
// in flight and an outbound rate, and turns the waits that servers name into RequeueAfter.
// [Result] does only that, for a single error.
//
// docs/reconcile.md in the repository has the rules, the figures and the metrics.
package reconcile
