package httpretry

import (
	"bytes"
	"context"
	"io"
	"net/http"
	"reflect"
	"sync"
	"time"
)

const (
	// MaxDrained is how much is read of the body of a response before the wait for a retry, in bytes,
	// so that its connection can be used again. If there is more, the connection is closed. This runs on
	// a goroutine of its own: if the body is one of the program's own and panics, the program ends.
	MaxDrained = 64 << 10
	// MaxDrainTime is how long that reading may take. It counts towards the wait before the retry, which lasts at least until then.
	MaxDrainTime = 100 * time.Millisecond
)

// drain reads what is left of a response, within limits, and closes it. If that is all of it, the
// response keeps it, for a caller whose call ends in the wait that follows.
//
// It never takes longer than MaxDrainTime, nor than the call. A body is read and closed on a goroutine of
// its own, because some bodies' Close waits for Read. Among them is the one with which net/http
// uncompresses: it cannot even be closed by another goroutine until the compressed data has begun. It is
// not read at all, so that its connection, and the goroutine, end immediately.
func drain(ctx context.Context, response *http.Response) (all bool) {
	body := response.Body
	if isEmpty(response) {
		body.Close()
		response.Body = http.NoBody
		return true
	}
	closeOnce := sync.OnceFunc(func() { body.Close() })
	result := make(chan []byte, 1)
	go func() {
		defer close(result)
		defer closeOnce()
		if response.Uncompressed || response.ContentLength > MaxDrained {
			return
		}
		// One byte more shows the end of a body that has just the maximum.
		text, err := io.ReadAll(io.LimitReader(body, MaxDrained+1))
		if err == nil && len(text) <= MaxDrained {
			closeOnce()
			result <- text
		}
	}()
	timer := time.NewTimer(MaxDrainTime)
	defer timer.Stop()
	select {
	case text, all := <-result:
		if all {
			response.Body = io.NopCloser(bytes.NewReader(text))
		}
		return all
	case <-timer.C:
	case <-ctx.Done():
	}
	go closeOnce()
	return false
}

// isEmpty reports whether nothing can be read from a response's body, so that nobody needs to close it.
// The body of a response to HEAD, or of an HTTP/2 stream that ended with its header, has a type of
// net/http's own that holds nothing.
func isEmpty(response *http.Response) bool {
	return response.Body == nil || response.Request != nil && response.Request.Method == http.MethodHead ||
		reflect.TypeOf(response.Body).Size() == 0
}

func closeBody(response *http.Response) {
	if response != nil && response.Body != nil {
		response.Body.Close()
	}
}

// A responseBody is the body of a response whose attempt has a context of its own.
type responseBody struct {
	io.ReadCloser
	release func()
	atEOF   bool // nothing needs the context after the end of the body
}

// Read reads from the body. After its end, the attempt's context is released.
func (b *responseBody) Read(p []byte) (int, error) {
	n, err := b.ReadCloser.Read(p)
	if err != nil && (b.atEOF || err != io.EOF) {
		b.release()
	}
	return n, err
}

// Close closes the body and releases the attempt's context.
func (b *responseBody) Close() error {
	defer b.release()
	return b.ReadCloser.Close()
}

// An upgradedBody is the body of a response with status 101, which is the connection.
type upgradedBody struct {
	*responseBody
	io.Writer
}

// CloseWrite closes the connection for writing, as the body that net/http returns does.
func (b *upgradedBody) CloseWrite() error {
	if body, ok := b.responseBody.ReadCloser.(interface{ CloseWrite() error }); ok {
		return body.CloseWrite()
	}
	return http.ErrNotSupported
}
