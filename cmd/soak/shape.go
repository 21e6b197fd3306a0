package main

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"math/rand/v2"
)

// This file holds what both ends know about a call from its ID: how many messages its streams have,
// and what every message contains. So both ends can check every message.

// A kind is a kind of call.
type kind uint8

const (
	unary kind = iota
	unaryOnce
	unaryHedged
	unaryLayered
	serverStream
	serverStreamOnce
	serverStreamHedged
	clientStream
	clientStreamOnce
	bidiStream
	bidiStreamOnce
	kinds
)

var kindNames = [kinds]string{
	unary: "unary", unaryOnce: "unary, unsent only", unaryHedged: "unary, hedged", unaryLayered: "unary, through two services",
	serverStream: "server stream", serverStreamOnce: "server stream, unsent only", serverStreamHedged: "server stream, hedged",
	clientStream: "client stream", clientStreamOnce: "client stream, unsent only",
	bidiStream: "bidi stream", bidiStreamOnce: "bidi stream, unsent only",
}

func (k kind) String() string { return kindNames[k] }

// once says that the method must not run twice.
func (k kind) once() bool {
	return k == unaryOnce || k == serverStreamOnce || k == clientStreamOnce || k == bidiStreamOnce
}

func (k kind) hedged() bool { return k == unaryHedged || k == serverStreamHedged }

func (k kind) unary() bool { return k <= unaryLayered }

// drawKind draws a call's kind.
func drawKind(draw *rand.Rand) kind {
	n := draw.IntN(100)
	for _, w := range [...]struct {
		kind   kind
		weight int
	}{
		{unary, 46}, {unaryOnce, 12}, {unaryHedged, 8}, {unaryLayered, 2}, {serverStream, 8}, {serverStreamOnce, 2},
		{serverStreamHedged, 4}, {clientStream, 6}, {clientStreamOnce, 2}, {bidiStream, 8},
	} {
		if n < w.weight {
			return w.kind
		}
		n -= w.weight
	}
	return bidiStreamOnce
}

// mix returns a well-mixed hash of two numbers (the finalizer of SplitMix64).
func mix(a, b uint64) uint64 {
	x := a*0x9e3779b97f4a7c15 + b + 0x632be59bd9b4e019
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	return x ^ x>>31
}

// messages returns the number of messages of a call's stream, in either direction.
func (id callID) messages() int {
	h := mix(uint64(id), 1)
	switch h % 64 {
	case 0:
		return 60 + int(h>>8%60)
	case 1:
		return 0
	}
	return 1 + int(h>>8%6)
}

// request and response say which of two sides a message comes from.
const (
	request  = 2
	response = 3
)

// payload returns the contents of a call's message number place.
func (id callID) payload(side uint64, place int) []byte {
	h := mix(uint64(id), side<<32|uint64(place))
	size := int(h % 48)
	switch h >> 8 % 256 {
	case 0:
		size = 20<<10 + int(h>>16%(60<<10)) // more than a frame, and now and then more than a window
	case 1, 2, 3, 4, 5, 6, 7:
		size = int(h >> 16 % 4096)
	}
	b := make([]byte, (size+7)&^7)
	for i := 0; i < len(b); i += 8 {
		h = h*6364136223846793005 + 1442695040888963407
		binary.LittleEndian.PutUint64(b[i:], h^h>>29)
	}
	return b[:size]
}

// checkMessage returns an error if a message is not a call's message number place.
func (id callID) checkMessage(side uint64, place int, sequence int64, payload []byte) error {
	if sequence != int64(place) {
		return fmt.Errorf("message %d of the stream is number %d", place, sequence)
	}
	if !bytes.Equal(payload, id.payload(side, place)) {
		return fmt.Errorf("message %d has other contents than were sent", place)
	}
	return nil
}

// early returns after how many messages of the request the server ends a client or bidi stream
// successfully, or -1 if it waits for all of them.
func (id callID) early() int {
	h := mix(uint64(id), 4)
	if h%16 != 0 {
		return -1
	}
	return int(h >> 8 % uint64(id.messages()+1))
}
