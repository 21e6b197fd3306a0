// Package grpcretry retries gRPC calls from Go clients, as interceptors: with jittered
// backoff, within a budget, as the server asks for it, and so that every attempt can be
// seen. It is for teams that call services over gRPC without a service mesh.
//
//	cc, err := grpc.NewClient(target, append(grpcretry.DialOptions(),
//		grpc.WithTransportCredentials(creds))...)
//
// # What it does
//
// A call is a row of attempts. When an attempt fails, three questions are asked, and
// only then does anybody wait:
//
//   - May this failure be retried at all? UNAVAILABLE and RESOURCE_EXHAUSTED are, unless
//     the server says otherwise or the message was too large; [WithCodes] and
//     [WithClassifier] change that.
//   - When? After what the server said in grpc-retry-pushback-ms or google.rpc.RetryInfo,
//     else after a backoff with full jitter: 100 ms doubling to 5 s, after
//     RESOURCE_EXHAUSTED 1 s doubling to 20 s. A wait that would end at the deadline or
//     after it is not begun.
//   - Does the budget allow it? By default each call that the server answers earns a fifth
//     of a retry, first for a reserve of 3, then for the next 10 s, for each target. A retry
//     that succeeds gets its token back.
//
// A call makes at most 4 attempts ([WithMaxAttempts]).
//
// An attempt that fails because there is no connection has reached no server. It does not
// count, is not charged, and is followed by a wait for the connection, at most 10 s in all
// ([WithConnectWait]), and then for the backoff: so calls survive the restart of a server.
//
// # What it never does
//
//   - Retry what the application has already seen a part of.
//   - Retry the CANCELED or DEADLINE_EXCEEDED of the caller's own context.
//   - Hold a first attempt back.
//   - Wait when no attempt can follow the wait.
//   - Cut an attempt that is slow when no other can take its place.
//   - Log, unless given a logger ([WithLogger]).
//
// UNAVAILABLE does not prove that the server did nothing. Turn retries off for methods
// that must not run twice: WithMethod("/pkg.Service/Charge", Disable()).
//
// # Streams
//
// Client, server and bidirectional streams are retried like unary calls, until they are
// committed. A stream is committed once the application has seen anything of it:
//
//   - a message, or headers from Header;
//   - io.EOF from SendMsg, if headers had come: only RecvMsg has the status then.
//
// It is also committed when the application calls Context or Trailer, which never wait, or
// when it has sent more than [WithBufferLimit] keeps for replay, by default 256 KiB of memory.
// The one request of a server stream does not count. A message whose size is unknown (one that
// is not a proto.Message and has no Size method) commits too.
//
// Until then the messages sent, and CloseSend, are sent again in order to the next
// attempt. After that, errors are returned as gRPC made them, and a message costs nothing more
// than without the interceptor; [Retrier.StreamClientInterceptor] has the details. With
// WithBufferLimit(0) streams pass through untouched. The call option
// [grpc.MaxRetryRPCBufferSize] has the same effect as WithBufferLimit.
//
// The attempt timeout of a stream covers the time until its first message arrives, or the
// response to a client stream. A call has one limit of attempts, however often RecvMsg is
// called. An end without a failure that no server can have sent, which gRPC reports in some
// cases when it has lost the connection, is treated as UNAVAILABLE.
//
// A stream that fails after its first message can be resumed only by the application, because
// only the application knows what it has done with the messages, and what to ask for next.
// Open a new stream from where the last one ended; that is a new call with its own attempts.
//
// # Options
//
// [Option]s go to [New], or to one of the short forms [DialOptions],
// [UnaryClientInterceptor] and [StreamClientInterceptor]. Those that say how calls are
// retried are [CallOption]s: they also work within [WithMethod] and as grpc.CallOption
// of a single call. The narrower scope wins, then the later option.
//
// # Hedging
//
// A method that may run twice at the same time can have a second attempt before the first
// has failed, when that is slow: [WithHedging]. It is off unless a method is named.
//
// # Errors
//
// A call that was retryable and failed all the same returns an [*Error]: the server's
// last status, the attempts, and the reason to stop. A first failure that is not
// retryable is returned untouched.
//
// # Spans and their attributes
//
// On the caller's span, or on the span that [WithCallSpan] makes, each attempt leaves one
// event when it ends, [SpanEventAttempt]:
//
//	key                         constant           value
//	grpcretry.attempt.number    AttrAttemptNumber        int: 1 for the first attempt
//	rpc.response.status_code    AttrStatusCode     string: OK, UNAVAILABLE, …
//	network.peer.address        AttrPeer           string: the server; absent if none was reached
//	grpcretry.decision          AttrDecision       string: success, retry, stop, or lost to another attempt of a hedged call
//	grpcretry.wait_ms           AttrWait           int: the wait that follows, in ms; on stop the one refused, if any
//	grpcretry.wait_source       AttrWaitSource     string: where it comes from, backoff, pushback, retry_info or connect
//	grpcretry.reason            AttrReason         string: on stop, one of those below
//	grpcretry.budget.balance    AttrBudgetBalance  float: on failure, retries left in the budget
//	grpcretry.attempt.hedge     AttrHedge          bool: of hedged calls, whether others were under way when it was sent
//	grpcretry.attempt.sent_after  AttrSentAfter    string: of hedged calls, why it was sent: hedge_delay, non_fatal, pushback, retry_info or connect
//
// A call that ends in the wait for a retry leaves [SpanEventStop] with AttrReason after them.
//
// The span of WithCallSpan is named after the method, has the kind internal, ends with
// the call's final status, and carries rpc.system.name, rpc.method, AttrStatusCode,
// grpcretry.attempts (AttrAttemptCount, int: attempts made) and, if the call failed,
// AttrReason; of a hedged call that succeeded, grpcretry.winner (AttrWinner, int: the
// number of the attempt).
//
// The reasons are exhausted, budget, deadline (too near for another attempt),
// max_elapsed, pushback, not_retryable, committed, conn_closed, not_connected, left_to_grpc,
// deadline_exceeded (the caller's deadline passed) and cancelled.
//
// # Metrics
//
// With [WithMeterProvider], for OpenTelemetry:
//
//	instrument                   constant              kind, unit          attributes
//	grpcretry.calls              MetricCalls           counter, {call}     method, target, AttrOutcome
//	grpcretry.attempts           MetricAttempts        counter, {attempt}  method, target, AttrStatusCode, AttrDecision
//	grpcretry.rescued_calls      MetricRescuedCalls    counter, {call}     method, target
//	grpcretry.wasted_attempts    MetricWastedAttempts  counter, {attempt}  method, target
//	grpcretry.hedges             MetricHedges          counter, {hedge}    method, target, AttrHedgeResult
//	grpcretry.wait.duration      MetricWaitDuration    histogram, s        method, target, AttrWaitSource
//	grpcretry.budget.balance     MetricBudgetBalance   gauge, {retry}      target, AttrBudget
//	grpcretry.budget.refusals    MetricBudgetRefusals  counter, {retry}    target, AttrBudget
//
// The method is rpc.method, "pkg.Service/Method", or "other" for those that no generated
// stub calls. The target is grpcretry.target (AttrTarget), in gRPC's canonical form.
// grpcretry.outcome (AttrOutcome) is first_try, recovered, hedge_won, or a reason of those
// above, see [Event.Outcome]. grpcretry.hedge.result (AttrHedgeResult) is won or wasted. grpcretry.budget (AttrBudget) is where the budget was set: "all" for all
// methods, the pattern of a [WithMethod], or "call" for budgets of single calls, which
// have no balance; nor has one without a limit. A status code that gRPC does not have
// is OTHER.
//
// A rescued call succeeded after a retry, a wasted attempt is a retry that reached a server and failed:
// rescued / (rescued + wasted) is the share of retries that helped. A decision "retry"
// is counted when it is made; the call may end in the wait.
//
// # Other retries
//
// gRPC's own retries by service config are off with [DialOptions]; where they are on,
// methods with a retryPolicy in the service config are left to gRPC. Policies that come
// by xDS cannot be seen from here: use DialOptions with xDS. gRPC's transparent retries,
// of requests that no server has seen, stay on and count for nothing here. Of two
// interceptors of this package in one chain, the outer one retries.
//
// "A6" in this documentation is gRFC A6, client retries, of grpc/proposal.
package grpcretry
