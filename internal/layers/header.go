package layers

import (
	"context"
	"maps"
	"strconv"

	"google.golang.org/grpc/metadata"

	"github.com/grpcretry/grpcretry/internal/wire"
)

// MarkKey is the request header that has a [Mark].
const MarkKey = "grpcretry-caller-retries"

// A Mark is what a request says about the attempts made at its work before, in [MarkKey].
type Mark uint8

// The Marks of requests. A retry without one comes from a client that is not this library's, such as
// gRPC itself, and cannot know what became of the attempts before.
const (
	Unmarked Mark = iota
	Answered      // "0": all earlier attempts got a response
	Limited       // "1": an earlier attempt did not, or this is work for a request of which one did not
)

// MarkOf returns the Mark in a request's values of [MarkKey]. A value without a meaning counts as "1", and
// so does one of several.
func MarkOf(values ...string) Mark {
	mark := Unmarked
	for _, value := range values {
		if value != Answered.String() {
			return Limited
		}
		mark = Answered
	}
	return mark
}

// String returns the header's value.
func (m Mark) String() string {
	if m == Answered {
		return "0"
	}
	return "1"
}

// A Header is what the server must know about an attempt: the number of previous attempts
// (gRFC A6 #exposed-retry-metadata), and whether the server's own calls are to make one attempt.
type Header struct {
	Previous int  // attempts before this one
	Limited  bool // the server's own calls are to make one attempt; false for a first attempt means nothing
}

// Mark returns the mark in a header that says something.
func (h Header) Mark() Mark {
	if h.Limited {
		return Limited
	}
	return Answered
}

// In returns ctx with the header in its outgoing metadata. The caller's own values are replaced: a
// server could not interpret several. A header that says nothing costs nothing.
func (h Header) In(ctx context.Context) context.Context {
	if h == (Header{}) {
		return ctx
	}
	with, added := h.Added(ctx)
	if added != nil {
		return metadata.NewOutgoingContext(ctx, h.Metadata())
	}
	return with
}

// Added is In, except that it returns ctx itself if there would be no other outgoing metadata than h, which all calls share. A context
// that is made anyway can then have the values of added before those of ctx: that costs nothing, where gRPC makes two allocations.
func (h Header) Added(ctx context.Context) (with context.Context, added *Shared) {
	md, others := metadata.FromOutgoingContext(ctx) // a copy
	switch {
	case others:
		maps.Copy(md, h.Metadata())
		return metadata.NewOutgoingContext(ctx, md), nil
	case h.Previous < len(sharedHeaders):
		return ctx, h.shared()
	default:
		return metadata.NewOutgoingContext(ctx, h.newMetadata()), nil
	}
}

// Metadata returns the header; it must not be changed.
func (h Header) Metadata() metadata.MD {
	if h.Previous >= len(sharedHeaders) {
		return h.newMetadata()
	}
	return h.shared().metadata
}

// shared returns the header that all calls share, for fewer than len(sharedHeaders) previous attempts.
func (h Header) shared() *Shared {
	if h.Limited {
		return &sharedHeaders[h.Previous].limited
	}
	return &sharedHeaders[h.Previous].plain
}

func (h Header) newMetadata() metadata.MD {
	md := metadata.MD{}
	if h.Previous > 0 {
		md.Set(wire.PreviousAttemptsKey, strconv.Itoa(h.Previous))
	}
	if h != (Header{}) {
		md.Set(MarkKey, h.Mark().String())
	}
	return md
}

// A Shared is a header that all calls share.
type Shared struct {
	metadata metadata.MD
	outgoing context.Context // has only that
}

// Value returns the value that a context with only the header has for key. It is nil if there is none, or no header.
func (s *Shared) Value(key any) any {
	if s == nil {
		return nil
	}
	return s.outgoing.Value(key)
}

// sharedHeaders are indexed by the number of previous attempts.
var sharedHeaders = func() (all [8]struct{ plain, limited Shared }) {
	share := func(h Header) Shared {
		md := h.newMetadata()
		return Shared{md, metadata.NewOutgoingContext(context.Background(), md)}
	}
	for n := range all {
		all[n].plain, all[n].limited = share(Header{Previous: n}), share(Header{Previous: n, Limited: true})
	}
	return all
}()

// A RetriedBy says which service retries the work of a request, as seen by the server that handles it.
type RetriedBy string

// The values are those of telemetry.AttrRetriedBy.
const (
	Nobody        RetriedBy = ""
	Caller        RetriedBy = "caller"         // the request is a retry
	EarlierCaller RetriedBy = "earlier_caller" // the request was sent for one that is
)

// RetriedByOf returns which service retries the request that is handled in ctx, and the request's mark.
func RetriedByOf(ctx context.Context) (RetriedBy, Mark) {
	mark := MarkOf(metadata.ValueFromIncomingContext(ctx, MarkKey)...)
	switch {
	case wire.PreviousAttempts(ctx) > 0:
		return Caller, mark
	case mark == Limited:
		return EarlierCaller, mark
	default:
		return Nobody, mark
	}
}
