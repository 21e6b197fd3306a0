package httpretry

import (
	"io"
	"net/http"
	"sync"
	"time"
)

const (
	// MaxDrained is how much is read of the body of a response that is discarded for a retry, in
	// bytes, so that its connection can be used again. If there is more, the connection is closed.
	MaxDrained = 64 << 10
	// MaxDrainTime is how long that reading may take. It is a part of the wait before the retry.
	MaxDrainTime = 100 * time.Millisecond
)

// drain reads what is left of a response that nobody will use, within limits, and closes it.
func drain(response *http.Response) {
	closeOnce := sync.OnceFunc(func() { response.Body.Close() })
	defer closeOnce()
	if response.ContentLength > MaxDrained {
		return
	}
	timer := time.AfterFunc(MaxDrainTime, closeOnce)
	defer timer.Stop()
	// One byte more shows the end of a body that has just the maximum.
	_, _ = io.CopyN(io.Discard, response.Body, MaxDrained+1)
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
