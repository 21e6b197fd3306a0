// Package sim simulates many clients that retry against servers that fail, so that a
// policy can be tried before an incident does. It drives the decision engine and the
// budgets of package grpcretry themselves, in virtual time: a minute of a thousand clients
// takes milliseconds, and what it shows is what the library would do.
//
// A [Scenario] has groups of clients, servers, and the strategies to compare. [Run]
// simulates it under one of them, [Compare] under all. The [Studies] are shipped scenarios
// that each teach something; program cmd/herd runs and draws them, and docs/herd.md shows
// what they teach. [ReadScenarios] reads others from JSON.
//
// # What is simulated
//
// A simulation is a sequence of events: a call begins, an attempt arrives, its work is
// done, its answer is back, its timeout is reached, a wait is over. Between two of them
// nothing changes. Events of the same time happen in the order in which they were caused.
// Messages take the time of the network in each direction, and none is lost.
//
// Clients do what the library's interceptors do: they start an attempt, hand its failure
// to [grpcretry.Engine.Judge], and wait as long as that says. No rule of the engine is
// repeated here: which failures are retried, what pushback means, how long to wait, when a
// deadline is too near, what a budget allows, all of that is asked. Each process of a group
// has an engine and a budget of its own, as each Retrier has one for each target.
//
// A call of a strategy with [Hedging] has attempts in flight at the same time. The delay is
// asked of the library's [grpcretry.HedgeDelay] when the call begins, and told how long first
// attempts took; whether a hedge that is due is sent, [grpcretry.Engine.Due] says. The first
// success wins, and ends the others: the news of it takes the time of the network, and a
// server drops the work then, unless it ignores that. Streams are not simulated.
//
// Servers are simple on purpose: they count, or they have workers and a queue ([Server]), in
// one process or in several that take turns. Pushback is sent with [grpcretry.SetPushback].
package sim
