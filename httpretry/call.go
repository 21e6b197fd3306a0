package httpretry

import (
	"cmp"
	"context"
	"errors"
	"net/http"
	"sync/atomic"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/grpcretry/grpcretry"
	"github.com/grpcretry/grpcretry/internal/errtype"
)

// A call is one request, from its first attempt to the response or error that the caller gets. Its
// methods run one at a time, on the caller's goroutine.
type call struct {
	base    http.RoundTripper
	request *http.Request // the caller's, which never changes

	// body is that of the latest attempt; nil before the first, and for requests without a body.
	body     atomic.Pointer[requestBody]
	own      *attemptContext // of the latest attempt; nil before the first
	response *http.Response  // of the latest attempt, if that has one, and after discard all of it
	failed   error           // the latest attempt's, as the engine sees it
	waited   bool            // for another attempt, which has not begun
	ended    bool            // RoundTrip returns normally
}

// attempt makes one attempt. Its error describes a response that is a failure, too.
func (c *call) attempt(ctx context.Context) error {
	if c.waited && !c.body.Load().retire() { // the body turned out to be read when a retry had been decided on
		return c.failed // the engine asks isLast
	}
	c.response, c.failed, c.waited = nil, nil, false
	if err := c.nextBody(); err != nil {
		c.failed = grpcretry.Permanent(&failure{err: err})
		return c.failed
	}
	if c.own != nil {
		c.own.cancel() // the request's body may still be in transit
	}
	own := newAttemptContext(c.request.Context(), ctx)
	c.own = own
	response, err := c.send(own)
	if err == nil && !own.keep() {
		closeBody(response)
		err = context.Cause(ctx)
	}
	switch {
	case err != nil:
		own.cancel()
		c.failed = c.newFailure(ctx, err)
	case response == nil: // a fault of Base, which http.Client reports
		own.cancel()
		return nil
	default:
		c.response = own.bind(response, c.body.Load())
		c.failed = newStatusError(response)
	}
	return c.failed
}

// isLast reports whether no other attempt can follow, because the body cannot be sent again, or because
// the request was cancelled. The engine may call it on another goroutine.
func (c *call) isLast() bool {
	return !c.body.Load().canRepeat() || isClosed(c.request.Cancel) //nolint:staticcheck // deprecated, but http.Client still sets it
}

func isClosed(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}

// send hands a copy of the request to Base. The copy is shallow: the trailer's values may be set while
// the body is read.
func (c *call) send(own *attemptContext) (*http.Response, error) {
	returned := false
	defer func() {
		if !returned {
			own.cancel()
		}
	}()
	sent := c.request.WithContext(own.ctx)
	if body := c.body.Load(); body != nil {
		sent.Body = body
	}
	response, err := c.base.RoundTrip(sent)
	returned = true
	if err != nil {
		closeBody(response) // http.Client ignores it
		return nil, err
	}
	if response != nil {
		response.Request = c.original(response.Request, sent)
	}
	return response, nil
}

// original returns what a caller expects as a response's Request: the context of an attempt ends with
// it, and marks further requests as a part of it. With HTTP/2, net/http returns a copy of what was sent.
func (c *call) original(request, sent *http.Request) *http.Request {
	switch {
	case request == sent:
		return c.request
	case request != nil && request.Context() == sent.Context():
		return request.WithContext(c.request.Context())
	default:
		return request
	}
}

// nextBody gives the next attempt its body.
func (c *call) nextBody() error {
	request, latest := c.request, c.body.Load()
	switch {
	case request.Body == nil || request.Body == http.NoBody:
	case latest == nil:
		c.body.Store(&requestBody{source: request.Body, only: request.GetBody == nil})
	case request.GetBody == nil:
		c.body.Store(latest.again())
	default:
		body, err := request.GetBody()
		if err == nil && body == nil {
			err = errNoBody
		}
		if err != nil {
			return err
		}
		c.body.Store(&requestBody{source: body})
	}
	return nil
}

var errNoBody = errors.New("httpretry: the request's GetBody returned nil")

// newFailure returns the failure of an attempt without a response.
func (c *call) newFailure(ctx context.Context, err error) error {
	switch {
	case ctx.Err() != nil && c.request.Context().Err() == nil: // the attempt timeout
		return &failure{err, codes.DeadlineExceeded}
	case c.isOver(ctx): // the error tells of an earlier attempt instead
		return &failure{err, status.FromContextError(cmp.Or(ctx.Err(), context.Canceled)).Code()}
	case ctx.Err() != nil: // whatever the error looks like, it is the context that has ended
		return &failure{err: err}
	case c.body.Load().readError() != nil:
		return grpcretry.Permanent(&failure{err: err})
	default:
		return classify(err)
	}
}

// isOver reports, after an attempt that was not the first, whether the request has ended, or its deadline has passed: http.Client's
// Timeout closes Cancel by a timer of its own, maybe before the context ends.
func (c *call) isOver(ctx context.Context) bool {
	if a, _ := grpcretry.AttemptFromContext(ctx); a.Number == 1 {
		return false
	}
	d, limited := ctx.Deadline()
	return ctx.Err() != nil || limited && !time.Now().Before(d) || isClosed(c.request.Cancel) //nolint:staticcheck // see isLast
}

// discard prepares for another attempt, which has been decided on. The call may end in the wait before it, so
// the response stays if all of it can be kept. If the request's body cannot be sent again after all, the next
// attempt fails immediately.
func (c *call) discard() {
	c.waited = true
	if !c.body.Load().retire() {
		if f, ok := errtype.As[*failure](c.failed); ok && f.code == codes.DeadlineExceeded {
			c.failed = &failure{grpcretry.ErrAttemptTimeout, f.code} // what Base returned looks like the caller's
		}
		return
	}
	if r := c.response; r != nil && r.Body != nil && !drain(c.request.Context(), r) {
		c.response = nil
	}
}

// result returns what the caller gets, if Do has returned err: an error instead of a response if the caller has gone in the
// wait after it.
func (c *call) result(err error) (*http.Response, error) {
	c.ended = true
	e, ours := err.(*grpcretry.Error) //nolint:errorlint // Base's own error may hold another call's
	gone := ours && (errors.Is(e, context.Canceled) || errors.Is(e, context.DeadlineExceeded))
	if c.response != nil && !(c.waited && gone) || err == nil {
		return c.response, nil
	}
	closeBody(c.response)
	if ours {
		return nil, &gaveUp{e}
	}
	if f, ok := errtype.As[*failure](err); ok && err == c.failed { //nolint:errorlint // an attempt timeout's error may hold it
		return nil, f.err
	}
	return nil, err
}

// A gaveUp is the error of a request that failed although its failure was retryable.
type gaveUp struct{ err *grpcretry.Error }

func (e *gaveUp) Error() string { return e.err.Error() }

func (e *gaveUp) Unwrap() error { return e.err }

// Timeout reports whether the request's deadline has passed, or the last error was a timeout. It
// makes the error a timeout for [net/url.Error], among others.
func (e *gaveUp) Timeout() bool {
	switch status.Code(e.err) {
	case codes.DeadlineExceeded:
		return true
	case codes.Canceled:
		return false
	}
	last, ok := errtype.As[interface {
		error
		Timeout() bool
	}](e.err.Last)
	return ok && last.Timeout()
}

// end closes the request's body, unless Base has done so or still will. After a panic, Base will not, and
// nobody gets the response.
func (c *call) end() {
	if !c.ended {
		closeBody(c.response)
	}
	switch body := c.body.Load(); {
	case body != nil:
		body.end(!c.ended)
	case c.request.Body != nil:
		c.request.Body.Close()
	}
}
