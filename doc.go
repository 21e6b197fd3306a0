// Package grpcretry provides client interceptors that retry gRPC calls, with jittered backoff, a
// retry budget, server pushback, and a span event for every attempt, and server interceptors that keep
// the retries of services in a row from multiplying. It is for teams that call services over gRPC
// without a service mesh.
//
//	cc, err := grpc.NewClient(target, append(grpcretry.DialOptions(),
//		grpc.WithTransportCredentials(creds))...)
//
// That is a working client. A program with several clients, or with settings that may be invalid,
// creates a [Retrier] with [New] and gives each ClientConn its [Retrier.DialOptions]. A Retrier
// is safe for concurrent use, and its clients share its budgets, metrics and observers.
//
// # What it does
//
// A call is a sequence of attempts. After a failed attempt the library answers three questions,
// and makes another attempt only if all three answers allow it:
//
//   - May this failure be retried at all? UNAVAILABLE and RESOURCE_EXHAUSTED may, unless the
//     server forbids it or the message was too large; [WithCodes] and [WithClassifier] change
//     that.
//   - When? After the delay that the server sent in grpc-retry-pushback-ms or
//     google.rpc.RetryInfo, otherwise after a backoff: 50 to 100 ms, 200 to 400 ms, then 0.8 to
//     1.6 s, or, after RESOURCE_EXHAUSTED, up to 1 s doubling to 20 s. A wait that would reach the
//     deadline is not started.
//   - Does the budget allow it, now that it is due? See Budgets below.
//
// A call makes at most 4 attempts ([WithMaxAttempts]).
//
// Calls to a target that is failing learn from one another ([WithPatience]). A retry that can learn
// nothing, because another call has just failed, is not sent: the call waits again, as long as
// the wait ends within 10 s of the target's first failure. Otherwise a failure ends its call immediately.
//
// An attempt that fails because there is no connection has reached no server. It is not counted and
// costs nothing. The call waits for the connection, and then for its backoff, so that calls survive
// the restart of a server.
//
// # What is never retried
//
//   - A response that the application has already seen part of.
//   - A call whose own context has ended, with CANCELED or DEADLINE_EXCEEDED.
//   - A call that the server forbids to retry, by a negative or malformed pushback.
//   - A call through a ClientConn that has been closed.
//   - By default, an RPC that the balancer drops on purpose, and a message over a size limit.
//
// A first attempt is never delayed, and a slow attempt is never cut unless another one takes its
// place or the call has no deadline. Nothing is logged without a logger ([WithLogger]).
//
// UNAVAILABLE does not prove that the server did nothing. For methods that must not run twice, turn
// retries off with [Disable], or restrict them to attempts that certainly reached no server:
//
//	grpcretry.WithMethod("/pkg.Service/Charge", grpcretry.WithUnsentOnly(true))
//
// # Streams
//
// Client, server and bidirectional streams are retried like unary calls until they are committed.
// A stream is committed when
//
//   - the application receives a message, or headers from Header;
//   - SendMsg returns io.EOF after headers have arrived, because only RecvMsg has the status then;
//   - the application calls Context or Trailer, which never wait;
//   - the application sends the same message object twice in a row;
//   - the application has sent more than [WithBufferLimit] keeps for replay, 256 KiB of encoded
//     messages by default, or a message of unknown size, which is one that is neither a proto.Message nor
//     has a Size method. The one request of a server stream does not count;
//   - all streams of the Retrier together keep 64 MiB.
//
// Until then, the messages sent and CloseSend are sent again, in order, to the next attempt. After
// that, gRPC's errors are returned unchanged and messages have no overhead;
// [Retrier.StreamClientInterceptor] has the details. With WithBufferLimit(0) streams pass through
// untouched. The call option [grpc.MaxRetryRPCBufferSize] has the same effect as WithBufferLimit.
//
// The attempt timeout of a stream covers the time in which the application waits for its first message;
// for a client stream, that is the response. The attempt limit applies to the whole call, however often RecvMsg
// is called. In some cases gRPC reports that a stream has ended well although no server can have
// said so, because the connection was lost; such an end is treated as UNAVAILABLE.
//
// A stream that fails after its first message can be resumed only by the application, because only
// the application knows what it did with the messages and what to request next. Open a new stream
// that continues where the last one ended; that is a new call with its own attempts.
//
// # Other interceptors
//
// Interceptors chained after this package's run for each attempt, and must let it end: they return after
// their invoker, and the streams that they wrap see SendMsg and RecvMsg at the same time after a retry. See
// [Retrier.UnaryClientInterceptor] and [Retrier.StreamClientInterceptor].
//
// # Options
//
// Pass [Option] values to [New], or to one of its shorthands [DialOptions],
// [UnaryClientInterceptor] and [StreamClientInterceptor]. Options that control how calls are
// retried are of type [CallOption]: they can also be passed to [WithMethod] or, as a
// [grpc.CallOption], to a single call. [WithIdempotencyLevel] applies them to the methods whose proto
// declares a level. The narrower scope wins, then the later option.
//
// Policies may also come from a service config ([WithServiceConfig]), or from the one that the
// channel's resolver delivers ([WithResolverServiceConfig]). [Retrier.Update] changes policies
// while calls run. Doubtful ones are logged ([WithLogger]).
//
// For methods that may run twice at the same time, [WithHedging] sends a second attempt if the
// first is slow. It is off unless you name a method.
//
// # Budgets
//
// A [Budget] limits retries to what the backend can bear, and never delays a first attempt. By
// default each target has a budget of its own ([NewRatioBudget]): a call that the server answers
// earns a fifth of a retry, first for a reserve of 3 and then for the next 10 s, and a retry that
// succeeds gets its token back. So while nothing is answered, clients soon make one attempt per
// call. [WithRatioBudget] sets other numbers, and [WithBudget] another budget, such as
// [NewThrottle] or [Unlimited].
//
// # Errors
//
// A call that failed despite being retryable returns an [*Error] with the server's last status,
// the attempts, and the reason for stopping, such as [ErrBudgetExhausted]. If the first attempt
// fails with something that is not retryable, and the caller's context has not ended, gRPC's error is returned
// unchanged.
//
// # Other retries
//
// gRPC's built-in retries, those of a service config, are off with [DialOptions]. If they are on,
// methods with a retryPolicy in the service config are left to gRPC, unless [WithResolverServiceConfig] or
// [WithServiceConfig] is given, or the method has [WithUnsentOnly]. Retry policies delivered by xDS are invisible to this
// package, so use DialOptions with xDS. gRPC's transparent retries of unary calls that no server has seen stay
// on and are not counted; streams are sent again by this package, which does not count the first such attempt
// either. If this package's interceptor is chained twice, only the outer one retries.
//
// # Services that call one another
//
// Retries of services in a row multiply. The server interceptors prevent that, if handlers make their
// calls with their own context:
//
//	server := grpc.NewServer(
//		grpc.ChainUnaryInterceptor(grpcretry.UnaryServerInterceptor()),
//		grpc.ChainStreamInterceptor(grpcretry.StreamServerInterceptor()))
//
// [UnaryServerInterceptor] has the details. Package balancer has a load-balancing policy that sends
// each attempt of a call to a backend that the call has not tried.
//
// # Everything else that calls out
//
// [Retrier.Do] runs any function under the same policies, budgets and telemetry. Package httpretry does
// so for HTTP requests, and module reconcile for the keys of a Kubernetes workqueue.
//
// # Where to read on
//
// Span events, metrics, logs and the debug page: [docs/observing.md]. Hedging:
// [docs/hedging.md]. Services that call one another: [docs/services.md]. What outages of servers
// do to clients: [docs/outages.md]. What the library costs: [docs/performance.md]. The rules, for
// those who change the code:
// [docs/design.md].
//
// "A6" in this documentation is gRFC A6, client retries, at revision 1fd061a of
// grpc/proposal: [A6-client-retries.md].
//
// [docs/observing.md]: https://github.com/grpcretry/grpcretry/blob/main/docs/observing.md
// [docs/hedging.md]: https://github.com/grpcretry/grpcretry/blob/main/docs/hedging.md
// [docs/services.md]: https://github.com/grpcretry/grpcretry/blob/main/docs/services.md
// [docs/outages.md]: https://github.com/grpcretry/grpcretry/blob/main/docs/outages.md
// [docs/performance.md]: https://github.com/grpcretry/grpcretry/blob/main/docs/performance.md
// [docs/design.md]: https://github.com/grpcretry/grpcretry/blob/main/docs/design.md
// [A6-client-retries.md]: https://github.com/grpc/proposal/blob/1fd061ad8e7c46422b326e5a60cf68d042476205/A6-client-retries.md
package grpcretry
