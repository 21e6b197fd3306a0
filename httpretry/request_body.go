package httpretry

import (
	"io"
	"net/http"
	"sync"
)

// A requestBody is the body of one attempt's request. Base may use it on another goroutine, and after
// RoundTrip has returned.
//
// The body of a request without GetBody can be sent again as long as nothing of it was read. Until
// then, it is not closed when Base closes it.
type requestBody struct {
	source io.ReadCloser
	only   bool // there is no GetBody

	mu       sync.Mutex
	read     bool  // guarded by mu; Read was called
	closed   bool  // guarded by mu; Base has closed it
	retired  bool  // guarded by mu; another attempt is to have the source
	released bool  // guarded by mu; the source was closed, or belongs to another attempt
	last     bool  // guarded by mu; no attempt follows
	err      error // guarded by mu; why Read failed

	onClose func() // guarded by mu; called when Base closes the body; nil for nothing
}

// Read reads from the source, unless the body is closed.
func (b *requestBody) Read(p []byte) (int, error) {
	if !b.startRead() {
		return 0, http.ErrBodyReadAfterClose
	}
	n, err := b.source.Read(p)
	if err != nil && err != io.EOF {
		b.mu.Lock()
		if !b.closed {
			b.err = err
		}
		b.mu.Unlock()
	}
	return n, err
}

func (b *requestBody) startRead() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.closed || b.retired || b.released {
		return false
	}
	b.read = true
	return true
}

// Close closes the source, unless another attempt may need it.
func (b *requestBody) Close() error {
	b.mu.Lock()
	b.closed = true
	f := b.onClose
	b.onClose = nil
	b.mu.Unlock()
	if f != nil {
		f()
	}
	return b.release(false)
}

// afterClose calls f when Base closes the body: immediately if it has done so, or if there is none.
func (b *requestBody) afterClose(f func()) {
	if b == nil {
		f()
		return
	}
	b.mu.Lock()
	closed := b.closed
	if !closed {
		b.onClose = f
	}
	b.mu.Unlock()
	if closed {
		f()
	}
}

// release closes the source once, if Base has closed the body and no other attempt can need it, or
// if forced.
func (b *requestBody) release(force bool) error {
	b.mu.Lock()
	needed := b.only && !b.read && !b.last
	release := !b.released && (force || b.closed && !needed)
	b.released = b.released || release
	b.mu.Unlock()
	if !release {
		return nil
	}
	return b.source.Close()
}

// canRepeat reports whether another attempt can have a body, too. A nil body can always be repeated.
func (b *requestBody) canRepeat() bool {
	if b == nil || !b.only {
		return true
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	return !b.read
}

// retire keeps Base from reading a body that another attempt will have. It returns false if that is
// too late.
func (b *requestBody) retire() bool {
	if b == nil || !b.only {
		return true
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.retired = !b.read
	return b.retired
}

// again returns the same body for another attempt, after retire.
func (b *requestBody) again() *requestBody {
	b.mu.Lock()
	b.released = true
	b.mu.Unlock()
	return &requestBody{source: b.source, only: true}
}

// readError returns the error of the source that Base has seen, if any.
func (b *requestBody) readError() error {
	if b == nil {
		return nil
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.err
}

// end closes the source if Base has closed the body, or if the attempt that was to have it was not
// made; abandoned means that Base never will.
func (b *requestBody) end(abandoned bool) {
	b.mu.Lock()
	b.last = true
	abandoned = abandoned || b.retired
	b.mu.Unlock()
	_ = b.release(abandoned)
}
