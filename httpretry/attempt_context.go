package httpretry

import (
	"context"
	"io"
	"net/http"
)

// An attemptContext is the context that an attempt's request is sent with. A policy's attempt timeout
// ends the context of an attempt when its function returns, at the latest. The body of the response
// is read after that, so such a request has a context of its own, which the attempt's context ends only
// until Base has returned.
type attemptContext struct {
	ctx    context.Context
	end    context.CancelCauseFunc // nil if ctx is the attempt's
	unlink func() bool             // from the attempt's context
}

// newAttemptContext returns the context for a request of an attempt.
func newAttemptContext(callers, attempts context.Context) *attemptContext {
	if attempts.Done() == callers.Done() {
		return &attemptContext{ctx: attempts}
	}
	ctx, end := context.WithCancelCause(callers)
	unlink := context.AfterFunc(attempts, func() { end(context.Cause(attempts)) })
	return &attemptContext{ctx: &valuesContext{Context: ctx, values: attempts}, end: end, unlink: unlink}
}

// keep separates the context from the attempt's. It returns false if the attempt's has ended it.
func (c *attemptContext) keep() bool { return c.end == nil || c.unlink() }

// cancel ends the context.
func (c *attemptContext) cancel() {
	if c.end != nil {
		c.unlink()
		c.end(nil)
	}
}

// bind ends the context when the response's body is closed, or has been read to its end, provided that
// the request's body cannot still be in transit. If the response has no body, it ends when Base closes the request's.
func (c *attemptContext) bind(response *http.Response, sent *requestBody) *http.Response {
	if c.end == nil {
		return response
	}
	if isEmpty(response) {
		sent.afterClose(c.cancel)
		return response
	}
	body := &responseBody{ReadCloser: response.Body, release: c.cancel, atEOF: sent == nil}
	if w, ok := response.Body.(io.Writer); ok {
		response.Body = &upgradedBody{responseBody: body, Writer: w}
	} else {
		response.Body = body
	}
	return response
}

// A valuesContext has the values of another context.
type valuesContext struct {
	context.Context
	values context.Context
}

// Value returns the other context's values. Package context finds a context's own end by a key of
// type *int; without this exception, [context.Cause] would return the other context's cause, and each
// child would cost a goroutine.
func (c *valuesContext) Value(key any) any {
	if _, internal := key.(*int); internal {
		return c.Context.Value(key)
	}
	return c.values.Value(key)
}
