// Package tried is what the retry interceptors and package balancer share: which endpoints a call
// has tried.
package tried

import (
	"context"
	"slices"
	"sync"
	"unique"
)

// Key is the key under which the context of an attempt holds the attempt, as an [Attempt].
type Key struct{}

// An Attempt is one try of a call.
type Attempt interface {
	// Tried returns the list of the attempt's call, nil if the call is of another method. Then a
	// call within the attempt, such as one that an interceptor makes, has the attempt's context.
	Tried(method string) *List
}

// Of returns the list of the call that picks an endpoint with a context, nil if there is none. The context
// may be nil: tests of other policies pick without one.
func Of(ctx context.Context, method string) *List {
	if ctx == nil {
		return nil
	}
	if a, ok := ctx.Value(Key{}).(Attempt); ok {
		return a.Tried(method)
	}
	return nil
}

// An Endpoint identifies a backend: two handles are equal if the channel and the addresses are.
type Endpoint = unique.Handle[Place]

// A Place is the value behind an [Endpoint].
type Place struct {
	Channel   any    // a comparable value that each ClientConn has one of
	Addresses string // an encoding of the set of addresses
}

// A List holds the endpoints that one call has tried, each once, in the order of their last attempts. All
// attempts of a call share its list. To choose an endpoint and to record it is one step, because
// attempts may run at the same time: the mutex is held for both, and all methods need it.
//
// The zero List is empty. A call has one as soon as a balancer asks for it, so it is kept small, and the
// first endpoint needs no allocation of its own.
type List struct {
	sync.Mutex
	first Endpoint // guarded by the mutex; zero if the list is empty
	more  *more    // guarded by the mutex; the endpoints after the first; nil if there was at most one endpoint
}

// more has room for as many endpoints as most calls try.
type more struct {
	endpoints []Endpoint
	space     [3]Endpoint
}

// Position returns the place of an endpoint in the order, from 0, and -1 if the call has not tried it.
func (l *List) Position(e Endpoint) int {
	if e == l.first {
		return 0
	}
	if l.more != nil {
		if i := slices.Index(l.more.endpoints, e); i >= 0 {
			return i + 1
		}
	}
	return -1
}

// Knows reports whether the call has tried an endpoint on a channel.
func (l *List) Knows(channel any) bool {
	on := func(e Endpoint) bool { return e.Value().Channel == channel }
	return l.first != (Endpoint{}) && on(l.first) || l.more != nil && slices.ContainsFunc(l.more.endpoints, on)
}

// Add records an endpoint as the most recent one.
func (l *List) Add(e Endpoint) {
	switch {
	case l.first == Endpoint{}:
		l.first = e
		return
	case l.more == nil && l.first == e:
		return
	case l.more == nil:
		l.more = &more{}
		l.more.endpoints = l.more.space[:0]
	}
	rest := append(l.more.endpoints, e)
	if l.first == e {
		l.first = rest[0]
		rest = slices.Delete(rest, 0, 1)
	} else if i := slices.Index(rest, e); i < len(rest)-1 {
		rest = slices.Delete(rest, i, i+1)
	}
	l.more.endpoints = rest
}
