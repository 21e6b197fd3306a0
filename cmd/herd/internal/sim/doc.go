// Package sim simulates many clients that retry against servers that fail, so that a policy can be
// tried before an incident tries it. It runs the decision engine and the budgets of package
// grpcretry, in virtual time: a minute of a thousand clients takes milliseconds, and the result is
// what the library would do.
//
// A [Scenario] has groups of clients, servers, and strategies to compare. [Run] simulates it under
// one of them, [Compare] under all. The [Studies] are shipped scenarios, each with a lesson; cmd/herd
// runs and draws them, and docs/herd.md explains them.
//
// # What is simulated
//
// A simulation is a sequence of events: a call starts, an attempt arrives, its work is done, its
// response is back, its timeout is reached, a wait is over. Between two of them nothing changes.
// Events of the same time happen in the order in which they were caused. Messages take the time of
// the network in each direction, and none is lost.
//
// Clients do what the library's interceptors do: each call has a drive.Plan; the
// simulator sends attempts and keeps timers, reports how attempts end, and does what the Plan
// says. No rule of the engine is repeated here: which failures are retried, what pushback
// means, how long to wait, when a deadline is too close, whether a timeout ends an attempt,
// when a hedge is due, and all deposits, withdrawals and refunds are the Plan's. Each process
// of a group has an engine and a budget of its own, as each Retrier has one for each target.
// With MaxAttempts 1 calls pass straight through, as in the library.
//
// The delay of a call with [Hedging] comes from the library's [grpcretry.HedgeDelay], which
// is also given the latency of first attempts. The first success wins and ends the other
// attempts: their cancellation takes the time of the network, and a server then drops the work,
// unless it ignores cancellation.
//
// Servers that call others take the measures of the library's server interceptors if the strategy says so:
// each request that such a server handles is a Request as the interceptors make it, which the Plan of
// the downstream call finds in its context. The simulator only carries the headers: whether an attempt is a
// retry, and whether a response says "do not retry".
//
// Connections and streams are not simulated: every attempt reaches a server, so no call waits
// for a connection.
//
// Servers are simple on purpose: they count calls, or they have workers and a queue ([Server]), in
// one process or in several that take turns. Pushback is sent with [grpcretry.SetPushback].
package sim
