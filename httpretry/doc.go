// Package httpretry retries HTTP requests under the policies of a [grpcretry.Retrier]: with the same
// rules, budgets, events, metrics and log lines as RPCs.
//
//	client := &http.Client{Transport: httpretry.NewTransport(retrier, nil)}
//
// # Policies
//
// The name of a request's policy is "/http/", the host, a slash and the method, such as
// "/http/api.example.com/GET". The host is that of the URL, in lower case, with the port unless it is
// the scheme's default. [grpcretry.WithMethod] sets policies for "/http/", for
// "/http/api.example.com/" or for "/http/api.example.com/GET"; a longer pattern wins, and one in another spelling
// matches nothing. Each host has a budget of its own, unless [grpcretry.WithBudget] says otherwise.
//
// # Requests
//
// Requests with the methods GET, HEAD, OPTIONS, TRACE, PUT and DELETE are retried, and those with a
// header Idempotency-Key or X-Idempotency-Key. Others go straight to Base, without a budget or an event.
// With [grpcretry.WithUnsentOnly], requests with any method are retried, but only if the server
// certainly did not act on the attempt (no connection could be made, or the stream was refused), or if
// it responded with Retry-After. This holds if Base makes one exchange for each attempt: one that follows
// redirects or fails over to another server must report the first error. net/http itself repeats a request with
// an Idempotency-Key when a connection breaks, and reports the last.
//
// A request's body is sent again with [http.Request.GetBody], which [http.NewRequest] sets for
// buffers and readers of the standard library. A body without GetBody is sent again only if it
// was never read before: for an empty one, set [http.NoBody]. If that alone rules out another attempt,
// events and metrics have the reason [grpcretry.ErrCommitted], and after a first attempt the caller gets the response, or
// Base's error, as it is.
//
// # Responses
//
// A status of 400 or above is a failure with a status code:
//
//   - 429: RESOURCE_EXHAUSTED
//   - 502, 503, 504: UNAVAILABLE
//   - 400 and other 4xx: INVALID_ARGUMENT, except 401: UNAUTHENTICATED, 403: PERMISSION_DENIED,
//     404 and 410: NOT_FOUND, 408: DEADLINE_EXCEEDED, 409: ABORTED, 412: FAILED_PRECONDITION,
//     416: OUT_OF_RANGE
//   - 501: UNIMPLEMENTED
//   - 500 and others: INTERNAL
//
// A connection that cannot be made, breaks or times out before the response has arrived is UNAVAILABLE;
// most other errors of Base are UNKNOWN, a proxy's refusal to connect among them, and a certificate that
// cannot be verified is never retried. The policy's codes decide, by default RESOURCE_EXHAUSTED and
// UNAVAILABLE. A classifier finds a response's status and header in a [*StatusError], and Base's error, by
// [errors.As].
//
// Retry-After, in seconds or as a date, is obeyed like a RetryInfo: the wait is at least that long, with
// up to 20% added, and a wait longer than [grpcretry.WithMaxServerDelay] ends the call. Zero, past dates and
// everything else are ignored; of several values, the longest counts. It does not make a status retryable.
//
// When no attempt follows, the caller gets the last response unchanged, whatever its status. Before the
// wait for a retry, a response is read to its end, within [MaxDrained] and [MaxDrainTime], so that its
// connection can be used again, and so that the caller gets it if the call ends in the wait. If there is
// more of it, or if net/http uncompresses it (it is closed unread, because such a body cannot be closed
// while its server stalls), the caller gets an error then.
//
// An attempt for which no connection could be made is unsent: it does not count, costs nothing, and is
// repeated for as long as [grpcretry.WithPatience] says.
//
// # Time
//
// The request's context, and [http.Client]'s Timeout, limit all attempts together.
// [grpcretry.WithAttemptTimeout] limits each attempt until the header of the response has arrived, and
// not the time to read the body. A channel in the deprecated field Request.Cancel ends attempts, but not
// the wait between them.
//
// If a Transport is the Base of another one, directly or below other RoundTrippers, only the outer one
// retries, unless a RoundTripper between them has changed the host or the method.
package httpretry
