package httpretry

import (
	"context"
	"errors"
	"net/http"

	"github.com/grpcretry/grpcretry"
)

// A call is one request, from its first attempt to the response or error that the caller gets. Its
// methods run one at a time, on the caller's goroutine.
type call struct {
	base    http.RoundTripper
	request *http.Request // the caller's, which never changes

	body     *requestBody   // of the latest attempt; nil before the first, and for requests without a body
	response *http.Response // of the latest attempt, if that has one and it was not discarded
	failed   error          // the latest attempt's failure
	spent    bool           // the body turned out to be read when a retry had been decided on
	ended    bool           // RoundTrip returns normally
}

// attempt makes one attempt. Its error describes a response that is a failure, too.
func (c *call) attempt(ctx context.Context) error {
	if c.spent {
		return grpcretry.Permanent(c.failed)
	}
	c.response, c.failed = nil, nil
	if err := c.nextBody(); err != nil {
		c.failed = &failure{err: err}
		return grpcretry.Permanent(c.failed)
	}
	own := newAttemptContext(c.request.Context(), ctx)
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
		c.response = own.bind(response, c.body == nil)
		c.failed = newStatusError(response)
	}
	if c.failed != nil && !c.body.canRepeat() {
		return grpcretry.Permanent(c.failed)
	}
	return c.failed
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
	if c.body != nil {
		sent.Body = c.body
	}
	response, err := c.base.RoundTrip(sent)
	returned = true
	if err != nil {
		closeBody(response) // http.Client ignores it
		return nil, err
	}
	if response != nil && response.Request == sent {
		response.Request = c.request
	}
	return response, nil
}

// nextBody gives the next attempt its body.
func (c *call) nextBody() error {
	request := c.request
	switch {
	case request.Body == nil || request.Body == http.NoBody:
	case c.body == nil:
		c.body = &requestBody{source: request.Body, only: request.GetBody == nil}
	case request.GetBody == nil:
		c.body = c.body.again()
	default:
		body, err := request.GetBody()
		if err != nil {
			return err
		}
		c.body = &requestBody{source: body}
	}
	return nil
}

// newFailure returns the failure of an attempt without a response.
func (c *call) newFailure(ctx context.Context, err error) error {
	switch {
	case ctx.Err() != nil: // whatever the error looks like, it is the context that has ended
		return &failure{err: err}
	case c.body.readError() != nil:
		return grpcretry.Permanent(&failure{err: err})
	default:
		return classify(err)
	}
}

// discard prepares for another attempt, which has been decided on. If the body cannot be sent again
// after all, the response stays, and the next attempt fails immediately.
func (c *call) discard() {
	if !c.body.retire() {
		c.spent = true
		return
	}
	response := c.response
	c.response = nil
	if response != nil && response.Body != nil {
		drain(response)
	}
}

// result returns what the caller gets, if Do has returned err.
func (c *call) result(err error) (*http.Response, error) {
	c.ended = true
	if c.response != nil || err == nil {
		return c.response, nil
	}
	if _, ours := err.(*grpcretry.Error); ours { //nolint:errorlint // Base's own error may hold another call's
		return nil, err
	}
	if f, ok := errors.AsType[*failure](err); ok {
		return nil, f.err
	}
	return nil, err
}

// end closes the request's body, unless Base has done so or still will. If Base has panicked, it
// will not.
func (c *call) end() {
	switch {
	case c.body != nil:
		c.body.end(!c.ended)
	case c.request.Body != nil:
		c.request.Body.Close()
	}
}
