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

// The past of a call holds its attempts that ended without success.
type past struct {
	last     Attempt   // the attempt that ended last: most calls have no other, and no memory for more
	earlier  []Attempt // the attempts that ended before it, in that order; the latest, fewer than maxKept
	bytes    int       // what servers have sent in those
	failures int
	said     error         // the last failure that came from a server or gRPC, not from a timeout or the caller
	idle     time.Duration // without an attempt in flight, before the one in flight now
}

// These bound the memory of a call with very many attempts, or with large failures.
const (
	maxKept      = 1000
	maxKeptBytes = 16 << 10 // in all attempts but the last; beyond that, an attempt keeps only a short message
)

const detailsKey = "grpc-status-details-bin"

// none reports whether no attempt has ended yet.
func (p *past) none() bool { return p.last.Number == 0 }

// all returns the attempts, and more that ended, in the order of their numbers.
func (p *past) all(more ...Attempt) []Attempt {
	all := slices.Concat(p.earlier, []Attempt{p.last}, more)
	slices.SortFunc(all, func(a, b Attempt) int { return a.Number - b.Number })
	return all
}

// record adds a failed attempt.
func (p *past) record(f *failure) {
	p.keep(f.Attempt)
	p.failures++
	if !f.TimedOut && !f.isCallers() {
		p.said = f.Attempt.Err
	}
}

func (p *past) keep(a Attempt) {
	if !p.none() {
		p.keepEarlier(p.last)
	}
	p.last = a
}

func (p *past) keepEarlier(a Attempt) {
	if len(p.earlier) == maxKept-1 {
		p.earlier = slices.Delete(p.earlier, 0, maxKept/2)
	}
	if p.earlier == nil {
		p.earlier = make([]Attempt, 0, defaultMaxAttempts-1) // once for most calls
	}
	if p.bytes += bytesOf(&a); p.bytes > maxKeptBytes {
		a.Header, a.Trailer, a.Err = nil, nil, shortened(a.Err)
	}
	p.earlier = append(p.earlier, a)
}

// bytesOf returns about how many bytes a server has sent for an attempt, or for those of a call
// below that the attempt failed with. The details of a status are also in the trailer, if the
// attempt's server has sent them.
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

// bytesBelow returns about how many bytes the attempts of a call below hold that failed with err.
func bytesBelow(err error) (bytes int) {
	if below := (*Error)(nil); errors.As(err, &below) {
		for i := range below.Attempts {
			bytes += bytesOf(&below.Attempts[i])
		}
	}
	return bytes
}

// shortened returns the error of an attempt with a short message and without details. An error
// that is no status is left as it is.
func shortened(err error) error {
	st, ok := status.FromError(err)
	if !ok || err == errHedgeLost || errors.Is(err, ErrAttemptTimeout) { //nolint:errorlint // its only value
		return err
	}
	return status.Error(st.Code(), cut(st.Message(), maxMessage))
}

// made returns the number of attempts made, one of which has the number given.
func (p *past) made(number int) int {
	number = max(number, p.last.Number)
	for i := range p.earlier {
		number = max(number, p.earlier[i].Number)
	}
	return number
}

// lastEnd returns when the last attempt in flight ended, whether or not that was decisive.
func (p *past) lastEnd(decisive *Attempt) time.Time {
	last := decisive.Start.Add(decisive.Duration)
	for i := range p.earlier {
		last = later(last, &p.earlier[i])
	}
	if p.none() {
		return last
	}
	return later(last, &p.last)
}

func later(t time.Time, a *Attempt) time.Time {
	if end := a.Start.Add(a.Duration); end.After(t) {
		return end
	}
	return t
}
