package grpcretry

import (
	"sync/atomic"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/peer"
)

// This file finds out whether an attempt has certainly run nowhere, for [WithUnsentOnly]. That
// takes more than a peer that is unknown when the attempt has ended, because an interceptor below
// may drop the option that asks for the peer. gRPC itself must have reported the attempt's end:
// it calls OnFinish at the end of every call whose options it has seen, also if it could not open
// a stream, and before that it fills in the peer if it has opened one.

// A sighting is what gRPC has reported about an attempt with a witness.
type sighting struct{ atomic.Uint32 }

const (
	sawStream uint32 = iota + 1 // there was a stream, so a server may have run the method
	sawNone                     // the attempt has ended, and there was none
)

// witness appends the options by which gRPC reports whether it has opened a stream for the attempt.
// The peer has a variable of its own: something below that makes the call in its place, such as
// another Retrier on another ClientConn, overwrites the variables of the options that it is
// given, even if it reached no server in the end.
func (a *attempt) witness(opts []grpc.CallOption) []grpc.CallOption {
	p := &peer.Peer{AuthInfo: noStream{}}
	return append(opts, grpc.Peer(p), grpc.OnFinish(func(error) {
		if _, none := p.AuthInfo.(noStream); none {
			a.sighting.CompareAndSwap(0, sawNone)
		} else {
			a.sighting.Store(sawStream)
		}
	}))
}

// noStream marks a peer that has not been filled in. An empty peer would not do, because gRPC fills
// in an empty one if the connection and its credentials have nothing to say.
type noStream struct{ credentials.AuthInfo }

// hasNotRun reports whether an attempt with a witness has certainly run on no server. Something that
// is not gRPC's own ClientConn may treat options in its own way, so it proves nothing.
// Only a function's own word counts for the function.
func (a *attempt) hasNotRun() bool {
	if a.cc == nil {
		return a.fate == fateUnsent
	}
	return a.sighting.Load() == sawNone
}
