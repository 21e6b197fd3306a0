package grpcretry

import (
	"errors"
	"reflect"
	"slices"
	"time"

	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
)

// The history of a call holds its attempts that ended without success.
type history struct {
	last     Attempt   // the attempt that ended last; no slice, because most calls have no other
	earlier  []Attempt // the attempts that ended before, in that order; only the latest, fewer than maxKept
	bytes    int       // the size of the earlier attempts' headers, trailers and messages
	failures int
	genuine  error         // the last failure that came from a server or gRPC, not from a timeout or the caller
	idle     time.Duration // the time without an attempt in flight, up to the start of the newest attempt
}

// These bound the memory of a call with very many attempts, or with large failures.
const (
	maxKept      = 1000
	maxKeptBytes = 16 << 10 // for the earlier attempts; beyond that, an attempt keeps only a short message
)

const detailsKey = "grpc-status-details-bin"

// isEmpty reports whether no attempt has ended yet.
func (h *history) isEmpty() bool { return h.last.Number == 0 }

// all returns these attempts and more, in the order of their numbers.
func (h *history) all(more ...Attempt) []Attempt {
	all := slices.Concat(h.earlier, []Attempt{h.last}, more)
	slices.SortFunc(all, func(a, b Attempt) int { return a.Number - b.Number })
	return all
}

// record adds a failed attempt.
func (h *history) record(f *failure) {
	h.keep(f.Attempt)
	h.failures++
	if !f.TimedOut && !f.isCallers() {
		h.genuine = f.Attempt.Err
	}
}

// keep adds an attempt that ended without success.
func (h *history) keep(a Attempt) {
	if !h.isEmpty() {
		h.keepEarlier(h.last)
	}
	h.last = a
}

func (h *history) keepEarlier(a Attempt) {
	if len(h.earlier) == maxKept-1 {
		h.earlier = slices.Delete(h.earlier, 0, maxKept/2)
	}
	if h.earlier == nil {
		h.earlier = make([]Attempt, 0, defaultMaxAttempts-1) // once for most calls
	}
	if h.bytes += bytesOf(&a); h.bytes > maxKeptBytes {
		a.Header, a.Trailer, a.Err = nil, nil, shortened(a.Err)
	}
	h.earlier = append(h.earlier, a)
}

// bytesOf returns roughly how many bytes a server has sent for an attempt, or for the attempts of a
// call below with which the attempt failed. A status's details are part of the trailer if the
// attempt's own server has sent them.
func bytesOf(a *Attempt) int {
	st := status.Convert(a.Err)
	bytes := len(st.Message())
	if len(a.Trailer[detailsKey]) == 0 && len(st.Details()) > 0 {
		bytes = proto.Size(st.Proto())
	}
	if reflect.TypeOf(a.Err) != statusType {
		bytes += bytesBelow(a.Err)
	}
	for _, md := range []metadata.MD{a.Header, a.Trailer} {
		for key, values := range md {
			bytes += len(key)
			for _, value := range values {
				bytes += len(value)
			}
		}
	}
	return bytes
}

// bytesBelow returns roughly how many bytes err holds besides its own message: an attempt timeout holds
// the error that it came with, and an Error the attempts of a call below.
func bytesBelow(err error) (bytes int) {
	if timeout, ok := err.(*attemptTimeoutError); ok && timeout.err != nil { //nolint:errorlint // as in shortened
		bytes = len(status.Convert(timeout.err).Message())
	}
	if below := (*Error)(nil); errors.As(err, &below) && below != nil { // a function may return a nil *Error by mistake
		for i := range below.Attempts {
			bytes += bytesOf(&below.Attempts[i])
		}
	}
	return bytes
}

// shortened returns an attempt's error with a short message and without details. An error that is
// not a status stays as it is if its message is short.
func shortened(err error) error {
	if timeout, ok := err.(*attemptTimeoutError); ok { //nolint:errorlint // the attempt's own, not one below
		return &attemptTimeoutError{timeout.timeout, shortened(timeout.err)}
	}
	st, ok := status.FromError(err)
	if err == errHedgeLost || !ok && len(st.Message()) <= maxMessage { //nolint:errorlint // its only value
		return err
	}
	return status.Error(st.Code(), cut(st.Message(), maxMessage))
}

// made returns the highest attempt number, at least number.
func (h *history) made(number int) int {
	number = max(number, h.last.Number)
	for i := range h.earlier {
		number = max(number, h.earlier[i].Number)
	}
	return number
}

// lastEnd returns when the last attempt in flight ended, which need not be the decisive one.
func (h *history) lastEnd(decisive *Attempt) time.Time {
	last := decisive.Start.Add(decisive.Duration)
	for i := range h.earlier {
		last = later(last, &h.earlier[i])
	}
	if h.isEmpty() {
		return last
	}
	return later(last, &h.last)
}

// later returns the later of t and the attempt's end.
func later(t time.Time, a *Attempt) time.Time {
	if end := a.Start.Add(a.Duration); end.After(t) {
		return end
	}
	return t
}
